//! `request revert`: the inverse of one landed request, made against today's target and enqueued like any other
//! branch. A library function, as enqueue is.
//!
//! The inverse depends on the files that the request changed and on nothing else, so what came beside them stays.
//! It is written as one snapshot on a branch of the queue's own; from there on it is classified, checked and landed
//! like any other request. That it is a revert only the ledger knows. A set is taken back as a set ([`set`]).

pub mod command;
mod files;
mod plan;
pub mod set;

use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{Principal, RefName, RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;

use self::files::Restored;
use self::plan::Plan;
use super::enqueue::{
    EnqueueContext, MAX_KEY_BYTES, MAX_PRINCIPAL_BYTES, Needed, check_fences, check_length, class_of,
    key_conflict, usable_table,
};
use crate::error::UserError;
use crate::ledger::{Enqueued, Ledger, NewRequest, RequestRow, Reverts};
use crate::table::catalog::CommitOutcome;
use crate::table::cleanup::{WrittenFiles, delete_files};
use crate::table::loaded::LoadedTable;
use crate::table::manifests::ManifestStore;
use crate::table::snapshot_writer::{SnapshotChange, SnapshotWriter, new_snapshot_id};
use crate::worker::own_sources::{kept, revert_branch};

/// Times that the branch is written again because something else was committed first.
const MAX_COMMIT_TRIES: u32 = 50;
/// Longest reason, in bytes.
const MAX_REASON_BYTES: usize = 4096;

/// What a revert works with, beside what every enqueue does.
#[derive(Clone, Copy)]
pub struct RevertContext<'a> {
    pub enqueue: EnqueueContext<'a>,
    pub store: &'a ManifestStore,
    pub random: &'a (dyn Fn() -> u64 + Send + Sync),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RevertArgs {
    pub request: RequestId,
    pub reason: Option<String>,
    /// `None`: the class of the request, so that the same checks hold.
    pub class: Option<String>,
    pub idempotency_key: Option<String>,
    pub principal: Principal,
}

/// Writes the inverse of one request and enqueues it, of a part of a set by itself too. The same command again is the
/// same request while that is open, and with a key for ever.
pub async fn revert(context: RevertContext<'_>, args: &RevertArgs) -> Result<Enqueued, UserError> {
    check(args)?;
    let ledger = context.enqueue.ledger;
    if let Some(key) = &args.idempotency_key
        && let Some(row) = ledger.request_by_key(key).await?
    {
        let same = row.reverts.as_ref().is_some_and(|reverts| reverts.request == args.request);
        return if same { Ok(Enqueued::Existing(row)) } else { Err(key_conflict(Some(key), &row)) };
    }
    let row = ledger.request(args.request).await?;
    must_have_landed(&row)?;
    if args.idempotency_key.is_none()
        && let Some(open) = ledger.reverts_of(row.id).await?.into_iter().find(|r| !r.state.is_final())
    {
        return Ok(Enqueued::Existing(open));
    }
    let candidates = published(ledger, &row).await?;
    let new = Revert { context, args, row: &row, candidates: &candidates }.write_branch().await?;
    match ledger.enqueue_revert(&new, &args.reverts(row.id), context.enqueue.now_ms).await? {
        Enqueued::KeyConflict(other) => Err(key_conflict(args.idempotency_key.as_deref(), &other)),
        // Somebody else's, or that of a former try: our branch is nobody's, and is tidied up.
        done => Ok(done),
    }
}

impl RevertArgs {
    fn reverts(&self, request: RequestId) -> Reverts {
        Reverts { request, reason: self.reason.clone() }
    }
}

fn must_have_landed(row: &RequestRow) -> Result<(), UserError> {
    if row.state == RequestState::Landed {
        return Ok(());
    }
    Err(UserError::new(
        ReasonCode::WrongState,
        format!("request {} is {}: only what has landed can be taken back", row.id, row.state),
    ))
}

/// Snapshots that published the request, oldest first; never none.
async fn published(ledger: &Ledger, row: &RequestRow) -> Result<Vec<SnapshotId>, UserError> {
    let receipt = ledger.receipt_of_request(row.id).await?;
    let candidates = receipt.as_ref().and_then(|receipt| receipt.car(row.id)).map(|car| &car.candidates);
    match candidates {
        Some(candidates) if !candidates.is_empty() => Ok(candidates.clone()),
        _ => Err(UserError::new(ReasonCode::Internal, format!("request {} has no receipt", row.id))),
    }
}

fn check(args: &RevertArgs) -> Result<(), UserError> {
    check_length("the principal", args.principal.as_str(), MAX_PRINCIPAL_BYTES)?;
    if let Some(key) = &args.idempotency_key {
        check_length("the idempotency key", key, MAX_KEY_BYTES)?;
    }
    if let Some(reason) = &args.reason {
        check_length("the reason", reason, MAX_REASON_BYTES)?;
    }
    Ok(())
}

struct Revert<'a> {
    context: RevertContext<'a>,
    args: &'a RevertArgs,
    row: &'a RequestRow,
    /// Snapshots that published the request, oldest first.
    candidates: &'a [SnapshotId],
}

/// An inverse that is written, but not committed.
struct Written {
    requirements: Vec<Requirement>,
    updates: Vec<Update>,
    branch: RefName,
    snapshot: SnapshotId,
    class: String,
    files: WrittenFiles,
}

impl Revert<'_> {
    /// Writes the inverse to a branch of its own, and commits that: what is to be enqueued.
    async fn write_branch(&self) -> Result<NewRequest, UserError> {
        let EnqueueContext { catalog, ledger: _, policies: _, now_ms: _ } = self.context.enqueue;
        // What comes back is the same whatever the target does meanwhile: it is written once.
        let mut restored: Option<Restored> = None;
        for _ in 0..MAX_COMMIT_TRIES {
            let table = usable_table(&self.context.enqueue, &self.row.table, Needed::History).await?;
            let written = match self.write(&table, &mut restored).await {
                Ok(written) => written,
                Err(error) => {
                    self.discard(&table, WrittenFiles::default(), restored.take()).await;
                    return Err(error);
                }
            };
            let Written { requirements, updates, branch, snapshot, class, files } = written;
            match catalog.commit(&table, &requirements, updates).await {
                CommitOutcome::Landed(table) => {
                    return Ok(self.request(&table, branch, snapshot, class));
                }
                CommitOutcome::Refused(error) => {
                    self.discard(&table, files, restored.take()).await;
                    return Err(error.into());
                }
                // Perhaps it was applied; then its branch is nobody's, and its files are not to be deleted.
                CommitOutcome::Unknown(what) => {
                    return Err(UserError::new(
                        ReasonCode::CatalogUnavailable,
                        format!("nobody knows whether the inverse was written: {what}"),
                    )
                    .with_next("run the command again: a branch that nobody asks for is tidied up"));
                }
                CommitOutcome::PointerMoved
                | CommitOutcome::HeadMoved
                | CommitOutcome::SourceMoved(_)
                | CommitOutcome::NameTaken(_)
                | CommitOutcome::Fenced
                | CommitOutcome::Unexplained(_)
                | CommitOutcome::TableChanged(_) => self.discard(&table, files, None).await,
            }
        }
        if let Ok(table) = usable_table(&self.context.enqueue, &self.row.table, Needed::History).await {
            self.discard(&table, WrittenFiles::default(), restored).await;
        }
        let text =
            format!("{} was written {MAX_COMMIT_TRIES} times while the inverse was made", self.row.table);
        Err(UserError::new(ReasonCode::CatalogUnavailable, text)
            .with_next("try again when fewer writers are at work"))
    }

    /// Plans the inverse on the table as it is, and writes its snapshot.
    async fn write(
        &self,
        table: &Arc<LoadedTable>,
        restored: &mut Option<Restored>,
    ) -> Result<Written, UserError> {
        let RevertContext { enqueue, store, random } = self.context;
        let (facts, row) = (&table.facts, self.row);
        let plan = Plan::of(&self.context, table, row, self.candidates).await?;
        let attempt = u32::try_from(enqueue.ledger.reverts_of(row.id).await?.len()).unwrap_or(u32::MAX);
        let branch = free_branch(table, enqueue.ledger.queue_id(), row.id, attempt);
        let policy = enqueue.policies.for_table(&row.table);
        let class = match &self.args.class {
            Some(named) => class_of(&policy, &branch, Some(named))?,
            // The policy may have lost it since.
            None => {
                class_of(&policy, &branch, Some(&row.class)).or_else(|_| class_of(&policy, &branch, None))?
            }
        };
        check_fences(&enqueue, &policy, &class.name).await?;
        if restored.is_none() {
            *restored = Some(Restored::write(store, table, &plan).await?);
        }
        let mut add = restored.as_ref().map(|restored| restored.files.clone()).unwrap_or_default();
        let deletes = files::deletes(store, table, &plan).await?;
        let written: Vec<Arc<str>> = deletes.written().collect();
        add.extend(deletes.rows);
        let mut remove = deletes.replace;
        remove.extend(plan.inverse.remove.iter().map(|file| Arc::clone(&file.path)));
        let id = new_snapshot_id(facts, random);
        let only_removes = add.is_empty() && deletes.add.is_empty() && deletes.remove.is_empty();
        let change = SnapshotChange {
            id,
            label: if only_removes { "delete" } else { "overwrite" }.to_owned(),
            add,
            remove,
            add_deletes: deletes.add,
            remove_deletes: deletes.remove,
            summary: std::collections::BTreeMap::new(),
            now_ms: enqueue.now_ms,
            schema_id: facts.current_schema_id,
        };
        let mut writer = SnapshotWriter::on(store, table, Some(&plan.head)).await.map_err(of_table)?;
        let snapshot = writer.add(change).await.map_err(of_table)?;
        let mut files = writer.written_files().clone();
        files.data_files.extend(written);
        let keep: RefFact = kept(facts, &branch, id, &row.target, enqueue.now_ms);
        Ok(Written {
            requirements: vec![
                Requirement::TableUuid(facts.uuid.clone()),
                Requirement::RefAt { name: branch.clone(), at: None, role: RefRole::NewName },
                Requirement::RefAt {
                    name: row.target.clone(),
                    at: Some(plan.head.id),
                    role: RefRole::Target,
                },
            ],
            updates: vec![Update::AddSnapshot(snapshot), Update::SetRef(keep)],
            branch,
            snapshot: id,
            class: class.name,
            files,
        })
    }

    fn request(&self, table: &LoadedTable, branch: RefName, pinned: SnapshotId, class: String) -> NewRequest {
        NewRequest {
            table: self.row.table.clone(),
            table_uuid: table.facts.uuid.clone(),
            source: branch,
            pinned,
            target: self.row.target.clone(),
            class,
            principal: self.args.principal.clone(),
            idempotency_key: self.args.idempotency_key.clone(),
            structure: table.facts.structure(),
            format_version: table.facts.format_version,
        }
    }

    /// Deletes what was written for nothing (rule R8). What cannot be deleted is in nobody's way.
    async fn discard(&self, table: &LoadedTable, mut files: WrittenFiles, restored: Option<Restored>) {
        let paths =
            restored.iter().flat_map(|restored| &restored.files).map(|file| Arc::clone(&file.fact.path));
        files.data_files.extend(paths);
        // The snapshot was never committed under this id.
        files.snapshots.clear();
        if let Err(error) = delete_files(self.context.store, table, &files).await {
            tracing::warn!("files of an inverse that was not committed are left: {error}");
        }
    }
}

/// The first name that no ref has: names are never used twice (rule R7), and a try whose request was never
/// written may have left its branch.
fn free_branch(
    table: &LoadedTable,
    queue: &mergeberg_kernel::ids::QueueId,
    request: RequestId,
    attempts: u32,
) -> RefName {
    let mut attempt = attempts.saturating_add(1);
    loop {
        let name = revert_branch(queue, request, attempt);
        // There are fewer refs than numbers.
        if !table.facts.refs.contains_key(&name) {
            return name;
        }
        attempt = attempt.wrapping_add(1);
    }
}

/// What went wrong below the catalog.
fn of_table(error: crate::table::error::TableError) -> UserError {
    UserError::new(error.reason(), error.to_string())
}
