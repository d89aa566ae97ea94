//! Where the rows of one lane of a write go: the open files of its partitions.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, UInt32Array};
use datafusion::arrow::compute::{concat_batches, partition, take_record_batch};
use datafusion::arrow::error::ArrowError;
use datafusion::arrow::row::{RowConverter, SortField};
use iceberg::arrow::{RecordBatchPartitionSplitter, schema_to_arrow_schema};
use iceberg::spec::{
    DataFile, DataFileFormat, FormatVersion, PartitionKey, PartitionSpecRef, SchemaRef, SortOrder, Struct,
    StructType,
};
use iceberg::writer::base_writer::data_file_writer::{
    DataFileWriter as FileSetWriter, DataFileWriterBuilder,
};
use iceberg::writer::file_writer::ParquetWriterBuilder;
use iceberg::writer::file_writer::location_generator::DefaultFileNameGenerator;
use iceberg::writer::file_writer::rolling_writer::RollingFileWriterBuilder;
use iceberg::writer::{IcebergWriter, IcebergWriterBuilder};
use mergeberg_kernel::ids::{SchemaId, SpecId};
use uuid::Uuid;

use super::course::Course;
use super::data_files::{MAX_BUFFERED_BYTES, MAX_OPEN_FILES, NewDataFile};
use super::data_locations::Locations;
use super::error::{TableError, plain};
use super::loaded::LoadedTable;
use super::manifest_codec::{file_fact, partition_type};
use super::metrics_modes::MetricsModes;
use super::parquet_properties::{parquet_properties, row_group_bytes, target_file_bytes};
use super::partition_values::partition_of;
use super::row_lineage;
use super::row_order::RowOrder;
use super::row_shape::RowShape;

/// How the rows of one write become files; shared by its lanes.
pub(super) struct WritePlan {
    shape: RowShape,
    pub order: RowOrder,
    schema: SchemaRef,
    spec: PartitionSpecRef,
    types: StructType,
    rolling: RollingFileWriterBuilder<ParquetWriterBuilder, Locations, DefaultFileNameGenerator>,
    pub locations: Locations,
    metrics: MetricsModes,
    pub row_group_bytes: usize,
}

impl WritePlan {
    /// `lineage`: rows of a table of format v3 may bring their ids.
    pub fn of(table: &LoadedTable, schema_id: SchemaId, lineage: bool) -> Result<Self, TableError> {
        Self::with(table, schema_id, lineage, None)
    }

    /// Of a write that is looked after, with row ids.
    pub fn along(table: &LoadedTable, schema_id: SchemaId, course: &Course) -> Result<Self, TableError> {
        Self::with(table, schema_id, true, Some(course.clone()))
    }

    fn with(
        table: &LoadedTable,
        schema_id: SchemaId,
        lineage: bool,
        course: Option<Course>,
    ) -> Result<Self, TableError> {
        let (metadata, facts) = (&table.metadata, &table.facts);
        let declared = metadata
            .schema_by_id(schema_id.0)
            .ok_or_else(|| TableError::Rows(format!("the table has no schema {schema_id}")))?;
        let schema = if lineage && metadata.format_version() >= FormatVersion::V3 {
            Arc::new(row_lineage::extended(declared)?)
        } else {
            Arc::clone(declared)
        };
        let spec = metadata.default_partition_spec().clone();
        let types = partition_type(&spec, &schema).ok_or_else(|| {
            TableError::Unsupported(format!(
                "partition spec {} cannot be used with schema {schema_id}; write under the current schema",
                spec.spec_id()
            ))
        })?;
        let arrow = schema_to_arrow_schema(&schema).map_err(|e| TableError::Unsupported(plain(&e)))?;
        let arrow = Arc::new(arrow);
        let unsorted = Arc::new(SortOrder::unsorted_order());
        let order = metadata.sort_order_by_id(metadata.default_sort_order_id()).unwrap_or(&unsorted);
        let properties = parquet_properties(facts, &schema, &arrow)?;
        let locations = Locations::new(facts, types.clone(), course);
        let rolling = RollingFileWriterBuilder::new(
            ParquetWriterBuilder::new(properties, schema.clone()),
            target_file_bytes(facts),
            table.file_io.clone(),
            locations.clone(),
            DefaultFileNameGenerator::new(Uuid::now_v7().to_string(), None, DataFileFormat::Parquet),
        );
        Ok(Self {
            shape: RowShape::of(&schema)?,
            order: RowOrder::of(&arrow, &spec, order)?,
            metrics: MetricsModes::of(facts, declared, order),
            schema,
            spec,
            types,
            rolling,
            locations,
            row_group_bytes: row_group_bytes(facts),
        })
    }

    /// A producer's rows in the table's shape, with what they are ordered by.
    pub fn prepared(&self, batch: &RecordBatch) -> Result<RecordBatch, TableError> {
        self.order.with_keys(self.shape.conform(batch)?)
    }

    fn splitter(&self) -> Result<Option<RecordBatchPartitionSplitter>, TableError> {
        if self.spec.is_unpartitioned() {
            return Ok(None);
        }
        RecordBatchPartitionSplitter::try_new_with_computed_values(self.schema.clone(), self.spec.clone())
            .map(Some)
            .map_err(|e| TableError::Unsupported(plain(&e)))
    }

    /// A file as its manifest entry is to describe it; `sorted`: its rows are in the table's order.
    fn described(&self, file: &DataFile, sorted: bool) -> Result<NewDataFile, TableError> {
        let spec_id = self.spec.spec_id();
        let mut builder = self.metrics.described(file, spec_id);
        if let Some(order) = self.order.sort_order_id().filter(|_| sorted) {
            builder.sort_order_id(order);
        }
        let file = builder.build().map_err(|e| TableError::Internal(format!("{}: {e}", file.file_path())))?;
        let partition = partition_of(&self.spec, &self.types, file.partition()).map_err(TableError::Rows)?;
        let fact = file_fact(&file, Arc::new(partition)).map_err(TableError::Internal)?;
        Ok(NewDataFile { fact, file: Arc::new(file), spec_id: SpecId(spec_id) })
    }
}

/// What happens when a row of another partition comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// Its file is opened; too many are answered by closing the fullest.
    Always,
    /// Its file is opened unless too many are, in which case the row waits for [`Self::InTurn`].
    Bounded,
    /// Rows come sorted, so the file before it is complete.
    InTurn,
}

type FilesWriter = FileSetWriter<ParquetWriterBuilder, Locations, DefaultFileNameGenerator>;

struct OpenFile {
    writer: FilesWriter,
    /// Rows taken since the file was opened, in bytes; of these at most a row group is in memory.
    taken_bytes: usize,
}

/// The files of one lane.
pub(super) struct Sink {
    plan: Arc<WritePlan>,
    opening: Opening,
    /// Are rows in the table's sort order?
    sorted: bool,
    /// No further partition is opened.
    full: bool,
    max_open: usize,
    max_bytes: usize,
    /// `None` for an unpartitioned spec.
    splitter: Option<RecordBatchPartitionSplitter>,
    builder: DataFileWriterBuilder<ParquetWriterBuilder, Locations, DefaultFileNameGenerator>,
    open: HashMap<Struct, OpenFile>,
    closed: Vec<DataFile>,
    /// How many of the closed ones were handed over.
    handed_over: usize,
}

impl Sink {
    /// One of `lanes`, which share what is open and in memory.
    pub fn open(plan: &Arc<WritePlan>, opening: Opening, lanes: usize) -> Result<Self, TableError> {
        Ok(Self {
            opening,
            sorted: opening == Opening::InTurn,
            full: false,
            max_open: (MAX_OPEN_FILES / lanes.max(1)).max(1),
            max_bytes: MAX_BUFFERED_BYTES / lanes.max(1),
            splitter: plan.splitter()?,
            builder: DataFileWriterBuilder::new(plan.rolling.clone()),
            open: HashMap::new(),
            closed: Vec::new(),
            handed_over: 0,
            plan: Arc::clone(plan),
        })
    }

    pub fn plan(&self) -> &WritePlan {
        &self.plan
    }

    /// Writes prepared rows, and gives those back that have to wait.
    pub async fn write(&mut self, rows: &RecordBatch) -> Result<Option<RecordBatch>, TableError> {
        let mut waiting = Vec::new();
        if rows.num_rows() == 0 {
            return Ok(None);
        }
        for (key, part) in self.parts(rows)? {
            if !self.open.contains_key(key.data()) {
                match self.opening {
                    Opening::Always => {
                        while self.open.len() >= self.max_open {
                            self.close_fullest().await?;
                        }
                    }
                    Opening::InTurn => self.close_all().await?,
                    Opening::Bounded => {
                        self.full |= self.open.len() >= self.max_open;
                        if self.full {
                            waiting.push(part);
                            continue;
                        }
                    }
                }
            }
            let part = self.plan.order.without_keys(&part)?;
            self.write_part(key, part).await?;
            self.plan.locations.refusal()?;
        }
        while self.buffered_bytes() > self.max_bytes {
            self.close_fullest().await?;
        }
        if waiting.is_empty() {
            return Ok(None);
        }
        // Copied into one: each part by itself would count, and hold, all of the batch that it is a slice of.
        let together = concat_batches(self.plan.order.schema(), &waiting);
        together.map(Some).map_err(|e| TableError::Internal(format!("rows could not be put together: {e}")))
    }

    /// The rows by partition, in their order; rows that come sorted are cut, others grouped.
    fn parts(&self, rows: &RecordBatch) -> Result<Vec<(PartitionKey, RecordBatch)>, TableError> {
        let plan = &self.plan;
        let Some(splitter) = &self.splitter else {
            let nulls = Struct::from_iter(plan.types.fields().iter().map(|_| None));
            let key = PartitionKey::new(plan.spec.as_ref().clone(), plan.schema.clone(), nulls);
            return Ok(vec![(key, rows.clone())]);
        };
        let failed = |e: ArrowError| TableError::Internal(format!("rows could not be parted: {e}"));
        let mut grouped = rows.clone();
        let mut ranges = partition(&self.keys(&grouped)).map_err(failed)?.ranges();
        if ranges.len() > 1 && self.opening != Opening::InTurn {
            grouped = by_value(&grouped, &self.keys(&grouped)).map_err(failed)?;
            ranges = partition(&self.keys(&grouped)).map_err(failed)?.ranges();
        }
        let mut parts = Vec::with_capacity(ranges.len());
        for range in ranges {
            let part = grouped.slice(range.start, range.len());
            let one = plan.order.without_keys(&part.slice(0, 1))?;
            let key = splitter.split(&one).map_err(|e| TableError::Rows(plain(&e)))?.pop();
            let (key, _) = key.ok_or_else(|| TableError::Internal("a row without a partition".to_owned()))?;
            parts.push((key, part));
        }
        Ok(parts)
    }

    fn keys(&self, rows: &RecordBatch) -> Vec<ArrayRef> {
        let columns = self.plan.order.partition().iter();
        columns.filter_map(|column| rows.columns().get(column.at).cloned()).collect()
    }

    async fn write_part(&mut self, key: PartitionKey, rows: RecordBatch) -> Result<(), TableError> {
        let failed = |e: iceberg::Error| TableError::of_write(&self.plan.locations.folder, e);
        let file = match self.open.entry(key.data().clone()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let writer = self.builder.build(Some(key)).await.map_err(failed)?;
                entry.insert(OpenFile { writer, taken_bytes: 0 })
            }
        };
        file.taken_bytes += rows.get_array_memory_size();
        file.writer.write(rows).await.map_err(failed)
    }

    fn buffered_bytes(&self) -> usize {
        self.open.values().map(|file| file.taken_bytes.min(self.plan.row_group_bytes)).sum()
    }

    async fn close_fullest(&mut self) -> Result<(), TableError> {
        let fullest = self.open.iter().max_by_key(|(_, file)| file.taken_bytes).map(|(key, _)| key.clone());
        if let Some(mut file) = fullest.and_then(|key| self.open.remove(&key)) {
            let closed = file.writer.close().await;
            self.closed.extend(closed.map_err(|e| TableError::of_write(&self.plan.locations.folder, e))?);
        }
        Ok(())
    }

    async fn close_all(&mut self) -> Result<(), TableError> {
        while !self.open.is_empty() {
            self.close_fullest().await?;
        }
        Ok(())
    }

    /// What comes from now on is sorted by partition.
    pub async fn begin_in_turn(&mut self) -> Result<(), TableError> {
        self.close_all().await?;
        self.opening = Opening::InTurn;
        Ok(())
    }

    /// Is there anything to be handed over?
    pub fn holds_files(&self) -> bool {
        !self.open.is_empty() || self.closed.len() > self.handed_over
    }

    /// Closes what is open, and gives the files that were not handed over before. Rows of their partitions go on in
    /// other files.
    pub async fn hand_over(&mut self) -> Result<Vec<NewDataFile>, TableError> {
        self.close_all().await?;
        let new = self.closed.iter().skip(self.handed_over);
        let files = new.map(|file| self.plan.described(file, self.sorted)).collect::<Result<_, _>>()?;
        self.handed_over = self.closed.len();
        Ok(files)
    }

    /// Closes what is open and gives all files.
    pub async fn close(&mut self) -> Result<Vec<NewDataFile>, TableError> {
        self.close_all().await?;
        let closed = std::mem::take(&mut self.closed);
        closed.iter().map(|file| self.plan.described(file, self.sorted)).collect()
    }
}

/// The rows with equal values beside each other, otherwise in their order.
fn by_value(rows: &RecordBatch, keys: &[ArrayRef]) -> Result<RecordBatch, ArrowError> {
    let fields = keys.iter().map(|key| SortField::new(key.data_type().clone())).collect();
    let values = RowConverter::new(fields)?.convert_columns(keys)?;
    let mut places: Vec<u32> = (0_u32..).take(rows.num_rows()).collect();
    let value = |place: &u32| values.row(usize::try_from(*place).unwrap_or_default());
    places.sort_by(|one, other| value(one).cmp(&value(other)));
    take_record_batch(rows, &UInt32Array::from(places))
}
