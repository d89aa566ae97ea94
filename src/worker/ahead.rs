//! The next train's files, written while this one is staged, checked and landed.
//!
//! A landing waits for storage and catalog most of its time, and the next train cannot be staged before it is
//! over; but its files can be written, if one knows on what it will stand. So the table is looked at as if
//! the train under way had landed already, and what would be the next train gets its files.
//!
//! Nothing is decided ahead and nothing recorded. The next look at the table plans on what is there then; the
//! files serve only when that plan has the same cars on the same ground, and are deleted otherwise. Only what
//! is picked is written ahead: running operations again is too much work for a guess. What is written is checked at
//! once; a pass is a fact about those files under that policy, and is recorded when they are staged.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use mergeberg_kernel::admission::{Car, CarAction};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableUuid};
use mergeberg_kernel::policy::TablePolicy;
use mergeberg_kernel::unit::UnitKind;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::context::{Lane, Worker, lock};
use super::error::WorkerError;
use super::gather::{Gathered, arrival};
use super::protocol::Train;
use super::stage::{Candidates, Staging};
use super::staging::same_ground;
use super::structure::Structures;
use super::tick::Looking;
use crate::ledger::RequestRow;
use crate::table::loaded::LoadedTable;

/// What the next train could be planned from, once the train under way has landed.
pub(super) struct Prospect {
    lane: Lane,
    table: Arc<LoadedTable>,
    policy: Arc<TablePolicy>,
    rows: Vec<RequestRow>,
}

/// A train whose files are written, and what they were written for.
pub(super) struct WrittenAhead {
    gathered: Arc<Gathered>,
    cars: Vec<Car>,
    candidates: Candidates,
}

/// A task that writes ahead.
pub(super) struct WritingAhead(JoinHandle<Option<WrittenAhead>>);

impl Prospect {
    /// `None` when nothing waits behind this train.
    pub fn behind(train: &Train, candidates: &Candidates) -> Option<Self> {
        let Gathered { lane, policy, rows, behind, table, .. } = &train.gathered;
        let aboard: BTreeSet<RequestId> = candidates.requests().collect();
        let waiting = rows.iter().chain(behind).filter(|row| !aboard.contains(&row.id));
        let mut rows: Vec<RequestRow> = waiting.cloned().collect();
        if rows.is_empty() {
            return None;
        }
        rows.sort_by_key(arrival);
        let (lane, policy) = (lane.clone(), Arc::clone(policy));
        let table = Arc::new(as_if_landed(table, &lane, candidates));
        Some(Self { lane, table, policy, rows })
    }
}

/// The table as the landing of this train would leave it.
fn as_if_landed(table: &LoadedTable, lane: &Lane, candidates: &Candidates) -> LoadedTable {
    let mut table = table.with_candidates(&candidates.snapshots);
    let facts = &mut table.facts;
    for car in candidates.cars.iter().filter(|staged| staged.car.drop_source) {
        facts.refs.remove(&car.car.source);
    }
    match facts.refs.get_mut(&lane.target) {
        Some(target) => target.snapshot_id = candidates.tail,
        None => {
            let kind = RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None };
            let (name, snapshot_id) = (lane.target.clone(), candidates.tail);
            let target = RefFact { name: name.clone(), snapshot_id, kind, max_ref_age_ms: None };
            facts.refs.insert(name, target);
        }
    }
    table
}

impl Worker {
    /// Begins to write the files of what would be the next train. Nobody waits for that before the next train is
    /// planned. Any trouble is met again, and told, when that train is really due.
    pub(super) async fn write_ahead(&self, prospect: Option<Prospect>, structures: &Structures) {
        let Some(prospect) = prospect else { return };
        let key = (prospect.lane.uuid.clone(), prospect.lane.target.clone());
        let (worker, structures) = (self.clone(), structures.clone());
        // On a thread of its own: much of it is computing, which would hold up the train under way.
        let runtime = Handle::current();
        let writing = tokio::task::spawn_blocking(move || {
            let table = prospect.lane.table.clone();
            match runtime.block_on(worker.written_ahead(prospect, &structures)) {
                Ok(written) => written,
                Err(error) => {
                    tracing::debug!(%table, "nothing is written ahead: {error}");
                    None
                }
            }
        });
        let unused = lock(&self.ahead).insert(key, WritingAhead(writing));
        self.discard_ahead(unused).await;
    }

    async fn written_ahead(
        &self,
        Prospect { lane, table, policy, rows }: Prospect,
        structures: &Structures,
    ) -> Result<Option<WrittenAhead>, WorkerError> {
        let looking = Looking::ForTrains;
        let mut gathered = self.fill_train(&lane, table, policy, rows, structures, looking).await?;
        let plan = std::mem::take(&mut gathered.plan);
        if plan.cars.is_empty() || plan.cars.iter().any(|car| car.action != CarAction::Pick) {
            return Ok(None);
        }
        match self.write_candidates(&gathered, plan.cars.clone(), None).await? {
            Staging::Ready(mut candidates) => {
                let gathered = Arc::new(gathered);
                candidates.checking = Some(self.check_ahead(&gathered, &candidates));
                Ok(Some(WrittenAhead { gathered, cars: plan.cars, candidates: *candidates }))
            }
            Staging::Failed(_) => Ok(None),
        }
    }

    /// The candidates of this plan, if they were written ahead; what does not fit is deleted.
    pub(super) async fn taken_over(
        &self,
        gathered: &Gathered,
        cars: &[Car],
    ) -> Result<Option<Candidates>, WorkerError> {
        let Some(writing) = self.take_ahead(&gathered.lane) else { return Ok(None) };
        let Some(ahead) = writing.finished().await else { return Ok(None) };
        // Rule R10: looked for again, right before staging.
        let missing = match ahead.fits(gathered, cars) {
            true => self.missing_of(gathered, cars).await.map(|missing| !missing.is_empty()),
            false => Ok(true),
        };
        if !matches!(missing, Ok(false)) {
            tracing::debug!(table = %gathered.lane.table, "another train than was written ahead");
            self.delete_written(&ahead.gathered.lane, &ahead.candidates).await;
            return missing.map(|_| None);
        }
        let mut candidates = ahead.candidates;
        for (staged, car) in candidates.cars.iter_mut().zip(cars) {
            staged.car = car.clone();
        }
        self.from_ahead.fetch_add(1, Ordering::Relaxed);
        restamp(&mut candidates, &gathered.table, self.now_ms());
        Ok(Some(candidates))
    }

    pub(super) fn take_ahead(&self, lane: &Lane) -> Option<WritingAhead> {
        lock(&self.ahead).remove(&(lane.uuid.clone(), lane.target.clone()))
    }

    /// Deletes what was or is being written.
    pub(super) async fn discard_ahead(&self, writing: Option<WritingAhead>) {
        let Some(writing) = writing else { return };
        if let Some(WrittenAhead { gathered, candidates, .. }) = writing.finished().await {
            self.delete_written(&gathered.lane, &candidates).await;
        }
    }

    /// Everything that was written ahead and will not be used, when the worker ends.
    pub(super) async fn discard_all_ahead(&self) {
        let all = std::mem::take(&mut *lock(&self.ahead));
        for ahead in all.into_values() {
            self.discard_ahead(Some(ahead)).await;
        }
    }
}

impl WritingAhead {
    /// `None`: there was no such train, or not of picks alone.
    async fn finished(self) -> Option<WrittenAhead> {
        self.0.await.unwrap_or_else(|error| {
            tracing::warn!("what was written ahead is left: {error}");
            None
        })
    }
}

impl WrittenAhead {
    /// Is this the very train that the files were written for?
    fn fits(&self, gathered: &Gathered, cars: &[Car]) -> bool {
        let (planned, now) = (&self.gathered.table.facts, &gathered.table.facts);
        self.gathered.head == gathered.head
            && same_ground(&self.gathered, &gathered.table)
            && planned.location == now.location
            && planned.last_sequence_number == now.last_sequence_number
            && planned.next_row_id == now.next_row_id
            && self.cars.len() == cars.len()
            && self.cars.iter().zip(cars).all(|(written, car)| same_files(written, car))
    }
}

/// Are the snapshots of both cars the same, but for their time?
fn same_files(one: &Car, other: &Car) -> bool {
    let units = |car: &Car| -> Vec<(UnitKind, Vec<SnapshotId>)> {
        car.classification.units.iter().map(|unit| (unit.kind.clone(), unit.snapshots().collect())).collect()
    };
    one.request == other.request
        && one.pinned == other.pinned
        && one.rebuilt == other.rebuilt
        && one.source == other.source
        && one.action == other.action
        && units(one) == units(other)
}

/// Rule N3: no snapshot is older than the metadata that it is added to. Its time stands in the metadata alone.
fn restamp(candidates: &mut Candidates, table: &LoadedTable, now_ms: i64) {
    let mut last_ms = table.facts.last_updated_ms;
    for snapshot in &mut candidates.snapshots {
        snapshot.timestamp_ms = snapshot.timestamp_ms.max(now_ms).max(last_ms.saturating_add(1));
        last_ms = snapshot.timestamp_ms;
    }
}

/// By table uuid and target.
pub(super) type Ahead = HashMap<(TableUuid, RefName), WritingAhead>;
