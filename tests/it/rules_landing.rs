//! Rules N1, N3, N6 and L1 to L9: numbers, staging, landing.

use std::sync::Arc;

use mergeberg::ledger::{EventKind, LandingState};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::SnapshotId;
use serde_json::json;

use crate::support::{House, Moment, ORDERS_POLICY, branch, drain, order};

const KEEP_POLICY: &str = "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\n";

/// Eight shards behind a moved main, so that every one of them is written again.
async fn shards(house: &House, count: u32) {
    for shard in 0..count {
        house.branch(&format!("ingest/{shard}")).await;
    }
    house.append("main", &[order(99, 30)]).await;
    for shard in 0..count {
        let name = format!("ingest/{shard}");
        house.append(&name, &[order(i64::from(10 + shard), 22)]).await;
        house.enqueue(&name).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_n1_n3_sequence_numbers_and_times_only_grow() {
    let house = House::empty(ORDERS_POLICY).await;
    house.append("ingest/first", &[order(1, 20)]).await;
    house.append("ingest/second", &[order(2, 20)]).await;
    house.enqueue("ingest/first").await;
    house.enqueue("ingest/second").await;
    house.drain().await;
    shards(&house, 4).await;
    let table = house.loaded().await;
    let (last, last_ms) = (table.facts.last_sequence_number, table.facts.last_updated_ms);
    house.drain().await;
    let table = house.loaded().await;
    let facts = &table.facts;
    let line: Vec<SnapshotId> = facts.snapshots.chain(facts.head(&branch("main")).unwrap()).ids;
    assert_eq!(line.len(), 2 + 1 + 4);
    for pair in line.windows(2) {
        let (child, parent) = (facts.snapshots.get(pair[0]).unwrap(), facts.snapshots.get(pair[1]).unwrap());
        assert!(child.sequence_number > parent.sequence_number);
        assert!(child.timestamp_ms > parent.timestamp_ms);
    }
    let candidates = line.iter().take(4).filter_map(|id| facts.snapshots.get(*id));
    assert!(candidates.clone().all(|s| s.sequence_number > last && s.timestamp_ms > last_ms));
    let numbers: std::collections::BTreeSet<i64> =
        facts.snapshots.iter().map(|s| s.sequence_number).collect();
    assert_eq!(numbers.len(), facts.snapshots.len(), "no number is used twice, on any branch");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_n6_the_log_holds_landed_heads_only() {
    let house = House::orders(ORDERS_POLICY).await;
    shards(&house, 4).await;
    house.append_on_new("ingest/bad", &[order(3, 21)]).await;
    house.enqueue("ingest/bad").await;
    let before: Vec<SnapshotId> =
        house.loaded().await.facts.snapshot_log.iter().map(|entry| entry.snapshot_id).collect();
    house.drain().await;
    let table = house.loaded().await;
    let log: Vec<SnapshotId> = table.facts.snapshot_log.iter().map(|entry| entry.snapshot_id).collect();
    let head = table.facts.head(&branch("main")).unwrap();
    assert_eq!(log, [before.as_slice(), &[head]].concat(), "neither cars between nor dropped candidates");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l1_one_staging_commit_a_train_and_none_on_a_moved_target() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    shards(&house, 6).await;
    let (worker, script) = house.scripted().await;
    let stranger = Arc::clone(&house);
    script.at(Moment::Before(1), move || async move {
        stranger.append("main", &[order(98, 29)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(script.commits(), 3, "one that was refused, one that stages, one that lands");
    assert_eq!(house.keys("main").await, [1, 2, 3, 10, 11, 12, 13, 14, 15, 98, 99]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l1_a_source_that_is_reset_before_staging_is_withdrawn_alone() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let start = house.head("main").await.unwrap();
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.append_on_new("ingest/b", &[order(5, 22)]).await;
    let a = house.enqueue("ingest/a").await;
    let b = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::Before(1), move || async move {
        owner.force_branch("ingest/b", start).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(a).await, "landed");
    assert_eq!(house.state(b).await, "withdrawn(source-reset)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l2_no_intent_is_written_before_staging_is_known_to_have_applied() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    script.lose_answer(1);
    drain(&worker).await;
    assert_eq!(house.state(request).await, "landed");
    let landings = house.ledger.receipts(0, i64::MAX).await.unwrap();
    assert_eq!(landings.len(), 1);
    let history = house.history(request).await;
    let landing = history.lines().filter(|line| line.starts_with("landing ")).count();
    assert_eq!(landing, 1, "one intent, of the second train: {history}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_lost_answer_to_a_landing_is_read_from_the_catalog() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    script.lose_answer(2);
    drain(&worker).await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.request(request).await.attempts, 1, "it had been applied, so it is not sent again");
    let receipts = house.ledger.receipts(0, i64::MAX).await.unwrap();
    assert!(matches!(receipts[0].state, LandingState::Landed { .. }));
    assert!(house.history(request).await.contains("unknown "), "and the log says that nobody knew");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_landing_that_was_not_applied_is_proved_by_its_fence() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    // The pointer moves under it, and the answer to the failed update is lost.
    let stranger = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        stranger.append("main", &[order(9, 25)]).await;
    });
    script.lose_answer(2);
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.request(request).await.attempts, 2);
    assert_eq!(house.ledger.receipts(0, i64::MAX).await.unwrap().len(), 1);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_landed_then_rolled_back_is_never_retried_by_itself() {
    let house = Arc::new(House::orders(KEEP_POLICY).await);
    let start = house.head("main").await.unwrap();
    house.append_on_new("work", &[order(4, 22)]).await;
    let request = house.enqueue("work").await;
    let (worker, script) = house.scripted().await;
    script.lose_answer(2);
    let operator = Arc::clone(&house);
    script.at(Moment::After(2), move || async move { operator.force_branch("main", start).await });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed", "the log of the table says so");
    assert_eq!(house.keys("main").await, [1, 2, 3], "and what the operator did stays");

    // The target was rewound: everybody waits for a word of the operator.
    house.append_on_new("next", &[order(5, 23)]).await;
    let next = house.enqueue("next").await;
    house.drain().await;
    assert_eq!(house.state(next).await, "held(target-rewound)");
    let uuid = house.loaded().await.facts.uuid.clone();
    let by = mergeberg_kernel::ids::Principal::new("rita");
    house
        .ledger
        .adopt_head(&house.table, &uuid, &branch("main"), start, &by, "bad load", house.now())
        .await
        .unwrap();
    house.drain().await;
    assert_eq!(house.state(next).await, "landed");

    // Rule C9: what was rolled back is not published again by itself.
    let again = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(again).await, "refused(rolled-back)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l6_a_source_that_grew_while_it_was_staged_is_kept() {
    for moment in [Moment::After(1), Moment::Before(2)] {
        let house = Arc::new(House::orders(ORDERS_POLICY).await);
        let pinned = house.append_on_new("ingest/a", &[order(4, 22)]).await;
        house.append_on_new("ingest/b", &[order(5, 23)]).await;
        let a = house.enqueue("ingest/a").await;
        let b = house.enqueue("ingest/b").await;
        let (worker, script) = house.scripted().await;
        let writer = Arc::clone(&house);
        script.at(moment, move || async move {
            writer.append("ingest/a", &[order(6, 24)]).await;
        });
        drain(&worker).await;
        script.assert_played();
        for request in [a, b] {
            assert_eq!(house.state(request).await, "landed", "{moment:?}");
            assert_eq!(house.request(request).await.attempts, 1, "same candidates, same evidence");
        }
        assert_eq!(house.request(a).await.landed_snapshot, Some(pinned));
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5], "{moment:?}");
        assert_eq!(house.refs().await, ["ingest/a", "main"], "{moment:?}: only that one is kept");
        assert_eq!(house.keys("ingest/a").await, [1, 2, 3, 4, 6]);
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l6_a_source_that_was_reset_while_it_was_staged_is_withdrawn_alone() {
    for moment in [Moment::After(1), Moment::Before(2)] {
        let house = Arc::new(House::orders(ORDERS_POLICY).await);
        let start = house.head("main").await.unwrap();
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        house.append_on_new("ingest/b", &[order(5, 23)]).await;
        let a = house.enqueue("ingest/a").await;
        let b = house.enqueue("ingest/b").await;
        let (worker, script) = house.scripted().await;
        let owner = Arc::clone(&house);
        script.at(moment, move || async move { owner.force_branch("ingest/a", start).await });
        drain(&worker).await;
        script.assert_played();
        assert_eq!(house.state(a).await, "withdrawn(source-reset)", "{moment:?}");
        assert_eq!(house.state(b).await, "landed", "{moment:?}");
        assert_eq!(house.keys("main").await, [1, 2, 3, 5], "{moment:?}");
        assert_eq!(house.head("ingest/a").await, Some(start), "the owner's branch stays where it was set");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_a_format_that_would_lose_something_is_never_landed_on() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    house.edit_metadata(|metadata| metadata["format-version"] = json!(4)).await;
    house.drain().await;
    // Nobody's request is at fault: it waits for a release that knows the format.
    assert_eq!(house.state(request).await, "held(format-unsupported)");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_a_table_that_is_upgraded_while_a_train_is_checked_is_written_in_the_new_format() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.append("main", &[order(5, 23)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        owner
            .edit_metadata(|metadata| {
                metadata["format-version"] = json!(3);
                metadata["next-row-id"] = json!(0);
            })
            .await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.request(request).await.attempts, 2);
    let history = house.history(request).await;
    assert!(history.contains("upgraded from format version 2 to 3"), "{history}");
    let table = house.loaded().await;
    assert_eq!((table.facts.format_version, house.keys("main").await), (3, vec![1, 2, 3, 4, 5]));
    // Rule N2: the first snapshot after the upgrade numbers what it carries over as well.
    assert_eq!(table.facts.next_row_id, Some(5));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_a_property_that_changes_while_a_train_is_checked_does_not_stop_it() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move { owner.set_property("owner", "rita").await });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.loaded().await.facts.properties["owner"], "rita", "and it is not lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_a_structure_that_changes_while_a_train_is_checked_is_looked_at_again() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        let note = json!({"id": 5, "name": "note", "required": false, "type": "string"});
        owner.change_schema(0, |fields| fields.push(note)).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.request(request).await.attempts, 2, "checked again under the schema that main has now");
    let evidence = house.evidence(request, "one-order-once").await;
    assert!(evidence.last().unwrap().evidence.measured.contains(&("schema".to_owned(), "1".to_owned())));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l9_manifests_are_merged_at_the_tables_own_thresholds() {
    let house = House::orders(ORDERS_POLICY).await;
    house.set_property("commit.manifest.min-count-to-merge", "4").await;
    shards(&house, 20).await;
    house.drain().await;
    let manifests = house.manifests("main").await;
    assert!(manifests <= 4, "{manifests} manifests after 20 cars");
    assert_eq!(house.keys("main").await.len(), 24);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_that_somebody_removed_forbids_the_landing() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let other = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        let table = other.loaded().await;
        let fences = table.facts.refs.keys().filter(|name| name.as_str().starts_with("mergeberg/tmp/"));
        let updates = fences.map(|name| Update::RemoveRef(name.clone())).collect();
        other.commit(updates).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.request(request).await.attempts, 2, "planned again");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    let events = house.ledger.events_since(0, 1000).await.unwrap();
    assert_eq!(events.iter().filter(|event| event.kind == EventKind::Landed).count(), 1);
    house.assert_sound().await;
}
