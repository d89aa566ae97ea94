//! `operation record|show`: records that snapshots name by their id.

use std::io::Read as _;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use mergeberg_kernel::ids::{Principal, TableName};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::{MAX_RECORD_BYTES, RECORD_ID_KEY, Record};
use serde_json::{Map, Value, json};

use super::answer::Answer;
use super::context::{Context, principal};
use super::enqueue::{Needed, load};
use crate::error::UserError;
use crate::ledger::{Ledger, OperationRow, Recorded};
use crate::replay;
use crate::report::text::{key_values, moment};
use crate::table::catalog::Catalog;
use crate::table::manifests::ManifestStore;
use crate::validate::Engine;

/// Manifests of inputs kept while a record is checked, in bytes.
const MANIFEST_CACHE_BYTES: usize = 64 * 1024 * 1024;

#[derive(Debug, Subcommand)]
pub enum OperationCommand {
    /// Check a record and keep it under its id, for `mergeberg.operation-id`.
    Record(RecordArgs),
    /// Show a record.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub struct RecordArgs {
    /// The table that the operation writes to.
    #[arg(long)]
    pub table: TableName,
    /// File with the record's JSON; `-` is standard input.
    #[arg(required_unless_present = "sql", conflicts_with_all = ["sql", "id", "input", "parameter"])]
    pub file: Option<PathBuf>,
    /// The statement that ran, in Spark's form, instead of a file.
    #[arg(long, requires = "id")]
    pub sql: Option<String>,
    /// Id of the record of a statement.
    #[arg(long)]
    pub id: Option<String>,
    /// A table that the statement reads, at its snapshot: ALIAS=NS.TABLE@SNAPSHOT.
    #[arg(long)]
    pub input: Vec<String>,
    /// A value of the statement: NAME=VALUE, a text unless it is JSON.
    #[arg(long)]
    pub parameter: Vec<String>,
    /// What INSERT OVERWRITE replaced.
    #[arg(long, value_parser = ["static", "dynamic"], requires = "sql")]
    pub overwrite_mode: Option<String>,
    /// Who records [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The table that the operation writes to.
    #[arg(long)]
    pub table: TableName,
    /// Id of the record.
    pub id: String,
}

pub async fn run(context: &Context, command: OperationCommand) -> Result<Answer, UserError> {
    let (catalog, ledger) = (context.catalog().await?, context.ledger().await?);
    match command {
        OperationCommand::Record(args) => {
            let text = text_of(&args)?;
            let by = principal(args.principal, |name| std::env::var(name).ok());
            let recorded =
                record(catalog.as_ref(), ledger, &args.table, &text, &by, context.now_ms()).await?;
            let (row, word) = match recorded {
                Recorded::New(row) => (row, "is recorded"),
                Recorded::Existing(row) => (row, "was recorded before"),
                Recorded::Conflict(row) => return Err(conflict(&row)),
            };
            let text = format!(
                "operation '{}' of {} {word}; name it in the snapshot's summary: {RECORD_ID_KEY}={}\n",
                row.id, row.table, row.id
            );
            Ok(Answer::new(text, row))
        }
        OperationCommand::Show(ShowArgs { table, id }) => {
            let uuid = load(catalog.as_ref(), &table, Needed::Heads).await?.facts.uuid.clone();
            let Some(row) = ledger.operation(&uuid, &id).await? else {
                let text = format!("{table} has no operation record '{id}'");
                return Err(UserError::new(ReasonCode::RecordInvalid, text)
                    .with_next("`mergeberg operation record` writes one"));
            };
            Ok(Answer::new(render(&row), row))
        }
    }
}

/// Checks a record against the table as it is, and keeps it.
pub async fn record(
    catalog: &dyn Catalog,
    ledger: &Ledger,
    table: &TableName,
    text: &str,
    by: &Principal,
    now_ms: i64,
) -> Result<Recorded, UserError> {
    let loaded = load(catalog, table, Needed::History).await?;
    let invalid = |text: String| {
        UserError::new(ReasonCode::RecordInvalid, text).with_next("docs/operation-records.md has the forms")
    };
    let record = Record::parse(text, table).map_err(|e| invalid(e.to_string()))?;
    let engine = std::sync::Arc::new(Engine::start().map_err(|e| {
        UserError::new(ReasonCode::Internal, format!("the query engine could not be started: {e}"))
    })?);
    let store = ManifestStore::new(MANIFEST_CACHE_BYTES);
    match replay::check(&engine, &store, catalog, &loaded, &record).await {
        Ok(()) => {}
        Err(replay::ReplayError::Request { code: ReasonCode::ReplayFailed, text }) => {
            return Err(invalid(text));
        }
        Err(replay::ReplayError::Request { code, text }) => return Err(UserError::new(code, text)),
        // A check runs nothing.
        Err(replay::ReplayError::Conflicts { text, rows: _ }) => {
            return Err(UserError::new(ReasonCode::RowConflict, text));
        }
        Err(replay::ReplayError::Ended(ending)) => {
            return Err(UserError::new(ReasonCode::ReplayFailed, ending.to_string()));
        }
        Err(replay::ReplayError::Table(error)) => {
            return Err(UserError::new(error.reason(), error.to_string()));
        }
        Err(replay::ReplayError::Catalog(error)) => return Err(error.into()),
    }
    Ok(ledger.record_operation(table, &loaded.facts.uuid, (&record.id, text), by, now_ms).await?)
}

fn conflict(row: &OperationRow) -> UserError {
    let text = format!("operation '{}' of {} was recorded before with other content", row.id, row.table);
    UserError::new(ReasonCode::KeyConflict, text).with_next("give every run of a pipeline an id of its own")
}

fn text_of(args: &RecordArgs) -> Result<String, UserError> {
    let unreadable = |what: String| UserError::new(ReasonCode::InvalidArgument, what);
    if let Some(sql) = &args.sql {
        return statement_record(sql, args);
    }
    let file = args.file.clone().unwrap_or_default();
    let mut text = String::new();
    // One byte more than is read, so that a longer record is told as such.
    let most = MAX_RECORD_BYTES as u64 + 1;
    let read = if file.as_os_str() == "-" {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        std::fs::File::open(&file).and_then(|file| file.take(most).read_to_string(&mut text))
    };
    read.map_err(|e| unreadable(format!("{} cannot be read: {e}", file.display())))?;
    Ok(text)
}

fn statement_record(sql: &str, args: &RecordArgs) -> Result<String, UserError> {
    let wrong = |what: String, next: &str| UserError::new(ReasonCode::InvalidArgument, what).with_next(next);
    let mut inputs = Map::new();
    for input in &args.input {
        let form = "--input customers=sales.customers@5937117119577207079";
        let parsed = input.split_once('=').and_then(|(alias, rest)| {
            let (table, snapshot) = rest.rsplit_once('@')?;
            Some((alias, table, snapshot.parse::<i64>().ok()?))
        });
        let Some((alias, table, snapshot)) = parsed else {
            return Err(wrong(format!("'{input}' is no pinned input"), form));
        };
        inputs.insert(alias.to_owned(), json!({ "table": table, "snapshot-id": snapshot }));
    }
    let mut parameters = Map::new();
    for parameter in &args.parameter {
        let Some((name, value)) = parameter.split_once('=') else {
            return Err(wrong(format!("'{parameter}' is no parameter"), "--parameter day=2013-08-20"));
        };
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        parameters.insert(name.to_owned(), value);
    }
    let mut record = json!({ "v": 1, "id": args.id, "op": "sql", "sql": sql });
    if !inputs.is_empty() {
        record["inputs"] = Value::Object(inputs);
    }
    if !parameters.is_empty() {
        record["parameters"] = Value::Object(parameters);
    }
    if let Some(mode) = &args.overwrite_mode {
        record["overwrite-mode"] = json!(mode);
    }
    Ok(record.to_string())
}

fn render(row: &OperationRow) -> String {
    let pairs = [
        ("operation", row.id.clone()),
        ("table", row.table.to_string()),
        ("recorded", format!("{} by {}", moment(row.recorded_at_ms), row.principal)),
        ("digest", row.digest.to_string()),
    ];
    let pretty = serde_json::from_str::<Value>(&row.record)
        .and_then(|record| serde_json::to_string_pretty(&record))
        .unwrap_or_else(|_| row.record.clone());
    format!("{}\n{pretty}\n", key_values(&pairs))
}
