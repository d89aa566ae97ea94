//! Cases O21, O25, O27, O33, O35 and O39: the mechanics of the queue.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;
use sqlx::ConnectOptions as _;

use crate::support::{House, Moment, ORDERS_POLICY, branch, drain, order};

/// One class for every name, which hands its branches over.
const ANY_NAME_POLICY: &str = "table = \"shop.orders\"\n\
    [[class]]\nname = \"default\"\nprefix = \"\"\nafter-landing = \"drop\"\n";

fn moving(rule: &str) -> String {
    format!(
        "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\n\
         after-landing = \"drop\"\non-source-moved = \"{rule}\"\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o21_a_branch_that_was_expired_is_withdrawn_with_its_last_head() {
    let house = House::orders(ORDERS_POLICY).await;
    let head = house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    house.commit(vec![Update::RemoveRef(branch("ingest/b")), Update::RemoveSnapshots(vec![head])]).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "withdrawn(branch-gone)");
    let detail = house.detail(request).await;
    assert!(detail.contains(&head.to_string()), "the last known head is named: {detail}");
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o25_another_branch_takes_the_sequence_number_while_a_train_is_staged() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    house.branch("elsewhere").await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let writer = Arc::clone(&house);
    script.at(Moment::Before(1), move || async move {
        writer.append("elsewhere", &[order(50, 28)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    // The snapshot was built again in place, with new numbers.
    let landed = house.request(request).await;
    let facts = house.loaded().await.facts.clone();
    let number = |id| facts.snapshots.get(id).unwrap().sequence_number;
    let elsewhere = facts.head(&branch("elsewhere")).unwrap();
    assert!(number(landed.landed_snapshot.unwrap()) > number(elsewhere));
    assert_eq!(landed.attempts, 1, "a write to another branch is no second planning");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    assert_eq!(house.keys("elsewhere").await, [1, 2, 3, 9, 50]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o25_another_branch_is_written_between_validation_and_commit() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    house.branch("elsewhere").await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    for commit in 2..6 {
        let writer = Arc::clone(&house);
        script.at(Moment::Before(commit), move || async move {
            writer.append("elsewhere", &[order(50, 28)]).await;
        });
    }
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(
        house.request(request).await.attempts,
        1,
        "main did not move: the same candidate is sent again"
    );
    assert_eq!(house.evidence(request, "one-order-once").await.len(), 1);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o25_a_clock_that_is_five_minutes_behind() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    let request = house.enqueue("ingest/b").await;
    let table = house.loaded().await;
    let last_ms = table.facts.last_updated_ms;
    house.clock.store(last_ms - 300_000, Ordering::SeqCst);
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    let table = house.loaded().await;
    let head = table.facts.head(&branch("main")).unwrap();
    assert!(table.facts.snapshots.get(head).unwrap().timestamp_ms > last_ms, "rule N3");
    let log: Vec<i64> = table.facts.snapshot_log.iter().map(|entry| entry.timestamp_ms).collect();
    assert!(log.is_sorted(), "{log:?}");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o27_an_update_that_matches_no_row_is_a_lost_race() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let own = house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let winner = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        winner.append("main", &[order(9, 25)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9], "the winner's commit stays");
    assert_ne!(house.head("main").await, Some(own));
    assert!(house.history(request).await.contains("not-landed"), "the loser knew that it had lost");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o27_two_processes_and_a_reader_on_one_ledger() {
    const EACH: u32 = 100;
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let head = house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let path = house.dir.path().join("ledger.db");
    // A reader that began before and stays: its view never stops a writer.
    let mut reader = sqlx::sqlite::SqliteConnectOptions::new().filename(&path).connect().await.unwrap();
    sqlx::query("BEGIN").execute(&mut reader).await.unwrap();
    sqlx::query("SELECT COUNT(*) FROM merge_request").fetch_one(&mut reader).await.unwrap();

    let table = house.loaded().await;
    let mut tasks = Vec::new();
    for process in 0..2 {
        let ledger = mergeberg::ledger::Ledger::open(&path).await.unwrap();
        let table = Arc::clone(&table);
        tasks.push(tokio::spawn(async move {
            for number in 0..EACH {
                let new = mergeberg::ledger::NewRequest {
                    table: table.facts.name.clone(),
                    table_uuid: table.facts.uuid.clone(),
                    source: branch("ingest/b"),
                    pinned: head,
                    target: branch("main"),
                    class: "ingest".to_owned(),
                    principal: mergeberg_kernel::ids::Principal::new("test"),
                    idempotency_key: Some(format!("{process}-{number}")),
                    structure: table.facts.structure(),
                    format_version: 2,
                };
                let _ = ledger.enqueue(&new, i64::from(number)).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let (other, _script) = house.scripted().await;
    tokio::join!(house.drain(), drain(&other));
    let all = house.ledger.requests(&mergeberg::ledger::RequestFilter::default()).await.unwrap();
    assert_eq!(all.len(), 2 * EACH as usize, "none is lost");
    let landed = all.iter().filter(|row| row.state.word() == "landed").count();
    let found = all.iter().filter(|row| row.state.word() == "already-published").count();
    assert_eq!((landed, found), (1, all.len() - 1), "one claim lands, nobody fails for a busy file");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o33_names_are_data() {
    let names = [
        "ingest/shard-07",
        "feature/a b/ü",
        "x%2Fy",
        "a.b",
        "branch_main",
        "'audit-branch'",
        "`tick`",
        "x'; DROP TABLE merge_request; --",
        "MAIN",
    ];
    let house = House::orders(ANY_NAME_POLICY).await;
    for (name, day) in names.iter().zip(1..) {
        house.append_on_new(name, &[order(i64::from(day) + 100, day)]).await;
    }
    // A near miss is refused with the close name.
    for near in ["audit-branch", "ingest/shard-07 ", "Ingest/shard-07", "x/y"] {
        let error = house.ask(near).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::BranchNotFound, "{near}");
    }
    let error = house.ask("audit-branch").await.unwrap_err();
    assert!(error.next.contains("'audit-branch'"), "{}", error.next);

    let mut requests = Vec::new();
    for name in names {
        requests.push((name, house.ask(name).await.unwrap()));
    }
    house.drain().await;
    for (name, request) in requests {
        assert_eq!(house.state(request).await, "landed", "{name}");
        assert_eq!(house.request(request).await.source, branch(name));
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 101, 102, 103, 104, 105, 106, 107, 108, 109]);
    assert_eq!(house.refs().await, ["main"], "each was dropped as itself");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o35_pushed_between_enqueue_and_merge() {
    // (a) before the claim, (b) while it is validated, (c) between validation and commit.
    for moment in [None, Some(Moment::After(1)), Some(Moment::Before(2))] {
        let house = Arc::new(House::orders(&moving("land-pin")).await);
        let approved = house.append_on_new("b", &[order(4, 22)]).await;
        let request = house.enqueue("b").await;
        let (worker, script) = house.scripted().await;
        match moment {
            None => {
                house.append("b", &[order(5, 22)]).await;
            }
            Some(moment) => {
                let writer = Arc::clone(&house);
                script.at(moment, move || async move {
                    writer.append("b", &[order(5, 22)]).await;
                });
            }
        }
        drain(&worker).await;
        script.assert_played();
        assert_eq!(house.state(request).await, "landed", "{moment:?}");
        assert_eq!(house.request(request).await.pinned, approved);
        assert_eq!(house.keys("main").await, [1, 2, 3, 4], "{moment:?}");
        assert_eq!(house.keys("b").await, [1, 2, 3, 4, 5], "{moment:?}: the branch stays");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o35_a_class_that_refuses_a_moved_head() {
    for moment in [None, Some(Moment::After(1)), Some(Moment::Before(2))] {
        let house = Arc::new(House::orders(&moving("refuse")).await);
        house.append_on_new("b", &[order(4, 22)]).await;
        let request = house.enqueue("b").await;
        let (worker, script) = house.scripted().await;
        match moment {
            None => {
                house.append("b", &[order(5, 22)]).await;
            }
            Some(moment) => {
                let writer = Arc::clone(&house);
                script.at(moment, move || async move {
                    writer.append("b", &[order(5, 22)]).await;
                });
            }
        }
        drain(&worker).await;
        script.assert_played();
        assert_eq!(house.state(request).await, "refused(source-moved)", "{moment:?}");
        assert_eq!(house.keys("main").await, [1, 2, 3], "{moment:?}");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o35_a_class_that_pins_anew_validates_what_it_lands() {
    for moment in [None, Some(Moment::After(1)), Some(Moment::Before(2))] {
        let house = Arc::new(House::orders(&moving("repin")).await);
        house.append_on_new("b", &[order(4, 22)]).await;
        let request = house.enqueue("b").await;
        let (worker, script) = house.scripted().await;
        let writer = Arc::clone(&house);
        match moment {
            None => {
                house.append("b", &[order(5, 22)]).await;
            }
            Some(moment) => script.at(moment, move || async move {
                writer.append("b", &[order(5, 22)]).await;
            }),
        }
        drain(&worker).await;
        script.assert_played();
        assert_eq!(house.state(request).await, "landed", "{moment:?}");
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5], "{moment:?}");
        let row = house.request(request).await;
        let lineage = house.evidence(request, "lineage").await;
        let last = lineage.last().unwrap().evidence.candidate;
        assert_eq!(Some(last), row.landed_snapshot, "evidence stands under what landed");
        house.assert_sound().await;
    }
}

const MINUTE: i64 = 60_000;

/// A backfill of every day that takes 20 minutes, and an append to today every 30 seconds.
#[tokio::test(flavor = "multi_thread")]
async fn case_o39_a_backfill_lands_within_its_bound_and_appends_wait_for_one_at_most() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"key\"\ntype = \"duplicate-key\"\ncolumns = [\"order_id\", \"order_date\"]\n\
        [[class]]\nname = \"ingest\"\nprefix = \"ingest/\"\noverlap = \"allow-with-duplicate-check\"\n\
        checks = [\"key\"]\nafter-landing = \"drop\"\n\
        [[class]]\nname = \"backfill\"\nprefix = \"backfill/\"\nage-bound = \"5m\"\nchecks = [\"key\"]\n";
    let house = Arc::new(House::empty(policy).await);
    let old: Vec<_> = (1..=30).map(|day| order(i64::from(day), day)).collect();
    house.append("main", &old).await;
    let record = json!({
        "v": 1, "id": "recompute", "op": "overwrite-where", "where": "order_id > 0",
        "query": "SELECT order_id, order_date, 'done' AS status, amount FROM target",
    });
    house.branch("backfill/all").await;
    let done: Vec<_> =
        old.iter().map(|row| crate::support::Order { status: "done".to_owned(), ..row.clone() }).collect();
    house.recorded("backfill/all", &record, &(1..=30).collect::<Vec<_>>(), &done).await;
    house.append("main", &[order(99, 30)]).await;
    let backfill = house.enqueue("backfill/all").await;
    let enqueued_ms = house.request(backfill).await.enqueued_at_ms;

    let (worker, script) = house.scripted().await;
    let epoch = house.ledger.lead("me", i64::MAX / 2, house.now()).await.unwrap().unwrap();
    let mut appends = Vec::new();
    let arrived = Arc::new(std::sync::Mutex::new(Vec::new()));
    for number in 0..14_i64 {
        house.advance(MINUTE / 2);
        appends.push(arrive(&house, 1_000 + number).await);
        let aged = house.now() - enqueued_ms >= 5 * MINUTE;
        if aged && !house.request(backfill).await.state.is_final() {
            // Its turn: 20 minutes pass while it is checked, and appends keep arriving.
            let (during, arrived) = (Arc::clone(&house), Arc::clone(&arrived));
            script.at(Moment::After(script.commits() + 2), move || async move {
                for number in 0..40 {
                    during.advance(MINUTE / 2);
                    let request = arrive(&during, 2_000 + number).await;
                    arrived.lock().unwrap().push(request);
                }
            });
        }
        let _ = worker.tick(epoch).await.unwrap();
    }
    while worker.tick(epoch).await.unwrap().changed {}
    script.assert_played();

    let row = house.request(backfill).await;
    assert_eq!(row.state.to_string(), "landed", "{:?}", row.detail);
    let admitted_after = row.admitted_at_ms.unwrap() - enqueued_ms;
    assert!(admitted_after <= 6 * MINUTE, "by age: admitted after {admitted_after} ms");
    assert_eq!(row.attempts, 1, "arrivals behind it never restarted it");
    appends.extend(arrived.lock().unwrap().drain(..));
    let longest = 21 * MINUTE + MINUTE;
    for request in &appends {
        let row = house.request(*request).await;
        assert_eq!(row.state.to_string(), "landed");
        assert_eq!(row.attempts, 1, "one validation a merge");
        let waited = row.ended_at_ms.unwrap() - row.enqueued_at_ms;
        assert!(waited <= longest, "request {request} waited {waited} ms for more than one backfill");
    }
    let rows = house.rows("main").await;
    assert_eq!(rows.len(), 31 + appends.len(), "no row that landed meanwhile is lost");
    assert!(rows.iter().filter(|row| row.id <= 30).all(|row| row.status == "done"));
    house.assert_sound().await;
}

async fn arrive(house: &House, key: i64) -> RequestId {
    let name = format!("ingest/{key}");
    house.append_on_new(&name, &[order(key, 31)]).await;
    house.enqueue(&name).await
}
