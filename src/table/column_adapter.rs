//! Columns as a file has them, as the table's columns: by field id, whatever became of them.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use datafusion::arrow::datatypes::{FieldRef, Schema, SchemaRef};
use iceberg::spec::NestedFieldRef;

use super::nested_adapt::{FileField, adapt, missing};

/// A column that is wanted, as the table has it.
#[derive(Clone, Debug)]
pub(super) struct WantedColumn {
    pub field: NestedFieldRef,
    pub target: FieldRef,
}

/// Puts the columns of one file right.
pub(super) struct ColumnAdapter {
    columns: Vec<WantedColumn>,
    /// For each column its place in the batches, and how the file has it; `None`: the file lacks it.
    found: Vec<Option<(usize, FileField)>>,
    schema: SchemaRef,
}

impl ColumnAdapter {
    /// The adapter for a file with these columns, and which of them it needs, by their places in the file,
    /// ascending: batches have these and no others.
    pub fn new(columns: Vec<WantedColumn>, of_file: &[FileField]) -> (Self, Vec<usize>) {
        let place =
            |column: &WantedColumn| of_file.iter().position(|field| field.id == Some(column.field.id));
        let mut roots: Vec<usize> = columns.iter().filter_map(place).collect();
        roots.sort_unstable();
        roots.dedup();
        let found = columns.iter().map(|column| {
            let root = place(column)?;
            Some((roots.iter().position(|other| *other == root)?, of_file.get(root)?.clone()))
        });
        let found = found.collect();
        let fields: Vec<FieldRef> = columns.iter().map(|column| Arc::clone(&column.target)).collect();
        (Self { columns, found, schema: Arc::new(Schema::new(fields)) }, roots)
    }

    /// The wanted columns of these rows, in their order.
    pub fn adapted(&self, batch: &RecordBatch) -> Result<RecordBatch, String> {
        let mut arrays: Vec<ArrayRef> = Vec::with_capacity(self.columns.len());
        for (WantedColumn { field, target }, found) in self.columns.iter().zip(&self.found) {
            arrays.push(match found {
                Some((place, of_file)) => {
                    let array = batch.columns().get(*place).ok_or("a column is missing")?;
                    adapt(array, of_file, field, target)?
                }
                None => missing(field, target, batch.num_rows())?,
            });
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        RecordBatch::try_new_with_options(Arc::clone(&self.schema), arrays, &options)
            .map_err(|e| e.to_string())
    }
}
