//! Values in the bytes of a block (Avro specification 1.12, "Binary Encoding"). Nothing is taken on trust: a
//! length that goes beyond the block, or a count of items that have no bytes, is damage.

use super::super::fault::{Decoded, Fault};
use super::schema::Node;

/// What is left of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

fn ends_early() -> Fault {
    Fault::corrupt("a block ends within a value")
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// A zig-zag variable-length integer; `int` and `long` are encoded alike.
    pub fn long(&mut self) -> Decoded<i64> {
        let mut value: u64 = 0;
        for shift in (0..64).step_by(7) {
            let (first, rest) = self.rest.split_first().ok_or_else(ends_early)?;
            self.rest = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed());
            }
        }
        Err(Fault::corrupt("a number has no end"))
    }

    pub fn int(&mut self) -> Decoded<i32> {
        i32::try_from(self.long()?).map_err(|_| Fault::corrupt("a number is too large for its type"))
    }

    pub fn take(&mut self, length: usize) -> Decoded<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or_else(ends_early)?;
        self.rest = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Decoded<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| ends_early())
    }

    /// Bytes behind their length.
    pub fn sized(&mut self) -> Decoded<&'a [u8]> {
        let length = self.long()?;
        self.take(usize::try_from(length).map_err(|_| Fault::corrupt("a length is negative"))?)
    }

    /// The branch of an optional value: is it there?
    pub fn is_present(&mut self, null_at: i64) -> Decoded<bool> {
        match self.long()? {
            branch @ (0 | 1) => Ok(branch != null_at),
            branch => Err(Fault::corrupt(format!("a union has no branch {branch}"))),
        }
    }

    /// Calls `item` as often as the counts of an array or a map say; how often that was.
    pub fn items(&mut self, mut item: impl FnMut(&mut Self) -> Decoded<()>) -> Decoded<usize> {
        let mut all = 0;
        loop {
            let count = self.long()?;
            if count == 0 {
                return Ok(all);
            }
            if count < 0 {
                // Followed by the size of the items in bytes.
                self.long()?;
            }
            for _ in 0..count.unsigned_abs() {
                let before = self.rest.len();
                item(self)?;
                if self.rest.len() == before {
                    return Err(Fault::corrupt("items of a list have no bytes"));
                }
                all += 1;
            }
        }
    }

    pub fn skip(&mut self, node: &Node) -> Decoded<()> {
        match node {
            Node::Null => {}
            Node::Boolean => drop(self.take(1)?),
            Node::Int
            | Node::Date
            | Node::TimeMillis
            | Node::Long
            | Node::TimeMicros
            | Node::Timestamp(_)
            | Node::Enum(_) => drop(self.long()?),
            Node::Float => drop(self.take(4)?),
            Node::Double => drop(self.take(8)?),
            Node::Bytes | Node::Text | Node::Decimal { size: None, .. } => drop(self.sized()?),
            Node::Fixed(size) | Node::Decimal { size: Some(size), .. } => drop(self.take(*size)?),
            Node::Record(fields) => fields.iter().try_for_each(|field| self.skip(&field.node))?,
            Node::List { element, .. } => drop(self.items(|cursor| cursor.skip(element))?),
            Node::Map { value, .. } => drop(self.items(|cursor| {
                cursor.sized()?;
                cursor.skip(value)
            })?),
            Node::Entries { key, value } => drop(self.items(|cursor| {
                cursor.skip(&key.node)?;
                cursor.skip(&value.node)
            })?),
            Node::Optional { null_at, inner } => {
                if self.is_present(*null_at)? {
                    self.skip(inner)?;
                }
            }
            Node::Union(branches) => {
                let branch = self.long()?;
                let node = usize::try_from(branch).ok().and_then(|at| branches.get(at));
                self.skip(node.ok_or_else(|| Fault::corrupt(format!("a union has no branch {branch}")))?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_zig_zag_and_end() {
        for (bytes, value) in [
            (&[0x00][..], 0),
            (&[0x01], -1),
            (&[0x02], 1),
            (&[0x7f], -64),
            (&[0x80, 0x01], 64),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], i64::MIN),
        ] {
            assert_eq!(Cursor::new(bytes).long().unwrap(), value);
        }
        assert!(Cursor::new(&[0xff; 20]).long().is_err());
        assert!(Cursor::new(&[0x80]).long().is_err());
        assert!(Cursor::new(&[0x80, 0x80, 0x80, 0x80, 0x10]).int().is_err());
    }

    #[test]
    fn a_count_that_is_a_lie_ends() {
        // 2^62 nulls take no bytes at all.
        let mut bytes = vec![0xff; 8];
        bytes.push(0x7e);
        let nulls = Node::List { id: None, element: Box::new(Node::Null) };
        assert!(Cursor::new(&bytes).skip(&nulls).is_err());
        let longs = Node::List { id: None, element: Box::new(Node::Long) };
        assert!(Cursor::new(&bytes).skip(&longs).is_err());
        assert!(Cursor::new(&[0x7f]).sized().is_err());
    }
}
