//! What is written here says of its snapshot what the crate says, and is read as it was meant, by the crate and by us.

use iceberg::io::FileIO;
use iceberg::spec::{ByteBuf, ManifestList, ManifestListWriter};
use proptest::prelude::*;

use super::super::decode_list;
use super::super::header_cache::HeaderCache;
use super::*;

async fn theirs(of: &ListOf, manifests: &[ManifestFile]) -> Vec<u8> {
    let file_io = FileIO::new_with_memory();
    let output = file_io.new_output("memory:///l.avro").unwrap().writer().await.unwrap();
    let (id, parent) = (of.snapshot, of.parent);
    let mut writer = match of.version {
        FormatVersion::V3 => ManifestListWriter::v3(output, id, parent, of.sequence_number, of.first_row_id),
        _ => ManifestListWriter::v2(output, id, parent, of.sequence_number),
    };
    writer.add_manifests(manifests.iter().cloned()).unwrap();
    writer.close().await.unwrap();
    file_io.new_input("memory:///l.avro").unwrap().read().await.unwrap().to_vec()
}

fn ours(of: &ListOf, manifests: &[ManifestFile], empty: Vec<u8>) -> Usual<Vec<u8>> {
    ListTemplates::default().encode(of, manifests.iter(), || Ok::<_, ()>(empty)).unwrap()
}

fn summary() -> impl Strategy<Value = FieldSummary> {
    let bound = || proptest::option::of(proptest::collection::vec(any::<u8>(), 0..9));
    (any::<bool>(), proptest::option::of(any::<bool>()), bound(), bound()).prop_map(
        |(contains_null, contains_nan, lower, upper)| FieldSummary {
            contains_null,
            contains_nan,
            lower_bound: lower.map(ByteBuf::from),
            upper_bound: upper.map(ByteBuf::from),
        },
    )
}

fn manifest(version: FormatVersion) -> impl Strategy<Value = ManifestFile> {
    let numbers = (0..i64::MAX, 0..9_i32, 0..i64::MAX, 0..i64::MAX, any::<i64>());
    let counts = (any::<[u32; 3]>(), [0..1_u64 << 40, 0..1_u64 << 40, 0..1_u64 << 40]);
    let rest = (
        any::<bool>(),
        proptest::option::of(proptest::collection::vec(summary(), 0..4)),
        proptest::option::of(proptest::collection::vec(any::<u8>(), 0..4)),
    );
    ("[a-zü]{0,9}", numbers, counts, rest).prop_map(
        move |(path, numbers, (files, rows), (is_data, partitions, key_metadata))| ManifestFile {
            manifest_path: path,
            manifest_length: numbers.0,
            partition_spec_id: numbers.1,
            content: if is_data { ManifestContentType::Data } else { ManifestContentType::Deletes },
            sequence_number: numbers.2,
            min_sequence_number: numbers.3,
            added_snapshot_id: numbers.4,
            added_files_count: Some(files[0] >> 1),
            existing_files_count: Some(files[1] >> 1),
            deleted_files_count: Some(files[2] >> 1),
            added_rows_count: Some(rows[0]),
            existing_rows_count: Some(rows[1]),
            deleted_rows_count: Some(rows[2]),
            partitions,
            key_metadata,
            first_row_id: (version == FormatVersion::V3 && is_data).then_some(rows[0]),
        },
    )
}

fn lists() -> impl Strategy<Value = (ListOf, Vec<ManifestFile>)> {
    prop_oneof![Just(FormatVersion::V2), Just(FormatVersion::V3)].prop_flat_map(|version| {
        let of = (any::<i64>(), proptest::option::of(any::<i64>()), 0..i64::MAX, 0..1_u64 << 60);
        let of = of.prop_map(move |(snapshot, parent, sequence_number, first)| ListOf {
            version,
            snapshot,
            parent,
            sequence_number,
            first_row_id: (version == FormatVersion::V3).then_some(first),
        });
        (of, proptest::collection::vec(manifest(version), 0..12))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn lists_are_read_as_they_were_meant((of, manifests) in lists()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        // Of another snapshot: all that is said of it has to be replaced.
        let other = ListOf { snapshot: 1, parent: None, sequence_number: 2, ..of };
        let empty = runtime.block_on(theirs(&other, &[]));
        let bytes = ours(&of, &manifests, empty).unwrap();
        let crates = runtime.block_on(theirs(&of, &manifests));
        let (ours, theirs) = (AvroFile::parse(&bytes).unwrap(), AvroFile::parse(&crates).unwrap());
        for key in ["snapshot-id", "parent-snapshot-id", "sequence-number", "format-version", "first-row-id", "avro.schema"] {
            prop_assert_eq!(ours.get(key), theirs.get(key), "{}", key);
        }
        prop_assert_eq!(&decode_list(&bytes, &HeaderCache::default()).unwrap(), &manifests);
        let by_crate = ManifestList::parse_with_version(&bytes, of.version).unwrap();
        prop_assert_eq!(by_crate.entries(), manifests.as_slice());
    }
}

#[tokio::test]
async fn what_has_no_number_yet_is_left_to_the_crate() {
    let of = ListOf {
        version: FormatVersion::V3,
        snapshot: 1,
        parent: None,
        sequence_number: 2,
        first_row_id: Some(0),
    };
    let empty = theirs(&of, &[]).await;
    let whole = ManifestFile {
        sequence_number: 2,
        min_sequence_number: 2,
        first_row_id: Some(0),
        added_files_count: Some(0),
        existing_files_count: Some(0),
        deleted_files_count: Some(0),
        added_rows_count: Some(0),
        existing_rows_count: Some(0),
        deleted_rows_count: Some(0),
        ..crate::table::fuzzing::listed_manifest()
    };
    assert!(ours(&of, std::slice::from_ref(&whole), empty.clone()).is_ok());
    for lacking in [
        ManifestFile { sequence_number: -1, ..whole.clone() },
        ManifestFile { min_sequence_number: -1, ..whole.clone() },
        ManifestFile { first_row_id: None, ..whole.clone() },
        ManifestFile { added_rows_count: None, ..whole.clone() },
        ManifestFile { content: ManifestContentType::Deletes, ..whole },
    ] {
        assert!(ours(&of, &[lacking], empty.clone()).is_err());
    }
    assert!(ours(&of, &[], b"no list".to_vec()).is_err());
}
