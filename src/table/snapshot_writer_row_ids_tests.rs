//! Row ids of candidates (rule N2), and numbers of random chains.

use std::collections::HashMap;

use iceberg::spec::{FormatVersion, ManifestFile, Transform};
use proptest::prelude::*;

use super::super::manifests::FileScope;
use super::super::writer_test_support::{TestTable, append, delete, fact_of_new, store};
use super::*;

fn table(version: FormatVersion, properties: &[(&str, &str)]) -> TestTable {
    TestTable::with(properties, version, &[("carrier", Transform::Identity)])
}

async fn writer_on(store: &ManifestStore, test: &TestTable, branch: &str) -> SnapshotWriter {
    let head = test.table.facts.head(&mergeberg_kernel::ids::RefName::new(branch)).map(|_| test.head(branch));
    SnapshotWriter::on(store, &test.table, head.as_ref()).await.unwrap()
}

fn range(snapshot: &NewSnapshot) -> (i64, i64) {
    snapshot.row_range.map(|range| (range.first_row_id, range.added_rows)).unwrap()
}

/// First row id of each live file, read from disk.
async fn first_ids(test: &TestTable, snapshot: &NewSnapshot) -> BTreeMap<String, Option<i64>> {
    let live = store().live_files(&test.table, &fact_of_new(snapshot), &FileScope::Table).await.unwrap();
    live.data.iter().map(|file| (file.fact.path.to_string(), file.first_row_id)).collect()
}

fn ids(pairs: &[(&str, i64)]) -> BTreeMap<String, Option<i64>> {
    pairs.iter().map(|(path, id)| ((*path).to_owned(), Some(*id))).collect()
}

fn manifest_ids(manifests: &[ManifestFile]) -> Vec<Option<u64>> {
    manifests.iter().map(|manifest| manifest.first_row_id).collect()
}

#[tokio::test]
async fn rule_n2_each_car_takes_up_where_the_one_before_ended() {
    let mut test = table(FormatVersion::V3, &[]);
    let mut writer = writer_on(&store(), &test, "main").await;
    let train = vec![
        append(1, [test.pretended_rows("a", "UA", 4), test.pretended_rows("b", "AA", 5)]),
        append(2, [test.pretended_rows("c", "UA", 6)]),
    ];
    let cars = writer.add_all(train).await.unwrap();
    assert_eq!(cars.iter().map(range).collect::<Vec<_>>(), [(0, 9), (9, 6)]);
    test.commit("main", &cars);
    assert_eq!(test.table.facts.next_row_id, Some(15));
    assert_eq!(first_ids(&test, &cars[1]).await, ids(&[("a", 0), ("b", 4), ("c", 9)]));

    // A branch takes ids too; `main` goes on after it.
    let mut branch = SnapshotWriter::on(&store(), &test.table, Some(&test.head("main"))).await.unwrap();
    let staged = branch.add(append(3, [test.pretended_rows("d", "UA", 7)])).await.unwrap();
    test.commit("ingest/a", &[staged]);
    let store = store();
    let mut writer = writer_on(&store, &test, "main").await;
    let picked = store.added_files(&test.table, &test.head("ingest/a")).await.unwrap();
    assert_eq!(picked[0].first_row_id, Some(15));
    let pick = writer.add(append(4, picked)).await.unwrap();
    assert_eq!(range(&pick), (22, 7));
    // Added again: the entry has no id of its own and gets a new one.
    let newest = &test.manifests_on_disk(&pick.manifest_list)[0];
    assert_eq!(test.entries_on_disk(newest)[0].data_file().first_row_id(), None);
    assert_eq!(first_ids(&test, &pick).await["d"], Some(22));
    test.commit("main", &[pick]);
    assert_eq!(test.table.facts.next_row_id, Some(29));
}

#[tokio::test]
async fn rule_n2_a_file_with_an_id_of_its_own_loses_it_when_it_is_added_again() {
    let mut test = table(FormatVersion::V3, &[]);
    let mut file = test.pretended_rows("a", "UA", 4);
    file.file = row_ids::with_first_row_id(&file.file, Some(1_000), 0).unwrap();
    let snapshot = writer_on(&store(), &test, "main").await.add(append(1, [file])).await.unwrap();
    assert_eq!(first_ids(&test, &snapshot).await, ids(&[("a", 0)]));
    test.commit("main", &[snapshot]);
}

#[tokio::test]
async fn rule_n2_the_first_snapshot_after_an_upgrade_numbers_everything() {
    let mut test = table(FormatVersion::V2, &[("commit.manifest-merge.enabled", "false")]);
    let store = store();
    let mut writer = writer_on(&store, &test, "main").await;
    let two = vec![
        append(1, [test.pretended_rows("a", "UA", 4)]),
        append(2, [test.pretended_rows("b", "AA", 5), test.pretended_rows("c", "AA", 6)]),
    ];
    let mut snapshots = writer.add_all(two).await.unwrap();
    assert!(snapshots.iter().all(|snapshot| snapshot.row_range.is_none()));
    let parent = fact_of_new(&snapshots[1]);
    test.commit("main", &snapshots);
    snapshots = vec![test.delete_snapshot(3, &parent, "pos.parquet").await];
    test.commit("main", &snapshots);
    let upgraded = test.builder().upgrade_format_version(FormatVersion::V3).unwrap();
    let refs = test.table.facts.refs.clone();
    test.rebuild(upgraded, refs);
    assert_eq!(test.table.facts.next_row_id, Some(0));

    let before = test.head("main");
    let mut branch = writer_on(&store, &test, "main").await;
    let staged = branch.add(append(4, [test.pretended_rows("s", "UA", 1)])).await.unwrap();
    assert_eq!(range(&staged), (0, 16));
    assert_eq!(first_ids(&test, &staged).await, ids(&[("s", 0), ("b", 1), ("c", 6), ("a", 12)]));
    // Data manifests only, and the old list stays as it is.
    assert_eq!(
        manifest_ids(&test.manifests_on_disk(&staged.manifest_list)),
        [Some(0), Some(1), Some(12), None]
    );
    assert!(test.manifests_on_disk(&before.manifest_list).iter().all(|m| m.first_row_id.is_none()));
    test.commit("ingest/a", &[staged]);
    // `main` numbers the same manifests for itself.
    let mut main = writer_on(&store, &test, "main").await;
    let landed = main.add(append(5, [test.pretended_rows("m", "UA", 2)])).await.unwrap();
    assert_eq!(range(&landed), (16, 17));
    assert_eq!(first_ids(&test, &landed).await, ids(&[("m", 16), ("b", 18), ("c", 23), ("a", 29)]));
    // What is numbered once stays so, also in a rewritten manifest.
    let gone: Arc<str> = Arc::from("b");
    let next = main.add(delete(6, [&gone])).await.unwrap();
    assert_eq!(first_ids(&test, &next).await, ids(&[("m", 16), ("c", 23), ("a", 29)]));
    test.commit("main", &[landed, next]);
}

#[tokio::test]
async fn rule_n2_files_that_are_rewritten_keep_their_ids() {
    let mut test = table(FormatVersion::V3, &[]);
    let store = store();
    let mut writer = writer_on(&store, &test, "main").await;
    let files = [("a", 4), ("b", 5), ("c", 6)].map(|(path, rows)| test.pretended_rows(path, "UA", rows));
    let first = writer.add(append(1, files)).await.unwrap();
    let gone: Arc<str> = Arc::from("b");
    let second = writer.add(delete(2, [&gone])).await.unwrap();

    // Java counts the rows of a rewritten manifest, though they have ids: none is given twice.
    assert_eq!(range(&second), (15, 10));
    let manifest = &test.manifests_on_disk(&second.manifest_list)[0];
    assert_eq!(manifest.first_row_id, Some(15));
    let entries: Vec<_> = test
        .entries_on_disk(manifest)
        .iter()
        .map(|entry| (entry.file_path().to_owned(), entry.status, entry.data_file().first_row_id()))
        .collect();
    let expected = [
        ("a", ManifestStatus::Existing, Some(0)),
        ("c", ManifestStatus::Existing, Some(9)),
        ("b", ManifestStatus::Deleted, Some(4)),
    ];
    assert_eq!(entries, expected.map(|(path, status, id)| (path.to_owned(), status, id)));
    let third = writer.add(append(3, [test.pretended_rows("d", "UA", 1)])).await.unwrap();
    assert_eq!(first_ids(&test, &third).await, ids(&[("a", 0), ("c", 9), ("d", 25)]));
    test.commit("main", &[first, second, third]);
    assert_eq!(test.table.facts.next_row_id, Some(26));
}

#[tokio::test]
async fn rule_n2_merged_files_keep_their_ids_and_new_ones_inherit() {
    let mut test = table(FormatVersion::V3, &[("commit.manifest.min-count-to-merge", "3")]);
    let store = store();
    let mut writer = writer_on(&store, &test, "main").await;
    let train = [("a", 4), ("b", 5), ("c", 6)].into_iter().zip(1..);
    let train = train.map(|((path, rows), id)| append(id, [test.pretended_rows(path, "UA", rows)])).collect();
    let cars = writer.add_all(train).await.unwrap();
    assert_eq!(cars.iter().map(range).collect::<Vec<_>>(), [(0, 4), (4, 5), (9, 15)]);
    let manifests = test.manifests_on_disk(&cars[2].manifest_list);
    assert_eq!(manifest_ids(&manifests), [Some(9)]);
    let own: Vec<_> =
        test.entries_on_disk(&manifests[0]).iter().map(|entry| entry.data_file().first_row_id()).collect();
    assert_eq!(own, [None, Some(4), Some(0)]);
    assert_eq!(first_ids(&test, &cars[2]).await, ids(&[("a", 0), ("b", 4), ("c", 9)]));
    test.commit("main", &cars);

    // A rewrite and a merge of it in the same snapshot: ids that the first wrote out, the second keeps.
    let mut writer = writer_on(&store, &test, "main").await;
    let train = vec![append(4, [test.pretended_rows("d", "UA", 1)]), {
        let mut change = append(5, [test.pretended_rows("e", "UA", 1)]);
        change.label = "overwrite".to_owned();
        change.remove = [Arc::from("b")].into();
        change
    }];
    let cars = writer.add_all(train).await.unwrap();
    assert_eq!(test.manifests_on_disk(&cars[1].manifest_list).len(), 1);
    assert_eq!(first_ids(&test, &cars[1]).await, ids(&[("a", 0), ("c", 9), ("d", 24), ("e", 25)]));
    test.commit("main", &cars);
}

/// One step of a random chain: files to add by their rows, and which of the live files to remove.
#[derive(Clone, Debug)]
struct Step {
    add: Vec<u64>,
    remove: Vec<prop::sample::Index>,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let add = prop::collection::vec(1_u64..50, 0..4);
    let remove = prop::collection::vec(any::<prop::sample::Index>(), 0..3);
    prop::collection::vec((add, remove).prop_map(|(add, remove)| Step { add, remove }), 1..9)
}

/// What a file keeps for life.
type Numbers = (i64, i64, i64, Option<i64>);

async fn check_chain(version: FormatVersion, min_count: usize, steps: Vec<Step>) {
    let min_count = min_count.to_string();
    let mut test = table(version, &[("commit.manifest.min-count-to-merge", &min_count)]);
    let mut live: Vec<Arc<str>> = Vec::new();
    let mut changes = Vec::new();
    let mut expected: Vec<BTreeSet<Arc<str>>> = Vec::new();
    for (id, step) in (1..).zip(steps) {
        let mut gone: BTreeSet<Arc<str>> = BTreeSet::new();
        if !live.is_empty() {
            gone.extend(step.remove.iter().map(|index| index.get(&live).clone()));
        }
        live.retain(|path| !gone.contains(path));
        let mut add = Vec::new();
        for (at, rows) in step.add.iter().enumerate() {
            let file = test.pretended_rows(&format!("f{id}-{at}"), ["UA", "AA"][at % 2], *rows);
            live.push(file.fact.path.clone());
            add.push(file);
        }
        changes.push(SnapshotChange { label: "overwrite".to_owned(), remove: gone, ..append(id, add) });
        expected.push(live.iter().cloned().collect());
    }
    let snapshots = writer_on(&store(), &test, "main").await.add_all(changes).await.unwrap();

    let mut numbers: HashMap<Arc<str>, Numbers> = HashMap::new();
    let mut next_row_id = (version == FormatVersion::V3).then_some(0);
    let cold = store();
    for (snapshot, expected) in snapshots.iter().zip(expected) {
        assert_eq!(snapshot.row_range.map(|range| range.first_row_id), next_row_id, "without gaps");
        let end = snapshot.row_range.and_then(|range| range.end());
        let files =
            cold.live_files(&test.table, &fact_of_new(snapshot), &FileScope::Table).await.unwrap().data;
        assert_eq!(files.iter().map(|file| file.fact.path.clone()).collect::<BTreeSet<_>>(), expected);
        let mut ranges: Vec<(i64, i64)> = Vec::new();
        for file in &files {
            let own = (file.added_by.0, file.sequence_number, file.file_sequence_number, file.first_row_id);
            let known = *numbers.entry(file.fact.path.clone()).or_insert(own);
            assert_eq!(known, own, "numbers of {} in snapshot {}", file.fact.path, snapshot.id);
            let added_here = file.added_by == snapshot.id;
            assert_eq!(added_here, file.sequence_number == snapshot.sequence_number);
            assert_eq!(file.first_row_id.is_some(), version == FormatVersion::V3);
            if let (Some(first), Some(start), Some(end)) = (file.first_row_id, next_row_id, end) {
                ranges.push((first, first + file.fact.records));
                assert!(!added_here || (start <= first && first + file.fact.records <= end));
            }
        }
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no id twice: {ranges:?}");
        for manifest in test.manifests_on_disk(&snapshot.manifest_list) {
            let of_live: Vec<i64> = test
                .entries_on_disk(&manifest)
                .iter()
                .filter(|entry| entry.is_alive())
                .map(|entry| entry.sequence_number.unwrap_or(manifest.sequence_number))
                .collect();
            let minimum = of_live.iter().min().copied().unwrap_or(manifest.sequence_number);
            assert_eq!(manifest.min_sequence_number, minimum, "rule N4");
        }
        next_row_id = end;
    }
    test.commit("main", &snapshots);
    assert_eq!(test.table.facts.next_row_id, next_row_id);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn numbers_hold_along_every_chain(v3 in any::<bool>(), min_count in 2_usize..5, steps in steps()) {
        let version = if v3 { FormatVersion::V3 } else { FormatVersion::V2 };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(check_chain(version, min_count, steps));
    }
}
