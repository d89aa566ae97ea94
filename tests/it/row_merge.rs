//! `on-conflict = "row-merge"`: a source that nothing recorded speaks of is merged into the target row by row.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema};
use futures::TryStreamExt;
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::table::scan::{RowReader, ScanCounters, live_rows};
use mergeberg_kernel::ids::RequestId;

use crate::oracle::random::Random;
use crate::support::{House, Order, batch, branch, order, orders_of};

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

// Rows told apart by the ids that format v3 gives them.

const BY_ROW_ID: &str = "table = \"shop.orders\"\n\
    [[class]]\nname = \"edits\"\nprefix = \"edits/\"\non-conflict = \"row-merge\"\noverlap = \"allow\"\n\
    [[class]]\nname = \"default\"\nprefix = \"\"\n";

/// Rows by their ids.
type Ids = BTreeMap<i64, Order>;

async fn ids(house: &House, name: &str) -> Ids {
    let table = house.loaded().await;
    let head = table.facts.snapshots.get(table.facts.head(&branch(name)).unwrap()).unwrap();
    let live = ManifestStore::new(64 << 20).live_files(&table, head, &FileScope::Table).await.unwrap();
    let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap().with_lineage().unwrap();
    let mut found = Ids::new();
    for file in live_rows(live).unwrap() {
        let counters = Arc::new(ScanCounters::default());
        let batches = reader.read(&file, &[0, 1, 2, 3, 4], &counters).unwrap();
        for batch in batches.try_collect::<Vec<_>>().await.unwrap() {
            let own = batch.column(4).as_primitive::<Int64Type>();
            for (row, id) in orders_of(&batch).into_iter().zip(own) {
                assert_eq!(found.insert(id.unwrap(), row), None, "{name}: row {id:?} is there once");
            }
        }
    }
    found
}

/// The branch's rows are these now, in new files; a row that was there keeps its id. What came is read again.
async fn keeps(house: &House, name: &str, kept: &Ids, new: &[Order]) -> Ids {
    let rows: Vec<Order> = kept.values().chain(new).cloned().collect();
    let own: Int64Array = kept.keys().copied().map(Some).chain(new.iter().map(|_| None)).collect();
    let unset: Int64Array = rows.iter().map(|_| None::<i64>).collect();
    let plain = batch(&rows);
    let mut fields: Vec<Field> = plain.schema().fields().iter().map(|f| f.as_ref().clone()).collect();
    let mut columns: Vec<ArrayRef> = plain.columns().to_vec();
    for (name, column) in [("_row_id", own), ("_last_updated_sequence_number", unset)] {
        fields.push(Field::new(name, DataType::Int64, true));
        columns.push(Arc::new(column));
    }
    let rows = vec![RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()];
    let write = BranchWrite {
        branch: branch(name),
        label: "overwrite".to_owned(),
        rows,
        remove: Removal::Files(Box::new(|_| true)),
        summary: BTreeMap::new(),
    };
    house.writer.write(&house.table, write).await.unwrap();
    ids(house, name).await
}

async fn v3() -> (House, Ids) {
    let house = House::with_table(House::orders_definition().format_version(3), BY_ROW_ID).await;
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    house.branch("edits/a").await;
    let base = ids(&house, "main").await;
    (house, base)
}

fn id_of(rows: &Ids, key: i64) -> i64 {
    rows.iter().find(|(_, row)| row.id == key).map(|(id, _)| *id).unwrap()
}

async fn merged(house: &House) -> (String, String) {
    let request = house.enqueue("edits/a").await;
    house.drain().await;
    house.assert_sound().await;
    (house.state(request).await, house.detail(request).await)
}

/// Even the columns that a person would call the key may change.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_rows_of_format_v3_are_merged_by_their_ids() {
    let (house, base) = v3().await;
    let mut source = base.clone();
    source.insert(id_of(&base, 1), with(order(11, 20), "renumbered"));
    keeps(&house, "edits/a", &source, &[order(7, 22)]).await;
    let mut target = base.clone();
    target.insert(id_of(&base, 2), with(order(2, 20), "sent"));
    target.remove(&id_of(&base, 3));
    keeps(&house, "main", &target, &[order(7, 22)]).await;

    let (state, detail) = merged(&house).await;
    assert_eq!(state, "landed", "{detail}");
    let after = ids(&house, "main").await;
    assert_eq!(after[&id_of(&base, 1)], with(order(11, 20), "renumbered"), "it is the same row");
    assert_eq!(after[&id_of(&base, 2)], with(order(2, 20), "sent"));
    let rows: Vec<i64> = house.keys("main").await;
    assert_eq!(rows, [2, 7, 7, 11], "two new rows that look alike are two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_id_that_both_changed_is_a_conflict() {
    let (house, base) = v3().await;
    for (name, status) in [("edits/a", "paid"), ("main", "lost")] {
        let mut rows = base.clone();
        rows.insert(id_of(&base, 1), with(order(1, 20), status));
        keeps(&house, name, &rows, &[]).await;
    }
    let (state, detail) = merged(&house).await;
    assert_eq!(state, "refused(row-conflict)");
    assert!(detail.contains(&format!("_row_id={}", id_of(&base, 1))), "{detail}");
}

/// One load that came to both sides: nothing but a key could tell that its rows are the same.
#[tokio::test(flavor = "multi_thread")]
async fn new_rows_of_both_sides_meet_only_where_the_class_lets_appends_meet() {
    for (rule, state) in [
        ("", "refused(overlapping-append)"),
        ("overlap = \"allow\"\nappends = \"derived\"\n", "refused(overlapping-append)"),
        ("overlap = \"allow\"\n", "landed"),
    ] {
        let (house, base) = v3().await;
        let policy = BY_ROW_ID.replacen("overlap = \"allow\"\n", rule, 1);
        std::fs::write(house.dir.path().join("policies/orders.toml"), policy).unwrap();
        let mut source = base.clone();
        source.insert(id_of(&base, 1), with(order(1, 20), "paid"));
        keeps(&house, "edits/a", &source, &[order(7, 20)]).await;
        keeps(&house, "main", &base, &[order(7, 20)]).await;
        let (ended, detail) = merged(&house).await;
        assert_eq!(ended, state, "{rule}: {detail}");
    }
}

/// An overwrite does not carry ids along: the rows are gone and others are new. Taken for what it says, both sides' copies of
/// a row would land.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_lost_their_ids_on_both_sides_are_never_doubled() {
    for rule in ["refuse", "keep-target", "take-source"] {
        let (house, _) = v3().await;
        let policy =
            BY_ROW_ID.replacen("row-merge\"", &format!("row-merge\"\nrow-conflicts = \"{rule}\""), 1);
        std::fs::write(house.dir.path().join("policies/orders.toml"), policy).unwrap();
        becomes(&house, "edits/a", &[with(order(1, 20), "paid"), order(2, 20), order(3, 21)]).await;
        becomes(&house, "main", &[order(1, 20), with(order(2, 20), "sent"), order(3, 21)]).await;
        let (state, detail) = merged(&house).await;
        assert_eq!(state, "refused(row-conflict)", "{rule}: {detail}");
        assert!(detail.contains("name a 'key' in the class"), "{rule}: {detail}");
        assert_eq!(house.keys("main").await, [1, 2, 3]);
    }
}

/// What a person who follows rows by their ids would say; the new rows of both sides come beside. `None`: nobody can say.
fn model_by_id(base: &Ids, source: &Ids, target: &Ids) -> Option<Vec<Order>> {
    let brings = |side: &Ids| side.keys().any(|id| !base.contains_key(id));
    let mut merged: Vec<Order> = Vec::new();
    for side in [source, target] {
        merged.extend(side.iter().filter(|(id, _)| !base.contains_key(id)).map(|(_, row)| row.clone()));
    }
    for (id, was) in base {
        let (was, mine, theirs) = (Some(was), source.get(id), target.get(id));
        if mine != was && theirs != was {
            let lost = (mine.is_none() && brings(source)) || (theirs.is_none() && brings(target));
            if mine != theirs || lost {
                return None;
            }
        }
        merged.extend(if mine == was { theirs } else { mine }.cloned());
    }
    merged.sort();
    Some(merged)
}

#[tokio::test(flavor = "multi_thread")]
async fn random_edits_by_row_id_come_to_what_following_each_row_says() {
    let rounds: u64 = std::env::var("MERGEBERG_ROW_MERGES").map_or(24, |n| n.parse().unwrap());
    let (mut landed, mut refused) = (0, 0);
    for seed in 0..rounds {
        let random = &mut Random::new(seed);
        let mut definition = House::orders_definition().format_version(3);
        if random.chance(50) {
            definition = definition.property("write.merge.mode", "merge-on-read");
        }
        let house = House::with_table(definition, BY_ROW_ID).await;
        house.append("main", &edited(random, &[], "base", 14)).await;
        house.branch("edits/a").await;
        let base = ids(&house, "main").await;
        let mut sides = Vec::new();
        for name in ["edits/a", "main"] {
            let mut rows = base.clone();
            for _ in 0..=random.below(2) {
                let mut new = Vec::new();
                for _ in 0..random.below(4) {
                    let chosen = rows.keys().copied().nth(random.below(rows.len().max(1)));
                    let status = if random.chance(30) { "both" } else { name };
                    match (random.below(4), chosen) {
                        (0, Some(id)) => drop(rows.remove(&id)),
                        (1 | 2, Some(id)) => {
                            let row = with(rows[&id].clone(), status);
                            rows.insert(id, row);
                        }
                        _ => new.push(with(order(50, 21), status)),
                    }
                }
                // Now and then by a writer that does not carry ids along.
                rows = if random.chance(20) {
                    becomes(&house, name, &rows.values().chain(&new).cloned().collect::<Vec<_>>()).await;
                    ids(&house, name).await
                } else {
                    keeps(&house, name, &rows, &new).await
                };
            }
            sides.push(rows);
        }
        let [source, target] = <[Ids; 2]>::try_from(sides).unwrap();
        let (state, detail) = merged(&house).await;
        let after = ids(&house, "main").await;
        match model_by_id(&base, &source, &target) {
            Some(expected) => {
                assert_eq!(state, "landed", "seed {seed}: {detail}");
                assert_eq!(house.rows("main").await, expected, "seed {seed}");
                let kept = target.iter().filter(|(id, _)| !base.contains_key(id) || source.contains_key(id));
                for (id, _) in kept {
                    assert!(after.contains_key(id), "seed {seed}: row {id} is who it was");
                }
                landed += 1;
            }
            None => {
                assert_eq!(state, "refused(row-conflict)", "seed {seed}: {detail}");
                assert_eq!(after, target, "seed {seed}");
                refused += 1;
            }
        }
    }
    assert!(landed > 3 && refused > 3, "{landed} landed, {refused} refused: too much of one kind");
}
