//! The bytes of a stream, and the run lengths of bytes and bits in them (ORC specification v1, "Compression",
//! "Byte Run Length Encoding", "Boolean Run Length Encoding").
//!
//! Bytes are made plain piece by piece, and nothing is made larger because a number in the file says so.

use bytes::Bytes;

use super::super::codec::Codec;
use super::super::fault::{Decoded, Fault};

/// Bytes of the head of a piece: its length, and whether it is as it was.
const HEAD_BYTES: usize = 3;

/// The pieces of a stream, plain.
pub(super) struct Chunks {
    codec: Codec,
    max: usize,
    rest: Bytes,
}

impl Chunks {
    pub fn new(codec: Codec, max: usize, bytes: Bytes) -> Self {
        Self { codec, max, rest: bytes }
    }

    pub fn next(&mut self) -> Decoded<Option<Bytes>> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        if self.codec == Codec::Plain {
            return Ok(Some(std::mem::take(&mut self.rest)));
        }
        let damaged = || Fault::corrupt("a stream of it is cut off within a piece");
        if self.rest.len() < HEAD_BYTES {
            return Err(damaged());
        }
        let head = self.rest.split_to(HEAD_BYTES);
        let word = u32::from_le_bytes([head[0], head[1], head[2], 0]);
        let length = (word >> 1) as usize;
        if length > self.rest.len() {
            return Err(damaged());
        }
        let piece = self.rest.split_to(length);
        if word & 1 == 1 {
            return Ok(Some(piece));
        }
        self.codec.plain(&piece, self.max).map(|plain| Some(plain.into()))
    }
}

/// Plain bytes of a stream, one after the other. A stream that is not there has none.
pub(super) struct Stream {
    chunks: Chunks,
    current: Bytes,
}

fn ends_early() -> Fault {
    Fault::corrupt("a stream of it ends before its rows do")
}

impl Stream {
    pub fn new(codec: Codec, chunk_bytes: usize, bytes: Bytes) -> Self {
        Self { chunks: Chunks::new(codec, chunk_bytes, bytes), current: Bytes::new() }
    }

    /// Is there a next byte?
    fn fill(&mut self) -> Decoded<bool> {
        while self.current.is_empty() {
            match self.chunks.next()? {
                Some(next) => self.current = next,
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    pub fn byte(&mut self) -> Decoded<u8> {
        if !self.fill()? {
            return Err(ends_early());
        }
        let byte = self.current[0];
        bytes::Buf::advance(&mut self.current, 1);
        Ok(byte)
    }

    /// Appends `length` bytes.
    pub fn append(&mut self, to: &mut Vec<u8>, length: usize) -> Decoded<()> {
        let mut left = length;
        while left > 0 {
            if !self.fill()? {
                return Err(ends_early());
            }
            let some = self.current.split_to(left.min(self.current.len()));
            to.extend_from_slice(&some);
            left -= some.len();
        }
        Ok(())
    }

    pub fn array<const N: usize>(&mut self) -> Decoded<[u8; N]> {
        let mut bytes = [0; N];
        for byte in &mut bytes {
            *byte = self.byte()?;
        }
        Ok(bytes)
    }

    pub fn varint(&mut self) -> Decoded<u64> {
        let mut value: u64 = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Fault::corrupt("a number of it has no end"))
    }

    /// A zig-zag number of up to 128 bits.
    pub fn wide(&mut self) -> Decoded<i128> {
        let mut value: u128 = 0;
        for shift in (0..128).step_by(7) {
            let byte = self.byte()?;
            value |= u128::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed());
            }
        }
        Err(Fault::corrupt("a decimal of it has no end"))
    }
}

pub(super) fn zigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

/// Runs of bytes.
pub(super) struct ByteRuns {
    stream: Stream,
    left: usize,
    /// The byte of a run of equal ones.
    repeated: Option<u8>,
}

impl ByteRuns {
    pub fn new(stream: Stream) -> Self {
        Self { stream, left: 0, repeated: None }
    }

    pub fn next(&mut self) -> Decoded<u8> {
        if self.left == 0 {
            let head = self.stream.byte()?;
            (self.left, self.repeated) = if head < 0x80 {
                (usize::from(head) + 3, Some(self.stream.byte()?))
            } else {
                (0x100 - usize::from(head), None)
            };
        }
        self.left -= 1;
        self.repeated.map_or_else(|| self.stream.byte(), Ok)
    }
}

/// Runs of bits, the highest of a byte first.
pub(super) struct Bits {
    bytes: ByteRuns,
    current: u8,
    left: u8,
}

impl Bits {
    pub fn new(stream: Stream) -> Self {
        Self { bytes: ByteRuns::new(stream), current: 0, left: 0 }
    }

    pub fn next(&mut self) -> Decoded<bool> {
        if self.left == 0 {
            self.current = self.bytes.next()?;
            self.left = 8;
        }
        self.left -= 1;
        Ok(self.current >> self.left & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(bytes: &'static [u8]) -> Stream {
        Stream::new(Codec::Plain, 1024, Bytes::from_static(bytes))
    }

    #[test]
    fn runs_are_those_of_the_specification() {
        let mut runs = ByteRuns::new(plain(&[0x61, 0x00]));
        assert!((0..100).all(|_| runs.next().unwrap() == 0));
        assert!(runs.next().is_err());
        let mut literals = ByteRuns::new(plain(&[0xfe, 0x44, 0x45]));
        assert_eq!((literals.next().unwrap(), literals.next().unwrap()), (0x44, 0x45));
        let mut bits = Bits::new(plain(&[0xff, 0x80]));
        assert_eq!((0..8).map(|_| bits.next().unwrap()).filter(|bit| *bit).count(), 1);
    }

    #[test]
    fn pieces_are_plain_or_packed_and_cut_ones_are_told() {
        // Eleven bytes as they are: 5 << 1 | 1.
        let bytes = Bytes::from_static(&[0x0b, 0, 0, 1, 2, 3, 4, 5]);
        let mut stream = Stream::new(Codec::Zstd, 1024, bytes.clone());
        let mut read = Vec::new();
        stream.append(&mut read, 5).unwrap();
        assert_eq!(read, [1, 2, 3, 4, 5]);
        assert!(stream.byte().is_err());
        for length in 1..bytes.len() {
            assert!(Stream::new(Codec::Zstd, 1024, bytes.slice(..length)).byte().is_err(), "cut at {length}");
        }
        assert_eq!(plain(&[0x96, 0x01]).varint().unwrap(), 150);
        assert_eq!(plain(&[0x95, 0x01]).wide().unwrap(), -75);
        assert!(plain(&[0xff; 20]).wide().is_err());
    }
}
