//! Operations one by one: what they mean, how they are written, when they are refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use mergeberg::cli::operation;
use mergeberg::ledger::Recorded;
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg::table::manifests::{FileScope, LiveFiles};
use mergeberg::table::scan::{RowReader, ScanCounters, live_rows};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::ids::{Principal, SnapshotId};
use mergeberg_kernel::record::{RECORD_DIGEST_KEY, RECORD_ID_KEY};
use serde_json::{Value as Json, json};

use super::model::{Row, Value};
use super::world::{POLICY, World, batch, definition, texts};
use crate::support::main_branch;

pub fn row(id: i64, day: i64, status: &str, amount: i64) -> Row {
    [Value::Int(id), Value::Int(day), Value::Text(status.to_owned()), Value::Int(amount)]
}

pub fn base() -> Vec<Row> {
    vec![row(1, 20, "new", 10), row(2, 20, "new", 20), row(3, 21, "new", 30)]
}

/// By day, rows 1 to 3; the feed holds 2 and 4.
pub async fn by_day(properties: &[(&str, &str)], version: u8) -> World {
    let mut table = definition().partitioned_by("day", "identity").format_version(version);
    for (key, value) in properties {
        table = table.property(key, value);
    }
    World::new(table, &base(), &[row(2, 20, "paid", 21), row(4, 22, "paid", 40)]).await
}

pub fn sql(world: &World, sql: &str) -> Json {
    json!({"v": 1, "id": "s", "op": "sql", "sql": sql, "inputs": world.inputs()})
}

/// The branch ran `record`, which left `after`; main got a row of the 20th meanwhile. What main holds then.
pub async fn rebased(world: &World, record: &Json, after: &[Row]) -> Vec<String> {
    world.house.branch("work").await;
    world.recorded("work", record, after).await;
    world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
    let (state, classified, detail) = world.merge("work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
    world.house.texts("main").await
}

impl World {
    async fn live(&self) -> LiveFiles {
        let table = self.house.loaded().await;
        let head = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
        self.house.writer.store.live_files(&table, head, &FileScope::Table).await.unwrap()
    }
}

const UPSERT: &str = "MERGE INTO shop.orders t USING raw.feed s ON t.id = s.id \
    WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *";

fn upserted() -> Vec<Row> {
    vec![row(1, 20, "new", 10), row(2, 20, "paid", 21), row(3, 21, "new", 30), row(4, 22, "paid", 40)]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_runs_again_on_what_the_target_holds() {
    let world = by_day(&[], 2).await;
    let mut expected = upserted();
    expected.push(row(9, 20, "late", 90));
    assert_eq!(rebased(&world, &sql(&world, UPSERT), &upserted()).await, texts(&expected, ""));
    assert!(world.live().await.deletes.is_empty(), "copy-on-write unless the table asks for the other");
}

#[tokio::test(flavor = "multi_thread")]
async fn merge_on_read_marks_rows_where_the_table_asks_for_it() {
    for version in [2, 3] {
        let modes = ["write.delete.mode", "write.update.mode", "write.merge.mode"];
        let world = by_day(&modes.map(|mode| (mode, "merge-on-read")), version).await;
        let before: Vec<_> = world.live().await.data.iter().map(|file| file.fact.path.clone()).collect();
        let mut expected = upserted();
        expected.push(row(9, 20, "late", 90));
        // The files of rows 1 and 3 have one row, and are not in it; that of row 2 goes as a whole.
        world
            .write("main", "append", &[row(5, 20, "old", 1), row(6, 20, "old", 2)], false, BTreeMap::new())
            .await;
        expected.extend([row(5, 20, "old", 1), row(6, 20, "old", 2)]);
        let mut after = upserted();
        after.extend([row(5, 20, "old", 1), row(6, 20, "old", 2)]);
        assert_eq!(rebased(&world, &sql(&world, UPSERT), &after).await, texts(&expected, ""), "v{version}");

        // Twice on one file: a vector takes the place of the one before, position deletes lie beside it.
        for (name, id) in [("one", 5), ("two", 6)] {
            world.house.branch(name).await;
            let delete = json!({"v": 1, "id": name, "op": "delete-where", "where": format!("id = {id}")});
            let rest: Vec<Row> = expected.iter().filter(|row| row[0] != Value::Int(id)).cloned().collect();
            world.recorded(name, &delete, &rest).await;
            world.write("main", "append", &[row(100 + id, 20, "late", 0)], false, BTreeMap::new()).await;
            let (state, classified, detail) = world.merge(name).await;
            assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
            expected = rest;
            expected.push(row(100 + id, 20, "late", 0));
            assert_eq!(world.house.texts("main").await, texts(&expected, ""), "v{version} {name}");
            let live = world.live().await;
            if name == "one" {
                assert_eq!(live.deletes.len(), 1, "v{version}: one row of a file with two");
                assert_eq!(live.deletes[0].fact.records, 1);
            } else {
                assert!(
                    live.data.iter().all(|file| before.contains(&file.fact.path) || file.fact.records == 1),
                    "v{version}: a file of which every row is gone goes as a whole"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_source_rows_for_one_target_row_are_an_error_unless_all_that_happens_is_a_delete() {
    let twice = [row(2, 20, "paid", 21), row(2, 20, "paid", 22)];
    let table = || definition().partitioned_by("day", "identity");
    for (clause, ends) in [
        ("WHEN MATCHED THEN UPDATE SET *", "refused(replay-failed)"),
        ("WHEN MATCHED AND s.amount > 1000 THEN DELETE", "refused(replay-failed)"),
        ("WHEN MATCHED THEN DELETE", "landed"),
        ("WHEN NOT MATCHED THEN INSERT *", "landed"),
    ] {
        let world = World::new(table(), &base(), &twice).await;
        world.house.branch("work").await;
        let merge = format!("MERGE INTO shop.orders t USING raw.feed s ON t.id = s.id {clause}");
        world.recorded("work", &sql(&world, &merge), &base()).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        let (state, _, detail) = world.merge("work").await;
        assert_eq!(state, ends, "{clause}: {detail}");
        if ends == "landed" {
            let mut expected = base();
            if clause.contains("DELETE") {
                expected.remove(1);
            }
            expected.push(row(9, 20, "late", 90));
            assert_eq!(world.house.texts("main").await, texts(&expected, ""), "{clause}");
        } else {
            assert!(detail.contains("more than one source row"), "{detail}");
        }
    }
    // One source row for many target rows is none.
    let world = World::new(table(), &base(), &[row(20, 0, "paid", 0)]).await;
    let all = "MERGE INTO shop.orders t USING raw.feed s ON t.day = s.id WHEN MATCHED THEN UPDATE SET status = s.status";
    let paid = |id, amount| row(id, 20, "paid", amount);
    let after = [paid(1, 10), paid(2, 20), row(3, 21, "new", 30)];
    let expected = [paid(1, 10), paid(2, 20), row(3, 21, "new", 30), paid(9, 90)];
    assert_eq!(rebased(&world, &sql(&world, all), &after).await, texts(&expected, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn nulls_match_nothing_unless_they_are_asked_for() {
    let null: Row = [Value::Null, Value::Int(20), Value::Text("null".to_owned()), Value::Int(0)];
    let feed: Row = [Value::Null, Value::Int(20), Value::Text("fed".to_owned()), Value::Int(1)];
    for (equal, matches) in [("=", false), ("<=>", true)] {
        let mut rows = base();
        rows.push(null.clone());
        let world =
            World::new(definition().partitioned_by("day", "identity"), &rows, std::slice::from_ref(&feed))
                .await;
        let merge = format!(
            "MERGE INTO shop.orders t USING raw.feed s ON t.id {equal} s.id \
             WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        );
        let mut after = base();
        after.extend(if matches { vec![feed.clone()] } else { vec![null.clone(), feed.clone()] });
        let mut expected = after.clone();
        expected.push(row(9, 20, "late", 90));
        assert_eq!(rebased(&world, &sql(&world, &merge), &after).await, texts(&expected, ""), "{equal}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_means_what_spark_means_by_it() {
    for (statement, after, late) in [
        // Names in any case, text beside a number, a fraction of two integers that becomes a long again.
        ("UPDATE Shop.ORDERS SET Amount = ID / 2 * 10 WHERE `Id` = '3'", row(3, 21, "new", 15), 90),
        (
            "UPDATE shop.orders SET amount = amount + 1 WHERE id < '10' AND id >= \"3\"",
            row(3, 21, "new", 31),
            91,
        ),
        (
            "UPDATE shop.orders SET status = if(id = 3, concat(status, null), status)",
            null_status(row(3, 21, "", 30)),
            90,
        ),
        (
            "UPDATE shop.orders AS o SET o.status = concat(o.status, 'er') WHERE o.id = 3",
            row(3, 21, "newer", 30),
            90,
        ),
    ] {
        let world = by_day(&[], 2).await;
        let mut rows = base();
        rows[2] = after;
        let mut expected = rows.clone();
        expected.push(row(9, 20, "late", late));
        assert_eq!(
            rebased(&world, &sql(&world, statement), &rows).await,
            texts(&expected, ""),
            "{statement}"
        );
    }
}

fn null_status(mut row: Row) -> Row {
    row[2] = Value::Null;
    row
}

#[tokio::test(flavor = "multi_thread")]
async fn what_spark_would_answer_otherwise_is_refused() {
    for (statement, says) in [
        ("UPDATE shop.orders SET amount = 1 / (id - 9)", "division by zero"),
        ("UPDATE shop.orders SET status = id / 2", "as text looks different"),
        ("UPDATE shop.orders SET status = CAST(id / 2 AS STRING)", "as text looks different"),
        ("UPDATE shop.orders SET amount = amount + 9223372036854775800", "arithmetic overflow in Int64"),
        ("UPDATE shop.orders SET amount = 1 % (id - 9)", "division by zero"),
        ("UPDATE shop.orders SET amount = round(id / 3)", "rounds otherwise"),
        ("UPDATE shop.orders SET status = CASE WHEN id = 1 THEN id ELSE status END", "say so with CAST"),
        ("UPDATE shop.orders SET amount = CAST(id / 3 AS DECIMAL(9, 2))", "is a fraction"),
        (
            "UPDATE shop.orders SET amount = (SELECT avg(CAST(id AS DECIMAL(9, 2))) FROM raw.feed)",
            "an average",
        ),
        ("DELETE FROM shop.orders WHERE CAST(id AS TIMESTAMP) IS NULL", "another value here"),
        (
            "DELETE FROM shop.orders WHERE DATE '2026-08-20' - DATE '2026-08-19' IS NULL",
            "not known to be the same",
        ),
        (
            "UPDATE shop.orders SET amount = CAST(id AS DECIMAL(30, 0)) * CAST(id AS DECIMAL(30, 0))",
            "38 digits",
        ),
        (
            "INSERT INTO shop.orders (amount) SELECT sum(amount + 9223372036854775000) FROM shop.orders",
            "overflow",
        ),
    ] {
        let world = by_day(&[], 2).await;
        world.house.branch("work").await;
        world.recorded("work", &sql(&world, statement), &base()).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        let (state, _, detail) = world.merge("work").await;
        assert_eq!(state, "refused(replay-failed)", "{statement}: {detail}");
        assert!(detail.contains(says), "{statement}: {detail}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn inserts_and_overwrites_that_read_the_target_run_again() {
    let copy = "INSERT INTO shop.orders SELECT id + 100, day, status, amount FROM shop.orders WHERE day = 20";
    let world = by_day(&[], 2).await;
    let mut after = base();
    after.extend([row(101, 20, "new", 10), row(102, 20, "new", 20)]);
    let mut expected = after.clone();
    expected.extend([row(9, 20, "late", 90), row(109, 20, "late", 90)]);
    assert_eq!(rebased(&world, &sql(&world, copy), &after).await, texts(&expected, ""));

    let keep = "INSERT OVERWRITE shop.orders SELECT id, day, 'kept', amount FROM shop.orders WHERE id <> 1 AND day = 20";
    for (mode, kept) in [("dynamic", vec![row(3, 21, "new", 30)]), ("static", vec![])] {
        let world = by_day(&[], 2).await;
        let mut record = sql(&world, keep);
        record["overwrite-mode"] = json!(mode);
        let mut after = kept;
        after.push(row(2, 20, "kept", 20));
        let mut expected = after.clone();
        expected.push(row(9, 20, "kept", 90));
        assert_eq!(rebased(&world, &record, &after).await, texts(&expected, ""), "{mode}");
    }

    let day = "INSERT OVERWRITE shop.orders PARTITION (day = 20) SELECT id, status, amount FROM raw.feed WHERE day = 20";
    let world = by_day(&[], 2).await;
    let expected = [row(2, 20, "paid", 21), row(3, 21, "new", 30)];
    assert_eq!(rebased(&world, &sql(&world, day), &expected).await, texts(&expected, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_knows_the_columns_of_its_time() {
    let world = by_day(&[], 2).await;
    world.first_landing(&row(7, 23, "first", 0)).await;
    world.house.branch("work").await;
    let mut after = base();
    after[0][2] = Value::Text("paid".to_owned());
    after.push(row(7, 23, "first", 0));
    world.recorded("work", &sql(&world, "UPDATE shop.orders SET status = 'paid' WHERE id = 1"), &after).await;
    world
        .house
        .change_schema(0, |fields| {
            fields[2]["name"] = json!("state");
            fields.push(json!({"id": 9, "name": "note", "required": false, "type": "string"}));
        })
        .await;
    let rest: Vec<Row> = after[1..].to_vec();
    world.write_columns("main", &["id", "day", "state", "amount"], &[row(9, 20, "late", 90)]).await;
    let (state, classified, detail) = world.merge("work").await;
    assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{detail}");
    let mut expected = vec![after[0].clone(), row(9, 20, "late", 90)];
    expected.extend(rest);
    assert_eq!(world.house.texts("main").await, texts(&expected, "|-"), "the renamed column, by its id");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_without_a_value_gets_the_columns_default() {
    let typed = json!({
        "v": 1, "id": "s", "op": "merge-into", "source": "SELECT * FROM feed", "on": "target.id = source.id",
        "when-not-matched": [{"insert": {"id": "source.id", "day": "source.day", "amount": "source.amount"}}],
    });
    let open = |id: i64, day: i64, amount: i64| row(id, day, "open", amount);
    let base = |changed: &[Row]| [base(), changed.to_vec()].concat();
    for (statement, after) in [
        (
            "UPDATE shop.orders SET status = DEFAULT, amount = default WHERE id = 1",
            vec![
                [Value::Int(1), Value::Int(20), Value::Text("open".to_owned()), Value::Null],
                row(2, 20, "new", 20),
                row(3, 21, "new", 30),
            ],
        ),
        (
            "MERGE INTO shop.orders t USING raw.feed s ON t.id = s.id WHEN MATCHED THEN UPDATE SET status = DEFAULT \
             WHEN NOT MATCHED THEN INSERT (id, day, status, amount) VALUES (s.id, s.day, DEFAULT, s.amount)",
            vec![row(1, 20, "new", 10), open(2, 20, 20), row(3, 21, "new", 30), open(4, 22, 40)],
        ),
        ("", base(&[open(4, 22, 40)])),
        (
            "INSERT INTO shop.orders (id, day, amount) SELECT id + 100, day, amount FROM shop.orders WHERE id < 3",
            base(&[open(101, 20, 10), open(102, 20, 20)]),
        ),
    ] {
        let world = by_day(&[], 3).await;
        world.house.change_schema(0, |fields| fields[2]["write-default"] = json!("open")).await;
        world.house.branch("work").await;
        let mut record = if statement.is_empty() { typed.clone() } else { sql(&world, statement) };
        record["inputs"] = world.inputs();
        let mut after = after;
        world.recorded("work", &record, &after).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        let (state, classified, detail) = world.merge("work").await;
        assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{record}: {detail}");
        after.push(row(9, 20, "late", 90));
        assert_eq!(world.house.texts("main").await, texts(&after, ""), "{record}");
    }
}

// Records that stand in the ledger.

impl World {
    async fn keep(&self, record: &Json) -> Recorded {
        let house = &self.house;
        let who = Principal::new("test");
        let text = record.to_string();
        operation::record(house.catalog.as_ref(), &house.ledger, &house.table, &text, &who, house.now())
            .await
            .unwrap_or_else(|error| panic!("{error:?}"))
    }

    async fn named(&self, name: &str, summary: &[(&str, &str)], rows: &[Row]) -> SnapshotId {
        let summary = summary.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.write(name, "overwrite", rows, true, summary).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_in_the_ledger_is_named_by_its_id() {
    let world = by_day(&[], 2).await;
    let delete = json!({"v": 1, "id": "gone", "op": "delete-where", "where": "day = 20"});
    let Recorded::New(kept) = world.keep(&delete).await else { panic!("new") };
    let digest = kept.digest.to_string();
    let rest = [row(3, 21, "new", 30)];
    for (name, summary, ends) in [
        ("unknown", vec![(RECORD_ID_KEY, "other")], "refused(record-invalid)"),
        (
            "changed",
            vec![(RECORD_ID_KEY, "gone"), (RECORD_DIGEST_KEY, "sha256:0")],
            "refused(record-invalid)",
        ),
        ("work", vec![(RECORD_ID_KEY, "gone"), (RECORD_DIGEST_KEY, digest.as_str())], "landed"),
    ] {
        world.house.branch(name).await;
        world.named(name, &summary, &rest).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        let (state, _, detail) = world.merge(name).await;
        assert_eq!(state, ends, "{name}: {detail}");
    }
    assert_eq!(world.house.texts("main").await, texts(&rest, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_planned_when_it_is_made() {
    let world = by_day(&[], 2).await;
    let house = &world.house;
    let refused = async |statement: &str, code: &str, says: &str| {
        let (text, who) = (sql(&world, statement).to_string(), Principal::new("test"));
        let made =
            operation::record(house.catalog.as_ref(), &house.ledger, &house.table, &text, &who, house.now())
                .await;
        let error = made.expect_err(statement);
        assert_eq!(error.code.code(), code, "{statement}: {error:?}");
        assert!(error.message.contains(says), "{statement}: {error:?}");
    };
    refused("UPDATE shop.orders SET price = 1", "record-invalid", "price").await;
    refused("DELETE FROM shop.orders WHERE price = 1", "record-invalid", "price").await;
    refused("DELETE FROM shop.orders WHERE id IN (SELECT nope FROM raw.feed)", "record-invalid", "nope")
        .await;
    refused("DELETE FROM shop.orders WHERE no_such_function(id)", "record-invalid", "no_such_function").await;
    refused(
        "MERGE INTO shop.orders t USING raw.feed s ON t.id = s.key WHEN MATCHED THEN DELETE",
        "record-invalid",
        "key",
    )
    .await;
    refused("INSERT OVERWRITE shop.orders SELECT id, day FROM raw.feed", "record-invalid", "2 columns").await;
    refused(
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.feed VERSION AS OF 5",
        "input-missing",
        "expired",
    )
    .await;
    refused(
        "INSERT OVERWRITE shop.orders SELECT * FROM raw.gone VERSION AS OF 5",
        "input-missing",
        "raw.gone",
    )
    .await;
    refused("DELETE FROM shop.orders WHERE day < current_date()", "record-invalid", "current_date").await;
}

/// What it needs is gone when it is run again: a refusal that says what, and nothing is written.
#[tokio::test(flavor = "multi_thread")]
async fn an_operation_whose_inputs_are_gone_is_refused() {
    for (gone, code, says) in [
        ("expired", "input-missing", "was expired"),
        ("replaced", "input-missing", "is another table by now"),
        ("dropped", "input-missing", "there is no table raw.gone"),
        ("its file", "data-file-missing", "does not exist"),
        ("rows", "replay-mismatch", "the query gave 1 rows, recorded were 5"),
    ] {
        let world = by_day(&[], 2).await;
        let mut record = json!({
            "v": 1, "id": "load", "op": "overwrite-where", "where": "day = 20",
            "query": "SELECT * FROM feed WHERE day = 20", "inputs": world.inputs(),
        });
        match gone {
            "replaced" => record["inputs"]["feed"]["uuid"] = json!("another"),
            "dropped" => record["inputs"]["feed"]["table"] = json!("raw.gone"),
            "rows" => record["expect"] = json!({ "rows": 5 }),
            _ => {}
        }
        let house = &world.house;
        house.branch("work").await;
        world.recorded("work", &record, &[row(2, 20, "paid", 21), row(3, 21, "new", 30)]).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        let feed = "raw.feed".parse().unwrap();
        let table = house.catalog.load(&feed).await.unwrap();
        let pinned = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
        match gone {
            "expired" => {
                let old = pinned.id;
                house.write_batch_to(&feed, "main", batch(&[row(7, 27, "more", 0)])).await;
                let table = house.catalog.load(&feed).await.unwrap();
                let expire = vec![Update::RemoveSnapshots(vec![old])];
                let outcome = house.catalog.commit(&table, &[], expire).await;
                assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
            }
            "its file" => {
                let files = house.writer.store.added_files(&table, pinned).await.unwrap();
                for file in files {
                    std::fs::remove_file(file.fact.path.strip_prefix("file://").unwrap()).unwrap();
                }
            }
            _ => {}
        }
        let before = house.head("main").await;
        let (state, _, detail) = world.merge("work").await;
        assert_eq!(state, format!("refused({code})"), "{gone}: {detail}");
        assert!(detail.contains(says), "{gone}: {detail}");
        assert_eq!(house.head("main").await, before, "{gone}");
        // What was expired of the input is not ours to delete.
        let mut orphans = house.orphans().await;
        orphans.retain(|path| path.iter().all(|part| part != "raw"));
        assert_eq!(orphans, Vec::<std::path::PathBuf>::new(), "{gone}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_s1_a_class_says_what_its_operations_may_read() {
    for (reads, ends) in
        [("[]", "refused(input-not-allowed)"), ("[\"raw.*\"]", "landed"), ("[\"raw.feed\"]", "landed")]
    {
        let world = by_day(&[], 2).await;
        let policy = format!("{POLICY}reads = {reads}\n");
        std::fs::write(world.house.dir.path().join("policies/orders.toml"), policy).unwrap();
        world.house.branch("work").await;
        world.recorded("work", &sql(&world, UPSERT), &upserted()).await;
        world.write("main", "append", &[row(9, 20, "late", 90)], false, BTreeMap::new()).await;
        assert_eq!(world.merge("work").await.0, ends, "{reads}");
    }
}

// Row lineage.

impl World {
    /// By `id`: row id and sequence number of the last update.
    async fn lineage(&self) -> BTreeMap<i64, (i64, i64)> {
        let table = self.house.loaded().await;
        let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap().with_lineage().unwrap();
        let columns: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
        let mut found = BTreeMap::new();
        for file in live_rows(self.live().await).unwrap() {
            let rows = reader.read(&file, &columns, &Arc::new(ScanCounters::default())).unwrap();
            for batch in rows.try_collect::<Vec<_>>().await.unwrap() {
                let long = |at: usize| batch.column(at).as_primitive::<Int64Type>();
                for row in 0..batch.num_rows() {
                    found.insert(long(0).value(row), (long(4).value(row), long(5).value(row)));
                }
            }
        }
        found
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_stay_who_they_are_when_they_are_updated_or_written_again() {
    for mode in ["copy-on-write", "merge-on-read"] {
        let world = by_day(&[("write.merge.mode", mode)], 3).await;
        world.house.branch("work").await;
        world.recorded("work", &sql(&world, UPSERT), &upserted()).await;
        // Two rows in one file: one of them is updated, the other only written again.
        let rows = [row(1, 20, "new", 10), row(2, 20, "new", 20), row(3, 21, "new", 30)];
        world.write("main", "overwrite", &rows, true, BTreeMap::new()).await;
        let before = world.lineage().await;
        let (state, classified, detail) = world.merge("work").await;
        assert_eq!((state.as_str(), classified.as_str()), ("landed", "rebase"), "{mode}: {detail}");
        assert_eq!(world.house.texts("main").await, texts(&upserted(), ""), "{mode}");

        let after = world.lineage().await;
        let table = world.house.loaded().await;
        let landed = table.facts.snapshots.get(table.facts.head(&main_branch()).unwrap()).unwrap();
        for id in [1, 3] {
            assert_eq!(after[&id], before[&id], "{mode}: row {id} did not change");
        }
        assert_eq!(
            after[&2],
            (before[&2].0, landed.sequence_number),
            "{mode}: its id stays, its update is new"
        );
        let (new, by) = after[&4];
        assert!(
            before.values().all(|(id, _)| *id != new) && by == landed.sequence_number,
            "{mode}: {after:?}"
        );
        let next = table.facts.next_row_id.unwrap();
        assert!(after.values().all(|(id, _)| *id < next), "{mode}: {after:?}, next {next}");
    }
}
