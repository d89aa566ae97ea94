//! Sets: several tables as one request. Each part is a request of its own row; what must hold of them together is kept
//! here, by transactions: they are enqueued together, and when one of them ends without landing, all do.

use std::collections::BTreeSet;

use mergeberg_kernel::ids::{RefName, RequestId, TableName, TableUuid};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde::Serialize;
use serde_json::{Value, json};

use super::decode::Fields;
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::requests::{NewRequest, insert};
use super::reverts::Reverts;
use super::rows::RequestRow;
use super::waiting::readable;
use super::{Ledger, wake};
use crate::database::{Transaction, query};

/// What a request says of its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct InSet {
    /// Id of the set's first part.
    pub id: RequestId,
    pub parts: u32,
}

impl InSet {
    /// Two columns that are one fact.
    pub(super) fn decode(f: &Fields<'_>) -> Result<Option<Self>, LedgerError> {
        let (id, parts): (Option<i64>, Option<i64>) = (f.get("set_id")?, f.get("set_parts")?);
        match (id, parts.map(u32::try_from)) {
            (None, None) => Ok(None),
            (Some(id), Some(Ok(parts))) if parts > 1 => Ok(Some(Self { id: RequestId(id), parts })),
            (id, _) => Err(f.wrong(format!("set_id {id:?} does not go with set_parts {parts:?}"))),
        }
    }
}

/// What became of an enqueue of a set: its parts, in the order in which they were named.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum EnqueuedSet {
    New(Vec<RequestRow>),
    /// The same set was enqueued before, perhaps it has ended.
    Existing(Vec<RequestRow>),
    /// The idempotency key belongs to this other request.
    KeyConflict(Box<RequestRow>),
    /// A part of what is to be taken back is being taken back already, by this open request.
    RevertedElsewhere(Box<RequestRow>),
}

/// A set that has not ended: its lanes, by table uuid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenSet {
    pub id: RequestId,
    pub lanes: Vec<(TableName, TableUuid, RefName)>,
}

impl Ledger {
    /// Appends a set, unless it is there: all parts and the key in one transaction. The key is written with the first
    /// part.
    pub async fn enqueue_set(
        &self,
        parts: &[NewRequest],
        key: Option<&str>,
        now_ms: i64,
    ) -> Result<EnqueuedSet, LedgerError> {
        let mut tx = self.begin().await?;
        if let Some(there) = existing(&mut tx, parts, key).await? {
            return Ok(there);
        }
        write(tx, parts.iter().map(|part| (part, None)).collect(), key, now_ms).await
    }

    /// Appends the set that takes back a landed one, each part with what it takes back. The same key is the same
    /// set, and so is an open one that takes back the same requests, whatever branches it was written to.
    pub async fn enqueue_set_revert(
        &self,
        parts: &[(NewRequest, Reverts)],
        key: Option<&str>,
        now_ms: i64,
    ) -> Result<EnqueuedSet, LedgerError> {
        let mut tx = self.begin().await?;
        let reverted: BTreeSet<RequestId> = parts.iter().map(|(_, reverts)| reverts.request).collect();
        if let Some(there) = existing_revert(&mut tx, &reverted, key).await? {
            return Ok(there);
        }
        write(tx, parts.iter().map(|(part, reverts)| (part, Some(reverts))).collect(), key, now_ms).await
    }

    /// The set that takes back these requests, if it was enqueued before: as [`Ledger::enqueue_set_revert`] would find.
    pub async fn set_revert_of(
        &self,
        reverted: &BTreeSet<RequestId>,
        key: Option<&str>,
    ) -> Result<Option<EnqueuedSet>, LedgerError> {
        let mut tx = self.reading().await?;
        existing_revert(&mut tx, reverted, key).await
    }

    /// The parts of a set, in the order in which they were named, without rows that cannot be read (case O36): each says how
    /// many they are.
    pub async fn parts(&self, set: RequestId) -> Result<Vec<RequestRow>, LedgerError> {
        let mut tx = self.reading().await?;
        parts_of(&mut tx, set).await
    }

    /// Sets that have not ended, in arrival order; each with its lanes by table uuid.
    pub async fn open_sets(&self) -> Result<Vec<OpenSet>, LedgerError> {
        let rows = query(
            "SELECT set_id, table_name, table_uuid, target FROM merge_request
             WHERE set_id IS NOT NULL AND ended_at_ms IS NULL ORDER BY set_id, table_uuid",
        )
        .fetch_all(&self.readers)
        .await?;
        let mut sets: Vec<OpenSet> = Vec::new();
        for row in &rows {
            let f = Fields::new("merge_request", "set_id", row);
            let id = RequestId(f.int("set_id")?);
            let lane = match (f.table_name(), f.table_uuid(), f.target()) {
                (Ok(table), Ok(uuid), Ok(target)) => (table, uuid, target),
                // Its table is no lane (case O36); the set waits for a person.
                (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => {
                    tracing::error!(set = %id, "a part of a set is left out: {error}");
                    continue;
                }
            };
            match sets.last_mut() {
                Some(set) if set.id == id => set.lanes.push(lane),
                _ => sets.push(OpenSet { id, lanes: vec![lane] }),
            }
        }
        Ok(sets)
    }
}

/// Writes the parts of a set that is not there, and commits.
async fn write(
    mut tx: Transaction,
    parts: Vec<(&NewRequest, Option<&Reverts>)>,
    key: Option<&str>,
    now_ms: i64,
) -> Result<EnqueuedSet, LedgerError> {
    let mut rows = Vec::with_capacity(parts.len());
    for (at, (part, reverts)) in parts.into_iter().enumerate() {
        let idempotency_key = key.filter(|_| at == 0).map(str::to_owned);
        let part = NewRequest { idempotency_key, ..part.clone() };
        rows.push(insert(&mut tx, &part, reverts, now_ms).await?);
    }
    let Some(id) = rows.first().map(|row| row.id) else {
        return Err(LedgerError::NotASet("it has no parts"));
    };
    let set = InSet { id, parts: u32::try_from(rows.len()).unwrap_or(u32::MAX) };
    if set.parts < 2 {
        return Err(LedgerError::NotASet("it has one part"));
    }
    let mut events = Vec::with_capacity(rows.len());
    for row in &mut rows {
        query("UPDATE merge_request SET set_id = $1, set_parts = $2 WHERE id = $3")
            .bind(set.id.0)
            .bind(i64::from(set.parts))
            .bind(row.id.0)
            .execute(&mut tx)
            .await?;
        row.set = Some(set);
        let mut text = format!("{} enqueued by {}, a part of set {}", row.describe(), row.principal, set.id);
        if let Some(reverts) = &row.reverts {
            text.push_str(&reverts.in_words());
        }
        events.push(NewEvent { text, ..NewEvent::of_request(EventKind::Enqueued, row) });
    }
    append(&mut tx, &events, now_ms).await?;
    wake(&mut tx).await?;
    tx.commit().await?;
    Ok(EnqueuedSet::New(rows))
}

/// The set that the key, or an open revert of one of these requests, names.
async fn existing_revert(
    conn: &mut Transaction,
    reverted: &BTreeSet<RequestId>,
    key: Option<&str>,
) -> Result<Option<EnqueuedSet>, LedgerError> {
    let mut found = None;
    if let Some(key) = key {
        let sql = "SELECT * FROM merge_request WHERE idempotency_key = $1";
        found = query(sql).bind(key).fetch_optional(&mut *conn).await?;
    }
    // A key is asked for alone, as that of any request.
    for request in reverted.iter().filter(|_| key.is_none()) {
        let sql =
            "SELECT * FROM merge_request WHERE reverts = $1 AND ended_at_ms IS NULL ORDER BY id LIMIT 1";
        found = query(sql).bind(request.0).fetch_optional(&mut *conn).await?;
        if found.is_some() {
            break;
        }
    }
    let Some(found) = found else { return Ok(None) };
    let row = RequestRow::decode(&found)?;
    if let Some(set) = row.set {
        let rows = parts_of(conn, set.id).await?;
        let there: BTreeSet<RequestId> =
            rows.iter().filter_map(|row| Some(row.reverts.as_ref()?.request)).collect();
        if rows.len() == there.len() && there == *reverted {
            return Ok(Some(EnqueuedSet::Existing(rows)));
        }
    }
    let row = Box::new(row);
    Ok(Some(if key.is_some() { EnqueuedSet::KeyConflict(row) } else { EnqueuedSet::RevertedElsewhere(row) }))
}

/// The set that the key, or an open set that the same sources, names.
async fn existing(
    conn: &mut Transaction,
    parts: &[NewRequest],
    key: Option<&str>,
) -> Result<Option<EnqueuedSet>, LedgerError> {
    let first = match (key, parts.first()) {
        (Some(key), _) => {
            let sql = "SELECT * FROM merge_request WHERE idempotency_key = $1";
            query(sql).bind(key).fetch_optional(&mut *conn).await?
        }
        (None, Some(part)) => {
            query(
                "SELECT * FROM merge_request
                 WHERE table_uuid = $1 AND target = $2 AND source = $3 AND pinned = $4
                   AND set_id IS NOT NULL AND ended_at_ms IS NULL
                 ORDER BY id LIMIT 1",
            )
            .bind(part.table_uuid.as_str())
            .bind(part.target.as_str())
            .bind(part.source.as_str())
            .bind(part.pinned.0)
            .fetch_optional(&mut *conn)
            .await?
        }
        (None, None) => None,
    };
    let Some(first) = first else { return Ok(None) };
    let row = RequestRow::decode(&first)?;
    let rows = match row.set {
        Some(set) => parts_of(conn, set.id).await?,
        None => vec![row.clone()],
    };
    if is_same(&rows, parts) {
        return Ok(Some(EnqueuedSet::Existing(rows)));
    }
    // Without a key another set may share a part with this one; each lands or is found published.
    Ok(key.map(|_| EnqueuedSet::KeyConflict(Box::new(row))))
}

/// The same publications, in whatever order they were named.
fn is_same(rows: &[RequestRow], parts: &[NewRequest]) -> bool {
    let there: BTreeSet<_> =
        rows.iter().map(|row| (&row.table_uuid, &row.source, &row.target, row.pinned)).collect();
    let asked: BTreeSet<_> =
        parts.iter().map(|part| (&part.table_uuid, &part.source, &part.target, part.pinned)).collect();
    there == asked
}

/// Without rows that cannot be read.
pub(super) async fn parts_of(conn: &mut Transaction, set: RequestId) -> Result<Vec<RequestRow>, LedgerError> {
    let sql = "SELECT * FROM merge_request WHERE set_id = $1 ORDER BY id";
    let rows = query(sql).bind(set.0).fetch_all(&mut *conn).await?;
    Ok(readable(&rows)?.rows)
}

/// The parts that end because others of their set have ended, each with why.
pub(super) async fn ending_with(
    conn: &mut Transaction,
    ended: &[RequestRow],
) -> Result<Vec<(RequestId, SetEnd)>, LedgerError> {
    let mut ending: Vec<(RequestId, SetEnd)> = Vec::new();
    for row in ended {
        let Some((set, end)) = row.set.zip(end_for_others(row)) else { continue };
        for other in parts_of(conn, set.id).await? {
            if !other.state.is_final() && ending.iter().all(|(id, _)| *id != other.id) {
                ending.push((other.id, end.clone()));
            }
        }
    }
    Ok(ending)
}

/// A part's end that takes the others with it.
#[derive(Clone)]
pub(super) struct SetEnd {
    pub event: RequestEvent,
    pub detail: Value,
}

/// What the end of this part means for those that have not ended; `None`: nothing.
fn end_for_others(row: &RequestRow) -> Option<SetEnd> {
    row.set?;
    let because = |word: &str| {
        json!({
            "text": format!("request {}, the part on {}, was {word}", row.id, row.table),
            "part": row.id,
            "detail": row.detail,
        })
    };
    let word = row.state.word();
    match row.state {
        RequestState::Refused(ReasonCode::SetPartFailed) => None,
        RequestState::Refused(code) | RequestState::Withdrawn(code) => Some(SetEnd {
            event: RequestEvent::Refuse(ReasonCode::SetPartFailed),
            detail: because(&format!("{word}({code})")),
        }),
        RequestState::Cancelled => {
            Some(SetEnd { event: RequestEvent::Cancel, detail: row.detail.clone().unwrap_or(Value::Null) })
        }
        // Both are written for all parts at once.
        RequestState::Landed | RequestState::AlreadyPublished => None,
        _ => None,
    }
}
