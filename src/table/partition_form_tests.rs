//! Manifests of the fixtures, whose partition values Java wrote.

use std::path::Path;

use iceberg::spec::Manifest;

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
            let real = stand_ins.real_file(&given, &special.schema).unwrap();
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
