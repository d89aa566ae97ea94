//! Structure events: schema, spec and sort order belong to the table, so a change of them is one review
//! item for the table, not one for each request (design, section 8).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use mergeberg_kernel::admission::StructureStanding;
use mergeberg_kernel::change::ChangeSet;
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{Digest, Principal, SchemaId, SnapshotId, SpecId};
use mergeberg_kernel::lineage::Line;
use mergeberg_kernel::structure::{
    StructureChange, StructureChangeKind, StructureId, dropped_columns_of_specs, structure_changes,
    unreadable_as,
};

use super::context::{Lane, Worker};
use super::error::WorkerError;
use crate::ledger::{AcceptedStructure, NewReview, ReviewFilter, ReviewRow, ReviewWord};
use crate::table::loaded::LoadedTable;

/// Who accepted the structure that the queue found at first sight.
pub const FIRST_SIGHT: &str = "first-sight";

/// The accepted structures of a table, and the decisions on others.
#[derive(Clone, Debug)]
pub(super) struct Structures {
    accepted: Vec<StructureId>,
    /// Accepted by a review: a barrier until something under it is on the target.
    reviewed: HashSet<SchemaId>,
    policy: Digest,
    decided: BTreeMap<StructureId, ReviewWord>,
}

impl Worker {
    /// What is accepted, after the table's present structure was looked at: what the table had at first sight is
    /// accepted, anything later gets its review item.
    pub(super) async fn structures(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        policy: &Digest,
    ) -> Result<Structures, WorkerError> {
        let facts = &table.facts;
        let current = facts.structure();
        let (mut rows, reviews) = self.structures_on_record(lane).await?;
        if rows.is_empty() {
            let by = Principal::new(FIRST_SIGHT);
            // One after the other: the newest is what a later change is compared with.
            for (structure, at_ms) in at_first_sight(facts).into_iter().zip(self.now_ms()..) {
                self.ledger.accept(&lane.uuid, structure, &by, at_ms).await?;
            }
            rows = self.ledger.accepted(&lane.uuid).await?;
        }
        let known = known(table, policy, &rows, reviews);
        if !known.accepted.contains(&current) && !known.is_open_or_decided(current) {
            self.open_review(lane, table, &known, current).await?;
        }
        Ok(known)
    }

    /// What is accepted, without writing anything. A table that the queue never saw counts as accepted.
    pub(super) async fn known_structures(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        policy: &Digest,
    ) -> Result<Structures, WorkerError> {
        let (rows, reviews) = self.structures_on_record(lane).await?;
        Ok(known(table, policy, &rows, reviews))
    }

    async fn structures_on_record(
        &self,
        lane: &Lane,
    ) -> Result<(Vec<AcceptedStructure>, Vec<ReviewRow>), WorkerError> {
        let filter = ReviewFilter { table_uuid: Some(lane.uuid.clone()), ..ReviewFilter::default() };
        Ok(tokio::try_join!(self.ledger.accepted(&lane.uuid), self.ledger.reviews(&filter))?)
    }

    pub(super) async fn open_review(
        &self,
        lane: &Lane,
        table: &LoadedTable,
        structures: &Structures,
        structure: StructureId,
    ) -> Result<(), WorkerError> {
        let Some(before) = structures.accepted.last() else { return Ok(()) };
        let mut changes: Vec<StructureChange> = structure_changes(&table.facts, *before, structure);
        // A structure that the table has left again: rows written under it would be read under the present
        // one, so a name that means another column there is part of what is reviewed (case O19).
        for change in structure_changes(&table.facts, structure, table.facts.structure()) {
            if change.kind == StructureChangeKind::NameClash && !changes.contains(&change) {
                changes.push(change);
            }
        }
        let live = self.live_specs(table).await?;
        for (spec_id, mut change) in dropped_columns_of_specs(&table.facts, *before, structure) {
            if let Some(refs) = live.get(&spec_id) {
                change.text = format!("{}; files are live under it on {}", change.text, refs.join(", "));
                changes.push(change);
            }
        }
        self.ledger
            .open_review(
                &NewReview {
                    table_uuid: lane.uuid.clone(),
                    table: lane.table.clone(),
                    structure,
                    binding: binding(&changes),
                    changes,
                    policy: structures.policy.clone(),
                },
                self.now_ms(),
            )
            .await?;
        Ok(())
    }
}

fn known(
    table: &LoadedTable,
    policy: &Digest,
    rows: &[AcceptedStructure],
    reviews: Vec<ReviewRow>,
) -> Structures {
    let mut accepted: Vec<StructureId> = rows.iter().map(|row| row.structure).collect();
    if accepted.is_empty() {
        accepted = at_first_sight(&table.facts);
    }
    let reviewed = rows.iter().filter(|row| row.by.as_str() != FIRST_SIGHT);
    Structures {
        accepted,
        reviewed: reviewed.map(|row| row.structure.schema_id).collect(),
        policy: policy.clone(),
        decided: reviews.into_iter().map(|row| (row.structure, row.state.word())).collect(),
    }
}

impl Worker {
    /// Partition specs under which files are live, with the branches and tags concerned. Reads manifest lists only.
    async fn live_specs(&self, table: &LoadedTable) -> Result<BTreeMap<SpecId, Vec<String>>, WorkerError> {
        let mut live: BTreeMap<SpecId, Vec<String>> = BTreeMap::new();
        for reference in table.facts.refs.values() {
            let Some(head) = table.facts.snapshots.get(reference.snapshot_id) else { continue };
            for spec_id in self.store.live_specs(table, head).await? {
                live.entry(spec_id).or_default().push(reference.name.to_string());
            }
        }
        Ok(live)
    }
}

impl Structures {
    fn is_open_or_decided(&self, structure: StructureId) -> bool {
        self.decided.get(&structure).is_some_and(|word| *word != ReviewWord::Lapsed)
    }

    /// How the structure under which a source was written stands.
    pub fn standing(&self, table: &LoadedTable, changes: &[&ChangeSet], target: &Line) -> StructureStanding {
        let facts = &table.facts;
        let schemas: BTreeSet<SchemaId> = changes.iter().filter_map(|c| c.schema_id).collect();
        let specs: BTreeSet<SpecId> =
            changes.iter().flat_map(|c| &c.added).map(|f| f.partition.spec_id).collect();
        for spec_id in &specs {
            if !self.accepted.iter().any(|s| s.spec_id == *spec_id) {
                return self.unaccepted(StructureId { spec_id: *spec_id, ..facts.structure() });
            }
        }
        let mut barrier = false;
        for schema_id in &schemas {
            if !self.accepted.iter().any(|s| s.schema_id == *schema_id) {
                return self.unaccepted(StructureId { schema_id: *schema_id, ..facts.structure() });
            }
            barrier |= self.reviewed.contains(schema_id) && !landed_under(table, *schema_id, target.ids());
            if let (Some(written), Some(current)) =
                (facts.schemas.get(schema_id), facts.schemas.get(&facts.current_schema_id))
            {
                let unreadable = unreadable_as(written, current);
                if !unreadable.is_empty() {
                    let texts: Vec<&str> = unreadable.iter().map(|c| c.text.as_str()).collect();
                    return StructureStanding::Unreadable(texts.join("; "));
                }
            }
        }
        if barrier { StructureStanding::Barrier } else { StructureStanding::Accepted }
    }

    fn unaccepted(&self, structure: StructureId) -> StructureStanding {
        match self.decided.get(&structure) {
            Some(ReviewWord::Rejected) => StructureStanding::Rejected,
            Some(ReviewWord::Approved | ReviewWord::Open) => StructureStanding::InReview,
            Some(ReviewWord::Lapsed) | None => StructureStanding::Unknown(structure),
        }
    }
}

/// What the table had been through before the queue came: its owners made these changes, and branches written
/// before one of them are no news. The present structure stands last.
fn at_first_sight(facts: &TableFacts) -> Vec<StructureId> {
    let current = facts.structure();
    let schemas = facts.schemas.keys().map(|schema_id| StructureId { schema_id: *schema_id, ..current });
    let specs = facts.specs.keys().map(|spec_id| StructureId { spec_id: *spec_id, ..current });
    let earlier = schemas.chain(specs).filter(|structure| *structure != current);
    earlier.chain([current]).collect()
}

/// What an approval is given for: the account of the change, field by field.
fn binding(changes: &[StructureChange]) -> Digest {
    Digest::of(changes.iter().map(|change| change.text.as_str()))
}

/// Is something on the target that was written under this schema? Every candidate is stamped with the
/// table's current schema, those of requests written under the old one as well, which went on while the
/// review was open: of them the source speaks. One that is gone since says no more than its stamp.
fn landed_under(table: &LoadedTable, schema_id: SchemaId, line: &[SnapshotId]) -> bool {
    let snapshots = &table.facts.snapshots;
    line.iter().filter_map(|id| snapshots.get(*id)).any(|snapshot| {
        let source = snapshot.source_snapshot_id().and_then(|id| snapshots.get(id));
        source.unwrap_or(snapshot).schema_id == Some(schema_id)
    })
}
