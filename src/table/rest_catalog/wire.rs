//! Requests and replies in the JSON of the Iceberg REST specification.

use std::collections::BTreeMap;

use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::TableName;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::super::catalog::TableChange;
use super::super::document::snapshot_value;

/// `CommitTableRequest`.
pub(super) fn commit_request(table: &TableName, requirements: &[Requirement], updates: &[Update]) -> Value {
    json!({
        "identifier": { "namespace": table.namespace, "name": table.name },
        "requirements": requirements.iter().map(requirement_value).collect::<Vec<_>>(),
        "updates": updates.iter().map(update_value).collect::<Vec<_>>(),
    })
}

/// `CommitTransactionRequest`.
pub(super) fn transaction_request(changes: &[TableChange]) -> Value {
    let changes =
        changes.iter().map(|change| commit_request(change.table(), &change.requirements, &change.updates));
    json!({ "table-changes": changes.collect::<Vec<_>>() })
}

/// `TableRequirement`.
fn requirement_value(requirement: &Requirement) -> Value {
    match requirement {
        Requirement::TableUuid(uuid) => json!({ "type": "assert-table-uuid", "uuid": uuid }),
        // The id is always sent: null says that the ref must not exist (case O28).
        Requirement::RefAt { name, at, role: _ } => {
            json!({ "type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": at })
        }
        Requirement::CurrentSchema(id) => {
            json!({ "type": "assert-current-schema-id", "current-schema-id": id })
        }
        Requirement::DefaultSpec(id) => json!({ "type": "assert-default-spec-id", "default-spec-id": id }),
        Requirement::DefaultSortOrder(id) => {
            json!({ "type": "assert-default-sort-order-id", "default-sort-order-id": id })
        }
    }
}

/// `TableUpdate`.
fn update_value(update: &Update) -> Value {
    match update {
        Update::AddSnapshot(new) => json!({ "action": "add-snapshot", "snapshot": snapshot_value(new) }),
        Update::SetRef(reference) => set_ref_value(reference),
        Update::RemoveRef(name) => json!({ "action": "remove-snapshot-ref", "ref-name": name }),
        Update::RemoveSnapshots(ids) => json!({ "action": "remove-snapshots", "snapshot-ids": ids }),
        Update::SetProperties(updates) => json!({ "action": "set-properties", "updates": updates }),
        Update::RemoveProperties(removals) => json!({ "action": "remove-properties", "removals": removals }),
    }
}

fn set_ref_value(reference: &RefFact) -> Value {
    let RefFact { name, snapshot_id, kind, max_ref_age_ms } = reference;
    let (kind, min_snapshots, max_snapshot_age) = match kind {
        RefKind::Branch { min_snapshots_to_keep, max_snapshot_age_ms } => {
            ("branch", min_snapshots_to_keep.map(i64::from), *max_snapshot_age_ms)
        }
        RefKind::Tag => ("tag", None, None),
    };
    let mut object = Map::new();
    object.insert("action".to_owned(), Value::from("set-snapshot-ref"));
    object.insert("ref-name".to_owned(), Value::from(name.as_str()));
    object.insert("type".to_owned(), Value::from(kind));
    object.insert("snapshot-id".to_owned(), Value::from(snapshot_id.0));
    for (key, value) in [
        ("min-snapshots-to-keep", min_snapshots),
        ("max-snapshot-age-ms", max_snapshot_age),
        ("max-ref-age-ms", *max_ref_age_ms),
    ] {
        if let Some(value) = value {
            object.insert(key.to_owned(), Value::from(value));
        }
    }
    Value::Object(object)
}

/// `CatalogConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CatalogConfig {
    #[serde(default)]
    pub defaults: BTreeMap<String, Option<String>>,
    #[serde(default)]
    pub overrides: BTreeMap<String, Option<String>>,
    pub endpoints: Option<Vec<String>>,
    /// Its presence says that the server knows `Idempotency-Key`.
    pub idempotency_key_lifetime: Option<String>,
}

impl CatalogConfig {
    /// A setting that the server gives: an override wins over what we were told, a default does not.
    pub fn setting<'a>(&'a self, key: &str, own: Option<&'a str>) -> Option<&'a str> {
        let of = |map: &'a BTreeMap<String, Option<String>>| map.get(key).and_then(Option::as_deref);
        of(&self.overrides).or(own).or_else(|| of(&self.defaults))
    }

    /// Does the server list this endpoint? One that lists none has those of the first version.
    pub fn offers(&self, endpoint: &str) -> bool {
        self.endpoints.as_ref().is_some_and(|all| all.iter().any(|offered| offered == endpoint))
    }

    /// Settings whose key starts with `prefix`, without it.
    pub fn settings<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        // Later ones win.
        [&self.defaults, &self.overrides].into_iter().flatten().filter_map(move |(key, value)| {
            Some((key.strip_prefix(prefix).filter(|rest| !rest.is_empty())?, value.as_deref()?))
        })
    }
}

/// `LoadTableResult` and `CommitTableResponse`: the metadata stays raw, so that nothing of it is lost.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TableReply<'a> {
    pub metadata_location: Option<String>,
    #[serde(borrow)]
    pub metadata: &'a RawValue,
    /// Not in the reply to a commit.
    pub config: Option<BTreeMap<String, Option<String>>>,
    pub storage_credentials: Option<Vec<StorageCredential>>,
}

/// `StorageCredential`: settings for locations that start with the prefix.
#[derive(Deserialize)]
pub(super) struct StorageCredential {
    pub prefix: String,
    #[serde(default)]
    pub config: BTreeMap<String, Option<String>>,
}

/// `LoadCredentialsResponse`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct CredentialsReply {
    #[serde(default)]
    pub storage_credentials: Vec<StorageCredential>,
}

/// `RemoteSignResult`.
#[derive(Deserialize)]
pub(super) struct SignReply {
    pub uri: String,
    #[serde(default)]
    pub headers: BTreeMap<String, Vec<String>>,
}

/// `ListNamespacesResponse`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct NamespacePage {
    #[serde(default)]
    pub namespaces: Vec<Vec<String>>,
    pub next_page_token: Option<String>,
}

/// `ListTablesResponse`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TablePage {
    #[serde(default)]
    pub identifiers: Vec<TableIdentifier>,
    pub next_page_token: Option<String>,
}

#[derive(Deserialize)]
pub(super) struct TableIdentifier {
    pub namespace: Vec<String>,
    pub name: String,
}

/// `OAuthTokenResponse`.
#[derive(Deserialize)]
pub(super) struct TokenReply {
    pub access_token: String,
    /// Seconds. Some servers write a text.
    #[serde(default, deserialize_with = "number_or_text")]
    pub expires_in: Option<i64>,
}

fn number_or_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(value.as_i64().or_else(|| value.as_str().and_then(|text| text.parse().ok())))
}

/// `IcebergErrorResponse`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct ErrorReply {
    pub error: ErrorModel,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct ErrorModel {
    #[serde(default)]
    pub message: Option<String>,
    #[serde(default, rename = "type")]
    pub kind: String,
}

/// The error of an OAuth2 server (RFC 6749, section 5.2).
#[derive(Deserialize)]
pub(super) struct OAuthError {
    pub error: String,
    pub error_description: Option<String>,
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::commit::{NewSnapshot, RefRole, RowRange};
    use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableUuid};

    use super::*;

    #[test]
    fn a_commit_is_written_as_the_specification_says() {
        let table: TableName = "a.b.t".parse().unwrap();
        let requirements = [
            Requirement::TableUuid(TableUuid::new("u")),
            Requirement::RefAt { name: RefName::new("x/y"), at: Some(SnapshotId(5)), role: RefRole::Fence },
            Requirement::RefAt { name: RefName::main(), at: None, role: RefRole::Target },
            Requirement::CurrentSchema(SchemaId(1)),
            Requirement::DefaultSpec(SpecId(2)),
            Requirement::DefaultSortOrder(SortOrderId(3)),
        ];
        let snapshot = NewSnapshot {
            id: SnapshotId(9_007_199_254_740_993),
            parent: None,
            sequence_number: 1,
            timestamp_ms: 2,
            manifest_list: "file:///w/s.avro".to_owned(),
            schema_id: SchemaId(0),
            label: "append".to_owned(),
            summary: BTreeMap::from([("wap.id".to_owned(), "w".to_owned())]),
            row_range: Some(RowRange { first_row_id: 4, added_rows: 6 }),
        };
        let branch = RefFact {
            name: RefName::main(),
            snapshot_id: SnapshotId(5),
            kind: RefKind::Branch { min_snapshots_to_keep: Some(2), max_snapshot_age_ms: None },
            max_ref_age_ms: Some(7),
        };
        let tag = RefFact {
            name: RefName::new("v1"),
            snapshot_id: SnapshotId(5),
            kind: RefKind::Tag,
            max_ref_age_ms: None,
        };
        let updates = [
            Update::AddSnapshot(snapshot),
            Update::SetRef(branch),
            Update::SetRef(tag),
            Update::RemoveRef(RefName::new("x/y")),
            Update::RemoveSnapshots(vec![SnapshotId(8)]),
            Update::SetProperties(BTreeMap::from([("k".to_owned(), "v".to_owned())])),
            Update::RemoveProperties(vec!["p".to_owned()]),
        ];

        assert_eq!(
            commit_request(&table, &requirements, &updates),
            json!({
                "identifier": { "namespace": ["a", "b"], "name": "t" },
                "requirements": [
                    { "type": "assert-table-uuid", "uuid": "u" },
                    { "type": "assert-ref-snapshot-id", "ref": "x/y", "snapshot-id": 5 },
                    { "type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": null },
                    { "type": "assert-current-schema-id", "current-schema-id": 1 },
                    { "type": "assert-default-spec-id", "default-spec-id": 2 },
                    { "type": "assert-default-sort-order-id", "default-sort-order-id": 3 },
                ],
                "updates": [
                    { "action": "add-snapshot", "snapshot": {
                        "sequence-number": 1, "snapshot-id": 9_007_199_254_740_993_i64, "timestamp-ms": 2,
                        "summary": { "operation": "append", "wap.id": "w" },
                        "manifest-list": "file:///w/s.avro", "schema-id": 0, "first-row-id": 4, "added-rows": 6,
                    } },
                    { "action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": 5,
                      "min-snapshots-to-keep": 2, "max-ref-age-ms": 7 },
                    { "action": "set-snapshot-ref", "ref-name": "v1", "type": "tag", "snapshot-id": 5 },
                    { "action": "remove-snapshot-ref", "ref-name": "x/y" },
                    { "action": "remove-snapshots", "snapshot-ids": [8] },
                    { "action": "set-properties", "updates": { "k": "v" } },
                    { "action": "remove-properties", "removals": ["p"] },
                ],
            })
        );
    }

    #[test]
    fn the_servers_overrides_win_and_its_defaults_do_not() {
        let config: CatalogConfig = serde_json::from_value(json!({
            "defaults": { "prefix": "d", "header.X-A": "1", "nothing": null },
            "overrides": { "warehouse": "w", "header.X-A": "2", "header.X-B": "3" },
        }))
        .unwrap();

        assert_eq!(config.setting("prefix", None), Some("d"));
        assert_eq!(config.setting("prefix", Some("mine")), Some("mine"));
        assert_eq!(config.setting("warehouse", Some("mine")), Some("w"));
        assert_eq!(config.setting("nothing", None), None);
        let headers: BTreeMap<_, _> = config.settings("header.").collect();
        assert_eq!(headers, BTreeMap::from([("X-A", "2"), ("X-B", "3")]));
        assert!(config.idempotency_key_lifetime.is_none());
    }

    #[test]
    fn token_lifetimes_are_read_from_numbers_and_texts() {
        let lifetime = |text: &str| serde_json::from_str::<TokenReply>(text).unwrap().expires_in;
        assert_eq!(lifetime(r#"{"access_token": "t", "expires_in": 3600}"#), Some(3600));
        assert_eq!(lifetime(r#"{"access_token": "t", "expires_in": "60"}"#), Some(60));
        assert_eq!(lifetime(r#"{"access_token": "t"}"#), None);
    }
}
