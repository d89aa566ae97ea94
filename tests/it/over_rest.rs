//! The queue over the Iceberg project's own REST server, from the first branch to the last reader. Without the
//! server (`MERGEBERG_REST_SERVER`) these tests say so and do nothing.

use mergeberg_kernel::ids::RequestId;
use serde_json::Value;

use crate::support::child::LONG_LEASE;
use crate::support::python::Python;
use crate::support::{House, ORDERS_POLICY, order};

#[tokio::test(flavor = "multi_thread")]
async fn a_day_over_rest_lands_as_over_sql() {
    let Some((house, _server)) = House::over_rest(ORDERS_POLICY).await else { return };
    let mut requests = Vec::new();
    for (name, id, day) in [("ingest/a", 4, 22), ("ingest/b", 5, 23), ("ingest/c", 6, 20)] {
        house.append_on_new(name, &[order(id, day)]).await;
        requests.push(house.enqueue(name).await);
    }
    house.branch("ingest/twice").await;
    house.append("ingest/twice", &[order(4, 22)]).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn a_first_publish_over_rest() {
    let Some((house, _server)) = House::empty_over_rest(ORDERS_POLICY).await else { return };
    house.append("ingest/first", &[order(1, 20)]).await;
    let request = house.enqueue("ingest/first").await;

    house.drain().await;

    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1]);
    house.assert_sound().await;
}

/// PyIceberg writes through the server, the shipped program enqueues and lands through it, PyIceberg and DuckDB
/// read what is there then.
#[tokio::test(flavor = "multi_thread")]
async fn pyiceberg_writes_and_reads_over_rest_what_the_program_lands() {
    let Some((house, server)) = House::over_rest(ORDERS_POLICY).await else { return };
    let Some(mut python) = Python::over_rest(house.dir.path(), server.uri()) else { return };
    house.configure_for(&format!("type = \"rest\"\nuri = \"{}\"", server.uri()), LONG_LEASE);
    let run = |arguments: &[&str]| -> Value {
        let output = house.command(arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_str(&text).unwrap_or(Value::Null)
    };
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
    // And it goes on from there.
    python.append("main", &[order(7, 24)]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5, 6, 7]);
    house.assert_sound().await;
    run(&["worker", "--drain"]);
    house.balanced_report();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_that_is_not_there_is_told_with_what_to_do() {
    let house = House::empty(ORDERS_POLICY).await;
    // A port that nobody listens on: it was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    house.configure_for(&format!("type = \"rest\"\nuri = \"http://{free}\""), LONG_LEASE);

    let output = house.command(&["branch", "list", "--table", "shop.orders"]).output().unwrap();

    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(text.contains("[catalog-unavailable]") && text.contains(&free.to_string()), "{text}");
    assert!(text.contains("next: see that the catalog runs and that 'uri' is its address"), "{text}");
}
