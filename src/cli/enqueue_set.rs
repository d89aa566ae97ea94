//! Enqueue of a set: every part is resolved as a request of its own would be, then all are written, or none.

use std::collections::BTreeSet;

use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName, TableUuid};
use mergeberg_kernel::policy::ClassPolicy;
use mergeberg_kernel::reason::ReasonCode;

use super::enqueue::{EnqueueArgs, EnqueueContext, Needed, able, key_conflict, resolve, usable_table};
use crate::error::UserError;
use crate::ledger::{EnqueuedSet, NewRequest, RequestRow};
use crate::worker::own_sources::OWN_REFS;

/// Most tables of one set: each is staged, checked and locked with the others.
pub const MAX_PARTS: usize = 32;

/// One table's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartArgs {
    pub table: TableName,
    pub source: RefName,
    pub target: RefName,
    /// Publish the branch up to this snapshot instead of its head.
    pub snapshot: Option<SnapshotId>,
    /// `None`: by the branch's prefix.
    pub class: Option<String>,
}

/// What is to be merged together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetArgs {
    pub parts: Vec<PartArgs>,
    pub idempotency_key: Option<String>,
    pub principal: Principal,
}

/// Resolves and writes. The same key, or the same sources, pins and targets while open, is the same set.
pub async fn enqueue_set(context: EnqueueContext<'_>, args: &SetArgs) -> Result<EnqueuedSet, UserError> {
    check_names(&args.parts)?;
    if !able(&context).await?.multi_table_commits {
        let text = format!("catalog '{}' cannot commit to several tables at once", context.catalog.name());
        return Err(UserError::new(ReasonCode::NoMultiTableCommits, text));
    }
    let mut requests: Vec<NewRequest> = Vec::with_capacity(args.parts.len());
    let mut uuids: BTreeSet<TableUuid> = BTreeSet::new();
    for part in &args.parts {
        match part_of(&context, args, part).await {
            Ok(request) => {
                if !uuids.insert(request.table_uuid.clone()) {
                    return Err(twice(&part.table));
                }
                requests.push(request);
            }
            Err(error) => {
                return match enqueued_before(&context, args, &error).await? {
                    Some(rows) => Ok(EnqueuedSet::Existing(rows)),
                    None => Err(error.about(&part.table)),
                };
            }
        }
    }
    let key = args.idempotency_key.as_deref();
    match context.ledger.enqueue_set(&requests, key, context.now_ms).await? {
        EnqueuedSet::KeyConflict(other) => Err(key_conflict(key, &other)),
        done => Ok(done),
    }
}

/// What can be told from the names alone.
pub fn check_names(parts: &[PartArgs]) -> Result<(), UserError> {
    let wrong = |text: String| Err(UserError::new(ReasonCode::SetInvalid, text));
    match parts {
        [] => return wrong("no table was named".to_owned()),
        [only] => return wrong(format!("{} alone is no set", only.table)),
        _ if parts.len() > MAX_PARTS => {
            return wrong(format!("{} tables were named; a set has at most {MAX_PARTS}", parts.len()));
        }
        _ => {}
    }
    let mut names: BTreeSet<&TableName> = BTreeSet::new();
    match parts.iter().find(|part| !names.insert(&part.table)) {
        Some(part) => Err(twice(&part.table)),
        None => Ok(()),
    }
}

fn twice(table: &TableName) -> UserError {
    UserError::new(ReasonCode::SetInvalid, format!("{table} is named twice"))
        .with_next("bring its changes onto one branch, and name the table once")
}

async fn part_of(
    context: &EnqueueContext<'_>,
    set: &SetArgs,
    part: &PartArgs,
) -> Result<NewRequest, UserError> {
    let PartArgs { table: name, source, target, snapshot, class } = part;
    if source.as_str().starts_with(OWN_REFS) {
        let text = format!("'{source}' is a branch of a queue's own");
        return Err(UserError::new(ReasonCode::InvalidArgument, text)
            .with_next("name a branch that a pipeline wrote"));
    }
    let needed = if snapshot.is_some() { Needed::History } else { Needed::Heads };
    let table = usable_table(context, name, needed).await?;
    let policy = context.policies.for_table(name);
    let args = EnqueueArgs {
        table: name.clone(),
        source: source.clone(),
        target: target.clone(),
        snapshot: *snapshot,
        class: class.clone(),
        idempotency_key: set.idempotency_key.clone(),
        principal: set.principal.clone(),
    };
    let request = resolve(&table.facts, &policy, &args)?;
    if policy.class_named(&request.class).is_some_and(ClassPolicy::is_compaction) {
        let text = format!("class '{}' takes compactions, which change no rows", request.class);
        return Err(UserError::new(ReasonCode::SetInvalid, text)
            .with_next("enqueue the compaction by itself; it waits for everybody else"));
    }
    Ok(request)
}

/// A sender whose first answer was lost asks again, and by then the set may have landed and its branches be gone. The
/// key still names it.
async fn enqueued_before(
    context: &EnqueueContext<'_>,
    args: &SetArgs,
    error: &UserError,
) -> Result<Option<Vec<RequestRow>>, UserError> {
    let Some(key) = &args.idempotency_key else { return Ok(None) };
    if error.code != ReasonCode::BranchNotFound {
        return Ok(None);
    }
    let Some(first) = context.ledger.request_by_key(key).await? else { return Ok(None) };
    let Some(set) = first.set else { return Ok(None) };
    let rows = context.ledger.parts(set.id).await?;
    let is_asked_for = |row: &RequestRow| {
        args.parts.iter().any(|part| {
            part.table == row.table
                && part.source == row.source
                && part.target == row.target
                && part.snapshot.is_none_or(|snapshot| snapshot == row.pinned)
        })
    };
    let same = rows.len() == args.parts.len() && rows.iter().all(is_asked_for);
    Ok(same.then_some(rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(table: &str) -> PartArgs {
        PartArgs {
            table: table.parse().unwrap(),
            source: RefName::new("release/1"),
            target: RefName::main(),
            snapshot: None,
            class: None,
        }
    }

    #[test]
    fn a_set_is_several_tables_each_once() {
        let wrong = |parts: &[PartArgs]| check_names(parts).unwrap_err();
        for parts in [vec![], vec![part("shop.orders")]] {
            assert_eq!(wrong(&parts).code, ReasonCode::SetInvalid);
        }
        let twice = wrong(&[part("shop.orders"), part("shop.items"), part("shop.orders")]);
        assert_eq!(twice.message, "shop.orders is named twice");
        let many: Vec<PartArgs> = (0..=MAX_PARTS).map(|at| part(&format!("shop.t{at}"))).collect();
        assert_eq!(wrong(&many).message, "33 tables were named; a set has at most 32");
        assert!(check_names(&many[..MAX_PARTS]).is_ok());
    }
}
