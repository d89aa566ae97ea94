//! Spark as judge: it runs a statement on a branch and says so in the snapshot; the target changes; the queue
//! merges. The rows must be those that Spark itself leaves when it runs the statement on the changed target.
//!
//! A test run plays each statement after two of the five things that may have happened on the target.
//! `MERGEBERG_REPLAY_MATRIX=1 scripts/spark cargo test --test it replays::judge` plays each after each, in both formats
//! and modes.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use mergeberg::ledger::{Decision, ReviewFilter, ReviewWord};
use mergeberg_kernel::ids::Principal;
use serde_json::json;

use super::model::{Row, Value};
use super::world::{World, definition};
use crate::support::child::real_now;
use crate::support::json_rows;
use crate::support::spark::Spark;

/// Things that happen on the target: see [`meanwhile`].
const MEANWHILE: usize = 5;
/// Set: every statement after each of them.
const MATRIX: &str = "MERGEBERG_REPLAY_MATRIX";
const FEED: &str = "test.raw.feed";

/// `INSERT *` with the columns that source and target have.
const INSERT_ALL: &str = "INSERT (id, day, status, amount) VALUES (s.id, s.day, s.status, s.amount)";

/// Every form once; `{t}` is the table, at a branch.
const STATEMENTS: [&str; 9] = [
    // Before a column is added: Spark takes `*` only as long as the source has every column.
    "MERGE INTO {t} t USING (SELECT id, day, status, amount FROM test.raw.feed WHERE id IS NOT NULL) s \
     ON t.id = s.id AND t.day = s.day WHEN NOT MATCHED THEN INSERT *",
    "MERGE INTO {t} AS t USING test.raw.feed AS s ON t.id = s.id \
     WHEN MATCHED AND s.status = 'void' THEN DELETE \
     WHEN MATCHED AND t.amount < s.amount THEN UPDATE SET t.amount = s.amount + t.amount, status = concat(s.status, '!') \
     WHEN NOT MATCHED AND s.id > 4 THEN INSERT (id, day, status, amount) VALUES (s.id, s.day, 'added', NULL) \
     WHEN NOT MATCHED BY SOURCE AND t.day = 21 THEN UPDATE SET amount = t.amount * 2 \
     WHEN NOT MATCHED BY SOURCE AND t.status IS NULL THEN DELETE",
    "UPDATE {t} SET amount = amount + 1, day = 20 WHERE ID IN (SELECT id FROM test.raw.feed WHERE amount > 1)",
    "DELETE FROM {t} WHERE status <> 'new' AND amount NOT IN (SELECT amount FROM test.raw.feed WHERE amount IS NOT NULL)",
    "INSERT INTO {t} (id, day, status, amount) SELECT max(id) + 1, day, `Status`, sum(amount) FROM {t} WHERE day IS NOT NULL GROUP BY day, status",
    "INSERT OVERWRITE {t} PARTITION (day = 20) (id, status, amount) SELECT id, \"over\", amount FROM test.raw.feed",
    "UPDATE {t} SET status = CASE WHEN amount / 2 > '10' THEN 'dear' ELSE lower('CHEAP') END WHERE id BETWEEN 2 AND '8'",
    "DELETE FROM {t} t WHERE EXISTS (SELECT 1 FROM test.raw.feed f WHERE f.id = t.id AND f.day > t.day)",
    "MERGE INTO {t} t USING test.raw.feed s ON t.id <=> s.id WHEN MATCHED THEN DELETE",
];

fn row(id: Option<i64>, day: i64, status: Option<&str>, amount: i64) -> Row {
    let text = status.map_or(Value::Null, |text| Value::Text(text.to_owned()));
    [id.map_or(Value::Null, Value::Int), Value::Int(day), text, Value::Int(amount)]
}

fn base() -> Vec<Row> {
    vec![
        row(Some(1), 20, Some("new"), 10),
        row(Some(2), 20, Some("paid"), 20),
        row(Some(3), 21, None, 30),
        row(None, 21, Some("new"), 40),
        row(Some(5), 22, Some("void"), 50),
    ]
}

fn feed() -> Vec<Row> {
    vec![
        row(Some(2), 21, Some("paid"), 25),
        row(Some(3), 21, Some("void"), 1),
        row(None, 20, Some("new"), 2),
        row(Some(7), 20, None, 70),
    ]
}

/// What the target gets while the branch is worked on; each in its turn.
async fn meanwhile(world: &World, spark: &mut Spark, turn: usize) {
    let sql = |spark: &mut Spark, statement: &str| {
        spark.ok(&world.house, "sql", json!({ "statements": statement }));
    };
    match turn % MEANWHILE {
        0 => {
            // Appended first, so that there is something to compact.
            world
                .write("main", "append", &[row(Some(8), 20, Some("late"), 80)], false, BTreeMap::new())
                .await;
            spark.ok(
                &world.house,
                "procedure",
                json!({ "name": "rewrite_data_files", "arguments": { "options": { "rewrite-all": "true" } } }),
            );
        }
        1 => {
            let rows = [row(Some(4), 21, Some("late"), 4), row(Some(7), 22, Some("late"), 7)];
            world.write("main", "append", &rows, false, BTreeMap::new()).await;
        }
        2 => sql(
            spark,
            "INSERT OVERWRITE {base} PARTITION (day = 21) (id, status, amount) SELECT id + 1, status, amount FROM {base} WHERE day = 20",
        ),
        3 => sql(spark, "DELETE FROM {base} WHERE id = 2 OR status = 'late'"),
        _ => {
            sql(spark, &format!("ALTER TABLE {{base}} ADD COLUMN note{turn} STRING"));
            world.write("main", "append", &[row(Some(6), 20, Some("late"), 6)], false, BTreeMap::new()).await;
        }
    }
}

impl World {
    /// Accepts what was added to the table's structure, so that later branches may use it.
    async fn approve(&self) {
        let open = ReviewFilter { state: Some(ReviewWord::Open), table: None, table_uuid: None };
        let reviewer = Principal::new("reviewer");
        for item in self.house.ledger.reviews(&open).await.unwrap() {
            let decided = self.house.ledger.decide(
                item.id,
                Decision::Approve,
                &reviewer,
                "a column more",
                self.house.now(),
            );
            decided.await.unwrap();
        }
    }
}

async fn play(spark: &mut Spark, version: u8, mode: &str, shift: usize) {
    let mut table = definition().partitioned_by("day", "identity").format_version(version);
    for key in ["write.delete.mode", "write.update.mode", "write.merge.mode"] {
        table = table.property(key, mode);
    }
    let world = World::new(table, &base(), &feed()).await;
    world.first_landing(&row(Some(9), 22, Some("first"), 9)).await;
    world.house.clock.store(real_now(), Ordering::SeqCst);
    let mut rebased = 0;
    for (turn, statement) in STATEMENTS.iter().enumerate() {
        let adds_column = (turn + shift) % MEANWHILE == MEANWHILE - 1;
        // Not what a serial run takes: the source does not have the new column.
        let statement =
            if adds_column { statement.replace("INSERT *", INSERT_ALL) } else { (*statement).to_owned() };
        let (work, serial) = (format!("work{turn}"), format!("serial{turn}"));
        world.house.branch(&work).await;
        let ran = statement.replace("{t}", &format!("`test`.`shop`.`orders`.`branch_{work}`"));
        let record = json!({
            "v": 1, "id": work, "op": "sql", "sql": ran, "inputs": {"feed": world.inputs()["feed"]},
        });
        spark.ok(
            &world.house,
            "sql",
            json!({
                "statements": ran, "snapshot_properties": {"mergeberg.operation": record.to_string()},
            }),
        );
        meanwhile(&world, spark, turn + shift).await;
        world.house.branch(&serial).await;
        let judged = statement.replace("{t}", &format!("`test`.`shop`.`orders`.`branch_{serial}`"));
        let told = format!("v{version} {mode}, after {}: {ran}", (turn + shift) % MEANWHILE);
        spark
            .ask(&world.house, "sql", json!({ "statements": judged }))
            .unwrap_or_else(|e| panic!("{told}: {e}"));
        let expected = spark.ok(&world.house, "rows", json!({ "ref": serial }));
        world.house.clock.store(real_now(), Ordering::SeqCst);
        let (state, classified, detail) = world.merge(&work).await;
        assert_eq!(state, "landed", "{told}: {detail}");
        rebased += usize::from(classified == "rebase");
        let found = spark.ok(&world.house, "rows", json!({ "ref": "main" }));
        let lines = |answer: &serde_json::Value| json_rows::lines(answer["rows"].as_array().unwrap());
        assert_eq!(lines(&found), lines(&expected), "{told}");
        world.approve().await;
    }
    // The others met nothing of what they look at.
    assert!(rebased >= STATEMENTS.len() - 2, "v{version} {mode}: {rebased} were run again");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_run_again_is_what_spark_does_on_the_changed_target() {
    let Some(mut spark) = Spark::start() else { return };
    assert!(STATEMENTS.iter().any(|statement| statement.contains(FEED)));
    if std::env::var_os(MATRIX).is_none() {
        play(&mut spark, 2, "copy-on-write", 0).await;
        play(&mut spark, 3, "merge-on-read", 2).await;
        return;
    }
    for (version, mode) in
        [(2, "copy-on-write"), (2, "merge-on-read"), (3, "copy-on-write"), (3, "merge-on-read")]
    {
        for shift in 0..MEANWHILE {
            play(&mut spark, version, mode, shift).await;
        }
    }
}
