//! What snapshots did and what is live in them, read from manifests.
//!
//! Manifests and manifest lists never change once written, so they are cached by path, decoded, bounded
//! by bytes. Nothing here looks at summaries but for the record and the label (design, promise 5).
//!
//! Cost: [`ManifestStore::changes`] opens only the manifests that the snapshot itself wrote;
//! [`ManifestStore::live_files`] opens the manifests whose partition summaries do not exclude the scope.
//! Manifests are decoded in turn ([`super::manifest_room`]): what is held of a large table is what was asked for.
//! Absent on purpose: encrypted manifests (rule L7), refused by name.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures::stream::{self, Stream, StreamExt, TryStreamExt};
use iceberg::io::FileIO;
use iceberg::spec::{
    DataFile, FormatVersion, ManifestContentType, ManifestFile, ManifestList, ManifestStatus, PartitionSpec,
    TableMetadataRef, Transform,
};
use mergeberg_kernel::change::{ChangeSet, FileFact};
use mergeberg_kernel::ids::{SnapshotId, SpecId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::record::RecordFinding;
use uuid::Uuid;

use super::avro::encode::Templates;
use super::avro::encode_list::ListTemplates;
use super::avro::header_cache::HeaderCache;
use super::avro::{self, Unusual};
use super::error::TableError;
use super::file_copy;
use super::guard::guarded;
use super::key_range::KeyColumn;
use super::loaded::LoadedTable;
use super::local;
use super::manifest_cache::{BoundedCache, Kind};
use super::manifest_codec::{self, DecodedManifest, Entry};
use super::manifest_room::{DecodingRoom, Held, MAX_DECODING_BYTES, aside};
use super::partition_form::FixedForm;
use super::partition_values::{ScopeIndex, SpecProbes};
use super::row_ids;

/// Manifests read and decoded at the same time, for one question.
const PARALLEL_LOADS: usize = 8;
/// Manifests of a snapshot that are decoded at once, in bytes of their files; more of them wait for room.
const MAX_BYTES_AT_ONCE: i64 = 64 * 1024;
/// Weight of reading one source, a list and a manifest of a few files, beside others of its group.
const READ_WEIGHT: usize = 40;
/// Memory of one entry of a manifest list, in bytes; an estimate that errs upwards.
const LIST_ENTRY_BYTES: usize = 600;
/// Memory of one file in a change set, in bytes.
const CHANGE_BYTES: usize = 200;

/// Summary key of an engine that replaced whole partitions (Java: `SnapshotSummary.REPLACE_PARTITIONS_PROP`).
const REPLACES_PARTITIONS: &str = "replace-partitions";

/// Which files of a snapshot are asked for.
#[derive(Clone, Debug)]
pub enum FileScope {
    Table,
    /// Files whose partition overlaps one of these (`Partition::overlaps`).
    Partitions(Vec<Arc<Partition>>),
}

/// A live file: its facts, where it came from, and the crate's description for reading or re-adding it.
#[derive(Clone, Debug)]
pub struct LiveFile {
    pub fact: FileFact,
    /// The snapshot that added the file.
    pub added_by: SnapshotId,
    /// Data sequence number: deletes with a lower one do not apply.
    pub sequence_number: i64,
    /// Sequence number of the snapshot that added the file.
    pub file_sequence_number: i64,
    /// Id of the first row (format v3), for a row that carries none of its own.
    pub first_row_id: Option<i64>,
    pub file: Arc<DataFile>,
    pub spec_id: SpecId,
}

#[derive(Clone, Debug, Default)]
pub struct LiveFiles {
    pub data: Vec<LiveFile>,
    /// Position deletes, equality deletes and deletion vectors.
    pub deletes: Vec<LiveFile>,
}

/// How often storage was read; what the cache answered does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ManifestCounts {
    pub lists_read: u64,
    pub manifests_read: u64,
}

/// What reading manifests needs of a table.
#[derive(Clone)]
pub(super) struct TableAccess {
    pub file_io: FileIO,
    pub metadata: TableMetadataRef,
}

impl TableAccess {
    pub fn of(table: &LoadedTable) -> Self {
        Self { file_io: table.file_io.clone(), metadata: table.metadata.clone() }
    }
}

/// A manifest list in memory; shared with the snapshot writer.
pub(super) type ManifestFiles = Vec<Arc<ManifestFile>>;

/// Reads and caches manifests of any number of tables. Cheap to clone; all clones share one cache.
#[derive(Clone)]
pub struct ManifestStore {
    shared: Arc<Shared>,
}

struct Shared {
    cache: BoundedCache,
    room: DecodingRoom,
    lists_read: AtomicU64,
    manifests_read: AtomicU64,
    headers: HeaderCache,
    /// `None`: all manifests and lists are written by the crate.
    templates: Option<(Arc<Templates>, Arc<ListTemplates>)>,
    /// By table uuid.
    fixed_forms: Mutex<HashMap<Uuid, FixedForm>>,
}

impl ManifestStore {
    /// `max_bytes` bounds the estimated memory of everything cached.
    pub fn new(max_bytes: usize) -> Self {
        Self::with_room(max_bytes, MAX_DECODING_BYTES)
    }

    /// The same with another bound of what is decoded at the same time, in bytes of manifest files.
    pub fn with_room(max_bytes: usize, max_decoding_bytes: u32) -> Self {
        let templates = Some((Arc::default(), Arc::default()));
        Self::with_templates(max_bytes, max_decoding_bytes, templates)
    }

    /// A store whose writers leave every file to the crate, as they do with what is unusual: to compare both.
    pub fn writing_by_the_crate(max_bytes: usize) -> Self {
        Self::with_templates(max_bytes, MAX_DECODING_BYTES, None)
    }

    fn with_templates(
        max_bytes: usize,
        max_decoding_bytes: u32,
        templates: Option<(Arc<Templates>, Arc<ListTemplates>)>,
    ) -> Self {
        Self {
            shared: Arc::new(Shared {
                cache: BoundedCache::new(max_bytes),
                room: DecodingRoom::new(max_decoding_bytes),
                lists_read: AtomicU64::new(0),
                manifests_read: AtomicU64::new(0),
                headers: HeaderCache::default(),
                templates,
                fixed_forms: Mutex::default(),
            }),
        }
    }

    /// Headers of the manifests that are written here; `None`: the crate writes them.
    pub(super) fn templates(&self) -> Option<&Arc<Templates>> {
        self.shared.templates.as_ref().map(|(manifests, _)| manifests)
    }

    /// The same of lists.
    pub(super) fn list_templates(&self) -> Option<&Arc<ListTemplates>> {
        self.shared.templates.as_ref().map(|(_, lists)| lists)
    }

    /// The most that was decoded and held at the same time, in bytes of manifest files; what the cache keeps does
    /// not count.
    pub fn most_decoding_bytes(&self) -> u64 {
        self.shared.room.most()
    }

    pub fn counts(&self) -> ManifestCounts {
        ManifestCounts {
            lists_read: self.shared.lists_read.load(Ordering::Relaxed),
            manifests_read: self.shared.manifests_read.load(Ordering::Relaxed),
        }
    }

    /// Estimated memory of everything cached, in bytes.
    pub fn cached_bytes(&self) -> usize {
        self.shared.cache.bytes()
    }

    /// What `snapshot` did, from the manifests that it wrote: entries that carry its id and are not
    /// EXISTING. An ADDED entry of an older snapshot in a rewritten manifest is not its work.
    pub async fn changes(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
    ) -> Result<Arc<ChangeSet>, TableError> {
        if let Some(known) = self.known_changes(snapshot) {
            return Ok(known);
        }
        let access = TableAccess::of(table);
        if local::path_of(&snapshot.manifest_list).is_some() {
            let (store, access, asked) = (self.clone(), access.clone(), snapshot.clone());
            let name = table.facts.name.clone();
            let now = move || store.changes_now(&access, &name, &asked);
            if let Some(change) = on_blocking_thread(&snapshot.manifest_list, now).await?? {
                return Ok(change);
            }
        }
        let own = self.written_by(&access, snapshot).await?;
        let mut change = no_change(snapshot, &table.facts.name);
        let mut decoded = pin!(self.in_turn(&access, &own));
        while let Some(held) = decoded.try_next().await? {
            change = aside(held, move |_, manifest| {
                add_changes(&mut change, manifest);
                Ok(change)
            })
            .await?;
        }
        Ok(self.keep_changes(snapshot, change))
    }

    /// Reads what these snapshots did into the cache. An error is met again, and told, by who asks for it.
    pub async fn read_ahead(&self, table: &LoadedTable, snapshots: impl IntoIterator<Item = &SnapshotFact>) {
        let unread = snapshots.into_iter().filter(|snapshot| self.known_changes(snapshot).is_none());
        let (here, mut rest): (Vec<_>, Vec<_>) =
            unread.cloned().partition(|snapshot| local::path_of(&snapshot.manifest_list).is_some());
        let reads = local::groups(here, |_| READ_WEIGHT).map(|group| {
            let (store, access, name) = (self.clone(), TableAccess::of(table), table.facts.name.clone());
            on_blocking_thread("sources", move || -> Vec<SnapshotFact> {
                let read_now = |snapshot: &SnapshotFact| store.changes_now(&access, &name, snapshot);
                group.into_iter().filter(|snapshot| matches!(read_now(snapshot), Ok(None))).collect()
            })
        });
        let left: Vec<_> = stream::iter(reads).buffer_unordered(PARALLEL_LOADS).collect().await;
        rest.extend(left.into_iter().flatten().flatten());
        stream::iter(&rest)
            .map(|snapshot| self.changes(table, snapshot))
            .buffer_unordered(PARALLEL_LOADS)
            .for_each(|_| std::future::ready(()))
            .await;
    }

    fn known_changes(&self, snapshot: &SnapshotFact) -> Option<Arc<ChangeSet>> {
        let known = self.shared.cache.get::<ChangeSet>(Kind::ChangeSet, &snapshot.manifest_list)?;
        (known.snapshot == snapshot.id).then_some(known)
    }

    fn keep_changes(&self, snapshot: &SnapshotFact, change: ChangeSet) -> Arc<ChangeSet> {
        let change = Arc::new(change);
        let files = change.added.len()
            + change.removed.len()
            + change.added_deletes.len()
            + change.removed_deletes.len();
        let bytes = (files + 1) * CHANGE_BYTES;
        self.shared.cache.put(Kind::ChangeSet, &snapshot.manifest_list, change.clone(), bytes);
        change
    }

    /// As [`Self::changes`], of a table on this machine, where the snapshot's manifests are few and small, as those
    /// of most sources are; `None` where they are not. Blocks.
    fn changes_now(
        &self,
        access: &TableAccess,
        table: &TableName,
        snapshot: &SnapshotFact,
    ) -> Result<Option<Arc<ChangeSet>>, TableError> {
        let list = self.list_now(access, &snapshot.manifest_list)?;
        let own: ManifestFiles =
            list.iter().filter(|m| m.added_snapshot_id == snapshot.id.0).cloned().collect();
        if own.iter().map(|m| m.manifest_length).sum::<i64>() > MAX_BYTES_AT_ONCE {
            return Ok(None);
        }
        let mut change = no_change(snapshot, table);
        for manifest in &own {
            add_changes(&mut change, self.manifest_now(access, manifest)?.as_ref());
        }
        Ok(Some(self.keep_changes(snapshot, change)))
    }

    /// The data files that `snapshot` added, in the order of its manifests.
    pub async fn added_files(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
    ) -> Result<Vec<LiveFile>, TableError> {
        Ok(self.added(table, snapshot).await?.data)
    }

    /// The data and delete files that `snapshot` added, in the order of its manifests.
    pub async fn added(&self, table: &LoadedTable, snapshot: &SnapshotFact) -> Result<LiveFiles, TableError> {
        let access = TableAccess::of(table);
        let own = self.written_by(&access, snapshot).await?;
        let id = snapshot.id;
        let mut added = LiveFiles::default();
        let mut decoded = pin!(self.in_turn(&access, &own));
        while let Some(held) = decoded.try_next().await? {
            let found = aside(held, move |file, manifest| {
                let ids = row_ids::first_row_ids(file, &manifest.entries)?;
                let entries = manifest.entries.iter().zip(ids);
                let added = entries.filter(|(e, _)| e.status == ManifestStatus::Added && e.snapshot == id);
                let added = added.map(|(entry, id)| live_file(entry, manifest.spec_id, id));
                Ok((manifest.content, added.collect::<Vec<_>>()))
            });
            match found.await? {
                (ManifestContentType::Data, mut files) => added.data.append(&mut files),
                (ManifestContentType::Deletes, mut files) => added.deletes.append(&mut files),
            }
        }
        Ok(added)
    }

    /// The files that are live in `snapshot` and lie in `scope`, without most of their statistics: of a large
    /// table they would be most of what is held.
    pub async fn live_files(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        scope: &FileScope,
    ) -> Result<LiveFiles, TableError> {
        self.live(table, snapshot, scope, Detail::ToRead(Vec::new())).await
    }

    /// The same with the bounds of these columns.
    pub async fn bounded_files(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        scope: &FileScope,
        columns: &[KeyColumn],
    ) -> Result<LiveFiles, TableError> {
        let ids = columns.iter().map(|column| column.id).collect();
        self.live(table, snapshot, scope, Detail::ToRead(ids)).await
    }

    /// The same with all statistics, for files that are to be described again in a manifest.
    pub async fn described_files(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        scope: &FileScope,
    ) -> Result<LiveFiles, TableError> {
        self.live(table, snapshot, scope, Detail::Whole).await
    }

    async fn live(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        scope: &FileScope,
        detail: Detail,
    ) -> Result<LiveFiles, TableError> {
        let access = TableAccess::of(table);
        let list = self.list(&access, &snapshot.manifest_list).await?;
        let wanted = may_hold(&access, &list, scope);
        let (scope, detail) = (Arc::new(scope.clone()), Arc::new(detail));
        let mut live = LiveFiles::default();
        let mut decoded = pin!(self.in_turn(&access, &wanted));
        while let Some(held) = decoded.try_next().await? {
            let (scope, metadata) = (Arc::clone(&scope), Arc::clone(&access.metadata));
            let detail = Arc::clone(&detail);
            let mut found = aside(held, move |file, manifest| {
                let mut found = files_in_scope(file, manifest, &scope)?;
                if let Detail::ToRead(bounded) = detail.as_ref() {
                    let spec = metadata.partition_spec_by_id(manifest.spec_id.0);
                    for file in &mut found {
                        file.file =
                            to_read(&file.file, spec.map(AsRef::as_ref), manifest.spec_id.0, bounded)?;
                    }
                }
                Ok((manifest.content, found))
            })
            .await?;
            match found.0 {
                ManifestContentType::Data => live.data.append(&mut found.1),
                ManifestContentType::Deletes => live.deletes.append(&mut found.1),
            }
        }
        Ok(live)
    }

    /// The manifests that the snapshot wrote, as listed.
    async fn written_by(
        &self,
        access: &TableAccess,
        snapshot: &SnapshotFact,
    ) -> Result<ManifestFiles, TableError> {
        let list = self.list(access, &snapshot.manifest_list).await?;
        Ok(list.iter().filter(|m| m.added_snapshot_id == snapshot.id.0).cloned().collect())
    }

    /// Partition specs under which a snapshot has live files. Reads its manifest list only.
    pub async fn live_specs(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
    ) -> Result<BTreeSet<SpecId>, TableError> {
        let list = self.list(&TableAccess::of(table), &snapshot.manifest_list).await?;
        let live = list.iter().filter(|manifest| has_live_files(manifest));
        Ok(live.map(|manifest| SpecId(manifest.partition_spec_id)).collect())
    }

    /// Paths of the manifests that a snapshot names.
    pub async fn manifest_paths(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
    ) -> Result<Vec<String>, TableError> {
        let list = self.list(&TableAccess::of(table), &snapshot.manifest_list).await?;
        Ok(list.iter().map(|manifest| manifest.manifest_path.clone()).collect())
    }

    /// The manifest list at `path`.
    pub(super) async fn list(
        &self,
        access: &TableAccess,
        path: &str,
    ) -> Result<Arc<ManifestFiles>, TableError> {
        if let Some(list) = self.shared.cache.get::<ManifestFiles>(Kind::List, path) {
            return Ok(list);
        }
        let (store, job, owned) = (self.clone(), access.clone(), path.to_owned());
        if local::path_of(path).is_some() {
            return on_blocking_thread(path, move || store.list_now(&job, &owned)).await?;
        }
        let bytes = read(&access.file_io, path).await?;
        on_blocking_thread(path, move || store.decoded_list(&job, &owned, bytes.as_ref())).await?
    }

    /// As [`Self::list`], of a table on this machine. Blocks.
    fn list_now(&self, access: &TableAccess, path: &str) -> Result<Arc<ManifestFiles>, TableError> {
        match self.shared.cache.get::<ManifestFiles>(Kind::List, path) {
            Some(list) => Ok(list),
            None => self.decoded_list(access, path, &local::read(path)?),
        }
    }

    fn decoded_list(
        &self,
        access: &TableAccess,
        path: &str,
        bytes: &[u8],
    ) -> Result<Arc<ManifestFiles>, TableError> {
        self.shared.lists_read.fetch_add(1, Ordering::Relaxed);
        let list = decode_list(path, bytes, access.metadata.format_version(), &self.shared.headers)?;
        Ok(self.keep_list(path, list))
    }

    /// Decoded manifests in the order of `files`, one after the other. Of these so many are in memory as there is
    /// room for: whoever holds one must not wait for another.
    pub(super) fn in_turn<'a>(
        &'a self,
        access: &'a TableAccess,
        files: &'a [Arc<ManifestFile>],
    ) -> impl Stream<Item = Result<Held, TableError>> + 'a {
        stream::iter(files.iter().cloned())
            .map(move |file| async move {
                if let Some(manifest) = self.cached_manifest(&file.manifest_path) {
                    return Ok(Held { file, manifest, _room: None });
                }
                let room = self.shared.room.wait(file.manifest_length).await?;
                let manifest = self.manifest(access, Arc::clone(&file)).await?;
                Ok(Held { file, manifest, _room: Some(room) })
            })
            .buffered(PARALLEL_LOADS)
    }

    /// Decoded manifests in the order of `files`, all of them held at once: for few.
    pub(super) async fn manifests(
        &self,
        access: &TableAccess,
        files: &[Arc<ManifestFile>],
    ) -> Result<Vec<Arc<DecodedManifest>>, TableError> {
        stream::iter(files.iter().cloned())
            .map(|file| self.manifest(access, file))
            .buffered(PARALLEL_LOADS)
            .try_collect()
            .await
    }

    async fn manifest(
        &self,
        access: &TableAccess,
        file: Arc<ManifestFile>,
    ) -> Result<Arc<DecodedManifest>, TableError> {
        let path = file.manifest_path.as_str();
        if let Some(manifest) = self.cached_manifest(path) {
            return Ok(manifest);
        }
        let (store, job, named) = (self.clone(), access.clone(), Arc::clone(&file));
        if local::path_of(path).is_some() {
            return on_blocking_thread(path, move || store.manifest_now(&job, &named)).await?;
        }
        refuse_encrypted(&file)?;
        let bytes = read(&access.file_io, path).await?;
        on_blocking_thread(path, move || store.decoded_manifest(&job, &named, bytes.as_ref())).await?
    }

    /// As [`Self::manifest`], of a table on this machine. Blocks.
    fn manifest_now(
        &self,
        access: &TableAccess,
        file: &ManifestFile,
    ) -> Result<Arc<DecodedManifest>, TableError> {
        if let Some(manifest) = self.cached_manifest(&file.manifest_path) {
            return Ok(manifest);
        }
        refuse_encrypted(file)?;
        self.decoded_manifest(access, file, &local::read(&file.manifest_path)?)
    }

    fn decoded_manifest(
        &self,
        access: &TableAccess,
        file: &ManifestFile,
        bytes: &[u8],
    ) -> Result<Arc<DecodedManifest>, TableError> {
        let path = file.manifest_path.as_str();
        let spec = access.metadata.partition_spec_by_id(file.partition_spec_id).ok_or_else(|| {
            TableError::corrupt(
                path,
                format!("partition spec {} is not in the table", file.partition_spec_id),
            )
        })?;
        self.shared.manifests_read.fetch_add(1, Ordering::Relaxed);
        let manifest = manifest_codec::decode(file, bytes, spec, &self.shared.headers)?;
        if let Some(form) = manifest.fixed {
            let mut forms = self.shared.fixed_forms.lock().unwrap_or_else(PoisonError::into_inner);
            let known = forms.entry(access.metadata.uuid()).or_insert(form);
            // Where Java writes, Java reads.
            if form == FixedForm::WithLength {
                *known = form;
            }
        }
        Ok(self.keep_manifest(path, manifest))
    }

    /// How a table's manifests have partition values of type `fixed`; `None` when none was read that has any.
    pub(super) fn fixed_form(&self, access: &TableAccess) -> Option<FixedForm> {
        let forms = self.shared.fixed_forms.lock().unwrap_or_else(PoisonError::into_inner);
        forms.get(&access.metadata.uuid()).copied()
    }

    pub(super) fn cached_manifest(&self, path: &str) -> Option<Arc<DecodedManifest>> {
        self.shared.cache.get(Kind::Manifest, path)
    }

    /// Takes over a manifest that was just read or written.
    pub(super) fn keep_manifest(&self, path: &str, manifest: DecodedManifest) -> Arc<DecodedManifest> {
        let bytes = manifest.bytes;
        let manifest = Arc::new(manifest);
        self.shared.cache.put(Kind::Manifest, path, manifest.clone(), bytes);
        manifest
    }

    /// Takes over a manifest list that was just read or written.
    pub(super) fn keep_list(&self, path: &str, list: ManifestFiles) -> Arc<ManifestFiles> {
        let bytes = (list.len() + 1) * LIST_ENTRY_BYTES;
        let list = Arc::new(list);
        self.shared.cache.put(Kind::List, path, list.clone(), bytes);
        list
    }

    /// Forgets a file that was deleted.
    pub(super) fn forget(&self, path: &str) {
        for kind in [Kind::List, Kind::Manifest, Kind::ChangeSet] {
            self.shared.cache.remove(kind, path);
        }
    }
}

fn refuse_encrypted(file: &ManifestFile) -> Result<(), TableError> {
    match file.key_metadata {
        None => Ok(()),
        Some(_) => Err(TableError::Unsupported(format!(
            "{} is encrypted, which this release does not read; decrypt the table first",
            file.manifest_path
        ))),
    }
}

async fn read(file_io: &FileIO, path: &str) -> Result<impl AsRef<[u8]> + Send + 'static, TableError> {
    let input = file_io.new_input(path).map_err(|e| TableError::io(path, e))?;
    match input.read().await {
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(TableError::of_read(file_io, path, error).await),
    }
}

/// Runs work that may take long on a thread of its own. `path` names what it works on.
pub(super) async fn on_blocking_thread<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TableError> {
    tokio::task::spawn_blocking(work).await.map_err(|e| TableError::of_join(path, e))
}

pub(super) fn decode_list(
    path: &str,
    bytes: &[u8],
    version: FormatVersion,
    headers: &HeaderCache,
) -> Result<ManifestFiles, TableError> {
    match avro::decode_list(bytes, headers) {
        Ok(list) => Ok(list.into_iter().map(Arc::new).collect()),
        Err(Unusual) => decode_unusual_list(path, bytes, version),
    }
}

/// As the crate reads it.
fn decode_unusual_list(
    path: &str,
    bytes: &[u8],
    version: FormatVersion,
) -> Result<ManifestFiles, TableError> {
    // A table that was upgraded keeps the lists of its old snapshots as they are.
    let older = [FormatVersion::V2, FormatVersion::V1].into_iter().filter(|older| *older < version);
    let read = |version| guarded(path, || ManifestList::parse_with_version(bytes, version));
    let list = match read(version) {
        Ok(list) => list,
        Err(error) => older.flat_map(read).next().ok_or(error)?,
    };
    Ok(list.consume_entries().into_iter().map(Arc::new).collect())
}

/// Manifests that may hold live files of the scope.
pub(super) fn may_hold(access: &TableAccess, list: &ManifestFiles, scope: &FileScope) -> ManifestFiles {
    let mut probes: Vec<(i32, SpecProbes)> = Vec::new();
    let mut wanted = Vec::new();
    for manifest in list {
        if !has_live_files(manifest) {
            continue;
        }
        let spec_id = manifest.partition_spec_id;
        if !probes.iter().any(|(id, _)| *id == spec_id) {
            let Some(spec) = access.metadata.partition_spec_by_id(spec_id) else {
                // Reading it names the fault.
                wanted.push(manifest.clone());
                continue;
            };
            let types = spec.partition_type(access.metadata.current_schema()).ok();
            probes.push((spec_id, SpecProbes::new(scope, spec, types.as_ref())));
        }
        if probes.iter().any(|(id, probe)| *id == spec_id && probe.may_hold(manifest)) {
            wanted.push(manifest.clone());
        }
    }
    wanted
}

/// Unknown counts are taken for non-zero (table spec, "Manifest Lists").
pub(super) fn has_live_files(manifest: &ManifestFile) -> bool {
    manifest.has_added_files() || manifest.has_existing_files()
}

fn live_file(entry: &Entry, spec_id: SpecId, first_row_id: Option<i64>) -> LiveFile {
    LiveFile {
        fact: entry.fact.clone(),
        added_by: entry.snapshot,
        sequence_number: entry.sequence_number,
        file_sequence_number: entry.file_sequence_number,
        first_row_id,
        file: entry.file.clone(),
        spec_id,
    }
}

/// Live files of a manifest in the scope.
fn files_in_scope(
    file: &ManifestFile,
    manifest: &DecodedManifest,
    scope: &FileScope,
) -> Result<Vec<LiveFile>, TableError> {
    let index = ScopeIndex::new(scope);
    // Asked once a partition, not once a file. Partitions of a manifest are interned.
    let inside: HashSet<*const Partition> =
        manifest.partitions.iter().filter(|p| index.contains(p)).map(Arc::as_ptr).collect();
    let ids = row_ids::first_row_ids(file, &manifest.entries)?;
    let live = manifest
        .entries
        .iter()
        .zip(ids)
        .filter(|(entry, _)| entry.is_live() && inside.contains(&Arc::as_ptr(&entry.fact.partition)));
    Ok(live.map(|(entry, id)| live_file(entry, manifest.spec_id, id)).collect())
}

/// What of a live file's description is given out.
enum Detail {
    /// What reading it needs, and bounds of the columns with these field ids.
    ToRead(Vec<i32>),
    Whole,
}

/// A description without the statistics that no reader asks for: only of identity partition columns it is asked
/// whether the file has them.
fn to_read(
    file: &Arc<DataFile>,
    spec: Option<&PartitionSpec>,
    spec_id: i32,
    bounded: &[i32],
) -> Result<Arc<DataFile>, TableError> {
    let statistics = [file.column_sizes(), file.null_value_counts(), file.nan_value_counts()];
    let bare = statistics.iter().all(|map| map.is_empty())
        && file.lower_bounds().is_empty()
        && file.upper_bounds().is_empty();
    if bare {
        return Ok(Arc::clone(file));
    }
    let identity: HashSet<i32> = spec
        .into_iter()
        .flat_map(PartitionSpec::fields)
        .filter(|field| field.transform == Transform::Identity)
        .map(|field| field.source_id)
        .collect();
    let asked = file.value_counts().iter().filter(|(id, _)| identity.contains(*id));
    let mut builder = file_copy::builder_of(file, spec_id);
    builder
        .column_sizes(HashMap::new())
        .value_counts(asked.map(|(id, count)| (*id, *count)).collect())
        .null_value_counts(only(file.null_value_counts(), bounded))
        .nan_value_counts(HashMap::new())
        .lower_bounds(only(file.lower_bounds(), bounded))
        .upper_bounds(only(file.upper_bounds(), bounded));
    Ok(Arc::new(file_copy::build(&builder, file)?))
}

fn only<T: Clone>(statistics: &HashMap<i32, T>, ids: &[i32]) -> HashMap<i32, T> {
    ids.iter().filter_map(|id| Some((*id, statistics.get(id)?.clone()))).collect()
}

/// The change set of a snapshot of which no manifest was read yet.
fn no_change(snapshot: &SnapshotFact, table: &TableName) -> ChangeSet {
    ChangeSet {
        snapshot: snapshot.id,
        schema_id: snapshot.schema_id,
        label: snapshot.label.clone(),
        record: RecordFinding::of_summary(&snapshot.summary, table),
        replaces_partitions: snapshot.summary.get(REPLACES_PARTITIONS).is_some_and(|said| said == "true"),
        added: Vec::new(),
        removed: Vec::new(),
        added_deletes: Vec::new(),
        removed_deletes: Vec::new(),
    }
}

fn add_changes(change: &mut ChangeSet, manifest: &DecodedManifest) {
    let snapshot = change.snapshot;
    for entry in manifest.entries.iter().filter(|e| e.snapshot == snapshot) {
        let files = match (manifest.content, entry.status) {
            (_, ManifestStatus::Existing) => continue,
            (ManifestContentType::Data, ManifestStatus::Added) => &mut change.added,
            (ManifestContentType::Data, ManifestStatus::Deleted) => &mut change.removed,
            (ManifestContentType::Deletes, ManifestStatus::Added) => &mut change.added_deletes,
            (ManifestContentType::Deletes, ManifestStatus::Deleted) => &mut change.removed_deletes,
        };
        files.push(entry.fact.clone());
    }
}

#[cfg(test)]
#[path = "damage_tests.rs"]
mod damage_tests;
#[cfg(test)]
#[path = "manifests_tests.rs"]
mod tests;
