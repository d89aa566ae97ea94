//! How a REST catalog lets the queue reach a table's files: keys that end, its signature under each request, a
//! token for one table; and how the catalog itself is reached over TLS and with AWS signatures.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use mergeberg::ledger::Ledger;
use mergeberg::secret::Secret;
use mergeberg::table::catalog::{Catalog, CatalogError};
use mergeberg::table::rest_catalog::{AwsKeys, AwsSettings, RestCatalog, RestSettings};
use mergeberg_kernel::ids::TableName;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::binary::{refused_in, run_in};
use crate::support::certificates::Certificates;
use crate::support::child::{SHORT_LEASE, real_now};
use crate::support::fault_server::{Access, Ask, Do, FaultServer, Manners};
use crate::support::python::Python;
use crate::support::s3_server::{BUCKET, Keys, S3Server, storage};
use crate::support::{House, ORDERS, ORDERS_POLICY, order};

const HOUR_MS: i64 = 3_600_000;

/// ORD behind a fault server, its files on S3. The catalog's clock is the test's.
struct Lake {
    house: House<RestCatalog>,
    server: FaultServer,
    store: S3Server,
    clock: Arc<AtomicI64>,
}

impl Lake {
    /// `grant` says what the first load tells about access.
    async fn open(
        manners: Manners,
        grant: impl FnOnce(&S3Server, &FaultServer) -> Access,
        settings: impl FnOnce(&S3Server, &mut RestSettings),
    ) -> Self {
        let dir = TempDir::new().unwrap();
        let store = S3Server::start(dir.path());
        let manners = Manners { warehouse: Some(store.warehouse()), ..manners };
        let server = FaultServer::start(dir.path(), manners).await;
        let table: TableName = ORDERS.parse().unwrap();
        server.create_namespace(&table.namespace);
        server.create_table(&table, &House::orders_definition());
        server.grant(grant(&store, &server));
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), ORDERS_POLICY).unwrap();
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let mut own = server.settings();
        settings(&store, &mut own);
        let clock = Arc::new(AtomicI64::new(real_now()));
        let reads = Arc::clone(&clock);
        let catalog = RestCatalog::open(&own, Arc::new(move || reads.load(Ordering::SeqCst))).await.unwrap();
        let house_clock = Arc::new(AtomicI64::new(real_now()));
        let house = House::assemble(dir, Arc::new(catalog), ledger, house_clock, table);
        Self { house, server, store, clock }
    }

    /// One request, from its branch to the landing.
    async fn lands_one(&self, id: i64) {
        let name = format!("ingest/{id}");
        self.house.append_on_new(&name, &[order(id, 22)]).await;
        let request = self.house.enqueue(&name).await;
        self.house.drain().await;
        assert_eq!(
            self.house.state(request).await,
            "landed",
            "{:?}",
            self.house.request(request).await.detail
        );
    }

    fn keys_used(&self) -> Vec<String> {
        let mut used: Vec<String> = self.store.asked().into_iter().map(|asked| asked.key_id).collect();
        used.dedup();
        used
    }
}

fn nothing(_: &S3Server, _: &mut RestSettings) {}

/// Keys with their end, for everything in the bucket, as a server gives them.
fn vended(store: &S3Server, keys: &Keys, ends_at_ms: i64) -> Access {
    let mut config = store.properties_with(keys);
    config.insert("s3.session-token-expires-at-ms".to_owned(), ends_at_ms.to_string());
    Access { config: BTreeMap::new(), credentials: vec![(format!("s3://{BUCKET}/"), config)] }
}

fn offering() -> Manners {
    Manners { offers_credentials: true, ..Manners::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_the_catalog_are_used_and_renewed_ahead_of_their_end() {
    let (first, second) = (Keys::named("FIRST", true), Keys::named("SECOND", true));
    let give = first.clone();
    let lake = Lake::open(
        offering(),
        |store, _| {
            store.admit(&give);
            vended(store, &give, real_now() + HOUR_MS)
        },
        nothing,
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.lands_one(4).await;
    assert_eq!(lake.keys_used(), [first.id.as_str()]);
    assert!(lake.server.requests(Ask::Credentials).is_empty(), "they still hold");
    let loads = lake.server.requests(Ask::Load);
    assert!(loads.iter().all(|load| load.headers["x-iceberg-access-delegation"] == "vended-credentials"));

    // A few minutes before their end there are others, from the endpoint for them.
    lake.store.admit(&second);
    lake.server.grant(vended(&lake.store, &second, real_now() + 3 * HOUR_MS));
    lake.clock.fetch_add(HOUR_MS - 60_000, Ordering::SeqCst);
    lake.store.dismiss(&first);
    lake.lands_one(5).await;

    assert_eq!(lake.keys_used(), [first.id, second.id]);
    assert_eq!(lake.house.keys("main").await, [1, 4, 5]);
    lake.house.assert_sound().await;
}

/// A server without the endpoint gives them with the table; one that cannot answer is asked again while the old
/// ones hold.
#[tokio::test(flavor = "multi_thread")]
async fn keys_come_with_the_table_where_there_is_no_endpoint_for_them() {
    let (first, second) = (Keys::named("FIRST", true), Keys::named("SECOND", true));
    let give = first.clone();
    let lake = Lake::open(
        Manners::default(),
        |store, _| {
            store.admit(&give);
            vended(store, &give, real_now() + HOUR_MS)
        },
        nothing,
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    let table = lake.house.loaded().await;
    let file = format!("{}/data/none", table.facts.location);

    lake.clock.fetch_add(HOUR_MS - 60_000, Ordering::SeqCst);
    lake.server.always(Ask::Load, Do::Say(503));
    assert!(!table.file_io.exists(&file).await.unwrap(), "the old keys still hold");
    lake.clock.fetch_add(2 * 60_000, Ordering::SeqCst);
    let error = table.file_io.exists(&file).await.unwrap_err().to_string();
    assert!(error.contains("credentials could not be renewed") && error.contains("503"), "{error}");
    lake.server.be_honest();
    lake.store.admit(&second);
    lake.store.dismiss(&first);
    let far = lake.clock.load(Ordering::SeqCst) + HOUR_MS;
    lake.server.grant(vended(&lake.store, &second, far));
    assert!(!table.file_io.exists(&file).await.unwrap());
    lake.lands_one(4).await;
    assert_eq!(lake.keys_used().last(), Some(&second.id));
}

/// Keys that are withdrawn before their end are asked for again after the store's first refusal; nobody is blamed.
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_the_store_refuses_are_asked_for_again() {
    let (first, second) = (Keys::named("FIRST", true), Keys::named("SECOND", true));
    let give = first.clone();
    let lake = Lake::open(
        offering(),
        |store, _| {
            store.admit(&give);
            vended(store, &give, real_now() + HOUR_MS)
        },
        nothing,
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.store.dismiss(&first);
    lake.store.admit(&second);
    lake.server.grant(vended(&lake.store, &second, real_now() + HOUR_MS));
    let table = lake.house.loaded().await;
    let file = table.facts.snapshots.iter().next().unwrap().manifest_list.clone();
    let read = async || table.file_io.new_input(&file).unwrap().read().await;

    let error = read().await.unwrap_err().to_string();
    assert!(error.contains("InvalidAccessKeyId"), "{error}");
    read().await.unwrap();

    assert_eq!(lake.keys_used(), [first.id, second.id]);
    assert_eq!(lake.server.requests(Ask::Credentials).len(), 1);
}

/// The longest prefix wins, whatever the order; what no prefix is for has the table's `config`.
#[tokio::test(flavor = "multi_thread")]
async fn the_credential_with_the_longest_prefix_is_used() {
    let all = Keys::named("ALL", false);
    let data = Keys::named("DATA", false);
    let rest = Keys::named("REST", false);
    let (a, b, c) = (all.clone(), data.clone(), rest.clone());
    let lake = Lake::open(
        Manners::default(),
        move |store, server| {
            for keys in [&a, &b, &c] {
                store.admit(keys);
            }
            let table: TableName = ORDERS.parse().unwrap();
            let location = server.metadata(&table)["location"].as_str().unwrap().to_owned();
            Access {
                config: store.properties_with(&c),
                credentials: vec![
                    (format!("{location}/metadata"), store.properties_with(&a)),
                    (format!("{location}/data/order_date=2026-08-20"), store.properties_with(&b)),
                ],
            }
        },
        nothing,
    )
    .await;

    lake.house.append("main", &[order(1, 20), order(2, 21)]).await;
    lake.lands_one(4).await;

    for asked in lake.store.asked() {
        let expected = if asked.object.contains("/metadata/") {
            &all
        } else if asked.object.contains("order_date=2026-08-20") {
            &data
        } else {
            &rest
        };
        assert_eq!(asked.key_id, expected.id, "{asked:?}");
    }
}

/// Who may see a table and is given no access to its files goes on with what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_is_seen_without_access_to_its_files() {
    let lake = Lake::open(Manners::default(), |_, _| Access::default(), nothing).await;
    lake.server.next(Ask::Load, Do::Say(403));
    lake.house.loaded().await;
    lake.house.loaded().await;
    let asked: Vec<bool> = lake
        .server
        .requests(Ask::Load)
        .iter()
        .map(|load| load.headers.contains_key("x-iceberg-access-delegation"))
        .collect();
    assert_eq!(asked, [true, false, false]);
    // Who may not see it at all is told so.
    let other = lake.server.client().await;
    lake.server.always(Ask::Load, Do::Say(403));
    let error = other.load(&lake.house.table).await.unwrap_err().to_string();
    assert!(error.contains("403") && error.contains("give this principal the right"), "{error}");
}

/// Keys of our own are used without asking for others.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_the_configuration_are_enough() {
    let lake = Lake::open(
        Manners::default(),
        |_, _| Access::default(),
        |store, settings| settings.storage = store.storage(),
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.lands_one(4).await;
    let loads = lake.server.requests(Ask::Load);
    assert!(loads.iter().all(|load| !load.headers.contains_key("x-iceberg-access-delegation")));
}

/// What the server's configuration says of storage holds for every table, and wins over ours.
#[tokio::test(flavor = "multi_thread")]
async fn storage_of_the_servers_configuration_is_followed() {
    let mut overrides = BTreeMap::from([("s3.region".to_owned(), "eu-test-1".to_owned())]);
    overrides.extend(Keys::named("TESTS", false).properties());
    let manners = Manners { overrides, ..Manners::default() };
    let lake = Lake::open(
        manners,
        |_, _| Access::default(),
        |store, settings| {
            let mut own = store.place();
            own.insert("s3.access-key-id".to_owned(), "nobody".to_owned());
            settings.storage = storage(&own);
        },
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    assert_eq!(lake.keys_used(), [Keys::named("TESTS", false).id]);
}

/// The shipped program, with nothing but the catalog's address: keys come from the catalog. What it asks for is
/// configured by the header's own name.
#[tokio::test(flavor = "multi_thread")]
async fn the_program_lands_with_the_catalogs_keys() {
    let keys = Keys::named("VENDED", true);
    let give = keys.clone();
    let lake = Lake::open(
        offering(),
        |store, _| {
            store.admit(&give);
            vended(store, &give, real_now() + HOUR_MS)
        },
        nothing,
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    lake.house.append("main", &[order(9, 28)]).await;
    let request = lake.house.enqueue("ingest/a").await;
    let catalog = |more: &str| format!("type = \"rest\"\nuri = \"{}\"\n{more}", lake.server.uri());
    lake.house.configure_for(&catalog(""), SHORT_LEASE);

    let ran = run_in(lake.house.dir.path(), &["worker", "--drain"]);

    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(lake.house.state(request).await, "landed");
    assert_eq!(lake.keys_used(), [keys.id]);
    lake.house.assert_sound().await;
    for (value, expected) in [("none", None), ("remote-signing", Some("remote-signing"))] {
        let before = lake.server.requests(Ask::Load).len();
        let header = format!("header.X-Iceberg-Access-Delegation = \"{value}\"\n");
        lake.house.configure_for(&catalog(&header), SHORT_LEASE);
        run_in(lake.house.dir.path(), &["branch", "list", "--table", ORDERS]);
        let loads = lake.server.requests(Ask::Load);
        let sent = loads[before].headers.get("x-iceberg-access-delegation").map(String::as_str);
        assert_eq!(sent, expected);
    }
}

/// We know no key: the catalog signs every request.
#[tokio::test(flavor = "multi_thread")]
async fn requests_to_the_store_are_signed_by_the_catalog() {
    let keys = Keys::named("CATALOG", false);
    let manners = Manners { signs_with: Some(keys.clone()), ..Manners::default() };
    let admitted = keys.clone();
    let lake = Lake::open(
        manners,
        move |store, server| {
            store.admit(&admitted);
            let mut config = store.place();
            config.insert("s3.remote-signing-enabled".to_owned(), "true".to_owned());
            config.insert("signer.uri".to_owned(), server.uri().to_owned());
            config.insert("signer.endpoint".to_owned(), "v1/namespaces/shop/tables/orders/sign".to_owned());
            Access { config, credentials: Vec::new() }
        },
        nothing,
    )
    .await;

    lake.house.append("main", &[order(1, 20)]).await;
    lake.lands_one(4).await;

    assert_eq!(lake.keys_used(), [keys.id]);
    let signed = lake.server.requests(Ask::Sign);
    assert_eq!(signed.len(), lake.store.asked().len());
    let methods: std::collections::BTreeSet<String> = signed
        .iter()
        .map(|request| {
            let body: Value = serde_json::from_str(&request.body).unwrap();
            assert_eq!(body["provider"], "s3");
            body["method"].as_str().unwrap().to_owned()
        })
        .collect();
    assert!(methods.contains("PUT") && methods.contains("GET"), "{methods:?}");
    assert_eq!(lake.house.keys("main").await, [1, 4]);
    assert_specified(&lake, &["loadTable", "signRequest"]);
    // Many objects are deleted at once only where a scratch table goes: their names go to the catalog.
    let table = lake.house.loaded().await;
    for name in ["a", "b"] {
        let at = format!("{}/scratch/{name}", table.facts.location);
        table.file_io.new_output(at).unwrap().write("x".into()).await.unwrap();
    }
    table.file_io.delete_prefix(format!("{}/scratch/", table.facts.location)).await.unwrap();
    assert!(lake.store.objects().iter().all(|key| !key.contains("/scratch/")));
    let signed = lake.server.requests(Ask::Sign);
    assert!(signed.iter().any(|r| r.body.contains("?delete") && r.body.contains("<Delete>")));
    assert_specified(&lake, &["signRequest"]);
    // A catalog that does not sign is told, and nobody is blamed.
    lake.server.always(Ask::Sign, Do::Say(403));
    let error =
        table.file_io.exists(format!("{}/data/x", table.facts.location)).await.unwrap_err().to_string();
    assert!(error.contains("did not sign the request") && error.contains("403"), "{error}");
}

/// Every request is one of the Iceberg specification's, and these operations are among them.
fn assert_specified(lake: &Lake, operations: &[&str]) {
    let Some(mut python) = Python::start(lake.house.dir.path()) else { return };
    let all = lake.server.all_requests().into_iter().filter(|(ask, _)| *ask != Ask::Making);
    let requests: Vec<Value> = all
        .map(|(_, r)| {
            json!({ "method": r.method, "path": r.path, "query": r.query, "headers": r.headers, "body": r.body })
        })
        .collect();
    let answer = python.ok("check_requests", json!({ "requests": requests, "prefix": null }));
    assert_eq!(answer["problems"], json!([]));
    for operation in operations {
        assert!(answer["operations"].get(operation).is_some(), "no {operation}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_for_credentials_is_of_the_specification() {
    let keys = Keys::named("FIRST", true);
    let lake = Lake::open(
        offering(),
        |store, _| {
            store.admit(&keys);
            // Over at once, as far as we care.
            vended(store, &keys, real_now() + 1_000)
        },
        nothing,
    )
    .await;
    lake.house.loaded().await;
    lake.clock.fetch_add(900, Ordering::SeqCst);
    lake.server.grant(vended(&lake.store, &Keys::named("FIRST", true), real_now() + HOUR_MS));
    lake.house.append("main", &[order(1, 20)]).await;
    assert!(!lake.server.requests(Ask::Credentials).is_empty());
    assert_specified(&lake, &["loadTable", "loadCredentials"]);
}

/// The token that a table's `config` has is sent with requests for that table, and given up when it is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_tables_own_token_is_sent_for_that_table_only() {
    let config = BTreeMap::from([("token".to_owned(), "of-the-table".to_owned())]);
    let lake = Lake::open(
        Manners::default(),
        |_, _| Access { config, credentials: Vec::new() },
        |store, settings| {
            settings.token = Some(Secret::new("of-the-catalog"));
            settings.storage = storage(&store.properties());
        },
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.house.catalog.list_tables().await.unwrap();

    let sent = |ask: Ask| -> Vec<String> {
        lake.server.requests(ask).into_iter().map(|r| r.headers["authorization"].clone()).collect()
    };
    let loads = sent(Ask::Load);
    assert_eq!(loads[0], "Bearer of-the-catalog", "before anything is known of the table");
    assert!(loads[1..].iter().all(|token| token == "Bearer of-the-table"), "{loads:?}");
    assert!(sent(Ask::Staging).iter().all(|token| token == "Bearer of-the-table"));
    assert!(sent(Ask::List).iter().all(|token| token == "Bearer of-the-catalog"));
    // Over: the catalog's own is tried.
    let before = lake.server.requests(Ask::Load).len();
    lake.server.next(Ask::Load, Do::Say(401));
    lake.house.loaded().await;
    assert_eq!(sent(Ask::Load)[before..], ["Bearer of-the-table", "Bearer of-the-catalog"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_that_plans_scans_itself_is_refused() {
    let config = BTreeMap::from([("scan-planning-mode".to_owned(), "server".to_owned())]);
    let access = Access { config, credentials: Vec::new() };
    let lake = Lake::open(Manners::default(), |_, _| access, nothing).await;
    let error = lake.house.catalog.load(&lake.house.table).await.unwrap_err();
    assert!(matches!(error, CatalogError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("plan every scan itself"), "{error}");
}

/// Requests to the catalog carry AWS's signature, made with the keys of the configuration.
#[tokio::test(flavor = "multi_thread")]
async fn requests_to_the_catalog_are_signed_for_aws() {
    let keys = AwsKeys { id: "AKIDEXAMPLE".to_owned(), secret: Secret::new("s"), session: None };
    let aws = AwsSettings { name: "glue".to_owned(), region: Some("eu-1".to_owned()), keys: Some(keys) };
    let lake = Lake::open(
        Manners::default(),
        |_, _| Access::default(),
        |store, settings| {
            settings.aws = Some(aws);
            settings.token = Some(Secret::new("tok"));
            settings.storage = store.storage();
        },
    )
    .await;
    lake.house.append("main", &[order(1, 20)]).await;
    lake.house.catalog.list_tables().await.unwrap();
    for (ask, request) in lake.server.all_requests().into_iter().filter(|(ask, _)| *ask != Ask::Making) {
        let signature = &request.headers["authorization"];
        assert!(signature.starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/"), "{ask:?}: {signature}");
        assert!(signature.contains("/eu-1/glue/aws4_request"), "{ask:?}: {signature}");
        assert_eq!(request.headers["original-authorization"], "Bearer tok", "{ask:?}");
    }
}

/// The shipped program and a catalog behind https: a root of our own is trusted, another name and another root
/// are told as what they are.
#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_over_tls_with_a_private_root() {
    let dir = TempDir::new().unwrap();
    let (trusted, of_another) =
        (Certificates::make(dir.path()), Certificates::of_name(dir.path(), "catalog.example"));
    let right = FaultServer::start_over(dir.path(), Manners::default(), Some(trusted.acceptor())).await;
    let wrong = FaultServer::start_over(dir.path(), Manners::default(), Some(of_another.acceptor())).await;
    let configure = |server: &FaultServer| {
        let text = format!(
            "[catalog.test]\ntype = \"rest\"\nuri = \"{}\"\n[ledger]\npath = \"ledger.db\"\n\
             [worker]\npoll = \"{}\"\nlease = \"{}\"\n",
            server.uri(),
            SHORT_LEASE.poll,
            SHORT_LEASE.lease
        );
        std::fs::write(dir.path().join("mergeberg.toml"), text).unwrap();
    };
    std::fs::create_dir(dir.path().join("policies")).unwrap();
    let listing = ["branch", "list", "--table", ORDERS];
    configure(&right);
    assert_eq!(run_in(dir.path(), &["migrate"]).code, 0);
    let told = refused_in(dir.path(), &listing, 7, "catalog-unavailable");
    assert!(told.contains("certificate"), "{told}");

    let table: TableName = ORDERS.parse().unwrap();
    right.create_namespace(&table.namespace);
    right.create_table(&table, &House::orders_definition());
    let list = |root: &Certificates| {
        let mut command = crate::binary::mergeberg(dir.path());
        command.args(listing).env("SSL_CERT_FILE", root.root_file()).output().unwrap()
    };
    let output = list(&trusted);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // The root is trusted, the name is another.
    configure(&wrong);
    let output = list(&of_another);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(7), "{told}");
    assert!(told.contains("certificate") && told.contains("[catalog-unavailable]"), "{told}");
}
