//! What rows of format v3 carry about themselves: `_row_id` and `_last_updated_sequence_number` (table spec, "Row
//! Lineage").
//!
//! A row that is written again without being changed keeps both, as columns of its new file. A file that lacks the
//! columns, or has nulls in them, says the same by its manifest entry: the first row's id, counted up row by row,
//! and the data sequence number (Java: `PartitionUtil.constantsMap`). Rows of a file without a first row id have
//! none.

use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{Field, FieldRef, Int64Type};
use datafusion::arrow::error::ArrowError;
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use iceberg::metadata_columns::{
    RESERVED_COL_NAME_LAST_UPDATED_SEQUENCE_NUMBER, RESERVED_COL_NAME_ROW_ID,
    RESERVED_FIELD_ID_LAST_UPDATED_SEQUENCE_NUMBER, RESERVED_FIELD_ID_ROW_ID,
};
use iceberg::spec::{NestedField, NestedFieldRef, PrimitiveType, Schema, Type};

use super::error::TableError;
use super::manifests::LiveFile;

/// `schema` with both columns behind its own, optional.
pub(super) fn extended(schema: &Schema) -> Result<Schema, TableError> {
    let own = schema.as_struct().fields();
    if let Some(taken) = own.iter().find(|field| columns().iter().any(|column| column.name == field.name)) {
        return Err(TableError::Unsupported(format!(
            "the table has a column '{}', a name that format version 3 keeps for itself; rename it",
            taken.name
        )));
    }
    Schema::builder()
        .with_schema_id(schema.schema_id())
        .with_fields(own.iter().cloned().chain(columns()))
        .with_identifier_field_ids(schema.identifier_field_ids())
        .build()
        .map_err(|e| TableError::Unsupported(super::error::plain(&e)))
}

fn columns() -> [NestedFieldRef; 2] {
    let long = |id, name| Arc::new(NestedField::optional(id, name, Type::Primitive(PrimitiveType::Long)));
    [
        long(RESERVED_FIELD_ID_ROW_ID, RESERVED_COL_NAME_ROW_ID),
        long(RESERVED_FIELD_ID_LAST_UPDATED_SEQUENCE_NUMBER, RESERVED_COL_NAME_LAST_UPDATED_SEQUENCE_NUMBER),
    ]
}

/// Is it one of the two, in an Arrow schema of the table?
pub(super) fn is_lineage(field: &Field) -> bool {
    is_lineage_id(id_of(field))
}

pub(super) fn is_lineage_id(field_id: i32) -> bool {
    [RESERVED_FIELD_ID_ROW_ID, RESERVED_FIELD_ID_LAST_UPDATED_SEQUENCE_NUMBER].contains(&field_id)
}

/// 0 without an id.
fn id_of(field: &Field) -> i32 {
    field.metadata().get(PARQUET_FIELD_ID_META_KEY).and_then(|id| id.parse().ok()).unwrap_or_default()
}

/// What a file's manifest entry says of rows that do not say it themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inherited {
    first_row_id: Option<i64>,
    sequence_number: i64,
}

impl Inherited {
    pub fn of(file: &LiveFile) -> Self {
        Self { first_row_id: file.first_row_id, sequence_number: file.sequence_number }
    }

    /// `batch` with its lineage columns filled in; `first` is the place of its first row in the file.
    pub fn fill(self, batch: RecordBatch, first: u64) -> Result<RecordBatch, ArrowError> {
        let schema = batch.schema();
        if !schema.fields().iter().any(|field| is_lineage(field)) {
            return Ok(batch);
        }
        let mut arrays: Vec<ArrayRef> = Vec::with_capacity(batch.num_columns());
        for (field, array) in schema.fields().iter().zip(batch.columns()) {
            arrays.push(if is_lineage(field) {
                self.filled(field, array, first)?
            } else {
                Arc::clone(array)
            });
        }
        RecordBatch::try_new(schema, arrays)
    }

    fn filled(self, field: &FieldRef, array: &ArrayRef, first: u64) -> Result<ArrayRef, ArrowError> {
        let Some(first_row_id) = self.first_row_id else { return Ok(Arc::clone(array)) };
        let out_of_range = || ArrowError::ComputeError("row ids are out of range".to_owned());
        let own = array.as_primitive_opt::<Int64Type>().ok_or_else(out_of_range)?;
        if own.null_count() == 0 {
            return Ok(Arc::clone(array));
        }
        let start = i64::try_from(first).ok().and_then(|first| first_row_id.checked_add(first));
        let start = start.ok_or_else(out_of_range)?;
        // Beyond the range there is no file with that many rows.
        let ids = start..start.saturating_add(i64::try_from(own.len()).unwrap_or(i64::MAX));
        let is_id = id_of(field) == RESERVED_FIELD_ID_ROW_ID;
        let values =
            own.iter().zip(ids).map(|(own, id)| own.unwrap_or(if is_id { id } else { self.sequence_number }));
        Ok(Arc::new(Int64Array::from_iter_values(values)))
    }
}
