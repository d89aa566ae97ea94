//! Refs on the tables that a waiting request's recorded operations read (rule R2).
//!
//! A record names its inputs by snapshot. Those are snapshots of other tables, whose expiry knows nothing of the queue;
//! once one is gone, the request can only be refused (`input-missing`). So a request that has waited longer than a bound
//! gets a ref on each, which goes when the request has ended, however it ended. A table that the worker may not write is
//! told once and left alone: the request loses nothing by it that it had.
//!
//! The ledger knows each ref before it is set: the tables have no lanes of their own in which one could be found again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableName};
use mergeberg_kernel::lineage::Line;
use mergeberg_kernel::record::{PinnedInput, RecordFinding};

use super::context::{Lane, Worker, lock};
use super::error::WorkerError;
use super::pins::{PIN_AFTER_MS, input_pin_name, pin};
use crate::ledger::{InputPin, Kept};
use crate::table::catalog::{CatalogError, CommitOutcome};
use crate::table::loaded::LoadedTable;

/// Requests whose inputs were seen to, so that nobody reads their records again at every look. Beyond this many all are
/// forgotten, which costs a look at their tables.
const MAX_SEEN: usize = 20_000;

/// A table that could not be read or written is left alone for so long, in milliseconds.
const REST_MS: i64 = 60 * 1000;

/// What this process knows of inputs.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Requests whose inputs were seen to.
    requests: BTreeSet<RequestId>,
    /// Tables that are left alone until then.
    resting: BTreeMap<TableName, i64>,
}

/// What became of one table's refs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    /// Somebody else wrote the table, or it could not be reached: tried again later.
    Again,
}

/// The refs that one table is to get.
type Wanted = BTreeMap<RefName, (RequestId, PinnedInput)>;

impl Worker {
    /// Holds what the recorded operations of requests read that have waited for long. Only trouble of the ledger is an
    /// error.
    pub(super) async fn keep_inputs(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        waiting: &[Kept],
    ) -> Result<(), WorkerError> {
        let now_ms = self.now_ms();
        let unseen = |row: &&Kept| {
            now_ms.saturating_sub(row.enqueued_at_ms) >= PIN_AFTER_MS
                && !lock(&self.input_pins).requests.contains(&row.id)
        };
        let unseen: Vec<&Kept> = waiting.iter().filter(unseen).collect();
        if unseen.is_empty() {
            return Ok(());
        }
        let facts = &table.facts;
        let line = facts.snapshots.line(facts.head(&lane.target));
        let mut seen: BTreeSet<RequestId> = BTreeSet::new();
        let mut by_table: BTreeMap<TableName, Wanted> = BTreeMap::new();
        for row in unseen {
            let (inputs, whole) = self.inputs_of(facts, row, &line).await?;
            if whole {
                seen.insert(row.id);
            }
            for input in inputs {
                let name = input_pin_name(self.ledger.queue_id(), row.id, input.snapshot_id);
                by_table.entry(input.table.clone()).or_default().insert(name, (row.id, input));
            }
        }
        for (name, wanted) in by_table {
            if self.hold(&name, &wanted).await? == Outcome::Again {
                for (request, _) in wanted.values() {
                    seen.remove(request);
                }
            }
        }
        let known = &mut lock(&self.input_pins).requests;
        if known.len() > MAX_SEEN {
            known.clear();
        }
        known.extend(seen);
        Ok(())
    }

    /// The inputs of what a request would run again. `false`: a record may still come into the ledger.
    async fn inputs_of(
        &self,
        facts: &TableFacts,
        row: &Kept,
        line: &Line,
    ) -> Result<(Vec<PinnedInput>, bool), WorkerError> {
        let (mut inputs, mut whole) = (Vec::new(), true);
        let own = facts.snapshots.chain(row.pinned).ids.into_iter().take_while(|id| !line.contains(*id));
        for snapshot in own.filter_map(|id| facts.snapshots.get(id)) {
            let mut found = RecordFinding::of_summary(&snapshot.summary, &facts.name);
            if let RecordFinding::Named { .. } = &found {
                match self.named_record(facts, &found).await? {
                    Some(record) => found = record,
                    None => whole = false,
                }
            }
            let record = found.found().filter(|record| record.operation.is_run_again());
            inputs.extend(record.into_iter().flat_map(|record| record.inputs.values().cloned()));
        }
        Ok((inputs, whole))
    }

    /// Sets refs on one table.
    async fn hold(&self, name: &TableName, wanted: &Wanted) -> Result<Outcome, WorkerError> {
        if self.rests(name) {
            return Ok(Outcome::Again);
        }
        let table = match self.catalog.load(name).await {
            Ok(table) => table,
            // The replay says what is the matter.
            Err(CatalogError::NotFound(_)) => return Ok(Outcome::Done),
            Err(error) => return Ok(self.not_now(name, &error)),
        };
        let facts = &table.facts;
        let missing = |(at, (_, input)): &(&RefName, &(RequestId, PinnedInput))| {
            input.uuid.as_deref().is_none_or(|uuid| uuid == facts.uuid.as_str())
                && facts.snapshots.contains(input.snapshot_id)
                && !facts.refs.contains_key(*at)
        };
        let missing: Vec<_> = wanted.iter().filter(missing).collect();
        if missing.is_empty() {
            return Ok(Outcome::Done);
        }
        let of = |(at, (request, _)): &(&RefName, &(RequestId, PinnedInput))| InputPin {
            request: *request,
            table: name.clone(),
            name: (*at).clone(),
        };
        self.ledger.note_input_pins(&missing.iter().map(of).collect::<Vec<_>>()).await?;
        let now_ms = self.now_ms();
        let mut requirements = every_commit(facts);
        let mut updates = Vec::new();
        for (at, (_, input)) in missing {
            requirements.push(Requirement::RefAt { name: at.clone(), at: None, role: RefRole::NewName });
            updates.push(Update::SetRef(pin(facts, at.clone(), input.snapshot_id, now_ms)));
        }
        Ok(self.send(name, &table, &requirements, updates).await)
    }

    /// Removes the refs of requests that have ended, of whatever table: their own may be gone.
    pub(super) async fn release_inputs(&self) -> Result<(), WorkerError> {
        let mut by_table: BTreeMap<TableName, Vec<InputPin>> = BTreeMap::new();
        for pin in self.ledger.input_pins_of_ended().await? {
            by_table.entry(pin.table.clone()).or_default().push(pin);
        }
        for (name, pins) in by_table {
            if self.let_go(&name, &pins).await == Outcome::Done {
                self.ledger.forget_input_pins(&pins).await?;
            }
        }
        Ok(())
    }

    async fn let_go(&self, name: &TableName, pins: &[InputPin]) -> Outcome {
        if self.rests(name) {
            return Outcome::Again;
        }
        let table = match self.catalog.load(name).await {
            Ok(table) => table,
            Err(CatalogError::NotFound(_)) => return Outcome::Done,
            Err(error) => return self.not_now(name, &error),
        };
        let there: BTreeMap<&RefName, SnapshotId> =
            pins.iter().filter_map(|pin| Some((&pin.name, table.facts.head(&pin.name)?))).collect();
        if there.is_empty() {
            return Outcome::Done;
        }
        let mut requirements = every_commit(&table.facts);
        let mut updates = Vec::new();
        for (at, snapshot) in there {
            requirements.push(Requirement::RefAt {
                name: at.clone(),
                at: Some(snapshot),
                role: RefRole::Source,
            });
            updates.push(Update::RemoveRef(at.clone()));
        }
        self.send(name, &table, &requirements, updates).await
    }

    async fn send(
        &self,
        name: &TableName,
        table: &Arc<LoadedTable>,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> Outcome {
        match self.catalog.commit(table, requirements, updates).await {
            CommitOutcome::Landed(_) => Outcome::Done,
            CommitOutcome::Refused(error @ CatalogError::Unavailable(_)) => self.not_now(name, &error),
            // Its refs run out by themselves some day, and what is not held may be lost; neither holds up the queue.
            CommitOutcome::Refused(error) => {
                tracing::warn!(table = %name, "snapshots that waiting requests read cannot be held by refs: {error}");
                Outcome::Done
            }
            outcome => {
                tracing::debug!(table = %name, "refs on inputs were not changed: {outcome:?}");
                Outcome::Again
            }
        }
    }

    /// Another table's trouble neither holds up this one's requests nor fills the log.
    fn not_now(&self, name: &TableName, error: &CatalogError) -> Outcome {
        tracing::warn!(table = %name, "refs on what waiting requests read were not changed yet: {error}");
        let until = self.now_ms().saturating_add(REST_MS);
        lock(&self.input_pins).resting.insert(name.clone(), until);
        Outcome::Again
    }

    fn rests(&self, name: &TableName) -> bool {
        let now_ms = self.now_ms();
        let resting = &mut lock(&self.input_pins).resting;
        resting.retain(|_, until| *until > now_ms);
        resting.contains_key(name)
    }
}

/// Some servers mishandle a single requirement of a ref (rule L7).
fn every_commit(facts: &TableFacts) -> Vec<Requirement> {
    let main = RefName::main();
    let at = facts.head(&main);
    vec![
        Requirement::TableUuid(facts.uuid.clone()),
        Requirement::RefAt { name: main, at, role: RefRole::Target },
    ]
}
