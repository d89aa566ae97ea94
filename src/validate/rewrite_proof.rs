//! Does a snapshot only rewrite rows? Proved by content (rule C5).
//!
//! The multiset of live rows in the removed files must equal that of the added files, under the table's
//! current schema. A row is hashed over all its columns as stored: not-a-number, minus zero and nulls keep
//! their own bits. The hashes of a file's rows are added modulo 2^128, so order and file boundaries do not
//! matter; sums are kept by path, since a file never changes.
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
use crate::table::manifests::LiveFile;
use crate::table::scan::{RowReader, ScanCounters};

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

type FileKey = (Arc<str>, SchemaId);

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

    /// `Content` when the rows of `removed` and of `added` are proved to be the same; `None` when they
    /// are not, or when nothing can be proved because delete files apply (`delete_files`: how many the
    /// snapshot adds, removes, or meets in the partitions concerned). An error proves nothing either.
    pub async fn prove(
        &self,
        table: &LoadedTable,
        removed: &[LiveFile],
        added: &[LiveFile],
        delete_files: usize,
    ) -> Result<RewriteProof, CheckError> {
        if delete_files > 0 || records(removed) != records(added) {
            return Ok(RewriteProof::None);
        }
        let reader = Arc::new(RowReader::new(table, table.facts.current_schema_id)?);
        let before = self.hash(&reader, removed).await?;
        let after = self.hash(&reader, added).await?;
        Ok(if before == after { RewriteProof::Content } else { RewriteProof::None })
    }

    async fn hash(&self, reader: &Arc<RowReader>, files: &[LiveFile]) -> Result<RowsHash, CheckError> {
        let mut total = RowsHash::default();
        let mut missing = Vec::new();
        for file in files {
            match self.cached(&(Arc::clone(&file.fact.path), reader.schema_id())) {
                Some(hash) => total.add(hash),
                None => missing.push(file.clone()),
            }
        }
        let mut hashed = futures::stream::iter(missing)
            .map(|file| {
                let path = Arc::clone(&file.fact.path);
                let work = self.engine.run(PROOF_TIME_BOUND, hash_file(Arc::clone(reader), file));
                async move { work.await.map(|hash| (path, hash)) }
            })
            .buffer_unordered(self.engine.parallelism());
        while let Some((path, hash)) = hashed.try_next().await? {
            total.add(hash);
            let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            cache.put((path, reader.schema_id()), hash);
        }
        Ok(total)
    }

    fn cached(&self, key: &FileKey) -> Option<RowsHash> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).hashes.get(key).copied()
    }
}

fn records(files: &[LiveFile]) -> i64 {
    files.iter().map(|file| file.fact.records).sum()
}

async fn hash_file(reader: Arc<RowReader>, file: LiveFile) -> Result<RowsHash, CheckError> {
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
