//! The queue over Apache Polaris: a day of it, and what its privileges let a pipeline do to the target. Without a
//! server (`MERGEBERG_POLARIS`) these tests say so and do nothing.

use mergeberg::ledger::ForeignKind;
use mergeberg::secret::Secret;
use mergeberg::table::catalog::{Catalog, CatalogError, CommitOutcome};
use mergeberg::table::rest_catalog::{RestCatalog, RestSettings};
use mergeberg_kernel::commit::{NewSnapshot, Update};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use serde_json::{Value, json};

use crate::sources::wap;
use crate::support::child::LONG_LEASE;
use crate::support::fault_server::clock_of_now;
use crate::support::polaris::{Grant, Polaris, SCOPE};
use crate::support::python::Python;
use crate::support::{House, ORDERS_POLICY, branch, main_branch, order};

#[tokio::test(flavor = "multi_thread")]
async fn a_day_over_polaris_lands_as_over_sql() {
    let Some((house, _, _)) = House::over_polaris(ORDERS_POLICY).await else { return };
    let mut requests = Vec::new();
    for (name, id, day) in [("ingest/a", 4, 22), ("ingest/b", 5, 23), ("ingest/c", 6, 20)] {
        house.append_on_new(name, &[order(id, day)]).await;
        requests.push(house.enqueue(name).await);
    }
    house.append_on_new("ingest/twice", &[order(4, 22)]).await;
    let duplicate = house.enqueue("ingest/twice").await;

    house.drain().await;

    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    assert_eq!(house.state(duplicate).await, "refused(duplicate-key)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6]);
    assert_eq!(house.refs().await, ["ingest/twice", "main"], "landed branches are handed over");
    house.assert_sound().await;
}

/// PyIceberg writes as a pipeline, the shipped program lands as the queue, both with their own credentials.
#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_writes_and_reads_over_polaris_what_the_program_lands() {
    let Some((house, polaris, queue)) = House::over_polaris(ORDERS_POLICY).await else { return };
    let grants = [Grant::Table(&house.table, "TABLE_WRITE_DATA")];
    let pipeline = polaris.principal("pipeline", &grants).await;
    let Some(mut python) = Python::over_polaris(house.dir.path(), &polaris, &pipeline) else { return };
    configure(&house, &polaris);
    let run = |arguments: &[&str]| run_as(&house, &queue, arguments);
    run(&["branch", "create", "--name", "ingest/made", "--table", "shop.orders", "--json"]);
    python.append("ingest/made", &[order(4, 22)]);
    python.branch("ingest/by-pyiceberg");
    python.append("ingest/by-pyiceberg", &[order(5, 20), order(6, 23)]);

    let mut requests = Vec::new();
    for name in ["ingest/made", "ingest/by-pyiceberg"] {
        let told = run(&["request", "enqueue", "--table", "shop.orders", "--source", name, "--json"]);
        requests.push(RequestId(told["request"]["id"].as_i64().unwrap()));
    }
    run(&["worker", "--drain"]);

    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    let mut expected =
        vec![order(1, 20), order(2, 20), order(3, 21), order(4, 22), order(5, 20), order(6, 23)];
    expected.sort();
    assert_eq!(python.rows("main"), expected);
    assert_eq!(house.rows("main").await, expected);
    assert_eq!(house.head("ingest/made").await, None, "the branch was handed over");
    house.assert_sound().await;
    // Whoever may write a branch may write the target: the queue sees it, and tells it.
    python.append("main", &[order(7, 24)]);
    run(&["worker", "--drain"]);
    let uuid = house.loaded().await.facts.uuid.clone();
    let foreign = house.ledger.foreign(&uuid, &main_branch()).await.unwrap();
    assert_eq!(foreign.iter().map(|f| f.kind).collect::<Vec<_>>(), [ForeignKind::Bypass]);
    assert_eq!(run(&["report", "daily", "--json"])["adds_up"], true);
}

/// What each privilege of a table allows. Polaris asks for one privilege an update, and never for the name of a ref.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_privileges_of_polaris_allow() {
    let Some((house, polaris, _)) = House::over_polaris(ORDERS_POLICY).await else { return };
    let (one, two) = (SnapshotId(71), SnapshotId(72));
    let may = async |name, privileges: &[&str], acts: &[Act], not: &[Act]| {
        let grants: Vec<Grant<'_>> = privileges.iter().map(|p| Grant::Table(&house.table, p)).collect();
        let catalog = polaris.client_of(&polaris.principal(name, &grants).await).await;
        for act in acts {
            let outcome = act.done_by(&catalog, &house.table).await;
            assert!(matches!(outcome, CommitOutcome::Landed(_)), "{name}, {act:?}: {outcome:?}");
        }
        for act in not {
            match act.done_by(&catalog, &house.table).await {
                CommitOutcome::Refused(CatalogError::Refused(told)) if told.contains("is not authorized") => {
                }
                other => panic!("{name}, {act:?}: {other:?}"),
            }
        }
    };
    let (ingest, main) = (Act::Set("ingest/a"), Act::Set("main"));

    may("reader", &["TABLE_READ_DATA"], &[], &[Act::Add(one), ingest, main, Act::Property]).await;
    may("adder", &["TABLE_READ_DATA", "TABLE_ADD_SNAPSHOT"], &[Act::Add(one)], &[ingest, main]).await;
    may(
        "setter",
        &["TABLE_READ_DATA", "TABLE_ADD_SNAPSHOT", "TABLE_SET_SNAPSHOT_REF"],
        &[ingest, main],
        &[Act::Remove("ingest/a"), Act::Drop(one), Act::Property],
    )
    .await;
    let everything = [Act::Add(two), ingest, main, Act::Remove("ingest/a"), Act::Drop(two), Act::Property];
    may("writer", &["TABLE_WRITE_DATA"], &everything, &[]).await;
    // Who would think so? They are older than the privileges for single updates, and still stand for all of them.
    for (name, privilege) in [("properties", "TABLE_WRITE_PROPERTIES"), ("metadata", "TABLE_FULL_METADATA")] {
        may(name, &[privilege, "TABLE_READ_DATA"], &everything, &[]).await;
    }
}

/// Where pipelines may add snapshots and set no refs, nobody but the queue moves the target: they hand over bare
/// snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_may_only_add_snapshots_is_served() {
    let Some((house, polaris, _)) = House::over_polaris(ORDERS_POLICY).await else { return };
    let grants =
        [Grant::Table(&house.table, "TABLE_READ_DATA"), Grant::Table(&house.table, "TABLE_ADD_SNAPSHOT")];
    let pipeline = polaris.principal("pipeline", &grants).await;
    let pipeline = polaris.client_of(&pipeline).await;
    let id = house.stage_bare_through(&pipeline, "load-7", &[order(4, 22)]).await;
    assert_eq!(house.refs().await, ["main"], "no branch was written");

    let request = house.enqueue_staged(wap("load-7")).await;
    house.drain().await;

    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    assert_eq!(house.refs().await, ["main"]);
    let refused = Act::Set("main").done_by(&pipeline, &house.table).await;
    assert!(matches!(refused, CommitOutcome::Refused(_)), "{refused:?}");
    assert_eq!(house.head("main").await, Some(id), "it was forwarded");
    house.assert_sound().await;
}

/// It makes a table and drops it, which the queue's own privileges do not allow.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_tries_polaris_out_and_leaves_nothing() {
    let Some((house, polaris, _)) = House::over_polaris(ORDERS_POLICY).await else { return };
    configure(&house, &polaris);
    let privileges = ["NAMESPACE_LIST", "TABLE_LIST", "TABLE_WRITE_DATA", "TABLE_CREATE", "TABLE_DROP"];
    let doctor = polaris.principal("doctor", &privileges.map(Grant::Catalog)).await;

    let told = run_as(&house, &doctor, &["doctor", "--scratch", "shop", "--json"]);

    let tried = told["capabilities"].as_array().unwrap().iter().filter(|one| one["how"] == "tried");
    let able: Vec<bool> = tried.map(|one| one["able"] == true).collect();
    assert_eq!(able, [true; 3], "{told}");
    assert_eq!(house.catalog.list_tables().await.unwrap().len(), 1);
    let left: Vec<_> = std::fs::read_dir(house.dir.path().join("warehouse/shop")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_does_not_know_is_told_with_what_to_do() {
    let Some((house, polaris, queue)) = House::over_polaris(ORDERS_POLICY).await else { return };
    let told = async |edit: &dyn Fn(&mut RestSettings)| {
        let mut settings = polaris.settings(&queue);
        edit(&mut settings);
        match RestCatalog::open(&settings, clock_of_now()).await {
            Ok(_) => panic!("it opened"),
            Err(error) => error.to_string(),
        }
    };

    let scope = told(&|s| s.scope = None).await;
    assert!(
        scope.contains("The scope is invalid") && scope.contains("; check 'credential', 'scope'"),
        "{scope}"
    );
    let secret = told(&|s| s.credential = Some(Secret::new("queue:wrong"))).await;
    assert!(secret.contains("401") && secret.contains("; check 'credential', 'scope'"), "{secret}");
    for warehouse in [None, Some("no-such-lake".to_owned())] {
        let told = told(&|s| s.warehouse = warehouse.clone()).await;
        assert!(told.contains("warehouse") && told.contains("; check 'uri' and 'warehouse'"), "{told}");
    }
    let nobody = polaris.principal("nobody", &[]).await;
    let error = polaris.client_of(&nobody).await.load(&house.table).await.unwrap_err();
    let error = error.to_string();
    assert!(error.contains("not authorized") && error.contains("; give this principal"), "{error}");
}

fn configure(house: &House<RestCatalog>, polaris: &Polaris) {
    let lines = format!(
        "type = \"rest\"\nuri = \"{}\"\nwarehouse = \"{}\"\nscope = \"{SCOPE}\"",
        polaris.uri(),
        polaris.name()
    );
    house.configure_for(&lines, LONG_LEASE);
}

/// The shipped program as a principal, `ID:SECRET`.
fn run_as(house: &House<RestCatalog>, principal: &str, arguments: &[&str]) -> Value {
    let mut command = house.command(arguments);
    let output = command.env("MERGEBERG_CATALOG_TEST_CREDENTIAL", principal).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

/// A commit of one kind, as a pipeline may want to send it.
#[derive(Clone, Copy, Debug)]
enum Act {
    Add(SnapshotId),
    /// To where main is.
    Set(&'static str),
    Remove(&'static str),
    Drop(SnapshotId),
    Property,
}

impl Act {
    async fn done_by(self, catalog: &RestCatalog, table: &TableName) -> CommitOutcome {
        let table = catalog.load(table).await.unwrap();
        let facts = &table.facts;
        let main = &facts.refs[&branch("main")];
        let update = match self {
            Self::Add(id) => {
                let head = facts.snapshots.get(main.snapshot_id).unwrap();
                Update::AddSnapshot(NewSnapshot {
                    id,
                    parent: Some(head.id),
                    sequence_number: facts.last_sequence_number + 1,
                    timestamp_ms: facts.last_updated_ms + 1,
                    manifest_list: head.manifest_list.clone(),
                    schema_id: facts.current_schema_id,
                    label: "append".to_owned(),
                    summary: Default::default(),
                    row_range: None,
                })
            }
            Self::Set(name) => Update::SetRef(RefFact { name: branch(name), ..main.clone() }),
            Self::Remove(name) => Update::RemoveRef(branch(name)),
            Self::Drop(id) => Update::RemoveSnapshots(vec![id]),
            Self::Property => Update::SetProperties([("owner".to_owned(), "pipeline".to_owned())].into()),
        };
        catalog.commit(&table, &[], vec![update]).await
    }
}

impl Python {
    /// As a principal, `ID:SECRET`.
    fn over_polaris(folder: &std::path::Path, polaris: &Polaris, principal: &str) -> Option<Self> {
        let more = json!({ "credential": principal, "scope": SCOPE, "warehouse": polaris.name() });
        Self::over_rest_with(folder, &polaris.uri(), more)
    }
}
