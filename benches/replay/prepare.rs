//! Makes a case's table, its branch and its request. Nothing here is measured.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use datafusion::arrow::array::{ArrayRef, Date32Array, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use mergeberg::ledger::{Enqueued, Ledger, NewRequest};
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::data_files::{DataFileWriter, NewDataFile};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName};
use mergeberg_kernel::record::RECORD_KEY;
use serde_json::{Value, json};

use crate::case::{Case, Kind, Place};

pub const CATALOG: &str = "bench";
const TABLE: &str = "bench.accounts";
const FEED: &str = "bench.feed";
const BRANCH: &str = "work/request";
/// Rows of one batch while tables are filled.
const FILL_ROWS: usize = 100_000;
/// Multiplied with, it spreads numbers over all keys, each once.
const SPREAD: usize = 7_368_787;

const POLICY: &str = r#"
table = "bench.accounts"

[[class]]
name = "default"
prefix = ""
overlap = "allow"
"#;

pub fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

pub fn table_name(name: &str) -> anyhow::Result<TableName> {
    name.parse().map_err(|e| anyhow!("{name}: {e}"))
}

pub async fn open_catalog(place: &Place) -> anyhow::Result<SqlCatalog> {
    let uri = place.catalog().display().to_string();
    Ok(SqlCatalog::open(CATALOG, &uri, &place.warehouse(), Arc::new(now_ms)).await?)
}

pub async fn prepare(place: &Place, case: &Case) -> anyhow::Result<()> {
    std::fs::create_dir_all(place.policies())?;
    std::fs::write(place.policies().join("accounts.toml"), POLICY)?;
    let uri = place.catalog().display().to_string();
    let catalog = SqlCatalog::create(CATALOG, &uri, &place.warehouse(), Arc::new(now_ms)).await?;
    catalog.create_namespace("bench").await?;
    let columns = TableDefinition::default()
        .column("account_id", "long", false)
        .column("opened", "date", false)
        .column("name", "string", false)
        .column("cents", "long", false);
    catalog.define_table(&table_name(FEED)?, &columns).await?;
    catalog.define_table(&table_name(TABLE)?, &columns.partitioned_by("opened", "identity")).await?;
    let house = House { catalog, store: ManifestStore::new(64 << 20) };
    house.fill(place, case.kind).await?;
    house.enqueue(place).await?;
    drop(house);
    place.keep()
}

/// What one snapshot does.
#[derive(Default)]
struct Change {
    label: &'static str,
    add: Vec<NewDataFile>,
    remove: BTreeSet<Arc<str>>,
    summary: BTreeMap<String, String>,
}

impl Change {
    fn append(add: Vec<NewDataFile>) -> Self {
        Self { label: "append", add, ..Self::default() }
    }
}

struct House {
    catalog: SqlCatalog,
    store: ManifestStore,
}

impl House {
    async fn fill(&self, place: &Place, kind: Kind) -> anyhow::Result<()> {
        match kind {
            Kind::ReplacePartitions { files } => {
                // One file a day, every day replaced; meanwhile the first of them got a row.
                let old = self.write(TABLE, days(files, "old")?).await?;
                let remove = old.iter().map(|file| Arc::clone(&file.fact.path)).collect();
                self.commit(TABLE, "main", Change::append(old)).await?;
                let record = json!({"v": 1, "id": "days", "op": "replace-partitions"});
                let summary = BTreeMap::from([(RECORD_KEY.to_owned(), record.to_string())]);
                let add = self.write(TABLE, days(files, "new")?).await?;
                self.branch(Change { label: "overwrite", add, remove, summary }).await?;
                let late = self.write(TABLE, days(1, "late")?).await?;
                self.commit(TABLE, "main", Change::append(late)).await
            }
            Kind::Append { files } => {
                let first = self.write(TABLE, days(1, "old")?).await?;
                self.commit(TABLE, "main", Change::append(first)).await?;
                let new = self.write(TABLE, days(files, "new")?).await?;
                self.branch(Change::append(new)).await?;
                let late = self.write(TABLE, days(1, "late")?).await?;
                self.commit(TABLE, "main", Change::append(late)).await
            }
            Kind::Merge { target, source, days } => {
                let mut files = Vec::with_capacity(days);
                for day in 0..days {
                    let ids = day * target / days..(day + 1) * target / days;
                    files.extend(self.write(TABLE, accounts(ids.collect(), day, "old")?).await?);
                }
                let known: Vec<usize> = (0..source / 2).map(|at| at * SPREAD % target).collect();
                let new: Vec<usize> = (target..target + source - known.len()).collect();
                let mut feed = self.write(FEED, accounts(known, days, "changed")?).await?;
                feed.extend(self.write(FEED, accounts(new, days, "new")?).await?);
                let mut inputs = json!({"feed": paths(&feed)});
                self.commit(FEED, "main", Change::append(feed)).await?;
                // On the branch it was one day that it met; here it is run again on all of them.
                let (first, rest) = files.split_first().context("a table without days")?;
                self.commit(TABLE, "main", Change::append(vec![first.clone()])).await?;
                let add = self.write(TABLE, accounts((0..10).collect(), 0, "branch")?).await?;
                let remove = BTreeSet::from([Arc::clone(&first.fact.path)]);
                let summary =
                    BTreeMap::from([(RECORD_KEY.to_owned(), self.merge_record().await?.to_string())]);
                self.branch(Change { label: "overwrite", add, remove, summary }).await?;
                self.commit(TABLE, "main", Change::append(rest.to_vec())).await?;
                inputs["target"] = paths(&files);
                Ok(std::fs::write(place.inputs(), inputs.to_string())?)
            }
        }
    }

    async fn merge_record(&self) -> anyhow::Result<Value> {
        let feed = self.catalog.load(&table_name(FEED)?).await?;
        let pin = feed.facts.head(&RefName::main()).context("the feed is empty")?;
        Ok(json!({
            "v": 1, "id": "merge", "op": "sql",
            "sql": format!(
                "MERGE INTO {TABLE} t USING {FEED} s ON t.account_id = s.account_id \
                 WHEN MATCHED THEN UPDATE SET name = s.name, cents = t.cents + s.cents \
                 WHEN NOT MATCHED THEN INSERT *"
            ),
            "inputs": {"feed": {"table": FEED, "snapshot-id": pin.0}},
        }))
    }

    async fn write(&self, table: &str, batches: Vec<RecordBatch>) -> anyhow::Result<Vec<NewDataFile>> {
        let table = self.catalog.load(&table_name(table)?).await?;
        Ok(DataFileWriter::write_batches(&table, table.facts.current_schema_id, batches).await?)
    }

    /// A snapshot of the request's branch, which is at `main`'s head.
    async fn branch(&self, change: Change) -> anyhow::Result<()> {
        let table = self.catalog.load(&table_name(TABLE)?).await?;
        let main = table.facts.head(&RefName::main()).context("main is empty")?;
        let to = Update::SetRef(branch_at(RefName::new(BRANCH), main));
        must_land(self.catalog.commit(&table, &[], vec![to]).await)?;
        self.commit(TABLE, BRANCH, change).await
    }

    async fn commit(&self, table: &str, branch: &str, change: Change) -> anyhow::Result<()> {
        let Change { label, add, remove, summary } = change;
        let table: Arc<LoadedTable> = self.catalog.load(&table_name(table)?).await?;
        let name = RefName::new(branch);
        let parent = table.facts.head(&name).and_then(|id| table.facts.snapshots.get(id));
        let change = SnapshotChange {
            id: new_snapshot_id(&table.facts, rand::random::<u64>),
            label: label.to_owned(),
            add: add.into_iter().map(AddedFile::from).collect(),
            remove,
            add_deletes: Vec::new(),
            remove_deletes: BTreeSet::new(),
            summary,
            now_ms: now_ms(),
            schema_id: table.facts.current_schema_id,
        };
        let mut writer = SnapshotWriter::on(&self.store, &table, parent).await?;
        let snapshot = writer.add(change).await?;
        let to = Update::SetRef(branch_at(name, snapshot.id));
        must_land(self.catalog.commit(&table, &[], vec![Update::AddSnapshot(snapshot), to]).await)
    }

    async fn enqueue(&self, place: &Place) -> anyhow::Result<()> {
        let table = self.catalog.load(&table_name(TABLE)?).await?;
        let source = RefName::new(BRANCH);
        let new = NewRequest {
            table: table_name(TABLE)?,
            table_uuid: table.facts.uuid.clone(),
            pinned: table.facts.head(&source).context("there is no branch")?,
            source,
            target: RefName::main(),
            class: "default".to_owned(),
            principal: Principal::new("bench"),
            idempotency_key: None,
            structure: table.facts.structure(),
            format_version: 2,
        };
        let ledger = Ledger::open_or_create(place.ledger()).await?;
        let outcome = ledger.enqueue(&new, now_ms()).await?;
        ledger.close().await;
        match outcome {
            Enqueued::New(_) => Ok(()),
            other => bail!("the request was there already: {other:?}"),
        }
    }
}

fn branch_at(name: RefName, snapshot_id: SnapshotId) -> RefFact {
    RefFact {
        name,
        snapshot_id,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    }
}

fn must_land(outcome: CommitOutcome) -> anyhow::Result<()> {
    match outcome {
        CommitOutcome::Landed(_) => Ok(()),
        other => bail!("a commit did not land: {other:?}"),
    }
}

fn paths(files: &[NewDataFile]) -> Value {
    files.iter().map(|file| file.fact.path.trim_start_matches("file://")).collect()
}

/// A row for each of so many days.
fn days(count: usize, name: &str) -> anyhow::Result<Vec<RecordBatch>> {
    let all: Vec<usize> = (0..count).collect();
    all.chunks(FILL_ROWS).map(|days| rows(days, |at| at, name)).collect()
}

/// Accounts of one day.
fn accounts(ids: Vec<usize>, day: usize, name: &str) -> anyhow::Result<Vec<RecordBatch>> {
    ids.chunks(FILL_ROWS).map(|ids| rows(ids, |_| day, name)).collect()
}

fn rows(ids: &[usize], day: impl Fn(usize) -> usize, name: &str) -> anyhow::Result<RecordBatch> {
    let schema = Schema::new(vec![
        Field::new("account_id", DataType::Int64, true),
        Field::new("opened", DataType::Date32, true),
        Field::new("name", DataType::Utf8, true),
        Field::new("cents", DataType::Int64, true),
    ]);
    let numbers = ids.iter().map(|id| i64::try_from(*id)).collect::<Result<Vec<_>, _>>()?;
    let days = ids.iter().map(|id| i32::try_from(day(*id))).collect::<Result<Vec<_>, _>>()?;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from(numbers.clone())),
        Arc::new(Date32Array::from(days)),
        Arc::new(StringArray::from_iter_values(ids.iter().map(|id| format!("{name} {:x}", id * SPREAD)))),
        Arc::new(numbers.iter().map(|id| Some(id % 100_000)).collect::<Int64Array>()),
    ];
    Ok(RecordBatch::try_new(Arc::new(schema), columns)?)
}
