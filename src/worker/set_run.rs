//! The order of writes of a set, which is that of a train (`protocol`), on each of its tables.
//!
//! Every table has a train of its own with one car: its candidates, its temporary branch, its evidence. A step is done
//! for all tables before the next one begins. The intents are written together, and one commit lands all of them; it
//! requires every fence, so that whoever removes one forbids the landing of the whole set.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::admission::Car;
use mergeberg_kernel::ids::{Epoch, RequestId, TrainId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestEvent;
use mergeberg_kernel::verdict::{Eviction, TrainDecision, TrainEvidence, decide};
use serde_json::json;

use super::check::{Asked, Heads, WithSet};
use super::context::{Worker, temporary_ref};
use super::error::WorkerError;
use super::gather::Gathered;
use super::judge::Passed;
use super::protocol::{Progress, Train};
use super::stage::{Candidates, Staging};
use super::staging::{Staged, Standing};
use super::step::{Step, reached};
use crate::ledger::{Change, LedgerError};
use crate::table::loaded::LoadedTable;

/// One table's part of a set on its way.
pub(super) struct Part {
    pub train: Train,
    pub candidates: Candidates,
}

impl Part {
    pub fn request(&self) -> Option<RequestId> {
        self.candidates.requests().next()
    }
}

impl Worker {
    /// Carries a set through, from its cars to its receipt.
    pub(super) async fn run_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        parts: Vec<(Gathered, Car)>,
    ) -> Result<Progress, WorkerError> {
        let changed = Progress { landed: 0, changed: true };
        let ids: Vec<TrainId> = parts.iter().map(|_| self.new_train_id()).collect();
        if !self.admit_each(epoch, ids.iter().zip(parts.iter().map(|(_, car)| car))).await? {
            return Ok(changed);
        }
        reached(Step::Admitted);

        let requests: Vec<RequestId> = parts.iter().map(|(_, car)| car.request).collect();
        let mut written: Vec<Part> = Vec::with_capacity(parts.len());
        for (id, (gathered, car)) in ids.into_iter().zip(parts) {
            match self.write_train(epoch, &id, &gathered, vec![car.clone()]).await {
                Ok(Staging::Ready(candidates)) => {
                    let fence = temporary_ref(self.ledger.queue_id(), &id);
                    let train = Train { epoch, id, fence, gathered };
                    written.push(Part { train, candidates: *candidates });
                }
                Ok(Staging::Failed(failures)) => {
                    self.refuse_failed(epoch, &[car], &failures).await?;
                    self.forget_files(&written).await?;
                    return Ok(changed);
                }
                Err(error) => {
                    self.wait_out_set(epoch, &requests, car.request, &error).await?;
                    self.forget_files(&written).await?;
                    return Err(error);
                }
            }
        }
        reached(Step::CandidatesWritten);
        for part in &written {
            match self.record_train(&part.train, &part.candidates, Standing::Admitted).await {
                // All parts are, and none is recorded: from the first one on it is refused.
                Err(WorkerError::Ledger(LedgerError::CarsCancelled { .. })) => {
                    self.forget_files(&written).await?;
                    return Ok(changed);
                }
                outcome => outcome?,
            }
        }
        reached(Step::TrainRecorded);

        let Some(staged) = self.stage_all(epoch, &mut written).await? else { return Ok(changed) };
        reached(Step::Staged);
        match self.judge_all(epoch, &written, &staged).await? {
            Some(passed) => self.land_set(epoch, set, written, staged, passed).await,
            None => {
                self.drop_all(&written).await?;
                reached(Step::TrainDropped);
                Ok(changed)
            }
        }
    }

    /// One staging commit a table. `None`: one of them was lost, and with it the others.
    async fn stage_all(
        &self,
        epoch: Epoch,
        parts: &mut [Part],
    ) -> Result<Option<Vec<Arc<LoadedTable>>>, WorkerError> {
        let mut staged = Vec::with_capacity(parts.len());
        let mut lost = None;
        for (at, part) in parts.iter_mut().enumerate() {
            match self.stage(&part.train, &mut part.candidates).await? {
                Staged::Applied(table) => {
                    self.record_staged(&part.train, &part.candidates).await?;
                    staged.push(table);
                }
                Staged::Lost { again } => {
                    lost = Some((at, again));
                    break;
                }
            }
        }
        let Some((lost, again)) = lost else { return Ok(Some(staged)) };
        let table = parts.get(lost).map(|part| part.train.lane().table.to_string()).unwrap_or_default();
        let text = format!("its part on {table} could not be staged");
        let others = || parts.iter().enumerate().filter(|(at, _)| *at != lost).map(|(_, part)| part);
        for part in others() {
            self.drop_train(&part.train, &part.candidates).await?;
        }
        let event = if again { RequestEvent::Requeue } else { RequestEvent::Hold(ReasonCode::SetPartHeld) };
        let changes: Vec<Change> = others()
            .filter_map(Part::request)
            .map(|request| Change { detail: Some(json!({ "text": text })), ..Change::new(request, event) })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(None)
    }

    /// Evidence of every part. Checks that read another table of the set read what it would become. `None`: the set
    /// was taken off, with what it is refused or held for.
    async fn judge_all(
        &self,
        epoch: Epoch,
        parts: &[Part],
        staged: &[Arc<LoadedTable>],
    ) -> Result<Option<Vec<Passed>>, WorkerError> {
        let mut candidates = BTreeMap::new();
        for (part, table) in parts.iter().zip(staged) {
            if let Some(tail) = table.facts.snapshots.get(part.candidates.tail) {
                candidates.insert(table.facts.name.clone(), (Arc::clone(table), tail.clone()));
            }
        }
        let tables = WithSet { heads: Heads(&*self.catalog), candidates };
        let mut evidence: Vec<Vec<TrainEvidence>> = Vec::with_capacity(parts.len());
        for (part, table) in parts.iter().zip(staged) {
            let asked = Asked::of(&part.candidates);
            evidence.push(self.gather_evidence(&part.train.gathered, table, &asked, &tables, &[]).await);
        }
        for (part, evidence) in parts.iter().zip(&evidence) {
            self.record_evidence(&part.train, evidence).await?;
        }
        reached(Step::EvidenceRecorded);

        let mut leaving: Vec<(&Part, RequestId, Eviction)> = Vec::new();
        for (part, evidence) in parts.iter().zip(&evidence) {
            let order: Vec<RequestId> = part.candidates.requests().collect();
            if let TrainDecision::Evict(evicted) = decide(&order, evidence) {
                leaving.extend(evicted.into_iter().map(|(request, eviction)| (part, request, eviction)));
            }
        }
        if leaving.is_empty() {
            let passed = parts
                .iter()
                .zip(&evidence)
                .map(|(part, evidence)| Passed::of(&part.train.gathered.policy, evidence));
            return Ok(Some(passed.collect()));
        }
        self.leave_set(epoch, parts, &leaving).await?;
        reached(Step::Evicted);
        Ok(None)
    }

    /// A part that is refused takes the others with it; one that could not be checked keeps them waiting.
    async fn leave_set(
        &self,
        epoch: Epoch,
        parts: &[Part],
        leaving: &[(&Part, RequestId, Eviction)],
    ) -> Result<(), WorkerError> {
        let mut changes = Vec::with_capacity(parts.len());
        let refused = leaving.iter().any(|(_, _, eviction)| matches!(eviction, Eviction::Guilty { .. }));
        for (part, request, eviction) in leaving {
            if refused && !matches!(eviction, Eviction::Guilty { .. }) {
                continue;
            }
            let (event, detail) = self.leaves(&part.train.gathered, *request, eviction);
            changes.push(Change { detail: Some(detail), ..Change::new(*request, event) });
        }
        if !refused {
            let names: Vec<String> =
                leaving.iter().map(|(part, _, _)| part.train.lane().table.to_string()).collect();
            let text = format!("a check of its part on {} could not be run", names.join(", "));
            let stays = |request: &RequestId| leaving.iter().all(|(_, other, _)| other != request);
            changes.extend(parts.iter().filter_map(Part::request).filter(stays).map(|request| Change {
                detail: Some(json!({ "text": text })),
                ..Change::new(request, RequestEvent::Hold(ReasonCode::SetPartHeld))
            }));
        }
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }

    /// Takes every part off the catalog. Nothing has landed, and nothing of it can.
    pub(super) async fn drop_all(&self, parts: &[Part]) -> Result<(), WorkerError> {
        for part in parts {
            self.drop_train(&part.train, &part.candidates).await?;
        }
        Ok(())
    }

    /// Files of candidates that no ledger and no catalog has heard of.
    async fn forget_files(&self, parts: &[Part]) -> Result<(), WorkerError> {
        for part in parts {
            self.forget_train(&part.train, &part.candidates).await?;
        }
        Ok(())
    }

    /// Nobody's fault: the part that met it waits under its name, the others for it.
    async fn wait_out_set(
        &self,
        epoch: Epoch,
        requests: &[RequestId],
        met: RequestId,
        error: &WorkerError,
    ) -> Result<(), WorkerError> {
        let own = error.holds_lane().map_or(RequestEvent::Requeue, RequestEvent::Hold);
        let others = match own {
            RequestEvent::Hold(_) => RequestEvent::Hold(ReasonCode::SetPartHeld),
            other => other,
        };
        let detail = json!({ "text": error.to_string() });
        let changes: Vec<Change> = requests
            .iter()
            .map(|request| {
                let event = if *request == met { own } else { others };
                Change { detail: Some(detail.clone()), ..Change::new(*request, event) }
            })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }
}
