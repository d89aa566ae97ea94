//! Row-level deletes of a branch beside those that the target got meanwhile (rules D1 and D2).
//!
//! A format 2 table takes position-delete files beside each other. In format 3 a data file has one deletion
//! vector, so the branch's is written anew with the target's folded in. Which files are concerned, the
//! kernel has found; here the positions are read, and what manifests cannot tell is found out: whether
//! both sides took the same row.

use std::sync::Arc;

use mergeberg_kernel::admission::Car;
use mergeberg_kernel::change::{ChangeSet, DeleteKey, FileFact};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::reason::ReasonCode;
use roaring::RoaringTreemap;

use super::context::Worker;
use super::error::WorkerError;
use super::gather::Gathered;
use super::prepared::PreparedCar;
use crate::table::deletes::{DeleteIndex, DeleteStore, RowsToDelete, VectorWriter};
use crate::table::error::TableError;
use crate::table::manifests::{FileScope, LiveFile, LiveFiles};
use crate::table::scan::ScanCounters;
use crate::table::snapshot_writer::{AddedFile, FileAge, SnapshotChange};

/// First format version with deletion vectors.
const VECTORS_SINCE: u8 = 3;

/// Positions of one data file that are deleted before the branch's change, after it, and on the target.
struct Deleted {
    before: RoaringTreemap,
    mine: RoaringTreemap,
    theirs: RoaringTreemap,
}

impl Deleted {
    /// Why the two cannot be united; `None`: they can.
    fn conflict(&self, file: &str, disjoint: bool) -> Option<String> {
        if !self.before.is_subset(&self.mine) || !self.before.is_subset(&self.theirs) {
            return Some(format!("rows of {file} that were deleted came back on one side"));
        }
        let both = (&self.mine - &self.before) & (&self.theirs - &self.before);
        let row = both.min().filter(|_| disjoint)?;
        Some(format!(
            "row {row} of {file} was deleted on both sides, and one of them put another in its place"
        ))
    }
}

impl Worker {
    /// Fits the deletes of `write`, which repeats `change` of the branch, to what is live under it. A reason
    /// when they cannot be united.
    pub(super) async fn unite(
        &self,
        gathered: &Gathered,
        car: &Car,
        change: &ChangeSet,
        source: &SnapshotFact,
        prepared: &mut PreparedCar,
        write: &mut SnapshotChange,
    ) -> Result<Option<(ReasonCode, String)>, WorkerError> {
        let unite = &car.classification.unite;
        if unite.files.is_empty() || !change.has_delete_files() {
            return Ok(None);
        }
        let table = &gathered.table;
        let deletes = change.added_deletes.iter().chain(&change.removed_deletes);
        let scope = FileScope::Partitions(deletes.map(|d| Arc::clone(&d.partition)).collect());
        let target = self.live_for(gathered, &scope, prepared).await?;
        let after = self.store.live_files(table, source, &scope).await?;
        let before = match source.parent.and_then(|id| table.facts.snapshots.get(id)) {
            Some(parent) => self.store.live_files(table, parent, &scope).await?,
            None => LiveFiles::default(),
        };
        let store = DeleteStore::new(table.file_io.clone());
        let [before, after] = [index(before.deletes)?, index(after.deletes)?];
        let live_keys: Vec<DeleteKey> = target.deletes.iter().map(|d| d.fact.key()).collect();
        let live_vectors: Vec<FileFact> = target.deletes.iter().map(|d| d.fact.clone()).collect();
        let on_target = index(target.deletes)?;
        let counters = ScanCounters::default();
        let mut folded = Vec::new();
        for file in &target.data {
            let path = &file.fact.path;
            let deleted = Deleted {
                before: positions(&store, &before, file, &counters).await?,
                mine: positions(&store, &after, file, &counters).await?,
                theirs: positions(&store, &on_target, file, &counters).await?,
            };
            if deleted.mine == deleted.before {
                continue;
            }
            let vectors = table.facts.format_version >= VECTORS_SINCE;
            if vectors {
                // One vector a data file: whatever is there, as the branch knew it or not, makes room.
                let old = live_vectors.iter().filter(|live| live.deletes_rows_of() == Some(path));
                write.remove_deletes.extend(old.map(FileFact::key));
            }
            if deleted.theirs == deleted.before {
                continue;
            }
            if let Some(text) = deleted.conflict(path, unite.disjoint) {
                return Ok(Some((ReasonCode::Conflict, text)));
            }
            if vectors {
                write.add_deletes.retain(|added| added.fact.deletes_rows_of() != Some(path));
                folded
                    .push(RowsToDelete { data_file: file.clone(), positions: deleted.mine | deleted.theirs });
            }
        }
        // What the branch replaced, the target may have replaced as well.
        write.remove_deletes.retain(|key| live_keys.contains(key));
        for new in VectorWriter::write(table, &folded).await? {
            prepared.new_files.push(Arc::clone(&new.fact.path));
            write.add_deletes.push(AddedFile {
                fact: new.fact,
                file: new.file,
                spec_id: new.spec_id,
                age: FileAge::Inherited,
            });
        }
        Ok(None)
    }
}

fn index(deletes: Vec<LiveFile>) -> Result<DeleteIndex, TableError> {
    DeleteIndex::new(deletes.into_iter().map(Arc::new))
}

async fn positions(
    store: &DeleteStore,
    index: &DeleteIndex,
    file: &LiveFile,
    counters: &ScanCounters,
) -> Result<RoaringTreemap, TableError> {
    store.positions_of(file, &index.for_file(file)?, counters).await
}
