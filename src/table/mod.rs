//! The only importer of iceberg: facts from metadata and manifests, the snapshot writer, catalogs.
//! Nothing above it knows metadata files.

pub mod catalog;
pub mod create;
pub mod document;
pub mod facts_of;
pub mod loaded;
mod metadata_file;
pub mod sql_catalog;
