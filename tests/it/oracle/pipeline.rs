//! Pipelines as they write: an operation becomes snapshots on a branch, computed from that branch's rows.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::ids::SnapshotId;
use serde_json::Value;

use super::rows::{FEED, Feed, Op, Rows};
use crate::support::{House, Order};

/// Summary key of a record.
const RECORD: &str = "mergeberg.operation";

/// How an operation is written.
#[derive(Clone, Debug)]
pub struct Form {
    /// Delete and append in two snapshots, as PyIceberg does.
    pub pair: bool,
    pub record: Option<Value>,
    /// A compaction is labelled as an overwrite.
    pub plain_label: bool,
}

pub type Files = BTreeMap<Arc<str>, Vec<Order>>;

/// Files of a branch with their rows; empty for a branch that does not exist.
pub async fn files_of(house: &House, name: &str) -> Files {
    let table = house.loaded().await;
    match table.facts.head(&crate::support::branch(name)) {
        Some(head) => house.files_at(&table, head).await,
        None => Files::new(),
    }
}

/// Writes the operation; the snapshots in order. None when an unrecorded operation has nothing to do.
pub async fn write(house: &House, name: &str, op: &Op, form: &Form, feed: &Feed) -> Vec<SnapshotId> {
    let (remove, add) = effect(op, &files_of(house, name).await, feed);
    if remove.is_empty() && add.is_empty() && form.record.is_none() {
        return Vec::new();
    }
    let mut summary = BTreeMap::new();
    if let Some(record) = &form.record {
        summary.insert(RECORD.to_owned(), record.to_string());
    }
    let paths = |remove: BTreeSet<Arc<str>>| {
        Removal::Files(Box::new(move |file| remove.contains(file.fact.path.as_ref())))
    };
    let can_be_two = matches!(op, Op::ReplaceDays { .. } | Op::OverwriteWhere { .. });
    if form.pair && can_be_two && !remove.is_empty() && !add.is_empty() {
        let first = house.write(name, "delete", &[], paths(remove), summary.clone()).await;
        let second = house.write(name, "append", &add, Removal::Nothing, summary).await;
        return vec![first, second];
    }
    let label = match op {
        Op::Append(_) | Op::InsertIfAbsent(_) => "append",
        Op::DeleteDays(_) => "delete",
        Op::Compact(_) if !form.plain_label => "replace",
        Op::Compact(_) | Op::ReplaceDays { .. } | Op::Update { .. } | Op::OverwriteWhere { .. } => {
            "overwrite"
        }
    };
    vec![house.write(name, label, &add, paths(remove), summary).await]
}

/// Files that go and rows that come.
fn effect(op: &Op, files: &Files, feed: &Feed) -> (BTreeSet<Arc<str>>, Vec<Order>) {
    let with = |wanted: &dyn Fn(&Order) -> bool| -> BTreeSet<Arc<str>> {
        let hit = files.iter().filter(|(_, rows)| rows.iter().any(wanted));
        hit.map(|(path, _)| Arc::clone(path)).collect()
    };
    match op {
        Op::Append(rows) => (BTreeSet::new(), rows.clone()),
        Op::InsertIfAbsent(rows) => {
            let known: BTreeSet<i64> = files.values().flatten().map(|row| row.id).collect();
            (BTreeSet::new(), rows.iter().filter(|row| !known.contains(&row.id)).cloned().collect())
        }
        Op::ReplaceDays { days, rows } => (with(&|row| days.contains(&row.day)), rows.clone()),
        Op::DeleteDays(days) => (with(&|row| days.contains(&row.day)), Vec::new()),
        Op::Compact(days) => rewritten(files, with(&|row| days.contains(&row.day)), op, feed),
        Op::Update { ids } => rewritten(files, with(&|row| ids.contains(&row.id)), op, feed),
        Op::OverwriteWhere { filter, .. } => {
            let hit = with(&|row| filter.matches(row));
            let mut rows = Rows::of(files.values().flatten().cloned());
            op.apply(&mut rows, feed);
            // What the query gave lies inside the filter; the hit files' other rows are written again.
            rows.remove(|row| !filter.matches(row));
            let survivors = hit.iter().flat_map(|path| &files[path]).filter(|row| !filter.matches(row));
            rows.add(survivors.cloned());
            (hit, rows.sorted())
        }
    }
}

/// The hit files' rows with the operation applied to them.
fn rewritten(
    files: &Files,
    hit: BTreeSet<Arc<str>>,
    op: &Op,
    feed: &Feed,
) -> (BTreeSet<Arc<str>>, Vec<Order>) {
    let mut rows = Rows::of(hit.iter().flat_map(|path| files[path].clone()));
    op.apply(&mut rows, feed);
    (hit, rows.sorted())
}

/// The second table with two versions of its rows.
pub async fn make_feed(house: &House) -> Feed {
    use mergeberg::table::branch_writer::BranchWrite;
    use mergeberg::table::create::TableDefinition;
    let definition = TableDefinition::default()
        .column("order_id", "long", true)
        .column("order_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false);
    let name = FEED.parse().unwrap();
    house.catalog.define_table(&name, &definition).await.unwrap();
    let mut feed = Feed::default();
    for version in 0..2_i64 {
        let rows: Vec<Order> = (20..24_u32)
            .map(|day| Order {
                id: 9000 + i64::from(day) * 10 + version,
                day,
                status: "fed".to_owned(),
                cents: 700 + version,
            })
            .collect();
        let write = BranchWrite {
            branch: crate::support::main_branch(),
            label: "overwrite".to_owned(),
            rows: vec![crate::support::batch(&rows)],
            remove: Removal::Files(Box::new(|_| true)),
            summary: BTreeMap::new(),
        };
        let snapshot = house.writer.write(&name, write).await.unwrap();
        feed.versions.push((snapshot.0, rows));
    }
    feed
}
