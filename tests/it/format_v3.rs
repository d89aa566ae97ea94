//! Tables of format v3: the queue lands on them, PyIceberg and DuckDB read them, deletion vectors included, and
//! Spark finds the row ids that we gave. And position deletes of v2, written in the same way. Without an engine its part is left out, and the test says so.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use datafusion::arrow::array::{Array, AsArray, RecordBatch};
use datafusion::arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::deletes::{PositionDeleteWriter, RowsToDelete, VectorWriter};
use mergeberg::table::manifests::{FileScope, LiveFile};
use mergeberg::table::scan::{RowReader, live_rows};
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::SnapshotId;
use serde_json::json;

use crate::support::child::real_now;
use crate::support::engine_table;
use crate::support::python::Python;
use crate::support::{House, ORDERS_POLICY, Order, main_branch, order};

/// Row ids by order id.
type RowIds = BTreeMap<i64, i64>;

/// ORD in format v3 on the real clock, merging manifests as soon as there are two: S1 holds 1 and 2 of the
/// 20th and 3 of the 21st, S2 holds 4 of the 22nd.
async fn house(version: u8) -> House {
    let definition = House::orders_definition()
        .format_version(version)
        .property("commit.manifest.min-count-to-merge", "2");
    let house = House::with_table(definition, ORDERS_POLICY).await;
    house.clock.store(real_now(), std::sync::atomic::Ordering::SeqCst);
    house.append("main", &[order(1, 20), order(2, 20), order(3, 21)]).await;
    house.append("main", &[order(4, 22)]).await;
    house
}

impl House {
    async fn live_of_main(&self) -> Vec<LiveFile> {
        let table = self.loaded().await;
        let head = table.facts.head(&main_branch()).unwrap();
        let snapshot = table.facts.snapshots.get(head).unwrap();
        self.writer.store.live_files(&table, snapshot, &FileScope::Table).await.unwrap().data
    }

    /// Ids of main's rows by their places in files; of a file without deletes.
    async fn row_ids(&self) -> RowIds {
        let table = self.loaded().await;
        let rows = self.files_at(&table, table.facts.head(&main_branch()).unwrap()).await;
        let mut ids = RowIds::new();
        for file in self.live_of_main().await {
            let rows: &Vec<Order> = &rows[&file.fact.path];
            assert_eq!(rows.len() as i64, file.fact.records, "deletes move places");
            ids.extend(rows.iter().zip(file.first_row_id.unwrap()..).map(|(row, id)| (row.id, id)));
        }
        ids
    }

    /// A snapshot on main that deletes the first row of the file that holds `order`: by a deletion vector, in
    /// format v2 by a position-delete file.
    pub(crate) async fn delete_first_row_beside(&self, order: i64) -> SnapshotId {
        let table = self.loaded().await;
        let head = table.facts.head(&main_branch()).unwrap();
        let rows = self.files_at(&table, head).await;
        let files = self.live_of_main().await;
        let holds = |file: &&LiveFile| rows[&file.fact.path].iter().any(|row| row.id == order);
        let data_file = files.iter().find(holds).unwrap().clone();
        let delete = RowsToDelete { data_file, positions: [0].into_iter().collect() };
        let deletes = if table.facts.format_version == 3 {
            VectorWriter::write(&table, &[delete]).await.unwrap()
        } else {
            vec![PositionDeleteWriter::write(&table, &delete).await.unwrap()]
        };
        let id = SnapshotId((self.writer.random)().cast_signed() >> 1 & i64::MAX);
        let change = SnapshotChange {
            id,
            label: "delete".to_owned(),
            add: Vec::new(),
            remove: [].into(),
            add_deletes: deletes.into_iter().map(AddedFile::from).collect(),
            remove_deletes: [].into(),
            summary: BTreeMap::new(),
            now_ms: self.now(),
            schema_id: table.facts.current_schema_id,
        };
        let parent = table.facts.snapshots.get(head);
        let mut writer = SnapshotWriter::on(&self.writer.store, &table, parent).await.unwrap();
        let snapshot = writer.add(change).await.unwrap();
        let at = Requirement::RefAt { name: main_branch(), at: Some(head), role: RefRole::Target };
        let main = RefFact { snapshot_id: id, ..table.facts.refs[&main_branch()].clone() };
        let updates = vec![Update::AddSnapshot(snapshot), Update::SetRef(main)];
        let outcome = self.catalog.commit(&table, &[at], updates).await;
        assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
        id
    }

    /// Two branches from main's head, landed by one train: a fast-forward or pick, and a pick.
    async fn land_two(&self, first: &[Order], second: &[Order]) {
        let names = ["ingest/a", "ingest/b"];
        for (name, rows) in names.iter().zip([first, second]) {
            self.append_on_new(name, rows).await;
        }
        let requests = [self.enqueue(names[0]).await, self.enqueue(names[1]).await];
        self.drain().await;
        for request in requests {
            let row = self.request(request).await;
            assert_eq!(row.state.to_string(), "landed", "{:?}", row.detail);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trains_land_on_a_table_of_format_v3_and_other_engines_read_it() {
    let house = house(3).await;
    house.land_two(&[order(5, 20), order(6, 23)], &[order(7, 24)]).await;
    let ids = house.row_ids().await;
    let next = house.loaded().await.facts.next_row_id.unwrap();
    let mut given: Vec<i64> = ids.values().copied().collect();
    given.sort_unstable();
    given.dedup();
    assert_eq!(given.len(), 7, "each row has an id of its own: {ids:?}");
    assert!(given.iter().all(|id| *id < next), "{ids:?}, next {next}");
    house.delete_first_row_beside(2).await;
    let expected = [2, 3, 4, 5, 6, 7].map(|id| match id {
        2 => order(2, 20),
        3 => order(3, 21),
        4 => order(4, 22),
        5 => order(5, 20),
        6 => order(6, 23),
        _ => order(7, 24),
    });
    let mut sorted = expected.to_vec();
    sorted.sort();
    assert_eq!(house.rows("main").await, sorted);
    // The queue goes on over the vector: a day that is replaced takes it along.
    house.branch("ingest/day").await;
    house.overwrite_days("ingest/day", &[20], &[order(9, 20)]).await;
    let request = house.enqueue("ingest/day").await;
    house.drain().await;
    let row = house.request(request).await;
    assert_eq!(row.state.to_string(), "landed", "{:?}", row.detail);
    assert_eq!(house.keys("main").await, [3, 4, 6, 7, 9]);
    house.assert_sound().await;

    let Some(mut python) = Python::start(house.dir.path()) else { return };
    assert_eq!(python.rows("main"), house.rows("main").await);
    let with_vector =
        house.loaded().await.facts.snapshots.get(house.head("main").await.unwrap()).unwrap().parent;
    let at = with_vector.unwrap().0;
    for op in ["read", "read_duckdb"] {
        let answer = python.ok(op, json!({ "snapshot_id": at, "columns": ["order_id"] }));
        let mut found: Vec<i64> =
            answer["rows"].as_array().unwrap().iter().map(|row| row["order_id"].as_i64().unwrap()).collect();
        found.sort_unstable();
        assert_eq!(found, [2, 3, 4, 5, 6, 7], "{op}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn position_deletes_that_we_add_and_merge_are_read_by_other_engines() {
    let house = house(2).await;
    // The second merges the delete manifest of the first.
    house.delete_first_row_beside(2).await;
    house.delete_first_row_beside(4).await;
    house.append("main", &[order(5, 23)]).await;
    assert_eq!(house.keys("main").await, [2, 3, 5]);
    if let Some(mut python) = Python::start(house.dir.path()) {
        assert_eq!(python.rows("main"), house.rows("main").await);
    }
    if let Some(mut spark) = Python::spark(house.dir.path()) {
        let answer = spark.ok("rows", json!({ "columns": ["order_id"] }));
        let rows = answer["rows"].as_array().unwrap().iter();
        let found: std::collections::BTreeSet<i64> =
            rows.map(|row| row["order_id"].as_i64().unwrap()).collect();
        assert_eq!(found, [2, 3, 5].into());
    }
}

fn ids_by_spark(spark: &mut Python, name: &str) -> BTreeMap<i64, (i64, i64)> {
    let columns = ["order_id", "_row_id", "_last_updated_sequence_number"];
    let answer = spark.ok("rows", json!({ "ref": name, "columns": columns }));
    let number = |row: &serde_json::Value, name: &str| row[name].as_i64().unwrap_or_else(|| panic!("{row}"));
    let rows = answer["rows"].as_array().unwrap().iter();
    rows.map(|row| (number(row, columns[0]), (number(row, columns[1]), number(row, columns[2])))).collect()
}

impl House {
    async fn assert_spark_agrees(&self, spark: &mut Python, ours: &RowIds) {
        let found = ids_by_spark(spark, "main");
        let theirs: RowIds = found.iter().map(|(order, (id, _))| (*order, *id)).collect();
        assert_eq!(theirs, *ours, "row ids by order id");
        let table = self.loaded().await;
        let rows = self.files_at(&table, table.facts.head(&main_branch()).unwrap()).await;
        for file in self.live_of_main().await {
            for row in &rows[&file.fact.path] {
                assert_eq!(found[&row.id].1, file.sequence_number, "order {}", row.id);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_n2_spark_finds_the_row_ids_that_we_gave() {
    let house = house(3).await;
    let Some(mut spark) = Python::spark(house.dir.path()) else { return };
    house.land_two(&[order(5, 20), order(6, 23)], &[order(7, 24)]).await;
    let mut ids = house.row_ids().await;
    house.assert_spark_agrees(&mut spark, &ids).await;
    // Files that are rewritten in manifests keep them, and rows that a vector leaves.
    house.overwrite_days("main", &[22], &[order(8, 22)]).await;
    let after = house.row_ids().await;
    assert!(ids.iter().all(|(order, id)| *order == 4 || after[order] == *id), "{ids:?} {after:?}");
    ids = after;
    house.assert_spark_agrees(&mut spark, &ids).await;
    house.delete_first_row_beside(2).await;
    ids.remove(&1);
    house.assert_spark_agrees(&mut spark, &ids).await;

    // Spark goes on from there, on main and on a branch; we land its branch on its main.
    spark.ok(
        "sql",
        json!({ "statements": "INSERT INTO {table} VALUES (20, DATE '2026-08-25', 'new', 200.00)" }),
    );
    spark.ok("sql", json!({ "statements": "ALTER TABLE {base} CREATE BRANCH `ingest/spark`" }));
    spark.ok(
        "sql",
        json!({ "statements": "INSERT INTO {table} VALUES (21, DATE '2026-08-26', 'new', 210.00)",
                            "branch": "ingest/spark" }),
    );
    spark.ok("sql", json!({ "statements": "DELETE FROM {table} WHERE order_id = 3" }));
    let request = house.enqueue("ingest/spark").await;
    house.drain().await;
    let row = house.request(request).await;
    assert_eq!(row.state.to_string(), "landed", "{:?}", row.detail);
    assert_eq!(house.keys("main").await, [2, 5, 6, 7, 8, 20, 21]);
    ids.remove(&3);
    let found = ids_by_spark(&mut spark, "main");
    assert!(ids.iter().all(|(order, id)| found[order].0 == *id), "{ids:?} {found:?}");
    let distinct: std::collections::BTreeSet<i64> = found.values().map(|(id, _)| *id).collect();
    assert_eq!(distinct.len(), found.len());
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_n2_a_table_that_spark_upgraded_is_numbered_by_our_first_snapshot() {
    let house = house(2).await;
    let Some(mut spark) = Python::spark(house.dir.path()) else { return };
    spark.ok("sql", json!({ "statements": "ALTER TABLE {base} SET TBLPROPERTIES ('format-version' = '3')" }));
    assert_eq!(house.loaded().await.facts.next_row_id, Some(0));
    house.land_two(&[order(5, 20)], &[order(6, 23)]).await;
    let ids = house.row_ids().await;
    assert_eq!(ids.len(), 6);
    house.assert_spark_agrees(&mut spark, &ids).await;
    spark.ok(
        "sql",
        json!({ "statements": "INSERT INTO {table} VALUES (20, DATE '2026-08-25', 'new', 200.00)" }),
    );
    let found = ids_by_spark(&mut spark, "main");
    assert!(ids.iter().all(|(order, id)| found[order].0 == *id), "{ids:?} {found:?}");
    assert!(ids.values().all(|id| *id != found[&20].0), "{ids:?} {found:?}");
    house.assert_sound().await;
}

/// By row id: what the key column says, and the sequence number of the row's last update.
type Lineage = BTreeMap<i64, (i64, i64)>;

impl House {
    /// Of the rows of a branch, by the column `key`.
    async fn lineage(&self, name: &str, key: &str) -> Lineage {
        let table = self.loaded().await;
        let snapshot = table.facts.snapshots.get(self.head(name).await.unwrap()).unwrap();
        let live = self.writer.store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap().with_lineage().unwrap();
        let at = |name: &str| reader.arrow_schema().index_of(name).unwrap();
        let columns = [at(key), at("_row_id"), at("_last_updated_sequence_number")];
        let mut lineage = Lineage::new();
        for file in live_rows(live).unwrap() {
            let batches: Vec<RecordBatch> =
                reader.read(&file, &columns, &Arc::default()).unwrap().try_collect().await.unwrap();
            for batch in batches {
                let [ids, rows, numbers] =
                    [0, 1, 2].map(|at| batch.column(at).as_primitive::<Int64Type>().clone());
                for at in 0..batch.num_rows() {
                    assert!(rows.is_valid(at) && numbers.is_valid(at), "order {}", ids.value(at));
                    let before = lineage.insert(rows.value(at), (ids.value(at), numbers.value(at)));
                    assert_eq!(before, None, "each row has an id of its own");
                }
            }
        }
        lineage
    }
}

/// Table spec, "Row Lineage": a row that is moved to another file keeps its id and the number of its last update.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_a_replay_writes_again_stay_who_they_are() {
    let house = house(3).await;
    house.delete_first_row_beside(2).await;
    house.append("main", &[order(5, 20), order(6, 20), order(7, 20)]).await;
    let before = house.lineage("main", "order_id").await;
    let orders = |lineage: &Lineage| lineage.values().map(|(order, _)| *order).collect::<BTreeSet<i64>>();
    assert_eq!(orders(&before), [2, 3, 4, 5, 6, 7].into());
    // Twice: the second replay reads what the first one has written.
    for (turn, gone) in [6, 5].into_iter().enumerate() {
        let name = format!("ingest/replace-{gone}");
        house.branch(&name).await;
        let record = json!({
            "v": 1, "id": name, "op": "overwrite-where", "where": format!("order_id = {gone}"),
            "query": "SELECT order_id, order_date, 'again' AS status, amount FROM target WHERE false",
        });
        house.recorded(&name, &record, &[], &[]).await;
        house.append("main", &[order(20 + i64::try_from(turn).unwrap(), 20)]).await;
        let request = house.enqueue(&name).await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
        assert_eq!(house.classified(request).await, "rebase");
        let after = house.lineage("main", "order_id").await;
        assert!(!orders(&after).contains(&gone));
        for (row, is) in before.iter().filter(|(_, (order, _))| orders(&after).contains(order)) {
            assert_eq!(after.get(row), Some(is), "turn {turn}");
        }
        house.assert_sound().await;
        if let Some(mut spark) = Python::spark(house.dir.path()) {
            let found = ids_by_spark(&mut spark, "main");
            let found: Lineage =
                found.into_iter().map(|(order, (row, number))| (row, (order, number))).collect();
            assert_eq!(found, after, "by Spark");
        }
    }
    assert_eq!(house.keys("main").await, [2, 3, 4, 7, 20, 21]);
}

/// Tables that Spark wrote: what it says of the rows' lineage (`expected.json`) we read as well.
#[tokio::test(flavor = "multi_thread")]
async fn row_lineage_is_read_as_spark_reads_it() {
    let mut read = 0;
    for name in engine_table::names() {
        for (branch, wanted) in engine_table::Expected::of(&name).lineage() {
            let house = House::engine_table(&name, "table = \"engine.written\"\n").await;
            // Types that we do not open.
            if house.catalog.load(&house.table).await.is_ok() {
                assert_eq!(house.lineage(&branch, "id").await, wanted, "{name} {branch}");
                read += 1;
            }
        }
    }
    assert!(read > 50, "{read} branches");
}
