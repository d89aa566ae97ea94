//! What came of the day against what should have: the target is read again, from the disk, and compared
//! with rows computed from the fixtures alone; end states are compared with the table of the scenario.
//!
//! The expected rows are said here once more, in other words than the writers': a mistake in a writer, in a
//! replay or in a landing shows as a row that is missing or too much.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use futures::TryStreamExt as _;
use mergeberg_kernel::ids::RefName;
use serde::Serialize;

use super::flights::{self, CARRIER_NAME, FIRST_DAY, LAST_DAY};
use super::scenario::{FLIGHTS, Group, WIDENED, WRONG_DAY, groups};
use super::{failed, folder, table_name};
use crate::config::Config;
use crate::error::UserError;
use crate::ledger::RequestRow;
use crate::report::text::Columns;
use crate::table::catalog::Catalog as _;
use crate::table::manifests::{FileScope, ManifestStore};
use crate::table::scan::{RowReader, ScanCounters, live_rows};

/// Differing rows that are shown for people.
const SHOWN_ROWS: usize = 5;
/// Memory for decoded manifests of the one read, in bytes.
const MANIFEST_CACHE_BYTES: usize = 16 << 20;

/// One thing that was looked at. It is as expected when both texts are the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub what: String,
    pub expected: String,
    pub actual: String,
    /// Why it is expected, where the scenario says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<&'static str>,
}

impl Finding {
    pub fn new(what: &str, expected: impl Into<String>, actual: impl Into<String>) -> Self {
        Self { what: what.to_owned(), expected: expected.into(), actual: actual.into(), why: None }
    }

    pub fn because(mut self, why: &'static str) -> Self {
        self.why = Some(why);
        self
    }

    pub fn holds(&self) -> bool {
        self.expected == self.actual
    }
}

pub fn render(findings: &[Finding]) -> String {
    let mut columns = Columns::new(&["what", "expected", "actual", ""]);
    for finding in findings {
        let Finding { what, expected, actual, why: _ } = finding;
        let mark = if finding.holds() { "ok" } else { "DIFFERS" };
        columns.push(vec![what.clone(), expected.clone(), actual.clone(), mark.to_owned()]);
    }
    columns.render()
}

/// How each group of requests ended.
pub fn ends(requests: &[RequestRow]) -> Vec<Finding> {
    let by_branch: BTreeMap<&str, &RequestRow> =
        requests.iter().map(|row| (row.source.as_str(), row)).collect();
    let mut findings = Vec::new();
    for Group { what, steps, end, why } in groups() {
        let describe = |state: String, classification: Option<&str>| match classification {
            Some(word) if end.classified.is_some() => format!("{state}, {word}"),
            _ => state,
        };
        let mut actual: BTreeMap<String, usize> = BTreeMap::new();
        for step in &steps {
            let text = match by_branch.get(step.branch.as_str()) {
                Some(row) => describe(row.state.to_string(), row.classification.as_deref()),
                None => "never enqueued".to_owned(),
            };
            *actual.entry(text).or_default() += 1;
        }
        let actual: Vec<String> = actual.into_iter().map(|(text, count)| format!("{count} {text}")).collect();
        let expected = format!("{} {}", steps.len(), describe(end.state.to_owned(), end.classified));
        findings.push(Finding::new(what, expected, actual.join("; ")).because(why));
    }
    findings
}

/// The rows of the target against the expected ones.
#[derive(Clone, Debug, Serialize)]
pub struct RowComparison {
    pub expected: usize,
    pub read: usize,
    /// Expected and not there.
    pub missing: Vec<String>,
    /// There and not expected.
    pub unexpected: Vec<String>,
}

impl RowComparison {
    pub fn finding(&self) -> Finding {
        let Self { expected, read, missing, unexpected } = self;
        Finding::new(
            "rows of the target, read again",
            format!("{expected} rows, 0 differ"),
            format!("{read} rows, {} differ", missing.len() + unexpected.len()),
        )
    }

    /// The first differing rows, for people; empty when there are none.
    pub fn differences(&self) -> String {
        let mut text = String::new();
        for (word, rows) in [("missing", &self.missing), ("unexpected", &self.unexpected)] {
            for row in rows.iter().take(SHOWN_ROWS) {
                text.push_str(&format!("  {word}: {row}\n"));
            }
            if rows.len() > SHOWN_ROWS {
                text.push_str(&format!("  {word}: and {} more\n", rows.len() - SHOWN_ROWS));
            }
        }
        text
    }
}

/// Reads `main` through a catalog and a cache of its own, and compares.
pub async fn rows(config: &Config) -> Result<RowComparison, UserError> {
    let catalog = folder::open_catalog(config).await?;
    let table = catalog.load(&table_name(FLIGHTS)).await?;
    let facts = &table.facts;
    let (column, to) = WIDENED;
    let schema = facts.schemas.get(&facts.current_schema_id);
    let now = schema.and_then(|schema| schema.field_by_name(column)).map(|field| field.type_name.as_str());
    if now != Some(to) {
        return Err(failed(format!("column {column} of {} is not {to}", facts.name)));
    }
    let head = facts.head(&RefName::main()).and_then(|head| facts.snapshots.get(head));
    let head = head.ok_or_else(|| failed("main has no head"))?;
    let store = ManifestStore::new(MANIFEST_CACHE_BYTES);
    let live = store.live_files(&table, head, &FileScope::Table).await?;
    let reader = RowReader::new(&table, facts.current_schema_id)?;
    let all: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
    let counters = Arc::new(ScanCounters::default());
    let mut found: BTreeMap<String, i64> = BTreeMap::new();
    let mut read = 0;
    for file in &live_rows(live)? {
        for batch in reader.read(file, &all, &counters)?.try_collect::<Vec<_>>().await? {
            read += batch.num_rows();
            count(&batch, &mut found)?;
        }
    }
    let mut wanted: BTreeMap<String, i64> = BTreeMap::new();
    let mut expected = 0;
    for day in FIRST_DAY..=LAST_DAY {
        let flights = expected_day(day)?;
        expected += flights.num_rows();
        count(&flights, &mut wanted)?;
    }
    Ok(RowComparison {
        expected,
        read,
        missing: surplus(&wanted, &found),
        unexpected: surplus(&found, &wanted),
    })
}

/// A day as it must be when the queue is empty: everything that flew or should have, with the carrier's
/// name. Only the day whose transform was refused is as it was loaded, without the cancelled flights.
fn expected_day(day: u32) -> Result<RecordBatch, UserError> {
    let flights = flights::with_names(&flights::day(day)?)?;
    if day == WRONG_DAY { flights::choose(&flights, |flight| !flight.cancelled) } else { Ok(flights) }
}

/// Counts rows by their text; columns by name, so that their order does not matter.
fn count(batch: &RecordBatch, rows: &mut BTreeMap<String, i64>) -> Result<(), UserError> {
    let schema = batch.schema();
    let names: BTreeSet<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    if !names.contains(CARRIER_NAME) {
        return Err(failed(format!("there is no column {CARRIER_NAME}")));
    }
    let options = FormatOptions::default().with_null("null");
    let mut formatters = Vec::new();
    for name in names {
        let column = batch.column_by_name(name).ok_or_else(|| failed(name))?;
        formatters.push((name, ArrayFormatter::try_new(column.as_ref(), &options).map_err(failed)?));
    }
    for row in 0..batch.num_rows() {
        let values: Vec<String> =
            formatters.iter().map(|(name, values)| format!("{name}={}", values.value(row))).collect();
        *rows.entry(values.join(" ")).or_default() += 1;
    }
    Ok(())
}

/// Rows that `more` has beyond `less`, as often as it has them.
fn surplus(more: &BTreeMap<String, i64>, less: &BTreeMap<String, i64>) -> Vec<String> {
    let mut rows = Vec::new();
    for (row, count) in more {
        for _ in less.get(row).copied().unwrap_or_default()..*count {
            rows.push(row.clone());
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_rows_are_all_flights_but_the_cancelled_of_one_day() {
        let rows: usize = (FIRST_DAY..=LAST_DAY).map(|day| expected_day(day).unwrap().num_rows()).sum();
        // 7 of the 16th never left.
        assert_eq!(rows, 13_294 - 7);
    }

    #[test]
    fn rows_are_compared_as_often_as_they_are_there() {
        let flights = flights::with_names(&flights::day(20).unwrap()).unwrap();
        let (mut once, mut more) = (BTreeMap::new(), BTreeMap::new());
        count(&flights, &mut once).unwrap();
        count(&flights, &mut more).unwrap();
        assert!(surplus(&once, &more).is_empty());
        count(&flights.slice(0, 1), &mut more).unwrap();
        assert!(surplus(&once, &more).is_empty());
        let extra = surplus(&more, &once);
        assert_eq!(extra.len(), 1);
        assert!(extra[0].contains("carrier_name="), "{extra:?}");
    }

    #[test]
    fn what_differs_is_said() {
        let findings = ends(&[]);
        assert!(findings.iter().all(|finding| !finding.holds()));
        assert!(render(&findings).contains("28 never enqueued"));
    }
}
