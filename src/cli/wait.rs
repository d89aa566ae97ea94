//! Waiting until a request has ended.
//!
//! The ledger's change counter is looked at often, since that costs next to nothing; the request itself is
//! read only when something was written.

use std::time::Duration as StdDuration;

use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::policy::Duration;
use mergeberg_kernel::reason::ReasonCode;
use tokio::time::Instant;

use super::answer::Answer;
use super::exit::Exit;
use super::request::end_line;
use crate::error::UserError;
use crate::ledger::{Ledger, RequestRow};

/// Between two looks at the change counter.
const LOOK_EVERY: StdDuration = StdDuration::from_millis(50);

/// The request when it has ended; `timeout` of `None` waits for ever.
pub async fn until_ended(
    ledger: &Ledger,
    id: RequestId,
    timeout: Option<StdDuration>,
) -> Result<RequestRow, UserError> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut changes = ledger.change_counter().await?;
    loop {
        // Counter first: what is written after it is seen by the next look.
        let seen = changes.value().await?;
        let row = ledger.request(id).await?;
        if row.state.is_final() {
            return Ok(row);
        }
        while changes.value().await? == seen {
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(UserError::new(
                    ReasonCode::WaitTimedOut,
                    format!("request {id} has not ended yet; it is {}", row.state),
                ));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// `request wait`: a line on how it ended; the exit code tells landed from the rest.
pub async fn wait(ledger: &Ledger, id: RequestId, timeout: Option<Duration>) -> Result<Answer, UserError> {
    let timeout = timeout.map(|timeout| StdDuration::from_millis(timeout.ms.unsigned_abs()));
    let row = until_ended(ledger, id, timeout).await?;
    let exit = Exit::of_end(row.state);
    // The parts of a set end together.
    let rows = match row.set {
        Some(set) => ledger.parts(set.id).await?,
        None => vec![row.clone()],
    };
    let mut text: String = rows.iter().map(|row| format!("{}\n", end_line(row))).collect();
    if exit == Exit::NotLanded {
        text.push_str(&format!("  why: mergeberg request explain {id}\n"));
    }
    Ok(Answer::new(text, row).with_exit(exit))
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::Principal;

    use super::super::request::tests::new_request;
    use super::*;
    use crate::ledger::Enqueued;

    async fn enqueued() -> (tempfile::TempDir, Ledger, RequestId) {
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::open_or_create(folder.path().join("q.db")).await.unwrap();
        let Enqueued::New(row) = ledger.enqueue(&new_request("ingest/a"), 1).await.unwrap() else { panic!() };
        (folder, ledger, row.id)
    }

    #[tokio::test]
    async fn it_ends_when_the_request_ends() {
        let (_folder, ledger, id) = enqueued().await;
        let ann = Principal::new("ann");
        let (answer, _) = tokio::join!(wait(&ledger, id, None), ledger.cancel(id, &ann, 2));
        let answer = answer.unwrap();
        assert_eq!(answer.exit, Exit::NotLanded);
        assert_eq!(
            answer.text,
            "request 1 ('ingest/a' -> 'main' of nyc.flights) was cancelled\n  why: mergeberg request explain 1\n"
        );
    }

    #[tokio::test]
    async fn a_timeout_is_told_with_the_present_state() {
        let (_folder, ledger, id) = enqueued().await;
        let error = wait(&ledger, id, Some(Duration { ms: 1 })).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::WaitTimedOut);
        assert_eq!(error.message, "request 1 has not ended yet; it is queued");
        assert_eq!(Exit::of_error(error.code), Exit::TimedOut);
    }

    #[tokio::test]
    async fn an_unknown_request_is_no_timeout() {
        let (_folder, ledger, _) = enqueued().await;
        let error = wait(&ledger, RequestId(99), None).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::RequestNotFound);
    }
}
