//! The entries of a manifest of format v2 or v3 (table spec, "Manifests").

use std::collections::HashMap;
use std::sync::Arc;

use iceberg::metadata_columns::get_metadata_field;
use iceberg::spec::{
    DataContentType, DataFile, DataFileBuilder, DataFileFormat, Datum, Literal, ManifestEntry,
    ManifestStatus, PrimitiveLiteral, PrimitiveType, Schema, Struct, StructType,
};

use super::blocks::each_object;
use super::cursor::Cursor;
use super::header::AvroFile;
use super::header_cache::{HeaderCache, ManifestHeader};
use super::schema::{Field, Node};
use super::{Unusual, Usual};

/// An entry as it is written: what it inherits is not filled in.
#[derive(Debug, PartialEq)]
pub(in crate::table) struct RawEntry {
    pub status: ManifestStatus,
    pub snapshot_id: Option<i64>,
    pub sequence_number: Option<i64>,
    pub file_sequence_number: Option<i64>,
    pub file: DataFile,
}

impl From<ManifestEntry> for RawEntry {
    fn from(entry: ManifestEntry) -> Self {
        Self {
            status: entry.status,
            snapshot_id: entry.snapshot_id,
            sequence_number: entry.sequence_number,
            file_sequence_number: entry.file_sequence_number,
            file: entry.data_file,
        }
    }
}

pub(in crate::table) struct DecodedEntries {
    pub header: Arc<ManifestHeader>,
    pub entries: Vec<RawEntry>,
}

/// The manifest whose bytes these are.
pub(in crate::table) fn decode_manifest(bytes: &[u8], headers: &HeaderCache) -> Usual<DecodedEntries> {
    let file = AvroFile::parse(bytes).ok_or(Unusual)?;
    let header = headers.manifest(&file)?;
    let fields = header.avro.record()?;
    let mut entries = Vec::new();
    each_object(&file, |cursor| {
        entries.push(entry(cursor, fields, &header)?);
        Ok(())
    })?;
    Ok(DecodedEntries { header, entries })
}

fn entry(cursor: &mut Cursor<'_>, fields: &[Field], header: &ManifestHeader) -> Usual<RawEntry> {
    let (mut status, mut file) = (None, None);
    let (mut snapshot_id, mut sequence_number, mut file_sequence_number) = (None, None, None);
    cursor.fields(fields, |cursor, Field { id, node, .. }| {
        match id.ok_or(Unusual)? {
            0 => status = cursor.int(node)?,
            1 => snapshot_id = cursor.long(node)?,
            2 => {
                let node = cursor.present(node)?.ok_or(Unusual)?;
                file = Some(data_file(cursor, node.record()?, header)?);
            }
            3 => sequence_number = cursor.long(node)?,
            4 => file_sequence_number = cursor.long(node)?,
            _ => cursor.skip(node)?,
        }
        Ok(())
    })?;
    let status = ManifestStatus::try_from(status.ok_or(Unusual)?).map_err(|_| Unusual)?;
    let file = file.ok_or(Unusual)?;
    Ok(RawEntry { status, snapshot_id, sequence_number, file_sequence_number, file })
}

fn data_file(cursor: &mut Cursor<'_>, fields: &[Field], header: &ManifestHeader) -> Usual<DataFile> {
    let mut file = DataFileBuilder::default();
    file.partition_spec_id(header.spec_id);
    // Data, where it is not said.
    file.content(DataContentType::Data);
    cursor.fields(fields, |cursor, Field { id, node, .. }| {
        match id.ok_or(Unusual)? {
            100 => drop(file.file_path(cursor.string(node)?.ok_or(Unusual)?.to_owned())),
            101 => {
                let format: DataFileFormat =
                    cursor.string(node)?.ok_or(Unusual)?.parse().map_err(|_| Unusual)?;
                file.file_format(format);
            }
            102 => {
                let node = cursor.present(node)?.ok_or(Unusual)?;
                file.partition(tuple(cursor, node.record()?, &header.types)?);
            }
            103 => drop(file.record_count(unsigned(cursor, node)?)),
            104 => drop(file.file_size_in_bytes(unsigned(cursor, node)?)),
            108 => drop(file.column_sizes(counts(cursor, node)?)),
            109 => drop(file.value_counts(counts(cursor, node)?)),
            110 => drop(file.null_value_counts(counts(cursor, node)?)),
            137 => drop(file.nan_value_counts(counts(cursor, node)?)),
            125 => drop(file.lower_bounds(bounds(cursor, node, &header.schema)?)),
            128 => drop(file.upper_bounds(bounds(cursor, node, &header.schema)?)),
            131 => drop(file.key_metadata(cursor.bytes(node)?.map(<[u8]>::to_vec))),
            132 => {
                let mut offsets = Vec::new();
                let there = cursor.items(node, |cursor, node| {
                    offsets.push(cursor.long(node)?.ok_or(Unusual)?);
                    Ok(())
                })?;
                file.split_offsets(there.then_some(offsets));
            }
            134 => {
                let content = cursor.int(node)?.ok_or(Unusual)?;
                file.content(DataContentType::try_from(content).map_err(|_| Unusual)?);
            }
            135 => {
                let mut ids = Vec::new();
                let there = cursor.items(node, |cursor, node| {
                    ids.push(cursor.int(node)?.ok_or(Unusual)?);
                    Ok(())
                })?;
                file.equality_ids(there.then_some(ids));
            }
            140 => {
                if let Some(order) = cursor.int(node)? {
                    file.sort_order_id(order);
                }
            }
            142 => drop(file.first_row_id(cursor.long(node)?)),
            143 => drop(file.referenced_data_file(cursor.string(node)?.map(str::to_owned))),
            144 => drop(file.content_offset(cursor.long(node)?)),
            145 => drop(file.content_size_in_bytes(cursor.long(node)?)),
            _ => cursor.skip(node)?,
        }
        Ok(())
    })?;
    file.build().map_err(|_| Unusual)
}

fn unsigned(cursor: &mut Cursor<'_>, node: &Node) -> Usual<u64> {
    u64::try_from(cursor.long(node)?.ok_or(Unusual)?).map_err(|_| Unusual)
}

/// A map with integer keys: an array of records of key and value.
fn entries_of(
    cursor: &mut Cursor<'_>,
    node: &Node,
    mut value: impl FnMut(&mut Cursor<'_>, i32, &Node) -> Usual<()>,
) -> Usual<()> {
    cursor.items(node, |cursor, item| match item.record()? {
        [key, of] if key.name == "key" && of.name == "value" => {
            let key = cursor.int(&key.node)?.ok_or(Unusual)?;
            value(cursor, key, &of.node)
        }
        _ => Err(Unusual),
    })?;
    Ok(())
}

fn counts(cursor: &mut Cursor<'_>, node: &Node) -> Usual<HashMap<i32, u64>> {
    let mut counts = HashMap::new();
    entries_of(cursor, node, |cursor, key, node| {
        // Some writers have -1 for a count that they do not know.
        if let Ok(count) = u64::try_from(cursor.long(node)?.ok_or(Unusual)?) {
            counts.insert(key, count);
        }
        Ok(())
    })?;
    Ok(counts)
}

/// Bounds of columns that the header's schema does not have are of no use.
fn bounds(cursor: &mut Cursor<'_>, node: &Node, schema: &Schema) -> Usual<HashMap<i32, Datum>> {
    let mut bounds = HashMap::new();
    entries_of(cursor, node, |cursor, key, node| {
        let bytes = cursor.bytes(node)?.ok_or(Unusual)?;
        let field = schema.field_by_id(key).or_else(|| get_metadata_field(key).ok());
        if let Some(field) = field {
            let value_type = field.field_type.as_primitive_type().ok_or(Unusual)?.clone();
            bounds.insert(key, Datum::try_from_bytes(bytes, value_type).map_err(|_| Unusual)?);
        }
        Ok(())
    })?;
    Ok(bounds)
}

/// The partition tuple, in the order of the spec. The file may have its fields in another order.
fn tuple(cursor: &mut Cursor<'_>, fields: &[Field], types: &StructType) -> Usual<Struct> {
    if fields.len() != types.fields().len() {
        return Err(Unusual);
    }
    let mut values: Vec<Option<Literal>> = vec![None; fields.len()];
    cursor.fields(fields, |cursor, Field { id, node, .. }| {
        let id = id.ok_or(Unusual)?;
        let position = types.fields().iter().position(|typed| typed.id == id).ok_or(Unusual)?;
        let (Some(typed), Some(value)) = (types.fields().get(position), values.get_mut(position)) else {
            return Err(Unusual);
        };
        let value_type = typed.field_type.as_primitive_type().ok_or(Unusual)?;
        if let Some(node) = cursor.present(node)? {
            *value = Some(Literal::Primitive(literal(cursor, node, value_type)?));
        }
        Ok(())
    })?;
    Ok(Struct::from_iter(values))
}

/// A value that is there, for the types of `header_cache::is_plain`.
fn literal(cursor: &mut Cursor<'_>, node: &Node, value_type: &PrimitiveType) -> Usual<PrimitiveLiteral> {
    use PrimitiveLiteral as Value;
    use PrimitiveType as Type;
    Ok(match (value_type, node) {
        (Type::Boolean, Node::Boolean) => Value::Boolean(cursor.boolean(node)?.ok_or(Unusual)?),
        (Type::Int | Type::Date, Node::Int) => Value::Int(cursor.int(node)?.ok_or(Unusual)?),
        (Type::Long, Node::Int | Node::Long)
        | (Type::Time | Type::Timestamp | Type::Timestamptz, Node::Long) => {
            Value::Long(cursor.long(node)?.ok_or(Unusual)?)
        }
        (Type::Float, Node::Float) => {
            Value::Float(f32::from_le_bytes(cursor.take(4)?.try_into().map_err(|_| Unusual)?).into())
        }
        (Type::Double, Node::Double) => {
            Value::Double(f64::from_le_bytes(cursor.take(8)?.try_into().map_err(|_| Unusual)?).into())
        }
        (Type::String, Node::String) => Value::String(cursor.string(node)?.ok_or(Unusual)?.to_owned()),
        (Type::Binary, Node::Bytes) => Value::Binary(cursor.bytes(node)?.ok_or(Unusual)?.to_vec()),
        _ => return Err(Unusual),
    })
}
