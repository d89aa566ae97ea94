//! A queue with its table in a temporary folder, and the words that the tests are told in.

pub mod certificates;
pub mod child;
pub mod engine_table;
pub mod fault_server;
pub mod json_rows;
pub mod mall;
pub mod object_server;
pub mod pipeline;
pub mod polaris;
pub mod postgres;
pub mod python;
pub mod rest;
pub mod s3_server;
pub mod scripted;
mod served;
pub mod shop;
pub mod spark;
mod story;

use child::{SHORT_LEASE, real_now};
use object_server::ObjectServer;
use s3_server::S3Server;
pub use story::{Moment, columns, days, decimal, keyed_record, long, text};

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use datafusion::arrow::array::{
    ArrayRef, Date32Array, Decimal128Array, Int64Array, RecordBatch, StringArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use mergeberg::config::PolicyFolder;
use mergeberg::ledger::{Enqueued, Ledger, LedgerPlace, NewRequest, RequestRow};
use mergeberg::table::branch_writer::{BranchWrite, BranchWriter, Removal};
use mergeberg::table::catalog::Catalog;
use mergeberg::table::cleanup::missing_files;
use mergeberg::table::create::TableDefinition;
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::table::scan::{RowReader, ScanCounters, live_rows};
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg::table::storage::StorageProperties;
use mergeberg::validate::Engine;
use mergeberg::worker::context::Worker;
use mergeberg::worker::run::RunOptions;
use mergeberg_kernel::filter::parse_date;
use mergeberg_kernel::ids::{Principal, RefName, RequestId, SnapshotId, TableName};
use tempfile::TempDir;

/// The table ORD of the cases: key, day (partition), status, amount in cents.
pub const ORDERS: &str = "shop.orders";

/// One row of ORD. `day` is a day of August 2026.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    pub id: i64,
    pub day: u32,
    pub status: String,
    pub cents: i64,
}

pub fn order(id: i64, day: u32) -> Order {
    Order { id, day, status: "new".to_owned(), cents: 1000 * id }
}

pub fn branch(name: &str) -> RefName {
    RefName::new(name)
}

pub fn main_branch() -> RefName {
    RefName::main()
}

/// Policy of ORD in most tests: appends may meet, with the key checked in the days touched.
pub const ORDERS_POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]
after-landing = "drop"

[[class]]
name = "default"
prefix = ""
"#;

/// A queue over one warehouse, in a SQL catalog or another one. Time stands still unless a test moves it.
pub struct House<C = SqlCatalog> {
    pub dir: TempDir,
    pub catalog: Arc<C>,
    pub ledger: Ledger,
    pub writer: BranchWriter,
    pub worker: Worker,
    pub clock: Arc<AtomicI64>,
    pub table: TableName,
}

impl House {
    /// ORD with S1 on main: A1[20: 1, 2], A2[21: 3].
    pub async fn orders(policy: &str) -> Self {
        let house = Self::empty(policy).await;
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        house
    }

    /// ORD without any snapshot.
    pub async fn empty(policy: &str) -> Self {
        Self::with_table(Self::orders_definition(), policy).await
    }

    pub fn orders_definition() -> TableDefinition {
        TableDefinition::default()
            .column("order_id", "long", true)
            .column("order_date", "date", true)
            .column("status", "string", false)
            .column("amount", "decimal(12, 2)", false)
            .partitioned_by("order_date", "identity")
    }

    /// `shop.orders` with other columns.
    pub async fn with_table(definition: TableDefinition, policy: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let ledger = dir.path().join("ledger.db").into();
        Self::with_table_in(dir, ledger, definition, policy).await
    }

    /// As [`House::with_table`], with the ledger at its place and the catalog where the folder says.
    async fn with_table_in(
        dir: TempDir,
        ledger: LedgerPlace,
        definition: TableDefinition,
        policy: &str,
    ) -> Self {
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), policy).unwrap();
        let clock = Arc::new(AtomicI64::new(1_790_000_000_000));
        let catalog = Arc::new(Self::catalog_in(dir.path(), &clock, true).await);
        let ledger = Ledger::open_or_create(ledger).await.unwrap();
        catalog.create_namespace("shop").await.unwrap();
        let table: TableName = ORDERS.parse().unwrap();
        catalog.define_table(&table, &definition).await.unwrap();
        Self::assemble(dir, catalog, ledger, clock, table)
    }

    /// ORD on S3, as [`House::orders`], on the real clock and with `mergeberg.toml`.
    pub async fn on_s3(policy: &str) -> (Self, S3Server) {
        let (house, server) = Self::on_s3_with(Self::orders_definition(), policy).await;
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        (house, server)
    }

    /// As [`House::on_s3`], of another definition and without a snapshot.
    pub async fn on_s3_with(definition: TableDefinition, policy: &str) -> (Self, S3Server) {
        let dir = TempDir::new().unwrap();
        let server = S3Server::start(dir.path());
        let store = (server.warehouse(), server.storage(), server.catalog_lines());
        (Self::on_store(dir, store, definition, policy).await, server)
    }

    /// ORD on another store, as [`House::on_s3_with`].
    pub async fn on_object_server(
        dir: TempDir,
        server: &ObjectServer,
        definition: TableDefinition,
        policy: &str,
    ) -> Self {
        let store = (server.warehouse.clone(), server.storage(), server.catalog_lines());
        Self::on_store(dir, store, definition, policy).await
    }

    async fn on_store(
        dir: TempDir,
        (warehouse, storage, lines): (String, StorageProperties, String),
        definition: TableDefinition,
        policy: &str,
    ) -> Self {
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), policy).unwrap();
        let clock = Arc::new(AtomicI64::new(real_now()));
        let uri = dir.path().join("catalog.db").display().to_string();
        let catalog = SqlCatalog::create("test", &uri, &warehouse, reader(&clock)).await.unwrap();
        let catalog = Arc::new(catalog.with_storage(storage));
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        catalog.create_namespace("shop").await.unwrap();
        let table: TableName = ORDERS.parse().unwrap();
        catalog.define_table(&table, &definition).await.unwrap();
        let house = Self::assemble(dir, catalog, ledger, clock, table);
        house.configure_for(&lines, SHORT_LEASE);
        house
    }

    pub async fn catalog_in(dir: &Path, clock: &Arc<AtomicI64>, create: bool) -> SqlCatalog {
        let database = postgres::database_in(dir);
        let warehouse = format!("file://{}", dir.join("warehouse").display());
        let clock = Arc::clone(clock);
        // Every look at the clock is a new millisecond, so that no two snapshots share one.
        let clock: Arc<dyn Fn() -> i64 + Send + Sync> =
            Arc::new(move || clock.fetch_add(1, Ordering::SeqCst));
        if create {
            SqlCatalog::create("test", database, &warehouse, clock).await.unwrap()
        } else {
            SqlCatalog::open("test", database, &warehouse, clock).await.unwrap()
        }
    }

    /// A worker over this House with a catalog that misbehaves on order.
    pub fn misled_worker(&self) -> (Arc<scripted::Scripted>, Worker) {
        let catalog = scripted::Scripted::over(&self.catalog);
        let worker = Self::worker_over(
            &self.dir,
            Arc::clone(&catalog) as Arc<dyn Catalog>,
            &self.ledger,
            &self.clock,
            "misled",
        );
        (catalog, worker)
    }

    /// A worker over the same ledger and policies, and any catalog.
    pub fn worker_over(
        dir: &TempDir,
        catalog: Arc<dyn Catalog>,
        ledger: &Ledger,
        clock: &Arc<AtomicI64>,
        holder: &str,
    ) -> Worker {
        Worker::new(
            catalog,
            ledger.clone(),
            Arc::new(Engine::start().unwrap()),
            PolicyFolder::new(dir.path().join("policies")),
            reader(clock),
            counter(0x0dd_ba11_0000_0001 ^ hash(holder)),
            holder.to_owned(),
        )
    }
}

impl<C: Catalog + 'static> House<C> {
    pub fn assemble(
        dir: TempDir,
        catalog: Arc<C>,
        ledger: Ledger,
        clock: Arc<AtomicI64>,
        table: TableName,
    ) -> Self {
        // Of two tables no two snapshots have one id.
        let other = if table.to_string() == ORDERS { 0 } else { hash(&table.to_string()) };
        let random = counter(0x5eed_0000_0000_0001 ^ other);
        let writer = BranchWriter {
            catalog: Arc::clone(&catalog) as Arc<dyn Catalog>,
            store: ManifestStore::new(64 << 20),
            clock: reader(&clock),
            random: random.clone(),
        };
        let worker =
            House::worker_over(&dir, Arc::clone(&catalog) as Arc<dyn Catalog>, &ledger, &clock, "worker-1");
        Self { dir, catalog, ledger, writer, worker, clock, table }
    }

    pub async fn loaded(&self) -> Arc<LoadedTable> {
        self.catalog.load(&self.table).await.unwrap()
    }

    pub async fn head(&self, name: &str) -> Option<SnapshotId> {
        self.loaded().await.facts.head(&branch(name))
    }

    /// A branch at main's head.
    pub async fn branch(&self, name: &str) {
        let head = self.head("main").await.expect("main has a snapshot");
        self.writer.create_branch(&self.table, &branch(name), head).await.unwrap();
    }

    pub async fn append(&self, name: &str, rows: &[Order]) -> SnapshotId {
        self.write(name, "append", rows, Removal::Nothing, BTreeMap::new()).await
    }

    /// A new branch with one append.
    pub async fn append_on_new(&self, name: &str, rows: &[Order]) -> SnapshotId {
        self.branch(name).await;
        self.append(name, rows).await
    }

    /// Replaces whole days, as one snapshot without a record, and says so as Spark does.
    pub async fn overwrite_days(&self, name: &str, days: &[u32], rows: &[Order]) -> SnapshotId {
        let days: Vec<String> = days.iter().map(|day| format!("2026-08-{day:02}")).collect();
        let remove = Removal::Files(Box::new(move |file| {
            file.fact.partition.fields.iter().any(|f| f.value.as_ref().is_some_and(|v| days.contains(v)))
        }));
        let said = BTreeMap::from([("replace-partitions".to_owned(), "true".to_owned())]);
        self.write(name, "overwrite", rows, remove, said).await
    }

    pub async fn write(
        &self,
        name: &str,
        label: &str,
        rows: &[Order],
        remove: Removal,
        summary: BTreeMap<String, String>,
    ) -> SnapshotId {
        let rows = if rows.is_empty() { Vec::new() } else { vec![batch(rows)] };
        let write = BranchWrite { branch: branch(name), label: label.to_owned(), rows, remove, summary };
        self.writer.write(&self.table, write).await.unwrap()
    }

    pub async fn enqueue(&self, name: &str) -> RequestId {
        self.enqueue_keyed(name, None).await
    }

    pub async fn enqueue_keyed(&self, name: &str, key: Option<&str>) -> RequestId {
        let table = self.loaded().await;
        let pinned = table.facts.head(&branch(name)).expect("the branch exists");
        let policy = self.worker.policies.read().unwrap().for_table(&self.table);
        let class = policy.class_of(&branch(name)).map_or("default".to_owned(), |c| c.name.clone());
        let new = NewRequest {
            table: self.table.clone(),
            table_uuid: table.facts.uuid.clone(),
            source: branch(name),
            pinned,
            target: main_branch(),
            class,
            principal: Principal::new("test"),
            idempotency_key: key.map(str::to_owned),
            structure: table.facts.structure(),
            format_version: table.facts.format_version,
        };
        match self.ledger.enqueue(&new, self.now()).await.unwrap() {
            Enqueued::New(row) | Enqueued::Existing(row) => row.id,
            Enqueued::KeyConflict(row) => panic!("the key belongs to request {}", row.id),
        }
    }

    /// Works until nothing more can be done.
    pub async fn drain(&self) {
        drain(&self.worker).await;
    }

    pub async fn request(&self, id: RequestId) -> RequestRow {
        self.ledger.request(id).await.unwrap()
    }

    /// State of a request as one word with its reason: `refused(duplicate-key)`.
    pub async fn state(&self, id: RequestId) -> String {
        self.request(id).await.state.to_string()
    }

    /// How it was classified, as one word.
    pub async fn classified(&self, id: RequestId) -> String {
        self.request(id).await.classification.unwrap_or_default()
    }

    /// Rows of a branch, sorted.
    pub async fn rows(&self, name: &str) -> Vec<Order> {
        let table = self.loaded().await;
        let Some(head) = table.facts.head(&branch(name)) else { return Vec::new() };
        self.rows_at(&table, head).await
    }

    pub async fn rows_at(&self, table: &LoadedTable, id: SnapshotId) -> Vec<Order> {
        let files = self.files_at(table, id).await;
        let mut rows: Vec<Order> = files.into_values().flatten().collect();
        rows.sort();
        rows
    }

    /// Rows of a snapshot by data file. Each path is live once.
    pub async fn files_at(&self, table: &LoadedTable, id: SnapshotId) -> BTreeMap<Arc<str>, Vec<Order>> {
        use futures::TryStreamExt;
        let snapshot = table.facts.snapshots.get(id).unwrap();
        // A store of its own: what is read is what is on disk.
        let live = ManifestStore::new(64 << 20).live_files(table, snapshot, &FileScope::Table).await.unwrap();
        let reader = RowReader::new(table, table.facts.current_schema_id).unwrap();
        let counters = Arc::new(ScanCounters::default());
        let mut files = BTreeMap::new();
        for file in &live_rows(live).unwrap() {
            let stream = reader.read(file, &[0, 1, 2, 3], &counters).unwrap();
            let batches = stream.try_collect::<Vec<_>>().await.unwrap();
            let rows = batches.iter().flat_map(orders_of).collect();
            let before = files.insert(Arc::clone(&file.file.fact.path), rows);
            assert!(before.is_none(), "{} is live twice", file.file.fact.path);
        }
        files
    }

    /// Keys of a branch, sorted.
    pub async fn keys(&self, name: &str) -> Vec<i64> {
        self.rows(name).await.into_iter().map(|row| row.id).collect()
    }

    pub async fn refs(&self) -> Vec<String> {
        self.loaded().await.facts.refs.keys().map(ToString::to_string).collect()
    }

    pub fn now(&self) -> i64 {
        self.clock.load(Ordering::SeqCst)
    }

    pub fn advance(&self, ms: i64) {
        self.clock.fetch_add(ms, Ordering::SeqCst);
    }

    /// The invariant asked of every case: what every ref reaches exists, each path is live once, and every
    /// head that a landing made has passing evidence under exactly its id.
    pub async fn assert_sound(&self) {
        let table = self.loaded().await;
        let store = ManifestStore::new(64 << 20);
        for reference in table.facts.refs.values() {
            let snapshot = table.facts.snapshots.get(reference.snapshot_id).unwrap();
            let live = store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
            let mut paths = std::collections::BTreeSet::new();
            for file in &live.data {
                assert!(paths.insert(Arc::clone(&file.fact.path)), "{} is live twice", file.fact.path);
            }
            let missing = missing_files(&table, paths).await.unwrap();
            assert!(missing.is_empty(), "{missing:?} of {} do not exist", reference.name);
        }
        let heads = self.ledger.receipts(0, i64::MAX).await.unwrap();
        for landing in heads {
            let evidence = self.ledger.evidence_of_candidate(landing.intent.tail).await.unwrap();
            assert!(!evidence.is_empty(), "{} became a head without evidence", landing.intent.tail);
            let passed = |check: &str| {
                evidence.iter().rev().find(|e| e.evidence.check == check).is_some_and(|e| {
                    matches!(e.evidence.result, mergeberg_kernel::evidence::CheckResult::Passed)
                })
            };
            for (candidate, check) in &landing.intent.required {
                if *candidate == landing.intent.tail {
                    assert!(passed(check), "{check} of head {candidate} did not pass");
                }
            }
        }
        let left: Vec<_> =
            table.facts.refs.keys().filter(|r| r.as_str().starts_with("mergeberg/tmp/")).collect();
        assert!(left.is_empty(), "temporary branches are left: {left:?}");
    }
}

/// Runs a worker until nothing more can be done.
pub async fn drain(worker: &Worker) {
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: std::time::Duration::from_millis(20), lease_ms: 60_000 };
    worker.run(options, stopped).await.unwrap();
}

pub fn batch(rows: &[Order]) -> RecordBatch {
    let schema = Arc::new(Schema::new(vec![
        Field::new("order_id", DataType::Int64, false),
        Field::new("order_date", DataType::Date32, false),
        Field::new("status", DataType::Utf8, true),
        Field::new("amount", DataType::Decimal128(12, 2), true),
    ]));
    let ids: Vec<i64> = rows.iter().map(|r| r.id).collect();
    let days: Vec<i32> = rows
        .iter()
        .map(|r| i32::try_from(parse_date(&format!("2026-08-{:02}", r.day)).unwrap()).unwrap())
        .collect();
    let statuses: Vec<&str> = rows.iter().map(|r| r.status.as_str()).collect();
    let cents: Vec<i128> = rows.iter().map(|r| i128::from(r.cents)).collect();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(ids)),
        Arc::new(Date32Array::from(days)),
        Arc::new(StringArray::from(statuses)),
        Arc::new(Decimal128Array::from(cents).with_precision_and_scale(12, 2).unwrap()),
    ];
    RecordBatch::try_new(schema, columns).unwrap()
}

pub fn orders_of(batch: &RecordBatch) -> Vec<Order> {
    let column = |at: usize| batch.column(at);
    let ids = column(0).as_any().downcast_ref::<Int64Array>().unwrap();
    let days = column(1).as_any().downcast_ref::<Date32Array>().unwrap();
    let statuses = column(2).as_any().downcast_ref::<StringArray>().unwrap();
    let cents = column(3).as_any().downcast_ref::<Decimal128Array>().unwrap();
    let first = i32::try_from(parse_date("2026-08-01").unwrap()).unwrap();
    (0..batch.num_rows())
        .map(|row| Order {
            id: ids.value(row),
            day: u32::try_from(days.value(row) - first + 1).unwrap(),
            status: statuses.value(row).to_owned(),
            cents: i64::try_from(cents.value(row)).unwrap(),
        })
        .collect()
}

/// Looks at the clock and moves it by a millisecond.
fn reader(clock: &Arc<AtomicI64>) -> Arc<dyn Fn() -> i64 + Send + Sync> {
    let clock = Arc::clone(clock);
    Arc::new(move || clock.fetch_add(1, Ordering::SeqCst))
}

/// Well mixed numbers from a seed: the same in every run.
fn counter(seed: u64) -> Arc<dyn Fn() -> u64 + Send + Sync> {
    let state = AtomicU64::new(seed);
    Arc::new(move || {
        let mut z = state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}
