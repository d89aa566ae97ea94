//! Step 5 of the protocol: evidence under the candidates' own ids, and who leaves the train for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mergeberg_kernel::evidence::{Evidence, PinnedInput};
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::policy::TablePolicy;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use mergeberg_kernel::verdict::{Eviction, TrainDecision, TrainEvidence, decide};
use serde_json::{Value, json};

use super::check::{Asked, Heads};
use super::context::Worker;
use super::error::WorkerError;
use super::gather::Gathered;
use super::protocol::Train;
use super::stage::Candidates;
use super::staging::{Staged, staged_changes};
use super::step::{Step, reached};
use crate::ledger::{Change, Found, Intent, RequestRow};

/// Times that a check that could not run is tried before its request waits for an operator.
pub(super) const MAX_CHECK_TRIES: u64 = 3;
/// Key of a request's detail that counts how often a check could not run.
const TRIES: &str = "tries";
/// Key of a request's detail: when it is tried again, in milliseconds since 1970.
const RETRY_AT: &str = "retry-at-ms";
/// First pause before a check that could not run is tried again, in milliseconds; doubled each time.
const CHECK_RETRY_MS: i64 = 500;

/// What a train that passed rests on.
pub(super) struct Passed {
    /// Passing evidence that the intent names: candidate and check.
    pub required: Vec<(SnapshotId, String)>,
    /// Heads of other tables that have to stand until the train has landed (rule E7).
    pub fenced: Vec<PinnedInput>,
}

/// What was found of a train that is staged, and whether the ledger knows that it is.
pub(super) struct Findings {
    pub evidence: Vec<TrainEvidence>,
    /// Its requests are recorded as staged and in their checks: these took longer than the staging.
    pub recorded: bool,
}

impl Passed {
    pub fn of(policy: &TablePolicy, evidence: &[TrainEvidence]) -> Self {
        let required = evidence.iter().map(|e| (e.evidence.candidate, e.evidence.check.clone())).collect();
        let is_fenced = |id: &str| policy.checks.iter().any(|check| check.id == id && check.kind.is_fenced());
        let mut fenced: Vec<PinnedInput> = Vec::new();
        for item in evidence.iter().filter(|item| is_fenced(&item.evidence.check)) {
            for input in &item.evidence.inputs {
                if !fenced.contains(input) {
                    fenced.push(input.clone());
                }
            }
        }
        Self { required, fenced }
    }
}

pub(super) enum Checked {
    /// Nothing of the evidence is recorded yet.
    Passed(Findings),
    Evicted,
}

impl Worker {
    /// Stages the train, and runs its checks meanwhile, but for those that passed when it was written ahead: the
    /// candidates' ids and files are fixed once they are written, and both wait for storage most of their time.
    /// Nothing is recorded before the train is known to be staged; what was found of candidates that had to be
    /// written again is thrown away.
    pub(super) async fn stage_and_check(
        &self,
        train: &Train,
        candidates: &mut Candidates,
    ) -> Result<(Staged, Findings), WorkerError> {
        let asked = Asked::of(candidates);
        let early = train.gathered.table.with_candidates(&candidates.snapshots);
        let heads = Heads(&*self.catalog);
        let begun = candidates.checking.take();
        let checks = async {
            let passed = match begun {
                Some(checking) => checking.passes(&train.gathered.policy_digest).await,
                None => Vec::new(),
            };
            if !passed.is_empty() {
                self.checked_ahead.fetch_add(1, Ordering::Relaxed);
            }
            self.gather_evidence(&train.gathered, &early, &asked, &heads, &passed).await
        };
        tokio::pin!(checks);
        let mut found = None;
        let staged = {
            let staging = self.stage(train, candidates);
            tokio::pin!(staging);
            loop {
                tokio::select! {
                    staged = &mut staging => break staged?,
                    evidence = &mut checks, if found.is_none() => found = Some(evidence),
                }
            }
        };
        let table = match &staged {
            Staged::Applied(table) => Arc::clone(table),
            // Whoever stages it next has it checked.
            Staged::Lost { .. } => {
                return Ok((staged, Findings { evidence: Vec::new(), recorded: false }));
            }
        };
        reached(Step::Staged);
        let found = found.filter(|_| !candidates.rewritten);
        let recorded = found.is_none();
        if recorded {
            // Checks may take long, and people see what a request waits for.
            self.record_staged(train, candidates).await?;
        }
        let evidence = match found {
            Some(evidence) => evidence,
            None if candidates.rewritten => {
                self.gather_evidence(&train.gathered, &table, &asked, &heads, &[]).await
            }
            None => checks.await,
        };
        Ok((staged, Findings { evidence, recorded }))
    }

    /// Those who fail leave the train. The evidence is recorded with the intent, or before they leave.
    pub(super) async fn judge(
        &self,
        train: &Train,
        candidates: &Candidates,
        findings: Findings,
    ) -> Result<Checked, WorkerError> {
        let order: Vec<RequestId> = candidates.requests().collect();
        match decide(&order, &findings.evidence) {
            TrainDecision::Land => Ok(Checked::Passed(findings)),
            TrainDecision::Evict(evicted) => {
                self.record_findings(train, candidates, &findings).await?;
                reached(Step::EvidenceRecorded);
                self.evict(train, candidates, &evicted).await?;
                reached(Step::Evicted);
                Ok(Checked::Evicted)
            }
        }
    }

    pub(super) async fn record_evidence(
        &self,
        train: &Train,
        evidence: &[TrainEvidence],
    ) -> Result<(), WorkerError> {
        self.ledger.record_evidence(&train.id, &rows_of(evidence), self.now_ms()).await?;
        Ok(())
    }

    /// What was found of a train that does not get as far as its intent.
    pub(super) async fn record_findings(
        &self,
        train: &Train,
        candidates: &Candidates,
        findings: &Findings,
    ) -> Result<(), WorkerError> {
        if !findings.recorded {
            self.record_staged(train, candidates).await?;
        }
        self.record_evidence(train, &findings.evidence).await
    }

    /// Writes the intent, with what was found of the train.
    pub(super) async fn write_intent(
        &self,
        train: &Train,
        candidates: &Candidates,
        findings: &Findings,
        intent: &Intent,
    ) -> Result<(), WorkerError> {
        let changes = if findings.recorded { Vec::new() } else { staged_changes(train, candidates) };
        let found = Found { changes: &changes, evidence: &rows_of(&findings.evidence) };
        self.ledger.write_found_intent(train.epoch, &found, intent, self.now_ms()).await?;
        Ok(())
    }

    async fn evict(
        &self,
        train: &Train,
        candidates: &Candidates,
        evicted: &BTreeMap<RequestId, Eviction>,
    ) -> Result<(), WorkerError> {
        let mut changes = Vec::new();
        for car in &candidates.cars {
            let request = car.car.request;
            let (event, detail) = match evicted.get(&request) {
                Some(eviction) => self.leaves(&train.gathered, request, eviction),
                None => (
                    RequestEvent::Requeue,
                    json!({ "text": "another request left its train; staged again without it" }),
                ),
            };
            changes.push(Change { request, event, train: None, classification: None, detail: Some(detail) });
        }
        self.ledger.apply(Some(train.epoch), &changes, self.now_ms()).await?;
        Ok(())
    }
}

fn rows_of(evidence: &[TrainEvidence]) -> Vec<(Vec<RequestId>, Evidence)> {
    evidence.iter().map(|e| (e.requests.clone(), e.evidence.clone())).collect()
}

impl Worker {
    /// What becomes of a request that leaves its train for a check.
    pub(super) fn leaves(
        &self,
        gathered: &Gathered,
        request: RequestId,
        eviction: &Eviction,
    ) -> (RequestEvent, Value) {
        match eviction {
            Eviction::Guilty { code, check, text } => {
                (RequestEvent::Refuse(*code), json!({ "text": text, "check": check }))
            }
            Eviction::CouldNotRun { check, error } => {
                let tries = tries_of(gathered, request) + 1;
                let retry_at = self.now_ms() + rest_after(tries);
                let detail = json!({ "text": error, "check": check, TRIES: tries, RETRY_AT: retry_at });
                (RequestEvent::Hold(ReasonCode::CheckCouldNotRun), detail)
            }
        }
    }
}

/// How long what could not run that often rests before it is tried again, in milliseconds.
pub(super) fn rest_after(tries: u64) -> i64 {
    CHECK_RETRY_MS.saturating_mul(1 << tries.min(10))
}

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
pub(super) fn waits_for_its_check(row: &RequestRow, now_ms: i64) -> bool {
    if row.state != RequestState::Held(ReasonCode::CheckCouldNotRun) {
        return false;
    }
    let Some(detail) = &row.detail else { return false };
    let tries = detail.get(TRIES).and_then(Value::as_u64).unwrap_or_default();
    let retry_at = detail.get(RETRY_AT).and_then(Value::as_i64).unwrap_or_default();
    tries >= MAX_CHECK_TRIES || now_ms < retry_at
}
