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
pub fn decide(order: &[RequestId], evidence: &[TrainEvidence]) -> TrainDecision {
    let mut evicted: BTreeMap<RequestId, Eviction> = BTreeMap::new();
    for item in evidence {
        match &item.evidence.result {
            CheckResult::Passed => {}
            CheckResult::CouldNotRun { error } => {
                // A shared scan that could not run blames nobody: each is looked at alone afterwards. Only
                // a scan of one car's own says something about that car.
                for request in &item.requests {
                    evicted.entry(*request).or_insert_with(|| Eviction::CouldNotRun {
                        check: item.evidence.check.clone(),
                        error: error.clone(),
                    });
                }
            }
            CheckResult::Failed { code } => {
                let guilty = blame(order, item);
                if guilty.is_empty() {
                    // A shared check failed and named nobody: that says nothing about any single car.
                    for request in &item.requests {
                        evicted.entry(*request).or_insert_with(|| Eviction::CouldNotRun {
                            check: item.evidence.check.clone(),
                            error: "the check failed for the train as a whole and named no rows".to_owned(),
                        });
                    }
                }
                for request in guilty {
                    // A proved fault is stronger than a check that could not run.
                    evicted.insert(
                        request,
                        Eviction::Guilty {
                            code: *code,
                            check: item.evidence.check.clone(),
                            text: text_of(&item.evidence, request),
                        },
                    );
                }
            }
        }
    }
    if evicted.is_empty() { TrainDecision::Land } else { TrainDecision::Evict(evicted) }
}

/// Walks the cars in arrival order. A car is guilty only against the base, against itself, or against a
/// car that was kept; of the requests of one violation the first innocent one stays.
fn blame(order: &[RequestId], item: &TrainEvidence) -> BTreeSet<RequestId> {
    let mut kept: BTreeSet<RequestId> = BTreeSet::new();
    let mut guilty: BTreeSet<RequestId> = BTreeSet::new();
    for request in order {
        if !item.requests.contains(request) {
            continue;
        }
        let is_guilty = item.evidence.violations.iter().any(|violation| {
            let own = violation.requests.iter().filter(|r| *r == request).count();
            if own == 0 {
                return false;
            }
            let distinct: BTreeSet<&RequestId> = violation.requests.iter().collect();
            violation.with_base
                || own > 1
                || distinct.len() == 1
                || distinct.iter().any(|other| kept.contains(other))
        });
        if is_guilty {
            guilty.insert(*request);
        } else {
            kept.insert(*request);
        }
    }
    // A check over one car's own candidate speaks of that car, rows named or not (row counts, totals).
    if let [only] = item.requests.as_slice() {
        guilty.insert(*only);
    }
    guilty
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
