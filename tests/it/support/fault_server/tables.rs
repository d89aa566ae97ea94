//! The fault server's tables: the whole history of each, and the Iceberg REST specification's commit on its end.

use std::collections::{BTreeMap, BTreeSet};

use iceberg::io::FileIO;
use mergeberg::table::document::DocumentError;
use mergeberg::table::loaded::LoadedTable;
use mergeberg_kernel::commit::{NewSnapshot, RowRange, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, TableName};
use serde_json::{Value, json};

use super::http::Reply;
use crate::support::child::real_now;

/// One state of a table.
#[derive(Clone)]
pub struct Version {
    pub location: String,
    pub metadata: String,
}

impl Version {
    /// As it is sent to who asks for `snapshots=refs`.
    pub fn of_refs(&self) -> Self {
        let mut metadata: Value = serde_json::from_str(&self.metadata).unwrap();
        let named: BTreeSet<i64> = metadata["refs"]
            .as_object()
            .unwrap()
            .values()
            .map(|reference| reference["snapshot-id"].as_i64().unwrap())
            .collect();
        for (list, key) in [("snapshots", "snapshot-id"), ("snapshot-log", "snapshot-id")] {
            metadata[list].as_array_mut().unwrap().retain(|one| named.contains(&one[key].as_i64().unwrap()));
        }
        Self { location: self.location.clone(), metadata: metadata.to_string() }
    }

    /// `LoadTableResult`.
    pub fn reply(&self) -> Reply {
        Reply::json(200, self.body_with(&json!({}))).with_header("etag", format!("\"{}\"", self.location))
    }

    /// With what else a load says. The metadata stays as it was written.
    pub fn body_with(&self, told: &Value) -> String {
        let Self { location, metadata } = self;
        let mut told = told.clone();
        told["metadata-location"] = json!(location);
        let text = told.to_string();
        format!("{},\"metadata\":{metadata}}}", text.strip_suffix('}').unwrap())
    }
}

#[derive(Default)]
pub struct Tables {
    pub namespaces: BTreeSet<Vec<String>>,
    pub versions: BTreeMap<TableName, Vec<Version>>,
    /// Tables ever made: a name that is used again is another table.
    made: usize,
}

impl Tables {
    pub fn create_namespace(&mut self, body: &Value) -> Reply {
        let levels: Vec<String> = serde_json::from_value(body["namespace"].clone()).unwrap();
        self.namespaces.insert(levels);
        Reply::json(200, body.to_string())
    }

    /// `CreateTableRequest`, as far as the tests make tables.
    pub fn create(&mut self, namespace: Vec<String>, body: &Value, warehouse: &str) -> Reply {
        let name = TableName { namespace, name: body["name"].as_str().unwrap().to_owned() };
        if self.versions.contains_key(&name) {
            return Reply::error(409, "AlreadyExistsException", "it is there");
        }
        let version: u8 = body["properties"]["format-version"].as_str().map_or(2, |v| v.parse().unwrap());
        let columns = body["schema"]["fields"].as_array().unwrap().len();
        let fields = body["partition-spec"]["fields"].as_array().unwrap().len();
        let number = self.made;
        self.made += 1;
        let uuid = format!("00000000-0000-4000-8000-{number:012}");
        let place = format!("{warehouse}/{uuid}");
        let mut metadata = json!({
            "format-version": version,
            "table-uuid": uuid,
            "location": place,
            "last-sequence-number": 0,
            "last-updated-ms": real_now(),
            "last-column-id": columns,
            "current-schema-id": 0,
            "schemas": [body["schema"]],
            "default-spec-id": 0,
            "partition-specs": [body["partition-spec"]],
            "last-partition-id": 999 + fields,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": {},
            "current-snapshot-id": -1,
            "refs": {}, "snapshots": [], "snapshot-log": [], "metadata-log": [],
            "unknown-to-all": {"kept": [1, 2.50, "ü"]},
        });
        if version == 3 {
            metadata["next-row-id"] = json!(0);
        }
        let location = format!("{place}/metadata/00000.metadata.json");
        let first = Version { location, metadata: metadata.to_string() };
        let reply = first.reply();
        self.versions.insert(name, vec![first]);
        reply
    }

    pub fn current(&self, name: &TableName) -> Option<&Version> {
        self.versions.get(name)?.last()
    }

    pub fn loaded(&self, name: &TableName) -> LoadedTable {
        let Version { location, metadata } = self.current(name).unwrap();
        LoadedTable::parse(name, location, metadata.as_bytes(), FileIO::new_with_fs()).unwrap()
    }

    /// `CommitTransactionRequest`: every table is moved, or none. Of a server that stops after `most` tables the rest is
    /// forgotten.
    pub fn commit_all(&mut self, body: &Value, most: usize) -> Reply {
        let before = self.versions.clone();
        for change in body["table-changes"].as_array().unwrap().iter().take(most) {
            let reply = self.commit(&name_of(&change["identifier"]), change, |_| false);
            if reply.status != 200 {
                self.versions = before;
                return reply;
            }
        }
        Reply::json(204, String::new())
    }

    /// `CommitTableRequest`. Requirements for which `ignore` says yes are not looked at.
    pub fn commit(&mut self, name: &TableName, body: &Value, ignore: impl Fn(&Value) -> bool) -> Reply {
        if !self.versions.contains_key(name) {
            return Reply::error(404, "NoSuchTableException", &format!("Table does not exist: {name}"));
        }
        let base = self.loaded(name);
        for requirement in body["requirements"].as_array().unwrap() {
            if !ignore(requirement)
                && let Some(failed) = failed(&base, requirement)
            {
                return Reply::error(409, "CommitFailedException", &format!("Requirement failed: {failed}"));
            }
        }
        let updates: Vec<Update> = body["updates"].as_array().unwrap().iter().map(update_of).collect();
        let applied = match base.document.apply(&base.facts, &base.metadata_location, &updates, real_now()) {
            Ok(applied) => applied,
            Err(error @ (DocumentError::StaleSequenceNumber { .. } | DocumentError::WrongRowIds { .. })) => {
                return Reply::error(400, "ValidationException", &error.to_string());
            }
            Err(error) => return Reply::error(400, "BadRequestException", &error.to_string()),
        };
        let versions = self.versions.get_mut(name).unwrap();
        let location = format!("{}/metadata/{:05}.metadata.json", base.facts.location, versions.len());
        let metadata = String::from_utf8(applied.document.to_bytes()).unwrap();
        let new = Version { location, metadata };
        let reply = new.reply();
        versions.push(new);
        reply
    }
}

fn name_of(identifier: &Value) -> TableName {
    TableName {
        namespace: serde_json::from_value(identifier["namespace"].clone()).unwrap(),
        name: identifier["name"].as_str().unwrap().to_owned(),
    }
}

/// What a requirement finds instead, if it does not hold.
fn failed(base: &LoadedTable, requirement: &Value) -> Option<String> {
    let facts = &base.facts;
    let (expected, found) = match requirement["type"].as_str().unwrap() {
        "assert-table-uuid" => (&requirement["uuid"], json!(facts.uuid)),
        "assert-ref-snapshot-id" => {
            let name = RefName::new(requirement["ref"].as_str().unwrap());
            assert!(
                requirement.get("snapshot-id").is_some(),
                "an absent ref is required by null: {requirement}"
            );
            (&requirement["snapshot-id"], json!(facts.head(&name)))
        }
        "assert-current-schema-id" => (&requirement["current-schema-id"], json!(facts.current_schema_id)),
        "assert-default-spec-id" => (&requirement["default-spec-id"], json!(facts.default_spec_id)),
        "assert-default-sort-order-id" => {
            (&requirement["default-sort-order-id"], json!(facts.default_sort_order_id))
        }
        other => panic!("no requirement of ours: {other}"),
    };
    (*expected != found).then(|| format!("{requirement}, found {found}"))
}

fn update_of(update: &Value) -> Update {
    let name = || RefName::new(update["ref-name"].as_str().unwrap());
    match update["action"].as_str().unwrap() {
        "add-snapshot" => Update::AddSnapshot(snapshot_of(&update["snapshot"])),
        "set-snapshot-ref" => {
            let kind = match update["type"].as_str().unwrap() {
                "branch" => RefKind::Branch {
                    min_snapshots_to_keep: update["min-snapshots-to-keep"].as_i64().map(|n| n as i32),
                    max_snapshot_age_ms: update["max-snapshot-age-ms"].as_i64(),
                },
                _ => RefKind::Tag,
            };
            Update::SetRef(RefFact {
                name: name(),
                snapshot_id: SnapshotId(update["snapshot-id"].as_i64().unwrap()),
                kind,
                max_ref_age_ms: update["max-ref-age-ms"].as_i64(),
            })
        }
        "remove-snapshot-ref" => Update::RemoveRef(name()),
        "remove-snapshots" => {
            Update::RemoveSnapshots(serde_json::from_value(update["snapshot-ids"].clone()).unwrap())
        }
        "set-properties" => Update::SetProperties(serde_json::from_value(update["updates"].clone()).unwrap()),
        "remove-properties" => {
            Update::RemoveProperties(serde_json::from_value(update["removals"].clone()).unwrap())
        }
        other => panic!("no update of ours: {other}"),
    }
}

fn snapshot_of(snapshot: &Value) -> NewSnapshot {
    let number = |key: &str| snapshot[key].as_i64();
    let mut summary: BTreeMap<String, String> = serde_json::from_value(snapshot["summary"].clone()).unwrap();
    let label = summary.remove("operation").unwrap();
    NewSnapshot {
        id: SnapshotId(number("snapshot-id").unwrap()),
        parent: number("parent-snapshot-id").map(SnapshotId),
        sequence_number: number("sequence-number").unwrap(),
        timestamp_ms: number("timestamp-ms").unwrap(),
        manifest_list: snapshot["manifest-list"].as_str().unwrap().to_owned(),
        schema_id: SchemaId(number("schema-id").unwrap() as i32),
        label,
        summary,
        row_range: number("first-row-id")
            .map(|first_row_id| RowRange { first_row_id, added_rows: number("added-rows").unwrap() }),
    }
}
