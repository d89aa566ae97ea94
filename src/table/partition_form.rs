//! Partition values of manifests in a form that the crate or its Avro library does not take.
//!
//! - A timestamp of nanoseconds is a long of another unit to Avro, and the crate knows it only as
//!   microseconds. It is given these; the number is the same.
//! - A UUID is sixteen bytes of an Avro `fixed` (table spec, appendix A), and the library reads and writes
//!   every UUID as a text. The crate is given a `fixed[16]` in its place, and the header says which it is.
//! - Java writes a `fixed` value as if it were `bytes`, with its length in front, and expects it so
//!   (`ValueWriters.FixedByteBufferWriter`, in 1.11 and 1.12). The crate is given `binary` in its place.
//!   What is written is in the form that the table has already: in the other, Java could not read the table
//!   any more.
//!
//! Only headers are edited; data blocks are the same bytes for both types.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use iceberg::spec::{
    DataFile, Datum, Literal, ManifestMetadata, PartitionSpec, PrimitiveLiteral, PrimitiveType, Schema,
    SchemaRef, Struct, StructType, Type,
};
use serde_json::{Map, Value, json};

use super::avro::header::AvroFile;
use super::error::TableError;
use super::file_copy;

const UUID_BYTES: u64 = 16;
/// The name that Java and PyIceberg give to the Avro type of UUIDs.
const UUID_NAME: &str = "uuid_fixed";
const SCHEMA: &str = "schema";
const AVRO_SCHEMA: &str = "avro.schema";

/// How partition values of type `fixed` are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum FixedForm {
    /// As Avro says: the bytes.
    Plain,
    /// As Java does: a length, then the bytes.
    WithLength,
}

/// Does a tuple of this type hold values of type `fixed`, so that it has a form?
pub(super) fn has_fixed(types: &StructType) -> bool {
    types.fields().iter().any(|f| matches!(f.field_type.as_primitive_type(), Some(PrimitiveType::Fixed(_))))
}

/// Is there a value of type `fixed` in one of these tuples?
pub(super) fn holds_fixed<'a>(types: &StructType, mut tuples: impl Iterator<Item = &'a Struct>) -> bool {
    has_fixed(types)
        && tuples.any(|tuple| {
            tuple.iter().zip(types.fields()).any(|(value, field)| {
                let fixed = matches!(field.field_type.as_primitive_type(), Some(PrimitiveType::Fixed(_)));
                fixed && value.is_some()
            })
        })
}

/// One partition field that the crate is given as another type.
#[derive(Debug)]
struct StandIn {
    position: usize,
    field_id: i32,
    source_id: i32,
    real: PrimitiveType,
    given: PrimitiveType,
}

/// The partition fields of one spec that the crate is given as other types.
#[derive(Debug)]
pub(super) struct StandIns {
    fields: Vec<StandIn>,
}

impl StandIns {
    /// `None` when the crate can take all of them as they are. `types` is the partition type of `spec`.
    pub fn of(spec: &PartitionSpec, types: &StructType, form: FixedForm) -> Option<Self> {
        let mut fields = Vec::new();
        for (position, (field, typed)) in spec.fields().iter().zip(types.fields()).enumerate() {
            let given = match (typed.field_type.as_primitive_type(), form) {
                (Some(PrimitiveType::Uuid), _) => PrimitiveType::Fixed(UUID_BYTES),
                (Some(PrimitiveType::TimestampNs), _) => PrimitiveType::Timestamp,
                (Some(PrimitiveType::TimestamptzNs), _) => PrimitiveType::Timestamptz,
                (Some(PrimitiveType::Fixed(_)), FixedForm::WithLength) => PrimitiveType::Binary,
                _ => continue,
            };
            let Some(real) = typed.field_type.as_primitive_type().cloned() else { continue };
            let (field_id, source_id) = (field.field_id, field.source_id);
            fields.push(StandIn { position, field_id, source_id, real, given });
        }
        (!fields.is_empty()).then_some(Self { fields })
    }

    /// The table schema with the given types.
    pub fn schema(&self, schema: &Schema) -> Result<SchemaRef, String> {
        let mut json = serde_json::to_value(schema).map_err(|e| e.to_string())?;
        self.edit_schema(&mut json);
        serde_json::from_value::<Schema>(json).map(Arc::new).map_err(|e| e.to_string())
    }

    /// A manifest file as the crate can read it.
    fn given_file(&self, file: &mut AvroFile<'_>) -> Result<Vec<u8>, String> {
        edit_json(file, SCHEMA, |json| {
            self.edit_schema(json);
            Ok(())
        })?;
        edit_json(file, AVRO_SCHEMA, |json| {
            self.edit_partition_fields(json, |field, avro| match field.given {
                PrimitiveType::Binary => *avro = json!("bytes"),
                PrimitiveType::Fixed(_) => {
                    if let Value::Object(object) = avro {
                        object.shift_remove("logicalType");
                    }
                }
                _ => *avro = json!({ "type": "long", "logicalType": "timestamp-micros" }),
            })
        })?;
        Ok(file.to_bytes())
    }

    /// A manifest file that the crate wrote with the given types, as it has to be.
    pub fn real_file(&self, bytes: &[u8], schema: &Schema) -> Result<Vec<u8>, String> {
        let mut file = AvroFile::parse(bytes).ok_or("it is no Avro file")?;
        file.replace(SCHEMA, serde_json::to_vec(schema).map_err(|e| e.to_string())?);
        let mut named = HashSet::new();
        edit_json(&mut file, AVRO_SCHEMA, |json| {
            self.edit_partition_fields(json, |field, avro| *avro = real_avro_type(&field.real, &mut named))
        })?;
        Ok(file.to_bytes())
    }

    fn edit_schema(&self, json: &mut Value) {
        match json {
            Value::Array(items) => items.iter_mut().for_each(|item| self.edit_schema(item)),
            Value::Object(object) => {
                self.edit_field(object);
                object.values_mut().for_each(|value| self.edit_schema(value));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    fn edit_field(&self, object: &mut Map<String, Value>) {
        let Some(id) = object.get("id").and_then(Value::as_i64) else { return };
        let Some(field) = self.fields.iter().find(|f| i64::from(f.source_id) == id) else { return };
        let (Ok(real), Ok(given)) = (serde_json::to_value(&field.real), serde_json::to_value(&field.given))
        else {
            return;
        };
        let is_it = object.get("type") == Some(&real);
        if is_it {
            object.insert("type".to_owned(), given);
            // A default in the form of the real type.
            object.shift_remove("initial-default");
            object.shift_remove("write-default");
        }
    }

    /// Edits the Avro type of each of the fields, inside its union with null.
    fn edit_partition_fields(
        &self,
        manifest_entry: &mut Value,
        mut edit: impl FnMut(&StandIn, &mut Value),
    ) -> Result<(), String> {
        let tuple = record_field(manifest_entry, "data_file")
            .and_then(|file| record_field(file, "partition"))
            .and_then(|tuple| tuple.get_mut("fields"))
            .and_then(Value::as_array_mut)
            .ok_or("its Avro schema has no partition tuple")?;
        for field in &self.fields {
            let avro = tuple
                .iter_mut()
                .find(|f| f.get("field-id").and_then(Value::as_i64) == Some(i64::from(field.field_id)))
                .and_then(|f| f.get_mut("type"))
                .ok_or("its Avro schema lacks a partition field")?;
            let value = match avro {
                Value::Array(options) => options.iter_mut().find(|o| o.as_str() != Some("null")),
                other => Some(other),
            };
            let value = value.ok_or("a partition field has no type")?;
            edit(field, value);
        }
        Ok(())
    }

    /// A file of a manifest that was read with the given types.
    pub fn real(&self, file: &DataFile, spec_id: i32) -> Result<DataFile, TableError> {
        let tuple = self.with_values(file.partition(), |field, literal| field.real_literal(literal))?;
        let mut builder = file_copy::builder_of(file, spec_id);
        builder
            .partition(tuple)
            .lower_bounds(self.real_bounds(file.lower_bounds())?)
            .upper_bounds(self.real_bounds(file.upper_bounds())?);
        file_copy::build(&builder, file)
    }

    /// A file for a manifest that is written with the given types. Bounds are bytes in either.
    pub fn given(&self, file: &DataFile, spec_id: i32) -> Result<DataFile, TableError> {
        let tuple = self.with_values(file.partition(), |field, literal| field.given_literal(literal))?;
        file_copy::build(file_copy::builder_of(file, spec_id).partition(tuple), file)
    }

    fn with_values(
        &self,
        tuple: &Struct,
        value: impl Fn(&StandIn, &Literal) -> Option<Literal>,
    ) -> Result<Struct, TableError> {
        let mut values: Vec<Option<Literal>> = tuple.iter().map(|value| value.cloned()).collect();
        for field in &self.fields {
            if let Some(Some(literal)) = values.get_mut(field.position) {
                *literal = value(field, literal).ok_or_else(|| {
                    TableError::Unsupported(format!("a partition value is no {}", field.real))
                })?;
            }
        }
        Ok(Struct::from_iter(values))
    }

    fn real_bounds(&self, bounds: &HashMap<i32, Datum>) -> Result<HashMap<i32, Datum>, TableError> {
        let mut bounds = bounds.clone();
        for field in &self.fields {
            if let Some(bound) = bounds.get_mut(&field.source_id) {
                *bound = bound
                    .to_bytes()
                    .and_then(|bytes| Datum::try_from_bytes(&bytes, field.real.clone()))
                    .map_err(|e| TableError::Unsupported(format!("a bound is no {}: {e}", field.real)))?;
            }
        }
        Ok(bounds)
    }
}

impl StandIn {
    fn real_literal(&self, given: &Literal) -> Option<Literal> {
        match (&self.real, given) {
            (PrimitiveType::Uuid, Literal::Primitive(PrimitiveLiteral::Binary(bytes))) => {
                let bytes: [u8; 16] = bytes.as_slice().try_into().ok()?;
                Some(Literal::Primitive(PrimitiveLiteral::UInt128(u128::from_be_bytes(bytes))))
            }
            _ => self.same_literal(given),
        }
    }

    fn given_literal(&self, real: &Literal) -> Option<Literal> {
        match (&self.real, real) {
            (PrimitiveType::Uuid, Literal::Primitive(PrimitiveLiteral::UInt128(value))) => {
                Some(Literal::fixed(value.to_be_bytes()))
            }
            _ => self.same_literal(real),
        }
    }

    /// A literal that is the same under both types.
    fn same_literal(&self, literal: &Literal) -> Option<Literal> {
        let fits = match (&self.real, literal) {
            (PrimitiveType::Fixed(length), Literal::Primitive(PrimitiveLiteral::Binary(bytes))) => {
                bytes.len() as u64 == *length
            }
            (
                PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs,
                Literal::Primitive(PrimitiveLiteral::Long(_)),
            ) => true,
            _ => false,
        };
        fits.then(|| literal.clone())
    }
}

/// The Avro type as Java writes it; a named type is defined once and then told by its name.
fn real_avro_type(real: &PrimitiveType, named: &mut HashSet<String>) -> Value {
    if matches!(real, PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs) {
        let adjusted = *real == PrimitiveType::TimestamptzNs;
        return json!({ "type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": adjusted });
    }
    let (name, size) = match real {
        PrimitiveType::Fixed(size) => (format!("fixed_{size}"), *size),
        _ => (UUID_NAME.to_owned(), UUID_BYTES),
    };
    if !named.insert(name.clone()) {
        return Value::String(name);
    }
    let mut avro = json!({ "type": "fixed", "name": name, "size": size });
    if *real == PrimitiveType::Uuid {
        avro["logicalType"] = json!("uuid");
    }
    avro
}

/// The type of a field of an Avro record, as an object.
fn record_field<'a>(record: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    let fields = record.get_mut("fields")?.as_array_mut()?;
    let field = fields.iter_mut().find(|f| f.get("name").and_then(Value::as_str) == Some(name))?;
    field.get_mut("type")
}

fn edit_json(
    file: &mut AvroFile<'_>,
    key: &str,
    edit: impl FnOnce(&mut Value) -> Result<(), String>,
) -> Result<(), String> {
    let bytes = file.get(key).ok_or_else(|| format!("its header has no {key}"))?;
    let mut json: Value = serde_json::from_slice(bytes).map_err(|e| format!("{key}: {e}"))?;
    edit(&mut json)?;
    file.replace(key, serde_json::to_vec(&json).map_err(|e| e.to_string())?);
    Ok(())
}

/// A manifest whose partition values need care.
pub(super) struct Special {
    /// The schema and types that its header really has.
    pub schema: SchemaRef,
    pub types: StructType,
    pub spec: PartitionSpec,
}

impl Special {
    /// `None` for the many manifests that the crate can read as they are.
    pub fn of(bytes: &[u8]) -> Result<Option<Self>, String> {
        let Some(file) = AvroFile::parse(bytes) else { return Ok(None) };
        let Some(schema) = file.get(SCHEMA) else { return Ok(None) };
        let mentions = |word: &[u8]| schema.windows(word.len()).any(|at| at == word);
        if !mentions(b"\"uuid\"") && !mentions(b"\"fixed[") && !mentions(b"_ns\"") {
            return Ok(None);
        }
        let header =
            ["schema", "schema-id", "partition-spec", "partition-spec-id", "format-version", "content"];
        let header: HashMap<String, Vec<u8>> =
            header.into_iter().filter_map(|key| Some((key.to_owned(), file.get(key)?.to_vec()))).collect();
        let header = ManifestMetadata::parse(&header).map_err(|e| e.to_string())?;
        let (schema, spec) = (header.schema().clone(), header.partition_spec().clone());
        let types = spec.partition_type(&schema).map_err(|e| e.to_string())?;
        let special = types.fields().iter().any(|f| is_special(&f.field_type));
        Ok(special.then_some(Self { schema, types, spec }))
    }

    /// The bytes with types that the crate can read, for values in this form. `None`: they are so already.
    pub fn given(&self, bytes: &[u8], form: FixedForm) -> Result<Option<(StandIns, Vec<u8>)>, String> {
        let Some(stand_ins) = StandIns::of(&self.spec, &self.types, form) else { return Ok(None) };
        let mut file = AvroFile::parse(bytes).ok_or("it is no Avro file")?;
        let given = stand_ins.given_file(&mut file)?;
        Ok(Some((stand_ins, given)))
    }
}

fn is_special(value_type: &Type) -> bool {
    matches!(
        value_type.as_primitive_type(),
        Some(
            PrimitiveType::Uuid
                | PrimitiveType::Fixed(_)
                | PrimitiveType::TimestampNs
                | PrimitiveType::TimestamptzNs
        )
    )
}

#[cfg(test)]
#[path = "partition_form_tests.rs"]
mod tests;
