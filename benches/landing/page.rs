//! The page: figures beside their goals, and how they were taken.

use std::fmt::Write;

use crate::suite::Measured;

pub fn render(measured: &[Measured], rounds: usize, pyiceberg_seconds: u32) -> String {
    let mut page = String::new();
    for m in measured {
        let _ = writeln!(
            page,
            "{}: {:.0}/s (floor {:.0}/s, ratio {:.2}), {:?} {:?}",
            m.case.name,
            m.land.per_second(),
            m.floor.per_second(),
            m.land.per_second() / m.floor.per_second(),
            m.land,
            m.pyiceberg
        );
    }
    let _ = (rounds, pyiceberg_seconds);
    page
}
