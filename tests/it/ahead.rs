//! The next train's files are written while one is under way; whatever happens meanwhile, what lands is what a
//! worker that never looked ahead would have landed, and nothing is left of a guess that was wrong.

use crate::support::scripted::{Do, Kind};
use crate::support::{House, ORDERS_POLICY, drain, order};
use mergeberg_kernel::ids::RequestId;

const TRAIN: usize = 2;

/// Six appends, two a train.
async fn house_with_six() -> (House, Vec<RequestId>) {
    let policy =
        ORDERS_POLICY.replace("prefix = \"ingest/\"", &format!("prefix = \"ingest/\"\nbatch-size = {TRAIN}"));
    let house = House::orders(&policy).await;
    let mut requests = Vec::new();
    for id in 4..10 {
        let name = format!("ingest/{id}");
        house.append_on_new(&name, &[order(id, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    (house, requests)
}

impl House {
    async fn all_landed_once(&self, requests: &[RequestId], others: &[i64]) {
        for request in requests {
            assert_eq!(self.state(*request).await, "landed");
        }
        let mut keys: Vec<i64> = (1..10).chain(others.iter().copied()).collect();
        keys.sort_unstable();
        assert_eq!(self.keys("main").await, keys);
        self.assert_sound().await;
        assert_eq!(self.orphans().await, Vec::<std::path::PathBuf>::new());
        // Rule N3: each snapshot is younger than its parent.
        let facts = self.loaded().await.facts.clone();
        for snapshot in facts.snapshots.iter() {
            if let Some(parent) = snapshot.parent.and_then(|id| facts.snapshots.get(id)) {
                assert!(parent.timestamp_ms < snapshot.timestamp_ms, "{} and its parent", snapshot.id);
                assert!(parent.sequence_number < snapshot.sequence_number, "{} and its parent", snapshot.id);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_train_is_written_while_one_is_under_way() {
    let (house, requests) = house_with_six().await;
    let (catalog, worker) = house.misled_worker();
    drain(&worker).await;
    house.all_landed_once(&requests, &[]).await;
    assert_eq!((catalog.commits(Kind::Staging), catalog.commits(Kind::Landing)), (3, 3));
    assert_eq!(worker.trains_from_ahead(), 2, "all but the first");
    // Still in the order of arrival.
    let ended: Vec<Option<i64>> = {
        let mut ended = Vec::new();
        for request in &requests {
            ended.push(house.request(*request).await.ended_at_ms);
        }
        ended
    };
    assert!(ended.is_sorted(), "{ended:?}");
}

/// The target moves under the first train: both what was staged and what was written ahead is void.
#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_moves_voids_what_was_written_ahead() {
    for kind in [Kind::Staging, Kind::Landing] {
        let (house, requests) = house_with_six().await;
        let (catalog, worker) = house.misled_worker();
        catalog.next(kind, Do::First(house.stranger_appends("main", 50, 22)));
        drain(&worker).await;
        house.all_landed_once(&requests, &[50]).await;
        assert_eq!(worker.trains_from_ahead(), 2, "{kind:?}: the first train is written twice");
    }
}

/// Another branch takes the sequence numbers that the next train was written with.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_grows_meanwhile_voids_what_was_written_ahead() {
    let (house, requests) = house_with_six().await;
    house.branch("feature/x").await;
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::First(house.stranger_appends("feature/x", 50, 25)));
    drain(&worker).await;
    house.all_landed_once(&requests, &[]).await;
    assert_eq!(worker.trains_from_ahead(), 1);
}

/// A request of the next train is cancelled while the train before it is landed.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_leaves_takes_its_files_with_it() {
    let (house, requests) = house_with_six().await;
    let (catalog, worker) = house.misled_worker();
    let (ledger, leaves, now) = (house.ledger.clone(), requests[2], house.now());
    let cancel = async move {
        let by = mergeberg_kernel::ids::Principal::new("somebody");
        ledger.cancel(leaves, &by, now).await.unwrap();
    };
    catalog.next(Kind::Landing, Do::First(Box::pin(cancel)));
    drain(&worker).await;
    assert_eq!(house.state(leaves).await, "cancelled");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 7, 8, 9]);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    assert_eq!(worker.trains_from_ahead(), 1);
}

/// A data file of the next train is removed after its manifests were written (rule R10).
#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_files_are_looked_for_again_right_before_staging() {
    let (house, requests) = house_with_six().await;
    let table = house.loaded().await;
    let head = house.head("ingest/6").await.unwrap();
    let store = mergeberg::table::manifests::ManifestStore::new(1 << 20);
    let change = store.changes(&table, table.facts.snapshots.get(head).unwrap()).await.unwrap();
    let path = change.added[0].path.strip_prefix("file://").unwrap().to_owned();
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::First(Box::pin(async move { std::fs::remove_file(path).unwrap() })));
    drain(&worker).await;
    assert_eq!(house.state(requests[2]).await, "refused(data-file-missing)");
    for request in requests.iter().filter(|request| **request != requests[2]) {
        assert_eq!(house.state(*request).await, "landed");
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 7, 8, 9]);
}

/// A violation that is seen ahead is told of the train that is due, by the evidence of that train.
#[tokio::test(flavor = "multi_thread")]
async fn checks_of_what_is_written_ahead_serve_when_they_passed() {
    let (house, requests) = house_with_six().await;
    house.append_on_new("ingest/again", &[order(4, 22)]).await;
    let twice = house.enqueue("ingest/again").await;
    let (_, worker) = house.misled_worker();
    drain(&worker).await;
    house.all_landed_once(&requests, &[]).await;
    assert_eq!(house.state(twice).await, "refused(duplicate-key)");
    assert_eq!(
        (worker.trains_from_ahead(), worker.trains_checked_ahead()),
        (3, 2),
        "all but the first and the last"
    );
    for request in requests {
        let evidence = house.ledger.evidence_of_request(request).await.unwrap();
        let mut checks: Vec<&str> = evidence.iter().map(|row| row.evidence.check.as_str()).collect();
        checks.dedup();
        assert!(checks.contains(&"lineage") && checks.len() > 2, "{checks:?}");
    }
}
