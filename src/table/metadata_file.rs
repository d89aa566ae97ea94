//! Metadata files: their names, compression, and durable creation.
//!
//! On a local disk they are read and written here rather than through `FileIO` for three reasons: a new file
//! must never overwrite one that exists, it must be on disk before the catalog points to it, and a read-only
//! warehouse must be told apart from one that is gone. An object store keeps what it has taken, and there the
//! name alone, with a new UUID in it, keeps a file from being written over (docs/decisions/0022).

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use iceberg::io::FileIO;
use mergeberg_kernel::facts::TableFacts;
use uuid::Uuid;

use super::catalog::off_runtime;
use super::error::plain;
use super::folders::metadata_folder;
use super::storage::{self, FaultKind};

const COMPRESSION_CODEC: &str = "write.metadata.compression-codec";
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Uncompressed metadata larger than this is refused, in bytes: a small file can inflate without end.
const MAX_METADATA_BYTES: u64 = 1 << 30;

#[derive(Debug, thiserror::Error)]
pub enum MetadataFileError {
    #[error("'{0}' is not on this machine")]
    NotLocal(String),
    #[error(transparent)]
    Place(#[from] storage::WrongPlace),
    #[error("the file does not exist")]
    Missing,
    #[error("{0}")]
    ReadOnly(io::Error),
    /// The object store refuses access, in words.
    #[error("{0}")]
    Denied(String),
    /// The object store failed, in words.
    #[error("{0}")]
    Store(String),
    #[error("the uncompressed metadata is larger than {MAX_METADATA_BYTES} bytes; expire old snapshots")]
    TooLarge,
    #[error("'{0}' is no codec for metadata files; set write.metadata.compression-codec to none or gzip")]
    UnknownCodec(String),
    #[error("{0}")]
    Io(io::Error),
}

impl From<io::Error> for MetadataFileError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Self::ReadOnly(error),
            _ => Self::Io(error),
        }
    }
}

/// How a metadata file is written (Java: `TableMetadataParser.Codec`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    None,
    Gzip,
}

impl Codec {
    pub fn of(properties: &BTreeMap<String, String>) -> Result<Self, MetadataFileError> {
        let Some(word) = properties.get(COMPRESSION_CODEC) else { return Ok(Self::None) };
        match word.to_ascii_lowercase().as_str() {
            "none" | "" => Ok(Self::None),
            "gzip" => Ok(Self::Gzip),
            _ => Err(MetadataFileError::UnknownCodec(word.clone())),
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::None => ".metadata.json",
            Self::Gzip => ".gz.metadata.json",
        }
    }

    pub fn encode(self, json: Vec<u8>) -> Result<Vec<u8>, MetadataFileError> {
        match self {
            Self::None => Ok(json),
            Self::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
                encoder.write_all(&json)?;
                Ok(encoder.finish()?)
            }
        }
    }
}

/// Uncompressed bytes, whatever the name says: gzip is told by its magic bytes.
pub fn decode(bytes: &[u8]) -> Result<Vec<u8>, MetadataFileError> {
    let mut json = Vec::new();
    if bytes.starts_with(&GZIP_MAGIC) {
        GzDecoder::new(bytes).take(MAX_METADATA_BYTES + 1).read_to_end(&mut json)?;
    } else {
        json.extend_from_slice(bytes);
    }
    if json.len() as u64 > MAX_METADATA_BYTES {
        return Err(MetadataFileError::TooLarge);
    }
    Ok(json)
}

/// Where version `version` of a table's metadata goes.
pub fn location(facts: &TableFacts, version: u64, unique: Uuid) -> Result<String, MetadataFileError> {
    let codec = Codec::of(&facts.properties)?;
    Ok(format!("{}/{version:05}-{unique}{}", metadata_folder(facts), codec.extension()))
}

/// Where the metadata after `current` goes.
pub fn next_location(current: &str, facts: &TableFacts, unique: Uuid) -> Result<String, MetadataFileError> {
    location(facts, next_version(current), unique)
}

/// One above the number that the file name starts with; 0 when it has none (Java:
/// `BaseMetastoreTableOperations.parseVersion`).
fn next_version(current: &str) -> u64 {
    let name = current.rsplit('/').next().unwrap_or(current);
    let number = name.split_once('-').and_then(|(number, _)| number.parse::<u64>().ok());
    number.map_or(0, |n| n.saturating_add(1))
}

/// The path behind a location: `file:///p`, `file:/p` or `/p`.
pub(super) fn local_path(location: &str) -> Result<PathBuf, MetadataFileError> {
    storage::local_path(location).ok_or_else(|| MetadataFileError::NotLocal(location.to_owned()))
}

/// Of a file on this machine. Blocks.
pub fn read(location: &str) -> Result<Vec<u8>, MetadataFileError> {
    Ok(fs::read(local_path(location)?)?)
}

/// The file's bytes from an object store; `None` when it is on this machine, where [`read`] reads it.
pub async fn fetched(file_io: &FileIO, location: &str) -> Result<Option<Vec<u8>>, MetadataFileError> {
    if storage::local_path(location).is_some() {
        return Ok(None);
    }
    storage::require_known(location)?;
    let input = file_io.new_input(location).map_err(|e| of_store(&e))?;
    let bytes = input.read().await.map_err(|e| of_store(&e))?;
    Ok(Some(bytes.to_vec()))
}

/// Creates the file under a name that nobody has. On failure nothing refers to what may be left.
pub async fn put(file_io: &FileIO, location: &str, bytes: Vec<u8>) -> Result<(), MetadataFileError> {
    if storage::local_path(location).is_some() {
        let at = location.to_owned();
        return match off_runtime(move || create(&at, &bytes)).await {
            Ok(result) => result,
            Err(error) => Err(MetadataFileError::Io(io::Error::other(error.to_string()))),
        };
    }
    storage::require_known(location)?;
    let output = file_io.new_output(location).map_err(|e| of_store(&e))?;
    output.write(bytes.into()).await.map_err(|e| of_store(&e))
}

/// Removes a file that [`put`] made and that no catalog points to.
pub async fn discard(file_io: &FileIO, location: &str) -> Result<(), MetadataFileError> {
    match storage::local_path(location) {
        Some(path) => Ok(tokio::fs::remove_file(path).await?),
        None => file_io.delete(location).await.map_err(|e| of_store(&e)),
    }
}

fn of_store(error: &iceberg::Error) -> MetadataFileError {
    let told = plain(error);
    match storage::kind_of(error) {
        Some(FaultKind::Missing) => MetadataFileError::Missing,
        Some(FaultKind::Denied) => MetadataFileError::Denied(told),
        Some(FaultKind::Trouble) | None => MetadataFileError::Store(told),
    }
}

/// Creates a file on this machine and waits until it is on disk: a catalog must not point to a file that a
/// power cut can empty. On failure nothing is left. Blocks.
fn create(location: &str, bytes: &[u8]) -> Result<(), MetadataFileError> {
    let path = local_path(location)?;
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(&path)?;
    if let Err(error) = file.write_all(bytes).and_then(|()| file.sync_all()) {
        drop(file);
        // It was created above and nobody knows its name.
        let _ = fs::remove_file(&path);
        return Err(error.into());
    }
    Ok(())
}

/// Can files be created beside `location`? Makes one of its own there and removes it.
pub fn probe_writable(location: &str) -> Result<(), MetadataFileError> {
    let path = local_path(location)?;
    let existing = path.ancestors().skip(1).find(|folder| folder.is_dir()).unwrap_or(&path);
    let probe = existing.join(format!(".mergeberg-probe-{}", Uuid::new_v4()));
    OpenOptions::new().write(true).create_new(true).open(&probe)?;
    Ok(fs::remove_file(&probe)?)
}

#[cfg(test)]
mod tests {
    use super::super::writer_test_support::TestTable;
    use super::*;

    fn properties(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn the_next_file_counts_on_from_the_name_of_the_last() {
        for (current, next) in [
            ("file:///w/ns/t/metadata/00041-0d9a.metadata.json", 42),
            ("/w/ns/t/metadata/99999-0d9a.gz.metadata.json", 100_000),
            ("/w/ns/t/metadata/v3.metadata.json", 0),
            ("/w/a-1/t/metadata/plain.json", 0),
        ] {
            assert_eq!(next_version(current), next, "{current}");
        }
    }

    #[test]
    fn the_location_follows_the_table_properties() {
        let id = Uuid::nil();

        let at = |pairs: &[(&str, &str)]| {
            let mut facts = TestTable::new().table.facts;
            facts.location = "file:///w/t/".to_owned();
            facts.properties = properties(pairs);
            location(&facts, 7, id)
        };

        assert_eq!(at(&[]).unwrap(), format!("file:///w/t/metadata/00007-{id}.metadata.json"));
        let moved = at(&[("write.metadata.path", "s3://b/meta/"), (COMPRESSION_CODEC, "GZIP")]);
        assert_eq!(moved.unwrap(), format!("s3://b/meta/00007-{id}.gz.metadata.json"));
        assert!(at(&[(COMPRESSION_CODEC, "zstd")]).unwrap_err().to_string().contains("zstd"));
    }

    #[test]
    fn gzip_is_told_by_its_bytes() {
        let packed = Codec::Gzip.encode(b"{\"a\":1}".to_vec()).unwrap();

        assert_eq!(packed[..2], GZIP_MAGIC);
        assert_eq!(decode(&packed).unwrap(), b"{\"a\":1}");
        assert_eq!(decode(b"{}").unwrap(), b"{}");
        assert!(matches!(decode(&packed[..10]), Err(MetadataFileError::Io(_))));
    }

    #[test]
    fn a_file_is_created_once_and_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let at = format!("file://{}/t/metadata/00000-a.metadata.json", folder.path().display());

        create(&at, b"first").unwrap();
        assert!(create(&at, b"second").is_err());
        assert_eq!(read(&at).unwrap(), b"first");
    }

    #[test]
    fn a_read_only_disk_is_told_apart_from_a_full_one() {
        let of = |kind: io::ErrorKind| MetadataFileError::from(io::Error::from(kind));

        assert!(matches!(of(io::ErrorKind::ReadOnlyFilesystem), MetadataFileError::ReadOnly(_)));
        assert!(matches!(of(io::ErrorKind::PermissionDenied), MetadataFileError::ReadOnly(_)));
        assert!(matches!(of(io::ErrorKind::StorageFull), MetadataFileError::Io(_)));
    }

    #[test]
    fn other_storage_is_refused_with_its_name() {
        let error = read("s3://bucket/t/metadata/00000-a.metadata.json").unwrap_err();

        assert!(error.to_string().contains("s3://bucket"));
    }

    #[tokio::test]
    async fn what_no_catalog_points_to_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let file_io = storage::file_io(storage::StorageProperties::default());
        let at = format!("{}/t/metadata/00000-a.metadata.json", folder.path().display());

        put(&file_io, &at, b"first".to_vec()).await.unwrap();
        assert_eq!(fetched(&file_io, &at).await.unwrap(), None);
        assert_eq!(read(&at).unwrap(), b"first");
        discard(&file_io, &at).await.unwrap();
        assert!(matches!(read(&at), Err(MetadataFileError::Missing)));
        let elsewhere = put(&file_io, "hdfs://n/t", Vec::new()).await.unwrap_err();
        assert!(matches!(elsewhere, MetadataFileError::Place(_)), "{elsewhere}");
    }
}
