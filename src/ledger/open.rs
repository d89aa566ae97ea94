//! Creating, migrating and opening the file.
//!
//! Opening never migrates: a command that finds migrations pending says what to run, so that an upgrade is
//! an act of the operator and no worker of the old release is surprised.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mergeberg_kernel::ids::QueueId;
use sqlx::migrate::Migrator;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Row as _};

use super::Ledger;
use super::decode::Fields;
use super::error::{BUSY_TIMEOUT, BusyTries, LedgerError};

static MIGRATOR: Migrator = sqlx::migrate!("migrations/sqlite");

/// What to run when migrations are missing. The command line offers exactly this.
pub const MIGRATE_COMMAND: &str = "mergeberg migrate";

/// Reading connections of one process.
const READERS: u32 = 4;
/// How long a caller waits for this process's own connections.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(30);
/// Length of a queue id, in hex digits: it is part of ref names, which people read.
const QUEUE_ID_DIGITS: usize = 12;

/// What [`Ledger::migrate`] did.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MigrationReport {
    pub queue: QueueId,
    /// The file is new.
    pub created: bool,
    /// Migrations applied just now: version and description.
    pub applied: Vec<(i64, String)>,
}

impl Ledger {
    /// Brings the file to this release's form; creates it, and its folder, when there is none.
    /// Two processes may do it at once: the second finds nothing to do.
    pub async fn migrate(path: impl AsRef<Path>) -> Result<MigrationReport, LedgerError> {
        let path = path.as_ref();
        migrate(path).await.map_err(|e| e.at(path))
    }

    /// Opens a ledger that exists and is complete.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, LedgerError> {
        let path = path.as_ref();
        open(path).await.map_err(|e| e.at(path))
    }

    /// Opens a ledger, or creates it when there is none. An older one is not migrated.
    pub async fn open_or_create(path: impl AsRef<Path>) -> Result<Self, LedgerError> {
        let path = path.as_ref();
        match Self::open(path).await {
            Err(LedgerError::Missing { .. } | LedgerError::Pending { fresh: true, .. }) => {
                Self::migrate(path).await?;
                Self::open(path).await
            }
            outcome => outcome,
        }
    }

    /// Reads the whole file and tells whether it is sound. Takes seconds on a large one: for `doctor`.
    pub async fn check(&self) -> Result<(), LedgerError> {
        let unusable = |source| LedgerError::Unusable { at: String::new(), source }.at(&self.path);
        let row = sqlx::query("PRAGMA quick_check(1)")
            .fetch_one(&self.readers)
            .await
            .map_err(|e| LedgerError::from(e).at(&self.path))?;
        let finding: String = row.try_get(0).map_err(unusable)?;
        if finding == "ok" { Ok(()) } else { Err(unusable(sqlx::Error::Protocol(finding))) }
    }
}

async fn migrate(path: &Path) -> Result<MigrationReport, LedgerError> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        tokio::fs::create_dir_all(folder).await.map_err(|e| LedgerError::from(sqlx::Error::Io(e)))?;
    }
    let options = options(path).create_if_missing(true);
    let mut conn = connect(&options).await?;
    // Before anything is changed: the file may be another application's.
    state_of(&mut conn, path).await?;
    use_wal(&mut conn).await?;

    // SQLite has no migration lock of its own: the write lock serves as one.
    let mut tries = BusyTries::default();
    let mut tx = loop {
        match conn.begin_with("BEGIN IMMEDIATE").await {
            Ok(tx) => break tx,
            Err(error) => tries.pause_or_fail(error).await?,
        }
    };
    let before = match state_of(&mut tx, path).await? {
        FileState::Fresh => Vec::new(),
        FileState::Applied(versions) => versions,
    };
    // Not `run`: its future cannot be sent to another thread (sqlx keeps this door for that reason).
    MIGRATOR.run_direct(None, &mut *tx, false).await.map_err(LedgerError::Migrate)?;
    let created = before.is_empty();
    if created {
        let queue: String = uuid::Uuid::new_v4().simple().to_string().chars().take(QUEUE_ID_DIGITS).collect();
        sqlx::query("INSERT INTO queue (id, queue_id, created_at_ms, wakes) VALUES (1, $1, $2, 0)")
            .bind(queue)
            .bind(now_ms())
            .execute(&mut *tx)
            .await?;
    }
    let queue = read_queue(&mut tx).await?;
    tx.commit().await?;
    conn.close().await?;

    let applied = MIGRATOR
        .iter()
        .filter(|migration| !before.contains(&migration.version))
        .map(|migration| (migration.version, migration.description.to_string()))
        .collect();
    Ok(MigrationReport { queue, created, applied })
}

async fn open(path: &Path) -> Result<Ledger, LedgerError> {
    let exists = tokio::fs::try_exists(path).await.map_err(|e| LedgerError::from(sqlx::Error::Io(e)))?;
    if !exists {
        return Err(LedgerError::Missing { path: path.display().to_string() });
    }
    let options = options(path);
    let mut conn = connect(&options).await?;
    let (applied, fresh) = match state_of(&mut conn, path).await? {
        FileState::Fresh => (Vec::new(), true),
        FileState::Applied(versions) => (versions, false),
    };
    let pending: Vec<i64> =
        MIGRATOR.iter().map(|m| m.version).filter(|version| !applied.contains(version)).collect();
    if !pending.is_empty() {
        return Err(LedgerError::Pending { path: path.display().to_string(), pending, fresh });
    }
    let queue = read_queue(&mut conn).await?;
    use_wal(&mut conn).await?;
    conn.close().await?;

    let writer = pool(1, options.clone()).await?;
    // A reader that writes by mistake fails instead of meeting a lock.
    let readers = pool(READERS, options.pragma("query_only", "ON")).await?;
    Ok(Ledger { path: Arc::from(path), queue, writer, readers })
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
        let mode: Result<String, sqlx::Error> =
            sqlx::query_scalar("PRAGMA journal_mode = WAL").fetch_one(&mut *conn).await;
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

enum FileState {
    /// No table at all.
    Fresh,
    /// Versions applied, each known to this release.
    Applied(Vec<i64>),
}

async fn state_of(conn: &mut SqliteConnection, path: &Path) -> Result<FileState, LedgerError> {
    let tables: Vec<String> = sqlx::query_scalar(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
    )
    .fetch_all(&mut *conn)
    .await?;
    if tables.is_empty() {
        return Ok(FileState::Fresh);
    }
    let path = path.display().to_string();
    if !tables.iter().any(|name| *name == MIGRATOR.table_name) {
        return Err(LedgerError::Foreign { path });
    }
    let rows = sqlx::query("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
        .fetch_all(&mut *conn)
        .await?;
    let mut versions = Vec::with_capacity(rows.len());
    for row in &rows {
        let fields = Fields::new("_sqlx_migrations", "version", row);
        let version = fields.int("version")?;
        let checksum: Vec<u8> = fields.get("checksum")?;
        let Some(known) = MIGRATOR.iter().find(|migration| migration.version == version) else {
            return Err(LedgerError::Newer { path, version });
        };
        if known.checksum.as_ref() != checksum.as_slice() {
            return Err(LedgerError::Altered { path, version });
        }
        versions.push(version);
    }
    Ok(FileState::Applied(versions))
}

async fn read_queue(conn: &mut SqliteConnection) -> Result<QueueId, LedgerError> {
    let row = sqlx::query("SELECT * FROM queue WHERE id = 1").fetch_optional(conn).await?;
    match row {
        Some(row) => Ok(QueueId(Fields::new("queue", "id", &row).text("queue_id")?)),
        None => Err(LedgerError::Row {
            table: "queue",
            id: "1".to_owned(),
            what: "it is missing, so that the queue has no identity".to_owned(),
        }),
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::reason::ReasonCode;

    use super::*;

    #[tokio::test]
    async fn a_new_file_gets_an_identity_that_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queue/ledger.db");
        let report = Ledger::migrate(&path).await.unwrap();
        assert!(report.created);
        let applied: Vec<i64> = report.applied.iter().map(|(version, _)| *version).collect();
        assert_eq!(applied, versions());

        let again = Ledger::migrate(&path).await.unwrap();
        assert_eq!(again, MigrationReport { queue: report.queue.clone(), created: false, applied: vec![] });
        let one = Ledger::open(&path).await.unwrap();
        let two = Ledger::open_or_create(&path).await.unwrap();
        assert_eq!(one.queue_id(), &report.queue);
        assert_eq!(two.queue_id(), &report.queue);
        one.check().await.unwrap();
    }

    /// Every migration that this release has.
    fn versions() -> Vec<i64> {
        MIGRATOR.iter().map(|migration| migration.version).collect()
    }

    #[tokio::test]
    async fn a_ledger_of_an_older_release_is_brought_up_with_its_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let ledger = Ledger::open_or_create(&path).await.unwrap();
        let request = super::super::testing::enqueue(&ledger, "ingest/a", 1).await;
        ledger.close().await;
        let mut conn = options(&path).connect().await.unwrap();
        sqlx::query("ALTER TABLE train DROP COLUMN written").execute(&mut conn).await.unwrap();
        sqlx::query("DELETE FROM _sqlx_migrations WHERE version = 2").execute(&mut conn).await.unwrap();
        conn.close().await.unwrap();

        let pending = Ledger::open(&path).await.unwrap_err();
        assert!(matches!(&pending, LedgerError::Pending { pending, fresh: false, .. } if pending == &[2]));
        let report = Ledger::migrate(&path).await.unwrap();
        assert_eq!(report.applied, vec![(2, "train files".to_owned())]);
        let ledger = Ledger::open(&path).await.unwrap();
        assert_eq!(ledger.request(request).await.unwrap().pinned.0, 1);
    }

    #[tokio::test]
    async fn opening_says_what_to_run_and_creates_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let missing = Ledger::open(&path).await.unwrap_err();
        assert!(missing.to_string().contains(MIGRATE_COMMAND), "{missing}");
        assert!(!path.exists());

        std::fs::write(&path, b"").unwrap();
        let pending = Ledger::open(&path).await.unwrap_err();
        assert!(
            matches!(&pending, LedgerError::Pending { pending, fresh: true, .. } if pending == &versions())
        );
        assert!(pending.to_string().contains(MIGRATE_COMMAND), "{pending}");
        assert_eq!(pending.reason(), Some(ReasonCode::LedgerUnusable));
        Ledger::open_or_create(&path).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_that_is_no_database_is_unusable_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let text = "not a database, but long enough to have a header of a hundred bytes ".repeat(20);
        std::fs::write(&path, &text).unwrap();
        for error in [
            Ledger::open(&path).await.unwrap_err(),
            Ledger::open_or_create(&path).await.unwrap_err(),
            Ledger::migrate(&path).await.unwrap_err(),
        ] {
            assert!(matches!(error, LedgerError::Unusable { .. }), "{error:?}");
            assert_eq!(error.reason(), Some(ReasonCode::LedgerUnusable));
            assert!(error.to_string().contains("ledger.db"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[tokio::test]
    async fn a_damaged_page_is_found_by_the_check() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let ledger = Ledger::open_or_create(&path).await.unwrap();
        ledger.close().await;
        let mut bytes = std::fs::read(&path).unwrap();
        // Every page but the first: the header and the schema stay readable.
        for byte in &mut bytes[4096..] {
            *byte = 0x5a;
        }
        std::fs::write(&path, bytes).unwrap();
        let error = match Ledger::open(&path).await {
            Ok(ledger) => ledger.check().await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.reason(), Some(ReasonCode::LedgerUnusable), "{error:?}");
    }

    #[tokio::test]
    async fn another_applications_database_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("catalog.db");
        let mut conn = options(&path).create_if_missing(true).connect().await.unwrap();
        sqlx::query("CREATE TABLE iceberg_tables (x TEXT)").execute(&mut conn).await.unwrap();
        conn.close().await.unwrap();
        let before = std::fs::read(&path).unwrap();
        for error in
            [Ledger::migrate(&path).await.unwrap_err(), Ledger::open_or_create(&path).await.unwrap_err()]
        {
            assert!(matches!(error, LedgerError::Foreign { .. }), "{error:?}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }

    #[tokio::test]
    async fn a_file_of_another_release_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        Ledger::migrate(&path).await.unwrap();
        let mut conn = options(&path).connect().await.unwrap();
        let insert = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
                      VALUES (9999, 'later', TRUE, x'00', 0)";
        sqlx::query(insert).execute(&mut conn).await.unwrap();
        let newer = Ledger::open(&path).await.unwrap_err();
        assert!(matches!(newer, LedgerError::Newer { version: 9999, .. }), "{newer:?}");

        sqlx::query("DELETE FROM _sqlx_migrations WHERE version = 9999").execute(&mut conn).await.unwrap();
        sqlx::query("UPDATE _sqlx_migrations SET checksum = x'00'").execute(&mut conn).await.unwrap();
        let altered = Ledger::open(&path).await.unwrap_err();
        assert!(matches!(altered, LedgerError::Altered { version: 1, .. }), "{altered:?}");
    }

    #[tokio::test]
    async fn two_processes_may_create_it_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger.db");
        let (one, two) = tokio::join!(Ledger::open_or_create(&path), Ledger::open_or_create(&path));
        assert_eq!(one.unwrap().queue_id(), two.unwrap().queue_id());
    }
}
