//! A ledger in a SQLite file.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _};

use super::error::{BUSY_TIMEOUT, BusyTries, LedgerError};
use super::open::{MigrationReport, READERS, complete, known_versions, name_queue, read_queue, report};
use super::session::LeaderSession;
use super::{Ledger, LedgerPlace};
use crate::database::{Pool, query};

pub(super) static MIGRATOR: Migrator = sqlx::migrate!("migrations/sqlite");

/// How long a caller waits for this process's own connections.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) async fn migrate(path: &Path) -> Result<MigrationReport, LedgerError> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        tokio::fs::create_dir_all(folder).await.map_err(|e| LedgerError::Database(sqlx::Error::Io(e)))?;
    }
    let options = options(path).create_if_missing(true);
    let mut conn = connect(&options).await?;
    // Before anything is changed: the file may be another application's.
    applied(&mut conn, path).await?;
    use_wal(&mut conn).await?;

    // SQLite has no migration lock of its own: the write lock serves as one.
    let mut tries = BusyTries::default();
    let mut tx = loop {
        match conn.begin_with("BEGIN IMMEDIATE").await {
            Ok(tx) => break tx,
            Err(error) => tries.pause_or_fail(error).await?,
        }
    };
    let before = applied(&mut tx, path).await?;
    // Not `run`: its future cannot be sent to another thread (sqlx keeps this door for that reason).
    MIGRATOR.run_direct(None, &mut *tx, false).await.map_err(LedgerError::Migrate)?;
    if before.is_empty() {
        name_queue(&mut *tx).await?;
    }
    let queue = read_queue(&mut *tx).await?;
    tx.commit().await?;
    conn.close().await?;
    Ok(report(&MIGRATOR, &before, queue))
}

pub(super) async fn open(path: &Path) -> Result<Ledger, LedgerError> {
    let exists = tokio::fs::try_exists(path).await.map_err(|e| LedgerError::Database(sqlx::Error::Io(e)))?;
    if !exists {
        return Err(LedgerError::Missing { path: path.display().to_string() });
    }
    let options = options(path);
    let mut conn = connect(&options).await?;
    let applied = applied(&mut conn, path).await?;
    complete(&MIGRATOR, &applied, &path.display().to_string())?;
    let queue = read_queue(&mut conn).await?;
    use_wal(&mut conn).await?;
    conn.close().await?;

    let writer = pool(1, options.clone()).await?;
    // A reader that writes by mistake fails instead of meeting a lock.
    let readers = pool(READERS, options.pragma("query_only", "ON")).await?;
    Ok(Ledger {
        place: Arc::new(LedgerPlace::from(path)),
        queue,
        writer: Pool::Sqlite(writer),
        readers: Pool::Sqlite(readers),
        session: LeaderSession::default(),
    })
}

pub(super) async fn check(readers: &Pool) -> Result<(), LedgerError> {
    let unusable = |source| LedgerError::Unusable { at: String::new(), source };
    let row = query("PRAGMA quick_check(1)").fetch_one(readers).await?;
    let finding: String = row.first().map_err(unusable)?;
    if finding == "ok" { Ok(()) } else { Err(unusable(sqlx::Error::Protocol(finding))) }
}

/// FULL: an intent must be on disk before the catalog is called (promise 4); NORMAL may lose the last
/// transactions with the power. A writing transaction chooses for itself.
pub(super) fn options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(path)
        .busy_timeout(BUSY_TIMEOUT)
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
}

pub(super) async fn connect(options: &SqliteConnectOptions) -> Result<SqliteConnection, LedgerError> {
    let mut tries = BusyTries::default();
    loop {
        match options.connect().await {
            Ok(conn) => return Ok(conn),
            Err(error) => tries.pause_or_fail(error).await?,
        }
    }
}

/// Connections live as long as the ledger: they hold prepared statements, and a local file needs no ping.
async fn pool(size: u32, options: SqliteConnectOptions) -> Result<SqlitePool, LedgerError> {
    let pool = SqlitePoolOptions::new()
        .max_connections(size)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        .idle_timeout(None)
        .max_lifetime(None)
        .test_before_acquire(false)
        .connect_with(options)
        .await?;
    Ok(pool)
}

/// WAL is a property of the file. Changing to it needs a moment without other connections, for which
/// SQLite's own busy wait does not help; a backup restored by copying statements lacks it.
async fn use_wal(conn: &mut SqliteConnection) -> Result<(), LedgerError> {
    let mut tries = BusyTries::default();
    loop {
        let mode: Result<String, sqlx::Error> = query("PRAGMA journal_mode = WAL").scalar(&mut *conn).await;
        match mode {
            Err(error) => tries.pause_or_fail(error).await?,
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(mode) => {
                let source = sqlx::Error::Protocol(format!(
                    "its file system allows journal mode '{mode}' only, and WAL is needed"
                ));
                return Err(LedgerError::Unusable { at: String::new(), source });
            }
        }
    }
}

/// Migrations of a file; none of one without any table.
async fn applied(conn: &mut SqliteConnection, path: &Path) -> Result<Vec<i64>, LedgerError> {
    let tables: Vec<String> = query(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
    )
    .scalars(&mut *conn)
    .await?;
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let path = path.display().to_string();
    if !tables.iter().any(|name| *name == MIGRATOR.table_name) {
        return Err(LedgerError::Foreign { path });
    }
    let rows = query("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
        .fetch_all(&mut *conn)
        .await?;
    known_versions(&MIGRATOR, &rows, &path)
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
