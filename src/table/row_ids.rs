//! Row ids of format v3 (table spec, "Row Lineage", "First Row ID Inheritance"; rule N2).
//!
//! A manifest list gives each data manifest a first id; a file without one of its own takes the manifest's,
//! plus the rows of the files before it that have none either. Which id a manifest has depends on the list:
//! two branches of an upgraded table number the same manifest differently. So decoded manifests, which are
//! shared by all lists, keep what the file says, and ids are worked out here when entries are written again.

use std::sync::Arc;

use iceberg::spec::{DataFile, ManifestContentType, ManifestFile, ManifestStatus};

use super::error::TableError;
use super::file_copy;
use super::manifest_codec::Entry;
use super::manifest_rewrite::Author;
use super::manifests::ManifestFiles;

/// The first row ids of the entries of a manifest, as its list gives them; `None` where rows have no ids.
///
/// DELETED entries take no id and use up none, as in Java's `ManifestReader`; what they have is kept.
pub(super) fn first_row_ids(
    manifest: &ManifestFile,
    entries: &[Entry],
) -> Result<Vec<Option<i64>>, TableError> {
    let overflow = || TableError::corrupt(&manifest.manifest_path, "its row ids are out of range");
    // A manifest without ids has none in its entries, whatever they say (Java: `idAssigner`).
    let (ManifestContentType::Data, Some(first)) = (manifest.content, manifest.first_row_id) else {
        return Ok(vec![None; entries.len()]);
    };
    let mut next = i64::try_from(first).map_err(|_| overflow())?;
    let mut ids = Vec::with_capacity(entries.len());
    for entry in entries {
        ids.push(match (entry.status, entry.file.first_row_id()) {
            (ManifestStatus::Deleted, own) | (_, own @ Some(_)) => own,
            (ManifestStatus::Added | ManifestStatus::Existing, None) => {
                let first = next;
                next = first.checked_add(entry.fact.records).ok_or_else(overflow)?;
                Some(first)
            }
        });
    }
    Ok(ids)
}

/// The entries of a manifest with their first row ids written out. Entries of a manifest that `author` itself
/// wrote are as they should be: it is numbered only when the list is made.
pub(super) fn resolved(
    manifest: &ManifestFile,
    entries: &[Entry],
    author: Author,
) -> Result<Vec<Entry>, TableError> {
    if manifest.added_snapshot_id == author.snapshot.0 {
        return Ok(entries.to_vec());
    }
    let mut numbered = Vec::with_capacity(entries.len());
    for (entry, id) in entries.iter().zip(first_row_ids(manifest, entries)?) {
        let file = with_first_row_id(&entry.file, id, manifest.partition_spec_id)?;
        numbered.push(Entry { file, ..entry.clone() });
    }
    Ok(numbered)
}

/// Gives ids to the data manifests of a list that have none, in its order, from `first` on; the id after the
/// last. Rows that have ids already count too, as in Java's `ManifestListWriter`: ids may be left out, but
/// never given twice.
pub(super) fn assign(manifests: &mut ManifestFiles, first: i64) -> Result<i64, TableError> {
    let mut next = first;
    for manifest in manifests.iter_mut() {
        if manifest.content == ManifestContentType::Deletes || manifest.first_row_id.is_some() {
            continue;
        }
        let corrupt = |what: &str| TableError::corrupt(&manifest.manifest_path, what);
        let (Some(added), Some(existing)) = (manifest.added_rows_count, manifest.existing_rows_count) else {
            return Err(corrupt("the manifest list does not say how many rows it has"));
        };
        let rows = added.checked_add(existing).and_then(|rows| i64::try_from(rows).ok());
        let after = rows.and_then(|rows| next.checked_add(rows));
        let after = after.ok_or_else(|| corrupt("its row ids would be out of range"))?;
        let first_row_id = u64::try_from(next).ok();
        *manifest = Arc::new(ManifestFile { first_row_id, ..manifest.as_ref().clone() });
        next = after;
    }
    Ok(next)
}

/// The same file under another first row id; `None` is written as null. A file that is added again must have
/// none: it takes new ids where its rows do not carry theirs (Java: `suppressFirstRowId`).
pub(super) fn with_first_row_id(
    file: &Arc<DataFile>,
    id: Option<i64>,
    spec_id: i32,
) -> Result<Arc<DataFile>, TableError> {
    if file.first_row_id() == id {
        return Ok(file.clone());
    }
    let mut builder = file_copy::builder_of(file, spec_id);
    builder.first_row_id(id);
    let renumbered = file_copy::build(&builder, file)?;
    Ok(Arc::new(renumbered))
}
