//! The queue database: requests, attempts, trains, evidence, intents and receipts, reviews, the leader.
//!
//! Owns every row and all SQL of the ledger. It exists so that the promises which outlive a process are
//! kept by transactions: at most one open intent a target, no intent without evidence under exactly that
//! candidate id, no write under a lost epoch, one request per idempotency key.
//!
//! On SQLite in WAL mode, one file a queue, or on PostgreSQL (0021). Writers take turns on both, so that what a
//! transaction has read still holds when it writes, and ids grow in the order of commits. On SQLite every writing
//! transaction is BEGIN IMMEDIATE (case O27): a deferred one that read first fails at once when it wants to write,
//! whatever the busy timeout. On PostgreSQL it locks the one row of `queue` first. Writers of one process queue
//! for a single connection, so the lock is contended between processes only. No connection is taken while one is
//! held: a function takes one and hands it down.
//!
//! A commit that somebody may have been told of waits for the disk. One that only says how far a train has
//! got does not: after a power cut it is found again from what the catalog shows, as after a crash. Nothing
//! is reordered by this: the log is one, so the next commit that waits takes all before it along, and
//! an intent or a train's row is on disk before the catalog is called (promise 4, rule L2). What a killed
//! process had committed is never lost either way.
//!
//! Absent on purpose: decisions (the kernel computes every state), catalog calls, clocks (times are
//! arguments; queue id and creation time of a new ledger are the exception), and any way to move a request
//! past an open intent other than settling it.

mod apply;
mod capabilities;
mod decode;
mod error;
mod events;
mod evidence;
mod external;
mod file;
mod heads;
mod input_pins;
mod landing;
mod leader;
mod open;
mod operations;
mod place;
mod replays;
mod requests;
mod reverts;
mod rows;
mod server;
mod session;
mod set_landing;
mod sets;
mod structure;
mod trains;
mod unrecorded;
mod waiting;
mod watch;

#[cfg(test)]
mod migration_tests;
#[cfg(test)]
mod pooler_tests;
#[cfg(test)]
mod race_tests;
#[cfg(test)]
mod set_tests;
#[cfg(test)]
mod testing;

use mergeberg_kernel::ids::QueueId;

pub use apply::Change;
pub use error::{LedgerError, LedgerFault};
pub use events::{EventKind, EventRow};
pub use evidence::EvidenceRow;
pub use external::{ExternalEnd, ExternalOutcome, ExternalRunRow};
pub use heads::{Adoption, ForeignKind, ForeignRow, TargetHead};
pub use input_pins::InputPin;
pub use landing::{Found, Intent, IntentCar, LandingRow, LandingState};
pub use leader::LeaderRow;
pub use open::{MIGRATE_COMMAND, MigrationReport};
pub use operations::{OperationRow, Recorded};
pub use place::LedgerPlace;
pub use replays::ReplayRow;
pub use requests::{Enqueued, NewRequest, RequestFilter};
pub use reverts::{Reverts, TakenBack};
pub use rows::{AttemptRow, RequestRow};
pub use sets::{EnqueuedSet, InSet, OpenSet};
pub use structure::{
    AcceptedStructure, Decided, Decision, NewReview, ReviewFilter, ReviewRow, ReviewState, ReviewWord,
};
pub use trains::{TrainRow, TrainStatus};
pub use unrecorded::{NotedFile, NotedKind, UnrecordedTrain};
pub use waiting::{Depth, Kept, MAX_WAITING, Unreadable, Waiting};
pub use watch::{ChangeCounter, Watcher};

use crate::database::{Pool, Transaction, query};
use error::BusyTries;
use session::LeaderSession;

/// One queue's ledger. Cheap to clone; clones share the connections.
#[derive(Clone, Debug)]
pub struct Ledger {
    place: std::sync::Arc<LedgerPlace>,
    queue: QueueId,
    /// A single connection: writers of this process wait for each other in order, not for the lock.
    writer: Pool,
    readers: Pool,
    /// On PostgreSQL, the session that holds the leader's lock.
    session: LeaderSession,
}

impl Ledger {
    /// Identity of this queue; temporary and pin refs carry it (rule R7).
    pub fn queue_id(&self) -> &QueueId {
        &self.queue
    }

    pub fn place(&self) -> &LedgerPlace {
        &self.place
    }

    /// Closes all connections, so that a file's WAL is folded into it.
    pub async fn close(&self) {
        self.session.close().await;
        self.readers.close().await;
        self.writer.close().await;
    }

    /// A transaction that may write: it holds the write lock from its first statement on. Its commit waits until
    /// it is on disk.
    async fn begin(&self) -> Result<Transaction, LedgerError> {
        self.begin_with(
            "PRAGMA synchronous = FULL; BEGIN IMMEDIATE",
            "SELECT 1 FROM queue WHERE id = 1 FOR UPDATE",
        )
        .await
    }

    /// As [`Self::begin`], for what a restart finds out again: its commit does not wait for the disk.
    async fn begin_progress(&self) -> Result<Transaction, LedgerError> {
        self.begin_with(
            "PRAGMA synchronous = NORMAL; BEGIN IMMEDIATE",
            "SET LOCAL synchronous_commit = off; SELECT 1 FROM queue WHERE id = 1 FOR UPDATE",
        )
        .await
    }

    /// On PostgreSQL each statement sees what was committed before it.
    async fn begin_with(
        &self,
        on_sqlite: &'static str,
        first_on_postgres: &'static str,
    ) -> Result<Transaction, LedgerError> {
        let mut tries = BusyTries::default();
        loop {
            let begun = async {
                let mut tx =
                    self.writer.begin_with(on_sqlite, "BEGIN ISOLATION LEVEL READ COMMITTED").await?;
                tx.first_on_postgres(first_on_postgres).await?;
                Ok(tx)
            };
            match begun.await {
                Ok(tx) => return Ok(tx),
                Err(error) => tries.pause_or_fail(error).await?,
            }
        }
    }

    /// The ledger at one moment, for reads of more than one statement.
    async fn reading(&self) -> Result<Transaction, LedgerError> {
        Ok(self.readers.begin_with("BEGIN", "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?)
    }
}

/// Tells sleeping workers that there is something to do ([`Watcher`]).
async fn wake(tx: &mut Transaction) -> Result<(), LedgerError> {
    query("UPDATE queue SET wakes = wakes + 1 WHERE id = 1").execute(tx).await?;
    Ok(())
}
