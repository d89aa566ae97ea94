//! Writes the snapshots that the target may become: a chain on a head, none of it committed yet.
//!
//! Owns sequence numbers (N1), row ids (N2), timestamps (N3), manifests (N4, D8, L9) and summaries of
//! candidates. What a snapshot adds goes into new manifests, one a partition spec, data and delete files
//! apart; a manifest that holds a removed file is rewritten; every other manifest of the parent is named
//! again as it is. Every manifest written enters the store's cache, so the next car of the chain reads
//! nothing.
//!
//! Each path is live once (rule D6). Looking for a path in every manifest would cost a scan of the table a
//! car, so the writer refuses only what it knows: paths that the chain itself added or removed, and paths
//! that the caller names by [`SnapshotWriter::take_paths`] (the classification has read them already).
//!
//! A data file has at most one deletion vector: those of removed files go with them (rule D5), and one that
//! would come beside another is refused. Which deletes a new one has to hold (rules D1, D2), the caller knows.
//!
//! Absent on purpose: format v1 (the metadata loses its refs) and encrypted tables (rule L7).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use iceberg::spec::{FormatVersion, ManifestContentType, ManifestStatus};
use mergeberg_kernel::change::{DeleteKey, FileFact};
use mergeberg_kernel::commit::{NewSnapshot, RowRange};
use mergeberg_kernel::ids::{SnapshotId, SpecId};
use mergeberg_kernel::lineage::{SnapshotFact, SnapshotGraph};

use super::cleanup::WrittenFiles;
use super::course::{FileKind, FileNotes};
use super::error::TableError;
use super::folders::metadata_folder;
use super::list_writer::{self, ListPlan};
use super::loaded::LoadedTable;
use super::manifest_codec::Entry;
use super::manifest_merge::MergeSettings;
use super::manifest_rewrite::{Author, ManifestMaker};
use super::manifests::{ManifestFiles, ManifestStore, TableAccess, has_live_files};
use super::row_ids;
pub use super::snapshot_change::{AddedFile, FileAge, SnapshotChange, new_snapshot_id};
use super::snapshot_summary;

/// A new manifest holds at most this many files; more go into further ones, encoded in parallel.
const MAX_FILES_PER_MANIFEST: usize = 5_000;
/// Number of the attempt in the names of manifest lists: a writer makes each snapshot once.
const ATTEMPT: u32 = 1;
/// The snapshot that the next one is built upon.
#[derive(Clone)]
struct Head {
    snapshot: Option<SnapshotId>,
    sequence_number: i64,
    timestamp_ms: i64,
    /// Format v3: the id of the next new row.
    next_row_id: Option<i64>,
    /// Data manifests, newest first.
    data: ManifestFiles,
    /// Delete manifests, newest first.
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
    /// Files that may not be added (rule D6).
    taken: HashSet<DeleteKey>,
    first_sequence_number: i64,
    snapshots: Vec<SnapshotId>,
    lists: Vec<String>,
}

/// One change on its way to a manifest list.
struct Car {
    change: SnapshotChange,
    sequence_number: i64,
    timestamp_ms: i64,
    /// Manifests of the added data files.
    new_data: ManifestFiles,
    /// Manifests of the added delete files.
    new_deletes: ManifestFiles,
}

impl Car {
    fn author(&self) -> Author {
        Author { snapshot: self.change.id, sequence_number: self.sequence_number }
    }
}

impl SnapshotWriter {
    /// Starts a chain on `parent`; `None` is the first publish of an empty table.
    pub async fn on(
        store: &ManifestStore,
        table: &LoadedTable,
        parent: Option<&SnapshotFact>,
    ) -> Result<Self, TableError> {
        let facts = &table.facts;
        match (table.metadata.format_version(), facts.next_row_id) {
            (FormatVersion::V2, None) | (FormatVersion::V3, Some(_)) => {}
            (FormatVersion::V1, _) => {
                return Err(TableError::Unsupported(format!(
                    "{} is of format version 1, whose branches would be lost by writing; upgrade it to 2",
                    facts.name
                )));
            }
            (FormatVersion::V2, Some(_)) | (FormatVersion::V3, None) => {
                return Err(TableError::Internal(format!("{}: format and row ids disagree", facts.name)));
            }
        }
        let access = TableAccess::of(table);
        let list = match parent {
            Some(parent) => store.list(&access, &parent.manifest_list).await?,
            None => Arc::default(),
        };
        if let Some(encrypted) = list.iter().find(|manifest| manifest.key_metadata.is_some()) {
            return Err(TableError::Unsupported(format!(
                "{} is encrypted, which this release does not read; decrypt the table first",
                encrypted.manifest_path
            )));
        }
        let (data, deletes) =
            list.iter().cloned().partition(|manifest| manifest.content == ManifestContentType::Data);
        let head = Head {
            snapshot: parent.map(|p| p.id),
            // Rule N1: builders skip the check for a first publish, so it is not left to them.
            sequence_number: facts.last_sequence_number.max(parent.map_or(0, |p| p.sequence_number)),
            timestamp_ms: facts.last_updated_ms.max(parent.map_or(0, |p| p.timestamp_ms)),
            next_row_id: facts.next_row_id,
            data,
            deletes,
            summary: parent.map(|p| p.summary.clone()),
        };
        Ok(Self {
            first_sequence_number: head.sequence_number + 1,
            existing: facts.snapshots.clone(),
            maker: ManifestMaker::new(
                store.clone(),
                access,
                metadata_folder(facts),
                MergeSettings::of(facts),
            ),
            head,
            taken: HashSet::new(),
            snapshots: Vec::new(),
            lists: Vec::new(),
        })
    }

    /// Tells of every manifest and list before it is written.
    pub fn noting(mut self, notes: FileNotes) -> Self {
        self.maker.notes = Some(notes);
        self
    }

    /// Names data files that must not be added: the caller knows them to be live on the target, or to have
    /// been removed from it (rule D6).
    pub fn take_paths(&mut self, paths: impl IntoIterator<Item = Arc<str>>) {
        self.taken.extend(paths.into_iter().map(|path| DeleteKey { path, content_offset: None }));
    }

    /// As [`Self::take_paths`], for delete files.
    pub fn take_deletes(&mut self, files: impl IntoIterator<Item = DeleteKey>) {
        self.taken.extend(files);
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
            checkpoint: None,
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
            for file in newly_taken {
                self.taken.remove(&file);
            }
        }
        result
    }

    async fn write_train(
        &mut self,
        changes: Vec<SnapshotChange>,
        newly_taken: &mut Vec<DeleteKey>,
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
        if let Some(notes) = &self.maker.notes {
            let paths = lists.iter().map(|list| Arc::from(list.path.as_str())).collect();
            notes(FileKind::ManifestList, paths).await?;
        }
        self.snapshots.extend(lists.iter().map(|list| list.snapshot));
        let (store, access) = (&self.maker.store, &self.maker.access);
        list_writer::write(store, access, lists).await?;
        Ok(snapshots)
    }

    /// Checks the changes and gives each its sequence number and timestamp.
    fn number(
        &mut self,
        changes: Vec<SnapshotChange>,
        newly_taken: &mut Vec<DeleteKey>,
    ) -> Result<Vec<Car>, TableError> {
        let mut cars: Vec<Car> = Vec::with_capacity(changes.len());
        let (mut last_sequence, mut last_ms) = (self.head.sequence_number, self.head.timestamp_ms);
        for mut change in changes {
            let known = self.existing.contains(change.id)
                || self.snapshots.contains(&change.id)
                || cars.iter().any(|car| car.change.id == change.id);
            if known {
                let message = "its id is taken".to_owned();
                return Err(TableError::InvalidChange { snapshot: change.id, message });
            }
            change.check(self.maker.access.metadata.format_version())?;
            let removed: BTreeSet<DeleteKey> = change.removed().collect();
            for file in change.added().map(|file| file.fact.key()) {
                if removed.contains(&file) || !self.taken.insert(file.clone()) {
                    return Err(TableError::PathTaken { snapshot: change.id, path: file.to_string() });
                }
                newly_taken.push(file);
            }
            for file in removed {
                if self.taken.insert(file.clone()) {
                    newly_taken.push(file);
                }
            }
            last_sequence += 1;
            // Rule N3: never older than the parent or the metadata.
            last_ms = change.now_ms.max(last_ms.saturating_add(1));
            settle_ages(&mut change, last_sequence, &cars)?;
            cars.push(Car {
                change,
                sequence_number: last_sequence,
                timestamp_ms: last_ms,
                new_data: vec![],
                new_deletes: vec![],
            });
        }
        Ok(cars)
    }

    /// Writes the manifests of the files that the cars add.
    async fn write_added(&mut self, cars: &mut [Car]) -> Result<(), TableError> {
        let mut plans = Vec::new();
        let mut owners = Vec::new();
        for (at, car) in cars.iter().enumerate() {
            for (content, files) in [
                (ManifestContentType::Data, &car.change.add),
                (ManifestContentType::Deletes, &car.change.add_deletes),
            ] {
                for (spec_id, entries) in added_entries(car, files)? {
                    for chunk in entries.chunks(MAX_FILES_PER_MANIFEST) {
                        plans.push(self.maker.plan(
                            car.author(),
                            (content, spec_id),
                            chunk.to_vec(),
                            None,
                        )?);
                        owners.push((at, content));
                    }
                }
            }
        }
        let manifests = self.maker.write(plans).await?;
        for ((at, content), manifest) in owners.into_iter().zip(manifests) {
            if let Some(car) = cars.get_mut(at) {
                match content {
                    ManifestContentType::Data => car.new_data.push(manifest),
                    ManifestContentType::Deletes => car.new_deletes.push(manifest),
                }
            }
        }
        Ok(())
    }

    /// Joins a car to the chain: rewrites what it removes, merges, and moves the head.
    async fn couple(&mut self, car: Car) -> Result<(NewSnapshot, ListPlan), TableError> {
        let author = car.author();
        let Car { change, sequence_number, timestamp_ms, new_data, new_deletes } = car;
        let gone: BTreeSet<DeleteKey> =
            change.remove.iter().map(|path| DeleteKey { path: path.clone(), content_offset: None }).collect();
        let (data, mut removed) = self.maker.without(self.head.data.clone(), &gone, author).await?;
        let (deletes, removed_deletes) =
            self.maker.without_deletes(self.head.deletes.clone(), &change, &removed, author).await?;
        let mut data = self.joined(new_data, data, author).await?;
        let deletes = self.joined(new_deletes, deletes, author).await?;
        let row_range = match self.head.next_row_id {
            Some(first_row_id) => {
                let end = row_ids::assign(&mut data, first_row_id)?;
                Some(RowRange { first_row_id, added_rows: end - first_row_id })
            }
            None => None,
        };

        removed.extend(removed_deletes);
        let added: Vec<FileFact> = change.added().map(|file| file.fact.clone()).collect();
        let summary =
            snapshot_summary::summary(&change.summary, &added, &removed, self.head.summary.as_ref());
        let path = format!("{}/snap-{}-{ATTEMPT}-{}.avro", self.maker.folder, change.id, self.maker.run);
        let list = ListPlan {
            path: path.clone(),
            snapshot: change.id,
            parent: self.head.snapshot,
            sequence_number,
            first_row_id: self.head.next_row_id,
            manifests: data.iter().chain(&deletes).cloned().collect(),
        };
        let snapshot = NewSnapshot {
            id: change.id,
            parent: self.head.snapshot,
            sequence_number,
            timestamp_ms,
            manifest_list: path,
            schema_id: change.schema_id,
            label: change.label,
            summary: summary.clone(),
            row_range,
        };
        self.head = Head {
            snapshot: Some(change.id),
            sequence_number,
            timestamp_ms,
            next_row_id: row_range.and_then(|range| range.end()),
            data,
            deletes,
            summary: Some(summary),
        };
        Ok((snapshot, list))
    }

    /// New manifests before those of the parent, merged. As Java does: a manifest without live files stays
    /// for the snapshot that emptied it, no longer.
    async fn joined(
        &mut self,
        mut new: ManifestFiles,
        old: ManifestFiles,
        author: Author,
    ) -> Result<ManifestFiles, TableError> {
        new.extend(old.into_iter().filter(|m| has_live_files(m) || m.added_snapshot_id == author.snapshot.0));
        self.maker.merged(new, author).await
    }
}

/// Gives files that are as old as a snapshot ahead the number that this got, and looks for what cannot be.
fn settle_ages(change: &mut SnapshotChange, sequence_number: i64, ahead: &[Car]) -> Result<(), TableError> {
    let snapshot = change.id;
    for file in change.add.iter_mut().chain(&mut change.add_deletes) {
        let invalid = |what: &str| {
            let message = format!("{} is to keep the sequence number of {what}", file.fact.path);
            Err(TableError::InvalidChange { snapshot, message })
        };
        file.age = match file.age {
            FileAge::Inherited => FileAge::Inherited,
            FileAge::Of(id) if id == snapshot => FileAge::Inherited,
            FileAge::Of(id) => match ahead.iter().find(|car| car.change.id == id) {
                Some(car) => FileAge::Kept(car.sequence_number),
                None => return invalid(&format!("snapshot {id}, which is not ahead of it")),
            },
            FileAge::Kept(number) if (0..=sequence_number).contains(&number) => file.age,
            FileAge::Kept(_) => return invalid("the future"),
        };
    }
    Ok(())
}

/// Manifest entries of files that a car adds, by spec.
fn added_entries(car: &Car, files: &[AddedFile]) -> Result<BTreeMap<SpecId, Vec<Entry>>, TableError> {
    let mut by_spec: BTreeMap<SpecId, Vec<Entry>> = BTreeMap::new();
    for added in files {
        by_spec.entry(added.spec_id).or_default().push(Entry {
            status: ManifestStatus::Added,
            snapshot: car.change.id,
            sequence_number: match added.age {
                FileAge::Kept(number) => number,
                FileAge::Inherited | FileAge::Of(_) => car.sequence_number,
            },
            file_sequence_number: car.sequence_number,
            fact: added.fact.clone(),
            // Rule N2: files that are added again take new row ids, like new ones.
            file: row_ids::with_first_row_id(&added.file, None, added.spec_id.0)?,
        });
    }
    Ok(by_spec)
}

#[cfg(test)]
#[path = "snapshot_writer_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "snapshot_writer_deletes_tests.rs"]
mod deletes_tests;

#[cfg(test)]
#[path = "snapshot_writer_row_ids_tests.rs"]
mod row_ids_tests;
