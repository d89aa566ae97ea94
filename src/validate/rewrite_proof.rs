//! Does a snapshot only rewrite rows? Proved by content (rule C5).
//!
//! The multiset of rows that are live only before the snapshot must equal that of the rows that are live only
//! after it, under the table's current schema. Whole files count with what is deleted in them, and files that
//! stay with the rows that a delete file took or gave back. A row is hashed over all its columns as stored:
//! not-a-number, minus zero and nulls keep their own bits. The hashes of a file's rows are added modulo 2^128,
//! so order and file boundaries do not matter; sums are kept by path and deletes, since neither ever changes.
//!
//! Equal counts prove nothing: a copy-on-write update has them. Unequal counts disprove it without reading.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::arrow::row::{RowConverter, SortField};
use futures::{StreamExt, TryStreamExt};
use mergeberg_kernel::change::RewriteProof;
use mergeberg_kernel::ids::SchemaId;
use sha2::{Digest as _, Sha256};

use super::CheckError;
use super::session::Engine;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::LiveFiles;
use crate::table::scan::{RowDifference, RowReader, ScanCounters, ScanFile, row_difference};

/// Files whose sums are kept, about 200 bytes each.
pub const CACHED_FILES: usize = 100_000;
/// One proof; a longer one is no proof.
pub const PROOF_TIME_BOUND: Duration = Duration::from_secs(5 * 60);

/// Proves rewrites. One for the process, so that its sums are shared.
#[derive(Debug)]
pub struct RewriteProver {
    engine: Arc<Engine>,
    cache: Mutex<Cache>,
}

/// Sum of the hashes of a file's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RowsHash {
    rows: u64,
    sum: u128,
}

impl RowsHash {
    fn add(&mut self, other: Self) {
        self.rows += other.rows;
        self.sum = self.sum.wrapping_add(other.sum);
    }
}

/// A file, what is read of it, and as which schema.
type FileKey = (Arc<str>, Arc<str>, SchemaId);

/// First in, first out: the files of one compaction are asked for within seconds of each other.
#[derive(Debug, Default)]
struct Cache {
    hashes: HashMap<FileKey, RowsHash>,
    order: VecDeque<FileKey>,
}

impl Cache {
    fn put(&mut self, key: FileKey, hash: RowsHash) {
        if self.hashes.insert(key.clone(), hash).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > CACHED_FILES {
            if let Some(oldest) = self.order.pop_front() {
                self.hashes.remove(&oldest);
            }
        }
    }
}

impl RewriteProver {
    pub fn new(engine: Arc<Engine>) -> Self {
        Self { engine, cache: Mutex::default() }
    }

    /// `Content` when the live rows of `before` and of `after` are proved to be the same; `None` when they are
    /// not. An error proves nothing. Both sides are asked for in the same scope: every partition in which the
    /// snapshot added or removed a data or delete file.
    pub async fn prove(
        &self,
        table: &LoadedTable,
        before: LiveFiles,
        after: LiveFiles,
    ) -> Result<RewriteProof, CheckError> {
        let difference = row_difference(before, after)?;
        let reader = Arc::new(RowReader::new(table, table.facts.current_schema_id)?);
        let RowDifference { kept: _, removed, added } = difference;
        if self.counts_differ(&reader, &removed, &added).await? {
            return Ok(RewriteProof::None);
        }
        let before = self.hash(&reader, &removed).await?;
        let after = self.hash(&reader, &added).await?;
        Ok(if before == after { RewriteProof::Content } else { RewriteProof::None })
    }

    /// Have both sides as many live rows? What a trusted rewriter is held to (rule C5).
    pub async fn equal_counts(
        &self,
        table: &LoadedTable,
        before: LiveFiles,
        after: LiveFiles,
    ) -> Result<bool, CheckError> {
        let difference = row_difference(before, after)?;
        let reader = Arc::new(RowReader::new(table, table.facts.current_schema_id)?);
        let work = async move {
            let counters = Arc::new(ScanCounters::default());
            let mut rows = [0_u64; 2];
            for (files, sum) in [&difference.removed, &difference.added].into_iter().zip(&mut rows) {
                for file in files {
                    *sum += reader.count(file, &counters).await?;
                }
            }
            Ok(rows[0] == rows[1])
        };
        self.engine.run(PROOF_TIME_BOUND, work).await
    }

    /// Told without reading a data file, where that is possible.
    async fn counts_differ(
        &self,
        reader: &Arc<RowReader>,
        removed: &[ScanFile],
        added: &[ScanFile],
    ) -> Result<bool, CheckError> {
        let (reader, removed, added) = (Arc::clone(reader), removed.to_vec(), added.to_vec());
        let work = async move {
            let before = count_unread(&reader, &removed).await?;
            let after = count_unread(&reader, &added).await?;
            Ok(before.zip(after).is_some_and(|(before, after)| before != after))
        };
        self.engine.run(PROOF_TIME_BOUND, work).await
    }

    async fn hash(&self, reader: &Arc<RowReader>, files: &[ScanFile]) -> Result<RowsHash, CheckError> {
        let mut total = RowsHash::default();
        let mut missing = Vec::new();
        for file in files {
            let key = key_of(file, reader.schema_id());
            match self.cached(&key) {
                Some(hash) => total.add(hash),
                None => missing.push((key, file.clone())),
            }
        }
        let mut hashed = futures::stream::iter(missing)
            .map(|(key, file)| {
                let work = self.engine.run(PROOF_TIME_BOUND, hash_file(Arc::clone(reader), file));
                async move { work.await.map(|hash| (key, hash)) }
            })
            .buffer_unordered(self.engine.parallelism());
        while let Some((key, hash)) = hashed.try_next().await? {
            total.add(hash);
            self.cache.lock().unwrap_or_else(PoisonError::into_inner).put(key, hash);
        }
        Ok(total)
    }

    fn cached(&self, key: &FileKey) -> Option<RowsHash> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).hashes.get(key).copied()
    }
}

fn key_of(file: &ScanFile, schema: SchemaId) -> FileKey {
    (Arc::clone(&file.file.fact.path), file.rows.name(file.file.sequence_number), schema)
}

/// Rows of the files, when that can be told without reading them.
async fn count_unread(reader: &RowReader, files: &[ScanFile]) -> Result<Option<u64>, CheckError> {
    let counters = Arc::new(ScanCounters::default());
    let mut rows = 0;
    for file in files {
        match reader.count_unread(file, &counters).await? {
            Some(count) => rows += count,
            None => return Ok(None),
        }
    }
    Ok(Some(rows))
}

async fn hash_file(reader: Arc<RowReader>, file: ScanFile) -> Result<RowsHash, CheckError> {
    let columns: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
    let converter = converter(reader.arrow_schema())?;
    let mut batches = reader.read(&file, &columns, &Arc::new(ScanCounters::default()))?;
    let mut total = RowsHash::default();
    while let Some(batch) = batches.try_next().await? {
        total.add(hash_batch(&converter, &batch)?);
    }
    Ok(total)
}

/// Arrow's row format keeps every value as stored and no two rows share one form.
fn converter(schema: &SchemaRef) -> Result<RowConverter, CheckError> {
    let fields = schema.fields().iter().map(|field| SortField::new(field.data_type().clone())).collect();
    Ok(RowConverter::new(fields)?)
}

fn hash_batch(converter: &RowConverter, batch: &RecordBatch) -> Result<RowsHash, CheckError> {
    let rows = converter.convert_columns(batch.columns())?;
    let mut total = RowsHash::default();
    for row in &rows {
        // Cryptographic, because a pipeline chooses its rows and sums of weak hashes can be steered.
        let digest = Sha256::digest(row.data());
        let mut bytes = [0u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        total.add(RowsHash { rows: 1, sum: u128::from_le_bytes(bytes) });
    }
    Ok(total)
}
