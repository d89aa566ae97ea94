//! `on-conflict = "external"` with a command: what it is given, and that nothing of it outlives its time.

use std::path::Path;
use std::process::Command;

use crate::support::House;
use crate::support::child::{LONG_LEASE, PATIENCE, until};
use crate::support::pipeline::policy;

/// A command that a shell script is, `$1` being the House's folder.
fn script(lines: &str, more: &str) -> String {
    let text = serde_json::to_string(lines).unwrap();
    policy(&format!("command = [\"sh\", \"-c\", {text}]\n{more}"))
}

async fn house(policy: &str) -> House {
    House::in_real_time(policy, LONG_LEASE).await
}

fn explained(house: &House, request: mergeberg_kernel::ids::RequestId) -> String {
    let output = house.command(&["request", "explain", &request.to_string()]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Does the process with the id in this file still do anything? One that ended may wait for its parent for ever.
fn is_alive(file: &Path) -> bool {
    let id = std::fs::read_to_string(file).unwrap();
    let state = Command::new("ps").args(["-o", "stat=", "-p", id.trim()]).output().unwrap();
    let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_given_names_in_its_environment_and_no_secret() {
    let house =
        house(&script("env | grep MERGEBERG_ | sort; pwd; echo oh >&2; exit 3", "attempts = 1")).await;
    let request = house.enqueue_outdated("transform/a").await;
    let mut worker = house.command(&["worker", "--drain"]);
    worker.env("MERGEBERG_CATALOG_TEST_PASSWORD_OF_OLD", "hunter2").env("MERGEBERG_LEDGER_SECRET", "hunter2");
    assert!(worker.output().unwrap().status.success());

    assert_eq!(house.state(request).await, "refused(external-failed)");
    let runs = house.ledger.external_runs(request).await.unwrap();
    let [run] = runs.as_slice() else { panic!("{runs:?}") };
    assert_eq!((run.status, run.text.as_deref()), (Some(3), Some("it ended with exit code 3")));
    let output = run.output.as_deref().unwrap();
    let folder = house.dir.path().display();
    let head = house.head("main").await.unwrap();
    let row = house.request(request).await;
    for line in [
        format!("MERGEBERG_BASE_SNAPSHOT_ID={head}"),
        format!("MERGEBERG_BRANCH={}", run.branch),
        "MERGEBERG_CATALOG_NAME=test".to_owned(),
        "MERGEBERG_CATALOG_TYPE=sql".to_owned(),
        format!("MERGEBERG_CATALOG_URI=sqlite:///{folder}/catalog.db"),
        format!("MERGEBERG_CATALOG_WAREHOUSE=file://{folder}/warehouse"),
        format!("MERGEBERG_REQUEST_ID={request}"),
        "MERGEBERG_RUN=1".to_owned(),
        "MERGEBERG_SOURCE=transform/a".to_owned(),
        format!("MERGEBERG_SOURCE_SNAPSHOT_ID={}", row.pinned),
        "MERGEBERG_TABLE=shop.orders".to_owned(),
        format!("MERGEBERG_TABLE_UUID={}", row.table_uuid),
        "MERGEBERG_TARGET=main".to_owned(),
        folder.to_string(),
        "oh".to_owned(),
    ] {
        assert!(output.lines().any(|printed| printed == line), "{line} in {output}");
    }
    assert!(!output.contains("hunter2"), "{output}");
    let text = explained(&house, request);
    assert!(text.contains("it ended with exit code 3") && text.contains("oh"), "{text}");
    assert!(text.contains("external-failed"), "{text}");
    assert_eq!(house.refs().await, ["main", "transform/a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_be_started_is_refused_in_words() {
    let house = house(&policy("command = [\"./there-is-no-such-program\"]\nattempts = 2")).await;
    let request = house.enqueue_outdated("transform/a").await;
    assert!(!house.drain_in_child(None));
    assert_eq!(house.state(request).await, "refused(external-failed)");
    assert_eq!(house.outcomes(request).await, ["failed", "failed"]);
    let text = explained(&house, request);
    assert!(text.contains("'./there-is-no-such-program' cannot be started"), "{text}");
}

/// It does not listen to the request to end, and neither does its child.
#[tokio::test(flavor = "multi_thread")]
async fn when_its_time_is_over_all_of_it_ends() {
    let lines =
        "trap '' TERM; (trap '' TERM; while true; do sleep 0.1; done) & echo $! > child; echo waiting; wait";
    let house = house(&script(lines, "attempts = 1\ntimeout = \"1s\"")).await;
    let request = house.enqueue_outdated("transform/a").await;
    assert!(!house.drain_in_child(None));
    assert_eq!(house.state(request).await, "refused(external-timeout)");
    let runs = house.ledger.external_runs(request).await.unwrap();
    assert_eq!(runs[0].output.as_deref(), Some("waiting"));
    assert!(!is_alive(&house.dir.path().join("child")));
    assert_eq!(house.refs().await, ["main", "transform/a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_request_ends_its_command() {
    let house =
        house(&script("(while true; do sleep 0.1; done) & echo $! > child; touch runs; wait", "")).await;
    let request = house.enqueue_outdated("transform/a").await;
    let worker = house.start_worker(&[]);
    until("it runs", async || house.dir.path().join("runs").exists()).await;
    assert_eq!(house.state(request).await, "held(external-running)");
    let cancelled = house.command(&["request", "cancel", &request.to_string()]).output().unwrap();
    assert!(cancelled.status.success(), "{}", String::from_utf8_lossy(&cancelled.stderr));
    until("it has ended", async || house.outcomes(request).await == ["cancelled"]).await;
    assert!(!is_alive(&house.dir.path().join("child")));
    until("its branch is gone", async || house.refs().await == ["main", "transform/a"]).await;
    worker.stop();
    assert_eq!(house.state(request).await, "cancelled");
}

/// A worker that is told to stop does not wait for it, and the next one runs it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_stops_ends_its_commands() {
    let lines =
        "test -e again && exit 4; (while true; do sleep 0.1; done) & echo $! > child; touch runs; wait";
    let house = house(&script(lines, "attempts = 1")).await;
    let request = house.enqueue_outdated("transform/a").await;
    let worker = house.start_worker(&[]);
    until("it runs", async || house.dir.path().join("runs").exists()).await;
    let begin = std::time::Instant::now();
    assert!(worker.stop().status.success());
    assert!(begin.elapsed() < PATIENCE);
    assert!(!is_alive(&house.dir.path().join("child")));
    std::fs::write(house.dir.path().join("again"), "").unwrap();
    assert!(!house.drain_in_child(None));
    assert_eq!(house.outcomes(request).await, ["lost", "failed"], "the lost one is not counted");
    assert_eq!(house.state(request).await, "refused(external-failed)");
    assert_eq!(house.refs().await, ["main", "transform/a"]);
}
