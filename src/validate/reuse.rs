//! Evidence reused under a new candidate id (rule E6).
//!
//! A train that lost its head is staged again under new ids, mostly with the very same files in the checks' scope.
//! What a check found then depends on nothing that changed: the live rows that it reads, base included, the
//! schema, its definition, the properties that steer reading and the engine's version. Those make up the key. Only
//! passes are kept, only of checks that read the table alone: SQL may depend on time or chance, and whatever
//! reads another table or a file is asked again.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use mergeberg_kernel::evidence::CheckResult;
use mergeberg_kernel::ids::{Digest, SnapshotId};
use mergeberg_kernel::policy::{CheckDefinition, CheckKind};

use super::finding::Finding;
use super::session::ENGINE;
use super::subject::Subject;
use super::train::TrainView;

/// Findings that are kept; the oldest goes first. A train that lost its head comes back within seconds.
const MAX_FINDINGS: usize = 500;

/// What was measured, told of evidence that was not gathered anew.
pub const REUSED: &str = "reused from";

/// Findings by what they depend on.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    findings: HashMap<Digest, (SnapshotId, Finding)>,
    order: VecDeque<Digest>,
}

impl Reuse {
    /// Everything that the finding of this check on this subject depends on; `None`: it is never reused.
    pub fn key(view: TrainView<'_>, check: &CheckDefinition, subject: &Subject) -> Option<Digest> {
        match check.kind {
            CheckKind::DuplicateKey { .. } | CheckKind::NotNull { .. } | CheckKind::AcceptedValues { .. } => {
            }
            CheckKind::RowCount { .. }
            | CheckKind::Referential { .. }
            | CheckKind::Reconciliation { .. }
            | CheckKind::Sql { .. } => return None,
        }
        let facts = view.facts();
        let mut files: Vec<String> = subject
            .files
            .iter()
            .map(|file| {
                let live = &file.file;
                format!("{} {} {}", file.origin, file.rows.name(live.sequence_number), live.fact.path)
            })
            .collect();
        files.sort_unstable();
        let whose: Vec<String> = view.cars.iter().map(|car| car.request.to_string()).collect();
        let mut parts = vec![
            ENGINE.to_owned(),
            facts.uuid.to_string(),
            subject.reader.schema_id().to_string(),
            facts.properties.get(NAME_MAPPING).cloned().unwrap_or_default(),
            check.digest().to_string(),
            whose.join(" "),
        ];
        parts.append(&mut files);
        Some(Digest::of(parts.iter().map(String::as_str)))
    }

    /// The finding, with the candidate that it was gathered on.
    pub fn get(&self, key: &Digest) -> Option<Finding> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (candidate, finding) = kept.findings.get(key)?;
        let mut finding = finding.clone();
        finding.measured.push((REUSED.to_owned(), format!("snapshot {candidate}")));
        Some(finding)
    }

    pub fn keep(&self, key: Digest, candidate: SnapshotId, finding: &Finding) {
        if finding.result != CheckResult::Passed {
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.findings.insert(key.clone(), (candidate, finding.clone())).is_none() {
            kept.order.push_back(key);
        }
        if kept.order.len() > MAX_FINDINGS
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.findings.remove(&oldest);
        }
    }
}

/// Table property that steers how columns of files without field ids are found.
const NAME_MAPPING: &str = "schema.name-mapping.default";
