//! A second opinion on `classify` that shares no code with it.
//!
//! Small histories of appends and whole-partition overwrites over three partitions, kept as files and as
//! rows. What is called a pick is applied as files and compared with the same operations run one after the
//! other on the target's rows; what is called a conflict must have met something.

use std::collections::{BTreeMap, BTreeSet};

use mergeberg_kernel::classify::Class;
use mergeberg_kernel::policy::Overlap;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::Operation;
use mergeberg_kernel::unit::{Unit, UnitKind};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::story::{Story, class, record};

const DAYS: [&str; 3] = ["08-20", "08-21", "08-22"];

/// Label of a snapshot of which the engine says that it replaced whole partitions.
const SAID: &str = "overwrite, said";

/// How an overwrite was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Recorded,
    /// One snapshot, and the engine says what it is.
    Plain,
    /// One snapshot that nobody says anything about.
    Unsaid,
    /// A delete, then an append, as PyIceberg does.
    TwoSteps,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Append { day: usize },
    Overwrite { day: usize, how: How },
}

impl Op {
    fn day(self) -> usize {
        match self {
            Op::Append { day } | Op::Overwrite { day, .. } => day,
        }
    }
}

/// Live files: path -> (day, key). A file holds two rows of its key.
type Files = BTreeMap<String, (usize, usize)>;
/// Rows: (day, key, number).
type Rows = BTreeSet<(usize, usize, usize)>;

fn rows_of(files: &Files) -> Rows {
    files.values().flat_map(|(day, key)| [(*day, *key, 0), (*day, *key, 1)]).collect()
}

/// One operation, as files and as what it means.
#[derive(Clone, Debug)]
struct Written {
    day: usize,
    key: usize,
    replaces: bool,
    /// Nobody can tell from the table what it depended on.
    is_unknown: bool,
    /// Its snapshots: id, label, files removed, files added.
    snapshots: Vec<(usize, &'static str, Files, Files)>,
    is_recorded: bool,
}

impl Written {
    /// The operation itself, on rows.
    fn run(&self, rows: &mut Rows) {
        if self.replaces {
            rows.retain(|(day, _, _)| *day != self.day);
        }
        rows.extend([(self.day, self.key, 0), (self.day, self.key, 1)]);
    }
}

#[derive(Default)]
struct World {
    story: Story,
    next: usize,
}

impl World {
    fn fresh(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    /// Writes the operation on a line whose head and live files are given.
    fn write(&mut self, op: Op, head: &mut usize, live: &mut Files) -> Written {
        let day = op.day();
        let key = self.fresh();
        let added: Files = [(format!("F{key}"), (day, key))].into();
        let mut removed = Files::new();
        if let Op::Overwrite { .. } = op {
            removed = live.iter().filter(|(_, file)| file.0 == day).map(|(p, f)| (p.clone(), *f)).collect();
        }
        let had_rows = !removed.is_empty();
        let none = Files::new();
        let (steps, replaces, is_unknown, is_recorded) = match op {
            Op::Append { .. } => (vec![("append", none, added)], false, false, false),
            Op::Overwrite { how: How::Recorded, .. } => {
                (vec![("overwrite", removed, added)], true, false, true)
            }
            Op::Overwrite { how: How::Plain, .. } => (vec![(SAID, removed, added)], true, false, false),
            // What an update of every file there looks like.
            Op::Overwrite { how: How::Unsaid, .. } => {
                (vec![("overwrite", removed, added)], true, true, false)
            }
            Op::Overwrite { how: How::TwoSteps, .. } if had_rows => {
                (vec![("delete", removed, none.clone()), ("append", none, added)], true, false, false)
            }
            // There was nothing to delete, so there is only an append, and that is what it is.
            Op::Overwrite { how: How::TwoSteps, .. } => (vec![("append", none, added)], false, false, false),
        };
        let mut snapshots = Vec::new();
        for (label, removed, added) in steps {
            let id = self.fresh();
            self.commit(id, *head, label, &removed, &added, is_recorded);
            *head = id;
            apply(live, &removed, &added);
            snapshots.push((id, label, removed, added));
        }
        Written { day, key, replaces, is_unknown, snapshots, is_recorded }
    }

    /// Publishes one operation as picks.
    fn publish(&mut self, written: &Written, head: &mut usize, live: &mut Files) {
        for (source, label, removed, added) in &written.snapshots {
            let id = self.fresh();
            self.commit(id, *head, label, removed, added, written.is_recorded)
                .publishes(&format!("S{source}"));
            *head = id;
            apply(live, removed, added);
        }
    }

    fn commit(
        &mut self,
        id: usize,
        parent: usize,
        label: &str,
        removed: &Files,
        added: &Files,
        is_recorded: bool,
    ) -> &mut crate::story::Commit {
        let minus = removed.iter().map(|(path, (day, _))| format!("-{path}@{}", DAYS[*day]));
        let plus = added.iter().map(|(path, (day, _))| format!("+{path}@{}", DAYS[*day]));
        let files: Vec<String> = minus.chain(plus).collect();
        let parent = if parent == 0 { String::new() } else { format!("S{parent}") };
        let commit = self.story.overwrite(&format!("S{id}"), &parent, &files.join(" ")).labelled(label);
        if label == SAID {
            commit.labelled("overwrite").replacing();
        }
        if is_recorded {
            commit.recorded(record(&format!("r{id}"), Operation::ReplacePartitions))
        } else {
            commit
        }
    }
}

/// As a catalog would: what is removed must be live, and each path is live once.
fn apply(live: &mut Files, removed: &Files, added: &Files) {
    for path in removed.keys() {
        assert!(live.remove(path).is_some(), "{path} is removed and was not live");
    }
    for (path, file) in added {
        assert!(live.insert(path.clone(), *file).is_none(), "{path} is live twice");
    }
}

/// A unit run again by the book: an append re-adds its files, a replacement first drops what is live in
/// its partitions.
fn replay(unit: &Unit, live: &mut Files) {
    let day = |place: String| DAYS.iter().position(|d| place.ends_with(d)).unwrap();
    let added: Vec<(String, usize)> =
        unit.added().map(|f| (f.path.to_string(), day(f.partition.to_string()))).collect();
    match unit.kind {
        UnitKind::BlindAppend => {}
        UnitKind::ReplacePartitions { .. } => {
            live.retain(|_, (day, _)| added.iter().all(|(_, mine)| mine != day));
        }
        _ => panic!("{:?} cannot be run again", unit.kind),
    }
    for (path, day) in added {
        let key = path.strip_prefix('F').unwrap().parse().unwrap();
        live.insert(path, (day, key));
    }
}

fn ops(least: usize, most: usize) -> impl Strategy<Value = Vec<Op>> {
    let day = 0..DAYS.len();
    let how = prop_oneof![Just(How::Recorded), Just(How::Plain), Just(How::Unsaid), Just(How::TwoSteps)];
    let op = prop_oneof![
        day.clone().prop_map(|day| Op::Append { day }),
        (day, how).prop_map(|(day, how)| Op::Overwrite { day, how }),
    ];
    vec(op, least..=most)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn classification_agrees_with_running_the_operations_one_after_the_other(
        base in ops(0, 3),
        source in ops(1, 3),
        published in 0..4_usize,
        target in ops(0, 3),
        allow in any::<bool>(),
    ) {
        let mut world = World::default();
        let mut base_head = 0;
        let mut base_files = Files::new();
        for op in [Op::Append { day: 0 }].into_iter().chain(base) {
            world.write(op, &mut base_head, &mut base_files);
        }
        let (mut source_head, mut source_files) = (base_head, base_files.clone());
        let written: Vec<Written> =
            source.iter().map(|op| world.write(*op, &mut source_head, &mut source_files)).collect();
        let (mut target_head, mut target_files) = (base_head, base_files);
        let published = published.min(written.len());
        for done in &written[..published] {
            world.publish(done, &mut target_head, &mut target_files);
        }
        let foreign: Vec<Written> =
            target.iter().map(|op| world.write(*op, &mut target_head, &mut target_files)).collect();

        let class = class(|c| c.overlap = if allow { Overlap::Allow } else { Overlap::Refuse });
        let merge = world.story.merge(&format!("S{source_head}")).onto(&format!("S{target_head}")).under(&class);
        let answer = merge.classify();

        let left = &written[published..];
        let meets = |op: &Written| foreign.iter().any(|f| op.is_unknown || f.day == op.day);
        let mut expected = rows_of(&target_files);
        left.iter().for_each(|op| op.run(&mut expected));
        match answer.class {
            Class::AlreadyPublished => prop_assert!(left.is_empty()),
            Class::FastForward => {
                prop_assert_eq!(target_head, base_head);
                prop_assert_eq!(rows_of(&source_files), expected);
            }
            Class::CherryPick => {
                prop_assert!(!left.is_empty());
                let mut files = target_files.clone();
                for (_, _, removed, added) in left.iter().flat_map(|op| &op.snapshots) {
                    apply(&mut files, removed, added);
                }
                prop_assert_eq!(rows_of(&files), expected);
                prop_assert!(left.iter().all(|op| !meets(op) || (allow && !op.replaces)));
                let picked: Vec<i64> =
                    answer.units.iter().flat_map(Unit::snapshots).map(|id| id.0).collect();
                let wanted: Vec<i64> =
                    left.iter().flat_map(|op| &op.snapshots).map(|s| s.0 as i64).collect();
                prop_assert_eq!(picked, wanted, "all that is left, oldest first");
            }
            Class::Rebase => {
                prop_assert!(left.iter().any(|op| op.replaces && meets(op)), "a conflict that is none");
                let mut files = target_files.clone();
                answer.units.iter().for_each(|unit| replay(unit, &mut files));
                prop_assert_eq!(rows_of(&files), expected);
            }
            Class::Refused(ReasonCode::OverlappingAppend) => {
                prop_assert!(!allow);
                prop_assert!(left.iter().any(|op| !op.replaces && meets(op)), "an overlap that is none");
            }
            Class::Refused(ReasonCode::Conflict) => {
                prop_assert!(left.iter().any(|op| op.is_unknown));
                prop_assert!(left.iter().any(|op| op.replaces && meets(op)), "a conflict that is none");
            }
            Class::Refused(code) => prop_assert!(false, "{code}: {}", answer.text),
        }
        if !left.iter().any(meets) {
            prop_assert!(!matches!(answer.class, Class::Rebase | Class::Refused(_)), "nothing met");
        }
    }
}
