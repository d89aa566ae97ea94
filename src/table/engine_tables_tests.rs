//! The tables below `fixtures/tables`, which engines wrote: their metadata, summaries and row ids as we
//! understand them are what Java meant. Manifests name files by the path of the place where a table was made.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use iceberg::io::FileIO;
use iceberg::spec::Datum;
use mergeberg_kernel::change::{DeleteKey, FileContent, FileFact};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use serde_json::Value;

use super::catalog::CatalogError;
use super::loaded::LoadedTable;
use super::manifests::{FileScope, LiveFile, ManifestStore};
use super::snapshot_summary;
use super::snapshot_writer::SnapshotWriter;
use super::writer_test_support::{append, delete, fact_of_new};

const PLACE: &str = "/tmp/mergeberg-fixtures-v1";
/// Memory of the manifest cache, bytes.
const CACHE_BYTES: usize = 64 * 1024 * 1024;
/// Ids above belong to metadata columns (table spec, "Reserved Field IDs").
const MAX_COLUMN_ID: i32 = i32::MAX - 200;
/// Tables that are refused, each by name: format version 1, columns of type variant.
const REFUSED: [&str; 3] = ["v1-append", "v1-void", "variant-v3"];
/// Tables in which Spark wrote ids into the files of rows that it moved.
const MOVED_ROWS: [&str; 3] = ["compaction", "-cow-", "defaults-v3"];

struct EngineTable {
    name: String,
    expected: Value,
    json: Vec<u8>,
    loaded: Result<LoadedTable, CatalogError>,
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Every table, at its place: written beside it and moved, for other tests do the same at the same time.
fn engine_tables() -> Vec<EngineTable> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables");
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let mut tables = Vec::new();
    for folder in folders {
        let Ok(expected) = std::fs::read(folder.join("expected.json")) else { continue };
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let place = Path::new(PLACE).join(&name);
        if !place.exists() {
            std::fs::create_dir_all(PLACE).unwrap();
            let beside = tempfile::tempdir_in(PLACE).unwrap();
            copy_folder(&folder, &beside.path().join(&name));
            let moved = std::fs::rename(beside.path().join(&name), &place);
            assert!(moved.is_ok() || place.exists());
        }
        let location = place.join(expected["metadata"].as_str().unwrap());
        let json = std::fs::read(&location).unwrap();
        let table: TableName = "engines.table".parse().unwrap();
        let loaded = LoadedTable::parse(&table, location.to_str().unwrap(), &json, FileIO::new_with_fs());
        tables.push(EngineTable { name, expected, json, loaded });
    }
    tables
}

/// Row ids that Spark read.
fn row_ids(lineage: &Value) -> Option<BTreeSet<i64>> {
    let rows = lineage.as_array()?;
    Some(rows.iter().map(|row| row["_row_id"].as_i64().unwrap()).collect())
}

/// Row ids that the data files of a snapshot take by their places.
async fn ids_by_place(store: &ManifestStore, table: &LoadedTable, snapshot: &SnapshotFact) -> Vec<i64> {
    let live = store.live_files(table, snapshot, &FileScope::Table).await.unwrap();
    let mut ids = Vec::new();
    for file in &live.data {
        let first = file.first_row_id.unwrap();
        ids.extend(first..first + file.fact.records);
    }
    ids.sort_unstable();
    ids
}

/// Which table's metadata was read as what: each is what it was, byte for byte as JSON values, and says the
/// next row id.
#[test]
fn metadata_of_engines_is_read_and_written_without_loss() {
    let mut versions: BTreeMap<u8, usize> = BTreeMap::new();
    for EngineTable { name, json, loaded, expected: _ } in engine_tables() {
        let table = match loaded {
            Ok(table) => table,
            Err(error) => {
                let refused = matches!(&error, CatalogError::Unsupported { .. });
                assert!(refused && REFUSED.contains(&name.as_str()), "{name}: {error}");
                continue;
            }
        };
        let value = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let before = value(&super::metadata_file::decode(&json).unwrap());
        assert_eq!(value(&table.document.to_bytes()), before, "{name}");
        let next = before.get("next-row-id").and_then(Value::as_i64);
        assert_eq!(table.facts.next_row_id, next, "{name}");
        *versions.entry(table.facts.format_version).or_default() += 1;
    }
    assert!(versions[&2] >= 50 && versions[&3] >= 25, "{versions:?}");
}

/// Figures of a summary; the counts of manifests we do not keep.
fn figures(summary: &BTreeMap<String, String>) -> BTreeMap<&str, &str> {
    let not_kept = ["manifests-", "entries-"];
    let is_figure = |key: &str| {
        ["added-", "removed-", "deleted-", "total-", "changed-"].iter().any(|p| key.starts_with(p))
    };
    let pairs = summary.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    pairs.filter(|(key, _)| is_figure(key) && !not_kept.iter().any(|p| key.starts_with(p))).collect()
}

#[tokio::test]
async fn summaries_are_those_of_java() {
    let store = ManifestStore::new(CACHE_BYTES);
    let mut compared = 0;
    for EngineTable { name, loaded, .. } in engine_tables() {
        // PyIceberg counts no partition where a table has none.
        let (Ok(table), false) = (&loaded, name.starts_with("pyiceberg-")) else { continue };
        for snapshot in table.facts.snapshots.iter() {
            let parent = snapshot.parent.map(|parent| table.facts.snapshots.get(parent));
            // Without its parent a snapshot's totals cannot be told.
            if parent == Some(None) {
                continue;
            }
            let change = store.changes(table, snapshot).await.unwrap();
            let both = |data: &[FileFact], deletes: &[FileFact]| -> Vec<FileFact> {
                data.iter().chain(deletes).cloned().collect()
            };
            let ours = snapshot_summary::summary(
                &BTreeMap::new(),
                &both(&change.added, &change.added_deletes),
                &both(&change.removed, &change.removed_deletes),
                parent.flatten().map(|parent| &parent.summary),
            );
            assert_eq!(figures(&ours), figures(&snapshot.summary), "{name} {}", snapshot.id);
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared}");
}

#[tokio::test]
async fn rule_n2_row_ids_are_those_that_spark_reads() {
    let store = ManifestStore::new(CACHE_BYTES);
    let mut compared = 0;
    for EngineTable { name, loaded, expected, .. } in engine_tables() {
        let Ok(table) = &loaded else { continue };
        let Some(lineage) = expected["lineage"].as_object() else { continue };
        for (reference, rows) in lineage {
            let Some(spark) = row_ids(rows) else { continue };
            let Some(head) = table.facts.head(&RefName::new(reference)) else { continue };
            let head = table.facts.snapshots.get(head).unwrap();
            let ours = ids_by_place(&store, table, head).await;
            let set: BTreeSet<i64> = ours.iter().copied().collect();
            assert_eq!(set.len(), ours.len(), "each id once: {name} {reference}");
            compared += 1;
            if MOVED_ROWS.iter().any(|what| name.contains(what)) {
                continue;
            }
            // Rows that are deleted keep their places.
            assert!(spark.is_subset(&set), "{name} {reference}: {spark:?}, by place {ours:?}");
            let deletes = store.live_files(table, head, &FileScope::Table).await.unwrap().deletes;
            assert!(spark == set || !deletes.is_empty(), "{name} {reference}: {spark:?}, by place {ours:?}");
        }
    }
    assert!(compared > 40, "{compared}");
}

/// One snapshot of the branch that only adds, picked onto `main` as Spark's `cherrypick_snapshot` did: the rows
/// get the same ids.
#[tokio::test]
async fn rule_n2_picked_rows_get_the_ids_that_java_gives() {
    let store = ManifestStore::new(CACHE_BYTES);
    let mut picked = Vec::new();
    for EngineTable { name, loaded, expected, .. } in engine_tables() {
        let Ok(table) = &loaded else { continue };
        let Some(spark) = row_ids(&expected["cherrypick_lineage"]) else { continue };
        let sources = expected["branch_snapshots"].as_array().unwrap();
        let [source] = sources.as_slice() else { continue };
        let source = table.facts.snapshots.get(SnapshotId(source.as_i64().unwrap())).unwrap();
        let change = store.changes(table, source).await.unwrap();
        let moved = MOVED_ROWS.iter().any(|what| name.contains(what));
        if moved || change.has_delete_files() || !change.removed.is_empty() {
            continue;
        }
        let main = table.facts.head(&RefName::main()).and_then(|id| table.facts.snapshots.get(id));
        let mut written = table.clone();
        let folder = tempfile::tempdir().unwrap();
        let metadata = folder.path().to_str().unwrap().to_owned();
        written.facts.properties.insert("write.metadata.path".to_owned(), metadata);
        let mut writer = SnapshotWriter::on(&store, &written, main).await.unwrap();
        let added = store.added_files(table, source).await.unwrap();
        let snapshot = writer.add(append(1, added)).await.unwrap();
        let range = snapshot.row_range.unwrap();
        assert_eq!(Some(range.first_row_id), table.facts.next_row_id, "{name}");
        let ours = ids_by_place(&ManifestStore::new(CACHE_BYTES), table, &fact_of_new(&snapshot)).await;
        assert_eq!(ours, spark.into_iter().collect::<Vec<_>>(), "{name}");
        picked.push(name);
    }
    assert!(picked.len() >= 5, "{picked:?}");
}

/// Everything that manifests say of files, but for where the first row id stands: in the entry, or inherited.
fn by_key(table: &LoadedTable, files: &[LiveFile]) -> BTreeMap<DeleteKey, String> {
    let told = |file: &LiveFile| {
        // Maps of statistics have no order of their own.
        let sorted =
            |counts: &HashMap<i32, u64>| counts.iter().map(|(k, v)| (*k, *v)).collect::<BTreeMap<_, _>>();
        // Of columns that were dropped nobody asks for bounds; the crate leaves them out.
        let known = |id: i32| id > MAX_COLUMN_ID || table.metadata.current_schema().field_by_id(id).is_some();
        let bounds = |of: &HashMap<i32, Datum>| {
            let known = of.iter().filter(|(id, _)| known(**id));
            known.map(|(id, bound)| (*id, bound.to_string())).collect::<BTreeMap<_, _>>()
        };
        let entry = &file.file;
        format!(
            "{:?} {:?} {} {} {:?} {:?} | {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            file.fact,
            file.added_by,
            file.sequence_number,
            file.file_sequence_number,
            file.first_row_id,
            file.spec_id,
            sorted(entry.column_sizes()),
            sorted(entry.value_counts()),
            sorted(entry.null_value_counts()),
            sorted(entry.nan_value_counts()),
            bounds(entry.lower_bounds()),
            bounds(entry.upper_bounds()),
            entry.split_offsets(),
            entry.equality_ids(),
            entry.sort_order_id(),
            entry.referenced_data_file(),
            entry.content_size_in_bytes(),
            entry.file_format(),
        )
    };
    files.iter().map(|file| (file.fact.key(), told(file))).collect()
}

/// One file of each kind is removed, so that its manifest is written again, and small manifests are merged:
/// of every other file the new manifests say what the engine's said.
#[tokio::test]
async fn manifests_that_are_written_again_say_the_same_of_every_file() {
    let mut compared = 0;
    for EngineTable { name, loaded, .. } in engine_tables() {
        let Ok(table) = &loaded else { continue };
        for merge_at in ["2", "100"] {
            for head in table.facts.refs.values().map(|r| table.facts.snapshots.get(r.snapshot_id).unwrap()) {
                let store = ManifestStore::new(CACHE_BYTES);
                let before = store.live_files(table, head, &FileScope::Table).await.unwrap();
                let folder = tempfile::tempdir().unwrap();
                let mut written = table.clone();
                let properties = &mut written.facts.properties;
                properties
                    .insert("write.metadata.path".to_owned(), folder.path().to_str().unwrap().to_owned());
                properties.insert("commit.manifest.min-count-to-merge".to_owned(), merge_at.to_owned());
                let mut change = delete(1, before.data.first().map(|file| &file.fact.path));
                change.remove_deletes = before.deletes.iter().take(1).map(|file| file.fact.key()).collect();
                let mut writer = SnapshotWriter::on(&store, &written, Some(head)).await.unwrap();
                let snapshot = fact_of_new(&writer.add(change.clone()).await.unwrap());

                // Read from disk, not from what the writer remembers.
                let store = ManifestStore::new(CACHE_BYTES);
                let after = store.live_files(table, &snapshot, &FileScope::Table).await.unwrap();
                let (mut data, mut deletes) = (by_key(table, &before.data), by_key(table, &before.deletes));
                data.retain(|key, _| !change.remove.contains(&key.path));
                let goes = |file: &&LiveFile| matches!(&file.fact.content, FileContent::DeletionVector { of, .. } if change.remove.contains(of));
                let dangling: BTreeSet<DeleteKey> =
                    before.deletes.iter().filter(goes).map(|f| f.fact.key()).collect();
                deletes.retain(|key, _| !change.remove_deletes.contains(key) && !dangling.contains(key));
                assert_eq!(by_key(table, &after.data), data, "{name}");
                assert_eq!(by_key(table, &after.deletes), deletes, "{name}");
                compared += data.len() + deletes.len();
            }
        }
    }
    assert!(compared > 500, "{compared}");
}
