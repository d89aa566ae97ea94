//! Sets over REST catalogs: `transactions/commit`, whose answer holds no tables, and servers that misbehave.

use std::sync::Arc;
use std::time::Duration;

use mergeberg::cli::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use mergeberg::cli::revert::{RevertArgs, RevertContext, revert};
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::rest_catalog::RestCatalog;
use mergeberg::worker::run::RunOptions;
use mergeberg_kernel::ids::{Principal, RequestId, TableName};

use crate::support::fault_server::{Ask, Do, Manners};
use crate::support::mall::{ITEMS, RELEASES, Reader, policy};
use crate::support::shop::Shop;
use crate::support::{House, ORDERS, branch, drain, main_branch, order};

/// ORD and ITEMS behind a fault server, with a set of both that cannot be fast-forwarded.
struct Pair {
    shop: Shop,
    items: House<RestCatalog>,
    set: Vec<RequestId>,
}

impl Pair {
    async fn with_set(manners: Manners) -> Self {
        let mut pair = Self::open(manners).await;
        pair.set = pair.orders().enqueue_set(&[pair.orders(), &pair.items], "release/1").await;
        pair
    }

    async fn open(manners: Manners) -> Self {
        let shop = Shop::orders(manners).await;
        std::fs::write(shop.house.dir.path().join("policies/orders.toml"), policy(ORDERS, RELEASES)).unwrap();
        let name: TableName = ITEMS.parse().unwrap();
        shop.server.create_table(&name, &House::orders_definition());
        let items = shop.house.seen_as(name, &policy(ITEMS, RELEASES));
        items.append("main", &[order(1, 20), order(2, 21)]).await;
        for house in [&*shop.house, &items] {
            house.append_on_new("release/1", &[order(50, 22)]).await;
            house.append("main", &[order(1_050, 25)]).await;
        }
        Self { shop, items, set: Vec::new() }
    }

    fn orders(&self) -> &House<RestCatalog> {
        &self.shop.house
    }

    fn both(&self) -> [&House<RestCatalog>; 2] {
        [self.orders(), &self.items]
    }

    async fn reader(&self) -> Reader {
        let catalog = Arc::new(self.shop.server.client().await);
        Reader::watch(catalog, &self.orders().table, &self.items.table).await
    }

    async fn landed_once(&self, what: &str) {
        let told = format!("{:?}", self.orders().request(self.set[0]).await.detail);
        assert_eq!(self.orders().states(&self.set).await, ["landed"; 2], "{what}: {told}");
        for house in self.both() {
            assert_eq!(house.keys("main").await.iter().filter(|key| **key == 50).count(), 1, "{what}");
            assert_eq!(house.head("release/1").await, None, "{what}");
            house.assert_sound().await;
            let uuid = house.loaded().await.facts.uuid.clone();
            assert!(house.ledger.unfinished_trains(&uuid).await.unwrap().is_empty(), "{what}");
        }
        assert!(self.orders().ledger.open_intents().await.unwrap().is_empty(), "{what}");
        let receipts = self.orders().ledger.receipts(0, i64::MAX).await.unwrap();
        assert_eq!(receipts.iter().filter(|r| r.intent.set == Some(self.set[0])).count(), 2, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_lands_by_one_transaction_and_no_reader_sees_half() {
    let pair = Pair::with_set(Manners { prefix: Some("ws"), ..Manners::default() }).await;
    let reader = pair.reader().await;
    drain(&pair.orders().worker).await;
    assert_eq!(reader.ends().await, Vec::<String>::new());
    pair.landed_once("quiet").await;
    assert_eq!(pair.shop.server.requests(Ask::Transaction).len(), 1);
    assert_eq!(
        pair.shop.server.requests(Ask::Landing).iter().filter(|r| r.body.contains("mergeberg/tmp")).count(),
        0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_taken_back_by_one_transaction() {
    for act in [None, Some(Do::ActThenClose), Some(Do::Say(503))] {
        let pair = Pair::with_set(Manners::default()).await;
        drain(&pair.orders().worker).await;
        pair.landed_once("there").await;
        let revert = pair.orders().revert_set(pair.set[0]).await;
        if let Some(act) = act {
            pair.shop.server.next(Ask::Transaction, act);
        }
        let reader = pair.reader().await;
        drain(&pair.orders().worker).await;
        assert_eq!(reader.ends().await, Vec::<String>::new(), "{act:?}");
        assert_eq!(pair.orders().states(&revert).await, ["landed"; 2], "{act:?}");
        for house in pair.both() {
            let keys = house.keys("main").await;
            assert!(keys.starts_with(&[1, 2]) && !keys.contains(&50) && keys.contains(&1_050), "{act:?}");
            assert!(house.refs().await.iter().all(|name| !name.starts_with("mergeberg/")), "{act:?}");
            house.assert_sound().await;
        }
    }
}

/// Case O24 for several tables: whatever becomes of the answer, each of them is read.
#[tokio::test(flavor = "multi_thread")]
async fn case_o24_a_lost_answer_of_a_transaction_neither_loses_nor_doubles() {
    for act in [
        Do::ActThenSay(503),
        Do::ActThenSay(500),
        Do::ActThenClose,
        Do::ActTwice,
        Do::Say(503),
        Do::Say(504),
        Do::Close,
        Do::SayYes,
    ] {
        let pair = Pair::with_set(Manners::default()).await;
        pair.shop.server.next(Ask::Transaction, act);
        let reader = pair.reader().await;
        drain(&pair.orders().worker).await;
        assert_eq!(reader.ends().await, Vec::<String>::new(), "{act:?}");
        assert!(pair.shop.server.is_played(), "{act:?}");
        pair.landed_once(&format!("{act:?}")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_with_idempotency_keys_a_lost_transaction_is_one() {
    for act in [Do::ActThenSay(503), Do::ActThenClose, Do::Say(503)] {
        let manners = Manners { idempotency_keys: true, ..Manners::default() };
        let pair = Pair::with_set(manners).await;
        pair.shop.server.next(Ask::Transaction, act);
        drain(&pair.orders().worker).await;
        pair.landed_once(&format!("{act:?}")).await;
        let sent = pair.shop.server.requests(Ask::Transaction);
        assert_eq!(sent.len(), 2, "{act:?}: sent again under its key, and no second set");
        assert_eq!(sent[0].headers["idempotency-key"], sent[1].headers["idempotency-key"]);
        assert_eq!(pair.orders().request(pair.set[0]).await.attempts, 1);
    }
}

/// Rule L3: one fence that is gone forbids the landing of all tables.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_transaction_that_comes_late_is_refused_by_its_fences() {
    let pair = Pair::with_set(Manners::default()).await;
    pair.shop.server.next(Ask::Transaction, Do::SayThenActLate(504));
    drain(&pair.orders().worker).await;
    pair.landed_once("late").await;
    assert_eq!(pair.shop.server.act_late(), [409]);
    pair.landed_once("late, and refused").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_transaction_that_comes_before_its_fence_is_removed_is_found() {
    let pair = Pair::with_set(Manners::default()).await;
    pair.shop.server.next(Ask::Transaction, Do::SayThenActLate(504));
    let server = Arc::clone(&pair.shop.server);
    pair.shop.server.first(Ask::Removal, async move {
        assert_eq!(server.act_late(), [204]);
    });
    drain(&pair.orders().worker).await;
    pair.landed_once("just in time").await;
    assert_eq!(pair.orders().request(pair.set[0]).await.attempts, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o30_a_table_that_moved_is_told_by_409_and_none_moves() {
    let pair = Pair::with_set(Manners::default()).await;
    let items = Arc::new(pair.shop.house.seen_as(ITEMS.parse().unwrap(), &policy(ITEMS, RELEASES)));
    let stranger = Arc::clone(&items);
    pair.shop.server.first(Ask::Transaction, async move {
        stranger.append("main", &[order(77, 26)]).await;
    });
    let reader = pair.reader().await;
    drain(&pair.orders().worker).await;
    // The stranger moved one of them, which is not half of a set.
    assert!(reader.ends().await.iter().all(|half| half.contains("Some")));
    pair.landed_once("after a stranger").await;
    assert_eq!(pair.orders().request(pair.set[0]).await.attempts, 2);
    assert!(items.keys("main").await.contains(&77));
}

/// Case O30: a server for which several tables are a loop. Half a set is never believed landed: both tables are held
/// until somebody has made it whole.
#[tokio::test(flavor = "multi_thread")]
async fn case_o30_half_a_transaction_holds_all_of_its_tables() {
    for status in [204, 409, 500] {
        let pair = Pair::with_set(Manners::default()).await;
        pair.shop.server.next(Ask::Transaction, Do::ActOnOneThenSay(status));
        let (_stop, stopped) = tokio::sync::watch::channel(false);
        let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: 60_000 };
        let _ = pair.orders().worker.run(options, stopped).await;
        assert_eq!(pair.orders().states(&pair.set).await, ["unknown"; 2], "{status}");
        for house in pair.both() {
            house.append_on_new("ingest/a", &[order(61, 24)]).await;
        }
        let behind = [pair.orders().enqueue("ingest/a").await, pair.items.enqueue("ingest/a").await];
        drain(&pair.orders().worker).await;
        assert_eq!(pair.orders().states(&behind).await, ["held(table-held)"; 2], "{status}");

        // The operator gives the other table its candidate, and takes the temporary branch away.
        let table = pair.items.loaded().await;
        let fence =
            table.facts.refs.keys().find(|r| r.as_str().starts_with("mergeberg/tmp/")).unwrap().clone();
        let tail = table.facts.head(&fence).unwrap();
        crate::support::shop::by_hand(&pair.items, crate::support::shop::set("main", tail)).await;
        crate::support::shop::by_hand(&pair.items, mergeberg_kernel::commit::Update::RemoveRef(fence)).await;
        drain(&pair.orders().worker).await;
        assert_eq!(pair.orders().states(&pair.set).await, ["landed"; 2], "{status}");
        assert_eq!(pair.orders().states(&behind).await, ["landed"; 2], "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o30_a_catalog_without_transactions_is_refused_at_enqueue() {
    let pair = Pair::open(Manners { one_table_at_a_time: true, ..Manners::default() }).await;
    assert!(!pair.orders().catalog.capabilities().multi_table_commits);
    let error = pair.orders().ask_set(&pair.both(), "release/1", None).await.unwrap_err();
    assert_eq!(error.code.code(), "no-multi-table-commits");
    assert!(pair.orders().ledger.requests(&Default::default()).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_of_a_set_is_one_of_the_specification() {
    let manners = Manners { prefix: Some("ws"), idempotency_keys: true, ..Manners::default() };
    let pair = Pair::with_set(manners).await;
    let Some(mut python) = crate::support::python::Python::start(pair.orders().dir.path()) else { return };
    drain(&pair.orders().worker).await;
    pair.landed_once("checked").await;
    let requests: Vec<serde_json::Value> = pair
        .shop
        .server
        .all_requests()
        .into_iter()
        .filter(|(ask, _)| *ask != Ask::Making)
        .map(|(_, r)| {
            serde_json::json!({ "method": r.method, "path": r.path, "query": r.query, "headers": r.headers, "body": r.body })
        })
        .collect();
    let answer = python.ok("check_requests", serde_json::json!({ "requests": requests, "prefix": "ws" }));
    assert_eq!(answer["problems"], serde_json::json!([]));
    assert_eq!(answer["operations"]["commitTransaction"], 1);
}

/// Orders whose items are held at the head that the check has read.
const FENCED: &str = r#"
[[check]]
id = "item-known"
type = "referential"
columns = ["order_id"]
references = { table = "shop.items", columns = ["order_id"], fence = true }

[[class]]
name = "release"
prefix = "release/"
overlap = "allow"
checks = ["item-known"]
after-landing = "drop"
"#;

/// Rule E7: the landing of one table, as a transaction that requires another one's head.
#[tokio::test(flavor = "multi_thread")]
async fn rule_e7_a_dimension_is_held_by_the_landing() {
    let pair = Pair::open(Manners { prefix: Some("ws"), ..Manners::default() }).await;
    let policies = pair.orders().dir.path().join("policies/orders.toml");
    std::fs::write(policies, policy(ORDERS, FENCED)).unwrap();
    pair.items.append("main", &[order(50, 22)]).await;
    let request = pair.orders().enqueue("release/1").await;
    let stranger = Arc::new(pair.shop.house.seen_as(ITEMS.parse().unwrap(), &policy(ITEMS, RELEASES)));
    let moves = Arc::clone(&stranger);
    pair.shop.server.first(Ask::Transaction, async move {
        moves.append("main", &[order(51, 22)]).await;
    });
    drain(&pair.orders().worker).await;
    assert_eq!(pair.orders().state(request).await, "landed");
    assert_eq!(pair.orders().request(request).await.attempts, 2, "what was read had moved");
    assert_eq!(pair.shop.server.requests(Ask::Transaction).len(), 2);
    pair.orders().assert_sound().await;

    let Some(mut python) = crate::support::python::Python::start(pair.orders().dir.path()) else { return };
    let sent: Vec<serde_json::Value> = pair
        .shop
        .server
        .requests(Ask::Transaction)
        .into_iter()
        .map(|r| {
            serde_json::json!({ "method": r.method, "path": r.path, "query": r.query, "headers": r.headers, "body": r.body })
        })
        .collect();
    assert!(
        sent[0]["body"].as_str().unwrap().contains("\"updates\":[]"),
        "items are required and not changed"
    );
    let answer = python.ok("check_requests", serde_json::json!({ "requests": sent, "prefix": "ws" }));
    assert_eq!(answer["problems"], serde_json::json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_s4_a_fence_is_refused_at_enqueue_where_the_catalog_has_none() {
    let pair = Pair::open(Manners { one_table_at_a_time: true, ..Manners::default() }).await;
    pair.orders().append_on_new("release/0", &[order(40, 22)]).await;
    let landed = pair.orders().enqueue("release/0").await;
    pair.orders().drain().await;
    assert_eq!(pair.orders().state(landed).await, "landed");
    let policies = pair.orders().dir.path().join("policies/orders.toml");
    std::fs::write(policies, policy(ORDERS, FENCED)).unwrap();
    let policies = pair.orders().worker.policies.read().unwrap();
    let context = EnqueueContext {
        catalog: pair.orders().catalog.as_ref(),
        ledger: &pair.orders().ledger,
        policies: &policies,
        now_ms: pair.orders().now(),
    };
    let args = EnqueueArgs {
        table: pair.orders().table.clone(),
        source: branch("release/1"),
        target: main_branch(),
        snapshot: None,
        class: None,
        idempotency_key: None,
        principal: Principal::new("test"),
    };
    let error = enqueue(context, &args).await.unwrap_err();
    assert_eq!(error.code.code(), "no-multi-table-commits");
    assert!(error.message.contains("check 'item-known' has a fence"), "{}", error.message);

    // A revert is a request as any other.
    let args = RevertArgs {
        request: landed,
        reason: Some("bad load".to_owned()),
        class: None,
        idempotency_key: None,
        principal: Principal::new("test"),
    };
    let (store, random) = (ManifestStore::new(64 << 20), rand::random::<u64>);
    let error =
        revert(RevertContext { enqueue: context, store: &store, random: &random }, &args).await.unwrap_err();
    assert_eq!(error.code.code(), "no-multi-table-commits");
    assert_eq!(pair.orders().ledger.requests(&Default::default()).await.unwrap().len(), 1);
}

/// Over Apache Polaris, whose commit to several tables is one transaction of its metastore.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_lands_over_polaris_and_no_reader_sees_half() {
    let Some((orders, polaris, _)) = House::over_polaris(&policy(ORDERS, RELEASES)).await else { return };
    let name: TableName = ITEMS.parse().unwrap();
    polaris.create_table(&name, &House::orders_definition()).await;
    // Both tables by one who may write both.
    let all = Arc::new(polaris.client().await);
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join("policies")).unwrap();
    std::fs::write(dir.path().join("policies/orders.toml"), policy(ORDERS, RELEASES)).unwrap();
    let (ledger, clock) = (orders.ledger.clone(), Arc::clone(&orders.clock));
    let both = House::assemble(dir, all, ledger, clock, orders.table.clone());
    let items = both.seen_as(name, &policy(ITEMS, RELEASES));
    items.append("main", &[order(1, 20)]).await;
    for house in [&both, &items] {
        house.append_on_new("release/1", &[order(50, 22)]).await;
        house.append("main", &[order(90, 25)]).await;
    }
    let set = both.enqueue_set(&[&both, &items], "release/1").await;
    let reader = Reader::watch(Arc::new(polaris.client().await), &both.table, &items.table).await;
    both.drain().await;
    assert_eq!(reader.ends().await, Vec::<String>::new());
    assert_eq!(both.states(&set).await, ["landed"; 2]);
    for house in [&both, &items] {
        assert!(house.keys("main").await.contains(&50));
        house.assert_sound().await;
    }
}

/// Over the Iceberg project's own server.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_lands_over_the_reference_server() {
    let Some((orders, server)) = House::over_rest(&policy(ORDERS, RELEASES)).await else { return };
    let name: TableName = ITEMS.parse().unwrap();
    server.create_table(&name, &House::orders_definition()).await;
    let items = orders.seen_as(name, &policy(ITEMS, RELEASES));
    items.append("main", &[order(1, 20)]).await;
    for house in [&orders, &items] {
        house.append_on_new("release/1", &[order(50, 22)]).await;
        house.append("main", &[order(90, 25)]).await;
    }
    let set = orders.enqueue_set(&[&orders, &items], "release/1").await;
    orders.drain().await;
    assert_eq!(orders.states(&set).await, ["landed"; 2]);
    for house in [&orders, &items] {
        assert!(house.keys("main").await.contains(&50));
        house.assert_sound().await;
    }
}
