//! `request explain`: why a request is where it is, in one view.

use mergeberg_kernel::evidence::{CheckResult, Evidence, Violation};
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use serde::Serialize;
use serde_json::Value;

use super::answer::Answer;
use super::request::render_row;
use crate::error::UserError;
use crate::ledger::{AttemptRow, EvidenceRow, Ledger, RequestRow};
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
    landed_in: Option<LandedIn>,
    /// What the state's reason means, and what to do.
    meaning: Option<&'static str>,
    next: Option<&'static str>,
    position: Option<Position>,
    waited_ms: i64,
    evidence: Vec<EvidenceRow>,
    attempts: Vec<AttemptRow>,
}

pub async fn explain(ledger: &Ledger, id: RequestId, now_ms: i64) -> Result<Answer, UserError> {
    let request = ledger.request(id).await?;
    let position = if request.state.is_final() {
        None
    } else {
        let open = ledger.unfinished(&request.table_uuid, &request.target).await?;
        position(id, &open.iter().map(|row| row.id).collect::<Vec<_>>())
    };
    let reason = request.state.reason();
    let receipt = ledger.receipt_of_request(id).await?;
    let explained = Explained {
        landed_in: receipt.map(|receipt| {
            let head = receipt.intent.tail;
            LandedIn { head, validated: request.landed_snapshot == Some(head) }
        }),
        meaning: reason.map(|code| code.meaning()),
        next: reason.map(|code| code.next_action()),
        position,
        waited_ms: (request.ended_at_ms.unwrap_or(now_ms) - request.enqueued_at_ms).max(0),
        evidence: ledger.evidence_of_request(id).await?,
        attempts: ledger.attempts(id).await?,
        request,
    };
    Ok(Answer::new(render(&explained), explained))
}

/// `open` in arrival order.
fn position(id: RequestId, open: &[RequestId]) -> Option<Position> {
    let at = open.iter().position(|other| *other == id)?;
    Some(Position { place: at + 1, open: open.len(), ahead: open[..at].to_vec() })
}

fn render(explained: &Explained) -> String {
    let Explained { request, landed_in, meaning, next, position, waited_ms, evidence, attempts } = explained;
    let mut text = render_row(request);
    let mut why = Vec::new();
    if let (Some(meaning), Some(next)) = (meaning, next) {
        why.push(("reason", (*meaning).to_owned()));
        why.push(("next", (*next).to_owned()));
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
    let word = if request.state.is_final() { "took" } else { "waits since" };
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
        describe(detail, 0, &mut lines);
        text.push_str("\ndetail\n");
        for line in lines.iter().take(MAX_DETAIL_LINES) {
            text.push_str(&format!("  {line}\n"));
        }
        if lines.len() > MAX_DETAIL_LINES {
            text.push_str(&format!("  ... {} more lines with --json\n", lines.len() - MAX_DETAIL_LINES));
        }
    }
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

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Digest, TrainId};
    use mergeberg_kernel::reason::ReasonCode;
    use mergeberg_kernel::state::RequestState;

    use super::super::request::tests::row;
    use super::super::testing::START_MS;
    use super::*;

    fn attempt(at_ms: i64, state: RequestState, train: Option<&str>) -> AttemptRow {
        AttemptRow {
            id: 1,
            request: RequestId(9),
            train: train.map(TrainId::new),
            at_ms: START_MS + at_ms,
            state,
            detail: None,
        }
    }

    fn evidence(train: &str, check: &str, result: CheckResult) -> EvidenceRow {
        let failed = matches!(result, CheckResult::Failed { .. });
        EvidenceRow {
            id: 1,
            train: TrainId::new(train),
            requests: vec![RequestId(9)],
            evidence: Evidence {
                candidate: SnapshotId(41),
                check: check.to_owned(),
                definition: Digest(String::new()),
                policy: Digest(String::new()),
                result,
                scope: "2 partitions".to_owned(),
                measured: vec![("duplicates".to_owned(), if failed { "2" } else { "0" }.to_owned())],
                sample: if failed { vec!["carrier=UA flight=236 origin=EWR".to_owned()] } else { Vec::new() },
                violations: if failed {
                    vec![Violation {
                        requests: vec![RequestId(7), RequestId(9)],
                        with_base: true,
                        count: 2,
                        sample: Vec::new(),
                    }]
                } else {
                    Vec::new()
                },
                rows_scanned: 1_234,
                bytes_scanned: 9,
                duration_ms: 12,
                engine: "datafusion 53.1.0".to_owned(),
            },
            at_ms: START_MS,
        }
    }

    #[test]
    fn a_refused_request_is_explained_with_the_rows_and_where_they_come_from() {
        let code = ReasonCode::DuplicateKey;
        let mut request = row(9, "ingest/a", RequestState::Refused(code));
        request.detail = Some(serde_json::json!({
            "check": "flight-key",
            "witnesses": [{ "partition": "flight_date=2013-08-20", "files": 2 }],
            "ahead": [7, 8]
        }));
        let explained = Explained {
            landed_in: None,
            meaning: Some(code.meaning()),
            next: Some(code.next_action()),
            position: None,
            waited_ms: 1_500,
            evidence: vec![
                evidence("t0", "flight-key", CheckResult::Passed),
                evidence("t1", "lineage", CheckResult::Passed),
                evidence("t1", "flight-key", CheckResult::Failed { code }),
            ],
            attempts: vec![
                attempt(0, RequestState::Queued, None),
                attempt(350, RequestState::Planning, Some("t1")),
                attempt(1_500, RequestState::Refused(code), Some("t1")),
            ],
            request,
        };
        let text = render(&explained);
        let (_, tail) = text.split_once("\nwhy\n").unwrap();
        assert_eq!(
            tail,
            "\x20 reason  The key would be there more than once.
  next    Remove the rows that `request explain` names, on a new branch.
  took    1.5 s

detail
  check: flight-key
  witnesses
    partition=flight_date=2013-08-20  files=2
  ahead: 7, 8

evidence (train t1)
  check       candidate  result                 scope         measured      rows   took
  lineage     41         passed                 2 partitions  duplicates=0  1234  12 ms
  flight-key  41         failed(duplicate-key)  2 partitions  duplicates=2  1234  12 ms

  flight-key: The key would be there more than once.
    carrier=UA flight=236 origin=EWR
    2 keys from request 7, request 9, rows that the target has

history
  at                     after  state                   train
  2013-08-20T04:00:00Z       -  queued                  -
  2013-08-20T04:00:00Z  350 ms  planning                t1
  2013-08-20T04:00:01Z   1.1 s  refused(duplicate-key)  t1
"
        );
    }

    #[test]
    fn a_waiting_request_has_a_position_and_a_reason() {
        let open = [RequestId(4), RequestId(7), RequestId(9)];
        let code = ReasonCode::OverlapsAhead;
        let explained = Explained {
            request: row(9, "ingest/a", RequestState::Held(code)),
            landed_in: None,
            meaning: Some(code.meaning()),
            next: Some(code.next_action()),
            position: position(RequestId(9), &open),
            waited_ms: 65_000,
            evidence: Vec::new(),
            attempts: vec![attempt(0, RequestState::Queued, None)],
        };
        let text = render(&explained);
        let (_, tail) = text.split_once("\nwhy\n").unwrap();
        assert!(
            tail.starts_with(
                "\x20 reason       The request touches what a request ahead of it is publishing.
  next         Nothing: it is taken up when the one ahead has ended.
  position     3 of 3, behind 4, 7
  waits since  1 min 05 s
"
            ),
            "{tail}"
        );
        assert_eq!(describe_position(&position(RequestId(4), &open).unwrap()), "1 of 3, nothing ahead");
        assert_eq!(position(RequestId(5), &open), None);
    }

    #[test]
    fn rule_d5_rows_that_went_unseen_are_told_of_the_landing() {
        let mut request = row(9, "ingest/a", RequestState::Landed);
        request.train = Some(TrainId::new("t2"));
        let told = |train: &str, rows: i64| AttemptRow {
            detail: Some(serde_json::json!({ VANISHED_ROWS: rows })),
            ..attempt(0, RequestState::Checking, Some(train))
        };
        let landed = attempt(9, RequestState::Landed, Some("t2"));
        let attempts = [told("t1", 7), told("t2", 2), landed.clone()];
        assert_eq!(vanished_rows(&request, &attempts), Some(2), "another train's figure is not its own");
        let explained = Explained {
            landed_in: None,
            meaning: None,
            next: None,
            position: None,
            waited_ms: 0,
            evidence: Vec::new(),
            attempts: attempts.to_vec(),
            request: request.clone(),
        };
        let line = "vanished  2 row(s) of the target that the branch never saw were replaced";
        assert!(render(&explained).contains(line), "{}", render(&explained));
        assert_eq!(vanished_rows(&request, &[landed]), None);
    }

    /// Rule E2: roll-back advice offers heads only.
    #[test]
    fn a_snapshot_between_heads_is_not_called_validated() {
        let explained = |validated| Explained {
            request: row(9, "ingest/a", RequestState::Landed),
            landed_in: Some(LandedIn { head: SnapshotId(if validated { 41 } else { 49 }), validated }),
            meaning: None,
            next: None,
            position: None,
            waited_ms: 65_000,
            evidence: Vec::new(),
            attempts: Vec::new(),
        };
        assert!(render(&explained(true)).contains("validated  as snapshot 41\n"));
        let text = render(&explained(false));
        assert!(text.contains("validated  not by itself, but in snapshot 49, the head that its"), "{text}");
    }

    #[test]
    fn long_details_are_cut_and_hostile_text_is_defused() {
        let lines: Vec<String> = (0..100).map(|n| format!("file-{n}\u{1b}[2J")).collect();
        let mut request = row(9, "ingest/a", RequestState::Refused(ReasonCode::Conflict));
        request.detail = Some(serde_json::json!({ "files": lines }));
        let explained = Explained {
            request,
            landed_in: None,
            meaning: None,
            next: None,
            position: None,
            waited_ms: 0,
            evidence: Vec::new(),
            attempts: Vec::new(),
        };
        let text = render(&explained);
        assert!(text.contains("  ... 61 more lines with --json\n"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }
}
