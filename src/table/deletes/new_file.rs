//! What a delete file that was just written looks like, and where it is written.

use std::sync::Arc;

use iceberg::metadata_columns::{
    RESERVED_FIELD_ID_DELETE_FILE_PATH as PATH_ID, RESERVED_FIELD_ID_DELETE_FILE_POS as POS_ID,
};
use iceberg::spec::{DataContentType, DataFile, DataFileBuilder, DataFileFormat, Datum};
use mergeberg_kernel::change::FileFact;
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::SpecId;
use roaring::RoaringTreemap;
use uuid::Uuid;

use super::super::course::{Course, Ending};
use super::super::error::TableError;
use super::super::folders::data_folder;
use super::super::loaded::LoadedTable;
use super::super::manifest_codec::file_fact;
use super::super::manifests::LiveFile;

/// Rows of one data file to be deleted, by position.
#[derive(Clone, Debug)]
pub struct RowsToDelete {
    pub data_file: LiveFile,
    /// Not empty, and all of them rows of the file.
    pub positions: RoaringTreemap,
}

impl RowsToDelete {
    pub(super) fn check(&self) -> Result<(), TableError> {
        let file = &self.data_file.file;
        match self.positions.max() {
            Some(last) if last < file.record_count() => Ok(()),
            Some(last) => Err(TableError::Internal(format!(
                "row {last} of {} was to be deleted, which has {} rows",
                file.file_path(),
                file.record_count()
            ))),
            None => Err(TableError::Internal(format!("no row of {} was to be deleted", file.file_path()))),
        }
    }
}

/// A delete file for the rows of one data file, not yet part of any snapshot: what a manifest entry says.
#[derive(Clone, Debug)]
pub struct NewDeleteFile {
    pub fact: FileFact,
    pub file: Arc<DataFile>,
    pub spec_id: SpecId,
}

/// Where in a file the deletes are, and what they are.
pub(super) enum Place {
    /// A whole Parquet file, with the smallest and the largest position.
    Positions { smallest: u64, largest: u64 },
    /// A blob in a Puffin file.
    Vector { offset: u64, length: u64 },
}

impl NewDeleteFile {
    pub(super) fn describe(
        rows: &RowsToDelete,
        path: &str,
        file_bytes: u64,
        place: &Place,
    ) -> Result<Self, TableError> {
        let of = &rows.data_file;
        let long = |value: u64| {
            i64::try_from(value).map_err(|_| TableError::Internal(format!("{value} is out of range")))
        };
        let mut builder = DataFileBuilder::default();
        // A delete file lies in the partition of its data file, under the same spec.
        builder
            .content(DataContentType::PositionDeletes)
            .file_path(path.to_owned())
            .partition(of.file.partition().clone())
            .partition_spec_id(of.spec_id.0)
            .record_count(rows.positions.len())
            .file_size_in_bytes(file_bytes)
            .referenced_data_file(Some(of.file.file_path().to_owned()));
        match place {
            Place::Positions { smallest, largest } => {
                // Equal bounds of file_path tell readers of format v2 which file it is (Java:
                // `ContentFileUtil.referencedDataFile`); they must not be truncated.
                let data_file = Datum::string(of.file.file_path());
                let counts = [(PATH_ID, rows.positions.len()), (POS_ID, rows.positions.len())];
                builder
                    .file_format(DataFileFormat::Parquet)
                    .value_counts(counts.into())
                    .null_value_counts([(PATH_ID, 0), (POS_ID, 0)].into())
                    .lower_bounds(
                        [(PATH_ID, data_file.clone()), (POS_ID, Datum::long(long(*smallest)?))].into(),
                    )
                    .upper_bounds([(PATH_ID, data_file), (POS_ID, Datum::long(long(*largest)?))].into());
            }
            Place::Vector { offset, length } => {
                builder
                    .file_format(DataFileFormat::Puffin)
                    .content_offset(Some(long(*offset)?))
                    .content_size_in_bytes(Some(long(*length)?));
            }
        }
        let file = builder.build().map_err(|e| TableError::Internal(format!("{path}: {e}")))?;
        Ok(Self {
            fact: file_fact(&file, Arc::clone(&of.fact.partition)).map_err(TableError::Internal)?,
            file: Arc::new(file),
            spec_id: of.spec_id,
        })
    }
}

/// A path that no file has, beside the table's data files.
pub(super) fn fresh_path(facts: &TableFacts, extension: &str) -> String {
    format!("{}/{}-deletes.{extension}", data_folder(facts), Uuid::now_v7())
}

/// Tells whoever looks after the write of a file before it is written.
pub(super) async fn tell(course: Option<&Course>, path: &str) -> Result<(), TableError> {
    match course {
        Some(course) => course.begins(path).await.map_err(Ending::of_write),
        None => Ok(()),
    }
}

/// Takes a file away whose writing failed.
pub(super) async fn discard(table: &LoadedTable, path: &str) {
    if let Err(error) = table.file_io.delete(path).await {
        tracing::warn!(%path, %error, "a delete file of a failed write was left behind");
    }
}
