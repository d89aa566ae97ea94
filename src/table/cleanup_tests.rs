use mergeberg_kernel::reason::ReasonCode;

use super::super::snapshot_writer::SnapshotWriter;
use super::super::writer_test_support::{TestTable, append, store};
use super::*;

#[tokio::test]
async fn rule_r8_files_of_a_dropped_candidate_are_deleted() {
    let mut test = TestTable::new();
    let store = store();
    let mut writer = SnapshotWriter::on(&store, &test.table, None).await.unwrap();
    let landed = writer.add(append(1, test.files(&[(1, "UA")]).await)).await.unwrap();
    test.commit("main", &[landed]);
    let kept = test.metadata_files();

    let files = test.files(&[(2, "UA")]).await;
    let data_file = files[0].fact.path.clone();
    let mut writer = SnapshotWriter::on(&store, &test.table, Some(&test.head("main"))).await.unwrap();
    writer.add(append(2, files)).await.unwrap();
    let written = WrittenFiles { data_files: vec![data_file.clone()], ..writer.written_files() };
    assert_eq!((written.manifests.len(), written.manifest_lists.len()), (1, 1));
    let deleted = delete_files(&store, &test.table, &written).await.unwrap();
    assert_eq!(deleted, Deleted { deleted: 3, failed: vec![] });
    assert_eq!(test.metadata_files(), kept);
    assert!(!std::fs::exists(&*data_file).unwrap());
    assert_eq!(test.ids(SnapshotId(1)).await, [1]);
}

#[tokio::test]
async fn rule_r8_nothing_is_deleted_that_a_snapshot_names() {
    let mut test = TestTable::new();
    let store = store();
    let files = test.files(&[(1, "UA")]).await;
    let data_file = files[0].fact.path.clone();
    let mut writer = SnapshotWriter::on(&store, &test.table, None).await.unwrap();
    let first = writer.add(append(1, files)).await.unwrap();
    let second = writer.add(append(2, test.files(&[(2, "UA")]).await)).await.unwrap();
    test.commit("staging", &[first, second]);
    let before = test.metadata_files();
    let written = writer.written_files();

    // The snapshot itself is there; then only a snapshot that names its manifest; then only its file.
    let by_manifest = WrittenFiles { snapshots: vec![], manifest_lists: vec![], ..written.clone() };
    let by_file = WrittenFiles { manifests: vec![], data_files: vec![data_file], ..by_manifest.clone() };
    for files in [written, by_manifest, by_file] {
        let error = delete_files(&store, &test.table, &files).await.unwrap_err();
        assert_eq!(error.reason(), ReasonCode::CatalogRefused, "{error}");
        assert_eq!(test.metadata_files(), before);
    }
    assert_eq!(test.ids(SnapshotId(2)).await, [1, 2]);
}

#[tokio::test]
async fn rule_r8_with_gc_disabled_nothing_is_deleted() {
    let test = TestTable::with_properties(&[("gc.enabled", "false")]);
    let store = store();
    let mut writer = SnapshotWriter::on(&store, &test.table, None).await.unwrap();
    writer.add(append(1, test.files(&[(1, "UA")]).await)).await.unwrap();
    let before = test.metadata_files();
    let deleted = delete_files(&store, &test.table, &writer.written_files()).await.unwrap();
    assert_eq!((deleted.deleted, test.metadata_files()), (0, before));
}

#[tokio::test]
async fn rule_r10_missing_files_are_named_in_order() {
    let test = TestTable::new();
    let file = test.files(&[(1, "UA")]).await[0].fact.path.clone();
    let gone = |name: &str| Arc::<str>::from(format!("{}/data/{name}", test.table.facts.location));
    let paths = [gone("one"), file.clone(), gone("two")];
    let missing = missing_files(&test.table, paths).await.unwrap();
    assert_eq!(missing, [gone("one"), gone("two")]);
    assert!(missing_files(&test.table, [file]).await.unwrap().is_empty());
}
