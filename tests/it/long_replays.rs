//! What a replay that takes long does meanwhile: names its files, tells how far it is, and stops when it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mergeberg::table::branch_writer::Removal;
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::worker::run::{Ended, RunOptions};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{Principal, RequestId};
use serde_json::json;
use tokio::sync::watch;

use crate::support::scripted::{Do, Kind, Scripted};
use crate::support::{House, Order, branch, drain, order};

const POLICY: &str = r#"
table = "shop.orders"

[[class]]
name = "slow"
prefix = "slow/"
replay-time-bound = "1ms"

[[class]]
name = "default"
prefix = ""
"#;

/// Rows of a file that is read and written in several batches.
const MANY: i64 = 20_000;

/// Order 1 of a file with two rows becomes another.
async fn update_waits(source: &str) -> (House, RequestId) {
    let house = House::orders(POLICY).await;
    let request = enqueue(&house, source, Did::Pay, 1, 20).await;
    (house, request)
}

/// One row of a large file becomes another: all of it is written again.
async fn long_update_waits() -> (House, RequestId) {
    let house = House::orders(POLICY).await;
    let many: Vec<Order> = (0..MANY).map(|at| order(100_000 + at, 24)).collect();
    house.append("main", &many).await;
    let request = enqueue(&house, "work/a", Did::Pay, 100_000, 24).await;
    (house, request)
}

/// What a branch did with an order.
#[derive(Clone, Copy, PartialEq)]
enum Did {
    Pay,
    Delete,
}

/// Main took another order of the same day meanwhile, whose id is the day.
async fn enqueue(house: &House, source: &str, did: Did, id: i64, day: u32) -> RequestId {
    house.branch(source).await;
    let filter = format!("order_date = DATE '2026-08-{day}' AND order_id = {id}");
    let record = match did {
        Did::Pay => {
            json!({"v": 1, "id": source, "op": "update-where", "where": filter, "set": {"status": "'paid'"}})
        }
        Did::Delete => json!({"v": 1, "id": source, "op": "delete-where", "where": filter}),
    };
    let summary = BTreeMap::from([("mergeberg.operation".to_owned(), record.to_string())]);
    let wanted = format!("2026-08-{day}");
    let remove = Removal::Files(Box::new(move |file| {
        file.fact.partition.fields.iter().any(|field| field.value.as_deref() == Some(wanted.as_str()))
    }));
    let mut rows: Vec<Order> = house.rows(source).await.into_iter().filter(|row| row.day == day).collect();
    if did == Did::Delete {
        rows.retain(|row| row.id != id);
    }
    for row in rows.iter_mut().filter(|row| row.id == id) {
        row.status = "paid".to_owned();
    }
    house.write(source, "overwrite", &rows, remove, summary).await;
    house.append("main", &[order(i64::from(day), day)]).await;
    house.enqueue(source).await
}

/// A worker whose replays name their files after each batch.
fn hasty(house: &House) -> (Arc<Scripted>, mergeberg::worker::context::Worker) {
    let (catalog, mut worker) = house.misled_worker();
    worker.checkpoint_every = Duration::ZERO;
    (catalog, worker)
}

async fn files_on_branch(house: &House, name: &str) -> BTreeSet<String> {
    let table = house.loaded().await;
    let head = table.facts.head(&branch(name)).unwrap();
    house.files_at(&table, head).await.into_keys().map(|path| path.to_string()).collect()
}

/// The first checkpoint is seen from outside, when the second one is about to be made.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_long_replay_names_its_files_in_the_catalog() {
    let (house, request) = long_update_waits().await;
    let (catalog, worker) = hasty(&house);
    let (seen, mut look) = watch::channel(None);
    let (inner, table) = (Arc::clone(&house.catalog), house.table.clone());
    catalog.next(Kind::Staging, Do::First(Box::pin(async {})));
    let looking = async move {
        let table = inner.load(&table).await.unwrap();
        let is_made = |reference: &&RefFact| reference.name.as_str().ends_with("-files");
        let made: Vec<RefFact> = table.facts.refs.values().filter(is_made).cloned().collect();
        assert_eq!(made.len(), 1, "{made:?}");
        let snapshot = table.facts.snapshots.get(made[0].snapshot_id).unwrap().clone();
        let named = ManifestStore::new(64 << 20).changes(&table, &snapshot).await.unwrap();
        let named: Vec<String> = named.added.iter().map(|file| file.path.to_string()).collect();
        seen.send(Some((snapshot, named))).unwrap();
    };
    catalog.next(Kind::Staging, Do::First(Box::pin(looking)));
    drain(&worker).await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);

    let (made, named) = look.borrow_and_update().clone().expect("there was a second checkpoint");
    assert_eq!(made.parent, None);
    assert!(made.summary.contains_key("mergeberg.checkpoint"));
    let files = files_on_branch(&house, "main").await;
    assert!(!named.is_empty() && named.iter().all(|path| files.contains(path)), "{named:?} of {files:?}");

    let replay = house.ledger.replay_of(request).await.unwrap().unwrap();
    assert_eq!(replay.rows_written, MANY, "{replay:?}");
    assert!(
        replay.files_written > 1 && replay.rows_read >= MANY && replay.rows_to_read >= MANY,
        "{replay:?}"
    );
    assert!(replay.checkpoints > 1 && replay.last_checkpoint_ms.is_some(), "{replay:?}");
    // The staging commit has taken them away, and their own files are gone.
    assert_eq!(house.refs().await, ["main", "work/a"]);
    let now = house.loaded().await;
    assert!(now.facts.snapshots.iter().all(|s| !s.summary.contains_key("mergeberg.checkpoint")));
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    let rows = house.rows("main").await;
    assert_eq!(rows.len(), 4 + 20_000);
    let paid: Vec<i64> = rows.iter().filter(|row| row.status == "paid").map(|row| row.id).collect();
    assert_eq!(paid, [100_000]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_replay_ends_between_two_batches() {
    let (house, request) = long_update_waits().await;
    let (catalog, worker) = hasty(&house);
    let (ledger, now) = (house.ledger.clone(), house.now());
    let cancel = async move {
        ledger.cancel(request, &Principal::new("ann"), now).await.unwrap();
    };
    catalog.next(Kind::Staging, Do::First(Box::pin(cancel)));
    let main = house.head("main").await;
    drain(&worker).await;
    assert_eq!(house.state(request).await, "cancelled");
    let replay = house.ledger.replay_of(request).await.unwrap().unwrap();
    assert!((1..MANY).contains(&replay.rows_written), "{replay:?}");
    assert_eq!(catalog.commits(Kind::Staging), 1, "one checkpoint and no train");
    assert_eq!(
        (house.head("main").await, house.refs().await),
        (main, vec!["main".to_owned(), "work/a".to_owned()])
    );
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_worker_ends_its_replay_and_the_next_one_begins_anew() {
    let (house, request) = update_waits("work/a").await;
    let (catalog, worker) = hasty(&house);
    let (stop, stopped) = watch::channel(false);
    let asked = async move {
        stop.send(true).unwrap();
    };
    catalog.next(Kind::Staging, Do::First(Box::pin(asked)));
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: 60_000 };
    assert_eq!(worker.run(options, stopped).await.unwrap(), Ended::Stopped);
    assert_eq!(house.state(request).await, "queued");
    assert!(house.detail(request).await.contains("told to stop"), "{}", house.detail(request).await);
    assert_eq!(house.refs().await, ["main", "work/a"]);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());

    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 20]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_takes_longer_than_its_class_allows_is_refused() {
    let (house, request) = update_waits("slow/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(replay-failed)");
    let detail = house.detail(request).await;
    assert!(detail.contains("it took longer than 1ms, the class's replay-time-bound"), "{detail}");
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
}

/// A catalog that takes no checkpoint is no reason to end the work.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_that_is_refused_or_lost_ends_nothing() {
    for act in ["refused", "lost", "unanswered", "moved"] {
        let (house, request) = update_waits("work/a").await;
        let (catalog, worker) = hasty(&house);
        catalog.next(
            Kind::Staging,
            match act {
                "refused" => Do::FirstThenRefuse(Box::pin(async {}), "no"),
                "lost" => Do::ApplyThenLose,
                "unanswered" => Do::LoseBeforeApplying,
                _ => Do::SayPointerMoved,
            },
        );
        drain(&worker).await;
        assert_eq!(house.state(request).await, "landed", "{act}: {}", house.detail(request).await);
        assert_eq!(house.keys("main").await, [1, 2, 3, 20], "{act}");
        assert_eq!(house.refs().await, ["main", "work/a"], "{act}");
        assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new(), "{act}");
        house.assert_sound().await;
    }
}

/// Operations of one train, each with its checkpoints.
#[tokio::test(flavor = "multi_thread")]
async fn operations_of_one_train_run_side_by_side() {
    let house = House::orders(POLICY).await;
    house.append("main", &[order(5, 22), order(6, 22), order(7, 23), order(9, 23)]).await;
    let mut requests = Vec::new();
    for (id, day) in [(1, 20), (3, 21), (5, 22), (7, 23)] {
        requests.push(enqueue(&house, &format!("work/{day}"), Did::Delete, id, day).await);
    }
    let (_catalog, worker) = hasty(&house);
    drain(&worker).await;
    let mut trains = BTreeSet::new();
    for request in requests {
        let row = house.request(request).await;
        assert_eq!(row.state.to_string(), "landed", "{}", house.detail(request).await);
        trains.insert(row.train);
    }
    assert_eq!(trains.len(), 1, "one train");
    assert_eq!(house.keys("main").await, [2, 6, 9, 20, 21, 22, 23]);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    house.assert_sound().await;
}
