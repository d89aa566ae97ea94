//! Tables that other engines wrote (`fixtures/tables`), each in a queue of its own.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex};

use futures::TryStreamExt;
use mergeberg::ledger::Ledger;
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg::table::scan::{RowReader, ScanCounters, live_rows};
use mergeberg_kernel::ids::{SnapshotId, TableName};
use serde_json::Value;
use sqlx::ConnectOptions as _;
use sqlx::sqlite::SqliteConnectOptions;
use tempfile::TempDir;

use super::{House, json_rows};

/// Where the paths in the metadata of these tables lead.
pub const PLACE: &str = "/tmp/mergeberg-fixtures-v1";
/// Where the table is registered.
pub const NAME: &str = "engine.written";

/// What the engine says of its table (`fixtures/tables/README.md`).
pub struct Expected(Value);

impl Expected {
    pub fn of(table: &str) -> Self {
        let path = folder().join(table).join("expected.json");
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    pub fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn head(&self, name: &str) -> Option<SnapshotId> {
        self.0["refs"].get(name).and_then(Value::as_i64).map(SnapshotId)
    }

    /// Rows of a ref, or of the base, as lines.
    pub fn rows(&self, name: &str) -> Option<Vec<String>> {
        self.0["rows"].get(name).and_then(Value::as_array).map(json_rows::lines)
    }

    /// Rows when the same statements run on main one after another.
    fn serial(&self) -> Option<Vec<String>> {
        self.0.get("serial").and_then(Value::as_array).map(json_rows::lines)
    }

    /// Rows when the branch came first, and then what main did meanwhile.
    fn other_order(&self) -> Option<Vec<String>> {
        let (base, main, mut rows) = (self.rows("base")?, self.rows("main")?, self.rows("b")?);
        for gone in minus(&base, &main) {
            if let Some(at) = rows.iter().position(|row| *row == gone) {
                rows.remove(at);
            }
        }
        rows.extend(minus(&main, &base));
        rows.sort();
        Some(rows)
    }

    /// The rows of a landing are those of the landing order, or of some order of the two.
    pub fn assert_explains(&self, table: &str, rows: &Vec<String>, oracle: Oracle) {
        let Some(serial) = self.serial() else { return };
        if oracle == Oracle::SomeOrder && self.other_order().as_ref() == Some(rows) {
            return;
        }
        assert_eq!(rows, &serial, "{table}: rows of main");
    }

    pub fn format_version(&self) -> i64 {
        self.0.get("format-version").and_then(Value::as_i64).unwrap()
    }

    /// Who wrote the branch, what it did, what main did meanwhile, what the engine's own merge does.
    pub fn words(&self) -> [String; 4] {
        let mode = match self.text("mode") {
            "merge-on-read" => ", merge-on-read",
            "copy-on-write" => ", copy-on-write",
            _ => "",
        };
        let own = match (self.text("fast_forward"), self.text("cherrypick")) {
            ("ok", _) => "fast-forward",
            (_, "ok") => "cherry-pick",
            _ => "none",
        };
        let operation = format!("{}{mode}", self.text("operation"));
        [self.text("engine").to_owned(), operation, self.text("main_commit").to_owned(), own.to_owned()]
    }

    /// Live files after the engine's own merge, where it has one: its cherry-pick, or its fast-forward.
    pub fn files_after_its_own_merge(&self) -> Option<Vec<String>> {
        let files = ["cherrypick", "fast_forward"]
            .iter()
            .find(|how| self.text(how) == "ok")
            .map(|how| format!("{how}_files"))?;
        let files = self.0.get(&files)?.as_array()?;
        let last = |file: &Value| {
            Path::new(file.as_str().unwrap()).file_name().unwrap().to_str().unwrap().to_owned()
        };
        let mut names: Vec<String> = files.iter().map(last).collect();
        names.sort();
        names.dedup();
        Some(names)
    }

    /// By branch and row id: the column `id`, and the sequence number of the row's last update; in format 3.
    pub fn lineage(&self) -> BTreeMap<String, BTreeMap<i64, (i64, i64)>> {
        let number = |row: &Value, key: &str| row[key].as_i64().unwrap();
        let of = |row: &Value| {
            let is = (number(row, "id"), number(row, "_last_updated_sequence_number"));
            (number(row, "_row_id"), is)
        };
        let branches = self.0.get("lineage").and_then(Value::as_object).into_iter().flatten();
        branches
            .map(|(name, rows)| (name.clone(), rows.as_array().unwrap().iter().map(of).collect()))
            .collect()
    }

    pub fn has_branch(&self) -> bool {
        self.head("b").is_some()
    }
}

/// Which orders of branch and target may explain the rows of a landing (rule C4).
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Oracle {
    LandingOrder,
    SomeOrder,
}

/// What `a` has more than `b`, as multisets.
fn minus(a: &[String], b: &[String]) -> Vec<String> {
    let mut rest = b.to_vec();
    let kept = |row: &&String| match rest.iter().position(|other| other == *row) {
        Some(at) => {
            rest.remove(at);
            false
        }
        None => true,
    };
    a.iter().filter(kept).cloned().collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables")
}

/// Every table, by name.
pub fn names() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("expected.json").exists())
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// Files never change once written, so one copy serves every test, of this run and of the next.
fn put_in_place(table: &str, metadata: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let place = Path::new(PLACE).join(table);
    if place.join(metadata).exists() {
        return place;
    }
    // An older build of the table had other names.
    let _ = std::fs::remove_dir_all(&place);
    let fresh = Path::new(PLACE).join(format!(".{table}-{}", std::process::id()));
    copy(&folder().join(table), &fresh);
    // Another process may have been faster, with the same files.
    if std::fs::rename(&fresh, &place).is_err() {
        let _ = std::fs::remove_dir_all(&fresh);
    }
    assert!(place.join(metadata).exists(), "{} is not there", place.display());
    place
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

impl House {
    /// A queue over a copy of an engine's table: its files are where the engine left them, what is written from
    /// now on goes into the House's own folder.
    pub async fn engine_table(table: &str, policy: &str) -> Self {
        let expected = Expected::of(table);
        let metadata = expected.text("metadata").to_owned();
        let place = put_in_place(table, &metadata);
        let dir = TempDir::new().unwrap();
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/table.toml"), policy).unwrap();
        let mut document: Value =
            serde_json::from_str(&std::fs::read_to_string(place.join(&metadata)).unwrap()).unwrap();
        let location = format!("file://{}", dir.path().join("warehouse/engine/written").display());
        document["location"] = Value::from(location);
        let own = dir.path().join("warehouse/engine/written/metadata");
        std::fs::create_dir_all(&own).unwrap();
        let own = own.join(Path::new(&metadata).file_name().unwrap());
        std::fs::write(&own, document.to_string()).unwrap();
        let updated = document["last-updated-ms"].as_i64().unwrap();
        let clock = Arc::new(AtomicI64::new(updated + 1_000));
        let catalog = Arc::new(Self::catalog_in(dir.path(), &clock, true).await);
        catalog.create_namespace("engine").await.unwrap();
        let options = SqliteConnectOptions::new().filename(dir.path().join("catalog.db"));
        let mut connection = options.connect().await.unwrap();
        sqlx::query(
            "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name, metadata_location, iceberg_type)
             VALUES ('test', 'engine', 'written', $1, 'TABLE')",
        )
        .bind(format!("file://{}", own.display()))
        .execute(&mut connection)
        .await
        .unwrap();
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let name: TableName = NAME.parse().unwrap();
        Self::assemble(dir, catalog, ledger, clock, name)
    }

    /// Rows of a snapshot under the table's current schema, as lines.
    pub async fn lines_at(&self, id: SnapshotId) -> Vec<String> {
        let table = self.loaded().await;
        let snapshot = table.facts.snapshots.get(id).unwrap();
        // A store of its own: what is read is what is on disk.
        let live =
            ManifestStore::new(64 << 20).live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap();
        let columns: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
        let counters = Arc::new(ScanCounters::default());
        let mut rows = Vec::new();
        for file in live_rows(live).unwrap() {
            let batches: Vec<_> =
                reader.read(&file, &columns, &counters).unwrap().try_collect().await.unwrap();
            rows.extend(batches.iter().flat_map(json_rows::rows));
        }
        json_rows::lines(&rows)
    }
}
