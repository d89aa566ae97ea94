//! Paths of new data files.

use std::sync::{Arc, Mutex, PoisonError};

use iceberg::spec::{PartitionKey, StructType};
use iceberg::writer::file_writer::location_generator::LocationGenerator;
use mergeberg_kernel::facts::TableFacts;

use super::course::{Course, Ending};
use super::error::TableError;
use super::folders::data_folder;
use super::partition_values::partition_of;

/// Longer partition values are cut in file paths, in bytes as encoded; file systems allow 255 a folder.
const MAX_PATH_VALUE_BYTES: usize = 100;

/// Paths of data files. The crate's own generator writes partition values as they are, so that a value
/// such as `../..` would leave the table's folder; here names and values are percent-encoded.
#[derive(Clone)]
pub(super) struct Locations {
    pub folder: String,
    types: Arc<StructType>,
    /// Every path given out.
    pub written: Arc<Mutex<Vec<String>>>,
    /// Who is told of a path before it is written.
    pub course: Option<Course>,
    /// Why a path was not to be written: the crate's generators cannot fail.
    refused: Arc<Mutex<Option<Ending>>>,
}

impl Locations {
    pub fn new(facts: &TableFacts, types: StructType, course: Option<Course>) -> Self {
        let (folder, types) = (data_folder(facts), Arc::new(types));
        Self { folder, types, written: Arc::default(), course, refused: Arc::default() }
    }

    /// The error, when one of the paths was not to be written.
    pub fn refusal(&self) -> Result<(), TableError> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        refused.map_or(Ok(()), |ending| Err(ending.of_write()))
    }

    fn path(&self, key: Option<&PartitionKey>, file_name: &str) -> String {
        let mut path = self.folder.clone();
        // A tuple that cannot be shown is refused when the file is described; here it has no folder.
        if let Some(key) = key.filter(|key| !key.spec().is_unpartitioned())
            && let Ok(partition) = partition_of(key.spec(), &self.types, key.data())
        {
            for field in &partition.fields {
                let value = field.value.as_deref().unwrap_or("null");
                path.push_str(&format!("/{}={}", encoded(&field.name), encoded(value)));
            }
        }
        format!("{path}/{file_name}")
    }
}

impl LocationGenerator for Locations {
    fn generate_location(&self, partition_key: Option<&PartitionKey>, file_name: &str) -> String {
        let path = self.path(partition_key, file_name);
        self.written.lock().unwrap_or_else(PoisonError::into_inner).push(path.clone());
        // Files are only opened on threads that may block.
        if let Some(Err(ending)) = self.course.as_ref().map(|course| course.begins_blocking(&path)) {
            self.refused.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(ending);
        }
        path
    }
}

/// Percent-encodes everything but letters, digits and `-_.`, and cuts at [`MAX_PATH_VALUE_BYTES`].
fn encoded(text: &str) -> String {
    let mut path = String::new();
    for character in text.chars() {
        if path.len() >= MAX_PATH_VALUE_BYTES {
            break;
        }
        if character.is_ascii_alphanumeric() || "-_.".contains(character) {
            path.push(character);
            continue;
        }
        let mut buffer = [0_u8; 4];
        for byte in character.encode_utf8(&mut buffer).bytes() {
            path.push_str(&format!("%{byte:02X}"));
        }
    }
    path
}
