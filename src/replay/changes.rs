//! The rows that an operation changes, noted while its result streams by.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, AsArray, BooleanArray, RecordBatch, RecordBatchOptions, new_null_array,
};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::{DataType, Field, Int32Type, Int64Type, Schema};
use mergeberg_kernel::reason::ReasonCode;
use roaring::RoaringTreemap;

use super::columns::hidden;
use super::error::ReplayError;
use super::plan::{Action, CLAUSE, INSIDE};
use super::session::{ORIGIN, POSITION, ROW_ID};
use crate::table::scan::ScanFile;

/// What is known of the files that the operation may change.
#[derive(Debug)]
pub(super) struct Changes {
    pub files: Vec<ScanFile>,
    /// By file: positions of rows that go, deleted or updated.
    pub gone: Vec<RoaringTreemap>,
    /// By file: positions of rows that were matched, where that may happen once.
    matched: Vec<RoaringTreemap>,
    pub inserted: i64,
}

/// What to look at in one frame.
pub(super) struct Look<'a> {
    pub actions: &'a [Action],
    pub once: bool,
    pub inside: Option<&'a str>,
    /// Names of the table's columns, in its order.
    pub names: &'a [String],
    /// Names of row id and last update, in tables of format v3.
    pub lineage: &'a [String],
}

impl Changes {
    pub fn new(files: Vec<ScanFile>) -> Self {
        let none = vec![RoaringTreemap::new(); files.len()];
        Self { files, gone: none.clone(), matched: none, inserted: 0 }
    }

    /// Notes what a batch changes, and gives the rows that are to be written, under the table's names.
    pub fn take(&mut self, batch: &RecordBatch, look: &Look<'_>) -> Result<RecordBatch, ReplayError> {
        let shape = || ReplayError::failed("the engine gave a result of another shape");
        let clauses = batch.column_by_name(CLAUSE).and_then(|c| c.as_primitive_opt::<Int32Type>());
        let clauses = clauses.ok_or_else(shape)?;
        let origins = batch.column_by_name(ORIGIN).and_then(|c| c.as_primitive_opt::<Int32Type>());
        let positions = batch.column_by_name(POSITION).and_then(|c| c.as_primitive_opt::<Int64Type>());
        if let (Some(filter), Some(inside)) = (look.inside, batch.column_by_name(INSIDE)) {
            let inside = inside.as_boolean_opt().ok_or_else(shape)?;
            if inside.true_count() != inside.len() {
                return Err(ReplayError::failed(format!(
                    "the query gives rows outside of its own filter ({filter})"
                )));
            }
        }
        let mut write = Vec::with_capacity(batch.num_rows());
        for row in 0..batch.num_rows() {
            let clause = usize::try_from(clauses.value(row)).ok();
            let action = clause.and_then(|number| look.actions.get(number)).copied();
            write.push(matches!(action, Some(Action::Update | Action::Insert)));
            if action == Some(Action::Insert) {
                self.inserted += 1;
                continue;
            }
            let place = match (origins, positions) {
                (Some(origins), Some(positions)) if origins.is_valid(row) && positions.is_valid(row) => {
                    let origin = usize::try_from(origins.value(row)).map_err(|_| shape())?;
                    (origin, u64::try_from(positions.value(row)).map_err(|_| shape())?)
                }
                _ => return Err(shape()),
            };
            self.note(place, action, look)?;
        }
        let columns: Option<Vec<_>> =
            (0..look.names.len()).map(|at| batch.column_by_name(&hidden(at)).cloned()).collect();
        let Some(mut columns) = columns else {
            // Nothing but deletes: no column is there to be written.
            return Ok(RecordBatch::new_empty(Arc::new(Schema::empty())));
        };
        let mut names: Vec<&str> = look.names.iter().map(String::as_str).collect();
        if let [row_id, updated_by] = look.lineage {
            names.extend([row_id.as_str(), updated_by.as_str()]);
            let nulls = || new_null_array(&DataType::Int64, batch.num_rows());
            columns.push(batch.column_by_name(ROW_ID).cloned().unwrap_or_else(nulls));
            // Whatever is written here is last updated by it.
            columns.push(nulls());
        }
        let fields: Vec<Field> = names
            .into_iter()
            .zip(&columns)
            .map(|(name, column)| Field::new(name, column.data_type().clone(), true))
            .collect();
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        let rows = RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), columns, &options)?;
        Ok(filter_record_batch(&rows, &BooleanArray::from(write))?)
    }

    fn note(
        &mut self,
        (origin, position): (usize, u64),
        action: Option<Action>,
        look: &Look<'_>,
    ) -> Result<(), ReplayError> {
        let (Some(gone), Some(matched)) = (self.gone.get_mut(origin), self.matched.get_mut(origin)) else {
            return Err(ReplayError::failed("the engine gave a row of a file that it was not given"));
        };
        if look.once && !matched.insert(position) {
            let path = self.files.get(origin).map_or("", |file| file.file.fact.path.as_ref());
            return Err(ReplayError::request(
                ReasonCode::ReplayFailed,
                format!(
                    "MERGE: more than one source row matches row {position} of {path}, so which of them \
                     counts is open; make the source's keys unique"
                ),
            ));
        }
        if action.is_some() {
            gone.insert(position);
        }
        Ok(())
    }
}
