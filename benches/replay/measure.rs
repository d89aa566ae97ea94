//! The measured run: a worker from its start until the request has landed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use mergeberg::config::PolicyFolder;
use mergeberg::ledger::{Ledger, RequestFilter};
use mergeberg::table::catalog::Catalog;
use mergeberg::validate::Engine;
use mergeberg::worker::context::Worker;
use mergeberg::worker::run::{Ended, RunOptions};
use mergeberg_kernel::ids::RefName;
use serde::{Deserialize, Serialize};

use crate::case::Place;
use crate::prepare::{now_ms, open_catalog};

/// Ticks of a second in which the kernel counts a process's time (`USER_HZ`, the same on every Linux).
const TICKS: f64 = 100.0;

/// What one run came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    /// How the request was classified.
    pub classified: String,
    pub seconds: f64,
    /// Time on all cores, in seconds.
    pub cpu_seconds: f64,
    pub peak_kib: u64,
    /// Rows and files that the target has now, as its summary says.
    pub records: u64,
    pub files: u64,
}

pub async fn land(place: &Place) -> anyhow::Result<Run> {
    let start = Instant::now();
    let catalog = Arc::new(open_catalog(place).await?);
    let ledger = Ledger::open(place.ledger()).await?;
    let worker = Worker::new(
        Arc::clone(&catalog) as Arc<dyn Catalog>,
        ledger.clone(),
        Arc::new(Engine::start()?),
        PolicyFolder::new(place.policies()),
        Arc::new(now_ms),
        Arc::new(rand::random::<u64>),
        "bench".to_owned(),
    );
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: 600_000 };
    let ended = worker.run(options, stopped).await?;
    let seconds = start.elapsed().as_secs_f64();
    let (cpu_seconds, peak_kib) = (cpu_seconds()?, peak_kib()?);

    ensure!(ended == Ended::Drained, "the worker ended before the queue was empty: {ended:?}");
    let request = ledger.requests(&RequestFilter::default()).await?.pop().context("the queue is empty")?;
    ensure!(request.state.to_string() == "landed", "{}: {:?}", request.state, request.detail);
    let table = catalog.load(&request.table).await?;
    let head = table.facts.head(&RefName::main()).and_then(|id| table.facts.snapshots.get(id));
    let summary = &head.context("main is empty")?.summary;
    let total = |key: &str| summary.get(key).and_then(|text| text.parse().ok()).unwrap_or_default();
    let (records, files) = (total("total-records"), total("total-data-files"));
    let classified = request.classification.unwrap_or_default();
    Ok(Run { classified, seconds, cpu_seconds, peak_kib, records, files })
}

/// The most memory that this process ever had, as the kernel counts it.
fn peak_kib() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// User and system time of this process.
fn cpu_seconds() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/stat").context("/proc/self/stat")?;
    // Behind the name in brackets: fields 3 and on; user and system time are 14 and 15.
    let (_, fields) = status.rsplit_once(')').context("/proc/self/stat")?;
    let times = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
    Ok(times.sum::<Result<f64, _>>()? / TICKS)
}
