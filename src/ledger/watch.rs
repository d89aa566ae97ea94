//! Waking a worker when another process writes.
//!
//! Whatever concerns a worker counts up `queue.wakes` in its own transaction; the worker's own writes leave it
//! alone. How a change of it is noticed differs (0006, 0021). SQLite has no NOTIFY: `PRAGMA data_version` costs a
//! glance at shared memory and changes with every commit of another connection, and only then the counter is read.
//! On PostgreSQL a trigger notifies, and the counter is read after a notification and whenever somebody begins to
//! wait: a notification may be lost with a connection, a count is not. A worker that slept through a change finds
//! it at its next look: nothing hangs on being woken.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPool};
use sqlx::sqlite::SqliteConnection;
use tokio::time::Instant;

use super::decode::Fields;
use super::error::{LedgerError, LedgerFault};
use super::file::{connect, options};
use super::{Ledger, LedgerPlace};
use crate::database::{Pool, Target, query};

/// After a listening connection was lost and could not be had again.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// A connection of its own and what it saw last.
#[derive(Debug)]
pub struct Watcher {
    source: Source,
    wakes: i64,
}

#[derive(Debug)]
enum Source {
    File { conn: SqliteConnection, data_version: i64 },
    Server(Listening),
}

struct Listening {
    listener: Option<PgListener>,
    /// Of the one connection that listens.
    pool: PgPool,
    channel: String,
    readers: Pool,
}

impl std::fmt::Debug for Listening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listening").field("channel", &self.channel).finish_non_exhaustive()
    }
}

impl Ledger {
    /// A watcher that reports what happens from now on. Make it before the first look at the queue.
    pub async fn watcher(&self) -> Result<Watcher, LedgerError> {
        match &*self.place {
            LedgerPlace::File(path) => {
                let mut conn = connect(&options(path).pragma("query_only", "ON")).await?;
                // In this order: a change between the two is seen twice rather than never.
                let data_version = data_version(&mut conn).await?;
                let wakes = read_wakes(&mut conn).await?;
                Ok(Watcher { source: Source::File { conn, data_version }, wakes })
            }
            LedgerPlace::Postgres(place) => {
                let mut listening = Listening {
                    listener: None,
                    pool: place.pool(1),
                    // As the trigger on `queue` names it.
                    channel: format!("mergeberg_{}", self.queue),
                    readers: self.readers.clone(),
                };
                listening.listen().await?;
                let wakes = read_wakes(&listening.readers).await?;
                Ok(Watcher { source: Source::Server(listening), wakes })
            }
        }
    }
}

/// Something that changes with every state that a request enters, and costs next to nothing to look at: for those
/// who wait for a request's end.
#[derive(Debug)]
pub struct ChangeCounter(Counted);

#[derive(Debug)]
enum Counted {
    /// Changes with whatever another connection commits.
    File(SqliteConnection),
    Server(Pool),
}

impl Ledger {
    pub async fn change_counter(&self) -> Result<ChangeCounter, LedgerError> {
        Ok(ChangeCounter(match &*self.place {
            LedgerPlace::File(path) => {
                Counted::File(connect(&options(path).pragma("query_only", "ON")).await?)
            }
            LedgerPlace::Postgres(_) => Counted::Server(self.readers.clone()),
        }))
    }
}

impl ChangeCounter {
    pub async fn value(&mut self) -> Result<i64, LedgerError> {
        match &mut self.0 {
            Counted::File(conn) => data_version(conn).await,
            Counted::Server(readers) => {
                Ok(query("SELECT COALESCE(MAX(id), 0) FROM merge_attempt").scalar(&*readers).await?)
            }
        }
    }
}

impl Watcher {
    /// Sleeps until something was enqueued, cancelled, decided, adopted or released, on SQLite looking every
    /// `poll`, at most `max`. Says whether there was something. What happened since the last call counts.
    pub async fn wait_for_change(&mut self, poll: Duration, max: Duration) -> Result<bool, LedgerError> {
        let deadline = Instant::now() + max;
        loop {
            if self.has_changed().await? {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            match &mut self.source {
                Source::File { .. } => tokio::time::sleep(poll.min(deadline - now)).await,
                Source::Server(listening) => Box::pin(listening.rest(deadline)).await,
            }
        }
    }

    async fn has_changed(&mut self) -> Result<bool, LedgerError> {
        let wakes = match &mut self.source {
            Source::File { conn, data_version: seen } => {
                let now = data_version(conn).await?;
                if now == *seen {
                    return Ok(false);
                }
                let wakes = read_wakes(conn).await?;
                *seen = now;
                wakes
            }
            Source::Server(listening) => match read_wakes(&listening.readers).await {
                Ok(wakes) => wakes,
                // Whoever leads hears of it from the session of the lock.
                Err(error) if error.fault() == LedgerFault::Retry => {
                    tracing::warn!("news in the ledger cannot be looked for: {error}");
                    return Ok(false);
                }
                Err(error) => return Err(error),
            },
        };
        let changed = wakes != self.wakes;
        self.wakes = wakes;
        Ok(changed)
    }
}

impl Listening {
    async fn listen(&mut self) -> Result<&mut PgListener, sqlx::Error> {
        let listener = match self.listener.take() {
            Some(listener) => listener,
            None => {
                let mut listener = PgListener::connect_with(&self.pool).await?;
                listener.listen(&self.channel).await?;
                listener
            }
        };
        Ok(self.listener.insert(listener))
    }

    /// Until there is a notification, or the connection was made anew, at most until `deadline`.
    async fn rest(&mut self, deadline: Instant) {
        let next = async {
            let listener = self.listen().await?;
            listener.try_recv().await
        };
        match tokio::time::timeout_at(deadline, next).await {
            Ok(Ok(_)) | Err(_) => {}
            Ok(Err(error)) => {
                tracing::warn!("the ledger's notifications cannot be heard: {error}");
                self.listener = None;
                tokio::time::sleep_until(deadline.min(Instant::now() + LISTEN_AGAIN)).await;
            }
        }
    }
}

/// Changes whenever another connection committed, of this process or of another.
async fn data_version(conn: &mut SqliteConnection) -> Result<i64, LedgerError> {
    Ok(query("PRAGMA data_version").scalar(conn).await?)
}

async fn read_wakes<'c>(on: impl Into<Target<'c>>) -> Result<i64, LedgerError> {
    let row = query("SELECT id, wakes FROM queue WHERE id = 1").fetch_one(on).await?;
    Fields::new("queue", "id", &row).int("wakes")
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Principal, RequestId};
    use mergeberg_kernel::state::RequestEvent;

    use super::super::Change;
    use super::super::testing::{Home, enqueue, on_each_database};
    use super::*;

    on_each_database! {
        another_process_wakes_a_sleeping_worker,
        the_workers_own_writes_do_not_wake_it,
    }

    const NO_WAIT: Duration = Duration::ZERO;
    const POLL: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    async fn another_process_wakes_a_sleeping_worker(home: &Home) {
        let ledger = home.ledger().await;
        let mut watcher = ledger.watcher().await.unwrap();
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());
        let other = Ledger::open(ledger.place()).await.unwrap();
        let (woken, _) = tokio::join!(watcher.wait_for_change(POLL, LONG), enqueue(&other, "ingest/a", 1));
        assert!(woken.unwrap());
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap(), "told once");
    }

    async fn the_workers_own_writes_do_not_wake_it(home: &Home) {
        let ledger = home.ledger().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        let mut watcher = ledger.watcher().await.unwrap();
        ledger.apply(None, &[Change::new(id, RequestEvent::Admit)], 2).await.unwrap();
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());

        // A change that came in while the worker wrote is not lost.
        let other = enqueue(&ledger, "ingest/b", 2).await;
        ledger.apply(None, &[Change::new(id, RequestEvent::Requeue)], 3).await.unwrap();
        assert!(watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());
        ledger.cancel(other, &Principal::new("ann"), 4).await.unwrap();
        assert!(watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());
        assert!(ledger.cancel(RequestId(99), &Principal::new("ann"), 5).await.is_err());
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());
    }
}
