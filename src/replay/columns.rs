//! The target's columns under the names that the operation knows them by.
//!
//! An operation speaks of the columns that the table had when it ran. By field id they are those of today: one
//! that was renamed since keeps its old name here, one that was added since is not seen and keeps its value, one
//! that was dropped is unknown.

use std::collections::HashMap;

use datafusion::arrow::datatypes::{DataType, Schema};
use datafusion::common::Column as NamedColumn;
use datafusion::logical_expr::{Expr, cast, lit};
use datafusion::parquet::arrow::PARQUET_FIELD_ID_META_KEY;
use datafusion::scalar::ScalarValue;
use mergeberg_kernel::record::{Condition, Names};

use super::error::ReplayError;

/// A column of the target.
#[derive(Clone, Debug)]
pub struct TargetColumn {
    /// Its name in the table today.
    pub name: String,
    /// Its name in the operation; `None`: the operation does not know it.
    pub spoken: Option<String>,
    pub data_type: DataType,
    /// What a new row has where nothing is said: the column's write default, else null.
    pub default: ScalarValue,
}

impl TargetColumn {
    pub fn default_value(&self) -> Expr {
        cast(lit(self.default.clone()), self.data_type.clone())
    }
}

/// All columns of the target, in today's order.
#[derive(Clone, Debug)]
pub struct TargetColumns {
    pub all: Vec<TargetColumn>,
    /// Those that the operation knows, in the order of its time.
    pub known: Vec<usize>,
    names: Names,
}

impl TargetColumns {
    pub fn new(
        today: &Schema,
        defaults: Vec<ScalarValue>,
        then: &Schema,
        names: Names,
    ) -> Result<Self, ReplayError> {
        let mut all: Vec<TargetColumn> = today
            .fields()
            .iter()
            .zip(defaults)
            .map(|(field, default)| TargetColumn {
                name: field.name().clone(),
                spoken: None,
                data_type: field.data_type().clone(),
                default,
            })
            .collect();
        let by_id: HashMap<&str, usize> =
            today.fields().iter().enumerate().filter_map(|(at, field)| Some((id_of(field)?, at))).collect();
        let mut known = Vec::new();
        for field in then.fields() {
            let Some(at) = id_of(field).and_then(|id| by_id.get(id)).copied() else { continue };
            let spoken = folded(field.name(), names);
            if all.iter().any(|other| other.spoken.as_deref() == Some(&spoken)) {
                return Err(ReplayError::failed(format!(
                    "columns named '{spoken}' differ in upper and lower case only; record the operation in \
                     its typed form, which tells them apart"
                )));
            }
            if let Some(column) = all.get_mut(at) {
                column.spoken = Some(spoken);
                known.push(at);
            }
        }
        Ok(Self { all, known, names })
    }

    /// The column that the operation calls so.
    pub fn position(&self, spoken: &str) -> Result<usize, ReplayError> {
        let wanted = folded(spoken, self.names);
        self.all.iter().position(|column| column.spoken.as_deref() == Some(&wanted)).ok_or_else(|| {
            ReplayError::failed(format!("the table has no column '{spoken}', or not any more"))
        })
    }
}

fn id_of(field: &datafusion::arrow::datatypes::FieldRef) -> Option<&str> {
    field.metadata().get(PARQUET_FIELD_ID_META_KEY).map(String::as_str)
}

/// `DEFAULT` in the place of a value.
pub fn is_default(value: &Condition) -> bool {
    *value == Condition::default_value()
}

/// As names are compared.
pub fn folded(name: &str, names: Names) -> String {
    match names {
        Names::Exact => name.to_owned(),
        Names::AnyCase => name.to_lowercase(),
    }
}

/// Name of the target's column at this place in a plan, whatever the operation calls it. No column of a table
/// has such a name.
pub fn hidden(at: usize) -> String {
    format!("\u{1}c{at}")
}

/// The column of exactly this name.
pub fn column(name: &str) -> Expr {
    Expr::Column(NamedColumn::new_unqualified(name))
}

/// The column of this name in the relation.
pub fn column_of(relation: &str, name: &str) -> Expr {
    let relation = datafusion::sql::TableReference::bare(relation.to_owned());
    Expr::Column(NamedColumn::new(Some(relation), name))
}
