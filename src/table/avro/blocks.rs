//! The data blocks of a container file (Avro specification 1.12, "Object Container Files").

use std::borrow::Cow;
use std::io::Read;

use flate2::read::DeflateDecoder;

use super::cursor::Cursor;
use super::header::{AvroFile, SYNC_BYTES};
use super::{Unusual, Usual};

/// Bytes that one block may come to; Java writes blocks of 16 KiB before compression.
const MAX_BLOCK_BYTES: u64 = 256 * 1024 * 1024;

#[derive(Clone, Copy)]
enum Codec {
    Null,
    Deflate,
}

/// Calls `item` once for each object of the file. All bytes have to be used up.
pub(super) fn each_object(
    file: &AvroFile<'_>,
    mut item: impl FnMut(&mut Cursor<'_>) -> Usual<()>,
) -> Usual<()> {
    let codec = match file.get("avro.codec") {
        None | Some(b"null") => Codec::Null,
        Some(b"deflate") => Codec::Deflate,
        Some(_) => return Err(Unusual),
    };
    let (sync, blocks) = file.rest().split_at_checked(SYNC_BYTES).ok_or(Unusual)?;
    let mut rest = Cursor::new(blocks);
    while !rest.is_empty() {
        let count = rest.varint()?;
        let length = usize::try_from(rest.varint()?).map_err(|_| Unusual)?;
        let block = rest.take(length)?;
        if rest.take(SYNC_BYTES)? != sync {
            return Err(Unusual);
        }
        let bytes = plain(codec, block)?;
        let mut cursor = Cursor::new(&bytes);
        for _ in 0..u64::try_from(count).map_err(|_| Unusual)? {
            if cursor.is_empty() {
                return Err(Unusual);
            }
            item(&mut cursor)?;
        }
        if !cursor.is_empty() {
            return Err(Unusual);
        }
    }
    Ok(())
}

fn plain(codec: Codec, block: &[u8]) -> Usual<Cow<'_, [u8]>> {
    match codec {
        Codec::Null => Ok(Cow::Borrowed(block)),
        Codec::Deflate => {
            let mut bytes = Vec::new();
            let mut decoder = DeflateDecoder::new(block).take(MAX_BLOCK_BYTES);
            decoder.read_to_end(&mut bytes).map_err(|_| Unusual)?;
            Ok(Cow::Owned(bytes))
        }
    }
}
