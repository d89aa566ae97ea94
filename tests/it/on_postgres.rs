//! The queue with its ledger and its catalog on PostgreSQL: the straight line, races of processes, crashes, other
//! engines on the same catalog, and a server that cannot be used. Without a server (`scripts/postgres`) these tests
//! say so and do nothing.

use std::time::Instant;

use mergeberg::database::PostgresPlace;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::TableName;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};
use tempfile::TempDir;

use crate::binary::{mergeberg, refused_in, run_in};
use crate::crashes::{ALWAYS, Ends, POLICY};
use crate::races::race;
use crate::support::child::{LONG_LEASE, SHORT_LEASE, Settings, real_now, until};
use crate::support::postgres::{OnPostgres, TestServer};
use crate::support::python::Python;
use crate::support::rest::RestServer;
use crate::support::{House, ORDERS, ORDERS_POLICY, branch, drain, order};

#[tokio::test(flavor = "multi_thread")]
async fn a_day_on_postgresql_lands_as_on_sqlite() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    let house = &on.house;
    let mut requests = Vec::new();
    for (name, id, day) in [("ingest/a", 4, 22), ("ingest/b", 5, 23), ("ingest/c", 6, 20)] {
        house.append_on_new(name, &[order(id, day)]).await;
        requests.push(house.enqueue_keyed(name, Some(name)).await);
    }
    house.append_on_new("ingest/twice", &[order(3, 21)]).await;
    let duplicate = house.enqueue("ingest/twice").await;

    house.drain().await;

    for request in &requests {
        assert_eq!(house.state(*request).await, "landed");
    }
    assert_eq!(house.state(duplicate).await, "refused(duplicate-key)");
    let detail = house.request(duplicate).await.detail.unwrap().to_string();
    assert!(detail.contains("order_id=3"), "the rows are named: {detail}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6]);
    assert_eq!(house.refs().await, ["ingest/twice", "main"]);
    house.assert_sound().await;
    house.balanced_report();
    on.end().await;
}

/// A rewrite of a day that main took an append into: planned, replayed and landed from the program alone.
#[tokio::test(flavor = "multi_thread")]
async fn the_program_enqueues_waits_and_reports() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    let (house, folder) = (&on.house, on.house.dir.path());
    let told = run_in(folder, &["migrate"]);
    assert!(told.stdout.contains("is up to date"), "{told:?}");
    assert!(told.stdout.starts_with("postgresql://"), "{told:?}");
    let doctor = run_in(folder, &["doctor", "--scratch", "shop"]);
    assert_eq!(doctor.code, 0, "{doctor:?}");
    assert!(doctor.stdout.contains("made, written, removed"), "{doctor:?}");
    let made = run_in(folder, &["branch", "create", "--table", ORDERS, "--name", "ingest/a"]);
    assert_eq!(made.code, 0, "{made:?}");
    house.append("ingest/a", &[order(4, 22)]).await;
    let enqueued =
        run_in(folder, &["request", "enqueue", "--table", ORDERS, "--source", "ingest/a", "--json"]);
    let id = enqueued.json()["request"]["id"].to_string();
    assert_eq!(run_in(folder, &["worker", "--drain"]).stdout, "Nothing is left to do.\n");
    assert_eq!(run_in(folder, &["request", "wait", &id]).code, 0);
    assert!(run_in(folder, &["request", "explain", &id]).stdout.contains("landed"));
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
    house.balanced_report();
    on.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_set_up_on_a_server() {
    let Some(server) = TestServer::find() else { return };
    let folder = TempDir::new().unwrap();
    let url = server.database_url().await;
    let made = run_in(folder.path(), &["init", "--catalog-uri", &url, "--ledger", &url]);
    assert_eq!(made.code, 0, "{made:?}");
    assert!(made.stdout.contains(&format!("ledger   {url} (created, queue ")), "{made:?}");
    assert_eq!(run_in(folder.path(), &["request", "list"]).code, 0);
    let said = refused_in(folder.path(), &["branch", "list", "--table", ORDERS], 7, "catalog-unavailable");
    assert!(said.contains("has no table iceberg_tables"), "{said}");
    // PyIceberg or Java make the catalog beside the ledger.
    let place = PostgresPlace::parse(&url, None).unwrap();
    let clock = std::sync::Arc::new(real_now);
    SqlCatalog::create("local", place, "/nowhere", clock).await.unwrap();
    refused_in(folder.path(), &["branch", "list", "--table", ORDERS], 3, "table-not-found");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "mergeberg.toml and the policies");
    server.end().await;
}

/// Far longer than any test: what happens before it was not found by polling.
const NO_POLL: Settings = Settings { poll: "20m", lease: "1h", checkpoint: "1h" };

#[tokio::test(flavor = "multi_thread")]
async fn an_enqueue_wakes_the_worker_of_another_process() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, NO_POLL).await else { return };
    let house = &on.house;
    let worker = house.start_worker(&[]);
    until("the worker leads", async || house.ledger.leader().await.unwrap().is_some()).await;
    for id in 4..7 {
        let name = format!("ingest/{id}");
        house.append_on_new(&name, &[order(id, 22)]).await;
        let request = house.enqueue(&name).await;
        let began = Instant::now();
        until("the request is looked at", async || house.request(request).await.attempts > 0).await;
        eprintln!("woken within {:?}", began.elapsed());
        until("the request lands", async || house.state(request).await == "landed").await;
    }
    let output = worker.stop();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(house.ledger.leader().await.unwrap().is_none(), "the lead is given back");
    house.assert_sound().await;
    on.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_and_many_writers_lose_nothing_and_publish_nothing_twice() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    race(&on.house, false).await;
    on.end().await;
}

/// At once, although the leader's lease would have lasted for a minute.
#[tokio::test(flavor = "multi_thread")]
async fn the_second_worker_goes_on_where_the_killed_leader_was() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    race(&on.house, true).await;
    on.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_survives_a_kill_at_each_step() {
    for step in ALWAYS {
        let Some(on) = OnPostgres::orders(POLICY, SHORT_LEASE).await else { return };
        let house = &on.house;
        let mut states = Vec::new();
        for (id, name) in [(4, "ingest/a"), (5, "ingest/b")] {
            house.append_on_new(name, &[order(id, 22)]).await;
            states.push((house.enqueue(name).await, "landed"));
        }
        house.append("main", &[order(90, 28)]).await;
        let ends = Ends { states, keys: vec![1, 2, 3, 4, 5, 90], refs: vec!["main"], published: 2 };
        let before = house.chain_length().await;
        assert!(house.drain_in_child(Some(step.name())), "killed at {}", step.name());
        house.drain_in_child(None);
        house.assert_ends(&ends, before, step.name()).await;
        on.end().await;
    }
}

/// The server ends the leader's session: that worker stops and lands nothing more, the next one goes on.
#[tokio::test(flavor = "multi_thread")]
async fn case_o40_a_worker_whose_session_is_ended_steps_down() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    let house = &on.house;
    let first = house.start_worker(&[]);
    until("the first leads", async || house.ledger.leader().await.unwrap().is_some()).await;
    let mut admin = sqlx::PgConnection::connect(&on.ledger_url).await.unwrap();
    admin.execute("SELECT pg_terminate_backend(session_pid::INT) FROM committer").await.unwrap();
    until("nobody leads", async || house.ledger.leader().await.unwrap().is_none()).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;

    let output = first.wait();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("this one stopped"), "{output:?}");
    assert_eq!(house.state(request).await, "queued");
    house.drain_in_child(None);
    assert_eq!(house.state(request).await, "landed");
    house.assert_sound().await;
    on.end().await;
}

/// The server ends the sessions of two workers in the middle of their work, again and again, those of the ledger and
/// those of the catalog. Some workers stop and say why; nothing is lost and nothing lands twice.
#[tokio::test(flavor = "multi_thread")]
async fn workers_whose_sessions_are_ended_lose_nothing() {
    const ROUNDS: i64 = 12;
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, SHORT_LEASE).await else { return };
    let house = &on.house;
    let mut requests = Vec::new();
    // The workers' sessions are told from the test's own by their name.
    let file = house.dir.path().join("mergeberg.toml");
    let mut text = std::fs::read_to_string(&file).unwrap();
    for url in [&on.ledger_url, &on.catalog_url] {
        let plain = PostgresPlace::parse(url, None).unwrap().to_string();
        text = text.replace(&plain, &format!("{plain}?application_name=worker"));
    }
    std::fs::write(&file, text).unwrap();
    let mut admin = sqlx::PgConnection::connect(&on.ledger_url).await.unwrap();
    let ledger = on.ledger_url.rsplit_once('/').unwrap().1.to_owned();
    let catalog = on.catalog_url.rsplit_once('/').unwrap().1.to_owned();

    for round in 0..ROUNDS {
        for shard in 0..2 {
            let (id, name) = (100 + 2 * round + shard, format!("ingest/{round}-{shard}"));
            house.append_on_new(&name, &[order(id, 22)]).await;
            requests.push(house.enqueue(&name).await);
        }
        let workers = [house.start_worker(&["--drain"]), house.start_worker(&["--drain"])];
        let database = if round % 2 == 0 { &ledger } else { &catalog };
        // A little later in each round: first while they connect, then in the middle of a train.
        let mut ended = 0;
        let began = Instant::now();
        while ended <= round / 2 && began.elapsed().as_secs() < 10 {
            let end = "SELECT COUNT(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
                       WHERE application_name = 'worker' AND datname = $1 AND state <> 'idle'";
            let some = sqlx::query_scalar::<_, i64>(end).bind(database).fetch_one(&mut admin).await.unwrap();
            ended += some;
        }
        assert!(ended > 0, "round {round}: no session was in use");
        for worker in workers {
            let output = worker.wait();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(matches!(output.status.code(), Some(0 | 7)), "{:?}: {said}", output.status);
            assert!(!said.contains("panicked"), "{said}");
        }
    }

    house.configure(LONG_LEASE);
    house.drain_in_child(None);
    let keys: Vec<i64> = [1, 2, 3].into_iter().chain(100..100 + 2 * ROUNDS).collect();
    house.assert_nothing_lost_nothing_twice(&requests, &keys).await;
    on.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_writes_and_reads_a_catalog_on_postgresql() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    let house = &on.house;
    let Some(mut python) = Python::over_postgres(house.dir.path(), &on.catalog_url) else { return };
    python.branch("ingest/by-pyiceberg");
    python.append("ingest/by-pyiceberg", &[order(4, 22), order(5, 20)]);
    let request = house.enqueue("ingest/by-pyiceberg").await;

    house.drain().await;

    assert_eq!(house.state(request).await, "landed");
    let mut expected = vec![order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(5, 20)];
    expected.sort();
    assert_eq!(python.rows("main"), expected);
    // And it goes on from there, as another client's commit of which the queue knows.
    python.append("main", &[order(7, 24)]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 7]);
    house.assert_sound().await;
    house.drain().await;
    house.balanced_report();
    on.end().await;
}

/// Java's JdbcCatalog, behind the Iceberg project's REST server, on the same two tables, in both forms of them.
#[tokio::test(flavor = "multi_thread")]
async fn java_and_the_queue_work_on_one_catalog() {
    for version in ["V0", "V1"] {
        let Some(server) = TestServer::find() else { return };
        let folder = TempDir::new().unwrap();
        let url = server.database_url().await;
        let Some(java) = RestServer::on_postgres(folder.path(), &url, version) else { return };
        let name: TableName = ORDERS.parse().unwrap();
        java.create_namespace(&name.namespace).await;
        java.create_table(&name, &House::orders_definition()).await;
        let theirs = java.client().await;
        let place = PostgresPlace::parse(&url, None).unwrap();
        let warehouse = format!("file://{}", folder.path().join("warehouse").display());
        let ours = SqlCatalog::open(RestServer::CATALOG, place, &warehouse, std::sync::Arc::new(real_now))
            .await
            .unwrap();

        assert_eq!(ours.list_tables().await.unwrap(), std::slice::from_ref(&name), "{version}");
        let base = ours.load(&name).await.unwrap();
        let set = |key: &str| Update::SetProperties([(key.to_owned(), "1".to_owned())].into());
        let mine = ours.commit(&base, &[], vec![set("by-us")]).await;
        assert!(matches!(mine, CommitOutcome::Landed(_)), "{version}: {mine:?}");
        let seen = theirs.load(&name).await.unwrap();
        assert_eq!(seen.facts.properties["by-us"], "1", "{version}");
        let their = theirs.commit(&seen, &[], vec![set("by-java")]).await;
        assert!(matches!(their, CommitOutcome::Landed(_)), "{version}: {their:?}");
        let stale = ours.commit(&base, &[], vec![set("late")]).await;
        assert!(matches!(stale, CommitOutcome::PointerMoved), "{version}: {stale:?}");
        let now = ours.load(&name).await.unwrap();
        assert_eq!(now.facts.properties["by-java"], "1", "{version}");
        assert!(!now.facts.properties.contains_key("late"), "{version}");
        drop(java);
        server.end().await;
    }
}

/// A foreign commit that holds the row, and leaves it as it is or moves it.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_waits_for_one_under_way_and_sees_what_became_of_it() {
    for moves in [false, true] {
        let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
        let house = &on.house;
        let base = house.loaded().await;
        let mut other = sqlx::PgConnection::connect(&on.catalog_url).await.unwrap();
        let mut held = other.begin().await.unwrap();
        let to =
            if moves { format!("{}.other", base.metadata_location) } else { base.metadata_location.clone() };
        sqlx::query("UPDATE iceberg_tables SET metadata_location = $1")
            .bind(&to)
            .execute(&mut *held)
            .await
            .unwrap();
        let tag = Update::SetRef(RefFact {
            name: branch("v1"),
            snapshot_id: base.facts.head(&branch("main")).unwrap(),
            kind: RefKind::Tag,
            max_ref_age_ms: None,
        });
        let catalog = std::sync::Arc::clone(&house.catalog);
        let (on_base, updates) = (base.clone(), vec![tag]);
        let commit = tokio::spawn(async move { catalog.commit(&on_base, &[], updates).await });
        // It is in the server's list of those who wait for a lock.
        let mut admin = sqlx::PgConnection::connect(&on.catalog_url).await.unwrap();
        until("it waits", async || {
            let waiting = "SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND database =
                           (SELECT oid FROM pg_database WHERE datname = current_database()) OR NOT granted";
            sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut admin).await.unwrap() > 0
        })
        .await;
        held.commit().await.unwrap();
        let outcome = commit.await.unwrap();
        if moves {
            assert!(matches!(outcome, CommitOutcome::PointerMoved), "{outcome:?}");
        } else {
            assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
        }
        on.end().await;
    }
}

/// The folder's configuration with another address in it.
fn with(on: &OnPostgres, from: &str, to: &str) {
    let file = on.house.dir.path().join("mergeberg.toml");
    on.house.configure(LONG_LEASE);
    let text = std::fs::read_to_string(&file).unwrap();
    let plain = PostgresPlace::parse(from, None).unwrap().to_string();
    assert!(text.contains(&plain), "{text}");
    std::fs::write(&file, text.replace(&plain, to)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_used_is_told_with_what_to_do() {
    let Some(on) = OnPostgres::orders(ORDERS_POLICY, LONG_LEASE).await else { return };
    let folder = on.house.dir.path();
    let role = format!("r_{}", uuid::Uuid::new_v4().simple());
    on.server.admin(format!("CREATE ROLE {role} LOGIN PASSWORD 'hunter2'")).await;
    // A port that nobody listens on: it was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let of_ledger: &[&str] = &["request", "list"];
    let of_catalog: &[&str] = &["branch", "list", "--table", ORDERS];
    for (url, command, code) in
        [(&on.ledger_url, of_ledger, "ledger-unusable"), (&on.catalog_url, of_catalog, "catalog-unavailable")]
    {
        let (server, database) = url.rsplit_once('/').unwrap();
        let host = server.rsplit_once('@').unwrap().1;
        for (to, words, next) in [
            (format!("postgresql://ann@{free}/queue"), "refused", "see that the server runs"),
            (
                format!("postgresql://{role}:wrong-word@{host}/{database}"),
                "password authentication failed",
                "correct user and password",
            ),
            (format!("{server}/no_such_database"), "does not exist", "correct the database's name"),
            (
                format!("{}/{database}?sslmode=verify-full", server.replace("127.0.0.1", "localhost")),
                "TLS",
                "see that the server offers TLS",
            ),
        ] {
            with(&on, url, &to);
            let said = refused_in(folder, command, 7, code);
            assert!(said.contains(words), "{said}");
            assert!(said.contains(&format!("next: {next}")), "{said}");
            assert!(!said.contains("wrong-word"), "{said}");
            if command == of_ledger {
                // A worker does not begin either.
                refused_in(folder, &["worker", "--drain"], 7, code);
            }
        }
    }
    // TLS with the server's own root.
    if let Some(root) = std::env::var_os("MERGEBERG_POSTGRES_ROOT") {
        let to = on.ledger_url.replace("127.0.0.1", "localhost");
        let root = root.into_string().unwrap();
        with(&on, &on.ledger_url, &format!("{to}?sslmode=verify-full&sslrootcert={root}"));
        assert_eq!(run_in(folder, of_ledger).code, 0);
    }

    // A user who may only look: lists and plans, but the worker and an enqueue are refused.
    on.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    for url in [&on.ledger_url, &on.catalog_url] {
        let mut owner = sqlx::PgConnection::connect(url).await.unwrap();
        let grant = format!("GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}");
        owner.execute(AssertSqlSafe(grant)).await.unwrap();
    }
    let as_role = |url: &str| {
        let (server, database) = url.rsplit_once('/').unwrap();
        format!("postgresql://{role}:hunter2@{}/{database}", server.rsplit_once('@').unwrap().1)
    };
    with(&on, &on.ledger_url, &as_role(&on.ledger_url).replace(":hunter2", ""));
    refused_in(folder, of_ledger, 7, "ledger-unusable");
    let by_variable = mergeberg(folder).args(of_ledger).env("MERGEBERG_LEDGER_PASSWORD", "hunter2").output();
    assert!(by_variable.unwrap().status.success(), "the password of the environment counts");
    with(&on, &on.ledger_url, &as_role(&on.ledger_url));
    assert_eq!(run_in(folder, of_ledger).code, 0);
    let enqueue = ["request", "enqueue", "--table", ORDERS, "--source", "ingest/a"];
    let said = refused_in(folder, &enqueue, 7, "ledger-unusable");
    assert!(said.contains("permission denied") && said.contains("GRANT"), "{said}");
    assert!(!said.contains("hunter2"), "{said}");
    with(&on, &on.catalog_url, &as_role(&on.catalog_url));
    assert_eq!(run_in(folder, of_catalog).code, 0);
    let create = ["branch", "create", "--table", ORDERS, "--name", "ingest/b"];
    let said = refused_in(folder, &create, 7, "warehouse-read-only");
    assert!(said.contains("permission denied") && said.contains("GRANT"), "{said}");
    assert!(!said.contains("hunter2"), "{said}");

    // The world is right again.
    on.house.configure(LONG_LEASE);
    assert_eq!(run_in(folder, &enqueue).code, 0);
    drain(&on.house.worker).await;
    assert_eq!(on.house.keys("main").await, [1, 2, 3, 4]);
    on.house.assert_sound().await;
    let server = TestServer::find().unwrap();
    on.end().await;
    server.admin(format!("DROP ROLE {role}")).await;
}
