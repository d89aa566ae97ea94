//! Which statistics of a new file go into its manifest entry, by `write.metadata.metrics.*` (Iceberg documentation,
//! "Configuration"; Java: `MetricsConfig`, `MetricsModes`).
//!
//! A bound that is left out never misleads a reader; one that is cut must stay a bound: a lower one is a prefix, an
//! upper one a prefix that was counted up, or none.

use std::collections::HashMap;

use iceberg::spec::{DataFile, DataFileBuilder, Datum, PrimitiveLiteral, PrimitiveType, Schema, SortOrder};
use mergeberg_kernel::facts::TableFacts;

use super::row_lineage::is_lineage_id;

const DEFAULT_MODE: &str = "write.metadata.metrics.default";
const COLUMN_MODE: &str = "write.metadata.metrics.column.";
/// Columns that have a mode without being named, unless the default mode was set.
const MAX_INFERRED: &str = "write.metadata.metrics.max-inferred-column-defaults";
const INFERRED_COLUMNS: i64 = 100;
/// Characters or bytes of a bound, where nothing else is said.
const TRUNCATE_TO: usize = 16;

/// What is kept of one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    None,
    Counts,
    /// Bounds of at most so many characters (text) or bytes.
    Truncate(usize),
    Full,
}

impl Mode {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_lowercase();
        match text.as_str() {
            "none" => return Some(Self::None),
            "counts" => return Some(Self::Counts),
            "full" => return Some(Self::Full),
            _ => {}
        }
        let length = text.strip_prefix("truncate(")?.strip_suffix(')')?.trim().parse().ok()?;
        (length > 0).then_some(Self::Truncate(length))
    }
}

/// The modes of a table's columns.
pub(super) struct MetricsModes {
    default: Mode,
    of: HashMap<i32, Mode>,
}

impl MetricsModes {
    /// A mode that cannot be read is the default, as in Java.
    pub fn of(facts: &TableFacts, schema: &Schema, order: &SortOrder) -> Self {
        let mut of = HashMap::new();
        let mut default = Mode::Truncate(TRUNCATE_TO);
        let most = usize::try_from(facts.property_i64(MAX_INFERRED, INFERRED_COLUMNS)).unwrap_or_default();
        if let Some(text) = facts.properties.get(DEFAULT_MODE) {
            default = Mode::parse(text).unwrap_or(default);
        } else if schema.field_id_to_name_map().len() > most {
            for field in schema.as_struct().fields().iter().take(most) {
                let name = &field.name;
                let below = format!("{name}.");
                let ids = schema.field_id_to_name_map().iter();
                let ids = ids.filter(|(_, other)| *other == name || other.starts_with(&below));
                of.extend(ids.map(|(id, _)| (*id, default)));
            }
            default = Mode::None;
        }
        let sorted = match default {
            Mode::None | Mode::Counts => Mode::Truncate(TRUNCATE_TO),
            other => other,
        };
        let preserving = order.fields.iter().filter(|field| field.transform.preserves_order());
        of.extend(preserving.map(|field| (field.source_id, sorted)));
        for (key, text) in &facts.properties {
            if let Some(id) = key.strip_prefix(COLUMN_MODE).and_then(|name| schema.field_id_by_name(name)) {
                of.insert(id, Mode::parse(text).unwrap_or(default));
            }
        }
        Self { default, of }
    }

    fn mode(&self, id: i32) -> Mode {
        self.of.get(&id).copied().unwrap_or(self.default)
    }

    /// A builder with what the file's writer counted, as far as it is kept. Row ids are no columns of the table.
    pub fn described(&self, file: &DataFile, spec_id: i32) -> DataFileBuilder {
        let sizes = file.column_sizes().iter().filter(|(id, _)| !is_lineage_id(**id));
        let counts = |counts: &HashMap<i32, u64>| -> HashMap<i32, u64> {
            let kept = |id: &i32| !is_lineage_id(*id) && self.mode(*id) != Mode::None;
            counts.iter().filter(|(id, _)| kept(id)).map(|(id, count)| (*id, *count)).collect()
        };
        let bounds = |bounds: &HashMap<i32, Datum>, cut: fn(&Datum, usize) -> Option<Datum>| {
            let bounds = bounds.iter().filter(|(id, _)| !is_lineage_id(**id));
            let kept = bounds.filter_map(|(id, bound)| match self.mode(*id) {
                Mode::None | Mode::Counts => None,
                Mode::Truncate(length) => Some((*id, cut(bound, length)?)),
                Mode::Full => Some((*id, bound.clone())),
            });
            kept.collect::<HashMap<i32, Datum>>()
        };
        let mut builder = DataFileBuilder::default();
        builder
            .content(file.content_type())
            .file_path(file.file_path().to_owned())
            .file_format(file.file_format())
            .partition(file.partition().clone())
            .partition_spec_id(spec_id)
            .record_count(file.record_count())
            .file_size_in_bytes(file.file_size_in_bytes())
            // Java keeps sizes whatever the mode.
            .column_sizes(sizes.map(|(id, size)| (*id, *size)).collect())
            .value_counts(counts(file.value_counts()))
            .null_value_counts(counts(file.null_value_counts()))
            .nan_value_counts(counts(file.nan_value_counts()))
            .lower_bounds(bounds(file.lower_bounds(), lower))
            .upper_bounds(bounds(file.upper_bounds(), upper))
            .split_offsets(file.split_offsets().map(<[i64]>::to_vec));
        builder
    }
}

/// The bound itself, or a prefix of it.
fn lower(bound: &Datum, length: usize) -> Option<Datum> {
    match (bound.literal(), bound.data_type()) {
        (PrimitiveLiteral::String(text), _) => Some(Datum::string(prefix(text, length))),
        (PrimitiveLiteral::Binary(bytes), PrimitiveType::Binary) => {
            Some(Datum::binary(bytes.iter().take(length).copied()))
        }
        // A cut value of a fixed length is no value of its type.
        (PrimitiveLiteral::Binary(bytes), _) => (bytes.len() <= length).then(|| bound.clone()),
        _ => Some(bound.clone()),
    }
}

/// The bound itself, or the smallest value of at most this length that is above all with its prefix.
fn upper(bound: &Datum, length: usize) -> Option<Datum> {
    match (bound.literal(), bound.data_type()) {
        (PrimitiveLiteral::String(text), _) => {
            let cut = prefix(text, length);
            if cut.len() == text.len() {
                return Some(bound.clone());
            }
            counted_up(cut).map(Datum::string)
        }
        (PrimitiveLiteral::Binary(bytes), PrimitiveType::Binary) if bytes.len() > length => {
            let mut cut: Vec<u8> = bytes.iter().take(length).copied().collect();
            while cut.last() == Some(&u8::MAX) {
                cut.pop();
            }
            let last = cut.last_mut()?;
            *last += 1;
            Some(Datum::binary(cut))
        }
        (PrimitiveLiteral::Binary(bytes), _) => (bytes.len() <= length).then(|| bound.clone()),
        _ => Some(bound.clone()),
    }
}

/// The first `length` characters.
fn prefix(text: &str, length: usize) -> &str {
    let end = text.char_indices().nth(length).map_or(text.len(), |(at, _)| at);
    text.get(..end).unwrap_or(text)
}

/// The text with its last character that has a successor replaced by it, and nothing behind. The successor of the
/// last one below the surrogates is the first above them.
fn counted_up(text: &str) -> Option<String> {
    const ABOVE_SURROGATES: char = '\u{E000}';
    let mut characters: Vec<char> = text.chars().collect();
    while let Some(last) = characters.pop() {
        let next = match last {
            '\u{D7FF}' => Some(ABOVE_SURROGATES),
            other => u32::from(other).checked_add(1).and_then(char::from_u32),
        };
        if let Some(next) = next {
            characters.push(next);
            return Some(characters.into_iter().collect());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_java_writes_them() {
        let modes = ["none", "Counts", "truncate(7)", "truncate( 3 )", "full"].map(Mode::parse);
        let expected = [Mode::None, Mode::Counts, Mode::Truncate(7), Mode::Truncate(3), Mode::Full].map(Some);
        assert_eq!(modes, expected);
        assert_eq!(["truncate(0)", "truncate", "all"].map(Mode::parse), [None, None, None]);
    }

    #[test]
    fn a_cut_bound_is_a_bound() {
        let of = Datum::string("grüße");
        assert_eq!((lower(&of, 3), upper(&of, 3)), (Some(Datum::string("grü")), Some(Datum::string("grý"))));
        assert_eq!((lower(&of, 5), upper(&of, 5)), (Some(of.clone()), Some(of)));
        // The last character has no successor, or one beyond a gap.
        assert_eq!(upper(&Datum::string("a\u{10FFFF}b"), 2), Some(Datum::string("b")));
        assert_eq!(upper(&Datum::string("\u{10FFFF}b"), 1), None);
        assert_eq!(upper(&Datum::string("\u{D7FF}b"), 1), Some(Datum::string("\u{E000}")));
        let of = Datum::binary([1, 255, 255, 3]);
        assert_eq!((lower(&of, 2), upper(&of, 3)), (Some(Datum::binary([1, 255])), Some(Datum::binary([2]))));
        assert_eq!(upper(&Datum::binary([255, 255]), 1), None);
        assert_eq!(lower(&Datum::fixed([1, 2, 3]), 2), None);
        assert_eq!(upper(&Datum::long(12_345), 1), Some(Datum::long(12_345)));
    }
}
