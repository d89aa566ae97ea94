//! The only importer of iceberg: facts from metadata and manifests, the snapshot writer, catalogs.
//! Nothing above it knows metadata files.

pub mod catalog;
pub mod document;
pub mod loaded;
