//! How a page says what it was measured on.

use std::num::NonZeroUsize;

/// Cores and memory, nothing that tells which machine it is.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let kib: Option<u64> = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().trim_end_matches("kB").trim().parse().ok()
    });
    match kib {
        Some(kib) => format!("{cores} cores, {} GiB of memory", (kib + (1 << 19)) >> 20),
        None => format!("{cores} cores"),
    }
}

/// Whether the figures mean anything.
pub fn build() -> &'static str {
    if cfg!(debug_assertions) { "a development build, whose figures mean nothing" } else { "release build" }
}
