//! Refs that keep what waiting requests need (rule R2).
//!
//! Another engine's expiry knows nothing of the queue. A request that has waited longer than a bound gets
//! refs on its pinned head and on its base. Its landing removes them; those of requests that ended otherwise
//! go with the next commit that changes pins. Many pins go in one commit. A pin is a ref of our own namespace and
//! queue (rule R7): the base that one holds was proved to be the base when it was set.
//!
//! Sources of the queue's own making ([`super::own_sources`]) are looked after here as well: one that no open
//! request names goes, one that a waiting request lacks is set again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{QueueId, RefName, RequestId, SnapshotId};
use mergeberg_kernel::lineage::{BaseFinding, Line};

use super::context::{Lane, Worker};
use super::error::WorkerError;
use super::own_sources::{OWN_REFS, kept, kind_of, lacks_its_branch};
use crate::ledger::Kept;
use crate::table::catalog::CommitOutcome;
use crate::table::loaded::LoadedTable;

/// A request that waits longer than this is pinned, in milliseconds.
pub const PIN_AFTER_MS: i64 = 60 * 1000;
/// Life of a pin, in milliseconds: should the ledger be lost, expiry removes it some day (rule R3).
pub(super) const PIN_LIFE_MS: i64 = 90 * 24 * 3600 * 1000;

/// The refs that hold a request's head and base.
pub(super) struct PinNames {
    pub head: RefName,
    pub base: RefName,
}

pub(super) fn pin_names(queue: &QueueId, request: RequestId) -> PinNames {
    let prefix = prefix(queue);
    PinNames { head: RefName(format!("{prefix}{request}")), base: RefName(format!("{prefix}{request}-base")) }
}

/// The ref that holds a snapshot of a table which a request's recorded operation reads.
pub(super) fn input_pin_name(queue: &QueueId, request: RequestId, input: SnapshotId) -> RefName {
    RefName(format!("{}{request}-input-{input}", prefix(queue)))
}

/// Holds one snapshot, and lives long (rule R3).
pub(super) fn pin(facts: &TableFacts, name: RefName, at: SnapshotId, now_ms: i64) -> RefFact {
    RefFact {
        name,
        snapshot_id: at,
        kind: RefKind::Branch { min_snapshots_to_keep: Some(1), max_snapshot_age_ms: Some(PIN_LIFE_MS) },
        max_ref_age_ms: Some(PIN_LIFE_MS.saturating_add(age_of(facts, at, now_ms))),
    }
}

fn prefix(queue: &QueueId) -> String {
    format!("mergeberg/pin/{queue}/")
}

/// The base that was pinned for a request, if one was.
pub(super) fn pinned_base(facts: &TableFacts, queue: &QueueId, request: RequestId) -> Option<SnapshotId> {
    facts.head(&pin_names(queue, request).base)
}

/// The pins of a request that a table has.
pub(super) fn pins_of<'a>(
    facts: &'a TableFacts,
    queue: &QueueId,
    request: RequestId,
) -> impl Iterator<Item = RefName> + use<'a> {
    let PinNames { head, base } = pin_names(queue, request);
    [head, base].into_iter().filter(|name| facts.refs.contains_key(name))
}

impl Worker {
    /// Sets and removes pins of a lane's table, in one commit at most. The table as it is afterwards.
    pub(super) async fn keep_pins(
        &self,
        lane: &Lane,
        table: Arc<LoadedTable>,
        waiting: &[Kept],
    ) -> Result<Arc<LoadedTable>, WorkerError> {
        let facts = &table.facts;
        let queue = self.ledger.queue_id();
        let now_ms = self.now_ms();
        let existing: BTreeSet<&RefName> =
            facts.refs.keys().filter(|name| name.as_str().starts_with(&prefix(queue))).collect();
        let wait_long = |row: &&Kept| now_ms.saturating_sub(row.enqueued_at_ms) >= PIN_AFTER_MS;
        let mut new: BTreeMap<RefName, SnapshotId> = BTreeMap::new();
        // Walked once, not for each request.
        let mut line: Option<Line> = None;
        for row in waiting.iter().filter(wait_long) {
            let names = pin_names(queue, row.id);
            if !existing.contains(&names.head) && facts.snapshots.contains(row.pinned) {
                new.insert(names.head, row.pinned);
            }
            if existing.contains(&names.base) {
                continue;
            }
            let line = line.get_or_insert_with(|| facts.snapshots.line(facts.head(&lane.target)));
            if let BaseFinding::Common(base) = facts.snapshots.base(row.pinned, line, &[])
                && base != row.pinned
            {
                new.insert(names.base, base);
            }
        }
        let stale = self.pins_of_ended(lane, &existing).await?;
        let lacks = |row: &&Kept| lacks_its_branch(facts, queue, &row.source, row.pinned);
        let lacking: Vec<&Kept> = waiting.iter().filter(lacks).collect();
        let own_sources: Vec<&RefName> =
            facts.refs.keys().filter(|name| kind_of(queue, name).is_own()).collect();
        let stale_sources = self.nobodys(lane, own_sources).await?;
        if new.is_empty() && stale.is_empty() && lacking.is_empty() && stale_sources.is_empty() {
            return Ok(table);
        }
        let mut requirements = vec![Requirement::TableUuid(lane.uuid.clone())];
        let mut updates = Vec::new();
        let mut set: Vec<RefFact> = new.into_iter().map(|(name, id)| pin(facts, name, id, now_ms)).collect();
        for row in lacking {
            if set.iter().all(|other| other.name != row.source) {
                set.push(kept(facts, &row.source, row.pinned, &lane.target, now_ms));
            }
        }
        for reference in set {
            let name = reference.name.clone();
            requirements.push(Requirement::RefAt { name, at: None, role: RefRole::NewName });
            updates.push(Update::SetRef(reference));
        }
        for name in stale.into_iter().chain(stale_sources) {
            requirements.push(Requirement::RefAt {
                name: name.clone(),
                at: facts.head(name),
                role: RefRole::Source,
            });
            updates.push(Update::RemoveRef(name.clone()));
        }
        match self.catalog.commit(&table, &requirements, updates).await {
            CommitOutcome::Landed(table) => Ok(table),
            CommitOutcome::Refused(error) => Err(error.into()),
            // Not urgent: the next tick tries again, on the table as it is then.
            outcome => {
                tracing::debug!("pins were not set: {outcome:?}");
                Ok(self.catalog.load(&lane.table).await?)
            }
        }
    }
}

impl Worker {
    /// Waiting requests of a lane that refs may have to keep. To be read before the table, as everything that is
    /// compared with it.
    pub(super) async fn to_keep(&self, lane: &Lane) -> Result<Vec<Kept>, WorkerError> {
        let before_ms = self.now_ms().saturating_sub(PIN_AFTER_MS);
        Ok(self.ledger.to_keep(&lane.uuid, &lane.target, before_ms, OWN_REFS).await?)
    }

    /// Those of the pins whose request has ended.
    async fn pins_of_ended<'a>(
        &self,
        lane: &Lane,
        pins: &BTreeSet<&'a RefName>,
    ) -> Result<Vec<&'a RefName>, WorkerError> {
        if pins.is_empty() {
            return Ok(Vec::new());
        }
        let (queue, open) = (self.ledger.queue_id(), self.ledger.open_request_ids(&lane.uuid).await?);
        Ok(pins.iter().copied().filter(|name| !belongs_to_one_of(name, queue, &open)).collect())
    }

    /// Those of the names that no open request of the lane's table has for its source.
    async fn nobodys<'a>(
        &self,
        lane: &Lane,
        names: Vec<&'a RefName>,
    ) -> Result<Vec<&'a RefName>, WorkerError> {
        if names.is_empty() {
            return Ok(names);
        }
        let open = self.ledger.open_sources(&lane.uuid).await?;
        Ok(names.into_iter().filter(|name| !open.contains(*name)).collect())
    }
}

/// Rule R3: the age of a ref counts from its snapshot's timestamp, so that age is added to its life.
pub(super) fn age_of(facts: &TableFacts, id: SnapshotId, now_ms: i64) -> i64 {
    let written_ms = facts.snapshots.get(id).map_or(now_ms, |snapshot| snapshot.timestamp_ms);
    now_ms.saturating_sub(written_ms).max(0)
}

fn belongs_to_one_of(name: &RefName, queue: &QueueId, open: &BTreeSet<RequestId>) -> bool {
    let Some(rest) = name.as_str().strip_prefix(&prefix(queue)) else { return true };
    let digits = rest.strip_suffix("-base").unwrap_or(rest);
    match digits.parse() {
        Ok(id) => open.contains(&RequestId(id)),
        // Of a table that another's request reads (`input_pins`), or not of our making: left alone.
        Err(_) => true,
    }
}
