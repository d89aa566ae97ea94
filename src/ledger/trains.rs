//! Trains: what is, or was, staged under a temporary branch. Recorded before staging, so that a worker that
//! dies in between leaves a name to look for and clean up.

use mergeberg_kernel::ids::{Epoch, RefName, RequestId, SnapshotId, TableUuid, TrainId};
use serde::Serialize;

use super::Ledger;
use super::apply::{BATCH_ROWS, Change, steps_of, take};
use super::decode::{Fields, to_json, words};
use super::error::{LedgerError, is_unique_violation};
use super::leader::fence;
use super::unrecorded::forget_files;
use crate::database::{QueryBuilder, Row, Transaction, query};

words! {
    TrainStatus {
        /// The staging commit may or may not be in the catalog.
        Staging = "staging",
        /// Known to be in the catalog (rule L2).
        Staged = "staged",
        Landed = "landed",
        /// Its temporary branch is gone, or never came to be.
        Dropped = "dropped",
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainRow {
    pub train: TrainId,
    pub table_uuid: TableUuid,
    pub target: RefName,
    pub temp_ref: RefName,
    /// `None`: the target does not exist yet.
    pub planned_head: Option<SnapshotId>,
    /// c_n, the snapshot that the target becomes.
    pub tail: SnapshotId,
    /// All candidates in order, the tail last.
    pub candidates: Vec<SnapshotId>,
    /// Files that were written for the candidates, as `table::cleanup::WrittenFiles` puts them: whoever drops
    /// the train deletes them. `None` in rows of an older release.
    pub written: Option<serde_json::Value>,
    pub status: TrainStatus,
    /// When it was recorded.
    pub at_ms: i64,
}

impl TrainRow {
    fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("train", "train", row);
        Ok(Self {
            train: TrainId(f.text("train")?),
            table_uuid: f.table_uuid()?,
            target: f.target()?,
            temp_ref: RefName(f.text("temp_ref")?),
            planned_head: f.opt_snapshot("planned_head")?,
            tail: f.snapshot("tail")?,
            candidates: f.json("candidates")?,
            written: f.opt_json("written")?,
            status: f.word("status", TrainStatus::from_word)?,
            at_ms: f.int("at_ms")?,
        })
    }
}

impl Ledger {
    /// Records a new train of these requests. Ids and temporary refs are never used twice (rule R7). From now on
    /// its row names the files that were noted for it.
    ///
    /// # Errors
    /// [`LedgerError::CarsCancelled`] when one of the requests was taken back; from now on none can be.
    pub async fn record_train(
        &self,
        epoch: Epoch,
        row: &TrainRow,
        requests: &[RequestId],
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        record(&mut tx, row, requests).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Admits the requests of a train that is to be written: all of them, or none.
    ///
    /// # Errors
    /// [`LedgerError::CarsCancelled`] when one of them was taken back since it was planned.
    pub async fn admit(
        &self,
        epoch: Epoch,
        train: &TrainId,
        admissions: &[Change],
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let requests: Vec<RequestId> = admissions.iter().map(|change| change.request).collect();
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        refuse_cancelled(&mut tx, train, &requests).await?;
        take(&mut tx, &steps_of(admissions)?, now_ms).await?;
        tx.commit().await?;
        Ok(())
    }

    /// As [`Self::record_train`], for a train whose files were there before its requests were admitted: both are
    /// written at once, or neither.
    pub async fn record_admitted(
        &self,
        epoch: Epoch,
        row: &TrainRow,
        admissions: &[Change],
    ) -> Result<(), LedgerError> {
        let requests: Vec<RequestId> = admissions.iter().map(|change| change.request).collect();
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        record(&mut tx, row, &requests).await?;
        take(&mut tx, &steps_of(admissions)?, row.at_ms).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Its candidates were written again; what stood for them before is no longer listed.
    pub async fn rewrite_train(
        &self,
        epoch: Epoch,
        train: &TrainId,
        written: &serde_json::Value,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        let changed = query("UPDATE train SET written = $1 WHERE train = $2")
            .bind(to_json(written)?)
            .bind(train.as_str())
            .execute(&mut tx)
            .await?;
        if changed != 1 {
            return Err(LedgerError::NoSuchTrain(train.clone()));
        }
        forget_files(&mut tx, train).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Staged or dropped; twice the same is no error. `landed` is written by the settlement alone.
    pub async fn set_train_status(
        &self,
        epoch: Epoch,
        train: &TrainId,
        to: TrainStatus,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        let from = train_row(&mut tx, train).await?.status;
        let allowed = match (from, to) {
            (TrainStatus::Staging, TrainStatus::Staged | TrainStatus::Dropped) => true,
            (TrainStatus::Staged, TrainStatus::Dropped) => true,
            (from, to) => from == to,
        };
        if !allowed {
            return Err(LedgerError::TrainStatus { train: train.clone(), from, to });
        }
        write_status(&mut tx, train, to).await?;
        tx.commit().await?;
        Ok(())
    }

    pub async fn train(&self, train: &TrainId) -> Result<TrainRow, LedgerError> {
        let mut tx = self.reading().await?;
        train_row(&mut tx, train).await
    }

    /// The train to which a temporary branch belonged; `None` for a name that this ledger never gave.
    pub async fn train_of_ref(&self, temp_ref: &RefName) -> Result<Option<TrainRow>, LedgerError> {
        let row = query("SELECT * FROM train WHERE temp_ref = $1")
            .bind(temp_ref.as_str())
            .fetch_optional(&self.readers)
            .await?;
        row.as_ref().map(TrainRow::decode).transpose()
    }

    /// Trains of a table whose temporary branch may be in the catalog, oldest first.
    pub async fn unfinished_trains(&self, table_uuid: &TableUuid) -> Result<Vec<TrainRow>, LedgerError> {
        let rows = query(
            "SELECT * FROM train WHERE table_uuid = $1 AND status IN ('staging', 'staged')
             ORDER BY at_ms, train",
        )
        .bind(table_uuid.as_str())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(TrainRow::decode).collect()
    }
}

async fn record(conn: &mut Transaction, row: &TrainRow, requests: &[RequestId]) -> Result<(), LedgerError> {
    let TrainRow {
        train,
        table_uuid,
        target,
        temp_ref,
        planned_head,
        tail,
        candidates,
        written,
        status,
        at_ms,
    } = row;
    refuse_cancelled(&mut *conn, train, requests).await?;
    let inserted = query(
        "INSERT INTO train (train, table_uuid, target, temp_ref, planned_head, tail, candidates,
             written, status, at_ms)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
    )
    .bind(train.as_str())
    .bind(table_uuid.as_str())
    .bind(target.as_str())
    .bind(temp_ref.as_str())
    .bind(planned_head.map(|id| id.0))
    .bind(tail.0)
    .bind(to_json(candidates)?)
    .bind(written.as_ref().map(to_json).transpose()?)
    .bind(status.word())
    .bind(*at_ms)
    .execute(&mut *conn)
    .await;
    match inserted {
        Err(error) if is_unique_violation(&error) => Err(LedgerError::TrainExists(train.clone())),
        outcome => {
            outcome?;
            forget_files(conn, train).await
        }
    }
}

async fn refuse_cancelled(
    conn: &mut Transaction,
    train: &TrainId,
    requests: &[RequestId],
) -> Result<(), LedgerError> {
    let cancelled = cancelled_of(conn, requests).await?;
    if cancelled.is_empty() {
        return Ok(());
    }
    Err(LedgerError::CarsCancelled { train: train.clone(), requests: cancelled })
}

async fn cancelled_of(conn: &mut Transaction, requests: &[RequestId]) -> Result<Vec<RequestId>, LedgerError> {
    let mut cancelled = Vec::new();
    for batch in requests.chunks(BATCH_ROWS) {
        let mut query =
            QueryBuilder::new("SELECT id FROM merge_request WHERE state = 'cancelled' AND id IN (");
        let mut list = query.separated(", ");
        for request in batch {
            list.push_bind(request.0);
        }
        query.push(") ORDER BY id");
        for row in &query.build().fetch_all(&mut *conn).await? {
            cancelled.push(RequestId(Fields::new("merge_request", "id", row).int("id")?));
        }
    }
    Ok(cancelled)
}

pub(super) async fn train_row(conn: &mut Transaction, train: &TrainId) -> Result<TrainRow, LedgerError> {
    let sql = "SELECT * FROM train WHERE train = $1";
    match query(sql).bind(train.as_str()).fetch_optional(conn).await? {
        Some(row) => TrainRow::decode(&row),
        None => Err(LedgerError::NoSuchTrain(train.clone())),
    }
}

pub(super) async fn write_status(
    conn: &mut Transaction,
    train: &TrainId,
    to: TrainStatus,
) -> Result<(), LedgerError> {
    query("UPDATE train SET status = $1 WHERE train = $2")
        .bind(to.word())
        .bind(train.as_str())
        .execute(conn)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::Principal;
    use mergeberg_kernel::state::{RequestEvent, RequestState};

    use super::super::testing::{Home, enqueue, on_each_database, train};
    use super::*;

    on_each_database! {
        a_train_is_unfinished_until_its_branch_is_gone,
        rule_r7_a_temporary_name_is_used_once,
        a_train_written_ahead_is_admitted_with_its_row_or_not_at_all,
    }

    async fn a_train_written_ahead_is_admitted_with_its_row_or_not_at_all(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let ids = [enqueue(&ledger, "ingest/a", 1).await, enqueue(&ledger, "ingest/b", 2).await];
        let row = train("t1", &[11, 12]);
        let admissions =
            ids.map(|id| Change { train: Some(row.train.clone()), ..Change::new(id, RequestEvent::Admit) });
        let states = async || {
            let mut states = Vec::new();
            for id in ids {
                states.push(ledger.request(id).await.unwrap().state);
            }
            states
        };

        let deposed = ledger.record_admitted(Epoch(9), &row, &admissions).await.unwrap_err();
        assert!(matches!(deposed, LedgerError::Deposed { .. }), "{deposed}");
        assert_eq!(states().await, [RequestState::Queued; 2]);

        ledger.record_admitted(epoch, &row, &admissions).await.unwrap();
        assert_eq!(states().await, [RequestState::Planning; 2]);
        assert_eq!(ledger.unfinished_trains(&row.table_uuid).await.unwrap(), std::slice::from_ref(&row));

        // One is taken back, and the other waits as before, whether its train is written ahead or not.
        ledger.set_train_status(epoch, &row.train, TrainStatus::Dropped).await.unwrap();
        let back = ids.map(|id| Change::new(id, RequestEvent::Requeue));
        ledger.apply(Some(epoch), &back, 3).await.unwrap();
        ledger.cancel(ids[1], &Principal::new("somebody"), 4).await.unwrap();
        let again = train("t2", &[11, 12]);
        for error in [
            ledger.record_admitted(epoch, &again, &admissions).await.unwrap_err(),
            ledger.admit(epoch, &again.train, &admissions, 5).await.unwrap_err(),
        ] {
            assert!(
                matches!(&error, LedgerError::CarsCancelled { requests, .. } if *requests == [ids[1]]),
                "{error}"
            );
        }
        assert_eq!(states().await, [RequestState::Queued, RequestState::Cancelled]);
        assert!(ledger.unfinished_trains(&row.table_uuid).await.unwrap().is_empty());
    }

    async fn a_train_is_unfinished_until_its_branch_is_gone(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let one = train("t1", &[11, 12]);
        let two = TrainRow { planned_head: None, at_ms: one.at_ms + 1, ..train("t2", &[21]) };
        ledger.record_train(epoch, &one, &[]).await.unwrap();
        ledger.record_train(epoch, &two, &[]).await.unwrap();
        assert_eq!(ledger.unfinished_trains(&one.table_uuid).await.unwrap(), [one.clone(), two.clone()]);

        for status in [TrainStatus::Staged, TrainStatus::Staged, TrainStatus::Dropped] {
            ledger.set_train_status(epoch, &one.train, status).await.unwrap();
        }
        assert_eq!(ledger.unfinished_trains(&one.table_uuid).await.unwrap(), vec![two.clone()]);
        let dropped = ledger.train_of_ref(&one.temp_ref).await.unwrap().unwrap();
        assert_eq!((dropped.train, dropped.status), (one.train.clone(), TrainStatus::Dropped));
        assert_eq!(ledger.train_of_ref(&RefName::new("mergeberg/tmp/other/t9")).await.unwrap(), None);
        for (id, to) in [(&one.train, TrainStatus::Staged), (&two.train, TrainStatus::Landed)] {
            let error = ledger.set_train_status(epoch, id, to).await.unwrap_err();
            assert!(matches!(error, LedgerError::TrainStatus { .. }), "{error}");
        }
    }

    async fn rule_r7_a_temporary_name_is_used_once(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let one = train("t1", &[11]);
        ledger.record_train(epoch, &one, &[]).await.unwrap();
        let same_ref = TrainRow { train: TrainId::new("t2"), ..one.clone() };
        for again in [one, same_ref] {
            let error = ledger.record_train(epoch, &again, &[]).await.unwrap_err();
            assert!(matches!(error, LedgerError::TrainExists(_)), "{error}");
        }
        let deposed = ledger.record_train(Epoch(9), &train("t3", &[31]), &[]).await.unwrap_err();
        assert!(matches!(deposed, LedgerError::Deposed { .. }));
    }
}
