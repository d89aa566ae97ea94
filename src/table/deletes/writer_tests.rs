use std::sync::Arc;

use datafusion::parquet::file::reader::{FileReader, SerializedFileReader};
use iceberg::puffin::PuffinReader;
use iceberg::spec::{DataContentType, DataFileFormat, Datum};
use mergeberg_kernel::change::FileContent;
use roaring::RoaringTreemap;

use super::super::manifests::LiveFile;
use super::super::test_orders::{OrdersLab, orders};
use super::test_files::{PATH_ID, POS_ID, only};
use super::*;

async fn data_files(lab: &mut OrdersLab) -> Vec<LiveFile> {
    let rows = [orders(1, &(0..10).collect::<Vec<_>>()), orders(2, &(10..30).collect::<Vec<_>>())].concat();
    let snapshot = lab.snapshot(None, &rows, &[]).await;
    let mut files = lab.live(snapshot).await;
    files.sort_by_key(|file| file.fact.records);
    files
}

fn to_delete(file: &LiveFile, positions: &[u64]) -> RowsToDelete {
    RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() }
}

/// As a snapshot would have it.
fn as_live(file: &NewDeleteFile) -> LiveFile {
    LiveFile {
        fact: file.fact.clone(),
        added_by: mergeberg_kernel::ids::SnapshotId(9),
        sequence_number: 9,
        file_sequence_number: 9,
        first_row_id: None,
        file: Arc::clone(&file.file),
        spec_id: file.spec_id,
    }
}

#[tokio::test]
async fn a_position_delete_file_says_which_data_file_it_is_for() {
    let mut lab = OrdersLab::new().await;
    let files = data_files(&mut lab).await;
    let written = PositionDeleteWriter::write(&lab.table, &to_delete(&files[1], &[3, 0, 19])).await.unwrap();
    let entry = &written.file;
    assert_eq!(entry.content_type(), DataContentType::PositionDeletes);
    assert_eq!(entry.file_format(), DataFileFormat::Parquet);
    assert_eq!((entry.record_count(), written.fact.records), (3, 3));
    assert_eq!(entry.file_size_in_bytes(), std::fs::metadata(&*written.fact.path).unwrap().len());
    let path = Datum::string(&*files[1].fact.path);
    assert_eq!((&entry.lower_bounds()[&PATH_ID], &entry.upper_bounds()[&PATH_ID]), (&path, &path));
    assert_eq!(
        (&entry.lower_bounds()[&POS_ID], &entry.upper_bounds()[&POS_ID]),
        (&Datum::long(0), &Datum::long(19))
    );
    assert_eq!(entry.referenced_data_file().as_deref(), Some(&*files[1].fact.path));
    assert_eq!((&written.fact.partition, written.spec_id), (&files[1].fact.partition, files[1].spec_id));
    assert_eq!(entry.partition(), files[1].file.partition());
    let of = Some(Arc::clone(&files[1].fact.path));
    assert_eq!(written.fact.content, FileContent::PositionDeletes { of });

    let counters = ScanCounters::default();
    let positions = read_positions(&lab.table, &as_live(&written), &counters).await.unwrap();
    assert_eq!(positions.of(&files[1].fact.path).unwrap().iter().collect::<Vec<_>>(), [0, 3, 19]);
    assert_eq!(positions.data_files().count(), 1);
    assert_eq!((counters.delete_files(), counters.bytes()), (1, entry.file_size_in_bytes()));

    // Reserved ids, as the format says.
    let reader = SerializedFileReader::new(std::fs::File::open(&*written.fact.path).unwrap()).unwrap();
    let schema = reader.metadata().file_metadata().schema_descr();
    let ids: Vec<i32> = schema.columns().iter().map(|c| c.self_type().get_basic_info().id()).collect();
    assert_eq!(ids, [PATH_ID, POS_ID]);
}

#[tokio::test]
async fn a_long_list_of_positions_stays_small_and_whole() {
    let mut lab = OrdersLab::new().await;
    let mut file = only(data_files(&mut lab).await.into_iter().skip(1).collect());
    // As if it had a million rows; the writer does not open it.
    let entry = test_files::describe(DataContentType::Data, &file.fact.path, Some(2), 1_000_000, None);
    file.file = Arc::new(entry.build().unwrap());
    let positions: RoaringTreemap = (0..1_000_000).step_by(2).collect();
    let rows = RowsToDelete { data_file: file.clone(), positions: positions.clone() };
    let written = PositionDeleteWriter::write(&lab.table, &rows).await.unwrap();
    assert!(written.fact.bytes < 500_000, "{}", written.fact.bytes);
    let counters = ScanCounters::default();
    let read = read_positions(&lab.table, &as_live(&written), &counters).await.unwrap();
    assert_eq!(read.of(&file.fact.path), Some(&positions));
}

#[tokio::test]
async fn one_puffin_file_holds_the_vectors_of_many_data_files() {
    let mut lab = OrdersLab::new().await;
    let files = data_files(&mut lab).await;
    let rows = [to_delete(&files[0], &[9]), to_delete(&files[1], &[0, 1, 2, 3, 4, 5, 6, 7, 19])];
    let written = VectorWriter::write(&lab.table, &rows).await.unwrap();
    assert_eq!(written.len(), 2);
    assert_eq!(written[0].fact.path, written[1].fact.path);
    let counters = ScanCounters::default();
    for (file, rows) in written.iter().zip(&rows) {
        let vector = read_vector(&lab.table, &as_live(file), &counters).await.unwrap();
        assert_eq!(vector, rows.positions);
        assert_eq!(file.fact.deletes_rows_of(), Some(&rows.data_file.fact.path));
        assert_eq!(file.fact.key().content_offset, file.file.content_offset());
    }

    // The footer agrees with the entries, as the format demands.
    let input = lab.table.file_io.new_input(&*written[0].fact.path).unwrap();
    let reader = PuffinReader::new(input);
    let blobs = reader.file_metadata().await.unwrap().blobs().to_vec();
    for (blob, file) in blobs.iter().zip(&written) {
        assert_eq!(blob.blob_type(), "deletion-vector-v1");
        assert_eq!(Some(blob.offset() as i64), file.file.content_offset());
        assert_eq!(Some(blob.length() as i64), file.file.content_size_in_bytes());
        assert_eq!(
            (blob.snapshot_id(), blob.sequence_number(), blob.fields()),
            (-1, -1, &[2_147_483_645][..])
        );
        assert_eq!(blob.properties()["referenced-data-file"], **file.fact.deletes_rows_of().unwrap());
        assert_eq!(blob.properties()["cardinality"], file.file.record_count().to_string());
    }
}

#[tokio::test]
async fn nothing_senseless_is_written() {
    let mut lab = OrdersLab::new().await;
    let files = data_files(&mut lab).await;
    for positions in [&[][..], &[10], &[0, 11]] {
        let rows = to_delete(&files[0], positions);
        assert!(PositionDeleteWriter::write(&lab.table, &rows).await.is_err(), "{positions:?}");
        assert!(VectorWriter::write(&lab.table, &[rows]).await.is_err(), "{positions:?}");
    }
    let twice = [to_delete(&files[0], &[1]), to_delete(&files[0], &[2])];
    let error = VectorWriter::write(&lab.table, &twice).await.unwrap_err().to_string();
    assert!(error.contains("two deletion vectors"), "{error}");
    assert!(VectorWriter::write(&lab.table, &[]).await.unwrap().is_empty());
    let folder = format!("{}/data", lab.table.facts.location);
    let left = std::fs::read_dir(folder)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().contains("-deletes."));
    assert_eq!(left.count(), 0);
}
