//! Pipelines write and enqueue while a tick is under way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::future::BoxFuture;
use mergeberg::cli::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use mergeberg::config::PolicyFolder;
use mergeberg::table::branch_writer::{BranchWrite, BranchWriter, Removal};
use mergeberg::table::catalog::{Capabilities, Catalog, CatalogError, CommitOutcome};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::ids::{Principal, RefName, TableName};

use crate::support::scripted::{Do, Kind, Scripted};
use crate::support::{House, ORDERS_POLICY, batch, branch, drain, order};

/// Right after each load, before anybody looks at the table, somebody does something.
struct Busy {
    inner: Arc<SqlCatalog>,
    after_loads: Mutex<VecDeque<BoxFuture<'static, ()>>>,
}

#[async_trait]
impl Catalog for Busy {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        self.inner.list_tables().await
    }

    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        let loaded = self.inner.load(table).await;
        let act = self.after_loads.lock().unwrap().pop_front();
        if let Some(act) = act {
            act.await;
        }
        loaded
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        self.inner.commit(base, requirements, updates).await
    }
}

/// Writes to a branch that is there.
fn write(house: &House, name: String, id: i64) -> BoxFuture<'static, ()> {
    let (catalog, table) = (Arc::clone(&house.catalog), house.table.clone());
    let writer = BranchWriter {
        catalog: catalog as Arc<dyn Catalog>,
        store: ManifestStore::new(16 << 20),
        clock: Arc::clone(&house.writer.clock),
        random: Arc::clone(&house.writer.random),
    };
    Box::pin(async move {
        let write = BranchWrite {
            branch: branch(&name),
            label: "append".to_owned(),
            rows: vec![batch(&[order(id, 22)])],
            remove: Removal::Nothing,
            summary: Default::default(),
        };
        writer.write(&table, write).await.unwrap();
    })
}

/// Writes to a branch that is there, and enqueues it.
fn write_and_enqueue(house: &House, name: String, id: i64) -> BoxFuture<'static, ()> {
    let (catalog, ledger, table) = (Arc::clone(&house.catalog), house.ledger.clone(), house.table.clone());
    let policies = PolicyFolder::new(house.dir.path().join("policies"));
    let now_ms = house.now();
    let written = write(house, name.clone(), id);
    Box::pin(async move {
        written.await;
        let policies = policies.read().unwrap();
        let context =
            EnqueueContext { catalog: catalog.as_ref(), ledger: &ledger, policies: &policies, now_ms };
        let args = EnqueueArgs {
            table,
            source: branch(&name),
            target: RefName::main(),
            snapshot: None,
            class: None,
            idempotency_key: None,
            principal: Principal::new("test"),
        };
        let _ = enqueue(context, &args).await.unwrap();
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_younger_than_the_table_as_loaded_is_not_taken_for_reset() {
    const LOADS: i64 = 12;
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/first", &[order(100, 22)]).await;
    house.enqueue("ingest/first").await;
    let mut acts = VecDeque::new();
    for load in 0..LOADS {
        let name = format!("ingest/{load}");
        house.branch(&name).await;
        acts.push_back(write_and_enqueue(&house, name, load + 101));
    }
    let busy = Arc::new(Busy { inner: Arc::clone(&house.catalog), after_loads: Mutex::new(acts) });
    let catalog = Arc::clone(&busy) as Arc<dyn Catalog>;
    let worker = House::worker_over(&house.dir, catalog, &house.ledger, &house.clock, "busy");
    drain(&worker).await;

    assert!(busy.after_loads.lock().unwrap().is_empty(), "every branch was enqueued under a load");
    for request in house.ledger.requests(&Default::default()).await.unwrap() {
        assert_eq!(request.state.to_string(), "landed", "{}: {:?}", request.source, request.detail);
    }
    let expected: Vec<i64> = (1..=3).chain(100..=100 + LOADS).collect();
    assert_eq!(house.keys("main").await, expected);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_does_not_start_anew_because_other_branches_are_written() {
    const WRITES: i64 = 5;
    let house = House::orders(ORDERS_POLICY).await;
    let mut requests = Vec::new();
    for (id, name) in [(100, "ingest/a"), (101, "ingest/b")] {
        house.append_on_new(name, &[order(id, 22)]).await;
        requests.push(house.enqueue(name).await);
    }
    house.branch("ingest/busy").await;
    let catalog = Scripted::over(&house.catalog);
    for id in 0..WRITES {
        catalog.next(Kind::Staging, Do::First(write(&house, "ingest/busy".to_owned(), 200 + id)));
    }
    let through = Arc::clone(&catalog) as Arc<dyn Catalog>;
    let worker = House::worker_over(&house.dir, through, &house.ledger, &house.clock, "patient");
    drain(&worker).await;

    assert!(catalog.is_played());
    for request in &requests {
        let row = house.request(*request).await;
        assert_eq!((row.state.to_string().as_str(), row.attempts), ("landed", 1), "{:?}", row.detail);
    }
    assert_eq!(catalog.commits(Kind::Staging), 6, "five were lost, the sixth applied");
    assert_eq!(house.keys("main").await, [1, 2, 3, 100, 101]);
    // What was written for the lost ones is gone: one manifest list stands for the picked snapshot.
    let picked = house.request(requests[1]).await.landed_snapshot.unwrap();
    let folder = house.loaded().await.metadata_location.rsplit_once('/').unwrap().0.replace("file://", "");
    let lists = std::fs::read_dir(folder).unwrap().filter(|entry| {
        let name = entry.as_ref().unwrap().file_name().into_string().unwrap();
        name.starts_with(&format!("snap-{picked}-"))
    });
    assert_eq!(lists.count(), 1);
    house.assert_sound().await;
}
