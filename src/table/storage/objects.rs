//! The crate's `Storage` over object stores and this machine's disks, whichever a location names.
//!
//! A store's client is made once for a bucket and its settings, and kept: it holds the credentials that it
//! fetched and its connections. Settings are asked for at each request, since those that a catalog grants come
//! to an end (`Source::Granted`).

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use iceberg::io::{
    FileMetadata, FileRead, FileWrite, InputFile, LocalFsStorage, OutputFile, Storage, StorageConfig,
    StorageFactory,
};
use iceberg::{Error, ErrorKind, Result};
use opendal::Operator;
use opendal::options::WriteOptions;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::fault::{FaultKind, StorageFault, error_of, kind_of};
use super::operators::operator;
use super::place::{Place, WrongPlace};
use super::signing::RequestSigner;
use super::source::Source;

/// Clients held at a time; with more, all are made anew.
const MAX_CLIENTS: usize = 64;
/// One part of a large object, in bytes: stores allow 10000 parts of at least 5 MiB.
const PART_BYTES: usize = 16 * 1024 * 1024;
/// Parts of one object on their way at the same time.
const PARALLEL_PARTS: usize = 4;

/// See the module.
#[derive(Clone)]
pub(super) struct Objects {
    shared: Arc<Shared>,
}

struct Shared {
    source: Source,
    /// By settings and bucket.
    clients: Mutex<HashMap<(u64, String), Operator>>,
}

/// One object, opened.
struct Object {
    client: Operator,
    key: String,
    origin: Origin,
}

/// Whose failure it is.
struct Origin {
    objects: Objects,
    /// Of the settings.
    grant: u64,
    authority: String,
}

impl Origin {
    fn failed(&self, error: &opendal::Error) -> Error {
        let error = error_of(error, &self.authority);
        if kind_of(&error) == Some(FaultKind::Denied) {
            self.objects.shared.source.doubt(self.grant);
        }
        error
    }
}

impl Objects {
    pub fn new(source: Source) -> Self {
        Self { shared: Arc::new(Shared { source, clients: Mutex::default() }) }
    }

    /// `None`: it is on this machine.
    async fn object(&self, location: &str) -> Result<Option<Object>> {
        let Some(place) = Place::of(location).map_err(refused)? else { return Ok(None) };
        let grant = self.shared.source.grant(location).await.map_err(StorageFault::into_error)?;
        let held = (grant.id, place.authority.to_owned());
        let known = self.clients().get(&held).cloned();
        let client = match known {
            Some(client) => client,
            None => {
                let signing = grant.signing.map(RequestSigner::client);
                let made = operator(&place, &grant.settings, signing);
                let made = made.map_err(|error| error_of(&error, place.authority))?;
                let mut clients = self.clients();
                if clients.len() >= MAX_CLIENTS {
                    clients.clear();
                }
                clients.entry(held).or_insert(made).clone()
            }
        };
        let origin = Origin { objects: self.clone(), grant: grant.id, authority: place.authority.to_owned() };
        Ok(Some(Object { client, key: place.key.to_owned(), origin }))
    }

    fn clients(&self) -> std::sync::MutexGuard<'_, HashMap<(u64, String), Operator>> {
        // A map of values that never change: a panic elsewhere cannot have left it half-changed.
        self.shared.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(wrong: WrongPlace) -> Error {
    Error::new(ErrorKind::FeatureUnsupported, wrong.to_string())
}

#[async_trait]
#[typetag::serde(name = "mergeberg-objects")]
impl Storage for Objects {
    async fn exists(&self, path: &str) -> Result<bool> {
        match self.object(path).await? {
            Some(object) => object.client.exists(&object.key).await.map_err(|e| object.origin.failed(&e)),
            None => LocalFsStorage.exists(path).await,
        }
    }

    async fn metadata(&self, path: &str) -> Result<FileMetadata> {
        match self.object(path).await? {
            Some(object) => {
                let metadata = object.client.stat(&object.key).await.map_err(|e| object.origin.failed(&e))?;
                Ok(FileMetadata { size: metadata.content_length() })
            }
            None => LocalFsStorage.metadata(path).await,
        }
    }

    async fn read(&self, path: &str) -> Result<Bytes> {
        match self.object(path).await? {
            Some(object) => {
                let content = object.client.read(&object.key).await.map_err(|e| object.origin.failed(&e))?;
                Ok(content.to_bytes())
            }
            None => LocalFsStorage.read(path).await,
        }
    }

    async fn reader(&self, path: &str) -> Result<Box<dyn FileRead>> {
        match self.object(path).await? {
            Some(_) => Ok(Box::new(Ranges { objects: self.clone(), path: path.to_owned() })),
            None => LocalFsStorage.reader(path).await,
        }
    }

    async fn write(&self, path: &str, content: Bytes) -> Result<()> {
        match self.object(path).await? {
            Some(object) => {
                object.client.write(&object.key, content).await.map_err(|e| object.origin.failed(&e))?;
                Ok(())
            }
            None => LocalFsStorage.write(path, content).await,
        }
    }

    async fn writer(&self, path: &str) -> Result<Box<dyn FileWrite>> {
        match self.object(path).await? {
            Some(object) => {
                let parts = WriteOptions {
                    chunk: Some(PART_BYTES),
                    concurrent: PARALLEL_PARTS,
                    ..WriteOptions::default()
                };
                let writer = object
                    .client
                    .writer_options(&object.key, parts)
                    .await
                    .map_err(|e| object.origin.failed(&e))?;
                Ok(Box::new(Parts { writer, origin: object.origin }))
            }
            None => LocalFsStorage.writer(path).await,
        }
    }

    async fn delete(&self, path: &str) -> Result<()> {
        match self.object(path).await? {
            Some(object) => object.client.delete(&object.key).await.map_err(|e| object.origin.failed(&e)),
            None => LocalFsStorage.delete(path).await,
        }
    }

    /// The one place that lists: for a table's folder that is the caller's own in whole.
    async fn delete_prefix(&self, path: &str) -> Result<()> {
        match self.object(path.trim_end_matches('/')).await? {
            Some(object) => {
                let folder = format!("{}/", object.key);
                object.client.delete_with(&folder).recursive(true).await.map_err(|e| object.origin.failed(&e))
            }
            None => LocalFsStorage.delete_prefix(path).await,
        }
    }

    async fn delete_stream(&self, mut paths: BoxStream<'static, String>) -> Result<()> {
        while let Some(path) = paths.next().await {
            self.delete(&path).await?;
        }
        Ok(())
    }

    fn new_input(&self, path: &str) -> Result<InputFile> {
        match Place::of(path).map_err(refused)? {
            Some(_) => Ok(InputFile::new(Arc::new(self.clone()), path.to_owned())),
            None => LocalFsStorage.new_input(path),
        }
    }

    fn new_output(&self, path: &str) -> Result<OutputFile> {
        match Place::of(path).map_err(refused)? {
            Some(_) => Ok(OutputFile::new(Arc::new(self.clone()), path.to_owned())),
            None => LocalFsStorage.new_output(path),
        }
    }
}

/// Reads ranges of one object. It asks for the settings each time: a file may be read for longer than a grant
/// holds.
struct Ranges {
    objects: Objects,
    path: String,
}

#[async_trait]
impl FileRead for Ranges {
    async fn read(&self, range: Range<u64>) -> Result<Bytes> {
        let Some(object) = self.objects.object(&self.path).await? else {
            return Err(StorageFault::trouble("a store's file has become a local one").into_error());
        };
        let content =
            object.client.read_with(&object.key).range(range).await.map_err(|e| object.origin.failed(&e))?;
        Ok(content.to_bytes())
    }
}

struct Parts {
    writer: opendal::Writer,
    origin: Origin,
}

#[async_trait]
impl FileWrite for Parts {
    async fn write(&mut self, content: Bytes) -> Result<()> {
        self.writer.write(content).await.map_err(|e| self.origin.failed(&e))
    }

    async fn close(&mut self) -> Result<()> {
        self.writer.close().await.map_err(|e| self.origin.failed(&e))?;
        Ok(())
    }
}

/// What the crate makes its storage with.
#[derive(Clone, Debug)]
pub(super) struct ObjectsFactory(pub Objects);

#[typetag::serde(name = "mergeberg-objects-factory")]
impl StorageFactory for ObjectsFactory {
    fn build(&self, _config: &StorageConfig) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(self.0.clone()))
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Objects").field(&self.shared.source).finish()
    }
}

/// The crate's traits want to be written down and read again, for engines that send them to other machines.
/// Nothing here does, and secrets are not to be written.
macro_rules! never_written {
    ($type:ty) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, _: S) -> std::result::Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("storage with its credentials is not written down"))
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(_: D) -> std::result::Result<Self, D::Error> {
                Err(serde::de::Error::custom("storage with its credentials is not read from anywhere"))
            }
        }
    };
}

never_written!(Objects);
never_written!(ObjectsFactory);
