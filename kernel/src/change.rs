//! What one snapshot really did, read from the manifest entries that carry its id.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, SchemaId, SnapshotId};
use crate::partition::Partition;
use crate::record::RecordFinding;

/// A data or delete file as a manifest entry describes it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileFact {
    pub path: Arc<str>,
    pub partition: Arc<Partition>,
    pub records: i64,
    pub bytes: i64,
}

/// The change of one snapshot against its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeSet {
    pub snapshot: SnapshotId,
    pub schema_id: Option<SchemaId>,
    /// `operation` of the summary: may only make a decision stricter.
    pub label: String,
    pub record: RecordFinding,
    pub added: Vec<FileFact>,
    pub removed: Vec<FileFact>,
    pub added_deletes: Vec<FileFact>,
    pub removed_deletes: Vec<FileFact>,
}

impl ChangeSet {
    pub fn has_delete_files(&self) -> bool {
        !self.added_deletes.is_empty() || !self.removed_deletes.is_empty()
    }

    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && !self.has_delete_files()
    }

    pub fn only_adds(&self) -> bool {
        !self.added.is_empty() && self.removed.is_empty() && !self.has_delete_files()
    }

    pub fn added_rows(&self) -> i64 {
        self.added.iter().map(|f| f.records).sum()
    }

    pub fn removed_rows(&self) -> i64 {
        self.removed.iter().map(|f| f.records).sum()
    }

    /// Every partition in which a data or delete file was added or removed.
    pub fn partitions(&self) -> impl Iterator<Item = &Arc<Partition>> {
        self.added
            .iter()
            .chain(&self.removed)
            .chain(&self.added_deletes)
            .chain(&self.removed_deletes)
            .map(|f| &f.partition)
    }
}

/// Digest of what a request changes, independent of order: an approval binds to it.
pub fn digest(changes: &[ChangeSet]) -> Digest {
    let mut lines: Vec<String> = Vec::new();
    for change in changes {
        for (sign, files) in [
            ("+", &change.added),
            ("-", &change.removed),
            ("+d", &change.added_deletes),
            ("-d", &change.removed_deletes),
        ] {
            for file in files {
                lines.push(format!("{} {sign} {}", change.snapshot, file.path));
            }
        }
    }
    lines.sort();
    Digest::of(lines.iter().map(String::as_str))
}

/// How a target-side change is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RewriteProof {
    /// Equal multiset of live rows in removed and added files (rule C5).
    Content,
    /// Label `replace` from an allow-listed principal, with equal live counts (rule C5).
    TrustedPrincipal,
    /// Not a rewrite, or not proved: a data change.
    None,
}
