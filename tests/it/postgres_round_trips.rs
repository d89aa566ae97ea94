//! How often the SQL catalog on PostgreSQL is asked for one train: as over REST (`rest_round_trips`), their number is what a
//! landing costs on a server that is far away.

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

async fn train_of(house: &House, catalog: &Delayed, size: i64) -> u64 {
    let mut requests = Vec::new();
    for id in 0..size {
        let name = format!("ingest/{size}-{id}");
        house.append_on_new(&name, &[order(100 * size + id, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    let from = catalog.trips();
    house.drain().await;
    let trips = catalog.trips() - from;
    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    trips
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_costs_the_same_round_trips_however_many_ride() {
    let Some(server) = TestServer::find() else { return };
    let (catalog_url, catalog) = counted(&server.database_url().await).await;
    let ledger_url = server.database_url().await;
    let on = OnPostgres::at(server, catalog_url, ledger_url, ORDERS_POLICY, LONG_LEASE).await;
    // The first trains also claim the table, and prepare what is asked again.
    for warm_up in [1, 3] {
        train_of(&on.house, &catalog, warm_up).await;
    }

    let few = train_of(&on.house, &catalog, 2).await;
    let many = train_of(&on.house, &catalog, 20).await;

    assert_eq!(few, many);
    on.end().await;
}
