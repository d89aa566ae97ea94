//! The JSON of a record.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value as Json};
use sqlparser::ast::Value;

use super::sql::{Condition, Select};
use super::statement::{self, OverwriteMode, check_plain};
use super::tables::Tables;
use super::{
    Assignment, Columns, MAX_RECORD_BYTES, Merge, MergeAction, MergeClause, Names, Operation, PinnedInput,
    RECORD_VERSION, Record, RecordError, Rows, SOURCE_ALIAS, TARGET_ALIAS, UTC, When, determinism,
};
use crate::ids::TableName;

/// What `op` may say.
pub(super) const OPERATIONS: [&str; 7] =
    ["append", "replace-partitions", "overwrite-where", "delete-where", "update-where", "merge-into", "sql"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Wire {
    #[serde(rename = "v")]
    _v: Json,
    id: String,
    op: String,
    #[serde(rename = "where")]
    filter: Option<String>,
    query: Option<String>,
    set: Option<Map<String, Json>>,
    source: Option<String>,
    on: Option<String>,
    when_matched: Option<Vec<WireClause>>,
    when_not_matched: Option<Vec<WireClause>>,
    when_not_matched_by_source: Option<Vec<WireClause>>,
    sql: Option<String>,
    overwrite_mode: Option<String>,
    session_timezone: Option<String>,
    #[serde(default)]
    inputs: BTreeMap<String, PinnedInput>,
    #[serde(default)]
    parameters: Map<String, Json>,
    expect: Option<WireExpect>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireExpect {
    rows: Option<i64>,
}

/// One of `update`, `delete`, `insert`, with a condition.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireClause {
    and: Option<String>,
    update: Option<Json>,
    delete: Option<bool>,
    insert: Option<Json>,
}

fn malformed(text: impl Into<String>) -> RecordError {
    RecordError::Malformed(text.into())
}

pub(super) fn parse(text: &str, target: &TableName) -> Result<Record, RecordError> {
    if text.len() > MAX_RECORD_BYTES {
        return Err(RecordError::TooLong(text.len()));
    }
    // Version and operation first: a record of a later version may have any other form.
    let value: Json = serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?;
    match value.get("v") {
        Some(v) if v.as_u64() == Some(u64::from(RECORD_VERSION)) => {}
        Some(v) => return Err(RecordError::UnknownVersion(v.to_string())),
        None => return Err(malformed("'v' is missing")),
    }
    if let Some(op) = value.get("op").and_then(|op| op.as_str())
        && !OPERATIONS.contains(&op)
    {
        return Err(RecordError::UnknownOperation(op.to_owned()));
    }
    let wire: Wire = serde_json::from_value(value).map_err(|e| malformed(e.to_string()))?;
    check_fields(&wire, target)?;
    let names = if wire.op == "sql" { Names::AnyCase } else { Names::Exact };
    let id = wire.id.clone();
    let expected_rows = wire.expect.as_ref().and_then(|e| e.rows);
    let parameters = parameters(&wire.parameters)?;
    let time_zone = time_zone(wire.session_timezone.as_deref())?;
    if wire.op == "sql" {
        let mode = match wire.overwrite_mode.as_deref() {
            None | Some("static") => OverwriteMode::Static,
            Some("dynamic") => OverwriteMode::Dynamic,
            Some(other) => {
                return Err(malformed(format!("'overwrite-mode' is '{other}'; use static or dynamic")));
            }
        };
        let sql = wire.sql.as_deref().unwrap_or_default();
        let read = statement::read(sql, target, wire.inputs, &parameters, mode)?;
        let statement::Read { operation, inputs, reads_target } = read;
        return Ok(Record { id, operation, inputs, names, time_zone, reads_target, expected_rows });
    }
    let mut tables = Tables::new(target, names, wire.inputs.clone(), &parameters);
    let operation = typed(wire, &mut tables)?;
    let Tables { inputs, reads_target, .. } = tables;
    Ok(Record { id, operation, inputs, names, time_zone, reads_target, expected_rows })
}

/// Keys that the operation takes beside `v`, `id` and `op`; those with `!` it needs.
fn keys_of(op: &str) -> &'static [&'static str] {
    match op {
        "overwrite-where" => &["where!", "query!", "inputs", "parameters", "expect"],
        "delete-where" => &["where!", "inputs", "parameters"],
        "update-where" => &["where!", "set!", "inputs", "parameters"],
        "merge-into" => &[
            "source!",
            "on!",
            "when-matched",
            "when-not-matched",
            "when-not-matched-by-source",
            "inputs",
            "parameters",
        ],
        "sql" => &["sql!", "overwrite-mode", "session-timezone", "inputs", "parameters", "expect"],
        _ => &["expect"],
    }
}

fn check_fields(wire: &Wire, target: &TableName) -> Result<(), RecordError> {
    let Wire {
        _v: _,
        id,
        op,
        filter,
        query,
        set,
        source,
        on,
        when_matched,
        when_not_matched,
        when_not_matched_by_source,
        sql,
        overwrite_mode,
        session_timezone,
        inputs,
        parameters,
        expect,
    } = wire;
    if id.trim().is_empty() {
        return Err(malformed("'id' is empty"));
    }
    let keys = keys_of(op);
    let full = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.trim().is_empty());
    let given = [
        ("where", filter.is_some(), full(filter)),
        ("query", query.is_some(), full(query)),
        ("set", set.is_some(), set.as_ref().is_some_and(|set| !set.is_empty())),
        ("source", source.is_some(), full(source)),
        ("on", on.is_some(), full(on)),
        ("when-matched", when_matched.is_some(), true),
        ("when-not-matched", when_not_matched.is_some(), true),
        ("when-not-matched-by-source", when_not_matched_by_source.is_some(), true),
        ("sql", sql.is_some(), full(sql)),
        ("overwrite-mode", overwrite_mode.is_some(), true),
        ("session-timezone", session_timezone.is_some(), true),
        ("inputs", !inputs.is_empty(), true),
        ("parameters", !parameters.is_empty(), true),
        ("expect", expect.is_some(), true),
    ];
    for (key, present, full) in given {
        let needed = keys.iter().any(|k| k.strip_suffix('!') == Some(key));
        if needed && !full {
            return Err(malformed(format!("{op} needs '{key}'")));
        }
        if present && !needed && !keys.contains(&key) {
            return Err(malformed(format!("{op} takes no '{key}'")));
        }
    }
    if let Some(alias) = inputs.keys().find(|alias| alias.eq_ignore_ascii_case(TARGET_ALIAS)) {
        return Err(malformed(format!(
            "an input is named '{alias}', under which a query reads the target itself"
        )));
    }
    if expect.as_ref().and_then(|e| e.rows).is_some_and(|rows| rows < 0) {
        return Err(malformed("'expect.rows' is negative"));
    }
    match inputs.iter().find(|(_, input)| &input.table == target) {
        Some((alias, _)) => Err(RecordError::PinsTarget { alias: alias.clone() }),
        None => Ok(()),
    }
}

/// A zone as Spark names it. Which zones there are is the engine's to know.
fn time_zone(given: Option<&str>) -> Result<String, RecordError> {
    let Some(zone) = given else { return Ok(UTC.to_owned()) };
    let is_name = |ch: char| ch.is_ascii_alphanumeric() || matches!(ch, '/' | '_' | '+' | '-' | ':');
    if zone.is_empty() || !zone.chars().all(is_name) {
        return Err(malformed(format!(
            "'session-timezone' is '{zone}'; name a zone as in Europe/Berlin, or an offset as in +02:00"
        )));
    }
    Ok(match zone {
        "Z" | "GMT" | "Etc/UTC" | "+00:00" => UTC.to_owned(),
        other => other.to_owned(),
    })
}

fn parameters(given: &Map<String, Json>) -> Result<BTreeMap<String, Value>, RecordError> {
    let value = |(name, value): (&String, &Json)| {
        let value = match value {
            Json::String(text) => Value::SingleQuotedString(text.clone()),
            Json::Number(number) => Value::Number(number.to_string(), false),
            Json::Bool(value) => Value::Boolean(*value),
            Json::Null => Value::Null,
            Json::Array(_) | Json::Object(_) => {
                return Err(malformed(format!("parameter '{name}' is no single value")));
            }
        };
        Ok((name.clone(), value))
    };
    given.iter().map(value).collect()
}

fn typed(wire: Wire, tables: &mut Tables<'_>) -> Result<Operation, RecordError> {
    let text = |text: Option<String>| text.unwrap_or_default();
    Ok(match wire.op.as_str() {
        "append" => Operation::Append,
        "replace-partitions" => Operation::ReplacePartitions,
        "overwrite-where" => {
            let filter = condition(&text(wire.filter), tables)?;
            let query = select(&text(wire.query), tables)?;
            Operation::OverwriteWhere { filter, rows: Rows { query, columns: Columns::ByName } }
        }
        "delete-where" => {
            let filter = condition(&text(wire.filter), tables)?;
            Operation::DeleteWhere { target: TARGET_ALIAS.to_owned(), filter }
        }
        "update-where" => {
            let set = assignments(wire.set.unwrap_or_default(), tables)?;
            let filter = Some(condition(&text(wire.filter), tables)?);
            Operation::UpdateWhere { target: TARGET_ALIAS.to_owned(), set, filter }
        }
        _ => merge(wire, tables)?,
    })
}

fn merge(wire: Wire, tables: &mut Tables<'_>) -> Result<Operation, RecordError> {
    let query = select(wire.source.as_deref().unwrap_or_default(), tables)?;
    let on = plain(wire.on.as_deref().unwrap_or_default(), tables)?;
    let mut clauses = Vec::new();
    for (when, given) in [
        (When::Matched, wire.when_matched),
        (When::NotMatched, wire.when_not_matched),
        (When::NotMatchedBySource, wire.when_not_matched_by_source),
    ] {
        for clause in given.unwrap_or_default() {
            clauses.push(merge_clause(when, clause, tables)?);
        }
    }
    if clauses.is_empty() {
        return Err(malformed("merge-into has no clause"));
    }
    Ok(Operation::MergeInto(Box::new(Merge {
        target: TARGET_ALIAS.to_owned(),
        source: SOURCE_ALIAS.to_owned(),
        query,
        on,
        clauses,
    })))
}

fn merge_clause(when: When, clause: WireClause, tables: &mut Tables<'_>) -> Result<MergeClause, RecordError> {
    let WireClause { and, update, delete, insert } = clause;
    let condition = and.map(|text| plain(&text, tables)).transpose()?;
    let star = |value: &Json| value.as_str() == Some("*");
    let action = match (when, update, delete, insert) {
        (When::Matched, Some(all), None, None) if star(&all) => MergeAction::UpdateAll,
        (When::Matched | When::NotMatchedBySource, Some(Json::Object(set)), None, None) => {
            let set = assignments(set, tables)?;
            for Assignment { value, .. } in &set {
                check_plain(value.expr())?;
            }
            MergeAction::Update(set)
        }
        (When::Matched | When::NotMatchedBySource, None, Some(true), None) => MergeAction::Delete,
        (When::NotMatched, None, None, Some(all)) if star(&all) => MergeAction::InsertAll,
        (When::NotMatched, None, None, Some(Json::Object(values))) => {
            let mut columns = Vec::new();
            let mut row = Vec::new();
            for Assignment { column, fields: _, value } in assignments(values, tables)? {
                check_plain(value.expr())?;
                columns.push(column);
                row.push(value);
            }
            MergeAction::Insert { columns, values: row }
        }
        (When::Matched, ..) => return Err(malformed("when-matched takes 'update' or 'delete'")),
        (When::NotMatched, ..) => return Err(malformed("when-not-matched takes 'insert'")),
        (When::NotMatchedBySource, ..) => {
            return Err(malformed("when-not-matched-by-source takes 'update' of named columns or 'delete'"));
        }
    };
    Ok(MergeClause { when, condition, action })
}

fn assignments(set: Map<String, Json>, tables: &mut Tables<'_>) -> Result<Vec<Assignment>, RecordError> {
    if set.is_empty() {
        return Err(malformed("no column is given a value"));
    }
    let one = |(column, value): (String, Json)| match value {
        Json::String(text) => Ok(Assignment { column, fields: Vec::new(), value: condition(&text, tables)? }),
        _ => Err(malformed(format!("the value of column '{column}' is no SQL text"))),
    };
    set.into_iter().map(one).collect()
}

fn condition(text: &str, tables: &mut Tables<'_>) -> Result<Condition, RecordError> {
    let mut condition = Condition::parse(text)?;
    tables.resolve(&mut condition.0)?;
    determinism::check(condition.expr())?;
    Ok(condition)
}

/// Without subqueries.
fn plain(text: &str, tables: &mut Tables<'_>) -> Result<Condition, RecordError> {
    let condition = condition(text, tables)?;
    check_plain(condition.expr())?;
    Ok(condition)
}

fn select(text: &str, tables: &mut Tables<'_>) -> Result<Select, RecordError> {
    let mut select = Select::parse(text)?;
    tables.resolve(&mut select.0)?;
    determinism::check(select.query())?;
    Ok(select)
}
