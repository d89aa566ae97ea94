//! Manifests of format v2 and v3 written in one pass (table spec, "Manifests").
//!
//! The crate makes the Avro schema of a manifest anew for every file and a tree of values for every entry; a train of
//! fifty writes a hundred such files, and a merge of manifests thousands of entries. Here the crate writes the header
//! once, without entries, and it is put before entries that are written straight from what they hold.
//!
//! As in reading, only the usual is written here: what is [`Unusual`], the crate writes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use iceberg::spec::{
    DataContentType, DataFile, Datum, FieldSummary, FormatVersion, Literal, ManifestContentType,
    ManifestFile, ManifestStatus, PartitionSpec, PrimitiveLiteral, PrimitiveType, SchemaRef, Struct,
    StructType,
};

use super::header::{AvroFile, SYNC_BYTES};
use super::header_cache::is_plain;
use super::put::{end_block, length, long, out_of, raw, sized, text, varint};
use super::schema::{Field, Node};
use super::{Unusual, Usual};

/// Headers kept; when there are more, all are forgotten and made again.
const MAX_TEMPLATES: usize = 32;
/// A block is ended when it has become so long, as in Java.
pub(super) const BLOCK_BYTES: usize = 64 * 1024;
/// What the crate has for a number that its list gives.
const UNASSIGNED: i64 = -1;

/// What the header of a manifest is made of.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) struct HeaderOf {
    pub version: FormatVersion,
    pub content: ManifestContentType,
    pub schema: SchemaRef,
    pub spec: PartitionSpec,
}

/// A manifest without entries.
#[derive(Debug)]
pub(in crate::table) struct Template {
    /// Up to the first block, sync marker included.
    head: Vec<u8>,
    sync: [u8; SYNC_BYTES],
    avro: Node,
    types: StructType,
    spec_id: i32,
    content: ManifestContentType,
}

impl Template {
    /// `empty` is a manifest of this kind without entries.
    pub fn of(kind: &HeaderOf, empty: &[u8]) -> Usual<Self> {
        let file = AvroFile::parse(empty).ok_or(Unusual)?;
        if !matches!(file.get("avro.codec"), None | Some(b"null")) || kind.version == FormatVersion::V1 {
            return Err(Unusual);
        }
        let sync = *file.rest().first_chunk::<SYNC_BYTES>().ok_or(Unusual)?;
        if file.rest().len() != SYNC_BYTES {
            return Err(Unusual);
        }
        let types = kind.spec.partition_type(&kind.schema).map_err(|_| Unusual)?;
        if !types.fields().iter().all(|field| is_plain(&field.field_type)) {
            return Err(Unusual);
        }
        let avro = Node::parse(file.get("avro.schema").ok_or(Unusual)?)?;
        avro.record()?;
        let (spec_id, content) = (kind.spec.spec_id(), kind.content);
        Ok(Self { head: empty.to_vec(), sync, avro, types, spec_id, content })
    }
}

/// Headers that were made; `None`: one that is unusual.
#[derive(Debug, Default)]
pub(in crate::table) struct Templates(Mutex<Vec<(HeaderOf, Option<Arc<Template>>)>>);

impl Templates {
    /// `make` gives a manifest of this kind without entries.
    pub fn get<E>(
        &self,
        kind: &HeaderOf,
        make: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Usual<Arc<Template>>, E> {
        // Complete when they are put in: a panic elsewhere cannot have left one half-made.
        let locked = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = locked().iter().find(|(known, _)| known == kind).map(|(_, made)| made.clone());
        let made = match known {
            Some(made) => made,
            None => {
                let made = Template::of(kind, &make()?).ok().map(Arc::new);
                let mut all = locked();
                if all.len() >= MAX_TEMPLATES {
                    all.clear();
                }
                all.push((kind.clone(), made.clone()));
                made
            }
        };
        Ok(made.ok_or(Unusual))
    }
}

/// An entry to be written: `None` for what is inherited.
#[derive(Clone, Copy, Debug)]
pub(in crate::table) struct WrittenEntry<'a> {
    pub status: ManifestStatus,
    pub snapshot_id: i64,
    pub sequence_number: Option<i64>,
    pub file_sequence_number: Option<i64>,
    pub file: &'a DataFile,
}

/// The bytes of a manifest with these entries, and what a list says of it. `snapshot_id` is who writes it.
pub(in crate::table) fn encode_manifest<'a>(
    template: &Template,
    path: &str,
    snapshot_id: i64,
    entries: impl Iterator<Item = WrittenEntry<'a>>,
) -> Usual<(Vec<u8>, ManifestFile)> {
    let fields = template.avro.record()?;
    let mut bytes = template.head.clone();
    let (mut block, mut in_block) = (Vec::new(), 0_i64);
    let mut tally = Tally::new(&template.types)?;
    for written in entries {
        tally.add(&written, template)?;
        entry(&mut block, fields, &written, &template.types)?;
        in_block += 1;
        if block.len() >= BLOCK_BYTES {
            end_block(&mut bytes, &mut block, &mut in_block, &template.sync)?;
        }
    }
    end_block(&mut bytes, &mut block, &mut in_block, &template.sync)?;
    let listed = tally.listed(template, path, snapshot_id, bytes.len())?;
    Ok((bytes, listed))
}

/// What a manifest list says of a manifest (table spec, "Manifest Lists").
struct Tally {
    /// Files and rows.
    added: (u32, u64),
    existing: (u32, u64),
    deleted: (u32, u64),
    min_sequence_number: Option<i64>,
    partitions: Vec<Summary>,
}

#[derive(Clone, Default)]
struct Summary {
    contains_null: bool,
    ends: Option<(PrimitiveLiteral, PrimitiveLiteral)>,
}

impl Tally {
    fn new(types: &StructType) -> Usual<Self> {
        // Fractions have NaN and two zeros, which the crate orders.
        let is_fraction = |of: &PrimitiveType| matches!(of, PrimitiveType::Float | PrimitiveType::Double);
        if types.fields().iter().any(|field| field.field_type.as_primitive_type().is_none_or(is_fraction)) {
            return Err(Unusual);
        }
        Ok(Self {
            added: (0, 0),
            existing: (0, 0),
            deleted: (0, 0),
            min_sequence_number: None,
            partitions: vec![Summary::default(); types.fields().len()],
        })
    }

    fn add(&mut self, entry: &WrittenEntry<'_>, template: &Template) -> Usual<()> {
        let is_data = entry.file.content_type() == DataContentType::Data;
        if is_data != (template.content == ManifestContentType::Data) {
            return Err(Unusual);
        }
        let is_live = match entry.status {
            ManifestStatus::Added | ManifestStatus::Existing => true,
            ManifestStatus::Deleted => false,
        };
        let (files, rows) = match entry.status {
            ManifestStatus::Added => &mut self.added,
            ManifestStatus::Existing => &mut self.existing,
            ManifestStatus::Deleted => &mut self.deleted,
        };
        *files = files.checked_add(1).ok_or(Unusual)?;
        *rows = rows.checked_add(entry.file.record_count()).ok_or(Unusual)?;
        if let Some(number) = entry.sequence_number.filter(|_| is_live) {
            self.min_sequence_number =
                Some(self.min_sequence_number.map_or(number, |least| least.min(number)));
        }
        let tuple = entry.file.partition();
        if tuple.fields().len() != self.partitions.len() {
            return Err(Unusual);
        }
        for (value, summary) in tuple.iter().zip(&mut self.partitions) {
            let Some(value) = value else {
                summary.contains_null = true;
                continue;
            };
            let value = value.as_primitive_literal().ok_or(Unusual)?;
            match &mut summary.ends {
                Some((lowest, highest)) => {
                    if value < *lowest {
                        *lowest = value;
                    } else if value > *highest {
                        *highest = value;
                    }
                }
                ends => *ends = Some((value.clone(), value)),
            }
        }
        Ok(())
    }

    fn listed(self, template: &Template, path: &str, snapshot_id: i64, bytes: usize) -> Usual<ManifestFile> {
        let mut partitions = Vec::with_capacity(self.partitions.len());
        for Summary { contains_null, ends } in self.partitions {
            let (lower_bound, upper_bound) = match ends {
                Some((lowest, highest)) => (Some(bound(&lowest)?.into()), Some(bound(&highest)?.into())),
                None => (None, None),
            };
            partitions.push(FieldSummary {
                contains_null,
                contains_nan: Some(false),
                lower_bound,
                upper_bound,
            });
        }
        Ok(ManifestFile {
            manifest_path: path.to_owned(),
            manifest_length: i64::try_from(bytes).map_err(|_| Unusual)?,
            partition_spec_id: template.spec_id,
            content: template.content,
            sequence_number: UNASSIGNED,
            min_sequence_number: self.min_sequence_number.unwrap_or(UNASSIGNED),
            added_snapshot_id: snapshot_id,
            added_files_count: Some(self.added.0),
            existing_files_count: Some(self.existing.0),
            deleted_files_count: Some(self.deleted.0),
            added_rows_count: Some(self.added.1),
            existing_rows_count: Some(self.existing.1),
            deleted_rows_count: Some(self.deleted.1),
            partitions: Some(partitions),
            key_metadata: None,
            first_row_id: None,
        })
    }
}

/// Table spec, "Appendix D: Single-value serialization", "Binary single-value serialization".
fn bound(value: &PrimitiveLiteral) -> Usual<Vec<u8>> {
    Ok(match value {
        PrimitiveLiteral::Boolean(value) => vec![u8::from(*value)],
        PrimitiveLiteral::Int(value) => value.to_le_bytes().to_vec(),
        PrimitiveLiteral::Long(value) => value.to_le_bytes().to_vec(),
        PrimitiveLiteral::String(value) => value.as_bytes().to_vec(),
        PrimitiveLiteral::Binary(value) => value.clone(),
        _ => return Err(Unusual),
    })
}

fn entry(out: &mut Vec<u8>, fields: &[Field], entry: &WrittenEntry<'_>, types: &StructType) -> Usual<()> {
    for Field { id, node, .. } in fields {
        match id.ok_or(Unusual)? {
            0 => long(out, node, Some(entry.status as i64))?,
            1 => long(out, node, Some(entry.snapshot_id))?,
            2 => {
                let inner = out_of(out, node, true)?.ok_or(Unusual)?;
                data_file(out, inner.record()?, entry.file, types)?;
            }
            3 => long(out, node, entry.sequence_number)?,
            4 => long(out, node, entry.file_sequence_number)?,
            _ => return Err(Unusual),
        }
    }
    Ok(())
}

fn data_file(out: &mut Vec<u8>, fields: &[Field], file: &DataFile, types: &StructType) -> Usual<()> {
    let number = |count: u64| i64::try_from(count).map(Some).map_err(|_| Unusual);
    for Field { id, node, .. } in fields {
        match id.ok_or(Unusual)? {
            100 => text(out, node, Some(file.file_path()))?,
            101 => text(out, node, Some(&file.file_format().to_string().to_ascii_uppercase()))?,
            102 => {
                let inner = out_of(out, node, true)?.ok_or(Unusual)?;
                tuple(out, inner.record()?, file.partition(), types)?;
            }
            103 => long(out, node, number(file.record_count())?)?,
            104 => long(out, node, number(file.file_size_in_bytes())?)?,
            108 => counts(out, node, file.column_sizes())?,
            109 => counts(out, node, file.value_counts())?,
            110 => counts(out, node, file.null_value_counts())?,
            137 => counts(out, node, file.nan_value_counts())?,
            125 => bounds(out, node, file.lower_bounds())?,
            128 => bounds(out, node, file.upper_bounds())?,
            131 => raw(out, node, file.key_metadata())?,
            132 => numbers(out, node, file.split_offsets().map(<[i64]>::to_vec))?,
            134 => long(out, node, Some(file.content_type() as i64))?,
            135 => {
                let ids = file.equality_ids().map(|ids| ids.into_iter().map(i64::from).collect());
                numbers(out, node, ids)?;
            }
            140 => long(out, node, file.sort_order_id().map(i64::from))?,
            142 => long(out, node, file.first_row_id())?,
            143 => text(out, node, file.referenced_data_file().as_deref())?,
            144 => long(out, node, file.content_offset())?,
            145 => long(out, node, file.content_size_in_bytes())?,
            _ => return Err(Unusual),
        }
    }
    Ok(())
}

/// The partition tuple, whose values are in the order of the spec.
fn tuple(out: &mut Vec<u8>, fields: &[Field], values: &Struct, types: &StructType) -> Usual<()> {
    if fields.len() != types.fields().len() {
        return Err(Unusual);
    }
    for Field { id, node, .. } in fields {
        let id = id.ok_or(Unusual)?;
        let at = types.fields().iter().position(|typed| typed.id == id).ok_or(Unusual)?;
        let typed =
            types.fields().get(at).and_then(|typed| typed.field_type.as_primitive_type()).ok_or(Unusual)?;
        let value = values.iter().nth(at).ok_or(Unusual)?;
        let Some(node) = out_of(out, node, value.is_some())? else { continue };
        let Some(Literal::Primitive(value)) = value else { return Err(Unusual) };
        literal(out, node, value, typed)?;
    }
    Ok(())
}

/// A value that is there, for the types of `header_cache::is_plain`.
fn literal(out: &mut Vec<u8>, node: &Node, value: &PrimitiveLiteral, of: &PrimitiveType) -> Usual<()> {
    use PrimitiveLiteral as Value;
    use PrimitiveType as Type;
    match (of, node, value) {
        (Type::Boolean, Node::Boolean, Value::Boolean(value)) => out.push(u8::from(*value)),
        (Type::Int | Type::Date, Node::Int, Value::Int(value)) => varint(out, i64::from(*value)),
        (Type::Long | Type::Time | Type::Timestamp | Type::Timestamptz, Node::Long, Value::Long(value)) => {
            varint(out, *value);
        }
        (Type::String, Node::String, Value::String(value)) => sized(out, value.as_bytes())?,
        (Type::Binary, Node::Bytes, Value::Binary(value)) => sized(out, value)?,
        _ => return Err(Unusual),
    }
    Ok(())
}

/// A map with integer keys: an array of records of key and value, here in the order of keys.
fn pairs<T>(
    out: &mut Vec<u8>,
    node: &Node,
    map: &HashMap<i32, T>,
    mut value: impl FnMut(&mut Vec<u8>, &Node, &T) -> Usual<()>,
) -> Usual<()> {
    let Some(Node::Array(item)) = out_of(out, node, true)? else { return Err(Unusual) };
    let (key_node, value_node) = match item.record()? {
        [key, of] if key.name == "key" && of.name == "value" => (&key.node, &of.node),
        _ => return Err(Unusual),
    };
    let mut sorted: Vec<(&i32, &T)> = map.iter().collect();
    sorted.sort_unstable_by_key(|(key, _)| **key);
    if !sorted.is_empty() {
        length(out, sorted.len())?;
        for (key, one) in sorted {
            long(out, key_node, Some(i64::from(*key)))?;
            value(out, value_node, one)?;
        }
    }
    varint(out, 0);
    Ok(())
}

fn counts(out: &mut Vec<u8>, node: &Node, counts: &HashMap<i32, u64>) -> Usual<()> {
    pairs(out, node, counts, |out, node, count| {
        long(out, node, Some(i64::try_from(*count).map_err(|_| Unusual)?))
    })
}

fn bounds(out: &mut Vec<u8>, node: &Node, bounds: &HashMap<i32, Datum>) -> Usual<()> {
    pairs(out, node, bounds, |out, node, bound| {
        raw(out, node, Some(bound.to_bytes().map_err(|_| Unusual)?.as_ref()))
    })
}

fn numbers(out: &mut Vec<u8>, node: &Node, numbers: Option<Vec<i64>>) -> Usual<()> {
    let Some(branch) = out_of(out, node, numbers.is_some())? else { return Ok(()) };
    let (Node::Array(item), Some(numbers)) = (branch, numbers) else { return Err(Unusual) };
    if !numbers.is_empty() {
        length(out, numbers.len())?;
        for number in numbers {
            long(out, item, Some(number))?;
        }
    }
    varint(out, 0);
    Ok(())
}

#[cfg(test)]
#[path = "encode_tests.rs"]
mod tests;
