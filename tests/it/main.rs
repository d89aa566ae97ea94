//! The one integration test binary. Real tables in a temporary folder, a real SQL catalog, a real ledger.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bad_input;
mod bad_input_world;
mod binary;
mod queue_basics;
mod readme;
mod support;
