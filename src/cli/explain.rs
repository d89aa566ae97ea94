//! `request explain`: why a request is where it is, in one view.

use mergeberg_kernel::evidence::{CheckResult, Evidence, Violation};
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::state::RequestState;
use serde::Serialize;
use serde_json::Value;

use super::answer::Answer;
use super::external;
use super::request::{RevertedBy, Shown, render_row, replay_line};
use super::sets::{self, PartShown};
use crate::error::UserError;
use crate::ledger::{AttemptRow, EvidenceRow, ExternalRunRow, Ledger, ReplayRow, RequestRow};
use crate::report::text::{Columns, NONE, count, duration, key_values, moment, one_line};
use crate::worker::stage::VANISHED_ROWS;

/// Lines of a state's detail that are shown; JSON has all.
const MAX_DETAIL_LINES: usize = 40;
/// Sample rows that are shown of a failed check; JSON has all.
const MAX_SAMPLE_ROWS: usize = 10;
/// Lines of the history that are shown, the newest; JSON has all.
const MAX_HISTORY_LINES: usize = 30;
/// Requests ahead that are named.
const MAX_NAMED_AHEAD: usize = 8;

/// Key of a detail that holds one sentence on this very request.
const TEXT: &str = "text";

/// Place among the requests of the same target that have not ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Position {
    /// From 1, in arrival order.
    place: usize,
    open: usize,
    ahead: Vec<RequestId>,
}

/// The head that a landed request's train made (rule E2). Only heads are validated: the snapshots between are
/// in the target's history, but what serves a whole train was looked at in the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct LandedIn {
    head: SnapshotId,
    /// The request's own snapshot is that head.
    validated: bool,
}

#[derive(Debug, Serialize)]
struct Explained {
    request: RequestRow,
    reverted_by: Vec<RevertedBy>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parts: Vec<PartShown>,
    #[serde(skip_serializing_if = "Option::is_none")]
    replay: Option<ReplayRow>,
    landed_in: Option<LandedIn>,
    /// What the state's reason means, and what to do.
    meaning: Option<&'static str>,
    next: Option<&'static str>,
    position: Option<Position>,
    waited_ms: i64,
    evidence: Vec<EvidenceRow>,
    attempts: Vec<AttemptRow>,
    /// Runs of the class's own command, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    external_runs: Vec<ExternalRunRow>,
}

pub async fn explain(ledger: &Ledger, id: RequestId, now_ms: i64) -> Result<Answer, UserError> {
    let Shown { request, reverted_by, parts, replay } = Shown::of(ledger, ledger.request(id).await?).await?;
    let position = if request.state.is_final() {
        None
    } else {
        let open = ledger.unfinished(&request.table_uuid, &request.target).await?;
        position(id, &open.iter().map(|row| row.id).collect::<Vec<_>>())
    };
    let (meaning, next) = meaning_and_next(request.state).unzip();
    let receipt = ledger.receipt_of_request(id).await?;
    let explained = Explained {
        landed_in: receipt.map(|receipt| {
            let head = receipt.intent.tail;
            LandedIn { head, validated: request.landed_snapshot == Some(head) }
        }),
        meaning,
        next,
        position,
        waited_ms: (request.ended_at_ms.unwrap_or(now_ms) - request.enqueued_at_ms).max(0),
        evidence: ledger.evidence_of_request(id).await?,
        attempts: ledger.attempts(id).await?,
        external_runs: ledger.external_runs(id).await?,
        request,
        reverted_by,
        parts,
        replay,
    };
    Ok(Answer::new(render(&explained), explained))
}

/// What a state says, and what its owner does next; nothing of an end that all is said of.
fn meaning_and_next(state: RequestState) -> Option<(&'static str, &'static str)> {
    match state {
        RequestState::Held(code) | RequestState::Refused(code) | RequestState::Withdrawn(code) => {
            Some((code.meaning(), code.next_action()))
        }
        RequestState::Queued => Some((
            "It has not been taken up yet.",
            "Nothing, while a worker runs; `mergeberg worker` starts one.",
        )),
        RequestState::Planning | RequestState::Staged | RequestState::Checking => {
            Some(("It rides a train that is staged and checked now.", "Nothing."))
        }
        RequestState::Landing => Some(("Its landing is under way.", "Nothing.")),
        RequestState::Unknown => Some((
            "The catalog was asked to land it, and nobody knows yet what it did.",
            "Nothing: the worker reads it from the catalog before anything else lands.",
        )),
        RequestState::InReview => Some((
            "It was written under a structure of the table that no reviewer has accepted yet.",
            "A reviewer looks at `mergeberg review list` and approves or rejects the change.",
        )),
        RequestState::Landed | RequestState::AlreadyPublished | RequestState::Cancelled => None,
    }
}

/// `open` in arrival order.
fn position(id: RequestId, open: &[RequestId]) -> Option<Position> {
    let at = open.iter().position(|other| *other == id)?;
    Some(Position { place: at + 1, open: open.len(), ahead: open[..at].to_vec() })
}

fn render(explained: &Explained) -> String {
    let Explained {
        request,
        reverted_by,
        parts,
        replay,
        landed_in,
        meaning,
        next,
        position,
        waited_ms,
        evidence,
        attempts,
        external_runs,
    } = explained;
    let mut text = render_row(request);
    text.push_str(&sets::render(request, parts));
    let mut why = Vec::new();
    if let (Some(meaning), Some(next)) = (meaning, next) {
        why.push(("reason", (*meaning).to_owned()));
        why.push(("next", (*next).to_owned()));
    }
    if let Some(text) = request.detail.as_ref().and_then(|detail| detail.get(TEXT)).and_then(Value::as_str) {
        why.insert(why.len().min(1), ("exactly", one_line(text)));
    }
    if let Some(position) = position {
        why.push(("position", describe_position(position)));
    }
    match landed_in {
        Some(LandedIn { head, validated: true }) => why.push(("validated", format!("as snapshot {head}"))),
        Some(LandedIn { head, validated: false }) => why.push((
            "validated",
            format!("not by itself, but in snapshot {head}, the head that its train made; roll back to that"),
        )),
        None => {}
    }
    for RevertedBy { request, state } in reverted_by {
        why.push(("reverted", format!("by request {request}, which is {state}")));
    }
    if let Some(replay) = replay {
        why.push(("run again", replay_line(request, replay)));
    }
    let word = if request.state.is_final() { "took" } else { "waiting" };
    why.push((word, duration(*waited_ms)));
    if let Some(rows) = vanished_rows(request, attempts) {
        why.push((
            "vanished",
            format!("{rows} row(s) of the target that the branch never saw were replaced"),
        ));
    }
    text.push_str(&format!("\nwhy\n{}", indent(&key_values(&why))));

    if let Some(detail) = &request.detail {
        let mut lines = Vec::new();
        describe(&without_text(detail), 0, &mut lines);
        if !lines.is_empty() {
            text.push_str("\ndetail\n");
        }
        for line in lines.iter().take(MAX_DETAIL_LINES) {
            text.push_str(&format!("  {line}\n"));
        }
        if lines.len() > MAX_DETAIL_LINES {
            text.push_str(&format!("  ... {} more lines with --json\n", lines.len() - MAX_DETAIL_LINES));
        }
    }
    text.push_str(&external::render(external_runs));
    text.push_str(&render_evidence(evidence));
    text.push_str(&format!("\nhistory\n{}", indent(&render_attempts(attempts))));
    text
}

/// Rule D5: what the landing, or the train that it rides now, takes from the target unseen.
fn vanished_rows(request: &RequestRow, attempts: &[AttemptRow]) -> Option<i64> {
    let train = request.train.as_ref()?;
    let of_train = attempts.iter().rev().filter(|attempt| attempt.train.as_ref() == Some(train));
    of_train.filter_map(|attempt| attempt.detail.as_ref()?.get(VANISHED_ROWS)?.as_i64()).next()
}

fn describe_position(position: &Position) -> String {
    let Position { place, open, ahead } = position;
    if ahead.is_empty() {
        return format!("{place} of {open}, nothing ahead");
    }
    let mut named: Vec<String> = ahead.iter().take(MAX_NAMED_AHEAD).map(ToString::to_string).collect();
    if ahead.len() > MAX_NAMED_AHEAD {
        named.push(format!("and {} more", ahead.len() - MAX_NAMED_AHEAD));
    }
    format!("{place} of {open}, behind {}", named.join(", "))
}

/// The sentence stands above, with the reason.
fn without_text(detail: &Value) -> Value {
    let mut rest = detail.clone();
    if let Some(map) = rest.as_object_mut() {
        map.remove(TEXT);
    }
    rest
}

/// JSON as indented lines: what an object holds stands under its key.
fn describe(value: &Value, depth: usize, lines: &mut Vec<String>) {
    let pad = "  ".repeat(depth);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match scalar(value) {
                    Some(text) => lines.push(format!("{pad}{}: {text}", one_line(key))),
                    None => {
                        lines.push(format!("{pad}{}", one_line(key)));
                        describe(value, depth + 1, lines);
                    }
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                match item {
                    Value::Object(map) if map.values().all(|value| scalar(value).is_some()) => {
                        let parts: Vec<String> = map
                            .iter()
                            .map(|(key, value)| {
                                format!("{}={}", one_line(key), scalar(value).unwrap_or_default())
                            })
                            .collect();
                        lines.push(format!("{pad}{}", parts.join("  ")));
                    }
                    other => describe(other, depth, lines),
                }
            }
        }
        other => lines.push(format!("{pad}{}", scalar(other).unwrap_or_default())),
    }
}

/// The text of a value that fits on its key's line. A short list of scalars does.
fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::Null => Some(NONE.to_owned()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Number(value) => Some(value.to_string()),
        Value::String(value) => Some(one_line(value)),
        Value::Array(items) if items.is_empty() => Some("none".to_owned()),
        Value::Array(items) if items.iter().all(Value::is_number) => {
            Some(items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
        }
        Value::Array(_) | Value::Object(_) => None,
    }
}

/// Evidence of the last train that has any.
fn render_evidence(evidence: &[EvidenceRow]) -> String {
    let Some(last) = evidence.last() else { return String::new() };
    let rows: Vec<&EvidenceRow> = evidence.iter().filter(|row| row.train == last.train).collect();
    let mut columns = Columns::new(&["check", "candidate", "result", "scope", "measured", "rows>", "took>"]);
    for row in &rows {
        let Evidence { candidate, check, result, scope, measured, rows_scanned, duration_ms, .. } =
            &row.evidence;
        let result = match result {
            CheckResult::Failed { code } => format!("failed({code})"),
            CheckResult::Passed | CheckResult::CouldNotRun { .. } => result.word().to_owned(),
        };
        let measured: Vec<String> = measured.iter().map(|(name, value)| format!("{name}={value}")).collect();
        columns.push(vec![
            check.clone(),
            candidate.to_string(),
            result,
            scope.clone(),
            measured.join(" "),
            rows_scanned.to_string(),
            duration(i64::try_from(*duration_ms).unwrap_or(i64::MAX)),
        ]);
    }
    let mut text = format!("\nevidence (train {})\n{}", last.train, indent(&columns.render()));
    for row in rows {
        text.push_str(&render_finding(&row.evidence));
    }
    text
}

/// Why a check did not pass, with the rows.
fn render_finding(evidence: &Evidence) -> String {
    let mut text = String::new();
    match &evidence.result {
        CheckResult::Passed => return text,
        CheckResult::CouldNotRun { error } => {
            text.push_str(&format!("\n  {} could not run: {}\n", evidence.check, one_line(error)));
        }
        CheckResult::Failed { code } => {
            text.push_str(&format!("\n  {}: {}\n", evidence.check, code.meaning()));
        }
    }
    for row in evidence.sample.iter().take(MAX_SAMPLE_ROWS) {
        text.push_str(&format!("    {}\n", one_line(row)));
    }
    for Violation { requests, with_base, count: keys, sample } in &evidence.violations {
        let mut from: Vec<String> = requests.iter().map(|id| format!("request {id}")).collect();
        if *with_base {
            from.push("rows that the target has".to_owned());
        }
        let from = if from.is_empty() { "unknown".to_owned() } else { from.join(", ") };
        text.push_str(&format!("    {} from {from}\n", count(*keys, "key")));
        // The check's own sample is enough where there is one.
        if evidence.sample.is_empty() {
            for row in sample.iter().take(MAX_SAMPLE_ROWS) {
                text.push_str(&format!("      {}\n", one_line(row)));
            }
        }
    }
    text
}

fn render_attempts(attempts: &[AttemptRow]) -> String {
    let mut columns = Columns::new(&["at", "after>", "state", "train"]);
    let mut before_ms = None;
    let earlier = attempts.len().saturating_sub(MAX_HISTORY_LINES);
    for (at, attempt) in attempts.iter().enumerate() {
        if at >= earlier {
            columns.push(vec![
                moment(attempt.at_ms),
                before_ms.map_or_else(|| NONE.to_owned(), |before| duration(attempt.at_ms - before)),
                attempt.state.to_string(),
                attempt.train.as_ref().map_or_else(|| NONE.to_owned(), ToString::to_string),
            ]);
        }
        before_ms = Some(attempt.at_ms);
    }
    match earlier {
        0 => columns.render(),
        n => format!("{} before these with --json\n{}", count(n as u64, "line"), columns.render()),
    }
}

pub(super) fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
