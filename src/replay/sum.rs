//! Spark's `sum`: an error where the sum does not fit, never another number.
//!
//! The engine's own wraps around. Here a sum is kept in 256 bits, and must fit the result's type in the end.

use datafusion::arrow::array::{Array, ArrayRef, AsArray};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::{
    DECIMAL128_MAX_PRECISION, DECIMAL256_MAX_PRECISION, DataType, Decimal256Type, Field, FieldRef, i256,
};
use datafusion::common::{Result, exec_err, not_impl_err};
use datafusion::functions_aggregate::sum::sum_udaf;
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::{Accumulator, AggregateUDF, AggregateUDFImpl, ReversedUDAF, Signature};
use datafusion::scalar::ScalarValue;
use std::sync::Arc;

/// Digits by which a sum of decimals is longer than they are (Spark: `Sum`).
const MORE_DIGITS: u8 = 10;

/// Takes the place of the engine's.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct CheckedSum {
    inner: Arc<AggregateUDF>,
}

impl CheckedSum {
    pub fn new() -> Self {
        Self { inner: sum_udaf() }
    }
}

/// Scale of the sum of values of this type; `None`: fractions, which the engine adds as Spark does.
fn exact_scale(result: &DataType) -> Option<i8> {
    match result {
        DataType::Int64 => Some(0),
        DataType::Decimal128(_, scale) => Some(*scale),
        _ => None,
    }
}

impl AggregateUDFImpl for CheckedSum {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn name(&self) -> &'static str {
        "sum"
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn coerce_types(&self, types: &[DataType]) -> Result<Vec<DataType>> {
        self.inner.coerce_types(types)
    }

    fn return_type(&self, types: &[DataType]) -> Result<DataType> {
        match types {
            [DataType::Decimal128(precision, scale)] => Ok(DataType::Decimal128(
                DECIMAL128_MAX_PRECISION.min(precision.saturating_add(MORE_DIGITS)),
                *scale,
            )),
            [DataType::Int64] => Ok(DataType::Int64),
            [DataType::Float64] => Ok(DataType::Float64),
            other => not_impl_err!("sum of {other:?}"),
        }
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        let Some(scale) = exact_scale(args.return_field.data_type()) else {
            return self.inner.accumulator(args);
        };
        if args.is_distinct {
            return not_impl_err!("sum(DISTINCT ...) of numbers that are no fractions");
        }
        Ok(Box::new(Exact {
            total: i256::ZERO,
            values: 0,
            scale,
            result: args.return_field.data_type().clone(),
        }))
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let Some(scale) = exact_scale(args.return_field.data_type()) else {
            return self.inner.state_fields(args);
        };
        let total = DataType::Decimal256(DECIMAL256_MAX_PRECISION, scale);
        Ok(vec![
            Arc::new(Field::new(format!("{}[total]", args.name), total, true)),
            Arc::new(Field::new(format!("{}[values]", args.name), DataType::Int64, true)),
        ])
    }

    fn reverse_expr(&self) -> ReversedUDAF {
        ReversedUDAF::Identical
    }
}

#[derive(Debug)]
struct Exact {
    total: i256,
    values: i64,
    scale: i8,
    result: DataType,
}

impl Exact {
    fn wide(&self, values: &ArrayRef) -> Result<ArrayRef> {
        let to = DataType::Decimal256(DECIMAL256_MAX_PRECISION, self.scale);
        let options = CastOptions { safe: false, ..Default::default() };
        Ok(cast_with_options(values, &to, &options)?)
    }

    fn add(&mut self, values: &ArrayRef, sign: i64) -> Result<()> {
        let values = self.wide(values)?;
        for value in values.as_primitive::<Decimal256Type>().iter().flatten() {
            let next = if sign > 0 { self.total.checked_add(value) } else { self.total.checked_sub(value) };
            let Some(next) = next else { return exec_err!("arithmetic overflow in a sum") };
            self.total = next;
            self.values += sign;
        }
        Ok(())
    }
}

impl Accumulator for Exact {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        match values.first() {
            Some(values) => self.add(values, 1),
            None => exec_err!("sum takes a value"),
        }
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        match values.first() {
            Some(values) => self.add(values, -1),
            None => exec_err!("sum takes a value"),
        }
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let [totals, values] = states else { return exec_err!("a sum has two states") };
        let counted = self.values;
        self.add(totals, 1)?;
        let values = values.as_primitive::<datafusion::arrow::datatypes::Int64Type>();
        self.values = counted + values.iter().flatten().sum::<i64>();
        Ok(())
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let total = ScalarValue::Decimal256(Some(self.total), DECIMAL256_MAX_PRECISION, self.scale);
        Ok(vec![total, ScalarValue::Int64(Some(self.values))])
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        if self.values == 0 {
            return ScalarValue::try_from(&self.result);
        }
        let total =
            ScalarValue::Decimal256(Some(self.total), DECIMAL256_MAX_PRECISION, self.scale).to_array()?;
        let options = CastOptions { safe: false, ..Default::default() };
        match cast_with_options(&total, &self.result, &options) {
            Ok(total) if total.null_count() == 0 => ScalarValue::try_from_array(&total, 0),
            _ => exec_err!("arithmetic overflow: a sum does not fit {}", self.result),
        }
    }

    fn size(&self) -> usize {
        size_of_val(self)
    }
}
