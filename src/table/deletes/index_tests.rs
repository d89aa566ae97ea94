use std::collections::BTreeSet;

use iceberg::metadata_columns::RESERVED_FIELD_ID_DELETE_FILE_PATH;
use iceberg::spec::{DataContentType, DataFileBuilder, DataFileFormat, Datum, Struct};
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::partition::PartitionField;
use proptest::prelude::*;

use super::super::super::manifest_codec::file_fact;
use super::*;

/// Spec 0: by day. Spec 1: by day and region. Spec 2: unpartitioned. Spec 3: every field void.
fn partition(spec: i32, day: u8, region: u8) -> Arc<Partition> {
    let field = |source_id, name: &str, transform: &str, value: Option<u8>| PartitionField {
        source_id,
        name: name.to_owned(),
        transform: transform.to_owned(),
        value: value.map(|v| v.to_string()),
    };
    // Day 0 is the null partition.
    let day = field(3, "day", "identity", (day > 0).then_some(day));
    let fields = match spec {
        0 => vec![day],
        1 => vec![day, field(2, "region", "identity", Some(region))],
        2 => Vec::new(),
        _ => vec![field(3, "day", "void", None)],
    };
    Arc::new(Partition { spec_id: SpecId(spec), fields })
}

fn live(path: &str, sequence: i64, partition: Arc<Partition>, entry: &mut DataFileBuilder) -> LiveFile {
    let spec = partition.spec_id;
    let file = entry
        .file_path(path.to_owned())
        .partition(Struct::empty())
        .record_count(10)
        .file_size_in_bytes(100)
        .build()
        .unwrap();
    LiveFile {
        fact: file_fact(&file, partition).unwrap(),
        added_by: SnapshotId(sequence),
        sequence_number: sequence,
        file_sequence_number: sequence,
        first_row_id: None,
        file: Arc::new(file),
        spec_id: spec,
    }
}

fn data(path: &str, sequence: i64, partition: Arc<Partition>) -> LiveFile {
    let mut entry = DataFileBuilder::default();
    entry.content(DataContentType::Data).file_format(DataFileFormat::Parquet);
    live(path, sequence, partition, &mut entry)
}

/// What a delete file is, in a test's words.
#[derive(Clone, Debug)]
enum Kind {
    Vector(usize),
    Named(usize),
    Bounded(usize),
    Anonymous,
    Equality(Vec<i32>),
}

fn delete(path: &str, sequence: i64, partition: Arc<Partition>, kind: &Kind) -> Arc<LiveFile> {
    let of = |at: &usize| format!("data-{at}");
    let mut entry = DataFileBuilder::default();
    entry.content(DataContentType::PositionDeletes).file_format(DataFileFormat::Parquet);
    match kind {
        Kind::Vector(at) => {
            entry.file_format(DataFileFormat::Puffin).referenced_data_file(Some(of(at)));
            entry.content_offset(Some(4)).content_size_in_bytes(Some(40));
        }
        Kind::Named(at) => {
            entry.referenced_data_file(Some(of(at)));
        }
        Kind::Bounded(at) => {
            let bound: HashMap<i32, Datum> =
                [(RESERVED_FIELD_ID_DELETE_FILE_PATH, Datum::string(of(at)))].into();
            entry.lower_bounds(bound.clone()).upper_bounds(bound);
        }
        Kind::Anonymous => {
            let bound = |path: &str| [(RESERVED_FIELD_ID_DELETE_FILE_PATH, Datum::string(path))].into();
            entry.lower_bounds(bound("data-")).upper_bounds(bound("data."));
        }
        Kind::Equality(ids) => {
            entry.content(DataContentType::EqualityDeletes).equality_ids(Some(ids.clone()));
        }
    }
    Arc::new(live(path, sequence, partition, &mut entry))
}

/// Paths of what applies: positions, and equality deletes that are newer than the data file.
fn applied(deletes: &FileDeletes, to: &LiveFile) -> (BTreeSet<String>, BTreeSet<String>) {
    let path = |file: &Arc<LiveFile>| file.fact.path.to_string();
    let newer = |file: &&Arc<LiveFile>| file.sequence_number > to.sequence_number;
    let equality = deletes.equality.iter().flat_map(|group| group.files.iter().filter(newer).map(path));
    (deletes.positions.iter().map(path).collect(), equality.collect())
}

/// The words of the specification, one delete file at a time.
fn by_the_words(data: &LiveFile, deletes: &[(Arc<LiveFile>, Kind)]) -> (BTreeSet<String>, BTreeSet<String>) {
    let same = |delete: &LiveFile| {
        let (mine, theirs) = (&data.fact.partition, &delete.fact.partition);
        mine.spec_id == theirs.spec_id
            && mine.fields.iter().map(|f| &f.value).eq(theirs.fields.iter().map(|f| &f.value))
    };
    let names = |at: &usize| *data.fact.path == *format!("data-{at}");
    let has_vector = deletes.iter().any(|(_, kind)| matches!(kind, Kind::Vector(at) if names(at)));
    let (mut positions, mut equality) = (BTreeSet::new(), BTreeSet::new());
    for (delete, kind) in deletes {
        let not_older = delete.sequence_number >= data.sequence_number;
        let newer = delete.sequence_number > data.sequence_number;
        let path = delete.fact.path.to_string();
        match kind {
            Kind::Vector(at) if names(at) && not_older => {
                positions.insert(path);
            }
            Kind::Named(at) | Kind::Bounded(at) if names(at) && not_older && !has_vector => {
                positions.insert(path);
            }
            Kind::Anonymous if same(delete) && not_older && !has_vector => {
                positions.insert(path);
            }
            Kind::Equality(_) if newer && (same(delete) || delete.fact.partition.is_unpartitioned()) => {
                equality.insert(path);
            }
            _ => {}
        }
    }
    (positions, equality)
}

const DATA_FILES: usize = 5;

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        (0..DATA_FILES).prop_map(Kind::Named),
        (0..DATA_FILES).prop_map(Kind::Bounded),
        Just(Kind::Anonymous),
        prop_oneof![Just(vec![1]), Just(vec![2]), Just(vec![1, 2]), Just(vec![2, 1])]
            .prop_map(Kind::Equality),
    ]
}

fn place() -> impl Strategy<Value = Arc<Partition>> {
    (0..4i32, 0..3u8, 0..2u8).prop_map(|(spec, day, region)| partition(spec, day, region))
}

proptest! {
    #[test]
    fn what_applies_is_what_the_specification_says(
        files in proptest::collection::vec((1..6i64, place()), DATA_FILES),
        deletes in proptest::collection::vec((1..8i64, place(), kind()), 0..14),
        vectors in proptest::collection::vec((any::<bool>(), 0..3i64), DATA_FILES),
    ) {
        let files: Vec<LiveFile> = files
            .into_iter()
            .enumerate()
            .map(|(at, (sequence, partition))| data(&format!("data-{at}"), sequence, partition))
            .collect();
        let mut all: Vec<(Arc<LiveFile>, Kind)> = deletes
            .into_iter()
            .enumerate()
            .map(|(at, (sequence, partition, kind))| {
                (delete(&format!("delete-{at}"), sequence, partition, &kind), kind)
            })
            .collect();
        for (at, (there, later)) in vectors.into_iter().enumerate() {
            if there {
                let (sequence, partition) =
                    (files[at].sequence_number + later, files[at].fact.partition.clone());
                let kind = Kind::Vector(at);
                all.push((delete(&format!("vector-{at}"), sequence, partition, &kind), kind));
            }
        }
        let index = DeleteIndex::new(all.iter().map(|(file, _)| Arc::clone(file))).unwrap();
        for file in &files {
            let found = index.for_file(file).unwrap();
            prop_assert_eq!(applied(&found, file), by_the_words(file, &all));
            // Keys are looked up once a set of columns and reach, not once a delete file.
            prop_assert!(found.equality.len() <= 2 * 3);
        }
    }
}

#[test]
fn rule_d1_a_deletion_vector_hides_position_deletes() {
    let day = partition(0, 1, 0);
    let file = data("data-0", 1, day.clone());
    let old = delete("p", 5, day.clone(), &Kind::Named(0));
    let vector = delete("v", 2, day.clone(), &Kind::Vector(0));
    let key = delete("e", 3, day, &Kind::Equality(vec![1]));
    let index = DeleteIndex::new([old, vector, key]).unwrap();
    let (positions, equality) = applied(&index.for_file(&file).unwrap(), &file);
    assert_eq!((positions, equality), (["v".to_owned()].into(), ["e".to_owned()].into()));
}

#[test]
fn rule_d5_what_speaks_of_one_data_file_goes_with_it() {
    let day = partition(0, 1, 0);
    let kinds = [Kind::Vector(0), Kind::Named(0), Kind::Bounded(0), Kind::Anonymous, Kind::Equality(vec![1])];
    let files = kinds.iter().enumerate().map(|(at, kind)| delete(&format!("{at}"), 2, day.clone(), kind));
    let index = DeleteIndex::new(files).unwrap();
    let own = |path| -> Vec<String> {
        index.own_deletes(path).iter().map(|file| file.fact.path.to_string()).collect()
    };
    assert_eq!((own("data-0"), own("data-1")), (vec!["0".into(), "1".into(), "2".into()], vec![]));
}

#[test]
fn sequence_numbers_decide_and_equality_is_strict() {
    let day = partition(0, 1, 0);
    let position = delete("p", 5, day.clone(), &Kind::Anonymous);
    let key = delete("e", 5, day.clone(), &Kind::Equality(vec![1]));
    let index = DeleteIndex::new([position, key]).unwrap();
    let count = |sequence| {
        let found = index.for_file(&data("data-0", sequence, day.clone())).unwrap();
        (found.positions.len(), found.equality.len())
    };
    assert_eq!((count(4), count(5), count(6)), ((1, 1), (1, 0), (0, 0)));
}

#[test]
fn what_contradicts_itself_is_an_error() {
    let day = partition(0, 1, 0);
    let one = delete("v1", 2, day.clone(), &Kind::Vector(0));
    let two = delete("v2", 3, day.clone(), &Kind::Vector(0));
    let error = DeleteIndex::new([one.clone(), two]).unwrap_err().to_string();
    assert!(error.contains("data-0") && error.contains("two deletion vectors"), "{error}");
    let index = DeleteIndex::new([one]).unwrap();
    let error = index.for_file(&data("data-0", 3, day.clone())).unwrap_err().to_string();
    assert!(error.contains("older than its data file"), "{error}");

    let error = DeleteIndex::of([data("rows", 1, day)]).unwrap_err().to_string();
    assert!(error.contains("rows, not deletes"), "{error}");
}
