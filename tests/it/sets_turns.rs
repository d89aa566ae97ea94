//! A set's turn: what came first goes first, what came later waits, and no two sets wait for each other.

use mergeberg_kernel::policy::DEFAULT_AGE_BOUND_MS;
use sqlx::ConnectOptions as _;
use sqlx::sqlite::SqliteConnectOptions;

use crate::support::mall::{ITEMS, Mall};
use crate::support::order;

#[tokio::test(flavor = "multi_thread")]
async fn a_set_behind_single_requests_and_single_requests_behind_a_set() {
    let mall = Mall::open().await;
    let both = &mall.all()[..2];
    for house in both {
        house.append_on_new("ingest/first", &[order(60, 23)]).await;
        // Whole days, the one of the set among them: it overlaps the set and waits for it.
        house.branch("ingest/last").await;
        house.overwrite_days("ingest/last", &[22], &[order(62, 22)]).await;
        house.append_on_new("ingest/aside", &[order(63, 27)]).await;
    }
    mall.write(both, "release/1", 50).await;
    let first = mall.orders.enqueue("ingest/first").await;
    let set = mall.orders.enqueue_set(both, "release/1").await;
    let last = [mall.orders.enqueue("ingest/last").await, mall.items.enqueue("ingest/last").await];
    let aside = [mall.orders.enqueue("ingest/aside").await, mall.items.enqueue("ingest/aside").await];
    mall.orders.drain().await;

    let mut landed = Vec::new();
    for receipt in mall.orders.ledger.receipts(0, i64::MAX).await.unwrap() {
        landed.extend(receipt.intent.cars.iter().map(|car| car.request));
    }
    assert_eq!(landed.len(), 7, "{landed:?}");
    let place = |id| landed.iter().position(|other| *other == id).unwrap();
    for part in &set {
        assert!(place(first) < place(*part), "{landed:?}");
        assert!(last.iter().all(|id| place(*part) < place(*id)), "{landed:?}");
    }
    // With the first, which left before the set, rode who does the set no harm; where nobody left before it, nobody did.
    assert!(place(aside[0]) < place(set[0]) && place(set[1]) < place(aside[1]), "{landed:?}");
    mall.assert_sound().await;
}

/// After every look there is somebody else; the set goes as soon as those have left who came before it.
#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_never_ends_does_not_keep_a_set_waiting() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    for n in 0..3 {
        mall.orders.append_on_new(&format!("ingest/{n}"), &[order(60 + n, 23 + n as u32)]).await;
    }
    mall.orders.enqueue("ingest/0").await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let epoch = mall.orders.ledger.lead("test", 600_000, mall.orders.now()).await.unwrap().unwrap();
    for n in 1..3 {
        mall.orders.enqueue(&format!("ingest/{n}")).await;
        mall.orders.worker.tick(epoch).await.unwrap();
    }
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_sets_with_crossed_tables_land_one_after_the_other() {
    let mall = Mall::open().await;
    mall.write(&mall.all(), "release/1", 50).await;
    for house in mall.all() {
        house.append_on_new("release/2", &[order(51, 22)]).await;
        house.append_on_new("release/3", &[order(52, 22)]).await;
    }
    let (orders, items, customers) = (&mall.orders, &mall.items, &mall.customers);
    let mut sets = Vec::new();
    for (houses, name) in [
        ([orders, items], "release/1"),
        ([items, orders], "release/2"),
        ([customers, items], "release/1"),
        ([orders, customers], "release/3"),
    ] {
        // A part of another set is taken on its own branch.
        let name = if houses[0].table == customers.table { "release/2" } else { name };
        sets.push(orders.ask_set(&houses, name, Some(&format!("{}-{name}", houses[0].table))).await.unwrap());
    }
    orders.drain().await;
    assert_eq!(orders.ledger.open_sets().await.unwrap(), []);
    assert!(items.keys("main").await.contains(&51) && orders.keys("main").await.contains(&52));
    mall.assert_sound().await;
}

/// A part that cannot go holds its set, and nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_is_held_lets_the_others_pass_and_goes_when_it_can() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    // Another queue's claim on one of the tables.
    mall.items.set_property("mergeberg.queue", "another").await;
    mall.orders.append_on_new("ingest/a", &[order(61, 24)]).await;
    let single = mall.orders.enqueue("ingest/a").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["held(set-part-held)", "held(claimed-elsewhere)"]);
    assert_eq!(mall.orders.state(single).await, "landed");
    let told = mall.orders.detail(set[0]).await;
    assert!(told.contains(ITEMS), "{told}");

    let queue = mall.orders.ledger.queue_id().to_string();
    mall.items.set_property("mergeberg.queue", &queue).await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wide_or_aged_set_takes_its_turn_as_one() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    mall.orders.append_on_new("ingest/a", &[order(61, 22)]).await;
    let young = mall.orders.enqueue("ingest/a").await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    mall.orders.advance(2 * DEFAULT_AGE_BOUND_MS);
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    assert_eq!(mall.orders.state(young).await, "landed");
    mall.assert_sound().await;
}

/// Case O36: a part that cannot be read needs a person. Its set waits, and nobody else.
#[tokio::test(flavor = "multi_thread")]
async fn case_o36_a_part_that_cannot_be_read_holds_its_set_alone() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let options = SqliteConnectOptions::new().filename(mall.orders.dir.path().join("ledger.db"));
    let mut file = options.connect().await.unwrap();
    let damaged = sqlx::query("UPDATE merge_request SET state = 'finished' WHERE id = $1").bind(set[1].0);
    assert_eq!(damaged.execute(&mut file).await.unwrap().rows_affected(), 1);
    for house in &mall.all()[..2] {
        house.append_on_new("ingest/a", &[order(61, 22)]).await;
    }
    let singles = [mall.orders.enqueue("ingest/a").await, mall.items.enqueue("ingest/a").await];
    mall.orders.drain().await;
    assert_eq!(mall.orders.state(set[0]).await, "held(set-part-held)");
    assert_eq!(mall.orders.states(&singles).await, ["landed"; 2]);

    let cured = sqlx::query("UPDATE merge_request SET state = 'queued' WHERE id = $1").bind(set[1].0);
    cured.execute(&mut file).await.unwrap();
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    mall.assert_sound().await;
}
