//! Files that Spark wrote, read here and by libraries that share no code with this: the same values.

use std::collections::BTreeSet;
use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch, make_array};
use datafusion::arrow::compute::{cast, concat_batches};
use datafusion::arrow::datatypes::{DataType, Decimal128Type, TimeUnit, TimestampMicrosecondType};
use datafusion::arrow::util::display::array_value_to_string;
use futures::TryStreamExt;
use iceberg::arrow::schema_to_arrow_schema;
use iceberg::io::FileIO;
use iceberg::spec::{DataFileFormat, NestedField, PrimitiveType, Schema, Type};

use super::super::column_adapter::WantedColumn;
use super::reader::FormatReader;
use super::source::Source;
use super::test_files::{EngineFile, engine_files, read_whole};

/// Rows as text, without the names of columns and whatever a library thinks of zones and widths.
fn texts(batch: &RecordBatch) -> Vec<String> {
    let value = |column: &ArrayRef, row: usize| {
        if column.is_null(row) { "null".to_owned() } else { array_value_to_string(column, row).unwrap() }
    };
    let row = |row| batch.columns().iter().map(|column| value(column, row)).collect::<Vec<_>>().join(" | ");
    (0..batch.num_rows()).map(row).collect()
}

/// Nanoseconds as the other library gives them without losing any, in microseconds; instants without their zone.
fn plain(column: &ArrayRef) -> ArrayRef {
    match column.data_type() {
        DataType::Decimal128(38, 9) => {
            let nanos = column.as_primitive::<Decimal128Type>();
            Arc::new(
                nanos.unary::<_, TimestampMicrosecondType>(|nanos| {
                    i64::try_from(nanos.div_euclid(1000)).unwrap()
                }),
            )
        }
        DataType::Timestamp(unit, Some(_)) => cast(column, &DataType::Timestamp(*unit, None)).unwrap(),
        _ => Arc::clone(column),
    }
}

/// With every column that both sides can tell alike: what has fields of its own is compared by engines' own rows
/// in the integration tests.
fn flat(batch: &RecordBatch) -> RecordBatch {
    let columns: Vec<ArrayRef> =
        batch.columns().iter().filter(|column| !column.data_type().is_nested()).map(plain).collect();
    let fields =
        columns.iter().map(|c| datafusion::arrow::datatypes::Field::new("", c.data_type().clone(), true));
    let schema = datafusion::arrow::datatypes::Schema::new(fields.collect::<Vec<_>>());
    RecordBatch::try_new(Arc::new(schema), columns).unwrap()
}

fn by_library(file: &EngineFile) -> Option<RecordBatch> {
    let batches: Vec<RecordBatch> = match file.format {
        DataFileFormat::Avro => {
            let reader =
                arrow_avro::reader::ReaderBuilder::new().build(Cursor::new(file.bytes.to_vec())).unwrap();
            reader.collect::<Result<_, _>>().unwrap()
        }
        _ => {
            let builder = orc_rust::ArrowReaderBuilder::try_new(file.bytes.clone()).unwrap();
            // Nanoseconds of 64 bits do not reach every date.
            let exact = |field: &Arc<datafusion::arrow::datatypes::Field>| match field.data_type() {
                DataType::Timestamp(..) => {
                    Arc::new(field.as_ref().clone().with_data_type(DataType::Decimal128(38, 9)))
                }
                _ => Arc::clone(field),
            };
            let fields = builder.schema().fields().iter().map(exact).collect::<Vec<_>>();
            let schema = Arc::new(datafusion::arrow::datatypes::Schema::new(fields));
            builder.with_schema(schema).build().collect::<Result<_, _>>().unwrap()
        }
    };
    let schema = batches.first()?.schema();
    Some(concat_batches(&schema, &batches).unwrap())
}

#[test]
fn files_of_spark_are_read_as_other_libraries_read_them() {
    let (mut files, mut values) = (0, 0);
    for file in engine_files("avro-").into_iter().chain(engine_files("orc-")) {
        let (Some(own), Some(other)) = (read_whole(&file.bytes, file.format, 8192), by_library(&file)) else {
            continue;
        };
        assert_eq!(own.num_rows(), other.num_rows(), "{}", file.path.display());
        let (own, other) = (flat(&own), flat(&other));
        for (at, (mine, theirs)) in own.columns().iter().zip(other.columns()).enumerate() {
            let name = format!("column {at} of {}", file.path.display());
            let theirs = match (mine.data_type(), theirs.data_type()) {
                // Fixed bytes in ORC have their length from an attribute of Iceberg.
                (to @ DataType::FixedSizeBinary(_), _) => cast(theirs, to).unwrap(),
                (DataType::Timestamp(..), DataType::Timestamp(TimeUnit::Microsecond, _)) => plain(theirs),
                _ => Arc::clone(theirs),
            };
            assert_eq!(make_array(mine.to_data()).as_ref(), theirs.as_ref(), "{name}");
            values += mine.len();
        }
        files += 1;
    }
    assert!(files > 40 && values > 10_000, "{files} files, {values} values");
}

#[test]
fn it_makes_no_difference_how_many_rows_a_batch_has() {
    for file in engine_files("avro-").into_iter().chain(engine_files("orc-")) {
        let Some(whole) = read_whole(&file.bytes, file.format, 8192) else { continue };
        for rows in [1, 7, 512] {
            let again = read_whole(&file.bytes, file.format, rows).unwrap();
            assert_eq!(texts(&again), texts(&whole), "{} by {rows}", file.path.display());
        }
    }
}

/// Every codec that the table properties allow: each file of one statement, the same rows.
#[test]
fn every_codec_is_read() {
    for (table, codecs) in [("avro-types", 4), ("orc-types", 5)] {
        let mut files_by_rows: std::collections::BTreeMap<Vec<String>, usize> =
            std::collections::BTreeMap::new();
        for file in engine_files(table) {
            let rows = texts(&read_whole(&file.bytes, file.format, 100).unwrap());
            *files_by_rows.entry(rows).or_default() += 1;
        }
        assert!(
            files_by_rows.values().any(|count| *count >= codecs),
            "{table}: {:?}",
            files_by_rows.values()
        );
    }
}

fn long(id: i32) -> NestedField {
    NestedField::optional(id, format!("c{id}"), Type::Primitive(PrimitiveType::Long))
}

/// Through storage, by ranges: the first column and one that the file lacks.
#[tokio::test]
async fn a_reader_fetches_no_more_than_it_needs() {
    let mut small = BTreeSet::new();
    for file in engine_files("avro-").into_iter().chain(engine_files("orc-")) {
        let schema = Schema::builder().with_fields([long(1).into(), long(9999).into()]).build().unwrap();
        let arrow = schema_to_arrow_schema(&schema).unwrap();
        let wanted = schema
            .as_struct()
            .fields()
            .iter()
            .zip(arrow.fields())
            .map(|(field, target)| WantedColumn { field: Arc::clone(field), target: Arc::clone(target) });
        let path: Arc<str> = file.path.to_str().unwrap().into();
        let fetched = Arc::new(AtomicU64::new(0));
        let size = file.bytes.len() as u64;
        let source = Source::open(FileIO::new_with_fs(), path, size, Arc::clone(&fetched)).await.unwrap();
        let reader = FormatReader::open(source, file.format, wanted.collect(), None, 100).await.unwrap();
        let batches: Vec<RecordBatch> = futures::stream::try_unfold(reader, |mut reader| async move {
            Ok::<_, super::super::error::TableError>(reader.next().await?.map(|batch| (batch, reader)))
        })
        .try_collect()
        .await
        .unwrap();
        let whole = read_whole(&file.bytes, file.format, 8192);
        let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
        assert_eq!(rows, whole.map_or(0, |whole| whole.num_rows()), "{}", file.path.display());
        assert!(batches.iter().all(|batch| batch.column(1).null_count() == batch.num_rows()));
        assert!(fetched.load(Ordering::Relaxed) <= size, "{}", file.path.display());
        small.insert(file.format.to_string());
    }
    assert_eq!(small.len(), 2);
}

#[tokio::test]
async fn a_file_that_is_shorter_than_its_entry_says_is_damaged() {
    for table in ["avro-types", "orc-types"] {
        let file = engine_files(table).remove(0);
        let path: Arc<str> = file.path.to_str().unwrap().into();
        let size = file.bytes.len() as u64 + 100;
        let source = Source::open(FileIO::new_with_fs(), path, size, Arc::default()).await.unwrap();
        let error = FormatReader::open(source, file.format, Vec::new(), None, 100).await.err().unwrap();
        assert!(matches!(error, super::super::error::TableError::Corrupt { .. }), "{error}");
    }
}
