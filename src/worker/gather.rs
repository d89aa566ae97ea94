//! Everything that the kernel needs to plan one train, read from catalog, manifests and ledger, and that plan.
//! Nothing is written here.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mergeberg_kernel::admission::external::ExternalStanding;
use mergeberg_kernel::admission::set::PartFacts;
use mergeberg_kernel::admission::{
    RequestFacts, SourceNow, StructureStanding, TargetPlan, TrainPlan, plan_train,
};
use mergeberg_kernel::change::{ChangeSet, FileFact, RewriteProof};
use mergeberg_kernel::classify::{Origin, TargetChange, TargetSide};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{Digest, RefName, RequestId, SnapshotId};
use mergeberg_kernel::lineage::{BaseFinding, Line, SnapshotFact};
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::policy::{ClassPolicy, Isolation, OnConflict, TablePolicy};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::{Operation, RecordError, RecordFinding};
use mergeberg_kernel::state::RequestState;
use mergeberg_kernel::unit::{SourceChange, units};

use super::context::{Lane, Worker};
use super::error::WorkerError;
use super::fill::largest_batch;
use super::landing::tag_name;
use super::own_sources::{kind_of, wap_ids};
use super::pins::pinned_base;
use super::reverts::{concerning, only_its_files, reverted};
use super::rewrites::{changes_wait, window};
use super::structure::Structures;
use crate::ledger::RequestRow;
use crate::replay::scope::filter_of;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{FileScope, LiveFile};

/// Snapshots of sources read ahead in one tick, at most; further ones are read when they are looked at.
const MAX_READ_AHEAD: usize = 1_000;

/// A source head is restaged rather than fast-forwarded once it is older than this part of what keeps it
/// alive (rules R2, R9).
const FRESH_PART: i64 = 2;

/// `history.expire.max-snapshot-age-ms` when the table does not say (Java: `TableProperties`), in ms.
const DEFAULT_MAX_SNAPSHOT_AGE_MS: i64 = 5 * 24 * 3600 * 1000;

/// One lane at one moment.
pub(super) struct Gathered {
    pub lane: Lane,
    pub table: Arc<LoadedTable>,
    pub head: Option<SnapshotId>,
    pub policy: Arc<TablePolicy>,
    pub policy_digest: Digest,
    /// Those who were looked at, in arrival order.
    pub rows: Vec<RequestRow>,
    /// Those who wait behind them, as far as they were read.
    pub behind: Vec<RequestRow>,
    pub requests: Vec<RequestFacts>,
    pub published: HashMap<SnapshotId, SnapshotId>,
    pub protected: BTreeSet<RefName>,
    /// Every head that was looked at may be published as it is.
    pub all_fresh: bool,
    /// Sources of requests that the tick after the next will look at.
    pub next_sources: Vec<Vec<SnapshotId>>,
    /// The train that would leave now.
    pub plan: TrainPlan,
}

impl Gathered {
    /// Everybody who was read, in arrival order.
    pub fn into_rows(self) -> Vec<RequestRow> {
        let mut rows = self.rows;
        rows.extend(self.behind);
        rows.sort_by_key(arrival);
        rows
    }

    pub fn plan_anew(&self, now_ms: i64) -> TrainPlan {
        plan_train(
            &self.requests,
            &TargetPlan {
                head: self.head,
                published: &self.published,
                protected: &self.protected,
                now_ms,
                fast_forward_allowed: self.all_fresh,
            },
        )
    }
}

/// Parts of a set came with its first one.
pub(super) fn arrival(row: &RequestRow) -> (RequestId, RequestId) {
    (row.set.map_or(row.id, |set| set.id), row.id)
}

impl Worker {
    /// Looks at the first of these requests, at most `most` of those who change rows and as many compactions.
    pub(super) async fn gather(
        &self,
        lane: &Lane,
        table: Arc<LoadedTable>,
        policy: Arc<TablePolicy>,
        rows: Vec<RequestRow>,
        most: usize,
        structures: &Structures,
    ) -> Result<Gathered, WorkerError> {
        let facts = &table.facts;
        let head = facts.head(&lane.target);
        let line = facts.snapshots.line(head);
        let log: Vec<(SnapshotId, i64)> =
            facts.snapshot_log.iter().map(|entry| (entry.snapshot_id, entry.timestamp_ms)).collect();
        let mut sides: HashMap<Option<SnapshotId>, Arc<TargetSide>> = HashMap::new();
        let batch = largest_batch(&policy);
        let (rows, behind) = window(&policy, rows, most);
        let changes_wait = changes_wait(&policy, &rows);
        // The sources of the next train are read when its files are written ahead.
        let next_sources =
            behind.iter().skip(batch).take(batch).map(|row| source_line(facts, &line, row.pinned)).collect();
        let sources: Vec<Vec<SnapshotId>> =
            rows.iter().map(|r| source_line(facts, &line, r.pinned)).collect();
        self.read_ahead(&table, &sources).await;
        // Side by side: a ledger may be far away.
        let (runs, receipts, taken_back, shared_sources, targets) = tokio::try_join!(
            self.external_runs(&policy, lane),
            self.receipts(lane, &sources),
            async { Ok(self.ledger.taken_back(&lane.uuid, &lane.target, |id| line.contains(id)).await?) },
            async { Ok(self.ledger.shared_sources(&lane.uuid).await?) },
            async { Ok(self.ledger.targets(&lane.uuid).await?) },
        )?;
        let mut published = match head {
            Some(head) => facts.snapshots.published_by(head),
            None => HashMap::new(),
        };
        for source in &sources {
            add_received(source, &receipts, &line, &mut published);
        }
        let mut requests = Vec::with_capacity(rows.len());
        let mut all_fresh = true;
        for (row, source) in rows.iter().zip(&sources) {
            let class = class_of(&policy, row);
            let external = self.external_standing(facts, &class, row, &runs);
            // What the class's own command left stands in for the pinned head.
            let from = external.as_ref().and_then(ExternalStanding::result).unwrap_or(row.pinned);
            let mut base = facts.snapshots.base(from, &line, &log);
            // Rule C10: the target's history was cut by expiry after the base had been pinned.
            let kept_base = match &base {
                BaseFinding::Expired { .. } => pinned_base(facts, self.ledger.queue_id(), row.id)
                    .filter(|id| facts.snapshots.is_ancestor(*id, from)),
                _ => None,
            };
            if let Some(kept) = kept_base {
                base = BaseFinding::Common(kept);
            }
            let base_id = match &base {
                BaseFinding::Common(id) => Some(Some(*id)),
                BaseFinding::Empty => Some(None),
                BaseFinding::Expired { .. } | BaseFinding::Unrelated => None,
            };
            let pinned_on_target = line.contains(row.pinned);
            let target_side = match base_id {
                Some(base) if !pinned_on_target => match sides.get(&base) {
                    Some(side) => Arc::clone(side),
                    None => {
                        let side = match (base, head) {
                            (Some(base), Some(head)) if !line.contains(base) => {
                                self.live_difference(&table, base, head).await?
                            }
                            _ => self.target_side(&table, &line, base, &policy).await?,
                        };
                        let side = Arc::new(side);
                        sides.insert(base, Arc::clone(&side));
                        side
                    }
                },
                _ => Arc::new(TargetSide::default()),
            };
            let mut request = RequestFacts {
                request: row.id,
                source: row.source.clone(),
                kind: kind_of(self.ledger.queue_id(), &row.source),
                pinned: row.pinned,
                enqueued_at_ms: row.enqueued_at_ms,
                class: Arc::clone(&class),
                source_now: source_now(&table, row),
                base,
                pinned_on_target,
                rolled_back: stands_on_rolled_back(lane, facts, &line, row.pinned)
                    || receipts
                        .get(&row.pinned)
                        .is_some_and(|landed| !landed.iter().any(|id| line.contains(*id))),
                structure: StructureStanding::Accepted,
                wap: wap_ids(facts, &line, source, &published),
                units: Ok(Vec::new()),
                broken: not_a_branch(&table, row)
                    .or_else(|| reverted(&taken_back, row))
                    .or_else(|| taken_tag(&table, &class, row, self.now_ms())),
                unread: None,
                target_side,
                part: row.set.map(|set| PartFacts {
                    set: set.id,
                    held_elsewhere: row.state == RequestState::Held(ReasonCode::SetPartHeld),
                }),
                external,
            };
            if let Some(base) = base_id
                && !pinned_on_target
            {
                if !self.looks_into(&class, row, changes_wait) {
                    let text = "looked into when nobody waits who changes rows".to_owned();
                    request.unread = Some((ReasonCode::BehindChanges, text));
                    requests.push(request);
                    continue;
                }
                let span = SourceSpan { base, head: from };
                self.gather_source(&table, row, span, &line, structures, &policy, &mut request).await?;
                all_fresh &= is_fresh(&table, lane, row, self.now_ms());
            }
            requests.push(request);
        }
        let mut protected: BTreeSet<RefName> = policy.protected.iter().cloned().collect();
        protected.insert(RefName::main());
        protected.insert(lane.target.clone());
        protected.extend(shared_sources);
        protected.extend(targets);
        let policy_digest = policy.digest();
        let mut gathered = Gathered {
            lane: lane.clone(),
            head,
            policy,
            policy_digest,
            rows,
            behind,
            requests,
            published,
            protected,
            all_fresh,
            next_sources,
            plan: TrainPlan::default(),
            table,
        };
        gathered.plan = gathered.plan_anew(self.now_ms());
        Ok(gathered)
    }

    /// Reads the manifests of every source at once into the cache: one by one, the worker would wait for
    /// storage most of the time. An error is met again, and told, where the request is looked at.
    pub(super) async fn read_ahead(&self, table: &LoadedTable, sources: &[Vec<SnapshotId>]) {
        let wanted = sources.iter().flatten().filter_map(|id| table.facts.snapshots.get(*id));
        self.store.read_ahead(table, wanted.take(MAX_READ_AHEAD)).await;
    }

    /// Receipts for any snapshot of these sources: what was pinned, and as what it landed.
    async fn receipts(&self, lane: &Lane, sources: &[Vec<SnapshotId>]) -> Result<Receipts, WorkerError> {
        let pins: BTreeSet<SnapshotId> = sources.iter().flatten().copied().collect();
        let pins: Vec<SnapshotId> = pins.into_iter().collect();
        let mut receipts = Receipts::new();
        for (pinned, landed) in self.ledger.landed_pins(&lane.uuid, &lane.target, &pins).await? {
            receipts.entry(pinned).or_default().push(landed);
        }
        Ok(receipts)
    }

    /// Changes of the target after `base`, oldest first. Reads only manifests written since.
    async fn target_side(
        &self,
        table: &LoadedTable,
        line: &Line,
        base: Option<SnapshotId>,
        policy: &TablePolicy,
    ) -> Result<TargetSide, WorkerError> {
        let mut side = TargetSide::default();
        for id in line.after(base).unwrap_or_default() {
            let Some(snapshot) = table.facts.snapshots.get(id) else { continue };
            let change = self.store.changes(table, snapshot).await?;
            let proof = self.rewrite_proof(table, snapshot, &change, policy).await?;
            side.push(TargetChange { change, proof, origin: Origin::Target(id) });
        }
        Ok(side)
    }

    /// Target side without the snapshots between: what is live now and was not at the base, and the other
    /// way round, as one change of data (rule C10). Stricter than the history would be, never looser.
    async fn live_difference(
        &self,
        table: &LoadedTable,
        base: SnapshotId,
        head: SnapshotId,
    ) -> Result<TargetSide, WorkerError> {
        let facts = &table.facts;
        let (Some(base), Some(head_fact)) = (facts.snapshots.get(base), facts.snapshots.get(head)) else {
            return Ok(TargetSide::default());
        };
        let before = self.store.live_files(table, base, &FileScope::Table).await?;
        let after = self.store.live_files(table, head_fact, &FileScope::Table).await?;
        let paths = |files: &[LiveFile]| -> BTreeSet<Arc<str>> {
            files.iter().map(|f| Arc::clone(&f.fact.path)).collect()
        };
        let (old, new) = (paths(&before.data), paths(&after.data));
        let (old_deletes, new_deletes) = (paths(&before.deletes), paths(&after.deletes));
        let only = |files: &[LiveFile], other: &BTreeSet<Arc<str>>| -> Vec<FileFact> {
            files.iter().filter(|f| !other.contains(&f.fact.path)).map(|f| f.fact.clone()).collect()
        };
        let change = ChangeSet {
            snapshot: head,
            schema_id: head_fact.schema_id,
            label: "overwrite".to_owned(),
            record: RecordFinding::Absent,
            replaces_partitions: false,
            added: only(&after.data, &old),
            removed: only(&before.data, &new),
            added_deletes: only(&after.deletes, &old_deletes),
            removed_deletes: only(&before.deletes, &new_deletes),
        };
        Ok(TargetSide::new(vec![TargetChange {
            change: Arc::new(change),
            proof: RewriteProof::None,
            origin: Origin::Target(head),
        }]))
    }

    /// Reads the source's own changes. Whatever cannot be read is the request's own trouble.
    #[allow(clippy::too_many_arguments)]
    async fn gather_source(
        &self,
        table: &LoadedTable,
        row: &RequestRow,
        SourceSpan { base, head }: SourceSpan,
        line: &Line,
        structures: &Structures,
        policy: &TablePolicy,
        request: &mut RequestFacts,
    ) -> Result<(), WorkerError> {
        let ids = table.facts.snapshots.after(base, head).unwrap_or_default();
        let mut changes: Vec<SourceChange> = Vec::new();
        for id in ids {
            let Some(snapshot) = table.facts.snapshots.get(id) else { continue };
            let read = self.source_change(table, snapshot, policy).await;
            match read {
                Ok(change) => changes.push(change),
                Err(WorkerError::Table(error)) if error.is_own_fault() => {
                    request.broken = Some((error.reason(), error.to_string()));
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        match self.look_at_rewrites(table, &mut changes, base, policy, request).await {
            Err(error) if error.is_own_fault() => {
                request.broken = Some((error.reason(), error.to_string()));
                return Ok(());
            }
            looked => looked?,
        }
        let sets: Vec<&ChangeSet> = changes.iter().map(|c| c.change.as_ref()).collect();
        request.structure = structures.standing(table, &sets, line);
        request.units = units(&changes, &request.class);
        if row.reverts.is_some()
            && let Ok(units) = &mut request.units
        {
            units.iter_mut().for_each(only_its_files);
            request.target_side = Arc::new(concerning(units, &request.target_side));
        }
        Ok(())
    }

    /// The change with the record that its summary names, if the ledger has it.
    async fn with_record(
        &self,
        table: &LoadedTable,
        change: Arc<ChangeSet>,
    ) -> Result<Arc<ChangeSet>, WorkerError> {
        match self.named_record(&table.facts, &change.record).await? {
            Some(record) => Ok(Arc::new(ChangeSet { record, ..change.as_ref().clone() })),
            None => Ok(change),
        }
    }

    /// The record that a summary names. `None`: it names none, or the ledger does not have it.
    pub(super) async fn named_record(
        &self,
        facts: &TableFacts,
        record: &RecordFinding,
    ) -> Result<Option<RecordFinding>, WorkerError> {
        let RecordFinding::Named { id, digest } = record else { return Ok(None) };
        let Some(row) = self.ledger.operation(&facts.uuid, id).await? else { return Ok(None) };
        let found = row.digest.as_str();
        Ok(Some(if digest.as_deref().is_some_and(|wanted| wanted != found) {
            RecordFinding::Invalid(RecordError::OtherDigest { id: id.clone(), found: found.to_owned() })
        } else {
            RecordFinding::of_text(&row.record, &facts.name)
        }))
    }

    async fn source_change(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        policy: &TablePolicy,
    ) -> Result<SourceChange, WorkerError> {
        let change = self.with_record(table, self.store.changes(table, snapshot).await?).await?;
        let proof = if snapshot.label == "replace" {
            self.rewrite_proof(table, snapshot, &change, policy).await?
        } else {
            RewriteProof::None
        };
        // Rule C7 asks whether every file of the partitions concerned was removed. Of a replacement that is recorded
        // or said that holds for those that it only added to as well.
        let said = change.replaces_partitions
            || change.record.found().is_some_and(|r| r.operation == Operation::ReplacePartitions);
        let replaces = match &change.record {
            RecordFinding::Absent => said || !change.removed.is_empty(),
            RecordFinding::Found(_) => said,
            RecordFinding::Named { .. } | RecordFinding::Invalid(_) => false,
        };
        let parent = snapshot.parent.and_then(|id| table.facts.snapshots.get(id));
        let parent_files = match (replaces, parent) {
            (true, Some(parent)) => {
                let removed = change.removed.iter().map(|f| &f.partition);
                let concerned: BTreeSet<Arc<Partition>> =
                    if said { change.partitions().cloned().collect() } else { removed.cloned().collect() };
                let scope = FileScope::Partitions(concerned.into_iter().collect());
                let live = self.store.live_files(table, parent, &scope).await?;
                Some(Arc::new(live.data.iter().map(|f| Arc::clone(&f.fact.path)).collect()))
            }
            // Nothing was there to be removed.
            (true, None) if snapshot.parent.is_none() => Some(Arc::default()),
            _ => None,
        };
        let filter = match change.record.found() {
            Some(record) if record.operation.is_run_again() => {
                filter_of(record, table, change.schema_id).ok().flatten()
            }
            _ => None,
        };
        Ok(SourceChange {
            change,
            proof,
            proof_with_next: RewriteProof::None,
            keeps_sequence_numbers: false,
            parent_files,
            filter,
        })
    }
}

/// The snapshots of a source: after `base`, up to `head`.
struct SourceSpan {
    base: Option<SnapshotId>,
    head: SnapshotId,
}

/// By pinned head: the snapshots that published it.
type Receipts = HashMap<SnapshotId, Vec<SnapshotId>>;

/// The snapshots from the pin back to the target's line, newest first.
fn source_line(facts: &TableFacts, line: &Line, pinned: SnapshotId) -> Vec<SnapshotId> {
    let mut ids = Vec::new();
    let mut next = Some(pinned);
    // A cycle cannot come from a valid table; a damaged one must not hang the queue.
    while let Some(snapshot) = next.filter(|id| !line.contains(*id)).and_then(|id| facts.snapshots.get(id))
        && ids.len() < facts.snapshots.len()
    {
        ids.push(snapshot.id);
        next = snapshot.parent;
    }
    ids
}

/// Rule C9: a receipt whose candidate is in the target's line proves that the pinned head and all before it
/// are published, whatever the stamps say: a replay stamps an operation of two snapshots once.
fn add_received(
    source: &[SnapshotId],
    receipts: &Receipts,
    line: &Line,
    published: &mut HashMap<SnapshotId, SnapshotId>,
) {
    let live = |id: &SnapshotId| receipts.get(id)?.iter().copied().find(|landed| line.contains(*landed));
    let Some((at, landed)) = source.iter().enumerate().find_map(|(at, id)| Some((at, live(id)?))) else {
        return;
    };
    for id in source.iter().skip(at) {
        published.entry(*id).or_insert(landed);
    }
}

/// The class that the request was enqueued under; the shipped default when the policy lost it.
pub(super) fn class_of(policy: &TablePolicy, row: &RequestRow) -> Arc<ClassPolicy> {
    let mut class = policy.class_named(&row.class).cloned().unwrap_or_else(ClassPolicy::shipped_default);
    if row.reverts.is_some() {
        // Only what was there comes back, so rows that came beside it are in nobody's way (rule C4).
        class.isolation = Isolation::Snapshot;
        // The pipeline knows nothing of the inverse of its work.
        if class.on_conflict == OnConflict::External {
            class.on_conflict = OnConflict::Refuse;
        }
    }
    Arc::new(class)
}

fn source_now(table: &LoadedTable, row: &RequestRow) -> SourceNow {
    match table.facts.refs.get(&row.source) {
        Some(reference) if reference.snapshot_id == row.pinned => SourceNow::AtPin,
        Some(reference) => {
            if table.facts.snapshots.is_ancestor(row.pinned, reference.snapshot_id) {
                SourceNow::MovedTo(reference.snapshot_id)
            } else {
                SourceNow::ResetTo(reference.snapshot_id)
            }
        }
        None => SourceNow::Gone,
    }
}

/// A tag took the name since (case O09): it is no source, and nobody hands it over to be dropped (rule R6).
fn not_a_branch(table: &LoadedTable, row: &RequestRow) -> Option<(ReasonCode, String)> {
    let reference = table.facts.refs.get(&row.source)?;
    (!reference.is_branch()).then(|| {
        (ReasonCode::NotABranch, format!("'{}' is a tag now; pinned was snapshot {}", row.source, row.pinned))
    })
}

/// Rule R5: a tag's name must be free; a taken one concerns only its own request.
fn taken_tag(
    table: &LoadedTable,
    class: &ClassPolicy,
    row: &RequestRow,
    now_ms: i64,
) -> Option<(ReasonCode, String)> {
    let name = tag_name(class, row.id, now_ms)?;
    let taken = table.facts.refs.contains_key(&name);
    taken.then(|| (ReasonCode::NameTaken, format!("the tag {name} that its class asks for exists already")))
}

/// Rules R2, R9: a head that ages out soon is published under a new id.
fn is_fresh(table: &LoadedTable, lane: &Lane, row: &RequestRow, now_ms: i64) -> bool {
    let facts = &table.facts;
    let Some(snapshot) = facts.snapshots.get(row.pinned) else { return false };
    let age = now_ms.saturating_sub(snapshot.timestamp_ms);
    let source_life = facts.refs.get(&row.source).and_then(|r| r.max_ref_age_ms);
    let target_life = facts.refs.get(&lane.target).and_then(|r| match r.kind {
        mergeberg_kernel::facts::RefKind::Branch { max_snapshot_age_ms, .. } => max_snapshot_age_ms,
        mergeberg_kernel::facts::RefKind::Tag => None,
    });
    let table_life = facts.property_i64("history.expire.max-snapshot-age-ms", DEFAULT_MAX_SNAPSHOT_AGE_MS);
    let life = source_life.unwrap_or(i64::MAX).min(target_life.unwrap_or(table_life));
    age < life / FRESH_PART
}

/// Does the source contain a head that the target once had and does not have any more? It was taken back, and
/// comes again only when somebody writes it again. Only `main` has a log.
fn stands_on_rolled_back(lane: &Lane, facts: &TableFacts, line: &Line, pinned: SnapshotId) -> bool {
    lane.target == RefName::main()
        && source_line(facts, line, pinned)
            .iter()
            .any(|id| facts.snapshot_log.iter().any(|entry| entry.snapshot_id == *id))
}
