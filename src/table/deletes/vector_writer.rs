//! Writes deletion vectors: one Puffin file for any number of data files (format v3).

use std::collections::{HashMap, HashSet};

use iceberg::metadata_columns::RESERVED_FIELD_ID_POS;
use iceberg::puffin::{Blob, CREATED_BY_PROPERTY, CompressionCodec, DELETION_VECTOR_V1, PuffinWriter};

use super::super::course::Course;
use super::super::error::TableError;
use super::super::loaded::LoadedTable;
use super::new_file::{NewDeleteFile, Place, RowsToDelete, discard, fresh_path, tell};
use super::vector;

/// "Inherited at commit": the only value that the Puffin specification allows in a deletion vector's footer.
const INHERITED: i64 = -1;
/// Bytes before the first blob: the magic number `PFA1`.
const HEADER_BYTES: u64 = 4;
/// Footer property of a blob (Puffin spec, "deletion-vector-v1").
const REFERENCED_DATA_FILE: &str = "referenced-data-file";
/// Footer property of a blob: number of deleted rows.
const CARDINALITY: &str = "cardinality";

/// Writes deletion vectors.
pub struct VectorWriter;

impl VectorWriter {
    /// One vector a data file, all in one Puffin file, in the order of `rows`. A vector replaces every earlier
    /// one and every position delete of its data file, so whoever calls has folded them in (rule D1). Files
    /// of a failed write are deleted.
    pub async fn write(table: &LoadedTable, rows: &[RowsToDelete]) -> Result<Vec<NewDeleteFile>, TableError> {
        Self::write_to(table, rows, None).await
    }

    /// The same, looked after.
    pub async fn write_along(
        table: &LoadedTable,
        rows: &[RowsToDelete],
        course: &Course,
    ) -> Result<Vec<NewDeleteFile>, TableError> {
        Self::write_to(table, rows, Some(course)).await
    }

    async fn write_to(
        table: &LoadedTable,
        rows: &[RowsToDelete],
        course: Option<&Course>,
    ) -> Result<Vec<NewDeleteFile>, TableError> {
        let mut data_files = HashSet::new();
        for one in rows {
            one.check()?;
            if !data_files.insert(&one.data_file.fact.path) {
                return Err(TableError::Internal(format!(
                    "{} was to have two deletion vectors",
                    one.data_file.fact.path
                )));
            }
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let path = fresh_path(&table.facts, "puffin");
        tell(course, &path).await?;
        let written = write_file(table, &path, rows).await;
        if written.is_err() {
            discard(table, &path).await;
        }
        written
    }
}

async fn write_file(
    table: &LoadedTable,
    path: &str,
    rows: &[RowsToDelete],
) -> Result<Vec<NewDeleteFile>, TableError> {
    let failed = |e| TableError::of_write(path, e);
    let output = table.file_io.new_output(path).map_err(failed)?;
    let created_by = format!("mergeberg {}", env!("CARGO_PKG_VERSION"));
    let properties = HashMap::from([(CREATED_BY_PROPERTY.to_owned(), created_by)]);
    let mut writer = PuffinWriter::new(&output, properties, false).await.map_err(failed)?;
    // The writer keeps its offsets to itself; blobs that are not compressed follow each other.
    let mut offset = HEADER_BYTES;
    let mut places = Vec::with_capacity(rows.len());
    for one in rows {
        let data = vector::encode(&one.positions).map_err(TableError::Internal)?;
        let length = data.len() as u64;
        let blob = Blob::builder()
            .r#type(DELETION_VECTOR_V1.to_owned())
            .fields(vec![RESERVED_FIELD_ID_POS])
            .snapshot_id(INHERITED)
            .sequence_number(INHERITED)
            .data(data)
            .properties(HashMap::from([
                (REFERENCED_DATA_FILE.to_owned(), one.data_file.fact.path.to_string()),
                (CARDINALITY.to_owned(), one.positions.len().to_string()),
            ]))
            .build();
        writer.add(blob, CompressionCodec::None).await.map_err(failed)?;
        places.push(Place::Vector { offset, length });
        offset += length;
    }
    writer.close().await.map_err(failed)?;
    let bytes = output.to_input_file().metadata().await.map_err(failed)?.size;
    rows.iter().zip(&places).map(|(one, place)| NewDeleteFile::describe(one, path, bytes, place)).collect()
}
