//! How often the SQL catalog and the ledger on PostgreSQL are asked for one train: as over REST (`rest_round_trips`), their
//! number is what a landing costs on a server that is far away.

use std::net::SocketAddr;
use std::time::Duration;

use crate::support::child::LONG_LEASE;
use crate::support::postgres::{OnPostgres, TestServer};
use crate::support::{House, ORDERS_POLICY, order};

#[path = "../../benches/support/delayed.rs"]
mod delayed;

use delayed::Delayed;

/// The address with a proxy in between, which counts.
async fn counted(url: &str) -> (String, Delayed) {
    let host = url.split_once('@').unwrap().1.split('/').next().unwrap();
    let server: SocketAddr = host.parse().unwrap();
    let proxy = Delayed::before(server, Duration::ZERO).await.unwrap();
    (url.replacen(host, &proxy.address().to_string(), 1), proxy)
}

/// Round trips to catalog and ledger.
async fn train_of(house: &House, catalog: &Delayed, ledger: &Delayed, size: i64) -> (u64, u64) {
    let mut requests = Vec::new();
    let from = i64::try_from(house.loaded().await.facts.snapshots.len()).unwrap();
    for id in 0..size {
        let name = format!("ingest/{from}-{id}");
        house.append_on_new(&name, &[order(1_000 * from + id, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    let before = (catalog.trips(), ledger.trips());
    house.drain().await;
    let trips = (catalog.trips() - before.0, ledger.trips() - before.1);
    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    trips
}

/// Of the ledger, whatever the train's length. Some 80 of them are waited for one after the other; the others run beside
/// them: connections that are given back, and the watch for new requests, whose number depends on the time it takes.
const MOST_LEDGER_TRIPS: u64 = 260;

#[tokio::test(flavor = "multi_thread")]
async fn a_train_costs_the_same_round_trips_however_many_ride() {
    let Some(server) = TestServer::find() else { return };
    let (catalog_url, catalog) = counted(&server.database_url().await).await;
    let (ledger_url, ledger) = counted(&server.database_url().await).await;
    let on = OnPostgres::at(server, catalog_url, ledger_url, ORDERS_POLICY, LONG_LEASE).await;
    // The first trains also claim the table, and prepare what is asked again.
    for warm_up in [2, 20, 3, 21] {
        train_of(&on.house, &catalog, &ledger, warm_up).await;
    }

    let few = train_of(&on.house, &catalog, &ledger, 2).await;
    let many = train_of(&on.house, &catalog, &ledger, 20).await;

    assert_eq!(few.0, many.0);
    for ledger in [few.1, many.1] {
        assert!(ledger <= MOST_LEDGER_TRIPS, "{few:?} {many:?}");
    }
    on.end().await;
}
