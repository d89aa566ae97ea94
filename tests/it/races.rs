//! Two worker processes on one catalog and one ledger, and writers who do not wait for anybody.

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg::table::branch_writer::{BranchWrite, BranchWriter, Removal};
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::ManifestStore;
use mergeberg_kernel::ids::RequestId;

use crate::support::child::{LONG_LEASE, SHORT_LEASE, Settings, real_now, until};
use crate::support::{House, ORDERS_POLICY, batch, branch, drain, main_branch, order};

impl House {
    /// A writer of its own, as another process would be: its own catalog connection and cache.
    async fn another_writer(&self, seed: u64) -> BranchWriter {
        let catalog = Self::catalog_in(self.dir.path(), &self.clock, false).await;
        let clock = Arc::clone(&self.clock);
        let numbers = std::sync::atomic::AtomicU64::new(seed);
        BranchWriter {
            catalog: Arc::new(catalog) as Arc<dyn Catalog>,
            store: ManifestStore::new(16 << 20),
            clock: Arc::new(move || {
                clock.fetch_max(real_now(), std::sync::atomic::Ordering::SeqCst).max(real_now())
            }),
            random: Arc::new(move || {
                let n = numbers.fetch_add(0x9e37_79b9_7f4a_7c15, std::sync::atomic::Ordering::SeqCst);
                (n ^ (n >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
            }),
        }
    }

    async fn append_by(&self, writer: &BranchWriter, name: &str, id: i64, day: u32) {
        let write = BranchWrite {
            branch: branch(name),
            label: "append".to_owned(),
            rows: vec![batch(&[order(id, day)])],
            remove: Removal::Nothing,
            summary: Default::default(),
        };
        writer.write(&self.table, write).await.unwrap();
    }

    /// Every request landed, each key is there once, every commit on main is explained.
    pub async fn assert_nothing_lost_nothing_twice(&self, requests: &[RequestId], keys: &[i64]) {
        for request in requests {
            assert_eq!(self.state(*request).await, "landed", "request {request}");
        }
        assert_eq!(self.keys("main").await, keys);
        let mut published = BTreeSet::new();
        for receipt in self.ledger.receipts(0, i64::MAX).await.unwrap() {
            for car in receipt.intent.cars {
                assert!(published.insert(car.request), "request {} landed twice", car.request);
            }
        }
        assert_eq!(published, requests.iter().copied().collect());
        assert!(self.ledger.open_intents().await.unwrap().is_empty());
        self.assert_sound().await;
        self.balanced_report();
    }
}

/// Branch writers commit all the time, two workers serve the queue, and requests come in while they do.
pub async fn race(house: &House, kill_the_leader: bool) {
    const WRITERS: i64 = 3;
    const SHARDS: i64 = 8;
    let mut workers = vec![house.start_worker(&[]), house.start_worker(&[])];

    let writers = (0..WRITERS).map(|number| {
        async move {
            let writer = house.another_writer(number.unsigned_abs() + 1).await;
            let mut requests = Vec::new();
            for shard in 0..SHARDS {
                let (id, name) = (100 * (number + 1) + shard, format!("ingest/{number}-{shard}"));
                let head = house.head("main").await.unwrap();
                writer.create_branch(&house.table, &branch(&name), head).await.unwrap();
                house.append_by(&writer, &name, id, 22 + u32::try_from(number).unwrap()).await;
                requests.push(house.enqueue(&name).await);
                // And a branch of its own that nobody merges: only the table's pointer moves.
                house.append_by(&writer, &format!("feature/{number}"), 1_000 + id, 29).await;
            }
            requests
        }
    });
    let all_written = futures::future::join_all(writers);
    let requests: Vec<RequestId> = if kill_the_leader {
        let killing = async {
            let some = async || !house.ledger.receipts(0, i64::MAX).await.unwrap().is_empty();
            until("something has landed", some).await;
            let leader = house.ledger.leader().await.unwrap().unwrap();
            let at = workers.iter().position(|w| leader.holder.starts_with(&format!("{}-", w.id()))).unwrap();
            workers.remove(at).kill();
        };
        tokio::join!(all_written, killing).0.into_iter().flatten().collect()
    } else {
        all_written.await.into_iter().flatten().collect()
    };
    for request in &requests {
        until("it has landed", async || house.request(*request).await.state.is_final()).await;
    }
    for worker in workers {
        let output = worker.stop();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let mut keys = vec![1, 2, 3];
    for number in 1..=WRITERS {
        keys.extend((0..SHARDS).map(|shard| 100 * number + shard));
    }
    house.assert_nothing_lost_nothing_twice(&requests, &keys).await;
    for number in 0..WRITERS {
        let expected: Vec<i64> = (0..SHARDS).map(|shard| 1_000 + 100 * (number + 1) + shard).collect();
        assert_eq!(house.keys(&format!("feature/{number}")).await, expected, "the writers' own branches");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_and_many_writers_lose_nothing_and_publish_nothing_twice() {
    race(&House::in_real_time(ORDERS_POLICY, LONG_LEASE).await, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_worker_goes_on_where_the_killed_leader_was() {
    let settings = Settings { poll: "100ms", lease: "2s", checkpoint: "1h" };
    race(&House::in_real_time(ORDERS_POLICY, settings).await, true).await;
}

/// Leases so short that the workers depose each other again and again in the middle of their work.
#[tokio::test(flavor = "multi_thread")]
async fn workers_that_depose_each_other_lose_nothing() {
    let house = House::in_real_time(ORDERS_POLICY, SHORT_LEASE).await;
    let mut requests = Vec::new();
    for shard in 0..12 {
        let name = format!("ingest/{shard}");
        house.append_on_new(&name, &[order(100 + shard, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    house.append("main", &[order(90, 28)]).await;
    // A worker that was deposed ends; another one takes its place until all is done.
    let done = async || {
        for request in &requests {
            if !house.request(*request).await.state.is_final() {
                return false;
            }
        }
        true
    };
    let mut rounds = 0;
    while !done().await {
        rounds += 1;
        assert!(rounds <= 20, "it does not come to an end");
        let pair = [house.start_worker(&["--drain"]), house.start_worker(&["--drain"])];
        for worker in pair {
            let output = worker.wait();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let keys: Vec<i64> = [1, 2, 3, 90].into_iter().chain(100..112).collect();
    house.assert_nothing_lost_nothing_twice(&requests, &keys).await;
    let uuid = house.loaded().await.facts.uuid.clone();
    assert!(house.ledger.foreign(&uuid, &main_branch()).await.unwrap().is_empty());
}

/// A request that comes in while a tick looks at the table pins what that tick does not see: it waits for
/// the next one, and is not taken for one whose branch was reset or removed.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_comes_in_during_a_tick_is_not_judged_by_an_older_table() {
    for known_branch in [false, true] {
        for load in 0..5 {
            let house = Arc::new(House::orders(ORDERS_POLICY).await);
            house.append_on_new("ingest/a", &[order(4, 22)]).await;
            let first = house.enqueue("ingest/a").await;
            if known_branch {
                house.branch("ingest/b").await;
            }
            let (catalog, worker) = house.misled_worker();
            let late = Arc::clone(&house);
            catalog.during_load(
                load,
                Box::pin(async move {
                    if known_branch {
                        late.append("ingest/b", &[order(5, 22)]).await;
                    } else {
                        late.append_on_new("ingest/b", &[order(5, 22)]).await;
                    }
                    late.enqueue("ingest/b").await;
                }),
            );
            drain(&worker).await;
            assert!(catalog.is_played(), "load {load}");
            let requests = house.ledger.requests(&Default::default()).await.unwrap();
            let states: Vec<String> = requests.iter().map(|row| row.state.to_string()).collect();
            assert_eq!(states, ["landed", "landed"], "request {first}, then one during load {load}");
            assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
            house.assert_sound().await;
        }
    }
}
