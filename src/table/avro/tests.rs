//! What is read here is what the crate reads: over every manifest and list that engines wrote.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use iceberg::spec::{FormatVersion, Manifest, ManifestList};

use super::header::AvroFile;
use super::header_cache::HeaderCache;
use super::{RawEntry, decode_list, decode_manifest};

fn avro_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "data") {
            avro_files(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "avro") {
            found.push(path);
        }
    }
}

/// Name of the fixture table, and the bytes.
fn engine_files() -> Vec<(String, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables");
    let mut paths = Vec::new();
    avro_files(&root, &mut paths);
    paths.sort();
    let table =
        |path: &Path| path.strip_prefix(&root).unwrap().iter().next().unwrap().to_str().unwrap().to_owned();
    paths.iter().map(|path| (table(path), std::fs::read(path).unwrap())).collect()
}

fn is_manifest(bytes: &[u8]) -> bool {
    AvroFile::parse(bytes).unwrap().get("partition-spec").is_some()
}

#[test]
fn manifests_of_engines_are_read_as_the_crate_reads_them() {
    let (headers, files) = (HeaderCache::default(), engine_files());
    let (mut usual, mut unusual) = (0, BTreeSet::new());
    for (table, bytes) in files.iter().filter(|(_, bytes)| is_manifest(bytes)) {
        let Ok(ours) = decode_manifest(bytes, &headers) else {
            unusual.insert(table.as_str());
            continue;
        };
        let (entries, header) = Manifest::parse_avro(bytes).unwrap().into_parts();
        let theirs: Vec<RawEntry> =
            entries.into_iter().map(|entry| RawEntry::from(Arc::unwrap_or_clone(entry))).collect();
        assert_eq!(ours.entries, theirs, "{table}");
        assert_eq!(&ours.header.schema, header.schema(), "{table}");
        usual += 1;
    }
    assert!(usual > 250, "{usual}");
    // Partition values that take care, format v1, and a type that nobody here reads.
    let expected =
        ["flink-types-v3", "transforms-others-v2", "types-scalars-v2", "v1-append", "v1-void", "variant-v3"];
    assert_eq!(unusual, BTreeSet::from(expected));
}

#[test]
fn lists_of_engines_are_read_as_the_crate_reads_them() {
    let (headers, files) = (HeaderCache::default(), engine_files());
    let (mut usual, mut unusual) = (0, BTreeSet::new());
    for (table, bytes) in files.iter().filter(|(_, bytes)| !is_manifest(bytes)) {
        let Ok(ours) = decode_list(bytes, &headers) else {
            unusual.insert(table.as_str());
            continue;
        };
        let theirs = [FormatVersion::V3, FormatVersion::V2]
            .into_iter()
            .find_map(|version| ManifestList::parse_with_version(bytes, version).ok())
            .unwrap();
        assert_eq!(ours, theirs.entries(), "{table}");
        usual += 1;
    }
    assert!(usual > 250, "{usual}");
    // Lists of format v1.
    assert_eq!(unusual, BTreeSet::from(["v1-append", "v1-void"]));
}

#[test]
fn a_cut_file_is_unusual() {
    let (headers, files) = (HeaderCache::default(), engine_files());
    for (table, bytes) in files.iter().step_by(40) {
        for length in [bytes.len() - 1, bytes.len() / 2, 10, 0] {
            assert!(decode_list(&bytes[..length], &headers).is_err(), "{table} cut at {length}");
            assert!(decode_manifest(&bytes[..length], &headers).is_err(), "{table} cut at {length}");
        }
    }
}
