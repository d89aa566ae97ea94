//! What the end of an ORC file says: how it is compressed, its columns, and where its stripes are (ORC
//! specification v1, "File Tail").
//!
//! All of it is checked here, so that reading stripes can rely on it: columns make a tree, stripes lie within the
//! file, and their rows add up to the file's.

use std::ops::Range;

use super::super::codec::Codec;
use super::super::fault::{Decoded, Fault};
use super::super::named::{ELEMENT, KEY, NamedField, VALUE};
use super::protobuf::{Value, fields};

/// Pieces of a stream before they are compressed: their length has 23 bits.
const MAX_CHUNK_BYTES: u64 = 1 << 23;
const DEFAULT_CHUNK_BYTES: u64 = 256 * 1024;
/// Largest tail, in bytes, as it is in the file and plain.
const MAX_TAIL_BYTES: u64 = 256 * 1024 * 1024;
/// Columns at every depth.
const MAX_COLUMNS: usize = 100_000;
/// Levels of nesting.
const MAX_DEPTH: usize = 64;
const MAX_PRECISION: u32 = 38;
/// Where a column has its field id (table spec, "Appendix A", ORC).
const FIELD_ID: &str = "iceberg.id";

/// A type, with the meaning that Iceberg's attributes give it.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Kind {
    Boolean,
    Byte,
    Short,
    Int,
    Long,
    /// Microseconds of a day.
    Time,
    Float,
    Double,
    Text,
    Binary,
    Fixed(i32),
    Date,
    /// Nanoseconds are kept, else they are cut to microseconds; of the writer's wall clock, or an instant.
    Timestamp {
        nanos: bool,
        instant: bool,
    },
    Decimal {
        precision: u8,
        scale: i8,
    },
    Struct,
    List,
    Map,
    Union,
}

/// A column at any depth; its number is its place in [`Tail::columns`].
#[derive(Clone, Debug)]
pub(super) struct OrcColumn {
    pub kind: Kind,
    /// Numbers of the columns inside, each larger than the column's own.
    pub children: Vec<usize>,
    pub names: Vec<String>,
    id: Option<i32>,
}

#[derive(Clone, Debug)]
pub(super) struct Stripe {
    pub offset: u64,
    /// Bytes of streams, those of indexes first.
    pub streams: u64,
    pub footer: u64,
    pub rows: u64,
}

impl Stripe {
    pub fn footer_range(&self) -> Range<u64> {
        let start = self.offset + self.streams;
        start..start + self.footer
    }
}

#[derive(Clone, Debug)]
pub(in crate::table) struct Tail {
    pub(super) codec: Codec,
    pub(super) chunk_bytes: usize,
    /// The first is the root, a struct of the table's columns.
    pub(super) columns: Vec<OrcColumn>,
    pub(super) stripes: Vec<Stripe>,
}

/// How far the reading of a tail has come.
pub(in crate::table) enum TailStep {
    /// So many bytes from the end of the file are needed.
    Needs(u64),
    Read(Tail),
}

impl Tail {
    /// Reads the tail from the last bytes of a file of `size` bytes.
    pub fn parse(end: &[u8], size: u64) -> Decoded<TailStep> {
        let no_orc = || Fault::corrupt("it is no ORC file");
        let (length, before) = end.split_last().ok_or_else(no_orc)?;
        let at = before.len().checked_sub(usize::from(*length)).ok_or_else(no_orc)?;
        let postscript = Postscript::parse(&before[at..])?;
        let total = postscript.footer + u64::from(*length) + 1;
        if postscript.footer > MAX_TAIL_BYTES {
            return Err(Fault::unsupported(format!(
                "its footer has {} bytes, at most {MAX_TAIL_BYTES} are read; write its rows again in smaller files",
                postscript.footer
            )));
        }
        if total > size {
            return Err(Fault::corrupt("its footer is larger than the file"));
        }
        if total > end.len() as u64 {
            return Ok(TailStep::Needs(total));
        }
        let start = usize::try_from(postscript.footer).ok().and_then(|footer| at.checked_sub(footer));
        let packed = &before[start.ok_or_else(no_orc)?..at];
        let (codec, chunk_bytes) = (postscript.codec, postscript.chunk_bytes);
        let footer = plain(codec, chunk_bytes, packed)?;
        let (columns, stripes) = footer_of(&footer, size - total)?;
        Ok(TailStep::Read(Self { codec, chunk_bytes, columns, stripes }))
    }

    pub fn named(&self) -> Vec<NamedField> {
        self.children(0)
    }

    fn children(&self, of: usize) -> Vec<NamedField> {
        let Some(column) = self.columns.get(of) else { return Vec::new() };
        let child = |(at, number): (usize, &usize)| {
            let found = self.columns.get(*number)?;
            let name = match column.kind {
                Kind::List => ELEMENT.to_owned(),
                Kind::Map => if at == 0 { KEY } else { VALUE }.to_owned(),
                _ => column.names.get(at).cloned().unwrap_or_default(),
            };
            Some(NamedField {
                name,
                id: found.id,
                children: self.children(*number),
                is_struct: found.kind == Kind::Struct,
            })
        };
        column.children.iter().enumerate().filter_map(child).collect()
    }

    /// The column and all inside it.
    pub(super) fn with_children(&self, number: usize, all: &mut Vec<usize>) {
        all.push(number);
        for child in self.columns.get(number).map(|column| column.children.as_slice()).unwrap_or_default() {
            self.with_children(*child, all);
        }
    }
}

/// Bytes of a message, which are compressed in chunks as streams are.
pub(super) fn plain(codec: Codec, chunk_bytes: usize, packed: &[u8]) -> Decoded<Vec<u8>> {
    let mut all = Vec::new();
    let mut chunks = super::stream::Chunks::new(codec, chunk_bytes, packed.to_vec().into());
    while let Some(chunk) = chunks.next()? {
        if (all.len() + chunk.len()) as u64 > MAX_TAIL_BYTES {
            return Err(Fault::unsupported(format!(
                "its footer has more than {MAX_TAIL_BYTES} bytes; write its rows again in smaller files"
            )));
        }
        all.extend_from_slice(&chunk);
    }
    Ok(all)
}

struct Postscript {
    footer: u64,
    codec: Codec,
    chunk_bytes: usize,
}

impl Postscript {
    fn parse(message: &[u8]) -> Decoded<Self> {
        let (mut footer, mut kind, mut chunk, mut magic) = (None, 0, DEFAULT_CHUNK_BYTES, None);
        fields(message, |field, value| {
            match field {
                1 => footer = Some(value.number()?),
                2 => kind = value.number()?,
                3 => chunk = value.number()?,
                8000 => magic = Some(value.bytes()?),
                _ => {}
            }
            Ok(())
        })?;
        let (Some(footer), Some(b"ORC")) = (footer, magic) else {
            return Err(Fault::corrupt("it is no ORC file"));
        };
        let codec = match kind {
            0 => Codec::Plain,
            1 => Codec::Deflate,
            2 => Codec::Snappy,
            4 => Codec::Lz4,
            5 => Codec::Zstd,
            other => {
                let name = if other == 3 { "lzo".to_owned() } else { format!("codec {other}") };
                return Err(Fault::unsupported(format!(
                    "it is compressed with {name}, and zlib, snappy, lz4 and zstd are read; set the table property \
                     write.orc.compression-codec to zstd and write its rows again"
                )));
            }
        };
        if codec != Codec::Plain && !(1..=MAX_CHUNK_BYTES).contains(&chunk) {
            return Err(Fault::corrupt(format!("it is compressed in pieces of {chunk} bytes")));
        }
        let chunk_bytes = usize::try_from(chunk.min(MAX_CHUNK_BYTES)).unwrap_or_default();
        Ok(Self { footer, codec, chunk_bytes })
    }
}

/// The columns and the stripes, which lie in the first `room` bytes of the file.
fn footer_of(message: &[u8], room: u64) -> Decoded<(Vec<OrcColumn>, Vec<Stripe>)> {
    let (mut columns, mut stripes, mut rows, mut encrypted) = (Vec::new(), Vec::new(), 0, false);
    fields(message, |field, value| {
        match field {
            3 => stripes.push(stripe(value.bytes()?, room)?),
            4 if columns.len() == MAX_COLUMNS => {
                return Err(Fault::unsupported(format!("it has more than {MAX_COLUMNS} columns")));
            }
            4 => columns.push(column(value.bytes()?)?),
            6 => rows = value.number()?,
            10 => encrypted = true,
            _ => {}
        }
        Ok(())
    })?;
    if encrypted {
        return Err(Fault::unsupported("some of its columns are encrypted; write its rows again without"));
    }
    let told = stripes.iter().try_fold(0_u64, |sum, stripe| sum.checked_add(stripe.rows));
    if told != Some(rows) {
        return Err(Fault::corrupt(format!("its stripes do not have the {rows} rows of the file")));
    }
    check_tree(&columns)?;
    Ok((columns, stripes))
}

fn stripe(message: &[u8], room: u64) -> Decoded<Stripe> {
    let (mut offset, mut index, mut data, mut footer, mut rows) = (0, 0, 0, 0, 0);
    fields(message, |field, value| {
        match field {
            1 => offset = value.number()?,
            2 => index = value.number()?,
            3 => data = value.number()?,
            4 => footer = value.number()?,
            5 => rows = value.number()?,
            _ => {}
        }
        Ok(())
    })?;
    let streams = u64::checked_add(index, data);
    let end = streams.and_then(|streams| streams.checked_add(offset)?.checked_add(footer));
    match (streams, end) {
        (Some(streams), Some(end)) if end <= room => Ok(Stripe { offset, streams, footer, rows }),
        _ => Err(Fault::corrupt("a stripe lies outside of the file")),
    }
}

fn column(message: &[u8]) -> Decoded<OrcColumn> {
    let (mut kind, mut precision, mut scale) = (0, 0, 0);
    let (mut children, mut names, mut attributes) = (Vec::new(), Vec::new(), Vec::new());
    fields(message, |field, value| {
        match field {
            1 => kind = value.number()?,
            2 => value.numbers(&mut children)?,
            3 => names.push(value.text()?),
            5 => precision = value.u32()?,
            6 => scale = value.u32()?,
            7 => attributes.push(attribute(value)?),
            _ => {}
        }
        Ok(())
    })?;
    let told = |key: &str| attributes.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
    let kind = match kind {
        0 => Kind::Boolean,
        1 => Kind::Byte,
        2 => Kind::Short,
        3 => Kind::Int,
        4 if told("iceberg.long-type") == Some("TIME") => Kind::Time,
        4 => Kind::Long,
        5 => Kind::Float,
        6 => Kind::Double,
        7 | 16 | 17 => Kind::Text,
        8 => match told("iceberg.binary-type") {
            Some("UUID") => Kind::Fixed(16),
            Some("FIXED") => Kind::Fixed(number(told("iceberg.length"))?.unwrap_or(-1)),
            _ => Kind::Binary,
        },
        9 | 18 => {
            Kind::Timestamp { nanos: told("iceberg.timestamp-unit") == Some("NANOS"), instant: kind == 18 }
        }
        10 => Kind::List,
        11 => Kind::Map,
        12 => Kind::Struct,
        13 => Kind::Union,
        14 if (1..=MAX_PRECISION).contains(&precision) && scale <= precision => Kind::Decimal {
            precision: u8::try_from(precision).unwrap_or_default(),
            scale: i8::try_from(scale).unwrap_or_default(),
        },
        14 => return Err(Fault::corrupt(format!("a column of it is a decimal({precision}, {scale})"))),
        15 => Kind::Date,
        other => return Err(Fault::corrupt(format!("a column of it has the unknown type {other}"))),
    };
    if matches!(kind, Kind::Fixed(length) if length < 0) {
        return Err(Fault::corrupt("a column of fixed length has none"));
    }
    Ok(OrcColumn {
        kind,
        children: children.into_iter().map(|child| child as usize).collect(),
        names,
        id: number(told(FIELD_ID))?,
    })
}

fn attribute(value: Value<'_>) -> Decoded<(String, String)> {
    let (mut name, mut text) = (String::new(), String::new());
    fields(value.bytes()?, |field, value| {
        match field {
            1 => name = value.text()?,
            2 => text = value.text()?,
            _ => {}
        }
        Ok(())
    })?;
    Ok((name, text))
}

fn number(text: Option<&str>) -> Decoded<Option<i32>> {
    let parse = |text: &str| {
        text.parse()
            .map_err(|_| Fault::corrupt(format!("an attribute of its columns is no number: '{text}'")))
    };
    text.map(parse).transpose()
}

/// Each column but the root is inside exactly one that comes before it, and none is too deep.
fn check_tree(columns: &[OrcColumn]) -> Decoded<()> {
    let wrong = || Fault::corrupt("its columns are no tree");
    let mut depths = vec![None; columns.len()];
    match (columns.first(), depths.first_mut()) {
        (Some(root), Some(depth)) if root.kind == Kind::Struct => *depth = Some(0),
        _ => return Err(Fault::corrupt("its columns are no struct")),
    }
    for (at, column) in columns.iter().enumerate() {
        let depth: usize = depths[at].ok_or_else(wrong)?;
        let children = match column.kind {
            Kind::Struct => column.names.len(),
            Kind::List => 1,
            Kind::Map => 2,
            Kind::Union => column.children.len(),
            _ => 0,
        };
        if column.children.len() != children {
            return Err(wrong());
        }
        if depth > MAX_DEPTH {
            return Err(Fault::corrupt(format!("its columns have more than {MAX_DEPTH} levels")));
        }
        for child in &column.children {
            match depths.get_mut(*child) {
                Some(of_child @ None) if *child > at => *of_child = Some(depth + 1),
                _ => return Err(wrong()),
            }
        }
    }
    Ok(())
}
