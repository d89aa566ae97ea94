//! The recorded logical operation behind a source snapshot (design, section 5).
//!
//! A record travels in the snapshot summary under [`RECORD_KEY`], or stands in the ledger under the id that the
//! summary gives ([`RECORD_ID_KEY`]). Whatever stands there is hostile input: an unknown version, operation or
//! field is a typed refusal, never a guess. Typed forms and SQL statements become the same [`Operation`], and
//! what can be told without the tables is checked when it is made: inputs without a pin, a pin of the target,
//! functions whose result depends on when they run.

mod determinism;
mod functions;
mod meaning;
mod spark;
mod sql;
mod statement;
mod tables;
mod wire;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{SnapshotId, TableName};

pub use sql::{Condition, Select, require_one_reading};

/// Summary key that holds the record itself.
pub const RECORD_KEY: &str = "mergeberg.operation";
/// Summary key that names a record in the ledger.
pub const RECORD_ID_KEY: &str = "mergeberg.operation-id";
/// Summary key with the digest of the record that the id names; a record with another digest is another one.
pub const RECORD_DIGEST_KEY: &str = "mergeberg.operation-digest";
/// The only record version there is.
pub const RECORD_VERSION: u32 = 1;
/// The alias under which a recorded query reads the target, at the car's parent.
pub const TARGET_ALIAS: &str = "target";
/// The alias of a typed merge's source rows.
pub const SOURCE_ALIAS: &str = "source";
/// The zone of a statement that names none.
pub const UTC: &str = "UTC";
/// A longer record is refused before it is parsed, in bytes.
pub const MAX_RECORD_BYTES: usize = 64 * 1024;

/// A record as read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Adjacent snapshots with the same id are one operation.
    pub id: String,
    pub operation: Operation,
    /// The other tables that the operation reads, by the alias that its queries use.
    pub inputs: BTreeMap<String, PinnedInput>,
    pub names: Names,
    /// Of a statement: the zone of the session that ran it, as it names it (Spark: `spark.sql.session.timeZone`).
    pub time_zone: String,
    /// A query or condition reads the target's own rows beside those that it changes.
    pub reads_target: bool,
    /// Row count that the operation's query must produce, when it does not depend on the target.
    pub expected_rows: Option<i64>,
}

/// How names of columns are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Letter for letter: the typed forms.
    Exact,
    /// Without regard to upper and lower case, as Spark does unless told otherwise: SQL statements.
    AnyCase,
}

/// The operations that can be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Re-add the same files.
    Append,
    /// The branch's files replace the target's files of exactly the same (spec id, tuple).
    ReplacePartitions,
    /// Replace the rows that match a filter by the result of a query.
    OverwriteWhere {
        filter: Condition,
        rows: Rows,
    },
    /// Replace the partitions for which a query gives rows; the query reads the target.
    OverwritePartitions {
        rows: Rows,
    },
    /// Add the rows of a query that reads the target.
    InsertInto {
        rows: Rows,
    },
    DeleteWhere {
        target: String,
        filter: Condition,
    },
    UpdateWhere {
        target: String,
        set: Vec<Assignment>,
        filter: Option<Condition>,
    },
    MergeInto(Box<Merge>),
}

/// Rows that a query gives to the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    pub query: Select,
    pub columns: Columns,
}

/// Which columns of the table the query's columns are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Columns {
    /// Those of the same names.
    ByName,
    /// These in turn, or without any all of the table in turn; `constants` are not among them.
    ByPosition { names: Vec<String>, constants: Vec<Assignment> },
}

/// `column = value`, or `column.field.field = value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    pub column: String,
    /// Names of fields, from the column's own inwards; empty: the whole column.
    pub fields: Vec<String>,
    pub value: Condition,
}

/// A MERGE: clauses of one kind are tried in order, and the first whose condition is true acts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Alias of the target's rows in every condition and value.
    pub target: String,
    /// Alias of the source's rows.
    pub source: String,
    pub query: Select,
    pub on: Condition,
    pub clauses: Vec<MergeClause>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeClause {
    pub when: When,
    pub condition: Option<Condition>,
    pub action: MergeAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Matched,
    /// A source row that no target row matches.
    NotMatched,
    /// A target row that no source row matches.
    NotMatchedBySource,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergeAction {
    Update(Vec<Assignment>),
    /// `UPDATE SET *`: every column from the source's column of the same name.
    UpdateAll,
    Delete,
    /// Values for these columns, or without any for all of the table in turn.
    Insert {
        columns: Vec<String>,
        values: Vec<Condition>,
    },
    /// `INSERT *`.
    InsertAll,
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::ReplacePartitions => "replace-partitions",
            Self::OverwriteWhere { .. } => "overwrite-where",
            Self::OverwritePartitions { .. } => "overwrite-partitions",
            Self::InsertInto { .. } => "insert-into",
            Self::DeleteWhere { .. } => "delete-where",
            Self::UpdateWhere { .. } => "update-where",
            Self::MergeInto(_) => "merge-into",
        }
    }

    /// Is it run again on the rows of another head, rather than re-added with its files?
    pub fn is_run_again(&self) -> bool {
        !matches!(self, Self::Append | Self::ReplacePartitions)
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
    /// When given, a table of that name with another uuid is another table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// What the summary said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordFinding {
    /// There is no record.
    Absent,
    Found(Box<Record>),
    /// It stands in the ledger under this id, and has not been looked up.
    Named {
        id: String,
        digest: Option<String>,
    },
    /// There is one that cannot be used.
    Invalid(RecordError),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the record is no JSON object of the documented form: {0}")]
    Malformed(String),
    #[error("record version {0} is unknown; this release reads version 1")]
    UnknownVersion(String),
    #[error("operation '{0}' is unknown; known: {known}", known = wire::OPERATIONS.join(", "))]
    UnknownOperation(String),
    #[error("the record is {0} bytes long; at most {MAX_RECORD_BYTES} are read")]
    TooLong(usize),
    #[error("input '{alias}' pins the target table itself; read it under the alias 'target' without a pin")]
    PinsTarget { alias: String },
    #[error("{0}")]
    Sql(String),
    #[error("table '{0}' is read without a pin; name it in 'inputs' with its snapshot id")]
    Unpinned(String),
    #[error("the statement writes to '{written}', and the snapshot belongs to '{target}'")]
    OtherTarget { written: String, target: String },
    #[error("{0}: its result would be another one when it is run again; record the values that it gave")]
    NotDeterministic(String),
    #[error(
        "operation record '{id}' is not the one that the snapshot was written with: its digest is {found}"
    )]
    OtherDigest { id: String, found: String },
    #[error("the ledger has no operation record '{0}' of this table; `operation record` writes one")]
    NotInLedger(String),
}

impl RecordFinding {
    /// Reads the record of a summary. `target` is the table that the snapshot belongs to.
    pub fn of_summary(summary: &BTreeMap<String, String>, target: &TableName) -> Self {
        match (summary.get(RECORD_KEY), summary.get(RECORD_ID_KEY)) {
            (None, None) => Self::Absent,
            (Some(text), None) => Self::of_text(text, target),
            (None, Some(id)) => {
                Self::Named { id: id.clone(), digest: summary.get(RECORD_DIGEST_KEY).cloned() }
            }
            (Some(_), Some(_)) => Self::Invalid(RecordError::Malformed(format!(
                "the summary has both '{RECORD_KEY}' and '{RECORD_ID_KEY}'"
            ))),
        }
    }

    pub fn of_text(text: &str, target: &TableName) -> Self {
        match Record::parse(text, target) {
            Ok(record) => Self::Found(Box::new(record)),
            Err(error) => Self::Invalid(error),
        }
    }

    pub fn found(&self) -> Option<&Record> {
        match self {
            Self::Found(record) => Some(record),
            Self::Absent | Self::Named { .. } | Self::Invalid(_) => None,
        }
    }
}

impl Record {
    /// Reads a record of `target`: JSON, typed or with the statement that ran.
    pub fn parse(text: &str, target: &TableName) -> Result<Self, RecordError> {
        wire::parse(text, target)
    }
}
