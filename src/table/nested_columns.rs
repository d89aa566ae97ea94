//! Structs, lists and maps of a data file, whatever became of their fields since it was written.
//!
//! The crate's reader puts a file's columns in their places by field id, but takes what is inside them as the
//! file has it. So these columns are read here, whole, and put right by [`super::column_adapter`]; all others
//! the crate reads, but for the columns of [`super::row_lineage`], which it does not know.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, Field, FieldRef, Fields, Schema, TimeUnit};
use datafusion::parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use datafusion::parquet::arrow::async_reader::ParquetRecordBatchStream;
use datafusion::parquet::arrow::{
    PARQUET_FIELD_ID_META_KEY, ParquetRecordBatchStreamBuilder, ProjectionMask,
};
use datafusion::parquet::basic::Type as PhysicalType;
use futures::StreamExt;
use iceberg::arrow::ArrowFileReader;
use iceberg::io::{FileIO, FileMetadata, FileRead};
use iceberg::spec::{MappedField, NameMapping};

use super::column_adapter::{ColumnAdapter, WantedColumn};
use super::error::TableError;
use super::nested_adapt::FileField;
use super::row_lineage::is_lineage;

/// Has it fields of its own, or is it none of the crate's?
pub(super) fn is_read_here(field: &Field) -> bool {
    matches!(field.data_type(), DataType::Struct(_) | DataType::List(_) | DataType::Map(..))
        || is_lineage(field)
}

/// The nested columns of one file, batch by batch, in file order.
pub(super) struct NestedReader {
    stream: ParquetRecordBatchStream<ArrowFileReader>,
    adapter: ColumnAdapter,
}

impl NestedReader {
    /// `size` is that of the file, in bytes; what is fetched is added to `fetched`.
    pub async fn open(
        file_io: &FileIO,
        path: &str,
        size: u64,
        columns: Vec<WantedColumn>,
        mapping: Option<&NameMapping>,
        batch_rows: usize,
        fetched: Arc<AtomicU64>,
    ) -> Result<Self, TableError> {
        let input = file_io.new_input(path).map_err(|e| TableError::io(path, e))?;
        let reader = match input.reader().await {
            Ok(reader) => reader,
            Err(error) => return Err(TableError::of_read(file_io, path, error).await),
        };
        let mut reader = ArrowFileReader::new(FileMetadata { size }, Box::new(Counted { reader, fetched }));
        // The types are those of the Parquet schema: an embedded Arrow schema is a hint of one writer.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let loaded = match ArrowReaderMetadata::load_async(&mut reader, options).await {
            Ok(metadata) => metadata,
            Err(error) => return Err(unread(file_io, path, error).await),
        };
        let metadata = micros_for_96_bits(loaded).map_err(|e| TableError::corrupt(path, e))?;
        let file_columns = file_fields(metadata.schema().fields(), mapping).ok_or_else(|| {
            TableError::Unsupported(format!(
                "{path} has no field ids; set the table property schema.name-mapping.default"
            ))
        })?;
        let (adapter, roots) = ColumnAdapter::new(columns, &file_columns);
        let builder = ParquetRecordBatchStreamBuilder::new_with_metadata(reader, metadata);
        let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
        let stream = builder
            .with_projection(mask)
            .with_batch_size(batch_rows)
            .build()
            .map_err(|e| TableError::corrupt(path, e))?;
        Ok(Self { stream, adapter })
    }

    /// The wanted columns of the next rows.
    pub async fn next(&mut self, file_io: &FileIO, path: &str) -> Result<Option<RecordBatch>, TableError> {
        match self.stream.next().await {
            None => Ok(None),
            Some(Ok(batch)) => self.adapter.adapted(&batch).map(Some).map_err(|message| {
                TableError::corrupt(path, format!("its columns do not fit the table's schema: {message}"))
            }),
            Some(Err(error)) => Err(unread(file_io, path, error).await),
        }
    }
}

async fn unread(
    file_io: &FileIO,
    path: &str,
    error: datafusion::parquet::errors::ParquetError,
) -> TableError {
    let error = iceberg::Error::new(iceberg::ErrorKind::Unexpected, error.to_string());
    TableError::of_read(file_io, path, error).await
}

/// A file whose fetched bytes are counted.
struct Counted {
    reader: Box<dyn FileRead>,
    fetched: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl FileRead for Counted {
    async fn read(&self, range: Range<u64>) -> iceberg::Result<Bytes> {
        let bytes = self.reader.read(range).await?;
        self.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

/// The columns of a file with their ids: its own, or those that the name mapping gives to a file without any
/// (table spec, "Column Projection", rule 2; Java: `ParquetSchemaUtil.hasIds`, `applyNameMapping`). `None`:
/// it has none, and there is no mapping.
fn file_fields(fields: &Fields, mapping: Option<&NameMapping>) -> Option<Vec<FileField>> {
    if fields.iter().any(|field| has_ids(field)) {
        return Some(fields.iter().map(|field| own_ids(field)).collect());
    }
    let mapped = mapping?.fields();
    Some(
        fields
            .iter()
            .map(|field| {
                let found = mapped.iter().find(|m| m.names().contains(field.name()));
                mapped_ids(field, found)
            })
            .collect(),
    )
}

/// What is directly inside: of a map its key and value, not the entries around them.
fn inside(field: &Field) -> Vec<&FieldRef> {
    match field.data_type() {
        DataType::Struct(fields) => fields.iter().collect(),
        DataType::List(element) => vec![element],
        DataType::Map(entries, _) => inside(entries),
        _ => Vec::new(),
    }
}

fn own_id(field: &Field) -> Option<i32> {
    field.metadata().get(PARQUET_FIELD_ID_META_KEY)?.parse().ok()
}

fn has_ids(field: &Field) -> bool {
    own_id(field).is_some() || inside(field).into_iter().any(|field| has_ids(field))
}

fn own_ids(field: &Field) -> FileField {
    let children = inside(field).into_iter().map(|field| own_ids(field)).collect();
    FileField { id: own_id(field), children }
}

/// A list's element is called `element` in a mapping, a map's fields `key` and `value`, whatever they are
/// called in the file.
fn mapped_ids(field: &Field, mapped: Option<&MappedField>) -> FileField {
    let inner = mapped.map(MappedField::fields).unwrap_or_default();
    let names: Vec<&str> = match field.data_type() {
        DataType::List(_) => vec!["element"],
        DataType::Map(..) => vec!["key", "value"],
        _ => inside(field).into_iter().map(|field| field.name().as_str()).collect(),
    };
    let children = inside(field)
        .into_iter()
        .zip(names)
        .map(|(field, name)| {
            let found = inner.iter().find(|m| m.names().iter().any(|known| known == name));
            mapped_ids(field, found.map(AsRef::as_ref))
        })
        .collect();
    FileField { id: mapped.and_then(MappedField::field_id), children }
}

/// Timestamps of 96 bits would be read as nanoseconds of 64 bits, which end in 2262. A file that has them has
/// no nanoseconds of another kind: its writer is older than these.
fn micros_for_96_bits(metadata: ArrowReaderMetadata) -> Result<ArrowReaderMetadata, String> {
    let columns = metadata.parquet_schema().columns();
    if columns.iter().all(|column| column.physical_type() != PhysicalType::INT96) {
        return Ok(metadata);
    }
    let schema = Schema::new_with_metadata(
        metadata.schema().fields().iter().map(in_micros).collect::<Fields>(),
        metadata.schema().metadata().clone(),
    );
    let options = ArrowReaderOptions::new().with_schema(Arc::new(schema));
    ArrowReaderMetadata::try_new(Arc::clone(metadata.metadata()), options).map_err(|e| e.to_string())
}

fn in_micros(field: &FieldRef) -> FieldRef {
    let to = match field.data_type() {
        DataType::Timestamp(TimeUnit::Nanosecond, zone) => {
            DataType::Timestamp(TimeUnit::Microsecond, zone.clone())
        }
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(in_micros).collect()),
        DataType::List(element) => DataType::List(in_micros(element)),
        DataType::Map(entries, sorted) => DataType::Map(in_micros(entries), *sorted),
        _ => return Arc::clone(field),
    };
    Arc::new(field.as_ref().clone().with_data_type(to))
}

#[cfg(test)]
#[path = "nested_columns_tests.rs"]
mod tests;
