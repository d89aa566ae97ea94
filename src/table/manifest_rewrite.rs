//! Manifests of one chain of candidates: new ones, rewritten ones, merged ones; of data and of delete files
//! alike, which never share a manifest.
//!
//! A manifest that holds a removed file is written again (rules N4, D8); small ones are merged at the
//! table's thresholds (rule L9). Rows keep the ids that they have (rule N2). Every manifest written enters the store's cache in its decoded form.
//! What the files are, and in which order snapshots follow, the snapshot writer decides.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::pin::pin;
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use iceberg::spec::{FormatVersion, ManifestContentType, ManifestFile, ManifestStatus};
use mergeberg_kernel::change::{DeleteKey, FileContent, FileFact};
use mergeberg_kernel::ids::{SnapshotId, SpecId};
use mergeberg_kernel::partition::Partition;
use uuid::Uuid;

use super::course::{FileKind, FileNotes};
use super::error::TableError;
use super::local;
use super::manifest_codec::{self, DecodedManifest, Entry, ManifestPlan};
use super::manifest_merge::{self, MergeSettings, MergeStep, carried_over, file_count};
use super::manifests::{
    FileScope, ManifestFiles, ManifestStore, TableAccess, has_live_files, may_hold, on_blocking_thread,
};
use super::partition_form::{self, FixedForm};
use super::row_ids;
use super::snapshot_change::SnapshotChange;

/// Manifests written at the same time.
const PARALLEL_WRITES: usize = 8;
/// Manifests that are written again at the same time hold at most so many files; a larger one is by itself.
const REWRITTEN_FILES: u64 = 20_000;

/// The snapshot that manifests are written for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Author {
    pub snapshot: SnapshotId,
    pub sequence_number: i64,
}

pub(super) struct ManifestMaker {
    pub store: ManifestStore,
    pub access: TableAccess,
    /// Folder of manifests and manifest lists.
    pub folder: String,
    pub merging: MergeSettings,
    /// Makes the names of one chain unique.
    pub run: Uuid,
    /// Manifests written and not deleted again.
    pub written: Vec<String>,
    /// Who is told of files before they are written.
    pub notes: Option<FileNotes>,
    named: usize,
}

impl ManifestMaker {
    pub fn new(store: ManifestStore, access: TableAccess, folder: String, merging: MergeSettings) -> Self {
        let run = Uuid::new_v4();
        Self { store, access, folder, merging, run, written: Vec::new(), notes: None, named: 0 }
    }

    /// `manifests` without the files of `remove`, and those files. Each must be live.
    pub async fn without(
        &mut self,
        mut manifests: ManifestFiles,
        remove: &BTreeSet<DeleteKey>,
        author: Author,
    ) -> Result<(ManifestFiles, Vec<FileFact>), TableError> {
        if remove.is_empty() {
            return Ok((manifests, Vec::new()));
        }
        let holders = self.find(remove, &manifests, author.snapshot).await?;
        let mut removed = Vec::new();
        let mut rest = holders.as_slice();
        while !rest.is_empty() {
            let (some, after) = rest.split_at(few(rest, &manifests));
            rest = after;
            let files: ManifestFiles = some.iter().map(|at| manifests[*at].clone()).collect();
            let decoded = self.store.manifests(&self.access, &files).await?;
            let mut plans = Vec::with_capacity(some.len());
            for (file, manifest) in files.iter().zip(decoded) {
                let (held, wanted, listed) = (manifest.clone(), remove.clone(), file.clone());
                let (entries, gone) = on_blocking_thread(&file.manifest_path, move || {
                    let entries = row_ids::resolved(&listed, &held.entries, author)?;
                    Ok::<_, TableError>(split(entries, &wanted, author.snapshot))
                })
                .await??;
                removed.extend(gone);
                let kind = (manifest.content, manifest.spec_id);
                plans.push(self.plan(author, kind, entries, Some(manifest.as_ref()))?);
            }
            let rewritten = self.write(plans).await?;
            for (at, manifest) in some.iter().zip(rewritten) {
                manifests[*at] = manifest;
            }
        }
        Ok((manifests, removed))
    }

    /// Delete manifests without what the change removes from them, vectors of removed data files included
    /// (rule D5), and the delete files that went. A vector that would come beside one that stays is refused.
    pub async fn without_deletes(
        &mut self,
        deletes: ManifestFiles,
        change: &SnapshotChange,
        removed_data: &[FileFact],
        author: Author,
    ) -> Result<(ManifestFiles, Vec<FileFact>), TableError> {
        let gone = removed_data.iter().map(|file| (&file.path, &file.partition));
        let dangling = self.vectors_of(gone, &deletes).await?;
        let mut remove = change.remove_deletes.clone();
        remove.extend(dangling.iter().map(FileFact::key));
        let (deletes, removed) = self.without(deletes, &remove, author).await?;

        let vectors = change.add_deletes.iter().filter_map(|file| match &file.fact.content {
            FileContent::DeletionVector { of, offset: _ } => Some((of, &file.fact.partition)),
            FileContent::Data | FileContent::PositionDeletes { .. } | FileContent::EqualityDeletes { .. } => {
                None
            }
        });
        if let Some(other) = self.vectors_of(vectors, &deletes).await?.first() {
            let of = other.deletes_rows_of().map_or("a data file", AsRef::as_ref);
            let message = format!("{of} would have two deletion vectors, {} is live", other.key());
            return Err(TableError::InvalidChange { snapshot: change.id, message });
        }
        Ok((deletes, removed))
    }

    /// Live deletion vectors of these data files (rule D5). Vectors lie in the partition of their data file
    /// (table spec, "Deletion Vectors"), so manifests of other partitions are not opened.
    async fn vectors_of<'a>(
        &self,
        data_files: impl Iterator<Item = (&'a Arc<str>, &'a Arc<Partition>)>,
        deletes: &ManifestFiles,
    ) -> Result<Vec<FileFact>, TableError> {
        if self.access.metadata.format_version() < FormatVersion::V3 || deletes.is_empty() {
            return Ok(Vec::new());
        }
        let (paths, partitions): (HashSet<&Arc<str>>, BTreeSet<&Arc<Partition>>) = data_files.unzip();
        if paths.is_empty() {
            return Ok(Vec::new());
        }
        let scope = FileScope::Partitions(partitions.into_iter().cloned().collect());
        let wanted = may_hold(&self.access, deletes, &scope);
        let mut vectors = Vec::new();
        let mut decoded = pin!(self.store.in_turn(&self.access, &wanted));
        while let Some(held) = decoded.try_next().await? {
            for entry in held.manifest.entries.iter().filter(|entry| entry.is_live()) {
                if let FileContent::DeletionVector { of, offset: _ } = &entry.fact.content
                    && paths.contains(of)
                {
                    vectors.push(entry.fact.clone());
                }
            }
        }
        Ok(vectors)
    }

    /// Positions of the manifests that hold the files to remove, ascending. What is in the cache is asked
    /// first: usually the classification has read exactly these. As each path is live once, the search
    /// ends with the last of them.
    async fn find(
        &self,
        remove: &BTreeSet<DeleteKey>,
        manifests: &[Arc<ManifestFile>],
        snapshot: SnapshotId,
    ) -> Result<Vec<usize>, TableError> {
        let mut missing: HashSet<DeleteKey> = remove.iter().cloned().collect();
        let mut holders: BTreeSet<usize> = BTreeSet::new();
        let mut look = |at: usize, manifest: &DecodedManifest, missing: &mut HashSet<DeleteKey>| {
            let wanted = missing.len();
            missing.retain(|file| !manifest.holds_live(file));
            if missing.len() < wanted {
                holders.insert(at);
            }
        };
        let mut unread = Vec::new();
        for (at, file) in manifests.iter().enumerate().filter(|(_, file)| has_live_files(file)) {
            if missing.is_empty() {
                break;
            }
            match self.store.cached_manifest(&file.manifest_path) {
                Some(manifest) => look(at, &manifest, &mut missing),
                None => unread.push(at),
            }
        }
        let files: ManifestFiles = unread.iter().map(|at| manifests[*at].clone()).collect();
        let mut decoded = pin!(self.store.in_turn(&self.access, &files));
        for at in unread {
            if missing.is_empty() {
                break;
            }
            let Some(held) = decoded.try_next().await? else { break };
            look(at, &held.manifest, &mut missing);
        }
        if let Some(file) = missing.iter().min() {
            return Err(TableError::NotLive { snapshot, path: file.to_string(), more: missing.len() - 1 });
        }
        Ok(holders.into_iter().collect())
    }

    /// Merges manifests of one content at the table's thresholds (rule L9).
    pub async fn merged(
        &mut self,
        manifests: ManifestFiles,
        author: Author,
    ) -> Result<ManifestFiles, TableError> {
        let mut merged = Vec::with_capacity(manifests.len());
        for step in manifest_merge::plan(&manifests, &self.merging) {
            let bin = match step {
                MergeStep::Keep(at) => {
                    merged.push(manifests[at].clone());
                    continue;
                }
                MergeStep::Merge(bin) => bin,
            };
            let files: ManifestFiles = bin.iter().map(|at| manifests[*at].clone()).collect();
            let decoded = self.store.manifests(&self.access, &files).await?;
            let newest = decoded.first().cloned();
            let listed = files.clone();
            let entries = on_blocking_thread(&files[0].manifest_path, move || {
                let mut entries = Vec::new();
                for (file, manifest) in listed.iter().zip(&decoded) {
                    let resolved = row_ids::resolved(file, &manifest.entries, author)?;
                    let carried = resolved.iter().filter_map(|e| carried_over(e, author.snapshot));
                    entries.extend(carried);
                }
                Ok::<_, TableError>(entries)
            })
            .await??;
            let kind = (files[0].content, SpecId(files[0].partition_spec_id));
            // Files of one spec whose partition values differ in type (a promoted column) share no header.
            let Ok(plan) = self.plan(author, kind, entries, newest.as_deref()) else {
                merged.extend(files);
                continue;
            };
            merged.extend(self.write(vec![plan]).await?);
            self.drop_superseded(&files, author.snapshot).await;
        }
        Ok(merged)
    }

    /// Deletes manifests that this snapshot wrote and that a merge has replaced: no list names them (rule
    /// R8). One that cannot be deleted stays in `written`.
    async fn drop_superseded(&mut self, files: &[Arc<ManifestFile>], snapshot: SnapshotId) {
        for file in files.iter().filter(|file| file.added_snapshot_id == snapshot.0) {
            if self.access.file_io.delete(&file.manifest_path).await.is_ok() {
                self.store.forget(&file.manifest_path);
                self.written.retain(|path| *path != file.manifest_path);
            }
        }
    }

    /// A manifest to write, of this content and spec. `own` is the manifest that the entries come from,
    /// whose header fits them.
    pub fn plan(
        &mut self,
        author: Author,
        (content, spec_id): (ManifestContentType, SpecId),
        entries: Vec<Entry>,
        own: Option<&DecodedManifest>,
    ) -> Result<ManifestPlan, TableError> {
        let Author { snapshot, sequence_number } = author;
        let invalid = |message: String| TableError::InvalidChange { snapshot, message };
        let metadata = &self.access.metadata;
        let spec = metadata
            .partition_spec_by_id(spec_id.0)
            .ok_or_else(|| invalid(format!("partition spec {spec_id} is not in the table")))?;
        let mut by_partition = HashMap::new();
        for entry in &entries {
            by_partition.entry(Arc::as_ptr(&entry.fact.partition)).or_insert(entry.file.partition());
        }
        let tuples = by_partition.values().copied();
        let schema = manifest_codec::header_schema(metadata, spec, own.map(|m| &m.schema), tuples)
            .ok_or_else(|| {
                invalid(format!("no schema of the table fits the partition values under spec {spec_id}"))
            })?;
        let values = || by_partition.values().copied();
        let types = manifest_codec::partition_type(spec, &schema);
        let fixed = match self.store.fixed_form(&self.access) {
            Some(form) => form,
            None if types.is_none_or(|types| partition_form::holds_fixed(&types, values())) => {
                return Err(TableError::Unsupported(
                    "how this table's manifests have partition values of type fixed is not known".to_owned(),
                ));
            }
            // All are null, or of other types.
            None => FixedForm::Plain,
        };
        let path = format!("{}/{}-m{}.avro", self.folder, self.run, self.named);
        self.named += 1;
        let version = metadata.format_version();
        let spec = spec.clone();
        Ok(ManifestPlan { path, version, content, snapshot, sequence_number, spec, schema, entries, fixed })
    }

    /// Writes manifests in parallel; list entries in the order of `plans`.
    pub async fn write(&mut self, plans: Vec<ManifestPlan>) -> Result<ManifestFiles, TableError> {
        // Noted before the write: a write that fails may have left something behind.
        self.written.extend(plans.iter().map(|plan| plan.path.clone()));
        if let Some(notes) = self.notes.as_ref().filter(|_| !plans.is_empty()) {
            let paths = plans.iter().map(|plan| Arc::from(plan.path.as_str())).collect();
            notes(FileKind::Manifest, paths).await?;
        }
        let file_io = &self.access.file_io;
        let templates = self.store.templates();
        let groups: Vec<Vec<ManifestPlan>> = match (local::path_of(&self.folder), templates) {
            (Some(_), Some(_)) => local::groups(plans, |plan| plan.entries.len()).collect(),
            // Each waits for an answer of its own, or takes the crate longer than the way to another thread.
            (None, _) | (_, None) => plans.into_iter().map(|plan| vec![plan]).collect(),
        };
        let writes =
            groups.into_iter().map(|group| manifest_codec::write(file_io.clone(), templates.cloned(), group));
        // All are waited for: a thread goes on writing when nobody waits for it, and who deletes what was written after
        // a failure must not come before that.
        let results: Vec<Result<Vec<manifest_codec::Written>, TableError>> =
            stream::iter(writes).buffered(PARALLEL_WRITES).collect().await;
        let written = results.into_iter().collect::<Result<Vec<_>, _>>()?;
        let mut manifests = Vec::new();
        for (file, decoded) in written.into_iter().flatten() {
            self.store.keep_manifest(&file.manifest_path, decoded);
            manifests.push(Arc::new(file));
        }
        Ok(manifests)
    }
}

/// How many of the first `holders` are written again at the same time: one at least.
fn few(holders: &[usize], manifests: &[Arc<ManifestFile>]) -> usize {
    let mut files = 0_u64;
    let fits = holders.iter().take(PARALLEL_WRITES).take_while(|at| {
        files = files.saturating_add(manifests.get(**at).map_or(0, |manifest| file_count(manifest)));
        files <= REWRITTEN_FILES
    });
    fits.count().max(1)
}

/// The entries of a manifest without the files of `remove`: those are DELETED by `snapshot`, the others
/// EXISTING with the numbers they have. And the facts of the files removed.
fn split(
    mut entries: Vec<Entry>,
    remove: &BTreeSet<DeleteKey>,
    snapshot: SnapshotId,
) -> (Vec<Entry>, Vec<FileFact>) {
    let mut removed = Vec::new();
    // Rule D8: entries that are DELETED already are left out, or their rows come back.
    entries.retain(Entry::is_live);
    for entry in &mut entries {
        if remove.contains(&entry.fact.key()) {
            removed.push(entry.fact.clone());
            entry.status = ManifestStatus::Deleted;
            entry.snapshot = snapshot;
        } else {
            entry.status = ManifestStatus::Existing;
        }
    }
    (entries, removed)
}
