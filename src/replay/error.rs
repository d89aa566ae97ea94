//! Why an operation could not be run again, and whose trouble that is.

use datafusion::error::DataFusionError;
use mergeberg_kernel::reason::ReasonCode;

use crate::table::catalog::CatalogError;
use crate::table::course::Ending;
use crate::table::error::TableError;
use crate::validate::{CheckError, is_exhausted};

#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The request's own trouble: it is refused.
    #[error("{text}")]
    Request { code: ReasonCode, text: String },
    /// Rows that both sides changed: it is refused, and they are shown.
    #[error("{text}")]
    Conflicts { text: String, rows: Vec<serde_json::Value> },
    /// It was told to end, or took too long.
    #[error(transparent)]
    Ended(#[from] Ending),
    /// Infrastructure: tried again.
    #[error(transparent)]
    Table(TableError),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}

impl ReplayError {
    pub fn request(code: ReasonCode, text: impl Into<String>) -> Self {
        Self::Request { code, text: text.into() }
    }

    pub(super) fn failed(text: impl Into<String>) -> Self {
        Self::request(ReasonCode::ReplayFailed, text)
    }

    /// Did it need more memory or disk than there is?
    pub(super) fn is_too_large(&self) -> bool {
        matches!(self, Self::Request { code: ReasonCode::ReplayTooLarge, .. })
    }
}

impl From<TableError> for ReplayError {
    fn from(error: TableError) -> Self {
        match error {
            // A stream of ours that failed half-way comes back through the file writer, as does the engine.
            TableError::Producer(source) => match source.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => match other.downcast::<DataFusionError>() {
                    Ok(engine) => (*engine).into(),
                    Err(other) => match other.downcast::<Ending>() {
                        Ok(ending) => Self::Ended(*ending),
                        Err(other) => Self::failed(other.to_string()),
                    },
                },
            },
            error if error.is_own_fault() => Self::Request { code: error.reason(), text: error.to_string() },
            error => Self::Table(error),
        }
    }
}

impl From<DataFusionError> for ReplayError {
    fn from(error: DataFusionError) -> Self {
        if let Some(table) = table_error(&error) {
            return table;
        }
        if is_exhausted(&error) {
            return Self::request(ReasonCode::ReplayTooLarge, error.strip_backtrace());
        }
        Self::failed(error.strip_backtrace())
    }
}

/// Storage that fails under a query is nobody's fault. The engine may share its errors, so they are not taken
/// out of it.
fn table_error(error: &DataFusionError) -> Option<ReplayError> {
    let DataFusionError::External(source) = error.find_root() else { return None };
    let found = source.downcast_ref::<TableError>()?;
    Some(match found {
        TableError::Io { path, message } => {
            ReplayError::Table(TableError::Io { path: path.clone(), message: message.clone() })
        }
        TableError::ReadOnly { path, message } => {
            ReplayError::Table(TableError::ReadOnly { path: path.clone(), message: message.clone() })
        }
        TableError::Internal(text) => ReplayError::Table(TableError::Internal(text.clone())),
        own => ReplayError::request(own.reason(), own.to_string()),
    })
}

impl From<datafusion::arrow::error::ArrowError> for ReplayError {
    fn from(error: datafusion::arrow::error::ArrowError) -> Self {
        DataFusionError::from(error).into()
    }
}

impl From<CheckError> for ReplayError {
    fn from(error: CheckError) -> Self {
        Self::failed(error.to_string())
    }
}
