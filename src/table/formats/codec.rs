//! Compressed pieces of files, made plain within a bound: a piece that claims to be larger is told, not tried.

use std::io::Read;

use flate2::read::DeflateDecoder;

use super::fault::{Decoded, Fault};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Codec {
    Plain,
    Deflate,
    Snappy,
    Lz4,
    Zstd,
}

impl Codec {
    /// The plain bytes, at most `max` of them.
    pub fn plain(self, packed: &[u8], max: usize) -> Decoded<Vec<u8>> {
        let broken = |e: &dyn std::fmt::Display| Fault::corrupt(format!("compressed bytes are damaged: {e}"));
        match self {
            Self::Plain if packed.len() <= max => Ok(packed.to_vec()),
            Self::Plain => Err(too_large(max)),
            Self::Deflate => read(DeflateDecoder::new(packed), max),
            Self::Zstd => read(zstd::Decoder::with_buffer(packed).map_err(|e| broken(&e))?, max),
            Self::Snappy => {
                let length = snap::raw::decompress_len(packed).map_err(|e| broken(&e))?;
                if length > max {
                    return Err(too_large(max));
                }
                snap::raw::Decoder::new().decompress_vec(packed).map_err(|e| broken(&e))
            }
            Self::Lz4 => {
                // The length is nowhere in the bytes.
                let mut plain = vec![0; max];
                let length = lz4_flex::block::decompress_into(packed, &mut plain).map_err(|e| broken(&e))?;
                plain.truncate(length);
                Ok(plain)
            }
        }
    }
}

fn read(decoder: impl Read, max: usize) -> Decoded<Vec<u8>> {
    let mut plain = Vec::new();
    let limit = (max as u64).saturating_add(1);
    decoder
        .take(limit)
        .read_to_end(&mut plain)
        .map_err(|e| Fault::corrupt(format!("compressed bytes are damaged: {e}")))?;
    if plain.len() > max { Err(too_large(max)) } else { Ok(plain) }
}

fn too_large(max: usize) -> Fault {
    Fault::unsupported(format!(
        "a compressed piece of it has more than {max} bytes; write its rows again in smaller pieces"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn packed(codec: Codec, plain: &[u8]) -> Vec<u8> {
        match codec {
            Codec::Plain => plain.to_vec(),
            Codec::Deflate => {
                let mut encoder =
                    flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
                encoder.write_all(plain).unwrap();
                encoder.finish().unwrap()
            }
            Codec::Snappy => snap::raw::Encoder::new().compress_vec(plain).unwrap(),
            Codec::Lz4 => lz4_flex::block::compress(plain),
            Codec::Zstd => zstd::encode_all(plain, 3).unwrap(),
        }
    }

    #[test]
    fn every_codec_gives_the_bytes_back_and_none_gives_more_than_the_bound() {
        let plain = b"the same words and the same words again".repeat(50);
        for codec in [Codec::Plain, Codec::Deflate, Codec::Snappy, Codec::Lz4, Codec::Zstd] {
            let packed = packed(codec, &plain);
            assert_eq!(codec.plain(&packed, plain.len()).unwrap(), plain, "{codec:?}");
            assert!(codec.plain(&packed, plain.len() - 1).is_err(), "{codec:?}");
            for length in 0..packed.len() {
                if codec != Codec::Plain {
                    let cut = codec.plain(&packed[..length], plain.len());
                    assert!(cut.is_err() || cut.unwrap() != plain, "{codec:?} cut at {length}");
                }
            }
        }
    }
}
