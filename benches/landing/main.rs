//! How fast a full queue lands, beside what the same commits cost without one, and beside writers that
//! publish straight to `main`. Writes `docs/benchmarks.md`:
//!
//! ```text
//! cargo bench --bench landing                 some ten minutes
//! cargo bench --bench landing -- --quick      under a minute, to see that it works; writes no page
//! ```
//!
//! Every measured run is a process of its own on a table that another process prepared, so that its peak
//! memory is its own. `MERGEBERG_PYTHON` names an interpreter with PyIceberg (`scripts/test` builds one);
//! without it that comparison is left out and the page says so. Absent on purpose: limits that fail the
//! command. Times depend on the machine; the page has the goals beside the figures.

mod case;
mod measure;
mod page;
mod prepare;
mod suite;
#[path = "../support/mod.rs"]
mod support;

use std::path::Path;

use anyhow::{Context, bail};
use mergeberg::table::manifests::ManifestStore;
use mergeberg::worker::context::MANIFEST_CACHE_BYTES;

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
    let run = match verb {
        "prepare" => {
            let case = place.case()?;
            return runtime.block_on(prepare::prepare(&place, &case));
        }
        "land" => runtime.block_on(measure::land(&place))?,
        "floor" => runtime.block_on(measure::floor(&place, ManifestStore::new(MANIFEST_CACHE_BYTES)))?,
        "crate-floor" => {
            let store = ManifestStore::writing_by_the_crate(MANIFEST_CACHE_BYTES);
            runtime.block_on(measure::floor(&place, store))?
        }
        other => bail!("there is no step '{other}'"),
    };
    println!("{}", serde_json::to_string(&run)?);
    Ok(())
}
