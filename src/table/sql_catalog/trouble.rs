//! Errors of a catalog's database in the catalog's words; the database is always named.

use std::path::Path;

use super::super::catalog::CatalogError;
use super::place::DatabasePlace;
use crate::database::{Trouble, plain};

/// Primary result codes of SQLite (sqlite.org/rescode.html).
const SQLITE_BUSY: i64 = 5;
const SQLITE_LOCKED: i64 = 6;
const SQLITE_READONLY: i64 = 8;
const SQLITE_CORRUPT: i64 = 11;
const SQLITE_NOTADB: i64 = 26;
/// Extended code: the file was moved or replaced under an open connection.
const SQLITE_READONLY_DBMOVED: i64 = 1032;

impl DatabasePlace {
    /// Another's lock stopped it before anything was applied.
    pub(super) fn is_busy(&self, error: &sqlx::Error) -> bool {
        match self {
            Self::File { .. } => {
                matches!(extended_code(error).map(|code| code & 0xff), Some(SQLITE_BUSY | SQLITE_LOCKED))
            }
            Self::Postgres(_) => Trouble::of(error) == Trouble::Busy,
        }
    }

    /// Is a COMMIT that was answered so certainly not applied?
    pub(super) fn is_undone(&self, error: &sqlx::Error) -> bool {
        match self {
            // Readers kept the file locked: the commit did not begin.
            Self::File { .. } => self.is_busy(error),
            // Rolled back by the server, which says so. Whatever else it says (it shuts down, a standby did not
            // confirm), the commit may have been written before.
            Self::Postgres(_) => error
                .as_database_error()
                .and_then(|e| e.code())
                .is_some_and(|code| code.starts_with("40") || code.starts_with("23")),
        }
    }

    /// Why something could not be read.
    pub(super) fn unread(&self, error: sqlx::Error) -> CatalogError {
        match self {
            Self::File { path, .. } => of_file(path, error),
            Self::Postgres(_) => CatalogError::Unavailable(self.told(&error)),
        }
    }

    /// Why something could not be written.
    pub(super) fn unwritten(&self, error: sqlx::Error) -> CatalogError {
        match self {
            Self::File { path, .. } => of_file(path, error),
            Self::Postgres(_) => match Trouble::of(&error) {
                Trouble::NotAllowed | Trouble::ReadOnly => CatalogError::ReadOnly(self.told(&error)),
                _ => CatalogError::Unavailable(self.told(&error)),
            },
        }
    }

    fn told(&self, error: &sqlx::Error) -> String {
        format!("the catalog database {self}: {}; {}", plain(error), Trouble::of(error).next())
    }
}

fn extended_code(error: &sqlx::Error) -> Option<i64> {
    match error {
        sqlx::Error::Database(error) => error.code()?.parse().ok(),
        _ => None,
    }
}

fn of_file(path: &Path, error: sqlx::Error) -> CatalogError {
    let file = path.display();
    let Some(code) = extended_code(&error) else {
        return CatalogError::Unavailable(format!("{file}: {error}"));
    };
    if code == SQLITE_READONLY_DBMOVED {
        return CatalogError::Unavailable(format!(
            "the catalog file {file} was moved or replaced while it was open; restart to open the new one"
        ));
    }
    match code & 0xff {
        SQLITE_READONLY => CatalogError::ReadOnly(format!("the catalog file {file}: {error}")),
        SQLITE_CORRUPT | SQLITE_NOTADB => CatalogError::Unavailable(format!(
            "the catalog file {file} is damaged or no SQLite database ({error}); restore it from a backup"
        )),
        SQLITE_BUSY | SQLITE_LOCKED => CatalogError::Unavailable(format!(
            "another process keeps the catalog file {file} locked; find the one with an open transaction"
        )),
        _ => CatalogError::Unavailable(format!("the catalog file {file}: {error}")),
    }
}
