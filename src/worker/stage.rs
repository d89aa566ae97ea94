//! Turns a planned train into candidates: files written, nothing committed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::stream::{self, StreamExt};
use mergeberg_kernel::admission::{Car, CarAction};
use mergeberg_kernel::change::ChangeSet;
use mergeberg_kernel::commit::NewSnapshot;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::unit::{NetFiles, Unit};
use serde_json::Value;

use super::check::CheckingAhead;
use super::context::Worker;
use super::error::WorkerError;
use super::gather::Gathered;
use super::prepare::{Failure, FreshIds, Preparation};
use super::prepared::PreparedCar;
use super::protocol::Train;
use super::replays::{REPLAYS_AT_ONCE, Writing};
use crate::table::cleanup::{WrittenFiles, missing_files};
use crate::table::course::Ending;
use crate::table::error::TableError;
use crate::table::loaded::LoadedTable;
use crate::table::snapshot_writer::{SnapshotChange, SnapshotWriter};

/// Summary key that names the request on every candidate.
pub const REQUEST_KEY: &str = "mergeberg.request";

/// Key of an attempt's detail: rows of the target that its branch never saw and that went with it (rule D5).
pub const VANISHED_ROWS: &str = "vanished-rows";

/// A car with its candidates.
#[derive(Clone, Debug)]
pub(super) struct StagedCar {
    pub car: Car,
    /// The car's parent on the chain: what a per-car check compares with.
    pub parent: Option<SnapshotId>,
    /// Oldest first; the last one is the car's tail.
    pub candidates: Vec<SnapshotId>,
    pub only_adds: bool,
    pub touched: BTreeSet<Arc<Partition>>,
    /// Rows that the target loses although the branch did not remove them (rule D5), for people.
    pub vanished_rows: i64,
}

impl StagedCar {
    pub fn tail(&self) -> Option<SnapshotId> {
        self.candidates.last().copied()
    }
}

/// A train whose candidates are written.
pub(super) struct Candidates {
    pub cars: Vec<StagedCar>,
    /// Snapshots to add; a fast-forward brings its own.
    pub snapshots: Vec<NewSnapshot>,
    pub tail: SnapshotId,
    pub written: WrittenFiles,
    /// What the snapshots were written from, to write them again.
    changes: Vec<SnapshotChange>,
    /// The snapshot that they are stacked on.
    start: Option<SnapshotId>,
    /// They were written again: what was read of them before says nothing.
    pub rewritten: bool,
    /// Checks that were begun when they were written ahead.
    pub checking: Option<CheckingAhead>,
}

impl Candidates {
    /// The requests of the train, in order.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> {
        self.cars.iter().map(|car| car.car.request)
    }
}

/// A car that cannot be staged; the others can.
#[derive(Clone, Debug)]
pub(super) struct CarFailure {
    pub request: RequestId,
    pub code: ReasonCode,
    pub text: String,
    /// Rows that branch and target both changed, for people.
    pub conflicts: Vec<Value>,
}

pub(super) enum Staging {
    Ready(Box<Candidates>),
    /// These leave; the rest is planned again.
    Failed(Vec<CarFailure>),
}

impl Worker {
    /// Writes the candidates of a train, stacked on the target's head. Operations are only run again under `writing`,
    /// which says of every file that it is written.
    pub(super) async fn write_candidates(
        &self,
        gathered: &Gathered,
        cars: Vec<Car>,
        writing: Option<&Writing>,
    ) -> Result<Staging, WorkerError> {
        let facts = &gathered.table.facts;
        let head = gathered.head.and_then(|id| facts.snapshots.get(id));
        let mut chain_start: Option<&SnapshotFact> = head;
        let mut staged: Vec<StagedCar> = Vec::new();
        let mut changes: Vec<SnapshotChange> = Vec::new();
        let mut owners: HashMap<SnapshotId, RequestId> = HashMap::new();
        let mut failures: Vec<CarFailure> = Vec::new();
        let mut new_files: Vec<Arc<str>> = Vec::new();
        let mut ended = None;
        let ids = FreshIds::default();

        let missing = self.missing_of(gathered, &cars).await?;
        // Nothing that rides ahead lies in the scope of what is run again, so it is run side by side.
        let at_once = if writing.is_some() { REPLAYS_AT_ONCE } else { 1 };
        let prepared: Vec<(Car, Option<Result<Preparation, WorkerError>>)> = stream::iter(cars)
            .map(|car| async {
                if car.action == CarAction::FastForward || missing.contains_key(&car.request) {
                    return (car, None);
                }
                let prepared = self.prepare(gathered, &car, &ids, writing).await;
                if let (Some(writing), Err(_) | Ok(Preparation::Failure(_))) = (writing, &prepared) {
                    // The train does not leave: what the others do is for nothing.
                    writing.end(Ending::Unattended);
                }
                (car, Some(prepared))
            })
            .buffered(at_once)
            .collect()
            .await;
        for (car, prepared) in prepared {
            if let Some(path) = missing.get(&car.request) {
                failures.push(CarFailure {
                    request: car.request,
                    code: ReasonCode::DataFileMissing,
                    text: format!("{path} does not exist"),
                    conflicts: Vec::new(),
                });
                continue;
            }
            let request = car.request;
            let Some(prepared) = prepared else {
                let candidates = facts.snapshots.after(gathered.head, car.pinned).unwrap_or_default();
                chain_start = facts.snapshots.get(car.pinned);
                let touched = mergeberg_kernel::classify::touched(&car.classification.units);
                let only_adds = changes_of(&car.classification.units)
                    .all(|change| change.removed.is_empty() && !change.has_delete_files());
                staged.push(StagedCar {
                    parent: gathered.head,
                    candidates,
                    only_adds,
                    touched,
                    vanished_rows: 0,
                    car,
                });
                continue;
            };
            match prepared? {
                Preparation::Ended(ending) => ended = ended.or(Some(ending)),
                Preparation::Failure(Failure { code, text, conflicts }) => {
                    failures.push(CarFailure { request, code, text, conflicts });
                }
                Preparation::Car(prepared) => {
                    let PreparedCar {
                        changes: written,
                        own: _,
                        touched,
                        only_adds,
                        vanished_rows,
                        new_files: own_files,
                    } = *prepared;
                    let candidates: Vec<SnapshotId> = written.iter().map(|c| c.id).collect();
                    for id in &candidates {
                        owners.insert(*id, request);
                    }
                    changes.extend(written);
                    new_files.extend(own_files);
                    staged.push(StagedCar {
                        parent: None,
                        candidates,
                        only_adds,
                        touched,
                        vanished_rows,
                        car,
                    });
                }
            }
        }
        if !failures.is_empty() {
            return Ok(Staging::Failed(failures));
        }
        match ended {
            None => {}
            Some(Ending::Cancelled(request)) => {
                return Ok(Staging::Failed(vec![CarFailure {
                    request,
                    code: ReasonCode::ReplayFailed,
                    text: "it was cancelled".to_owned(),
                    conflicts: Vec::new(),
                }]));
            }
            Some(Ending::WorkerStops) => return Err(WorkerError::Stopping),
            Some(ending @ (Ending::TooLong(_) | Ending::Unattended)) => {
                return Err(WorkerError::Bug(format!("a replay ended and nobody knows why: {ending}")));
            }
        }

        let mut writer = SnapshotWriter::on(&self.store, &gathered.table, chain_start).await?;
        if let Some(writing) = writing {
            writer = writer.noting(self.notes_of(writing));
        }
        let start = chain_start.map(|snapshot| snapshot.id);
        let snapshots = match writer.add_all(changes.clone()).await {
            Ok(snapshots) => snapshots,
            Err(error) => match failure_of(&error, &owners) {
                Some(failure) => return Ok(Staging::Failed(vec![failure])),
                None => return Err(error.into()),
            },
        };
        // Each car's parent is the tail of the one before.
        let mut parent = gathered.head;
        for car in &mut staged {
            car.parent = parent;
            parent = car.tail().or(parent);
        }
        let Some(tail) = parent else {
            return Err(WorkerError::Bug("a train without candidates was staged".to_owned()));
        };
        let mut written = writer.written_files().clone();
        written.data_files.extend(new_files);
        Ok(Staging::Ready(Box::new(Candidates {
            cars: staged,
            snapshots,
            tail,
            written,
            changes,
            start,
            rewritten: false,
            checking: None,
        })))
    }

    /// Writes the same candidates again, under the same ids, on the table as it is now: another branch took
    /// their sequence numbers or just the pointer. What they were planned on has to be as it was. Gives the
    /// files that stood for them before.
    pub(super) async fn write_again(
        &self,
        train: &Train,
        now: &LoadedTable,
        candidates: &mut Candidates,
    ) -> Result<WrittenFiles, WorkerError> {
        if candidates.changes.is_empty() {
            return Ok(WrittenFiles::default());
        }
        candidates.rewritten = true;
        let start = candidates.start.and_then(|id| now.facts.snapshots.get(id));
        let writer = SnapshotWriter::on(&self.store, now, start).await?;
        let mut writer = writer.noting(self.notes(train.epoch, &train.id));
        candidates.snapshots = writer.add_all(candidates.changes.clone()).await?;
        let mut written = writer.written_files().clone();
        // Data files do not know their sequence number: they serve again.
        written.data_files = std::mem::take(&mut candidates.written.data_files);
        written.checkpoint = candidates.written.checkpoint.take();
        let old = std::mem::replace(&mut candidates.written, written);
        // The ids are used again, so they say nothing about the old files.
        Ok(WrittenFiles { snapshots: Vec::new(), ..old })
    }

    /// Rule R10: every file that is published again is looked for right before staging.
    pub(super) async fn missing_of(
        &self,
        gathered: &Gathered,
        cars: &[Car],
    ) -> Result<HashMap<RequestId, Arc<str>>, WorkerError> {
        let mut owner: HashMap<Arc<str>, RequestId> = HashMap::new();
        for car in cars {
            let net = NetFiles::of(changes_of(&car.classification.units));
            for file in car.classification.units.iter().flat_map(Unit::added) {
                if net.is_added(&file.path) {
                    owner.insert(Arc::clone(&file.path), car.request);
                }
            }
        }
        let paths: Vec<Arc<str>> = owner.keys().cloned().collect();
        let missing = missing_files(&gathered.table, paths).await?;
        Ok(missing
            .into_iter()
            .filter_map(|path| owner.get(&path).map(|request| (*request, Arc::clone(&path))))
            .collect())
    }
}

pub(super) fn changes_of(units: &[Unit]) -> impl Iterator<Item = &ChangeSet> {
    units.iter().flat_map(|unit| unit.changes.iter().map(AsRef::as_ref))
}

/// The car that an error of the writer belongs to; `None` when it is nobody's.
fn failure_of(error: &TableError, owners: &HashMap<SnapshotId, RequestId>) -> Option<CarFailure> {
    let snapshot = match error {
        TableError::NotLive { snapshot, .. }
        | TableError::PathTaken { snapshot, .. }
        | TableError::InvalidChange { snapshot, .. } => *snapshot,
        _ => return None,
    };
    let request = *owners.get(&snapshot)?;
    Some(CarFailure { request, code: error.reason(), text: error.to_string(), conflicts: Vec::new() })
}
