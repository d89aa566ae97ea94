//! The one integration test binary. Real tables in a temporary folder, a real SQL catalog, a real ledger.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod bad_input;
mod bad_input_world;
mod binary;
mod busy_writers;
mod cases_meaning;
mod cases_publishing;
mod cases_queue;
mod cases_structure;
mod cases_trains;
mod cases_upkeep;
mod catalogs;
mod claims;
mod compactions;
mod counts;
mod crashes;
mod deletes;
mod demo;
mod doctor;
mod engine_tables;
mod engines;
mod format_v3;
mod large_table;
mod oracle;
mod outcomes;
mod over_rest;
mod partition_names;
mod pins;
mod queue_basics;
mod races;
mod readme;
mod replays;
mod rest_client;
mod rest_faults;
mod rest_openapi;
mod revert;
mod rules_classification;
mod rules_evidence;
mod rules_landing;
mod rules_refs;
mod sources;
mod spark_after_landing;
mod support;
mod worker_process;
