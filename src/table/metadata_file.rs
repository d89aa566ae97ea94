//! Metadata files in a local warehouse: their names, compression, and durable creation.
//!
//! They are read and written here rather than through `FileIO` for three reasons: a new file must never
//! overwrite one that exists, it must be on disk before the catalog points to it, and a read-only
//! warehouse must be told apart from one that is gone.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::path::PathBuf;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use mergeberg_kernel::facts::TableFacts;
use uuid::Uuid;

const METADATA_PATH: &str = "write.metadata.path";
const COMPRESSION_CODEC: &str = "write.metadata.compression-codec";
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Uncompressed metadata larger than this is refused, in bytes: a small file can inflate without end.
const MAX_METADATA_BYTES: u64 = 1 << 30;

#[derive(Debug, thiserror::Error)]
pub enum MetadataFileError {
    #[error(
        "'{0}' is not on a local disk; this release works with paths and file:// locations, so register the \
         table in a warehouse on this machine"
    )]
    NotLocal(String),
    #[error("the file does not exist")]
    Missing,
    #[error("{0}")]
    ReadOnly(io::Error),
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
pub fn location(
    table_location: &str,
    properties: &BTreeMap<String, String>,
    version: u64,
    unique: Uuid,
) -> Result<String, MetadataFileError> {
    let folder = match properties.get(METADATA_PATH) {
        Some(path) => path.trim_end_matches('/').to_owned(),
        None => format!("{}/metadata", table_location.trim_end_matches('/')),
    };
    Ok(format!("{folder}/{version:05}-{unique}{}", Codec::of(properties)?.extension()))
}

/// Where the metadata after `current` goes.
pub fn next_location(current: &str, facts: &TableFacts, unique: Uuid) -> Result<String, MetadataFileError> {
    location(&facts.location, &facts.properties, next_version(current), unique)
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
    let path =
        location.strip_prefix("file://").or_else(|| location.strip_prefix("file:")).unwrap_or(location);
    if !path.starts_with('/') {
        return Err(MetadataFileError::NotLocal(location.to_owned()));
    }
    Ok(PathBuf::from(path))
}

/// Refuses a location that is not on a local disk.
pub fn require_local(location: &str) -> Result<(), MetadataFileError> {
    local_path(location).map(drop)
}

pub fn read(location: &str) -> Result<Vec<u8>, MetadataFileError> {
    Ok(fs::read(local_path(location)?)?)
}

/// Creates the file and waits until it is on disk: a catalog must not point to a file that a power cut
/// can empty. On failure nothing is left.
pub fn create(location: &str, bytes: &[u8]) -> Result<(), MetadataFileError> {
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

/// Removes a file that [`create`] made and that no catalog points to.
pub fn discard(location: &str) -> Result<(), MetadataFileError> {
    Ok(fs::remove_file(local_path(location)?)?)
}

#[cfg(test)]
mod tests {
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

        let plain = location("file:///w/t/", &properties(&[]), 7, id).unwrap();
        assert_eq!(plain, format!("file:///w/t/metadata/00007-{id}.metadata.json"));
        let moved = properties(&[(METADATA_PATH, "/elsewhere/meta/"), (COMPRESSION_CODEC, "GZIP")]);
        assert_eq!(
            location("/w/t", &moved, 7, id).unwrap(),
            format!("/elsewhere/meta/00007-{id}.gz.metadata.json")
        );
        let unknown = location("/w/t", &properties(&[(COMPRESSION_CODEC, "zstd")]), 7, id);
        assert!(unknown.unwrap_err().to_string().contains("zstd"));
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
        discard(&at).unwrap();
        assert!(matches!(read(&at), Err(MetadataFileError::Missing)));
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
}
