//! What people type and what branches hold: wrong names, odd names, sources with nothing to merge, records
//! that cannot be read. Each is told in words with a stable code, and the next good request lands.

use std::collections::BTreeMap;

use mergeberg::table::branch_writer::Removal;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{SnapshotId, TableName};

use crate::binary::{Shop, TABLE};
use crate::support::{House, batch, branch, order};

async fn update(house: &House, updates: Vec<Update>) {
    let table = house.loaded().await;
    let outcome = house.catalog.commit(&table, &[], updates).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

async fn tag(house: &House, name: &str, at: SnapshotId) {
    let tag = RefFact { name: branch(name), snapshot_id: at, kind: RefKind::Tag, max_ref_age_ms: None };
    update(house, vec![Update::SetRef(tag)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_names_are_told_with_the_near_one() {
    let shop = Shop::open().await;
    shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let enqueue = |table: &str, more: &[&str]| -> Vec<String> {
        let mut args = vec!["request", "enqueue", "--table", table];
        args.extend(more);
        args.iter().map(|arg| (*arg).to_owned()).collect()
    };
    let refused = |args: Vec<String>, code: &str| {
        shop.refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), 3, code)
    };
    let said = refused(enqueue("shop.order", &["--source", "ingest/a"]), "table-not-found");
    assert!(said.contains("did you mean 'shop.orders'?"), "{said}");
    refused(enqueue("nowhere.at.all", &["--source", "ingest/a"]), "table-not-found");
    let said = refused(enqueue(TABLE, &["--source", "ingest/A"]), "branch-not-found");
    assert!(said.contains("did you mean 'ingest/a'?"), "{said}");
    let said = refused(enqueue(TABLE, &["--source", "ingest/a", "--class", "ingset"]), "unknown-class");
    assert!(said.contains("did you mean 'ingest'?"), "{said}");
    refused(enqueue(TABLE, &["--source", "ingest/a", "--target", "staging"]), "target-not-found");
    refused(enqueue(TABLE, &["--source", "ingest/a", "--snapshot", "77"]), "snapshot-not-found");
    for verb in ["show", "explain", "cancel", "wait"] {
        shop.refused(&["request", verb, "99"], 3, "request-not-found");
    }
    for verb in [&["show", "99"][..], &["approve", "99"], &["reject", "99", "--reason", "no"]] {
        let args: Vec<&str> = ["review"].iter().chain(verb).copied().collect();
        shop.refused(&args, 3, "review-not-found");
    }
    for noun in [&["plan"][..], &["branch", "list"], &["branch", "create", "--name", "x"]] {
        let args: Vec<&str> = noun.iter().copied().chain(["--table", "shop.nothing"]).collect();
        shop.refused(&args, 3, "table-not-found");
    }
    shop.refused(&["plan", "--table", TABLE, "--source", "nope"], 3, "branch-not-found");
    shop.refused(&["plan", "--table", TABLE, "--target", "nope"], 3, "target-not-found");
    shop.refused(
        &["branch", "create", "--table", TABLE, "--name", "x", "--from", "nope"],
        3,
        "branch-not-found",
    );
    shop.refused(
        &["branch", "create", "--table", TABLE, "--name", "x", "--class", "nope"],
        3,
        "unknown-class",
    );
    shop.refused(&["branch", "create", "--table", TABLE, "--name", "ingest/a"], 3, "name-taken");
    shop.refused(&["branch", "create", "--table", TABLE, "--name", "mergeberg/x"], 2, "invalid-argument");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_policy_key_stops_with_file_and_line_until_it_is_corrected() {
    let shop = Shop::open().await;
    shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = shop.enqueue("ingest/a");
    let file = shop.path("policies/orders.toml");
    let right = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, right.replace("after-landing", "after-landign")).unwrap();
    for args in [
        &["policy", "check"][..],
        &["worker", "--drain"],
        &["plan", "--table", TABLE],
        &["request", "enqueue", "--table", TABLE, "--source", "ingest/a"],
    ] {
        let said = shop.refused(args, 2, "config-invalid");
        assert!(said.contains("orders.toml:14") && said.contains("after-landing"), "{said}");
    }
    assert_eq!(shop.state(request).await, "queued", "nobody is blamed for a policy");
    std::fs::write(&file, right).unwrap();
    shop.ends(request, "landed", "fast-forward").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn main_a_tag_and_a_missing_target_are_no_sources_and_targets() {
    let shop = Shop::open().await;
    let head = shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    tag(&shop.house, "v1.0", head).await;
    let enqueue = |source: &str, target: &str, code: &str| {
        shop.refused(
            &["request", "enqueue", "--table", TABLE, "--source", source, "--target", target],
            3,
            code,
        )
    };
    enqueue("main", "main", "source-is-target");
    enqueue("v1.0", "main", "not-a-branch");
    enqueue("ingest/a", "v1.0", "not-a-branch");
    let said = enqueue("ingest/a", "mian", "target-not-found");
    assert!(said.contains("did you mean 'main'?"), "{said}");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o33_odd_names_of_branches_are_names() {
    let shop = Shop::open().await;
    let names = [
        "feature/a b/ü",
        "x%2Fy",
        "a.b",
        "'audit-branch'",
        "\"audit\"branch\"",
        "`audit`",
        "-dash",
        "--all",
        "x'; DROP TABLE merge_request; --",
        "日本語/枝",
        "ingest/../up",
        " blank ",
        "$HOME",
        "a\\b",
        "*",
    ];
    let mut requests = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let key = i64::try_from(at).unwrap() + 10;
        shop.ok(&["branch", "create", "--table", TABLE, &format!("--name={name}")]);
        shop.house.append(name, &[order(key, 1 + u32::try_from(at).unwrap())]).await;
        requests.push(shop.enqueue(name));
    }
    let listed = shop.ok(&["branch", "list", "--table", TABLE]);
    let planned = shop.ok(&["plan", "--table", TABLE, "--json"]);
    for name in names {
        assert!(listed.contains(name), "{name} is not in\n{listed}");
        assert!(planned.contains(&serde_json::to_string(name).unwrap()), "{name} is not in\n{planned}");
    }
    shop.drain();
    for (name, request) in names.iter().zip(&requests) {
        assert_eq!(shop.state(*request).await, "landed", "{name}");
        assert!(shop.explain(*request).contains(name.trim()), "{name}");
    }
    let refs = shop.house.refs().await;
    assert!(!refs.contains(&"ingest/../up".to_owned()), "dropped as its class says: {refs:?}");
    assert!(refs.contains(&"x'; DROP TABLE merge_request; --".to_owned()), "kept: {refs:?}");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o33_odd_names_of_tables_are_names() {
    let shop = Shop::open().await;
    let definition = TableDefinition::default()
        .column("order_id", "long", true)
        .column("order_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false)
        .partitioned_by("order_date", "identity");
    for name in [
        "o'rders",
        "or\"ders",
        "my orders",
        "Bestellungen ü",
        "`o`",
        "o'; DROP TABLE merge_request; --",
        "50%",
    ] {
        let text = format!("shop.{name}");
        let table: TableName = text.parse().unwrap();
        shop.house.catalog.define_table(&table, &definition).await.unwrap();
        let write = mergeberg::table::branch_writer::BranchWrite {
            branch: branch("ingest/first"),
            label: "append".to_owned(),
            rows: vec![batch(&[order(1, 20)])],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        let head = shop.house.writer.write(&table, write).await.unwrap();
        let id = shop.enqueue_of(&text, "ingest/first");
        shop.ends(id, "landed", &text).await;
        let loaded = shop.house.catalog.load(&table).await.unwrap();
        assert_eq!(loaded.facts.head(&branch("main")), Some(head), "{name}");
        assert!(shop.ok(&["request", "list", "--table", &text]).contains("landed"));
    }
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o09_a_branch_that_brings_nothing_new_is_published_already() {
    let shop = Shop::open().await;
    let house = &shop.house;
    let old = house.head("main").await.unwrap();
    house.branch("ingest/behind").await;
    house.append("main", &[order(4, 23)]).await;
    house.branch("ingest/equal").await;
    let mut ids = vec![shop.enqueue("ingest/behind"), shop.enqueue("ingest/equal")];
    // A picked one, enqueued again: by its content.
    house.writer.create_branch(&house.table, &branch("work/twice"), old).await.unwrap();
    house.append("work/twice", &[order(5, 24)]).await;
    let first = shop.enqueue("work/twice");
    shop.ends(first, "landed", "cherry-pick").await;
    let again = shop.enqueue("work/twice");
    assert_ne!(first, again);
    ids.push(again);
    let before = house.loaded().await.metadata_location.clone();
    shop.drain();
    for id in ids {
        shop.is(id, "already-published", "already-published").await;
        let waited = shop.ok(&["request", "wait", &id.to_string()]);
        assert!(waited.contains("was published before; nothing was to do"), "{waited}");
    }
    assert_eq!(house.loaded().await.metadata_location, before, "no commit for nothing");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_whose_snapshots_change_nothing_is_refused_as_empty() {
    let shop = Shop::open().await;
    shop.house.append_on_new("ingest/empty", &[]).await;
    let id = shop.enqueue("ingest/empty");
    shop.ends(id, "refused(empty-source)", "look whether the write went to another table or branch").await;
    let waited = shop.run(&["request", "wait", &id.to_string()]);
    assert_eq!(waited.code, 4, "{waited:?}");
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o02_the_first_publish_makes_main() {
    let shop = Shop::empty().await;
    let said = shop.refused(&["branch", "create", "--table", TABLE, "--name", "x"], 3, "branch-not-found");
    assert!(said.contains("writers create the branch, and the queue publishes it"), "{said}");
    assert_eq!(shop.ok(&["branch", "list", "--table", TABLE]), "no branches yet\n");
    shop.ok(&["plan", "--table", TABLE]);
    let head = shop.house.append("ingest/first", &[order(1, 20)]).await;
    let staging = ["request", "enqueue", "--table", TABLE, "--source", "ingest/first", "--target", "staging"];
    shop.refused(&staging, 3, "target-not-found");
    let id = shop.enqueue("ingest/first");
    shop.ends(id, "landed", "landed as").await;
    assert_eq!(shop.house.head("main").await, Some(head));
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o21_an_expired_base_is_no_empty_base() {
    let shop = Shop::open().await;
    let base = shop.house.head("main").await.unwrap();
    shop.house.append_on_new("ingest/late", &[order(4, 22)]).await;
    let id = shop.enqueue("ingest/late");
    shop.house.append("main", &[order(5, 23)]).await;
    let first = shop.house.loaded().await.facts.snapshots.get(base).unwrap().parent.unwrap();
    update(&shop.house, vec![Update::RemoveSnapshots(vec![first, base])]).await;
    shop.ends(id, "refused(base-expired)", "Create the branch again from the target's head").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_without_common_history_is_refused() {
    let shop = Shop::open().await;
    // A writer that names a branch that does not exist makes one without parent.
    shop.house.append("ingest/orphan", &[order(4, 22)]).await;
    let id = shop.enqueue("ingest/orphan");
    shop.ends(id, "refused(unrelated-history)", "share no snapshot").await;
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_is_refused_whatever_the_branch_did() {
    let shop = Shop::open().await;
    let records = [
        (r#"{"v": 2, "id": "a", "op": "append"}"#, "record version 2 is unknown"),
        (r#"{"v": 1, "id": "a", "op": "upsert"}"#, "operation 'upsert' is unknown"),
        (r#"{"v": 1, "id": "a", "op": "append", "wehre": "x"}"#, "unknown field"),
        (r#"{"v": 1, "id": "", "op": "append"}"#, "'id' is empty"),
        ("DROP TABLE merge_request", "no JSON object"),
        ("[]", "no JSON object"),
    ];
    for (at, (record, says)) in records.iter().enumerate() {
        let name = format!("ingest/record-{at}");
        shop.house.branch(&name).await;
        let summary = BTreeMap::from([("mergeberg.operation".to_owned(), (*record).to_owned())]);
        let rows = [order(10 + i64::try_from(at).unwrap(), 22)];
        shop.house.write(&name, "append", &rows, Removal::Nothing, summary).await;
        let id = shop.enqueue(&name);
        shop.ends(id, "refused(record-invalid)", says).await;
    }
    shop.lands_another().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_arguments_are_told_with_the_right_form() {
    let shop = Shop::open().await;
    for args in [
        &["reqest"][..],
        &["request"],
        &["request", "enqueue"],
        &["request", "enqueue", "--table", "orders", "--source", "x"],
        &["request", "enqueue", "--table", TABLE, "--source", ""],
        &["request", "enqueue", "--table", TABLE, "--source", "x", "--timeout", "5s"],
        &["request", "show"],
        &["request", "show", "first"],
        &["request", "wait", "1", "--timeout", "soon"],
        &["request", "list", "--open", "--state", "landed"],
        &["review", "reject", "1"],
        &["target", "adopt", "--table", TABLE],
        &["worker", "--darin"],
        &["report", "daily", "--format", "pdf"],
    ] {
        shop.refused(args, 2, "usage");
    }
    for args in [
        &["request", "list", "--state", "laned"][..],
        &["request", "enqueue", "--table", TABLE, "--source", "main", "--target", "x", "--key", " "],
        &["review", "reject", "1", "--reason", " "],
        &["target", "adopt", "--table", TABLE, "--reason", " "],
        &["report", "daily", "--date", "2013-02-30"],
        &["report", "daily", "--date", "yesterday"],
        &["report", "daily", "--timezone", "Mars/Olympus"],
    ] {
        shop.refused(args, 2, "invalid-argument");
    }
    shop.lands_another().await;
}
