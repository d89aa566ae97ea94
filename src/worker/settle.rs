//! After a crash, a lost answer or a refusal: what happened is read from the catalog, never assumed.
//!
//! The fence decides (rule L3). Removing the temporary branch on the condition that it is at c_n proves
//! that the landing has not happened and never will, for the landing requires that branch. When it is gone
//! already, the target's ancestry and log tell (rule L4). Everything else is unknown and holds the lane.

use std::collections::BTreeMap;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::ids::{Epoch, QueueId, RefName, SnapshotId};
use mergeberg_kernel::lineage::ChainEnd;
use serde::Deserialize;

use super::checkpoints::{CHECKPOINT_KEY, add_noted};
use super::context::{Lane, Worker, temporary_prefix};
use super::error::WorkerError;
use super::landing::landed_of;
use super::protocol::{Progress, Train};
use super::stage::{Candidates, REQUEST_KEY};
use super::tries::Tries;
use crate::ledger::{Intent, LandingRow, TrainRow, TrainStatus};
use crate::table::catalog::CommitOutcome;
use crate::table::cleanup::{WrittenFiles, delete_files};
use crate::table::loaded::LoadedTable;

/// Times that the removal of a train that did not land is sent within one tick.
const MAX_REMOVALS: u32 = 10;
/// Looks at the tables of a set within one tick; each look at one of them has the bounds of [`Tries`].
pub(super) const MAX_SET_LOOKS: u32 = 10;

/// What the catalog shows of a landing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    Landed,
    /// In the snapshot log, but not in the ancestry any more.
    RolledBack,
    NotLanded,
    /// Landed in the place of a head that it was not planned on: somebody's commit is lost.
    Replaced,
    Unknown,
}

impl Worker {
    /// Settles every open intent of a lane, then sweeps what its dead trains left. `false`: an outcome is
    /// still unknown and nothing of this lane may land. `table` is as it was just read.
    pub(super) async fn settle_lane(
        &self,
        epoch: Epoch,
        lane: &Lane,
        table: &LoadedTable,
    ) -> Result<bool, WorkerError> {
        let of_lane = |landing: &LandingRow| {
            landing.intent.table_uuid == lane.uuid && landing.intent.target == lane.target
        };
        let mut tried = false;
        for landing in self.ledger.open_intents().await?.iter().filter(|landing| of_lane(landing)) {
            let why = "the landing was not applied";
            match landing.intent.set {
                Some(set) => self.settle_set(epoch, set, why).await?,
                None => self.settle_one(epoch, &landing.intent, why).await?,
            };
            tried = true;
        }
        if tried && self.ledger.open_intents().await?.iter().any(of_lane) {
            return Ok(false);
        }
        self.sweep(epoch, lane, table).await?;
        Ok(true)
    }

    /// `why` is what its requests are told, should it not have landed.
    pub(super) async fn settle_one(
        &self,
        epoch: Epoch,
        intent: &Intent,
        why: &str,
    ) -> Result<Progress, WorkerError> {
        let finding = self.find_out(intent).await?;
        match finding {
            Finding::Landed | Finding::RolledBack => {
                self.ledger.settle_landed(epoch, &intent.id, self.now_ms(), &landed_of(intent)).await?;
                if finding == Finding::RolledBack {
                    tracing::warn!(intent = %intent.id, "landed, and rolled back afterwards");
                }
                Ok(Progress { landed: intent.cars.len(), changed: true })
            }
            Finding::NotLanded => {
                self.ledger.settle_not_landed(epoch, &intent.id, self.now_ms(), why).await?;
                Ok(Progress { landed: 0, changed: true })
            }
            Finding::Replaced | Finding::Unknown => {
                tracing::error!(
                    intent = %intent.id, table = %intent.table, target = %intent.target,
                    "the outcome of a landing is unknown; the target is held"
                );
                self.ledger.mark_unknown(epoch, &intent.id, self.now_ms()).await?;
                Ok(Progress::default())
            }
        }
    }

    pub(super) async fn find_out(&self, intent: &Intent) -> Result<Finding, WorkerError> {
        let mut tries: Option<Tries> = None;
        let mut removed = false;
        loop {
            let table = self.catalog.load(&intent.table).await?;
            let tries = tries.get_or_insert_with(|| Tries::of_status(&table));
            if table.facts.uuid != intent.table_uuid {
                // The name belongs to another table now; what became of ours cannot be read from it.
                return Ok(Finding::Unknown);
            }
            if table.facts.head(&intent.temp_ref).is_none() {
                match read_outcome(&table, intent) {
                    // Our own removal came first: the landing can never have been applied (rule L3).
                    Finding::Unknown | Finding::NotLanded if removed => return Ok(Finding::NotLanded),
                    Finding::Unknown | Finding::NotLanded if !self.is_current(&table, intent).await? => {}
                    finding => return Ok(finding),
                }
                if !self.again(tries).await {
                    return Ok(Finding::Unknown);
                }
                continue;
            }
            let updates = vec![Update::RemoveRef(intent.temp_ref.clone())];
            let requirements = [
                Requirement::TableUuid(intent.table_uuid.clone()),
                Requirement::RefAt {
                    name: intent.temp_ref.clone(),
                    at: Some(intent.tail),
                    role: RefRole::Fence,
                },
            ];
            match self.catalog.commit(&table, &requirements, updates).await {
                // Read again before it is believed (case O01).
                CommitOutcome::Landed(_) => removed = true,
                CommitOutcome::Fenced
                | CommitOutcome::PointerMoved
                | CommitOutcome::Unexplained(_)
                | CommitOutcome::Unknown(_) => {}
                CommitOutcome::Refused(error) => return Err(error.into()),
                CommitOutcome::HeadMoved
                | CommitOutcome::SourceMoved(_)
                | CommitOutcome::NameTaken(_)
                | CommitOutcome::TableChanged(_) => return Ok(Finding::Unknown),
            }
            if !self.again(tries).await {
                return Ok(Finding::Unknown);
            }
        }
    }

    /// Is this the table's present state? A replica that lags behind shows the table before the train was
    /// staged, where nothing has landed and there is no fence either. A commit that changes nothing, on
    /// condition that target and fence are as they were read, proves that they are.
    async fn is_current(&self, table: &LoadedTable, intent: &Intent) -> Result<bool, WorkerError> {
        if self.catalog.capabilities().current_reads {
            return Ok(true);
        }
        let facts = &table.facts;
        let requirements = [
            Requirement::TableUuid(intent.table_uuid.clone()),
            Requirement::RefAt {
                name: intent.target.clone(),
                at: facts.head(&intent.target),
                role: RefRole::Target,
            },
            Requirement::RefAt { name: intent.temp_ref.clone(), at: None, role: RefRole::Fence },
        ];
        let nothing = vec![Update::RemoveRef(intent.temp_ref.clone())];
        match self.catalog.commit(table, &requirements, nothing).await {
            CommitOutcome::Landed(_) => Ok(true),
            CommitOutcome::Refused(error) => Err(error.into()),
            _ => Ok(false),
        }
    }

    /// Takes a train off the catalog: its branch and its snapshots in one commit (rule R1), then its files.
    pub(super) async fn drop_train(&self, train: &Train, candidates: &Candidates) -> Result<(), WorkerError> {
        let lane = train.lane();
        let own: Vec<SnapshotId> = candidates.snapshots.iter().map(|s| s.id).collect();
        if self.remove_staged(lane, &train.fence, Some(candidates.tail), &own).await? {
            self.ledger.set_train_status(train.epoch, &train.id, TrainStatus::Dropped).await?;
            self.delete_written(lane, candidates).await;
        }
        Ok(())
    }

    /// Removes a temporary branch and the snapshots under it. `true`: they are gone.
    pub(super) async fn remove_staged(
        &self,
        lane: &Lane,
        fence: &RefName,
        tail: Option<SnapshotId>,
        own: &[SnapshotId],
    ) -> Result<bool, WorkerError> {
        for tries in 1..=MAX_REMOVALS {
            let table = self.catalog.load(&lane.table).await?;
            let facts = &table.facts;
            if facts.uuid != lane.uuid {
                return Ok(true);
            }
            let at = facts.head(fence);
            let reachable = reachable_without(&table, fence);
            let removable: Vec<SnapshotId> = own
                .iter()
                .copied()
                .filter(|id| !reachable.contains(id))
                // Only what we made: a fast-forwarded snapshot is the branch's own.
                .filter(|id| facts.snapshots.get(*id).is_some_and(|s| is_own(&s.summary)))
                .collect();
            if at.is_none() && removable.is_empty() {
                return Ok(true);
            }
            if at.is_some() && tail.is_some() && at != tail {
                // Not where we left it: somebody else's hand is in this, so nothing is removed.
                return Ok(false);
            }
            let mut requirements = vec![
                Requirement::TableUuid(lane.uuid.clone()),
                Requirement::RefAt {
                    name: lane.target.clone(),
                    at: facts.head(&lane.target),
                    role: RefRole::Target,
                },
            ];
            requirements.push(Requirement::RefAt { name: fence.clone(), at, role: RefRole::Fence });
            let mut updates = Vec::new();
            if at.is_some() {
                updates.push(Update::RemoveRef(fence.clone()));
            }
            if !removable.is_empty() {
                updates.push(Update::RemoveSnapshots(removable));
            }
            match self.catalog.commit(&table, &requirements, updates).await {
                // Read again before it is believed (case O01).
                CommitOutcome::Landed(_) => {}
                CommitOutcome::Refused(error) => return Err(error.into()),
                _ => self.pause(tries).await,
            }
        }
        Ok(false)
    }

    /// Rule R8. Files that cannot be deleted now are no reason to stop; they are in nobody's way.
    pub(super) async fn delete_written(&self, lane: &Lane, candidates: &Candidates) {
        if !self.drop_checkpoint_of(lane, &candidates.written).await {
            return;
        }
        let table = match self.catalog.load(&lane.table).await {
            Ok(table) => table,
            Err(error) => {
                tracing::warn!("files of a dropped train are left: {error}");
                return;
            }
        };
        self.delete_superseded(&table, &candidates.written).await;
    }

    /// The files of a train whose worker died: named in its row, so that they need not be searched for.
    async fn delete_left(&self, epoch: Epoch, lane: &Lane, train: &TrainRow) -> Result<(), WorkerError> {
        let Some(written) = &train.written else { return Ok(()) };
        let mut written = match WrittenFiles::deserialize(written) {
            Ok(written) => written,
            Err(error) => {
                tracing::warn!(train = %train.train, "its files are left: {error}");
                return Ok(());
            }
        };
        if !self.drop_checkpoint_of(lane, &written).await {
            return Ok(());
        }
        // It died while its manifests were written again.
        add_noted(&mut written, self.ledger.noted_files(&train.train).await?);
        match self.catalog.load(&lane.table).await {
            Ok(table) => self.delete_superseded(&table, &written).await,
            Err(error) => tracing::warn!(train = %train.train, "its files are left: {error}"),
        }
        self.ledger.end_files(epoch, &train.train).await?;
        Ok(())
    }

    /// What names the files of a train until it is staged. `false`: it may still do so.
    async fn drop_checkpoint_of(&self, lane: &Lane, written: &WrittenFiles) -> bool {
        let Some(checkpoint) = &written.checkpoint else { return true };
        let dropped = match self.drop_checkpoint(lane, &checkpoint.branch).await {
            Ok(dropped) => dropped,
            Err(error) => {
                tracing::warn!("'{}' is left: {error}", checkpoint.branch);
                false
            }
        };
        if !dropped {
            tracing::warn!("'{}' still names files of a dropped train, so they stay", checkpoint.branch);
        }
        dropped
    }

    /// Deletes what was written for candidates that are no more, once the catalog is sure not to name it.
    pub(super) async fn delete_superseded(&self, table: &LoadedTable, written: &WrittenFiles) {
        if let Some(checkpoint) = &written.checkpoint {
            Box::pin(self.delete_superseded(table, &checkpoint.own_files())).await;
        }
        match delete_files(&self.store, table, written).await {
            Ok(deleted) if deleted.failed.is_empty() => {}
            Ok(deleted) => {
                tracing::warn!("{} file(s) of a dropped train could not be deleted", deleted.failed.len());
            }
            Err(error) => tracing::warn!("files of a dropped train are left: {error}"),
        }
    }

    /// What trains of a dead worker left: their requests go back to the queue, their branches go (rule R7). Where
    /// branches are is taken from `table`; before one goes, it is looked at again.
    pub(super) async fn sweep(
        &self,
        epoch: Epoch,
        lane: &Lane,
        table: &LoadedTable,
    ) -> Result<(), WorkerError> {
        let mut trains = self.ledger.unfinished_trains(&lane.uuid).await?;
        // A deposed worker may have sent its staging commit after its train was given up for dropped.
        for name in strays(table, self.ledger.queue_id()) {
            if trains.iter().all(|train| train.temp_ref != name) {
                trains.extend(self.ledger.train_of_ref(&name).await?);
            }
        }
        for train in trains.into_iter().filter(|t| t.table_uuid == lane.uuid && t.target == lane.target) {
            let gone = self.remove_staged(lane, &train.temp_ref, Some(train.tail), &train.candidates).await?;
            if gone && train.status != TrainStatus::Landed {
                self.ledger.set_train_status(epoch, &train.train, TrainStatus::Dropped).await?;
                self.delete_left(epoch, lane, &train).await?;
            }
        }
        self.sweep_externals(lane, table).await?;
        self.sweep_replays(epoch, lane, table).await?;
        let stuck = self.ledger.riding(&lane.uuid, &lane.target).await?;
        if !stuck.is_empty() {
            self.requeue(epoch, stuck.into_iter(), "its worker ended; planned again").await?;
        }
        Ok(())
    }
}

/// Is it a candidate of the queue, or a checkpoint?
fn is_own(summary: &BTreeMap<String, String>) -> bool {
    [REQUEST_KEY, CHECKPOINT_KEY].iter().any(|key| summary.contains_key(*key))
}

/// Rule L4, by c_n alone.
pub(super) fn read_outcome(table: &LoadedTable, intent: &Intent) -> Finding {
    let facts = &table.facts;
    let head = facts.head(&intent.target);
    if let Some(head) = head {
        let chain = facts.snapshots.chain(head);
        if chain.ids.contains(&intent.tail) {
            if let Some(lost) = replaced_by(table, intent) {
                tracing::error!(
                    intent = %intent.id, table = %intent.table, target = %intent.target, snapshot = %lost,
                    "the catalog let the landing replace a head that it was not planned on"
                );
                return Finding::Replaced;
            }
            return Finding::Landed;
        }
        if facts.snapshot_log.iter().any(|entry| entry.snapshot_id == intent.tail) {
            return Finding::RolledBack;
        }
        let reaches_plan = match intent.planned_head {
            Some(planned) => chain.ids.contains(&planned),
            None => chain.end == ChainEnd::Root,
        };
        return if reaches_plan { Finding::NotLanded } else { Finding::Unknown };
    }
    match intent.planned_head {
        None if facts.snapshot_log.is_empty() => Finding::NotLanded,
        _ => Finding::Unknown,
    }
}

/// The head that the landing took the place of, when it was not the planned one: a catalog that ignores a
/// requirement loses somebody's commit that way (case O28). Only `main` has a log to read it from.
fn replaced_by(table: &LoadedTable, intent: &Intent) -> Option<SnapshotId> {
    if intent.target != RefName::main() {
        return None;
    }
    let log = &table.facts.snapshot_log;
    let at = log.iter().position(|entry| entry.snapshot_id == intent.tail)?;
    let before = log.get(at.checked_sub(1)?)?.snapshot_id;
    let expected =
        Some(before) == intent.planned_head || table.facts.snapshots.is_ancestor(before, intent.tail);
    (!expected).then_some(before)
}

/// Snapshots that any other ref still reaches: they are never removed (promise 6).
pub(super) fn reachable_without(
    table: &LoadedTable,
    fence: &RefName,
) -> std::collections::HashSet<SnapshotId> {
    let mut reachable = std::collections::HashSet::new();
    for reference in table.facts.refs.values().filter(|r| &r.name != fence) {
        let mut next = Some(reference.snapshot_id);
        while let Some(id) = next {
            if !reachable.insert(id) {
                break;
            }
            next = table.facts.snapshots.get(id).and_then(|s| s.parent);
        }
    }
    reachable
}

/// Temporary branches of this queue that are in the catalog.
fn strays(table: &LoadedTable, queue: &QueueId) -> Vec<RefName> {
    let prefix = temporary_prefix(queue);
    table.facts.refs.keys().filter(|name| name.as_str().starts_with(&prefix)).cloned().collect()
}
