//! `not-null`: columns are filled. The schema's own `required` is not trusted: files are read as they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::{Int32Type, Int64Type};
use datafusion::logical_expr::{Expr, ident};
use futures::TryStreamExt;
use mergeberg_kernel::policy::Compare;
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::blame::{Blame, Culprits, culprits_of_row};
use super::finding::{Finding, SAMPLE_KEYS, key_text};
use super::rows::{any_null, keep_what_differs, key_columns, keys_and_origin, rows_where};
use super::session::Engine;
use super::subject::{ADDED, KEPT, Origins, REMOVED, Subject};

/// Columns that a sampled row shows: those of the check, then the table's first ones.
const SHOWN_COLUMNS: usize = 6;
/// Origins whose rows are looked up for a sample; the rest is counted only.
const SAMPLED_ORIGINS: usize = 20;

pub async fn run(
    engine: Arc<Engine>,
    mut subject: Subject,
    columns: Vec<String>,
    compare: Compare,
) -> Result<Finding, CheckError> {
    subject.require_columns(&columns)?;
    keep_what_differs(&mut subject, compare);
    let nulls = count_nulls(&engine, &subject, &columns).await?;
    let of = |origin: i32, column: usize| -> i64 {
        nulls.get(&origin).and_then(|counts| counts.get(column)).copied().unwrap_or_default()
    };
    let mut measured = Vec::new();
    // Null values by origin: the culprits, and the origin whose rows show it.
    let mut wrong: Vec<(Culprits, u64, i32)> = Vec::new();
    let requests = match &subject.origins {
        Origins::Cars { requests, selected } => {
            for (at, column) in columns.iter().enumerate() {
                let total: i64 = nulls.keys().map(|origin| of(*origin, at)).sum();
                measured.push((format!("nulls({column})"), total.to_string()));
            }
            for origin in nulls.keys() {
                let count: i64 = (0..columns.len()).map(|at| of(*origin, at)).sum();
                let index = usize::try_from(*origin).unwrap_or_default();
                if count > 0
                    && let Some(culprits) = culprits_of_row(index, selected, compare)
                {
                    wrong.push((culprits, u64::try_from(count).unwrap_or_default(), *origin));
                }
            }
            requests.clone()
        }
        Origins::Change { request } => {
            let mut excess = 0;
            for (at, column) in columns.iter().enumerate() {
                let (now, before) = (of(KEPT, at) + of(ADDED, at), of(KEPT, at) + of(REMOVED, at));
                measured.push((format!("nulls({column})"), (now).to_string()));
                excess += match compare {
                    Compare::NoWorse => (now - before).max(0),
                    Compare::Strict => now,
                };
            }
            let added: i64 = (0..columns.len()).map(|at| of(ADDED, at)).sum();
            let kept: i64 = (0..columns.len()).map(|at| of(KEPT, at)).sum();
            if excess > 0 {
                let (cars, origin) = if added > 0 { (vec![1], ADDED) } else { (Vec::new(), KEPT) };
                let culprits = Culprits { cars, with_base: kept > 0 };
                wrong.push((culprits, u64::try_from(excess).unwrap_or_default(), origin));
            }
            vec![*request]
        }
    };
    let mut blame = Blame::default();
    for (at, (culprits, count, origin)) in wrong.into_iter().enumerate() {
        let rows = if at < SAMPLED_ORIGINS {
            sample(&engine, &subject, &columns, origin).await?
        } else {
            Vec::new()
        };
        blame.add_counted(culprits, count, rows);
    }
    let violations = blame.violations(&requests);
    Ok(Finding::of(ReasonCode::NotNull, subject.scope, measured, violations))
}

/// Nulls of each column by origin, in one scan of those columns.
async fn count_nulls(
    engine: &Engine,
    subject: &Subject,
    columns: &[String],
) -> Result<BTreeMap<i32, Vec<i64>>, CheckError> {
    let counts: Vec<Expr> = key_columns(columns.len())
        .into_iter()
        .enumerate()
        .map(|(at, key)| rows_where(key.is_null()).alias(format!("n{at}")))
        .collect();
    let mut stream = keys_and_origin(engine.session(), subject.table(engine), columns)?
        .aggregate(vec![ident("o")], counts)?
        .execute_stream()
        .await?;
    let mut nulls = BTreeMap::new();
    while let Some(batch) = stream.try_next().await? {
        let shape = || CheckError::Shape("counts of nulls".to_owned());
        let origins = batch.column(0).as_primitive_opt::<Int32Type>().ok_or_else(shape)?;
        for row in 0..batch.num_rows() {
            let mut counts = Vec::with_capacity(columns.len());
            for column in batch.columns().iter().skip(1) {
                counts.push(column.as_primitive_opt::<Int64Type>().ok_or_else(shape)?.value(row));
            }
            nulls.insert(origins.value(row), counts);
        }
    }
    Ok(nulls)
}

/// Some of the rows of one origin with a null. A second look, at files that are known to hold one; it
/// stops when it has enough.
async fn sample(
    engine: &Engine,
    subject: &Subject,
    columns: &[String],
    origin: i32,
) -> Result<Vec<String>, CheckError> {
    let mut shown = columns.to_vec();
    for field in subject.schema().fields() {
        let room = shown.len() < SHOWN_COLUMNS.max(columns.len());
        if room && !field.data_type().is_nested() && !shown.contains(field.name()) {
            shown.push(field.name().clone());
        }
    }
    let table = subject.table_of(engine, |one| one == origin);
    let mut stream = keys_and_origin(engine.session(), table, &shown)?
        .filter(any_null(&key_columns(columns.len())))?
        .limit(0, Some(SAMPLE_KEYS))?
        .execute_stream()
        .await?;
    let mut rows = Vec::new();
    while let Some(batch) = stream.try_next().await? {
        for row in 0..batch.num_rows() {
            rows.push(key_text(&shown, &batch, row)?);
        }
    }
    Ok(rows)
}
