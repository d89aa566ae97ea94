//! Messages of a file's tail (Protocol Buffers, "Encoding"): the fields that are asked for, one by one.

use super::super::fault::{Decoded, Fault};

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Of a type that none of ORC's messages needs here.
    Other,
}

fn damaged() -> Fault {
    Fault::corrupt("a message of its tail is damaged")
}

impl<'a> Value<'a> {
    pub fn number(self) -> Decoded<u64> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Other => Err(damaged()),
        }
    }

    pub fn u32(self) -> Decoded<u32> {
        u32::try_from(self.number()?).map_err(|_| damaged())
    }

    pub fn bytes(self) -> Decoded<&'a [u8]> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Other => Err(damaged()),
        }
    }

    pub fn text(self) -> Decoded<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| damaged())
    }

    /// Adds a repeated number, be it packed or alone.
    pub fn numbers(self, all: &mut Vec<u32>) -> Decoded<()> {
        match self {
            Self::Bytes(mut bytes) => {
                while !bytes.is_empty() {
                    all.push(u32::try_from(varint(&mut bytes)?).map_err(|_| damaged())?);
                }
                Ok(())
            }
            other => {
                all.push(other.u32()?);
                Ok(())
            }
        }
    }
}

/// Calls `field` with the number and the value of each field.
pub(super) fn fields<'a>(
    mut message: &'a [u8],
    mut field: impl FnMut(u64, Value<'a>) -> Decoded<()>,
) -> Decoded<()> {
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let value = match key & 7 {
            0 => Value::Number(varint(&mut message)?),
            1 => {
                take(&mut message, 8)?;
                Value::Other
            }
            2 => {
                let length = usize::try_from(varint(&mut message)?).map_err(|_| damaged())?;
                Value::Bytes(take(&mut message, length)?)
            }
            5 => {
                take(&mut message, 4)?;
                Value::Other
            }
            _ => return Err(damaged()),
        };
        field(key >> 3, value)?;
    }
    Ok(())
}

fn varint(bytes: &mut &[u8]) -> Decoded<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().ok_or_else(damaged)?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(damaged())
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Decoded<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length).ok_or_else(damaged)?;
    *bytes = rest;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_given_in_order_and_damage_is_told() {
        // 1: 150, 2: "testing", 3: packed 3 and 270, 4: a fixed of 4 bytes.
        let message = b"\x08\x96\x01\x12\x07testing\x1a\x03\x03\x8e\x02\x25\0\0\0\0";
        let mut seen = Vec::new();
        let mut numbers = Vec::new();
        fields(message, |field, value| {
            seen.push((field, value));
            if field == 3 { value.numbers(&mut numbers) } else { Ok(()) }
        })
        .unwrap();
        assert_eq!(seen[..2], [(1, Value::Number(150)), (2, Value::Bytes(b"testing"))]);
        assert_eq!((seen[3], numbers), ((4, Value::Other), vec![3, 270]));
        assert!(fields(b"\x12\x7f", |_, _| Ok(())).is_err());
        assert!(fields(&[0xff; 12], |_, _| Ok(())).is_err());
        assert!(fields(b"\x0b", |_, _| Ok(())).is_err());
    }
}
