//! Spark's arithmetic: the types of its results, and an error where a result does not fit.
//!
//! Spark's default is ANSI mode: what overflows is an error, never another number (Spark SQL reference, "ANSI
//! Compliance"). The engine's own operators wrap around, and take a whole number in a statement as 64 bits wide, which
//! Spark takes as 32. Here both sides are brought to the type that Spark would compute in, and the operator is one that
//! tells what overflowed.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, AsArray, Datum};
use datafusion::arrow::compute::kernels::numeric;
use datafusion::arrow::datatypes::{DECIMAL128_MAX_PRECISION, DataType, Float64Type, IntervalMonthDayNano};
use datafusion::arrow::error::ArrowError;
use datafusion::common::{DataFusionError, Result, exec_err};
use datafusion::logical_expr::{
    ColumnarValue, Expr, Operator, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
    binary_expr, cast,
};
use datafusion::scalar::ScalarValue;
use datafusion::sql::sqlparser::ast::BinaryOperator;

/// What an expression computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Bits.
    Int(u8),
    /// Digits, and how many of them are behind the point.
    Decimal(u8, i8),
    Float,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Arithmetic {
    Plus,
    Minus,
    Times,
    Divide,
    Remainder,
}

impl Arithmetic {
    pub fn of(op: &BinaryOperator) -> Option<Self> {
        Some(match op {
            BinaryOperator::Plus => Self::Plus,
            BinaryOperator::Minus => Self::Minus,
            BinaryOperator::Multiply => Self::Times,
            BinaryOperator::Divide => Self::Divide,
            BinaryOperator::Modulo => Self::Remainder,
            _ => return None,
        })
    }

    fn sign(self) -> &'static str {
        match self {
            Self::Plus => "+",
            Self::Minus => "-",
            Self::Times => "*",
            Self::Divide => "/",
            Self::Remainder => "%",
        }
    }

    fn operator(self) -> Operator {
        match self {
            Self::Plus => Operator::Plus,
            Self::Minus => Operator::Minus,
            Self::Times => Operator::Multiply,
            Self::Divide => Operator::Divide,
            Self::Remainder => Operator::Modulo,
        }
    }

    /// The result of decimals; `None`: Spark would leave digits out.
    fn of_decimals(self, (p1, s1): (u8, i8), (p2, s2): (u8, i8)) -> Option<DataType> {
        let (p1, s1, p2, s2) = (i16::from(p1), i16::from(s1), i16::from(p2), i16::from(s2));
        let scale = s1.max(s2);
        let (precision, scale) = match self {
            Self::Plus | Self::Minus => ((p1 - s1).max(p2 - s2) + scale + 1, scale),
            Self::Times => (p1 + p2 + 1, s1 + s2),
            Self::Remainder => ((p1 - s1).min(p2 - s2) + scale, scale),
            Self::Divide => return None,
        };
        let precision = u8::try_from(precision.max(1)).ok().filter(|p| *p <= DECIMAL128_MAX_PRECISION)?;
        Some(DataType::Decimal128(precision, i8::try_from(scale).ok()?))
    }
}

pub(super) fn is_text(of: &DataType) -> bool {
    matches!(of, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

/// `left op right` as Spark has it; `None`: nothing is known of the types.
pub(super) fn planned(
    op: Arithmetic,
    left: (&Expr, &DataType),
    right: (&Expr, &DataType),
) -> Result<Option<Expr>> {
    if left.1.is_null() || right.1.is_null() {
        return Ok(None);
    }
    if let Some(moved) = moment(op, left, right)? {
        return Ok(Some(moved));
    }
    let (left, right) = (as_number(left, right.1), as_number(right, left.1));
    let (Some((left, one)), Some((right, other))) = (kind_of(&left), kind_of(&right)) else {
        return plan_error(format!("{} {} {}", left.0, op.sign(), right.0));
    };
    let is_decimal = matches!(one, Kind::Decimal(..)) || matches!(other, Kind::Decimal(..));
    let is_float = one == Kind::Float || other == Kind::Float;
    if op == Arithmetic::Divide && is_decimal && !is_float {
        return Err(DataFusionError::Plan(
            "a division of decimals has other digits here than in Spark; record the operation in its typed form"
                .to_owned(),
        ));
    }
    if is_float || op == Arithmetic::Divide {
        let (left, mut right) = (cast(left, DataType::Float64), cast(right, DataType::Float64));
        if matches!(op, Arithmetic::Divide | Arithmetic::Remainder) {
            right = ScalarUDF::from(Zero::refused()).call(vec![right]);
        }
        return Ok(Some(binary_expr(left, op.operator(), right)));
    }
    Ok(Some(match (one, other) {
        (Kind::Int(one), Kind::Int(other)) => {
            let wider = int_type(one.max(other));
            let sides = vec![cast(left, wider.clone()), cast(right, wider.clone())];
            ScalarUDF::from(Checked::new(op, vec![wider.clone(), wider.clone()], wider)).call(sides)
        }
        (one, other) => {
            let ((p1, s1), (p2, s2)) = (decimal_of(one, &left), decimal_of(other, &right));
            let Some(result) = op.of_decimals((p1, s1), (p2, s2)) else {
                return Err(DataFusionError::Plan(format!(
                    "{left} {} {right} has more than {DECIMAL128_MAX_PRECISION} digits, of which Spark leaves some \
                     out; record the operation in its typed form",
                    op.sign()
                )));
            };
            let types = vec![DataType::Decimal128(p1, s1), DataType::Decimal128(p2, s2)];
            let sides = types.iter().zip([left, right]).map(|(to, side)| cast(side, to.clone())).collect();
            ScalarUDF::from(Checked::new(op, types, result)).call(sides)
        }
    }))
}

fn plan_error<T>(what: String) -> Result<T> {
    Err(DataFusionError::Plan(format!(
        "{what} is not known to be the same here as in Spark; record the operation in its typed form"
    )))
}

/// A date or time moved by an interval of one unit.
fn moment(op: Arithmetic, left: (&Expr, &DataType), right: (&Expr, &DataType)) -> Result<Option<Expr>> {
    let is_moment = |of: &DataType| matches!(of, DataType::Date32 | DataType::Timestamp(..));
    let (moment, interval) = match (is_moment(left.1), is_moment(right.1), op) {
        (true, false, Arithmetic::Plus | Arithmetic::Minus) => (left, right.0),
        (false, true, Arithmetic::Plus) => (right, left.0),
        (false, false, _) => return Ok(None),
        _ => return plan_error(format!("{} {} {}", left.0, op.sign(), right.0)),
    };
    let Expr::Literal(ScalarValue::IntervalMonthDayNano(Some(by)), _) = interval else {
        return plan_error(format!("{} {} {}", left.0, op.sign(), right.0));
    };
    let IntervalMonthDayNano { months, days, nanoseconds } = by;
    let is_date = moment.1 == &DataType::Date32;
    let one_unit = [*months != 0, *days != 0, *nanoseconds != 0].iter().filter(|there| **there).count() <= 1;
    if !one_unit || (is_date && *nanoseconds != 0) {
        return plan_error(format!("{} {} {}", left.0, op.sign(), right.0));
    }
    Ok(Some(binary_expr(left.0.clone(), op.operator(), right.0.clone())))
}

/// Text beside a number is read as one.
fn as_number(one: (&Expr, &DataType), other: &DataType) -> (Expr, DataType) {
    match number_for(one.1, other) {
        Some(number) => (cast(one.0.clone(), number.clone()), number),
        None => (one.0.clone(), one.1.clone()),
    }
}

/// The type that text of this type is read as beside the other (Spark, "ANSI Compliance": text is promoted to
/// the other's widest kind).
pub(super) fn number_for(text: &DataType, other: &DataType) -> Option<DataType> {
    if !is_text(text) {
        return None;
    }
    match other {
        other if other.is_integer() => Some(DataType::Int64),
        DataType::Float32 | DataType::Float64 | DataType::Decimal128(..) => Some(DataType::Float64),
        _ => None,
    }
}

/// A whole number in the text is 32 bits wide when it fits, else 64, else it is a decimal.
fn kind_of((expr, of): &(Expr, DataType)) -> Option<(Expr, Kind)> {
    let kind = match (expr, of) {
        (Expr::Literal(ScalarValue::Int64(Some(number)), _), _) => {
            if i32::try_from(*number).is_ok() {
                Kind::Int(32)
            } else {
                Kind::Int(64)
            }
        }
        (_, DataType::UInt64) => Kind::Decimal(20, 0),
        (_, DataType::Int8) => Kind::Int(8),
        (_, DataType::Int16) => Kind::Int(16),
        (_, DataType::Int32) => Kind::Int(32),
        (_, DataType::Int64) => Kind::Int(64),
        (_, DataType::Float32 | DataType::Float64) => Kind::Float,
        (_, DataType::Decimal128(precision, scale)) => Kind::Decimal(*precision, *scale),
        _ => return None,
    };
    Some((expr.clone(), kind))
}

fn int_type(bits: u8) -> DataType {
    match bits {
        8 => DataType::Int8,
        16 => DataType::Int16,
        32 => DataType::Int32,
        _ => DataType::Int64,
    }
}

/// Digits that hold every number of this kind; of a number in the text those that it has.
fn decimal_of(kind: Kind, expr: &Expr) -> (u8, i8) {
    match (kind, expr) {
        (Kind::Decimal(precision, scale), _) => (precision, scale),
        (_, Expr::Literal(ScalarValue::Int64(Some(number)), _)) => {
            let digits = number.unsigned_abs().checked_ilog10().map_or(1, |log| log + 1);
            (u8::try_from(digits).unwrap_or(20), 0)
        }
        (Kind::Int(8), _) => (3, 0),
        (Kind::Int(16), _) => (5, 0),
        (Kind::Int(32), _) => (10, 0),
        (Kind::Int(_) | Kind::Float, _) => (20, 0),
    }
}

/// An operator that tells what overflowed.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Checked {
    op: Arithmetic,
    result: DataType,
    signature: Signature,
}

impl Checked {
    fn new(op: Arithmetic, of: Vec<DataType>, result: DataType) -> Self {
        Self { op, result, signature: Signature::exact(of, Volatility::Immutable) }
    }

    fn apply(&self, left: &dyn Datum, right: &dyn Datum) -> std::result::Result<ArrayRef, ArrowError> {
        match self.op {
            Arithmetic::Plus => numeric::add(left, right),
            Arithmetic::Minus => numeric::sub(left, right),
            Arithmetic::Times => numeric::mul(left, right),
            Arithmetic::Remainder => numeric::rem(left, right),
            Arithmetic::Divide => numeric::div(left, right),
        }
    }
}

impl ScalarUDFImpl for Checked {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn name(&self) -> &'static str {
        match self.op {
            Arithmetic::Plus => "plus",
            Arithmetic::Minus => "minus",
            Arithmetic::Times => "times",
            Arithmetic::Divide => "divided_by",
            Arithmetic::Remainder => "remainder_of",
        }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(self.result.clone())
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let is_one = args.args.iter().all(|side| matches!(side, ColumnarValue::Scalar(_)));
        let sides = ColumnarValue::values_to_arrays(&args.args)?;
        let [left, right] = sides.as_slice() else { return exec_err!("{} takes two values", self.name()) };
        let values = self.apply(left, right).map_err(|error| {
            DataFusionError::Execution(match error {
                ArrowError::DivideByZero => "division by zero".to_owned(),
                other => format!("arithmetic overflow in {}: {other}", self.result),
            })
        })?;
        if is_one {
            return Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&values, 0)?));
        }
        Ok(ColumnarValue::Array(values))
    }
}

/// The number itself, except for zeros.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Zero {
    /// Zero is an error: Spark's answer to a division by it depends on its settings, and none of its answers is the
    /// engine's. Otherwise both of its signs become one, as Spark compares them.
    refused: bool,
    signature: Signature,
}

impl Zero {
    fn of(refused: bool) -> Self {
        Self { refused, signature: Signature::exact(vec![DataType::Float64], Volatility::Immutable) }
    }

    fn refused() -> Self {
        Self::of(true)
    }

    pub fn without_sign() -> Self {
        Self::of(false)
    }
}

impl ScalarUDFImpl for Zero {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn name(&self) -> &'static str {
        if self.refused { "not_zero" } else { "zero_without_sign" }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> Result<DataType> {
        Ok(DataType::Float64)
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        let is_one = args.args.iter().all(|side| matches!(side, ColumnarValue::Scalar(_)));
        let numbers = ColumnarValue::values_to_arrays(&args.args)?;
        let Some(numbers) = numbers.first() else { return exec_err!("{} takes a number", self.name()) };
        let numbers = numbers.as_primitive::<Float64Type>();
        if self.refused && numbers.iter().flatten().any(|number| number == 0.0) {
            return exec_err!("division by zero");
        }
        let numbers: ArrayRef = Arc::new(numbers.unary::<_, Float64Type>(|number| number + 0.0));
        if is_one {
            return Ok(ColumnarValue::Scalar(ScalarValue::try_from_array(&numbers, 0)?));
        }
        Ok(ColumnarValue::Array(numbers))
    }
}
