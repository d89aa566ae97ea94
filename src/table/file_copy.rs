//! A manifest's data file, copied to be changed: the crate's type can only be built anew.

use iceberg::spec::{DataFile, DataFileBuilder};

use super::error::TableError;

/// A builder that has everything of `file`.
pub(super) fn builder_of(file: &DataFile, spec_id: i32) -> DataFileBuilder {
    let mut builder = DataFileBuilder::default();
    builder
        .content(file.content_type())
        .file_path(file.file_path().to_owned())
        .file_format(file.file_format())
        .partition(file.partition().clone())
        .record_count(file.record_count())
        .file_size_in_bytes(file.file_size_in_bytes())
        .column_sizes(file.column_sizes().clone())
        .value_counts(file.value_counts().clone())
        .null_value_counts(file.null_value_counts().clone())
        .nan_value_counts(file.nan_value_counts().clone())
        .lower_bounds(file.lower_bounds().clone())
        .upper_bounds(file.upper_bounds().clone())
        .key_metadata(file.key_metadata().map(<[u8]>::to_vec))
        .split_offsets(file.split_offsets().map(<[i64]>::to_vec))
        .equality_ids(file.equality_ids())
        .first_row_id(file.first_row_id())
        .partition_spec_id(spec_id)
        .referenced_data_file(file.referenced_data_file())
        .content_offset(file.content_offset())
        .content_size_in_bytes(file.content_size_in_bytes());
    if let Some(order) = file.sort_order_id() {
        builder.sort_order_id(order);
    }
    builder
}

/// What the builder of a copy of `file` gives.
pub(super) fn build(builder: &DataFileBuilder, file: &DataFile) -> Result<DataFile, TableError> {
    builder.build().map_err(|e| TableError::Internal(format!("{} was not copied: {e}", file.file_path())))
}
