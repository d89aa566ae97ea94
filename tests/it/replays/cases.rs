//! Public reports (O01..O40), with records.

use std::collections::BTreeMap;

use serde_json::json;

use super::model::Value;
use super::operations::{base, by_day, rebased, row, sql};
use super::world::texts;

#[tokio::test(flavor = "multi_thread")]
async fn case_o08_a_row_level_merge_is_run_again_and_never_half_applied() {
    let world = by_day(&[("write.update.mode", "merge-on-read")], 2).await;
    let pay = "UPDATE shop.orders SET status = 'paid' WHERE id = 1";
    let after = [row(1, 20, "paid", 10), row(2, 20, "new", 20), row(3, 21, "new", 30)];
    let mut expected = after.to_vec();
    expected.push(row(9, 20, "late", 90));
    assert_eq!(rebased(&world, &sql(&world, pay), &after).await, texts(&expected, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o11_a_delete_finds_its_rows_in_the_compacted_file() {
    for mode in ["copy-on-write", "merge-on-read"] {
        let world = by_day(&[("write.delete.mode", mode)], 2).await;
        world.house.branch("work").await;
        let rest = [row(1, 20, "new", 10), row(3, 21, "new", 30)];
        world.recorded("work", &sql(&world, "DELETE FROM shop.orders WHERE id = 2"), &rest).await;
        world.write("main", "replace", &base(), true, BTreeMap::new()).await;
        let (state, classified, detail) = world.merge("work").await;
        assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
        assert_eq!(world.house.texts("main").await, texts(&rest, ""), "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o12_an_update_does_not_bring_back_what_was_deleted_meanwhile() {
    let world = by_day(&[], 2).await;
    world.house.branch("work").await;
    let after = [row(1, 20, "paid", 10), row(2, 20, "new", 20), row(3, 21, "new", 30)];
    world.recorded("work", &sql(&world, "UPDATE shop.orders SET status = 'paid' WHERE id = 1"), &after).await;
    let rest = [row(1, 20, "new", 10), row(3, 21, "new", 30)];
    world.write("main", "overwrite", &rest, true, BTreeMap::new()).await;
    let (state, classified, detail) = world.merge("work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
    assert_eq!(world.house.texts("main").await, texts(&[row(1, 20, "paid", 10), row(3, 21, "new", 30)], ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o13_two_inserts_of_one_new_key_come_to_one_row() {
    let world = by_day(&[], 2).await;
    let insert = "MERGE INTO shop.orders t USING raw.feed s ON t.id = s.id WHEN NOT MATCHED THEN INSERT *";
    let mut after = base();
    after.push(row(4, 22, "paid", 40));
    for name in ["one", "two"] {
        world.house.branch(name).await;
        let mut record = sql(&world, insert);
        record["id"] = json!(name);
        let summary = BTreeMap::from([("mergeberg.operation".to_owned(), record.to_string())]);
        // The engine's commit only adds: nothing in it tells that it depends on what was there.
        world.write(name, "append", &[row(4, 22, "paid", 40)], false, summary).await;
    }
    let requests = [world.house.enqueue("one").await, world.house.enqueue("two").await];
    world.house.drain().await;
    for request in requests {
        assert_eq!(world.house.state(request).await, "landed", "{}", world.house.detail(request).await);
    }
    assert_eq!(world.house.texts("main").await, texts(&after, ""), "the second finds the row of the first");
    world.house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o35_what_is_run_again_is_what_was_pinned() {
    let world = by_day(&[], 2).await;
    world.house.branch("work").await;
    let mut update = sql(&world, "UPDATE shop.orders SET status = 'paid' WHERE id = 1");
    let paid = [row(1, 20, "paid", 10), row(2, 20, "new", 20), row(3, 21, "new", 30)];
    world.recorded("work", &update, &paid).await;
    let request = world.house.enqueue("work").await;
    // Pushed after the request, with a record of its own; the same id would make it one operation with the first.
    update["id"] = json!("later");
    update["sql"] = json!("DELETE FROM shop.orders WHERE id = 2");
    world.recorded("work", &update, &[paid[0].clone(), paid[2].clone()]).await;
    world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
    world.house.drain().await;
    assert_eq!(world.house.state(request).await, "landed", "{}", world.house.detail(request).await);
    assert_eq!(world.house.classified(request).await, "rebase");
    let late = row(9, 20, "late", 90);
    let mut expected = [paid.to_vec(), vec![late.clone()]].concat();
    assert_eq!(world.house.texts("main").await, texts(&expected, ""), "the deletion was not approved");

    let (state, classified, detail) = world.merge("work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
    expected.retain(|row| row[0] != Value::Int(2));
    assert_eq!(world.house.texts("main").await, texts(&expected, ""), "asked for by itself, it is run");
}
