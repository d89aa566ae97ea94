//! Every write property that is honoured, by what it does to a file.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::parquet::basic::{Encoding, PageType};
use datafusion::parquet::file::reader::{FileReader, SerializedFileReader};
use iceberg::spec::{DataFile, FormatVersion};

use super::super::writer_test_support::TestTable;
use super::*;

const PAGE_ROWS: &str = "write.parquet.page-row-limit";

async fn written(properties: &[(&str, &str)]) -> (TestTable, Vec<NewDataFile>) {
    let test = TestTable::with(properties, FormatVersion::V2, &[]);
    let ids: ArrayRef = Arc::new((0..40_000).collect::<Int64Array>());
    let carriers: ArrayRef =
        Arc::new(StringArray::from_iter_values((0..40_000).map(|n| format!("carrier {n}"))));
    let rows = RecordBatch::try_from_iter([("id", ids), ("carrier", carriers)]).unwrap();
    let batches = (0..10).map(|at| rows.slice(at * 4_000, 4_000)).collect();
    let schema_id = test.table.facts.current_schema_id;
    let files = DataFileWriter::write_batches(&test.table, schema_id, batches).await.unwrap();
    assert_eq!(files.iter().map(|file| file.fact.records).sum::<i64>(), 40_000);
    (test, files)
}

fn open(files: &[NewDataFile]) -> SerializedFileReader<std::fs::File> {
    SerializedFileReader::new(std::fs::File::open(&*files[0].fact.path).unwrap()).unwrap()
}

/// Kinds of the pages of a column in the first row group.
fn pages(files: &[NewDataFile], column: usize) -> Vec<PageType> {
    let reader = open(files);
    let mut pages = reader.get_row_group(0).unwrap().get_column_page_reader(column).unwrap();
    let mut kinds = Vec::new();
    while let Some(page) = pages.get_next_page().unwrap() {
        kinds.push(page.page_type());
    }
    kinds
}

#[tokio::test]
async fn row_groups_and_files_are_as_large_as_the_table_says() {
    let (_test, files) = written(&[]).await;
    assert_eq!((files.len(), open(&files).metadata().num_row_groups()), (1, 1));
    let (_test, files) = written(&[("write.parquet.row-group-size-bytes", "60000")]).await;
    assert!(open(&files).metadata().num_row_groups() > 3);
    let (_test, files) = written(&[("write.target-file-size-bytes", "60000")]).await;
    assert!(files.len() > 1);
    // No size at all is the default.
    let (_test, files) = written(&[("write.target-file-size-bytes", "-1")]).await;
    assert_eq!(files.len(), 1);
}

#[tokio::test]
async fn pages_are_as_large_as_the_table_says() {
    let whole = pages(&written(&[]).await.1, 0).len();
    assert!(pages(&written(&[(PAGE_ROWS, "2000")]).await.1, 0).len() > 2 * whole);
    let small =
        written(&[("write.parquet.page-size-bytes", "4096"), ("write.parquet.dict-size-bytes", "1")]).await;
    assert!(pages(&small.1, 1).len() > 2 * whole);
    let second = written(&[("write.parquet.page-version", "v2")]).await;
    assert!(pages(&second.1, 0).contains(&PageType::DATA_PAGE_V2));
    assert!(!pages(&written(&[]).await.1, 0).contains(&PageType::DATA_PAGE_V2));
}

#[tokio::test]
async fn a_dictionary_that_is_too_large_is_given_up() {
    let plain_of = |files: &[NewDataFile]| {
        let reader = open(files);
        let column = reader.metadata().row_group(0).column(1).clone();
        let encodings: Vec<Encoding> = column.encodings().collect();
        (encodings.contains(&Encoding::RLE_DICTIONARY), column.compressed_size())
    };
    let (with_dictionary, _) = plain_of(&written(&[]).await.1);
    let pages_of_small = pages(&written(&[("write.parquet.dict-size-bytes", "1000")]).await.1, 1).len();
    assert!(with_dictionary && pages_of_small > 1);
}

#[tokio::test]
async fn bloom_filters_are_written_where_they_are_asked_for() {
    let filter = |files: &[NewDataFile], column: usize| {
        let reader = open(files);
        let column = reader.metadata().row_group(0).column(column).clone();
        column.bloom_filter_offset().map(|_| column.bloom_filter_length().unwrap())
    };
    assert_eq!(filter(&written(&[]).await.1, 0), None);
    let enabled = ("write.parquet.bloom-filter-enabled.column.carrier", "true");
    let (_test, files) = written(&[enabled]).await;
    assert_eq!(filter(&files, 0), None);
    // As large as 40,000 values need, and a header; at most a mebibyte.
    let whole = filter(&files, 1).unwrap();
    assert!((1 << 16..=(1 << 20) + 100).contains(&whole), "{whole}");
    let bounded = written(&[enabled, ("write.parquet.bloom-filter-max-bytes", "5000")]).await;
    let bounded = filter(&bounded.1, 1).unwrap();
    assert!((4096..4196).contains(&bounded), "{bounded}");
    let few = written(&[enabled, ("write.parquet.bloom-filter-ndv.column.carrier", "1000")]).await;
    let few = filter(&few.1, 1).unwrap();
    let sure = written(&[
        enabled,
        ("write.parquet.bloom-filter-ndv.column.carrier", "1000"),
        ("write.parquet.bloom-filter-fpp.column.carrier", "0.000001"),
    ])
    .await;
    assert!(few < 4096 && few < filter(&sure.1, 1).unwrap(), "{few}");
}

#[tokio::test]
async fn statistics_of_a_column_can_be_left_out_of_the_file() {
    let (_test, files) = written(&[("write.parquet.stats-enabled.column.carrier", "false")]).await;
    let reader = open(&files);
    let columns = reader.metadata().row_group(0).columns();
    assert!(columns[0].statistics().is_some() && columns[1].statistics().is_none());
    assert!(files[0].file.lower_bounds().contains_key(&1) && !files[0].file.lower_bounds().contains_key(&2));
}

/// Has the column a size, counts, bounds?
fn kept(file: &DataFile, id: i32) -> [bool; 3] {
    [
        file.column_sizes().contains_key(&id),
        file.value_counts().contains_key(&id) && file.null_value_counts().contains_key(&id),
        file.lower_bounds().contains_key(&id) && file.upper_bounds().contains_key(&id),
    ]
}

#[tokio::test]
async fn metrics_are_kept_by_their_modes() {
    const DEFAULT: &str = "write.metadata.metrics.default";
    const CARRIER: &str = "write.metadata.metrics.column.carrier";
    let of = |properties: Vec<(&'static str, &'static str)>| async move {
        let (_test, files) = written(&properties).await;
        let file = Arc::clone(&files[0].file);
        (kept(&file, 1), kept(&file, 2), file.upper_bounds().get(&2).map(ToString::to_string))
    };
    let all = [true, true, true];
    let cut = Some("\"carrier 9999\"".to_owned());
    assert_eq!(of(vec![]).await, (all, all, cut.clone()));
    assert_eq!(of(vec![(CARRIER, "truncate(4)")]).await, (all, all, Some("\"cars\"".to_owned())));
    assert_eq!(of(vec![(CARRIER, "full")]).await, (all, all, cut.clone()));
    assert_eq!(of(vec![(DEFAULT, "counts")]).await, ([true, true, false], [true, true, false], None));
    let none = [true, false, false];
    assert_eq!(of(vec![(DEFAULT, "none"), (CARRIER, "truncate(16)")]).await, (none, all, cut.clone()));
    // What cannot be read is the default, as in Java.
    assert_eq!(of(vec![(CARRIER, "some")]).await, (all, all, cut.clone()));
    // The first column alone has a mode without being named.
    let few = ("write.metadata.metrics.max-inferred-column-defaults", "1");
    assert_eq!(of(vec![few]).await, (all, none, None));
    assert_eq!(of(vec![few, (DEFAULT, "full")]).await, (all, all, cut));
}
