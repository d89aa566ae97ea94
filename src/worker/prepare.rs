//! What each car will write: files chosen, operations run again, nothing of a snapshot written yet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use mergeberg_kernel::admission::{Car, CarAction};
use mergeberg_kernel::change::{DeleteKey, FileFact};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::{PUBLISHED_WAP_ID, SOURCE_SNAPSHOT_ID, SnapshotFact, WAP_ID};
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::policy::{Appends, Overlap};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::unit::{NetFiles, Unit, UnitKind};
use serde_json::Value;

use super::ages::Ages;
use super::context::{Worker, lock};
use super::error::WorkerError;
use super::gather::Gathered;
use super::prepared::PreparedCar;
use super::replays::Writing;
use super::stage::REQUEST_KEY;
use crate::replay::row_merge::{RowMergeInput, row_merge};
use crate::replay::{ReplayError, ReplayInput, Replayed};
use crate::table::course::Ending;
use crate::table::manifests::{FileScope, LiveFile, LiveFiles};
use crate::table::snapshot_writer::{AddedFile, SnapshotChange, new_snapshot_id};

/// Why a car cannot be prepared.
pub(super) struct Failure {
    pub code: ReasonCode,
    pub text: String,
    /// Rows that branch and target both changed, for people.
    pub conflicts: Vec<Value>,
}

impl Failure {
    fn new(code: ReasonCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), conflicts: Vec::new() }
    }
}

pub(super) enum Preparation {
    /// It was told to end; whose doing that was, its attendant knows.
    Ended(Ending),
    Car(Box<PreparedCar>),
    Failure(Failure),
}

impl Worker {
    pub(super) async fn prepare(
        &self,
        gathered: &Gathered,
        car: &Car,
        ids: &FreshIds,
        writing: Option<&Writing>,
    ) -> Result<Preparation, WorkerError> {
        let mut prepared = PreparedCar::new();
        let outcome = self.prepare_units(gathered, car, ids, writing, &mut prepared).await?;
        Ok(match outcome {
            Ok(()) => Preparation::Car(Box::new(prepared)),
            Err(Unprepared::Failure(failure)) => Preparation::Failure(failure),
            Err(Unprepared::Ended(ending)) => Preparation::Ended(ending),
        })
    }

    async fn prepare_units(
        &self,
        gathered: &Gathered,
        car: &Car,
        ids: &FreshIds,
        writing: Option<&Writing>,
        prepared: &mut PreparedCar,
    ) -> Result<Result<(), Unprepared>, WorkerError> {
        if car.classification.row_merge {
            return self.prepare_row_merge(gathered, car, ids, writing, prepared).await;
        }
        let mut ages = Ages::of(gathered, car);
        for unit in &car.classification.units {
            let as_is = car.action == CarAction::Pick || unit.kind == UnitKind::BlindAppend;
            let outcome = if as_is {
                let picked = self.prepare_pick(gathered, car, unit, ids, &mut ages, prepared).await?;
                picked.map_or(Ok(()), |(code, text)| Err(Failure::new(code, text).into()))
            } else {
                self.prepare_replay(gathered, car, unit, ids, writing, prepared).await?
            };
            if outcome.is_err() {
                return Ok(outcome);
            }
        }
        Ok(Ok(()))
    }

    /// Every snapshot of the unit again, one candidate each, with the very same files.
    async fn prepare_pick(
        &self,
        gathered: &Gathered,
        car: &Car,
        unit: &Unit,
        ids: &FreshIds,
        ages: &mut Ages,
        prepared: &mut PreparedCar,
    ) -> Result<Option<(ReasonCode, String)>, WorkerError> {
        for change in &unit.changes {
            let Some(source) = gathered.table.facts.snapshots.get(change.snapshot) else {
                return Ok(Some((
                    ReasonCode::BranchGone,
                    format!("snapshot {} is not in the table any more", change.snapshot),
                )));
            };
            let LiveFiles { data, deletes } = self.store.added(&gathered.table, source).await?;
            let id = self.fresh_id(gathered, ids);
            ages.becomes(source.id, id);
            // What the class's own command left publishes the pinned head.
            let published = match car.rebuilt {
                Some(head) if head == source.id => {
                    gathered.table.facts.snapshots.get(car.pinned).unwrap_or(source)
                }
                _ => source,
            };
            let kept =
                |file: LiveFile| AddedFile { age: ages.on_target(&file, source), ..AddedFile::from(file) };
            let mut write = SnapshotChange {
                id,
                label: change.label.clone(),
                add: data.into_iter().map(kept).collect(),
                remove: change.removed.iter().map(|f| Arc::clone(&f.path)).collect(),
                add_deletes: deletes.into_iter().map(kept).collect(),
                remove_deletes: change.removed_deletes.iter().map(FileFact::key).collect(),
                summary: stamps(car, published),
                now_ms: self.now_ms(),
                schema_id: gathered.table.facts.current_schema_id,
            };
            if let Some(failure) = self.unite(gathered, car, change, source, prepared, &mut write).await? {
                return Ok(Some(failure));
            }
            prepared.touched.extend(change.partitions().cloned());
            prepared.push(write);
        }
        Ok(None)
    }

    /// The unit's operation run against the car's parent. Nothing ahead in the train lies in its scope, so
    /// the planned head with this car's own changes laid over it is that parent, as far as it can matter.
    async fn prepare_replay(
        &self,
        gathered: &Gathered,
        car: &Car,
        unit: &Unit,
        ids: &FreshIds,
        writing: Option<&Writing>,
        prepared: &mut PreparedCar,
    ) -> Result<Result<(), Unprepared>, WorkerError> {
        let facts = &gathered.table.facts;
        let failed = |code, text: String| Ok(Err(Failure::new(code, text).into()));
        let source = unit.last_snapshot().and_then(|id| facts.snapshots.get(id));
        let Some(source) = source else {
            return failed(ReasonCode::BranchGone, "the branch's snapshots are gone".to_owned());
        };
        let files = match (&unit.kind, &unit.record) {
            (UnitKind::ReplacePartitions { .. }, _) => {
                match self.replace_partitions(gathered, unit, prepared).await? {
                    Ok((add, remove, remove_deletes)) => {
                        ReplayedFiles { add, remove, remove_deletes, add_deletes: Vec::new() }
                    }
                    Err((code, text)) => return failed(code, text),
                }
            }
            (UnitKind::Recorded, Some(record)) => {
                let live = self.live_for(gathered, &FileScope::Table, prepared).await?;
                let input = ReplayInput {
                    table: Arc::clone(&gathered.table),
                    live: &live,
                    record,
                    written_under: source.schema_id.unwrap_or(facts.current_schema_id),
                };
                let writing = attended(writing)?;
                let course = self.replay_begins(writing, car).await?;
                let replayed =
                    crate::replay::replay(&self.engine, &self.store, &*self.catalog, &input, &course).await;
                self.replay_ends(writing, car, &replayed).await?;
                match replayed_files(replayed)? {
                    Ok(replayed) => ReplayedFiles::of(replayed, prepared),
                    Err(unprepared) => return Ok(Err(unprepared)),
                }
            }
            _ => {
                return failed(
                    ReasonCode::Conflict,
                    format!("snapshot {} has no recorded operation that could be run again", source.id),
                );
            }
        };
        // One that comes to nothing is a candidate too: its stamp is what says that it was published.
        let id = self.fresh_id(gathered, ids);
        prepared.push(files.written_as(id, true, stamps(car, source), self.now_ms(), facts));
        Ok(Ok(()))
    }

    /// The source's rows merged into the target's by key, as one candidate. The snapshots before the last one get a
    /// candidate that changes nothing: its stamp says that they are published (rule D7).
    async fn prepare_row_merge(
        &self,
        gathered: &Gathered,
        car: &Car,
        ids: &FreshIds,
        writing: Option<&Writing>,
        prepared: &mut PreparedCar,
    ) -> Result<Result<(), Unprepared>, WorkerError> {
        let facts = &gathered.table.facts;
        let units = &car.classification.units;
        let gone = || Err(Failure::new(ReasonCode::BranchGone, "the branch's snapshots are gone").into());
        let first = units.first().and_then(|unit| unit.snapshots().next());
        let base =
            first.and_then(|id| facts.snapshots.get(id)?.parent).and_then(|id| facts.snapshots.get(id));
        let last = units.last().and_then(Unit::last_snapshot).and_then(|id| facts.snapshots.get(id));
        let (Some(base), Some(last)) = (base, last) else { return Ok(gone()) };
        let input = RowMergeInput {
            table: Arc::clone(&gathered.table),
            base: self.store.live_files(&gathered.table, base, &FileScope::Table).await?,
            source: self.store.live_files(&gathered.table, last, &FileScope::Table).await?,
            target: self.live_for(gathered, &FileScope::Table, prepared).await?,
            key: car.class.key.clone(),
            conflicts: car.class.row_conflicts,
            appends_meet: car.class.overlap != Overlap::Refuse && car.class.appends == Appends::Blind,
        };
        let writing = attended(writing)?;
        let course = self.replay_begins(writing, car).await?;
        let merged = row_merge(&self.engine, input, &course).await;
        self.replay_ends(writing, car, &merged).await?;
        let files = match replayed_files(merged)? {
            Ok(replayed) => ReplayedFiles::of(replayed, prepared),
            Err(unprepared) => return Ok(Err(unprepared)),
        };
        for unit in units {
            let Some(source) = unit.last_snapshot().and_then(|id| facts.snapshots.get(id)) else {
                return Ok(gone());
            };
            let id = self.fresh_id(gathered, ids);
            prepared.push(files.written_as(
                id,
                source.id == last.id,
                stamps(car, source),
                self.now_ms(),
                facts,
            ));
        }
        Ok(Ok(()))
    }

    /// Rule D5: the target's files of exactly those (spec id, tuple) go, the branch's files come.
    async fn replace_partitions(
        &self,
        gathered: &Gathered,
        unit: &Unit,
        prepared: &mut PreparedCar,
    ) -> Result<Result<Replacement, (ReasonCode, String)>, WorkerError> {
        let facts = &gathered.table.facts;
        let partitions: BTreeSet<Arc<Partition>> = unit.partitions();
        let net = NetFiles::of(unit.changes.iter().map(AsRef::as_ref));
        let mut add: BTreeMap<Arc<str>, AddedFile> = BTreeMap::new();
        for change in &unit.changes {
            let Some(source) = facts.snapshots.get(change.snapshot) else { continue };
            for file in self.store.added_files(&gathered.table, source).await? {
                if net.is_added(&file.fact.path) {
                    add.insert(Arc::clone(&file.fact.path), AddedFile::from(file));
                }
            }
        }
        let mut remove: BTreeSet<Arc<str>> = BTreeSet::new();
        let scope = FileScope::Partitions(partitions.iter().cloned().collect());
        let live = self.live_for(gathered, &scope, prepared).await?;
        // Deletes of the partitions go with their files; those of other specs, global ones by value among them,
        // stay for whatever else they apply to.
        let in_place = |delete: &&LiveFile| partitions.contains(&delete.fact.partition);
        let remove_deletes = live.deletes.iter().filter(in_place).map(|d| d.fact.key()).collect();
        let branch_removed: BTreeSet<&Arc<str>> = unit.removed().map(|f| &f.path).collect();
        for file in &live.data {
            if !partitions.contains(&file.fact.partition) {
                return Ok(Err((
                    ReasonCode::OverlappingSpecs,
                    format!("{} lies in {} of another spec", file.fact.path, file.fact.partition),
                )));
            }
            // A path live on both sides stays as it is (rule D6).
            if add.remove(&file.fact.path).is_some() {
                continue;
            }
            if !branch_removed.contains(&file.fact.path) && !prepared.own.has_added(&file.fact.path) {
                prepared.vanished_rows += file.fact.records;
            }
            remove.insert(Arc::clone(&file.fact.path));
        }
        prepared.touched.extend(partitions);
        Ok(Ok((add.into_values().collect(), remove, remove_deletes)))
    }

    /// What is live in the scope for the car's next unit: the planned head's files with the car's own changes
    /// laid over them.
    pub(super) async fn live_for(
        &self,
        gathered: &Gathered,
        scope: &FileScope,
        prepared: &PreparedCar,
    ) -> Result<LiveFiles, WorkerError> {
        let head = gathered.head.and_then(|id| gathered.table.facts.snapshots.get(id));
        let live = match head {
            Some(head) => self.store.live_files(&gathered.table, head, scope).await?,
            None => LiveFiles::default(),
        };
        Ok(prepared.own.over(live, scope))
    }

    fn fresh_id(&self, gathered: &Gathered, ids: &FreshIds) -> SnapshotId {
        loop {
            let id = new_snapshot_id(&gathered.table.facts, || (self.random)());
            if lock(&ids.taken).insert(id) {
                return id;
            }
        }
    }
}

/// Ids that a train has given to its candidates.
#[derive(Default)]
pub(super) struct FreshIds {
    taken: Mutex<BTreeSet<SnapshotId>>,
}

/// Why a car is not prepared.
enum Unprepared {
    Failure(Failure),
    Ended(Ending),
}

impl From<Failure> for Unprepared {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// Whose trouble it is that an operation came to nothing.
fn replayed_files(
    outcome: Result<Replayed, ReplayError>,
) -> Result<Result<Replayed, Unprepared>, WorkerError> {
    Ok(match outcome {
        Ok(replayed) => Ok(replayed),
        Err(ReplayError::Table(error)) => return Err(error.into()),
        Err(ReplayError::Catalog(error)) => return Err(error.into()),
        Err(ReplayError::Ended(ending @ Ending::TooLong(_))) => {
            Err(Failure::new(ReasonCode::ReplayFailed, format!("{ending}, the class's replay-time-bound"))
                .into())
        }
        Err(ReplayError::Ended(ending)) => Err(Unprepared::Ended(ending)),
        Err(ReplayError::Request { code, text }) => Err(Failure::new(code, text).into()),
        Err(ReplayError::Conflicts { text, rows }) => {
            Err(Failure { code: ReasonCode::RowConflict, text, conflicts: rows }.into())
        }
    })
}

/// Operations are run again only under somebody's eyes.
fn attended(writing: Option<&Writing>) -> Result<&Writing, WorkerError> {
    writing.ok_or_else(|| WorkerError::Bug("an operation was to be run again ahead of its train".to_owned()))
}

/// What a unit that was run again comes to.
#[derive(Clone, Default)]
struct ReplayedFiles {
    add: Vec<AddedFile>,
    remove: BTreeSet<Arc<str>>,
    add_deletes: Vec<AddedFile>,
    remove_deletes: BTreeSet<DeleteKey>,
}

impl ReplayedFiles {
    /// A snapshot with these files, or one that changes nothing. Never called an append: it depends on what it
    /// was made against (rule C2).
    fn written_as(
        &self,
        id: SnapshotId,
        with_files: bool,
        summary: BTreeMap<String, String>,
        now_ms: i64,
        facts: &TableFacts,
    ) -> SnapshotChange {
        let of = if with_files { self.clone() } else { Self::default() };
        let Self { add, remove, add_deletes, remove_deletes } = of;
        let takes = !remove.is_empty() || !add_deletes.is_empty();
        let label = if add.is_empty() && takes { "delete" } else { "overwrite" };
        SnapshotChange {
            id,
            label: label.to_owned(),
            add,
            remove,
            add_deletes,
            remove_deletes,
            summary,
            now_ms,
            schema_id: facts.current_schema_id,
        }
    }

    /// The files that the replay wrote are the car's to account for.
    fn of(replayed: Replayed, prepared: &mut PreparedCar) -> Self {
        let Replayed { added, removed, added_deletes, removed_deletes, touched } = replayed;
        let data = added.iter().map(|file| &file.fact.path);
        // Many vectors share one file.
        let deletes: BTreeSet<&Arc<str>> = added_deletes.iter().map(|file| &file.fact.path).collect();
        prepared.new_files.extend(data.chain(deletes).cloned());
        prepared.touched.extend(touched);
        Self {
            add: added.into_iter().map(AddedFile::from).collect(),
            remove: removed,
            add_deletes: added_deletes.into_iter().map(AddedFile::from).collect(),
            remove_deletes: removed_deletes,
        }
    }
}

/// Files to add, data files to remove, delete files to remove.
type Replacement = (Vec<AddedFile>, BTreeSet<Arc<str>>, BTreeSet<DeleteKey>);

/// What a candidate says of its origin (rule D7; Java: `CherryPickOperation`).
fn stamps(car: &Car, source: &SnapshotFact) -> BTreeMap<String, String> {
    let mut summary = BTreeMap::new();
    summary.insert(SOURCE_SNAPSHOT_ID.to_owned(), source.id.to_string());
    summary.insert(REQUEST_KEY.to_owned(), car.request.to_string());
    if let Some(wap) = source.summary.get(WAP_ID).filter(|wap| !wap.is_empty()) {
        summary.insert(PUBLISHED_WAP_ID.to_owned(), wap.clone());
    }
    summary
}
