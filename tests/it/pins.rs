//! What a waiting request needs is kept against another engine's expiry (rules R2, C10, case O21).

use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::SnapshotId;

use crate::support::{House, ORDERS_POLICY, order};

/// A check that cannot run keeps the request waiting without blaming it.
const BROKEN_POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "no_such_column"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]
after-landing = "drop"
"#;

async fn expire(house: &House, ids: &[SnapshotId]) {
    let table = house.loaded().await;
    let outcome = house.catalog.commit(&table, &[], vec![Update::RemoveSnapshots(ids.to_vec())]).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o21_a_pinned_base_survives_expiry_and_the_request_lands() {
    let house = House::orders(BROKEN_POLICY).await;
    house.append_on_new("ingest/late", &[order(4, 25)]).await;
    let base = house.head("main").await.unwrap();
    let request = house.enqueue("ingest/late").await;
    let mut overtaken = Vec::new();
    for day in 22..25 {
        overtaken.push(house.append("main", &[order(i64::from(day), day)]).await);
    }
    house.drain().await;
    assert_eq!(house.state(request).await, "held(check-could-not-run)");
    assert_eq!(house.refs().await.iter().filter(|r| r.contains("/pin/")).count(), 0, "not pinned at once");

    house.advance(61_000);
    house.drain().await;
    let pins: Vec<String> = house.refs().await.into_iter().filter(|r| r.contains("/pin/")).collect();
    assert_eq!(pins.len(), 2, "head and base: {pins:?}");

    // Another engine expires main's history down to its head: every ancestor goes but what a ref names.
    let table = house.loaded().await;
    let main = house.head("main").await.unwrap();
    let gone: Vec<SnapshotId> =
        table.facts.snapshots.chain(main).ids.into_iter().filter(|id| *id != main && *id != base).collect();
    expire(&house, &gone).await;

    std::fs::write(house.dir.path().join("policies/orders.toml"), ORDERS_POLICY).unwrap();
    house.advance(61_000);
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{:?}", house.request(request).await.detail);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 22, 23, 24]);
    house.advance(1_000);
    house.append_on_new("ingest/next", &[order(5, 26)]).await;
    house.enqueue("ingest/next").await;
    house.drain().await;
    assert_eq!(house.refs().await, ["main"], "pins of ended requests are released");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o21_an_expired_base_without_pin_is_never_no_conflict() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/late", &[order(4, 25)]).await;
    let base = house.head("main").await.unwrap();
    house.append("main", &[order(9, 24)]).await;
    let main = house.head("main").await.unwrap();
    let table = house.loaded().await;
    let chain = table.facts.snapshots.chain(main).ids;
    let gone: Vec<SnapshotId> = chain.into_iter().filter(|id| *id != main).collect();
    assert!(gone.contains(&base));
    expire(&house, &gone).await;
    let request = house.enqueue("ingest/late").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(base-expired)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 9]);
}
