//! One random history: pipelines, strangers on the target and the worker, one step after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Epoch, Principal, RequestId, SnapshotId};

use super::pipeline::{self, Form, files_of};
use super::random::Random;
use super::rows::{Feed, Op};
use crate::support::{House, branch, main_branch, order};

/// Ticks in which a queue that nobody writes to any more must come to rest.
const MAX_TICKS: usize = 200;
/// Lease of the one worker, in milliseconds of the test's clock.
const LEASE_MS: i64 = 1_000_000_000;

/// Names of branches by class; the class decides what its pipelines do.
const BRANCHES: [&str; 12] = [
    "ingest/a",
    "ingest/b",
    "ingest/c",
    "ingest/d",
    "load/a",
    "load/b",
    "load/c",
    "transform/a",
    "transform/b",
    "transform/c",
    "derived/a",
    "derived/b",
];

/// What a snapshot did that this history wrote.
#[derive(Clone, Debug)]
pub struct Node {
    pub parent: Option<SnapshotId>,
    /// `None`: the first half of an operation of two snapshots.
    pub op: Option<usize>,
}

/// A request as this history made it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub id: RequestId,
    pub source: String,
    pub pinned: SnapshotId,
}

/// A history while it is made, and all that the judge needs afterwards.
pub struct History {
    pub house: House,
    pub feed: Feed,
    pub ops: Vec<Op>,
    pub recorded: BTreeSet<usize>,
    pub nodes: BTreeMap<SnapshotId, Node>,
    /// On the target before the queue first looked at it.
    pub baseline: BTreeSet<SnapshotId>,
    /// Written straight to the target afterwards.
    pub foreign: BTreeSet<SnapshotId>,
    pub asked: Vec<Asked>,
    /// Branches that this history removed or set back at some time.
    pub harmed: BTreeSet<String>,
    /// The table had no snapshot when its first branches were written.
    pub from_nothing: bool,
    pub seed: u64,
    /// A random history, not one told by hand.
    wanders: bool,
    pub(super) random: Random,
    epoch: Epoch,
    pub(super) next_id: i64,
    lines: Vec<String>,
    /// States as they were told last.
    states: BTreeMap<RequestId, String>,
}

/// Told when a test fails, whatever made it fail.
impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("\n{}\n", self.told());
        }
    }
}

fn policy(batch_size: usize) -> String {
    format!(
        r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]
batch-size = {batch_size}
after-landing = "drop"

[[class]]
name = "load"
prefix = "load/"
overlap = "allow"
batch-size = {batch_size}

[[class]]
name = "transform"
prefix = "transform/"
batch-size = {batch_size}
age-bound = "1m"
after-landing = "drop"

[[class]]
name = "derived"
prefix = "derived/"
appends = "derived"

[[class]]
name = "default"
prefix = ""
"#
    )
}

impl History {
    /// A house with its first snapshots on main, and the queue's first look at it.
    pub async fn start(seed: u64) -> Self {
        let batch_size = *Random::new(seed).pick(&[1, 2, 3, 50]);
        let mut history = Self::bare(seed, batch_size).await;
        history.wanders = true;
        history.from_nothing = history.random.chance(10);
        if history.random.chance(30) {
            history.merge_manifests_eagerly().await;
        }
        if history.from_nothing {
            for name in ["load/a", "load/b", "ingest/a"] {
                history.append(name, 2).await;
            }
        } else {
            for _ in 0..=history.random.below(3) {
                history.append("main", 3).await;
            }
            history.branch("load/a", "main").await;
            history.append("load/a", 1).await;
        }
        history.baseline = std::mem::take(&mut history.foreign);
        history.enqueue("load/a").await;
        history.tick().await;
        history
    }

    async fn bare(seed: u64, batch_size: usize) -> Self {
        let house = House::empty(&policy(batch_size)).await;
        let feed = pipeline::make_feed(&house).await;
        let epoch = house.ledger.lead(&house.worker.holder, LEASE_MS, house.now()).await.unwrap().unwrap();
        Self {
            house,
            feed,
            ops: Vec::new(),
            recorded: BTreeSet::new(),
            nodes: BTreeMap::new(),
            baseline: BTreeSet::new(),
            foreign: BTreeSet::new(),
            asked: Vec::new(),
            harmed: BTreeSet::new(),
            from_nothing: false,
            seed,
            wanders: false,
            random: Random::new(seed),
            epoch,
            next_id: 1,
            lines: vec![format!("batch size {batch_size}")],
            states: BTreeMap::new(),
        }
    }

    /// A house for a history told by hand: days 20 and 21 on main, and the queue has seen them.
    pub async fn quiet() -> Self {
        // The seed only says what this begins with.
        let mut history = Self::bare(0, 50).await;
        let rows = vec![order(1, 20), order(2, 20), order(3, 21)];
        history.write("main", Op::Append(rows), false, false).await;
        history.baseline = std::mem::take(&mut history.foreign);
        let main = history.house.head("main").await;
        let uuid = history.house.loaded().await.facts.uuid.clone();
        let ledger = &history.house.ledger;
        ledger.set_target_head(&history.house.table, &uuid, &main_branch(), main).await.unwrap();
        history
    }

    /// As many random steps; then the worker works until nothing more can be done.
    pub async fn play(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step().await;
        }
        self.settle().await;
    }

    pub async fn settle(&mut self) {
        for _ in 0..MAX_TICKS {
            if !self.tick().await {
                return;
            }
        }
        panic!("the queue does not come to rest");
    }

    async fn step(&mut self) {
        match self.random.below(100) {
            0..45 => {
                let name = (*self.random.pick(&BRANCHES)).to_owned();
                self.work_on(&name).await;
            }
            45..65 => {
                let name = (*self.random.pick(&BRANCHES)).to_owned();
                if self.house.head(&name).await.is_some() {
                    self.enqueue(&name).await;
                }
            }
            65..78 => {
                self.tick().await;
            }
            78..83 => {
                let op = self.stranger().await;
                let pair = self.random.chance(30);
                self.write("main", op, pair, false).await;
            }
            83..88 => {
                let days = self.some_days();
                self.write("main", Op::Compact(days), false, false).await;
            }
            88..92 => self.cancel_one().await,
            92..95 => self.branch_from_another().await,
            95..97 => self.harm_one().await,
            _ => {
                self.say("time passes");
                self.house.advance(40_000);
            }
        }
    }

    /// A pipeline begins or goes on, and mostly enqueues what it wrote.
    async fn work_on(&mut self, name: &str) {
        if self.house.head(name).await.is_none() {
            self.branch(name, "main").await;
        }
        for _ in 0..=self.random.below(3) {
            let files = files_of(&self.house, name).await;
            let op = self.op_of(name, &files);
            let pair = self.random.chance(30);
            let record = match &op {
                Op::OverwriteWhere { .. } => true,
                Op::ReplaceDays { .. } => self.random.chance(60),
                _ => false,
            };
            self.write(name, op, pair, record).await;
        }
        if self.random.chance(60) {
            self.enqueue(name).await;
        }
    }

    async fn append(&mut self, name: &str, rows: usize) {
        let rows = self.new_rows(rows);
        self.write(name, Op::Append(rows), false, false).await;
    }

    /// Writes on a branch or straight to main.
    pub async fn write(&mut self, name: &str, op: Op, pair: bool, record: bool) {
        let number = self.ops.len();
        let form = Form {
            pair,
            record: if record { op.record(&format!("op-{number}"), &self.feed) } else { None },
            // Not every engine calls its compactions so; on a branch it would be a replacement (rule C7).
            plain_label: name == "main" && self.random.chance(50),
        };
        let mut parent = self.house.head(name).await;
        let written = pipeline::write(&self.house, name, &op, &form, &self.feed).await;
        let how = match (written.len(), form.record.is_some()) {
            (0, _) => " (nothing to do)",
            (2, true) => " (recorded, two snapshots)",
            (2, false) => " (two snapshots)",
            (_, true) => " (recorded)",
            (_, false) => "",
        };
        let text = format!("{name} <- op {number}: {op}{how}");
        self.ops.push(op);
        if form.record.is_some() {
            self.recorded.insert(number);
        }
        for (at, id) in written.iter().enumerate() {
            let last = at + 1 == written.len();
            self.nodes.insert(*id, Node { parent, op: last.then_some(number) });
            parent = Some(*id);
            if name == "main" {
                self.foreign.insert(*id);
            }
        }
        let names: Vec<String> = written.iter().map(|id| self.name_of(*id)).collect();
        self.say(&format!("{text} {}", names.join(", ")));
    }

    pub async fn branch(&mut self, name: &str, from: &str) {
        let Some(mut at) = self.house.head(from).await else { return };
        // In random histories sometimes from an older snapshot of it.
        if self.wanders && self.random.chance(25) {
            at = self.before(at).await.unwrap_or(at);
        }
        self.house.writer.create_branch(&self.house.table, &branch(name), at).await.unwrap();
        let text = format!("branch {name} from {from} at {}", self.name_of(at));
        self.say(&text);
    }

    async fn branch_from_another(&mut self) {
        let from = *self.random.pick(&BRANCHES);
        let to = *self.random.pick(&BRANCHES);
        // What a class of derived appends wrote is no blind append, whatever class takes it over.
        let derived = |name: &str| name.starts_with("derived/");
        let exists = self.house.head(from).await.is_some();
        if exists && derived(from) == derived(to) && self.house.head(to).await.is_none() {
            self.branch(to, from).await;
            self.work_on(to).await;
        }
    }

    pub async fn enqueue(&mut self, name: &str) -> RequestId {
        let pinned = self.house.head(name).await.unwrap();
        let id = self.house.enqueue(name).await;
        // The same head again while the first request is open is the same request.
        if self.asked.iter().all(|asked| asked.id != id) {
            self.asked.push(Asked { id, source: name.to_owned(), pinned });
        }
        let text = format!("enqueue {name} at {} as request {id}", self.name_of(pinned));
        self.say(&text);
        id
    }

    async fn cancel_one(&mut self) {
        let mut waiting = Vec::new();
        for asked in &self.asked {
            if self.house.request(asked.id).await.state.is_waiting() {
                waiting.push(asked.id);
            }
        }
        if waiting.is_empty() {
            return;
        }
        let id = *self.random.pick(&waiting);
        self.house.ledger.cancel(id, &Principal::new("somebody"), self.house.now()).await.unwrap();
        self.say(&format!("cancel request {id}"));
    }

    /// A branch is removed, or set back by a snapshot.
    async fn harm_one(&mut self) {
        let name = *self.random.pick(&BRANCHES);
        let table = self.house.loaded().await;
        let Some(head) = table.facts.head(&branch(name)) else { return };
        let update = match self.before(head).await {
            Some(parent) if self.random.chance(50) => {
                self.say(&format!("set back {name} to {}", self.name_of(parent)));
                Update::SetRef(RefFact {
                    name: branch(name),
                    snapshot_id: parent,
                    kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
                    max_ref_age_ms: None,
                })
            }
            _ => {
                self.say(&format!("remove branch {name}"));
                Update::RemoveRef(branch(name))
            }
        };
        self.harmed.insert(name.to_owned());
        let at = Requirement::RefAt { name: branch(name), at: Some(head), role: RefRole::Source };
        let outcome = self.house.catalog.commit(&table, &[at], vec![update]).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    }

    /// The snapshot before the operation that ends with this one: never between the two of one operation.
    async fn before(&self, id: SnapshotId) -> Option<SnapshotId> {
        let table = self.house.loaded().await;
        let parent = |id| table.facts.snapshots.get(id).and_then(|snapshot| snapshot.parent);
        let mut before = parent(id)?;
        while self.nodes.get(&before).is_some_and(|node| node.op.is_none()) {
            before = parent(before)?;
        }
        Some(before)
    }

    async fn merge_manifests_eagerly(&mut self) {
        let table = self.house.loaded().await;
        let properties = [("commit.manifest.min-count-to-merge".to_owned(), "3".to_owned())].into();
        let update = Update::SetProperties(properties);
        let uuid = Requirement::TableUuid(table.facts.uuid.clone());
        let outcome = self.house.catalog.commit(&table, &[uuid], vec![update]).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
        self.say("manifests are merged from three on");
    }

    /// One tick. True when another may find more to do.
    pub async fn tick(&mut self) -> bool {
        self.house.ledger.renew(self.epoch, self.house.now()).await.unwrap();
        let before = self.house.head("main").await;
        let progress = match self.house.worker.tick(self.epoch).await {
            Ok(progress) => progress,
            Err(error) => panic!("a tick failed: {error}"),
        };
        let mut text = "tick".to_owned();
        let mut states = String::new();
        for asked in &self.asked {
            let row = self.house.request(asked.id).await;
            let classified = row.classification.unwrap_or_default();
            let state = format!("{} {classified}", row.state);
            if self.states.get(&asked.id) != Some(&state) {
                let _ = write!(states, " {}: {state};", asked.id);
                self.states.insert(asked.id, state);
            }
        }
        let after = self.house.head("main").await;
        if let Some(after) = after.filter(|after| Some(*after) != before) {
            let _ = write!(text, ", main at {}", self.name_of(after));
        }
        self.say(&format!("{text}.{states}"));
        progress.changed
    }

    /// Snapshots of this history behind `pinned`, oldest first, as far as pipelines wrote them.
    pub fn line_of(&self, pinned: SnapshotId) -> Vec<SnapshotId> {
        let mut line = Vec::new();
        let mut next = Some(pinned);
        while let Some(id) = next {
            let Some(node) = self.nodes.get(&id) else { break };
            line.push(id);
            next = node.parent;
        }
        line.reverse();
        line
    }

    pub fn op_at(&self, id: SnapshotId) -> Option<&Op> {
        self.nodes.get(&id).and_then(|node| node.op).map(|op| &self.ops[op])
    }

    /// The operation's number and itself.
    pub fn numbered_ops(&self, pinned: SnapshotId) -> Vec<(usize, &Op)> {
        let numbers = self.line_of(pinned).into_iter().filter_map(|id| self.nodes[&id].op);
        numbers.map(|number| (number, &self.ops[number])).collect()
    }

    pub fn say(&mut self, text: &str) {
        self.lines.push(text.to_owned());
    }

    /// Short and the same in every run: the last digits would do, but these are told apart at sight.
    pub fn name_of(&self, id: SnapshotId) -> String {
        let text = id.to_string();
        format!("s{}", &text[text.len().saturating_sub(4)..])
    }

    pub fn told(&self) -> String {
        let mut text = format!("history of seed {}:\n", self.seed);
        for (number, line) in self.lines.iter().enumerate() {
            let _ = writeln!(text, "{number:4}  {line}");
        }
        text
    }
}
