//! The checks that are always on: `lineage` and `schema`. They read metadata only.

use mergeberg_kernel::evidence::{CheckResult, Evidence, Violation};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{Digest, RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::structure::unreadable_as;

use super::train::CarView;

pub const LINEAGE: &str = "lineage";
pub const SCHEMA: &str = "schema";

/// Engine of checks that read metadata only.
const NO_ENGINE: &str = "metadata";

/// Does the head of the car at `at` reach the planned head through exactly the candidates of the cars up
/// to it, in order? `base = None`: the target has no snapshot yet.
#[must_use]
pub fn lineage(
    facts: &TableFacts,
    base: Option<SnapshotId>,
    cars: &[CarView],
    at: usize,
    policy: &Digest,
) -> Option<Evidence> {
    let car = cars.get(at)?;
    let candidate = car.head()?;
    let planned: Vec<SnapshotId> =
        cars.iter().take(at + 1).flat_map(|car| car.candidates.iter().copied()).collect();
    let found = facts.snapshots.after(base, candidate);
    let broken = match &found {
        None => Some(format!(
            "snapshot {candidate} does not descend from {}",
            base.map_or("an empty table".to_owned(), |base| base.to_string())
        )),
        Some(found) if *found != planned => {
            Some(format!("between them are {}, planned were {}", list(found), list(&planned)))
        }
        Some(_) => None,
    };
    let measured = vec![("snapshots".to_owned(), found.map_or(0, |found| found.len()).to_string())];
    Some(evidence(LINEAGE, ReasonCode::LineageCheck, candidate, car.request, policy, measured, broken))
}

/// Can the rows that a car added be read as the table's current schema (design, section 8)?
#[must_use]
pub fn schema(facts: &TableFacts, car: &CarView, policy: &Digest) -> Option<Evidence> {
    let candidate = car.head()?;
    let measured = vec![("schema".to_owned(), facts.current_schema_id.to_string())];
    let mut broken = Vec::new();
    for written in &car.written {
        match (facts.schemas.get(written), facts.schemas.get(&facts.current_schema_id)) {
            (Some(written), Some(current)) => {
                broken.extend(unreadable_as(written, current).into_iter().map(|change| change.text));
            }
            _ => {
                let error =
                    format!("schema {written} or {} is not in the table's metadata", facts.current_schema_id);
                let mut evidence =
                    evidence(SCHEMA, ReasonCode::SchemaCheck, candidate, car.request, policy, measured, None);
                evidence.result = CheckResult::CouldNotRun { error };
                return Some(evidence);
            }
        }
    }
    let broken = (!broken.is_empty()).then(|| broken.join("; "));
    Some(evidence(SCHEMA, ReasonCode::SchemaCheck, candidate, car.request, policy, measured, broken))
}

fn evidence(
    check: &str,
    code: ReasonCode,
    candidate: SnapshotId,
    request: RequestId,
    policy: &Digest,
    measured: Vec<(String, String)>,
    broken: Option<String>,
) -> Evidence {
    let sample: Vec<String> = broken.into_iter().collect();
    let failed = !sample.is_empty();
    Evidence {
        candidate,
        check: check.to_owned(),
        definition: Digest::of([check]),
        policy: policy.clone(),
        result: if failed { CheckResult::Failed { code } } else { CheckResult::Passed },
        scope: "metadata".to_owned(),
        measured,
        inputs: Vec::new(),
        violations: if failed {
            vec![Violation {
                requests: vec![request],
                with_base: false,
                count: sample.len() as u64,
                sample: sample.clone(),
            }]
        } else {
            Vec::new()
        },
        sample,
        rows_scanned: 0,
        bytes_scanned: 0,
        duration_ms: 0,
        engine: NO_ENGINE.to_owned(),
    }
}

fn list(ids: &[SnapshotId]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
