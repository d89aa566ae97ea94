//! The outbox: what happened, for people and hooks. Append only, written in the transaction of what it
//! tells, so that nothing is told that did not happen and nothing that happened is left out.

use mergeberg_kernel::ids::{RequestId, TableName};
use serde::Serialize;

use super::Ledger;
use super::apply::BATCH_ROWS;
use super::decode::{Fields, opt_to_json, words};
use super::error::LedgerError;
use super::rows::RequestRow;
use crate::database::{QueryBuilder, Transaction, query};

words! {
    EventKind {
        Enqueued = "enqueued",
        /// Back in the queue through no fault of its own.
        Requeued = "requeued",
        Held = "held",
        InReview = "in-review",
        /// Nobody knows whether the landing was applied; the table is held.
        OutcomeUnknown = "outcome-unknown",
        Landed = "landed",
        AlreadyPublished = "already-published",
        Refused = "refused",
        Withdrawn = "withdrawn",
        Cancelled = "cancelled",
        ReviewOpened = "review-opened",
        ReviewApproved = "review-approved",
        ReviewRejected = "review-rejected",
        /// What was under review changed; a new item takes its place.
        ReviewLapsed = "review-lapsed",
        StructureAccepted = "structure-accepted",
        /// A foreign commit on a target that is proven to change no data.
        Maintenance = "maintenance",
        /// A foreign commit on a target.
        Bypass = "bypass",
        HeadAdopted = "head-adopted",
        /// An operator took a table over from another queue.
        TableClaimed = "table-claimed",
        LeaderChanged = "leader-changed",
        /// A request's row cannot be read; the queue goes on without it.
        Unreadable = "unreadable",
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EventRow {
    pub id: i64,
    pub at_ms: i64,
    pub kind: EventKind,
    pub request: Option<RequestId>,
    pub table: Option<TableName>,
    /// One sentence.
    pub text: String,
    pub data: Option<serde_json::Value>,
}

impl Ledger {
    /// Events after `id`, oldest first. Ids grow in the order of commits, since writers take turns.
    pub async fn events_since(&self, id: i64, limit: u32) -> Result<Vec<EventRow>, LedgerError> {
        let rows = query("SELECT * FROM event WHERE id > $1 ORDER BY id LIMIT $2")
            .bind(id)
            .bind(limit)
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| {
                let f = Fields::new("event", "id", row);
                let table = match f.get::<Option<String>>("table_name")? {
                    None => None,
                    Some(_) => Some(f.table_name()?),
                };
                Ok(EventRow {
                    id: f.int("id")?,
                    at_ms: f.int("at_ms")?,
                    kind: f.word("kind", EventKind::from_word)?,
                    request: f.get::<Option<i64>>("request")?.map(RequestId),
                    table,
                    text: f.text("text")?,
                    data: f.opt_json("data")?,
                })
            })
            .collect()
    }
}

pub(super) struct NewEvent {
    pub kind: EventKind,
    pub request: Option<RequestId>,
    pub table: Option<TableName>,
    pub text: String,
    pub data: Option<serde_json::Value>,
}

impl NewEvent {
    pub fn of_request(kind: EventKind, row: &RequestRow) -> Self {
        Self { kind, request: Some(row.id), table: Some(row.table.clone()), text: String::new(), data: None }
    }

    pub fn of_table(kind: EventKind, table: &TableName, text: String) -> Self {
        Self { kind, request: None, table: Some(table.clone()), text, data: None }
    }
}

pub(super) async fn append(
    conn: &mut Transaction,
    events: &[NewEvent],
    now_ms: i64,
) -> Result<(), LedgerError> {
    for batch in events.chunks(BATCH_ROWS) {
        let mut data = Vec::with_capacity(batch.len());
        for event in batch {
            data.push(opt_to_json(event.data.as_ref())?);
        }
        let mut query =
            QueryBuilder::new("INSERT INTO event (at_ms, kind, request, table_name, text, data) ");
        query.push_values(batch.iter().zip(&data), |mut values, (event, data)| {
            values
                .push_bind(now_ms)
                .push_bind(event.kind.word())
                .push_bind(event.request.map(|id| id.0))
                .push_bind(event.table.as_ref().map(TableName::to_string))
                .push_bind(event.text.as_str())
                .push_bind(data.as_deref());
        });
        query.build().execute(&mut *conn).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, enqueue, on_each_database};
    use super::*;

    on_each_database! {
        events_are_read_on_from_the_last_one_seen,
        attempts_and_events_are_append_only,
    }

    async fn events_are_read_on_from_the_last_one_seen(home: &Home) {
        let ledger = home.ledger().await;
        let one = enqueue(&ledger, "ingest/a", 1).await;
        let two = enqueue(&ledger, "ingest/b", 2).await;
        let first = ledger.events_since(0, 1).await.unwrap();
        assert_eq!((first[0].kind, first[0].request), (EventKind::Enqueued, Some(one)));
        assert!(first[0].text.contains("ingest/a -> main of nyc.flights"), "{}", first[0].text);
        let rest = ledger.events_since(first[0].id, 10).await.unwrap();
        assert_eq!(rest.iter().map(|event| event.request).collect::<Vec<_>>(), [Some(two)]);
    }

    async fn attempts_and_events_are_append_only(home: &Home) {
        let ledger = home.ledger().await;
        enqueue(&ledger, "ingest/a", 1).await;
        for sql in ["UPDATE event SET text = 'x'", "UPDATE merge_attempt SET state = 'landed'"] {
            let mut tx = ledger.begin().await.unwrap();
            let error = query(sql).execute(&mut tx).await.unwrap_err();
            assert!(error.to_string().contains("append only"), "{error}");
        }
    }
}
