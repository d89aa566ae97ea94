//! Paths of new data files.

use std::sync::{Arc, Mutex, PoisonError};

use iceberg::spec::{PartitionKey, StructType};
use iceberg::writer::file_writer::location_generator::LocationGenerator;
use mergeberg_kernel::facts::TableFacts;

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
}

impl Locations {
    pub fn new(facts: &TableFacts, types: StructType) -> Self {
        let folder = data_folder(facts);
        Self { folder, types: Arc::new(types), written: Arc::default() }
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
