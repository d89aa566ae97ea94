//! Files of both formats for tests: those that Spark wrote for `fixtures/tables`, and what is read of any.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::compute::concat_batches;
use iceberg::spec::DataFileFormat;

use super::fault::Decoded;
use super::memory::MemoryFile;

/// A file that an engine wrote.
pub(super) struct EngineFile {
    pub path: PathBuf,
    pub format: DataFileFormat,
    pub bytes: Bytes,
}

/// Data and delete files below the fixtures whose table's name begins so, in order.
pub(super) fn engine_files(table: &str) -> Vec<EngineFile> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables");
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        if entry.file_name().to_str().unwrap().starts_with(table) {
            collect(&entry.path().join("data"), &mut files);
        }
    }
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files
}

fn collect(folder: &Path, files: &mut Vec<EngineFile>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.unwrap().path()) {
        let format = match path.extension().and_then(|end| end.to_str()) {
            Some("avro") => DataFileFormat::Avro,
            Some("orc") => DataFileFormat::Orc,
            _ if path.is_dir() => {
                collect(&path, files);
                continue;
            }
            _ => continue,
        };
        let bytes = std::fs::read(&path).unwrap().into();
        files.push(EngineFile { path, format, bytes });
    }
}

/// All columns of a file, in batches of at most so many rows.
pub(super) fn read(bytes: &Bytes, format: DataFileFormat, batch_rows: usize) -> Decoded<Vec<RecordBatch>> {
    let file = MemoryFile::open(bytes.clone(), format)?;
    let roots = (0..file.columns().len()).collect();
    file.select(roots, batch_rows)?.collect()
}

/// The same as one batch; `None` without rows.
pub(super) fn read_whole(bytes: &Bytes, format: DataFileFormat, batch_rows: usize) -> Option<RecordBatch> {
    let batches = read(bytes, format, batch_rows).unwrap();
    let schema = batches.first()?.schema();
    Some(concat_batches(&schema, &batches).unwrap())
}
