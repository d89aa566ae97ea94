//! Where a ledger is.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::database::PostgresPlace;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LedgerPlace {
    /// A SQLite database of its own.
    File(PathBuf),
    /// A database, or a schema of one.
    Postgres(PostgresPlace),
}

/// For people, without a password.
impl fmt::Display for LedgerPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Postgres(place) => write!(f, "{place}"),
        }
    }
}

impl From<PathBuf> for LedgerPlace {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl From<&PathBuf> for LedgerPlace {
    fn from(path: &PathBuf) -> Self {
        Self::File(path.clone())
    }
}

impl From<&Path> for LedgerPlace {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl From<PostgresPlace> for LedgerPlace {
    fn from(place: PostgresPlace) -> Self {
        Self::Postgres(place)
    }
}

impl From<&LedgerPlace> for LedgerPlace {
    fn from(place: &LedgerPlace) -> Self {
        place.clone()
    }
}
