//! A set's intents, its one landing commit, verification, receipts.

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::evidence::PinnedInput;
use mergeberg_kernel::ids::{Epoch, RefName, RequestId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestEvent;
use serde_json::json;

use super::context::Worker;
use super::error::WorkerError;
use super::judge::Passed;
use super::landing::{grew, intent_of, landing};
use super::losses::{Loss, conflict};
use super::protocol::Progress;
use super::set_run::Part;
use super::settle::{Finding, read_outcome};
use super::step::{Step, reached};
use super::tries::Tries;
use crate::ledger::{Change, Intent};
use crate::table::catalog::{CommitOutcome, SetOutcome, TableChange};
use crate::table::loaded::LoadedTable;

/// What the landing was lost to, and at which part.
struct Lost {
    at: usize,
    loss: Loss,
    why: String,
}

impl Worker {
    /// Intents, landing commit, verification, receipts.
    pub(super) async fn land_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        parts: Vec<Part>,
        staged: Vec<Arc<LoadedTable>>,
        passed: Vec<Passed>,
    ) -> Result<Progress, WorkerError> {
        // Rule L7: no requirement can say this, so the tables are read again right before.
        let mut tables = Vec::with_capacity(parts.len());
        for (at, (part, staged)) in parts.iter().zip(staged).enumerate() {
            let table = self.catalog.load(&part.train.lane().table).await.unwrap_or(staged);
            if let Some(why) = self.other_rules(&part.train, &table) {
                self.drop_all(&parts).await?;
                return self.give_set_back(epoch, &parts, Lost { at, loss: Loss::HeadMoved, why }).await;
            }
            tables.push(table);
        }
        let (mut intents, mut fenced) = (Vec::with_capacity(parts.len()), Vec::new());
        for (part, passed) in parts.iter().zip(passed) {
            intents.push(intent_of(&part.train, &part.candidates, passed.required, Some(set)));
            fenced.extend(passed.fenced);
        }
        // Tables of the set move by this very commit, to what was read of them.
        fenced.retain(|input| parts.iter().all(|part| part.train.lane().table != input.table));
        self.ledger.write_set_intents(epoch, set, &intents, self.now_ms()).await?;
        reached(Step::IntentWritten);

        match self.send_set(epoch, set, &parts, &intents, tables, &fenced).await? {
            Ok(progress) => Ok(progress),
            Err(lost) => self.settle_own_set(epoch, set, &parts, lost).await,
        }
    }

    /// Sends the landing until there is an answer that sending it again would not change.
    async fn send_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        parts: &[Part],
        intents: &[Intent],
        mut tables: Vec<Arc<LoadedTable>>,
        fenced: &[PinnedInput],
    ) -> Result<Result<Progress, Lost>, WorkerError> {
        // One time for the whole landing: a tag's name must not change while it is sent again.
        let now_ms = self.now_ms();
        let mut keep: Vec<BTreeSet<RefName>> = vec![BTreeSet::new(); parts.len()];
        let mut tries = Tries::of_landings(tables.iter().map(Arc::as_ref));
        loop {
            let mut changes: Vec<TableChange> = parts
                .iter()
                .zip(&tables)
                .zip(&keep)
                .map(|((part, table), keep)| {
                    let Part { train, candidates } = part;
                    let (requirements, updates) =
                        landing(self.ledger.queue_id(), train, table, candidates, keep, now_ms);
                    TableChange { base: Arc::clone(table), requirements, updates }
                })
                .collect();
            match self.fences(fenced).await? {
                Ok(fences) => changes.extend(fences),
                Err(why) => return Ok(Err(Lost { at: 0, loss: Loss::HeadMoved, why })),
            }
            let (at, outcome) = match self.catalog.commit_set(&changes).await {
                SetOutcome::Landed(_) => {
                    reached(Step::Landed);
                    if let Some(progress) = self.receipt_of_set(epoch, set, intents).await? {
                        for part in parts {
                            self.forget_losses(part.train.lane());
                        }
                        return Ok(Ok(progress));
                    }
                    self.ledger.mark_set_unknown(epoch, set, self.now_ms()).await?;
                    let why = "the catalog says that the set landed, but not every table shows it".to_owned();
                    return Ok(Err(Lost { at: 0, loss: Loss::Unexplained, why }));
                }
                SetOutcome::Unknown(why) => {
                    tracing::warn!(%set, "landing of a set has no known outcome: {why}");
                    self.ledger.mark_set_unknown(epoch, set, self.now_ms()).await?;
                    return Ok(Err(Lost { at: 0, loss: Loss::Unexplained, why }));
                }
                SetOutcome::NotApplied { at, outcome } => (at, outcome),
            };
            let (Some(part), Some(table)) = (parts.get(at), tables.get_mut(at)) else {
                // A table that a check has read: whether its head stands is seen when it is sent again.
                if self.again(&mut tries).await {
                    continue;
                }
                let why = "tables that checks have read are written without a pause".to_owned();
                return Ok(Err(Lost { at: 0, loss: Loss::PointerMoved, why }));
            };
            let name = &part.train.lane().table;
            let (loss, why) = match outcome {
                CommitOutcome::PointerMoved => {
                    let now = self.catalog.load(name).await?;
                    let loss = conflict(table, &now);
                    if let Some(why) = self.other_rules(&part.train, &now) {
                        (Loss::HeadMoved, why)
                    } else if loss == Loss::PointerMoved && self.again(&mut tries).await {
                        *table = now;
                        continue;
                    } else {
                        (loss, format!("other branches of {name} are written without a pause"))
                    }
                }
                CommitOutcome::SourceMoved(branch) => {
                    // Rule L6: a branch that grew is kept and the pin lands; anything else is another plan.
                    *table = self.catalog.load(name).await?;
                    match self.other_rules(&part.train, table) {
                        Some(why) => (Loss::HeadMoved, why),
                        None if grew(table, &part.candidates, &branch)
                            && keep.get_mut(at).is_some_and(|keep| keep.insert(branch)) =>
                        {
                            continue;
                        }
                        None => (Loss::HeadMoved, format!("a source branch of {name} was reset")),
                    }
                }
                CommitOutcome::HeadMoved => {
                    (Loss::HeadMoved, format!("the target of {name} moved meanwhile"))
                }
                CommitOutcome::NameTaken(taken) => {
                    (Loss::HeadMoved, format!("{taken} of {name} exists already"))
                }
                CommitOutcome::TableChanged(what) => (Loss::PointerMoved, format!("{name}: {what}")),
                CommitOutcome::Unexplained(what) => (Loss::Unexplained, what),
                CommitOutcome::Refused(error) => (Loss::Unexplained, error.to_string()),
                CommitOutcome::Fenced => {
                    (Loss::HeadMoved, format!("the temporary branch of {name} was removed"))
                }
                // No answers of one table.
                CommitOutcome::Landed(_) | CommitOutcome::Unknown(_) => {
                    self.ledger.mark_set_unknown(epoch, set, self.now_ms()).await?;
                    (Loss::Unexplained, format!("the catalog answered for {name} alone"))
                }
            };
            return Ok(Err(Lost { at, loss, why }));
        }
    }

    /// Case O01: every target is read from the catalog before anything is called landed. `None`: not all are.
    async fn receipt_of_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        intents: &[Intent],
    ) -> Result<Option<Progress>, WorkerError> {
        for intent in intents {
            let table = self.catalog.load(&intent.table).await?;
            if read_outcome(&table, intent) != Finding::Landed {
                return Ok(None);
            }
        }
        self.ledger.settle_set_landed(epoch, set, self.now_ms()).await?;
        reached(Step::ReceiptWritten);
        for intent in intents {
            tracing::info!(%set, table = %intent.table, target = %intent.target, snapshot = %intent.tail, "landed");
        }
        Ok(Some(Progress { landed: intents.len(), changed: true }))
    }

    /// The catalog did not say yes: what happened is read, then the set is taken off the catalog.
    async fn settle_own_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        parts: &[Part],
        lost: Lost,
    ) -> Result<Progress, WorkerError> {
        tracing::info!(%set, "not known to have landed: {}", lost.why);
        let progress = self.settle_set(epoch, set, &lost.why).await?;
        if progress.changed && progress.landed == 0 {
            self.drop_all(parts).await?;
            return self.give_set_back(epoch, parts, lost).await;
        }
        Ok(progress)
    }

    /// Gives the parts back: at once within a bound, then at the worker's pace (rule L8).
    async fn give_set_back(&self, epoch: Epoch, parts: &[Part], lost: Lost) -> Result<Progress, WorkerError> {
        let Lost { at, loss, why } = lost;
        let Some(met) = parts.get(at) else { return Ok(Progress { landed: 0, changed: true }) };
        let times = self.count_loss(met.train.lane(), loss);
        let again = times < loss.most();
        let text = if again { why } else { format!("{why}; {times} sets in a row were lost to this") };
        let changes: Vec<Change> = parts
            .iter()
            .enumerate()
            .filter_map(|(place, part)| Some((place, part.request()?)))
            .map(|(place, request)| {
                let event = match (again, place == at) {
                    (true, _) => RequestEvent::Requeue,
                    (false, true) => RequestEvent::Hold(loss.reason()),
                    (false, false) => RequestEvent::Hold(ReasonCode::SetPartHeld),
                };
                Change { detail: Some(json!({ "text": text })), ..Change::new(request, event) }
            })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        if again {
            self.pause(times).await;
        }
        Ok(Progress { landed: 0, changed: again })
    }
}
