//! Schema, partition spec and sort order as facts, and whether data written under one structure can be
//! read as another. Comparison is by field id, never by name (table spec, "Schema Evolution").

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::facts::TableFacts;
use crate::ids::{SchemaId, SortOrderId, SpecId};

/// One field of a schema. Nested fields (struct members, list elements, map keys and values) are listed
/// beside the top-level ones with their dotted path as name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldFact {
    pub id: i32,
    /// Dotted path (`address.city`, `tags.element`).
    pub name: String,
    pub required: bool,
    /// Type as the table spec writes it (`long`, `decimal(12, 2)`, `struct`, `list`, `map`).
    pub type_name: String,
    /// Has an `initial-default` (format v3).
    pub has_initial_default: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchemaFact {
    pub id: SchemaId,
    pub fields: Vec<FieldFact>,
    pub identifier_field_ids: Vec<i32>,
}

impl SchemaFact {
    pub fn field(&self, id: i32) -> Option<&FieldFact> {
        self.fields.iter().find(|f| f.id == id)
    }

    pub fn field_by_name(&self, name: &str) -> Option<&FieldFact> {
        self.fields.iter().find(|f| f.name == name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecFieldFact {
    pub source_id: i32,
    pub field_id: i32,
    pub name: String,
    pub transform: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecFact {
    pub id: SpecId,
    pub fields: Vec<SpecFieldFact>,
}

/// Sort order: `fields` are the spec's JSON objects as text, compared as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SortOrderFact {
    pub id: SortOrderId,
    pub fields: Vec<String>,
}

/// What a table's structure is at one moment. An accepted structure is one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StructureId {
    pub schema_id: SchemaId,
    pub spec_id: SpecId,
    pub sort_order_id: SortOrderId,
}

/// One difference between two structures, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StructureChange {
    pub kind: StructureChangeKind,
    /// Field ids concerned.
    pub field_ids: Vec<i32>,
    /// One sentence: `column 7 'dep_delay': int -> long`.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StructureChangeKind {
    ColumnAdded,
    ColumnDropped,
    ColumnRenamed,
    TypePromoted,
    /// A type change that the spec does not allow as a promotion.
    TypeNarrowed,
    MadeOptional,
    MadeRequired,
    /// Two columns whose names differ only by letter case.
    CaseTwin,
    /// A name that one side gave up and another id took.
    NameClash,
    /// A dropped column that a partition spec with live files still uses: engines cannot read the table any more
    /// (case O20).
    DroppedColumnOfSpec,
    SpecChanged,
    SortOrderChanged,
    IdentifierChanged,
}

impl StructureChangeKind {
    /// A change that can never be approved (design, section 8).
    pub fn is_unsafe(self) -> bool {
        matches!(self, Self::TypeNarrowed | Self::DroppedColumnOfSpec)
    }
}

/// Schemas of one table by id, for look-ups in evidence and reviews.
pub type Schemas = BTreeMap<SchemaId, SchemaFact>;

/// Differences from `old` to `new`, by field id, in field order. Empty when they mean the same.
pub fn compare_schemas(old: &SchemaFact, new: &SchemaFact) -> Vec<StructureChange> {
    let mut changes = Vec::new();
    for field in &new.fields {
        let Some(before) = old.field(field.id) else {
            changes.push(StructureChange {
                kind: StructureChangeKind::ColumnAdded,
                field_ids: vec![field.id],
                text: format!("column {} '{}' added: {}", field.id, field.name, describe(field)),
            });
            changes.extend(name_clash(old, new, field));
            continue;
        };
        if before.name != field.name {
            changes.push(StructureChange {
                kind: StructureChangeKind::ColumnRenamed,
                field_ids: vec![field.id],
                text: format!("column {} renamed: '{}' -> '{}'", field.id, before.name, field.name),
            });
            changes.extend(name_clash(old, new, field));
        }
        if before.type_name != field.type_name {
            let kind = if is_promotion(&before.type_name, &field.type_name) {
                StructureChangeKind::TypePromoted
            } else {
                StructureChangeKind::TypeNarrowed
            };
            changes.push(StructureChange {
                kind,
                field_ids: vec![field.id],
                text: format!(
                    "column {} '{}': {} -> {}",
                    field.id, field.name, before.type_name, field.type_name
                ),
            });
        }
        if before.required != field.required {
            let (kind, word) = if field.required {
                (StructureChangeKind::MadeRequired, "required")
            } else {
                (StructureChangeKind::MadeOptional, "optional")
            };
            changes.push(StructureChange {
                kind,
                field_ids: vec![field.id],
                text: format!("column {} '{}' is now {word}", field.id, field.name),
            });
        }
    }
    for field in &old.fields {
        if new.field(field.id).is_none() {
            changes.push(StructureChange {
                kind: StructureChangeKind::ColumnDropped,
                field_ids: vec![field.id],
                text: format!("column {} '{}' dropped", field.id, field.name),
            });
        }
    }
    let known = case_twins(old);
    for (one, two) in case_twins(new) {
        // A pair that was there before is no change.
        if known.iter().any(|(a, b)| (a.id, b.id) == (one.id, two.id)) {
            continue;
        }
        changes.push(StructureChange {
            kind: StructureChangeKind::CaseTwin,
            field_ids: vec![one.id, two.id],
            text: format!(
                "columns {} '{}' and {} '{}' differ only by letter case",
                one.id, one.name, two.id, two.name
            ),
        });
    }
    let sorted = |ids: &[i32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    if sorted(&old.identifier_field_ids) != sorted(&new.identifier_field_ids) {
        changes.push(StructureChange {
            kind: StructureChangeKind::IdentifierChanged,
            field_ids: sorted(&new.identifier_field_ids),
            text: format!(
                "identifier columns: {:?} -> {:?}",
                sorted(&old.identifier_field_ids),
                sorted(&new.identifier_field_ids)
            ),
        });
    }
    changes
}

/// Differences between two structures of one table: schema by field id, then spec and sort order.
pub fn structure_changes(facts: &TableFacts, old: StructureId, new: StructureId) -> Vec<StructureChange> {
    let mut changes = match (facts.schemas.get(&old.schema_id), facts.schemas.get(&new.schema_id)) {
        (Some(before), Some(after)) => compare_schemas(before, after),
        _ => Vec::new(),
    };
    if old.spec_id != new.spec_id {
        changes.push(StructureChange {
            kind: StructureChangeKind::SpecChanged,
            field_ids: facts
                .specs
                .get(&new.spec_id)
                .map(|spec| spec.fields.iter().map(|f| f.source_id).collect())
                .unwrap_or_default(),
            text: format!(
                "partition spec: {} -> {}",
                describe_spec(facts, old.spec_id),
                describe_spec(facts, new.spec_id)
            ),
        });
    }
    if old.sort_order_id != new.sort_order_id {
        changes.push(StructureChange {
            kind: StructureChangeKind::SortOrderChanged,
            field_ids: Vec::new(),
            text: format!("sort order: {} -> {}", old.sort_order_id, new.sort_order_id),
        });
    }
    changes
}

/// Columns that `new` does not have any more and that a partition spec uses, by spec. Whether files are live under
/// the spec, the caller knows.
pub fn dropped_columns_of_specs(
    facts: &TableFacts,
    old: StructureId,
    new: StructureId,
) -> Vec<(SpecId, StructureChange)> {
    let (Some(before), Some(after)) = (facts.schemas.get(&old.schema_id), facts.schemas.get(&new.schema_id))
    else {
        return Vec::new();
    };
    let mut changes = Vec::new();
    for spec in facts.specs.values() {
        for field in spec.fields.iter().filter(|field| field.transform != "void") {
            let Some(column) = before.field(field.source_id).filter(|c| after.field(c.id).is_none()) else {
                continue;
            };
            let (id, name) = (column.id, &column.name);
            changes.push((
                spec.id,
                StructureChange {
                    kind: StructureChangeKind::DroppedColumnOfSpec,
                    field_ids: vec![id],
                    text: format!("column {id} '{name}' dropped, which partition spec {} uses", spec.id),
                },
            ));
        }
    }
    changes
}

fn describe_spec(facts: &TableFacts, id: SpecId) -> String {
    let fields: Vec<String> = match facts.specs.get(&id) {
        Some(spec) => spec.fields.iter().map(|f| format!("{}({})", f.transform, f.name)).collect(),
        None => Vec::new(),
    };
    format!("{id} [{}]", fields.join(", "))
}

/// The name of `field` meant another column before, which has gone or taken another name since. Engines
/// that fold names read one for the other, so letter case does not tell them apart (case O19).
fn name_clash(old: &SchemaFact, new: &SchemaFact, field: &FieldFact) -> Option<StructureChange> {
    let name = field.name.to_lowercase();
    let taken = old.fields.iter().find(|f| f.id != field.id && f.name.to_lowercase() == name)?;
    if new.field(taken.id).is_some_and(|f| f.name.to_lowercase() == name) {
        return None;
    }
    Some(StructureChange {
        kind: StructureChangeKind::NameClash,
        field_ids: vec![taken.id, field.id],
        text: format!("name '{}' meant column {} and now means column {}", field.name, taken.id, field.id),
    })
}

/// Pairs of columns whose names differ only by letter case, the smaller field id first.
fn case_twins(schema: &SchemaFact) -> Vec<(&FieldFact, &FieldFact)> {
    let mut by_name: BTreeMap<String, Vec<&FieldFact>> = BTreeMap::new();
    for field in &schema.fields {
        by_name.entry(field.name.to_lowercase()).or_default().push(field);
    }
    let mut twins = Vec::new();
    for mut fields in by_name.into_values() {
        fields.sort_by_key(|f| f.id);
        for (at, one) in fields.iter().enumerate() {
            twins.extend(fields[at + 1..].iter().filter(|two| two.name != one.name).map(|two| (*one, *two)));
        }
    }
    twins.sort_by_key(|(one, two)| (one.id, two.id));
    twins
}

/// Why rows written under `written` cannot be read as `current`; empty when they can. Rows are read by
/// field id: missing columns become null or their default, promoted types are widened.
pub fn unreadable_as(written: &SchemaFact, current: &SchemaFact) -> Vec<StructureChange> {
    compare_schemas(written, current)
        .into_iter()
        .filter(|change| match change.kind {
            StructureChangeKind::TypeNarrowed | StructureChangeKind::NameClash => true,
            StructureChangeKind::MadeRequired => true,
            StructureChangeKind::ColumnAdded => change
                .field_ids
                .iter()
                .any(|id| current.field(*id).is_some_and(|f| f.required && !f.has_initial_default)),
            _ => false,
        })
        .collect()
}

/// Type promotions of format v2 (table spec, "Schema Evolution"). Those that came with v3, such as date to
/// timestamp, are none here: our reader gives nulls for them.
pub fn is_promotion(from: &str, to: &str) -> bool {
    match (from, to) {
        ("int", "long") | ("float", "double") => true,
        _ => match (decimal(from), decimal(to)) {
            (Some((p1, s1)), Some((p2, s2))) => s1 == s2 && p2 >= p1,
            _ => false,
        },
    }
}

fn decimal(text: &str) -> Option<(u32, u32)> {
    let inner = text.strip_prefix("decimal(")?.strip_suffix(')')?;
    let (precision, scale) = inner.split_once(',')?;
    Some((precision.trim().parse().ok()?, scale.trim().parse().ok()?))
}

fn describe(field: &FieldFact) -> String {
    format!("{} {}", if field.required { "required" } else { "optional" }, field.type_name)
}
