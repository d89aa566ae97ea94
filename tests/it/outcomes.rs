//! What a commit came to is read from the catalog, whatever was answered (rules L1 to L8, cases O01, O06,
//! O24, O26, O28, O29). The catalog misbehaves on order; what it holds is real.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use mergeberg::ledger::LandingState;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::sql_catalog::{CommitHook, SqlCatalog};
use mergeberg::worker::context::Worker;
use mergeberg::worker::error::WorkerError;
use mergeberg::worker::run::{Ended, RunOptions};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::{Principal, RefName, RequestId, TableName};
use mergeberg_kernel::state::RequestEvent;
use tokio::sync::Notify;

use crate::support::scripted::{Answer, Do, Kind, Scripted};
use crate::support::{House, ORDERS, ORDERS_POLICY, drain, main_branch, order};

const LEASE_MS: i64 = 60_000;

/// Works until nothing more can be done, or the catalog is too bad for that.
async fn work(worker: &Worker) -> Result<Ended, WorkerError> {
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: LEASE_MS };
    worker.run(options, stopped).await
}

/// ORD with one request that appends key 4 to day 22.
pub async fn house_with_one() -> (House, RequestId) {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;
    (house, request)
}

impl House {
    /// A stranger's append, as something that a script can do.
    pub fn stranger_appends(&self, name: &'static str, id: i64, day: u32) -> BoxFuture<'static, ()> {
        use mergeberg::table::branch_writer::{BranchWrite, BranchWriter, Removal};
        let writer = BranchWriter {
            catalog: Arc::clone(&self.catalog) as Arc<dyn Catalog>,
            store: mergeberg::table::manifests::ManifestStore::new(1 << 20),
            clock: Arc::clone(&self.writer.clock),
            random: Arc::clone(&self.writer.random),
        };
        Box::pin(async move {
            let table: TableName = ORDERS.parse().unwrap();
            let write = BranchWrite {
                branch: RefName::new(name),
                label: "append".to_owned(),
                rows: vec![crate::support::batch(&[order(id, day)])],
                remove: Removal::Nothing,
                summary: Default::default(),
            };
            writer.write(&table, write).await.unwrap();
        })
    }

    pub async fn landed_once(&self, request: RequestId) {
        assert_eq!(self.state(request).await, "landed");
        assert_eq!(self.keys("main").await, [1, 2, 3, 4]);
        self.assert_nothing_left().await;
    }

    async fn assert_nothing_left(&self) {
        assert!(self.ledger.open_intents().await.unwrap().is_empty());
        let uuid = self.loaded().await.facts.uuid.clone();
        assert!(self.ledger.unfinished_trains(&uuid).await.unwrap().is_empty());
        self.assert_sound().await;
    }

    async fn text_of(&self, request: RequestId) -> String {
        self.request(request).await.detail.unwrap()["text"].as_str().unwrap().to_owned()
    }
}

/// Moves or removes refs behind the queue's back.
async fn by_hand(catalog: &SqlCatalog, change: impl Fn(&mergeberg::table::loaded::LoadedTable) -> Update) {
    let table = catalog.load(&ORDERS.parse().unwrap()).await.unwrap();
    let update = change(&table);
    let outcome = catalog.commit(&table, &[], vec![update]).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

fn remove_the_fence(catalog: &Arc<SqlCatalog>) -> BoxFuture<'static, ()> {
    let catalog = Arc::clone(catalog);
    Box::pin(async move {
        by_hand(&catalog, |table| {
            let fence = table.facts.refs.keys().find(|r| r.as_str().starts_with("mergeberg/tmp/"));
            Update::RemoveRef(fence.expect("a train is staged").clone())
        })
        .await;
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o01_a_yes_without_a_change_is_no_landing() {
    for kind in [Kind::Staging, Kind::Landing, Kind::Removal] {
        let (house, request) = house_with_one().await;
        let (catalog, worker) = house.misled_worker();
        if kind == Kind::Removal {
            // Something to remove: a landing that did not come through.
            catalog.next(Kind::Landing, Do::LoseBeforeApplying);
        }
        catalog.next(kind, Do::SayOk);
        drain(&worker).await;
        assert!(catalog.is_played(), "{kind:?}");
        house.landed_once(request).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o01_a_catalog_that_never_does_what_it_says_is_found_out() {
    for kind in [Kind::Staging, Kind::Landing] {
        let (house, request) = house_with_one().await;
        let head = house.head("main").await;
        let (catalog, worker) = house.misled_worker();
        catalog.always(kind, || Do::SayOk);
        drain(&worker).await;
        assert_eq!(house.state(request).await, "held(catalog-unavailable)", "{kind:?}");
        assert!(house.text_of(request).await.contains("the catalog says"), "{kind:?}");
        assert!(catalog.commits(kind) <= 4, "{} times", catalog.commits(kind));
        assert_eq!(house.head("main").await, head);
        house.assert_sound().await;

        catalog.be_honest();
        drain(&worker).await;
        house.landed_once(request).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_a_lost_answer_neither_loses_nor_doubles() {
    let scripts: [&[(Kind, Answer)]; 7] = [
        // Applied, then 503 or a closed connection.
        &[(Kind::Landing, || Do::ApplyThenLose)],
        // Not applied, then 503.
        &[(Kind::Landing, || Do::LoseBeforeApplying)],
        &[(Kind::Staging, || Do::ApplyThenLose)],
        &[(Kind::Staging, || Do::LoseBeforeApplying)],
        // The settling of it loses its answers too, and meets a conflict (the 409 on a resend).
        &[(Kind::Landing, || Do::LoseBeforeApplying), (Kind::Removal, || Do::ApplyThenLose)],
        &[
            (Kind::Landing, || Do::LoseBeforeApplying),
            (Kind::Removal, || Do::LoseBeforeApplying),
            (Kind::Removal, || Do::SayPointerMoved),
        ],
        &[(Kind::Staging, || Do::ApplyThenLose), (Kind::Removal, || Do::ApplyThenLose)],
    ];
    for (at, script) in scripts.into_iter().enumerate() {
        let (house, request) = house_with_one().await;
        let (catalog, worker) = house.misled_worker();
        for (kind, act) in script {
            catalog.next(*kind, act());
        }
        drain(&worker).await;
        assert!(catalog.is_played(), "script {at}");
        house.landed_once(request).await;
    }
}

/// The SQL catalog itself loses the answer of its database.
struct LosesAnswer {
    commit: usize,
    seen: AtomicUsize,
}

impl CommitHook for LosesAnswer {
    fn loses_answer(&self) -> bool {
        self.seen.fetch_add(1, Ordering::SeqCst) == self.commit
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_the_sql_catalog_loses_an_answer() {
    // Staging, landing.
    for commit in 0..2 {
        let (house, request) = house_with_one().await;
        let hook = Arc::new(LosesAnswer { commit, seen: AtomicUsize::new(0) });
        let catalog = House::catalog_in(house.dir.path(), &house.clock, false).await;
        let catalog = Arc::new(catalog.with_hook(Arc::clone(&hook) as Arc<dyn CommitHook>));
        let worker = House::worker_over(&house.dir, catalog, &house.ledger, &house.clock, "unlucky");
        drain(&worker).await;
        assert!(hook.seen.load(Ordering::SeqCst) > commit);
        house.landed_once(request).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_an_unknown_landing_is_settled_when_the_catalog_answers_again() {
    for (act, outcomes) in
        [(Do::ApplyThenFallSilent, 1), (Do::FallSilentBeforeApplying, 2)] as [(Do, usize); 2]
    {
        let (house, request) = house_with_one().await;
        let (catalog, worker) = house.misled_worker();
        catalog.next(Kind::Landing, act);
        work(&worker).await.unwrap_err();
        assert_eq!(house.state(request).await, "unknown");
        let intents = house.ledger.open_intents().await.unwrap();
        assert_eq!(intents[0].state, LandingState::Unknown);
        // Nothing of the table moves meanwhile, and nobody is failed for it.
        house.append_on_new("ingest/b", &[order(5, 22)]).await;
        let other = house.enqueue("ingest/b").await;
        work(&worker).await.unwrap_err();
        assert_eq!(house.state(other).await, "held(catalog-unavailable)", "its owner sees why it waits");

        catalog.be_silent(false);
        // A successor does it as well as the worker that lost the answer.
        drain(&house.worker).await;
        assert_eq!([house.state(request).await, house.state(other).await], ["landed", "landed"]);
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
        assert_eq!(house.request(request).await.attempts as usize, outcomes, "trains of the first request");
        house.assert_nothing_left().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_a_target_with_an_unknown_landing_is_held() {
    let (house, request) = house_with_one().await;
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::LoseBeforeApplying);
    catalog.always(Kind::Removal, || Do::LoseBeforeApplying);
    house.append_on_new("ingest/b", &[order(5, 22)]).await;
    drain(&worker).await;
    assert_eq!(house.state(request).await, "unknown");
    let other = house.enqueue("ingest/b").await;
    drain(&worker).await;
    assert_eq!(house.state(other).await, "held(table-held)");
    assert_eq!(house.keys("main").await, [1, 2, 3]);

    catalog.be_honest();
    drain(&worker).await;
    assert_eq!([house.state(request).await, house.state(other).await], ["landed", "landed"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    house.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_whoever_removes_the_fence_forbids_the_landing() {
    let (house, request) = house_with_one().await;
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::First(remove_the_fence(&house.catalog)));
    drain(&worker).await;
    house.landed_once(request).await;
    assert_eq!(catalog.commits(Kind::Staging), 2, "staged again under a new name");
    assert_eq!(house.request(request).await.attempts, 2);
}

/// The worker died after it wrote the intent, and the fence was removed by hand.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l5_a_successor_settles_an_intent_whose_fence_is_gone() {
    let (house, request) = house_with_one().await;
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::FallSilentBeforeApplying);
    work(&worker).await.unwrap_err();
    remove_the_fence(&house.catalog).await;
    drain(&house.worker).await;
    house.landed_once(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_landed_then_rolled_back_is_never_retried_by_itself() {
    let (house, request) = house_with_one().await;
    let planned = house.head("main").await.unwrap();
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::ApplyThenFallSilent);
    work(&worker).await.unwrap_err();
    let landed = house.head("main").await.unwrap();
    by_hand(&house.catalog, |table| {
        let main = table.facts.refs[&main_branch()].clone();
        Update::SetRef(mergeberg_kernel::facts::RefFact { snapshot_id: planned, ..main })
    })
    .await;
    house.append_on_new("ingest/b", &[order(5, 22)]).await;
    let other = house.enqueue("ingest/b").await;

    drain(&house.worker).await;
    let row = house.request(request).await;
    assert_eq!((row.state.to_string().as_str(), row.landed_snapshot), ("landed", Some(landed)));
    assert_eq!(house.keys("main").await, [1, 2, 3], "it is not published again");
    assert_eq!(house.state(other).await, "held(target-rewound)");
    assert!(house.ledger.open_intents().await.unwrap().is_empty());

    // An operator vouches for the head; then the queue goes on.
    let (table, uuid) = (house.table.clone(), house.loaded().await.facts.uuid.clone());
    let ann = Principal::new("ann");
    house
        .ledger
        .adopt_head(&table, &uuid, &main_branch(), planned, &ann, "rolled back", house.now())
        .await
        .unwrap();
    drain(&house.worker).await;
    assert_eq!(house.state(other).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o26_a_catalog_that_always_reports_a_conflict_is_given_up_within_a_bound() {
    for kind in [Kind::Staging, Kind::Landing] {
        let (house, request) = house_with_one().await;
        let (catalog, worker) = house.misled_worker();
        catalog.always(kind, || Do::SayPointerMoved);
        drain(&worker).await;
        assert_eq!(house.state(request).await, "held(catalog-unavailable)", "{kind:?}");
        assert!(catalog.commits(kind) <= 3, "{kind:?}: {} times", catalog.commits(kind));
        house.assert_nothing_left().await;

        catalog.be_honest();
        drain(&worker).await;
        house.landed_once(request).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o26_a_refusal_after_a_real_move_is_no_end() {
    for kind in [Kind::Staging, Kind::Landing] {
        let (house, request) = house_with_one().await;
        let (catalog, worker) = house.misled_worker();
        let stranger = house.stranger_appends("main", 9, 23);
        catalog.next(kind, Do::FirstThenRefuse(stranger, "400: main is not at the expected snapshot"));
        drain(&worker).await;
        assert_eq!(house.state(request).await, "landed", "{kind:?}");
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
        house.assert_nothing_left().await;
    }
}

/// Rule L8: other branches are written all the time; only the table's pointer moves, not the target.
#[tokio::test(flavor = "multi_thread")]
async fn writers_of_other_branches_do_not_void_a_staged_train() {
    let (house, request) = house_with_one().await;
    house.branch("feature/x").await;
    let (catalog, worker) = house.misled_worker();
    for id in 50..55 {
        catalog.next(Kind::Landing, Do::First(house.stranger_appends("feature/x", id, 25)));
    }
    drain(&worker).await;
    house.landed_once(request).await;
    assert_eq!((catalog.commits(Kind::Staging), catalog.commits(Kind::Landing)), (1, 6));
    assert_eq!(house.keys("feature/x").await, [1, 2, 3, 50, 51, 52, 53, 54]);
}

/// Rule L8: after some heads lost in a row the operator is asked for quiet, and the worker does not spin.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l8_a_target_that_never_rests_is_told() {
    let (house, request) = house_with_one().await;
    let (catalog, worker) = house.misled_worker();
    for id in 50..60 {
        catalog.next(Kind::Landing, Do::First(house.stranger_appends("main", id, 25)));
    }
    drain(&worker).await;
    assert_eq!(house.state(request).await, "held(head-keeps-moving)");
    assert_eq!(catalog.commits(Kind::Landing), 5);
    let uuid = house.loaded().await.facts.uuid.clone();
    // The stranger goes on until it rests; the queue takes every chance that it gets.
    for _ in 0..6 {
        drain(&worker).await;
    }
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59]);
    assert_eq!(house.ledger.foreign(&uuid, &main_branch()).await.unwrap().len(), 10, "each is a bypass");
    house.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o29_a_train_validated_on_another_head_does_not_land() {
    let (house, request) = house_with_one().await;
    let (catalog, worker) = house.misled_worker();
    // S3 brings the very key that the candidate adds.
    catalog.next(Kind::Landing, Do::First(house.stranger_appends("main", 4, 22)));
    drain(&worker).await;
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_two_first_publications_both_count() {
    let house = House::empty(ORDERS_POLICY).await;
    house.append("ingest/a", &[order(1, 20)]).await;
    house.append("ingest/b", &[order(2, 20)]).await;
    let requests = [house.enqueue("ingest/a").await, house.enqueue("ingest/b").await];
    let (catalog, worker) = house.misled_worker();
    // And a stranger is faster than both.
    catalog.next(Kind::Landing, Do::First(house.stranger_appends("main", 9, 20)));
    drain(&worker).await;
    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    assert_eq!(house.keys("main").await, [1, 2, 9]);
    house.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_a_catalog_that_ignores_the_condition_is_found_out() {
    let house = House::empty(ORDERS_POLICY).await;
    house.append("ingest/a", &[order(1, 20)]).await;
    let request = house.enqueue("ingest/a").await;
    let (catalog, worker) = house.misled_worker();
    catalog.next(Kind::Landing, Do::FirstThenIgnoreTarget(house.stranger_appends("main", 9, 20)));
    drain(&worker).await;
    assert_eq!(house.state(request).await, "unknown", "the stranger's rows are lost: that is no success");
    assert_eq!(house.ledger.open_intents().await.unwrap().len(), 1, "the target is held");
}

/// Two workers over one ledger; the first stands still before one of its commits while its lease ends.
struct Overtaken {
    catalog: Arc<Scripted>,
    worker: Worker,
    reached: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl Overtaken {
    fn before(house: &House, kind: Kind) -> Self {
        let (catalog, worker) = house.misled_worker();
        let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
        catalog.next(
            kind,
            Do::First(Box::pin(async move {
                tell.notify_one();
                wait.notified().await;
            })),
        );
        Self { catalog, worker, reached, go_on }
    }

    /// Runs the first worker; `meanwhile` it stands still, its lease over.
    async fn while_it_stands(&self, house: &House, meanwhile: impl AsyncFnOnce()) {
        let second = async {
            self.reached.notified().await;
            house.advance(2 * LEASE_MS);
            meanwhile().await;
            self.go_on.notify_one();
        };
        let (ended, ()) = tokio::join!(work(&self.worker), second);
        assert_eq!(ended.unwrap(), Ended::Deposed);
        assert!(self.catalog.is_played());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o06_two_workers_publish_one_branch_once() {
    for kind in [Kind::Staging, Kind::Landing] {
        let (house, request) = house_with_one().await;
        let first = Overtaken::before(&house, kind);
        first
            .while_it_stands(&house, async || {
                drain(&house.worker).await;
                house.landed_once(request).await;
            })
            .await;
        house.landed_once(request).await;
        assert_eq!(house.ledger.receipts(0, i64::MAX).await.unwrap().len(), 1, "{kind:?}");
    }
}

/// Rule R7: the staging commit of a deposed worker comes after its train was given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_train_that_is_staged_too_late_is_swept() {
    let (house, request) = house_with_one().await;
    let uuid = house.loaded().await.facts.uuid.clone();
    let first = Overtaken::before(&house, Kind::Staging);
    first
        .while_it_stands(&house, async || {
            let epoch = house.ledger.lead("second", LEASE_MS, house.now()).await.unwrap().unwrap();
            let trains = house.ledger.unfinished_trains(&uuid).await.unwrap();
            let dropped = mergeberg::ledger::TrainStatus::Dropped;
            house.ledger.set_train_status(epoch, &trains[0].train, dropped).await.unwrap();
            let back = mergeberg::ledger::Change::new(request, RequestEvent::Requeue);
            house.ledger.apply(Some(epoch), &[back], house.now()).await.unwrap();
            house.ledger.cancel(request, &Principal::new("ann"), house.now()).await.unwrap();
            house.ledger.release(epoch).await.unwrap();
        })
        .await;
    let staged = house.refs().await.into_iter().filter(|r| r.starts_with("mergeberg/tmp/")).count();
    assert_eq!(staged, 1, "it was staged all the same");
    drain(&house.worker).await;
    assert_eq!(house.refs().await, ["ingest/a", "main"]);
    house.assert_nothing_left().await;
}
