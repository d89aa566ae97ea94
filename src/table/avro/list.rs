//! A manifest list of format v2 or v3 (table spec, "Manifest Lists").

use iceberg::spec::{ByteBuf, FieldSummary, ManifestContentType, ManifestFile};

use super::blocks::each_object;
use super::cursor::Cursor;
use super::header::AvroFile;
use super::header_cache::HeaderCache;
use super::schema::{Field, Node};
use super::{Unusual, Usual};

/// The entries of the list whose bytes these are.
pub(in crate::table) fn decode_list(bytes: &[u8], headers: &HeaderCache) -> Usual<Vec<ManifestFile>> {
    let file = AvroFile::parse(bytes).ok_or(Unusual)?;
    let schema = headers.list_schema(&file)?;
    let fields = schema.record()?;
    let mut entries = Vec::new();
    each_object(&file, |cursor| {
        entries.push(entry(cursor, fields)?);
        Ok(())
    })?;
    Ok(entries)
}

/// What has no default must be there; lists of format v1 lack some of it.
#[derive(Default)]
struct Entry {
    path: Option<String>,
    length: Option<i64>,
    spec_id: Option<i32>,
    content: Option<i32>,
    sequence_number: Option<i64>,
    min_sequence_number: Option<i64>,
    snapshot: Option<i64>,
    /// Files added, existing, deleted.
    files: [Option<u32>; 3],
    /// Rows added, existing, deleted.
    rows: [Option<u64>; 3],
    partitions: Option<Vec<FieldSummary>>,
    key_metadata: Option<Vec<u8>>,
    first_row_id: Option<u64>,
}

fn entry(cursor: &mut Cursor<'_>, fields: &[Field]) -> Usual<ManifestFile> {
    let mut entry = Entry::default();
    cursor.fields(fields, |cursor, Field { id, node, .. }| {
        match id.ok_or(Unusual)? {
            500 => entry.path = cursor.string(node)?.map(str::to_owned),
            501 => entry.length = cursor.long(node)?,
            502 => entry.spec_id = cursor.int(node)?,
            503 => entry.snapshot = cursor.long(node)?,
            504 => entry.files[0] = count(cursor, node)?,
            505 => entry.files[1] = count(cursor, node)?,
            506 => entry.files[2] = count(cursor, node)?,
            507 => entry.partitions = partitions(cursor, node)?,
            512 => entry.rows[0] = count(cursor, node)?,
            513 => entry.rows[1] = count(cursor, node)?,
            514 => entry.rows[2] = count(cursor, node)?,
            515 => entry.sequence_number = cursor.long(node)?,
            516 => entry.min_sequence_number = cursor.long(node)?,
            517 => entry.content = cursor.int(node)?,
            519 => entry.key_metadata = cursor.bytes(node)?.map(<[u8]>::to_vec),
            520 => entry.first_row_id = count(cursor, node)?,
            _ => cursor.skip(node)?,
        }
        Ok(())
    })?;
    let content = match entry.content.ok_or(Unusual)? {
        0 => ManifestContentType::Data,
        1 => ManifestContentType::Deletes,
        _ => return Err(Unusual),
    };
    let [added_files, existing_files, deleted_files] = entry.files;
    let [added_rows, existing_rows, deleted_rows] = entry.rows;
    Ok(ManifestFile {
        manifest_path: entry.path.ok_or(Unusual)?,
        manifest_length: entry.length.ok_or(Unusual)?,
        partition_spec_id: entry.spec_id.ok_or(Unusual)?,
        content,
        sequence_number: entry.sequence_number.ok_or(Unusual)?,
        min_sequence_number: entry.min_sequence_number.ok_or(Unusual)?,
        added_snapshot_id: entry.snapshot.ok_or(Unusual)?,
        added_files_count: Some(added_files.ok_or(Unusual)?),
        existing_files_count: Some(existing_files.ok_or(Unusual)?),
        deleted_files_count: Some(deleted_files.ok_or(Unusual)?),
        added_rows_count: Some(added_rows.ok_or(Unusual)?),
        existing_rows_count: Some(existing_rows.ok_or(Unusual)?),
        deleted_rows_count: Some(deleted_rows.ok_or(Unusual)?),
        partitions: entry.partitions,
        key_metadata: entry.key_metadata,
        first_row_id: entry.first_row_id,
    })
}

fn count<T: TryFrom<i64>>(cursor: &mut Cursor<'_>, node: &Node) -> Usual<Option<T>> {
    cursor.long(node)?.map(|value| T::try_from(value).map_err(|_| Unusual)).transpose()
}

fn partitions(cursor: &mut Cursor<'_>, node: &Node) -> Usual<Option<Vec<FieldSummary>>> {
    let mut summaries = Vec::new();
    let there = cursor.items(node, |cursor, item| {
        let mut contains_null = None;
        let mut summary = FieldSummary::default();
        cursor.fields(item.record()?, |cursor, Field { id, node, .. }| {
            match id.ok_or(Unusual)? {
                509 => contains_null = cursor.boolean(node)?,
                510 => summary.lower_bound = cursor.bytes(node)?.map(ByteBuf::from),
                511 => summary.upper_bound = cursor.bytes(node)?.map(ByteBuf::from),
                518 => summary.contains_nan = cursor.boolean(node)?,
                _ => cursor.skip(node)?,
            }
            Ok(())
        })?;
        summary.contains_null = contains_null.ok_or(Unusual)?;
        summaries.push(summary);
        Ok(())
    })?;
    Ok(there.then_some(summaries))
}
