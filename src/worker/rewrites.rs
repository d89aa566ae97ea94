//! Which snapshots are proved to be rewrites (rule C5): commits on the target, sources that say so, and the sources
//! of classes that take nothing else.
//!
//! A proof reads rows, which takes time in which everybody else in the lane waits. It is kept by snapshot, since
//! a snapshot never changes; what could not be read is tried again at ever longer intervals.

use std::collections::{BTreeSet, HashMap};

use mergeberg_kernel::admission::RequestFacts;
use mergeberg_kernel::change::{ChangeSet, RewriteProof};
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::policy::{ClassPolicy, TablePolicy};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::unit::SourceChange;

use super::context::{Worker, lock};
use super::error::WorkerError;
use super::gather::class_of;
use super::judge::rest_after;
use crate::ledger::RequestRow;
use crate::table::error::TableError;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::FileScope;
use crate::validate::CheckError;

/// Proofs remembered between ticks, in rewrites.
const MAX_PROOFS: usize = 10_000;

/// First and last snapshot of what is proved.
type Key = (SnapshotId, SnapshotId);

/// What was proved, and what could not be.
#[derive(Default)]
pub(super) struct Proofs {
    known: HashMap<Key, RewriteProof>,
    failed: HashMap<Key, Failed>,
}

#[derive(Clone)]
struct Failed {
    tries: u64,
    retry_at_ms: i64,
    error: String,
}

/// The answer, or why there is none.
type Proved = Result<RewriteProof, String>;

impl Worker {
    /// Rule C5, for a snapshot by itself. Unproved is a change of data: the stricter answer.
    pub(super) async fn rewrite_proof(
        &self,
        table: &LoadedTable,
        snapshot: &SnapshotFact,
        change: &ChangeSet,
        policy: &TablePolicy,
    ) -> Result<RewriteProof, WorkerError> {
        let proved = self.prove_kept(table, (snapshot, snapshot), &[change], policy).await;
        Ok(proved.unwrap_or_else(|error| {
            tracing::warn!(snapshot = %snapshot.id, "a rewrite could not be proved: {error}");
            RewriteProof::None
        }))
    }

    /// Whether a source of a class of compactions is looked into now. While somebody waits who changes rows it
    /// is not, until it is past its age bound: they would wait for the comparison.
    pub(super) fn looks_into(&self, class: &ClassPolicy, row: &RequestRow, changes_wait: bool) -> bool {
        let age_ms = self.now_ms().saturating_sub(row.enqueued_at_ms);
        !class.is_compaction() || !changes_wait || age_ms >= class.age_bound.ms
    }

    /// Completes what is known of the changes of a source, oldest first, as far as rewrites are concerned.
    pub(super) async fn look_at_rewrites(
        &self,
        table: &LoadedTable,
        changes: &mut [SourceChange],
        base: Option<SnapshotId>,
        policy: &TablePolicy,
        request: &mut RequestFacts,
    ) -> Result<(), TableError> {
        if request.class.is_compaction()
            && let Err(error) = self.prove_all(table, changes, policy).await
        {
            let text = format!("its rows could not be compared with those that they replace: {error}");
            request.unread = Some((ReasonCode::CheckCouldNotRun, text));
        }
        let base = base.and_then(|id| table.facts.snapshots.get(id));
        let known = base.map_or(0, |base| base.sequence_number);
        for source in changes.iter_mut().filter(|source| source.proof != RewriteProof::None) {
            let Some(snapshot) = table.facts.snapshots.get(source.change.snapshot) else { continue };
            let added = self.store.added_files(table, snapshot).await?;
            source.keeps_sequence_numbers = added.iter().all(|file| file.sequence_number <= known);
        }
        Ok(())
    }

    /// Whatever the snapshots are labelled: one by one, and where that proves nothing, a removal with the refill
    /// that follows it.
    async fn prove_all(
        &self,
        table: &LoadedTable,
        changes: &mut [SourceChange],
        policy: &TablePolicy,
    ) -> Result<(), String> {
        let snapshots = &table.facts.snapshots;
        for at in 0..changes.len() {
            let change = changes[at].change.clone();
            let Some(snapshot) = snapshots.get(change.snapshot) else { continue };
            if changes[at].proof == RewriteProof::None {
                changes[at].proof = self.prove_kept(table, (snapshot, snapshot), &[&change], policy).await?;
            }
            let refill = changes.get(at + 1).map(|next| next.change.clone());
            if let Some(refill) = refill
                && change.added.is_empty()
                && !change.removed.is_empty()
                && refill.only_adds()
                && let Some(last) = snapshots.get(refill.snapshot)
            {
                changes[at].proof_with_next =
                    self.prove_kept(table, (snapshot, last), &[&change, &refill], policy).await?;
            }
        }
        Ok(())
    }

    /// The proof for the snapshots from `first` to `last`, whose changes are given.
    async fn prove_kept(
        &self,
        table: &LoadedTable,
        (first, last): (&SnapshotFact, &SnapshotFact),
        changes: &[&ChangeSet],
        policy: &TablePolicy,
    ) -> Proved {
        // What replaces nothing is no rewrite, and is not read: an upsert would cost its whole partition.
        let some = |of: fn(&ChangeSet) -> bool| changes.iter().any(|change| of(change));
        let replaces_files = some(|c| !c.added.is_empty()) && some(|c| !c.removed.is_empty());
        if !replaces_files && !some(|c| !c.removed_deletes.is_empty()) {
            return Ok(RewriteProof::None);
        }
        let key = (first.id, last.id);
        let (known, failed) = {
            let proofs = lock(&self.proofs);
            (proofs.known.get(&key).copied(), proofs.failed.get(&key).cloned())
        };
        if let Some(known) = known {
            return Ok(known);
        }
        let tries = failed.as_ref().map_or(0, |failed| failed.tries);
        if let Some(Failed { error, .. }) = failed.filter(|failed| self.now_ms() < failed.retry_at_ms) {
            return Err(error);
        }
        let trusted = changes.len() == 1 && is_trusted(last, policy);
        let proved = self.prove(table, (first, last), changes, trusted).await.map_err(|e| e.to_string());
        let retry_at_ms = self.now_ms().saturating_add(rest_after(tries + 1));
        let mut proofs = lock(&self.proofs);
        if proofs.known.len() + proofs.failed.len() >= MAX_PROOFS {
            *proofs = Proofs::default();
        }
        match &proved {
            Ok(proof) => {
                proofs.failed.remove(&key);
                proofs.known.insert(key, *proof);
            }
            Err(error) => {
                let failed = Failed { tries: tries + 1, retry_at_ms, error: error.clone() };
                proofs.failed.insert(key, failed);
            }
        }
        proved
    }

    async fn prove(
        &self,
        table: &LoadedTable,
        (first, last): (&SnapshotFact, &SnapshotFact),
        changes: &[&ChangeSet],
        trusted: bool,
    ) -> Result<RewriteProof, CheckError> {
        let Some(parent) = first.parent.and_then(|id| table.facts.snapshots.get(id)) else {
            return Ok(RewriteProof::None);
        };
        let partitions: BTreeSet<_> = changes.iter().flat_map(|c| c.partitions().cloned()).collect();
        let scope = FileScope::Partitions(partitions.into_iter().collect());
        let before = self.store.live_files(table, parent, &scope).await?;
        let after = self.store.live_files(table, last, &scope).await?;
        if !trusted {
            return self.prover.prove(table, before, after).await;
        }
        let equal = self.prover.equal_counts(table, before, after).await?;
        Ok(if equal { RewriteProof::TrustedPrincipal } else { RewriteProof::None })
    }
}

/// Does anybody wait here who changes rows?
pub(super) fn changes_wait(policy: &TablePolicy, rows: &[RequestRow]) -> bool {
    rows.iter().any(|row| !class_of(policy, row).is_compaction())
}

/// The rows to look at in one tick, at most `window` of those who change rows and as many compactions, so that
/// neither crowds the other out; and the rest. Arrival order is kept.
pub(super) fn window(
    policy: &TablePolicy,
    rows: Vec<RequestRow>,
    window: usize,
) -> (Vec<RequestRow>, Vec<RequestRow>) {
    let (mut changes, mut compactions) = (0, 0);
    rows.into_iter().partition(|row| {
        let count = if class_of(policy, row).is_compaction() { &mut compactions } else { &mut changes };
        *count += 1;
        *count <= window
    })
}

fn is_trusted(snapshot: &SnapshotFact, policy: &TablePolicy) -> bool {
    let names = |name: &String| {
        [ENGINE_NAME, APP_ID].iter().any(|key| snapshot.summary.get(*key).is_some_and(|own| own == name))
    };
    snapshot.label == "replace" && policy.trusted_rewriters.iter().any(names)
}

/// Summary keys in which engines name themselves.
const ENGINE_NAME: &str = "engine-name";
const APP_ID: &str = "app-id";
