//! A check's result, keyed by the candidate's snapshot id.

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, RequestId, SnapshotId, TableName};
use crate::reason::ReasonCode;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "result")]
pub enum CheckResult {
    Passed,
    Failed {
        code: ReasonCode,
    },
    /// Nothing is known: infrastructure, overflow, delete files that cannot be read. Never a pass.
    CouldNotRun {
        error: String,
    },
}

impl CheckResult {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed { .. } => "failed",
            Self::CouldNotRun { .. } => "could-not-run",
        }
    }
}

/// One row of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// The exact snapshot that was looked at.
    pub candidate: SnapshotId,
    pub check: String,
    /// Hash of the check's definition and of the policy that held it.
    pub definition: Digest,
    pub policy: Digest,
    pub result: CheckResult,
    /// What was looked at, for people: `2 partitions`, `table`, `no rows`.
    pub scope: String,
    /// Measured values by name: `duplicates`, `rows`, `sum(air_time)`.
    pub measured: Vec<(String, String)>,
    /// Bounded sample of violating keys, one row each, `column=value` joined by spaces.
    pub sample: Vec<String>,
    /// Other tables that were read, each at exactly this snapshot: its head, or its candidate in a set.
    #[serde(default)]
    pub inputs: Vec<PinnedInput>,
    /// Violating keys by origin, complete up to its bound: which requests put them there (rule E3).
    pub violations: Vec<Violation>,
    pub rows_scanned: u64,
    pub bytes_scanned: u64,
    pub duration_ms: u64,
    /// Engine name and version.
    pub engine: String,
}

/// A table that a check read beside its own (rule E7).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PinnedInput {
    pub table: TableName,
    pub snapshot: SnapshotId,
}

/// Violations of one kind of origin: `count` keys whose extra rows come from exactly `requests`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Requests whose rows take part, in train order. A request stands twice when more than one of its
    /// own rows takes part: it is at fault whatever the others hold.
    pub requests: Vec<RequestId>,
    /// Rows of the base take part as well.
    pub with_base: bool,
    pub count: u64,
    /// Bounded sample of the keys.
    pub sample: Vec<String>,
}
