//! Values of an Avro file as columns: rows come one after the other, columns go out as Arrow arrays in the
//! types that the file has.

use std::sync::Arc;

use datafusion::arrow::array::builder::BooleanBufferBuilder;
use datafusion::arrow::array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, FixedSizeBinaryArray,
    Float32Array, Float64Array, Int32Array, Int64Array, ListArray, MapArray, NullArray, NullBufferBuilder,
    StringArray, StructArray, Time32MillisecondArray, Time64MicrosecondArray, TimestampMicrosecondArray,
    TimestampMillisecondArray, TimestampNanosecondArray, TimestampSecondArray,
};
use datafusion::arrow::buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use datafusion::arrow::datatypes::{Field as ArrowField, FieldRef, Fields, TimeUnit};
use datafusion::arrow::error::ArrowError;

use super::super::fault::{Decoded, Fault};
use super::super::named::{ELEMENT, KEY, VALUE};
use super::cursor::Cursor;
use super::schema::{Field, Node};

/// Bytes of one column of a batch, of texts and lists; offsets have 32 bits.
const MAX_COLUMN_BYTES: usize = i32::MAX as usize;

/// Values that were read and not given out yet.
pub(super) struct Column {
    nulls: NullBufferBuilder,
    values: Values,
}

enum Values {
    Null,
    Boolean(BooleanBufferBuilder),
    /// With the node that says what the numbers mean.
    Int(Vec<i32>, Node),
    Long(Vec<i64>, Node),
    Float(Vec<f32>),
    Double(Vec<f64>),
    Bytes {
        bytes: Vec<u8>,
        ends: Ends,
        are_text: bool,
    },
    Fixed {
        bytes: Vec<u8>,
        size: usize,
    },
    Decimal {
        numbers: Vec<i128>,
        precision: u8,
        scale: i8,
    },
    Record(Vec<(String, Column)>),
    List {
        ends: Ends,
        element: Box<Column>,
    },
    Map {
        ends: Ends,
        key: Box<Column>,
        value: Box<Column>,
    },
}

/// Where each of several values ends in what they have in common.
struct Ends(Vec<i32>);

impl Ends {
    fn new() -> Self {
        Self(vec![0])
    }

    fn push(&mut self, end: usize) -> Decoded<()> {
        let end = i32::try_from(end).map_err(|_| {
            Fault::unsupported(format!(
                "one batch of a column has more than {MAX_COLUMN_BYTES} bytes or items"
            ))
        })?;
        self.0.push(end);
        Ok(())
    }

    fn repeat(&mut self) {
        self.0.push(self.0.last().copied().unwrap_or_default());
    }

    /// They ascend: each is pushed with the length of what only grows.
    fn take(&mut self) -> OffsetBuffer<i32> {
        OffsetBuffer::new(ScalarBuffer::from(std::mem::replace(&mut self.0, vec![0])))
    }
}

impl Column {
    pub fn of(node: &Node) -> Decoded<Self> {
        let values = match node {
            Node::Optional { inner, .. } => return Self::of(inner),
            Node::Null => Values::Null,
            Node::Boolean => Values::Boolean(BooleanBufferBuilder::new(0)),
            Node::Int | Node::Date | Node::TimeMillis => Values::Int(Vec::new(), node.clone()),
            Node::Long | Node::TimeMicros | Node::Timestamp(_) => Values::Long(Vec::new(), node.clone()),
            Node::Float => Values::Float(Vec::new()),
            Node::Double => Values::Double(Vec::new()),
            Node::Bytes => Values::Bytes { bytes: Vec::new(), ends: Ends::new(), are_text: false },
            Node::Text | Node::Enum(_) => {
                Values::Bytes { bytes: Vec::new(), ends: Ends::new(), are_text: true }
            }
            Node::Fixed(size) => Values::Fixed { bytes: Vec::new(), size: *size },
            Node::Decimal { precision, scale, .. } => {
                Values::Decimal { numbers: Vec::new(), precision: *precision, scale: *scale }
            }
            Node::Record(fields) => {
                let column = |field: &Field| Ok((field.name.clone(), Self::of(&field.node)?));
                Values::Record(fields.iter().map(column).collect::<Decoded<_>>()?)
            }
            Node::List { element, .. } => {
                Values::List { ends: Ends::new(), element: Box::new(Self::of(element)?) }
            }
            Node::Map { value, .. } => Values::Map {
                ends: Ends::new(),
                key: Box::new(Self::of(&Node::Text)?),
                value: Box::new(Self::of(value)?),
            },
            Node::Entries { key, value } => Values::Map {
                ends: Ends::new(),
                key: Box::new(Self::of(&key.node)?),
                value: Box::new(Self::of(&value.node)?),
            },
            Node::Union(_) => {
                return Err(Fault::unsupported(
                    "a column is a union of several types, which no Iceberg type is; write its rows again with an \
                     Iceberg writer",
                ));
            }
        };
        Ok(Self { nulls: NullBufferBuilder::new(0), values })
    }

    /// Reads one value.
    pub fn read(&mut self, cursor: &mut Cursor<'_>, node: &Node) -> Decoded<()> {
        let node = match node {
            Node::Optional { null_at, inner } => {
                if !cursor.is_present(*null_at)? {
                    self.push_null();
                    return Ok(());
                }
                inner
            }
            other => other,
        };
        match (&mut self.values, node) {
            (Values::Null, Node::Null) => {
                self.nulls.append_null();
                return Ok(());
            }
            (Values::Boolean(bits), Node::Boolean) => match cursor.array()? {
                [0] => bits.append(false),
                [1] => bits.append(true),
                [other] => return Err(Fault::corrupt(format!("a truth value is {other}"))),
            },
            (Values::Int(numbers, _), _) => numbers.push(cursor.int()?),
            (Values::Long(numbers, _), _) => numbers.push(cursor.long()?),
            (Values::Float(numbers), _) => numbers.push(f32::from_le_bytes(cursor.array()?)),
            (Values::Double(numbers), _) => numbers.push(f64::from_le_bytes(cursor.array()?)),
            (Values::Bytes { bytes, ends, .. }, Node::Enum(symbols)) => {
                let at = cursor.long()?;
                let symbol = usize::try_from(at).ok().and_then(|at| symbols.get(at));
                let symbol = symbol.ok_or_else(|| Fault::corrupt(format!("an enum has no symbol {at}")))?;
                bytes.extend_from_slice(symbol.as_bytes());
                ends.push(bytes.len())?;
            }
            (Values::Bytes { bytes, ends, .. }, _) => {
                bytes.extend_from_slice(cursor.sized()?);
                ends.push(bytes.len())?;
            }
            (Values::Fixed { bytes, size }, _) => bytes.extend_from_slice(cursor.take(*size)?),
            (Values::Decimal { numbers, .. }, Node::Decimal { size, .. }) => {
                let bytes = match size {
                    Some(size) => cursor.take(*size)?,
                    None => cursor.sized()?,
                };
                numbers.push(unscaled(bytes)?);
            }
            (Values::Record(columns), Node::Record(fields)) => {
                for ((_, column), field) in columns.iter_mut().zip(fields) {
                    column.read(cursor, &field.node)?;
                }
            }
            (Values::List { ends, element }, Node::List { element: of, .. }) => {
                cursor.items(|cursor| element.read(cursor, of))?;
                ends.push(element.len())?;
            }
            (Values::Map { ends, key, value }, Node::Map { value: of, .. }) => {
                cursor.items(|cursor| {
                    key.read(cursor, &Node::Text)?;
                    value.read(cursor, of)
                })?;
                ends.push(key.len())?;
            }
            (Values::Map { ends, key, value }, Node::Entries { key: key_of, value: value_of }) => {
                cursor.items(|cursor| {
                    key.read(cursor, &key_of.node)?;
                    value.read(cursor, &value_of.node)
                })?;
                ends.push(key.len())?;
            }
            _ => return Err(Fault::corrupt("a value is not of its column's type")),
        }
        self.nulls.append_non_null();
        Ok(())
    }

    /// Number of values.
    fn len(&self) -> usize {
        self.nulls.len()
    }

    fn push_null(&mut self) {
        self.nulls.append_null();
        match &mut self.values {
            Values::Null => {}
            Values::Boolean(bits) => bits.append(false),
            Values::Int(numbers, _) => numbers.push(0),
            Values::Long(numbers, _) => numbers.push(0),
            Values::Float(numbers) => numbers.push(0.0),
            Values::Double(numbers) => numbers.push(0.0),
            Values::Bytes { ends, .. } | Values::List { ends, .. } | Values::Map { ends, .. } => {
                ends.repeat()
            }
            Values::Fixed { bytes, size } => bytes.resize(bytes.len() + *size, 0),
            Values::Decimal { numbers, .. } => numbers.push(0),
            Values::Record(columns) => columns.iter_mut().for_each(|(_, column)| column.push_null()),
        }
    }

    /// All values, of which there are none any more.
    pub fn finish(&mut self) -> Decoded<ArrayRef> {
        let rows = self.len();
        let nulls = self.nulls.finish();
        self.values.finish(rows, nulls).map_err(|e| Fault::corrupt(e.to_string()))
    }
}

impl Values {
    fn finish(&mut self, rows: usize, nulls: Option<NullBuffer>) -> Result<ArrayRef, ArrowError> {
        use std::mem::take;
        let inside = |fault: Fault| ArrowError::ComputeError(format!("{fault:?}"));
        Ok(match self {
            Self::Null => Arc::new(NullArray::new(rows)),
            Self::Boolean(bits) => Arc::new(BooleanArray::new(bits.finish(), nulls)),
            Self::Int(numbers, node) => {
                let numbers = ScalarBuffer::from(take(numbers));
                match node {
                    Node::Date => Arc::new(Date32Array::new(numbers, nulls)),
                    Node::TimeMillis => Arc::new(Time32MillisecondArray::new(numbers, nulls)),
                    _ => Arc::new(Int32Array::new(numbers, nulls)),
                }
            }
            Self::Long(numbers, node) => {
                let numbers = ScalarBuffer::from(take(numbers));
                match node {
                    Node::TimeMicros => Arc::new(Time64MicrosecondArray::new(numbers, nulls)),
                    Node::Timestamp(TimeUnit::Second) => Arc::new(TimestampSecondArray::new(numbers, nulls)),
                    Node::Timestamp(TimeUnit::Millisecond) => {
                        Arc::new(TimestampMillisecondArray::new(numbers, nulls))
                    }
                    Node::Timestamp(TimeUnit::Microsecond) => {
                        Arc::new(TimestampMicrosecondArray::new(numbers, nulls))
                    }
                    Node::Timestamp(TimeUnit::Nanosecond) => {
                        Arc::new(TimestampNanosecondArray::new(numbers, nulls))
                    }
                    _ => Arc::new(Int64Array::new(numbers, nulls)),
                }
            }
            Self::Float(numbers) => Arc::new(Float32Array::new(take(numbers).into(), nulls)),
            Self::Double(numbers) => Arc::new(Float64Array::new(take(numbers).into(), nulls)),
            Self::Bytes { bytes, ends, are_text: true } => {
                Arc::new(StringArray::try_new(ends.take(), Buffer::from(take(bytes)), nulls)?)
            }
            Self::Bytes { bytes, ends, are_text: false } => {
                Arc::new(BinaryArray::try_new(ends.take(), Buffer::from(take(bytes)), nulls)?)
            }
            Self::Fixed { bytes, size } => {
                let size = i32::try_from(*size).unwrap_or(i32::MAX);
                Arc::new(FixedSizeBinaryArray::try_new(size, Buffer::from(take(bytes)), nulls)?)
            }
            Self::Decimal { numbers, precision, scale } => {
                let numbers = Decimal128Array::new(take(numbers).into(), nulls);
                let numbers = numbers.with_precision_and_scale(*precision, *scale)?;
                numbers.validate_decimal_precision(*precision)?;
                Arc::new(numbers)
            }
            Self::Record(columns) => {
                let mut arrays = Vec::with_capacity(columns.len());
                let mut fields: Vec<FieldRef> = Vec::with_capacity(columns.len());
                for (name, column) in columns {
                    let array = column.finish().map_err(inside)?;
                    fields.push(field(name, &array));
                    arrays.push(array);
                }
                Arc::new(StructArray::try_new_with_length(fields.into(), arrays, nulls, rows)?)
            }
            Self::List { ends, element } => {
                let elements = element.finish().map_err(inside)?;
                Arc::new(ListArray::try_new(field(ELEMENT, &elements), ends.take(), elements, nulls)?)
            }
            Self::Map { ends, key, value } => {
                let (keys, values) = (key.finish().map_err(inside)?, value.finish().map_err(inside)?);
                let fields: Fields = vec![field(KEY, &keys), field(VALUE, &values)].into();
                let entries = StructArray::try_new(fields.clone(), vec![keys, values], None)?;
                let entry = Arc::new(ArrowField::new_struct("entries", fields, false));
                Arc::new(MapArray::try_new(entry, ends.take(), entries, nulls, false)?)
            }
        })
    }
}

fn field(name: &str, array: &ArrayRef) -> FieldRef {
    Arc::new(ArrowField::new(name, array.data_type().clone(), true))
}

/// A number as two's complement, the largest byte first.
fn unscaled(bytes: &[u8]) -> Decoded<i128> {
    let negative = bytes.first().is_some_and(|first| first & 0x80 != 0);
    let sign = if negative { 0xff } else { 0 };
    let mut number = [sign; 16];
    let (more, last) = bytes.split_at(bytes.len().saturating_sub(16));
    if more.iter().any(|byte| *byte != sign) {
        return Err(Fault::corrupt("a decimal has more than 38 digits"));
    }
    number[16 - last.len()..].copy_from_slice(last);
    let number = i128::from_be_bytes(number);
    // The sign of a long number is in its first byte, and must be so in the last sixteen.
    if !more.is_empty() && (number < 0) != negative {
        return Err(Fault::corrupt("a decimal has more than 38 digits"));
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_twos_complement_of_any_length() {
        for (bytes, number) in [
            (&[][..], 0),
            (&[0x01], 1),
            (&[0xff], -1),
            (&[0xff; 20], -1),
            (&[0, 0xff], 255),
            (&[0x80, 0x00], -32768),
        ] {
            assert_eq!(unscaled(bytes).unwrap(), number);
        }
        assert_eq!(unscaled(&i128::MIN.to_be_bytes()).unwrap(), i128::MIN);
        assert!(unscaled(&[[1].as_slice(), &[0; 16]].concat()).is_err());
        assert!(unscaled(&[[0].as_slice(), &[0xff; 16]].concat()).is_err());
    }
}
