//! What the evidence of a train says: land it, or who leaves it (rule E3).

use std::collections::{BTreeMap, BTreeSet};

use crate::evidence::{CheckResult, Evidence};
use crate::ids::RequestId;
use crate::reason::ReasonCode;

/// Evidence with the requests that it speaks for, in train order.
#[derive(Clone, Debug)]
pub struct TrainEvidence {
    pub requests: Vec<RequestId>,
    pub evidence: Evidence,
}

/// Why a car leaves the train.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// Its own rows violate the check.
    Guilty { code: ReasonCode, check: String, text: String },
    /// Nothing is known of it: held and tried again, not failed.
    CouldNotRun { check: String, error: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum TrainDecision {
    /// Every check passed under the candidates' own ids.
    Land,
    /// These leave; the rest is staged and checked again.
    Evict(BTreeMap<RequestId, Eviction>),
}

/// Decides on a train. `order` is the train's order, which is arrival order.
///
/// Cars are walked in that order over all evidence at once: a car that leaves for one check is no ground to
/// evict another for a second check (rule E3). The answer does not depend on the order of the rows.
pub fn decide(order: &[RequestId], evidence: &[TrainEvidence]) -> TrainDecision {
    let mut evicted: BTreeMap<RequestId, Eviction> = BTreeMap::new();
    let mut kept: BTreeSet<RequestId> = BTreeSet::new();
    for request in order {
        let undisturbed = evicted.is_empty();
        let found = evidence.iter().filter_map(|item| against(*request, item, &kept, undisturbed));
        match found.min_by(|one, two| rank(one).cmp(&rank(two))) {
            Some(eviction) => {
                evicted.insert(*request, eviction);
            }
            None => {
                kept.insert(*request);
            }
        }
    }
    if evicted.is_empty() {
        // Nothing but passes lands (promise 2), also when the evidence does not fit the train.
        for item in evidence.iter().filter(|item| item.evidence.result != CheckResult::Passed) {
            for request in if item.requests.is_empty() { order } else { &item.requests } {
                evicted.entry(*request).or_insert_with(|| named_nobody(item));
            }
        }
    }
    if evicted.is_empty() { TrainDecision::Land } else { TrainDecision::Evict(evicted) }
}

/// Why this item makes the request leave, given the cars ahead that stay. `undisturbed`: all of them stay.
fn against(
    request: RequestId,
    item: &TrainEvidence,
    kept: &BTreeSet<RequestId>,
    undisturbed: bool,
) -> Option<Eviction> {
    if !item.requests.contains(&request) {
        return spoils(request, item, kept).then(|| Eviction::CouldNotRun {
            check: item.evidence.check.clone(),
            error: "a request ahead fails this check together with its rows, and lands first".to_owned(),
        });
    }
    match &item.evidence.result {
        CheckResult::Passed => None,
        // A scan that could not run blames nobody: each car is looked at again.
        CheckResult::CouldNotRun { error } => {
            Some(Eviction::CouldNotRun { check: item.evidence.check.clone(), error: error.clone() })
        }
        CheckResult::Failed { code } => {
            if is_guilty(request, item, *code, kept, undisturbed) {
                let (check, text) = (item.evidence.check.clone(), text_of(&item.evidence, request));
                return Some(Eviction::Guilty { code: *code, check, text });
            }
            let names_somebody =
                item.evidence.violations.iter().flat_map(|v| &v.requests).any(|r| item.requests.contains(r));
            // A shared check that failed and named nobody says nothing about any single car; nor does one
            // that failed on rows of the base alone (rule E1).
            let shared = item.requests.len() > 1;
            let base_alone = undisturbed && !item.evidence.violations.is_empty();
            (!names_somebody && (shared || base_alone)).then(|| named_nobody(item))
        }
    }
}

/// A proved fault is stronger than a check that could not run; then the check's id decides.
fn rank(eviction: &Eviction) -> (bool, &str, &str) {
    match eviction {
        Eviction::Guilty { check, text, .. } => (false, check, text),
        Eviction::CouldNotRun { check, error } => (true, check, error),
    }
}

fn named_nobody(item: &TrainEvidence) -> Eviction {
    let error = match &item.evidence.result {
        CheckResult::CouldNotRun { error } => error.clone(),
        CheckResult::Failed { .. } if !item.evidence.violations.is_empty() => {
            "the check failed on rows that no request of this train brought".to_owned()
        }
        CheckResult::Passed | CheckResult::Failed { .. } => {
            "the check failed for the train as a whole and named no rows".to_owned()
        }
    };
    Eviction::CouldNotRun { check: item.evidence.check.clone(), error }
}

/// A car that the check does not concern, behind one that it does, brings a row that makes it fail. The one
/// ahead came first and lands first.
fn spoils(request: RequestId, item: &TrainEvidence, kept: &BTreeSet<RequestId>) -> bool {
    let failed = matches!(item.evidence.result, CheckResult::Failed { .. });
    failed
        && item.evidence.violations.iter().any(|violation| {
            violation.requests.contains(&request)
                && violation.requests.iter().any(|r| kept.contains(r) && item.requests.contains(r))
        })
}

/// Does a failed check of this code say something about rows one by one? The others count or query whatever
/// the candidate holds.
fn is_about_rows(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::DuplicateKey
            | ReasonCode::NullInKey
            | ReasonCode::NotNull
            | ReasonCode::AcceptedValues
            | ReasonCode::Referential
    )
}

/// A car is guilty only against the base, against itself, or against a car ahead that stays; of the requests
/// of one violation the first innocent one stays.
///
/// A check over one car's own candidate has the cars ahead as its base. When one of those leaves, all that
/// still counts are rows of the car itself; otherwise it stays, and is staged and checked again (promise 7).
fn is_guilty(
    request: RequestId,
    item: &TrainEvidence,
    code: ReasonCode,
    kept: &BTreeSet<RequestId>,
    undisturbed: bool,
) -> bool {
    let is_alone = item.requests == [request];
    for violation in &item.evidence.violations {
        let own = violation.requests.iter().filter(|r| **r == request).count();
        if own == 0 {
            continue;
        }
        if is_alone && !undisturbed && (violation.with_base || !is_about_rows(code)) {
            continue;
        }
        let mut others = violation.requests.iter().filter(|r| **r != request).peekable();
        if violation.with_base || own > 1 || others.peek().is_none() || others.any(|r| kept.contains(r)) {
            return true;
        }
    }
    // One that names no rows at all (row counts, totals) speaks of its car.
    is_alone && undisturbed && item.evidence.violations.is_empty()
}

fn text_of(evidence: &Evidence, request: RequestId) -> String {
    let mut sample: Vec<&str> = Vec::new();
    let mut count = 0;
    for violation in &evidence.violations {
        if violation.requests.contains(&request) {
            count += violation.count;
            sample.extend(violation.sample.iter().map(String::as_str));
        }
    }
    if count == 0 {
        sample = evidence.sample.iter().map(String::as_str).collect();
    }
    let shown = sample.iter().take(3).copied().collect::<Vec<_>>().join("; ");
    match (count, shown.is_empty()) {
        (0, true) => format!("{} failed", evidence.check),
        (0, false) => format!("{}: {shown}", evidence.check),
        (n, true) => format!("{}: {n} violation(s)", evidence.check),
        (n, false) => format!("{}: {n} violation(s): {shown}", evidence.check),
    }
}
