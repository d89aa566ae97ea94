//! What can go wrong in a tick, and what the worker does about it.

use crate::ledger::{LedgerError, LedgerFault};
use crate::table::catalog::CatalogError;
use crate::table::error::TableError;
use mergeberg_kernel::reason::ReasonCode;

/// The one thing that the loop matches on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Infrastructure: nobody is blamed, the lane is tried again at the next tick.
    RetryNextTick,
    /// Another leader took over: stop acting at once.
    StepDown,
    /// The ledger or configuration needs a person.
    Stop,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// Its requests are planned again by the next worker.
    #[error("the worker was told to stop while operations were run again")]
    Stopping,
    /// The queue's own fault; nothing was published.
    #[error("{0}; this is a fault of the queue, and nothing was published")]
    Bug(String),
}

impl WorkerError {
    pub fn disposition(&self) -> Disposition {
        match self {
            Self::Ledger(error) => match error.fault() {
                LedgerFault::StepDown => Disposition::StepDown,
                LedgerFault::Retry | LedgerFault::Refused => Disposition::RetryNextTick,
                LedgerFault::Unusable => Disposition::Stop,
            },
            Self::Catalog(_) | Self::Table(_) | Self::Stopping | Self::Bug(_) => Disposition::RetryNextTick,
            Self::Config(_) => Disposition::RetryNextTick,
        }
    }

    /// The reason under which a lane's requests wait while this error stands in their way; `None` when it
    /// says nothing of the table. Nobody's request is refused for it (promise 7).
    pub fn holds_lane(&self) -> Option<ReasonCode> {
        match self {
            Self::Catalog(error) => Some(error.reason()),
            Self::Table(error) => match error.reason() {
                // Met outside of any request's own snapshots: a file of the target is missing.
                ReasonCode::DataFileMissing => Some(ReasonCode::TableUnreadable),
                code => Some(code),
            },
            Self::Ledger(_) | Self::Config(_) | Self::Stopping | Self::Bug(_) => None,
        }
    }
}
