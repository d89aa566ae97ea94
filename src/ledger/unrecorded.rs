//! Trains whose operations are run again, before they have a row: which files are written for them.
//!
//! A replay writes for minutes or hours. Each of its files is noted here before it is written, so that whoever comes
//! after a worker that died knows what to delete. The train's own row takes the list over, in one transaction.

use std::sync::Arc;

use mergeberg_kernel::ids::{Epoch, RefName, TableUuid, TrainId};

use super::Ledger;
use super::apply::BATCH_ROWS;
use super::decode::{Fields, words};
use super::error::LedgerError;
use super::leader::fence;
use crate::database::{QueryBuilder, Transaction, query};

words! {
    NotedKind {
        /// A data or delete file.
        Rows = "rows",
        Manifest = "manifest",
        ManifestList = "manifest-list",
    }
}

/// A file that is, or was about to be, written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedFile {
    pub path: Arc<str>,
    pub kind: NotedKind,
}

/// A train without a row of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnrecordedTrain {
    pub train: TrainId,
    pub table_uuid: TableUuid,
    pub target: RefName,
    /// No snapshot below this sequence number can name one of its files (rule N1).
    pub first_sequence_number: i64,
    pub at_ms: i64,
}

impl Ledger {
    /// Before the first file of a train is written.
    pub async fn begin_files(&self, epoch: Epoch, train: &UnrecordedTrain) -> Result<(), LedgerError> {
        let UnrecordedTrain { train, table_uuid, target, first_sequence_number, at_ms } = train;
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        query(
            "INSERT INTO unrecorded_train (train, table_uuid, target, first_sequence_number, at_ms)
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT (train) DO NOTHING",
        )
        .bind(train.as_str())
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .bind(*first_sequence_number)
        .bind(*at_ms)
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Notes files before they are written. Waits until the note is on disk: a file may outlive a power cut.
    pub async fn note_files(
        &self,
        epoch: Epoch,
        train: &TrainId,
        files: &[NotedFile],
    ) -> Result<(), LedgerError> {
        if files.is_empty() {
            return Ok(());
        }
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        for batch in files.chunks(BATCH_ROWS) {
            let mut insert = QueryBuilder::new("INSERT INTO unrecorded_file (train, path, kind) ");
            insert.push_values(batch, |mut values, NotedFile { path, kind }| {
                values.push_bind(train.as_str()).push_bind(path.as_ref()).push_bind(kind.word());
            });
            insert.push(" ON CONFLICT (train, path) DO NOTHING");
            insert.build().execute(&mut tx).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// Trains of a table whose files are noted, oldest first.
    pub async fn unrecorded_trains(
        &self,
        table_uuid: &TableUuid,
    ) -> Result<Vec<UnrecordedTrain>, LedgerError> {
        let rows = query("SELECT * FROM unrecorded_train WHERE table_uuid = $1 ORDER BY at_ms, train")
            .bind(table_uuid.as_str())
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| {
                let f = Fields::new("unrecorded_train", "train", row);
                Ok(UnrecordedTrain {
                    train: TrainId(f.text("train")?),
                    table_uuid: f.table_uuid()?,
                    target: f.target()?,
                    first_sequence_number: f.int("first_sequence_number")?,
                    at_ms: f.int("at_ms")?,
                })
            })
            .collect()
    }

    /// The files that were noted for a train.
    pub async fn noted_files(&self, train: &TrainId) -> Result<Vec<NotedFile>, LedgerError> {
        let rows = query("SELECT * FROM unrecorded_file WHERE train = $1 ORDER BY path")
            .bind(train.as_str())
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| {
                let f = Fields::new("unrecorded_file", "path", row);
                Ok(NotedFile {
                    path: Arc::from(f.text("path")?),
                    kind: f.word("kind", NotedKind::from_word)?,
                })
            })
            .collect()
    }

    /// The files of a train that came to nothing are gone.
    pub async fn end_files(&self, epoch: Epoch, train: &TrainId) -> Result<(), LedgerError> {
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        forget_files(&mut tx, train).await?;
        tx.commit().await?;
        Ok(())
    }
}

/// Inside the caller's transaction.
pub(super) async fn forget_files(conn: &mut Transaction, train: &TrainId) -> Result<(), LedgerError> {
    for sql in
        ["DELETE FROM unrecorded_file WHERE train = $1", "DELETE FROM unrecorded_train WHERE train = $1"]
    {
        query(sql).bind(train.as_str()).execute(&mut *conn).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Principal, RequestId};
    use mergeberg_kernel::state::{RequestEvent, RequestState};

    use super::super::Change;
    use super::super::testing::{Home, enqueue, on_each_database, succeed, train};
    use super::*;

    on_each_database! {
        files_are_noted_until_the_trains_row_names_them,
        a_request_is_cancelled_until_its_train_is_recorded,
    }

    fn unrecorded(id: &str) -> UnrecordedTrain {
        let row = train(id, &[11]);
        UnrecordedTrain {
            train: row.train,
            table_uuid: row.table_uuid,
            target: row.target,
            first_sequence_number: 7,
            at_ms: 2,
        }
    }

    async fn files_are_noted_until_the_trains_row_names_them(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let (one, two) = (unrecorded("t1"), unrecorded("t2"));
        ledger.begin_files(epoch, &one).await.unwrap();
        ledger.begin_files(epoch, &two).await.unwrap();
        let file = |path: &str| NotedFile { path: Arc::from(path), kind: NotedKind::Rows };
        let list = NotedFile { kind: NotedKind::ManifestList, ..file("c") };
        ledger.note_files(epoch, &one.train, &[file("b"), file("a")]).await.unwrap();
        ledger.note_files(epoch, &one.train, &[file("a"), list.clone()]).await.unwrap();
        ledger.note_files(epoch, &two.train, &[file("z")]).await.unwrap();
        assert_eq!(ledger.unrecorded_trains(&one.table_uuid).await.unwrap(), [one.clone(), two.clone()]);
        assert_eq!(ledger.noted_files(&one.train).await.unwrap(), [file("a"), file("b"), list]);

        ledger.record_train(epoch, &train("t1", &[11]), &[]).await.unwrap();
        assert_eq!(ledger.unrecorded_trains(&one.table_uuid).await.unwrap(), std::slice::from_ref(&two));
        assert_eq!(ledger.noted_files(&one.train).await.unwrap(), []);
        assert_eq!(ledger.noted_files(&two.train).await.unwrap(), [file("z")]);

        let next = succeed(&ledger, "two", 1_000, 5_000).await;
        let late = ledger.note_files(epoch, &two.train, &[file("y")]).await.unwrap_err();
        assert!(matches!(late, LedgerError::Deposed { .. }), "{late}");
        ledger.end_files(next, &two.train).await.unwrap();
        assert_eq!(ledger.unrecorded_trains(&one.table_uuid).await.unwrap(), []);
        assert_eq!(ledger.noted_files(&two.train).await.unwrap(), []);
    }

    async fn a_request_is_cancelled_until_its_train_is_recorded(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let ann = Principal::new("ann");
        let admitted = async |source: &str, id: &str| -> RequestId {
            let request = enqueue(&ledger, source, 1).await;
            let admit = Change { train: Some(TrainId::new(id)), ..Change::new(request, RequestEvent::Admit) };
            ledger.apply(Some(epoch), &[admit], 2).await.unwrap();
            request
        };
        let (gone, other) = (admitted("ingest/a", "t1").await, admitted("ingest/b", "t1").await);
        let row = ledger.cancel(gone, &ann, 3).await.unwrap();
        assert_eq!((row.state, row.ended_at_ms), (RequestState::Cancelled, Some(3)));

        let refused = ledger.record_train(epoch, &train("t1", &[11]), &[gone, other]).await.unwrap_err();
        assert!(
            matches!(&refused, LedgerError::CarsCancelled { requests, .. } if *requests == [gone]),
            "{refused}"
        );
        assert_eq!(ledger.unfinished_trains(&train("t1", &[11]).table_uuid).await.unwrap(), []);
        // What the train gives back leaves the cancelled one as it is.
        let back = [gone, other].map(|request| Change::new(request, RequestEvent::Requeue));
        ledger.apply(Some(epoch), &back, 4).await.unwrap();
        assert_eq!(ledger.request(gone).await.unwrap().state, RequestState::Cancelled);
        assert_eq!(ledger.request(other).await.unwrap().state, RequestState::Queued);
        // It never goes on.
        let stage = Change::new(gone, RequestEvent::Stage);
        let refused = ledger.apply(Some(epoch), &[stage], 5).await.unwrap_err();
        assert!(matches!(refused, LedgerError::Transition { .. }), "{refused}");

        let rides = admitted("ingest/c", "t2").await;
        ledger.record_train(epoch, &train("t2", &[21]), &[rides]).await.unwrap();
        let late = ledger.cancel(rides, &ann, 6).await.unwrap_err();
        assert!(matches!(late, LedgerError::PastCancelling { request, .. } if request == rides), "{late}");
        assert_eq!(ledger.request(rides).await.unwrap().state, RequestState::Planning);
    }
}
