//! What is known of a table at one moment, read from its metadata: refs, snapshots, log, structure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{QueueId, RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableName, TableUuid};
use crate::lineage::SnapshotGraph;
use crate::structure::{SchemaFact, SortOrderFact, SpecFact, StructureId};

/// A branch or tag with its retention (table spec, "Snapshot Retention Policy").
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefFact {
    pub name: RefName,
    pub snapshot_id: SnapshotId,
    pub kind: RefKind,
    /// `max-ref-age-ms`; `None` when the table's default applies.
    pub max_ref_age_ms: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RefKind {
    Branch { min_snapshots_to_keep: Option<i32>, max_snapshot_age_ms: Option<i64> },
    Tag,
}

impl RefFact {
    pub fn is_branch(&self) -> bool {
        matches!(self.kind, RefKind::Branch { .. })
    }
}

/// One entry of `snapshot-log`: the target's head over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogEntry {
    pub snapshot_id: SnapshotId,
    pub timestamp_ms: i64,
}

/// Table property by which a queue claims a table: the queue's id (rule R7).
pub const CLAIM_PROPERTY: &str = "mergeberg.queue";

/// Everything that decisions need of a table's metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableFacts {
    pub name: TableName,
    pub uuid: TableUuid,
    pub format_version: u8,
    pub location: String,
    pub last_sequence_number: i64,
    pub last_updated_ms: i64,
    /// `next-row-id`; `None` below format v3, which has no row ids.
    pub next_row_id: Option<i64>,
    pub current_schema_id: SchemaId,
    pub default_spec_id: SpecId,
    pub default_sort_order_id: SortOrderId,
    pub schemas: BTreeMap<SchemaId, SchemaFact>,
    pub specs: BTreeMap<SpecId, SpecFact>,
    pub sort_orders: BTreeMap<SortOrderId, SortOrderFact>,
    pub refs: BTreeMap<RefName, RefFact>,
    pub snapshots: SnapshotGraph,
    pub snapshot_log: Vec<LogEntry>,
    pub properties: BTreeMap<String, String>,
}

impl TableFacts {
    /// Head of a branch or tag; `None` when the ref does not exist.
    pub fn head(&self, name: &RefName) -> Option<SnapshotId> {
        self.refs.get(name).map(|r| r.snapshot_id)
    }

    /// The structure that the table has now.
    pub fn structure(&self) -> StructureId {
        StructureId {
            schema_id: self.current_schema_id,
            spec_id: self.default_spec_id,
            sort_order_id: self.default_sort_order_id,
        }
    }

    /// The queue that claims this table, if it is another one than `queue` (rule R7).
    pub fn foreign_claim(&self, queue: &QueueId) -> Option<&str> {
        self.properties.get(CLAIM_PROPERTY).map(String::as_str).filter(|claim| *claim != queue.as_str())
    }

    /// What no catalog can require, and what yet has to be as it was planned on: format version and
    /// properties (rule L7). The first difference in words; a queue's claim is no difference.
    pub fn rules_differ(&self, planned: &Self) -> Option<String> {
        if self.format_version != planned.format_version {
            return Some(format!(
                "the table was upgraded from format version {} to {}",
                planned.format_version, self.format_version
            ));
        }
        let keys = self.properties.keys().chain(planned.properties.keys());
        keys.filter(|key| key.as_str() != CLAIM_PROPERTY)
            .find(|key| self.properties.get(*key) != planned.properties.get(*key))
            .map(|key| format!("table property {key} was changed"))
    }

    pub fn property_i64(&self, key: &str, default: i64) -> i64 {
        self.properties.get(key).and_then(|v| v.parse().ok()).unwrap_or(default)
    }

    pub fn property_bool(&self, key: &str, default: bool) -> bool {
        self.properties.get(key).and_then(|v| v.parse().ok()).unwrap_or(default)
    }
}
