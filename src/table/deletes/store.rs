//! Reads the delete files that a scan needs, and says which rows of a data file they delete.

use std::iter::Peekable;
use std::sync::Arc;

use datafusion::arrow::array::{BooleanArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::Fields;
use datafusion::arrow::error::ArrowError;
use futures::{StreamExt, TryStreamExt};
use iceberg::io::FileIO;
use mergeberg_kernel::change::{DeleteKey, FileContent};
use roaring::RoaringTreemap;

use super::super::error::TableError;
use super::super::manifests::{LiveFile, on_blocking_thread};
use super::super::scan_file::{ScanCounters, ScanFile};
use super::cache::DecodedFiles;
use super::equality::{KeyColumn, KeySet, MAX_KEYS_BYTES};
use super::file_columns::{column_at, read_whole, route_to_id};
use super::index::{EqualityGroup, FileDeletes};
use super::positions::Positions;
use super::{positions, vector};

/// Decoded positions that a scan keeps, in bytes.
const POSITIONS_CACHE_BYTES: usize = 256 * 1024 * 1024;
/// Keys of equality deletes that a scan keeps, in bytes.
const KEYS_CACHE_BYTES: usize = 256 * 1024 * 1024;
/// Equality-delete files of one group that are fetched at the same time.
const PARALLEL_READS: usize = 8;

/// The delete files of one scan.
#[derive(Debug)]
pub struct DeleteStore {
    file_io: FileIO,
    positions: DecodedFiles<DeleteKey, Positions>,
    /// By the name of the group: all keys of a scan are compared in the types of one schema.
    keys: DecodedFiles<Arc<str>, KeySet>,
}

impl DeleteStore {
    pub fn new(file_io: FileIO) -> Self {
        Self {
            file_io,
            positions: DecodedFiles::new(POSITIONS_CACHE_BYTES),
            keys: DecodedFiles::new(KEYS_CACHE_BYTES),
        }
    }

    /// Reads what decides about the rows of `file`. `fields` are the columns of the batches that the filter
    /// will see; the compared columns are among them.
    pub(in super::super) async fn filter(
        &self,
        file: &ScanFile,
        fields: &Fields,
        counters: &ScanCounters,
    ) -> Result<RowFilter, TableError> {
        let within = match &file.rows.within {
            None => None,
            Some(within) => Some(self.test(file, within, fields, counters).await?),
        };
        let without = self.test(file, &file.rows.without, fields, counters).await?;
        Ok(RowFilter { without, within, next_row: 0 })
    }

    /// Number of rows of `file` that are meant, when positions alone decide: nothing of the file is read.
    pub(in super::super) async fn count_by_positions(
        &self,
        file: &ScanFile,
        counters: &ScanCounters,
    ) -> Result<Option<u64>, TableError> {
        let by_keys = |deletes: &FileDeletes| !deletes.equality.is_empty();
        let rows = &file.rows;
        if by_keys(&rows.without) || rows.within.as_ref().is_some_and(by_keys) {
            return Ok(None);
        }
        let records = file.file.file.record_count();
        let without = self.positions_of(&file.file, &rows.without, counters).await?;
        Ok(Some(match &rows.within {
            None => records - without.range_cardinality(0..records),
            Some(within) => {
                let within = self.positions_of(&file.file, within, counters).await?;
                (within - without).range_cardinality(0..records)
            }
        }))
    }

    async fn test(
        &self,
        file: &ScanFile,
        deletes: &FileDeletes,
        fields: &Fields,
        counters: &ScanCounters,
    ) -> Result<RowTest, TableError> {
        let mut keys = Vec::with_capacity(deletes.equality.len());
        for group in &deletes.equality {
            let mut routes = Vec::with_capacity(group.ids.len());
            let mut columns = Vec::with_capacity(group.ids.len());
            for id in &group.ids {
                let route = route_to_id(fields, *id)
                    .ok_or_else(|| TableError::Internal(format!("compared column {id} is not read")))?;
                let data_type = type_at(fields, &route)
                    .ok_or_else(|| TableError::Internal(format!("compared column {id} has no type")))?;
                columns.push(KeyColumn { id: *id, data_type });
                routes.push(route);
            }
            let set = self.keys_of(group, columns, counters).await?;
            keys.push(KeyTest { routes, set });
        }
        let positions = self.positions_of(&file.file, deletes, counters).await?.into_iter().peekable();
        Ok(RowTest { positions, keys, data_sequence: file.file.sequence_number })
    }

    /// All positions of the data file that these delete, without those that values delete: what a new deletion
    /// vector of the file has to hold as well (rule D1).
    pub async fn positions_of(
        &self,
        data_file: &LiveFile,
        deletes: &FileDeletes,
        counters: &ScanCounters,
    ) -> Result<RoaringTreemap, TableError> {
        let mut all = RoaringTreemap::new();
        for delete in &deletes.positions {
            let decode = async {
                let decoded = self.decode(delete, counters).await?;
                let bytes = decoded.bytes();
                Ok((decoded, bytes))
            };
            let decoded = self.positions.get(&delete.fact.key(), decode).await?;
            if let Some(positions) = decoded.of(&data_file.fact.path) {
                all |= positions;
            }
        }
        Ok(all)
    }

    async fn decode(&self, delete: &LiveFile, counters: &ScanCounters) -> Result<Positions, TableError> {
        let entry = delete.file.as_ref();
        match &delete.fact.content {
            FileContent::DeletionVector { of, offset: _ } => {
                let vector = vector::read(&self.file_io, entry, counters).await?;
                Ok(Positions::of_one(of, vector))
            }
            FileContent::PositionDeletes { of: _ } => positions::read(&self.file_io, entry, counters).await,
            FileContent::EqualityDeletes { .. } | FileContent::Data => Err(TableError::Internal(format!(
                "{} was asked for positions, which it does not have",
                entry.file_path()
            ))),
        }
    }

    async fn keys_of(
        &self,
        group: &EqualityGroup,
        columns: Vec<KeyColumn>,
        counters: &ScanCounters,
    ) -> Result<Arc<KeySet>, TableError> {
        let decode = async {
            let mut set = KeySet::new(columns, MAX_KEYS_BYTES)?;
            let mut files = futures::stream::iter(group.files.clone())
                .map(|file: Arc<LiveFile>| async move {
                    let bytes = read_whole(&self.file_io, &file.file, counters).await?;
                    Ok::<_, TableError>((file, bytes))
                })
                .buffered(PARALLEL_READS);
            while let Some((file, bytes)) = files.try_next().await? {
                let (path, sequence) = (Arc::clone(&file.fact.path), file.sequence_number);
                let (rows, format) = (file.file.record_count(), file.file.file_format());
                set = on_blocking_thread(&file.fact.path, move || {
                    set.add_file(&path, bytes, format, rows, sequence).map(|()| set)
                })
                .await??;
            }
            let bytes = set.bytes();
            Ok((set, bytes))
        };
        self.keys.get(&group.name, decode).await
    }
}

fn type_at(fields: &Fields, route: &[usize]) -> Option<datafusion::arrow::datatypes::DataType> {
    let (first, rest) = route.split_first()?;
    let data_type = fields.get(*first)?.data_type();
    match (data_type, rest.is_empty()) {
        (_, true) => Some(data_type.clone()),
        (datafusion::arrow::datatypes::DataType::Struct(children), false) => type_at(children, rest),
        _ => None,
    }
}

struct KeyTest {
    /// Where the compared columns are in a batch.
    routes: Vec<Vec<usize>>,
    set: Arc<KeySet>,
}

/// Tells the rows of one data file that are deleted, batch after batch.
struct RowTest {
    positions: Peekable<roaring::treemap::IntoIter>,
    keys: Vec<KeyTest>,
    data_sequence: i64,
}

impl RowTest {
    fn mark(&mut self, first_row: u64, batch: &RecordBatch) -> Result<Vec<bool>, ArrowError> {
        let mut deleted = vec![false; batch.num_rows()];
        let end = first_row + batch.num_rows() as u64;
        while let Some(position) = self.positions.next_if(|position| *position < end) {
            let at = position.checked_sub(first_row).and_then(|at| usize::try_from(at).ok());
            if let Some(row) = at.and_then(|at| deleted.get_mut(at)) {
                *row = true;
            }
        }
        for test in &self.keys {
            let columns: Option<Vec<_>> = test.routes.iter().map(|route| column_at(batch, route)).collect();
            let columns = columns
                .ok_or_else(|| ArrowError::SchemaError("a compared column is not in the rows".to_owned()))?;
            test.set.mark(&columns, self.data_sequence, &mut deleted)?;
        }
        Ok(deleted)
    }
}

/// The rows of one data file that are meant. The file is read whole and in order, so that the number of a row
/// is the number of rows before it.
pub(in super::super) struct RowFilter {
    without: RowTest,
    within: Option<RowTest>,
    next_row: u64,
}

impl RowFilter {
    /// Can be told before a row is read: nothing is deleted that was to be found.
    pub fn selects_nothing(&mut self) -> bool {
        self.within.as_mut().is_some_and(|test| test.keys.is_empty() && test.positions.peek().is_none())
    }

    pub fn apply(&mut self, batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
        let first_row = self.next_row;
        self.next_row += batch.num_rows() as u64;
        let deleted = self.without.mark(first_row, batch)?;
        let wanted: Vec<bool> = match &mut self.within {
            None => deleted.into_iter().map(|deleted| !deleted).collect(),
            Some(within) => {
                let found = within.mark(first_row, batch)?;
                found.into_iter().zip(deleted).map(|(found, deleted)| found && !deleted).collect()
            }
        };
        filter_record_batch(batch, &BooleanArray::from(wanted))
    }
}
