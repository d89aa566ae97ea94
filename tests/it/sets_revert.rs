//! Sets taken back as sets: the inverse of every part, landed together; and refused together when one cannot be.

use std::sync::Arc;

use mergeberg::ledger::EnqueuedSet;
use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::reason::ReasonCode;

use crate::support::child::LONG_LEASE;
use crate::support::mall::{Mall, RELEASES, Reader, policy};
use crate::support::{House, ORDERS, order};

const TWO: usize = 2;

/// Keys of a table that has these, without those that it began with.
async fn new_keys(house: &House) -> Vec<i64> {
    house.keys("main").await.into_iter().filter(|key| *key > 3).collect()
}

/// A set over the first tables of the mall, landed: each of them took the key 50.
async fn landed(mall: &Mall, count: usize) -> Vec<RequestId> {
    let houses = &mall.all()[..count];
    mall.write(houses, "release/1", 50).await;
    let set = mall.orders.enqueue_set(houses, "release/1").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, vec!["landed"; count]);
    set
}

impl Mall {
    async fn own_refs(&self) -> Vec<String> {
        let mut own = Vec::new();
        for house in self.all() {
            own.extend(house.refs().await.into_iter().filter(|name| name.starts_with("mergeberg/")));
        }
        own
    }

    /// Somebody writes the file of key 50 again, with the key in it.
    async fn rewrite_key(&self, house: &House) {
        let files = Removal::Files(Box::new(|file| file.fact.records == 1));
        house.write("main", "overwrite", &[order(50, 22)], files, Default::default()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_taken_back_as_a_set_and_what_came_after_stays() {
    for count in [2, 3] {
        let mall = Mall::open().await;
        let houses = &mall.all()[..count];
        let set = landed(&mall, count).await;
        for house in houses {
            house.append("main", &[order(60, 22)]).await;
        }
        // By any of its parts.
        let revert = mall.orders.revert_set(set[count - 1]).await;
        for (row, reverted) in revert.iter().zip(&set) {
            let row = mall.orders.request(*row).await;
            assert_eq!(row.reverts.unwrap().request, *reverted);
            assert_eq!(row.class, "release", "the same checks hold");
        }
        let own = House::catalog_in(mall.orders.dir.path(), &mall.orders.clock, false).await;
        let reader = Reader::watch(Arc::new(own), &mall.orders.table, &houses[count - 1].table).await;
        mall.orders.drain().await;
        assert_eq!(reader.ends().await, Vec::<String>::new());
        assert_eq!(mall.orders.states(&revert).await, vec!["landed"; count]);
        for house in houses {
            assert_eq!(new_keys(house).await, [60, 1_050], "{}", house.table);
        }
        assert_eq!(mall.own_refs().await, Vec::<String>::new());

        // Taken back twice it is nothing; the revert taken back is the set again.
        let error = mall.orders.ask_revert_set(set[0], None).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::RevertImpossible);
        assert!(error.message.contains("was taken back already, by request"), "{}", error.message);
        let again = mall.orders.revert_set(revert[0]).await;
        mall.orders.drain().await;
        assert_eq!(mall.orders.states(&again).await, vec!["landed"; count]);
        for house in houses {
            assert_eq!(new_keys(house).await, [50, 60, 1_050], "{}", house.table);
        }
        mall.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_of_which_a_part_cannot_be_taken_back_is_refused_with_witnesses() {
    let mall = Mall::open().await;
    let set = landed(&mall, TWO).await;
    mall.rewrite_key(&mall.items).await;
    let refs = [mall.orders.refs().await, mall.items.refs().await];

    let error = mall.orders.ask_revert_set(set[0], None).await.unwrap_err();

    assert_eq!(error.code, ReasonCode::RevertImpossible);
    assert!(
        error.message.starts_with("set 1 cannot be taken back as a whole: shop.items: "),
        "{}",
        error.message
    );
    assert!(error.next.contains("--alone"), "{}", error.next);
    assert_eq!(error.witnesses.len(), 1, "{:?}", error.witnesses);
    assert_eq!(error.witnesses[0]["part"], set[1].0);
    assert!(!error.witnesses[0]["witnesses"].as_array().unwrap().is_empty(), "{:?}", error.witnesses);
    assert_eq!([mall.orders.refs().await, mall.items.refs().await], refs, "nothing was written");
    assert_eq!(mall.orders.ledger.requests(&Default::default()).await.unwrap().len(), TWO);

    mall.rewrite_key(&mall.orders).await;
    let error = mall.orders.ask_revert_set(set[0], None).await.unwrap_err();
    assert_eq!(error.witnesses.len(), TWO);
    assert!(error.message.contains("shop.orders: ") && error.message.contains("; shop.items: "));
    assert!(!error.next.contains("--alone"), "{}", error.next);
}

/// It could be taken back when it was asked for, and cannot when its turn comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_was_changed_meanwhile_refuses_the_whole() {
    let mall = Mall::open().await;
    let set = landed(&mall, TWO).await;
    let revert = mall.orders.revert_set(set[0]).await;
    mall.rewrite_key(&mall.items).await;
    mall.orders.drain().await;
    let states = mall.orders.states(&revert).await;
    assert_eq!(states, ["refused(set-part-failed)", "refused(revert-impossible)"]);
    for house in [&mall.orders, &mall.items] {
        assert!(house.keys("main").await.contains(&50));
    }
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_revert_of_a_set_is_asked_for_once() {
    let mall = Mall::open().await;
    let set = landed(&mall, TWO).await;
    let waits = mall.orders.ask_revert_set(set[0], Some("k")).await.unwrap();
    let EnqueuedSet::New(rows) = waits else { panic!("{waits:?}") };
    let again = mall.orders.ask_revert_set(set[1], Some("k")).await.unwrap();
    assert_eq!(again, EnqueuedSet::Existing(rows.clone()));
    let again = mall.orders.ask_revert_set(set[1], None).await.unwrap();
    assert_eq!(again, EnqueuedSet::Existing(rows));
    mall.orders.drain().await;
    let ended = mall.orders.ask_revert_set(set[0], Some("k")).await.unwrap();
    assert!(matches!(ended, EnqueuedSet::Existing(_)), "its key names it for ever");
    // A set that has not landed cannot be taken back.
    mall.write(&mall.all()[..TWO], "release/2", 70).await;
    let waiting = mall.orders.enqueue_set(&mall.all()[..TWO], "release/2").await;
    let error = mall.orders.ask_revert_set(waiting[1], None).await.unwrap_err();
    assert_eq!(error.code, ReasonCode::WrongState);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_takes_back_the_set_or_one_part_alone() {
    let orders = House::in_real_time(&policy(ORDERS, RELEASES), LONG_LEASE).await;
    let mall = Mall::around(orders, RELEASES, RELEASES).await;
    for name in ["release/1", "release/2"] {
        for house in [&mall.orders, &mall.items] {
            let id = if name == "release/1" { 50 } else { 60 };
            house.append_on_new(name, &[order(id, 22)]).await;
        }
        mall.ok(&["request", "enqueue", "--table", ORDERS, "--table", "shop.items", "--source", name]);
        mall.ok(&["worker", "--drain"]);
    }
    let told = mall.ok(&["request", "revert", "2", "--reason", "bad load"]);
    assert!(told.starts_with("set 5 enqueued: 2 tables"), "{told}");
    assert!(mall.ok(&["request", "revert", "1"]).starts_with("set 5 there already"));
    // One of its parts is on its way with it.
    assert!(mall.ok(&["request", "revert", "1", "--alone"]).contains("request 5 there already"));
    mall.ok(&["worker", "--drain"]);
    let shown = mall.ok(&["request", "show", "6"]);
    assert!(shown.contains("reverts         request 2: bad load"), "{shown}");
    assert!(mall.ok(&["request", "show", "1"]).contains("reverted by     request 5 (landed)"));

    let told = mall.ok(&["request", "revert", "4", "--alone"]);
    assert!(told.starts_with("request 7 enqueued") && !told.contains("set"), "{told}");
    let (code, text) = mall.refused(&["request", "revert", "3"]);
    assert_eq!(code, "wrong-state");
    assert!(text.contains("request 7 takes back request 4, a part of set 3, and is queued"), "{text}");
    mall.ok(&["worker", "--drain"]);
    assert_eq!(new_keys(&mall.orders).await, [60]);
    assert_eq!(new_keys(&mall.items).await, [0; 0]);
    mall.assert_sound().await;
}
