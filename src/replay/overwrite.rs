//! `overwrite-where`: the recorded query runs again, and its rows replace what matches the filter in the
//! car's parent.
//!
//! Files whose rows all match go, files without a match stay as they are, and of the others the rows that
//! do not match are written again. Nothing but the pinned inputs and the target itself is visible to the
//! query (rule S1); the target is read at the car's parent (rule C3).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use datafusion::arrow::array::{Array, BooleanArray, Int32Array, Int64Array, RecordBatch};
use datafusion::common::Column;
use datafusion::error::DataFusionError;
use datafusion::execution::context::SQLOptions;
use datafusion::logical_expr::{Expr, cast, lit};
use datafusion::prelude::{DataFrame, SessionContext};
use futures::StreamExt;
use mergeberg_kernel::ids::SchemaId;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::PinnedInput;

use super::filter::read_filter;
use super::{ReplayError, TARGET_ALIAS, reads_table};
use crate::table::catalog::{Catalog, CatalogError};
use crate::table::data_files::{DataFileWriter, NewDataFile};
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{FileScope, LiveFiles, ManifestStore};
use crate::table::scan::{RowReader, ScanCounters, ScanFile, live_rows};
use crate::validate::{CheckError, Engine, FilesTable};

/// One replay; a longer one fails.
const REPLAY_TIME_BOUND: Duration = Duration::from_secs(60 * 60);
/// Alias of the files that hold rows to be replaced.
const AFFECTED: &str = "mergeberg_affected";
/// Helper column: does the row match the filter?
const MATCHES: &str = "mergeberg_matches";

/// What a replay runs on.
pub struct ReplayInput<'a> {
    pub table: Arc<LoadedTable>,
    /// What is live at the car's parent, as far as it can matter.
    pub live: &'a LiveFiles,
    pub filter: &'a str,
    pub query: &'a str,
    pub inputs: &'a BTreeMap<String, PinnedInput>,
    pub expected_rows: Option<i64>,
}

/// Files for a car.
#[derive(Debug)]
pub struct Replayed {
    pub added: Vec<NewDataFile>,
    pub removed: BTreeSet<Arc<str>>,
    pub touched: BTreeSet<Arc<Partition>>,
}

/// Runs the operation. Reads data, writes data files, commits nothing.
pub async fn overwrite_where(
    engine: &Arc<Engine>,
    store: &ManifestStore,
    catalog: &dyn Catalog,
    input: &ReplayInput<'_>,
) -> Result<Replayed, ReplayError> {
    let facts = &input.table.facts;
    let schema_id = facts.current_schema_id;
    let schema = facts.schemas.get(&schema_id).ok_or_else(|| {
        ReplayError::request(ReasonCode::ReplayFailed, format!("the table has no schema {schema_id}"))
    })?;
    let filter = read_filter(input.filter, schema)
        .map_err(|text| ReplayError::request(ReasonCode::RecordInvalid, text))?;

    // A row that a delete file takes away is not seen, and does not come back by being written again.
    let all = live_rows(input.live.clone())?;
    let affected: Vec<ScanFile> =
        all.iter().filter(|f| filter.may_match(&f.file.fact.partition)).cloned().collect();
    let session = engine.session();
    let counters = Arc::new(ScanCounters::default());
    let reader = Arc::new(RowReader::new(&input.table, schema_id)?);
    // Rows that are written again stay who they are.
    let keeping = Arc::new(RowReader::new(&input.table, schema_id)?.with_lineage()?);
    let target = |reader: &Arc<RowReader>, files: &[ScanFile]| {
        let files = files.iter().zip(0_i32..).map(|(file, at)| file.clone().with_origin(at)).collect();
        FilesTable::new(Arc::clone(reader), files, engine.parallelism(), Arc::clone(&counters))
    };
    let affected_table = target(&keeping, &affected).with_origin();
    let origin = affected_table.origin_column().unwrap_or_default().to_owned();
    register(&session, AFFECTED, affected_table)?;
    if reads_table(input.query, TARGET_ALIAS) {
        register(&session, TARGET_ALIAS, target(&reader, &all))?;
    }
    for (alias, pin) in input.inputs {
        let (pinned, files) = pinned_input(store, catalog, alias, pin).await?;
        let reader = Arc::new(RowReader::new(&pinned, schema_of(&pinned, pin))?);
        let table = FilesTable::new(reader, files, engine.parallelism(), Arc::clone(&counters));
        register(&session, alias, table)?;
    }

    let job = Job {
        session,
        table: Arc::clone(&input.table),
        schema_id,
        reader,
        keeping,
        affected,
        origin,
        filter: input.filter.to_owned(),
        query: input.query.to_owned(),
        expected_rows: input.expected_rows,
    };
    engine
        .run(REPLAY_TIME_BOUND, async move { Ok(job.run().await) })
        .await
        .map_err(|e| ReplayError::request(ReasonCode::ReplayFailed, e.to_string()))?
}

/// The part that runs on the engine's threads.
struct Job {
    session: SessionContext,
    table: Arc<LoadedTable>,
    schema_id: SchemaId,
    reader: Arc<RowReader>,
    /// The same with row lineage, where the table has it.
    keeping: Arc<RowReader>,
    affected: Vec<ScanFile>,
    origin: String,
    filter: String,
    query: String,
    expected_rows: Option<i64>,
}

impl Job {
    async fn run(self) -> Result<Replayed, ReplayError> {
        let (removed, mixed) = self.split_files().await?;
        let mut added = Vec::new();
        let result = self.write_all(&mixed, &mut added).await;
        if let Err(error) = result {
            for file in &added {
                if let Err(left) = self.table.file_io.delete(&file.fact.path).await {
                    tracing::warn!(path = %file.fact.path, "a file of a failed replay is left: {left}");
                }
            }
            return Err(error);
        }
        let mut touched: BTreeSet<Arc<Partition>> =
            added.iter().map(|f| Arc::clone(&f.fact.partition)).collect();
        let mut paths = BTreeSet::new();
        for at in &removed {
            if let Some(file) = self.affected.get(*at) {
                touched.insert(Arc::clone(&file.file.fact.partition));
                paths.insert(Arc::clone(&file.file.fact.path));
            }
        }
        Ok(Replayed { added, removed: paths, touched })
    }

    async fn write_all(
        &self,
        mixed: &BTreeSet<usize>,
        added: &mut Vec<NewDataFile>,
    ) -> Result<(), ReplayError> {
        let options =
            SQLOptions::new().with_allow_ddl(false).with_allow_dml(false).with_allow_statements(false);
        let frame = self.session.sql_with_options(&self.query, options).await.map_err(failed)?;
        let matches = self.session.parse_sql_expr(&self.filter, frame.schema()).map_err(failed)?;
        let shaped = self.shape(frame, &self.reader)?;
        // The filter is read against the result's own columns: what is written must lie inside it.
        let shaped_matches = self.session.parse_sql_expr(&self.filter, shaped.schema()).unwrap_or(matches);
        let marked = shaped.with_column(MATCHES, shaped_matches).map_err(failed)?;
        let rows = Arc::new(std::sync::atomic::AtomicI64::new(0));
        let counted = Arc::clone(&rows);
        let filter = self.filter.clone();
        let stream = marked
            .execute_stream()
            .await
            .map_err(failed)?
            .map(move |batch| inside_filter(batch?, &filter, &counted));
        let new = DataFileWriter::write(&self.table, self.schema_id, stream).await.map_err(of_table)?;
        added.extend(new);
        let rows = rows.load(std::sync::atomic::Ordering::Relaxed);
        if let Some(expected) = self.expected_rows
            && expected != rows
        {
            return Err(ReplayError::request(
                ReasonCode::ReplayMismatch,
                format!("the query gave {rows} rows, recorded were {expected}"),
            ));
        }
        if !mixed.is_empty() {
            added.extend(self.write_survivors(mixed).await?);
        }
        Ok(())
    }

    /// Which affected files hold rows to replace, and which of those hold others as well.
    async fn split_files(&self) -> Result<(BTreeSet<usize>, BTreeSet<usize>), ReplayError> {
        use datafusion::functions_aggregate::expr_fn::{count, sum};
        if self.affected.is_empty() {
            return Ok((BTreeSet::new(), BTreeSet::new()));
        }
        let frame = self.session.table(AFFECTED).await.map_err(failed)?;
        let matches = self.session.parse_sql_expr(&self.filter, frame.schema()).map_err(failed)?;
        let origin = column(&self.origin);
        let hit = cast(matches.is_true(), datafusion::arrow::datatypes::DataType::Int64);
        let counts = frame
            .aggregate(vec![origin], vec![sum(hit).alias("hits"), count(lit(1)).alias("total")])
            .map_err(failed)?
            .collect()
            .await
            .map_err(failed)?;
        let mut removed = BTreeSet::new();
        let mut mixed = BTreeSet::new();
        for batch in counts {
            let origins = downcast::<Int32Array>(&batch, 0)?;
            let hits = downcast::<Int64Array>(&batch, 1)?;
            let totals = downcast::<Int64Array>(&batch, 2)?;
            for row in 0..batch.num_rows() {
                let (hit, total) = (hits.value(row), totals.value(row));
                let Ok(at) = usize::try_from(origins.value(row)) else { continue };
                if hit > 0 {
                    removed.insert(at);
                    if hit < total {
                        mixed.insert(at);
                    }
                }
            }
        }
        Ok((removed, mixed))
    }

    /// Rows of the mixed files that do not match: they are written again as they are.
    async fn write_survivors(&self, mixed: &BTreeSet<usize>) -> Result<Vec<NewDataFile>, ReplayError> {
        let frame = self.session.table(AFFECTED).await.map_err(failed)?;
        let matches = self.session.parse_sql_expr(&self.filter, frame.schema()).map_err(failed)?;
        let files: Vec<Expr> = mixed.iter().filter_map(|at| i32::try_from(*at).ok()).map(lit).collect();
        let survivors = frame
            .filter(column(&self.origin).in_list(files, false))
            .and_then(|frame| frame.filter(matches.is_not_true()))
            .map_err(failed)?;
        let stream = self.shape(survivors, &self.keeping)?.execute_stream().await.map_err(failed)?;
        DataFileWriter::write_again(&self.table, self.schema_id, stream).await.map_err(of_table)
    }

    /// Columns of the table, by name and in its types; a column that the query leaves out is null.
    fn shape(&self, frame: DataFrame, reader: &RowReader) -> Result<DataFrame, ReplayError> {
        let mut columns = Vec::new();
        let wanted = reader.arrow_schema();
        for field in wanted.fields() {
            let expr = if frame.schema().has_column_with_unqualified_name(field.name()) {
                cast(column(field.name()), field.data_type().clone())
            } else {
                cast(lit(datafusion::scalar::ScalarValue::Null), field.data_type().clone())
            };
            columns.push(expr.alias(field.name()));
        }
        for field in frame.schema().fields() {
            if wanted.field_with_name(field.name()).is_err() && field.name() != &self.origin {
                return Err(ReplayError::request(
                    ReasonCode::ReplayFailed,
                    format!("the query gives column '{}', which the table does not have", field.name()),
                ));
            }
        }
        frame.select(columns).map_err(failed)
    }
}

/// Takes the helper column off, and refuses a row that would land outside what is replaced.
fn inside_filter(
    batch: RecordBatch,
    filter: &str,
    rows: &std::sync::atomic::AtomicI64,
) -> Result<RecordBatch, DataFusionError> {
    let at = batch.num_columns().saturating_sub(1);
    let inside = batch
        .column(at)
        .as_any()
        .downcast_ref::<BooleanArray>()
        .is_some_and(|flags| flags.null_count() == 0 && flags.true_count() == flags.len());
    if !inside {
        return Err(DataFusionError::Execution(format!(
            "the query gives rows outside of its own filter ({filter})"
        )));
    }
    rows.fetch_add(i64::try_from(batch.num_rows()).unwrap_or(i64::MAX), std::sync::atomic::Ordering::Relaxed);
    let keep: Vec<usize> = (0..at).collect();
    Ok(batch.project(&keep)?)
}

async fn pinned_input(
    store: &ManifestStore,
    catalog: &dyn Catalog,
    alias: &str,
    pin: &PinnedInput,
) -> Result<(Arc<LoadedTable>, Vec<ScanFile>), ReplayError> {
    let missing = |text: String| ReplayError::request(ReasonCode::InputMissing, text);
    let table = match catalog.load(&pin.table).await {
        Ok(table) => table,
        Err(CatalogError::NotFound(name)) => {
            return Err(missing(format!("input '{alias}': there is no table {name}")));
        }
        Err(error) => return Err(error.into()),
    };
    let Some(snapshot) = table.facts.snapshots.get(pin.snapshot_id) else {
        return Err(missing(format!(
            "input '{alias}': snapshot {} of {} was expired",
            pin.snapshot_id, pin.table
        )));
    };
    let live = store.live_files(&table, snapshot, &FileScope::Table).await?;
    Ok((Arc::clone(&table), live_rows(live)?))
}

/// A pinned snapshot is read with its own schema.
fn schema_of(table: &LoadedTable, pin: &PinnedInput) -> SchemaId {
    table
        .facts
        .snapshots
        .get(pin.snapshot_id)
        .and_then(|snapshot| snapshot.schema_id)
        .unwrap_or(table.facts.current_schema_id)
}

fn register(session: &SessionContext, name: &str, table: FilesTable) -> Result<(), ReplayError> {
    let reference = datafusion::sql::TableReference::bare(name.to_owned());
    session.register_table(reference, Arc::new(table)).map_err(failed)?;
    Ok(())
}

/// The column of exactly this name.
fn column(name: &str) -> Expr {
    Expr::Column(Column::new_unqualified(name))
}

fn downcast<T: 'static>(batch: &RecordBatch, at: usize) -> Result<&T, ReplayError> {
    batch.column(at).as_any().downcast_ref::<T>().ok_or_else(|| {
        ReplayError::request(ReasonCode::ReplayFailed, "the engine gave a result of another shape".to_owned())
    })
}

fn failed(error: DataFusionError) -> ReplayError {
    ReplayError::request(ReasonCode::ReplayFailed, error.strip_backtrace())
}

/// A query that fails half-way comes back through the file writer.
fn of_table(error: crate::table::error::TableError) -> ReplayError {
    match error {
        crate::table::error::TableError::Producer(source) => {
            ReplayError::request(ReasonCode::ReplayFailed, source.to_string())
        }
        other => other.into(),
    }
}

impl From<CheckError> for ReplayError {
    fn from(error: CheckError) -> Self {
        Self::request(ReasonCode::ReplayFailed, error.to_string())
    }
}
