//! In which order rows go into files: by the values of their partition, then by the table's sort order (table spec,
//! "Sorting").
//!
//! Values are compared as Arrow's total order does, which is the spec's: floats from negative to positive
//! not-a-number with minus zero below zero, texts and bytes by their bytes. A sort order that cannot be followed (a
//! transform that this release does not know, a column that is gone) leaves files unsorted, which the spec allows
//! anywhere; a partition must be known.

use std::sync::Arc;

use datafusion::arrow::array::{Array, ArrayRef, AsArray, RecordBatch, new_empty_array};
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::{
    DataType, Field, Fields, Schema as ArrowSchema, SchemaRef as ArrowSchemaRef,
};
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use iceberg::spec::{NullOrder, PartitionSpec, SortDirection, SortOrder, Transform};
use iceberg::transform::{BoxedTransformFunction, create_transform_function};

use super::error::{TableError, plain};

/// One column of values to order by: where it stands in rows with keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OrderColumn {
    pub at: usize,
    pub options: SortOptions,
}

/// How the rows of one write are ordered.
#[derive(Debug)]
pub(super) struct RowOrder {
    /// The table's columns, and behind them the computed ones.
    schema: ArrowSchemaRef,
    computed: Vec<Computed>,
    /// How many of the columns are the table's.
    width: usize,
    partition: Vec<OrderColumn>,
    sort: Vec<OrderColumn>,
    sort_order_id: Option<i32>,
}

/// A value that no column holds as it is.
#[derive(Debug)]
struct Computed {
    path: Vec<usize>,
    /// `None`: the field itself, inside of a struct.
    transform: Option<BoxedTransformFunction>,
}

impl RowOrder {
    /// `arrow`: the shape that rows are written in, with field ids.
    pub fn of(arrow: &ArrowSchemaRef, spec: &PartitionSpec, order: &SortOrder) -> Result<Self, TableError> {
        let mut made = Self {
            schema: Arc::clone(arrow),
            computed: Vec::new(),
            width: arrow.fields().len(),
            partition: Vec::new(),
            sort: Vec::new(),
            sort_order_id: None,
        };
        let mut zeros = false;
        for field in spec.fields() {
            // Always null.
            if field.transform == Transform::Void {
                continue;
            }
            let key = made.key(field.source_id, field.transform).map_err(|text| {
                TableError::Unsupported(format!(
                    "partition field '{}' cannot be computed: {text}",
                    field.name
                ))
            })?;
            zeros |= made.schema.fields().get(key).is_some_and(|field| field.data_type().is_floating());
            made.partition.push(OrderColumn { at: key, options: SortOptions::new(false, true) });
        }
        // Zero and minus zero are one partition and two values: its rows would not be in one order.
        if !order.is_unsorted() && !zeros {
            made.follow(order);
        }
        Ok(made)
    }

    fn follow(&mut self, order: &SortOrder) {
        let Ok(id) = i32::try_from(order.order_id) else { return };
        let mut sort = Vec::with_capacity(order.fields.len());
        for field in &order.fields {
            if field.transform == Transform::Void {
                continue;
            }
            match self.key(field.source_id, field.transform) {
                Ok(at) => {
                    let descending = field.direction == SortDirection::Descending;
                    let nulls_first = field.null_order == NullOrder::First;
                    sort.push(OrderColumn { at, options: SortOptions::new(descending, nulls_first) });
                }
                Err(text) => {
                    tracing::warn!("files are written unsorted, sort order {id} cannot be followed: {text}");
                    return;
                }
            }
        }
        self.sort = sort;
        self.sort_order_id = Some(id);
    }

    /// The place of a value, which is added where no column is it. The error is for people.
    fn key(&mut self, source_id: i32, transform: Transform) -> Result<usize, String> {
        let path = path_to(self.schema.fields(), source_id)
            .ok_or_else(|| format!("there is no column {source_id}"))?;
        let source = field_at(&self.schema, &path).ok_or("its column is no column")?;
        if let ([at], Transform::Identity) = (path.as_slice(), transform) {
            return Ok(*at);
        }
        let (transform, data_type) = match transform {
            Transform::Identity => (None, source.data_type().clone()),
            Transform::Unknown => return Err("its transform is unknown".to_owned()),
            known => {
                let function = create_transform_function(&known).map_err(|e| plain(&e))?;
                let empty = function.transform(new_empty_array(source.data_type())).map_err(|e| plain(&e))?;
                (Some(function), empty.data_type().clone())
            }
        };
        let at = self.schema.fields().len();
        let field = Field::new(format!("\u{1}key{at}"), data_type, true);
        let fields: Vec<_> = self.schema.fields().iter().cloned().chain([Arc::new(field)]).collect();
        self.schema = Arc::new(ArrowSchema::new_with_metadata(fields, self.schema.metadata().clone()));
        self.computed.push(Computed { path, transform });
        Ok(at)
    }

    /// The shape of rows with keys.
    pub fn schema(&self) -> &ArrowSchemaRef {
        &self.schema
    }

    /// Rows of the table, with what they are ordered by.
    pub fn with_keys(&self, rows: RecordBatch) -> Result<RecordBatch, TableError> {
        if self.computed.is_empty() {
            return Ok(rows);
        }
        let mut columns = rows.columns().to_vec();
        for computed in &self.computed {
            let value = value_at(&rows, &computed.path)
                .ok_or_else(|| TableError::Internal("rows without a column to order by".to_owned()))?;
            columns.push(match &computed.transform {
                Some(transform) => transform.transform(value).map_err(|e| TableError::Rows(plain(&e)))?,
                None => value,
            });
        }
        RecordBatch::try_new(Arc::clone(&self.schema), columns)
            .map_err(|e| TableError::Internal(e.to_string()))
    }

    /// The table's columns of rows with keys.
    pub fn without_keys(&self, rows: &RecordBatch) -> Result<RecordBatch, TableError> {
        let own: Vec<usize> = (0..self.width).collect();
        rows.project(&own).map_err(|e| TableError::Internal(e.to_string()))
    }

    /// Equal in rows of one partition; none without partitions.
    pub fn partition(&self) -> &[OrderColumn] {
        &self.partition
    }

    /// All that rows are ordered by: partition first, then what the table asks for.
    pub fn columns(&self) -> Vec<OrderColumn> {
        self.partition.iter().chain(&self.sort).copied().collect()
    }

    /// The order that files have when their rows are sorted by [`Self::columns`].
    pub fn sort_order_id(&self) -> Option<i32> {
        self.sort_order_id
    }
}

/// Places from the top to the field with this id, through structs.
fn path_to(fields: &Fields, id: i32) -> Option<Vec<usize>> {
    for (at, field) in fields.iter().enumerate() {
        let own = field.metadata().get(PARQUET_FIELD_ID_META_KEY).and_then(|id| id.parse::<i32>().ok());
        if own == Some(id) {
            return Some(vec![at]);
        }
        if let DataType::Struct(inner) = field.data_type()
            && let Some(below) = path_to(inner, id)
        {
            return Some(std::iter::once(at).chain(below).collect());
        }
    }
    None
}

fn field_at(schema: &ArrowSchemaRef, path: &[usize]) -> Option<Arc<Field>> {
    let (first, rest) = path.split_first()?;
    let mut field = schema.fields().get(*first)?.clone();
    for at in rest {
        let DataType::Struct(inner) = field.data_type() else { return None };
        field = inner.get(*at)?.clone();
    }
    Some(field)
}

/// The values of a field; null where a struct around it is.
fn value_at(rows: &RecordBatch, path: &[usize]) -> Option<ArrayRef> {
    let (first, rest) = path.split_first()?;
    let mut array = Arc::clone(rows.columns().get(*first)?);
    for at in rest {
        let around = array.as_struct_opt()?;
        let inner = around.columns().get(*at)?;
        let nulls = datafusion::arrow::buffer::NullBuffer::union(around.nulls(), inner.nulls());
        let data = inner.to_data().into_builder().nulls(nulls).build().ok()?;
        array = datafusion::arrow::array::make_array(data);
    }
    Some(array)
}
