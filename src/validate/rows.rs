//! Checks on which every row is right or wrong by itself: `accepted-values` and `referential`.
//!
//! Files that candidate and base share hold the same wrong rows on both sides and cancel out, so with
//! `no-worse` only what was added and removed is read.

use std::sync::Arc;

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Int32Type, Int64Type};
use datafusion::catalog::TableProvider;
use datafusion::common::ScalarValue;
use datafusion::functions_aggregate::expr_fn::{count, sum};
use datafusion::logical_expr::{Expr, JoinType, ident, in_list, lit, when};
use datafusion::prelude::{DataFrame, SessionContext};
use futures::TryStreamExt;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::policy::Compare;
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::blame::{Blame, Culprits, culprits_of_row};
use super::finding::{Finding, key_text};
use super::provider::FilesTable;
use super::session::Engine;
use super::subject::{ADDED, KEPT, Origins, PinnedTable, REMOVED, Subject};

/// A column holds only the listed values. A null is no value: `not-null` looks after it.
pub async fn accepted_values(
    engine: Arc<Engine>,
    mut subject: Subject,
    column: String,
    values: Vec<String>,
    compare: Compare,
) -> Result<Finding, CheckError> {
    let accepted = literals(&column, subject.column_type(&column)?, &values)?;
    keep_what_differs(&mut subject, compare);
    let columns = vec![column];
    let key = ident("k0");
    let wrong = key.clone().is_not_null().and(in_list(key, accepted, true));
    let rows = keys_and_origin(engine.session(), subject.table(&engine), &columns)?
        .filter(wrong)?
        .aggregate(vec![ident("k0"), ident("o")], vec![count(lit(1i64)).alias("n")])?;
    let tally = tally(rows, &subject.origins, &columns, compare).await?;
    let measured = vec![
        ("values not accepted".to_owned(), tally.keys.to_string()),
        ("rows with them".to_owned(), tally.rows.to_string()),
    ];
    let violations = tally.blame.violations(&tally.requests);
    Ok(Finding::of(ReasonCode::AcceptedValues, subject.scope, measured, violations))
}

/// Keys exist in another table. A key with a null points nowhere and is not looked up.
pub async fn referential(
    engine: Arc<Engine>,
    mut subject: Subject,
    columns: Vec<String>,
    pinned: PinnedTable,
    referenced: Vec<String>,
    compare: Compare,
) -> Result<Finding, CheckError> {
    subject.require_columns(&columns)?;
    let there = pinned.table(&engine);
    for column in &referenced {
        if there.schema().field_with_name(column).is_err() {
            return Err(CheckError::MissingColumn {
                column: format!("{}.{column}", pinned.name),
                schema: pinned.reader.schema_id(),
            });
        }
    }
    keep_what_differs(&mut subject, compare);
    let session = engine.session();
    let keys = key_columns(columns.len());
    let complete = all_of(keys.iter().map(|key| key.clone().is_not_null()));
    let mut by = keys.clone();
    by.push(ident("o"));
    // Grouped first: few keys are looked up, however many rows point to them.
    let pointing = keys_and_origin(session.clone(), subject.table(&engine), &columns)?
        .filter(complete)?
        .aggregate(by, vec![count(lit(1i64)).alias("n")])?;
    let targets: Vec<Expr> =
        referenced.iter().enumerate().map(|(at, name)| ident(name).alias(format!("r{at}"))).collect();
    let there = session.read_table(Arc::new(there))?.select(targets)?;
    let on = keys.into_iter().enumerate().map(|(at, key)| key.eq(ident(format!("r{at}"))));
    let dangling = pointing.join_on(there, JoinType::LeftAnti, on)?;
    let tally = tally(dangling, &subject.origins, &columns, compare).await?;
    let measured = vec![
        pinned.measured(),
        ("keys without a target".to_owned(), tally.keys.to_string()),
        ("rows with them".to_owned(), tally.rows.to_string()),
    ];
    let violations = tally.blame.violations(&tally.requests);
    Ok(Finding::of(ReasonCode::Referential, subject.scope, measured, violations))
}

/// The files that can make a difference.
pub fn keep_what_differs(subject: &mut Subject, compare: Compare) {
    match (subject.origins.clone(), compare) {
        (Origins::Cars { selected, .. }, _) => subject.keep(|origin| {
            usize::try_from(origin).is_ok_and(|origin| culprits_of_row(origin, &selected, compare).is_some())
        }),
        (Origins::Change { .. }, Compare::NoWorse) => subject.keep(|origin| origin != KEPT),
        (Origins::Change { .. }, Compare::Strict) => subject.keep(|origin| origin != REMOVED),
    }
}

struct Tally {
    blame: Blame,
    requests: Vec<RequestId>,
    keys: u64,
    rows: u64,
}

/// Blames the wrong rows of `rows`: key columns `k0`.., origin `o`, and their number `n`.
async fn tally(
    rows: DataFrame,
    origins: &Origins,
    columns: &[String],
    compare: Compare,
) -> Result<Tally, CheckError> {
    match origins {
        Origins::Cars { requests, selected } => {
            let mut tally = Tally { blame: Blame::default(), requests: requests.clone(), keys: 0, rows: 0 };
            let mut stream = rows.execute_stream().await?;
            while let Some(batch) = stream.try_next().await? {
                let origin = batch
                    .column(columns.len())
                    .as_primitive_opt::<Int32Type>()
                    .ok_or_else(|| CheckError::Shape("an origin".to_owned()))?;
                let n = numbers(&batch, columns.len() + 1)?;
                for row in 0..batch.num_rows() {
                    let origin = usize::try_from(origin.value(row)).unwrap_or_default();
                    let Some(culprits) = culprits_of_row(origin, selected, compare) else { continue };
                    tally.keys += 1;
                    tally.rows += u64::try_from(n.value(row)).unwrap_or_default();
                    tally.blame.add(culprits, 1, || key_text(columns, &batch, row))?;
                }
            }
            Ok(tally)
        }
        Origins::Change { request } => {
            let mut tally = Tally { blame: Blame::default(), requests: vec![*request], keys: 0, rows: 0 };
            let total = |condition: Expr| sum(case_or_zero(condition, ident("n")));
            let grouped = rows.aggregate(
                key_columns(columns.len()),
                vec![
                    total(ident("o").not_eq(lit(REMOVED))).alias("now"),
                    total(ident("o").not_eq(lit(ADDED))).alias("before"),
                    total(ident("o").eq(lit(ADDED))).alias("added"),
                ],
            )?;
            let wrong = match compare {
                Compare::NoWorse => ident("now").gt(ident("before")),
                Compare::Strict => ident("now").gt(lit(0i64)),
            };
            let mut stream = grouped.filter(wrong)?.execute_stream().await?;
            while let Some(batch) = stream.try_next().await? {
                let now = numbers(&batch, columns.len())?;
                let before = numbers(&batch, columns.len() + 1)?;
                let added = numbers(&batch, columns.len() + 2)?;
                for row in 0..batch.num_rows() {
                    tally.keys += 1;
                    tally.rows += u64::try_from(now.value(row)).unwrap_or_default();
                    let cars = if added.value(row) > 0 { vec![1] } else { Vec::new() };
                    let culprits = Culprits { cars, with_base: before.value(row) > 0 };
                    tally.blame.add(culprits, 1, || key_text(columns, &batch, row))?;
                }
            }
            Ok(tally)
        }
    }
}

fn numbers(
    batch: &RecordBatch,
    at: usize,
) -> Result<&datafusion::arrow::array::PrimitiveArray<Int64Type>, CheckError> {
    batch.column(at).as_primitive_opt::<Int64Type>().ok_or_else(|| CheckError::Shape("a count".to_owned()))
}

/// Values of a policy as values of the column's type: `1` of an integer column is not the text `1`.
fn literals(column: &str, data_type: &DataType, values: &[String]) -> Result<Vec<Expr>, CheckError> {
    let mut literals = Vec::with_capacity(values.len());
    for value in values {
        let typed = ScalarValue::try_from_string(value.clone(), data_type).ok().filter(|v| !v.is_null());
        literals.push(lit(typed.ok_or_else(|| CheckError::NotAValue {
            column: column.to_owned(),
            value: value.clone(),
            actual: data_type.to_string(),
        })?));
    }
    Ok(literals)
}

/// The files' rows as `k0`.. (the key columns) and `o` (the origin). Columns are named as data, never as
/// SQL text: any name works.
pub fn keys_and_origin(
    session: SessionContext,
    table: FilesTable,
    columns: &[String],
) -> Result<DataFrame, CheckError> {
    let mut wanted: Vec<Expr> =
        columns.iter().enumerate().map(|(at, name)| ident(name).alias(format!("k{at}"))).collect();
    wanted.extend(table.origin_column().map(|name| ident(name).alias("o")));
    Ok(session.read_table(Arc::new(table))?.select(wanted)?)
}

/// `k0`, `k1`..
pub fn key_columns(count: usize) -> Vec<Expr> {
    (0..count).map(|at| ident(format!("k{at}"))).collect()
}

pub fn any_null(columns: &[Expr]) -> Expr {
    columns.iter().fold(lit(false), |any, column| any.or(column.clone().is_null()))
}

pub fn all_of(conditions: impl IntoIterator<Item = Expr>) -> Expr {
    conditions.into_iter().fold(lit(true), Expr::and)
}

/// Number of rows for which `condition` holds.
pub fn rows_where(condition: Expr) -> Expr {
    sum(case_or_zero(condition, lit(1i64)))
}

fn case_or_zero(condition: Expr, value: Expr) -> Expr {
    // The builder only fails on a CASE without branches.
    when(condition, value).otherwise(lit(0i64)).unwrap_or_else(|_| lit(ScalarValue::Int64(None)))
}
