//! Manifest lists of format v2 and v3 written in one pass (table spec, "Manifest Lists").
//!
//! Every snapshot has a list of its own that names all manifests of the table, so a train writes thousands of entries.
//! As with manifests, the crate writes the header once; what it says of the snapshot is replaced.

use std::sync::{Arc, Mutex, PoisonError};

use iceberg::spec::{FieldSummary, FormatVersion, ManifestContentType, ManifestFile};

use super::encode::BLOCK_BYTES;
use super::header::{AvroFile, SYNC_BYTES};
use super::put::{boolean, end_block, length, long, out_of, raw, text, varint};
use super::schema::{Field, Node};
use super::{Unusual, Usual};

/// What a list's header says of its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::table) struct ListOf {
    pub version: FormatVersion,
    pub snapshot: i64,
    pub parent: Option<i64>,
    pub sequence_number: i64,
    /// Format v3: where the snapshot's row ids begin.
    pub first_row_id: Option<u64>,
}

/// A list without entries, and its schema.
#[derive(Debug)]
struct Template {
    empty: Vec<u8>,
    avro: Node,
}

impl Template {
    fn of(empty: Vec<u8>) -> Usual<Self> {
        let file = AvroFile::parse(&empty).ok_or(Unusual)?;
        if !matches!(file.get("avro.codec"), None | Some(b"null")) || file.rest().len() != SYNC_BYTES {
            return Err(Unusual);
        }
        let avro = Node::parse(file.get("avro.schema").ok_or(Unusual)?)?;
        avro.record()?;
        Ok(Self { empty, avro })
    }
}

/// Headers by format version; `None`: one that is unusual.
#[derive(Debug, Default)]
pub(in crate::table) struct ListTemplates(Mutex<Vec<(FormatVersion, Option<Arc<Template>>)>>);

impl ListTemplates {
    /// The bytes of a list with these manifests, which have all their numbers. `make` gives one without any.
    pub fn encode<'a, E>(
        &self,
        of: &ListOf,
        manifests: impl Iterator<Item = &'a ManifestFile>,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Usual<Vec<u8>>, E> {
        // Complete when they are put in: a panic elsewhere cannot have left one half-made.
        let locked = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = locked().iter().find(|(version, _)| *version == of.version).map(|(_, made)| made.clone());
        let template = match known {
            Some(template) => template,
            None => {
                let made = Template::of(make()?).ok().map(Arc::new);
                locked().push((of.version, made.clone()));
                made
            }
        };
        Ok(template.ok_or(Unusual).and_then(|template| encode(&template, of, manifests)))
    }
}

fn encode<'a>(
    template: &Template,
    of: &ListOf,
    manifests: impl Iterator<Item = &'a ManifestFile>,
) -> Usual<Vec<u8>> {
    let mut file = AvroFile::parse(&template.empty).ok_or(Unusual)?;
    let or_null = |number: Option<String>| number.unwrap_or_else(|| "null".to_owned()).into_bytes();
    file.replace("snapshot-id", of.snapshot.to_string().into_bytes());
    file.replace("parent-snapshot-id", or_null(of.parent.map(|id| id.to_string())));
    file.replace("sequence-number", of.sequence_number.to_string().into_bytes());
    file.replace("first-row-id", or_null(of.first_row_id.map(|id| id.to_string())));
    let (sync, mut bytes) = (file.rest(), file.to_bytes());
    let fields = template.avro.record()?;
    let (mut block, mut in_block) = (Vec::new(), 0_i64);
    for manifest in manifests {
        require_numbers(of, manifest)?;
        entry(&mut block, fields, manifest)?;
        in_block += 1;
        if block.len() >= BLOCK_BYTES {
            end_block(&mut bytes, &mut block, &mut in_block, sync)?;
        }
    }
    end_block(&mut bytes, &mut block, &mut in_block, sync)?;
    Ok(bytes)
}

/// What is still to be given a number, the crate numbers.
fn require_numbers(of: &ListOf, manifest: &ManifestFile) -> Usual<()> {
    if manifest.sequence_number < 0 || manifest.min_sequence_number < 0 {
        return Err(Unusual);
    }
    let numbered = match (of.version, manifest.content) {
        (FormatVersion::V1, _) => false,
        (FormatVersion::V2, _) => true,
        (FormatVersion::V3, ManifestContentType::Data) => {
            manifest.first_row_id.is_some() == of.first_row_id.is_some()
        }
        (FormatVersion::V3, ManifestContentType::Deletes) => manifest.first_row_id.is_none(),
    };
    if numbered { Ok(()) } else { Err(Unusual) }
}

fn entry(out: &mut Vec<u8>, fields: &[Field], manifest: &ManifestFile) -> Usual<()> {
    let files = |count: Option<u32>| count.map(i64::from).ok_or(Unusual).map(Some);
    let rows = |count: Option<u64>| i64::try_from(count.ok_or(Unusual)?).map_err(|_| Unusual).map(Some);
    for Field { id, node, .. } in fields {
        match id.ok_or(Unusual)? {
            500 => text(out, node, Some(&manifest.manifest_path))?,
            501 => long(out, node, Some(manifest.manifest_length))?,
            502 => long(out, node, Some(i64::from(manifest.partition_spec_id)))?,
            503 => long(out, node, Some(manifest.added_snapshot_id))?,
            504 => long(out, node, files(manifest.added_files_count)?)?,
            505 => long(out, node, files(manifest.existing_files_count)?)?,
            506 => long(out, node, files(manifest.deleted_files_count)?)?,
            507 => partitions(out, node, manifest.partitions.as_deref())?,
            512 => long(out, node, rows(manifest.added_rows_count)?)?,
            513 => long(out, node, rows(manifest.existing_rows_count)?)?,
            514 => long(out, node, rows(manifest.deleted_rows_count)?)?,
            515 => long(out, node, Some(manifest.sequence_number))?,
            516 => long(out, node, Some(manifest.min_sequence_number))?,
            517 => long(out, node, Some(manifest.content as i64))?,
            519 => raw(out, node, manifest.key_metadata.as_deref())?,
            520 => {
                let first = manifest.first_row_id.map(i64::try_from).transpose().map_err(|_| Unusual)?;
                long(out, node, first)?;
            }
            _ => return Err(Unusual),
        }
    }
    Ok(())
}

fn partitions(out: &mut Vec<u8>, node: &Node, summaries: Option<&[FieldSummary]>) -> Usual<()> {
    let Some(branch) = out_of(out, node, summaries.is_some())? else { return Ok(()) };
    let (Node::Array(item), Some(summaries)) = (branch, summaries) else { return Err(Unusual) };
    if !summaries.is_empty() {
        length(out, summaries.len())?;
    }
    for summary in summaries {
        for Field { id, node, .. } in item.record()? {
            match id.ok_or(Unusual)? {
                509 => boolean(out, node, Some(summary.contains_null))?,
                518 => boolean(out, node, summary.contains_nan)?,
                510 => raw(out, node, summary.lower_bound.as_ref().map(|bound| bound.as_ref()))?,
                511 => raw(out, node, summary.upper_bound.as_ref().map(|bound| bound.as_ref()))?,
                _ => return Err(Unusual),
            }
        }
    }
    varint(out, 0);
    Ok(())
}

#[cfg(test)]
#[path = "encode_list_tests.rs"]
mod tests;
