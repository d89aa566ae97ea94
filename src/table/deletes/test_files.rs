//! Delete files as engines write them, for tests: shapes that our own writers never give.

use std::collections::HashMap;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{Field, Schema};
use datafusion::parquet::arrow::{ArrowWriter, PARQUET_FIELD_ID_META_KEY};
use iceberg::spec::{DataContentType, DataFile, DataFileBuilder, DataFileFormat, Literal, Struct};

use super::super::manifests::LiveFile;
use super::super::test_orders::OrdersLab;

pub const PATH_ID: i32 = 2_147_483_546;
pub const POS_ID: i32 = 2_147_483_545;

/// A file on disk with its bytes, wherever the table's data is.
pub async fn put(lab: &OrdersLab, bytes: Vec<u8>) -> String {
    let path = format!("{}/data/{}.parquet", lab.table.facts.location, uuid::Uuid::now_v7());
    lab.table.file_io.new_output(&path).unwrap().write(bytes.into()).await.unwrap();
    path
}

/// Columns with field ids, `None` for a column without.
pub fn parquet(columns: Vec<(Option<i32>, &str, ArrayRef)>) -> Vec<u8> {
    let fields: Vec<Field> = columns
        .iter()
        .map(|(id, name, values)| {
            let metadata = id.map(|id| (PARQUET_FIELD_ID_META_KEY.to_owned(), id.to_string()));
            Field::new(*name, values.data_type().clone(), true)
                .with_metadata(metadata.into_iter().collect::<HashMap<_, _>>())
        })
        .collect();
    let schema = Arc::new(Schema::new(fields));
    let values = columns.into_iter().map(|(_, _, values)| values).collect();
    let batch = RecordBatch::try_new(schema.clone(), values).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), schema, None).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

pub fn positions_columns(rows: &[(&str, i64)]) -> Vec<(Option<i32>, &'static str, ArrayRef)> {
    let paths: ArrayRef = Arc::new(StringArray::from_iter_values(rows.iter().map(|(path, _)| path)));
    let positions: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|(_, at)| *at)));
    vec![(Some(PATH_ID), "file_path", paths), (Some(POS_ID), "pos", positions)]
}

/// `day`: the partition; `None` is the unpartitioned spec.
pub fn tuple(day: Option<i32>) -> Struct {
    day.map_or_else(Struct::empty, |day| Struct::from_iter([Some(Literal::int(day))]))
}

pub fn describe(
    content: DataContentType,
    path: &str,
    day: Option<i32>,
    rows: usize,
    ids: Option<Vec<i32>>,
) -> DataFileBuilder {
    let mut builder = DataFileBuilder::default();
    builder
        .content(content)
        .file_path(path.to_owned())
        .file_format(DataFileFormat::Parquet)
        .partition(tuple(day))
        .partition_spec_id(i32::from(day.is_none()))
        .record_count(rows as u64)
        .file_size_in_bytes(1000)
        .equality_ids(ids);
    builder
}

/// A position-delete file whose entry does not say which data files it speaks of.
pub async fn positions_of_many(lab: &OrdersLab, day: i32, rows: &[(&str, i64)]) -> Arc<DataFile> {
    let path = put(lab, parquet(positions_columns(rows))).await;
    Arc::new(describe(DataContentType::PositionDeletes, &path, Some(day), rows.len(), None).build().unwrap())
}

/// An equality-delete file; the columns with ids are compared, `more` are not.
pub async fn equality(
    lab: &OrdersLab,
    day: Option<i32>,
    columns: Vec<(i32, ArrayRef)>,
    more: Vec<(i32, ArrayRef)>,
) -> Arc<DataFile> {
    let ids: Vec<i32> = columns.iter().map(|(id, _)| *id).collect();
    let rows = columns[0].1.len();
    // Names of another time: only the ids count.
    const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
    let all = more.into_iter().chain(columns);
    let columns = all.zip(NAMES).map(|((id, values), name)| (Some(id), name, values)).collect();
    let path = put(lab, parquet(columns)).await;
    let entry = describe(DataContentType::EqualityDeletes, &path, day, rows, Some(ids));
    Arc::new(entry.build().unwrap())
}

/// Deletes of order ids in a day.
pub async fn by_order_id(lab: &OrdersLab, day: Option<i32>, ids: &[Option<i64>]) -> Arc<DataFile> {
    let values: ArrayRef = Arc::new(ids.iter().copied().collect::<Int64Array>());
    equality(lab, day, vec![(1, values)], Vec::new()).await
}

/// The only data file of a list.
pub fn only(files: Vec<LiveFile>) -> LiveFile {
    assert_eq!(files.len(), 1);
    files.into_iter().next().unwrap()
}

/// Position deletes in a file that is none of its format.
pub async fn unreadable_positions(lab: &OrdersLab, data_file: &str, day: i32) -> Arc<DataFile> {
    let path = put(lab, b"no file of any format".to_vec()).await;
    let mut entry = describe(DataContentType::PositionDeletes, &path, Some(day), 1, None);
    entry.file_format(DataFileFormat::Orc).referenced_data_file(Some(data_file.to_owned()));
    Arc::new(entry.build().unwrap())
}
