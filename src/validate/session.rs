//! The query engine: threads, memory and disk of every check, bounded once for the whole process.
//!
//! Checks burn CPU for seconds, so they run on threads of their own and never hold up the queue's runtime.
//! All sessions draw on one memory pool; what does not fit spills to disk, up to a bound, and a check that
//! needs more is `could-not-run`.
//!
//! A hash join cannot spill. It is tried first, being the fastest by far where one side fits; work that runs out of
//! memory is done once more by [`Engine::sparing`], whose joins sort both sides, which can.

use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use datafusion::arrow::datatypes::Schema;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result as DataFusionResult};
use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::session_state::SessionStateBuilder;
use datafusion::logical_expr::{LogicalPlan, Operator};
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};
use datafusion::physical_expr::expressions::{BinaryExpr, lit};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::joins::SortMergeJoinExec;
use datafusion::physical_plan::joins::utils::JoinFilter;
use datafusion::prelude::{SessionConfig, SessionContext};

use super::CheckError;

/// Name and version that go into evidence (rule E6). The version is that of `Cargo.toml`.
pub const ENGINE: &str = "datafusion 53.1.0";
/// Memory of all checks together, bytes.
pub const MEMORY_BYTES: usize = 256 * 1024 * 1024;
/// Disk that spilling may use, bytes.
pub const SPILL_BYTES: u64 = 16 * 1024 * 1024 * 1024;
/// One check on one candidate; a longer one is `could-not-run`.
pub const CHECK_TIME_BOUND: Duration = Duration::from_secs(10 * 60);

/// Of the memory, what a sort keeps back for merging what it has sorted: one part in so many.
const SPILL_RESERVATION_PARTS: usize = 32;
/// The engine's own default for that, bytes.
const MAX_SPILL_RESERVATION_BYTES: usize = 10 * 1024 * 1024;
/// Rows that a sparing session moves at a time: a sort has room for one of these at least, or fails.
const SPARING_BATCH_ROWS: usize = 256;
/// Streams of a sparing session. With fewer no join would be one that sorts; with more each has less memory.
const SPARING_STREAMS: usize = 2;

/// One for the process; shared by checks and rewrite proofs.
#[derive(Debug)]
pub struct Engine {
    threads: Arc<Threads>,
    environment: Arc<RuntimeEnv>,
    parallelism: usize,
    memory_bytes: usize,
    joins: Joins,
}

/// How sides are joined by equal values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joins {
    /// One side is in memory.
    Hashed,
    /// Both sides are sorted, on disk if they must.
    Sorted,
}

impl Engine {
    pub fn start() -> Result<Self, CheckError> {
        let parallelism = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::with_bounds(parallelism, MEMORY_BYTES)
    }

    pub fn with_bounds(parallelism: usize, memory_bytes: usize) -> Result<Self, CheckError> {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(parallelism)
            .thread_name("mergeberg-check")
            .enable_all()
            .build()
            .map_err(CheckError::Threads)?;
        let environment = RuntimeEnvBuilder::new()
            .with_memory_pool(Arc::new(FairSpillPool::new(memory_bytes)))
            .with_max_temp_directory_size(SPILL_BYTES)
            .build_arc()?;
        let threads = Arc::new(Threads(Some(threads)));
        Ok(Self { threads, environment, parallelism, memory_bytes, joins: Joins::Hashed })
    }

    /// The same threads, memory and disk, for work that ran out of memory: what can be on disk is.
    pub fn sparing(&self) -> Arc<Self> {
        Arc::new(Self {
            threads: Arc::clone(&self.threads),
            environment: Arc::clone(&self.environment),
            joins: Joins::Sorted,
            ..*self
        })
    }

    /// Streams that a scan is split into at most.
    pub fn parallelism(&self) -> usize {
        self.parallelism
    }

    /// A fresh session: nothing that one check registers is seen by another. Identifiers mean exactly the
    /// column of that spelling, quoted or not.
    pub fn session(&self) -> SessionContext {
        self.session_with(|_| ())
    }

    /// The same with other settings.
    pub fn session_with(&self, change: impl FnOnce(&mut SessionConfig)) -> SessionContext {
        let mut config =
            SessionConfig::new().with_target_partitions(self.parallelism).with_information_schema(false);
        config.options_mut().sql_parser.enable_ident_normalization = false;
        // Where a query reads a field of a struct, the rule (new in DataFusion 53) may make a projection with two columns of one
        // name, and planning ends there. Files are read by whole columns either way.
        config.options_mut().optimizer.enable_leaf_expression_pushdown = false;
        config.options_mut().execution.sort_spill_reservation_bytes =
            (self.memory_bytes / SPILL_RESERVATION_PARTS).min(MAX_SPILL_RESERVATION_BYTES);
        if self.joins == Joins::Sorted {
            config.options_mut().optimizer.prefer_hash_join = false;
            config = config.with_target_partitions(SPARING_STREAMS).with_batch_size(SPARING_BATCH_ROWS);
        }
        change(&mut config);
        let session = SessionContext::new_with_config_rt(config, Arc::clone(&self.environment));
        if self.joins == Joins::Hashed {
            return session;
        }
        let state = SessionStateBuilder::new_from_existing(session.state())
            .with_optimizer_rule(Arc::new(NoNullAwareJoins))
            .with_physical_optimizer_rule(Arc::new(UnknownIsNoMatch))
            .build();
        SessionContext::new_with_state(state)
    }

    /// Does it know joins that need no side in memory only?
    pub fn is_sparing(&self) -> bool {
        self.joins == Joins::Sorted
    }

    /// Runs `work` on the engine's threads, within `bound`. Giving up on the returned future stops it.
    pub async fn run<T, F>(&self, bound: Duration, work: F) -> Result<T, CheckError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, CheckError>> + Send + 'static,
    {
        let Some(threads) = &self.threads.0 else { return Err(CheckError::Stopped) };
        let mut task = StopOnDrop(threads.spawn(work));
        match tokio::time::timeout(bound, &mut task.0).await {
            Ok(Ok(result)) => result,
            Ok(Err(joined)) if joined.is_panic() => Err(CheckError::Crashed),
            Ok(Err(_)) => Err(CheckError::Stopped),
            Err(_) => Err(CheckError::TooSlow(bound)),
        }
    }
}

/// `None` only while dropping.
#[derive(Debug)]
struct Threads(Option<tokio::runtime::Runtime>);

impl Drop for Threads {
    fn drop(&mut self) {
        // Waiting for the threads is not allowed where an engine may be dropped, within async code.
        if let Some(threads) = self.0.take() {
            threads.shutdown_background();
        }
    }
}

struct StopOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for StopOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Refuses to sort the sides of a `NOT IN`: the engine's join by sorting does not know that a null among the others
/// makes it unknown, and would give rows.
#[derive(Debug)]
struct NoNullAwareJoins;

impl OptimizerRule for NoNullAwareJoins {
    fn name(&self) -> &str {
        "no_null_aware_joins"
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> DataFusionResult<Transformed<LogicalPlan>> {
        plan.apply_with_subqueries(|node| match node {
            LogicalPlan::Join(join) if join.null_aware => Err(DataFusionError::ResourcesExhausted(
                "the rows of a NOT IN do not fit into memory; write it as NOT EXISTS".to_owned(),
            )),
            _ => Ok(TreeNodeRecursion::Continue),
        })?;
        Ok(Transformed::no(plan))
    }
}

/// Two rows whose condition beside the equal values is unknown are no match. The engine's full join by sorting takes
/// them for one (apache/datafusion, pull request 21660), so each such condition is asked whether it is true. It is
/// also asked about rows that have no other, whose columns are null whatever their declaration says (issue 21197).
#[derive(Debug)]
struct UnknownIsNoMatch;

impl PhysicalOptimizerRule for UnknownIsNoMatch {
    fn name(&self) -> &str {
        "unknown_is_no_match"
    }

    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _config: &ConfigOptions,
    ) -> DataFusionResult<Arc<dyn ExecutionPlan>> {
        plan.transform_up(|node| {
            let Some(join) = node.as_any().downcast_ref::<SortMergeJoinExec>() else {
                return Ok(Transformed::no(node));
            };
            let Some(filter) = join.filter() else { return Ok(Transformed::no(node)) };
            let unsure = Arc::clone(filter.expression());
            let sure = Arc::new(BinaryExpr::new(unsure, Operator::IsNotDistinctFrom, lit(true)));
            let nullable =
                filter.schema().fields().iter().map(|field| field.as_ref().clone().with_nullable(true));
            let asked = Schema::new(nullable.collect::<Vec<_>>());
            let filter = JoinFilter::new(sure, filter.column_indices().to_vec(), Arc::new(asked));
            let join = SortMergeJoinExec::try_new(
                Arc::clone(join.left()),
                Arc::clone(join.right()),
                join.on().to_vec(),
                Some(filter),
                join.join_type(),
                join.sort_options().to_vec(),
                join.null_equality(),
            )?;
            Ok(Transformed::yes(Arc::new(join) as _))
        })
        .data()
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Did the work need more memory or disk than there is?
pub fn is_exhausted(error: &DataFusionError) -> bool {
    matches!(error.find_root(), DataFusionError::ResourcesExhausted(_))
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
    use datafusion::prelude::DataFrame;

    use super::*;

    const ROWS: i64 = 60_000;

    /// Two tables of some 200 bytes a row, joined; 10 MiB hold neither of them.
    async fn joined(engine: &Engine, sql: &str) -> DataFusionResult<usize> {
        let session = engine.session();
        for (name, first) in [("one", 0), ("other", ROWS / 2)] {
            let ids: Vec<i64> = (first..first + ROWS).map(|id| id * 7_919 % (2 * ROWS + 1)).collect();
            let texts: Vec<String> = ids.iter().map(|id| format!("{}{id}", "wide ".repeat(40))).collect();
            let batches = ids.chunks(4_000).zip(texts.chunks(4_000)).map(|(ids, texts)| {
                let ids: ArrayRef = Arc::new(Int64Array::from(ids.to_vec()));
                let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
                RecordBatch::try_from_iter([("id", ids), ("text", texts)])
            });
            let table: DataFrame = session.read_batches(batches.collect::<Result<Vec<_>, _>>()?)?;
            session.register_table(name, table.into_view())?;
        }
        session.sql(sql).await?.count().await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_join_that_does_not_fit_is_told_and_the_sparing_engine_does_it() {
        let engine = Engine::with_bounds(2, 10 * 1024 * 1024).unwrap();
        let sql = "SELECT o.text, t.text FROM one o FULL JOIN other t ON o.id = t.id AND o.text <> '' \
                   WHERE coalesce(o.text, t.text) <> 'no'";
        let failed = joined(&engine, sql).await.unwrap_err();
        assert!(is_exhausted(&failed), "{failed}");
        let all = usize::try_from(ROWS + ROWS / 2).unwrap();
        assert_eq!(joined(&engine.sparing(), sql).await.unwrap(), all);
    }

    /// The wrong count would be that of a condition which is unknown for half of the pairs, and taken for true.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_sparing_engine_matches_no_rows_by_a_condition_that_is_unknown() {
        let engine = Engine::with_bounds(2, 64 * 1024 * 1024).unwrap();
        let unknown = "(SELECT id, CASE WHEN id % 2 = 0 THEN id END AS even FROM other)";
        for join in ["FULL", "LEFT", "RIGHT", "INNER", "LEFT SEMI", "LEFT ANTI"] {
            let sql =
                format!("SELECT * FROM one o {join} JOIN {unknown} t ON o.id = t.id AND o.id <= t.even");
            let hashed = joined(&engine, &sql).await.unwrap();
            assert_eq!(joined(&engine.sparing(), &sql).await.unwrap(), hashed, "{join}");
        }
        let sql = format!("SELECT 1 FROM one o FULL JOIN {unknown} t ON o.id = t.id AND o.id <= t.even");
        let pairs = (ROWS / 2..ROWS).filter(|id| id * 7_919 % (2 * ROWS + 1) % 2 == 0).count();
        let all = usize::try_from(2 * ROWS).unwrap();
        assert_eq!(joined(&engine.sparing(), &sql).await.unwrap(), all - pairs);
    }

    /// A null among them makes it unknown, which a join that sorts does not know.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_sparing_engine_refuses_not_in_rather_than_give_wrong_rows() {
        let engine = Engine::with_bounds(2, 64 * 1024 * 1024).unwrap();
        let sql = "SELECT id FROM one WHERE id NOT IN (SELECT CASE WHEN id > 9 THEN id END FROM other)";
        assert_eq!(joined(&engine, sql).await.unwrap(), 0);
        let refused = joined(&engine.sparing(), sql).await.unwrap_err();
        assert!(is_exhausted(&refused) && refused.to_string().contains("NOT EXISTS"), "{refused}");
        let exists = "SELECT id FROM one o WHERE NOT EXISTS (SELECT 1 FROM other t WHERE t.id = o.id)";
        let all = usize::try_from(ROWS / 2).unwrap();
        assert_eq!(joined(&engine.sparing(), exists).await.unwrap(), all);
    }
}
