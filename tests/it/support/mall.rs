//! More tables beside ORD, of its form, in the same catalog and the same queue; sets over them, and a reader who looks
//! whether they move together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use mergeberg::cli::enqueue::EnqueueContext;
use mergeberg::cli::enqueue_set::{PartArgs, SetArgs, enqueue_set};
use mergeberg::cli::revert::set::revert_set;
use mergeberg::cli::revert::{RevertArgs, RevertContext};
use mergeberg::error::UserError;
use mergeberg::ledger::EnqueuedSet;
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::ManifestStore;
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId, TableName};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use super::{House, branch, main_branch, order};

pub const ITEMS: &str = "shop.items";
pub const CUSTOMERS: &str = "shop.customers";

/// A policy of these lines for a table.
pub fn policy(table: &str, lines: &str) -> String {
    format!("table = \"{table}\"\n\n{lines}")
}

/// Branches are handed over; nothing is checked beyond lineage and schema.
pub const RELEASES: &str = r#"
[[class]]
name = "release"
prefix = "release/"
overlap = "allow"
after-landing = "drop"

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow"
after-landing = "drop"
"#;

/// ORD and two more tables, with a queue that serves all three.
pub struct Mall {
    /// The one whose worker and folder are the queue's.
    pub orders: House,
    pub items: House,
    pub customers: House,
}

impl Mall {
    pub async fn open() -> Self {
        Self::with(RELEASES, RELEASES, RELEASES).await
    }

    /// With policies of these lines.
    pub async fn with(orders: &str, items: &str, customers: &str) -> Self {
        let house = House::orders(&policy(super::ORDERS, orders)).await;
        Self::around(house, items, customers).await
    }

    pub async fn around(orders: House, items: &str, customers: &str) -> Self {
        let items = orders.beside(ITEMS, &policy(ITEMS, items)).await;
        let customers = orders.beside(CUSTOMERS, &policy(CUSTOMERS, customers)).await;
        Self { orders, items, customers }
    }

    pub fn all(&self) -> [&House; 3] {
        [&self.orders, &self.items, &self.customers]
    }

    /// Each of the tables takes this key on a branch of its own, which cannot be fast-forwarded.
    pub async fn write(&self, houses: &[&House], name: &str, id: i64) {
        for house in houses {
            house.append_on_new(name, &[order(id, 22)]).await;
            house.append("main", &[order(id + 1_000, 25)]).await;
        }
    }

    pub async fn assert_sound(&self) {
        for house in self.all() {
            house.assert_sound().await;
            let uuid = house.loaded().await.facts.uuid.clone();
            assert!(house.ledger.unfinished_trains(&uuid).await.unwrap().is_empty());
        }
        assert!(self.orders.ledger.open_intents().await.unwrap().is_empty());
    }
}

impl House {
    /// Another table of ORD's form, with one snapshot: keys 1 and 2.
    pub async fn beside(&self, name: &str, policy: &str) -> House {
        let table: TableName = name.parse().unwrap();
        self.catalog.define_table(&table, &House::orders_definition()).await.unwrap();
        let house = self.seen_as(table, policy);
        house.append("main", &[order(1, 20), order(2, 21)]).await;
        house
    }
}

impl<C: Catalog + 'static> House<C> {
    /// The same queue, with the words of this House for another of its tables.
    pub fn seen_as(&self, table: TableName, policy: &str) -> House<C> {
        let dir = TempDir::new().unwrap();
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        for folder in [self.dir.path(), dir.path()] {
            std::fs::write(folder.join(format!("policies/{}.toml", table.name)), policy).unwrap();
        }
        House::assemble(dir, Arc::clone(&self.catalog), self.ledger.clone(), Arc::clone(&self.clock), table)
    }

    /// The command's enqueue of a set, with all that it refuses. The queue is this House's.
    pub async fn ask_set(
        &self,
        houses: &[&House<C>],
        source: &str,
        key: Option<&str>,
    ) -> Result<EnqueuedSet, UserError> {
        let parts = houses.iter().map(|house| PartArgs {
            table: house.table.clone(),
            source: branch(source),
            target: main_branch(),
            snapshot: None,
            class: None,
        });
        self.ask_parts(parts.collect(), key).await
    }

    pub async fn ask_parts(&self, parts: Vec<PartArgs>, key: Option<&str>) -> Result<EnqueuedSet, UserError> {
        let args =
            SetArgs { parts, idempotency_key: key.map(str::to_owned), principal: Principal::new("test") };
        let policies = self.worker.policies.read().unwrap();
        let context = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: self.now(),
        };
        enqueue_set(context, &args).await
    }

    /// A new set; its parts.
    pub async fn enqueue_set(&self, houses: &[&House<C>], source: &str) -> Vec<RequestId> {
        match self.ask_set(houses, source, None).await.unwrap() {
            EnqueuedSet::New(rows) => rows.iter().map(|row| row.id).collect(),
            other => panic!("{other:?}"),
        }
    }

    /// The command's revert of the set that this request is a part of.
    pub async fn ask_revert_set(&self, part: RequestId, key: Option<&str>) -> Result<EnqueuedSet, UserError> {
        let args = RevertArgs {
            request: part,
            reason: Some("bad load".to_owned()),
            class: None,
            idempotency_key: key.map(str::to_owned),
            principal: Principal::new("test"),
        };
        let policies = self.worker.policies.read().unwrap();
        let enqueue = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: self.now(),
        };
        let (store, random) = (ManifestStore::new(64 << 20), || (self.writer.random)());
        let set = self.request(part).await.set.unwrap();
        revert_set(RevertContext { enqueue, store: &store, random: &random }, &args, set).await
    }

    /// A new set that takes that one back; its parts.
    pub async fn revert_set(&self, part: RequestId) -> Vec<RequestId> {
        match self.ask_revert_set(part, None).await.unwrap() {
            EnqueuedSet::New(rows) => rows.iter().map(|row| row.id).collect(),
            other => panic!("{other:?}"),
        }
    }

    pub async fn states(&self, requests: &[RequestId]) -> Vec<String> {
        let mut states = Vec::new();
        for request in requests {
            states.push(self.state(*request).await);
        }
        states
    }
}

/// Somebody who reads the heads of two tables again and again, through a client of their own.
pub struct Reader {
    stop: Arc<AtomicBool>,
    looks: Arc<AtomicUsize>,
    reading: JoinHandle<Vec<String>>,
}

impl Reader {
    /// Begins to read; every state in which one table has moved from where it is now and the other has not is half.
    pub async fn watch(catalog: Arc<dyn Catalog>, one: &TableName, other: &TableName) -> Self {
        let (stop, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&looks));
        let (one, other) = (one.clone(), other.clone());
        let before = (head(&*catalog, &one).await, head(&*catalog, &other).await);
        let reading = tokio::spawn(async move {
            let mut half = Vec::new();
            while !stopped.load(Ordering::SeqCst) {
                let first = head(&*catalog, &one).await;
                let second = head(&*catalog, &other).await;
                // What the first was when the second was read, if it has not moved in between.
                if head(&*catalog, &one).await == first && (first == before.0) != (second == before.1) {
                    half.push(format!("{first:?} and {second:?}"));
                }
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
            }
            half
        });
        Self { stop, looks, reading }
    }

    /// The half states that were seen.
    pub async fn ends(self) -> Vec<String> {
        // Once more, after all that was done.
        let seen = self.looks.load(Ordering::SeqCst);
        super::child::until("the reader has looked again", async || {
            self.looks.load(Ordering::SeqCst) > seen + 1
        })
        .await;
        self.stop.store(true, Ordering::SeqCst);
        self.reading.await.unwrap()
    }
}

async fn head(catalog: &dyn Catalog, table: &TableName) -> Option<SnapshotId> {
    catalog.load(table).await.unwrap().facts.head(&main_branch())
}
