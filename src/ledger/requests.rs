//! Enqueue, look up, list, cancel.

use mergeberg_kernel::ids::{
    Epoch, Principal, RefName, RequestId, SnapshotId, TableName, TableUuid, TrainId,
};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestEvent, RequestState};
use mergeberg_kernel::structure::StructureId;

use super::apply::{BATCH_ROWS, Step, take};
use super::decode::Fields;
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::leader::fence;
use super::reverts::Reverts;
use super::rows::{AttemptRow, RequestRow};
use super::waiting::{Unreadable, Waiting, readable};
use super::{Ledger, wake};
use crate::database::{QueryBuilder, Transaction, query};

/// Rows of a list without a limit of its own.
const DEFAULT_LIST_ROWS: u32 = 10_000;

/// A request to be. Everything was checked by the caller; the ledger only refuses what is double.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRequest {
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub source: RefName,
    pub pinned: SnapshotId,
    pub target: RefName,
    pub class: String,
    pub principal: Principal,
    pub idempotency_key: Option<String>,
    pub structure: StructureId,
    pub format_version: u8,
}

#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub enum Enqueued {
    New(RequestRow),
    /// The same publication was enqueued before, perhaps it has ended.
    Existing(RequestRow),
    /// The idempotency key belongs to this other request.
    KeyConflict(RequestRow),
}

/// All conditions hold at once; an empty filter matches every request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestFilter {
    /// Words of states: `held` matches every reason. Empty: any.
    pub states: Vec<String>,
    pub table: Option<TableName>,
    pub target: Option<RefName>,
    pub class: Option<String>,
    /// Ended at or after the first and before the second time.
    pub ended_between: Option<(i64, i64)>,
    /// The newest so many.
    pub limit: Option<u32>,
}

impl Ledger {
    /// Appends a request, unless it is there: key and request are written in one transaction.
    pub async fn enqueue(&self, new: &NewRequest, now_ms: i64) -> Result<Enqueued, LedgerError> {
        self.add(new, None, now_ms).await
    }

    /// Appends the revert of a landed request. The same key is the same request, and so is an open revert of the
    /// same request, whatever branch it was written to.
    pub async fn enqueue_revert(
        &self,
        new: &NewRequest,
        reverts: &Reverts,
        now_ms: i64,
    ) -> Result<Enqueued, LedgerError> {
        self.add(new, Some(reverts), now_ms).await
    }

    async fn add(
        &self,
        new: &NewRequest,
        reverts: Option<&Reverts>,
        now_ms: i64,
    ) -> Result<Enqueued, LedgerError> {
        let mut tx = self.begin().await?;
        let existing = match (&new.idempotency_key, reverts) {
            (Some(key), _) => {
                let sql = "SELECT * FROM merge_request WHERE idempotency_key = $1";
                query(sql).bind(key).fetch_optional(&mut tx).await?
            }
            (None, Some(reverts)) => {
                let sql = "SELECT * FROM merge_request WHERE reverts = $1 AND ended_at_ms IS NULL
                           ORDER BY id LIMIT 1";
                query(sql).bind(reverts.request.0).fetch_optional(&mut tx).await?
            }
            (None, None) => {
                query(
                    "SELECT * FROM merge_request
                     WHERE table_uuid = $1 AND target = $2 AND source = $3 AND pinned = $4
                       AND ended_at_ms IS NULL
                     ORDER BY id LIMIT 1",
                )
                .bind(new.table_uuid.as_str())
                .bind(new.target.as_str())
                .bind(new.source.as_str())
                .bind(new.pinned.0)
                .fetch_optional(&mut tx)
                .await?
            }
        };
        if let Some(row) = existing {
            let row = RequestRow::decode(&row)?;
            let same = match reverts {
                Some(reverts) => row.reverts.as_ref().is_some_and(|r| r.request == reverts.request),
                None => {
                    row.table_uuid == new.table_uuid
                        && row.source == new.source
                        && row.target == new.target
                        && row.pinned == new.pinned
                        // A key is one publication: of one table, or of a set.
                        && (new.idempotency_key.is_none() || row.set.is_none())
                }
            };
            return Ok(if same { Enqueued::Existing(row) } else { Enqueued::KeyConflict(row) });
        }
        let row = insert(&mut tx, new, reverts, now_ms).await?;
        let mut text = format!("{} enqueued by {}", row.describe(), row.principal);
        if let Some(reverts) = &row.reverts {
            text.push_str(&reverts.in_words());
        }
        let event = NewEvent { text, ..NewEvent::of_request(EventKind::Enqueued, &row) };
        append(&mut tx, &[event], now_ms).await?;
        wake(&mut tx).await?;
        tx.commit().await?;
        Ok(Enqueued::New(row))
    }

    pub async fn request(&self, id: RequestId) -> Result<RequestRow, LedgerError> {
        let sql = "SELECT * FROM merge_request WHERE id = $1";
        match query(sql).bind(id.0).fetch_optional(&self.readers).await? {
            Some(row) => RequestRow::decode(&row),
            None => Err(LedgerError::NoSuchRequest(id)),
        }
    }

    /// The request that an idempotency key belongs to.
    pub async fn request_by_key(&self, key: &str) -> Result<Option<RequestRow>, LedgerError> {
        let sql = "SELECT * FROM merge_request WHERE idempotency_key = $1";
        let row = query(sql).bind(key).fetch_optional(&self.readers).await?;
        row.as_ref().map(RequestRow::decode).transpose()
    }

    /// In arrival order. With more matches than the limit the newest are given. A row that cannot be read is told
    /// and left out: a list or report of all others is of more use than none (case O36).
    pub async fn requests(&self, filter: &RequestFilter) -> Result<Vec<RequestRow>, LedgerError> {
        let RequestFilter { states, table, target, class, ended_between, limit } = filter;
        let mut query = QueryBuilder::new("SELECT * FROM merge_request WHERE 1 = 1");
        if !states.is_empty() {
            query.push(" AND state IN (");
            let mut list = query.separated(", ");
            for word in states {
                if !is_state_word(word) {
                    return Err(LedgerError::NoSuchState(word.clone()));
                }
                list.push_bind(word);
            }
            query.push(")");
        }
        if let Some(table) = table {
            query.push(" AND table_name = ").push_bind(table.to_string());
        }
        if let Some(target) = target {
            query.push(" AND target = ").push_bind(target.as_str());
        }
        if let Some(class) = class {
            query.push(" AND class = ").push_bind(class);
        }
        if let Some((from_ms, before_ms)) = ended_between {
            query.push(" AND ended_at_ms >= ").push_bind(*from_ms);
            query.push(" AND ended_at_ms < ").push_bind(*before_ms);
        }
        query.push(" ORDER BY id DESC LIMIT ").push_bind(limit.unwrap_or(DEFAULT_LIST_ROWS));
        let mut rows = query.build().fetch_all(&self.readers).await?;
        rows.reverse();
        let Waiting { rows, unreadable, more: _ } = readable(&rows)?;
        for Unreadable { request, error } in unreadable {
            tracing::warn!(%request, "left out, its row cannot be read: {error}");
        }
        Ok(rows)
    }

    /// Every request of a target that has not ended, in arrival order: the waiting ones and those in a train,
    /// without rows that cannot be read ([`Ledger::waiting`] tells them).
    pub async fn unfinished(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        let rows = query(
            "SELECT * FROM merge_request
             WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
             ORDER BY id",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .fetch_all(&self.readers)
        .await?;
        Ok(readable(&rows)?.rows)
    }

    /// Requests of a target that ride a train whose landing is not on its way, in arrival order.
    pub async fn riding(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
    ) -> Result<Vec<RequestId>, LedgerError> {
        let ids: Vec<i64> = query(
            "SELECT id FROM merge_request
             WHERE table_uuid = $1 AND target = $2 AND ended_at_ms IS NULL
               AND state IN ('planning', 'staged', 'checking')
             ORDER BY id",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .scalars(&self.readers)
        .await?;
        Ok(ids.into_iter().map(RequestId).collect())
    }

    /// Where something has not ended: the lanes that a tick drives. A renamed or replaced table has a lane
    /// for each name and uuid that was enqueued (rule C11).
    pub async fn open_tables(&self) -> Result<Vec<(TableName, TableUuid, RefName)>, LedgerError> {
        let rows = query(
            "SELECT DISTINCT table_name, table_uuid, target FROM merge_request
             WHERE ended_at_ms IS NULL ORDER BY table_name, table_uuid, target",
        )
        .fetch_all(&self.readers)
        .await?;
        let mut tables = Vec::with_capacity(rows.len());
        for row in &rows {
            let f = Fields::new("merge_request", "table_name", row);
            match (f.table_name(), f.table_uuid(), f.target()) {
                (Ok(table), Ok(uuid), Ok(target)) => tables.push((table, uuid, target)),
                // The other lanes go on (case O36).
                (Err(error), _, _) | (_, Err(error), _) | (_, _, Err(error)) => {
                    tracing::error!("a lane of the queue is left out: {error}");
                }
            }
        }
        Ok(tables)
    }

    /// Requests of a table that have not ended, whatever their target.
    pub async fn open_request_ids(
        &self,
        table_uuid: &TableUuid,
    ) -> Result<std::collections::BTreeSet<RequestId>, LedgerError> {
        let ids: Vec<i64> =
            query("SELECT id FROM merge_request WHERE table_uuid = $1 AND ended_at_ms IS NULL")
                .bind(table_uuid.as_str())
                .scalars(&self.readers)
                .await?;
        Ok(ids.into_iter().map(RequestId).collect())
    }

    /// Sources of a table's requests that have not ended, whatever their target.
    pub async fn open_sources(
        &self,
        table_uuid: &TableUuid,
    ) -> Result<std::collections::BTreeSet<RefName>, LedgerError> {
        let names: Vec<String> =
            query("SELECT DISTINCT source FROM merge_request WHERE table_uuid = $1 AND ended_at_ms IS NULL")
                .bind(table_uuid.as_str())
                .scalars(&self.readers)
                .await?;
        Ok(names.into_iter().map(RefName).collect())
    }

    /// Branches that more than one open request of a table names: nobody's landing drops those (rule R6).
    pub async fn shared_sources(&self, table_uuid: &TableUuid) -> Result<Vec<RefName>, LedgerError> {
        let names: Vec<String> = query(
            "SELECT source FROM merge_request WHERE table_uuid = $1 AND ended_at_ms IS NULL
             GROUP BY source HAVING COUNT(*) > 1",
        )
        .bind(table_uuid.as_str())
        .scalars(&self.readers)
        .await?;
        Ok(names.into_iter().map(RefName).collect())
    }

    /// Targets of a table, those that nothing open names at the moment included: no target is ever dropped
    /// (rule R6).
    pub async fn targets(&self, table_uuid: &TableUuid) -> Result<Vec<RefName>, LedgerError> {
        let names: Vec<String> = query(
            "SELECT target FROM merge_request WHERE table_uuid = $1 AND ended_at_ms IS NULL
             UNION SELECT target FROM target_head WHERE table_uuid = $1",
        )
        .bind(table_uuid.as_str())
        .scalars(&self.readers)
        .await?;
        Ok(names.into_iter().map(RefName).collect())
    }

    /// Which of these heads were landed on a target, each with the snapshot that published it.
    pub async fn landed_pins(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
        pins: &[SnapshotId],
    ) -> Result<Vec<(SnapshotId, SnapshotId)>, LedgerError> {
        let mut landed = Vec::new();
        for batch in pins.chunks(BATCH_ROWS) {
            let mut query = QueryBuilder::new(
                "SELECT id, pinned, landed_snapshot FROM merge_request WHERE state = 'landed' AND table_uuid = ",
            );
            query.push_bind(table_uuid.as_str()).push(" AND target = ").push_bind(target.as_str());
            query.push(" AND pinned IN (");
            let mut list = query.separated(", ");
            for pin in batch {
                list.push_bind(pin.0);
            }
            query.push(")");
            for row in &query.build().fetch_all(&self.readers).await? {
                let f = Fields::new("merge_request", "id", row);
                landed.push((f.snapshot("pinned")?, f.snapshot("landed_snapshot")?));
            }
        }
        Ok(landed)
    }

    /// Pins a waiting request to another head of its branch (class rule `repin`).
    pub async fn repin(
        &self,
        epoch: Epoch,
        id: RequestId,
        pinned: SnapshotId,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        query(
            "UPDATE merge_request SET pinned = $1
             WHERE id = $2 AND ended_at_ms IS NULL AND state IN ('queued', 'held', 'in-review')",
        )
        .bind(pinned.0)
        .bind(id.0)
        .execute(&mut tx)
        .await?;
        let detail = serde_json::json!({ "text": format!("pinned anew at snapshot {pinned}") });
        let step = Step { detail: Some(&detail), ..Step::new(id, RequestEvent::Requeue) };
        take(&mut tx, &[step], now_ms).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Every state that a request was in, oldest first.
    pub async fn attempts(&self, id: RequestId) -> Result<Vec<AttemptRow>, LedgerError> {
        let sql = "SELECT * FROM merge_attempt WHERE request = $1 ORDER BY id";
        let rows = query(sql).bind(id.0).fetch_all(&self.readers).await?;
        rows.iter().map(AttemptRow::decode).collect()
    }

    /// Takes a request back that waits, or whose operation is run again now: its worker sees it and stops. Once its
    /// train is recorded, or that of another part of its set, it is past that.
    pub async fn cancel(
        &self,
        id: RequestId,
        principal: &Principal,
        now_ms: i64,
    ) -> Result<RequestRow, LedgerError> {
        let mut tx = self.begin().await?;
        refuse_recorded(&mut tx, id).await?;
        let detail = serde_json::json!({ "cancelled-by": principal });
        let step = Step { detail: Some(&detail), ..Step::new(id, RequestEvent::Cancel) };
        let row = take(&mut tx, &[step], now_ms).await?.pop().ok_or(LedgerError::NoSuchRequest(id))?;
        wake(&mut tx).await?;
        tx.commit().await?;
        Ok(row)
    }
}

/// Is a train recorded with this request, or with another part of its set, that may be staged already?
async fn refuse_recorded(conn: &mut Transaction, id: RequestId) -> Result<(), LedgerError> {
    let row = query(
        "SELECT part.id, part.train FROM merge_request AS own
         JOIN merge_request AS part ON part.id = own.id OR part.set_id = own.set_id
         JOIN train ON train.train = part.train
         WHERE own.id = $1 AND part.state = 'planning'
         ORDER BY part.id LIMIT 1",
    )
    .bind(id.0)
    .fetch_optional(conn)
    .await?;
    let Some(row) = row else { return Ok(()) };
    let f = Fields::new("merge_request", "id", &row);
    Err(LedgerError::PastCancelling { request: RequestId(f.int("id")?), train: TrainId(f.text("train")?) })
}

pub(super) async fn insert(
    conn: &mut Transaction,
    new: &NewRequest,
    reverts: Option<&Reverts>,
    now_ms: i64,
) -> Result<RequestRow, LedgerError> {
    let NewRequest {
        table,
        table_uuid,
        source,
        pinned,
        target,
        class,
        principal,
        idempotency_key,
        structure,
        format_version,
    } = new;
    let row = query(
        "INSERT INTO merge_request (table_name, table_uuid, source, pinned, target, class, principal,
             idempotency_key, schema_id, spec_id, sort_order_id, format_version, state, enqueued_at_ms, attempts,
             reverts, reverts_reason)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, 0, $15, $16)
         RETURNING *",
    )
    .bind(table.to_string())
    .bind(table_uuid.as_str())
    .bind(source.as_str())
    .bind(pinned.0)
    .bind(target.as_str())
    .bind(class)
    .bind(principal.as_str())
    .bind(idempotency_key.as_deref())
    .bind(structure.schema_id.0)
    .bind(structure.spec_id.0)
    .bind(structure.sort_order_id.0)
    .bind(*format_version)
    .bind(RequestState::Queued.word())
    .bind(now_ms)
    .bind(reverts.map(|r| r.request.0))
    .bind(reverts.and_then(|r| r.reason.as_deref()))
    .fetch_one(&mut *conn)
    .await?;
    let row = RequestRow::decode(&row)?;
    query("INSERT INTO merge_attempt (request, at_ms, state) VALUES ($1, $2, $3)")
        .bind(row.id.0)
        .bind(now_ms)
        .bind(row.state.word())
        .execute(conn)
        .await?;
    Ok(row)
}

fn is_state_word(word: &str) -> bool {
    // Some words come with a reason, others without; which reason does not matter here.
    RequestState::from_parts(word, None).is_some()
        || RequestState::from_parts(word, Some(ReasonCode::Paused)).is_some()
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::TrainId;

    use super::super::Change;
    use super::super::testing::{Home, new_request, on_each_database};
    use super::super::waiting::Depth;
    use super::*;

    on_each_database! {
        a_request_is_read_back_as_it_was_written,
        the_same_key_is_the_same_request_even_when_it_ended,
        without_a_key_only_an_open_request_is_the_same,
        lists_filter_and_keep_arrival_order,
        so_many_of_each_class_are_read_and_more_is_told,
        only_a_waiting_request_is_cancelled,
    }

    fn new_id(enqueued: Enqueued) -> RequestId {
        match enqueued {
            Enqueued::New(row) => row.id,
            other => panic!("{other:?}"),
        }
    }

    async fn a_request_is_read_back_as_it_was_written(home: &Home) {
        let ledger = home.ledger().await;
        let mut new = new_request("ingest/feature/a b/ü", 7);
        new.idempotency_key = Some("run-1".to_owned());
        let Enqueued::New(row) = ledger.enqueue(&new, 1_000).await.unwrap() else { panic!() };
        assert_eq!(row, ledger.request(row.id).await.unwrap());
        let RequestRow { source, pinned, structure, state, enqueued_at_ms, attempts, train, .. } =
            row.clone();
        assert_eq!((source, pinned, structure), (new.source, new.pinned, new.structure));
        assert_eq!((state, enqueued_at_ms, attempts, train), (RequestState::Queued, 1_000, 0, None));
        let log = ledger.attempts(row.id).await.unwrap();
        assert_eq!(
            log.iter().map(|a| (a.state, a.at_ms)).collect::<Vec<_>>(),
            [(RequestState::Queued, 1_000)]
        );
    }

    async fn the_same_key_is_the_same_request_even_when_it_ended(home: &Home) {
        let ledger = home.ledger().await;
        let new = NewRequest { idempotency_key: Some("k".to_owned()), ..new_request("ingest/a", 1) };
        let id = new_id(ledger.enqueue(&new, 1).await.unwrap());
        ledger.cancel(id, &Principal::new("ann"), 2).await.unwrap();
        let again = ledger.enqueue(&new, 3).await.unwrap();
        assert!(matches!(again, Enqueued::Existing(row) if row.id == id));

        for other in [
            NewRequest { source: RefName::new("ingest/b"), ..new.clone() },
            NewRequest { pinned: SnapshotId(2), ..new.clone() },
            NewRequest { target: RefName::new("dev"), ..new.clone() },
            NewRequest { table_uuid: TableUuid::new("other"), ..new.clone() },
        ] {
            let conflict = ledger.enqueue(&other, 4).await.unwrap();
            assert!(matches!(conflict, Enqueued::KeyConflict(row) if row.id == id), "{other:?}");
        }
    }

    async fn without_a_key_only_an_open_request_is_the_same(home: &Home) {
        let ledger = home.ledger().await;
        let new = new_request("ingest/a", 1);
        let id = new_id(ledger.enqueue(&new, 1).await.unwrap());
        let again = ledger.enqueue(&new, 2).await.unwrap();
        assert!(matches!(again, Enqueued::Existing(row) if row.id == id));
        ledger.cancel(id, &Principal::new("ann"), 3).await.unwrap();
        let next = new_id(ledger.enqueue(&new, 4).await.unwrap());
        assert_ne!(next, id);
    }

    async fn lists_filter_and_keep_arrival_order(home: &Home) {
        let ledger = home.ledger().await;
        let a = new_id(ledger.enqueue(&new_request("ingest/a", 1), 1).await.unwrap());
        let b = new_id(ledger.enqueue(&new_request("ingest/b", 2), 2).await.unwrap());
        let dev = NewRequest { target: RefName::new("dev"), ..new_request("ingest/c", 3) };
        let c = new_id(ledger.enqueue(&dev, 3).await.unwrap());
        ledger.cancel(a, &Principal::new("ann"), 50).await.unwrap();

        let ids = async |filter: RequestFilter| -> Vec<RequestId> {
            ledger.requests(&filter).await.unwrap().iter().map(|row| row.id).collect()
        };
        assert_eq!(ids(RequestFilter::default()).await, [a, b, c]);
        assert_eq!(ids(RequestFilter { limit: Some(2), ..Default::default() }).await, [b, c]);
        assert_eq!(ids(RequestFilter { states: vec!["queued".into()], ..Default::default() }).await, [b, c]);
        assert_eq!(ids(RequestFilter { target: Some(dev.target.clone()), ..Default::default() }).await, [c]);
        assert_eq!(ids(RequestFilter { class: Some("none".into()), ..Default::default() }).await, []);
        assert_eq!(ids(RequestFilter { ended_between: Some((50, 51)), ..Default::default() }).await, [a]);
        assert_eq!(ids(RequestFilter { ended_between: Some((0, 50)), ..Default::default() }).await, []);
        let unknown =
            ledger.requests(&RequestFilter { states: vec!["done".into()], ..Default::default() }).await;
        assert!(matches!(unknown, Err(LedgerError::NoSuchState(word)) if word == "done"));

        let waiting = ledger.waiting(&dev.table_uuid, &RefName::main(), Depth::ALL).await.unwrap().rows;
        assert_eq!(waiting.iter().map(|row| row.id).collect::<Vec<_>>(), [b]);
        let lanes = ledger.open_tables().await.unwrap();
        assert_eq!(lanes.iter().map(|lane| lane.2.as_str()).collect::<Vec<_>>(), ["dev", "main"]);
    }

    async fn so_many_of_each_class_are_read_and_more_is_told(home: &Home) {
        let ledger = home.ledger().await;
        let classes = ["ingest", "ingest", "upkeep", "ingest", "upkeep"];
        let mut ids = Vec::new();
        for (class, pinned) in classes.into_iter().zip(1..) {
            let new = new_request(&format!("{class}/{pinned}"), pinned);
            let new = NewRequest { class: class.to_owned(), ..new };
            ids.push(new_id(ledger.enqueue(&new, pinned).await.unwrap()));
        }
        let new = new_request("any", 1);
        let read = async |of_each_class: u32, until: Option<RequestId>| {
            let depth = Depth { of_each_class, until };
            let waiting = ledger.waiting(&new.table_uuid, &new.target, depth).await.unwrap();
            (waiting.rows.iter().map(|row| row.id).collect::<Vec<_>>(), waiting.more)
        };
        assert_eq!(read(1, None).await, (vec![ids[0], ids[2]], true));
        assert_eq!(read(2, None).await, (vec![ids[0], ids[1], ids[2], ids[4]], true));
        assert_eq!(read(2, Some(ids[2])).await, (ids[..3].to_vec(), false));
        assert_eq!(read(3, None).await, (ids.clone(), false));
        assert_eq!(ledger.newest_request().await.unwrap(), ids.last().copied());

        let kept = ledger.to_keep(&new.table_uuid, &new.target, 2, "upkeep/").await.unwrap();
        assert_eq!(kept.iter().map(|row| row.id).collect::<Vec<_>>(), [ids[0], ids[1], ids[2], ids[4]]);
    }

    async fn only_a_waiting_request_is_cancelled(home: &Home) {
        let ledger = home.ledger().await;
        let id = new_id(ledger.enqueue(&new_request("ingest/a", 1), 1).await.unwrap());
        let admit = Change { train: Some(TrainId::new("t1")), ..Change::new(id, RequestEvent::Admit) };
        ledger.apply(None, &[admit, Change::new(id, RequestEvent::Stage)], 2).await.unwrap();
        let refused = ledger.cancel(id, &Principal::new("ann"), 3).await.unwrap_err();
        assert!(matches!(refused, LedgerError::Transition { request, .. } if request == id));
        assert_eq!(ledger.request(id).await.unwrap().state, RequestState::Staged);

        ledger.apply(None, &[Change::new(id, RequestEvent::Requeue)], 4).await.unwrap();
        let row = ledger.cancel(id, &Principal::new("ann"), 5).await.unwrap();
        assert_eq!((row.state, row.ended_at_ms), (RequestState::Cancelled, Some(5)));
        let unknown = ledger.cancel(RequestId(99), &Principal::new("ann"), 6).await.unwrap_err();
        assert!(matches!(unknown, LedgerError::NoSuchRequest(RequestId(99))));
    }
}
