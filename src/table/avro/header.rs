//! The header of an Avro object container file: its metadata map, read and written again without touching
//! the data blocks behind it (Avro specification 1.12, "Object Container Files").

use std::borrow::Cow;

const MAGIC: &[u8; 4] = b"Obj\x01";
/// Bytes of the marker between blocks.
pub(super) const SYNC_BYTES: usize = 16;
/// Entries of the metadata map; engines write about ten.
const MAX_ENTRIES: usize = 1024;

type Bytes<'a> = Cow<'a, [u8]>;

/// A container file, split behind its metadata.
#[derive(Debug)]
pub(in crate::table) struct AvroFile<'a> {
    /// In file order.
    metadata: Vec<(Bytes<'a>, Bytes<'a>)>,
    /// Sync marker and data blocks, as they are.
    rest: &'a [u8],
}

impl<'a> AvroFile<'a> {
    /// `None` when the bytes do not start as such a file does.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let mut metadata = Vec::new();
        loop {
            let count = take_long(&mut rest)?;
            if count == 0 {
                break;
            }
            if count < 0 {
                // A negative count is followed by the size of the block in bytes.
                take_long(&mut rest)?;
            }
            for _ in 0..count.unsigned_abs() {
                if metadata.len() == MAX_ENTRIES {
                    return None;
                }
                let key = take_bytes(&mut rest)?;
                metadata.push((Cow::Borrowed(key), Cow::Borrowed(take_bytes(&mut rest)?)));
            }
        }
        (rest.len() >= SYNC_BYTES).then_some(Self { metadata, rest })
    }

    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.metadata.iter().find(|(k, _)| k.as_ref() == key.as_bytes()).map(|(_, value)| value.as_ref())
    }

    /// Replaces the value of a key that is there.
    pub fn replace(&mut self, key: &str, value: Vec<u8>) {
        if let Some((_, old)) = self.metadata.iter_mut().find(|(k, _)| k.as_ref() == key.as_bytes()) {
            *old = Cow::Owned(value);
        }
    }

    /// Sync marker and data blocks.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let metadata: usize = self.metadata.iter().map(|(k, v)| k.len() + v.len() + 20).sum();
        let mut bytes = Vec::with_capacity(MAGIC.len() + metadata + 20 + self.rest.len());
        bytes.extend_from_slice(MAGIC);
        if !self.metadata.is_empty() {
            put_length(&mut bytes, self.metadata.len());
        }
        for part in self.metadata.iter().flat_map(|(key, value)| [key, value]) {
            put_length(&mut bytes, part.len());
            bytes.extend_from_slice(part);
        }
        put_length(&mut bytes, 0);
        bytes.extend_from_slice(self.rest);
        bytes
    }
}

/// A zig-zag variable-length integer.
fn take_long(bytes: &mut &[u8]) -> Option<i64> {
    let mut value: u64 = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some((value >> 1) as i64 ^ -((value & 1) as i64));
        }
    }
    None
}

fn take_bytes<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(take_long(bytes)?).ok()?;
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

fn put_length(bytes: &mut Vec<u8>, length: usize) {
    let mut value = (length as u64) << 1;
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(count: &[u8]) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(count);
        bytes.extend_from_slice(b"\x02a\x04xy\x02b\x00\x00");
        bytes.extend_from_slice(&[7; SYNC_BYTES]);
        bytes.extend_from_slice(b"blocks");
        bytes
    }

    #[test]
    fn a_header_is_written_as_it_was_read() {
        let plain = file(b"\x04");
        let parsed = AvroFile::parse(&plain).unwrap();
        assert_eq!(
            (parsed.get("a"), parsed.get("b"), parsed.get("c")),
            (Some(&b"xy"[..]), Some(&b""[..]), None)
        );
        assert_eq!(parsed.to_bytes(), plain);
        // The same with a count of entries and bytes.
        assert_eq!(AvroFile::parse(&file(b"\x03\x0e")).unwrap().to_bytes(), plain);
    }

    #[test]
    fn a_value_may_become_longer_and_the_blocks_stay() {
        let plain = file(b"\x04");
        let mut parsed = AvroFile::parse(&plain).unwrap();
        parsed.replace("a", vec![b'z'; 300]);
        let bytes = parsed.to_bytes();
        let again = AvroFile::parse(&bytes).unwrap();
        assert_eq!((again.get("a"), again.get("b")), (Some(&[b'z'; 300][..]), Some(&b""[..])));
        assert!(bytes.ends_with(b"blocks"));
    }

    #[test]
    fn what_is_cut_or_no_such_file_is_told() {
        let plain = file(b"\x04");
        for length in 0..plain.len() - b"blocks".len() {
            assert!(AvroFile::parse(&plain[..length]).is_none(), "cut at {length}");
        }
        assert!(AvroFile::parse(b"PAR1 and more").is_none());
    }
}
