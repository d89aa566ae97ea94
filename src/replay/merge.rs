//! MERGE INTO as one join.
//!
//! Spark's rules: a condition that is null is not true; of the clauses of one kind the first whose condition is
//! true acts; a target row that several source rows match is an error as soon as a `WHEN MATCHED` clause could
//! act on it, unless that clause only deletes, without a condition.

use std::collections::BTreeMap;

use datafusion::common::DFSchema;
use datafusion::logical_expr::{Expr, JoinType, cast, lit, when};
use datafusion::prelude::DataFrame;
use mergeberg_kernel::record::{Assignment, Condition, Merge, MergeAction, MergeClause, When};

use super::columns::{TargetColumn, column, column_of, hidden, is_default};
use super::error::ReplayError;
use super::plan::{Action, CLAUSE, Frame, null_of};
use super::session::{ORIGIN, POSITION, ROW_ID, ROWS, Session};

/// Column: a source row is there.
const SOURCE: &str = "\u{1}source";
/// Clause number of a matched pair on which no clause acts.
const MATCHED_ONLY: i32 = -1;
/// Clause number of everything else on which none acts.
const NOTHING: i32 = -2;

pub(super) async fn merged(session: &Session, merge: &Merge) -> Result<Frame, ReplayError> {
    let (target_alias, source_alias) = (session.folded(&merge.target), session.folded(&merge.source));
    if target_alias == source_alias {
        return Err(ReplayError::failed(format!("target and source are both named '{target_alias}'")));
    }
    let target = session.context.table(datafusion::sql::TableReference::bare(ROWS)).await?;
    let target = target.alias(&target_alias)?;
    let source = session.plan(merge.query.query()).await?;
    let source = source.with_column(SOURCE, lit(true))?.alias(&source_alias)?;

    let of = |wanted: When| merge.clauses.iter().any(|clause| clause.when == wanted);
    let join = match (of(When::NotMatched), of(When::NotMatchedBySource)) {
        (true, true) => JoinType::Full,
        (true, false) => JoinType::Right,
        (false, true) => JoinType::Left,
        (false, false) => JoinType::Inner,
    };
    let sides = Sides {
        target: target.schema().clone(),
        source: source.schema().clone(),
        both: target.schema().join(source.schema())?,
        session,
        source_alias: source_alias.clone(),
        target_alias: target_alias.clone(),
    };
    let on = session.expression(merge.on.expr(), &sides.both)?;
    let rows = target.join_on(source, join, [on])?;

    let is_target = column_of(&target_alias, ORIGIN).is_not_null();
    let is_source = column_of(&source_alias, SOURCE).is_not_null();
    let numbered: Vec<(i32, &MergeClause)> = (0_i32..).zip(&merge.clauses).collect();
    let choose = |kind: When, other: i32| -> Result<Expr, ReplayError> {
        let clauses: Vec<_> = numbered.iter().filter(|(_, clause)| clause.when == kind).collect();
        let mut chosen = lit(other);
        // From the last to the first, so that the first that is true wins.
        for (number, clause) in clauses.into_iter().rev() {
            chosen = match &clause.condition {
                None => lit(*number),
                Some(condition) => {
                    let condition = sides.expression(kind, condition)?;
                    when(condition.is_true(), lit(*number)).otherwise(chosen)?
                }
            };
        }
        Ok(chosen)
    };
    let clause = when(is_target.clone().and(is_source.clone()), choose(When::Matched, MATCHED_ONLY)?)
        .when(is_source, choose(When::NotMatched, NOTHING)?)
        .otherwise(choose(When::NotMatchedBySource, NOTHING)?)?;
    let rows = rows.with_column(CLAUSE, cast(clause, datafusion::arrow::datatypes::DataType::Int32))?;
    let rows = rows.filter(column(CLAUSE).gt(lit(NOTHING)))?;
    let (actions, rows) = values(rows, &sides, &numbered)?;
    Ok(Frame { rows, actions, once: needs_one_match(merge), inside: None })
}

/// Spark (`RewriteMergeIntoTable`): one `WHEN MATCHED THEN DELETE` without a condition does the same however
/// many rows match.
fn needs_one_match(merge: &Merge) -> bool {
    let matched: Vec<&MergeClause> =
        merge.clauses.iter().filter(|clause| clause.when == When::Matched).collect();
    !matches!(matched.as_slice(), [] | [MergeClause { condition: None, action: MergeAction::Delete, .. }])
}

/// The columns that an expression may name: both sides', or one's.
struct Sides<'a> {
    session: &'a Session,
    target: DFSchema,
    source: DFSchema,
    both: DFSchema,
    target_alias: String,
    source_alias: String,
}

impl Sides<'_> {
    fn expression(&self, kind: When, expr: &Condition) -> Result<Expr, ReplayError> {
        self.session.expression(expr.expr(), self.schema(kind))
    }

    /// What a clause sees.
    fn schema(&self, kind: When) -> &DFSchema {
        match kind {
            When::Matched => &self.both,
            When::NotMatched => &self.source,
            When::NotMatchedBySource => &self.target,
        }
    }

    /// The target's own value.
    fn kept(&self, at: usize) -> Expr {
        column_of(&self.target_alias, &hidden(at))
    }

    /// The source's column of the same name, for `*`.
    fn same_name(&self, spoken: &str) -> Result<Expr, ReplayError> {
        let relation = datafusion::sql::TableReference::bare(self.source_alias.clone());
        if self.source.has_column_with_qualified_name(&relation, spoken) {
            return Ok(column_of(&self.source_alias, spoken));
        }
        Err(ReplayError::failed(format!("'*' needs column '{spoken}' in the source, which does not have it")))
    }

    /// By place in the target: the row that a clause makes.
    fn row(&self, clause: &MergeClause) -> Result<Option<Vec<Expr>>, ReplayError> {
        let columns = &self.session.columns;
        let kept = || (0..columns.all.len()).map(|at| self.kept(at)).collect::<Vec<Expr>>();
        let empty = || columns.all.iter().map(TargetColumn::default_value).collect::<Vec<Expr>>();
        let value_of = |at: usize, value: &Condition| match columns.all.get(at) {
            Some(target) if is_default(value) => Ok(target.default_value()),
            _ => self.expression(clause.when, value),
        };
        let mut set: Vec<(usize, Expr)> = Vec::new();
        let mut inside: BTreeMap<usize, Vec<(&[String], Expr)>> = BTreeMap::new();
        let schema = self.schema(clause.when);
        let mut row = match &clause.action {
            MergeAction::Delete => return Ok(None),
            MergeAction::Update(assignments) => {
                for Assignment { column, fields, value } in assignments {
                    let at = columns.position(column)?;
                    if fields.is_empty() {
                        set.push((at, value_of(at, value)?));
                    } else {
                        let value = self.expression(clause.when, value)?;
                        inside.entry(at).or_default().push((fields, value));
                    }
                }
                kept()
            }
            MergeAction::UpdateAll | MergeAction::InsertAll => {
                for at in &columns.known {
                    if let Some(spoken) = columns.all.get(*at).and_then(|target| target.spoken.as_deref()) {
                        set.push((*at, self.same_name(spoken)?));
                    }
                }
                if clause.action == MergeAction::UpdateAll { kept() } else { empty() }
            }
            MergeAction::Insert { columns: names, values } => {
                let places: Vec<usize> = if names.is_empty() {
                    columns.known.clone()
                } else {
                    names.iter().map(|name| columns.position(name)).collect::<Result<_, _>>()?
                };
                if places.len() != values.len() {
                    return Err(ReplayError::failed(format!(
                        "INSERT gives {} values for {} columns",
                        values.len(),
                        places.len()
                    )));
                }
                for (at, value) in places.into_iter().zip(values) {
                    set.push((at, value_of(at, value)?));
                }
                empty()
            }
        };
        for (at, value) in set {
            if let (Some(slot), Some(target)) = (row.get_mut(at), columns.all.get(at)) {
                *slot = self.session.assigned(value, schema, &target.data_type)?;
            }
        }
        for (at, set) in inside {
            if let (Some(slot), Some(target)) = (row.get_mut(at), columns.all.get(at)) {
                *slot = self.session.with_fields(slot, schema, &target.data_type, &set)?;
            }
        }
        Ok(Some(row))
    }
}

/// What happens by clause, and the rows that come of it.
fn values(
    rows: DataFrame,
    sides: &Sides<'_>,
    clauses: &[(i32, &MergeClause)],
) -> Result<(Vec<Action>, DataFrame), ReplayError> {
    let mut actions = Vec::with_capacity(clauses.len());
    let mut made = Vec::new();
    for (number, clause) in clauses {
        actions.push(match &clause.action {
            MergeAction::Delete => Action::Delete,
            MergeAction::Update(_) | MergeAction::UpdateAll => Action::Update,
            MergeAction::Insert { .. } | MergeAction::InsertAll => Action::Insert,
        });
        if let Some(row) = sides.row(clause)? {
            made.push((*number, row));
        }
    }
    let mut columns = vec![
        column(CLAUSE),
        column_of(&sides.target_alias, ORIGIN).alias(ORIGIN),
        column_of(&sides.target_alias, POSITION).alias(POSITION),
    ];
    // An inserted row has none: no row of the target is beside it.
    columns
        .extend(sides.session.row_ids.as_ref().map(|_| column_of(&sides.target_alias, ROW_ID).alias(ROW_ID)));
    if !made.is_empty() {
        for (at, target) in sides.session.columns.all.iter().enumerate() {
            let mut value = null_of(&target.data_type);
            for (number, row) in made.iter().rev() {
                if let Some(one) = row.get(at) {
                    value = when(column(CLAUSE).eq(lit(*number)), one.clone()).otherwise(value)?;
                }
            }
            columns.push(value.alias(hidden(at)));
        }
    }
    Ok((actions, rows.select(columns)?))
}
