//! Tables with row-level deletes, with PyIceberg and DuckDB as judges: what they wrote is read as they read it,
//! and what we wrote they read as we meant it. Without the engines these tests say so and do nothing.

use std::collections::BTreeMap;

use mergeberg::ledger::ForeignKind;
use mergeberg::table::deletes::{NewDeleteFile, PositionDeleteWriter, RowsToDelete, VectorWriter};
use mergeberg::table::manifests::{FileScope, LiveFile};
use serde_json::{Value, json};

use crate::support::python::{Python, json_rows};
use crate::support::{House, Order, order};

const POLICY: &str = r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[check]]
id = "few"
type = "row-count"
max = 5

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once", "few"]

[[class]]
name = "strict"
prefix = "strict/"
checks = ["one-order-once"]

[[class]]
name = "transform"
prefix = "transform/"
checks = ["one-order-once"]
"#;

impl House {
    /// Live data files of main with their rows, by the smallest order id.
    async fn files_by_order(&self) -> BTreeMap<i64, (LiveFile, Vec<Order>)> {
        let table = self.loaded().await;
        let head = self.head("main").await.unwrap();
        let rows = self.files_at(&table, head).await;
        let snapshot = table.facts.snapshots.get(head).unwrap();
        let live = self.writer.store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let mut files = BTreeMap::new();
        for file in live.data {
            let rows = rows[&file.fact.path].clone();
            let first = rows.iter().map(|row| row.id).min().expect("the file has a live row");
            files.insert(first, (file, rows));
        }
        files
    }

    /// What we, PyIceberg and DuckDB read on main, as order ids.
    async fn agreed_ids(&self, python: &mut Python) -> Vec<i64> {
        let ours = self.rows("main").await;
        assert_eq!(python.rows("main"), ours, "the engines read other rows");
        ours.iter().map(|row| row.id).collect()
    }
}

/// A house whose main has the orders 1, 2 and 5 to 8 on the 20th, 3 on the 21st.
async fn house() -> Option<(House, Python)> {
    let (house, mut python) = House::of_pyiceberg(POLICY).await?;
    python.append("main", &[order(5, 20), order(6, 20), order(7, 20), order(8, 20)]);
    Some((house, python))
}

fn delete_positions(python: &mut Python, file: &LiveFile, positions: &[u64], bounds: bool) {
    let arguments = json!({ "path": &*file.fact.path, "positions": positions, "bounds": bounds });
    python.ok("add_position_deletes", arguments);
}

fn delete_keys(python: &mut Python, like: &LiveFile, ids: &[i64]) {
    let rows: Vec<Value> = ids.iter().map(|id| json!({ "order_id": id })).collect();
    let arguments = json!({ "like": &*like.fact.path, "rows": rows, "on": ["order_id"] });
    python.ok("add_equality_deletes", arguments);
}

fn commit(python: &mut Python, file: &NewDeleteFile) {
    let mut arguments = json!({
        "path": &*file.fact.path, "data_file": &**file.fact.deletes_rows_of().unwrap(), "records": file.fact.records,
    });
    if let Some(offset) = file.file.content_offset() {
        arguments["offset"] = json!(offset);
        arguments["length"] = json!(file.file.content_size_in_bytes());
    }
    python.ok("add_delete_file", arguments);
}

#[tokio::test(flavor = "multi_thread")]
async fn position_deletes_of_an_engine_are_read_and_checked() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    delete_positions(&mut python, &files[&1].0, &[0], true);
    delete_positions(&mut python, &files[&5].0, &[1, 3], false);
    assert_eq!(house.agreed_ids(&mut python).await, [2, 3, 5, 7]);

    // Order 1 is no duplicate any more, order 2 still is.
    for (name, id) in [("ingest/again", 1), ("ingest/twice", 2)] {
        python.branch(name);
        python.append(name, &[order(id, 20)]);
    }
    let (again, twice) = (house.enqueue("ingest/again").await, house.enqueue("ingest/twice").await);
    house.drain().await;
    assert_eq!(house.state(again).await, "landed");
    assert_eq!(house.state(twice).await, "refused(duplicate-key)");
    assert_eq!(house.agreed_ids(&mut python).await, [1, 2, 3, 5, 7]);
    // Five live rows of the day are not too many, six are.
    python.branch("ingest/enough");
    python.append("ingest/enough", &[order(9, 20)]);
    let enough = house.enqueue("ingest/enough").await;
    house.drain().await;
    assert_eq!(house.state(enough).await, "landed");
    python.branch("ingest/more");
    python.append("ingest/more", &[order(10, 20)]);
    let more = house.enqueue("ingest/more").await;
    house.drain().await;
    assert_eq!(house.state(more).await, "refused(row-count)");
    house.assert_sound().await;
}

/// PyIceberg refuses to read equality deletes: DuckDB judges alone, and only where it is right. It takes a null
/// for every key, and looks at no partition: an order of another day with a deleted id would be gone for it.
#[tokio::test(flavor = "multi_thread")]
async fn equality_deletes_of_an_engine_are_read_and_checked() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    delete_keys(&mut python, &files[&5].0, &[2, 6, 8, 99]);
    let by_duckdb = |python: &mut Python| -> Vec<i64> {
        let answer = python.ok("read_duckdb", json!({ "ref": "main", "columns": ["order_id"] }));
        let mut ids: Vec<i64> =
            answer["rows"].as_array().unwrap().iter().map(|r| r["order_id"].as_i64().unwrap()).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(house.keys("main").await, [1, 3, 5, 7]);
    assert_eq!(by_duckdb(&mut python), [1, 3, 5, 7]);
    python.branch("ingest/again");
    python.append("ingest/again", &[order(6, 20)]);
    let again = house.enqueue("ingest/again").await;
    house.drain().await;
    assert_eq!(house.state(again).await, "landed");
    // Newer than the delete: it stays.
    assert_eq!(house.keys("main").await, [1, 3, 5, 6, 7]);
    assert_eq!(by_duckdb(&mut python), [1, 3, 5, 6, 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn position_deletes_that_we_write_are_read_by_the_engines() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    let table = house.loaded().await;
    for (first, positions) in [(1, vec![1_u64]), (5, vec![0, 2, 3])] {
        let rows = RowsToDelete { data_file: files[&first].0.clone(), positions: positions.iter().collect() };
        let written = PositionDeleteWriter::write(&table, &rows).await.unwrap();
        commit(&mut python, &written);
    }
    assert_eq!(house.agreed_ids(&mut python).await, [1, 3, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_vectors_that_we_write_are_read_by_the_engines() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    let table = house.loaded().await;
    let rows: Vec<RowsToDelete> = [(1, vec![1_u64]), (3, vec![0]), (5, vec![0, 1, 2])]
        .into_iter()
        .map(|(first, positions)| RowsToDelete {
            data_file: files[&first].0.clone(),
            positions: positions.iter().collect(),
        })
        .collect();
    let written = VectorWriter::write(&table, &rows).await.unwrap();
    for file in &written {
        assert_eq!(file.fact.path, written[0].fact.path, "all in one file");
        commit(&mut python, file);
    }
    let ours = house.rows("main").await;
    assert_eq!(ours.iter().map(|row| row.id).collect::<Vec<_>>(), [1, 8]);
    let by_pyiceberg = python.ok("read", json!({ "ref": "main" }));
    // DuckDB reads vectors in tables of format v3 only, whose metadata this one is given.
    let location = house.loaded().await.metadata_location.clone();
    let path = location.strip_prefix("file://").unwrap_or(&location);
    let mut metadata: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    metadata["format-version"] = json!(3);
    metadata["next-row-id"] = json!(0);
    let upgraded = format!("{}-v3.metadata.json", path.trim_end_matches(".metadata.json"));
    std::fs::write(&upgraded, metadata.to_string()).unwrap();
    let by_duckdb = python.ok("read_duckdb", json!({ "table": null, "metadata_location": upgraded }));
    assert_eq!(by_pyiceberg["rows"], by_duckdb["rows"]);
    let ids: Vec<i64> =
        by_duckdb["rows"].as_array().unwrap().iter().map(|row| row["order_id"].as_i64().unwrap()).collect();
    assert_eq!(ids, [1, 8]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_does_not_bring_deleted_rows_back() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    delete_positions(&mut python, &files[&5].0, &[1, 2], true);
    delete_positions(&mut python, &files[&1].0, &[0], true);
    assert_eq!(house.agreed_ids(&mut python).await, [2, 3, 5, 8]);
    let record = json!({
        "v": 1, "id": "finish-5", "op": "overwrite-where",
        "where": "order_date = DATE '2026-08-20' AND order_id = 5",
        "query": "SELECT order_id, order_date, 'done' AS status, amount FROM target \
                  WHERE order_date = DATE '2026-08-20' AND order_id = 5",
    });
    let done = Order { status: "done".to_owned(), ..order(5, 20) };
    python.branch("transform/five");
    python.ok(
        "overwrite",
        json!({ "branch": "transform/five", "filter": "order_date = '2026-08-20' and order_id = 5",
                "rows": json_rows(std::slice::from_ref(&done)),
                "snapshot_properties": { "mergeberg.operation": record.to_string() } }),
    );
    python.append("main", &[order(9, 20)]);
    let request = house.enqueue("transform/five").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{:?}", house.request(request).await.detail);
    assert_eq!(house.classified(request).await, "rebase");
    // Row 8 was written again with its file, 6 and 7 were not; 2 lies beside a deleted row in a file that stays.
    assert_eq!(house.agreed_ids(&mut python).await, [2, 3, 5, 8, 9]);
    assert!(house.rows("main").await.contains(&done));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c5_a_compaction_that_applies_deletes_is_maintenance() {
    let Some((house, mut python)) = house().await else { return };
    let files = house.files_by_order().await;
    delete_positions(&mut python, &files[&1].0, &[0], true);
    let (head, uuid) = (house.head("main").await, house.loaded().await.facts.uuid.clone());
    let main = crate::support::main_branch();
    house.ledger.set_target_head(&house.table, &uuid, &main, head).await.unwrap();
    python.branch("strict/append");
    python.append("strict/append", &[order(4, 20)]);
    let append = house.enqueue("strict/append").await;
    let compacted = python.ok("compact", json!({ "filter": "order_date = '2026-08-20'" }));
    assert_eq!(compacted["removed_files"], json!(2));
    house.drain().await;
    // The class refuses every overlap; rows in other files are none.
    assert_eq!(house.state(append).await, "landed", "{:?}", house.request(append).await.detail);
    assert_eq!(house.agreed_ids(&mut python).await, [2, 3, 4, 5, 6, 7, 8]);
    // A delete is a change of data.
    let files = house.files_by_order().await;
    delete_positions(&mut python, &files[&3].0, &[0], true);
    house.drain().await;
    let foreign = house.ledger.foreign(&uuid, &main).await.unwrap();
    let kinds: Vec<ForeignKind> = foreign.iter().map(|row| row.kind).collect();
    assert_eq!(kinds, [ForeignKind::Maintenance, ForeignKind::Bypass]);
    house.assert_sound().await;
}
