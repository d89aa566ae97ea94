//! Sources without a branch: bare staged snapshots (write-audit-publish). The queue keeps each by a branch of its
//! own and lets go of it at the request's end.

use mergeberg::cli::enqueue::EnqueueContext;
use mergeberg::cli::staged::{Staged, StagedArgs, enqueue_staged};
use mergeberg::error::UserError;
use mergeberg::ledger::Enqueued;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::data_files::DataFileWriter;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter, new_snapshot_id};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::RefKind;
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId};
use mergeberg_kernel::lineage::{PUBLISHED_WAP_ID, WAP_ID};
use serde_json::Value;

use crate::binary::Shop;
use crate::support::engine_table::{Expected, Oracle};
use crate::support::{House, ORDERS_POLICY, Order, batch, branch, main_branch, order};

const DAY_MS: i64 = 24 * 3600 * 1000;

impl<C: Catalog + 'static> House<C> {
    /// A snapshot on main's head that no ref names, under a WAP id unless that is empty.
    pub async fn stage_bare(&self, wap: &str, rows: &[Order]) -> SnapshotId {
        self.stage_bare_through(self.catalog.as_ref(), wap, rows).await
    }

    /// Through a client of somebody else.
    pub async fn stage_bare_through(&self, catalog: &dyn Catalog, wap: &str, rows: &[Order]) -> SnapshotId {
        let table = catalog.load(&self.table).await.unwrap();
        let facts = &table.facts;
        let files =
            DataFileWriter::write_batches(&table, facts.current_schema_id, vec![batch(rows)]).await.unwrap();
        let summary = (!wap.is_empty()).then(|| (WAP_ID.to_owned(), wap.to_owned()));
        let id = new_snapshot_id(facts, || (self.writer.random)());
        let change = SnapshotChange {
            id,
            label: "append".to_owned(),
            add: files.into_iter().map(AddedFile::from).collect(),
            remove: Default::default(),
            add_deletes: Vec::new(),
            remove_deletes: Default::default(),
            summary: summary.into_iter().collect(),
            now_ms: self.now(),
            schema_id: facts.current_schema_id,
        };
        let parent = facts.head(&main_branch()).and_then(|id| facts.snapshots.get(id));
        let mut writer = SnapshotWriter::on(&ManifestStore::new(64 << 20), &table, parent).await.unwrap();
        let staged = writer.add(change).await.unwrap();
        let outcome = catalog.commit(&table, &[], vec![Update::AddSnapshot(staged)]).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
        id
    }

    async fn ask_staged(&self, staged: Staged, key: Option<&str>) -> Result<Enqueued, UserError> {
        let args = StagedArgs {
            table: self.table.clone(),
            staged,
            target: main_branch(),
            class: None,
            idempotency_key: key.map(str::to_owned),
            principal: Principal::new("test"),
        };
        let policies = self.worker.policies.read().unwrap();
        let context = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: self.now(),
        };
        enqueue_staged(context, &args).await
    }

    pub async fn enqueue_staged(&self, staged: Staged) -> RequestId {
        match self.ask_staged(staged, None).await.unwrap() {
            Enqueued::New(row) | Enqueued::Existing(row) => row.id,
            Enqueued::KeyConflict(row) => panic!("no key was given, but request {} has it", row.id),
        }
    }

    async fn refusal(&self, staged: Staged) -> String {
        self.ask_staged(staged, None).await.unwrap_err().code.to_string()
    }

    fn staged_ref(&self, id: SnapshotId) -> String {
        format!("mergeberg/staged/{}/{id}", self.ledger.queue_id())
    }
}

fn snapshot(id: SnapshotId) -> Staged {
    Staged::Snapshot(id)
}

pub fn wap(id: &str) -> Staged {
    Staged::Wap(id.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staged_snapshot_is_kept_landed_and_let_go_of() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("audit-7", &[order(4, 22)]).await;
    house.append("main", &[order(9, 25)]).await;
    let request = house.enqueue_staged(wap("audit-7")).await;

    // Rules R2, R3: explicit retention, counted from the snapshot's age.
    let table = house.loaded().await;
    let keeper = &table.facts.refs[&branch(&house.staged_ref(id))];
    let RefKind::Branch { min_snapshots_to_keep, max_snapshot_age_ms } = keeper.kind else { panic!("a tag") };
    assert_eq!((keeper.snapshot_id, min_snapshots_to_keep), (id, Some(1)));
    assert!(keeper.max_ref_age_ms.unwrap() >= 90 * DAY_MS && max_snapshot_age_ms.is_some());

    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    assert_eq!(house.refs().await, ["main"], "dropped with the landing, though the class keeps branches");
    let table = house.loaded().await;
    let head = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
    assert_eq!(head.summary.get(PUBLISHED_WAP_ID).map(String::as_str), Some("audit-7"));
    assert_eq!(head.source_snapshot_id(), Some(id));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staged_snapshot_on_the_targets_head_is_forwarded() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("", &[order(4, 22)]).await;
    let request = house.enqueue_staged(snapshot(id)).await;
    house.drain().await;
    assert_eq!(
        (house.state(request).await, house.classified(request).await),
        ("landed".into(), "fast-forward".into())
    );
    assert_eq!(house.head("main").await, Some(id));
    assert_eq!(house.refs().await, ["main"]);
    // Asked again it is told that nothing is to do, and nothing is kept for it.
    assert_eq!(house.refusal(snapshot(id)).await, "already-published");
    assert_eq!(house.refs().await, ["main"]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_command_twice_is_the_same_request() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("audit-7", &[order(4, 22)]).await;
    let first = house.enqueue_staged(wap("audit-7")).await;
    assert_eq!(house.enqueue_staged(snapshot(id)).await, first);
    // With a key, also when it has ended and its snapshot was expired.
    let other = house.stage_bare("audit-8", &[order(5, 23)]).await;
    let Enqueued::New(keyed) = house.ask_staged(wap("audit-8"), Some("run-8")).await.unwrap() else {
        panic!("there already")
    };
    house.drain().await;
    assert_eq!(house.state(keyed.id).await, "landed");
    house.commit(vec![Update::RemoveSnapshots(vec![other])]).await;
    for again in [wap("audit-8"), snapshot(other)] {
        let Enqueued::Existing(row) = house.ask_staged(again, Some("run-8")).await.unwrap() else {
            panic!("enqueued twice")
        };
        assert_eq!(row.id, keyed.id);
    }
    let taken = house.ask_staged(snapshot(id), Some("run-8")).await.unwrap_err();
    assert_eq!(taken.code.code(), "idempotency-key-conflict");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_enqueued_is_told_and_nothing_is_written() {
    let house = House::orders(ORDERS_POLICY).await;
    let on_branch = house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.stage_bare("twice", &[order(5, 22)]).await;
    house.stage_bare("twice", &[order(6, 22)]).await;
    let main = house.head("main").await.unwrap();
    let before = (house.refs().await, house.loaded().await.metadata_location.clone());
    assert_eq!(house.refusal(snapshot(SnapshotId(77))).await, "snapshot-not-found");
    assert_eq!(house.refusal(snapshot(main)).await, "already-published");
    assert_eq!(house.refusal(snapshot(on_branch)).await, "not-staged");
    assert_eq!(house.refusal(wap("twice")).await, "wap-id-ambiguous");
    assert_eq!(house.refusal(wap("twcie")).await, "snapshot-not-found");
    assert_eq!((house.refs().await, house.loaded().await.metadata_location.clone()), before);
    assert!(house.ledger.requests(&Default::default()).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_of_two_snapshots_under_one_wap_id_only_one_is_published() {
    let house = House::orders(ORDERS_POLICY).await;
    let ids =
        [house.stage_bare("twice", &[order(5, 22)]).await, house.stage_bare("twice", &[order(6, 23)]).await];
    // Both are in the queue before either has landed: they never ride one train.
    let first = house.enqueue_staged(snapshot(ids[0])).await;
    let second = house.enqueue_staged(snapshot(ids[1])).await;
    house.drain().await;
    assert_eq!(house.state(first).await, "landed");
    assert_eq!(house.state(second).await, "refused(already-published)");
    assert!(house.history(second).await.contains("held(same-source-ahead)"));
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    assert_eq!(house.refusal(snapshot(ids[1])).await, "already-published");
    assert_eq!(house.refs().await, ["main"], "what was refused is not kept any longer");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_one_that_java_published_meanwhile_is_published() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("", &[order(4, 22)]).await;
    let request = house.enqueue_staged(snapshot(id)).await;
    house.append("main", &[order(9, 25)]).await;
    house.pick("main", id, true).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "already-published");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9]);
    assert_eq!(house.refs().await, ["main"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_other_end_lets_go_of_the_snapshot_too() {
    let house = House::orders(ORDERS_POLICY).await;
    let cancelled = house.stage_bare("", &[order(4, 22)]).await;
    let request = house.enqueue_staged(snapshot(cancelled)).await;
    house.ledger.cancel(request, &Principal::new("ann"), house.now()).await.unwrap();
    // Until somebody tidies up it may be enqueued again.
    assert_eq!(house.refs().await, ["main", &house.staged_ref(cancelled)]);
    let again = house.enqueue_staged(snapshot(cancelled)).await;
    assert_ne!(again, request);
    house.ledger.cancel(again, &Principal::new("ann"), house.now()).await.unwrap();
    house.first_landing().await;
    assert_eq!(house.refs().await, ["main"]);
    assert!(
        house.loaded().await.facts.snapshots.contains(cancelled),
        "the snapshot is the writer's, and stays"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeping_branch_that_was_swept_too_early_is_set_again() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("", &[order(4, 22)]).await;
    let request = house.enqueue_staged(snapshot(id)).await;
    // As a tick between the branch and the request's row would have left it.
    house.commit(vec![Update::RemoveRef(branch(&house.staged_ref(id)))]).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.refs().await, ["main"]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r6_a_snapshot_that_another_target_waits_for_is_kept() {
    let house = House::orders(ORDERS_POLICY).await;
    let id = house.stage_bare("", &[order(4, 22)]).await;
    house.branch("dev").await;
    let request = house.enqueue_staged(snapshot(id)).await;
    let to_dev = StagedArgs {
        table: house.table.clone(),
        staged: snapshot(id),
        target: branch("dev"),
        class: None,
        idempotency_key: None,
        principal: Principal::new("test"),
    };
    let policies = house.worker.policies.read().unwrap();
    let context = EnqueueContext {
        catalog: house.catalog.as_ref(),
        ledger: &house.ledger,
        policies: &policies,
        now_ms: house.now(),
    };
    let Enqueued::New(other) = enqueue_staged(context, &to_dev).await.unwrap() else {
        panic!("there already")
    };
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.state(other.id).await, "landed");
    for name in ["main", "dev"] {
        assert_eq!(house.keys(name).await, [1, 2, 3, 4], "{name}");
    }
    assert_eq!(house.refs().await, ["dev", "main"]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_class_is_that_of_the_queues_own_prefix() {
    let policy = format!("{ORDERS_POLICY}\n[[class]]\nname = \"audited\"\nprefix = \"mergeberg/staged/\"\n");
    let house = House::orders(&policy).await;
    let id = house.stage_bare("", &[order(4, 22)]).await;
    let request = house.enqueue_staged(snapshot(id)).await;
    assert_eq!(house.request(request).await.class, "audited");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_takes_one_source_and_shows_it() {
    let shop = Shop::open().await;
    let id = shop.house.stage_bare("audit-7", &[order(4, 22)]).await;
    let enqueue = ["request", "enqueue", "--table", "shop.orders"];
    let with = |more: &[&'static str]| [&enqueue[..], more].concat();
    shop.refused(&with(&[]), 2, "usage");
    shop.refused(&with(&["--source", "a", "--wap-id", "audit-7"]), 2, "usage");
    shop.refused(&with(&["--wap-id", "audit-7", "--snapshot", "4"]), 2, "usage");
    shop.refused(&with(&["--wap-id", "audit-9"]), 3, "snapshot-not-found");
    shop.refused(&with(&["--source", "mergeberg/staged/x/4"]), 2, "invalid-argument");
    let ran = shop.run(&with(&["--wap-id", "audit-7", "--json"]));
    let row = &ran.json()["request"];
    assert_eq!(row["source"], Value::from(shop.house.staged_ref(id)));
    assert_eq!(row["pinned"], Value::from(id.0));
    shop.drain();
    assert_eq!(shop.state(RequestId(row["id"].as_i64().unwrap())).await, "landed");
    shop.refused(&with(&["--wap-id", "audit-7"]), 3, "already-published");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_spark_staged_lands_as_spark_publishes_it() {
    let house = House::engine_table("wap-staged-v2", "table = \"engine.written\"\n").await;
    let request = house.enqueue_staged(wap("audit-7")).await;
    let id = house.request(request).await.pinned;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    let table = house.loaded().await;
    let head = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
    let rows = house.lines_at(head.id).await;
    Expected::of("wap-staged-v2").assert_explains("wap-staged-v2", &rows, Oracle::LandingOrder);
    assert_eq!(head.summary.get(PUBLISHED_WAP_ID).map(String::as_str), Some("audit-7"));
    assert_eq!(head.source_snapshot_id(), Some(id));
    assert_eq!(house.refs().await, ["main"]);
}
