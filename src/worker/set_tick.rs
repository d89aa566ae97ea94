//! One look at one set: all of its lanes, then whether it goes. The lanes are the set's own meanwhile.

use mergeberg_kernel::admission::set::{PartTurn, SetDecision, SetPart, decide};
use mergeberg_kernel::admission::{Car, Verdict};
use mergeberg_kernel::ids::{Epoch, RequestId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde_json::json;

use super::context::{Lane, Worker};
use super::error::WorkerError;
use super::gather::Gathered;
use super::judge::waits_for_its_check;
use super::protocol::Progress;
use super::tick::{Look, Looking, is_retried};
use super::verdicts::{Answer, answer};
use crate::config::PolicySet;
use crate::ledger::{Change, OpenSet, RequestRow};

impl Worker {
    /// Takes the lanes in the order of table uuids. What keeps one of them from being looked at holds the set.
    pub(super) async fn tick_set(
        &self,
        epoch: Epoch,
        set: &OpenSet,
        policies: &PolicySet,
    ) -> Result<Progress, WorkerError> {
        let mut progress = Progress::default();
        let mut lanes: Vec<(Lane, Option<Box<Gathered>>)> = Vec::with_capacity(set.lanes.len());
        for (table, uuid, target) in &set.lanes {
            let lane = Lane { table: table.clone(), uuid: uuid.clone(), target: target.clone() };
            self.discard_ahead(self.take_ahead(&lane)).await;
            let policy = policies.for_table(&lane.table);
            match self.look_at_lane(epoch, &lane, &policy, Looking::ForSet).await {
                Ok(Look::Done(made)) => {
                    progress.add(made);
                    lanes.push((lane, None));
                }
                Ok(Look::Ready(gathered, _)) => lanes.push((lane, Some(gathered))),
                Err(error) => {
                    if let Some(code) = error.holds_lane().filter(|_| is_retried(&error)) {
                        self.hold_set(epoch, set.id, &lane, code, &error.to_string()).await?;
                    }
                    return Err(error);
                }
            }
        }
        let rows = self.ledger.parts(set.id).await?;
        if rows.iter().any(|row| row.state.is_final()) {
            // It ended meanwhile.
            return Ok(progress);
        }
        let now_ms = self.now_ms();
        let mut parts = Vec::with_capacity(rows.len());
        for (lane, gathered) in &mut lanes {
            let Some(row) = rows.iter().find(|row| is_of(row, lane)) else { continue };
            let turn = match gathered {
                Some(gathered) => turn_of(gathered, row, now_ms),
                None => None,
            };
            parts.push(SetPart { request: row.id, table: lane.table.clone(), turn });
        }
        // Case O36: a row that cannot be read needs a person, and keeps nobody but its set waiting.
        let planned = rows.iter().find_map(|row| row.set).map_or(0, |set| set.parts as usize);
        let missing = parts.len() != planned;
        match decide(parts, missing) {
            SetDecision::Not(verdicts) => {
                progress.changed |= self.record_parts(epoch, &rows, &verdicts).await?;
            }
            SetDecision::Go(cars) => {
                let gathered = lanes.into_iter().filter_map(|(_, gathered)| gathered);
                let parts: Vec<(Gathered, Car)> = gathered.map(|gathered| *gathered).zip(cars).collect();
                progress.add(self.run_set(epoch, set.id, parts).await?);
            }
        }
        Ok(progress)
    }

    /// Writes what becomes of the parts, all at once. True when any of them changed its state.
    async fn record_parts(
        &self,
        epoch: Epoch,
        rows: &[RequestRow],
        verdicts: &[(RequestId, Verdict)],
    ) -> Result<bool, WorkerError> {
        let (mut changes, mut changed) = (Vec::new(), false);
        for (request, verdict) in verdicts {
            let Some(row) = rows.iter().find(|row| row.id == *request) else { continue };
            match answer(row, verdict) {
                Answer::AsItIs => {}
                Answer::Change(change) => {
                    // Whether others wait for a part depends on the reason for which it waits itself.
                    changed |= row.state.after(change.event).is_ok_and(|next| next != row.state);
                    changes.push(change);
                }
                Answer::Repin(to) => {
                    self.ledger.repin(epoch, *request, to, self.now_ms()).await?;
                    changed = true;
                }
            }
        }
        if !changes.is_empty() {
            self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        }
        self.order_externals(epoch, rows, verdicts).await?;
        Ok(changed)
    }

    /// The part of this lane waits for `code`, and the others for it.
    async fn hold_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        lane: &Lane,
        code: ReasonCode,
        text: &str,
    ) -> Result<(), WorkerError> {
        let rows = self.ledger.parts(set).await?;
        let holds = rows.iter().filter(|row| row.state.is_waiting()).map(|row| {
            let (code, text) = if is_of(row, lane) {
                (code, text.to_owned())
            } else {
                (ReasonCode::SetPartHeld, format!("{}: {text}", lane.table))
            };
            let event = RequestEvent::Hold(code);
            Change { detail: Some(json!({ "text": text })), ..Change::new(row.id, event) }
        });
        let changes: Vec<Change> = holds.collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }
}

fn is_of(row: &RequestRow, lane: &Lane) -> bool {
    row.table_uuid == lane.uuid && row.target == lane.target
}

/// The part's turn in its lane, now that its set is looked at: nothing of it is held elsewhere until that is decided.
fn turn_of(gathered: &mut Gathered, row: &RequestRow, now_ms: i64) -> Option<PartTurn> {
    for request in gathered.requests.iter_mut().filter(|facts| facts.request == row.id) {
        if let Some(part) = &mut request.part {
            part.held_elsewhere = false;
        }
    }
    let turn = gathered.plan_anew(now_ms).parts.into_iter().find(|(request, _)| *request == row.id);
    match turn {
        Some((_, turn)) => Some(turn),
        None if waits_for_its_check(row, now_ms) || !is_waiting(row) => None,
        None => Some(PartTurn::Behind("many requests came first".to_owned())),
    }
}

fn is_waiting(row: &RequestRow) -> bool {
    matches!(row.state, RequestState::Queued | RequestState::Held(_) | RequestState::InReview)
}
