//! A table of events by day, branches that append to it, and its queue, over any catalog. Nothing here is measured.

use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use datafusion::arrow::array::{
    ArrayRef, Date32Array, Decimal128Array, Int64Array, RecordBatch, StringArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use mergeberg::ledger::{Enqueued, Ledger, NewRequest};
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::data_files::{DataFileWriter, NewDataFile};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};
use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::filter::parse_date;
use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName};
use serde::{Deserialize, Serialize};

pub const TABLE: &str = "bench.events";
pub const CATALOG: &str = "bench";

/// Rows of one batch while a day is filled.
const FILL_ROWS: usize = 100_000;
/// Snapshots of one commit while history is written.
const HISTORY_CHUNK: usize = 100;
/// Days that history is spread over; none of them is a day that requests append to.
const HISTORY_DAYS: usize = 250;
/// The first day that requests append to; history lies before it.
const FIRST_DAY: &str = "2026-08-01";

pub const POLICY: &str = r#"
table = "bench.events"

[[check]]
id = "one-event-once"
type = "duplicate-key"
columns = ["event_id", "event_date"]
scope = "touched-partitions"

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-event-once"]
after-landing = "drop"
age-bound = "1h"
"#;

pub fn now_ms() -> i64 {
    chrono::Utc::now().timestamp_millis()
}

/// A clock that goes on from `ms`: a run that is repeated later meets the queue at the same age.
pub fn clock_from(ms: i64) -> Arc<dyn Fn() -> i64 + Send + Sync> {
    let behind = now_ms() - ms;
    Arc::new(move || now_ms() - behind)
}

pub fn table_name() -> anyhow::Result<TableName> {
    TABLE.parse().map_err(|e| anyhow!("{TABLE}: {e}"))
}

/// A new branch without retention of its own.
pub fn branch_at(name: RefName, snapshot_id: SnapshotId) -> RefFact {
    RefFact {
        name,
        snapshot_id,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    }
}

/// How large a table is, and its queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    pub name: String,
    /// Days that requests append to.
    pub days: usize,
    /// Rows of such a day before the first request.
    pub rows_per_day: usize,
    /// Each on a branch of its own; those of one day follow each other in the queue.
    pub requests: usize,
    pub rows_per_request: usize,
    /// Snapshots on `main` before the first branch.
    pub history: usize,
}

/// Most requests of one train; the shipped default of `batch-size`.
pub const TRAIN: usize = 50;

pub fn definition() -> TableDefinition {
    TableDefinition::default()
        .column("event_id", "long", true)
        .column("event_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false)
        .partitioned_by("event_date", "identity")
}

/// The empty table and who writes it.
pub struct House {
    catalog: Arc<dyn Catalog>,
    name: TableName,
    store: ManifestStore,
    next_id: i64,
}

impl House {
    /// The table has to exist, without a snapshot.
    pub fn new(catalog: Arc<dyn Catalog>) -> anyhow::Result<Self> {
        Ok(Self { catalog, name: table_name()?, store: ManifestStore::new(64 << 20), next_id: 0 })
    }

    fn rows(&mut self, day: i32, count: usize) -> anyhow::Result<RecordBatch> {
        let first = self.next_id;
        self.next_id += i64::try_from(count)?;
        batch(first..self.next_id, day)
    }

    async fn load(&self) -> anyhow::Result<Arc<LoadedTable>> {
        Ok(self.catalog.load(&self.name).await?)
    }

    /// One snapshot with one file a day.
    pub async fn fill_days(&mut self, case: &Case) -> anyhow::Result<()> {
        let table = self.load().await?;
        let schema = table.facts.current_schema_id;
        let mut files = Vec::new();
        for day in 0..case.days {
            let mut batches = Vec::new();
            let mut left = case.rows_per_day;
            while left > 0 {
                let rows = left.min(FILL_ROWS);
                batches.push(self.rows(first_day()? + i32::try_from(day)?, rows)?);
                left -= rows;
            }
            files.extend(DataFileWriter::write_batches(&table, schema, batches).await?);
        }
        self.append(vec![files]).await
    }

    /// Small appends to days before, until `main` has as many snapshots as the case says.
    pub async fn write_history(&mut self, case: &Case) -> anyhow::Result<()> {
        let mut left = case.history.saturating_sub(1);
        while left > 0 {
            let table = self.load().await?;
            let count = left.min(HISTORY_DAYS);
            let mut batches = Vec::with_capacity(count);
            for day in 0..count {
                batches.push(self.rows(first_day()? - 1 - i32::try_from(day)?, 1)?);
            }
            let schema = table.facts.current_schema_id;
            let files = DataFileWriter::write_batches(&table, schema, batches).await?;
            for chunk in files.chunks(HISTORY_CHUNK) {
                self.append(chunk.iter().map(|file| vec![file.clone()]).collect()).await?;
            }
            left -= count;
        }
        Ok(())
    }

    /// One snapshot on `main` for each list of files, in one commit.
    async fn append(&mut self, snapshots: Vec<Vec<NewDataFile>>) -> anyhow::Result<()> {
        let table = self.load().await?;
        let main = RefName::main();
        let parent = table.facts.head(&main).and_then(|id| table.facts.snapshots.get(id));
        let changes = snapshots.into_iter().map(|files| change(&table, files)).collect();
        let mut writer = SnapshotWriter::on(&self.store, &table, parent).await?;
        let new = writer.add_all(changes).await?;
        let head = writer.head().context("nothing was written")?;
        let mut updates: Vec<Update> = new.into_iter().map(Update::AddSnapshot).collect();
        updates.push(Update::SetRef(branch_at(main, head)));
        must_land(self.catalog.commit(&table, &[], updates).await)
    }

    /// Every branch, and the queue of them; the paths of the files that they append, in its order.
    pub async fn write_branches(&mut self, case: &Case, ledger: &Ledger) -> anyhow::Result<Vec<String>> {
        let main = self.load().await?.facts.head(&RefName::main()).context("main is empty")?;
        let mut paths = Vec::with_capacity(case.requests);
        let mut queue = Vec::with_capacity(case.requests);
        for request in 0..case.requests {
            let table = self.load().await?;
            let day = first_day()? + i32::try_from(request * case.days / case.requests)?;
            let rows = self.rows(day, case.rows_per_request)?;
            let schema = table.facts.current_schema_id;
            let files = DataFileWriter::write_batches(&table, schema, vec![rows]).await?;
            paths.extend(files.iter().map(|file| file.fact.path.to_string()));
            let parent = table.facts.snapshots.get(main);
            let mut writer = SnapshotWriter::on(&self.store, &table, parent).await?;
            let snapshot = writer.add(change(&table, files)).await?;
            let source = RefName::new(format!("ingest/{request:04}"));
            let pinned = snapshot.id;
            let updates =
                vec![Update::AddSnapshot(snapshot), Update::SetRef(branch_at(source.clone(), pinned))];
            must_land(self.catalog.commit(&table, &[], updates).await)?;
            queue.push(NewRequest {
                table: self.name.clone(),
                table_uuid: table.facts.uuid.clone(),
                source,
                pinned,
                target: RefName::main(),
                class: "ingest".to_owned(),
                principal: Principal::new("bench"),
                idempotency_key: None,
                structure: table.facts.structure(),
                format_version: 2,
            });
        }
        // At last and at once: the queue is as old as it is in a burst.
        for new in &queue {
            match ledger.enqueue(new, now_ms()).await? {
                Enqueued::New(_) => {}
                other => bail!("a request was there already: {other:?}"),
            }
        }
        Ok(paths)
    }
}

pub fn change(table: &LoadedTable, files: Vec<NewDataFile>) -> SnapshotChange {
    SnapshotChange {
        id: new_snapshot_id(&table.facts, rand::random::<u64>),
        label: "append".to_owned(),
        add: files.into_iter().map(AddedFile::from).collect(),
        remove: std::collections::BTreeSet::new(),
        add_deletes: Vec::new(),
        remove_deletes: std::collections::BTreeSet::new(),
        summary: std::collections::BTreeMap::new(),
        now_ms: now_ms(),
        schema_id: table.facts.current_schema_id,
    }
}

/// What every commit of the floor requires as well.
pub fn same_table(table: &LoadedTable) -> Requirement {
    Requirement::TableUuid(table.facts.uuid.clone())
}

pub fn must_land(outcome: CommitOutcome) -> anyhow::Result<()> {
    match outcome {
        CommitOutcome::Landed(_) => Ok(()),
        other => bail!("a commit did not land: {other:?}"),
    }
}

fn first_day() -> anyhow::Result<i32> {
    let day = parse_date(FIRST_DAY).context("the first day is no date")?;
    Ok(i32::try_from(day)?)
}

fn batch(ids: std::ops::Range<i64>, day: i32) -> anyhow::Result<RecordBatch> {
    let schema = Schema::new(vec![
        Field::new("event_id", DataType::Int64, false),
        Field::new("event_date", DataType::Date32, false),
        Field::new("status", DataType::Utf8, true),
        Field::new("amount", DataType::Decimal128(12, 2), true),
    ]);
    let statuses = ["new", "paid", "sent", "returned"];
    let status = ids.clone().zip(statuses.iter().cycle()).map(|(_, status)| Some(*status));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(Int64Array::from_iter_values(ids.clone())),
        Arc::new(Date32Array::from_iter_values(ids.clone().map(|_| day))),
        Arc::new(status.collect::<StringArray>()),
        Arc::new(
            Decimal128Array::from_iter_values(ids.map(|id| i128::from(id % 100_000)))
                .with_precision_and_scale(12, 2)?,
        ),
    ];
    Ok(RecordBatch::try_new(Arc::new(schema), columns)?)
}
