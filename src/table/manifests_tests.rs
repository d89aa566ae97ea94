use mergeberg_kernel::reason::ReasonCode;

use super::super::snapshot_writer::{SnapshotChange, SnapshotWriter};
use super::super::writer_test_support::{TestTable, append, carrier_partition, fact_of_new, store};
use super::*;

/// A table whose `main` has `count` snapshots of one pretended file each; ids from 1.
async fn table_with_appends(count: i64) -> TestTable {
    let mut test = TestTable::new();
    let mut writer = SnapshotWriter::on(&store(), &test.table, None).await.unwrap();
    let changes: Vec<SnapshotChange> = (1..=count)
        .map(|at| {
            let carrier = if at % 2 == 0 { "UA" } else { "AA" };
            append(at, [test.pretended_file(&format!("f{at}.parquet"), carrier)])
        })
        .collect();
    let snapshots = writer.add_all(changes).await.unwrap();
    test.commit("main", &snapshots);
    test
}

fn paths(files: &[LiveFile]) -> Vec<&str> {
    files.iter().map(|f| &*f.fact.path).collect()
}

#[tokio::test]
async fn changes_read_only_the_manifests_written_since() {
    let mut test = TestTable::with_properties(&[("commit.manifest-merge.enabled", "false")]);
    let writers_store = store();
    let mut writer = SnapshotWriter::on(&writers_store, &test.table, None).await.unwrap();
    let changes = (1..=200).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer.add_all(changes).await.unwrap();
    test.commit("main", &snapshots);
    let head = test.head("main");
    assert_eq!(test.manifests_on_disk(&head.manifest_list).len(), 200);

    // Read afresh: one list, one manifest; the second time nothing.
    let cold = store();
    for _ in 0..2 {
        let change = cold.changes(&test.table, &head).await.unwrap();
        assert_eq!(change.added.len(), 1);
        assert_eq!(&*change.added[0].path, "f200");
        assert_eq!(cold.counts(), ManifestCounts { lists_read: 1, manifests_read: 1 });
    }
    // What the writer wrote is known to its store.
    writers_store.changes(&test.table, &head).await.unwrap();
    writers_store.live_files(&test.table, &head, &FileScope::Table).await.unwrap();
    assert_eq!(writers_store.counts(), ManifestCounts::default());
}

#[tokio::test]
async fn changes_carry_facts_label_and_record() {
    let test = TestTable::new();
    let store = store();
    let mut writer = SnapshotWriter::on(&store, &test.table, None).await.unwrap();
    let mut change = append(7, [test.pretended_file("a", "UA")]);
    change.summary.insert("mergeberg.operation".to_owned(), r#"{"v":1,"id":"x","op":"append"}"#.to_owned());
    let snapshot = fact_of_new(&writer.add(change).await.unwrap());
    let change = store.changes(&test.table, &snapshot).await.unwrap();
    assert_eq!((change.label.as_str(), change.record.found().unwrap().id.as_str()), ("append", "x"));
    assert_eq!(change.added[0].partition, carrier_partition("UA"));
    assert_eq!((change.added_rows(), change.added[0].bytes), (10, 1000));
    assert!(change.only_adds());
}

#[tokio::test]
async fn live_files_of_a_scope_prune_manifests_and_files() {
    let test = table_with_appends(10).await;
    let head = test.head("main");
    let cold = store();
    let scope = FileScope::Partitions(vec![carrier_partition("UA")]);
    let live = cold.live_files(&test.table, &head, &scope).await.unwrap();
    assert_eq!(paths(&live.data), ["f10.parquet", "f8.parquet", "f6.parquet", "f4.parquet", "f2.parquet"]);
    assert_eq!(cold.counts().manifests_read, 5);
    let first = &live.data[4];
    assert_eq!((first.added_by.0, first.sequence_number, first.file_sequence_number), (2, 2, 2));
    let all = cold.live_files(&test.table, &head, &FileScope::Table).await.unwrap();
    assert_eq!((all.data.len(), cold.counts().manifests_read), (10, 10));
}

#[tokio::test]
async fn delete_manifests_are_listed_and_carried_unchanged() {
    let mut test = table_with_appends(2).await;
    let deletes = test.delete_snapshot(50, &test.head("main"), "pos.parquet").await;
    test.commit("main", &[deletes]);
    let head = test.head("main");
    let store = store();
    let change = store.changes(&test.table, &head).await.unwrap();
    assert!(change.has_delete_files() && change.added.is_empty());

    let mut writer = SnapshotWriter::on(&store, &test.table, Some(&head)).await.unwrap();
    let next = writer.add(append(51, [test.pretended_file("new", "UA")])).await.unwrap();
    let live = store.live_files(&test.table, &fact_of_new(&next), &FileScope::Table).await.unwrap();
    assert_eq!(live.data.len(), 3);
    assert_eq!(paths(&live.deletes), ["pos.parquet"]);
    assert_eq!(live.deletes[0].sequence_number, head.sequence_number);
    let delete_manifests = |list: &str| -> Vec<ManifestFile> {
        let all = test.manifests_on_disk(list);
        all.into_iter().filter(|m| m.content == ManifestContentType::Deletes).collect()
    };
    assert_eq!(delete_manifests(&next.manifest_list), delete_manifests(&head.manifest_list));
}

#[tokio::test]
async fn missing_and_damaged_files_are_named() {
    let test = table_with_appends(1).await;
    let head = test.head("main");
    let manifest = test.manifests_on_disk(&head.manifest_list)[0].manifest_path.clone();
    let reading = || async { store().changes(&test.table, &head).await.unwrap_err() };

    let whole = std::fs::read(&manifest).unwrap();
    for damaged in [&whole[..whole.len() / 2], b"not avro".as_slice(), &[]] {
        std::fs::write(&manifest, damaged).unwrap();
        let error = reading().await;
        assert_eq!(error.reason(), ReasonCode::TableUnreadable, "{error}");
        assert!(error.to_string().contains(&manifest), "{error}");
    }
    std::fs::remove_file(&manifest).unwrap();
    let error = reading().await;
    assert_eq!(error.reason(), ReasonCode::DataFileMissing);
    assert!(error.to_string().contains(&manifest), "{error}");

    std::fs::write(&head.manifest_list, &whole[..40]).unwrap();
    let error = reading().await;
    assert_eq!(error.reason(), ReasonCode::TableUnreadable);
    assert!(error.to_string().contains(&head.manifest_list), "{error}");
    std::fs::remove_file(&head.manifest_list).unwrap();
    assert_eq!(reading().await.reason(), ReasonCode::DataFileMissing);
}

#[tokio::test]
async fn the_cache_stays_within_its_bound() {
    let test = table_with_appends(50).await;
    let bound = 20_000;
    let small = ManifestStore::new(bound);
    for _ in 0..2 {
        let live = small.live_files(&test.table, &test.head("main"), &FileScope::Table).await.unwrap();
        assert_eq!(live.data.len(), 50);
        assert!(small.cached_bytes() <= bound);
    }
    assert!(small.counts().manifests_read > 50);
}
