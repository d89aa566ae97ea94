//! The columns of one data file from those who read them: flat ones from the crate, nested ones from
//! [`super::nested_columns`]. Both give all rows in file order, so their batches are joined side by side.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::error::ArrowError;
use futures::StreamExt;
use iceberg::io::FileIO;
use iceberg::scan::ArrowRecordBatchStream;

use super::error::TableError;
use super::nested_columns::{NestedReader, is_read_here};

/// Batches of all columns of one file; one of the two readers at least.
pub(super) struct ColumnStreams {
    path: Arc<str>,
    file_io: FileIO,
    flat: Option<ArrowRecordBatchStream>,
    nested: Option<NestedReader>,
    /// What one reader gave and the other has not reached yet.
    flat_rest: Option<RecordBatch>,
    nested_rest: Option<RecordBatch>,
    schema: SchemaRef,
}

impl ColumnStreams {
    /// `schema` is that of the batches to give: each column from the reader for its kind, in the order in
    /// which that reader gives them.
    pub fn new(
        path: Arc<str>,
        file_io: FileIO,
        flat: Option<ArrowRecordBatchStream>,
        nested: Option<NestedReader>,
        schema: SchemaRef,
    ) -> Self {
        Self { path, file_io, flat, nested, flat_rest: None, nested_rest: None, schema }
    }

    /// The next rows; none are in an empty batch.
    pub async fn next(&mut self) -> Result<Option<RecordBatch>, TableError> {
        let flat = self.next_flat().await?;
        let nested = self.next_nested().await?;
        let (flat, nested) = match (&self.flat, &self.nested) {
            (Some(_), Some(_)) => match (flat, nested) {
                (Some(flat), Some(nested)) => {
                    let rows = flat.num_rows().min(nested.num_rows());
                    self.flat_rest = rest(&flat, rows);
                    self.nested_rest = rest(&nested, rows);
                    (Some(flat.slice(0, rows)), Some(nested.slice(0, rows)))
                }
                (None, None) => return Ok(None),
                (Some(_), None) | (None, Some(_)) => {
                    return Err(TableError::corrupt(
                        &self.path,
                        "its columns have different numbers of rows",
                    ));
                }
            },
            _ if flat.is_none() && nested.is_none() => return Ok(None),
            _ => (flat, nested),
        };
        let joined = joined(flat.as_ref(), nested.as_ref(), &self.schema);
        joined.map(Some).map_err(|e| wrong_shape(&self.path, &e))
    }

    async fn next_flat(&mut self) -> Result<Option<RecordBatch>, TableError> {
        if let Some(rest) = self.flat_rest.take() {
            return Ok(Some(rest));
        }
        let Some(stream) = &mut self.flat else { return Ok(None) };
        match stream.next().await {
            None => Ok(None),
            Some(Ok(batch)) => Ok(Some(batch)),
            Some(Err(e)) => Err(TableError::of_read(&self.file_io, &self.path, e).await),
        }
    }

    async fn next_nested(&mut self) -> Result<Option<RecordBatch>, TableError> {
        if let Some(rest) = self.nested_rest.take() {
            return Ok(Some(rest));
        }
        let Some(reader) = &mut self.nested else { return Ok(None) };
        reader.next(&self.file_io, &self.path).await
    }
}

/// The rows from `rows` on, if there are any.
fn rest(batch: &RecordBatch, rows: usize) -> Option<RecordBatch> {
    (rows < batch.num_rows()).then(|| batch.slice(rows, batch.num_rows() - rows))
}

/// The columns with exactly the types of `schema`: partition constants come run-length encoded, and the
/// crate's virtual column at the end goes.
fn joined(
    flat: Option<&RecordBatch>,
    nested: Option<&RecordBatch>,
    schema: &SchemaRef,
) -> Result<RecordBatch, ArrowError> {
    let mut flat_columns = flat.map(RecordBatch::columns).unwrap_or_default().iter();
    let mut nested_columns = nested.map(RecordBatch::columns).unwrap_or_default().iter();
    let mut columns: Vec<ArrayRef> = Vec::with_capacity(schema.fields().len());
    for field in schema.fields() {
        let column = if is_read_here(field) { nested_columns.next() } else { flat_columns.next() };
        let column = column
            .ok_or_else(|| ArrowError::SchemaError(format!("column '{}' was not read", field.name())))?;
        columns.push(if field.data_type() == column.data_type() {
            Arc::clone(column)
        } else {
            cast(column, field.data_type())?
        });
    }
    let rows = flat.or(nested).map_or(0, RecordBatch::num_rows);
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options)
}

pub(super) fn wrong_shape(path: &str, error: &ArrowError) -> TableError {
    TableError::corrupt(path, format!("its columns do not fit the table's schema: {error}"))
}
