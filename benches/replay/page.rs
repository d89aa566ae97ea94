//! The page: figures, and how they were taken.

use std::fmt::Write;
use std::num::NonZeroUsize;

use crate::case::Kind;
use crate::measure::Run;
use crate::suite::{Measured, Options};

pub fn render(measured: &[Measured], options: &Options) -> Result<String, std::fmt::Error> {
    let mut page = String::new();
    writeln!(
        page,
        "# Benchmarks of rebases\n\n\
         Written by `cargo bench --bench replay`; not edited by hand. Absolute figures are those of one machine on one \
         day ({}, local disk, {}). Rounds: {}; a figure is that of the median round, with the range of all in \
         brackets. How fast a full queue lands is in [benchmarks.md](benchmarks.md).\n",
        machine(),
        if cfg!(debug_assertions) {
            "a development build, whose figures mean nothing"
        } else {
            "release build"
        },
        options.rounds
    )?;
    metadata(&mut page, measured)?;
    merge(&mut page, measured)?;
    page.push_str(METHOD);
    Ok(page)
}

fn metadata(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    page.push_str(
        "## Requests that only write metadata, by files\n\n\
         | request | classified | seconds | time on all cores | peak memory |\n|---|---|---:|---:|---:|\n",
    );
    for m in measured.iter().filter(|m| !matches!(m.case.kind, Kind::Merge { .. })) {
        let Some(run) = median(&m.runs) else { continue };
        writeln!(
            page,
            "| {} | {} | {:.2} ({}) | {:.2} s | {} MiB |",
            m.case.name,
            run.classified,
            run.seconds,
            range(m.runs.iter().map(|run| run.seconds)),
            run.cpu_seconds,
            run.peak_kib / 1024
        )?;
    }
    page.push('\n');
    Ok(())
}

fn merge(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    let merges = || measured.iter().filter(|m| matches!(m.case.kind, Kind::Merge { .. }));
    if merges().next().is_none() {
        return Ok(());
    }
    page.push_str(
        "## A MERGE that is run again\n\n\
         | operation | by | seconds | time on all cores | peak memory | rows |\n|---|---|---:|---:|---:|---:|\n",
    );
    for m in merges() {
        let Some(run) = median(&m.runs) else { continue };
        writeln!(
            page,
            "| {} | the queue ({}) | {:.1} ({}) | {:.1} s | {} MiB | {} |",
            m.case.name,
            run.classified,
            run.seconds,
            range(m.runs.iter().map(|run| run.seconds)),
            run.cpu_seconds,
            run.peak_kib / 1024,
            run.records
        )?;
        let mut others: Vec<_> = m.duckdb.iter().collect();
        others.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        let Some(by) = others.get(others.len() / 2) else {
            page.push_str(
                "\nDuckDB was left out in this run: `MERGEBERG_PYTHON` named no interpreter with it.\n",
            );
            continue;
        };
        writeln!(
            page,
            "| {} | DuckDB {} | {:.1} ({}) | {:.1} s | {} MiB | {} |\n\n\
             The queue takes {:.2} times as long as DuckDB.",
            m.case.name,
            by.version,
            by.seconds,
            range(m.duckdb.iter().map(|by| by.seconds)),
            by.cpu_seconds,
            by.peak_kib / 1024,
            by.records,
            run.seconds / by.seconds
        )?;
    }
    page.push('\n');
    Ok(())
}

const METHOD: &str = "## How it is measured\n\n\
    The clock runs from the start of a worker in a process of its own until the one request in its queue has landed: \
    reading manifests, classification, the rebase, staging, intent, landing and receipt. Every request must have \
    landed, or there is no figure. No check is declared; `lineage` and `schema` run always.\n\n\
    **Replace partitions.** A table of so many days, a file each. The branch replaced every day; `main` got a row of \
    the first day meanwhile, so the request is rebased: as many files go as come, and none is read.\n\n\
    **Append.** The branch appended so many files; `main` got another one meanwhile.\n\n\
    **MERGE.** A table of 20 days, a file each, four columns. Half of the source's rows are in the table, spread over \
    all files, so that every file is written again (copy-on-write). The branch met one of the days; the others came \
    on `main` meanwhile, and the recorded statement is run again on all of them. DuckDB gets the same files of target \
    and source, in turn with the queue, and writes the whole table again as Parquet by the same codec, with its own \
    defaults otherwise: no manifests, no statistics of them, no commit. Both must come to the same number of rows.\n\n\
    **Peak memory** is what the kernel says of the process (`VmHWM`), everything included.\n";

fn median(runs: &[Run]) -> Option<&Run> {
    let mut sorted: Vec<&Run> = runs.iter().collect();
    sorted.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    sorted.get(sorted.len() / 2).copied()
}

fn range(seconds: impl Iterator<Item = f64> + Clone) -> String {
    let (low, high) = (seconds.clone().fold(f64::INFINITY, f64::min), seconds.fold(0.0, f64::max));
    format!("{low:.2}-{high:.2}")
}

/// Cores and memory, nothing that tells which machine it is.
fn machine() -> String {
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
