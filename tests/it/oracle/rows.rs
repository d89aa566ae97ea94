//! The oracle's table: rows in a map, and what each logical operation does to them.
//!
//! Shares nothing with the product: no partitions, no files, no snapshots. An operation knows its effect on
//! the rows and the text that a pipeline would record of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::{Value, json};

use crate::support::Order;

/// Rows with how often each is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rows(BTreeMap<Order, usize>);

impl Rows {
    pub fn of(rows: impl IntoIterator<Item = Order>) -> Self {
        let mut all = Self::default();
        all.add(rows);
        all
    }

    pub fn add(&mut self, rows: impl IntoIterator<Item = Order>) {
        for row in rows {
            *self.0.entry(row).or_default() += 1;
        }
    }

    pub fn remove(&mut self, gone: impl Fn(&Order) -> bool) {
        self.0.retain(|row, _| !gone(row));
    }

    pub fn all(&self) -> impl Iterator<Item = &Order> {
        self.0.iter().flat_map(|(row, count)| std::iter::repeat_n(row, *count))
    }

    pub fn sorted(&self) -> Vec<Order> {
        self.all().cloned().collect()
    }

    pub fn holds_key(&self, id: i64) -> bool {
        self.0.keys().any(|row| row.id == id)
    }

    /// Keys (id, day) of these days that are there more than once, with how often more.
    pub fn duplicates(&self, days: &BTreeSet<u32>) -> BTreeMap<(i64, u32), usize> {
        let mut counts: BTreeMap<(i64, u32), usize> = BTreeMap::new();
        for row in self.all().filter(|row| days.contains(&row.day)) {
            *counts.entry((row.id, row.day)).or_default() += 1;
        }
        counts.retain(|_, count| *count > 1);
        counts
    }
}

/// Which rows an operation replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    Days(u32, u32),
    Status(String),
    /// Rows of one day with an even id: nothing that a partition could tell.
    Even(u32),
}

impl Filter {
    pub fn matches(&self, row: &Order) -> bool {
        match self {
            Self::Days(first, last) => (*first..=*last).contains(&row.day),
            Self::Status(status) => &row.status == status,
            Self::Even(day) => row.day == *day && row.id % 2 == 0,
        }
    }

    pub fn sql(&self) -> String {
        match self {
            Self::Days(first, last) if first == last => format!("order_date = {}", date(*first)),
            Self::Days(first, last) => {
                format!("order_date >= {} AND order_date <= {}", date(*first), date(*last))
            }
            Self::Status(status) => format!("status = '{status}'"),
            Self::Even(day) => format!("order_id % 2 = 0 AND order_date = {}", date(*day)),
        }
    }
}

/// What an operation puts in place of the rows that match its filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Query {
    /// These very rows; none makes it a delete.
    Values(Vec<Order>),
    /// The rows of the second table that match, at one of its snapshots.
    Feed { version: usize },
    /// The matching rows of the target, each a unit dearer.
    Dearer,
    /// One row that counts the target's rows, whatever their day.
    Count { id: i64, day: u32 },
}

/// Versions of the second table: rows and the snapshot that holds them.
#[derive(Clone, Debug, Default)]
pub struct Feed {
    pub versions: Vec<(i64, Vec<Order>)>,
}

impl Query {
    pub fn reads_target(&self) -> bool {
        matches!(self, Self::Dearer | Self::Count { .. })
    }

    fn run(&self, filter: &Filter, target: &Rows, feed: &Feed) -> Vec<Order> {
        match self {
            Self::Values(rows) => rows.clone(),
            Self::Feed { version } => {
                feed.versions[*version].1.iter().filter(|row| filter.matches(row)).cloned().collect()
            }
            Self::Dearer => {
                let matching = target.all().filter(|row| filter.matches(row));
                matching.map(|row| Order { cents: row.cents + 100, ..row.clone() }).collect()
            }
            Self::Count { id, day } => {
                let count = i64::try_from(target.all().count()).unwrap();
                vec![Order { id: *id, day: *day, status: "sum".to_owned(), cents: 100 * count }]
            }
        }
    }

    fn sql(&self, filter: &Filter) -> String {
        let columns = "order_id, order_date, status, amount";
        match self {
            Self::Values(rows) => {
                let none = rows.is_empty();
                let placeholder = [Order { id: 0, day: 1, status: String::new(), cents: 0 }];
                let rows = if none { placeholder.as_slice() } else { rows.as_slice() };
                let values: Vec<String> = rows
                    .iter()
                    .map(|row| {
                        format!(
                            "({}, {}, '{}', CAST({}.{:02} AS DECIMAL(12, 2)))",
                            row.id,
                            date(row.day),
                            row.status,
                            row.cents / 100,
                            row.cents % 100
                        )
                    })
                    .collect();
                let nothing = if none { " WHERE order_id < 0" } else { "" };
                format!("SELECT * FROM (VALUES {}) AS v({columns}){nothing}", values.join(", "))
            }
            Self::Feed { .. } => format!("SELECT {columns} FROM feed WHERE {}", filter.sql()),
            Self::Dearer => {
                format!(
                    "SELECT order_id, order_date, status, amount + 1 AS amount FROM target WHERE {}",
                    filter.sql()
                )
            }
            Self::Count { id, day } => format!(
                "SELECT CAST({id} AS BIGINT) AS order_id, {} AS order_date, 'sum' AS status, \
                 CAST(COUNT(*) AS DECIMAL(12, 2)) AS amount FROM target",
                date(*day)
            ),
        }
    }
}

/// A logical operation of a pipeline, or of somebody on the target itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Append(Vec<Order>),
    /// Whole days get these rows. Every day of the rows is one of the days.
    ReplaceDays {
        days: BTreeSet<u32>,
        rows: Vec<Order>,
    },
    DeleteDays(BTreeSet<u32>),
    /// Copy-on-write of some files of a day: these orders become a unit dearer.
    Update {
        ids: BTreeSet<i64>,
    },
    /// Appends the orders that are not there.
    InsertIfAbsent(Vec<Order>),
    OverwriteWhere {
        filter: Filter,
        query: Query,
    },
    /// The same rows of these days in other files.
    Compact(BTreeSet<u32>),
}

impl Op {
    pub fn apply(&self, rows: &mut Rows, feed: &Feed) {
        match self {
            Self::Append(new) => rows.add(new.iter().cloned()),
            Self::ReplaceDays { days, rows: new } => {
                rows.remove(|row| days.contains(&row.day));
                rows.add(new.iter().cloned());
            }
            Self::DeleteDays(days) => rows.remove(|row| days.contains(&row.day)),
            Self::Update { ids } => {
                let changed: Vec<Order> = rows
                    .all()
                    .filter(|row| ids.contains(&row.id))
                    .map(|row| Order { cents: row.cents + 100, ..row.clone() })
                    .collect();
                rows.remove(|row| ids.contains(&row.id));
                rows.add(changed);
            }
            Self::InsertIfAbsent(new) => {
                let absent: Vec<Order> = new.iter().filter(|row| !rows.holds_key(row.id)).cloned().collect();
                rows.add(absent);
            }
            Self::OverwriteWhere { filter, query } => {
                let new = query.run(filter, rows, feed);
                rows.remove(|row| filter.matches(row));
                rows.add(new);
            }
            Self::Compact(_) => {}
        }
    }

    /// The days in which it may add rows: what a duplicate check of touched days looks at.
    pub fn adds_in(&self, feed: &Feed) -> BTreeSet<u32> {
        match self {
            Self::Append(rows) | Self::InsertIfAbsent(rows) | Self::ReplaceDays { rows, .. } => {
                rows.iter().map(|row| row.day).collect()
            }
            Self::OverwriteWhere { query: Query::Values(rows), .. } => {
                rows.iter().map(|row| row.day).collect()
            }
            Self::OverwriteWhere { query: Query::Feed { version }, .. } => {
                feed.versions[*version].1.iter().map(|row| row.day).collect()
            }
            Self::OverwriteWhere { query: Query::Count { day, .. }, .. } => [*day].into(),
            // These write keys that were there before.
            Self::OverwriteWhere { query: Query::Dearer, .. }
            | Self::DeleteDays(_)
            | Self::Update { .. }
            | Self::Compact(_) => BTreeSet::new(),
        }
    }

    /// Keys that it brings, whether the target has them or not.
    pub fn brings(&self, feed: &Feed) -> BTreeSet<(i64, u32)> {
        let rows = match self {
            Self::Append(rows) | Self::InsertIfAbsent(rows) | Self::ReplaceDays { rows, .. } => rows.clone(),
            Self::OverwriteWhere { filter, query } if !query.reads_target() => {
                query.run(filter, &Rows::default(), feed)
            }
            Self::OverwriteWhere { query: Query::Count { id, day }, .. } => {
                return [(*id, *day)].into();
            }
            _ => Vec::new(),
        };
        rows.iter().map(|row| (row.id, row.day)).collect()
    }

    /// The record that a pipeline writes into its snapshots' summary.
    pub fn record(&self, id: &str, feed: &Feed) -> Option<Value> {
        match self {
            Self::ReplaceDays { .. } => Some(json!({ "v": 1, "id": id, "op": "replace-partitions" })),
            Self::OverwriteWhere { filter, query } => {
                let mut record = json!({
                    "v": 1, "id": id, "op": "overwrite-where",
                    "where": filter.sql(), "query": query.sql(filter),
                });
                if let Query::Feed { version } = query {
                    let snapshot = feed.versions[*version].0;
                    record["inputs"] = json!({ "feed": { "table": FEED, "snapshot-id": snapshot } });
                }
                Some(record)
            }
            _ => None,
        }
    }
}

/// The second table, which recorded queries pin.
pub const FEED: &str = "shop.feed";

fn date(day: u32) -> String {
    format!("DATE '2026-08-{day:02}'")
}

fn list(rows: &[Order]) -> String {
    let text: Vec<String> =
        rows.iter().map(|row| format!("{}:{} {} {}", row.day, row.id, row.status, row.cents)).collect();
    text.join(", ")
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Append(rows) => write!(f, "append [{}]", list(rows)),
            Self::ReplaceDays { days, rows } => write!(f, "replace days {days:?} by [{}]", list(rows)),
            Self::DeleteDays(days) => write!(f, "delete days {days:?}"),
            Self::Update { ids } => write!(f, "update {ids:?}"),
            Self::InsertIfAbsent(rows) => write!(f, "insert if absent [{}]", list(rows)),
            Self::OverwriteWhere { filter, query } => {
                let query = match query {
                    Query::Values(rows) => format!("[{}]", list(rows)),
                    Query::Feed { version } => format!("feed v{version}"),
                    Query::Dearer => "target's rows, dearer".to_owned(),
                    Query::Count { id, day } => format!("count of target as {day}:{id}"),
                };
                write!(f, "overwrite where {} by {query}", filter.sql())
            }
            Self::Compact(days) => write!(f, "compact days {days:?}"),
        }
    }
}
