//! Trains that were lost to other writers: tried again at once within a bound, then at the worker's pace.
//!
//! Rule L8, case O26. A train that loses is nobody's fault, so its requests are queued again. When it goes on
//! like that they are held with the reason, and the next try waits for the next poll: a catalog that
//! answers "conflict" for ever, or a writer that never pauses, must neither spin the worker nor pass
//! unnoticed. What is counted lives in memory: a new worker starts with a clean slate.

use std::collections::HashMap;

use mergeberg_kernel::ids::{Epoch, RefName, RequestId, TableUuid};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestEvent;
use serde_json::json;

use super::context::{Lane, Worker, lock};
use super::error::WorkerError;
use crate::ledger::Change;
use crate::table::loaded::LoadedTable;

/// What a train was lost to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Loss {
    /// The target, a source or the table's structure moved.
    HeadMoved,
    /// Other branches of the table are written.
    PointerMoved,
    /// The catalog reports a conflict, or says yes, and the table is as it was.
    Unexplained,
}

impl Loss {
    /// Losses in a row that are tried again at once.
    pub(super) const fn most(self) -> u32 {
        match self {
            Self::HeadMoved => 5,
            Self::PointerMoved => 30,
            Self::Unexplained => 3,
        }
    }

    pub(super) fn reason(self) -> ReasonCode {
        match self {
            Self::HeadMoved | Self::PointerMoved => ReasonCode::HeadKeepsMoving,
            Self::Unexplained => ReasonCode::CatalogUnavailable,
        }
    }
}

/// Losses in a row, by lane.
pub(super) type Losses = HashMap<(TableUuid, RefName), HashMap<Loss, u32>>;

impl Worker {
    pub(super) fn forget_losses(&self, lane: &Lane) {
        lock(&self.losses).remove(&(lane.uuid.clone(), lane.target.clone()));
    }

    /// How often in a row this was lost, this time included.
    pub(super) fn count_loss(&self, lane: &Lane, loss: Loss) -> u32 {
        let mut losses = lock(&self.losses);
        let counts = losses.entry((lane.uuid.clone(), lane.target.clone())).or_default();
        let count = counts.entry(loss).or_default();
        *count = count.saturating_add(1);
        *count
    }

    /// Gives the requests of a lost train back, those of them that are not queued already. `true`: they may
    /// be tried again at once.
    pub(super) async fn give_back(
        &self,
        epoch: Epoch,
        lane: &Lane,
        requests: impl Iterator<Item = RequestId>,
        loss: Loss,
        why: &str,
    ) -> Result<bool, WorkerError> {
        let times = self.count_loss(lane, loss);
        let again = times < loss.most();
        let (event, text) = if again {
            (RequestEvent::Requeue, why.to_owned())
        } else {
            tracing::warn!(table = %lane.table, target = %lane.target, times, "trains are lost in a row: {why}");
            (RequestEvent::Hold(loss.reason()), format!("{why}; {times} trains in a row were lost to this"))
        };
        let changes: Vec<Change> = requests
            .map(|request| Change { detail: Some(json!({ "text": text })), ..Change::new(request, event) })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        if again {
            self.pause(times).await;
        }
        Ok(again)
    }
    /// Gives requests back for something that is nobody's fault: where it is the table's trouble they wait
    /// under its name, so that their owners see it (promise 7).
    pub(super) async fn wait_out(
        &self,
        epoch: Epoch,
        requests: impl Iterator<Item = RequestId>,
        error: &WorkerError,
    ) -> Result<(), WorkerError> {
        let event = error.holds_lane().map_or(RequestEvent::Requeue, RequestEvent::Hold);
        let detail = json!({ "text": error.to_string() });
        let changes: Vec<Change> = requests
            .map(|request| Change { detail: Some(detail.clone()), ..Change::new(request, event) })
            .collect();
        self.ledger.apply(Some(epoch), &changes, self.now_ms()).await?;
        Ok(())
    }
}

/// A conflict that reading the table again explains, or not.
pub(super) fn conflict(before: &LoadedTable, now: &LoadedTable) -> Loss {
    if before.metadata_location == now.metadata_location { Loss::Unexplained } else { Loss::PointerMoved }
}
