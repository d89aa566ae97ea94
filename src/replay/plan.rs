//! An operation as queries of one shape: the rows that it changes and the rows that it gives.
//!
//! Every frame has [`CLAUSE`], the number of what happens to the row; frames over the target's rows also have
//! where the row is, and frames that write have the target's columns under their hidden names, in the target's
//! types.

use std::collections::BTreeSet;

use datafusion::arrow::datatypes::DataType;
use datafusion::logical_expr::{Expr, cast, lit};
use datafusion::prelude::DataFrame;
use datafusion::scalar::ScalarValue;
use datafusion::sql::sqlparser::ast::{
    Expr as SqlExpr, Ident, Query, SelectItem, SetExpr, TableAlias, TableFactor,
};
use mergeberg_kernel::record::{Assignment, Columns, Condition, Operation, Record, Rows, Select};

use super::columns::{column, hidden, is_default};
use super::error::ReplayError;
use super::semantics;
use super::session::{ORIGIN, POSITION, ROW_ID, ROWS, Session};

/// Column: which of the frame's actions, `Int32`; below 0 none.
pub(super) const CLAUSE: &str = "\u{1}clause";
/// Column of rows that must lie inside of what is overwritten: do they?
pub(super) const INSIDE: &str = "\u{1}inside";

/// What happens to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A row of the target goes.
    Delete,
    /// A row of the target gets other values.
    Update,
    /// A new row.
    Insert,
}

/// Rows with what happens to them.
pub(super) struct Frame {
    pub rows: DataFrame,
    pub actions: Vec<Action>,
    /// No row of the target may be there twice.
    pub once: bool,
    /// The rows must match this, as [`INSIDE`] says.
    pub inside: Option<String>,
}

/// How changed rows leave their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The files are written again without them.
    CopyOnWrite,
    /// They are marked as deleted.
    MergeOnRead,
}

/// An operation, planned.
pub(super) struct Planned {
    pub frames: Vec<Frame>,
    /// Property of the table that says how.
    pub mode_property: &'static str,
    /// Every partition that gets rows loses all that it had.
    pub replaces_partitions: bool,
}

pub(super) async fn plan(session: &Session, record: &Record) -> Result<Planned, ReplayError> {
    let planned = frames(session, record).await?;
    if session.names == mergeberg_kernel::record::Names::AnyCase {
        for frame in &planned.frames {
            semantics::check(&frame.rows)?;
        }
    }
    Ok(planned)
}

async fn frames(session: &Session, record: &Record) -> Result<Planned, ReplayError> {
    let planned = |frames, mode_property| Planned { frames, mode_property, replaces_partitions: false };
    Ok(match &record.operation {
        Operation::Append | Operation::ReplacePartitions => {
            return Err(ReplayError::failed(format!("{} is not run again", record.operation.name())));
        }
        Operation::InsertInto { rows } => {
            planned(vec![given(session, rows, None).await?], "write.update.mode")
        }
        Operation::OverwritePartitions { rows } => {
            let frames = vec![given(session, rows, None).await?];
            Planned { replaces_partitions: true, ..planned(frames, "write.delete.mode") }
        }
        Operation::OverwriteWhere { filter, rows } => {
            let target = mergeberg_kernel::record::TARGET_ALIAS;
            let gone = deleted(session, target, filter).await?;
            let new = given(session, rows, Some(filter)).await?;
            // Engines rewrite files here whatever the modes for rows say.
            planned(vec![gone, new], "")
        }
        Operation::DeleteWhere { target, filter } => {
            planned(vec![deleted(session, target, filter).await?], "write.delete.mode")
        }
        Operation::UpdateWhere { target, set, filter } => {
            planned(vec![updated(session, target, set, filter.as_ref()).await?], "write.update.mode")
        }
        Operation::MergeInto(merge) => {
            planned(vec![super::merge::merged(session, merge).await?], "write.merge.mode")
        }
    })
}

async fn deleted(session: &Session, target: &str, filter: &Condition) -> Result<Frame, ReplayError> {
    let items = [ORIGIN, POSITION].map(|name| named(SqlExpr::Identifier(quoted(name)), name));
    let rows = session.plan(&over_rows(session, target, items.to_vec(), Some(filter))?).await?;
    let rows = rows.with_column(CLAUSE, lit(0_i32))?;
    Ok(Frame { rows, actions: vec![Action::Delete], once: false, inside: None })
}

async fn updated(
    session: &Session,
    target: &str,
    set: &[Assignment],
    filter: Option<&Condition>,
) -> Result<Frame, ReplayError> {
    let ids = session.row_ids.as_ref().map(|_| ROW_ID);
    let places = [ORIGIN, POSITION].into_iter().chain(ids);
    let mut items: Vec<SelectItem> =
        places.clone().map(|name| named(SqlExpr::Identifier(quoted(name)), name)).collect();
    let mut values: Vec<SqlExpr> =
        (0..session.columns.all.len()).map(|at| SqlExpr::Identifier(quoted(&hidden(at)))).collect();
    let mut defaults = BTreeSet::new();
    let mut inside: Vec<(usize, &[String], String)> = Vec::new();
    for Assignment { column, fields, value } in set {
        let at = session.columns.position(column)?;
        if is_default(value) {
            defaults.insert(at);
        } else if !fields.is_empty() {
            let name = format!("\u{1}inside{}", inside.len());
            items.push(named(value.expr().clone(), &name));
            inside.push((at, fields, name));
        } else if let Some(slot) = values.get_mut(at) {
            *slot = value.expr().clone();
        }
    }
    items.extend(values.into_iter().enumerate().map(|(at, value)| named(value, &hidden(at))));
    let rows = session.plan(&over_rows(session, target, items, filter)?).await?;
    let mut columns = vec![lit(0_i32).alias(CLAUSE)];
    columns.extend(places.map(column));
    for (at, target) in session.columns.all.iter().enumerate() {
        let set: Vec<(&[String], Expr)> = inside
            .iter()
            .filter(|(of, ..)| *of == at)
            .map(|(_, fields, name)| (*fields, column(name)))
            .collect();
        let whole = column(&hidden(at));
        let value = if defaults.contains(&at) {
            target.default_value()
        } else if set.is_empty() {
            session.assigned(whole, rows.schema(), &target.data_type)?
        } else {
            session.with_fields(&whole, rows.schema(), &target.data_type, &set)?
        };
        columns.push(value.alias(hidden(at)));
    }
    Ok(Frame { rows: rows.select(columns)?, actions: vec![Action::Update], once: false, inside: None })
}

/// `SELECT items FROM rows AS target WHERE filter`, put together from what was parsed before: no text is
/// pasted into text.
fn over_rows(
    session: &Session,
    target: &str,
    items: Vec<SelectItem>,
    filter: Option<&Condition>,
) -> Result<Query, ReplayError> {
    let mut query = Select::parse("SELECT 1 FROM rows AS alias").map_err(internal)?.query().clone();
    let SetExpr::Select(select) = query.body.as_mut() else {
        return Err(ReplayError::failed("a query over the target's rows could not be built"));
    };
    select.projection = items;
    select.selection = filter.map(|filter| filter.expr().clone());
    for from in &mut select.from {
        if let TableFactor::Table { name, alias, .. } = &mut from.relation {
            *name = vec![quoted(ROWS)].into();
            *alias = Some(TableAlias {
                explicit: true,
                name: quoted(&session.folded(target)),
                columns: Vec::new(),
            });
        }
    }
    Ok(query)
}

fn internal(error: impl std::fmt::Display) -> ReplayError {
    ReplayError::failed(error.to_string())
}

fn quoted(name: &str) -> Ident {
    Ident::with_quote('"', name)
}

fn named(expr: SqlExpr, name: &str) -> SelectItem {
    SelectItem::ExprWithAlias { expr, alias: quoted(name) }
}

/// The rows of a query as rows of the target.
async fn given(session: &Session, rows: &Rows, inside: Option<&Condition>) -> Result<Frame, ReplayError> {
    let frame = session.plan(rows.query.query()).await?;
    let values = match &rows.columns {
        Columns::ByName => by_name(session, &frame)?,
        Columns::ByPosition { names, constants } => by_position(session, &frame, names, constants)?,
    };
    let mut columns = vec![lit(0_i32).alias(CLAUSE)];
    for (at, target) in session.columns.all.iter().enumerate() {
        let value = match values.get(at).cloned().flatten() {
            Some(value) => session.assigned(value, frame.schema(), &target.data_type)?,
            None => target.default_value(),
        };
        columns.push(value.alias(hidden(at)));
    }
    let mut rows = frame.select(columns)?;
    if let Some(filter) = inside {
        // Read against what is written: under the operation's names, in the target's types.
        let spoken = session
            .columns
            .all
            .iter()
            .enumerate()
            .filter_map(|(at, target)| Some(column(&hidden(at)).alias(target.spoken.clone()?)));
        let as_spoken = rows.clone().select(spoken.collect::<Vec<Expr>>())?;
        let filter = session.expression(filter.expr(), as_spoken.schema())?;
        let spoken = session
            .columns
            .all
            .iter()
            .enumerate()
            .filter_map(|(at, target)| Some((target.spoken.clone()?, hidden(at))));
        let filter = renamed(filter, &spoken.collect())?;
        rows = rows.with_column(INSIDE, filter.is_true())?;
    }
    let inside = inside.map(ToString::to_string);
    Ok(Frame { rows, actions: vec![Action::Insert], once: false, inside })
}

/// The same expression over columns of other names.
fn renamed(expr: Expr, names: &std::collections::HashMap<String, String>) -> Result<Expr, ReplayError> {
    use datafusion::common::tree_node::{Transformed, TreeNode};
    let renamed = expr.transform(|expr| {
        Ok(match &expr {
            Expr::Column(named) => match names.get(&named.name) {
                Some(hidden) => Transformed::yes(column(hidden)),
                None => Transformed::no(expr),
            },
            _ => Transformed::no(expr),
        })
    })?;
    Ok(renamed.data)
}

/// By place in the target: what the query gives for it.
type Values = Vec<Option<Expr>>;

fn by_name(session: &Session, frame: &DataFrame) -> Result<Values, ReplayError> {
    let mut values: Values = vec![None; session.columns.all.len()];
    for (qualifier, field) in frame.schema().iter() {
        let at = session.columns.position(field.name()).map_err(|_| {
            ReplayError::failed(format!(
                "the query gives column '{}', which the table does not have",
                field.name()
            ))
        })?;
        let value = Expr::Column(datafusion::common::Column::new(qualifier.cloned(), field.name()));
        match values.get_mut(at) {
            Some(slot @ None) => *slot = Some(value),
            _ => {
                return Err(ReplayError::failed(format!("the query gives column '{}' twice", field.name())));
            }
        }
    }
    Ok(values)
}

fn by_position(
    session: &Session,
    frame: &DataFrame,
    names: &[String],
    constants: &[Assignment],
) -> Result<Values, ReplayError> {
    let mut values: Values = vec![None; session.columns.all.len()];
    for Assignment { column, fields: _, value } in constants {
        let at = session.columns.position(column)?;
        let value = session.expression(value.expr(), &datafusion::common::DFSchema::empty())?;
        if let Some(slot) = values.get_mut(at) {
            *slot = Some(value);
        }
    }
    let places: Vec<usize> = if names.is_empty() {
        let fixed = |at: &usize| values.get(*at).is_some_and(Option::is_some);
        session.columns.known.iter().copied().filter(|at| !fixed(at)).collect()
    } else {
        names.iter().map(|name| session.columns.position(name)).collect::<Result<_, _>>()?
    };
    if places.len() != frame.schema().fields().len() {
        return Err(ReplayError::failed(format!(
            "the query gives {} columns where the table takes {}",
            frame.schema().fields().len(),
            places.len()
        )));
    }
    for (at, (qualifier, field)) in places.into_iter().zip(frame.schema().iter()) {
        let value = Expr::Column(datafusion::common::Column::new(qualifier.cloned(), field.name()));
        match values.get_mut(at) {
            Some(slot @ None) => *slot = Some(value),
            _ => return Err(ReplayError::failed("a column is given two values")),
        }
    }
    Ok(values)
}

/// A null of this type.
pub(super) fn null_of(data_type: &DataType) -> Expr {
    cast(lit(ScalarValue::Null), data_type.clone())
}
