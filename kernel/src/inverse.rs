//! The inverse of a landed request: what has to go and what has to come back, and what stands in its way.
//!
//! An inverse depends on the files that the request changed and on nothing else: rows that came beside them stay.
//! What the request removed comes back as new files, for a path that was removed is never added again (rule D6).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::change::{ChangeSet, DeleteKey, FileContent, FileFact};
use crate::classify::MAX_WITNESSES;
use crate::ids::SnapshotId;
use crate::record::Operation;
use crate::unit::Unit;

/// What takes back a request as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inverse {
    /// Data files that the request left on the target.
    pub remove: Vec<FileFact>,
    /// Data files that it took from the target.
    pub restore: Vec<FileFact>,
    pub remove_deletes: Vec<FileFact>,
    pub restore_deletes: Vec<FileFact>,
}

impl Inverse {
    /// Of the changes of one request, oldest first. What one of them added and a later one removed leaves no trace.
    pub fn of<'a>(changes: impl IntoIterator<Item = &'a ChangeSet>) -> Self {
        let mut net: BTreeMap<DeleteKey, (bool, FileFact)> = BTreeMap::new();
        for change in changes {
            // Removed first: a path that one snapshot both removes and adds stays live.
            let went = change.removed.iter().chain(&change.removed_deletes).map(|file| (false, file));
            let came = change.added.iter().chain(&change.added_deletes).map(|file| (true, file));
            for (came, file) in went.chain(came) {
                match net.remove(&file.key()) {
                    Some((before, _)) if before != came => {}
                    _ => {
                        net.insert(file.key(), (came, file.clone()));
                    }
                }
            }
        }
        let mut inverse = Self::default();
        for (came, file) in net.into_values() {
            let list = match (came, file.content == FileContent::Data) {
                (true, true) => &mut inverse.remove,
                (false, true) => &mut inverse.restore,
                (true, false) => &mut inverse.remove_deletes,
                (false, false) => &mut inverse.restore_deletes,
            };
            list.push(file);
        }
        inverse
    }

    /// Of an inverse that is written already: what it names.
    pub fn written_as(units: &[Unit]) -> Self {
        let mut inverse = Self::default();
        for unit in units {
            inverse.remove.extend(unit.removed().cloned());
            inverse.restore.extend(unit.added().cloned());
            inverse.remove_deletes.extend(unit.removed_deletes().cloned());
            inverse.restore_deletes.extend(unit.added_deletes().cloned());
        }
        inverse
    }

    pub fn is_empty(&self) -> bool {
        let Self { remove, restore, remove_deletes, restore_deletes } = self;
        remove.is_empty() && restore.is_empty() && remove_deletes.is_empty() && restore_deletes.is_empty()
    }
}

/// What a later snapshot did to files of the request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Obstacle {
    pub snapshot: SnapshotId,
    /// File or partition.
    pub place: String,
    pub rule: String,
}

/// Everything that was done since to what the inverse needs: at most [`MAX_WITNESSES`]. `later` are the target's
/// changes after the request, oldest first.
pub fn obstacles<'a>(inverse: &Inverse, later: impl IntoIterator<Item = &'a ChangeSet>) -> Vec<Obstacle> {
    let added: BTreeSet<&Arc<str>> = inverse.remove.iter().map(|f| &f.path).collect();
    let removed: BTreeSet<&Arc<str>> = inverse.restore.iter().map(|f| &f.path).collect();
    let deletes: BTreeSet<DeleteKey> = inverse.remove_deletes.iter().map(FileFact::key).collect();
    let mut found = Vec::new();
    for change in later {
        let mut note = |place: String, rule: &str| {
            let obstacle = Obstacle { snapshot: change.snapshot, place, rule: rule.to_owned() };
            if found.len() < MAX_WITNESSES && !found.contains(&obstacle) {
                found.push(obstacle);
            }
        };
        for file in change.removed.iter().filter(|f| added.contains(&f.path)) {
            note(file.path.to_string(), "a file that the request added is gone");
        }
        for file in &change.removed {
            let deleted = inverse.restore_deletes.iter().any(|back| match back.deletes_rows_of() {
                Some(of) => *of == file.path,
                None => reaches(back, file),
            });
            if deleted {
                note(file.path.to_string(), "a file whose deletes are to come back is gone");
            }
        }
        for file in change.added.iter().filter(|f| removed.contains(&f.path)) {
            note(file.path.to_string(), "a file that the request removed was put back");
        }
        for delete in change.removed_deletes.iter().filter(|d| deletes.contains(&d.key())) {
            note(delete.key().to_string(), "a delete file that the request added is gone");
        }
        for delete in &change.added_deletes {
            let hit = inverse.remove.iter().find(|file| match delete.deletes_rows_of() {
                Some(of) => *of == file.path,
                None => reaches(delete, file),
            });
            if let Some(file) = hit {
                note(file.path.to_string(), "rows of a file that the request added were deleted");
            }
            let comes_back = delete
                .deletes_rows_of()
                .filter(|of| inverse.restore_deletes.iter().any(|back| back.deletes_rows_of() == Some(*of)));
            if let Some(of) = comes_back {
                note(of.to_string(), "rows of a file whose deletes are to come back were deleted");
            }
            // Values, not files: they would have hit what comes back.
            if matches!(delete.content, FileContent::EqualityDeletes { .. })
                && let Some(file) = inverse.restore.iter().find(|file| reaches(delete, file))
            {
                note(file.partition.to_string(), "rows were deleted by value where files are to come back");
            }
        }
        let replaced = change.replaces_partitions
            || change.record.found().is_some_and(|r| r.operation == Operation::ReplacePartitions);
        if replaced
            && let Some(file) =
                inverse.restore.iter().find(|file| change.added.iter().any(|a| a.partition == file.partition))
        {
            note(file.partition.to_string(), "a partition to which files are to come back was replaced");
        }
    }
    found
}

fn reaches(delete: &FileFact, file: &FileFact) -> bool {
    // Equality deletes of an unpartitioned spec reach every partition.
    delete.partition.fields.is_empty() || delete.partition.overlaps(&file.partition)
}
