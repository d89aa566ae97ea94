//! Room for decoded manifests that are being looked through.
//!
//! A manifest is decoded as a whole, and takes ten to thirty times the size of its file. A table of 200,000 files
//! has tens of megabytes of them, and any number of tables is looked at at the same time; so whoever decodes one
//! waits for room, by the size of the file. Cached manifests take none: the cache has a bound of its own.
//!
//! Nobody waits for ever: a question's manifests take their room in the order in which they are handed out, so the one
//! that is handed out next has its room, or is first in the line for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iceberg::spec::ManifestFile;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::TableError;
use super::manifest_codec::DecodedManifest;
use super::manifests::on_blocking_thread;

/// Manifest files that are decoded and held at the same time, in bytes; a larger one is decoded when there is no
/// other. 8 MiB is what writers aim at (`commit.manifest.target-size-bytes`).
pub(super) const MAX_DECODING_BYTES: u32 = 16 * 1024 * 1024;
/// Manifests of so few entries are looked through at once: a thread of its own would take longer.
const FEW_ENTRIES: usize = 500;

/// Shared by all that is read through one store.
pub(super) struct DecodingRoom {
    free: Arc<Semaphore>,
    bytes: u32,
    taken: Arc<Taken>,
}

#[derive(Default)]
struct Taken {
    now: AtomicU64,
    most: AtomicU64,
}

/// Room that is taken until this is dropped.
pub(super) struct Room {
    _permit: OwnedSemaphorePermit,
    bytes: u64,
    taken: Arc<Taken>,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.taken.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl DecodingRoom {
    pub fn new(bytes: u32) -> Self {
        let bytes = bytes.max(1);
        Self { free: Arc::new(Semaphore::new(bytes as usize)), bytes, taken: Arc::default() }
    }

    /// Waits for room for a manifest file of this length, in bytes.
    pub async fn wait(&self, length: i64) -> Result<Room, TableError> {
        let wanted = u32::try_from(length.max(1)).unwrap_or(u32::MAX).min(self.bytes);
        let permit = Arc::clone(&self.free).acquire_many_owned(wanted).await;
        let permit = permit.map_err(|e| TableError::Internal(format!("no room for manifests: {e}")))?;
        let bytes = u64::try_from(length.max(1)).unwrap_or_default();
        let now = self.taken.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.taken.most.fetch_max(now, Ordering::Relaxed);
        Ok(Room { _permit: permit, bytes, taken: Arc::clone(&self.taken) })
    }

    /// The most that was taken at the same time, in bytes.
    pub fn most(&self) -> u64 {
        self.taken.most.load(Ordering::Relaxed)
    }
}

/// A decoded manifest and its list entry, with the room that it takes.
pub(super) struct Held {
    pub file: Arc<ManifestFile>,
    pub manifest: Arc<DecodedManifest>,
    pub _room: Option<Room>,
}

/// Looks through a manifest, off the async runtime where that takes time, and lets go of it.
pub(super) async fn aside<T: Send + 'static>(
    held: Held,
    work: impl FnOnce(&ManifestFile, &DecodedManifest) -> Result<T, TableError> + Send + 'static,
) -> Result<T, TableError> {
    if held.manifest.entries.len() <= FEW_ENTRIES {
        return work(&held.file, &held.manifest);
    }
    let path = held.file.manifest_path.clone();
    on_blocking_thread(&path, move || work(&held.file, &held.manifest)).await?
}
