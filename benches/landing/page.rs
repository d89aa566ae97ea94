//! The page: figures beside their goals, and how they were taken.

use std::fmt::Write;

use crate::measure::Run;
use crate::suite::{Measured, Options, Published};
use crate::support::events::TRAIN;
use crate::support::machine::{build, machine};

/// Landed requests a second, by the rows of a day.
const GOAL_SMALL: f64 = 300.0;
const GOAL_LARGE: f64 = 100.0;
/// From this size on a day is large.
const LARGE_DAY_ROWS: usize = 1_000_000;
/// Part of the floor.
const GOAL_RATIO: f64 = 0.6;
/// Peak memory, in MiB.
const GOAL_MEMORY: f64 = 512.0;

pub fn render(measured: &[Measured], options: &Options) -> Result<String, std::fmt::Error> {
    let mut page = String::new();
    writeln!(
        page,
        "# Benchmarks\n\n\
         Written by `cargo bench --bench landing`; not edited by hand. Absolute figures are those of one \
         machine on one day ({}, local disk, {}); compare the columns of a row, which were taken side by \
         side. Rounds of queue and floor, in turn: {}. A figure is that of the median round, with the range \
         of all in brackets.\n",
        machine(),
        build(),
        options.rounds
    )?;
    speed(&mut page, measured)?;
    cost(&mut page, measured)?;
    direct(&mut page, measured, options)?;
    page.push_str(&method(measured));
    Ok(page)
}

fn speed(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    page.push_str(
        "## Landed requests a second\n\n\
         Two floors: the same commits bare, with manifests and lists by the iceberg crate's writers, as a script \
         on that crate would make them, and with those by mergeberg's own encoder, which is the harder one.\n\n\
         | table | snapshots at start | landed/s | goal | bare, by the crate/s | landed : bare | goal | \
         bare, by our encoder/s | landed : bare | goal |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for m in measured {
        let goal = if m.case.rows_per_day >= LARGE_DAY_ROWS { GOAL_LARGE } else { GOAL_SMALL };
        let land = m.land().per_second();
        write!(
            page,
            "| {} | {} | {land:.0} ({}) | {goal:.0}: {} |",
            m.case.name,
            m.land().snapshots,
            range(&m.lands),
            verdict(land > goal),
        )?;
        for (floor, all) in [(m.crate_floor(), &m.crate_floors), (m.floor(), &m.floors)] {
            let (per_second, ratio) = (floor.per_second(), m.ratio_to(floor));
            write!(
                page,
                " {per_second:.0} ({}) | {ratio:.2} | {GOAL_RATIO}: {} |",
                range(all),
                verdict(ratio > GOAL_RATIO),
            )?;
        }
        page.push('\n');
    }
    page.push('\n');
    Ok(())
}

fn cost(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    page.push_str(
        "## What it costs\n\n\
         | table | commits | lost commits | rows checked a request | bytes read for it | time in checks | \
         peak memory | goal |\n|---|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for m in measured {
        let run = m.land();
        let requests = m.case.requests.max(1) as f64;
        let peak = run.peak_kib as f64 / 1024.0;
        writeln!(
            page,
            "| {} | {} | {} | {:.0} | {:.0} KiB | {:.0} % | {peak:.0} MiB | {GOAL_MEMORY:.0}: {} |",
            m.case.name,
            run.commits,
            run.lost,
            run.rows_scanned as f64 / requests,
            run.bytes_scanned as f64 / 1024.0 / requests,
            run.check_ms as f64 / 10.0 / run.seconds,
            verdict(peak < GOAL_MEMORY),
        )?;
    }
    page.push('\n');
    Ok(())
}

fn direct(page: &mut String, measured: &[Measured], options: &Options) -> std::fmt::Result {
    let Some(m) = measured.first() else { return Ok(()) };
    writeln!(page, "## Beside writers that publish straight to `main`\n")?;
    if m.pyiceberg.is_empty() {
        return writeln!(
            page,
            "Left out in this run: `MERGEBERG_PYTHON` named no interpreter with PyIceberg.\n"
        );
    }
    writeln!(
        page,
        "The files of \"{}\", published by PyIceberg 0.12 on the same table before its first branch, one \
         commit a file and no checks at all, for {} seconds.\n",
        m.case.name,
        options.pyiceberg_seconds()
    )?;
    page.push_str(
        "| writers | published/s | a file takes (median) | (95th percentile) | lost commits | the queue is |\n\
         |---|---:|---:|---:|---:|---:|\n",
    );
    let queue = m.land().per_second();
    for p in &m.pyiceberg {
        let Published { writers, per_second, p50_seconds, p95_seconds, conflicts, .. } = p;
        writeln!(
            page,
            "| {writers} | {per_second:.1} | {p50_seconds:.2} s | {p95_seconds:.2} s | {conflicts} | {:.0} times faster |",
            queue / per_second
        )?;
    }
    page.push('\n');
    Ok(())
}

fn method(measured: &[Measured]) -> String {
    let Some(m) = measured.first() else { return String::new() };
    let case = &m.case;
    let (requests, days, rows) = (case.requests, case.days, case.rows_per_request);
    let a_day = requests / days.max(1);
    format!(
        "## How it is measured\n\n\
         **The queue.** A table partitioned by day; {days} days hold the rows that the first column says. \
         {requests} branches, each with one append of {rows} rows of new keys to one of these days, {a_day} \
         branches a day, enqueued day after day. So a train of {TRAIN} touches one day or two, and a day of \
         3,000 rows has grown to {} when its last train is checked. The class allows appends to meet, with \
         the shipped duplicate-key check on the touched days, and hands its branches over: the landing drops \
         them. Tables, files, branches and queue are made before the clock starts. The clock runs from the \
         start of a worker in a process of its own until all {requests} requests have landed: reading the \
         branches' manifests, classification, staging, checks, evidence, intents, landings and receipts. \
         Every request must have landed, or there is no figure.\n\n\
         **The floors.** The same {requests} files on a copy of the same table, in the same catalog without a \
         queue: for each {TRAIN} files one commit that adds {TRAIN} snapshots of one file under a temporary \
         branch, and one that moves `main` to the last of them and drops the temporary branch and the {TRAIN} \
         source branches. It reads no branch, checks and records nothing, and knows all its files beforehand; \
         its clock, too, runs from the opening of the catalog. It pays for the same files, metadata and waits \
         for the disk, so what is left between it and the queue is the queue's own. Both floors commit by \
         mergeberg's catalog, which reads and writes of the metadata what a commit changes; only who writes \
         manifests and lists differs (docs/decisions/0017).\n\n\
         **Snapshots.** The table has the history that its name says (ten snapshots where it says nothing) \
         and one snapshot for each branch when the clock starts, and {requests} more when it stops. History \
         lies in other days.\n\n\
         **Commits** are counted at the catalog: one staging and one landing a train. A lost commit is one \
         that the catalog refused because somebody else's came first (a failed compare-and-swap).\n\n\
         **Bytes** are those that checks fetched from storage, footers included; manifests are not in them.\n\n\
         **Peak memory** is what the kernel says of the worker's process (`VmHWM`), everything included: a \
         check has 256 MiB to itself before it spills to disk.\n\n\
         **Not measured here:** object stores, where every wait is longer; several tables at once. Catalogs and ledgers \
         over a network, PostgreSQL among them: [benchmarks-catalogs.md](benchmarks-catalogs.md).\n",
        case.rows_per_day + a_day * rows,
    )
}

fn range(runs: &[Run]) -> String {
    let rates = || runs.iter().map(Run::per_second);
    let (low, high) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
    format!("{low:.0}-{high:.0}")
}

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "**missed**" }
}
