//! Manifest lists written: the last file of a candidate.

use std::sync::Arc;

use futures::stream::{self, StreamExt};
use iceberg::io::FileIO;
use iceberg::spec::{FormatVersion, ManifestFile, ManifestListWriter};
use mergeberg_kernel::ids::SnapshotId;
use tokio::runtime::Handle;

use super::avro::Unusual;
use super::avro::encode_list::ListOf;
use super::error::TableError;
use super::local;
use super::manifests::{ManifestFiles, ManifestStore, TableAccess, on_blocking_thread};

/// Where a list is written in memory first.
const SCRATCH: &str = "memory:///list.avro";

/// Lists, or groups of them, written at the same time.
const PARALLEL_WRITES: usize = 8;

/// A manifest list to be written.
pub(super) struct ListPlan {
    pub path: String,
    pub snapshot: SnapshotId,
    pub parent: Option<SnapshotId>,
    pub sequence_number: i64,
    /// Format v3: where the snapshot's row ids begin.
    pub first_row_id: Option<i64>,
    /// With all their numbers.
    pub manifests: ManifestFiles,
}

/// Writes the lists, each as it comes, and gives them to the store.
pub(super) async fn write(
    store: &ManifestStore,
    access: &TableAccess,
    lists: Vec<ListPlan>,
) -> Result<(), TableError> {
    let is_local = lists.iter().all(|list| local::path_of(&list.path).is_some());
    let groups: Vec<Vec<ListPlan>> = if is_local && store.list_templates().is_some() {
        local::groups(lists, |list| list.manifests.len()).collect()
    } else {
        // Each waits for an answer of its own, or takes the crate longer than the way to another thread.
        lists.into_iter().map(|list| vec![list]).collect()
    };
    let writes = groups.into_iter().map(|group| write_group(store, access, group));
    // All are waited for: a thread goes on writing when nobody waits for it, and who deletes what was written after a
    // failure must not come before that.
    let results: Vec<Result<(), TableError>> = stream::iter(writes).buffered(PARALLEL_WRITES).collect().await;
    results.into_iter().collect()
}

/// One after the other, on one thread.
async fn write_group(
    store: &ManifestStore,
    access: &TableAccess,
    lists: Vec<ListPlan>,
) -> Result<(), TableError> {
    let first = lists.first().map(|list| list.path.clone()).unwrap_or_default();
    let (store, access, handle) = (store.clone(), access.clone(), Handle::current());
    on_blocking_thread(&first, move || {
        for list in lists {
            write_blocking(&handle, &store, &access, list)?;
        }
        Ok(())
    })
    .await?
}

fn write_blocking(
    handle: &Handle,
    store: &ManifestStore,
    access: &TableAccess,
    list: ListPlan,
) -> Result<(), TableError> {
    let ListPlan { path, snapshot, parent, sequence_number, first_row_id, manifests } = list;
    let of = ListOf {
        version: access.metadata.format_version(),
        snapshot: snapshot.0,
        parent: parent.map(|id| id.0),
        sequence_number,
        first_row_id: first_row_id.and_then(|id| u64::try_from(id).ok()),
    };
    let failed = |error: iceberg::Error| TableError::of_write(&path, error);
    let empty = || {
        let scratch = FileIO::new_with_memory();
        handle.block_on(by_the_crate(&scratch, SCRATCH, &of, &[]))?;
        handle.block_on(async { scratch.new_input(SCRATCH)?.read().await }).map(|bytes| bytes.to_vec())
    };
    let entries = manifests.iter().map(AsRef::as_ref);
    let file_io = &access.file_io;
    let encoded = match store.list_templates() {
        Some(templates) => templates.encode(&of, entries, empty).map_err(failed)?,
        None => Err(Unusual),
    };
    match encoded {
        Ok(bytes) => {
            handle.block_on(async { file_io.new_output(&path)?.write(bytes.into()).await }).map_err(failed)?
        }
        Err(Unusual) => handle.block_on(by_the_crate(file_io, &path, &of, &manifests)).map_err(failed)?,
    }
    store.keep_list(&path, manifests);
    Ok(())
}

async fn by_the_crate(
    file_io: &FileIO,
    path: &str,
    of: &ListOf,
    manifests: &[Arc<ManifestFile>],
) -> Result<(), iceberg::Error> {
    let output = file_io.new_output(path)?.writer().await?;
    let ListOf { version, snapshot, parent, sequence_number, first_row_id } = *of;
    let mut writer = match version {
        FormatVersion::V3 => ManifestListWriter::v3(output, snapshot, parent, sequence_number, first_row_id),
        FormatVersion::V1 | FormatVersion::V2 => {
            ManifestListWriter::v2(output, snapshot, parent, sequence_number)
        }
    };
    writer.add_manifests(manifests.iter().map(|manifest| manifest.as_ref().clone()))?;
    writer.close().await
}
