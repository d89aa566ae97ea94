//! A recorded `where` read as a kernel filter, so that decisions can rule partitions out.
//!
//! Only what is certain is read: comparisons of a column with a literal, BETWEEN, IN, IS NULL, AND, OR.
//! Everything else becomes `Filter::Unknown`, which may match every row. Column names are exact.

use datafusion::sql::sqlparser::ast::{BinaryOperator, DataType, Expr, TypedString, UnaryOperator, Value};
use mergeberg_kernel::filter::{CompareOp, Filter, FilterValue, parse_date};
use mergeberg_kernel::structure::FieldFact;

const MICROS_PER_DAY: i64 = 86_400_000_000;

/// Which columns a condition may name.
pub trait FilterColumns {
    /// The target's column of this name; `None` when it is none of the target's.
    fn column(&self, relation: Option<&str>, name: &str) -> Option<&FieldFact>;
}

/// Reads a condition over the target's columns.
pub fn read_filter(expr: &Expr, columns: &dyn FilterColumns) -> Filter {
    convert(expr, columns)
}

fn convert(expr: &Expr, schema: &dyn FilterColumns) -> Filter {
    match expr {
        Expr::Nested(inner) => convert(inner, schema),
        Expr::Value(value) if value.value == Value::Boolean(true) => Filter::And(Vec::new()),
        Expr::Value(value) if value.value == Value::Boolean(false) => Filter::Or(Vec::new()),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            Filter::And(vec![convert(left, schema), convert(right, schema)])
        }
        Expr::BinaryOp { left, op: BinaryOperator::Or, right } => {
            Filter::Or(vec![convert(left, schema), convert(right, schema)])
        }
        Expr::BinaryOp { left, op, right } => {
            let Some(op) = compare_op(op) else { return Filter::Unknown };
            if let Some(filter) = comparison(left, op, right, schema) {
                return filter;
            }
            comparison(right, flipped(op), left, schema).unwrap_or(Filter::Unknown)
        }
        Expr::Between { expr, negated: false, low, high } => {
            match (
                comparison(expr, CompareOp::GreaterEq, low, schema),
                comparison(expr, CompareOp::LessEq, high, schema),
            ) {
                (Some(low), Some(high)) => Filter::And(vec![low, high]),
                _ => Filter::Unknown,
            }
        }
        Expr::InList { expr, list, negated: false } => {
            let mut any = Vec::new();
            for item in list {
                match comparison(expr, CompareOp::Eq, item, schema) {
                    Some(filter) => any.push(filter),
                    None => return Filter::Unknown,
                }
            }
            Filter::Or(any)
        }
        Expr::IsNull(inner) => match column(inner, schema) {
            Some(field) => Filter::IsNull { field_id: field.id },
            None => Filter::Unknown,
        },
        Expr::IsNotNull(inner) => match column(inner, schema) {
            Some(field) => Filter::IsNotNull { field_id: field.id },
            None => Filter::Unknown,
        },
        _ => Filter::Unknown,
    }
}

fn compare_op(op: &BinaryOperator) -> Option<CompareOp> {
    match op {
        BinaryOperator::Eq => Some(CompareOp::Eq),
        BinaryOperator::NotEq => Some(CompareOp::NotEq),
        BinaryOperator::Lt => Some(CompareOp::Less),
        BinaryOperator::LtEq => Some(CompareOp::LessEq),
        BinaryOperator::Gt => Some(CompareOp::Greater),
        BinaryOperator::GtEq => Some(CompareOp::GreaterEq),
        _ => None,
    }
}

fn flipped(op: CompareOp) -> CompareOp {
    match op {
        CompareOp::Eq | CompareOp::NotEq => op,
        CompareOp::Less => CompareOp::Greater,
        CompareOp::LessEq => CompareOp::GreaterEq,
        CompareOp::Greater => CompareOp::Less,
        CompareOp::GreaterEq => CompareOp::LessEq,
    }
}

fn comparison(left: &Expr, op: CompareOp, right: &Expr, schema: &dyn FilterColumns) -> Option<Filter> {
    let field = column(left, schema)?;
    let value = literal(right, field)?;
    Some(Filter::Compare { field_id: field.id, op, value })
}

fn column<'a>(expr: &Expr, schema: &'a dyn FilterColumns) -> Option<&'a FieldFact> {
    match expr {
        Expr::Identifier(ident) => schema.column(None, &ident.value),
        Expr::CompoundIdentifier(parts) => match parts.as_slice() {
            [relation, name] => schema.column(Some(&relation.value), &name.value),
            _ => None,
        },
        Expr::Nested(inner) => column(inner, schema),
        _ => None,
    }
}

/// The literal in the column's type; `None` when it is anything else, or would be rounded.
fn literal(expr: &Expr, field: &FieldFact) -> Option<FilterValue> {
    match expr {
        Expr::Nested(inner) => literal(inner, field),
        Expr::Value(value) => plain(&value.value, field),
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => match literal(expr, field)? {
            FilterValue::Int(value) => Some(FilterValue::Int(-value)),
            _ => None,
        },
        Expr::TypedString(TypedString { data_type, value, .. }) => {
            let Value::SingleQuotedString(text) = &value.value else { return None };
            match data_type {
                DataType::Date => time_value(text, field),
                DataType::Timestamp(_, _) => time_value(text, field),
                _ => None,
            }
        }
        _ => None,
    }
}

fn plain(value: &Value, field: &FieldFact) -> Option<FilterValue> {
    match (value, field.type_name.as_str()) {
        (Value::Number(digits, _), "int" | "long") => digits.parse().ok().map(FilterValue::Int),
        (Value::Boolean(value), "boolean") => Some(FilterValue::Int(i128::from(*value))),
        (Value::SingleQuotedString(text), "string") => Some(FilterValue::Text(text.clone())),
        (Value::SingleQuotedString(text), "date" | "timestamp") => time_value(text, field),
        _ => None,
    }
}

fn time_value(text: &str, field: &FieldFact) -> Option<FilterValue> {
    match field.type_name.as_str() {
        "date" => parse_date(text).map(FilterValue::Date),
        "timestamp" => timestamp_micros(text).map(FilterValue::Timestamp),
        // Zoned timestamps depend on the session's zone, which is not this filter's to guess.
        _ => None,
    }
}

/// `2013-08-20`, `2013-08-20 05:00:00` or with `T`, without zone or fraction.
fn timestamp_micros(text: &str) -> Option<i64> {
    let text = text.trim();
    let (date, time) = match text.split_once([' ', 'T']) {
        Some((date, time)) => (date, Some(time)),
        None => (text, None),
    };
    let days = parse_date(date)?;
    let seconds = match time {
        None => 0,
        Some(time) => {
            let time = chrono::NaiveTime::parse_from_str(time, "%H:%M:%S")
                .or_else(|_| chrono::NaiveTime::parse_from_str(time, "%H:%M"))
                .ok()?;
            i64::from(chrono::Timelike::num_seconds_from_midnight(&time))
        }
    };
    days.checked_mul(MICROS_PER_DAY)?.checked_add(seconds * 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mergeberg_kernel::ids::{SchemaId, SpecId};
    use mergeberg_kernel::partition::{Partition, PartitionField};
    use mergeberg_kernel::record::Condition;
    use mergeberg_kernel::structure::SchemaFact;

    impl FilterColumns for SchemaFact {
        fn column(&self, relation: Option<&str>, name: &str) -> Option<&FieldFact> {
            if relation.is_some() { None } else { self.field_by_name(name) }
        }
    }

    fn schema() -> SchemaFact {
        let field = |id, name: &str, type_name: &str| FieldFact {
            id,
            name: name.to_owned(),
            required: false,
            type_name: type_name.to_owned(),
            has_initial_default: false,
        };
        SchemaFact {
            id: SchemaId(0),
            fields: vec![
                field(1, "day", "int"),
                field(2, "time_hour", "timestamp"),
                field(3, "flight_date", "date"),
                field(4, "Carrier", "string"),
            ],
            identifier_field_ids: vec![],
        }
    }

    fn day(source_id: i32, value: &str) -> Partition {
        Partition {
            spec_id: SpecId(0),
            fields: vec![PartitionField {
                source_id,
                name: "d".to_owned(),
                transform: if source_id == 2 { "day" } else { "identity" }.to_owned(),
                value: Some(value.to_owned()),
            }],
        }
    }

    fn matches(text: &str, partition: &Partition) -> bool {
        read_filter(Condition::parse(text).unwrap().expr(), &schema()).may_match(partition)
    }

    #[test]
    fn ranges_of_a_raw_column_choose_days() {
        let text =
            "time_hour >= TIMESTAMP '2013-08-20 00:00:00' AND time_hour < TIMESTAMP '2013-08-21 00:00:00'";
        assert!(matches(text, &day(2, "2013-08-20")));
        assert!(!matches(text, &day(2, "2013-08-21")));
        assert!(!matches(text, &day(2, "2013-08-19")));
    }

    #[test]
    fn dates_sets_and_flipped_comparisons() {
        assert!(matches("flight_date = DATE '2013-08-20'", &day(3, "2013-08-20")));
        assert!(!matches("flight_date = '2013-08-20'", &day(3, "2013-08-21")));
        assert!(matches("day IN (19, 20)", &day(1, "20")));
        assert!(!matches("(day IN (19, 20))", &day(1, "21")));
        assert!(!matches("20 > day", &day(1, "20")));
        assert!(matches("day BETWEEN 19 AND 21 OR day = -1", &day(1, "19")));
        assert!(!matches("\"Carrier\" = 'UA'", &day(4, "AA")));
    }

    #[test]
    fn what_is_not_certain_may_match() {
        assert!(matches("date_trunc('day', time_hour) = TIMESTAMP '2013-08-20'", &day(2, "2013-01-01")));
        assert!(matches("NOT (day = 20)", &day(1, "20")));
        assert!(matches("carrier = 'UA'", &day(4, "AA")), "names are exact: 'carrier' is no column");
    }
}
