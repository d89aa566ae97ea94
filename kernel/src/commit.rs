//! A conditional catalog commit as a value: what must hold, and what then changes.
//! The JSON forms are those of the Iceberg REST specification (`TableRequirement`, `TableUpdate`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::facts::RefFact;
use crate::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableUuid};
use crate::lineage::SnapshotFact;

/// Why a commit depends on a ref: a failed requirement then says which outcome it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefRole {
    /// The branch that the landing moves.
    Target,
    /// The temporary branch: whoever removed it forbade the landing.
    Fence,
    /// A source branch that is dropped or pinned by this commit.
    Source,
    /// A new name (tag, temporary branch, pin) that must be absent.
    NewName,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Requirement {
    TableUuid(TableUuid),
    /// The ref is at this snapshot; `None`: it does not exist.
    RefAt {
        name: RefName,
        at: Option<SnapshotId>,
        role: RefRole,
    },
    CurrentSchema(SchemaId),
    DefaultSpec(SpecId),
    DefaultSortOrder(SortOrderId),
}

/// A snapshot to add, complete: its manifest list is written already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewSnapshot {
    pub id: SnapshotId,
    pub parent: Option<SnapshotId>,
    pub sequence_number: i64,
    pub timestamp_ms: i64,
    pub manifest_list: String,
    pub schema_id: SchemaId,
    /// `append`, `overwrite`, `replace` or `delete`.
    pub label: String,
    pub summary: BTreeMap<String, String>,
    /// Format v3 only.
    pub row_range: Option<RowRange>,
}

impl NewSnapshot {
    /// The snapshot as the metadata will list it.
    pub fn fact(&self) -> SnapshotFact {
        let mut summary = self.summary.clone();
        summary.remove("operation");
        SnapshotFact {
            id: self.id,
            parent: self.parent,
            sequence_number: self.sequence_number,
            timestamp_ms: self.timestamp_ms,
            schema_id: Some(self.schema_id),
            manifest_list: self.manifest_list.clone(),
            label: self.label.clone(),
            summary,
        }
    }
}

/// Row ids that a snapshot takes (table spec, "Row Lineage").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RowRange {
    /// The table's `next-row-id` when the snapshot is added (rule N2).
    pub first_row_id: i64,
    /// How many ids are taken: no fewer than rows that are new.
    pub added_rows: i64,
}

impl RowRange {
    /// The id after the last; `None` when there is no such number.
    pub fn end(&self) -> Option<i64> {
        self.first_row_id.checked_add(self.added_rows)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Update {
    AddSnapshot(NewSnapshot),
    SetRef(RefFact),
    RemoveRef(RefName),
    /// Cascades: refs to removed snapshots vanish silently, `main` included. Only together with the
    /// requirements of rule R1.
    RemoveSnapshots(Vec<SnapshotId>),
    SetProperties(BTreeMap<String, String>),
    RemoveProperties(Vec<String>),
}
