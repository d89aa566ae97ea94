//! `doctor` as a person runs it: what a catalog can do is tried out on a scratch table, and what it cannot is
//! refused at enqueue (rule S4).

use serde_json::Value;

use crate::binary::{Ran, run_in};
use crate::support::child::LONG_LEASE;
use crate::support::fault_server::{Ask, Do, KeysAre, Manners};
use crate::support::shop::Shop;
use crate::support::{House, ORDERS_POLICY, order};

const TRIED: [&str; 4] = ["table-refs", "ref-requirements", "snapshot-removal", "multi-table-commits"];

fn doctor(house: &std::path::Path, more: &[&str]) -> Ran {
    run_in(house, &[&["doctor"], more].concat())
}

/// `yes`, `no` or `unknown` by capability, of those that were tried.
fn tried(told: &Value) -> Vec<(String, Value)> {
    let all = told["capabilities"].as_array().unwrap();
    let tried = all.iter().filter(|one| one["how"] == "tried");
    tried.map(|one| (one["capability"].as_str().unwrap().to_owned(), one["able"].clone())).collect()
}

fn all_able(told: &Value) -> bool {
    tried(told) == TRIED.map(|word| (word.to_owned(), Value::from(true)))
}

/// Scratch tables that something still shows, in the catalog or in the warehouse.
fn left(folder: &std::path::Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![folder.join("warehouse")];
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(at).unwrap().map(Result::unwrap) {
            let name = entry.file_name().to_str().unwrap().to_owned();
            if name.contains("mergeberg_doctor") {
                found.push(name);
            } else if entry.file_type().unwrap().is_dir() {
                open.push(entry.path());
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sql_catalog_is_tried_out_and_nothing_is_left() {
    let house = House::orders(ORDERS_POLICY).await;
    house.configure(LONG_LEASE);
    let folder = house.dir.path();

    let ran = doctor(folder, &["--scratch", "shop", "--json"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    let told = ran.json();
    assert!(all_able(&told), "{told}");
    let scratch =
        told["parts"].as_array().unwrap().iter().find(|part| part["what"] == "scratch table").unwrap();
    assert_eq!(scratch["standing"], "ok", "{told}");
    assert!(left(folder).is_empty());
    assert_eq!(house.worker.catalog.list_tables().await.unwrap(), std::slice::from_ref(&house.table));

    let text = doctor(folder, &[]).stdout;
    assert!(text.contains("branches and tags inside a table"), "{text}");
    assert!(text.contains("no worker leads"), "{text}");
    assert!(text.contains("\nshop.orders\n  ok\n"), "{text}");
    assert!(text.ends_with("The queue can work; see the warnings.\n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_catalog_on_s3_is_tried_out_and_nothing_is_left() {
    let (house, server) = House::on_s3(ORDERS_POLICY).await;
    server.leave("warehouse/shop/mergeberg_doctor_of_another/metadata/x.json");
    let before = server.objects();

    let ran = doctor(house.dir.path(), &["--scratch", "shop", "--json"]);

    let told = ran.json();
    assert_eq!(ran.code, 0, "{told}");
    assert!(all_able(&told), "{told}");
    assert_eq!(server.objects(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rest_server_is_tried_out_and_nothing_is_left() {
    let Some((house, server)) = House::over_rest(ORDERS_POLICY).await else { return };
    house.configure_for(&format!("type = \"rest\"\nuri = \"{}\"", server.uri()), LONG_LEASE);

    let ran = doctor(house.dir.path(), &["--scratch", "shop", "--json"]);
    let told = ran.json();
    assert_eq!(ran.code, 0, "{told}");
    assert!(all_able(&told), "{told}");
    assert!(left(house.dir.path()).is_empty());
    assert_eq!(house.worker.catalog.list_tables().await.unwrap(), std::slice::from_ref(&house.table));
}

/// A server that pays no attention to what is required of other branches would let a landing through whose
/// fence is gone. It is found out, and nothing is enqueued there until it was found mended.
#[tokio::test(flavor = "multi_thread")]
async fn rule_s4_a_server_that_ignores_a_requirement_is_found_out_and_refused_at_enqueue() {
    let shop = Shop::orders(Manners::default()).await;
    let house = &shop.house;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    house.configure_for(&format!("type = \"rest\"\nuri = \"{}\"", shop.server.settings().uri), LONG_LEASE);
    let folder = house.dir.path();
    let enqueue = ["request", "enqueue", "--table", "shop.orders", "--source", "ingest/a", "--key", "one"];

    shop.server.always(Ask::Removal, Do::Ignore("mergeberg-doctor/work"));
    let ran = doctor(folder, &["--scratch", "shop", "--json"]);
    let told = ran.json();
    assert_eq!(ran.code, 7, "{told}");
    assert_eq!(told["standing"], "broken");
    let found = tried(&told);
    assert_eq!(found[1], ("ref-requirements".to_owned(), Value::from(false)), "{told}");
    assert!(told["capabilities"][1]["seen"].as_str().unwrap().contains("another branch"), "{told}");
    let refused = crate::binary::refused_in(folder, &enqueue, 7, "catalog-refused");
    assert!(refused.contains("mergeberg doctor --scratch"), "{refused}");
    // Known from then on.
    let again = doctor(folder, &["--json"]).json();
    assert_eq!(
        (&again["standing"], &again["capabilities"][1]["able"]),
        (&Value::from("broken"), &Value::from(false))
    );

    shop.server.be_honest();
    assert_eq!(doctor(folder, &["--scratch", "shop"]).code, 0);
    assert_eq!(run_in(folder, &enqueue).code, 0);
}

/// Case O30: a server for which a commit to several tables is a loop.
#[tokio::test(flavor = "multi_thread")]
async fn case_o30_a_server_that_commits_table_by_table_is_found_out() {
    let shop = Shop::orders(Manners::default()).await;
    let house = &shop.house;
    house.configure_for(&format!("type = \"rest\"\nuri = \"{}\"", shop.server.settings().uri), LONG_LEASE);

    shop.server.next(Ask::Transaction, Do::ActOnOneThenSay(409));
    let told = doctor(house.dir.path(), &["--scratch", "shop", "--json"]).json();
    assert_eq!(tried(&told)[3], ("multi-table-commits".to_owned(), Value::from(false)), "{told}");
    assert_eq!(told["standing"], "warning", "single tables can be landed on: {told}");

    let text = doctor(house.dir.path(), &[]).stdout;
    assert!(text.contains("requests over several tables are refused at enqueue"), "{text}");
}

/// A server's word on idempotency keys is tried out: what it says is believed only as far as it does it.
#[tokio::test(flavor = "multi_thread")]
async fn idempotency_keys_are_tried_out() {
    for (keys, seen) in [
        (KeysAre::Known, None),
        (KeysAre::Compared, None),
        (KeysAre::Ignored, Some("a commit that was sent twice under one key was looked at twice: 409")),
        (KeysAre::PartOfTheBody, Some("another commit under a key that was used was applied")),
    ] {
        let shop = Shop::orders(Manners { idempotency_keys: true, keys, ..Manners::default() }).await;
        let house = &shop.house;
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        house.append("main", &[order(9, 25)]).await;
        let uri = shop.server.settings().uri;
        house.configure_for(&format!("type = \"rest\"\nuri = \"{uri}\""), LONG_LEASE);
        let folder = house.dir.path();

        let told = doctor(folder, &["--scratch", "shop", "--json"]).json();

        let found = tried(&told);
        assert_eq!(found[4], ("idempotency-keys".to_owned(), Value::from(seen.is_none())), "{told}");
        assert_ne!(told["standing"], "broken", "nothing rests on them: {told}");
        let said = told["capabilities"][4]["seen"].as_str().unwrap_or_default();
        assert!(said.starts_with(seen.unwrap_or_default()), "{told}");

        // A worker relies on what was found, not on what was said: a lost landing is sent again under its key, or not.
        let request = house.enqueue("ingest/a").await;
        shop.server.next(Ask::Landing, Do::Say(503));
        assert_eq!(run_in(folder, &["worker", "--drain"]).code, 0);
        shop.landed_once(request).await;
        let landings = shop.server.requests(Ask::Landing);
        let keyed: Vec<Option<&String>> = landings.iter().map(|l| l.headers.get("idempotency-key")).collect();
        let own = &keyed[keyed.len() - 2..];
        if seen.is_none() {
            assert!(own[0].is_some() && own[0] == own[1], "{keyed:?}");
        } else {
            assert_eq!(own, [None, None], "planned again, without a key");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_broken_the_rest_is_looked_at() {
    let house = House::orders(ORDERS_POLICY).await;
    let folder = house.dir.path();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    house.configure_for(&format!("type = \"rest\"\nuri = \"http://{free}\""), LONG_LEASE);

    let ran = doctor(folder, &["--scratch", "shop"]);
    assert_eq!(ran.code, 7, "{ran:?}");
    assert!(ran.stdout.contains("ledger"), "{ran:?}");
    assert!(ran.stdout.contains("[catalog-unavailable]"), "{ran:?}");
    assert_eq!(ran.stdout.matches("did not answer").count(), 1, "{ran:?}");
    assert!(ran.stdout.ends_with("The queue cannot work as it is; see what is broken.\n"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_is_not_there_is_told() {
    let house = House::orders(ORDERS_POLICY).await;
    house.configure(LONG_LEASE);
    let ran = doctor(house.dir.path(), &["--scratch", "nowhere"]);
    assert_eq!(ran.code, 7, "{ran:?}");
    assert!(ran.stdout.contains("there is no namespace 'nowhere'"), "{ran:?}");
    crate::binary::refused_in(house.dir.path(), &["doctor", "--scratch", "a..b"], 2, "invalid-argument");
}
