//! The SQL catalog: tables by name in SQLite or PostgreSQL, metadata files on a disk or an object store, on the layout
//! of Java's JdbcCatalog and PyIceberg's SqlCatalog, so that both work on the same tables.
//!
//! A commit writes a new metadata file under a name that nobody has, then moves the table's pointer with
//! one conditional update: the number of rows it changed is the answer (case O27). Nothing is retried but
//! a locked database; a lost race is told and left to the caller. A connection that is lost while the update is
//! committed leaves the outcome unknown, to be settled by reading (0020).
//!
//! A commit to several tables moves their pointers in one database transaction (`set_commit`).
//!
//! Absent on purpose: other databases, and views.

mod database;
mod place;
#[cfg(test)]
mod postgres_tests;
#[cfg(test)]
mod property_tests;
mod set_commit;
#[cfg(test)]
mod tests;
mod trouble;

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use iceberg::io::FileIO;
use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::ids::TableName;
use uuid::Uuid;

pub use super::catalog::Clock;
use super::catalog::{
    Capabilities, Catalog, CatalogError, CommitOutcome, SetOutcome, TableChange, first_failed, off_runtime,
    remove_scratch_files, require_scratch,
};
use super::create::TableDefinition;
use super::document::DocumentError;
use super::loaded::LoadedTable;
use super::metadata_file::{self, Codec, MetadataFileError};
use super::storage::{StorageProperties, file_io};
use super::table_cache::TableCache;
use database::CatalogDatabase;
pub(super) use database::Swap;
pub use place::DatabasePlace;

/// Points between the steps of a commit, for tests that script races and crashes. They run on the
/// committing task and may block it.
pub trait CommitHook: Send + Sync {
    /// The metadata file is written, the pointer not yet moved.
    fn before_swap(&self) {}

    /// The database has answered, the caller does not know yet.
    fn after_swap(&self) {}

    /// Lose that answer? The commit is then `Unknown`, whatever became of it.
    fn loses_answer(&self) -> bool {
        false
    }
}

/// See the module.
pub struct SqlCatalog {
    pub(super) database: CatalogDatabase,
    pub(super) warehouse: String,
    pub(super) file_io: FileIO,
    pub(super) clock: Clock,
    cache: Mutex<TableCache<Arc<LoadedTable>>>,
    hook: Option<Arc<dyn CommitHook>>,
}

impl SqlCatalog {
    /// Opens a catalog that exists. `name` is the catalog's name in the database (PyIceberg's catalog name),
    /// `place` the database (text is a file: a path or `sqlite:` address), `warehouse` a folder on a disk or
    /// an object store, as path or URI.
    pub async fn open(
        name: &str,
        place: impl Into<DatabasePlace>,
        warehouse: &str,
        clock: Clock,
    ) -> Result<Self, CatalogError> {
        Ok(Self::on(CatalogDatabase::open(name, place.into()).await?, warehouse, clock))
    }

    /// Opens a catalog, creating a file and the two tables where they are missing.
    pub async fn create(
        name: &str,
        place: impl Into<DatabasePlace>,
        warehouse: &str,
        clock: Clock,
    ) -> Result<Self, CatalogError> {
        Ok(Self::on(CatalogDatabase::create(name, place.into()).await?, warehouse, clock))
    }

    fn on(database: CatalogDatabase, warehouse: &str, clock: Clock) -> Self {
        Self {
            database,
            warehouse: warehouse.trim_end_matches('/').to_owned(),
            file_io: file_io(StorageProperties::default()),
            clock,
            cache: Mutex::default(),
            hook: None,
        }
    }

    /// With settings for object stores.
    pub fn with_storage(mut self, settings: StorageProperties) -> Self {
        self.file_io = file_io(settings);
        self
    }

    /// For tests and the crash harness.
    pub fn with_hook(mut self, hook: Arc<dyn CommitHook>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// The table at `location`, from memory where it was loaded before.
    pub(super) async fn load_at(
        &self,
        table: &TableName,
        location: String,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        if let Some(loaded) = self.cache().get(table)
            && loaded.metadata_location == location
        {
            return Ok(loaded);
        }
        let (name, file_io) = (table.clone(), self.file_io.clone());
        let fetched = metadata_file::fetched(&file_io, &location).await;
        let loaded = off_runtime(move || {
            let bytes = fetched.and_then(|bytes| bytes.map_or_else(|| metadata_file::read(&location), Ok));
            let bytes = bytes.map_err(|error| unread(&name, &location, error))?;
            LoadedTable::parse(&name, &location, &bytes, file_io)
        })
        .await??;
        let loaded = Arc::new(loaded);
        self.cache().put(table.clone(), loaded.clone());
        Ok(loaded)
    }

    /// The pointer is not at the base: which requirement broke, if any.
    async fn explain_moved(
        &self,
        table: &TableName,
        location: String,
        needs: &[Requirement],
    ) -> CommitOutcome {
        match self.load_at(table, location).await {
            Ok(current) => match first_failed(&current.facts, needs) {
                Some(failed) => CommitOutcome::of_failed(failed),
                None => CommitOutcome::PointerMoved,
            },
            Err(error) => CommitOutcome::Refused(error),
        }
    }

    pub(super) async fn discard(&self, location: String) {
        if let Err(error) = metadata_file::discard(&self.file_io, &location).await {
            tracing::warn!(location, %error, "an unused metadata file could not be removed; nothing refers to it");
        }
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, TableCache<Arc<LoadedTable>>> {
        // The cache is a map of immutable values: a panic elsewhere cannot have left it half-changed.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Catalog for SqlCatalog {
    fn name(&self) -> &str {
        self.database.catalog()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            table_refs: true,
            ref_requirements: true,
            snapshot_removal: true,
            multi_table_commits: true,
            idempotency_keys: false,
            current_reads: true,
        }
    }

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        self.database.tables().await
    }

    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        match self.database.pointer(table).await? {
            Some(location) => self.load_at(table, location).await,
            None => Err(CatalogError::NotFound(table.clone())),
        }
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        let table = &base.facts.name;
        match self.database.pointer(table).await {
            Ok(Some(location)) if location == base.metadata_location => {}
            Ok(Some(location)) => return self.explain_moved(table, location, requirements).await,
            Ok(None) => return CommitOutcome::Refused(CatalogError::NotFound(table.clone())),
            Err(error) => return CommitOutcome::Refused(error),
        }
        if let Some(failed) = first_failed(&base.facts, requirements) {
            return CommitOutcome::of_failed(failed);
        }

        let (owned, now_ms, unique) = (base.clone(), (self.clock)(), Uuid::new_v4());
        let prepared = off_runtime(move || prepare(&owned, &updates, now_ms, unique)).await;
        let (landed, bytes) = match prepared {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(outcome)) => return outcome,
            Err(error) => return CommitOutcome::Refused(error),
        };
        if let Err(error) = metadata_file::put(&self.file_io, &landed.metadata_location, bytes).await {
            return CommitOutcome::Refused(file_error(table, &landed.metadata_location, error));
        }

        if let Some(hook) = &self.hook {
            hook.before_swap();
        }
        let swap = self.database.swap(table, &base.metadata_location, &landed.metadata_location).await;
        if let Some(hook) = &self.hook {
            hook.after_swap();
            if hook.loses_answer() {
                return CommitOutcome::Unknown("the answer was lost on purpose".to_owned());
            }
        }
        match swap {
            Swap::Done => {
                let landed = Arc::new(landed);
                self.cache().put(table.clone(), landed.clone());
                CommitOutcome::Landed(landed)
            }
            Swap::Stale => {
                self.discard(landed.metadata_location).await;
                CommitOutcome::PointerMoved
            }
            Swap::NotApplied(error) => {
                self.discard(landed.metadata_location).await;
                CommitOutcome::Refused(error)
            }
            // The catalog may point to the new file: it stays.
            Swap::Unknown(message) => CommitOutcome::Unknown(message),
        }
    }

    async fn create_scratch(
        &self,
        table: &TableName,
        definition: &TableDefinition,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        require_scratch(table)?;
        self.define_table(table, definition).await
    }

    async fn drop_scratch(&self, table: &LoadedTable) -> Result<(), CatalogError> {
        require_scratch(&table.facts.name)?;
        self.drop_table(&table.facts.name).await?;
        remove_scratch_files(table).await
    }

    async fn commit_set(&self, changes: &[TableChange]) -> SetOutcome {
        self.commit_to_all(changes).await
    }
}

/// Applies the updates and checks the result; with the bytes of its metadata file.
fn prepare(
    base: &LoadedTable,
    updates: &[Update],
    now_ms: i64,
    unique: Uuid,
) -> Result<(LoadedTable, Vec<u8>), CommitOutcome> {
    let applied = match base.document.apply(&base.facts, &base.metadata_location, updates, now_ms) {
        Ok(applied) => applied,
        // Another branch took the numbers since the candidates were made. The requirements hold, but the
        // candidates have to be made again, as when the table's structure changed.
        Err(
            error @ (DocumentError::StaleSequenceNumber { .. }
            | DocumentError::WrongRowIds { .. }
            | DocumentError::OtherFormat { .. }),
        ) => {
            return Err(CommitOutcome::TableChanged(error.to_string()));
        }
        Err(error) => return Err(CommitOutcome::Refused(CatalogError::Refused(error.to_string()))),
    };
    let table = &base.facts.name;
    let failed_at = |at: &str, error| CommitOutcome::Refused(file_error(table, at, error));
    let location = metadata_file::next_location(&base.metadata_location, &applied.facts, unique)
        .map_err(|e| failed_at(&applied.facts.location, e))?;
    let file_failed = |error: MetadataFileError| failed_at(&location, error);
    let codec = Codec::of(&applied.facts.properties).map_err(file_failed)?;
    let landed = base.after_commit(applied, location.clone()).map_err(CommitOutcome::Refused)?;
    let bytes = codec.encode(landed.document.to_bytes()).map_err(file_failed)?;
    Ok((landed, bytes))
}

/// Why a metadata file could not be written.
pub(super) fn file_error(table: &TableName, location: &str, error: MetadataFileError) -> CatalogError {
    match error {
        MetadataFileError::ReadOnly(_) => CatalogError::ReadOnly(format!("{location}: {error}")),
        MetadataFileError::Denied(_) => CatalogError::ReadOnly(format!("{location}: {error}")),
        MetadataFileError::NotLocal(_)
        | MetadataFileError::Place(_)
        | MetadataFileError::UnknownCodec(_)
        | MetadataFileError::TooLarge => {
            CatalogError::Unsupported { table: table.clone(), message: error.to_string() }
        }
        MetadataFileError::Missing | MetadataFileError::Io(_) | MetadataFileError::Store(_) => {
            CatalogError::Unavailable(format!("{location} could not be written: {error}"))
        }
    }
}

/// Why a metadata file could not be read.
fn unread(table: &TableName, location: &str, error: MetadataFileError) -> CatalogError {
    match error {
        // Nobody's fault, and nothing is wrong with the table.
        MetadataFileError::Denied(_) | MetadataFileError::Store(_) => {
            CatalogError::Unavailable(format!("{location} could not be read: {error}"))
        }
        MetadataFileError::Place(_) => {
            CatalogError::Unsupported { table: table.clone(), message: error.to_string() }
        }
        error => CatalogError::Unreadable {
            table: table.clone(),
            location: location.to_owned(),
            message: error.to_string(),
        },
    }
}
