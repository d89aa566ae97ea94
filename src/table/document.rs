//! The table metadata file as an ordered document, in which only what we understand is edited.
//!
//! The crate's model drops what it does not know (refs' unknown fields, unknown keys), cannot give a
//! ref's retention and shuffles the snapshots. A catalog that writes metadata files must lose nothing, so
//! members stay raw JSON in their order, and the two long arrays (`snapshots`, `snapshot-log`) are held
//! element by element: a commit appends or cuts elements and copies pointers, not text.
//!
//! Absent on purpose: any edit of schemas, specs or sort orders (structure belongs to the owning engine),
//! and deleting old metadata files (`write.metadata.delete-after-commit.enabled`): we delete no file that
//! we did not write (rule R8).

mod apply;
mod raw;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::ids::{RefName, SnapshotId};
use serde::Deserialize;
use serde::de::DeserializeOwned;

pub use apply::Applied;
pub(super) use apply::snapshot_value;
use raw::{RawObject, push_array, quote};

/// The format versions that commits are applied to. v1 loses its refs in the crate's model.
const SUPPORTED_FORMAT_VERSIONS: [u64; 2] = [2, 3];
/// From this version on rows have ids (table spec, "Row Lineage").
const ROW_LINEAGE: u8 = 3;

/// `current-snapshot-id` of a table without one, as Java writes it in v2.
pub(super) const NO_SNAPSHOT: i64 = -1;

const REFS: &str = "refs";
const METADATA_LOG: &str = "metadata-log";
/// Member of a v3 table: the id that the next new row gets.
const NEXT_ROW_ID: &str = "next-row-id";
const SNAPSHOTS: &str = "snapshots";
const SNAPSHOT_LOG: &str = "snapshot-log";

#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    #[error("it is no metadata document: {0}")]
    NotADocument(String),
    #[error(
        "it has format version 1, whose branches and tags would be lost; upgrade it to version 2 with the \
         engine that owns it (set the table property format-version to 2), then go on"
    )]
    FormatVersion1,
    #[error(
        "it has format version {0}, which this release does not know; publish to it with its own engine until \
         a later release does"
    )]
    FormatVersion(u64),
    #[error("it is encrypted ({0}), and its files cannot be checked; publish to it with its own engine")]
    Encrypted(String),
    #[error("'{0}' is missing")]
    Missing(&'static str),
    #[error("'{key}' cannot be read: {message}")]
    Field { key: String, message: String },
    #[error("snapshot {0} is in the table already; stage it again under a new id")]
    SnapshotExists(SnapshotId),
    #[error(
        "snapshot {snapshot} has sequence number {sequence_number}, and the table is at {last} already; \
         stage it again on the table as it is now"
    )]
    StaleSequenceNumber { snapshot: SnapshotId, sequence_number: i64, last: i64 },
    /// Rule N2: row ids follow one another without gaps.
    #[error(
        "snapshot {snapshot} gives out row ids from {first_row_id} on, and the table is at {next}; stage it \
         again on the table as it is now"
    )]
    WrongRowIds { snapshot: SnapshotId, first_row_id: i64, next: i64 },
    #[error(
        "snapshot {snapshot} was made for another format version than the table's {version}; stage it again \
         on the table as it is now"
    )]
    OtherFormat { snapshot: SnapshotId, version: u8 },
    #[error("the parent {parent} of snapshot {snapshot} is not in the table; stage it again")]
    UnknownParent { snapshot: SnapshotId, parent: SnapshotId },
    #[error("ref '{name}' cannot be set to {snapshot}: the table has no such snapshot")]
    UnknownSnapshot { name: RefName, snapshot: SnapshotId },
    #[error("ref '{0}' would change from branch to tag or back; remove it first")]
    RefKind(RefName),
    #[error("ref '{0}' has a retention of zero or less, which other engines cannot read")]
    Retention(RefName),
}

/// A metadata document. Immutable; a commit makes a new one with [`Document::apply`].
#[derive(Clone, Debug)]
pub struct Document {
    members: Vec<(String, Part)>,
    snapshots: Arc<Vec<Element>>,
    snapshot_log: Arc<Vec<Element>>,
}

/// What stands at a member's place.
#[derive(Clone, Debug)]
enum Part {
    Raw(Arc<str>),
    Snapshots,
    SnapshotLog,
}

/// One array element and the snapshot that it is about.
#[derive(Clone, Debug)]
pub(super) struct Element {
    pub snapshot: SnapshotId,
    pub text: Arc<str>,
}

/// What every element of `snapshots`, `snapshot-log` and the statistics arrays has.
#[derive(Deserialize)]
struct SnapshotIdOnly {
    #[serde(rename = "snapshot-id")]
    snapshot_id: i64,
}

impl Document {
    /// Parses uncompressed metadata. The format version is looked at before anything else.
    pub fn parse(json: &[u8]) -> Result<Self, DocumentError> {
        let text = std::str::from_utf8(json).map_err(|e| DocumentError::NotADocument(e.to_string()))?;
        let object = RawObject::parse(text).map_err(|e| DocumentError::NotADocument(e.to_string()))?;
        let version: u64 = match object.get("format-version") {
            Some(raw) => decode("format-version", raw)?,
            None => return Err(DocumentError::Missing("format-version")),
        };
        if version == 1 {
            return Err(DocumentError::FormatVersion1);
        }
        if !SUPPORTED_FORMAT_VERSIONS.contains(&version) {
            return Err(DocumentError::FormatVersion(version));
        }
        let mut document =
            Self { members: Vec::new(), snapshots: Arc::default(), snapshot_log: Arc::default() };
        for (key, value) in object.into_members() {
            let part = match key.as_str() {
                SNAPSHOTS => {
                    document.snapshots = Arc::new(split(&key, &value)?);
                    Part::Snapshots
                }
                SNAPSHOT_LOG => {
                    document.snapshot_log = Arc::new(split(&key, &value)?);
                    Part::SnapshotLog
                }
                _ => Part::Raw(value),
            };
            document.members.push((key, part));
        }
        // Both arrays need a place to be written to; an absent one means an empty one.
        for (key, part) in [(SNAPSHOTS, Part::Snapshots), (SNAPSHOT_LOG, Part::SnapshotLog)] {
            if !document.members.iter().any(|(k, _)| k == key) {
                document.members.push((key.to_owned(), part));
            }
        }
        Ok(document)
    }

    /// A smaller document for a reader that checks a commit: every member as it is, but only these
    /// snapshots, these refs, and the end of the snapshot log with the entry before it.
    pub(super) fn excerpt(
        &self,
        snapshots: &BTreeSet<SnapshotId>,
        refs: &[&RefName],
    ) -> Result<Vec<u8>, DocumentError> {
        let kept = self.snapshots.iter().filter(|element| snapshots.contains(&element.snapshot)).cloned();
        let log = &self.snapshot_log;
        let mut excerpt = Self {
            members: self.members.clone(),
            snapshots: Arc::new(kept.collect()),
            snapshot_log: Arc::new(log[log.len().saturating_sub(2)..].to_vec()),
        };
        if let Some(raw) = self.raw(REFS) {
            let all = RawObject::parse(raw)
                .map_err(|e| DocumentError::Field { key: REFS.to_owned(), message: e.to_string() })?;
            let names: BTreeSet<&str> = refs.iter().map(|name| name.as_str()).collect();
            excerpt.set(REFS, all.only(|name| names.contains(name)).to_text());
        }
        Ok(excerpt.to_bytes())
    }

    /// The document as JSON, compact between members.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut length = 2;
        for (key, part) in &self.members {
            length += key.len() + 4;
            length += match part {
                Part::Raw(text) => text.len(),
                Part::Snapshots => text_length(&self.snapshots),
                Part::SnapshotLog => text_length(&self.snapshot_log),
            };
        }
        let mut out = String::with_capacity(length);
        out.push('{');
        for (at, (key, part)) in self.members.iter().enumerate() {
            if at > 0 {
                out.push(',');
            }
            out.push_str(&quote(key));
            out.push(':');
            match part {
                Part::Raw(text) => out.push_str(text),
                Part::Snapshots => push_array(&mut out, self.snapshots.iter().map(|e| e.text.as_ref())),
                Part::SnapshotLog => push_array(&mut out, self.snapshot_log.iter().map(|e| e.text.as_ref())),
            }
        }
        out.push('}');
        out.into_bytes()
    }

    /// Does `metadata-log` name this file as one before this document?
    pub(super) fn names_older_file(&self, location: &str) -> bool {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Entry {
            metadata_file: String,
        }
        let log: Option<Vec<Entry>> = self.optional(METADATA_LOG).unwrap_or_default();
        log.is_some_and(|entries| entries.iter().any(|entry| entry.metadata_file == location))
    }

    /// The raw JSON of a top-level member other than the two long arrays; null counts as absent.
    pub(super) fn raw(&self, key: &str) -> Option<&str> {
        match self.members.iter().find(|(k, _)| k == key) {
            Some((_, Part::Raw(text))) if text.as_ref() != "null" => Some(text),
            Some((_, Part::Raw(_) | Part::Snapshots | Part::SnapshotLog)) | None => None,
        }
    }

    /// The elements of `snapshots`, in the order of the file.
    pub(super) fn snapshots(&self) -> &[Element] {
        &self.snapshots
    }

    /// The elements of `snapshot-log`, oldest first.
    pub(super) fn snapshot_log(&self) -> &[Element] {
        &self.snapshot_log
    }

    /// A required member, decoded.
    pub(super) fn required<T: DeserializeOwned>(&self, key: &'static str) -> Result<T, DocumentError> {
        self.optional(key)?.ok_or(DocumentError::Missing(key))
    }

    /// An optional member, decoded.
    pub(super) fn optional<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, DocumentError> {
        match self.raw(key) {
            Some(raw) => decode(key, raw).map(Some),
            None => Ok(None),
        }
    }

    /// `next-row-id`, where the format has it.
    pub(super) fn next_row_id(&self, format_version: u8) -> Result<Option<i64>, DocumentError> {
        if format_version < ROW_LINEAGE {
            return Ok(None);
        }
        let next: u64 = self.required(NEXT_ROW_ID)?;
        let message = || format!("{next} is out of range");
        let field = |_| DocumentError::Field { key: NEXT_ROW_ID.to_owned(), message: message() };
        i64::try_from(next).map(Some).map_err(field)
    }

    /// Sets a top-level member in its place, or appends it. Not for the two long arrays.
    pub(super) fn set(&mut self, key: &str, json: String) {
        let part = Part::Raw(Arc::from(json));
        match self.members.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = part,
            None => self.members.push((key.to_owned(), part)),
        }
    }
}

fn text_length(elements: &[Element]) -> usize {
    elements.iter().map(|element| element.text.len() + 1).sum::<usize>() + 2
}

fn decode<T: DeserializeOwned>(key: &str, raw: &str) -> Result<T, DocumentError> {
    serde_json::from_str(raw)
        .map_err(|e| DocumentError::Field { key: key.to_owned(), message: e.to_string() })
}

fn split(key: &str, raw: &str) -> Result<Vec<Element>, DocumentError> {
    if raw == "null" {
        return Ok(Vec::new());
    }
    let field = |e: serde_json::Error| DocumentError::Field { key: key.to_owned(), message: e.to_string() };
    let texts = raw::elements(raw).map_err(field)?;
    let mut elements = Vec::with_capacity(texts.len());
    for text in texts {
        let id: SnapshotIdOnly = serde_json::from_str(text).map_err(field)?;
        elements.push(Element { snapshot: SnapshotId(id.snapshot_id), text: Arc::from(text) });
    }
    Ok(elements)
}
