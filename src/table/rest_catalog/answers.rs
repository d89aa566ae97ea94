//! What an answer to a commit means, judged by the table as it is read after it: status codes lie
//! (cases O24, O26, rule N5).

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::facts::{RefFact, TableFacts};
use mergeberg_kernel::ids::RefName;

use super::super::catalog::{CatalogError, CommitOutcome, first_failed};
use super::super::document::DocumentError;
use super::super::loaded::LoadedTable;

/// A commit as it was sent.
#[derive(Clone, Copy)]
pub(super) struct Sent<'a> {
    pub base: &'a LoadedTable,
    pub requirements: &'a [Requirement],
    pub updates: &'a [Update],
}

/// The kind of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// 409.
    Conflict,
    /// Another 4xx.
    Invalid,
}

/// What a refusal means. `current` is the table as read after it, `told` the server's words.
pub(super) fn of_refusal(
    sent: Sent<'_>,
    refusal: Refusal,
    current: &Arc<LoadedTable>,
    told: &str,
    now_ms: i64,
) -> CommitOutcome {
    // A proxy may have sent it twice: then this answer is to the second, and the first was applied.
    match own_snapshots(&current.facts, sent.updates) {
        Own::All if difference(&current.facts, sent.updates).is_none() => {
            return CommitOutcome::Landed(Arc::clone(current));
        }
        Own::All | Own::Some => {
            return CommitOutcome::Unknown(format!("{told}, but the table has snapshots of this commit"));
        }
        Own::None => {}
    }
    if let Some(failed) = first_failed(&current.facts, sent.requirements) {
        return CommitOutcome::of_failed(failed);
    }
    match current.document.apply(&current.facts, &current.metadata_location, sent.updates, now_ms) {
        Ok(_) => {}
        // Another branch took the numbers since the candidates were made.
        Err(
            error @ (DocumentError::StaleSequenceNumber { .. }
            | DocumentError::WrongRowIds { .. }
            | DocumentError::OtherFormat { .. }),
        ) => return CommitOutcome::TableChanged(error.to_string()),
        Err(error) => return CommitOutcome::Refused(CatalogError::Refused(format!("{error} ({told})"))),
    }
    match refusal {
        Refusal::Conflict if current.metadata_location != sent.base.metadata_location => {
            CommitOutcome::PointerMoved
        }
        Refusal::Conflict => {
            let required = sent.requirements.iter().map(in_words).collect::<Vec<_>>().join(", ");
            CommitOutcome::Unexplained(format!(
                "the catalog reports a conflict ({told}), but all that was required holds: {required}"
            ))
        }
        Refusal::Invalid => CommitOutcome::Refused(CatalogError::Refused(told.to_owned())),
    }
}

/// What of the updates a table does not show, although the catalog says that they were applied.
pub(super) fn difference(facts: &TableFacts, updates: &[Update]) -> Option<String> {
    let mut refs: BTreeMap<&RefName, Option<&RefFact>> = BTreeMap::new();
    for update in updates {
        match update {
            Update::AddSnapshot(new) => match facts.snapshots.get(new.id) {
                None => return Some(format!("snapshot {} is not in the table", new.id)),
                // Rule N1: servers do not check the number of a snapshot without parent.
                Some(added) if new.parent.is_none() => {
                    let same = |s: &&mergeberg_kernel::lineage::SnapshotFact| {
                        s.id != added.id && s.sequence_number == added.sequence_number
                    };
                    if let Some(other) = facts.snapshots.iter().find(same) {
                        return Some(format!(
                            "snapshots {} and {} have the sequence number {}",
                            added.id, other.id, added.sequence_number
                        ));
                    }
                }
                Some(_) => {}
            },
            Update::SetRef(reference) => {
                refs.insert(&reference.name, Some(reference));
            }
            Update::RemoveRef(name) => {
                refs.insert(name, None);
            }
            Update::RemoveSnapshots(ids) => {
                if let Some(id) = ids.iter().find(|id| facts.snapshots.contains(**id)) {
                    return Some(format!("snapshot {id} is still in the table"));
                }
            }
            // A catalog may have rules of its own for properties; who depends on one reads it.
            Update::SetProperties(_) | Update::RemoveProperties(_) => {}
        }
    }
    for (name, wanted) in refs {
        let found = facts.refs.get(name);
        match (wanted, found) {
            (None, None) => {}
            (None, Some(_)) => return Some(format!("ref '{name}' is still there")),
            (Some(wanted), Some(found)) if found.snapshot_id == wanted.snapshot_id => {
                if found != wanted {
                    // Rule R4.
                    tracing::warn!(table = %facts.name, "the catalog gave ref '{name}' another retention");
                }
            }
            (Some(wanted), _) => return Some(format!("ref '{name}' is not at {}", wanted.snapshot_id)),
        }
    }
    None
}

/// How many of a commit's snapshots a table has. Their ids are random and never used twice.
enum Own {
    None,
    Some,
    All,
}

fn own_snapshots(facts: &TableFacts, updates: &[Update]) -> Own {
    let ids = updates.iter().filter_map(|update| match update {
        Update::AddSnapshot(new) => Some(new.id),
        _ => None,
    });
    let (mut there, mut missing) = (false, false);
    for id in ids {
        if facts.snapshots.contains(id) { there = true } else { missing = true }
    }
    match (there, missing) {
        (false, _) => Own::None,
        (true, true) => Own::Some,
        (true, false) => Own::All,
    }
}

fn in_words(requirement: &Requirement) -> String {
    match requirement {
        Requirement::TableUuid(uuid) => format!("uuid {uuid}"),
        Requirement::RefAt { name, at: Some(at), role: _ } => format!("'{name}' at {at}"),
        Requirement::RefAt { name, at: None, role: _ } => format!("no ref '{name}'"),
        Requirement::CurrentSchema(id) => format!("schema {id}"),
        Requirement::DefaultSpec(id) => format!("spec {id}"),
        Requirement::DefaultSortOrder(id) => format!("sort order {id}"),
    }
}
