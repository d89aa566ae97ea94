//! Rows of chosen data files as Arrow batches, read under one schema of the table, by field id.
//!
//! The caller chooses the files (from manifests, by partition); nothing is planned or pruned here. Every
//! column is read as optional: a null in a column that the schema calls required is a row for a check to
//! find, not an error of the reader. A file that does not hold the number of rows that its manifest entry
//! says is an error: a check over the wrong rows is no check.
//!
//! Rows that delete files take away are left out after that, as the file's [`super::deletes::Selection`]
//! says. One reader is one scan: it reads each delete file once, for all files and streams.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use datafusion::arrow::array::{Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema, SchemaRef as ArrowSchemaRef};
use datafusion::arrow::error::ArrowError;
use datafusion::scalar::ScalarValue;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use iceberg::Runtime;
use iceberg::arrow::{ArrowReader, ArrowReaderBuilder, ScanMetrics, schema_to_arrow_schema};
use iceberg::io::FileIO;
use iceberg::metadata_columns::RESERVED_FIELD_ID_FILE;
use iceberg::scan::FileScanTask;
use iceberg::spec::{
    DEFAULT_SCHEMA_NAME_MAPPING, DataFileFormat, FormatVersion, NameMapping, NestedField, PartitionSpecRef,
    Schema, SchemaRef, TableMetadataRef,
};
use mergeberg_kernel::ids::{SchemaId, SpecId};

use super::column_adapter::WantedColumn;
use super::deletes::{DeleteStore, KeySchema, RowFilter};
use super::error::TableError;
use super::formats::{FormatReader, Source};
use super::loaded::LoadedTable;
use super::manifests::LiveFile;
use super::nested_adapt::new_value;
use super::nested_columns::{NestedReader, is_read_here};
use super::partition_constants::PartitionConstants;
use super::row_lineage::{self, Inherited};
use super::scan_columns::{ColumnStreams, wrong_shape};

pub use super::deletes::{RowDifference, live_rows, row_difference};
pub use super::scan_file::{FileGroup, ScanCounters, ScanFile};

/// Rows of one batch.
const BATCH_ROWS: usize = 8192;

/// Name of the column of positions.
const POSITION: &str = "_pos";

/// Batches of one file, in file order.
pub type BatchStream = BoxStream<'static, Result<RecordBatch, TableError>>;

/// Reads data files of one table under one of its schemas.
#[derive(Debug)]
pub struct RowReader {
    file_io: FileIO,
    schema_id: SchemaId,
    /// The table's schema with every top-level column optional.
    schema: SchemaRef,
    arrow_schema: ArrowSchemaRef,
    name_mapping: Option<Arc<NameMapping>>,
    specs: HashMap<SpecId, PartitionSpecRef>,
    /// Knows the columns that were dropped.
    metadata: TableMetadataRef,
    deletes: Arc<DeleteStore>,
    flat: FlatReader,
}

/// The crate's reader of flat columns, made once a scan: to make it asks the machine for its cores, which takes longer
/// than to read a small file.
#[derive(Clone, Default)]
struct FlatReader(Arc<OnceLock<ArrowReader>>);

impl std::fmt::Debug for FlatReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FlatReader")
    }
}

impl FlatReader {
    /// Must be called within the Tokio runtime that the scan is polled in.
    fn get(&self, file_io: &FileIO) -> Result<ArrowReader, iceberg::Error> {
        if let Some(reader) = self.0.get() {
            return Ok(reader.clone());
        }
        let reader = ArrowReaderBuilder::new(file_io.clone(), Runtime::try_current()?)
            .with_data_file_concurrency_limit(1)
            .with_batch_size(BATCH_ROWS)
            .build();
        Ok(self.0.get_or_init(|| reader).clone())
    }
}

impl RowReader {
    pub fn new(table: &LoadedTable, schema_id: SchemaId) -> Result<Self, TableError> {
        let declared = table.metadata.schema_by_id(schema_id.0).ok_or_else(|| {
            TableError::Unsupported(format!("{} has no schema {schema_id}", table.facts.name))
        })?;
        let fields = declared.as_struct().fields().iter().map(|field| {
            let mut field: NestedField = field.as_ref().clone();
            field.required = false;
            Arc::new(field)
        });
        let schema = Schema::builder()
            .with_schema_id(schema_id.0)
            .with_fields(fields)
            .build()
            .map_err(|e| unreadable_schema(schema_id, &e))?;
        let arrow_schema = schema_to_arrow_schema(&schema).map_err(|e| unreadable_schema(schema_id, &e))?;
        let name_mapping = match table.metadata.properties().get(DEFAULT_SCHEMA_NAME_MAPPING) {
            None => None,
            Some(text) => Some(Arc::new(serde_json::from_str(text).map_err(|e| {
                TableError::Unsupported(format!(
                    "table property {DEFAULT_SCHEMA_NAME_MAPPING} is no name mapping ({e}); correct it"
                ))
            })?)),
        };
        Ok(Self {
            file_io: table.file_io.clone(),
            schema_id,
            schema: Arc::new(schema),
            arrow_schema: Arc::new(arrow_schema),
            name_mapping,
            specs: table
                .metadata
                .partition_specs_iter()
                .map(|spec| (SpecId(spec.spec_id()), Arc::clone(spec)))
                .collect(),
            metadata: Arc::clone(&table.metadata),
            deletes: Arc::new(DeleteStore::new(table.file_io.clone())),
            flat: FlatReader::default(),
        })
    }

    /// What a new row has in each column of the schema, in its order, where its writer says nothing.
    pub fn new_values(&self) -> Result<Vec<ScalarValue>, TableError> {
        let fields = self.schema.as_struct().fields().iter().zip(self.arrow_schema.fields());
        fields.map(|(field, target)| new_value(field, target).map_err(TableError::Unsupported)).collect()
    }

    /// The same, with the columns `_row_id` and `_last_updated_sequence_number` behind the table's own, for a
    /// table of format v3 (table spec, "Row Lineage"). A table without row ids is read as it is.
    pub fn with_lineage(mut self) -> Result<Self, TableError> {
        if self.metadata.format_version() < FormatVersion::V3 {
            return Ok(self);
        }
        let schema = row_lineage::extended(&self.schema)?;
        let arrow_schema =
            schema_to_arrow_schema(&schema).map_err(|e| unreadable_schema(self.schema_id, &e))?;
        self.schema = Arc::new(schema);
        self.arrow_schema = Arc::new(arrow_schema);
        Ok(self)
    }

    pub fn schema_id(&self) -> SchemaId {
        self.schema_id
    }

    /// The top-level columns, in schema order, all nullable.
    pub fn arrow_schema(&self) -> &ArrowSchemaRef {
        &self.arrow_schema
    }

    /// The rows of `file` that are meant, columns by their positions in [`Self::arrow_schema`]. No columns
    /// give batches that only have a number of rows. Must be polled within a Tokio runtime.
    pub fn read(
        &self,
        file: &ScanFile,
        columns: &[usize],
        counters: &Arc<ScanCounters>,
    ) -> Result<BatchStream, TableError> {
        self.open(self.plan(file, columns, counters)?, file, counters)
    }

    /// As [`Self::read`], with one more column at the end: the row's position in the file, `Int64`, from 0.
    pub fn read_located(
        &self,
        file: &ScanFile,
        columns: &[usize],
        counters: &Arc<ScanCounters>,
    ) -> Result<BatchStream, TableError> {
        let plan = ReadPlan { located: true, ..self.plan(file, columns, counters)? };
        self.open(plan, file, counters)
    }

    fn open(
        &self,
        plan: ReadPlan,
        file: &ScanFile,
        counters: &Arc<ScanCounters>,
    ) -> Result<BatchStream, TableError> {
        if file.rows.is_whole() {
            return plan.open(None);
        }
        let (deletes, file, counters) = (Arc::clone(&self.deletes), file.clone(), Arc::clone(counters));
        let opened = async move {
            let mut filter = deletes.filter(&file, plan.arrow_schema.fields(), &counters).await?;
            if filter.selects_nothing() {
                return Ok(futures::stream::empty().boxed());
            }
            plan.open(Some(filter))
        };
        Ok(futures::stream::once(opened).try_flatten().boxed())
    }

    /// Number of rows of `file` that are meant. From the manifest entry and deleted positions where these
    /// decide, else the rows are read.
    pub async fn count(&self, file: &ScanFile, counters: &Arc<ScanCounters>) -> Result<u64, TableError> {
        if let Some(rows) = self.count_unread(file, counters).await? {
            return Ok(rows);
        }
        let mut batches = self.read(file, &[], counters)?;
        let mut rows = 0;
        while let Some(batch) = batches.try_next().await? {
            rows += batch.num_rows() as u64;
        }
        Ok(rows)
    }

    /// The same, if it can be told without reading the file.
    pub async fn count_unread(
        &self,
        file: &ScanFile,
        counters: &Arc<ScanCounters>,
    ) -> Result<Option<u64>, TableError> {
        if file.rows.is_whole() {
            return Ok(Some(file.file.file.record_count()));
        }
        self.deletes.count_by_positions(file, counters).await
    }

    /// What is read of a file: the wanted columns, and behind them those that deletes compare.
    fn plan(
        &self,
        scan: &ScanFile,
        columns: &[usize],
        counters: &Arc<ScanCounters>,
    ) -> Result<ReadPlan, TableError> {
        let file = &scan.file;
        let path = Arc::clone(&file.fact.path);
        let keys = KeySchema::of(&scan.rows, &self.schema, &self.arrow_schema, &self.metadata)?;
        let compared = keys.columns.iter().copied().filter(|at| !columns.contains(at));
        let all: Vec<usize> = columns.iter().copied().chain(compared).collect();
        let arrow_schema = keys.arrow_schema.project(&all).map_err(|e| wrong_shape(&path, &e))?;
        let format = file.file.file_format();
        // The crate reads the flat columns of Parquet files.
        let (own, flat): (Vec<usize>, Vec<usize>) = all.iter().partition(|at| {
            format != DataFileFormat::Parquet
                || keys.arrow_schema.fields().get(**at).is_some_and(|f| is_read_here(f))
        });
        let mut own = wanted_columns(&keys, &own);
        let constants = PartitionConstants::of(file, &self.specs)?;
        let mut task = None;
        if format == DataFileFormat::Parquet {
            task = self.flat_task(file, &keys, &flat, own.is_empty(), constants)?;
        } else {
            constants.put_into(&mut own, &keys.schema, self.schema_id)?;
        }
        Ok(ReadPlan {
            path,
            file_io: self.file_io.clone(),
            flat_reader: self.flat.clone(),
            bytes: file.file.file_size_in_bytes(),
            format,
            task,
            own,
            name_mapping: self.name_mapping.clone(),
            arrow_schema: Arc::new(arrow_schema),
            wanted: columns.len(),
            located: false,
            expected_rows: file.file.record_count(),
            inherited: Inherited::of(file),
            counters: Arc::clone(counters),
        })
    }

    /// What the crate reads of a Parquet file: these columns, or, where nothing else is read, one to count rows
    /// by.
    fn flat_task(
        &self,
        file: &LiveFile,
        keys: &KeySchema,
        flat: &[usize],
        is_all: bool,
        constants: PartitionConstants,
    ) -> Result<Option<FileScanTask>, TableError> {
        let mut ids = self.field_ids(&keys.schema, flat)?;
        if ids.is_empty() && is_all {
            // Without a real column the reader would decode all of them.
            ids.extend(self.counted_column());
        }
        let partition = constants.for_columns(&ids, &keys.schema, self.schema_id)?;
        // The crate's reader compares a file with the projection by position when both have as many
        // columns, and then takes a reordering for a renaming. One virtual column more sends every file
        // through its matching by field id.
        ids.push(RESERVED_FIELD_ID_FILE);
        // Where there is no column for it to read, it is not asked.
        Ok((ids.len() > 1).then(|| {
            FileScanTask::builder()
                .with_file_size_in_bytes(file.file.file_size_in_bytes())
                .with_start(0)
                .with_length(0)
                .with_record_count(Some(file.file.record_count()))
                .with_data_file_path(file.fact.path.to_string())
                .with_data_file_format(file.file.file_format())
                .with_schema(Arc::clone(&keys.schema))
                .with_project_field_ids(ids)
                .with_partition(partition.as_ref().map(|(_, tuple)| tuple.clone()))
                .with_partition_spec(partition.map(|(spec, _)| spec))
                .with_name_mapping(self.name_mapping.clone())
                .with_case_sensitive(true)
                .build()
        }))
    }

    /// A column to count the rows of a file by: one that the crate reads whatever became of it.
    fn counted_column(&self) -> Option<i32> {
        let fields = self.schema.as_struct().fields();
        fields.iter().find(|field| field.field_type.is_primitive()).map(|field| field.id)
    }

    fn field_ids(&self, schema: &Schema, columns: &[usize]) -> Result<Vec<i32>, TableError> {
        let fields = schema.as_struct().fields();
        let mut ids = Vec::with_capacity(columns.len() + 1);
        for at in columns {
            let field = fields.get(*at).ok_or_else(|| {
                TableError::Unsupported(format!("schema {} has no column at {at}", self.schema_id))
            })?;
            ids.push(field.id);
        }
        Ok(ids)
    }
}

/// Adds what one file cost to the scan's counters, also when the reader stops half-way.
struct FileMeter {
    /// Of what the crate reads.
    metrics: Option<ScanMetrics>,
    /// Bytes of what is read beside it.
    fetched: Arc<AtomicU64>,
    rows: u64,
    counters: Arc<ScanCounters>,
}

impl Drop for FileMeter {
    fn drop(&mut self) {
        let bytes = self.metrics.as_ref().map_or(0, ScanMetrics::bytes_read);
        self.counters.count_read(self.rows, bytes + self.fetched.load(Ordering::Relaxed));
    }
}

/// A file that is about to be read.
struct ReadPlan {
    path: Arc<str>,
    file_io: FileIO,
    flat_reader: FlatReader,
    /// Size of the file.
    bytes: u64,
    format: DataFileFormat,
    /// What the crate reads: the flat columns, or one of them to count rows by.
    task: Option<FileScanTask>,
    /// What is read here.
    own: Vec<WantedColumn>,
    name_mapping: Option<Arc<NameMapping>>,
    /// The columns that are read; of these the first `wanted` are given out.
    arrow_schema: ArrowSchemaRef,
    wanted: usize,
    /// Give each row its position as well.
    located: bool,
    expected_rows: u64,
    inherited: Inherited,
    counters: Arc<ScanCounters>,
}

impl ReadPlan {
    fn open(self, filter: Option<RowFilter>) -> Result<BatchStream, TableError> {
        let Self { path, file_io, flat_reader, bytes, format, task, own, name_mapping, .. } = self;
        let failed = |e: &iceberg::Error| TableError::io(&path, e);
        let mut metrics = None;
        let mut flat = None;
        if let Some(task) = task {
            let reader = flat_reader.get(&file_io).map_err(|e| failed(&e))?;
            let scan = reader.read(futures::stream::iter([Ok(task)]).boxed()).map_err(|e| failed(&e))?;
            metrics = Some(scan.metrics().clone());
            flat = Some(scan.stream());
        }
        self.counters.count_file();
        let fetched = Arc::default();
        let meter = FileMeter { metrics, fetched: Arc::clone(&fetched), rows: 0, counters: self.counters };
        let schema = self.arrow_schema;
        let opened = async move {
            let mapping = name_mapping.as_deref();
            let columns = if format != DataFileFormat::Parquet {
                let source = Source::open(file_io, Arc::clone(&path), bytes, fetched).await?;
                let reader = FormatReader::open(source, format, own, mapping, BATCH_ROWS).await?;
                Columns::Format(Box::new(reader), schema)
            } else if own.is_empty() && flat.is_some() {
                Columns::Parquet(Box::new(ColumnStreams::new(Arc::clone(&path), file_io, flat, None, schema)))
            } else {
                let nested =
                    NestedReader::open(&file_io, &path, bytes, own, mapping, BATCH_ROWS, fetched).await?;
                Columns::Parquet(Box::new(ColumnStreams::new(
                    Arc::clone(&path),
                    file_io,
                    flat,
                    Some(nested),
                    schema,
                )))
            };
            let state = ReadState {
                path,
                wanted: self.wanted,
                located: self.located,
                expected_rows: self.expected_rows,
                inherited: self.inherited,
                columns,
                filter,
                meter,
            };
            Ok(futures::stream::try_unfold(state, ReadState::next))
        };
        Ok(futures::stream::once(opened).try_flatten().boxed())
    }
}

/// The columns of one file, all rows in file order.
enum Columns {
    Parquet(Box<ColumnStreams>),
    Format(Box<FormatReader>, ArrowSchemaRef),
}

impl Columns {
    async fn next(&mut self, path: &str) -> Result<Option<RecordBatch>, TableError> {
        match self {
            Self::Parquet(streams) => streams.next().await,
            Self::Format(reader, schema) => {
                let Some(batch) = reader.next().await? else { return Ok(None) };
                batch.with_schema(Arc::clone(schema)).map(Some).map_err(|e| wrong_shape(path, &e))
            }
        }
    }
}

struct ReadState {
    path: Arc<str>,
    wanted: usize,
    located: bool,
    expected_rows: u64,
    inherited: Inherited,
    columns: Columns,
    filter: Option<RowFilter>,
    meter: FileMeter,
}

impl ReadState {
    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>, TableError> {
        loop {
            match self.columns.next(&self.path).await? {
                Some(batch) => {
                    let wrong = |e| wrong_shape(&self.path, &e);
                    let (first, rows) = (self.meter.rows, batch.num_rows() as u64);
                    let batch = self.inherited.fill(batch, first).map_err(wrong)?;
                    let batch =
                        if self.located { with_positions(&batch, first).map_err(wrong)? } else { batch };
                    self.meter.rows += rows;
                    let batch = self.meant(batch).map_err(|e| wrong_shape(&self.path, &e))?;
                    if batch.num_rows() > 0 {
                        return Ok(Some((batch, self)));
                    }
                }
                // Counted before any row is left out.
                None if self.meter.rows == self.expected_rows => return Ok(None),
                None => {
                    let (rows, said) = (self.meter.rows, self.expected_rows);
                    let message = format!("{rows} rows, but its manifest entry says {said}");
                    return Err(TableError::corrupt(&self.path, message));
                }
            }
        }
    }

    /// The rows that are meant, in the wanted columns.
    fn meant(&mut self, batch: RecordBatch) -> Result<RecordBatch, ArrowError> {
        let Some(filter) = &mut self.filter else { return Ok(batch) };
        let mut wanted: Vec<usize> = (0..self.wanted).collect();
        if self.located {
            wanted.push(batch.num_columns() - 1);
        }
        filter.apply(&batch)?.project(&wanted)
    }
}

/// The batch with the positions of its rows, of which the first is at `first`.
fn with_positions(batch: &RecordBatch, first: u64) -> Result<RecordBatch, ArrowError> {
    let positions =
        (first..).take(batch.num_rows()).map(|position| i64::try_from(position).unwrap_or(i64::MAX));
    let mut columns = batch.columns().to_vec();
    columns.push(Arc::new(Int64Array::from_iter_values(positions)));
    RecordBatch::try_new(with_column(&batch.schema(), Field::new(POSITION, DataType::Int64, false)), columns)
}

/// The columns at these places.
fn wanted_columns(keys: &KeySchema, places: &[usize]) -> Vec<WantedColumn> {
    let (fields, targets) = (keys.schema.as_struct().fields(), keys.arrow_schema.fields());
    let column = |at: &usize| {
        let (field, target) = (Arc::clone(fields.get(*at)?), Arc::clone(targets.get(*at)?));
        Some(WantedColumn { field, target })
    };
    places.iter().filter_map(column).collect()
}

fn unreadable_schema(schema_id: SchemaId, error: &iceberg::Error) -> TableError {
    TableError::Unsupported(format!("rows cannot be read under schema {schema_id}: {error}"))
}

/// Arrow schema of `schema` with one more column, for [`ScanFile::origin`].
pub fn with_column(schema: &ArrowSchemaRef, field: Field) -> ArrowSchemaRef {
    let mut fields: Vec<_> = schema.fields().iter().cloned().collect();
    fields.push(Arc::new(field));
    Arc::new(ArrowSchema::new(fields))
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
