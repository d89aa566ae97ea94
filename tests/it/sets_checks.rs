//! Checks of a set: each table's own, those that read the others as they will be, and those that hold what they read.

use std::sync::Arc;

use crate::support::mall::{ITEMS, Mall, RELEASES};
use crate::support::{Moment, branch, drain, order};

/// The worker's commits of a set of two, in a history that nothing disturbs: two stage it, the third lands it.
const LANDING: usize = 3;

const ONCE: &str = r#"
[[check]]
id = "once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "release"
prefix = "release/"
overlap = "allow-with-duplicate-check"
checks = ["once"]
after-landing = "drop"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_table_refuses_the_set_with_its_witnesses_and_the_others_stay() {
    let mall = Mall::with(ONCE, ONCE, ONCE).await;
    mall.write(&mall.all(), "release/1", 50).await;
    // Key 2 is on main already.
    mall.items.append("release/1", &[order(2, 21)]).await;
    let before: Vec<Vec<i64>> = keys(&mall).await;
    let set = mall.orders.enqueue_set(&mall.all(), "release/1").await;

    mall.orders.drain().await;

    let states = mall.orders.states(&set).await;
    assert_eq!(states, ["refused(set-part-failed)", "refused(duplicate-key)", "refused(set-part-failed)"]);
    assert_eq!(keys(&mall).await, before);
    let evidence = mall.orders.evidence(set[1], "once").await;
    assert!(evidence[0].evidence.sample[0].contains("order_id=2"), "{evidence:?}");
    let told = mall.orders.detail(set[0]).await;
    assert!(told.contains(ITEMS) && told.contains("refused(duplicate-key)"), "{told}");
    for house in mall.all() {
        assert!(house.head("release/1").await.is_some(), "nothing is handed over");
    }
    mall.assert_sound().await;
}

async fn keys(mall: &Mall) -> Vec<Vec<i64>> {
    let mut keys = Vec::new();
    for house in mall.all() {
        keys.push(house.keys("main").await);
    }
    keys
}

/// Orders that name a customer who is not there, and orders whose key an item has: both are told by reading the other
/// table as it will be.
const TOGETHER: &str = r#"
[[check]]
id = "customer-known"
type = "referential"
columns = ["order_id"]
references = { table = "shop.customers", columns = ["order_id"] }

[[check]]
id = "no-item-of-that-key"
type = "sql"
query = "SELECT c.order_id FROM touched c JOIN items i ON c.order_id = i.order_id WHERE c.order_id > 40"
tables = { items = "shop.items" }

[[class]]
name = "release"
prefix = "release/"
overlap = "allow"
checks = ["customer-known", "no-item-of-that-key"]
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_check_reads_the_other_tables_of_the_set_as_they_will_be() {
    let mall = Mall::with(TOGETHER, RELEASES, RELEASES).await;
    mall.orders.append_on_new("release/1", &[order(50, 22)]).await;
    mall.customers.append_on_new("release/1", &[order(50, 22)]).await;
    // Alone the order has no customer.
    let alone = mall.orders.enqueue("release/1").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.state(alone).await, "refused(referential)");

    let set = mall.orders.enqueue_set(&[&mall.orders, &mall.customers], "release/1").await;
    mall.orders.drain().await;

    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    let evidence = mall.orders.evidence(set[0], "customer-known").await;
    let input = &evidence.last().unwrap().evidence.inputs[0];
    assert_eq!(input.table, mall.customers.table);
    assert_eq!(Some(input.snapshot), mall.orders.request(set[1]).await.landed_snapshot, "its candidate");
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_only_in_combination_is_refused_only_in_combination() {
    let mall = Mall::with(TOGETHER, RELEASES, RELEASES).await;
    mall.customers.append("main", &[order(50, 22)]).await;
    for house in [&mall.orders, &mall.items] {
        house.append_on_new("release/1", &[order(50, 22)]).await;
        // The same on its own, later.
        house.append_on_new("release/2", &[order(50, 22)]).await;
    }
    let set = mall.orders.enqueue_set(&[&mall.orders, &mall.items], "release/1").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["refused(sql-check)", "refused(set-part-failed)"]);
    let evidence = mall.orders.evidence(set[0], "no-item-of-that-key").await;
    assert!(evidence[0].evidence.sample[0].contains("order_id=50"), "{evidence:?}");
    assert_eq!(evidence[0].evidence.inputs[0].table, mall.items.table);
    assert!(!mall.orders.keys("main").await.contains(&50) && !mall.items.keys("main").await.contains(&50));

    let alone = mall.orders.enqueue("release/2").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.state(alone).await, "landed", "the item is not on main");
    mall.assert_sound().await;
}

/// `customer-known` holds the customers at the head that it read, until the orders have landed.
fn fenced() -> String {
    TOGETHER.replace("columns = [\"order_id\"] }", "columns = [\"order_id\"], fence = true }")
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e7_a_dimension_that_moves_after_it_was_read_is_read_again() {
    // A customer comes: nothing is wrong. The only customer of the order goes: it is refused.
    for (goes, state) in [(false, "landed"), (true, "refused(referential)")] {
        let mall = Arc::new(Mall::with(&fenced(), RELEASES, RELEASES).await);
        mall.customers.append("main", &[order(50, 22)]).await;
        mall.orders.append_on_new("release/1", &[order(50, 22)]).await;
        mall.orders.append("main", &[order(90, 25)]).await;
        let request = mall.orders.enqueue("release/1").await;
        let (worker, script) = mall.orders.scripted().await;
        let moves = Arc::clone(&mall);
        // The first commit stages it, the second lands it.
        script.at(Moment::Before(2), move || async move {
            if goes {
                moves.customers.delete_days("main", &[22]).await;
            } else {
                moves.customers.append("main", &[order(51, 22)]).await;
            }
        });
        drain(&worker).await;
        script.assert_played();
        assert_eq!(mall.orders.state(request).await, state);
        assert_eq!(mall.orders.keys("main").await.contains(&50), !goes);
        assert_eq!(mall.orders.request(request).await.attempts, 2);
        mall.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e7_a_set_holds_the_tables_that_its_checks_read_beside_it() {
    let mall = Arc::new(Mall::with(&fenced(), RELEASES, RELEASES).await);
    mall.customers.append("main", &[order(50, 22)]).await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    mall.items.commit(vec![mergeberg_kernel::commit::Update::RemoveRef(branch("release/1"))]).await;
    mall.items.append_on_new("release/1", &[order(70, 22)]).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let (worker, script) = mall.orders.scripted().await;
    let moves = Arc::clone(&mall);
    script.at(Moment::Before(LANDING), move || async move {
        moves.customers.delete_days("main", &[22]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(mall.orders.states(&set).await, ["refused(referential)", "refused(set-part-failed)"]);
    assert!(!mall.items.keys("main").await.contains(&70));
    mall.assert_sound().await;
}

/// What was read may be written on other branches: its head is what counts.
#[tokio::test(flavor = "multi_thread")]
async fn rule_e7_another_branch_of_the_dimension_is_no_obstacle() {
    let mall = Arc::new(Mall::with(&fenced(), RELEASES, RELEASES).await);
    mall.customers.append("main", &[order(50, 22)]).await;
    mall.orders.append_on_new("release/1", &[order(50, 22)]).await;
    let request = mall.orders.enqueue("release/1").await;
    let (worker, script) = mall.orders.scripted().await;
    let moves = Arc::clone(&mall);
    script.at(Moment::Before(2), move || async move {
        moves.customers.append("other", &[order(51, 22)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(mall.orders.state(request).await, "landed");
    assert_eq!(mall.orders.request(request).await.attempts, 1);
    mall.assert_sound().await;
}
