//! Rows that another library wrote are read back, whatever they are, and tails that lie are told.

use std::sync::Arc;

use bytes::Bytes;
use datafusion::arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, Float32Array, Float64Array, Int8Array, Int16Array, Int32Array,
    Int64Array, RecordBatch, StringArray,
};
use datafusion::arrow::compute::concat_batches;
use iceberg::spec::DataFileFormat;
use proptest::prelude::*;

use super::super::fault::Fault;
use super::super::memory::MemoryFile;
use super::super::test_files::{engine_files, read, read_whole};

#[derive(Clone, Debug)]
struct Row {
    long: Option<i64>,
    int: Option<i32>,
    short: i16,
    byte: Option<i8>,
    flag: Option<bool>,
    text: Option<String>,
    bytes: Vec<u8>,
    real: Option<f64>,
}

fn batch(rows: &[Row]) -> RecordBatch {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("long", Arc::new(rows.iter().map(|row| row.long).collect::<Int64Array>())),
        ("int", Arc::new(rows.iter().map(|row| row.int).collect::<Int32Array>())),
        ("short", Arc::new(Int16Array::from_iter_values(rows.iter().map(|row| row.short)))),
        ("byte", Arc::new(rows.iter().map(|row| row.byte).collect::<Int8Array>())),
        ("flag", Arc::new(rows.iter().map(|row| row.flag).collect::<BooleanArray>())),
        ("text", Arc::new(rows.iter().map(|row| row.text.clone()).collect::<StringArray>())),
        ("bytes", Arc::new(BinaryArray::from_iter_values(rows.iter().map(|row| &row.bytes)))),
        ("real", Arc::new(rows.iter().map(|row| row.real).collect::<Float64Array>())),
        (
            "small",
            Arc::new(rows.iter().map(|row| row.real.map(|real| real as f32)).collect::<Float32Array>()),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
        .unwrap()
}

fn written(batches: &[RecordBatch], stripe_bytes: usize) -> Bytes {
    let mut bytes = Vec::new();
    let mut writer = orc_rust::ArrowWriterBuilder::new(&mut bytes, batches[0].schema())
        .with_stripe_byte_size(stripe_bytes)
        .try_build()
        .unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.close().unwrap();
    bytes.into()
}

/// The other writer does not write runs in which the largest numbers of 64 bits stand out.
fn large() -> impl Strategy<Value = i64> {
    any::<i64>().prop_map(|number| number >> 16)
}

/// Numbers in runs of all kinds: equal, rising, small with some large ones, and any.
fn numbers() -> impl Strategy<Value = Vec<i64>> {
    let kinds = prop_oneof![
        (large(), 1..30_usize).prop_map(|(value, times)| vec![value; times]),
        (-1_000_000_i64..1_000_000, -500_i64..500, 1..40_i64)
            .prop_map(|(first, step, times)| (0..times).map(|at| first + at * step).collect()),
        proptest::collection::vec(
            prop_oneof![9 => 0..100_i64, 1 => any::<i32>().prop_map(i64::from)],
            20..80
        ),
        proptest::collection::vec(large(), 1..30),
    ];
    proptest::collection::vec(kinds, 1..6).prop_map(|runs| runs.concat())
}

/// Of a row: its text, which of the others are there, and its bytes.
type More = (Option<String>, [bool; 4], Vec<u8>);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let more =
        (proptest::option::of(".{0,8}"), any::<[bool; 4]>(), proptest::collection::vec(any::<u8>(), 0..5));
    numbers().prop_flat_map(move |numbers| {
        let count = numbers.len();
        (Just(numbers), proptest::collection::vec(more.clone(), count)).prop_map(|(numbers, more)| {
            let row = |(long, (text, there, bytes)): (i64, More)| Row {
                long: there[0].then_some(long),
                // The other writer gives the largest numbers of narrow types more bits than they have.
                int: there[1].then_some(long as i32 >> 2),
                short: long as i16 >> 2,
                byte: there[2].then_some(long as i8),
                flag: there[3].then_some(long % 3 == 0),
                text,
                bytes,
                real: there[1].then_some(long as f64 / 3.0),
            };
            numbers.into_iter().zip(more).map(row).collect()
        })
    })
}

proptest! {
    #[test]
    fn what_another_library_writes_is_read(
        parts in proptest::collection::vec(rows(), 1..4),
        stripe_bytes in 200..20_000_usize,
        batch_rows in 1..600_usize,
    ) {
        let batches: Vec<RecordBatch> = parts.iter().map(|rows| batch(rows)).collect();
        let file = written(&batches, stripe_bytes);
        let wanted = concat_batches(&batches[0].schema(), &batches).unwrap();
        let found = read_whole(&file, DataFileFormat::Orc, batch_rows).unwrap();
        prop_assert_eq!(found.num_rows(), wanted.num_rows());
        for (found, wanted) in found.columns().iter().zip(wanted.columns()) {
            prop_assert_eq!(found.as_ref(), wanted.as_ref());
        }
    }
}

#[test]
fn what_is_no_orc_file_is_told() {
    for bytes in [&b""[..], b"ORC", b"no such file at all", b"\x08\x05\x82\xf4\x03\x03ORC\x08"] {
        let read = read(&Bytes::from_static(bytes), DataFileFormat::Orc, 10);
        assert!(matches!(read, Err(Fault::Corrupt(_))), "{bytes:?}: {read:?}");
    }
}

/// A list of two billion items whose bytes are three: no room is made for what is not there.
#[test]
fn lengths_that_lie_cost_nothing() {
    let whole = engine_files("orc-types").remove(0).bytes.to_vec();
    let mut told = 0;
    for at in 0..whole.len().saturating_sub(9) {
        let mut damaged = whole.clone();
        // A run of direct numbers of 64 bits, each as large as can be.
        damaged[at..at + 9].copy_from_slice(&[0x7e, 0x01, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        told += usize::from(read(&damaged.into(), DataFileFormat::Orc, 100).is_err());
    }
    assert!(told > 100, "{told}");
}

#[test]
fn only_the_wanted_columns_are_given() {
    let file = engine_files("orc-many-rows").into_iter().max_by_key(|file| file.bytes.len()).unwrap();
    let opened = MemoryFile::open(file.bytes.clone(), DataFileFormat::Orc).unwrap();
    let names: Vec<String> = opened.columns().into_iter().map(|column| column.name).collect();
    let at = names.iter().position(|name| name == "note").unwrap();
    let batches: Vec<RecordBatch> = opened.select(vec![at], 1000).unwrap().collect::<Result<_, _>>().unwrap();
    assert!(batches.iter().all(|batch| batch.num_columns() == 1));
    let whole = read_whole(&file.bytes, DataFileFormat::Orc, 8192).unwrap();
    assert_eq!(batches.iter().map(RecordBatch::num_rows).sum::<usize>(), whole.num_rows());
    assert_eq!(batches[0].column(0).as_ref(), whole.column(at).slice(0, batches[0].num_rows()).as_ref());
}
