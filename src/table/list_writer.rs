//! Manifest lists written: the last file of a candidate.

use iceberg::spec::{FormatVersion, ManifestListWriter};
use mergeberg_kernel::ids::SnapshotId;
use tokio::runtime::Handle;

use super::error::TableError;
use super::manifests::{ManifestFiles, ManifestStore, TableAccess};

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
    let manifests = tokio::task::spawn_blocking(move || {
        let ListPlan { path, snapshot, parent, sequence_number, first_row_id, manifests } = list;
        let (id, parent) = (snapshot.0, parent.map(|id| id.0));
        let first_row_id = first_row_id.and_then(|id| u64::try_from(id).ok());
        let write = async {
            let output = file_io.new_output(&path)?.writer().await?;
            let mut writer = match version {
                FormatVersion::V3 => {
                    ManifestListWriter::v3(output, id, parent, sequence_number, first_row_id)
                }
                FormatVersion::V1 | FormatVersion::V2 => {
                    ManifestListWriter::v2(output, id, parent, sequence_number)
                }
            };
            writer.add_manifests(manifests.iter().map(|manifest| manifest.as_ref().clone()))?;
            writer.close().await
        };
        handle.block_on(write).map(|()| manifests).map_err(|e: iceberg::Error| TableError::of_write(&path, e))
    })
    .await
    .map_err(|e| TableError::of_join(&path, e))??;
    store.keep_list(&path, manifests);
    Ok(())
}
