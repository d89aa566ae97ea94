//! The fields of a file with their ids: its own, or those that the table's name mapping gives to a file without
//! any (table spec, "Column Projection", rule 2; Java: `AvroSchemaUtil.hasIds`, `ORCSchemaUtil.hasIds`).

use iceberg::spec::{MappedField, NameMapping};

use super::super::nested_adapt::FileField;

/// Name of a list's element in a mapping, whatever it is called in the file.
pub(super) const ELEMENT: &str = "element";
/// Names of a map's key and value there.
pub(super) const KEY: &str = "key";
pub(super) const VALUE: &str = "value";

/// A field as the file has it.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) struct NamedField {
    pub name: String,
    pub id: Option<i32>,
    /// Of a struct its fields, of a list its element, of a map its key and its value.
    pub children: Vec<NamedField>,
    /// Has it children by name, as a struct has?
    pub is_struct: bool,
}

impl NamedField {
    pub(in crate::table) fn has_ids(&self) -> bool {
        self.id.is_some() || self.children.iter().any(Self::has_ids)
    }

    fn own(&self) -> FileField {
        FileField { id: self.id, children: self.children.iter().map(Self::own).collect() }
    }

    fn mapped(&self, mapped: Option<&MappedField>) -> FileField {
        let inner = mapped.map(MappedField::fields).unwrap_or_default();
        let children = self
            .children
            .iter()
            .map(|child| {
                let found = inner.iter().find(|m| m.names().contains(&child.name));
                child.mapped(found.map(AsRef::as_ref))
            })
            .collect();
        FileField { id: mapped.and_then(MappedField::field_id), children }
    }
}

/// `None`: the file has no ids, and there is no mapping.
pub(super) fn with_ids(fields: &[NamedField], mapping: Option<&NameMapping>) -> Option<Vec<FileField>> {
    if fields.iter().any(NamedField::has_ids) {
        return Some(fields.iter().map(NamedField::own).collect());
    }
    let mapped = mapping?.fields();
    let of = |field: &NamedField| field.mapped(mapped.iter().find(|m| m.names().contains(&field.name)));
    Some(fields.iter().map(of).collect())
}

/// From the top down to the field with `id`, through structs only.
pub(in crate::table) fn route_to(fields: &[NamedField], id: i32) -> Option<Vec<usize>> {
    for (at, field) in fields.iter().enumerate() {
        if field.id == Some(id) {
            return Some(vec![at]);
        }
        if field.is_struct
            && let Some(rest) = route_to(&field.children, id)
        {
            return Some([vec![at], rest].concat());
        }
    }
    None
}
