//! Migrations tried on rows: what they keep, what the schema refuses, what decoding refuses.

use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use sqlx::Connection as _;
use sqlx::migrate::Migrator;

use super::testing::{Home, enqueue, new_request, on_each_database, pass, staged_train};
use super::{Ledger, LedgerError, NewReview, ReviewFilter};
use crate::database::query;
use mergeberg_kernel::ids::{Digest, ReviewId};

on_each_database! {
    rows_survive_migrating_and_opening_again,
    an_inconsistent_request_is_an_error_that_names_it,
    inconsistent_rows_of_other_tables_are_errors_too,
    the_schema_itself_refuses_doubles,
}

async fn rows_survive_migrating_and_opening_again(home: &Home) {
    let ledger = home.ledger().await;
    let id = enqueue(&ledger, "ingest/a", 1).await;
    let before = ledger.request(id).await.unwrap();
    ledger.close().await;
    let report = Ledger::migrate(ledger.place()).await.unwrap();
    assert_eq!((report.created, report.applied.len()), (false, 0));
    for _ in 0..2 {
        let again = Ledger::open(ledger.place()).await.unwrap();
        assert_eq!(again.request(id).await.unwrap(), before);
        assert_eq!(again.queue_id(), ledger.queue_id());
    }
}

/// Migration 3 on a row that a release without it wrote.
#[tokio::test]
async fn a_request_of_before_reverts_reverts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let all = sqlx::migrate!("migrations/sqlite");
    let before = Migrator { migrations: all.migrations[..2].to_vec().into(), ..Migrator::DEFAULT };
    let options = super::file::options(&path).create_if_missing(true);
    let mut conn = super::file::connect(&options).await.unwrap();
    before.run_direct(None, &mut conn, false).await.unwrap();
    for sql in [
        "INSERT INTO queue (id, queue_id, created_at_ms, wakes) VALUES (1, 'q', 1, 0)",
        "INSERT INTO merge_request (table_name, table_uuid, source, pinned, target, class, principal, schema_id,
             spec_id, sort_order_id, format_version, state, enqueued_at_ms, attempts)
         VALUES ('nyc.flights', 'u', 'ingest/a', 7, 'main', 'ingest', 'ann', 0, 0, 0, 2, 'queued', 1, 0)",
    ] {
        query(sql).execute(&mut conn).await.unwrap();
    }
    conn.close().await.unwrap();
    let later: Vec<i64> = all.migrations[2..].iter().map(|migration| migration.version).collect();
    assert!(
        matches!(Ledger::open(&path).await, Err(LedgerError::Pending { pending, .. }) if pending == later)
    );
    Ledger::migrate(&path).await.unwrap();
    let ledger = Ledger::open(&path).await.unwrap();
    let row = ledger.request(RequestId(1)).await.unwrap();
    assert_eq!((row.source, row.reverts), (RefName::new("ingest/a"), None));
    raw(&ledger, "UPDATE merge_request SET reverts_reason = 'x'").await;
    assert_row_error(ledger.request(RequestId(1)).await, "merge_request", "1", "a reason without a request");
}

/// Runs `sql` past the API.
async fn raw(ledger: &Ledger, sql: &'static str) {
    let mut tx = ledger.begin().await.unwrap();
    let done = query(sql).execute(&mut tx).await.unwrap();
    assert!(done > 0, "{sql} changed nothing");
    tx.commit().await.unwrap();
}

fn assert_row_error<T: std::fmt::Debug>(outcome: Result<T, LedgerError>, table: &str, id: &str, sql: &str) {
    match outcome {
        Err(error @ LedgerError::Row { .. }) => {
            let text = error.to_string();
            assert!(text.contains(&format!("row {id} of {table} is inconsistent")), "{sql}: {text}");
            assert_eq!(error.reason(), Some(ReasonCode::LedgerUnusable));
        }
        other => panic!("{sql}: {other:?}"),
    }
}

async fn an_inconsistent_request_is_an_error_that_names_it(home: &Home) {
    for sql in [
        "UPDATE merge_request SET state = 'done'",
        "UPDATE merge_request SET state = 'held'",
        "UPDATE merge_request SET reason = 'paused'",
        "UPDATE merge_request SET state = 'held', reason = 'no-such-reason'",
        "UPDATE merge_request SET state = 'cancelled'",
        "UPDATE merge_request SET ended_at_ms = 5",
        "UPDATE merge_request SET state = 'landed', ended_at_ms = 5",
        "UPDATE merge_request SET landed_snapshot = 5",
        "UPDATE merge_request SET table_name = 'flights'",
        "UPDATE merge_request SET attempts = -1",
        "UPDATE merge_request SET format_version = 300",
        "UPDATE merge_request SET schema_id = 3000000000",
        "UPDATE merge_request SET detail = '{'",
    ] {
        let ledger = home.ledger().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        raw(&ledger, sql).await;
        assert_row_error(ledger.request(id).await, "merge_request", "1", sql);
        assert_eq!(
            ledger.requests(&Default::default()).await.unwrap(),
            [],
            "{sql}: a list goes on without it"
        );
    }
}

async fn inconsistent_rows_of_other_tables_are_errors_too(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let id = enqueue(&ledger, "ingest/a", 1).await;
    let intent = staged_train(&ledger, epoch, "t1", &[(id, 11)]).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    let new = new_request("ingest/a", 1);
    let review = NewReview {
        table: new.table.clone(),
        table_uuid: new.table_uuid.clone(),
        structure: new.structure,
        changes: vec![],
        policy: Digest::of(["p"]),
        binding: Digest::of(["b"]),
    };
    let review = ledger.open_review(&review, 1).await.unwrap().id;
    assert_eq!(review, ReviewId(1));

    for sql in [
        "UPDATE evidence SET result = 'passed', code = 'conflict'",
        "UPDATE evidence SET result = 'failed', code = NULL",
        "UPDATE evidence SET result = 'could-not-run', error = NULL",
        "UPDATE evidence SET result = 'fine'",
    ] {
        raw(&ledger, sql).await;
        assert_row_error(ledger.evidence_of_candidate(SnapshotId(11)).await, "evidence", "1", sql);
    }
    for sql in [
        "UPDATE landing SET outcome = 'landed'",
        "UPDATE landing SET outcome = 'maybe'",
        "UPDATE landing SET outcome = NULL, cars = '[{}]'",
    ] {
        raw(&ledger, sql).await;
        assert_row_error(ledger.open_intents().await, "landing", "intent-t1", sql);
    }
    let sql = "UPDATE train SET status = 'parked'";
    raw(&ledger, sql).await;
    assert_row_error(ledger.train(&intent.train).await, "train", "t1", sql);
    for sql in [
        "UPDATE structure_review SET state = 'approved'",
        "UPDATE structure_review SET state = 'open', decided_by = 'rita'",
    ] {
        raw(&ledger, sql).await;
        assert_row_error(ledger.review(review).await, "structure_review", "1", sql);
        assert_row_error(ledger.reviews(&ReviewFilter::default()).await, "structure_review", "1", sql);
    }
    ledger.set_target_head(&new.table, &new.table_uuid, &RefName::main(), None).await.unwrap();
    let sql = "UPDATE target_head SET adopted_by = 'ann'";
    raw(&ledger, sql).await;
    let head = ledger.target_head(&new.table_uuid, &RefName::main()).await;
    assert_row_error(head, "target_head", "uuid-of-flights", sql);
    raw(&ledger, "INSERT INTO event (at_ms, kind, text) VALUES (1, 'party', 'x')").await;
    let told = ledger.events_since(0, 100).await;
    assert!(matches!(told, Err(LedgerError::Row { table: "event", .. })), "{told:?}");
}

/// The indices hold even against code that forgets to look first.
async fn the_schema_itself_refuses_doubles(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let id = enqueue(&ledger, "ingest/a", 1).await;
    let intent = staged_train(&ledger, epoch, "t1", &[(id, 11)]).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    raw(&ledger, "UPDATE merge_request SET idempotency_key = 'k'").await;
    let doubles = [
        "INSERT INTO landing (intent, train, table_name, table_uuid, target, tail, candidates, temp_ref, cars,
             required, epoch, opened_at_ms)
         SELECT 'second', train, table_name, table_uuid, target, tail, candidates, temp_ref, cars, required,
             epoch, opened_at_ms FROM landing",
        "INSERT INTO merge_request (table_name, table_uuid, source, pinned, target, class, principal,
             idempotency_key, schema_id, spec_id, sort_order_id, format_version, state, enqueued_at_ms, attempts)
         SELECT table_name, table_uuid, source, pinned, target, class, principal, idempotency_key, schema_id,
             spec_id, sort_order_id, format_version, state, enqueued_at_ms, attempts FROM merge_request",
        "INSERT INTO committer (id, epoch, heartbeat_ms, lease_ms) VALUES (1, 0, 0, 0)",
    ];
    for sql in doubles {
        let mut tx = ledger.begin().await.unwrap();
        let error = query(sql).execute(&mut tx).await.unwrap_err();
        assert!(super::error::is_unique_violation(&error), "{sql}: {error}");
    }
    assert_eq!(ledger.request(RequestId(1)).await.unwrap().id, id);
}
