//! Our landings, then Spark: it reads the target, keeps house on it, writes on, and we land on that again.
//!
//! A commit of ours can be read rightly and still hold what the next commit of another engine stumbles over:
//! sequence numbers of manifests, counts, row ids, what its clean-up takes for unreachable (rules R1, N2, N4, D6,
//! D7). So each table of `fixtures/tables` that lands goes through Iceberg's own maintenance and statements, and
//! after each step Spark and our reader must give the rows that this step leaves. `docs/compatibility.md` keeps
//! the counts.
//!
//! The engine's own files are shared by all tests and lie outside the table's location: expiry spares them, and
//! what it would have deleted is compared with what is reachable.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;

use futures::FutureExt;
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::table::scan::RowReader;
use serde_json::{Value, json};

use crate::engine_tables::{BY_ROWS, SERIAL, assert_page, merge, with_branch};
use crate::support::child::real_now;
use crate::support::engine_table::{Expected, Oracle};
use crate::support::spark::Spark;
use crate::support::{House, json_rows};

/// Every table that lands, in half an hour; or those with this in their name, which the page does not tell.
const EVERY_TABLE: &str = "MERGEBERG_EVERY_TABLE";

/// The short form: one table for each kind of file and manifest that a landing writes.
const TELLING: [&str; 8] = [
    "append-two-v3-append-same",
    "delete-rows-identity-v2-mor-delete-same-file",
    "delete-rows-identity-v3-mor-delete-same-file",
    "eq-delete-partition-v2",
    "merged-manifests-delete-v3",
    "pyiceberg-overwrite-dynamic-identity-v2-append-same",
    "spec-evolved-on-main-v2",
    "upgrade-v3-pos-deletes",
];
/// These are rebased where every change of the target counts.
const REBASED: &str = "pyiceberg-overwrite-dynamic-identity-v2-append-same";

/// Spark has no type for their nanoseconds.
const NOT_READ_BY_SPARK: [&str; 3] = ["flink-avro-times-v3", "flink-orc-times-v3", "flink-types-v3"];

const STEPS: [&str; 6] = [
    "reads it",
    "`expire_snapshots`, `remove_orphan_files`",
    "`rewrite_manifests`",
    "`rewrite_data_files`, `rewrite_position_delete_files`",
    "INSERT, DELETE, MERGE",
    "a branch of Spark's, landed; expired again",
];

/// Later than every snapshot, whichever clock made it.
const LATER_MS: i64 = 60_000;

/// A table after a landing, with the rows that its target must have.
struct After<'a> {
    table: &'a str,
    house: House,
    spark: &'a mut Spark,
    columns: Vec<String>,
    rows: Vec<Value>,
    /// Rows with their ids, in tables of format 3.
    row_ids: Option<Vec<String>>,
    /// What Spark would not do.
    refusals: Vec<String>,
}

impl<'a> After<'a> {
    async fn landing(table: &'a str, spark: &'a mut Spark) -> Option<Self> {
        let (policy, oracle) = match table {
            REBASED => (SERIAL, Oracle::LandingOrder),
            _ => (BY_ROWS, Oracle::SomeOrder),
        };
        let merged = merge(table, policy, oracle).await;
        let landed = merged.rows?;
        assert_eq!(table == REBASED, merged.outcome == "rebase", "{table}: {}", merged.outcome);
        let house = merged.house;
        // What Spark writes has the time of this machine. Later landings go by rows in any case.
        house.clock.store(real_now(), Ordering::SeqCst);
        std::fs::write(house.dir.path().join("policies/table.toml"), BY_ROWS).unwrap();
        let loaded = house.loaded().await;
        let reader = RowReader::new(&loaded, loaded.facts.current_schema_id).unwrap();
        let columns = reader.arrow_schema().fields().iter().map(|field| field.name().clone()).collect();
        let row_ids = (Expected::of(table).format_version() == 3).then(Vec::new);
        let mut after =
            Self { table, house, spark, columns, rows: Vec::new(), row_ids, refusals: Vec::new() };
        (after.rows, after.row_ids) = after.read();
        assert_eq!(json_rows::lines(&after.rows), landed, "{table}: Spark reads other rows");
        Some(after)
    }

    /// Rows of main by Spark, and their lines with row ids.
    fn read(&mut self) -> (Vec<Value>, Option<Vec<String>>) {
        let mut columns = self.columns.clone();
        if self.row_ids.is_some() {
            columns.push("_row_id".to_owned());
        }
        let answer = self.spark.ok(&self.house, "rows", json!({ "columns": columns }));
        let mut rows = answer["rows"].as_array().unwrap().clone();
        if self.row_ids.is_none() {
            return (rows, None);
        }
        let with_ids = json_rows::lines(&rows);
        let ids: Vec<Value> =
            rows.iter_mut().map(|row| row.as_object_mut().unwrap().remove("_row_id").unwrap()).collect();
        let distinct: BTreeSet<i64> = ids
            .iter()
            .map(|id| id.as_i64().unwrap_or_else(|| panic!("{}: a row without _row_id", self.table)))
            .collect();
        assert_eq!(distinct.len(), rows.len(), "{}: _row_id is unique: {ids:?}", self.table);
        (rows, Some(with_ids))
    }

    /// Both readers give the rows that there must be.
    async fn assert_rows(&mut self, after: &str) {
        let (rows, row_ids) = self.read();
        let wanted = json_rows::lines(&self.rows);
        let table = self.table;
        assert_eq!(json_rows::lines(&rows), wanted, "{table}: rows by Spark after {after}");
        let head = self.house.head("main").await.unwrap();
        assert_eq!(self.house.lines_at(head).await, wanted, "{table}: our rows after {after}");
        self.row_ids = row_ids;
    }

    /// Maintenance changes neither rows nor row ids.
    async fn assert_unchanged(&mut self, after: &str) {
        let before = self.row_ids.clone();
        self.assert_rows(after).await;
        assert_eq!(self.row_ids, before, "{}: row ids after {after}", self.table);
    }

    /// Whether Spark did it.
    fn ask(&mut self, op: &str, arguments: Value) -> Option<Value> {
        match self.spark.ask(&self.house, op, arguments) {
            Ok(answer) => Some(answer),
            Err(error) => {
                if !self.refusals.contains(&error) {
                    self.refusals.push(error);
                }
                None
            }
        }
    }

    fn sql(&mut self, statements: Value) -> Option<Value> {
        self.ask("sql", json!({ "statements": statements }))
    }

    fn procedure(&mut self, name: &str, arguments: Value) {
        self.ask("procedure", json!({ "name": name, "arguments": arguments }));
    }

    /// (a) Metadata tables: snapshots, files and entries, as we know them.
    async fn metadata_tables(&mut self) {
        let loaded = self.house.loaded().await;
        let known: BTreeSet<i64> = loaded.facts.snapshots.iter().map(|snapshot| snapshot.id.0).collect();
        let ids = |answer: &Value, column: &str| -> BTreeSet<i64> {
            answer["rows"].as_array().unwrap().iter().map(|row| row[column].as_i64().unwrap()).collect()
        };
        if let Some(answer) = self.sql(json!("SELECT * FROM {base}.snapshots")) {
            assert_eq!(ids(&answer, "snapshot_id"), known, "{}: snapshots", self.table);
        }
        if let Some(answer) = self.ask("files", json!({})) {
            let name = |file: &Value| file["path"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
            let files: BTreeSet<String> = answer["files"].as_array().unwrap().iter().map(name).collect();
            let ours = self.house.live_files(self.house.head("main").await.unwrap()).await;
            assert_eq!(files.into_iter().collect::<Vec<_>>(), ours, "{}: live files", self.table);
        }
        self.sql(json!("SELECT * FROM {base}.all_entries"));
    }

    /// (b) Snapshots that no ref names go, with their files; nothing that is reachable goes.
    async fn expire(&mut self, action: bool) {
        if self.house.head("b").await.is_some() {
            self.spark.ok(&self.house, "sql", json!({ "statements": "ALTER TABLE {base} DROP BRANCH b" }));
        }
        let older_than = real_now() + LATER_MS;
        // The way of older releases, which relies on `source-snapshot-id` (rule D7), wherever it is possible.
        let incremental = !action && self.house.loaded().await.facts.refs.len() == 1;
        let expiry = json!({ "older_than_ms": older_than, "action": action, "incremental": incremental });
        if let Some(answer) = self.ask("expire_snapshots", expiry) {
            let facts = &self.house.loaded().await.facts;
            let heads: BTreeSet<i64> = facts.refs.values().map(|reference| reference.snapshot_id.0).collect();
            let left: BTreeSet<i64> = facts.snapshots.iter().map(|snapshot| snapshot.id.0).collect();
            assert_eq!(left, heads, "{}: what no ref needs is expired", self.table);
            let reachable = self.reachable().await;
            let gone = ["spared", "deleted"].map(|key| answer[key].as_array().unwrap());
            for path in gone.into_iter().flatten() {
                let path = path.as_str().unwrap();
                assert!(!reachable.contains(plain(path)), "{}: {path} is expired but reachable", self.table);
            }
        }
        let orphans = self.orphans();
        if incremental {
            // It leaves lists of picked snapshots behind, of Iceberg's own picks as well.
            let reachable = self.reachable().await;
            assert!(
                !orphans.iter().any(|path| reachable.contains(plain(path))),
                "{}: {orphans:?}",
                self.table
            );
        } else {
            assert_eq!(orphans, [""; 0], "{}: files that nothing names after expiry", self.table);
        }
        self.assert_unchanged("expiry").await;
    }

    /// Files below the location that nothing names: gone now.
    fn orphans(&mut self) -> Vec<String> {
        let older_than = real_now() + LATER_MS;
        let answer = self.ask("remove_orphan_files", json!({ "older_than_ms": older_than }));
        let paths = answer.as_ref().and_then(|answer| answer["paths"].as_array());
        paths.into_iter().flatten().map(|path| path.as_str().unwrap().to_owned()).collect()
    }

    /// Paths of all files that the snapshots of the table name.
    async fn reachable(&self) -> BTreeSet<String> {
        let table = self.house.loaded().await;
        // A store of its own: what is reachable is on disk.
        let store = ManifestStore::new(64 << 20);
        let mut paths = BTreeSet::new();
        for snapshot in table.facts.snapshots.iter() {
            paths.insert(snapshot.manifest_list.clone());
            paths.extend(store.manifest_paths(&table, snapshot).await.unwrap());
            let live = store.live_files(&table, snapshot, &FileScope::Table).await.unwrap();
            paths.extend(live.data.iter().chain(&live.deletes).map(|file| file.fact.path.to_string()));
        }
        paths.extend(table.metadata.statistics_iter().map(|file| file.statistics_path.clone()));
        paths.iter().map(|path| plain(path).to_owned()).collect()
    }

    /// Ids that one row has, smallest first.
    fn keys(&self) -> Vec<i64> {
        let mut ids: Vec<i64> = self.rows.iter().filter_map(|row| row["id"].as_i64()).collect();
        ids.sort_unstable();
        ids.chunk_by(|a, b| a == b).filter(|chunk| chunk.len() == 1).map(|chunk| chunk[0]).collect()
    }

    fn row(&self, id: i64) -> Value {
        self.rows.iter().find(|row| row["id"] == id).unwrap().clone()
    }

    /// A row as another one, but for its id.
    fn copied(&self, like: i64, id: i64) -> Value {
        let mut row = self.row(like);
        row["id"] = json!(id);
        row
    }

    /// The query of that row.
    fn copy(&self, like: i64, id: i64) -> String {
        let quoted = |name: &String| match name.as_str() {
            "id" => format!("{id} AS id"),
            other => format!("`{other}`"),
        };
        let columns = self.columns.iter().map(quoted).collect::<Vec<_>>().join(", ");
        format!("SELECT {columns} FROM {{base}} WHERE id = {like}")
    }

    /// (e) The next commits of Spark.
    async fn statements(&mut self) {
        if let Some(like) = self.keys().first().copied() {
            if self.sql(json!(format!("INSERT INTO {{table}} {}", self.copy(like, 9001)))).is_some() {
                self.rows.push(self.copied(like, 9001));
            }
        } else if self.sql(json!("INSERT INTO {table} (id) VALUES (9001)")).is_some() {
            let nulls = self.columns.iter().map(|name| (name.clone(), Value::Null)).collect();
            let mut row = Value::Object(nulls);
            row["id"] = json!(9001);
            self.rows.push(row);
        }
        self.assert_rows("INSERT").await;
        if let [gone, _, ..] = self.keys()[..] {
            if self.sql(json!(format!("DELETE FROM {{table}} WHERE id = {gone}"))).is_some() {
                self.rows.retain(|row| row["id"] != gone);
            }
            self.assert_rows("DELETE").await;
        }
        let moved = self.keys()[0];
        let merge = format!(
            "MERGE INTO {{table}} t USING ({} UNION ALL {}) s ON t.id = s.id
             WHEN MATCHED THEN UPDATE SET t.id = s.id + 5000 WHEN NOT MATCHED THEN INSERT *",
            self.copy(moved, moved),
            self.copy(moved, 9003),
        );
        if self.sql(json!(merge)).is_some() {
            self.rows.push(self.copied(moved, 9003));
            let at = self.rows.iter().position(|row| row["id"] == moved).unwrap();
            self.rows[at]["id"] = json!(moved + 5000);
        }
        self.assert_rows("MERGE").await;
    }

    /// A branch that Spark wrote on what is there now, while it wrote on main too, is landed as any other.
    async fn next_landing(&mut self) {
        let [gone, like, ..] = self.keys()[..] else { panic!("{}: rows are left", self.table) };
        let steps = json!([
            "ALTER TABLE {base} CREATE BRANCH c",
            format!("DELETE FROM {{table}} WHERE id = {gone}"),
            format!("INSERT INTO {{table}} {}", self.copy(like, 9100)),
            format!("INSERT INTO {{base}} {}", self.copy(like, 9101)),
        ]);
        if self.ask("sql", json!({ "statements": steps, "branch": "c" })).is_none() {
            return;
        }
        let request = self.house.enqueue("c").await;
        self.house.drain().await;
        assert_eq!(self.house.state(request).await, "landed", "{}: a branch of Spark's", self.table);
        self.rows.extend([self.copied(like, 9100), self.copied(like, 9101)]);
        self.rows.retain(|row| row["id"] != gone);
        self.assert_rows("the next landing").await;
        self.house.assert_sound().await;
        self.expire(true).await;
    }

    /// Every step; what Spark would not do, by step.
    async fn run(mut self) -> [Vec<String>; STEPS.len()] {
        let mut found: [Vec<String>; STEPS.len()] = Default::default();
        for (step, found) in found.iter_mut().enumerate() {
            match step {
                0 => self.metadata_tables().await,
                1 => {
                    assert_eq!(self.orphans(), [""; 0], "{}: files that nothing names", self.table);
                    self.expire(false).await;
                }
                2 => {
                    self.procedure("rewrite_manifests", json!({}));
                    self.assert_unchanged("rewrite_manifests").await;
                }
                3 => {
                    let options = json!({ "options": { "rewrite-all": "true" } });
                    self.procedure("rewrite_data_files", options.clone());
                    self.assert_unchanged("rewrite_data_files").await;
                    self.procedure("rewrite_position_delete_files", options);
                    self.assert_unchanged("rewrite_position_delete_files").await;
                }
                4 => self.statements().await,
                _ => self.next_landing().await,
            }
            *found = std::mem::take(&mut self.refusals);
        }
        found
    }
}

/// A path without its scheme, as engines spell it.
fn plain(path: &str) -> &str {
    let path = path.strip_prefix("file:").unwrap_or(path);
    path.strip_prefix("//").unwrap_or(path)
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_landing_spark_goes_on_with_the_table() {
    let Some(mut spark) = Spark::start() else { return };
    let every = std::env::var(EVERY_TABLE).ok();
    let chosen = |table: &String| match every.as_deref() {
        None => TELLING.contains(&table.as_str()),
        Some("1") => true,
        Some(part) => table.contains(part),
    };
    let tables = with_branch().filter(|table| !NOT_READ_BY_SPARK.contains(&table.as_str()) && chosen(table));
    let mut landed = 0;
    let mut done = [0; STEPS.len()];
    let mut others = String::new();
    let mut failed = Vec::new();
    for table in tables {
        let went = async {
            let after = After::landing(&table, &mut spark).await?;
            Some(after.run().await)
        };
        let found = match AssertUnwindSafe(went).catch_unwind().await {
            Ok(Some(found)) => found,
            Ok(None) => continue,
            Err(_) => {
                failed.push(table);
                continue;
            }
        };
        landed += 1;
        eprintln!("{table}: {found:?}");
        for ((step, refusals), done) in STEPS.iter().zip(found).zip(&mut done) {
            match refusals.is_empty() {
                true => *done += 1,
                false => writeln!(others, "\n`{table}`, {step}: {}", refusals.join("; ")).unwrap(),
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
    let mut text = String::from("| Spark, after the landing | tables |\n|---|---|\n");
    for (step, done) in STEPS.iter().zip(done) {
        writeln!(text, "| {step} | {done} of {landed} |").unwrap();
    }
    let text = text + &others;
    match every.as_deref() {
        None => assert_page("spark", &text),
        Some("1") => assert_page("spark-every-table", &text),
        Some(_) => eprint!("{text}"),
    }
}

/// Spark has no type for nanoseconds, but the library below it has, and for fixed bytes.
#[tokio::test(flavor = "multi_thread")]
async fn java_reads_the_fixed_partition_values_that_we_write() {
    let merged = merge("flink-types-v3", BY_ROWS, Oracle::SomeOrder).await;
    assert!(merged.rows.is_some(), "{}", merged.outcome);
    let Some(mut spark) = Spark::start() else { return };
    let answer = spark.ok(&merged.house, "planned_files", json!({}));
    let name = |file: &Value| file["path"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    let files: BTreeSet<String> = answer["files"].as_array().unwrap().iter().map(name).collect();
    let ours = merged.house.live_files(merged.house.head("main").await.unwrap()).await;
    assert_eq!(files.into_iter().collect::<Vec<_>>(), ours);
}
