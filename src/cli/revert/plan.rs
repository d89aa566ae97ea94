//! What has to go and to come back, read from the request's receipt and the manifests; and why it may not.

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::change::ChangeSet;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::inverse::{Inverse, Obstacle, obstacles};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;

use super::{RevertContext, of_table};
use crate::error::UserError;
use crate::ledger::RequestRow;
use crate::table::loaded::LoadedTable;

/// The inverse of a request on the target as it is.
pub struct Plan {
    pub inverse: Inverse,
    /// The target's head.
    pub head: SnapshotFact,
    /// The target before the request; `None`: it was the first publish.
    pub before: Option<SnapshotFact>,
}

impl Plan {
    pub async fn of(
        context: &RevertContext<'_>,
        table: &LoadedTable,
        row: &RequestRow,
        candidates: &[SnapshotId],
    ) -> Result<Self, UserError> {
        let facts = &table.facts;
        if facts.uuid != row.table_uuid {
            let text = format!("{} is another table now than the one that the request landed on", row.table);
            return Err(UserError::new(ReasonCode::TableReplaced, text));
        }
        let (first, tail) = match (candidates.first(), candidates.last()) {
            (Some(first), Some(tail)) => (*first, *tail),
            _ => return Err(UserError::new(ReasonCode::Internal, "a landing without candidates")),
        };
        let line = facts.snapshots.line(facts.head(&row.target));
        let head = line.ids().first().and_then(|id| facts.snapshots.get(*id));
        let Some(later) = line.after(Some(tail)) else {
            return Err(off_the_line(table, row, tail));
        };
        let Some(head) = head else { return Err(off_the_line(table, row, tail)) };

        let ledger = context.enqueue.ledger;
        let taken_back = ledger.taken_back(&row.table_uuid, &row.target, |id| line.contains(id)).await?;
        if let Some(known) = taken_back.iter().find(|known| known.request == row.id) {
            let text = format!("request {} was taken back already, by request {}", row.id, known.by);
            return Err(UserError::new(ReasonCode::RevertImpossible, text)
                .with_next("nothing is to do; revert that one to have the rows again"));
        }
        let own = changes(context, table, candidates).await?;
        let inverse = Inverse::of(own.iter().map(Arc::as_ref));
        if inverse.is_empty() {
            let text = format!("request {} changed no file of the target", row.id);
            return Err(UserError::new(ReasonCode::EmptySource, text).with_next("nothing is to take back"));
        }
        let since = changes(context, table, &later).await?;
        let found = obstacles(&inverse, since.iter().map(Arc::as_ref));
        if !found.is_empty() {
            return Err(in_the_way(context, row, &found).await?);
        }
        let before = match facts.snapshots.get(first).and_then(|snapshot| snapshot.parent) {
            None => None,
            Some(parent) => match facts.snapshots.get(parent) {
                Some(parent) => Some(parent.clone()),
                None if inverse.restore.is_empty() && inverse.restore_deletes.is_empty() => None,
                None => return Err(expired(row, parent)),
            },
        };
        Ok(Self { inverse, head: head.clone(), before })
    }
}

async fn changes(
    context: &RevertContext<'_>,
    table: &LoadedTable,
    ids: &[SnapshotId],
) -> Result<Vec<Arc<ChangeSet>>, UserError> {
    let mut changes = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(snapshot) = table.facts.snapshots.get(*id) else {
            let text = format!("snapshot {id} was expired, so what it changed can no longer be told");
            return Err(UserError::new(ReasonCode::RevertImpossible, text));
        };
        changes.push(context.store.changes(table, snapshot).await.map_err(of_table)?);
    }
    Ok(changes)
}

/// The target's line does not hold what the request landed as.
fn off_the_line(table: &LoadedTable, row: &RequestRow, tail: SnapshotId) -> UserError {
    if table.facts.snapshots.contains(tail) || table.facts.head(&row.target).is_none() {
        return rolled_back(row, tail);
    }
    let line = table.facts.snapshots.line(table.facts.head(&row.target));
    let oldest = line.ids().last().and_then(|id| table.facts.snapshots.get(*id));
    match oldest.and_then(|snapshot| snapshot.parent) {
        // The history was cut, perhaps after the landing.
        Some(_) => expired(row, tail),
        None => rolled_back(row, tail),
    }
}

fn rolled_back(row: &RequestRow, tail: SnapshotId) -> UserError {
    let text = format!(
        "request {} landed as snapshot {tail}, which was rolled back: it is not in the history of '{}'",
        row.id, row.target
    );
    UserError::new(ReasonCode::WrongState, text).with_next("nothing is to take back")
}

fn expired(row: &RequestRow, snapshot: SnapshotId) -> UserError {
    let text = format!("snapshot {snapshot} was expired, so what request {} changed cannot be told", row.id);
    UserError::new(ReasonCode::RevertImpossible, text)
}

/// The refusal with its witnesses: the later snapshots, and the requests that they were published for.
async fn in_the_way(
    context: &RevertContext<'_>,
    row: &RequestRow,
    found: &[Obstacle],
) -> Result<UserError, UserError> {
    let snapshots: BTreeSet<SnapshotId> = found.iter().map(|obstacle| obstacle.snapshot).collect();
    let publishers = context.enqueue.ledger.publishers(&row.table_uuid, &row.target, &snapshots).await?;
    let mut makers: Vec<String> = Vec::new();
    for snapshot in &snapshots {
        makers.push(match publishers.get(snapshot) {
            Some(request) => format!("request {request} (snapshot {snapshot})"),
            None => format!("a commit that no request made (snapshot {snapshot})"),
        });
    }
    let rule = found.first().map_or("", |obstacle| obstacle.rule.as_str());
    let text = format!("request {} cannot be taken back by itself: {rule}, by {}", row.id, makers.join(", "));
    let witnesses = found.iter().map(|Obstacle { snapshot, place, rule }| {
        json!({ "snapshot": snapshot, "request": publishers.get(snapshot), "place": place, "rule": rule })
    });
    Ok(UserError::new(ReasonCode::RevertImpossible, text).with_witnesses(witnesses.collect()))
}
