//! Arrays of a Parquet file as a table's nested column: by field id at every depth (table spec, "Column
//! Projection", "Schema Evolution"; Java: `BaseParquetReaders`).
//!
//! A field that the file lacks is null or its initial default; fields that the table lacks are left out;
//! promoted types are widened. What cannot be read as the wanted type is an error, never another value.

use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, ListArray, MapArray, StructArray, new_null_array};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::{
    ArrowPrimitiveType, DataType, Date32Type, Field, FieldRef, Fields, TimeUnit, TimestampMicrosecondType,
    TimestampNanosecondType,
};
use datafusion::arrow::util::display::FormatOptions;
use datafusion::common::ScalarValue;
use iceberg::spec::{Literal, NestedField, PrimitiveLiteral, Type};

/// A failed conversion is an error, never a null.
const STRICT: CastOptions<'static> = CastOptions { safe: false, format_options: FormatOptions::new() };
const MICROS_OF_DAY: i64 = 86_400_000_000;
const NANOS_OF_DAY: i64 = 1_000 * MICROS_OF_DAY;

/// The fields of one level of a file, each with the id that it has; `None` where it has none.
#[derive(Clone, Debug)]
pub(super) struct FileField {
    pub id: Option<i32>,
    /// Of a struct its fields, of a list its element, of a map its key and its value.
    pub children: Vec<FileField>,
}

/// `array`, which the file has as `file`, as the column `wanted`, whose Arrow form is `target`.
pub(super) fn adapt(
    array: &ArrayRef,
    file: &FileField,
    wanted: &NestedField,
    target: &Field,
) -> Result<ArrayRef, String> {
    let differs = || format!("'{}' is {} in the file", wanted.name, array.data_type());
    match (wanted.field_type.as_ref(), target.data_type()) {
        (Type::Struct(fields), DataType::Struct(targets)) => {
            let array = array.as_struct_opt().ok_or_else(differs)?;
            let mut children = Vec::with_capacity(targets.len());
            for (field, target) in fields.fields().iter().zip(targets) {
                let at = file.children.iter().position(|child| child.id == Some(field.id));
                children.push(match at.and_then(|at| Some((array.columns().get(at)?, &file.children[at]))) {
                    Some((child, of_file)) => adapt(child, of_file, field, target)?,
                    None => missing(field, target, array.len())?,
                });
            }
            let nulls = array.nulls().cloned();
            let adapted = StructArray::try_new_with_length(targets.clone(), children, nulls, array.len());
            Ok(Arc::new(adapted.map_err(|e| format!("'{}': {e}", wanted.name))?))
        }
        (Type::List(list), DataType::List(target)) => {
            let array: &ListArray = array.as_list_opt().ok_or_else(differs)?;
            let [element] = file.children.as_slice() else { return Err(differs()) };
            let values = adapt(array.values(), element, &list.element_field, target)?;
            let (offsets, nulls) = (array.offsets().clone(), array.nulls().cloned());
            let adapted = ListArray::try_new(Arc::clone(target), offsets, values, nulls);
            Ok(Arc::new(adapted.map_err(|e| format!("'{}': {e}", wanted.name))?))
        }
        (Type::Map(map), DataType::Map(target, sorted)) => {
            let array: &MapArray = array.as_map_opt().ok_or_else(differs)?;
            let ([key, value], Some([key_target, value_target])) =
                (file.children.as_slice(), pair(target.data_type()))
            else {
                return Err(differs());
            };
            let keys = adapt(array.keys(), key, &map.key_field, key_target)?;
            let values = adapt(array.values(), value, &map.value_field, value_target)?;
            let fields: Fields = vec![Arc::clone(key_target), Arc::clone(value_target)].into();
            let entries = StructArray::try_new(fields, vec![keys, values], None)
                .map_err(|e| format!("'{}': {e}", wanted.name))?;
            let (offsets, nulls) = (array.offsets().clone(), array.nulls().cloned());
            let adapted = MapArray::try_new(Arc::clone(target), offsets, entries, nulls, *sorted);
            Ok(Arc::new(adapted.map_err(|e| format!("'{}': {e}", wanted.name))?))
        }
        (Type::Primitive(_), to) => widened(array, to).map_err(|e| format!("'{}': {e}", wanted.name)),
        _ => Err(differs()),
    }
}

fn pair(entries: &DataType) -> Option<[&FieldRef; 2]> {
    let DataType::Struct(fields) = entries else { return None };
    fields.iter().collect::<Vec<_>>().try_into().ok()
}

/// A column that the file does not have: its initial default, else null.
pub(super) fn missing(wanted: &NestedField, target: &Field, rows: usize) -> Result<ArrayRef, String> {
    default_of(wanted, target, rows, |field| field.initial_default.as_ref())
}

/// What a new row has in a column that its writer gives no value: the column's write default, else null (table spec,
/// "Default values").
pub(super) fn new_value(wanted: &NestedField, target: &Field) -> Result<ScalarValue, String> {
    let one = default_of(wanted, target, 1, |field| field.write_default.as_ref())?;
    ScalarValue::try_from_array(&one, 0).map_err(|e| e.to_string())
}

fn default_of(
    wanted: &NestedField,
    target: &Field,
    rows: usize,
    which: fn(&NestedField) -> Option<&Literal>,
) -> Result<ArrayRef, String> {
    let unknown = || format!("a default of '{}' cannot be read", wanted.name);
    match (which(wanted), wanted.field_type.as_ref(), target.data_type()) {
        (None, _, to) => Ok(new_null_array(to, rows)),
        (Some(Literal::Primitive(literal)), Type::Primitive(_), to) => {
            let one = scalar(literal, to).ok_or_else(unknown)?;
            let all = one.to_array_of_size(rows).map_err(|e| e.to_string())?;
            cast_with_options(&all, to, &STRICT).map_err(|e| e.to_string())
        }
        // The default of a struct is an empty one: its fields have their own (table spec, "Default values").
        (Some(Literal::Struct(_)), Type::Struct(fields), DataType::Struct(targets)) => {
            let mut children = Vec::with_capacity(targets.len());
            for (field, target) in fields.fields().iter().zip(targets) {
                children.push(default_of(field, target, rows, which)?);
            }
            let all = StructArray::try_new_with_length(targets.clone(), children, None, rows);
            Ok(Arc::new(all.map_err(|e| e.to_string())?))
        }
        _ => Err(unknown()),
    }
}

/// The value in a type that a cast to `to` keeps: numbers of days and of time units stay the numbers they are.
fn scalar(literal: &PrimitiveLiteral, to: &DataType) -> Option<ScalarValue> {
    Some(match (literal, to) {
        (PrimitiveLiteral::Boolean(value), _) => ScalarValue::Boolean(Some(*value)),
        (PrimitiveLiteral::Int(value), _) => ScalarValue::Int32(Some(*value)),
        (PrimitiveLiteral::Long(value), _) => ScalarValue::Int64(Some(*value)),
        (PrimitiveLiteral::Float(value), _) => ScalarValue::Float32(Some(value.0)),
        (PrimitiveLiteral::Double(value), _) => ScalarValue::Float64(Some(value.0)),
        (PrimitiveLiteral::String(value), _) => ScalarValue::Utf8(Some(value.clone())),
        (PrimitiveLiteral::Binary(value), DataType::FixedSizeBinary(size)) => {
            ScalarValue::FixedSizeBinary(*size, Some(value.clone()))
        }
        (PrimitiveLiteral::Binary(value), _) => ScalarValue::LargeBinary(Some(value.clone())),
        (PrimitiveLiteral::Int128(value), DataType::Decimal128(precision, scale)) => {
            ScalarValue::Decimal128(Some(*value), *precision, *scale)
        }
        (PrimitiveLiteral::UInt128(value), _) => {
            ScalarValue::FixedSizeBinary(16, Some(value.to_be_bytes().to_vec()))
        }
        (PrimitiveLiteral::Int128(_) | PrimitiveLiteral::AboveMax | PrimitiveLiteral::BelowMin, _) => {
            return None;
        }
    })
}

/// A value of the file in the column's present type (table spec, "Schema Evolution"; dates become timestamps
/// in format v3).
fn widened(array: &ArrayRef, to: &DataType) -> Result<ArrayRef, String> {
    let from = array.data_type();
    if from == to {
        return Ok(Arc::clone(array));
    }
    if let (DataType::Date32, DataType::Timestamp(unit, None)) = (from, to) {
        return match unit {
            TimeUnit::Microsecond => midnights::<TimestampMicrosecondType>(array, MICROS_OF_DAY),
            TimeUnit::Nanosecond => midnights::<TimestampNanosecondType>(array, NANOS_OF_DAY),
            TimeUnit::Second | TimeUnit::Millisecond => Err(format!("it is {from} in the file")),
        };
    }
    if !keeps_values(from, to) {
        return Err(format!("it is {from} in the file and {to} in the table"));
    }
    cast_with_options(array, to, &STRICT).map_err(|e| e.to_string())
}

fn midnights<T: ArrowPrimitiveType<Native = i64>>(array: &ArrayRef, of_day: i64) -> Result<ArrayRef, String> {
    let days = array.as_primitive::<Date32Type>();
    let at = days.try_unary::<_, T, String>(|day| {
        i64::from(day).checked_mul(of_day).ok_or_else(|| format!("day {day} is out of range"))
    })?;
    Ok(Arc::new(at))
}

/// Promotions, and the same values as other writers store them.
fn keeps_values(from: &DataType, to: &DataType) -> bool {
    use DataType::{
        Binary, Decimal128, FixedSizeBinary, Float32, Float64, Int8, Int16, Int32, Int64, LargeBinary,
        Time32, Time64, Timestamp, UInt8, UInt16, UInt32, Utf8,
    };
    match (from, to) {
        (Int8 | Int16 | UInt8 | UInt16, Int32) => true,
        (Int8 | Int16 | Int32 | UInt8 | UInt16 | UInt32, Int64) => true,
        (Float32, Float64) => true,
        (Decimal128(p, s), Decimal128(wider, scale)) => s == scale && wider >= p,
        // Old writers do not mark texts.
        (Binary, LargeBinary | Utf8) | (FixedSizeBinary(_), LargeBinary) => true,
        (Time32(_), Time64(_)) => true,
        // Times without a zone are of UTC where the table has one: so were those of 96 bits always.
        (Timestamp(unit, zone), Timestamp(finer, other)) => {
            unit <= finer && (zone.is_none() || other.is_some())
        }
        _ => false,
    }
}
