//! Counts: what a number of requests costs in commits, scans, manifests read, evidence and refs. They hold
//! on every machine, unlike times.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use mergeberg::ledger::{Enqueued, EvidenceRow, NewRequest};
use mergeberg::table::catalog::{Capabilities, Catalog, CatalogError, CommitOutcome};
use mergeberg::table::data_files::{DataFileWriter, NewDataFile};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter};
use mergeberg::worker::context::Worker;
use mergeberg_kernel::commit::{NewSnapshot, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId, TableName};

use crate::support::{House, ORDERS_POLICY, batch_on, branch, drain, main_branch};

/// Requests that one train carries in these tests: the class's default batch size.
const BATCH: usize = 50;
/// First day of what is written in bulk, in days since 1970: far from what the house has on main.
const BULK_DAY: i32 = 30_000;

/// A catalog that counts what is sent to it.
struct Counting {
    inner: Arc<dyn Catalog>,
    staging: AtomicUsize,
    landing: AtomicUsize,
    other: AtomicUsize,
}

impl Counting {
    fn over(inner: Arc<dyn Catalog>) -> Arc<Self> {
        let zero = AtomicUsize::default;
        Arc::new(Self { inner, staging: zero(), landing: zero(), other: zero() })
    }

    /// Staging, landing and other commits.
    fn counts(&self) -> (usize, usize, usize) {
        let read = |count: &AtomicUsize| count.load(Ordering::SeqCst);
        (read(&self.staging), read(&self.landing), read(&self.other))
    }
}

#[async_trait]
impl Catalog for Counting {
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
        self.inner.load(table).await
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        let moves_main = updates.iter().any(|u| matches!(u, Update::SetRef(r) if r.name == main_branch()));
        let adds = updates.iter().any(|u| matches!(u, Update::AddSnapshot(_)));
        let count = match (moves_main, adds) {
            (true, _) => &self.landing,
            (false, true) => &self.staging,
            (false, false) => &self.other,
        };
        count.fetch_add(1, Ordering::SeqCst);
        self.inner.commit(base, requirements, updates).await
    }
}

fn counting_worker(house: &House) -> (Worker, Arc<Counting>) {
    let catalog = Counting::over(Arc::clone(&house.catalog) as Arc<dyn Catalog>);
    let shared = Arc::clone(&catalog) as Arc<dyn Catalog>;
    (House::worker_over(&house.dir, shared, &house.ledger, &house.clock, "counting"), catalog)
}

/// As many data files of one row each, every one in a day of its own.
async fn files(house: &House, count: usize) -> Vec<NewDataFile> {
    let table = house.loaded().await;
    let rows: Vec<(i64, i32)> = (0..count)
        .map(|n| (100_000 + i64::try_from(n).unwrap(), BULK_DAY + i32::try_from(n).unwrap()))
        .collect();
    let batches = rows.chunks(200).map(batch_on).collect();
    let files = DataFileWriter::write_batches(&table, table.facts.current_schema_id, batches).await.unwrap();
    assert_eq!(files.len(), count, "one file a day");
    files
}

fn append_of(id: SnapshotId, file: NewDataFile, house: &House) -> SnapshotChange {
    let table_schema = mergeberg_kernel::ids::SchemaId(0);
    SnapshotChange {
        id,
        label: "append".to_owned(),
        add: vec![AddedFile::from(file)],
        remove: BTreeSet::new(),
        summary: BTreeMap::new(),
        now_ms: house.now(),
        schema_id: table_schema,
    }
}

fn new_branch(name: &str, at: SnapshotId) -> Update {
    Update::SetRef(RefFact {
        name: branch(name),
        snapshot_id: at,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    })
}

/// Branches at main's head, each with one append to a day of its own, in one commit. Name and head of each.
async fn branches(house: &House, prefix: &str, count: usize) -> Vec<(String, SnapshotId)> {
    let table = house.loaded().await;
    let parent = table.facts.head(&main_branch()).and_then(|id| table.facts.snapshots.get(id)).cloned();
    let mut updates = Vec::new();
    let mut made = Vec::new();
    // Each writer takes the next sequence number, as if the branches had been written one after the other.
    let mut view = table.as_ref().clone();
    for (file, number) in files(house, count).await.into_iter().zip(1_i64..) {
        let id = SnapshotId(1_000_000 + number);
        let mut writer = SnapshotWriter::on(&house.writer.store, &view, parent.as_ref()).await.unwrap();
        let snapshot: NewSnapshot = writer.add(append_of(id, file, house)).await.unwrap();
        view.facts.last_sequence_number = snapshot.sequence_number;
        view.facts.last_updated_ms = snapshot.timestamp_ms;
        let name = format!("{prefix}{number}");
        updates.push(Update::AddSnapshot(snapshot));
        updates.push(new_branch(&name, id));
        made.push((name, id));
    }
    commit(house, &table, updates).await;
    made
}

async fn commit(house: &House, table: &LoadedTable, updates: Vec<Update>) {
    let uuid = Requirement::TableUuid(table.facts.uuid.clone());
    let outcome = house.catalog.commit(table, &[uuid], updates).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

async fn enqueue_all(house: &House, branches: &[(String, SnapshotId)], class: &str) -> Vec<RequestId> {
    let table = house.loaded().await;
    let mut requests = Vec::new();
    for (name, pinned) in branches {
        let new = NewRequest {
            table: house.table.clone(),
            table_uuid: table.facts.uuid.clone(),
            source: branch(name),
            pinned: *pinned,
            target: main_branch(),
            class: class.to_owned(),
            principal: Principal::new("test"),
            idempotency_key: None,
            structure: table.facts.structure(),
            format_version: 2,
        };
        match house.ledger.enqueue(&new, house.now()).await.unwrap() {
            Enqueued::New(row) => requests.push(row.id),
            other => panic!("{other:?}"),
        }
    }
    requests
}

/// Evidence of all these requests, each row once.
async fn evidence(house: &House, requests: &[RequestId]) -> Vec<EvidenceRow> {
    let mut rows: BTreeMap<i64, EvidenceRow> = BTreeMap::new();
    for request in requests {
        for row in house.ledger.evidence_of_request(*request).await.unwrap() {
            rows.insert(row.id, row);
        }
    }
    rows.into_values().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_disjoint_appends_cost_two_commits_for_fifty() {
    let house = House::orders(ORDERS_POLICY).await;
    let (worker, catalog) = counting_worker(&house);
    let made = branches(&house, "ingest/", 1000).await;
    let requests = enqueue_all(&house, &made, "ingest").await;

    drain(&worker).await;

    let (staging, landing, other) = catalog.counts();
    assert!(staging <= 1000 / BATCH && landing <= 1000 / BATCH, "{staging} staging, {landing} landing");
    assert_eq!(other, 0, "and none beside");
    let landed = house.ledger.receipts(0, i64::MAX).await.unwrap();
    assert_eq!(landed.iter().map(|l| l.intent.cars.len()).sum::<usize>(), requests.len());
    assert_eq!(house.refs().await, ["main"]);
    // Three checks of metadata or rows are declared; one scan serves a train, the other two a car each.
    let rows = evidence(&house, &requests[..BATCH]).await;
    assert_eq!(rows.len(), 2 * BATCH + 1);
}

/// Appends of one file each, a manifest each, in one commit to main.
async fn many_manifests(house: &House, count: usize) {
    let table = house.loaded().await;
    let off = [("commit.manifest-merge.enabled".to_owned(), "false".to_owned())].into();
    commit(house, &table, vec![Update::SetProperties(off)]).await;
    let table = house.loaded().await;
    let parent = table.facts.head(&main_branch()).and_then(|id| table.facts.snapshots.get(id));
    let changes = files(house, count)
        .await
        .into_iter()
        .zip(1_i64..)
        .map(|(file, number)| append_of(SnapshotId(1_000_000 + number), file, house))
        .collect();
    let t = std::time::Instant::now();
    let mut writer = SnapshotWriter::on(&house.writer.store, &table, parent).await.unwrap();
    let snapshots = writer.add_all(changes).await.unwrap();
    eprintln!("chain {:?}", t.elapsed());
    let head =
        RefFact { snapshot_id: snapshots.last().unwrap().id, ..table.facts.refs[&main_branch()].clone() };
    let mut updates: Vec<Update> = snapshots.into_iter().map(Update::AddSnapshot).collect();
    updates.push(Update::SetRef(head));
    commit(house, &table, updates).await;
    eprintln!("committed {:?}", t.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_classified_by_the_manifests_written_since_its_base() {
    let house = House::orders(ORDERS_POLICY).await;
    many_manifests(&house, 2000).await;
}
