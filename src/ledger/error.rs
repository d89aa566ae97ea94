//! What can go wrong in the ledger, and what a caller does about it.

use std::time::Duration;

use mergeberg_kernel::ids::{Epoch, IntentId, RefName, RequestId, ReviewId, SnapshotId, TableUuid, TrainId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::{RequestState, TransitionError};

use super::landing::LandingState;
use super::leader::LeaderRow;
use super::open::MIGRATE_COMMAND;
use super::place::LedgerPlace;
use super::structure::ReviewWord;
use super::trains::TrainStatus;
use crate::database::{Trouble, plain};

/// How long one statement waits for another process's lock.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a busy BEGIN is tried, each try with [`BUSY_TIMEOUT`].
const BUSY_TRIES: u32 = 4;
/// Between two tries: some busy answers come at once, without SQLite waiting.
const BUSY_PAUSE: Duration = Duration::from_millis(25);

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("there is no ledger at {path}; create it with `{MIGRATE_COMMAND}`")]
    Missing { path: String },
    #[error("the ledger at {path} lacks migrations {pending:?}; run `{MIGRATE_COMMAND}`")]
    Pending {
        path: String,
        pending: Vec<i64>,
        /// Nothing was applied yet: the file is new.
        fresh: bool,
    },
    #[error(
        "the ledger at {path} has migration {version}, which this release does not know; run the release \
         that wrote it, or a newer one"
    )]
    Newer { path: String, version: i64 },
    #[error("migration {version} of the ledger at {path} is not the one of this release; restore a backup")]
    Altered { path: String, version: i64 },
    #[error("{path} is another application's database; name another as ledger in mergeberg.toml")]
    Foreign { path: String },
    #[error(
        "the ledger{at} cannot be used: {source}; restore the file from a backup, or name another in \
         mergeberg.toml"
    )]
    Unusable {
        /// ` at <path>`, or empty where the path is not at hand.
        at: String,
        source: sqlx::Error,
    },
    /// On PostgreSQL.
    #[error("the ledger{at} cannot be used: {}; {}", plain(source), trouble.next())]
    Server {
        /// ` at <address>`, or empty where the address is not at hand.
        at: String,
        trouble: Trouble,
        source: sqlx::Error,
    },
    #[error("the ledger's migrations cannot be applied: {0}")]
    Migrate(#[source] sqlx::migrate::MigrateError),

    /// Nobody's fault (case O27): no request is failed for it.
    #[error("another process holds the ledger's write lock; it is tried again")]
    Busy,
    #[error("the ledger did not answer: {0}")]
    Database(#[source] sqlx::Error),

    #[error("the ledger's schema refused a row, which is a fault of the queue: {0}")]
    Constraint(#[source] sqlx::Error),
    #[error("row {id} of {table} is inconsistent: {what}; restore the ledger from a backup")]
    Row { table: &'static str, id: String, what: String },
    #[error("a value cannot be stored in the ledger: {0}")]
    Encode(#[source] serde_json::Error),

    #[error("there is no request {0} in this queue; `request list` shows all")]
    NoSuchRequest(RequestId),
    #[error("there is no review item {0}; `review list` shows all")]
    NoSuchReview(ReviewId),
    #[error("there is no landing intent {0}")]
    NoSuchIntent(IntentId),
    #[error("there is no train {0}")]
    NoSuchTrain(TrainId),
    #[error("'{0}' is no state of a request")]
    NoSuchState(String),

    #[error("epoch {epoch} is over: {}; this worker steps down", describe_leader(leader.as_ref()))]
    Deposed { epoch: Epoch, leader: Option<LeaderRow> },

    #[error("request {request}: {error}")]
    Transition {
        request: RequestId,
        #[source]
        error: TransitionError,
    },
    /// Promise 4: once an intent is written only its settlement moves the request.
    #[error("request {request} is {state}: only the settlement of its landing intent changes it")]
    BoundToIntent { request: RequestId, state: RequestState },
    #[error("request {request}: this event is only written together with its landing intent")]
    NeedsIntent { request: RequestId },

    #[error("the tables that were named are no set: {0}")]
    NotASet(&'static str),

    #[error("train {0} is recorded already; train ids and temporary refs are never used twice")]
    TrainExists(TrainId),
    /// Nothing was recorded: the others are planned again.
    #[error("{} of train {train} was cancelled before it was recorded", list(requests))]
    CarsCancelled { train: TrainId, requests: Vec<RequestId> },
    #[error("request {request} is past being cancelled: its train {train} is recorded and goes on")]
    PastCancelling { request: RequestId, train: TrainId },
    #[error("train {train} is {from} and cannot become {to}")]
    TrainStatus { train: TrainId, from: TrainStatus, to: TrainStatus },

    #[error("a landing of {table_uuid} on '{target}' is open already; settle it first")]
    IntentOpen { table_uuid: TableUuid, target: RefName },
    #[error("intent {intent} is malformed: {what}")]
    MalformedIntent { intent: IntentId, what: String },
    /// Promise 2: passing evidence under exactly that id.
    #[error("candidate {candidate} has no passed evidence of check '{check}'; it is not landed")]
    EvidenceMissing { candidate: SnapshotId, check: String },
    #[error("intent {intent} is settled already: {}", state.word())]
    IntentSettled { intent: IntentId, state: LandingState },

    #[error("review item {review} was decided already: {state}")]
    ReviewDecided { review: ReviewId, state: ReviewWord },
    #[error("review item {review} cannot be approved, the change is unsafe: {what}")]
    UnsafeStructure { review: ReviewId, what: String },
}

/// What the caller does about an error; the worker matches on this alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerFault {
    /// Infrastructure: the same call may succeed in the next tick.
    Retry,
    /// Another worker leads: stop writing.
    StepDown,
    /// No call will succeed before a person has repaired the file or its migrations.
    Unusable,
    /// A rule said no and nothing was written: a mistake of whoever called.
    Refused,
}

impl LedgerError {
    pub fn fault(&self) -> LedgerFault {
        match self {
            Self::Busy | Self::Database(_) | Self::Server { trouble: Trouble::Unreachable, .. } => {
                LedgerFault::Retry
            }
            Self::Deposed { .. } => LedgerFault::StepDown,
            Self::Missing { .. }
            | Self::Pending { .. }
            | Self::Newer { .. }
            | Self::Altered { .. }
            | Self::Foreign { .. }
            | Self::Unusable { .. }
            | Self::Server { .. }
            | Self::Migrate(_)
            | Self::Row { .. } => LedgerFault::Unusable,
            Self::Encode(_)
            | Self::Constraint(_)
            | Self::NoSuchRequest(_)
            | Self::NoSuchReview(_)
            | Self::NoSuchIntent(_)
            | Self::NoSuchTrain(_)
            | Self::NoSuchState(_)
            | Self::Transition { .. }
            | Self::BoundToIntent { .. }
            | Self::NeedsIntent { .. }
            | Self::NotASet(_)
            | Self::TrainExists(_)
            | Self::CarsCancelled { .. }
            | Self::PastCancelling { .. }
            | Self::TrainStatus { .. }
            | Self::IntentOpen { .. }
            | Self::MalformedIntent { .. }
            | Self::EvidenceMissing { .. }
            | Self::IntentSettled { .. }
            | Self::ReviewDecided { .. }
            | Self::UnsafeStructure { .. } => LedgerFault::Refused,
        }
    }

    /// The code that people are shown; `None` for what never leaves the worker.
    pub fn reason(&self) -> Option<ReasonCode> {
        match self.fault() {
            LedgerFault::Unusable => Some(ReasonCode::LedgerUnusable),
            LedgerFault::Retry | LedgerFault::StepDown => None,
            LedgerFault::Refused => match self {
                Self::UnsafeStructure { .. } => Some(ReasonCode::UnsafeStructure),
                _ => None,
            },
        }
    }

    /// Names the ledger in an error that does not know it.
    pub(super) fn at(self, place: &LedgerPlace) -> Self {
        match self {
            Self::Unusable { source, .. } => Self::Unusable { at: format!(" at {place}"), source },
            Self::Server { trouble, source, .. } => {
                Self::Server { at: format!(" at {place}"), trouble, source }
            }
            other => other,
        }
    }
}

impl From<sqlx::Error> for LedgerError {
    fn from(source: sqlx::Error) -> Self {
        match primary_code(&source) {
            Some(SQLITE_BUSY | SQLITE_LOCKED) => Self::Busy,
            Some(SQLITE_CORRUPT | SQLITE_NOTADB | SQLITE_CANTOPEN | SQLITE_READONLY) => {
                Self::Unusable { at: String::new(), source }
            }
            Some(SQLITE_CONSTRAINT) => Self::Constraint(source),
            Some(_) => Self::Database(source),
            // The single writer connection stayed taken: as good as a lock.
            None if matches!(source, sqlx::Error::PoolTimedOut) => Self::Busy,
            None => match Trouble::of(&source) {
                Trouble::Busy => Self::Busy,
                Trouble::Constraint => Self::Constraint(source),
                Trouble::Other => Self::Database(source),
                trouble => Self::Server { at: String::new(), trouble, source },
            },
        }
    }
}

// Primary result codes (sqlite.org/rescode.html).
const SQLITE_BUSY: i64 = 5;
const SQLITE_LOCKED: i64 = 6;
const SQLITE_READONLY: i64 = 8;
const SQLITE_CORRUPT: i64 = 11;
const SQLITE_CANTOPEN: i64 = 14;
const SQLITE_CONSTRAINT: i64 = 19;
const SQLITE_NOTADB: i64 = 26;
/// Extended codes carry their primary code in the low byte.
const PRIMARY_MASK: i64 = 0xff;

/// `None`: no error of SQLite.
fn primary_code(error: &sqlx::Error) -> Option<i64> {
    let error = error.as_database_error()?.try_downcast_ref::<sqlx::sqlite::SqliteError>()?;
    let code = sqlx::error::DatabaseError::code(error)?;
    code.parse::<i64>().ok().map(|code| code & PRIMARY_MASK)
}

pub(super) fn is_unique_violation(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|e| e.is_unique_violation())
}

/// Tries of something that another's lock stopped before it did anything.
#[derive(Default)]
pub(super) struct BusyTries {
    failed: u32,
}

impl BusyTries {
    /// Returns after a pause when it is worth another try, at most [`BUSY_TRIES`] in all; else the error.
    pub async fn pause_or_fail(&mut self, error: sqlx::Error) -> Result<(), LedgerError> {
        let error = LedgerError::from(error);
        self.failed += 1;
        if !matches!(error, LedgerError::Busy) || self.failed >= BUSY_TRIES {
            return Err(error);
        }
        tokio::time::sleep(BUSY_PAUSE).await;
        Ok(())
    }
}

fn list(requests: &[RequestId]) -> String {
    let ids: Vec<String> = requests.iter().map(ToString::to_string).collect();
    format!("request {}", ids.join(", "))
}

fn describe_leader(leader: Option<&LeaderRow>) -> String {
    match leader {
        Some(leader) => format!("'{}' leads under epoch {}", leader.holder, leader.epoch),
        None => "nobody leads now".to_owned(),
    }
}
