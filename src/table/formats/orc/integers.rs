//! Runs of integers, in both encodings (ORC specification v1, "Integer Run Length Encoding, version 1" and
//! "version 2").

use super::super::fault::{Decoded, Fault};
use super::stream::{Stream, zigzag};

/// Values of a run at most.
const MAX_RUN: usize = 512;
/// An entry of a patch list that only says how far the next one is.
const GAP_ALONE: u64 = 255;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Version {
    One,
    Two,
}

/// Integers of a stream, run by run.
pub(super) struct Integers {
    stream: Stream,
    version: Version,
    signed: bool,
    run: Vec<i64>,
    used: usize,
}

impl Integers {
    pub fn new(stream: Stream, version: Version, signed: bool) -> Self {
        Self { stream, version, signed, run: Vec::with_capacity(MAX_RUN), used: 0 }
    }

    pub fn next(&mut self) -> Decoded<i64> {
        if self.used == self.run.len() {
            self.run.clear();
            self.used = 0;
            match self.version {
                Version::One => self.read_one()?,
                Version::Two => self.read_two()?,
            }
        }
        let value = self.run.get(self.used).copied();
        self.used += 1;
        value.ok_or_else(|| Fault::corrupt("a run of numbers is empty"))
    }

    /// A number that does not count backwards: a length, or a place.
    pub fn next_size(&mut self) -> Decoded<usize> {
        usize::try_from(self.next()?).map_err(|_| Fault::corrupt("a length of it is negative"))
    }

    fn of(&self, value: u64) -> i64 {
        if self.signed { zigzag(value) } else { value.cast_signed() }
    }

    fn read_one(&mut self) -> Decoded<()> {
        let head = self.stream.byte()?;
        if head < 0x80 {
            let step = i64::from(self.stream.byte()?.cast_signed());
            let first = self.stream.varint()?;
            let mut value = self.of(first);
            for _ in 0..usize::from(head) + 3 {
                self.run.push(value);
                value = value.wrapping_add(step);
            }
        } else {
            for _ in 0..0x100 - usize::from(head) {
                let value = self.stream.varint()?;
                self.run.push(self.of(value));
            }
        }
        Ok(())
    }

    fn read_two(&mut self) -> Decoded<()> {
        let head = self.stream.byte()?;
        match head >> 6 {
            0 => {
                let value = self.big_endian(usize::from(head >> 3 & 7) + 1)?;
                let value = self.of(value);
                self.run.extend(std::iter::repeat_n(value, usize::from(head & 7) + 3));
                Ok(())
            }
            1 => {
                let (width, length) = (width_of(head >> 1 & 0x1f), self.run_length(head)?);
                let mut values = self.packed(length, width)?;
                for value in &mut values {
                    *value = self.of(*value).cast_unsigned();
                }
                self.run.extend(values.into_iter().map(u64::cast_signed));
                Ok(())
            }
            2 => self.patched(head),
            _ => self.deltas(head),
        }
    }

    fn run_length(&mut self, head: u8) -> Decoded<usize> {
        Ok((usize::from(head & 1) << 8 | usize::from(self.stream.byte()?)) + 1)
    }

    fn big_endian(&mut self, bytes: usize) -> Decoded<u64> {
        let mut value = 0;
        for _ in 0..bytes {
            value = value << 8 | u64::from(self.stream.byte()?);
        }
        Ok(value)
    }

    /// `length` values of `width` bits, the highest bit first; bits behind the last one are left.
    fn packed(&mut self, length: usize, width: u32) -> Decoded<Vec<u64>> {
        let mut values = Vec::with_capacity(length.min(MAX_RUN));
        let (mut current, mut left) = (0_u8, 0_u32);
        for _ in 0..length {
            let (mut value, mut wanted) = (0_u64, width);
            while wanted > 0 {
                if left == 0 {
                    current = self.stream.byte()?;
                    left = 8;
                }
                let some = wanted.min(left);
                let bits = u64::from(current) >> (left - some) & ((1 << some) - 1);
                value = value << some | bits;
                left -= some;
                wanted -= some;
            }
            values.push(value);
        }
        Ok(values)
    }

    /// Small numbers above a base, and what the large ones among them have on top.
    fn patched(&mut self, head: u8) -> Decoded<()> {
        let (width, length) = (width_of(head >> 1 & 0x1f), self.run_length(head)?);
        let [third, fourth] = self.stream.array()?;
        let base_bytes = usize::from(third >> 5) + 1;
        let patch_width = width_of(third & 0x1f);
        let gap_width = u32::from(fourth >> 5) + 1;
        let patches = usize::from(fourth & 0x1f);
        let base = self.big_endian(base_bytes)?;
        // The highest bit is the sign.
        let sign = 1_u64 << (base_bytes * 8 - 1);
        let base =
            if base & sign == 0 { base.cast_signed() } else { (base & !sign).cast_signed().wrapping_neg() };
        let mut values = self.packed(length, width)?;
        let entry = closest_width(patch_width + gap_width);
        if patch_width + gap_width > 64 {
            return Err(Fault::corrupt("a run of numbers has patches that are too wide"));
        }
        let mut at = 0_usize;
        for entry in self.packed(patches, entry)? {
            let patch = if patch_width == 64 { entry } else { entry & ((1 << patch_width) - 1) };
            let gap = entry.checked_shr(patch_width).unwrap_or_default();
            at += usize::try_from(gap).unwrap_or(usize::MAX).min(MAX_RUN);
            if gap == GAP_ALONE && patch == 0 {
                continue;
            }
            let value = values
                .get_mut(at)
                .ok_or_else(|| Fault::corrupt("a run of numbers is patched behind its end"))?;
            *value |= patch.checked_shl(width).unwrap_or_default();
        }
        self.run.extend(values.into_iter().map(|value| base.wrapping_add(value.cast_signed())));
        Ok(())
    }

    fn deltas(&mut self, head: u8) -> Decoded<()> {
        let code = head >> 1 & 0x1f;
        let width = if code == 0 { 0 } else { width_of(code) };
        let length = self.run_length(head)?;
        let first = self.stream.varint()?;
        let mut value = self.of(first);
        let step = zigzag(self.stream.varint()?);
        self.run.push(value);
        if length > 1 {
            value = value.wrapping_add(step);
            self.run.push(value);
        }
        for delta in self.packed(length.saturating_sub(2), width)? {
            value = match (width, step < 0) {
                (0, _) => value.wrapping_add(step),
                (_, false) => value.wrapping_add(delta.cast_signed()),
                (_, true) => value.wrapping_sub(delta.cast_signed()),
            };
            self.run.push(value);
        }
        Ok(())
    }
}

/// Bits for a code of five bits.
fn width_of(code: u8) -> u32 {
    match code {
        0..=23 => u32::from(code) + 1,
        24 => 26,
        25 => 28,
        26 => 30,
        27 => 32,
        28 => 40,
        29 => 48,
        30 => 56,
        _ => 64,
    }
}

/// The smallest of these widths that is not smaller.
fn closest_width(bits: u32) -> u32 {
    (0..32).map(width_of).find(|width| *width >= bits).unwrap_or(64)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::super::codec::Codec;
    use super::*;

    fn read(bytes: &[u8], version: Version, signed: bool) -> Vec<i64> {
        let stream = Stream::new(Codec::Plain, 1024, Bytes::copy_from_slice(bytes));
        let mut integers = Integers::new(stream, version, signed);
        std::iter::from_fn(|| integers.next().ok()).collect()
    }

    #[test]
    fn examples_of_the_specification_version_1() {
        assert_eq!(read(&[0x61, 0x00, 0x07], Version::One, false), [7; 100]);
        let falling: Vec<i64> = (1..=100).rev().collect();
        assert_eq!(read(&[0x61, 0xff, 0x64], Version::One, false), falling);
        assert_eq!(read(&[0xfb, 0x02, 0x03, 0x04, 0x07, 0xb], Version::One, false), [2, 3, 4, 7, 11]);
        assert_eq!(read(&[0xfe, 0x01, 0x02], Version::One, true), [-1, 1]);
    }

    #[test]
    fn examples_of_the_specification_version_2() {
        assert_eq!(read(&[0x0a, 0x27, 0x10], Version::Two, false), [10000; 5]);
        let direct = [0x5e, 0x03, 0x5c, 0xa1, 0xab, 0x1e, 0xde, 0xad, 0xbe, 0xef];
        assert_eq!(read(&direct, Version::Two, false), [23713, 43806, 57005, 48879]);
        let patched = [
            0x8e, 0x13, 0x2b, 0x21, 0x07, 0xd0, 0x1e, 0x00, 0x14, 0x70, 0x28, 0x32, 0x3c, 0x46, 0x50, 0x5a,
            0x64, 0x6e, 0x78, 0x82, 0x8c, 0x96, 0xa0, 0xaa, 0xb4, 0xbe, 0xfc, 0xe8,
        ];
        let wanted = [
            2030, 2000, 2020, 1_000_000, 2040, 2050, 2060, 2070, 2080, 2090, 2100, 2110, 2120, 2130, 2140,
            2150, 2160, 2170, 2180, 2190,
        ];
        assert_eq!(read(&patched, Version::Two, false), wanted);
        let delta = [0xc6, 0x09, 0x02, 0x02, 0x22, 0x42, 0x42, 0x46];
        assert_eq!(read(&delta, Version::Two, false), [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]);
        // Ten equal steps down, of signed numbers.
        let falling: Vec<i64> = (0..10).map(|at| 5 - 3 * at).collect();
        assert_eq!(read(&[0xc0, 0x09, 0x0a, 0x05], Version::Two, true), falling);
    }
}
