//! Manifest lists written: the last file of a candidate.

use std::sync::Arc;

use iceberg::io::FileIO;
use iceberg::spec::{FormatVersion, ManifestFile, ManifestListWriter};
use mergeberg_kernel::ids::SnapshotId;
use tokio::runtime::Handle;

use super::avro::Unusual;
use super::avro::encode_list::ListOf;
use super::error::TableError;
use super::manifests::{ManifestFiles, ManifestStore, TableAccess};

/// Where a list is written in memory first.
const SCRATCH: &str = "memory:///list.avro";

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

/// Writes the list and gives it to the store.
pub(super) async fn write(
    store: &ManifestStore,
    access: &TableAccess,
    list: ListPlan,
) -> Result<(), TableError> {
    let path = list.path.clone();
    let file_io = access.file_io.clone();
    let version = access.metadata.format_version();
    let handle = Handle::current();
    let templates = Arc::clone(store.list_templates());
    let manifests = tokio::task::spawn_blocking(move || {
        let ListPlan { path, snapshot, parent, sequence_number, first_row_id, manifests } = list;
        let of = ListOf {
            version,
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
        match templates.encode(&of, entries, empty).map_err(failed)? {
            Ok(bytes) => {
                handle
                    .block_on(async { file_io.new_output(&path)?.write(bytes.into()).await })
                    .map_err(failed)?;
            }
            Err(Unusual) => {
                handle.block_on(by_the_crate(&file_io, &path, &of, &manifests)).map_err(failed)?
            }
        }
        Ok::<_, TableError>(manifests)
    })
    .await
    .map_err(|e| TableError::of_join(&path, e))??;
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
