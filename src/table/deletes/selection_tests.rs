//! Two snapshots, compared by rows: what is live in both, what went, what came (or came back).

use std::collections::BTreeSet;
use std::sync::Arc;

use datafusion::arrow::array::AsArray;
use datafusion::arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use iceberg::spec::DataFile;
use mergeberg_kernel::change::DeleteKey;
use mergeberg_kernel::ids::SnapshotId;

use super::super::scan::{RowReader, ScanCounters, ScanFile, row_difference};
use super::super::test_orders::{OrdersLab, orders};
use super::test_files::{by_order_id, only};
use super::*;

/// Ids, sorted: kept, added, removed.
type Difference = (Vec<i64>, Vec<i64>, Vec<i64>);

async fn read(reader: &RowReader, files: &[ScanFile]) -> Vec<i64> {
    let counters: Arc<ScanCounters> = Arc::default();
    let mut ids = Vec::new();
    for file in files {
        let before = ids.len();
        let batches: Vec<_> =
            reader.read(file, &[0], &counters).unwrap().try_collect::<Vec<_>>().await.unwrap();
        for batch in batches {
            ids.extend(batch.column(0).as_primitive::<Int64Type>().values());
        }
        assert_eq!(reader.count(file, &counters).await.unwrap(), (ids.len() - before) as u64);
    }
    ids.sort_unstable();
    ids
}

async fn difference(lab: &OrdersLab, before: SnapshotId, after: SnapshotId) -> Difference {
    let (before, after) = (lab.live_files(before).await, lab.live_files(after).await);
    let found = row_difference(before, after).unwrap();
    let reader = RowReader::new(&lab.table, lab.table.facts.current_schema_id).unwrap();
    (read(&reader, &found.kept).await, read(&reader, &found.added).await, read(&reader, &found.removed).await)
}

async fn vector(lab: &OrdersLab, file: &LiveFile, positions: &[u64]) -> Arc<DataFile> {
    let rows = RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() };
    Arc::clone(&VectorWriter::write(&lab.table, &[rows]).await.unwrap()[0].file)
}

async fn positions(lab: &OrdersLab, file: &LiveFile, positions: &[u64]) -> Arc<DataFile> {
    let rows = RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() };
    PositionDeleteWriter::write(&lab.table, &rows).await.unwrap().file
}

fn id_of(file: &DataFile) -> DeleteKey {
    DeleteKey { path: Arc::from(file.file_path()), content_offset: file.content_offset() }
}

#[tokio::test]
async fn a_deleted_row_is_removed_and_the_others_are_kept() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[0, 1, 2, 3]), &[]).await;
    let file = only(lab.live(a).await);
    let b = lab.row_delta(a, &[positions(&lab, &file, &[1]).await], &[]).await;
    assert_eq!(difference(&lab, a, b).await, (vec![0, 2, 3], vec![], vec![1]));
    assert_eq!(difference(&lab, b, a).await, (vec![0, 2, 3], vec![1], vec![]));
    let c = lab.row_delta(b, &[by_order_id(&lab, Some(1), &[Some(3), Some(1)]).await], &[]).await;
    assert_eq!(difference(&lab, b, c).await, (vec![0, 2], vec![], vec![3]));
    assert_eq!(difference(&lab, a, c).await, (vec![0, 2], vec![], vec![1, 3]));
    assert_eq!(difference(&lab, b, b).await, (vec![0, 2, 3], vec![], vec![]));
}

#[tokio::test]
async fn a_vector_in_place_of_another_tells_both_directions() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[0, 1, 2, 3, 4]), &[]).await;
    let file = only(lab.live(a).await);
    let old = vector(&lab, &file, &[0, 1]).await;
    let b = lab.row_delta(a, std::slice::from_ref(&old), &[]).await;
    let c = lab.row_delta(b, &[vector(&lab, &file, &[1, 2]).await], &[id_of(&old)]).await;
    assert_eq!(difference(&lab, b, c).await, (vec![3, 4], vec![0], vec![2]));
    // The same rows deleted by another file: no row came or went.
    let newer = lab.live_deletes(c).await.iter().map(|file| file.fact.key()).collect::<Vec<_>>();
    let d = lab.row_delta(c, &[vector(&lab, &file, &[1, 2]).await], &newer).await;
    assert_eq!(difference(&lab, c, d).await, (vec![0, 3, 4], vec![], vec![]));
}

#[tokio::test]
async fn a_vector_that_hides_position_deletes_is_seen_by_rows() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[0, 1, 2, 3]), &[]).await;
    let file = only(lab.live(a).await);
    let b = lab.row_delta(a, &[positions(&lab, &file, &[0, 1]).await], &[]).await;
    // The position deletes stay in the table, and no reader looks at them any more.
    let c = lab.row_delta(b, &[vector(&lab, &file, &[1, 2]).await], &[]).await;
    assert_eq!(difference(&lab, b, c).await, (vec![3], vec![0], vec![2]));
    let d = lab.row_delta(c, &[vector(&lab, &file, &[1, 3]).await], &[id_of_vector(&lab, c).await]).await;
    assert_eq!(difference(&lab, c, d).await, (vec![0], vec![2], vec![3]));
}

async fn id_of_vector(lab: &OrdersLab, snapshot: SnapshotId) -> DeleteKey {
    let live = lab.live_deletes(snapshot).await;
    live.iter().map(|file| file.fact.key()).find(|key| key.content_offset.is_some()).unwrap()
}

#[tokio::test]
async fn added_and_removed_files_count_with_what_is_deleted_in_them() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &[orders(1, &[0, 1, 2]), orders(2, &[9])].concat(), &[]).await;
    let keys = by_order_id(&lab, Some(1), &[Some(0), Some(7)]).await;
    let b = lab.row_delta(a, &[keys], &[]).await;
    let gone = lab.files_of_day(b, 1).await;
    // A compaction that applies the deletes; the new file is newer than they are.
    let c = lab.snapshot(Some(b), &orders(1, &[1, 2]), &gone).await;
    assert_eq!(difference(&lab, b, c).await, (vec![9], vec![1, 2], vec![1, 2]));
    let d = lab.snapshot(Some(c), &orders(1, &[7]), &[]).await;
    assert_eq!(difference(&lab, c, d).await, (vec![1, 2, 9], vec![7], vec![]));
}

#[tokio::test]
async fn names_of_selections_tell_them_apart() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[0, 1, 2]), &[]).await;
    let file = only(lab.live(a).await);
    let one = vector(&lab, &file, &[0]).await;
    let keys = by_order_id(&lab, Some(1), &[Some(1)]).await;
    let b = lab.row_delta(a, std::slice::from_ref(&one), &[]).await;
    let c = lab.row_delta(b, &[keys], &[]).await;
    let mut names = BTreeSet::new();
    for snapshot in [a, b, c] {
        let found = live_rows(lab.live_files(snapshot).await).unwrap();
        names.insert(found[0].rows.name(found[0].file.sequence_number));
    }
    let difference = row_difference(lab.live_files(a).await, lab.live_files(c).await).unwrap();
    for file in difference.kept.iter().chain(&difference.removed) {
        names.insert(file.rows.name(file.file.sequence_number));
    }
    // Kept rows of the difference are those of the last snapshot.
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names.contains(""));
}
