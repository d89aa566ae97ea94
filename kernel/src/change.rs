//! What one snapshot really did, read from the manifest entries that carry its id.

use std::fmt;
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
    /// Size of the file, or of the blob in it for a deletion vector: many of them share one file.
    pub bytes: i64,
    pub content: FileContent,
}

/// What a file holds (table spec, "Manifests": `content`, `referenced_data_file`, `equality_ids`).
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileContent {
    #[default]
    Data,
    /// `of`: the one data file whose rows it deletes; `None` when the entry does not say which (rule C6).
    PositionDeletes { of: Option<Arc<str>> },
    /// A blob at `offset` (bytes) of a Puffin file, deleting rows of one data file.
    DeletionVector { of: Arc<str>, offset: i64 },
    /// Columns that are compared, by field id, ascending.
    EqualityDeletes { field_ids: Vec<i32> },
}

/// Which delete file: many deletion vectors share one Puffin file, so a path alone does not tell.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeleteKey {
    pub path: Arc<str>,
    /// `content_offset` in bytes; `None` where the file is one delete file as a whole.
    pub content_offset: Option<i64>,
}

impl fmt::Display for DeleteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.content_offset {
            Some(offset) => write!(f, "{}@{offset}", self.path),
            None => f.write_str(&self.path),
        }
    }
}

impl FileFact {
    /// What tells this file from every other one of the table.
    pub fn key(&self) -> DeleteKey {
        let content_offset = match self.content {
            FileContent::DeletionVector { offset, of: _ } => Some(offset),
            FileContent::Data | FileContent::PositionDeletes { .. } | FileContent::EqualityDeletes { .. } => {
                None
            }
        };
        DeleteKey { path: self.path.clone(), content_offset }
    }

    /// The one data file whose rows this delete file deletes, where its entry says so.
    pub fn deletes_rows_of(&self) -> Option<&Arc<str>> {
        match &self.content {
            FileContent::DeletionVector { of, offset: _ } => Some(of),
            FileContent::PositionDeletes { of } => of.as_ref(),
            FileContent::Data | FileContent::EqualityDeletes { .. } => None,
        }
    }
}

/// The change of one snapshot against its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangeSet {
    pub snapshot: SnapshotId,
    pub schema_id: Option<SchemaId>,
    /// `operation` of the summary: may only make a decision stricter.
    pub label: String,
    pub record: RecordFinding,
    /// The engine says that whole partitions were replaced (summary key `replace-partitions`, as Spark and Flink
    /// write it). A copy-on-write update of a partition with one file looks the same without it.
    pub replaces_partitions: bool,
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

    /// Only takes rows away, by position: nothing else comes, and no row comes back.
    pub fn only_deletes_rows(&self) -> bool {
        let replaced = |old: &FileFact| {
            old.deletes_rows_of()
                .is_some_and(|of| self.added_deletes.iter().any(|new| new.deletes_rows_of() == Some(of)))
        };
        self.added.is_empty()
            && self.removed.is_empty()
            && !self.added_deletes.is_empty()
            && !self.adds_equality_deletes()
            && self.removed_deletes.iter().all(replaced)
    }

    pub fn adds_equality_deletes(&self) -> bool {
        self.added_deletes.iter().any(|d| matches!(d.content, FileContent::EqualityDeletes { .. }))
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
                lines.push(format!("{} {sign} {}", change.snapshot, file.key()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SpecId;

    fn vector(offset: i64) -> FileFact {
        FileFact {
            path: Arc::from("dv.puffin"),
            partition: Arc::new(Partition { spec_id: SpecId(0), fields: vec![] }),
            records: 1,
            bytes: 90,
            content: FileContent::DeletionVector { of: Arc::from("a.parquet"), offset },
        }
    }

    #[test]
    fn vectors_of_one_puffin_file_are_told_apart() {
        assert_ne!(vector(4).key(), vector(44).key());
        assert_eq!(vector(4).key().to_string(), "dv.puffin@4");
        let change = |offset| ChangeSet {
            snapshot: SnapshotId(1),
            schema_id: None,
            label: "delete".to_owned(),
            record: RecordFinding::Absent,
            replaces_partitions: false,
            added: vec![],
            removed: vec![],
            added_deletes: vec![vector(offset)],
            removed_deletes: vec![],
        };
        assert_ne!(digest(&[change(4)]), digest(&[change(44)]));
        let whole = FileFact { content: FileContent::PositionDeletes { of: None }, ..vector(4) };
        assert_eq!((whole.key().content_offset, whole.deletes_rows_of()), (None, None));
    }
}
