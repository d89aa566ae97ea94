//! `mergeberg demo`: a day of a merge queue on real flights, from an empty folder to a verified target.
//!
//! The shipped worker runs as a process of its own on the real clock; pipelines are processes too and write
//! at the same time. What depends on what is waited for (a request's state, a commit), never slept for, so
//! states, reasons and rows are the same on every run.
//!
//! - `scenario` is the table of steps and of the end states that they must come to,
//! - `flights` gives the fixtures, which are part of the binary,
//! - `folder` makes folder, configuration and tables anew,
//! - `writers` is what a pipeline's process does, `pipelines` speaks to it from the other side,
//! - `run` is the order of the day, `verify` compares what came of it with what should have,
//! - `progress` shows it live.
//!
//! Absent on purpose: any way into the queue that another program does not have. The demo only uses what
//! commands use: enqueue, worker, review, report.

mod flights;
mod folder;
mod pipelines;
mod progress;
mod run;
mod scenario;
mod verify;
mod writers;

use mergeberg_kernel::ids::TableName;
use mergeberg_kernel::reason::ReasonCode;

use crate::error::UserError;
use crate::table::branch_writer::BranchWriteError;
use crate::table::error::TableError;

pub use folder::CONFIG_FILE;
pub use run::{Demonstrated, demonstrate};
pub use writers::serve;

/// Something that cannot happen in a demonstration did: a fault of mergeberg, or of the machine.
fn failed(what: impl std::fmt::Display) -> UserError {
    UserError::new(ReasonCode::Internal, what.to_string())
}

fn table_name(name: &str) -> TableName {
    TableName { namespace: vec![scenario::NAMESPACE.to_owned()], name: name.to_owned() }
}

impl From<BranchWriteError> for UserError {
    fn from(error: BranchWriteError) -> Self {
        match error {
            BranchWriteError::Catalog(error) => error.into(),
            BranchWriteError::Table(error) => Self::new(error.reason(), error.to_string()),
            error @ (BranchWriteError::Moved(_) | BranchWriteError::Busy | BranchWriteError::Unknown(_)) => {
                Self::new(ReasonCode::CatalogUnavailable, error.to_string())
            }
        }
    }
}

impl From<TableError> for UserError {
    fn from(error: TableError) -> Self {
        Self::new(error.reason(), error.to_string())
    }
}
