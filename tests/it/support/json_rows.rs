//! Rows as JSON in the form of `tests/python/json_values.py`, whichever engine they come from.

use datafusion::arrow::array::{
    Array, AsArray, BooleanArray, FixedSizeBinaryArray, GenericListArray, MapArray, OffsetSizeTrait,
    RecordBatch, StructArray,
};
use datafusion::arrow::datatypes::{
    DataType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int32Type, Int64Type,
    Time64MicrosecondType, TimeUnit, TimestampMicrosecondType, TimestampNanosecondType,
};
use datafusion::arrow::temporal_conversions::{as_date, as_datetime, as_time};
use serde_json::{Map, Value, json};

/// One line of canonical JSON a row, sorted: a multiset that can be compared.
pub fn lines<'a>(rows: impl IntoIterator<Item = &'a Value>) -> Vec<String> {
    let mut lines: Vec<String> = rows.into_iter().map(canonical).collect();
    lines.sort();
    lines
}

/// Keys sorted, numbers as they are.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let mut pairs: Vec<(&String, &Value)> = members.iter().collect();
            pairs.sort_by_key(|(key, _)| *key);
            let pairs: Vec<String> = pairs.iter().map(|(k, v)| format!("{k}: {}", canonical(v))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(canonical).collect();
            format!("[{}]", items.join(", "))
        }
        // 1.0 and 1 are one number, -0.0 is not 0.0.
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() => format!("{float:?}"),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

pub fn rows(batch: &RecordBatch) -> Vec<Value> {
    let schema = batch.schema();
    (0..batch.num_rows())
        .map(|row| {
            let members = schema.fields().iter().zip(batch.columns());
            Value::Object(members.map(|(f, column)| (f.name().clone(), value(column, row))).collect())
        })
        .collect()
}

fn value(array: &dyn Array, at: usize) -> Value {
    if array.is_null(at) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::Boolean => {
            json!(array.as_any().downcast_ref::<BooleanArray>().unwrap().value(at))
        }
        DataType::Int32 => json!(array.as_primitive::<Int32Type>().value(at)),
        DataType::Int64 => json!(array.as_primitive::<Int64Type>().value(at)),
        DataType::Float32 => float(f64::from(array.as_primitive::<Float32Type>().value(at))),
        DataType::Float64 => float(array.as_primitive::<Float64Type>().value(at)),
        DataType::Utf8 => json!(array.as_string::<i32>().value(at)),
        DataType::LargeUtf8 => json!(array.as_string::<i64>().value(at)),
        DataType::Binary => json!(hex(array.as_binary::<i32>().value(at))),
        DataType::LargeBinary => json!(hex(array.as_binary::<i64>().value(at))),
        DataType::FixedSizeBinary(size) => {
            let bytes = array.as_any().downcast_ref::<FixedSizeBinaryArray>().unwrap().value(at);
            match size {
                16 => json!(uuid::Uuid::from_slice(bytes).unwrap().to_string()),
                _ => json!(hex(bytes)),
            }
        }
        DataType::Date32 => {
            let date = as_date::<Date32Type>(i64::from(array.as_primitive::<Date32Type>().value(at)));
            json!(date.unwrap().to_string())
        }
        DataType::Time64(TimeUnit::Microsecond) => {
            let time =
                as_time::<Time64MicrosecondType>(array.as_primitive::<Time64MicrosecondType>().value(at));
            json!(time.unwrap().to_string())
        }
        DataType::Timestamp(TimeUnit::Microsecond, zone) => {
            let micros = array.as_primitive::<TimestampMicrosecondType>().value(at);
            let time = as_datetime::<TimestampMicrosecondType>(micros).unwrap();
            json!(timestamp(&time.format("%Y-%m-%dT%H:%M:%S%.f").to_string(), zone.is_some()))
        }
        DataType::Timestamp(TimeUnit::Nanosecond, zone) => {
            let nanos = array.as_primitive::<TimestampNanosecondType>().value(at);
            let time = as_datetime::<TimestampNanosecondType>(nanos).unwrap();
            json!(timestamp(&time.format("%Y-%m-%dT%H:%M:%S%.f").to_string(), zone.is_some()))
        }
        DataType::Decimal128(_, scale) => {
            json!(decimal(array.as_primitive::<Decimal128Type>().value(at), *scale))
        }
        DataType::Struct(_) => struct_value(array.as_struct(), at),
        DataType::List(_) => list(array.as_list::<i32>(), at),
        DataType::LargeList(_) => list(array.as_list::<i64>(), at),
        DataType::Map(_, _) => map(array.as_map(), at),
        other => panic!("no JSON form for {other}"),
    }
}

fn float(value: f64) -> Value {
    if value.is_nan() {
        json!("nan")
    } else if value.is_infinite() {
        json!(if value > 0.0 { "inf" } else { "-inf" })
    } else {
        json!(value)
    }
}

fn timestamp(text: &str, zoned: bool) -> String {
    if zoned { format!("{text}+00:00") } else { text.to_owned() }
}

fn decimal(unscaled: i128, scale: i8) -> String {
    let scale = usize::try_from(scale).unwrap();
    let digits = format!("{:0>width$}", unscaled.unsigned_abs(), width = scale + 1);
    let (whole, part) = digits.split_at(digits.len() - scale);
    let sign = if unscaled < 0 { "-" } else { "" };
    if scale == 0 { format!("{sign}{whole}") } else { format!("{sign}{whole}.{part}") }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn struct_value(array: &StructArray, at: usize) -> Value {
    let members = array.fields().iter().zip(array.columns());
    Value::Object(members.map(|(f, column)| (f.name().clone(), value(column, at))).collect::<Map<_, _>>())
}

fn list<O: OffsetSizeTrait>(array: &GenericListArray<O>, at: usize) -> Value {
    let items = array.value(at);
    Value::Array((0..items.len()).map(|item| value(&items, item)).collect())
}

/// Pairs, as the other engines give them.
fn map(array: &MapArray, at: usize) -> Value {
    let pairs = array.value(at);
    let (keys, values) = (pairs.column(0), pairs.column(1));
    Value::Array((0..pairs.len()).map(|pair| json!([value(keys, pair), value(values, pair)])).collect())
}
