//! The shell around the kernel: gather, decide, act, record, in that order.
//!
//! One leader a ledger; inside it one lane a (table, target), tables side by side. A tick takes no input and may run twice.
//! `protocol.rs` holds the order of writes.

mod ages;
mod ahead;
mod board;
pub mod check;
mod checkpoints;
pub mod context;
pub mod error;
mod external;
mod external_sweep;
mod fences;
mod fill;
pub mod foreign;
pub mod gather;
mod input_pins;
pub mod judge;
pub mod landing;
pub mod losses;
pub mod own_sources;
pub mod pins;
pub mod plan;
mod prepare;
mod prepared;
pub mod protocol;
mod replays;
pub mod reverts;
mod rewrites;
pub mod run;
mod set_landing;
mod set_run;
mod set_settle;
mod set_tick;
pub mod settle;
pub mod stage;
pub mod staging;
pub mod step;
pub mod structure;
pub mod tick;
mod tries;
mod unite;
pub mod verdicts;
