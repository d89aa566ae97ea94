//! Brings batches of any producer into the exact shape of a table schema: columns by name, in the
//! schema's order, with its types and field ids.
//!
//! Only changes of type that keep every value are made here. Whatever would round, cut or reinterpret is
//! refused with the column's name: the query has to say it by a cast.

use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, new_null_array};
use datafusion::arrow::compute::{CastOptions, cast_with_options};
use datafusion::arrow::datatypes::{DataType, Field, SchemaRef as ArrowSchemaRef};
use iceberg::arrow::schema_to_arrow_schema;
use iceberg::spec::Schema;

use super::error::TableError;

/// A failed conversion is an error, never a null.
const STRICT: CastOptions<'static> =
    CastOptions { safe: false, format_options: datafusion::arrow::util::display::FormatOptions::new() };

/// The shape that rows of one schema are written in.
#[derive(Clone)]
pub(super) struct RowShape {
    target: ArrowSchemaRef,
}

impl RowShape {
    pub(super) fn of(schema: &Schema) -> Result<Self, TableError> {
        let target =
            schema_to_arrow_schema(schema).map_err(|e| TableError::Unsupported(super::error::plain(&e)))?;
        Ok(Self { target: Arc::new(target) })
    }

    /// The batch in this shape. A column that the batch lacks is null, if the schema allows that.
    pub(super) fn conform(&self, batch: &RecordBatch) -> Result<RecordBatch, TableError> {
        let given = batch.schema();
        for (at, field) in given.fields().iter().enumerate() {
            if self.target.field_with_name(field.name()).is_err() {
                return Err(TableError::Rows(format!("the table has no column '{}'", field.name())));
            }
            if given.fields().iter().skip(at + 1).any(|other| other.name() == field.name()) {
                return Err(TableError::Rows(format!("column '{}' is there more than once", field.name())));
            }
        }
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(self.target.fields().len());
        for field in self.target.fields() {
            let column = match batch.column_by_name(field.name()) {
                Some(column) => convert(column, field)?,
                None if field.is_nullable() => new_null_array(field.data_type(), batch.num_rows()),
                None => {
                    return Err(TableError::Rows(format!(
                        "the required column '{}' is missing",
                        field.name()
                    )));
                }
            };
            if !field.is_nullable() && column.logical_null_count() > 0 {
                return Err(TableError::Rows(format!("the required column '{}' is null", field.name())));
            }
            columns.push(column);
        }
        RecordBatch::try_new(self.target.clone(), columns).map_err(|e| TableError::Rows(e.to_string()))
    }
}

fn convert(column: &ArrayRef, field: &Field) -> Result<ArrayRef, TableError> {
    if column.data_type() == field.data_type() {
        return Ok(column.clone());
    }
    if !keeps_values(column.data_type(), field.data_type()) {
        return Err(TableError::Rows(format!(
            "column '{}' is {} and the table's is {}; cast it",
            field.name(),
            column.data_type(),
            field.data_type()
        )));
    }
    cast_with_options(column, field.data_type(), &STRICT)
        .map_err(|e| TableError::Rows(format!("column '{}': {e}", field.name())))
}

/// Can every value of `from` that fits be given as `to` unchanged? Values that do not fit are an error of
/// the cast.
fn keeps_values(from: &DataType, to: &DataType) -> bool {
    use DataType::{
        Binary, BinaryView, Date32, Decimal128, Dictionary, FixedSizeBinary, Float32, Float64, LargeBinary,
        LargeList, LargeUtf8, List, Map, Null, Struct, Time64, Timestamp, Utf8, Utf8View,
    };
    let is_text = |t: &DataType| matches!(t, Utf8 | LargeUtf8 | Utf8View);
    let is_bytes = |t: &DataType| matches!(t, Binary | LargeBinary | BinaryView);
    match (from, to) {
        (from, to) if from == to => true,
        (Null, _) => true,
        (Dictionary(_, values), to) => keeps_values(values, to),
        (from, to) if is_text(from) && is_text(to) => true,
        (from, to) if is_bytes(from) && is_bytes(to) => true,
        (FixedSizeBinary(_), to) => is_bytes(to),
        (from, to) if from.is_integer() && (to.is_integer() || matches!(to, Decimal128(..))) => true,
        // SQL literals are 64-bit integers; those beyond 2^53 in a double column are rounded, as everywhere.
        (from, Float64) if from.is_integer() => true,
        (Float32, Float64) => true,
        (Decimal128(_, from), Decimal128(_, to)) => to >= from,
        (Timestamp(_, from), Timestamp(_, to)) => from.is_some() == to.is_some(),
        (Time64(_), Time64(_)) | (DataType::Time32(_), Time64(_)) => true,
        (DataType::Date64, Date32) => true,
        (List(from) | LargeList(from), List(to) | LargeList(to)) => {
            keeps_values(from.data_type(), to.data_type())
        }
        (Struct(from), Struct(to)) => {
            from.len() == to.len()
                && from.iter().zip(to).all(|(from, to)| {
                    from.name() == to.name() && keeps_values(from.data_type(), to.data_type())
                })
        }
        (Map(from, _), Map(to, _)) => match (from.data_type(), to.data_type()) {
            (Struct(from), Struct(to)) => {
                from.len() == to.len()
                    && from.iter().zip(to).all(|(f, t)| keeps_values(f.data_type(), t.data_type()))
            }
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use datafusion::arrow::array::{
        Array, Float64Array, Int32Array, Int64Array, StringArray, StringViewArray,
    };
    use datafusion::arrow::datatypes::Schema as ArrowSchema;
    use iceberg::spec::{NestedField, PrimitiveType, Type};

    use super::*;

    fn shape() -> RowShape {
        let schema = Schema::builder()
            .with_fields(vec![
                NestedField::required(1, "id", Type::Primitive(PrimitiveType::Int)).into(),
                NestedField::optional(2, "name", Type::Primitive(PrimitiveType::String)).into(),
                NestedField::optional(3, "rate", Type::Primitive(PrimitiveType::Float)).into(),
            ])
            .build()
            .unwrap();
        RowShape::of(&schema).unwrap()
    }

    fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
        let fields: Vec<Field> =
            columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
        let arrays = columns.into_iter().map(|(_, array)| array).collect();
        RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), arrays).unwrap()
    }

    #[test]
    fn columns_are_matched_by_name_and_widths_are_adapted() {
        let given = batch(vec![
            ("name", Arc::new(StringViewArray::from(vec!["a", "b"]))),
            ("id", Arc::new(Int64Array::from(vec![1, 2]))),
        ]);
        let rows = shape().conform(&given).unwrap();
        let names: Vec<_> = rows.schema().fields().iter().map(|f| f.name().clone()).collect();
        assert_eq!(names, ["id", "name", "rate"]);
        let ids: &Int32Array = rows.column(0).as_any().downcast_ref().unwrap();
        let texts: &StringArray = rows.column(1).as_any().downcast_ref().unwrap();
        assert_eq!((ids.value(1), texts.value(1), rows.column(2).null_count()), (2, "b", 2));
    }

    fn message(columns: Vec<(&str, ArrayRef)>) -> String {
        shape().conform(&batch(columns)).unwrap_err().to_string()
    }

    #[test]
    fn what_would_change_or_lose_values_is_refused_by_name() {
        let ids = || -> (&str, ArrayRef) { ("id", Arc::new(Int64Array::from(vec![1]))) };
        let rate: ArrayRef = Arc::new(Float64Array::from(vec![0.1]));
        assert!(message(vec![ids(), ("rate", rate)]).contains("column 'rate' is Float64"));
        let unknown: ArrayRef = Arc::new(Int64Array::from(vec![1]));
        assert!(message(vec![ids(), ("nope", unknown)]).contains("no column 'nope'"));
        let large: ArrayRef = Arc::new(Int64Array::from(vec![i64::MAX]));
        assert!(message(vec![("id", large)]).contains("column 'id'"));
        let null: ArrayRef = Arc::new(Int64Array::from(vec![None]));
        assert!(message(vec![("id", null)]).contains("required column 'id' is null"));
        assert!(message(vec![("name", Arc::new(StringArray::from(vec!["x"])))]).contains("'id' is missing"));
        assert!(message(vec![ids(), ids()]).contains("more than once"));
    }
}
