//! More words for the house: other writers, other structures, and races told as a script.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use datafusion::arrow::array::{
    ArrayRef, Date32Array, Decimal128Array, Int64Array, RecordBatch, StringArray,
};
use datafusion::arrow::datatypes::{Field, Schema};
use datafusion::arrow::util::display::array_value_to_string;
use futures::TryStreamExt;
use futures::future::LocalBoxFuture;
use mergeberg::cli::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use mergeberg::error::UserError;
use mergeberg::ledger::{Enqueued, EvidenceRow};
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::table::scan::{RowReader, ScanCounters, live_rows};
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};
use mergeberg::table::sql_catalog::CommitHook;
use mergeberg::worker::context::Worker;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::filter::parse_date;
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SOURCE_SNAPSHOT_ID;
use mergeberg_kernel::record::RECORD_KEY;
use serde_json::{Value, json};
use sqlx::ConnectOptions as _;
use sqlx::sqlite::SqliteConnectOptions;

use super::{House, Order, branch, main_branch};

/// A moment in the commits of a scripted worker; they count from 1. In a first train that nothing disturbs
/// the first commit stages and the second lands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Requirements were looked at and the metadata file is written; the pointer has not moved.
    Before(usize),
    /// The pointer has moved, or not; the worker does not know yet.
    After(usize),
}

type Action = Box<dyn FnOnce() -> LocalBoxFuture<'static, ()> + Send>;

/// What happens between the worker's commits.
#[derive(Default)]
pub struct Script {
    commits: AtomicUsize,
    actions: Mutex<Vec<(Moment, Action)>>,
    lost: Mutex<Vec<usize>>,
}

impl Script {
    /// Does this once, at that moment.
    pub fn at<F>(&self, moment: Moment, action: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        self.actions.lock().unwrap().push((moment, Box::new(move || Box::pin(action()))));
    }

    /// The answer to this commit is lost, whatever became of it.
    pub fn lose_answer(&self, commit: usize) {
        self.lost.lock().unwrap().push(commit);
    }

    pub fn commits(&self) -> usize {
        self.commits.load(Ordering::SeqCst)
    }

    pub fn assert_played(&self) {
        let left: Vec<Moment> = self.actions.lock().unwrap().iter().map(|(moment, _)| *moment).collect();
        assert!(left.is_empty(), "the worker never came to {left:?}");
    }

    fn play(&self, now: Moment) {
        loop {
            let action = {
                let mut actions = self.actions.lock().unwrap();
                let Some(at) = actions.iter().position(|(moment, _)| *moment == now) else { return };
                actions.remove(at).1
            };
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(action()));
        }
    }
}

impl CommitHook for Script {
    fn before_swap(&self) {
        let commit = self.commits.fetch_add(1, Ordering::SeqCst) + 1;
        self.play(Moment::Before(commit));
    }

    fn after_swap(&self) {
        self.play(Moment::After(self.commits()));
    }

    fn loses_answer(&self) -> bool {
        let commit = self.commits();
        self.lost.lock().unwrap().contains(&commit)
    }
}

impl House {
    /// A worker whose commits follow a script.
    pub async fn scripted(&self) -> (Worker, Arc<Script>) {
        let script = Arc::new(Script::default());
        let hook = Arc::clone(&script) as Arc<dyn CommitHook>;
        let catalog = Self::catalog_in(self.dir.path(), &self.clock, false).await.with_hook(hook);
        (Self::worker_over(&self.dir, Arc::new(catalog), &self.ledger, &self.clock, "scripted"), script)
    }

    /// The command's enqueue, with all that it refuses.
    pub async fn ask(&self, source: &str) -> Result<RequestId, UserError> {
        let args = EnqueueArgs {
            table: self.table.clone(),
            source: branch(source),
            target: main_branch(),
            snapshot: None,
            class: None,
            idempotency_key: None,
            principal: Principal::new("test"),
        };
        let policies = self.worker.policies.read().unwrap();
        let context = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: self.now(),
        };
        match enqueue(context, &args).await? {
            Enqueued::New(row) | Enqueued::Existing(row) => Ok(row.id),
            Enqueued::KeyConflict(row) => panic!("no key was given, but request {} has it", row.id),
        }
    }

    /// A batch on a branch, as one append.
    pub async fn write_batch(&self, name: &str, batch: RecordBatch) -> SnapshotId {
        self.write_batch_to(&self.table, name, batch).await
    }

    pub async fn write_batch_to(&self, table: &TableName, name: &str, batch: RecordBatch) -> SnapshotId {
        let write = BranchWrite {
            branch: branch(name),
            label: "append".to_owned(),
            rows: vec![batch],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        self.writer.write(table, write).await.unwrap()
    }

    /// Deletes whole days, as one snapshot that adds nothing.
    pub async fn delete_days(&self, name: &str, days: &[u32]) -> SnapshotId {
        self.write(name, "delete", &[], in_days(days), BTreeMap::new()).await
    }

    /// Writes the rows of a day again, in one file: a compaction that calls itself `label`.
    pub async fn compact(&self, name: &str, day: u32, label: &str) -> SnapshotId {
        let rows: Vec<Order> = self.rows(name).await.into_iter().filter(|row| row.day == day).collect();
        self.write(name, label, &rows, in_days(&[day]), BTreeMap::new()).await
    }

    /// One snapshot with a record. `days` are removed.
    pub async fn recorded(&self, name: &str, record: &Value, days: &[u32], rows: &[Order]) -> SnapshotId {
        let summary = BTreeMap::from([(RECORD_KEY.to_owned(), record.to_string())]);
        let label = if days.is_empty() { "append" } else { "overwrite" };
        self.write(name, label, rows, in_days(days), summary).await
    }

    pub async fn commit(&self, updates: Vec<Update>) {
        let table = self.loaded().await;
        let outcome = self.catalog.commit(&table, &[], updates).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    }

    pub async fn set_property(&self, key: &str, value: &str) {
        let properties = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        self.commit(vec![Update::SetProperties(properties)]).await;
    }

    /// Sets a branch, whatever it was: only a stranger does that.
    pub async fn force_branch(&self, name: &str, at: SnapshotId) {
        let kind = RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None };
        self.set_ref(RefFact { name: branch(name), snapshot_id: at, kind, max_ref_age_ms: None }).await;
    }

    pub async fn tag(&self, name: &str, at: SnapshotId) {
        let kind = RefKind::Tag;
        self.set_ref(RefFact { name: branch(name), snapshot_id: at, kind, max_ref_age_ms: None }).await;
    }

    pub async fn set_ref(&self, reference: RefFact) {
        self.commit(vec![Update::SetRef(reference)]).await;
    }

    /// Edits the table's metadata as another engine would, and makes it the current one.
    pub async fn edit_metadata(&self, edit: impl FnOnce(&mut Value)) {
        let location = self.loaded().await.metadata_location.clone();
        let path = location.strip_prefix("file://").unwrap();
        let mut metadata: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        edit(&mut metadata);
        let (folder, file) = path.rsplit_once('/').unwrap();
        let version: u64 = file.split_once('-').unwrap().0.parse().unwrap();
        let next = format!("{folder}/{:05}-{}.metadata.json", version + 1, uuid::Uuid::new_v4());
        std::fs::write(&next, metadata.to_string()).unwrap();
        let options = SqliteConnectOptions::new().filename(self.dir.path().join("catalog.db"));
        let mut file = options.connect().await.unwrap();
        let moved =
            sqlx::query("UPDATE iceberg_tables SET metadata_location = $1 WHERE metadata_location = $2")
                .bind(format!("file://{next}"))
                .bind(location)
                .execute(&mut file)
                .await
                .unwrap();
        assert_eq!(moved.rows_affected(), 1);
    }

    /// A new current schema, made from the fields of schema `from`. Its id.
    pub async fn change_schema(&self, from: i64, edit: impl FnOnce(&mut Vec<Value>)) -> i64 {
        let mut id = 0;
        self.edit_metadata(|metadata| {
            let schemas = metadata["schemas"].as_array_mut().unwrap();
            let mut schema = schemas.iter().find(|s| s["schema-id"] == from).unwrap().clone();
            id = schemas.iter().map(|s| s["schema-id"].as_i64().unwrap()).max().unwrap() + 1;
            schema["schema-id"] = json!(id);
            let fields = schema["fields"].as_array_mut().unwrap();
            edit(fields);
            let last = fields.iter().map(|f| f["id"].as_i64().unwrap()).max().unwrap();
            schemas.push(schema);
            metadata["current-schema-id"] = json!(id);
            metadata["last-column-id"] = json!(last.max(metadata["last-column-id"].as_i64().unwrap()));
        })
        .await;
        id
    }

    /// A new default partition spec with one field, made of `(source id, transform)`; none: unpartitioned.
    pub async fn change_spec(&self, field: Option<(i64, &str)>) -> i64 {
        let mut id = 0;
        self.edit_metadata(|metadata| {
            let specs = metadata["partition-specs"].as_array_mut().unwrap();
            id = specs.iter().map(|s| s["spec-id"].as_i64().unwrap()).max().unwrap() + 1;
            let last = metadata["last-partition-id"].as_i64().unwrap() + 1;
            let fields: Vec<Value> = field
                .iter()
                .map(|(source, transform)| {
                    json!({"source-id": source, "field-id": last, "name": format!("p{last}"),
                        "transform": transform})
                })
                .collect();
            metadata["partition-specs"]
                .as_array_mut()
                .unwrap()
                .push(json!({"spec-id": id, "fields": fields}));
            metadata["default-spec-id"] = json!(id);
            metadata["last-partition-id"] = json!(last);
        })
        .await;
        id
    }

    /// Locations of the manifest lists, manifests and data files that a snapshot names, with ref or without.
    pub async fn named_files(&self) -> BTreeSet<String> {
        let table = self.loaded().await;
        let store = ManifestStore::new(64 << 20);
        let mut named: BTreeSet<String> = BTreeSet::new();
        for snapshot in table.facts.snapshots.iter() {
            named.insert(snapshot.manifest_list.clone());
            named.extend(store.manifest_paths(&table, snapshot).await.unwrap());
            let change = store.changes(&table, snapshot).await.unwrap();
            let data = change.added.iter().chain(&change.removed);
            let deletes = change.added_deletes.iter().chain(&change.removed_deletes);
            named.extend(data.chain(deletes).map(|file| file.path.to_string()));
        }
        named
    }

    /// Manifest lists, manifests and data files in the House's folder that no snapshot names: what an engine's
    /// removal of orphan files would take, whatever their age.
    pub async fn orphans(&self) -> Vec<PathBuf> {
        let named = self.named_files().await;
        let mut orphans = Vec::new();
        let mut folders = vec![self.dir.path().join("warehouse")];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.display().to_string();
                if path.is_dir() {
                    folders.push(path);
                } else if [".avro", ".parquet", ".puffin"].iter().any(|kind| name.ends_with(kind))
                    && !named.contains(&format!("file://{name}"))
                {
                    orphans.push(path);
                }
            }
        }
        orphans
    }

    /// Rows of a branch under the table's current schema, one text each, sorted: `4|2026-08-22|new`. A null
    /// is `-`.
    pub async fn texts(&self, name: &str) -> Vec<String> {
        let table = self.loaded().await;
        let Some(head) = table.facts.head(&branch(name)) else { return Vec::new() };
        let snapshot = table.facts.snapshots.get(head).unwrap();
        let live =
            ManifestStore::new(64 << 20).live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap();
        let columns: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
        let counters = Arc::new(ScanCounters::default());
        let mut rows = Vec::new();
        for file in &live_rows(live).unwrap() {
            let stream = reader.read(file, &columns, &counters).unwrap();
            for batch in stream.try_collect::<Vec<_>>().await.unwrap() {
                for row in 0..batch.num_rows() {
                    let values = batch.columns().iter().map(|column| {
                        if column.is_null(row) {
                            "-".to_owned()
                        } else {
                            array_value_to_string(column, row).unwrap()
                        }
                    });
                    rows.push(values.collect::<Vec<_>>().join("|"));
                }
            }
        }
        rows.sort();
        rows
    }

    /// Another hand's cherry-pick of one snapshot onto a branch, with or without the stamp that Java sets.
    pub async fn pick(&self, name: &str, source: SnapshotId, stamped: bool) -> SnapshotId {
        let table = self.loaded().await;
        let facts = &table.facts;
        let store = ManifestStore::new(64 << 20);
        let snapshot = facts.snapshots.get(source).unwrap();
        let added = store.added_files(&table, snapshot).await.unwrap();
        let stamp = stamped.then(|| (SOURCE_SNAPSHOT_ID.to_owned(), source.to_string()));
        let id = new_snapshot_id(facts, || (self.writer.random)());
        let change = SnapshotChange {
            id,
            label: "append".to_owned(),
            add: added.into_iter().map(AddedFile::from).collect(),
            remove: BTreeSet::new(),
            add_deletes: Vec::new(),
            remove_deletes: BTreeSet::new(),
            summary: stamp.into_iter().collect(),
            now_ms: self.now(),
            schema_id: facts.current_schema_id,
        };
        let reference = facts.refs.get(&branch(name)).unwrap().clone();
        let parent = facts.snapshots.get(reference.snapshot_id);
        let mut writer = SnapshotWriter::on(&store, &table, parent).await.unwrap();
        let picked = writer.add(change).await.unwrap();
        let moved = RefFact { snapshot_id: id, ..reference };
        self.commit(vec![Update::AddSnapshot(picked), Update::SetRef(moved)]).await;
        id
    }

    /// Manifests of a branch's head.
    pub async fn manifests(&self, name: &str) -> u64 {
        let table = self.loaded().await;
        let head = table.facts.head(&branch(name)).unwrap();
        let store = ManifestStore::new(64 << 20);
        let snapshot = table.facts.snapshots.get(head).unwrap();
        store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        store.counts().manifests_read
    }

    /// Foreign commits on main as the ledger has them: kind and snapshot.
    pub async fn foreign(&self) -> Vec<(&'static str, SnapshotId)> {
        let uuid = self.loaded().await.facts.uuid.clone();
        let rows = self.ledger.foreign(&uuid, &main_branch()).await.unwrap();
        rows.into_iter().map(|row| (row.kind.word(), row.snapshot)).collect()
    }

    /// A request that lands, so that the queue knows the target before the story begins.
    pub async fn first_landing(&self) {
        self.append_on_new("ingest/first", &[super::order(100, 30)]).await;
        let first = self.enqueue("ingest/first").await;
        self.drain().await;
        assert_eq!(self.state(first).await, "landed");
    }

    /// Everything that the log says of a request, as one text.
    pub async fn history(&self, id: RequestId) -> String {
        let attempts = self.ledger.attempts(id).await.unwrap();
        let line = |detail: &Option<Value>| detail.as_ref().map(Value::to_string).unwrap_or_default();
        attempts.iter().map(|a| format!("{} {}\n", a.state, line(&a.detail))).collect()
    }

    pub async fn detail(&self, id: RequestId) -> String {
        self.request(id).await.detail.map(|detail| detail.to_string()).unwrap_or_default()
    }

    /// The evidence of one check that speaks for a request, oldest first.
    pub async fn evidence(&self, id: RequestId, check: &str) -> Vec<EvidenceRow> {
        let rows = self.ledger.evidence_of_request(id).await.unwrap();
        rows.into_iter().filter(|row| row.evidence.check == check).collect()
    }

    /// The key `source-snapshot-id` of main's head.
    pub async fn published_from(&self) -> Option<SnapshotId> {
        let table = self.loaded().await;
        let head = table.facts.head(&main_branch()).unwrap();
        table.facts.snapshots.get(head).unwrap().source_snapshot_id()
    }
}

fn in_days(days: &[u32]) -> Removal {
    let days: Vec<String> = days.iter().map(|day| format!("2026-08-{day:02}")).collect();
    Removal::Files(Box::new(move |file| {
        file.fact.partition.fields.iter().any(|f| f.value.as_ref().is_some_and(|v| days.contains(v)))
    }))
}

/// The record of an overwrite that replaces one order by key, wherever its row lies.
pub fn keyed_record(id: i64, day: u32, status: &str, amount: &str) -> Value {
    json!({
        "v": 1,
        "id": format!("set-{id}"),
        "op": "overwrite-where",
        "where": format!("order_id = {id}"),
        "query": format!(
            "SELECT CAST({id} AS BIGINT) AS order_id, DATE '2026-08-{day:02}' AS order_date, \
             '{status}' AS status, CAST({amount} AS DECIMAL(12, 2)) AS amount"
        ),
    })
}

/// A batch of named columns.
pub fn columns(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
}

pub fn long(values: &[i64]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

pub fn text(values: &[Option<&str>]) -> ArrayRef {
    Arc::new(StringArray::from(values.to_vec()))
}

/// Days of August 2026.
pub fn days(values: &[u32]) -> ArrayRef {
    let days =
        values.iter().map(|day| i32::try_from(parse_date(&format!("2026-08-{day:02}")).unwrap()).unwrap());
    Arc::new(Date32Array::from(days.collect::<Vec<_>>()))
}

pub fn decimal(unscaled: &[i128], precision: u8, scale: i8) -> ArrayRef {
    let array = Decimal128Array::from(unscaled.to_vec());
    Arc::new(array.with_precision_and_scale(precision, scale).unwrap())
}
