//! How the REST catalog's client speaks: who it says that it is, what it asks for, what it keeps in memory, and
//! what it sends again.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use mergeberg::table::catalog::{Catalog, CatalogError, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::rest_catalog::{RestCatalog, RestSettings};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{SnapshotId, TableName};
use serde_json::json;
use tempfile::TempDir;

use crate::binary::run_in;
use crate::support::child::{LONG_LEASE, real_now};
use crate::support::fault_server::{Ask, Do, FaultServer, Manners, clock_of_now};
use crate::support::shop::Shop;
use crate::support::{branch, order};

/// A server with the table `nyc.flights`, whose main is at snapshot 1.
struct Server {
    faults: FaultServer,
    clock: Arc<AtomicI64>,
    _folder: TempDir,
}

fn flights() -> TableName {
    "nyc.flights".parse().unwrap()
}

impl Server {
    async fn with(manners: Manners) -> Self {
        let folder = TempDir::new().unwrap();
        let faults = FaultServer::start(folder.path(), manners).await;
        let namespace = flights().namespace;
        faults.create_namespace(&namespace);
        faults.create_table(&flights(), &TableDefinition::default().column("id", "long", true));
        Self { faults, clock: Arc::new(AtomicI64::new(real_now())), _folder: folder }
    }

    async fn open(&self, edit: impl FnOnce(&mut RestSettings)) -> Result<RestCatalog, CatalogError> {
        let mut settings = self.faults.settings();
        edit(&mut settings);
        let clock = Arc::clone(&self.clock);
        RestCatalog::open(&settings, Arc::new(move || clock.load(Ordering::SeqCst))).await
    }

    async fn client(&self) -> RestCatalog {
        self.open(|_| ()).await.unwrap()
    }
}

fn with_client() -> Manners {
    Manners { client: Some(("queue", "s:e")), token_life_s: Some(3_600), ..Manners::default() }
}

fn known(settings: &mut RestSettings) {
    settings.credential = Some(secret("queue:s:e"));
}

fn secret(text: &str) -> mergeberg::secret::Secret {
    mergeberg::secret::Secret::new(text)
}

fn set(name: &str, at: i64) -> Vec<Update> {
    vec![Update::SetRef(RefFact {
        name: branch(name),
        snapshot_id: SnapshotId(at),
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    })]
}

fn new_name(name: &str) -> [Requirement; 1] {
    [Requirement::RefAt { name: branch(name), at: None, role: RefRole::NewName }]
}

fn first(base: &LoadedTable) -> Vec<Update> {
    let snapshot = mergeberg_kernel::commit::NewSnapshot {
        id: SnapshotId(1),
        parent: None,
        sequence_number: 1,
        timestamp_ms: base.facts.last_updated_ms + 1,
        manifest_list: format!("{}/metadata/snap-1.avro", base.facts.location),
        schema_id: base.facts.current_schema_id,
        label: "append".to_owned(),
        summary: Default::default(),
        row_range: None,
    };
    [vec![Update::AddSnapshot(snapshot)], set("main", 1)].concat()
}

async fn land_first(catalog: &RestCatalog) -> Arc<LoadedTable> {
    let base = catalog.load(&flights()).await.unwrap();
    match catalog.commit(&base, &[], first(&base)).await {
        CommitOutcome::Landed(table) => table,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn tokens_are_fetched_once_and_renewed_ahead_of_their_end() {
    let server = Server::with(with_client()).await;
    let catalog = server.open(known).await.unwrap();
    for _ in 0..3 {
        catalog.load(&flights()).await.unwrap();
    }
    assert_eq!(server.faults.tokens_handed_out(), 1);
    let asked = &server.faults.requests(Ask::Token)[0];
    assert_eq!(asked.body, "grant_type=client_credentials&client_id=queue&client_secret=s%3Ae&scope=catalog");
    assert!(!asked.headers.contains_key("authorization"));

    // An hour long; renewed in its last minute.
    server.clock.fetch_add(3_600_000 - 61_000, Ordering::SeqCst);
    catalog.load(&flights()).await.unwrap();
    assert_eq!(server.faults.tokens_handed_out(), 1);
    server.clock.fetch_add(2_000, Ordering::SeqCst);
    catalog.load(&flights()).await.unwrap();
    assert_eq!(server.faults.tokens_handed_out(), 2);
    let last = server.faults.requests(Ask::Load).pop().unwrap();
    assert_eq!(last.headers["authorization"], "Bearer token-2");
}

#[tokio::test]
async fn a_token_that_ends_early_is_replaced_and_the_commit_is_sent_again() {
    let server = Server::with(with_client()).await;
    let catalog = server.open(known).await.unwrap();
    let base = land_first(&catalog).await;

    server.faults.end_tokens();
    let outcome = catalog.commit(&base, &new_name("b"), set("b", 1)).await;

    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    assert_eq!(server.faults.tokens_handed_out(), 2);
    server.faults.end_tokens();
    catalog.load(&flights()).await.unwrap();
    assert_eq!(server.faults.tokens_handed_out(), 3);
}

#[tokio::test]
async fn a_renewal_that_fails_leaves_the_old_token_in_use() {
    let server = Server::with(with_client()).await;
    let catalog = server.open(known).await.unwrap();
    server.faults.always(Ask::Token, Do::Say(400));

    server.clock.fetch_add(3_600_000 - 30_000, Ordering::SeqCst);
    catalog.load(&flights()).await.unwrap();
    catalog.load(&flights()).await.unwrap();
    assert_eq!(server.faults.requests(Ask::Token).len(), 2, "not asked for again at once");

    server.clock.fetch_add(60_000, Ordering::SeqCst);
    let error = catalog.load(&flights()).await.unwrap_err();
    assert!(error.to_string().contains("no token could be fetched"), "{error}");
    server.faults.be_honest();
    catalog.load(&flights()).await.unwrap();
}

#[tokio::test]
async fn credentials_that_the_server_does_not_know_are_told_without_the_secret() {
    let server = Server::with(with_client()).await;
    let refused = |result: Result<RestCatalog, CatalogError>| match result {
        Ok(_) => panic!("it opened"),
        Err(error) => error.to_string(),
    };
    let wrong = refused(server.open(|s| s.credential = Some(secret("queue:hunter2"))).await);
    assert!(wrong.contains("no such client") && !wrong.contains("hunter2"), "{wrong}");
    assert!(
        wrong.ends_with("; check 'credential', 'scope' and 'oauth2-server-uri' of the catalog"),
        "{wrong}"
    );
    let nobody = refused(server.open(|_| ()).await);
    assert!(nobody.contains("401") && nobody.contains("; check 'token' or 'credential'"), "{nobody}");
    let old = refused(server.open(|s| s.token = Some(secret("t"))).await);
    assert!(old.contains("401"), "{old}");
}

#[tokio::test]
async fn a_token_and_headers_are_sent_with_every_request() {
    let server = Server::with(Manners::default()).await;
    let catalog = server
        .open(|s| {
            s.token = Some(secret("t-1"));
            s.headers.insert("X-Tenant".to_owned(), secret("a"));
        })
        .await
        .unwrap();
    land_first(&catalog).await;
    catalog.list_tables().await.unwrap();

    let all = server.faults.all_requests();
    assert!(all.len() >= 4, "{all:?}");
    for (ask, request) in all {
        assert_eq!(request.headers["authorization"], "Bearer t-1");
        assert_eq!(request.headers["x-tenant"], "a");
        // What the server gave with its configuration.
        assert_eq!(request.headers.contains_key("x-given"), ask != Ask::Config);
        assert!(request.headers["user-agent"].starts_with("mergeberg/"));
    }
}

#[tokio::test]
async fn prefix_separator_and_warehouse_are_as_the_server_says() {
    let manners = Manners { prefix: Some("ws/lake"), separator: Some("%2E"), ..Manners::default() };
    let server = Server::with(manners).await;
    let deep = TableName { namespace: vec!["a".into(), "b/c".into()], name: "x/y z".into() };
    for levels in 1..=2 {
        server.faults.create_namespace(&deep.namespace[..levels]);
    }
    server.faults.create_table(&deep, &TableDefinition::default().column("id", "long", true));
    let catalog = server.open(|s| s.warehouse = Some("prod & co".to_owned())).await.unwrap();

    assert_eq!(server.faults.requests(Ask::Config)[0].query["warehouse"], "prod & co");
    assert_eq!(catalog.load(&deep).await.unwrap().facts.name, deep);
    let path = &server.faults.requests(Ask::Load)[0].path;
    assert_eq!(path, "/v1/ws/lake/namespaces/a%2Eb%2Fc/tables/x%2Fy%20z");
    assert_eq!(catalog.list_tables().await.unwrap(), [deep, flights()]);
}

#[tokio::test]
async fn lists_are_read_page_by_page_and_to_every_depth() {
    let server = Server::with(Manners { page: Some(2), ..Manners::default() }).await;
    let mut expected = vec![flights()];
    for number in 0..5 {
        let name: TableName = format!("nyc.t{number}").parse().unwrap();
        server.faults.create_table(&name, &TableDefinition::default().column("id", "long", true));
        expected.push(name);
        let namespace = ["deep".to_owned(), format!("n{number}")];
        server.faults.create_namespace(&namespace);
    }
    server.faults.create_namespace(&["deep".to_owned()]);
    let name: TableName = "deep.n4.t".parse().unwrap();
    server.faults.create_table(&name, &TableDefinition::default().column("id", "long", true));
    expected.push(name);
    // Cannot be written in our form, where dots part.
    let dotted = TableName { namespace: vec!["nyc".into()], name: "a.b".into() };
    server.faults.create_table(&dotted, &TableDefinition::default().column("id", "long", true));
    expected.sort();

    assert_eq!(server.client().await.list_tables().await.unwrap(), expected);
}

/// A command that looks at heads gets no history sent, and one that asks for ancestry gets it all.
#[tokio::test(flavor = "multi_thread")]
async fn history_is_loaded_only_where_it_is_asked_for() {
    let shop = Shop::orders(Manners::default()).await;
    let house = &shop.house;
    let first = house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.append("ingest/a", &[order(5, 22)]).await;
    let all = house.worker.catalog.load(&house.table).await.unwrap();
    let catalog = RestCatalog::open(&shop.server.settings(), clock_of_now()).await.unwrap();

    let heads = catalog.load_refs(&house.table).await.unwrap();
    assert_eq!((heads.facts.snapshots.len(), all.facts.snapshots.len()), (2, 4));
    assert_eq!(heads.facts.refs, all.facts.refs);
    assert_eq!(heads.facts.last_sequence_number, all.facts.last_sequence_number);
    assert_eq!(
        catalog.load(&house.table).await.unwrap().facts,
        all.facts,
        "a part is never taken for the whole"
    );
    let asked: Vec<_> =
        shop.server.requests(Ask::Load).iter().map(|r| r.query.get("snapshots").cloned()).collect();
    assert_eq!(asked[asked.len() - 2..], [Some("refs".to_owned()), None]);
    assert_eq!(catalog.load_refs(&house.table).await.unwrap().facts, all.facts, "it is in memory now");

    house.configure_for(&format!("type = \"rest\"\nuri = \"{}\"", shop.server.settings().uri), LONG_LEASE);
    let part = first.0.to_string();
    let enqueue = ["request", "enqueue", "--table", "shop.orders", "--source", "ingest/a"];
    for (more, expected) in [(&[][..], Some("refs")), (&["--snapshot", &part][..], None)] {
        let before = shop.server.requests(Ask::Load).len();
        assert_eq!(run_in(house.dir.path(), &[&enqueue, more].concat()).code, 0);
        let loads = &shop.server.requests(Ask::Load)[before..];
        assert_eq!(loads.len(), 1);
        assert_eq!(loads[0].query.get("snapshots").map(String::as_str), expected);
    }
}

#[tokio::test]
async fn an_unchanged_table_is_asked_for_by_its_etag() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let table = land_first(&catalog).await;

    assert!(Arc::ptr_eq(&table, &catalog.load(&flights()).await.unwrap()));
    let asked = server.faults.requests(Ask::Load).pop().unwrap();
    assert_eq!(asked.headers["if-none-match"], format!("\"{}\"", table.metadata_location));
}

#[tokio::test]
async fn an_unchanged_table_is_not_parsed_again_where_there_are_no_etags() {
    let server = Server::with(Manners { no_etags: true, ..Manners::default() }).await;
    let catalog = server.client().await;
    let table = land_first(&catalog).await;

    let again = catalog.load(&flights()).await.unwrap();
    assert!(Arc::ptr_eq(&again, &catalog.load(&flights()).await.unwrap()));
    assert_eq!(again.facts, table.facts);
    assert!(!server.faults.requests(Ask::Load).pop().unwrap().headers.contains_key("if-none-match"));
}

#[tokio::test]
async fn what_nobody_knows_of_the_metadata_is_kept() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let table = land_first(&catalog).await;

    let kept = String::from_utf8(table.document.to_bytes()).unwrap();
    assert!(kept.contains(r#""unknown-to-all":{"kept":[1,2.5"#), "{kept}");
    assert_eq!(server.faults.metadata(&flights())["unknown-to-all"], json!({ "kept": [1, 2.50, "ü"] }));
}

#[tokio::test]
async fn what_only_reads_is_asked_again_within_a_bound() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    for act in [Do::Say(503), Do::Close, Do::SayLater(429, 0)] {
        server.faults.next(Ask::Load, act);
    }
    catalog.load(&flights()).await.unwrap();
    assert!(server.faults.is_played());

    let before = server.faults.requests(Ask::Load).len();
    server.faults.always(Ask::Load, Do::Say(503));
    let error = catalog.load(&flights()).await.unwrap_err();
    assert!(matches!(&error, CatalogError::Unavailable(text) if text.contains("503")), "{error}");
    assert_eq!(server.faults.requests(Ask::Load).len() - before, 4);

    // Longer than anybody should wait.
    let before = server.faults.requests(Ask::Load).len();
    server.faults.always(Ask::Load, Do::SayLater(503, 3_600));
    catalog.load(&flights()).await.unwrap_err();
    assert_eq!(server.faults.requests(Ask::Load).len() - before, 1);
}

#[tokio::test]
async fn a_reply_that_is_cut_short_is_asked_for_again() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    server.faults.next(Ask::Load, Do::ActThenCut);

    catalog.load(&flights()).await.unwrap();

    assert_eq!(server.faults.requests(Ask::Load).len(), 2);
}

#[tokio::test]
async fn an_answer_from_the_past_is_not_believed() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let now = land_first(&catalog).await;
    server.faults.next(Ask::Load, Do::SayOld(1));

    assert!(Arc::ptr_eq(&now, &catalog.load(&flights()).await.unwrap()));
    server.faults.always(Ask::Load, Do::SayOld(1));
    let error = catalog.load(&flights()).await.unwrap_err();
    assert!(error.to_string().contains("older state"), "{error}");
    // Who has seen nothing newer cannot know.
    assert_eq!(server.client().await.load(&flights()).await.unwrap().facts.refs.len(), 0);
}

#[tokio::test]
async fn a_wrong_address_is_told_apart_from_a_missing_table() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let missing = catalog.load(&"nyc.weather".parse().unwrap()).await.unwrap_err();
    assert!(matches!(missing, CatalogError::NotFound(_)), "{missing}");
    // Answers 404 with a page to everything.
    let elsewhere = server.open(|s| s.uri = format!("{}/other", s.uri)).await;
    let Err(error) = elsewhere else { panic!("it opened") };
    assert!(error.to_string().contains("404") && error.to_string().contains("; check 'uri'"), "{error}");
}

#[tokio::test]
async fn a_throttled_commit_is_sent_again_within_a_bound() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let base = land_first(&catalog).await;
    server.faults.next(Ask::Staging, Do::SayLater(429, 0));

    let outcome = catalog.commit(&base, &new_name("b"), set("b", 1)).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");

    let before = server.faults.requests(Ask::Staging).len();
    server.faults.always(Ask::Staging, Do::Say(429));
    let outcome = catalog.commit(&base, &new_name("c"), set("c", 1)).await;
    assert!(matches!(outcome, CommitOutcome::Refused(CatalogError::Unavailable(_))), "{outcome:?}");
    assert_eq!(server.faults.requests(Ask::Staging).len() - before, 5);
}

/// Case O24: four ways of not knowing, and the commit is sent once.
#[tokio::test]
async fn case_o24_a_commit_without_an_answer_is_unknown_and_sent_once() {
    for (act, applied) in [
        (Do::ActThenSay(503), true),
        (Do::ActThenSay(500), true),
        (Do::ActThenClose, true),
        (Do::ActThenCut, true),
        (Do::Say(503), false),
        (Do::Say(504), false),
        (Do::Close, false),
        (Do::SayYes, false),
    ] {
        let server = Server::with(Manners::default()).await;
        let catalog = server.client().await;
        let base = land_first(&catalog).await;
        server.faults.next(Ask::Staging, act);

        let outcome = catalog.commit(&base, &new_name("b"), set("b", 1)).await;

        assert!(matches!(outcome, CommitOutcome::Unknown(_)), "{act:?}: {outcome:?}");
        assert_eq!(server.faults.requests(Ask::Staging).len(), 2, "{act:?}: the first landing and this one");
        let now = catalog.load(&flights()).await.unwrap();
        assert_eq!(now.facts.refs.contains_key(&branch("b")), applied, "{act:?}");
    }
}

/// Case O24 behind a proxy: the answer to the second sending is no news of the first.
#[tokio::test]
async fn case_o24_a_commit_that_a_proxy_sends_twice_is_known_again_by_its_snapshots() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let base = catalog.load(&flights()).await.unwrap();
    server.faults.next(Ask::Staging, Do::ActTwice);
    let empty = [Requirement::RefAt { name: branch("main"), at: None, role: RefRole::Target }];

    let outcome = catalog.commit(&base, &empty, first(&base)).await;

    let CommitOutcome::Landed(now) = outcome else { panic!("{outcome:?}") };
    assert_eq!(now.facts.head(&branch("main")), Some(SnapshotId(1)));
    // One that only moves refs is not: who else could have set it cannot be told.
    server.faults.next(Ask::Staging, Do::ActTwice);
    let outcome = catalog.commit(&now, &new_name("b"), set("b", 1)).await;
    assert!(matches!(&outcome, CommitOutcome::NameTaken(name) if name.0 == "b"), "{outcome:?}");
}

#[tokio::test]
async fn with_idempotency_keys_a_lost_commit_is_sent_again_under_its_key() {
    let server = Server::with(Manners { idempotency_keys: true, ..Manners::default() }).await;
    let catalog = server.client().await;
    assert!(catalog.capabilities().idempotency_keys);
    let base = land_first(&catalog).await;
    server.faults.next(Ask::Staging, Do::ActThenClose);

    let outcome = catalog.commit(&base, &new_name("b"), set("b", 1)).await;

    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    let keys: Vec<String> = server
        .faults
        .requests(Ask::Staging)
        .iter()
        .map(|request| request.headers["idempotency-key"].clone())
        .collect();
    assert_eq!(keys.len(), 3);
    assert_ne!(keys[0], keys[1], "each commit has its own");
    assert_eq!(keys[1], keys[2]);
    assert_eq!(keys[1].parse::<uuid::Uuid>().unwrap().get_version_num(), 7);

    server.faults.always(Ask::Staging, Do::Close);
    let outcome = catalog.commit(&base, &new_name("c"), set("c", 1)).await;
    assert!(matches!(outcome, CommitOutcome::Unknown(_)), "{outcome:?}");
    assert_eq!(server.faults.requests(Ask::Staging).len(), 6, "three times at most");
}

/// Case O26, both of its servers.
#[tokio::test]
async fn case_o26_a_conflict_is_compared_with_the_table_before_it_is_believed() {
    let server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let base = land_first(&catalog).await;
    let head = [Requirement::RefAt { name: branch("main"), at: Some(SnapshotId(1)), role: RefRole::Target }];
    server.faults.always(Ask::Landing, Do::Say(409));

    let never = catalog.commit(&base, &head, set("b", 1)).await;
    let CommitOutcome::Unexplained(why) = never else { panic!("{never:?}") };
    assert!(why.contains("409") && why.contains("'main' at 1"), "{why}");

    // A conflict that comes as 400, after the head really moved.
    server.faults.be_honest();
    let other = server.client().await;
    let theirs = other.load(&flights()).await.unwrap();
    let mut second = first(&theirs);
    if let Update::AddSnapshot(snapshot) = &mut second[0] {
        (snapshot.id, snapshot.parent, snapshot.sequence_number) = (SnapshotId(2), Some(SnapshotId(1)), 2);
    }
    second[1] = set("main", 2).remove(0);
    assert!(matches!(other.commit(&theirs, &[], second).await, CommitOutcome::Landed(_)));
    server.faults.next(Ask::Landing, Do::Say(400));
    let moved = catalog.commit(&base, &head, set("b", 1)).await;
    assert!(matches!(moved, CommitOutcome::HeadMoved), "{moved:?}");

    // And a 400 that the table does not explain is a refusal, in the server's words.
    server.faults.next(Ask::Landing, Do::Say(400));
    let refused = catalog.commit(&base, &[], set("b", 1)).await;
    let CommitOutcome::Refused(error) = refused else { panic!("{refused:?}") };
    assert!(error.to_string().contains("not now"), "{error}");
}

#[tokio::test]
async fn a_commit_that_never_left_is_refused_for_now() {
    let mut server = Server::with(Manners::default()).await;
    let catalog = server.client().await;
    let base = land_first(&catalog).await;
    // No connection is kept, and none can be made.
    server.faults.always(Ask::Load, Do::Close);
    catalog.load(&flights()).await.unwrap_err();
    server.faults.stop_listening().await;

    let outcome = catalog.commit(&base, &[], set("b", 1)).await;

    assert!(matches!(outcome, CommitOutcome::Refused(CatalogError::Unavailable(_))), "{outcome:?}");
}
