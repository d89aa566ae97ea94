//! Commits on the target that the queue did not make: told apart, recorded, planned around.
//!
//! A proven rewrite is maintenance, everything else is a bypass. A target that is no descendant of the
//! head that the queue knew is rewound: the lane is held until an operator adopts the new head.

use std::collections::HashSet;

use mergeberg_kernel::change::RewriteProof;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::policy::TablePolicy;

use super::context::{Lane, Worker};
use super::error::WorkerError;
use crate::ledger::{ForeignKind, ForeignRow};
use crate::table::loaded::LoadedTable;

/// Where the target stands against what the queue knew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetStanding {
    /// As the queue left it, or moved on from there.
    Known,
    /// No descendant of the head that the queue knew.
    Rewound { known: SnapshotId, now: Option<SnapshotId> },
}

impl Worker {
    /// Looks at what the target took since the last tick and records foreign commits.
    pub(super) async fn watch_target(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        policy: &TablePolicy,
    ) -> Result<TargetStanding, WorkerError> {
        let facts = &table.facts;
        let head = facts.head(&lane.target);
        let Some(row) = self.ledger.target_head(&lane.uuid, &lane.target).await? else {
            // First sight: what is there now is what the queue starts from.
            self.ledger.set_target_head(&lane.table, &lane.uuid, &lane.target, head).await?;
            return Ok(TargetStanding::Known);
        };
        if row.last_known_head == head {
            return Ok(TargetStanding::Known);
        }
        let after = match (row.last_known_head, head) {
            (Some(known), Some(now)) => match facts.snapshots.after(Some(known), now) {
                Some(after) => after,
                None => return Ok(TargetStanding::Rewound { known, now: Some(now) }),
            },
            (None, Some(now)) => facts.snapshots.chain(now).ids.into_iter().rev().collect(),
            (Some(known), None) => return Ok(TargetStanding::Rewound { known, now: None }),
            (None, None) => Vec::new(),
        };
        let ours: HashSet<SnapshotId> =
            self.ledger.landed_candidates(&lane.uuid, &lane.target).await?.into_iter().collect();
        let mut rows = Vec::new();
        for id in after {
            if ours.contains(&id) {
                continue;
            }
            let Some(snapshot) = facts.snapshots.get(id) else { continue };
            rows.push(self.foreign_row(lane, table, snapshot, policy).await?);
        }
        for row in &rows {
            tracing::warn!(
                table = %lane.table, target = %lane.target, snapshot = %row.snapshot, kind = row.kind.word(),
                "commit on the target that no request made: {}", row.text
            );
        }
        self.ledger.record_foreign(&rows).await?;
        self.ledger.set_target_head(&lane.table, &lane.uuid, &lane.target, head).await?;
        Ok(TargetStanding::Known)
    }

    async fn foreign_row(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        policy: &TablePolicy,
    ) -> Result<ForeignRow, WorkerError> {
        let change = self.store.changes(table, snapshot).await?;
        let proof = self.rewrite_proof(table, snapshot, &change, policy).await?;
        let (kind, proof_word) = match proof {
            RewriteProof::Content => (ForeignKind::Maintenance, Some("content")),
            RewriteProof::TrustedPrincipal => (ForeignKind::Maintenance, Some("trusted-principal")),
            RewriteProof::None => (ForeignKind::Bypass, None),
        };
        let text = format!(
            "{}: {} file(s) with {} rows added, {} file(s) with {} rows removed",
            snapshot.label,
            change.added.len(),
            change.added_rows(),
            change.removed.len(),
            change.removed_rows(),
        );
        Ok(ForeignRow {
            table: lane.table.clone(),
            table_uuid: lane.uuid.clone(),
            target: lane.target.clone(),
            snapshot: snapshot.id,
            kind,
            proof: proof_word.map(serde_json::Value::from),
            text,
            seen_at_ms: self.now_ms(),
        })
    }
}
