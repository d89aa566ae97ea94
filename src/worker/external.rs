//! Runs of pipelines' own commands (`on-conflict = "external"`), beside the lanes.
//!
//! A lane only orders a run and goes on; what the run left is looked at when the lane is looked at again. The order of
//! writes of one run:
//!
//! 1. Its row in the ledger, with the name of its temporary branch, which is never used twice.
//! 2. The branch, at the target's head, on condition that it is new.
//! 3. Its base in the ledger; only then the command is started.
//! 4. Its end in the ledger, with the head that the catalog shows: that one counts, whatever is written there later.
//!
//! A worker that dies leaves a run that nobody ends. Its successor calls it lost, removes the branch, and orders
//! another one: whatever the orphaned command still writes is written to a name that means nothing any more.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use mergeberg_kernel::admission::Verdict;
use mergeberg_kernel::admission::external::{ExternalRun, ExternalStanding, RunOutcome, failures};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{Epoch, RefName, RequestId, SnapshotId};
use mergeberg_kernel::policy::{ClassPolicy, ExternalReplay, TablePolicy};

use super::context::{Lane, Worker, external_ref, lock};
use super::error::{Disposition, WorkerError};
use super::gather::class_of;
use super::pins::age_of;
use super::step::{Step, reached};
use super::tick::Job;
use crate::external::{Ask, End, Ran};
use crate::ledger::{ExternalEnd, ExternalOutcome, ExternalRunRow, RequestRow};
use crate::table::catalog::CommitOutcome;

/// Commands that one worker runs at the same time; further ones wait for their turn.
pub(super) const EXTERNAL_RUNS_AT_ONCE: usize = 4;
/// Times that a run's branch is set, because the table was written meanwhile.
const MAX_BRANCH_TRIES: u32 = 30;
/// First pause before a command that failed is run again, in milliseconds; doubled with each failure.
const RETRY_FIRST_MS: u64 = 250;
const RETRY_MOST_MS: u64 = 60_000;
/// How often a run looks whether its request still waits for it.
const LOOK_AT_REQUEST: Duration = Duration::from_millis(250);
/// Looks at the catalog for what a run left, where a load may lag behind.
const MAX_LOOKS: u32 = 8;
/// Times that the end of a run is written to a ledger that cannot be reached.
const MAX_END_TRIES: u32 = 10;
/// Life of a run's temporary branch beyond the time of the run, in milliseconds (rule R3).
const BRANCH_LIFE_MS: i64 = 7 * 24 * 3600 * 1000;
/// Snapshots that a run may leave and expiry keeps, however old (rule R2).
const KEPT_SNAPSHOTS: i32 = 100;

/// A run that waits for its turn.
pub(super) struct Ordered {
    request: RequestRow,
    run: ExternalRunRow,
    /// Runs that failed right before it.
    failures: u32,
}

/// This worker's runs.
#[derive(Default)]
pub(super) struct Externals {
    ordered: Mutex<VecDeque<Ordered>>,
    /// Branches of runs that are ordered or under way in this process.
    alive: Mutex<BTreeSet<RefName>>,
}

impl Externals {
    pub fn is_alive(&self, branch: &RefName) -> bool {
        lock(&self.alive).contains(branch)
    }
}

/// Takes a run off the list of those that are alive, however its future ends.
struct Alive<'a>(&'a Externals, RefName);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        lock(&self.0.alive).remove(&self.1);
    }
}

impl Worker {
    /// Runs of the lane's open requests, where any class has a command.
    pub(super) async fn external_runs(
        &self,
        policy: &TablePolicy,
        lane: &Lane,
    ) -> Result<Vec<ExternalRunRow>, WorkerError> {
        if policy.classes.iter().all(|class| class.runs_again_outside().is_none()) {
            return Ok(Vec::new());
        }
        Ok(self.ledger.open_external_runs(&lane.uuid).await?)
    }

    /// Where a request stands with its runs; `None`: its class has no command.
    pub(super) fn external_standing(
        &self,
        facts: &TableFacts,
        class: &ClassPolicy,
        row: &RequestRow,
        runs: &[ExternalRunRow],
    ) -> Option<ExternalStanding> {
        let policy = class.runs_again_outside()?;
        let of_pin: Vec<&ExternalRunRow> =
            runs.iter().filter(|run| run.request == row.id && run.pinned == row.pinned).collect();
        let mut own: Vec<ExternalRun> = of_pin.iter().map(|run| run.fact()).collect();
        // What became of earlier ones is told; what they left is gone.
        if let (Some(fact), Some(run)) = (own.last_mut(), of_pin.last())
            && !self.is_there(facts, run)
        {
            fact.outcome = RunOutcome::Lost;
        }
        Some(ExternalStanding::of(&own, policy, self.now_ms()))
    }

    /// A result needs its branch, and a run that is under way somebody who runs it.
    fn is_there(&self, facts: &TableFacts, run: &ExternalRunRow) -> bool {
        match run.fact().outcome {
            RunOutcome::UnderWay => self.externals.is_alive(&run.branch),
            RunOutcome::Done(head) => {
                facts.head(&run.branch).is_some_and(|at| facts.snapshots.is_ancestor(head, at))
            }
            _ => true,
        }
    }

    /// Orders the runs that these verdicts ask for.
    pub(super) async fn order_externals(
        &self,
        epoch: Epoch,
        rows: &[RequestRow],
        verdicts: &[(RequestId, Verdict)],
    ) -> Result<(), WorkerError> {
        for (request, verdict) in verdicts {
            let Verdict::RunExternal { .. } = verdict else { continue };
            let Some(row) = rows.iter().find(|row| row.id == *request) else { continue };
            let before = self.ledger.external_runs(row.id).await?;
            for gone in before.iter().filter(|run| run.outcome.is_none()) {
                if !self.externals.is_alive(&gone.branch) {
                    let end = lost("nobody runs it any more".to_owned());
                    self.ledger.end_external(epoch, gone, &end, self.now_ms()).await?;
                }
            }
            let facts: Vec<ExternalRun> =
                before.iter().filter(|run| run.pinned == row.pinned).map(ExternalRunRow::fact).collect();
            let branch = |run| external_ref(self.ledger.queue_id(), row.id, run);
            let Some(run) = self.ledger.order_external(epoch, row, branch, self.now_ms()).await? else {
                continue;
            };
            reached(Step::ExternalOrdered);
            lock(&self.externals.alive).insert(run.branch.clone());
            let ordered = Ordered { request: row.clone(), run, failures: failures(&facts) };
            lock(&self.externals.ordered).push_back(ordered);
        }
        Ok(())
    }

    /// The run whose turn it is.
    pub(super) fn next_external(&self) -> Option<Ordered> {
        lock(&self.externals.ordered).pop_front()
    }

    /// Carries a run to its end. Gives what is to be looked at then; an error ends the worker.
    pub(super) async fn run_external(&self, epoch: Epoch, ordered: Ordered) -> Result<Job, WorkerError> {
        let _alive = Alive(&self.externals, ordered.run.branch.clone());
        let Ordered { request, run, .. } = &ordered;
        let end = match self.carry_external(epoch, &ordered).await {
            Ok(end) => end,
            Err(error) if error.disposition() == Disposition::RetryNextTick => lost(error.to_string()),
            Err(error) => return Err(error),
        };
        tracing::info!(request = %request.id, table = %request.table, run = run.run, "its own command: {}", end.text);
        let mut tries = 0;
        loop {
            match self.ledger.end_external(epoch, run, &end, self.now_ms()).await {
                Ok(()) => break,
                Err(error) => {
                    let error = WorkerError::from(error);
                    tries += 1;
                    if error.disposition() != Disposition::RetryNextTick || tries >= MAX_END_TRIES {
                        return Err(error);
                    }
                    self.pause(tries).await;
                }
            }
        }
        reached(Step::ExternalRecorded);
        Ok(Job::Table(request.table_uuid.clone()))
    }

    async fn carry_external(&self, epoch: Epoch, ordered: &Ordered) -> Result<ExternalEnd, WorkerError> {
        let Ordered { request, run, failures } = ordered;
        if let Some(doublings) = failures.checked_sub(1) {
            let pause = RETRY_FIRST_MS.saturating_mul(1 << doublings.min(16)).min(RETRY_MOST_MS);
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(pause)) => {}
                () = self.ends(request) => {}
            }
        }
        let policy = self.policies.read()?.for_table(&request.table);
        let now = self.ledger.request(request.id).await?;
        let class = class_of(&policy, request);
        let Some(what) = class.runs_again_outside().filter(|_| !is_over(&now, request)) else {
            return Ok(end_of(
                ExternalOutcome::Cancelled,
                "its request has ended, or its class names no command",
            ));
        };
        let Some(base) = self.make_external_branch(request, run, what).await? else {
            return Ok(lost("its branch could not be made: table or target are gone".to_owned()));
        };
        reached(Step::ExternalBranched);
        self.ledger.external_started(epoch, run, base, self.now_ms()).await?;
        reached(Step::ExternalStarted);
        let ask = Ask {
            table: request.table.clone(),
            table_uuid: request.table_uuid.clone(),
            branch: run.branch.clone(),
            base_snapshot_id: base,
            request_id: request.id,
            run: run.run,
            target: request.target.clone(),
            source: request.source.clone(),
            source_snapshot_id: request.pinned,
            idempotency_key: format!("{}-{}-{}", self.ledger.queue_id(), request.id, run.run),
        };
        let ran = crate::external::run(what, &ask, &self.surroundings, self.ends(request)).await;
        reached(Step::ExternalEnded);
        self.what_it_left(request, run, base, ran).await
    }

    /// Comes to pass when nobody waits for the run any more. A ledger that cannot be read says nothing.
    async fn ends(&self, request: &RequestRow) {
        let mut look = tokio::time::interval(LOOK_AT_REQUEST);
        loop {
            look.tick().await;
            if let Ok(now) = self.ledger.request(request.id).await
                && is_over(&now, request)
            {
                return;
            }
        }
    }

    /// A branch of its own at the target's head; `None`: the table or the target is not there.
    async fn make_external_branch(
        &self,
        request: &RequestRow,
        run: &ExternalRunRow,
        what: &ExternalReplay,
    ) -> Result<Option<SnapshotId>, WorkerError> {
        for tries in 1..=MAX_BRANCH_TRIES {
            let table = self.catalog.load(&request.table).await?;
            let facts = &table.facts;
            let (true, Some(base)) = (facts.uuid == request.table_uuid, facts.head(&request.target)) else {
                return Ok(None);
            };
            // After an answer that was lost: nobody else has this name.
            if let Some(at) = facts.head(&run.branch) {
                return Ok(Some(at));
            }
            let life_ms = BRANCH_LIFE_MS.saturating_add(what.timeout.ms).saturating_add(age_of(
                facts,
                base,
                self.now_ms(),
            ));
            let requirements = [
                Requirement::TableUuid(request.table_uuid.clone()),
                Requirement::RefAt { name: run.branch.clone(), at: None, role: RefRole::NewName },
                Requirement::RefAt { name: request.target.clone(), at: Some(base), role: RefRole::Target },
            ];
            let reference = RefFact {
                name: run.branch.clone(),
                snapshot_id: base,
                kind: RefKind::Branch {
                    min_snapshots_to_keep: Some(KEPT_SNAPSHOTS),
                    max_snapshot_age_ms: Some(life_ms),
                },
                max_ref_age_ms: Some(life_ms),
            };
            match self.catalog.commit(&table, &requirements, vec![Update::SetRef(reference)]).await {
                CommitOutcome::Landed(_) => return Ok(Some(base)),
                CommitOutcome::Refused(error) => return Err(error.into()),
                // Whatever came first: the next look tells.
                _ => self.pause(tries).await,
            }
        }
        Ok(None)
    }

    /// Exit and snapshots decide, and of the snapshots only what the catalog shows.
    async fn what_it_left(
        &self,
        request: &RequestRow,
        run: &ExternalRunRow,
        base: SnapshotId,
        ran: Ran,
    ) -> Result<ExternalEnd, WorkerError> {
        let Ran { end, status, text, output } = ran;
        let of = |outcome, head, text| ExternalEnd { outcome, head, status, text, output: output.clone() };
        match end {
            End::Content => {}
            End::Failed => return Ok(of(ExternalOutcome::Failed, None, text)),
            End::Refused => return Ok(of(ExternalOutcome::Refused, None, text)),
            End::TimedOut => return Ok(of(ExternalOutcome::TimedOut, None, text)),
            End::Cancelled => return Ok(of(ExternalOutcome::Cancelled, None, text)),
        }
        let mut looks = 1;
        loop {
            let table = self.catalog.load(&request.table).await?;
            let facts = &table.facts;
            if facts.uuid != request.table_uuid {
                return Ok(of(ExternalOutcome::Lost, None, "the table was replaced while it ran".to_owned()));
            }
            let lags = !self.catalog.capabilities().current_reads && looks < MAX_LOOKS;
            match facts.head(&run.branch) {
                None | Some(_) if lags && facts.head(&run.branch).is_none_or(|head| head == base) => {}
                None => {
                    let text = format!("{} was removed while it ran", run.branch);
                    return Ok(of(ExternalOutcome::Lost, None, text));
                }
                Some(head) if head == base => {
                    let text = format!("{text}, and left nothing on {}", run.branch);
                    return Ok(of(ExternalOutcome::LeftNothing, None, text));
                }
                Some(head) if !facts.snapshots.is_ancestor(base, head) => {
                    let text = format!("it left snapshot {head}, which does not descend from {base}");
                    return Ok(of(ExternalOutcome::OffBase, None, text));
                }
                Some(head) => return Ok(of(ExternalOutcome::Done, Some(head), text)),
            }
            self.pause(looks).await;
            looks += 1;
        }
    }
}

/// Does nobody wait any more for what was ordered for this request?
fn is_over(now: &RequestRow, ordered: &RequestRow) -> bool {
    now.state.is_final() || now.pinned != ordered.pinned
}

fn lost(text: String) -> ExternalEnd {
    end_of(ExternalOutcome::Lost, text)
}

fn end_of(outcome: ExternalOutcome, text: impl Into<String>) -> ExternalEnd {
    ExternalEnd { outcome, head: None, status: None, text: text.into(), output: None }
}
