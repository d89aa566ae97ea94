//! Files in the table's sort order, whatever the memory and the number of partitions.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Float64Array, Int64Array, RecordBatch, StringArray, StructArray,
    TimestampMicrosecondArray,
};
use datafusion::arrow::compute::concat_batches;
use datafusion::arrow::datatypes::{DataType, Field, Fields, Int64Type, Schema as ArrowSchema};
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use iceberg::spec::{
    FormatVersion, NestedField, NullOrder, PrimitiveType, Schema, SortDirection, SortField, SortOrder,
    StructType, Transform, Type, UnboundPartitionSpec,
};
use iceberg::transform::create_transform_function;

use super::super::writer_test_support::{TestTable, table_of};
use super::*;
use crate::validate::Engine;

/// More than any of these tests needs.
const ROOM: usize = 256 * 1024 * 1024;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % most
    }
}

fn resources(bytes: usize) -> (Engine, WriteResources) {
    let engine = Engine::with_bounds(2, bytes).unwrap();
    let task = engine.session().task_ctx();
    (engine, WriteResources { task, lanes: 2 })
}

async fn write(table: &LoadedTable, batches: Vec<RecordBatch>, memory: usize) -> Vec<NewDataFile> {
    let (_engine, resources) = resources(memory);
    let batches = stream::iter(batches.into_iter().map(Ok::<_, std::convert::Infallible>));
    let schema_id = table.facts.current_schema_id;
    DataFileWriter::write_ordered(table, schema_id, batches, &resources).await.unwrap()
}

fn rows_of(file: &NewDataFile) -> RecordBatch {
    let reader = std::fs::File::open(&*file.fact.path).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(reader).unwrap().build().unwrap();
    let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
    concat_batches(&batches[0].schema(), &batches).unwrap()
}

fn field(source_id: i32, transform: Transform, direction: SortDirection, null_order: NullOrder) -> SortField {
    SortField { source_id, transform, direction, null_order }
}

fn sorted(test: &mut TestTable, fields: Vec<SortField>) {
    let order = SortOrder::builder().with_order_id(1).with_fields(fields).build_unbound().unwrap();
    let builder = test.builder().add_sort_order(order).unwrap().set_default_sort_order(-1).unwrap();
    test.rebuild(builder, std::collections::BTreeMap::new());
}

fn batch(ids: Vec<i64>, carriers: Vec<Option<&str>>, rates: Vec<Option<f64>>) -> RecordBatch {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("id", Arc::new(Int64Array::from(ids))),
        ("carrier", Arc::new(StringArray::from(carriers))),
        ("rate", Arc::new(Float64Array::from(rates))),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, array)| (name, array, true)))
        .unwrap()
}

fn ids(rows: &RecordBatch) -> Vec<i64> {
    rows.column_by_name("id").unwrap().as_primitive::<Int64Type>().values().to_vec()
}

#[tokio::test]
async fn rows_are_sorted_within_their_partition_and_the_file_says_so() {
    let mut test = TestTable::new();
    let descending = field(3, Transform::Identity, SortDirection::Descending, NullOrder::Last);
    let ascending = field(1, Transform::Identity, SortDirection::Ascending, NullOrder::First);
    sorted(&mut test, vec![descending, ascending]);
    let one = batch(
        vec![5, 4, 3, 2, 1],
        vec![Some("UA"), Some("AA"), Some("UA"), None, Some("UA")],
        vec![Some(1.0), Some(7.0), None, Some(0.0), Some(2.0)],
    );
    let other = batch(vec![9, 8], vec![Some("UA"), Some("AA")], vec![Some(2.0), Some(7.5)]);
    let files = write(&test.table, vec![one, other], ROOM).await;
    let shown: Vec<(String, Vec<i64>)> =
        files.iter().map(|file| (file.fact.partition.to_string(), ids(&rows_of(file)))).collect();
    let expected = [
        ("carrier=AA".to_owned(), vec![8, 4]),
        ("carrier=UA".to_owned(), vec![1, 9, 5, 3]),
        ("carrier=null".to_owned(), vec![2]),
    ];
    assert_eq!(shown, expected);
    assert!(files.iter().all(|file| file.file.sort_order_id() == Some(1)));
}

/// Table spec, "Sorting": `-NaN < -Infinity < -value < -0 < 0 < value < Infinity < NaN`.
#[tokio::test]
async fn floats_are_in_the_specs_order() {
    let values = [f64::NAN, 0.0, -f64::NAN, 1.5, f64::NEG_INFINITY, -0.0, f64::INFINITY, -1.5];
    let rates: Vec<Option<f64>> = values.iter().map(|value| Some(*value)).chain([None]).collect();
    for (direction, null_order, expected) in [
        (SortDirection::Ascending, NullOrder::First, [8, 2, 4, 7, 5, 1, 3, 6, 0]),
        (SortDirection::Ascending, NullOrder::Last, [2, 4, 7, 5, 1, 3, 6, 0, 8]),
        (SortDirection::Descending, NullOrder::First, [8, 0, 6, 3, 1, 5, 7, 4, 2]),
        (SortDirection::Descending, NullOrder::Last, [0, 6, 3, 1, 5, 7, 4, 2, 8]),
    ] {
        let mut test = TestTable::with(&[], FormatVersion::V2, &[]);
        sorted(&mut test, vec![field(3, Transform::Identity, direction, null_order)]);
        let rows = batch((0..9).collect(), vec![Some("x"); 9], rates.clone());
        let files = write(&test.table, vec![rows], ROOM).await;
        assert_eq!(ids(&rows_of(&files[0])), expected, "{direction} {null_order}");
    }
}

/// Each transform of the spec over each type that it takes in the sort orders that engines write.
#[tokio::test]
async fn every_transform_orders_rows() {
    use PrimitiveType::{Long, String as Text, Timestamp};
    let optional = |id, name: &str, of| NestedField::optional(id, name, Type::Primitive(of)).into();
    let inner = StructType::new(vec![optional(5, "code", Text)]);
    let schema = Schema::builder()
        .with_fields(vec![
            optional(1, "id", Long),
            optional(2, "name", Text),
            optional(3, "at", Timestamp),
            NestedField::optional(4, "place", Type::Struct(inner)).into(),
        ])
        .build()
        .unwrap();
    let rows = random_rows(3_000);
    for (source, transform) in [
        (1, Transform::Bucket(7)),
        (1, Transform::Truncate(10)),
        (2, Transform::Identity),
        (2, Transform::Truncate(2)),
        (2, Transform::Bucket(5)),
        (3, Transform::Identity),
        (3, Transform::Year),
        (3, Transform::Month),
        (3, Transform::Day),
        (3, Transform::Hour),
        (3, Transform::Bucket(3)),
        (5, Transform::Identity),
        (5, Transform::Truncate(1)),
    ] {
        let order = SortOrder::builder()
            .with_order_id(1)
            .with_sort_field(field(source, transform, SortDirection::Ascending, NullOrder::First))
            .build_unbound()
            .unwrap();
        let (_folder, table) = table_of(schema.clone(), UnboundPartitionSpec::default(), order);
        let files = write(&table, rows.clone(), ROOM).await;
        assert_eq!(files.len(), 1);
        assert_eq!(files[0].file.sort_order_id(), Some(1), "{source} {transform}");
        let written = rows_of(&files[0]);
        let all: usize = rows.iter().map(RecordBatch::num_rows).sum();
        assert_eq!(written.num_rows(), all);
        let values = match source {
            5 => written.column_by_name("place").unwrap().as_struct().column(0).clone(),
            at => written.columns()[usize::try_from(at - 1).unwrap()].clone(),
        };
        let keys = create_transform_function(&transform).unwrap().transform(values).unwrap();
        let options = datafusion::arrow::compute::SortOptions::new(false, true);
        let in_order = datafusion::arrow::compute::sort(&keys, Some(options)).unwrap();
        assert_eq!(&keys, &in_order, "{source} {transform}");
        assert!(keys.null_count() > 0, "nulls are among them");
    }
}

fn random_rows(count: usize) -> Vec<RecordBatch> {
    let mut random = Random(11);
    let mut batches = Vec::new();
    for _ in 0..count / 1_000 {
        let rows = 1_000;
        let mut maybe =
            |most: u64| (random.below(10) > 0).then(|| i64::try_from(random.below(most)).unwrap());
        let numbers: Vec<Option<i64>> = (0..rows).map(|_| maybe(100_000)).collect();
        let texts = |most, maybe: &mut dyn FnMut(u64) -> Option<i64>| -> StringArray {
            (0..rows).map(|_| maybe(most).map(|n| format!("{:x}", n * 7_919))).collect()
        };
        let names = texts(5_000, &mut maybe);
        // Two years of seconds.
        let times: Vec<Option<i64>> = (0..rows).map(|_| maybe(63_072_000).map(|s| s * 1_000_000)).collect();
        let codes: ArrayRef = Arc::new(texts(90, &mut maybe));
        let fields = Fields::from(vec![Field::new("code", DataType::Utf8, true)]);
        let there = (0..rows).map(|at| at % 17 != 0).collect::<Vec<bool>>();
        let places = StructArray::new(fields, vec![codes], Some(there.into()));
        let columns: Vec<(&str, ArrayRef)> = vec![
            ("id", Arc::new(Int64Array::from(numbers))),
            ("name", Arc::new(names)),
            ("at", Arc::new(TimestampMicrosecondArray::from(times))),
            ("place", Arc::new(places)),
        ];
        let fields: Vec<Field> =
            columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
        let arrays = columns.into_iter().map(|(_, array)| array).collect();
        batches.push(RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), arrays).unwrap());
    }
    batches
}

/// 200,000 rows of some 100 bytes through 4 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_into_memory_is_sorted_on_disk() {
    let mut test = TestTable::with(&[], FormatVersion::V2, &[]);
    sorted(&mut test, vec![field(1, Transform::Identity, SortDirection::Ascending, NullOrder::First)]);
    let mut random = Random(5);
    let filling = "x".repeat(80);
    let batches = (0..50)
        .map(|_| {
            let ids = (0..4_000).map(|_| i64::try_from(random.below(1 << 40)).unwrap()).collect();
            batch(ids, vec![Some(filling.as_str()); 4_000], vec![None; 4_000])
        })
        .collect();
    let files = write(&test.table, batches, 4 * 1024 * 1024).await;
    let written: Vec<i64> = files.iter().flat_map(|file| ids(&rows_of(file))).collect();
    assert_eq!(written.len(), 200_000);
    assert!(written.is_sorted());
}

/// Every batch has rows of all of 400 partitions, four times as many as files may be open.
#[tokio::test(flavor = "multi_thread")]
async fn there_is_one_file_a_partition_however_many_there_are() {
    for order in [None, Some(field(1, Transform::Identity, SortDirection::Descending, NullOrder::Last))] {
        let mut test = TestTable::with(&[], FormatVersion::V2, &[("id", Transform::Truncate(1_000))]);
        if let Some(order) = order.clone() {
            sorted(&mut test, vec![order]);
        }
        let batches = (0..10)
            .map(|turn| {
                batch((0..400).map(|day| day * 1_000 + turn).collect(), vec![Some("x"); 400], vec![None; 400])
            })
            .collect();
        let files = write(&test.table, batches, 16 * 1024 * 1024).await;
        assert_eq!(files.len(), 400, "{order:?}");
        for file in &files {
            let (mut rows, day) = (ids(&rows_of(file)), &file.fact.partition.fields[0].value);
            let first: i64 = day.as_deref().unwrap().parse().unwrap();
            if order.is_none() {
                rows.sort_unstable();
                rows.reverse();
            }
            assert_eq!(rows, (0..10).rev().map(|turn| first + turn).collect::<Vec<i64>>());
            assert_eq!(file.file.sort_order_id(), order.as_ref().map(|_| 1));
        }
    }
}

#[tokio::test]
async fn without_a_sort_order_rows_keep_theirs() {
    let test = TestTable::new();
    let rows = batch(
        vec![5, 1, 4, 2, 3],
        vec![Some("UA"), Some("AA"), Some("UA"), Some("AA"), Some("UA")],
        vec![None; 5],
    );
    let files = write(&test.table, vec![rows], ROOM).await;
    let shown: Vec<Vec<i64>> = files.iter().map(|file| ids(&rows_of(file))).collect();
    assert_eq!(shown, [vec![1, 2], vec![5, 4, 3]]);
    assert!(files.iter().all(|file| file.file.sort_order_id().is_none()));
}

/// Rows of one partition, by zero and by minus zero, are not in one order.
#[tokio::test]
async fn partitions_by_floats_are_not_called_sorted() {
    let mut test = TestTable::with(&[], FormatVersion::V2, &[("rate", Transform::Identity)]);
    sorted(&mut test, vec![field(1, Transform::Identity, SortDirection::Ascending, NullOrder::First)]);
    let rows = batch(vec![2, 1, 4, 3], vec![None; 4], vec![Some(0.0), Some(-0.0), Some(-0.0), Some(0.0)]);
    let files = write(&test.table, vec![rows], ROOM).await;
    let mut all: Vec<i64> = files.iter().flat_map(|file| ids(&rows_of(file))).collect();
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3, 4]);
    assert!(files.iter().all(|file| file.file.sort_order_id().is_none()));
}

#[derive(Debug, thiserror::Error)]
#[error("the source is gone")]
struct Gone;

#[tokio::test]
async fn a_producers_error_comes_back_as_it_was_and_leaves_no_file() {
    for sort in [false, true] {
        let mut test = TestTable::new();
        if sort {
            sorted(
                &mut test,
                vec![field(1, Transform::Identity, SortDirection::Ascending, NullOrder::First)],
            );
        }
        let rows = batch(vec![1, 2], vec![Some("UA"), Some("AA")], vec![None; 2]);
        let (_engine, resources) = resources(ROOM);
        let schema_id = test.table.facts.current_schema_id;
        let batches = stream::iter([Ok(rows), Err(Gone)]);
        let failed = DataFileWriter::write_ordered(&test.table, schema_id, batches, &resources).await;
        let TableError::Producer(error) = failed.unwrap_err() else { panic!("another error") };
        assert!(error.downcast_ref::<Gone>().is_some(), "{error}");
        let data = test.dir.path().join("flights/data");
        let left = |folder: &std::path::Path| std::fs::read_dir(folder).map_or(0, |files| files.count());
        let folders =
            std::fs::read_dir(&data).map_or(Vec::new(), |all| all.map(|e| e.unwrap().path()).collect());
        assert_eq!(folders.iter().map(|folder| left(folder)).sum::<usize>(), 0);
    }
}
