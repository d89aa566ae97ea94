//! Events on requests: the kernel says which state follows, this writes it, for a whole train at once.
//!
//! A train of fifty takes five statements whatever its length, since each statement is a trip to the
//! connection's thread.

use std::collections::{BTreeMap, BTreeSet};

use mergeberg_kernel::ids::{Epoch, RequestId, SnapshotId, TrainId};
use mergeberg_kernel::state::{RequestEvent, RequestState};

use super::Ledger;
use super::decode::{opt_to_json, to_json};
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::leader::fence;
use super::rows::RequestRow;
use super::sets::ending_with;
use crate::database::{QueryBuilder, Transaction};

/// Rows of one statement: SQLite takes 32,766 values.
pub(super) const BATCH_ROWS: usize = 1_000;

/// One event on one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub request: RequestId,
    pub event: RequestEvent,
    /// The train that it enters or that did this to it; kept when `None`.
    pub train: Option<TrainId>,
    /// Kept when `None`.
    pub classification: Option<String>,
    /// Belongs to the state entered; a new state without one clears it (the log keeps the old).
    pub detail: Option<serde_json::Value>,
}

impl Change {
    pub fn new(request: RequestId, event: RequestEvent) -> Self {
        Self { request, event, train: None, classification: None, detail: None }
    }
}

impl Ledger {
    /// Applies all changes in one transaction, or none. With an epoch it is only done while that epoch
    /// leads. A request may be named more than once: events are taken in order.
    ///
    /// An event that leaves the state as it is (held again for the same reason, requeued while queued)
    /// leaves no attempt and no event behind, since a tick may run twice; its detail still replaces the old.
    ///
    /// A request with an open intent is refused here: see [`Ledger::settle_landed`].
    ///
    /// Returns the rows after the changes, each request once, in the order of their first change.
    pub async fn apply(
        &self,
        epoch: Option<Epoch>,
        changes: &[Change],
        now_ms: i64,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        // What a leader has not ended, it or its successor plans again.
        let progress = epoch.is_some() && changes.iter().all(|change| !ends(change.event));
        let mut tx = if progress { self.begin_progress().await? } else { self.begin().await? };
        if let Some(epoch) = epoch {
            fence(&mut tx, epoch).await?;
        }
        let rows = take(&mut tx, &steps_of(changes)?, now_ms).await?;
        tx.commit().await?;
        Ok(rows)
    }
}

/// The changes as steps. What goes through an intent has no other door.
pub(super) fn steps_of(changes: &[Change]) -> Result<Vec<Step<'_>>, LedgerError> {
    let mut steps = Vec::with_capacity(changes.len());
    for Change { request, event, train, classification, detail } in changes {
        if matches!(event, RequestEvent::WriteIntent | RequestEvent::LoseAnswer | RequestEvent::Land) {
            return Err(LedgerError::NeedsIntent { request: *request });
        }
        steps.push(Step {
            request: *request,
            event: *event,
            train: train.as_ref(),
            classification: classification.as_deref(),
            detail: detail.as_ref(),
            landed: None,
            by_intent: false,
        });
    }
    Ok(steps)
}

/// May this event end a request?
fn ends(event: RequestEvent) -> bool {
    match event {
        RequestEvent::Admit
        | RequestEvent::Stage
        | RequestEvent::Check
        | RequestEvent::Hold(_)
        | RequestEvent::Requeue
        | RequestEvent::AskReview
        | RequestEvent::WriteIntent
        | RequestEvent::LoseAnswer => false,
        RequestEvent::Land
        | RequestEvent::FindPublished
        | RequestEvent::Refuse(_)
        | RequestEvent::Withdraw(_)
        | RequestEvent::Cancel => true,
    }
}

/// What becomes of a request that does not go on with its train. One that was cancelled meanwhile stays cancelled.
fn gives_back(event: RequestEvent) -> bool {
    match event {
        RequestEvent::Hold(_)
        | RequestEvent::Requeue
        | RequestEvent::Refuse(_)
        | RequestEvent::Withdraw(_)
        | RequestEvent::AskReview => true,
        RequestEvent::Admit
        | RequestEvent::Stage
        | RequestEvent::Check
        | RequestEvent::WriteIntent
        | RequestEvent::LoseAnswer
        | RequestEvent::Land
        | RequestEvent::FindPublished
        | RequestEvent::Cancel => false,
    }
}

/// A change as the other modules of the ledger make it.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub request: RequestId,
    pub event: RequestEvent,
    pub train: Option<&'a TrainId>,
    pub classification: Option<&'a str>,
    pub detail: Option<&'a serde_json::Value>,
    pub landed: Option<SnapshotId>,
    /// Part of writing or settling a landing intent.
    pub by_intent: bool,
}

impl Step<'_> {
    pub fn new(request: RequestId, event: RequestEvent) -> Self {
        Self {
            request,
            event,
            train: None,
            classification: None,
            detail: None,
            landed: None,
            by_intent: false,
        }
    }
}

/// Takes the steps inside the caller's transaction. A part of a set that ends without landing ends the others.
pub(super) async fn take(
    conn: &mut Transaction,
    steps: &[Step<'_>],
    now_ms: i64,
) -> Result<Vec<RequestRow>, LedgerError> {
    let rows = take_each(conn, steps, now_ms).await?;
    let ending = ending_with(conn, &rows).await?;
    if !ending.is_empty() {
        let steps: Vec<Step<'_>> = ending
            .iter()
            .map(|(request, end)| Step { detail: Some(&end.detail), ..Step::new(*request, end.event) })
            .collect();
        take_each(conn, &steps, now_ms).await?;
    }
    Ok(rows)
}

async fn take_each(
    conn: &mut Transaction,
    steps: &[Step<'_>],
    now_ms: i64,
) -> Result<Vec<RequestRow>, LedgerError> {
    let mut order = Vec::with_capacity(steps.len());
    let mut seen = BTreeSet::new();
    for step in steps {
        if seen.insert(step.request) {
            order.push(step.request);
        }
    }
    let mut rows = load(conn, &order).await?;
    let mut touched = BTreeSet::new();
    let mut attempts = Vec::with_capacity(steps.len());
    let mut events = Vec::new();
    for step in steps {
        let row = rows.get_mut(&step.request).ok_or(LedgerError::NoSuchRequest(step.request))?;
        if row.state == RequestState::Cancelled && gives_back(step.event) {
            // A person's word came first, and there is nothing to give back any more.
            continue;
        }
        if !step.by_intent && matches!(row.state, RequestState::Landing | RequestState::Unknown) {
            return Err(LedgerError::BoundToIntent { request: row.id, state: row.state });
        }
        let next = row
            .state
            .after(step.event)
            .map_err(|error| LedgerError::Transition { request: step.request, error })?;
        if let Some(classification) = step.classification
            && row.classification.as_deref() != Some(classification)
        {
            row.classification = Some(classification.to_owned());
            touched.insert(row.id);
        }
        if next == row.state {
            if step.detail.is_some() && row.detail.as_ref() != step.detail {
                row.detail = step.detail.cloned();
                touched.insert(row.id);
            }
            continue;
        }
        touched.insert(row.id);
        let train = step.train.cloned().or(row.train.take());
        row.state = next;
        row.detail = step.detail.cloned();
        row.train = if next.is_waiting() { None } else { train.clone() };
        if step.landed.is_some() {
            row.landed_snapshot = step.landed;
        }
        if step.event == RequestEvent::Admit {
            row.attempts = row.attempts.saturating_add(1);
            row.admitted_at_ms = Some(now_ms);
        }
        if next.is_final() {
            row.ended_at_ms = Some(now_ms);
        }
        attempts.push((row.id, train, next, opt_to_json(step.detail)?));
        if let Some(event) = event_of(row) {
            events.push(event);
        }
    }
    let changed: Vec<&RequestRow> = rows.values().filter(|row| touched.contains(&row.id)).collect();
    update(conn, &changed).await?;
    for batch in attempts.chunks(BATCH_ROWS) {
        let mut query =
            QueryBuilder::new("INSERT INTO merge_attempt (request, train, at_ms, state, reason, detail) ");
        query.push_values(batch, |mut values, (request, train, state, detail)| {
            values
                .push_bind(request.0)
                .push_bind(train.as_ref().map(TrainId::as_str))
                .push_bind(now_ms)
                .push_bind(state.word())
                .push_bind(state.reason().map(|reason| reason.code()))
                .push_bind(detail.as_deref());
        });
        query.build().execute(&mut *conn).await?;
    }
    append(conn, &events, now_ms).await?;
    Ok(order.iter().filter_map(|id| rows.remove(id)).collect())
}

async fn load(
    conn: &mut Transaction,
    ids: &[RequestId],
) -> Result<BTreeMap<RequestId, RequestRow>, LedgerError> {
    let mut rows = BTreeMap::new();
    for batch in ids.chunks(BATCH_ROWS) {
        let mut query = QueryBuilder::new("SELECT * FROM merge_request WHERE id IN (");
        let mut list = query.separated(", ");
        for id in batch {
            list.push_bind(id.0);
        }
        query.push(")");
        for row in &query.build().fetch_all(&mut *conn).await? {
            let row = RequestRow::decode(row)?;
            rows.insert(row.id, row);
        }
    }
    Ok(rows)
}

async fn update(conn: &mut Transaction, rows: &[&RequestRow]) -> Result<(), LedgerError> {
    for batch in rows.chunks(BATCH_ROWS) {
        let mut details = Vec::with_capacity(batch.len());
        for row in batch {
            details.push(row.detail.as_ref().map(to_json).transpose()?);
        }
        let mut query = QueryBuilder::new(
            "WITH change (id, state, reason, classification, admitted_at_ms, ended_at_ms, attempts, train,
                 landed_snapshot, detail) AS (",
        );
        query.push_values(batch.iter().zip(&details), |mut values, (row, detail)| {
            values
                .push_bind(row.id.0)
                .push_bind(row.state.word())
                .push_bind(row.state.reason().map(|reason| reason.code()))
                .push_bind(row.classification.as_deref())
                .push_bind(row.admitted_at_ms)
                .push_bind(row.ended_at_ms)
                .push_bind(row.attempts)
                .push_bind(row.train.as_ref().map(TrainId::as_str))
                .push_bind(row.landed_snapshot.map(|id| id.0))
                .push_bind(detail.as_deref());
        });
        query.push(
            ") UPDATE merge_request
               SET state = change.state, reason = change.reason, classification = change.classification,
                   admitted_at_ms = change.admitted_at_ms, ended_at_ms = change.ended_at_ms,
                   attempts = change.attempts, train = change.train,
                   landed_snapshot = change.landed_snapshot, detail = change.detail
               FROM change WHERE merge_request.id = change.id",
        );
        query.build().execute(&mut *conn).await?;
    }
    Ok(())
}

/// What the outbox tells of a state entered. The steps inside a train are in the attempts only.
fn event_of(row: &RequestRow) -> Option<NewEvent> {
    let kind = match row.state {
        RequestState::Planning | RequestState::Staged | RequestState::Checking | RequestState::Landing => {
            return None;
        }
        RequestState::Queued => EventKind::Requeued,
        RequestState::Held(_) => EventKind::Held,
        RequestState::Unknown => EventKind::OutcomeUnknown,
        RequestState::InReview => EventKind::InReview,
        RequestState::Landed => EventKind::Landed,
        RequestState::AlreadyPublished => EventKind::AlreadyPublished,
        RequestState::Refused(_) => EventKind::Refused,
        RequestState::Withdrawn(_) => EventKind::Withdrawn,
        RequestState::Cancelled => EventKind::Cancelled,
    };
    let mut text = format!("{} is {}", row.describe(), row.state);
    if let Some(reason) = row.state.reason() {
        text.push_str(": ");
        text.push_str(reason.meaning());
    }
    let data = serde_json::json!({
        "state": row.state.word(),
        "reason": row.state.reason(),
        "train": row.train,
        "snapshot-id": row.landed_snapshot,
        "detail": row.detail,
    });
    Some(NewEvent { text, data: Some(data), ..NewEvent::of_request(kind, row) })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use mergeberg_kernel::reason::ReasonCode;
    use serde_json::json;

    use super::super::testing::{Home, enqueue, on_each_database, succeed};
    use super::*;

    on_each_database! {
        a_train_is_admitted_staged_and_checked,
        one_wrong_event_undoes_the_whole_train,
        holding_twice_for_one_reason_leaves_one_attempt,
        landing_has_no_other_door_than_its_intent,
        a_lost_epoch_writes_nothing,
        every_final_state_says_when_and_is_told,
        fifty_requests_are_one_small_transaction,
    }

    fn change(request: RequestId, event: RequestEvent) -> Change {
        Change::new(request, event)
    }

    async fn a_train_is_admitted_staged_and_checked(home: &Home) {
        let ledger = home.ledger().await;
        let ids = [enqueue(&ledger, "ingest/a", 1).await, enqueue(&ledger, "ingest/b", 2).await];
        let train = TrainId::new("t1");
        let admit = |id| Change {
            train: Some(train.clone()),
            classification: Some("cherry-pick".to_owned()),
            ..change(id, RequestEvent::Admit)
        };
        let rows = ledger.apply(None, &[admit(ids[1]), admit(ids[0])], 10).await.unwrap();
        assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [ids[1], ids[0]]);
        for row in &rows {
            assert_eq!((row.state, row.attempts, row.admitted_at_ms), (RequestState::Planning, 1, Some(10)));
            assert_eq!(row.train.as_ref(), Some(&train));
            assert_eq!(row.classification.as_deref(), Some("cherry-pick"));
        }

        // Two events on one request, taken in order.
        let both = [change(ids[0], RequestEvent::Stage), change(ids[0], RequestEvent::Check)];
        let rows = ledger.apply(None, &both, 11).await.unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0], ledger.request(ids[0]).await.unwrap());
        assert_eq!(rows[0].state, RequestState::Checking);
        let log = ledger.attempts(ids[0]).await.unwrap();
        let words: Vec<_> = log.iter().map(|attempt| attempt.state.word()).collect();
        assert_eq!(words, ["queued", "planning", "staged", "checking"]);
        assert!(log[1..].iter().all(|attempt| attempt.train.as_ref() == Some(&train)));

        // Back in the queue it rides no train; the log says which one gave it back.
        let rows = ledger.apply(None, &[change(ids[0], RequestEvent::Requeue)], 12).await.unwrap();
        assert_eq!((rows[0].state, rows[0].train.clone(), rows[0].attempts), (RequestState::Queued, None, 1));
        let last = ledger.attempts(ids[0]).await.unwrap().pop().unwrap();
        assert_eq!((last.state, last.train), (RequestState::Queued, Some(train)));
    }

    async fn one_wrong_event_undoes_the_whole_train(home: &Home) {
        let ledger = home.ledger().await;
        let ids = [enqueue(&ledger, "ingest/a", 1).await, enqueue(&ledger, "ingest/b", 2).await];
        let changes = [change(ids[0], RequestEvent::Admit), change(ids[1], RequestEvent::Stage)];
        let error = ledger.apply(None, &changes, 10).await.unwrap_err();
        assert!(matches!(error, LedgerError::Transition { request, .. } if request == ids[1]), "{error}");
        assert_eq!(ledger.request(ids[0]).await.unwrap().state, RequestState::Queued);
        assert_eq!(ledger.attempts(ids[0]).await.unwrap().len(), 1);

        let missing = [change(ids[0], RequestEvent::Admit), change(RequestId(99), RequestEvent::Admit)];
        let error = ledger.apply(None, &missing, 10).await.unwrap_err();
        assert!(matches!(error, LedgerError::NoSuchRequest(RequestId(99))));
        assert_eq!(ledger.request(ids[0]).await.unwrap().state, RequestState::Queued);
    }

    async fn holding_twice_for_one_reason_leaves_one_attempt(home: &Home) {
        let ledger = home.ledger().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        let hold = |reason, behind: i64| Change {
            detail: Some(json!({ "behind": behind })),
            ..change(id, RequestEvent::Hold(reason))
        };
        ledger.apply(None, &[hold(ReasonCode::OverlapsAhead, 4)], 10).await.unwrap();
        let events = ledger.events_since(0, 100).await.unwrap().len();
        let rows = ledger.apply(None, &[hold(ReasonCode::OverlapsAhead, 5)], 11).await.unwrap();
        assert_eq!(rows[0].detail, Some(json!({ "behind": 5 })), "people see whom it waits for now");
        assert_eq!(ledger.attempts(id).await.unwrap().len(), 2);
        assert_eq!(ledger.events_since(0, 100).await.unwrap().len(), events);

        ledger.apply(None, &[hold(ReasonCode::BatchFull, 5)], 12).await.unwrap();
        assert_eq!(ledger.attempts(id).await.unwrap().len(), 3);
        assert_eq!(ledger.events_since(0, 100).await.unwrap().len(), events + 1);
    }

    async fn landing_has_no_other_door_than_its_intent(home: &Home) {
        let ledger = home.ledger().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        for event in [RequestEvent::WriteIntent, RequestEvent::LoseAnswer, RequestEvent::Land] {
            let error = ledger.apply(None, &[change(id, event)], 10).await.unwrap_err();
            assert!(matches!(error, LedgerError::NeedsIntent { .. }), "{event:?}: {error}");
        }
    }

    async fn a_lost_epoch_writes_nothing(home: &Home) {
        let ledger = home.ledger().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        let old = ledger.lead("one", 10, 100).await.unwrap().unwrap();
        let new = succeed(&ledger, "two", 10, 200).await;
        let admit = [change(id, RequestEvent::Admit)];
        let error = ledger.apply(Some(old), &admit, 201).await.unwrap_err();
        assert!(matches!(&error, LedgerError::Deposed { epoch, .. } if *epoch == old), "{error}");
        assert!(error.to_string().contains("'two' leads under epoch 2"), "{error}");
        assert_eq!(ledger.request(id).await.unwrap().state, RequestState::Queued);
        ledger.apply(Some(new), &admit, 202).await.unwrap();
    }

    async fn every_final_state_says_when_and_is_told(home: &Home) {
        let ledger = home.ledger().await;
        let cases = [
            (RequestEvent::Refuse(ReasonCode::Conflict), EventKind::Refused),
            (RequestEvent::Withdraw(ReasonCode::BranchGone), EventKind::Withdrawn),
            (RequestEvent::FindPublished, EventKind::AlreadyPublished),
        ];
        for (pinned, (event, kind)) in (1..).zip(cases) {
            let id = enqueue(&ledger, "ingest/a", pinned).await;
            let rows = ledger.apply(None, &[change(id, event)], 10).await.unwrap();
            assert_eq!(rows[0].ended_at_ms, Some(10));
            let told = ledger.events_since(0, 100).await.unwrap().pop().unwrap();
            assert_eq!((told.kind, told.request), (kind, Some(id)));
            let error = ledger.apply(None, &[change(id, RequestEvent::Requeue)], 11).await.unwrap_err();
            assert!(matches!(error, LedgerError::Transition { .. }));
        }
    }

    /// No benchmark: the bound is a hundred times what a debug build takes.
    async fn fifty_requests_are_one_small_transaction(home: &Home) {
        let ledger = home.ledger().await;
        let mut admit = Vec::new();
        let mut give_back = Vec::new();
        for pinned in 0..50 {
            let id = enqueue(&ledger, "ingest/a", pinned).await;
            admit.push(change(id, RequestEvent::Admit));
            give_back.push(change(id, RequestEvent::Requeue));
        }
        let mut best = u128::MAX;
        for _ in 0..5 {
            let started = Instant::now();
            ledger.apply(None, &admit, 10).await.unwrap();
            best = best.min(started.elapsed().as_micros());
            ledger.apply(None, &give_back, 11).await.unwrap();
        }
        assert!(best < 250_000, "{best} microseconds");
    }
}
