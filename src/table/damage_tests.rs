//! Damaged metadata files, manifest lists and manifests: an error that names the file, never a panic.
//!
//! The inputs are files that engines wrote (`fixtures/tables`), with bytes changed, cut, doubled or spliced. A short
//! run with a fixed seed by default; `MERGEBERG_FUZZ_ROUNDS` and `MERGEBERG_FUZZ_SEED` make it a long one.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use iceberg::io::FileIO;
use iceberg::spec::{FormatVersion, PartitionSpec};
use mergeberg_kernel::ids::TableName;

use super::super::avro::header_cache::HeaderCache;
use super::super::fuzzing::listed_manifest;
use super::super::loaded::LoadedTable;
use super::super::manifest_codec;
use super::decode_list;

/// Damaged inputs of each kind in the short run.
const ROUNDS: u64 = 1_500;
const SEED: u64 = 0x6d65_7267_6562_6572;

/// SplitMix64: the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(bound.max(1)).unwrap()).unwrap()
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |text| text.parse().expect("a number"))
}

/// The files of all tables whose names end with this.
fn files(end: &str) -> Vec<PathBuf> {
    let tables = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables");
    let mut found = Vec::new();
    for table in std::fs::read_dir(tables).unwrap().map(|entry| entry.unwrap().path().join("metadata")) {
        let Ok(entries) = std::fs::read_dir(table) else { continue };
        found.extend(
            entries
                .map(|entry| entry.unwrap().path())
                .filter(|path| path.file_name().unwrap().to_str().unwrap().ends_with(end)),
        );
    }
    found.sort();
    assert!(found.len() > 50, "{} files end with {end}", found.len());
    found
}

fn damage(dice: &mut Dice, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..=dice.below(3) {
        let at = dice.below(bytes.len());
        match dice.below(6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, u8::try_from(dice.below(256)).unwrap()),
            2 => {
                let end = (at + dice.below(64)).min(bytes.len());
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            3 => {
                let from = dice.below(other.len());
                let end = (from + dice.below(256)).min(other.len());
                bytes.splice(at.., other[from..end].iter().copied());
            }
            // Numbers of Avro and JSON alike: lengths, counts, ids.
            4 if at < bytes.len() => bytes[at] = [0x00, 0x01, 0x7f, 0x80, 0xff, b'-', b'9'][dice.below(7)],
            _ if at < bytes.len() => bytes[at] ^= 1 << dice.below(8),
            _ => {}
        }
        if bytes.is_empty() {
            return;
        }
    }
}

/// Gives `read` damaged files; says which were read all the same, which is no fault: not every byte matters.
fn try_damaged(end: &str, read: impl Fn(&[u8]) -> bool) -> u64 {
    let files: Vec<Vec<u8>> = files(end).into_iter().map(|path| std::fs::read(path).unwrap()).collect();
    let (rounds, seed) = (setting("MERGEBERG_FUZZ_ROUNDS", ROUNDS), setting("MERGEBERG_FUZZ_SEED", SEED));
    let mut readable = 0;
    for round in 0..rounds {
        let mut dice = Dice(seed ^ round.wrapping_mul(0xa076_1d64_78bd_642f));
        let mut bytes = files[dice.below(files.len())].clone();
        let other = &files[dice.below(files.len())];
        damage(&mut dice, &mut bytes, other);
        match catch_unwind(AssertUnwindSafe(|| read(&bytes))) {
            Ok(read) => readable += u64::from(read),
            Err(_) => panic!("a damaged *{end} made its reader panic: seed {seed}, round {round}"),
        }
    }
    readable
}

#[test]
fn damaged_metadata_is_an_error() {
    let name: TableName = "engine.written".parse().unwrap();
    let file_io = FileIO::new_with_memory();
    let read = |bytes: &[u8]| match LoadedTable::parse(&name, "file:///m.json", bytes, file_io.clone()) {
        Ok(table) => table.facts.name == name,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    };
    let readable = try_damaged(".metadata.json", read);
    assert!(readable < setting("MERGEBERG_FUZZ_ROUNDS", ROUNDS), "nothing was damaged");
}

#[test]
fn damaged_manifest_lists_are_errors() {
    for version in [FormatVersion::V2, FormatVersion::V3] {
        // Only lists start with this.
        try_damaged(".avro", |bytes| {
            decode_list("file:///list.avro", bytes, version, &HeaderCache::default()).is_ok()
        });
    }
}

#[test]
fn damaged_manifests_are_errors() {
    let spec = PartitionSpec::unpartition_spec();
    let file = listed_manifest();
    try_damaged("0.avro", |bytes| {
        manifest_codec::decode(&file, bytes, &spec, &HeaderCache::default()).is_ok()
    });
}
