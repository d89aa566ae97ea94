//! The demo as its user runs it: the built program, from another folder, twice in the same place.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use mergeberg::cli::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use mergeberg::config::PolicyFolder;
use mergeberg::ledger::Enqueued;
use mergeberg_kernel::ids::{Principal, RefName};
use mergeberg_kernel::reason::ReasonCode;
use serde_json::Value;

use crate::support::{House, ORDERS_POLICY, order};

fn demo(home: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_mergeberg"))
        .current_dir(home)
        // Speaks of another queue, and must not be listened to.
        .env("MERGEBERG_LEDGER", "/nowhere/mergeberg.db")
        .env("MERGEBERG_PRINCIPAL", "somebody-else")
        .arg("demo")
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Branch, state with reason, and the reason's words.
fn ends(json: &Value) -> BTreeMap<String, (String, String)> {
    let requests = json["requests"].as_array().unwrap();
    let end = |request: &Value| {
        let state = match request["state"]["reason"].as_str() {
            Some(reason) => format!("{}({reason})", request["state"]["state"].as_str().unwrap()),
            None => request["state"]["state"].as_str().unwrap().to_owned(),
        };
        let refused = state.starts_with("refused");
        let why =
            if refused { request["detail"]["text"].as_str().unwrap().to_owned() } else { String::new() };
        (request["source"].as_str().unwrap().to_owned(), (state, why))
    };
    requests.iter().map(end).collect()
}

#[test]
fn the_demo_ends_as_promised_and_again_in_the_same_folder() {
    let home = tempfile::tempdir().unwrap();
    let first = demo(home.path(), &["--json"]);
    assert!(first.status.success(), "{}{}", text(&first.stdout), text(&first.stderr));
    let json: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(json["as_expected"], true);

    let ended = ends(&json);
    let states = |prefix: &str| {
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        for (_, (state, _)) in ended.iter().filter(|(branch, _)| branch.starts_with(prefix)) {
            *counts.entry(state).or_default() += 1;
        }
        counts.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(states("ingest/"), [("landed", 29), ("refused(duplicate-key)", 1)]);
    assert_eq!(states("transform/"), [("landed", 7), ("refused(reconciliation)", 1)]);
    assert_eq!(states("feature/"), [("landed", 3)]);
    assert_eq!(states("backfill/"), [("landed", 1)]);
    assert_eq!(states("compaction/"), [("landed", 1)]);
    let (_, copy) = &ended["ingest/2013-08-25-03-again"];
    assert!(copy.contains("flight_date=2013-08-25 carrier="), "rows are named: {copy}");
    let (_, wrong) = &ended["transform/2013-08-16"];
    assert!(wrong.contains("origin=JFK count=310 expected=329"), "totals are named: {wrong}");

    let balance = &json["report"]["balances"][0];
    assert_eq!(balance["adds_up"], true, "{balance}");
    assert_eq!(
        ["on_target", "landed", "maintenance", "bypass"].map(|key| balance[key].as_i64().unwrap()),
        [43, 41, 1, 1]
    );
    // 13,294 flights; seven of the 16th never left, and their transform was refused.
    assert_eq!((&json["rows"]["read"], &json["rows"]["expected"]), (&13_287.into(), &13_287.into()));

    // What it says to try works, although the process that wrote it is gone.
    let config = home.path().join("mergeberg-demo/mergeberg.toml");
    let listed = Command::new(env!("CARGO_BIN_EXE_mergeberg"))
        .args(["--config", config.to_str().unwrap(), "report", "daily"])
        .output()
        .unwrap();
    assert!(listed.status.success(), "{}", text(&listed.stderr));

    let second = demo(home.path(), &[]);
    let shown = text(&second.stdout);
    assert!(second.status.success(), "{shown}{}", text(&second.stderr));
    assert!(shown.contains("43 snapshots on the target = 41 landed + 1 maintenance + 1 bypass  (adds up)"));
    assert!(shown.contains("13287 rows, 0 differ"), "{shown}");
    assert!(!shown.contains('\u{1b}'), "no escape codes where no terminal is");
    // The same reasons in the same words.
    for (branch, (state, why)) in &ended {
        if state.starts_with("refused") {
            let first = why.split("; ").next().unwrap();
            assert!(
                shown.contains(&format!("{branch} is {state}")) && shown.contains(first),
                "{first}: {shown}"
            );
        }
    }
}

#[test]
fn a_folder_that_no_demo_made_is_refused_and_stays_as_it_is() {
    let home = tempfile::tempdir().unwrap();
    let theirs = home.path().join("precious");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join("catalog.db"), "mine").unwrap();
    let refused = demo(home.path(), &["--dir", "precious"]);
    assert_eq!(refused.status.code(), Some(2));
    let error = text(&refused.stderr);
    assert!(error.contains("precious holds something that no demo made"), "{error}");
    assert!(error.contains("next: name a new or empty folder with --dir"), "{error}");
    assert_eq!(std::fs::read_to_string(theirs.join("catalog.db")).unwrap(), "mine");
    assert_eq!(std::fs::read_dir(&theirs).unwrap().count(), 1);
    let misled = demo(home.path(), &["--config", "mergeberg.toml"]);
    assert_eq!(misled.status.code(), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_answers_for_its_request_after_the_branch_is_gone() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let first = house.enqueue_keyed("ingest/a", Some("run-1")).await;
    house.drain().await;
    assert_eq!(house.state(first).await, "landed");
    assert_eq!(house.refs().await, ["main"], "the class hands its branches over");

    let policies = PolicyFolder::new(house.dir.path().join("policies")).read().unwrap();
    let context = EnqueueContext {
        catalog: house.catalog.as_ref(),
        ledger: &house.ledger,
        policies: &policies,
        now_ms: house.now(),
    };
    let args = |source: &str, key: Option<&str>| EnqueueArgs {
        table: house.table.clone(),
        source: RefName::new(source),
        target: RefName::main(),
        snapshot: None,
        class: None,
        idempotency_key: key.map(str::to_owned),
        principal: Principal::new("test"),
    };
    let again = enqueue(context, &args("ingest/a", Some("run-1"))).await.unwrap();
    assert!(matches!(again, Enqueued::Existing(row) if row.id == first));
    // Only the same sender is answered: another branch, another key and no key are what they were.
    for other in [args("ingest/b", Some("run-1")), args("ingest/a", Some("run-2")), args("ingest/a", None)] {
        let error = enqueue(context, &other).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::BranchNotFound);
    }
}
