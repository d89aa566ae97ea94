//! Every request that is sent to a REST catalog is one of the Iceberg specification's, down to the last name.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use mergeberg::table::catalog::SCRATCH_PREFIX;

use crate::support::House;
use crate::support::fault_server::{Ask, Do, Manners};
use crate::support::order;
use crate::support::python::Python;
use crate::support::shop::{CLIENT, Shop};

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_one_of_the_specification() {
    let manners = Manners {
        prefix: Some("ws"),
        idempotency_keys: true,
        client: Some(CLIENT),
        token_life_s: Some(3_600),
        page: Some(1),
        ..Manners::default()
    };
    let (shop, request) = Shop::with_one_over(manners).await;
    let Some(mut python) = Python::start(shop.house.dir.path()) else { return };
    let house = &shop.house;
    // Landings, a first publish elsewhere, what is taken off again, properties, a list, tokens.
    house.append_on_new("ingest/b", &[order(5, 23)]).await;
    let second = house.enqueue("ingest/b").await;
    shop.server.next(Ask::Landing, Do::Say(503));
    shop.server.next(Ask::Landing, Do::Say(503));
    shop.server.next(Ask::Landing, Do::Say(503));
    house.drain().await;
    for request in [request, second] {
        assert_eq!(house.state(request).await, "landed");
    }
    shop.other_updates().await;
    house.worker.catalog.list_tables().await.unwrap();
    let scratch = "shop.mergeberg_doctor_1".parse().unwrap();
    let made = house.worker.catalog.create_scratch(&scratch, &House::orders_definition()).await.unwrap();
    house.worker.catalog.drop_scratch(&made).await.unwrap();

    let mut requests: Vec<Value> = shop
        .server
        .all_requests()
        .into_iter()
        .filter(|(ask, r)| *ask != Ask::Making || r.body.contains(SCRATCH_PREFIX))
        .map(|(_, r)| {
            json!({ "method": r.method, "path": r.path, "query": r.query, "headers": r.headers, "body": r.body })
        })
        .collect();
    let answer = python.ok("check_requests", json!({ "requests": requests, "prefix": "ws" }));
    assert_eq!(answer["problems"], json!([]));
    let operations: BTreeSet<&str> =
        answer["operations"].as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "createTable",
        "dropTable",
        "getConfig",
        "getToken",
        "listNamespaces",
        "listTables",
        "loadTable",
        "updateTable",
    ];
    assert_eq!(operations, expected.into());
    assert_eq!(actions(&requests), EVERY_ACTION.map(str::to_owned).into(), "no update of ours is left out");

    // The check itself: what is wrong is found.
    let commit = requests.iter_mut().find(|r| r["body"].as_str().unwrap().contains("add-snapshot")).unwrap();
    let wrong = commit["body"].as_str().unwrap().replace("manifest-list", "manifest-lists");
    commit["body"] = json!(wrong);
    let answer = python.ok("check_requests", json!({ "requests": requests, "prefix": "ws" }));
    assert!(answer["problems"].to_string().contains("manifest-list"), "{answer}");
}

const EVERY_ACTION: [&str; 6] = [
    "add-snapshot",
    "remove-properties",
    "remove-snapshot-ref",
    "remove-snapshots",
    "set-properties",
    "set-snapshot-ref",
];

fn actions(requests: &[Value]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for request in requests {
        let body: Value = serde_json::from_str(request["body"].as_str().unwrap()).unwrap_or_default();
        for update in body["updates"].as_array().into_iter().flatten() {
            found.insert(update["action"].as_str().unwrap().to_owned());
        }
    }
    found
}
