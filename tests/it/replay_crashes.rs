//! Rule R10: while an operation is run again its worker is killed, or the request cancelled, at each step. The ends are the
//! same as without that, and no file is left on disk that no snapshot names.

use std::collections::BTreeMap;

use mergeberg::table::branch_writer::Removal;
use mergeberg::table::create::TableDefinition;
use mergeberg::worker::step::Step;
use mergeberg_kernel::ids::RequestId;
use serde_json::{Value, json};

use crate::crashes::Ends;
use crate::support::child::{CHECKPOINTS_AT_ONCE, HELD_UP, PROGRAM, Settings};
use crate::support::{House, Order, order};

const POLICY: &str = r#"
table = "shop.orders"

[[class]]
name = "merge"
prefix = "merge/"
on-conflict = "row-merge"
key = ["order_id"]

[[class]]
name = "default"
prefix = ""
"#;

/// Steps of a train that runs an operation again, up to the one after which it is landed.
const BEFORE_THE_SWAP: [&str; 15] = [
    "admitted",
    "replay-begun",
    "file-noted",
    "checkpoint-written",
    "checkpointed",
    SECOND_FILE,
    "replayed",
    "candidates-written",
    "train-recorded",
    "staging-file-written",
    "staging-swapped",
    "staged",
    "intent-written",
    "landing-file-written",
    "landing-swapped",
];

/// Reached where more than one file is written.
const SECOND_FILE: &str = "file-noted#2";

/// Steps at which a person may still take the request back.
const CANCELLABLE: [Step; 7] = [
    Step::Admitted,
    Step::ReplayBegun,
    Step::FileNoted,
    Step::CheckpointWritten,
    Step::Checkpointed,
    Step::Replayed,
    Step::CandidatesWritten,
];

/// An operation, as it ran on a branch where orders 1, 2 (day 20) and 3 (day 21) were.
struct Operation {
    name: &'static str,
    branch: &'static str,
    record: Option<Value>,
    mode: Option<(&'static str, &'static str)>,
    /// What it left on the branch.
    after: Vec<Order>,
    /// What it leaves on the target, which got order 8 of day 20 meanwhile.
    merged: Vec<Order>,
}

fn paid(order: Order) -> Order {
    Order { status: "paid".to_owned(), ..order }
}

fn operations() -> Vec<Operation> {
    let day = "order_date = DATE '2026-08-20'";
    let query = format!("SELECT order_id, order_date, 'paid' AS status, amount FROM target WHERE {day}");
    let first_paid = || vec![paid(order(1, 20)), order(2, 20), order(3, 21)];
    let first_paid_and_late = || vec![paid(order(1, 20)), order(2, 20), order(3, 21), order(8, 20)];
    let delete = json!({"v": 1, "id": "a", "op": "delete-where", "where": "order_id = 1"});
    let update = json!({"v": 1, "id": "a", "op": "update-where", "where": "order_id = 1", "set": {"status": "'paid'"}});
    let merge = json!({
        "v": 1, "id": "a", "op": "merge-into",
        "source": "SELECT order_id, 'paid' AS status FROM target WHERE order_id = 1",
        "on": "target.order_id = source.order_id",
        "when-matched": [{"update": {"status": "source.status"}}],
    });
    let operation = |name, record| Operation {
        name,
        branch: "work/a",
        record: Some(record),
        mode: None,
        after: first_paid(),
        merged: first_paid_and_late(),
    };
    let deleted = |operation| Operation {
        after: vec![order(2, 20), order(3, 21)],
        merged: vec![order(2, 20), order(3, 21), order(8, 20)],
        ..operation
    };
    vec![
        Operation {
            after: vec![paid(order(1, 20)), paid(order(2, 20)), order(3, 21)],
            merged: vec![paid(order(1, 20)), paid(order(2, 20)), order(3, 21), paid(order(8, 20))],
            ..operation(
                "overwrite where",
                json!({"v": 1, "id": "a", "op": "overwrite-where", "where": day, "query": query}),
            )
        },
        deleted(operation("delete where, copy on write", delete.clone())),
        deleted(Operation {
            mode: Some(("write.delete.mode", "merge-on-read")),
            ..operation("delete where, merge on read", delete)
        }),
        operation("update where", update),
        Operation { mode: Some(("write.merge.mode", "merge-on-read")), ..operation("merge into", merge) },
        Operation { branch: "merge/a", record: None, ..operation("row merge", Value::Null) },
    ]
}

impl Operation {
    fn definition(&self) -> TableDefinition {
        match self.mode {
            Some((key, value)) => House::orders_definition().property(key, value),
            None => House::orders_definition(),
        }
    }

    /// Deletes alone are not named before they are staged.
    fn writes_rows(&self) -> bool {
        self.mode.is_none_or(|(key, _)| key != "write.delete.mode")
    }

    /// It ran on a branch, main got an order, and the branch waits.
    async fn house(&self, settings: Settings) -> (House, RequestId) {
        let house = House::in_real_time_with(self.definition(), POLICY, settings).await;
        house.branch(self.branch).await;
        let summary = self.record.iter().map(|record| ("mergeberg.operation".to_owned(), record.to_string()));
        let of_day = Removal::Files(Box::new(|file| {
            file.fact.partition.fields.iter().any(|field| field.value.as_deref() == Some("2026-08-20"))
        }));
        let rows: Vec<Order> = self.after.iter().filter(|row| row.day == 20).cloned().collect();
        house.write(self.branch, "overwrite", &rows, of_day, summary.collect::<BTreeMap<_, _>>()).await;
        if self.record.is_some() {
            house.append("main", &[order(8, 20)]).await;
        } else {
            // Only files that differ on both sides are compared.
            let rows = [order(1, 20), order(2, 20), order(3, 21), order(8, 20)];
            let all = Removal::Files(Box::new(|_| true));
            house.write("main", "overwrite", &rows, all, BTreeMap::new()).await;
        }
        let request = house.enqueue(self.branch).await;
        (house, request)
    }

    fn ends(&self, request: RequestId) -> Ends {
        Ends {
            states: vec![(request, "landed")],
            keys: self.merged.iter().map(|order| order.id).collect(),
            refs: if self.branch == "merge/a" { vec!["main", "merge/a"] } else { vec!["main", "work/a"] },
            published: 1,
        }
    }
}

async fn survives_every_crash(name: &str) {
    let operation = operations().into_iter().find(|operation| operation.name == name).unwrap();
    let mut steps: Vec<&str> = BEFORE_THE_SWAP.to_vec();
    if !operation.writes_rows() {
        steps.retain(|step| !["checkpoint-written", "checkpointed", SECOND_FILE].contains(step));
    }
    while !steps.is_empty() {
        let (house, request) = operation.house(CHECKPOINTS_AT_ONCE).await;
        let before = house.chain_length().await;
        let mut left = steps.as_slice();
        while let Some((step, rest)) = left.split_first() {
            left = rest;
            if !house.drain_in_child(Some(step)) {
                // It wrote one file alone, and has landed.
                assert_eq!(*step, SECOND_FILE, "{name}");
                break;
            }
        }
        house.drain_in_child(None);
        house.assert_ends(&operation.ends(request), before, name).await;
        assert_eq!(house.rows("main").await, operation.merged, "{name}");
        steps = left.to_vec();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_an_overwrite_survives_every_crash() {
    survives_every_crash("overwrite where").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_delete_by_copying_survives_every_crash() {
    survives_every_crash("delete where, copy on write").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_delete_by_marking_survives_every_crash() {
    survives_every_crash("delete where, merge on read").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_an_update_survives_every_crash() {
    survives_every_crash("update where").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_merge_survives_every_crash() {
    survives_every_crash("merge into").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_row_merge_survives_every_crash() {
    survives_every_crash("row merge").await;
}

/// Until its train is recorded a request can be taken back, and nothing of it is left.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_replay_is_cancelled_at_each_step() {
    for operation in operations() {
        for step in CANCELLABLE {
            if !operation.writes_rows() && matches!(step, Step::CheckpointWritten | Step::Checkpointed) {
                continue;
            }
            let at = format!("{}, cancelled at {}", operation.name, step.name());
            let (house, request) = operation.house(HELD_UP).await;
            let main = house.head("main").await;
            house.drain_and_run(step.name(), &format!("{PROGRAM} request cancel {request} --principal ann"));
            assert_eq!(house.state(request).await, "cancelled", "{at}");
            assert_eq!(house.head("main").await, main, "{at}");
            assert_eq!(house.refs().await, ["main", operation.branch], "{at}");
            assert!(house.orphans().await.is_empty(), "{at}: {:?}", house.orphans().await);
            let uuid = house.loaded().await.facts.uuid.clone();
            assert_eq!(house.ledger.unrecorded_trains(&uuid).await.unwrap(), [], "{at}");
            house.assert_sound().await;
        }
    }
}

/// From then on it is past that, and lands.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_is_recorded_is_past_being_cancelled() {
    let operation = operations().into_iter().next().unwrap();
    let (house, request) = operation.house(HELD_UP).await;
    let refused = format!("! {PROGRAM} request cancel {request} 2>refused.txt");
    house.drain_and_run(Step::TrainRecorded.name(), &refused);
    assert_eq!(house.state(request).await, "landed");
    let told = std::fs::read_to_string(house.dir.path().join("refused.txt")).unwrap();
    assert!(told.contains("is past being cancelled") && told.contains("[wrong-state]"), "{told}");
    assert_eq!(house.rows("main").await, operation.merged);
}

/// Somebody's removal of orphan files took what a replay had just written: nobody's request is refused for it.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r10_a_file_that_is_gone_before_staging_is_written_again() {
    let operation = operations().into_iter().next().unwrap();
    let (house, request) = operation.house(HELD_UP).await;
    std::fs::write(house.dir.path().join("stamp"), "").unwrap();
    let removal = "find warehouse -name '*.parquet' -newer stamp -delete";
    let output = house.drain_and_run(Step::Replayed.name(), removal);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("keep removals of orphan files away"), "{log}");
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.rows("main").await, operation.merged);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    house.assert_sound().await;
}
