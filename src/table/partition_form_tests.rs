//! Manifests of the fixtures, whose partition values Java wrote.

use std::path::Path;

use iceberg::spec::{
    FormatVersion, Manifest, ManifestContentType, NestedField, Transform, UnboundPartitionField,
};
use mergeberg_kernel::ids::SnapshotId;

use super::super::avro::header_cache::HeaderCache;
use super::super::manifest_codec::{self, Entry, ManifestPlan};
use super::*;

/// The manifests of a table, by their bytes.
fn manifests(table: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tables").join(table).join("metadata");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if name.ends_with(".avro") && !name.starts_with("snap-") {
            found.push(std::fs::read(entry.path()).unwrap());
        }
    }
    assert!(found.len() >= 3, "{table}");
    found
}

fn avro_schema(bytes: &[u8]) -> Value {
    serde_json::from_slice(AvroFile::parse(bytes).unwrap().get(AVRO_SCHEMA).unwrap()).unwrap()
}

#[test]
fn the_header_that_is_written_has_javas_types() {
    for table in ["types-scalars-v2", "flink-types-v3"] {
        for java in manifests(table) {
            let special = Special::of(&java).unwrap().unwrap();
            let (stand_ins, given) = special.given(&java, FixedForm::WithLength).unwrap().unwrap();
            assert_ne!(avro_schema(&given), avro_schema(&java), "{table}");
            let real = stand_ins.real_file(&given, &special.schema, &special.spec).unwrap();
            assert_eq!(avro_schema(&real), avro_schema(&java), "{table}");
        }
    }
}

#[test]
fn values_are_the_same_after_both_conversions() {
    let mut values = 0;
    for (table, form) in [("types-scalars-v2", FixedForm::Plain), ("flink-types-v3", FixedForm::WithLength)] {
        for java in manifests(table) {
            let special = Special::of(&java).unwrap().unwrap();
            let (stand_ins, given) = special.given(&java, form).unwrap().unwrap();
            for entry in Manifest::parse_avro(&given).unwrap().entries() {
                let file = entry.data_file();
                let real = stand_ins.real(file, 0).unwrap();
                assert!(crate::table::partition_values::fits(real.partition(), &special.types), "{table}");
                assert_eq!(stand_ins.given(&real, 0).unwrap().partition(), file.partition(), "{table}");
                for (id, bound) in real.lower_bounds() {
                    let bytes = file.lower_bounds()[id].to_bytes().unwrap();
                    assert_eq!(bound.to_bytes().unwrap(), bytes, "{table}");
                }
                values += real.partition().iter().flatten().count();
            }
        }
    }
    assert!(values >= 12, "{values}");
}

#[test]
fn fixed_values_with_a_length_make_no_sense_without_one() {
    let (mut with_values, mut read) = (0, 0);
    for java in manifests("flink-types-v3") {
        let special = Special::of(&java).unwrap().unwrap();
        let (_, given) = special.given(&java, FixedForm::WithLength).unwrap().unwrap();
        let holds = Manifest::parse_avro(&given)
            .unwrap()
            .entries()
            .iter()
            .any(|entry| entry.data_file().partition().iter().any(|value| value.is_some()));
        with_values += usize::from(holds);
        let (_, plain) = special.given(&java, FixedForm::Plain).unwrap().unwrap();
        read += usize::from(holds && Manifest::parse_avro(&plain).is_ok());
    }
    assert!(with_values >= 3 && read == 0, "{with_values} {read}");
}

/// A manifest with two fields of each named type, written and read again in both forms of `fixed`.
#[tokio::test(flavor = "multi_thread")]
async fn two_fields_of_one_named_type_are_told_apart() {
    let kinds =
        ["fixed[9]", "fixed[9]", "fixed[16]", "fixed[16]", "uuid", "uuid", "decimal(9, 2)", "decimal(9, 2)"];
    let fields = kinds.iter().zip(1_i32..).map(|(kind, id)| {
        let kind: PrimitiveType = serde_json::from_value(json!(kind)).unwrap();
        NestedField::optional(id, format!("c{id}"), Type::Primitive(kind)).into()
    });
    let schema = Arc::new(Schema::builder().with_fields(fields).build().unwrap());
    let parts = (1_i32..).take(kinds.len()).map(|id| UnboundPartitionField {
        source_id: id,
        field_id: Some(999 + id),
        name: format!("c{id}"),
        transform: Transform::Identity,
    });
    let builder = PartitionSpec::builder(Arc::clone(&schema)).with_spec_id(0);
    let spec = Arc::new(builder.add_unbound_fields(parts).unwrap().build().unwrap());
    let tuple = |first: u8| {
        let fixed = |length: usize, last: u8| {
            let mut bytes = vec![first; length];
            bytes[length - 1] = last;
            Some(Literal::fixed(bytes))
        };
        let uuid = |last: u8| {
            Some(Literal::uuid(uuid::Uuid::from_bytes([
                first, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last,
            ])))
        };
        let decimal = |last: i128| Some(Literal::decimal(last - i128::from(first)));
        Struct::from_iter([
            fixed(9, 1),
            fixed(9, 2),
            fixed(16, 1),
            fixed(16, 2),
            uuid(1),
            uuid(2),
            decimal(1),
            decimal(2),
        ])
    };
    let entries: Vec<Entry> =
        [0x00, 0x7f, 0x80, 0xff].map(|first| entry(&spec, &schema, tuple(first))).into();
    for form in [FixedForm::Plain, FixedForm::WithLength] {
        let file_io = iceberg::io::FileIO::new_with_memory();
        let plan = ManifestPlan {
            path: "memory:///m0.avro".to_owned(),
            version: FormatVersion::V2,
            content: ManifestContentType::Data,
            snapshot: SnapshotId(5),
            sequence_number: 5,
            spec: Arc::clone(&spec),
            schema: Arc::clone(&schema),
            entries: entries.clone(),
            fixed: form,
        };
        let templates = Some(Arc::default());
        let (listed, _) =
            manifest_codec::write(file_io.clone(), templates, vec![plan]).await.unwrap().remove(0);
        let bytes = file_io.new_input("memory:///m0.avro").unwrap().read().await.unwrap();
        let read = manifest_codec::decode(&listed, &bytes, &spec, &HeaderCache::default()).unwrap();
        let tuples =
            |entries: &[Entry]| entries.iter().map(|e| e.file.partition().clone()).collect::<Vec<_>>();
        assert_eq!(tuples(&read.entries), tuples(&entries), "{form:?}");
        assert_eq!(read.fixed, Some(form));
        let summaries = listed.partitions.unwrap();
        assert_eq!(summaries.len(), kinds.len());
        for (at, length) in [9, 9, 16, 16, 16, 16].into_iter().enumerate() {
            let low = summaries[at].lower_bound.as_ref().unwrap().to_vec();
            let high = summaries[at].upper_bound.as_ref().unwrap().to_vec();
            assert_eq!((low.len(), high.len()), (length, length), "{form:?} {at}");
            assert!(low[0] == 0x00 && high[0] == 0xff, "{form:?} {at}: {low:?} {high:?}");
        }
    }
}

fn entry(spec: &PartitionSpec, schema: &Schema, tuple: Struct) -> Entry {
    let file = iceberg::spec::DataFileBuilder::default()
        .content(iceberg::spec::DataContentType::Data)
        .file_path("memory:///a.parquet".to_owned())
        .file_format(iceberg::spec::DataFileFormat::Parquet)
        .partition(tuple)
        .partition_spec_id(0)
        .record_count(1)
        .file_size_in_bytes(1)
        .build()
        .unwrap();
    let types = spec.partition_type(schema).unwrap();
    let partition = crate::table::partition_values::partition_of(spec, &types, file.partition()).unwrap();
    Entry {
        status: iceberg::spec::ManifestStatus::Added,
        snapshot: SnapshotId(5),
        sequence_number: 5,
        file_sequence_number: 5,
        fact: manifest_codec::file_fact(&file, Arc::new(partition)).unwrap(),
        file: Arc::new(file),
    }
}
