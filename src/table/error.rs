//! What can go wrong below the catalog: reading manifests, writing snapshots and data files.
//!
//! Every variant names the file or path concerned, so that a person can go and look. A refusal that
//! follows from the request (a file to remove is not live) is told apart from a damaged table and from
//! storage that does not answer: only the last is tried again.

use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::reason::ReasonCode;

use super::storage::{self, FaultKind};

#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A file that the table's metadata names does not exist.
    #[error("{path} does not exist; keep clean-up jobs off open branches and write the branch again")]
    Missing { path: String },
    #[error("{path} cannot be read: {message}; restore the file or rewrite the snapshot that names it")]
    Corrupt { path: String, message: String },
    /// Nothing is wrong, but this release would lose something.
    #[error("{0}")]
    Unsupported(String),
    /// The storage failed; nobody's fault, tried again.
    #[error("the storage failed on {path}: {message}; it is tried again")]
    Io { path: String, message: String },
    /// The storage lets nobody write here; nobody's fault, and no time cures it.
    #[error("{path} cannot be written: {message}; give the worker write access to the table's location")]
    ReadOnly { path: String, message: String },
    /// A file to remove is not live in the snapshot built upon.
    #[error(
        "snapshot {snapshot} cannot be written: {path}{} not live on its parent; plan the change again on \
         the current head",
        and_more(*.more)
    )]
    NotLive { snapshot: SnapshotId, path: String, more: usize },
    /// Each path is live once (rule D6).
    #[error(
        "snapshot {snapshot} cannot be written: {path} is or was part of its line already; \
         write the rows to a new file"
    )]
    PathTaken { snapshot: SnapshotId, path: String },
    /// The change contradicts itself or the table.
    #[error("snapshot {snapshot} cannot be written: {message}")]
    InvalidChange { snapshot: SnapshotId, message: String },
    /// Rows to be written do not fit the table.
    #[error("the rows cannot be written: {0}; correct the query that produces them")]
    Rows(String),
    /// The producer of the rows failed.
    #[error("the rows to be written could not be produced: {0}")]
    Producer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Files are still part of the table and are not deleted (rule R8).
    #[error("{path} is named by snapshot {snapshot} of the table; nothing was deleted")]
    StillReferenced { path: String, snapshot: SnapshotId },
    /// A fault of the queue.
    #[error("{0}; report this, nothing was published")]
    Internal(String),
}

impl TableError {
    pub fn reason(&self) -> ReasonCode {
        match self {
            Self::Missing { .. } => ReasonCode::DataFileMissing,
            Self::Corrupt { .. } => ReasonCode::TableUnreadable,
            Self::Unsupported(_) => ReasonCode::FormatUnsupported,
            Self::Io { .. } | Self::Internal(_) => ReasonCode::CatalogUnavailable,
            Self::ReadOnly { .. } => ReasonCode::WarehouseReadOnly,
            Self::NotLive { .. } | Self::PathTaken { .. } | Self::InvalidChange { .. } => {
                ReasonCode::Conflict
            }
            Self::Rows(_) | Self::Producer(_) => ReasonCode::ReplayFailed,
            Self::StillReferenced { .. } => ReasonCode::CatalogRefused,
        }
    }

    /// Does it follow from what was asked for, so that asking again gives the same answer? Storage that
    /// does not answer is nobody's fault.
    pub fn is_own_fault(&self) -> bool {
        match self {
            Self::Missing { .. }
            | Self::Corrupt { .. }
            | Self::Unsupported(_)
            | Self::NotLive { .. }
            | Self::PathTaken { .. }
            | Self::InvalidChange { .. }
            | Self::Rows(_)
            | Self::Producer(_) => true,
            Self::Io { .. } | Self::ReadOnly { .. } | Self::StillReferenced { .. } | Self::Internal(_) => {
                false
            }
        }
    }

    pub(super) fn corrupt(path: &str, message: impl std::fmt::Display) -> Self {
        Self::Corrupt { path: path.to_owned(), message: plain(&message) }
    }

    pub(super) fn io(path: &str, message: impl std::fmt::Display) -> Self {
        Self::Io { path: path.to_owned(), message: plain(&message) }
    }

    /// What the failure of reading `path` means: where the storage does not tell "not found" from the rest,
    /// the file is looked for once more.
    pub(super) async fn of_read(file_io: &iceberg::io::FileIO, path: &str, error: iceberg::Error) -> Self {
        match storage::kind_of(&error) {
            Some(FaultKind::Missing) => return Self::Missing { path: path.to_owned() },
            Some(FaultKind::Denied | FaultKind::Trouble) => return Self::io(path, error),
            None => {}
        }
        match file_io.exists(path).await {
            Ok(false) => Self::Missing { path: path.to_owned() },
            Ok(true) | Err(_) => Self::io(path, error),
        }
    }

    /// What the failure of writing below `path` means: disks do not tell "read-only" from the rest through
    /// the storage layer, so it is tried once more with a file of our own.
    pub(super) fn of_write(path: &str, error: iceberg::Error) -> Self {
        if storage::kind_of(&error) == Some(FaultKind::Denied) {
            return Self::ReadOnly { path: path.to_owned(), message: plain(&error) };
        }
        match super::metadata_file::probe_writable(path) {
            Err(super::metadata_file::MetadataFileError::ReadOnly(source)) => {
                Self::ReadOnly { path: path.to_owned(), message: source.to_string() }
            }
            Ok(()) | Err(_) => Self::io(path, error),
        }
    }

    /// What the end of a blocking task without a result means. `path` is the file that was worked on: a
    /// decoder that panics has met bytes that it does not understand.
    pub(super) fn of_join(path: &str, error: tokio::task::JoinError) -> Self {
        if error.is_panic() {
            Self::corrupt(path, "the decoder or encoder failed on its content")
        } else {
            Self::Internal(format!("the work on {path} was cancelled"))
        }
    }
}

/// As the crate writes an error that has no message of its own.
const KIND_ALONE: &str = "Unexpected";

/// A library's error in words for people: without the kinds and contexts that stand before its messages.
pub(super) fn plain(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let message = |part: &str| part.split_once(" => ").map_or(part, |(_, message)| message).to_owned();
    // A kind alone: the error only carries its source.
    let parts = text.split(", source: ").filter(|part| *part != KIND_ALONE);
    parts.map(message).collect::<Vec<_>>().join(": ")
}

/// Subject and verb after the first of several paths.
fn and_more(more: usize) -> String {
    if more == 0 { " is".to_owned() } else { format!(" and {more} more are") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_librarys_error_is_told_without_its_kinds() {
        let inner = iceberg::Error::new(iceberg::ErrorKind::Unexpected, "wrong magic in header");
        let error = iceberg::Error::new(iceberg::ErrorKind::DataInvalid, "no avro")
            .with_context("file", "a.avro")
            .with_source(inner);
        assert_eq!(plain(&error), "no avro: wrong magic in header");
        assert_eq!(plain(&"plain words"), "plain words");
        let carrier = iceberg::Error::new(iceberg::ErrorKind::Unexpected, "").with_source(std::fmt::Error);
        assert_eq!(plain(&carrier), std::fmt::Error.to_string());
    }
}
