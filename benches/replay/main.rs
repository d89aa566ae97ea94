//! What a rebase costs: one that only writes metadata, by the number of files, and one that runs a MERGE again, beside
//! DuckDB on the same files. Writes `docs/benchmarks-replay.md`:
//!
//! ```text
//! cargo bench --bench replay                 some ten minutes
//! cargo bench --bench replay -- --quick      small tables, to see that it works; writes no page
//! ```
//!
//! Every measured run is a process of its own on a table that another process prepared, so that its peak memory is
//! its own. `MERGEBERG_PYTHON` names an interpreter with DuckDB (`scripts/test` builds one); without it that
//! comparison is left out and the page says so. Absent on purpose: limits that fail the command.

mod case;
mod measure;
mod page;
mod prepare;
mod suite;

use std::path::Path;

use anyhow::{Context, bail};

use case::Place;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["child", verb, folder] => child(verb, Path::new(folder)),
        words => suite::run(&suite::Options::parse(words)?),
    }
}

/// One step in a process of its own; its result is a line of JSON on standard output.
fn child(verb: &str, folder: &Path) -> anyhow::Result<()> {
    let _ = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_env("MERGEBERG_LOG").unwrap_or_default())
        .with_writer(std::io::stderr)
        .try_init();
    let place = Place::new(folder);
    let runtime = tokio::runtime::Runtime::new().context("the runtime did not start")?;
    match verb {
        "prepare" => runtime.block_on(prepare::prepare(&place, &place.case()?)),
        "land" => {
            let run = runtime.block_on(measure::land(&place))?;
            println!("{}", serde_json::to_string(&run)?);
            Ok(())
        }
        other => bail!("there is no step '{other}'"),
    }
}
