//! The kernel's decisions as stories: build a history, ask, compare.
//!
//! `story` is the notation. `cases` follow public bug reports (O01..O40), `rules` and `trains` follow the
//! design and its fine print, `properties` and `oracle` try what nobody thought of.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

mod cases;
mod compactions;
mod deletes;
mod external;
mod inverse;
mod lineage;
mod oracle;
mod parsers;
mod policies;
mod properties;
mod records;
mod rules;
mod sets;
mod statements;
mod states;
mod structures;
mod trains;
mod verdicts;
