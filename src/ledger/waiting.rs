//! What admission looks at, without the rows that cannot be read (case O36).
//!
//! A row that no release wrote is a matter of its own request: it is told to people once, and the others of
//! its lane go on. Only reading for the queue is lenient; looking at the request shows the error.

use std::collections::HashMap;

use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableUuid};

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::rows::RequestRow;
use crate::database::{Row, Sql, query};

/// Waiting requests that are read at once, oldest first; the others are seen when these have moved on.
pub const MAX_WAITING: u32 = 5_000;

/// What waits on a target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiting {
    pub rows: Vec<RequestRow>,
    pub unreadable: Vec<Unreadable>,
    /// More wait behind these.
    pub more: bool,
}

/// Which of those who wait are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// So many of each class, oldest first: a train needs no more, and thousands may wait.
    pub of_each_class: u32,
    /// None that came after this one.
    pub until: Option<RequestId>,
}

impl Depth {
    pub const ALL: Self = Self { of_each_class: MAX_WAITING, until: None };
}

/// A waiting request whose snapshots refs may have to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub id: RequestId,
    pub source: RefName,
    pub pinned: SnapshotId,
    pub enqueued_at_ms: i64,
}

/// A row that no release wrote; it needs a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    pub request: RequestId,
    /// Names table, row and column.
    pub error: String,
}

/// From class to class by an index, and of each only those that are asked for: what waits behind them is not looked at.
/// SQLite is told which index, since it does not know how long the queue is.
///
/// Who may be taken is told by the states that are past admission, so that a word which no release wrote comes to light.
const FIRST_OF_EACH_CLASS: Sql = Sql::of_each(
    "WITH RECURSIVE classes (class) AS (
         SELECT MIN(class) FROM merge_request INDEXED BY merge_request_class
             WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
         UNION ALL
         SELECT (SELECT MIN(class) FROM merge_request INDEXED BY merge_request_class
                 WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL AND class > classes.class)
         FROM classes WHERE classes.class IS NOT NULL)
     SELECT merge_request.* FROM classes JOIN merge_request ON merge_request.id IN (
         SELECT id FROM merge_request AS placed INDEXED BY merge_request_class
         WHERE table_uuid = $1 AND target = $2 AND class = classes.class AND ended_at_ms IS NULL
           AND state NOT IN ('planning', 'staged', 'checking', 'landing', 'unknown') AND +id <= $3
         ORDER BY COALESCE(set_id, id), id LIMIT $4)
     ORDER BY COALESCE(set_id, id), id LIMIT $5",
    "WITH RECURSIVE classes (class) AS (
         SELECT MIN(class) FROM merge_request WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
         UNION ALL
         SELECT (SELECT MIN(class) FROM merge_request
                 WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL AND class > classes.class)
         FROM classes WHERE classes.class IS NOT NULL)
     SELECT placed.* FROM classes CROSS JOIN LATERAL (
         SELECT * FROM merge_request
         WHERE table_uuid = $1 AND target = $2 AND class = classes.class AND ended_at_ms IS NULL
           AND state NOT IN ('planning', 'staged', 'checking', 'landing', 'unknown') AND id <= $3
         ORDER BY COALESCE(set_id, id), id LIMIT $4) AS placed
     ORDER BY COALESCE(set_id, id), id LIMIT $5",
);

impl Ledger {
    /// What admission may take, in arrival order: queued, held and in review, at most 5,000. A row that cannot
    /// be read does not stop the others (case O36): it is given apart. The parts of a set arrived with its first one, on
    /// every table.
    pub async fn waiting(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
        depth: Depth,
    ) -> Result<Waiting, LedgerError> {
        let rows = query(FIRST_OF_EACH_CLASS)
            .bind(table_uuid.as_str())
            .bind(target.as_str())
            .bind(depth.until.map_or(i64::MAX, |id| id.0))
            // One more of each class tells whether more wait.
            .bind(i64::from(depth.of_each_class) + 1)
            .bind(i64::from(MAX_WAITING) + 1)
            .fetch_all(&self.readers)
            .await?;
        let mut waiting = readable(&rows)?;
        let mut of_class: HashMap<String, u32> = HashMap::new();
        let mut read = 0;
        waiting.rows.retain(|row| {
            let place = of_class.entry(row.class.clone()).or_default();
            (*place, read) = (*place + 1, read + 1);
            let kept = *place <= depth.of_each_class && read <= MAX_WAITING;
            waiting.more |= !kept;
            kept
        });
        Ok(waiting)
    }

    /// The newest request that was enqueued, whatever became of it.
    pub async fn newest_request(&self) -> Result<Option<RequestId>, LedgerError> {
        let id: Option<i64> = query("SELECT MAX(id) FROM merge_request").scalar(&self.readers).await?;
        Ok(id.map(RequestId))
    }

    /// Waiting requests of a target that were enqueued before a time, and those whose source is in a namespace
    /// (`prefix`), whenever they were; at most 5,000, oldest first.
    pub async fn to_keep(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
        before_ms: i64,
        prefix: &str,
    ) -> Result<Vec<Kept>, LedgerError> {
        let rows = query(
            "SELECT id, source, pinned, enqueued_at_ms FROM merge_request
             WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
               AND state NOT IN ('planning', 'staged', 'checking', 'landing', 'unknown')
               AND (enqueued_at_ms <= $3 OR substr(source, 1, CAST($4 AS INTEGER)) = $5)
             ORDER BY id LIMIT $6",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .bind(before_ms)
        .bind(i64::try_from(prefix.chars().count()).unwrap_or(i64::MAX))
        .bind(prefix)
        .bind(i64::from(MAX_WAITING))
        .fetch_all(&self.readers)
        .await?;
        let mut kept = Vec::with_capacity(rows.len());
        for row in &rows {
            let f = Fields::new("merge_request", "id", row);
            let row = Kept {
                id: RequestId(f.int("id")?),
                source: RefName(f.text("source")?),
                pinned: f.snapshot("pinned")?,
                enqueued_at_ms: f.int("enqueued_at_ms")?,
            };
            kept.push(row);
        }
        Ok(kept)
    }

    /// Writes down that rows cannot be read, each once: in the outbox for people, and in the log.
    pub async fn tell_unreadable(&self, rows: &[Unreadable], now_ms: i64) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        for Unreadable { request, error } in rows {
            let told: Option<i64> = query("SELECT id FROM event WHERE kind = $1 AND request = $2 LIMIT 1")
                .bind(EventKind::Unreadable.word())
                .bind(request.0)
                .optional_scalar(&mut tx)
                .await?;
            if told.is_some() {
                continue;
            }
            tracing::error!(request = %request, "left out of the queue: {error}");
            let event = NewEvent {
                kind: EventKind::Unreadable,
                request: Some(*request),
                table: None,
                text: format!("request {request} is left out of the queue: {error}"),
                data: None,
            };
            append(&mut tx, &[event], now_ms).await?;
        }
        tx.commit().await?;
        Ok(())
    }
}

/// Separates the rows that can be read from those that cannot. Any other error is nobody's row.
pub(super) fn readable(rows: &[Row]) -> Result<Waiting, LedgerError> {
    let mut waiting = Waiting::default();
    for row in rows {
        match RequestRow::decode(row) {
            Ok(row) => waiting.rows.push(row),
            Err(error @ LedgerError::Row { .. }) => {
                let request = RequestId(Fields::new("merge_request", "id", row).int("id")?);
                waiting.unreadable.push(Unreadable { request, error: error.to_string() });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(waiting)
}
