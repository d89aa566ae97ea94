//! Enqueue of a bare staged snapshot: one that a writer committed without a ref (write-audit-publish, or a
//! principal that may add snapshots and nothing else).
//!
//! Any expiry may take a snapshot that no ref names, so it is kept by a branch of the queue's own before the
//! request is written; the landing, or whoever tidies up after another end, lets go of it.

use std::collections::{BTreeSet, HashSet};

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, TableFacts};
use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName};
use mergeberg_kernel::lineage::{Line, PUBLISHED_WAP_ID};
use mergeberg_kernel::reason::ReasonCode;

use super::enqueue::{EnqueueArgs, EnqueueContext, check_length, check_target, key_conflict, offer};
use super::enqueue::{Needed, resolve, usable_table};
use crate::error::UserError;
use crate::ledger::{Enqueued, RequestRow};
use crate::table::catalog::{Catalog, CommitOutcome};
use crate::table::loaded::LoadedTable;
use crate::worker::own_sources::{OWN_REFS, kept, publisher_of, staged_branch, wap_id};

/// How often the keeping branch is asked for because something else was committed first.
const MAX_COMMIT_TRIES: u32 = 20;

/// Which staged snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Staged {
    Snapshot(SnapshotId),
    /// The one that carries this `wap.id`.
    Wap(String),
}

/// What is to be merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagedArgs {
    pub table: TableName,
    pub staged: Staged,
    pub target: RefName,
    /// `None`: by the prefix of the queue's own branch, `mergeberg/staged/`.
    pub class: Option<String>,
    pub idempotency_key: Option<String>,
    pub principal: Principal,
}

/// Keeps the snapshot, then enqueues it. The same command again is the same request.
pub async fn enqueue_staged(context: EnqueueContext<'_>, args: &StagedArgs) -> Result<Enqueued, UserError> {
    let StagedArgs { table: name, staged, target, class, idempotency_key, principal } = args;
    if let Some(key) = idempotency_key {
        check_length("the idempotency key", key, super::enqueue::MAX_KEY_BYTES)?;
    }
    for _ in 0..MAX_COMMIT_TRIES {
        let table = usable_table(&context, name, Needed::History).await?;
        let facts = &table.facts;
        // What was enqueued under the key may have landed, and its snapshot be gone.
        if let Some(key) = idempotency_key
            && let Some(row) = context.ledger.request_by_key(key).await?
        {
            let same = is_same(facts, &row, staged, target, context.ledger.queue_id());
            return if same { Ok(Enqueued::Existing(row)) } else { Err(key_conflict(Some(key), &row)) };
        }
        check_target(facts, target)?;
        let snapshot = find(facts, target, staged)?;
        let branch = staged_branch(context.ledger.queue_id(), snapshot);
        let args = EnqueueArgs {
            table: name.clone(),
            source: branch.clone(),
            target: target.clone(),
            snapshot: Some(snapshot),
            class: class.clone(),
            idempotency_key: idempotency_key.clone(),
            principal: principal.clone(),
        };
        // Asked before anything is written, on the table as it will be.
        let mut with_branch = facts.clone();
        let keep = kept(facts, &branch, snapshot, target, context.now_ms);
        let missing = with_branch.refs.insert(branch.clone(), keep.clone()).is_none();
        if !missing && facts.head(&branch) != Some(snapshot) {
            let text = format!("'{branch}' is not at the snapshot that it is there to keep");
            return Err(UserError::new(ReasonCode::NameTaken, text)
                .with_next("find out who moved it, and remove it once it holds nothing that is needed"));
        }
        let request = resolve(&with_branch, &context.policies.for_table(name), &args)?;
        if missing && !keep_it(context.catalog, &table, keep, target).await? {
            continue;
        }
        return match context.ledger.enqueue(&request, context.now_ms).await? {
            Enqueued::KeyConflict(other) => Err(key_conflict(idempotency_key.as_deref(), &other)),
            done => Ok(done),
        };
    }
    let text = format!("{name} was written {MAX_COMMIT_TRIES} times while the snapshot was to be kept");
    Err(UserError::new(ReasonCode::CatalogUnavailable, text)
        .with_next("try again when fewer writers are at work"))
}

/// Sets the keeping branch. `false`: look again; that also tells whether a commit without an answer applied.
async fn keep_it(
    catalog: &dyn Catalog,
    table: &LoadedTable,
    keep: RefFact,
    target: &RefName,
) -> Result<bool, UserError> {
    let requirements = [
        Requirement::TableUuid(table.facts.uuid.clone()),
        Requirement::RefAt { name: keep.name.clone(), at: None, role: RefRole::NewName },
        // A second ref requirement: one server mishandles a single null one (rule L7).
        Requirement::RefAt { name: target.clone(), at: table.facts.head(target), role: RefRole::Target },
    ];
    match catalog.commit(table, &requirements, vec![Update::SetRef(keep)]).await {
        CommitOutcome::Landed(_) => Ok(true),
        CommitOutcome::Refused(error) => Err(error.into()),
        CommitOutcome::PointerMoved
        | CommitOutcome::HeadMoved
        | CommitOutcome::SourceMoved(_)
        | CommitOutcome::NameTaken(_)
        | CommitOutcome::TableChanged(_)
        | CommitOutcome::Fenced
        | CommitOutcome::Unexplained(_)
        | CommitOutcome::Unknown(_) => Ok(false),
    }
}

/// Does the request of a key publish what is asked for now? The snapshot behind a WAP id may have been expired
/// since; then the target's own snapshots say which it was.
fn is_same(
    facts: &TableFacts,
    row: &RequestRow,
    staged: &Staged,
    target: &RefName,
    queue: &mergeberg_kernel::ids::QueueId,
) -> bool {
    let snapshots = match staged {
        Staged::Snapshot(id) => BTreeSet::from([*id]),
        Staged::Wap(wap) => facts
            .snapshots
            .iter()
            .filter_map(|snapshot| {
                let published = snapshot.summary.get(PUBLISHED_WAP_ID) == Some(wap);
                if published {
                    snapshot.source_snapshot_id()
                } else {
                    (wap_id(snapshot) == Some(wap)).then_some(snapshot.id)
                }
            })
            .collect(),
    };
    row.table_uuid == facts.uuid
        && row.target == *target
        && snapshots.contains(&row.pinned)
        && row.source == staged_branch(queue, row.pinned)
}

/// The pure part: the one snapshot that is meant, or why it cannot be enqueued.
fn find(facts: &TableFacts, target: &RefName, staged: &Staged) -> Result<SnapshotId, UserError> {
    let line = facts.snapshots.line(facts.head(target));
    let id = match staged {
        Staged::Snapshot(id) => *id,
        Staged::Wap(wap) => by_wap_id(facts, target, &line, wap)?,
    };
    let Some(snapshot) = facts.snapshots.get(id) else {
        return Err(UserError::new(
            ReasonCode::SnapshotNotFound,
            format!("{} has no snapshot {id}", facts.name),
        )
        .with_next("look whether it was expired, or staged on another table"));
    };
    if line.contains(id) {
        return Err(UserError::new(
            ReasonCode::AlreadyPublished,
            format!("snapshot {id} is in the history of '{target}' already"),
        ));
    }
    if let Some(wap) = wap_id(snapshot) {
        refuse_published(facts, target, &line, wap)?;
    }
    if let Some(branch) = holder(facts, id) {
        return Err(UserError::new(
            ReasonCode::NotStaged,
            format!("branch '{branch}' holds snapshot {id}, so it is no bare staged one"),
        )
        .with_next(format!("enqueue the branch: --source '{branch}' --snapshot {id}")));
    }
    Ok(id)
}

fn by_wap_id(facts: &TableFacts, target: &RefName, line: &Line, wap: &str) -> Result<SnapshotId, UserError> {
    refuse_published(facts, target, line, wap)?;
    let mut found: Vec<SnapshotId> =
        facts.snapshots.iter().filter(|s| wap_id(s) == Some(wap)).map(|s| s.id).collect();
    found.sort();
    match found.as_slice() {
        [one] => Ok(*one),
        [] => {
            let known: BTreeSet<&str> =
                facts.snapshots.iter().filter(|s| !line.contains(s.id)).filter_map(wap_id).collect();
            let next = offer(wap, known.into_iter(), "nothing is staged under a WAP id in this table");
            let text = format!("no snapshot of {} has WAP id '{wap}'", facts.name);
            Err(UserError::new(ReasonCode::SnapshotNotFound, text).with_next(next))
        }
        several => {
            let ids: Vec<String> = several.iter().map(ToString::to_string).collect();
            let text = format!("{} snapshots have WAP id '{wap}': {}", several.len(), ids.join(", "));
            Err(UserError::new(ReasonCode::WapIdAmbiguous, text))
        }
    }
}

/// Java publishes a WAP id once, whatever snapshot carries it (`WapUtil.validateWapPublish`).
fn refuse_published(facts: &TableFacts, target: &RefName, line: &Line, wap: &str) -> Result<(), UserError> {
    match publisher_of(facts, line, wap, |_| false) {
        None => Ok(()),
        Some(at) => Err(UserError::new(
            ReasonCode::AlreadyPublished,
            format!("WAP id '{wap}' is on '{target}' already, as snapshot {at}"),
        )),
    }
}

/// A branch, not of a queue's making, in whose history the snapshot is.
fn holder(facts: &TableFacts, id: SnapshotId) -> Option<&RefName> {
    let mut seen = HashSet::new();
    let branches = facts.refs.values().filter(|r| r.is_branch() && !r.name.as_str().starts_with(OWN_REFS));
    for branch in branches {
        let mut next = Some(branch.snapshot_id);
        while let Some(at) = next.filter(|at| seen.insert(*at)) {
            if at == id {
                return Some(&branch.name);
            }
            next = facts.snapshots.get(at).and_then(|s| s.parent);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::lineage::{SnapshotFact, WAP_ID};

    use super::super::testing::facts;
    use super::*;

    /// Staged on main's head: 40 under `audit-4`, 50 without an id.
    fn staged_facts() -> TableFacts {
        let mut facts = facts();
        let like = facts.snapshots.get(SnapshotId(30)).unwrap().clone();
        let named = |wap: &str| std::collections::BTreeMap::from([(WAP_ID.to_owned(), wap.to_owned())]);
        facts.snapshots.insert(SnapshotFact {
            id: SnapshotId(40),
            summary: named("audit-4"),
            ..like.clone()
        });
        facts.snapshots.insert(SnapshotFact { id: SnapshotId(50), ..like });
        facts
    }

    fn found(facts: &TableFacts, staged: Staged) -> Result<SnapshotId, ReasonCode> {
        find(facts, &RefName::main(), &staged).map_err(|error| error.code)
    }

    fn wap(id: &str) -> Staged {
        Staged::Wap(id.to_owned())
    }

    #[test]
    fn a_staged_snapshot_is_found_by_its_id_and_by_its_wap_id() {
        let facts = staged_facts();
        assert_eq!(found(&facts, Staged::Snapshot(SnapshotId(50))), Ok(SnapshotId(50)));
        assert_eq!(found(&facts, Staged::Snapshot(SnapshotId(40))), Ok(SnapshotId(40)));
        assert_eq!(found(&facts, wap("audit-4")), Ok(SnapshotId(40)));
    }

    #[test]
    fn what_is_no_bare_staged_snapshot_is_refused_with_the_reason() {
        let facts = staged_facts();
        let by_id = |id| found(&facts, Staged::Snapshot(SnapshotId(id)));
        assert_eq!(by_id(99), Err(ReasonCode::SnapshotNotFound));
        assert_eq!(by_id(20), Err(ReasonCode::AlreadyPublished));
        assert_eq!(by_id(10), Err(ReasonCode::AlreadyPublished));
        assert_eq!(by_id(30), Err(ReasonCode::NotStaged));
        let error = find(&facts, &RefName::main(), &wap("audit-5")).unwrap_err();
        assert_eq!(error.code, ReasonCode::SnapshotNotFound);
        assert!(error.next.starts_with("did you mean 'audit-4'?"), "{}", error.next);
    }

    #[test]
    fn two_snapshots_under_one_wap_id_are_told_apart_by_the_caller() {
        let mut facts = staged_facts();
        let like = facts.snapshots.get(SnapshotId(40)).unwrap().clone();
        facts.snapshots.insert(SnapshotFact { id: SnapshotId(60), ..like });
        assert_eq!(found(&facts, wap("audit-4")), Err(ReasonCode::WapIdAmbiguous));
        assert_eq!(found(&facts, Staged::Snapshot(SnapshotId(60))), Ok(SnapshotId(60)));
    }

    #[test]
    fn rule_c9_a_wap_id_is_published_once_whatever_snapshot_carries_it() {
        for key in [WAP_ID, PUBLISHED_WAP_ID] {
            let mut facts = staged_facts();
            let mut head = facts.snapshots.get(SnapshotId(20)).unwrap().clone();
            head.summary.insert(key.to_owned(), "audit-4".to_owned());
            facts.snapshots.insert(head);
            assert_eq!(found(&facts, wap("audit-4")), Err(ReasonCode::AlreadyPublished), "{key}");
            let by_id = Staged::Snapshot(SnapshotId(40));
            assert_eq!(found(&facts, by_id), Err(ReasonCode::AlreadyPublished), "{key}");
        }
    }
}
