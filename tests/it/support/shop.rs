//! A queue behind the fault server, and what its stories come to.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use mergeberg::ledger::Ledger;
use mergeberg::secret::Secret;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::rest_catalog::RestCatalog;
use mergeberg::worker::context::Worker;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use tempfile::TempDir;

use super::child::real_now;
use super::fault_server::{Ask, FaultServer, Manners, clock_of_now};
use super::{House, ORDERS, ORDERS_POLICY, Order, branch, order};

/// ORD behind a fault server, as a story needs it.
pub struct Shop {
    pub house: Arc<House<RestCatalog>>,
    pub server: Arc<FaultServer>,
}

impl Shop {
    pub async fn empty(manners: Manners) -> Self {
        let dir = TempDir::new().unwrap();
        let server = FaultServer::start(dir.path(), manners).await;
        let table: TableName = ORDERS.parse().unwrap();
        server.create_namespace(&table.namespace);
        server.create_table(&table, &House::orders_definition());
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), ORDERS_POLICY).unwrap();
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let catalog = Arc::new(client(&server).await);
        let clock = Arc::new(AtomicI64::new(real_now()));
        let house = House::assemble(dir, catalog, ledger, clock, table);
        Self { house: Arc::new(house), server: Arc::new(server) }
    }

    pub async fn orders(manners: Manners) -> Self {
        let shop = Self::empty(manners).await;
        shop.house.append("main", &[order(1, 20), order(2, 20)]).await;
        shop.house.append("main", &[order(3, 21)]).await;
        shop
    }

    /// With one request that appends key 4 to day 22 and cannot be fast-forwarded.
    pub async fn with_one() -> (Self, RequestId) {
        Self::with_one_over(Manners::default()).await
    }

    pub async fn with_one_over(manners: Manners) -> (Self, RequestId) {
        let shop = Self::orders(manners).await;
        shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
        shop.house.append("main", &[order(9, 25)]).await;
        let request = shop.house.enqueue("ingest/a").await;
        (shop, request)
    }

    /// Another worker, with a client and a memory of its own.
    pub async fn another_worker(&self, holder: &str) -> Worker {
        let catalog = Arc::new(client(&self.server).await) as Arc<dyn Catalog>;
        House::worker_over(&self.house.dir, catalog, &self.house.ledger, &self.house.clock, holder)
    }

    /// A stranger's append, before the server looks at the next request of this kind.
    pub fn stranger_appends(&self, before: Ask, name: &'static str, row: Order) {
        let house = Arc::clone(&self.house);
        self.server.first(before, async move {
            house.append(name, &[row]).await;
        });
    }

    pub async fn landed_once(&self, request: RequestId) {
        assert_eq!(
            self.house.state(request).await,
            "landed",
            "{:?}",
            self.house.request(request).await.detail
        );
        assert_eq!(self.house.keys("main").await, [1, 2, 3, 4, 9]);
        let receipts = self.house.ledger.receipts(0, i64::MAX).await.unwrap();
        let landings = receipts.iter().filter(|r| r.intent.cars.iter().any(|car| car.request == request));
        assert_eq!(landings.count(), 1);
        self.assert_nothing_left().await;
    }

    pub async fn assert_nothing_left(&self) {
        assert!(self.house.ledger.open_intents().await.unwrap().is_empty());
        let uuid = self.house.loaded().await.facts.uuid.clone();
        assert!(self.house.ledger.unfinished_trains(&uuid).await.unwrap().is_empty());
        self.house.assert_sound().await;
    }

    /// The updates that a quiet day does not need.
    pub async fn other_updates(&self) {
        let main = self.house.head("main").await.unwrap();
        let tag = RefFact { kind: RefKind::Tag, max_ref_age_ms: Some(86_400_000), ..reference("v1", main) };
        let set = [("owner".to_owned(), "ann".to_owned())];
        let unset = vec!["owner".to_owned()];
        for update in
            [Update::SetRef(tag), Update::SetProperties(set.into()), Update::RemoveProperties(unset)]
        {
            by_hand(&self.house, update).await;
        }
    }

    pub async fn text_of(&self, request: RequestId) -> String {
        self.house.request(request).await.detail.unwrap()["text"].as_str().unwrap().to_owned()
    }
}

/// For a server that knows one client.
pub const CLIENT: (&str, &str) = ("queue", "secret");

async fn client(server: &FaultServer) -> RestCatalog {
    let mut settings = server.settings();
    settings.credential = server.knows_clients().then(|| Secret::new(format!("{}:{}", CLIENT.0, CLIENT.1)));
    RestCatalog::open(&settings, clock_of_now()).await.unwrap()
}

/// Moves a ref or sets a property behind the queue's back.
pub async fn by_hand(house: &House<RestCatalog>, update: Update) {
    let table = house.loaded().await;
    let outcome = house.catalog.commit(&table, &[], vec![update]).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

pub fn set(name: &str, at: SnapshotId) -> Update {
    Update::SetRef(reference(name, at))
}

fn reference(name: &str, at: SnapshotId) -> RefFact {
    RefFact {
        name: branch(name),
        snapshot_id: at,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    }
}
