//! A table of thousands of manifests, made in a second.
//!
//! By the crate itself, as another engine's writer would: the product's writer names every manifest of the
//! parent in each new list, which for a chain of 2,000 snapshots is two million entries. The data files do
//! not exist: whoever reads one fails.

use std::collections::BTreeMap;

use iceberg::spec::{
    DataContentType, DataFileBuilder, DataFileFormat, Literal, ManifestListWriter, ManifestWriterBuilder,
    Struct,
};
use mergeberg::table::catalog::{Catalog, CommitOutcome};
use mergeberg_kernel::commit::{NewSnapshot, Requirement, Update};
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::SnapshotId;

use crate::support::{House, main_branch};

/// One snapshot on main that writes this many manifests of one file, each in a day of its own from `day` on.
/// Manifests of this table are never merged.
pub async fn append_manifests(house: &House, count: i32, day: i32) -> SnapshotId {
    house.set_property("commit.manifest-merge.enabled", "false").await;
    let table = house.loaded().await;
    let (facts, metadata) = (&table.facts, &table.metadata);
    let parent = facts.head(&main_branch());
    let id = SnapshotId(777_000_777);
    let sequence_number = facts.last_sequence_number + 1;
    let folder = format!("{}/metadata", facts.location);
    let mut manifests = Vec::new();
    for n in 0..count {
        let file = DataFileBuilder::default()
            .content(DataContentType::Data)
            .file_path(format!("{}/data/nowhere-{n}.parquet", facts.location))
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::from_iter([Some(Literal::date(day + n))]))
            .partition_spec_id(facts.default_spec_id.0)
            .record_count(1)
            .file_size_in_bytes(1000)
            .build()
            .unwrap();
        let output = table.file_io.new_output(format!("{folder}/wide-{n}.avro")).unwrap();
        let spec = metadata.default_partition_spec().as_ref().clone();
        let schema = metadata.current_schema().clone();
        let mut writer = ManifestWriterBuilder::new(output, Some(id.0), schema, spec).build_v2_data();
        writer.add_file(file, sequence_number).unwrap();
        manifests.push(writer.write_manifest_file().await.unwrap());
    }
    let list = format!("{folder}/wide-list.avro");
    let output = table.file_io.new_output(&list).unwrap().writer().await.unwrap();
    let mut writer = ManifestListWriter::v2(output, id.0, parent.map(|id| id.0), sequence_number);
    writer.add_manifests(manifests.into_iter()).unwrap();
    writer.close().await.unwrap();
    let snapshot = NewSnapshot {
        id,
        parent,
        sequence_number,
        timestamp_ms: house.now().max(facts.last_updated_ms + 1),
        manifest_list: list,
        schema_id: facts.current_schema_id,
        label: "append".to_owned(),
        summary: BTreeMap::new(),
        row_range: None,
    };
    let head = RefFact { snapshot_id: id, ..facts.refs[&main_branch()].clone() };
    let uuid = Requirement::TableUuid(facts.uuid.clone());
    let updates = vec![Update::AddSnapshot(snapshot), Update::SetRef(head)];
    let outcome = house.catalog.commit(&table, &[uuid], updates).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
    id
}
