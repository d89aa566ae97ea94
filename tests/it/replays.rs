//! Recorded operations run again on a target that changed meanwhile.

mod cases;
mod choices;
mod inputs_kept;
mod judge;
mod meaning;
mod model;
mod operations;
mod property;
mod recording;
mod text;
mod world;
