//! What a check reads: files of the candidate and of what it is compared with, told apart by origin.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use datafusion::arrow::datatypes::{DataType, SchemaRef};
use futures::{StreamExt, TryStreamExt};
use mergeberg_kernel::evidence::PinnedInput;
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::policy::Scope;

use super::CheckError;
use super::provider::FilesTable;
use super::session::Engine;
use super::train::{CarView, TrainView, partitions_text};
use crate::table::key_range::KeyColumn;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{FileScope, LiveFiles, ManifestStore};
use crate::table::scan::{RowDifference, RowReader, ScanCounters, ScanFile, live_rows, row_difference};

/// Origin of rows that the candidate and what it is compared with both hold.
pub const KEPT: i32 = 0;
/// Origin, when one car is looked at: rows that the car added.
pub const ADDED: i32 = 1;
/// Origin, when one car is looked at: rows that the car removed, with their file or by a delete file. They
/// are not part of the candidate.
pub const REMOVED: i32 = 2;

/// How the candidate is looked at.
#[derive(Clone, Copy)]
pub enum Relation<'a> {
    /// Every car only adds: the last candidate against the base, for the cars at these positions.
    Appends { cars: &'a [usize] },
    /// One car's head against the car's parent.
    Change { car: &'a CarView },
}

impl Relation<'_> {
    /// Partitions touched by the cars that the check is run for.
    pub fn touched(&self, all: &[CarView]) -> BTreeSet<Arc<Partition>> {
        match self {
            Self::Appends { cars } => cars
                .iter()
                .filter_map(|at| all.get(*at))
                .flat_map(|car| car.touched.iter().cloned())
                .collect(),
            Self::Change { car } => car.touched.iter().cloned().collect(),
        }
    }
}

/// Whose rows the origins above zero are.
#[derive(Clone, Debug)]
pub enum Origins {
    /// Origin i is car i - 1 of the train.
    Cars { requests: Vec<RequestId>, selected: Vec<bool> },
    /// [`ADDED`] and [`REMOVED`] of one request.
    Change { request: RequestId },
}

/// Owned, so that it can go to the engine's threads.
pub struct Subject {
    pub reader: Arc<RowReader>,
    pub origins: Origins,
    pub files: Vec<ScanFile>,
    /// `2 partitions`, `table`.
    pub scope: String,
    pub counters: Arc<ScanCounters>,
}

impl Subject {
    /// Reads manifests only.
    pub async fn gather(
        view: TrainView<'_>,
        candidate: SnapshotId,
        relation: Relation<'_>,
        scope: Scope,
        counters: &Arc<ScanCounters>,
    ) -> Result<Self, CheckError> {
        Self::gather_bounded(view, candidate, relation, scope, &[], counters).await
    }

    /// The same; what the manifests say of the bounds of these columns is kept with the files.
    pub async fn gather_bounded(
        view: TrainView<'_>,
        candidate: SnapshotId,
        relation: Relation<'_>,
        scope: Scope,
        columns: &[String],
        counters: &Arc<ScanCounters>,
    ) -> Result<Self, CheckError> {
        let reader = Arc::new(RowReader::new(view.table, view.facts().current_schema_id)?);
        let bounded: Vec<KeyColumn> = columns.iter().filter_map(|name| key_column(&reader, name)).collect();
        let touched: Vec<Arc<Partition>> = relation.touched(view.cars).into_iter().collect();
        let (scope, text) = match scope {
            Scope::Table => (FileScope::Table, "table".to_owned()),
            Scope::TouchedPartitions => {
                let text = partitions_text(touched.len());
                (FileScope::Partitions(touched), text)
            }
        };
        let live = view.store.bounded_files(view.table, view.snapshot(candidate)?, &scope, &bounded).await?;
        let (origins, files) = match relation {
            Relation::Appends { cars } => appends(view.cars, cars, live_rows(live)?),
            Relation::Change { car } => {
                let before = match car.parent {
                    None => LiveFiles::default(),
                    Some(parent) => view.store.live_files(view.table, view.snapshot(parent)?, &scope).await?,
                };
                (Origins::Change { request: car.request }, change(row_difference(before, live)?))
            }
        };
        Ok(Self { reader, origins, files, scope: text, counters: Arc::clone(counters) })
    }

    /// `None`: no bounds of this column were kept.
    pub fn key_column(&self, name: &str) -> Option<KeyColumn> {
        key_column(&self.reader, name)
    }

    /// Leaves out the files of some origins.
    pub fn keep(&mut self, wanted: impl Fn(i32) -> bool) {
        self.files.retain(|file| wanted(file.origin));
    }

    /// The files as a relation with an origin column.
    pub fn table(&self, engine: &Engine) -> FilesTable {
        self.table_of(engine, |_| true)
    }

    /// The same with the files of some origins only.
    pub fn table_of(&self, engine: &Engine, wanted: impl Fn(i32) -> bool) -> FilesTable {
        self.table_where(engine, |file| wanted(file.origin))
    }

    /// The same with some files only.
    pub fn table_where(&self, engine: &Engine, wanted: impl Fn(&ScanFile) -> bool) -> FilesTable {
        let files = self.files.iter().filter(|file| wanted(file)).cloned().collect();
        FilesTable::new(Arc::clone(&self.reader), files, engine.parallelism(), Arc::clone(&self.counters))
            .with_origin()
    }

    /// Rows of files, by origin, as the manifests count them, deleted ones among them: how many may be read.
    pub fn records(&self, wanted: impl Fn(i32) -> bool) -> u64 {
        let records: i64 =
            self.files.iter().filter(|file| wanted(file.origin)).map(|file| file.file.fact.records).sum();
        u64::try_from(records).unwrap_or_default()
    }

    /// Live rows by origin. Files are read only where equality deletes decide.
    pub async fn live_counts(&self, parallelism: usize) -> Result<BTreeMap<i32, u64>, CheckError> {
        let mut counted = futures::stream::iter(self.files.clone())
            .map(|file| async move {
                Ok::<_, CheckError>((file.origin, self.reader.count(&file, &self.counters).await?))
            })
            .buffer_unordered(parallelism.max(1));
        let mut counts = BTreeMap::new();
        while let Some((origin, rows)) = counted.try_next().await? {
            *counts.entry(origin).or_default() += rows;
        }
        Ok(counts)
    }

    pub fn schema(&self) -> &SchemaRef {
        self.reader.arrow_schema()
    }

    /// Type of a column that a check names; `could-not-run` if the schema does not have it (case O18).
    pub fn column_type(&self, column: &str) -> Result<&DataType, CheckError> {
        match self.schema().field_with_name(column) {
            Ok(field) => Ok(field.data_type()),
            Err(_) => {
                Err(CheckError::MissingColumn { column: column.to_owned(), schema: self.reader.schema_id() })
            }
        }
    }

    pub fn require_columns(&self, columns: &[String]) -> Result<(), CheckError> {
        for column in columns {
            self.column_type(column)?;
        }
        Ok(())
    }
}

fn key_column(reader: &RowReader, name: &str) -> Option<KeyColumn> {
    KeyColumn::of(reader.arrow_schema().field_with_name(name).ok()?)
}

/// Every live file belongs to the car whose candidate added it, or to the base.
fn appends(all: &[CarView], cars: &[usize], live: Vec<ScanFile>) -> (Origins, Vec<ScanFile>) {
    let mut origin_of: HashMap<SnapshotId, i32> = HashMap::new();
    for (car, origin) in all.iter().zip(1..) {
        for candidate in &car.candidates {
            origin_of.insert(*candidate, origin);
        }
    }
    let files = live
        .into_iter()
        .map(|file| {
            let origin = origin_of.get(&file.file.added_by).copied().unwrap_or(KEPT);
            file.with_origin(origin)
        })
        .collect();
    let origins = Origins::Cars {
        requests: all.iter().map(|car| car.request).collect(),
        selected: (0..all.len()).map(|at| cars.contains(&at)).collect(),
    };
    (origins, files)
}

/// Rows of both sides by where they are live.
fn change(difference: RowDifference) -> Vec<ScanFile> {
    let RowDifference { kept, added, removed } = difference;
    let of = |files: Vec<ScanFile>, origin: i32| files.into_iter().map(move |file| file.with_origin(origin));
    of(kept, KEPT).chain(of(added, ADDED)).chain(of(removed, REMOVED)).collect()
}

/// Live rows of a snapshot in a scope.
pub async fn rows_at(
    store: &ManifestStore,
    table: &LoadedTable,
    snapshot: &SnapshotFact,
    scope: &FileScope,
) -> Result<Vec<ScanFile>, CheckError> {
    Ok(live_rows(store.live_files(table, snapshot, scope).await?)?)
}

/// Another table at the head that the check is pinned to.
pub struct PinnedTable {
    pub name: TableName,
    pub snapshot: SnapshotId,
    pub reader: Arc<RowReader>,
    pub files: Vec<ScanFile>,
    pub counters: Arc<ScanCounters>,
}

impl PinnedTable {
    /// The table's columns, without origin.
    pub fn table(&self, engine: &Engine) -> FilesTable {
        FilesTable::new(
            Arc::clone(&self.reader),
            self.files.clone(),
            engine.parallelism(),
            Arc::clone(&self.counters),
        )
    }

    /// What the evidence rests on beside its own candidate.
    pub fn input(&self) -> PinnedInput {
        PinnedInput { table: self.name.clone(), snapshot: self.snapshot }
    }

    /// How evidence names the pin (rule E7).
    pub fn measured(&self) -> (String, String) {
        (self.name.to_string(), format!("snapshot {}", self.snapshot))
    }
}

impl TrainView<'_> {
    pub fn snapshot(&self, id: SnapshotId) -> Result<&SnapshotFact, CheckError> {
        self.table.facts.snapshots.get(id).ok_or(CheckError::UnknownSnapshot(id))
    }

    pub async fn pin(
        &self,
        name: &TableName,
        counters: &Arc<ScanCounters>,
    ) -> Result<PinnedTable, CheckError> {
        let (table, snapshot) = self.tables.resolve(name).await?;
        let files = rows_at(self.store, &table, &snapshot, &FileScope::Table).await?;
        Ok(PinnedTable {
            name: name.clone(),
            snapshot: snapshot.id,
            reader: Arc::new(RowReader::new(&table, table.facts.current_schema_id)?),
            files,
            counters: Arc::clone(counters),
        })
    }
}
