//! Files of tables, on this machine's disks and on object stores: S3 and what speaks like it, GCS, Azure.
//!
//! A location's scheme decides (`place`); the crate's storage trait is implemented here, over OpenDAL's clients
//! (`objects`, `operators`), since the crate's own makes a client for each call and does not tell what failed
//! (docs/decisions/0022). Whoever is on a thread for blocking work reads local files without it (`super::local`).
//!
//! Absent on purpose: listing, but for the folder of a scratch table. What is not known by name is not touched.

mod fault;
mod objects;
mod operators;
mod place;
mod properties;
mod signing;
mod source;

use std::sync::Arc;

use iceberg::io::{FileIO, FileIOBuilder};

pub(super) use self::fault::{FaultKind, kind_of};
pub(super) use self::place::local_path;
pub use self::place::{WrongPlace, require_known};
pub use self::properties::{STORAGE_KEYS, StorageProperties};
pub(super) use self::signing::{RequestSigner, Sign, SignedHead};
pub(super) use self::source::{Grant, Grants, Source};

use self::objects::{Objects, ObjectsFactory};

/// Files wherever a location says, with these settings for stores.
pub fn file_io(settings: StorageProperties) -> FileIO {
    file_io_of(Source::Fixed(Arc::new(settings)))
}

pub(super) fn file_io_of(source: Source) -> FileIO {
    FileIOBuilder::new(Arc::new(ObjectsFactory(Objects::new(source)))).build()
}
