//! The kernel's facts of a table, read from its metadata document.
//!
//! Absent on purpose: statistics, encryption keys and everything else that no decision reads.

use std::collections::BTreeMap;

use mergeberg_kernel::facts::{LogEntry, RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableName, TableUuid};
use mergeberg_kernel::lineage::{SnapshotFact, SnapshotGraph};
use mergeberg_kernel::structure::{FieldFact, SchemaFact, SortOrderFact, SpecFact, SpecFieldFact};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::document::{Document, DocumentError, NO_SNAPSHOT};

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SnapshotJson {
    snapshot_id: i64,
    parent_snapshot_id: Option<i64>,
    /// Absent for snapshots that were written under v1.
    #[serde(default)]
    sequence_number: i64,
    timestamp_ms: i64,
    schema_id: Option<i32>,
    manifest_list: String,
    #[serde(default)]
    summary: BTreeMap<String, String>,
    /// Names the key of an encrypted manifest list (format v3).
    key_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct LogEntryJson {
    snapshot_id: i64,
    timestamp_ms: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RefJson {
    snapshot_id: i64,
    #[serde(rename = "type")]
    kind: RefKindJson,
    min_snapshots_to_keep: Option<i32>,
    max_snapshot_age_ms: Option<i64>,
    max_ref_age_ms: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum RefKindJson {
    Branch,
    Tag,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SchemaJson {
    #[serde(default)]
    schema_id: i32,
    #[serde(default)]
    identifier_field_ids: Vec<i32>,
    fields: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SpecJson {
    spec_id: i32,
    fields: Vec<SpecFieldJson>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SpecFieldJson {
    source_id: i32,
    field_id: i32,
    name: String,
    transform: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SortOrderJson {
    order_id: i64,
    fields: Vec<Value>,
}

/// All facts of a document.
pub fn facts_of(name: &TableName, document: &Document) -> Result<TableFacts, DocumentError> {
    let mut schemas = BTreeMap::new();
    for schema in document.required::<Vec<SchemaJson>>("schemas")? {
        schemas.insert(SchemaId(schema.schema_id), schema_fact(schema)?);
    }
    let mut specs = BTreeMap::new();
    for spec in document.required::<Vec<SpecJson>>("partition-specs")? {
        specs.insert(SpecId(spec.spec_id), spec_fact(spec));
    }
    let mut sort_orders = BTreeMap::new();
    for order in document.required::<Vec<SortOrderJson>>("sort-orders")? {
        let id = SortOrderId(order.order_id);
        let fields = order.fields.into_iter().map(|field| sorted_keys(field).to_string()).collect();
        sort_orders.insert(id, SortOrderFact { id, fields });
    }
    let mut snapshots = Vec::with_capacity(document.snapshots().len());
    for element in document.snapshots() {
        let snapshot: SnapshotJson = serde_json::from_str(&element.text).map_err(|e| {
            DocumentError::Field { key: format!("snapshots ({})", element.snapshot), message: e.to_string() }
        })?;
        if snapshot.key_id.is_some() {
            return Err(DocumentError::Encrypted(format!(
                "the manifest list of snapshot {}",
                element.snapshot
            )));
        }
        snapshots.push(snapshot_fact(snapshot));
    }
    let mut snapshot_log = Vec::with_capacity(document.snapshot_log().len());
    for element in document.snapshot_log() {
        let entry: LogEntryJson = serde_json::from_str(&element.text)
            .map_err(|e| DocumentError::Field { key: "snapshot-log".to_owned(), message: e.to_string() })?;
        let LogEntryJson { snapshot_id, timestamp_ms } = entry;
        snapshot_log.push(LogEntry { snapshot_id: SnapshotId(snapshot_id), timestamp_ms });
    }
    let format_version = document.required("format-version")?;
    Ok(TableFacts {
        name: name.clone(),
        uuid: TableUuid(document.required("table-uuid")?),
        format_version,
        location: document.required("location")?,
        last_sequence_number: document.required("last-sequence-number")?,
        last_updated_ms: document.required("last-updated-ms")?,
        next_row_id: document.next_row_id(format_version)?,
        current_schema_id: SchemaId(document.required("current-schema-id")?),
        default_spec_id: SpecId(document.required("default-spec-id")?),
        default_sort_order_id: SortOrderId(document.required("default-sort-order-id")?),
        schemas,
        specs,
        sort_orders,
        refs: refs(document)?,
        snapshots: SnapshotGraph::new(snapshots),
        snapshot_log,
        properties: document.optional("properties")?.unwrap_or_default(),
    })
}

fn refs(document: &Document) -> Result<BTreeMap<RefName, RefFact>, DocumentError> {
    let mut refs = BTreeMap::new();
    for (name, json) in document.optional::<BTreeMap<String, RefJson>>("refs")?.unwrap_or_default() {
        let RefJson { snapshot_id, kind, min_snapshots_to_keep, max_snapshot_age_ms, max_ref_age_ms } = json;
        let kind = match kind {
            RefKindJson::Branch => RefKind::Branch { min_snapshots_to_keep, max_snapshot_age_ms },
            RefKindJson::Tag => RefKind::Tag,
        };
        let name = RefName(name);
        let fact = RefFact { name: name.clone(), snapshot_id: SnapshotId(snapshot_id), kind, max_ref_age_ms };
        refs.insert(name, fact);
    }
    // A current snapshot is the head of `main`, written or not (table spec, "Table Metadata Fields", refs).
    let current: i64 = document.optional("current-snapshot-id")?.unwrap_or(NO_SNAPSHOT);
    if current != NO_SNAPSHOT {
        refs.entry(RefName::main()).or_insert_with(|| RefFact {
            name: RefName::main(),
            snapshot_id: SnapshotId(current),
            kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        });
    }
    Ok(refs)
}

fn snapshot_fact(json: SnapshotJson) -> SnapshotFact {
    let SnapshotJson {
        snapshot_id,
        parent_snapshot_id,
        sequence_number,
        timestamp_ms,
        schema_id,
        manifest_list,
        mut summary,
        key_id: _,
    } = json;
    SnapshotFact {
        id: SnapshotId(snapshot_id),
        parent: parent_snapshot_id.map(SnapshotId),
        sequence_number,
        timestamp_ms,
        schema_id: schema_id.map(SchemaId),
        manifest_list,
        label: summary.remove("operation").unwrap_or_default(),
        summary,
    }
}

fn spec_fact(json: SpecJson) -> SpecFact {
    let fields = json
        .fields
        .into_iter()
        .map(|SpecFieldJson { source_id, field_id, name, transform }| SpecFieldFact {
            source_id,
            field_id,
            name,
            transform,
        })
        .collect();
    SpecFact { id: SpecId(json.spec_id), fields }
}

fn schema_fact(json: SchemaJson) -> Result<SchemaFact, DocumentError> {
    let mut fields = Vec::new();
    for field in &json.fields {
        struct_field(field, "", &mut fields)?;
    }
    Ok(SchemaFact { id: SchemaId(json.schema_id), fields, identifier_field_ids: json.identifier_field_ids })
}

/// A struct's member and what is nested in it.
fn struct_field(json: &Value, prefix: &str, fields: &mut Vec<FieldFact>) -> Result<(), DocumentError> {
    let name = format!("{prefix}{}", text(json, "name")?);
    let required = flag(json, "required")?;
    let has_initial_default = json.get("initial-default").is_some_and(|value| !value.is_null());
    typed_field(number(json, "id")?, name, required, has_initial_default, member(json, "type")?, fields)
}

/// One field of any kind, then the fields nested in it, depth first. The JSON parser bounds the depth.
fn typed_field(
    id: i32,
    name: String,
    required: bool,
    has_initial_default: bool,
    json_type: &Value,
    fields: &mut Vec<FieldFact>,
) -> Result<(), DocumentError> {
    let type_name = match json_type {
        Value::String(primitive) => primitive.clone(),
        nested => text(nested, "type")?.to_owned(),
    };
    let is_primitive = json_type.is_string();
    let below = format!("{name}.");
    fields.push(FieldFact { id, name, required, type_name: type_name.clone(), has_initial_default });
    if is_primitive {
        return Ok(());
    }
    match type_name.as_str() {
        "struct" => {
            let members = member(json_type, "fields")?.as_array().ok_or_else(|| broken("fields"))?;
            for field in members {
                struct_field(field, &below, fields)?;
            }
            Ok(())
        }
        "list" => typed_field(
            number(json_type, "element-id")?,
            format!("{below}element"),
            flag(json_type, "element-required")?,
            false,
            member(json_type, "element")?,
            fields,
        ),
        "map" => {
            typed_field(
                number(json_type, "key-id")?,
                format!("{below}key"),
                true,
                false,
                member(json_type, "key")?,
                fields,
            )?;
            typed_field(
                number(json_type, "value-id")?,
                format!("{below}value"),
                flag(json_type, "value-required")?,
                false,
                member(json_type, "value")?,
                fields,
            )
        }
        other => Err(DocumentError::Field {
            key: "schemas".to_owned(),
            message: format!("'{other}' is not a nested type of the table spec"),
        }),
    }
}

fn member<'a>(json: &'a Value, key: &str) -> Result<&'a Value, DocumentError> {
    json.get(key).ok_or_else(|| broken(key))
}

fn text<'a>(json: &'a Value, key: &str) -> Result<&'a str, DocumentError> {
    member(json, key)?.as_str().ok_or_else(|| broken(key))
}

fn flag(json: &Value, key: &str) -> Result<bool, DocumentError> {
    member(json, key)?.as_bool().ok_or_else(|| broken(key))
}

fn number(json: &Value, key: &str) -> Result<i32, DocumentError> {
    member(json, key)?.as_i64().and_then(|n| i32::try_from(n).ok()).ok_or_else(|| broken(key))
}

fn broken(key: &str) -> DocumentError {
    DocumentError::Field {
        key: "schemas".to_owned(),
        message: format!("a field's '{key}' is missing or of the wrong type"),
    }
}

/// Keys in alphabetical order at every level: engines order them differently, and the text of a sort
/// field must not change when another engine rewrites the file.
fn sorted_keys(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let sorted: BTreeMap<String, Value> =
                members.into_iter().map(|(key, value)| (key, sorted_keys(value))).collect();
            Value::Object(Map::from_iter(sorted))
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted_keys).collect()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(extra: Value) -> Result<TableFacts, DocumentError> {
        let mut metadata = json!({
            "format-version": 2,
            "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
            "location": "file:///w/ns/t",
            "last-sequence-number": 3,
            "last-updated-ms": 5000,
            "last-column-id": 9,
            "schemas": [{"type": "struct", "schema-id": 0, "fields": [
                {"id": 1, "name": "id", "required": true, "type": "long"}
            ]}],
            "current-schema-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "default-spec-id": 0,
            "last-partition-id": 999,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "default-sort-order-id": 0,
            "snapshots": [
                {"snapshot-id": 7, "timestamp-ms": 1000, "manifest-list": "file:///w/m7.avro",
                 "sequence-number": 3, "schema-id": 0,
                 "summary": {"operation": "append", "source-snapshot-id": "6"}}
            ]
        });
        if let (Value::Object(base), Value::Object(extra)) = (&mut metadata, extra) {
            base.extend(extra);
        }
        let document = Document::parse(metadata.to_string().as_bytes())?;
        facts_of(&"ns.t".parse().unwrap(), &document)
    }

    #[test]
    fn a_current_snapshot_without_refs_is_main_without_retention() {
        let main = facts(json!({"current-snapshot-id": 7})).unwrap().refs.remove(&RefName::main()).unwrap();

        assert_eq!(main.snapshot_id, SnapshotId(7));
        assert_eq!(main.kind, RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None });
        assert_eq!(main.max_ref_age_ms, None);
    }

    #[test]
    fn minus_one_null_and_absent_mean_no_current_snapshot() {
        for extra in [json!({"current-snapshot-id": -1}), json!({"current-snapshot-id": null}), json!({})] {
            assert_eq!(facts(extra).unwrap().head(&RefName::main()), None);
        }
    }

    #[test]
    fn refs_keep_their_retention() {
        let facts = facts(json!({"current-snapshot-id": 7, "refs": {
            "main": {"snapshot-id": 7, "type": "branch"},
            "ingest/a": {"snapshot-id": 7, "type": "branch", "min-snapshots-to-keep": 5,
                         "max-snapshot-age-ms": 60000, "max-ref-age-ms": 90000},
            "v1": {"snapshot-id": 7, "type": "tag", "max-ref-age-ms": 10}
        }}))
        .unwrap();

        let branch = &facts.refs[&RefName::new("ingest/a")];
        assert_eq!(
            branch.kind,
            RefKind::Branch { min_snapshots_to_keep: Some(5), max_snapshot_age_ms: Some(60000) }
        );
        assert_eq!(branch.max_ref_age_ms, Some(90000));
        let tag = &facts.refs[&RefName::new("v1")];
        assert_eq!((&tag.kind, tag.max_ref_age_ms), (&RefKind::Tag, Some(10)));
    }

    #[test]
    fn a_summary_is_label_and_the_rest() {
        let facts = facts(json!({})).unwrap();
        let snapshot = facts.snapshots.get(SnapshotId(7)).unwrap();

        assert_eq!(snapshot.label, "append");
        assert_eq!(snapshot.source_snapshot_id(), Some(SnapshotId(6)));
        assert!(!snapshot.summary.contains_key("operation"));
        assert_eq!((snapshot.parent, snapshot.sequence_number), (None, 3));
    }

    #[test]
    fn nested_fields_have_dotted_paths() {
        let facts = facts(json!({"schemas": [{"schema-id": 0, "identifier-field-ids": [1], "fields": [
            {"id": 1, "name": "id", "required": true, "type": "decimal(12, 2)", "initial-default": 1},
            {"id": 2, "name": "home", "required": false, "type": {"type": "struct", "fields": [
                {"id": 3, "name": "city", "required": true, "type": "string"}]}},
            {"id": 4, "name": "tags", "required": false, "type":
                {"type": "list", "element-id": 5, "element-required": true, "element": "string"}},
            {"id": 6, "name": "m", "required": false, "type":
                {"type": "map", "key-id": 7, "key": "string", "value-id": 8, "value-required": false,
                 "value": {"type": "list", "element-id": 9, "element-required": false, "element": "int"}}}
        ]}]}))
        .unwrap();

        let schema = &facts.schemas[&SchemaId(0)];
        let seen: Vec<(i32, &str, bool, &str)> =
            schema.fields.iter().map(|f| (f.id, f.name.as_str(), f.required, f.type_name.as_str())).collect();
        assert_eq!(
            seen,
            [
                (1, "id", true, "decimal(12, 2)"),
                (2, "home", false, "struct"),
                (3, "home.city", true, "string"),
                (4, "tags", false, "list"),
                (5, "tags.element", true, "string"),
                (6, "m", false, "map"),
                (7, "m.key", true, "string"),
                (8, "m.value", false, "list"),
                (9, "m.value.element", false, "int"),
            ]
        );
        assert!(schema.fields[0].has_initial_default);
        assert_eq!(schema.identifier_field_ids, [1]);
    }

    #[test]
    fn sort_fields_do_not_depend_on_key_order() {
        let one = json!({"sort-orders": [{"order-id": 1, "fields": [
            {"transform": "identity", "source-id": 1, "direction": "asc", "null-order": "nulls-first"}]}]});
        let two = json!({"sort-orders": [{"order-id": 1, "fields": [
            {"direction": "asc", "null-order": "nulls-first", "source-id": 1, "transform": "identity"}]}]});

        assert_eq!(facts(one).unwrap().sort_orders, facts(two).unwrap().sort_orders);
    }

    #[test]
    fn a_broken_schema_names_what_is_broken() {
        let error = facts(json!({"schemas": [{"schema-id": 0, "fields": [{"id": 1, "name": "a"}]}]}));

        assert!(error.unwrap_err().to_string().contains("'required'"));
    }
}
