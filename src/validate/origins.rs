//! `origins(_origin)`: which origins a group's rows come from, and which of them more than once.
//!
//! Two bits an origin and group: that is all that blame needs (rule E3), it costs 16 bytes a key for up to
//! 63 cars, and it comes out of the same scan that finds the duplicates. An array of origins a key, or a
//! second scan, would cost most where the data is good.

use std::any::Any;
use std::mem::size_of;
use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, BooleanArray, FixedSizeBinaryBuilder};
use datafusion::arrow::datatypes::{DataType, Field, FieldRef, Int32Type};
use datafusion::common::{DataFusionError, Result as DataFusionResult, internal_err, not_impl_err};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, EmitTo, GroupsAccumulator, Signature, Volatility,
};

const WORD_BITS: usize = u64::BITS as usize;
const WORD_BYTES: usize = size_of::<u64>();

/// The set of origins of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginSet {
    /// First half: seen at least once. Second half: seen at least twice.
    words: Vec<u64>,
}

impl OriginSet {
    pub fn contains(&self, origin: usize) -> bool {
        self.bit(0, origin)
    }

    /// Do at least two of the group's rows come from `origin`?
    pub fn repeats(&self, origin: usize) -> bool {
        self.bit(self.words.len() / 2, origin)
    }

    fn bit(&self, half: usize, origin: usize) -> bool {
        let half_words = self.words.len() / 2;
        let at = origin / WORD_BITS;
        at < half_words && self.words.get(half + at).is_some_and(|word| word >> (origin % WORD_BITS) & 1 == 1)
    }

    /// The value that the aggregate gave; `None` for bytes of another shape.
    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        if !bytes.len().is_multiple_of(2 * WORD_BYTES) {
            return None;
        }
        let words = bytes
            .chunks_exact(WORD_BYTES)
            .map(|chunk| chunk.try_into().map(u64::from_le_bytes))
            .collect::<Result<_, _>>()
            .ok()?;
        Some(Self { words })
    }
}

/// The aggregate for origins `0..origins`.
pub fn origins_aggregate(origins: usize) -> AggregateUDF {
    AggregateUDF::from(Origins {
        signature: Signature::exact(vec![DataType::Int32], Volatility::Immutable),
        half_words: origins.div_ceil(WORD_BITS).max(1),
    })
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Origins {
    signature: Signature,
    half_words: usize,
}

impl Origins {
    fn width(&self) -> usize {
        2 * self.half_words * WORD_BYTES
    }

    fn data_type(&self) -> DataType {
        DataType::FixedSizeBinary(i32::try_from(self.width()).unwrap_or(i32::MAX))
    }
}

impl AggregateUDFImpl for Origins {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn name(&self) -> &str {
        "origins"
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn return_type(&self, _arguments: &[DataType]) -> DataFusionResult<DataType> {
        Ok(self.data_type())
    }

    fn is_nullable(&self) -> bool {
        false
    }

    /// Only ever used with GROUP BY.
    fn accumulator(&self, _arguments: AccumulatorArgs) -> DataFusionResult<Box<dyn Accumulator>> {
        not_impl_err!("origins() needs a GROUP BY")
    }

    fn state_fields(&self, arguments: StateFieldsArgs) -> DataFusionResult<Vec<FieldRef>> {
        Ok(vec![Arc::new(Field::new(format!("{}[set]", arguments.name), self.data_type(), false))])
    }

    fn groups_accumulator_supported(&self, _arguments: AccumulatorArgs) -> bool {
        true
    }

    fn create_groups_accumulator(
        &self,
        _arguments: AccumulatorArgs,
    ) -> DataFusionResult<Box<dyn GroupsAccumulator>> {
        Ok(Box::new(OriginGroups { half_words: self.half_words, words: Vec::new() }))
    }

    fn order_sensitivity(&self) -> datafusion::logical_expr::utils::AggregateOrderSensitivity {
        datafusion::logical_expr::utils::AggregateOrderSensitivity::Insensitive
    }
}

/// `2 * half_words` words a group, one group after the other.
struct OriginGroups {
    half_words: usize,
    words: Vec<u64>,
}

impl OriginGroups {
    fn width(&self) -> usize {
        2 * self.half_words
    }

    fn bytes(&self, words: &[u64]) -> DataFusionResult<ArrayRef> {
        let width = i32::try_from(self.width() * WORD_BYTES)
            .map_err(|_| DataFusionError::Internal("too many origins".to_owned()))?;
        let mut builder = FixedSizeBinaryBuilder::with_capacity(words.len() / self.width(), width);
        let mut group_bytes = Vec::with_capacity(self.width() * WORD_BYTES);
        for group in words.chunks_exact(self.width()) {
            group_bytes.clear();
            for word in group {
                group_bytes.extend_from_slice(&word.to_le_bytes());
            }
            builder.append_value(&group_bytes)?;
        }
        Ok(Arc::new(builder.finish()))
    }

    fn place(&self, origin: i32) -> DataFusionResult<(usize, u64)> {
        let origin = usize::try_from(origin).unwrap_or(usize::MAX);
        let word = origin / WORD_BITS;
        if word >= self.half_words {
            return internal_err!("origin {origin} is out of bounds");
        }
        Ok((word, 1u64 << (origin % WORD_BITS)))
    }
}

fn counts(filter: Option<&BooleanArray>, row: usize) -> bool {
    filter.is_none_or(|filter| filter.is_valid(row) && filter.value(row))
}

fn only(values: &[ArrayRef]) -> DataFusionResult<&ArrayRef> {
    match values {
        [one] => Ok(one),
        other => internal_err!("origins() takes one argument, not {}", other.len()),
    }
}

impl GroupsAccumulator for OriginGroups {
    fn update_batch(
        &mut self,
        values: &[ArrayRef],
        group_indices: &[usize],
        opt_filter: Option<&BooleanArray>,
        total_num_groups: usize,
    ) -> DataFusionResult<()> {
        self.words.resize(total_num_groups * self.width(), 0);
        let origins = only(values)?.as_primitive::<Int32Type>();
        for (row, group) in group_indices.iter().enumerate() {
            if origins.is_null(row) || !counts(opt_filter, row) {
                continue;
            }
            let (word, bit) = self.place(origins.value(row))?;
            let at = group * self.width() + word;
            if self.words[at] & bit != 0 {
                self.words[at + self.half_words] |= bit;
            }
            self.words[at] |= bit;
        }
        Ok(())
    }

    fn evaluate(&mut self, emit_to: EmitTo) -> DataFusionResult<ArrayRef> {
        let emitted = match emit_to {
            EmitTo::All => std::mem::take(&mut self.words),
            EmitTo::First(groups) => {
                let rest = self.words.split_off(groups * self.width());
                std::mem::replace(&mut self.words, rest)
            }
        };
        self.bytes(&emitted)
    }

    fn state(&mut self, emit_to: EmitTo) -> DataFusionResult<Vec<ArrayRef>> {
        Ok(vec![self.evaluate(emit_to)?])
    }

    fn merge_batch(
        &mut self,
        values: &[ArrayRef],
        group_indices: &[usize],
        opt_filter: Option<&BooleanArray>,
        total_num_groups: usize,
    ) -> DataFusionResult<()> {
        self.words.resize(total_num_groups * self.width(), 0);
        let sets = only(values)?.as_fixed_size_binary();
        for (row, group) in group_indices.iter().enumerate() {
            if sets.is_null(row) || !counts(opt_filter, row) {
                continue;
            }
            let Some(other) = OriginSet::of_bytes(sets.value(row)).filter(|o| o.words.len() == self.width())
            else {
                return internal_err!("origins() got a state of another width");
            };
            let width = self.width();
            let (seen, twice) = self.words[group * width..(group + 1) * width].split_at_mut(self.half_words);
            let (other_seen, other_twice) = other.words.split_at(self.half_words);
            for at in 0..seen.len() {
                twice[at] |= other_twice[at] | (seen[at] & other_seen[at]);
                seen[at] |= other_seen[at];
            }
        }
        Ok(())
    }

    /// Keys are nearly all different where data is good: the first stage of the aggregation then passes
    /// rows on as they are.
    fn convert_to_state(
        &self,
        values: &[ArrayRef],
        opt_filter: Option<&BooleanArray>,
    ) -> DataFusionResult<Vec<ArrayRef>> {
        let origins = only(values)?.as_primitive::<Int32Type>();
        let mut words = vec![0u64; origins.len() * self.width()];
        for row in 0..origins.len() {
            if origins.is_valid(row) && counts(opt_filter, row) {
                let (word, bit) = self.place(origins.value(row))?;
                words[row * self.width() + word] = bit;
            }
        }
        Ok(vec![self.bytes(&words)?])
    }

    fn supports_convert_to_state(&self) -> bool {
        true
    }

    fn size(&self) -> usize {
        self.words.capacity() * WORD_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use datafusion::arrow::array::Int32Array;

    fn ints(values: &[i32]) -> Vec<ArrayRef> {
        vec![Arc::new(Int32Array::from(values.to_vec()))]
    }

    fn set_of(array: &ArrayRef, row: usize) -> OriginSet {
        OriginSet::of_bytes(array.as_fixed_size_binary().value(row)).unwrap()
    }

    /// 130 origins need three words a half; 129 is in the last one.
    fn groups() -> OriginGroups {
        OriginGroups { half_words: 3, words: Vec::new() }
    }

    #[test]
    fn tells_once_from_twice_in_every_word() {
        let mut groups = groups();
        groups.update_batch(&ints(&[0, 129, 129, 5]), &[0, 0, 0, 1], None, 2).unwrap();
        let out = groups.evaluate(EmitTo::First(1)).unwrap();
        let first = set_of(&out, 0);
        assert!(first.contains(0) && first.contains(129) && !first.contains(5));
        assert!(first.repeats(129) && !first.repeats(0));
        let rest = groups.evaluate(EmitTo::All).unwrap();
        assert!(set_of(&rest, 0).contains(5) && !set_of(&rest, 0).repeats(5));
    }

    #[test]
    fn merging_two_single_rows_of_one_origin_is_a_repeat() {
        let mut groups = groups();
        let states = groups.convert_to_state(&ints(&[7, 7, 8]), None).unwrap();
        groups.merge_batch(&states, &[0, 0, 0], None, 1).unwrap();
        let out = groups.state(EmitTo::All).unwrap();
        let set = set_of(&out[0], 0);
        assert!(set.repeats(7) && set.contains(8) && !set.repeats(8));
    }

    #[test]
    fn an_origin_out_of_bounds_is_an_error() {
        assert!(groups().update_batch(&ints(&[192]), &[0], None, 1).is_err());
    }
}
