//! `on-conflict = "row-merge"`: a source that nothing recorded speaks of is merged into the target row by row.

use std::collections::{BTreeMap, BTreeSet};

use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::ids::RequestId;

use crate::oracle::random::Random;
use crate::support::{House, Order, order};

fn policy(more: &str) -> String {
    format!(
        "table = \"shop.orders\"\n\
         [[class]]\nname = \"edits\"\nprefix = \"edits/\"\non-conflict = \"row-merge\"\nkey = [\"order_id\"]\n{more}\n\
         [[class]]\nname = \"default\"\nprefix = \"\"\n"
    )
}

/// The branch's rows are these now, in new files; nothing says how that came.
async fn becomes(house: &House, name: &str, rows: &[Order]) {
    house.write(name, "overwrite", rows, Removal::Files(Box::new(|_| true)), BTreeMap::new()).await;
}

fn with(row: Order, status: &str) -> Order {
    Order { status: status.to_owned(), ..row }
}

/// Orders 1, 2 and 3 on main; branch and main go on from there.
async fn fork(policy: &str, source: &[Order], target: &[Order]) -> (House, RequestId) {
    let house = House::orders(policy).await;
    house.branch("edits/a").await;
    becomes(&house, "edits/a", source).await;
    becomes(&house, "main", target).await;
    let request = house.enqueue("edits/a").await;
    house.drain().await;
    house.assert_sound().await;
    (house, request)
}

#[tokio::test(flavor = "multi_thread")]
async fn different_rows_of_one_file_are_merged() {
    let source = [with(order(1, 20), "paid"), order(2, 20), order(3, 21), order(7, 22)];
    let target = [order(1, 20), with(order(2, 20), "sent"), order(8, 22)];
    let (house, request) = fork(&policy(""), &source, &target).await;

    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "rebase");
    let expected = [with(order(1, 20), "paid"), with(order(2, 20), "sent"), order(7, 22), order(8, 22)];
    assert_eq!(house.rows("main").await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_rule_it_is_a_conflict() {
    let policy = policy("").replace("on-conflict = \"row-merge\"\nkey = [\"order_id\"]\n", "");
    let source = [with(order(1, 20), "paid"), order(2, 20), order(3, 21)];
    let target = [order(1, 20), with(order(2, 20), "sent"), order(3, 21)];
    let (house, request) = fork(&policy, &source, &target).await;
    assert_eq!(house.state(request).await, "refused(conflict)");
    assert_eq!(house.rows("main").await, target);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_row_changed_differently_is_refused_and_shown() {
    let source = [with(order(1, 20), "paid"), order(3, 21)];
    let target = [with(order(1, 20), "lost"), with(order(2, 20), "sent"), order(3, 21)];
    let (house, request) = fork(&policy(""), &source, &target).await;

    assert_eq!(house.state(request).await, "refused(row-conflict)");
    assert_eq!(house.rows("main").await, target);
    let detail = house.request(request).await.detail.unwrap();
    assert_eq!(detail["text"], "branch and target changed 2 rows to different values");
    let row = |status: &str, id: i64| {
        format!("order_id={id} order_date=2026-08-20 status={status} amount={id}0.00")
    };
    assert_eq!(
        detail["conflicts"],
        serde_json::json!([
            { "key": "order_id=1", "base": row("new", 1), "target": row("lost", 1), "source": row("paid", 1) },
            { "key": "order_id=2", "base": row("new", 2), "target": row("sent", 2), "source": "deleted" },
        ])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_class_may_decide_conflicts() {
    let source = [with(order(1, 20), "paid"), order(3, 21), order(7, 21)];
    let target = [with(order(1, 20), "lost"), with(order(2, 20), "sent"), with(order(7, 23), "theirs")];
    let (house, request) = fork(&policy("row-conflicts = \"keep-target\""), &source, &target).await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.rows("main").await, target);

    let (house, request) = fork(&policy("row-conflicts = \"take-source\""), &source, &target).await;
    assert_eq!(house.state(request).await, "landed");
    // What the branch left alone is the target's: order 3 is gone.
    assert_eq!(house.rows("main").await, [with(order(1, 20), "paid"), order(7, 21)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_changes_are_no_conflict() {
    let both = [with(order(1, 20), "paid"), order(3, 21), order(7, 22)];
    let mut source = both.to_vec();
    source.push(order(9, 25));
    let (house, request) = fork(&policy(""), &source, &both).await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.rows("main").await, source);
}

#[tokio::test(flavor = "multi_thread")]
async fn appends_that_meet_are_merged_where_their_keys_differ() {
    let house = House::orders(&policy("overlap = \"refuse\"")).await;
    for (name, id) in [("edits/a", 7), ("edits/b", 8), ("edits/c", 7)] {
        house.append_on_new(name, &[with(order(id, 22), name)]).await;
    }
    let mut requests = Vec::new();
    for name in ["edits/a", "edits/b", "edits/c"] {
        requests.push(house.enqueue(name).await);
    }
    house.drain().await;
    let mut states = Vec::new();
    for request in requests {
        states.push(house.state(request).await);
    }
    assert_eq!(states, ["landed", "landed", "refused(row-conflict)"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 7, 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_names_no_single_row_is_refused() {
    let source = [order(1, 20), order(1, 21), order(2, 20), order(3, 21)];
    let target = [with(order(1, 20), "sent"), order(2, 20), order(3, 21)];
    let (house, request) = fork(&policy(""), &source, &target).await;
    assert_eq!(house.state(request).await, "refused(row-conflict)");
    assert!(house.detail(request).await.contains("more than one row with order_id=1"));

    let by_status = policy("").replace("order_id", "status");
    let (house, request) = fork(&by_status, &source, &target).await;
    assert_eq!(house.state(request).await, "refused(row-conflict)");
    let no_column = policy("").replace("order_id", "order");
    let (other, unknown) = fork(&no_column, &source, &target).await;
    assert!(other.detail(unknown).await.contains("no column 'order'"), "{}", other.detail(unknown).await);
    assert_eq!(house.rows("main").await, target);
}

/// The branch goes on after it landed: only what is new is merged.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_goes_on_is_merged_from_where_it_was_published() {
    let one = [with(order(1, 20), "paid"), order(2, 20), order(3, 21)];
    let two = [with(order(1, 20), "paid"), order(2, 20), with(order(3, 21), "paid")];
    let house = House::orders(&policy("")).await;
    house.branch("edits/a").await;
    becomes(&house, "edits/a", &one).await;
    becomes(&house, "edits/a", &two).await;
    becomes(&house, "main", &[order(1, 20), with(order(2, 20), "sent"), order(3, 21)]).await;
    let first = house.enqueue("edits/a").await;
    house.drain().await;
    assert_eq!(house.state(first).await, "landed");
    let merged = [with(order(1, 20), "paid"), with(order(2, 20), "sent"), with(order(3, 21), "paid")];
    assert_eq!(house.rows("main").await, merged);

    // On main row 1 is changed again; the branch does not touch it any more.
    let on_main = [with(order(1, 20), "sent"), merged[1].clone(), merged[2].clone()];
    becomes(&house, "main", &on_main).await;
    let mut three = two.to_vec();
    three[2].status = "sent".to_owned();
    becomes(&house, "edits/a", &three).await;
    let second = house.enqueue("edits/a").await;
    house.drain().await;
    assert_eq!(house.state(second).await, "landed", "{}", house.detail(second).await);
    let expected = [with(order(1, 20), "sent"), with(order(2, 20), "sent"), with(order(3, 21), "sent")];
    assert_eq!(house.rows("main").await, expected);
    house.assert_sound().await;
}

/// Rows by key: what a person would say that a merge comes to. `Err`: a row was changed differently.
fn model(base: &[Order], source: &[Order], target: &[Order]) -> Result<Vec<Order>, BTreeSet<i64>> {
    let by_key =
        |rows: &[Order]| -> BTreeMap<i64, Order> { rows.iter().map(|r| (r.id, r.clone())).collect() };
    let (base, source, target) = (by_key(base), by_key(source), by_key(target));
    let keys: BTreeSet<i64> = base.keys().chain(source.keys()).chain(target.keys()).copied().collect();
    let mut merged = Vec::new();
    let mut conflicts = BTreeSet::new();
    for key in keys {
        let (was, mine, theirs) = (base.get(&key), source.get(&key), target.get(&key));
        let row = if mine == was || mine == theirs {
            theirs
        } else if theirs == was {
            mine
        } else {
            conflicts.insert(key);
            continue;
        };
        merged.extend(row.cloned());
    }
    merged.sort();
    if conflicts.is_empty() { Ok(merged) } else { Err(conflicts) }
}

/// Some rows of `from` changed, taken away, or new.
fn edited(random: &mut Random, from: &[Order], who: &str, edits: usize) -> Vec<Order> {
    let mut rows: BTreeMap<i64, Order> = from.iter().map(|row| (row.id, row.clone())).collect();
    for _ in 0..edits {
        let id = 1 + i64::try_from(random.below(12)).unwrap();
        if random.chance(30) {
            rows.remove(&id);
        } else {
            let day = 20 + u32::try_from(random.below(3)).unwrap();
            // Now and then both sides say the same.
            let status = if random.chance(30) { "both" } else { who };
            rows.insert(id, with(order(id, day), status));
        }
    }
    rows.into_values().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn random_edits_come_to_what_a_map_of_rows_says() {
    let rounds: u64 = std::env::var("MERGEBERG_ROW_MERGES").map_or(24, |n| n.parse().unwrap());
    let (mut merged, mut refused) = (0, 0);
    for seed in 0..rounds {
        let random = &mut Random::new(seed);
        let definition = if random.chance(50) {
            House::orders_definition().format_version(3)
        } else {
            House::orders_definition()
        };
        let definition = if random.chance(50) {
            definition.property("write.merge.mode", "merge-on-read")
        } else {
            definition
        };
        let house = House::with_table(definition, &policy("")).await;
        let base = edited(random, &[], "base", 14);
        house.append("main", &base).await;
        house.branch("edits/a").await;
        let (mut source, mut target) = (base.clone(), base.clone());
        for _ in 0..=random.below(2) {
            let edits = random.below(4);
            source = edited(random, &source, "mine", edits);
            becomes(&house, "edits/a", &source).await;
        }
        for _ in 0..=random.below(2) {
            let edits = random.below(4);
            target = edited(random, &target, "theirs", edits);
            becomes(&house, "main", &target).await;
        }
        let request = house.enqueue("edits/a").await;
        house.drain().await;
        let state = house.state(request).await;
        match model(&base, &source, &target) {
            Ok(expected) => {
                assert_eq!(state, "landed", "seed {seed}: {}", house.detail(request).await);
                assert_eq!(house.rows("main").await, expected, "seed {seed}");
                merged += 1;
            }
            Err(keys) => {
                assert_eq!(state, "refused(row-conflict)", "seed {seed}");
                let detail = house.request(request).await.detail.unwrap();
                let shown: BTreeSet<i64> = detail["conflicts"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|c| c["key"].as_str().unwrap().strip_prefix("order_id=").unwrap().parse().unwrap())
                    .collect();
                assert_eq!(shown, keys, "seed {seed}");
                assert_eq!(
                    house.rows("main").await,
                    {
                        let mut t = target.clone();
                        t.sort();
                        t
                    },
                    "seed {seed}"
                );
                refused += 1;
            }
        }
        house.assert_sound().await;
    }
    assert!(merged > 3 && refused > 3, "{merged} merged, {refused} refused: too much of one kind");
}
