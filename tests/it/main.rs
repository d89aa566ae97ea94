//! The one integration test binary. Real tables in a temporary folder, a real SQL catalog, a real ledger.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod counts;
mod oracle;
mod pins;
mod queue_basics;
mod support;
mod worker_process;
