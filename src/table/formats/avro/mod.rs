//! Avro data and delete files: object container files (Avro specification 1.12), block after block.
//!
//! The file comes in pieces of any size; a block is decoded when it is whole. So what is in memory is one block,
//! or one piece, and a batch of rows.
//!
//! Read here and not by a library: see `docs/decisions/0030-avro-and-orc.md`.

mod cursor;
mod schema;
mod values;

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use datafusion::arrow::datatypes::{Field as ArrowField, Schema};

use super::super::avro::header::AvroFile;
use super::codec::Codec;
use super::fault::{Decoded, Fault};
use super::named::NamedField;
use cursor::Cursor;
use schema::Field;
use values::Column;

const MAGIC: &[u8] = b"Obj\x01";
/// Largest header, in bytes; that of a table with ten thousand columns has about one MiB.
const MAX_HEADER_BYTES: usize = 64 * 1024 * 1024;
/// Bytes that one block may have, in the file and plain; Java writes blocks of 64 KB.
const MAX_BLOCK_BYTES: usize = 256 * 1024 * 1024;
/// Bytes of rows after which a batch goes out, however few rows it has.
const BATCH_BYTES: usize = 64 * 1024 * 1024;
/// Bytes of the marker behind each block.
const SYNC_BYTES: usize = 16;
/// Bytes of a count and a size at most.
const BLOCK_HEAD_BYTES: usize = 20;

/// What the header of a file says.
#[derive(Clone, Debug)]
pub(in crate::table) struct AvroHeader {
    fields: Vec<Field>,
    codec: Codec,
    sync: [u8; SYNC_BYTES],
    /// Bytes before the first block.
    length: usize,
}

impl AvroHeader {
    /// Reads the header at the beginning of a file; `None` when the bytes end within it.
    pub fn parse(bytes: &[u8]) -> Decoded<Option<Self>> {
        if !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(Fault::corrupt("it is no Avro file"));
        }
        let Some(file) = AvroFile::parse(bytes) else {
            return if bytes.len() < MAX_HEADER_BYTES {
                Ok(None)
            } else {
                Err(Fault::corrupt("its Avro header has no end"))
            };
        };
        let (sync, blocks) =
            file.rest().split_first_chunk().ok_or_else(|| Fault::corrupt("its Avro header has no marker"))?;
        let codec = match file.get("avro.codec") {
            None | Some(b"null") => Codec::Plain,
            Some(b"deflate") => Codec::Deflate,
            Some(b"snappy") => Codec::Snappy,
            Some(b"zstandard") => Codec::Zstd,
            Some(other) => {
                return Err(Fault::unsupported(format!(
                    "its blocks are compressed with '{}', and deflate, snappy and zstandard are read; set the table \
                     property write.avro.compression-codec to zstd and write its rows again",
                    String::from_utf8_lossy(other)
                )));
            }
        };
        let json = file.get("avro.schema").ok_or_else(|| Fault::corrupt("its Avro header has no schema"))?;
        Ok(Some(Self {
            fields: schema::columns(json)?,
            codec,
            sync: *sync,
            length: bytes.len() - blocks.len(),
        }))
    }

    pub fn named(&self) -> Vec<NamedField> {
        self.fields.iter().map(Field::named).collect()
    }
}

/// Decodes the blocks of a file.
pub(in crate::table) struct AvroDecoder {
    header: AvroHeader,
    /// For each column of the file its place in the batches; `None`: it is skipped.
    places: Vec<Option<usize>>,
    columns: Vec<Column>,
    /// Rows of the batch that is being filled.
    rows: usize,
    /// Bytes of these rows.
    bytes: usize,
    batch_rows: usize,
    /// What is not a whole block yet.
    pending: Vec<u8>,
}

impl AvroDecoder {
    /// `roots` are the columns to give, by their places in the file; each once.
    pub fn new(header: AvroHeader, roots: &[usize], batch_rows: usize) -> Decoded<Self> {
        let mut places = vec![None; header.fields.len()];
        let mut columns = Vec::with_capacity(roots.len());
        for (at, root) in roots.iter().enumerate() {
            let (Some(place), Some(field)) = (places.get_mut(*root), header.fields.get(*root)) else {
                return Err(Fault::corrupt(format!("it has no column at {root}")));
            };
            *place = Some(at);
            columns.push(Column::of(&field.node)?);
        }
        Ok(Self { header, places, columns, rows: 0, bytes: 0, batch_rows, pending: Vec::new() })
    }

    /// Bytes before the first block: what is fed comes behind them.
    pub fn header_bytes(&self) -> usize {
        self.header.length
    }

    /// Takes the next bytes of the file; batches that they complete.
    pub fn feed(&mut self, bytes: &[u8]) -> Decoded<Vec<RecordBatch>> {
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(bytes);
        let mut batches = Vec::new();
        let mut used = 0;
        while let Some(block) = self.next_block(&pending[used..])? {
            used += block.length;
            let packed = &pending[used - SYNC_BYTES - block.bytes..used - SYNC_BYTES];
            self.block(packed, block.count, &mut batches)?;
        }
        pending.drain(..used);
        self.pending = pending;
        Ok(batches)
    }

    /// The last rows, when the file has been fed.
    pub fn finish(&mut self) -> Decoded<Option<RecordBatch>> {
        if !self.pending.is_empty() {
            return Err(Fault::corrupt("it is cut off within a block"));
        }
        if self.rows == 0 { Ok(None) } else { self.flush().map(Some) }
    }

    /// The block at the beginning of `bytes`; `None` when it is not whole.
    fn next_block(&self, bytes: &[u8]) -> Decoded<Option<Block>> {
        let mut cursor = Cursor::new(bytes);
        let (count, size) = match (cursor.long(), cursor.long()) {
            (Ok(count), Ok(size)) => (count, size),
            _ if bytes.len() < BLOCK_HEAD_BYTES => return Ok(None),
            (Err(fault), _) | (_, Err(fault)) => return Err(fault),
        };
        let (Ok(count), Ok(size)) = (u64::try_from(count), usize::try_from(size)) else {
            return Err(Fault::corrupt("a block has a negative size"));
        };
        if size > MAX_BLOCK_BYTES {
            return Err(Fault::unsupported(format!(
                "a block of it has {size} bytes, at most {MAX_BLOCK_BYTES} are read; write its rows again in smaller \
                 blocks"
            )));
        }
        let head = bytes.len() - cursor.left();
        if cursor.left() < size + SYNC_BYTES {
            return Ok(None);
        }
        cursor.take(size)?;
        if cursor.array()? != self.header.sync {
            return Err(Fault::corrupt("a block does not end with the marker of the file"));
        }
        Ok(Some(Block { count, bytes: size, length: head + size + SYNC_BYTES }))
    }

    fn block(&mut self, packed: &[u8], count: u64, batches: &mut Vec<RecordBatch>) -> Decoded<()> {
        let unpacked;
        let plain = match self.header.codec {
            Codec::Plain => packed,
            Codec::Snappy => {
                // Behind the bytes comes a checksum of the plain ones.
                let (packed, checksum) = packed
                    .split_last_chunk::<4>()
                    .ok_or_else(|| Fault::corrupt("a snappy block has no checksum"))?;
                unpacked = Codec::Snappy.plain(packed, MAX_BLOCK_BYTES)?;
                if crc32fast::hash(&unpacked) != u32::from_be_bytes(*checksum) {
                    return Err(Fault::corrupt("a snappy block has another checksum"));
                }
                &unpacked
            }
            codec => {
                unpacked = codec.plain(packed, MAX_BLOCK_BYTES)?;
                &unpacked
            }
        };
        let mut cursor = Cursor::new(plain);
        for _ in 0..count {
            let before = cursor.left();
            for (field, place) in self.header.fields.iter().zip(&self.places) {
                match place.and_then(|at| self.columns.get_mut(at)) {
                    Some(column) => column.read(&mut cursor, &field.node)?,
                    None => cursor.skip(&field.node)?,
                }
            }
            let bytes = before - cursor.left();
            if bytes == 0 {
                return Err(Fault::corrupt("its rows have no bytes"));
            }
            self.rows += 1;
            self.bytes += bytes;
            if self.rows >= self.batch_rows || self.bytes >= BATCH_BYTES {
                batches.push(self.flush()?);
            }
        }
        if cursor.left() > 0 {
            return Err(Fault::corrupt("a block has more bytes than its rows"));
        }
        Ok(())
    }

    fn flush(&mut self) -> Decoded<RecordBatch> {
        let rows = std::mem::take(&mut self.rows);
        self.bytes = 0;
        let arrays = self.columns.iter_mut().map(Column::finish).collect::<Decoded<Vec<_>>>()?;
        batch(arrays, rows)
    }
}

struct Block {
    count: u64,
    /// Bytes of the rows, as they are in the file.
    bytes: usize,
    /// Bytes of the whole block.
    length: usize,
}

/// A batch of columns without names: who asked for them knows which they are.
pub(super) fn batch(arrays: Vec<ArrayRef>, rows: usize) -> Decoded<RecordBatch> {
    let field = |array: &ArrayRef| ArrowField::new("", array.data_type().clone(), true);
    let schema = Arc::new(Schema::new(arrays.iter().map(field).collect::<Vec<_>>()));
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema, arrays, &options).map_err(|e| Fault::corrupt(e.to_string()))
}

#[cfg(test)]
mod tests;
