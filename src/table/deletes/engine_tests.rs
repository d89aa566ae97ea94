//! Tables with row-level deletes that Spark (Iceberg's Java library) and Flink wrote: every ref of them is read as
//! Spark reads it. The tables are those below `fixtures/tables`; without them this test says so and does nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::{Array, RecordBatch};
use datafusion::arrow::datatypes::DataType;
use datafusion::arrow::util::display::array_value_to_string;
use futures::TryStreamExt;
use iceberg::io::{FileIOBuilder, LocalFsStorageFactory};
use iceberg::spec::TableMetadata;
use mergeberg_kernel::change::FileContent;
use mergeberg_kernel::ids::{SnapshotId, TableName};
use serde_json::Value;

use super::super::document::Document;
use super::super::facts_of::facts_of;
use super::super::loaded::LoadedTable;
use super::super::manifests::{FileScope, LiveFiles, ManifestStore};
use super::super::scan::{RowReader, ScanCounters, ScanFile};
use super::*;

/// Where the tables were written: their metadata has absolute paths.
const PLACE: &str = "/tmp/mergeberg-fixtures-v1";
/// Tables among them that have row-level deletes, at least.
const WANTED_TABLES: usize = 20;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables")
}

/// Copies a table to where it was written, unless it is there. All at once, for others may do the same.
fn put_in_place(table: &Path, name: &str) -> PathBuf {
    let place = Path::new(PLACE).join(name);
    if !place.exists() {
        std::fs::create_dir_all(PLACE).unwrap();
        let beside = tempfile::tempdir_in(PLACE).unwrap();
        let copy = beside.path().join(name);
        copy_folder(table, &copy);
        if std::fs::rename(&copy, &place).is_err() {
            assert!(place.exists());
        }
    }
    place
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The table for reading only, of any format version that the crate's model knows.
fn load(place: &Path, metadata: &str) -> Option<LoadedTable> {
    let json = std::fs::read(place.join(metadata)).ok()?;
    let model: TableMetadata = serde_json::from_slice(&json).ok()?;
    let mut document: Value = serde_json::from_slice(&json).ok()?;
    document["format-version"] = 2.into();
    let document = Document::parse(&serde_json::to_vec(&document).ok()?).ok()?;
    let name: TableName = "engines.fixture".parse().unwrap();
    Some(LoadedTable {
        facts: facts_of(&name, &document).ok()?,
        metadata_location: place.join(metadata).display().to_string(),
        metadata: Arc::new(model),
        document: Arc::new(document),
        file_io: FileIOBuilder::new(Arc::new(LocalFsStorageFactory)).build(),
    })
}

/// Columns of types that JSON writes as we do.
fn is_plain(data_type: &DataType) -> bool {
    matches!(
        data_type,
        DataType::Int32 | DataType::Int64 | DataType::Utf8 | DataType::Date32 | DataType::Boolean
    )
}

fn texts(batch: &RecordBatch, columns: &[String]) -> Vec<String> {
    let value = |row: usize, name: &String| {
        let column = batch.column_by_name(name).unwrap();
        let text =
            if column.is_null(row) { "null".to_owned() } else { array_value_to_string(column, row).unwrap() };
        format!("{name}={text}")
    };
    (0..batch.num_rows())
        .map(|row| columns.iter().map(|name| value(row, name)).collect::<Vec<_>>().join(" "))
        .collect()
}

fn expected_texts(rows: &Value, columns: &[String]) -> Vec<String> {
    let value = |row: &Value, name: &String| {
        let text = match &row[name] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        format!("{name}={text}")
    };
    let rows = rows.as_array().unwrap().iter();
    let mut texts: Vec<String> =
        rows.map(|row| columns.iter().map(|name| value(row, name)).collect::<Vec<_>>().join(" ")).collect();
    texts.sort();
    texts
}

/// A table with what its engine says about it.
struct Fixture {
    name: String,
    table: LoadedTable,
    expected: Value,
    columns: Vec<String>,
}

impl Fixture {
    fn of(folder: &Path) -> Option<Self> {
        let expected = std::fs::read(folder.join("expected.json")).ok()?;
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let name = folder.file_name()?.to_str()?.to_owned();
        let place = put_in_place(folder, &name);
        let table = load(&place, expected["metadata"].as_str()?)?;
        let reader = RowReader::new(&table, table.facts.current_schema_id).unwrap();
        let fields = reader.arrow_schema().fields().iter();
        let columns = fields.filter(|f| is_plain(f.data_type())).map(|f| f.name().clone()).collect();
        Some(Self { name, table, expected, columns })
    }

    /// Live files of a snapshot. What the crate cannot decode for other reasons has no delete files.
    async fn live(&self, reference: &str, snapshot: SnapshotId) -> Option<LiveFiles> {
        let snapshot = self.table.facts.snapshots.get(snapshot)?;
        let store = ManifestStore::new(16 << 20);
        match store.live_files(&self.table, snapshot, &FileScope::Table).await {
            Ok(files) => Some(files),
            Err(error) => {
                let files = self.expected["files"][reference].to_string();
                let deletes = files.contains("delete") || files.contains(".puffin");
                assert!(!deletes, "{reference} of {}: {error}", self.name);
                None
            }
        }
    }

    async fn read(&self, files: &[ScanFile], counters: &Arc<ScanCounters>) -> Vec<String> {
        let reader = RowReader::new(&self.table, self.table.facts.current_schema_id).unwrap();
        let all: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
        let mut found = Vec::new();
        for file in files {
            let batches = reader.read(file, &all, counters).unwrap();
            for batch in batches.try_collect::<Vec<_>>().await.unwrap() {
                found.extend(texts(&batch, &self.columns));
            }
        }
        found.sort();
        found
    }

    fn expected_rows(&self, reference: &str) -> Option<Vec<String>> {
        let rows = &self.expected["rows"][reference];
        rows.is_array().then(|| expected_texts(rows, &self.columns))
    }

    /// From where the branch began to where it is, by rows. Spark reads a snapshot with the snapshot's schema, a
    /// branch with the table's.
    async fn check_difference(&self, base: SnapshotId, head: SnapshotId) {
        let schema_of = |id| self.table.facts.snapshots.get(id).and_then(|snapshot| snapshot.schema_id);
        if schema_of(base) != Some(self.table.facts.current_schema_id) {
            return;
        }
        let Some((was, is)) = self.expected_rows("base").zip(self.expected_rows("b")) else { return };
        let (Some(before), Some(after)) = (self.live("base", base).await, self.live("b", head).await) else {
            return;
        };
        if before.deletes.is_empty() && after.deletes.is_empty() {
            return;
        }
        let difference = row_difference(before, after).unwrap();
        let counters = Arc::default();
        let kept = self.read(&difference.kept, &counters).await;
        for (side, expected) in [(&difference.removed, was), (&difference.added, is)] {
            let mut rows = kept.clone();
            rows.extend(self.read(side, &counters).await);
            rows.sort();
            assert_eq!(rows, expected, "{}", self.name);
        }
    }
}

#[tokio::test]
async fn tables_of_engines_are_read_as_spark_reads_them() {
    let Ok(folders) = std::fs::read_dir(fixtures()) else {
        eprintln!("skipped: there is no fixtures/tables");
        return;
    };
    let mut tables: BTreeMap<String, u64> = BTreeMap::new();
    let mut kinds = [0; 3];
    for folder in folders {
        let Some(fixture) = Fixture::of(&folder.unwrap().path()) else { continue };
        let refs = fixture.expected["refs"].as_object().unwrap().clone();
        let id = |value: &Value| value.as_i64().map(SnapshotId);
        for (reference, head) in &refs {
            let Some(head) = id(head) else { continue };
            let Some(files) = fixture.live(reference, head).await else { continue };
            let Some(expected) = fixture.expected_rows(reference) else { continue };
            if files.deletes.is_empty() {
                continue;
            }
            for file in &files.deletes {
                match file.fact.content {
                    FileContent::DeletionVector { .. } => kinds[0] += 1,
                    FileContent::PositionDeletes { .. } => kinds[1] += 1,
                    FileContent::EqualityDeletes { .. } => kinds[2] += 1,
                    FileContent::Data => panic!("{} holds rows", file.fact.path),
                }
            }
            let counters: Arc<ScanCounters> = Arc::default();
            let found = fixture.read(&live_rows(files).unwrap(), &counters).await;
            assert_eq!(found, expected, "{reference} of {}", fixture.name);
            *tables.entry(fixture.name.clone()).or_default() += counters.delete_files();
        }
        if let Some((base, head)) = id(&fixture.expected["base"]).zip(refs.get("b").and_then(id)) {
            fixture.check_difference(base, head).await;
        }
    }
    println!("{} tables with deletes: {kinds:?} {tables:?}", tables.len());
    assert!(tables.len() >= WANTED_TABLES, "{tables:?}");
    assert!(kinds.iter().all(|count| *count > 0), "vectors, positions, keys: {kinds:?}");
}
