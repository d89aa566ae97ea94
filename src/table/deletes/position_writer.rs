//! Writes position-delete files of format v2: one Parquet file a data file, so that readers need open only
//! what concerns them (Java: `write.delete.granularity=file`).

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::parquet::arrow::{ArrowWriter, PARQUET_FIELD_ID_META_KEY};
use datafusion::parquet::basic::{Compression, Encoding, ZstdLevel};
use datafusion::parquet::errors::ParquetError;
use datafusion::parquet::file::properties::WriterProperties;
use datafusion::parquet::schema::types::ColumnPath;
use iceberg::metadata_columns::{
    RESERVED_COL_NAME_DELETE_FILE_PATH as PATH, RESERVED_COL_NAME_DELETE_FILE_POS as POS,
    RESERVED_FIELD_ID_DELETE_FILE_PATH as PATH_ID, RESERVED_FIELD_ID_DELETE_FILE_POS as POS_ID,
};
use roaring::RoaringTreemap;

use super::super::course::Course;
use super::super::error::TableError;
use super::super::loaded::LoadedTable;
use super::super::manifests::on_blocking_thread;
use super::new_file::{NewDeleteFile, Place, RowsToDelete, discard, fresh_path, tell};

/// Rows encoded at a time.
const BATCH_ROWS: usize = 64 * 1024;

/// Writes position-delete files.
pub struct PositionDeleteWriter;

impl PositionDeleteWriter {
    /// Deletes rows of one data file. A file of a failed write is deleted.
    pub async fn write(table: &LoadedTable, rows: &RowsToDelete) -> Result<NewDeleteFile, TableError> {
        Self::write_to(table, rows, None).await
    }

    /// The same, looked after.
    pub async fn write_along(
        table: &LoadedTable,
        rows: &RowsToDelete,
        course: &Course,
    ) -> Result<NewDeleteFile, TableError> {
        Self::write_to(table, rows, Some(course)).await
    }

    async fn write_to(
        table: &LoadedTable,
        rows: &RowsToDelete,
        course: Option<&Course>,
    ) -> Result<NewDeleteFile, TableError> {
        rows.check()?;
        let path = fresh_path(&table.facts, "parquet");
        tell(course, &path).await?;
        let (data_file, positions) = (Arc::clone(&rows.data_file.fact.path), rows.positions.clone());
        let bytes = on_blocking_thread(&path, move || encode(&data_file, &positions))
            .await?
            .map_err(|e| TableError::Internal(format!("positions could not be written: {e}")))?;
        let size = bytes.len() as u64;
        let failed = |e| TableError::of_write(&path, e);
        let output = table.file_io.new_output(&path).map_err(failed)?;
        if let Err(error) = output.write(bytes.into()).await {
            discard(table, &path).await;
            return Err(failed(error));
        }
        let place = Place::Positions {
            smallest: rows.positions.min().unwrap_or_default(),
            largest: rows.positions.max().unwrap_or_default(),
        };
        NewDeleteFile::describe(rows, &path, size, &place)
    }
}

fn schema() -> SchemaRef {
    let field = |name: &str, kind, id: i32| {
        let metadata = HashMap::from([(PARQUET_FIELD_ID_META_KEY.to_owned(), id.to_string())]);
        Field::new(name, kind, false).with_metadata(metadata)
    };
    Arc::new(Schema::new(vec![field(PATH, DataType::Utf8, PATH_ID), field(POS, DataType::Int64, POS_ID)]))
}

fn encode(data_file: &str, positions: &RoaringTreemap) -> Result<Vec<u8>, ParquetError> {
    let schema = schema();
    // Positions ascend, so differences of them are small; the path is one entry of a dictionary.
    let properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::try_new(3)?))
        .set_column_dictionary_enabled(ColumnPath::from(POS), false)
        .set_column_encoding(ColumnPath::from(POS), Encoding::DELTA_BINARY_PACKED)
        .set_statistics_truncate_length(None)
        .set_column_index_truncate_length(None)
        .build();
    let mut writer = ArrowWriter::try_new(Vec::new(), schema.clone(), Some(properties))?;
    let mut rest = positions.iter();
    loop {
        let some: Vec<i64> = rest.by_ref().take(BATCH_ROWS).filter_map(|p| i64::try_from(p).ok()).collect();
        if some.is_empty() {
            break;
        }
        let paths: ArrayRef = Arc::new(StringArray::from_iter_values(some.iter().map(|_| data_file)));
        let batch = RecordBatch::try_new(schema.clone(), vec![paths, Arc::new(Int64Array::from(some))])?;
        writer.write(&batch)?;
    }
    writer.into_inner()
}
