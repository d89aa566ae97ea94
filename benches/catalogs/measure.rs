//! One run: a queue is filled next to its catalog and ledger, then landed from afar.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use mergeberg::config::PolicyFolder;
use mergeberg::ledger::RequestFilter;
use mergeberg::validate::Engine;
use mergeberg::worker::context::Worker;
use mergeberg::worker::run::{Ended, RunOptions};

use crate::LATENCIES;
use crate::place::{CatalogAt, Catalogs, LedgerAt, Ledgers, Servers};
use crate::support::delayed::Delayed;
use crate::support::events::{Case, House, POLICY, clock_from, now_ms};

/// Which catalog with which ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub catalog: Catalogs,
    pub ledger: Ledgers,
}

impl Row {
    pub fn name(self) -> String {
        format!("catalog {}, ledger {}", self.catalog_name(), self.ledger_name())
    }

    pub fn catalog_name(self) -> &'static str {
        match self.catalog {
            Catalogs::Sqlite => "SQL on SQLite",
            Catalogs::Postgres => "SQL on PostgreSQL",
            Catalogs::Rest => "REST",
        }
    }

    pub fn ledger_name(self) -> &'static str {
        match self.ledger {
            Ledgers::Sqlite => "SQLite",
            Ledgers::Postgres => "PostgreSQL",
        }
    }

    /// What is no server is not farther away.
    pub fn latencies(self) -> Vec<Duration> {
        let is_local = self.catalog == Catalogs::Sqlite && self.ledger == Ledgers::Sqlite;
        LATENCIES.into_iter().take(if is_local { 1 } else { LATENCIES.len() }).collect()
    }
}

/// A row with its runs, round after round.
pub struct Measured {
    pub row: Row,
    pub runs: Vec<(Duration, Run)>,
}

impl Measured {
    pub fn new(row: Row) -> Self {
        Self { row, runs: Vec::new() }
    }

    /// The runs at one latency, the slowest first.
    pub fn at(&self, latency: Duration) -> Vec<&Run> {
        let mut runs: Vec<&Run> =
            self.runs.iter().filter(|(at, _)| *at == latency).map(|(_, run)| run).collect();
        runs.sort_by(|one, other| one.per_second().total_cmp(&other.per_second()));
        runs
    }
}

/// What one run came to.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub landed: usize,
    pub seconds: f64,
    pub trains: usize,
    /// Round trips to the catalog and to the ledger, those of their opening included; 0 where it is no server.
    pub catalog_trips: u64,
    pub ledger_trips: u64,
}

impl Run {
    pub fn per_second(&self) -> f64 {
        self.landed as f64 / self.seconds
    }
}

pub async fn run(servers: &Servers, row: Row, latency: Duration, case: &Case) -> anyhow::Result<Run> {
    let folder = tempfile::tempdir()?;
    let policies = folder.path().join("policies");
    std::fs::create_dir(&policies)?;
    std::fs::write(policies.join("events.toml"), POLICY)?;
    let catalog_at = CatalogAt::create(servers, row.catalog, folder.path()).await?;
    let ledger_at = LedgerAt::create(servers, row.ledger, folder.path()).await?;
    let enqueued_at_ms = {
        let (near, _) = catalog_at.client(folder.path(), Arc::new(now_ms), None).await?;
        let (ledger, _) = ledger_at.client(None).await?;
        let mut house = House::new(near)?;
        house.fill_days(case).await?;
        house.write_history(case).await?;
        house.write_branches(case, &ledger).await?;
        let newest = RequestFilter { limit: Some(1), ..RequestFilter::default() };
        let newest = ledger.requests(&newest).await?.pop().context("the queue is empty")?;
        ledger.close().await;
        newest.enqueued_at_ms
    };

    let clock = clock_from(enqueued_at_ms);
    let engine = Arc::new(Engine::start()?);
    let start = Instant::now();
    let (catalog, catalog_proxy) =
        catalog_at.client(folder.path(), Arc::clone(&clock), Some(latency)).await?;
    let (ledger, ledger_proxy) = ledger_at.client(Some(latency)).await?;
    let worker = Worker::new(
        catalog,
        ledger.clone(),
        engine,
        PolicyFolder::new(&policies),
        clock,
        Arc::new(rand::random::<u64>),
        "bench".to_owned(),
    );
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: 60_000 };
    let ended = worker.run(options, stopped).await?;
    let seconds = start.elapsed().as_secs_f64();
    let trips = |proxy: &Option<Delayed>| proxy.as_ref().map_or(0, Delayed::trips);
    let (catalog_trips, ledger_trips) = (trips(&catalog_proxy), trips(&ledger_proxy));

    ensure!(ended == Ended::Drained, "the worker ended before the queue was empty: {ended:?}");
    let filter = RequestFilter {
        states: vec!["landed".to_owned()],
        limit: Some(u32::try_from(case.requests)? + 1),
        ..RequestFilter::default()
    };
    let landed = ledger.requests(&filter).await?.len();
    ensure!(landed == case.requests, "{landed} of {} requests landed", case.requests);
    let trains = ledger.receipts(0, i64::MAX).await?.len();
    ledger.close().await;
    Ok(Run { landed, seconds, trains, catalog_trips, ledger_trips })
}
