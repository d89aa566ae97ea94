//! Bytes of one file from any storage, counted.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use iceberg::io::{FileIO, FileRead};

use super::super::error::TableError;

/// Ranges that are at most so many bytes apart are fetched as one.
const MAX_GAP_BYTES: u64 = 1024 * 1024;
/// Ranges of one file that are fetched at the same time.
const PARALLEL_READS: usize = 4;

/// A file of which ranges are read.
pub(in crate::table) struct Source {
    path: Arc<str>,
    file_io: FileIO,
    reader: Box<dyn FileRead>,
    size: u64,
    fetched: Arc<AtomicU64>,
}

impl Source {
    /// `size` is that of the file, in bytes, as its manifest entry says; what is fetched is added to `fetched`.
    pub async fn open(
        file_io: FileIO,
        path: Arc<str>,
        size: u64,
        fetched: Arc<AtomicU64>,
    ) -> Result<Self, TableError> {
        let input = file_io.new_input(&*path).map_err(|e| TableError::io(&path, e))?;
        match input.reader().await {
            Ok(reader) => Ok(Self { path, file_io, reader, size, fetched }),
            Err(error) => Err(TableError::of_read(&file_io, &path, error).await),
        }
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn path(&self) -> &Arc<str> {
        &self.path
    }

    pub async fn read(&self, range: Range<u64>) -> Result<Bytes, TableError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let wanted = range.end - range.start;
        match self.reader.read(range).await {
            Ok(bytes) => {
                self.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                if bytes.len() as u64 == wanted { Ok(bytes) } else { Err(self.too_short(None)) }
            }
            Err(error) => Err(self.failed(error).await),
        }
    }

    /// The bytes of each range. Ranges ascend.
    pub async fn read_all(&self, ranges: Vec<Range<u64>>) -> Result<Vec<Bytes>, TableError> {
        let joined = joined(&ranges);
        let pieces: Vec<(u64, Bytes)> = futures::stream::iter(joined)
            .map(|range| async move { Ok::<_, TableError>((range.start, self.read(range).await?)) })
            .buffered(PARALLEL_READS)
            .try_collect()
            .await?;
        let piece_of = |range: Range<u64>| {
            let after = pieces.partition_point(|(start, _)| *start <= range.start);
            let (start, bytes) = pieces.get(after.checked_sub(1)?)?;
            let from = usize::try_from(range.start - start).ok()?;
            let length = usize::try_from(range.end - range.start).ok()?;
            (from + length <= bytes.len()).then(|| bytes.slice(from..from + length))
        };
        let found = ranges
            .into_iter()
            .map(|range| if range.is_empty() { Some(Bytes::new()) } else { piece_of(range) });
        let found: Option<Vec<Bytes>> = found.collect();
        found.ok_or_else(|| TableError::Internal(format!("ranges of {} were mixed up", self.path)))
    }

    /// A file that is shorter than it should be answers with an error as storage in trouble does.
    async fn failed(&self, error: iceberg::Error) -> TableError {
        let input = self.file_io.new_input(&*self.path);
        if let Ok(input) = input
            && let Ok(metadata) = input.metadata().await
            && metadata.size < self.size
        {
            return self.too_short(Some(metadata.size));
        }
        TableError::of_read(&self.file_io, &self.path, error).await
    }

    fn too_short(&self, size: Option<u64>) -> TableError {
        let has = size.map_or_else(|| "fewer".to_owned(), |size| size.to_string());
        TableError::corrupt(&self.path, format!("{has} bytes, but its manifest entry says {}", self.size))
    }
}

fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges.iter().filter(|range| !range.is_empty()) {
        match joined.last_mut() {
            Some(last) if range.start <= last.end.saturating_add(MAX_GAP_BYTES) => {
                last.end = last.end.max(range.end)
            }
            _ => joined.push(range.clone()),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_near_each_other_are_fetched_as_one() {
        let far = 2 * MAX_GAP_BYTES;
        assert_eq!(joined(&[0..10, 10..10, 20..30, far..far + 5]), [0..30, far..far + 5]);
        assert!(joined(&[]).is_empty());
    }
}
