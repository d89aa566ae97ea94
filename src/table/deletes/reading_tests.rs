//! Rows of real files with real delete files, read by the table's reader.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Int32Array, Int64Array, RecordBatch, StringArray, StructArray,
};
use datafusion::arrow::buffer::NullBuffer;
use datafusion::arrow::datatypes::{DataType, Field, Fields, Int64Type};
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use futures::TryStreamExt;
use iceberg::spec::{DataContentType, DataFile};
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::reason::ReasonCode;

use super::super::error::TableError;
use super::super::scan::{RowReader, ScanCounters, live_rows};
use super::super::test_orders::{Order, OrdersLab, order, orders};
use super::test_files::{
    POS_ID, by_order_id, describe, equality, only, parquet, positions_columns, positions_of_many, put,
    unreadable_positions,
};
use super::*;

async fn try_ids(
    lab: &OrdersLab,
    snapshot: SnapshotId,
    counters: &Arc<ScanCounters>,
) -> Result<Vec<Option<i64>>, TableError> {
    let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id)?;
    let mut ids = Vec::new();
    let mut counted = 0;
    for file in live_rows(lab.live_files(snapshot).await)? {
        for batch in reader.read(&file, &[0], counters)?.try_collect::<Vec<_>>().await? {
            assert_eq!(batch.num_columns(), 1, "compared columns are not given out");
            ids.extend(batch.column(0).as_primitive::<Int64Type>().iter());
        }
        counted += reader.count(&file, counters).await?;
    }
    assert_eq!(counted, ids.len() as u64);
    ids.sort();
    Ok(ids)
}

async fn ids(lab: &OrdersLab, snapshot: SnapshotId) -> Vec<Option<i64>> {
    try_ids(lab, snapshot, &Arc::default()).await.unwrap()
}

fn some(ids: &[i64]) -> Vec<Option<i64>> {
    ids.iter().copied().map(Some).collect()
}

async fn vector_of(lab: &OrdersLab, file: &LiveFile, positions: &[u64]) -> Arc<DataFile> {
    let rows = RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() };
    Arc::clone(&VectorWriter::write(&lab.table, &[rows]).await.unwrap()[0].file)
}

async fn positions_of(lab: &OrdersLab, file: &LiveFile, positions: &[u64]) -> Arc<DataFile> {
    let rows = RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() };
    PositionDeleteWriter::write(&lab.table, &rows).await.unwrap().file
}

#[tokio::test]
async fn position_deletes_of_several_data_files_in_one_file() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let b = lab.snapshot(Some(a), &[orders(1, &[4, 5, 6]), orders(2, &[7])].concat(), &[]).await;
    let of_day_1 = lab.files_of_day(b, 1).await;
    let mut rows: Vec<(&str, i64)> = Vec::new();
    for path in &of_day_1 {
        rows.extend([(&**path, 0), (&**path, 2)]);
    }
    // A file that is gone, and a row that never was: nobody's row.
    rows.extend([("nowhere.parquet", 1), (&*of_day_1[0], 99)]);
    rows.sort_unstable();
    let deletes = positions_of_many(&lab, 1, &rows).await;
    let c = lab.row_delta(b, &[deletes], &[]).await;
    assert_eq!(ids(&lab, c).await, some(&[2, 5, 7]));
    assert_eq!(ids(&lab, b).await, some(&[1, 2, 3, 4, 5, 6, 7]));
    // What is added later is not reached.
    let d = lab.snapshot(Some(c), &orders(1, &[8]), &[]).await;
    assert_eq!(ids(&lab, d).await, some(&[2, 5, 7, 8]));
}

#[tokio::test]
async fn a_row_column_and_missing_ids_do_not_matter() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let path = lab.files_of_day(a, 1).await.remove(0);
    let order_id = Arc::new(Field::new("order_id", DataType::Int64, true));
    let values: ArrayRef = Arc::new(Int64Array::from(vec![2]));
    let row: ArrayRef = Arc::new(StructArray::from(vec![(order_id, values)]));
    let mut with_row = positions_columns(&[(&path, 1)]);
    with_row.push((Some(2_147_483_544), "row", row));
    let without_ids: Vec<_> =
        positions_columns(&[(&path, 0)]).into_iter().map(|(_, name, values)| (None, name, values)).collect();
    let mut files = Vec::new();
    for columns in [with_row, without_ids] {
        let file = put(&lab, parquet(columns)).await;
        files.push(Arc::new(
            describe(DataContentType::PositionDeletes, &file, Some(1), 1, None).build().unwrap(),
        ));
    }
    let b = lab.row_delta(a, &files, &[]).await;
    assert_eq!(ids(&lab, b).await, some(&[3]));
}

#[tokio::test]
async fn rule_d1_a_vector_replaces_position_deletes_and_is_read_alone() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2, 3, 4]), &[]).await;
    let file = only(lab.live(a).await);
    let b = lab.row_delta(a, &[positions_of(&lab, &file, &[0, 1]).await], &[]).await;
    assert_eq!(ids(&lab, b).await, some(&[3, 4]));
    let c = lab.row_delta(b, &[vector_of(&lab, &file, &[0, 3]).await], &[]).await;
    // One that forgot to fold in what was deleted before brings row 2 back: that is what readers do.
    assert_eq!(ids(&lab, c).await, some(&[2, 3]));
    let counters = Arc::default();
    try_ids(&lab, c, &counters).await.unwrap();
    assert_eq!(counters.delete_files(), 1);
}

#[tokio::test]
async fn batches_and_row_numbers_agree_in_long_files() {
    let mut lab = OrdersLab::new().await;
    let many: Vec<i64> = (0..50_000).collect();
    let a = lab.snapshot(None, &orders(1, &many), &[]).await;
    let file = only(lab.live(a).await);
    let deleted: Vec<u64> = (0..50_000).filter(|at| at % 3 == 0 || (8_000..9_000).contains(at)).collect();
    let b = lab.row_delta(a, &[vector_of(&lab, &file, &deleted).await], &[]).await;
    let left: Vec<i64> = many.iter().copied().filter(|id| !deleted.contains(&(*id as u64))).collect();
    assert_eq!(ids(&lab, b).await, some(&left));
    // By value as well, from batch to batch.
    let keys: Vec<Option<i64>> = left.iter().step_by(2).copied().map(Some).collect();
    let c = lab.row_delta(b, &[by_order_id(&lab, Some(1), &keys).await], &[]).await;
    let left: Vec<i64> = left.into_iter().skip(1).step_by(2).collect();
    assert_eq!(ids(&lab, c).await, some(&left));
}

/// Facts, section 3: the crate and DuckDB say 891.
#[tokio::test]
async fn null_keys_are_kept_when_no_key_is_null() {
    let mut lab = OrdersLab::new().await;
    let rows: Vec<Order> = (0..1000).map(|at| Order { id: (at >= 100).then_some(at), ..order(at) }).collect();
    let a = lab.snapshot(None, &rows, &[]).await;
    let keys: Vec<Option<i64>> = (500..509).map(Some).collect();
    let b = lab.row_delta(a, &[by_order_id(&lab, Some(1), &keys).await], &[]).await;
    assert_eq!(ids(&lab, b).await.len(), 991);
    let c = lab.row_delta(b, &[by_order_id(&lab, Some(1), &[None]).await], &[]).await;
    assert_eq!(ids(&lab, c).await.len(), 891);
}

#[tokio::test]
async fn equality_deletes_reach_older_files_of_their_partition() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &[orders(1, &[1, 2]), orders(2, &[1, 2])].concat(), &[]).await;
    let b = lab.row_delta(a, &[by_order_id(&lab, Some(1), &some(&[1])).await], &[]).await;
    assert_eq!(ids(&lab, b).await, some(&[1, 2, 2]));
    // The same key written again is not deleted.
    let c = lab.snapshot(Some(b), &orders(1, &[1]), &[]).await;
    assert_eq!(ids(&lab, c).await, some(&[1, 1, 2, 2]));
    lab.add_unpartitioned_spec();
    let d = lab.row_delta(c, &[by_order_id(&lab, None, &some(&[2])).await], &[]).await;
    assert_eq!(ids(&lab, d).await, some(&[1, 1]));
}

#[tokio::test]
async fn compared_columns_are_found_after_ddl() {
    let mut lab = OrdersLab::new().await;
    let rows = vec![
        order(1),
        Order { status: Some("open"), ..order(2) },
        Order { status: None, region: Some("us"), ..order(3) },
    ];
    let a = lab.snapshot(None, &rows, &[]).await;
    let text = |value: Option<&str>| -> ArrayRef { Arc::new(StringArray::from(vec![value])) };
    let by_status = equality(&lab, Some(1), vec![(6, text(Some("open")))], Vec::new()).await;
    let by_region = equality(&lab, Some(1), vec![(2, text(Some("us")))], vec![(6, text(Some("x")))]).await;
    let b = lab.row_delta(a, &[by_status, by_region], &[]).await;
    // Dropped: still what decides. Renamed and moved: the id counts. The day, which is wider now, too.
    lab.drop_column("status");
    assert_eq!(ids(&lab, b).await, some(&[1]));
    lab.reorder_and_add();
    assert_eq!(ids(&lab, b).await, some(&[1]));
    // A column that the data file never had is null in every row of it.
    let null: ArrayRef = Arc::new(StringArray::from(vec![None::<&str>]));
    let by_note = equality(&lab, Some(1), vec![(7, null)], Vec::new()).await;
    let c = lab.row_delta(b, &[by_note], &[]).await;
    assert_eq!(ids(&lab, c).await, []);
    let nowhere = equality(&lab, Some(1), vec![(77, text(None))], Vec::new()).await;
    let d = lab.row_delta(b, &[nowhere], &[]).await;
    let error = try_ids(&lab, d, &Arc::default()).await.unwrap_err();
    assert!(error.to_string().contains("field with id 77"), "{error}");
}

/// `code` and `grade` of a row; `None` is a null struct.
type Audit = Option<(Option<i32>, &'static str)>;

/// Orders with a column `audit { code, grade }`.
fn audited(rows: &[(i64, Audit)]) -> RecordBatch {
    let inner = Fields::from(vec![
        Field::new("code", DataType::Int32, true),
        Field::new("grade", DataType::Utf8, true),
    ]);
    // Values below a null parent are there, and mean nothing.
    let codes: ArrayRef =
        Arc::new(rows.iter().map(|(_, a)| a.map_or(Some(7), |(code, _)| code)).collect::<Int32Array>());
    let grades: ArrayRef =
        Arc::new(rows.iter().map(|(_, a)| Some(a.map_or("x", |(_, grade)| grade))).collect::<StringArray>());
    let there = NullBuffer::from(rows.iter().map(|(_, a)| a.is_some()).collect::<Vec<_>>());
    let audit: ArrayRef = Arc::new(StructArray::new(inner, vec![codes, grades], Some(there)));
    let ids: ArrayRef = Arc::new(rows.iter().map(|(id, _)| Some(*id)).collect::<Int64Array>());
    let days: ArrayRef = Arc::new(Int32Array::from(vec![1; rows.len()]));
    RecordBatch::try_from_iter([("order_id", ids), ("day", days), ("audit", audit)]).unwrap()
}

#[tokio::test]
async fn a_compared_column_may_be_inside_a_struct() {
    let mut lab = OrdersLab::new().await;
    let old = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    lab.add_nested_column();
    let rows =
        audited(&[(2, Some((Some(7), "a"))), (3, Some((None, "b"))), (4, None), (5, Some((Some(8), "c")))]);
    let mut table = lab.table.clone();
    let schema = table.facts.current_schema_id;
    let a = lab.snapshot_of_batches(&mut table, Some(old), schema, vec![rows], &[]).await;
    lab.table = table;
    let code = |value: Option<i32>| -> ArrayRef { Arc::new(Int32Array::from(vec![value])) };
    let seven = equality(&lab, Some(1), vec![(8, code(Some(7)))], Vec::new()).await;
    let b = lab.row_delta(a, &[seven], &[]).await;
    assert_eq!(ids(&lab, b).await, some(&[1, 3, 4, 5]));
    // A null parent is a null value, and so is a column that the file is too old to have.
    let null = equality(&lab, Some(1), vec![(8, code(None))], Vec::new()).await;
    let c = lab.row_delta(b, &[null], &[]).await;
    assert_eq!(ids(&lab, c).await, some(&[5]));
    // As an engine writes it: inside a struct of the delete file as well.
    let audit = audited(&[(0, Some((Some(8), "c")))]);
    let deletes = put(&lab, nested_parquet(&audit)).await;
    let entry = describe(DataContentType::EqualityDeletes, &deletes, Some(1), 1, Some(vec![9, 8]));
    let d = lab.row_delta(b, &[Arc::new(entry.build().unwrap())], &[]).await;
    assert_eq!(ids(&lab, d).await, some(&[1, 3, 4]));
}

/// The column `audit` of a batch with the field ids of the table.
fn nested_parquet(batch: &RecordBatch) -> Vec<u8> {
    let with_id = |name: &str, data_type: DataType, id: i32| {
        let metadata = [(PARQUET_FIELD_ID_META_KEY.to_owned(), id.to_string())];
        Field::new(name, data_type, true).with_metadata(metadata.into())
    };
    let fields = Fields::from(vec![with_id("code", DataType::Int32, 8), with_id("grade", DataType::Utf8, 9)]);
    let audit = batch.column(2).as_struct();
    let typed = StructArray::new(fields, audit.columns().to_vec(), audit.nulls().cloned());
    parquet(vec![(Some(7), "audit", Arc::new(typed))])
}

#[tokio::test]
async fn a_delete_file_is_read_once_a_scan() {
    let mut lab = OrdersLab::new().await;
    let mut snapshot = lab.snapshot(None, &orders(1, &[0]), &[]).await;
    for id in 1..6 {
        snapshot = lab.snapshot(Some(snapshot), &orders(1, &[id]), &[]).await;
    }
    let paths = lab.files_of_day(snapshot, 1).await;
    let mut rows: Vec<(&str, i64)> = paths[..3].iter().map(|path| (&**path, 0)).collect();
    rows.sort_unstable();
    let shared = positions_of_many(&lab, 1, &rows).await;
    let keys = by_order_id(&lab, Some(1), &some(&[0, 1, 2, 3, 4])).await;
    let b = lab.row_delta(snapshot, &[shared, keys], &[]).await;
    let counters: Arc<ScanCounters> = Arc::default();
    assert!(try_ids(&lab, b, &counters).await.unwrap().len() <= 1);
    assert_eq!(counters.delete_files(), 2);
    assert!(counters.bytes() > 0);
}

#[tokio::test]
async fn what_cannot_be_read_is_told_and_stops_the_scan() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let file = only(lab.live(a).await);
    let unreadable = unreadable_positions(&lab, &file.fact.path, 1).await;
    let b = lab.row_delta(a, &[unreadable], &[]).await;
    let error = try_ids(&lab, b, &Arc::default()).await.unwrap_err();
    assert!(error.to_string().contains("it is no ORC file"), "{error}");
    assert_eq!(error.reason(), ReasonCode::TableUnreadable);

    let described = |entry: &DataFile| {
        let mut copy = describe(DataContentType::PositionDeletes, entry.file_path(), Some(1), 2, None);
        copy.file_format(entry.file_format())
            .referenced_data_file(entry.referenced_data_file())
            .content_offset(entry.content_offset())
            .content_size_in_bytes(entry.content_size_in_bytes());
        copy
    };
    // One position more than the entry says, a vector beyond the end of its file, one that is nowhere.
    let vector = vector_of(&lab, &file, &[0]).await;
    let counted = described(&vector).build().unwrap();
    let beyond = described(&vector).content_offset(Some(1 << 40)).build().unwrap();
    let huge = described(&vector).content_size_in_bytes(Some(i64::MAX - 100)).build().unwrap();
    let positions = positions_of(&lab, &file, &[0]).await;
    let miscounted = described(&positions).build().unwrap();
    let negative = positions_of_many(&lab, 1, &[(&file.fact.path, -1)]).await.as_ref().clone();
    let no_pos: Vec<_> = positions_columns(&[("x", 1)]).into_iter().filter(|c| c.0 != Some(POS_ID)).collect();
    let no_pos =
        describe(DataContentType::PositionDeletes, &put(&lab, parquet(no_pos)).await, Some(1), 1, None)
            .build()
            .unwrap();
    for (entry, wanted) in [
        (counted, "1 positions, but its manifest entry says 2"),
        (beyond, "ends at"),
        (huge, "at most"),
        (miscounted, "1 rows, but its manifest entry says 2"),
        (negative, "-1 is no row"),
        (no_pos, "no column with field id 2147483545"),
    ] {
        let b = lab.row_delta(a, &[Arc::new(entry)], &[]).await;
        let error = try_ids(&lab, b, &Arc::default()).await.unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
        assert!(error.is_own_fault(), "{error}");
    }

    let gone = positions_of(&lab, &file, &[0]).await;
    lab.table.file_io.delete(gone.file_path()).await.unwrap();
    let b = lab.row_delta(a, &[gone], &[]).await;
    let error = try_ids(&lab, b, &Arc::default()).await.unwrap_err();
    assert_eq!(error.reason(), ReasonCode::DataFileMissing);
}
