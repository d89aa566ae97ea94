//! Cases O36 and O38: a train with a bad member, and nothing that lands on a guess.

use std::sync::Arc;

use mergeberg::ledger::{EventKind, RequestFilter};
use mergeberg::table::create::TableDefinition;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::{RequestId, TableName};
use serde_json::json;
use sqlx::ConnectOptions as _;

use crate::support::{House, Moment, ORDERS_POLICY, batch, branch, drain, order};

/// Eight requests on days of their own; those in `bad` bring a key that main has.
async fn eight(house: &House, bad: &[u32]) -> Vec<RequestId> {
    let mut requests = Vec::new();
    for member in 1..=8_u32 {
        let name = format!("ingest/{member}");
        let row = if bad.contains(&member) { order(3, 21) } else { order(i64::from(100 + member), member) };
        house.append_on_new(&name, &[row]).await;
        requests.push(house.enqueue(&name).await);
    }
    requests
}

async fn assert_all_but(house: &House, requests: &[RequestId], bad: &[u32], state: &str) {
    for (request, member) in requests.iter().zip(1_u32..) {
        let expected = if bad.contains(&member) { state } else { "landed" };
        assert_eq!(house.state(*request).await, expected, "member {member}");
    }
    let mut keys = vec![1, 2, 3];
    keys.extend((1..=8_u32).filter(|m| !bad.contains(m)).map(|m| i64::from(100 + m)));
    assert_eq!(house.keys("main").await, keys);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_one_bad_of_eight() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = eight(&house, &[5]).await;
    house.drain().await;
    assert_all_but(&house, &requests, &[5], "refused(duplicate-key)").await;
    let scans = scans_of(&house, &requests).await;
    assert!(scans <= 2, "one scan finds it, one more proves the rest: {scans}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_two_bad_of_eight() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = eight(&house, &[2, 7]).await;
    house.drain().await;
    assert_all_but(&house, &requests, &[2, 7], "refused(duplicate-key)").await;
    assert!(scans_of(&house, &requests).await <= 2);
}

/// Different candidates that the duplicate check looked at.
async fn scans_of(house: &House, requests: &[RequestId]) -> usize {
    let mut candidates = std::collections::BTreeSet::new();
    for request in requests {
        let rows = house.evidence(*request, "one-order-once").await;
        candidates.extend(rows.into_iter().map(|row| row.evidence.candidate));
    }
    candidates.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_member_whose_branch_was_dropped() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = eight(&house, &[]).await;
    house.commit(vec![Update::RemoveRef(branch("ingest/5"))]).await;
    house.drain().await;
    assert_all_but(&house, &requests, &[5], "withdrawn(branch-gone)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_member_whose_branch_is_dropped_while_the_train_is_checked() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let requests = eight(&house, &[]).await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        owner.commit(vec![Update::RemoveRef(branch("ingest/5"))]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_all_but(&house, &requests, &[5], "withdrawn(branch-gone)").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_member_whose_table_was_dropped() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = eight(&house, &[]).await;
    let other: TableName = "shop.gone".parse().unwrap();
    let definition = TableDefinition::default()
        .column("order_id", "long", true)
        .column("order_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false);
    let table = house.catalog.define_table(&other, &definition).await.unwrap();
    let head = house.write_batch_to(&other, "ingest/9", batch(&[order(9, 9)])).await;
    let new = mergeberg::ledger::NewRequest {
        table: other.clone(),
        table_uuid: table.facts.uuid.clone(),
        source: branch("ingest/9"),
        pinned: head,
        target: branch("main"),
        class: "default".to_owned(),
        principal: mergeberg_kernel::ids::Principal::new("test"),
        idempotency_key: None,
        structure: table.facts.structure(),
        format_version: 2,
    };
    let mergeberg::ledger::Enqueued::New(gone) = house.ledger.enqueue(&new, house.now()).await.unwrap()
    else {
        panic!("a new request")
    };
    house.catalog.drop_table(&other).await.unwrap();
    house.drain().await;
    assert_eq!(house.state(gone.id).await, "refused(table-not-found)");
    assert_all_but(&house, &requests, &[], "").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_member_with_a_record_that_nobody_knows() {
    for record in [
        json!({"v": 1, "id": "x", "op": "append", "shiny": true}),
        json!({"v": 7, "id": "x", "op": "append"}),
        json!({"v": 1, "id": "x", "op": "transmogrify"}),
        json!({"v": 1, "id": null, "op": "append"}),
        json!("not an object"),
    ] {
        let house = House::orders(ORDERS_POLICY).await;
        let requests = eight(&house, &[]).await;
        house.branch("ingest/odd").await;
        house.recorded("ingest/odd", &record, &[], &[order(90, 9)]).await;
        let odd = house.enqueue("ingest/odd").await;
        house.drain().await;
        assert_eq!(house.state(odd).await, "refused(record-invalid)", "{record}");
        assert_all_but(&house, &requests, &[], "").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_row_of_the_ledger_that_cannot_be_read() {
    for damage in [
        "UPDATE merge_request SET detail = '{not json' WHERE id = ?",
        "UPDATE merge_request SET state = 'sleeping' WHERE id = ?",
        "UPDATE merge_request SET state = 'held', reason = 'no-such-reason' WHERE id = ?",
        "UPDATE merge_request SET format_version = 99999 WHERE id = ?",
        "UPDATE merge_request SET table_name = 'nodot' WHERE id = ?",
    ] {
        let house = House::orders(ORDERS_POLICY).await;
        let requests = eight(&house, &[]).await;
        let path = house.dir.path().join("ledger.db");
        let mut file = sqlx::sqlite::SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
        sqlx::query(damage).bind(requests[4].0).execute(&mut file).await.unwrap();
        house.drain().await;
        house.drain().await;
        for (request, member) in requests.iter().zip(1_u32..) {
            if member != 5 {
                assert_eq!(house.state(*request).await, "landed", "{damage}: member {member}");
            }
        }
        assert_eq!(house.keys("main").await, [1, 2, 3, 101, 102, 103, 104, 106, 107, 108], "{damage}");
        assert_eq!(house.keys("ingest/5").await, [1, 2, 3, 105], "nobody touched its branch");
        let events = house.ledger.events_since(0, 1000).await.unwrap();
        let told: Vec<_> = events.iter().filter(|event| event.kind == EventKind::Unreadable).collect();
        assert_eq!(told.len(), 1, "{damage}: told once");
        assert_eq!(told[0].request, Some(requests[4]));
        assert!(house.ledger.request(requests[4]).await.is_err(), "and shown as what it is");
        let listed = house.ledger.requests(&RequestFilter::default()).await.unwrap();
        let others = requests.iter().filter(|request| **request != requests[4]);
        assert!(listed.iter().map(|row| &row.id).eq(others), "{damage}: a list shows the others");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o38_nothing_lands_on_a_guess() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"rows\"\ntype = \"row-count\"\nmin = 1\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"rows\"]\noverlap = \"allow\"\nbatch-size = 1\n";
    let house = House::orders(policy).await;
    house.append_on_new("r1", &[order(4, 22)]).await;
    house.append_on_new("r2", &[order(5, 22)]).await;
    let r1 = house.enqueue("r1").await;
    let r2 = house.enqueue("r2").await;
    let epoch = house.ledger.lead("me", i64::MAX / 2, house.now()).await.unwrap().unwrap();
    let _ = house.worker.tick(epoch).await.unwrap();
    assert_eq!(house.state(r1).await, "landed");
    assert_eq!(house.state(r2).await, "held(batch-full)", "not before the one ahead is final");
    assert!(house.evidence(r2, "rows").await.is_empty());
    let _ = house.worker.tick(epoch).await.unwrap();
    assert_eq!(house.state(r2).await, "landed");
    let first = house.request(r1).await.landed_snapshot.unwrap();
    let second = house.request(r2).await.landed_snapshot.unwrap();
    assert_eq!(house.loaded().await.facts.snapshots.get(second).unwrap().parent, Some(first));
    let evidence = house.evidence(r2, "rows").await;
    let measured = &evidence.last().unwrap().evidence.measured;
    assert!(measured.contains(&("rows".to_owned(), "2".to_owned())), "validated on main + r1: {measured:?}");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o38_whoever_stood_on_an_evicted_car_is_validated_again() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/r1", &[order(3, 21)]).await;
    house.append_on_new("ingest/r2", &[order(5, 22)]).await;
    let r1 = house.enqueue("ingest/r1").await;
    let r2 = house.enqueue("ingest/r2").await;
    house.drain().await;
    assert_eq!(house.state(r1).await, "refused(duplicate-key)");
    assert_eq!(house.state(r2).await, "landed");
    let landed = house.request(r2).await.landed_snapshot.unwrap();
    let evidence = house.evidence(r2, "one-order-once").await;
    assert_eq!(evidence.len(), 2);
    assert_ne!(evidence[0].evidence.candidate, landed, "the first one stood on r1");
    assert_eq!(evidence[1].evidence.candidate, landed);
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    house.assert_sound().await;
}
