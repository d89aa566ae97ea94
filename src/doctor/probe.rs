//! Trying a catalog out: the commits that a landing consists of, and those that must be refused, on a scratch
//! table. What a server says is not believed: after each commit the table is read again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch};
use mergeberg_kernel::commit::{NewSnapshot, RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName, TableUuid};
use serde::Serialize;

use super::keys::keys;
use super::several::several;
use super::{Found, How};
use crate::table::branch_writer::{BranchWrite, BranchWriteError, BranchWriter, Removal};
use crate::table::catalog::{Capability, Catalog, CatalogError, CommitOutcome, SCRATCH_PREFIX};
use crate::table::create::TableDefinition;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::ManifestStore;

/// Memory for the manifests of the scratch table, bytes.
const CACHE_BYTES: usize = 1024 * 1024;
/// `min-snapshots-to-keep` of the scratch target: retention that a landing must not lose (rule R4).
const KEPT_SNAPSHOTS: i32 = 7;

/// What trying out has shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probed {
    pub capabilities: Vec<Found>,
    /// Rules of the queue that the catalog does not keep.
    pub broken: Vec<String>,
    /// Milliseconds, of one load and one commit; the slowest seen.
    pub load_ms: u64,
    pub commit_ms: u64,
    /// What could not be taken away afterwards.
    pub left: Option<String>,
}

/// What the scratch table is made and written with.
pub struct Tools {
    pub catalog: Arc<dyn Catalog>,
    pub clock: Arc<dyn Fn() -> i64 + Send + Sync>,
    pub random: Arc<dyn Fn() -> u64 + Send + Sync>,
}

/// Makes a scratch table in `namespace`, tries everything, and takes the table away again.
pub async fn probe(tools: &Tools, namespace: &[String]) -> Result<Probed, CatalogError> {
    let name = scratch_name(tools, namespace);
    let definition = TableDefinition::default().column("id", "long", true);
    let table = tools.catalog.create_scratch(&name, &definition).await?;
    let scratch = Scratch::new(tools, name);
    let tried = scratch.try_all().await;
    // As it is now: what was written since lies below the same location.
    let mut left = tools.catalog.drop_scratch(&table).await.err().map(|error| error.to_string());
    let Tried { mut found, broken, load_ms, commit_ms } = tried?;
    let declared = tools.catalog.capabilities();
    if declared.multi_table_commits {
        let (seen, left_too) = several(tools, namespace, &definition).await?;
        found.push(tried_out(Capability::MultiTableCommits, seen));
        left = left.or(left_too);
    }
    for &capability in Capability::ALL {
        if found.iter().all(|one| one.capability != capability) {
            found.push(Found {
                capability,
                able: Some(declared.has(capability)),
                how: How::Declared,
                seen: None,
            });
        }
    }
    found.sort_by_key(|one| one.capability);
    Ok(Probed { capabilities: found, broken, load_ms, commit_ms, left })
}

/// A name that no table has.
pub(super) fn scratch_name(tools: &Tools, namespace: &[String]) -> TableName {
    TableName { namespace: namespace.to_vec(), name: format!("{SCRATCH_PREFIX}{:016x}", (tools.random)()) }
}

#[derive(Default)]
struct Tried {
    found: Vec<Found>,
    broken: Vec<String>,
    load_ms: u64,
    commit_ms: u64,
}

/// What one commit has shown.
pub(super) enum Seen {
    AsItShould,
    /// Applied although it must not be, or not applied although nothing is in its way.
    Wrong(String),
    /// It has no outcome that says anything.
    Unclear(String),
}

struct Scratch<'a> {
    tools: &'a Tools,
    writer: BranchWriter,
    name: TableName,
}

/// Refs of the scratch table.
const WORK: &str = "mergeberg-doctor/work";
const SPENT: &str = "mergeberg-doctor/spent";
const DROPPED: &str = "mergeberg-doctor/dropped";
const TAG: &str = "mergeberg-doctor-tag";

impl<'a> Scratch<'a> {
    fn new(tools: &'a Tools, name: TableName) -> Self {
        let writer = BranchWriter {
            catalog: Arc::clone(&tools.catalog),
            store: ManifestStore::new(CACHE_BYTES),
            clock: Arc::clone(&tools.clock),
            random: Arc::clone(&tools.random),
        };
        Self { tools, writer, name }
    }

    async fn try_all(&self) -> Result<Tried, CatalogError> {
        let mut tried = Tried::default();
        let first = self.write(RefName::main(), 1).await.map_err(unwritten)?;
        let branches = async {
            for branch in [WORK, SPENT, DROPPED] {
                self.writer.create_branch(&self.name, &RefName::new(branch), first).await?;
            }
            self.write(RefName::new(WORK), 2).await
        };
        let work = match branches.await {
            Ok(work) => work,
            Err(error) => {
                tried.found.push(tried_out(Capability::TableRefs, Seen::Wrong(error.to_string())));
                return Ok(tried);
            }
        };
        let started = Instant::now();
        let table = self.load().await?;
        tried.load_ms = millis(started);
        let heads = (table.facts.head(&RefName::main()), table.facts.head(&RefName::new(WORK)));
        let shown = match heads {
            heads if heads == (Some(first), Some(work)) => Seen::AsItShould,
            _ => Seen::Wrong("a branch that was made is not where it was put".to_owned()),
        };
        tried.found.push(tried_out(Capability::TableRefs, shown));
        tried.found.push(self.requirements(first, work).await?);
        let started = Instant::now();
        match self.landing(first, work).await? {
            Seen::AsItShould => {}
            Seen::Wrong(text) | Seen::Unclear(text) => tried.broken.push(format!("a landing: {text}")),
        }
        tried.commit_ms = millis(started);
        tried.found.push(self.removal(work).await?);
        match self.stale_numbers(work).await? {
            Seen::AsItShould => {}
            Seen::Wrong(text) | Seen::Unclear(text) => {
                tried.broken.push(format!("a snapshot with an old sequence number: {text}"));
            }
        }
        if self.tools.catalog.capabilities().idempotency_keys {
            tried.found.push(tried_out(Capability::IdempotencyKeys, keys(self.tools, &self.name).await?));
        }
        Ok(tried)
    }

    /// Every requirement of a landing, each violated by itself (rules L1, L7; case O28).
    async fn requirements(&self, first: SnapshotId, work: SnapshotId) -> Result<Found, CatalogError> {
        let other_uuid = TableUuid::new("00000000-0000-4000-8000-000000000000");
        let violated = [
            ("the target", at(RefName::main(), Some(work), RefRole::Target)),
            ("another branch", at(RefName::new(WORK), Some(first), RefRole::Source)),
            (
                "a branch that is not there",
                at(RefName::new("mergeberg-doctor/none"), Some(first), RefRole::Fence),
            ),
            ("a name that must be new", at(RefName::new(WORK), None, RefRole::NewName)),
            ("the table's uuid", Requirement::TableUuid(other_uuid)),
        ];
        let mut seen = Seen::AsItShould;
        for (what, requirement) in violated {
            let property = BTreeMap::from([("mergeberg.doctor".to_owned(), what.to_owned())]);
            // A second requirement that holds: a server may look at the last one only, or at the first.
            let holds = at(RefName::new(SPENT), Some(first), RefRole::Source);
            for requirements in [[requirement.clone(), holds.clone()], [holds, requirement]] {
                let updates = vec![Update::SetProperties(property.clone())];
                match self.must_be_refused(&requirements, updates).await? {
                    Seen::AsItShould => {}
                    Seen::Wrong(text) => {
                        let text = format!("a condition on {what} did not hold, and {text}");
                        return Ok(tried_out(Capability::RefRequirements, Seen::Wrong(text)));
                    }
                    Seen::Unclear(text) => seen = Seen::Unclear(format!("a condition on {what}: {text}")),
                }
            }
        }
        Ok(tried_out(Capability::RefRequirements, seen))
    }

    /// Moves the target, drops a branch, sets a tag: one commit.
    async fn landing(&self, first: SnapshotId, work: SnapshotId) -> Result<Seen, CatalogError> {
        let target = |snapshot_id| RefFact {
            name: RefName::main(),
            snapshot_id,
            kind: RefKind::Branch { min_snapshots_to_keep: Some(KEPT_SNAPSHOTS), max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        };
        let tag =
            RefFact { name: RefName::new(TAG), snapshot_id: work, kind: RefKind::Tag, max_ref_age_ms: None };
        let requirements = [
            at(RefName::main(), Some(first), RefRole::Target),
            at(RefName::new(SPENT), Some(first), RefRole::Source),
            at(RefName::new(TAG), None, RefRole::NewName),
        ];
        let updates = vec![
            Update::SetRef(target(work)),
            Update::RemoveRef(RefName::new(SPENT)),
            Update::SetRef(tag.clone()),
        ];
        self.must_be_applied(&requirements, updates, |now| {
            let refs = &now.facts.refs;
            refs.get(&RefName::main()) == Some(&target(work))
                && !refs.contains_key(&RefName::new(SPENT))
                && refs.get(&tag.name) == Some(&tag)
        })
        .await
    }

    /// A branch and its own snapshot in one commit (rule R1).
    async fn removal(&self, work: SnapshotId) -> Result<Found, CatalogError> {
        let branch = RefName::new(DROPPED);
        let dropped = self.write(branch.clone(), 3).await.map_err(unwritten)?;
        let requirements = [
            at(RefName::main(), Some(work), RefRole::Target),
            at(branch.clone(), Some(dropped), RefRole::Fence),
        ];
        let updates = vec![Update::RemoveRef(branch.clone()), Update::RemoveSnapshots(vec![dropped])];
        let seen = self
            .must_be_applied(&requirements, updates, |now| {
                !now.facts.snapshots.contains(dropped) && !now.facts.refs.contains_key(&branch)
            })
            .await?;
        Ok(tried_out(Capability::SnapshotRemoval, seen))
    }

    /// Rules N1, N5. The list of the snapshot is that of the target: nothing is written for it.
    async fn stale_numbers(&self, work: SnapshotId) -> Result<Seen, CatalogError> {
        let table = self.load().await?;
        let Some(parent) = table.facts.snapshots.get(work) else {
            return Ok(Seen::Unclear("the target's snapshot is gone".to_owned()));
        };
        let stale = NewSnapshot {
            id: crate::table::snapshot_writer::new_snapshot_id(&table.facts, || (self.tools.random)()),
            parent: Some(work),
            sequence_number: parent.sequence_number,
            timestamp_ms: (self.tools.clock)().max(table.facts.last_updated_ms + 1),
            manifest_list: parent.manifest_list.clone(),
            schema_id: table.facts.current_schema_id,
            label: "append".to_owned(),
            summary: BTreeMap::new(),
            row_range: None,
        };
        let requirements = [at(RefName::main(), Some(work), RefRole::Target)];
        self.must_be_refused(&requirements, vec![Update::AddSnapshot(stale)]).await
    }

    async fn must_be_refused(
        &self,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> Result<Seen, CatalogError> {
        let before = self.load().await?;
        let outcome = self.tools.catalog.commit(&before, requirements, updates).await;
        let now = self.load().await?;
        let same = now.facts.refs == before.facts.refs
            && now.facts.properties == before.facts.properties
            && now.facts.last_sequence_number == before.facts.last_sequence_number
            && now.facts.snapshots == before.facts.snapshots;
        Ok(match outcome {
            _ if !same => Seen::Wrong("the commit was applied".to_owned()),
            CommitOutcome::Landed(_) => Seen::Wrong("the catalog says that it applied the commit".to_owned()),
            CommitOutcome::HeadMoved
            | CommitOutcome::SourceMoved(_)
            | CommitOutcome::NameTaken(_)
            | CommitOutcome::Fenced
            | CommitOutcome::TableChanged(_)
            | CommitOutcome::Refused(CatalogError::Refused(_)) => Seen::AsItShould,
            other => Seen::Unclear(in_words(&other)),
        })
    }

    async fn must_be_applied(
        &self,
        requirements: &[Requirement],
        updates: Vec<Update>,
        is_applied: impl Fn(&LoadedTable) -> bool,
    ) -> Result<Seen, CatalogError> {
        let before = self.load().await?;
        let outcome = self.tools.catalog.commit(&before, requirements, updates).await;
        let now = self.load().await?;
        Ok(match outcome {
            CommitOutcome::Landed(_) if is_applied(&now) => Seen::AsItShould,
            CommitOutcome::Landed(_) => Seen::Wrong(
                "the catalog says that it applied the commit, and the table shows another state".to_owned(),
            ),
            CommitOutcome::Unknown(text) => Seen::Unclear(text),
            other => Seen::Wrong(in_words(&other)),
        })
    }

    async fn load(&self) -> Result<Arc<LoadedTable>, CatalogError> {
        self.tools.catalog.load(&self.name).await
    }

    /// One row on a branch.
    async fn write(&self, branch: RefName, id: i64) -> Result<SnapshotId, BranchWriteError> {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![id]));
        let rows = RecordBatch::try_from_iter([("id", column)])
            .map_err(|error| CatalogError::Refused(format!("no row could be made: {error}")))?;
        let write = BranchWrite {
            branch,
            label: "append".to_owned(),
            rows: vec![rows],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        self.writer.write(&self.name, write).await
    }
}

fn at(name: RefName, at: Option<SnapshotId>, role: RefRole) -> Requirement {
    Requirement::RefAt { name, at, role }
}

fn tried_out(capability: Capability, seen: Seen) -> Found {
    let (able, seen) = match seen {
        Seen::AsItShould => (Some(true), None),
        Seen::Wrong(text) => (Some(false), Some(text)),
        Seen::Unclear(text) => (None, Some(text)),
    };
    Found { capability, able, how: How::Tried, seen }
}

pub(super) fn in_words(outcome: &CommitOutcome) -> String {
    match outcome {
        CommitOutcome::Landed(_) => "it was applied".to_owned(),
        CommitOutcome::HeadMoved => "the catalog says that the target moved".to_owned(),
        CommitOutcome::SourceMoved(name) => format!("the catalog says that {name} moved"),
        CommitOutcome::NameTaken(name) => format!("the catalog says that {name} is taken"),
        CommitOutcome::Fenced => "the catalog says that a branch is gone".to_owned(),
        CommitOutcome::PointerMoved => "the catalog says that somebody else wrote the table".to_owned(),
        CommitOutcome::TableChanged(text)
        | CommitOutcome::Unexplained(text)
        | CommitOutcome::Unknown(text) => text.clone(),
        CommitOutcome::Refused(error) => error.to_string(),
    }
}

/// Without a first row nothing can be tried at all.
fn unwritten(error: BranchWriteError) -> CatalogError {
    match error {
        BranchWriteError::Catalog(error) => error,
        other => CatalogError::Refused(format!("the scratch table cannot be written: {other}")),
    }
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}
