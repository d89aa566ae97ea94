//! Applying a commit's updates to a document, as Java's `TableMetadata.Builder` does, with the facts of
//! the result derived from the old ones instead of parsed again.

use std::collections::HashSet;
use std::sync::Arc;

use mergeberg_kernel::commit::{NewSnapshot, RowRange, Update};
use mergeberg_kernel::facts::{LogEntry, RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SnapshotId};
use serde_json::{Map, Value, json};

use super::raw::{RawObject, array, elements, quote};
use super::{Document, DocumentError, Element, METADATA_LOG, NEXT_ROW_ID, NO_SNAPSHOT, REFS, SnapshotIdOnly};

const PROPERTIES: &str = "properties";

/// How many older metadata files `metadata-log` names (Java: `METADATA_PREVIOUS_VERSIONS_MAX`).
const PREVIOUS_VERSIONS_MAX: &str = "write.metadata.previous-versions-max";
const PREVIOUS_VERSIONS_MAX_DEFAULT: i64 = 100;

/// A document after a commit, and its facts.
#[derive(Clone, Debug)]
pub struct Applied {
    pub document: Document,
    pub facts: TableFacts,
}

impl Document {
    /// The document after `updates`, in their order. `facts` are this document's, `location` is the file
    /// it stands in, and `now_ms` is the landing time in milliseconds since the epoch.
    pub fn apply(
        &self,
        facts: &TableFacts,
        location: &str,
        updates: &[Update],
        now_ms: i64,
    ) -> Result<Applied, DocumentError> {
        let mut edit = Edit::on(self, facts)?;
        for update in updates {
            match update {
                Update::AddSnapshot(snapshot) => edit.add_snapshot(snapshot)?,
                Update::SetRef(reference) => edit.set_ref(reference)?,
                Update::RemoveRef(name) => edit.remove_ref(name),
                Update::RemoveSnapshots(ids) => edit.remove_snapshots(ids)?,
                Update::SetProperties(values) => {
                    for (key, value) in values {
                        edit.properties.set(key, quote(value));
                        edit.facts.properties.insert(key.clone(), value.clone());
                    }
                    edit.properties_changed = true;
                }
                Update::RemoveProperties(keys) => {
                    for key in keys {
                        edit.properties.remove(key);
                        edit.facts.properties.remove(key);
                    }
                    edit.properties_changed = true;
                }
            }
        }
        edit.finish(location, now_ms)
    }
}

/// A commit in progress.
struct Edit {
    document: Document,
    facts: TableFacts,
    refs: RawObject,
    refs_changed: bool,
    properties: RawObject,
    properties_changed: bool,
    /// The head of `main` that the snapshot log ends with.
    logged_main: Option<SnapshotId>,
    newest_added_ms: i64,
    snapshots_removed: bool,
    last_updated_before_ms: i64,
}

impl Edit {
    fn on(document: &Document, facts: &TableFacts) -> Result<Self, DocumentError> {
        let object = |key: &str| match document.raw(key) {
            Some(raw) => RawObject::parse(raw)
                .map_err(|e| DocumentError::Field { key: key.to_owned(), message: e.to_string() }),
            None => Ok(RawObject::default()),
        };
        let main = facts.refs.get(&RefName::main());
        let mut edit = Self {
            document: document.clone(),
            facts: facts.clone(),
            refs: object(REFS)?,
            refs_changed: false,
            properties: object(PROPERTIES)?,
            properties_changed: false,
            logged_main: main.map(|r| r.snapshot_id),
            newest_added_ms: i64::MIN,
            snapshots_removed: false,
            last_updated_before_ms: facts.last_updated_ms,
        };
        // Files without a `main` ref imply it by their current snapshot. Once any ref is written it has to
        // be written too, or readers that take `refs` at its word would see a table without `main`.
        if let Some(main) = main
            && edit.refs.get(main.name.as_str()).is_none()
        {
            edit.write_ref(main)?;
        }
        Ok(edit)
    }

    fn add_snapshot(&mut self, new: &NewSnapshot) -> Result<(), DocumentError> {
        if self.facts.snapshots.contains(new.id) {
            return Err(DocumentError::SnapshotExists(new.id));
        }
        // Rule N1. Java skips this check for a snapshot without parent, which lets a first publish reuse a
        // number that branch writers took.
        if new.sequence_number <= self.facts.last_sequence_number {
            return Err(DocumentError::StaleSequenceNumber {
                snapshot: new.id,
                sequence_number: new.sequence_number,
                last: self.facts.last_sequence_number,
            });
        }
        if let Some(parent) = new.parent
            && !self.facts.snapshots.contains(parent)
        {
            return Err(DocumentError::UnknownParent { snapshot: new.id, parent });
        }
        self.take_row_ids(new)?;
        Arc::make_mut(&mut self.document.snapshots)
            .push(Element { snapshot: new.id, text: Arc::from(snapshot_value(new).to_string()) });
        self.facts.snapshots.insert(new.fact());
        self.facts.last_sequence_number = new.sequence_number;
        self.newest_added_ms = self.newest_added_ms.max(new.timestamp_ms);
        Ok(())
    }

    /// Rule N2. A gap does no harm by itself, but says that the snapshot was planned on another table.
    fn take_row_ids(&mut self, new: &NewSnapshot) -> Result<(), DocumentError> {
        match (self.facts.next_row_id, new.row_range) {
            (None, None) => Ok(()),
            (Some(next), Some(range)) => {
                let wrong = || DocumentError::WrongRowIds {
                    snapshot: new.id,
                    first_row_id: range.first_row_id,
                    next,
                };
                if range.first_row_id != next || range.added_rows < 0 {
                    return Err(wrong());
                }
                self.facts.next_row_id = Some(range.end().ok_or_else(wrong)?);
                Ok(())
            }
            (None, Some(_)) | (Some(_), None) => {
                Err(DocumentError::OtherFormat { snapshot: new.id, version: self.facts.format_version })
            }
        }
    }

    fn set_ref(&mut self, new: &RefFact) -> Result<(), DocumentError> {
        if !self.facts.snapshots.contains(new.snapshot_id) {
            return Err(DocumentError::UnknownSnapshot { name: new.name.clone(), snapshot: new.snapshot_id });
        }
        let changes_kind =
            self.facts.refs.get(&new.name).is_some_and(|old| old.is_branch() != new.is_branch());
        if changes_kind || (new.name == RefName::main() && !new.is_branch()) {
            return Err(DocumentError::RefKind(new.name.clone()));
        }
        self.write_ref(new)?;
        self.facts.refs.insert(new.name.clone(), new.clone());
        Ok(())
    }

    /// Writes a ref over what stands there: the fields that we know are as given (absent retention is
    /// removed, rule R4), fields that we do not know stay.
    fn write_ref(&mut self, new: &RefFact) -> Result<(), DocumentError> {
        let name = new.name.as_str();
        let mut object = match self.refs.get(name) {
            Some(raw) => RawObject::parse(raw)
                .map_err(|e| DocumentError::Field { key: format!("refs.{name}"), message: e.to_string() })?,
            None => RawObject::default(),
        };
        object.set("snapshot-id", new.snapshot_id.to_string());
        let (kind, min_snapshots, max_snapshot_age) = match new.kind {
            RefKind::Branch { min_snapshots_to_keep, max_snapshot_age_ms } => {
                ("branch", min_snapshots_to_keep.map(i64::from), max_snapshot_age_ms)
            }
            RefKind::Tag => ("tag", None, None),
        };
        object.set("type", quote(kind));
        for (key, value) in [
            ("min-snapshots-to-keep", min_snapshots),
            ("max-snapshot-age-ms", max_snapshot_age),
            ("max-ref-age-ms", new.max_ref_age_ms),
        ] {
            match value {
                // Java refuses to load a table with such a ref.
                Some(value) if value <= 0 => return Err(DocumentError::Retention(new.name.clone())),
                Some(value) => object.set(key, value.to_string()),
                None => object.remove(key),
            }
        }
        self.refs.set(name, object.to_text());
        self.refs_changed = true;
        Ok(())
    }

    /// Removing a ref that is not there changes nothing, as in the REST specification.
    fn remove_ref(&mut self, name: &RefName) {
        if self.facts.refs.remove(name).is_none() {
            return;
        }
        self.refs.remove(name.as_str());
        self.refs_changed = true;
        if *name == RefName::main() {
            self.cut_log(self.facts.snapshot_log.len());
            self.logged_main = None;
        }
    }

    fn remove_snapshots(&mut self, ids: &[SnapshotId]) -> Result<(), DocumentError> {
        let gone: HashSet<SnapshotId> =
            ids.iter().copied().filter(|id| self.facts.snapshots.contains(*id)).collect();
        if gone.is_empty() {
            return Ok(());
        }
        self.snapshots_removed = true;
        Arc::make_mut(&mut self.document.snapshots).retain(|element| !gone.contains(&element.snapshot));
        for id in &gone {
            self.facts.snapshots.remove(*id);
        }
        for key in ["statistics", "partition-statistics"] {
            self.remove_statistics(key, &gone)?;
        }
        let dangling: Vec<RefName> = self
            .facts
            .refs
            .values()
            .filter(|reference| gone.contains(&reference.snapshot_id))
            .map(|reference| reference.name.clone())
            .collect();
        for name in &dangling {
            self.remove_ref(name);
        }
        Ok(())
    }

    fn remove_statistics(&mut self, key: &str, gone: &HashSet<SnapshotId>) -> Result<(), DocumentError> {
        let Some(raw) = self.document.raw(key) else { return Ok(()) };
        let all = elements(raw)
            .map_err(|e| DocumentError::Field { key: key.to_owned(), message: e.to_string() })?;
        let kept: Vec<&str> = all
            .iter()
            .copied()
            .filter(|text| match serde_json::from_str::<SnapshotIdOnly>(text) {
                Ok(id) => !gone.contains(&SnapshotId(id.snapshot_id)),
                Err(_) => true,
            })
            .collect();
        if kept.len() < all.len() {
            let json = array(kept.into_iter());
            self.document.set(key, json);
        }
        Ok(())
    }

    /// Drops the first `count` entries of the snapshot log.
    fn cut_log(&mut self, count: usize) {
        if count > 0 {
            Arc::make_mut(&mut self.document.snapshot_log).drain(..count);
            self.facts.snapshot_log.drain(..count);
        }
    }

    fn finish(mut self, location: &str, now_ms: i64) -> Result<Applied, DocumentError> {
        // Rule N3. Added snapshots carry their staging time plus one millisecond for each car, which can
        // be ahead of the clock.
        let updated_ms = now_ms.max(self.last_updated_before_ms.saturating_add(1)).max(self.newest_added_ms);
        self.facts.last_updated_ms = updated_ms;

        // One entry for the head that this commit leaves, whatever `main` passed through (rule N6).
        let main = self.facts.head(&RefName::main());
        if let Some(head) = main
            && self.logged_main != Some(head)
        {
            let entry = json!({"timestamp-ms": updated_ms, "snapshot-id": head.0}).to_string();
            Arc::make_mut(&mut self.document.snapshot_log)
                .push(Element { snapshot: head, text: Arc::from(entry) });
            self.facts.snapshot_log.push(LogEntry { snapshot_id: head, timestamp_ms: updated_ms });
        }
        // Entries before a removed snapshot go with it: what is left would claim that an older head was
        // current while the removed one was (Java: `updateSnapshotLog`).
        if self.snapshots_removed {
            let snapshots = &self.facts.snapshots;
            let last_gone =
                self.facts.snapshot_log.iter().rposition(|entry| !snapshots.contains(entry.snapshot_id));
            self.cut_log(last_gone.map_or(0, |at| at + 1));
        }

        let main_id = main.map_or(NO_SNAPSHOT, |head| head.0);
        let written: Option<i64> = self.document.optional("current-snapshot-id")?;
        if written.unwrap_or(NO_SNAPSHOT) != main_id {
            self.document.set("current-snapshot-id", main_id.to_string());
        }
        if self.refs_changed {
            self.document.set(REFS, self.refs.to_text());
        }
        if self.properties_changed {
            self.document.set(PROPERTIES, self.properties.to_text());
        }
        self.document.set("last-sequence-number", self.facts.last_sequence_number.to_string());
        self.document.set("last-updated-ms", updated_ms.to_string());
        if let Some(next) = self.facts.next_row_id {
            self.document.set(NEXT_ROW_ID, next.to_string());
        }
        self.log_previous_file(location)?;
        Ok(Applied { document: self.document, facts: self.facts })
    }

    fn log_previous_file(&mut self, location: &str) -> Result<(), DocumentError> {
        let max = self.facts.property_i64(PREVIOUS_VERSIONS_MAX, PREVIOUS_VERSIONS_MAX_DEFAULT).max(1);
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let entry =
            json!({"timestamp-ms": self.last_updated_before_ms, "metadata-file": location}).to_string();
        let old = match self.document.raw(METADATA_LOG) {
            Some(raw) => elements(raw)
                .map_err(|e| DocumentError::Field { key: METADATA_LOG.to_owned(), message: e.to_string() })?,
            None => Vec::new(),
        };
        let surplus = (old.len() + 1).saturating_sub(max);
        let json = array(old.into_iter().skip(surplus).chain([entry.as_str()]));
        self.document.set(METADATA_LOG, json);
        Ok(())
    }
}

/// A snapshot as Java's `SnapshotParser` writes it: `operation` leads the summary.
pub(in crate::table) fn snapshot_value(new: &NewSnapshot) -> Value {
    let NewSnapshot {
        id,
        parent,
        sequence_number,
        timestamp_ms,
        manifest_list,
        schema_id,
        label,
        summary,
        row_range,
    } = new;
    let mut pairs = Map::new();
    pairs.insert("operation".to_owned(), Value::from(label.as_str()));
    for (key, value) in summary {
        if key != "operation" {
            pairs.insert(key.clone(), Value::from(value.as_str()));
        }
    }
    let mut object = Map::new();
    object.insert("sequence-number".to_owned(), Value::from(*sequence_number));
    object.insert("snapshot-id".to_owned(), Value::from(id.0));
    if let Some(parent) = parent {
        object.insert("parent-snapshot-id".to_owned(), Value::from(parent.0));
    }
    object.insert("timestamp-ms".to_owned(), Value::from(*timestamp_ms));
    object.insert("summary".to_owned(), Value::Object(pairs));
    object.insert("manifest-list".to_owned(), Value::from(manifest_list.as_str()));
    object.insert("schema-id".to_owned(), Value::from(schema_id.0));
    if let Some(RowRange { first_row_id, added_rows }) = row_range {
        object.insert("first-row-id".to_owned(), Value::from(*first_row_id));
        object.insert("added-rows".to_owned(), Value::from(*added_rows));
    }
    Value::Object(object)
}
