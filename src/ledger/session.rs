//! The leader's session on PostgreSQL: a connection of its own whose session holds an advisory lock (case O40).
//!
//! Never one of a pool, which would hand the lock on with the connection. The lock is the session's: when the
//! process dies or the network parts, the server ends the session and the lock is free, without a lease that
//! clocks have to agree on. A process that hangs sends no heartbeats, and the server ends its session too. What a
//! worker still writes then is refused: each of its transactions asks the server whether the session that took the
//! lock under this epoch still holds it (view `present_committer`).

use std::sync::Arc;
use std::time::Duration;

use mergeberg_kernel::ids::Epoch;
use sqlx::Connection as _;
use sqlx::postgres::PgConnection;
use tokio::sync::Mutex;

use super::Ledger;
use super::error::LedgerError;
use super::leader::announce;
use crate::database::{PostgresPlace, Trouble, query};

/// A session that says nothing is ended after the lease, but not sooner than this: a slow machine is not a dead one.
const MIN_SILENCE_MS: i64 = 10_000;
/// A heartbeat without an answer for so long means that the session is lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);
/// For finding out whether a pooler is in between.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, Default)]
pub(super) struct LeaderSession(Arc<Mutex<Slot>>);

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Empty,
    /// Connected, while somebody else holds the lock.
    Waiting(PgConnection),
    Leading(PgConnection),
}

impl LeaderSession {
    /// Ends the session, and with it the lock.
    pub async fn close(&self) {
        let slot = std::mem::take(&mut *self.0.lock().await);
        if let Slot::Waiting(conn) | Slot::Leading(conn) = slot {
            // When it cannot be told any more, the server notices by itself.
            let _ = tokio::time::timeout(HEARTBEAT_TIMEOUT, conn.close()).await;
        }
    }
}

impl Ledger {
    /// [`Ledger::lead`] on PostgreSQL. On any error the connection is closed, not kept: a lock that was taken in
    /// vain would be held by nobody for ever.
    pub(super) async fn lead_by_session(
        &self,
        place: &PostgresPlace,
        holder: &str,
        lease_ms: i64,
        now_ms: i64,
    ) -> Result<Option<Epoch>, LedgerError> {
        let mut slot = self.session.0.lock().await;
        let mut conn = match std::mem::take(&mut *slot) {
            Slot::Empty => begin_session(place, lease_ms).await?,
            Slot::Waiting(conn) => conn,
            Slot::Leading(mut conn) => {
                if is_alive(&mut conn).await {
                    *slot = Slot::Leading(conn);
                    return Ok(None);
                }
                begin_session(place, lease_ms).await?
            }
        };
        let row = query(
            "SELECT pg_try_advisory_lock(hashtextextended(queue_id, 0)) AS taken,
                 pg_backend_pid()::BIGINT AS pid
             FROM queue WHERE id = 1",
        )
        .fetch_one(&mut conn)
        .await?;
        if !row.try_get::<bool>("taken")? {
            *slot = Slot::Waiting(conn);
            return Ok(None);
        }
        let mut tx = self.begin().await?;
        query(
            "UPDATE committer
             SET holder = $1, epoch = epoch + 1, heartbeat_ms = $2, lease_ms = $3, session_pid = $4
             WHERE id = 1",
        )
        .bind(holder)
        .bind(now_ms)
        .bind(lease_ms)
        .bind(row.try_get::<i64>("pid")?)
        .execute(&mut tx)
        .await?;
        let epoch = announce(&mut tx, holder, now_ms).await?;
        tx.commit().await?;
        *slot = Slot::Leading(conn);
        Ok(Some(epoch))
    }

    /// [`Ledger::renew`] on PostgreSQL: on the session itself, so that its loss is noticed.
    pub(super) async fn renew_session(&self, epoch: Epoch, now_ms: i64) -> Result<(), LedgerError> {
        let mut slot = self.session.0.lock().await;
        let Slot::Leading(conn) = &mut *slot else {
            return Err(LedgerError::Deposed { epoch, leader: self.leader().await? });
        };
        let beat = query(
            "UPDATE committer SET heartbeat_ms = GREATEST(heartbeat_ms, $1)
             WHERE id = 1 AND epoch = $2 AND holder IS NOT NULL",
        )
        .bind(now_ms)
        .bind(epoch.0)
        .execute(&mut *conn);
        match tokio::time::timeout(HEARTBEAT_TIMEOUT, beat).await {
            Ok(Ok(1..)) => Ok(()),
            Ok(Ok(0)) => Err(LedgerError::Deposed { epoch, leader: self.leader().await? }),
            Ok(Err(error)) if Trouble::of(&error) == Trouble::Busy => Err(LedgerError::Busy),
            Ok(Err(_)) | Err(_) => {
                *slot = Slot::Empty;
                Err(LedgerError::Deposed { epoch, leader: None })
            }
        }
    }
}

async fn begin_session(place: &PostgresPlace, lease_ms: i64) -> Result<PgConnection, LedgerError> {
    let mut conn = place.connect().await?;
    refuse_pooler(&mut conn, place).await?;
    let silence = lease_ms.max(MIN_SILENCE_MS);
    // A heartbeat lost with the power is of no consequence.
    let settings = "SELECT set_config('idle_session_timeout', $1, false),
                        set_config('synchronous_commit', 'off', false)";
    query(settings).bind(silence.to_string()).execute(&mut conn).await?;
    Ok(conn)
}

async fn is_alive(conn: &mut PgConnection) -> bool {
    matches!(tokio::time::timeout(HEARTBEAT_TIMEOUT, conn.ping()).await, Ok(Ok(())))
}

/// Behind a pooler in transaction mode a session's lock would stay with whichever connection took it. Two clients
/// tell: while the second one has a transaction open, the first is given another session than before, or the second
/// was given the first one's.
async fn refuse_pooler(conn: &mut PgConnection, place: &PostgresPlace) -> Result<(), LedgerError> {
    let probe = async {
        let mine = uuid::Uuid::new_v4().simple().to_string();
        query("SELECT set_config('mergeberg.session', $1, false)").bind(&mine).execute(&mut *conn).await?;
        let mut second = place.connect().await?;
        let mut tx = second.begin().await?;
        let seen: Option<String> = session_name(&mut tx).await?;
        let kept: Option<String> = session_name(&mut *conn).await?;
        tx.rollback().await?;
        second.close().await?;
        Ok::<bool, sqlx::Error>(seen.as_ref() != Some(&mine) && kept.as_ref() == Some(&mine))
    };
    match tokio::time::timeout(PROBE_TIMEOUT, probe).await {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err(behind_a_pooler("sessions change between transactions")),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(behind_a_pooler("there is no second session while one is open")),
    }
}

async fn session_name(conn: &mut PgConnection) -> Result<Option<String>, sqlx::Error> {
    query("SELECT current_setting('mergeberg.session', true)").scalar(conn).await
}

fn behind_a_pooler(what: &str) -> LedgerError {
    let source = sqlx::Error::Protocol(what.to_owned());
    LedgerError::Server { at: String::new(), trouble: Trouble::Pooler, source }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
