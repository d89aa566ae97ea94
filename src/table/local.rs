//! Files of a table that lies on this machine. The crate's storage layer reads one in several steps, each on
//! another thread; for the small files that branches consist of, the way costs more than the reading. So
//! whoever is on a thread for blocking work already reads them here, at once.

use std::io::ErrorKind;
use std::path::PathBuf;

use super::error::TableError;
use super::storage;

/// The path behind a location, when it is on this machine.
pub(super) fn path_of(location: &str) -> Option<PathBuf> {
    storage::local_path(location)
}

/// The content of a local file. Blocks.
pub(super) fn read(location: &str) -> Result<Vec<u8>, TableError> {
    let path = here(location)?;
    std::fs::read(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => TableError::Missing { path: location.to_owned() },
        _ => TableError::io(location, error),
    })
}

/// Is there such a file? Blocks.
pub(super) fn exists(location: &str) -> Result<bool, TableError> {
    let path = here(location)?;
    path.try_exists().map_err(|error| TableError::io(location, error))
}

fn here(location: &str) -> Result<PathBuf, TableError> {
    path_of(location).ok_or_else(|| TableError::Internal(format!("{location} is not on this machine")))
}
