//! Which files can have a row with one of some keys, told by the bounds of their columns.
//!
//! A manifest entry says what lies between the lowest and the highest value of a column (table spec, "Manifests":
//! `lower_bounds`, `upper_bounds`, `null_value_counts`). Only of whole numbers, days and times is that taken at its
//! word: their bounds are the values themselves. Bounds of text are cut, and those of fractions do not know NaN. A file
//! that says nothing of a column may have any value in it.

use std::collections::HashMap;

use datafusion::arrow::array::{Array, ArrayRef, AsArray};
use datafusion::arrow::compute::{cast, max, min};
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, TimeUnit};
use datafusion::arrow::error::ArrowError;
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use iceberg::spec::{Datum, PrimitiveLiteral, PrimitiveType};

use super::manifests::LiveFile;

/// What the numbers of a range count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Whole,
    Days,
    Microseconds,
    Nanoseconds,
}

impl Unit {
    fn of(data_type: &DataType) -> Option<Self> {
        match data_type {
            DataType::Int32 | DataType::Int64 => Some(Self::Whole),
            DataType::Date32 => Some(Self::Days),
            DataType::Timestamp(TimeUnit::Microsecond, _) => Some(Self::Microseconds),
            DataType::Timestamp(TimeUnit::Nanosecond, _) => Some(Self::Nanoseconds),
            _ => None,
        }
    }

    /// A bound in this unit; `None`: it is in another, as of a file from before the column got another type.
    fn number(self, bound: &Datum) -> Option<i64> {
        let is_same = match bound.data_type() {
            PrimitiveType::Int | PrimitiveType::Long => self == Self::Whole,
            PrimitiveType::Date => self == Self::Days,
            PrimitiveType::Timestamp | PrimitiveType::Timestamptz => self == Self::Microseconds,
            PrimitiveType::TimestampNs | PrimitiveType::TimestamptzNs => self == Self::Nanoseconds,
            _ => false,
        };
        match bound.literal() {
            PrimitiveLiteral::Int(number) if is_same => Some(i64::from(*number)),
            PrimitiveLiteral::Long(number) if is_same => Some(*number),
            _ => None,
        }
    }
}

/// A column whose bounds tell which values a file can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyColumn {
    pub(super) id: i32,
    unit: Unit,
}

impl KeyColumn {
    /// `None`: bounds of such a column are not relied upon.
    pub fn of(field: &Field) -> Option<Self> {
        let unit = Unit::of(field.data_type())?;
        let id = field.metadata().get(PARQUET_FIELD_ID_META_KEY)?.parse().ok()?;
        Some(Self { id, unit })
    }
}

/// The values of one column in some rows: all of them lie within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRange {
    column: KeyColumn,
    /// `None`: there are no values but nulls.
    ends: Option<(i64, i64)>,
    nulls: bool,
}

impl KeyRange {
    pub fn of<'a>(
        column: KeyColumn,
        values: impl IntoIterator<Item = &'a ArrayRef>,
    ) -> Result<Self, ArrowError> {
        let mut range = Self { column, ends: None, nulls: false };
        for values in values {
            range.nulls |= values.null_count() > 0;
            let numbers = cast(values, &DataType::Int64)?;
            let numbers = numbers.as_primitive::<Int64Type>();
            if let (Some(low), Some(high)) = (min(numbers), max(numbers)) {
                range.ends = Some(match range.ends {
                    Some((lowest, highest)) => (lowest.min(low), highest.max(high)),
                    None => (low, high),
                });
            }
        }
        Ok(range)
    }

    /// Can a row of the file have a value, or a null, of these?
    pub fn may_be_in(&self, file: &LiveFile) -> bool {
        let (id, file) = (self.column.id, &file.file);
        if self.nulls && file.null_value_counts().get(&id) != Some(&0) {
            return true;
        }
        let Some((lowest, highest)) = self.ends else { return false };
        let bound = |bounds: &HashMap<i32, Datum>| self.column.unit.number(bounds.get(&id)?);
        match (bound(file.lower_bounds()), bound(file.upper_bounds())) {
            (Some(lower), Some(upper)) => lower <= highest && lowest <= upper,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use datafusion::arrow::array::{Date32Array, Int32Array, Int64Array, TimestampMicrosecondArray};
    use iceberg::spec::{DataContentType, DataFileBuilder, DataFileFormat, Struct};
    use mergeberg_kernel::change::{FileContent, FileFact};
    use mergeberg_kernel::ids::{SnapshotId, SpecId};
    use mergeberg_kernel::partition::Partition;

    use super::*;

    fn column(data_type: DataType) -> Option<KeyColumn> {
        let id = HashMap::from([(PARQUET_FIELD_ID_META_KEY.to_owned(), "7".to_owned())]);
        KeyColumn::of(&Field::new("k", data_type, true).with_metadata(id))
    }

    fn file(bounds: Option<(Datum, Datum)>, nulls: Option<u64>) -> LiveFile {
        let (lower, upper) = bounds.map_or((None, None), |(lower, upper)| (Some(lower), Some(upper)));
        let file = DataFileBuilder::default()
            .content(DataContentType::Data)
            .file_path("f".to_owned())
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::empty())
            .partition_spec_id(0)
            .record_count(1)
            .file_size_in_bytes(1)
            .lower_bounds(lower.map(|bound| (7, bound)).into_iter().collect())
            .upper_bounds(upper.map(|bound| (7, bound)).into_iter().collect())
            .null_value_counts(nulls.map(|count| (7, count)).into_iter().collect())
            .build()
            .unwrap();
        LiveFile {
            fact: FileFact {
                path: Arc::from("f"),
                partition: Arc::new(Partition { spec_id: SpecId(0), fields: Vec::new() }),
                records: 1,
                bytes: 1,
                content: FileContent::Data,
            },
            added_by: SnapshotId(1),
            sequence_number: 1,
            file_sequence_number: 1,
            first_row_id: None,
            file: Arc::new(file),
            spec_id: SpecId(0),
        }
    }

    fn range(of: KeyColumn, values: ArrayRef) -> KeyRange {
        KeyRange::of(of, [&values]).unwrap()
    }

    #[test]
    fn a_file_is_left_out_only_when_no_value_can_be_in_it() {
        let long = column(DataType::Int64).unwrap();
        for lowest in -3..4_i64 {
            for highest in lowest..4 {
                let keys = range(long, Arc::new(Int64Array::from(vec![Some(highest), Some(lowest)])));
                for lower in -4..5_i64 {
                    for upper in lower..5 {
                        let held = file(Some((Datum::long(lower), Datum::long(upper))), Some(0));
                        let overlaps = (lowest..=highest).any(|key| (lower..=upper).contains(&key));
                        assert_eq!(keys.may_be_in(&held), overlaps, "{lowest} {highest} {lower} {upper}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_a_file_does_not_say_may_be_in_it() {
        let long = column(DataType::Int64).unwrap();
        let (some, none): (ArrayRef, ArrayRef) =
            (Arc::new(Int64Array::from(vec![9])), Arc::new(Int64Array::from(vec![None::<i64>])));
        let far = || Some((Datum::long(1), Datum::long(2)));
        assert!(!range(long, Arc::clone(&some)).may_be_in(&file(far(), None)));
        assert!(range(long, Arc::clone(&some)).may_be_in(&file(None, Some(0))));
        // Nulls: unknown, some, none.
        assert!(range(long, Arc::clone(&none)).may_be_in(&file(far(), None)));
        assert!(range(long, Arc::clone(&none)).may_be_in(&file(far(), Some(3))));
        assert!(!range(long, Arc::clone(&none)).may_be_in(&file(far(), Some(0))));
        let mixed = KeyRange::of(long, [&some, &none]).unwrap();
        assert!(mixed.may_be_in(&file(far(), Some(3))));
        assert!(!mixed.may_be_in(&file(far(), Some(0))));
    }

    /// A column that was made wider keeps its numbers; days are no microseconds.
    #[test]
    fn bounds_of_another_unit_say_nothing() {
        let far = file(Some((Datum::int(1), Datum::int(2))), Some(0));
        assert!(
            !range(column(DataType::Int64).unwrap(), Arc::new(Int64Array::from(vec![9]))).may_be_in(&far)
        );
        assert!(
            !range(column(DataType::Int32).unwrap(), Arc::new(Int32Array::from(vec![9]))).may_be_in(&far)
        );
        let days = file(Some((Datum::date(1), Datum::date(2))), Some(0));
        assert!(
            !range(column(DataType::Date32).unwrap(), Arc::new(Date32Array::from(vec![9]))).may_be_in(&days)
        );
        let times = column(DataType::Timestamp(TimeUnit::Microsecond, None)).unwrap();
        let nine = || Arc::new(TimestampMicrosecondArray::from(vec![9]));
        assert!(range(times, nine()).may_be_in(&days));
        let micros = file(Some((Datum::timestamp_micros(1), Datum::timestamp_micros(2))), Some(0));
        assert!(!range(times, nine()).may_be_in(&micros));
        assert!(
            !range(times, nine()).may_be_in(&file(
                Some((Datum::timestamptz_micros(1), Datum::timestamptz_micros(2))),
                Some(0)
            ))
        );
        for other in [DataType::Utf8, DataType::Float64, DataType::Decimal128(9, 2), DataType::Boolean] {
            assert_eq!(column(other.clone()), None, "{other}");
        }
    }
}
