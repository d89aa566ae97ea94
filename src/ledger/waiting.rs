//! What admission looks at, without the rows that cannot be read (case O36).
//!
//! A row that no release wrote is a matter of its own request: it is told to people once, and the others of
//! its lane go on. Only reading for the queue is lenient; looking at the request shows the error.

use mergeberg_kernel::ids::{RefName, RequestId, TableUuid};

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::rows::RequestRow;
use crate::database::{Row, query};

/// Waiting requests that one tick looks at, oldest first; the others are seen when these have moved on.
const MAX_WAITING: i64 = 5_000;
/// What waits on a target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiting {
    pub rows: Vec<RequestRow>,
    pub unreadable: Vec<Unreadable>,
}

/// A row that no release wrote; it needs a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    pub request: RequestId,
    /// Names table, row and column.
    pub error: String,
}

impl Ledger {
    /// What admission may take, in arrival order: queued, held and in review, at most 5,000. A row that cannot
    /// be read does not stop the others (case O36): it is given apart. The parts of a set arrived with its first one, on
    /// every table.
    pub async fn waiting(&self, table_uuid: &TableUuid, target: &RefName) -> Result<Waiting, LedgerError> {
        // Told by the states that are past admission, so that a word which no release wrote comes to light.
        let rows = query(
            "SELECT * FROM merge_request
             WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
               AND state NOT IN ('planning', 'staged', 'checking', 'landing', 'unknown')
             ORDER BY COALESCE(set_id, id), id LIMIT $3",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .bind(MAX_WAITING)
        .fetch_all(&self.readers)
        .await?;
        readable(&rows)
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
