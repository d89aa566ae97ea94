//! Counts: what a number of requests costs in commits, scans, manifests read, evidence and refs. They hold
//! on every machine, unlike times.

pub(crate) mod wide_table;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use datafusion::arrow::array::{Date32Array, RecordBatch};
use mergeberg::ledger::{Enqueued, EvidenceRow, NewRequest};
use mergeberg::table::catalog::{Capabilities, Catalog, CatalogError, CommitOutcome};
use mergeberg::table::data_files::{DataFileWriter, NewDataFile};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::ManifestCounts;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter};
use mergeberg::worker::context::Worker;
use mergeberg_kernel::commit::{NewSnapshot, Requirement, Update};
use mergeberg_kernel::evidence::CheckResult;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Principal, RequestId, SchemaId, SnapshotId, TableName};

use serde_json::json;
use wide_table::append_manifests;

use crate::support::{House, ORDERS_POLICY, branch, columns, decimal, drain, long, main_branch, order, text};

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
    let numbers: Vec<i32> = (0..i32::try_from(count).unwrap()).collect();
    let batches = numbers.chunks(200).map(bulk_batch).collect();
    let files = DataFileWriter::write_batches(&table, table.facts.current_schema_id, batches).await.unwrap();
    assert_eq!(files.len(), count, "one file a day");
    files
}

/// Orders 100,000 and on, each in its own day.
fn bulk_batch(numbers: &[i32]) -> RecordBatch {
    let ids: Vec<i64> = numbers.iter().map(|n| 100_000 + i64::from(*n)).collect();
    let days: Vec<i32> = numbers.iter().map(|n| BULK_DAY + n).collect();
    let count = numbers.len();
    columns(vec![
        ("order_id", long(&ids)),
        ("order_date", Arc::new(Date32Array::from(days))),
        ("status", text(&vec![Some("new"); count])),
        ("amount", decimal(&vec![100; count], 12, 2)),
    ])
}

fn append_of(id: SnapshotId, file: NewDataFile, house: &House) -> SnapshotChange {
    SnapshotChange {
        id,
        label: "append".to_owned(),
        add: vec![AddedFile::from(file)],
        remove: BTreeSet::new(),
        add_deletes: Vec::new(),
        remove_deletes: BTreeSet::new(),
        summary: BTreeMap::new(),
        now_ms: house.now(),
        schema_id: SchemaId(0),
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
    branches_under(SchemaId(0), house, prefix, count).await
}

async fn branches_under(
    schema: SchemaId,
    house: &House,
    prefix: &str,
    count: usize,
) -> Vec<(String, SnapshotId)> {
    let table = house.loaded().await;
    let parent = table.facts.head(&main_branch()).and_then(|id| table.facts.snapshots.get(id)).cloned();
    let mut updates = Vec::new();
    let mut made = Vec::new();
    // Each writer takes the next sequence number, as if the branches had been written one after the other.
    let mut view = table.as_ref().clone();
    for (file, number) in files(house, count).await.into_iter().zip(1_i64..) {
        let id = SnapshotId(1_000_000 + number);
        let mut writer = SnapshotWriter::on(&house.writer.store, &view, parent.as_ref()).await.unwrap();
        let append = SnapshotChange { schema_id: schema, ..append_of(id, file, house) };
        let snapshot: NewSnapshot = writer.add(append).await.unwrap();
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

/// More wait for a reviewer than any train or first look holds, and all came first.
#[tokio::test(flavor = "multi_thread")]
async fn hundreds_in_review_keep_nobody_else_from_landing() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.append_on_new("ingest/last", &[order(5, 23)]).await;
    let note = json!({"id": 5, "name": "note", "required": false, "type": "string"});
    let schema = house.change_schema(0, |fields| fields.push(note)).await;
    let schema = SchemaId(i32::try_from(schema).unwrap());
    let made = branches_under(schema, &house, "ingest/new-", 4 * BATCH + 1).await;
    let in_review = enqueue_all(&house, &made, "ingest").await;
    let last = house.enqueue("ingest/last").await;

    house.drain().await;

    assert_eq!(house.state(last).await, "landed", "{}", house.detail(last).await);
    for request in in_review {
        assert_eq!(house.state(request).await, "in-review");
    }
    house.assert_sound().await;
}

/// What was read of the store since the counts were taken.
fn read_since(worker: &Worker, before: ManifestCounts) -> (u64, u64) {
    let now = worker.store.counts();
    (now.lists_read - before.lists_read, now.manifests_read - before.manifests_read)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_classified_by_the_manifests_written_since_its_base() {
    let house = House::empty(ORDERS_POLICY).await;
    house.append("main", &[order(1, 20)]).await;
    append_manifests(&house, 2000, BULK_DAY).await;
    house.append_on_new("ingest/a", &[order(10, 21)]).await;
    for id in 2..5 {
        house.append("main", &[order(id, 22)]).await;
    }
    let request = house.enqueue("ingest/a").await;
    // A worker that knows nothing yet.
    let (worker, _) = counting_worker(&house);
    let epoch = house.ledger.lead("counting", 60_000, house.now()).await.unwrap().unwrap();
    let before = worker.store.counts();

    worker.tick(epoch).await.unwrap();

    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    // One manifest of the branch and three of main; the check finds none in its day but the branch's own.
    let (lists, manifests) = read_since(&worker, before);
    assert_eq!(manifests, 4, "of 2,005");
    assert!(lists <= 5, "{lists} lists: one a snapshot since base, and the head's");
    let kept = house.ledger.receipts(0, i64::MAX).await.unwrap().len();
    assert_eq!(kept, 1);
}

/// Rule E2, case O39: one scan serves a train, under the id that the target becomes and no other.
#[tokio::test(flavor = "multi_thread")]
async fn one_scan_serves_a_train_and_only_the_head_has_its_evidence() {
    let house = House::orders(ORDERS_POLICY).await;
    let mut requests = Vec::new();
    for shard in 0..8_u32 {
        let name = format!("ingest/{shard}");
        house.append_on_new(&name, &[order(i64::from(10 + shard), 21)]).await;
        requests.push(house.enqueue(&name).await);
    }
    house.drain().await;

    let landing = house.ledger.receipts(0, i64::MAX).await.unwrap().pop().unwrap();
    let rows = evidence(&house, &requests).await;
    let scans: Vec<&EvidenceRow> = rows.iter().filter(|row| row.evidence.rows_scanned > 0).collect();
    assert_eq!(scans.len(), 1);
    assert_eq!(scans[0].evidence.check, "one-order-once");
    assert_eq!(scans[0].evidence.candidate, landing.intent.tail);
    assert_eq!(scans[0].requests, requests, "it speaks for all of them");

    // The ids between are snapshots on main, but nobody looked at their rows, and nothing says so.
    let (tail, between) = landing.intent.candidates.split_last().unwrap();
    assert_eq!((*tail, between.len()), (landing.intent.tail, 7));
    for id in between {
        let rows = house.ledger.evidence_of_candidate(*id).await.unwrap();
        let checks: BTreeSet<&str> = rows.iter().map(|row| row.evidence.check.as_str()).collect();
        assert_eq!(checks, BTreeSet::from(["lineage", "schema"]), "of metadata only");
        assert!(rows.iter().all(|row| row.evidence.result == CheckResult::Passed));
        assert!(!landing.intent.required.contains(&(*id, "one-order-once".to_owned())));
    }
    assert!(landing.intent.required.contains(&(*tail, "one-order-once".to_owned())));
    house.assert_sound().await;
}

/// Case O22: what is finished leaves nothing behind among the refs, also after waits long enough for pins.
#[tokio::test(flavor = "multi_thread")]
async fn case_o22_refs_are_main_and_what_is_open() {
    let house = House::orders(ORDERS_POLICY).await;
    let (worker, catalog) = counting_worker(&house);
    let made = branches(&house, "ingest/", 305).await;
    let (finished, open) = made.split_at(300);
    let requests = enqueue_all(&house, finished, "ingest").await;
    let cancelled = enqueue_all(&house, &open[..1], "ingest").await[0];
    let epoch = house.ledger.lead("counting", 3_600_000, house.now()).await.unwrap().unwrap();
    worker.tick(epoch).await.unwrap();
    // The others wait for so long that they are pinned.
    house.advance(5 * 60_000);
    worker.tick(epoch).await.unwrap();
    let pins = house.refs().await.iter().filter(|name| name.starts_with("mergeberg/pin/")).count();
    // 100 landed; the others have a head and a base each.
    assert_eq!(pins, 2 * 201);
    house.ledger.cancel(cancelled, &Principal::new("somebody"), house.now()).await.unwrap();

    while worker.tick(epoch).await.unwrap().changed {}

    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    let mut expected: Vec<String> = open.iter().map(|(name, _)| name.clone()).collect();
    expected.push("main".to_owned());
    expected.sort();
    assert_eq!(house.refs().await, expected);
    let (staging, landing, other) = catalog.counts();
    assert_eq!((staging, landing), (300 / BATCH, 300 / BATCH));
    assert_eq!(other, 2, "pins are set once, go with the landings, and once for the cancelled one");
}

/// Case O39: a backfill over everything among appends that never pause. It lands once its age bound is
/// over, every append waits for one backfill at most, and nobody is checked over and over.
#[tokio::test(flavor = "multi_thread")]
async fn case_o39_validations_a_landed_request_are_bounded() {
    let policy = format!("{ORDERS_POLICY}{BACKFILL}");
    let house = House::orders(&policy).await;
    let (worker, _) = counting_worker(&house);
    let epoch = house.ledger.lead("counting", 3_600_000, house.now()).await.unwrap().unwrap();
    house.branch("backfill/all").await;
    let record = serde_json::json!({
        "v": 1, "id": "all", "op": "overwrite-where", "where": "order_id > 0",
        "query": "SELECT order_id, order_date, 'done' AS status, amount FROM target",
    });
    house.recorded("backfill/all", &record, &[20, 21], &[order(1, 20), order(2, 20), order(3, 21)]).await;
    let backfill = house.enqueue("backfill/all").await;

    let mut appends = Vec::new();
    let mut rounds = 0;
    let mut landed_after = None;
    while rounds < APPENDS {
        rounds += 1;
        let name = format!("ingest/{rounds}");
        house.append_on_new(&name, &[order(100 + rounds, 22)]).await;
        appends.push(house.enqueue(&name).await);
        worker.tick(epoch).await.unwrap();
        house.advance(EVERY_MS);
        if landed_after.is_none() && house.state(backfill).await == "landed" {
            landed_after = Some(house.request(backfill).await);
        }
    }
    while worker.tick(epoch).await.unwrap().changed {}

    let row = house.request(backfill).await;
    assert_eq!(row.state.to_string(), "landed");
    let took = row.ended_at_ms.unwrap() - row.enqueued_at_ms;
    assert!(took <= BACKFILL_BOUND_MS + 2 * EVERY_MS, "the backfill took {took} ms");
    for request in &appends {
        let row = house.request(*request).await;
        assert_eq!(row.state.to_string(), "landed");
        let waited = row.ended_at_ms.unwrap() - row.enqueued_at_ms;
        assert!(waited <= 2 * EVERY_MS, "request {request} waited {waited} ms");
        assert_eq!(row.attempts, 1, "request {request} was staged again and again");
    }
    let mut all = appends.clone();
    all.push(backfill);
    let rows = evidence(&house, &all).await;
    assert!(rows.len() <= EVIDENCE_A_REQUEST * all.len(), "{} rows for {} requests", rows.len(), all.len());
    let done = house.rows("main").await.into_iter().filter(|row| row.status == "done").count();
    assert!(done >= 3, "the backfill saw what had landed before it");
    house.assert_sound().await;
}

/// Appends of case O39, and the time between two of them.
const APPENDS: i64 = 20;
const EVERY_MS: i64 = 30_000;
/// Age bound of the backfill below.
const BACKFILL_BOUND_MS: i64 = 300_000;
/// Lineage, schema and one scan.
const EVIDENCE_A_REQUEST: usize = 3;
const BACKFILL: &str = r#"
[[class]]
name = "backfill"
prefix = "backfill/"
age-bound = "5m"
"#;
