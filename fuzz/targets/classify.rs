//! Any history of two branches that came from one snapshot, under any class.

#![no_main]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use mergeberg_kernel::admission::{
    RequestFacts, SourceKind, SourceNow, StructureStanding, TargetPlan, WapIds, plan_train,
};
use mergeberg_kernel::change::{ChangeSet, FileContent, FileFact, RewriteProof};
use mergeberg_kernel::classify::{ClassifyInput, Origin, TargetChange, TargetSide, classify};
use mergeberg_kernel::ids::{RefName, RequestId, SchemaId, SnapshotId, SpecId, TableName};
use mergeberg_kernel::lineage::BaseFinding;
use mergeberg_kernel::partition::{Partition, PartitionField};
use mergeberg_kernel::policy::{
    AfterLanding, Appends, ClassKind, ClassPolicy, EqualityDeletes, Isolation, OnSourceMoved, Overlap,
};
use mergeberg_kernel::record::RecordFinding;
use mergeberg_kernel::unit::{SourceChange, units};

/// Snapshots of one side, at most.
const MAX_SNAPSHOTS: usize = 12;
/// Files of one snapshot, at most.
const MAX_FILES: usize = 12;

#[derive(Arbitrary, Debug)]
struct History {
    source: Vec<Snapshot>,
    target: Vec<Snapshot>,
    /// A second request: how many of the source's snapshots it pinned, and its class.
    other: (u8, Class),
    class: Class,
    base: u8,
    rolled_back: bool,
}

#[derive(Arbitrary, Debug)]
struct Snapshot {
    label: u8,
    files: Vec<File>,
    proved: bool,
    with_next: bool,
    keeps_sequence_numbers: bool,
    replaces: bool,
    knows_parent: bool,
    record: Option<String>,
    publishes: Option<u8>,
}

#[derive(Arbitrary, Debug)]
struct File {
    path: u8,
    place: u8,
    of: u8,
    kind: u8,
    added: bool,
}

#[derive(Arbitrary, Debug)]
struct Class {
    kind: bool,
    derived: bool,
    overlap: u8,
    snapshot: bool,
    equality: u8,
    moved: u8,
    drop: bool,
    batch: u8,
    aged: bool,
}

impl Class {
    fn policy(&self) -> ClassPolicy {
        ClassPolicy {
            kind: if self.kind { ClassKind::Compaction } else { ClassKind::Changes },
            appends: if self.derived { Appends::Derived } else { Appends::Blind },
            overlap: [Overlap::Allow, Overlap::AllowWithDuplicateCheck, Overlap::Refuse]
                [usize::from(self.overlap % 3)],
            isolation: if self.snapshot { Isolation::Snapshot } else { Isolation::Serializable },
            equality_deletes: [EqualityDeletes::Refuse, EqualityDeletes::Rebase, EqualityDeletes::SerialUpsert]
                [usize::from(self.equality % 3)],
            on_source_moved: [OnSourceMoved::LandPin, OnSourceMoved::Repin, OnSourceMoved::Refuse]
                [usize::from(self.moved % 3)],
            after_landing: if self.drop { AfterLanding::Drop } else { AfterLanding::Keep },
            batch_size: usize::from(self.batch % 4) + 1,
            ..ClassPolicy::shipped_default()
        }
    }
}

fn partition(place: u8) -> Arc<Partition> {
    let field = |source_id: i32, value: u8| PartitionField {
        source_id,
        name: format!("p{source_id}"),
        transform: "identity".to_owned(),
        value: (value > 0).then(|| value.to_string()),
    };
    let (spec, fields) = match place % 4 {
        0 => (9, Vec::new()),
        1 => (1, vec![field(1, place >> 6), field(2, (place >> 4) & 3)]),
        _ => (0, vec![field(1, place >> 6)]),
    };
    Arc::new(Partition { spec_id: SpecId(spec), fields })
}

impl File {
    fn fact(&self) -> FileFact {
        let path = |number: u8| -> Arc<str> { Arc::from(format!("f{}", number % 16)) };
        let of = path(self.of);
        let content = match self.kind % 8 {
            0 => FileContent::PositionDeletes { of: None },
            1 => FileContent::PositionDeletes { of: Some(of) },
            2 => FileContent::DeletionVector { of, offset: i64::from(self.path) },
            3 => FileContent::EqualityDeletes { field_ids: vec![1] },
            _ => FileContent::Data,
        };
        FileFact { path: path(self.path), partition: partition(self.place), records: 1, bytes: 1, content }
    }
}

impl Snapshot {
    fn change(&self, id: i64, table: &TableName) -> ChangeSet {
        let mut summary = BTreeMap::new();
        if let Some(record) = &self.record {
            summary.insert(mergeberg_kernel::record::RECORD_KEY.to_owned(), record.clone());
        }
        let mut change = ChangeSet {
            snapshot: SnapshotId(id),
            schema_id: Some(SchemaId(0)),
            label: ["append", "overwrite", "replace", "delete"][usize::from(self.label % 4)].to_owned(),
            record: RecordFinding::of_summary(&summary, table),
            replaces_partitions: self.replaces,
            added: Vec::new(),
            removed: Vec::new(),
            added_deletes: Vec::new(),
            removed_deletes: Vec::new(),
        };
        for file in self.files.iter().take(MAX_FILES) {
            let fact = file.fact();
            let files = match (fact.content == FileContent::Data, file.added) {
                (true, true) => &mut change.added,
                (true, false) => &mut change.removed,
                (false, true) => &mut change.added_deletes,
                (false, false) => &mut change.removed_deletes,
            };
            files.push(fact);
        }
        change
    }

    fn proof(&self) -> RewriteProof {
        if self.proved { RewriteProof::Content } else { RewriteProof::None }
    }

    fn source_change(&self, id: i64, table: &TableName) -> SourceChange {
        let change = Arc::new(self.change(id, table));
        let known: BTreeSet<Arc<str>> = change.removed.iter().map(|file| Arc::clone(&file.path)).collect();
        SourceChange {
            proof: self.proof(),
            proof_with_next: if self.with_next { RewriteProof::Content } else { RewriteProof::None },
            keeps_sequence_numbers: self.keeps_sequence_numbers,
            parent_files: self.knows_parent.then(|| Arc::new(known)),
            filter: None,
            change,
        }
    }
}

fn request(history: &History, number: i64, pinned: usize, class: &Class, side: &Arc<TargetSide>) -> RequestFacts {
    let table: TableName = "n.t".parse().expect("a name");
    let policy = class.policy();
    let snapshots = history.source.iter().take(pinned);
    let changes: Vec<SourceChange> =
        snapshots.zip(100..).map(|(snapshot, id)| snapshot.source_change(id, &table)).collect();
    RequestFacts {
        request: RequestId(number),
        source: RefName::new(format!("s{number}")),
        kind: SourceKind::Branch,
        pinned: SnapshotId(99 + i64::try_from(pinned).unwrap_or(0)),
        enqueued_at_ms: if class.aged { 0 } else { 1_000_000_000 },
        source_now: SourceNow::AtPin,
        base: match history.base % 4 {
            0 => BaseFinding::Empty,
            1 => BaseFinding::Unrelated,
            _ => BaseFinding::Common(SnapshotId(1)),
        },
        pinned_on_target: false,
        rolled_back: history.rolled_back,
        structure: StructureStanding::Accepted,
        wap: WapIds::default(),
        units: units(&changes, &policy),
        broken: None,
        unread: None,
        target_side: Arc::clone(side),
        class: Arc::new(policy),
        part: None,
        external: None,
    }
}

fuzz_target!(|history: History| {
    let table: TableName = "n.t".parse().expect("a name");
    let target: Vec<TargetChange> = history
        .target
        .iter()
        .take(MAX_SNAPSHOTS)
        .zip(2..)
        .map(|(snapshot, id)| TargetChange {
            change: Arc::new(snapshot.change(id, &table)),
            proof: snapshot.proof(),
            origin: Origin::Target(SnapshotId(id)),
        })
        .collect();
    let head = SnapshotId(1 + i64::try_from(target.len()).unwrap_or(0));
    let published: HashMap<SnapshotId, SnapshotId> = history
        .target
        .iter()
        .take(MAX_SNAPSHOTS)
        .zip(2..)
        .filter_map(|(snapshot, id)| Some((SnapshotId(100 + i64::from(snapshot.publishes? % 16)), SnapshotId(id))))
        .collect();
    let side = Arc::new(TargetSide::new(target));
    let all = history.source.len().min(MAX_SNAPSHOTS);
    let (part, class) = &history.other;
    let requests = [
        request(&history, 1, all, &history.class, &side),
        request(&history, 2, usize::from(*part) % (all + 1), class, &side),
    ];
    for facts in &requests {
        if let Ok(units) = &facts.units {
            let input = ClassifyInput {
                pinned: facts.pinned,
                base: &facts.base,
                target_head: Some(head),
                pinned_on_target: false,
                units,
                target_side: &facts.target_side,
                published: &published,
                rolled_back: facts.rolled_back,
                class: &facts.class,
                rebuilt: false,
            };
            let (one, two) = (classify(&input), classify(&input));
            assert_eq!(format!("{one:?}"), format!("{two:?}"), "the same question, the same answer");
            assert!(!one.text.is_empty());
        }
    }
    let protected = BTreeSet::from([RefName::main()]);
    let plan = plan_train(
        &requests,
        &TargetPlan {
            head: Some(head),
            published: &published,
            protected: &protected,
            now_ms: 1_000_000_000,
            fast_forward_allowed: true,
        },
    );
    let told = plan.cars.len() + plan.verdicts.len() + plan.next.len();
    assert_eq!(told, requests.len(), "each request has one answer");
});
