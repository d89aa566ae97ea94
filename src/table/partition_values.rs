//! Partition tuples of manifests as the kernel's `Partition`, and which files lie in a scope.
//!
//! Values travel as text in Iceberg's JSON single-value form. That form has no NaN and no infinity, so
//! these get words of their own: a NaN partition must never look like the null partition.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use iceberg::spec::{
    Datum, FieldSummary, Literal, ManifestFile, PartitionSpec, PrimitiveLiteral, PrimitiveType, Struct,
    StructType, Transform, Type,
};
use mergeberg_kernel::ids::SpecId;
use mergeberg_kernel::partition::{Partition, PartitionField};

use super::manifests::FileScope;

/// Turns tuples of one manifest into partitions, each once.
pub(super) struct PartitionInterner<'a> {
    spec: &'a PartitionSpec,
    types: &'a StructType,
    by_tuple: HashMap<Struct, Arc<Partition>>,
}

impl<'a> PartitionInterner<'a> {
    /// `types` is the partition type that the tuples were read with: of the manifest's own schema.
    pub(super) fn new(spec: &'a PartitionSpec, types: &'a StructType) -> Self {
        Self { spec, types, by_tuple: HashMap::new() }
    }

    pub(super) fn intern(&mut self, tuple: &Struct) -> Result<Arc<Partition>, String> {
        // The crate takes 0.0 and -0.0 for equal, and they are two partitions (Java: `Comparators`).
        if tuple.iter().flatten().any(is_float_zero) {
            return Ok(Arc::new(partition_of(self.spec, self.types, tuple)?));
        }
        if let Some(partition) = self.by_tuple.get(tuple) {
            return Ok(partition.clone());
        }
        let partition = Arc::new(partition_of(self.spec, self.types, tuple)?);
        self.by_tuple.insert(tuple.clone(), partition.clone());
        Ok(partition)
    }
}

fn is_float_zero(literal: &Literal) -> bool {
    match literal {
        Literal::Primitive(PrimitiveLiteral::Float(value)) => value.0 == 0.0,
        Literal::Primitive(PrimitiveLiteral::Double(value)) => value.0 == 0.0,
        _ => false,
    }
}

/// The partition that a tuple of `spec` names.
pub(super) fn partition_of(
    spec: &PartitionSpec,
    types: &StructType,
    tuple: &Struct,
) -> Result<Partition, String> {
    if tuple.fields().len() != spec.fields().len() || types.fields().len() != spec.fields().len() {
        return Err(format!(
            "a partition tuple has {} values, partition spec {} has {} fields",
            tuple.fields().len(),
            spec.spec_id(),
            spec.fields().len()
        ));
    }
    let mut fields = Vec::with_capacity(spec.fields().len());
    for ((field, typed), value) in spec.fields().iter().zip(types.fields()).zip(tuple.iter()) {
        let value = match value {
            None => None,
            Some(literal) => Some(value_text(literal, &typed.field_type)?),
        };
        fields.push(PartitionField {
            source_id: field.source_id,
            name: field.name.clone(),
            transform: field.transform.to_string(),
            value,
        });
    }
    Ok(Partition { spec_id: SpecId(spec.spec_id()), fields })
}

/// A partition value as the kernel compares it.
fn value_text(literal: &Literal, value_type: &Type) -> Result<String, String> {
    let number = match literal {
        Literal::Primitive(PrimitiveLiteral::Float(value)) => Some(f64::from(value.0)),
        Literal::Primitive(PrimitiveLiteral::Double(value)) => Some(value.0),
        _ => None,
    };
    if let Some(number) = number {
        if number.is_nan() {
            return Ok("NaN".to_owned());
        }
        if number.is_infinite() {
            return Ok(if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned());
        }
    }
    match literal.clone().try_into_json(value_type) {
        Ok(serde_json::Value::String(text)) => Ok(text),
        Ok(value) => Ok(value.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// The literal that [`value_text`] wrote; `None` when it cannot be told.
fn literal_of(text: &str, value_type: &Type) -> Option<PrimitiveLiteral> {
    let Type::Primitive(primitive) = value_type else { return None };
    let json = match primitive {
        PrimitiveType::Boolean
        | PrimitiveType::Int
        | PrimitiveType::Long
        | PrimitiveType::Float
        | PrimitiveType::Double => serde_json::from_str(text).ok()?,
        _ => serde_json::Value::String(text.to_owned()),
    };
    Literal::try_from_json(json, value_type).ok()??.as_primitive_literal()
}

/// Is every value of `tuple` of the type that `types` gives it?
pub(super) fn fits(tuple: &Struct, types: &StructType) -> bool {
    tuple.fields().len() == types.fields().len()
        && tuple.iter().zip(types.fields()).all(|(value, field)| match (value, field.field_type.as_ref()) {
            (None, _) => true,
            (Some(Literal::Primitive(literal)), Type::Primitive(primitive)) => primitive.compatible(literal),
            (Some(_), _) => false,
        })
}

/// A scope prepared for many questions.
pub(super) struct ScopeIndex<'a> {
    scope: &'a FileScope,
    /// Tuples of the scope by spec: inside one spec partitions overlap when their values are equal.
    values: HashMap<SpecId, HashSet<Vec<Option<&'a str>>>>,
}

impl<'a> ScopeIndex<'a> {
    pub(super) fn new(scope: &'a FileScope) -> Self {
        let mut values: HashMap<SpecId, HashSet<Vec<Option<&str>>>> = HashMap::new();
        if let FileScope::Partitions(partitions) = scope {
            for partition in partitions {
                values.entry(partition.spec_id).or_default().insert(tuple_key(partition));
            }
        }
        Self { scope, values }
    }

    /// As `Partition::overlaps` with any partition of the scope.
    pub(super) fn contains(&self, partition: &Partition) -> bool {
        let FileScope::Partitions(partitions) = self.scope else { return true };
        if self.values.get(&partition.spec_id).is_some_and(|set| set.contains(&tuple_key(partition))) {
            return true;
        }
        partitions.iter().any(|p| p.spec_id != partition.spec_id && p.overlaps(partition))
    }
}

fn tuple_key(partition: &Partition) -> Vec<Option<&str>> {
    partition.fields.iter().map(|f| f.value.as_deref()).collect()
}

/// The scope as questions to the partition summaries of manifests of one spec.
pub(super) struct SpecProbes {
    types: Vec<PrimitiveType>,
    /// `None`: the scope cannot be asked for, every manifest may hold files of it.
    partitions: Option<Vec<Vec<Probe>>>,
}

/// One field that a partition of the scope fixes.
struct Probe {
    field: usize,
    /// `None` is the null partition.
    value: Option<PrimitiveLiteral>,
}

/// Decoded summary of one partition field.
struct Range {
    contains_null: bool,
    bounds: Option<(PrimitiveLiteral, PrimitiveLiteral)>,
}

impl SpecProbes {
    /// `types` is the partition type of `spec` under the current schema, where there is one.
    pub(super) fn new(scope: &FileScope, spec: &PartitionSpec, types: Option<&StructType>) -> Self {
        let FileScope::Partitions(partitions) = scope else {
            return Self { types: Vec::new(), partitions: None };
        };
        let primitives: Vec<PrimitiveType> = types
            .map(|t| t.fields().iter().filter_map(|f| f.field_type.as_primitive_type().cloned()).collect())
            .unwrap_or_default();
        if primitives.len() != spec.fields().len() {
            return Self { types: Vec::new(), partitions: None };
        }
        let probes = partitions.iter().map(|p| probes_of(p, spec, &primitives)).collect();
        Self { types: primitives, partitions: Some(probes) }
    }

    /// False only when the manifest's partition summaries prove that no file in it is in scope.
    pub(super) fn may_hold(&self, manifest: &ManifestFile) -> bool {
        let (Some(partitions), Some(summaries)) = (&self.partitions, &manifest.partitions) else {
            return true;
        };
        if summaries.len() != self.types.len() {
            return true;
        }
        let ranges: Vec<Range> = summaries
            .iter()
            .zip(&self.types)
            .map(|(summary, value_type)| range_of(summary, value_type))
            .collect();
        partitions.iter().any(|probes| probes.iter().all(|probe| ranges[probe.field].may_hold(&probe.value)))
    }
}

/// The comparisons that `Partition::overlaps` makes, of which only those that can be asked are kept.
fn probes_of(partition: &Partition, spec: &PartitionSpec, types: &[PrimitiveType]) -> Vec<Probe> {
    let mut probes = Vec::new();
    for (field, (spec_field, value_type)) in spec.fields().iter().zip(types).enumerate() {
        let wanted = if partition.spec_id.0 == spec.spec_id() {
            partition.fields.get(field)
        } else if spec_field.transform == Transform::Void {
            None
        } else {
            let transform = spec_field.transform.to_string();
            partition.fields.iter().find(|f| f.source_id == spec_field.source_id && f.transform == transform)
        };
        match wanted.map(|f| f.value.as_deref()) {
            None => {}
            Some(None) => probes.push(Probe { field, value: None }),
            Some(Some(text)) => {
                if let Some(literal) = literal_of(text, &Type::Primitive(value_type.clone())) {
                    probes.push(Probe { field, value: Some(literal) });
                }
            }
        }
    }
    probes
}

fn range_of(summary: &FieldSummary, value_type: &PrimitiveType) -> Range {
    let literal = |bytes: &[u8]| {
        Datum::try_from_bytes(bytes, value_type.clone()).ok().map(|datum| datum.literal().clone())
    };
    let lower = summary.lower_bound.as_ref().and_then(|bytes| literal(bytes));
    let upper = summary.upper_bound.as_ref().and_then(|bytes| literal(bytes));
    Range { contains_null: summary.contains_null, bounds: lower.zip(upper) }
}

impl Range {
    fn may_hold(&self, value: &Option<PrimitiveLiteral>) -> bool {
        let Some(value) = value else { return self.contains_null };
        // Without bounds all values are null or NaN, or the writer left them out: not worth telling apart.
        let Some((lower, upper)) = &self.bounds else { return true };
        let same_kind = std::mem::discriminant(lower) == std::mem::discriminant(value);
        !same_kind || (lower <= value && value <= upper)
    }
}

#[cfg(test)]
mod tests {
    use iceberg::spec::{ByteBuf, ManifestContentType, NestedField, Schema};

    use super::*;

    fn schema() -> Schema {
        Schema::builder()
            .with_fields(vec![
                NestedField::required(1, "id", Type::Primitive(PrimitiveType::Long)).into(),
                NestedField::optional(2, "at", Type::Primitive(PrimitiveType::Timestamp)).into(),
                NestedField::optional(3, "carrier", Type::Primitive(PrimitiveType::String)).into(),
                NestedField::optional(4, "rate", Type::Primitive(PrimitiveType::Double)).into(),
            ])
            .build()
            .unwrap()
    }

    fn spec(id: i32, fields: &[(&str, &str, Transform)]) -> PartitionSpec {
        let mut builder = PartitionSpec::builder(schema()).with_spec_id(id);
        for (source, name, transform) in fields {
            builder = builder.add_partition_field(*source, *name, *transform).unwrap();
        }
        builder.build().unwrap()
    }

    fn by_day_and_carrier() -> PartitionSpec {
        spec(0, &[("at", "at_day", Transform::Day), ("carrier", "carrier", Transform::Identity)])
    }

    fn tuple(day: Option<i32>, carrier: Option<&str>) -> Struct {
        Struct::from_iter([day.map(Literal::date), carrier.map(Literal::string)])
    }

    fn partition(spec: &PartitionSpec, tuple: &Struct) -> Arc<Partition> {
        Arc::new(partition_of(spec, &spec.partition_type(&schema()).unwrap(), tuple).unwrap())
    }

    #[test]
    fn values_are_json_single_values() {
        let spec = by_day_and_carrier();
        let partition = partition(&spec, &tuple(Some(15706), None));
        assert_eq!(partition.to_string(), "at_day=2013-01-01/carrier=null");
        assert_eq!(partition.fields[0].transform, "day");
        assert_eq!((partition.fields[0].source_id, partition.fields[1].value.clone()), (2, None));
    }

    #[test]
    fn nan_is_not_the_null_partition() {
        let spec = spec(0, &[("rate", "rate", Transform::Identity)]);
        let nan = partition(&spec, &Struct::from_iter([Some(Literal::double(f64::NAN))]));
        let null = partition(&spec, &Struct::from_iter([None]));
        assert_eq!(nan.fields[0].value.as_deref(), Some("NaN"));
        assert!(!nan.overlaps(&null));
    }

    #[test]
    fn zero_and_minus_zero_are_two_partitions() {
        let spec = spec(0, &[("rate", "rate", Transform::Identity)]);
        let types = spec.partition_type(&schema()).unwrap();
        let mut interner = PartitionInterner::new(&spec, &types);
        let [minus, plus] =
            [-0.0, 0.0].map(|at| interner.intern(&Struct::from_iter([Some(Literal::double(at))])).unwrap());
        assert_eq!(minus.fields[0].value.as_deref(), Some("-0.0"));
        assert_eq!(plus.fields[0].value.as_deref(), Some("0.0"));
    }

    #[test]
    fn interning_gives_each_tuple_once() {
        let spec = by_day_and_carrier();
        let types = spec.partition_type(&schema()).unwrap();
        let mut interner = PartitionInterner::new(&spec, &types);
        let one = interner.intern(&tuple(Some(1), Some("UA"))).unwrap();
        let two = interner.intern(&tuple(Some(2), Some("UA"))).unwrap();
        let again = interner.intern(&tuple(Some(1), Some("UA"))).unwrap();
        assert!(Arc::ptr_eq(&again, &one));
        assert_ne!(one, two);
        assert!(partition_of(&spec, &types, &Struct::empty()).is_err());
    }

    #[test]
    fn scope_index_answers_as_overlaps_does() {
        let daily = by_day_and_carrier();
        let by_carrier = spec(1, &[("carrier", "carrier", Transform::Identity)]);
        let all = [
            partition(&daily, &tuple(Some(1), Some("UA"))),
            partition(&daily, &tuple(Some(2), Some("UA"))),
            partition(&daily, &tuple(None, Some("AA"))),
            partition(&by_carrier, &Struct::from_iter([Some(Literal::string("UA"))])),
            partition(&by_carrier, &Struct::from_iter([None])),
        ];
        for scope in &all {
            let scope = FileScope::Partitions(vec![scope.clone()]);
            let index = ScopeIndex::new(&scope);
            let FileScope::Partitions(wanted) = &scope else { continue };
            for other in &all {
                assert_eq!(index.contains(other), wanted[0].overlaps(other), "{wanted:?} {other}");
            }
        }
    }

    fn manifest(summaries: Vec<FieldSummary>) -> ManifestFile {
        ManifestFile {
            manifest_path: "m.avro".to_owned(),
            manifest_length: 1,
            partition_spec_id: 0,
            content: ManifestContentType::Data,
            sequence_number: 1,
            min_sequence_number: 1,
            added_snapshot_id: 1,
            added_files_count: Some(1),
            existing_files_count: Some(0),
            deleted_files_count: Some(0),
            added_rows_count: Some(1),
            existing_rows_count: Some(0),
            deleted_rows_count: Some(0),
            partitions: Some(summaries),
            key_metadata: None,
            first_row_id: None,
        }
    }

    fn summary(bounds: Option<(Datum, Datum)>, contains_null: bool) -> FieldSummary {
        let bytes = |datum: &Datum| -> ByteBuf { datum.to_bytes().unwrap() };
        FieldSummary {
            contains_null,
            contains_nan: Some(false),
            lower_bound: bounds.as_ref().map(|(lower, _)| bytes(lower)),
            upper_bound: bounds.as_ref().map(|(_, upper)| bytes(upper)),
        }
    }

    #[test]
    fn summaries_prune_only_what_they_exclude() {
        let daily = by_day_and_carrier();
        let types = daily.partition_type(&schema()).unwrap();
        let days = |from, to| summary(Some((Datum::date(from), Datum::date(to))), false);
        let carriers = summary(Some((Datum::string("AA"), Datum::string("DL"))), true);
        let held = manifest(vec![days(10, 20), carriers]);
        let by_carrier = spec(1, &[("carrier", "carrier", Transform::Identity)]);
        let cases = [
            (partition(&daily, &tuple(Some(15), Some("B6"))), true),
            (partition(&daily, &tuple(Some(15), None)), true),
            (partition(&daily, &tuple(Some(9), Some("B6"))), false),
            (partition(&daily, &tuple(None, Some("B6"))), false),
            (partition(&daily, &tuple(Some(15), Some("UA"))), false),
            (partition(&by_carrier, &Struct::from_iter([Some(Literal::string("UA"))])), false),
            (partition(&by_carrier, &Struct::from_iter([Some(Literal::string("B6"))])), true),
            (partition(&PartitionSpec::unpartition_spec(), &Struct::empty()), true),
        ];
        for (wanted, expected) in cases {
            let scope = FileScope::Partitions(vec![wanted.clone()]);
            let probes = SpecProbes::new(&scope, &daily, Some(&types));
            assert_eq!(probes.may_hold(&held), expected, "{wanted}");
            // A spec whose source column is gone cannot be asked: nothing is pruned.
            assert!(SpecProbes::new(&scope, &daily, None).may_hold(&held), "{wanted}");
        }
        assert!(SpecProbes::new(&FileScope::Table, &daily, Some(&types)).may_hold(&held));
    }
}
