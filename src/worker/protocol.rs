//! The order of writes of one train, and why it is this order.
//!
//! 1. `Admit` in the ledger, so that everyone sees who is being worked on.
//! 2. Candidate files. Nobody can reach them; a crash leaves files only.
//! 3. The train's row in the ledger, before the catalog hears of it: a successor finds the temporary branch
//!    by that row and removes it.
//! 4. The staging commit: all candidates under one temporary branch, on conditions (rule L1).
//! 5. Evidence, under the candidates' own ids.
//! 6. The intent, under `epoch = mine`, only when staging is known to have applied (rule L2) and passing
//!    evidence stands under exactly those ids (promise 2). One open intent a target.
//! 7. The landing commit. Its fence is the temporary branch: whoever removes that forbids the landing.
//! 8. The head is read again; an answer is never trusted (case O01).
//! 9. The receipt, in one transaction with the states of the requests.
//!
//! A crash between any two of them is settled by `settle.rs` from what the catalog shows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mergeberg_kernel::admission::{Car, TargetPlan, Verdict, plan_train};
use mergeberg_kernel::classify::Witness;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Epoch, IntentId, QueueId, RefName, RequestId, SnapshotId, TrainId};
use mergeberg_kernel::policy::{ClassPolicy, OnSourceMoved};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use mergeberg_kernel::verdict::{Eviction, TrainDecision, TrainEvidence, decide};
use serde_json::{Value, json};

use super::context::{Lane, Worker, temporary_ref};
use super::error::WorkerError;
use super::gather::Gathered;
use super::losses::{Loss, conflict};
use super::pins::{age_of, pins_of};
use super::settle::{Finding, read_outcome};
use super::stage::{Candidates, CarFailure, Staging, VANISHED_ROWS};
use super::step::{Step, reached};
use crate::ledger::{Change, Intent, IntentCar, TrainRow, TrainStatus};
use crate::table::catalog::CommitOutcome;
use crate::table::loaded::LoadedTable;

/// Times that a commit is sent again because another branch of the table was written meanwhile.
const MAX_POINTER_RETRIES: u32 = 30;
/// First pause before it is sent again, in milliseconds; doubled each time up to the bound, with jitter.
const RETRY_FIRST_MS: u64 = 2;
const RETRY_MOST_MS: u64 = 200;
/// Times that a check that could not run is tried before its request waits for an operator.
pub(super) const MAX_CHECK_TRIES: u64 = 3;
/// Life of a temporary branch, in milliseconds: long enough for any check, short enough to be swept by
/// expiry should the ledger be lost (rule R3).
const TEMPORARY_LIFE_MS: i64 = 7 * 24 * 3600 * 1000;

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

impl Worker {
    /// Plans one train and carries it through. Everything before is gathered, nothing after is left open.
    pub(super) async fn run_train(&self, epoch: Epoch, gathered: Gathered) -> Result<Progress, WorkerError> {
        let mut plan = plan_train(
            &gathered.requests,
            &TargetPlan {
                head: gathered.head,
                published: &gathered.published,
                protected: &gathered.protected,
                now_ms: self.now_ms(),
                fast_forward_allowed: gathered.all_fresh,
            },
        );
        // Rule R5: of two with one tag name the first rides; when it has landed, the name is taken.
        let (mut tags, now_ms) = (BTreeSet::new(), self.now_ms());
        plan.cars
            .retain(|car| tag_name(&car.class, car.request, now_ms).is_none_or(|name| tags.insert(name)));
        let mut progress =
            Progress { landed: 0, changed: self.record_verdicts(epoch, &gathered, &plan.verdicts).await? };
        if plan.cars.is_empty() {
            return Ok(progress);
        }
        let train = self.new_train_id();
        self.admit(epoch, &train, &plan.cars).await?;
        reached(Step::Admitted);

        let mut candidates = match self.write_candidates(&gathered, plan.cars.clone()).await {
            Ok(Staging::Ready(candidates)) => candidates,
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

        let fence = temporary_ref(self.ledger.queue_id(), &train);
        self.record_train(epoch, &gathered, &train, &fence, &candidates).await?;
        reached(Step::TrainRecorded);
        let staged = match self.stage(epoch, &gathered, &train, &fence, &mut candidates).await? {
            Staged::Applied(table) => table,
            Staged::Lost { again } => {
                progress.changed |= again;
                return Ok(progress);
            }
        };
        reached(Step::Staged);

        match self.check(epoch, &gathered, &train, &staged, &candidates).await? {
            Checked::Passed(required) => {
                let made = self.land(epoch, &gathered, &train, &fence, staged, candidates, required).await?;
                progress.add(made);
            }
            Checked::Evicted => {
                self.drop_train(epoch, &gathered.lane, &train, &fence, &candidates).await?;
                reached(Step::TrainDropped);
                progress.changed = true;
            }
        }
        Ok(progress)
    }

    /// Records what becomes of those who are not in the train. True when any state changed.
    async fn record_verdicts(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        verdicts: &[(RequestId, Verdict)],
    ) -> Result<bool, WorkerError> {
        let mut changes = Vec::new();
        let mut changed = false;
        for (request, verdict) in verdicts {
            let Some(row) = gathered.rows.iter().find(|row| row.id == *request) else { continue };
            let mut classification = None;
            let (event, detail) = match verdict {
                Verdict::Hold { code, text, witnesses } => {
                    let told = detail(text, witnesses);
                    // Who is ahead may have changed while the reason did not.
                    if row.state == RequestState::Held(*code) && row.detail.as_ref() == Some(&told) {
                        continue;
                    }
                    (RequestEvent::Hold(*code), told)
                }
                Verdict::Refuse { code, text, class, witnesses } => {
                    classification = class.map(|class| class.word().to_owned());
                    (RequestEvent::Refuse(*code), detail(text, witnesses))
                }
                Verdict::AlreadyPublished { text } => {
                    classification = Some("already-published".to_owned());
                    (RequestEvent::FindPublished, detail(text, &[]))
                }
                Verdict::Withdraw { code, text } => (RequestEvent::Withdraw(*code), detail(text, &[])),
                Verdict::InReview { text } => {
                    if row.state == RequestState::InReview {
                        continue;
                    }
                    classification = Some("structural".to_owned());
                    (RequestEvent::AskReview, detail(text, &[]))
                }
                Verdict::Repin { to } => {
                    self.ledger.repin(epoch, *request, *to, self.now_ms()).await?;
                    changed = true;
                    continue;
                }
            };
            changes.push(Change {
                request: *request,
                event,
                train: None,
                classification,
                detail: Some(detail),
            });
        }
        if !changes.is_empty() {
            self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        }
        // Waiting in another way is no progress: only an end or a repin makes room for others.
        changed |=
            changes.iter().any(|c| !matches!(c.event, RequestEvent::Hold(_) | RequestEvent::AskReview));
        Ok(changed)
    }

    async fn admit(&self, epoch: Epoch, train: &TrainId, cars: &[Car]) -> Result<(), WorkerError> {
        let changes: Vec<Change> = cars
            .iter()
            .map(|car| Change {
                request: car.request,
                event: RequestEvent::Admit,
                train: Some(train.clone()),
                classification: Some(car.word().to_owned()),
                detail: Some(detail(&car.classification.text, &car.classification.witnesses)),
            })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    async fn refuse_failed(
        &self,
        epoch: Epoch,
        cars: &[Car],
        failures: &[CarFailure],
    ) -> Result<(), WorkerError> {
        let mut changes = Vec::new();
        for car in cars {
            let failure = failures.iter().find(|f| f.request == car.request);
            let (event, text) = match failure {
                Some(failure) => (RequestEvent::Refuse(failure.code), failure.text.clone()),
                None => {
                    (RequestEvent::Requeue, "another request of its train could not be staged".to_owned())
                }
            };
            changes.push(Change {
                request: car.request,
                event,
                train: None,
                classification: None,
                detail: Some(detail(&text, &[])),
            });
        }
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    pub(super) async fn requeue(
        &self,
        epoch: Epoch,
        requests: impl Iterator<Item = RequestId>,
        text: &str,
    ) -> Result<(), WorkerError> {
        let changes: Vec<Change> = requests
            .map(|request| Change {
                request,
                event: RequestEvent::Requeue,
                train: None,
                classification: None,
                detail: Some(detail(text, &[])),
            })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    async fn record_train(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        train: &TrainId,
        fence: &RefName,
        candidates: &Candidates,
    ) -> Result<(), WorkerError> {
        let row = TrainRow {
            train: train.clone(),
            table_uuid: gathered.lane.uuid.clone(),
            target: gathered.lane.target.clone(),
            temp_ref: fence.clone(),
            planned_head: gathered.head,
            tail: candidates.tail,
            candidates: candidates.cars.iter().flat_map(|c| c.candidates.iter().copied()).collect(),
            status: TrainStatus::Staging,
            at_ms: self.now_ms(),
        };
        self.ledger.record_train(epoch, &row).await?;
        Ok(())
    }

    /// One commit (rule L1). As long as only other branches are written meanwhile, the candidates are
    /// written again and the commit is sent again: planning anew would take longer than such a writer
    /// pauses, and the train would never leave.
    async fn stage(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        train: &TrainId,
        fence: &RefName,
        candidates: &mut Candidates,
    ) -> Result<Staged, WorkerError> {
        let mut table = Arc::clone(&gathered.table);
        for tries in 1..MAX_POINTER_RETRIES {
            let outcome = self.send_staging(gathered, &table, fence, candidates).await;
            if !matches!(outcome, CommitOutcome::PointerMoved | CommitOutcome::TableChanged(_)) {
                return self.staged(epoch, gathered, train, fence, candidates, outcome).await;
            }
            let now = self.catalog.load(&gathered.lane.table).await?;
            if conflict(&table, &now) != Loss::PointerMoved || !same_ground(gathered, &now) {
                return self.staged(epoch, gathered, train, fence, candidates, outcome).await;
            }
            let superseded = self.write_again(&now, candidates).await?;
            self.delete_superseded(&now, &superseded).await;
            tracing::debug!(train = %train, tries, "other branches were written; the train is staged again");
            table = now;
        }
        let outcome = self.send_staging(gathered, &table, fence, candidates).await;
        self.staged(epoch, gathered, train, fence, candidates, outcome).await
    }

    async fn send_staging(
        &self,
        gathered: &Gathered,
        table: &LoadedTable,
        fence: &RefName,
        candidates: &Candidates,
    ) -> CommitOutcome {
        let facts = &table.facts;
        let mut requirements = vec![
            Requirement::TableUuid(gathered.lane.uuid.clone()),
            Requirement::RefAt { name: fence.clone(), at: None, role: RefRole::NewName },
            Requirement::RefAt {
                name: gathered.lane.target.clone(),
                at: gathered.head,
                role: RefRole::Target,
            },
            Requirement::CurrentSchema(facts.current_schema_id),
            Requirement::DefaultSpec(facts.default_spec_id),
            Requirement::DefaultSortOrder(facts.default_sort_order_id),
        ];
        for car in &candidates.cars {
            // A branch that has grown keeps its pinned snapshot alive by ancestry; one that stands at its
            // pin must still do so, or the pin may be on its way out.
            if gathered.table.facts.head(&car.car.source) == Some(car.car.pinned) {
                requirements.push(source_at_pin(&car.car));
            }
        }
        let mut updates: Vec<Update> =
            candidates.snapshots.iter().cloned().map(Update::AddSnapshot).collect();
        // Rule R3: age counts from the head's timestamp, and a fast-forwarded head may be old; the whole
        // train is kept, the snapshots that a fast-forward brings included.
        let length: usize = candidates.cars.iter().map(|car| car.candidates.len()).sum();
        let life_ms = TEMPORARY_LIFE_MS.saturating_add(age_of(facts, candidates.tail, self.now_ms()));
        updates.push(Update::SetRef(RefFact {
            name: fence.clone(),
            snapshot_id: candidates.tail,
            kind: RefKind::Branch {
                min_snapshots_to_keep: i32::try_from(length.max(1)).ok(),
                max_snapshot_age_ms: Some(life_ms),
            },
            max_ref_age_ms: Some(life_ms),
        }));
        self.catalog.commit(table, &requirements, updates).await
    }

    /// What became of the staging commit.
    async fn staged(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        train: &TrainId,
        fence: &RefName,
        candidates: &Candidates,
        outcome: CommitOutcome,
    ) -> Result<Staged, WorkerError> {
        let (loss, why) = match outcome {
            CommitOutcome::Landed(_) => {
                // Case O01: what counts is the table as it is read now.
                let table = self.catalog.load(&gathered.lane.table).await?;
                if table.facts.head(fence) == Some(candidates.tail) {
                    self.record_staged(epoch, train, candidates).await?;
                    return Ok(Staged::Applied(table));
                }
                let why = format!("the catalog says that it staged the train, but {fence} is not there");
                return self.staging_unknown(epoch, gathered, candidates, &why).await;
            }
            CommitOutcome::HeadMoved => {
                (Loss::HeadMoved, "the target moved while the train was staged".to_owned())
            }
            CommitOutcome::SourceMoved(name) => {
                (Loss::HeadMoved, format!("{name} moved while the train was staged"))
            }
            CommitOutcome::NameTaken(name) => (Loss::HeadMoved, format!("{name} exists already")),
            CommitOutcome::PointerMoved => {
                let now = self.catalog.load(&gathered.lane.table).await?;
                match conflict(&gathered.table, &now) {
                    Loss::Unexplained => (
                        Loss::Unexplained,
                        format!(
                            "the catalog says that {} moved while the train was staged, but its metadata is \
                             still {}",
                            gathered.lane.table, now.metadata_location
                        ),
                    ),
                    loss => (loss, "the table was written while the train was staged".to_owned()),
                }
            }
            CommitOutcome::TableChanged(what) => {
                (Loss::PointerMoved, format!("the table changed while the train was staged: {what}"))
            }
            CommitOutcome::Fenced => (Loss::HeadMoved, "the temporary branch is gone".to_owned()),
            CommitOutcome::Unknown(what) => {
                return self.staging_unknown(epoch, gathered, candidates, &what).await;
            }
            CommitOutcome::Refused(error) => {
                self.ledger.set_train_status(epoch, train, TrainStatus::Dropped).await?;
                let error = WorkerError::from(error);
                self.wait_out(epoch, requests_of(candidates), &error).await?;
                self.delete_written(&gathered.lane, candidates).await;
                return Err(error);
            }
        };
        self.ledger.set_train_status(epoch, train, TrainStatus::Dropped).await?;
        self.delete_written(&gathered.lane, candidates).await;
        let again = self.give_back(epoch, &gathered.lane, requests_of(candidates), loss, &why).await?;
        Ok(Staged::Lost { again })
    }

    /// Nothing can have landed, since no intent is written. The temporary branch, should it exist, is swept
    /// with the train's row.
    async fn staging_unknown(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        candidates: &Candidates,
        what: &str,
    ) -> Result<Staged, WorkerError> {
        tracing::warn!(table = %gathered.lane.table, "staging has no known outcome: {what}");
        let requests = requests_of(candidates);
        let again = self.give_back(epoch, &gathered.lane, requests, Loss::Unexplained, what).await?;
        Ok(Staged::Lost { again })
    }

    async fn record_staged(
        &self,
        epoch: Epoch,
        train: &TrainId,
        candidates: &Candidates,
    ) -> Result<(), WorkerError> {
        self.ledger.set_train_status(epoch, train, TrainStatus::Staged).await?;
        let changes: Vec<Change> = candidates
            .cars
            .iter()
            .flat_map(|car| [RequestEvent::Stage, RequestEvent::Check].map(|event| (car, event)))
            .map(|(car, event)| Change {
                request: car.car.request,
                event,
                train: Some(train.clone()),
                classification: None,
                // Rule D5: rows that the target loses although the branch never saw them are told.
                detail: (car.vanished_rows > 0).then(|| json!({ VANISHED_ROWS: car.vanished_rows })),
            })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    /// Runs the checks on the candidates and records the evidence. Those who fail leave the train.
    async fn check(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        train: &TrainId,
        staged: &Arc<LoadedTable>,
        candidates: &Candidates,
    ) -> Result<Checked, WorkerError> {
        let evidence = self.gather_evidence(gathered, staged, candidates).await;
        let rows: Vec<_> = evidence.iter().map(|e| (e.requests.clone(), e.evidence.clone())).collect();
        self.ledger.record_evidence(train, &rows, self.now_ms()).await?;
        reached(Step::EvidenceRecorded);
        let order: Vec<RequestId> = requests_of(candidates).collect();
        match decide(&order, &evidence) {
            TrainDecision::Land => Ok(Checked::Passed(required(&evidence))),
            TrainDecision::Evict(evicted) => {
                self.evict(epoch, gathered, candidates, &evicted).await?;
                reached(Step::Evicted);
                Ok(Checked::Evicted)
            }
        }
    }

    async fn evict(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        candidates: &Candidates,
        evicted: &BTreeMap<RequestId, Eviction>,
    ) -> Result<(), WorkerError> {
        let mut changes = Vec::new();
        for car in &candidates.cars {
            let request = car.car.request;
            let (event, detail) = match evicted.get(&request) {
                Some(Eviction::Guilty { code, check, text }) => {
                    (RequestEvent::Refuse(*code), json!({ "text": text, "check": check }))
                }
                Some(Eviction::CouldNotRun { check, error }) => {
                    let tries = tries_of(gathered, request) + 1;
                    let wait = CHECK_RETRY_MS.saturating_mul(1 << tries.min(10));
                    let detail = json!({ "text": error, "check": check, TRIES: tries, RETRY_AT: self.now_ms() + wait });
                    (RequestEvent::Hold(ReasonCode::CheckCouldNotRun), detail)
                }
                None => (
                    RequestEvent::Requeue,
                    json!({ "text": "another request left its train; staged again without it" }),
                ),
            };
            changes.push(Change { request, event, train: None, classification: None, detail: Some(detail) });
        }
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    /// Intent, landing commit, verification, receipt.
    #[allow(clippy::too_many_arguments)]
    async fn land(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        train: &TrainId,
        fence: &RefName,
        mut table: Arc<LoadedTable>,
        candidates: Candidates,
        required: Vec<(SnapshotId, String)>,
    ) -> Result<Progress, WorkerError> {
        let mut keep: BTreeSet<RefName> = BTreeSet::new();
        let intent = Intent {
            id: IntentId(format!("intent-{train}")),
            train: train.clone(),
            table_uuid: gathered.lane.uuid.clone(),
            table: gathered.lane.table.clone(),
            target: gathered.lane.target.clone(),
            planned_head: gathered.head,
            tail: candidates.tail,
            candidates: candidates.cars.iter().flat_map(|c| c.candidates.iter().copied()).collect(),
            temp_ref: fence.clone(),
            cars: candidates
                .cars
                .iter()
                .map(|car| IntentCar {
                    request: car.car.request,
                    candidates: car.candidates.clone(),
                    drop_source: car.car.drop_source.then(|| car.car.source.clone()),
                })
                .collect(),
            required,
        };
        self.ledger.write_intent(epoch, &intent, self.now_ms()).await?;
        reached(Step::IntentWritten);

        // One time for the whole landing: a tag's name must not change while it is sent again.
        let now_ms = self.now_ms();
        let mut tries = 0;
        loop {
            let (requirements, updates) =
                landing(self.ledger.queue_id(), gathered, &table, fence, &candidates, &keep, now_ms);
            let (loss, why) = match self.catalog.commit(&table, &requirements, updates).await {
                CommitOutcome::Landed(_) => {
                    reached(Step::Landed);
                    if let Some(progress) = self.receipt(epoch, &gathered.lane, &intent).await? {
                        return Ok(progress);
                    }
                    self.ledger.mark_unknown(epoch, &intent.id, self.now_ms()).await?;
                    let why = format!(
                        "the catalog says that it landed, but {} is not at {}",
                        intent.target, intent.tail
                    );
                    (Loss::Unexplained, why)
                }
                CommitOutcome::PointerMoved => {
                    let now = self.catalog.load(&gathered.lane.table).await?;
                    let loss = conflict(&table, &now);
                    tries += 1;
                    if tries < MAX_POINTER_RETRIES && loss == Loss::PointerMoved {
                        self.pause(tries).await;
                        table = now;
                        continue;
                    }
                    (loss, "other branches of the table are written without a pause".to_owned())
                }
                CommitOutcome::SourceMoved(name) => {
                    // Rule L6: a branch that grew is kept and the pin lands; anything else is another plan.
                    table = self.catalog.load(&gathered.lane.table).await?;
                    if grew(&table, &candidates, &name) && keep.insert(name) {
                        continue;
                    }
                    (Loss::HeadMoved, "a source branch was reset".to_owned())
                }
                CommitOutcome::HeadMoved => (Loss::HeadMoved, "the target moved meanwhile".to_owned()),
                CommitOutcome::NameTaken(name) => (Loss::HeadMoved, format!("{name} exists already")),
                CommitOutcome::TableChanged(what) => (Loss::PointerMoved, what),
                CommitOutcome::Refused(error) => (Loss::Unexplained, error.to_string()),
                // Somebody removed the fence, or nobody knows: only the catalog's state decides.
                CommitOutcome::Fenced => (Loss::HeadMoved, "the temporary branch was removed".to_owned()),
                CommitOutcome::Unknown(what) => {
                    tracing::warn!(train = %train, "landing has no known outcome: {what}");
                    self.ledger.mark_unknown(epoch, &intent.id, self.now_ms()).await?;
                    (Loss::Unexplained, what)
                }
            };
            return self.settle_own(epoch, gathered, &intent, &candidates, loss, &why).await;
        }
    }

    /// Case O01: the target is read from the catalog before anything is called landed. `None`: it is not.
    async fn receipt(
        &self,
        epoch: Epoch,
        lane: &Lane,
        intent: &Intent,
    ) -> Result<Option<Progress>, WorkerError> {
        let table = self.catalog.load(&intent.table).await?;
        if read_outcome(&table, intent) != Finding::Landed {
            return Ok(None);
        }
        self.ledger.settle_landed(epoch, &intent.id, self.now_ms(), &landed_of(intent)).await?;
        reached(Step::ReceiptWritten);
        self.forget_losses(lane);
        for car in &intent.cars {
            tracing::info!(request = %car.request, table = %intent.table, target = %intent.target,
                snapshot = ?car.candidates.last(), "landed");
        }
        Ok(Some(Progress { landed: intent.cars.len(), changed: true }))
    }

    /// The catalog did not say yes. The fence goes first: then it is proved whether anything landed, and the
    /// train is taken off the catalog (rules L3, R1, R8).
    async fn settle_own(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        intent: &Intent,
        candidates: &Candidates,
        loss: Loss,
        why: &str,
    ) -> Result<Progress, WorkerError> {
        tracing::info!(train = %intent.train, "not known to have landed: {why}");
        let lane = &gathered.lane;
        let mut progress = self.settle_one(epoch, intent).await?;
        if progress.changed && progress.landed == 0 {
            self.drop_train(epoch, lane, &intent.train, &intent.temp_ref, candidates).await?;
            progress.changed = self.give_back(epoch, lane, requests_of(candidates), loss, why).await?;
        } else if progress.landed > 0 {
            self.forget_losses(lane);
        }
        Ok(progress)
    }

    /// Exponential back-off with jitter, bounded.
    pub(super) async fn pause(&self, tries: u32) {
        let most = RETRY_FIRST_MS.saturating_mul(1 << tries.min(10)).min(RETRY_MOST_MS);
        let jitter = (self.random)() % most.max(1);
        tokio::time::sleep(Duration::from_millis(most / 2 + jitter / 2)).await;
    }
}

/// What became of the staging commit.
enum Staged {
    /// The table with the train in it.
    Applied(Arc<LoadedTable>),
    /// Not applied, or not known to be; the requests are given back.
    Lost { again: bool },
}

pub(super) enum Checked {
    /// Passing evidence that the intent names: candidate and check.
    Passed(Vec<(SnapshotId, String)>),
    Evicted,
}

/// Key of a request's detail that counts how often a check could not run.
const TRIES: &str = "tries";
/// Key of a request's detail: when it is tried again, in milliseconds since 1970.
const RETRY_AT: &str = "retry-at-ms";
/// First pause before a check that could not run is tried again, in milliseconds; doubled each time.
const CHECK_RETRY_MS: i64 = 500;

fn tries_of(gathered: &Gathered, request: RequestId) -> u64 {
    gathered
        .rows
        .iter()
        .find(|row| row.id == request)
        .and_then(|row| row.detail.as_ref())
        .and_then(|detail| detail.get(TRIES))
        .and_then(Value::as_u64)
        .unwrap_or_default()
}

/// A request whose check could not run waits a little, and after so many tries for an operator.
pub(super) fn waits_for_its_check(row: &crate::ledger::RequestRow, now_ms: i64) -> bool {
    if row.state != RequestState::Held(ReasonCode::CheckCouldNotRun) {
        return false;
    }
    let Some(detail) = &row.detail else { return false };
    let tries = detail.get(TRIES).and_then(Value::as_u64).unwrap_or_default();
    let retry_at = detail.get(RETRY_AT).and_then(Value::as_i64).unwrap_or_default();
    tries >= MAX_CHECK_TRIES || now_ms < retry_at
}

/// Each request with the snapshot that publishes it.
pub(super) fn landed_of(intent: &Intent) -> Vec<(RequestId, SnapshotId)> {
    intent.cars.iter().filter_map(|car| car.candidates.last().map(|tail| (car.request, *tail))).collect()
}

fn requests_of(candidates: &Candidates) -> impl Iterator<Item = RequestId> {
    candidates.cars.iter().map(|car| car.car.request)
}

fn required(evidence: &[TrainEvidence]) -> Vec<(SnapshotId, String)> {
    evidence.iter().map(|e| (e.evidence.candidate, e.evidence.check.clone())).collect()
}

fn detail(text: &str, witnesses: &[Witness]) -> Value {
    if witnesses.is_empty() {
        json!({ "text": text })
    } else {
        json!({ "text": text, "witnesses": witnesses })
    }
}

/// Is everything that the candidates were planned on as it was?
fn same_ground(gathered: &Gathered, now: &LoadedTable) -> bool {
    let (planned, now) = (&gathered.table.facts, &now.facts);
    now.uuid == planned.uuid
        && now.head(&gathered.lane.target) == gathered.head
        && now.structure() == planned.structure()
        && now.properties == planned.properties
}

fn source_at_pin(car: &Car) -> Requirement {
    Requirement::RefAt { name: car.source.clone(), at: Some(car.pinned), role: RefRole::Source }
}

/// The tag that a class asks for: `{request}` is the request's id, `{date}` the day in UTC.
pub(super) fn tag_name(class: &ClassPolicy, request: RequestId, now_ms: i64) -> Option<RefName> {
    let form = class.tag.as_ref()?;
    let date = chrono::DateTime::from_timestamp_millis(now_ms).map(|at| at.format("%Y-%m-%d").to_string());
    Some(RefName(
        form.replace("{request}", &request.to_string()).replace("{date}", &date.unwrap_or_default()),
    ))
}

/// A branch that descends from its pin; its class must allow that the pin lands without it.
fn grew(table: &LoadedTable, candidates: &Candidates, name: &RefName) -> bool {
    let Some(head) = table.facts.head(name) else { return false };
    candidates.cars.iter().filter(|car| &car.car.source == name).all(|car| {
        car.car.class.on_source_moved == OnSourceMoved::LandPin
            && table.facts.snapshots.is_ancestor(car.car.pinned, head)
    })
}

/// The landing commit of design section 7.
fn landing(
    queue: &QueueId,
    gathered: &Gathered,
    table: &LoadedTable,
    fence: &RefName,
    candidates: &Candidates,
    keep: &BTreeSet<RefName>,
    now_ms: i64,
) -> (Vec<Requirement>, Vec<Update>) {
    let planned = &gathered.table.facts;
    let target = &gathered.lane.target;
    let mut requirements = vec![
        Requirement::TableUuid(gathered.lane.uuid.clone()),
        Requirement::RefAt { name: target.clone(), at: gathered.head, role: RefRole::Target },
        Requirement::RefAt { name: fence.clone(), at: Some(candidates.tail), role: RefRole::Fence },
        Requirement::CurrentSchema(planned.current_schema_id),
        Requirement::DefaultSpec(planned.default_spec_id),
        Requirement::DefaultSortOrder(planned.default_sort_order_id),
    ];
    // Rule R4: the target's retention as loaded; a first `main` has none.
    let loaded = table.facts.refs.get(target);
    let mut updates = vec![
        Update::SetRef(RefFact {
            name: target.clone(),
            snapshot_id: candidates.tail,
            kind: loaded
                .map_or(RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None }, |r| {
                    r.kind.clone()
                }),
            max_ref_age_ms: loaded.and_then(|r| r.max_ref_age_ms),
        }),
        Update::RemoveRef(fence.clone()),
    ];
    let mut dropped: BTreeSet<&RefName> = BTreeSet::new();
    for staged in &candidates.cars {
        let car = &staged.car;
        // Rule R6: whatever took the branch's name meanwhile is not handed over, a tag least of all.
        let is_branch = table.facts.refs.get(&car.source).is_none_or(RefFact::is_branch);
        if car.drop_source && is_branch && !keep.contains(&car.source) && dropped.insert(&car.source) {
            requirements.push(source_at_pin(car));
            updates.push(Update::RemoveRef(car.source.clone()));
        }
        // What the pins kept is on the target now.
        updates.extend(pins_of(&table.facts, queue, car.request).map(Update::RemoveRef));
        if let (Some(name), Some(tail)) = (tag_name(&car.class, car.request, now_ms), staged.tail()) {
            requirements.push(Requirement::RefAt { name: name.clone(), at: None, role: RefRole::NewName });
            updates.push(Update::SetRef(RefFact {
                name,
                snapshot_id: tail,
                kind: RefKind::Tag,
                max_ref_age_ms: None,
            }));
        }
    }
    (requirements, updates)
}
