//! The columns that equality deletes compare, in the schema that rows are read in.
//!
//! A delete file names field ids. A column that was dropped meanwhile is still what decides: it is read under
//! the newest schema that had it, beside the columns of today, under a name that no column has.

use std::sync::Arc;

use datafusion::arrow::datatypes::SchemaRef as ArrowSchemaRef;
use iceberg::arrow::schema_to_arrow_schema;
use iceberg::spec::{NestedField, NestedFieldRef, Schema, SchemaRef, TableMetadata, Type};

use super::super::error::TableError;
use super::file_columns::route_to_id;
use super::index::FileDeletes;
use super::selection::Selection;

/// A schema to read with, and which of its top-level columns are compared.
pub(in super::super) struct KeySchema {
    pub schema: SchemaRef,
    pub arrow_schema: ArrowSchemaRef,
    /// Positions of top-level columns, ascending.
    pub columns: Vec<usize>,
}

impl KeySchema {
    /// For the rows of one data file. `schema` is what rows are read in, all columns optional.
    pub fn of(
        rows: &Selection,
        schema: &SchemaRef,
        arrow_schema: &ArrowSchemaRef,
        metadata: &TableMetadata,
    ) -> Result<Self, TableError> {
        let mut ids: Vec<i32> = ids_of(&rows.without).collect();
        ids.extend(rows.within.iter().flat_map(ids_of));
        ids.sort_unstable();
        ids.dedup();
        let mut found =
            Self { schema: Arc::clone(schema), arrow_schema: Arc::clone(arrow_schema), columns: Vec::new() };
        let unknown = ids.iter().filter(|id| route_to_id(arrow_schema.fields(), **id).is_none());
        let mut dropped: Vec<NestedFieldRef> = Vec::new();
        for id in unknown {
            let field = dropped_column(*id, schema, metadata)?;
            if dropped.iter().all(|other| other.id != field.id) {
                dropped.push(field);
            }
        }
        if !dropped.is_empty() {
            let unreadable = |e: iceberg::Error| {
                TableError::Unsupported(format!("a dropped column that deletes compare cannot be read: {e}"))
            };
            let fields = schema.as_struct().fields().iter().cloned().chain(dropped);
            let extended = Schema::builder()
                .with_schema_id(schema.schema_id())
                .with_fields(fields)
                .build()
                .map_err(unreadable)?;
            found.arrow_schema = Arc::new(schema_to_arrow_schema(&extended).map_err(unreadable)?);
            found.schema = Arc::new(extended);
        }
        for id in ids {
            let route = route_to_id(found.arrow_schema.fields(), id);
            match route.as_deref() {
                Some([column, ..]) if found.columns.contains(column) => {}
                Some([column, ..]) => found.columns.push(*column),
                _ => return Err(nowhere(id)),
            }
        }
        found.columns.sort_unstable();
        Ok(found)
    }
}

fn ids_of(deletes: &FileDeletes) -> impl Iterator<Item = i32> + '_ {
    deletes.equality.iter().flat_map(|group| group.ids.iter().copied())
}

/// The top-level column that `id` was in, optional and renamed, as the newest schema had it.
fn dropped_column(
    id: i32,
    current: &SchemaRef,
    metadata: &TableMetadata,
) -> Result<NestedFieldRef, TableError> {
    let mut schemas: Vec<&SchemaRef> = metadata.schemas_iter().collect();
    schemas.sort_by_key(|schema| std::cmp::Reverse(schema.schema_id()));
    for schema in schemas {
        let Some(column) = schema.as_struct().fields().iter().find(|field| holds(field, id)) else {
            continue;
        };
        if current.as_struct().field_by_id(column.id).is_some() {
            return Err(TableError::Unsupported(format!(
                "equality deletes compare a field with id {id} that was dropped from inside column '{}'; \
                 compact what they delete from",
                column.name
            )));
        }
        let mut column: NestedField = column.as_ref().clone();
        column.required = false;
        column.name = format!("mergeberg_dropped_{}", column.id);
        return Ok(Arc::new(column));
    }
    Err(nowhere(id))
}

fn nowhere(id: i32) -> TableError {
    TableError::Unsupported(format!(
        "equality deletes compare the field with id {id}, which no schema of the table has as a single value"
    ))
}

/// Is it the field itself, or one inside its structs?
fn holds(field: &NestedField, id: i32) -> bool {
    field.id == id
        || match field.field_type.as_ref() {
            Type::Struct(inner) => inner.fields().iter().any(|child| holds(child, id)),
            Type::Primitive(_) | Type::List(_) | Type::Map(_) => false,
        }
}
