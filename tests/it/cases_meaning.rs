//! Cases O13 to O17: what the data means.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Float64Array};
use mergeberg::table::create::TableDefinition;

use crate::support::{House, ORDERS_POLICY, Order, columns, decimal, long, order, text};

fn keyed(columns: &str, more: &str) -> String {
    format!(
        "table = \"shop.orders\"\n\
         [[check]]\nid = \"key\"\ntype = \"duplicate-key\"\ncolumns = [{columns}]\n{more}\n\
         [[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow-with-duplicate-check\"\n\
         checks = [\"key\"]\n"
    )
}

/// Two branches from one head, each appending key 7 on its own day.
async fn two_upserts(policy: &str, one: u32, two: u32) -> (House, [String; 2]) {
    let house = House::orders(policy).await;
    house.branch("b1").await;
    house.branch("b2").await;
    house.append("b1", &[order(7, one)]).await;
    house.append("b2", &[order(7, two)]).await;
    let first = house.enqueue("b1").await;
    let second = house.enqueue("b2").await;
    house.drain().await;
    let states = [house.state(first).await, house.state(second).await];
    if states[1].starts_with("refused") {
        let detail = house.detail(second).await;
        assert!(detail.contains("order_id=7"), "the key is named: {detail}");
    }
    house.assert_sound().await;
    (house, states)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o13_two_upserts_of_one_new_key() {
    let policy = keyed("\"order_id\", \"order_date\"", "");
    let (house, states) = two_upserts(&policy, 22, 22).await;
    assert_eq!(states, ["landed", "refused(duplicate-key)"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o13_in_different_partitions_the_rule_decides() {
    let in_table = keyed("\"order_id\"", "scope = \"table\"");
    let (house, states) = two_upserts(&in_table, 22, 23).await;
    assert_eq!(states, ["landed", "refused(duplicate-key)"], "unique in the table");
    assert_eq!(house.keys("main").await, [1, 2, 3, 7]);

    let per_partition = keyed("\"order_id\", \"order_date\"", "");
    let (house, states) = two_upserts(&per_partition, 22, 23).await;
    assert_eq!(states, ["landed", "landed"], "unique in a day");
    assert_eq!(house.keys("main").await, [1, 2, 3, 7, 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o13_against_what_main_holds_already() {
    let in_table = keyed("\"order_id\"", "scope = \"table\"");
    let house = House::orders(&in_table).await;
    house.append_on_new("b", &[order(2, 25)]).await;
    let request = house.enqueue("b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    assert_eq!(house.keys("main").await, [1, 2, 3]);
}

async fn null_in_the_key(more: &str) -> (House, String, String) {
    let definition =
        TableDefinition::default().column("order_id", "long", true).column("region", "string", false);
    let house = House::with_table(definition, &keyed("\"order_id\", \"region\"", more)).await;
    let row = || columns(vec![("order_id", long(&[5])), ("region", text(&[None]))]);
    house.write_batch("main", row()).await;
    house.branch("b").await;
    house.write_batch("b", row()).await;
    let request = house.enqueue("b").await;
    house.drain().await;
    let state = house.state(request).await;
    let detail = house.detail(request).await;
    assert_eq!(house.texts("main").await, ["5|-"]);
    (house, state, detail)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o14_null_equals_null_by_default() {
    let (_, state, detail) = null_in_the_key("").await;
    assert_eq!(state, "refused(duplicate-key)");
    assert!(detail.contains("1 violation"), "with the count: {detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o14_null_in_a_key_is_a_violation_under_the_strict_rule() {
    let (_, state, detail) = null_in_the_key("nulls = \"violation\"").await;
    assert_eq!(state, "refused(null-in-key)");
    assert!(detail.contains("1 violation"), "with the count: {detail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o14_a_key_whose_null_is_another_row_is_none() {
    let definition =
        TableDefinition::default().column("order_id", "long", true).column("region", "string", false);
    let house = House::with_table(definition, &keyed("\"order_id\", \"region\"", "")).await;
    let row = |region| columns(vec![("order_id", long(&[5])), ("region", text(&[region]))]);
    house.write_batch("main", row(None)).await;
    house.branch("b").await;
    house.write_batch("b", row(Some("north"))).await;
    let request = house.enqueue("b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.texts("main").await, ["5|-", "5|north"]);
}

fn reconciled(bound: &str) -> String {
    format!(
        "table = \"shop.orders\"\n\
         [[check]]\nid = \"totals\"\ntype = \"reconciliation\"\nmode = \"per-request\"\n\
         upstream = {{ file = \"totals.csv\" }}\nby = [\"day\"]\nsums = {{ measure = \"total\" }}\n{bound}\n\
         [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"totals\"]\n"
    )
}

async fn measured(measure_type: &str, bound: &str, total: &str) -> House {
    let definition =
        TableDefinition::default().column("day", "long", true).column("measure", measure_type, false);
    let house = House::with_table(definition, &reconciled(bound)).await;
    let file = house.dir.path().join("policies/totals.csv");
    std::fs::write(file, format!("day,total\n1,{total}\n")).unwrap();
    house
}

fn doubles(values: &[f64]) -> ArrayRef {
    Arc::new(Float64Array::from(values.to_vec()))
}

/// A branch with one file for each list of values.
async fn publish(house: &House, files: Vec<ArrayRef>) -> String {
    for measures in files {
        let day = long(&vec![1; measures.len()]);
        house.write_batch("work", columns(vec![("day", day), ("measure", measures)])).await;
    }
    let request = house.enqueue("work").await;
    house.drain().await;
    house.state(request).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o15_doubles_that_cancel_reconcile_in_any_order() {
    let relative = "relative = 1e-12";
    for files in [
        vec![doubles(&[1e8, -1e8]), doubles(&[0.1, -0.1])],
        vec![doubles(&[1e8, 0.1]), doubles(&[-0.1, -1e8])],
        vec![doubles(&[0.1, 1e8, -0.1, -1e8])],
    ] {
        let house = measured("double", relative, "0").await;
        assert_eq!(publish(&house, files).await, "landed");
    }
    // One value is off by 0.02, and the bound is 0.01.
    let house = measured("double", "absolute = 0.01", "0").await;
    let files = vec![doubles(&[1e8, -1e8]), doubles(&[0.12, -0.1])];
    assert_eq!(publish(&house, files).await, "refused(reconciliation)");
    assert_eq!(house.head("main").await, None);
    let house = measured("double", "absolute = 0.03", "0").await;
    assert_eq!(publish(&house, vec![doubles(&[1e8, -1e8, 0.12, -0.1])]).await, "landed");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o15_a_sum_past_its_type_blocks_and_never_passes() {
    // Each value has 38 digits; two of them have 39.
    let most = 10_i128.pow(38) - 1;
    let house = measured("decimal(38, 2)", "", "0").await;
    let state = publish(&house, vec![decimal(&[most, most], 38, 2)]).await;
    assert_eq!(state, "held(check-could-not-run)");
    assert_eq!(house.head("main").await, None);

    let total = format!("{}.99", "9".repeat(36));
    let house = measured("decimal(38, 2)", "", &total).await;
    assert_eq!(publish(&house, vec![decimal(&[most], 38, 2)]).await, "landed", "one of them fits");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o15_null_totals_are_equal_to_nothing() {
    let house = measured("decimal(10, 2)", "", "").await;
    let nothing: ArrayRef = Arc::new(
        datafusion::arrow::array::Decimal128Array::from(vec![None::<i128>])
            .with_precision_and_scale(10, 2)
            .unwrap(),
    );
    let state = publish(&house, vec![nothing]).await;
    assert_ne!(state, "landed");
    assert_eq!(house.head("main").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o17_half_of_the_write_went_to_main() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.branch("work").await;
    house.delete_days("work", &[21]).await;
    let stray = Order { status: "done".to_owned(), cents: 3100, ..order(3, 21) };
    let bypass = house.append("main", std::slice::from_ref(&stray)).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.foreign().await, [("bypass", bypass)], "the commit that no request made is told");
    assert_eq!(house.state(request).await, "refused(conflict)");
    let detail = house.detail(request).await;
    assert!(detail.contains(&bypass.to_string()), "with the commit as witness: {detail}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 3, 100], "nothing was removed behind the stranger's back");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o17_a_delete_without_its_append_is_found_by_a_row_count() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"day-not-empty\"\ntype = \"row-count\"\nmin = 1\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"day-not-empty\"]\n";
    let house = House::orders(policy).await;
    house.branch("work").await;
    house.delete_days("work", &[21]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(row-count)");
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    // With its other half it is whole.
    house.append("work", &[order(3, 21)]).await;
    let whole = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(whole).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_two_first_commits_both_stay() {
    let house = House::empty(ORDERS_POLICY).await;
    house.append("ingest/b1", &[order(1, 20)]).await;
    house.append("ingest/b2", &[order(2, 20)]).await;
    let one = house.enqueue("ingest/b1").await;
    let two = house.enqueue("ingest/b2").await;
    house.drain().await;
    assert_eq!(house.state(one).await, "landed");
    assert_eq!(house.state(two).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2]);
    house.assert_sound().await;

    // The same with a landing between them: an empty base is proved, not assumed.
    let house = House::empty(ORDERS_POLICY).await;
    house.append("ingest/b1", &[order(1, 20)]).await;
    house.append("ingest/b2", &[order(2, 20)]).await;
    house.enqueue("ingest/b1").await;
    house.drain().await;
    let two = house.enqueue("ingest/b2").await;
    house.drain().await;
    assert_eq!(house.state(two).await, "landed", "{}", house.detail(two).await);
    assert_eq!(house.keys("main").await, [1, 2]);
    house.assert_sound().await;
}
