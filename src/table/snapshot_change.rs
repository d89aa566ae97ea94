//! One snapshot to write, as a value, and what can be said against it without looking at the table.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use iceberg::spec::{DataFile, FormatVersion};
use mergeberg_kernel::change::{DeleteKey, FileContent, FileFact};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{SchemaId, SnapshotId, SpecId};

use super::data_files::NewDataFile;
use super::deletes::NewDeleteFile;
use super::error::TableError;
use super::manifests::LiveFile;

/// Draws before a free snapshot id is counted up to.
const MAX_ID_DRAWS: usize = 16;
/// Labels that the table spec knows.
const LABELS: [&str; 4] = ["append", "overwrite", "replace", "delete"];

/// A data or delete file to add.
#[derive(Clone, Debug)]
pub struct AddedFile {
    pub fact: FileFact,
    pub file: Arc<DataFile>,
    pub spec_id: SpecId,
    pub age: FileAge,
}

/// The data sequence number that an added file gets: which deletes reach its rows, or whose rows it deletes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileAge {
    /// The snapshot's, as every plain append must.
    #[default]
    Inherited,
    /// This one, which is explicit in the manifest (rule D4).
    Kept(i64),
    /// That of a snapshot ahead in the same train, whatever it will be (rule D4).
    Of(SnapshotId),
}

impl From<NewDataFile> for AddedFile {
    fn from(file: NewDataFile) -> Self {
        let NewDataFile { fact, file, spec_id } = file;
        Self { fact, file, spec_id, age: FileAge::Inherited }
    }
}

/// Re-adding a file of another branch: it takes a new sequence number (rule D3).
impl From<LiveFile> for AddedFile {
    fn from(live: LiveFile) -> Self {
        Self { fact: live.fact, file: live.file, spec_id: live.spec_id, age: FileAge::Inherited }
    }
}

impl From<NewDeleteFile> for AddedFile {
    fn from(file: NewDeleteFile) -> Self {
        let NewDeleteFile { fact, file, spec_id } = file;
        Self { fact, file, spec_id, age: FileAge::Inherited }
    }
}

/// One snapshot to write.
#[derive(Clone, Debug)]
pub struct SnapshotChange {
    pub id: SnapshotId,
    /// `append`, `overwrite`, `replace` or `delete`.
    pub label: String,
    /// Data files to add.
    pub add: Vec<AddedFile>,
    /// Paths of data files to remove; each must be live on the parent.
    pub remove: BTreeSet<Arc<str>>,
    /// Delete files to add: position deletes in format v2, deletion vectors in v3, equality deletes in both.
    pub add_deletes: Vec<AddedFile>,
    /// Delete files to remove; each must be live on the parent. Deletion vectors of the data files in
    /// `remove` go with them and need not be named (rule D5).
    pub remove_deletes: BTreeSet<DeleteKey>,
    /// The caller's keys (`source-snapshot-id` and others); figures are computed here.
    pub summary: BTreeMap<String, String>,
    pub now_ms: i64,
    pub schema_id: SchemaId,
}

impl SnapshotChange {
    /// Data files and delete files to add.
    pub(super) fn added(&self) -> impl Iterator<Item = &AddedFile> {
        self.add.iter().chain(&self.add_deletes)
    }

    /// Everything to remove that is named.
    pub(super) fn removed(&self) -> impl Iterator<Item = DeleteKey> {
        let data = self.remove.iter().map(|path| DeleteKey { path: path.clone(), content_offset: None });
        data.chain(self.remove_deletes.iter().cloned())
    }

    /// Refuses what contradicts itself or the format of the table.
    pub(super) fn check(&self, version: FormatVersion) -> Result<(), TableError> {
        let invalid = |message: String| Err(TableError::InvalidChange { snapshot: self.id, message });
        if !LABELS.contains(&self.label.as_str()) {
            return invalid(format!("'{}' is no operation of the table spec", self.label));
        }
        if let Some(file) = self.add.iter().find(|file| file.fact.content != FileContent::Data) {
            return invalid(format!("{} is a delete file, not a data file", file.fact.path));
        }
        let mut with_vector: HashSet<&Arc<str>> = HashSet::new();
        for fact in self.add_deletes.iter().map(|file| &file.fact) {
            match &fact.content {
                FileContent::Data => {
                    return invalid(format!("{} is a data file, not a delete file", fact.path));
                }
                // Table spec, "Row-level Deletes": vectors are not allowed in v2, and position-delete files
                // must not be added in v3.
                FileContent::DeletionVector { .. } if version < FormatVersion::V3 => {
                    return invalid(format!(
                        "{} is a deletion vector, which format version 2 lacks",
                        fact.key()
                    ));
                }
                FileContent::PositionDeletes { .. } if version >= FormatVersion::V3 => {
                    return invalid(format!(
                        "{} holds position deletes, which format version 3 takes as deletion vectors only",
                        fact.path
                    ));
                }
                FileContent::DeletionVector { of, offset: _ } if !with_vector.insert(of) => {
                    return invalid(format!("{of} would have two deletion vectors"));
                }
                FileContent::DeletionVector { .. }
                | FileContent::PositionDeletes { .. }
                | FileContent::EqualityDeletes { .. } => {}
            }
            if let Some(of) = fact.deletes_rows_of().filter(|of| self.remove.contains(*of)) {
                return invalid(format!("{} deletes rows of {of}, which goes as a whole", fact.key()));
            }
        }
        Ok(())
    }
}

/// A snapshot id that the table does not have: positive, from `random`. Cars that are not committed are not
/// known here; the writer refuses an id that its own chain has.
pub fn new_snapshot_id(facts: &TableFacts, mut random: impl FnMut() -> u64) -> SnapshotId {
    // Clearing the sign bit leaves 63 bits, as Java does.
    let mut draw = || SnapshotId((random() & (u64::MAX >> 1)).cast_signed());
    let free = |id: &SnapshotId| id.0 > 0 && !facts.snapshots.contains(*id);
    let mut id = draw();
    for _ in 1..MAX_ID_DRAWS {
        if free(&id) {
            return id;
        }
        id = draw();
    }
    // The table has fewer snapshots than there are ids, so counting up ends.
    while !free(&id) {
        id = SnapshotId(id.0.checked_add(1).unwrap_or(1));
    }
    id
}
