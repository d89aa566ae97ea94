//! Recorded operations run again: an operation becomes files for a car.

pub mod filter;
