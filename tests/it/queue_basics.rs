//! The straight line: enqueue, classify, stage, check, land, receipt.

use crate::support::{House, ORDERS_POLICY, order};

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_nothing_overtook_is_fast_forwarded() {
    let house = House::orders(ORDERS_POLICY).await;
    let snapshot = house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "fast-forward");
    assert_eq!(house.head("main").await, Some(snapshot));
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    assert_eq!(house.refs().await, ["main"], "the class hands its branches over");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_appends_ride_one_train() {
    let house = House::orders(ORDERS_POLICY).await;
    let mut requests = Vec::new();
    for shard in 0..8_u32 {
        let name = format!("ingest/{shard}");
        house.append_on_new(&name, &[order(i64::from(10 + shard), 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    let before = house.loaded().await.facts.snapshot_log.len();
    house.drain().await;
    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17]);
    assert_eq!(house.loaded().await.facts.snapshot_log.len(), before + 1, "one landing commit");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_of_eight_leaves_and_seven_land() {
    let house = House::orders(ORDERS_POLICY).await;
    let mut requests = Vec::new();
    for shard in 0..8_u32 {
        let name = format!("ingest/{shard}");
        // The fifth brings key 3 of day 21 again.
        let row = if shard == 4 { order(3, 21) } else { order(i64::from(10 + shard), 22) };
        house.append_on_new(&name, &[row]).await;
        requests.push(house.enqueue(&name).await);
    }
    house.drain().await;
    for (shard, request) in requests.iter().enumerate() {
        let expected = if shard == 4 { "refused(duplicate-key)" } else { "landed" };
        assert_eq!(house.state(*request).await, expected, "shard {shard}");
    }
    let detail = house.request(requests[4]).await.detail.unwrap().to_string();
    assert!(detail.contains("order_id=3"), "the rows are named: {detail}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 10, 11, 12, 13, 15, 16, 17]);
    house.assert_sound().await;
}
