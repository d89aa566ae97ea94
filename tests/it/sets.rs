//! Several tables as one request: they land together or not at all (case O30).

use std::sync::Arc;

use crate::support::mall::{Mall, Reader};
use crate::support::{House, Moment, branch, drain, order};

/// The worker's commits of a set of two, in a history that nothing disturbs: two stage it, the third lands it.
const LANDING: usize = 3;

#[tokio::test(flavor = "multi_thread")]
async fn two_and_three_tables_land_together_and_no_reader_sees_half() {
    for count in [2, 3] {
        let mall = Mall::open().await;
        let houses = &mall.all()[..count];
        mall.write(houses, "release/1", 50).await;
        let set = mall.orders.enqueue_set(houses, "release/1").await;
        let own = House::catalog_in(mall.orders.dir.path(), &mall.orders.clock, false).await;
        let reader = Reader::watch(Arc::new(own), &mall.orders.table, &houses[count - 1].table).await;

        mall.orders.drain().await;

        assert_eq!(reader.ends().await, Vec::<String>::new());
        assert_eq!(mall.orders.states(&set).await, vec!["landed"; count]);
        for house in houses {
            assert!(house.keys("main").await.contains(&50));
            assert_eq!(house.head("release/1").await, None, "its class hands the branch over");
        }
        mall.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_that_nothing_overtook_are_published_as_they_are() {
    let mall = Mall::open().await;
    let mut heads = Vec::new();
    for house in mall.all() {
        heads.push(Some(house.append_on_new("release/1", &[order(50, 22)]).await));
    }
    let set = mall.orders.enqueue_set(&mall.all(), "release/1").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["landed"; 3]);
    for (house, head) in mall.all().iter().zip(heads) {
        assert_eq!(house.head("main").await, head);
    }
    mall.assert_sound().await;
}

/// Case O30: one target moves between validation and landing. None moves; then all do, on what is there now.
#[tokio::test(flavor = "multi_thread")]
async fn case_o30_one_moved_table_fails_the_set_and_none_moves() {
    for at in [Moment::Before(LANDING), Moment::After(LANDING - 1)] {
        let mall = Arc::new(Mall::open().await);
        mall.write(&mall.all()[..2], "release/1", 50).await;
        let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
        let (worker, script) = mall.orders.scripted().await;
        let moved = Arc::clone(&mall);
        script.at(at, move || async move {
            moved.items.append("main", &[order(77, 26)]).await;
        });
        // Right after it, before anything is tried again.
        let seen = Arc::clone(&mall);
        script.at(Moment::Before(LANDING + 1), move || async move {
            for house in &seen.all()[..2] {
                assert!(!house.keys("main").await.contains(&50), "{} has moved", house.table);
            }
        });

        drain(&worker).await;

        script.assert_played();
        assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
        for house in &mall.all()[..2] {
            assert_eq!(house.keys("main").await.iter().filter(|key| **key == 50).count(), 1);
        }
        assert!(mall.items.keys("main").await.contains(&77));
        mall.assert_sound().await;
    }
}

/// Another branch of one of the tables is written meanwhile: no reason to plan anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_written_meanwhile_is_no_obstacle() {
    let mall = Arc::new(Mall::open().await);
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let (worker, script) = mall.orders.scripted().await;
    for commit in 1..=LANDING {
        let writes = Arc::clone(&mall);
        script.at(Moment::Before(commit), move || async move {
            for house in [&writes.orders, &writes.items] {
                house.append(&format!("other/{commit}"), &[order(90, 27)]).await;
            }
        });
    }
    drain(&worker).await;
    script.assert_played();
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    assert_eq!(mall.orders.request(set[0]).await.attempts, 1);
    mall.assert_sound().await;
}

/// Rule L6: the pin lands, and the branch that grew is kept.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l6_a_source_that_grew_meanwhile_is_kept() {
    let mall = Arc::new(Mall::open().await);
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let (worker, script) = mall.orders.scripted().await;
    let grows = Arc::clone(&mall);
    script.at(Moment::Before(LANDING), move || async move {
        grows.items.append("release/1", &[order(51, 23)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(mall.orders.states(&set).await, ["landed"; 2]);
    assert_eq!(mall.orders.head("release/1").await, None);
    assert!(mall.items.head("release/1").await.is_some());
    assert!(!mall.items.keys("main").await.contains(&51));
    mall.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_whose_branch_went_away_ends_as_a_whole() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    mall.items.commit(vec![mergeberg_kernel::commit::Update::RemoveRef(branch("release/1"))]).await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["refused(set-part-failed)", "withdrawn(branch-gone)"]);
    assert!(!mall.orders.keys("main").await.contains(&50));
    mall.assert_sound().await;
}

/// Somebody landed a part by itself: what is left is no release any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_of_which_a_part_is_published_is_refused_and_a_landed_one_is_found_again() {
    let mall = Mall::open().await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    let items = mall.items.enqueue_keyed("release/1", Some("by itself")).await;
    assert_ne!(items, set[1]);
    let epoch = mall.orders.ledger.lead("test", 600_000, mall.orders.now()).await.unwrap().unwrap();
    // It came later, but only it can go: the set waits for a claim.
    mall.orders.set_property("mergeberg.queue", "another").await;
    for _ in 0..3 {
        mall.orders.worker.tick(epoch).await.unwrap();
    }
    assert_eq!(mall.items.state(items).await, "landed");
    let queue = mall.orders.ledger.queue_id().to_string();
    mall.orders.set_property("mergeberg.queue", &queue).await;
    mall.orders.ledger.release(epoch).await.unwrap();
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["refused(set-part-failed)", "refused(partially-published)"]);

    // A set that is on all of its targets is no work.
    for house in &mall.all()[..2] {
        let head = house.append_on_new("release/2", &[order(70, 23)]).await;
        house.force_branch("main", head).await;
    }
    let again = mall.orders.enqueue_set(&mall.all()[..2], "release/2").await;
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&again).await, ["already-published"; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_lost_answer_is_settled_for_all_tables_at_once() {
    for applied in [true, false] {
        let mall = Arc::new(Mall::open().await);
        mall.write(&mall.all(), "release/1", 50).await;
        let set = mall.orders.enqueue_set(&mall.all(), "release/1").await;
        let (worker, script) = mall.orders.scripted().await;
        let landing = mall.all().len() + 1;
        script.lose_answer(landing);
        if !applied {
            // The transaction comes too late: one of its tables has moved.
            let moved = Arc::clone(&mall);
            script.at(Moment::Before(landing), move || async move {
                moved.customers.append("main", &[order(78, 26)]).await;
            });
        }
        drain(&worker).await;
        script.assert_played();
        assert_eq!(mall.orders.states(&set).await, ["landed"; 3]);
        let attempts = mall.orders.request(set[0]).await.attempts;
        assert_eq!(attempts, if applied { 1 } else { 2 });
        for house in mall.all() {
            assert_eq!(house.keys("main").await.iter().filter(|key| **key == 50).count(), 1);
        }
        mall.assert_sound().await;
    }
}

/// Rule L5: another leader takes over while the landing is on its way. Its removal of one fence forbids the landing of
/// all, and the set lands once.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l5_a_deposed_worker_lands_no_part_of_a_set() {
    let mall = Arc::new(Mall::open().await);
    mall.write(&mall.all(), "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all(), "release/1").await;
    let (worker, script) = mall.orders.scripted().await;
    let successor = Arc::clone(&mall);
    script.at(Moment::Before(mall.all().len() + 1), move || async move {
        // Longer than any lease of these tests.
        successor.orders.advance(3_600_000);
        successor.orders.drain().await;
    });
    drain(&worker).await;
    script.assert_played();
    mall.orders.drain().await;
    assert_eq!(mall.orders.states(&set).await, ["landed"; 3]);
    for house in mall.all() {
        assert_eq!(house.keys("main").await.iter().filter(|key| **key == 50).count(), 1);
    }
    let receipts = mall.orders.ledger.receipts(0, i64::MAX).await.unwrap();
    assert_eq!(receipts.iter().filter(|receipt| receipt.intent.set == Some(set[0])).count(), 3);
    mall.assert_sound().await;
}
