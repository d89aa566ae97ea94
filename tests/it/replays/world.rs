//! A table of the model's rows with its queue.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::create::TableDefinition;
use mergeberg_kernel::ids::{SnapshotId, TableName};
use mergeberg_kernel::record::RECORD_KEY;
use serde_json::{Value as Json, json};

use super::model::{COLUMNS, Operation, Row, Value, told};
use super::text::{STATEMENT, statement, typed};
use crate::support::{House, branch, columns};

pub const POLICY: &str =
    "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow\"\n";

pub struct World {
    pub house: House,
    pub feed: Vec<Row>,
    pin: Option<SnapshotId>,
}

pub fn definition() -> TableDefinition {
    TableDefinition::default()
        .column("id", "long", false)
        .column("day", "long", false)
        .column("status", "string", false)
        .column("amount", "long", false)
}

pub fn batch(rows: &[Row]) -> RecordBatch {
    let int = |at: usize| -> ArrayRef {
        let number = |row: &Row| match row[at] {
            Value::Int(number) => Some(number),
            _ => None,
        };
        Arc::new(rows.iter().map(number).collect::<Int64Array>())
    };
    let text = |row: &Row| match &row[2] {
        Value::Text(text) => Some(text.clone()),
        _ => None,
    };
    let statuses: ArrayRef = Arc::new(rows.iter().map(text).collect::<StringArray>());
    columns(vec![(COLUMNS[0], int(0)), (COLUMNS[1], int(1)), (COLUMNS[2], statuses), (COLUMNS[3], int(3))])
}

pub fn texts(rows: &[Row], more: &str) -> Vec<String> {
    let mut texts: Vec<String> = rows.iter().map(|row| format!("{}{more}", told(row))).collect();
    texts.sort();
    texts
}

impl World {
    pub async fn new(definition: TableDefinition, rows: &[Row], feed: &[Row]) -> Self {
        let house = House::with_table(definition, POLICY).await;
        let mut world = Self { house, feed: feed.to_vec(), pin: None };
        world.pin = Some(world.make_feed().await);
        // In two files a partition, as far as there are rows.
        let (one, other) = rows.split_at(rows.len() / 2);
        world.write("main", "append", one, false, BTreeMap::new()).await;
        world.write("main", "append", other, false, BTreeMap::new()).await;
        world
    }

    async fn make_feed(&self) -> SnapshotId {
        self.house.catalog.create_namespace("raw").await.unwrap();
        let feed: TableName = "raw.feed".parse().unwrap();
        self.house.catalog.define_table(&feed, &definition()).await.unwrap();
        self.house.write_batch_to(&feed, "main", batch(&self.feed)).await
    }

    pub async fn write(
        &self,
        name: &str,
        label: &str,
        rows: &[Row],
        replaces_all: bool,
        summary: BTreeMap<String, String>,
    ) -> SnapshotId {
        let rows = if rows.is_empty() { Vec::new() } else { vec![batch(rows)] };
        let remove = if replaces_all { Removal::Files(Box::new(|_| true)) } else { Removal::Nothing };
        let write = BranchWrite { branch: branch(name), label: label.to_owned(), rows, remove, summary };
        self.house.writer.write(&self.house.table, write).await.unwrap()
    }

    /// The record of an operation, as a statement or typed.
    pub fn record(&self, operation: &Operation, id: &str, as_statement: bool) -> Json {
        let mut record = if as_statement && !matches!(operation, Operation::Overwrite(_)) {
            let sql = statement(operation, "local.shop.orders", &STATEMENT);
            json!({"op": "sql", "sql": sql})
        } else {
            Json::Object(typed(operation))
        };
        record["v"] = json!(1);
        record["id"] = json!(id);
        record["inputs"] = self.inputs();
        record
    }

    /// The pinned input of every record.
    pub fn inputs(&self) -> Json {
        json!({"feed": {"table": "raw.feed", "snapshot-id": self.pin.unwrap().0}})
    }

    /// An append whose columns have these names by now.
    pub async fn write_columns(&self, name: &str, names: &[&str; 4], rows: &[Row]) -> SnapshotId {
        let batch = batch(rows);
        let renamed = names.iter().zip(batch.columns()).map(|(name, column)| (*name, Arc::clone(column)));
        self.house.write_batch(name, columns(renamed.collect())).await
    }

    /// A snapshot on a branch that makes `rows` of all that was there, with the record of what did it.
    pub async fn recorded(&self, name: &str, record: &Json, rows: &[Row]) -> SnapshotId {
        let summary = BTreeMap::from([(RECORD_KEY.to_owned(), record.to_string())]);
        self.write(name, "overwrite", rows, true, summary).await
    }

    /// A request that lands, so that the queue knows the target before the story begins.
    pub async fn first_landing(&self, row: &Row) {
        self.house.branch("first").await;
        self.write("first", "append", std::slice::from_ref(row), false, BTreeMap::new()).await;
        let (state, _, detail) = self.merge("first").await;
        assert_eq!(state, "landed", "{detail}");
    }

    pub async fn merge(&self, name: &str) -> (String, String, String) {
        let request = self.house.enqueue(name).await;
        self.house.drain().await;
        self.house.assert_sound().await;
        let detail = self.house.detail(request).await;
        (self.house.state(request).await, self.house.classified(request).await, detail)
    }
}
