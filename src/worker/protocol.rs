//! The order of writes of one train, and why it is this order.
//!
//! 1. `Admit` in the ledger, so that everyone sees who is being worked on. Where the files are there already, since
//!    they were written ahead, with step 3.
//! 2. Candidate files. Nobody can reach them; a crash leaves files only. Where operations are run again, every file is
//!    noted in the ledger before it is written, and long ones are named in the catalog meanwhile (`replays`).
//! 3. The train's row in the ledger, before the catalog hears of it: a successor finds the temporary branch
//!    by that row and removes it.
//! 4. The staging commit: all candidates under one temporary branch, on conditions (rule L1). The checks read
//!    the candidates' files meanwhile.
//! 5. Evidence, under the candidates' own ids; it is written only when staging is known to have applied: before anybody
//!    leaves the train for it, else with the intent. When it was complete by then, so is that the train was staged.
//! 6. The intent, under `epoch = mine`, only when staging is known to have applied (rule L2) and passing
//!    evidence stands under exactly those ids (promise 2). One open intent a target.
//! 7. The landing commit. Its fence is the temporary branch: whoever removes that forbids the landing.
//! 8. The head is read again; an answer is never trusted (case O01).
//! 9. The receipt, in one transaction with the states of the requests.
//!
//! A crash between any two of them is settled by `settle.rs` from what the catalog shows.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use mergeberg_kernel::ids::{Epoch, RefName, TrainId};

use super::ahead::Prospect;
use super::context::{Lane, Worker, temporary_ref};
use super::error::WorkerError;
use super::gather::Gathered;
use super::judge::Checked;
use super::landing::tag_name;
use super::stage::{Candidates, Staging};
use super::staging::{Staged, Standing};
use super::step::{Step, reached};
use super::structure::Structures;
use crate::ledger::LedgerError;

/// First pause before something is tried again, in milliseconds; doubled each time up to the bound, with jitter.
const RETRY_FIRST_MS: u64 = 2;
const RETRY_MOST_MS: u64 = 200;

/// What a tick of a lane came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub landed: usize,
    /// A request changed its state: another tick may find more to do.
    pub changed: bool,
}

impl Progress {
    pub fn add(&mut self, other: Self) {
        self.landed += other.landed;
        self.changed |= other.changed;
    }
}

/// A train on its way: who leads, its names, and what it was planned on.
pub(super) struct Train {
    pub epoch: Epoch,
    pub id: TrainId,
    /// Its temporary branch.
    pub fence: RefName,
    pub gathered: Gathered,
}

impl Train {
    pub fn lane(&self) -> &Lane {
        &self.gathered.lane
    }
}

/// How long each step of a train took, for the log.
struct Laps {
    last: Instant,
    text: String,
}

impl Laps {
    fn start() -> Self {
        Self { last: Instant::now(), text: String::new() }
    }

    fn done(&mut self, step: &str) {
        let now = Instant::now();
        let ms = now.duration_since(self.last).as_micros() / 100;
        let _ = write!(self.text, "{step} {}.{} ms ", ms / 10, ms % 10);
        self.last = now;
    }
}

impl std::fmt::Display for Laps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text.trim_end())
    }
}

impl Worker {
    /// Plans one train and carries it through. Everything before is gathered, nothing after is left open.
    pub(super) async fn run_train(
        &self,
        epoch: Epoch,
        mut gathered: Gathered,
        structures: &Structures,
    ) -> Result<Progress, WorkerError> {
        let mut laps = Laps::start();
        let mut plan = std::mem::take(&mut gathered.plan);
        // Rule R5: of two with one tag name the first rides; when it has landed, the name is taken.
        let (mut tags, now_ms) = (BTreeSet::new(), self.now_ms());
        plan.cars
            .retain(|car| tag_name(&car.class, car.request, now_ms).is_none_or(|name| tags.insert(name)));
        let mut progress =
            Progress { landed: 0, changed: self.record_verdicts(epoch, &gathered, &plan.verdicts).await? };
        if plan.cars.is_empty() {
            return Ok(progress);
        }
        laps.done("planned");
        let id = self.new_train_id();
        let mut standing = Standing::Waiting;
        let written = match self.taken_over(&gathered, &plan.cars).await {
            Ok(Some(candidates)) => Ok(Staging::Ready(Box::new(candidates))),
            Ok(None) => {
                if !self.admit(epoch, &id, &plan.cars).await? {
                    progress.changed = true;
                    return Ok(progress);
                }
                standing = Standing::Admitted;
                reached(Step::Admitted);
                self.write_train(epoch, &id, &gathered, plan.cars.clone()).await
            }
            Err(error) => Err(error),
        };
        let candidates = match written {
            Ok(Staging::Ready(candidates)) => *candidates,
            Ok(Staging::Failed(failures)) => {
                self.refuse_failed(epoch, &plan.cars, &failures).await?;
                progress.changed = true;
                return Ok(progress);
            }
            Err(error) => {
                self.wait_out(epoch, plan.cars.iter().map(|c| c.request), &error).await?;
                return Err(error);
            }
        };
        reached(Step::CandidatesWritten);
        laps.done("written");

        let fence = temporary_ref(self.ledger.queue_id(), &id);
        let train = Train { epoch, id, fence, gathered };
        if !self.record_or_give_back(&train, &candidates, standing).await? {
            progress.changed = true;
            return Ok(progress);
        }
        reached(Step::TrainRecorded);
        // What follows waits for storage and catalog; meanwhile the files of the next train are written.
        self.write_ahead(Prospect::behind(&train, &candidates), structures).await;
        progress.add(self.carry(&train, candidates, laps).await?);
        Ok(progress)
    }

    /// `false`: a request was cancelled before it came to that, so the others are planned again.
    async fn record_or_give_back(
        &self,
        train: &Train,
        candidates: &Candidates,
        standing: Standing,
    ) -> Result<bool, WorkerError> {
        match self.record_train(train, candidates, standing).await {
            Ok(()) => Ok(true),
            Err(WorkerError::Ledger(error @ LedgerError::CarsCancelled { .. })) => {
                self.requeue(train.epoch, candidates.requests(), &error.to_string()).await?;
                self.forget_train(train, candidates).await?;
                Ok(false)
            }
            Err(error) => {
                if standing == Standing::Waiting {
                    // No row and no note names them. Should the row be there after all, its sweep finds them gone.
                    self.delete_written(train.lane(), candidates).await;
                }
                Err(error)
            }
        }
    }

    /// Deletes the files of a train that the ledger has no row of.
    pub(super) async fn forget_train(
        &self,
        train: &Train,
        candidates: &Candidates,
    ) -> Result<(), WorkerError> {
        self.delete_written(train.lane(), candidates).await;
        self.ledger.end_files(train.epoch, &train.id).await?;
        Ok(())
    }

    /// From a written train to its receipt.
    async fn carry(
        &self,
        train: &Train,
        mut candidates: Candidates,
        mut laps: Laps,
    ) -> Result<Progress, WorkerError> {
        let mut progress = Progress::default();
        let (staged, findings) = self.stage_and_check(train, &mut candidates).await?;
        let staged = match staged {
            Staged::Applied(table) => table,
            Staged::Lost { again } => {
                progress.changed |= again;
                return Ok(progress);
            }
        };
        laps.done("staged and checked");

        match self.judge(train, &candidates, findings).await? {
            Checked::Passed(findings) => {
                progress.add(self.land(train, staged, candidates, findings).await?);
            }
            Checked::Evicted => {
                self.drop_train(train, &candidates).await?;
                reached(Step::TrainDropped);
                progress.changed = true;
            }
        }
        laps.done("settled");
        tracing::debug!(train = %train.id, landed = progress.landed, "{laps}");
        Ok(progress)
    }

    /// Exponential back-off with jitter, bounded.
    pub(super) async fn pause(&self, tries: u32) {
        let most = RETRY_FIRST_MS.saturating_mul(1 << tries.min(10)).min(RETRY_MOST_MS);
        let jitter = (self.random)() % most.max(1);
        tokio::time::sleep(Duration::from_millis(most / 2 + jitter / 2)).await;
    }
}
