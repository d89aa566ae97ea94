//! Cases O02 to O10: publishing primitives.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;

use crate::support::{House, Moment, ORDERS_POLICY, Order, branch, drain, keyed_record, order};

/// Everything that overlaps is refused, and branches stay.
const STRICT_POLICY: &str = "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\n";

fn done(id: i64, day: u32) -> Order {
    Order { status: "done".to_owned(), ..order(id, day) }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o02_the_first_publish_makes_main() {
    let house = House::empty(STRICT_POLICY).await;
    let first = house.append("work", &[order(1, 20)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.head("main").await, Some(first));
    assert_eq!(house.keys("main").await, [1]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o02_an_audit_of_nothing_is_no_pass() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"some-rows\"\ntype = \"row-count\"\nmin = 1\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"some-rows\"]\n";
    let house = House::empty(policy).await;
    house.append("work", &[]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(empty-source)");
    assert_eq!(house.head("main").await, None);

    // With a snapshot that empties a day the check runs, on no rows, and says so.
    house.append("other", &[order(1, 20)]).await;
    let other = house.enqueue("other").await;
    house.drain().await;
    assert_eq!(house.state(other).await, "landed");
    house.branch("emptied").await;
    house.delete_days("emptied", &[20]).await;
    let emptied = house.enqueue("emptied").await;
    house.drain().await;
    assert_eq!(house.state(emptied).await, "refused(row-count)");
    assert_eq!(house.evidence(emptied, "some-rows").await[0].evidence.scope, "no rows");
    assert_eq!(house.keys("main").await, [1]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o03_main_is_never_replaced_by_the_branch() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(9, 22)]).await;
    house.append("work", &[order(4, 23)]).await;
    let before = house.head("main").await.unwrap();
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    let after = house.head("main").await.unwrap();
    assert!(house.loaded().await.facts.snapshots.is_ancestor(before, after));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o04_nothing_past_the_pin_is_published() {
    let house = House::orders(ORDERS_POLICY).await;
    let audited = house.append_on_new("ingest/stream", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/stream").await;
    let later = house.append("ingest/stream", &[order(5, 22)]).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.head("main").await, Some(audited));
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    assert_eq!(house.head("ingest/stream").await, Some(later), "the branch stays, with what came after");

    // What came after is a request of its own, and only the rest is published.
    let rest = house.enqueue("ingest/stream").await;
    house.drain().await;
    assert_eq!(house.state(rest).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o05_all_snapshots_of_a_branch_then_its_sibling() {
    let house = House::orders(ORDERS_POLICY).await;
    house.branch("ingest/b1").await;
    house.branch("ingest/b2").await;
    for (key, day) in [(4, 22), (5, 22), (6, 23)] {
        house.append("ingest/b1", &[order(key, day)]).await;
    }
    house.append("ingest/b2", &[order(7, 24)]).await;
    let first = house.enqueue("ingest/b1").await;
    let second = house.enqueue("ingest/b2").await;
    house.drain().await;
    assert_eq!(house.state(first).await, "landed");
    assert_eq!(house.state(second).await, "landed");
    assert_eq!(house.classified(first).await, "fast-forward");
    assert_eq!(house.classified(second).await, "cherry-pick", "it was applied again, behind its sibling");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6, 7]);

    // No head that main ever had shows 4 without 5 and 6.
    let table = house.loaded().await;
    for entry in &table.facts.snapshot_log {
        let keys: Vec<i64> =
            house.rows_at(&table, entry.snapshot_id).await.into_iter().map(|row| row.id).collect();
        assert_eq!(keys.contains(&4), keys.contains(&5) && keys.contains(&6), "{keys:?}");
    }
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o06_the_same_staged_change_twice_is_published_once() {
    for main_moved in [false, true] {
        let house = House::orders(ORDERS_POLICY).await;
        let staged = house.append_on_new("ingest/one", &[order(4, 22)]).await;
        house.writer.create_branch(&house.table, &branch("ingest/two"), staged).await.unwrap();
        if main_moved {
            house.append("main", &[order(9, 25)]).await;
        }
        let one = house.enqueue("ingest/one").await;
        let two = house.enqueue("ingest/two").await;
        house.drain().await;
        assert_eq!(house.state(one).await, "landed");
        assert_eq!(house.state(two).await, "already-published", "main moved: {main_moved}");
        assert_eq!(house.keys("main").await.iter().filter(|key| **key == 4).count(), 1);
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o06_two_workers_at_the_same_staged_change() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/one", &[order(4, 22)]).await;
    // Moved main: the change is applied again, under an id of each worker's own.
    house.append("main", &[order(9, 25)]).await;
    let request = house.enqueue("ingest/one").await;
    let (worker, script) = house.scripted().await;
    // The first worker passed every check and is about to move the pointer; its lease ends, another one
    // takes over and publishes.
    let other = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        other.advance(600_000);
        other.drain().await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    let receipts = house.ledger.receipts(0, i64::MAX).await.unwrap();
    assert_eq!(receipts.len(), 1, "one landing has a receipt");
    house.assert_sound().await;
}

/// Main gained key 8 in the day that the branch replaces.
async fn overtaken() -> House {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(8, 21)]).await;
    house
}

async fn assert_day_replaced(house: &House) {
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.classified(request).await, "rebase");
    assert_eq!(house.rows("main").await, [order(1, 20), order(2, 20), done(3, 21)]);
    let history = house.history(request).await;
    assert!(history.contains("\"vanished-rows\":1"), "the row that went is told: {history}");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o07_a_whole_partition_overwrite_is_run_again() {
    let house = overtaken().await;
    house.overwrite_days("work", &[21], &[done(3, 21)]).await;
    assert_day_replaced(&house).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o07_as_the_two_snapshots_of_pyiceberg() {
    let house = overtaken().await;
    house.delete_days("work", &[21]).await;
    house.append("work", &[done(3, 21)]).await;
    assert_day_replaced(&house).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o07_a_recorded_replacement_of_partitions() {
    let house = overtaken().await;
    let record = json!({"v": 1, "id": "day-21", "op": "replace-partitions"});
    house.recorded("work", &record, &[21], &[done(3, 21)]).await;
    assert_day_replaced(&house).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o07_a_recorded_overwrite_by_key_keeps_the_other_rows() {
    let house = overtaken().await;
    house.recorded("work", &keyed_record(3, 21, "done", "31.00"), &[21], &[done(3, 21)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.classified(request).await, "rebase");
    let rows = house.rows("main").await;
    assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [1, 2, 3, 8]);
    assert_eq!(rows[2], Order { cents: 3100, ..done(3, 21) }, "the query ran again");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o07_control_a_partition_that_main_did_not_touch() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(8, 22)]).await;
    house.overwrite_days("work", &[21], &[done(3, 21)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    assert_eq!(house.rows("main").await, [order(1, 20), order(2, 20), done(3, 21), order(8, 22)]);
    assert!(!house.history(request).await.contains("vanished"));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_equal_and_behind_are_no_work() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("equal").await;
    let equal = house.enqueue("equal").await;
    let commits = house.loaded().await.metadata_location.clone();
    house.drain().await;
    assert_eq!(house.state(equal).await, "already-published");
    assert_eq!(house.loaded().await.metadata_location, commits, "no commit was made");

    house.append("main", &[order(4, 22)]).await;
    let behind = house.enqueue("equal").await;
    house.drain().await;
    assert_eq!(house.state(behind).await, "already-published");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_merged_before_is_not_merged_again() {
    for main_moved in [false, true] {
        let house = House::orders(STRICT_POLICY).await;
        house.append_on_new("work", &[order(4, 22)]).await;
        if main_moved {
            house.append("main", &[order(9, 25)]).await;
        }
        let once = house.enqueue("work").await;
        house.drain().await;
        assert_eq!(house.state(once).await, "landed");
        let head = house.head("main").await;
        let again = house.enqueue("work").await;
        assert_ne!(once, again);
        house.drain().await;
        assert_eq!(house.state(again).await, "already-published", "main moved: {main_moved}");
        assert_eq!(house.head("main").await, head);
        assert_eq!(house.keys("main").await.iter().filter(|key| **key == 4).count(), 1);
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_a_tag_is_no_branch() {
    let house = House::orders(STRICT_POLICY).await;
    let head = house.head("main").await.unwrap();
    house.tag("release", head).await;
    let error = house.ask("release").await.unwrap_err();
    assert_eq!(error.code, ReasonCode::NotABranch);
    assert_eq!(house.refs().await, ["main", "release"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_a_tag_that_took_the_name_of_a_branch_is_not_merged() {
    let house = House::orders(ORDERS_POLICY).await;
    let written = house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;
    house.commit(vec![mergeberg_kernel::commit::Update::RemoveRef(branch("ingest/a"))]).await;
    house.tag("ingest/a", written).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(not-a-branch)");
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    assert_eq!(house.refs().await, ["ingest/a", "main"], "somebody's tag is not dropped");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_a_branch_from_a_tag_on_an_older_snapshot() {
    let house = House::orders(STRICT_POLICY).await;
    let old = house.head("main").await.unwrap();
    house.tag("old", old).await;
    house.append("main", &[order(4, 22)]).await;
    house.append("main", &[order(5, 23)]).await;
    house.writer.create_branch(&house.table, &branch("work"), old).await.unwrap();
    house.append("work", &[order(10, 25)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 10]);
    assert_eq!(house.head("old").await, Some(old));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o10_disjoint_overwrites_land_without_a_second_run() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("one").await;
    house.branch("two").await;
    house.overwrite_days("one", &[20], &[done(1, 20)]).await;
    house.overwrite_days("two", &[21], &[done(3, 21)]).await;
    let one = house.enqueue("one").await;
    let two = house.enqueue("two").await;
    house.drain().await;
    for request in [one, two] {
        assert_eq!(house.state(request).await, "landed");
        assert_eq!(house.request(request).await.attempts, 1);
    }
    assert_eq!(house.rows("main").await, [done(1, 20), done(3, 21)]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o10_compaction_of_main_never_blocks_an_append() {
    // The label is a hint only: (b) says replace, (c) says overwrite, and both are the same.
    for label in ["replace", "overwrite"] {
        let house = House::orders(STRICT_POLICY).await;
        house.branch("work").await;
        house.branch("seen").await;
        house.append("seen", &[order(99, 29)]).await;
        house.enqueue("seen").await;
        house.drain().await;

        let compacted = house.compact("main", 20, label).await;
        house.append("work", &[order(4, 20)]).await;
        let request = house.enqueue("work").await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed", "{label}: {}", house.detail(request).await);
        assert_eq!(house.classified(request).await, "cherry-pick");
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 99]);
        assert_eq!(house.foreign().await, [("maintenance", compacted)], "{label}");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o10_an_update_that_calls_itself_a_compaction_is_a_change_of_data() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.branch("seen").await;
    house.append("seen", &[order(99, 29)]).await;
    house.enqueue("seen").await;
    house.drain().await;
    // Same counts, other rows (rule C5).
    let remove = Removal::Files(Box::new(|file| {
        file.fact.partition.fields.iter().any(|f| f.value.as_deref() == Some("2026-08-20"))
    }));
    let rows = [done(1, 20), order(2, 20)];
    let updated = house.write("main", "replace", &rows, remove, BTreeMap::new()).await;
    house.append("work", &[order(4, 20)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(overlapping-append)");
    assert_eq!(house.foreign().await, [("bypass", updated)]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 99]);
    house.assert_sound().await;
}
