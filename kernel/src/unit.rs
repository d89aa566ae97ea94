//! Source snapshots grouped into logical operations, oldest first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::change::{ChangeSet, DeleteKey, FileContent, FileFact, RewriteProof};
use crate::filter::Filter;
use crate::ids::SnapshotId;
use crate::partition::Partition;
use crate::policy::{Appends, ClassPolicy, Isolation, Scope};
use crate::reason::ReasonCode;
use crate::record::{Operation, Record, RecordError, RecordFinding};

/// A change of the source with what was found out about it beside the manifests.
#[derive(Clone, Debug)]
pub struct SourceChange {
    pub change: Arc<ChangeSet>,
    /// Proved rewrite; looked for only where the label says `replace`, or the class takes nothing else.
    pub proof: RewriteProof,
    /// This change, which only removes, and the next one, which only adds, are proved to be a rewrite together:
    /// the overwrite of an engine that needs two snapshots for it. Looked for only where the class takes nothing
    /// else.
    pub proof_with_next: RewriteProof,
    /// Every data file that it adds keeps a data sequence number that the base knew (rule D4): what deletes by
    /// value on the target since then reaches its rows as it reached those that it replaces.
    pub keeps_sequence_numbers: bool,
    /// Every file of the parent in the partitions from which files were removed; `None` when not needed.
    /// It serves rule C7: a derived replace-partitions removed all of them.
    pub parent_files: Option<Arc<BTreeSet<Arc<str>>>>,
    /// The rows of the target that the recorded operation looks at, as a filter; `None` when that is not known.
    pub filter: Option<Filter>,
}

/// What a unit did, logically.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitKind {
    BlindAppend,
    /// Only adds, but because of what the target held, or labelled as something else (rule C2).
    DerivedAppend,
    /// The files replace whole partitions. `derived`: recognised by content (rule C7), not recorded.
    ReplacePartitions {
        derived: bool,
    },
    /// A recorded operation that is run again on the target's rows: `overwrite-where`, `delete-where`,
    /// `update-where`, `merge-into`, a query that reads the target.
    Recorded,
    /// Proved rewrite of its own inputs (a compaction submitted through the queue).
    Rewrite,
    /// Marks rows of live files as deleted by position, and may add files: a merge-on-read DELETE, UPDATE or
    /// MERGE.
    RowDelta,
    /// Deletes by the values of columns, and may add files: an upsert of a stream.
    EqualityDelta,
    /// A change of data about which nothing is recorded.
    Opaque,
}

/// What a unit depends on or writes: another change of data inside it is a conflict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitScope {
    Partitions(BTreeSet<Arc<Partition>>),
    /// The recorded filter, and the partitions of the files written.
    Filter(Filter, BTreeSet<Arc<Partition>>),
    Table,
}

impl UnitScope {
    pub fn covers(&self, partition: &Partition) -> bool {
        match self {
            Self::Partitions(own) => own.iter().any(|p| p.overlaps(partition)),
            Self::Filter(filter, own) => {
                filter.may_match(partition) || own.iter().any(|p| p.overlaps(partition))
            }
            Self::Table => true,
        }
    }
}

/// One logical operation of the source: one snapshot, or adjacent ones that belong together.
#[derive(Clone, Debug)]
pub struct Unit {
    pub kind: UnitKind,
    pub scope: UnitScope,
    pub changes: Vec<Arc<ChangeSet>>,
    pub record: Option<Record>,
    /// [`SourceChange::keeps_sequence_numbers`] of all of them.
    pub keeps_sequence_numbers: bool,
}

impl Unit {
    pub fn snapshots(&self) -> impl Iterator<Item = SnapshotId> {
        self.changes.iter().map(|c| c.snapshot)
    }

    /// The newest snapshot of the unit; a replay of the whole unit is stamped with it (rule D7).
    pub fn last_snapshot(&self) -> Option<SnapshotId> {
        self.changes.last().map(|c| c.snapshot)
    }

    pub fn added(&self) -> impl Iterator<Item = &FileFact> {
        self.changes.iter().flat_map(|c| &c.added)
    }

    pub fn removed(&self) -> impl Iterator<Item = &FileFact> {
        self.changes.iter().flat_map(|c| &c.removed)
    }

    pub fn added_deletes(&self) -> impl Iterator<Item = &FileFact> {
        self.changes.iter().flat_map(|c| &c.added_deletes)
    }

    pub fn removed_deletes(&self) -> impl Iterator<Item = &FileFact> {
        self.changes.iter().flat_map(|c| &c.removed_deletes)
    }

    /// It only takes rows away, by position, and nothing else: two such changes are in nobody's way, whichever
    /// comes first (rule D2).
    pub fn only_deletes_rows(&self) -> bool {
        self.kind == UnitKind::RowDelta && self.changes.iter().all(|c| c.only_deletes_rows())
    }

    /// Can it be run again against another head?
    pub fn is_replayable(&self) -> bool {
        match self.kind {
            UnitKind::BlindAppend | UnitKind::ReplacePartitions { .. } | UnitKind::Recorded => true,
            UnitKind::DerivedAppend
            | UnitKind::Rewrite
            | UnitKind::RowDelta
            | UnitKind::EqualityDelta
            | UnitKind::Opaque => false,
        }
    }

    pub fn partitions(&self) -> BTreeSet<Arc<Partition>> {
        self.changes.iter().flat_map(|c| c.partitions().cloned()).collect()
    }
}

/// Why the source cannot be read as operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitRefusal {
    pub code: ReasonCode,
    pub snapshot: SnapshotId,
    pub text: String,
}

/// Groups the source's changes, oldest first. Snapshots that changed nothing and say nothing are left out.
pub fn units(changes: &[SourceChange], class: &ClassPolicy) -> Result<Vec<Unit>, UnitRefusal> {
    let mut units = Vec::new();
    let mut at = 0;
    while at < changes.len() {
        let first = &changes[at];
        check_readable(first)?;
        let group = group_length(&changes[at..])?;
        let members = &changes[at..at + group];
        at += group;
        if let Some(unit) = unit_of(members, class)? {
            if class.is_compaction() && unit.kind != UnitKind::Rewrite {
                return Err(no_compaction(&unit, first.change.snapshot));
            }
            units.push(unit);
        }
    }
    Ok(units)
}

fn no_compaction(unit: &Unit, snapshot: SnapshotId) -> UnitRefusal {
    let files = |count: usize| if count == 1 { "1 file".to_owned() } else { format!("{count} files") };
    let text = format!(
        "snapshot {snapshot} adds {} and removes {}, and the rows are not the same",
        files(unit.added().count()),
        files(unit.removed().count())
    );
    UnitRefusal { code: ReasonCode::NotACompaction, snapshot, text }
}

fn check_readable(source: &SourceChange) -> Result<(), UnitRefusal> {
    let snapshot = source.change.snapshot;
    let error = match &source.change.record {
        RecordFinding::Absent | RecordFinding::Found(_) => return Ok(()),
        RecordFinding::Named { id, digest: _ } => &RecordError::NotInLedger(id.clone()),
        RecordFinding::Invalid(error) => error,
    };
    let text = format!("snapshot {snapshot}: {error}");
    Err(UnitRefusal { code: ReasonCode::RecordInvalid, snapshot, text })
}

/// How many of the leading changes are one operation: the same record id, or a delete followed by the
/// append that refills exactly the partitions it emptied (rule C7).
fn group_length(rest: &[SourceChange]) -> Result<usize, UnitRefusal> {
    let Some(first) = rest.first() else { return Ok(0) };
    if first.proof_with_next != RewriteProof::None && rest.len() > 1 {
        return Ok(2);
    }
    if let Some(record) = first.change.record.found() {
        let mut length = 1;
        while let Some(next) = rest.get(length) {
            check_readable(next)?;
            match next.change.record.found() {
                Some(other) if other.id == record.id => {
                    if other != record {
                        return Err(UnitRefusal {
                            code: ReasonCode::RecordInvalid,
                            snapshot: next.change.snapshot,
                            text: format!(
                                "snapshots {} and {} carry record '{}' with different content",
                                first.change.snapshot, next.change.snapshot, record.id
                            ),
                        });
                    }
                    length += 1;
                }
                _ => break,
            }
        }
        return Ok(length);
    }
    if let Some(second) = rest.get(1)
        && matches!(second.change.record, RecordFinding::Absent)
        && first.change.added.is_empty()
        && !first.change.removed.is_empty()
        && second.change.only_adds()
        && replaces_whole_partitions(&[first, second])
    {
        return Ok(2);
    }
    Ok(1)
}

/// Rule C7: removed partitions == added partitions, and every file that the parent had there is removed.
fn replaces_whole_partitions(members: &[&SourceChange]) -> bool {
    let mut added: BTreeSet<&Arc<Partition>> = BTreeSet::new();
    let mut removed: BTreeSet<&Arc<Partition>> = BTreeSet::new();
    let mut removed_paths: BTreeSet<&Arc<str>> = BTreeSet::new();
    for member in members {
        added.extend(member.change.added.iter().map(|f| &f.partition));
        removed.extend(member.change.removed.iter().map(|f| &f.partition));
        removed_paths.extend(member.change.removed.iter().map(|f| &f.path));
    }
    // Content alone does not tell a replacement from an update that happened to touch every file there
    // (decision 0010). What does: the engine's word, which also tells of partitions that were empty, or, from an
    // engine that gives none, that it first emptied the partitions and then filled them.
    let said = !added.is_empty()
        && removed.is_subset(&added)
        && members.iter().all(|m| m.change.replaces_partitions);
    let in_two_steps = members.len() == 2
        && !removed.is_empty()
        && added == removed
        && removed.iter().all(|partition| !partition.fields.is_empty());
    if !said && !in_two_steps {
        return false;
    }
    // Delete files of the replaced files go with them; any other change of delete files is more than this.
    let deletes_go_along = members.iter().all(|member| {
        let change = &member.change;
        change.added_deletes.is_empty()
            && change.removed_deletes.iter().all(|d| removed.contains(&d.partition))
    });
    if !deletes_go_along {
        return false;
    }
    let Some(parent_files) = members.first().and_then(|m| m.parent_files.as_ref()) else { return false };
    parent_files.iter().all(|path| removed_paths.contains(path))
}

/// A file that the parent had in a partition from which files were removed, and that the members kept. A
/// replay would drop it from the target though the branch did not.
fn kept_file(members: &[SourceChange]) -> Option<&Arc<str>> {
    let net = NetFiles::of(members.iter().map(|m| m.change.as_ref()));
    let parents_files = members.iter().filter_map(|m| m.parent_files.as_deref()).flatten();
    parents_files.into_iter().find(|path| !net.is_gone(path) && !net.is_added(path))
}

fn unit_of(members: &[SourceChange], class: &ClassPolicy) -> Result<Option<Unit>, UnitRefusal> {
    let Some(first) = members.first() else { return Ok(None) };
    let changes: Vec<Arc<ChangeSet>> = members.iter().map(|m| Arc::clone(&m.change)).collect();
    let record = first.change.record.found().cloned();
    let net_adds_only = changes.iter().all(|c| c.removed.is_empty() && !c.has_delete_files());
    let is_empty = changes.iter().all(|c| c.is_empty());
    let partitions: BTreeSet<Arc<Partition>> = changes.iter().flat_map(|c| c.partitions().cloned()).collect();
    let mismatch = |text: String| {
        Err(UnitRefusal { code: ReasonCode::RecordMismatch, snapshot: first.change.snapshot, text })
    };

    let is_rewrite = match members {
        [one] => one.proof != RewriteProof::None,
        [one, _] => one.proof_with_next != RewriteProof::None,
        _ => false,
    };
    if let Some(record) = record.as_ref().filter(|record| record.operation.is_run_again())
        && let Some(input) = record.inputs.values().find(|input| !class.may_read(&input.table))
    {
        return Err(UnitRefusal {
            code: ReasonCode::InputNotAllowed,
            snapshot: first.change.snapshot,
            text: format!("snapshot {} reads {}", first.change.snapshot, input.table),
        });
    }

    let (kind, scope) = match record.as_ref().map(|r| &r.operation) {
        // Proved for a class that takes nothing else: what the record says of it adds nothing.
        _ if is_rewrite && class.is_compaction() => (UnitKind::Rewrite, UnitScope::Partitions(partitions)),
        Some(Operation::Append) => {
            if !net_adds_only {
                return mismatch(format!(
                    "snapshot {} is recorded as an append but removes files or rows",
                    first.change.snapshot
                ));
            }
            append_of(&changes, partitions, class)
        }
        Some(Operation::ReplacePartitions) => {
            let added: BTreeSet<&Arc<Partition>> =
                changes.iter().flat_map(|c| c.added.iter().map(|f| &f.partition)).collect();
            if let Some(stray) =
                changes.iter().flat_map(|c| &c.removed).find(|f| !added.contains(&f.partition))
            {
                return mismatch(format!(
                    "recorded as replace-partitions, but partition {} lost files and got none",
                    stray.partition
                ));
            }
            if let Some(delete) = changes.iter().flat_map(|c| &c.added_deletes).next() {
                return mismatch(format!(
                    "recorded as replace-partitions, but it adds delete file {}",
                    delete.key()
                ));
            }
            if let Some(kept) = kept_file(members) {
                return mismatch(format!(
                    "recorded as replace-partitions, but file {kept} of a replaced partition was kept"
                ));
            }
            (UnitKind::ReplacePartitions { derived: false }, UnitScope::Partitions(partitions))
        }
        Some(
            Operation::OverwriteWhere { .. }
            | Operation::OverwritePartitions { .. }
            | Operation::InsertInto { .. }
            | Operation::DeleteWhere { .. }
            | Operation::UpdateWhere { .. }
            | Operation::MergeInto(_),
        ) => {
            let scope = if record.as_ref().is_some_and(|r| r.reads_target) {
                UnitScope::Table
            } else {
                match &first.filter {
                    Some(filter) => UnitScope::Filter(filter.clone(), partitions),
                    None => UnitScope::Table,
                }
            };
            (UnitKind::Recorded, scope)
        }
        None if is_empty => return Ok(None),
        None if replaces_whole_partitions(&members.iter().collect::<Vec<_>>()) => {
            (UnitKind::ReplacePartitions { derived: true }, UnitScope::Partitions(partitions))
        }
        None if net_adds_only => append_of(&changes, partitions, class),
        None if is_rewrite => (UnitKind::Rewrite, UnitScope::Partitions(partitions)),
        None => (unrecorded_kind(&changes), unrecorded_scope(partitions, class)),
    };
    let keeps_sequence_numbers = members.iter().all(|m| m.keeps_sequence_numbers);
    Ok(Some(Unit { kind, scope, changes, record, keeps_sequence_numbers }))
}

/// A change of data without a record: by what it did to delete files. Those of files that it removed itself go
/// along with them and say nothing.
fn unrecorded_kind(changes: &[Arc<ChangeSet>]) -> UnitKind {
    let removed: BTreeSet<&Arc<str>> = changes.iter().flat_map(|c| &c.removed).map(|f| &f.path).collect();
    let mut kind = UnitKind::Opaque;
    for change in changes {
        for delete in &change.added_deletes {
            match delete.content {
                FileContent::EqualityDeletes { .. } => return UnitKind::EqualityDelta,
                _ => kind = UnitKind::RowDelta,
            }
        }
        for delete in &change.removed_deletes {
            if delete.deletes_rows_of().is_none_or(|file| !removed.contains(file)) {
                kind = UnitKind::RowDelta;
            }
        }
    }
    kind
}

/// Rule C2: only adds, labelled append, in a class whose appends are blind. A record that says `append`
/// names no predicate and no read set, so it narrows nothing that a derived append depended on.
fn append_of(
    changes: &[Arc<ChangeSet>],
    partitions: BTreeSet<Arc<Partition>>,
    class: &ClassPolicy,
) -> (UnitKind, UnitScope) {
    let labelled = changes.iter().all(|c| c.label == "append" || c.is_empty());
    match class.appends {
        Appends::Blind if labelled => (UnitKind::BlindAppend, UnitScope::Partitions(partitions)),
        Appends::Blind | Appends::Derived => (UnitKind::DerivedAppend, unrecorded_scope(partitions, class)),
    }
}

/// Rule C3: without a record nobody knows what was read; `serializable` assumes the whole table, unless policy says
/// that the class's own command depends on less.
fn unrecorded_scope(partitions: BTreeSet<Arc<Partition>>, class: &ClassPolicy) -> UnitScope {
    let said = class.runs_again_outside().map(|external| external.scope);
    match (class.isolation, said) {
        (Isolation::Serializable, None | Some(Scope::Table)) => UnitScope::Table,
        (Isolation::Serializable, Some(Scope::TouchedPartitions)) | (Isolation::Snapshot, _) => {
            UnitScope::Partitions(partitions)
        }
    }
}

/// Paths that a list of changes leaves live and paths that it leaves gone, by walking it oldest first.
#[derive(Clone, Debug, Default)]
pub struct NetFiles {
    state: BTreeMap<Arc<str>, bool>,
    deletes: BTreeMap<DeleteKey, bool>,
    /// Data files for which deletes came or went.
    redeleted: BTreeSet<Arc<str>>,
}

impl NetFiles {
    pub fn of<'a>(changes: impl IntoIterator<Item = &'a ChangeSet>) -> Self {
        let mut net = Self::default();
        for change in changes {
            net.apply(change);
        }
        net
    }

    pub fn apply(&mut self, change: &ChangeSet) {
        // Removed first: a path that one snapshot both removes and adds stays live (rule D6).
        for file in &change.removed {
            self.state.insert(Arc::clone(&file.path), false);
        }
        for file in &change.added {
            self.state.insert(Arc::clone(&file.path), true);
        }
        for (deletes, live) in [(&change.removed_deletes, false), (&change.added_deletes, true)] {
            for delete in deletes {
                self.deletes.insert(delete.key(), live);
                self.redeleted.extend(delete.deletes_rows_of().cloned());
            }
        }
    }

    /// A delete file that was added, whatever became of it, or that was removed.
    pub fn knows_delete(&self, delete: &FileFact) -> bool {
        self.deletes.contains_key(&delete.key())
    }

    /// A delete file that was removed, and not added again.
    pub fn is_delete_gone(&self, delete: &FileFact) -> bool {
        self.deletes.get(&delete.key()) == Some(&false)
    }

    /// Deletes of this data file came or went.
    pub fn is_redeleted(&self, path: &str) -> bool {
        self.redeleted.contains(path)
    }

    /// Added, and not removed afterwards.
    pub fn is_added(&self, path: &str) -> bool {
        self.state.get(path) == Some(&true)
    }

    /// Removed, and not added again.
    pub fn is_gone(&self, path: &str) -> bool {
        self.state.get(path) == Some(&false)
    }
}
