//! Rule R7: a table belongs to one queue. And rule L7: what no requirement of a commit can say.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mergeberg::ledger::{Enqueued, EventKind, Ledger, NewRequest, RequestFilter};
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::catalog::Catalog;
use mergeberg_kernel::facts::CLAIM_PROPERTY;
use mergeberg_kernel::ids::{Principal, RequestId, TableName};
use mergeberg_kernel::reason::ReasonCode;
use tokio::time::timeout;

use crate::support::child::PATIENCE;
use crate::support::scripted::{Do, Kind};
use crate::support::{House, Moment, ORDERS_POLICY, batch, branch, drain, order};

impl House {
    async fn claim(&self) -> Option<String> {
        self.loaded().await.facts.properties.get(CLAIM_PROPERTY).cloned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r7_the_first_train_claims_the_table_and_costs_no_commit() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.enqueue("ingest/a").await;
    assert_eq!(house.claim().await, None);
    let (worker, script) = house.scripted().await;
    drain(&worker).await;
    assert_eq!(house.claim().await, Some(house.ledger.queue_id().to_string()));
    assert_eq!(script.commits(), 2, "one that stages, one that lands");
    house.append_on_new("ingest/b", &[order(5, 22)]).await;
    let second = house.enqueue("ingest/b").await;
    house.drain().await;
    assert_eq!(house.state(second).await, "landed", "an own claim is in nobody's way");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r7_a_table_of_another_queue_is_left_alone_until_it_is_taken_over() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let early = house.enqueue("ingest/a").await;
    house.set_property(CLAIM_PROPERTY, "the-other-queue").await;
    let before = house.loaded().await.metadata_location.clone();

    house.drain().await;
    assert_eq!(house.state(early).await, "held(claimed-elsewhere)");
    let told = house.request(early).await.detail.unwrap().to_string();
    assert!(told.contains("queue the-other-queue has claimed shop.orders"), "{told}");
    let refused = house.ask("ingest/a").await.unwrap_err();
    assert_eq!(refused.code, ReasonCode::ClaimedElsewhere);
    assert!(refused.next.contains("target claim"), "{}", refused.next);
    assert_eq!(house.loaded().await.metadata_location, before, "nothing was written");

    house.set_property(CLAIM_PROPERTY, house.ledger.queue_id().as_str()).await;
    house
        .ledger
        .tell_claim(&house.table, Some("the-other-queue"), &Principal::new("ann"), "its disk is gone", 1)
        .await
        .unwrap();
    house.drain().await;
    assert_eq!(house.state(early).await, "landed");
    let events = house.ledger.events_since(0, 100).await.unwrap();
    let told = events.iter().find(|event| event.kind == EventKind::TableClaimed).unwrap();
    assert_eq!(told.text, "ann claimed shop.orders from queue the-other-queue: its disk is gone");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r7_two_queues_over_one_table_never_both_land_on_it() {
    let house = House::orders(ORDERS_POLICY).await;
    let other_ledger = Ledger::open_or_create(house.dir.path().join("other.db")).await.unwrap();
    let catalog = Arc::clone(&house.catalog) as Arc<dyn Catalog>;
    let other = House::worker_over(&house.dir, catalog, &other_ledger, &house.clock, "other");
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.append_on_new("ingest/b", &[order(5, 22)]).await;
    let here = house.enqueue("ingest/a").await;
    let there = enqueue_in(&other_ledger, &house, &house.table, "ingest/b", "ingest").await;
    // The other queue claims the table between this one's plan and its staging commit.
    let (worker, script) = house.scripted().await;
    let other = Arc::new(other);
    let meanwhile = Arc::clone(&other);
    script.at(Moment::Before(1), move || async move { drain(&meanwhile).await });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(other_ledger.request(there).await.unwrap().state.to_string(), "landed");
    assert_eq!(house.state(here).await, "held(claimed-elsewhere)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_a_property_changed_while_a_train_was_checked_plans_it_anew() {
    for moment in [Moment::After(1), Moment::Before(2)] {
        let house = Arc::new(House::orders(ORDERS_POLICY).await);
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        let request = house.enqueue("ingest/a").await;
        let (worker, script) = house.scripted().await;
        let admin = Arc::clone(&house);
        script.at(moment, move || async move {
            admin.set_property("write.parquet.compression-codec", "zstd").await;
        });
        drain(&worker).await;
        script.assert_played();
        assert_eq!(house.state(request).await, "landed");
        assert_eq!(
            house.request(request).await.attempts,
            2,
            "{moment:?}: planned again under the new property"
        );
        let history = house.history(request).await;
        assert!(history.contains("table property write.parquet.compression-codec was changed"), "{history}");
        assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
        house.assert_sound().await;
    }
}

/// The landing of one table waits until another table's request has landed: in turn, this never ends.
#[tokio::test(flavor = "multi_thread")]
async fn tables_are_worked_on_side_by_side() {
    let house = House::orders(ORDERS_POLICY).await;
    let second = house.second_table("shop.returns").await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let slow = house.enqueue("ingest/a").await;
    let quick = house.enqueue_first_of(&second).await;
    let (catalog, worker) = house.misled_worker();
    let ledger = house.ledger.clone();
    let other_landed = async move {
        let mut look = tokio::time::interval(Duration::from_millis(20));
        let filter = RequestFilter { states: vec!["landed".to_owned()], ..RequestFilter::default() };
        while ledger.requests(&filter).await.unwrap().is_empty() {
            look.tick().await;
        }
    };
    let other_landed =
        async move { timeout(PATIENCE, other_landed).await.expect("the other table's landing") };
    catalog.next(Kind::Landing, Do::First(Box::pin(other_landed)));
    drain(&worker).await;
    for request in [slow, quick] {
        assert_eq!(house.state(request).await, "landed");
    }
    assert!(catalog.is_played());
}

impl House {
    /// Another table of the same columns, without a snapshot.
    async fn second_table(&self, name: &str) -> TableName {
        let name: TableName = name.parse().unwrap();
        self.catalog.define_table(&name, &Self::orders_definition()).await.unwrap();
        name
    }

    /// One row on a branch of an empty table, enqueued.
    async fn enqueue_first_of(&self, table: &TableName) -> RequestId {
        let write = BranchWrite {
            branch: branch("ingest/first"),
            label: "append".to_owned(),
            rows: vec![batch(&[order(1, 20)])],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        self.writer.write(table, write).await.unwrap();
        enqueue_in(&self.ledger, self, table, "ingest/first", "default").await
    }
}

async fn enqueue_in(
    ledger: &Ledger,
    house: &House,
    table: &TableName,
    source: &str,
    class: &str,
) -> RequestId {
    let loaded = house.catalog.load(table).await.unwrap();
    let new = NewRequest {
        table: table.clone(),
        table_uuid: loaded.facts.uuid.clone(),
        source: branch(source),
        pinned: loaded.facts.head(&branch(source)).unwrap(),
        target: branch("main"),
        class: class.to_owned(),
        principal: Principal::new("test"),
        idempotency_key: None,
        structure: loaded.facts.structure(),
        format_version: 2,
    };
    match ledger.enqueue(&new, house.now()).await.unwrap() {
        Enqueued::New(row) => row.id,
        other => panic!("{other:?}"),
    }
}
