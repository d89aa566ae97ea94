//! Compactions through the queue, in a class of their own: what it takes, when one is stale, who goes first, and that
//! its rows stay as old as they were.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mergeberg::table::branch_writer::Removal;
use mergeberg::table::catalog::Catalog as _;
use mergeberg::table::catalog::CommitOutcome;
use mergeberg::table::data_files::DataFileWriter;
use mergeberg::table::manifests::FileScope;
use mergeberg::table::snapshot_writer::{AddedFile, FileAge, SnapshotChange, SnapshotWriter};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use serde_json::json;

use crate::engine_tables::merge;
use crate::support::engine_table::Oracle;
use crate::support::python::Python;
use crate::support::{House, Order, batch, branch, order};

const POLICY: &str = r#"
table = "shop.orders"

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow"

[[class]]
name = "upsert"
prefix = "upsert/"
overlap = "allow"
equality-deletes = "serial-upsert"

[[class]]
name = "compaction"
prefix = "compaction/"
kind = "compaction"
after-landing = "drop"
"#;

/// ORD with a second file in the 20th: 1, 2 and 4 of the 20th, 3 of the 21st.
async fn house() -> House {
    let house = House::orders(POLICY).await;
    house.append("main", &[order(4, 20)]).await;
    house
}

impl House {
    /// A branch that compacts the 20th, enqueued.
    async fn compacted(&self, name: &str, label: &str) -> RequestId {
        self.branch(name).await;
        self.compact(name, 20, label).await;
        self.enqueue(name).await
    }

    /// Data files of main.
    async fn files(&self) -> usize {
        let table = self.loaded().await;
        self.files_at(&table, self.head("main").await.unwrap()).await.len()
    }

    /// A compaction of every file of a branch that leaves its rows the age `age`, as Spark's does.
    async fn compact_at_age(&self, name: &str, age: i64) -> SnapshotId {
        let table = self.loaded().await;
        let head = table.facts.head(&branch(name)).unwrap();
        let snapshot = table.facts.snapshots.get(head).unwrap();
        let live = self.writer.store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let rows = batch(&self.rows(name).await);
        let files =
            DataFileWriter::write_batches(&table, table.facts.current_schema_id, vec![rows]).await.unwrap();
        let id = SnapshotId(i64::try_from((self.writer.random)() >> 2).unwrap());
        let change = SnapshotChange {
            id,
            label: "replace".to_owned(),
            add: files.into_iter().map(|f| AddedFile { age: FileAge::Kept(age), ..f.into() }).collect(),
            remove: live.data.iter().map(|file| Arc::clone(&file.fact.path)).collect(),
            add_deletes: Vec::new(),
            remove_deletes: BTreeSet::new(),
            summary: BTreeMap::new(),
            now_ms: self.now(),
            schema_id: table.facts.current_schema_id,
        };
        let mut writer = SnapshotWriter::on(&self.writer.store, &table, Some(snapshot)).await.unwrap();
        let new = writer.add(change).await.unwrap();
        let moved = RefFact { snapshot_id: id, ..table.facts.refs[&branch(name)].clone() };
        let outcome =
            self.catalog.commit(&table, &[], vec![Update::AddSnapshot(new), Update::SetRef(moved)]).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
        id
    }

    async fn sequence_number(&self, id: SnapshotId) -> i64 {
        self.loaded().await.facts.snapshots.get(id).unwrap().sequence_number
    }

    /// Each landing's requests, oldest first.
    async fn trains(&self) -> Vec<Vec<RequestId>> {
        let landings = self.ledger.receipts(0, i64::MAX).await.unwrap();
        let mut landings: Vec<_> = landings.into_iter().map(|l| l.intent).collect();
        landings.sort_by_key(|intent| intent.cars.iter().map(|car| car.request).min());
        let mut order: Vec<(i64, Vec<RequestId>)> = Vec::new();
        for intent in landings {
            let number = self.sequence_number(intent.tail).await;
            order.push((number, intent.cars.iter().map(|car| car.request).collect()));
        }
        order.sort();
        order.into_iter().map(|(_, requests)| requests).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c5_a_class_of_compactions_takes_what_changes_no_row() {
    let house = house().await;
    // Whatever it calls itself.
    let good = house.compacted("compaction/good", "overwrite").await;
    house.branch("compaction/update").await;
    let done = Order { status: "done".to_owned(), ..order(1, 20) };
    house.overwrite_days("compaction/update", &[20], &[done, order(2, 20), order(4, 20)]).await;
    let update = house.enqueue("compaction/update").await;
    let append = house.append_on_new("compaction/append", &[order(9, 22)]).await;
    let append = (house.enqueue("compaction/append").await, append);
    house.branch("compaction/nothing").await;
    house.write("compaction/nothing", "replace", &[], Removal::Nothing, BTreeMap::new()).await;
    let nothing = house.enqueue("compaction/nothing").await;
    house.append("main", &[order(5, 20)]).await;
    let before = house.files().await;

    house.drain().await;
    assert_eq!(house.state(good).await, "landed", "{}", house.detail(good).await);
    assert_eq!(house.classified(good).await, "cherry-pick");
    assert_eq!(house.files().await, before - 1, "two files of the 20th became one");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    assert_eq!(house.head("compaction/good").await, None, "the class hands its branches over");
    for refused in [update, append.0] {
        assert_eq!(house.state(refused).await, "refused(not-a-compaction)");
    }
    assert!(house.detail(append.0).await.contains(&format!("snapshot {} adds 1 file", append.1)));
    assert_eq!(house.state(nothing).await, "refused(empty-source)");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compaction_is_stale_when_an_input_is_gone_or_got_new_deletes() {
    for version in [2, 3] {
        let definition = House::orders_definition().format_version(version);
        let house = House::with_table(definition, POLICY).await;
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(4, 20)]).await;
        for name in ["compaction/first", "compaction/second", "compaction/third"] {
            house.branch(name).await;
            house.compact(name, 20, "replace").await;
        }
        let first = house.enqueue("compaction/first").await;
        house.drain().await;
        assert_eq!(house.state(first).await, "landed");
        let second = house.enqueue("compaction/second").await;
        house.drain().await;
        assert_eq!(house.state(second).await, "refused(stale-compaction)", "its inputs are gone");

        house.branch("compaction/late").await;
        house.compact("compaction/late", 20, "replace").await;
        // The file is live still; a row of it is not.
        house.delete_first_row_beside(1).await;
        let late = house.enqueue("compaction/late").await;
        house.drain().await;
        assert_eq!(house.state(late).await, "refused(stale-compaction)", "a row was deleted");
        assert_eq!(house.keys("main").await, [2, 4], "format {version}");
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compactions_let_everybody_else_go_first_and_hold_nobody() {
    let house = house().await;
    let compaction = house.compacted("compaction/20", "replace").await;
    let mut others = Vec::new();
    for (id, day) in [(10, 20), (11, 22)] {
        let name = format!("ingest/{id}");
        house.append_on_new(&name, &[order(id, day)]).await;
        others.push(house.enqueue(&name).await);
    }
    house.drain().await;
    assert_eq!(house.trains().await, [others.clone(), vec![compaction]]);
    for other in others {
        assert!(!house.history(other).await.contains("held"), "{}", house.history(other).await);
    }
    assert!(house.history(compaction).await.contains("held(behind-changes)"));

    // What would replace the files of somebody who waits is itself put off, and is stale in the end.
    let stale = house.compacted("compaction/20-again", "replace").await;
    house.branch("ingest/overwrite").await;
    house.overwrite_days("ingest/overwrite", &[20], &[order(12, 20)]).await;
    let overwrite = house.enqueue("ingest/overwrite").await;
    house.drain().await;
    assert_eq!(house.state(overwrite).await, "landed");
    assert_eq!(house.classified(overwrite).await, "fast-forward");
    assert_eq!(house.state(stale).await, "refused(stale-compaction)");
    assert_eq!(house.keys("main").await, [3, 11, 12]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compaction_past_its_age_bound_is_not_put_off_for_ever() {
    let house = house().await;
    let compaction = house.compacted("compaction/20", "replace").await;
    house.advance(11 * 60 * 1000);
    house.append_on_new("ingest/a", &[order(10, 20)]).await;
    let other = house.enqueue("ingest/a").await;
    house.drain().await;
    assert_eq!(house.trains().await, [vec![compaction], vec![other]]);
    assert!(!house.history(other).await.contains("held"), "{}", house.history(other).await);
    house.assert_sound().await;
}

/// Rows that cannot be read prove nothing, and nobody is refused for it (promise 7).
#[tokio::test(flavor = "multi_thread")]
async fn promise_7_a_compaction_that_cannot_be_compared_waits() {
    let house = house().await;
    let compaction = house.compacted("compaction/20", "replace").await;
    let table = house.loaded().await;
    let inputs = house.files_at(&table, house.head("main").await.unwrap()).await;
    let input = inputs.iter().find(|(_, rows)| rows.iter().any(|row| row.id == 4)).unwrap().0;
    let path = input.strip_prefix("file://").unwrap();
    let bytes = std::fs::read(path).unwrap();
    std::fs::write(path, b"PAR1 nothing PAR1").unwrap();
    house.drain().await;
    assert_eq!(house.state(compaction).await, "held(check-could-not-run)");
    assert!(
        house.detail(compaction).await.contains("could not be compared"),
        "{}",
        house.detail(compaction).await
    );
    std::fs::write(path, bytes).unwrap();
    house.advance(60_000);
    house.drain().await;
    assert_eq!(house.state(compaction).await, "landed", "{}", house.detail(compaction).await);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c7_a_compaction_of_pyiceberg_in_two_snapshots_is_one() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    python.append("main", &[order(4, 20)]);
    for name in ["compaction/all", "compaction/half"] {
        python.branch(name);
        python.ok(
            "compact",
            json!({ "filter": "order_date = '2026-08-20'", "branch": name, "mode": "two-snapshots" }),
        );
    }
    // Half of it is a delete.
    let head = house.head("compaction/half").await.unwrap();
    let half = house.loaded().await.facts.snapshots.get(head).unwrap().parent.unwrap();
    house.force_branch("compaction/half", half).await;
    python.append("main", &[order(5, 20)]);
    let requests = [house.enqueue("compaction/all").await, house.enqueue("compaction/half").await];
    house.drain().await;
    assert_eq!(house.state(requests[0]).await, "landed", "{}", house.detail(requests[0]).await);
    assert_eq!(house.state(requests[1]).await, "refused(not-a-compaction)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    assert_eq!(python.rows("main"), house.rows("main").await);
    house.assert_sound().await;
}

/// A delete by value that came after a row was read for a compaction, and before that was committed, still reaches
/// the row in its new file: on the branch, and on the target, where all numbers are others.
#[tokio::test(flavor = "multi_thread")]
async fn rule_d4_a_compacted_row_is_as_old_on_the_target_as_it_was_on_the_branch() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    let upsert = |python: &mut Python, like: &str, name: &str, id: i64| {
        let rows = json!([{ "order_id": id }]);
        python.ok(
            "add_equality_deletes",
            json!({ "like": like, "rows": rows, "on": ["order_id"], "branch": name }),
        );
    };
    let table = house.loaded().await;
    let files = house.files_at(&table, house.head("main").await.unwrap()).await;
    let like = files.iter().find(|(_, rows)| rows[0].day == 20).unwrap().0.to_string();
    python.branch("upsert/a");
    let appended = SnapshotId(python.append("upsert/a", &[order(6, 20), order(7, 20)]));
    upsert(&mut python, &like, "upsert/a", 6);
    assert_eq!(house.keys("upsert/a").await, [1, 2, 3, 7]);
    // Files of the base among them: the new ones are as old as the youngest of what they were made of, or older.
    house.compact_at_age("upsert/a", house.sequence_number(appended).await).await;
    assert_eq!(house.keys("upsert/a").await, [1, 2, 3, 7]);
    python.append("main", &[order(8, 22)]);
    let request = house.enqueue("upsert/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.keys("main").await, [1, 2, 3, 7, 8]);
    house.assert_sound().await;
}

/// What an earlier request of the branch published has another number on the target than on the branch.
#[tokio::test(flavor = "multi_thread")]
async fn rule_d4_a_compaction_of_what_was_published_earlier_is_as_old_as_that() {
    let house = house().await;
    house.append_on_new("ingest/a", &[order(6, 20)]).await;
    let appended = house.head("ingest/a").await.unwrap();
    house.append("main", &[order(7, 21)]).await;
    let first = house.enqueue("ingest/a").await;
    house.drain().await;
    assert_eq!(house.classified(first).await, "cherry-pick");
    let published = house.sequence_number(house.head("main").await.unwrap()).await;
    let on_branch = house.sequence_number(appended).await;
    assert!(published > on_branch);
    house.compact_at_age("ingest/a", on_branch).await;
    house.append("main", &[order(8, 21)]).await;
    let second = house.enqueue("ingest/a").await;
    house.drain().await;
    assert_eq!(house.state(second).await, "landed", "{}", house.detail(second).await);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 6, 7, 8]);
    let table = house.loaded().await;
    let head = house.head("main").await.unwrap();
    let snapshot = table.facts.snapshots.get(head).unwrap();
    let live = house.writer.store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
    let compacted: Vec<i64> =
        live.data.iter().filter(|f| f.added_by == head).map(|f| f.sequence_number).collect();
    assert_eq!(compacted, [published, published], "one file a day");
    house.assert_sound().await;
}

/// Deletes by value that the target got meanwhile pass a compaction whose rows they still reach.
#[tokio::test(flavor = "multi_thread")]
async fn rule_d4_upserts_do_not_make_a_compaction_stale_that_left_its_rows_their_age() {
    let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
    python.append("main", &[order(4, 20)]);
    let base = house.sequence_number(house.head("main").await.unwrap()).await;
    for (name, age) in [("compaction/young", base + 1), ("compaction/old", base)] {
        house.branch(name).await;
        let id =
            house.compact_at_age(name, age.min(house.loaded().await.facts.last_sequence_number + 1)).await;
        assert!(house.sequence_number(id).await > base);
    }
    let table = house.loaded().await;
    let files = house.files_at(&table, house.head("main").await.unwrap()).await;
    let like = files.iter().find(|(_, rows)| rows[0].day == 20).unwrap().0.to_string();
    python
        .ok("add_equality_deletes", json!({ "like": like, "rows": [{ "order_id": 2 }], "on": ["order_id"] }));
    assert_eq!(house.keys("main").await, [1, 3, 4]);
    let young = house.enqueue("compaction/young").await;
    house.drain().await;
    assert_eq!(house.state(young).await, "refused(stale-compaction)");
    let old = house.enqueue("compaction/old").await;
    house.drain().await;
    assert_eq!(house.state(old).await, "landed", "{}", house.detail(old).await);
    assert_eq!(house.keys("main").await, [1, 3, 4], "the delete reaches the new file");
    house.assert_sound().await;
}

/// Spark's `rewrite_data_files` on a branch (`fixtures/tables`).
#[tokio::test(flavor = "multi_thread")]
async fn compactions_that_spark_wrote_on_a_branch_land_in_their_class() {
    const ONLY: &str =
        "table = \"engine.written\"\n[[class]]\nname = \"default\"\nprefix = \"\"\nkind = \"compaction\"\n";
    for table in ["compaction-identity-v2-append-disjoint", "compaction-identity-v3-append-same"] {
        let merged = merge(table, ONLY, Oracle::LandingOrder).await;
        assert_eq!(merged.outcome, "cherry-pick", "{table}");
        assert!(merged.rows.is_some(), "{table}");
    }
    for table in
        ["delete-rows-identity-v3-mor-append-disjoint", "overwrite-dynamic-identity-v2-append-disjoint"]
    {
        assert_eq!(
            merge(table, ONLY, Oracle::LandingOrder).await.outcome,
            "refused(not-a-compaction)",
            "{table}"
        );
    }
}
