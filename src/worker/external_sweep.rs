//! Temporary branches of pipelines' own commands that nobody needs any more.
//!
//! A branch goes when its run is over and its result does not stand in for a waiting request's head. Of a result that
//! landed only the branch goes: the target names its files, and what is left of its snapshots is the expiry's, as with a
//! source branch that was handed over. Of every other run the snapshots go with the branch, and then their files, as
//! long as nothing else in the table names one of them (promise 6).

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::lineage::WAP_ID;
use mergeberg_kernel::state::RequestState;

use super::context::{Lane, Worker, external_prefix};
use super::error::WorkerError;
use super::settle::reachable_without;
use super::step::{Step, reached};
use crate::ledger::{ExternalOutcome, ExternalRunRow};
use crate::table::catalog::CommitOutcome;
use crate::table::cleanup::files_of;
use crate::table::loaded::LoadedTable;

/// Snapshots of a table that are looked through for the name of a file that is to be deleted; in a larger table what
/// a failed run left is the expiry's.
const MAX_SNAPSHOTS_LOOKED_THROUGH: usize = 1_000;

/// Times that a run's branch is removed, because the table was written meanwhile.
const MAX_REMOVAL_TRIES: u32 = 10;

/// What becomes of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// The branch alone.
    Goes,
    /// With its snapshots and files.
    GoesWithAll,
}

impl Worker {
    /// Removes what no run and no request needs. Where branches are is taken from `table`; before one goes, it is
    /// looked at again.
    pub(super) async fn sweep_externals(&self, lane: &Lane, table: &LoadedTable) -> Result<(), WorkerError> {
        let prefix = external_prefix(self.ledger.queue_id());
        let names: Vec<&RefName> =
            table.facts.refs.keys().filter(|name| name.as_str().starts_with(&prefix)).collect();
        for name in names {
            // Not of our making, whatever it is: left alone.
            let Some((run, runs, state)) = self.ledger.external_run_on(name).await? else { continue };
            match fate(&run, &runs, state, self.externals.is_alive(name)) {
                Fate::Stays => {}
                Fate::Goes => self.remove_external(lane, &run, false).await?,
                Fate::GoesWithAll => self.remove_external(lane, &run, true).await?,
            }
        }
        Ok(())
    }

    async fn remove_external(
        &self,
        lane: &Lane,
        run: &ExternalRunRow,
        with_all: bool,
    ) -> Result<(), WorkerError> {
        for tries in 1..=MAX_REMOVAL_TRIES {
            let table = self.catalog.load(&lane.table).await?;
            let Some(at) = table.facts.head(&run.branch).filter(|_| table.facts.uuid == lane.uuid) else {
                return Ok(());
            };
            let own = if with_all { left_by(&table, run, at) } else { Vec::new() };
            let few = table.facts.snapshots.len() <= MAX_SNAPSHOTS_LOOKED_THROUGH;
            let own = if few && self.catalog.capabilities().snapshot_removal { own } else { Vec::new() };
            let files = match files_of(&self.store, &table, &own).await {
                Ok(files) => files,
                Err(error) => {
                    tracing::warn!(branch = %run.branch, "its files are left to the expiry: {error}");
                    return self.remove_external_ref(lane, run, at, Vec::new()).await.map(|_| ());
                }
            };
            if self.remove_external_ref(lane, run, at, own.clone()).await? {
                reached(Step::ExternalSwept);
                if !own.is_empty() {
                    let now = self.catalog.load(&lane.table).await?;
                    self.delete_superseded(&now, &files).await;
                }
                return Ok(());
            }
            self.pause(tries).await;
        }
        Ok(())
    }

    /// `false`: something came first.
    async fn remove_external_ref(
        &self,
        lane: &Lane,
        run: &ExternalRunRow,
        at: SnapshotId,
        own: Vec<SnapshotId>,
    ) -> Result<bool, WorkerError> {
        let table = self.catalog.load(&lane.table).await?;
        let requirements = [
            Requirement::TableUuid(lane.uuid.clone()),
            Requirement::RefAt { name: run.branch.clone(), at: Some(at), role: RefRole::Fence },
        ];
        // A ref that was made since may name one of them.
        let reachable = reachable_without(&table, &run.branch);
        let own: Vec<SnapshotId> = own.into_iter().filter(|id| !reachable.contains(id)).collect();
        let mut updates = vec![Update::RemoveRef(run.branch.clone())];
        if !own.is_empty() {
            updates.push(Update::RemoveSnapshots(own));
        }
        match self.catalog.commit(&table, &requirements, updates).await {
            CommitOutcome::Landed(_) => Ok(true),
            CommitOutcome::Refused(error) => Err(error.into()),
            _ => Ok(false),
        }
    }
}

fn fate(run: &ExternalRunRow, runs: &[ExternalRunRow], state: RequestState, is_alive: bool) -> Fate {
    if is_alive {
        return Fate::Stays;
    }
    match state {
        RequestState::Landed | RequestState::AlreadyPublished => Fate::Goes,
        state if state.is_final() => Fate::GoesWithAll,
        // The newest result of a request that waits, or rides.
        _ if run.outcome == Some(ExternalOutcome::Done)
            && runs.last().is_some_and(|last| last.run == run.run) =>
        {
            Fate::Stays
        }
        _ => Fate::GoesWithAll,
    }
}

/// The snapshots that a run put on top of its base and that nothing else reaches. None at all when the branch was put
/// somewhere else, or holds a staged write, which is known by its id and may be somebody's.
fn left_by(table: &LoadedTable, run: &ExternalRunRow, at: SnapshotId) -> Vec<SnapshotId> {
    let facts: &TableFacts = &table.facts;
    let Some(base) = run.base.filter(|base| facts.snapshots.is_ancestor(*base, at)) else {
        return Vec::new();
    };
    let reachable = reachable_without(table, &run.branch);
    let own = facts.snapshots.after(Some(base), at).unwrap_or_default();
    let is_staged =
        |id: &SnapshotId| facts.snapshots.get(*id).is_none_or(|one| one.summary.contains_key(WAP_ID));
    if own.iter().any(|id| reachable.contains(id) || is_staged(id)) {
        return Vec::new();
    }
    own
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Epoch, RequestId, TableUuid};
    use mergeberg_kernel::reason::ReasonCode;

    use super::*;

    fn run(number: u32, outcome: Option<ExternalOutcome>) -> ExternalRunRow {
        ExternalRunRow {
            request: RequestId(1),
            run: number,
            table_uuid: TableUuid::new("u"),
            pinned: SnapshotId(7),
            branch: RefName(format!("mergeberg/tmp/q/external/1-{number}")),
            epoch: Epoch(1),
            base: Some(SnapshotId(5)),
            head: (outcome == Some(ExternalOutcome::Done)).then_some(SnapshotId(9)),
            outcome,
            status: None,
            text: None,
            output: None,
            ordered_at_ms: 0,
            started_at_ms: None,
            ended_at_ms: None,
        }
    }

    #[test]
    fn a_branch_stays_while_its_run_or_its_result_is_needed() {
        let (done, failed) = (Some(ExternalOutcome::Done), Some(ExternalOutcome::Failed));
        let (waits, landing) = (RequestState::Held(ReasonCode::ExternalRunning), RequestState::Unknown);
        let of = |outcomes: &[Option<ExternalOutcome>], at: usize, state, is_alive| {
            let runs: Vec<ExternalRunRow> =
                outcomes.iter().enumerate().map(|(n, outcome)| run(n as u32 + 1, *outcome)).collect();
            fate(&runs[at], &runs, state, is_alive)
        };
        assert_eq!(of(&[None], 0, waits, true), Fate::Stays, "it runs");
        assert_eq!(of(&[None], 0, RequestState::Cancelled, true), Fate::Stays, "it is being stopped");
        assert_eq!(of(&[done], 0, waits, false), Fate::Stays);
        assert_eq!(of(&[done], 0, landing, false), Fate::Stays, "nobody knows yet");
        assert_eq!(of(&[done], 0, RequestState::Landed, false), Fate::Goes);
        assert_eq!(of(&[None], 0, waits, false), Fate::GoesWithAll, "its worker died");
        assert_eq!(of(&[failed, done], 0, waits, false), Fate::GoesWithAll);
        assert_eq!(of(&[done, None], 0, waits, false), Fate::GoesWithAll, "it went stale");
        assert_eq!(of(&[done], 0, RequestState::Cancelled, false), Fate::GoesWithAll);
    }
}
