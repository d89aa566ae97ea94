//! A worker process is killed at every named step of the protocol while it carries a set, and started again: the set has
//! landed whole, once.

use std::sync::Arc;

use mergeberg::table::catalog::Catalog;
use mergeberg::worker::step::Step;
use mergeberg_kernel::ids::RequestId;

use crate::support::child::SHORT_LEASE;
use crate::support::mall::{ITEMS, Mall, RELEASES, Reader, policy};
use crate::support::postgres::OnPostgres;
use crate::support::{House, ORDERS, branch, order};

/// Steps that every set passes.
const ALWAYS: [Step; 12] = [
    Step::Admitted,
    Step::CandidatesWritten,
    Step::TrainRecorded,
    Step::StagingFileWritten,
    Step::StagingSwapped,
    Step::Staged,
    Step::EvidenceRecorded,
    Step::IntentWritten,
    Step::LandingFileWritten,
    Step::LandingSwapped,
    Step::Landed,
    Step::ReceiptWritten,
];

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

async fn mall(items: &str) -> Mall {
    let orders = House::in_real_time(&policy(ORDERS, RELEASES), SHORT_LEASE).await;
    Mall::around(orders, items, RELEASES).await
}

impl Mall {
    /// Neither missing, nor twice, nor by halves; nothing is left of the worker that died.
    async fn assert_ends(&self, set: &[RequestId], states: [&str; 2], times: usize, at: Step) {
        assert_eq!(self.orders.states(set).await, states, "killed at {}", at.name());
        for house in &self.all()[..2] {
            let found = house.keys("main").await.iter().filter(|key| **key == 50).count();
            assert_eq!(found, times, "{} killed at {}", house.table, at.name());
            let table = house.loaded().await;
            let mut reachable = std::collections::BTreeSet::new();
            for reference in table.facts.refs.values() {
                reachable.extend(table.facts.snapshots.chain(reference.snapshot_id).ids);
            }
            for snapshot in table.facts.snapshots.iter() {
                let ours = snapshot.summary.contains_key(mergeberg::worker::stage::REQUEST_KEY);
                assert!(
                    !ours || reachable.contains(&snapshot.id),
                    "{} is left, killed at {}",
                    snapshot.id,
                    at.name()
                );
            }
            let handed_over = table.facts.head(&branch("release/1")).is_none();
            assert_eq!(handed_over, times == 1, "{} killed at {}", house.table, at.name());
        }
        self.assert_sound().await;
        self.orders.balanced_report();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_survives_a_crash_at_each_step() {
    for step in ALWAYS {
        let mall = mall(RELEASES).await;
        mall.write(&mall.all()[..2], "release/1", 50).await;
        let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
        assert!(mall.orders.drain_in_child(Some(step.name())), "killed at {}", step.name());
        mall.orders.drain_in_child(None);
        mall.assert_ends(&set, ["landed", "landed"], 1, step).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_is_refused_leaves_nothing_behind_wherever_its_worker_dies() {
    for step in [Step::EvidenceRecorded, Step::Evicted, Step::DroppingFileWritten, Step::DroppingSwapped] {
        let mall = mall(ONCE).await;
        mall.write(&mall.all()[..2], "release/1", 50).await;
        mall.items.append("release/1", &[order(2, 21)]).await;
        let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
        assert!(mall.orders.drain_in_child(Some(step.name())), "killed at {}", step.name());
        mall.orders.drain_in_child(None);
        let states = ["refused(set-part-failed)", "refused(duplicate-key)"];
        mall.assert_ends(&set, states, 0, step).await;
    }
}

/// Killed again and again: each successor goes on from what the catalog shows.
#[tokio::test(flavor = "multi_thread")]
async fn one_set_through_every_crash_in_turn() {
    let mall = mall(RELEASES).await;
    mall.write(&mall.all()[..2], "release/1", 50).await;
    let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
    for step in ALWAYS.into_iter().take_while(|step| *step != Step::Landed) {
        assert!(mall.orders.drain_in_child(Some(step.name())), "killed at {}", step.name());
    }
    mall.orders.drain_in_child(None);
    mall.assert_ends(&set, ["landed", "landed"], 1, Step::LandingSwapped).await;
}

/// A table that is dropped takes its set with it, and holds no other table.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_is_dropped_under_an_open_landing_holds_nobody() {
    for step in [Step::IntentWritten, Step::LandingSwapped] {
        let mall = mall(RELEASES).await;
        mall.write(&mall.all()[..2], "release/1", 50).await;
        let set = mall.orders.enqueue_set(&mall.all()[..2], "release/1").await;
        assert!(mall.orders.drain_in_child(Some(step.name())), "killed at {}", step.name());
        mall.orders.catalog.drop_table(&mall.items.table).await.unwrap();
        mall.orders.append_on_new("ingest/a", &[order(61, 24)]).await;
        let single = mall.orders.enqueue("ingest/a").await;
        // What is left of the other table is asked for in vain.
        mall.orders.drain().await;
        let landed = step == Step::LandingSwapped;
        assert_eq!(mall.orders.state(single).await, "landed", "killed at {}", step.name());
        assert_eq!(mall.orders.keys("main").await.contains(&50), landed);
        let states = mall.orders.states(&set).await;
        match landed {
            true => assert_eq!(states, ["landed", "landed"]),
            false => assert_eq!(states, ["refused(set-part-failed)", "refused(table-not-found)"]),
        }
        mall.orders.assert_sound().await;
    }
}

/// The same on PostgreSQL: pointers and intents of all tables move in one transaction each.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_on_postgresql_lands_whole_wherever_its_worker_dies() {
    let Some(on) = OnPostgres::orders(&policy(ORDERS, RELEASES), SHORT_LEASE).await else { return };
    let orders = &on.house;
    let items = orders.beside(ITEMS, &policy(ITEMS, RELEASES)).await;
    let both = [orders, &items];
    for (id, step) in
        (50..).zip([Step::Staged, Step::IntentWritten, Step::LandingFileWritten, Step::LandingSwapped])
    {
        let name = format!("release/{id}");
        for house in both {
            house.append_on_new(&name, &[order(id, 22)]).await;
            house.append("main", &[order(id + 1_000, 25)]).await;
        }
        let set = orders.enqueue_set(&both, &name).await;
        let catalog = Arc::clone(&orders.catalog) as Arc<dyn Catalog>;
        let reader = Reader::watch(catalog, &orders.table, &items.table).await;
        assert!(orders.drain_in_child(Some(step.name())), "killed at {}", step.name());
        orders.drain_in_child(None);
        assert_eq!(reader.ends().await, Vec::<String>::new(), "killed at {}", step.name());
        assert_eq!(orders.states(&set).await, ["landed"; 2], "killed at {}", step.name());
        for house in both {
            assert_eq!(house.keys("main").await.iter().filter(|key| **key == id).count(), 1);
            house.assert_sound().await;
        }
    }
    orders.balanced_report();
    on.end().await;
}
