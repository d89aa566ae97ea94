//! The values of a stripe, column by column, as Arrow arrays in the types that the file has (ORC specification
//! v1, "Column Encodings"; table spec, "Appendix A", ORC).
//!
//! A column has streams only for what is there: of a struct that is null its fields have nothing.

use std::sync::Arc;

use chrono::{DateTime, Offset, TimeZone};
use chrono_tz::Tz;
use datafusion::arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, BooleanBufferBuilder, Date32Array, Decimal128Array,
    FixedSizeBinaryArray, Float32Array, Float64Array, Int8Array, Int16Array, Int32Array, Int64Array,
    ListArray, MapArray, NullBufferBuilder, StringArray, StructArray, Time64MicrosecondArray,
    TimestampMicrosecondArray, TimestampNanosecondArray, UInt32Array,
};
use datafusion::arrow::buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use datafusion::arrow::compute::take;
use datafusion::arrow::datatypes::{ArrowNativeType, Field, FieldRef, Fields};
use datafusion::arrow::error::ArrowError;

use super::super::fault::{Decoded, Fault};
use super::super::named::{ELEMENT, KEY, VALUE};
use super::integers::Integers;
use super::stream::{Bits, ByteRuns, Stream};

/// Seconds of 2015 began, in UTC: where the timestamps of a file count from.
pub(super) const EPOCH_SECONDS: i64 = 1_420_070_400;
const NANOS_OF_SECOND: i64 = 1_000_000_000;
/// What instants are of in a table.
const UTC: &str = "+00:00";

/// A column with what is left of its streams.
pub(super) struct Column {
    /// Whether each value is there; `None`: all are.
    pub present: Option<Bits>,
    pub values: Values,
}

pub(super) enum Values {
    Boolean(Bits),
    Byte(ByteRuns),
    Short(Integers),
    Int(Integers),
    Long(Integers),
    Time(Integers),
    Date(Integers),
    Float(Stream),
    Double(Stream),
    Text(Pieces),
    Binary(Pieces),
    Fixed(Pieces, i32),
    Decimal { numbers: Stream, scales: Integers, precision: u8, scale: i8 },
    Timestamp(Times),
    Struct(Vec<(String, Column)>),
    List(Integers, Box<Column>),
    Map(Integers, Box<[Column; 2]>),
}

/// Texts or bytes.
pub(super) enum Pieces {
    Direct { lengths: Integers, bytes: Stream },
    Dictionary { places: Integers, ends: Vec<usize>, bytes: Vec<u8> },
}

pub(super) struct Times {
    pub seconds: Integers,
    pub nanos: Integers,
    /// Are nanoseconds kept?
    pub in_nanos: bool,
    pub instant: bool,
    /// Of the writer, where its wall clock is meant and was not that of UTC.
    pub zone: Option<Tz>,
}

fn wrong(error: ArrowError) -> Fault {
    Fault::corrupt(error.to_string())
}

fn too_many() -> Fault {
    Fault::unsupported(
        "one batch of a column has more than 2^31 bytes or items; write its rows again in smaller stripes",
    )
}

impl Column {
    /// The next `rows` values.
    pub fn next(&mut self, rows: usize) -> Decoded<ArrayRef> {
        let nulls = match &mut self.present {
            None => None,
            Some(bits) => {
                let mut nulls = NullBufferBuilder::new(0);
                for _ in 0..rows {
                    nulls.append(bits.next()?);
                }
                nulls.finish()
            }
        };
        let here = rows - nulls.as_ref().map_or(0, NullBuffer::null_count);
        self.values.next(rows, here, nulls)
    }
}

/// `count` values that are there, with a stop at the first that is not.
fn collect<T>(count: usize, mut next: impl FnMut() -> Decoded<T>) -> Decoded<Vec<T>> {
    let mut values = Vec::new();
    for _ in 0..count {
        values.push(next()?);
    }
    Ok(values)
}

/// The values in their places, with any others where nothing is.
fn spread<T: ArrowNativeType>(values: Vec<T>, nulls: Option<&NullBuffer>) -> ScalarBuffer<T> {
    let Some(nulls) = nulls else { return values.into() };
    let mut rest = values.into_iter();
    let place = |valid: bool| if valid { rest.next().unwrap_or_default() } else { T::default() };
    nulls.iter().map(place).collect::<Vec<T>>().into()
}

/// Where pieces of these lengths end, one after the other; what is not there has no length.
fn offsets(lengths: &[usize], nulls: Option<&NullBuffer>) -> Decoded<OffsetBuffer<i32>> {
    let mut ends = vec![0_i32];
    let mut end = 0_usize;
    let mut push = |length: usize| {
        end = end.checked_add(length).ok_or_else(too_many)?;
        ends.push(i32::try_from(end).map_err(|_| too_many())?);
        Ok(())
    };
    match nulls {
        None => lengths.iter().try_for_each(|length| push(*length))?,
        Some(nulls) => {
            let mut rest = lengths.iter();
            nulls.iter().try_for_each(|valid| {
                push(if valid { rest.next().copied().unwrap_or_default() } else { 0 })
            })?;
        }
    }
    Ok(OffsetBuffer::new(ends.into()))
}

fn last(offsets: &OffsetBuffer<i32>) -> usize {
    offsets.last().and_then(|end| usize::try_from(*end).ok()).unwrap_or_default()
}

fn smaller<T: TryFrom<i64>>(value: i64) -> Decoded<T> {
    T::try_from(value).map_err(|_| Fault::corrupt("a number of it is too large for its type"))
}

impl Values {
    /// `rows` values, of which `here` are there.
    fn next(&mut self, rows: usize, here: usize, nulls: Option<NullBuffer>) -> Decoded<ArrayRef> {
        let is = nulls.as_ref();
        Ok(match self {
            Self::Boolean(bits) => {
                let values = collect(here, || bits.next())?;
                let mut all = BooleanBufferBuilder::new(0);
                let mut rest = values.into_iter();
                for at in 0..rows {
                    let valid = is.is_none_or(|nulls| nulls.is_valid(at));
                    all.append(valid && rest.next().unwrap_or_default());
                }
                Arc::new(BooleanArray::new(all.finish(), nulls))
            }
            Self::Byte(runs) => {
                let values = collect(here, || Ok(runs.next()?.cast_signed()))?;
                Arc::new(Int8Array::new(spread(values, is), nulls))
            }
            Self::Short(numbers) => {
                let values = collect(here, || smaller::<i16>(numbers.next()?))?;
                Arc::new(Int16Array::new(spread(values, is), nulls))
            }
            Self::Int(numbers) => {
                let values = collect(here, || smaller::<i32>(numbers.next()?))?;
                Arc::new(Int32Array::new(spread(values, is), nulls))
            }
            Self::Date(numbers) => {
                let values = collect(here, || smaller::<i32>(numbers.next()?))?;
                Arc::new(Date32Array::new(spread(values, is), nulls))
            }
            Self::Long(numbers) => {
                let values = collect(here, || numbers.next())?;
                Arc::new(Int64Array::new(spread(values, is), nulls))
            }
            Self::Time(numbers) => {
                let values = collect(here, || numbers.next())?;
                Arc::new(Time64MicrosecondArray::new(spread(values, is), nulls))
            }
            Self::Float(stream) => {
                let values = collect(here, || stream.array().map(f32::from_le_bytes))?;
                Arc::new(Float32Array::new(spread(values, is), nulls))
            }
            Self::Double(stream) => {
                let values = collect(here, || stream.array().map(f64::from_le_bytes))?;
                Arc::new(Float64Array::new(spread(values, is), nulls))
            }
            Self::Text(pieces) => {
                let (ends, bytes) = pieces.next(here, is)?;
                Arc::new(StringArray::try_new(ends, bytes, nulls).map_err(wrong)?)
            }
            Self::Binary(pieces) => {
                let (ends, bytes) = pieces.next(here, is)?;
                Arc::new(BinaryArray::try_new(ends, bytes, nulls).map_err(wrong)?)
            }
            Self::Fixed(pieces, size) => {
                let (ends, bytes) = pieces.next(here, is)?;
                fixed(&ends, &bytes, *size, nulls)?
            }
            Self::Decimal { numbers, scales, precision, scale } => {
                let values = collect(here, || rescaled(numbers.wide()?, scales.next()?, *scale))?;
                let array = Decimal128Array::new(spread(values, is), nulls);
                let array = array.with_precision_and_scale(*precision, *scale).map_err(wrong)?;
                array.validate_decimal_precision(*precision).map_err(wrong)?;
                Arc::new(array)
            }
            Self::Timestamp(times) => {
                let values = spread(collect(here, || times.next())?, is);
                let zone = times.instant.then(|| Arc::from(UTC));
                if times.in_nanos {
                    Arc::new(TimestampNanosecondArray::new(values, nulls).with_timezone_opt(zone))
                } else {
                    Arc::new(TimestampMicrosecondArray::new(values, nulls).with_timezone_opt(zone))
                }
            }
            Self::Struct(columns) => {
                let places = is.map(places).transpose()?;
                let mut arrays = Vec::with_capacity(columns.len());
                let mut fields: Vec<FieldRef> = Vec::with_capacity(columns.len());
                for (name, column) in columns {
                    let mut array = column.next(here)?;
                    if let Some(places) = &places {
                        array = take(&array, places, None).map_err(wrong)?;
                    }
                    fields.push(field(name, &array));
                    arrays.push(array);
                }
                let array = StructArray::try_new_with_length(fields.into(), arrays, nulls, rows);
                Arc::new(array.map_err(wrong)?)
            }
            Self::List(lengths, element) => {
                let ends = offsets(&collect(here, || lengths.next_size())?, is)?;
                let elements = element.next(last(&ends))?;
                Arc::new(ListArray::try_new(field(ELEMENT, &elements), ends, elements, nulls).map_err(wrong)?)
            }
            Self::Map(lengths, columns) => {
                let ends = offsets(&collect(here, || lengths.next_size())?, is)?;
                let [key, value] = columns.as_mut();
                let (keys, values) = (key.next(last(&ends))?, value.next(last(&ends))?);
                let fields: Fields = vec![field(KEY, &keys), field(VALUE, &values)].into();
                let entries =
                    StructArray::try_new(fields.clone(), vec![keys, values], None).map_err(wrong)?;
                let entry = Arc::new(Field::new_struct("entries", fields, false));
                Arc::new(MapArray::try_new(entry, ends, entries, nulls, false).map_err(wrong)?)
            }
        })
    }
}

fn field(name: &str, array: &ArrayRef) -> FieldRef {
    Arc::new(Field::new(name, array.data_type().clone(), true))
}

/// For each place the number of the value in it.
fn places(nulls: &NullBuffer) -> Decoded<UInt32Array> {
    let mut next = 0_u32;
    let place = |valid: bool| {
        if !valid {
            return Ok(None);
        }
        let at = next;
        next = next.checked_add(1).ok_or_else(too_many)?;
        Ok(Some(at))
    };
    nulls.iter().map(place).collect()
}

fn fixed(
    ends: &OffsetBuffer<i32>,
    bytes: &Buffer,
    size: i32,
    nulls: Option<NullBuffer>,
) -> Decoded<ArrayRef> {
    let width = usize::try_from(size).unwrap_or_default();
    let mut all = Vec::new();
    let mut rest = bytes.as_slice();
    for (at, length) in ends.lengths().enumerate() {
        if nulls.as_ref().is_some_and(|nulls| nulls.is_null(at)) {
            all.resize(all.len() + width, 0);
            continue;
        }
        if length != width {
            return Err(Fault::corrupt(format!("a value of {width} bytes has {length}")));
        }
        let (value, after) = rest.split_at_checked(length).unwrap_or_default();
        all.extend_from_slice(value);
        rest = after;
    }
    Ok(Arc::new(FixedSizeBinaryArray::try_new(size, all.into(), nulls).map_err(wrong)?))
}

/// Writers leave zeros at the end away.
fn rescaled(number: i128, from: i64, to: i8) -> Decoded<i128> {
    let out_of_range = || Fault::corrupt("a decimal of it is out of range");
    let factor = |digits: i64| {
        u32::try_from(digits).ok().and_then(|digits| 10_i128.checked_pow(digits)).ok_or_else(out_of_range)
    };
    let more = i64::from(to).checked_sub(from).ok_or_else(out_of_range)?;
    if more >= 0 {
        return number.checked_mul(factor(more)?).ok_or_else(out_of_range);
    }
    let factor = factor(more.checked_neg().ok_or_else(out_of_range)?)?;
    if number % factor == 0 { Ok(number / factor) } else { Err(out_of_range()) }
}

impl Pieces {
    /// `here` pieces in their places: where each ends, and their bytes.
    fn next(&mut self, here: usize, nulls: Option<&NullBuffer>) -> Decoded<(OffsetBuffer<i32>, Buffer)> {
        let mut all = Vec::new();
        let ends = match self {
            Self::Direct { lengths, bytes } => {
                let ends = offsets(&collect(here, || lengths.next_size())?, nulls)?;
                bytes.append(&mut all, last(&ends))?;
                ends
            }
            Self::Dictionary { places, ends, bytes } => {
                let entries = collect(here, || {
                    let at = places.next_size()?;
                    let start = if at == 0 { Some(0) } else { ends.get(at - 1).copied() };
                    let entry = start.zip(ends.get(at).copied());
                    entry.ok_or_else(|| Fault::corrupt(format!("a dictionary of it has no entry {at}")))
                })?;
                let lengths: Vec<usize> = entries.iter().map(|(start, end)| end - start).collect();
                // Checked for its size before a byte is copied.
                let of_all = offsets(&lengths, nulls)?;
                for (start, end) in entries {
                    all.extend_from_slice(&bytes[start..end]);
                }
                of_all
            }
        };
        Ok((ends, all.into()))
    }

    /// Reads a dictionary of `entries`.
    pub fn dictionary(
        places: Integers,
        mut lengths: Integers,
        mut stream: Stream,
        entries: usize,
    ) -> Decoded<Self> {
        let mut end = 0_usize;
        let ends = collect(entries, || {
            end = end.checked_add(lengths.next_size()?).ok_or_else(too_many)?;
            Ok(end)
        })?;
        let mut bytes = Vec::new();
        stream.append(&mut bytes, end)?;
        Ok(Self::Dictionary { places, ends, bytes })
    }
}

impl Times {
    /// In the unit of the column, since 1970 in UTC, or by the wall clock of the writer.
    fn next(&mut self) -> Decoded<i64> {
        let out_of_range = || Fault::corrupt("a timestamp of it is out of range");
        let base = self.zone.map_or(Some(EPOCH_SECONDS), |zone| {
            zone.with_ymd_and_hms(2015, 1, 1, 0, 0, 0).earliest().map(|time| time.timestamp())
        });
        let seconds = self.seconds.next()?;
        let mut seconds = base.and_then(|base| base.checked_add(seconds)).ok_or_else(out_of_range)?;
        let packed = self.nanos.next()?.cast_unsigned();
        // The last three bits are the number of zeros that were left away, less one; none is none.
        let (zeros, digits) = (packed & 7, packed >> 3);
        let factor = if zeros == 0 { 1 } else { 10_u64.pow(u32::try_from(zeros).unwrap_or_default() + 1) };
        let nanos = digits.checked_mul(factor).and_then(|nanos| i64::try_from(nanos).ok());
        let nanos = nanos.filter(|nanos| *nanos < NANOS_OF_SECOND).ok_or_else(out_of_range)?;
        // Writers round towards 1970 where there is a part of a second; Java's reader puts it right so.
        if seconds < 0 && nanos > 999_999 {
            seconds -= 1;
        }
        if let Some(zone) = self.zone {
            let time = DateTime::from_timestamp(seconds, 0).ok_or_else(out_of_range)?.naive_utc();
            seconds += i64::from(zone.offset_from_utc_datetime(&time).fix().local_minus_utc());
        }
        let (units, of_second) =
            if self.in_nanos { (nanos, NANOS_OF_SECOND) } else { (nanos / 1000, NANOS_OF_SECOND / 1000) };
        let time = seconds.checked_mul(of_second).and_then(|time| time.checked_add(units));
        time.ok_or_else(out_of_range)
    }
}
