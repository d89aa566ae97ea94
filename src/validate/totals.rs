//! Sums that can be trusted: how a column is added up, and when two totals agree (case O15).
//!
//! Exact types stay exact: integers and decimals are added in types that a table's rows cannot overflow,
//! where the engine's own sum of a decimal would wrap around. Floating point is compared within the declared
//! tolerance, scaled by the sum of absolute values: values that cancel leave nothing to be relative to.

use datafusion::arrow::array::{Array, AsArray};
use datafusion::arrow::datatypes::{
    DECIMAL128_MAX_PRECISION, DECIMAL256_MAX_PRECISION, DataType, Decimal128Type, Decimal256Type,
    Float64Type, i256,
};

use super::CheckError;

/// Scale at which totals written as text are read; more decimal places are rounded.
const TEXT_SCALE: i8 = 18;

/// In which type a column is added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumType {
    Integer,
    Decimal { scale: i8 },
    Float,
}

impl SumType {
    /// `None`: a type that has no sum.
    pub fn of(data_type: &DataType) -> Option<Self> {
        match data_type {
            DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64 => Some(Self::Integer),
            DataType::UInt8 | DataType::UInt16 | DataType::UInt32 | DataType::UInt64 => Some(Self::Integer),
            DataType::Decimal128(_, scale) | DataType::Decimal256(_, scale) => {
                Some(Self::Decimal { scale: *scale })
            }
            DataType::Float16 | DataType::Float32 | DataType::Float64 => Some(Self::Float),
            _ => None,
        }
    }

    /// How an upstream column is added up that is compared with a candidate's column of this type: text
    /// (CSV) is read as exactly as the candidate's column is.
    pub fn of_upstream(self, data_type: &DataType) -> Option<Self> {
        match (data_type, self) {
            (DataType::Utf8 | DataType::Utf8View | DataType::LargeUtf8, Self::Float) => Some(Self::Float),
            (DataType::Utf8 | DataType::Utf8View | DataType::LargeUtf8, _) => {
                Some(Self::Decimal { scale: TEXT_SCALE })
            }
            (other, _) => Self::of(other),
        }
    }

    /// The type that values are cast to before they are added. 10^38 values of 38 digits fit into 76
    /// digits, and 10^19 integers of 64 bits into 38.
    pub fn widened(self) -> DataType {
        match self {
            Self::Integer => DataType::Decimal128(DECIMAL128_MAX_PRECISION, 0),
            Self::Decimal { scale } => DataType::Decimal256(DECIMAL256_MAX_PRECISION, scale),
            Self::Float => DataType::Float64,
        }
    }
}

/// A sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Total {
    Exact { unscaled: i256, scale: i8 },
    Float(f64),
}

impl Total {
    /// The sum in one row of a result; `None` is null: nothing but nulls were added, and nothing equals it.
    pub fn of_array(array: &dyn Array, row: usize) -> Result<Option<Self>, CheckError> {
        if array.is_null(row) {
            return Ok(None);
        }
        match array.data_type() {
            DataType::Decimal128(_, scale) => {
                let unscaled = i256::from_i128(array.as_primitive::<Decimal128Type>().value(row));
                Ok(Some(Self::Exact { unscaled, scale: *scale }))
            }
            DataType::Decimal256(_, scale) => {
                let unscaled = array.as_primitive::<Decimal256Type>().value(row);
                Ok(Some(Self::Exact { unscaled, scale: *scale }))
            }
            DataType::Float64 => Ok(Some(Self::Float(array.as_primitive::<Float64Type>().value(row)))),
            other => Err(CheckError::Shape(format!("a sum of type {other}"))),
        }
    }

    /// A sum of a decimal column that no decimal of the table format can hold (38 digits).
    pub fn overflows(&self) -> bool {
        match self {
            Self::Exact { unscaled, .. } => match power_of_ten(u32::from(DECIMAL128_MAX_PRECISION)) {
                Some(limit) => *unscaled >= limit || *unscaled <= limit.wrapping_neg(),
                None => true,
            },
            Self::Float(_) => false,
        }
    }

    /// `self - other <= tolerance`, and unless only an excess counts also the other way round. Not a
    /// number is never within anything.
    pub fn within(&self, other: &Self, tolerance: f64, only_excess: bool) -> bool {
        match (self, other) {
            (Self::Exact { unscaled: a, scale: a_scale }, Self::Exact { unscaled: b, scale: b_scale }) => {
                let scale = (*a_scale).max(*b_scale);
                let (Some(a), Some(b)) = (rescale(*a, *a_scale, scale), rescale(*b, *b_scale, scale)) else {
                    return false;
                };
                let Some(difference) = a.checked_sub(b) else { return false };
                if difference == i256::ZERO || (only_excess && difference < i256::ZERO) {
                    return true;
                }
                decimal_to_f64(difference, scale).abs() <= tolerance
            }
            (a, b) => {
                let difference = a.to_f64() - b.to_f64();
                if only_excess { difference <= tolerance } else { difference.abs() <= tolerance }
            }
        }
    }

    pub fn to_f64(self) -> f64 {
        match self {
            Self::Exact { unscaled, scale } => decimal_to_f64(unscaled, scale),
            Self::Float(value) => value,
        }
    }
}

impl std::fmt::Display for Total {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (unscaled, scale) = match self {
            Self::Float(value) => return write!(f, "{value}"),
            Self::Exact { unscaled, scale } => (unscaled, usize::try_from(*scale).unwrap_or_default()),
        };
        let text = unscaled.to_string();
        let (sign, digits) = match text.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", text.as_str()),
        };
        let padded = format!("{digits:0>width$}", width = scale + 1);
        let (whole, fraction) = padded.split_at(padded.len() - scale);
        let fraction = fraction.trim_end_matches('0');
        if fraction.is_empty() { write!(f, "{sign}{whole}") } else { write!(f, "{sign}{whole}.{fraction}") }
    }
}

fn power_of_ten(exponent: u32) -> Option<i256> {
    i256::from_i128(10).checked_pow(exponent)
}

fn rescale(unscaled: i256, from: i8, to: i8) -> Option<i256> {
    let steps = u32::try_from(i32::from(to) - i32::from(from)).ok()?;
    unscaled.checked_mul(power_of_ten(steps)?)
}

fn decimal_to_f64(unscaled: i256, scale: i8) -> f64 {
    // By text: the nearest double of 256 bits, without an intermediate overflow.
    format!("{unscaled}e{}", -i32::from(scale)).parse().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(unscaled: i128, scale: i8) -> Total {
        Total::Exact { unscaled: i256::from_i128(unscaled), scale }
    }

    #[test]
    fn exact_totals_of_different_scales_are_compared_exactly() {
        assert!(exact(123, 1).within(&exact(12_300, 3), 0.0, false));
        assert!(!exact(123, 1).within(&exact(12_301, 3), 0.0, false));
        // One in 10^37 is a difference that a double does not see.
        let big = 10i128.pow(37);
        assert!(!exact(big, 0).within(&exact(big + 1, 0), 0.0, false));
    }

    #[test]
    fn a_tolerance_bounds_both_sides_and_an_excess_only_one() {
        assert!(exact(105, 2).within(&exact(100, 2), 0.05, false));
        assert!(!exact(106, 2).within(&exact(100, 2), 0.05, false));
        assert!(exact(1, 2).within(&exact(100, 2), 0.0, true));
        assert!(!exact(101, 2).within(&exact(100, 2), 0.0, true));
        assert!(Total::Float(1.0).within(&Total::Float(5.0), 0.0, true));
        assert!(!Total::Float(1.0).within(&Total::Float(5.0), 0.0, false));
    }

    #[test]
    fn not_a_number_agrees_with_nothing() {
        let nan = Total::Float(f64::NAN);
        assert!(!nan.within(&nan, f64::MAX, false));
        assert!(!nan.within(&exact(1, 0), f64::MAX, true));
    }

    #[test]
    fn overflow_begins_at_the_39th_digit() {
        let limit = power_of_ten(38).unwrap();
        let at = |unscaled| Total::Exact { unscaled, scale: 2 };
        assert!(at(limit).overflows() && at(limit.wrapping_neg()).overflows());
        assert!(!at(limit.checked_sub(i256::ONE).unwrap()).overflows());
    }

    #[test]
    fn totals_are_written_as_people_write_them() {
        assert_eq!(exact(-12_050, 2).to_string(), "-120.5");
        assert_eq!(exact(5, 3).to_string(), "0.005");
        assert_eq!(exact(700, 0).to_string(), "700");
    }
}
