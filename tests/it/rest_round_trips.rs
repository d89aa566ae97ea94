//! How often a REST catalog is asked for one train. Each question waits for the network, so their number is what a
//! landing costs on a catalog that is far away.

use std::collections::BTreeMap;

use crate::support::fault_server::{Ask, Manners};
use crate::support::order;
use crate::support::shop::Shop;

/// Questions by kind since `from`; of loads, how many were answered with a table.
fn asked(shop: &Shop, from: usize) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for (ask, _) in &shop.server.all_requests()[from..] {
        let word = match ask {
            Ask::Config => "config",
            Ask::Token => "token",
            Ask::List => "list",
            Ask::Load => "load",
            Ask::Staging => "staging",
            Ask::Landing => "landing",
            Ask::Removal => "removal",
            Ask::Making => "making",
            Ask::Credentials => "credentials",
            Ask::Sign => "sign",
            Ask::Transaction => "transaction",
        };
        *counts.entry(word).or_insert(0) += 1;
    }
    counts
}

async fn train_of(shop: &Shop, size: i64) -> BTreeMap<&'static str, usize> {
    let house = &shop.house;
    let mut requests = Vec::new();
    for id in 0..size {
        let name = format!("ingest/{size}-{id}");
        house.append_on_new(&name, &[order(100 * size + id, 22)]).await;
        requests.push(house.enqueue(&name).await);
    }
    let from = shop.server.all_requests().len();
    house.drain().await;
    for request in requests {
        assert_eq!(house.state(request).await, "landed");
    }
    asked(shop, from)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_train_costs_the_same_questions_however_many_ride() {
    let shop = Shop::orders(Manners::default()).await;
    // The first train also claims the table.
    train_of(&shop, 1).await;

    let few = train_of(&shop, 2).await;
    let many = train_of(&shop, 20).await;

    assert_eq!(few, many);
    // Two commits; five looks at the table while it lands, and one by which the worker sees that nothing is left.
    assert_eq!(few, [("landing", 1), ("load", 6), ("staging", 1)].into());
}
