//! One trait for every catalog: load, commit under requirements, capabilities.
//!
//! A commit is one shot (case O29): it never reloads and rebases by itself. What it answers is a closed
//! list; an answer that is not understood is `Unknown` and is settled by reading.

use std::sync::Arc;

use async_trait::async_trait;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{RefName, TableName};
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use super::loaded::LoadedTable;

/// The time in milliseconds since the epoch.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// What a catalog can do (rule S4). What is missing is refused up front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Capabilities {
    /// Branches and tags inside a table.
    pub table_refs: bool,
    /// `assert-ref-snapshot-id` for other refs than the one that moves.
    pub ref_requirements: bool,
    pub snapshot_removal: bool,
    pub multi_table_commits: bool,
    pub idempotency_keys: bool,
    /// A load shows every commit that was answered before it: no replica lags behind.
    pub current_reads: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    #[error("there is no table {0} in this catalog")]
    NotFound(TableName),
    #[error("the metadata of {table} cannot be read ({location}): {message}")]
    Unreadable { table: TableName, location: String, message: String },
    #[error("{table} cannot be used: {message}")]
    Unsupported { table: TableName, message: String },
    #[error("the warehouse cannot be written: {0}")]
    ReadOnly(String),
    /// Infrastructure: nobody's fault, tried again.
    #[error("the catalog did not answer: {0}")]
    Unavailable(String),
    #[error("the catalog refused the commit: {0}")]
    Refused(String),
}

impl CatalogError {
    pub fn reason(&self) -> ReasonCode {
        match self {
            Self::NotFound(_) => ReasonCode::TableNotFound,
            Self::Unreadable { .. } => ReasonCode::TableUnreadable,
            Self::Unsupported { .. } => ReasonCode::FormatUnsupported,
            Self::ReadOnly(_) => ReasonCode::WarehouseReadOnly,
            Self::Unavailable(_) => ReasonCode::CatalogUnavailable,
            Self::Refused(_) => ReasonCode::CatalogRefused,
        }
    }
}

/// What became of a commit.
#[derive(Debug)]
#[must_use]
pub enum CommitOutcome {
    /// Applied; the table as it is now.
    Landed(Arc<LoadedTable>),
    /// The target is not at the planned head.
    HeadMoved,
    /// A source branch is not at its pin.
    SourceMoved(RefName),
    /// A name that had to be new is taken.
    NameTaken(RefName),
    /// The fence is gone: this landing was forbidden by whoever removed it.
    Fenced,
    /// Another commit on the table came first (another branch, a property); reload and send again.
    PointerMoved,
    /// Schema, spec, sort order or uuid is not as planned.
    TableChanged(String),
    /// The catalog reports a conflict, nothing was applied, and the table as it is read now shows no reason:
    /// sending it again may never help (case O26).
    Unexplained(String),
    /// Nobody knows whether it was applied.
    Unknown(String),
    /// Refused for good; nothing was applied.
    Refused(CatalogError),
}

impl CommitOutcome {
    /// The outcome that a failed requirement means.
    pub fn of_failed(requirement: &Requirement) -> Self {
        match requirement {
            Requirement::RefAt { name, role, .. } => match role {
                RefRole::Target => Self::HeadMoved,
                RefRole::Fence => Self::Fenced,
                RefRole::Source => Self::SourceMoved(name.clone()),
                RefRole::NewName => Self::NameTaken(name.clone()),
            },
            other => Self::TableChanged(format!("{other:?} does not hold")),
        }
    }
}

#[async_trait]
pub trait Catalog: Send + Sync {
    /// The catalog's name in `mergeberg.toml`.
    fn name(&self) -> &str;

    fn capabilities(&self) -> Capabilities;

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError>;

    /// The table as it is now. Cheap when nothing changed since the last load.
    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError>;

    /// Applies `updates` if every requirement holds on the table as it is now; `base` is the table as the
    /// caller knows it. A catalog may also answer [`CommitOutcome::PointerMoved`] because anything else was
    /// committed since `base` was loaded. Sent once: it is never rebased, and sent again only where the
    /// server has certainly not looked at it, or promises to know it again.
    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome;
}

/// The first requirement that does not hold, in the order of the caller.
pub(super) fn first_failed<'a>(
    facts: &TableFacts,
    requirements: &'a [Requirement],
) -> Option<&'a Requirement> {
    requirements.iter().find(|requirement| match requirement {
        Requirement::TableUuid(uuid) => facts.uuid != *uuid,
        // `None`: the ref must not exist, an empty `main` included (case O28).
        Requirement::RefAt { name, at, role: _ } => facts.head(name) != *at,
        Requirement::CurrentSchema(id) => facts.current_schema_id != *id,
        Requirement::DefaultSpec(id) => facts.default_spec_id != *id,
        Requirement::DefaultSortOrder(id) => facts.default_sort_order_id != *id,
    })
}

/// Runs CPU and disk work beside the async runtime.
pub(super) async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, CatalogError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| CatalogError::Unavailable(format!("the catalog's own work was cut short: {e}")))
}
