//! What a scan reads, how it is spread over tasks, and what it cost.

use std::sync::atomic::{AtomicU64, Ordering};

use super::deletes::Selection;
use super::manifests::LiveFile;

/// A data file with the rows of it that are meant, and the place that it has in a train: 0 for the base, i
/// for the i-th car. What the numbers mean is the caller's business; here they only travel with the file.
#[derive(Clone, Debug)]
pub struct ScanFile {
    pub file: LiveFile,
    pub origin: i32,
    pub rows: Selection,
}

impl ScanFile {
    /// Every row of the file, also those that delete files take away: for files without any.
    pub fn whole(file: LiveFile) -> Self {
        Self { file, origin: 0, rows: Selection::default() }
    }

    pub fn with_origin(mut self, origin: i32) -> Self {
        self.origin = origin;
        self
    }
}

/// Files that one task reads one after the other.
#[derive(Clone, Debug, Default)]
pub struct FileGroup {
    pub files: Vec<ScanFile>,
    pub bytes: i64,
}

impl FileGroup {
    /// Spreads files over at most `groups` groups of about equal bytes, largest file first. No group is
    /// empty, except that no files make one empty group.
    pub fn balance(mut files: Vec<ScanFile>, groups: usize) -> Vec<Self> {
        // Ties by path, so that the same files are always read by the same groups.
        files.sort_by(|a, b| {
            (b.file.fact.bytes, &a.file.fact.path).cmp(&(a.file.fact.bytes, &b.file.fact.path))
        });
        let mut balanced = vec![Self::default(); groups.min(files.len()).max(1)];
        for file in files {
            if let Some(lightest) = balanced.iter_mut().min_by_key(|g| (g.bytes, g.files.len())) {
                lightest.bytes += file.file.fact.bytes.max(0);
                lightest.files.push(file);
            }
        }
        balanced
    }

    /// Rows of the files, those that are deleted among them: what may be read at most.
    pub fn records(&self) -> i64 {
        self.files.iter().map(|f| f.file.fact.records).sum()
    }
}

/// What a scan really read.
#[derive(Debug, Default)]
pub struct ScanCounters {
    files: AtomicU64,
    delete_files: AtomicU64,
    rows: AtomicU64,
    bytes: AtomicU64,
}

impl ScanCounters {
    /// Data files opened.
    pub fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Delete files and deletion vectors read; each once a scan.
    pub fn delete_files(&self) -> u64 {
        self.delete_files.load(Ordering::Relaxed)
    }

    /// Rows read from data files, deleted ones among them.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Bytes fetched from storage, footers and delete files included.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn count_file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_delete_file(&self, bytes: u64) {
        self.delete_files.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn count_read(&self, rows: u64, bytes: u64) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
