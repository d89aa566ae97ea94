//! Recorded operations run again: an operation becomes files for a car.
//!
//! Owns everything between a record and the files: what its SQL may see ([`session`]), the rows that it changes
//! and gives ([`plan`], [`merge`]), and how the changed files are written again or get deletes ([`rewrite`]).
//! Appends and replaced partitions need no engine: they are metadata only, and the worker stages them itself.

mod arithmetic;
mod changes;
mod columns;
mod error;
mod filter;
mod in_zone;
mod merge;
mod plan;
mod rewrite;
pub mod row_merge;
pub mod scope;
mod semantics;
mod session;
mod sum;

use std::collections::BTreeSet;
use std::sync::Arc;

use mergeberg_kernel::change::DeleteKey;
use mergeberg_kernel::ids::SchemaId;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::record::Record;

pub use error::ReplayError;

use crate::table::catalog::Catalog;
use crate::table::course::Course;
use crate::table::data_files::{NewDataFile, WriteResources};
use crate::table::deletes::NewDeleteFile;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{LiveFiles, ManifestStore};
use crate::table::scan::{ScanFile, live_rows};
use crate::validate::Engine;
use changes::Changes;
use session::{Given, Session, Sources};

/// What a replay runs on.
pub struct ReplayInput<'a> {
    pub table: Arc<LoadedTable>,
    /// What is live at the car's parent.
    pub live: &'a LiveFiles,
    pub record: &'a Record,
    /// The schema that the operation was written under: the one whose names it uses.
    pub written_under: SchemaId,
}

/// Files for a car.
#[derive(Debug, Default)]
pub struct Replayed {
    pub added: Vec<NewDataFile>,
    pub removed: BTreeSet<Arc<str>>,
    pub added_deletes: Vec<NewDeleteFile>,
    pub removed_deletes: BTreeSet<DeleteKey>,
    pub touched: BTreeSet<Arc<Partition>>,
}

/// Plans an operation against the table as it is, so that an unknown column, type or input is told when the
/// record is made. Reads manifests of inputs, no rows.
pub async fn check(
    engine: &Arc<Engine>,
    store: &ManifestStore,
    catalog: &dyn Catalog,
    table: &Arc<LoadedTable>,
    record: &Record,
) -> Result<(), ReplayError> {
    if !record.operation.is_run_again() {
        return Ok(());
    }
    let sources = Sources { engine, store, catalog };
    let schema = table.facts.current_schema_id;
    let session = Session::open(&sources, table, schema, record, Given::default()).await?;
    plan::plan(&session, record).await.map(|_| ())
}

/// Runs the operation. Reads data, writes data and delete files, commits nothing. What runs out of memory is run once
/// more by joins that can go to disk. Whoever looks after the course deletes the files when it fails.
pub async fn replay(
    engine: &Arc<Engine>,
    store: &ManifestStore,
    catalog: &dyn Catalog,
    input: &ReplayInput<'_>,
    course: &Course,
) -> Result<Replayed, ReplayError> {
    // Both tries apart from the caller's stack: planning is deep.
    match Box::pin(replay_on(engine, store, catalog, input, course)).await {
        Err(error) if error.is_too_large() => {
            tracing::info!("an operation is run again by joins that can go to disk: {error}");
            Box::pin(replay_on(&engine.sparing(), store, catalog, input, course)).await
        }
        outcome => outcome,
    }
}

async fn replay_on(
    engine: &Arc<Engine>,
    store: &ManifestStore,
    catalog: &dyn Catalog,
    input: &ReplayInput<'_>,
    course: &Course,
) -> Result<Replayed, ReplayError> {
    let ReplayInput { table, live, record, written_under } = input;
    let filter = scope::filter_of(record, table, Some(*written_under))
        .map_err(|text| ReplayError::request(mergeberg_kernel::reason::ReasonCode::RecordInvalid, text))?;
    // A row that a delete file takes away is not seen, and does not come back by being written again.
    let all = live_rows((*live).clone())?;
    let may_match =
        |file: &&ScanFile| filter.as_ref().is_none_or(|filter| filter.may_match(&file.file.fact.partition));
    let rows: Vec<ScanFile> = all.iter().filter(may_match).cloned().collect();
    let sources = Sources { engine, store, catalog };
    let given = Given { rows: &rows, all: &all, counts: Arc::clone(course.counts()) };
    let planning = async {
        let session = Session::open(&sources, table, *written_under, record, given).await?;
        let planned = plan::plan(&session, record).await?;
        Ok::<_, ReplayError>((session, planned))
    };
    let (session, planned) = course.unless_ended(planning).await??;
    let changes = Changes::new(rows);
    let job = rewrite::Job {
        table: Arc::clone(table),
        changes,
        planned,
        names: session.columns.all.iter().map(|column| column.name.clone()).collect(),
        expected_rows: record.expected_rows.filter(|_| !record.reads_target),
        live: (*live).clone(),
        resources: resources(engine, &session.context),
        course: course.clone(),
    };
    engine.run(course.hard_bound(), async move { Ok(job.run().await) }).await?
}

/// What a job of the engine may use to write files.
fn resources(engine: &Engine, context: &datafusion::prelude::SessionContext) -> WriteResources {
    WriteResources { task: context.task_ctx(), lanes: engine.parallelism() }
}
