//! Delete files in candidates, of format v2 and v3.

use iceberg::spec::{FormatVersion, ManifestFile};
use mergeberg_kernel::reason::ReasonCode;

use super::super::deletes::{PositionDeleteWriter, RowsToDelete, VectorWriter};
use super::super::manifests::{FileScope, LiveFile, LiveFiles};
use super::super::writer_test_support::{TestTable, append, delete, fact_of_new, store};
use super::*;

const MERGE_AT_TWO: [(&str, &str); 1] = [("commit.manifest.min-count-to-merge", "2")];
const NO_MERGE: [(&str, &str); 1] = [("commit.manifest-merge.enabled", "false")];

fn table(version: FormatVersion, properties: &[(&str, &str)]) -> TestTable {
    TestTable::with(properties, version, &[("carrier", iceberg::spec::Transform::Identity)])
}

async fn writer_on(store: &ManifestStore, test: &TestTable) -> SnapshotWriter {
    let head = test.table.facts.refs.values().next().map(|_| test.head("main"));
    SnapshotWriter::on(store, &test.table, head.as_ref()).await.unwrap()
}

async fn live(store: &ManifestStore, test: &TestTable, snapshot: &NewSnapshot) -> LiveFiles {
    store.live_files(&test.table, &fact_of_new(snapshot), &FileScope::Table).await.unwrap()
}

/// `main` with one file of three rows a carrier, one snapshot each; the files, oldest first.
async fn three_carriers(test: &mut TestTable, store: &ManifestStore) -> Vec<LiveFile> {
    let mut writer = writer_on(store, test).await;
    let mut snapshots = Vec::new();
    for (id, carrier) in (1..).zip(["UA", "AA", "DL"]) {
        let rows = [1, 2, 3].map(|row| (id * 10 + row, carrier));
        snapshots.push(writer.add(append(id, test.files(&rows).await)).await.unwrap());
    }
    test.commit("main", &snapshots);
    let mut files = live(store, test, &snapshots[2]).await.data;
    files.sort_by_key(|file| file.sequence_number);
    files
}

fn rows(file: &LiveFile, positions: &[u64]) -> RowsToDelete {
    RowsToDelete { data_file: file.clone(), positions: positions.iter().collect() }
}

/// A delete file for one row of each data file: positions in v2, vectors of one Puffin file in v3.
async fn deletes_of(test: &TestTable, files: &[LiveFile]) -> Vec<AddedFile> {
    let rows: Vec<RowsToDelete> = files.iter().map(|file| rows(file, &[0])).collect();
    if test.table.metadata.format_version() == FormatVersion::V3 {
        return VectorWriter::write(&test.table, &rows).await.unwrap().into_iter().map(Into::into).collect();
    }
    let mut added = Vec::new();
    for one in &rows {
        added.push(PositionDeleteWriter::write(&test.table, one).await.unwrap().into());
    }
    added
}

fn row_delta(id: i64, add_deletes: Vec<AddedFile>) -> SnapshotChange {
    SnapshotChange { label: "delete".to_owned(), add_deletes, ..delete(id, []) }
}

fn delete_manifests(test: &TestTable, list: &str) -> Vec<ManifestFile> {
    let all = test.manifests_on_disk(list);
    all.into_iter().filter(|m| m.content == ManifestContentType::Deletes).collect()
}

fn keys(files: &[LiveFile]) -> BTreeSet<DeleteKey> {
    files.iter().map(|file| file.fact.key()).collect()
}

#[tokio::test]
async fn delete_files_are_added_with_the_snapshots_number_and_read_back() {
    for version in [FormatVersion::V2, FormatVersion::V3] {
        let mut test = table(version, &NO_MERGE);
        let store = store();
        let files = three_carriers(&mut test, &store).await;
        let deletes = deletes_of(&test, &files[..2]).await;
        let added = deletes.iter().map(|d| d.fact.key()).collect::<BTreeSet<_>>();
        let snapshot = writer_on(&store, &test).await.add(row_delta(4, deletes)).await.unwrap();

        let manifests = delete_manifests(&test, &snapshot.manifest_list);
        assert_eq!(manifests.len(), 1);
        assert_eq!((manifests[0].sequence_number, manifests[0].min_sequence_number), (4, 4));
        assert_eq!(manifests[0].first_row_id, None);
        let entry = &test.entries_on_disk(&manifests[0])[0];
        assert_eq!((entry.sequence_number, entry.snapshot_id), (None, Some(4)), "inherited (rule D4)");
        test.commit("main", std::slice::from_ref(&snapshot));
        // As it was written, and by someone who reads it from disk.
        for store in [&store, &super::super::writer_test_support::store()] {
            let live = live(store, &test, &snapshot).await;
            assert_eq!((keys(&live.deletes), live.data.len()), (added.clone(), 3));
            let change = store.changes(&test.table, &fact_of_new(&snapshot)).await.unwrap();
            assert_eq!((change.added_deletes.len(), change.added.len(), change.removed.len()), (2, 0, 0));
            let of: BTreeSet<_> = change.added_deletes.iter().filter_map(|d| d.deletes_rows_of()).collect();
            assert_eq!(of, files[..2].iter().map(|f| &f.fact.path).collect(), "{version}");
            let again = store.added(&test.table, &fact_of_new(&snapshot)).await.unwrap().deletes;
            assert_eq!(keys(&again), added);
        }
        if version == FormatVersion::V2 {
            // The crate's own scan applies position deletes.
            assert_eq!(test.ids(SnapshotId(4)).await, [12, 13, 22, 23, 31, 32, 33]);
        }
        let figure = |key: &str| snapshot.summary.get(key).map(String::as_str);
        assert_eq!((figure("added-delete-files"), figure("added-position-deletes")), (Some("2"), Some("2")));
        assert_eq!((figure("total-delete-files"), figure("total-records")), (Some("2"), Some("9")));
        let kind = if version == FormatVersion::V3 { "added-dvs" } else { "added-position-delete-files" };
        assert_eq!((figure(kind), figure("changed-partition-count")), (Some("2"), Some("2")));
    }
}

#[tokio::test]
async fn a_removed_delete_file_leaves_the_others_with_their_numbers() {
    for version in [FormatVersion::V2, FormatVersion::V3] {
        let mut test = table(version, &NO_MERGE);
        let store = store();
        let files = three_carriers(&mut test, &store).await;
        let deletes = deletes_of(&test, &files).await;
        let gone = deletes[1].fact.key();
        let mut writer = writer_on(&store, &test).await;
        let first = writer.add(row_delta(4, deletes)).await.unwrap();
        let change = SnapshotChange { remove_deletes: [gone.clone()].into(), ..row_delta(5, vec![]) };
        let second = writer.add(change).await.unwrap();

        // In v3 all three lie in one file: its other vectors stay.
        let live = live(&store, &test, &second).await;
        assert!(live.deletes.len() == 2 && !keys(&live.deletes).contains(&gone));
        assert!(live.deletes.iter().all(|d| (d.sequence_number, d.added_by.0) == (4, 4)));
        let manifests = delete_manifests(&test, &second.manifest_list);
        assert_eq!((manifests.len(), manifests[0].sequence_number), (1, 5));
        assert_eq!(manifests[0].min_sequence_number, 4, "rule N4");
        let data = |list: &str| -> Vec<ManifestFile> {
            let all = test.manifests_on_disk(list).into_iter();
            all.filter(|m| m.content == ManifestContentType::Data).collect()
        };
        assert_eq!(data(&second.manifest_list), data(&first.manifest_list), "data manifests are not touched");
        assert_eq!(second.summary["removed-delete-files"], "1");
        assert_eq!(
            (second.summary["total-delete-files"].as_str(), &*second.summary["total-position-deletes"]),
            ("2", "2")
        );

        // Rule D8: the next rewrite leaves the removed entry out. Rule D6: it does not come back.
        let other = live.deletes[0].fact.key();
        let change = SnapshotChange { remove_deletes: [other].into(), ..row_delta(6, vec![]) };
        let third = writer.add(change).await.unwrap();
        let entries = test.entries_on_disk(&delete_manifests(&test, &third.manifest_list)[0]);
        assert_eq!(entries.len(), 2);
        let change = SnapshotChange { remove_deletes: [gone].into(), ..row_delta(7, vec![]) };
        let error = writer.add(change).await.unwrap_err();
        assert!(matches!(error, TableError::NotLive { more: 0, .. }), "{error}");
        test.commit("main", &[first, second, third]);
    }
}

#[tokio::test]
async fn rule_d5_vectors_go_with_their_data_file() {
    let mut test = table(FormatVersion::V3, &NO_MERGE);
    let store = store();
    let files = three_carriers(&mut test, &store).await;
    let mut writer = writer_on(&store, &test).await;
    let with_vectors = writer.add(row_delta(4, deletes_of(&test, &files).await)).await.unwrap();
    let removed = writer.add(delete(5, [&files[0].fact.path])).await.unwrap();

    let left = live(&store, &test, &removed).await;
    let of: BTreeSet<_> = left.deletes.iter().filter_map(|d| d.fact.deletes_rows_of().cloned()).collect();
    assert_eq!(of, files[1..].iter().map(|f| f.fact.path.clone()).collect());
    let change = store.changes(&test.table, &fact_of_new(&removed)).await.unwrap();
    assert_eq!((change.removed.len(), change.removed_deletes.len()), (1, 1));
    assert_eq!(change.removed_deletes[0].deletes_rows_of(), Some(&files[0].fact.path));
    assert_eq!((&*removed.summary["removed-dvs"], &*removed.summary["removed-delete-files"]), ("1", "1"));
    test.commit("main", &[with_vectors, removed]);
}

#[tokio::test]
async fn rule_d5_position_deletes_of_v2_stay_until_they_are_named() {
    let mut test = table(FormatVersion::V2, &NO_MERGE);
    let store = store();
    let files = three_carriers(&mut test, &store).await;
    let mut writer = writer_on(&store, &test).await;
    let deletes = deletes_of(&test, &files[..1]).await;
    let named = deletes[0].fact.key();
    writer.add(row_delta(4, deletes)).await.unwrap();
    let removed = writer.add(delete(5, [&files[0].fact.path])).await.unwrap();
    assert_eq!(live(&store, &test, &removed).await.deletes.len(), 1);
    let change = SnapshotChange { remove_deletes: [named].into(), ..row_delta(6, vec![]) };
    let removed = writer.add(change).await.unwrap();
    assert_eq!(live(&store, &test, &removed).await.deletes.len(), 0);
    // The manifest that lost its last entry stays for this snapshot only.
    assert_eq!(delete_manifests(&test, &removed.manifest_list).len(), 1);
    let next = writer.add(append(7, test.files(&[(9, "UA")]).await)).await.unwrap();
    assert_eq!(delete_manifests(&test, &next.manifest_list).len(), 0);
}

#[tokio::test]
async fn a_data_file_has_at_most_one_vector() {
    let mut test = table(FormatVersion::V3, &NO_MERGE);
    let store = store();
    let files = three_carriers(&mut test, &store).await;
    let mut writer = writer_on(&store, &test).await;
    let old = deletes_of(&test, &files[..2]).await;
    let first = writer.add(row_delta(4, old.clone())).await.unwrap();
    test.commit("main", &[first]);

    let larger = VectorWriter::write(&test.table, &[rows(&files[0], &[0, 1])]).await.unwrap();
    let larger: Vec<AddedFile> = larger.into_iter().map(Into::into).collect();
    // Asked from disk as well as from memory.
    for store in [&store, &super::super::writer_test_support::store()] {
        let mut writer = writer_on(store, &test).await;
        let error = writer.add(row_delta(5, larger.clone())).await.unwrap_err();
        assert!(error.to_string().contains("two deletion vectors"), "{error}");
        assert_eq!(error.reason(), ReasonCode::Conflict);
        // In place of the old one it may come.
        let change =
            SnapshotChange { remove_deletes: [old[0].fact.key()].into(), ..row_delta(5, larger.clone()) };
        let snapshot = writer.add(change).await.unwrap();
        let vectors = live(store, &test, &snapshot).await.deletes;
        let mut of: Vec<_> = vectors.iter().map(|v| (v.fact.records, v.sequence_number)).collect();
        of.sort_unstable();
        assert_eq!(of, [(1, 4), (2, 5)]);
    }
    let twice = [
        larger.clone(),
        VectorWriter::write(&test.table, &[rows(&files[0], &[2])])
            .await
            .unwrap()
            .into_iter()
            .map(Into::into)
            .collect(),
    ]
    .concat();
    let change = SnapshotChange { remove_deletes: [old[0].fact.key()].into(), ..row_delta(6, twice) };
    let error = writer_on(&store, &test).await.add(change).await.unwrap_err();
    assert!(error.to_string().contains("two deletion vectors"), "{error}");
}

#[tokio::test]
async fn delete_files_of_the_wrong_kind_are_refused() {
    let (mut v2, mut v3) = (table(FormatVersion::V2, &[]), table(FormatVersion::V3, &[]));
    let store = store();
    let (in_v2, in_v3) = (three_carriers(&mut v2, &store).await, three_carriers(&mut v3, &store).await);
    let positions = deletes_of(&v2, &in_v2[..1]).await;
    let vectors = deletes_of(&v3, &in_v3[..1]).await;
    let data: Vec<AddedFile> = v2.files(&[(7, "UA")]).await.into_iter().map(Into::into).collect();
    let cases = [
        (&v2, row_delta(9, vectors.clone()), "format version 2 lacks"),
        (&v3, row_delta(9, positions.clone()), "deletion vectors only"),
        (&v2, row_delta(9, data), "is a data file"),
        (&v2, append(9, positions.clone()), "is a delete file"),
        (
            &v3,
            SnapshotChange { add_deletes: vectors, ..delete(9, [&in_v3[0].fact.path]) },
            "which goes as a whole",
        ),
    ];
    for (test, change, what) in cases {
        let error = writer_on(&store, test).await.add(change).await.unwrap_err();
        assert!(
            matches!(error, TableError::InvalidChange { .. }) && error.to_string().contains(what),
            "{error}"
        );
    }
    // Rule D6, for delete files too.
    let mut writer = writer_on(&store, &v2).await;
    writer.take_deletes([positions[0].fact.key()]);
    let error = writer.add(row_delta(9, positions.clone())).await.unwrap_err();
    assert!(matches!(error, TableError::PathTaken { .. }), "{error}");
    let both = SnapshotChange { remove_deletes: [positions[0].fact.key()].into(), ..row_delta(9, positions) };
    let error = writer_on(&store, &v2).await.add(both).await.unwrap_err();
    assert!(matches!(error, TableError::PathTaken { .. }), "{error}");
}

#[tokio::test]
async fn rule_l9_delete_manifests_are_merged_apart_from_data_manifests() {
    let mut test = table(FormatVersion::V2, &MERGE_AT_TWO);
    let store = store();
    let files = three_carriers(&mut test, &store).await;
    let mut writer = writer_on(&store, &test).await;
    let mut snapshots = Vec::new();
    let mut counts = Vec::new();
    for (id, file) in (4..).zip(&files) {
        let deletes = deletes_of(&test, std::slice::from_ref(file)).await;
        snapshots.push(writer.add(row_delta(id, deletes)).await.unwrap());
        counts.push(delete_manifests(&test, &snapshots.last().unwrap().manifest_list).len());
    }
    assert_eq!(counts, [1, 1, 1]);
    let merged = &delete_manifests(&test, &snapshots[2].manifest_list)[0];
    assert_eq!((merged.min_sequence_number, merged.sequence_number), (4, 6));
    let statuses: Vec<_> =
        test.entries_on_disk(merged).iter().map(|e| (e.status, e.sequence_number)).collect();
    let existing = |at| (ManifestStatus::Existing, Some(at));
    assert_eq!(statuses, [(ManifestStatus::Added, None), existing(5), existing(4)]);
    // What tells whose rows they delete is still there.
    let cold = super::super::writer_test_support::store();
    let live = live(&cold, &test, &snapshots[2]).await;
    let of: BTreeSet<_> = live.deletes.iter().filter_map(|d| d.fact.deletes_rows_of().cloned()).collect();
    assert_eq!(of, files.iter().map(|f| f.fact.path.clone()).collect());
    let written = writer.written_files();
    test.commit("main", &snapshots);
    assert_eq!(test.ids(SnapshotId(6)).await, [12, 13, 22, 23, 32, 33]);
    let named: BTreeSet<String> = snapshots
        .iter()
        .flat_map(|s| test.manifests_on_disk(&s.manifest_list))
        .map(|m| m.manifest_path)
        .collect();
    assert!(written.manifests.iter().all(|path| named.contains(path)), "nothing left that no list names");
}

#[tokio::test]
async fn rule_d4_a_kept_number_of_a_delete_file_bounds_its_manifest() {
    let mut test = table(FormatVersion::V2, &NO_MERGE);
    let store = store();
    let files = three_carriers(&mut test, &store).await;
    let mut deletes = deletes_of(&test, &files[..2]).await;
    deletes[0].age = FileAge::Kept(2);
    let snapshot = writer_on(&store, &test).await.add(row_delta(4, deletes)).await.unwrap();
    let manifests = delete_manifests(&test, &snapshot.manifest_list);
    assert_eq!((manifests[0].min_sequence_number, manifests[0].sequence_number), (2, 4));
    let numbers: BTreeSet<_> = live(&store, &test, &snapshot)
        .await
        .deletes
        .iter()
        .map(|d| (d.sequence_number, d.file_sequence_number))
        .collect();
    assert_eq!(numbers, [(2, 4), (4, 4)].into());
    let mut late = deletes_of(&test, &files[2..]).await;
    late[0].age = FileAge::Kept(99);
    let error = writer_on(&store, &test).await.add(row_delta(5, late)).await.unwrap_err();
    assert!(error.to_string().contains("of the future"), "{error}");
}
