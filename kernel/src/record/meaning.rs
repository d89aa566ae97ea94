//! Forms of a Spark statement whose types the engine would choose otherwise, written so that it cannot.
//!
//! `BETWEEN`, `IN (...)`, `CASE x WHEN` and `nullif` become comparisons, which are planned one by one as Spark has them;
//! whole numbers that stand alone are `INT`, as in Spark, not 64 bits wide; `TIMESTAMP` is the kind with a zone, and
//! `DECIMAL` has ten digits. Sources: Spark SQL reference, "Data Types", "Literals", "ANSI Compliance".

use std::ops::ControlFlow;

use sqlparser::ast::{
    BinaryOperator, CaseWhen, CastKind, DataType, ExactNumberInfo, Expr, Function, FunctionArg,
    FunctionArgExpr, FunctionArguments, Query, SelectItem, SetExpr, TimezoneInfo, TypedString, UnaryOperator,
    Value, VisitMut, VisitorMut,
};

use super::RecordError;

/// Digits of a fraction of a second in Spark's and Iceberg's timestamps.
const MICROSECONDS: Option<u64> = Some(6);
/// Functions that give one of their arguments.
const CHOOSING: [&str; 7] = ["coalesce", "greatest", "ifnull", "least", "nvl", "nvl2", "sum"];
/// Functions of fractions, whatever their arguments are.
const OF_FRACTIONS: [&str; 4] = ["power", "sqrt", "exp", "ln"];

/// Writes them out in an expression or query.
pub(super) fn write_out(sql: &mut impl VisitMut) -> Result<(), RecordError> {
    match sql.visit(&mut Meaning) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

struct Meaning;

impl VisitorMut for Meaning {
    type Break = RecordError;

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<RecordError> {
        in_body(&mut query.body);
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<RecordError> {
        match expr {
            Expr::Value(value) => {
                if let Value::Number(digits, long) = &value.value {
                    if *long {
                        *expr = cast(number(digits), DataType::BigInt(None));
                    } else if digits.contains(['e', 'E']) {
                        let text = Value::SingleQuotedString(digits.clone());
                        *expr = cast(Expr::Value(text.into()), DataType::Double(ExactNumberInfo::None));
                    }
                }
            }
            Expr::Between { expr: value, negated, low, high } => {
                let at_least = compared(value, BinaryOperator::GtEq, low);
                let at_most = compared(value, BinaryOperator::LtEq, high);
                let inside = nested(joined(at_least, BinaryOperator::And, at_most));
                *expr = if *negated { not(inside) } else { inside };
            }
            Expr::InList { expr: value, list, negated } => {
                let equal = list.iter().map(|one| compared(value, BinaryOperator::Eq, one)).collect();
                let Some(any) = any_of(equal) else { return refused("IN without values") };
                let inside = nested(any);
                *expr = if *negated { not(inside) } else { inside };
            }
            Expr::Case { operand, conditions, else_result, .. } => {
                if let Some(operand) = operand.take() {
                    for CaseWhen { condition, .. } in conditions.iter_mut() {
                        *condition = compared(&operand, BinaryOperator::Eq, condition);
                    }
                }
                for CaseWhen { result, .. } in conditions {
                    is_int(result);
                }
                if let Some(result) = else_result {
                    is_int(result);
                }
            }
            Expr::UnaryOp { op: UnaryOperator::Minus, expr: inner } if !is_number(inner) => {
                let value = std::mem::replace(inner.as_mut(), Expr::Value(Value::Null.into()));
                *expr = nested(joined(number("0"), BinaryOperator::Minus, nested(value)));
            }
            Expr::Cast { kind, data_type, .. } => {
                if *kind == CastKind::DoubleColon {
                    *kind = CastKind::Cast;
                }
                meant(data_type);
            }
            Expr::TypedString(TypedString { data_type, .. }) => meant(data_type),
            Expr::Function(function) => {
                if let Some(other) = function_meant(function) {
                    *expr = other;
                }
            }
            _ => {}
        }
        ControlFlow::Continue(())
    }
}

fn refused(what: &str) -> ControlFlow<RecordError> {
    ControlFlow::Break(RecordError::Sql(format!("{what} is not supported in a recorded statement")))
}

/// Columns that are a number alone.
fn in_body(body: &mut SetExpr) {
    match body {
        SetExpr::Select(select) => {
            for item in &mut select.projection {
                if let SelectItem::UnnamedExpr(expr) | SelectItem::ExprWithAlias { expr, .. } = item {
                    is_int(expr);
                }
            }
        }
        SetExpr::Values(values) => values.rows.iter_mut().flat_map(|row| row.iter_mut()).for_each(is_int),
        SetExpr::SetOperation { left, right, .. } => {
            in_body(left);
            in_body(right);
        }
        _ => {}
    }
}

fn function_meant(function: &mut Function) -> Option<Expr> {
    let name = function.name.to_string().to_lowercase();
    let FunctionArguments::List(list) = &mut function.args else { return None };
    let mut given: Vec<&mut Expr> = Vec::with_capacity(list.args.len());
    for argument in &mut list.args {
        match argument {
            FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) => given.push(expr),
            _ => return None,
        }
    }
    match (name.as_str(), given.as_mut_slice()) {
        ("nullif", [value, other]) => Some(Expr::Case {
            case_token: sqlparser::ast::helpers::attached_token::AttachedToken::empty(),
            end_token: sqlparser::ast::helpers::attached_token::AttachedToken::empty(),
            operand: None,
            conditions: vec![CaseWhen {
                condition: compared(value, BinaryOperator::Eq, other),
                result: Expr::Value(Value::Null.into()),
            }],
            else_result: Some(Box::new((*value).clone())),
        }),
        // A cast in Spark's own words.
        ("to_timestamp", [value]) => {
            Some(cast((*value).clone(), DataType::Timestamp(MICROSECONDS, TimezoneInfo::WithTimeZone)))
        }
        ("to_date", [value]) => Some(cast((*value).clone(), DataType::Date)),
        (name, given) if OF_FRACTIONS.contains(&name) => {
            for one in given {
                let value = std::mem::replace(*one, Expr::Value(Value::Null.into()));
                **one = cast(value, DataType::Double(ExactNumberInfo::None));
            }
            None
        }
        (name, given) if CHOOSING.contains(&name) => {
            given.iter_mut().for_each(|one| is_int(one));
            None
        }
        _ => None,
    }
}

/// Spark's meaning of a type's name.
fn meant(data_type: &mut DataType) {
    match data_type {
        DataType::Timestamp(precision, zone) => {
            *precision = MICROSECONDS;
            if *zone == TimezoneInfo::None {
                *zone = TimezoneInfo::WithTimeZone;
            }
        }
        DataType::TimestampNtz(_) => {
            *data_type = DataType::Timestamp(MICROSECONDS, TimezoneInfo::WithoutTimeZone);
        }
        DataType::Custom(name, _) if name.to_string().eq_ignore_ascii_case("timestamp_ltz") => {
            *data_type = DataType::Timestamp(MICROSECONDS, TimezoneInfo::WithTimeZone);
        }
        DataType::Decimal(info) | DataType::Dec(info) | DataType::Numeric(info)
            if *info == ExactNumberInfo::None =>
        {
            *info = ExactNumberInfo::PrecisionAndScale(10, 0);
        }
        _ => {}
    }
}

/// A whole number that fits is an `INT`.
fn is_int(expr: &mut Expr) {
    let digits = match &*expr {
        Expr::Value(value) => match &value.value {
            Value::Number(digits, false) => digits.clone(),
            _ => return,
        },
        Expr::UnaryOp { op: UnaryOperator::Minus, expr: inner } => match inner.as_ref() {
            Expr::Value(value) => match &value.value {
                Value::Number(digits, false) => format!("-{digits}"),
                _ => return,
            },
            _ => return,
        },
        _ => return,
    };
    if digits.parse::<i32>().is_ok() {
        let value = std::mem::replace(expr, Expr::Value(Value::Null.into()));
        *expr = cast(value, DataType::Int(None));
    }
}

fn is_number(expr: &Expr) -> bool {
    matches!(expr, Expr::Value(value) if matches!(value.value, Value::Number(..)))
}

fn number(digits: &str) -> Expr {
    Expr::Value(Value::Number(digits.to_owned(), false).into())
}

fn cast(value: Expr, data_type: DataType) -> Expr {
    Expr::Cast { kind: CastKind::Cast, expr: Box::new(value), data_type, array: false, format: None }
}

fn nested(expr: Expr) -> Expr {
    Expr::Nested(Box::new(expr))
}

fn not(expr: Expr) -> Expr {
    Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(expr) }
}

fn joined(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

fn compared(left: &Expr, op: BinaryOperator, right: &Expr) -> Expr {
    let side = |one: &Expr| match one {
        plain @ (Expr::Value(_) | Expr::Identifier(_) | Expr::CompoundIdentifier(_) | Expr::Nested(_)) => {
            plain.clone()
        }
        other => nested(other.clone()),
    };
    joined(side(left), op, side(right))
}

/// One `OR` of all, as flat as it can be: a thousand values nest ten deep.
fn any_of(mut all: Vec<Expr>) -> Option<Expr> {
    while all.len() > 1 {
        let mut half = Vec::with_capacity(all.len().div_ceil(2));
        let mut rest = all.into_iter();
        while let Some(one) = rest.next() {
            half.push(match rest.next() {
                Some(other) => nested(joined(one, BinaryOperator::Or, other)),
                None => one,
            });
        }
        all = half;
    }
    all.pop()
}
