//! Chosen data files as a DataFusion table.
//!
//! A provider of our own, because the crate's reads in one partition and plans by predicates. Here the
//! files are given (by touched partition tuples, never by casts in SQL), read in parallel, and every row
//! carries the number of the file's origin, so that blame needs no second source (rule E3).
//!
//! Absent on purpose: filter push-down. Files are chosen already, and a filter that is converted wrongly
//! would turn a violation into a pass.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use datafusion::arrow::array::{ArrayRef, Int32Array, RecordBatch, RecordBatchOptions};
use datafusion::arrow::datatypes::{DataType, Field, SchemaRef};
use datafusion::catalog::{Session, TableProvider};
use datafusion::common::stats::Precision;
use datafusion::common::{DataFusionError, Result as DataFusionResult, Statistics};
use datafusion::datasource::TableType;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::Expr;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use futures::{StreamExt, TryStreamExt};

use crate::table::scan::{FileGroup, RowReader, ScanCounters, ScanFile, with_column};

/// Name of the origin column, unless the table has a column of that name.
const ORIGIN: &str = "_origin";

/// Files of a table as one relation.
#[derive(Debug)]
pub struct FilesTable {
    reader: Arc<RowReader>,
    groups: Arc<Vec<FileGroup>>,
    schema: SchemaRef,
    /// Position of the origin column; `None`: the relation has the table's columns only.
    origin: Option<usize>,
    /// Position of the column that tells a row's position in its file.
    position: Option<usize>,
    counters: Arc<ScanCounters>,
}

impl FilesTable {
    /// The table's columns, read in at most `partitions` parallel streams.
    pub fn new(
        reader: Arc<RowReader>,
        files: Vec<ScanFile>,
        partitions: usize,
        counters: Arc<ScanCounters>,
    ) -> Self {
        let schema = Arc::clone(reader.arrow_schema());
        let groups = Arc::new(FileGroup::balance(files, partitions));
        Self { reader, groups, schema, origin: None, position: None, counters }
    }

    /// With the origin as a last column, `Int32`; see [`Self::origin_column`].
    pub fn with_origin(self) -> Self {
        let name = free_name(&self.schema);
        self.with_origin_as(&name)
    }

    /// The same under a name that no column has.
    pub fn with_origin_as(mut self, name: &str) -> Self {
        self.origin = Some(self.schema.fields().len());
        self.schema = with_column(&self.schema, Field::new(name, DataType::Int32, false));
        self
    }

    /// With the row's position in its file, `Int64`, under a name that no column has.
    pub fn with_position_as(mut self, name: &str) -> Self {
        self.position = Some(self.schema.fields().len());
        self.schema = with_column(&self.schema, Field::new(name, DataType::Int64, false));
        self
    }

    /// Name of the origin column, when there is one.
    pub fn origin_column(&self) -> Option<&str> {
        self.origin.map(|at| self.schema.field(at).name().as_str())
    }
}

/// A name that no column has.
fn free_name(schema: &SchemaRef) -> String {
    let mut name = ORIGIN.to_owned();
    while schema.field_with_name(&name).is_ok() {
        name.push('_');
    }
    name
}

#[async_trait]
impl TableProvider for FilesTable {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    fn table_type(&self) -> TableType {
        TableType::Base
    }

    async fn scan(
        &self,
        _session: &dyn Session,
        projection: Option<&Vec<usize>>,
        _filters: &[Expr],
        _limit: Option<usize>,
    ) -> DataFusionResult<Arc<dyn ExecutionPlan>> {
        let columns: Vec<usize> = match projection {
            Some(columns) => columns.clone(),
            None => (0..self.schema.fields().len()).collect(),
        };
        let schema = Arc::new(self.schema.project(&columns)?);
        let properties = PlanProperties::new(
            EquivalenceProperties::new(Arc::clone(&schema)),
            Partitioning::UnknownPartitioning(self.groups.len()),
            EmissionType::Incremental,
            Boundedness::Bounded,
        );
        Ok(Arc::new(FilesScan {
            reader: Arc::clone(&self.reader),
            groups: Arc::clone(&self.groups),
            columns,
            origin: self.origin,
            position: self.position,
            counters: Arc::clone(&self.counters),
            properties: Arc::new(properties),
        }))
    }
}

/// The physical scan of a [`FilesTable`].
#[derive(Debug)]
struct FilesScan {
    reader: Arc<RowReader>,
    groups: Arc<Vec<FileGroup>>,
    /// Wanted columns by position in the provider's schema, the origin among them.
    columns: Vec<usize>,
    origin: Option<usize>,
    position: Option<usize>,
    counters: Arc<ScanCounters>,
    properties: Arc<PlanProperties>,
}

impl DisplayAs for FilesScan {
    fn fmt_as(&self, _format: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let files: usize = self.groups.iter().map(|g| g.files.len()).sum();
        write!(f, "FilesScan: files={files}, streams={}", self.groups.len())
    }
}

impl ExecutionPlan for FilesScan {
    fn name(&self) -> &str {
        "FilesScan"
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn with_new_children(
        self: Arc<Self>,
        _children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> DataFusionResult<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(
        &self,
        partition: usize,
        _context: Arc<TaskContext>,
    ) -> DataFusionResult<SendableRecordBatchStream> {
        let files = self.groups.get(partition).map(|group| group.files.clone()).unwrap_or_default();
        let is_real = |at: &usize| Some(*at) != self.origin && Some(*at) != self.position;
        let real: Vec<usize> = self.columns.iter().copied().filter(is_real).collect();
        // Where the columns that are not in the files stand among the wanted ones.
        let place = |virtual_column: Option<usize>| {
            virtual_column.and_then(|at| self.columns.iter().position(|column| *column == at))
        };
        let places = Places { origin: place(self.origin), position: place(self.position) };
        let schema = self.schema();
        let out = Arc::clone(&schema);
        let reader = Arc::clone(&self.reader);
        let counters = Arc::clone(&self.counters);
        let rows = futures::stream::iter(files)
            .map(move |file| {
                let schema = Arc::clone(&out);
                let batches = if places.position.is_some() {
                    reader.read_located(&file, &real, &counters)
                } else {
                    reader.read(&file, &real, &counters)
                };
                let batches = batches.map_err(external)?;
                Ok::<_, DataFusionError>(
                    batches.map(move |batch| places.put(&batch.map_err(external)?, &schema, file.origin)),
                )
            })
            .try_flatten();
        Ok(Box::pin(RecordBatchStreamAdapter::new(schema, rows)))
    }

    /// Row counts are those of the manifests, with deleted rows. Told as inexact: a plan may be chosen by them, a result
    /// must come from the rows.
    fn partition_statistics(&self, partition: Option<usize>) -> DataFusionResult<Statistics> {
        let groups = match partition {
            Some(at) => self.groups.get(at..=at).unwrap_or_default(),
            None => self.groups.as_slice(),
        };
        let records: i64 = groups.iter().map(FileGroup::records).sum();
        let mut statistics = Statistics::new_unknown(&self.schema());
        statistics.num_rows = Precision::Inexact(usize::try_from(records).unwrap_or_default());
        Ok(statistics)
    }
}

/// Where the columns go that are not in the files.
#[derive(Clone, Copy)]
struct Places {
    origin: Option<usize>,
    position: Option<usize>,
}

impl Places {
    /// `batch` has the position as its last column, where it is wanted.
    fn put(self, batch: &RecordBatch, schema: &SchemaRef, origin: i32) -> DataFusionResult<RecordBatch> {
        let mut columns = batch.columns().to_vec();
        let position = self.position.and_then(|at| Some((at, columns.pop()?)));
        let origin = self.origin.map(|at| -> (usize, ArrayRef) {
            (at, Arc::new(Int32Array::from_value(origin, batch.num_rows())))
        });
        let mut virtual_columns: Vec<(usize, ArrayRef)> = position.into_iter().chain(origin).collect();
        virtual_columns.sort_by_key(|(at, _)| *at);
        for (at, column) in virtual_columns {
            columns.insert(at, column);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        Ok(RecordBatch::try_new_with_options(Arc::clone(schema), columns, &options)?)
    }
}

fn external(error: crate::table::error::TableError) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}
