//! Which delete files apply to which data file (table spec, "Scan Planning"; Java: `DeleteFileIndex`).
//!
//! Pure: sequence numbers, partitions and paths, as manifest entries give them. A position delete reaches
//! files that are not newer than it, an equality delete only older ones. A position delete that names its one
//! data file reaches that file, whatever partition it says, as in Java. Where a data file has a deletion
//! vector, its position deletes are not looked at (rule D1).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mergeberg_kernel::change::FileContent;
use mergeberg_kernel::ids::SpecId;
use mergeberg_kernel::partition::Partition;
use sha2::{Digest, Sha256};

use super::super::error::TableError;
use super::super::manifests::LiveFile;

/// Equality deletes that share reach and columns. A row is deleted when a file that is newer than the row's
/// data file names its values, so one look-up of the newest file for these values answers for all.
#[derive(Debug)]
pub struct EqualityGroup {
    /// Field ids, ascending.
    pub ids: Vec<i32>,
    /// By sequence number, the newest last.
    pub files: Vec<Arc<LiveFile>>,
    /// Digest of which files these are, and of their sequence numbers.
    pub name: Arc<str>,
}

impl EqualityGroup {
    fn new(ids: Vec<i32>, mut files: Vec<Arc<LiveFile>>) -> Self {
        files.sort_by(|a, b| (a.sequence_number, &a.fact.path).cmp(&(b.sequence_number, &b.fact.path)));
        let mut hash = Sha256::new();
        for file in &files {
            hash.update(format!("{} {}\n", file.sequence_number, file.fact.path));
        }
        let name = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Self { ids, files, name: Arc::from(name) }
    }

    fn reaches(&self, data_file: &LiveFile) -> bool {
        self.files.last().is_some_and(|newest| newest.sequence_number > data_file.sequence_number)
    }
}

/// What applies to one data file.
#[derive(Clone, Debug, Default)]
pub struct FileDeletes {
    /// A deletion vector, or position-delete files.
    pub positions: Vec<Arc<LiveFile>>,
    /// Each with at least one file that is newer than the data file.
    pub equality: Vec<Arc<EqualityGroup>>,
}

impl FileDeletes {
    pub fn is_empty(&self) -> bool {
        self.positions.is_empty() && self.equality.is_empty()
    }

    pub fn and(mut self, other: Self) -> Self {
        self.positions.extend(other.positions);
        self.equality.extend(other.equality);
        self
    }
}

/// One partition of one spec.
type PartitionKey = (SpecId, Vec<Option<String>>);

fn key_of(partition: &Partition) -> PartitionKey {
    (partition.spec_id, partition.fields.iter().map(|field| field.value.clone()).collect())
}

/// Where equality deletes reach (`None`: everywhere), and the columns that they compare.
type Reach = (Option<PartitionKey>, Vec<i32>);

type FileLists<K> = HashMap<K, Vec<Arc<LiveFile>>>;

/// The delete files of a snapshot, by what they reach.
#[derive(Debug, Default)]
pub struct DeleteIndex {
    vectors: HashMap<Arc<str>, Arc<LiveFile>>,
    positions_of: FileLists<Arc<str>>,
    positions: FileLists<PartitionKey>,
    equality: HashMap<PartitionKey, Vec<Arc<EqualityGroup>>>,
    /// Equality deletes of unpartitioned specs reach every partition of every spec.
    global: Vec<Arc<EqualityGroup>>,
}

impl DeleteIndex {
    /// Two deletion vectors of one data file are an error: a snapshot has at most one (table spec, "Deletion
    /// Vectors").
    pub fn new(files: impl IntoIterator<Item = Arc<LiveFile>>) -> Result<Self, TableError> {
        let mut index = Self::default();
        let mut equality: BTreeMap<Reach, Vec<Arc<LiveFile>>> = BTreeMap::new();
        for file in files {
            match &file.fact.content {
                FileContent::DeletionVector { of, offset: _ } => {
                    let data_file = Arc::clone(of);
                    if let Some(other) = index.vectors.insert(Arc::clone(&data_file), Arc::clone(&file)) {
                        return Err(TableError::corrupt(
                            &data_file,
                            format!(
                                "it has two deletion vectors, {} and {}",
                                other.fact.key(),
                                file.fact.key()
                            ),
                        ));
                    }
                }
                FileContent::PositionDeletes { of: Some(data_file) } => {
                    let data_file = Arc::clone(data_file);
                    index.positions_of.entry(data_file).or_default().push(file);
                }
                FileContent::PositionDeletes { of: None } => {
                    let key = key_of(&file.fact.partition);
                    index.positions.entry(key).or_default().push(file);
                }
                FileContent::EqualityDeletes { field_ids } => {
                    let partition = &file.fact.partition;
                    let reach = (!partition.is_unpartitioned()).then(|| key_of(partition));
                    equality.entry((reach, field_ids.clone())).or_default().push(file);
                }
                FileContent::Data => {
                    let message = "its manifest entry says that it holds rows, not deletes";
                    return Err(TableError::corrupt(&file.fact.path, message));
                }
            }
        }
        for ((reach, ids), files) in equality {
            let group = Arc::new(EqualityGroup::new(ids, files));
            match reach {
                Some(partition) => index.equality.entry(partition).or_default().push(group),
                None => index.global.push(group),
            }
        }
        Ok(index)
    }

    /// The delete files among the live files of a snapshot.
    pub fn of(live: impl IntoIterator<Item = LiveFile>) -> Result<Self, TableError> {
        Self::new(live.into_iter().map(Arc::new))
    }

    pub fn for_file(&self, data_file: &LiveFile) -> Result<FileDeletes, TableError> {
        let partition = key_of(&data_file.fact.partition);
        let in_partition = self.equality.get(&partition).into_iter().flatten();
        let equality = in_partition.chain(&self.global).filter(|g| g.reaches(data_file)).cloned().collect();
        Ok(FileDeletes { positions: self.positions_for(data_file, &partition)?, equality })
    }

    /// Its deletion vector, and the position-delete files that speak of no other data file: they go when it goes
    /// (rule D5).
    pub fn own_deletes(&self, data_file: &str) -> Vec<Arc<LiveFile>> {
        let vector = self.vectors.get(data_file);
        let named = self.positions_of.get(data_file).into_iter().flatten();
        vector.into_iter().chain(named).cloned().collect()
    }

    fn positions_for(
        &self,
        data_file: &LiveFile,
        partition: &PartitionKey,
    ) -> Result<Vec<Arc<LiveFile>>, TableError> {
        let path = &data_file.fact.path;
        if let Some(vector) = self.vectors.get(path) {
            // No reader agrees with another about what this would mean; Java refuses it.
            if vector.sequence_number < data_file.sequence_number {
                return Err(TableError::corrupt(
                    &vector.fact.path,
                    format!("it holds a deletion vector that is older than its data file {path}"),
                ));
            }
            return Ok(vec![Arc::clone(vector)]);
        }
        let named = self.positions_of.get(path).into_iter().flatten();
        let others = self.positions.get(partition).into_iter().flatten();
        Ok(named
            .chain(others)
            .filter(|delete| delete.sequence_number >= data_file.sequence_number)
            .cloned()
            .collect())
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
