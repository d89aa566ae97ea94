//! Laws of partitions and filters, and parsers fed with anything (rule S1).

use mergeberg_kernel::filter::{CompareOp, Filter, FilterValue, parse_date};
use mergeberg_kernel::ids::{SpecId, TableName};
use mergeberg_kernel::partition::{Partition, PartitionField};
use mergeberg_kernel::policy::{Duration, TablePolicy};
use mergeberg_kernel::record::Record;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::properties::{PLACES, config};
use crate::story::partition;

// Partitions and filters.

fn row() -> impl Strategy<Value = (i64, i64)> {
    (-40_000..40_000_i64, 0..3_i64)
}

/// Year and month of a day, by counting.
fn civil(days: i64) -> (i64, i64) {
    let (mut year, mut left) = (1970, days);
    let is_leap = |y: i64| (y % 4 == 0 && y % 100 != 0) || y % 400 == 0;
    let length = |y: i64| if is_leap(y) { 366 } else { 365 };
    while left < 0 {
        year -= 1;
        left += length(year);
    }
    while left >= length(year) {
        left -= length(year);
        year += 1;
    }
    let months = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for days in months {
        if left < days {
            break;
        }
        left -= days;
        month += 1;
    }
    (year, month)
}

/// The partition of a row (day, status) under one of eight specs.
fn partition_of(row: (i64, i64), spec: i32) -> Partition {
    let (year, month) = civil(row.0);
    let day = |transform: &str, value: i64| PartitionField {
        source_id: 2,
        name: transform.to_owned(),
        transform: transform.to_owned(),
        value: Some(value.to_string()),
    };
    let status = PartitionField {
        source_id: 3,
        name: "status".to_owned(),
        transform: "identity".to_owned(),
        value: (row.1 > 0).then(|| row.1.to_string()),
    };
    let void = PartitionField { transform: "void".to_owned(), value: None, ..day("void", 0) };
    let fields = match spec {
        0 => vec![day("day", row.0)],
        1 => vec![day("month", (year - 1970) * 12 + month - 1)],
        2 => vec![day("year", year - 1970), status],
        3 => vec![status],
        4 => vec![status, day("hour", row.0 * 24 + 5)],
        5 => vec![void, status],
        6 => vec![day("day", row.0), status],
        _ => vec![],
    };
    Partition { spec_id: SpecId(spec), fields }
}

fn op() -> impl Strategy<Value = CompareOp> {
    use CompareOp::{Eq, Greater, GreaterEq, Less, LessEq, NotEq};
    select(&[Eq, NotEq, Less, LessEq, Greater, GreaterEq][..])
}

proptest! {
    #![proptest_config(config(1500))]

    #[test]
    fn partitions_of_one_row_overlap_and_overlap_is_symmetric(
        one in row(), two in row(), spec in 0..8_i32, other in 0..8_i32
    ) {
        let (a, b) = (partition_of(one, spec), partition_of(one, other));
        prop_assert!(a.overlaps(&b), "{a} and {b} hold the same row");
        let c = partition_of(two, other);
        prop_assert_eq!(a.overlaps(&c), c.overlaps(&a));
        for place in PLACES {
            let place = partition(place);
            prop_assert_eq!(place.overlaps(&c), c.overlaps(&place));
        }
    }

    #[test]
    fn a_filter_never_rules_out_the_partition_of_a_row_that_matches(
        row in row(), spec in 0..8_i32, op in op(), off in -100..100_i64, in_micros in any::<bool>()
    ) {
        const DAY_MICROS: i64 = 86_400_000_000;
        // The row is at five o'clock and a bit, which is what the hour spec says.
        let at = row.0 * DAY_MICROS + 5 * 3_600_000_000 + 17;
        let (mine, value) = if in_micros {
            (at, at + off * 9_000_000_001)
        } else {
            (row.0, row.0 + off / 20)
        };
        let is_true = match op {
            CompareOp::Eq => mine == value,
            CompareOp::NotEq => mine != value,
            CompareOp::Less => mine < value,
            CompareOp::LessEq => mine <= value,
            CompareOp::Greater => mine > value,
            CompareOp::GreaterEq => mine >= value,
        };
        let value = if in_micros { FilterValue::Timestamp(value) } else { FilterValue::Date(value) };
        let filter = Filter::Compare { field_id: 2, op, value };
        let place = partition_of(row, spec);
        if is_true {
            prop_assert!(filter.may_match(&place), "{filter:?} on {place}");
            prop_assert!(Filter::And(vec![filter.clone(), Filter::Unknown]).may_match(&place));
            let either = Filter::Or(vec![Filter::IsNull { field_id: 2 }, filter]);
            prop_assert!(either.may_match(&place));
        }
        let status_is_null = Filter::IsNull { field_id: 3 };
        prop_assert!(row.1 != 0 || status_is_null.may_match(&place));
    }
}

// Parsers.

const POLICY: &str = "table = \"a.b\"\n[[check]]\nid = \"k\"\ntype = \"duplicate-key\"\ncolumns = [\"a\"]\n\
    [[check]]\nid = \"r\"\ntype = \"row-count\"\nmin = 1\nmax-growth = 1.5\n\
    [[class]]\nname = \"c\"\nprefix = \"c/\"\nchecks = [\"k\"]\nage-bound = \"2m\"\n";
const RECORD: &str = r#"{"v":1,"id":"x","op":"overwrite-where","where":"a = 1","query":"SELECT 1","inputs":{"up":{"table":"a.c","snapshot-id":1}},"expect":{"rows":1}}"#;

const STATEMENT: &str = "MERGE INTO shop.orders t USING (SELECT `id`, \"x\" AS s FROM raw.up WHERE d = :day) u \
    ON t.id = u.id WHEN MATCHED AND u.s = 'it\\'s' THEN DELETE WHEN MATCHED THEN UPDATE SET * \
    WHEN NOT MATCHED THEN INSERT *";

/// The text with a few characters put in, taken out or changed.
fn damaged(text: &'static str) -> impl Strategy<Value = String> {
    vec((any::<Index>(), 0..3_u8, any::<char>()), 0..4).prop_map(move |damages| {
        let mut chars: Vec<char> = text.chars().collect();
        for (at, kind, new) in damages {
            let at = at.index(chars.len());
            match kind {
                0 => chars.insert(at, new),
                1 => drop(chars.remove(at)),
                _ => chars[at] = new,
            }
        }
        chars.into_iter().collect()
    })
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn no_text_makes_a_parser_panic(
        text in "\\PC{0,40}", policy in damaged(POLICY), record in damaged(RECORD), any in ".{0,30}"
    ) {
        let target: TableName = "shop.orders".parse().unwrap();
        for text in [&text, &any, &policy, &record] {
            let _ = Record::parse(text, &target);
            let _ = Duration::try_from(text.clone());
            let _ = parse_date(text);
            if let Ok(name) = text.parse::<TableName>() {
                prop_assert_eq!(name.to_string().parse::<TableName>(), Ok(name));
            }
        }
        for text in [&text, &policy] {
            if let Err(error) = TablePolicy::parse("p.toml", text) {
                prop_assert!(error.to_string().starts_with("p.toml: "));
            }
        }
    }

    #[test]
    fn partition_values_of_any_text_are_read_or_may_match(
        transform in "(identity|day|month|year|hour|bucket\\[4\\]|void|\\PC{0,6})",
        value in "(-?[0-9]{1,20}|\\PC{0,8}|-?[0-9]{1,6}-[0-9]{1,2}-[0-9]{1,2})",
        op in op(),
        days in any::<i64>(),
    ) {
        let field = PartitionField { source_id: 2, name: "p".to_owned(), transform, value: Some(value) };
        let place = Partition { spec_id: SpecId(0), fields: vec![field] };
        for value in [
            FilterValue::Date(days),
            FilterValue::Timestamp(days),
            FilterValue::Int(i128::from(days)),
            FilterValue::Text("x".to_owned()),
        ] {
            let _ = Filter::Compare { field_id: 2, op, value }.may_match(&place);
        }
    }

    #[test]
    fn numbers_of_any_size_make_no_date_or_duration_panic(
        year in any::<i64>(), month in any::<u8>(), day in any::<u8>(), unit in "(ms|s|m|h|d)"
    ) {
        let _ = parse_date(&format!("{year}-{month}-{day}"));
        if let Ok(duration) = Duration::try_from(format!("{year}{unit}")) {
            prop_assert!(duration.ms > 0);
        }
    }

    #[test]
    fn durations_round_trip(ms in 1..i64::MAX) {
        for ms in [ms, ms % 100_000 + 1, (ms % 1000 + 1) * 60_000, (ms % 1000 + 1) * 86_400_000] {
            let duration = Duration { ms };
            prop_assert_eq!(Duration::try_from(String::from(duration)), Ok(duration));
        }
    }

    #[test]
    fn no_statement_makes_the_reader_panic(damaged in damaged(STATEMENT), any in "\\PC{0,60}") {
        let target: TableName = "shop.orders".parse().unwrap();
        for sql in [damaged, any] {
            let record = serde_json::json!({
                "v": 1, "id": "x", "op": "sql", "sql": sql,
                "inputs": {"up": {"table": "raw.up", "snapshot-id": 1}}, "parameters": {"day": "2013-08-20"},
            });
            let _ = Record::parse(&record.to_string(), &target);
        }
    }
}
