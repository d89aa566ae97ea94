//! Columns of a delete file by field id, wherever they stand in it and whatever they are called.
//!
//! Delete files are small beside the data, so a file is read whole and decoded on a thread of its own:
//! nothing in a damaged file can stop the queue. Only the columns that are asked for are decoded.

use std::cmp::Ordering;

use bytes::Bytes;
use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch, make_array};
use datafusion::arrow::buffer::NullBuffer;
use datafusion::arrow::datatypes::{DataType, Fields};
use datafusion::parquet::arrow::arrow_reader::{
    ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use datafusion::parquet::arrow::{PARQUET_FIELD_ID_META_KEY, ProjectionMask};
use datafusion::parquet::schema::types::SchemaDescriptor;
use iceberg::io::FileIO;
use iceberg::spec::{DataFile, DataFileFormat};

use super::super::error::TableError;
use super::super::formats::{self, Decoded, Fault, MemoryBatches, MemoryFile, NamedField};
use super::super::scan_file::ScanCounters;

/// Largest delete file that is read, in bytes.
pub const MAX_DELETE_FILE_BYTES: u64 = 512 * 1024 * 1024;
/// Rows of one batch.
const BATCH_ROWS: usize = 8192;

/// A column that is asked for. `name` finds it in a file whose columns carry no field ids.
pub(super) struct Wanted<'a> {
    pub id: i32,
    pub name: Option<&'a str>,
}

/// Batches of the wanted columns, in their order.
pub(super) struct Columns {
    batches: Batches,
    /// From the batch to each column: positions in nested structs.
    routes: Vec<Vec<usize>>,
}

enum Batches {
    Parquet(ParquetRecordBatchReader),
    Other(Box<MemoryBatches>),
}

/// The bytes of a delete file.
pub(super) async fn read_whole(
    file_io: &FileIO,
    entry: &DataFile,
    counters: &ScanCounters,
) -> Result<Bytes, TableError> {
    let path = entry.file_path();
    let input = file_io.new_input(path).map_err(|e| TableError::io(path, e))?;
    let size = match input.metadata().await {
        Ok(metadata) => metadata.size,
        Err(error) => return Err(TableError::of_read(file_io, path, error).await),
    };
    if size > MAX_DELETE_FILE_BYTES {
        return Err(TableError::Unsupported(format!(
            "delete file {path} has {size} bytes, at most {MAX_DELETE_FILE_BYTES} are read; compact the \
             partition that it belongs to"
        )));
    }
    match input.read().await {
        Ok(bytes) => {
            counters.count_delete_file(bytes.len() as u64);
            Ok(bytes)
        }
        Err(error) => Err(TableError::of_read(file_io, path, error).await),
    }
}

impl Columns {
    /// A column that the file does not have is an error: without it nobody knows which rows are meant.
    pub fn open(bytes: Bytes, format: DataFileFormat, wanted: &[Wanted<'_>]) -> Decoded<Self> {
        match format {
            DataFileFormat::Parquet => Self::parquet(bytes, wanted).map_err(Fault::Corrupt),
            other => Self::of_format(bytes, other, wanted),
        }
    }

    fn of_format(bytes: Bytes, format: DataFileFormat, wanted: &[Wanted<'_>]) -> Decoded<Self> {
        let file = MemoryFile::open(bytes, format)?;
        let columns = file.columns();
        let mut routes = Vec::with_capacity(wanted.len());
        for column in wanted {
            routes.push(route_in(&columns, column)?);
        }
        let mut roots: Vec<usize> = routes.iter().filter_map(|route| route.first().copied()).collect();
        roots.sort_unstable();
        roots.dedup();
        // Batches have the chosen columns only.
        for first in routes.iter_mut().filter_map(|route| route.first_mut()) {
            *first = roots.partition_point(|root| root < first);
        }
        let batches = Batches::Other(Box::new(file.select(roots, BATCH_ROWS)?));
        Ok(Self { batches, routes })
    }

    fn parquet(bytes: Bytes, wanted: &[Wanted<'_>]) -> Result<Self, String> {
        // The types are those of the Parquet schema: an embedded Arrow schema is a hint of one writer.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(bytes, options)
            .map_err(|e| format!("it is no Parquet file: {e}"))?;
        let mut leaves = Vec::with_capacity(wanted.len());
        for column in wanted {
            leaves.push(leaf_of(builder.parquet_schema(), column)?);
        }
        let mask = ProjectionMask::leaves(builder.parquet_schema(), leaves.iter().copied());
        let names: Vec<Vec<String>> = leaves
            .iter()
            .map(|leaf| builder.parquet_schema().column(*leaf).path().parts().to_vec())
            .collect();
        let reader =
            builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(|e| e.to_string())?;
        let mut routes = Vec::with_capacity(wanted.len());
        for name in &names {
            let route = route_to(&datafusion::arrow::array::RecordBatchReader::schema(&reader).fields, name);
            routes.push(route.ok_or_else(|| format!("its column '{}' cannot be read", name.join(".")))?);
        }
        Ok(Self { batches: Batches::Parquet(reader), routes })
    }
}

impl Iterator for Columns {
    type Item = Decoded<Vec<ArrayRef>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = match &mut self.batches {
            Batches::Parquet(reader) => reader.next()?.map_err(|e| Fault::Corrupt(e.to_string())),
            Batches::Other(batches) => batches.next()?,
        };
        let batch = match next {
            Ok(batch) => batch,
            Err(fault) => return Some(Err(fault)),
        };
        let columns = self.routes.iter().map(|route| column_at(&batch, route));
        let columns = columns.collect::<Option<Vec<_>>>();
        Some(columns.ok_or_else(|| Fault::Corrupt("its columns change their shape".to_owned())))
    }
}

/// A delete file that holds other rows than its manifest entry says deletes something else. More rows than that
/// are not read on.
pub(super) fn as_many_rows(read: u64, expected: u64) -> Result<(), String> {
    match read.cmp(&expected) {
        Ordering::Equal => Ok(()),
        Ordering::Less => Err(format!("{read} rows, but its manifest entry says {expected}")),
        Ordering::Greater => Err(format!("more than the {expected} rows that its manifest entry says")),
    }
}

/// Position of a column among the leaves of the file.
fn leaf_of(schema: &SchemaDescriptor, wanted: &Wanted<'_>) -> Result<usize, String> {
    let id_of = |leaf: usize| {
        let info = schema.column(leaf).self_type().get_basic_info().clone();
        info.has_id().then(|| info.id())
    };
    let leaves = 0..schema.num_columns();
    let mut found: Vec<usize> = leaves.clone().filter(|leaf| id_of(*leaf) == Some(wanted.id)).collect();
    if found.is_empty()
        && let Some(name) = wanted.name
        && leaves.clone().all(|leaf| id_of(leaf).is_none())
    {
        found = leaves.filter(|leaf| schema.column(*leaf).path().parts() == [name]).collect();
    }
    match found.as_slice() {
        [leaf] if schema.column(*leaf).max_rep_level() == 0 => Ok(*leaf),
        [_] => Err(format!("its column with field id {} is inside a list or map", wanted.id)),
        [] => Err(format!("it has no column with field id {}", wanted.id)),
        _ => Err(format!("it has several columns with field id {}", wanted.id)),
    }
}

/// Where an Avro or ORC file has a column.
fn route_in(columns: &[NamedField], wanted: &Wanted<'_>) -> Decoded<Vec<usize>> {
    if let Some(route) = formats::route_to(columns, wanted.id) {
        return Ok(route);
    }
    let by_name = wanted.name.filter(|_| !columns.iter().any(NamedField::has_ids));
    let place = by_name.and_then(|name| columns.iter().position(|column| column.name == name));
    place.map(|place| vec![place]).ok_or_else(|| {
        Fault::Corrupt(format!("it has no column with field id {} outside of lists and maps", wanted.id))
    })
}

/// Positions of the fields named by `path`, from the top down.
fn route_to(fields: &Fields, path: &[String]) -> Option<Vec<usize>> {
    let (first, rest) = path.split_first()?;
    let (at, field) = fields.iter().enumerate().find(|(_, field)| field.name() == first)?;
    let mut route = vec![at];
    match (field.data_type(), rest.is_empty()) {
        (_, true) => {}
        (DataType::Struct(children), false) => route.extend(route_to(children, rest)?),
        _ => return None,
    }
    Some(route)
}

/// Positions of the field with `id`, through structs only.
pub(super) fn route_to_id(fields: &Fields, id: i32) -> Option<Vec<usize>> {
    let id_text = id.to_string();
    for (at, field) in fields.iter().enumerate() {
        if field.metadata().get(PARQUET_FIELD_ID_META_KEY) == Some(&id_text) {
            return Some(vec![at]);
        }
        if let DataType::Struct(children) = field.data_type()
            && let Some(rest) = route_to_id(children, id)
        {
            return Some([vec![at], rest].concat());
        }
    }
    None
}

/// The column at the end of a route. Where a parent is null, so is the column (table spec, "Equality Delete
/// Files").
pub(super) fn column_at(batch: &RecordBatch, route: &[usize]) -> Option<ArrayRef> {
    let (first, rest) = route.split_first()?;
    let mut column = batch.columns().get(*first)?.clone();
    for at in rest {
        let parent = column.as_struct_opt()?;
        let child = parent.columns().get(*at)?;
        let nulls = NullBuffer::union(parent.nulls(), child.nulls());
        let data = child.to_data().into_builder().nulls(nulls).build().ok()?;
        column = make_array(data);
    }
    Some(column)
}
