use datafusion::arrow::array::{ArrayRef, Float64Array, Int64Array, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
use datafusion::arrow::error::ArrowError;
use datafusion::parquet::basic::Compression;
use datafusion::parquet::file::reader::{FileReader, SerializedFileReader};
use iceberg::spec::{Datum, FormatVersion, Transform};
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::reason::ReasonCode;

use super::super::snapshot_writer::SnapshotWriter;
use super::super::writer_test_support::{TestTable, append, batch, store};
use super::*;

fn parquet(file: &NewDataFile) -> SerializedFileReader<std::fs::File> {
    SerializedFileReader::new(std::fs::File::open(&*file.fact.path).unwrap()).unwrap()
}

fn data_files_on_disk(test: &TestTable) -> usize {
    fn count(folder: &std::path::Path) -> usize {
        let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
        entries.map(|e| e.unwrap().path()).map(|p| if p.is_dir() { count(&p) } else { 1 }).sum()
    }
    count(&test.dir.path().join("flights/data"))
}

#[tokio::test]
async fn one_file_a_partition_sorted_by_path_with_bounds() {
    let test = TestTable::new();
    let files = test.files(&[(1, "UA"), (2, "AA"), (3, "UA"), (4, "DL")]).await;
    let shown: Vec<String> = files.iter().map(|f| f.fact.partition.to_string()).collect();
    assert_eq!(shown, ["carrier=AA", "carrier=DL", "carrier=UA"]);
    assert!(files.is_sorted_by(|one, other| one.fact.path < other.fact.path));
    let ua = &files[2];
    assert_eq!((ua.fact.records, ua.spec_id), (2, SpecId(0)));
    assert_eq!(std::fs::metadata(&*ua.fact.path).unwrap().len(), u64::try_from(ua.fact.bytes).unwrap());
    assert_eq!(
        (&ua.file.lower_bounds()[&1], &ua.file.upper_bounds()[&1]),
        (&Datum::long(1), &Datum::long(3))
    );
    assert_eq!(ua.file.lower_bounds()[&2], Datum::string("UA"));
    assert_eq!(ua.file.null_value_counts()[&3], 2);
    let column = parquet(ua).metadata().row_group(0).column(0).compression();
    assert!(matches!(column, Compression::ZSTD(_)), "{column:?}");
}

#[tokio::test]
async fn codec_folder_and_file_size_of_the_table_are_honoured() {
    let elsewhere = tempfile::tempdir().unwrap();
    let folder = elsewhere.path().to_str().unwrap().to_owned();
    let test = TestTable::with_properties(&[
        ("write.parquet.compression-codec", "SNAPPY"),
        ("write.data.path", &format!("{folder}/")),
        ("write.target-file-size-bytes", "1000"),
    ]);
    let schema_id = test.table.facts.current_schema_id;
    let batches = (0..4).map(|at| batch(&vec![(at, "UA"); 2000])).collect();
    let files = DataFileWriter::write_batches(&test.table, schema_id, batches).await.unwrap();
    assert!(files.len() > 1, "{}", files.len());
    assert_eq!(files.iter().map(|f| f.fact.records).sum::<i64>(), 8000);
    assert!(files.iter().all(|f| f.fact.path.starts_with(&format!("{folder}/carrier=UA/"))));
    assert_eq!(parquet(&files[0]).metadata().row_group(0).column(0).compression(), Compression::SNAPPY);

    // Names are not spread: the partition stays readable in them, and no reader depends on either.
    let test = TestTable::with_properties(&[("write.object-storage.enabled", "true")]);
    let files =
        DataFileWriter::write_batches(&test.table, schema_id, vec![batch(&[(1, "UA")])]).await.unwrap();
    let folder = format!("{}/data/carrier=UA/", test.table.facts.location);
    assert!(files[0].fact.path.starts_with(&folder), "{}", files[0].fact.path);

    let test = TestTable::with_properties(&[("write.parquet.compression-codec", "lzo")]);
    let error = DataFileWriter::write_batches(&test.table, schema_id, vec![]).await.unwrap_err();
    assert_eq!(error.reason(), ReasonCode::FormatUnsupported);
}

#[tokio::test]
async fn partition_values_cannot_leave_the_data_folder() {
    let test = TestTable::new();
    let long = "ü".repeat(300);
    let files = test.files(&[(1, "../../etc"), (2, "a/b=c"), (3, &long)]).await;
    let folder = format!("{}/data", test.table.facts.location);
    for file in &files {
        let rest = file.fact.path.strip_prefix(&format!("{folder}/carrier=")).unwrap();
        assert_eq!(rest.split('/').count(), 2, "{rest}");
    }
    assert_eq!(data_files_on_disk(&test), 3);
    assert!(files.iter().any(|f| f.fact.partition.fields[0].value.as_deref() == Some("a/b=c")));
}

#[tokio::test]
async fn unpartitioned_and_void_specs_are_written() {
    for spec in [&[][..], &[("carrier", Transform::Void)][..]] {
        let mut test = TestTable::with(&[], FormatVersion::V2, spec);
        let files = test.files(&[(1, "UA"), (2, "AA")]).await;
        assert_eq!(files.len(), 1);
        assert!(files[0].fact.partition.is_unpartitioned());
        let mut writer = SnapshotWriter::on(&store(), &test.table, None).await.unwrap();
        let snapshot = writer.add(append(1, files)).await.unwrap();
        test.commit("main", &[snapshot]);
        assert_eq!(test.ids(SnapshotId(1)).await, [1, 2]);
    }
}

/// Bounds must hold for every row group, also where text is too long for a bound.
#[tokio::test]
async fn bounds_of_long_text_are_cut_and_mislead_no_reader() {
    let test = TestTable::with(&[("write.parquet.row-group-size-bytes", "1")], FormatVersion::V2, &[]);
    let long = "z".repeat(500);
    let schema_id = test.table.facts.current_schema_id;
    let rows = vec![batch(&[(1, "b")]), batch(&[(2, &long)]), batch(&[(3, "a")])];
    let files = DataFileWriter::write_batches(&test.table, schema_id, rows).await.unwrap();
    assert_eq!(files.len(), 1);
    assert!(parquet(&files[0]).metadata().num_row_groups() > 1);
    assert_eq!(files[0].file.lower_bounds().get(&2), Some(&Datum::string("a")));
    let cut = format!("{}{{", "z".repeat(15));
    assert_eq!(files[0].file.upper_bounds().get(&2), Some(&Datum::string(cut)));
}

#[tokio::test]
async fn a_failed_write_leaves_no_file() {
    let test = TestTable::new();
    let schema_id = test.table.facts.current_schema_id;
    let failing = futures::stream::iter([
        Ok(batch(&[(1, "UA"), (2, "AA")])),
        Err(ArrowError::ComputeError("upstream is gone".to_owned())),
    ]);
    let error = DataFileWriter::write(&test.table, schema_id, failing).await.unwrap_err();
    assert_eq!(error.reason(), ReasonCode::ReplayFailed);
    assert!(error.to_string().contains("upstream is gone"), "{error}");
    assert_eq!(data_files_on_disk(&test), 0);

    let fields = vec![Field::new("id", DataType::Int64, true), Field::new("nope", DataType::Utf8, true)];
    let columns: Vec<ArrayRef> =
        vec![Arc::new(Int64Array::from(vec![9])), Arc::new(StringArray::from(vec!["x"]))];
    let wrong = RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), columns).unwrap();
    let batches = vec![batch(&[(1, "UA")]), wrong];
    let error = DataFileWriter::write_batches(&test.table, schema_id, batches).await.unwrap_err();
    assert!(error.to_string().contains("'nope'"), "{error}");
    assert_eq!(data_files_on_disk(&test), 0);
}

#[tokio::test]
async fn no_rows_give_no_file_and_nan_is_counted() {
    let test = TestTable::new();
    let schema_id = test.table.facts.current_schema_id;
    assert!(DataFileWriter::write_batches(&test.table, schema_id, vec![]).await.unwrap().is_empty());
    let empty = vec![batch(&[])];
    assert!(DataFileWriter::write_batches(&test.table, schema_id, empty).await.unwrap().is_empty());

    let fields = vec![Field::new("id", DataType::Int64, true), Field::new("rate", DataType::Float64, true)];
    let columns: Vec<ArrayRef> =
        vec![Arc::new(Int64Array::from(vec![1, 2])), Arc::new(Float64Array::from(vec![f64::NAN, 0.5]))];
    let rows = RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), columns).unwrap();
    let files = DataFileWriter::write_batches(&test.table, schema_id, vec![rows]).await.unwrap();
    assert_eq!(files[0].fact.partition.fields[0].value, None);
    assert!(files[0].fact.path.contains("/carrier=null/"));
    assert_eq!(files[0].file.nan_value_counts()[&3], 1);
    assert_eq!(files[0].file.lower_bounds()[&3], Datum::double(0.5));
}
