//! Position-delete files of format v2 (table spec, "Position Delete Files").
//!
//! Each row names a data file and a row of it. One file may speak of many data files; a column `row` with the
//! deleted rows themselves may follow, which nothing here needs.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use datafusion::arrow::array::{Array, ArrayRef, AsArray};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Int64Type};
use iceberg::io::FileIO;
use iceberg::metadata_columns::{
    RESERVED_COL_NAME_DELETE_FILE_PATH, RESERVED_COL_NAME_DELETE_FILE_POS,
    RESERVED_FIELD_ID_DELETE_FILE_PATH, RESERVED_FIELD_ID_DELETE_FILE_POS,
};
use iceberg::spec::{DataFile, DataFileFormat};
use roaring::RoaringTreemap;

use super::super::error::TableError;
use super::super::manifests::on_blocking_thread;
use super::super::scan_file::ScanCounters;
use super::file_columns::{Columns, Wanted, as_many_rows, read_whole};

/// Largest decoded position-delete file, in bytes.
pub const MAX_POSITIONS_BYTES: usize = 256 * 1024 * 1024;
/// Rows after which the memory of what was decoded is looked at again.
const ROWS_BETWEEN_LOOKS: u64 = 1 << 20;
/// Memory of a data file's entry beside its path and positions, in bytes.
const PATH_BYTES: usize = 100;

/// Deleted positions by data file.
#[derive(Debug, Default)]
pub struct Positions {
    by_path: HashMap<Arc<str>, RoaringTreemap>,
}

impl Positions {
    /// A deletion vector: positions of one data file.
    pub(super) fn of_one(data_file: &Arc<str>, positions: RoaringTreemap) -> Self {
        Self { by_path: HashMap::from([(Arc::clone(data_file), positions)]) }
    }

    /// `None`: the file deletes nothing of that data file.
    pub fn of(&self, data_file: &str) -> Option<&RoaringTreemap> {
        self.by_path.get(data_file)
    }

    /// The data files that it deletes rows of (rule C6).
    pub fn data_files(&self) -> impl Iterator<Item = &Arc<str>> {
        self.by_path.keys()
    }

    /// Estimated memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.by_path.iter().map(|(path, set)| path.len() + PATH_BYTES + set.serialized_size()).sum()
    }
}

/// Reads the file that a manifest entry describes; as many rows as the entry says, or an error.
pub async fn read(
    file_io: &FileIO,
    entry: &DataFile,
    counters: &ScanCounters,
) -> Result<Positions, TableError> {
    let path = entry.file_path();
    let bytes = read_whole(file_io, entry, counters).await?;
    let (rows, format, owned) = (entry.record_count(), entry.file_format(), path.to_owned());
    on_blocking_thread(path, move || decode(&owned, bytes, format, rows)).await?
}

fn decode(
    path: &str,
    bytes: Bytes,
    format: DataFileFormat,
    expected_rows: u64,
) -> Result<Positions, TableError> {
    let corrupt = |message: String| TableError::corrupt(path, message);
    let wanted = [
        Wanted { id: RESERVED_FIELD_ID_DELETE_FILE_PATH, name: Some(RESERVED_COL_NAME_DELETE_FILE_PATH) },
        Wanted { id: RESERVED_FIELD_ID_DELETE_FILE_POS, name: Some(RESERVED_COL_NAME_DELETE_FILE_POS) },
    ];
    let mut found = Positions::default();
    let (mut rows, mut next_look) = (0, ROWS_BETWEEN_LOOKS);
    for columns in Columns::open(bytes, format, &wanted).map_err(|fault| fault.of(path))? {
        let columns = columns.map_err(|fault| fault.of(path))?;
        let [paths, positions] = columns.as_slice() else {
            return Err(corrupt("it has no columns of positions".to_owned()));
        };
        rows += positions.len() as u64;
        if rows > expected_rows {
            break;
        }
        add(&mut found, paths, positions).map_err(corrupt)?;
        if rows >= next_look {
            next_look = rows + ROWS_BETWEEN_LOOKS;
            bounded(path, &found)?;
        }
    }
    as_many_rows(rows, expected_rows).map_err(corrupt)?;
    bounded(path, &found)?;
    Ok(found)
}

fn bounded(path: &str, found: &Positions) -> Result<(), TableError> {
    if found.bytes() <= MAX_POSITIONS_BYTES {
        return Ok(());
    }
    Err(TableError::Unsupported(format!(
        "the positions of delete file {path} take more than {MAX_POSITIONS_BYTES} bytes; compact the \
         partition that it belongs to"
    )))
}

fn add(found: &mut Positions, paths: &ArrayRef, positions: &ArrayRef) -> Result<(), String> {
    let paths = cast(paths, &DataType::Utf8).map_err(|e| format!("file_path is no text: {e}"))?;
    let paths = paths.as_string_opt::<i32>().ok_or("file_path is no text")?;
    if !matches!(positions.data_type(), DataType::Int64 | DataType::Int32) {
        return Err(format!("pos is {}, not a long", positions.data_type()));
    }
    let positions = cast(positions, &DataType::Int64).map_err(|e| e.to_string())?;
    let positions = positions.as_primitive_opt::<Int64Type>().ok_or("pos is no long")?;
    if paths.null_count() > 0 || positions.null_count() > 0 {
        return Err("a row does not say what it deletes".to_owned());
    }
    let mut from = 0;
    while from < paths.len() {
        // Files are sorted by path, so rows of one data file follow each other.
        let path = paths.value(from);
        let mut to = from + 1;
        while to < paths.len() && paths.value(to) == path {
            to += 1;
        }
        let set = match found.by_path.get_mut(path) {
            Some(set) => set,
            None => found.by_path.entry(Arc::from(path)).or_default(),
        };
        for at in from..to {
            let position = u64::try_from(positions.value(at))
                .map_err(|_| format!("{} is no row of {path}", positions.value(at)))?;
            set.insert(position);
        }
        from = to;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::test_files::{parquet, positions_columns};
    use super::*;

    /// The decoder of the file format may fail in any way on nonsense: it is told, and nothing stops.
    #[tokio::test]
    async fn a_damaged_byte_is_an_error_or_other_positions_and_never_the_end() {
        let rows: Vec<(&str, i64)> = (0..40).map(|at| (if at < 20 { "a" } else { "b" }, at)).collect();
        let whole = parquet(positions_columns(&rows));
        let decoded = decode("d.parquet", whole.clone().into(), DataFileFormat::Parquet, 40).unwrap();
        assert_eq!((decoded.of("a").unwrap().len(), decoded.of("b").unwrap().len()), (20, 20));
        let mut told = 0;
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0xff;
            let result = on_blocking_thread("d.parquet", move || {
                decode("d.parquet", damaged.into(), DataFileFormat::Parquet, 40)
            })
            .await;
            match result.and_then(|decoded| decoded) {
                Ok(_) => {}
                Err(error) => {
                    assert!(error.to_string().contains("d.parquet"), "{error}");
                    told += 1;
                }
            }
        }
        assert!(told > whole.len() / 3, "{told} of {}", whole.len());
        for length in 0..whole.len() {
            assert!(
                decode("d.parquet", whole[..length].to_vec().into(), DataFileFormat::Parquet, 40).is_err(),
                "cut at {length}"
            );
        }
    }
}
