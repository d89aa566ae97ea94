//! Writes rows as Parquet data files of a table, under its default partition spec.
//!
//! Rows stream through: what is not on disk yet is bounded by [`MAX_BUFFERED_BYTES`] and [`MAX_OPEN_FILES`]. With the
//! engine's resources ([`DataFileWriter::write_ordered`]) they are spread over lanes by partition, sorted where the
//! table has a sort order, and what has too many partitions to be written side by side is sorted by partition and
//! written one after the other. Without, the fullest file is closed and its partition goes on in another one.
//! Encoding runs off the async runtime, one batch at a time, while the producer makes the next.
//!
//! Absent on purpose: the object-storage path layout, Avro and ORC (decision 0030).

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use datafusion::arrow::array::RecordBatch;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use futures::stream::{self, Stream, StreamExt};
use iceberg::spec::DataFile;
use mergeberg_kernel::change::FileFact;
use mergeberg_kernel::ids::{SchemaId, SpecId};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::course::{self, Course, Ending};
use super::data_sink::{Opening, Sink, WritePlan};
use super::error::TableError;
use super::loaded::LoadedTable;
use super::manifests::on_blocking_thread;
pub use super::row_sort::WriteResources;
use super::row_sort::{Failure, as_engine_rows, in_lanes, sorted};

/// Rows held in memory by all open files together, in bytes.
pub(super) const MAX_BUFFERED_BYTES: usize = 512 * 1024 * 1024;
/// Files open at the same time; three months of days.
pub(super) const MAX_OPEN_FILES: usize = 100;
/// Batches on their way to be sorted by partition.
const SORT_QUEUE: usize = 2;

/// A data file that was just written, not yet part of any snapshot.
#[derive(Clone, Debug)]
pub struct NewDataFile {
    pub fact: FileFact,
    pub file: Arc<DataFile>,
    pub spec_id: SpecId,
}

/// Writes batches as data files.
pub struct DataFileWriter;

impl DataFileWriter {
    /// Writes every row of `batches`, columns matched by name to schema `schema_id`, and gives the files
    /// sorted by path. When it fails, the files written so far are deleted. When the future is dropped
    /// they stay for the orphan clean-up.
    pub async fn write<S, E>(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: S,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Self::as_they_come(table, WritePlan::of(table, schema_id, false)?, batches).await
    }

    /// As [`Self::write`], for rows that are written again as they are: in a table of format v3 the batches may
    /// have the columns of [`super::scan::RowReader::with_lineage`], which the files then keep.
    pub async fn write_again<S, E>(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: S,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Self::as_they_come(table, WritePlan::of(table, schema_id, true)?, batches).await
    }

    /// As [`Self::write_again`], in the table's sort order, which the files then say they have; in several lanes, and
    /// with one file a partition, however many partitions there are. `batches` are taken in their order by one
    /// reader, to the end before any file is closed when they are sorted.
    pub async fn write_ordered<S, E>(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: S,
        resources: &WriteResources,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plan = Arc::new(WritePlan::of(table, schema_id, true)?);
        let result = ordered(&plan, batches, resources).await;
        Self::without_leftovers(table, &plan, result).await
    }

    /// As [`Self::write_ordered`], looked after: every file is told of before it is begun, those that are whole are
    /// handed over, and the write ends when it is told to. Whoever looks after it deletes the files of a write that
    /// failed: some of them may be in the catalog.
    pub async fn write_along<S, E>(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: S,
        resources: &WriteResources,
        course: &Course,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>> + Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plan = Arc::new(WritePlan::along(table, schema_id, course)?);
        let mut files = ordered(&plan, batches, resources).await?;
        files.sort_by(|one, other| one.fact.path.cmp(&other.fact.path));
        Ok(files)
    }

    async fn as_they_come<S, E>(
        table: &LoadedTable,
        plan: WritePlan,
        batches: S,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let plan = Arc::new(plan);
        let bare = batches.map(|batch| batch.map_err(|e| TableError::Producer(e.into())));
        let lane = Lane { plan: Arc::clone(&plan), resources: None, lanes: 1, stop: Arc::default() };
        let result = lane.write(bare, Opening::Always).await;
        Self::without_leftovers(table, &plan, result).await
    }

    /// The files sorted by path, or none left of a failed write.
    async fn without_leftovers(
        table: &LoadedTable,
        plan: &WritePlan,
        result: Result<Vec<NewDataFile>, TableError>,
    ) -> Result<Vec<NewDataFile>, TableError> {
        match result {
            Ok(mut files) => {
                files.sort_by(|one, other| one.fact.path.cmp(&other.fact.path));
                Ok(files)
            }
            Err(error) => {
                let written = &plan.locations.written;
                let written = std::mem::take(&mut *written.lock().unwrap_or_else(PoisonError::into_inner));
                for path in written {
                    if let Err(error) = table.file_io.delete(&path).await {
                        tracing::warn!(%path, %error, "a data file of a failed write was left behind");
                    }
                }
                Err(error)
            }
        }
    }

    /// As [`Self::write`], for rows in memory.
    pub async fn write_batches(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: Vec<RecordBatch>,
    ) -> Result<Vec<NewDataFile>, TableError> {
        let batches = stream::iter(batches.into_iter().map(Ok::<_, std::convert::Infallible>));
        Self::write(table, schema_id, batches).await
    }
}

async fn ordered<S, E>(
    plan: &Arc<WritePlan>,
    batches: S,
    resources: &WriteResources,
) -> Result<Vec<NewDataFile>, TableError>
where
    S: Stream<Item = Result<RecordBatch, E>> + Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    // Each lane may hold a row group.
    let lanes = resources.lanes.min(MAX_BUFFERED_BYTES / plan.row_group_bytes.max(1)).max(1);
    let (order, failure) = (&plan.order, Failure::default());
    let preparing = Arc::clone(plan);
    let rows =
        batches.map(move |batch| preparing.prepared(&batch.map_err(|e| TableError::Producer(e.into()))?));
    let rows = as_engine_rows(order.schema(), rows, &failure);
    let (sorted_by, opening) = match order.sort_order_id() {
        Some(_) => (order.columns(), Opening::InTurn),
        None => (Vec::new(), Opening::Bounded),
    };
    let lanes = in_lanes(rows, order.partition(), lanes, &sorted_by, &resources.task).map_err(of_engine)?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writing = JoinSet::new();
    let count = lanes.len();
    for rows in lanes {
        let lane = Lane {
            plan: Arc::clone(plan),
            resources: Some(Arc::clone(&resources.task)),
            lanes: count,
            stop: Arc::clone(&stop),
        };
        writing.spawn(async move { lane.write(rows.map(|batch| batch.map_err(of_engine)), opening).await });
    }
    let (mut files, mut failed) = (Vec::new(), None);
    while let Some(ended) = writing.join_next().await {
        match ended.unwrap_or_else(|e| Err(TableError::of_join(&plan.locations.folder, e))) {
            Ok(written) => files.extend(written),
            Err(error) => {
                // Nothing is deleted before every lane has ended.
                stop.store(true, Ordering::Relaxed);
                failed.get_or_insert(error);
            }
        }
    }
    match (failure.take(), failed) {
        (Some(error), _) | (None, Some(error)) => Err(error),
        (None, None) => Ok(files),
    }
}

fn of_engine(error: datafusion::error::DataFusionError) -> TableError {
    TableError::Producer(Box::new(error))
}

/// One stream of rows on its way to files.
struct Lane {
    plan: Arc<WritePlan>,
    /// `None`: rows are not prepared, and nothing can be sorted.
    resources: Option<Arc<TaskContext>>,
    lanes: usize,
    /// Another lane has failed.
    stop: Arc<AtomicBool>,
}

impl Lane {
    async fn write<S>(&self, rows: S, opening: Opening) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, TableError>>,
    {
        let sink = Sink::open(&self.plan, opening, self.lanes)?;
        let (mut sink, late) = self.drain(sink, rows).await?;
        if let Some(late) = late {
            sink = self.on_blocking(sink, |sink, handle| handle.block_on(sink.begin_in_turn())).await?.0;
            let rows = late.sorted().await?.map(|batch| batch.map_err(of_engine));
            sink = self.drain(sink, rows).await?.0;
        }
        Ok(self.on_blocking(sink, |sink, handle| handle.block_on(sink.close())).await?.1)
    }

    /// Writes the rows, and gives those that have to wait until the open files are closed.
    async fn drain<S>(&self, sink: Sink, rows: S) -> Result<(Sink, Option<Late>), TableError>
    where
        S: Stream<Item = Result<RecordBatch, TableError>>,
    {
        let course = self.plan.locations.course.as_ref();
        let mut late: Option<Late> = None;
        let mut rows = pin!(rows);
        let mut handed_over_at = Instant::now();
        let mut encoder = Encoder::Free(Box::new(sink));
        loop {
            // Encoding goes on meanwhile.
            let next = tokio::select! {
                biased;
                ending = ended(course) => {
                    // Nothing is written any more when it is told that the write has ended.
                    encoder.free(&self.plan).await?;
                    return Err(ending.of_write());
                }
                () = due(course, handed_over_at), if encoder.holds_files() => Next::HandOver,
                batch = rows.next() => Next::Rows(batch),
            };
            let (sink, waiting) = encoder.free(&self.plan).await?;
            if let Some(batch) = waiting {
                let late = match (&mut late, &self.resources) {
                    (Some(late), _) => late,
                    (none, Some(task)) => none.insert(Late::begin(&self.plan, task)?),
                    (None, None) => return Err(TableError::Internal("rows that nobody sorts".to_owned())),
                };
                late.add(batch).await?;
            }
            let batch = match next {
                Next::Rows(Some(batch)) => batch?,
                Next::Rows(None) => return Ok((*sink, late)),
                Next::HandOver => {
                    let closed = self.on_blocking(*sink, |sink, handle| handle.block_on(sink.hand_over()));
                    let (sink, files) = closed.await?;
                    if let (Some(course), false) = (course, files.is_empty()) {
                        course.hands_over(files).await.map_err(Ending::of_write)?;
                    }
                    handed_over_at = Instant::now();
                    encoder = Encoder::Free(Box::new(sink));
                    continue;
                }
            };
            if self.stop.load(Ordering::Relaxed) {
                return Err(TableError::Internal("another lane of the write has failed".to_owned()));
            }
            if let Some(course) = course {
                course.counts().rows_written.fetch_add(batch.num_rows() as u64, Ordering::Relaxed);
            }
            encoder = Encoder::begin(sink, batch, self.resources.is_some());
        }
    }

    async fn on_blocking<T: Send + 'static>(
        &self,
        mut sink: Sink,
        work: impl FnOnce(&mut Sink, &Handle) -> Result<T, TableError> + Send + 'static,
    ) -> Result<(Sink, T), TableError> {
        let handle = Handle::current();
        on_blocking_thread(&self.plan.locations.folder, move || {
            let result = work(&mut sink, &handle)?;
            Ok((sink, result))
        })
        .await?
    }
}

/// What a lane does next.
enum Next {
    Rows(Option<Result<RecordBatch, TableError>>),
    HandOver,
}

/// A sink, or the thread that has it.
enum Encoder {
    Free(Box<Sink>),
    Busy(JoinHandle<Encoded>),
}

/// The sink, and rows that have to wait.
type Encoded = Result<(Box<Sink>, Option<RecordBatch>), TableError>;

impl Encoder {
    fn begin(mut sink: Box<Sink>, batch: RecordBatch, prepared: bool) -> Self {
        let handle = Handle::current();
        Self::Busy(tokio::task::spawn_blocking(move || {
            let batch = if prepared { batch } else { sink.plan().prepared(&batch)? };
            let waiting = handle.block_on(sink.write(&batch))?;
            Ok((sink, waiting))
        }))
    }

    /// When what the sink was given is encoded.
    async fn free(self, plan: &WritePlan) -> Encoded {
        match self {
            Self::Free(sink) => Ok((sink, None)),
            Self::Busy(encoding) => {
                encoding.await.map_err(|e| TableError::of_join(&plan.locations.folder, e))?
            }
        }
    }

    /// Is there anything to be handed over?
    fn holds_files(&self) -> bool {
        match self {
            Self::Free(sink) => sink.holds_files(),
            Self::Busy(_) => true,
        }
    }
}

/// Never, when nobody looks after the write.
async fn ended(course: Option<&Course>) -> Ending {
    match course {
        Some(course) => course.ended().await,
        None => std::future::pending().await,
    }
}

/// When files are to be handed over.
async fn due(course: Option<&Course>, last: Instant) {
    match course {
        Some(course) => course::at(last + course.hand_over_every()).await,
        None => std::future::pending().await,
    }
}

/// Rows of partitions that came when too many files were open: they are sorted by partition meanwhile.
struct Late {
    rows: mpsc::Sender<RecordBatch>,
    sorting: JoinHandle<Result<SendableRecordBatchStream, TableError>>,
}

impl Late {
    fn begin(plan: &Arc<WritePlan>, task: &Arc<TaskContext>) -> Result<Self, TableError> {
        let (sender, receiver) = mpsc::channel(SORT_QUEUE);
        let rows =
            stream::unfold(
                receiver,
                |mut receiver| async move { Some((Ok(receiver.recv().await?), receiver)) },
            );
        let rows = as_engine_rows(plan.order.schema(), rows, &Failure::default());
        let mut rows = sorted(rows, plan.order.partition(), task).map_err(of_engine)?;
        let sorting = tokio::spawn(async move {
            // The first one is there when all have been taken.
            let first = rows.next().await;
            let schema = rows.schema();
            let all = stream::iter(first).chain(rows);
            let all = datafusion::physical_plan::stream::RecordBatchStreamAdapter::new(schema, all);
            Ok(Box::pin(all) as SendableRecordBatchStream)
        });
        Ok(Self { rows: sender, sorting })
    }

    async fn add(&mut self, batch: RecordBatch) -> Result<(), TableError> {
        if self.rows.send(batch).await.is_ok() {
            return Ok(());
        }
        // Nobody takes them any more: the sort has failed, and says why in its result.
        let ended = (&mut self.sorting).await.map_err(|e| TableError::of_join("rows to be sorted", e))?;
        let mut rows = ended?;
        match rows.next().await {
            Some(Err(error)) => Err(of_engine(error)),
            _ => Err(TableError::Internal("rows were sorted before they were all there".to_owned())),
        }
    }

    async fn sorted(self) -> Result<SendableRecordBatchStream, TableError> {
        drop(self.rows);
        self.sorting.await.map_err(|e| TableError::of_join("rows to be sorted", e))?
    }
}

#[cfg(test)]
#[path = "data_order_tests.rs"]
mod order_tests;
#[cfg(test)]
#[path = "write_property_tests.rs"]
mod property_tests;
#[cfg(test)]
#[path = "data_files_tests.rs"]
mod tests;
