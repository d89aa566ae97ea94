//! Partition fields whose Avro forms get into each other's way: two of one named type, and names that Avro does not
//! take, so that writers change them.

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, FixedSizeBinaryArray, RecordBatch};
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg::table::create::TableDefinition;
use serde_json::json;

use crate::support::child::real_now;
use crate::support::python::Python;
use crate::support::{House, columns, decimal, long, main_branch, text};

const POLICY: &str =
    "table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\noverlap = \"allow\"\n";

fn uuid(value: i64) -> ArrayRef {
    // The first bit set: no number with a sign.
    let bytes = (u128::MAX - u128::from(value.unsigned_abs())).to_be_bytes();
    Arc::new(FixedSizeBinaryArray::try_from_iter([bytes].into_iter()).unwrap())
}

/// A row of a table with two partition columns; `value` decides the second, so that rows lie apart.
fn row(kind: &str, names: [&str; 2], id: i64) -> RecordBatch {
    let value = |value: i64| -> ArrayRef {
        match kind {
            "uuid" => uuid(value),
            "decimal(9, 2)" => decimal(&[i128::from(-value)], 9, 2),
            "decimal(38, 0)" => decimal(&[i128::from(value)], 38, 0),
            _ => text(&[Some(&format!("v {value}"))]),
        }
    };
    columns(vec![("id", long(&[id])), (names[0], value(7)), (names[1], value(id))])
}

/// A branch is merged on a main that moved, and one that takes a partition away: manifests are read, written and
/// rewritten.
async fn merged(kind: &str, names: [&str; 2]) -> House {
    let mut definition = TableDefinition::default().column("id", "long", true);
    for name in names {
        definition = definition.column(name, kind, false).partitioned_by(name, "identity");
    }
    let house = House::with_table(definition, POLICY).await;
    house.clock.store(real_now(), std::sync::atomic::Ordering::SeqCst);
    for id in [1, 2] {
        house.write_batch("main", row(kind, names, id)).await;
    }
    house.branch("work").await;
    house.write_batch("work", row(kind, names, 3)).await;
    house.write_batch("main", row(kind, names, 4)).await;
    let request = house.enqueue("work").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{kind} {names:?}: {}", house.detail(request).await);
    let ids = |rows: Vec<String>| -> BTreeSet<String> {
        rows.iter().map(|row| row.split('|').next().unwrap().to_owned()).collect()
    };
    let all = ["1", "2", "3", "4"].map(str::to_owned).into();
    assert_eq!(ids(house.texts("main").await), all, "{kind} {names:?}");
    house.assert_sound().await;
    house
}

/// What a reader of another hand finds.
fn ids_by(python: &mut Python, op: &str) -> BTreeSet<i64> {
    let answer = python.ok(op, json!({ "columns": ["id"] }));
    answer["rows"].as_array().unwrap().iter().map(|row| row["id"].as_i64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_partition_fields_of_one_named_type() {
    for kind in ["uuid", "decimal(9, 2)", "decimal(38, 0)"] {
        let house = merged(kind, ["one", "two"]).await;
        if let Some(mut python) = Python::start(house.dir.path()) {
            assert_eq!(ids_by(&mut python, "read"), [1, 2, 3, 4].into(), "{kind} by PyIceberg");
        }
        if let Some(mut spark) = Python::spark(house.dir.path()) {
            assert_eq!(ids_by(&mut spark, "rows"), [1, 2, 3, 4].into(), "{kind} by Spark");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_fields_whose_names_avro_does_not_take() {
    for names in [["order day", "order_day"], ["a-b", "a:b"], ["9th", "_8th"], ["größe", "b.c"]] {
        let house = merged("string", names).await;
        if let Some(mut python) = Python::start(house.dir.path()) {
            assert_eq!(ids_by(&mut python, "read"), [1, 2, 3, 4].into(), "{names:?} by PyIceberg");
        }
        if let Some(mut spark) = Python::spark(house.dir.path()) {
            assert_eq!(ids_by(&mut spark, "rows"), [1, 2, 3, 4].into(), "{names:?} by Spark");
        }
    }
}

/// Java fails on such a table, and no manifest of it could tell the two apart.
#[tokio::test(flavor = "multi_thread")]
async fn partition_fields_of_one_name_in_avro_are_refused() {
    let names = ["a-b", "a_x2Db"];
    let mut definition = TableDefinition::default().column("id", "long", true);
    for name in names {
        definition = definition.column(name, "string", false).partitioned_by(name, "identity");
    }
    let house = House::with_table(definition, POLICY).await;
    let write = BranchWrite {
        branch: main_branch(),
        label: "append".to_owned(),
        rows: vec![row("string", names, 1)],
        remove: Removal::Nothing,
        summary: std::collections::BTreeMap::new(),
    };
    let error = house.writer.write(&house.table, write).await.unwrap_err().to_string();
    assert!(error.contains("'a_x2Db' has the name of another one in manifests"), "{error}");
    assert_eq!(house.head("main").await, None);
}
