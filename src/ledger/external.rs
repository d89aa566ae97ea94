//! Runs of pipelines' own commands: one row a run, written before its temporary branch is made, so that a worker that
//! dies leaves a name to look for. A run that nobody ended belonged to a worker that is gone.

use mergeberg_kernel::admission::external::{ExternalRun, RunOutcome};
use mergeberg_kernel::ids::{Epoch, RefName, RequestId, SnapshotId, TableUuid};
use mergeberg_kernel::state::RequestState;
use serde::Serialize;

use super::Ledger;
use super::decode::{Fields, words};
use super::error::LedgerError;
use super::leader::fence;
use super::rows::RequestRow;
use crate::database::{Row, query};

words! {
    /// How a run ended.
    ExternalOutcome {
        Done = "done",
        /// In a way that another run may not.
        Failed = "failed",
        /// It said that another run would fail as well.
        Refused = "refused",
        TimedOut = "timed-out",
        LeftNothing = "left-nothing",
        OffBase = "off-base",
        /// Its worker ended, or its branch was removed.
        Lost = "lost",
        /// Its request ended.
        Cancelled = "cancelled",
    }
}

/// One run of a request's command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExternalRunRow {
    pub request: RequestId,
    /// From 1, whatever the pin.
    pub run: u32,
    pub table_uuid: TableUuid,
    pub pinned: SnapshotId,
    /// Its temporary branch.
    pub branch: RefName,
    #[serde(skip)]
    pub epoch: Epoch,
    /// Where its branch was made; `None`: it was not yet, as far as the ledger knows.
    pub base: Option<SnapshotId>,
    /// What it left, set exactly when it is `done`.
    pub head: Option<SnapshotId>,
    /// `None`: it is under way.
    pub outcome: Option<ExternalOutcome>,
    /// Exit code of a command, HTTP status of a URL.
    pub status: Option<i64>,
    /// One sentence on how it ended.
    pub text: Option<String>,
    /// The end of what it printed or answered.
    pub output: Option<String>,
    pub ordered_at_ms: i64,
    pub started_at_ms: Option<i64>,
    pub ended_at_ms: Option<i64>,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalEnd {
    pub outcome: ExternalOutcome,
    pub head: Option<SnapshotId>,
    pub status: Option<i64>,
    pub text: String,
    pub output: Option<String>,
}

impl ExternalRunRow {
    /// What the kernel decides on.
    pub fn fact(&self) -> ExternalRun {
        let outcome = match (self.outcome, self.head) {
            (None, _) => RunOutcome::UnderWay,
            (Some(ExternalOutcome::Done), Some(head)) => RunOutcome::Done(head),
            (Some(ExternalOutcome::Failed), _) => RunOutcome::Failed,
            (Some(ExternalOutcome::Refused), _) => RunOutcome::Refused,
            (Some(ExternalOutcome::TimedOut), _) => RunOutcome::TimedOut,
            (Some(ExternalOutcome::LeftNothing), _) => RunOutcome::LeftNothing,
            (Some(ExternalOutcome::OffBase), _) => RunOutcome::OffBase,
            (Some(ExternalOutcome::Done | ExternalOutcome::Lost), _) => RunOutcome::Lost,
            (Some(ExternalOutcome::Cancelled), _) => RunOutcome::Cancelled,
        };
        let at_ms = self.ended_at_ms.unwrap_or(self.ordered_at_ms);
        ExternalRun { outcome, at_ms, text: self.text.clone().unwrap_or_default() }
    }

    fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("external_run", "branch", row);
        let outcome = match f.get::<Option<String>>("outcome")? {
            None => None,
            Some(_) => Some(f.word("outcome", ExternalOutcome::from_word)?),
        };
        let head = f.opt_snapshot("head")?;
        if head.is_some() != (outcome == Some(ExternalOutcome::Done)) {
            return Err(f.wrong("a run has a head exactly when it is done"));
        }
        Ok(Self {
            request: RequestId(f.int("request")?),
            run: f.narrow("run")?,
            table_uuid: f.table_uuid()?,
            pinned: f.snapshot("pinned")?,
            branch: RefName(f.text("branch")?),
            epoch: Epoch(f.int("epoch")?),
            base: f.opt_snapshot("base")?,
            head,
            outcome,
            status: f.get("status")?,
            text: f.get("text")?,
            output: f.get("output")?,
            ordered_at_ms: f.int("ordered_at_ms")?,
            started_at_ms: f.get("started_at_ms")?,
            ended_at_ms: f.get("ended_at_ms")?,
        })
    }
}

impl Ledger {
    /// Orders the next run for a request that waits, on the branch that `branch` names for its number. `None`: one is
    /// under way, or the request has ended or was pinned anew meanwhile.
    pub async fn order_external(
        &self,
        epoch: Epoch,
        request: &RequestRow,
        branch: impl Fn(u32) -> RefName,
        now_ms: i64,
    ) -> Result<Option<ExternalRunRow>, LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        let now = query("SELECT * FROM merge_request WHERE id = $1")
            .bind(request.id.0)
            .fetch_optional(&mut tx)
            .await?
            .ok_or(LedgerError::NoSuchRequest(request.id))?;
        let now = RequestRow::decode(&now)?;
        let runs = query("SELECT * FROM external_run WHERE request = $1 ORDER BY run")
            .bind(request.id.0)
            .fetch_all(&mut tx)
            .await?;
        let runs: Vec<ExternalRunRow> = runs.iter().map(ExternalRunRow::decode).collect::<Result<_, _>>()?;
        let under_way = runs.iter().any(|run| run.outcome.is_none());
        if under_way || !now.state.is_waiting() || now.pinned != request.pinned {
            return Ok(None);
        }
        let run = runs.last().map_or(1, |last| last.run.saturating_add(1));
        let row = query(
            "INSERT INTO external_run (request, run, table_uuid, pinned, branch, epoch, ordered_at_ms)
             VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING *",
        )
        .bind(request.id.0)
        .bind(run)
        .bind(request.table_uuid.as_str())
        .bind(request.pinned.0)
        .bind(branch(run).as_str())
        .bind(epoch.0)
        .bind(now_ms)
        .fetch_optional(&mut tx)
        .await?;
        let row = row.as_ref().map(ExternalRunRow::decode).transpose()?;
        tx.commit().await?;
        Ok(row)
    }

    /// Its branch is at `base`, and the command is about to be started.
    pub async fn external_started(
        &self,
        epoch: Epoch,
        run: &ExternalRunRow,
        base: SnapshotId,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        query("UPDATE external_run SET base = $1, started_at_ms = $2 WHERE request = $3 AND run = $4")
            .bind(base.0)
            .bind(now_ms)
            .bind(run.request.0)
            .bind(run.run)
            .execute(&mut tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Written once: a run that has ended keeps its end.
    pub async fn end_external(
        &self,
        epoch: Epoch,
        run: &ExternalRunRow,
        end: &ExternalEnd,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let ExternalEnd { outcome, head, status, text, output } = end;
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        query(
            "UPDATE external_run SET outcome = $1, head = $2, status = $3, text = $4, output = $5, ended_at_ms = $6
             WHERE request = $7 AND run = $8 AND outcome IS NULL",
        )
        .bind(outcome.word())
        .bind(head.map(|id| id.0))
        .bind(*status)
        .bind(text)
        .bind(output.as_deref())
        .bind(now_ms)
        .bind(run.request.0)
        .bind(run.run)
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Runs of workers that led before `epoch` and did not end them: nobody waits for those.
    pub async fn lose_external(&self, epoch: Epoch, now_ms: i64) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        query(
            "UPDATE external_run SET outcome = $1, text = $2, ended_at_ms = $3 WHERE outcome IS NULL AND epoch < $4",
        )
        .bind(ExternalOutcome::Lost.word())
        .bind("its worker ended while it ran")
        .bind(now_ms)
        .bind(epoch.0)
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// A request's runs, oldest first.
    pub async fn external_runs(&self, request: RequestId) -> Result<Vec<ExternalRunRow>, LedgerError> {
        let sql = "SELECT * FROM external_run WHERE request = $1 ORDER BY run";
        let rows = query(sql).bind(request.0).fetch_all(&self.readers).await?;
        rows.iter().map(ExternalRunRow::decode).collect()
    }

    /// The runs of a table's requests that have not ended; each request's oldest first.
    pub async fn open_external_runs(
        &self,
        table_uuid: &TableUuid,
    ) -> Result<Vec<ExternalRunRow>, LedgerError> {
        let rows = query(
            "SELECT e.* FROM external_run e JOIN merge_request m ON m.id = e.request
             WHERE m.table_uuid = $1 AND m.ended_at_ms IS NULL ORDER BY e.request, e.run",
        )
        .bind(table_uuid.as_str())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(ExternalRunRow::decode).collect()
    }

    /// The run that a temporary branch was made for, with all runs of its request, and the request's state.
    pub async fn external_run_on(
        &self,
        branch: &RefName,
    ) -> Result<Option<(ExternalRunRow, Vec<ExternalRunRow>, RequestState)>, LedgerError> {
        let row = query("SELECT * FROM external_run WHERE branch = $1")
            .bind(branch.as_str())
            .fetch_optional(&self.readers)
            .await?;
        let Some(row) = row else { return Ok(None) };
        let run = ExternalRunRow::decode(&row)?;
        let runs = self.external_runs(run.request).await?;
        let state = self.request(run.request).await?.state;
        Ok(Some((run, runs, state)))
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::Principal;

    use super::super::testing::{Home, enqueue, on_each_database, succeed};
    use super::*;

    on_each_database! {
        a_run_is_ordered_once_and_ends_once,
        a_worker_that_is_gone_leaves_lost_runs,
        nothing_is_ordered_for_a_request_that_ended,
    }

    fn branch(run: u32) -> RefName {
        RefName(format!("mergeberg/tmp/q/external/1-{run}"))
    }

    fn end(outcome: ExternalOutcome, head: Option<i64>) -> ExternalEnd {
        ExternalEnd {
            outcome,
            head: head.map(SnapshotId),
            status: Some(0),
            text: "ended".to_owned(),
            output: Some("bye".to_owned()),
        }
    }

    async fn a_run_is_ordered_once_and_ends_once(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let id = enqueue(&ledger, "transform/a", 7).await;
        let request = ledger.request(id).await.unwrap();
        let run = ledger.order_external(epoch, &request, branch, 5).await.unwrap().unwrap();
        assert_eq!((run.run, run.outcome, run.base, run.branch.clone()), (1, None, None, branch(1)));
        assert_eq!(ledger.order_external(epoch, &request, branch, 6).await.unwrap(), None, "one at a time");
        ledger.external_started(epoch, &run, SnapshotId(10), 7).await.unwrap();
        ledger.end_external(epoch, &run, &end(ExternalOutcome::Done, Some(11)), 8).await.unwrap();
        ledger.end_external(epoch, &run, &end(ExternalOutcome::Lost, None), 9).await.unwrap();
        let runs = ledger.external_runs(id).await.unwrap();
        let [ended] = runs.as_slice() else { panic!("{runs:?}") };
        assert_eq!(ended.fact().outcome, RunOutcome::Done(SnapshotId(11)));
        assert_eq!((ended.base, ended.ended_at_ms), (Some(SnapshotId(10)), Some(8)));
        let again = ledger.order_external(epoch, &request, branch, 10).await.unwrap().unwrap();
        assert_eq!(again.run, 2);
        assert_eq!(ledger.open_external_runs(&request.table_uuid).await.unwrap().len(), 2);
        let (found, all, state) = ledger.external_run_on(&branch(2)).await.unwrap().unwrap();
        assert_eq!((found.run, all.len(), state), (2, 2, RequestState::Queued));
        assert_eq!(ledger.external_run_on(&branch(3)).await.unwrap(), None);
    }

    async fn a_worker_that_is_gone_leaves_lost_runs(home: &Home) {
        let ledger = home.ledger().await;
        let first = ledger.lead("one", 10, 0).await.unwrap().unwrap();
        let id = enqueue(&ledger, "transform/a", 7).await;
        let request = ledger.request(id).await.unwrap();
        let run = ledger.order_external(first, &request, branch, 1).await.unwrap().unwrap();
        ledger.lose_external(first, 2).await.unwrap();
        assert_eq!(ledger.external_runs(id).await.unwrap()[0].outcome, None, "its own are its own");
        let second = succeed(&ledger, "two", 1_000, 100).await;
        let late = end(ExternalOutcome::Done, Some(11));
        assert!(matches!(
            ledger.end_external(first, &run, &late, 101).await,
            Err(LedgerError::Deposed { .. })
        ));
        ledger.lose_external(second, 102).await.unwrap();
        let lost = &ledger.external_runs(id).await.unwrap()[0];
        assert_eq!((lost.outcome, lost.ended_at_ms), (Some(ExternalOutcome::Lost), Some(102)));
    }

    async fn nothing_is_ordered_for_a_request_that_ended(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let id = enqueue(&ledger, "transform/a", 7).await;
        let request = ledger.request(id).await.unwrap();
        let moved = RequestRow { pinned: SnapshotId(8), ..request.clone() };
        assert_eq!(ledger.order_external(epoch, &moved, branch, 5).await.unwrap(), None);
        ledger.cancel(id, &Principal::new("ann"), 6).await.unwrap();
        assert_eq!(ledger.order_external(epoch, &request, branch, 7).await.unwrap(), None);
        assert!(ledger.open_external_runs(&request.table_uuid).await.unwrap().is_empty());
    }
}
