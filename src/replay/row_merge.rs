//! Rows that branch and target changed, compared by key: the merge of a source that nothing recorded speaks of.
//!
//! Both sides are compared with the snapshot that the branch was made from, as rows: which keys came, went or
//! have other values. What only the branch changed is done to the target's rows; what both changed alike is done
//! already; what both changed differently is a conflict, which the class decides. Only rows of files that differ
//! are read, with everything that delete files take away.
//!
//! A key names one row. Where it does not, or is null, nobody can say which row became which, and the merge is
//! refused.
//!
//! A table of format v3 names its rows itself (table spec, "Row Lineage"): their ids are the key where nobody declares one.
//! They are as good as the writers: one that does not carry them along, as an overwrite does not, leaves a row that is gone
//! and another that is new, and nobody can say whether they are one. So rows that one side took away while it brought new
//! ones, and that the other side touched too, are a conflict whatever the class says.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::catalog::TableProvider as _;
use datafusion::functions_aggregate::expr_fn::count;
use datafusion::logical_expr::{Expr, JoinType, lit, when};
use datafusion::prelude::{DataFrame, SessionContext};
use futures::TryStreamExt;
use mergeberg_kernel::policy::RowConflicts;
use mergeberg_kernel::reason::ReasonCode;
use serde_json::{Value, json};

use super::changes::Changes;
use super::columns::{column, hidden};
use super::error::ReplayError;
use super::plan::{Action, CLAUSE, Frame, Planned};
use super::rewrite::Job;
use super::session::{ORIGIN, POSITION, ROW_ID};
use super::{Replayed, resources};
use crate::table::course::{Counts, Course};
use crate::table::loaded::LoadedTable;
use crate::table::manifests::LiveFiles;
use crate::table::scan::{RowDifference, RowReader, ScanCounters, ScanFile, live_rows, row_difference};
use crate::validate::{Engine, FilesTable, value_text};

/// Conflicts that are kept and shown.
pub const MAX_CONFLICTS: usize = 20;

/// Column: the row is not there any more on this side.
const GONE: &str = "\u{1}gone";
/// Column: the row was there when the branch was made.
const WAS: &str = "\u{1}was";
/// Column: the other side changed the row as well.
const MET: &str = "\u{1}met";
/// Column: and it did the same.
const ALIKE: &str = "\u{1}alike";

/// What is merged.
#[derive(Clone)]
pub struct RowMergeInput {
    pub table: Arc<LoadedTable>,
    /// Live when the branch was made, or at the last of its snapshots that is published.
    pub base: LiveFiles,
    pub source: LiveFiles,
    /// Live at the car's parent.
    pub target: LiveFiles,
    /// Names of columns of the table as it is now. When it is empty: its identifier fields, else its row ids.
    pub key: Vec<String>,
    pub conflicts: RowConflicts,
    /// May both sides bring new rows that no key tells apart?
    pub appends_meet: bool,
}

/// Merges the source's rows into the target. Reads data, writes data and delete files, commits nothing. What runs out
/// of memory is done once more by joins that can go to disk. Whoever looks after the course deletes the files when it
/// fails.
pub async fn row_merge(
    engine: &Arc<Engine>,
    input: RowMergeInput,
    course: &Course,
) -> Result<Replayed, ReplayError> {
    match Box::pin(merge_on(engine, input.clone(), course)).await {
        Err(error) if error.is_too_large() => {
            tracing::info!("rows are merged again by joins that can go to disk: {error}");
            Box::pin(merge_on(&engine.sparing(), input, course)).await
        }
        outcome => outcome,
    }
}

async fn merge_on(
    engine: &Arc<Engine>,
    input: RowMergeInput,
    course: &Course,
) -> Result<Replayed, ReplayError> {
    let RowMergeInput { table, base, source, target, key, conflicts, appends_meet } = input;
    let merge = Merge::new(engine, &table, &key, Arc::clone(course.counts()))?;
    let branch = row_difference(base.clone(), source)?;
    let since = row_difference(base, target.clone())?;
    // Where a row that the branch changed may be by now: in a file that had it, or in one that came since.
    let touched = branch.removed.iter().chain(&since.added).map(|file| Arc::clone(&file.file.fact.path));
    let touched: std::collections::HashSet<Arc<str>> = touched.collect();
    let rows: Vec<ScanFile> = live_rows(target.clone())?
        .into_iter()
        .filter(|file| touched.contains(&file.file.fact.path))
        .collect();
    // Keys and conflicts are looked for in the rows: that takes long by itself.
    let frame = course.unless_ended(merge.plan(&branch, &since, &rows, conflicts, appends_meet)).await??;
    let job = Job {
        table: Arc::clone(&table),
        changes: Changes::new(rows),
        planned: Planned {
            frames: vec![frame],
            mode_property: "write.merge.mode",
            replaces_partitions: false,
        },
        names: merge.names.clone(),
        expected_rows: None,
        live: target,
        resources: resources(engine, &merge.context),
        course: course.clone(),
    };
    engine.run(course.hard_bound(), async move { Ok(job.run().await) }).await?
}

/// One merge: how its rows are read, and by which columns they are told apart.
struct Merge<'a> {
    engine: &'a Arc<Engine>,
    context: SessionContext,
    reader: Arc<RowReader>,
    /// With the row ids, in tables that have them.
    keeping: Arc<RowReader>,
    names: Vec<String>,
    /// What rows are compared by: the table's columns, with the row ids behind them where those are the key.
    compared: Vec<String>,
    /// Places of the key's columns among these.
    key: Vec<usize>,
    counts: Arc<Counts>,
}

impl<'a> Merge<'a> {
    fn new(
        engine: &'a Arc<Engine>,
        table: &Arc<LoadedTable>,
        key: &[String],
        counts: Arc<Counts>,
    ) -> Result<Self, ReplayError> {
        let schema_id = table.facts.current_schema_id;
        let reader = Arc::new(RowReader::new(table, schema_id)?);
        let keeping = Arc::new(RowReader::new(table, schema_id)?.with_lineage()?);
        let names: Vec<String> =
            reader.arrow_schema().fields().iter().map(|field| field.name().clone()).collect();
        let mut compared = names.clone();
        let named = match (key, identifier_fields(table), row_id_name(&keeping, names.len())) {
            ([], fields, Some(row_id)) if fields.is_empty() => {
                compared.push(row_id.clone());
                vec![row_id]
            }
            ([], fields, None) if fields.is_empty() => {
                return Err(refused(
                    "rows are to be merged by key, but the class names none, and the table has neither identifier \
                     fields nor row ids"
                        .to_owned(),
                ));
            }
            ([], fields, _) => fields,
            (declared, ..) => declared.to_vec(),
        };
        let key = named
            .iter()
            .map(|name| {
                let place = compared.iter().position(|column| column == name);
                place.ok_or_else(|| {
                    refused(format!("the table has no column '{name}' at its top, which is in the key"))
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { engine, context: engine.session(), reader, keeping, names, compared, key, counts })
    }

    async fn plan(
        &self,
        branch: &RowDifference,
        since: &RowDifference,
        rows: &[ScanFile],
        rule: RowConflicts,
        appends_meet: bool,
    ) -> Result<Frame, ReplayError> {
        let sides = [
            ("the branch", &branch.added),
            ("the snapshot that the branch was made from", &branch.removed),
            ("the target", &since.added),
            ("the snapshot that the branch was made from", &since.removed),
        ];
        for (whose, files) in sides {
            self.require_keys(self.rows(files, hidden)?, whose).await?;
        }
        let met = self.met(branch, since)?;
        if self.is_by_row_id() {
            self.refuse_lost_ids(&met, branch, since).await?;
            if !appends_meet && self.brings_new(branch).await? && self.brings_new(since).await? {
                return Err(ReplayError::request(
                    ReasonCode::OverlappingAppend,
                    "branch and target both brought new rows, which row ids cannot tell apart: name a 'key' in the \
                     class, or let appends meet ('overlap')",
                ));
            }
        }
        if rule == RowConflicts::Refuse {
            let text = |total| match total {
                1 => "branch and target changed one row to different values".to_owned(),
                n => format!("branch and target changed {n} rows to different values"),
            };
            self.refuse_any(met.clone().filter(column(MET).and(!column(ALIKE)))?, text).await?;
        }
        let conflict = column(MET).and(!column(ALIKE));
        let mine = match rule {
            RowConflicts::Refuse | RowConflicts::KeepTarget => !column(MET),
            RowConflicts::TakeSource => (!column(MET)).or(conflict),
        };
        let changes = met.filter(mine)?;
        let frame = self.located(changes, rows)?;
        self.require_one_row_each(&frame).await?;
        let frame = frame.filter(column(CLAUSE).gt_eq(lit(0_i32)))?;
        let row_id = self.row_id_name().map(|_| column(ROW_ID));
        let mut columns = vec![column(CLAUSE), column(ORIGIN), column(POSITION)];
        columns.extend(row_id);
        columns.extend((0..self.names.len()).map(|at| column(&hidden(at))));
        Ok(Frame {
            rows: frame.select(columns)?,
            actions: vec![Action::Delete, Action::Update, Action::Insert],
            once: true,
            inside: None,
        })
    }

    /// What the branch changed, beside what the target did with the same rows: key and values of the branch
    /// under [`hidden`] names, those of base and target under [`then`] and [`theirs`].
    fn met(&self, branch: &RowDifference, since: &RowDifference) -> Result<DataFrame, ReplayError> {
        let mine = self.changed(branch, hidden, then)?;
        let theirs_gone = gone_too();
        let others = self.changed(since, theirs, theirs_then)?;
        let others = others
            .with_column_renamed(GONE, &theirs_gone)?
            .with_column_renamed(WAS, &format!("{WAS} too"))?;
        let on: Vec<Expr> =
            self.key.iter().map(|&at| column(&key_of(hidden(at))).eq(column(&key_of(theirs(at))))).collect();
        let both = mine.join_on(others, JoinType::Left, on)?;
        let met = column(&theirs_gone).is_not_null();
        let same =
            all((0..self.compared.len()).map(|at| not_distinct(column(&hidden(at)), column(&theirs(at)))));
        let gone = column(GONE);
        let alike = (gone.clone().and(column(&theirs_gone)))
            .or((!gone).and(!column(&theirs_gone)).and(same))
            .is_true();
        Ok(both.with_column(MET, met)?.with_column(ALIKE, alike)?)
    }

    /// The rows in which two snapshots differ, by key: the later values under the names that `now` gives, the
    /// earlier ones under those of `before`.
    fn changed(
        &self,
        difference: &RowDifference,
        now: fn(usize) -> String,
        before: fn(usize) -> String,
    ) -> Result<DataFrame, ReplayError> {
        let earlier = self.rows(&difference.removed, before)?.with_column(WAS, lit(true))?;
        let later = self.rows(&difference.added, now)?.with_column(GONE, lit(false))?;
        let on: Vec<Expr> = self.key.iter().map(|&at| column(&before(at)).eq(column(&now(at)))).collect();
        let both = earlier.join_on(later, JoinType::Full, on)?;
        let differs = any((0..self.compared.len()).map(|at| distinct(column(&before(at)), column(&now(at)))));
        let is_one_sided = column(WAS).is_null().or(column(GONE).is_null());
        let mut columns: Vec<Expr> = Vec::new();
        for &at in &self.key {
            let key = when(column(GONE).is_null(), column(&before(at))).otherwise(column(&now(at)))?;
            columns.push(key.alias(key_of(now(at))));
        }
        columns.extend((0..self.compared.len()).flat_map(|at| [column(&now(at)), column(&before(at))]));
        columns.push(column(WAS).is_not_null().alias(WAS));
        columns.push(column(GONE).is_null().alias(GONE));
        Ok(both.filter(is_one_sided.or(differs))?.select(columns)?)
    }

    /// Rows of these files, their columns under the names that `name` gives.
    fn rows(&self, files: &[ScanFile], name: fn(usize) -> String) -> Result<DataFrame, ReplayError> {
        let counters = self.counting(files);
        let reader = if self.is_by_row_id() { &self.keeping } else { &self.reader };
        let files = FilesTable::new(Arc::clone(reader), files.to_vec(), self.engine.parallelism(), counters);
        let columns = self.compared.iter().enumerate().map(|(at, own)| column(own).alias(name(at)));
        Ok(self.context.read_table(Arc::new(files))?.select(columns.collect::<Vec<Expr>>())?)
    }

    /// These will be read.
    fn counting(&self, files: &[ScanFile]) -> Arc<ScanCounters> {
        let rows: i64 = files.iter().map(|file| file.file.fact.records).sum();
        self.counts.rows_to_read.fetch_add(rows.max(0).cast_unsigned(), Ordering::Relaxed);
        Arc::clone(&self.counts.read)
    }

    /// Name of the row ids in the files.
    fn row_id_name(&self) -> Option<String> {
        row_id_name(&self.keeping, self.names.len())
    }

    fn is_by_row_id(&self) -> bool {
        self.compared.len() > self.names.len()
    }

    /// What happens to which row of the target.
    fn located(&self, changes: DataFrame, rows: &[ScanFile]) -> Result<DataFrame, ReplayError> {
        let numbered = rows.iter().zip(0_i32..).map(|(file, at)| file.clone().with_origin(at)).collect();
        let counters = self.counting(rows);
        let files = FilesTable::new(Arc::clone(&self.keeping), numbered, self.engine.parallelism(), counters)
            .with_origin_as(ORIGIN)
            .with_position_as(POSITION);
        debug_assert!(files.schema().fields().len() > self.names.len());
        let mut columns = vec![column(ORIGIN), column(POSITION)];
        columns.extend(self.row_id_name().map(|name| column(&name).alias(ROW_ID)));
        for &at in &self.key {
            let own = self.compared.get(at).map_or("", String::as_str);
            columns.push(column(own).alias(place_of(at)));
        }
        let there = self.context.read_table(Arc::new(files))?.select(columns)?;
        let on: Vec<Expr> =
            self.key.iter().map(|&at| column(&key_of(hidden(at))).eq(column(&place_of(at)))).collect();
        let is_there = column(ORIGIN).is_not_null();
        let clause = when(is_there.clone().and(column(GONE)), lit(0_i32))
            .when(is_there.clone(), lit(1_i32))
            .when(!column(GONE), lit(2_i32))
            // Gone on both sides.
            .otherwise(lit(-1_i32))?;
        Ok(changes.join_on(there, JoinType::Left, on)?.with_column(CLAUSE, clause)?)
    }

    /// Every key is filled, and names one row.
    async fn require_keys(&self, rows: DataFrame, whose: &str) -> Result<(), ReplayError> {
        let keys: Vec<Expr> = self.key.iter().map(|&at| column(&hidden(at))).collect();
        let empty = any(keys.iter().cloned().map(Expr::is_null));
        if let Some(batch) = first(rows.clone().filter(empty)?).await? {
            let row = self.row_text(&batch, hidden)?;
            return Err(refused(format!(
                "{whose} has a row whose key is null, so it cannot be followed: {row}"
            )));
        }
        let twice = rows.aggregate(keys, vec![count(lit(1_i64)).alias("n")])?;
        if let Some(batch) = first(twice.filter(column("n").gt(lit(1_i64)))?).await? {
            let key = self.key_text(&batch, hidden)?;
            return Err(refused(format!(
                "{whose} has more than one row with {key}, so it cannot be followed"
            )));
        }
        Ok(())
    }

    /// A changed row is in one place on the target, and one that the branch brings is in none.
    async fn require_one_row_each(&self, frame: &DataFrame) -> Result<(), ReplayError> {
        let taken = (!column(WAS)).and(!column(MET)).and(column(ORIGIN).is_not_null());
        if let Some(batch) = first(frame.clone().filter(taken)?).await? {
            let key = self.key_text(&batch, |at| key_of(hidden(at)))?;
            return Err(refused(format!(
                "the branch adds a row with {key}, which was there when it was made"
            )));
        }
        let lost = column(WAS).and(!column(MET)).and(column(ORIGIN).is_null());
        if let Some(batch) = first(frame.clone().filter(lost)?).await? {
            let key = self.key_text(&batch, |at| key_of(hidden(at)))?;
            return Err(refused(format!(
                "the branch changed the row with {key}, and no file of the target that may hold it does"
            )));
        }
        let keys: Vec<Expr> = self.key.iter().map(|&at| column(&key_of(hidden(at)))).collect();
        let twice = frame.clone().aggregate(keys, vec![count(lit(1_i64)).alias("n")])?;
        if let Some(batch) = first(twice.filter(column("n").gt(lit(1_i64)))?).await? {
            let key = self.key_text(&batch, |at| key_of(hidden(at)))?;
            return Err(refused(format!("the target has more than one row with {key}")));
        }
        Ok(())
    }

    /// Rows that both sides touched, of which one took them away and brought new ones: perhaps the same, under new ids.
    async fn refuse_lost_ids(
        &self,
        met: &DataFrame,
        branch: &RowDifference,
        since: &RowDifference,
    ) -> Result<(), ReplayError> {
        let mut lost = lit(false);
        for (side, gone) in [(branch, GONE.to_owned()), (since, gone_too())] {
            if self.brings_new(side).await? {
                lost = lost.or(column(&gone));
            }
        }
        let text = |total| {
            let rows = if total == 1 { "one row".to_owned() } else { format!("{total} rows") };
            format!(
                "branch and target both touched {rows}, and one of them wrote rows under new row ids, so nobody can \
                 tell which row became which: name a 'key' in the class"
            )
        };
        self.refuse_any(met.clone().filter(column(MET).and(lost))?, text).await
    }

    /// Has the side rows that were not there when the branch was made?
    async fn brings_new(&self, side: &RowDifference) -> Result<bool, ReplayError> {
        let new = self.changed(side, hidden, then)?.filter(!column(WAS))?;
        Ok(first(new).await?.is_some())
    }

    /// Rows of [`Self::met`] that nobody may decide but people.
    async fn refuse_any(
        &self,
        conflicts: DataFrame,
        text: impl FnOnce(usize) -> String,
    ) -> Result<(), ReplayError> {
        let total = conflicts.clone().count().await?;
        if total == 0 {
            return Ok(());
        }
        let order = self.key.iter().map(|&at| column(&key_of(hidden(at))).sort(true, false)).collect();
        let batches = conflicts.sort(order)?.limit(0, Some(MAX_CONFLICTS))?.collect().await?;
        let mut rows = Vec::new();
        for batch in &batches {
            for at in 0..batch.num_rows() {
                let row = batch.slice(at, 1);
                rows.push(self.conflict(&row)?);
            }
        }
        Err(ReplayError::Conflicts { text: text(total), rows })
    }

    /// One row of [`Self::met`] for people.
    fn conflict(&self, row: &RecordBatch) -> Result<Value, ReplayError> {
        let flag = |name: &str| {
            let flags = row.column_by_name(name).and_then(|column| column.as_boolean_opt());
            flags.is_some_and(|flags| !flags.is_empty() && flags.value(0))
        };
        let shown = |is_there: bool, other: &str, name: fn(usize) -> String| -> Result<String, ReplayError> {
            if is_there { self.row_text(row, name) } else { Ok(other.to_owned()) }
        };
        Ok(json!({
            "key": self.key_text(row, |at| key_of(hidden(at)))?,
            "base": shown(flag(WAS), "not there", then)?,
            "target": shown(!flag(&gone_too()), "deleted", theirs)?,
            "source": shown(!flag(GONE), "deleted", hidden)?,
        }))
    }

    fn row_text(&self, row: &RecordBatch, name: fn(usize) -> String) -> Result<String, ReplayError> {
        text_of(row, self.names.iter().enumerate().map(|(at, own)| (own.as_str(), name(at))))
    }

    fn key_text(&self, row: &RecordBatch, name: impl Fn(usize) -> String) -> Result<String, ReplayError> {
        let of = |&at: &usize| (self.compared.get(at).map_or("", String::as_str), name(at));
        text_of(row, self.key.iter().map(of))
    }
}

/// `column=value`, of the first row.
fn text_of<'n>(
    row: &RecordBatch,
    columns: impl Iterator<Item = (&'n str, String)>,
) -> Result<String, ReplayError> {
    let mut parts = Vec::new();
    for (own, name) in columns {
        if let Some(values) = row.column_by_name(&name) {
            parts.push(format!("{own}={}", value_text(values.as_ref(), 0)?));
        }
    }
    Ok(parts.join(" "))
}

/// The first row, if there is one.
async fn first(rows: DataFrame) -> Result<Option<RecordBatch>, ReplayError> {
    let mut stream = rows.limit(0, Some(1))?.execute_stream().await?;
    while let Some(batch) = stream.try_next().await? {
        if batch.num_rows() > 0 {
            return Ok(Some(batch));
        }
    }
    Ok(None)
}

/// Top-level columns that name a row (table spec, "Identifier Field IDs").
fn identifier_fields(table: &LoadedTable) -> Vec<String> {
    let Some(schema) = table.facts.schemas.get(&table.facts.current_schema_id) else { return Vec::new() };
    let of = |id: &i32| schema.fields.iter().find(|field| field.id == *id).map(|field| field.name.clone());
    schema.identifier_field_ids.iter().filter_map(of).collect()
}

/// Behind the table's own columns, in tables whose rows have ids.
fn row_id_name(keeping: &RowReader, columns: usize) -> Option<String> {
    keeping.arrow_schema().fields().get(columns).map(|field| field.name().clone())
}

fn refused(text: String) -> ReplayError {
    ReplayError::request(ReasonCode::RowConflict, text)
}

/// Names of columns of a side, beside [`hidden`] for the branch's own.
fn then(at: usize) -> String {
    format!("\u{1}then{at}")
}

fn theirs(at: usize) -> String {
    format!("\u{1}theirs{at}")
}

fn theirs_then(at: usize) -> String {
    format!("\u{1}theirs then{at}")
}

/// [`GONE`] of the other side.
fn gone_too() -> String {
    format!("{GONE} too")
}

/// A key's column that is filled whatever became of the row.
fn key_of(name: String) -> String {
    format!("{name} key")
}

/// A key's column in the target's rows.
fn place_of(at: usize) -> String {
    format!("\u{1}place{at}")
}

fn all(mut parts: impl Iterator<Item = Expr>) -> Expr {
    let first = parts.next().unwrap_or_else(|| lit(true));
    parts.fold(first, Expr::and)
}

fn any(mut parts: impl Iterator<Item = Expr>) -> Expr {
    let first = parts.next().unwrap_or_else(|| lit(false));
    parts.fold(first, Expr::or)
}

fn distinct(left: Expr, right: Expr) -> Expr {
    datafusion::logical_expr::binary_expr(left, datafusion::logical_expr::Operator::IsDistinctFrom, right)
}

fn not_distinct(left: Expr, right: Expr) -> Expr {
    datafusion::logical_expr::binary_expr(left, datafusion::logical_expr::Operator::IsNotDistinctFrom, right)
}
