//! The commands as a user meets them, on a real SQL catalog and a real ledger.

use std::path::Path;
use std::sync::Arc;

use clap::Parser as _;
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;
use tempfile::TempDir;

use super::testing::{HOUR_MS, START_MS};
use super::{Answer, Cli, Command, Context, Exit, branch, policy, report, request, review};
use crate::config::Config;
use crate::error::UserError;
use crate::ledger::{ForeignKind, ForeignRow, Ledger};
use crate::table::sql_catalog::SqlCatalog;

const CONFIG: &str = "\
[catalog.local]
type = \"sql\"
uri = \"catalog.db\"
warehouse = \"warehouse\"
";
const POLICY: &str = "\
table = \"nyc.flights\"
[[class]]
name = \"ingest\"
prefix = \"ingest/\"
branch-lifetime = \"2d\"
";
const UUID: &str = "9c12d441-03fe-4693-9a96-a0705ddf69c1";

/// A table with `main` at 20 (10 <- 20), `ingest/a` at 30, a tag at 10.
fn metadata(location: &str) -> serde_json::Value {
    let snapshot = |id: i64, parent: Option<i64>, hours: i64| {
        let mut value = json!({
            "snapshot-id": id, "timestamp-ms": START_MS + hours * HOUR_MS, "sequence-number": id / 10,
            "schema-id": 0, "manifest-list": format!("{location}/metadata/{id}.avro"),
            "summary": { "operation": "append" }
        });
        if let Some(parent) = parent {
            value["parent-snapshot-id"] = json!(parent);
        }
        value
    };
    json!({
        "format-version": 2, "table-uuid": UUID, "location": location, "last-sequence-number": 3,
        "last-updated-ms": START_MS + HOUR_MS, "last-column-id": 2,
        "schemas": [{ "type": "struct", "schema-id": 0, "fields": [
            { "id": 1, "name": "carrier", "required": false, "type": "string" },
            { "id": 2, "name": "flight_date", "required": false, "type": "date" }] }],
        "current-schema-id": 0,
        "partition-specs": [{ "spec-id": 0, "fields": [
            { "source-id": 2, "field-id": 1000, "name": "flight_date", "transform": "identity" }] }],
        "default-spec-id": 0, "last-partition-id": 1000,
        "sort-orders": [{ "order-id": 0, "fields": [] }], "default-sort-order-id": 0,
        "current-snapshot-id": 20,
        "refs": {
            "main": { "snapshot-id": 20, "type": "branch" },
            "ingest/a": { "snapshot-id": 30, "type": "branch" },
            "v1.0": { "snapshot-id": 10, "type": "tag" }
        },
        "snapshot-log": [
            { "snapshot-id": 10, "timestamp-ms": START_MS },
            { "snapshot-id": 20, "timestamp-ms": START_MS + HOUR_MS / 2 }],
        "snapshots": [snapshot(10, None, 0), snapshot(20, Some(10), 0), snapshot(30, Some(20), 1)]
    })
}

struct Queue {
    folder: TempDir,
    context: Context,
}

impl Queue {
    /// Two hours after the first snapshot.
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir(root.join("policies")).unwrap();
        std::fs::write(root.join("policies/flights.toml"), POLICY).unwrap();
        let config = Config::parse(&root.join("mergeberg.toml"), CONFIG, |_| None).unwrap();
        Ledger::migrate(&config.ledger).await.unwrap();
        let context = Context::of(config, Arc::new(|| START_MS + 2 * HOUR_MS));
        let queue = Self { folder, context };
        queue.create_table().await;
        queue
    }

    fn path(&self, relative: &str) -> String {
        self.folder.path().join(relative).display().to_string()
    }

    async fn create_table(&self) {
        let catalog = SqlCatalog::create(
            "local",
            &self.path("catalog.db"),
            &self.path("warehouse"),
            self.context.clock.clone(),
        )
        .await
        .unwrap();
        let location = format!("file://{}", self.path("warehouse/nyc/flights"));
        let folder = self.path("warehouse/nyc/flights/metadata");
        std::fs::create_dir_all(&folder).unwrap();
        let name = "00001-3f0e0c0e-1d7e-4c55-8a43-0a6c5a1f0f11.metadata.json";
        std::fs::write(Path::new(&folder).join(name), metadata(&location).to_string()).unwrap();
        catalog.create_namespace("nyc").await.unwrap();
        let table = "nyc.flights".parse().unwrap();
        catalog.register_table(&table, &format!("{location}/metadata/{name}")).await.unwrap();
    }

    async fn run(&self, line: &[&str]) -> Result<Answer, UserError> {
        let args = std::iter::once("mergeberg").chain(line.iter().copied());
        match Cli::try_parse_from(args).unwrap().command {
            Command::Request(command) => request::run(&self.context, command).await,
            Command::Branch(command) => branch::run(&self.context, command).await,
            Command::Operation(command) => super::operation::run(&self.context, command).await,
            Command::Review(command) => review::run(&self.context, command).await,
            Command::Target(command) => super::target::run(&self.context, command).await,
            Command::Report(command) => report::run(&self.context, command).await,
            Command::Policy(command) => policy::run(&self.context, command).await,
            Command::Plan(args) => super::plan::run(&self.context, &args).await,
            Command::Worker(args) => super::worker::run(&self.context, &args).await,
            Command::Doctor(args) => super::doctor::run(&self.context, &args).await,
            Command::Init(_) | Command::Migrate | Command::Demo(_) | Command::DemoWriter(_) => {
                panic!("has its own tests")
            }
        }
    }

    async fn ok(&self, line: &[&str]) -> Answer {
        self.run(line).await.unwrap()
    }

    async fn error(&self, line: &[&str]) -> UserError {
        self.run(line).await.unwrap_err()
    }
}

const ENQUEUE: [&str; 6] = ["request", "enqueue", "--table", "nyc.flights", "--source", "ingest/a"];

#[tokio::test]
async fn a_request_is_enqueued_listed_explained_and_cancelled() {
    let queue = Queue::new().await;
    let line = [&ENQUEUE[..], &["--key", "run-1", "--principal", "ann"]].concat();
    let first = queue.ok(&line).await;
    assert_eq!(
        first.text,
        "request 1 enqueued: 'ingest/a' at 30 -> 'main' of nyc.flights (class ingest), queued\n"
    );
    let again = queue.ok(&line).await;
    assert!(again.text.starts_with("request 1 there already: "), "{}", again.text);
    assert_eq!((&again.json["new"], &again.json["request"]["id"]), (&json!(false), &json!(1)));

    let list = queue.ok(&["request", "list", "--open"]).await;
    assert_eq!(
        list.text,
        "\
id  state   class   table        source    target  classification   age
 1  queued  ingest  nyc.flights  ingest/a  main    -               0 ms
"
    );
    let explained = queue.ok(&["request", "explain", "1"]).await;
    assert!(explained.text.contains("  position  1 of 1, nothing ahead\n"), "{}", explained.text);
    assert_eq!(explained.json["position"]["place"], 1);

    let cancelled = queue.ok(&["request", "cancel", "1", "--principal", "ann"]).await;
    assert_eq!(cancelled.text, "request 1 is cancelled; branch 'ingest/a' is kept\n");
    assert_eq!(queue.error(&["request", "cancel", "1"]).await.code, ReasonCode::WrongState);
    assert_eq!(queue.ok(&["request", "wait", "1"]).await.exit, Exit::NotLanded);
    assert_eq!(queue.ok(&["request", "list", "--open"]).await.text, "no requests\n");
}

#[tokio::test]
async fn bad_input_is_refused_with_a_code_and_the_queue_stays_usable() {
    let queue = Queue::new().await;
    let enqueue = |table: &'static str, source: &'static str, more: &[&'static str]| {
        let line = [&["request", "enqueue", "--table", table, "--source", source][..], more].concat();
        let queue = &queue;
        async move { queue.error(&line).await }
    };
    let unknown_table = enqueue("nyc.flihgts", "ingest/a", &[]).await;
    assert_eq!(unknown_table.code, ReasonCode::TableNotFound);
    assert!(unknown_table.next.starts_with("did you mean 'nyc.flights'?"), "{}", unknown_table.next);
    assert_eq!(
        enqueue("nyc.flights", "ingst/a", &[]).await.render(),
        "error: branch 'ingst/a' not found in nyc.flights  [branch-not-found]\n  \
         next: did you mean 'ingest/a'? names match exactly, quotes, case and blanks included"
    );
    assert_eq!(enqueue("nyc.flights", "v1.0", &[]).await.code, ReasonCode::NotABranch);
    assert_eq!(enqueue("nyc.flights", "main", &[]).await.code, ReasonCode::SourceIsTarget);
    let staging = enqueue("nyc.flights", "ingest/a", &["--target", "staging"]).await;
    assert_eq!(staging.code, ReasonCode::TargetNotFound);
    assert_eq!(enqueue("nyc.flights", "ingest/a", &["--class", "x"]).await.code, ReasonCode::UnknownClass);
    let injected = enqueue("nyc.flights", "x'; DROP TABLE merge_request; --", &[]).await;
    assert_eq!(injected.code, ReasonCode::BranchNotFound);
    assert_eq!(queue.error(&["request", "show", "9"]).await.code, ReasonCode::RequestNotFound);
    assert_eq!(queue.error(&["review", "show", "9"]).await.code, ReasonCode::ReviewNotFound);

    let key = ["--key", "run-1"];
    queue.ok(&[&ENQUEUE[..], &key].concat()).await;
    let conflict = enqueue("nyc.flights", "ingest/a", &["--key", "run-1", "--snapshot", "20"]).await;
    assert_eq!(conflict.code, ReasonCode::KeyConflict);
}

#[tokio::test]
async fn a_broken_policy_is_told_before_anything_is_written() {
    let queue = Queue::new().await;
    std::fs::write(queue.path("policies/flights.toml"), "table = \"nyc.flights\"\n[[clas]]\n").unwrap();
    let error = queue.error(&ENQUEUE).await;
    assert_eq!(error.code, ReasonCode::ConfigInvalid);
    assert!(error.message.ends_with("flights.toml:2: unknown key 'clas'"), "{}", error.message);
    assert_eq!(queue.ok(&["request", "list"]).await.text, "no requests\n");
}

#[tokio::test]
async fn a_branch_is_created_with_its_class_lifetime_and_listed() {
    let queue = Queue::new().await;
    let created = queue.ok(&["branch", "create", "--table", "nyc.flights", "--name", "ingest/b"]).await;
    assert_eq!(
        created.text,
        "created branch 'ingest/b' of nyc.flights at snapshot 20 (class ingest, expires in 2 d 00 h)\n"
    );
    // The head is two hours old (rule R3).
    assert_eq!(created.json["max_ref_age_ms"], 50 * HOUR_MS);
    let taken = queue.error(&["branch", "create", "--table", "nyc.flights", "--name", "ingest/b"]).await;
    assert_eq!(taken.code, ReasonCode::NameTaken);

    queue.ok(&ENQUEUE).await;
    assert_eq!(
        queue.ok(&["branch", "list", "--table", "nyc.flights"]).await.text,
        "\
branch    head         age  class   expires in  request
ingest/a  30    1 h 00 min  ingest           -  1 queued
ingest/b  20    2 h 00 min  ingest    2 d 00 h  -
main      20    2 h 00 min  -                -  -
"
    );
}

#[tokio::test]
async fn policies_are_compared_with_the_tables_of_the_catalog() {
    let queue = Queue::new().await;
    assert_eq!(queue.ok(&["policy", "check"]).await.exit, Exit::Ok);
    let bad = "table = \"nyc.flights\"\n[[check]]\nid = \"key\"\ntype = \"duplicate-key\"\ncolumns = [\"carrier\"]\n";
    std::fs::write(queue.path("policies/flights.toml"), bad).unwrap();
    let answer = queue.ok(&["policy", "check"]).await;
    assert_eq!(answer.exit, Exit::Usage);
    assert!(answer.text.contains("check 'key': a duplicate can hide"), "{}", answer.text);
}

#[tokio::test]
async fn the_report_counts_the_target_and_tells_an_unexplained_snapshot() {
    let queue = Queue::new().await;
    queue.ok(&ENQUEUE).await;
    queue.ok(&["request", "cancel", "1"]).await;
    let ledger = queue.context.ledger().await.unwrap();
    let (table, uuid, main) =
        ("nyc.flights".parse().unwrap(), mergeberg_kernel::ids::TableUuid::new(UUID), RefName::main());
    ledger.set_target_head(&table, &uuid, &main, Some(SnapshotId(10))).await.unwrap();

    let day = ["report", "daily", "--date", "2013-08-20", "--timezone", "America/New_York"];
    let unbalanced = queue.ok(&day).await;
    assert_eq!(unbalanced.exit, Exit::Unbalanced);
    assert!(unbalanced.text.ends_with("nobody knows how they came there: 20\n"), "{}", unbalanced.text);
    assert_eq!(unbalanced.json["figures"]["all"]["cancelled"], 1);

    let bypass = ForeignRow {
        table,
        table_uuid: uuid,
        target: main,
        snapshot: SnapshotId(20),
        kind: ForeignKind::Bypass,
        proof: None,
        text: "a direct commit".to_owned(),
        seen_at_ms: START_MS + HOUR_MS,
    };
    ledger.record_foreign(&[bypass]).await.unwrap();
    let balanced = queue.ok(&day).await;
    assert_eq!(balanced.exit, Exit::Ok);
    let line =
        "nyc.flights main: 1 snapshot on the target = 0 landed + 0 maintenance + 1 bypass  (adds up)\n";
    assert!(balanced.text.ends_with(line), "{}", balanced.text);
    assert_eq!(balanced.json["figures"]["bypasses"], 1);
    // The day before holds nothing.
    let before =
        queue.ok(&["report", "daily", "--date", "2013-08-19", "--timezone", "America/New_York"]).await;
    assert_eq!(before.json["figures"]["all"]["ended"], 0);
}

#[tokio::test]
async fn records_of_operations_are_checked_kept_and_shown() {
    let queue = Queue::new().await;
    let table = ["--table", "nyc.flights"];
    let record = async |more: &[&str]| {
        let line: Vec<&str> = ["operation", "record"].iter().chain(&table).chain(more).copied().collect();
        queue.run(&line).await
    };
    let delete = "DELETE FROM nyc.flights WHERE flight_date = :day";
    let made = ["--id", "void-20", "--sql", delete, "--parameter", "day=2013-08-20"];
    let answer = record(&made).await.unwrap();
    assert!(answer.text.contains("is recorded") && answer.text.contains("mergeberg.operation-id=void-20"));
    assert!(record(&made).await.unwrap().text.contains("was recorded before"));
    let other = record(&["--id", "void-20", "--sql", "DELETE FROM nyc.flights"]).await.unwrap_err();
    assert_eq!(other.code, ReasonCode::KeyConflict);

    let shown = queue.ok(&["operation", "show", "--table", "nyc.flights", "void-20"]).await;
    assert!(shown.text.contains(delete) && shown.text.contains("nyc.flights"), "{}", shown.text);
    assert_eq!(shown.json["digest"], answer.json["digest"]);
    let unknown = queue.error(&["operation", "show", "--table", "nyc.flights", "void-21"]).await;
    assert_eq!(unknown.code, ReasonCode::RecordInvalid);

    let wrong = record(&["--id", "x", "--sql", "DELETE FROM nyc.flights WHERE seats = 1"]).await.unwrap_err();
    assert_eq!(wrong.code, ReasonCode::RecordInvalid);
    assert!(wrong.message.contains("seats"), "{}", wrong.message);
    let wrong = record(&["--id", "x", "--sql", delete, "--input", "raw.up"]).await.unwrap_err();
    assert_eq!(wrong.code, ReasonCode::InvalidArgument);

    let file = queue.path("record.json");
    std::fs::write(&file, r#"{"v":1,"id":"day-20","op":"replace-partitions"}"#).unwrap();
    assert!(record(&[&file]).await.unwrap().text.contains("day-20"));
    assert_eq!(record(&["no-such-file.json"]).await.unwrap_err().code, ReasonCode::InvalidArgument);
}
