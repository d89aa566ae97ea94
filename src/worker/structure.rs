//! Structure events: schema, spec and sort order belong to the table, so a change of them is one review
//! item for the table, not one for each request (design, section 8).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use mergeberg_kernel::admission::StructureStanding;
use mergeberg_kernel::change::ChangeSet;
use mergeberg_kernel::ids::{Digest, Principal, SchemaId, SnapshotId, SpecId};
use mergeberg_kernel::lineage::Line;
use mergeberg_kernel::structure::{StructureChange, StructureId, structure_changes, unreadable_as};

use super::context::{Lane, Worker};
use super::error::WorkerError;
use crate::ledger::{NewReview, ReviewFilter, ReviewWord};
use crate::table::loaded::LoadedTable;

/// Who accepted the structure that the queue found at first sight.
pub const FIRST_SIGHT: &str = "first-sight";

/// The accepted structures of a table, and the decisions on others.
#[derive(Debug)]
pub(super) struct Structures {
    accepted: Vec<StructureId>,
    /// Accepted by a review: a barrier until something under it is on the target.
    reviewed: HashSet<SchemaId>,
    policy: Digest,
    decided: BTreeMap<StructureId, ReviewWord>,
}

impl Worker {
    /// What is accepted, after the table's present structure was looked at: the first one ever seen is
    /// accepted, any other gets its review item.
    pub(super) async fn structures(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        policy: &Digest,
    ) -> Result<Structures, WorkerError> {
        let facts = &table.facts;
        let current = facts.structure();
        let mut rows = self.ledger.accepted(&lane.uuid).await?;
        if rows.is_empty() {
            let by = Principal::new(FIRST_SIGHT);
            self.ledger.accept(&lane.uuid, current, &by, self.now_ms()).await?;
            rows = self.ledger.accepted(&lane.uuid).await?;
        }
        let accepted: Vec<StructureId> = rows.iter().map(|row| row.structure).collect();
        if !accepted.contains(&current) {
            self.open_review(lane, table, &accepted, current, policy).await?;
        }
        let filter = ReviewFilter { table_uuid: Some(lane.uuid.clone()), ..ReviewFilter::default() };
        let reviews = self.ledger.reviews(&filter).await?;
        Ok(Structures {
            accepted,
            reviewed: rows
                .iter()
                .filter(|row| row.by.as_str() != FIRST_SIGHT)
                .map(|row| row.structure.schema_id)
                .collect(),
            policy: policy.clone(),
            decided: reviews.into_iter().map(|row| (row.structure, row.state.word())).collect(),
        })
    }

    async fn open_review(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        accepted: &[StructureId],
        structure: StructureId,
        policy: &Digest,
    ) -> Result<(), WorkerError> {
        let Some(before) = accepted.last() else { return Ok(()) };
        let changes: Vec<StructureChange> = structure_changes(&table.facts, *before, structure);
        self.ledger
            .open_review(
                &NewReview {
                    table_uuid: lane.uuid.clone(),
                    table: lane.table.clone(),
                    structure,
                    binding: binding(&changes),
                    changes,
                    policy: policy.clone(),
                },
                self.now_ms(),
            )
            .await?;
        Ok(())
    }

    /// How the structure under which a source was written stands.
    pub(super) async fn standing(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        structures: &Structures,
        changes: &[&ChangeSet],
        target: &Line,
    ) -> Result<StructureStanding, WorkerError> {
        let facts = &table.facts;
        let schemas: BTreeSet<SchemaId> = changes.iter().filter_map(|c| c.schema_id).collect();
        let specs: BTreeSet<SpecId> =
            changes.iter().flat_map(|c| &c.added).map(|f| f.partition.spec_id).collect();
        let mut barrier = false;
        for schema_id in &schemas {
            if !structures.accepted.iter().any(|s| s.schema_id == *schema_id) {
                let structure = StructureId { schema_id: *schema_id, ..facts.structure() };
                return self.unaccepted(lane, table, structures, structure).await;
            }
            if structures.reviewed.contains(schema_id) && !landed_under(table, *schema_id, target.ids()) {
                barrier = true;
            }
            if let (Some(written), Some(current)) =
                (facts.schemas.get(schema_id), facts.schemas.get(&facts.current_schema_id))
            {
                let unreadable = unreadable_as(written, current);
                if !unreadable.is_empty() {
                    let texts: Vec<&str> = unreadable.iter().map(|c| c.text.as_str()).collect();
                    return Ok(StructureStanding::Unreadable(texts.join("; ")));
                }
            }
        }
        for spec_id in &specs {
            if !structures.accepted.iter().any(|s| s.spec_id == *spec_id) {
                let structure = StructureId { spec_id: *spec_id, ..facts.structure() };
                return self.unaccepted(lane, table, structures, structure).await;
            }
        }
        Ok(if barrier { StructureStanding::Barrier } else { StructureStanding::Accepted })
    }

    async fn unaccepted(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        structures: &Structures,
        structure: StructureId,
    ) -> Result<StructureStanding, WorkerError> {
        match structures.decided.get(&structure) {
            Some(ReviewWord::Rejected) => Ok(StructureStanding::Rejected),
            Some(ReviewWord::Approved | ReviewWord::Open | ReviewWord::Lapsed) => {
                Ok(StructureStanding::InReview)
            }
            None => {
                self.open_review(lane, table, &structures.accepted, structure, &structures.policy).await?;
                Ok(StructureStanding::InReview)
            }
        }
    }
}

/// What an approval is given for: the account of the change, field by field.
fn binding(changes: &[StructureChange]) -> Digest {
    Digest::of(changes.iter().map(|change| change.text.as_str()))
}

fn landed_under(table: &LoadedTable, schema_id: SchemaId, line: &[SnapshotId]) -> bool {
    line.iter()
        .filter_map(|id| table.facts.snapshots.get(*id))
        .any(|snapshot| snapshot.schema_id == Some(schema_id))
}
