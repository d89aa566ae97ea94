//! Rows of chosen data files as Arrow batches, read under one schema of the table, by field id.
//!
//! The caller chooses the files (from manifests, by partition); nothing is planned or pruned here. Every
//! column is read as optional: a null in a column that the schema calls required is a row for a check to
//! find, not an error of the reader. A file that does not hold the number of rows that its manifest entry
//! says is an error: a check over the wrong rows is no check.
//!
//! Absent on purpose: delete files. Whoever reads asks `LiveFiles::deletes` first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use datafusion::arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{Schema as ArrowSchema, SchemaRef as ArrowSchemaRef};
use futures::StreamExt;
use futures::stream::BoxStream;
use iceberg::Runtime;
use iceberg::arrow::{ArrowReaderBuilder, ScanMetrics, schema_to_arrow_schema};
use iceberg::io::FileIO;
use iceberg::metadata_columns::RESERVED_FIELD_ID_FILE;
use iceberg::scan::{ArrowRecordBatchStream, FileScanTask};
use iceberg::spec::{
    DEFAULT_SCHEMA_NAME_MAPPING, DataFileFormat, Literal, NameMapping, NestedField, PartitionSpec,
    PartitionSpecRef, PrimitiveLiteral, PrimitiveType, Schema, SchemaRef, Struct, Transform, Type,
};
use mergeberg_kernel::ids::{SchemaId, SpecId};

use super::error::TableError;
use super::loaded::LoadedTable;
use super::manifests::LiveFile;

/// Rows of one batch.
const BATCH_ROWS: usize = 8192;

/// Batches of one file, in file order.
pub type BatchStream = BoxStream<'static, Result<RecordBatch, TableError>>;

/// A data file with the place it has in a train: 0 for the base, i for the i-th car. What the numbers
/// mean is the caller's business; here they only travel with the file.
#[derive(Clone, Debug)]
pub struct ScanFile {
    pub file: LiveFile,
    pub origin: i32,
}

/// Files that one task reads one after the other.
#[derive(Clone, Debug, Default)]
pub struct FileGroup {
    pub files: Vec<ScanFile>,
    pub bytes: i64,
}

impl FileGroup {
    /// Spreads files over at most `groups` groups of about equal bytes, largest file first. No group is
    /// empty, except that no files make one empty group.
    pub fn balance(mut files: Vec<ScanFile>, groups: usize) -> Vec<Self> {
        // Ties by path, so that the same files are always read by the same groups.
        files.sort_by(|a, b| {
            (b.file.fact.bytes, &a.file.fact.path).cmp(&(a.file.fact.bytes, &b.file.fact.path))
        });
        let mut balanced = vec![Self::default(); groups.min(files.len()).max(1)];
        for file in files {
            if let Some(lightest) = balanced.iter_mut().min_by_key(|g| (g.bytes, g.files.len())) {
                lightest.bytes += file.file.fact.bytes.max(0);
                lightest.files.push(file);
            }
        }
        balanced
    }

    pub fn records(&self) -> i64 {
        self.files.iter().map(|f| f.file.fact.records).sum()
    }
}

/// What a scan really read.
#[derive(Debug, Default)]
pub struct ScanCounters {
    files: AtomicU64,
    rows: AtomicU64,
    bytes: AtomicU64,
}

impl ScanCounters {
    /// Files opened.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Bytes fetched from storage, footers included.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

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
        })
    }

    pub fn schema_id(&self) -> SchemaId {
        self.schema_id
    }

    /// The top-level columns, in schema order, all nullable.
    pub fn arrow_schema(&self) -> &ArrowSchemaRef {
        &self.arrow_schema
    }

    /// The rows of `file`, columns by their positions in [`Self::arrow_schema`]. No columns give batches
    /// that only have a number of rows. Must be polled within a Tokio runtime.
    pub fn read(
        &self,
        file: &LiveFile,
        columns: &[usize],
        counters: &Arc<ScanCounters>,
    ) -> Result<BatchStream, TableError> {
        let path = Arc::clone(&file.fact.path);
        if file.file.file_format() != DataFileFormat::Parquet {
            return Err(TableError::Unsupported(format!(
                "{path} is a {} file; only Parquet is read",
                file.file.file_format()
            )));
        }
        let failed = |e: &iceberg::Error| TableError::io(&path, e);
        let mut ids = self.field_ids(columns)?;
        if ids.is_empty() {
            // Without a real column the reader would decode all of them.
            ids.extend(self.schema.as_struct().fields().first().map(|field| field.id));
        }
        let partition = self.partition_constants(file, &ids)?;
        // The crate's reader compares a file with the projection by position when both have as many
        // columns, and then takes a reordering for a renaming. One virtual column more sends every file
        // through its matching by field id.
        ids.push(RESERVED_FIELD_ID_FILE);
        let task = FileScanTask::builder()
            .with_file_size_in_bytes(file.file.file_size_in_bytes())
            .with_start(0)
            .with_length(0)
            .with_record_count(Some(file.file.record_count()))
            .with_data_file_path(path.to_string())
            .with_data_file_format(file.file.file_format())
            .with_schema(Arc::clone(&self.schema))
            .with_project_field_ids(ids)
            .with_partition(partition.as_ref().map(|(_, tuple)| tuple.clone()))
            .with_partition_spec(partition.map(|(spec, _)| spec))
            .with_name_mapping(self.name_mapping.clone())
            .with_case_sensitive(true)
            .build();
        let runtime = Runtime::try_current().map_err(|e| failed(&e))?;
        let scan = ArrowReaderBuilder::new(self.file_io.clone(), runtime)
            .with_data_file_concurrency_limit(1)
            .with_batch_size(BATCH_ROWS)
            .build()
            .read(futures::stream::iter([Ok(task)]).boxed())
            .map_err(|e| failed(&e))?;
        let arrow_schema = self.arrow_schema.project(columns).map_err(|e| wrong_shape(&path, &e))?;
        let meter = FileMeter { metrics: scan.metrics().clone(), rows: 0, counters: Arc::clone(counters) };
        counters.files.fetch_add(1, Ordering::Relaxed);
        let state = ReadState {
            path,
            file_io: self.file_io.clone(),
            schema: Arc::new(arrow_schema),
            expected_rows: file.file.record_count(),
            stream: scan.stream(),
            meter,
        };
        Ok(futures::stream::try_unfold(state, ReadState::next).boxed())
    }

    fn field_ids(&self, columns: &[usize]) -> Result<Vec<i32>, TableError> {
        let fields = self.schema.as_struct().fields();
        let mut ids = Vec::with_capacity(columns.len() + 1);
        for at in columns {
            let field = fields.get(*at).ok_or_else(|| {
                TableError::Unsupported(format!("schema {} has no column at {at}", self.schema_id))
            })?;
            ids.push(field.id);
        }
        Ok(ids)
    }

    /// Spec and tuple, when a wanted identity-partitioned column may be missing from the file itself, as
    /// in files that were added from Hive (table spec, "Column Projection", rule 1).
    fn partition_constants(
        &self,
        file: &LiveFile,
        wanted: &[i32],
    ) -> Result<Option<(Arc<PartitionSpec>, Struct)>, TableError> {
        let Some(spec) = self.specs.get(&file.spec_id) else {
            return Err(TableError::Unsupported(format!(
                "{} was written under partition spec {}, which the table does not have",
                file.fact.path, file.spec_id
            )));
        };
        let counted = file.file.value_counts();
        let needed = spec.fields().iter().any(|field| {
            field.transform == Transform::Identity
                && wanted.contains(&field.source_id)
                && !counted.contains_key(&field.source_id)
        });
        if !needed {
            return Ok(None);
        }
        let tuple = file.file.partition();
        let mut promoted = Vec::with_capacity(spec.fields().len());
        for (field, value) in spec.fields().iter().zip(tuple.iter()) {
            let source = self.schema.field_by_id(field.source_id);
            if field.transform == Transform::Identity && source.is_none() {
                return Err(TableError::Unsupported(format!(
                    "{} needs column {} of its partition spec, which schema {} does not have",
                    file.fact.path, field.source_id, self.schema_id
                )));
            }
            promoted.push(value.map(|value| promote(value, source.map(|f| f.field_type.as_ref()))));
        }
        Ok(Some((Arc::clone(spec), promoted.into_iter().collect())))
    }
}

/// A partition value as its column's present type: tuples keep the type that the column had when the file
/// was written.
fn promote(value: &Literal, to: Option<&Type>) -> Literal {
    match (value, to) {
        (Literal::Primitive(PrimitiveLiteral::Int(v)), Some(Type::Primitive(PrimitiveType::Long))) => {
            Literal::long(i64::from(*v))
        }
        (Literal::Primitive(PrimitiveLiteral::Float(v)), Some(Type::Primitive(PrimitiveType::Double))) => {
            Literal::double(f64::from(v.0))
        }
        _ => value.clone(),
    }
}

/// Adds what one file cost to the scan's counters, also when the reader stops half-way.
struct FileMeter {
    metrics: ScanMetrics,
    rows: u64,
    counters: Arc<ScanCounters>,
}

impl Drop for FileMeter {
    fn drop(&mut self) {
        self.counters.rows.fetch_add(self.rows, Ordering::Relaxed);
        self.counters.bytes.fetch_add(self.metrics.bytes_read(), Ordering::Relaxed);
    }
}

struct ReadState {
    path: Arc<str>,
    file_io: FileIO,
    schema: ArrowSchemaRef,
    expected_rows: u64,
    stream: ArrowRecordBatchStream,
    meter: FileMeter,
}

impl ReadState {
    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>, TableError> {
        match self.stream.next().await {
            Some(Ok(batch)) => {
                self.meter.rows += batch.num_rows() as u64;
                let batch = shape(&batch, &self.schema).map_err(|e| wrong_shape(&self.path, &e))?;
                Ok(Some((batch, self)))
            }
            Some(Err(e)) => Err(TableError::of_read(&self.file_io, &self.path, e).await),
            None if self.meter.rows == self.expected_rows => Ok(None),
            None => Err(TableError::corrupt(
                &self.path,
                format!("{} rows, but its manifest entry says {}", self.meter.rows, self.expected_rows),
            )),
        }
    }
}

/// The first columns of `batch` with exactly the types of `schema`: partition constants come run-length
/// encoded, and the virtual column at the end goes.
fn shape(
    batch: &RecordBatch,
    schema: &ArrowSchemaRef,
) -> Result<RecordBatch, datafusion::arrow::error::ArrowError> {
    let mut columns: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
    for (field, column) in schema.fields().iter().zip(batch.columns()) {
        columns.push(if field.data_type() == column.data_type() {
            Arc::clone(column)
        } else {
            cast(column, field.data_type())?
        });
    }
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options)
}

fn wrong_shape(path: &str, error: &datafusion::arrow::error::ArrowError) -> TableError {
    TableError::corrupt(path, format!("its columns do not fit the table's schema: {error}"))
}

fn unreadable_schema(schema_id: SchemaId, error: &iceberg::Error) -> TableError {
    TableError::Unsupported(format!("rows cannot be read under schema {schema_id}: {error}"))
}

/// Arrow schema of `schema` with one more column, for [`ScanFile::origin`].
pub fn with_column(schema: &ArrowSchemaRef, field: datafusion::arrow::datatypes::Field) -> ArrowSchemaRef {
    let mut fields: Vec<_> = schema.fields().iter().cloned().collect();
    fields.push(Arc::new(field));
    Arc::new(ArrowSchema::new(fields))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::test_orders::{Order, OrdersLab, order, orders};
    use datafusion::arrow::array::{Array, AsArray};
    use datafusion::arrow::datatypes::{DataType, Int64Type};
    use futures::TryStreamExt;

    async fn rows(reader: &RowReader, file: &LiveFile, columns: &[usize]) -> Vec<RecordBatch> {
        let counters = Arc::new(ScanCounters::default());
        reader.read(file, columns, &counters).unwrap().try_collect().await.unwrap()
    }

    #[tokio::test]
    async fn columns_of_one_type_that_changed_places_are_read_by_field_id() {
        let mut lab = OrdersLab::new().await;
        let rows_written = [Order { region: Some("us"), status: Some("open"), ..order(1) }];
        let snapshot = lab.snapshot(None, &rows_written, &[]).await;
        let file = lab.live(snapshot).await.remove(0);
        lab.reorder_and_add();
        let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id).unwrap();
        let names: Vec<_> = reader.arrow_schema().fields().iter().map(|f| f.name().as_str()).collect();
        assert_eq!(names, ["order_id", "status", "day", "amount", "price", "region", "note"]);

        // As many columns as the file has of them, of the same types: only the order differs.
        let batch = rows(&reader, &file, &[1, 5]).await.remove(0);
        assert_eq!(batch.column(0).as_string::<i32>().value(0), "open");
        assert_eq!(batch.column(1).as_string::<i32>().value(0), "us");

        // With the widened day, and the column that the file does not have.
        let batch = rows(&reader, &file, &[1, 5, 2, 6]).await.remove(0);

        assert_eq!(batch.column(0).as_string::<i32>().value(0), "open");
        assert_eq!(batch.column(1).as_string::<i32>().value(0), "us");
        assert_eq!(batch.column(2).as_primitive::<Int64Type>().value(0), 1);
        assert!(batch.column(3).is_null(0));
    }

    #[tokio::test]
    async fn no_columns_still_count_rows_and_cost_is_metered() {
        let mut lab = OrdersLab::new().await;
        let snapshot = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
        let file = lab.live(snapshot).await.remove(0);
        let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
        let counters = Arc::new(ScanCounters::default());
        let batches: Vec<_> = reader.read(&file, &[], &counters).unwrap().try_collect().await.unwrap();
        assert_eq!((batches[0].num_columns(), batches[0].num_rows()), (0, 3));
        assert_eq!((counters.files(), counters.rows()), (1, 3));
        assert!(counters.bytes() > 0);
    }

    #[tokio::test]
    async fn a_partition_column_that_the_file_lacks_comes_from_the_tuple() {
        let mut lab = OrdersLab::new().await;
        let snapshot = lab.snapshot(None, &orders(7, &[1]), &[]).await;
        let mut file = lab.live(snapshot).await.remove(0);
        lab.reorder_and_add();
        // As a file from Hive would be described: no metrics for the partition column.
        file.file = Arc::new(test_support::without_metrics(
            &file.file,
            lab.table.metadata.default_partition_spec_id(),
        ));
        let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id).unwrap();
        let batch = rows(&reader, &file, &[2]).await.remove(0);
        assert_eq!(batch.schema().field(0).data_type(), &DataType::Int64);
        assert_eq!(batch.column(0).as_primitive::<Int64Type>().value(0), 7);
    }

    #[tokio::test]
    async fn a_file_that_does_not_hold_what_its_entry_says_is_an_error() {
        let mut lab = OrdersLab::new().await;
        let snapshot = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
        let mut file = lab.live(snapshot).await.remove(0);
        let spec = lab.table.metadata.default_partition_spec_id();
        file.file = Arc::new(test_support::with_records(&file.file, spec, 3));
        let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
        let counters = Arc::new(ScanCounters::default());
        let read: Result<Vec<_>, _> = reader.read(&file, &[0], &counters).unwrap().try_collect().await;
        assert!(matches!(read, Err(TableError::Corrupt { .. })), "{read:?}");
    }

    #[tokio::test]
    async fn a_missing_file_is_told_by_its_path() {
        let mut lab = OrdersLab::new().await;
        let snapshot = lab.snapshot(None, &orders(1, &[1]), &[]).await;
        let file = lab.live(snapshot).await.remove(0);
        lab.table.file_io.delete(&file.fact.path).await.unwrap();
        let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
        let counters = Arc::new(ScanCounters::default());
        let read: Result<Vec<_>, _> = reader.read(&file, &[0], &counters).unwrap().try_collect().await;
        assert!(matches!(read, Err(TableError::Missing { path }) if *path == *file.fact.path));
    }

    #[tokio::test]
    async fn groups_are_balanced_by_bytes() {
        let mut lab = OrdersLab::new().await;
        let snapshot = lab.snapshot(None, &orders(1, &[1]), &[]).await;
        let file = lab.live(snapshot).await.remove(0);
        let of = |path: &str, bytes: i64| {
            let mut file = file.clone();
            file.fact.path = path.into();
            file.fact.bytes = bytes;
            ScanFile { file, origin: 0 }
        };
        let groups = FileGroup::balance(vec![of("a", 10), of("b", 60), of("c", 30), of("d", 20)], 2);
        assert_eq!(groups.iter().map(|g| g.bytes).collect::<Vec<_>>(), [60, 60]);
        assert_eq!(FileGroup::balance(vec![of("a", 1)], 8).len(), 1);
        assert_eq!(FileGroup::balance(Vec::new(), 8).len(), 1);
    }

    mod test_support {
        use iceberg::spec::{DataContentType, DataFile, DataFileBuilder};

        fn rebuilt(file: &DataFile, spec_id: i32) -> DataFileBuilder {
            let mut builder = DataFileBuilder::default();
            builder
                .content(DataContentType::Data)
                .file_path(file.file_path().to_owned())
                .file_format(file.file_format())
                .partition(file.partition().clone())
                .partition_spec_id(spec_id)
                .record_count(file.record_count())
                .file_size_in_bytes(file.file_size_in_bytes());
            builder
        }

        pub fn without_metrics(file: &DataFile, spec_id: i32) -> DataFile {
            rebuilt(file, spec_id).build().unwrap()
        }

        pub fn with_records(file: &DataFile, spec_id: i32, records: u64) -> DataFile {
            rebuilt(file, spec_id).record_count(records).build().unwrap()
        }
    }
}
