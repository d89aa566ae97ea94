//! What `request explain` tells.

use mergeberg_kernel::ids::{Digest, TrainId};
use mergeberg_kernel::reason::ReasonCode;

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
            inputs: Vec::new(),
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
        reverted_by: Vec::new(),
        parts: Vec::new(),
        replay: None,
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
        external_runs: Vec::new(),
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
        reverted_by: Vec::new(),
        parts: Vec::new(),
        replay: None,
        request: RequestRow {
            detail: Some(serde_json::json!({ "text": "waits for request 7" })),
            ..row(9, "ingest/a", RequestState::Held(code))
        },
        landed_in: None,
        meaning: Some(code.meaning()),
        next: Some(code.next_action()),
        position: position(RequestId(9), &open),
        waited_ms: 65_000,
        evidence: Vec::new(),
        attempts: vec![attempt(0, RequestState::Queued, None)],
        external_runs: Vec::new(),
    };
    let text = render(&explained);
    let (_, tail) = text.split_once("\nwhy\n").unwrap();
    assert!(
        tail.starts_with(
            "\x20 reason    The request touches what a request ahead of it is publishing.
  exactly   waits for request 7
  next      Nothing: it is taken up when the one ahead has ended.
  position  3 of 3, behind 4, 7
  waiting   1 min 05 s

history
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
        reverted_by: Vec::new(),
        parts: Vec::new(),
        replay: None,
        landed_in: None,
        meaning: None,
        next: None,
        position: None,
        waited_ms: 0,
        evidence: Vec::new(),
        attempts: attempts.to_vec(),
        external_runs: Vec::new(),
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
        reverted_by: Vec::new(),
        parts: Vec::new(),
        replay: None,
        request: row(9, "ingest/a", RequestState::Landed),
        landed_in: Some(LandedIn { head: SnapshotId(if validated { 41 } else { 49 }), validated }),
        meaning: None,
        next: None,
        position: None,
        waited_ms: 65_000,
        evidence: Vec::new(),
        attempts: Vec::new(),
        external_runs: Vec::new(),
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
        reverted_by: Vec::new(),
        parts: Vec::new(),
        replay: None,
        request,
        landed_in: None,
        meaning: None,
        next: None,
        position: None,
        waited_ms: 0,
        evidence: Vec::new(),
        attempts: Vec::new(),
        external_runs: Vec::new(),
    };
    let text = render(&explained);
    assert!(text.contains("  ... 61 more lines with --json\n"), "{text}");
    assert!(!text.contains('\u{1b}'));
}
