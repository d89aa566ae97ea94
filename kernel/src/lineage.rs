//! The snapshot graph: ancestry, merge base, and whether an empty base is proved.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use foldhash::fast::RandomState;
use serde::{Deserialize, Serialize};

use crate::ids::{SchemaId, SnapshotId};

/// Summary key that cherry-picks carry (Java: `SnapshotSummary.SOURCE_SNAPSHOT_ID_PROP`).
pub const SOURCE_SNAPSHOT_ID: &str = "source-snapshot-id";
/// Summary key of a staged write (Java: `SnapshotSummary.STAGED_WAP_ID_PROP`).
pub const WAP_ID: &str = "wap.id";
/// Summary key of a published staged write (Java: `SnapshotSummary.PUBLISHED_WAP_ID_PROP`).
pub const PUBLISHED_WAP_ID: &str = "published-wap-id";

/// A snapshot as the metadata lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotFact {
    pub id: SnapshotId,
    pub parent: Option<SnapshotId>,
    pub sequence_number: i64,
    pub timestamp_ms: i64,
    pub schema_id: Option<SchemaId>,
    pub manifest_list: String,
    /// `operation` of the summary: a hint only (design, promise 5).
    pub label: String,
    /// The other keys of the summary. Hostile input (rule S1).
    pub summary: BTreeMap<String, String>,
}

impl SnapshotFact {
    /// The snapshot that this one republishes, when the summary says so in one decimal long (rule D7).
    pub fn source_snapshot_id(&self) -> Option<SnapshotId> {
        self.summary.get(SOURCE_SNAPSHOT_ID)?.parse().ok().map(SnapshotId)
    }
}

/// Why walking the parents ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainEnd {
    /// A snapshot without parent id: the first of its line.
    Root,
    /// This parent is named but no longer in the metadata: expired.
    Cut(SnapshotId),
}

/// A head and its ancestors, newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    pub ids: Vec<SnapshotId>,
    pub end: ChainEnd,
}

/// Snapshots by id. Thousands are looked up for every train, so the hash is a quick one.
type ById<V> = HashMap<SnapshotId, V, RandomState>;

/// The ancestry of one head, ready for look-ups.
#[derive(Clone, Debug, Default)]
pub struct Line {
    set: HashSet<SnapshotId, RandomState>,
    chain: Option<Chain>,
}

impl Line {
    pub fn contains(&self, id: SnapshotId) -> bool {
        self.set.contains(&id)
    }

    /// Newest first; empty without a head.
    pub fn ids(&self) -> &[SnapshotId] {
        self.chain.as_ref().map_or(&[], |chain| &chain.ids)
    }

    /// Snapshots after `base`, oldest first; `None` when `base` is not in the line. `base = None` is the empty
    /// base: of a line that was cut nobody knows what came before.
    pub fn after(&self, base: Option<SnapshotId>) -> Option<Vec<SnapshotId>> {
        let ids = self.ids();
        let end = match base {
            Some(base) => ids.iter().position(|id| *id == base)?,
            None if self.chain.as_ref().is_some_and(|chain| chain.end != ChainEnd::Root) => return None,
            None => ids.len(),
        };
        Some(ids[..end].iter().rev().copied().collect())
    }
}

/// How source and target relate in the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BaseFinding {
    /// The newest common ancestor.
    Common(SnapshotId),
    /// Neither side had a snapshot when the source began, and this is proved (rule C8).
    Empty,
    /// An ancestor of `of` was expired before a common one was reached.
    Expired { of: Side, missing: SnapshotId },
    /// Both lines are complete and share nothing.
    Unrelated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    Source,
    Target,
}

/// All snapshots of a table by id. A clone costs one reference count; the first change of a clone copies
/// the map of pointers, never the snapshots: a commit on a table of thousands of snapshots stays cheap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotGraph {
    by_id: Arc<ById<Arc<SnapshotFact>>>,
}

impl SnapshotGraph {
    pub fn new(snapshots: impl IntoIterator<Item = SnapshotFact>) -> Self {
        Self { by_id: Arc::new(snapshots.into_iter().map(|s| (s.id, Arc::new(s))).collect()) }
    }

    pub fn get(&self, id: SnapshotId) -> Option<&SnapshotFact> {
        self.by_id.get(&id).map(Arc::as_ref)
    }

    pub fn contains(&self, id: SnapshotId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &SnapshotFact> {
        self.by_id.values().map(Arc::as_ref)
    }

    pub fn insert(&mut self, snapshot: SnapshotFact) {
        Arc::make_mut(&mut self.by_id).insert(snapshot.id, Arc::new(snapshot));
    }

    pub fn remove(&mut self, id: SnapshotId) {
        Arc::make_mut(&mut self.by_id).remove(&id);
    }

    /// `head` and its ancestors, newest first. A head that is not in the graph gives an empty, cut chain.
    pub fn chain(&self, head: SnapshotId) -> Chain {
        let mut ids = Vec::new();
        let mut next = head;
        loop {
            let Some(snapshot) = self.by_id.get(&next) else {
                return Chain { ids, end: ChainEnd::Cut(next) };
            };
            // A cycle cannot come from a valid table; a damaged one must not hang the queue.
            if ids.len() >= self.by_id.len() {
                return without_repetition(ids, next);
            }
            ids.push(next);
            match snapshot.parent {
                Some(parent) => next = parent,
                None => return Chain { ids, end: ChainEnd::Root },
            }
        }
    }

    /// Is `ancestor` equal to `head` or one of its ancestors?
    pub fn is_ancestor(&self, ancestor: SnapshotId, head: SnapshotId) -> bool {
        let mut next = Some(head);
        let mut steps = 0;
        while let Some(id) = next {
            if id == ancestor {
                return true;
            }
            steps += 1;
            if steps > self.by_id.len() {
                return false;
            }
            next = self.by_id.get(&id).and_then(|s| s.parent);
        }
        false
    }

    /// Snapshots after `base` up to and with `head`, oldest first. `base = None` is the empty base.
    /// `None` when `base` is not an ancestor of `head`. Walks no further than the base: a table of thousands
    /// of snapshots is asked this for every request.
    pub fn after(&self, base: Option<SnapshotId>, head: SnapshotId) -> Option<Vec<SnapshotId>> {
        let mut ids = Vec::new();
        let mut next = head;
        while Some(next) != base {
            let snapshot = self.by_id.get(&next)?;
            // As in `chain`: a cycle must not hang the queue.
            if ids.len() >= self.by_id.len() {
                return None;
            }
            ids.push(next);
            match snapshot.parent {
                Some(parent) => next = parent,
                None if base.is_none() => break,
                None => return None,
            }
        }
        // A base that was expired is no snapshot of the line any more.
        if base.is_some_and(|base| !self.by_id.contains_key(&base)) {
            return None;
        }
        ids.reverse();
        Some(ids)
    }

    /// `head` with its ancestors as a set, for many look-ups. `None` gives the empty line.
    pub fn line(&self, head: Option<SnapshotId>) -> Line {
        match head {
            Some(head) => {
                let chain = self.chain(head);
                Line { set: chain.ids.iter().copied().collect(), chain: Some(chain) }
            }
            None => Line::default(),
        }
    }

    /// The newest common ancestor of `source` and the target's line.
    ///
    /// `log` is the table's snapshot log; it serves to prove an empty base (rule C8): both lines go back
    /// to a root, every logged head is in the target's ancestry (nothing was replaced), and the target's
    /// first head is no older than the source's root.
    pub fn base(&self, source: SnapshotId, target: &Line, log: &[(SnapshotId, i64)]) -> BaseFinding {
        let mut next = source;
        let mut steps = 0;
        let root = loop {
            if target.contains(next) {
                return BaseFinding::Common(next);
            }
            steps += 1;
            let snapshot = match self.by_id.get(&next) {
                // A cycle cannot come from a valid table; a damaged one must not hang the queue.
                Some(snapshot) if steps <= self.by_id.len() => snapshot,
                _ => return BaseFinding::Expired { of: Side::Source, missing: next },
            };
            match snapshot.parent {
                Some(parent) => next = parent,
                None => break snapshot,
            }
        };
        let Some(chain) = &target.chain else {
            return if log.is_empty() { BaseFinding::Empty } else { BaseFinding::Unrelated };
        };
        if let ChainEnd::Cut(missing) = chain.end {
            return BaseFinding::Expired { of: Side::Target, missing };
        }
        match log.first() {
            Some((_, first_ms))
                if *first_ms >= root.timestamp_ms && log.iter().all(|(id, _)| target.contains(*id)) =>
            {
                BaseFinding::Empty
            }
            _ => BaseFinding::Unrelated,
        }
    }

    /// Every snapshot that the line of `head` republished, directly or through other branches: the
    /// transitive closure over `source-snapshot-id` (rule C9), with the publishing snapshot.
    pub fn published_by(&self, head: SnapshotId) -> HashMap<SnapshotId, SnapshotId> {
        let mut published = HashMap::new();
        for id in self.chain(head).ids {
            let mut next = self.get(id).and_then(SnapshotFact::source_snapshot_id);
            while let Some(source) = next {
                if published.insert(source, id).is_some() {
                    break;
                }
                next = self.get(source).and_then(SnapshotFact::source_snapshot_id);
            }
        }
        published
    }
}

/// The chain that walked in a circle, up to the first snapshot that it came back to.
fn without_repetition(walked: Vec<SnapshotId>, next: SnapshotId) -> Chain {
    let mut seen = HashSet::new();
    let mut rest = walked.into_iter().chain([next]);
    let mut ids = Vec::new();
    let back_at = rest.find(|id| {
        let is_new = seen.insert(*id);
        if is_new {
            ids.push(*id);
        }
        !is_new
    });
    Chain { ids, end: ChainEnd::Cut(back_at.unwrap_or(next)) }
}
