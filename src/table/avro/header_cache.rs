//! What headers say, worked out once: the files of a table have the same few headers, thousands of times.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use iceberg::spec::{FormatVersion, ManifestMetadata, PrimitiveType, SchemaRef, StructType, Type};

use super::header::AvroFile;
use super::schema::Node;
use super::{Unusual, Usual};

/// Headers kept of each kind. A table has one for each schema and spec that wrote manifests; when there are
/// more, all are forgotten and worked out again.
const MAX_HEADERS: usize = 128;

/// Header keys that decide how a manifest is read (table spec, "Manifests").
const MANIFEST_KEYS: [&str; 7] = [
    "avro.schema",
    "schema",
    "schema-id",
    "partition-spec",
    "partition-spec-id",
    "format-version",
    "content",
];
const LIST_KEYS: [&str; 1] = ["avro.schema"];

/// A manifest's header.
#[derive(Debug)]
pub(in crate::table) struct ManifestHeader {
    pub avro: Node,
    pub schema: SchemaRef,
    /// The partition tuple.
    pub types: Arc<StructType>,
    pub spec_id: i32,
}

/// By the values of the keys above.
type Kept<T> = Mutex<HashMap<u64, Vec<(Vec<u8>, Arc<T>)>>>;

#[derive(Debug, Default)]
pub(in crate::table) struct HeaderCache {
    manifests: Kept<ManifestHeader>,
    lists: Kept<Node>,
}

impl HeaderCache {
    pub(super) fn manifest(&self, file: &AvroFile<'_>) -> Usual<Arc<ManifestHeader>> {
        kept(&self.manifests, file, &MANIFEST_KEYS, manifest_header)
    }

    pub(super) fn list_schema(&self, file: &AvroFile<'_>) -> Usual<Arc<Node>> {
        kept(&self.lists, file, &LIST_KEYS, |file| Node::parse(file.get("avro.schema").ok_or(Unusual)?))
    }
}

fn kept<T>(
    kept: &Kept<T>,
    file: &AvroFile<'_>,
    keys: &[&str],
    work_out: impl FnOnce(&AvroFile<'_>) -> Usual<T>,
) -> Usual<Arc<T>> {
    let values = || keys.iter().map(|key| file.get(key));
    let mut hasher = DefaultHasher::new();
    for value in values() {
        hasher.write(value.unwrap_or_default());
    }
    let hash = hasher.finish();
    let same = |known: &[u8]| {
        let mut rest = known;
        let all = values().all(|value| match take_value(&mut rest) {
            Some(known) => known == value,
            None => false,
        });
        all && rest.is_empty()
    };
    // Values are complete when they are put in: a panic elsewhere cannot have left one half-made.
    let locked = || kept.lock().unwrap_or_else(PoisonError::into_inner);
    let found = |(known, value): &(Vec<u8>, Arc<T>)| same(known).then(|| Arc::clone(value));
    if let Some(value) = locked().get(&hash).and_then(|candidates| candidates.iter().find_map(found)) {
        return Ok(value);
    }
    let value = Arc::new(work_out(file)?);
    let mut key = Vec::new();
    for value in values() {
        put_value(&mut key, value);
    }
    let mut kept = locked();
    if kept.len() >= MAX_HEADERS {
        kept.clear();
    }
    kept.entry(hash).or_default().push((key, Arc::clone(&value)));
    Ok(value)
}

/// A value that may be missing, with its length in front.
fn put_value(key: &mut Vec<u8>, value: Option<&[u8]>) {
    key.push(u8::from(value.is_some()));
    let value = value.unwrap_or_default();
    key.extend_from_slice(&value.len().to_le_bytes());
    key.extend_from_slice(value);
}

/// `None` when nothing is left.
fn take_value<'a>(key: &mut &'a [u8]) -> Option<Option<&'a [u8]>> {
    let (there, rest) = key.split_first()?;
    let (length, rest) = rest.split_first_chunk::<{ size_of::<usize>() }>()?;
    let (value, rest) = rest.split_at_checked(usize::from_le_bytes(*length))?;
    *key = rest;
    Some((*there == 1).then_some(value))
}

fn manifest_header(file: &AvroFile<'_>) -> Usual<ManifestHeader> {
    let said: HashMap<String, Vec<u8>> =
        MANIFEST_KEYS.iter().filter_map(|key| Some(((*key).to_owned(), file.get(key)?.to_vec()))).collect();
    let header = ManifestMetadata::parse(&said).map_err(|_| Unusual)?;
    // Entries of v1 have other rules for what they lack.
    if header.format_version == FormatVersion::V1 {
        return Err(Unusual);
    }
    let types = header.partition_spec.partition_type(&header.schema).map_err(|_| Unusual)?;
    if !types.fields().iter().all(|field| is_plain(&field.field_type)) {
        return Err(Unusual);
    }
    let avro = Node::parse(file.get("avro.schema").ok_or(Unusual)?)?;
    Ok(ManifestHeader {
        avro,
        schema: header.schema,
        types: Arc::new(types),
        spec_id: header.partition_spec.spec_id(),
    })
}

/// Partition values of these types are written in one form by all engines.
pub(super) fn is_plain(value_type: &Type) -> bool {
    matches!(
        value_type.as_primitive_type(),
        Some(
            PrimitiveType::Boolean
                | PrimitiveType::Int
                | PrimitiveType::Long
                | PrimitiveType::Float
                | PrimitiveType::Double
                | PrimitiveType::Date
                | PrimitiveType::Time
                | PrimitiveType::Timestamp
                | PrimitiveType::Timestamptz
                | PrimitiveType::String
                | PrimitiveType::Binary
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_told_apart_from_missing_and_from_each_other() {
        let mut key = Vec::new();
        let values = [Some(&b"ab"[..]), None, Some(b""), Some(b"c")];
        values.iter().for_each(|value| put_value(&mut key, *value));
        let mut rest = key.as_slice();
        for value in values {
            assert_eq!(take_value(&mut rest), Some(value));
        }
        assert_eq!(take_value(&mut rest), None);
    }
}
