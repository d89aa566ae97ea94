//! Checks on tables with row-level deletes: what is deleted is not there, and deleting is a change.

use super::*;
use crate::table::deletes::test_files::{by_order_id, positions_of_many};
use crate::table::manifests::FileScope;
use crate::table::test_orders::{Order, order, orders};
use crate::validate::RewriteProver;
use mergeberg_kernel::change::RewriteProof;

const KEY: &str = "type = \"duplicate-key\"\ncolumns = [\"order_id\"]";

/// Deletes the rows of `day` at these positions of its only data file.
async fn delete_rows(lab: &mut OrdersLab, on: SnapshotId, day: i32, positions: &[i64]) -> SnapshotId {
    let path = lab.files_of_day(on, day).await.remove(0);
    let rows: Vec<(&str, i64)> = positions.iter().map(|at| (&*path, *at)).collect();
    let deletes = positions_of_many(lab, day, &rows).await;
    lab.row_delta(on, &[deletes], &[]).await
}

async fn delete_ids(lab: &mut OrdersLab, on: SnapshotId, day: Option<i32>, ids: &[i64]) -> SnapshotId {
    let ids: Vec<Option<i64>> = ids.iter().copied().map(Some).collect();
    let deletes = by_order_id(lab, day, &ids).await;
    lab.row_delta(on, &[deletes], &[]).await
}

#[tokio::test]
async fn a_deleted_row_is_no_duplicate_and_no_null_and_is_not_counted() {
    let mut lab = OrdersLab::new().await;
    let rows = vec![order(1), order(1), Order { region: None, ..order(2) }, order(3)];
    let base = lab.snapshot(None, &rows, &[]).await;
    let checks = [
        (format!("{KEY}\ncompare = \"strict\""), ReasonCode::DuplicateKey),
        ("type = \"not-null\"\ncolumns = [\"region\"]\ncompare = \"strict\"".to_owned(), ReasonCode::NotNull),
        ("type = \"row-count\"\nmax = 3".to_owned(), ReasonCode::RowCount),
        (
            "type = \"sql\"\nquery = \"SELECT 1 FROM touched WHERE region IS NULL\"".to_owned(),
            ReasonCode::SqlCheck,
        ),
    ];
    let a = lab.snapshot(Some(base), &orders(1, &[4]), &[]).await;
    let dirty = [car(&lab, 11, Some(base), &[a]).await];
    for (check, code) in &checks {
        assert_eq!(run(&lab, &dirty, check).await.result, failed(*code), "{check}");
    }
    let deleted = delete_rows(&mut lab, base, 1, &[0, 2]).await;
    let a = lab.snapshot(Some(deleted), &orders(1, &[4]), &[]).await;
    let clean = [car(&lab, 12, Some(deleted), &[a]).await];
    for (check, _) in &checks {
        let evidence = run(&lab, &clean, check).await;
        assert_eq!(evidence.result, CheckResult::Passed, "{check}: {evidence:?}");
    }
}

#[tokio::test]
async fn rule_e2_a_car_with_delete_files_does_not_only_add() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    // A merge: the old row of key 1 goes, a new one comes.
    let added = lab.snapshot(Some(base), &orders(1, &[1]), &[]).await;
    let path = lab.files_of_day(base, 1).await.remove(0);
    let deletes = positions_of_many(&lab, 1, &[(&path, 0)]).await;
    let merged = lab.row_delta(added, &[deletes], &[]).await;
    let merge = car(&lab, 11, Some(base), &[added, merged]).await;
    assert!(!merge.only_adds);
    let evidence = run(&lab, &[merge], KEY).await;
    assert_eq!(evidence.result, CheckResult::Passed, "{evidence:?}");
    assert_eq!(evidence.candidate, merged);
    let appended = [car(&lab, 12, Some(base), &[added]).await];
    assert_eq!(run(&lab, &appended, KEY).await.result, failed(ReasonCode::DuplicateKey));
}

#[tokio::test]
async fn rule_e4_partitions_of_delete_files_are_in_the_scope() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1, 2]), orders(2, &[3])].concat(), &[]).await;
    let emptied = delete_ids(&mut lab, base, Some(2), &[3]).await;
    let cars = [car(&lab, 11, Some(base), &[emptied]).await];
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmin = 1").await;
    assert_eq!(evidence.result, failed(ReasonCode::RowCount));
    assert_eq!((measured(&evidence, "rows"), measured(&evidence, "base rows")), ("0", "1"));

    // The other way: the delete file goes, and its row comes back.
    let removed: Vec<_> = lab.live_deletes(emptied).await.iter().map(|file| file.fact.key()).collect();
    let restored = lab.row_delta(emptied, &[], &removed).await;
    let cars = [car(&lab, 12, Some(emptied), &[restored]).await];
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmax-added = 0").await;
    assert_eq!(evidence.result, failed(ReasonCode::RowCount));
    assert_eq!((measured(&evidence, "rows"), measured(&evidence, "added rows")), ("1", "1"));
}

#[tokio::test]
async fn rule_e4_a_global_equality_delete_has_everything_in_its_scope() {
    let mut lab = OrdersLab::new().await;
    lab.add_unpartitioned_spec();
    let base = lab.snapshot(None, &[orders(1, &[1, 2]), orders(2, &[3, 4])].concat(), &[]).await;
    let deleted = delete_ids(&mut lab, base, None, &[2, 3]).await;
    let cars = [car(&lab, 11, Some(base), &[deleted]).await];
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmin = 3").await;
    assert_eq!(evidence.result, failed(ReasonCode::RowCount));
    assert_eq!((measured(&evidence, "rows"), measured(&evidence, "base rows")), ("2", "4"));
    // It is in the scope of any partition.
    let a = lab.snapshot(Some(deleted), &orders(1, &[5]), &[]).await;
    let cars = [car(&lab, 12, Some(deleted), &[a]).await];
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmin = 2\nmax = 2").await;
    assert_eq!(evidence.result, CheckResult::Passed, "{evidence:?}");
}

#[tokio::test]
async fn positions_are_counted_without_reading_rows_and_keys_by_reading_them() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let a = delete_rows(&mut lab, base, 1, &[0]).await;
    let b = delete_ids(&mut lab, a, Some(1), &[1, 3]).await;
    let toml = "type = \"row-count\"\nmin = 0";
    let by_position = run(&lab, &[car(&lab, 11, Some(base), &[a]).await], toml).await;
    assert_eq!((measured(&by_position, "rows"), by_position.rows_scanned), ("2", 0));
    assert!(by_position.bytes_scanned > 0);
    let by_key = run(&lab, &[car(&lab, 12, Some(a), &[b]).await], toml).await;
    assert_eq!((measured(&by_key, "rows"), measured(&by_key, "base rows")), ("1", "2"));
    assert_eq!(by_key.rows_scanned, 6);
    assert_eq!((measured(&by_position, "delete files"), measured(&by_key, "delete files")), ("1", "2"));
}

#[tokio::test]
async fn only_delete_files_that_cannot_be_read_stop_a_check() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1, 9]), orders(2, &[2])].concat(), &[]).await;
    let path = lab.files_of_day(base, 1).await.remove(0);
    let unreadable = crate::table::deletes::test_files::unreadable_positions(&lab, &path, 1).await;
    let deletes = lab.row_delta(base, &[unreadable], &[]).await;
    let a = lab.snapshot(Some(deletes), &orders(1, &[3]), &[]).await;
    let day_1 = [car(&lab, 11, Some(deletes), &[a]).await];
    let b = lab.snapshot(Some(deletes), &orders(2, &[4]), &[]).await;
    let day_2 = [car(&lab, 12, Some(deletes), &[b]).await];
    for check in [
        KEY,
        "type = \"row-count\"\nmax = 100",
        "type = \"sql\"\nquery = \"SELECT 1 FROM touched WHERE order_id < 0\"",
    ] {
        let evidence = run(&lab, &day_1, check).await;
        assert!(could_not_run(&evidence).contains("it is no ORC file"), "{check}: {evidence:?}");
        // They do not reach other partitions.
        assert_eq!(run(&lab, &day_2, check).await.result, CheckResult::Passed, "{check}");
    }
}

/// What the worker asks the prover: both snapshots in the scope of what the later one changed.
async fn proof(lab: &OrdersLab, snapshot: SnapshotId) -> RewriteProof {
    let prover = RewriteProver::new(Arc::new(Engine::with_bounds(2, TEST_MEMORY_BYTES).unwrap()));
    let fact = lab.table.facts.snapshots.get(snapshot).unwrap();
    let parent = lab.table.facts.snapshots.get(fact.parent.unwrap()).unwrap();
    let change = lab.store.changes(&lab.table, fact).await.unwrap();
    let scope = FileScope::Partitions(change.partitions().cloned().collect());
    let before = lab.store.live_files(&lab.table, parent, &scope).await.unwrap();
    let after = lab.store.live_files(&lab.table, fact, &scope).await.unwrap();
    let equal = prover.equal_counts(&lab.table, before.clone(), after.clone()).await.unwrap();
    let proof = prover.prove(&lab.table, before, after).await.unwrap();
    assert!(equal || proof == RewriteProof::None);
    proof
}

#[tokio::test]
async fn rule_c5_live_rows_are_what_a_rewrite_must_keep() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3, 4]), &[]).await;
    let deleted = delete_rows(&mut lab, base, 1, &[0]).await;
    let deleted = delete_ids(&mut lab, deleted, Some(1), &[4]).await;
    let old = lab.files_of_day(deleted, 1).await;
    let compacted = lab.snapshot(Some(deleted), &orders(1, &[3, 2]), &old).await;
    assert_eq!(proof(&lab, compacted).await, RewriteProof::Content);
    // One that forgot the deletes brings rows back; one that changed a row has equal counts.
    let careless = lab.snapshot(Some(deleted), &orders(1, &[1, 2, 3, 4]), &old).await;
    assert_eq!(proof(&lab, careless).await, RewriteProof::None);
    let changed = lab.snapshot(Some(deleted), &orders(1, &[2, 9]), &old).await;
    assert_eq!(proof(&lab, changed).await, RewriteProof::None);
}

#[tokio::test]
async fn rule_c5_rewritten_delete_files_change_no_row() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let a = delete_rows(&mut lab, base, 1, &[0]).await;
    assert_eq!(proof(&lab, a).await, RewriteProof::None);
    let b = delete_rows(&mut lab, a, 1, &[2]).await;
    let path = lab.files_of_day(b, 1).await.remove(0);
    let old: Vec<_> = lab.live_deletes(b).await.iter().map(|file| file.fact.key()).collect();
    let merged = positions_of_many(&lab, 1, &[(&path, 0), (&path, 2)]).await;
    let c = lab.row_delta(b, &[merged], &old).await;
    assert_eq!(proof(&lab, c).await, RewriteProof::Content);
    let other = positions_of_many(&lab, 1, &[(&path, 0), (&path, 1)]).await;
    let d = lab.row_delta(b, &[other], &old).await;
    assert_eq!(proof(&lab, d).await, RewriteProof::None);
}

#[tokio::test]
async fn a_reconciliation_adds_up_live_rows() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("days.csv"), "day,n,amount\n1,2,2.0\n").unwrap();
    let toml = "type = \"reconciliation\"\nmode = \"when-complete\"\nby = [\"day\"]\n\
                upstream = { file = \"days.csv\" }\ncount = \"n\"\nsums = { amount = \"amount\" }";
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let deleted = delete_ids(&mut lab, base, Some(1), &[2]).await;
    let cars = [car(&lab, 11, Some(base), &[deleted]).await];
    let evidence = run_for(&lab, &cars, toml, &[0], folder.path(), &Tables::default()).await.remove(0);
    assert_eq!(evidence.result, CheckResult::Passed, "{evidence:?}");
    let more = delete_ids(&mut lab, deleted, Some(1), &[3]).await;
    let cars = [car(&lab, 12, Some(deleted), &[more]).await];
    let evidence = run_for(&lab, &cars, toml, &[0], folder.path(), &Tables::default()).await.remove(0);
    assert_eq!(evidence.result, failed(ReasonCode::Reconciliation), "{evidence:?}");
}
