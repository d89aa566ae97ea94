//! ORC data and delete files (ORC specification v1), stripe after stripe.
//!
//! [`Tail`] says what a file has, [`Tail::plan`] which bytes of a stripe are needed for some of its columns, and
//! [`StripeReader`] makes rows of them. What is in memory is these bytes as they are in the file, and a batch of
//! rows.
//!
//! Read here and not by a library: see `docs/decisions/0030-avro-and-orc.md`.

mod columns;
mod integers;
mod protobuf;
mod stream;
mod tail;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use bytes::Bytes;
use chrono_tz::Tz;
use datafusion::arrow::array::RecordBatch;

use super::avro::batch;
use super::fault::{Decoded, Fault};
use columns::{Column, Pieces, Times, Values};
use integers::{Integers, Version};
use protobuf::fields;
use stream::{Bits, ByteRuns, Stream};
use tail::Kind;

pub(in crate::table) use tail::{Tail, TailStep};

/// Bytes of one stripe's wanted columns, as they are in the file; Java writes stripes of 64 MiB.
const MAX_STRIPE_BYTES: u64 = 1024 * 1024 * 1024;
/// Bytes of streams that the rows of a batch may come from, as far as they are spread evenly.
const BATCH_STREAM_BYTES: u64 = 16 * 1024 * 1024;
/// Rows of a batch at least, however long they are.
const MIN_BATCH_ROWS: usize = 16;

/// Streams that hold values; those of indexes are not read.
const PRESENT: u64 = 0;
const DATA: u64 = 1;
const LENGTH: u64 = 2;
const DICTIONARY_DATA: u64 = 3;
const SECONDARY: u64 = 5;

/// What is read of a stripe.
#[derive(Debug)]
pub(in crate::table) struct StripePlan {
    /// Number of the column, kind, and place in the file.
    streams: Vec<(usize, u64, Range<u64>)>,
    encodings: Vec<Encoding>,
    /// Name of the writer's time zone.
    zone: Option<String>,
    rows: u64,
}

#[derive(Clone, Copy, Debug)]
struct Encoding {
    version: Version,
    /// Number of entries.
    dictionary: Option<usize>,
}

impl StripePlan {
    /// Where the bytes are, in file order.
    pub fn ranges(&self) -> impl Iterator<Item = &Range<u64>> {
        self.streams.iter().map(|(_, _, range)| range)
    }
}

impl Tail {
    pub fn stripes(&self) -> usize {
        self.stripes.len()
    }

    /// Where a stripe says what it has.
    pub fn footer_range(&self, stripe: usize) -> Range<u64> {
        self.stripes.get(stripe).map_or(0..0, tail::Stripe::footer_range)
    }

    /// What is to be read of a stripe for the columns `roots`, by their places in the file.
    pub fn plan(&self, stripe: usize, footer: &[u8], roots: &[usize]) -> Decoded<StripePlan> {
        let stripe = self.stripes.get(stripe).ok_or_else(|| Fault::corrupt("it has no such stripe"))?;
        let mut wanted = Vec::new();
        for root in roots {
            self.with_children(self.number_of(*root)?, &mut wanted);
        }
        let wanted: BTreeSet<usize> = wanted.into_iter().collect();
        let message = tail::plain(self.codec, self.chunk_bytes, footer)?;
        let end = stripe.offset + stripe.streams;
        let (mut at, mut bytes) = (stripe.offset, 0);
        let (mut streams, mut encodings, mut zone) = (Vec::new(), Vec::new(), None);
        fields(&message, |field, value| {
            match field {
                1 => {
                    let (kind, column, length) = stream_of(value.bytes()?)?;
                    let start = at;
                    at = at
                        .checked_add(length)
                        .filter(|at| *at <= end)
                        .ok_or_else(|| Fault::corrupt("a stream of it lies outside of its stripe"))?;
                    if wanted.contains(&column)
                        && matches!(kind, PRESENT | DATA | LENGTH | DICTIONARY_DATA | SECONDARY)
                    {
                        bytes += length;
                        streams.push((column, kind, start..at));
                    }
                }
                2 => encodings.push(encoding_of(value.bytes()?)?),
                3 => zone = Some(value.text()?),
                _ => {}
            }
            Ok(())
        })?;
        if encodings.len() != self.columns.len() {
            return Err(Fault::corrupt("a stripe of it has other columns than the file"));
        }
        if bytes > MAX_STRIPE_BYTES {
            return Err(Fault::unsupported(format!(
                "the columns that are read of a stripe have {bytes} bytes, at most {MAX_STRIPE_BYTES} are read; set \
                 the table property write.orc.stripe-size-bytes to 67108864 and write its rows again"
            )));
        }
        Ok(StripePlan { streams, encodings, zone, rows: stripe.rows })
    }

    fn number_of(&self, root: usize) -> Decoded<usize> {
        let columns = self.columns.first().map(|root| root.children.as_slice()).unwrap_or_default();
        columns.get(root).copied().ok_or_else(|| Fault::corrupt(format!("it has no column at {root}")))
    }
}

fn stream_of(message: &[u8]) -> Decoded<(u64, usize, u64)> {
    let (mut kind, mut column, mut length) = (0, 0, 0);
    fields(message, |field, value| {
        match field {
            1 => kind = value.number()?,
            2 => column = value.u32()? as usize,
            3 => length = value.number()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok((kind, column, length))
}

fn encoding_of(message: &[u8]) -> Decoded<Encoding> {
    let (mut kind, mut size) = (0, 0);
    fields(message, |field, value| {
        match field {
            1 => kind = value.number()?,
            2 => size = value.u32()? as usize,
            _ => {}
        }
        Ok(())
    })?;
    let (version, has_dictionary) = match kind {
        0 => (Version::One, false),
        1 => (Version::One, true),
        2 => (Version::Two, false),
        3 => (Version::Two, true),
        other => return Err(Fault::unsupported(format!("a column of it has the encoding {other}"))),
    };
    Ok(Encoding { version, dictionary: has_dictionary.then_some(size) })
}

/// Iceberg's writers are in UTC.
fn zone_of(name: Option<&str>) -> Decoded<Option<Tz>> {
    let Some(name) = name else { return Ok(None) };
    match name.parse() {
        Ok(Tz::UTC | Tz::GMT | Tz::Etc__UTC | Tz::Etc__GMT) => Ok(None),
        Ok(zone) => Ok(Some(zone)),
        Err(_) => Err(Fault::unsupported(format!(
            "its timestamps are of the time zone '{name}', which is not known; write its rows again with an Iceberg \
             writer"
        ))),
    }
}

/// Rows of one stripe.
pub(in crate::table) struct StripeReader {
    columns: Vec<Column>,
    left: u64,
    batch_rows: usize,
}

impl StripeReader {
    /// `bytes` are those of [`StripePlan::ranges`].
    pub fn new(
        tail: &Tail,
        plan: &StripePlan,
        roots: &[usize],
        bytes: &[Bytes],
        batch_rows: usize,
    ) -> Decoded<Self> {
        let streams = plan.streams.iter().zip(bytes);
        let streams: HashMap<(usize, u64), Bytes> =
            streams.map(|((column, kind, _), bytes)| ((*column, *kind), bytes.clone())).collect();
        let maker = Maker { tail, plan, streams };
        let mut columns = Vec::with_capacity(roots.len());
        for root in roots {
            columns.push(maker.column(tail.number_of(*root)?)?);
        }
        let total: u64 = bytes.iter().map(|bytes| bytes.len() as u64).sum();
        let at_once = plan.rows.saturating_mul(BATCH_STREAM_BYTES).checked_div(total);
        let at_once = at_once.and_then(|rows| usize::try_from(rows).ok()).unwrap_or(batch_rows);
        let batch_rows = at_once.clamp(MIN_BATCH_ROWS.min(batch_rows), batch_rows);
        Ok(Self { columns, left: plan.rows, batch_rows })
    }

    pub fn next(&mut self) -> Decoded<Option<RecordBatch>> {
        let rows = usize::try_from(self.left).unwrap_or(usize::MAX).min(self.batch_rows);
        if rows == 0 {
            return Ok(None);
        }
        self.left -= rows as u64;
        let arrays = self.columns.iter_mut().map(|column| column.next(rows)).collect::<Decoded<Vec<_>>>()?;
        batch(arrays, rows).map(Some)
    }
}

/// Makes columns of the streams of a stripe.
struct Maker<'a> {
    tail: &'a Tail,
    plan: &'a StripePlan,
    streams: HashMap<(usize, u64), Bytes>,
}

impl Maker<'_> {
    fn stream(&self, column: usize, kind: u64) -> Stream {
        let bytes = self.streams.get(&(column, kind)).cloned().unwrap_or_default();
        Stream::new(self.tail.codec, self.tail.chunk_bytes, bytes)
    }

    fn column(&self, number: usize) -> Decoded<Column> {
        let (Some(column), Some(encoding)) =
            (self.tail.columns.get(number), self.plan.encodings.get(number).copied())
        else {
            return Err(Fault::corrupt("a column of it is missing"));
        };
        let integers =
            |kind: u64, signed: bool| Integers::new(self.stream(number, kind), encoding.version, signed);
        let values = match &column.kind {
            Kind::Boolean => Values::Boolean(Bits::new(self.stream(number, DATA))),
            Kind::Byte => Values::Byte(ByteRuns::new(self.stream(number, DATA))),
            Kind::Short => Values::Short(integers(DATA, true)),
            Kind::Int => Values::Int(integers(DATA, true)),
            Kind::Long => Values::Long(integers(DATA, true)),
            Kind::Time => Values::Time(integers(DATA, true)),
            Kind::Date => Values::Date(integers(DATA, true)),
            Kind::Float => Values::Float(self.stream(number, DATA)),
            Kind::Double => Values::Double(self.stream(number, DATA)),
            Kind::Text => Values::Text(self.pieces(number, encoding)?),
            Kind::Binary => Values::Binary(self.pieces(number, encoding)?),
            Kind::Fixed(size) => Values::Fixed(self.pieces(number, encoding)?, *size),
            Kind::Decimal { precision, scale } => Values::Decimal {
                numbers: self.stream(number, DATA),
                scales: integers(SECONDARY, true),
                precision: *precision,
                scale: *scale,
            },
            Kind::Timestamp { nanos, instant } => Values::Timestamp(Times {
                seconds: integers(DATA, true),
                nanos: integers(SECONDARY, false),
                in_nanos: *nanos,
                instant: *instant,
                zone: if *instant { None } else { zone_of(self.plan.zone.as_deref())? },
            }),
            Kind::Struct => {
                let mut children = Vec::with_capacity(column.children.len());
                for (name, child) in column.names.iter().zip(&column.children) {
                    children.push((name.clone(), self.column(*child)?));
                }
                Values::Struct(children)
            }
            Kind::List => match column.children.as_slice() {
                [element] => Values::List(integers(LENGTH, false), Box::new(self.column(*element)?)),
                _ => return Err(Fault::corrupt("a list of it has no element")),
            },
            Kind::Map => match column.children.as_slice() {
                [key, value] => {
                    let columns = Box::new([self.column(*key)?, self.column(*value)?]);
                    Values::Map(integers(LENGTH, false), columns)
                }
                _ => return Err(Fault::corrupt("a map of it has no key and value")),
            },
            Kind::Union => {
                return Err(Fault::unsupported(
                    "a column is a union of several types, which no Iceberg type is; write its rows again with an \
                     Iceberg writer",
                ));
            }
        };
        let present = self.streams.contains_key(&(number, PRESENT));
        Ok(Column { present: present.then(|| Bits::new(self.stream(number, PRESENT))), values })
    }

    fn pieces(&self, number: usize, encoding: Encoding) -> Decoded<Pieces> {
        let integers = |kind: u64| Integers::new(self.stream(number, kind), encoding.version, false);
        match encoding.dictionary {
            None => Ok(Pieces::Direct { lengths: integers(LENGTH), bytes: self.stream(number, DATA) }),
            Some(entries) => {
                let bytes = self.stream(number, DICTIONARY_DATA);
                Pieces::dictionary(integers(DATA), integers(LENGTH), bytes, entries)
            }
        }
    }
}

#[cfg(test)]
mod tests;
