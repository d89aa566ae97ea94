//! What a car will write, and what the chain looks like to its next unit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg_kernel::change::DeleteKey;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::partition::Partition;

use crate::table::manifests::{FileScope, LiveFile, LiveFiles};
use crate::table::snapshot_writer::{AddedFile, SnapshotChange};

/// What a car will write, before any snapshot is written.
#[derive(Default)]
pub(super) struct PreparedCar {
    pub changes: Vec<SnapshotChange>,
    pub own: OwnChanges,
    pub touched: BTreeSet<Arc<Partition>>,
    pub only_adds: bool,
    pub vanished_rows: i64,
    /// Files that the queue wrote for this car alone.
    pub new_files: Vec<Arc<str>>,
}

impl PreparedCar {
    pub fn new() -> Self {
        Self { only_adds: true, ..Self::default() }
    }

    pub fn push(&mut self, change: SnapshotChange) {
        self.only_adds &=
            change.remove.is_empty() && change.add_deletes.is_empty() && change.remove_deletes.is_empty();
        self.own.apply(&change);
        self.changes.push(change);
    }
}

/// What a car has done to the chain so far. A later unit of the same car stands on it: it sees, and may
/// remove, the files that an earlier one added, also those that a replay has just written.
#[derive(Default)]
pub(super) struct OwnChanges {
    added: BTreeMap<Arc<str>, LiveFile>,
    removed: BTreeSet<Arc<str>>,
    added_deletes: BTreeMap<DeleteKey, LiveFile>,
    removed_deletes: BTreeSet<DeleteKey>,
}

impl OwnChanges {
    fn apply(&mut self, change: &SnapshotChange) {
        for path in &change.remove {
            if self.added.remove(path).is_none() {
                self.removed.insert(Arc::clone(path));
            }
        }
        for key in &change.remove_deletes {
            if self.added_deletes.remove(key).is_none() {
                self.removed_deletes.insert(key.clone());
            }
        }
        for file in &change.add {
            self.added.insert(Arc::clone(&file.fact.path), live(change.id, file));
        }
        for delete in &change.add_deletes {
            self.added_deletes.insert(delete.fact.key(), live(change.id, delete));
        }
    }

    /// Was this data file added by an earlier unit of the car?
    pub fn has_added(&self, path: &str) -> bool {
        self.added.contains_key(path)
    }

    /// The target's live files of a scope as they are after these changes.
    pub fn over(&self, live: LiveFiles, scope: &FileScope) -> LiveFiles {
        let inside = |file: &&LiveFile| match scope {
            FileScope::Table => true,
            FileScope::Partitions(wanted) => wanted.iter().any(|p| p.overlaps(&file.fact.partition)),
        };
        let data = live.data.into_iter().filter(|file| !self.removed.contains(&file.fact.path));
        let deletes = live.deletes.into_iter().filter(|d| !self.removed_deletes.contains(&d.fact.key()));
        LiveFiles {
            data: data.chain(self.added.values().filter(inside).cloned()).collect(),
            deletes: deletes.chain(self.added_deletes.values().filter(inside).cloned()).collect(),
        }
    }
}

fn live(by: SnapshotId, file: &AddedFile) -> LiveFile {
    LiveFile {
        fact: file.fact.clone(),
        added_by: by,
        // Numbered when the train is written: newer than everything on the target.
        sequence_number: i64::MAX,
        file_sequence_number: i64::MAX,
        first_row_id: None,
        file: Arc::clone(&file.file),
        spec_id: file.spec_id,
    }
}
