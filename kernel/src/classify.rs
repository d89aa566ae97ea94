//! How a source relates to the target: a pure function of facts and policy (design, section 4).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::change::{ChangeSet, FileContent, FileFact, RewriteProof};
use crate::ids::{RequestId, SnapshotId};
use crate::lineage::{BaseFinding, Side};
use crate::partition::Partition;
use crate::policy::{ClassPolicy, EqualityDeletes, Isolation, Overlap};
use crate::reason::ReasonCode;
use crate::record::{Operation, RecordFinding};
use crate::unit::{NetFiles, Unit, UnitKind};

/// Witnesses listed with one classification, at most.
pub const MAX_WITNESSES: usize = 20;

/// A change that the target took since base, or that a car ahead will make.
#[derive(Clone, Debug)]
pub struct TargetChange {
    pub change: Arc<ChangeSet>,
    pub proof: RewriteProof,
    pub origin: Origin,
}

/// Changes of the other side, oldest first, with what they leave live and gone. Built once for a base and
/// shared by every request that was made from it.
#[derive(Clone, Debug, Default)]
pub struct TargetSide {
    changes: Vec<TargetChange>,
    net: NetFiles,
    /// Every partition that a change touched, once: few, however many the changes are.
    places: HashSet<Arc<Partition>>,
}

impl TargetSide {
    pub fn new(changes: Vec<TargetChange>) -> Self {
        let net = NetFiles::of(changes.iter().map(|t| t.change.as_ref()));
        let places = changes.iter().flat_map(|t| t.change.partitions().cloned()).collect();
        Self { changes, net, places }
    }

    pub fn push(&mut self, change: TargetChange) {
        self.net.apply(&change.change);
        for place in change.change.partitions() {
            if !self.places.contains(place) {
                self.places.insert(Arc::clone(place));
            }
        }
        self.changes.push(change);
    }

    pub fn changes(&self) -> &[TargetChange] {
        &self.changes
    }

    pub fn net(&self) -> &NetFiles {
        &self.net
    }

    /// Can any of the changes be in the unit's way? A blind append meets them in partitions, and nowhere else.
    fn concerns(&self, unit: &Unit) -> bool {
        unit.kind != UnitKind::BlindAppend
            || unit.added().any(|mine| self.places.iter().any(|place| mine.partition.overlaps(place)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// On the target already.
    Target(SnapshotId),
    /// A car ahead in the same train.
    Ahead(RequestId),
}

/// What a request's classification rests on.
#[derive(Clone, Debug)]
pub struct ClassifyInput<'a> {
    pub pinned: SnapshotId,
    pub base: &'a BaseFinding,
    pub target_head: Option<SnapshotId>,
    /// The target's own ancestry contains the pinned head.
    pub pinned_on_target: bool,
    /// Source side, oldest first, already published units included.
    pub units: &'a [Unit],
    /// Target side since base.
    pub target_side: &'a TargetSide,
    /// Source snapshots that the target published (rule C9), with the publishing snapshot.
    pub published: &'a HashMap<SnapshotId, SnapshotId>,
    /// A receipt says that this head was published, but the target's ancestry does not hold it any more.
    pub rolled_back: bool,
    pub class: &'a ClassPolicy,
    /// The source was made by the class's own command: where it conflicts, that is run again and nothing else.
    pub rebuilt: bool,
}

/// Evidence of a classification: who met whom, where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Witness {
    /// Snapshot of the source.
    pub source: SnapshotId,
    pub other: Origin,
    /// Partition in which they met, or file.
    pub place: String,
    /// The rule that decided: `append meets append`, `removed file is gone`.
    pub rule: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    AlreadyPublished,
    FastForward,
    CherryPick,
    Rebase,
    Refused(ReasonCode),
}

impl Class {
    pub fn word(self) -> &'static str {
        match self {
            Self::AlreadyPublished => "already-published",
            Self::FastForward => "fast-forward",
            Self::CherryPick => "cherry-pick",
            Self::Rebase => "rebase",
            Self::Refused(_) => "refused",
        }
    }
}

/// The answer, with its reasons.
#[derive(Clone, Debug)]
#[must_use]
pub struct Classification {
    pub class: Class,
    pub witnesses: Vec<Witness>,
    /// One sentence for people.
    pub text: String,
    /// What is left to publish: the source side without its published prefix.
    pub units: Vec<Unit>,
    /// Appends met appends and the class demands its duplicate check.
    pub overlap_allowed: bool,
    /// Data files of which both sides deleted rows: their deletes are to be united (rule D2).
    pub unite: Unite,
    /// The rows of both sides are compared by key (`on-conflict = "row-merge"`).
    pub row_merge: bool,
    /// The pipeline's own command makes the source again (`on-conflict = "external"`).
    pub external: bool,
}

/// Deletes of both sides that are to be united.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unite {
    /// Data files of which both sides deleted rows.
    pub files: BTreeSet<Arc<str>>,
    /// A row that both sides deleted is a conflict: one of them put another in its place.
    pub disjoint: bool,
}

impl Classification {
    fn plain(class: Class, text: impl Into<String>) -> Self {
        Self {
            class,
            witnesses: Vec::new(),
            text: text.into(),
            units: Vec::new(),
            overlap_allowed: false,
            unite: Unite::default(),
            row_merge: false,
            external: false,
        }
    }

    /// Nothing of the source serves: it is made again on the target's head.
    fn external(witnesses: Vec<Witness>, units: Vec<Unit>) -> Self {
        Self {
            witnesses,
            units,
            external: true,
            ..Self::plain(
                Class::Rebase,
                "branch and target changed the same data; the pipeline's own command makes it again",
            )
        }
    }

    /// The source's rows against the target's, by key.
    fn row_merge(witnesses: Vec<Witness>, units: Vec<Unit>) -> Self {
        Self {
            witnesses,
            units,
            row_merge: true,
            ..Self::plain(
                Class::Rebase,
                "branch and target changed the same data; their rows are merged by key",
            )
        }
    }
}

/// Classifies a source against the target.
pub fn classify(input: &ClassifyInput<'_>) -> Classification {
    if input.pinned_on_target {
        return Classification::plain(Class::AlreadyPublished, "the target already contains this snapshot");
    }
    if input.rolled_back {
        return Classification::plain(
            Class::Refused(ReasonCode::RolledBack),
            "published before, and no longer in the target's history",
        );
    }
    let base = match input.base {
        BaseFinding::Common(id) => Some(*id),
        BaseFinding::Empty => None,
        BaseFinding::Expired { of, missing } => {
            let side = match of {
                Side::Source => "the branch",
                Side::Target => "the target",
            };
            return Classification::plain(
                Class::Refused(ReasonCode::BaseExpired),
                format!("snapshot {missing} in the history of {side} was expired"),
            );
        }
        BaseFinding::Unrelated => {
            return Classification::plain(
                Class::Refused(ReasonCode::UnrelatedHistory),
                "branch and target share no snapshot",
            );
        }
    };

    let net = input.target_side.net();
    let remaining = match without_published(input, net) {
        Ok(units) => units,
        Err(classification) => return classification,
    };
    if remaining.is_empty() {
        let class = if input.units.is_empty() {
            Class::Refused(ReasonCode::EmptySource)
        } else {
            Class::AlreadyPublished
        };
        let text = match class {
            Class::AlreadyPublished => "every snapshot of the branch is published",
            _ => "the branch changes nothing",
        };
        return Classification::plain(class, text);
    }
    if base.is_none()
        && input.target_head.is_some()
        && let Some(unit) = remaining.iter().find(|u| u.kind != UnitKind::BlindAppend)
    {
        let id = unit.last_snapshot().unwrap_or(input.pinned);
        return Classification::plain(
            Class::Refused(ReasonCode::UnrelatedHistory),
            format!("snapshot {id} is no append, and there is no common snapshot to compare with"),
        );
    }

    // What comes from this very source is no target side against it (rule C9).
    let own = input.units.iter().flat_map(Unit::snapshots);
    let own: BTreeSet<SnapshotId> = own.filter_map(|id| input.published.get(&id).copied()).collect();
    let is_own = |target: &TargetChange| matches!(target.origin, Origin::Target(id) if own.contains(&id));
    let mut meeting = meet(&remaining, input.target_side, |t| !is_own(t), input.class);
    let prefix = &input.units[..input.units.len() - remaining.len()];
    meet_replayed_prefix(prefix, &remaining, net, input.published, &mut meeting);
    // Without a base nobody knows which side changed a row.
    let merges_rows = input.class.merges_rows() && base.is_some();
    let runs_outside = input.class.runs_again_outside().is_some();
    if let Some(code) = meeting.refusal {
        // Of files that were written from a content that is no more, no row can be told.
        if merges_rows && code != ReasonCode::StaleCompaction {
            return Classification::row_merge(meeting.witnesses, remaining);
        }
        if runs_outside {
            return Classification::external(meeting.witnesses, remaining);
        }
        return Classification {
            witnesses: meeting.witnesses,
            units: remaining,
            ..Classification::plain(Class::Refused(code), refusal_text(code))
        };
    }
    let class = if meeting.rebase {
        Class::Rebase
    } else if base == input.target_head && remaining.len() == input.units.len() {
        Class::FastForward
    } else {
        Class::CherryPick
    };
    // A record knows what it read, and is the better witness. What the command read is not recorded: neither the
    // branch nor an earlier result is run again in another way.
    let is_known = |u: &Unit| u.kind == UnitKind::BlindAppend || (u.record.is_some() && u.is_replayable());
    if class == Class::Rebase && runs_outside && (input.rebuilt || !remaining.iter().all(is_known)) {
        return Classification::external(meeting.witnesses, remaining);
    }
    if class == Class::Rebase
        && let Some(unit) = remaining.iter().find(|u| !u.is_replayable())
    {
        if merges_rows {
            return Classification::row_merge(meeting.witnesses, remaining);
        }
        let id = unit.last_snapshot().unwrap_or(input.pinned);
        let text = format!("snapshot {id} has no recorded operation that could be run again");
        return Classification {
            witnesses: meeting.witnesses,
            units: remaining,
            ..Classification::plain(Class::Refused(ReasonCode::Conflict), text)
        };
    }
    let text = match class {
        Class::FastForward => "the target has not moved since the branch was made".to_owned(),
        Class::Rebase => "branch and target changed the same data; the operation is run again".to_owned(),
        _ if !meeting.unite.files.is_empty() => {
            "branch and target deleted rows of the same files; both stay deleted".to_owned()
        }
        _ if meeting.overlap => "appended where the target appended too; the class allows it".to_owned(),
        _ => "branch and target changed different data".to_owned(),
    };
    Classification {
        class,
        witnesses: meeting.witnesses,
        text,
        units: remaining,
        overlap_allowed: meeting.overlap,
        unite: meeting.unite,
        row_merge: false,
        external: false,
    }
}

fn refusal_text(code: ReasonCode) -> &'static str {
    match code {
        ReasonCode::OverlappingAppend => "appended to a partition that the target appended to meanwhile",
        ReasonCode::StaleCompaction => "compacted files that the target removed or deleted rows from since",
        ReasonCode::EqualityDeletes => "deletes by value, and the target got rows since that they could hit",
        other => other.meaning(),
    }
}

/// Leaves out the units that the target has already. The published part must be a prefix.
fn without_published(input: &ClassifyInput<'_>, net: &NetFiles) -> Result<Vec<Unit>, Classification> {
    let partly =
        |text: String| Err(Classification::plain(Class::Refused(ReasonCode::PartiallyPublished), text));
    let mut prefix = 0;
    let mut open_seen = false;
    for unit in input.units {
        let by_id = unit.last_snapshot().is_some_and(|id| input.published.contains_key(&id));
        let all_added_live = unit.added().all(|f| net.is_added(&f.path));
        let all_removed_gone = unit.removed().all(|f| net.is_gone(&f.path));
        let all_deletes_seen = unit.added_deletes().all(|d| net.knows_delete(d));
        let adds = unit.added().next().is_some();
        let any_added_live = unit.added().any(|f| net.is_added(&f.path));
        let by_content = adds && all_added_live && all_removed_gone && all_deletes_seen;
        let every_id = unit.snapshots().all(|id| input.published.contains_key(&id));
        // Rows that were merged, or made again, lie in other files than the branch's, so nothing but the stamp tells
        // of them.
        let other_files = input.class.merges_rows() || input.class.runs_again_outside().is_some();
        let backed = other_files || stamp_is_backed(unit, net);
        let stamped = by_id && (every_id || all_removed_gone || other_files) && backed;
        let published = by_content || stamped;
        if published {
            if open_seen {
                let id = unit.last_snapshot().unwrap_or(input.pinned);
                return partly(format!("snapshot {id} is published, an earlier one of the branch is not"));
            }
            prefix += 1;
        } else {
            // Half of an operation of two snapshots counts as well: what the published half removed is
            // gone, and the other half alone would not be what the branch did.
            let any_id = unit.snapshots().any(|id| input.published.contains_key(&id));
            if any_id || any_added_live {
                let id = unit.last_snapshot().unwrap_or(input.pinned);
                return partly(format!("a part of snapshot {id} is on the target, a part is not"));
            }
            open_seen = true;
        }
    }
    Ok(input.units[prefix..].to_vec())
}

/// A stamp is a summary, and a summary proves nothing by itself (promise 5): the target must have seen the
/// unit's files since base, whatever became of them afterwards. Only a query that was run again wrote other
/// files than the branch; there the stamp, in the target's ancestry, is the only trace.
fn stamp_is_backed(unit: &Unit, net: &NetFiles) -> bool {
    if unit.kind == UnitKind::Recorded {
        return true;
    }
    // Deletes may have been united with the target's, in a file of the queue's own.
    let deletes_seen = unit
        .added_deletes()
        .all(|d| net.knows_delete(d) || d.deletes_rows_of().is_some_and(|of| net.is_redeleted(of)));
    let own = NetFiles::of(unit.changes.iter().map(Arc::as_ref));
    deletes_seen
        && unit
            .added()
            .filter(|f| own.is_added(&f.path))
            .all(|f| net.is_added(&f.path) || net.is_gone(&f.path))
}

#[derive(Debug, Default)]
struct Meeting {
    refusal: Option<ReasonCode>,
    rebase: bool,
    overlap: bool,
    unite: Unite,
    witnesses: Vec<Witness>,
}

impl Meeting {
    fn witness(&mut self, unit: &Unit, other: Origin, place: String, rule: &str) {
        if self.witnesses.len() < MAX_WITNESSES
            && let Some(source) = unit.last_snapshot()
        {
            let witness = Witness { source, other, place, rule: rule.to_owned() };
            if !self.witnesses.contains(&witness) {
                self.witnesses.push(witness);
            }
        }
    }
}

/// The table of design section 4: every unit against every change of the other side that counts.
fn meet(
    units: &[Unit],
    side: &TargetSide,
    counts: impl Fn(&TargetChange) -> bool,
    class: &ClassPolicy,
) -> Meeting {
    let mut meeting = Meeting::default();
    let concerned: Vec<&Unit> = units.iter().filter(|unit| side.concerns(unit)).collect();
    if concerned.is_empty() {
        return meeting;
    }
    for other in side.changes.iter().filter(|other| counts(other)) {
        for unit in &concerned {
            meet_one(unit, other, &side.net, class, &mut meeting);
        }
    }
    meeting
}

fn meet_one(unit: &Unit, other: &TargetChange, net: &NetFiles, class: &ClassPolicy, meeting: &mut Meeting) {
    let change = other.change.as_ref();
    let is_rewrite = other.proof != RewriteProof::None;
    // Files that this unit removes and that the other side removed: gone, unless it put them back.
    let gone = unit
        .removed()
        .find(|mine| net.is_gone(&mine.path) && change.removed.iter().any(|theirs| theirs.path == mine.path));
    match unit.kind {
        UnitKind::BlindAppend => {
            if is_rewrite {
                return;
            }
            let Some(place) = shared_partition(unit, change) else { return };
            match class.overlap {
                Overlap::Allow | Overlap::AllowWithDuplicateCheck => {
                    meeting.overlap = true;
                    meeting.witness(unit, other.origin, place, "append meets a change of data, allowed");
                }
                Overlap::Refuse => {
                    meeting.refusal = meeting.refusal.or(Some(ReasonCode::OverlappingAppend));
                    meeting.witness(unit, other.origin, place, "append meets a change of data");
                }
            }
        }
        UnitKind::Rewrite => {
            if let Some(file) = gone {
                meeting.refusal = Some(ReasonCode::StaleCompaction);
                meeting.witness(unit, other.origin, file.path.to_string(), "compacted file is gone");
            } else if let Some(delete) = unit.removed_deletes().find(|d| net.is_delete_gone(d)) {
                meeting.refusal = Some(ReasonCode::StaleCompaction);
                meeting.witness(
                    unit,
                    other.origin,
                    delete.key().to_string(),
                    "compacted delete file is gone",
                );
            } else if !is_rewrite && let Some(place) = deletes_inside(unit, change) {
                // The inputs are live, but rows of them may be deleted by now; the compacted file was
                // made from the old content and would bring them back.
                meeting.refusal = Some(ReasonCode::StaleCompaction);
                meeting.witness(unit, other.origin, place, "compacted file may carry new deletes");
            }
        }
        UnitKind::DerivedAppend
        | UnitKind::ReplacePartitions { .. }
        | UnitKind::Recorded
        | UnitKind::RowDelta
        | UnitKind::EqualityDelta
        | UnitKind::Opaque => {
            if let Some(file) = gone {
                meeting.rebase = true;
                meeting.witness(unit, other.origin, file.path.to_string(), "removed file is gone");
                return;
            }
            if let Some(file) = referenced_gone(unit, change, net) {
                meeting.rebase = true;
                meeting.witness(unit, other.origin, file, "a file whose rows it deletes is gone");
                return;
            }
            if meet_deletes(unit, other, class, meeting) {
                return;
            }
            if is_rewrite {
                return;
            }
            let blind = is_blind_append(change);
            if blind && class.isolation == Isolation::Snapshot {
                // Every removed file is live, and an append brings no deletes.
                return;
            }
            if let Some(partition) = change.partitions().find(|p| unit.scope.covers(p)) {
                meeting.rebase = true;
                let rule = if blind { "appended inside its scope" } else { "changed inside its scope" };
                meeting.witness(unit, other.origin, partition.to_string(), rule);
            }
        }
    }
}

/// A data file of which the unit deletes rows and which the other side removed. Position deletes that do not
/// name their file count every file of their partition (rule C6).
fn referenced_gone(unit: &Unit, change: &ChangeSet, net: &NetFiles) -> Option<String> {
    for delete in unit.added_deletes() {
        let gone = change.removed.iter().filter(|theirs| net.is_gone(&theirs.path)).find(|theirs| {
            match (&delete.content, delete.deletes_rows_of()) {
                (_, Some(of)) => *of == theirs.path,
                (FileContent::PositionDeletes { .. }, None) => delete.partition.overlaps(&theirs.partition),
                // Deletes by value hit the rows wherever a rewrite put them.
                (_, None) => false,
            }
        });
        if let Some(file) = gone {
            return Some(file.path.to_string());
        }
    }
    None
}

/// The cells of the table in which both sides have delete files. `true`: this change is settled.
fn meet_deletes(unit: &Unit, other: &TargetChange, class: &ClassPolicy, meeting: &mut Meeting) -> bool {
    let change = other.change.as_ref();
    match unit.kind {
        UnitKind::RowDelta => {
            let pure = change.only_deletes_rows();
            let comparable =
                pure || other.proof != RewriteProof::None || class.isolation == Isolation::Snapshot;
            if !comparable || change.adds_equality_deletes() {
                return false;
            }
            // Rule D2. What the other side added beside its deletes is an append, and `snapshot` lets that pass.
            if let Some(shared) = shared_file(unit, change) {
                meeting.unite.disjoint |= !(pure && unit.only_deletes_rows());
                meeting.witness(unit, other.origin, shared.to_string(), "both deleted rows of the file");
                meeting.unite.files.extend(shared_files(unit, change));
            }
            change.removed.is_empty()
        }
        UnitKind::EqualityDelta => {
            if other.proof != RewriteProof::None {
                return true;
            }
            let Some(partition) = change.partitions().find(|p| unit.scope.covers(p)) else { return true };
            let place = partition.to_string();
            match class.equality_deletes {
                EqualityDeletes::Refuse => {
                    meeting.refusal = meeting.refusal.or(Some(ReasonCode::EqualityDeletes));
                    meeting.witness(unit, other.origin, place, "deletes by value meet a change of data");
                }
                EqualityDeletes::Rebase => {
                    meeting.rebase = true;
                    meeting.witness(unit, other.origin, place, "deletes by value meet a change of data");
                }
                // They hit what the target got meanwhile as well: as if the upsert had come after it.
                EqualityDeletes::SerialUpsert => {
                    meeting.overlap = true;
                    meeting.witness(
                        unit,
                        other.origin,
                        place,
                        "deletes by value come after a change of data",
                    );
                }
            }
            true
        }
        _ => false,
    }
}

/// Data files of which both sides delete rows; position deletes that name no file meet every file of their
/// partition of which the other side deletes rows.
fn shared_files<'a>(unit: &'a Unit, change: &'a ChangeSet) -> impl Iterator<Item = Arc<str>> + 'a {
    unit.added_deletes().flat_map(|mine| {
        change.added_deletes.iter().filter_map(move |theirs| {
            match (mine.deletes_rows_of(), theirs.deletes_rows_of()) {
                (Some(a), Some(b)) => (a == b).then(|| Arc::clone(a)),
                (Some(file), None) | (None, Some(file)) => {
                    mine.partition.overlaps(&theirs.partition).then(|| Arc::clone(file))
                }
                (None, None) => mine.partition.overlaps(&theirs.partition).then(|| Arc::clone(&mine.path)),
            }
        })
    })
}

fn shared_file(unit: &Unit, change: &ChangeSet) -> Option<Arc<str>> {
    shared_files(unit, change).next()
}

/// A published prefix that was run again left other files on the target than on the branch. What is left of
/// the branch cannot be picked when it removes one of those that never came.
fn meet_replayed_prefix(
    prefix: &[Unit],
    remaining: &[Unit],
    net: &NetFiles,
    published: &HashMap<SnapshotId, SnapshotId>,
    meeting: &mut Meeting,
) {
    for earlier in prefix {
        let Some(publisher) = earlier.last_snapshot().and_then(|id| published.get(&id)) else { continue };
        let absent: BTreeSet<&Arc<str>> = earlier
            .added()
            .map(|f| &f.path)
            .filter(|path| !net.is_added(path) && !net.is_gone(path))
            .collect();
        if absent.is_empty() {
            continue;
        }
        for unit in remaining {
            let removed = unit.removed().map(|f| &f.path);
            let referenced = unit.added_deletes().filter_map(|d| d.deletes_rows_of());
            if let Some(path) = removed.chain(referenced).find(|path| absent.contains(path)) {
                meeting.rebase = true;
                let (other, place) = (Origin::Target(*publisher), path.to_string());
                meeting.witness(unit, other, place, "removed file was never on the target");
            }
        }
    }
}

/// Rule C2 for the other side: its record may say that it is more than it looks.
fn is_blind_append(change: &ChangeSet) -> bool {
    let recorded_as_append = match &change.record {
        RecordFinding::Absent => true,
        RecordFinding::Found(record) => record.operation == Operation::Append,
        RecordFinding::Named { .. } | RecordFinding::Invalid(_) => false,
    };
    change.only_adds() && change.label == "append" && recorded_as_append
}

fn shared_partition(unit: &Unit, change: &ChangeSet) -> Option<String> {
    for mine in unit.added() {
        for theirs in change.partitions() {
            if mine.partition.overlaps(theirs) {
                return Some(mine.partition.to_string());
            }
        }
    }
    None
}

/// Where the other side changed deletes of a file that the unit removed; of those that name no file, a
/// partition of the unit. New deletes by value reach rows wherever a rewrite put them, if it left them their age.
fn deletes_inside(unit: &Unit, change: &ChangeSet) -> Option<String> {
    let removed: BTreeSet<&Arc<str>> = unit.removed().map(|f| &f.path).collect();
    let reaches = |delete: &&FileFact| {
        unit.keeps_sequence_numbers && matches!(delete.content, FileContent::EqualityDeletes { .. })
    };
    let added = change.added_deletes.iter().filter(|delete| !reaches(delete));
    added.chain(&change.removed_deletes).find_map(|delete| match delete.deletes_rows_of() {
        Some(of) => removed.contains(of).then(|| of.to_string()),
        None => unit.scope.covers(&delete.partition).then(|| delete.partition.to_string()),
    })
}

/// Why a source cannot ride behind the cars ahead of it in one train, with a witness; `None`: it can.
pub fn blocked_by_ahead(
    units: &[Unit],
    ahead: &TargetSide,
    ahead_sources: &BTreeSet<SnapshotId>,
    class: &ClassPolicy,
) -> Option<(ReasonCode, Vec<Witness>)> {
    if units.iter().flat_map(Unit::snapshots).any(|id| ahead_sources.contains(&id)) {
        return Some((ReasonCode::SameSourceAhead, Vec::new()));
    }
    for unit in units {
        // The same file under two requests: each path is live once.
        if let Some(file) = unit.added().find(|f| ahead.net.is_added(&f.path)) {
            let mut meeting = Meeting::default();
            let other = ahead
                .changes
                .iter()
                .find(|t| t.change.added.iter().any(|f| f.path == file.path))
                .map_or(Origin::Target(SnapshotId(0)), |t| t.origin);
            meeting.witness(unit, other, file.path.to_string(), "same file ahead");
            return Some((ReasonCode::OverlapsAhead, meeting.witnesses));
        }
    }
    let meeting = meet(units, ahead, |_| true, class);
    // Deletes are united with what is on the target, not with what a car ahead will bring.
    if meeting.rebase || meeting.refusal.is_some() || !meeting.unite.files.is_empty() {
        return Some((ReasonCode::OverlapsAhead, meeting.witnesses));
    }
    // The other direction: an overwrite ahead was planned without these rows; behind it they are right.
    None
}

/// Partitions that a list of units adds to or removes from: the scope of touched-partition checks.
pub fn touched(units: &[Unit]) -> BTreeSet<Arc<Partition>> {
    units.iter().flat_map(Unit::partitions).collect()
}
