//! Files of engines, damaged: told as an error or read as other rows, and never the end of the process.

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::test_files::{engine_files, read};

/// Larger files take longer and have nothing new.
const MAX_BYTES: usize = 8_000;
/// Damaged copies of each file.
const COPIES: usize = 400;
/// Always the same damage.
const SEED: u64 = 30;

#[test]
fn flipped_bits_are_told_or_read_and_never_the_end() {
    let mut random = StdRng::seed_from_u64(SEED);
    let (mut told, mut read_anyway) = (0, 0);
    for file in engine_files("avro-").into_iter().chain(engine_files("orc-")) {
        if file.bytes.len() > MAX_BYTES {
            continue;
        }
        for _ in 0..COPIES {
            let mut damaged = file.bytes.to_vec();
            for _ in 0..random.random_range(1..4) {
                let at = random.random_range(0..damaged.len());
                damaged[at] ^= 1 << random.random_range(0..8);
            }
            match read(&Bytes::from(damaged), file.format, 100) {
                Ok(_) => read_anyway += 1,
                Err(_) => told += 1,
            }
        }
    }
    assert!(told > 1_000 && read_anyway > 0, "{told} told, {read_anyway} read");
}

#[test]
fn bytes_of_another_kind_in_their_place_are_told_or_read() {
    let mut random = StdRng::seed_from_u64(SEED);
    for file in engine_files("avro-").into_iter().chain(engine_files("orc-")) {
        if file.bytes.len() > MAX_BYTES {
            continue;
        }
        for _ in 0..COPIES / 4 {
            let mut damaged = file.bytes.to_vec();
            let start = random.random_range(0..damaged.len());
            let end = (start + random.random_range(1..40)).min(damaged.len());
            // Large numbers and lengths, the worst there are.
            let byte = [0xff, 0x00, 0x7f, 0xfe][random.random_range(0..4)];
            damaged[start..end].fill(byte);
            let _ = read(&Bytes::from(damaged), file.format, 100);
        }
    }
}

#[test]
fn a_file_that_is_cut_off_has_fewer_rows_or_is_told() {
    for name in ["avro-types", "orc-types", "avro-delete-mor-v2", "orc-delete-mor-v2", "avro-eq", "orc-eq"] {
        let file = engine_files(name).into_iter().min_by_key(|file| file.bytes.len()).unwrap();
        let rows = |bytes: &Bytes| -> Option<usize> {
            Some(read(bytes, file.format, 100).ok()?.iter().map(|batch| batch.num_rows()).sum())
        };
        let whole = rows(&file.bytes).unwrap();
        for length in 0..file.bytes.len() {
            // An Avro file may end behind any block: its manifest entry knows how many rows it has.
            assert!(
                rows(&file.bytes.slice(..length)).is_none_or(|left| left < whole),
                "{name} cut at {length}"
            );
        }
    }
}
