//! Values of identity-partitioned columns that a file itself may lack, as files that were added from Hive do
//! (table spec, "Column Projection", rule 1).

use std::collections::HashMap;
use std::sync::Arc;

use iceberg::spec::{
    Literal, NestedField, PartitionSpec, PartitionSpecRef, PrimitiveLiteral, PrimitiveType, Schema, Struct,
    Transform, Type,
};
use mergeberg_kernel::ids::{SchemaId, SpecId};

use super::column_adapter::WantedColumn;
use super::error::TableError;
use super::manifests::LiveFile;

/// The partition of one file.
pub(super) struct PartitionConstants<'a> {
    file: &'a LiveFile,
    spec: &'a Arc<PartitionSpec>,
}

impl<'a> PartitionConstants<'a> {
    pub fn of(file: &'a LiveFile, specs: &'a HashMap<SpecId, PartitionSpecRef>) -> Result<Self, TableError> {
        let Some(spec) = specs.get(&file.spec_id) else {
            return Err(TableError::Unsupported(format!(
                "{} was written under partition spec {}, which the table does not have",
                file.fact.path, file.spec_id
            )));
        };
        Ok(Self { file, spec })
    }

    /// Spec and tuple, when one of these columns may be missing from the file.
    pub fn for_columns(
        &self,
        wanted: &[i32],
        schema: &Schema,
        schema_id: SchemaId,
    ) -> Result<Option<(Arc<PartitionSpec>, Struct)>, TableError> {
        let counted = self.file.file.value_counts();
        let needed = self.spec.fields().iter().any(|field| {
            field.transform == Transform::Identity
                && wanted.contains(&field.source_id)
                && !counted.contains_key(&field.source_id)
        });
        if !needed {
            return Ok(None);
        }
        let tuple = self.file.file.partition();
        let mut promoted = Vec::with_capacity(self.spec.fields().len());
        for (field, value) in self.spec.fields().iter().zip(tuple.iter()) {
            let source = schema.field_by_id(field.source_id);
            if field.transform == Transform::Identity && source.is_none() {
                return Err(TableError::Unsupported(format!(
                    "{} needs column {} of its partition spec, which schema {schema_id} does not have",
                    self.file.fact.path, field.source_id
                )));
            }
            promoted.push(value.map(|value| promote(value, source.map(|f| f.field_type.as_ref()))));
        }
        Ok(Some((Arc::clone(self.spec), promoted.into_iter().collect())))
    }

    /// Gives the columns that the file may lack their values from the tuple, in place of initial defaults.
    pub fn put_into(
        &self,
        columns: &mut [WantedColumn],
        schema: &Schema,
        schema_id: SchemaId,
    ) -> Result<(), TableError> {
        // Manifest entries of Avro files count no values: whether a file has a column is seen when it is read.
        let ids: Vec<i32> = columns.iter().map(|column| column.field.id).collect();
        let Some((spec, tuple)) = self.for_columns(&ids, schema, schema_id)? else { return Ok(()) };
        for (field, value) in spec.fields().iter().zip(tuple.iter()) {
            let column = columns.iter_mut().find(|column| column.field.id == field.source_id);
            if let (Transform::Identity, Some(column)) = (field.transform, column) {
                let mut with_value: NestedField = column.field.as_ref().clone();
                with_value.initial_default = value.cloned();
                column.field = Arc::new(with_value);
            }
        }
        Ok(())
    }
}

/// A partition value as its column's present type: tuples keep the type that the column had when the file
/// was written.
fn promote(value: &Literal, to: Option<&Type>) -> Literal {
    match (value, to) {
        (Literal::Primitive(PrimitiveLiteral::Int(v)), Some(Type::Primitive(PrimitiveType::Long))) => {
            Literal::long(i64::from(*v))
        }
        (Literal::Primitive(PrimitiveLiteral::Float(v)), Some(Type::Primitive(PrimitiveType::Double))) => {
            Literal::double(f64::from(v.0))
        }
        _ => value.clone(),
    }
}
