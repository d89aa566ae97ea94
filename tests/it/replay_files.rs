//! The files that replays write, and the memory that it takes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use datafusion::arrow::array::RecordBatch;
use mergeberg::config::PolicyFolder;
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::catalog::Catalog;
use mergeberg::table::create::TableDefinition;
use mergeberg::table::manifests::{FileScope, LiveFile};
use mergeberg::validate::Engine;
use mergeberg::worker::context::Worker;
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use mergeberg_kernel::record::RECORD_KEY;
use serde_json::{Value, json};

use crate::oracle::random::Random;
use crate::support::child::real_now;
use crate::support::python::Python;
use crate::support::spark::Spark;
use crate::support::{House, branch, columns, drain, long, main_branch, order, text};

const POLICY: &str =
    "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow\"\n";

/// Memory of an engine in which nothing of these tests fits, in bytes.
const TIGHT: usize = 12 * 1024 * 1024;

impl House {
    /// The same queue with another engine.
    pub fn with_engine(mut self, engine: Arc<Engine>) -> Self {
        let clock = Arc::clone(&self.clock);
        let numbers = std::sync::atomic::AtomicU64::new(0x7e57_0000_0000_0001);
        self.worker = Worker::new(
            Arc::clone(&self.catalog) as Arc<dyn Catalog>,
            self.ledger.clone(),
            engine,
            PolicyFolder::new(self.dir.path().join("policies")),
            Arc::new(move || clock.fetch_add(1, Ordering::SeqCst)),
            Arc::new(move || numbers.fetch_add(0x9e37_79b9, Ordering::SeqCst)),
            "worker-2".to_owned(),
        );
        self
    }

    async fn live(&self) -> Vec<LiveFile> {
        let table = self.loaded().await;
        let head = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
        let live = self.writer.store.live_files(&table, head, &FileScope::Table).await.unwrap();
        live.data.to_vec()
    }

    /// A snapshot with a record, of one row that stands for whatever the operation did on the branch.
    async fn says(&self, name: &str, record: Value, row: RecordBatch) {
        let summary = BTreeMap::from([(RECORD_KEY.to_owned(), record.to_string())]);
        let remove = Removal::Files(Box::new(|_| true));
        let label = "overwrite".to_owned();
        let write = BranchWrite { branch: branch(name), label, rows: vec![row], remove, summary };
        self.writer.write(&self.table, write).await.unwrap();
    }

    async fn rebased(&self, name: &str) -> RequestId {
        let request = self.enqueue(name).await;
        drain(&self.worker).await;
        self.assert_sound().await;
        let detail = self.detail(request).await;
        assert_eq!(self.state(request).await, "landed", "{detail}");
        assert_eq!(self.classified(request).await, "rebase", "{detail}");
        request
    }
}

/// Orders by day, sorted by amount downwards; one was deleted on a branch, and the delete is run again.
async fn sorted_house() -> (House, BTreeSet<Arc<str>>) {
    let table = House::orders_definition().sorted_by("amount", "identity", true);
    let house = House::with_table(table, POLICY).await;
    house.append("main", &[order(1, 20), order(7, 20), order(3, 20), order(5, 21)]).await;
    house.branch("fix").await;
    let record = json!({"v": 1, "id": "fix", "op": "delete-where", "where": "order_id = 3"});
    house.recorded("fix", &record, &[20], &[order(1, 20), order(7, 20)]).await;
    house.append("main", &[order(2, 20), order(3, 20), order(9, 20)]).await;
    let before = house.live().await.iter().map(|file| Arc::clone(&file.fact.path)).collect();
    (house, before)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_are_written_again_are_in_the_tables_sort_order() {
    let (house, before) = sorted_house().await;
    house.rebased("fix").await;
    assert_eq!(house.keys("main").await, [1, 2, 5, 7, 9]);
    let table = house.loaded().await;
    let files = house.files_at(&table, table.facts.head(&main_branch()).unwrap()).await;
    let new: Vec<LiveFile> =
        house.live().await.into_iter().filter(|file| !before.contains(&file.fact.path)).collect();
    let [new] = new.as_slice() else { panic!("{} files of one day", new.len()) };
    assert_eq!(new.file.sort_order_id(), Some(1));
    let ids: Vec<i64> = files[&new.fact.path].iter().map(|order| order.id).collect();
    assert_eq!(ids, [9, 7, 2, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn spark_and_pyiceberg_know_which_files_are_sorted() {
    let Some(mut spark) = Spark::start() else { return };
    let (house, before) = sorted_house().await;
    let Some(mut python) = Python::start(house.dir.path()) else { return };
    house.clock.store(real_now(), Ordering::SeqCst);
    house.rebased("fix").await;
    let expected: BTreeMap<String, Value> = house
        .live()
        .await
        .iter()
        .map(|file| {
            let is_new = !before.contains(&file.fact.path);
            (file.fact.path.to_string(), if is_new { json!(1) } else { Value::Null })
        })
        .collect();
    let told = |files: &Value, path: &str| -> BTreeMap<String, Value> {
        let files = files.as_array().unwrap().iter();
        files.map(|file| (file[path].as_str().unwrap().to_owned(), file["sort_order_id"].clone())).collect()
    };
    let by_pyiceberg = python.ok("files", json!({}));
    assert_eq!(told(&by_pyiceberg["files"], "path"), expected);
    let by_spark =
        spark.ok(&house, "sql", json!({ "statements": "SELECT file_path, sort_order_id FROM {base}.files" }));
    let by_spark = told(&by_spark["rows"], "file_path");
    // Java reads a missing order as none.
    let number = |order: &Value| order.as_i64().unwrap_or_default();
    let numbers = |all: &BTreeMap<String, Value>| all.values().map(number).collect::<Vec<i64>>();
    assert_eq!(by_spark.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    assert_eq!(numbers(&by_spark), numbers(&expected));
    // And goes on in this order.
    spark.ok(&house, "sql", json!({ "statements": "DELETE FROM {base} WHERE order_id = 7" }));
    assert_eq!(house.keys("main").await, [1, 2, 5, 9]);
}

/// 400 days, written by one operation, with the rows of all of them in each other's way.
#[tokio::test(flavor = "multi_thread")]
async fn an_overwrite_of_400_days_is_one_file_a_day_within_bounds() {
    const DAYS: i64 = 400;
    for sorted in [false, true] {
        let mut table = TableDefinition::default()
            .column("id", "long", false)
            .column("day", "long", false)
            .column("status", "string", false)
            .partitioned_by("day", "identity");
        if sorted {
            table = table.sorted_by("id", "bucket[16]", false).sorted_by("id", "identity", true);
        }
        let house = House::with_table(table, POLICY).await;
        let engine = Arc::new(Engine::with_bounds(2, 2 * TIGHT).unwrap());
        let house = house.with_engine(engine);
        let rows = |ids: std::ops::Range<i64>, status: &str| {
            let ids: Vec<i64> = ids.collect();
            let days: Vec<i64> = ids.iter().map(|id| id % DAYS).collect();
            let statuses = vec![Some(status); ids.len()];
            columns(vec![("id", long(&ids)), ("day", long(&days)), ("status", text(&statuses))])
        };
        let feed = house.feed(rows(0..20_000, "new")).await;
        house.write_batch("main", rows(0..1, "old")).await;
        house.branch("years").await;
        let record = json!({
            "v": 1, "id": "years", "op": "overwrite-where", "where": "day >= 0",
            "query": "SELECT id, day, status FROM feed", "inputs": feed,
        });
        house.says("years", record, rows(0..1, "new")).await;
        house.write_batch("main", rows(7..8, "old")).await;
        house.rebased("years").await;
        let live = house.live().await;
        assert_eq!(live.len(), usize::try_from(DAYS).unwrap());
        assert_eq!(live.iter().map(|file| file.fact.records).sum::<i64>(), 20_000);
        assert!(live.iter().all(|file| file.file.sort_order_id() == sorted.then_some(1)));
    }
}

impl House {
    /// `raw.feed` with these rows; how a record pins it.
    async fn feed(&self, rows: RecordBatch) -> Value {
        self.catalog.create_namespace("raw").await.unwrap();
        let feed: TableName = "raw.feed".parse().unwrap();
        let mut table = TableDefinition::default();
        for field in rows.schema().fields() {
            let kind = if field.name() == "status" { "string" } else { "long" };
            table = table.column(field.name(), kind, false);
        }
        self.catalog.define_table(&feed, &table).await.unwrap();
        let SnapshotId(pin) = self.write_batch_to(&feed, "main", rows).await;
        json!({"feed": {"table": "raw.feed", "snapshot-id": pin}})
    }
}

/// Rows of some 200 bytes with random keys: the even ones, or in an odd turn the others.
fn wide_rows(random: &mut Random, rows: usize, turn: i64) -> RecordBatch {
    let mut ids: Vec<i64> = (0..i64::try_from(rows).unwrap()).map(|at| at * 2 + turn % 2).collect();
    for at in (1..ids.len()).rev() {
        ids.swap(at, random.below(at + 1));
    }
    let filling = "wide ".repeat(36);
    let statuses: Vec<String> = ids.iter().map(|id| format!("{filling}{turn}-{id}")).collect();
    let statuses: Vec<Option<&str>> = statuses.iter().map(|status| Some(status.as_str())).collect();
    columns(vec![("id", long(&ids)), ("status", text(&statuses))])
}

async fn tight_house(rows: usize, engine: Arc<Engine>) -> (House, Value) {
    let mut random = Random::new(3);
    let table = TableDefinition::default().column("id", "long", false).column("status", "string", false);
    let house = House::with_table(table, POLICY).await.with_engine(engine);
    house.write_batch("main", wide_rows(&mut random, rows, 0)).await;
    let feed = house.feed(half_known(&mut random, rows)).await;
    (house, feed)
}

/// Half of the rows that are there, and as many new ones.
fn half_known(random: &mut Random, count: usize) -> RecordBatch {
    let rows = wide_rows(random, count, 2);
    let more = wide_rows(random, count, 1);
    datafusion::arrow::compute::concat_batches(
        &rows.schema(),
        &[rows.slice(0, count / 2), more.slice(0, count / 2)],
    )
    .unwrap()
}

/// By number: the statuses that are there now.
async fn statuses(house: &House) -> (usize, usize) {
    let texts = house.texts("main").await;
    (texts.len(), texts.iter().filter(|row| row.contains(" 2-") || row.contains(" 1-")).count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_whose_sides_do_not_fit_into_memory_is_joined_on_disk() {
    let engine = Arc::new(Engine::with_bounds(2, TIGHT).unwrap());
    let (house, feed) = tight_house(80_000, engine).await;
    house.branch("upsert").await;
    let merge = "MERGE INTO shop.orders t USING raw.feed s ON t.id = s.id \
                 WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *";
    let record = json!({"v": 1, "id": "upsert", "op": "sql", "sql": merge, "inputs": feed});
    let one = columns(vec![("id", long(&[1])), ("status", text(&[Some("one")]))]);
    house.says("upsert", record, one.clone()).await;
    house.write_batch("main", columns(vec![("id", long(&[-1])), ("status", text(&[Some("late")]))])).await;
    house.rebased("upsert").await;
    assert_eq!(statuses(&house).await, (120_001, 80_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn deletes_by_the_rows_of_a_query_are_the_same_by_joins_that_sort() {
    for (at, (condition, left)) in [
        ("id IN (SELECT id FROM raw.feed)", 4_001),
        ("NOT EXISTS (SELECT 1 FROM raw.feed f WHERE f.id = t.id)", 4_000),
        // None is null.
        ("id NOT IN (SELECT id FROM raw.feed)", 4_000),
    ]
    .into_iter()
    .enumerate()
    {
        let engine = Engine::with_bounds(2, TIGHT).unwrap().sparing();
        let (house, feed) = tight_house(8_000, engine).await;
        house.branch("delete").await;
        let sql = format!("DELETE FROM shop.orders t WHERE {condition}");
        let record = json!({"v": 1, "id": "delete", "op": "sql", "sql": sql, "inputs": feed});
        let one = columns(vec![("id", long(&[1])), ("status", text(&[Some("one")]))]);
        house.says("delete", record, one).await;
        house
            .write_batch("main", columns(vec![("id", long(&[-1])), ("status", text(&[Some("late")]))]))
            .await;
        house.rebased("delete").await;
        assert_eq!(statuses(&house).await, (left, 0), "{at}: {condition}");
    }
}
