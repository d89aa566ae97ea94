//! From a local time to one with a zone, and back, as Spark does it.
//!
//! The engine takes a cast between the two off a column that is compared with a literal, and gives the literal the
//! column's type without moving it (`unwrap_cast_in_comparison`): another time by the zone's offset. Its cast to local
//! time gives that of UTC, and it has no answer where clocks are put back or forward. So such casts, be they written or
//! the engine's own, become a function that it cannot look into.

use std::sync::Arc;

use datafusion::arrow::array::timezone::Tz;
use datafusion::arrow::array::types::{
    ArrowTimestampType, TimestampMicrosecondType, TimestampMillisecondType, TimestampNanosecondType,
    TimestampSecondType,
};
use datafusion::arrow::array::{ArrayRef, AsArray};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, TimeUnit};
use datafusion::arrow::error::ArrowError;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode};
use datafusion::common::{DataFusionError, Result, exec_err};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{
    Cast, ColumnarValue, Expr, ExprSchemable, LogicalPlan, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl,
    Signature, Volatility,
};
use datafusion::optimizer::AnalyzerRule;
use datafusion::scalar::ScalarValue;

use mergeberg_kernel::record::UTC;

use chrono::{Duration, LocalResult, NaiveDateTime, Offset, TimeZone};

/// Longest time that clocks were ever put forward by: a whole day.
const LONGEST_GAP_HOURS: i64 = 25;

/// Is it UTC, whose local time is the time itself?
pub(super) fn is_utc(zone: &str) -> bool {
    matches!(zone, UTC | "+00:00")
}

/// Puts [`InZone`] where a cast moves between local time and a zone; the last of the analyzer's rules.
#[derive(Debug)]
pub(super) struct ZonesByOurselves;

impl AnalyzerRule for ZonesByOurselves {
    fn analyze(&self, plan: LogicalPlan, _config: &ConfigOptions) -> Result<LogicalPlan> {
        plan.transform_up_with_subqueries(|node| {
            let schema = merge_schema(&node.inputs());
            let names = NamePreserver::new(&node);
            node.map_expressions(|expr| {
                let name = names.save(&expr);
                let moved = expr.transform_up(|expr| {
                    let Expr::Cast(Cast { expr: inner, data_type: to }) = &expr else {
                        return Ok(Transformed::no(expr));
                    };
                    let Ok(from) = inner.get_type(&schema) else { return Ok(Transformed::no(expr)) };
                    let Some(zone) = zone_between(&from, to) else { return Ok(Transformed::no(expr)) };
                    let inner = inner.as_ref().clone();
                    Ok(Transformed::yes(in_zone(inner, from, to.clone(), &zone)))
                })?;
                Ok(moved.update_data(|expr| name.restore(expr)))
            })
        })
        .data()
    }

    fn name(&self) -> &'static str {
        "zones_by_ourselves"
    }
}

/// The zone that such a cast is about, if it is one.
fn zone_between(from: &DataType, to: &DataType) -> Option<Arc<str>> {
    match (from, to) {
        (DataType::Timestamp(_, Some(zone)), DataType::Timestamp(_, None))
        | (DataType::Timestamp(_, None) | DataType::Date32, DataType::Timestamp(_, Some(zone)))
            if !is_utc(zone) =>
        {
            Some(Arc::clone(zone))
        }
        _ => None,
    }
}

fn in_zone(value: Expr, from: DataType, to: DataType, zone: &Arc<str>) -> Expr {
    ScalarUDF::from(InZone {
        zone: Arc::clone(zone),
        to,
        signature: Signature::exact(vec![from], Volatility::Immutable),
    })
    .call(vec![value])
}

/// A local time or a day as the time that it is in the zone, or a time as the local one there.
#[derive(Debug, PartialEq, Eq, Hash)]
struct InZone {
    zone: Arc<str>,
    to: DataType,
    signature: Signature,
}

impl ScalarUDFImpl for InZone {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn name(&self) -> &'static str {
        "in_zone"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(self.to.clone())
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let is_one = args.args.iter().all(|side| matches!(side, ColumnarValue::Scalar(_)));
        let values = ColumnarValue::values_to_arrays(&args.args)?;
        let Some(values) = values.first() else { return exec_err!("in_zone takes a time") };
        let moved = moved(values, &self.to, &self.zone)?;
        if is_one {
            return Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&moved, 0)?));
        }
        Ok(ColumnarValue::Array(moved))
    }
}

fn moved(values: &ArrayRef, to: &DataType, zone: &str) -> Result<ArrayRef> {
    let DataType::Timestamp(unit, is_zoned) = to else { return exec_err!("{to} is no time") };
    let zone: Tz = zone.parse()?;
    let direction = if is_zoned.is_some() { Direction::Into(zone) } else { Direction::OutOf(zone) };
    // In the unit of the result, and without a zone in its type: the engine's casts leave such values as they are.
    let plain =
        cast(&cast(values, &without_zone(values.data_type(), *unit))?, &DataType::Timestamp(*unit, None))?;
    let moved = match unit {
        TimeUnit::Second => each::<TimestampSecondType>(&plain, &direction),
        TimeUnit::Millisecond => each::<TimestampMillisecondType>(&plain, &direction),
        TimeUnit::Microsecond => each::<TimestampMicrosecondType>(&plain, &direction),
        TimeUnit::Nanosecond => each::<TimestampNanosecondType>(&plain, &direction),
    }?;
    // From a time without a zone to UTC nothing moves, nor from one zone to another.
    match is_zoned {
        Some(_) => {
            let in_utc = cast(&moved, &DataType::Timestamp(*unit, Some(Arc::from(UTC))))?;
            Ok(cast(&in_utc, to)?)
        }
        None => Ok(moved),
    }
}

fn without_zone(of: &DataType, unit: TimeUnit) -> DataType {
    match of {
        DataType::Timestamp(own, Some(_)) => DataType::Timestamp(*own, Some(Arc::from(UTC))),
        DataType::Timestamp(own, None) => DataType::Timestamp(*own, None),
        _ => DataType::Timestamp(unit, None),
    }
}

enum Direction {
    /// From local time.
    Into(Tz),
    /// To local time.
    OutOf(Tz),
}

impl Direction {
    /// Seconds by which the time moves.
    fn seconds(&self, at: NaiveDateTime) -> Option<i64> {
        match self {
            Self::Into(zone) => {
                // Where it is twice, the earlier one; where it is not, by the offset before the gap (Java:
                // `ZonedDateTime.of`).
                let offset = match zone.offset_from_local_datetime(&at) {
                    LocalResult::Single(offset) => offset,
                    LocalResult::Ambiguous(earlier, _) => earlier,
                    LocalResult::None => (1..=LONGEST_GAP_HOURS).find_map(|hours| {
                        let before = at.checked_sub_signed(Duration::hours(hours))?;
                        zone.offset_from_local_datetime(&before).latest()
                    })?,
                };
                Some(-i64::from(offset.fix().local_minus_utc()))
            }
            Self::OutOf(zone) => Some(i64::from(zone.offset_from_utc_datetime(&at).fix().local_minus_utc())),
        }
    }
}

fn each<T: ArrowTimestampType>(values: &ArrayRef, direction: &Direction) -> Result<ArrayRef> {
    let second = match T::UNIT {
        TimeUnit::Second => 1,
        TimeUnit::Millisecond => 1_000,
        TimeUnit::Microsecond => 1_000_000,
        TimeUnit::Nanosecond => 1_000_000_000,
    };
    let moved = values.as_primitive::<T>().try_unary::<_, T, ArrowError>(|value| {
        let far = || ArrowError::ComputeError(format!("the time {value} is too far away for its zone"));
        let at = chrono::DateTime::from_timestamp(value.div_euclid(second), 0).ok_or_else(far)?.naive_utc();
        let by = direction.seconds(at).ok_or_else(far)?;
        by.checked_mul(second).and_then(|by| value.checked_add(by)).ok_or_else(far)
    });
    Ok(Arc::new(moved.map_err(DataFusionError::from)?))
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{Date32Array, TimestampMicrosecondArray};

    use super::*;

    const MICROS: i64 = 1_000_000;

    fn at(text: &str) -> i64 {
        text.parse::<NaiveDateTime>().unwrap().and_utc().timestamp_micros()
    }

    fn micros(zone: Option<&str>) -> DataType {
        DataType::Timestamp(TimeUnit::Microsecond, zone.map(Arc::from))
    }

    fn one(values: ArrayRef, to: &DataType) -> i64 {
        moved(&values, to, "Europe/Berlin").unwrap().as_primitive::<TimestampMicrosecondType>().value(0)
    }

    /// Values of `java.time.ZonedDateTime.of(local, zone).toInstant()`.
    #[test]
    fn a_local_time_is_the_one_that_java_takes_it_for() {
        for (local, utc) in [
            ("2026-08-20T00:30:00", "2026-08-19T22:30:00"),
            ("2026-01-20T00:30:00.000001", "2026-01-19T23:30:00.000001"),
            // Twice there: the earlier.
            ("2026-10-25T02:30:00", "2026-10-25T00:30:00"),
            // Not there: later by the gap.
            ("2026-03-29T02:30:00", "2026-03-29T01:30:00"),
            ("1950-06-01T12:00:00", "1950-06-01T11:00:00"),
        ] {
            let values: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![at(local)]));
            assert_eq!(one(values, &micros(Some("Europe/Berlin"))), at(utc), "{local}");
        }
    }

    #[test]
    fn a_time_is_local_there_and_a_day_begins_there() {
        let values = TimestampMicrosecondArray::from(vec![at("2026-10-25T01:30:00")]).with_timezone(UTC);
        assert_eq!(one(Arc::new(values), &micros(None)), at("2026-10-25T02:30:00"));
        let day = i32::try_from(at("2026-08-20T00:00:00") / MICROS / 86_400).unwrap();
        let values: ArrayRef = Arc::new(Date32Array::from(vec![day]));
        assert_eq!(one(values, &micros(Some("Europe/Berlin"))), at("2026-08-19T22:00:00"));
    }

    #[test]
    fn what_no_calendar_holds_is_an_error() {
        let values: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![i64::MIN]));
        let error = moved(&values, &micros(Some("Europe/Berlin")), "Europe/Berlin").unwrap_err();
        assert!(error.to_string().contains("too far away"), "{error}");
    }
}
