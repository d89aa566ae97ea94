//! The wanted columns of one Avro or ORC file, batch by batch, in file order.
//!
//! Bytes are fetched as they are needed, and decoded on a thread for such work: there a decoder that panicked
//! would be an error of its file ([`TableError::of_join`]), as any other damage is.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use datafusion::arrow::array::RecordBatch;
use iceberg::spec::{DataFileFormat, NameMapping};

use super::super::column_adapter::{ColumnAdapter, WantedColumn};
use super::super::error::TableError;
use super::super::manifests::on_blocking_thread;
use super::avro::{AvroDecoder, AvroHeader};
use super::fault::{Decoded, Fault};
use super::named::{NamedField, with_ids};
use super::orc::{StripeReader, Tail, TailStep};
use super::source::Source;

/// Bytes of an Avro file that are fetched and decoded at a time.
const PIECE_BYTES: u64 = 4 * 1024 * 1024;
/// ORC files up to this size are fetched whole, in bytes.
const WHOLE_FILE_BYTES: u64 = 1024 * 1024;
/// Bytes at the end of a larger one that are fetched first; the tail of most is smaller.
const TAIL_BYTES: u64 = 64 * 1024;

pub(in crate::table) struct FormatReader {
    source: Source,
    adapter: Arc<ColumnAdapter>,
    state: State,
    /// Decoded, and not given out yet.
    ready: VecDeque<RecordBatch>,
}

enum State {
    Avro { decoder: Option<Box<AvroDecoder>>, at: u64, first: Bytes },
    Orc(Box<OrcState>),
}

struct OrcState {
    tail: Arc<Tail>,
    roots: Vec<usize>,
    /// The file, where it was fetched whole.
    whole: Option<Bytes>,
    next_stripe: usize,
    stripe: Option<StripeReader>,
    batch_rows: usize,
}

impl FormatReader {
    /// `columns` are given in their order. The source's format is Avro or ORC.
    pub async fn open(
        source: Source,
        format: DataFileFormat,
        columns: Vec<WantedColumn>,
        mapping: Option<&NameMapping>,
        batch_rows: usize,
    ) -> Result<Self, TableError> {
        let path = Arc::clone(source.path());
        match format {
            DataFileFormat::Avro => {
                let (header, first) = avro_header(&source).await?;
                let (adapter, roots) = adapter(&path, &header.named(), mapping, columns)?;
                let decoder =
                    AvroDecoder::new(header, &roots, batch_rows).map_err(|fault| fault.of(&path))?;
                let rest = first.slice(decoder.header_bytes()..);
                let at = first.len() as u64;
                let state = State::Avro { decoder: Some(Box::new(decoder)), at, first: rest };
                Ok(Self { source, adapter: Arc::new(adapter), state, ready: VecDeque::new() })
            }
            DataFileFormat::Orc => {
                let (tail, whole) = orc_tail(&source).await?;
                let (adapter, roots) = adapter(&path, &tail.named(), mapping, columns)?;
                let state =
                    OrcState { tail: Arc::new(tail), roots, whole, next_stripe: 0, stripe: None, batch_rows };
                let state = State::Orc(Box::new(state));
                Ok(Self { source, adapter: Arc::new(adapter), state, ready: VecDeque::new() })
            }
            other => Err(TableError::Unsupported(format!(
                "{path} is a {other} file, and Parquet, Avro and ORC files are read; write its rows again as Parquet"
            ))),
        }
    }

    /// The next rows.
    pub async fn next(&mut self) -> Result<Option<RecordBatch>, TableError> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                return Ok(Some(batch));
            }
            let more = match &mut self.state {
                State::Avro { decoder, at, first } => {
                    avro_step(&self.source, &self.adapter, decoder, at, first, &mut self.ready).await?
                }
                State::Orc(state) => state.step(&self.source, &self.adapter, &mut self.ready).await?,
            };
            if !more && self.ready.is_empty() {
                return Ok(None);
            }
        }
    }
}

fn adapter(
    path: &str,
    fields: &[NamedField],
    mapping: Option<&NameMapping>,
    columns: Vec<WantedColumn>,
) -> Result<(ColumnAdapter, Vec<usize>), TableError> {
    let with_ids = with_ids(fields, mapping).ok_or_else(|| {
        TableError::Unsupported(format!(
            "{path} has no field ids; set the table property schema.name-mapping.default"
        ))
    })?;
    Ok(ColumnAdapter::new(columns, &with_ids))
}

fn adapted(adapter: &ColumnAdapter, batches: Vec<RecordBatch>) -> Decoded<Vec<RecordBatch>> {
    let misfit = |message| Fault::corrupt(format!("its columns do not fit the table's schema: {message}"));
    batches.iter().map(|batch| adapter.adapted(batch).map_err(misfit)).collect()
}

/// The header, and the bytes that were fetched for it, from the beginning of the file.
async fn avro_header(source: &Source) -> Result<(AvroHeader, Bytes), TableError> {
    let mut length = PIECE_BYTES.min(source.size());
    loop {
        let bytes = source.read(0..length).await?;
        let seen = bytes.clone();
        let parsed = on_blocking_thread(source.path(), move || AvroHeader::parse(&seen)).await?;
        match parsed.map_err(|fault| fault.of(source.path()))? {
            Some(header) => return Ok((header, bytes)),
            // The decoder has a bound for it.
            None if length < source.size() => length = length.saturating_mul(2).min(source.size()),
            None => return Err(Fault::corrupt("it is cut off within its header").of(source.path())),
        }
    }
}

/// Decodes what is there and fetches the next piece meanwhile; `false` when the file has ended.
async fn avro_step(
    source: &Source,
    adapter: &Arc<ColumnAdapter>,
    decoder: &mut Option<Box<AvroDecoder>>,
    at: &mut u64,
    first: &mut Bytes,
    ready: &mut VecDeque<RecordBatch>,
) -> Result<bool, TableError> {
    let Some(mut decoding) = decoder.take() else { return Ok(false) };
    let piece = std::mem::take(first);
    let is_last = *at >= source.size();
    let next = *at..at.saturating_add(PIECE_BYTES).min(source.size()).max(*at);
    *at = next.end;
    let adapter = Arc::clone(adapter);
    let decode = on_blocking_thread(source.path(), move || {
        let mut batches = decoding.feed(&piece)?;
        if is_last {
            batches.extend(decoding.finish()?);
        }
        Ok::<_, Fault>((adapted(&adapter, batches)?, decoding))
    });
    let (decoded, fetched) = futures::join!(decode, source.read(next));
    let (batches, decoding) = decoded?.map_err(|fault| fault.of(source.path()))?;
    *first = fetched?;
    ready.extend(batches);
    if !is_last {
        *decoder = Some(decoding);
    }
    Ok(!is_last)
}

/// The tail, and the whole file if it was fetched for it.
async fn orc_tail(source: &Source) -> Result<(Tail, Option<Bytes>), TableError> {
    let size = source.size();
    let mut length = if size <= WHOLE_FILE_BYTES { size } else { TAIL_BYTES };
    loop {
        let bytes = source.read(size - length..size).await?;
        let seen = bytes.clone();
        let parsed = on_blocking_thread(source.path(), move || Tail::parse(&seen, size)).await?;
        match parsed.map_err(|fault| fault.of(source.path()))? {
            TailStep::Read(tail) => return Ok((tail, (length == size).then_some(bytes))),
            TailStep::Needs(more) if more > length && more <= size => length = more,
            TailStep::Needs(_) => return Err(Fault::corrupt("its footer has no end").of(source.path())),
        }
    }
}

impl OrcState {
    /// One batch more, or the next stripe; `false` when the file has ended.
    async fn step(
        &mut self,
        source: &Source,
        adapter: &Arc<ColumnAdapter>,
        ready: &mut VecDeque<RecordBatch>,
    ) -> Result<bool, TableError> {
        let Some(mut stripe) = self.stripe.take() else {
            if self.next_stripe == self.tail.stripes() {
                return Ok(false);
            }
            self.stripe = Some(self.open_stripe(source).await?);
            self.next_stripe += 1;
            return Ok(true);
        };
        let adapter = Arc::clone(adapter);
        let decoded = on_blocking_thread(source.path(), move || {
            let Some(batch) = stripe.next()? else { return Ok(None) };
            Ok::<_, Fault>(Some((adapted(&adapter, vec![batch])?, stripe)))
        });
        if let Some((batches, stripe)) = decoded.await?.map_err(|fault| fault.of(source.path()))? {
            ready.extend(batches);
            self.stripe = Some(stripe);
        }
        Ok(true)
    }

    async fn open_stripe(&self, source: &Source) -> Result<StripeReader, TableError> {
        let range = self.tail.footer_range(self.next_stripe);
        let footer = match self.slice(&range) {
            Some(bytes) => bytes,
            None => source.read(range).await?,
        };
        let plan = self.tail.plan(self.next_stripe, &footer, &self.roots);
        let plan = plan.map_err(|fault| fault.of(source.path()))?;
        let slices: Option<Vec<Bytes>> = plan.ranges().map(|range| self.slice(range)).collect();
        let bytes = match slices {
            Some(bytes) => bytes,
            None => source.read_all(plan.ranges().cloned().collect()).await?,
        };
        let (tail, roots, batch_rows) = (Arc::clone(&self.tail), self.roots.clone(), self.batch_rows);
        on_blocking_thread(source.path(), move || StripeReader::new(&tail, &plan, &roots, &bytes, batch_rows))
            .await?
            .map_err(|fault| fault.of(source.path()))
    }

    fn slice(&self, range: &std::ops::Range<u64>) -> Option<Bytes> {
        let (start, end) = (usize::try_from(range.start).ok()?, usize::try_from(range.end).ok()?);
        let whole = self.whole.as_ref()?;
        (start <= end && end <= whole.len()).then(|| whole.slice(start..end))
    }
}
