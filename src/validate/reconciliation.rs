//! `reconciliation`: counts and sums by group against an upstream that knows what they must be.
//!
//! Only groups that the request touched are compared: a day whose other shards have not arrived, or that
//! was wrong before, is not this request's fault (rule E5). A total that is null agrees with nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use datafusion::arrow::csv::reader::Format;
use datafusion::arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, SchemaRef};
use datafusion::common::ScalarValue;
use datafusion::functions::math::expr_fn::abs;
use datafusion::functions_aggregate::expr_fn::sum;
use datafusion::logical_expr::{Expr, JoinType, Operator, binary_expr, cast, ident, lit, when};
use datafusion::prelude::{CsvReadOptions, DataFrame, ParquetReadOptions, SessionContext};
use futures::TryStreamExt;
use mergeberg_kernel::evidence::PinnedInput;
use mergeberg_kernel::policy::{Compare, ReconciliationMode, Upstream};
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::blame::{Blame, Culprits};
use super::finding::{Finding, key_text};
use super::rows::{key_columns, rows_where};
use super::session::Engine;
use super::subject::{ADDED, KEPT, Origins, PinnedTable, REMOVED, Subject};
use super::totals::{SumType, Total};
use super::train::TrainView;
use crate::table::scan::ScanCounters;

/// The declared comparison.
pub struct Terms {
    pub mode: ReconciliationMode,
    pub by: Vec<String>,
    pub count: Option<String>,
    /// Candidate column -> upstream column.
    pub sums: BTreeMap<String, String>,
    pub absolute: f64,
    pub relative: f64,
    pub compare: Compare,
}

/// Where the expected totals are.
pub enum UpstreamSource {
    Parquet(PathBuf),
    Csv(PathBuf),
    Table(PinnedTable),
}

impl UpstreamSource {
    pub async fn find(
        view: TrainView<'_>,
        upstream: &Upstream,
        counters: &Arc<ScanCounters>,
    ) -> Result<Self, CheckError> {
        match upstream {
            Upstream::Table { table } => Ok(Self::Table(view.pin(table, counters).await?)),
            Upstream::File { file } => {
                let path = view.files.join(file);
                match path.extension().and_then(|e| e.to_str()) {
                    Some("parquet") => Ok(Self::Parquet(path)),
                    Some("csv") => Ok(Self::Csv(path)),
                    _ => Err(upstream_error(&path, "only .parquet and .csv files are read")),
                }
            }
        }
    }

    async fn open(&self, engine: &Engine, session: &SessionContext) -> Result<DataFrame, CheckError> {
        match self {
            Self::Table(pinned) => Ok(session.read_table(Arc::new(pinned.table(engine)))?),
            Self::Parquet(path) => {
                let text = existing(path).await?;
                Ok(session.read_parquet(text, ParquetReadOptions::default()).await?)
            }
            Self::Csv(path) => {
                let text = existing(path).await?;
                let schema = csv_columns(path).await?;
                // Everything as text: a guessed type would round what must be compared exactly.
                Ok(session.read_csv(text, CsvReadOptions::new().schema(&schema)).await?)
            }
        }
    }

    pub fn input(&self) -> Option<PinnedInput> {
        match self {
            Self::Table(pinned) => Some(pinned.input()),
            Self::Parquet(_) | Self::Csv(_) => None,
        }
    }

    /// How evidence names the input.
    fn measured(&self) -> (String, String) {
        match self {
            Self::Table(pinned) => pinned.measured(),
            Self::Parquet(path) | Self::Csv(path) => ("upstream".to_owned(), path.display().to_string()),
        }
    }
}

fn upstream_error(path: &Path, message: impl ToString) -> CheckError {
    CheckError::Upstream { path: path.display().to_string(), message: message.to_string() }
}

async fn existing(path: &Path) -> Result<&str, CheckError> {
    tokio::fs::metadata(path).await.map_err(|e| upstream_error(path, e))?;
    path.to_str().ok_or_else(|| upstream_error(path, "its name is no UTF-8 text"))
}

async fn csv_columns(path: &Path) -> Result<Schema, CheckError> {
    let owned = path.to_owned();
    let header = tokio::task::spawn_blocking(move || {
        let file = std::fs::File::open(&owned)?;
        Format::default().with_header(true).infer_schema(file, Some(0))
    });
    let (schema, _) = header.await.map_err(|_| CheckError::Crashed)?.map_err(|e| upstream_error(path, e))?;
    let fields: Vec<Field> =
        schema.fields().iter().map(|field| Field::new(field.name(), DataType::Utf8, true)).collect();
    Ok(Schema::new(fields))
}

pub async fn run(
    engine: Arc<Engine>,
    mut subject: Subject,
    source: UpstreamSource,
    terms: Terms,
) -> Result<Finding, CheckError> {
    subject.require_columns(&terms.by)?;
    let mut sums = Vec::with_capacity(terms.sums.len());
    for (column, upstream) in &terms.sums {
        let actual = subject.column_type(column)?;
        let sum_type = SumType::of(actual)
            .ok_or_else(|| CheckError::NotANumber { column: column.clone(), actual: actual.to_string() })?;
        sums.push(SumTerm { column: column.clone(), upstream: upstream.clone(), sum_type });
    }
    if terms.mode == ReconciliationMode::PerRequest {
        subject.keep(|origin| origin == ADDED);
    }
    let session = engine.session();
    let expected = source.open(&engine, &session).await?;
    let expected = expected_totals(expected, &subject, &terms, &sums)?;
    let actual = actual_totals(&engine, &session, &subject, &terms, &sums)?;
    let on = key_columns(terms.by.len())
        .into_iter()
        .enumerate()
        .map(|(at, key)| binary_expr(key, Operator::IsNotDistinctFrom, ident(format!("u{at}"))));
    let joined = actual.join_on(expected, JoinType::Left, on)?.select(wanted(&terms, &sums))?;

    let request = match &subject.origins {
        Origins::Change { request } => *request,
        Origins::Cars { .. } => return Err(CheckError::Shape("a train where one car belongs".to_owned())),
    };
    let mut blame = Blame::default();
    let (mut groups, mut differing) = (0u64, 0u64);
    let mut stream = joined.execute_stream().await?;
    while let Some(batch) = stream.try_next().await? {
        let group = Groups { batch: &batch, terms: &terms, sums: &sums };
        for row in 0..batch.num_rows() {
            groups += 1;
            let differences = group.differences(row)?;
            if differences.is_empty() {
                continue;
            }
            differing += 1;
            let culprits =
                Culprits { cars: vec![1], with_base: group.count("before", row)?.unwrap_or(0) > 0 };
            blame.add(culprits, 1, || {
                Ok(format!("{} {}", key_text(&terms.by, &batch, row)?, differences.join(" ")))
            })?;
        }
    }
    let measured = vec![
        source.measured(),
        ("groups".to_owned(), groups.to_string()),
        ("groups that differ".to_owned(), differing.to_string()),
    ];
    let scope = if groups == 0 { "no rows".to_owned() } else { subject.scope };
    Ok(Finding::of(ReasonCode::Reconciliation, scope, measured, blame.violations(&[request])))
}

struct SumTerm {
    column: String,
    upstream: String,
    sum_type: SumType,
}

/// Totals of every group that the request touched: `k0`.., `now`, `before`, and for each sum `s`, `b`
/// (before) and `a` (of absolute values).
fn actual_totals(
    engine: &Engine,
    session: &SessionContext,
    subject: &Subject,
    terms: &Terms,
    sums: &[SumTerm],
) -> Result<DataFrame, CheckError> {
    let table = subject.table(engine);
    let mut columns: Vec<Expr> =
        terms.by.iter().enumerate().map(|(at, name)| ident(name).alias(format!("k{at}"))).collect();
    columns.extend(table.origin_column().map(|name| ident(name).alias("o")));
    for (at, term) in sums.iter().enumerate() {
        columns.push(cast(ident(&term.column), term.sum_type.widened()).alias(format!("x{at}")));
    }
    let now = || ident("o").not_eq(lit(REMOVED));
    let before = || ident("o").not_eq(lit(ADDED));
    let mut totals = vec![
        rows_where(now()).alias("now"),
        rows_where(before()).alias("before"),
        rows_where(ident("o").not_eq(lit(KEPT))).alias("touched"),
    ];
    for at in 0..sums.len() {
        let x = ident(format!("x{at}"));
        totals.push(sum(where_or_null(now(), x.clone())?).alias(format!("s{at}")));
        totals.push(sum(where_or_null(before(), x.clone())?).alias(format!("b{at}")));
        let size = abs(cast(x, DataType::Float64));
        totals.push(sum(where_or_null(now(), size)?).alias(format!("a{at}")));
    }
    Ok(session
        .read_table(Arc::new(table))?
        .select(columns)?
        .aggregate(key_columns(terms.by.len()), totals)?
        .filter(ident("touched").gt(lit(0i64)))?)
}

/// Totals of every upstream group: `u0`.., `un`, `us0`.. . Several upstream rows of one group add up.
fn expected_totals(
    upstream: DataFrame,
    subject: &Subject,
    terms: &Terms,
    sums: &[SumTerm],
) -> Result<DataFrame, CheckError> {
    let schema: SchemaRef = Arc::new(upstream.schema().as_arrow().clone());
    let type_of = |column: &str| match schema.field_with_name(column) {
        Ok(field) => Ok(field.data_type().clone()),
        Err(_) => Err(CheckError::MissingUpstreamColumn { column: column.to_owned() }),
    };
    let mut keys = Vec::with_capacity(terms.by.len());
    for (at, name) in terms.by.iter().enumerate() {
        type_of(name)?;
        keys.push(cast(ident(name), subject.column_type(name)?.clone()).alias(format!("u{at}")));
    }
    let by: Vec<Expr> = (0..terms.by.len()).map(|at| ident(format!("u{at}"))).collect();
    let mut columns = keys;
    let mut totals = Vec::new();
    if let Some(count) = &terms.count {
        type_of(count)?;
        columns.push(cast(ident(count), DataType::Int64).alias("c"));
        totals.push(sum(ident("c")).alias("un"));
    }
    for (at, term) in sums.iter().enumerate() {
        let actual = type_of(&term.upstream)?;
        let sum_type = term.sum_type.of_upstream(&actual).ok_or_else(|| CheckError::NotANumber {
            column: term.upstream.clone(),
            actual: actual.to_string(),
        })?;
        columns.push(cast(ident(&term.upstream), sum_type.widened()).alias(format!("y{at}")));
        totals.push(sum(ident(format!("y{at}"))).alias(format!("us{at}")));
    }
    Ok(upstream.select(columns)?.aggregate(by, totals)?)
}

fn wanted(terms: &Terms, sums: &[SumTerm]) -> Vec<Expr> {
    let mut columns = key_columns(terms.by.len());
    columns.extend([ident("now"), ident("before")]);
    if terms.count.is_some() {
        columns.push(ident("un"));
    }
    for at in 0..sums.len() {
        for prefix in ["s", "b", "a", "us"] {
            columns.push(ident(format!("{prefix}{at}")));
        }
    }
    columns
}

fn where_or_null(condition: Expr, value: Expr) -> Result<Expr, CheckError> {
    Ok(when(condition, value).otherwise(lit(ScalarValue::Null))?)
}

/// Joined groups of one batch.
struct Groups<'a> {
    batch: &'a RecordBatch,
    terms: &'a Terms,
    sums: &'a [SumTerm],
}

impl Groups<'_> {
    /// What differs in one group, `count=9 expected=10`; empty when everything agrees.
    fn differences(&self, row: usize) -> Result<Vec<String>, CheckError> {
        let mut differences = Vec::new();
        let at_most = self.terms.mode == ReconciliationMode::AtMost;
        let compared_with_base = at_most && self.terms.compare == Compare::NoWorse;
        let now = self.count("now", row)?.unwrap_or_default();
        let before = self.count("before", row)?.unwrap_or_default();
        if self.terms.count.is_some() {
            // Counts are exact, whatever tolerance the sums have.
            let expected = self.count("un", row)?;
            let agrees = match expected {
                None => false,
                Some(expected) if at_most => now <= expected || (compared_with_base && now <= before),
                Some(expected) => now == expected,
            };
            if !agrees {
                differences.push(format!("count={now} expected={}", or_null(expected)));
            }
        }
        for (at, term) in self.sums.iter().enumerate() {
            let actual = match self.total("s", at, row)? {
                // Nothing is left of the group: its sum is zero, not unknown.
                None if now == 0 => Some(zero(term.sum_type)),
                total => total,
            };
            let expected = self.total("us", at, row)?;
            if actual.is_some_and(|total| total.overflows()) {
                return Err(CheckError::Overflow { column: term.column.clone() });
            }
            let agrees = match (actual, expected) {
                (Some(actual), Some(expected)) => {
                    let tolerance = self.tolerance(actual, expected, now, self.size(at, row)?);
                    let no_more_than_before = compared_with_base
                        && self.total("b", at, row)?.is_some_and(|before| actual.within(&before, 0.0, true));
                    actual.within(&expected, tolerance, at_most) || no_more_than_before
                }
                // Null is never equal to null here.
                _ => false,
            };
            if !agrees {
                differences.push(format!(
                    "sum({})={} expected={}",
                    term.column,
                    or_null(actual),
                    or_null(expected)
                ));
            }
        }
        Ok(differences)
    }

    /// The largest difference that is none. Where none is declared, exact totals must be equal, and doubles
    /// may differ by what rounding alone can do when `rows` values of total `size` are added (Higham,
    /// Accuracy and Stability of Numerical Algorithms, section 4.2).
    fn tolerance(&self, actual: Total, expected: Total, rows: i64, size: f64) -> f64 {
        let declared = self.terms.absolute.max(self.terms.relative * size);
        let exact = matches!((actual, expected), (Total::Exact { .. }, Total::Exact { .. }));
        if declared > 0.0 || exact { declared } else { rows as f64 * f64::EPSILON * size }
    }

    fn column(&self, name: &str) -> Result<&ArrayRef, CheckError> {
        self.batch.column_by_name(name).ok_or_else(|| CheckError::Shape(format!("no column {name}")))
    }

    fn count(&self, name: &str, row: usize) -> Result<Option<i64>, CheckError> {
        let column = self.column(name)?;
        let numbers = column
            .as_primitive_opt::<Int64Type>()
            .ok_or_else(|| CheckError::Shape(format!("{name} is no count")))?;
        Ok(numbers.is_valid(row).then(|| numbers.value(row)))
    }

    fn total(&self, prefix: &str, at: usize, row: usize) -> Result<Option<Total>, CheckError> {
        Total::of_array(self.column(&format!("{prefix}{at}"))?.as_ref(), row)
    }

    /// Sum of absolute values, which relative tolerances refer to.
    fn size(&self, at: usize, row: usize) -> Result<f64, CheckError> {
        let column = self.column(&format!("a{at}"))?;
        let sizes = column
            .as_primitive_opt::<Float64Type>()
            .ok_or_else(|| CheckError::Shape("no sum of absolute values".to_owned()))?;
        Ok(if sizes.is_valid(row) { sizes.value(row) } else { 0.0 })
    }
}

fn zero(sum_type: SumType) -> Total {
    match sum_type {
        SumType::Float => Total::Float(0.0),
        SumType::Integer | SumType::Decimal { .. } => {
            Total::Exact { unscaled: datafusion::arrow::datatypes::i256::ZERO, scale: 0 }
        }
    }
}

fn or_null(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}
