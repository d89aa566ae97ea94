//! `duplicate-key`: a key is in the scope at most once, or no more often than it was in the base.
//!
//! Where only additions to the base count (`no-worse`) and few rows are added, the base is not grouped: of
//! its rows only those with a key that was added are kept. A day of a million rows then costs a look-up for
//! each row and next to no memory, and still every row is compared, with its whole key. Files of the base whose
//! bounds leave no room for any of the keys are not read (docs/decisions/0033).

use std::sync::Arc;

use datafusion::arrow::array::{Array, AsArray, RecordBatch};
use datafusion::arrow::datatypes::Int64Type;
use datafusion::common::{Column, DataFusionError, NullEquality};
use datafusion::functions_aggregate::expr_fn::{count, max};
use datafusion::logical_expr::{Expr, JoinType, LogicalPlanBuilder, ident, lit};
use datafusion::prelude::{DataFrame, SessionContext};
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
use super::subject::{ADDED, KEPT, Origins, REMOVED, Subject};
use crate::table::key_range::KeyRange;
use crate::table::scan::ScanFile;

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

/// Added rows whose keys are held in memory, at most; with more the whole scope is grouped, which can spill.
const MAX_SOUGHT_ROWS: u64 = 200_000;
/// Memory of their keys, in bytes; beside the engine's pool.
const MAX_SOUGHT_BYTES: usize = 32 * 1024 * 1024;

/// Keys and origins of all rows that can be part of a violation.
async fn rows_in_question(
    engine: &Engine,
    subject: &Subject,
    columns: &[String],
    compare: Compare,
) -> Result<DataFrame, CheckError> {
    let session = engine.session();
    if compare == Compare::NoWorse
        && let Some(added) = added_keys(engine, &session, subject, columns).await?
    {
        let ranges = ranges_of(subject, columns, &added)?;
        let may_meet =
            |file: &ScanFile| file.origin == KEPT && ranges.iter().all(|range| range.may_be_in(&file.file));
        let added = session.read_batches(added)?;
        let names: Vec<String> = (0..columns.len()).map(|at| format!("k{at}")).collect();
        let sought: Vec<String> = (0..columns.len()).map(|at| format!("s{at}")).collect();
        let renamed = names.iter().zip(&sought).map(|(name, to)| ident(name).alias(to));
        let keys = added.clone().select(renamed.collect::<Vec<_>>())?;
        let kept = keys_and_origin(session, subject.table_where(engine, may_meet), columns)?;
        let (state, kept) = kept.into_parts();
        let on: (Vec<Column>, Vec<Column>) = (
            sought.into_iter().map(Column::new_unqualified).collect(),
            names.into_iter().map(Column::new_unqualified).collect(),
        );
        // The few are the build side. Two nulls meet, as in GROUP BY.
        let met = LogicalPlanBuilder::from(keys.into_unoptimized_plan())
            .join_detailed(kept, JoinType::RightSemi, on, None, NullEquality::NullEqualsNull)?
            .build()?;
        return Ok(DataFrame::new(state, met).union(added)?);
    }
    keys_and_origin(session, subject.table(engine), columns)
}

/// Where the added keys lie, column by column, as far as bounds of files can be compared with it.
fn ranges_of(
    subject: &Subject,
    columns: &[String],
    added: &[RecordBatch],
) -> Result<Vec<KeyRange>, CheckError> {
    let mut ranges = Vec::new();
    for (at, name) in columns.iter().enumerate() {
        if let Some(column) = subject.key_column(name) {
            let values = added.iter().map(|batch| batch.column(at));
            ranges.push(KeyRange::of(column, values).map_err(DataFusionError::from)?);
        }
    }
    Ok(ranges)
}

/// Keys and origins of the rows that the cars add, if they are few.
async fn added_keys(
    engine: &Engine,
    session: &SessionContext,
    subject: &Subject,
    columns: &[String],
) -> Result<Option<Vec<RecordBatch>>, CheckError> {
    if subject.records(|origin| origin != KEPT) > MAX_SOUGHT_ROWS {
        return Ok(None);
    }
    let added = subject.table_of(engine, |origin| origin != KEPT);
    let mut stream = keys_and_origin(session.clone(), added, columns)?.execute_stream().await?;
    let mut bytes = 0;
    // Never empty, so that it can be read as a relation.
    let mut batches = vec![RecordBatch::new_empty(stream.schema())];
    while let Some(batch) = stream.try_next().await? {
        bytes += batch.get_array_memory_size();
        if bytes > MAX_SOUGHT_BYTES {
            return Ok(None);
        }
        batches.push(batch);
    }
    Ok(Some(batches))
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
    let rows = rows_in_question(engine, subject, columns, compare).await?;
    let keys = key_columns(columns.len());
    let origins = origins_aggregate(selected.len() + 1);
    // GROUP BY takes two nulls for the same key, which is the default rule (case O14).
    let grouped = rows.aggregate(
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
