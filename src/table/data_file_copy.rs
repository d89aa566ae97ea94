//! A data file again under a path that no file ever had: its bytes as they are, so that nothing is decoded and
//! statistics hold. For rows that come back, whose old path may not be added again (rule D6).

use std::sync::Arc;

use iceberg::spec::DataFile;
use uuid::Uuid;

use super::data_files::NewDataFile;
use super::error::TableError;
use super::file_copy::{build, builder_of};
use super::folders::data_folder;
use super::loaded::LoadedTable;
use super::manifest_codec::file_fact;
use super::manifests::LiveFile;

/// Bytes in memory at a time.
const CHUNK_BYTES: u64 = 8 * 1024 * 1024;

/// Copies the file. A copy that fails is deleted.
///
/// # Errors
/// [`TableError::Missing`] when the file is not there any more.
pub async fn copy_data_file(table: &LoadedTable, file: &LiveFile) -> Result<NewDataFile, TableError> {
    let extension = file.file.file_format().to_string().to_ascii_lowercase();
    let path = format!("{}/{}-restored.{extension}", data_folder(&table.facts), Uuid::now_v7());
    if let Err(error) = copy(table, &file.fact.path, &path).await {
        if let Err(left) = table.file_io.delete(&path).await {
            tracing::warn!(%path, error = %left, "a data file of a failed copy was left behind");
        }
        return Err(error);
    }
    let copied = described(&file.file, &path, file.spec_id.0)?;
    Ok(NewDataFile {
        fact: file_fact(&copied, Arc::clone(&file.fact.partition)).map_err(TableError::Internal)?,
        file: Arc::new(copied),
        spec_id: file.spec_id,
    })
}

async fn copy(table: &LoadedTable, from: &str, to: &str) -> Result<(), TableError> {
    let file_io = &table.file_io;
    let input = file_io.new_input(from).map_err(|e| TableError::io(from, e))?;
    let size = match input.metadata().await {
        Ok(metadata) => metadata.size,
        Err(error) => return Err(TableError::of_read(file_io, from, error).await),
    };
    let reader = input.reader().await.map_err(|e| TableError::io(from, e))?;
    let failed = |e| TableError::of_write(to, e);
    let mut writer = file_io.new_output(to).map_err(failed)?.writer().await.map_err(failed)?;
    let mut at = 0;
    while at < size {
        let end = at.saturating_add(CHUNK_BYTES).min(size);
        let bytes = reader.read(at..end).await.map_err(|e| TableError::io(from, e))?;
        writer.write(bytes).await.map_err(failed)?;
        at = end;
    }
    writer.close().await.map_err(failed)
}

/// The same description under the new path. Row ids (format v3) are the old place's: it gets new ones.
fn described(file: &DataFile, path: &str, spec_id: i32) -> Result<DataFile, TableError> {
    let mut builder = builder_of(file, spec_id);
    builder.file_path(path.to_owned()).first_row_id(None);
    build(&builder, file)
}
