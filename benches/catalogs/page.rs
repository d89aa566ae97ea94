//! The page: figures side by side, and how they were taken.

use std::fmt::Write;
use std::time::Duration;

use crate::measure::{Measured, Run};
use crate::place::{Catalogs, Ledgers};
use crate::support::events::TRAIN;
use crate::support::machine::{build, machine};
use crate::{LATENCIES, Options};

pub fn render(measured: &[Measured], options: &Options) -> Result<String, std::fmt::Error> {
    let mut page = String::new();
    if measured.is_empty() {
        writeln!(
            page,
            "# Benchmarks: catalogs and ledgers\n\n\
             Written by `cargo bench --bench catalogs`; not edited by hand. Nothing was measured yet.\n"
        )?;
        page.push_str(&method(options));
        return Ok(page);
    }
    writeln!(
        page,
        "# Benchmarks: catalogs and ledgers\n\n\
         Written by `cargo bench --bench catalogs`; not edited by hand. Absolute figures are those of one machine on \
         one day ({}, local disk, {}); compare rows and columns, which were taken in turn. Rounds at 0 ms: {}, of \
         which the median is told, with the range in brackets; farther away one. How fast one catalog on one machine can be is on \
         [benchmarks.md](benchmarks.md).\n",
        machine(),
        build(),
        options.rounds
    )?;
    speed(&mut page, measured)?;
    missing(&mut page, measured)?;
    page.push_str(&method(options));
    Ok(page)
}

fn speed(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    page.push_str("## Landed requests a second, by round trip\n\n| catalog | ledger |");
    for latency in LATENCIES {
        write!(page, " {} ms |", latency.as_millis())?;
    }
    page.push_str(" round trips a train: catalog | ledger |\n|---|---|---:|---:|---:|---:|---:|\n");
    for one in measured {
        write!(page, "| {} | {} |", one.row.catalog_name(), one.row.ledger_name())?;
        for latency in LATENCIES {
            write!(page, " {} |", figure(&one.at(latency)))?;
        }
        let runs = one.at(Duration::ZERO);
        let a_train = |trips: fn(&Run) -> u64| {
            let run = middle(&runs)?;
            let trips = trips(run);
            (trips > 0).then(|| format!("{:.0}", trips as f64 / run.trains.max(1) as f64))
        };
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        writeln!(
            page,
            " {} | {} |",
            or_none(a_train(|run| run.catalog_trips)),
            or_none(a_train(|run| run.ledger_trips))
        )?;
    }
    page.push('\n');
    Ok(())
}

fn figure(runs: &[&Run]) -> String {
    match (runs.first(), middle(runs), runs.last()) {
        (Some(only), _, _) if runs.len() == 1 => format!("{:.0}", only.per_second()),
        (Some(low), Some(median), Some(high)) => {
            format!("{:.0} ({:.0}-{:.0})", median.per_second(), low.per_second(), high.per_second())
        }
        // What is no server is not farther away.
        _ => "-".to_owned(),
    }
}

fn middle<'a>(runs: &[&'a Run]) -> Option<&'a Run> {
    runs.get(runs.len() / 2).copied()
}

fn missing(page: &mut String, measured: &[Measured]) -> std::fmt::Result {
    let has_catalog = |kind| measured.iter().any(|one| one.row.catalog == kind);
    if !has_catalog(Catalogs::Rest) {
        writeln!(page, "REST was left out in this run: `MERGEBERG_REST_SERVER` named no server.\n")?;
    }
    if !measured.iter().any(|one| one.row.ledger == Ledgers::Postgres) {
        writeln!(page, "PostgreSQL was left out in this run: `MERGEBERG_POSTGRES` named no server.\n")?;
    }
    Ok(())
}

fn method(options: &Options) -> String {
    let case = options.case();
    format!(
        "## How it is measured\n\n\
         **The queue.** A table partitioned by day; {} branches, each with one append of {} rows of new keys to a day of \
         its own that holds {} rows, so no two of them touch the same data. The class has the duplicate-key check on the \
         touched days and hands its branches over. {TRAIN} requests ride a train at most. Table, branches and queue are \
         made beside the servers, before the clock starts. The clock runs from the opening of catalog and ledger by a \
         worker until all requests have landed; every request must have landed, or there is no figure. Each run has a \
         table, a catalog and a ledger of its own.\n\n\
         **Latency.** The worker speaks to each server through a proxy that holds back what it says by the time at the \
         head of the column: to the REST catalog that is so much a request, to PostgreSQL so much a round trip. A row \
         whose ledger is on PostgreSQL has both at that distance. Files of the warehouse are on the local disk.\n\n\
         **Round trips** are counted by the proxy: the worker's words after the server's. Those of opening, of leading and \
         of the last look at an empty queue are shared out among the trains. A `-` is no server.\n\n\
         **To run it.** `eval \"$(scripts/rest-server)\"`, then `scripts/postgres cargo bench --bench catalogs`.\n\n\
         **Servers.** PostgreSQL as `scripts/postgres` starts it, without waits for the disk; REST is the Iceberg \
         project's own test server over SQLite. Both run on the same machine, so their own work is in the figures.\n",
        case.requests, case.rows_per_request, case.rows_per_day
    )
}
