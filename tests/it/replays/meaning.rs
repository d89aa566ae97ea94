//! What a statement means in Spark beyond rows and nulls: types of results, overflow, text beside numbers, zones of
//! time. The branch's run, the queue's, and Spark's on the changed target, beside each other.

use std::sync::atomic::Ordering;

use mergeberg::table::create::TableDefinition;
use serde_json::json;

use super::world::POLICY;
use crate::support::House;
use crate::support::child::real_now;
use crate::support::json_rows;
use crate::support::spark::Spark;

const COLUMNS: &str = "id, small, price, ratio, at, local, day, status";
/// In UTC. The night to the 25th of October has an hour twice in Berlin.
const BASE: &str = "\
    (1, 1, 1.15, 0.1D, TIMESTAMP '2026-08-19 22:30:00', TIMESTAMP_NTZ '2026-08-20 00:30:00', DATE '2026-08-20', 'new'), \
    (2, 2, 2.50, -0.0D, TIMESTAMP '2026-08-20 22:30:00', TIMESTAMP_NTZ '2026-08-20 23:30:00', DATE '2026-08-21', '2'), \
    (3, -7, 100.00, 2.5D, TIMESTAMP '2026-10-24 23:30:00', TIMESTAMP_NTZ '2026-10-25 01:30:00', DATE '2026-10-25', NULL), \
    (70, 30, NULL, NULL, NULL, NULL, NULL, '70')";
/// Appended to the target while the branch is worked on.
const LATE: &str = "(8, 8, 8.05, 0.0D, TIMESTAMP '2026-08-20 21:59:59', TIMESTAMP_NTZ '2026-08-20 23:59:59', \
    DATE '2026-08-20', 'late')";

/// `{t}` is the table; the zone is that of the session.
const SAME: [(&str, &str); 23] = [
    (
        "UTC",
        "UPDATE {t} SET price = price * 1.15 + id, ratio = ratio + 1.15 WHERE price > 1.1 OR ratio < 1e0",
    ),
    ("UTC", "UPDATE {t} SET id = id * 1.15, small = 3 * 1.15 WHERE small IN ('1', 2, 8)"),
    ("UTC", "UPDATE {t} SET status = 'mid' WHERE id BETWEEN '2' AND 70 AND small NOT BETWEEN 5 AND '9'"),
    ("UTC", "DELETE FROM {t} WHERE ratio = 0"),
    (
        "UTC",
        "UPDATE {t} SET id = -id, small = small % 3 - 1, price = -price, ratio = 0 - ratio WHERE ratio % 2 < 1",
    ),
    (
        "UTC",
        "UPDATE {t} SET status = CASE small WHEN '1' THEN 'one' WHEN 8 THEN 'eight' ELSE status END, \
         id = coalesce(nullif(id, '3'), 33)",
    ),
    (
        "UTC",
        "INSERT INTO {t} (id, small, price, ratio) SELECT sum(small), max(small), sum(price), avg(small) FROM {t} \
         GROUP BY status IS NULL",
    ),
    ("UTC", "UPDATE {t} SET price = CAST(price AS DECIMAL), ratio = power(small, 2) + abs(id) WHERE id < 10"),
    ("UTC", "UPDATE {t} SET small = price, id = round(price, 1) * 2 WHERE price % 2 > 0.5"),
    (
        "Europe/Berlin",
        "UPDATE {t} SET status = 'day' WHERE at >= TIMESTAMP '2026-08-20 00:00:00' AND at < TIMESTAMP '2026-08-21 00:00:00'",
    ),
    (
        "Europe/Berlin",
        "UPDATE {t} SET status = 'hour' WHERE extract(HOUR FROM at) = 0 OR at < '2026-08-20 00:00:00'",
    ),
    ("Europe/Berlin", "UPDATE {t} SET day = CAST(at AS DATE) WHERE at < TIMESTAMP '2026-09-01 00:00:00'"),
    ("Europe/Berlin", "UPDATE {t} SET at = date_trunc('DAY', at) + INTERVAL '1' DAY WHERE id < 5 OR id = 8"),
    ("America/New_York", "DELETE FROM {t} WHERE at < day OR local > TIMESTAMP '2026-08-20 23:45:00'"),
    ("Europe/Berlin", "DELETE FROM {t} WHERE at > day OR at <> local"),
    ("Europe/Berlin", "UPDATE {t} SET status = 'that day' WHERE CAST(at AS DATE) = DATE '2026-08-20'"),
    (
        "Europe/Berlin",
        "UPDATE {t} SET status = 'wall' WHERE CAST(at AS TIMESTAMP_NTZ) >= TIMESTAMP_NTZ '2026-08-20 00:30:00' AND \
         CAST(at AS TIMESTAMP_NTZ) < TIMESTAMP_NTZ '2026-10-25 01:30:00'",
    ),
    (
        "Europe/Berlin",
        "UPDATE {t} SET status = 'there' WHERE CAST(local AS TIMESTAMP) < TIMESTAMP '2026-08-20 23:30:00' OR \
         CAST(day AS TIMESTAMP) = TIMESTAMP '2026-10-25 00:00:00'",
    ),
    (
        "Europe/Berlin",
        "UPDATE {t} SET at = TIMESTAMP_NTZ '2026-10-25 02:30:00', local = at WHERE local BETWEEN day AND \
         TIMESTAMP_NTZ '2026-08-21 00:00:00'",
    ),
    (
        "America/New_York",
        "UPDATE {t} SET at = TIMESTAMP_NTZ '2026-03-08 02:30:00', local = at, day = at WHERE at IN (local, day, \
         TIMESTAMP '2026-08-19 18:30:00')",
    ),
    (
        "Europe/Berlin",
        "INSERT INTO {t} (id, at, local) SELECT id + 100, day, at FROM {t} WHERE at < local + INTERVAL '1' DAY",
    ),
    (
        "+02:00",
        "UPDATE {t} SET at = local, day = to_date('2026-08-20') WHERE id < 3 OR at > to_timestamp('2026-08-20 00:00:00')",
    ),
    (
        "UTC",
        "UPDATE {t} SET day = day + INTERVAL '1' MONTH, at = TIMESTAMP '2026-08-20 12:00:00+05:00' WHERE day = '2026-08-20'",
    ),
];

/// What Spark ends with an error on the changed target, and by which row.
const FAILS: [(&str, &str); 8] = [
    ("UPDATE {t} SET id = id + 1", "id = 9223372036854775807"),
    ("UPDATE {t} SET id = small + 1", "small = 2147483647"),
    ("UPDATE {t} SET small = id * 2", "id = 2000000000"),
    ("UPDATE {t} SET price = price * 100", "price = 9999999999.00"),
    ("INSERT INTO {t} (id) SELECT sum(id) FROM {t}", "id = 9223372036854775807"),
    ("UPDATE {t} SET id = 10 % small", "small = 0"),
    ("UPDATE {t} SET id = -id", "id = -9223372036854775808"),
    ("UPDATE {t} SET id = abs(id), ratio = id / 2", "id = -9223372036854775808"),
];

struct Stage {
    house: House,
    spark: Spark,
    turn: usize,
}

impl Stage {
    async fn new(spark: Spark) -> Self {
        let table = TableDefinition::default()
            .column("id", "long", false)
            .column("small", "int", false)
            .column("price", "decimal(12, 2)", false)
            .column("ratio", "double", false)
            .column("at", "timestamptz", false)
            .column("local", "timestamp", false)
            .column("day", "date", false)
            .column("status", "string", false);
        let house = House::with_table(table, POLICY).await;
        let mut stage = Self { house, spark, turn: 0 };
        stage.reset();
        stage
    }

    fn sql(&mut self, statement: &str) {
        self.spark.ok(&self.house, "sql", json!({ "statements": statement }));
    }

    fn reset(&mut self) {
        self.sql(&format!("INSERT OVERWRITE {{base}} ({COLUMNS}) VALUES {BASE}"));
    }

    fn rows(&mut self, name: &str) -> Vec<String> {
        let found = self.spark.ok(&self.house, "rows", json!({ "ref": name }));
        json_rows::lines(found["rows"].as_array().unwrap())
    }

    /// The statement runs on a branch, `late` comes to the target, Spark judges, the queue merges.
    async fn play(
        &mut self,
        zone: &str,
        statement: &str,
        late: &str,
    ) -> (Result<Vec<String>, String>, String, String) {
        self.turn += 1;
        let (work, serial) = (format!("work{}", self.turn), format!("serial{}", self.turn));
        let at = |name: &str| statement.replace("{t}", &format!("`test`.`shop`.`orders`.`branch_{name}`"));
        let settings = json!({ "spark.sql.session.timeZone": zone });
        self.house.branch(&work).await;
        let mut record = json!({ "v": 1, "id": work, "op": "sql", "sql": at(&work) });
        if zone != "UTC" {
            record["session-timezone"] = json!(zone);
        }
        self.spark.ok(
            &self.house,
            "sql",
            json!({
                "statements": at(&work), "settings": settings,
                "snapshot_properties": {"mergeberg.operation": record.to_string()},
            }),
        );
        self.sql(late);
        self.house.branch(&serial).await;
        let judged =
            self.spark.ask(&self.house, "sql", json!({ "statements": at(&serial), "settings": settings }));
        let expected = judged.map(|_| self.rows(&serial));
        self.house.clock.store(real_now(), Ordering::SeqCst);
        let request = self.house.enqueue(&work).await;
        self.house.drain().await;
        (expected, self.house.state(request).await, self.house.detail(request).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn types_and_zones_of_statements_are_sparks() {
    let Some(spark) = Spark::start() else { return };
    let mut stage = Stage::new(spark).await;
    let late = format!("INSERT INTO {{base}} ({COLUMNS}) VALUES {LATE}");
    for (zone, statement) in SAME {
        let (expected, state, detail) = stage.play(zone, statement, &late).await;
        assert_eq!(state, "landed", "{zone}: {statement}: {detail}");
        let expected = expected.unwrap_or_else(|error| panic!("{zone}: {statement}: {error}"));
        assert_eq!(stage.rows("main"), expected, "{zone}: {statement}");
        stage.reset();
    }
    stage.house.assert_sound().await;
}

/// Fields inside of columns are set; around them there is a struct where there was null.
const INSIDE: [&str; 6] = [
    "UPDATE {t} SET who.name = concat(coalesce(who.name, 'nobody'), '!'), who.at.x = small * 2 WHERE id < 3 OR id > 50",
    "UPDATE {t} AS w SET w.who.At.y = id + 1, w.status = 'set' WHERE w.who.at.x IS NOT NULL OR w.id = 8",
    "UPDATE {t} SET who.at = named_struct('x', 7, 'y', 8L), `WHO`.`name` = DATE '2026-08-20' WHERE small > 1",
    "MERGE INTO {t} t USING (SELECT id + 1 AS id, status, small FROM {t} WHERE id < 9) s ON t.id = s.id \
     WHEN MATCHED AND s.small > 1 THEN UPDATE SET t.who.name = s.status, who.at.y = t.who.at.x + s.small, price = 1 \
     WHEN MATCHED THEN UPDATE SET who.at.x = 5",
    "UPDATE {t} SET who = NULL, status = who.name WHERE who.at.y IS NULL",
    "UPDATE {t} SET many.a = 1, many.b = 2, many.c = 3, many.d = 4, many.e = 5, many.f = 6, many.g = 7, many.h = 8, \
     many.i = 9, many.j = 10, many.k = 11 WHERE id < 70",
];

#[tokio::test(flavor = "multi_thread")]
async fn fields_inside_of_columns_are_set_as_spark_sets_them() {
    let Some(spark) = Spark::start() else { return };
    let mut stage = Stage::new(spark).await;
    stage.sql("ALTER TABLE {base} ADD COLUMN who STRUCT<name: STRING, at: STRUCT<x: INT, y: BIGINT>>");
    let letters = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let fields: Vec<String> = letters.iter().map(|letter| format!("{letter}: INT")).collect();
    stage.sql(&format!("ALTER TABLE {{base}} ADD COLUMN many STRUCT<{}>", fields.join(", ")));
    let some = "named_struct('name', 'ann', 'at', named_struct('x', 1, 'y', 2L))";
    let half = "named_struct('name', CAST(NULL AS STRING), 'at', CAST(NULL AS STRUCT<x: INT, y: BIGINT>))";
    let late = format!("INSERT INTO {{base}} (id, small, who) VALUES (8, 8, {some}), (80, 8, NULL)");
    for statement in INSIDE {
        stage.sql(&format!(
            "INSERT OVERWRITE {{base}} (id, small, status, who) VALUES (1, 1, 'new', {some}), (2, 2, NULL, {half}), \
             (3, 3, 'old', NULL), (70, 4, '70', {some})"
        ));
        let (expected, state, detail) = stage.play("UTC", statement, &late).await;
        assert_eq!(state, "landed", "{statement}: {detail}");
        let expected = expected.unwrap_or_else(|error| panic!("{statement}: {error}"));
        assert_eq!(stage.rows("main"), expected, "{statement}");
    }
    // Spark takes the first by names in any case; the second it refuses itself.
    for statement in [
        "UPDATE {t} SET who.at = named_struct('X', 7, 'y', 8L) WHERE id = 8",
        "UPDATE {t} SET who.at = named_struct('y', 8L, 'x', 7) WHERE id = 8",
    ] {
        let (_, state, detail) = stage.play("UTC", statement, &late).await;
        assert_eq!(state, "refused(replay-failed)", "{statement}: {detail}");
        assert!(detail.contains("name its fields as the column does"), "{detail}");
    }
    stage.house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_overflows_in_spark_is_refused() {
    let Some(spark) = Spark::start() else { return };
    let mut stage = Stage::new(spark).await;
    for (statement, row) in FAILS {
        let (column, value) = row.split_once(" = ").unwrap();
        let late = format!("INSERT INTO {{base}} ({column}) VALUES ({value})");
        let (judged, state, detail) = stage.play("UTC", statement, &late).await;
        assert!(judged.is_err(), "{statement}: Spark takes {row}");
        assert_eq!(state, "refused(replay-failed)", "{statement}: {detail}");
        stage.reset();
    }
    stage.house.assert_sound().await;
}
