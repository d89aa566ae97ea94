//! Rendering of the daily report: aligned table, Markdown, JSON. Figures come from the kernel, rows from
//! whoever asks; nothing is computed here but the bounds of a day.

mod daily;
mod day;
pub mod text;

pub use daily::{DailyReport, Format, NotCounted};
pub use day::{Day, DayError};
