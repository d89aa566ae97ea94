//! The loop: lead, tick every lane, wait for news.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mergeberg_kernel::admission::StructureStanding;
use mergeberg_kernel::ids::{Epoch, TableName};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde_json::json;
use tokio::sync::watch;

use super::context::{Lane, Worker};
use super::error::{Disposition, WorkerError};
use super::foreign::TargetStanding;
use super::protocol::{Progress, waits_for_its_check};
use crate::ledger::{Change, LedgerFault, RequestRow, TargetHead, Waiting};
use crate::table::catalog::CatalogError;
use crate::table::loaded::LoadedTable;

/// How often another process's write to the ledger is looked for.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// Renewals within one lease.
const HEARTBEATS_PER_LEASE: i64 = 3;

/// Failed ticks in a row that are tried again at once; most troubles are over by then.
const QUICK_RETRIES: u32 = 8;
/// Longest rest after failed ticks: a broken table must not fill log and ledger over a weekend.
const MAX_FAILURE_REST: Duration = Duration::from_secs(60);

/// How a worker runs.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Stop when nothing more can be done now.
    pub drain: bool,
    /// Longest time between two looks at the catalog.
    pub poll: Duration,
    pub lease_ms: i64,
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Drained,
    Stopped,
    /// Another worker leads.
    Deposed,
}

impl Worker {
    /// Runs until told to stop; the landing under way is finished first.
    pub async fn run(
        &self,
        options: RunOptions,
        mut stop: watch::Receiver<bool>,
    ) -> Result<Ended, WorkerError> {
        let mut watcher = self.ledger.watcher().await?;
        let Some(epoch) = self.wait_for_lead(options, &mut stop).await? else { return Ok(Ended::Stopped) };
        tracing::info!(epoch = %epoch, holder = %self.holder, "leading");
        let result = self.lead_on(epoch, options, &mut stop, &mut watcher).await;
        // Whoever comes next need not wait for the lease.
        self.ledger.release(epoch).await?;
        result
    }

    async fn wait_for_lead(
        &self,
        options: RunOptions,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Option<Epoch>, WorkerError> {
        let mut said = false;
        loop {
            if *stop.borrow() {
                return Ok(None);
            }
            if let Some(epoch) = self.ledger.lead(&self.holder, options.lease_ms, self.now_ms()).await? {
                return Ok(Some(epoch));
            }
            if !said {
                tracing::info!("another worker leads; waiting for its lease to end");
                said = true;
            }
            tokio::select! {
                () = tokio::time::sleep(options.poll.min(Duration::from_millis(500))) => {}
                _ = stop.changed() => {}
            }
        }
    }

    async fn lead_on(
        &self,
        epoch: Epoch,
        options: RunOptions,
        stop: &mut watch::Receiver<bool>,
        watcher: &mut crate::ledger::Watcher,
    ) -> Result<Ended, WorkerError> {
        let mut failures = 0_u32;
        loop {
            if *stop.borrow() {
                return Ok(Ended::Stopped);
            }
            match self.tick_with_heartbeat(epoch, options.lease_ms).await {
                Ok(progress) => {
                    failures = 0;
                    if progress.changed {
                        continue;
                    }
                    if options.drain {
                        return Ok(Ended::Drained);
                    }
                }
                Err(error) => match error.disposition() {
                    Disposition::StepDown => return Ok(Ended::Deposed),
                    Disposition::Stop => return Err(error),
                    Disposition::RetryNextTick => {
                        failures += 1;
                        tracing::warn!(failures, "this tick failed, the next one tries again: {error}");
                        if options.drain && failures >= MAX_DRAIN_FAILURES {
                            return Err(error);
                        }
                        if options.drain || failures <= QUICK_RETRIES {
                            self.pause(failures).await;
                            continue;
                        }
                    }
                },
            }
            self.rest(epoch, rest_for(failures, options.poll), options.poll, stop, watcher).await?;
        }
    }

    /// Waits for news, for a stop, or until the time is over; the lease is kept meanwhile.
    async fn rest(
        &self,
        epoch: Epoch,
        mut left: Duration,
        poll: Duration,
        stop: &mut watch::Receiver<bool>,
        watcher: &mut crate::ledger::Watcher,
    ) -> Result<(), WorkerError> {
        loop {
            let slice = left.min(poll);
            tokio::select! {
                changed = watcher.wait_for_change(WATCH_EVERY, slice) => if changed? { return Ok(()) },
                _ = stop.changed() => return Ok(()),
            }
            left = left.saturating_sub(slice);
            if left.is_zero() {
                return Ok(());
            }
            self.ledger.renew(epoch, self.now_ms()).await?;
        }
    }

    /// A tick during which the lease is renewed: a check may take longer than it lasts. Both run side by
    /// side, for a tick that waits while it holds the ledger's writing connection must go on for the renewal
    /// to get it.
    async fn tick_with_heartbeat(&self, epoch: Epoch, lease_ms: i64) -> Result<Progress, WorkerError> {
        let every = Duration::from_millis(u64::try_from(lease_ms / HEARTBEATS_PER_LEASE).unwrap_or(1).max(1));
        self.ledger.renew(epoch, self.now_ms()).await?;
        let heartbeat = async {
            loop {
                tokio::time::sleep(every).await;
                match self.ledger.renew(epoch, self.now_ms()).await {
                    Ok(()) => {}
                    Err(error) if error.fault() == LedgerFault::StepDown => return WorkerError::from(error),
                    // The epoch guards every write; a late heartbeat only lets another worker in earlier.
                    Err(error) => tracing::warn!("the lease could not be renewed: {error}"),
                }
            }
        };
        tokio::select! {
            result = self.tick(epoch) => result,
            error = heartbeat => Err(error),
        }
    }

    /// One look at everything. Takes no input and may run twice.
    pub async fn tick(&self, epoch: Epoch) -> Result<Progress, WorkerError> {
        let policies = self.policies.read()?;
        let mut lanes: BTreeMap<TableName, Vec<Lane>> = BTreeMap::new();
        for (table, uuid, target) in self.ledger.open_tables().await? {
            lanes.entry(table.clone()).or_default().push(Lane { table, uuid, target });
        }
        let mut progress = Progress::default();
        let mut failed = None;
        for TargetHead { table, table_uuid: uuid, target, .. } in self.ledger.target_heads().await? {
            let lane = Lane { table, uuid, target };
            if !lanes.values().flatten().any(|open| open.uuid == lane.uuid && open.target == lane.target) {
                let policy = policies.for_table(&lane.table);
                match self.look_after(epoch, &lane, &policy).await {
                    Err(error) if error.disposition() != Disposition::RetryNextTick => return Err(error),
                    Err(error) => tracing::warn!(table = %lane.table, target = %lane.target, "{error}"),
                    Ok(()) => {}
                }
            }
        }
        for (table, lanes) in lanes {
            let policy = policies.for_table(&table);
            for lane in lanes {
                match self.tick_lane(epoch, &lane, &policy).await {
                    Ok(made) => progress.add(made),
                    Err(error) if error.disposition() == Disposition::RetryNextTick => {
                        // One table's trouble is not another's.
                        tracing::warn!(table = %lane.table, target = %lane.target, "{error}");
                        if let Some(code) = error.holds_lane() {
                            let event = RequestEvent::Hold(code);
                            progress.add(self.all_waiting(epoch, &lane, event, &error.to_string()).await?);
                        }
                        failed = Some(error);
                    }
                    Err(error) => return Err(error),
                }
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
        policy: &Arc<mergeberg_kernel::policy::TablePolicy>,
    ) -> Result<Progress, WorkerError> {
        match self.find_table(lane).await? {
            Found::Table => {}
            Found::Refuse(code, text) => {
                return self.all_waiting(epoch, lane, RequestEvent::Refuse(code), &text).await;
            }
            Found::Hold(code, text) => {
                return self.all_waiting(epoch, lane, RequestEvent::Hold(code), &text).await;
            }
        }
        if !self.settle_lane(epoch, lane).await? {
            let text = "the outcome of a landing is not known yet";
            return self.all_waiting(epoch, lane, RequestEvent::Hold(ReasonCode::TableHeld), text).await;
        }
        // Before the table: a request that comes in between pinned a head that an older table does not show,
        // and would be taken for one whose branch was reset or removed (rule S2).
        let waiting = self.waiting(lane).await?;
        // Settling may have moved the table.
        let table = match self.catalog.load(&lane.table).await {
            Ok(table) if table.facts.uuid == lane.uuid => table,
            Ok(_) | Err(CatalogError::NotFound(_)) => {
                return Ok(Progress { landed: 0, changed: true });
            }
            Err(error) => return Err(error.into()),
        };
        if let TargetStanding::Rewound { known, now } = self.watch_target(lane, &table, policy).await? {
            let now = now.map_or("gone".to_owned(), |id| format!("at snapshot {id}"));
            let text =
                format!("the target was at snapshot {known} and is {now}, which does not descend from it");
            return self.all_waiting(epoch, lane, RequestEvent::Hold(ReasonCode::TargetRewound), &text).await;
        }
        if table.facts.head(&lane.target).is_none() && !is_first_publish(&table, lane) {
            // It was there at enqueue: whoever removed it may put it back.
            let text = format!("there is no branch '{}' in {} any more", lane.target, lane.table);
            let event = RequestEvent::Hold(ReasonCode::TargetNotFound);
            return self.all_waiting(epoch, lane, event, &text).await;
        }
        let structures = self.structures(lane, &table, &policy.digest()).await?;
        let now_ms = self.now_ms();
        let table = self.keep_pins(lane, table, &waiting).await?;
        let waiting: Vec<RequestRow> =
            waiting.into_iter().filter(|row| !waits_for_its_check(row, now_ms)).collect();
        if waiting.is_empty() {
            return Ok(Progress::default());
        }
        let mut gathered = match self.gather(lane, table, Arc::clone(policy), waiting, &structures).await {
            Ok(gathered) => gathered,
            Err(WorkerError::Table(error)) if error.is_own_fault() => {
                // The target's own history cannot be read: nobody's request is at fault.
                let event = RequestEvent::Hold(ReasonCode::TableUnreadable);
                return self.all_waiting(epoch, lane, event, &error.to_string()).await;
            }
            Err(error) => return Err(error),
        };
        for request in &gathered.requests {
            if let StructureStanding::Unknown(structure) = request.structure {
                self.open_review(lane, &gathered.table, &structures, structure).await?;
            }
        }
        // A train waits for the disk most of its time; meanwhile the sources of the next one are read.
        let table = Arc::clone(&gathered.table);
        let next = std::mem::take(&mut gathered.next_sources);
        let (progress, ()) = tokio::join!(self.run_train(epoch, gathered), self.read_ahead(&table, &next));
        progress
    }

    /// The lane's waiting requests. What cannot be read is told and left out (case O36).
    async fn waiting(&self, lane: &Lane) -> Result<Vec<RequestRow>, WorkerError> {
        let Waiting { rows, unreadable } = self.ledger.waiting(&lane.uuid, &lane.target).await?;
        if !unreadable.is_empty() {
            self.ledger.tell_unreadable(&unreadable, self.now_ms()).await?;
        }
        Ok(rows)
    }

    /// A target without open requests: what a dead worker left in the catalog goes, and commits that no
    /// request made are seen, not only when somebody enqueues the next time (case O17).
    async fn look_after(
        &self,
        epoch: Epoch,
        lane: &Lane,
        policy: &mergeberg_kernel::policy::TablePolicy,
    ) -> Result<(), WorkerError> {
        let table = match self.catalog.load(&lane.table).await {
            Ok(table) if table.facts.uuid == lane.uuid => table,
            // Nobody waits for it: nothing is looked for.
            Ok(_) | Err(CatalogError::NotFound(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        self.sweep(epoch, lane).await?;
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
        let rows = self.waiting(lane).await?;
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
            Ok(table) if table.facts.uuid == lane.uuid => return Ok(Found::Table),
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

/// Ticks in a row that may fail before `--drain` gives up.
const MAX_DRAIN_FAILURES: u32 = 8;

enum Found {
    Table,
    Refuse(ReasonCode, String),
    Hold(ReasonCode, String),
}

/// A poll when all is well; doubled with every failed tick beyond the quick ones, up to the bound.
fn rest_for(failures: u32, poll: Duration) -> Duration {
    match failures.checked_sub(QUICK_RETRIES) {
        None | Some(0) => poll,
        Some(more) => poll.saturating_mul(1 << more.min(16)).min(MAX_FAILURE_REST).max(poll),
    }
}

/// Only `main`, and only of a table that never had a snapshot on it (cases O02, O28).
fn is_first_publish(table: &LoadedTable, lane: &Lane) -> bool {
    lane.target == mergeberg_kernel::ids::RefName::main() && table.facts.snapshot_log.is_empty()
}
