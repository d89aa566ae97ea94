//! One look at one table: its lanes one after the other, each settled, watched, planned and served.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::stream::{self, StreamExt};
use mergeberg_kernel::admission::StructureStanding;
use mergeberg_kernel::ids::{Epoch, RefName, RequestId, TableUuid};
use mergeberg_kernel::policy::TablePolicy;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde_json::json;

use super::context::{Lane, Worker};
use super::error::{Disposition, WorkerError};
use super::fill::{deeper, first_depth};
use super::foreign::TargetStanding;
use super::gather::Gathered;
use super::judge::waits_for_its_check;
use super::own_sources::lacks_its_branch;
use super::protocol::Progress;
use super::structure::Structures;
use crate::config::PolicySet;
use crate::ledger::{Change, Depth, MAX_WAITING, OpenSet, TargetHead, Waiting};
use crate::table::catalog::CatalogError;
use crate::table::loaded::LoadedTable;

/// Tables that are worked on at the same time. What they share is bounded by itself: memory of checks,
/// manifests in memory, connections of the ledger.
pub(super) const TABLES_AT_ONCE: usize = 8;

/// A table's lanes: those in which requests wait, and those that are only looked after.
#[derive(Debug, Default)]
pub(super) struct TableWork {
    open: Vec<Lane>,
    quiet: Vec<Lane>,
}

/// What is worked on as one: a table, or a set of several.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Job {
    Set {
        id: RequestId,
        /// In the order in which they are worked on.
        tables: Vec<TableUuid>,
    },
    Table(TableUuid),
}

impl Job {
    pub fn tables(&self) -> &[TableUuid] {
        match self {
            Self::Set { id: _, tables } => tables,
            Self::Table(table) => std::slice::from_ref(table),
        }
    }
}

#[derive(Debug)]
pub(super) enum Work {
    Table(TableWork),
    Set(OpenSet),
}

/// What a look at a lane came to.
pub(super) enum Look {
    /// Nothing can leave now.
    Done(Progress),
    Ready(Box<Gathered>, Structures),
}

/// Who looks at a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Looking {
    ForTrains,
    ForSet,
}

impl Worker {
    /// Everything that there is something to do for: tables and sets. One table has one entry, whatever names it
    /// went by: its lanes share one catalog pointer and are served in turn.
    pub(super) async fn work(&self) -> Result<BTreeMap<Job, Work>, WorkerError> {
        let mut tables: BTreeMap<TableUuid, TableWork> = BTreeMap::new();
        let (open, heads, sets) =
            tokio::try_join!(self.ledger.open_tables(), self.ledger.target_heads(), self.ledger.open_sets())?;
        for (table, uuid, target) in open {
            tables.entry(uuid.clone()).or_default().open.push(Lane { table, uuid, target });
        }
        for TargetHead { table, table_uuid: uuid, target, .. } in heads {
            let work = tables.entry(uuid.clone()).or_default();
            if work.open.iter().all(|open| open.target != target) {
                work.quiet.push(Lane { table, uuid, target });
            }
        }
        let mut all: BTreeMap<Job, Work> =
            tables.into_iter().map(|(uuid, work)| (Job::Table(uuid), Work::Table(work))).collect();
        for set in sets {
            let tables = set.lanes.iter().map(|(_, uuid, _)| uuid.clone()).collect();
            all.insert(Job::Set { id: set.id, tables }, Work::Set(set));
        }
        Ok(all)
    }

    /// One look at everything: tables side by side, then sets in arrival order. Takes no input and may run twice.
    pub async fn tick(&self, epoch: Epoch) -> Result<Progress, WorkerError> {
        let policies = self.policies.read()?;
        let (mut tables, mut sets) = (Vec::new(), Vec::new());
        for work in self.work().await?.into_values() {
            match work {
                Work::Table(work) => tables.push(work),
                Work::Set(set) => sets.push(set),
            }
        }
        let mut results: Vec<Result<Progress, WorkerError>> = stream::iter(tables)
            .map(|work| self.tick_table(epoch, work, Arc::clone(&policies)))
            .buffer_unordered(TABLES_AT_ONCE)
            .collect()
            .await;
        for set in &sets {
            results.push(self.tick_set(epoch, set, &policies).await);
        }
        while let Some(run) = self.next_external() {
            let changed = Progress { landed: 0, changed: true };
            results.push(self.run_external(epoch, run).await.map(|_| changed));
        }
        let mut progress = Progress::default();
        let mut failed: Option<WorkerError> = None;
        for result in results {
            match result {
                Ok(made) => progress.add(made),
                // What ends the whole worker is told before what one table met.
                Err(error) if failed.as_ref().is_none_or(is_retried) => failed = Some(error),
                Err(_) => {}
            }
        }
        match failed {
            Some(error) if !progress.changed || !is_retried(&error) => Err(error),
            _ => Ok(progress),
        }
    }

    /// One look at one table. An error of one lane is told and the other lanes go on; it is the result only
    /// when nothing else happened.
    pub(super) async fn tick_table(
        &self,
        epoch: Epoch,
        work: TableWork,
        policies: Arc<PolicySet>,
    ) -> Result<Progress, WorkerError> {
        for lane in &work.quiet {
            match self.look_after(epoch, lane, &policies.for_table(&lane.table)).await {
                Err(error) if !is_retried(&error) => return Err(error),
                Err(error) => tracing::warn!(table = %lane.table, target = %lane.target, "{error}"),
                Ok(()) => {}
            }
        }
        let mut progress = Progress::default();
        let mut failed = None;
        for lane in &work.open {
            let ticked = self.tick_lane(epoch, lane, &policies.for_table(&lane.table)).await;
            if !matches!(&ticked, Ok(made) if made.changed) {
                // Nothing follows at once that could use it.
                self.discard_ahead(self.take_ahead(lane)).await;
            }
            match ticked {
                Ok(made) => progress.add(made),
                Err(error) if is_retried(&error) => {
                    tracing::warn!(table = %lane.table, target = %lane.target, "{error}");
                    if let Some(code) = error.holds_lane() {
                        let event = RequestEvent::Hold(code);
                        progress.add(self.all_waiting(epoch, lane, event, &error.to_string()).await?);
                    }
                    failed = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failed {
            Some(error) if !progress.changed => Err(error),
            _ => Ok(progress),
        }
    }

    async fn tick_lane(
        &self,
        epoch: Epoch,
        lane: &Lane,
        policy: &Arc<TablePolicy>,
    ) -> Result<Progress, WorkerError> {
        let (mut gathered, structures) =
            match self.look_at_lane(epoch, lane, policy, Looking::ForTrains).await? {
                Look::Done(progress) => return Ok(progress),
                Look::Ready(gathered, structures) => (*gathered, structures),
            };
        // A train waits for the disk most of its time; meanwhile the sources of the next one are read.
        let table = Arc::clone(&gathered.table);
        let next = std::mem::take(&mut gathered.next_sources);
        let (progress, ()) =
            tokio::join!(self.run_train(epoch, gathered, &structures), self.read_ahead(&table, &next));
        progress
    }

    /// Settles what is open, watches the target, and gathers what its next train is planned from.
    pub(super) async fn look_at_lane(
        &self,
        epoch: Epoch,
        lane: &Lane,
        policy: &Arc<TablePolicy>,
        looking: Looking,
    ) -> Result<Look, WorkerError> {
        let ((), found) = tokio::try_join!(self.release_inputs(), self.find_table(lane))?;
        let found = match found {
            Found::Table(table) => table,
            Found::Refuse(code, text) => {
                return self
                    .all_waiting(epoch, lane, RequestEvent::Refuse(code), &text)
                    .await
                    .map(Look::Done);
            }
            Found::Hold(code, text) => {
                return self.all_waiting(epoch, lane, RequestEvent::Hold(code), &text).await.map(Look::Done);
            }
        };
        if !self.settle_lane(epoch, lane, &found).await? {
            let text = "the outcome of a landing is not known yet";
            return self
                .all_waiting(epoch, lane, RequestEvent::Hold(ReasonCode::TableHeld), text)
                .await
                .map(Look::Done);
        }
        // Before the table: a request that comes in between pinned a head that an older table does not show,
        // and would be taken for one whose branch was reset or removed (rule S2).
        let until = self.ledger.newest_request().await?;
        let mut depth = first_depth(policy, looking);
        let (mut waiting, kept) = tokio::try_join!(self.waiting(lane, depth, until), self.to_keep(lane))?;
        // Settling may have moved the table.
        let table = match self.catalog.load(&lane.table).await {
            Ok(table) if table.facts.uuid == lane.uuid => table,
            Ok(_) | Err(CatalogError::NotFound(_)) => {
                return Ok(Look::Done(Progress { landed: 0, changed: true }));
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(other) = table.facts.foreign_claim(self.ledger.queue_id()) {
            // Rule R7. Only this table waits: another queue's table is no reason to stop the others.
            let text =
                format!("queue {other} has claimed {}; this one is {}", lane.table, self.ledger.queue_id());
            let event = RequestEvent::Hold(ReasonCode::ClaimedElsewhere);
            return self.all_waiting(epoch, lane, event, &text).await.map(Look::Done);
        }
        if let TargetStanding::Rewound { known, now } = self.watch_target(lane, &table, policy).await? {
            let now = now.map_or("gone".to_owned(), |id| format!("at snapshot {id}"));
            let text =
                format!("the target was at snapshot {known} and is {now}, which does not descend from it");
            return self
                .all_waiting(epoch, lane, RequestEvent::Hold(ReasonCode::TargetRewound), &text)
                .await
                .map(Look::Done);
        }
        if table.facts.head(&lane.target).is_none() && !is_first_publish(&table, lane) {
            // It was there at enqueue: whoever removed it may put it back.
            let text = format!("there is no branch '{}' in {} any more", lane.target, lane.table);
            let event = RequestEvent::Hold(ReasonCode::TargetNotFound);
            return self.all_waiting(epoch, lane, event, &text).await.map(Look::Done);
        }
        let structures = self.structures(lane, &table, &policy.digest()).await?;
        let now_ms = self.now_ms();
        let table = self.keep_pins(lane, table, &kept).await?;
        self.keep_inputs(lane, &table, &kept).await?;
        let gathered = loop {
            waiting.rows.retain(|row| {
                !waits_for_its_check(row, now_ms)
                    // Set again by the next look at the table.
                    && !lacks_its_branch(&table.facts, self.ledger.queue_id(), &row.source, row.pinned)
            });
            let deeper = if waiting.more { deeper(depth) } else { None };
            let rows = waiting.rows;
            // Nobody but sets, which have ticks of their own.
            let no_train = looking == Looking::ForTrains && rows.iter().all(|row| row.set.is_some());
            if !(rows.is_empty() || no_train) {
                let (table, policy) = (Arc::clone(&table), Arc::clone(policy));
                match self.fill_train(lane, table, policy, rows, &structures, looking).await {
                    Ok(gathered) if gathered.plan.full || deeper.is_none() => break gathered,
                    Ok(_) => {}
                    Err(WorkerError::Table(error)) if error.is_own_fault() => {
                        // The target's own history cannot be read: nobody's request is at fault.
                        let event = RequestEvent::Hold(ReasonCode::TableUnreadable);
                        return self
                            .all_waiting(epoch, lane, event, &error.to_string())
                            .await
                            .map(Look::Done);
                    }
                    Err(error) => return Err(error),
                }
            }
            let Some(next) = deeper else { return Ok(Look::Done(Progress::default())) };
            depth = next;
            waiting = self.waiting(lane, depth, until).await?;
        };
        for request in &gathered.requests {
            if let StructureStanding::Unknown(structure) = request.structure {
                self.open_review(lane, &gathered.table, &structures, structure).await?;
            }
        }
        Ok(Look::Ready(Box::new(gathered), structures))
    }

    /// The lane's waiting requests, at most `depth` of each class. What cannot be read is told and left out (case
    /// O36).
    async fn waiting(
        &self,
        lane: &Lane,
        depth: usize,
        until: Option<RequestId>,
    ) -> Result<Waiting, WorkerError> {
        let depth = Depth { of_each_class: u32::try_from(depth).unwrap_or(MAX_WAITING), until };
        let waiting = self.ledger.waiting(&lane.uuid, &lane.target, depth).await?;
        if !waiting.unreadable.is_empty() {
            self.ledger.tell_unreadable(&waiting.unreadable, self.now_ms()).await?;
        }
        Ok(waiting)
    }

    /// A target without open requests: what a dead worker left in the catalog goes, and commits that no
    /// request made are seen, not only when somebody enqueues the next time (case O17).
    async fn look_after(&self, epoch: Epoch, lane: &Lane, policy: &TablePolicy) -> Result<(), WorkerError> {
        self.release_inputs().await?;
        let table = match self.catalog.load(&lane.table).await {
            Ok(table) if table.facts.uuid == lane.uuid => table,
            // Nobody waits for it: nothing is looked for.
            Ok(_) | Err(CatalogError::NotFound(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        self.sweep(epoch, lane, &table).await?;
        self.watch_target(lane, &table, policy).await?;
        // Those of requests that ended without landing (case O22).
        self.keep_pins(lane, table, &[]).await?;
        Ok(())
    }

    async fn all_waiting(
        &self,
        epoch: Epoch,
        lane: &Lane,
        event: RequestEvent,
        text: &str,
    ) -> Result<Progress, WorkerError> {
        let Waiting { rows, .. } = self.waiting(lane, MAX_WAITING as usize, None).await?;
        let changes: Vec<Change> = rows
            .iter()
            .filter(|row| !matches!(event, RequestEvent::Hold(code) if row.state == RequestState::Held(code)))
            .map(|row| Change {
                request: row.id,
                event,
                train: None,
                classification: None,
                detail: Some(json!({ "text": text })),
            })
            .collect();
        if changes.is_empty() {
            return Ok(Progress::default());
        }
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(Progress { changed: !matches!(event, RequestEvent::Hold(_)), ..Progress::default() })
    }

    /// The table of a lane under its name; another uuid, a new name and no table at all are told apart.
    async fn find_table(&self, lane: &Lane) -> Result<Found, WorkerError> {
        match self.catalog.load(&lane.table).await {
            Ok(table) if table.facts.uuid == lane.uuid => return Ok(Found::Table(table)),
            Ok(_) | Err(CatalogError::NotFound(_)) => {}
            Err(CatalogError::Unreadable { message, location, .. }) => {
                let text = format!("{location}: {message}");
                return Ok(Found::Hold(ReasonCode::TableUnreadable, text));
            }
            Err(error @ CatalogError::Unsupported { .. }) => {
                return Ok(Found::Hold(ReasonCode::FormatUnsupported, error.to_string()));
            }
            Err(error) => return Err(error.into()),
        }
        let mut name_taken = false;
        for name in self.catalog.list_tables().await? {
            let Ok(table) = self.catalog.load(&name).await else { continue };
            if table.facts.uuid == lane.uuid {
                return Ok(Found::Hold(ReasonCode::TableRenamed, format!("{} is now {name}", lane.table)));
            }
            name_taken |= name == lane.table;
        }
        if name_taken {
            let text = format!("{} is another table now; enqueued was uuid {}", lane.table, lane.uuid);
            return Ok(Found::Refuse(ReasonCode::TableReplaced, text));
        }
        // Case O36: fails alone. Its branch is still in the table's files, should it be registered again.
        Ok(Found::Refuse(ReasonCode::TableNotFound, format!("{} is not in the catalog any more", lane.table)))
    }
}

pub(super) fn is_retried(error: &WorkerError) -> bool {
    error.disposition() == Disposition::RetryNextTick
}

enum Found {
    Table(Arc<LoadedTable>),
    Refuse(ReasonCode, String),
    Hold(ReasonCode, String),
}

/// Only `main`, and only of a table that never had a snapshot on it (cases O02, O28).
fn is_first_publish(table: &LoadedTable, lane: &Lane) -> bool {
    lane.target == RefName::main() && table.facts.snapshot_log.is_empty()
}
