use mergeberg_kernel::reason::ReasonCode;

use super::super::{LedgerError, MIGRATE_COMMAND, MigrationReport};
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
    assert!(matches!(&pending, LedgerError::Pending { pending, fresh: true, .. } if pending == &versions()));
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
    for error in [Ledger::migrate(&path).await.unwrap_err(), Ledger::open_or_create(&path).await.unwrap_err()]
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
