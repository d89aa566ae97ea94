//! Existence and deletion of files (rules R8 and R10).
//!
//! Deletes only what this queue wrote and reports by name, and only after the table as it is now was
//! asked: as long as any snapshot in it names one of the files, nothing is deleted. Whether a candidate
//! that is not in the catalog shares a file, only the caller knows.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::lineage::SnapshotFact;
use serde::{Deserialize, Serialize};

use super::error::TableError;
use super::loaded::LoadedTable;
use super::local;
use super::manifests::{ManifestFiles, ManifestStore, TableAccess, on_blocking_thread};

/// Requests to storage that are open at the same time.
const PARALLEL_REQUESTS: usize = 16;
/// Table property that forbids every deletion.
const GC_ENABLED: &str = "gc.enabled";

/// Files that this queue wrote for candidates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFiles {
    /// No snapshot below this sequence number can name one of the files (rule N1).
    pub first_sequence_number: i64,
    pub snapshots: Vec<SnapshotId>,
    pub manifest_lists: Vec<String>,
    pub manifests: Vec<String>,
    /// Data and delete files that were written for these candidates alone.
    pub data_files: Vec<Arc<str>>,
    /// What names them in the catalog until the candidates do (rule R10).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
}

/// Snapshots of nothing but files of a train that is not staged yet, under a branch of their own, so that no removal
/// of orphan files takes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    pub branch: RefName,
    pub first_sequence_number: i64,
    /// Oldest first; the branch is at the last one.
    pub snapshots: Vec<SnapshotId>,
    pub manifest_lists: Vec<String>,
    pub manifests: Vec<String>,
    /// Files that it may name and that no candidate has: a try that ran out of memory wrote them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_over: Vec<Arc<str>>,
}

impl Checkpoint {
    /// Its own files, without those that the candidates name.
    pub fn own_files(&self) -> WrittenFiles {
        let Self { branch: _, first_sequence_number, snapshots, manifest_lists, manifests, left_over } =
            self.clone();
        WrittenFiles {
            first_sequence_number,
            snapshots,
            manifest_lists,
            manifests,
            data_files: left_over,
            checkpoint: None,
        }
    }
}

/// What `snapshots` of the table brought, for [`delete_files`] once they are removed: files that somebody else wrote,
/// so no older snapshot is left out of the search for their names. Files outside the table's location are not listed:
/// they were brought in from elsewhere.
pub async fn files_of(
    store: &ManifestStore,
    table: &LoadedTable,
    snapshots: &[SnapshotId],
) -> Result<WrittenFiles, TableError> {
    let access = TableAccess::of(table);
    let location = format!("{}/", table.facts.location.trim_end_matches('/'));
    let mut files = WrittenFiles { snapshots: snapshots.to_vec(), ..WrittenFiles::default() };
    for snapshot in snapshots.iter().filter_map(|id| table.facts.snapshots.get(*id)) {
        let change = store.changes(table, snapshot).await?;
        let added = change.added.iter().chain(&change.added_deletes).map(|file| &file.path);
        files.data_files.extend(added.filter(|path| path.starts_with(&location)).cloned());
        let list = store.list(&access, &snapshot.manifest_list).await?;
        let own = list.iter().filter(|manifest| manifest.added_snapshot_id == snapshot.id.0);
        files.manifests.extend(own.map(|manifest| manifest.manifest_path.clone()));
        files.manifest_lists.push(snapshot.manifest_list.clone());
    }
    // Many vectors share one file.
    files.data_files.sort();
    files.data_files.dedup();
    Ok(files)
}

/// What [`delete_files`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Deleted {
    pub deleted: usize,
    /// Files that storage would not delete, with its words; they may be tried again.
    pub failed: Vec<(String, String)>,
}

/// Which of `paths` do not exist, in the order given (rule R10).
pub async fn missing_files(
    table: &LoadedTable,
    paths: impl IntoIterator<Item = Arc<str>>,
) -> Result<Vec<Arc<str>>, TableError> {
    let file_io = &table.file_io;
    let (local, remote): (Vec<Arc<str>>, Vec<Arc<str>>) =
        paths.into_iter().partition(|path| local::path_of(path).is_some());
    let looked_for = on_blocking_thread("data files", move || -> Result<Vec<Arc<str>>, TableError> {
        let mut missing = Vec::new();
        for path in local {
            if !local::exists(&path)? {
                missing.push(path);
            }
        }
        Ok(missing)
    });
    let mut all_missing = looked_for.await??;
    let missing: Vec<Option<Arc<str>>> = stream::iter(remote)
        .map(|path| async move {
            let exists = file_io.exists(&path).await.map_err(|e| TableError::io(&path, e))?;
            Ok::<_, TableError>((!exists).then_some(path))
        })
        .buffered(PARALLEL_REQUESTS)
        .try_collect()
        .await?;
    all_missing.extend(missing.into_iter().flatten());
    Ok(all_missing)
}

/// Deletes the files of dropped candidates. `table` must have been loaded after they were dropped.
///
/// # Errors
/// [`TableError::StillReferenced`] when the table names one of the files; nothing is deleted then. With
/// `gc.enabled = false` nothing is deleted either, and that is no error.
pub async fn delete_files(
    store: &ManifestStore,
    table: &LoadedTable,
    files: &WrittenFiles,
) -> Result<Deleted, TableError> {
    if !table.facts.property_bool(GC_ENABLED, true) {
        return Ok(Deleted::default());
    }
    refuse_if_referenced(store, table, files).await?;
    let paths: Vec<&str> = files
        .data_files
        .iter()
        .map(AsRef::as_ref)
        .chain(files.manifests.iter().map(String::as_str))
        .chain(files.manifest_lists.iter().map(String::as_str))
        .collect();
    let results: Vec<Result<(), (String, String)>> = stream::iter(paths)
        .map(|path| async move {
            store.forget(path);
            table.file_io.delete(path).await.map_err(|e| (path.to_owned(), e.to_string()))
        })
        .buffered(PARALLEL_REQUESTS)
        .collect()
        .await;
    let mut outcome = Deleted::default();
    for result in results {
        match result {
            Ok(()) => outcome.deleted += 1,
            Err(failed) => outcome.failed.push(failed),
        }
    }
    Ok(outcome)
}

/// Looks through every snapshot, with or without ref, that is young enough to name one of the files.
async fn refuse_if_referenced(
    store: &ManifestStore,
    table: &LoadedTable,
    files: &WrittenFiles,
) -> Result<(), TableError> {
    let lists: HashSet<&str> = files.manifest_lists.iter().map(String::as_str).collect();
    let manifests: HashSet<&str> = files.manifests.iter().map(String::as_str).collect();
    let data_files: HashSet<&str> = files.data_files.iter().map(AsRef::as_ref).collect();
    let access = TableAccess::of(table);
    let referenced = |path: &str, snapshot: &SnapshotFact| {
        Err(TableError::StillReferenced { path: path.to_owned(), snapshot: snapshot.id })
    };
    for snapshot in table.facts.snapshots.iter() {
        if files.snapshots.contains(&snapshot.id) || lists.contains(snapshot.manifest_list.as_str()) {
            return referenced(&snapshot.manifest_list, snapshot);
        }
        if snapshot.sequence_number < files.first_sequence_number {
            continue;
        }
        let list = store.list(&access, &snapshot.manifest_list).await?;
        if let Some(manifest) = list.iter().find(|m| manifests.contains(m.manifest_path.as_str())) {
            return referenced(&manifest.manifest_path, snapshot);
        }
        if data_files.is_empty() {
            continue;
        }
        let young: ManifestFiles =
            list.iter().filter(|m| m.sequence_number >= files.first_sequence_number).cloned().collect();
        let mut decoded = pin!(store.in_turn(&access, &young));
        while let Some(held) = decoded.try_next().await? {
            if let Some(entry) = held.manifest.entries.iter().find(|e| data_files.contains(&*e.fact.path)) {
                return referenced(&entry.fact.path, snapshot);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "cleanup_tests.rs"]
mod tests;
