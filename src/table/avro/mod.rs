//! Manifests and manifest lists decoded in one pass over their bytes, and encoded in one ([`encode`], [`encode_list`]).
//!
//! The crate parses the Avro schema, the table schema and the partition spec of every file anew and builds a
//! tree of values for every entry; for the small manifests that branches consist of, that is nearly all of
//! the work. Here what a header says is worked out once and kept ([`header_cache`]), and entries are read by
//! field id straight from the bytes.
//!
//! Only the usual is read here. Whatever is not (format v1, fields without ids, other codecs, partition types
//! that need care, damage of any kind) is [`Unusual`]: the crate reads the file then, or says what is wrong
//! with it. So this module never has to judge a file, and never reads one otherwise than the crate would.

mod blocks;
mod cursor;
pub(super) mod encode;
pub(super) mod encode_list;
pub(super) mod header;
pub(super) mod header_cache;
mod list;
mod manifest;
pub(super) mod names;
mod put;
mod schema;

pub(super) use list::decode_list;
pub(super) use manifest::{DecodedEntries, RawEntry, decode_manifest};

/// The crate has to look at this file.
#[derive(Debug)]
pub(super) struct Unusual;

type Usual<T> = Result<T, Unusual>;

#[cfg(test)]
mod tests;
