//! The decisions of mergeberg.
//!
//! Everything here is a pure, synchronous function of its arguments: no IO, no clock, no randomness, no
//! async, no iceberg. The worker's shell gathers facts, asks this crate, acts, and records.

pub mod admission;
pub mod change;
pub mod classify;
pub mod commit;
pub mod evidence;
pub mod facts;
pub mod filter;
pub mod ids;
pub mod inverse;
pub mod lineage;
pub mod partition;
pub mod policy;
pub mod reason;
pub mod record;
pub mod retry;
pub mod state;
pub mod structure;
pub mod summary;
pub mod unit;
pub mod verdict;
