//! Checks on candidates: evidence that a snapshot may become the target's head (design, section 6).
//!
//! [`Validator::check_train`] runs one declared check on the cars of a train. A monotone check of a train
//! whose cars only add runs once, on the last candidate; everything else runs a car at a time against the
//! car's parent (rule E2). [`builtin`] holds the two checks that are always on and read no data, and
//! [`RewriteProver`] proves that a snapshot only rewrote rows (rule C5).
//!
//! A check that cannot be run (delete files that cannot be read, a missing column, any error of engine or
//! storage, a time-out) says so and is never a pass. A pass is reused under another id where nothing that it
//! depends on has changed (rule E6). Absent on purpose: deciding what a failed check means for a train, which belongs
//! to the kernel.

mod blame;
pub mod builtin;
mod duplicate_key;
mod finding;
pub mod membership;
mod not_null;
mod origins;
mod provider;
mod reconciliation;
mod reuse;
mod rewrite_proof;
mod row_count;
mod rows;
mod session;
mod sql;
mod subject;
mod totals;
mod train;

#[cfg(test)]
mod tests;

use std::time::Duration;

use datafusion::arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use mergeberg_kernel::ids::{SchemaId, SnapshotId};

use crate::table::catalog::CatalogError;
use crate::table::error::TableError;

pub use finding::value_text;
pub use provider::FilesTable;
pub use reuse::REUSED;
pub use rewrite_proof::RewriteProver;
pub use session::{CHECK_TIME_BOUND, ENGINE, Engine, is_exhausted};
pub use train::{CarView, TableResolver, TrainView, Validator};

/// Why a check could not be run. Never a pass, never a pipeline's fault.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    #[error(
        "column '{column}' is not in schema {schema}, under which candidates are read; it was dropped, \
         renamed or is nested: correct the check"
    )]
    MissingColumn { column: String, schema: SchemaId },
    #[error("the upstream has no column '{column}': correct the check or the upstream")]
    MissingUpstreamColumn { column: String },
    #[error("column '{column}' is {actual}, which has no sum: correct the check")]
    NotANumber { column: String, actual: String },
    #[error("'{value}' is no value of column '{column}' ({actual}): correct the check")]
    NotAValue { column: String, value: String, actual: String },
    #[error(
        "the sum of '{column}' has more than 38 digits, which no engine of the table can hold: the check is \
         blocked until the data or the column is corrected"
    )]
    Overflow { column: String },
    #[error("snapshot {0} is not in the table's metadata; stage the train again")]
    UnknownSnapshot(SnapshotId),
    #[error("the query of the check is not usable: {0}")]
    Query(String),
    #[error("{path} cannot be used as an upstream: {message}")]
    Upstream { path: String, message: String },
    #[error("the check took longer than {0:?}; narrow its scope or raise its resources")]
    TooSlow(Duration),
    #[error("a check crashed; report this, nothing was published")]
    Crashed,
    #[error("the query engine was stopped")]
    Stopped,
    #[error("the query engine's threads could not be started: {0}")]
    Threads(#[source] std::io::Error),
    #[error("the query engine gave a result of another shape: {0}")]
    Shape(String),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error("the query engine failed: {0}")]
    Engine(#[source] Box<DataFusionError>),
}

impl CheckError {
    /// Did it need more memory or disk than there is?
    fn is_exhausted(&self) -> bool {
        matches!(self, Self::Engine(error) if is_exhausted(error))
    }
}

impl From<DataFusionError> for CheckError {
    fn from(error: DataFusionError) -> Self {
        Self::Engine(Box::new(error))
    }
}

impl From<ArrowError> for CheckError {
    fn from(error: ArrowError) -> Self {
        DataFusionError::from(error).into()
    }
}
