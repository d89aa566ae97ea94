//! Steps 3 and 4 of the protocol: the train's row, and the one commit that stages it.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::admission::Car;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{CLAIM_PROPERTY, RefFact, RefKind};
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::state::RequestEvent;
use serde_json::{Value, json};

use super::context::Worker;
use super::error::WorkerError;
use super::gather::Gathered;
use super::losses::{Loss, conflict};
use super::pins::age_of;
use super::protocol::Train;
use super::stage::{Candidates, VANISHED_ROWS};
use super::tries::Tries;
use super::verdicts::admission;
use crate::ledger::{Change, TrainRow, TrainStatus};
use crate::table::catalog::CommitOutcome;
use crate::table::cleanup::Checkpoint;
use crate::table::loaded::LoadedTable;

/// Life of a temporary branch, in milliseconds: long enough for any check, short enough to be swept by
/// expiry should the ledger be lost (rule R3).
pub(super) const TEMPORARY_LIFE_MS: i64 = 7 * 24 * 3600 * 1000;

/// Where the requests of a train stand when its files are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Admitted,
    /// The files were written ahead, and the ledger does not say yet that they ride.
    Waiting,
}

/// What became of the staging commit.
pub(super) enum Staged {
    /// The table with the train in it.
    Applied(Arc<LoadedTable>),
    /// Not applied, or not known to be; the requests are given back.
    Lost { again: bool },
}

impl Worker {
    pub(super) async fn record_train(
        &self,
        train: &Train,
        candidates: &Candidates,
        standing: Standing,
    ) -> Result<(), WorkerError> {
        let row = TrainRow {
            train: train.id.clone(),
            table_uuid: train.lane().uuid.clone(),
            target: train.lane().target.clone(),
            temp_ref: train.fence.clone(),
            planned_head: train.gathered.head,
            tail: candidates.tail,
            candidates: candidates.cars.iter().flat_map(|c| c.candidates.iter().copied()).collect(),
            written: Some(written_json(candidates)?),
            status: TrainStatus::Staging,
            at_ms: self.now_ms(),
        };
        match standing {
            Standing::Admitted => {
                let requests: Vec<RequestId> = candidates.requests().collect();
                self.ledger.record_train(train.epoch, &row, &requests).await?;
            }
            Standing::Waiting => {
                let admissions: Vec<Change> =
                    candidates.cars.iter().map(|staged| admission(&train.id, &staged.car)).collect();
                self.ledger.record_admitted(train.epoch, &row, &admissions).await?;
            }
        }
        Ok(())
    }

    /// One commit (rule L1). As long as only other branches are written meanwhile, the candidates are
    /// written again and the commit is sent again: planning anew would take longer than such a writer
    /// pauses, and the train would never leave.
    pub(super) async fn stage(
        &self,
        train: &Train,
        candidates: &mut Candidates,
    ) -> Result<Staged, WorkerError> {
        let mut table = Arc::clone(&train.gathered.table);
        let mut tries = Tries::of_staging(&table);
        loop {
            let outcome = self.send_staging(train, &table, candidates).await;
            let is_moved = matches!(outcome, CommitOutcome::PointerMoved | CommitOutcome::TableChanged(_));
            if !is_moved || !self.again(&mut tries).await {
                return self.staged(train, candidates, outcome).await;
            }
            let now = self.catalog.load(&train.lane().table).await?;
            if conflict(&table, &now) != Loss::PointerMoved || !same_ground(&train.gathered, &now) {
                return self.staged(train, candidates, outcome).await;
            }
            let superseded = self.write_again(train, &now, candidates).await?;
            self.ledger.rewrite_train(train.epoch, &train.id, &written_json(candidates)?).await?;
            self.delete_superseded(&now, &superseded).await;
            tracing::debug!(train = %train.id, "other branches were written; the train is staged again");
            table = now;
        }
    }

    async fn send_staging(
        &self,
        train: &Train,
        table: &LoadedTable,
        candidates: &Candidates,
    ) -> CommitOutcome {
        let facts = &table.facts;
        let mut requirements = vec![
            Requirement::TableUuid(train.lane().uuid.clone()),
            Requirement::RefAt { name: train.fence.clone(), at: None, role: RefRole::NewName },
            Requirement::RefAt {
                name: train.lane().target.clone(),
                at: train.gathered.head,
                role: RefRole::Target,
            },
            Requirement::CurrentSchema(facts.current_schema_id),
            Requirement::DefaultSpec(facts.default_spec_id),
            Requirement::DefaultSortOrder(facts.default_sort_order_id),
        ];
        for car in &candidates.cars {
            // A branch that has grown keeps its pinned snapshot alive by ancestry; one that stands at its
            // pin must still do so, or the pin may be on its way out.
            if train.gathered.table.facts.head(&car.car.source) == Some(car.car.pinned) {
                requirements.push(source_at_pin(&car.car));
            }
        }
        let mut updates: Vec<Update> =
            candidates.snapshots.iter().cloned().map(Update::AddSnapshot).collect();
        if let Some(Checkpoint { branch, snapshots, .. }) = &candidates.written.checkpoint
            && let Some(at) = facts.head(branch)
        {
            // From here on the candidates name its files.
            requirements.push(Requirement::RefAt {
                name: branch.clone(),
                at: Some(at),
                role: RefRole::Fence,
            });
            updates.push(Update::RemoveRef(branch.clone()));
            let there = snapshots.iter().copied().filter(|id| facts.snapshots.contains(*id)).collect();
            updates.push(Update::RemoveSnapshots(there));
        }
        // Rule R3: age counts from the head's timestamp, and a fast-forwarded head may be old; the whole
        // train is kept, the snapshots that a fast-forward brings included.
        let length: usize = candidates.cars.iter().map(|car| car.candidates.len()).sum();
        let life_ms = TEMPORARY_LIFE_MS.saturating_add(age_of(facts, candidates.tail, self.now_ms()));
        updates.push(Update::SetRef(RefFact {
            name: train.fence.clone(),
            snapshot_id: candidates.tail,
            kind: RefKind::Branch {
                min_snapshots_to_keep: i32::try_from(length.max(1)).ok(),
                max_snapshot_age_ms: Some(life_ms),
            },
            max_ref_age_ms: Some(life_ms),
        }));
        // Rule R7: the first train of a queue claims the table.
        if !facts.properties.contains_key(CLAIM_PROPERTY) {
            let claim = (CLAIM_PROPERTY.to_owned(), self.ledger.queue_id().to_string());
            updates.push(Update::SetProperties(BTreeMap::from([claim])));
        }
        self.catalog.commit(table, &requirements, updates).await
    }

    /// What became of the staging commit.
    async fn staged(
        &self,
        train: &Train,
        candidates: &Candidates,
        outcome: CommitOutcome,
    ) -> Result<Staged, WorkerError> {
        let (loss, why) = match outcome {
            CommitOutcome::Landed(_) => {
                // Case O01: what counts is the table as it is read now.
                let table = self.catalog.load(&train.lane().table).await?;
                if table.facts.head(&train.fence) == Some(candidates.tail) {
                    // While the train can still be swept: nobody looks for them once it has landed.
                    if let Some(checkpoint) = &candidates.written.checkpoint {
                        self.delete_superseded(&table, &checkpoint.own_files()).await;
                    }
                    return Ok(Staged::Applied(table));
                }
                let why =
                    format!("the catalog says that it staged the train, but {} is not there", train.fence);
                return self.staging_unknown(train, candidates, &why).await;
            }
            CommitOutcome::HeadMoved => {
                (Loss::HeadMoved, "the target moved while the train was staged".to_owned())
            }
            CommitOutcome::SourceMoved(name) => {
                (Loss::HeadMoved, format!("{name} moved while the train was staged"))
            }
            CommitOutcome::NameTaken(name) => (Loss::HeadMoved, format!("{name} exists already")),
            CommitOutcome::PointerMoved => {
                let now = self.catalog.load(&train.lane().table).await?;
                match conflict(&train.gathered.table, &now) {
                    Loss::Unexplained => (
                        Loss::Unexplained,
                        format!(
                            "the catalog says that {} moved while the train was staged, but its metadata is \
                             still {}",
                            train.lane().table,
                            now.metadata_location
                        ),
                    ),
                    loss => (loss, "the table was written while the train was staged".to_owned()),
                }
            }
            CommitOutcome::TableChanged(what) => {
                (Loss::PointerMoved, format!("the table changed while the train was staged: {what}"))
            }
            CommitOutcome::Fenced => (Loss::HeadMoved, "the temporary branch is gone".to_owned()),
            // Nothing is deleted on the word of a catalog that contradicts itself: what was staged, should it
            // be there, is swept with the train's row.
            CommitOutcome::Unexplained(what) | CommitOutcome::Unknown(what) => {
                return self.staging_unknown(train, candidates, &what).await;
            }
            CommitOutcome::Refused(error) => {
                self.ledger.set_train_status(train.epoch, &train.id, TrainStatus::Dropped).await?;
                let error = WorkerError::from(error);
                self.wait_out(train.epoch, candidates.requests(), &error).await?;
                self.delete_written(train.lane(), candidates).await;
                return Err(error);
            }
        };
        self.ledger.set_train_status(train.epoch, &train.id, TrainStatus::Dropped).await?;
        self.delete_written(train.lane(), candidates).await;
        let again = self.give_back(train.epoch, train.lane(), candidates.requests(), loss, &why).await?;
        Ok(Staged::Lost { again })
    }

    /// Nothing can have landed, since no intent is written. The temporary branch, should it exist, is swept
    /// with the train's row.
    async fn staging_unknown(
        &self,
        train: &Train,
        candidates: &Candidates,
        what: &str,
    ) -> Result<Staged, WorkerError> {
        tracing::warn!(table = %train.lane().table, "staging has no known outcome: {what}");
        let requests = candidates.requests();
        let again = self.give_back(train.epoch, train.lane(), requests, Loss::Unexplained, what).await?;
        Ok(Staged::Lost { again })
    }

    pub(super) async fn record_staged(
        &self,
        train: &Train,
        candidates: &Candidates,
    ) -> Result<(), WorkerError> {
        self.ledger.set_train_status(train.epoch, &train.id, TrainStatus::Staged).await?;
        let changes = staged_changes(train, candidates);
        self.ledger.apply(Some(train.epoch), &changes, self.now_ms()).await?;
        Ok(())
    }
}

/// What the ledger is told of every request when its train is known to be staged.
pub(super) fn staged_changes(train: &Train, candidates: &Candidates) -> Vec<Change> {
    let cars = candidates.cars.iter();
    cars.flat_map(|car| [RequestEvent::Stage, RequestEvent::Check].map(|event| (car, event)))
        .map(|(car, event)| Change {
            request: car.car.request,
            event,
            train: Some(train.id.clone()),
            classification: None,
            // Rule D5: rows that the target loses although the branch never saw them are told.
            detail: (car.vanished_rows > 0).then(|| json!({ VANISHED_ROWS: car.vanished_rows })),
        })
        .collect()
}

/// What a successor has to delete, should this worker die (rule R8).
fn written_json(candidates: &Candidates) -> Result<Value, WorkerError> {
    serde_json::to_value(&candidates.written)
        .map_err(|error| WorkerError::Bug(format!("a list of files is no JSON: {error}")))
}

/// Is everything that the candidates were planned on as it was?
pub(super) fn same_ground(gathered: &Gathered, now: &LoadedTable) -> bool {
    let (planned, now) = (&gathered.table.facts, &now.facts);
    now.uuid == planned.uuid
        && now.head(&gathered.lane.target) == gathered.head
        && now.structure() == planned.structure()
        && now.rules_differ(planned).is_none()
}

pub(super) fn source_at_pin(car: &Car) -> Requirement {
    Requirement::RefAt { name: car.source.clone(), at: Some(car.pinned), role: RefRole::Source }
}
