//! Explicit data sequence numbers of a branch, on the target (rule D4).
//!
//! A compaction leaves its rows their age, so that deletes by value reach them as before. Numbers that the base
//! knew mean the same on the target. Later ones are the branch's own: the snapshot that had such a number has
//! another on the target, as a candidate of the same car or as what published it earlier.

use mergeberg_kernel::admission::Car;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::{BaseFinding, SnapshotFact};

use super::gather::Gathered;
use crate::table::manifests::LiveFile;
use crate::table::snapshot_writer::FileAge;

/// What the snapshots of a branch are on the target, as far as they are there yet.
pub(super) struct Ages {
    /// Sequence number of the base; 0 without one.
    base: i64,
    /// The branch's snapshots since, oldest first.
    branch: Vec<Counterpart>,
}

struct Counterpart {
    source: SnapshotId,
    sequence_number: i64,
    age: Option<FileAge>,
}

impl Ages {
    pub fn of(gathered: &Gathered, car: &Car) -> Self {
        let snapshots = &gathered.table.facts.snapshots;
        let request = gathered.requests.iter().find(|facts| facts.request == car.request);
        let base = match request.map(|facts| &facts.base) {
            Some(BaseFinding::Common(id)) => Some(*id),
            _ => None,
        };
        let branch = snapshots.after(base, car.rebuilt.unwrap_or(car.pinned)).unwrap_or_default();
        let branch = branch.into_iter().filter_map(|id| snapshots.get(id)).map(|source| {
            let published = gathered.published.get(&source.id).and_then(|id| snapshots.get(*id));
            Counterpart {
                source: source.id,
                sequence_number: source.sequence_number,
                age: published.map(|published| FileAge::Kept(published.sequence_number)),
            }
        });
        let base = base.and_then(|id| snapshots.get(id)).map_or(0, |base| base.sequence_number);
        Self { base, branch: branch.collect() }
    }

    /// `candidate` is what `source` will be on the target.
    pub fn becomes(&mut self, source: SnapshotId, candidate: SnapshotId) {
        if let Some(known) = self.branch.iter_mut().find(|known| known.source == source) {
            known.age = Some(FileAge::Of(candidate));
        }
    }

    /// The age of a file that `source` added. One without a number of its own takes the candidate's (rule D3).
    pub fn on_target(&self, file: &LiveFile, source: &SnapshotFact) -> FileAge {
        let number = file.sequence_number;
        if number == source.sequence_number {
            return FileAge::Inherited;
        }
        if number <= self.base {
            return FileAge::Kept(number);
        }
        // Snapshots that changed nothing, and the first halves of operations that were run again, are on the
        // target as whatever came next.
        let last = self.branch.iter().rposition(|known| known.sequence_number <= number);
        last.and_then(|last| self.branch[last..].iter().find_map(|known| known.age)).unwrap_or_default()
    }
}
