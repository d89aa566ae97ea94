//! The shipped worker as a process: woken by an enqueue, stopped by a signal.

use std::process::{Command, Stdio};

use crate::support::child::until;
use crate::support::{House, ORDERS_POLICY, order};

/// Far longer than any test: what happens before it was not found by polling.
const POLL: &str = "20m";

fn configure(house: &House) -> std::path::PathBuf {
    let dir = house.dir.path();
    let file = dir.join("mergeberg.toml");
    let text = format!(
        "[catalog.test]\ntype = \"sql\"\nuri = \"{0}/catalog.db\"\nwarehouse = \"file://{0}/warehouse\"\n\n\
         [ledger]\npath = \"ledger.db\"\n\n[worker]\npoll = \"{POLL}\"\nlease = \"1h\"\n",
        dir.display()
    );
    std::fs::write(&file, text).unwrap();
    file
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enqueue_wakes_the_worker_and_a_signal_stops_it() {
    let house = House::orders(ORDERS_POLICY).await;
    let config = configure(&house);
    let worker = Command::new(env!("CARGO_BIN_EXE_mergeberg"))
        .args(["--config", config.to_str().unwrap(), "worker"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("the worker leads", async || house.ledger.leader().await.unwrap().is_some()).await;

    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;
    until("the request lands", async || house.state(request).await == "landed").await;
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);

    let sent = Command::new("kill").args(["-INT", &worker.id().to_string()]).status().unwrap();
    assert!(sent.success());
    let output = worker.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "Stopped.\n");
    assert!(house.ledger.leader().await.unwrap().is_none(), "the lease is given back");
    house.assert_sound().await;
}
