//! Deletion vectors: the blob `deletion-vector-v1` (Puffin spec, "Blob Types"; Java: `BitmapPositionDeleteIndex`).
//!
//! Positions are a 64-bit Roaring bitmap in the portable format, between its length and its checksum. The
//! manifest entry says where in the Puffin file the blob lies, so that the file's footer is never read.

use std::ops::Range;

use iceberg::io::FileIO;
use iceberg::spec::DataFile;
use roaring::{RoaringBitmap, RoaringTreemap};

use super::super::error::TableError;
use super::super::manifests::on_blocking_thread;
use super::super::scan_file::ScanCounters;

/// Largest blob that is read, in bytes; one that deletes every other row of 2^31 rows fits.
pub const MAX_VECTOR_BYTES: usize = 288 * 1024 * 1024;

/// After the length, before the bitmap.
const MAGIC: [u8; 4] = [0xD1, 0xD3, 0x39, 0x64];
/// Bytes of the length, which counts magic and bitmap.
const LENGTH_BYTES: usize = 4;
/// Bytes of the checksum over magic and bitmap.
const CHECKSUM_BYTES: usize = 4;
/// Positions are positive 64-bit numbers, so the upper 32 bits stay below this.
const MAX_KEY: u32 = i32::MAX as u32;

/// The blob that holds these positions.
pub fn encode(positions: &RoaringTreemap) -> Result<Vec<u8>, String> {
    if positions.max().is_some_and(|max| max > i64::MAX as u64) {
        return Err("a position is larger than any row number".to_owned());
    }
    let mut positions = positions.clone();
    // Runs are what whole deleted batches are made of (Java run-length encodes as well).
    positions.optimize();
    let mut checked = MAGIC.to_vec();
    positions.serialize_into(&mut checked).map_err(|e| e.to_string())?;
    let length = u32::try_from(checked.len()).map_err(|_| "the vector is larger than 4 GiB".to_owned())?;
    let mut blob = Vec::with_capacity(LENGTH_BYTES + checked.len() + CHECKSUM_BYTES);
    blob.extend(length.to_be_bytes());
    blob.extend(&checked);
    blob.extend(crc32fast::hash(&checked).to_be_bytes());
    Ok(blob)
}

/// The positions that a blob holds. Memory is bounded by the length of the blob.
pub fn decode(blob: &[u8]) -> Result<RoaringTreemap, String> {
    let too_short = || format!("a deletion vector of {} bytes is cut off", blob.len());
    let (length, rest) = blob.split_first_chunk::<LENGTH_BYTES>().ok_or_else(too_short)?;
    let (checked, checksum) = rest.split_last_chunk::<CHECKSUM_BYTES>().ok_or_else(too_short)?;
    let length = u32::from_be_bytes(*length);
    if usize::try_from(length) != Ok(checked.len()) {
        return Err(format!("the deletion vector says that it has {length} bytes, it has {}", checked.len()));
    }
    let bitmap = checked.strip_prefix(&MAGIC).ok_or("its magic number is not that of a deletion vector")?;
    if crc32fast::hash(checked) != u32::from_be_bytes(*checksum) {
        return Err("the checksum of the deletion vector does not match its content".to_owned());
    }
    decode_positions(bitmap)
}

/// A 64-bit Roaring bitmap: the number of 32-bit bitmaps, then key (the upper 32 bits) and bitmap of each,
/// in the order of the keys.
fn decode_positions(mut rest: &[u8]) -> Result<RoaringTreemap, String> {
    let count = u64::from_le_bytes(take(&mut rest)?);
    let mut bitmaps: Vec<(u32, RoaringBitmap)> = Vec::new();
    for _ in 0..count {
        let key = u32::from_le_bytes(take(&mut rest)?);
        if key > MAX_KEY || bitmaps.last().is_some_and(|(last, _)| *last >= key) {
            return Err("the keys of the deletion vector are out of order or out of range".to_owned());
        }
        let bitmap = RoaringBitmap::deserialize_from(&mut rest)
            .map_err(|e| format!("the deletion vector holds no valid bitmap: {e}"))?;
        bitmaps.push((key, bitmap));
    }
    if !rest.is_empty() {
        return Err(format!("{} bytes are left after the deletion vector", rest.len()));
    }
    bitmaps.retain(|(_, bitmap)| !bitmap.is_empty());
    Ok(RoaringTreemap::from_bitmaps(bitmaps))
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], String> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or("the deletion vector is cut off")?;
    *rest = tail;
    Ok(*head)
}

/// Reads the vector that a manifest entry describes; as many positions as the entry says, or an error.
pub(super) async fn read(
    file_io: &FileIO,
    entry: &DataFile,
    counters: &ScanCounters,
) -> Result<RoaringTreemap, TableError> {
    let path = entry.file_path();
    let range = range_of(entry)?;
    let input = file_io.new_input(path).map_err(|e| TableError::io(path, e))?;
    let size = match input.metadata().await {
        Ok(metadata) => metadata.size,
        Err(error) => return Err(TableError::of_read(file_io, path, error).await),
    };
    if range.end > size {
        let message = format!("it has {size} bytes, a deletion vector in it ends at {}", range.end);
        return Err(TableError::corrupt(path, message));
    }
    let bytes = range.end - range.start;
    let read = async { input.reader().await?.read(range).await };
    let blob = match read.await {
        Ok(blob) => blob,
        Err(error) => return Err(TableError::of_read(file_io, path, error).await),
    };
    counters.count_delete_file(bytes);
    let positions = on_blocking_thread(path, move || decode(&blob))
        .await?
        .map_err(|message| TableError::corrupt(path, message))?;
    if positions.len() != entry.record_count() {
        return Err(TableError::corrupt(
            path,
            format!(
                "a deletion vector has {} positions, but its manifest entry says {}",
                positions.len(),
                entry.record_count()
            ),
        ));
    }
    Ok(positions)
}

fn range_of(entry: &DataFile) -> Result<Range<u64>, TableError> {
    let path = entry.file_path();
    let place = entry.content_offset().zip(entry.content_size_in_bytes());
    let range = place.and_then(|(offset, length)| {
        let start = u64::try_from(offset).ok()?;
        Some(start..start.checked_add(u64::try_from(length).ok()?)?)
    });
    let Some(range) = range else {
        return Err(TableError::corrupt(
            path,
            "its manifest entry does not say where the deletion vector is",
        ));
    };
    if range.end - range.start > MAX_VECTOR_BYTES as u64 {
        return Err(TableError::Unsupported(format!(
            "a deletion vector in {path} has {} bytes, at most {MAX_VECTOR_BYTES} are read; compact the \
             data file that it belongs to",
            range.end - range.start
        )));
    }
    Ok(range)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn positions(values: &[u64]) -> RoaringTreemap {
        values.iter().collect()
    }

    /// Rows 1, 3 and 5, as the format lays them out; written by hand from the two specifications.
    fn by_hand() -> Vec<u8> {
        let mut checked = MAGIC.to_vec();
        checked.extend(1u64.to_le_bytes());
        checked.extend(0u32.to_le_bytes());
        // Roaring: cookie without runs, one container, key 0 with three values, at byte 16.
        checked.extend(12346u32.to_le_bytes());
        checked.extend(1u32.to_le_bytes());
        checked.extend([0, 0, 2, 0]);
        checked.extend(16u32.to_le_bytes());
        for value in [1u16, 3, 5] {
            checked.extend(value.to_le_bytes());
        }
        sealed(&checked)
    }

    fn sealed(checked: &[u8]) -> Vec<u8> {
        let mut blob = u32::try_from(checked.len()).unwrap().to_be_bytes().to_vec();
        blob.extend(checked);
        blob.extend(crc32fast::hash(checked).to_be_bytes());
        blob
    }

    #[test]
    fn the_layout_is_that_of_the_specification() {
        assert_eq!(decode(&by_hand()).unwrap(), positions(&[1, 3, 5]));
        assert_eq!(encode(&positions(&[1, 3, 5])).unwrap(), by_hand());
    }

    #[test]
    fn positions_beyond_32_bits_and_runs_survive() {
        let mut wanted = positions(&[0, 7, 1 << 32, (1 << 40) + 3, i64::MAX as u64]);
        wanted.insert_range(100_000..300_000);
        let blob = encode(&wanted).unwrap();
        assert!(blob.len() < 200, "runs are stored as runs, not as {} bytes", blob.len());
        assert_eq!(decode(&blob).unwrap(), wanted);
        assert_eq!(decode(&encode(&RoaringTreemap::new()).unwrap()).unwrap().len(), 0);
        assert!(encode(&positions(&[1 << 63])).is_err());
    }

    #[test]
    fn whatever_is_cut_off_or_flipped_is_told_and_never_read() {
        let mut wanted = positions(&[3, 70_000, 1 << 33]);
        wanted.insert_range(200..9_000);
        let blob = encode(&wanted).unwrap();
        for length in 0..blob.len() {
            assert!(decode(&blob[..length]).is_err(), "cut at {length}");
        }
        for at in 0..blob.len() {
            for bit in 0..8 {
                let mut flipped = blob.clone();
                flipped[at] ^= 1 << bit;
                assert!(decode(&flipped).is_err(), "bit {bit} of byte {at}");
            }
        }
        let mut longer = blob.clone();
        longer.push(0);
        assert!(decode(&longer).is_err());
    }

    #[test]
    fn a_valid_checksum_does_not_make_nonsense_valid() {
        let with = |bitmap: &[u8]| decode(&sealed(&[&MAGIC[..], bitmap].concat()));
        // A count that no memory could hold.
        assert!(with(&u64::MAX.to_le_bytes()).unwrap_err().contains("cut off"));
        let one = |key: u32| [&key.to_le_bytes()[..], &12346u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
        let of = |count: u64, parts: &[Vec<u8>]| [&count.to_le_bytes()[..], &parts.concat()].concat();
        assert_eq!(with(&of(1, &[one(0)])).unwrap().len(), 0);
        assert!(with(&of(2, &[one(4), one(4)])).unwrap_err().contains("out of order"));
        assert!(with(&of(1, &[one(1 << 31)])).unwrap_err().contains("out of range"));
        assert!(with(&of(1, &[one(0), one(1)])).unwrap_err().contains("bytes are left"));
        assert!(decode(&sealed(b"PFA1abcdefgh")).unwrap_err().contains("magic"));
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_never_panic(bitmap in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bitmap);
            let _ = decode(&sealed(&[&MAGIC[..], &bitmap].concat()));
            let counted = [&1u64.to_le_bytes()[..], &0u32.to_le_bytes(), &bitmap].concat();
            let _ = decode(&sealed(&[&MAGIC[..], &counted].concat()));
        }
    }
}
