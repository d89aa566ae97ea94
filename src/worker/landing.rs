//! Steps 6 to 9 of the protocol: intent, landing commit, verification, receipt.

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{IntentId, QueueId, RefName, RequestId, SnapshotId};
use mergeberg_kernel::policy::{ClassPolicy, OnSourceMoved};

use super::context::Worker;
use super::error::WorkerError;
use super::judge::{Findings, Passed};
use super::losses::{Loss, conflict};
use super::pins::pins_of;
use super::protocol::{Progress, Train};
use super::settle::{Finding, read_outcome};
use super::stage::Candidates;
use super::staging::source_at_pin;
use super::step::{Step, reached};
use super::tries::Tries;
use crate::ledger::{Intent, IntentCar};
use crate::table::catalog::CommitOutcome;
use crate::table::loaded::LoadedTable;

impl Worker {
    /// Intent, landing commit, verification, receipt.
    pub(super) async fn land(
        &self,
        train: &Train,
        mut table: Arc<LoadedTable>,
        candidates: Candidates,
        findings: Findings,
    ) -> Result<Progress, WorkerError> {
        let Passed { required, fenced } = Passed::of(&train.gathered.policy, &findings.evidence);
        // Rule L7: no requirement can say this, so the table is read again right before.
        table = self.catalog.load(&train.lane().table).await.unwrap_or(table);
        if let Some(why) = self.other_rules(train, &table) {
            self.record_findings(train, &candidates, &findings).await?;
            self.drop_train(train, &candidates).await?;
            let changed = self
                .give_back(train.epoch, train.lane(), candidates.requests(), Loss::HeadMoved, &why)
                .await?;
            return Ok(Progress { landed: 0, changed });
        }
        let mut keep: BTreeSet<RefName> = BTreeSet::new();
        let intent = intent_of(train, &candidates, required, None);
        self.write_intent(train, &candidates, &findings, &intent).await?;
        reached(Step::IntentWritten);

        // One time for the whole landing: a tag's name must not change while it is sent again.
        let now_ms = self.now_ms();
        let mut tries = Tries::of_landing(&table);
        loop {
            let (requirements, updates) =
                landing(self.ledger.queue_id(), train, &table, &candidates, &keep, now_ms);
            let outcome = match self.send_landing(&table, requirements, updates, &fenced).await? {
                Ok(outcome) => outcome,
                Err(why) => return self.settle_own(train, &intent, &candidates, Loss::HeadMoved, &why).await,
            };
            let (loss, why) = match outcome {
                CommitOutcome::Landed(_) => {
                    reached(Step::Landed);
                    if let Some(progress) = self.receipt(train, &intent).await? {
                        return Ok(progress);
                    }
                    self.ledger.mark_unknown(train.epoch, &intent.id, self.now_ms()).await?;
                    let why = format!(
                        "the catalog says that it landed, but {} is not at {}",
                        intent.target, intent.tail
                    );
                    (Loss::Unexplained, why)
                }
                CommitOutcome::PointerMoved => {
                    let now = self.catalog.load(&train.lane().table).await?;
                    let loss = conflict(&table, &now);
                    if let Some(why) = self.other_rules(train, &now) {
                        (Loss::HeadMoved, why)
                    } else if loss == Loss::PointerMoved && self.again(&mut tries).await {
                        // What others wrote during the pause is seen when it is sent.
                        table = now;
                        continue;
                    } else {
                        (loss, "other branches of the table are written without a pause".to_owned())
                    }
                }
                CommitOutcome::SourceMoved(name) => {
                    // Rule L6: a branch that grew is kept and the pin lands; anything else is another plan.
                    table = self.catalog.load(&train.lane().table).await?;
                    match self.other_rules(train, &table) {
                        Some(why) => (Loss::HeadMoved, why),
                        None if grew(&table, &candidates, &name) && keep.insert(name) => continue,
                        None => (Loss::HeadMoved, "a source branch was reset".to_owned()),
                    }
                }
                CommitOutcome::HeadMoved => (Loss::HeadMoved, "the target moved meanwhile".to_owned()),
                CommitOutcome::NameTaken(name) => (Loss::HeadMoved, format!("{name} exists already")),
                CommitOutcome::TableChanged(what) => (Loss::PointerMoved, what),
                CommitOutcome::Unexplained(what) => (Loss::Unexplained, what),
                CommitOutcome::Refused(error) => (Loss::Unexplained, error.to_string()),
                // Somebody removed the fence, or nobody knows: only the catalog's state decides.
                CommitOutcome::Fenced => (Loss::HeadMoved, "the temporary branch was removed".to_owned()),
                CommitOutcome::Unknown(what) => {
                    tracing::warn!(train = %train.id, "landing has no known outcome: {what}");
                    self.ledger.mark_unknown(train.epoch, &intent.id, self.now_ms()).await?;
                    (Loss::Unexplained, what)
                }
            };
            return self.settle_own(train, &intent, &candidates, loss, &why).await;
        }
    }

    /// What makes the table another one than the train was staged and checked on, without its refs, uuid or
    /// structure having moved: those are requirements of the commit.
    pub(super) fn other_rules(&self, train: &Train, now: &LoadedTable) -> Option<String> {
        if let Some(other) = now.facts.foreign_claim(self.ledger.queue_id()) {
            return Some(format!("queue {other} has claimed the table"));
        }
        now.facts.rules_differ(&train.gathered.table.facts)
    }

    /// Case O01: the target is read from the catalog before anything is called landed. `None`: it is not.
    async fn receipt(&self, train: &Train, intent: &Intent) -> Result<Option<Progress>, WorkerError> {
        let table = self.catalog.load(&intent.table).await?;
        if read_outcome(&table, intent) != Finding::Landed {
            return Ok(None);
        }
        self.ledger.settle_landed(train.epoch, &intent.id, self.now_ms(), &landed_of(intent)).await?;
        reached(Step::ReceiptWritten);
        self.forget_losses(train.lane());
        for car in &intent.cars {
            tracing::info!(request = %car.request, table = %intent.table, target = %intent.target,
                snapshot = ?car.candidates.last(), "landed");
        }
        Ok(Some(Progress { landed: intent.cars.len(), changed: true }))
    }

    /// The catalog did not say yes. The fence goes first: then it is proved whether anything landed, and the
    /// train is taken off the catalog (rules L3, R1, R8).
    async fn settle_own(
        &self,
        train: &Train,
        intent: &Intent,
        candidates: &Candidates,
        loss: Loss,
        why: &str,
    ) -> Result<Progress, WorkerError> {
        tracing::info!(train = %intent.train, "not known to have landed: {why}");
        let lane = train.lane();
        let mut progress = self.settle_one(train.epoch, intent, why).await?;
        if progress.changed && progress.landed == 0 {
            self.drop_train(train, candidates).await?;
            progress.changed = self.give_back(train.epoch, lane, candidates.requests(), loss, why).await?;
        } else if progress.landed > 0 {
            self.forget_losses(lane);
        }
        Ok(progress)
    }
}

pub(super) fn intent_of(
    train: &Train,
    candidates: &Candidates,
    required: Vec<(SnapshotId, String)>,
    set: Option<RequestId>,
) -> Intent {
    let cars = candidates.cars.iter().map(|car| IntentCar {
        request: car.car.request,
        candidates: car.candidates.clone(),
        drop_source: car.car.drop_source.then(|| car.car.source.clone()),
    });
    Intent {
        id: IntentId(format!("intent-{}", train.id)),
        train: train.id.clone(),
        table_uuid: train.lane().uuid.clone(),
        table: train.lane().table.clone(),
        target: train.lane().target.clone(),
        planned_head: train.gathered.head,
        tail: candidates.tail,
        candidates: candidates.cars.iter().flat_map(|c| c.candidates.iter().copied()).collect(),
        temp_ref: train.fence.clone(),
        cars: cars.collect(),
        required,
        set,
    }
}

/// Each request with the snapshot that publishes it.
pub(super) fn landed_of(intent: &Intent) -> Vec<(RequestId, SnapshotId)> {
    intent.cars.iter().filter_map(|car| car.candidates.last().map(|tail| (car.request, *tail))).collect()
}

/// The tag that a class asks for: `{request}` is the request's id, `{date}` the day in UTC.
pub(super) fn tag_name(class: &ClassPolicy, request: RequestId, now_ms: i64) -> Option<RefName> {
    let form = class.tag.as_ref()?;
    let date = chrono::DateTime::from_timestamp_millis(now_ms).map(|at| at.format("%Y-%m-%d").to_string());
    Some(RefName(
        form.replace("{request}", &request.to_string()).replace("{date}", &date.unwrap_or_default()),
    ))
}

/// A branch that descends from its pin; its class must allow that the pin lands without it.
pub(super) fn grew(table: &LoadedTable, candidates: &Candidates, name: &RefName) -> bool {
    let Some(head) = table.facts.head(name) else { return false };
    candidates.cars.iter().filter(|car| &car.car.source == name).all(|car| {
        car.car.class.on_source_moved == OnSourceMoved::LandPin
            && table.facts.snapshots.is_ancestor(car.car.pinned, head)
    })
}

/// The landing commit of design section 7.
pub(super) fn landing(
    queue: &QueueId,
    train: &Train,
    table: &LoadedTable,
    candidates: &Candidates,
    keep: &BTreeSet<RefName>,
    now_ms: i64,
) -> (Vec<Requirement>, Vec<Update>) {
    let planned = &train.gathered.table.facts;
    let target = &train.lane().target;
    let mut requirements = vec![
        Requirement::TableUuid(train.lane().uuid.clone()),
        Requirement::RefAt { name: target.clone(), at: train.gathered.head, role: RefRole::Target },
        Requirement::RefAt { name: train.fence.clone(), at: Some(candidates.tail), role: RefRole::Fence },
        Requirement::CurrentSchema(planned.current_schema_id),
        Requirement::DefaultSpec(planned.default_spec_id),
        Requirement::DefaultSortOrder(planned.default_sort_order_id),
    ];
    // Rule R4: the target's retention as loaded; a first `main` has none.
    let loaded = table.facts.refs.get(target);
    let mut updates = vec![
        Update::SetRef(RefFact {
            name: target.clone(),
            snapshot_id: candidates.tail,
            kind: loaded
                .map_or(RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None }, |r| {
                    r.kind.clone()
                }),
            max_ref_age_ms: loaded.and_then(|r| r.max_ref_age_ms),
        }),
        Update::RemoveRef(train.fence.clone()),
    ];
    let mut dropped: BTreeSet<&RefName> = BTreeSet::new();
    for staged in &candidates.cars {
        let car = &staged.car;
        // Rule R6: whatever took the branch's name meanwhile is not handed over, a tag least of all.
        let is_branch = table.facts.refs.get(&car.source).is_none_or(RefFact::is_branch);
        if car.drop_source && is_branch && !keep.contains(&car.source) && dropped.insert(&car.source) {
            requirements.push(source_at_pin(car));
            updates.push(Update::RemoveRef(car.source.clone()));
        }
        // What the pins kept is on the target now.
        updates.extend(pins_of(&table.facts, queue, car.request).map(Update::RemoveRef));
        if let (Some(name), Some(tail)) = (tag_name(&car.class, car.request, now_ms), staged.tail()) {
            requirements.push(Requirement::RefAt { name: name.clone(), at: None, role: RefRole::NewName });
            updates.push(Update::SetRef(RefFact {
                name,
                snapshot_id: tail,
                kind: RefKind::Tag,
                max_ref_age_ms: None,
            }));
        }
    }
    (requirements, updates)
}
