//! How fast a full queue lands by catalog, ledger and how far away they are. Writes `docs/benchmarks-catalogs.md`:
//!
//! ```text
//! eval "$(scripts/rest-server)"
//! scripts/postgres cargo bench --bench catalogs                 some twenty minutes
//! scripts/postgres cargo bench --bench catalogs -- --quick      some three minutes, to see that it works; writes no page
//! ```
//!
//! Latency comes from a proxy between the worker and its catalog or ledger (`support/delayed.rs`), which counts round trips
//! too. What needs a server that the environment does not name (`MERGEBERG_POSTGRES`, `MERGEBERG_REST_SERVER`) is left out,
//! and the page says so. Absent on purpose: limits that fail the command.

mod measure;
mod page;
mod place;
mod rest_server;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use measure::{Measured, Row};
use place::{Catalogs, Ledgers, Servers};
use support::events::Case;

/// Where the page goes, from the repository's root.
const PAGE: &str = "docs/benchmarks-catalogs.md";
/// Times that every row is run, in turn; the median run of each is told. Farther away it is run once: such a run waits most of
/// its time, and what else the machine does is lost in that.
const ROUNDS: usize = 3;
/// How much farther away a catalog, or a ledger that is a server, is: per round trip.
pub const LATENCIES: [Duration; 3] = [Duration::ZERO, Duration::from_millis(20), Duration::from_millis(60)];

pub struct Options {
    pub quick: bool,
    pub rounds: usize,
    /// Only rows whose name holds this.
    only: Option<String>,
}

impl Options {
    fn parse(words: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self { quick: false, rounds: ROUNDS, only: None };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match *word {
                // Cargo gives this to every bench.
                "--bench" => {}
                "--quick" => options.quick = true,
                "--only" => options.only = Some((*value()?).to_owned()),
                "--rounds" => options.rounds = value()?.parse()?,
                other => bail!("unknown argument '{other}' (known: --quick, --only NAME, --rounds N)"),
            }
        }
        ensure!(options.rounds > 0, "--rounds 0 measures nothing");
        if options.quick {
            options.rounds = 1;
        }
        Ok(options)
    }

    fn case(&self) -> Case {
        Case {
            name: "appends to days of 300 rows".to_owned(),
            days: if self.quick { 20 } else { 200 },
            rows_per_day: 300,
            requests: if self.quick { 20 } else { 200 },
            rows_per_request: 100,
            history: 10,
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let options = Options::parse(&words)?;
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("MERGEBERG_LOG").unwrap_or_default())
        .with_writer(std::io::stderr)
        .try_init();
    let runtime = tokio::runtime::Runtime::new().context("the runtime did not start")?;
    let measured = runtime.block_on(run(&options))?;
    let text = page::render(&measured, &options)?;
    if options.quick || options.only.is_some() {
        println!("{text}");
    } else {
        std::fs::write(Path::new(PAGE), &text).with_context(|| PAGE.to_owned())?;
        eprintln!("wrote {PAGE}");
    }
    Ok(())
}

/// Every row at every latency, round after round, so that no row has a quieter machine than the others.
async fn run(options: &Options) -> anyhow::Result<Vec<Measured>> {
    let servers = Servers::find();
    let wanted = |row: &Row| options.only.as_ref().is_none_or(|only| row.name().contains(only));
    let mut measured: Vec<Measured> = rows(&servers).into_iter().filter(wanted).map(Measured::new).collect();
    for round in 1..=options.rounds {
        for one in &mut measured {
            for latency in one.row.latencies().into_iter().filter(|at| round == 1 || at.is_zero()) {
                let run = measure::run(&servers, one.row, latency, &options.case()).await?;
                eprintln!(
                    "{}, {} ms: round {round}: {:.0}/s, {} trains, {} and {} round trips",
                    one.row.name(),
                    latency.as_millis(),
                    run.per_second(),
                    run.trains,
                    run.catalog_trips,
                    run.ledger_trips
                );
                one.runs.push((latency, run));
            }
        }
    }
    servers.end().await;
    Ok(measured)
}

fn rows(servers: &Servers) -> Vec<Row> {
    let mut rows = Vec::new();
    for catalog in [Catalogs::Sqlite, Catalogs::Postgres, Catalogs::Rest] {
        for ledger in [Ledgers::Sqlite, Ledgers::Postgres] {
            if servers.have(catalog, ledger) {
                rows.push(Row { catalog, ledger });
            }
        }
    }
    rows
}
