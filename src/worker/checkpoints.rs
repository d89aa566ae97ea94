//! Files of a train that is not staged yet, named in the catalog (rule R10), and what becomes of them otherwise.
//!
//! A removal of orphan files deletes what no snapshot names, once it is old enough. So the files that a long replay has
//! finished are put into snapshots of nothing else, under a branch of their own beside the train's fence. The staging commit
//! takes branch and snapshots away: at no moment do two lines of history name a file that may be published, since an
//! expiry in Java deletes what a dropped snapshot added unless it is picked (`IncrementalFileCleanup`).

use std::collections::BTreeMap;

use mergeberg_kernel::change::FileContent;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{Epoch, RefName, SnapshotId, TrainId};

use super::context::{CHECKPOINT_SUFFIX, Lane, Worker, checkpoint_ref, temporary_prefix};
use super::error::WorkerError;
use super::gather::Gathered;
use super::replays::Writing;
use super::staging::TEMPORARY_LIFE_MS;
use super::step::{Step, reached};
use crate::ledger::{Kept, NotedFile, NotedKind, RequestRow, UnrecordedTrain};
use crate::table::catalog::CommitOutcome;
use crate::table::cleanup::{Checkpoint, WrittenFiles, delete_files};
use crate::table::error::TableError;
use crate::table::loaded::LoadedTable;
use crate::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};

/// Summary key of a snapshot that only names files, with the train whose files they are.
pub(super) const CHECKPOINT_KEY: &str = "mergeberg.checkpoint";

/// Times that a checkpoint is sent; then it waits until the next one is due.
const CHECKPOINT_TRIES: u32 = 5;

/// What became of one try.
enum Tried {
    Named,
    /// Somebody else wrote the table.
    Again,
}

impl Worker {
    /// Names the files that are whole in the catalog. One that does not get through is tried again when the next is due;
    /// only trouble of the ledger is an error.
    pub(super) async fn checkpoint(&self, gathered: &Gathered, writing: &Writing) -> Result<(), WorkerError> {
        let files = writing.files(|files| files.take_unnamed());
        if files.is_empty() {
            return Ok(());
        }
        for tries in 1..=CHECKPOINT_TRIES {
            match self.try_checkpoint(gathered, writing, &files).await {
                Ok(Tried::Named) => {
                    tracing::info!(train = %writing.train.train, files = files.len(), "a checkpoint was made");
                    reached(Step::Checkpointed);
                    return Ok(());
                }
                Ok(Tried::Again) => self.pause(tries).await,
                Err(error @ WorkerError::Ledger(_)) => return Err(error),
                Err(error) => {
                    tracing::warn!(train = %writing.train.train, "a checkpoint was not made: {error}");
                    break;
                }
            }
        }
        writing.files(|all| all.give_back(files));
        Ok(())
    }

    async fn try_checkpoint(
        &self,
        gathered: &Gathered,
        writing: &Writing,
        files: &[AddedFile],
    ) -> Result<Tried, WorkerError> {
        let lane = &gathered.lane;
        let table = self.catalog.load(&lane.table).await?;
        // Nobody looks at the table's requests meanwhile, and they may wait for hours: rule R2.
        let mut kept = self.to_keep(lane).await?;
        let rides = |row: &&RequestRow| writing.requests.contains(&row.id);
        kept.extend(gathered.rows.iter().filter(rides).map(|row| Kept {
            id: row.id,
            source: row.source.clone(),
            pinned: row.pinned,
            enqueued_at_ms: row.enqueued_at_ms,
        }));
        let table = self.keep_pins(lane, table, &kept).await?;
        self.keep_inputs(lane, &table, &kept).await?;
        let branch = checkpoint_ref(self.ledger.queue_id(), &writing.train.train);
        let made = writing.files(|files| files.checkpoint.clone());
        let at = made.as_ref().and_then(|made| made.snapshots.last().copied());
        let parent = at.and_then(|id| table.facts.snapshots.get(id));
        let mut writer =
            SnapshotWriter::on(&self.store, &table, parent).await?.noting(self.notes_of(writing));
        let id = new_snapshot_id(&table.facts, || (self.random)());
        let snapshots =
            writer.add_all(vec![self.naming(id, &writing.train.train, &table.facts, files)]).await?;
        reached(Step::CheckpointWritten);

        let mut requirements = vec![Requirement::TableUuid(lane.uuid.clone())];
        requirements.push(match at {
            None => Requirement::RefAt { name: branch.clone(), at: None, role: RefRole::NewName },
            at => Requirement::RefAt { name: branch.clone(), at, role: RefRole::Fence },
        });
        // Some servers mishandle a single requirement of a ref (rule L7).
        requirements.push(Requirement::RefAt {
            name: lane.target.clone(),
            at: table.facts.head(&lane.target),
            role: RefRole::Target,
        });
        let length = made.as_ref().map_or(0, |made| made.snapshots.len()) + 1;
        let mut updates: Vec<Update> = snapshots.into_iter().map(Update::AddSnapshot).collect();
        updates.push(Update::SetRef(RefFact {
            name: branch.clone(),
            snapshot_id: id,
            kind: RefKind::Branch {
                min_snapshots_to_keep: i32::try_from(length).ok(),
                max_snapshot_age_ms: Some(TEMPORARY_LIFE_MS),
            },
            max_ref_age_ms: Some(TEMPORARY_LIFE_MS),
        }));
        let outcome = self.catalog.commit(&table, &requirements, updates).await;
        // What counts is the table as it is read now (case O01).
        let now = self.catalog.load(&lane.table).await?;
        let written = writer.written_files();
        if now.facts.head(&branch) == Some(id) {
            writing.files(|files| {
                files.checkpointed_at_ms = Some(self.now_ms());
                let made = files.checkpoint.get_or_insert_with(|| Checkpoint {
                    branch,
                    first_sequence_number: written.first_sequence_number,
                    snapshots: Vec::new(),
                    manifest_lists: Vec::new(),
                    manifests: Vec::new(),
                    left_over: Vec::new(),
                });
                made.snapshots.push(id);
                made.manifest_lists.extend(written.manifest_lists);
                made.manifests.extend(written.manifests);
            });
            return Ok(Tried::Named);
        }
        self.delete_superseded(&now, &written).await;
        match outcome {
            CommitOutcome::Refused(error) => Err(error.into()),
            _ => Ok(Tried::Again),
        }
    }

    /// A snapshot of these files and nothing else.
    fn naming(
        &self,
        id: SnapshotId,
        train: &TrainId,
        facts: &TableFacts,
        files: &[AddedFile],
    ) -> SnapshotChange {
        let (add, add_deletes): (Vec<AddedFile>, Vec<AddedFile>) =
            files.iter().cloned().partition(|file| file.fact.content == FileContent::Data);
        SnapshotChange {
            id,
            label: if add.is_empty() { "delete" } else { "append" }.to_owned(),
            add,
            remove: Default::default(),
            add_deletes,
            remove_deletes: Default::default(),
            summary: BTreeMap::from([(CHECKPOINT_KEY.to_owned(), train.to_string())]),
            now_ms: self.now_ms(),
            schema_id: facts.current_schema_id,
        }
    }

    /// Takes a train's checkpoints off the catalog. `false`: they may still be there.
    pub(super) async fn drop_checkpoint(&self, lane: &Lane, branch: &RefName) -> Result<bool, WorkerError> {
        let table = self.catalog.load(&lane.table).await?;
        let own = made_for(&table, branch, &temporary_prefix(self.ledger.queue_id()));
        if own.is_empty() && table.facts.head(branch).is_none() {
            return Ok(true);
        }
        self.remove_staged(lane, branch, None, &own).await
    }

    /// Deletes what was written for a train that has no row: first what names it, then the files (rule R8).
    pub(super) async fn discard_files(
        &self,
        epoch: Epoch,
        lane: &Lane,
        train: &UnrecordedTrain,
    ) -> Result<(), WorkerError> {
        let branch = checkpoint_ref(self.ledger.queue_id(), &train.train);
        if !self.drop_checkpoint(lane, &branch).await? {
            tracing::warn!(train = %train.train, "'{branch}' cannot be removed yet; its files stay");
            return Ok(());
        }
        let mut written =
            WrittenFiles { first_sequence_number: train.first_sequence_number, ..WrittenFiles::default() };
        add_noted(&mut written, self.ledger.noted_files(&train.train).await?);
        let table = self.catalog.load(&lane.table).await?;
        match delete_files(&self.store, &table, &written).await {
            Ok(deleted) if deleted.failed.is_empty() => {}
            Ok(deleted) => {
                tracing::warn!(
                    train = %train.train, "{} file(s) of a replay could not be deleted yet", deleted.failed.len()
                );
                return Ok(());
            }
            // Somebody made a snapshot of them: they are the table's own now.
            Err(error @ TableError::StillReferenced { .. }) => {
                tracing::warn!(train = %train.train, "{error}")
            }
            Err(error) => return Err(error.into()),
        }
        self.ledger.end_files(epoch, &train.train).await?;
        Ok(())
    }

    /// What replays of a dead worker left of this lane, and checkpoints of trains that the ledger has forgotten.
    pub(super) async fn sweep_replays(
        &self,
        epoch: Epoch,
        lane: &Lane,
        table: &LoadedTable,
    ) -> Result<(), WorkerError> {
        for train in self.ledger.unrecorded_trains(&lane.uuid).await? {
            if train.target == lane.target {
                self.discard_files(epoch, lane, &train).await?;
            }
        }
        let prefix = temporary_prefix(self.ledger.queue_id());
        let left = table.facts.refs.keys().filter(|name| train_of(name, &prefix).is_some());
        for branch in left {
            self.drop_checkpoint(lane, branch).await?;
        }
        Ok(())
    }
}

/// Files that were noted before they were written, if they were.
pub(super) fn add_noted(written: &mut WrittenFiles, files: Vec<NotedFile>) {
    for NotedFile { path, kind } in files {
        match kind {
            NotedKind::Rows => written.data_files.push(path),
            NotedKind::Manifest => written.manifests.push(path.to_string()),
            NotedKind::ManifestList => written.manifest_lists.push(path.to_string()),
        }
    }
}

/// The train whose checkpoints a branch names.
fn train_of<'a>(branch: &'a RefName, prefix: &str) -> Option<&'a str> {
    branch.as_str().strip_prefix(prefix)?.strip_suffix(CHECKPOINT_SUFFIX)
}

/// The snapshots that a train's checkpoints made.
fn made_for(table: &LoadedTable, branch: &RefName, prefix: &str) -> Vec<SnapshotId> {
    let Some(train) = train_of(branch, prefix) else { return Vec::new() };
    let is_own = |summary: &BTreeMap<String, String>| summary.get(CHECKPOINT_KEY).is_some_and(|t| t == train);
    table.facts.snapshots.iter().filter(|snapshot| is_own(&snapshot.summary)).map(|s| s.id).collect()
}
