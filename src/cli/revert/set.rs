//! The revert of a set: the inverse of each part, enqueued as one set, so that all tables take it back or none.
//!
//! All parts are planned before anything is written: one that cannot be taken back refuses the whole, and every such
//! part is named. What is written for a set that is not enqueued after all is tidied up, as that of a single request.

use std::collections::BTreeSet;

use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;

use super::super::enqueue::{Needed, able, key_conflict, usable_table};
use super::plan::Plan;
use super::{Revert, RevertArgs, RevertContext, check, must_have_landed, published};
use crate::error::UserError;
use crate::ledger::{EnqueuedSet, InSet, RequestRow, Reverts};

/// Writes the inverse of every part and enqueues them as a set. The same command again is the same set while that is
/// open, and with a key for ever.
pub async fn revert_set(
    context: RevertContext<'_>,
    args: &RevertArgs,
    set: InSet,
) -> Result<EnqueuedSet, UserError> {
    check(args)?;
    let ledger = context.enqueue.ledger;
    let key = args.idempotency_key.as_deref();
    let rows = ledger.parts(set.id).await?;
    if rows.len() != set.parts as usize {
        let text = format!("{} of the {} parts of set {} can be read", rows.len(), set.parts, set.id);
        return Err(UserError::new(ReasonCode::LedgerUnusable, text));
    }
    let reverted: BTreeSet<RequestId> = rows.iter().map(|row| row.id).collect();
    if let Some(there) = ledger.set_revert_of(&reverted, key).await? {
        return told(there, key, set);
    }
    // Its parts land together, so one speaks for all.
    rows.iter().try_for_each(must_have_landed)?;
    if !able(&context.enqueue).await?.multi_table_commits {
        let text =
            format!("catalog '{}' cannot commit to several tables at once", context.enqueue.catalog.name());
        return Err(UserError::new(ReasonCode::NoMultiTableCommits, text)
            .with_next("take its tables back one at a time, with --alone"));
    }
    let mut receipts = Vec::with_capacity(rows.len());
    for row in &rows {
        receipts.push(published(ledger, row).await?);
    }
    let mut refusals: Vec<(&RequestRow, UserError)> = Vec::new();
    for (row, candidates) in rows.iter().zip(&receipts) {
        let table = usable_table(&context.enqueue, &row.table, Needed::History).await;
        let table = table.map_err(|error| error.about(&row.table))?;
        match Plan::of(&context, &table, row, candidates).await {
            Ok(_) => {}
            Err(error) if is_refusal(error.code) => refusals.push((row, error)),
            Err(error) => return Err(error.about(&row.table)),
        }
    }
    if !refusals.is_empty() {
        return Err(refused(set, rows.len(), refusals));
    }
    let mut parts = Vec::with_capacity(rows.len());
    for (row, candidates) in rows.iter().zip(&receipts) {
        let part = Revert { context, args, row, candidates }.write_branch().await;
        let part = part.map_err(|error| error.about(&row.table))?;
        let reverts: Reverts = args.reverts(row.id);
        parts.push((part, reverts));
    }
    told(ledger.enqueue_set_revert(&parts, key, context.enqueue.now_ms).await?, key, set)
}

fn told(enqueued: EnqueuedSet, key: Option<&str>, set: InSet) -> Result<EnqueuedSet, UserError> {
    match enqueued {
        EnqueuedSet::KeyConflict(other) => Err(key_conflict(key, &other)),
        EnqueuedSet::RevertedElsewhere(other) => {
            let request = other.reverts.as_ref().map_or(set.id, |reverts| reverts.request);
            let text = format!(
                "request {} takes back request {request}, a part of set {}, and is {}",
                other.id, set.id, other.state
            );
            Err(UserError::new(ReasonCode::WrongState, text).with_next(
                "cancel that one to take the set back as a whole, or take back the other parts with --alone",
            ))
        }
        done => Ok(done),
    }
}

/// What the part is, and not what could not be looked at.
fn is_refusal(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::RevertImpossible
            | ReasonCode::EmptySource
            | ReasonCode::WrongState
            | ReasonCode::TableReplaced
    )
}

/// One refusal of all that cannot be taken back.
fn refused(set: InSet, parts: usize, refusals: Vec<(&RequestRow, UserError)>) -> UserError {
    let code = refusals.first().map_or(ReasonCode::RevertImpossible, |(_, error)| error.code);
    let all = refusals.len() == parts;
    let mut texts = Vec::with_capacity(refusals.len());
    let mut witnesses = Vec::with_capacity(refusals.len());
    for (row, error) in refusals {
        let UserError { code, message, next: _, witnesses: seen } = error.about(&row.table);
        witnesses.push(json!({
            "part": row.id, "table": row.table, "code": code, "text": message, "witnesses": seen,
        }));
        texts.push(message);
    }
    let text = format!("set {} cannot be taken back as a whole: {}", set.id, texts.join("; "));
    let error = UserError::new(code, text).with_witnesses(witnesses);
    if all {
        error
    } else {
        error.with_next("take back the parts that can be with --alone, or clear what is in the way")
    }
}
