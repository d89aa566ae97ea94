//! Newtypes for every id, so that two of them are never swapped. They are parsed at the edge and travel
//! as themselves; database wrappers stay in the ledger.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub String);

        impl $name {
            pub fn new(value: impl Into<String>) -> Self {
                Self(value.into())
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

number_id! {
    /// Iceberg snapshot id (table spec, "Snapshots").
    SnapshotId(i64)
}
number_id! {
    /// Iceberg schema id.
    SchemaId(i32)
}
number_id! {
    /// Iceberg partition spec id.
    SpecId(i32)
}
number_id! {
    /// Iceberg sort order id.
    SortOrderId(i64)
}
number_id! {
    /// Row id of a merge request in the ledger; people type it, so it is short.
    RequestId(i64)
}
number_id! {
    /// Row id of a structure review item.
    ReviewId(i64)
}
number_id! {
    /// The leader's term. It only grows; a write under an older epoch is refused.
    Epoch(i64)
}
text_id! {
    /// `table-uuid` of the table metadata: identity of a table, whatever its name.
    TableUuid
}
text_id! {
    /// Name of a branch or tag, exactly as stored: names are data and are never parsed.
    RefName
}
text_id! {
    /// One train: the requests that one landing commit publishes.
    TrainId
}
text_id! {
    /// Identity of a queue (one ledger). Temporary and pin refs carry it (rule R7).
    QueueId
}
text_id! {
    /// Id of a landing intent.
    IntentId
}
text_id! {
    /// Who enqueued, approved or cancelled.
    Principal
}
text_id! {
    /// Hex SHA-256 of a canonical text (policy, check definition, change set).
    Digest
}

impl RefName {
    pub fn main() -> Self {
        Self("main".to_owned())
    }
}

impl Digest {
    /// Hex SHA-256 over `parts`, each preceded by its length so that no two lists collide by joining.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        use sha2::{Digest as _, Sha256};
        let mut hasher = Sha256::new();
        for part in parts {
            hasher.update((part.len() as u64).to_be_bytes());
            hasher.update(part.as_bytes());
        }
        let bytes = hasher.finalize();
        Self(bytes.iter().map(|b| format!("{b:02x}")).collect())
    }
}

/// Namespace and name of a table in a catalog. Written `ns.table`; each level is one part.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TableName {
    pub namespace: Vec<String>,
    pub name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a table name: write namespace and table with a dot between, such as nyc.flights")]
pub struct TableNameError(String);

impl TableName {
    /// Namespace levels joined by dots, as JDBC catalogs store them.
    pub fn namespace_text(&self) -> String {
        self.namespace.join(".")
    }
}

impl std::str::FromStr for TableName {
    type Err = TableNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts: Vec<String> = text.split('.').map(str::to_owned).collect();
        if parts.len() < 2 || parts.iter().any(|p| p.trim().is_empty()) {
            return Err(TableNameError(text.to_owned()));
        }
        let name = parts.pop().unwrap_or_default();
        Ok(Self { namespace: parts, name })
    }
}

impl TryFrom<String> for TableName {
    type Error = TableNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<TableName> for String {
    fn from(name: TableName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{}", self.namespace_text(), self.name))
    }
}
