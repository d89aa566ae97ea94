//! The two measured runs on one prepared table, each in a process of its own: the queue, and the floor.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use async_trait::async_trait;
use mergeberg::config::PolicyFolder;
use mergeberg::ledger::{Ledger, RequestFilter};
use mergeberg::table::catalog::{Capabilities, Catalog, CatalogError, CommitOutcome};
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter};
use mergeberg::table::sql_catalog::SqlCatalog;
use mergeberg::validate::Engine;
use mergeberg::worker::context::{MANIFEST_CACHE_BYTES, Worker};
use mergeberg::worker::run::{Ended, RunOptions};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use serde::{Deserialize, Serialize};

use crate::case::Place;
use crate::prepare::open_catalog;
use crate::support::events::{
    TRAIN, branch_at, change, clock_from, must_land, now_ms, same_table, table_name,
};

/// What one run came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub landed: usize,
    pub seconds: f64,
    pub commits: u64,
    /// Commits that did not apply because somebody else's came first.
    pub lost: u64,
    pub bytes_scanned: u64,
    pub rows_scanned: u64,
    /// Time in checks, in milliseconds; they run while nothing else does.
    pub check_ms: u64,
    pub peak_kib: u64,
    /// Snapshots in the table when the clock started.
    pub snapshots: usize,
}

impl Run {
    pub fn per_second(&self) -> f64 {
        self.landed as f64 / self.seconds
    }
}

/// The catalog with its commits counted.
struct Counted {
    inner: SqlCatalog,
    commits: AtomicU64,
    lost: AtomicU64,
}

impl Counted {
    fn new(inner: SqlCatalog) -> Self {
        Self { inner, commits: AtomicU64::new(0), lost: AtomicU64::new(0) }
    }
}

#[async_trait]
impl Catalog for Counted {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        self.inner.list_tables().await
    }

    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        self.inner.load(table).await
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        let outcome = self.inner.commit(base, requirements, updates).await;
        let counter = match outcome {
            CommitOutcome::Landed(_) => &self.commits,
            _ => &self.lost,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        outcome
    }
}

/// The queue is full: from the start of the worker until every request has landed.
pub async fn land(place: &Place) -> anyhow::Result<Run> {
    let case = place.case()?;
    let (before, clock) = {
        let catalog = open_catalog(place, Arc::new(now_ms)).await?;
        let ledger = Ledger::open(place.ledger()).await?;
        let newest = RequestFilter { limit: Some(1), ..RequestFilter::default() };
        let newest = ledger.requests(&newest).await?.pop().context("the queue is empty")?;
        ledger.close().await;
        (catalog.load(&table_name()?).await?.facts.snapshots.len(), clock_from(newest.enqueued_at_ms))
    };

    let start = Instant::now();
    let catalog = Arc::new(Counted::new(open_catalog(place, Arc::clone(&clock)).await?));
    let ledger = Ledger::open(place.ledger()).await?;
    let worker = Worker::new(
        Arc::clone(&catalog) as Arc<dyn Catalog>,
        ledger.clone(),
        Arc::new(Engine::start()?),
        PolicyFolder::new(place.policies()),
        clock,
        Arc::new(rand::random::<u64>),
        "bench".to_owned(),
    );
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: 60_000 };
    let ended = worker.run(options, stopped).await?;
    let seconds = start.elapsed().as_secs_f64();
    let peak_kib = peak_kib()?;

    ensure!(ended == Ended::Drained, "the worker ended before the queue was empty: {ended:?}");
    let filter = RequestFilter {
        states: vec!["landed".to_owned()],
        limit: Some(u32::try_from(case.requests)? + 1),
        ..RequestFilter::default()
    };
    let landed = ledger.requests(&filter).await?.len();
    ensure!(landed == case.requests, "{landed} of {} requests landed", case.requests);
    let (mut bytes_scanned, mut rows_scanned, mut check_ms) = (0, 0, 0);
    for landing in ledger.receipts(0, i64::MAX).await? {
        for row in ledger.evidence_of_candidate(landing.intent.tail).await? {
            bytes_scanned += row.evidence.bytes_scanned;
            rows_scanned += row.evidence.rows_scanned;
            check_ms += row.evidence.duration_ms;
        }
    }
    Ok(Run {
        landed,
        seconds,
        commits: catalog.commits.load(Ordering::Relaxed),
        lost: catalog.lost.load(Ordering::Relaxed),
        bytes_scanned,
        rows_scanned,
        check_ms,
        peak_kib,
        snapshots: before,
    })
}

/// The same commits without a queue: trains of the same length, one commit that adds the snapshots under a
/// temporary branch and one that moves `main` and drops what a landing drops. The files are known, nothing
/// is read, checked or recorded.
pub async fn floor(place: &Place, store: ManifestStore) -> anyhow::Result<Run> {
    let name = table_name()?;
    let (queue, before) = {
        let catalog = open_catalog(place, Arc::new(now_ms)).await?;
        (branches(&catalog, &name).await?, catalog.load(&name).await?.facts.snapshots.len())
    };
    let count = queue.len();

    // As the queue's: from a process that has read nothing of the table.
    let start = Instant::now();
    let catalog = Counted::new(open_catalog(place, Arc::new(now_ms)).await?);
    let main = RefName::main();
    for (at, train) in queue.chunks(TRAIN).enumerate() {
        let table = catalog.load(&name).await?;
        let head = table.facts.head(&main);
        let changes: Vec<SnapshotChange> = train
            .iter()
            .map(|(_, _, files)| SnapshotChange { add: files.clone(), ..change(&table, Vec::new()) })
            .collect();
        let parent = head.and_then(|id| table.facts.snapshots.get(id));
        let mut writer = SnapshotWriter::on(&store, &table, parent).await?;
        let new = writer.add_all(changes).await?;
        let tail = writer.head().context("nothing was written")?;
        let temporary = RefName::new(format!("floor/{at}"));
        let mut updates: Vec<Update> = new.into_iter().map(Update::AddSnapshot).collect();
        updates.push(Update::SetRef(branch_at(temporary.clone(), tail)));
        let requirements = [same_table(&table), at_head(&main, head)];
        must_land(catalog.commit(&table, &requirements, updates).await)?;

        let table = catalog.load(&name).await?;
        let mut updates =
            vec![Update::SetRef(branch_at(main.clone(), tail)), Update::RemoveRef(temporary.clone())];
        updates.extend(train.iter().map(|(source, _, _)| Update::RemoveRef(source.clone())));
        let requirements = [same_table(&table), at_head(&main, head), at_head(&temporary, Some(tail))];
        must_land(catalog.commit(&table, &requirements, updates).await)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(Run {
        landed: count,
        seconds,
        commits: catalog.commits.load(Ordering::Relaxed),
        lost: catalog.lost.load(Ordering::Relaxed),
        bytes_scanned: 0,
        rows_scanned: 0,
        check_ms: 0,
        peak_kib: peak_kib()?,
        snapshots: before,
    })
}

fn at_head(name: &RefName, at: Option<SnapshotId>) -> Requirement {
    Requirement::RefAt { name: name.clone(), at, role: RefRole::Target }
}

type Branch = (RefName, SnapshotId, Vec<AddedFile>);

/// Every branch with the files that its head added, in the order of the queue.
async fn branches(catalog: &SqlCatalog, name: &TableName) -> anyhow::Result<Vec<Branch>> {
    let table = catalog.load(name).await?;
    let store = ManifestStore::new(MANIFEST_CACHE_BYTES);
    let mut branches = Vec::new();
    for reference in table.facts.refs.values().filter(|r| r.name != RefName::main()) {
        let Some(snapshot) = table.facts.snapshots.get(reference.snapshot_id) else {
            bail!("{} has no snapshot", reference.name);
        };
        let files = store.added_files(&table, snapshot).await?;
        let files = files.into_iter().map(AddedFile::from).collect();
        branches.push((reference.name.clone(), reference.snapshot_id, files));
    }
    Ok(branches)
}

/// The most memory that this process ever had, as the kernel counts it.
fn peak_kib() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}
