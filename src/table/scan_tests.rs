use super::*;
use crate::table::test_orders::{Order, OrdersLab, order, orders};
use datafusion::arrow::array::{Array, AsArray};
use datafusion::arrow::datatypes::{DataType, Int64Type};
use futures::TryStreamExt;

async fn rows(reader: &RowReader, file: &LiveFile, columns: &[usize]) -> Vec<RecordBatch> {
    let counters = Arc::new(ScanCounters::default());
    reader.read(&ScanFile::whole(file.clone()), columns, &counters).unwrap().try_collect().await.unwrap()
}

#[tokio::test]
async fn columns_of_one_type_that_changed_places_are_read_by_field_id() {
    let mut lab = OrdersLab::new().await;
    let rows_written = [Order { region: Some("us"), status: Some("open"), ..order(1) }];
    let snapshot = lab.snapshot(None, &rows_written, &[]).await;
    let file = lab.live(snapshot).await.remove(0);
    lab.reorder_and_add();
    let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id).unwrap();
    let names: Vec<_> = reader.arrow_schema().fields().iter().map(|f| f.name().as_str()).collect();
    assert_eq!(names, ["order_id", "status", "day", "amount", "price", "region", "note"]);

    // As many columns as the file has of them, of the same types: only the order differs.
    let batch = rows(&reader, &file, &[1, 5]).await.remove(0);
    assert_eq!(batch.column(0).as_string::<i32>().value(0), "open");
    assert_eq!(batch.column(1).as_string::<i32>().value(0), "us");

    // With the widened day, and the column that the file does not have.
    let batch = rows(&reader, &file, &[1, 5, 2, 6]).await.remove(0);

    assert_eq!(batch.column(0).as_string::<i32>().value(0), "open");
    assert_eq!(batch.column(1).as_string::<i32>().value(0), "us");
    assert_eq!(batch.column(2).as_primitive::<Int64Type>().value(0), 1);
    assert!(batch.column(3).is_null(0));
}

#[tokio::test]
async fn no_columns_still_count_rows_and_cost_is_metered() {
    let mut lab = OrdersLab::new().await;
    let snapshot = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let file = lab.live(snapshot).await.remove(0);
    let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
    let counters = Arc::new(ScanCounters::default());
    let batches: Vec<_> =
        reader.read(&ScanFile::whole(file), &[], &counters).unwrap().try_collect().await.unwrap();
    assert_eq!((batches[0].num_columns(), batches[0].num_rows()), (0, 3));
    assert_eq!((counters.files(), counters.rows()), (1, 3));
    assert!(counters.bytes() > 0);
}

#[tokio::test]
async fn a_partition_column_that_the_file_lacks_comes_from_the_tuple() {
    let mut lab = OrdersLab::new().await;
    let snapshot = lab.snapshot(None, &orders(7, &[1]), &[]).await;
    let mut file = lab.live(snapshot).await.remove(0);
    lab.reorder_and_add();
    // As a file from Hive would be described: no metrics for the partition column.
    file.file =
        Arc::new(test_support::without_metrics(&file.file, lab.table.metadata.default_partition_spec_id()));
    let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id).unwrap();
    let batch = rows(&reader, &file, &[2]).await.remove(0);
    assert_eq!(batch.schema().field(0).data_type(), &DataType::Int64);
    assert_eq!(batch.column(0).as_primitive::<Int64Type>().value(0), 7);
}

#[tokio::test]
async fn a_file_that_does_not_hold_what_its_entry_says_is_an_error() {
    let mut lab = OrdersLab::new().await;
    let snapshot = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let mut file = lab.live(snapshot).await.remove(0);
    let spec = lab.table.metadata.default_partition_spec_id();
    file.file = Arc::new(test_support::with_records(&file.file, spec, 3));
    let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
    let counters = Arc::new(ScanCounters::default());
    let read: Result<Vec<_>, _> =
        reader.read(&ScanFile::whole(file.clone()), &[0], &counters).unwrap().try_collect().await;
    assert!(matches!(read, Err(TableError::Corrupt { .. })), "{read:?}");
}

#[tokio::test]
async fn a_missing_file_is_told_by_its_path() {
    let mut lab = OrdersLab::new().await;
    let snapshot = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let file = lab.live(snapshot).await.remove(0);
    lab.table.file_io.delete(&file.fact.path).await.unwrap();
    let reader = RowReader::new(&lab.table, SchemaId(0)).unwrap();
    let counters = Arc::new(ScanCounters::default());
    let read: Result<Vec<_>, _> =
        reader.read(&ScanFile::whole(file.clone()), &[0], &counters).unwrap().try_collect().await;
    assert!(matches!(read, Err(TableError::Missing { path }) if *path == *file.fact.path));
}

#[tokio::test]
async fn groups_are_balanced_by_bytes() {
    let mut lab = OrdersLab::new().await;
    let snapshot = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let file = lab.live(snapshot).await.remove(0);
    let of = |path: &str, bytes: i64| {
        let mut file = file.clone();
        file.fact.path = path.into();
        file.fact.bytes = bytes;
        ScanFile::whole(file)
    };
    let groups = FileGroup::balance(vec![of("a", 10), of("b", 60), of("c", 30), of("d", 20)], 2);
    assert_eq!(groups.iter().map(|g| g.bytes).collect::<Vec<_>>(), [60, 60]);
    assert_eq!(FileGroup::balance(vec![of("a", 1)], 8).len(), 1);
    assert_eq!(FileGroup::balance(Vec::new(), 8).len(), 1);
}

mod test_support {
    use iceberg::spec::{DataContentType, DataFile, DataFileBuilder};

    fn rebuilt(file: &DataFile, spec_id: i32) -> DataFileBuilder {
        let mut builder = DataFileBuilder::default();
        builder
            .content(DataContentType::Data)
            .file_path(file.file_path().to_owned())
            .file_format(file.file_format())
            .partition(file.partition().clone())
            .partition_spec_id(spec_id)
            .record_count(file.record_count())
            .file_size_in_bytes(file.file_size_in_bytes());
        builder
    }

    pub fn without_metrics(file: &DataFile, spec_id: i32) -> DataFile {
        rebuilt(file, spec_id).build().unwrap()
    }

    pub fn with_records(file: &DataFile, spec_id: i32, records: u64) -> DataFile {
        rebuilt(file, spec_id).record_count(records).build().unwrap()
    }
}
