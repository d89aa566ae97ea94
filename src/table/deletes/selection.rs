//! Which rows of a data file are meant: the live ones of a snapshot, or those in which two snapshots differ.
//!
//! A snapshot may leave a data file as it is and change what is deleted in it. Rows, not files, are then what
//! two snapshots share: the file is looked at once for the rows that are live in both, and once for those that
//! are live on one side only. So a check sees a deleted row as removed, and one that came back as added.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use mergeberg_kernel::change::{DeleteKey, FileContent};
use sha2::{Digest, Sha256};

use super::super::error::TableError;
use super::super::manifests::{LiveFile, LiveFiles};
use super::super::scan_file::ScanFile;
use super::index::{DeleteIndex, FileDeletes};

/// Rows of a data file.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Rows that these delete are left out.
    pub without: FileDeletes,
    /// Of the others only those that these delete.
    pub within: Option<FileDeletes>,
}

impl Selection {
    /// Is it every row of the file?
    pub fn is_whole(&self) -> bool {
        self.without.is_empty() && self.within.is_none()
    }

    /// The same for the same rows of one data file, as far as the delete files tell: a digest of which they are.
    /// Empty for every row. `data_sequence` is the data file's.
    pub fn name(&self, data_sequence: i64) -> Arc<str> {
        if self.is_whole() {
            return Arc::from("");
        }
        let mut lines = vec![data_sequence.to_string()];
        for (word, deletes) in [("without", Some(&self.without)), ("within", self.within.as_ref())] {
            let Some(deletes) = deletes else { continue };
            lines.extend(deletes.positions.iter().map(|file| format!("{word} {}", file.fact.key())));
            lines.extend(deletes.equality.iter().map(|group| format!("{word} = {}", group.name)));
        }
        lines[1..].sort_unstable();
        let digest = Sha256::digest(lines.join("\n"));
        digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
    }
}

/// The live rows of a snapshot, files in their order.
pub fn live_rows(live: LiveFiles) -> Result<Vec<ScanFile>, TableError> {
    let index = DeleteIndex::of(live.deletes)?;
    live.data
        .into_iter()
        .map(|file| {
            let rows = Selection { without: index.for_file(&file)?, within: None };
            Ok(ScanFile { file, origin: 0, rows })
        })
        .collect()
}

/// The rows of two snapshots by where they are live.
#[derive(Debug, Default)]
pub struct RowDifference {
    pub kept: Vec<ScanFile>,
    /// Live in the later snapshot only.
    pub added: Vec<ScanFile>,
    /// Live in the earlier snapshot only.
    pub removed: Vec<ScanFile>,
}

/// Files that are live in both are told by their path (rule D6).
pub fn row_difference(before: LiveFiles, after: LiveFiles) -> Result<RowDifference, TableError> {
    let deletes = DeleteSides::new(before.deletes, after.deletes).index()?;
    let mut earlier: HashMap<Arc<str>, LiveFile> =
        before.data.iter().map(|file| (Arc::clone(&file.fact.path), file.clone())).collect();
    let mut difference = RowDifference::default();
    for file in after.data {
        let same = earlier.remove(&file.fact.path);
        match same {
            Some(old) if old.sequence_number == file.sequence_number => {
                let shared = deletes.shared(&file)?;
                shared.split(file, &mut difference);
            }
            // Not in one snapshot of any writer we know: another sequence number is another reach.
            Some(old) => {
                difference.removed.push(deletes.before(old)?);
                difference.added.push(deletes.after(file)?);
            }
            None => difference.added.push(deletes.after(file)?),
        }
    }
    for file in before.data {
        if earlier.remove(&file.fact.path).is_some() {
            difference.removed.push(deletes.before(file)?);
        }
    }
    Ok(difference)
}

/// Delete files of two snapshots. One that both have is one value here.
struct DeleteSides {
    before: Vec<Arc<LiveFile>>,
    after: Vec<Arc<LiveFile>>,
}

/// Whom the deletes of two snapshots reach. Positions are asked for by side, since a vector of one side hides
/// the position deletes of that side only; values are kept apart by where they stand, so that each key is held
/// once.
struct SideIndexes {
    before: DeleteIndex,
    after: DeleteIndex,
    keys_of_both: DeleteIndex,
    keys_before_only: DeleteIndex,
    keys_after_only: DeleteIndex,
}

impl DeleteSides {
    fn new(before: Vec<LiveFile>, after: Vec<LiveFile>) -> Self {
        let before: Vec<Arc<LiveFile>> = before.into_iter().map(Arc::new).collect();
        let known: HashMap<DeleteKey, &Arc<LiveFile>> =
            before.iter().map(|file| (file.fact.key(), file)).collect();
        let mut later = Vec::with_capacity(after.len());
        for file in after {
            let same = known
                .get(&file.fact.key())
                .filter(|old| old.sequence_number == file.sequence_number && old.fact == file.fact);
            later.push(same.map_or_else(|| Arc::new(file.clone()), |old| Arc::clone(old)));
        }
        Self { before, after: later }
    }

    fn index(&self) -> Result<SideIndexes, TableError> {
        let is_key = |file: &Arc<LiveFile>| matches!(file.fact.content, FileContent::EqualityDeletes { .. });
        let of =
            |files: &[Arc<LiveFile>]| -> HashSet<*const LiveFile> { files.iter().map(Arc::as_ptr).collect() };
        let (in_before, in_after) = (of(&self.before), of(&self.after));
        let positions =
            |files: &[Arc<LiveFile>]| DeleteIndex::new(files.iter().filter(|file| !is_key(file)).cloned());
        let keys = |files: &[Arc<LiveFile>], other: &HashSet<*const LiveFile>, in_other: bool| {
            let wanted = files.iter().filter(|f| is_key(f) && other.contains(&Arc::as_ptr(f)) == in_other);
            DeleteIndex::new(wanted.cloned())
        };
        Ok(SideIndexes {
            before: positions(&self.before)?,
            after: positions(&self.after)?,
            keys_of_both: keys(&self.before, &in_after, true)?,
            keys_before_only: keys(&self.before, &in_after, false)?,
            keys_after_only: keys(&self.after, &in_before, false)?,
        })
    }
}

/// What applies to one data file that both snapshots have.
struct Shared {
    both: FileDeletes,
    before_only: FileDeletes,
    after_only: FileDeletes,
}

impl SideIndexes {
    fn before(&self, file: LiveFile) -> Result<ScanFile, TableError> {
        let keys = self.keys_of_both.for_file(&file)?.and(self.keys_before_only.for_file(&file)?);
        let without = self.before.for_file(&file)?.and(keys);
        Ok(ScanFile { file, origin: 0, rows: Selection { without, within: None } })
    }

    fn after(&self, file: LiveFile) -> Result<ScanFile, TableError> {
        let keys = self.keys_of_both.for_file(&file)?.and(self.keys_after_only.for_file(&file)?);
        let without = self.after.for_file(&file)?.and(keys);
        Ok(ScanFile { file, origin: 0, rows: Selection { without, within: None } })
    }

    fn shared(&self, file: &LiveFile) -> Result<Shared, TableError> {
        let (old, new) = (self.before.for_file(file)?.positions, self.after.for_file(file)?.positions);
        let is_in = |files: &[Arc<LiveFile>], one: &Arc<LiveFile>| files.iter().any(|f| Arc::ptr_eq(f, one));
        let positions = |files: Vec<Arc<LiveFile>>| FileDeletes { positions: files, equality: Vec::new() };
        let both = old.iter().filter(|one| is_in(&new, one)).cloned().collect();
        let before_only = old.iter().filter(|one| !is_in(&new, one)).cloned().collect();
        let after_only = new.iter().filter(|one| !is_in(&old, one)).cloned().collect();
        Ok(Shared {
            both: positions(both).and(self.keys_of_both.for_file(file)?),
            before_only: positions(before_only).and(self.keys_before_only.for_file(file)?),
            after_only: positions(after_only).and(self.keys_after_only.for_file(file)?),
        })
    }
}

impl Shared {
    /// Dead on one side only: deleted by what that side alone has, and by nothing that the other side has.
    fn split(self, file: LiveFile, difference: &mut RowDifference) {
        let Self { both, before_only, after_only } = self;
        let scan = |without: FileDeletes, within: Option<FileDeletes>| ScanFile {
            file: file.clone(),
            origin: 0,
            rows: Selection { without, within },
        };
        if !after_only.is_empty() {
            difference.removed.push(scan(both.clone().and(before_only.clone()), Some(after_only.clone())));
        }
        if !before_only.is_empty() {
            difference.added.push(scan(both.clone().and(after_only.clone()), Some(before_only.clone())));
        }
        difference.kept.push(scan(both.and(before_only).and(after_only), None));
    }
}
