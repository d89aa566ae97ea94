//! The loop: lead, keep every table going, wait for news.
//!
//! Tables are worked on side by side, each at its own pace: a check that takes minutes on one of them holds
//! up no other. Which of them runs, and which sets of them, is decided by the [`Board`]. All of them run in one task
//! and share the lease.

use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use mergeberg_kernel::ids::Epoch;
use tokio::sync::watch;
use tokio::time::Instant;

use super::board::{Board, Rest};
use super::context::{Worker, lock};
use super::error::{Disposition, WorkerError};
use super::external::EXTERNAL_RUNS_AT_ONCE;
use super::protocol::Progress;
use super::tick::{Job, TABLES_AT_ONCE, Work};
use crate::config::PolicySet;
use crate::ledger::{LedgerFault, Watcher};

/// How often another process's write to the ledger is looked for.
const WATCH_EVERY: Duration = Duration::from_millis(25);

/// Renewals within one lease.
const HEARTBEATS_PER_LEASE: i64 = 3;

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
    /// Runs until told to stop; a landing under way is finished first, an operation that is run again is not.
    pub async fn run(
        &self,
        options: RunOptions,
        mut stop: watch::Receiver<bool>,
    ) -> Result<Ended, WorkerError> {
        *lock(&self.stop) = stop.clone();
        let mut watcher = self.ledger.watcher().await?;
        let Some(epoch) = self.wait_for_lead(options, &mut stop).await? else { return Ok(Ended::Stopped) };
        tracing::info!(epoch = %epoch, holder = %self.holder, "leading");
        let result = self.lead_on(epoch, options, &mut stop, &mut watcher).await;
        self.discard_all_ahead().await;
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

    /// Keeps the tables going and the lease alive until there is a reason to end.
    async fn lead_on(
        &self,
        epoch: Epoch,
        options: RunOptions,
        stop: &mut watch::Receiver<bool>,
        watcher: &mut Watcher,
    ) -> Result<Ended, WorkerError> {
        self.ledger.renew(epoch, self.now_ms()).await?;
        // Side by side with the tables: a tick that holds the ledger's writing connection while it waits must go
        // on for the renewal to get it.
        let result = tokio::select! {
            result = self.keep_going(epoch, options, stop, watcher) => result,
            error = self.heartbeat(epoch, options.lease_ms) => Err(error),
        };
        match result {
            Err(error) if error.disposition() == Disposition::StepDown => Ok(Ended::Deposed),
            result => result,
        }
    }

    /// Renews the lease: a check may take longer than it lasts. Ends when another worker leads.
    async fn heartbeat(&self, epoch: Epoch, lease_ms: i64) -> WorkerError {
        let every = Duration::from_millis(u64::try_from(lease_ms / HEARTBEATS_PER_LEASE).unwrap_or(1).max(1));
        loop {
            tokio::time::sleep(every).await;
            match self.ledger.renew(epoch, self.now_ms()).await {
                Ok(()) => {}
                Err(error) if error.fault() == LedgerFault::StepDown => return WorkerError::from(error),
                // The epoch guards every write; a late heartbeat only lets another worker in earlier.
                Err(error) => tracing::warn!("the lease could not be renewed: {error}"),
            }
        }
    }

    async fn keep_going(
        &self,
        epoch: Epoch,
        options: RunOptions,
        stop: &mut watch::Receiver<bool>,
        watcher: &mut Watcher,
    ) -> Result<Ended, WorkerError> {
        self.ledger.lose_external(epoch, self.now_ms()).await?;
        let mut running = FuturesUnordered::new();
        // Pipelines' own commands run beside the lanes, however long they take.
        let mut outside = FuturesUnordered::new();
        let mut board = Board::new(options);
        loop {
            let stopping = *stop.borrow();
            if !stopping && running.len() < TABLES_AT_ONCE && board.is_due(Instant::now()) {
                match self.look(&mut board, TABLES_AT_ONCE - running.len()).await {
                    Ok((work, policies)) => running.extend(
                        work.into_iter().map(|(job, work)| self.one(epoch, job, work, Arc::clone(&policies))),
                    ),
                    Err(error) => board.look_failed(error)?,
                }
            }
            while !stopping && outside.len() < EXTERNAL_RUNS_AT_ONCE {
                let Some(run) = self.next_external() else { break };
                outside.push(self.run_external(epoch, run));
            }
            // Whatever still runs outside ends with this function.
            if running.is_empty() && stopping {
                return Ok(Ended::Stopped);
            }
            if running.is_empty() && outside.is_empty() {
                match board.at_rest() {
                    Rest::LookAgain => continue,
                    Rest::Drained => return Ok(Ended::Drained),
                    Rest::GiveUp(error) => return Err(error),
                    Rest::Wait => {}
                }
            }
            // With no room left only an end makes any.
            let full = running.len() >= TABLES_AT_ONCE;
            let rest = if full { options.poll } else { board.rest(Instant::now()) };
            tokio::select! {
                Some((job, result)) = running.next() => board.ended(job, result)?,
                Some(ended) = outside.next() => board.changed(ended?),
                changed = watcher.wait_for_change(WATCH_EVERY, rest), if !stopping => {
                    if changed? {
                        board.wake();
                    }
                }
                _ = stop.changed(), if !stopping => {}
            }
        }
    }

    /// What is to be started now, at most `free` of it.
    async fn look(
        &self,
        board: &mut Board,
        free: usize,
    ) -> Result<(Vec<(Job, Work)>, Arc<PolicySet>), WorkerError> {
        let policies = self.policies.read()?;
        let work = self.work().await?;
        Ok((board.take(work, free, Instant::now()), policies))
    }

    async fn one(
        &self,
        epoch: Epoch,
        job: Job,
        work: Work,
        policies: Arc<PolicySet>,
    ) -> (Job, Result<Progress, WorkerError>) {
        let result = match work {
            Work::Table(work) => self.tick_table(epoch, work, policies).await,
            Work::Set(set) => self.tick_set(epoch, &set, &policies).await,
        };
        (job, result)
    }
}
