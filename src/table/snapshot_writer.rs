//! Writes the snapshots that the target may become: a chain on a head, none of it committed yet.
//!
//! Owns sequence numbers (N1), timestamps (N3), manifests (N4, D8, L9) and summaries of candidates. What
//! a snapshot adds goes into new manifests, one a partition spec; a manifest that holds a removed file is
//! rewritten; every other manifest of the parent is named again as it is, delete manifests included.
//! Every manifest written enters the store's cache, so the next car of the chain reads nothing.
//!
//! Each path is live once (rule D6). Looking for a path in every manifest would cost a scan of the table a
//! car, so the writer refuses only what it knows: paths that the chain itself added or removed, and paths
//! that the caller names by [`SnapshotWriter::take_paths`] (the classification has read them already).
//!
//! Absent on purpose: row-level delete files (refused above, carried unchanged here), format v1 (the
//! metadata loses its refs) and format v3 (row ids, rule N2).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use iceberg::spec::{DataFile, FormatVersion, ManifestContentType, ManifestListWriter, ManifestStatus};
use mergeberg_kernel::change::FileFact;
use mergeberg_kernel::commit::NewSnapshot;
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{SchemaId, SnapshotId, SpecId};
use mergeberg_kernel::lineage::{SnapshotFact, SnapshotGraph};
use tokio::runtime::Handle;

use super::cleanup::WrittenFiles;
use super::data_files::NewDataFile;
use super::error::TableError;
use super::loaded::LoadedTable;
use super::manifest_codec::Entry;
use super::manifest_merge::MergeSettings;
use super::manifest_rewrite::{Author, ManifestMaker};
use super::manifests::{LiveFile, ManifestFiles, ManifestStore, TableAccess, has_live_files};
use super::snapshot_summary;

/// Manifest lists written at the same time.
const PARALLEL_WRITES: usize = 8;
/// A new manifest holds at most this many files; more go into further ones, encoded in parallel.
const MAX_FILES_PER_MANIFEST: usize = 5_000;
/// Draws before a free snapshot id is counted up to.
const MAX_ID_DRAWS: usize = 16;
/// Table property that moves metadata elsewhere.
const METADATA_PATH: &str = "write.metadata.path";
/// Number of the attempt in the names of manifest lists: a writer makes each snapshot once.
const ATTEMPT: u32 = 1;
/// Labels that the table spec knows.
const LABELS: [&str; 4] = ["append", "overwrite", "replace", "delete"];

/// A data file to add.
#[derive(Clone, Debug)]
pub struct AddedFile {
    pub fact: FileFact,
    pub file: Arc<DataFile>,
    pub spec_id: SpecId,
    /// Data sequence number to keep (rule D4); `None` inherits the snapshot's, as every plain append must.
    pub sequence_number: Option<i64>,
}

impl From<NewDataFile> for AddedFile {
    fn from(file: NewDataFile) -> Self {
        let NewDataFile { fact, file, spec_id } = file;
        Self { fact, file, spec_id, sequence_number: None }
    }
}

/// Re-adding a file of another branch: it takes a new sequence number (rule D3).
impl From<LiveFile> for AddedFile {
    fn from(live: LiveFile) -> Self {
        Self { fact: live.fact, file: live.file, spec_id: live.spec_id, sequence_number: None }
    }
}

/// One snapshot to write.
#[derive(Clone, Debug)]
pub struct SnapshotChange {
    pub id: SnapshotId,
    /// `append`, `overwrite`, `replace` or `delete`.
    pub label: String,
    pub add: Vec<AddedFile>,
    /// Paths of data files to remove; each must be live on the parent.
    pub remove: BTreeSet<Arc<str>>,
    /// The caller's keys (`source-snapshot-id` and others); figures are computed here.
    pub summary: BTreeMap<String, String>,
    pub now_ms: i64,
    pub schema_id: SchemaId,
}

/// The snapshot that the next one is built upon.
#[derive(Clone)]
struct Head {
    snapshot: Option<SnapshotId>,
    sequence_number: i64,
    timestamp_ms: i64,
    /// Data manifests, newest first, then delete manifests.
    data: ManifestFiles,
    deletes: ManifestFiles,
    /// `None` before the first snapshot.
    summary: Option<BTreeMap<String, String>>,
}

/// A running head of a chain of candidates that are not committed.
pub struct SnapshotWriter {
    maker: ManifestMaker,
    /// Snapshots of the table, whose ids are taken.
    existing: SnapshotGraph,
    head: Head,
    /// Paths that may not be added (rule D6).
    taken: HashSet<Arc<str>>,
    first_sequence_number: i64,
    snapshots: Vec<SnapshotId>,
    lists: Vec<String>,
}

/// One change on its way to a manifest list.
struct Car {
    change: SnapshotChange,
    sequence_number: i64,
    timestamp_ms: i64,
    /// Manifests of the added files.
    new: ManifestFiles,
}

impl Car {
    fn author(&self) -> Author {
        Author { snapshot: self.change.id, sequence_number: self.sequence_number }
    }
}

/// A manifest list to be written.
struct ListPlan {
    path: String,
    snapshot: SnapshotId,
    parent: Option<SnapshotId>,
    sequence_number: i64,
    manifests: ManifestFiles,
}

impl SnapshotWriter {
    /// Starts a chain on `parent`; `None` is the first publish of an empty table.
    pub async fn on(
        store: &ManifestStore,
        table: &LoadedTable,
        parent: Option<&SnapshotFact>,
    ) -> Result<Self, TableError> {
        match table.metadata.format_version() {
            FormatVersion::V2 => {}
            FormatVersion::V1 => {
                return Err(TableError::Unsupported(format!(
                    "{} is of format version 1, whose branches would be lost by writing; upgrade it to 2",
                    table.facts.name
                )));
            }
            FormatVersion::V3 => {
                return Err(TableError::Unsupported(format!(
                    "{} is of format version 3, whose row ids this release does not assign; it is not \
                     written to",
                    table.facts.name
                )));
            }
        }
        let access = TableAccess::of(table);
        let list = match parent {
            Some(parent) => store.list(&access, &parent.manifest_list).await?,
            None => Arc::default(),
        };
        let (data, deletes) =
            list.iter().cloned().partition(|manifest| manifest.content == ManifestContentType::Data);
        let facts = &table.facts;
        let head = Head {
            snapshot: parent.map(|p| p.id),
            // Rule N1: builders skip the check for a first publish, so it is not left to them.
            sequence_number: facts.last_sequence_number.max(parent.map_or(0, |p| p.sequence_number)),
            timestamp_ms: facts.last_updated_ms.max(parent.map_or(0, |p| p.timestamp_ms)),
            data,
            deletes,
            summary: parent.map(|p| p.summary.clone()),
        };
        Ok(Self {
            first_sequence_number: head.sequence_number + 1,
            existing: facts.snapshots.clone(),
            maker: ManifestMaker::new(store.clone(), access, metadata_path(facts), MergeSettings::of(facts)),
            head,
            taken: HashSet::new(),
            snapshots: Vec::new(),
            lists: Vec::new(),
        })
    }

    /// Names paths that must not be added: the caller knows them to be live on the target, or to have been
    /// removed from it (rule D6).
    pub fn take_paths(&mut self, paths: impl IntoIterator<Item = Arc<str>>) {
        self.taken.extend(paths);
    }

    /// The last snapshot written, or the parent of the chain.
    pub fn head(&self) -> Option<SnapshotId> {
        self.head.snapshot
    }

    /// Everything that this writer has written and not deleted itself, also by calls that failed.
    pub fn written_files(&self) -> WrittenFiles {
        WrittenFiles {
            first_sequence_number: self.first_sequence_number,
            snapshots: self.snapshots.clone(),
            manifest_lists: self.lists.clone(),
            manifests: self.maker.written.clone(),
            data_files: Vec::new(),
        }
    }

    /// Writes one snapshot on the head and moves the head to it. When it fails, the head stays. A train is
    /// better given to [`Self::add_all`] as a whole: two writes that wait for the disk are what a car costs.
    pub async fn add(&mut self, change: SnapshotChange) -> Result<NewSnapshot, TableError> {
        self.add_all(vec![change])
            .await?
            .pop()
            .ok_or_else(|| TableError::Internal("one change gave no snapshot".to_owned()))
    }

    /// Writes a train: as [`Self::add`] for each change in order, with the files of all of them written in
    /// parallel. All or nothing: when one fails, the head stays where it was.
    pub async fn add_all(&mut self, changes: Vec<SnapshotChange>) -> Result<Vec<NewSnapshot>, TableError> {
        let before = self.head.clone();
        let mut newly_taken = Vec::new();
        let result = self.write_train(changes, &mut newly_taken).await;
        if result.is_err() {
            self.head = before;
            for path in newly_taken {
                self.taken.remove(&path);
            }
        }
        result
    }

    async fn write_train(
        &mut self,
        changes: Vec<SnapshotChange>,
        newly_taken: &mut Vec<Arc<str>>,
    ) -> Result<Vec<NewSnapshot>, TableError> {
        let mut cars = self.number(changes, newly_taken)?;
        self.write_added(&mut cars).await?;
        let mut snapshots = Vec::with_capacity(cars.len());
        let mut lists = Vec::with_capacity(cars.len());
        for car in cars {
            let (snapshot, list) = self.couple(car).await?;
            snapshots.push(snapshot);
            lists.push(list);
        }
        self.lists.extend(lists.iter().map(|list| list.path.clone()));
        self.snapshots.extend(lists.iter().map(|list| list.snapshot));
        let (store, access) = (&self.maker.store, &self.maker.access);
        let writes = lists.into_iter().map(|list| write_list(store, access, list));
        stream::iter(writes).buffered(PARALLEL_WRITES).try_collect::<Vec<()>>().await?;
        Ok(snapshots)
    }

    /// Checks the changes and gives each its sequence number and timestamp.
    fn number(
        &mut self,
        changes: Vec<SnapshotChange>,
        newly_taken: &mut Vec<Arc<str>>,
    ) -> Result<Vec<Car>, TableError> {
        let mut cars: Vec<Car> = Vec::with_capacity(changes.len());
        let (mut last_sequence, mut last_ms) = (self.head.sequence_number, self.head.timestamp_ms);
        for change in changes {
            let known = self.existing.contains(change.id)
                || self.snapshots.contains(&change.id)
                || cars.iter().any(|car| car.change.id == change.id);
            check(&change, known)?;
            for path in change.add.iter().map(|file| &file.fact.path) {
                if change.remove.contains(path) || !self.taken.insert(path.clone()) {
                    return Err(TableError::PathTaken { snapshot: change.id, path: path.to_string() });
                }
                newly_taken.push(path.clone());
            }
            for path in &change.remove {
                if self.taken.insert(path.clone()) {
                    newly_taken.push(path.clone());
                }
            }
            last_sequence += 1;
            // Rule N3: never older than the parent or the metadata.
            last_ms = change.now_ms.max(last_ms.saturating_add(1));
            if let Some(file) =
                change.add.iter().find(|f| f.sequence_number.is_some_and(|n| n < 0 || n > last_sequence))
            {
                let message = format!("{} is to keep a sequence number of the future", file.fact.path);
                return Err(TableError::InvalidChange { snapshot: change.id, message });
            }
            cars.push(Car { change, sequence_number: last_sequence, timestamp_ms: last_ms, new: vec![] });
        }
        Ok(cars)
    }

    /// Writes the manifests of the files that the cars add.
    async fn write_added(&mut self, cars: &mut [Car]) -> Result<(), TableError> {
        let mut plans = Vec::new();
        let mut owners = Vec::new();
        for (at, car) in cars.iter().enumerate() {
            let mut by_spec: BTreeMap<SpecId, Vec<Entry>> = BTreeMap::new();
            for added in &car.change.add {
                by_spec.entry(added.spec_id).or_default().push(Entry {
                    status: ManifestStatus::Added,
                    snapshot: car.change.id,
                    sequence_number: added.sequence_number.unwrap_or(car.sequence_number),
                    file_sequence_number: car.sequence_number,
                    fact: added.fact.clone(),
                    file: added.file.clone(),
                });
            }
            for (spec_id, entries) in by_spec {
                for chunk in entries.chunks(MAX_FILES_PER_MANIFEST) {
                    plans.push(self.maker.plan(car.author(), spec_id, chunk.to_vec(), None)?);
                    owners.push(at);
                }
            }
        }
        let manifests = self.maker.write(plans).await?;
        for (at, manifest) in owners.into_iter().zip(manifests) {
            if let Some(car) = cars.get_mut(at) {
                car.new.push(manifest);
            }
        }
        Ok(())
    }

    /// Joins a car to the chain: rewrites what it removes, merges, and moves the head.
    async fn couple(&mut self, car: Car) -> Result<(NewSnapshot, ListPlan), TableError> {
        let author = car.author();
        let Car { change, sequence_number, timestamp_ms, new } = car;
        let (filtered, removed) = self.maker.without(self.head.data.clone(), &change.remove, author).await?;
        let mut data = new;
        // As Java does: a manifest without live files stays for the snapshot that emptied it, no longer.
        data.extend(filtered.into_iter().filter(|m| has_live_files(m) || m.added_snapshot_id == change.id.0));
        let data = self.maker.merged(data, author).await?;

        let added: Vec<FileFact> = change.add.into_iter().map(|file| file.fact).collect();
        let summary =
            snapshot_summary::summary(&change.summary, &added, &removed, self.head.summary.as_ref());
        let path = format!("{}/snap-{}-{ATTEMPT}-{}.avro", self.maker.folder, change.id, self.maker.run);
        let parent = self.head.snapshot;
        let mut manifests = data.clone();
        manifests.extend(self.head.deletes.iter().cloned());
        self.head.snapshot = Some(change.id);
        self.head.sequence_number = sequence_number;
        self.head.timestamp_ms = timestamp_ms;
        self.head.data = data;
        self.head.summary = Some(summary.clone());
        let snapshot = NewSnapshot {
            id: change.id,
            parent,
            sequence_number,
            timestamp_ms,
            manifest_list: path.clone(),
            schema_id: change.schema_id,
            label: change.label,
            summary,
        };
        let list = ListPlan { path, snapshot: change.id, parent, sequence_number, manifests };
        Ok((snapshot, list))
    }
}

fn check(change: &SnapshotChange, known: bool) -> Result<(), TableError> {
    let message = if known {
        "its id is taken".to_owned()
    } else if !LABELS.contains(&change.label.as_str()) {
        format!("'{}' is no operation of the table spec", change.label)
    } else {
        return Ok(());
    };
    Err(TableError::InvalidChange { snapshot: change.id, message })
}

async fn write_list(store: &ManifestStore, access: &TableAccess, list: ListPlan) -> Result<(), TableError> {
    let path = list.path.clone();
    let file_io = access.file_io.clone();
    let handle = Handle::current();
    let manifests = tokio::task::spawn_blocking(move || {
        let ListPlan { path, snapshot, parent, sequence_number, manifests } = list;
        let write = async {
            let output = file_io.new_output(&path)?.writer().await?;
            let mut writer =
                ManifestListWriter::v2(output, snapshot.0, parent.map(|id| id.0), sequence_number);
            writer.add_manifests(manifests.iter().map(|manifest| manifest.as_ref().clone()))?;
            writer.close().await
        };
        handle.block_on(write).map(|()| manifests).map_err(|e: iceberg::Error| TableError::of_write(&path, e))
    })
    .await
    .map_err(|e| TableError::of_join(&path, e))??;
    store.keep_list(&path, manifests);
    Ok(())
}

/// Folder of manifests and manifest lists.
fn metadata_path(facts: &TableFacts) -> String {
    match facts.properties.get(METADATA_PATH) {
        Some(path) => path.trim_end_matches('/').to_owned(),
        None => format!("{}/metadata", facts.location.trim_end_matches('/')),
    }
}

/// A snapshot id that the table does not have: positive, from `random`. Cars that are not committed are not
/// known here; the writer refuses an id that its own chain has.
pub fn new_snapshot_id(facts: &TableFacts, mut random: impl FnMut() -> u64) -> SnapshotId {
    // Clearing the sign bit leaves 63 bits, as Java does.
    let mut draw = || SnapshotId((random() & (u64::MAX >> 1)).cast_signed());
    let free = |id: &SnapshotId| id.0 > 0 && !facts.snapshots.contains(*id);
    let mut id = draw();
    for _ in 1..MAX_ID_DRAWS {
        if free(&id) {
            return id;
        }
        id = draw();
    }
    // The table has fewer snapshots than there are ids, so counting up ends.
    while !free(&id) {
        id = SnapshotId(id.0.checked_add(1).unwrap_or(1));
    }
    id
}

#[cfg(test)]
#[path = "snapshot_writer_tests.rs"]
mod tests;
