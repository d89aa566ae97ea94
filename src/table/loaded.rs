//! A table as loaded: the facts that decisions read, the crate's model that readers and writers need,
//! and the metadata document that commits edit.
//!
//! Two readers must agree before anything is decided or committed. A file that others may have written is
//! read whole by both. After a commit of our own the crate reads an excerpt of the new document: everything
//! but the snapshots, log entries and refs that the commit left alone, whose very bytes it has read before.
//! So a commit on a table of thousands of snapshots costs what it changes.
//!
//! What cannot be kept safe is refused here, before anything else looks at it: other format versions and
//! encrypted tables (rule L7).

use std::collections::BTreeSet;
use std::sync::Arc;

use iceberg::io::FileIO;
use iceberg::spec::{PrimitiveType, TableMetadata, TableMetadataRef};
use mergeberg_kernel::commit::NewSnapshot;
use mergeberg_kernel::facts::{RefFact, TableFacts};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use serde_json::Value;

use super::catalog::CatalogError;
use super::document::{Applied, Document, DocumentError};
use super::facts_of::facts_of;
use super::metadata_file;

/// Table property of an encrypted table (Java: `TableProperties.ENCRYPTION_TABLE_KEY`).
const ENCRYPTION_KEY_ID: &str = "encryption.key-id";
/// Top-level key with the keys of an encrypted table.
const ENCRYPTION_KEYS: &str = "encryption-keys";

/// Immutable; shared between tasks.
#[derive(Clone, Debug)]
pub struct LoadedTable {
    pub facts: TableFacts,
    pub metadata_location: String,
    /// The crate's model: schemas, specs, properties. Snapshots and refs are those of `facts`: the model of
    /// a table that we committed to holds only some of them.
    pub metadata: TableMetadataRef,
    pub document: Arc<Document>,
    pub file_io: FileIO,
}

impl LoadedTable {
    /// Reads a metadata file's bytes, compressed or not. CPU work: about 10 microseconds a snapshot, so
    /// call it off the async runtime.
    pub fn parse(
        name: &TableName,
        metadata_location: &str,
        bytes: &[u8],
        file_io: FileIO,
    ) -> Result<Self, CatalogError> {
        let json =
            metadata_file::decode(bytes).map_err(|e| unreadable(name, metadata_location, e.to_string()))?;
        let document = Document::parse(&json).map_err(|e| refuse(name, metadata_location, e))?;
        let facts = facts_of(name, &document).map_err(|e| refuse(name, metadata_location, e))?;
        let by_keys = document.raw(ENCRYPTION_KEYS).is_some_and(|raw| raw != "[]").then_some(ENCRYPTION_KEYS);
        let by_property = facts.properties.contains_key(ENCRYPTION_KEY_ID).then_some(ENCRYPTION_KEY_ID);
        if let Some(sign) = by_keys.or(by_property) {
            return Err(refuse(name, metadata_location, DocumentError::Encrypted(format!("it has {sign}"))));
        }
        let metadata = model_of(&json, &facts).map_err(|message| match unknown_type(&facts) {
            Some((column, type_name)) => CatalogError::Unsupported {
                table: name.clone(),
                message: format!(
                    "column {column} is of type {type_name}, which this release does not read; publish to it \
                     with its own engine"
                ),
            },
            None => unreadable(name, metadata_location, message),
        })?;
        Ok(Self {
            facts,
            metadata_location: metadata_location.to_owned(),
            metadata: Arc::new(metadata),
            document: Arc::new(document),
            file_io,
        })
    }

    /// This table with candidates that are written and not staged yet, as if they were: to read them and to
    /// write on them. Refs are as they were.
    pub fn with_candidates(&self, candidates: &[NewSnapshot]) -> Self {
        let mut table = self.clone();
        for candidate in candidates {
            table.facts.snapshots.insert(candidate.fact());
            table.facts.last_sequence_number = candidate.sequence_number;
            if let Some(range) = candidate.row_range {
                table.facts.next_row_id = range.end();
            }
        }
        table
    }

    /// The table after a commit on this one, before it is written. The crate must read the new document as
    /// what the commit meant, or nothing is written.
    pub(super) fn after_commit(
        &self,
        applied: Applied,
        metadata_location: String,
    ) -> Result<Self, CatalogError> {
        let Applied { document, facts } = applied;
        let metadata = model_of_change(&self.facts, &document, &facts).map_err(|message| {
            CatalogError::Refused(format!(
                "the metadata of {} would not be readable after this commit, so nothing was written: {message}",
                facts.name
            ))
        })?;
        Ok(Self {
            facts,
            metadata_location,
            metadata: Arc::new(metadata),
            document: Arc::new(document),
            file_io: self.file_io.clone(),
        })
    }
}

/// The crate's model of `json`, checked against our own facts of it.
fn model_of(json: &[u8], facts: &TableFacts) -> Result<TableMetadata, String> {
    let model: TableMetadata = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    agree_on_head(&model, facts)?;
    if model.snapshots().len() != facts.snapshots.len() {
        return differs("snapshots");
    }
    if model.history().len() != facts.snapshot_log.len() {
        return differs("snapshot-log");
    }
    agree_on_refs(&model, facts.refs.values())?;
    Ok(model)
}

/// The crate's model of what a commit changed in a document, checked against the facts after it.
fn model_of_change(
    before: &TableFacts,
    document: &Document,
    facts: &TableFacts,
) -> Result<TableMetadata, String> {
    if document.snapshots().len() != facts.snapshots.len() {
        return differs("snapshots");
    }
    if document.snapshot_log().len() != facts.snapshot_log.len() {
        return differs("snapshot-log");
    }
    if let Some(lost) = facts.refs.values().find(|r| !facts.snapshots.contains(r.snapshot_id)) {
        return Err(not_in_the_file(lost));
    }
    // `main` always: the crate compares it with the current snapshot.
    let changed: Vec<&RefFact> = facts
        .refs
        .values()
        .filter(|r| r.name == RefName::main() || before.refs.get(&r.name) != Some(r))
        .collect();
    let mut wanted: BTreeSet<SnapshotId> = changed.iter().map(|r| r.snapshot_id).collect();
    let added = document.snapshots().iter().map(|e| e.snapshot).filter(|id| !before.snapshots.contains(*id));
    wanted.extend(added);
    let names: Vec<&RefName> = changed.iter().map(|r| &r.name).collect();
    let excerpt = document.excerpt(&wanted, &names).map_err(|e| e.to_string())?;

    let model: TableMetadata = serde_json::from_slice(&excerpt).map_err(|e| e.to_string())?;
    agree_on_head(&model, facts)?;
    if model.snapshots().len() != wanted.len() {
        return differs("snapshots");
    }
    for snapshot in model.snapshots() {
        let ours = facts.snapshots.get(SnapshotId(snapshot.snapshot_id()));
        let same = ours.is_some_and(|ours| {
            ours.parent.map(|id| id.0) == snapshot.parent_snapshot_id()
                && ours.sequence_number == snapshot.sequence_number()
                && ours.timestamp_ms == snapshot.timestamp_ms()
                && ours.manifest_list == snapshot.manifest_list()
                && ours.schema_id.map(|id| id.0) == snapshot.schema_id()
        });
        if !same {
            return differs("snapshots");
        }
    }
    agree_on_refs(&model, changed.into_iter())?;
    Ok(model)
}

fn agree_on_head(model: &TableMetadata, facts: &TableFacts) -> Result<(), String> {
    if model.uuid().to_string() != facts.uuid.0.to_ascii_lowercase() {
        return differs("table-uuid");
    }
    if model.last_sequence_number() != facts.last_sequence_number {
        return differs("last-sequence-number");
    }
    if model.last_updated_ms() != facts.last_updated_ms {
        return differs("last-updated-ms");
    }
    if facts.next_row_id.is_some_and(|next| u64::try_from(next) != Ok(model.next_row_id())) {
        return differs("next-row-id");
    }
    if model.current_snapshot_id() != facts.head(&RefName::main()).map(|head| head.0) {
        return differs("current-snapshot-id");
    }
    Ok(())
}

fn agree_on_refs<'a>(model: &TableMetadata, refs: impl Iterator<Item = &'a RefFact>) -> Result<(), String> {
    for reference in refs {
        let head = model.snapshot_for_ref(reference.name.as_str()).map(|s| s.snapshot_id());
        if head != Some(reference.snapshot_id.0) {
            return Err(not_in_the_file(reference));
        }
    }
    Ok(())
}

/// The first column of a type that the crate does not know (`variant`, `geometry` and others of v3).
fn unknown_type(facts: &TableFacts) -> Option<(&str, &str)> {
    let nested = |name: &str| ["struct", "list", "map"].contains(&name);
    let known = |name: &str| serde_json::from_value::<PrimitiveType>(Value::from(name)).is_ok();
    let mut fields = facts.schemas.values().flat_map(|schema| &schema.fields);
    let unknown = fields.find(|field| !nested(&field.type_name) && !known(&field.type_name))?;
    Some((&unknown.name, &unknown.type_name))
}

fn differs<T>(what: &str) -> Result<T, String> {
    Err(format!("two readings of it differ in {what}"))
}

fn not_in_the_file(reference: &RefFact) -> String {
    format!("ref '{}' is at snapshot {}, which is not in the file", reference.name, reference.snapshot_id)
}

fn unreadable(table: &TableName, location: &str, message: String) -> CatalogError {
    CatalogError::Unreadable { table: table.clone(), location: location.to_owned(), message }
}

/// A document that could not be read, or must not be.
fn refuse(table: &TableName, location: &str, error: DocumentError) -> CatalogError {
    let message = error.to_string();
    match error {
        DocumentError::FormatVersion1 | DocumentError::FormatVersion(_) | DocumentError::Encrypted(_) => {
            CatalogError::Unsupported { table: table.clone(), message }
        }
        _ => unreadable(table, location, message),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::*;

    fn metadata(edit: impl FnOnce(&mut Value)) -> Vec<u8> {
        let mut value = json!({
            "format-version": 2,
            "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
            "location": "file:///w/ns/t",
            "last-sequence-number": 1,
            "last-updated-ms": 2000,
            "last-column-id": 1,
            "schemas": [{"type": "struct", "schema-id": 0, "fields": [
                {"id": 1, "name": "id", "required": true, "type": "long"}]}],
            "current-schema-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "default-spec-id": 0,
            "last-partition-id": 999,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "default-sort-order-id": 0,
            "current-snapshot-id": 5,
            "refs": {"main": {"snapshot-id": 5, "type": "branch"}},
            "snapshot-log": [{"snapshot-id": 5, "timestamp-ms": 2000}],
            "snapshots": [{"snapshot-id": 5, "timestamp-ms": 2000, "sequence-number": 1,
                "manifest-list": "file:///w/ns/t/metadata/s5.avro", "summary": {"operation": "append"}}]
        });
        edit(&mut value);
        value.to_string().into_bytes()
    }

    fn load(bytes: &[u8]) -> Result<LoadedTable, CatalogError> {
        LoadedTable::parse(&"ns.t".parse().unwrap(), "file:///w/m.json", bytes, FileIO::new_with_fs())
    }

    #[test]
    fn a_gzipped_file_loads_as_a_plain_one() {
        let plain = metadata(|_| {});
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();

        let one = load(&plain).unwrap();
        let two = load(&gzip.finish().unwrap()).unwrap();

        assert_eq!(one.facts, two.facts);
        assert_eq!(one.metadata.current_snapshot_id(), Some(5));
    }

    #[test]
    fn format_version_1_is_refused_before_anything_else_is_read() {
        let error = load(br#"{"format-version": 1, "snapshots": "not even an array"}"#).unwrap_err();

        assert!(matches!(&error, CatalogError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("upgrade it to version 2"));
    }

    #[test]
    fn later_format_versions_are_refused() {
        let error = load(&metadata(|m| m["format-version"] = json!(4))).unwrap_err();

        assert!(matches!(&error, CatalogError::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("format version 4"), "{error}");
    }

    #[test]
    fn a_table_of_version_3_says_its_next_row_id() {
        let v3 = |next: Value| {
            load(&metadata(|m| {
                m["format-version"] = json!(3);
                m["next-row-id"] = next;
            }))
        };

        assert_eq!(v3(json!(7)).unwrap().facts.next_row_id, Some(7));
        for next in [json!(null), json!(-1), json!("7")] {
            let error = v3(next).unwrap_err();
            assert!(matches!(&error, CatalogError::Unreadable { .. }), "{error}");
            assert!(error.to_string().contains("next-row-id"), "{error}");
        }
    }

    #[test]
    fn encrypted_tables_are_refused() {
        let by_key = load(&metadata(|m| m["encryption-keys"] = json!([{"key-id": "k"}]))).unwrap_err();
        let by_property =
            load(&metadata(|m| m["properties"] = json!({"encryption.key-id": "k"}))).unwrap_err();

        assert!(by_key.to_string().contains("encrypted"));
        assert!(by_property.to_string().contains("encrypted"));
        let by_list = load(&metadata(|m| {
            m["format-version"] = json!(3);
            m["next-row-id"] = json!(0);
            m["snapshots"][0]["key-id"] = json!("k");
        }))
        .unwrap_err();
        assert!(matches!(&by_list, CatalogError::Unsupported { .. }), "{by_list}");
        assert!(by_list.to_string().contains("snapshot 5"), "{by_list}");
    }

    #[test]
    fn refs_without_main_still_imply_it() {
        let table =
            load(&metadata(|m| m["refs"] = json!({"v1": {"snapshot-id": 5, "type": "tag"}}))).unwrap();

        assert_eq!(table.facts.refs.len(), 2);
        assert_eq!(table.facts.head(&RefName::main()).map(|id| id.0), Some(5));
    }

    #[test]
    fn damage_is_unreadable_and_names_the_file() {
        for bytes in [
            b"".to_vec(),
            b"[]".to_vec(),
            b"\x1f\x8bgarbage".to_vec(),
            metadata(|m| m["current-snapshot-id"] = json!(6)),
            metadata(|m| m["refs"]["ghost"] = json!({"snapshot-id": 99, "type": "tag"})),
            metadata(|m| m["snapshots"][0]["snapshot-id"] = json!("five")),
        ] {
            let error = load(&bytes).unwrap_err();
            assert!(matches!(&error, CatalogError::Unreadable { .. }), "{error}");
            assert!(error.to_string().contains("file:///w/m.json"));
        }
    }

    #[test]
    fn after_a_commit_the_crate_reads_what_changed() {
        use mergeberg_kernel::commit::{NewSnapshot, Update};
        use mergeberg_kernel::facts::RefKind;
        use mergeberg_kernel::ids::SchemaId;

        let before = load(&metadata(|m| {
            m["refs"]["old"] = json!({"snapshot-id": 5, "type": "tag"});
        }))
        .unwrap();
        let snapshot = NewSnapshot {
            id: SnapshotId(6),
            parent: Some(SnapshotId(5)),
            sequence_number: 2,
            timestamp_ms: 3000,
            manifest_list: "file:///w/ns/t/metadata/s6.avro".to_owned(),
            schema_id: SchemaId(0),
            label: "append".to_owned(),
            summary: std::collections::BTreeMap::new(),
            row_range: None,
        };
        let branch = RefFact {
            name: RefName::new("ingest/a"),
            snapshot_id: SnapshotId(6),
            kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        };
        let updates = [Update::AddSnapshot(snapshot), Update::SetRef(branch)];
        let apply = || before.document.apply(&before.facts, "file:///w/m.json", &updates, 4000).unwrap();

        let after = before.after_commit(apply(), "file:///w/n.json".to_owned()).unwrap();
        assert!(after.metadata.snapshot_by_id(6).is_some());
        // The whole file is what the excerpt promised.
        let reread = load(&after.document.to_bytes()).unwrap();
        assert_eq!(reread.facts, after.facts);

        // Facts and document that differ are not written.
        let mut wrong = apply();
        wrong.facts.refs.remove(&RefName::new("old"));
        wrong.facts.last_sequence_number = 3;
        assert!(before.after_commit(wrong, String::new()).is_err());
        let mut wrong = apply();
        wrong.facts.snapshots.remove(SnapshotId(5));
        assert!(before.after_commit(wrong, String::new()).is_err());
    }
}
