//! A row filter, as far as a partition can answer it. It only ever rules partitions out; whatever it
//! cannot read counts as "may match".

use crate::partition::{Partition, PartitionField};

/// A literal of a recorded filter, typed by the column that it is compared with.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilterValue {
    /// Integers and booleans.
    Int(i128),
    Text(String),
    /// Days since 1970-01-01.
    Date(i64),
    /// Microseconds since 1970-01-01T00:00:00.
    Timestamp(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompareOp {
    Eq,
    NotEq,
    Less,
    LessEq,
    Greater,
    GreaterEq,
}

/// A filter over columns, by field id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filter {
    And(Vec<Filter>),
    Or(Vec<Filter>),
    Compare {
        field_id: i32,
        op: CompareOp,
        value: FilterValue,
    },
    IsNull {
        field_id: i32,
    },
    IsNotNull {
        field_id: i32,
    },
    /// Anything else: may match every row.
    Unknown,
}

impl Filter {
    /// Could a row of this partition match? Never false when one could.
    pub fn may_match(&self, partition: &Partition) -> bool {
        match self {
            Self::And(parts) => parts.iter().all(|part| part.may_match(partition)),
            Self::Or(parts) => parts.iter().any(|part| part.may_match(partition)),
            Self::Unknown => true,
            Self::Compare { field_id, op, value } => {
                fields_of(partition, *field_id).all(|field| compare_may_match(field, *op, value))
            }
            Self::IsNull { field_id } => fields_of(partition, *field_id).all(|field| field.value.is_none()),
            Self::IsNotNull { field_id } => {
                fields_of(partition, *field_id).all(|field| field.value.is_some())
            }
        }
    }
}

fn fields_of(partition: &Partition, field_id: i32) -> impl Iterator<Item = &PartitionField> {
    partition.fields.iter().filter(move |f| f.source_id == field_id && f.transform != "void")
}

fn compare_may_match(field: &PartitionField, op: CompareOp, value: &FilterValue) -> bool {
    // A comparison with null is not true in SQL, whatever the operator; every transform maps null to null
    // and nothing else to null.
    let Some(text) = &field.value else { return false };
    match covered_range(&field.transform, text, value) {
        Some((low, high)) => match op {
            CompareOp::Eq => low <= *value && *value <= high,
            CompareOp::NotEq => !(low == *value && high == *value),
            CompareOp::Less => low < *value,
            CompareOp::LessEq => low <= *value,
            CompareOp::Greater => high > *value,
            CompareOp::GreaterEq => high >= *value,
        },
        None => true,
    }
}

/// Smallest and largest source value that a partition value stands for, in the type of `like`.
fn covered_range(transform: &str, text: &str, like: &FilterValue) -> Option<(FilterValue, FilterValue)> {
    match (transform, like) {
        ("identity", FilterValue::Int(_)) => {
            let value = match text {
                "true" => 1,
                "false" => 0,
                digits => digits.parse().ok()?,
            };
            Some((FilterValue::Int(value), FilterValue::Int(value)))
        }
        ("identity", FilterValue::Text(_)) => {
            Some((FilterValue::Text(text.to_owned()), FilterValue::Text(text.to_owned())))
        }
        ("identity", FilterValue::Date(_)) => {
            let day = parse_date(text)?;
            Some((FilterValue::Date(day), FilterValue::Date(day)))
        }
        ("day" | "month" | "year" | "hour", FilterValue::Date(_) | FilterValue::Timestamp(_)) => {
            let (first, last) = micros_of(transform, text)?;
            match like {
                FilterValue::Date(_) => Some((
                    FilterValue::Date(first.div_euclid(DAY_MICROS)),
                    FilterValue::Date(last.div_euclid(DAY_MICROS)),
                )),
                _ => Some((FilterValue::Timestamp(first), FilterValue::Timestamp(last))),
            }
        }
        _ => None,
    }
}

const HOUR_MICROS: i64 = 3_600_000_000;
const DAY_MICROS: i64 = 24 * HOUR_MICROS;

/// First and last microsecond of a partition of a time transform (table spec, "Partition Transforms").
fn micros_of(transform: &str, text: &str) -> Option<(i64, i64)> {
    let (first, next) = match transform {
        "day" => {
            let day = parse_date(text).or_else(|| text.parse().ok())?;
            (day.checked_mul(DAY_MICROS)?, day.checked_add(1)?.checked_mul(DAY_MICROS)?)
        }
        "hour" => {
            let hour: i64 = text.parse().ok()?;
            (hour.checked_mul(HOUR_MICROS)?, hour.checked_add(1)?.checked_mul(HOUR_MICROS)?)
        }
        "month" => {
            let months: i64 = text.parse().ok()?;
            (month_start(months)?, month_start(months.checked_add(1)?)?)
        }
        "year" => {
            let months = text.parse::<i64>().ok()?.checked_mul(12)?;
            (month_start(months)?, month_start(months.checked_add(12)?)?)
        }
        _ => return None,
    };
    Some((first, next - 1))
}

fn month_start(months_since_1970: i64) -> Option<i64> {
    let year = 1970 + months_since_1970.div_euclid(12);
    let month = months_since_1970.rem_euclid(12) + 1;
    days_from_civil(year, month, 1)?.checked_mul(DAY_MICROS)
}

/// `2013-08-20` as days since 1970-01-01.
pub fn parse_date(text: &str) -> Option<i64> {
    let (sign, body) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text),
    };
    let mut parts = body.split('-').map(digits);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    if parts.next().is_some() || !(1..=12).contains(&month) || !(1..=days_in(year, month)).contains(&day) {
        return None;
    }
    days_from_civil(sign * year, month, day)
}

/// Digits alone: `parse` would take a sign.
fn digits(text: &str) -> Option<i64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// Days since 1970-01-01 of a date in the proleptic Gregorian calendar.
fn days_from_civil(year: i64, month: i64, day: i64) -> Option<i64> {
    // Years start in March so that the leap day is the last of its year.
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let shifted = (month + 9) % 12;
    let day_of_year = (153 * shifted + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era.checked_mul(146_097)?.checked_add(day_of_era)?.checked_sub(719_468)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SpecId;

    fn partition(transform: &str, value: Option<&str>) -> Partition {
        Partition {
            spec_id: SpecId(0),
            fields: vec![PartitionField {
                source_id: 7,
                name: "p".to_owned(),
                transform: transform.to_owned(),
                value: value.map(str::to_owned),
            }],
        }
    }

    fn compare(op: CompareOp, value: FilterValue) -> Filter {
        Filter::Compare { field_id: 7, op, value }
    }

    #[test]
    fn dates_count_from_1970() {
        assert_eq!(parse_date("1970-01-01"), Some(0));
        assert_eq!(parse_date("1969-12-31"), Some(-1));
        assert_eq!(parse_date("2000-03-01"), Some(11_017));
        assert_eq!(parse_date("2013-08-20"), Some(15_937));
        assert_eq!(parse_date("2013-13-20"), None);
        assert_eq!(parse_date("nonsense"), None);
    }

    #[test]
    fn every_day_of_eight_centuries_counts_one_more() {
        // Counted one by one, which shares nothing with the formula.
        let is_leap = |year: i64| (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let mut days = (1600..1970).map(|year| if is_leap(year) { -366 } else { -365 }).sum::<i64>();
        for year in 1600..2400 {
            for (month, length) in [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].into_iter().enumerate() {
                let length = if month == 1 && is_leap(year) { 29 } else { length };
                for day in 1..=length {
                    assert_eq!(parse_date(&format!("{year}-{:02}-{day:02}", month + 1)), Some(days));
                    days += 1;
                }
                let after = format!("{year}-{:02}-{:02}", month + 1, length + 1);
                assert_eq!(parse_date(&after), None, "{after} is no day");
            }
        }
        assert_eq!(parse_date("-0001-03-01"), Some(-719_834));
        for wrong in ["+2013-08-20", "2013-+8-20", "2013-08", "2013-08-20-1", "2013-08-", "--1-01-01", ""] {
            assert_eq!(parse_date(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_day_partition_answers_half_open_ranges() {
        let day = partition("day", Some("2013-08-20"));
        let start = 15_937 * DAY_MICROS;
        let range = |from: i64, to: i64| {
            Filter::And(vec![
                compare(CompareOp::GreaterEq, FilterValue::Timestamp(from)),
                compare(CompareOp::Less, FilterValue::Timestamp(to)),
            ])
        };
        assert!(range(start, start + DAY_MICROS).may_match(&day));
        assert!(!range(start + DAY_MICROS, start + 2 * DAY_MICROS).may_match(&day));
        assert!(!range(start - DAY_MICROS, start).may_match(&day));
        assert!(compare(CompareOp::Eq, FilterValue::Date(15_937)).may_match(&day));
        assert!(!compare(CompareOp::Eq, FilterValue::Date(15_938)).may_match(&day));
    }

    #[test]
    fn null_partitions_match_only_null_tests() {
        let null = partition("identity", None);
        assert!(!compare(CompareOp::NotEq, FilterValue::Int(1)).may_match(&null));
        assert!(Filter::IsNull { field_id: 7 }.may_match(&null));
        assert!(!Filter::IsNotNull { field_id: 7 }.may_match(&null));
        assert!(!Filter::IsNull { field_id: 7 }.may_match(&partition("identity", Some("1"))));
    }

    #[test]
    fn what_cannot_be_read_may_match() {
        let bucket = partition("bucket[16]", Some("3"));
        assert!(compare(CompareOp::Eq, FilterValue::Int(1)).may_match(&bucket));
        let other_column = Filter::Compare { field_id: 99, op: CompareOp::Eq, value: FilterValue::Int(1) };
        assert!(other_column.may_match(&bucket));
        assert!(Filter::Unknown.may_match(&bucket));
    }

    #[test]
    fn months_and_years_cover_their_span() {
        let january = partition("month", Some("0"));
        assert!(compare(CompareOp::Eq, FilterValue::Date(30)).may_match(&january));
        assert!(!compare(CompareOp::Eq, FilterValue::Date(31)).may_match(&january));
        let before = partition("year", Some("-1"));
        assert!(compare(CompareOp::Eq, FilterValue::Date(-365)).may_match(&before));
        assert!(!compare(CompareOp::Eq, FilterValue::Date(0)).may_match(&before));
    }
}
