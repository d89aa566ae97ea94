//! The queue over object stores: a real S3 server in this process (s3s-fs), with PyIceberg and DuckDB as witnesses
//! where they are there; fake-gcs-server and Azurite. Of Data Lake Storage, which no server here speaks, and of tokens, what
//! is sent is looked at.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use mergeberg::table::storage::file_io;
use mergeberg_kernel::ids::RequestId;

use crate::binary::{refused_in, run_in};
use crate::support::certificates::Certificates;
use crate::support::child::{DIE_AT, SHORT_LEASE};
use crate::support::fault_server::http::{Reply, Request, serve};
use crate::support::object_server::ObjectServer;
use crate::support::python::Python;
use crate::support::s3_server::{BUCKET, Keys, S3Server, storage};
use crate::support::{House, ORDERS_POLICY, Order, keyed_record, order};

const DRAIN: [&str; 2] = ["worker", "--drain"];

/// Keys are checked, and whole operations may be run again.
const POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]

[[class]]
name = "transform"
prefix = "transform/"
checks = ["one-order-once"]
"#;

impl House {
    /// A request of a branch with one order, in the queue.
    async fn waiting(&self) -> RequestId {
        self.append_on_new("ingest/a", &[order(4, 22)]).await;
        self.enqueue("ingest/a").await
    }

    /// Objects of the bucket that no snapshot names, and that are no metadata files.
    async fn orphans_on(&self, server: &S3Server) -> Vec<String> {
        let named = self.named_files().await;
        let kept = |key: &String| {
            !key.ends_with(".metadata.json") && !named.contains(&format!("s3://{BUCKET}/{key}"))
        };
        server.objects().into_iter().filter(kept).collect()
    }

    /// The worker cannot work: it says why, and the request waits for it. Gives the words.
    async fn held(&self, request: RequestId, code: &str) -> String {
        let told = refused_in(self.dir.path(), &DRAIN, 7, code);
        assert_eq!(self.state(request).await, format!("held({code})"), "{told}");
        told
    }

    async fn lands_now(&self, request: RequestId) {
        let ran = run_in(self.dir.path(), &DRAIN);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(self.state(request).await, "landed", "{}", self.history(request).await);
        assert_eq!(self.keys("main").await, [1, 2, 3, 4]);
        self.assert_sound().await;
    }
}

/// PyIceberg writes on S3, the queue lands it, PyIceberg and DuckDB read it there.
#[tokio::test(flavor = "multi_thread")]
async fn what_pyiceberg_writes_on_s3_is_landed_and_read_there() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let Some(mut python) = Python::on_s3(house.dir.path(), &server) else { return };
    python.branch("ingest/a");
    python.append("ingest/a", &[order(4, 22)]);
    python.branch("ingest/b");
    python.append("ingest/b", &[order(5, 20), order(6, 23)]);
    python.branch("ingest/twice");
    python.append("ingest/twice", &[order(4, 22)]);
    let mut requests = Vec::new();
    for name in ["ingest/a", "ingest/b", "ingest/twice"] {
        requests.push(house.enqueue(name).await);
    }

    house.drain().await;

    for request in &requests[..2] {
        assert_eq!(house.state(*request).await, "landed", "{}", house.history(*request).await);
    }
    assert_eq!(house.state(requests[2]).await, "refused(duplicate-key)");
    let mut expected =
        vec![order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(5, 20), order(6, 23)];
    expected.sort();
    assert_eq!(python.rows("main"), expected);
    assert_eq!(house.rows("main").await, expected);
    python.append("main", &[order(7, 24)]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6, 7]);
    house.assert_sound().await;
}

/// A recorded operation is run again over S3, with files written again and with deletes of them; then it is taken
/// back, for which files are copied.
#[tokio::test(flavor = "multi_thread")]
async fn an_operation_is_run_again_and_taken_back_on_s3() {
    for (version, mode) in [(2, "copy-on-write"), (2, "merge-on-read"), (3, "merge-on-read")] {
        let definition =
            House::orders_definition().format_version(version).property("write.update.mode", mode);
        let (house, server) = House::on_s3_with(definition, POLICY).await;
        house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
        house.branch("transform/a").await;
        let paid = Order { status: "paid".to_owned(), cents: 500, ..order(2, 20) };
        let record = keyed_record(2, 20, "paid", "5.00");
        house.recorded("transform/a", &record, &[20], &[order(1, 20), paid.clone()]).await;
        // The day got another order since: the branch's files of the day are too old.
        house.append("main", &[order(8, 20)]).await;
        let request = house.enqueue("transform/a").await;

        house.drain().await;

        assert_eq!(house.state(request).await, "landed", "{}", house.history(request).await);
        assert_eq!(house.classified(request).await, "rebase");
        let expected = [order(1, 20), paid, order(3, 21), order(8, 20)];
        assert_eq!(house.rows("main").await, expected, "v{version}, {mode}");
        if let Some(mut python) = Python::on_s3(house.dir.path(), &server) {
            assert_eq!(python.rows("main"), expected, "v{version}, {mode}");
        }
        let reverted = house.revert(request).await;
        house.drain().await;
        assert_eq!(house.state(reverted).await, "landed", "{}", house.history(reverted).await);
        assert_eq!(house.keys("main").await, [1, 2, 3, 8]);
        house.assert_sound().await;
    }
}

/// Rule R8 on an object store: what a killed worker wrote is deleted by name, and nothing else is.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_on_s3_leaves_nothing_and_takes_nothing_of_others() {
    let foreign = ["warehouse/shop/orders/metadata/notes.avro", "warehouse/shop/orders/data/theirs.parquet"];
    for step in
        ["train-recorded", "staging-file-written", "staged", "landing-file-written", "landing-swapped"]
    {
        let (house, server) = House::on_s3(ORDERS_POLICY).await;
        for key in foreign {
            server.leave(key);
        }
        let request = house.waiting().await;
        // No fast-forward: files have to be written.
        house.append("main", &[order(9, 28)]).await;

        let killed = house.command(&DRAIN).env(DIE_AT, step).output().unwrap();
        assert!(!killed.status.success(), "it was not killed at {step}");
        let ran = run_in(house.dir.path(), &DRAIN);

        assert_eq!(ran.code, 0, "{step}: {ran:?}");
        assert_eq!(house.state(request).await, "landed", "{step}");
        assert_eq!(house.keys("main").await, [1, 2, 3, 4, 9], "{step}");
        let mut left = house.orphans_on(&server).await;
        left.sort();
        let mut expected = foreign.map(str::to_owned);
        expected.sort();
        assert_eq!(left, expected, "{step}");
        house.assert_sound().await;
    }
}

/// What a picked append costs: manifests and lists of both sides are read once, the appended file is looked for
/// (rule R10) and read once by its check, and five objects are written.
#[tokio::test(flavor = "multi_thread")]
async fn a_landing_asks_the_store_for_little() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    house.append("main", &[order(9, 28)]).await;
    let before = server.asked().len();

    house.drain().await;

    assert_eq!(house.state(request).await, "landed");
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for asked in &server.asked()[before..] {
        let kind = asked.object.rsplit('.').next().unwrap();
        *counts.entry(format!("{} {kind}", asked.method)).or_default() += 1;
    }
    let expected = [
        ("GET avro", 4),
        // Its footer, and its columns.
        ("GET parquet", 2),
        ("HEAD parquet", 1),
        ("PUT avro", 2),
        // Staging and landing.
        ("PUT json", 2),
    ];
    assert_eq!(counts, expected.map(|(kind, count)| (kind.to_owned(), count)).into());
}

/// An object of many parts is written in parts and read in ranges.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_object_goes_in_parts() {
    const PIECE: usize = 3 * 1024 * 1024 + 1;
    const PIECES: usize = 14;
    let folder = tempfile::TempDir::new().unwrap();
    let server = S3Server::start(folder.path());
    let files = file_io(server.storage());
    let at = format!("{}/large.bin", server.warehouse());
    let piece = |n: usize| vec![u8::try_from(n).unwrap(); PIECE];
    let mut writer = files.new_output(&at).unwrap().writer().await.unwrap();
    for n in 0..PIECES {
        writer.write(piece(n).into()).await.unwrap();
    }
    writer.close().await.unwrap();

    let input = files.new_input(&at).unwrap();
    assert_eq!(input.metadata().await.unwrap().size, (PIECE * PIECES) as u64);
    let reader = input.reader().await.unwrap();
    for n in 0..PIECES {
        let start = (n * PIECE) as u64;
        let read = reader.read(start..start + PIECE as u64).await.unwrap();
        assert!(read == piece(n), "piece {n} is another");
    }
    // Begin, three parts of 16 MiB at most, end.
    let puts = server.asked().iter().filter(|asked| asked.method == "PUT").count();
    assert_eq!(puts, (PIECE * PIECES).div_ceil(16 * 1024 * 1024));
    assert_eq!(server.objects(), ["warehouse/large.bin"]);
    files.delete(&at).await.unwrap();
    files.delete(&at).await.unwrap();
    assert!(!files.exists(&at).await.unwrap());
}

/// The table says where its files go, on a store and on a disk.
#[tokio::test(flavor = "multi_thread")]
async fn new_files_go_where_the_table_says() {
    let paths = |root: &str| {
        [("write.metadata.path", format!("{root}/meta/")), ("write.data.path", format!("{root}/rows"))]
    };
    let definition = |root: &str| {
        let mut definition = House::orders_definition();
        for (key, value) in paths(root) {
            definition = definition.property(key, &value);
        }
        definition
    };
    let elsewhere = format!("s3://{BUCKET}/elsewhere");
    let (house, server) = House::on_s3_with(definition(&elsewhere), POLICY).await;
    lands_everything(&house).await;
    assert!(server.objects().iter().all(|key| key.starts_with("elsewhere/")), "{:?}", server.objects());
    if let Some(mut python) = Python::on_s3(house.dir.path(), &server) {
        assert_eq!(python.rows("main"), house.rows("main").await);
    }

    let disk = tempfile::TempDir::new().unwrap();
    let root = format!("file://{}", disk.path().display());
    let house = House::with_table(definition(&root), POLICY).await;
    lands_everything(&house).await;
    assert!(!house.dir.path().join("warehouse").exists(), "nothing is below the table's location");
    assert!(house.loaded().await.metadata_location.starts_with(&format!("{root}/meta/")));
    if let Some(mut python) = Python::start(house.dir.path()) {
        assert_eq!(python.rows("main"), house.rows("main").await);
    }
}

/// A picked append, and an operation that is run again.
async fn lands_everything(house: &House) {
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.branch("transform/a").await;
    let paid = Order { status: "paid".to_owned(), cents: 500, ..order(2, 20) };
    house.recorded("transform/a", &keyed_record(2, 20, "paid", "5.00"), &[20], &[order(1, 20), paid]).await;
    house.append("main", &[order(8, 20)]).await;
    for name in ["ingest/a", "transform/a"] {
        let request = house.enqueue(name).await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed", "{}", house.history(request).await);
    }
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 8]);
    house.assert_sound().await;
    let named = house.named_files().await;
    assert!(named.iter().all(|path| path.contains("/meta/") || path.contains("/rows/")), "{named:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_down_holds_the_requests() {
    let (house, mut server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    server.stop();
    let told = house.held(request, "catalog-unavailable").await;
    assert!(told.contains("could not be read") && told.contains("refused"), "{told}");
    server.listen();
    house.lands_now(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_key_is_told_with_what_to_do() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    house.configure_for(&server.catalog_lines_with(&Keys::named("STRANGER", false)), SHORT_LEASE);
    let told = house.held(request, "catalog-unavailable").await;
    assert!(told.contains("InvalidAccessKeyId") && told.contains("check the credentials"), "{told}");
    house.configure_for(&server.catalog_lines(), SHORT_LEASE);
    house.lands_now(request).await;
}

/// Secrets come from the environment, and are not shown.
#[tokio::test(flavor = "multi_thread")]
async fn keys_from_the_environment_are_used_and_not_shown() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    let lines: String = server
        .catalog_lines()
        .lines()
        .filter(|line| !line.contains("key"))
        .map(|l| format!("{l}\n"))
        .collect();
    house.configure_for(&lines, SHORT_LEASE);
    let keys = Keys::named("TESTS", false);
    let drained = |secret: &str| {
        let mut command = house.command(&DRAIN);
        command.env("MERGEBERG_CATALOG_TEST_S3_ACCESS_KEY_ID", &keys.id).env("MERGEBERG_LOG", "trace");
        command.env("MERGEBERG_CATALOG_TEST_S3_SECRET_ACCESS_KEY", secret).output().unwrap()
    };
    let output = drained("hunter2");
    assert_eq!(output.status.code(), Some(7));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("SignatureDoesNotMatch") && !told.contains("hunter2"), "{told}");
    let output = drained(&keys.secret);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !told.contains(&keys.secret), "{told}");
    assert_eq!(house.state(request).await, "landed");
}

/// Without any setting of ours, what the AWS programs read from the environment is enough.
#[tokio::test(flavor = "multi_thread")]
async fn the_environment_of_aws_programs_is_enough() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    let lines: String =
        server.catalog_lines().lines().filter(|l| !l.starts_with("s3.")).map(|l| format!("{l}\n")).collect();
    house.configure_for(&lines, SHORT_LEASE);
    let keys = Keys::named("TESTS", false);
    let output = house
        .command(&DRAIN)
        .env("AWS_ENDPOINT_URL", server.endpoint())
        .env("AWS_REGION", "eu-test-1")
        .env("AWS_ACCESS_KEY_ID", keys.id)
        .env("AWS_SECRET_ACCESS_KEY", keys.secret)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(house.state(request).await, "landed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_may_only_be_read_holds_the_requests() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    server.refuse(|asked| asked.method == "PUT");
    let told = house.held(request, "warehouse-read-only").await;
    assert!(told.contains("AccessDenied"), "{told}");
    server.refuse_nothing();
    house.lands_now(request).await;
}

/// A check that cannot read blames nobody (promise 7).
#[tokio::test(flavor = "multi_thread")]
async fn data_that_may_not_be_read_is_nobodys_fault() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    server.refuse(|asked| asked.method == "GET" && asked.object.ends_with(".parquet"));
    house.drain().await;
    assert_eq!(house.state(request).await, "held(check-could-not-run)");
    assert!(house.detail(request).await.contains("AccessDenied"), "{}", house.detail(request).await);
    server.refuse_nothing();
    // Past the time of the next try.
    house.advance(3_600_000);
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.history(request).await);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
}

/// The shipped program over https with a root of our own; without it, the certificate is refused in words.
#[tokio::test(flavor = "multi_thread")]
async fn s3_over_tls_with_a_private_root() {
    let (house, plain) = House::on_s3(ORDERS_POLICY).await;
    let request = house.waiting().await;
    let certificates = Certificates::make(house.dir.path());
    let server = S3Server::start_over_tls(house.dir.path(), &certificates);
    house.configure_for(&server.catalog_lines(), SHORT_LEASE);
    let told = house.held(request, "catalog-unavailable").await;
    assert!(told.contains("certificate"), "{told}");

    let output = house.command(&DRAIN).env("SSL_CERT_FILE", certificates.root_file()).output().unwrap();

    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(house.state(request).await, "landed");
    assert!(server.asked().iter().any(|asked| asked.method == "PUT"), "it was written over TLS");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    drop(plain);
}

// ---- GCS and Azure -----------------------------------------------------------------------------------------

/// A day of the queue: picked appends, an operation that is run again and taken back, a refused duplicate, a worker that is
/// killed.
async fn a_day_on(dir: tempfile::TempDir, server: &ObjectServer) -> House {
    let definition =
        House::orders_definition().format_version(3).property("write.update.mode", "merge-on-read");
    let house = House::on_object_server(dir, server, definition, POLICY).await;
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    house.branch("transform/a").await;
    let paid = Order { status: "paid".to_owned(), cents: 500, ..order(2, 20) };
    house
        .recorded("transform/a", &keyed_record(2, 20, "paid", "5.00"), &[20], &[order(1, 20), paid.clone()])
        .await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.append_on_new("ingest/b", &[order(3, 21)]).await;
    house.append("main", &[order(8, 20)]).await;
    let mut requests = Vec::new();
    for name in ["ingest/a", "transform/a", "ingest/b"] {
        requests.push(house.enqueue(name).await);
    }
    let killed = house.command(&DRAIN).env(DIE_AT, "staged").output().unwrap();
    let history = house.history(requests[0]).await;
    assert!(!killed.status.success(), "it was not killed: {history}");

    let ran = run_in(house.dir.path(), &DRAIN);

    assert_eq!(ran.code, 0, "{ran:?}");
    let states =
        [house.state(requests[0]).await, house.state(requests[1]).await, house.state(requests[2]).await];
    assert_eq!(states, ["landed", "landed", "refused(duplicate-key)"]);
    assert_eq!(house.rows("main").await, [order(1, 20), paid, order(3, 21), order(4, 22), order(8, 20)]);
    let reverted = house.revert(requests[1]).await;
    house.drain().await;
    assert_eq!(house.state(reverted).await, "landed", "{}", house.history(reverted).await);
    let rows = [order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(8, 20)];
    assert_eq!(house.rows("main").await, rows);
    house.assert_sound().await;
    house
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_on_gcs() {
    let dir = tempfile::TempDir::new().unwrap();
    let Some(server) = ObjectServer::gcs().await else { return };
    let house = a_day_on(dir, &server).await;
    let Some(mut python) = Python::on_gcs(house.dir.path(), &server) else { return };
    assert_eq!(python.rows_by_pyiceberg("main"), house.rows("main").await);
}

/// Written there by PyIceberg, landed by the program, read there again.
#[tokio::test(flavor = "multi_thread")]
async fn what_pyiceberg_writes_on_gcs_is_landed_and_read_there() {
    let dir = tempfile::TempDir::new().unwrap();
    let Some(server) = ObjectServer::gcs().await else { return };
    let house = House::on_object_server(dir, &server, House::orders_definition(), POLICY).await;
    let Some(mut python) = Python::on_gcs(house.dir.path(), &server) else { return };
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    house.branch("ingest/py").await;
    python.append("ingest/py", &[order(4, 22), order(5, 20)]);
    house.append("main", &[order(8, 20)]).await;
    let request = house.enqueue("ingest/py").await;
    assert_eq!(run_in(house.dir.path(), &DRAIN).code, 0);
    assert_eq!(house.state(request).await, "landed", "{}", house.history(request).await);
    let expected = [order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(5, 20), order(8, 20)];
    assert_eq!(python.rows_by_pyiceberg("main"), expected);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_day_on_azure() {
    let dir = tempfile::TempDir::new().unwrap();
    if let Some(server) = ObjectServer::azure(dir.path()).await {
        a_day_on(dir, &server).await;
    }
}

/// Read in ranges; on Azure in parts, which the server for GCS does not speak. What is not there is told as that, and what is
/// gone may be deleted again.
#[tokio::test(flavor = "multi_thread")]
async fn objects_of_gcs_and_azure_are_read_as_they_were_written() {
    const PIECE: usize = 3 * 1024 * 1024 + 1;
    let dir = tempfile::TempDir::new().unwrap();
    for (server, pieces) in [(ObjectServer::gcs().await, 4), (ObjectServer::azure(dir.path()).await, 7)] {
        let Some(server) = server else { continue };
        let files = file_io(server.storage());
        let at = format!("{}/day=a b/l%20rge+ü.bin", server.warehouse);
        let piece = |n: usize| vec![u8::try_from(n).unwrap(); PIECE];
        let mut writer = files.new_output(&at).unwrap().writer().await.unwrap();
        for n in 0..pieces {
            writer.write(piece(n).into()).await.unwrap();
        }
        writer.close().await.unwrap();
        let input = files.new_input(&at).unwrap();
        assert_eq!(input.metadata().await.unwrap().size, (PIECE * pieces) as u64, "{at}");
        let reader = input.reader().await.unwrap();
        for n in 0..pieces {
            let start = (n * PIECE) as u64;
            assert!(reader.read(start..start + PIECE as u64).await.unwrap() == piece(n), "{at}: piece {n}");
        }
        files.delete(&at).await.unwrap();
        files.delete(&at).await.unwrap();
        assert!(!files.exists(&at).await.unwrap(), "{at}");
        let error = files.new_input(&at).unwrap().read().await.unwrap_err().to_string();
        assert!(error.contains("it is not there"), "{at}: {error}");
    }
}

/// The store says no: in words that help.
#[tokio::test(flavor = "multi_thread")]
async fn azure_refuses_a_wrong_key_and_the_request_waits() {
    let dir = tempfile::TempDir::new().unwrap();
    let Some(mut server) = ObjectServer::azure(dir.path()).await else { return };
    let house = House::on_object_server(dir, &server, House::orders_definition(), ORDERS_POLICY).await;
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    let request = house.waiting().await;
    let lines = server.catalog_lines();
    server.properties.insert("adls.account-key".to_owned(), "c2VjcmV0".to_owned());
    house.configure_for(&server.catalog_lines(), SHORT_LEASE);
    let told = house.held(request, "catalog-unavailable").await;
    assert!(told.contains("check the credentials"), "{told}");
    house.configure_for(&lines, SHORT_LEASE);
    house.lands_now(request).await;
}

// ---- what is sent to services that cannot be run here ------------------------------------------------------

/// Answers every request with this status and body, and keeps what was asked.
async fn recorder(status: u16, body: &'static str) -> (String, Arc<Mutex<Vec<Request>>>) {
    let seen: Arc<Mutex<Vec<Request>>> = Arc::default();
    let book = Arc::clone(&seen);
    // Served as long as the test's runtime lives.
    let (uri, _serving) = serve(Arc::new(move |request| {
        book.lock().unwrap().push(request);
        Box::pin(async move { Reply::json(status, body.to_owned()) })
    }))
    .await;
    (uri, seen)
}

fn properties(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// What GCS tells of an object that was written.
const GCS_OBJECT: &str = r#"{"name":"ns/t/x.json","size":"4","etag":"e","updated":"2026-11-30T00:00:00Z"}"#;

#[tokio::test(flavor = "multi_thread")]
async fn gcs_is_asked_at_its_endpoint_with_the_token() {
    let (uri, seen) = recorder(200, GCS_OBJECT).await;
    let files = file_io(storage(&properties(&[("gcs.service.host", &uri), ("gcs.oauth2.token", "a-token")])));

    let read = files.new_input("gs://lake/ns/t/data/day=a b/f.parquet").unwrap().read().await.unwrap();
    files.new_output("gs://lake/ns/t/data/day=a b/f.parquet").unwrap().write("text".into()).await.unwrap();

    assert_eq!(&read[..], GCS_OBJECT.as_bytes());
    let seen = seen.lock().unwrap();
    let (get, post) = (&seen[0], &seen[1]);
    assert_eq!((get.method.as_str(), get.query["alt"].as_str()), ("GET", "media"));
    assert_eq!(get.path, "/storage/v1/b/lake/o/ns%2Ft%2Fdata%2Fday%3Da%20b%2Ff.parquet");
    assert_eq!(post.method, "POST");
    assert!(post.path.starts_with("/upload/storage/v1/b/lake/o"), "{}", post.path);
    // Under the name that it is read by: a client that encodes it twice writes where nobody looks.
    assert_eq!(post.query["name"], "ns/t/data/day=a b/f.parquet");
    for request in seen.iter() {
        assert_eq!(request.headers["authorization"], "Bearer a-token");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn azure_is_asked_at_its_endpoint_with_key_or_token() {
    for (credential, value) in
        [("adls.account-key", "c2VjcmV0"), ("adls.sas-token.acc.dfs.core.windows.net", "sv=1&sig=s")]
    {
        let (uri, seen) = recorder(200, "content").await;
        let files = file_io(storage(&properties(&[("adls.endpoint", &uri), (credential, value)])));

        let location = "abfss://lake@acc.dfs.core.windows.net/ns/t/data/day=a b/f.parquet";
        let read = files.new_input(location).unwrap().read().await.unwrap();
        files.new_output(location).unwrap().write("text".into()).await.unwrap();

        assert_eq!(&read[..], b"content");
        let seen = seen.lock().unwrap();
        let writes: Vec<_> =
            seen[1..].iter().map(|r| (r.method.as_str(), r.path.as_str(), r.query.len())).collect();
        assert!(
            writes.iter().all(|(method, path, _)| *path == seen[0].path && *method != "GET"),
            "{writes:?}"
        );
        assert_eq!((seen[1].method.as_str(), seen[1].query["resource"].as_str()), ("PUT", "file"));
        assert!(
            seen.iter().any(|r| r.query.get("action").is_some_and(|a| a == "append") && r.body == "text")
        );
        let get = &seen[0];
        assert_eq!(
            (get.method.as_str(), get.path.as_str()),
            ("GET", "/lake/ns/t/data/day%3Da%20b/f.parquet")
        );
        if credential == "adls.account-key" {
            assert!(get.headers["authorization"].starts_with("SharedKey acc:"), "{:?}", get.headers);
        } else {
            assert_eq!((get.query["sv"].as_str(), get.query["sig"].as_str()), ("1", "s"));
        }
    }
}

/// s3s-fs does not tell a bucket that is not there from a key that is not.
#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_is_not_there_is_told() {
    let (uri, seen) =
        recorder(404, "<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>").await;
    let keys = Keys::named("TESTS", false).properties();
    let mut settings = properties(&[("s3.endpoint", &uri)]);
    settings.extend(keys);
    let files = file_io(storage(&settings));

    let error = files.new_input("s3://nowhere/ns/t/x").unwrap().read().await.unwrap_err();

    let text = error.to_string();
    assert!(
        text.contains("there is no bucket 'nowhere'") && text.contains("check the table's location"),
        "{text}"
    );
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1, "what does not pass is not asked again");
    assert_eq!(seen[0].path, "/nowhere/ns/t/x");
}

/// Troubles that pass are asked again, a bounded number of times.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_in_trouble_is_asked_a_few_times() {
    let (uri, seen) = recorder(503, "<Error><Code>SlowDown</Code><Message>later</Message></Error>").await;
    let keys = Keys::named("TESTS", false).properties();
    let mut settings = properties(&[("s3.endpoint", &uri)]);
    settings.extend(keys);

    let error = file_io(storage(&settings)).new_input("s3://lake/x").unwrap().read().await.unwrap_err();

    assert!(error.to_string().contains("SlowDown: later"), "{error}");
    assert_eq!(seen.lock().unwrap().len(), 4);
}
