//! Several tables as one request: they land together or not at all (case O30).

use std::sync::Arc;

use mergeberg_kernel::policy::DEFAULT_AGE_BOUND_MS;
use sqlx::ConnectOptions as _;
use sqlx::sqlite::SqliteConnectOptions;

use crate::support::mall::{ITEMS, Mall, RELEASES, Reader};
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
    for set in orders.ledger.open_sets().await.unwrap() {
        panic!("set {} waits: {:?}", set.id, orders.ledger.parts(set.id).await.unwrap());
    }
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
