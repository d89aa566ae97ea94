//! Writes what an operation comes to: new rows, and the changed files again without the rows that go, or deletes
//! for these rows.
//!
//! The rows of one operation go through one writer, so that files have the size that the table asks for.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::{AsArray, BooleanArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::Int64Type;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use mergeberg_kernel::change::{FileContent, FileFact};
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::reason::ReasonCode;
use roaring::RoaringTreemap;

use super::Replayed;
use super::changes::{Changes, Look};
use super::error::ReplayError;
use super::plan::{Frame, Mode, Planned};
use crate::table::course::Course;
use crate::table::data_files::{DataFileWriter, WriteResources};
use crate::table::deletes::{DeleteStore, NewDeleteFile, PositionDeleteWriter, RowsToDelete, VectorWriter};
use crate::table::error::TableError;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::LiveFiles;
use crate::table::scan::{RowReader, ScanCounters, ScanFile};

/// First format version with deletion vectors.
const VECTORS_SINCE: u8 = 3;
/// Files that are read at the same time to be written again.
const PARALLEL_FILES: usize = 2;

/// The part of a replay that runs on the engine's threads.
pub(super) struct Job {
    pub table: Arc<LoadedTable>,
    pub changes: Changes,
    pub planned: Planned,
    /// Names of the table's columns, in its order.
    pub names: Vec<String>,
    pub expected_rows: Option<i64>,
    pub live: LiveFiles,
    pub resources: WriteResources,
    pub course: Course,
}

impl Job {
    pub async fn run(self) -> Result<Replayed, ReplayError> {
        let Self { table, changes, planned, names, expected_rows, live, resources, course } = self;
        let Planned { frames, mode_property, replaces_partitions } = planned;
        let mode = mode_of(&table, mode_property);
        let schema_id = table.facts.current_schema_id;
        // Rows that are written again stay who they are.
        let reader = Arc::new(RowReader::new(&table, schema_id)?.with_lineage()?);
        let shared = Arc::new(Mutex::new(changes));
        let all = reader.arrow_schema().fields().iter().map(|field| field.name().clone());
        let lineage = all.skip(names.len()).collect();
        let new = given_rows(frames, Names { names, lineage }, Arc::clone(&shared));
        let rows = match mode {
            Mode::MergeOnRead => new,
            // What stays is known when everything has been looked at.
            Mode::CopyOnWrite => {
                let (shared, reader) = (Arc::clone(&shared), Arc::clone(&reader));
                let read = Arc::clone(&course.counts().read);
                let rest =
                    stream::once(async move { Ok::<_, ReplayError>(remaining(&reader, &shared, &read)) });
                new.chain(rest.try_flatten()).boxed()
            }
        };
        let data = DataFileWriter::write_along(&table, schema_id, rows, &resources, &course).await?;
        let changes = std::mem::replace(&mut *lock(&shared), Changes::new(Vec::new()));
        if let Some(expected) = expected_rows
            && expected != changes.inserted
        {
            return Err(ReplayError::request(
                ReasonCode::ReplayMismatch,
                format!("the query gave {} rows, recorded were {expected}", changes.inserted),
            ));
        }
        let mut replayed = Replayed::default();
        replayed.touched.extend(data.iter().map(|file| Arc::clone(&file.fact.partition)));
        if replaces_partitions {
            replace(&live, &mut replayed)?;
        }
        let store = DeleteStore::new(table.file_io.clone());
        let mut marked: Vec<RowsToDelete> = Vec::new();
        for (file, gone) in changes.files.iter().zip(changes.gone) {
            if gone.is_empty() {
                continue;
            }
            replayed.touched.insert(Arc::clone(&file.file.fact.partition));
            let path = &file.file.fact.path;
            let before = store.positions_of(&file.file, &file.rows.without, &ScanCounters::default()).await?;
            let whole = (&before | &gone).len() == file.file.file.record_count();
            if mode == Mode::CopyOnWrite || whole {
                replayed.removed.insert(Arc::clone(path));
                continue;
            }
            let positions = if table.facts.format_version >= VECTORS_SINCE {
                // One vector a data file, which holds all that is deleted of it (rule D1).
                let old =
                    live.deletes.iter().map(|delete| &delete.fact).filter(|fact| is_only_of(fact, path));
                replayed.removed_deletes.extend(old.map(FileFact::key));
                before | gone
            } else {
                gone
            };
            marked.push(RowsToDelete { data_file: file.file.clone(), positions });
        }
        replayed.added_deletes = course.unless_ended(write_deletes(&table, &marked, &course)).await??;
        replayed.added = data;
        Ok(replayed)
    }
}

fn lock(shared: &Mutex<Changes>) -> std::sync::MutexGuard<'_, Changes> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copy-on-write unless the table asks for the other (Java: `RowLevelOperationMode`).
fn mode_of(table: &LoadedTable, property: &str) -> Mode {
    match table.facts.properties.get(property).map(|mode| mode.to_ascii_lowercase()) {
        Some(mode) if mode == "merge-on-read" => Mode::MergeOnRead,
        _ => Mode::CopyOnWrite,
    }
}

/// Deletes of this data file and no other.
fn is_only_of(fact: &FileFact, path: &Arc<str>) -> bool {
    match &fact.content {
        FileContent::DeletionVector { of, offset: _ } => of == path,
        FileContent::PositionDeletes { of } => of.as_ref() == Some(path),
        FileContent::Data | FileContent::EqualityDeletes { .. } => false,
    }
}

/// Names of the columns that are written.
struct Names {
    /// The table's own, in its order.
    names: Vec<String>,
    /// Row id and last update, in tables of format v3.
    lineage: Vec<String>,
}

type Rows = BoxStream<'static, Result<RecordBatch, ReplayError>>;

/// The rows that the frames give to the table, one frame after the other.
fn given_rows(frames: Vec<Frame>, names: Names, shared: Arc<Mutex<Changes>>) -> Rows {
    let names = Arc::new(names);
    stream::iter(frames)
        .then(move |frame| {
            let (names, shared) = (Arc::clone(&names), Arc::clone(&shared));
            async move {
                let Frame { rows, actions, once, inside } = frame;
                let rows = rows.execute_stream().await?;
                Ok::<_, ReplayError>(rows.map(move |batch| {
                    let look = Look {
                        actions: &actions,
                        once,
                        inside: inside.as_deref(),
                        names: &names.names,
                        lineage: &names.lineage,
                    };
                    lock(&shared).take(&batch?, &look)
                }))
            }
        })
        .try_flatten()
        .try_filter(|batch| std::future::ready(batch.num_rows() > 0))
        .boxed()
}

/// The rows that stay of files from which rows go.
fn remaining(reader: &Arc<RowReader>, shared: &Mutex<Changes>, read: &Arc<ScanCounters>) -> Rows {
    let changes = lock(shared);
    let files: Vec<(ScanFile, RoaringTreemap)> = changes
        .files
        .iter()
        .zip(&changes.gone)
        .filter(|(_, gone)| !gone.is_empty())
        .map(|(file, gone)| (file.clone(), gone.clone()))
        .collect();
    let (reader, read) = (Arc::clone(reader), Arc::clone(read));
    stream::iter(files)
        .map(move |(file, gone)| {
            let all: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
            let rows = reader.read_located(&file, &all, &read)?;
            Ok::<_, ReplayError>(rows.map(move |batch| without(&batch?, &gone)).boxed())
        })
        .try_flatten_unordered(PARALLEL_FILES)
        .boxed()
}

/// The rows at other positions, without the column of positions.
fn without(batch: &RecordBatch, gone: &RoaringTreemap) -> Result<RecordBatch, ReplayError> {
    let last = batch.num_columns().saturating_sub(1);
    let positions = batch.column(last).as_primitive_opt::<Int64Type>();
    let positions = positions
        .ok_or_else(|| ReplayError::Table(TableError::Internal("rows without positions".to_owned())))?;
    let stays: BooleanArray =
        positions.values().iter().map(|at| Some(!gone.contains(at.cast_unsigned()))).collect();
    let columns: Vec<usize> = (0..last).collect();
    Ok(filter_record_batch(&batch.project(&columns)?, &stays)?)
}

/// Rule D5: everything that the target has in exactly the partitions that got rows goes.
fn replace(live: &LiveFiles, replayed: &mut Replayed) -> Result<(), ReplayError> {
    let partitions: BTreeSet<Arc<Partition>> = replayed.touched.clone();
    for file in &live.data {
        if partitions.contains(&file.fact.partition) {
            replayed.removed.insert(Arc::clone(&file.fact.path));
        } else if let Some(other) = partitions.iter().find(|own| own.overlaps(&file.fact.partition)) {
            return Err(ReplayError::request(
                ReasonCode::OverlappingSpecs,
                format!("{} lies beside {other} in another spec", file.fact.path),
            ));
        }
    }
    let inside = live.deletes.iter().filter(|delete| partitions.contains(&delete.fact.partition));
    replayed.removed_deletes.extend(inside.map(|delete| delete.fact.key()));
    Ok(())
}

async fn write_deletes(
    table: &LoadedTable,
    marked: &[RowsToDelete],
    course: &Course,
) -> Result<Vec<NewDeleteFile>, ReplayError> {
    if table.facts.format_version >= VECTORS_SINCE {
        return Ok(VectorWriter::write_along(table, marked, course).await?);
    }
    let mut written = Vec::with_capacity(marked.len());
    for rows in marked {
        written.push(PositionDeleteWriter::write_along(table, rows, course).await?);
    }
    Ok(written)
}
