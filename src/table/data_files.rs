//! Writes rows as Parquet data files of a table, under its default partition spec.
//!
//! Rows stream through: what is not on disk yet is bounded by [`MAX_BUFFERED_BYTES`] and
//! [`MAX_OPEN_FILES`]; beyond that the fullest file is closed and its partition goes on in another one.
//! Encoding runs off the async runtime, one batch at a time, while the producer makes the next.
//!
//! Absent on purpose: sorting by the table's sort order (files are marked unsorted), the object-storage
//! path layout, Avro and ORC (decision 0030).

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::RecordBatch;
use datafusion::parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use datafusion::parquet::file::properties::WriterProperties;
use futures::stream::{Stream, StreamExt};
use iceberg::arrow::RecordBatchPartitionSplitter;
use iceberg::spec::{
    DataFile, DataFileBuilder, DataFileFormat, Datum, FormatVersion, PartitionKey, PartitionSpecRef,
    PrimitiveLiteral, SchemaRef, Struct, StructType,
};
use iceberg::writer::base_writer::data_file_writer::{
    DataFileWriter as FileSetWriter, DataFileWriterBuilder,
};
use iceberg::writer::file_writer::ParquetWriterBuilder;
use iceberg::writer::file_writer::location_generator::{DefaultFileNameGenerator, LocationGenerator};
use iceberg::writer::file_writer::rolling_writer::RollingFileWriterBuilder;
use iceberg::writer::{IcebergWriter, IcebergWriterBuilder};
use mergeberg_kernel::change::FileFact;
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{SchemaId, SpecId};
use tokio::runtime::Handle;
use uuid::Uuid;

use super::error::TableError;
use super::folders::data_folder;
use super::loaded::LoadedTable;
use super::manifest_codec::{file_fact, partition_type};
use super::manifests::on_blocking_thread;
use super::partition_values::partition_of;
use super::row_lineage::{self, is_lineage_id};
use super::row_shape::RowShape;

/// Rows held in memory by all open files together, in bytes.
const MAX_BUFFERED_BYTES: usize = 512 * 1024 * 1024;
/// Files open at the same time; a year of days fits.
const MAX_OPEN_FILES: usize = 400;
/// Default of `write.target-file-size-bytes`, in bytes.
const DEFAULT_TARGET_FILE_BYTES: i64 = 512 * 1024 * 1024;
/// Default of `write.parquet.row-group-size-bytes`, in bytes.
const DEFAULT_ROW_GROUP_BYTES: i64 = 128 * 1024 * 1024;
/// Longer bounds of text and binary columns are left out of the manifest, in bytes.
const MAX_BOUND_BYTES: usize = 64;
/// Longer partition values are cut in file paths, in bytes as encoded; file systems allow 255 a folder.
const MAX_PATH_VALUE_BYTES: usize = 100;
/// Default of `write.parquet.compression-level` for ZSTD.
const DEFAULT_ZSTD_LEVEL: i64 = 3;

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
        Self::into_sink(table, Sink::open(table, schema_id, false)?, batches).await
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
        Self::into_sink(table, Sink::open(table, schema_id, true)?, batches).await
    }

    async fn into_sink<S, E>(
        table: &LoadedTable,
        sink: Sink,
        batches: S,
    ) -> Result<Vec<NewDataFile>, TableError>
    where
        S: Stream<Item = Result<RecordBatch, E>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let paths = sink.locations.written.clone();
        let result = drain(sink, batches).await;
        if result.is_err() {
            let written = std::mem::take(&mut *paths.lock().unwrap_or_else(PoisonError::into_inner));
            for path in written {
                if let Err(error) = table.file_io.delete(&path).await {
                    tracing::warn!(%path, %error, "a data file of a failed write was left behind");
                }
            }
        }
        result
    }

    /// As [`Self::write`], for rows in memory.
    pub async fn write_batches(
        table: &LoadedTable,
        schema_id: SchemaId,
        batches: Vec<RecordBatch>,
    ) -> Result<Vec<NewDataFile>, TableError> {
        let batches = futures::stream::iter(batches.into_iter().map(Ok::<_, std::convert::Infallible>));
        Self::write(table, schema_id, batches).await
    }
}

async fn drain<S, E>(mut sink: Sink, batches: S) -> Result<Vec<NewDataFile>, TableError>
where
    S: Stream<Item = Result<RecordBatch, E>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let place = sink.locations.folder.clone();
    let mut batches = pin!(batches);
    let mut next = batches.next().await;
    while let Some(batch) = next {
        let batch = batch.map_err(|e| TableError::Producer(e.into()))?;
        let handle = Handle::current();
        let encode = on_blocking_thread(&place, move || {
            let result = handle.block_on(sink.write(&batch));
            (sink, result)
        });
        let (encoded, following) = futures::join!(encode, batches.next());
        let (returned, result) = encoded?;
        result?;
        sink = returned;
        next = following;
    }
    let handle = Handle::current();
    on_blocking_thread(&place, move || handle.block_on(sink.close())).await?
}

type FilesWriter = FileSetWriter<ParquetWriterBuilder, Locations, DefaultFileNameGenerator>;

struct OpenFile {
    writer: FilesWriter,
    /// Rows taken since the file was opened, in bytes; of these at most a row group is in memory.
    taken_bytes: usize,
}

/// Where the rows of one write go.
struct Sink {
    shape: RowShape,
    schema: SchemaRef,
    spec: PartitionSpecRef,
    types: StructType,
    /// `None` for an unpartitioned spec.
    splitter: Option<RecordBatchPartitionSplitter>,
    builder: DataFileWriterBuilder<ParquetWriterBuilder, Locations, DefaultFileNameGenerator>,
    locations: Locations,
    row_group_bytes: usize,
    open: HashMap<Struct, OpenFile>,
    closed: Vec<DataFile>,
}

impl Sink {
    fn open(table: &LoadedTable, schema_id: SchemaId, lineage: bool) -> Result<Self, TableError> {
        let metadata = &table.metadata;
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
        let splitter = if spec.is_unpartitioned() {
            None
        } else {
            let splitter =
                RecordBatchPartitionSplitter::try_new_with_computed_values(schema.clone(), spec.clone())
                    .map_err(|e| TableError::Unsupported(super::error::plain(&e)))?;
            Some(splitter)
        };
        let facts = &table.facts;
        let row_group_bytes =
            bytes_property(facts, "write.parquet.row-group-size-bytes", DEFAULT_ROW_GROUP_BYTES);
        let properties = WriterProperties::builder()
            .set_compression(compression(facts)?)
            .set_max_row_group_bytes(Some(row_group_bytes))
            // The crate takes bounds over those row groups only whose statistics are not truncated; a
            // file bound would then be too narrow. So nothing is truncated, and long bounds are left out.
            .set_statistics_truncate_length(None)
            .build();
        let locations = Locations::new(facts, types.clone());
        let rolling = RollingFileWriterBuilder::new(
            ParquetWriterBuilder::new(properties, schema.clone()),
            bytes_property(facts, "write.target-file-size-bytes", DEFAULT_TARGET_FILE_BYTES),
            table.file_io.clone(),
            locations.clone(),
            DefaultFileNameGenerator::new(Uuid::now_v7().to_string(), None, DataFileFormat::Parquet),
        );
        Ok(Self {
            shape: RowShape::of(&schema)?,
            schema,
            spec,
            types,
            splitter,
            builder: DataFileWriterBuilder::new(rolling),
            locations,
            row_group_bytes,
            open: HashMap::new(),
            closed: Vec::new(),
        })
    }

    async fn write(&mut self, batch: &RecordBatch) -> Result<(), TableError> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let rows = self.shape.conform(batch)?;
        let parts = match &self.splitter {
            Some(splitter) => splitter.split(&rows).map_err(|e| TableError::Rows(super::error::plain(&e)))?,
            None => {
                let nulls = Struct::from_iter(self.types.fields().iter().map(|_| None));
                let key = PartitionKey::new(self.spec.as_ref().clone(), self.schema.clone(), nulls);
                vec![(key, rows)]
            }
        };
        for (key, part) in parts {
            self.write_part(key, part).await?;
        }
        while self.open.len() > MAX_OPEN_FILES || self.buffered_bytes() > MAX_BUFFERED_BYTES {
            self.close_fullest().await?;
        }
        Ok(())
    }

    async fn write_part(&mut self, key: PartitionKey, rows: RecordBatch) -> Result<(), TableError> {
        let failed = |e: iceberg::Error| TableError::of_write(&self.locations.folder, e);
        let file = match self.open.entry(key.data().clone()) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let writer = self.builder.build(Some(key)).await.map_err(failed)?;
                entry.insert(OpenFile { writer, taken_bytes: 0 })
            }
        };
        file.taken_bytes += rows.get_array_memory_size();
        file.writer.write(rows).await.map_err(failed)
    }

    fn buffered_bytes(&self) -> usize {
        self.open.values().map(|file| file.taken_bytes.min(self.row_group_bytes)).sum()
    }

    async fn close_fullest(&mut self) -> Result<(), TableError> {
        let fullest = self.open.iter().max_by_key(|(_, file)| file.taken_bytes).map(|(key, _)| key.clone());
        if let Some(mut file) = fullest.and_then(|key| self.open.remove(&key)) {
            let files =
                file.writer.close().await.map_err(|e| TableError::of_write(&self.locations.folder, e))?;
            self.closed.extend(files);
        }
        Ok(())
    }

    async fn close(mut self) -> Result<Vec<NewDataFile>, TableError> {
        while !self.open.is_empty() {
            self.close_fullest().await?;
        }
        let mut files = Vec::with_capacity(self.closed.len());
        for file in std::mem::take(&mut self.closed) {
            let file = without_long_bounds(&file, self.spec.spec_id())
                .map_err(|e| TableError::Internal(format!("{}: {e}", file.file_path())))?;
            let partition =
                partition_of(&self.spec, &self.types, file.partition()).map_err(TableError::Rows)?;
            let fact = file_fact(&file, Arc::new(partition)).map_err(TableError::Internal)?;
            files.push(NewDataFile { fact, file: Arc::new(file), spec_id: SpecId(self.spec.spec_id()) });
        }
        files.sort_by(|one, other| one.fact.path.cmp(&other.fact.path));
        Ok(files)
    }
}

/// The same file without bounds that would bloat manifests (a missing bound never misleads a reader), and without
/// statistics of columns that are no column of the table.
fn without_long_bounds(file: &DataFile, spec_id: i32) -> Result<DataFile, String> {
    fn of_table<T: Clone>(statistics: &HashMap<i32, T>) -> HashMap<i32, T> {
        let own = statistics.iter().filter(|(id, _)| !is_lineage_id(**id));
        own.map(|(id, value)| (*id, value.clone())).collect()
    }
    let short = |bounds: &HashMap<i32, Datum>| -> HashMap<i32, Datum> {
        of_table(bounds).into_iter().filter(|(_, bound)| is_short(bound)).collect()
    };
    DataFileBuilder::default()
        .content(file.content_type())
        .file_path(file.file_path().to_owned())
        .file_format(file.file_format())
        .partition(file.partition().clone())
        .partition_spec_id(spec_id)
        .record_count(file.record_count())
        .file_size_in_bytes(file.file_size_in_bytes())
        .column_sizes(of_table(file.column_sizes()))
        .value_counts(of_table(file.value_counts()))
        .null_value_counts(of_table(file.null_value_counts()))
        .nan_value_counts(of_table(file.nan_value_counts()))
        .lower_bounds(short(file.lower_bounds()))
        .upper_bounds(short(file.upper_bounds()))
        .split_offsets(file.split_offsets().map(<[i64]>::to_vec))
        .build()
        .map_err(|e| e.to_string())
}

fn is_short(bound: &Datum) -> bool {
    match bound.literal() {
        PrimitiveLiteral::String(text) => text.len() <= MAX_BOUND_BYTES,
        PrimitiveLiteral::Binary(bytes) => bytes.len() <= MAX_BOUND_BYTES,
        _ => true,
    }
}

/// A size in bytes from the table's properties; nonsense (zero, negative) is the default.
fn bytes_property(facts: &TableFacts, key: &str, default: i64) -> usize {
    let bytes = facts.property_i64(key, default);
    usize::try_from(if bytes > 0 { bytes } else { default }).unwrap_or(usize::MAX)
}

fn compression(facts: &TableFacts) -> Result<Compression, TableError> {
    const CODEC: &str = "write.parquet.compression-codec";
    const LEVEL: &str = "write.parquet.compression-level";
    let codec = facts.properties.get(CODEC).map_or("zstd", String::as_str).to_ascii_lowercase();
    let level = |default: i64| facts.property_i64(LEVEL, default);
    let unsigned = |default: i64| u32::try_from(level(default)).unwrap_or(u32::MAX);
    let refused = |e: &dyn std::fmt::Display| {
        TableError::Unsupported(format!("table property {LEVEL} cannot be used with {codec}: {e}"))
    };
    match codec.as_str() {
        "zstd" => {
            let level = i32::try_from(level(DEFAULT_ZSTD_LEVEL)).unwrap_or(i32::MAX);
            ZstdLevel::try_new(level).map(Compression::ZSTD).map_err(|e| refused(&e))
        }
        "gzip" => GzipLevel::try_new(unsigned(6)).map(Compression::GZIP).map_err(|e| refused(&e)),
        "brotli" => BrotliLevel::try_new(unsigned(1)).map(Compression::BROTLI).map_err(|e| refused(&e)),
        "snappy" => Ok(Compression::SNAPPY),
        "lz4" => Ok(Compression::LZ4_RAW),
        "uncompressed" => Ok(Compression::UNCOMPRESSED),
        other => Err(TableError::Unsupported(format!(
            "table property {CODEC} is '{other}'; use zstd, gzip, snappy, lz4, brotli or uncompressed"
        ))),
    }
}

/// Paths of data files. The crate's own generator writes partition values as they are, so that a value
/// such as `../..` would leave the table's folder; here names and values are percent-encoded.
#[derive(Clone)]
struct Locations {
    folder: String,
    types: Arc<StructType>,
    /// Every path given out.
    written: Arc<Mutex<Vec<String>>>,
}

impl Locations {
    fn new(facts: &TableFacts, types: StructType) -> Self {
        let folder = data_folder(facts);
        Self { folder, types: Arc::new(types), written: Arc::default() }
    }

    fn path(&self, key: Option<&PartitionKey>, file_name: &str) -> String {
        let mut path = self.folder.clone();
        // A tuple that cannot be shown is refused when the file is described; here it has no folder.
        if let Some(key) = key.filter(|key| !key.spec().is_unpartitioned())
            && let Ok(partition) = partition_of(key.spec(), &self.types, key.data())
        {
            for field in &partition.fields {
                let value = field.value.as_deref().unwrap_or("null");
                path.push_str(&format!("/{}={}", encoded(&field.name), encoded(value)));
            }
        }
        format!("{path}/{file_name}")
    }
}

impl LocationGenerator for Locations {
    fn generate_location(&self, partition_key: Option<&PartitionKey>, file_name: &str) -> String {
        let path = self.path(partition_key, file_name);
        self.written.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        path
    }
}

/// Percent-encodes everything but letters, digits and `-_.`, and cuts at [`MAX_PATH_VALUE_BYTES`].
fn encoded(text: &str) -> String {
    let mut path = String::new();
    for character in text.chars() {
        if path.len() >= MAX_PATH_VALUE_BYTES {
            break;
        }
        if character.is_ascii_alphanumeric() || "-_.".contains(character) {
            path.push(character);
            continue;
        }
        let mut buffer = [0_u8; 4];
        for byte in character.encode_utf8(&mut buffer).bytes() {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    path
}

#[cfg(test)]
#[path = "data_files_tests.rs"]
mod tests;
