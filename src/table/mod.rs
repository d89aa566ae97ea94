//! The only importer of iceberg: facts from metadata and manifests, the snapshot writer, catalogs.
//! Nothing above it knows metadata files.

mod avro;
pub mod branch_writer;
pub mod catalog;
pub mod cleanup;
mod column_adapter;
pub mod course;
pub mod create;
pub mod data_file_copy;
pub mod data_files;
mod data_locations;
mod data_sink;
pub mod deletes;
pub mod document;
#[cfg(test)]
mod engine_tables_tests;
pub mod error;
pub mod evolve;
pub mod facts_of;
mod file_copy;
mod folders;
mod formats;
#[cfg(any(fuzzing, test))]
pub mod fuzzing;
mod guard;
pub mod key_range;
mod list_writer;
pub mod loaded;
mod local;
mod manifest_cache;
mod manifest_codec;
mod manifest_merge;
mod manifest_rewrite;
mod manifest_room;
pub mod manifests;
mod metadata_file;
mod metrics_modes;
mod nested_adapt;
mod nested_columns;
mod parquet_properties;
mod partition_constants;
mod partition_form;
mod partition_values;
pub mod rest_catalog;
mod row_ids;
mod row_lineage;
mod row_order;
mod row_shape;
mod row_sort;
pub mod scan;
mod scan_columns;
mod scan_file;
mod snapshot_change;
mod snapshot_summary;
pub mod snapshot_writer;
pub mod sql_catalog;
pub mod storage;
mod table_cache;
#[cfg(test)]
pub mod test_orders;
#[cfg(test)]
mod writer_test_support;
