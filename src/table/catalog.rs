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
use uuid::Uuid;

use super::create::TableDefinition;
use super::error::plain;
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

macro_rules! capability_list {
    ($($variant:ident $field:ident $word:literal $needed:literal $can:literal $without:literal;)*) => {
        /// One of [`Capabilities`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        pub enum Capability {
            $(#[doc = $can] #[serde(rename = $word)] $variant,)*
        }

        impl Capability {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name where it is stored and in JSON. Never changes.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            pub fn from_word(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.word() == word)
            }

            /// What a catalog can do that has it.
            pub fn can(self) -> &'static str {
                match self { $(Self::$variant => $can,)* }
            }

            /// What it means when it is missing.
            pub fn without(self) -> &'static str {
                match self { $(Self::$variant => $without,)* }
            }

            /// Can nothing be landed without it?
            pub fn is_needed(self) -> bool {
                match self { $(Self::$variant => $needed,)* }
            }
        }

        impl Capabilities {
            pub fn has(&self, capability: Capability) -> bool {
                match capability { $(Capability::$variant => self.$field,)* }
            }

            #[must_use]
            pub fn without(mut self, capability: Capability) -> Self {
                match capability { $(Capability::$variant => self.$field = false,)* }
                self
            }
        }
    };
}

capability_list! {
    TableRefs table_refs "table-refs" true
        "branches and tags inside a table"
        "there is nothing to merge here: every request is refused at enqueue";
    RefRequirements ref_requirements "ref-requirements" true
        "commits on condition that a branch has not moved"
        "a landing could overwrite somebody's commit: every request is refused at enqueue";
    SnapshotRemoval snapshot_removal "snapshot-removal" false
        "a snapshot is removed together with its branch"
        "candidates that were dropped stay in the table until its next expiry";
    MultiTableCommits multi_table_commits "multi-table-commits" false
        "commits over several tables at once"
        "requests over several tables are refused at enqueue";
    IdempotencyKeys idempotency_keys "idempotency-keys" false
        "a commit whose answer was lost can be sent again"
        "a commit whose answer was lost is settled by reading, which takes longer";
    CurrentReads current_reads "current-reads" false
        "a load shows every commit that was answered before"
        "a load may lag behind; outcomes are confirmed by one more commit";
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

/// One table's part of a commit to several.
#[derive(Clone, Debug)]
pub struct TableChange {
    /// The table as the caller knows it.
    pub base: Arc<LoadedTable>,
    pub requirements: Vec<Requirement>,
    pub updates: Vec<Update>,
}

impl TableChange {
    pub fn table(&self) -> &TableName {
        &self.base.facts.name
    }
}

/// What became of a commit to several tables.
#[derive(Debug)]
#[must_use]
pub enum SetOutcome {
    /// Applied to all of them; the tables as they are now, in the caller's order.
    Landed(Vec<Arc<LoadedTable>>),
    /// Applied to none of them, because of the table at this position. The outcome is never `Landed` or `Unknown`.
    NotApplied { at: usize, outcome: CommitOutcome },
    /// Nobody knows whether it was applied, or the tables do not agree on it.
    Unknown(String),
}

/// The bare answer to a commit under a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum KeyedAnswer {
    /// The catalog says that it is applied.
    Yes,
    /// The catalog refuses it, with these words.
    No(String),
    /// No answer that says either.
    Unclear(String),
}

#[async_trait]
pub trait Catalog: Send + Sync {
    /// The catalog's name in `mergeberg.toml`.
    fn name(&self) -> &str;

    fn capabilities(&self) -> Capabilities;

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError>;

    /// The table as it is now. Cheap when nothing changed since the last load.
    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError>;

    /// As [`Self::load`] with the snapshots that refs name, and perhaps without all others: for one look at heads,
    /// where a table of thousands of snapshots would come over a network for it. Nothing that asks for ancestry
    /// or for snapshots without a ref may rest on it.
    async fn load_refs(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        self.load(table).await
    }

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

    /// Applies the changes to all tables, if every requirement of every table holds, or to none. Where
    /// [`Capabilities::multi_table_commits`] says no, it is refused. Sent once, as [`Catalog::commit`].
    async fn commit_set(&self, changes: &[TableChange]) -> SetOutcome {
        let _ = changes;
        let error = CatalogError::Refused(format!("{} cannot commit to several tables at once", self.name()));
        SetOutcome::NotApplied { at: 0, outcome: CommitOutcome::Refused(error) }
    }

    /// Sends a commit once, under this idempotency key, and gives the bare answer: to try out what the catalog makes of
    /// keys. Commits that matter are sent by [`Self::commit`], which judges what it is told.
    async fn commit_under_key(
        &self,
        _key: Uuid,
        _base: &LoadedTable,
        _requirements: &[Requirement],
        _updates: &[Update],
    ) -> KeyedAnswer {
        KeyedAnswer::Unclear(format!("{} knows no keys", self.name()))
    }

    /// What the catalog says of itself was found wrong (rule S4): it is not relied upon from here on.
    fn distrust(&self, _capability: Capability) {}

    /// Makes an empty table to try things out on. Its name starts with [`SCRATCH_PREFIX`], its namespace has
    /// to exist. No other table is ever made by a queue.
    async fn create_scratch(
        &self,
        table: &TableName,
        _definition: &TableDefinition,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        Err(CatalogError::Refused(format!("{table} cannot be made: this catalog makes no tables")))
    }

    /// Takes away what [`Self::create_scratch`] made, files included.
    async fn drop_scratch(&self, table: &LoadedTable) -> Result<(), CatalogError> {
        let name = &table.facts.name;
        Err(CatalogError::Refused(format!("{name} cannot be dropped: this catalog drops no tables")))
    }
}

/// What the names of scratch tables start with.
pub const SCRATCH_PREFIX: &str = "mergeberg_doctor_";

/// A guard for what makes and drops tables: no other name will do.
pub(super) fn require_scratch(table: &TableName) -> Result<(), CatalogError> {
    if table.name.starts_with(SCRATCH_PREFIX) {
        return Ok(());
    }
    Err(CatalogError::Refused(format!(
        "{table} is no scratch table: their names start with {SCRATCH_PREFIX}"
    )))
}

/// Removes the files of a scratch table that was dropped. They lie in a folder of its own.
pub(super) async fn remove_scratch_files(table: &LoadedTable) -> Result<(), CatalogError> {
    let facts = &table.facts;
    // A server may put tables wherever it likes: what bears the table's own name is a folder of its own.
    if ![facts.name.name.as_str(), facts.uuid.0.as_str()].iter().any(|own| facts.location.contains(own)) {
        return Err(CatalogError::Refused(format!("its files are left in {}", facts.location)));
    }
    let removed = table.file_io.delete_prefix(format!("{}/", facts.location.trim_end_matches('/'))).await;
    removed.map_err(|error| {
        CatalogError::Refused(format!("its files are left in {}: {}", facts.location, plain(&error)))
    })
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
