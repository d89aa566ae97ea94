//! Waking a worker when another process writes.
//!
//! SQLite has no NOTIFY. `PRAGMA data_version` costs a glance at shared memory and changes with every commit
//! of another connection; only then the `wakes` counter is read, which the worker's own writes leave alone.
//! A worker that slept through a change finds it at its next look: nothing hangs on being woken.

use std::time::Duration;

use sqlx::sqlite::SqliteConnection;
use tokio::time::Instant;

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::open::{connect, options};

/// A connection of its own and what it saw last.
#[derive(Debug)]
pub struct Watcher {
    conn: SqliteConnection,
    data_version: i64,
    wakes: i64,
}

impl Ledger {
    /// A watcher that reports what happens from now on. Make it before the first look at the queue.
    pub async fn watcher(&self) -> Result<Watcher, LedgerError> {
        let options = options(&self.path).pragma("query_only", "ON");
        let conn = connect(&options).await?;
        let mut watcher = Watcher { conn, data_version: 0, wakes: 0 };
        // In this order: a change between the two is seen twice rather than never.
        watcher.data_version = watcher.change_counter().await?;
        watcher.wakes = watcher.read_wakes().await?;
        Ok(watcher)
    }
}

impl Watcher {
    /// Changes whenever another connection committed, of this process or of another.
    pub async fn change_counter(&mut self) -> Result<i64, LedgerError> {
        Ok(sqlx::query_scalar("PRAGMA data_version").fetch_one(&mut self.conn).await?)
    }

    /// Sleeps until something was enqueued, cancelled, decided, adopted or released, looking every `poll`,
    /// at most `max`. Says whether there was something. What happened since the last call counts.
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
            tokio::time::sleep(poll.min(deadline - now)).await;
        }
    }

    async fn has_changed(&mut self) -> Result<bool, LedgerError> {
        let data_version = self.change_counter().await?;
        if data_version == self.data_version {
            return Ok(false);
        }
        let wakes = self.read_wakes().await?;
        self.data_version = data_version;
        let changed = wakes != self.wakes;
        self.wakes = wakes;
        Ok(changed)
    }

    async fn read_wakes(&mut self) -> Result<i64, LedgerError> {
        let row = sqlx::query("SELECT id, wakes FROM queue WHERE id = 1").fetch_one(&mut self.conn).await?;
        Fields::new("queue", "id", &row).int("wakes")
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Principal, RequestId};
    use mergeberg_kernel::state::RequestEvent;

    use super::super::Change;
    use super::super::testing::{enqueue, open};
    use super::*;

    const NO_WAIT: Duration = Duration::ZERO;
    const POLL: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn another_process_wakes_a_sleeping_worker() {
        let (_folder, ledger) = open().await;
        let mut watcher = ledger.watcher().await.unwrap();
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap());
        let other = Ledger::open(ledger.path()).await.unwrap();
        let (woken, _) = tokio::join!(watcher.wait_for_change(POLL, LONG), enqueue(&other, "ingest/a", 1));
        assert!(woken.unwrap());
        assert!(!watcher.wait_for_change(POLL, NO_WAIT).await.unwrap(), "told once");
    }

    #[tokio::test]
    async fn the_workers_own_writes_do_not_wake_it() {
        let (_folder, ledger) = open().await;
        let id = enqueue(&ledger, "ingest/a", 1).await;
        let mut watcher = ledger.watcher().await.unwrap();
        let before = watcher.change_counter().await.unwrap();
        ledger.apply(None, &[Change::new(id, RequestEvent::Admit)], 2).await.unwrap();
        assert_ne!(watcher.change_counter().await.unwrap(), before);
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
