//! What a waiting request's recorded operation reads is kept in the other table (rule R2).

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::worker::context::Worker;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId, TableName};
use mergeberg_kernel::record::{RECORD_DIGEST_KEY, RECORD_ID_KEY};
use serde_json::{Value as Json, json};

use super::model::Row;
use super::operations::{by_day, row};
use super::world::{POLICY, World, batch, texts};
use crate::support::scripted::{Do, Kind};
use crate::support::{House, drain, main_branch};

/// A check that cannot run keeps the request waiting without blaming it.
const BROKEN: &str =
    "checks = [\"broken\"]\n[[check]]\nid = \"broken\"\ntype = \"not-null\"\ncolumns = [\"nothing\"]\n";

fn feed() -> TableName {
    "raw.feed".parse().unwrap()
}

fn overwrite(world: &World) -> Json {
    json!({
        "v": 1, "id": "load", "op": "overwrite-where", "where": "day = 20",
        "query": "SELECT * FROM feed WHERE day = 20", "inputs": world.inputs(),
    })
}

fn after() -> Vec<Row> {
    vec![row(2, 20, "paid", 21), row(3, 21, "new", 30)]
}

/// A recorded overwrite that has to be run again and cannot land yet.
async fn waiting() -> (World, RequestId) {
    let world = by_day(&[], 2).await;
    world.house.branch("work").await;
    world.recorded("work", &overwrite(&world), &after()).await;
    let request = enqueue(&world).await;
    (world, request)
}

async fn enqueue(world: &World) -> RequestId {
    world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
    policy(&world.house, &format!("{POLICY}{BROKEN}"));
    let request = world.house.enqueue("work").await;
    world.house.drain().await;
    assert_eq!(world.house.state(request).await, "held(check-could-not-run)");
    request
}

fn policy(house: &House, text: &str) {
    std::fs::write(house.dir.path().join("policies/orders.toml"), text).unwrap();
}

async fn refs_of_feed(house: &House) -> Vec<String> {
    let table = house.catalog.load(&feed()).await.unwrap();
    table.facts.refs.keys().map(ToString::to_string).collect()
}

fn pin(house: &House, request: RequestId, at: &Json) -> String {
    format!("mergeberg/pin/{}/{request}-input-{}", house.ledger.queue_id(), at["feed"]["snapshot-id"])
}

/// Another worker, which remembers nothing.
fn successor(house: &House) -> Worker {
    let catalog = Arc::clone(&house.catalog) as Arc<dyn Catalog>;
    House::worker_over(&house.dir, catalog, &house.ledger, &house.clock, "successor")
}

/// The feed goes on, and another engine expires all of it that no ref needs.
async fn expire_feed(house: &House) -> Vec<SnapshotId> {
    house.write_batch_to(&feed(), "main", batch(&[row(7, 27, "more", 0)])).await;
    let table = house.catalog.load(&feed()).await.unwrap();
    let chain = table.facts.snapshots.chain(table.facts.head(&main_branch()).unwrap()).ids;
    let held = |id: &SnapshotId| table.facts.refs.values().any(|reference| reference.snapshot_id == *id);
    let gone: Vec<SnapshotId> = chain.into_iter().filter(|id| !held(id)).collect();
    if !gone.is_empty() {
        let expire = vec![Update::RemoveSnapshots(gone.clone())];
        let outcome = house.catalog.commit(&table, &[], expire).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    }
    gone
}

async fn lands(world: &World, request: RequestId) {
    let house = &world.house;
    policy(house, POLICY);
    // Checks that could not run are tried again at growing intervals.
    house.advance(600_000);
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.classified(request).await, "rebase");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r2_inputs_of_a_request_that_waits_survive_an_expiry_and_are_let_go() {
    let (world, request) = waiting().await;
    let house = &world.house;
    assert_eq!(refs_of_feed(house).await, ["main"], "not at once");
    house.advance(61_000);
    house.drain().await;
    assert_eq!(refs_of_feed(house).await, ["main".to_owned(), pin(house, request, &world.inputs())]);
    assert_eq!(expire_feed(house).await, [], "the ref holds it");
    lands(&world, request).await;
    assert_eq!(house.texts("main").await, texts(&after(), ""));
    assert_eq!(refs_of_feed(house).await, ["main"]);
}

/// Without the ref: the kind of loss that it is there for.
#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_expires_before_it_is_held_is_told() {
    let (world, request) = waiting().await;
    let house = &world.house;
    assert_eq!(expire_feed(house).await.len(), 1);
    policy(house, POLICY);
    house.advance(61_000);
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(input-missing)");
    assert_eq!(refs_of_feed(house).await, ["main"]);
}

/// Whoever set the ref died: the ledger knows it, also where the request ended without landing.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r2_a_successor_lets_the_inputs_of_ended_requests_go() {
    let (world, request) = waiting().await;
    let house = &world.house;
    house.advance(61_000);
    house.drain().await;
    // It finds the ref there and sets no other.
    house.advance(61_000);
    drain(&successor(house)).await;
    assert_eq!(refs_of_feed(house).await.len(), 2);
    house.ledger.cancel(request, &Principal::new("ann"), house.now()).await.unwrap();
    house.advance(61_000);
    drain(&successor(house)).await;
    assert_eq!(refs_of_feed(house).await, ["main"]);
    assert_eq!(house.ledger.input_pins_of_ended().await.unwrap(), []);
}

/// The target is gone for good: its requests are refused, and what they held is let go all the same.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r2_inputs_are_let_go_when_their_target_is_gone() {
    let (world, request) = waiting().await;
    let house = &world.house;
    house.advance(61_000);
    house.drain().await;
    assert_eq!(refs_of_feed(house).await.len(), 2);
    house.catalog.drop_table(&house.table).await.unwrap();
    house.advance(61_000);
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(table-not-found)");
    house.drain().await;
    assert_eq!(refs_of_feed(house).await, ["main"]);
}

/// The record stands in the ledger.
#[tokio::test(flavor = "multi_thread")]
async fn rule_r2_holds_for_records_in_the_ledger() {
    let world = by_day(&[], 2).await;
    let house = &world.house;
    house.branch("work").await;
    let record = overwrite(&world).to_string();
    let table = house.loaded().await;
    let ann = Principal::new("ann");
    let ids = ("load", record.as_str());
    house.ledger.record_operation(&house.table, &table.facts.uuid, ids, &ann, house.now()).await.unwrap();
    let digest = mergeberg_kernel::ids::Digest::of([record.as_str()]);
    let summary = BTreeMap::from([
        (RECORD_ID_KEY.to_owned(), "load".to_owned()),
        (RECORD_DIGEST_KEY.to_owned(), digest.as_str().to_owned()),
    ]);
    world.write("work", "overwrite", &after(), true, summary).await;
    let request = enqueue(&world).await;
    house.advance(61_000);
    house.drain().await;
    assert_eq!(refs_of_feed(house).await, ["main".to_owned(), pin(house, request, &world.inputs())]);
    lands(&world, request).await;
    assert_eq!(refs_of_feed(house).await, ["main"]);
}

/// A catalog that loses the commit is asked again; one that refuses it for good holds nobody up.
#[tokio::test(flavor = "multi_thread")]
async fn inputs_that_cannot_be_held_hold_nobody_up() {
    for refused in [false, true] {
        let (world, request) = waiting().await;
        let house = &world.house;
        house.advance(61_000);
        let (catalog, worker) = house.misled_worker();
        // The request's own pins come first.
        catalog.next(Kind::Staging, Do::First(Box::pin(async {})));
        catalog.next(
            Kind::Staging,
            if refused {
                Do::FirstThenRefuse(Box::pin(async {}), "not yours to write")
            } else {
                Do::LoseBeforeApplying
            },
        );
        drain(&worker).await;
        assert!(catalog.is_played());
        let pins = if refused { 0 } else { 1 };
        house.advance(1);
        drain(&worker).await;
        assert_eq!(refs_of_feed(house).await.len(), 1 + pins, "refused: {refused}");
        lands(&world, request).await;
        assert_eq!(refs_of_feed(house).await, ["main"]);
    }
}

/// One that cannot be asked now is asked again, after a rest.
#[tokio::test(flavor = "multi_thread")]
async fn inputs_are_held_once_their_table_can_be_reached() {
    let (world, request) = waiting().await;
    let house = &world.house;
    house.advance(61_000);
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Staging, Do::First(Box::pin(async {})));
    catalog.next(Kind::Staging, Do::SayUnavailable);
    for (later_ms, pins) in [(1, 0), (1, 0), (61_000, 1)] {
        house.advance(later_ms);
        drain(&worker).await;
        assert_eq!(refs_of_feed(house).await.len(), 1 + pins);
    }
    assert!(catalog.is_played());
    // What could not be let go is kept in mind.
    house.ledger.cancel(request, &Principal::new("ann"), house.now()).await.unwrap();
    catalog.next(Kind::Removal, Do::SayUnavailable);
    for (later_ms, pins) in [(1, 1), (61_000, 0)] {
        house.advance(later_ms);
        drain(&worker).await;
        assert_eq!(refs_of_feed(house).await.len(), 1 + pins);
    }
}
