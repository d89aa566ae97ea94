//! A Spark SQL statement as an operation.

use std::collections::BTreeMap;

use sqlparser::ast::{
    Assignment as SqlAssignment, AssignmentTarget, BinaryOperator, Delete, Expr, FromTable, Ident, Insert,
    Merge as SqlMerge, MergeAction as SqlAction, MergeClause as SqlClause, MergeClauseKind, MergeInsertKind,
    ObjectName, Query, Select as SqlSelect, SetExpr, Statement, TableFactor, TableObject, TableWithJoins,
    Update, Value, Visit, VisitMut,
};

use super::spark::{ALL, parse};
use super::sql::{Condition, Select};
use super::tables::Tables;
use super::{
    Assignment, Columns, Merge, MergeAction, MergeClause, Names, Operation, PinnedInput, RecordError, Rows,
    SOURCE_ALIAS, TARGET_ALIAS, When, determinism, functions, meaning,
};
use crate::ids::TableName;

/// What `INSERT OVERWRITE` replaces: Spark's `spark.sql.sources.partitionOverwriteMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OverwriteMode {
    /// What the partition clause names, or all.
    #[default]
    Static,
    /// The partitions for which there are rows.
    Dynamic,
}

/// A statement with what it reads.
pub(super) struct Read {
    pub operation: Operation,
    pub inputs: BTreeMap<String, PinnedInput>,
    pub reads_target: bool,
}

pub(super) fn read(
    text: &str,
    target: &TableName,
    inputs: BTreeMap<String, PinnedInput>,
    parameters: &BTreeMap<String, Value>,
    mode: OverwriteMode,
) -> Result<Read, RecordError> {
    let (statement, by_name) = parse(text)?;
    let mut tables = Tables::new(target, Names::AnyCase, inputs, parameters);
    let operation = match statement {
        Statement::Insert(insert) => self::insert(insert, by_name, mode, &mut tables)?,
        Statement::Delete(delete) => self::delete(delete, &mut tables)?,
        Statement::Update(update) => self::update(update, &mut tables)?,
        Statement::Merge(merge) => self::merge(merge, &mut tables)?,
        other => {
            let text = other.to_string();
            let verb = text.split_whitespace().next().unwrap_or_default().to_owned();
            return Err(RecordError::Sql(format!(
                "a {verb} statement is not run again; INSERT, DELETE, UPDATE and MERGE are"
            )));
        }
    };
    let Tables { inputs, reads_target, .. } = tables;
    Ok(Read { operation, inputs, reads_target })
}

/// What is run again must not depend on when, and must mean the same to the engine.
fn fit(sql: &mut (impl Visit + VisitMut)) -> Result<(), RecordError> {
    determinism::check(sql)?;
    functions::fit(sql)?;
    meaning::write_out(sql)
}

fn unsupported<T>(what: impl std::fmt::Display) -> Result<T, RecordError> {
    Err(RecordError::Sql(format!("{what} is not supported in a recorded statement")))
}

fn insert(
    insert: Insert,
    by_name: bool,
    mode: OverwriteMode,
    tables: &mut Tables<'_>,
) -> Result<Operation, RecordError> {
    let Insert { table, columns, overwrite, source, partitioned, assignments, on, .. } = insert;
    let TableObject::TableName(name) = table else { return unsupported("a table function as target") };
    tables.check_written(&name)?;
    let Some(mut query) = source else { return unsupported("INSERT without a query or VALUES") };
    if !assignments.is_empty() || on.is_some() {
        return unsupported("INSERT with SET or ON");
    }
    let constants = partitioned.unwrap_or_default();
    let constants = constants.into_iter().filter_map(|expr| partition_value(expr).transpose());
    let mut constants = constants.collect::<Result<Vec<Assignment>, RecordError>>()?;
    for constant in &mut constants {
        tables.resolve(&mut constant.value.0)?;
    }
    tables.resolve(&mut query)?;
    let names = columns.into_iter().map(|column| column.value).collect();
    let columns = if by_name {
        if !constants.is_empty() {
            return unsupported("BY NAME with a PARTITION clause");
        }
        Columns::ByName
    } else {
        Columns::ByPosition { names, constants: constants.clone() }
    };
    // What does not read the target is not run again where the branch's files say it all.
    match (overwrite, mode) {
        (false, _) if !tables.reads_target => return Ok(Operation::Append),
        (true, OverwriteMode::Dynamic) if !tables.reads_target => return Ok(Operation::ReplacePartitions),
        _ => {}
    }
    fit(&mut query)?;
    let rows = Rows { query: Select(query), columns };
    Ok(match (overwrite, mode) {
        (false, _) => Operation::InsertInto { rows },
        (true, OverwriteMode::Dynamic) => Operation::OverwritePartitions { rows },
        (true, OverwriteMode::Static) => Operation::OverwriteWhere { filter: all_equal(constants), rows },
    })
}

/// `day = '2013-08-20'` of a partition clause; a name alone has its value from the query.
fn partition_value(expr: Expr) -> Result<Option<Assignment>, RecordError> {
    match expr {
        Expr::Identifier(_) => Ok(None),
        Expr::BinaryOp { left, op: BinaryOperator::Eq, right } => match *left {
            Expr::Identifier(column) => {
                Ok(Some(Assignment { column: column.value, fields: Vec::new(), value: Condition(right) }))
            }
            other => unsupported(format!("'{other}' in a PARTITION clause")),
        },
        other => unsupported(format!("'{other}' in a PARTITION clause")),
    }
}

fn all_equal(constants: Vec<Assignment>) -> Condition {
    let equal = constants.into_iter().map(|Assignment { column, fields: _, value }| Expr::BinaryOp {
        left: Box::new(Expr::Identifier(Ident::new(column))),
        op: BinaryOperator::Eq,
        right: value.0,
    });
    let all = equal.reduce(|one, other| Expr::BinaryOp {
        left: Box::new(one),
        op: BinaryOperator::And,
        right: Box::new(other),
    });
    Condition(Box::new(all.unwrap_or_else(|| Expr::Value(Value::Boolean(true).into()))))
}

fn delete(delete: Delete, tables: &mut Tables<'_>) -> Result<Operation, RecordError> {
    let Delete { from, using, selection, limit, order_by, tables: many, .. } = delete;
    if using.is_some() || limit.is_some() || !order_by.is_empty() || !many.is_empty() {
        return unsupported("DELETE with USING, ORDER BY or LIMIT");
    }
    let (FromTable::WithFromKeyword(from) | FromTable::WithoutKeyword(from)) = from;
    let [table] = from.as_slice() else { return unsupported("DELETE from several tables") };
    let target = written_alias(table, tables)?;
    // Without a condition every row goes.
    let mut filter = selection.unwrap_or_else(|| Expr::Value(Value::Boolean(true).into()));
    tables.resolve(&mut filter)?;
    fit(&mut filter)?;
    Ok(Operation::DeleteWhere { target, filter: Condition(Box::new(filter)) })
}

fn update(update: Update, tables: &mut Tables<'_>) -> Result<Operation, RecordError> {
    let Update { table, assignments, from, selection, limit, .. } = update;
    if from.is_some() || limit.is_some() {
        return unsupported("UPDATE with FROM or LIMIT");
    }
    let target = written_alias(&table, tables)?;
    let set = set_clause(assignments, &target, tables)?;
    let filter = match selection {
        None => None,
        Some(mut filter) => {
            tables.resolve(&mut filter)?;
            fit(&mut filter)?;
            Some(Condition(Box::new(filter)))
        }
    };
    Ok(Operation::UpdateWhere { target, set, filter })
}

fn merge(merge: SqlMerge, tables: &mut Tables<'_>) -> Result<Operation, RecordError> {
    let SqlMerge { table, mut source, on, clauses, output, .. } = merge;
    if output.is_some() {
        return unsupported("MERGE with OUTPUT");
    }
    let target = written_alias(&TableWithJoins { relation: table, joins: Vec::new() }, tables)?;
    let spoken = match &source {
        TableFactor::Table { name, alias: None, .. } => {
            name.0.last().and_then(|part| part.as_ident()).map(|ident| ident.value.clone())
        }
        TableFactor::Table { alias, .. } | TableFactor::Derived { alias, .. } => {
            alias.as_ref().map(|alias| alias.name.value.clone())
        }
        other => return unsupported(format!("'{other}' as source of a MERGE")),
    };
    tables.resolve(&mut source)?;
    let mut query = select_all(source)?;
    fit(&mut query.0)?;
    let mut on = on;
    tables.resolve(&mut on)?;
    check_plain(&on)?;
    fit(&mut on)?;
    let clauses =
        clauses.into_iter().map(|clause| merge_clause(clause, &target, tables)).collect::<Result<_, _>>()?;
    Ok(Operation::MergeInto(Box::new(Merge {
        target,
        source: spoken.unwrap_or_else(|| SOURCE_ALIAS.to_owned()),
        query,
        on: Condition(on),
        clauses,
    })))
}

/// `SELECT * FROM factor`.
pub(super) fn select_all(factor: TableFactor) -> Result<Select, RecordError> {
    let mut select = Select::parse("SELECT * FROM rows")?;
    if let SetExpr::Select(body) = select.0.body.as_mut() {
        let body: &mut SqlSelect = body;
        body.from = vec![TableWithJoins { relation: factor, joins: Vec::new() }];
    }
    Ok(select)
}

fn merge_clause(
    clause: SqlClause,
    target: &str,
    tables: &mut Tables<'_>,
) -> Result<MergeClause, RecordError> {
    let SqlClause { clause_kind, predicate, action, .. } = clause;
    let when = match clause_kind {
        MergeClauseKind::Matched => When::Matched,
        MergeClauseKind::NotMatched | MergeClauseKind::NotMatchedByTarget => When::NotMatched,
        MergeClauseKind::NotMatchedBySource => When::NotMatchedBySource,
    };
    let condition = match predicate {
        None => None,
        Some(mut predicate) => {
            check_plain(&predicate)?;
            tables.resolve(&mut predicate)?;
            fit(&mut predicate)?;
            Some(Condition(Box::new(predicate)))
        }
    };
    let action = match action {
        SqlAction::Delete { .. } => MergeAction::Delete,
        SqlAction::Update(update) => {
            if update.update_predicate.is_some() || update.delete_predicate.is_some() {
                return unsupported("UPDATE with WHERE in a MERGE");
            }
            match update.assignments.as_slice() {
                [one] if is_all_column(one) && when == When::Matched => MergeAction::UpdateAll,
                _ => MergeAction::Update(set_clause(update.assignments, target, tables)?),
            }
        }
        SqlAction::Insert(insert) => {
            let columns = insert.columns.iter().map(|name| match place_of(name, target)? {
                (column, fields) if fields.is_empty() => Ok(column),
                _ => unsupported(format!("INSERT into '{name}', a field inside a column")),
            });
            let columns = columns.collect::<Result<Vec<String>, RecordError>>()?;
            let MergeInsertKind::Values(values) = insert.kind else { return unsupported("INSERT ROW") };
            let [row] = values.rows.as_slice() else {
                return unsupported("INSERT of several rows in a MERGE");
            };
            if insert.insert_predicate.is_some() {
                return unsupported("INSERT with WHERE in a MERGE");
            }
            if columns == [ALL] {
                MergeAction::InsertAll
            } else {
                if !columns.is_empty() && columns.len() != row.len() {
                    return Err(RecordError::Sql(format!(
                        "INSERT names {} columns and gives {} values",
                        columns.len(),
                        row.len()
                    )));
                }
                let values = row.iter().map(|value| {
                    let mut value = value.clone();
                    if is_default(&value) {
                        return Ok(Condition::default_value());
                    }
                    check_plain(&value)?;
                    tables.resolve(&mut value)?;
                    fit(&mut value)?;
                    Ok(Condition(Box::new(value)))
                });
                MergeAction::Insert { columns, values: values.collect::<Result<_, RecordError>>()? }
            }
        }
    };
    Ok(MergeClause { when, condition, action })
}

fn is_all_column(assignment: &SqlAssignment) -> bool {
    matches!(&assignment.target, AssignmentTarget::ColumnName(name)
        if name.0.last().and_then(|part| part.as_ident()).is_some_and(|ident| ident.value == ALL))
}

/// Conditions and values of a MERGE see one pair of rows (Spark: no subqueries there).
pub(super) fn check_plain(expr: &Expr) -> Result<(), RecordError> {
    struct Subqueries;
    impl sqlparser::ast::Visitor for Subqueries {
        type Break = ();
        fn pre_visit_query(&mut self, _query: &Query) -> std::ops::ControlFlow<()> {
            std::ops::ControlFlow::Break(())
        }
    }
    determinism::check(expr)?;
    if sqlparser::ast::Visit::visit(expr, &mut Subqueries).is_break() {
        return unsupported(format!("the subquery in '{expr}' of a MERGE"));
    }
    Ok(())
}

fn set_clause(
    assignments: Vec<SqlAssignment>,
    target: &str,
    tables: &mut Tables<'_>,
) -> Result<Vec<Assignment>, RecordError> {
    let mut set: Vec<Assignment> = Vec::with_capacity(assignments.len());
    for SqlAssignment { target: left, mut value } in assignments {
        let AssignmentTarget::ColumnName(name) = left else {
            return unsupported("an assignment to several columns at once");
        };
        let (column, fields) = place_of(&name, target)?;
        let value = if is_default(&value) {
            if !fields.is_empty() {
                return unsupported(format!("DEFAULT for '{name}', a field inside a column"));
            }
            Condition::default_value()
        } else {
            tables.resolve(&mut value)?;
            fit(&mut value)?;
            Condition(Box::new(value))
        };
        let made = Assignment { column, fields, value };
        if set.iter().any(|other| overlap(other, &made)) {
            return Err(RecordError::Sql(format!("column '{}' is set twice", made.column)));
        }
        set.push(made);
    }
    Ok(set)
}

/// `DEFAULT`, which is no column unless it is quoted.
fn is_default(value: &Expr) -> bool {
    matches!(value, Expr::Identifier(Ident { value, quote_style: None, .. }) if value.eq_ignore_ascii_case("default"))
}

/// The column that is assigned, without the alias before it, and the fields inside of it.
fn place_of(name: &ObjectName, target: &str) -> Result<(String, Vec<String>), RecordError> {
    let parts: Option<Vec<&Ident>> = name.0.iter().map(|part| part.as_ident()).collect();
    let (column, fields) = match parts.as_deref() {
        Some([alias, column, fields @ ..]) if alias.value.to_lowercase() == target.to_lowercase() => {
            (column, fields)
        }
        Some([column, fields @ ..]) => (column, fields),
        _ => return unsupported(format!("an assignment to '{name}'")),
    };
    Ok((column.value.clone(), fields.iter().map(|field| field.value.clone()).collect()))
}

/// Is one of them the other, or inside of it?
fn overlap(one: &Assignment, other: &Assignment) -> bool {
    let path = |it: &Assignment| -> Vec<String> {
        std::iter::once(&it.column).chain(&it.fields).map(|name| name.to_lowercase()).collect()
    };
    path(one).iter().zip(&path(other)).all(|(a, b)| a == b)
}

/// The alias of the table that is written.
fn written_alias(table: &TableWithJoins, tables: &Tables<'_>) -> Result<String, RecordError> {
    let TableWithJoins { relation: TableFactor::Table { name, alias, args: None, version: None, .. }, joins } =
        table
    else {
        return unsupported(format!("writing to '{table}'"));
    };
    if !joins.is_empty() {
        return unsupported("writing to a join");
    }
    tables.check_written(name)?;
    if let Some(alias) = alias {
        return Ok(alias.name.value.clone());
    }
    let own = &tables.target.name;
    let spoken = name.0.iter().filter_map(|part| part.as_ident()).map(|ident| ident.value.as_str());
    Ok(spoken.rev().find(|part| part.eq_ignore_ascii_case(own)).unwrap_or(TARGET_ALIAS).to_owned())
}
