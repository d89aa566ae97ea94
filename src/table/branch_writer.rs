//! What a pipeline does: write rows to a branch. The demo's writers and the tests are such pipelines.
//!
//! A write is retried when another branch of the table was written meanwhile, and never when its own branch
//! moved: two writers of one branch is a mistake that nobody should smooth over.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use futures::stream;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};

use super::catalog::{Catalog, CatalogError, CommitOutcome};
use super::data_files::DataFileWriter;
use super::error::TableError;
use super::loaded::LoadedTable;
use super::manifests::{FileScope, LiveFile, ManifestStore};
use super::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};

/// Times that a write is made again because another branch was written meanwhile.
const MAX_TRIES: u32 = 200;

/// Which live files a write removes.
pub enum Removal {
    Nothing,
    /// Every file of the branch for which this says yes.
    Files(Box<dyn Fn(&LiveFile) -> bool + Send + Sync>),
}

/// One snapshot to write on a branch.
pub struct BranchWrite {
    pub branch: RefName,
    /// `append`, `overwrite`, `replace` or `delete`.
    pub label: String,
    /// In a table of format v3 with `_row_id` and `_last_updated_sequence_number` or without.
    pub rows: Vec<RecordBatch>,
    pub remove: Removal,
    pub summary: BTreeMap<String, String>,
}

#[derive(Debug, thiserror::Error)]
pub enum BranchWriteError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("branch {0} was written by somebody else meanwhile")]
    Moved(RefName),
    #[error("the table is written without a pause; the write was given up after {MAX_TRIES} tries")]
    Busy,
    #[error("the write has no known outcome: {0}")]
    Unknown(String),
}

/// Writes rows to branches of tables in one catalog.
pub struct BranchWriter {
    pub catalog: Arc<dyn Catalog>,
    pub store: ManifestStore,
    pub clock: Arc<dyn Fn() -> i64 + Send + Sync>,
    pub random: Arc<dyn Fn() -> u64 + Send + Sync>,
}

impl BranchWriter {
    /// Creates a branch at the head of another one, or at a snapshot of its.
    pub async fn create_branch(
        &self,
        table: &TableName,
        branch: &RefName,
        at: SnapshotId,
    ) -> Result<(), BranchWriteError> {
        let reference = RefFact {
            name: branch.clone(),
            snapshot_id: at,
            kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        };
        let absent = Requirement::RefAt { name: branch.clone(), at: None, role: RefRole::NewName };
        for _ in 0..MAX_TRIES {
            let loaded = self.catalog.load(table).await?;
            let updates = vec![Update::SetRef(reference.clone())];
            match self.catalog.commit(&loaded, std::slice::from_ref(&absent), updates).await {
                CommitOutcome::Landed(_) => return Ok(()),
                CommitOutcome::PointerMoved => {}
                outcome => return Err(refused(outcome, branch)),
            }
        }
        Err(BranchWriteError::Busy)
    }

    /// Writes one snapshot and gives its id. A branch that does not exist is created, with the target's
    /// `main` untouched.
    pub async fn write(&self, table: &TableName, write: BranchWrite) -> Result<SnapshotId, BranchWriteError> {
        let loaded = self.catalog.load(table).await?;
        let head = loaded.facts.head(&write.branch);
        self.write_over(loaded, head, write).await
    }

    /// As [`Self::write`], for rows that were computed from the branch as it was at `head`: a branch that
    /// moved since then is not written.
    pub async fn write_from(
        &self,
        table: &TableName,
        head: SnapshotId,
        write: BranchWrite,
    ) -> Result<SnapshotId, BranchWriteError> {
        let loaded = self.catalog.load(table).await?;
        self.write_over(loaded, Some(head), write).await
    }

    async fn write_over(
        &self,
        first: Arc<LoadedTable>,
        expected: Option<SnapshotId>,
        write: BranchWrite,
    ) -> Result<SnapshotId, BranchWriteError> {
        let BranchWrite { branch, label, rows, remove, summary } = write;
        let table = &first.facts.name;
        // A pipeline that carries the ids of rows along brings them as a column.
        let rows = stream::iter(rows.into_iter().map(Ok::<_, Infallible>));
        let files = DataFileWriter::write_again(&first, first.facts.current_schema_id, rows).await?;
        for _ in 0..MAX_TRIES {
            let loaded = self.catalog.load(table).await?;
            if loaded.facts.head(&branch) != expected {
                return Err(BranchWriteError::Moved(branch));
            }
            let parent = expected.and_then(|id| loaded.facts.snapshots.get(id));
            let change = SnapshotChange {
                id: new_snapshot_id(&loaded.facts, || (self.random)()),
                label: label.clone(),
                add: files.iter().cloned().map(AddedFile::from).collect(),
                remove: self.removed(&loaded, expected, &remove).await?,
                add_deletes: Vec::new(),
                remove_deletes: BTreeSet::new(),
                summary: summary.clone(),
                now_ms: (self.clock)(),
                schema_id: loaded.facts.current_schema_id,
            };
            let id = change.id;
            let mut writer = SnapshotWriter::on(&self.store, &loaded, parent).await?;
            let snapshot = writer.add(change).await?;
            let requirements = [
                Requirement::TableUuid(loaded.facts.uuid.clone()),
                Requirement::RefAt { name: branch.clone(), at: expected, role: RefRole::Source },
            ];
            let updates = vec![Update::AddSnapshot(snapshot), Update::SetRef(moved(&loaded, &branch, id))];
            match self.catalog.commit(&loaded, &requirements, updates).await {
                CommitOutcome::Landed(_) => return Ok(id),
                // Another branch took the sequence number, or just the pointer.
                CommitOutcome::PointerMoved | CommitOutcome::TableChanged(_) => {}
                outcome => return Err(refused(outcome, &branch)),
            }
        }
        Err(BranchWriteError::Busy)
    }

    async fn removed(
        &self,
        table: &LoadedTable,
        head: Option<SnapshotId>,
        remove: &Removal,
    ) -> Result<BTreeSet<Arc<str>>, BranchWriteError> {
        let (Removal::Files(chosen), Some(head)) =
            (remove, head.and_then(|id| table.facts.snapshots.get(id)))
        else {
            return Ok(BTreeSet::new());
        };
        let live = self.store.live_files(table, head, &FileScope::Table).await?;
        Ok(live.data.iter().filter(|f| chosen(f)).map(|f| Arc::clone(&f.fact.path)).collect())
    }
}

/// The branch at its new head, with the retention that it has.
fn moved(table: &LoadedTable, branch: &RefName, id: SnapshotId) -> RefFact {
    match table.facts.refs.get(branch) {
        Some(reference) => RefFact { snapshot_id: id, ..reference.clone() },
        None => RefFact {
            name: branch.clone(),
            snapshot_id: id,
            kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        },
    }
}

fn refused(outcome: CommitOutcome, branch: &RefName) -> BranchWriteError {
    match outcome {
        CommitOutcome::Refused(error) => error.into(),
        CommitOutcome::Unknown(what) | CommitOutcome::Unexplained(what) => BranchWriteError::Unknown(what),
        _ => BranchWriteError::Moved(branch.clone()),
    }
}
