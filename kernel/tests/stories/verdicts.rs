//! What evidence says about the cars of a train (rule E3).

use mergeberg_kernel::evidence::{CheckResult, Evidence, Violation};
use mergeberg_kernel::ids::{Digest, RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::verdict::{Eviction, TrainDecision, TrainEvidence, decide};

/// Violating keys: the requests that they come from, and whether the base takes part.
pub type Origins<'a> = (&'a [i64], bool);

pub fn evidence(requests: &[i64], check: &str, result: CheckResult, violations: &[Origins]) -> TrainEvidence {
    TrainEvidence {
        requests: requests.iter().copied().map(RequestId).collect(),
        evidence: Evidence {
            candidate: SnapshotId(100),
            check: check.to_owned(),
            definition: Digest::new("d"),
            policy: Digest::new("p"),
            result,
            scope: "1 partition".to_owned(),
            measured: Vec::new(),
            sample: Vec::new(),
            inputs: Vec::new(),
            violations: violations
                .iter()
                .map(|(requests, with_base)| Violation {
                    requests: requests.iter().copied().map(RequestId).collect(),
                    with_base: *with_base,
                    count: 1,
                    sample: vec![format!("key={requests:?}")],
                })
                .collect(),
            rows_scanned: 10,
            bytes_scanned: 100,
            duration_ms: 1,
            engine: "test 1".to_owned(),
        },
    }
}

fn passed(requests: &[i64], check: &str) -> TrainEvidence {
    evidence(requests, check, CheckResult::Passed, &[])
}

pub fn failed(requests: &[i64], check: &str, violations: &[Origins]) -> TrainEvidence {
    let code = if check == "nulls" { ReasonCode::NotNull } else { ReasonCode::DuplicateKey };
    evidence(requests, check, CheckResult::Failed { code }, violations)
}

fn rows_failed(requests: &[i64], violations: &[Origins]) -> TrainEvidence {
    evidence(requests, "rows", CheckResult::Failed { code: ReasonCode::RowCount }, violations)
}

fn could_not_run(requests: &[i64], check: &str) -> TrainEvidence {
    evidence(requests, check, CheckResult::CouldNotRun { error: "disk full".to_owned() }, &[])
}

/// `land`, or who leaves: `2 duplicate-key, 3 could-not-run`.
pub fn words(order: &[i64], evidence: &[TrainEvidence]) -> String {
    let order: Vec<RequestId> = order.iter().copied().map(RequestId).collect();
    match decide(&order, evidence) {
        TrainDecision::Land => "land".to_owned(),
        TrainDecision::Evict(evicted) => {
            let word = |(request, eviction): (&RequestId, &Eviction)| match eviction {
                Eviction::Guilty { code, .. } => format!("{request} {code}"),
                Eviction::CouldNotRun { .. } => format!("{request} could-not-run"),
            };
            evicted.iter().map(word).collect::<Vec<_>>().join(", ")
        }
    }
}

#[test]
fn everything_passed_lands() {
    assert_eq!(words(&[1, 2], &[passed(&[1, 2], "keys"), passed(&[1], "rows")]), "land");
    assert_eq!(words(&[1, 2], &[]), "land", "no checks, no objections");
}

#[test]
fn case_o36_one_bad_member_leaves_and_the_others_stay() {
    let order = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(words(&order, &[failed(&order, "keys", &[(&[5], true)])]), "5 duplicate-key");
    assert_eq!(
        words(&order, &[failed(&order, "keys", &[(&[5], true), (&[2, 2], false)])]),
        "2 duplicate-key, 5 duplicate-key"
    );
}

#[test]
fn rule_e3_of_two_that_share_a_key_the_first_stays() {
    assert_eq!(words(&[1, 2], &[failed(&[1, 2], "keys", &[(&[1, 2], false)])]), "2 duplicate-key");
    assert_eq!(words(&[2, 1], &[failed(&[2, 1], "keys", &[(&[1, 2], false)])]), "1 duplicate-key");
    assert_eq!(
        words(&[1, 2, 3], &[failed(&[1, 2, 3], "keys", &[(&[1, 2, 3], false)])]),
        "2 duplicate-key, 3 duplicate-key"
    );
}

#[test]
fn rule_e3_nobody_is_evicted_against_one_that_leaves() {
    // 1 meets the base and goes; 2 met only 1 and stays; 3 met 2 and goes.
    let violations: [Origins; 3] = [(&[1], true), (&[1, 2], false), (&[2, 3], false)];
    assert_eq!(
        words(&[1, 2, 3], &[failed(&[1, 2, 3], "keys", &violations)]),
        "1 duplicate-key, 3 duplicate-key"
    );
}

#[test]
fn rule_e3_that_holds_across_checks() {
    // 1 leaves for its nulls. The key that 2 shares with 1 will then be there once.
    let nulls = failed(&[1, 2], "nulls", &[(&[1], false)]);
    let keys = failed(&[1, 2], "keys", &[(&[1, 2], false)]);
    assert_eq!(words(&[1, 2], &[nulls.clone(), keys.clone()]), "1 not-null");
    assert_eq!(words(&[1, 2], &[keys, nulls]), "1 not-null");
}

#[test]
fn rule_e3_a_key_that_is_twice_in_one_request_is_its_own_fault() {
    let violations: [Origins; 2] = [(&[1], true), (&[1, 2, 2], false)];
    assert_eq!(
        words(&[1, 2], &[failed(&[1, 2], "keys", &violations)]),
        "1 duplicate-key, 2 duplicate-key",
        "whoever else leaves"
    );
}

#[test]
fn promise_2_evidence_that_does_not_fit_the_train_never_lands_it() {
    // Of a request that is not in the train, or of none at all.
    assert_eq!(words(&[1, 2], &[failed(&[9], "keys", &[])]), "9 could-not-run");
    assert_eq!(words(&[1, 2], &[could_not_run(&[], "keys")]), "1 could-not-run, 2 could-not-run");
    assert_eq!(
        words(&[1, 2], &[failed(&[1, 2], "keys", &[(&[1, 9], false)])]),
        "1 could-not-run, 2 could-not-run"
    );
}

#[test]
fn rule_e3_one_that_could_not_be_checked_is_nobodys_fault() {
    // 1 is held and tried again: it does not land now, so 2 is not refused for the key they share.
    let keys = failed(&[1, 2], "keys", &[(&[1, 2], false)]);
    assert_eq!(words(&[1, 2], &[could_not_run(&[1], "rows"), keys]), "1 could-not-run");
}

#[test]
fn could_not_run_is_no_pass_and_no_fault() {
    assert_eq!(words(&[1, 2], &[could_not_run(&[2], "rows")]), "2 could-not-run");
    assert_eq!(words(&[1, 2], &[could_not_run(&[1, 2], "keys")]), "1 could-not-run, 2 could-not-run");
    // A proved fault is said, whatever else could not run.
    let keys = failed(&[1, 2], "keys", &[(&[2], true)]);
    for other in ["a", "z"] {
        assert_eq!(
            words(&[1, 2], &[could_not_run(&[1, 2], other), keys.clone()]),
            "1 could-not-run, 2 duplicate-key"
        );
    }
}

#[test]
fn a_failure_of_the_whole_train_that_names_nobody_blames_nobody() {
    assert_eq!(words(&[1, 2], &[failed(&[1, 2], "keys", &[])]), "1 could-not-run, 2 could-not-run");
}

#[test]
fn a_check_of_one_candidate_speaks_of_its_car() {
    assert_eq!(words(&[1, 2], &[passed(&[1], "rows"), failed(&[2], "rows", &[])]), "2 duplicate-key");
}

#[test]
fn promise_7_a_candidate_that_stood_on_an_evicted_car_proves_no_fault() {
    // Candidate 2 contains the rows of 1. When 1 leaves, what was counted on 2 says nothing of 2 alone:
    // it stays and is checked again.
    let one = failed(&[1], "keys", &[]);
    let two = rows_failed(&[2], &[]);
    assert_eq!(words(&[1, 2], &[one.clone(), two.clone()]), "1 duplicate-key");
    assert_eq!(words(&[1, 2], &[two.clone(), one.clone()]), "1 duplicate-key");
    // Also when the total names its car, and when rows of the base take part: that base is the car ahead.
    assert_eq!(words(&[1, 2], &[one.clone(), rows_failed(&[2], &[(&[2], false)])]), "1 duplicate-key");
    let nulls = failed(&[1], "nulls", &[(&[1], false)]);
    assert_eq!(words(&[1, 2], &[nulls.clone(), failed(&[2], "keys", &[(&[2], true)])]), "1 not-null");
    assert_eq!(words(&[1, 2], &[nulls.clone(), failed(&[2], "keys", &[(&[1, 2], false)])]), "1 not-null");
    // Rows of its own do tell.
    assert_eq!(
        words(&[1, 2], &[nulls, failed(&[2], "keys", &[(&[2, 2], false)])]),
        "1 not-null, 2 duplicate-key"
    );
    // Behind a car that stays it is its own fault.
    assert_eq!(words(&[1, 2], &[two]), "2 row-count");
    assert_eq!(words(&[1, 2], &[rows_failed(&[2], &[(&[2], false)])]), "2 row-count");
}

#[test]
fn rule_e1_a_base_that_is_dirty_already_is_nobodys_fault() {
    // A strict check that found nothing but rows of the base.
    for requests in [&[1][..], &[1, 2]] {
        let decision = words(requests, &[failed(requests, "keys", &[(&[], true)])]);
        assert!(!decision.contains("duplicate-key"), "{decision}");
        assert!(decision.starts_with("1 could-not-run"), "{decision}");
    }
}

#[test]
fn rule_e3_a_car_behind_does_not_cost_one_ahead_its_place() {
    // 2 is not under the check of 1, and brings the key that 1 has. 1 came first and lands first.
    let keys = failed(&[1], "keys", &[(&[1, 2], false)]);
    assert_eq!(words(&[1, 2], std::slice::from_ref(&keys)), "2 could-not-run");
    assert_eq!(words(&[2, 1], &[keys]), "1 duplicate-key");
}

#[test]
fn the_message_counts_and_shows_the_keys_of_the_one_who_reads_it() {
    let keys = failed(&[1, 2], "keys", &[(&[1], true), (&[2], true), (&[2, 2], false)]);
    let TrainDecision::Evict(evicted) = decide(&[RequestId(1), RequestId(2)], &[keys]) else {
        panic!("evicts")
    };
    let Eviction::Guilty { text, check, .. } = &evicted[&RequestId(2)] else { panic!("guilty") };
    assert_eq!(text, "keys: 2 violation(s): key=[2]; key=[2, 2]");
    assert_eq!(check, "keys");
}
