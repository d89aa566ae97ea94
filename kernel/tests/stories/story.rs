//! A small notation for histories.
//!
//! `S2` is snapshot 2. A change is a line of files: `+B1@08-22 -A2@08-21` adds B1 to the partition of
//! 22 August and removes A2 from the one of 21 August. `+d:D1>A1@08-20` adds the delete file D1, which takes
//! rows of A1; without `>A1` it does not say of which file, and `+e:E1@08-20` deletes by value. Partitions:
//!
//! | text | spec |
//! |---|---|
//! | `08-22`, `null` | 0: identity(order_date) |
//! | `08-22/status=new` | 1: identity(order_date), identity(status) |
//! | `status=new` | 2: identity(status) |
//! | `*` | 9: unpartitioned |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg_kernel::admission::{
    CarAction, RequestFacts, SourceKind, SourceNow, StructureStanding, TargetPlan, TrainPlan, Verdict,
    WapIds, plan_train,
};
use mergeberg_kernel::change::{ChangeSet, FileContent, FileFact, RewriteProof};
use mergeberg_kernel::classify::{Classification, ClassifyInput, Origin, TargetChange, TargetSide, classify};
use mergeberg_kernel::filter::{CompareOp, Filter, FilterValue, parse_date};
use mergeberg_kernel::ids::{RefName, RequestId, SchemaId, SnapshotId, SpecId};
use mergeberg_kernel::lineage::{BaseFinding, SOURCE_SNAPSHOT_ID, SnapshotFact, SnapshotGraph};
use mergeberg_kernel::partition::{Partition, PartitionField};
use mergeberg_kernel::policy::ClassPolicy;
use mergeberg_kernel::record::{
    Columns, Condition, Names, Operation, Record, RecordError, RecordFinding, Rows, Select,
};
use mergeberg_kernel::unit::{SourceChange, Unit, UnitRefusal, units};

/// The clock of every story, in milliseconds.
pub const NOW_MS: i64 = 1_000_000_000;

/// `S12` -> 12.
pub fn sid(name: &str) -> SnapshotId {
    SnapshotId(name.strip_prefix('S').and_then(|n| n.parse().ok()).expect("snapshots are written S1"))
}

pub fn partition(text: &str) -> Arc<Partition> {
    let field = |source_id: i32, name: &str, value: &str| PartitionField {
        source_id,
        name: name.to_owned(),
        transform: "identity".to_owned(),
        value: (value != "null").then(|| value.to_owned()),
    };
    let day = |text: &str| match text {
        "null" => field(2, "order_date", "null"),
        day => field(2, "order_date", &format!("2013-{day}")),
    };
    let (spec, fields) = match text.split_once('/') {
        _ if text == "*" => (9, Vec::new()),
        Some((date, rest)) => (1, vec![day(date), field(3, "status", rest.strip_prefix("status=").unwrap())]),
        None => match text.strip_prefix("status=") {
            Some(status) => (2, vec![field(3, "status", status)]),
            None => (0, vec![day(text)]),
        },
    };
    Arc::new(Partition { spec_id: SpecId(spec), fields })
}

/// The text that [`partition`] reads.
fn notation(place: &Partition) -> String {
    if place.fields.is_empty() {
        return "*".to_owned();
    }
    let field = |f: &PartitionField| match (f.source_id, &f.value) {
        (2, Some(day)) => day.trim_start_matches("2013-").to_owned(),
        (_, None) => "null".to_owned(),
        (_, Some(status)) => format!("status={status}"),
    };
    place.fields.iter().map(field).collect::<Vec<_>>().join("/")
}

pub fn file(text: &str) -> FileFact {
    fact(text, |_| FileContent::Data)
}

fn fact(text: &str, content: impl FnOnce(Option<Arc<str>>) -> FileContent) -> FileFact {
    let (path, place) = text.split_once('@').expect("files are written B1@08-22");
    let (path, of) = match path.split_once('>') {
        Some((path, of)) => (path, Some(Arc::from(of))),
        None => (path, None),
    };
    let content = content(of);
    FileFact { path: path.into(), partition: partition(place), records: 1, bytes: 100, content }
}

/// The class under which everything is as strict as shipped, with changes.
pub fn class(change: impl FnOnce(&mut ClassPolicy)) -> Arc<ClassPolicy> {
    let mut class = ClassPolicy::shipped_default();
    change(&mut class);
    Arc::new(class)
}

pub fn record(id: &str, operation: Operation) -> Record {
    let inputs = BTreeMap::new();
    Record {
        id: id.to_owned(),
        operation,
        inputs,
        names: Names::Exact,
        time_zone: mergeberg_kernel::record::UTC.to_owned(),
        reads_target: false,
        expected_rows: None,
    }
}

pub fn overwrite_where(id: &str) -> Record {
    let filter = Condition::parse("order_date = DATE '2013-08-21'").unwrap();
    let rows = Rows { query: Select::parse("SELECT * FROM up").unwrap(), columns: Columns::ByName };
    record(id, Operation::OverwriteWhere { filter, rows })
}

/// `order_date = 2013-<day>`.
pub fn day_is(day: &str) -> Filter {
    let value = FilterValue::Date(parse_date(&format!("2013-{day}")).unwrap());
    Filter::Compare { field_id: 2, op: CompareOp::Eq, value }
}

/// One snapshot of a story.
#[derive(Clone, Debug)]
pub struct Commit {
    id: SnapshotId,
    parent: Option<SnapshotId>,
    change: ChangeSet,
    proof: RewriteProof,
    proof_with_next: RewriteProof,
    keeps_sequence_numbers: bool,
    filter: Option<Filter>,
    publishes: Option<SnapshotId>,
    timestamp_ms: i64,
}

impl Commit {
    pub fn labelled(&mut self, label: &str) -> &mut Self {
        self.change.label = label.to_owned();
        self
    }

    /// The engine says that it replaced whole partitions.
    pub fn replacing(&mut self) -> &mut Self {
        self.change.replaces_partitions = true;
        self
    }

    pub fn recorded(&mut self, record: Record) -> &mut Self {
        self.change.record = RecordFinding::Found(Box::new(record));
        self
    }

    pub fn badly_recorded(&mut self) -> &mut Self {
        self.change.record = RecordFinding::Invalid(RecordError::UnknownVersion("2".to_owned()));
        self
    }

    /// Same rows in, same rows out: the content was compared.
    pub fn proved(&mut self) -> &mut Self {
        self.proof = RewriteProof::Content;
        self
    }

    /// The same rows as before when the next snapshot is taken with it.
    pub fn proved_with_next(&mut self) -> &mut Self {
        self.proof_with_next = RewriteProof::Content;
        self
    }

    /// Its files are as old as those that they replace (rule D4).
    pub fn keeping_sequence_numbers(&mut self) -> &mut Self {
        self.keeps_sequence_numbers = true;
        self
    }

    pub fn filtered(&mut self, filter: Filter) -> &mut Self {
        self.filter = Some(filter);
        self
    }

    pub fn reads_target(&mut self) -> &mut Self {
        if let RecordFinding::Found(record) = &mut self.change.record {
            record.reads_target = true;
        }
        self
    }

    /// Stamped with `source-snapshot-id`.
    pub fn publishes(&mut self, source: &str) -> &mut Self {
        self.publishes = Some(sid(source));
        self
    }
}

/// A table's snapshots.
#[derive(Clone, Debug, Default)]
pub struct Story {
    commits: BTreeMap<SnapshotId, Commit>,
    log: Vec<(SnapshotId, i64)>,
}

impl Story {
    /// A table without snapshot.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Fixture ORD: S1 holds A1 of 20 August and A2 of 21 August.
    pub fn ord() -> Self {
        let mut story = Self::default();
        story.append("S1", "", "+A1@08-20 +A2@08-21");
        story
    }

    /// `parent` is empty for a root. The label is `overwrite`.
    pub fn overwrite(&mut self, id: &str, parent: &str, files: &str) -> &mut Commit {
        let id = sid(id);
        let mut change = ChangeSet {
            snapshot: id,
            schema_id: Some(SchemaId(0)),
            label: "overwrite".to_owned(),
            record: RecordFinding::Absent,
            replaces_partitions: false,
            added: Vec::new(),
            removed: Vec::new(),
            added_deletes: Vec::new(),
            removed_deletes: Vec::new(),
        };
        for text in files.split_whitespace() {
            let (adds, text) = match (text.strip_prefix('+'), text.strip_prefix('-')) {
                (Some(rest), _) => (true, rest),
                (_, Some(rest)) => (false, rest),
                _ => panic!("'{text}': files are written +B1@08-22 or -A1@08-20"),
            };
            let (is_delete, fact) = match (text.strip_prefix("d:"), text.strip_prefix("e:")) {
                (Some(rest), _) => (true, fact(rest, |of| FileContent::PositionDeletes { of })),
                (_, Some(rest)) => {
                    (true, fact(rest, |_| FileContent::EqualityDeletes { field_ids: vec![1] }))
                }
                _ => (false, file(text)),
            };
            match (is_delete, adds) {
                (false, true) => change.added.push(fact),
                (false, false) => change.removed.push(fact),
                (true, true) => change.added_deletes.push(fact),
                (true, false) => change.removed_deletes.push(fact),
            }
        }
        let parent = (!parent.is_empty()).then(|| sid(parent));
        let commit = Commit {
            id,
            parent,
            change,
            proof: RewriteProof::None,
            proof_with_next: RewriteProof::None,
            keeps_sequence_numbers: false,
            filter: None,
            publishes: None,
            timestamp_ms: id.0 * 1000,
        };
        self.commits.insert(id, commit);
        self.commits.get_mut(&id).unwrap()
    }

    pub fn append(&mut self, id: &str, parent: &str, files: &str) -> &mut Commit {
        self.overwrite(id, parent, files).labelled("append")
    }

    /// Label `replace`, and proved to hold the same rows.
    pub fn compact(&mut self, id: &str, parent: &str, files: &str) -> &mut Commit {
        self.overwrite(id, parent, files).labelled("replace").proved()
    }

    /// The target's heads over time, as `snapshot-log` has them.
    pub fn logged(&mut self, heads: &[(&str, i64)]) {
        self.log = heads.iter().map(|(id, ms)| (sid(id), *ms)).collect();
    }

    pub fn expire(&mut self, ids: &str) {
        for id in ids.split_whitespace() {
            self.commits.remove(&sid(id)).expect("expires what is there");
        }
    }

    pub fn graph(&self) -> SnapshotGraph {
        SnapshotGraph::new(self.commits.values().map(|commit| {
            let mut summary = BTreeMap::new();
            if let Some(source) = commit.publishes {
                summary.insert(SOURCE_SNAPSHOT_ID.to_owned(), source.to_string());
            }
            SnapshotFact {
                id: commit.id,
                parent: commit.parent,
                sequence_number: commit.id.0,
                timestamp_ms: commit.timestamp_ms,
                schema_id: Some(SchemaId(0)),
                manifest_list: format!("snap-{}.avro", commit.id),
                label: commit.change.label.clone(),
                summary,
            }
        }))
    }

    pub fn base(&self, source: &str, target: Option<&str>) -> BaseFinding {
        let graph = self.graph();
        graph.base(sid(source), &graph.line(target.map(sid)), &self.log)
    }

    /// A merge of the snapshot, onto S1 until told otherwise.
    pub fn merge(&self, pinned: &str) -> Merge<'_> {
        Merge {
            story: self,
            pinned: sid(pinned),
            target: Some(sid("S1")),
            class: class(|_| {}),
            rolled_back: false,
        }
    }

    /// One train onto `target`, in words.
    pub fn train(&self, target: &str, waiting: &[RequestFacts]) -> String {
        words(&self.plan(target, waiting))
    }

    pub fn plan(&self, target: &str, waiting: &[RequestFacts]) -> TrainPlan {
        let head = sid(target);
        let published = self.graph().published_by(head);
        let protected = BTreeSet::from([RefName::main(), RefName::new("ingest/protected")]);
        let target = TargetPlan {
            head: Some(head),
            published: &published,
            protected: &protected,
            now_ms: NOW_MS,
            fast_forward_allowed: true,
        };
        plan_train(waiting, &target)
    }

    /// Live data files of a snapshot and their partitions, in this notation.
    pub fn live_files(&self, head: &str) -> BTreeMap<String, String> {
        let live = self.live(sid(head)).into_iter();
        live.map(|(path, place)| (path.to_string(), notation(&place))).collect()
    }

    /// Live data files of a snapshot, by walking its line.
    fn live(&self, head: SnapshotId) -> BTreeMap<Arc<str>, Arc<Partition>> {
        let mut live = BTreeMap::new();
        for id in self.graph().chain(head).ids.iter().rev() {
            let change = &self.commits[id].change;
            for file in &change.removed {
                live.remove(&file.path);
            }
            for file in &change.added {
                live.insert(Arc::clone(&file.path), Arc::clone(&file.partition));
            }
        }
        live
    }

    fn source_change(&self, id: SnapshotId) -> SourceChange {
        let commit = &self.commits[&id];
        let parent_files = commit.parent.map(|parent| {
            let live = self.live(parent).into_iter();
            let added = commit.change.added.iter().filter(|_| commit.change.replaces_partitions);
            let concerned: Vec<_> = commit.change.removed.iter().chain(added).map(|f| &f.partition).collect();
            let touched = |place: &Arc<Partition>| concerned.contains(&place);
            Arc::new(live.filter(|(_, place)| touched(place)).map(|(path, _)| path).collect())
        });
        SourceChange {
            change: Arc::new(commit.change.clone()),
            proof: commit.proof,
            proof_with_next: commit.proof_with_next,
            keeps_sequence_numbers: commit.keeps_sequence_numbers,
            parent_files,
            filter: commit.filter.clone(),
        }
    }
}

/// One source against one target.
#[derive(Clone, Debug)]
pub struct Merge<'a> {
    story: &'a Story,
    pinned: SnapshotId,
    target: Option<SnapshotId>,
    class: Arc<ClassPolicy>,
    rolled_back: bool,
}

impl Merge<'_> {
    pub fn onto(mut self, target: &str) -> Self {
        self.target = (!target.is_empty()).then(|| sid(target));
        self
    }

    pub fn under(mut self, class: &Arc<ClassPolicy>) -> Self {
        self.class = Arc::clone(class);
        self
    }

    pub fn rolled_back(mut self) -> Self {
        self.rolled_back = true;
        self
    }

    pub fn base(&self) -> BaseFinding {
        let graph = self.story.graph();
        graph.base(self.pinned, &graph.line(self.target), &self.story.log)
    }

    pub fn units(&self) -> Result<Vec<Unit>, UnitRefusal> {
        let base = match self.base() {
            BaseFinding::Common(base) => Some(base),
            _ => None,
        };
        let ids = self.story.graph().after(base, self.pinned).unwrap_or_default();
        let changes: Vec<SourceChange> = ids.into_iter().map(|id| self.story.source_change(id)).collect();
        units(&changes, &self.class)
    }

    pub fn target_side(&self) -> TargetSide {
        let graph = self.story.graph();
        let base = match self.base() {
            BaseFinding::Common(base) => Some(base),
            _ => None,
        };
        let ids = self.target.and_then(|head| graph.after(base, head)).unwrap_or_default();
        let changes = ids.into_iter().map(|id| {
            let commit = &self.story.commits[&id];
            TargetChange {
                change: Arc::new(commit.change.clone()),
                proof: commit.proof,
                origin: Origin::Target(id),
            }
        });
        TargetSide::new(changes.collect())
    }

    fn pinned_on_target(&self) -> bool {
        self.story.graph().line(self.target).contains(self.pinned)
    }

    pub fn classify(&self) -> Classification {
        let published = self.target.map(|head| self.story.graph().published_by(head)).unwrap_or_default();
        let units = self.units().expect("the source can be read");
        classify(&ClassifyInput {
            pinned: self.pinned,
            base: &self.base(),
            target_head: self.target,
            pinned_on_target: self.pinned_on_target(),
            units: &units,
            target_side: &self.target_side(),
            published: &published,
            rolled_back: self.rolled_back,
            class: &self.class,
            rebuilt: false,
        })
    }

    /// The classification in words: `cherry-pick`, `refused conflict`.
    pub fn word(&self) -> String {
        class_word(&self.classify())
    }

    /// A request for it, enqueued a minute ago.
    pub fn request(&self, number: i64) -> RequestFacts {
        RequestFacts {
            request: RequestId(number),
            kind: SourceKind::default(),
            wap: WapIds::default(),
            source: RefName::new(format!("ingest/{number}")),
            pinned: self.pinned,
            enqueued_at_ms: NOW_MS - 60_000,
            class: Arc::clone(&self.class),
            source_now: SourceNow::AtPin,
            base: self.base(),
            pinned_on_target: self.pinned_on_target(),
            rolled_back: self.rolled_back,
            structure: StructureStanding::Accepted,
            units: self.units(),
            broken: None,
            unread: None,
            target_side: Arc::new(self.target_side()),
            part: None,
            external: None,
        }
    }
}

pub fn class_word(classification: &Classification) -> String {
    use mergeberg_kernel::classify::Class;
    match classification.class {
        Class::Refused(code) => format!("refused {code}"),
        class => class.word().to_owned(),
    }
}

/// A train in words: `1 fast-forward, 2 pick, 3 held overlaps-ahead`. Cars first, then verdicts.
pub fn words(plan: &TrainPlan) -> String {
    let mut words: Vec<String> = Vec::new();
    for car in &plan.cars {
        let action = match car.action {
            CarAction::FastForward => "fast-forward",
            CarAction::Pick => "pick",
            CarAction::Replay => "replay",
        };
        words.push(format!("{} {action}", car.request));
    }
    for (request, verdict) in &plan.verdicts {
        let word = match verdict {
            Verdict::Hold { code, .. } => format!("held {code}"),
            Verdict::Refuse { code, .. } => format!("refused {code}"),
            Verdict::AlreadyPublished { .. } => "already-published".to_owned(),
            Verdict::Withdraw { code, .. } => format!("withdrawn {code}"),
            Verdict::InReview { .. } => "in-review".to_owned(),
            Verdict::Repin { to } => format!("repin S{to}"),
            Verdict::RunExternal { .. } => "run external".to_owned(),
        };
        words.push(format!("{request} {word}"));
    }
    words.extend(plan.next.iter().map(|request| format!("{request} next")));
    words.join(", ")
}
