//! What is written here is read as it was meant, by the crate and by us, and is listed as the crate would list it.

use iceberg::io::FileIO;
use iceberg::spec::{
    DataFileBuilder, DataFileFormat, Manifest, ManifestWriterBuilder, NestedField, PartitionSpec, Schema,
    Transform, Type,
};
use proptest::prelude::*;

use super::super::header_cache::HeaderCache;
use super::super::{RawEntry, decode_manifest};
use super::*;

const SNAPSHOT: i64 = 77;

fn schema() -> SchemaRef {
    let types = [
        PrimitiveType::Long,
        PrimitiveType::Date,
        PrimitiveType::String,
        PrimitiveType::Boolean,
        PrimitiveType::Binary,
        PrimitiveType::Timestamptz,
        PrimitiveType::Double,
    ];
    let fields = types
        .into_iter()
        .zip(1..)
        .map(|(of, id)| Arc::new(NestedField::optional(id, format!("c{id}"), Type::Primitive(of))));
    Arc::new(Schema::builder().with_schema_id(3).with_fields(fields).build().unwrap())
}

fn spec(columns: std::ops::RangeInclusive<i32>) -> PartitionSpec {
    let mut builder = PartitionSpec::builder(schema()).with_spec_id(5);
    for id in columns {
        builder =
            builder.add_partition_field(format!("c{id}"), format!("p{id}"), Transform::Identity).unwrap();
    }
    builder.build().unwrap()
}

fn kind(version: FormatVersion, content: ManifestContentType, spec: PartitionSpec) -> HeaderOf {
    HeaderOf { version, content, schema: schema(), spec }
}

/// By the crate.
async fn theirs(of: &HeaderOf, entries: &[RawEntry]) -> (Vec<u8>, ManifestFile) {
    let file_io = FileIO::new_with_memory();
    let output = file_io.new_output("memory:///m.avro").unwrap();
    let builder = ManifestWriterBuilder::new(output, Some(SNAPSHOT), of.schema.clone(), of.spec.clone());
    let mut writer = match (of.version, of.content) {
        (FormatVersion::V3, ManifestContentType::Data) => builder.build_v3_data(),
        (FormatVersion::V3, ManifestContentType::Deletes) => builder.build_v3_deletes(),
        (_, ManifestContentType::Data) => builder.build_v2_data(),
        (_, ManifestContentType::Deletes) => builder.build_v2_deletes(),
    };
    for entry in entries {
        let (file, sequence) = (entry.file.clone(), entry.sequence_number);
        match entry.status {
            ManifestStatus::Added => writer.add_file(file, sequence.unwrap_or(-1)),
            ManifestStatus::Existing => writer.add_existing_file(
                file,
                entry.snapshot_id.unwrap(),
                sequence.unwrap(),
                entry.file_sequence_number,
            ),
            ManifestStatus::Deleted => {
                writer.add_delete_file(file, sequence.unwrap(), entry.file_sequence_number)
            }
        }
        .unwrap();
    }
    let listed = writer.write_manifest_file().await.unwrap();
    let bytes = file_io.new_input("memory:///m.avro").unwrap().read().await.unwrap();
    (bytes.to_vec(), listed)
}

async fn ours(of: &HeaderOf, entries: &[RawEntry]) -> Usual<(Vec<u8>, ManifestFile)> {
    let empty = theirs(of, &[]).await.0;
    let template = Templates::default().get(of, || Ok::<_, ()>(empty)).unwrap()?;
    let written = entries.iter().map(|entry| WrittenEntry {
        status: entry.status,
        snapshot_id: entry.snapshot_id.unwrap(),
        sequence_number: entry.sequence_number,
        file_sequence_number: entry.file_sequence_number,
        file: &entry.file,
    });
    encode_manifest(&template, "memory:///m.avro", SNAPSHOT, written)
}

fn tuple_values() -> impl Strategy<Value = Vec<Option<PrimitiveLiteral>>> {
    use PrimitiveLiteral as Value;
    let text = proptest::string::string_regex("[a-zäß漢]{0,4}").unwrap();
    (
        proptest::option::of(any::<i64>().prop_map(Value::Long)),
        proptest::option::of((-99_999..99_999_i32).prop_map(Value::Int)),
        proptest::option::of(text.prop_map(Value::String)),
        proptest::option::of(any::<bool>().prop_map(Value::Boolean)),
        proptest::option::of(proptest::collection::vec(any::<u8>(), 0..5).prop_map(Value::Binary)),
        proptest::option::of(any::<i64>().prop_map(Value::Long)),
    )
        .prop_map(|(a, b, c, d, e, f)| vec![a, b, c, d, e, f])
}

fn statistics() -> impl Strategy<Value = HashMap<i32, u64>> {
    proptest::collection::hash_map(0..9_i32, 0..i64::MAX.cast_unsigned(), 0..4)
}

fn data_file(content: DataContentType) -> impl Strategy<Value = DataFile> {
    let numbers = (0..1_000_000_u64, 0..i64::MAX.cast_unsigned(), proptest::option::of(any::<i64>()));
    let lists = (
        proptest::option::of(proptest::collection::vec(any::<i64>(), 0..4)),
        proptest::option::of(proptest::collection::vec(1..9_i32, 0..3)),
        proptest::option::of(proptest::collection::vec(any::<u8>(), 0..4)),
    );
    let maps = (statistics(), statistics(), statistics(), statistics());
    let bounds = (proptest::option::of(any::<i64>()), proptest::option::of("[a-z]{0,5}"));
    (tuple_values(), numbers, lists, maps, bounds, proptest::option::of(0..3_i32)).prop_map(
        move |(tuple, (records, bytes, row), (offsets, ids, key), maps, (low, high), order)| {
            let mut file = DataFileBuilder::default();
            file.content(content)
                .file_path(format!("s3://b/ü/{records}.parquet"))
                .file_format(DataFileFormat::Parquet)
                .partition(Struct::from_iter(tuple.into_iter().map(|value| value.map(Literal::Primitive))))
                .partition_spec_id(5)
                .record_count(records)
                .file_size_in_bytes(bytes)
                .column_sizes(maps.0)
                .value_counts(maps.1)
                .null_value_counts(maps.2)
                .nan_value_counts(maps.3)
                .lower_bounds(low.map(|low| (1, Datum::long(low))).into_iter().collect())
                .upper_bounds(high.map(|high| (3, Datum::string(high))).into_iter().collect())
                .key_metadata(key)
                .split_offsets(offsets)
                .equality_ids(ids)
                .first_row_id(row)
                .referenced_data_file(row.map(|_| "s3://b/d.parquet".to_owned()))
                .content_offset(row)
                .content_size_in_bytes(row);
            if let Some(order) = order {
                file.sort_order_id(order);
            }
            file.build().unwrap()
        },
    )
}

fn entries(content: DataContentType) -> impl Strategy<Value = Vec<RawEntry>> {
    let one = (0..3_i32, proptest::option::of(0..1_000_i64), 1..1_000_i64, data_file(content));
    proptest::collection::vec(one, 0..12).prop_map(|all| {
        let entry = |(status, inherited, number, file): (i32, Option<i64>, i64, DataFile)| {
            let status = ManifestStatus::try_from(status).unwrap();
            let is_added = status == ManifestStatus::Added;
            RawEntry {
                status,
                snapshot_id: Some(if status == ManifestStatus::Existing { number + 100 } else { SNAPSHOT }),
                sequence_number: if is_added { inherited } else { Some(number) },
                file_sequence_number: if is_added { None } else { Some(number + 1) },
                file,
            }
        };
        all.into_iter().map(entry).collect()
    })
}

fn contents() -> impl Strategy<Value = (FormatVersion, ManifestContentType, Vec<RawEntry>)> {
    let of =
        |version, content, files| entries(files).prop_map(move |entries| (version, content, entries)).boxed();
    prop_oneof![
        of(FormatVersion::V2, ManifestContentType::Data, DataContentType::Data),
        of(FormatVersion::V3, ManifestContentType::Data, DataContentType::Data),
        of(FormatVersion::V2, ManifestContentType::Deletes, DataContentType::EqualityDeletes),
        of(FormatVersion::V3, ManifestContentType::Deletes, DataContentType::PositionDeletes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn manifests_are_read_as_they_were_meant_and_listed_as_the_crate_lists_them(
        (version, content, entries) in contents()
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let of = kind(version, content, spec(1..=6));
        let (bytes, listed) = runtime.block_on(ours(&of, &entries)).unwrap();
        let (crates, listed_by_crate) = runtime.block_on(theirs(&of, &entries));
        // Maps are written in another order, which changes no length.
        prop_assert_eq!(&listed, &listed_by_crate);
        prop_assert_eq!(bytes.len(), crates.len());

        let read = decode_manifest(&bytes, &HeaderCache::default()).unwrap();
        prop_assert_eq!(&read.entries, &entries);
        let (by_crate, header) = Manifest::parse_avro(&bytes).unwrap().into_parts();
        let by_crate: Vec<RawEntry> =
            by_crate.into_iter().map(|entry| RawEntry::from(Arc::unwrap_or_clone(entry))).collect();
        prop_assert_eq!(&by_crate, &entries);
        prop_assert_eq!(header.content(), &content);
        prop_assert_eq!(header.partition_spec(), &of.spec);
        prop_assert_eq!(header.schema(), &of.schema);
    }
}

fn file(content: DataContentType, tuple: Vec<Option<Literal>>) -> DataFile {
    DataFileBuilder::default()
        .content(content)
        .file_path("f".to_owned())
        .file_format(DataFileFormat::Parquet)
        .partition(Struct::from_iter(tuple))
        .partition_spec_id(5)
        .record_count(1)
        .file_size_in_bytes(1)
        .build()
        .unwrap()
}

fn added(file: DataFile) -> RawEntry {
    RawEntry {
        status: ManifestStatus::Added,
        snapshot_id: Some(SNAPSHOT),
        sequence_number: None,
        file_sequence_number: None,
        file,
    }
}

#[tokio::test]
async fn many_entries_make_many_blocks() {
    let of = kind(FormatVersion::V2, ManifestContentType::Data, spec(1..=1));
    let entries: Vec<RawEntry> =
        (0..3_000_i64).map(|id| added(file(DataContentType::Data, vec![Some(Literal::long(id))]))).collect();
    let (bytes, listed) = ours(&of, &entries).await.unwrap();
    assert!(bytes.len() > BLOCK_BYTES, "{}", bytes.len());
    assert_eq!(decode_manifest(&bytes, &HeaderCache::default()).unwrap().entries, entries);
    assert_eq!(Manifest::parse_avro(&bytes).unwrap().entries().len(), 3_000);
    assert_eq!(listed.partitions, theirs(&of, &entries).await.1.partitions);
}

#[tokio::test]
async fn what_is_unusual_is_left_to_the_crate() {
    // Fractions as partition values have an order that the crate knows.
    let of = kind(FormatVersion::V2, ManifestContentType::Data, spec(7..=7));
    let fraction = added(file(DataContentType::Data, vec![Some(Literal::double(-0.0))]));
    assert!(ours(&of, &[fraction]).await.is_err());

    let of = kind(FormatVersion::V2, ManifestContentType::Data, spec(1..=1));
    let one = || vec![Some(Literal::long(1))];
    for wrong in [
        file(DataContentType::EqualityDeletes, one()),
        file(DataContentType::Data, vec![Some(Literal::string("1"))]),
        file(DataContentType::Data, Vec::new()),
    ] {
        assert!(ours(&of, &[added(wrong)]).await.is_err());
    }
    assert!(ours(&of, &[added(file(DataContentType::Data, one()))]).await.is_ok());
    assert!(Template::of(&of, b"Obj\x01 and nothing").is_err());
}
