//! How a set is shown: once, with each table's part.

use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableName};
use mergeberg_kernel::policy::Duration;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;
use serde::Serialize;

use super::answer::Answer;
use super::wait;
use crate::error::UserError;
use crate::ledger::{EnqueuedSet, Ledger, RequestRow};
use crate::report::text::{Columns, NONE, one_line};

/// One table's part, in a few words.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartShown {
    pub request: RequestId,
    pub table: TableName,
    pub source: RefName,
    pub target: RefName,
    pub state: RequestState,
    pub landed_snapshot: Option<SnapshotId>,
    /// What its state says in a sentence.
    pub text: Option<String>,
}

impl PartShown {
    fn of(row: RequestRow) -> Self {
        let text = row.detail.as_ref().and_then(|detail| detail.get("text")).and_then(|text| text.as_str());
        Self {
            request: row.id,
            text: text.map(one_line),
            table: row.table,
            source: row.source,
            target: row.target,
            state: row.state,
            landed_snapshot: row.landed_snapshot,
        }
    }
}

/// Every part of the request's set; none when it is in none.
pub async fn parts(ledger: &Ledger, request: &RequestRow) -> Result<Vec<PartShown>, UserError> {
    let Some(set) = request.set else { return Ok(Vec::new()) };
    Ok(ledger.parts(set.id).await?.into_iter().map(PartShown::of).collect())
}

/// The parts as a table with a title; nothing for a request without a set.
pub fn render(request: &RequestRow, parts: &[PartShown]) -> String {
    let Some(set) = request.set else { return String::new() };
    let mut columns = Columns::new(&["request>", "table", "source", "target", "state", "landed as", "why"]);
    let or_none = |value: Option<String>| value.unwrap_or_else(|| NONE.to_owned());
    for part in parts {
        columns.push(vec![
            part.request.to_string(),
            part.table.to_string(),
            part.source.to_string(),
            part.target.to_string(),
            part.state.to_string(),
            or_none(part.landed_snapshot.map(|id| id.to_string())),
            or_none(part.text.clone()),
        ]);
    }
    let lines: String = columns.render().lines().map(|line| format!("  {line}\n")).collect();
    format!("\nset {}\n{lines}", set.id)
}

/// What was enqueued, or how it ended.
pub async fn answer_enqueued(
    ledger: &Ledger,
    enqueued: EnqueuedSet,
    waits: bool,
    timeout: Option<Duration>,
) -> Result<Answer, UserError> {
    let (new, rows) = match enqueued {
        EnqueuedSet::New(rows) => (true, rows),
        EnqueuedSet::Existing(rows) => (false, rows),
        // Both told as errors by whoever enqueued.
        EnqueuedSet::KeyConflict(row) => {
            let text = format!("the key belongs to request {}", row.id);
            return Err(UserError::new(ReasonCode::KeyConflict, text));
        }
        EnqueuedSet::RevertedElsewhere(row) => {
            let text = format!("request {} takes back a part already", row.id);
            return Err(UserError::new(ReasonCode::WrongState, text));
        }
    };
    let Some(first) = rows.first() else {
        return Err(UserError::new(ReasonCode::Internal, "a set without parts was enqueued"));
    };
    if waits {
        return wait::wait(ledger, first.id, timeout).await;
    }
    let id = first.set.map_or(first.id, |set| set.id);
    let word = if new { "enqueued" } else { "there already" };
    let mut text = format!("set {id} {word}: {} tables, which land together or not at all\n", rows.len());
    for row in &rows {
        text.push_str(&format!(
            "  request {}: '{}' at {} -> '{}' of {} (class {}), {}\n",
            row.id, row.source, row.pinned, row.target, row.table, row.class, row.state
        ));
    }
    Ok(Answer::new(text, serde_json::json!({ "new": new, "set": { "id": id, "parts": rows } })))
}
