//! mergeberg: a merge queue for Apache Iceberg tables.
//!
//! Decisions live in the `mergeberg-kernel` crate; this crate acts. `ARCHITECTURE.md` is the map.

pub mod cli;
pub mod config;
pub mod database;
pub mod demo;
pub mod doctor;
pub mod error;
pub mod external;
pub mod ledger;
mod near;
pub mod replay;
pub mod report;
pub mod secret;
pub mod table;
pub mod validate;
pub mod worker;
