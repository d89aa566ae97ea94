//! A table as loaded: the facts that decisions read, the crate's model that readers and writers need,
//! and the metadata document that commits edit.

use std::sync::Arc;

use iceberg::io::FileIO;
use iceberg::spec::TableMetadataRef;
use mergeberg_kernel::facts::TableFacts;

use super::document::Document;

/// Immutable; shared between tasks.
#[derive(Clone, Debug)]
pub struct LoadedTable {
    pub facts: TableFacts,
    pub metadata_location: String,
    /// The crate's model: schemas, specs, snapshots. Its refs are not readable; use `facts.refs`.
    pub metadata: TableMetadataRef,
    pub document: Arc<Document>,
    pub file_io: FileIO,
}
