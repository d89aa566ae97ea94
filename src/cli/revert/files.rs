//! What comes back: data files and deletes, written anew (rule D6).

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::stream::{self, StreamExt, TryStreamExt};
use mergeberg_kernel::change::{DeleteKey, FileContent, FileFact};
use mergeberg_kernel::inverse::Inverse;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::reason::ReasonCode;

use super::of_table;
use super::plan::Plan;
use crate::error::UserError;
use crate::table::data_file_copy::copy_data_file;
use crate::table::data_files::DataFileWriter;
use crate::table::deletes::{
    DeleteIndex, DeleteStore, NewDeleteFile, PositionDeleteWriter, RowsToDelete, VectorWriter,
};
use crate::table::error::TableError;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{FileScope, LiveFile, LiveFiles, ManifestStore};
use crate::table::scan::{RowReader, ScanCounters, ScanFile};
use crate::table::snapshot_writer::{AddedFile, FileAge};

/// Files copied at the same time.
const PARALLEL_COPIES: usize = 4;
/// First format version with deletion vectors.
const VECTORS_SINCE: u8 = 3;

/// Data files that hold again what the request removed.
pub struct Restored {
    pub files: Vec<AddedFile>,
}

impl Restored {
    /// Files of which no row was deleted are copied; of the others the rows that lived are written. What was
    /// written is deleted when it fails.
    pub async fn write(store: &ManifestStore, table: &LoadedTable, plan: &Plan) -> Result<Self, UserError> {
        let before = live_before(store, table, plan, &plan.inverse.restore).await?;
        let index = DeleteIndex::of(before.deletes).map_err(of_table)?;
        let wanted: BTreeSet<&Arc<str>> = plan.inverse.restore.iter().map(|file| &file.path).collect();
        let mut whole = Vec::new();
        let mut in_part = Vec::new();
        for file in before.data.into_iter().filter(|file| wanted.contains(&file.fact.path)) {
            let without = index.for_file(&file).map_err(of_table)?;
            let scan = ScanFile::whole(file);
            if without.is_empty() {
                whole.push(scan.file);
            } else {
                let mut scan = scan;
                scan.rows.without = without;
                in_part.push(scan);
            }
        }
        if whole.len() + in_part.len() < wanted.len() {
            let text = "a file that the request removed was not live before it";
            return Err(UserError::new(ReasonCode::Internal, text));
        }
        let mut restored = Self { files: Vec::new() };
        match restored.fill(table, &whole, in_part).await {
            Ok(()) => Ok(restored),
            Err(error) => {
                for file in &restored.files {
                    if let Err(left) = table.file_io.delete(&file.fact.path).await {
                        tracing::warn!(path = %file.fact.path, error = %left, "a file was left behind");
                    }
                }
                Err(match error {
                    TableError::Missing { path } => {
                        let text = format!("{path}, which the request removed, was deleted since");
                        UserError::new(ReasonCode::RevertImpossible, text)
                    }
                    error => of_table(error),
                })
            }
        }
    }

    async fn fill(
        &mut self,
        table: &LoadedTable,
        whole: &[LiveFile],
        in_part: Vec<ScanFile>,
    ) -> Result<(), TableError> {
        let mut copies =
            stream::iter(whole).map(|file| copy_data_file(table, file)).buffered(PARALLEL_COPIES);
        let mut failed = None;
        // To the end also when one failed: what was copied meanwhile must be known to be deleted.
        while let Some(copy) = copies.next().await {
            match copy {
                Ok(file) => self.files.push(file.into()),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if in_part.is_empty() {
            return Ok(());
        }
        self.files.extend(write_rows(table, &in_part).await?);
        Ok(())
    }
}

/// The chosen rows of data files as new files, with the ids that they had.
async fn write_rows(table: &LoadedTable, files: &[ScanFile]) -> Result<Vec<AddedFile>, TableError> {
    let schema = table.facts.current_schema_id;
    let reader = RowReader::new(table, schema)?.with_lineage()?;
    let columns: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
    let counters = Arc::new(ScanCounters::default());
    let mut streams = Vec::with_capacity(files.len());
    for file in files {
        streams.push(reader.read(file, &columns, &counters)?);
    }
    let files = DataFileWriter::write_again(table, schema, stream::iter(streams).flatten()).await?;
    Ok(files.into_iter().map(AddedFile::from).collect())
}

/// Deletes of rows whose data files stay: those that go, and new ones for those that come back.
#[derive(Default)]
pub struct Deletes {
    pub add: Vec<AddedFile>,
    pub remove: BTreeSet<DeleteKey>,
    /// Data files that are written again without the rows that deletes by value took: such a delete would hit more
    /// than it did if it came back itself.
    pub replace: BTreeSet<Arc<str>>,
    pub rows: Vec<AddedFile>,
}

impl Deletes {
    /// Paths of what was written for it.
    pub fn written(&self) -> impl Iterator<Item = Arc<str>> {
        self.add.iter().chain(&self.rows).map(|file| Arc::clone(&file.fact.path))
    }
}

pub async fn deletes(store: &ManifestStore, table: &LoadedTable, plan: &Plan) -> Result<Deletes, UserError> {
    let inverse = &plan.inverse;
    let mut deletes = Deletes::default();
    if !inverse.restore_deletes.is_empty() {
        let before = live_before(store, table, plan, &inverse.restore_deletes).await?;
        let scope = scope_of(&inverse.restore_deletes);
        let now = store.live_files(table, &plan.head, &scope).await.map_err(of_table)?;
        put_back(table, inverse, before, now, &mut deletes).await.map_err(of_table)?;
    }
    let gone: BTreeSet<&Arc<str>> =
        inverse.remove.iter().map(|file| &file.path).chain(&deletes.replace).collect();
    for delete in &inverse.remove_deletes {
        // A vector of a file that goes as a whole goes with it.
        let goes_along =
            matches!(&delete.content, FileContent::DeletionVector { of, .. } if gone.contains(of));
        if !goes_along {
            deletes.remove.insert(delete.key());
        }
    }
    Ok(deletes)
}

/// Of files that the request removed as well the rows that lived come back, so their deletes do not.
async fn put_back(
    table: &LoadedTable,
    inverse: &Inverse,
    before: LiveFiles,
    now: LiveFiles,
    deletes: &mut Deletes,
) -> Result<(), TableError> {
    let lost: BTreeSet<DeleteKey> = inverse.restore_deletes.iter().map(FileFact::key).collect();
    let lost = DeleteIndex::of(before.deletes.into_iter().filter(|d| lost.contains(&d.fact.key())))?;
    let going: BTreeSet<DeleteKey> = inverse.remove_deletes.iter().map(FileFact::key).collect();
    let staying = DeleteIndex::of(now.deletes.into_iter().filter(|d| !going.contains(&d.fact.key())))?;
    let known: BTreeSet<Arc<str>> = before.data.into_iter().map(|file| file.fact.path).collect();
    let store = DeleteStore::new(table.file_io.clone());
    let counters = ScanCounters::default();
    let (mut by_position, mut by_value) = (Vec::new(), Vec::new());
    for file in now.data.into_iter().filter(|file| known.contains(&file.fact.path)) {
        let missing = lost.for_file(&file)?;
        if !missing.equality.is_empty() {
            deletes.replace.insert(Arc::clone(&file.fact.path));
            let without = staying.for_file(&file)?.and(missing);
            let mut scan = ScanFile::whole(file);
            scan.rows.without = without;
            by_value.push(scan);
            continue;
        }
        let positions = store.positions_of(&file, &missing, &counters).await?;
        if !positions.is_empty() {
            by_position.push(RowsToDelete { data_file: file, positions });
        }
    }
    for NewDeleteFile { fact, file, spec_id } in write_deletes(table, &by_position).await? {
        deletes.add.push(AddedFile { fact, file, spec_id, age: FileAge::Inherited });
    }
    if !by_value.is_empty() {
        deletes.rows = write_rows(table, &by_value).await?;
    }
    Ok(())
}

async fn write_deletes(table: &LoadedTable, rows: &[RowsToDelete]) -> Result<Vec<NewDeleteFile>, TableError> {
    if table.facts.format_version >= VECTORS_SINCE {
        return VectorWriter::write(table, rows).await;
    }
    stream::iter(rows).then(|rows| PositionDeleteWriter::write(table, rows)).try_collect().await
}

/// What was live before the request in the partitions of these files.
async fn live_before(
    store: &ManifestStore,
    table: &LoadedTable,
    plan: &Plan,
    files: &[FileFact],
) -> Result<LiveFiles, UserError> {
    match &plan.before {
        Some(before) if !files.is_empty() => {
            store.described_files(table, before, &scope_of(files)).await.map_err(of_table)
        }
        _ => Ok(LiveFiles::default()),
    }
}

fn scope_of(files: &[FileFact]) -> FileScope {
    let partitions: BTreeSet<Arc<Partition>> = files.iter().map(|file| Arc::clone(&file.partition)).collect();
    FileScope::Partitions(partitions.into_iter().collect())
}
