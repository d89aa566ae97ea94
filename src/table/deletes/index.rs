//! Which delete files apply to which data file (table spec, "Scan Planning"; Java: `DeleteFileIndex`).
//!
//! Pure: sequence numbers, partitions and paths, as manifest entries give them. A position delete reaches
//! files that are not newer than it, an equality delete only older ones. A position delete that names its one
//! data file reaches that file, whatever partition it says, as in Java. Where a data file has a deletion
//! vector, its position deletes are not looked at (rule D1).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use iceberg::metadata_columns::RESERVED_FIELD_ID_DELETE_FILE_PATH;
use iceberg::spec::{DataContentType, DataFile, DataFileFormat, Datum, PrimitiveLiteral};
use mergeberg_kernel::ids::SpecId;
use mergeberg_kernel::partition::Partition;
use sha2::{Digest, Sha256};

use super::super::error::TableError;
use super::super::manifests::LiveFile;

/// A delete file or deletion vector with what its manifest entry says about its reach.
#[derive(Debug)]
pub struct DeleteFile {
    pub live: LiveFile,
    pub content: Content,
}

/// What a delete file deletes by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A deletion vector of this data file.
    Vector(Arc<str>),
    /// Positions of this data file.
    PositionsOf(Arc<str>),
    /// Positions of data files of its partition.
    Positions,
    /// Values of columns with these field ids, ascending.
    Equality(Vec<i32>),
}

/// Path of the file, and where in it: a Puffin file holds many vectors.
pub type DeleteId = (Arc<str>, Option<i64>);

impl DeleteFile {
    pub fn of(live: LiveFile) -> Result<Self, TableError> {
        let file = live.file.as_ref();
        let corrupt = |message: &str| TableError::corrupt(file.file_path(), message);
        let content = match (file.content_type(), file.file_format()) {
            (DataContentType::PositionDeletes, DataFileFormat::Puffin) => {
                let data_file = file.referenced_data_file();
                Content::Vector(data_file.map(Arc::from).ok_or_else(|| {
                    corrupt("its manifest entry does not say which data file the deletion vector is for")
                })?)
            }
            (DataContentType::PositionDeletes, _) => match only_data_file(file) {
                Some(data_file) => Content::PositionsOf(data_file),
                None => Content::Positions,
            },
            (DataContentType::EqualityDeletes, _) => {
                let mut ids = file.equality_ids().unwrap_or_default();
                ids.sort_unstable();
                ids.dedup();
                if ids.is_empty() {
                    return Err(corrupt("its manifest entry does not say which columns are compared"));
                }
                Content::Equality(ids)
            }
            (DataContentType::Data, _) => {
                return Err(corrupt("its manifest entry says that it holds rows, not deletes"));
            }
        };
        Ok(Self { live, content })
    }

    pub fn id(&self) -> DeleteId {
        delete_id(&self.live)
    }
}

pub fn delete_id(live: &LiveFile) -> DeleteId {
    (Arc::clone(&live.fact.path), live.file.content_offset())
}

/// The one data file that a position-delete file names in its manifest entry, by the field made for it or by
/// equal bounds of the column `file_path` (Java: `ContentFileUtil.referencedDataFile`).
fn only_data_file(file: &DataFile) -> Option<Arc<str>> {
    if let Some(path) = file.referenced_data_file() {
        return Some(Arc::from(path));
    }
    let bound = |bounds: &HashMap<i32, Datum>| match bounds.get(&RESERVED_FIELD_ID_DELETE_FILE_PATH) {
        Some(datum) => match datum.literal() {
            PrimitiveLiteral::String(path) => Some(path.clone()),
            _ => None,
        },
        None => None,
    };
    let (lower, upper) = (bound(file.lower_bounds())?, bound(file.upper_bounds())?);
    (lower == upper).then(|| Arc::from(lower))
}

/// Equality deletes that share reach and columns. A row is deleted when a file that is newer than the row's
/// data file names its values, so one look-up of the newest file for these values answers for all.
#[derive(Debug)]
pub struct EqualityGroup {
    /// Field ids, ascending.
    pub ids: Vec<i32>,
    /// By sequence number, the newest last.
    pub files: Vec<Arc<DeleteFile>>,
    /// Digest of which files these are.
    pub name: Arc<str>,
}

impl EqualityGroup {
    fn new(ids: Vec<i32>, mut files: Vec<Arc<DeleteFile>>) -> Self {
        files.sort_by(|a, b| {
            (a.live.sequence_number, &a.live.fact.path).cmp(&(b.live.sequence_number, &b.live.fact.path))
        });
        let mut hash = Sha256::new();
        for file in &files {
            hash.update(file.live.fact.path.as_bytes());
            hash.update([0]);
        }
        let name = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        Self { ids, files, name: Arc::from(name) }
    }

    fn reaches(&self, data_file: &LiveFile) -> bool {
        self.files.last().is_some_and(|newest| newest.live.sequence_number > data_file.sequence_number)
    }
}

/// What applies to one data file.
#[derive(Clone, Debug, Default)]
pub struct FileDeletes {
    /// A deletion vector, or position-delete files.
    pub positions: Vec<Arc<DeleteFile>>,
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

type FileLists<K> = HashMap<K, Vec<Arc<DeleteFile>>>;

/// The delete files of a snapshot, by what they reach.
#[derive(Debug, Default)]
pub struct DeleteIndex {
    vectors: HashMap<Arc<str>, Arc<DeleteFile>>,
    positions_of: FileLists<Arc<str>>,
    positions: FileLists<PartitionKey>,
    equality: HashMap<PartitionKey, Vec<Arc<EqualityGroup>>>,
    /// Equality deletes of unpartitioned specs reach every partition of every spec.
    global: Vec<Arc<EqualityGroup>>,
}

impl DeleteIndex {
    /// Two deletion vectors of one data file are an error: a snapshot has at most one (table spec, "Deletion
    /// Vectors").
    pub fn new(files: impl IntoIterator<Item = Arc<DeleteFile>>) -> Result<Self, TableError> {
        let mut index = Self::default();
        let mut equality: BTreeMap<Reach, Vec<Arc<DeleteFile>>> = BTreeMap::new();
        for file in files {
            match &file.content {
                Content::Vector(data_file) => {
                    let data_file = Arc::clone(data_file);
                    if let Some(other) = index.vectors.insert(Arc::clone(&data_file), Arc::clone(&file)) {
                        return Err(TableError::corrupt(
                            &data_file,
                            format!(
                                "it has two deletion vectors, in {} and in {}",
                                other.live.fact.path, file.live.fact.path
                            ),
                        ));
                    }
                }
                Content::PositionsOf(data_file) => {
                    index.positions_of.entry(Arc::clone(data_file)).or_default().push(file);
                }
                Content::Positions => {
                    let key = key_of(&file.live.fact.partition);
                    index.positions.entry(key).or_default().push(file);
                }
                Content::Equality(ids) => {
                    let partition = &file.live.fact.partition;
                    let reach = (!partition.is_unpartitioned()).then(|| key_of(partition));
                    equality.entry((reach, ids.clone())).or_default().push(file);
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
        let files: Vec<Arc<DeleteFile>> =
            live.into_iter().map(|file| DeleteFile::of(file).map(Arc::new)).collect::<Result<_, _>>()?;
        Self::new(files)
    }

    pub fn for_file(&self, data_file: &LiveFile) -> Result<FileDeletes, TableError> {
        let partition = key_of(&data_file.fact.partition);
        let in_partition = self.equality.get(&partition).into_iter().flatten();
        let equality = in_partition.chain(&self.global).filter(|g| g.reaches(data_file)).cloned().collect();
        Ok(FileDeletes { positions: self.positions_for(data_file, &partition)?, equality })
    }

    /// Its deletion vector, and the position-delete files that speak of no other data file: they go when it goes
    /// (rule D5).
    pub fn own_deletes(&self, data_file: &str) -> Vec<Arc<DeleteFile>> {
        let vector = self.vectors.get(data_file);
        let named = self.positions_of.get(data_file).into_iter().flatten();
        vector.into_iter().chain(named).cloned().collect()
    }

    fn positions_for(
        &self,
        data_file: &LiveFile,
        partition: &PartitionKey,
    ) -> Result<Vec<Arc<DeleteFile>>, TableError> {
        let path = &data_file.fact.path;
        if let Some(vector) = self.vectors.get(path) {
            // No reader agrees with another about what this would mean; Java refuses it.
            if vector.live.sequence_number < data_file.sequence_number {
                return Err(TableError::corrupt(
                    &vector.live.fact.path,
                    format!("it holds a deletion vector that is older than its data file {path}"),
                ));
            }
            return Ok(vec![Arc::clone(vector)]);
        }
        let named = self.positions_of.get(path).into_iter().flatten();
        let others = self.positions.get(partition).into_iter().flatten();
        Ok(named
            .chain(others)
            .filter(|delete| delete.live.sequence_number >= data_file.sequence_number)
            .cloned()
            .collect())
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
