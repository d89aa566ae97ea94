//! Rows on their way to files, through the engine's operators: spread over lanes by partition, and sorted, within the
//! engine's memory and beyond it on disk.
//!
//! The rows are the producer's one stream, taken in its order; what fails in it comes back as it was, whatever the
//! operators make of it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::SchemaRef as ArrowSchemaRef;
use datafusion::error::{DataFusionError, Result as DataFusionResult};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::{PartitionStream, StreamingTableExec};
use datafusion::physical_plan::{ExecutionPlan, Partitioning};
use futures::{Stream, StreamExt};

use super::error::TableError;
use super::row_order::OrderColumn;

/// Memory, disk and threads of the engine that writes.
#[derive(Clone)]
pub struct WriteResources {
    pub task: Arc<TaskContext>,
    /// Files that are encoded at the same time, at most.
    pub lanes: usize,
}

/// What a producer failed with, kept until the operators have ended.
#[derive(Clone, Default)]
pub(super) struct Failure(Arc<Mutex<Option<TableError>>>);

impl Failure {
    /// The first one counts.
    fn keep(&self, error: TableError) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get_or_insert(error);
    }

    pub fn take(&self) -> Option<TableError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A producer's rows as the operators take them.
pub(super) fn as_engine_rows<S>(
    schema: &ArrowSchemaRef,
    rows: S,
    failure: &Failure,
) -> SendableRecordBatchStream
where
    S: Stream<Item = Result<RecordBatch, TableError>> + Send + 'static,
{
    let failure = failure.clone();
    let rows = rows.map(move |batch| {
        batch.map_err(|error| {
            failure.keep(error);
            DataFusionError::Execution("the producer of the rows failed".to_owned())
        })
    });
    Box::pin(RecordBatchStreamAdapter::new(Arc::clone(schema), rows))
}

/// `rows` in at most `lanes` streams, those of equal values in the columns `by` in one of them. Every stream must be
/// read for any to end.
pub(super) fn in_lanes(
    rows: SendableRecordBatchStream,
    by: &[OrderColumn],
    lanes: usize,
    sorted_by: &[OrderColumn],
    task: &Arc<TaskContext>,
) -> DataFusionResult<Vec<SendableRecordBatchStream>> {
    let schema = rows.schema();
    let mut plan = once(rows)?;
    if lanes > 1 && !by.is_empty() {
        let by = by.iter().map(|column| expression(&schema, column)).collect::<DataFusionResult<Vec<_>>>()?;
        plan = Arc::new(RepartitionExec::try_new(plan, Partitioning::Hash(by, lanes))?);
    }
    let plan = sort(plan, &schema, sorted_by)?;
    let streams = plan.properties().output_partitioning().partition_count();
    (0..streams).map(|lane| plan.execute(lane, Arc::clone(task))).collect()
}

/// `rows` sorted.
pub(super) fn sorted(
    rows: SendableRecordBatchStream,
    by: &[OrderColumn],
    task: &Arc<TaskContext>,
) -> DataFusionResult<SendableRecordBatchStream> {
    let schema = rows.schema();
    sort(once(rows)?, &schema, by)?.execute(0, Arc::clone(task))
}

fn sort(
    plan: Arc<dyn ExecutionPlan>,
    schema: &ArrowSchemaRef,
    by: &[OrderColumn],
) -> DataFusionResult<Arc<dyn ExecutionPlan>> {
    let by = by
        .iter()
        .map(|column| Ok(PhysicalSortExpr { expr: expression(schema, column)?, options: column.options }));
    match LexOrdering::new(by.collect::<DataFusionResult<Vec<_>>>()?) {
        Some(ordering) => Ok(Arc::new(SortExec::new(ordering, plan).with_preserve_partitioning(true))),
        None => Ok(plan),
    }
}

fn expression(schema: &ArrowSchemaRef, column: &OrderColumn) -> DataFusionResult<Arc<dyn PhysicalExpr>> {
    let Some(field) = schema.fields().get(column.at) else {
        return Err(DataFusionError::Internal("rows without a column to order by".to_owned()));
    };
    Ok(Arc::new(Column::new(field.name(), column.at)))
}

fn once(rows: SendableRecordBatchStream) -> DataFusionResult<Arc<dyn ExecutionPlan>> {
    let schema = rows.schema();
    let rows = Once { schema: Arc::clone(&schema), rows: Mutex::new(Some(rows)) };
    Ok(Arc::new(StreamingTableExec::try_new(schema, vec![Arc::new(rows)], None, [], false, None)?))
}

/// A stream that is read once.
struct Once {
    schema: ArrowSchemaRef,
    rows: Mutex<Option<SendableRecordBatchStream>>,
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rows to be written")
    }
}

impl PartitionStream for Once {
    fn schema(&self) -> &ArrowSchemaRef {
        &self.schema
    }

    fn execute(&self, _task: Arc<TaskContext>) -> SendableRecordBatchStream {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner).take();
        rows.unwrap_or_else(|| {
            let twice = || async { Err(DataFusionError::Internal("rows were asked for twice".to_owned())) };
            let stream = futures::stream::once(twice());
            Box::pin(RecordBatchStreamAdapter::new(Arc::clone(&self.schema), stream))
        })
    }
}
