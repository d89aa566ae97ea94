//! Rows that another library wrote are read back, whatever they are.

use std::sync::Arc;

use arrow_avro::compression::CompressionCodec;
use arrow_avro::writer::WriterBuilder;
use arrow_avro::writer::format::AvroOcfFormat;
use bytes::Bytes;
use datafusion::arrow::array::{
    ArrayRef, AsArray, BooleanArray, Float64Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::datatypes::{DataType, Field, Int64Type, Schema};
use iceberg::spec::DataFileFormat;
use proptest::prelude::*;

use super::super::fault::Fault;
use super::super::test_files::{engine_files, read, read_whole};

type Row = (Option<i64>, Option<String>, Option<bool>, f64, Option<Vec<Option<i64>>>);

fn batch(rows: &[Row]) -> RecordBatch {
    let longs: ArrayRef = Arc::new(rows.iter().map(|row| row.0).collect::<Int64Array>());
    let texts: ArrayRef = Arc::new(rows.iter().map(|row| row.1.clone()).collect::<StringArray>());
    let flags: ArrayRef = Arc::new(rows.iter().map(|row| row.2).collect::<BooleanArray>());
    let numbers: ArrayRef = Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.3)));
    let lists: ArrayRef =
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows.iter().map(|row| row.4.clone())));
    let inside = vec![
        (Arc::new(Field::new("flag", DataType::Boolean, true)), flags),
        (Arc::new(Field::new("number", DataType::Float64, true)), numbers),
    ];
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("long", longs),
        ("text", texts),
        ("both", Arc::new(StructArray::from(inside))),
        ("list", lists),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
        .unwrap()
}

fn written(batches: &[RecordBatch], codec: Option<CompressionCodec>) -> Bytes {
    let schema: &Schema = &batches[0].schema();
    let builder = WriterBuilder::new(schema.clone()).with_compression(codec);
    let mut writer = builder.build::<_, AvroOcfFormat>(Vec::new()).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.finish().unwrap();
    writer.into_inner().into()
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let list = proptest::option::of(proptest::collection::vec(proptest::option::of(any::<i64>()), 0..4));
    let text = proptest::option::of(".{0,12}");
    let row =
        (proptest::option::of(any::<i64>()), text, proptest::option::of(any::<bool>()), -1e9..1e9, list);
    proptest::collection::vec(row, 1..40)
}

proptest! {
    #[test]
    fn what_another_library_writes_is_read(
        blocks in proptest::collection::vec(rows(), 1..4),
        codec in 0..4_usize,
        batch_rows in 1..50_usize,
    ) {
        let codecs =
            [None, Some(CompressionCodec::Deflate), Some(CompressionCodec::Snappy), Some(CompressionCodec::ZStandard)];
        let batches: Vec<RecordBatch> = blocks.iter().map(|rows| batch(rows)).collect();
        let file = written(&batches, codecs[codec]);
        let wanted = concat_batches(&batches[0].schema(), &batches).unwrap();
        let found = read_whole(&file, DataFileFormat::Avro, batch_rows).unwrap();
        prop_assert_eq!(found.num_rows(), wanted.num_rows());
        for (found, wanted) in found.columns().iter().zip(wanted.columns()) {
            let same = datafusion::arrow::compute::cast(found, wanted.data_type()).unwrap();
            prop_assert_eq!(same.as_ref(), wanted.as_ref());
        }
    }
}

#[test]
fn a_count_or_a_marker_that_is_wrong_is_told() {
    let rows: Vec<Row> = (0..3).map(|at| (Some(at), None, None, 0.5, None)).collect();
    let file = written(&[batch(&rows)], None);
    assert_eq!(read(&file, DataFileFormat::Avro, 10).unwrap()[0].num_rows(), 3);
    // The block: a count, a size, rows, the marker of 16 bytes that the header ends with.
    let marker = &file[file.len() - 16..];
    let block = file.windows(16).position(|bytes| bytes == marker).unwrap() + 16;
    assert_eq!(file[block], 6);
    for (at, value) in [(block, 4), (block, 8), (file.len() - 1, file[file.len() - 1] ^ 1), (block + 1, 0x80)]
    {
        let mut damaged = file.to_vec();
        damaged[at] = value;
        let read = read(&damaged.into(), DataFileFormat::Avro, 10);
        assert!(matches!(read, Err(Fault::Corrupt(_))), "{at} = {value}: {read:?}");
    }
    // A size of 2^61 bytes is not made room for.
    let mut damaged = file[..block].to_vec();
    damaged.extend([0x02, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x40]);
    assert!(matches!(read(&damaged.into(), DataFileFormat::Avro, 10), Err(Fault::Unsupported(_))));
}

#[test]
fn a_codec_that_is_not_read_is_named_with_what_to_do() {
    let mut file = engine_files("avro-delete-mor-v2").remove(0).bytes.to_vec();
    let at = file.windows(7).position(|bytes| bytes == b"deflate").unwrap();
    file[at..at + 7].copy_from_slice(b"bzip2zz");
    let Err(Fault::Unsupported(message)) = read(&file.into(), DataFileFormat::Avro, 10) else {
        panic!("it was read")
    };
    assert!(message.contains("bzip2zz") && message.contains("write.avro.compression-codec"), "{message}");
}

#[test]
fn only_the_wanted_columns_are_given() {
    let rows: Vec<Row> =
        (0..5).map(|at| (Some(at), Some("x".into()), None, 0.5, Some(vec![Some(at)]))).collect();
    let file =
        super::super::memory::MemoryFile::open(written(&[batch(&rows)], None), DataFileFormat::Avro).unwrap();
    let batches: Vec<RecordBatch> = file.select(vec![3], 2).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(batches.iter().map(RecordBatch::num_rows).collect::<Vec<_>>(), [2, 2, 1]);
    assert!(batches.iter().all(|batch| batch.num_columns() == 1));
    let second: &ListArray = batches[1].column(0).as_list();
    assert_eq!(second.value(0).as_primitive::<Int64Type>().value(0), 2);
}
