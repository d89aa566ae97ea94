//! Records as each engine writes them: PyIceberg's `snapshot_properties`, Spark's settings for SQL and options of data
//! frames, Java's commit properties. The target changes, and the queue leaves what the engine itself leaves there.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde_json::{Value as Json, json};

use super::operations::row;
use super::world::{POLICY, World, definition};
use crate::support::child::real_now;
use crate::support::json_rows;
use crate::support::python::json_rows as orders_as_json;
use crate::support::spark::Spark;
use crate::support::{House, Order, order};

const KEY: &str = "mergeberg.operation";

/// A record without version and id, and the job that does the same.
struct Told {
    record: Json,
    job: &'static str,
    arguments: Json,
    /// Where the job takes the property.
    place: &'static str,
}

fn told(record: Json, job: &'static str, arguments: Json, place: &'static str) -> Told {
    Told { record, job, arguments, place }
}

/// Every form by statements with the session's setting.
fn statements(feed: &Json) -> Vec<Told> {
    let place = "snapshot_properties";
    let sql = |record, statement: &str| told(record, "sql", json!({ "statements": statement }), place);
    let void = "DELETE FROM {table} WHERE status = 'void'";
    vec![
        sql(
            json!({"op": "append"}),
            "INSERT INTO {table} SELECT id + 100, day, status, amount FROM test.raw.feed",
        ),
        told(
            json!({"op": "replace-partitions"}),
            "sql",
            json!({
                "statements": "INSERT OVERWRITE {table} SELECT id, 20L AS day, status, amount FROM test.raw.feed",
                "overwrite_mode": "dynamic",
            }),
            place,
        ),
        sql(
            json!({
                "op": "overwrite-where", "where": "day = 20", "inputs": feed,
                "query": "SELECT id, 20 AS day, status, amount FROM feed",
            }),
            "INSERT OVERWRITE {table} PARTITION (day = 20) (id, status, amount) SELECT id, status, amount FROM test.raw.feed",
        ),
        sql(json!({"op": "delete-where", "where": "status = 'void'"}), void),
        sql(
            json!({"op": "update-where", "where": "day = 20", "set": {"amount": "amount * 2"}}),
            "UPDATE {table} SET amount = amount * 2 WHERE day = 20",
        ),
        sql(
            json!({
                "op": "merge-into", "source": "SELECT * FROM feed", "on": "target.id = source.id",
                "when-matched": [{"update": "*"}], "when-not-matched": [{"insert": "*"}], "inputs": feed,
            }),
            "MERGE INTO {table} t USING test.raw.feed s ON t.id = s.id \
             WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
        ),
        sql(json!({"op": "sql", "sql": "DELETE FROM shop.orders WHERE status = 'void'"}), void),
    ]
}

/// What data frames write, with the option of the write.
fn data_frames(feed: &Json) -> Vec<Told> {
    let twentieth = "SELECT id, 20L AS day, status, amount FROM test.raw.feed";
    let frame = |record, how: &str, select: &str, condition: Option<&str>| {
        let arguments = json!({ "how": how, "select": select, "condition": condition });
        told(record, "data_frame", arguments, "snapshot_properties")
    };
    vec![
        frame(json!({"op": "append"}), "append", twentieth, None),
        frame(json!({"op": "replace-partitions"}), "overwritePartitions", twentieth, None),
        frame(
            json!({
                "op": "overwrite-where", "where": "day = 20", "inputs": feed,
                "query": "SELECT id, 20 AS day, status, amount FROM feed",
            }),
            "overwrite",
            twentieth,
            Some("day = 20"),
        ),
    ]
}

/// Java's commits, and Spark's SQL under `CommitMetadata`.
fn commits() -> Vec<Told> {
    let twentieth = "SELECT id, 20L AS day, status, amount FROM test.raw.feed";
    let place = "snapshot_properties";
    let commit = |record, how: &str, select: Option<&str>| {
        told(
            record,
            "java_commit",
            json!({ "how": how, "select": select, "column": "day", "value": 20 }),
            place,
        )
    };
    vec![
        commit(json!({"op": "append"}), "append", Some(twentieth)),
        commit(json!({"op": "replace-partitions"}), "replace-partitions", Some(twentieth)),
        commit(json!({"op": "delete-where", "where": "day = 20"}), "delete", None),
        told(
            json!({"op": "sql", "sql": "UPDATE shop.orders SET amount = amount + id WHERE day = 20"}),
            "commit_metadata",
            json!({ "statement": "UPDATE {table} SET amount = amount + id WHERE day = 20" }),
            place,
        ),
        told(
            json!({"op": "delete-where", "where": "day = 20"}),
            "commit_metadata",
            json!({ "statement": "DELETE FROM {table} WHERE day = 20" }),
            place,
        ),
    ]
}

async fn play(world: &World, spark: &mut Spark, name: &str, told: Told) {
    let Told { mut record, job, arguments, place } = told;
    record["v"] = json!(1);
    record["id"] = json!(name);
    let (work, serial) = (format!("work-{name}"), format!("serial-{name}"));
    let on = |branch: &str, properties: Json| {
        let mut arguments = arguments.clone();
        arguments["branch"] = json!(branch);
        arguments[place] = properties;
        arguments
    };
    world.house.branch(&work).await;
    spark.ok(&world.house, job, on(&work, json!({ KEY: record.to_string() })));
    let late = [row(9, 20, "void", 90), row(5, 22, "late", 5)];
    world.write("main", "append", &late, false, BTreeMap::new()).await;
    world.house.branch(&serial).await;
    spark.ok(&world.house, job, on(&serial, json!({})));
    let lines = |answer: Json| json_rows::lines(answer["rows"].as_array().unwrap());
    let expected = lines(spark.ok(&world.house, "rows", json!({ "ref": serial })));
    world.house.clock.store(real_now(), Ordering::SeqCst);
    let (state, classified, detail) = world.merge(&work).await;
    assert_eq!(state, "landed", "{name} {record}: {detail}");
    let run_again = record["op"] != "append";
    assert_eq!(classified == "rebase", run_again, "{name} {record}: {classified}");
    assert_eq!(lines(spark.ok(&world.house, "rows", json!({ "ref": "main" }))), expected, "{name} {record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_spark_and_java_write_are_run_again() {
    let Some(mut spark) = Spark::start() else { return };
    let feed = [row(2, 20, "paid", 21), row(7, 20, "paid", 70)];
    // Rows 1 and 2 in one file: of a DELETE that takes whole files Spark leaves the setting out.
    let base = [row(1, 20, "new", 10), row(2, 20, "void", 20), row(3, 21, "new", 30), row(4, 21, "new", 40)];
    for (kind, forms) in
        [("sql", statements as fn(&Json) -> Vec<Told>), ("frame", data_frames), ("java", |_| commits())]
    {
        let count = forms(&json!({})).len();
        for at in 0..count {
            let world = World::new(definition().partitioned_by("day", "identity"), &base, &feed).await;
            let told = forms(&world.inputs()).swap_remove(at);
            play(&world, &mut spark, &format!("{kind}-{at}"), told).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_pyiceberg_writes_are_run_again() {
    let done = |id: i64, day: u32| Order { status: "done".to_owned(), ..order(id, day) };
    let upserted = "SELECT * FROM (VALUES (1, DATE '2026-08-20', 'done', 1.00), (7, DATE '2026-08-20', 'done', 7.00)) \
        AS s (order_id, order_date, status, amount)";
    let typed = upserted
        .replace("SELECT *", "SELECT order_id, order_date, status, CAST(amount AS DECIMAL(12, 2)) AS amount");
    let late = order(8, 20);
    let (one, two, three) = (order(1, 20), order(2, 20), order(3, 21));
    // The record, the job, and what is left of rows 1 to 3 and the late one.
    let all: Vec<(Json, &str, Json, Vec<Order>)> = vec![
        (
            json!({"op": "append"}),
            "append",
            json!({ "rows": orders_as_json(&[order(7, 20)]) }),
            vec![one.clone(), two.clone(), three.clone(), order(7, 20), late.clone()],
        ),
        (
            json!({"op": "replace-partitions"}),
            "dynamic_partition_overwrite",
            json!({ "rows": orders_as_json(&[done(1, 20)]) }),
            vec![done(1, 20), three.clone()],
        ),
        (
            json!({
                "op": "overwrite-where", "where": "order_date = DATE '2026-08-20'",
                "query": "SELECT order_id, order_date, 'done' AS status, amount FROM target WHERE order_date = DATE '2026-08-20'",
            }),
            "overwrite",
            json!({ "filter": "order_date = '2026-08-20'", "rows": orders_as_json(&[done(1, 20), done(2, 20)]) }),
            vec![done(1, 20), done(2, 20), done(8, 20), three.clone()],
        ),
        (
            json!({"op": "delete-where", "where": "order_id <> 1 AND order_date = DATE '2026-08-20'"}),
            "delete",
            json!({ "filter": "order_id <> 1 and order_date = '2026-08-20'" }),
            vec![one.clone(), three.clone()],
        ),
        (
            json!({"op": "update-where", "where": "order_id <> 1", "set": {"status": "'done'"}}),
            "overwrite",
            json!({ "filter": "order_id <> 1", "rows": orders_as_json(&[done(2, 20), done(3, 21)]) }),
            vec![one.clone(), done(2, 20), done(3, 21), done(8, 20)],
        ),
        (
            json!({
                "op": "merge-into", "source": typed, "on": "target.order_id = source.order_id",
                "when-matched": [{"update": "*"}], "when-not-matched": [{"insert": "*"}],
            }),
            "upsert",
            json!({ "on": ["order_id"], "rows": orders_as_json(&[done(1, 20), done(7, 20)]) }),
            vec![
                Order { cents: 100, ..done(1, 20) },
                two.clone(),
                three.clone(),
                Order { cents: 700, ..done(7, 20) },
                late.clone(),
            ],
        ),
        (
            json!({"op": "sql", "sql": "DELETE FROM shop.orders WHERE order_id > 1 AND order_date = DATE '2026-08-20'"}),
            "delete",
            json!({ "filter": "order_id > 1 and order_date = '2026-08-20'" }),
            vec![one.clone(), three.clone()],
        ),
    ];
    for (mut record, job, mut arguments, mut expected) in all {
        let Some((house, mut python)) = House::of_pyiceberg(POLICY).await else { return };
        record["v"] = json!(1);
        record["id"] = json!("told");
        python.branch("work");
        arguments["branch"] = json!("work");
        arguments["snapshot_properties"] = json!({ KEY: record.to_string() });
        python.ok(job, arguments);
        python.append("main", std::slice::from_ref(&late));
        let request = house.enqueue("work").await;
        house.drain().await;
        let detail = house.detail(request).await;
        assert_eq!(house.state(request).await, "landed", "{record}: {detail}");
        assert_eq!(house.classified(request).await == "rebase", record["op"] != "append", "{record}");
        expected.sort();
        assert_eq!(python.rows("main"), expected, "{record}");
        house.assert_sound().await;
    }
}
