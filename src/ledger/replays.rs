//! How far an operation has got that is run again: for people, and for nobody's decision.

use mergeberg_kernel::ids::{Epoch, RequestId, TrainId};
use serde::Serialize;

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::leader::fence;
use crate::database::query;

/// The replay of a request: the one under way, or the last one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReplayRow {
    pub request: RequestId,
    pub train: TrainId,
    pub started_at_ms: i64,
    /// When this was told.
    pub at_ms: i64,
    /// Rows of the files that the operation looks at, as the manifests say: an estimate.
    pub rows_to_read: i64,
    pub rows_read: i64,
    pub rows_written: i64,
    /// Begun, not all of them whole.
    pub files_written: i64,
    /// Times that its files were named in the catalog (rule R10).
    pub checkpoints: i64,
    pub last_checkpoint_ms: Option<i64>,
}

impl Ledger {
    /// Tells how far a replay has got.
    pub async fn tell_replay(&self, epoch: Epoch, row: &ReplayRow) -> Result<(), LedgerError> {
        let ReplayRow {
            request,
            train,
            started_at_ms,
            at_ms,
            rows_to_read,
            rows_read,
            rows_written,
            files_written,
            checkpoints,
            last_checkpoint_ms,
        } = row;
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        query(
            "INSERT INTO replay (request, train, started_at_ms, at_ms, rows_to_read, rows_read, rows_written,
                 files_written, checkpoints, last_checkpoint_ms)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
             ON CONFLICT (request) DO UPDATE SET train = excluded.train,
                 started_at_ms = excluded.started_at_ms, at_ms = excluded.at_ms,
                 rows_to_read = excluded.rows_to_read, rows_read = excluded.rows_read,
                 rows_written = excluded.rows_written, files_written = excluded.files_written,
                 checkpoints = excluded.checkpoints, last_checkpoint_ms = excluded.last_checkpoint_ms",
        )
        .bind(request.0)
        .bind(train.as_str())
        .bind(*started_at_ms)
        .bind(*at_ms)
        .bind(*rows_to_read)
        .bind(*rows_read)
        .bind(*rows_written)
        .bind(*files_written)
        .bind(*checkpoints)
        .bind(*last_checkpoint_ms)
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// `None`: nothing of the request was run again.
    pub async fn replay_of(&self, request: RequestId) -> Result<Option<ReplayRow>, LedgerError> {
        let row = query("SELECT * FROM replay WHERE request = $1")
            .bind(request.0)
            .fetch_optional(&self.readers)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let f = Fields::new("replay", "request", &row);
        Ok(Some(ReplayRow {
            request: RequestId(f.int("request")?),
            train: TrainId(f.text("train")?),
            started_at_ms: f.int("started_at_ms")?,
            at_ms: f.int("at_ms")?,
            rows_to_read: f.int("rows_to_read")?,
            rows_read: f.int("rows_read")?,
            rows_written: f.int("rows_written")?,
            files_written: f.int("files_written")?,
            checkpoints: f.int("checkpoints")?,
            last_checkpoint_ms: f.get("last_checkpoint_ms")?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, enqueue, on_each_database};
    use super::*;

    on_each_database! { the_last_word_on_a_replay_is_kept }

    async fn the_last_word_on_a_replay_is_kept(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let request = enqueue(&ledger, "ingest/a", 1).await;
        assert_eq!(ledger.replay_of(request).await.unwrap(), None);
        let first = ReplayRow {
            request,
            train: TrainId::new("t1"),
            started_at_ms: 10,
            at_ms: 20,
            rows_to_read: 100,
            rows_read: 40,
            rows_written: 30,
            files_written: 2,
            checkpoints: 0,
            last_checkpoint_ms: None,
        };
        ledger.tell_replay(epoch, &first).await.unwrap();
        let next = ReplayRow { at_ms: 30, checkpoints: 1, last_checkpoint_ms: Some(25), ..first };
        ledger.tell_replay(epoch, &next).await.unwrap();
        assert_eq!(ledger.replay_of(request).await.unwrap(), Some(next.clone()));
        let deposed = ledger.tell_replay(Epoch(9), &next).await.unwrap_err();
        assert!(matches!(deposed, LedgerError::Deposed { .. }), "{deposed}");
    }
}
