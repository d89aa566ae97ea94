//! Where Spark's operators mean something else than the engine's.

use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::{DataType, Float64Type};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{DFSchema, DataFusionError, Result, exec_err};
use datafusion::logical_expr::planner::{ExprPlanner, PlannerResult, RawBinaryExpr};
use datafusion::logical_expr::{
    BinaryExpr, Cast, ColumnarValue, Expr, ExprSchemable, LogicalPlan, Operator, ScalarFunctionArgs,
    ScalarUDF, ScalarUDFImpl, Signature, TryCast, Volatility, cast,
};
use datafusion::prelude::DataFrame;
use datafusion::sql::sqlparser::ast::BinaryOperator;

use super::error::ReplayError;

/// Spark SQL: `/` of integers gives a fraction, and text beside a number is read as a number.
#[derive(Debug)]
pub(super) struct SparkOperators;

impl ExprPlanner for SparkOperators {
    fn plan_binary_op(&self, expr: RawBinaryExpr, schema: &DFSchema) -> Result<PlannerResult<RawBinaryExpr>> {
        let (Ok(left), Ok(right)) = (expr.left.get_type(schema), expr.right.get_type(schema)) else {
            return Ok(PlannerResult::Original(expr));
        };
        if expr.op == BinaryOperator::Divide {
            let is_decimal =
                |one: &DataType| matches!(one, DataType::Decimal128(..) | DataType::Decimal256(..));
            if is_decimal(&left) || is_decimal(&right) {
                return Err(DataFusionError::Plan(
                    "a division of decimals has other digits here than in Spark; record the operation in its \
                     typed form"
                        .to_owned(),
                ));
            }
            if left.is_numeric() && right.is_numeric() {
                let (left, right) = (cast(expr.left, DataType::Float64), cast(expr.right, DataType::Float64));
                let right = ScalarUDF::from(NotZero::default()).call(vec![right]);
                return Ok(planned(left, Operator::Divide, right));
            }
        }
        let Some(op) = comparison(&expr.op) else { return Ok(PlannerResult::Original(expr)) };
        match (number_for(&left, &right), number_for(&right, &left)) {
            (Some(number), _) => Ok(planned(cast(expr.left, number), op, expr.right)),
            (_, Some(number)) => Ok(planned(expr.left, op, cast(expr.right, number))),
            (None, None) => Ok(PlannerResult::Original(expr)),
        }
    }
}

fn planned(left: Expr, op: Operator, right: Expr) -> PlannerResult<RawBinaryExpr> {
    PlannerResult::Planned(Expr::BinaryExpr(BinaryExpr::new(Box::new(left), op, Box::new(right))))
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

/// The type that text of this type is read as beside the other (Spark, "ANSI Compliance": text is promoted to
/// the other's widest kind).
fn number_for(text: &DataType, other: &DataType) -> Option<DataType> {
    if !matches!(text, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View) {
        return None;
    }
    match other {
        other if other.is_integer() => Some(DataType::Int64),
        DataType::Float32 | DataType::Float64 | DataType::Decimal128(..) => Some(DataType::Float64),
        _ => None,
    }
}

/// The number itself. Zero is an error: Spark's answer to a division by it depends on its settings, and none of
/// its answers is the engine's.
#[derive(Debug, PartialEq, Eq, Hash)]
struct NotZero {
    signature: Signature,
}

impl Default for NotZero {
    fn default() -> Self {
        Self { signature: Signature::exact(vec![DataType::Float64], Volatility::Immutable) }
    }
}

impl ScalarUDFImpl for NotZero {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn name(&self) -> &'static str {
        "not_zero"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Float64)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let numbers = ColumnarValue::values_to_arrays(&args.args)?;
        let Some(numbers) = numbers.first() else { return exec_err!("nothing to divide by") };
        if numbers.as_primitive::<Float64Type>().iter().flatten().any(|number| number == 0.0) {
            return exec_err!("division by zero");
        }
        Ok(ColumnarValue::Array(Arc::clone(numbers)))
    }
}

/// Refuses what would give other text than in Spark: times and fractions as text, be it that the statement says so
/// or that a comparison or an assignment needs it.
pub(super) fn check(rows: &DataFrame) -> std::result::Result<(), ReplayError> {
    let (state, plan) = rows.clone().into_parts();
    let plan = state.analyzer().execute_and_check(plan, state.config_options(), |_, _| {})?;
    plan.apply_with_subqueries(|node| {
        node.apply_expressions(|expr| {
            expr.apply(|expr| {
                check_cast(expr, node)?;
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })?;
    Ok(())
}

fn check_cast(expr: &Expr, node: &LogicalPlan) -> Result<()> {
    let (Expr::Cast(Cast { expr: inner, .. }) | Expr::TryCast(TryCast { expr: inner, .. })) = expr else {
        return Ok(());
    };
    let schemas = node.inputs();
    let mut found = schemas.iter().filter_map(|input| Some((inner.get_type(input.schema()).ok()?, input)));
    let Some((from, input)) = found.next() else { return Ok(()) };
    let to = expr.get_type(input.schema())?;
    let is_text = matches!(to, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let differs = matches!(
        from,
        DataType::Timestamp(..)
            | DataType::Float16
            | DataType::Float32
            | DataType::Float64
            | DataType::Interval(_)
            | DataType::Duration(_)
            | DataType::Time32(_)
            | DataType::Time64(_)
    );
    if is_text && differs {
        return Err(DataFusionError::Plan(format!(
            "{inner} as text looks different here than in Spark; record the operation in its typed form"
        )));
    }
    Ok(())
}
