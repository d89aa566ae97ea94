//! Rules C2 to C11 and D5 to D7 on real tables.

use std::collections::BTreeMap;

use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::ids::TableName;
use serde_json::json;

use crate::support::{House, ORDERS_POLICY, Order, branch, order};

const STRICT_POLICY: &str = "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\n";

fn done(id: i64, day: u32) -> Order {
    Order { status: "done".to_owned(), ..order(id, day) }
}

async fn merge(house: &House, name: &str) -> (String, String) {
    let request = house.enqueue(name).await;
    house.drain().await;
    house.assert_sound().await;
    (house.state(request).await, house.classified(request).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c1_structure_and_format_are_recorded_at_enqueue() {
    let house = House::orders(STRICT_POLICY).await;
    house.append_on_new("work", &[order(4, 22)]).await;
    let request = house.ask("work").await.unwrap();
    let row = house.request(request).await;
    assert_eq!(row.structure, house.loaded().await.facts.structure());
    assert_eq!(row.format_version, 2);
    assert_eq!(row.table_uuid, house.loaded().await.facts.uuid);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c2_adding_under_another_label_is_no_blind_append() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(9, 25)]).await;
    house.write("work", "overwrite", &[order(4, 22)], Removal::Nothing, BTreeMap::new()).await;
    assert_eq!(merge(&house, "work").await.0, "refused(conflict)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c3_an_operation_that_found_nothing_still_meets_what_it_would_have_hit() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(9, 22), order(10, 23)]).await;
    let record = json!({
        "v": 1, "id": "empty-22", "op": "overwrite-where", "where": "order_date = DATE '2026-08-22'",
        "query": "SELECT order_id, order_date, status, amount FROM target WHERE false",
    });
    house.recorded("work", &record, &[], &[]).await;
    let (state, classified) = merge(&house, "work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"));
    assert_eq!(house.keys("main").await, [1, 2, 3, 10], "the row that came meanwhile is deleted as recorded");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c4_snapshot_isolation_lets_a_blind_append_pass() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"key\"\ntype = \"duplicate-key\"\ncolumns = [\"order_id\"]\nscope = \"table\"\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nisolation = \"snapshot\"\nchecks = [\"key\"]\n";
    let house = House::orders(policy).await;
    house.branch("work").await;
    house.append("main", &[order(8, 20)]).await;
    // Copy-on-write of one file, without a record: only key 1 changed.
    house.overwrite_days("work", &[20], &[done(1, 20), order(2, 20)]).await;
    let (state, classified) = merge(&house, "work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "cherry-pick"));
    assert_eq!(house.rows("main").await, [done(1, 20), order(2, 20), order(3, 21), order(8, 20)]);

    // Its table-wide key check is what makes that safe.
    house.branch("twice").await;
    house.append("main", &[order(11, 20)]).await;
    house.overwrite_days("twice", &[21], &[order(3, 21), order(11, 21)]).await;
    assert_eq!(merge(&house, "twice").await.0, "refused(duplicate-key)");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c5_a_trusted_rewriter_is_maintenance_without_a_content_proof() {
    let policy = "table = \"shop.orders\"\ntrusted-rewriters = [\"compactor\"]\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\n";
    for (engine, kind) in [("compactor", "maintenance"), ("somebody", "bypass")] {
        let house = House::orders(policy).await;
        house.append_on_new("seen", &[order(100, 30)]).await;
        house.enqueue("seen").await;
        house.drain().await;
        let summary = BTreeMap::from([("engine-name".to_owned(), engine.to_owned())]);
        // Other rows, equal counts: nothing but trust says that this is a rewrite.
        let remove = Removal::Files(Box::new(|file| file.fact.partition.to_string().contains("2026-08-20")));
        let rows = [done(1, 20), order(2, 20)];
        let rewritten = house.write("main", "replace", &rows, remove, summary).await;
        house.append_on_new("next", &[order(4, 22)]).await;
        assert_eq!(merge(&house, "next").await.0, "landed");
        assert_eq!(house.foreign().await, [(kind, rewritten)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c5_a_compaction_goes_through_the_queue_and_a_stale_one_does_not() {
    let house = House::orders(STRICT_POLICY).await;
    house.append("main", &[order(4, 20)]).await;
    for name in ["good", "stale"] {
        house.branch(name).await;
        house.compact(name, 20, "replace").await;
    }
    house.append("main", &[order(5, 20)]).await;
    assert_eq!(merge(&house, "good").await.0, "landed", "its inputs are live");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    assert_eq!(merge(&house, "stale").await.0, "refused(stale-compaction)", "its inputs are gone");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c7_a_partial_replacement_is_not_taken_for_a_whole_one() {
    let house = House::orders(STRICT_POLICY).await;
    house.append("main", &[order(4, 21)]).await;
    house.branch("work").await;
    house.append("main", &[order(8, 21)]).await;
    // One of two files of the day: by content this says nothing of the others.
    let first = house.rows("work").await.iter().filter(|row| row.day == 21).count();
    assert_eq!(first, 2);
    let seen = std::sync::atomic::AtomicBool::new(false);
    let remove = Removal::Files(Box::new(move |file| {
        file.fact.partition.to_string().contains("2026-08-21")
            && !seen.swap(true, std::sync::atomic::Ordering::SeqCst)
    }));
    house.write("work", "overwrite", &[done(3, 21)], remove, BTreeMap::new()).await;
    assert_eq!(merge(&house, "work").await.0, "refused(conflict)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_published_by_another_hand_is_found_by_content() {
    let house = House::orders(STRICT_POLICY).await;
    house.append_on_new("work", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    let head = house.pick("main", house.head("work").await.unwrap(), false).await;
    assert_eq!(merge(&house, "work").await.0, "already-published");
    assert_eq!(house.head("main").await, Some(head));
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_a_published_part_that_is_no_prefix_is_refused() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("work", &[order(4, 22)]).await;
    house.append("work", &[order(5, 23)]).await;
    // Somebody cherry-picked only the second snapshot.
    house.pick("main", house.head("work").await.unwrap(), true).await;
    assert_eq!(merge(&house, "work").await.0, "refused(partially-published)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_a_long_lived_branch_publishes_its_rest_only() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("stream").await;
    house.append("main", &[order(90, 25)]).await;
    for (key, day) in [(4, 22), (5, 22), (6, 22)] {
        house.append("stream", &[order(key, day)]).await;
        assert_eq!(merge(&house, "stream").await.0, "landed", "key {key}");
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6, 90]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c11_a_renamed_table_is_held_and_goes_on_under_its_name() {
    let house = House::orders(STRICT_POLICY).await;
    house.append_on_new("work", &[order(4, 22)]).await;
    let request = house.enqueue("work").await;
    let away: TableName = "shop.away".parse().unwrap();
    house.catalog.rename_table(&house.table, &away).await.unwrap();
    house.drain().await;
    assert_eq!(house.state(request).await, "held(table-renamed)");
    assert!(house.detail(request).await.contains("shop.away"), "and says where it is");
    house.catalog.rename_table(&away, &house.table).await.unwrap();
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_d5_a_partition_with_files_of_another_spec_is_not_replaced() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.overwrite_days("work", &[21], &[done(3, 21)]).await;
    house.append_on_new("seen", &[order(100, 30)]).await;
    house.enqueue("seen").await;
    house.drain().await;
    // By status now: its files may hold rows of any day.
    house.change_spec(Some((3, "identity"))).await;
    house.append("main", &[order(8, 21)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(overlapping-specs)", "{}", house.detail(request).await);
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 100]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_d5_days_that_main_did_not_touch_lose_nothing() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("work").await;
    house.append("main", &[order(8, 21), order(7, 22)]).await;
    house.overwrite_days("work", &[20, 21], &[done(1, 20), done(3, 21)]).await;
    let (state, classified) = merge(&house, "work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"));
    assert_eq!(house.rows("main").await, [done(1, 20), done(3, 21), order(7, 22)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_d6_a_path_under_two_requests_is_live_once() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let head = house.head("ingest/a").await.unwrap();
    house.writer.create_branch(&house.table, &branch("ingest/b"), head).await.unwrap();
    house.append("ingest/b", &[order(5, 23)]).await;
    house.append("main", &[order(9, 25)]).await;
    let a = house.enqueue("ingest/a").await;
    let b = house.enqueue("ingest/b").await;
    house.drain().await;
    assert_eq!(house.state(a).await, "landed");
    assert_eq!(house.state(b).await, "landed", "only its rest");
    // `rows` refuses a path that is live twice.
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 9]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_d6_a_path_that_main_removed_is_never_added_again() {
    let house = House::orders(STRICT_POLICY).await;
    let staged = house.append_on_new("work", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    assert_eq!(merge(&house, "work").await.0, "landed");
    house.delete_days("main", &[22]).await;
    // Another branch at the very snapshot: its file was on main and is gone.
    house.writer.create_branch(&house.table, &branch("again"), staged).await.unwrap();
    let (state, _) = merge(&house, "again").await;
    assert_ne!(state, "landed", "{state}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 9], "deleted rows do not come back");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_d7_every_candidate_names_the_one_snapshot_that_it_publishes() {
    let house = House::orders(STRICT_POLICY).await;
    house.branch("two").await;
    let first = house.append("two", &[order(4, 22)]).await;
    let second = house.append("two", &[order(5, 23)]).await;
    house.append("main", &[order(9, 25)]).await;
    assert_eq!(merge(&house, "two").await.0, "landed");
    let table = house.loaded().await;
    let head = table.facts.head(&branch("main")).unwrap();
    let line = table.facts.snapshots.chain(head).ids;
    let sources: Vec<_> =
        line.iter().take(2).map(|id| table.facts.snapshots.get(*id).unwrap().source_snapshot_id()).collect();
    assert_eq!(sources, [Some(second), Some(first)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_required_column_without_default_blocks_what_was_written_before() {
    let house = House::orders(STRICT_POLICY).await;
    house.append_on_new("seen", &[order(100, 30)]).await;
    house.enqueue("seen").await;
    house.drain().await;
    house.append_on_new("work", &[order(4, 22)]).await;
    house
        .change_schema(0, |fields| {
            fields.push(json!({"id": 5, "name": "region", "required": true, "type": "string"}));
        })
        .await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "held(structure-changed)");
    assert!(house.detail(request).await.contains("region"));
}
