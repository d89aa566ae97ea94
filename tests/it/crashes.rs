//! Rule L and case O37: a worker process is killed at every named step of the protocol and started again.
//! The ends are the same as without the crash.

use std::collections::BTreeMap;

use mergeberg::table::branch_writer::Removal;
use mergeberg::worker::step::Step;
use mergeberg_kernel::ids::RequestId;

use crate::sources::wap;
use crate::support::child::{LONG_LEASE, PROGRAM, SHORT_LEASE, until};
use crate::support::{House, Order, branch, order};

pub const POLICY: &str = r#"
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
after-landing = "drop"

[[class]]
name = "transform"
prefix = "transform/"
checks = ["one-order-once"]

[[class]]
name = "default"
prefix = ""
"#;

/// Steps that every train passes.
pub const ALWAYS: [Step; 11] = [
    Step::Admitted,
    Step::CandidatesWritten,
    Step::TrainRecorded,
    Step::StagingFileWritten,
    Step::StagingSwapped,
    Step::Staged,
    Step::IntentWritten,
    Step::LandingFileWritten,
    Step::LandingSwapped,
    Step::Landed,
    Step::ReceiptWritten,
];

/// Killed at each of them in turn, in one history.
const EVERY_STEP: &str = "every step";

/// What a history ends in.
pub struct Ends {
    pub states: Vec<(RequestId, &'static str)>,
    pub keys: Vec<i64>,
    pub refs: Vec<&'static str>,
    /// Snapshots that this history puts on the target.
    pub published: usize,
}

/// Crashes at each of `steps` in a House of its own, and starts again.
async fn crash_at_each(steps: &[Step], history: impl AsyncFn(&House) -> Ends) {
    for step in Step::ALL {
        let house = House::in_real_time(POLICY, SHORT_LEASE).await;
        let ends = history(&house).await;
        let before = house.chain_length().await;
        let killed = house.drain_in_child(Some(step.name()));
        assert_eq!(killed, steps.contains(&step), "killed at {}", step.name());
        house.drain_in_child(None);
        house.assert_ends(&ends, before, step.name()).await;
    }
}

impl House {
    pub async fn chain_length(&self) -> usize {
        let table = self.loaded().await;
        table.facts.snapshots.chain(table.facts.head(&branch("main")).unwrap()).ids.len()
    }

    pub async fn assert_ends(&self, ends: &Ends, before: usize, at: &str) {
        for (request, state) in &ends.states {
            assert_eq!(self.state(*request).await, *state, "request {request}, killed at {at}");
        }
        assert_eq!(self.keys("main").await, ends.keys, "killed at {at}");
        assert_eq!(self.refs().await, ends.refs, "killed at {at}");
        // Neither missing nor twice.
        assert_eq!(self.chain_length().await, before + ends.published, "killed at {at}");
        assert!(self.ledger.open_intents().await.unwrap().is_empty(), "killed at {at}");
        let uuid = self.loaded().await.facts.uuid.clone();
        assert!(self.ledger.unfinished_trains(&uuid).await.unwrap().is_empty(), "killed at {at}");
        self.assert_reachable_only(at).await;
        // Before the train's row nobody knows what is written; from then on it is deleted by name.
        if at != Step::CandidatesWritten.name() && at != EVERY_STEP {
            self.assert_no_files_left(at).await;
        }
        self.assert_sound().await;
        self.balanced_report();
    }

    /// No candidate is left in the metadata without a ref.
    async fn assert_reachable_only(&self, at: &str) {
        let table = self.loaded().await;
        let mut reachable = std::collections::BTreeSet::new();
        for reference in table.facts.refs.values() {
            reachable.extend(table.facts.snapshots.chain(reference.snapshot_id).ids);
        }
        for snapshot in table.facts.snapshots.iter() {
            let ours = snapshot.summary.contains_key(mergeberg::worker::stage::REQUEST_KEY);
            assert!(!ours || reachable.contains(&snapshot.id), "{} is left, killed at {at}", snapshot.id);
        }
    }

    /// Every manifest list, manifest and data file on disk is named by a snapshot.
    async fn assert_no_files_left(&self, at: &str) {
        let left = self.orphans().await;
        assert!(left.is_empty(), "{left:?} are left, killed at {at}");
    }

    /// A foreign commit on main, so that what was made before is no fast-forward.
    async fn move_main(&self) {
        self.append("main", &[order(90, 28)]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fast_forward_survives_a_crash_at_each_step() {
    crash_at_each(&ALWAYS, async |house| {
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        let request = house.enqueue("ingest/a").await;
        Ends { states: vec![(request, "landed")], keys: vec![1, 2, 3, 4], refs: vec!["main"], published: 1 }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_picked_append_survives_a_crash_at_each_step() {
    crash_at_each(&ALWAYS, async |house| {
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        house.move_main().await;
        let request = house.enqueue("ingest/a").await;
        let keys = vec![1, 2, 3, 4, 90];
        Ends { states: vec![(request, "landed")], keys, refs: vec!["main"], published: 1 }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_survives_a_crash_at_each_step() {
    crash_at_each(&ALWAYS, async |house| {
        let mut states = Vec::new();
        for (at, name) in ["ingest/a", "ingest/b", "ingest/c"].into_iter().enumerate() {
            let id = i64::try_from(at).unwrap() + 4;
            house.append_on_new(name, &[order(id, 22)]).await;
            states.push((house.enqueue(name).await, "landed"));
        }
        house.move_main().await;
        Ends { states, keys: vec![1, 2, 3, 4, 5, 6, 90], refs: vec!["main"], published: 3 }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_partition_survives_a_crash_at_each_step() {
    crash_at_each(&ALWAYS, async |house| {
        house.branch("transform/a").await;
        let done = Order { status: "done".to_owned(), ..order(3, 21) };
        house.overwrite_days("transform/a", &[21], &[done]).await;
        // It meets an append to the very day, so the operation is run again: 8 goes (rule D5).
        house.append("main", &[order(8, 21)]).await;
        let request = house.enqueue("transform/a").await;
        Ends {
            states: vec![(request, "landed")],
            keys: vec![1, 2, 3],
            refs: vec!["main", "transform/a"],
            published: 1,
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_overwrite_survives_a_crash_at_each_step() {
    crash_at_each(&ALWAYS, async |house| {
        house.branch("transform/a").await;
        let record = r#"{"v":1,"id":"recalc-21","op":"overwrite-where","where":"order_date = DATE '2026-08-21'",
            "query":"SELECT order_id, order_date, 'done' AS status, amount FROM target WHERE order_date = DATE '2026-08-21'"}"#;
        let summary = BTreeMap::from([("mergeberg.operation".to_owned(), record.to_owned())]);
        let day = "2026-08-21";
        let remove = Removal::Files(Box::new(move |file| {
            file.fact.partition.fields.iter().any(|f| f.value.as_deref() == Some(day))
        }));
        let done = Order { status: "done".to_owned(), ..order(3, 21) };
        house.write("transform/a", "overwrite", &[done], remove, summary).await;
        // Run again over the row that came meanwhile: 8 stays, and is done as well.
        house.append("main", &[order(8, 21)]).await;
        let request = house.enqueue("transform/a").await;
        Ends {
            states: vec![(request, "landed")],
            keys: vec![1, 2, 3, 8],
            refs: vec!["main", "transform/a"],
            published: 1,
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_with_a_bad_member_survives_a_crash_at_each_step() {
    crash_at_each(&Step::ALL, async |house| {
        let mut states = Vec::new();
        for (name, id, day, state) in [
            ("ingest/a", 4, 22, "landed"),
            ("ingest/b", 3, 21, "refused(duplicate-key)"),
            ("ingest/c", 6, 22, "landed"),
        ] {
            house.append_on_new(name, &[order(id, day)]).await;
            states.push((house.enqueue(name).await, state));
        }
        let refs = vec!["ingest/b", "main"];
        Ends { states, keys: vec![1, 2, 3, 4, 6], refs, published: 2 }
    })
    .await;
}

/// The second train's files are there before it is due: it is admitted with its row.
#[tokio::test(flavor = "multi_thread")]
async fn a_train_that_was_written_ahead_survives_a_crash_at_each_step() {
    let policy = POLICY.replace("prefix = \"ingest/\"", "prefix = \"ingest/\"\nbatch-size = 1");
    for step in ALWAYS.into_iter().filter(|step| *step != Step::Admitted) {
        let house = House::in_real_time(&policy, SHORT_LEASE).await;
        let mut states = Vec::new();
        for (name, id) in [("ingest/a", 4), ("ingest/b", 5)] {
            house.append_on_new(name, &[order(id, 22)]).await;
            states.push((house.enqueue(name).await, "landed"));
        }
        let before = house.chain_length().await;
        assert!(house.drain_in_child(Some(&format!("{}#2", step.name()))), "killed at {}", step.name());
        house.drain_in_child(None);
        let ends = Ends { states, keys: vec![1, 2, 3, 4, 5], refs: vec!["main"], published: 2 };
        house.assert_ends(&ends, before, step.name()).await;
    }
}

/// Taken back after its train was written ahead and before that is recorded.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_cancelled_right_before_its_row_takes_its_files_with_it() {
    let policy = POLICY.replace("prefix = \"ingest/\"", "prefix = \"ingest/\"\nbatch-size = 1");
    let house = House::in_real_time(&policy, SHORT_LEASE).await;
    let mut requests = Vec::new();
    for (name, id) in [("ingest/a", 4), ("ingest/b", 5), ("ingest/c", 6)] {
        house.append_on_new(name, &[order(id, 22)]).await;
        requests.push(house.enqueue(name).await);
    }
    let cancel = format!("{PROGRAM} request cancel {} --principal ann", requests[1]);
    house.drain_and_run("candidates-written#2", &cancel);
    for (request, state) in requests.iter().zip(["landed", "cancelled", "landed"]) {
        assert_eq!(house.state(*request).await, state);
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 6]);
    assert!(house.orphans().await.is_empty(), "{:?}", house.orphans().await);
    house.assert_sound().await;
}

/// Nobody waits any more when the worker dies, and still what it staged goes.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_after_the_last_request_was_refused_leaves_nothing_behind() {
    for step in [Step::Evicted, Step::DroppingFileWritten, Step::DroppingSwapped, Step::TrainDropped] {
        let house = House::in_real_time(POLICY, SHORT_LEASE).await;
        house.append_on_new("ingest/a", &[order(3, 21)]).await;
        let request = house.enqueue("ingest/a").await;
        let before = house.chain_length().await;
        assert!(house.drain_in_child(Some(step.name())));
        house.drain_in_child(None);
        let ends = Ends {
            states: vec![(request, "refused(duplicate-key)")],
            keys: vec![1, 2, 3],
            refs: vec!["ingest/a", "main"],
            published: 0,
        };
        house.assert_ends(&ends, before, step.name()).await;
    }
}

/// Case O37: a request is there from the moment at which its enqueue was answered, and killed workers in a
/// row lose nothing and publish nothing twice.
#[tokio::test(flavor = "multi_thread")]
async fn case_o37_one_history_through_every_crash_in_turn() {
    let house = House::in_real_time(POLICY, SHORT_LEASE).await;
    let before = house.chain_length().await;
    let mut ends = Ends { states: Vec::new(), keys: vec![1, 2, 3], refs: vec!["main"], published: 0 };
    for (at, step) in ALWAYS.into_iter().enumerate() {
        let name = format!("ingest/{at}");
        let id = i64::try_from(at).unwrap() + 10;
        house.append_on_new(&name, &[order(id, 22)]).await;
        let output = house
            .command(&["--json", "request", "enqueue", "--table", "shop.orders", "--source", &name])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let open = house.ledger.requests(&Default::default()).await.unwrap();
        ends.states.push((open.last().unwrap().id, "landed"));
        ends.keys.push(id);
        ends.published += 1;
        assert!(house.drain_in_child(Some(step.name())), "killed at {}", step.name());
    }
    house.drain_in_child(None);
    house.assert_ends(&ends, before, EVERY_STEP).await;
}

/// A staged snapshot and a revert, whose branches are the queue's own.
#[tokio::test(flavor = "multi_thread")]
async fn case_o37_branches_of_the_queues_own_are_let_go_of_once() {
    let house = House::in_real_time(POLICY, SHORT_LEASE).await;
    house.append_on_new("ingest/bad", &[order(4, 22)]).await;
    let bad = house.enqueue("ingest/bad").await;
    house.drain_in_child(None);
    assert_eq!(house.state(bad).await, "landed");
    house.stage_bare("audit-7", &[order(5, 23)]).await;
    house.move_main().await;
    let staged = house.enqueue_staged(wap("audit-7")).await;
    let revert = house.revert(bad).await;
    let ends = Ends {
        states: vec![(staged, "landed"), (revert, "landed")],
        keys: vec![1, 2, 3, 5, 90],
        refs: vec!["main"],
        published: 2,
    };
    let before = house.chain_length().await;
    // After the swap both are on the target, and no train leaves any more.
    for step in ALWAYS.into_iter().take_while(|step| *step != Step::Landed) {
        assert!(house.drain_in_child(Some(step.name())), "killed at {}", step.name());
    }
    house.drain_in_child(None);
    house.assert_ends(&ends, before, EVERY_STEP).await;
}

/// Case O37: only an expired lease is taken over.
#[tokio::test(flavor = "multi_thread")]
async fn case_o37_a_second_process_takes_nothing_from_one_that_lives() {
    let house = House::in_real_time(POLICY, LONG_LEASE).await;
    let first = house.start_worker(&[]);
    until("the first leads", async || house.ledger.leader().await.unwrap().is_some()).await;
    let leader = house.ledger.leader().await.unwrap().unwrap();
    assert!(leader.holder.starts_with(&format!("{}-", first.id())), "{leader:?}");

    let mut second = house.start_worker(&["--drain"]);
    for shard in 0..3 {
        let name = format!("ingest/{shard}");
        house.append_on_new(&name, &[order(10 + shard, 22)]).await;
        let request = house.enqueue(&name).await;
        until("it has landed", async || house.state(request).await == "landed").await;
        assert!(!second.has_ended(), "it waits as long as the first lives");
    }
    let now = house.ledger.leader().await.unwrap().unwrap();
    assert_eq!((now.holder, now.epoch), (leader.holder, leader.epoch), "nobody else has led");

    // An orderly end lets the second in at once, long before the lease is over.
    let output = first.stop();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = second.wait();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(house.keys("main").await, [1, 2, 3, 10, 11, 12]);
    house.assert_sound().await;
    house.balanced_report();
}

/// The heartbeat runs beside the tick, and a killed holder is followed as soon as its lease is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_shorter_than_a_tick_is_renewed_during_it() {
    let house = House::in_real_time(POLICY, SHORT_LEASE).await;
    let first = house.start_worker(&[]);
    until("the first leads", async || house.ledger.leader().await.unwrap().is_some()).await;
    let epoch = house.ledger.leader().await.unwrap().unwrap().epoch;
    let mut requests = Vec::new();
    for shard in 0..4 {
        let name = format!("ingest/{shard}");
        house.append_on_new(&name, &[order(10 + shard, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    for request in requests {
        until("it has landed", async || house.state(request).await == "landed").await;
    }
    assert_eq!(house.ledger.leader().await.unwrap().unwrap().epoch, epoch);
    first.kill();
    house.append_on_new("ingest/z", &[order(20, 23)]).await;
    let request = house.enqueue("ingest/z").await;
    house.drain_in_child(None);
    assert_eq!(house.state(request).await, "landed");
    house.assert_sound().await;
}
