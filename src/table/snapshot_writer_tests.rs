use iceberg::spec::{
    ManifestFile, NestedField, PrimitiveType, Schema, Transform, Type, UnboundPartitionSpec,
};
use mergeberg_kernel::reason::ReasonCode;

use super::super::manifests::{FileScope, ManifestCounts};
use super::super::writer_test_support::{NOW_MS, TestTable, append, delete, fact_of_new, store};
use super::*;

async fn writer_on(store: &ManifestStore, test: &TestTable) -> SnapshotWriter {
    let head = test.table.facts.refs.values().next().map(|_| test.head("main"));
    SnapshotWriter::on(store, &test.table, head.as_ref()).await.unwrap()
}

fn data_manifests(test: &TestTable, list: &str) -> Vec<ManifestFile> {
    test.manifests_on_disk(list)
}

#[tokio::test]
async fn a_chain_of_append_overwrite_and_delete_reads_back() {
    let mut test = TestTable::new();
    let store = store();
    let first = test.files(&[(1, "UA"), (2, "AA")]).await;
    let second = test.files(&[(3, "UA")]).await;
    let replacement = test.files(&[(10, "UA"), (11, "UA")]).await;
    let ua: Vec<Arc<str>> = [&first[1], &second[0]].map(|f| f.fact.path.clone()).into();
    let aa = first[0].fact.path.clone();

    let mut writer = writer_on(&store, &test).await;
    let mut snapshots = vec![writer.add(append(1, first)).await.unwrap()];
    snapshots.push(writer.add(append(2, second)).await.unwrap());
    let mut overwrite = append(3, replacement);
    overwrite.label = "overwrite".to_owned();
    overwrite.remove = ua.iter().cloned().collect();
    snapshots.push(writer.add(overwrite).await.unwrap());
    snapshots.push(writer.add(delete(4, [&aa])).await.unwrap());
    test.commit("main", &snapshots);

    assert_eq!(test.ids(SnapshotId(1)).await, [1, 2]);
    assert_eq!(test.ids(SnapshotId(2)).await, [1, 2, 3]);
    assert_eq!(test.ids(SnapshotId(3)).await, [2, 10, 11]);
    assert_eq!(test.ids(SnapshotId(4)).await, [10, 11]);
    assert_eq!(store.counts(), ManifestCounts::default());

    let change = store.changes(&test.table, &fact_of_new(&snapshots[2])).await.unwrap();
    let mut removed: Vec<_> = change.removed.iter().map(|f| f.path.clone()).collect();
    removed.sort();
    let mut expected = ua;
    expected.sort();
    assert_eq!((removed, change.added.len()), (expected, 1));
    let total = |at: usize| snapshots[at].summary["total-records"].clone();
    assert_eq!([total(0), total(1), total(2), total(3)], ["2", "3", "3", "2"]);
    let figures = &snapshots[2].summary;
    assert_eq!((figures["deleted-data-files"].as_str(), figures["deleted-records"].as_str()), ("2", "2"));
    assert_eq!(figures["changed-partition-count"], "1");
}

#[tokio::test]
async fn the_next_commit_by_another_process_builds_on_it() {
    let mut test = TestTable::new();
    let files = test.files(&[(1, "UA"), (2, "AA")]).await;
    let snapshot = writer_on(&store(), &test).await.add(append(1, files)).await.unwrap();
    test.commit("main", &[snapshot]);
    // A store that knows nothing: everything comes from disk.
    let store = store();
    let live = store.live_files(&test.table, &test.head("main"), &FileScope::Table).await.unwrap();
    let gone = live.data[0].fact.path.clone();
    let next = writer_on(&store, &test).await.add(delete(2, [&gone])).await.unwrap();
    test.commit("main", &[next]);
    assert_eq!(test.ids(SnapshotId(2)).await.len(), 1);
    assert_eq!(store.counts(), ManifestCounts { lists_read: 1, manifests_read: 1 });
}

#[tokio::test]
async fn manifests_hold_only_what_changed_and_the_rest_is_named_again() {
    let mut test = TestTable::new();
    let mut writer = writer_on(&store(), &test).await;
    let one = writer.add(append(1, [test.pretended_file("a", "UA")])).await.unwrap();
    let two = writer.add(append(2, [test.pretended_file("b", "UA")])).await.unwrap();
    let (before, after) =
        (data_manifests(&test, &one.manifest_list), data_manifests(&test, &two.manifest_list));
    assert_eq!(after[1..], before[..]);
    let names = format!("{}/metadata/{}", test.table.facts.location, writer.maker.run);
    assert_eq!(after[0].manifest_path, format!("{names}-m1.avro"));
    assert!(two.manifest_list.ends_with(&format!("/metadata/snap-2-1-{}.avro", writer.maker.run)));
    // Rule D4: a plain append has no sequence number of its own in the file.
    let entry = &test.entries_on_disk(&after[0])[0];
    assert_eq!((entry.sequence_number, entry.file_sequence_number, entry.snapshot_id), (None, None, Some(2)));
    test.commit("main", &[one, two]);
}

#[tokio::test]
async fn rule_n1_sequence_numbers_grow_past_the_tables_last() {
    let mut test = TestTable::new();
    // A branch moved the table to sequence number 2; `main` has no snapshot yet.
    let mut writer = SnapshotWriter::on(&store(), &test.table, None).await.unwrap();
    let staged: Vec<_> =
        (1..=2).map(|at| append(at, [test.pretended_file(&format!("s{at}"), "UA")])).collect();
    let staged = writer.add_all(staged).await.unwrap();
    test.commit("staging", &staged);
    let mut writer = SnapshotWriter::on(&store(), &test.table, None).await.unwrap();
    let train = (11..=13).map(|at| append(at, [test.pretended_file(&format!("m{at}"), "UA")])).collect();
    let cars = writer.add_all(train).await.unwrap();
    let numbers: Vec<_> = cars.iter().map(|c| (c.sequence_number, c.parent.map(|p| p.0))).collect();
    assert_eq!(numbers, [(3, None), (4, Some(11)), (5, Some(12))]);
    let on_disk = data_manifests(&test, &cars[2].manifest_list);
    assert_eq!(on_disk.iter().map(|m| m.sequence_number).collect::<Vec<_>>(), [5, 4, 3]);
    test.commit("main", &cars);
    assert_eq!(test.table.facts.last_sequence_number, 5);
}

#[tokio::test]
async fn rule_n3_timestamps_never_go_back() {
    let mut test = TestTable::new();
    let mut writer = writer_on(&store(), &test).await;
    let first = SnapshotChange { now_ms: NOW_MS, ..append(1, [test.pretended_file("a", "UA")]) };
    let first = writer.add(first).await.unwrap();
    assert_eq!(first.timestamp_ms, NOW_MS);
    test.commit("main", &[first]);
    // A clock that went back: after last-updated, then after the parent.
    let mut writer = writer_on(&store(), &test).await;
    let last_updated = test.table.facts.last_updated_ms.max(NOW_MS);
    let changes = (2..=3).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let late = writer.add_all(changes).await.unwrap();
    assert_eq!(late.iter().map(|s| s.timestamp_ms).collect::<Vec<_>>(), [last_updated + 1, last_updated + 2]);
    test.commit("main", &late);
}

/// Three files of sequence numbers 1, 2 and 3 in one manifest.
async fn one_manifest_of_three(test: &mut TestTable, store: &ManifestStore) -> Vec<Arc<str>> {
    let mut writer = writer_on(store, test).await;
    let mut snapshots = Vec::new();
    let mut paths = Vec::new();
    for at in 1..=3 {
        let files = test.files(&[(at, "UA")]).await;
        paths.push(files[0].fact.path.clone());
        snapshots.push(writer.add(append(at, files)).await.unwrap());
    }
    test.commit("main", &snapshots);
    assert_eq!(data_manifests(test, &snapshots[2].manifest_list).len(), 1);
    paths
}

const MERGE_AT_THREE: [(&str, &str); 1] = [("commit.manifest.min-count-to-merge", "3")];

#[tokio::test]
async fn rule_n4_min_sequence_number_is_the_minimum_over_live_entries() {
    let mut test = TestTable::with_properties(&MERGE_AT_THREE);
    let store = store();
    let paths = one_manifest_of_three(&mut test, &store).await;
    let minimum = |test: &TestTable, list: &str| {
        let manifests = data_manifests(test, list);
        (manifests.len(), manifests[0].min_sequence_number, manifests[0].deleted_files_count)
    };
    assert_eq!(minimum(&test, &test.head("main").manifest_list), (1, 1, Some(0)));
    let mut writer = writer_on(&store, &test).await;
    // The DELETED entry keeps sequence number 1 and does not count.
    let without_first = writer.add(delete(4, [&paths[0]])).await.unwrap();
    assert_eq!(minimum(&test, &without_first.manifest_list), (1, 2, Some(1)));
    let without_third = writer.add(delete(5, [&paths[2]])).await.unwrap();
    assert_eq!(minimum(&test, &without_third.manifest_list), (1, 2, Some(1)));
    let entries = test.entries_on_disk(&data_manifests(&test, &without_third.manifest_list)[0]);
    let mut kept: Vec<_> = entries
        .iter()
        .map(|e| {
            (e.status, e.snapshot_id.unwrap(), e.sequence_number.unwrap(), e.file_sequence_number.unwrap())
        })
        .collect();
    kept.sort_by_key(|entry| entry.2);
    assert_eq!(kept, [(ManifestStatus::Existing, 2, 2, 2), (ManifestStatus::Deleted, 5, 3, 3)]);
    test.commit("main", &[without_first, without_third]);
    assert_eq!(test.ids(SnapshotId(5)).await, [2]);
}

#[tokio::test]
async fn rule_d8_deleted_entries_are_carried_once() {
    let mut test = TestTable::with_properties(&MERGE_AT_THREE);
    let store = store();
    let paths = one_manifest_of_three(&mut test, &store).await;
    let mut writer = writer_on(&store, &test).await;
    let mut snapshots = Vec::new();
    for (id, path) in (4..).zip(&paths) {
        snapshots.push(writer.add(delete(id, [path])).await.unwrap());
        let manifests = data_manifests(&test, &snapshots.last().unwrap().manifest_list);
        let entries = test.entries_on_disk(&manifests[0]);
        let deleted: Vec<&str> =
            entries.iter().filter(|e| e.status == ManifestStatus::Deleted).map(|e| e.file_path()).collect();
        assert_eq!(deleted, [&**path], "only the file that snapshot {id} removes");
    }
    // The manifest that the last removal emptied is dropped by the next snapshot.
    assert_eq!(data_manifests(&test, &snapshots[2].manifest_list).len(), 1);
    snapshots.push(writer.add(append(9, test.files(&[(9, "UA")]).await)).await.unwrap());
    assert_eq!(data_manifests(&test, &snapshots[3].manifest_list).len(), 1);
    test.commit("main", &snapshots);
    assert_eq!(test.ids(SnapshotId(4)).await, [2, 3]);
    assert_eq!(test.ids(SnapshotId(6)).await, [] as [i64; 0]);
    assert_eq!(test.ids(SnapshotId(9)).await, [9]);
}

#[tokio::test]
async fn rule_d6_no_path_is_added_twice_and_none_comes_back() {
    let mut test = TestTable::new();
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let file = |path: &str| test.pretended_file(path, "UA");
    let first = writer.add(append(1, [file("a"), file("b")])).await.unwrap();
    let taken = |error: TableError| {
        assert_eq!(error.reason(), ReasonCode::Conflict);
        match error {
            TableError::PathTaken { path, .. } => path,
            other => panic!("{other}"),
        }
    };
    assert_eq!(taken(writer.add(append(2, [file("c"), file("a")])).await.unwrap_err()), "a");
    assert_eq!(taken(writer.add(append(2, [file("c"), file("c")])).await.unwrap_err()), "c");
    let both = SnapshotChange { remove: [Arc::from("b")].into(), ..append(2, [file("b")]) };
    assert_eq!(taken(writer.add(both).await.unwrap_err()), "b");
    // A refusal moves nothing: `c` is free, the head is the first snapshot.
    assert_eq!(writer.head(), Some(SnapshotId(1)));
    let second = writer.add(append(2, [file("c")])).await.unwrap();
    let third = writer.add(delete(3, [&Arc::from("a")])).await.unwrap();
    assert_eq!(taken(writer.add(append(4, [file("a")])).await.unwrap_err()), "a");
    let snapshots = [first, second, third];
    test.commit("main", &snapshots);

    let mut writer = writer_on(&store, &test).await;
    writer.take_paths([Arc::from("b")]);
    assert_eq!(taken(writer.add(append(5, [test.pretended_file("b", "UA")])).await.unwrap_err()), "b");
}

#[tokio::test]
async fn removing_what_is_not_live_names_the_path() {
    let mut test = TestTable::new();
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let added: Vec<_> =
        (1..=3).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer.add_all(added).await.unwrap();
    test.commit("main", &snapshots);
    let gone: Arc<str> = Arc::from("f2");
    writer.add(delete(4, [&gone])).await.unwrap();
    let error = writer.add(delete(5, [&gone, &Arc::from("f1")])).await.unwrap_err();
    assert!(matches!(&error, TableError::NotLive { path, more: 0, .. } if path == "f2"), "{error}");
    assert_eq!(error.reason(), ReasonCode::Conflict);
    assert_eq!(writer.head(), Some(SnapshotId(4)));
}

#[tokio::test]
async fn removals_ask_the_cache_before_storage() {
    let mut test = TestTable::new();
    let added = (1..=30).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer_on(&store(), &test).await.add_all(added).await.unwrap();
    test.commit("main", &snapshots);
    let cold = store();
    cold.changes(&test.table, &fact_of_new(&snapshots[4])).await.unwrap();
    let before = cold.counts().manifests_read;
    let mut writer = writer_on(&cold, &test).await;
    writer.add(delete(31, [&Arc::from("f5")])).await.unwrap();
    assert_eq!(cold.counts().manifests_read, before);
}

#[tokio::test]
async fn rule_l9_manifests_are_merged_at_the_tables_thresholds() {
    let mut test = TestTable::with_properties(&MERGE_AT_THREE);
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let mut snapshots = Vec::new();
    let mut counts = Vec::new();
    for at in 1..=6 {
        let files = test.files(&[(at, if at % 2 == 0 { "UA" } else { "AA" })]).await;
        snapshots.push(writer.add(append(at, files)).await.unwrap());
        counts.push(data_manifests(&test, &snapshots.last().unwrap().manifest_list).len());
    }
    assert_eq!(counts, [1, 2, 1, 2, 1, 2]);
    let merged = &data_manifests(&test, &snapshots[4].manifest_list)[0];
    let statuses: Vec<_> = test
        .entries_on_disk(merged)
        .iter()
        .map(|e| (e.status, e.snapshot_id.unwrap(), e.sequence_number))
        .collect();
    let existing = |at: i64| (ManifestStatus::Existing, at, Some(at));
    let expected = [(ManifestStatus::Added, 5, None), existing(4), existing(3), existing(2), existing(1)];
    assert_eq!(statuses, expected);
    assert_eq!((merged.min_sequence_number, merged.sequence_number), (1, 5));
    let change = store.changes(&test.table, &fact_of_new(&snapshots[4])).await.unwrap();
    assert_eq!(change.added.len(), 1);
    test.commit("main", &snapshots);
    assert_eq!(test.ids(SnapshotId(6)).await, [1, 2, 3, 4, 5, 6]);
    // The manifest that the merge took up is gone; every file left is named.
    let written = writer.written_files();
    assert_eq!(test.metadata_files().len(), written.manifests.len() + written.manifest_lists.len());
}

#[tokio::test]
async fn rule_d8_a_merge_drops_older_removals_and_keeps_its_own() {
    let mut test = TestTable::with_properties(&MERGE_AT_THREE);
    let store = store();
    let files = test.files(&[(1, "UA"), (2, "AA"), (3, "DL")]).await;
    let aa = files[0].fact.path.clone();
    let late = test.files(&[(4, "UA")]).await;
    let late_path = late[0].fact.path.clone();
    let mut writer = writer_on(&store, &test).await;
    let mut snapshots = vec![writer.add(append(1, files)).await.unwrap()];
    snapshots.push(writer.add(delete(2, [&aa])).await.unwrap());
    snapshots.push(writer.add(append(3, late)).await.unwrap());
    // Removes a file of another manifest, so only the merge meets the older removal.
    let mut overwrite = append(4, test.files(&[(5, "DL")]).await);
    overwrite.label = "overwrite".to_owned();
    overwrite.remove = [late_path.clone()].into();
    snapshots.push(writer.add(overwrite).await.unwrap());
    let merged = data_manifests(&test, &snapshots[3].manifest_list);
    assert_eq!(merged.len(), 1);
    let entries = test.entries_on_disk(&merged[0]);
    assert!(entries.iter().all(|e| e.file_path() != &*aa));
    let change = store.changes(&test.table, &fact_of_new(&snapshots[3])).await.unwrap();
    assert_eq!(change.removed.iter().map(|f| f.path.clone()).collect::<Vec<_>>(), [late_path]);
    assert_eq!(change.added.len(), 1);
    test.commit("main", &snapshots);
    assert_eq!(test.ids(SnapshotId(4)).await, [1, 3, 5]);
    let written = writer.written_files();
    assert_eq!(test.metadata_files().len(), written.manifests.len() + written.manifest_lists.len());
}

#[tokio::test]
async fn rule_l9_merging_can_be_switched_off() {
    let test = TestTable::with_properties(&[
        ("commit.manifest-merge.enabled", "false"),
        ("commit.manifest.min-count-to-merge", "2"),
    ]);
    let mut writer = writer_on(&store(), &test).await;
    let changes = (1..=5).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer.add_all(changes).await.unwrap();
    assert_eq!(data_manifests(&test, &snapshots[4].manifest_list).len(), 5);
}

#[tokio::test]
async fn evolved_specs_have_manifests_of_their_own() {
    let mut test = TestTable::with_properties(&[("commit.manifest.min-count-to-merge", "2")]);
    let store = store();
    let old = test.files(&[(1, "UA")]).await;
    let snapshot = writer_on(&store, &test).await.add(append(1, old.clone())).await.unwrap();
    test.commit("main", &[snapshot]);
    let spec = UnboundPartitionSpec::builder()
        .with_spec_id(1)
        .add_partition_field(1, "id_bucket".to_owned(), Transform::Bucket(4))
        .unwrap()
        .build();
    let builder = test.builder().add_default_partition_spec(spec).unwrap();
    test.rebuild(builder, test.table.facts.refs.clone());
    let new = test.files(&[(2, "UA")]).await;
    assert_eq!(new[0].spec_id, SpecId(1));
    let late = test.pretended_file("late", "DL");
    let mut both: Vec<AddedFile> = new.into_iter().map(Into::into).collect();
    both.push(late);
    let mut writer = writer_on(&store, &test).await;
    let second = writer.add(append(2, both)).await.unwrap();
    let specs: Vec<_> = data_manifests(&test, &second.manifest_list)
        .iter()
        .map(|m| (m.partition_spec_id, m.added_files_count))
        .collect();
    // Newest spec first; the two of spec 0 became one.
    assert_eq!(specs, [(1, Some(1)), (0, Some(1))]);
    let third = writer.add(delete(3, [&Arc::from("late")])).await.unwrap();
    test.commit("main", &[second, third]);
    assert_eq!(test.ids(SnapshotId(3)).await, [1, 2]);
    assert_eq!(test.head("main").summary["total-records"], "2");
}

#[tokio::test]
async fn manifests_of_an_older_schema_are_rewritten_under_a_header_that_fits() {
    let mut test = TestTable::new();
    let store = store();
    let (one, two) = (test.files(&[(1, "UA")]).await, test.files(&[(2, "AA")]).await);
    let gone = one[0].fact.path.clone();
    let files: Vec<AddedFile> = one.into_iter().chain(two).map(Into::into).collect();
    let snapshot = writer_on(&store, &test).await.add(append(1, files)).await.unwrap();
    test.commit("main", &[snapshot]);
    // `carrier` is dropped from the schema: spec 0 cannot be bound to it any more.
    let schema = Schema::builder()
        .with_schema_id(1)
        .with_fields(vec![NestedField::required(1, "id", Type::Primitive(PrimitiveType::Long)).into()])
        .build()
        .unwrap();
    let unpartitioned = UnboundPartitionSpec::builder().with_spec_id(1).build();
    let builder = test.builder().add_default_partition_spec(unpartitioned).unwrap();
    let builder = builder.add_current_schema(schema).unwrap();
    test.rebuild(builder, test.table.facts.refs.clone());
    let snapshot = writer_on(&store, &test).await.add(delete(2, [&gone])).await.unwrap();
    let manifest = &data_manifests(&test, &snapshot.manifest_list)[0];
    assert_eq!(test.entries_on_disk(manifest).len(), 2);
    test.commit("main", &[snapshot]);
    assert_eq!(test.ids(SnapshotId(2)).await, [2]);
}

#[tokio::test]
async fn rule_d4_a_kept_sequence_number_is_written_and_bounds_the_manifest() {
    let mut test = TestTable::new();
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let added = (1..=3).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer.add_all(added).await.unwrap();
    let compacted = AddedFile { age: FileAge::Kept(2), ..test.pretended_file("compacted", "UA") };
    let mut change = append(4, [compacted]);
    change.label = "replace".to_owned();
    change.remove = [Arc::from("f1"), Arc::from("f2")].into();
    let replaced = writer.add(change).await.unwrap();
    let manifest = &data_manifests(&test, &replaced.manifest_list)[0];
    assert_eq!((manifest.min_sequence_number, manifest.sequence_number), (2, 4));
    let live = store.live_files(&test.table, &fact_of_new(&replaced), &FileScope::Table).await.unwrap();
    let file = live.data.iter().find(|f| &*f.fact.path == "compacted").unwrap();
    assert_eq!((file.sequence_number, file.file_sequence_number), (2, 4));
    test.commit("main", &snapshots);
    let future = AddedFile { age: FileAge::Kept(9), ..test.pretended_file("future", "UA") };
    let error = writer.add(append(5, [future])).await.unwrap_err();
    assert!(matches!(error, TableError::InvalidChange { .. }), "{error}");
}

#[tokio::test]
async fn rule_d4_a_file_is_as_old_as_a_snapshot_ahead_of_it_in_the_train() {
    let test = TestTable::new();
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let as_old = |path: &str, as_snapshot: i64| AddedFile {
        age: FileAge::Of(SnapshotId(as_snapshot)),
        ..test.pretended_file(path, "UA")
    };
    let train = vec![
        append(1, [test.pretended_file("a", "UA")]),
        append(2, [test.pretended_file("b", "UA")]),
        append(3, [as_old("c", 1), as_old("d", 3)]),
    ];
    let last = writer.add_all(train).await.unwrap().pop().unwrap();
    let live = store.live_files(&test.table, &fact_of_new(&last), &FileScope::Table).await.unwrap();
    let numbers: std::collections::BTreeMap<_, _> =
        live.data.iter().map(|f| (f.fact.path.to_string(), f.sequence_number)).collect();
    assert_eq!(numbers.into_values().collect::<Vec<_>>(), [1, 2, 1, 3]);
    let error = writer.add(append(4, [as_old("e", 5)])).await.unwrap_err();
    assert!(error.to_string().contains("snapshot 5, which is not ahead of it"), "{error}");
}

#[tokio::test]
async fn a_failed_train_leaves_the_head_and_reports_its_files() {
    let test = TestTable::new();
    let store = store();
    let mut writer = writer_on(&store, &test).await;
    let train = vec![append(1, [test.pretended_file("a", "UA")]), delete(2, [&Arc::from("nowhere")])];
    let error = writer.add_all(train).await.unwrap_err();
    assert!(matches!(error, TableError::NotLive { .. }), "{error}");
    assert_eq!(writer.head(), None);
    assert_eq!((writer.written_files().manifests.len(), writer.written_files().snapshots.len()), (1, 0));
    let next = writer.add(append(1, [test.pretended_file("a", "UA")])).await.unwrap();
    assert_eq!((next.sequence_number, next.parent), (1, None));
}

#[tokio::test]
async fn added_files_of_a_branch_can_be_added_again() {
    let mut test = TestTable::new();
    let store = store();
    let base = writer_on(&store, &test).await.add(append(1, test.files(&[(1, "UA")]).await)).await.unwrap();
    test.commit("main", &[base]);
    let base = test.head("main");
    let mut branch = SnapshotWriter::on(&store, &test.table, Some(&base)).await.unwrap();
    let source = branch.add(append(2, test.files(&[(2, "UA"), (3, "AA")]).await)).await.unwrap();
    test.commit("ingest/a", &[source]);
    let mut main = SnapshotWriter::on(&store, &test.table, Some(&base)).await.unwrap();
    let other = main.add(append(3, test.files(&[(4, "DL")]).await)).await.unwrap();
    test.commit("main", &[other]);

    let source = test.head("ingest/a");
    let files = store.added_files(&test.table, &source).await.unwrap();
    assert_eq!((files.len(), files[0].added_by, files[0].sequence_number), (2, SnapshotId(2), 2));
    let mut pick = append(5, files);
    pick.summary.insert("source-snapshot-id".to_owned(), "2".to_owned());
    let mut writer = SnapshotWriter::on(&store, &test.table, Some(&test.head("main"))).await.unwrap();
    let picked = writer.add(pick).await.unwrap();
    test.commit("main", &[picked]);
    assert_eq!(test.ids(SnapshotId(5)).await, [1, 2, 3, 4]);
    let head = test.head("main");
    assert_eq!(head.source_snapshot_id(), Some(SnapshotId(2)));
    let again = store.added_files(&test.table, &head).await.unwrap();
    assert!(again.iter().all(|f| f.sequence_number == head.sequence_number));
}

#[tokio::test]
async fn other_formats_labels_and_ids_are_refused() {
    let test = TestTable::with(&[], FormatVersion::V1, &[]);
    let error = SnapshotWriter::on(&store(), &test.table, None).await.err().unwrap();
    assert_eq!(error.reason(), ReasonCode::FormatUnsupported);
    assert!(error.to_string().contains("format version 1"), "{error}");
    let mut test = TestTable::new();
    let mut writer = writer_on(&store(), &test).await;
    let mut unknown = append(1, [test.pretended_file("a", "UA")]);
    unknown.label = "merge".to_owned();
    assert!(writer.add(unknown).await.unwrap_err().to_string().contains("'merge'"));
    let first = writer.add(append(1, [test.pretended_file("a", "UA")])).await.unwrap();
    let error = writer.add(append(1, [test.pretended_file("b", "UA")])).await.unwrap_err();
    assert!(error.to_string().contains("id is taken"), "{error}");
    let wrong_spec = AddedFile { spec_id: SpecId(7), ..test.pretended_file("c", "UA") };
    let error = writer.add(append(2, [wrong_spec])).await.unwrap_err();
    assert!(error.to_string().contains("spec 7"), "{error}");
    test.commit("main", &[first]);
}

#[tokio::test]
async fn rule_l7_a_list_with_an_encrypted_manifest_is_refused() {
    let mut test = TestTable::new();
    let snapshot =
        writer_on(&store(), &test).await.add(append(1, [test.pretended_file("a", "UA")])).await.unwrap();
    test.commit("main", &[snapshot]);
    let head = test.head("main");
    let store = store();
    let mut list =
        store.list(&TableAccess::of(&test.table), &head.manifest_list).await.unwrap().as_ref().clone();
    list[0] = Arc::new(ManifestFile { key_metadata: Some(vec![1]), ..list[0].as_ref().clone() });
    store.keep_list(&head.manifest_list, list);
    let error = SnapshotWriter::on(&store, &test.table, Some(&head)).await.err().unwrap();
    assert_eq!(error.reason(), ReasonCode::FormatUnsupported);
    assert!(error.to_string().contains("is encrypted"), "{error}");
}

#[tokio::test]
async fn metadata_goes_where_the_table_says() {
    let elsewhere = tempfile::tempdir().unwrap();
    let folder = elsewhere.path().to_str().unwrap().to_owned();
    let test = TestTable::with_properties(&[("write.metadata.path", &format!("{folder}/"))]);
    let mut writer = writer_on(&store(), &test).await;
    let snapshot = writer.add(append(1, [test.pretended_file("a", "UA")])).await.unwrap();
    assert!(snapshot.manifest_list.starts_with(&format!("{folder}/snap-1-")));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
}

#[tokio::test]
async fn new_snapshot_ids_are_positive_and_free() {
    let mut test = TestTable::new();
    let mut writer = writer_on(&store(), &test).await;
    let changes = (1..=3).map(|at| append(at, [test.pretended_file(&format!("f{at}"), "UA")])).collect();
    let snapshots = writer.add_all(changes).await.unwrap();
    test.commit("main", &snapshots);
    let facts = &test.table.facts;
    let mut draws = [0, 2, u64::MAX].into_iter();
    assert_eq!(new_snapshot_id(facts, || draws.next().unwrap()), SnapshotId(i64::MAX));
    // A source of randomness that repeats itself ends too.
    assert_eq!(new_snapshot_id(facts, || 2), SnapshotId(4));
}
