//! Which waiting requests make the next train, and what becomes of the others.
//!
//! Arrival order, plus age: a request older than its class's bound goes ahead. A request whose scope is
//! the whole table yields to the others until then, and rides alone. A request that overlaps one ahead is
//! held, not failed. Compactions yield to everybody: see [`compaction`].

mod compaction;
pub mod external;
pub mod set;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::change::{ChangeSet, FileContent, FileFact, RewriteProof};
use crate::classify::{
    Class, Classification, ClassifyInput, Origin, TargetChange, TargetSide, Witness, blocked_by_ahead,
    classify,
};
use crate::ids::{RefName, RequestId, SnapshotId, SpecId};
use crate::lineage::BaseFinding;
use crate::partition::Partition;
use crate::policy::{AfterLanding, ClassPolicy, OnSourceMoved};
use crate::reason::ReasonCode;
use crate::record::{Operation, RecordFinding};
use crate::structure::StructureId;
use crate::unit::{Unit, UnitKind, UnitRefusal, UnitScope};
use external::ExternalStanding;
use set::{PartFacts, PartTurn};

/// Where the source branch stands now, against the pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceNow {
    AtPin,
    /// The branch grew past the pin.
    MovedTo(SnapshotId),
    /// The branch is at a snapshot that does not descend from the pin.
    ResetTo(SnapshotId),
    /// The branch is gone.
    Gone,
}

/// How the structure that the source was written under stands (design, section 8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StructureStanding {
    Accepted,
    /// Accepted by a review, and nothing under it has landed yet: a barrier.
    Barrier,
    /// Waits for a reviewer.
    InReview,
    /// Not accepted, and no review item speaks of it yet: one has to be opened.
    Unknown(StructureId),
    Rejected,
    /// Accepted, but what was written cannot be read as the table's present schema.
    Unreadable(String),
}

/// Whose branch a source is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceKind {
    /// A pipeline's.
    #[default]
    Branch,
    /// The queue's own: it keeps a bare staged snapshot.
    Staged,
    /// The queue's own: it holds the inverse of a landed request.
    Revert,
}

impl SourceKind {
    /// Made by the queue, which lets go of it with the landing whatever the class says.
    pub fn is_own(self) -> bool {
        self != Self::Branch
    }
}

/// Ids of staged writes (summary key `wap.id`) that a source would publish. Java publishes each once
/// (`WapUtil.validateWapPublish`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WapIds {
    pub own: BTreeSet<String>,
    /// One of them that the target has from another source, and the snapshot that brought it there.
    pub taken: Option<(String, SnapshotId)>,
}

/// Everything known of one waiting request.
#[derive(Clone, Debug)]
pub struct RequestFacts {
    pub request: RequestId,
    pub source: RefName,
    pub kind: SourceKind,
    pub pinned: SnapshotId,
    pub enqueued_at_ms: i64,
    pub class: Arc<ClassPolicy>,
    pub source_now: SourceNow,
    pub base: BaseFinding,
    pub pinned_on_target: bool,
    pub rolled_back: bool,
    pub structure: StructureStanding,
    pub wap: WapIds,
    /// Source side, oldest first; an error is the request's own.
    pub units: Result<Vec<Unit>, UnitRefusal>,
    /// Something the request needs cannot be read: refused, with the reason and a sentence.
    pub broken: Option<(ReasonCode, String)>,
    /// Its source has not been looked into far enough to classify it: held, with the reason and a sentence.
    pub unread: Option<(ReasonCode, String)>,
    /// Target side since this request's base.
    pub target_side: Arc<TargetSide>,
    /// It is one table's part of a set.
    pub part: Option<PartFacts>,
    /// Where it stands with the runs of its class's own command; `None`: its class has none. With a result, `base`,
    /// `units` and `target_side` are those of the result.
    pub external: Option<ExternalStanding>,
}

impl RequestFacts {
    /// The head that its class's own command left, in place of the pinned one.
    pub fn rebuilt(&self) -> Option<SnapshotId> {
        self.external.as_ref().and_then(ExternalStanding::result)
    }
}

/// The target as planned on.
#[derive(Clone, Debug)]
pub struct TargetPlan<'a> {
    pub head: Option<SnapshotId>,
    pub published: &'a HashMap<SnapshotId, SnapshotId>,
    pub protected: &'a BTreeSet<RefName>,
    /// Sources that other open requests name, beside the waiting ones given.
    pub now_ms: i64,
    /// May a head be published as it is? Not when it is near expiry (rules R2, R9).
    pub fast_forward_allowed: bool,
}

/// What a car does on the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarAction {
    /// The pinned head itself becomes the candidate.
    FastForward,
    /// Every snapshot is applied again as a candidate of its own.
    Pick,
    /// The recorded operations run again against the car's parent.
    Replay,
}

/// One request's part of a train.
#[derive(Clone, Debug)]
pub struct Car {
    pub request: RequestId,
    pub source: RefName,
    pub pinned: SnapshotId,
    pub class: Arc<ClassPolicy>,
    pub action: CarAction,
    pub classification: Classification,
    /// Drop the branch with the landing, if it is still at the pin.
    pub drop_source: bool,
    /// Rides alone because of age, width or structure.
    pub alone: bool,
    /// What is landed was made by the class's own command, and this is its head.
    pub rebuilt: Option<SnapshotId>,
}

impl Car {
    /// What is done with it, as one word for people: a source that nothing overtook and that is applied
    /// again nevertheless, behind another car or because its head ages out soon, is a cherry-pick.
    pub fn word(&self) -> &'static str {
        if self.rebuilt.is_some() {
            return Class::Rebase.word();
        }
        match (self.action, self.classification.class) {
            (CarAction::Pick, Class::FastForward) => Class::CherryPick.word(),
            (_, class) => class.word(),
        }
    }
}

/// What becomes of a request that is not in the train.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Hold {
        code: ReasonCode,
        text: String,
        witnesses: Vec<Witness>,
    },
    Refuse {
        code: ReasonCode,
        text: String,
        class: Option<Class>,
        witnesses: Vec<Witness>,
    },
    AlreadyPublished {
        text: String,
    },
    Withdraw {
        code: ReasonCode,
        text: String,
    },
    InReview {
        text: String,
    },
    /// Pin this head instead (class rule `repin`), and look again at the next tick.
    Repin {
        to: SnapshotId,
    },
    /// Its class's own command is to make it again on the target's head; it waits meanwhile.
    RunExternal {
        text: String,
        witnesses: Vec<Witness>,
    },
}

/// The next train and the verdict on everyone else, in the order in which they were looked at.
#[derive(Debug, Default)]
#[must_use]
pub struct TrainPlan {
    pub cars: Vec<Car>,
    pub verdicts: Vec<(RequestId, Verdict)>,
    /// Those who could ride, but let compactions past their age bound go first. They stay as they are.
    pub next: Vec<RequestId>,
    /// Parts of sets: they never ride here, but have their place in the order.
    pub parts: Vec<(RequestId, PartTurn)>,
    /// Nobody who changes rows and came after those looked at could ride as well.
    pub full: bool,
}

/// Plans one train. `waiting` is in arrival order.
pub fn plan_train(waiting: &[RequestFacts], target: &TargetPlan<'_>) -> TrainPlan {
    let mut plan = plan_changes(waiting, target);
    compaction::join(waiting, target, &mut plan);
    decide_drops(waiting, target, &mut plan);
    plan
}

/// The train of those who change rows.
fn plan_changes(waiting: &[RequestFacts], target: &TargetPlan<'_>) -> TrainPlan {
    let mut plan = TrainPlan::default();
    let mut state = Riding::default();
    let mut later = Vec::new();
    for facts in in_order(waiting, target.now_ms).into_iter().filter(|f| !f.class.is_compaction()) {
        // Sets keep their order among themselves on every table, or two of them would wait for each other.
        if facts.part.is_none() && is_wide(facts, target) && !is_aged(facts, target.now_ms) {
            later.push(facts);
            continue;
        }
        take(facts, target, &mut plan, &mut state);
    }
    for facts in later {
        take(facts, target, &mut plan, &mut state);
    }
    plan.full = state.closed.is_some() || state.batch_size.is_some_and(|most| plan.cars.len() >= most);
    plan
}

/// Requests past their age bound first, then the others; each group in arrival order. A set goes ahead together
/// with every set that came before it: classes of another table may have another bound, and sets that stand in
/// one order here and in another there would wait for each other.
fn in_order(waiting: &[RequestFacts], now_ms: i64) -> Vec<&RequestFacts> {
    let last_set = waiting.iter().rposition(|f| f.part.is_some() && is_aged(f, now_ms));
    let (mut order, mut others) = (Vec::with_capacity(waiting.len()), Vec::new());
    for (at, facts) in waiting.iter().enumerate() {
        let with_a_set = facts.part.is_some() && last_set.is_some_and(|last| at <= last);
        if with_a_set || is_aged(facts, now_ms) { order.push(facts) } else { others.push(facts) }
    }
    order.append(&mut others);
    order
}

fn is_aged(facts: &RequestFacts, now_ms: i64) -> bool {
    now_ms.saturating_sub(facts.enqueued_at_ms) >= facts.class.age_bound.ms
}

/// Would this request be run again over the whole table? Such a one overlaps everything.
fn is_wide(facts: &RequestFacts, target: &TargetPlan<'_>) -> bool {
    let Ok(units) = &facts.units else { return false };
    let wide = units.iter().any(|u| u.scope == UnitScope::Table && u.is_replayable());
    wide && !facts.pinned_on_target && target.head.is_some()
}

#[derive(Default)]
struct Riding {
    changes: TargetSide,
    sources: BTreeSet<SnapshotId>,
    wap_ids: BTreeSet<String>,
    /// The smallest batch size among the cars' classes: the bound holds for the train, whoever rides.
    batch_size: Option<usize>,
    /// Requests that wait for a car of this train: nobody who came later overtakes them to their harm.
    waiting: Vec<(RequestId, Vec<Unit>, Arc<ClassPolicy>)>,
    /// Set once a car rides alone: what the others then wait for.
    closed: Option<(ReasonCode, RequestId)>,
}

fn take(facts: &RequestFacts, target: &TargetPlan<'_>, plan: &mut TrainPlan, state: &mut Riding) {
    if let Some(part) = facts.part {
        set::take(facts, part, target, plan, state);
        return;
    }
    match consider(facts, target, plan.cars.len(), state) {
        Ok(car) => {
            if car.alone {
                let code = match facts.structure {
                    StructureStanding::Barrier => ReasonCode::BehindBarrier,
                    _ => ReasonCode::AloneByAge,
                };
                state.closed = Some((code, car.request));
            }
            let own = car.class.batch_size;
            state.batch_size = Some(state.batch_size.map_or(own, |smallest| smallest.min(own)));
            goes_ahead(facts, &car, state);
            plan.cars.push(car);
        }
        Err(verdict) => {
            let verdict = while_it_runs(facts, target, verdict, state);
            plan.verdicts.push((facts.request, verdict));
        }
    }
}

/// A request whose command runs, or is to run, keeps its place: what came later from the same source stays behind
/// it, and once a result was lost to the target's moves so does what would be in its way. Others go on, unless it
/// concerns them all and is past its class's age bound.
fn while_it_runs(
    facts: &RequestFacts,
    target: &TargetPlan<'_>,
    verdict: Verdict,
    state: &mut Riding,
) -> Verdict {
    let protected = match (&verdict, &facts.external) {
        (Verdict::RunExternal { .. }, Some(ExternalStanding::MayRun { protected })) => *protected,
        (Verdict::RunExternal { .. }, Some(ExternalStanding::Result { .. })) => true,
        (Verdict::Hold { code: ReasonCode::ExternalRunning, .. }, Some(standing)) => {
            *standing == ExternalStanding::Running { protected: true }
        }
        _ => return verdict,
    };
    let units = facts.units.as_deref().unwrap_or_default();
    if units.iter().flat_map(Unit::snapshots).any(|id| state.sources.contains(&id)) {
        let text = "waits for an earlier request of the same source".to_owned();
        return Verdict::Hold { code: ReasonCode::SameSourceAhead, text, witnesses: Vec::new() };
    }
    state.sources.insert(facts.pinned);
    if is_aged(facts, target.now_ms) {
        state.waiting.push((facts.request, units.to_vec(), Arc::clone(&facts.class)));
    } else if protected {
        wait(facts, units.to_vec(), state);
    }
    verdict
}

/// What the car does is ahead of everybody who is looked at after it.
fn goes_ahead(facts: &RequestFacts, car: &Car, state: &mut Riding) {
    state.wap_ids.extend(facts.wap.own.iter().cloned());
    state.sources.insert(facts.pinned);
    for unit in &car.classification.units {
        state.sources.extend(unit.snapshots());
        for change in as_ahead(car.request, unit) {
            state.changes.push(change);
        }
    }
    if car.action == CarAction::Replay {
        for change in replay_removes(car, &facts.target_side) {
            state.changes.push(change);
        }
    }
}

/// What a unit is to those behind it. Only a proof makes a unit a rewrite, and it holds for them too.
fn as_ahead(request: RequestId, unit: &Unit) -> impl Iterator<Item = TargetChange> {
    let proof = match unit.kind {
        UnitKind::Rewrite => RewriteProof::Content,
        _ => RewriteProof::None,
    };
    let origin = Origin::Ahead(request);
    unit.changes.iter().map(move |change| TargetChange { change: Arc::clone(change), proof, origin })
}

/// Notes a request that is held behind this train. One whose scope is the whole table is not: it overlaps
/// everybody, and yields until its age bound.
fn wait(facts: &RequestFacts, units: Vec<Unit>, state: &mut Riding) {
    if units.iter().all(|unit| unit.scope != UnitScope::Table) {
        state.waiting.push((facts.request, units, Arc::clone(&facts.class)));
    }
}

/// Would these units, landed first, conflict with one that came before them and waits? That one would then
/// be refused or run again for what came after it (promise 7).
fn harms_a_waiting_one(
    request: RequestId,
    units: &[Unit],
    state: &Riding,
) -> Option<(RequestId, Vec<Witness>)> {
    if state.waiting.is_empty() {
        return None;
    }
    let changes = units.iter().flat_map(|unit| as_ahead(request, unit));
    let mine = TargetSide::new(changes.collect());
    for (first, theirs, class) in &state.waiting {
        if let Some((_, witnesses)) = blocked_by_ahead(theirs, &mine, &BTreeSet::new(), class) {
            return Some((*first, witnesses));
        }
    }
    None
}

/// Does a replay of the unit write rows whose partitions are not those of its filter?
fn writes_anywhere(unit: &Unit) -> bool {
    match unit.record.as_ref().map(|record| &record.operation) {
        Some(
            Operation::OverwritePartitions { .. }
            | Operation::InsertInto { .. }
            | Operation::UpdateWhere { .. }
            | Operation::MergeInto(_),
        ) => true,
        Some(
            Operation::Append
            | Operation::ReplacePartitions
            | Operation::OverwriteWhere { .. }
            | Operation::DeleteWhere { .. },
        )
        | None => false,
    }
}

/// A file that is not written yet, in a spec that no table has: it overlaps every partition.
fn anywhere() -> FileFact {
    let everywhere = Partition { spec_id: SpecId(i32::MIN), fields: Vec::new() };
    FileFact {
        path: Arc::from("(what the replay ahead will write)"),
        partition: Arc::new(everywhere),
        records: 0,
        bytes: 0,
        content: FileContent::Data,
    }
}

/// A replay removes more than its branch did: what the target added inside the operation's scope since
/// base goes as well. For the cars behind it those files are gone.
fn replay_removes(car: &Car, target_side: &TargetSide) -> Vec<TargetChange> {
    let mut changes = Vec::new();
    for unit in &car.classification.units {
        match unit.kind {
            UnitKind::ReplacePartitions { .. } | UnitKind::Recorded => {}
            // Re-added as they are, or never replayed.
            UnitKind::BlindAppend
            | UnitKind::DerivedAppend
            | UnitKind::Rewrite
            | UnitKind::RowDelta
            | UnitKind::EqualityDelta
            | UnitKind::Opaque => continue,
        }
        let Some(last) = unit.changes.last() else { continue };
        let since_base = target_side.changes().iter().flat_map(|t| &t.change.added);
        let removed: Vec<FileFact> = since_base
            .filter(|f| target_side.net().is_added(&f.path) && unit.scope.covers(&f.partition))
            .cloned()
            .collect();
        // What it then adds may lie anywhere: nobody who is concerned with others' files rides behind it.
        let added = if writes_anywhere(unit) { vec![anywhere()] } else { Vec::new() };
        if !removed.is_empty() || !added.is_empty() {
            let change = ChangeSet {
                snapshot: last.snapshot,
                schema_id: last.schema_id,
                label: "overwrite".to_owned(),
                record: RecordFinding::Absent,
                replaces_partitions: false,
                added,
                removed,
                added_deletes: Vec::new(),
                removed_deletes: Vec::new(),
            };
            let origin = Origin::Ahead(car.request);
            changes.push(TargetChange { change: Arc::new(change), proof: RewriteProof::None, origin });
        }
    }
    changes
}

/// What the request is by itself, whoever else waits: an answer, or a car to be.
fn judge(
    facts: &RequestFacts,
    target: &TargetPlan<'_>,
    is_first: bool,
) -> Result<(CarAction, Classification), Verdict> {
    let refuse = |code, text: String| Verdict::Refuse { code, text, class: None, witnesses: Vec::new() };
    let hold = |code, text: String| Verdict::Hold { code, text, witnesses: Vec::new() };

    if let Some((code, text)) = &facts.broken {
        return Err(refuse(*code, text.clone()));
    }
    // An answer that needs no commit does not wait for anybody.
    if facts.pinned_on_target {
        return Err(Verdict::AlreadyPublished {
            text: format!("snapshot {} is in the target's history", facts.pinned),
        });
    }
    match facts.source_now {
        SourceNow::AtPin => {}
        SourceNow::MovedTo(head) => match facts.class.on_source_moved {
            OnSourceMoved::LandPin => {}
            OnSourceMoved::Repin => return Err(Verdict::Repin { to: head }),
            OnSourceMoved::Refuse => {
                return Err(refuse(
                    ReasonCode::SourceMoved,
                    format!("{} is at snapshot {head}, pinned was {}", facts.source, facts.pinned),
                ));
            }
        },
        SourceNow::ResetTo(head) => {
            return Err(Verdict::Withdraw {
                code: ReasonCode::SourceReset,
                text: format!(
                    "{} is at snapshot {head}, which does not descend from the pinned {}",
                    facts.source, facts.pinned
                ),
            });
        }
        SourceNow::Gone => {
            return Err(Verdict::Withdraw {
                code: ReasonCode::BranchGone,
                text: format!("{} is gone; its pinned head was snapshot {}", facts.source, facts.pinned),
            });
        }
    }
    match &facts.structure {
        StructureStanding::Accepted | StructureStanding::Barrier => {}
        StructureStanding::InReview | StructureStanding::Unknown(_) => {
            return Err(Verdict::InReview {
                text: "written under a structure that no reviewer has accepted yet".to_owned(),
            });
        }
        StructureStanding::Rejected => {
            return Err(refuse(
                ReasonCode::ReviewRejected,
                "written under a structure that a reviewer rejected".to_owned(),
            ));
        }
        StructureStanding::Unreadable(text) => {
            return Err(hold(ReasonCode::StructureChanged, text.clone()));
        }
    }
    if let Some((code, text)) = &facts.unread {
        return Err(hold(*code, text.clone()));
    }
    let units = match &facts.units {
        Ok(units) => units,
        Err(refusal) => return Err(refuse(refusal.code, refusal.text.clone())),
    };

    let classification = classify(&ClassifyInput {
        pinned: facts.pinned,
        base: &facts.base,
        target_head: target.head,
        pinned_on_target: facts.pinned_on_target,
        units,
        target_side: &facts.target_side,
        published: target.published,
        rolled_back: facts.rolled_back,
        class: &facts.class,
        rebuilt: facts.rebuilt().is_some(),
    });
    if classification.external {
        return Err(run_again_outside(facts, classification));
    }
    let action = match classification.class {
        Class::AlreadyPublished => {
            return Err(Verdict::AlreadyPublished { text: classification.text });
        }
        Class::Refused(code) => return Err(refusal(facts.kind, code, classification)),
        // Only the first car stands on the target's head as it is.
        // A result is landed as a pick: its own snapshots bear no stamp of their request.
        Class::FastForward if is_first && target.fast_forward_allowed && facts.rebuilt().is_none() => {
            CarAction::FastForward
        }
        Class::FastForward | Class::CherryPick => CarAction::Pick,
        Class::Rebase => CarAction::Replay,
    };
    // A summary only makes the decision stricter (promise 5): it refuses, and calls nothing published.
    if let Some((id, snapshot)) = &facts.wap.taken {
        let code = ReasonCode::AlreadyPublished;
        let text = format!("snapshot {snapshot} of the target has WAP id '{id}' from another source");
        return Err(Verdict::Refuse { code, text, class: Some(Class::Refused(code)), witnesses: Vec::new() });
    }
    Ok((action, classification))
}

/// The class's own command is to make it again: now, later, or never more.
fn run_again_outside(facts: &RequestFacts, classification: Classification) -> Verdict {
    let Classification { text, witnesses, .. } = classification;
    let hold = |code: ReasonCode, text: String| Verdict::Hold { code, text, witnesses: witnesses.clone() };
    match &facts.external {
        Some(ExternalStanding::Running { .. }) => hold(ReasonCode::ExternalRunning, text),
        Some(ExternalStanding::Rests | ExternalStanding::Result { rests: true, .. }) => {
            hold(ReasonCode::ExternalRests, ReasonCode::ExternalRests.meaning().to_owned())
        }
        Some(ExternalStanding::Failed { code, text }) => {
            let class = Some(Class::Refused(*code));
            Verdict::Refuse { code: *code, text: text.clone(), class, witnesses }
        }
        Some(ExternalStanding::Result { rests: false, .. }) => {
            let text =
                "the target changed what the last run of the command had read; it is run again".to_owned();
            Verdict::RunExternal { text, witnesses }
        }
        Some(ExternalStanding::MayRun { .. }) | None => Verdict::RunExternal { text, witnesses },
    }
}

/// A place in this train, or what the request waits for.
fn consider(
    facts: &RequestFacts,
    target: &TargetPlan<'_>,
    cars: usize,
    state: &mut Riding,
) -> Result<Car, Verdict> {
    let hold = |code, text: String| Verdict::Hold { code, text, witnesses: Vec::new() };
    let (action, classification) = judge(facts, target, cars == 0)?;
    if let Some(id) = facts.wap.own.intersection(&state.wap_ids).next() {
        return Err(hold(ReasonCode::SameSourceAhead, format!("a request ahead publishes WAP id '{id}'")));
    }
    if let Some((code, ahead)) = state.closed {
        return Err(hold(code, format!("request {ahead} runs alone")));
    }
    // A row merge looks at, and may write, whatever either side changed.
    let wide = action == CarAction::Replay
        && (classification.row_merge || classification.units.iter().any(|u| u.scope == UnitScope::Table));
    let barrier = facts.structure == StructureStanding::Barrier;
    let alone = wide || barrier;
    if alone && cars > 0 {
        let code = if barrier { ReasonCode::BehindBarrier } else { ReasonCode::OverlapsAhead };
        return Err(hold(code, "runs alone, after the train that is planned now".to_owned()));
    }
    if cars >= state.batch_size.map_or(facts.class.batch_size, |n| n.min(facts.class.batch_size)) {
        wait(facts, classification.units, state);
        return Err(hold(ReasonCode::BatchFull, format!("the train has {cars} requests")));
    }
    if let Some((code, witnesses)) =
        blocked_by_ahead(&classification.units, &state.changes, &state.sources, &facts.class)
    {
        let ahead = witnesses.iter().find_map(|w| match w.other {
            Origin::Ahead(request) => Some(request),
            Origin::Target(_) => None,
        });
        let text = match ahead {
            Some(request) => format!("waits for request {request}"),
            None => "waits for an earlier request of the same source".to_owned(),
        };
        wait(facts, classification.units, state);
        return Err(Verdict::Hold { code, text, witnesses });
    }
    if let Some((first, witnesses)) = harms_a_waiting_one(facts.request, &classification.units, state) {
        wait(facts, classification.units, state);
        let text = format!("waits for request {first}, which came first and waits itself");
        return Err(Verdict::Hold { code: ReasonCode::OverlapsAhead, text, witnesses });
    }
    Ok(car_of(facts, action, classification, alone))
}

fn car_of(facts: &RequestFacts, action: CarAction, classification: Classification, alone: bool) -> Car {
    Car {
        request: facts.request,
        source: facts.source.clone(),
        pinned: facts.pinned,
        class: Arc::clone(&facts.class),
        action,
        classification,
        drop_source: facts.source_now == SourceNow::AtPin
            && (facts.kind.is_own() || facts.class.after_landing == AfterLanding::Drop),
        alone,
        rebuilt: facts.rebuilt(),
    }
}

/// There is nothing to write again in an inverse: it is asked for anew, once what came after is taken back.
fn refusal(kind: SourceKind, code: ReasonCode, classification: Classification) -> Verdict {
    let Classification { mut class, mut text, witnesses, .. } = classification;
    let code = match (kind, code) {
        (SourceKind::Revert, ReasonCode::Conflict) => {
            class = Class::Refused(ReasonCode::RevertImpossible);
            "the target changed the same files since the inverse was made".clone_into(&mut text);
            ReasonCode::RevertImpossible
        }
        (_, code) => code,
    };
    Verdict::Refuse { code, text, class: Some(class), witnesses }
}

/// Rule R6: dropped only if no other open request names the branch and it is not protected.
fn decide_drops(waiting: &[RequestFacts], target: &TargetPlan<'_>, plan: &mut TrainPlan) {
    let mut named: HashMap<&RefName, usize> = HashMap::new();
    for facts in waiting {
        *named.entry(&facts.source).or_default() += 1;
    }
    let parts = plan.parts.iter_mut().filter_map(|(_, turn)| match turn {
        PartTurn::Next(car) => Some(car.as_mut()),
        PartTurn::Behind(_) | PartTurn::Not(_) => None,
    });
    for car in plan.cars.iter_mut().chain(parts) {
        let shared = named.get(&car.source).copied().unwrap_or_default() > 1;
        if shared || target.protected.contains(&car.source) {
            car.drop_source = false;
        }
    }
}
