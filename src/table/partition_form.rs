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
//! - A name has one definition in Avro, and the crate gives one to each field of a named type. The second field of
//!   one `fixed`, UUID or decimal type is given as a decimal of as many bytes, which has another name.
//! - Names of fields that are no names in Avro are written in another form ([`super::avro::names`]). The crate
//!   writes them as they are, and nobody could read that. It is given plain names.
//!
//! Only headers are edited; data blocks are the same bytes for both types. A stand-in is a column of its own in the
//! schema that the crate is given, so that nothing else of the table changes its type.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use iceberg::spec::{
    DataFile, FieldSummary, Literal, ManifestMetadata, PartitionSpec, PrimitiveLiteral, PrimitiveType,
    Schema, SchemaRef, Struct, StructType, Type,
};
use serde_json::{Value, json};

use super::avro::header::AvroFile;
use super::avro::names::{compatible, is_plain};
use super::error::TableError;
use super::file_copy;

const UUID_BYTES: u64 = 16;
/// The name that Java and PyIceberg give to the Avro type of UUIDs.
const UUID_NAME: &str = "uuid_fixed";
const SCHEMA: &str = "schema";
const PARTITION_SPEC: &str = "partition-spec";
const AVRO_SCHEMA: &str = "avro.schema";
/// Ids of stand-in columns count from here: far from those of a table, and from those that the spec reserves.
const FIRST_STAND_IN_ID: i32 = 1_900_000_000;
/// Longest decimal, in digits (table spec, "Primitive Types").
const MAX_PRECISION: u32 = 38;

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

/// One partition field, as the table has it and as the crate is given it.
#[derive(Debug)]
struct FormField {
    field_id: i32,
    name: String,
    real: PrimitiveType,
    given: PrimitiveType,
    given_name: String,
}

impl FormField {
    /// Is it given as another type?
    fn stands_in(&self) -> bool {
        self.real != self.given
    }
}

/// The partition fields of one spec, of which the crate is given some in another form.
#[derive(Debug)]
pub(super) struct StandIns {
    fields: Vec<FormField>,
}

impl StandIns {
    /// `None` when the crate can take all of them as they are. `types` is the partition type of `spec`. An error
    /// says why no manifest of such a spec can be written or read.
    pub fn of(spec: &PartitionSpec, types: &StructType, form: FixedForm) -> Result<Option<Self>, String> {
        let plain = spec.fields().iter().all(|field| is_plain(&field.name));
        let mut defined: HashSet<String> = HashSet::new();
        let mut names: HashSet<String> = HashSet::new();
        let mut fields = Vec::new();
        for (field, typed) in spec.fields().iter().zip(types.fields()) {
            let Some(real) = typed.field_type.as_primitive_type().cloned() else {
                return Err(format!("partition field '{}' has no single value", field.name));
            };
            if !names.insert(compatible(&field.name)) {
                return Err(format!(
                    "partition field '{}' has the name of another one in manifests, '{}'; rename one of them",
                    field.name,
                    compatible(&field.name)
                ));
            }
            let given = given_type(&real, form, &mut defined).ok_or_else(|| {
                format!(
                    "partition field '{}' is a second one of type {real}, which has no other form",
                    field.name
                )
            })?;
            // The crate takes the name of a column for nothing else than this column.
            let given_name =
                if given == real && plain { field.name.clone() } else { given_name(field.field_id) };
            fields.push(FormField {
                field_id: field.field_id,
                name: field.name.clone(),
                real,
                given,
                given_name,
            });
        }
        let needed = !plain || fields.iter().any(FormField::stands_in);
        Ok(needed.then_some(Self { fields }))
    }

    /// Are there values to convert?
    fn converts(&self) -> bool {
        self.fields.iter().any(FormField::stands_in)
    }

    /// The table schema with the stand-ins.
    pub fn schema(&self, schema: &Schema) -> Result<SchemaRef, String> {
        let mut json = serde_json::to_value(schema).map_err(|e| e.to_string())?;
        self.add_columns(&mut json)?;
        serde_json::from_value::<Schema>(json).map(Arc::new).map_err(|e| e.to_string())
    }

    /// The spec in which the stand-ins are what is partitioned by. `schema` is that of [`Self::schema`].
    pub fn spec(&self, spec: &PartitionSpec, schema: &SchemaRef) -> Result<PartitionSpec, String> {
        let mut json = serde_json::to_value(spec.fields()).map_err(|e| e.to_string())?;
        self.edit_spec(&mut json)?;
        let fields: Vec<iceberg::spec::UnboundPartitionField> =
            serde_json::from_value(json).map_err(|e| e.to_string())?;
        PartitionSpec::builder(Arc::clone(schema))
            .with_spec_id(spec.spec_id())
            .add_unbound_fields(fields)
            .and_then(|builder| builder.build())
            .map_err(|e| e.to_string())
    }

    /// A manifest file as the crate can read it.
    fn given_file(&self, file: &mut AvroFile<'_>) -> Result<Vec<u8>, String> {
        edit_json(file, SCHEMA, |json| self.add_columns(json))?;
        edit_json(file, PARTITION_SPEC, |json| self.edit_spec(json))?;
        edit_json(file, AVRO_SCHEMA, |json| {
            self.edit_partition_fields(json, |field, avro, name| {
                *name = json!(field.given_name);
                // Also where the type is the same: it may have been told by the name that another field defined.
                if field.stands_in() || type_name(&field.given).is_some() {
                    *avro = given_avro_type(&field.given);
                }
            })
        })?;
        Ok(file.to_bytes())
    }

    /// A manifest file that the crate wrote in the given form, as it has to be.
    pub fn real_file(&self, bytes: &[u8], schema: &Schema, spec: &PartitionSpec) -> Result<Vec<u8>, String> {
        let mut file = AvroFile::parse(bytes).ok_or("it is no Avro file")?;
        file.replace(SCHEMA, serde_json::to_vec(schema).map_err(|e| e.to_string())?);
        file.replace(PARTITION_SPEC, serde_json::to_vec(spec.fields()).map_err(|e| e.to_string())?);
        let mut defined = HashSet::new();
        edit_json(&mut file, AVRO_SCHEMA, |json| {
            self.edit_partition_fields(json, |field, avro, name| {
                *name = json!(compatible(&field.name));
                if field.stands_in() {
                    *avro = real_avro_type(field, &mut defined);
                } else if let Some(name) = type_name(&field.real) {
                    defined.insert(name);
                }
            })
        })?;
        Ok(file.to_bytes())
    }

    fn stand_ins(&self) -> impl Iterator<Item = (i32, &FormField)> {
        (FIRST_STAND_IN_ID..).zip(&self.fields).filter(|(_, field)| field.stands_in())
    }

    /// A column for each stand-in.
    fn add_columns(&self, schema: &mut Value) -> Result<(), String> {
        let columns =
            schema.get_mut("fields").and_then(Value::as_array_mut).ok_or("its schema has no fields")?;
        for (id, field) in self.stand_ins() {
            let name = &field.given_name;
            columns.push(json!({ "id": id, "name": name, "required": false, "type": field.given }));
        }
        Ok(())
    }

    fn edit_spec(&self, spec: &mut Value) -> Result<(), String> {
        let parts = spec.as_array_mut().ok_or("its partition spec is no list")?;
        for (id, field) in (FIRST_STAND_IN_ID..).zip(&self.fields) {
            let part = parts.iter_mut().find(|part| has_id(part, field.field_id));
            let part = part.and_then(Value::as_object_mut).ok_or("its partition spec lacks a field")?;
            part.insert("name".to_owned(), json!(field.given_name));
            if field.stands_in() {
                part.insert("source-id".to_owned(), json!(id));
                part.insert("transform".to_owned(), json!("identity"));
            }
        }
        Ok(())
    }

    /// Edits the Avro type of each of the fields, inside its union with null, and its name.
    fn edit_partition_fields(
        &self,
        manifest_entry: &mut Value,
        mut edit: impl FnMut(&FormField, &mut Value, &mut Value),
    ) -> Result<(), String> {
        let tuple = record_field(manifest_entry, "data_file")
            .and_then(|file| record_field(file, "partition"))
            .and_then(|tuple| tuple.get_mut("fields"))
            .and_then(Value::as_array_mut)
            .ok_or("its Avro schema has no partition tuple")?;
        for field in &self.fields {
            let avro = tuple.iter_mut().find(|f| has_id(f, field.field_id)).and_then(Value::as_object_mut);
            let avro = avro.ok_or("its Avro schema lacks a partition field")?;
            let mut name = avro.get("name").cloned().unwrap_or_default();
            let value = match avro.get_mut("type") {
                Some(Value::Array(options)) => options.iter_mut().find(|o| o.as_str() != Some("null")),
                other => other,
            };
            edit(field, value.ok_or("a partition field has no type")?, &mut name);
            avro.insert("name".to_owned(), name);
        }
        Ok(())
    }

    /// A file of a manifest that was read in the given form.
    pub fn real(&self, file: &DataFile, spec_id: i32) -> Result<DataFile, TableError> {
        self.with_values(file, spec_id, FormField::real_literal)
    }

    /// A file for a manifest that is written in the given form.
    pub fn given(&self, file: &DataFile, spec_id: i32) -> Result<DataFile, TableError> {
        self.with_values(file, spec_id, FormField::given_literal)
    }

    fn with_values(
        &self,
        file: &DataFile,
        spec_id: i32,
        value: impl Fn(&FormField, &Literal) -> Option<Literal>,
    ) -> Result<DataFile, TableError> {
        if !self.converts() {
            return Ok(file.clone());
        }
        let mut values: Vec<Option<Literal>> = file.partition().iter().map(|value| value.cloned()).collect();
        for (field, slot) in self.fields.iter().zip(&mut values).filter(|(field, _)| field.stands_in()) {
            if let Some(literal) = slot {
                *literal = value(field, literal).ok_or_else(|| {
                    TableError::Unsupported(format!("a partition value is no {}", field.real))
                })?;
            }
        }
        file_copy::build(file_copy::builder_of(file, spec_id).partition(Struct::from_iter(values)), file)
    }

    /// Puts right the bounds in a manifest's list entry: those of bytes that the crate took for a decimal.
    pub fn real_summaries<'a>(
        &self,
        summaries: &mut [FieldSummary],
        tuples: impl Iterator<Item = &'a Struct> + Clone,
    ) -> Result<(), String> {
        for (at, field) in self.fields.iter().enumerate() {
            let as_decimal = matches!(field.given, PrimitiveType::Decimal { .. });
            if !as_decimal || matches!(field.real, PrimitiveType::Decimal { .. }) {
                continue;
            }
            let summary = summaries.get_mut(at).ok_or("a partition field has no summary")?;
            // Bytes and UUIDs are compared byte by byte.
            let values = || {
                tuples.clone().filter_map(|tuple| match tuple.iter().nth(at).flatten()? {
                    Literal::Primitive(PrimitiveLiteral::UInt128(value)) => {
                        Some(value.to_be_bytes().to_vec())
                    }
                    Literal::Primitive(PrimitiveLiteral::Binary(bytes)) => Some(bytes.clone()),
                    _ => None,
                })
            };
            summary.lower_bound = values().min().map(Into::into);
            summary.upper_bound = values().max().map(Into::into);
        }
        Ok(())
    }
}

/// A name that no table has.
fn given_name(field_id: i32) -> String {
    format!("mergeberg_partition_{field_id}")
}

fn has_id(part: &Value, field_id: i32) -> bool {
    part.get("field-id").and_then(Value::as_i64) == Some(i64::from(field_id))
}

/// What the crate is given for values of type `real`. Types that Avro names are given once; `None`: no other is left.
fn given_type(real: &PrimitiveType, form: FixedForm, defined: &mut HashSet<String>) -> Option<PrimitiveType> {
    let first = match (real, form) {
        (PrimitiveType::Uuid, _) => PrimitiveType::Fixed(UUID_BYTES),
        (PrimitiveType::TimestampNs, _) => PrimitiveType::Timestamp,
        (PrimitiveType::TimestamptzNs, _) => PrimitiveType::Timestamptz,
        (PrimitiveType::Fixed(_), FixedForm::WithLength) => PrimitiveType::Binary,
        (same, _) => same.clone(),
    };
    let bytes = match &first {
        PrimitiveType::Fixed(bytes) => *bytes,
        PrimitiveType::Decimal { precision, .. } => decimal_bytes(*precision)?,
        _ => return Some(first),
    };
    let precisions = (1..=MAX_PRECISION).filter(|precision| decimal_bytes(*precision) == Some(bytes));
    let others = precisions
        .flat_map(|precision| (0..=precision).map(move |scale| PrimitiveType::Decimal { precision, scale }));
    std::iter::once(first)
        .chain(others)
        .find(|given| type_name(given).is_some_and(|name| defined.insert(name)))
}

fn decimal_bytes(precision: u32) -> Option<u64> {
    Type::decimal_required_bytes(precision).ok().map(u64::from)
}

impl FormField {
    fn real_literal(&self, given: &Literal) -> Option<Literal> {
        let Literal::Primitive(value) = given else { return None };
        let bytes = match (&self.real, value) {
            (PrimitiveType::Uuid, PrimitiveLiteral::Binary(bytes)) => bytes.clone(),
            (PrimitiveType::Uuid, PrimitiveLiteral::Int128(value)) => value.to_be_bytes().to_vec(),
            (PrimitiveType::Fixed(length), PrimitiveLiteral::Int128(value)) => {
                let bytes = value.to_be_bytes();
                let start = bytes.len().checked_sub(usize::try_from(*length).ok()?)?;
                return Some(Literal::fixed(bytes[start..].iter().copied()));
            }
            _ => return self.same_literal(given),
        };
        let bytes: [u8; 16] = bytes.as_slice().try_into().ok()?;
        Some(Literal::Primitive(PrimitiveLiteral::UInt128(u128::from_be_bytes(bytes))))
    }

    fn given_literal(&self, real: &Literal) -> Option<Literal> {
        let Literal::Primitive(value) = real else { return None };
        let as_decimal = matches!(self.given, PrimitiveType::Decimal { .. });
        match (&self.real, value) {
            (PrimitiveType::Uuid, PrimitiveLiteral::UInt128(value)) if as_decimal => {
                Some(Literal::decimal(value.cast_signed()))
            }
            (PrimitiveType::Uuid, PrimitiveLiteral::UInt128(value)) => {
                Some(Literal::fixed(value.to_be_bytes()))
            }
            (PrimitiveType::Fixed(length), PrimitiveLiteral::Binary(bytes)) if as_decimal => {
                let fits = bytes.len() as u64 == *length && bytes.len() <= 16;
                // As long as it is, with the sign of its first bit.
                let sign = if bytes.first().is_some_and(|first| first & 0x80 != 0) { -1 } else { 0 };
                let number = bytes.iter().fold(sign, |number: i128, byte| (number << 8) | i128::from(*byte));
                fits.then(|| Literal::decimal(number))
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
            )
            | (PrimitiveType::Decimal { .. }, Literal::Primitive(PrimitiveLiteral::Int128(_))) => true,
            _ => false,
        };
        fits.then(|| literal.clone())
    }
}

/// The name under which Avro has a type, as the crate, Java and PyIceberg give it.
fn type_name(of: &PrimitiveType) -> Option<String> {
    match of {
        PrimitiveType::Uuid => Some(UUID_NAME.to_owned()),
        PrimitiveType::Fixed(size) => Some(format!("fixed_{size}")),
        PrimitiveType::Decimal { precision, scale } => Some(format!("decimal_{precision}_{scale}")),
        _ => None,
    }
}

/// The Avro type that the crate reads as `given`.
fn given_avro_type(given: &PrimitiveType) -> Value {
    match given {
        PrimitiveType::Binary => json!("bytes"),
        PrimitiveType::Timestamp | PrimitiveType::Timestamptz => {
            json!({ "type": "long", "logicalType": "timestamp-micros" })
        }
        named => defined_type(named),
    }
}

/// The Avro type as Java writes it. A second field of a named type gets a definition of its own, under a name of its
/// own: that both were one type nobody needs to know, and PyIceberg does not read a type that is told by its name.
fn real_avro_type(field: &FormField, defined: &mut HashSet<String>) -> Value {
    let real = &field.real;
    if matches!(real, PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs) {
        let adjusted = *real == PrimitiveType::TimestamptzNs;
        return json!({ "type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": adjusted });
    }
    let mut avro = defined_type(real);
    if let Some(name) = type_name(real)
        && !defined.insert(name.clone())
    {
        avro["name"] = json!(format!("{name}_{}", field.field_id));
    }
    avro
}

/// The definition of a named type.
fn defined_type(named: &PrimitiveType) -> Value {
    let name = type_name(named);
    match named {
        PrimitiveType::Fixed(size) => json!({ "type": "fixed", "name": name, "size": size }),
        PrimitiveType::Decimal { precision, scale } => json!({
            "type": "fixed", "name": name, "size": decimal_bytes(*precision),
            "logicalType": "decimal", "precision": precision, "scale": scale,
        }),
        _ => json!({ "type": "fixed", "name": name, "size": UUID_BYTES, "logicalType": "uuid" }),
    }
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
        let (Some(schema), Some(spec)) = (file.get(SCHEMA), file.get(PARTITION_SPEC)) else {
            return Ok(None);
        };
        let mentions = |word: &[u8]| schema.windows(word.len()).any(|at| at == word);
        let by_type =
            || [&b"\"uuid\""[..], b"\"fixed[", b"_ns\"", b"\"decimal("].iter().any(|word| mentions(word));
        if names_are_plain(spec) && !by_type() {
            return Ok(None);
        }
        let header =
            ["schema", "schema-id", "partition-spec", "partition-spec-id", "format-version", "content"];
        let header: HashMap<String, Vec<u8>> =
            header.into_iter().filter_map(|key| Some((key.to_owned(), file.get(key)?.to_vec()))).collect();
        let header = ManifestMetadata::parse(&header).map_err(|e| e.to_string())?;
        let (schema, spec) = (header.schema().clone(), header.partition_spec().clone());
        let types = spec.partition_type(&schema).map_err(|e| e.to_string())?;
        let special = has_fixed(&types) || StandIns::of(&spec, &types, FixedForm::Plain)?.is_some();
        Ok(special.then_some(Self { schema, types, spec }))
    }

    /// The bytes with types that the crate can read, for values in this form. `None`: they are so already.
    pub fn given(&self, bytes: &[u8], form: FixedForm) -> Result<Option<(StandIns, Vec<u8>)>, String> {
        let Some(stand_ins) = StandIns::of(&self.spec, &self.types, form)? else { return Ok(None) };
        let mut file = AvroFile::parse(bytes).ok_or("it is no Avro file")?;
        let given = stand_ins.given_file(&mut file)?;
        Ok(Some((stand_ins, given)))
    }
}

/// Are all fields of a spec, as JSON, called what Avro can call them? What is no spec is for the crate to tell.
fn names_are_plain(spec: &[u8]) -> bool {
    let Ok(Value::Array(fields)) = serde_json::from_slice(spec) else { return true };
    fields.iter().filter_map(|field| field.get("name")?.as_str()).all(is_plain)
}

#[cfg(test)]
#[path = "partition_form_tests.rs"]
mod tests;
