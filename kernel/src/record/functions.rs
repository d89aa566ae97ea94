//! Functions of a Spark statement, as the engine that runs it again has them.
//!
//! Engines give one name to functions that differ: in nulls, in positions, in the text of a time. A statement that
//! ran in Spark must not come to other values here, so only functions are let through that are known to do the
//! same; a few are written in another way. The others are refused by name.

use std::ops::ControlFlow;

use sqlparser::ast::helpers::attached_token::AttachedToken;
use sqlparser::ast::{
    BinaryOperator, CaseWhen, DateTimeField, Expr, Function, FunctionArg, FunctionArgExpr, FunctionArguments,
    Value, VisitMut, VisitorMut,
};

use super::RecordError;

/// The same in Spark and in DataFusion, nulls included.
const SAME: [&str; 45] = [
    "abs",
    "avg",
    "btrim",
    "ceil",
    "ceiling",
    "char_length",
    "character_length",
    "coalesce",
    "concat_ws",
    "contains",
    "count",
    "date_trunc",
    "dense_rank",
    "endswith",
    "exp",
    "floor",
    "greatest",
    "ifnull",
    "lag",
    "lead",
    "least",
    "length",
    "ln",
    "lower",
    "lpad",
    "ltrim",
    "max",
    "min",
    "named_struct",
    "nullif",
    "nvl",
    "nvl2",
    "power",
    "rank",
    "repeat",
    "replace",
    "reverse",
    "round",
    "row_number",
    "rpad",
    "rtrim",
    "sqrt",
    "sum",
    "trim",
    "upper",
];
/// The same as long as the second argument is a positive number.
const FROM_ONE: [&str; 2] = ["substr", "substring"];
/// The same without a format.
const WITHOUT_FORMAT: [&str; 2] = ["to_date", "to_timestamp"];

/// Fits the functions of an expression or query to the engine, or names the one that cannot be.
pub(super) fn fit(sql: &mut impl VisitMut) -> Result<(), RecordError> {
    match sql.visit(&mut Fit) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

struct Fit;

fn unknown(what: impl std::fmt::Display) -> ControlFlow<RecordError> {
    ControlFlow::Break(RecordError::Sql(format!(
        "{what} is not known to do the same here as in Spark; record the operation in its typed form"
    )))
}

fn is_positive(expr: Option<&Expr>) -> bool {
    let Some(Expr::Value(value)) = expr else { return false };
    matches!(&value.value, Value::Number(digits, _) if digits.parse::<u64>().is_ok_and(|from| from > 0))
}

impl VisitorMut for Fit {
    type Break = RecordError;

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<RecordError> {
        match expr {
            Expr::Function(function) => match fitted(function) {
                Ok(None) => ControlFlow::Continue(()),
                Ok(Some(other)) => {
                    *expr = other;
                    ControlFlow::Continue(())
                }
                Err(name) => unknown(format!("function {name}()")),
            },
            Expr::Substring { substring_from, .. } if !is_positive(substring_from.as_deref()) => {
                unknown("substring() that does not begin at a positive position")
            }
            Expr::Extract { field, .. }
                if !matches!(
                    field,
                    DateTimeField::Year
                        | DateTimeField::Month
                        | DateTimeField::Day
                        | DateTimeField::Hour
                        | DateTimeField::Minute
                ) =>
            {
                unknown(format!("extract({field})"))
            }
            Expr::Position { .. } | Expr::Overlay { .. } | Expr::Collate { .. } => unknown(expr.to_string()),
            _ => ControlFlow::Continue(()),
        }
    }
}

/// Plain arguments; `None` for anything else.
fn arguments(function: &Function) -> Option<Vec<Expr>> {
    let FunctionArguments::List(list) = &function.args else { return None };
    let one = |arg: &FunctionArg| match arg {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(expr)) => Some(expr.clone()),
        _ => None,
    };
    list.args.iter().map(one).collect()
}

/// Another expression in its place; the name, when there is none.
fn fitted(function: &Function) -> Result<Option<Expr>, String> {
    let text = function.name.to_string();
    let name = text.to_lowercase();
    if SAME.contains(&name.as_str()) {
        return Ok(None);
    }
    let arguments = arguments(function).ok_or(text.clone())?;
    if FROM_ONE.contains(&name.as_str()) && is_positive(arguments.get(1)) {
        return Ok(None);
    }
    if WITHOUT_FORMAT.contains(&name.as_str()) && arguments.len() == 1 {
        return Ok(None);
    }
    match (name.as_str(), arguments.as_slice()) {
        // Null if one of them is: the engine's own leaves nulls out.
        ("concat", [_, ..]) => {
            let all = arguments.into_iter().map(|one| Expr::Nested(Box::new(one)));
            let chain = all.reduce(|left, right| Expr::BinaryOp {
                left: Box::new(left),
                op: BinaryOperator::StringConcat,
                right: Box::new(right),
            });
            Ok(chain.map(|chain| Expr::Nested(Box::new(chain))))
        }
        ("if", [condition, yes, no]) => Ok(Some(Expr::Case {
            case_token: AttachedToken::empty(),
            end_token: AttachedToken::empty(),
            operand: None,
            conditions: vec![CaseWhen { condition: condition.clone(), result: yes.clone() }],
            else_result: Some(Box::new(no.clone())),
        })),
        _ => Err(text),
    }
}
