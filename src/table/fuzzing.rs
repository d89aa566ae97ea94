//! What the fuzz targets in `fuzz/` call: parsers of what other writers leave, on any bytes.

use bytes::Bytes;
use iceberg::io::FileIO;
use iceberg::spec::{DataFileFormat, FormatVersion, ManifestContentType, ManifestFile, PartitionSpec};

use super::avro::header_cache::HeaderCache;
use super::formats::MemoryFile;
use super::loaded::LoadedTable;
use super::manifest_codec;
use super::manifests::decode_list;

const ROWS_AT_ONCE: usize = 100;

/// A metadata file.
pub fn metadata(bytes: &[u8]) {
    if let Ok(name) = "fuzz.table".parse() {
        let parsed = LoadedTable::parse(&name, "file:///m.json", bytes, FileIO::new_with_memory());
        drop(parsed);
    }
}

/// A manifest list, of format 2 and of format 3.
pub fn manifest_list(bytes: &[u8]) {
    for version in [FormatVersion::V2, FormatVersion::V3] {
        drop(decode_list("file:///list.avro", bytes, version, &HeaderCache::default()));
    }
}

/// A manifest.
pub fn manifest(bytes: &[u8]) {
    let (listed, spec) = (listed_manifest(), PartitionSpec::unpartition_spec());
    drop(manifest_codec::decode(&listed, bytes, &spec, &HeaderCache::default()));
}

/// A data file in Avro.
pub fn avro_file(bytes: &[u8]) {
    rows(bytes, DataFileFormat::Avro);
}

/// A data file in ORC.
pub fn orc_file(bytes: &[u8]) {
    rows(bytes, DataFileFormat::Orc);
}

fn rows(bytes: &[u8], format: DataFileFormat) {
    let Ok(file) = MemoryFile::open(Bytes::copy_from_slice(bytes), format) else { return };
    let columns = (0..file.columns().len()).collect();
    if let Ok(batches) = file.select(columns, ROWS_AT_ONCE) {
        for batch in batches {
            drop(batch);
        }
    }
}

/// A list's entry of a manifest of which nothing is known.
pub(super) fn listed_manifest() -> ManifestFile {
    ManifestFile {
        manifest_path: "file:///m0.avro".to_owned(),
        manifest_length: 0,
        partition_spec_id: 0,
        content: ManifestContentType::Data,
        sequence_number: 5,
        min_sequence_number: 1,
        added_snapshot_id: 1,
        added_files_count: None,
        existing_files_count: None,
        deleted_files_count: None,
        added_rows_count: None,
        existing_rows_count: None,
        deleted_rows_count: None,
        partitions: None,
        key_metadata: None,
        first_row_id: None,
    }
}
