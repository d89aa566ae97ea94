//! Rules E1 to E6: what the checks say, of whom, and how often they look.

use std::sync::Arc;

use mergeberg::config::{KnownTables, compare};
use mergeberg::validate::REUSED;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::policy::TablePolicy;

use crate::support::{House, Moment, ORDERS_POLICY, drain, order};

fn keyed(more: &str) -> String {
    format!(
        "table = \"shop.orders\"\n\
         [[check]]\nid = \"one-order-once\"\ntype = \"duplicate-key\"\n\
         columns = [\"order_id\", \"order_date\"]\n{more}\n\
         [[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow-with-duplicate-check\"\n\
         checks = [\"one-order-once\"]\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e1_a_base_that_is_dirty_already_is_no_requests_fault() {
    let house = House::orders(&keyed("")).await;
    house.append("main", &[order(3, 21)]).await;
    house.append_on_new("work", &[order(4, 21)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 3, 4]);
    // One more of the same is its fault.
    house.append_on_new("worse", &[order(3, 21)]).await;
    let worse = house.enqueue("worse").await;
    house.drain().await;
    assert_eq!(house.state(worse).await, "refused(duplicate-key)");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e1_strict_lets_nothing_land_on_a_dirty_base_and_blames_nobody() {
    let house = House::orders(&keyed("compare = \"strict\"")).await;
    house.append("main", &[order(3, 21)]).await;
    house.append_on_new("work", &[order(4, 21)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "held(check-could-not-run)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 3]);
}

async fn train(house: &House, members: &[(&str, &[(i64, u32)])]) -> Vec<RequestId> {
    let mut requests = Vec::new();
    for (name, rows) in members {
        let rows: Vec<_> = rows.iter().map(|(key, day)| order(*key, *day)).collect();
        house.append_on_new(name, &rows).await;
    }
    for (name, _) in members {
        requests.push(house.enqueue(name).await);
    }
    requests
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e2_one_scan_serves_a_train_that_only_adds() {
    let house = House::orders(ORDERS_POLICY).await;
    let members: Vec<(String, [(i64, u32); 1])> =
        (0..12_i64).map(|n| (format!("ingest/{n}"), [(10 + n, 22)])).collect();
    let members: Vec<(&str, &[(i64, u32)])> =
        members.iter().map(|(name, rows)| (name.as_str(), rows.as_slice())).collect();
    let requests = train(&house, &members).await;
    house.drain().await;
    let mut ids = std::collections::BTreeSet::new();
    for request in &requests {
        let rows = house.evidence(*request, "one-order-once").await;
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].requests, requests, "one scan speaks for all");
        ids.insert(rows[0].id);
    }
    assert_eq!(ids.len(), 1);
    let tail = house.head("main").await.unwrap();
    let table = house.loaded().await;
    let between: Vec<SnapshotId> = table.facts.snapshots.chain(tail).ids[1..12].to_vec();
    for candidate in between {
        let rows = house.ledger.evidence_of_candidate(candidate).await.unwrap();
        assert!(
            rows.iter().all(|row| row.evidence.check != "one-order-once"),
            "not looked at, and not claimed"
        );
    }
    let scanned = &house.evidence(requests[0], "one-order-once").await[0].evidence;
    assert_eq!(scanned.candidate, tail);
    assert_eq!(scanned.rows_scanned, 12, "only the day that the train touched");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e2_a_train_that_removes_is_checked_a_car_at_a_time() {
    let house = House::orders(&keyed("")).await;
    house.branch("replace").await;
    house.overwrite_days("replace", &[21], &[order(3, 21), order(5, 21)]).await;
    house.append_on_new("add", &[order(4, 22)]).await;
    let replace = house.enqueue("replace").await;
    let add = house.enqueue("add").await;
    house.drain().await;
    for request in [replace, add] {
        assert_eq!(house.state(request).await, "landed");
        let rows = house.evidence(request, "one-order-once").await;
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].requests, [request]);
        assert_eq!(Some(rows[0].evidence.candidate), house.request(request).await.landed_snapshot);
    }
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e3_cars_are_kept_or_evicted_in_arrival_order() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = train(
        &house,
        &[
            ("ingest/r1", &[(7, 22)]),
            // Twice against r1; its key 8 is no reason against r3 once it is gone.
            ("ingest/r2", &[(7, 22), (8, 22)]),
            ("ingest/r3", &[(8, 22)]),
            // Against the base.
            ("ingest/r4", &[(3, 21)]),
            ("ingest/r5", &[(9, 22)]),
        ],
    )
    .await;
    house.drain().await;
    let mut states = Vec::new();
    for request in &requests {
        states.push(house.state(*request).await);
    }
    let bad = "refused(duplicate-key)";
    assert_eq!(states, ["landed", bad, "landed", bad, "landed"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 7, 8, 9]);
    assert!(house.detail(requests[1]).await.contains("order_id=7"));
    assert!(house.detail(requests[3]).await.contains("order_id=3"));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e3_a_car_that_repeats_a_key_by_itself_excuses_nobody_else() {
    let house = House::orders(ORDERS_POLICY).await;
    let requests = train(&house, &[("ingest/r1", &[(7, 22), (7, 22)]), ("ingest/r2", &[(7, 22)])]).await;
    house.drain().await;
    assert_eq!(house.state(requests[0]).await, "refused(duplicate-key)");
    assert_eq!(house.state(requests[1]).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 7]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e3_all_violating_keys_count_not_only_the_sample() {
    let house = House::orders(ORDERS_POLICY).await;
    let many: Vec<(i64, u32)> = (0..200).map(|n| (1_000 + n, 22)).collect();
    let requests = train(
        &house,
        &[
            ("ingest/r1", &many),
            ("ingest/r2", &many),
            ("ingest/r3", &[(1_199, 22)]),
            ("ingest/r4", &[(5, 22)]),
        ],
    )
    .await;
    house.drain().await;
    let mut states = Vec::new();
    for request in &requests {
        states.push(house.state(*request).await);
    }
    let bad = "refused(duplicate-key)";
    assert_eq!(states, ["landed", bad, bad, "landed"]);
    assert!(house.detail(requests[1]).await.contains("200 violation"), "{}", house.detail(requests[1]).await);
    assert_eq!(house.keys("main").await.len(), 3 + 200 + 1);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e4_policy_check_tells_a_key_whose_duplicates_can_hide() {
    let house = House::orders(ORDERS_POLICY).await;
    let table = house.loaded().await;
    let problems = |columns: &str, more: &str| {
        let text = format!(
            "table = \"shop.orders\"\n[[check]]\nid = \"key\"\ntype = \"duplicate-key\"\n\
             columns = [{columns}]\n{more}\n"
        );
        let policy = TablePolicy::parse("orders.toml", &text).unwrap();
        let known = KnownTables::from([(house.table.clone(), Some(table.facts.clone()))]);
        compare(&policy, house.dir.path(), &known)
    };
    let hidden = problems("\"order_id\"", "");
    assert_eq!(hidden.len(), 1);
    assert!(hidden[0].message.contains("order_date"), "{}", hidden[0].message);
    assert_eq!(problems("\"order_id\", \"order_date\"", ""), []);
    assert_eq!(problems("\"order_id\"", "scope = \"table\""), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e4_the_partitions_of_removed_files_are_looked_at_too() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"rows\"\ntype = \"row-count\"\nmin = 1\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"rows\"]\n";
    let house = House::orders(policy).await;
    house.branch("work").await;
    house.delete_days("work", &[20, 21]).await;
    house.append("work", &[order(9, 25)]).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    let evidence = &house.evidence(request, "rows").await[0].evidence;
    assert_eq!(evidence.scope, "3 partitions");
    assert!(evidence.measured.contains(&("base rows".to_owned(), "3".to_owned())), "{:?}", evidence.measured);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e5_for_all_checks_pass_on_no_rows_and_a_minimum_guards_them() {
    let policy = |more: &str| {
        format!(
            "table = \"shop.orders\"\n\
             [[check]]\nid = \"filled\"\ntype = \"not-null\"\ncolumns = [\"status\"]\n\
             [[check]]\nid = \"rows\"\ntype = \"row-count\"\nmin = 1\n\
             [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"filled\"{more}]\n"
        )
    };
    for (more, state, keys) in
        [("", "landed", &[1_i64, 2][..]), (", \"rows\"", "refused(row-count)", &[1, 2, 3][..])]
    {
        let house = House::orders(&policy(more)).await;
        house.branch("work").await;
        house.delete_days("work", &[21]).await;
        let request = house.enqueue("work").await;
        house.drain().await;
        assert_eq!(house.state(request).await, state);
        assert_eq!(house.keys("main").await, keys);
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e5_a_days_total_holds_per_request_before_its_last_shard() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"upstream\"\ntype = \"reconciliation\"\nmode = \"at-most\"\n\
        upstream = { file = \"totals.csv\" }\nby = [\"order_date\"]\ncount = \"orders\"\n\
        sums = { amount = \"total\" }\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nchecks = [\"upstream\"]\noverlap = \"allow\"\n";
    let house = House::orders(policy).await;
    let totals = house.dir.path().join("policies/totals.csv");
    std::fs::write(totals, "order_date,orders,total\n2026-08-22,2,90.00\n").unwrap();
    let requests = train(&house, &[("one", &[(4, 22)]), ("two", &[(5, 22)]), ("too-many", &[(6, 22)])]).await;
    house.drain().await;
    let mut states = Vec::new();
    for request in &requests {
        states.push(house.state(*request).await);
    }
    assert_eq!(states, ["landed", "landed", "refused(reconciliation)"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e6_a_pass_is_reused_where_nothing_in_its_scope_changed() {
    // The first landing is lost to a commit on another day, or to one on the very day.
    for (day, reused) in [(29, true), (22, false)] {
        let house = Arc::new(House::orders(&keyed("")).await);
        let requests = train(&house, &[("a", &[(4, 22)]), ("b", &[(5, 22), (6, 23)])]).await;
        let (worker, script) = house.scripted().await;
        let stranger = Arc::clone(&house);
        script.at(Moment::Before(2), move || async move {
            stranger.append("main", &[order(90, day)]).await;
        });
        drain(&worker).await;
        script.assert_played();
        let tail = house.head("main").await.unwrap();
        for request in requests {
            assert_eq!(house.state(request).await, "landed");
            let evidence = house.evidence(request, "one-order-once").await;
            assert_eq!(evidence.len(), 2, "one for each train");
            let last = &evidence[1].evidence;
            let from = last.measured.iter().find(|(what, _)| what == REUSED).map(|(_, from)| from.clone());
            assert_eq!(from.is_some(), reused, "a commit on day {day}: {:?}", last.measured);
            assert_eq!(last.candidate, tail, "promise 2: under exactly the id that main became");
            assert_eq!(last.rows_scanned == 0, reused);
            if reused {
                let first = &evidence[0].evidence;
                assert_eq!(from, Some(format!("snapshot {}", first.candidate)));
                assert!(first.rows_scanned > 0);
            }
        }
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_e6_a_failure_and_a_new_definition_are_never_reused() {
    let house = Arc::new(House::orders(&keyed("")).await);
    let requests = train(&house, &[("a", &[(4, 22)])]).await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        owner.append("main", &[order(90, 29)]).await;
        let policy = owner.dir.path().join("policies/orders.toml");
        std::fs::write(policy, keyed("nulls = \"violation\"")).unwrap();
    });
    drain(&worker).await;
    script.assert_played();
    let evidence = house.evidence(requests[0], "one-order-once").await;
    assert!(evidence.iter().all(|e| e.evidence.rows_scanned > 0), "the check is another one");
    // The same bad rows twice: asked twice.
    let bad = train(&house, &[("bad", &[(4, 22)]), ("worse", &[(4, 22)])]).await;
    drain(&worker).await;
    for request in bad {
        assert_eq!(house.state(request).await, "refused(duplicate-key)");
        let evidence = house.evidence(request, "one-order-once").await;
        assert!(evidence.iter().all(|e| e.evidence.measured.iter().all(|(what, _)| what != REUSED)));
    }
}
