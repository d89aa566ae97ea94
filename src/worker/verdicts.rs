//! What becomes of those who are not in the train, and of those who are: written before anything is staged.

use mergeberg_kernel::admission::{Car, Verdict};
use mergeberg_kernel::classify::{Class, Witness};
use mergeberg_kernel::ids::{Epoch, RequestId, SnapshotId, TrainId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde_json::{Value, json};

use super::context::Worker;
use super::error::WorkerError;
use super::gather::Gathered;
use super::stage::CarFailure;
use crate::ledger::{Change, LedgerError, RequestRow};

impl Worker {
    /// Records what becomes of those who are not in the train. True when any state changed.
    pub(super) async fn record_verdicts(
        &self,
        epoch: Epoch,
        gathered: &Gathered,
        verdicts: &[(RequestId, Verdict)],
    ) -> Result<bool, WorkerError> {
        let mut changes = Vec::new();
        let mut changed = false;
        for (request, verdict) in verdicts {
            let Some(row) = gathered.rows.iter().find(|row| row.id == *request) else { continue };
            match answer(row, verdict) {
                Answer::AsItIs => {}
                Answer::Change(change) => changes.push(change),
                Answer::Repin(to) => {
                    self.ledger.repin(epoch, *request, to, self.now_ms()).await?;
                    changed = true;
                }
            }
        }
        if !changes.is_empty() {
            self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        }
        self.order_externals(epoch, &gathered.rows, verdicts).await?;
        // Waiting in another way is no progress: only an end or a repin makes room for others.
        changed |=
            changes.iter().any(|c| !matches!(c.event, RequestEvent::Hold(_) | RequestEvent::AskReview));
        Ok(changed)
    }

    /// `false`: one of them was taken back meanwhile, and nobody is admitted.
    pub(super) async fn admit(
        &self,
        epoch: Epoch,
        train: &TrainId,
        cars: &[Car],
    ) -> Result<bool, WorkerError> {
        self.admit_each(epoch, cars.iter().map(|car| (train, car))).await
    }

    /// As [`Self::admit`], of the several trains of a set.
    pub(super) async fn admit_each(
        &self,
        epoch: Epoch,
        cars: impl Iterator<Item = (&TrainId, &Car)>,
    ) -> Result<bool, WorkerError> {
        let admissions: Vec<Change> = cars.map(|(train, car)| admission(train, car)).collect();
        let Some(train) = admissions.iter().find_map(|change| change.train.as_ref()) else { return Ok(true) };
        match self.ledger.admit(epoch, train, &admissions, self.now_ms()).await {
            Err(LedgerError::CarsCancelled { .. }) => Ok(false),
            outcome => Ok(outcome.map(|()| true)?),
        }
    }

    pub(super) async fn refuse_failed(
        &self,
        epoch: Epoch,
        cars: &[Car],
        failures: &[CarFailure],
    ) -> Result<(), WorkerError> {
        let mut changes = Vec::new();
        for car in cars {
            let failure = failures.iter().find(|f| f.request == car.request);
            let (event, told) = match failure {
                Some(CarFailure { code, text, conflicts, request: _ }) => {
                    let mut told = detail(text, &[]);
                    if !conflicts.is_empty() {
                        told["conflicts"] = json!(conflicts);
                    }
                    (RequestEvent::Refuse(*code), told)
                }
                None => {
                    (RequestEvent::Requeue, detail("another request of its train could not be staged", &[]))
                }
            };
            changes.push(Change {
                request: car.request,
                event,
                train: None,
                classification: None,
                detail: Some(told),
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
}

pub(super) fn admission(train: &TrainId, car: &Car) -> Change {
    Change {
        request: car.request,
        event: RequestEvent::Admit,
        train: Some(train.clone()),
        classification: Some(car.word().to_owned()),
        detail: Some(detail(&car.classification.text, &car.classification.witnesses)),
    }
}

/// A verdict in the ledger's words.
pub(super) enum Answer {
    /// Nothing is new.
    AsItIs,
    Change(Change),
    Repin(SnapshotId),
}

pub(super) fn answer(row: &RequestRow, verdict: &Verdict) -> Answer {
    let mut classification = None;
    let (event, detail) = match verdict {
        Verdict::Hold { code, text, witnesses } => {
            let told = detail(text, witnesses);
            // Who is ahead may have changed while the reason did not.
            if row.state == RequestState::Held(*code) && row.detail.as_ref() == Some(&told) {
                return Answer::AsItIs;
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
                return Answer::AsItIs;
            }
            classification = Some("structural".to_owned());
            (RequestEvent::AskReview, detail(text, &[]))
        }
        Verdict::Repin { to } => return Answer::Repin(*to),
        Verdict::RunExternal { text, witnesses } => {
            let (code, told) = (ReasonCode::ExternalRunning, detail(text, witnesses));
            classification = Some(Class::Rebase.word().to_owned());
            if row.state == RequestState::Held(code) && row.detail.as_ref() == Some(&told) {
                return Answer::AsItIs;
            }
            (RequestEvent::Hold(code), told)
        }
    };
    Answer::Change(Change { request: row.id, event, train: None, classification, detail: Some(detail) })
}

pub(super) fn detail(text: &str, witnesses: &[Witness]) -> Value {
    if witnesses.is_empty() {
        json!({ "text": text })
    } else {
        json!({ "text": text, "witnesses": witnesses })
    }
}
