//! An Avro or ORC file in memory, some columns of it: delete files are read so.

use bytes::Bytes;
use datafusion::arrow::array::RecordBatch;
use iceberg::spec::DataFileFormat;

use super::avro::{AvroDecoder, AvroHeader};
use super::fault::{Decoded, Fault};
use super::named::NamedField;
use super::orc::{StripeReader, Tail, TailStep};

/// Bytes of an Avro file that are decoded at a time.
const PIECE_BYTES: usize = 1024 * 1024;

/// A file whose columns are known, and of which nothing else is decoded yet.
pub(in crate::table) struct MemoryFile {
    bytes: Bytes,
    format: Format,
}

enum Format {
    Avro(AvroHeader),
    Orc(Tail),
}

impl MemoryFile {
    pub fn open(bytes: Bytes, format: DataFileFormat) -> Decoded<Self> {
        let format = match format {
            DataFileFormat::Avro => Format::Avro(
                AvroHeader::parse(&bytes)?
                    .ok_or_else(|| Fault::corrupt("it is cut off within its header"))?,
            ),
            DataFileFormat::Orc => match Tail::parse(&bytes, bytes.len() as u64)? {
                TailStep::Read(tail) => Format::Orc(tail),
                TailStep::Needs(_) => return Err(Fault::corrupt("its footer has no end")),
            },
            other => return Err(Fault::unsupported(format!("it is a {other} file"))),
        };
        Ok(Self { bytes, format })
    }

    pub fn columns(&self) -> Vec<NamedField> {
        match &self.format {
            Format::Avro(header) => header.named(),
            Format::Orc(tail) => tail.named(),
        }
    }

    /// The columns at `roots`, by their places in the file, ascending.
    pub fn select(self, roots: Vec<usize>, batch_rows: usize) -> Decoded<MemoryBatches> {
        let state = match self.format {
            Format::Avro(header) => {
                let decoder = AvroDecoder::new(header, &roots, batch_rows)?;
                let rest = self.bytes.slice(decoder.header_bytes()..);
                State::Avro { decoder: Box::new(decoder), rest }
            }
            Format::Orc(tail) => {
                State::Orc { tail, bytes: self.bytes, roots, batch_rows, next: 0, stripe: None }
            }
        };
        Ok(MemoryBatches { state, ready: Vec::new(), ended: false })
    }
}

/// Batches of the chosen columns, in file order; none after an error.
pub(in crate::table) struct MemoryBatches {
    state: State,
    /// The next one last.
    ready: Vec<RecordBatch>,
    ended: bool,
}

enum State {
    Avro {
        decoder: Box<AvroDecoder>,
        rest: Bytes,
    },
    Orc {
        tail: Tail,
        bytes: Bytes,
        roots: Vec<usize>,
        batch_rows: usize,
        next: usize,
        stripe: Option<StripeReader>,
    },
}

impl MemoryBatches {
    fn step(&mut self) -> Decoded<Option<RecordBatch>> {
        loop {
            if let Some(batch) = self.ready.pop() {
                return Ok(Some(batch));
            }
            if self.ended {
                return Ok(None);
            }
            match &mut self.state {
                State::Avro { decoder, rest } => {
                    let piece = rest.split_to(PIECE_BYTES.min(rest.len()));
                    self.ready = decoder.feed(&piece)?;
                    if rest.is_empty() {
                        self.ended = true;
                        self.ready.extend(decoder.finish()?);
                    }
                    self.ready.reverse();
                }
                State::Orc { tail, bytes, roots, batch_rows, next, stripe } => match stripe {
                    Some(reader) => match reader.next()? {
                        Some(batch) => return Ok(Some(batch)),
                        None => *stripe = None,
                    },
                    None if *next == tail.stripes() => self.ended = true,
                    None => {
                        let slice = |range: &std::ops::Range<u64>| -> Option<Bytes> {
                            let (start, end) =
                                (usize::try_from(range.start).ok()?, usize::try_from(range.end).ok()?);
                            (start <= end && end <= bytes.len()).then(|| bytes.slice(start..end))
                        };
                        let outside = || Fault::corrupt("a stripe lies outside of the file");
                        let footer = slice(&tail.footer_range(*next)).ok_or_else(outside)?;
                        let plan = tail.plan(*next, &footer, roots)?;
                        let streams: Option<Vec<Bytes>> = plan.ranges().map(slice).collect();
                        let streams = streams.ok_or_else(outside)?;
                        *stripe = Some(StripeReader::new(tail, &plan, roots, &streams, *batch_rows)?);
                        *next += 1;
                    }
                },
            }
        }
    }
}

impl Iterator for MemoryBatches {
    type Item = Decoded<RecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step();
        self.ended |= step.is_err();
        step.transpose()
    }
}
