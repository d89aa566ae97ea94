//! Sources of the queue's own making: a branch that keeps a bare staged snapshot, and one that holds the inverse
//! of a landed request.
//!
//! Whoever asks for one writes its branch before the request. Between the two the branch belongs to nobody, and
//! a tick may take it away; so a waiting request's missing branch is set again ([`super::pins`]) and the request
//! rests until it is there. Names carry the queue's id (rule R7).

use mergeberg_kernel::admission::{SourceKind, WapIds};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{QueueId, RefName, RequestId, SnapshotId};
use mergeberg_kernel::lineage::{Line, PUBLISHED_WAP_ID, SnapshotFact, WAP_ID};

use super::pins::{PIN_LIFE_MS, age_of};

/// What every ref name of a queue begins with.
pub const OWN_REFS: &str = "mergeberg/";

fn staged_prefix(queue: &QueueId) -> String {
    format!("{OWN_REFS}staged/{queue}/")
}

fn revert_prefix(queue: &QueueId) -> String {
    format!("{OWN_REFS}revert/{queue}/")
}

/// The branch that keeps a bare staged snapshot.
pub fn staged_branch(queue: &QueueId, snapshot: SnapshotId) -> RefName {
    RefName(format!("{}{snapshot}", staged_prefix(queue)))
}

/// The branch with the inverse of a landed request; attempts count from 1.
pub fn revert_branch(queue: &QueueId, request: RequestId, attempt: u32) -> RefName {
    RefName(format!("{}{request}-{attempt}", revert_prefix(queue)))
}

pub fn kind_of(queue: &QueueId, source: &RefName) -> SourceKind {
    if source.as_str().starts_with(&staged_prefix(queue)) {
        SourceKind::Staged
    } else if source.as_str().starts_with(&revert_prefix(queue)) {
        SourceKind::Revert
    } else {
        SourceKind::Branch
    }
}

/// Such a branch with explicit retention (rules R2, R3): it lives as long as a pin, and so do the snapshots on it
/// that the target does not have.
pub fn kept(facts: &TableFacts, name: &RefName, at: SnapshotId, target: &RefName, now_ms: i64) -> RefFact {
    let line = facts.snapshots.line(facts.head(target));
    let own = facts.snapshots.chain(at).ids.into_iter().take_while(|id| !line.contains(*id)).count();
    let life_ms = PIN_LIFE_MS.saturating_add(age_of(facts, at, now_ms));
    RefFact {
        name: name.clone(),
        snapshot_id: at,
        kind: RefKind::Branch {
            min_snapshots_to_keep: i32::try_from(own.max(1)).ok(),
            max_snapshot_age_ms: Some(life_ms),
        },
        max_ref_age_ms: Some(life_ms),
    }
}

/// The branch of a request that is not there though the snapshot is: somebody took it away between being
/// written and being enqueued.
pub(super) fn lacks_its_branch(
    facts: &TableFacts,
    queue: &QueueId,
    source: &RefName,
    pinned: SnapshotId,
) -> bool {
    kind_of(queue, source).is_own() && !facts.refs.contains_key(source) && facts.snapshots.contains(pinned)
}

/// WAP id of a staged write.
pub fn wap_id(snapshot: &SnapshotFact) -> Option<&str> {
    snapshot.summary.get(WAP_ID).map(String::as_str).filter(|id| !id.is_empty())
}

/// The newest snapshot of a line that was written or published under a WAP id, but for those that `is_own`.
pub fn publisher_of(
    facts: &TableFacts,
    line: &Line,
    wap: &str,
    is_own: impl Fn(SnapshotId) -> bool,
) -> Option<SnapshotId> {
    line.ids().iter().copied().find(|id| {
        let Some(snapshot) = facts.snapshots.get(*id) else { return false };
        let published = snapshot.summary.get(PUBLISHED_WAP_ID).map(String::as_str);
        (published == Some(wap) || wap_id(snapshot) == Some(wap)) && !is_own(*id)
    })
}

/// WAP ids that a source would publish, given its snapshots that are not on the target's line, newest first.
pub(super) fn wap_ids(
    facts: &TableFacts,
    line: &Line,
    source: &[SnapshotId],
    published: &std::collections::HashMap<SnapshotId, SnapshotId>,
) -> WapIds {
    let mut ids = WapIds::default();
    for id in source.iter().filter(|id| !published.contains_key(id)) {
        let Some(wap) = facts.snapshots.get(*id).and_then(wap_id) else { continue };
        if ids.own.insert(wap.to_owned()) && ids.taken.is_none() {
            let is_own = |at| source.iter().any(|own| published.get(own) == Some(&at));
            ids.taken = publisher_of(facts, line, wap, is_own).map(|at| (wap.to_owned(), at));
        }
    }
    ids
}
