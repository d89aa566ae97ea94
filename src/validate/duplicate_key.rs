//! `duplicate-key`: a key is in the scope at most once, or no more often than it was in the base.

use std::sync::Arc;

use datafusion::arrow::array::{Array, AsArray, RecordBatch};
use datafusion::arrow::datatypes::Int64Type;
use datafusion::functions_aggregate::expr_fn::{count, max};
use datafusion::logical_expr::{Expr, ident, lit};
use futures::TryStreamExt;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::policy::{Compare, NullRule};
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::blame::{Blame, Culprits, culprits_of_duplicate, culprits_of_row};
use super::finding::{Finding, key_text};
use super::origins::{OriginSet, origins_aggregate};
use super::rows::{all_of, any_null, key_columns, keys_and_origin, rows_where};
use super::session::Engine;
use super::subject::{ADDED, Origins, REMOVED, Subject};

/// Violating keys, and which of them are violations because of a null.
#[derive(Default)]
struct Tally {
    blame: Blame,
    duplicates: u64,
    nulls: u64,
}

pub async fn run(
    engine: Arc<Engine>,
    mut subject: Subject,
    columns: Vec<String>,
    nulls: NullRule,
    compare: Compare,
) -> Result<Finding, CheckError> {
    subject.require_columns(&columns)?;
    let mut tally = Tally::default();
    let requests = match subject.origins.clone() {
        Origins::Cars { requests, selected } => {
            appends(&engine, &subject, &columns, nulls, compare, &selected, &mut tally).await?;
            requests
        }
        Origins::Change { request } => {
            if compare == Compare::Strict {
                subject.keep(|origin| origin != REMOVED);
            }
            change(&engine, &subject, &columns, nulls, compare, &mut tally).await?;
            vec![request]
        }
    };
    Ok(finding(tally, subject.scope, nulls, &requests))
}

fn finding(tally: Tally, scope: String, nulls: NullRule, requests: &[RequestId]) -> Finding {
    let mut measured = vec![("duplicate keys".to_owned(), tally.duplicates.to_string())];
    if nulls == NullRule::Violation {
        measured.push(("keys with a null".to_owned(), tally.nulls.to_string()));
    }
    let code = if tally.nulls > 0 { ReasonCode::NullInKey } else { ReasonCode::DuplicateKey };
    Finding::of(code, scope, measured, tally.blame.violations(requests))
}

/// One scan: keys that are there more than once, with the set of origins they come from.
async fn appends(
    engine: &Engine,
    subject: &Subject,
    columns: &[String],
    nulls: NullRule,
    compare: Compare,
    selected: &[bool],
    tally: &mut Tally,
) -> Result<(), CheckError> {
    let table = subject.table(engine);
    let keys = key_columns(columns.len());
    let origins = origins_aggregate(selected.len() + 1);
    // GROUP BY takes two nulls for the same key, which is the default rule (case O14).
    let grouped = keys_and_origin(engine.session(), table, columns)?.aggregate(
        keys.clone(),
        vec![
            count(lit(1i64)).alias("n"),
            max(ident("o")).alias("last"),
            origins.call(vec![ident("o")]).alias("origins"),
        ],
    )?;
    let mut wrong = ident("n").gt(lit(1i64));
    if nulls == NullRule::Violation {
        wrong = wrong.or(any_null(&keys));
    }
    if compare == Compare::NoWorse {
        // Keys of the base alone are a table event, not a request's fault (rule E1).
        wrong = wrong.and(ident("last").gt(lit(0i32)));
    }
    let mut stream = grouped.filter(wrong)?.execute_stream().await?;
    while let Some(batch) = stream.try_next().await? {
        let sets = batch.column(columns.len() + 2).as_fixed_size_binary_opt();
        let sets = sets.ok_or_else(|| CheckError::Shape("origins".to_owned()))?;
        for row in 0..batch.num_rows() {
            let set = OriginSet::of_bytes(sets.value(row))
                .ok_or_else(|| CheckError::Shape("a set of origins".to_owned()))?;
            let null = nulls == NullRule::Violation && has_null(&batch, columns.len(), row);
            let culprits: Vec<Culprits> = if null {
                (0..=selected.len())
                    .filter(|origin| set.contains(*origin))
                    .filter_map(|origin| culprits_of_row(origin, selected, compare))
                    .collect()
            } else {
                culprits_of_duplicate(&set, selected, compare)
            };
            if !culprits.is_empty() {
                if null { tally.nulls += 1 } else { tally.duplicates += 1 }
            }
            for culprit in culprits {
                tally.blame.add(culprit, 1, || key_text(columns, &batch, row))?;
            }
        }
    }
    Ok(())
}

/// One scan over the candidate's files and those that the car removed: how often is a key there now, and
/// how often was it before?
async fn change(
    engine: &Engine,
    subject: &Subject,
    columns: &[String],
    nulls: NullRule,
    compare: Compare,
    tally: &mut Tally,
) -> Result<(), CheckError> {
    let keys = key_columns(columns.len());
    let grouped = keys_and_origin(engine.session(), subject.table(engine), columns)?.aggregate(
        keys.clone(),
        vec![
            rows_where(ident("o").not_eq(lit(REMOVED))).alias("now"),
            rows_where(ident("o").not_eq(lit(ADDED))).alias("before"),
            rows_where(ident("o").eq(lit(ADDED))).alias("added"),
        ],
    )?;
    let worse = match compare {
        Compare::NoWorse => ident("now").gt(ident("before")),
        Compare::Strict => ident("now").gt(lit(0i64)),
    };
    let null: Expr = match nulls {
        NullRule::Violation => any_null(&keys),
        NullRule::Equal => lit(false),
    };
    let wrong = all_of([worse, ident("now").gt(lit(1i64)).or(null)]);
    let mut stream = grouped.filter(wrong)?.execute_stream().await?;
    while let Some(batch) = stream.try_next().await? {
        let number = |at: usize| {
            batch
                .column(columns.len() + at)
                .as_primitive_opt::<Int64Type>()
                .ok_or_else(|| CheckError::Shape("a count".to_owned()))
        };
        let (before, added) = (number(1)?, number(2)?);
        for row in 0..batch.num_rows() {
            if nulls == NullRule::Violation && has_null(&batch, columns.len(), row) {
                tally.nulls += 1;
            } else {
                tally.duplicates += 1;
            }
            let cars = if added.value(row) > 0 { vec![1] } else { Vec::new() };
            let culprits = Culprits { cars, with_base: before.value(row) > 0 };
            tally.blame.add(culprits, 1, || key_text(columns, &batch, row))?;
        }
    }
    Ok(())
}

fn has_null(batch: &RecordBatch, keys: usize, row: usize) -> bool {
    batch.columns().iter().take(keys).any(|column| column.is_null(row))
}
