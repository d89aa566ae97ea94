//! The recorded logical operation behind a source snapshot (design, section 5).
//!
//! A record travels in the snapshot summary under [`RECORD_KEY`]. Whatever stands there is hostile input:
//! an unknown version, operation or field is a typed refusal, never a guess.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{SnapshotId, TableName};

/// Summary key that holds the record itself.
pub const RECORD_KEY: &str = "mergeberg.operation";
/// The only record version there is.
pub const RECORD_VERSION: u32 = 1;
/// The alias under which a recorded query reads the target, at the car's parent.
pub const TARGET_ALIAS: &str = "target";
/// A longer record is refused before it is parsed, in bytes.
pub const MAX_RECORD_BYTES: usize = 64 * 1024;

/// A record as written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Adjacent snapshots with the same id are one operation.
    pub id: String,
    pub operation: Operation,
    /// Row count that the operation must produce, when it does not depend on the target.
    pub expected_rows: Option<i64>,
}

/// The operations that can be recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// Re-add the same files.
    Append,
    /// The branch's files replace the target's files of exactly the same (spec id, tuple).
    ReplacePartitions,
    /// Replace the rows that match a filter by the result of a query.
    OverwriteWhere { filter: String, query: String, inputs: BTreeMap<String, PinnedInput> },
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::ReplacePartitions => "replace-partitions",
            Self::OverwriteWhere { .. } => "overwrite-where",
        }
    }
}

/// A table that a recorded query reads at a fixed snapshot. Never the target itself: the target is read
/// at the car's parent, under the alias `target`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinnedInput {
    pub table: TableName,
    #[serde(rename = "snapshot-id")]
    pub snapshot_id: SnapshotId,
}

/// What the summary said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordFinding {
    /// There is no record.
    Absent,
    Found(Record),
    /// There is one that cannot be used.
    Invalid(RecordError),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the record is no JSON object of the documented form: {0}")]
    Malformed(String),
    #[error("record version {0} is unknown; this release reads version 1")]
    UnknownVersion(String),
    #[error("operation '{0}' is unknown; known: append, replace-partitions, overwrite-where")]
    UnknownOperation(String),
    #[error("the record is {0} bytes long; at most {MAX_RECORD_BYTES} are read")]
    TooLong(usize),
    #[error("input '{alias}' pins the target table itself; read it under the alias 'target' without a pin")]
    PinsTarget { alias: String },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    #[serde(rename = "v")]
    _v: serde_json::Value,
    id: String,
    op: String,
    #[serde(rename = "where")]
    filter: Option<String>,
    query: Option<String>,
    #[serde(default)]
    inputs: BTreeMap<String, PinnedInput>,
    expect: Option<WireExpect>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireExpect {
    rows: Option<i64>,
}

impl RecordFinding {
    /// Reads the record of a summary. `target` is the table that the snapshot belongs to.
    pub fn of_summary(summary: &BTreeMap<String, String>, target: &TableName) -> Self {
        match summary.get(RECORD_KEY) {
            None => Self::Absent,
            Some(text) => match Record::parse(text, target) {
                Ok(record) => Self::Found(record),
                Err(error) => Self::Invalid(error),
            },
        }
    }

    pub fn found(&self) -> Option<&Record> {
        match self {
            Self::Found(record) => Some(record),
            Self::Absent | Self::Invalid(_) => None,
        }
    }
}

impl Record {
    pub fn parse(text: &str, target: &TableName) -> Result<Self, RecordError> {
        if text.len() > MAX_RECORD_BYTES {
            return Err(RecordError::TooLong(text.len()));
        }
        // Version and operation first: a record of a later version may have any other form.
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|e| RecordError::Malformed(e.to_string()))?;
        match value.get("v") {
            Some(v) if v.as_u64() == Some(u64::from(RECORD_VERSION)) => {}
            Some(v) => return Err(RecordError::UnknownVersion(v.to_string())),
            None => return Err(RecordError::Malformed("'v' is missing".to_owned())),
        }
        if let Some(op) = value.get("op").and_then(|op| op.as_str())
            && !["append", "replace-partitions", "overwrite-where"].contains(&op)
        {
            return Err(RecordError::UnknownOperation(op.to_owned()));
        }
        let wire: Wire = serde_json::from_value(value).map_err(|e| RecordError::Malformed(e.to_string()))?;
        let Wire { _v: _, id, op, filter, query, inputs, expect } = wire;
        if id.trim().is_empty() {
            return Err(RecordError::Malformed("'id' is empty".to_owned()));
        }
        if inputs.keys().any(|alias| alias.eq_ignore_ascii_case(TARGET_ALIAS)) {
            return Err(RecordError::Malformed(format!(
                "an input is named '{TARGET_ALIAS}', under which a query reads the target itself"
            )));
        }
        if expect.as_ref().and_then(|e| e.rows).is_some_and(|rows| rows < 0) {
            return Err(RecordError::Malformed("'expect.rows' is negative".to_owned()));
        }
        for (alias, input) in &inputs {
            if &input.table == target {
                return Err(RecordError::PinsTarget { alias: alias.clone() });
            }
        }
        let operation = match (op.as_str(), filter, query) {
            ("append", None, None) if inputs.is_empty() => Operation::Append,
            ("replace-partitions", None, None) if inputs.is_empty() => Operation::ReplacePartitions,
            ("overwrite-where", Some(filter), Some(query))
                if !filter.trim().is_empty() && !query.trim().is_empty() =>
            {
                Operation::OverwriteWhere { filter, query, inputs }
            }
            ("overwrite-where", _, _) => {
                return Err(RecordError::Malformed("overwrite-where needs 'where' and 'query'".to_owned()));
            }
            (op, _, _) => {
                return Err(RecordError::Malformed(format!("{op} takes no 'where', 'query' or 'inputs'")));
            }
        };
        Ok(Self { id, operation, expected_rows: expect.and_then(|e| e.rows) })
    }

    /// The JSON text that [`Record::parse`] reads back.
    pub fn to_text(&self) -> String {
        let mut map = serde_json::Map::new();
        map.insert("v".to_owned(), RECORD_VERSION.into());
        map.insert("id".to_owned(), self.id.clone().into());
        map.insert("op".to_owned(), self.operation.name().into());
        if let Operation::OverwriteWhere { filter, query, inputs } = &self.operation {
            map.insert("where".to_owned(), filter.clone().into());
            map.insert("query".to_owned(), query.clone().into());
            let pins: serde_json::Map<String, serde_json::Value> = inputs
                .iter()
                .map(|(alias, pin)| {
                    let pin = serde_json::json!({
                        "table": pin.table.to_string(), "snapshot-id": pin.snapshot_id.0
                    });
                    (alias.clone(), pin)
                })
                .collect();
            map.insert("inputs".to_owned(), pins.into());
        }
        if let Some(rows) = self.expected_rows {
            map.insert("expect".to_owned(), serde_json::json!({ "rows": rows }));
        }
        serde_json::Value::Object(map).to_string()
    }
}
