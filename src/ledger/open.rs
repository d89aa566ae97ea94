//! Creating, migrating and opening a ledger.
//!
//! Opening never migrates: a command that finds migrations pending says what to run, so that an upgrade is
//! an act of the operator and no worker of the old release is surprised.

use std::time::{SystemTime, UNIX_EPOCH};

use mergeberg_kernel::ids::QueueId;
use sqlx::migrate::Migrator;

use super::decode::Fields;
use super::error::LedgerError;
use super::{Ledger, LedgerPlace, file, server};
use crate::database::{Row, Target, query};

/// What to run when migrations are missing. The command line offers exactly this.
pub const MIGRATE_COMMAND: &str = "mergeberg migrate";

/// Reading connections of one process.
pub(super) const READERS: u32 = 4;
/// Length of a queue id, in hex digits: it is part of ref names, which people read.
const QUEUE_ID_DIGITS: usize = 12;

/// What [`Ledger::migrate`] did.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MigrationReport {
    pub queue: QueueId,
    /// The ledger is new.
    pub created: bool,
    /// Migrations applied just now: version and description.
    pub applied: Vec<(i64, String)>,
}

impl Ledger {
    /// Brings the ledger to this release's form; creates it when there is none, a file with its folder. A
    /// database on a server has to be there. Two processes may do it at once: the second finds nothing to do.
    pub async fn migrate(place: impl Into<LedgerPlace>) -> Result<MigrationReport, LedgerError> {
        let place = place.into();
        let report = match &place {
            LedgerPlace::File(path) => file::migrate(path).await,
            LedgerPlace::Postgres(at) => server::migrate(at).await,
        };
        report.map_err(|e| e.at(&place))
    }

    /// Opens a ledger that exists and is complete.
    pub async fn open(place: impl Into<LedgerPlace>) -> Result<Self, LedgerError> {
        let place = place.into();
        let ledger = match &place {
            LedgerPlace::File(path) => file::open(path).await,
            LedgerPlace::Postgres(at) => server::open(at).await,
        };
        ledger.map_err(|e| e.at(&place))
    }

    /// Opens a ledger, or creates it when there is none. An older one is not migrated.
    pub async fn open_or_create(place: impl Into<LedgerPlace>) -> Result<Self, LedgerError> {
        let place = place.into();
        match Self::open(&place).await {
            Err(LedgerError::Missing { .. } | LedgerError::Pending { fresh: true, .. }) => {
                Self::migrate(&place).await?;
                Self::open(&place).await
            }
            outcome => outcome,
        }
    }

    /// Reads the whole ledger and tells whether it is sound. Takes seconds on a large one: for `doctor`.
    pub async fn check(&self) -> Result<(), LedgerError> {
        let checked = match &*self.place {
            LedgerPlace::File(_) => file::check(&self.readers).await,
            LedgerPlace::Postgres(_) => server::check(&self.readers).await,
        };
        checked.map_err(|e| e.at(&self.place))
    }
}

/// Versions that were applied, each known to this release. `rows` have version and checksum.
pub(super) fn known_versions(
    migrator: &Migrator,
    rows: &[Row],
    place: &str,
) -> Result<Vec<i64>, LedgerError> {
    let mut versions = Vec::with_capacity(rows.len());
    for row in rows {
        let fields = Fields::new("_sqlx_migrations", "version", row);
        let version = fields.int("version")?;
        let checksum: Vec<u8> = fields.get("checksum")?;
        let place = place.to_owned();
        let Some(known) = migrator.iter().find(|migration| migration.version == version) else {
            return Err(LedgerError::Newer { path: place, version });
        };
        if known.checksum.as_ref() != checksum.as_slice() {
            return Err(LedgerError::Altered { path: place, version });
        }
        versions.push(version);
    }
    Ok(versions)
}

/// An error unless everything is applied.
pub(super) fn complete(migrator: &Migrator, applied: &[i64], place: &str) -> Result<(), LedgerError> {
    let pending: Vec<i64> =
        migrator.iter().map(|m| m.version).filter(|version| !applied.contains(version)).collect();
    if pending.is_empty() {
        return Ok(());
    }
    Err(LedgerError::Pending { path: place.to_owned(), pending, fresh: applied.is_empty() })
}

pub(super) fn report(migrator: &Migrator, before: &[i64], queue: QueueId) -> MigrationReport {
    let applied = migrator
        .iter()
        .filter(|migration| !before.contains(&migration.version))
        .map(|migration| (migration.version, migration.description.to_string()))
        .collect();
    MigrationReport { queue, created: before.is_empty(), applied }
}

/// The identity of a new queue.
pub(super) async fn name_queue<'c>(on: impl Into<Target<'c>>) -> Result<(), LedgerError> {
    let queue: String = uuid::Uuid::new_v4().simple().to_string().chars().take(QUEUE_ID_DIGITS).collect();
    query("INSERT INTO queue (id, queue_id, created_at_ms, wakes) VALUES (1, $1, $2, 0)")
        .bind(queue)
        .bind(now_ms())
        .execute(on)
        .await?;
    Ok(())
}

pub(super) async fn read_queue<'c>(on: impl Into<Target<'c>>) -> Result<QueueId, LedgerError> {
    match query("SELECT * FROM queue WHERE id = 1").fetch_optional(on).await? {
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
