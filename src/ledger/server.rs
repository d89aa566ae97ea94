//! A ledger in a PostgreSQL database, in the schema that is first on its search path.

use std::sync::Arc;

use sqlx::Connection as _;
use sqlx::migrate::Migrator;
use sqlx::postgres::PgConnection;

use super::error::LedgerError;
use super::open::{MigrationReport, READERS, complete, known_versions, name_queue, read_queue, report};
use super::session::LeaderSession;
use super::{Ledger, LedgerPlace};
use crate::database::{Pool, PostgresPlace, Trouble, query};

pub(super) static MIGRATOR: Migrator = sqlx::migrate!("migrations/postgres");

/// A table that no other application has beside one of migrations.
const OURS: &str = "merge_attempt";

pub(super) async fn migrate(place: &PostgresPlace) -> Result<MigrationReport, LedgerError> {
    let mut conn = place.connect().await?;
    let mut tx = conn.begin().await?;
    // Two that create it at once take turns.
    query("SELECT pg_advisory_xact_lock(hashtextextended('mergeberg migrate', 0))").execute(&mut *tx).await?;
    let before = applied(&mut tx, place).await?;
    MIGRATOR.run_direct(None, &mut *tx, false).await.map_err(|e| of_migration(e, place))?;
    if before.is_empty() {
        name_queue(&mut *tx).await?;
    }
    let queue = read_queue(&mut *tx).await?;
    tx.commit().await?;
    conn.close().await?;
    Ok(report(&MIGRATOR, &before, queue))
}

pub(super) async fn open(place: &PostgresPlace) -> Result<Ledger, LedgerError> {
    // Not by a pool, which would try again and again before it told what is wrong.
    let mut conn = place.connect().await?;
    let applied = applied(&mut conn, place).await?;
    if applied.is_empty() {
        return Err(LedgerError::Missing { path: place.to_string() });
    }
    complete(&MIGRATOR, &applied, &place.to_string())?;
    let queue = read_queue(&mut conn).await?;
    conn.close().await?;
    Ok(Ledger {
        place: Arc::new(LedgerPlace::Postgres(place.clone())),
        queue,
        writer: Pool::Postgres(place.pool(1)),
        readers: Pool::Postgres(place.reading_pool(READERS)),
        session: LeaderSession::default(),
    })
}

/// Every row of every table is read: a damaged page is an error where the server has checksums.
pub(super) async fn check(readers: &Pool) -> Result<(), LedgerError> {
    for sql in [
        "SELECT COUNT(*) FROM queue, committer",
        "SELECT COUNT(*) FROM merge_request",
        "SELECT COUNT(*) FROM merge_attempt",
        "SELECT COUNT(*) FROM train",
        "SELECT COUNT(*) FROM evidence",
        "SELECT COUNT(*) FROM evidence_request",
        "SELECT COUNT(*) FROM landing",
        "SELECT COUNT(*) FROM structure_accepted",
        "SELECT COUNT(*) FROM structure_review",
        "SELECT COUNT(*) FROM foreign_snapshot",
        "SELECT COUNT(*) FROM target_head",
        "SELECT COUNT(*) FROM event",
        "SELECT COUNT(*) FROM operation",
        "SELECT COUNT(*) FROM catalog_capability",
    ] {
        query(sql).scalar::<i64>(readers).await?;
    }
    Ok(())
}

/// Migrations of a schema; none of one without a ledger. Tables of others beside it do not matter.
async fn applied(conn: &mut PgConnection, place: &PostgresPlace) -> Result<Vec<i64>, LedgerError> {
    let tables: Vec<String> = query(
        "SELECT relname::TEXT FROM pg_class
         WHERE relnamespace = to_regnamespace(current_schema()) AND relkind IN ('r', 'p')",
    )
    .scalars(&mut *conn)
    .await?;
    let has = |name: &str| tables.iter().any(|table| table == name);
    if !has(&MIGRATOR.table_name) {
        return Ok(Vec::new());
    }
    if !has(OURS) {
        return Err(LedgerError::Foreign { path: place.to_string() });
    }
    let rows = query("SELECT version, checksum FROM _sqlx_migrations ORDER BY version")
        .fetch_all(&mut *conn)
        .await?;
    known_versions(&MIGRATOR, &rows, &place.to_string())
}

/// SQLSTATE of a table, function or view that is there already.
const TAKEN: [&str; 2] = ["42P07", "42723"];
/// SQLSTATE of a search path that names no schema that exists.
const NO_SCHEMA: &str = "3F000";

fn of_migration(error: sqlx::migrate::MigrateError, place: &PostgresPlace) -> LedgerError {
    use sqlx::migrate::MigrateError;
    match error {
        MigrateError::Execute(source) | MigrateError::ExecuteMigration(source, _) => {
            let code = source.as_database_error().and_then(|e| e.code()).unwrap_or_default().into_owned();
            if TAKEN.contains(&code.as_str()) {
                return LedgerError::Foreign { path: place.to_string() };
            }
            if code == NO_SCHEMA {
                return LedgerError::Server { at: String::new(), trouble: Trouble::NoDatabase, source };
            }
            LedgerError::from(source)
        }
        other => LedgerError::Migrate(other),
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
