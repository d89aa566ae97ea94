//! Equality-delete files (table spec, "Equality Delete Files"): a row is deleted when its values in the
//! compared columns are those of a newer delete row.
//!
//! Values are compared as Java does (`StructLikeSet`): null equals null, not-a-number equals itself whatever
//! its bits, minus zero is not zero. They are kept in Arrow's row format, in which two values of a type have
//! the same bytes only when they are equal, one beside the other in one piece of memory.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use datafusion::arrow::array::{ArrayRef, AsArray};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::{DataType, Float32Type, Float64Type};
use datafusion::arrow::error::ArrowError;
use datafusion::arrow::row::{RowConverter, SortField};
use hashbrown::HashTable;
use iceberg::spec::DataFileFormat;

use super::super::error::TableError;
use super::file_columns::{Columns, Wanted, as_many_rows};

/// Keys of delete files that reach one partition by the same columns, in bytes of memory.
pub const MAX_KEYS_BYTES: usize = 256 * 1024 * 1024;
/// Memory of a key beside its values: where they end, the sequence number, and its share of the hash table.
const KEY_BYTES: usize = 24;

/// A compared column as rows are read: its field id and type.
#[derive(Clone, Debug)]
pub(super) struct KeyColumn {
    pub id: i32,
    pub data_type: DataType,
}

/// Deleted values with the newest sequence number that deletes them.
#[derive(Debug)]
pub struct KeySet {
    converter: RowConverter,
    columns: Vec<KeyColumn>,
    hasher: RandomState,
    table: HashTable<u32>,
    /// Values of all keys, one after the other.
    values: Vec<u8>,
    /// Where the values of each key end.
    ends: Vec<u32>,
    newest: Vec<i64>,
    max_bytes: usize,
}

impl KeySet {
    pub(super) fn new(columns: Vec<KeyColumn>, max_bytes: usize) -> Result<Self, TableError> {
        if let Some(nested) = columns.iter().find(|column| column.data_type.is_nested()) {
            return Err(TableError::Unsupported(format!(
                "equality deletes compare the column with field id {}, which is no single value",
                nested.id
            )));
        }
        let fields = columns.iter().map(|column| SortField::new(column.data_type.clone())).collect();
        let converter = RowConverter::new(fields)
            .map_err(|e| TableError::Unsupported(format!("equality deletes cannot be compared: {e}")))?;
        Ok(Self {
            converter,
            columns,
            hasher: RandomState::new(),
            table: HashTable::new(),
            values: Vec::new(),
            ends: Vec::new(),
            newest: Vec::new(),
            max_bytes,
        })
    }

    /// Number of different keys.
    pub fn len(&self) -> usize {
        self.newest.len()
    }

    /// Estimated memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.values.len() + self.len() * KEY_BYTES
    }

    /// Takes over the keys of one delete file; as many rows as its manifest entry says, or an error.
    pub(super) fn add_file(
        &mut self,
        path: &str,
        bytes: Bytes,
        format: DataFileFormat,
        expected_rows: u64,
        sequence_number: i64,
    ) -> Result<(), TableError> {
        let corrupt = |message: String| TableError::corrupt(path, message);
        let wanted: Vec<Wanted<'_>> =
            self.columns.iter().map(|column| Wanted { id: column.id, name: None }).collect();
        let mut rows = 0;
        for columns in Columns::open(bytes, format, &wanted).map_err(|fault| fault.of(path))? {
            let columns = columns.map_err(|fault| fault.of(path))?;
            rows += columns.first().map_or(0, |column| column.len() as u64);
            if rows > expected_rows {
                break;
            }
            let mut typed = Vec::with_capacity(columns.len());
            for (values, column) in columns.iter().zip(&self.columns) {
                typed.push(promoted(values, column).map_err(corrupt)?);
            }
            self.add(&typed, sequence_number).map_err(|e| corrupt(e.to_string()))?;
            if self.bytes() > self.max_bytes {
                return Err(TableError::Unsupported(format!(
                    "the equality deletes of one partition have more than {} bytes of keys ({path} is among \
                     them); compact the partition",
                    self.max_bytes
                )));
            }
        }
        as_many_rows(rows, expected_rows).map_err(corrupt)
    }

    fn add(&mut self, columns: &[ArrayRef], sequence_number: i64) -> Result<(), ArrowError> {
        let rows = self.converter.convert_columns(&canonical(columns))?;
        for row in &rows {
            let values = row.data();
            let hash = self.hasher.hash_one(values);
            if let Some(at) = self.find(hash, values) {
                self.newest[at] = self.newest[at].max(sequence_number);
                continue;
            }
            let (Ok(at), Ok(end)) =
                (u32::try_from(self.newest.len()), u32::try_from(self.values.len() + values.len()))
            else {
                return Err(ArrowError::MemoryError("too many keys".to_owned()));
            };
            self.values.extend_from_slice(values);
            self.ends.push(end);
            self.newest.push(sequence_number);
            let Self { table, values, ends, hasher, .. } = self;
            table.insert_unique(hash, at, |other| hasher.hash_one(key_at(values, ends, *other as usize)));
        }
        Ok(())
    }

    /// Marks the rows of a data file with `data_sequence` that are deleted. `columns` are the compared ones,
    /// in the order of their field ids and in the types that this set was made with.
    pub(super) fn mark(
        &self,
        columns: &[ArrayRef],
        data_sequence: i64,
        deleted: &mut [bool],
    ) -> Result<(), ArrowError> {
        let rows = self.converter.convert_columns(&canonical(columns))?;
        for (row, deleted) in rows.iter().zip(deleted) {
            if !*deleted && let Some(at) = self.find(self.hasher.hash_one(row.data()), row.data()) {
                *deleted = self.newest[at] > data_sequence;
            }
        }
        Ok(())
    }

    fn find(&self, hash: u64, values: &[u8]) -> Option<usize> {
        let is_it = |at: &u32| key_at(&self.values, &self.ends, *at as usize) == values;
        self.table.find(hash, is_it).map(|at| *at as usize)
    }
}

fn key_at<'a>(values: &'a [u8], ends: &[u32], at: usize) -> &'a [u8] {
    let start = if at == 0 { 0 } else { ends[at - 1] as usize };
    &values[start..ends[at] as usize]
}

/// Every not-a-number as the same bits.
fn canonical(columns: &[ArrayRef]) -> Vec<ArrayRef> {
    columns
        .iter()
        .map(|column| -> ArrayRef {
            if let Some(values) = column.as_primitive_opt::<Float64Type>() {
                return Arc::new(values.unary::<_, Float64Type>(|v| if v.is_nan() { f64::NAN } else { v }));
            }
            if let Some(values) = column.as_primitive_opt::<Float32Type>() {
                return Arc::new(values.unary::<_, Float32Type>(|v| if v.is_nan() { f32::NAN } else { v }));
            }
            Arc::clone(column)
        })
        .collect()
}

/// The values in the type that rows are read in. Only changes of type that the table format allows (table
/// spec, "Schema Evolution"), and other spellings of one type.
fn promoted(values: &ArrayRef, column: &KeyColumn) -> Result<ArrayRef, String> {
    let (from, to) = (values.data_type(), &column.data_type);
    if from == to {
        return Ok(Arc::clone(values));
    }
    if !may_become(from, to) {
        return Err(format!("its column with field id {} is {from}, the table's is {to}", column.id));
    }
    let strict = CastOptions { safe: false, ..CastOptions::default() };
    cast_with_options(values, to, &strict).map_err(|e| e.to_string())
}

fn may_become(from: &DataType, to: &DataType) -> bool {
    use DataType::{
        Binary, BinaryView, Date32, Decimal128, FixedSizeBinary, Float32, Float64, Int8, Int16, Int32, Int64,
        LargeBinary, LargeUtf8, Time64, Timestamp, Utf8, Utf8View,
    };
    match (from, to) {
        (Int8 | Int16 | Int32, Int32 | Int64) | (Float32, Float64) => true,
        (Decimal128(from, one), Decimal128(to, other)) => one == other && to >= from,
        (Utf8 | LargeUtf8 | Utf8View, Utf8 | LargeUtf8 | Utf8View) => true,
        (
            Binary | LargeBinary | BinaryView | FixedSizeBinary(_),
            Binary | LargeBinary | BinaryView | FixedSizeBinary(_),
        ) => true,
        (Date32, Timestamp(_, None)) => true,
        (Timestamp(_, from), Timestamp(_, to)) => from.is_some() == to.is_some(),
        (DataType::Time32(_) | Time64(_), Time64(_)) => true,
        _ => false,
    }
}

#[cfg(test)]
#[path = "equality_tests.rs"]
mod tests;
