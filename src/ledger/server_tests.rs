//! What is so on PostgreSQL alone. Without a server (`scripts/postgres`) these tests say so and do nothing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use mergeberg_kernel::ids::Epoch;
use mergeberg_kernel::reason::ReasonCode;
use sqlx::AssertSqlSafe;
use sqlx::Executor as _;

use super::super::testing::{Home, enqueue, new_request, succeed};
use super::super::{Enqueued, LedgerFault, MIGRATE_COMMAND, NewRequest};
use super::*;
use crate::database::testing::TestServer;

/// Longer than any test: what is waited for has to come by itself.
const LONG: Duration = Duration::from_secs(60);

async fn raw(place: &PostgresPlace, sql: &str) {
    let mut conn = place.connect().await.unwrap();
    conn.execute(AssertSqlSafe(sql.to_owned())).await.unwrap();
    conn.close().await.unwrap();
}

fn server_of(ledger: &Ledger) -> &PostgresPlace {
    match ledger.place() {
        LedgerPlace::Postgres(place) => place,
        LedgerPlace::File(path) => panic!("{}", path.display()),
    }
}

#[tokio::test]
async fn a_new_database_gets_an_identity_that_stays() {
    let Some(server) = TestServer::find() else { return };
    let place = server.database().await;
    let missing = Ledger::open(place.clone()).await.unwrap_err();
    assert!(matches!(missing, LedgerError::Missing { .. }), "{missing:?}");
    assert!(missing.to_string().contains(MIGRATE_COMMAND), "{missing}");

    let (one, two) =
        tokio::join!(Ledger::open_or_create(place.clone()), Ledger::open_or_create(place.clone()));
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(one.queue_id(), two.queue_id());
    let again = Ledger::migrate(place.clone()).await.unwrap();
    assert_eq!((again.queue, again.created, again.applied), (one.queue_id().clone(), false, vec![]));
    one.check().await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn both_databases_have_the_same_tables_and_columns() {
    let Some(server) = TestServer::find() else { return };
    let files = Home::sqlite();
    let sqlite = "SELECT m.name || '.' || c.name || CASE c.\"notnull\" WHEN 1 THEN ' NOT NULL' ELSE '' END
                  FROM sqlite_master m, pragma_table_info(m.name) c
                  WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite%' AND m.name NOT LIKE '%_migrations'";
    let postgres = "SELECT relname || '.' || attname || CASE WHEN attnotnull THEN ' NOT NULL' ELSE '' END
                    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
                    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND attnum > 0
                      AND relname NOT LIKE '%_migrations'";
    let columns = async |ledger: Ledger, sql: &'static str| -> BTreeSet<String> {
        query(sql).scalars(&ledger.readers).await.unwrap().into_iter().collect()
    };
    let on_file = columns(files.ledger().await, sqlite).await;
    let mut on_server =
        columns(Ledger::open_or_create(server.database().await).await.unwrap(), postgres).await;
    assert!(on_server.remove("committer.session_pid"), "the one that only a session needs");
    assert_eq!(on_file, on_server);
    server.end().await;
}

#[tokio::test]
async fn a_ledger_of_another_release_and_a_foreign_schema_are_named() {
    let Some(server) = TestServer::find() else { return };
    let place = server.database().await;
    Ledger::migrate(place.clone()).await.unwrap();
    raw(
        &place,
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
                 VALUES (9999, 'later', TRUE, '\\x00', 0)",
    )
    .await;
    let newer = Ledger::open(place.clone()).await.unwrap_err();
    assert!(matches!(newer, LedgerError::Newer { version: 9999, .. }), "{newer:?}");
    raw(&place, "DELETE FROM _sqlx_migrations WHERE version = 9999").await;
    raw(&place, "UPDATE _sqlx_migrations SET checksum = '\\x00'").await;
    let altered = Ledger::open(place.clone()).await.unwrap_err();
    assert!(matches!(altered, LedgerError::Altered { version: 4, .. }), "{altered:?}");

    // Another application's migrations, and a table of a name that we need.
    for sql in [
        "CREATE TABLE _sqlx_migrations (version BIGINT PRIMARY KEY, checksum BYTEA)",
        "CREATE TABLE queue (id BIGINT)",
    ] {
        let place = server.database().await;
        raw(&place, sql).await;
        let foreign = Ledger::open_or_create(place.clone()).await.unwrap_err();
        assert!(matches!(foreign, LedgerError::Foreign { .. }), "{sql}: {foreign:?}");
        assert_eq!(foreign.reason(), Some(ReasonCode::LedgerUnusable));
    }
    // Tables of others are no obstacle.
    let place = server.database().await;
    raw(&place, "CREATE TABLE iceberg_tables (x TEXT)").await;
    Ledger::open_or_create(place).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn a_ledger_of_an_older_release_is_brought_up_with_its_rows() {
    let Some(server) = TestServer::find() else { return };
    let place = server.database().await;
    let ledger = Ledger::open_or_create(place.clone()).await.unwrap();
    let request = enqueue(&ledger, "ingest/a", 1).await;
    ledger.close().await;
    raw(&place, "DROP TABLE catalog_capability").await;
    raw(&place, "DELETE FROM _sqlx_migrations WHERE version = 5").await;

    let pending = Ledger::open_or_create(place.clone()).await.unwrap_err();
    assert!(matches!(&pending, LedgerError::Pending { pending, fresh: false, .. } if pending == &[5]));
    assert!(pending.to_string().contains(MIGRATE_COMMAND), "{pending}");
    let report = Ledger::migrate(place.clone()).await.unwrap();
    assert_eq!((report.created, report.applied), (false, vec![(5, "capabilities".to_owned())]));
    let ledger = Ledger::open(place).await.unwrap();
    assert_eq!(ledger.request(request).await.unwrap().pinned.0, 1);
    server.end().await;
}

#[tokio::test]
async fn a_schema_of_its_own_holds_a_second_ledger() {
    let Some(server) = TestServer::find() else { return };
    let url = server.database_url().await;
    let first = PostgresPlace::parse(&url, None).unwrap();
    let second = PostgresPlace::parse(&format!("{url}?options=-csearch_path%3Dsecond"), None).unwrap();
    let error = Ledger::open_or_create(second.clone()).await.unwrap_err();
    assert_eq!(error.reason(), Some(ReasonCode::LedgerUnusable), "{error}");
    raw(&first, "CREATE SCHEMA second").await;
    let one = Ledger::open_or_create(first).await.unwrap();
    let two = Ledger::open_or_create(second).await.unwrap();
    assert_ne!(one.queue_id(), two.queue_id());
    enqueue(&one, "ingest/a", 1).await;
    assert_eq!(two.requests(&Default::default()).await.unwrap(), []);
    // Each has its own lock.
    assert_eq!(one.lead("one", 1_000, 0).await.unwrap(), Some(Epoch(1)));
    assert_eq!(two.lead("two", 1_000, 0).await.unwrap(), Some(Epoch(1)));
    server.end().await;
}

#[tokio::test]
async fn what_is_wrong_with_the_server_is_told_with_a_next_step() {
    let Some(server) = TestServer::find() else { return };
    let url = server.database_url().await;
    let own = PostgresPlace::parse(&url, None).unwrap();
    let role = format!("r_{}", uuid::Uuid::new_v4().simple());
    server.admin(format!("CREATE ROLE {role} LOGIN PASSWORD 'right'")).await;
    // A port that nobody listens on: it was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (before, database) = url.rsplit_once('/').unwrap();
    let host = before.rsplit_once('@').unwrap().1;
    let told = async |url: String, words: &str, next: &str| {
        let place = PostgresPlace::parse(&url, None).unwrap();
        for error in [
            Ledger::open(place.clone()).await.unwrap_err(),
            Ledger::open_or_create(place.clone()).await.unwrap_err(),
            Ledger::migrate(place.clone()).await.unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(next), "{text}");
            assert!(text.contains(&format!("at {place}")), "{text}");
            assert!(!text.contains("wrong-word"), "{text}");
            let shown = crate::error::UserError::from(error);
            assert_eq!(shown.code, ReasonCode::LedgerUnusable);
            assert!(shown.next.contains(next), "{shown:?}");
        }
    };
    told(format!("postgresql://{role}@127.0.0.1:{free}/x"), "refused", "see that the server runs").await;
    told(
        format!("postgresql://{role}:wrong-word@{host}/{database}"),
        "password authentication failed",
        "correct user and password",
    )
    .await;
    told(format!("{before}/no_such_database"), "does not exist", "correct the database's name").await;
    told(format!("{url}?sslmode=verify-full"), "TLS", "see that the server offers TLS").await;

    // Who may only look, looks.
    let ledger = Ledger::open_or_create(own.clone()).await.unwrap();
    let id = enqueue(&ledger, "ingest/a", 1).await;
    raw(&own, &format!("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")).await;
    let looking =
        PostgresPlace::parse(&format!("postgresql://{role}:right@{host}/{database}"), None).unwrap();
    let looking = Ledger::open(looking).await.unwrap();
    assert_eq!(looking.request(id).await.unwrap().id, id);
    for error in [
        looking.enqueue(&new_request("ingest/b", 2), 1).await.unwrap_err(),
        looking.lead("one", 1_000, 0).await.unwrap_err(),
    ] {
        assert_eq!(error.fault(), LedgerFault::Unusable, "{error}");
        assert!(error.to_string().contains("permission denied"), "{error}");
        assert!(error.to_string().contains("GRANT"), "{error}");
    }
    // The lock was not left behind by the attempt.
    let two = succeed(&ledger, "two", 1_000, 0).await;
    ledger.release(two).await.unwrap();

    // No more than this is needed to enqueue and to lead.
    raw(&own, &format!("GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {role}")).await;
    enqueue(&looking, "ingest/b", 2).await;
    succeed(&looking, "three", 1_000, 0).await;
    server.end().await;
    server.admin(format!("DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_notification_wakes_a_sleeping_worker_at_once() {
    let Some(server) = TestServer::find() else { return };
    let ledger = Ledger::open_or_create(server.database().await).await.unwrap();
    let other = Ledger::open(ledger.place()).await.unwrap();
    let mut watcher = ledger.watcher().await.unwrap();
    let woken = tokio::spawn(async move {
        let woken = watcher.wait_for_change(LONG, LONG).await.unwrap();
        (woken, Instant::now(), watcher)
    });
    enqueue(&other, "ingest/a", 1).await;
    let written = Instant::now();
    let (woken, at, mut watcher) = woken.await.unwrap();
    assert!(woken);
    let took = at.saturating_duration_since(written);
    // 100 ms are wanted; a busy machine is no fault of the notification.
    assert!(took < Duration::from_secs(2), "{took:?}");

    // It listens again after its connection was lost, and finds what came meanwhile.
    let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                     WHERE datname = current_database() AND query LIKE 'LISTEN%'";
    raw(server_of(&ledger), terminate).await;
    for pinned in 2..5 {
        enqueue(&other, "ingest/a", pinned).await;
        assert!(watcher.wait_for_change(LONG, LONG).await.unwrap(), "{pinned}");
    }
    server.end().await;
}

/// What a restart finds out again does not wait for the disk; what somebody may have been told of does.
#[tokio::test]
async fn only_progress_does_not_wait_for_the_disk() {
    let Some(server) = TestServer::find() else { return };
    let ledger = Ledger::open_or_create(server.database().await).await.unwrap();
    raw(
        server_of(&ledger),
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off',
                             current_database()); END $$",
    )
    .await;
    let ledger = Ledger::open(ledger.place()).await.unwrap();
    let waits = async |mut tx: crate::database::Transaction| -> String {
        query("SELECT current_setting('synchronous_commit')").scalar(&mut tx).await.unwrap()
    };
    assert_eq!(waits(ledger.begin().await.unwrap()).await, "on");
    assert_eq!(waits(ledger.begin_progress().await.unwrap()).await, "off");
    assert_eq!(waits(ledger.begin().await.unwrap()).await, "on");
    server.end().await;
}

#[tokio::test]
async fn names_are_compared_by_their_letters_and_a_nul_stops_nothing() {
    let Some(server) = TestServer::find() else { return };
    let ledger = Ledger::open_or_create(server.database().await).await.unwrap();
    for (pinned, key) in [(1, "a"), (2, "A"), (3, "á"), (4, "a "), (5, "a\0b")] {
        let new = NewRequest { idempotency_key: Some(key.to_owned()), ..new_request("ingest/a", pinned) };
        let enqueued = ledger.enqueue(&new, 1).await.unwrap();
        assert!(matches!(enqueued, Enqueued::New(_)), "{key:?}: {enqueued:?}");
    }
    server.end().await;
}
