//! What benchmarks share: the table of events with its queue, a network that is far away, and how the machine is told.

// Each benchmark uses its part.
#![allow(dead_code)]

pub mod delayed;
pub mod events;
pub mod machine;
