//! Files written under one schema and read under a later one, against a model that knows values by field id
//! and shares no code with the reader.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, AsArray, Date32Array, Decimal128Array, Float32Array, Float64Array, Int32Array, Int64Array,
    ListArray, MapArray, StringArray, TimestampMicrosecondArray,
};
use datafusion::arrow::array::{ArrayRef, RecordBatch, StructArray};
use datafusion::arrow::buffer::{NullBuffer, OffsetBuffer};
use datafusion::arrow::datatypes::{
    DataType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int32Type, Int64Type, SchemaRef,
    TimestampMicrosecondType,
};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::file::properties::WriterProperties;
use iceberg::arrow::schema_to_arrow_schema;
use iceberg::spec::{
    Literal, NestedField, NestedFieldRef, PrimitiveType, Schema as TableSchema, StructType, Type,
};
use proptest::prelude::*;

use super::*;

const FILE: &str = "memory:///rows.parquet";
/// Few rows a batch, so that a file is many batches.
const ROWS_OF_BATCH: usize = 3;

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Int,
    Long,
    Float,
    Double,
    /// Of this precision and scale 2.
    Decimal(u32),
    Date,
    Timestamp,
    Text,
    Struct(Vec<Column>),
    List(Box<Column>),
    Map(Box<Column>, Box<Column>),
}

#[derive(Clone, Debug, PartialEq)]
struct Column {
    id: i32,
    name: String,
    kind: Kind,
    /// An `initial-default`; of long columns only.
    default: Option<i64>,
}

/// A value as it is meant.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Null,
    /// Whole numbers, days, microseconds, hundredths.
    Number(i64),
    Real(f64),
    Text(String),
    Struct(BTreeMap<i32, Value>),
    List(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

struct Random {
    state: u64,
    next_id: i32,
}

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }

    fn column(&mut self, depth: u32) -> Column {
        let id = self.next_id;
        self.next_id += 1;
        Column { id, name: format!("c{id}"), kind: self.kind(depth), default: None }
    }

    fn kind(&mut self, depth: u32) -> Kind {
        match self.below(if depth == 0 { 8 } else { 14 }) {
            0 => Kind::Int,
            1 => Kind::Long,
            2 => Kind::Float,
            3 => Kind::Double,
            4 => Kind::Decimal(9),
            5 => Kind::Date,
            6 => Kind::Timestamp,
            7 => Kind::Text,
            8 | 9 => Kind::List(Box::new(self.column(depth - 1))),
            10 => {
                let key = Column { kind: Kind::Text, ..self.column(0) };
                Kind::Map(Box::new(key), Box::new(self.column(depth - 1)))
            }
            _ => self.structure(depth),
        }
    }

    fn structure(&mut self, depth: u32) -> Kind {
        Kind::Struct((0..=self.below(3)).map(|_| self.column(depth - 1)).collect())
    }

    /// What a table's owner may do to a column (table spec, "Schema Evolution"; dates as in format v3).
    fn evolved(&mut self, column: &Column, depth: u32) -> Column {
        let mut later = column.clone();
        if self.below(3) == 0 {
            later.name = format!("renamed{}", column.id);
        }
        later.kind = match &column.kind {
            Kind::Int if self.below(2) == 0 => Kind::Long,
            Kind::Float if self.below(2) == 0 => Kind::Double,
            Kind::Decimal(9) if self.below(2) == 0 => Kind::Decimal(12 + self.below(10) as u32),
            Kind::Date if self.below(2) == 0 => Kind::Timestamp,
            Kind::Struct(fields) => {
                let mut kept = Vec::new();
                for field in fields {
                    if self.below(4) > 0 {
                        kept.push(self.evolved(field, depth - 1));
                    }
                }
                let mut fields = kept;
                for _ in 0..self.below(3) {
                    fields.push(self.column(depth - 1));
                }
                if self.below(3) == 0 || fields.is_empty() {
                    let kind = Kind::Long;
                    fields.push(Column { kind, default: Some(self.below(9) as i64), ..self.column(0) });
                }
                self.shuffle(&mut fields);
                Kind::Struct(fields)
            }
            Kind::List(element) => Kind::List(Box::new(self.evolved(element, depth - 1))),
            Kind::Map(key, value) => Kind::Map(key.clone(), Box::new(self.evolved(value, depth - 1))),
            other => other.clone(),
        };
        later
    }

    fn value(&mut self, column: &Column) -> Value {
        if self.below(4) == 0 {
            return Value::Null;
        }
        let number = self.below(2000) as i64 - 1000;
        match &column.kind {
            Kind::Float | Kind::Double => Value::Real(number as f64 / 4.0),
            Kind::Text => Value::Text(format!("t{number}")),
            Kind::Struct(fields) => {
                Value::Struct(fields.iter().map(|field| (field.id, self.value(field))).collect())
            }
            Kind::List(element) => Value::List((0..self.below(4)).map(|_| self.value(element)).collect()),
            Kind::Map(_, value) => {
                let entries = 0..self.below(3);
                Value::Map(entries.map(|at| (Value::Text(format!("k{at}")), self.value(value))).collect())
            }
            _ => Value::Number(number),
        }
    }
}

/// The value of a column under a later schema: the naive reading of the spec.
fn meant(value: &Value, then: &Column, now: &Column) -> Value {
    match (value, &then.kind, &now.kind) {
        (Value::Number(days), Kind::Date, Kind::Timestamp) => Value::Number(days * 86_400_000_000),
        (Value::Struct(values), Kind::Struct(before), Kind::Struct(after)) => Value::Struct(
            after
                .iter()
                .map(|field| match before.iter().find(|old| old.id == field.id) {
                    Some(old) => (field.id, meant(&values[&field.id], old, field)),
                    None => (field.id, field.default.map_or(Value::Null, Value::Number)),
                })
                .collect(),
        ),
        (Value::List(values), Kind::List(before), Kind::List(after)) => {
            Value::List(values.iter().map(|value| meant(value, before, after)).collect())
        }
        (Value::Map(entries), Kind::Map(_, before), Kind::Map(_, after)) => Value::Map(
            entries.iter().map(|(key, value)| (key.clone(), meant(value, before, after))).collect(),
        ),
        (value, _, _) => value.clone(),
    }
}

fn type_of(kind: &Kind) -> Type {
    let primitive = match kind {
        Kind::Int => PrimitiveType::Int,
        Kind::Long => PrimitiveType::Long,
        Kind::Float => PrimitiveType::Float,
        Kind::Double => PrimitiveType::Double,
        Kind::Decimal(precision) => PrimitiveType::Decimal { precision: *precision, scale: 2 },
        Kind::Date => PrimitiveType::Date,
        Kind::Timestamp => PrimitiveType::Timestamp,
        Kind::Text => PrimitiveType::String,
        Kind::Struct(fields) => return Type::Struct(StructType::new(fields.iter().map(field_of).collect())),
        Kind::List(element) => {
            let element = NestedField::list_element(element.id, type_of(&element.kind), false);
            return Type::List(iceberg::spec::ListType::new(Arc::new(element)));
        }
        Kind::Map(key, value) => {
            let key = NestedField::map_key_element(key.id, type_of(&key.kind));
            let value = NestedField::map_value_element(value.id, type_of(&value.kind), false);
            return Type::Map(iceberg::spec::MapType::new(Arc::new(key), Arc::new(value)));
        }
    };
    Type::Primitive(primitive)
}

fn field_of(column: &Column) -> NestedFieldRef {
    let field = NestedField::optional(column.id, &column.name, type_of(&column.kind));
    Arc::new(match column.default {
        Some(default) => field.with_initial_default(Literal::long(default)),
        None => field,
    })
}

fn arrow_of(columns: &[Column]) -> SchemaRef {
    let schema = TableSchema::builder().with_fields(columns.iter().map(field_of)).build().unwrap();
    Arc::new(schema_to_arrow_schema(&schema).unwrap())
}

fn array_of(values: &[Value], kind: &Kind, to: &DataType) -> ArrayRef {
    let nulls = || NullBuffer::from_iter(values.iter().map(|value| *value != Value::Null));
    let numbers = || values.iter().map(|value| if let Value::Number(n) = value { Some(*n) } else { None });
    let reals = || values.iter().map(|value| if let Value::Real(n) = value { Some(*n) } else { None });
    match (kind, to) {
        (Kind::Int, _) => Arc::new(numbers().map(|n| n.map(|n| n as i32)).collect::<Int32Array>()),
        (Kind::Long, _) => Arc::new(numbers().collect::<Int64Array>()),
        (Kind::Float, _) => Arc::new(reals().map(|n| n.map(|n| n as f32)).collect::<Float32Array>()),
        (Kind::Double, _) => Arc::new(reals().collect::<Float64Array>()),
        (Kind::Decimal(precision), _) => {
            let numbers: Decimal128Array = numbers().map(|n| n.map(i128::from)).collect();
            Arc::new(numbers.with_precision_and_scale(*precision as u8, 2).unwrap())
        }
        (Kind::Date, _) => Arc::new(numbers().map(|n| n.map(|n| n as i32)).collect::<Date32Array>()),
        (Kind::Timestamp, _) => Arc::new(numbers().collect::<TimestampMicrosecondArray>()),
        (Kind::Text, _) => {
            let texts = values.iter().map(|value| if let Value::Text(t) = value { Some(t) } else { None });
            Arc::new(texts.collect::<StringArray>())
        }
        (Kind::Struct(fields), DataType::Struct(targets)) => {
            let of = |field: &Column, target: &FieldRef| {
                let values: Vec<Value> = values
                    .iter()
                    .map(|value| match value {
                        Value::Struct(values) => values[&field.id].clone(),
                        _ => Value::Null,
                    })
                    .collect();
                array_of(&values, &field.kind, target.data_type())
            };
            let arrays = fields.iter().zip(targets).map(|(field, target)| of(field, target)).collect();
            Arc::new(StructArray::new(targets.clone(), arrays, Some(nulls())))
        }
        (Kind::List(element), DataType::List(target)) => {
            let lists: Vec<&[Value]> = values
                .iter()
                .map(|value| if let Value::List(values) = value { values.as_slice() } else { &[] })
                .collect();
            let offsets = OffsetBuffer::from_lengths(lists.iter().map(|list| list.len()));
            let array = array_of(&lists.concat(), &element.kind, target.data_type());
            Arc::new(ListArray::new(Arc::clone(target), offsets, array, Some(nulls())))
        }
        (Kind::Map(key, value), DataType::Map(entries, sorted)) => {
            let DataType::Struct(targets) = entries.data_type() else { panic!("{entries}") };
            let maps: Vec<&[(Value, Value)]> = values
                .iter()
                .map(|value| if let Value::Map(entries) = value { entries.as_slice() } else { &[] })
                .collect();
            let offsets = OffsetBuffer::from_lengths(maps.iter().map(|map| map.len()));
            let (keys, values): (Vec<Value>, Vec<Value>) = maps.concat().into_iter().unzip();
            let keys = array_of(&keys, &key.kind, targets[0].data_type());
            let values = array_of(&values, &value.kind, targets[1].data_type());
            let inner = StructArray::new(targets.clone(), vec![keys, values], None);
            Arc::new(MapArray::new(Arc::clone(entries), offsets, inner, Some(nulls()), *sorted))
        }
        other => panic!("{other:?}"),
    }
}

fn value_at(array: &dyn Array, at: usize, kind: &Kind) -> Value {
    if array.is_null(at) {
        return Value::Null;
    }
    let all = |array: &dyn Array, kind: &Kind| -> Vec<Value> {
        (0..array.len()).map(|at| value_at(array, at, kind)).collect()
    };
    match kind {
        Kind::Int => Value::Number(array.as_primitive::<Int32Type>().value(at).into()),
        Kind::Long => Value::Number(array.as_primitive::<Int64Type>().value(at)),
        Kind::Float => Value::Real(array.as_primitive::<Float32Type>().value(at).into()),
        Kind::Double => Value::Real(array.as_primitive::<Float64Type>().value(at)),
        Kind::Decimal(precision) => {
            assert_eq!(array.data_type(), &DataType::Decimal128(*precision as u8, 2));
            Value::Number(array.as_primitive::<Decimal128Type>().value(at) as i64)
        }
        Kind::Date => Value::Number(array.as_primitive::<Date32Type>().value(at).into()),
        Kind::Timestamp => Value::Number(array.as_primitive::<TimestampMicrosecondType>().value(at)),
        Kind::Text => Value::Text(array.as_string::<i32>().value(at).to_owned()),
        Kind::Struct(fields) => {
            let of = |(field, array): (&Column, &ArrayRef)| (field.id, value_at(array, at, &field.kind));
            Value::Struct(fields.iter().zip(array.as_struct().columns()).map(of).collect())
        }
        Kind::List(element) => Value::List(all(&array.as_list::<i32>().value(at), &element.kind)),
        Kind::Map(key, value) => {
            let entries = array.as_map().value(at);
            let (keys, values) = (all(entries.column(0), &key.kind), all(entries.column(1), &value.kind));
            Value::Map(keys.into_iter().zip(values).collect())
        }
    }
}

async fn write(columns: &[Column], rows: &[Vec<Value>], rows_of_group: usize) -> (FileIO, u64) {
    let schema = arrow_of(columns);
    let arrays = columns.iter().enumerate().map(|(at, column)| {
        let values: Vec<Value> = rows.iter().map(|row| row[at].clone()).collect();
        array_of(&values, &column.kind, schema.field(at).data_type())
    });
    let batch = RecordBatch::try_new(Arc::clone(&schema), arrays.collect()).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(rows_of_group)).build();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, schema, Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let size = bytes.len() as u64;
    let file_io = FileIO::new_with_memory();
    file_io.new_output(FILE).unwrap().write(bytes.into()).await.unwrap();
    (file_io, size)
}

async fn read(file_io: &FileIO, size: u64, columns: &[Column]) -> Vec<Vec<Value>> {
    let schema = arrow_of(columns);
    let wanted = columns.iter().zip(schema.fields());
    let wanted = wanted.map(|(c, target)| WantedColumn { field: field_of(c), target: Arc::clone(target) });
    let fetched = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&fetched);
    let mut reader = NestedReader::open(file_io, FILE, size, wanted.collect(), None, ROWS_OF_BATCH, counter)
        .await
        .unwrap();
    let mut rows = Vec::new();
    while let Some(batch) = reader.next(file_io, FILE).await.unwrap() {
        assert_eq!(batch.schema(), schema);
        for at in 0..batch.num_rows() {
            let columns = columns.iter().zip(batch.columns());
            rows.push(columns.map(|(column, array)| value_at(array, at, &column.kind)).collect());
        }
    }
    assert!(fetched.load(Ordering::Relaxed) > 0);
    rows
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_became_of_nested_columns_they_are_read_by_field_id(state: u64) {
        let mut random = Random { state, next_id: 1 };
        // The file: one struct, list or map and what else there is. Then up to three changes of the table.
        let mut then = vec![random.column(2), Column { kind: random.structure(2), ..random.column(0) }];
        then.push(Column { kind: random.structure(1), ..random.column(0) });
        let rows: Vec<Vec<Value>> =
            (0..random.below(12)).map(|_| then.iter().map(|column| random.value(column)).collect()).collect();
        let mut now = then.clone();
        for _ in 0..random.below(3) {
            now = now.iter().map(|column| random.evolved(column, 2)).collect();
            now.push(random.column(1));
        }
        random.shuffle(&mut now);
        let rows_of_group = 1 + random.below(6) as usize;
        let wanted: Vec<Vec<Value>> = rows
            .iter()
            .map(|row| {
                now.iter()
                    .map(|column| match then.iter().position(|old| old.id == column.id) {
                        Some(at) => meant(&row[at], &then[at], column),
                        None => Value::Null,
                    })
                    .collect()
            })
            .collect();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(async {
            let (file_io, size) = write(&then, &rows, rows_of_group).await;
            read(&file_io, size, &now).await
        });
        prop_assert_eq!(found, wanted, "{:?} -> {:?}", then, now);
    }
}
