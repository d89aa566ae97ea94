//! Where Spark's operators mean something else than the engine's.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::common::{DFSchema, DataFusionError, Result};
use datafusion::logical_expr::planner::{ExprPlanner, PlannerResult, RawBinaryExpr};
use datafusion::logical_expr::{
    BinaryExpr, Cast, Expr, ExprSchemable, LogicalPlan, Operator, ScalarUDF, TryCast, cast,
};
use datafusion::prelude::DataFrame;
use datafusion::sql::sqlparser::ast::BinaryOperator;

use super::arithmetic::{self, Arithmetic, Zero, is_text, number_for};
use super::error::ReplayError;

/// Functions that give one of their arguments, and so bring them to one type.
const CHOOSING: [&str; 6] = ["coalesce", "greatest", "least", "nvl", "nvl2", "nullif"];

/// Spark SQL: arithmetic that tells what overflows, `/` of integers gives a fraction, and text beside a number is
/// read as a number.
#[derive(Debug)]
pub(super) struct SparkOperators;

impl ExprPlanner for SparkOperators {
    fn plan_binary_op(&self, expr: RawBinaryExpr, schema: &DFSchema) -> Result<PlannerResult<RawBinaryExpr>> {
        let (Ok(left), Ok(right)) = (expr.left.get_type(schema), expr.right.get_type(schema)) else {
            return Ok(PlannerResult::Original(expr));
        };
        if let Some(op) = Arithmetic::of(&expr.op) {
            let planned = arithmetic::planned(op, (&expr.left, &left), (&expr.right, &right))?;
            return Ok(planned.map_or(PlannerResult::Original(expr), PlannerResult::Planned));
        }
        let Some(op) = comparison(&expr.op) else { return Ok(PlannerResult::Original(expr)) };
        // Text beside a number is one, a day or local time beside a time with a zone is one there.
        let left = number_for(&left, &right).or_else(|| zone_for(&left, &right)).unwrap_or(left);
        let right = number_for(&right, &left).or_else(|| zone_for(&right, &left)).unwrap_or(right);
        let is_float = left.is_floating() || right.is_floating();
        let fitted = |side: Expr, to: &DataType| -> Result<Expr> {
            let is = side.get_type(schema)?;
            if is_float && (to.is_numeric() || is_text(to)) {
                let number = cast(side, DataType::Float64);
                return Ok(ScalarUDF::from(Zero::without_sign()).call(vec![number]));
            }
            Ok(if is == *to { side } else { cast(side, to.clone()) })
        };
        let (left, right) = (fitted(expr.left, &left)?, fitted(expr.right, &right)?);
        Ok(PlannerResult::Planned(Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right)))))
    }
}

/// The type that a day or a local time is read as beside the other.
fn zone_for(local: &DataType, other: &DataType) -> Option<DataType> {
    match (local, other) {
        (DataType::Date32 | DataType::Timestamp(_, None), DataType::Timestamp(_, Some(_))) => {
            Some(other.clone())
        }
        _ => None,
    }
}

fn comparison(op: &BinaryOperator) -> Option<Operator> {
    Some(match op {
        BinaryOperator::Eq => Operator::Eq,
        BinaryOperator::NotEq => Operator::NotEq,
        BinaryOperator::Lt => Operator::Lt,
        BinaryOperator::LtEq => Operator::LtEq,
        BinaryOperator::Gt => Operator::Gt,
        BinaryOperator::GtEq => Operator::GtEq,
        BinaryOperator::Spaceship => Operator::IsNotDistinctFrom,
        _ => return None,
    })
}

/// Refuses what would give other values than in Spark, be it that the statement says so or that the engine brings
/// values to one type in its own way: times and fractions as text, fractions as decimals, numbers as times, numbers
/// as text that the statement does not ask for, averages of decimals, rounded fractions.
pub(super) fn check(rows: &DataFrame) -> std::result::Result<(), ReplayError> {
    let (state, plan) = rows.clone().into_parts();
    let said = Look::at(&plan)?.as_text;
    let plan = state.analyzer().execute_and_check(plan, state.config_options(), |_, _| {})?;
    let look = Look::at(&plan)?;
    if let Some(what) = look.differs {
        return Err(DataFusionError::Plan(format!("{what}; record the operation in its typed form")).into());
    }
    let mut said = said;
    for value in look.as_text {
        // Each that was said stands for one.
        match said.iter().position(|one| *one == value) {
            Some(at) => drop(said.swap_remove(at)),
            None => {
                let what = format!("{value} is brought to text here beside a text, and not in Spark");
                return Err(DataFusionError::Plan(format!("{what}; say so with CAST")).into());
            }
        }
    }
    Ok(())
}

/// Without the casts in it, of which the engine adds some.
fn bare(expr: &Expr) -> Result<String> {
    let bare = expr.clone().transform_up(|expr| {
        Ok(match expr {
            Expr::Cast(Cast { expr, .. }) | Expr::TryCast(TryCast { expr, .. }) => Transformed::yes(*expr),
            other => Transformed::no(other),
        })
    })?;
    Ok(bare.data.to_string())
}

/// What stands in a plan.
#[derive(Default)]
struct Look {
    /// The first that gives other values than in Spark.
    differs: Option<String>,
    /// Values that are no text and become one, other than as arguments of functions of texts.
    as_text: Vec<String>,
}

impl Look {
    fn at(plan: &LogicalPlan) -> Result<Self> {
        let mut look = Self::default();
        plan.apply_with_subqueries(|node| {
            let schemas: Vec<&Arc<DFSchema>> = node.inputs().iter().map(|input| input.schema()).collect();
            node.apply_expressions(|expr| {
                look.expression(expr, &schemas, false)?;
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        Ok(look)
    }

    fn expression(&mut self, expr: &Expr, schemas: &[&Arc<DFSchema>], takes_text: bool) -> Result<()> {
        match expr {
            Expr::Cast(Cast { expr: inner, data_type })
            | Expr::TryCast(TryCast { expr: inner, data_type }) => {
                if let Some(from) = type_of(inner, schemas) {
                    self.cast(inner, &from, data_type, takes_text)?;
                }
            }
            Expr::AggregateFunction(function) if function.func.name() == "avg" => {
                self.no_decimals(&function.params.args, schemas);
            }
            Expr::WindowFunction(function) if function.fun.name() == "avg" => {
                self.no_decimals(&function.params.args, schemas);
            }
            Expr::ScalarFunction(function) if function.name() == "round" => {
                let of = function.args.first().and_then(|value| type_of(value, schemas));
                if !of.is_none_or(|of| of.is_decimal()) {
                    self.differs(format!("{expr} rounds otherwise than Spark what is no decimal"));
                }
            }
            _ => {}
        }
        let takes_text = match expr {
            Expr::ScalarFunction(function) => !CHOOSING.contains(&function.name()),
            Expr::BinaryExpr(binary) => binary.op == Operator::StringConcat,
            _ => false,
        };
        expr.apply_children(|child| {
            self.expression(child, schemas, takes_text)?;
            Ok(TreeNodeRecursion::Continue)
        })?;
        Ok(())
    }

    fn no_decimals(&mut self, arguments: &[Expr], schemas: &[&Arc<DFSchema>]) {
        if arguments.iter().any(|one| type_of(one, schemas).is_some_and(|of| of.is_decimal())) {
            self.differs("an average of decimals has another last digit here than in Spark".to_owned());
        }
    }

    fn cast(&mut self, inner: &Expr, from: &DataType, to: &DataType, takes_text: bool) -> Result<()> {
        let is_time = |of: &DataType| of.is_temporal();
        if is_text(to) && !is_text(from) && !from.is_null() {
            if from.is_floating() || (is_time(from) && *from != DataType::Date32) {
                self.differs(format!("{inner} as text looks different here than in Spark"));
            }
            if !takes_text {
                self.as_text.push(bare(inner)?);
            }
        }
        if from.is_floating() && to.is_decimal() {
            self.differs(format!(
                "{inner} is a fraction, which as a decimal rounds otherwise here than in Spark"
            ));
        }
        let is_number = |of: &DataType| of.is_numeric() || *of == DataType::Boolean;
        if (is_number(from) && is_time(to)) || (is_time(from) && is_number(to)) {
            self.differs(format!("{inner} as {to} is another value here than in Spark"));
        }
        Ok(())
    }

    fn differs(&mut self, what: String) {
        self.differs.get_or_insert(what);
    }
}

fn type_of(expr: &Expr, schemas: &[&Arc<DFSchema>]) -> Option<DataType> {
    if schemas.is_empty() {
        return expr.get_type(&DFSchema::empty()).ok();
    }
    schemas.iter().find_map(|schema| expr.get_type(schema.as_ref()).ok())
}
