//! Row-level deletes: position-delete files of format v2, deletion vectors of format v3, equality deletes.
//!
//! [`DeleteIndex`] says what reaches a data file, [`live_rows`] and [`row_difference`] turn the live files of
//! snapshots into rows to read, [`DeleteStore`] reads the delete files when a data file is read, and
//! [`PositionDeleteWriter`] and [`VectorWriter`] write new ones.
//!
//! Delete files of all three formats are read; written are Parquet and Puffin. Absent on purpose: writing equality
//! deletes.

mod cache;
mod equality;
mod file_columns;
mod index;
mod key_schema;
mod new_file;
mod position_writer;
mod positions;
mod selection;
mod store;
mod vector;
mod vector_writer;

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod history_tests;
#[cfg(test)]
mod reading_tests;
#[cfg(test)]
mod selection_tests;
#[cfg(test)]
pub mod test_files;
#[cfg(test)]
mod writer_tests;

pub use equality::MAX_KEYS_BYTES;
pub use index::{DeleteIndex, EqualityGroup, FileDeletes};
pub use new_file::{NewDeleteFile, RowsToDelete};
pub use position_writer::PositionDeleteWriter;
pub use positions::{MAX_POSITIONS_BYTES, Positions};
pub use selection::{RowDifference, Selection, live_rows, row_difference};
pub use store::DeleteStore;
pub use vector::MAX_VECTOR_BYTES;
pub use vector_writer::VectorWriter;

pub(super) use key_schema::KeySchema;
pub(super) use store::RowFilter;

use roaring::RoaringTreemap;

use super::error::TableError;
use super::loaded::LoadedTable;
use super::manifests::LiveFile;
use super::scan_file::ScanCounters;

/// The positions that one position-delete file holds, by data file: which files it references (rule C6), and
/// what a new deletion vector has to fold in (rule D1).
pub async fn read_positions(
    table: &LoadedTable,
    file: &LiveFile,
    counters: &ScanCounters,
) -> Result<Positions, TableError> {
    positions::read(&table.file_io, &file.file, counters).await
}

/// The positions that a deletion vector holds.
pub async fn read_vector(
    table: &LoadedTable,
    file: &LiveFile,
    counters: &ScanCounters,
) -> Result<RoaringTreemap, TableError> {
    vector::read(&table.file_io, &file.file, counters).await
}
