//! Recorded operations run again on a target that changed meanwhile.

mod choices;
mod judge;
mod model;
mod operations;
mod property;
mod text;
mod world;
