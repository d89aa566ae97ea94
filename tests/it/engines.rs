//! Real engines on the same tables: PyIceberg writes branches and `main`, PyIceberg and DuckDB read what the
//! queue landed. Without the engines (`MERGEBERG_PYTHON`) these tests say so and do nothing.

use std::sync::mpsc;

use mergeberg::ledger::ForeignKind;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::RequestId;
use serde_json::json;

use crate::support::child::{LONG_LEASE, until};
use crate::support::python::{Python, json_rows};
use crate::support::{House, Order, branch, main_branch, order};

const POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[check]]
id = "day-not-empty"
type = "row-count"
min = 1

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]
after-landing = "drop"

[[class]]
name = "strict"
prefix = "strict/"
checks = ["one-order-once"]

[[class]]
name = "transform"
prefix = "transform/"
checks = ["one-order-once", "day-not-empty"]

[[class]]
name = "default"
prefix = ""
"#;

fn done(id: i64, day: u32) -> Order {
    Order { status: "done".to_owned(), ..order(id, day) }
}

impl House {
    /// What we, PyIceberg and DuckDB read on main.
    async fn assert_rows(&self, python: &mut Python, expected: &[Order]) {
        let mut expected = expected.to_vec();
        expected.sort();
        assert_eq!(self.rows("main").await, expected, "as we read it");
        assert_eq!(python.rows("main"), expected, "as PyIceberg and DuckDB read it");
    }

    async fn assert_landed(&self, request: RequestId, how: &str) {
        let row = self.request(request).await;
        let (state, class) = (row.state.to_string(), row.classification.unwrap_or_default());
        assert_eq!((state.as_str(), class.as_str()), ("landed", how), "{:?}: {:?}", row.source, row.detail);
    }

    /// The queue has seen main as it is now: what comes after is told.
    async fn knows_main(&self) {
        let (head, uuid) = (self.head("main").await, self.loaded().await.facts.uuid.clone());
        self.ledger.set_target_head(&self.table, &uuid, &main_branch(), head).await.unwrap();
    }

    async fn foreign_kinds(&self) -> Vec<ForeignKind> {
        let uuid = self.loaded().await.facts.uuid.clone();
        let rows = self.ledger.foreign(&uuid, &main_branch()).await.unwrap();
        rows.iter().map(|row| row.kind).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_of_pyiceberg_land_and_it_goes_on_from_there() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    // Four kinds of writes, each from S2.
    python.branch("ingest/a");
    python.append("ingest/a", &[order(4, 22)]);
    python.branch("transform/overwrite");
    let overwritten = python.ok(
        "overwrite",
        json!({ "branch": "transform/overwrite", "filter": "order_date = '2026-08-21'",
                "rows": json_rows(&[done(3, 21)]) }),
    );
    assert_eq!(overwritten["snapshots"].as_array().unwrap().len(), 2, "a delete, then an append");
    python.branch("transform/dynamic");
    python.ok(
        "dynamic_partition_overwrite",
        json!({ "branch": "transform/dynamic", "rows": json_rows(&[done(1, 20), done(2, 20)]) }),
    );
    python.branch("ingest/new-day");
    python.append("ingest/new-day", &[order(5, 23), order(6, 24)]);
    let mut requests = Vec::new();
    for name in ["ingest/a", "transform/overwrite", "transform/dynamic", "ingest/new-day"] {
        requests.push(house.enqueue(name).await);
    }
    house.drain().await;
    house.assert_landed(requests[0], "fast-forward").await;
    for request in &requests[1..] {
        house.assert_landed(*request, "cherry-pick").await;
    }
    let mut expected = vec![done(1, 20), done(2, 20), done(3, 21), order(4, 22), order(5, 23), order(6, 24)];
    house.assert_rows(&mut python, &expected).await;

    // PyIceberg commits on top of what we landed, on main and on a branch of that; we go on.
    python.append("main", &[order(7, 24)]);
    python.branch("ingest/b");
    python.append("ingest/b", &[order(8, 25)]);
    python.ok("delete", json!({ "filter": "order_id = 7" }));
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    house.assert_landed(request, "cherry-pick").await;
    expected.push(order(8, 25));
    house.assert_rows(&mut python, &expected).await;
    assert_eq!(house.foreign_kinds().await, [ForeignKind::Bypass, ForeignKind::Bypass]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn overwrites_of_pyiceberg_are_run_again_on_what_main_became() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    // Recorded: delete and append carry the same record and are one operation.
    let record = json!({
        "v": 1, "id": "finish-20", "op": "overwrite-where", "where": "order_date = DATE '2026-08-20'",
        "query": "SELECT order_id, order_date, 'done' AS status, amount FROM target \
                  WHERE order_date = DATE '2026-08-20'",
    });
    python.branch("transform/recorded");
    python.ok(
        "overwrite",
        json!({ "branch": "transform/recorded", "filter": "order_date = '2026-08-20'",
                "rows": json_rows(&[done(1, 20), done(2, 20)]),
                "snapshot_properties": { "mergeberg.operation": record.to_string() } }),
    );
    // Not recorded, recognised by content.
    python.branch("transform/derived");
    python.ok(
        "dynamic_partition_overwrite",
        json!({ "branch": "transform/derived", "rows": json_rows(&[done(3, 21)]) }),
    );
    // Meanwhile a stranger appends to both days.
    python.append("main", &[order(8, 20), order(9, 21)]);
    let requests = [house.enqueue("transform/recorded").await, house.enqueue("transform/derived").await];
    house.drain().await;
    for request in requests {
        house.assert_landed(request, "rebase").await;
    }
    // The query saw 8; the replaced day lost 9.
    let expected = [done(1, 20), done(2, 20), done(8, 20), done(3, 21)];
    house.assert_rows(&mut python, &expected).await;
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_that_we_made_is_pyicebergs_too() {
    let house = House::in_real_time(POLICY, LONG_LEASE).await;
    let Some(mut python) = Python::start(house.dir.path()) else { return };
    house.assert_rows(&mut python, &[order(1, 20), order(2, 20), order(3, 21)]).await;
    assert_eq!(
        python.ok("list_tables", json!({ "namespace": "shop" }))["tables"],
        json!([["shop", "orders"]])
    );
    // Both write branches, and each other's are read.
    python.branch("ingest/theirs");
    python.append("ingest/theirs", &[order(4, 22)]);
    house.append_on_new("ingest/ours", &[order(5, 22)]).await;
    assert_eq!(python.rows("ingest/ours"), house.rows("ingest/ours").await);
    assert_eq!(python.rows("ingest/theirs"), house.rows("ingest/theirs").await);
    let requests = [house.enqueue("ingest/theirs").await, house.enqueue("ingest/ours").await];
    assert!(!house.drain_in_child(None));
    house.assert_landed(requests[0], "fast-forward").await;
    house.assert_landed(requests[1], "cherry-pick").await;
    python.append("main", &[order(6, 23)]);
    let expected = [order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(5, 22), order(6, 23)];
    house.assert_rows(&mut python, &expected).await;
    // Seen although nobody waits.
    assert!(!house.drain_in_child(None));
    assert_eq!(house.foreign_kinds().await, [ForeignKind::Bypass]);
    house.balanced_report();
    house.assert_sound().await;
}

/// Case O10 (b) and (c): the label is a hint, the rows decide. The append's class refuses every overlap.
#[tokio::test(flavor = "multi_thread")]
async fn case_o10_a_compaction_on_main_is_no_conflict_whatever_its_label() {
    for label in ["replace", "overwrite"] {
        let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
        python.append("main", &[order(10, 20), order(11, 21)]);
        python.branch("strict/append");
        python.append("strict/append", &[order(4, 20)]);
        python.branch("transform/day");
        python.ok(
            "dynamic_partition_overwrite",
            json!({ "branch": "transform/day", "rows": json_rows(&[done(3, 21), done(11, 21)]) }),
        );
        let requests = [house.enqueue("strict/append").await, house.enqueue("transform/day").await];
        house.knows_main().await;
        let compacted =
            python.ok("compact", json!({ "filter": "order_date >= '2026-08-20'", "label": label }));
        assert_eq!((&compacted["removed_files"], &compacted["added_files"]), (&json!(4), &json!(2)));
        house.drain().await;
        house.assert_landed(requests[0], "cherry-pick").await;
        // The files that it replaced are gone: the day is replaced again, in the new files.
        house.assert_landed(requests[1], "rebase").await;
        assert_eq!(house.foreign_kinds().await, [ForeignKind::Maintenance], "{label}");
        let expected = [order(1, 20), order(2, 20), order(10, 20), order(4, 20), done(3, 21), done(11, 21)];
        house.assert_rows(&mut python, &expected).await;
        house.assert_sound().await;
    }
}

/// PyIceberg's own way to compact: a delete and an append, of which neither alone is provably harmless.
#[tokio::test(flavor = "multi_thread")]
async fn case_o10_a_compaction_in_two_snapshots_loses_nothing() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    python.append("main", &[order(10, 20), order(11, 21)]);
    for (name, id) in [("ingest/append", 4), ("strict/append", 5)] {
        python.branch(name);
        python.append(name, &[order(id, 20)]);
    }
    python.branch("transform/day");
    python.ok(
        "dynamic_partition_overwrite",
        json!({ "branch": "transform/day", "rows": json_rows(&[done(3, 21), done(11, 21)]) }),
    );
    let first = house.enqueue("ingest/append").await;
    let strict = house.enqueue("strict/append").await;
    let day = house.enqueue("transform/day").await;
    let compacted =
        python.ok("compact", json!({ "filter": "order_date >= '2026-08-20'", "mode": "two-snapshots" }));
    assert_eq!(compacted["snapshots"].as_array().unwrap().len(), 2);
    house.drain().await;
    house.assert_landed(first, "cherry-pick").await;
    house.assert_landed(day, "rebase").await;
    // Stricter, never looser: what is not proved counts as a change of data.
    assert_eq!(house.state(strict).await, "refused(overlapping-append)");
    let expected = [order(1, 20), order(2, 20), order(10, 20), order(4, 20), done(3, 21), done(11, 21)];
    house.assert_rows(&mut python, &expected).await;
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o17_half_of_the_write_went_to_main() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    house.knows_main().await;
    // The delete reached the branch, the append main.
    python.branch("transform/half");
    python.ok("delete", json!({ "branch": "transform/half", "filter": "order_date = '2026-08-21'" }));
    let request = house.enqueue("transform/half").await;
    let stranger = python.append("main", &[done(3, 21)]);
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(conflict)");
    let uuid = house.loaded().await.facts.uuid.clone();
    let bypasses = house.ledger.foreign(&uuid, &main_branch()).await.unwrap();
    assert_eq!(bypasses.len(), 1);
    assert_eq!((bypasses[0].snapshot.0, bypasses[0].kind), (stranger, ForeignKind::Bypass));
    assert!(bypasses[0].text.contains("1 rows added"), "{}", bypasses[0].text);

    // Alone it is a delete without its append: the row-count rule shows it.
    python.branch("transform/alone");
    python.ok("delete", json!({ "branch": "transform/alone", "filter": "order_date = '2026-08-21'" }));
    let alone = house.enqueue("transform/alone").await;
    house.drain().await;
    assert_eq!(house.state(alone).await, "refused(row-count)");
    house.assert_rows(&mut python, &[order(1, 20), order(2, 20), order(3, 21), done(3, 21)]).await;
    house.assert_sound().await;
}

/// PyIceberg moves a branch without its retention (rule R4): ours on main stays, and the branch lands.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r4_retention_that_pyiceberg_wipes_does_not_hurt() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    let main = house.loaded().await.facts.refs[&main_branch()].clone();
    let kept = RefKind::Branch { min_snapshots_to_keep: Some(7), max_snapshot_age_ms: Some(864_000_000) };
    let update = Update::SetRef(RefFact { kind: kept.clone(), ..main });
    let loaded = house.loaded().await;
    use mergeberg::table::catalog::{Catalog, CommitOutcome};
    let outcome = house.catalog.commit(&loaded, &[], vec![update]).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");

    python.ok(
        "create_branch",
        json!({ "branch": "ingest/a", "max_ref_age_ms": 864_000_000, "min_snapshots_to_keep": 3 }),
    );
    python.append("ingest/a", &[order(4, 22)]);
    let refs = python.ok("refs", json!({}))["refs"].clone();
    let request = house.enqueue("ingest/a").await;
    house.drain().await;
    house.assert_landed(request, "fast-forward").await;
    assert_eq!(refs["ingest/a"]["max_ref_age_ms"], json!(null), "PyIceberg wiped it: {refs}");
    assert_eq!(house.loaded().await.facts.refs[&main_branch()].kind, kept, "as it was before the landing");
    house.assert_rows(&mut python, &[order(1, 20), order(2, 20), order(3, 21), order(4, 22)]).await;

    // Also on main, and a fast-forward there takes what is then.
    python.append("main", &[order(5, 23)]);
    house.append_on_new("ingest/b", &[order(6, 23)]).await;
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    house.assert_landed(request, "fast-forward").await;
    house.assert_sound().await;
}

/// Our worker runs as a process; PyIceberg writes branches in one process and main in another.
#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_writes_branches_and_main_while_the_worker_runs() {
    const BRANCHES: i64 = 12;
    const COMMITS: i64 = 6;
    let house = House::in_real_time(POLICY, LONG_LEASE).await;
    let (Some(mut branches), Some(mut direct)) =
        (Python::start(house.dir.path()), Python::start(house.dir.path()))
    else {
        return;
    };
    let worker = house.start_worker(&[]);
    // The queue knows main before the strangers come.
    house.append_on_new("ingest/first", &[order(50, 22)]).await;
    let mut requests = vec![house.enqueue("ingest/first").await];
    until("the first has landed", async || house.state(requests[0]).await == "landed").await;

    let (written, to_enqueue) = mpsc::channel();
    let writing = std::thread::spawn(move || {
        for id in 0..BRANCHES {
            let name = if id % 4 == 3 { format!("transform/{id}") } else { format!("ingest/{id}") };
            branches.branch(&name);
            if id % 4 == 3 {
                // A day of its own, written for the first time and then replaced.
                let day = u32::try_from(id).unwrap() + 1;
                branches.append(&name, &[order(100 + id, day)]);
                branches.ok(
                    "dynamic_partition_overwrite",
                    json!({ "branch": name, "rows": json_rows(&[done(100 + id, day)]) }),
                );
            } else {
                branches.append(&name, &[order(100 + id, 23)]);
            }
            written.send(name).unwrap();
        }
        branches
    });
    let bypassing = std::thread::spawn(move || {
        let mut snapshots = Vec::new();
        for id in 0..COMMITS {
            snapshots.push(direct.append("main", &[order(200 + id, 23)]));
        }
        snapshots
    });
    let names = tokio::task::spawn_blocking(move || to_enqueue.into_iter().collect::<Vec<String>>());
    for name in names.await.unwrap() {
        requests.push(house.enqueue(&name).await);
    }
    let mut python = writing.join().unwrap();
    let mut bypasses = bypassing.join().unwrap();
    for request in &requests {
        until("it has ended", async || house.request(*request).await.state.is_final()).await;
    }
    let output = worker.stop();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    house.drain_in_child(None);

    for request in &requests {
        let row = house.request(*request).await;
        assert_eq!(row.state.to_string(), "landed", "{}: {:?}", row.source, row.detail);
    }
    let mut expected = vec![order(1, 20), order(2, 20), order(3, 21), order(50, 22)];
    for id in 0..BRANCHES {
        let day = u32::try_from(id).unwrap() + 1;
        expected.push(if id % 4 == 3 { done(100 + id, day) } else { order(100 + id, 23) });
    }
    expected.extend((0..COMMITS).map(|id| order(200 + id, 23)));
    house.assert_rows(&mut python, &expected).await;

    let uuid = house.loaded().await.facts.uuid.clone();
    let foreign = house.ledger.foreign(&uuid, &main_branch()).await.unwrap();
    let mut told: Vec<i64> = foreign.iter().map(|row| row.snapshot.0).collect();
    told.sort_unstable();
    bypasses.sort_unstable();
    assert_eq!(told, bypasses, "every direct commit is told, and nothing else");
    assert!(foreign.iter().all(|row| row.kind == ForeignKind::Bypass));
    house.balanced_report();
    house.assert_sound().await;
    assert!(house.ledger.open_intents().await.unwrap().is_empty());
    assert!(house.head("ingest/1").await.is_none(), "{} is dropped", branch("ingest/1"));
}
