//! The table's write properties as settings of the Parquet writer (Iceberg documentation, "Configuration", write
//! properties).
//!
//! Java's defaults, where a table says nothing. A size that is no size is the default; a codec or level that is not
//! there is refused, for the files would not be what somebody asked for.

use std::collections::HashMap;

use datafusion::arrow::datatypes::{DataType, Field, Fields, SchemaRef as ArrowSchemaRef};
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use datafusion::parquet::basic::{BrotliLevel, Compression, GzipLevel, ZstdLevel};
use datafusion::parquet::file::properties::{
    EnabledStatistics, WriterProperties, WriterPropertiesBuilder, WriterVersion,
};
use datafusion::parquet::schema::types::ColumnPath;
use iceberg::spec::Schema;
use mergeberg_kernel::facts::TableFacts;

use super::error::TableError;

/// Default of `write.target-file-size-bytes`, in bytes.
const TARGET_FILE_BYTES: i64 = 512 * 1024 * 1024;
/// Default of `write.parquet.row-group-size-bytes`, in bytes.
const ROW_GROUP_BYTES: i64 = 128 * 1024 * 1024;
/// Default of `write.parquet.page-size-bytes`, in bytes.
const PAGE_BYTES: i64 = 1024 * 1024;
/// Default of `write.parquet.page-row-limit`, in rows.
const PAGE_ROWS: i64 = 20_000;
/// Default of `write.parquet.dict-size-bytes`, in bytes.
const DICTIONARY_BYTES: i64 = 2 * 1024 * 1024;
/// Default of `write.parquet.bloom-filter-max-bytes`, in bytes of one filter.
const BLOOM_FILTER_BYTES: i64 = 1024 * 1024;
/// Default of `write.parquet.bloom-filter-fpp.column.*`.
const BLOOM_FILTER_FPP: f64 = 0.01;
/// Default of `write.parquet.compression-level` for ZSTD.
const ZSTD_LEVEL: i64 = 3;

const BLOOM_FILTER: &str = "write.parquet.bloom-filter-enabled.column.";
const STATISTICS: &str = "write.parquet.stats-enabled.column.";

/// Bytes at which a file is closed and the next one begun.
pub(super) fn target_file_bytes(facts: &TableFacts) -> usize {
    size(facts, "write.target-file-size-bytes", TARGET_FILE_BYTES)
}

/// Bytes of one row group, as encoded.
pub(super) fn row_group_bytes(facts: &TableFacts) -> usize {
    size(facts, "write.parquet.row-group-size-bytes", ROW_GROUP_BYTES)
}

/// Settings for files of `schema`, whose columns are those of `arrow`.
pub(super) fn parquet_properties(
    facts: &TableFacts,
    schema: &Schema,
    arrow: &ArrowSchemaRef,
) -> Result<WriterProperties, TableError> {
    let version = match facts.properties.get("write.parquet.page-version").map(String::as_str) {
        Some("v2" | "V2") => WriterVersion::PARQUET_2_0,
        _ => WriterVersion::PARQUET_1_0,
    };
    let mut properties = WriterProperties::builder()
        .set_writer_version(version)
        .set_compression(compression(facts)?)
        .set_max_row_group_bytes(Some(row_group_bytes(facts)))
        // Java closes row groups by bytes alone.
        .set_max_row_group_row_count(None)
        .set_data_page_size_limit(size(facts, "write.parquet.page-size-bytes", PAGE_BYTES))
        .set_data_page_row_count_limit(size(facts, "write.parquet.page-row-limit", PAGE_ROWS))
        .set_dictionary_page_size_limit(size(facts, "write.parquet.dict-size-bytes", DICTIONARY_BYTES))
        // The crate takes bounds over those row groups only whose statistics are not truncated; a
        // file bound would then be too narrow. So nothing is truncated here; what goes into a manifest is cut there.
        .set_statistics_truncate_length(None);
    let paths = leaf_paths(arrow);
    let path_of = |name: &str| schema.field_id_by_name(name).and_then(|id| paths.get(&id)).cloned();
    for (key, value) in &facts.properties {
        if let Some(path) = key.strip_prefix(BLOOM_FILTER).and_then(path_of)
            && value.eq_ignore_ascii_case("true")
        {
            let name = key.get(BLOOM_FILTER.len()..).unwrap_or_default();
            properties = with_bloom_filter(properties, facts, name, path);
        }
        if let Some(path) = key.strip_prefix(STATISTICS).and_then(path_of)
            && value.eq_ignore_ascii_case("false")
        {
            properties = properties.set_column_statistics_enabled(path, EnabledStatistics::None);
        }
    }
    Ok(properties.build())
}

/// A size from the table's properties; nonsense (zero, negative) is the default.
fn size(facts: &TableFacts, key: &str, default: i64) -> usize {
    let size = facts.property_i64(key, default);
    usize::try_from(if size > 0 { size } else { default }).unwrap_or(usize::MAX)
}

/// By field id: the path of every column of values, as Parquet writes it.
fn leaf_paths(arrow: &ArrowSchemaRef) -> HashMap<i32, ColumnPath> {
    let mut paths = HashMap::new();
    add_fields(arrow.fields(), &[], &mut paths);
    paths
}

fn add_fields(fields: &Fields, above: &[String], paths: &mut HashMap<i32, ColumnPath>) {
    for field in fields {
        add_leaves(field, &[above, &[field.name().clone()]].concat(), paths);
    }
}

fn add_leaves(field: &Field, path: &[String], paths: &mut HashMap<i32, ColumnPath>) {
    match field.data_type() {
        DataType::Struct(fields) => add_fields(fields, path, paths),
        DataType::List(element) | DataType::LargeList(element) => {
            let below = ["list".to_owned(), element.name().clone()];
            add_leaves(element, &[path, &below].concat(), paths);
        }
        DataType::Map(entries, _) => {
            if let DataType::Struct(fields) = entries.data_type() {
                add_fields(fields, &[path, &[entries.name().clone()]].concat(), paths);
            }
        }
        _ => {
            let id = field.metadata().get(PARQUET_FIELD_ID_META_KEY).and_then(|id| id.parse().ok());
            paths.extend(id.map(|id: i32| (id, ColumnPath::new(path.to_vec()))));
        }
    }
}

fn with_bloom_filter(
    properties: WriterPropertiesBuilder,
    facts: &TableFacts,
    name: &str,
    path: ColumnPath,
) -> WriterPropertiesBuilder {
    let of_column =
        |kind: &str| facts.properties.get(&format!("write.parquet.bloom-filter-{kind}.column.{name}"));
    let fpp = of_column("fpp").and_then(|text| text.parse::<f64>().ok());
    let fpp = fpp.filter(|fpp| *fpp > 0.0 && *fpp < 1.0).unwrap_or(BLOOM_FILTER_FPP);
    let room = size(facts, "write.parquet.bloom-filter-max-bytes", BLOOM_FILTER_BYTES);
    let most = values_within(room, fpp);
    let expected = of_column("ndv").and_then(|text| text.parse::<u64>().ok()).filter(|values| *values > 0);
    properties
        .set_column_bloom_filter_enabled(path.clone(), true)
        .set_column_bloom_filter_fpp(path.clone(), fpp)
        .set_column_bloom_filter_ndv(path, expected.map_or(most, |values| values.min(most)))
}

/// Distinct values for which a split-block Bloom filter has at most `bytes` bytes. Filters come in powers of two
/// (Parquet format, "Bloom Filter": bits = -8 n / ln(1 - fpp^(1/8))).
fn values_within(bytes: usize, fpp: f64) -> u64 {
    let power = if bytes.is_power_of_two() { bytes } else { bytes.next_power_of_two() / 2 };
    let bits = power as f64 * 8.0;
    let values = -bits * (1.0 - fpp.powf(1.0 / 8.0)).ln() / 8.0;
    (values as u64).max(1)
}

fn compression(facts: &TableFacts) -> Result<Compression, TableError> {
    const CODEC: &str = "write.parquet.compression-codec";
    const LEVEL: &str = "write.parquet.compression-level";
    let codec = facts.properties.get(CODEC).map_or("zstd", String::as_str).to_ascii_lowercase();
    let level = |default: i64| facts.property_i64(LEVEL, default);
    let unsigned = |default: i64| u32::try_from(level(default)).unwrap_or(u32::MAX);
    let refused = |e: &dyn std::fmt::Display| {
        TableError::Unsupported(format!("table property {LEVEL} cannot be used with {codec}: {e}"))
    };
    match codec.as_str() {
        "zstd" => {
            let level = i32::try_from(level(ZSTD_LEVEL)).unwrap_or(i32::MAX);
            ZstdLevel::try_new(level).map(Compression::ZSTD).map_err(|e| refused(&e))
        }
        "gzip" => GzipLevel::try_new(unsigned(6)).map(Compression::GZIP).map_err(|e| refused(&e)),
        "brotli" => BrotliLevel::try_new(unsigned(1)).map(Compression::BROTLI).map_err(|e| refused(&e)),
        "snappy" => Ok(Compression::SNAPPY),
        "lz4" => Ok(Compression::LZ4_RAW),
        "uncompressed" => Ok(Compression::UNCOMPRESSED),
        other => Err(TableError::Unsupported(format!(
            "table property {CODEC} is '{other}'; use zstd, gzip, snappy, lz4, brotli or uncompressed"
        ))),
    }
}
