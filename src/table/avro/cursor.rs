//! Values read from the bytes of a data block (Avro specification 1.12, "Binary Encoding").

use super::schema::{Field, Node};
use super::{Unusual, Usual};

/// What is left of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// A zig-zag variable-length integer; `int` and `long` are encoded alike.
    pub fn varint(&mut self) -> Usual<i64> {
        let mut value: u64 = 0;
        for shift in (0..64).step_by(7) {
            let (first, rest) = self.rest.split_first().ok_or(Unusual)?;
            self.rest = rest;
            value |= u64::from(first & 0x7f) << shift;
            if first & 0x80 == 0 {
                return Ok((value >> 1) as i64 ^ -((value & 1) as i64));
            }
        }
        Err(Unusual)
    }

    pub fn take(&mut self, length: usize) -> Usual<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Unusual)?;
        self.rest = rest;
        Ok(taken)
    }

    fn sized(&mut self) -> Usual<&'a [u8]> {
        let length = self.varint()?;
        self.take(usize::try_from(length).map_err(|_| Unusual)?)
    }

    /// Steps into a union: the branch that was written, `None` for null. What is no union is its own branch.
    pub fn present<'n>(&mut self, node: &'n Node) -> Usual<Option<&'n Node>> {
        let branch = match node {
            Node::Union(options) => {
                let index = usize::try_from(self.varint()?).map_err(|_| Unusual)?;
                options.get(index).ok_or(Unusual)?
            }
            other => other,
        };
        Ok((*branch != Node::Null).then_some(branch))
    }

    pub fn boolean(&mut self, node: &Node) -> Usual<Option<bool>> {
        match self.present(node)? {
            None => Ok(None),
            Some(Node::Boolean) => match self.take(1)? {
                [0] => Ok(Some(false)),
                [1] => Ok(Some(true)),
                _ => Err(Unusual),
            },
            Some(_) => Err(Unusual),
        }
    }

    /// An `int` or `long`.
    pub fn long(&mut self, node: &Node) -> Usual<Option<i64>> {
        match self.present(node)? {
            None => Ok(None),
            Some(Node::Int | Node::Long) => self.varint().map(Some),
            Some(_) => Err(Unusual),
        }
    }

    pub fn int(&mut self, node: &Node) -> Usual<Option<i32>> {
        self.long(node)?.map(|value| i32::try_from(value).map_err(|_| Unusual)).transpose()
    }

    pub fn string(&mut self, node: &Node) -> Usual<Option<&'a str>> {
        match self.present(node)? {
            None => Ok(None),
            Some(Node::String) => std::str::from_utf8(self.sized()?).map(Some).map_err(|_| Unusual),
            Some(_) => Err(Unusual),
        }
    }

    /// `bytes` or `fixed`.
    pub fn bytes(&mut self, node: &Node) -> Usual<Option<&'a [u8]>> {
        match self.present(node)? {
            None => Ok(None),
            Some(Node::Bytes) => self.sized().map(Some),
            Some(Node::Fixed(size)) => self.take(*size).map(Some),
            Some(_) => Err(Unusual),
        }
    }

    /// The items of an array; `false` when it is null.
    pub fn items(&mut self, node: &Node, mut item: impl FnMut(&mut Self, &Node) -> Usual<()>) -> Usual<bool> {
        match self.present(node)? {
            None => Ok(false),
            Some(Node::Array(of)) => {
                self.blocks(|cursor| item(cursor, of))?;
                Ok(true)
            }
            Some(_) => Err(Unusual),
        }
    }

    /// Calls `item` as often as the counts of an array or a map say.
    fn blocks(&mut self, mut item: impl FnMut(&mut Self) -> Usual<()>) -> Usual<()> {
        loop {
            let count = self.varint()?;
            if count == 0 {
                return Ok(());
            }
            if count < 0 {
                // Followed by the size of the block in bytes.
                self.varint()?;
            }
            for _ in 0..count.unsigned_abs() {
                let before = self.rest.len();
                item(self)?;
                // A count that is a lie must not keep us here.
                if self.rest.len() == before {
                    return Err(Unusual);
                }
            }
        }
    }

    /// The fields of a record, in file order; each has to be read or skipped.
    pub fn fields(
        &mut self,
        fields: &[Field],
        mut field: impl FnMut(&mut Self, &Field) -> Usual<()>,
    ) -> Usual<()> {
        fields.iter().try_for_each(|f| field(self, f))
    }

    pub fn skip(&mut self, node: &Node) -> Usual<()> {
        let Some(node) = self.present(node)? else { return Ok(()) };
        match node {
            Node::Null => {}
            Node::Boolean => drop(self.take(1)?),
            Node::Int | Node::Long => drop(self.varint()?),
            Node::Float => drop(self.take(4)?),
            Node::Double => drop(self.take(8)?),
            Node::Bytes | Node::String => drop(self.sized()?),
            Node::Fixed(size) => drop(self.take(*size)?),
            Node::Array(of) => self.blocks(|cursor| cursor.skip(of))?,
            Node::Map(of) => self.blocks(|cursor| {
                cursor.sized()?;
                cursor.skip(of)
            })?,
            Node::Union(_) => return Err(Unusual),
            Node::Record(fields) => fields.iter().try_for_each(|field| self.skip(&field.node))?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_zig_zag_and_end() {
        for (bytes, value) in
            [(&[0x00][..], 0), (&[0x01], -1), (&[0x02], 1), (&[0x7f], -64), (&[0x80, 0x01], 64)]
        {
            assert_eq!(Cursor::new(bytes).varint().unwrap(), value);
        }
        assert!(Cursor::new(&[0xff; 20]).varint().is_err());
        assert!(Cursor::new(&[0x80]).varint().is_err());
    }

    #[test]
    fn everything_can_be_skipped() {
        let record = Node::Record(vec![
            Field { id: None, name: "a".to_owned(), node: Node::Union(vec![Node::Null, Node::Double]) },
            Field { id: None, name: "b".to_owned(), node: Node::Map(Box::new(Node::Int)) },
            Field { id: None, name: "c".to_owned(), node: Node::Array(Box::new(Node::Boolean)) },
            Field { id: None, name: "d".to_owned(), node: Node::Fixed(2) },
        ]);
        // b: one block of two pairs; c: a block that tells its size.
        let bytes =
            [&[0x00, 0x04, 0x02, b'k', 0x08, 0x00, 0x0a, 0x00][..], &[0x03, 0x04, 1, 0, 0, 9, 9, 0x2a]];
        let bytes = bytes.concat();
        let mut cursor = Cursor::new(&bytes);
        cursor.skip(&record).unwrap();
        assert_eq!(cursor.rest, [0x2a]);
        for length in 0..bytes.len() - 1 {
            assert!(Cursor::new(&bytes[..length]).skip(&record).is_err(), "cut at {length}");
        }
    }

    #[test]
    fn a_count_without_items_ends() {
        // 2^62 nulls take no bytes at all.
        let mut bytes = vec![0xff; 8];
        bytes.push(0x7e);
        let nulls = Node::Array(Box::new(Node::Null));
        assert!(Cursor::new(&bytes).skip(&nulls).is_err());
    }
}
