//! A table as loaded: the facts that decisions read, the crate's model that readers and writers need,
//! and the metadata document that commits edit.
//!
//! What cannot be kept safe is refused here, before anything else looks at it: other format versions and
//! encrypted tables (rule L7).

use std::sync::Arc;

use iceberg::io::FileIO;
use iceberg::spec::{TableMetadata, TableMetadataRef};
use iceberg::table::Table;
use iceberg::{NamespaceIdent, Runtime, TableIdent};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{RefName, TableName};

use super::catalog::CatalogError;
use super::document::{Applied, Document, DocumentError};
use super::error::plain;
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
    /// The crate's model: schemas, specs, snapshots. Its refs are not readable; use `facts.refs`.
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
        if document.raw(ENCRYPTION_KEYS).is_some_and(|raw| raw != "[]")
            || facts.properties.contains_key(ENCRYPTION_KEY_ID)
        {
            return Err(CatalogError::Unsupported {
                table: name.clone(),
                message:
                    "it is encrypted, and its files cannot be checked; publish to it with its own engine"
                        .to_owned(),
            });
        }
        let metadata =
            model_of(&json, &facts).map_err(|message| unreadable(name, metadata_location, message))?;
        Ok(Self {
            facts,
            metadata_location: metadata_location.to_owned(),
            metadata: Arc::new(metadata),
            document: Arc::new(document),
            file_io,
        })
    }

    /// The table after a commit, before it is written: `json` are the bytes that will stand at
    /// `metadata_location`. The crate must read them as what the commit meant, or nothing is written.
    pub(super) fn after_commit(
        applied: Applied,
        metadata_location: String,
        json: &[u8],
        file_io: FileIO,
    ) -> Result<Self, CatalogError> {
        let Applied { document, facts } = applied;
        let metadata = model_of(json, &facts).map_err(|message| {
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
            file_io,
        })
    }

    /// The crate's table over this metadata, for its scans and writers. Needs a Tokio runtime.
    pub fn iceberg_table(&self) -> Result<Table, CatalogError> {
        let TableName { namespace, name } = &self.facts.name;
        let build = || -> iceberg::Result<Table> {
            let identifier = TableIdent::new(NamespaceIdent::from_vec(namespace.clone())?, name.clone());
            Table::builder()
                .file_io(self.file_io.clone())
                .identifier(identifier)
                .metadata_location(self.metadata_location.as_str())
                .metadata(self.metadata.clone())
                .runtime(Runtime::try_current()?)
                .build()
        };
        build().map_err(|e| unreadable(&self.facts.name, &self.metadata_location, plain(&e)))
    }
}

/// The crate's model of `json`, checked against our own facts of it: two readers must agree before
/// anything is decided or committed.
fn model_of(json: &[u8], facts: &TableFacts) -> Result<TableMetadata, String> {
    let model: TableMetadata = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let differs = |what: &str| Err(format!("two readings of it differ in {what}"));
    if model.uuid().to_string() != facts.uuid.0.to_ascii_lowercase() {
        return differs("table-uuid");
    }
    if model.last_sequence_number() != facts.last_sequence_number {
        return differs("last-sequence-number");
    }
    if model.last_updated_ms() != facts.last_updated_ms {
        return differs("last-updated-ms");
    }
    if model.current_snapshot_id() != facts.head(&RefName::main()).map(|head| head.0) {
        return differs("current-snapshot-id");
    }
    if model.snapshots().len() != facts.snapshots.len() {
        return differs("snapshots");
    }
    if model.history().len() != facts.snapshot_log.len() {
        return differs("snapshot-log");
    }
    for reference in facts.refs.values() {
        let head = model.snapshot_for_ref(reference.name.as_str()).map(|s| s.snapshot_id());
        if head != Some(reference.snapshot_id.0) {
            return Err(format!(
                "ref '{}' is at snapshot {}, which is not in the file",
                reference.name, reference.snapshot_id
            ));
        }
    }
    Ok(model)
}

fn unreadable(table: &TableName, location: &str, message: String) -> CatalogError {
    CatalogError::Unreadable { table: table.clone(), location: location.to_owned(), message }
}

/// A document that could not be read, or must not be.
fn refuse(table: &TableName, location: &str, error: DocumentError) -> CatalogError {
    let message = match error {
        DocumentError::FormatVersion(1) => {
            "it has format version 1, whose branches and tags would be lost; upgrade it to version 2 with \
             the engine that owns it (set the table property format-version to 2), then go on"
                .to_owned()
        }
        DocumentError::FormatVersion(version) => format!(
            "it has format version {version}, which a later release will support; publish to it with its \
             own engine until then"
        ),
        other => return unreadable(table, location, other.to_string()),
    };
    CatalogError::Unsupported { table: table.clone(), message }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use serde_json::{Value, json};

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
        let error = load(&metadata(|m| m["format-version"] = json!(3))).unwrap_err();

        assert!(error.to_string().contains("format version 3"), "{error}");
    }

    #[test]
    fn encrypted_tables_are_refused() {
        let by_key = load(&metadata(|m| m["encryption-keys"] = json!([{"key-id": "k"}]))).unwrap_err();
        let by_property =
            load(&metadata(|m| m["properties"] = json!({"encryption.key-id": "k"}))).unwrap_err();

        assert!(by_key.to_string().contains("encrypted"));
        assert!(by_property.to_string().contains("encrypted"));
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

    #[tokio::test]
    async fn the_crate_table_stands_at_the_same_metadata() {
        let table = load(&metadata(|_| {})).unwrap().iceberg_table().unwrap();

        assert_eq!(table.identifier().to_string(), "ns.t");
        assert_eq!(table.metadata_location(), Some("file:///w/m.json"));
    }
}
