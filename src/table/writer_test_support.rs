//! Real tables in a temporary folder, built with the crate's own metadata builder and read back through
//! the crate's own scan: an independent reader of what the writer wrote.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
use futures::TryStreamExt;
use iceberg::io::{FileIOBuilder, LocalFsStorageFactory};
use iceberg::spec::{
    DataContentType, DataFileBuilder, DataFileFormat, FormatVersion, Literal, Manifest, ManifestEntryRef,
    ManifestFile, ManifestList, ManifestListWriter, ManifestWriterBuilder, NestedField, Operation,
    PrimitiveType, Schema, Snapshot, SnapshotReference, SnapshotRetention, Struct, Summary, TableMetadata,
    TableMetadataBuilder, Transform, Type, UnboundPartitionSpec,
};
use iceberg::table::Table;
use iceberg::{Runtime, TableCreation, TableIdent};
use mergeberg_kernel::commit::NewSnapshot;
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableName, TableUuid};
use mergeberg_kernel::lineage::{SnapshotFact, SnapshotGraph};
use mergeberg_kernel::partition::{Partition, PartitionField};
use tempfile::TempDir;

use super::data_files::{DataFileWriter, NewDataFile};
use super::document::Document;
use super::loaded::LoadedTable;
use super::manifest_codec::file_fact;
use super::snapshot_writer::{AddedFile, FileAge, SnapshotChange};

/// Later than any table that a test makes.
pub(super) const NOW_MS: i64 = 4_000_000_000_000;
const ROOM: usize = 256 * 1024 * 1024;

pub(super) fn store() -> super::manifests::ManifestStore {
    super::manifests::ManifestStore::new(ROOM)
}

/// The writer reads no document; one is made so that the table is whole.
fn document(metadata: &TableMetadata) -> Arc<Document> {
    let mut value = serde_json::to_value(metadata).unwrap();
    // The document refuses version 1 before the writer can; here the writer is asked.
    if metadata.format_version() == FormatVersion::V1 {
        value["format-version"] = 2.into();
    }
    Arc::new(Document::parse(&serde_json::to_vec(&value).unwrap()).unwrap())
}

pub(super) struct TestTable {
    pub dir: TempDir,
    pub table: LoadedTable,
}

impl TestTable {
    /// `id long, carrier string, rate double`, partitioned by carrier.
    pub fn new() -> Self {
        Self::with(&[], FormatVersion::V2, &[("carrier", Transform::Identity)])
    }

    pub fn with_properties(properties: &[(&str, &str)]) -> Self {
        Self::with(properties, FormatVersion::V2, &[("carrier", Transform::Identity)])
    }

    pub fn with(
        properties: &[(&str, &str)],
        version: FormatVersion,
        partitioned_by: &[(&str, Transform)],
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let location = dir.path().join("flights").to_str().unwrap().to_owned();
        let optional = |id, name: &str, of| NestedField::optional(id, name, Type::Primitive(of)).into();
        let schema = Schema::builder()
            .with_fields(vec![
                NestedField::required(1, "id", Type::Primitive(PrimitiveType::Long)).into(),
                optional(2, "carrier", PrimitiveType::String),
                optional(3, "rate", PrimitiveType::Double),
            ])
            .build()
            .unwrap();
        let mut spec = UnboundPartitionSpec::builder().with_spec_id(0);
        for (source, transform) in partitioned_by {
            let id = schema.field_by_name(source).unwrap().id;
            let name = match transform {
                Transform::Identity => (*source).to_owned(),
                other => format!("{source}_{other}"),
            };
            spec = spec.add_partition_field(id, name, *transform).unwrap();
        }
        let creation = TableCreation::builder()
            .name("flights".to_owned())
            .location(location)
            .schema(schema)
            .partition_spec(spec.build())
            .properties(properties.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())))
            .format_version(version)
            .build();
        let metadata = TableMetadataBuilder::from_table_creation(creation).unwrap().build().unwrap().metadata;
        let table = loaded(metadata, BTreeMap::new());
        Self { dir, table }
    }

    /// Commits `snapshots` in one go and points `branch` at the last.
    pub fn commit(&mut self, branch: &str, snapshots: &[NewSnapshot]) {
        let mut builder = self.builder();
        for snapshot in snapshots {
            builder = builder.add_snapshot(crate_snapshot(snapshot)).unwrap();
        }
        let head = snapshots.last().unwrap().id;
        let retention = SnapshotRetention::Branch {
            min_snapshots_to_keep: None,
            max_snapshot_age_ms: None,
            max_ref_age_ms: None,
        };
        let reference = SnapshotReference { snapshot_id: head.0, retention };
        let mut refs = self.table.facts.refs.clone();
        let fact = RefFact {
            name: RefName::new(branch),
            snapshot_id: head,
            kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
            max_ref_age_ms: None,
        };
        refs.insert(fact.name.clone(), fact);
        self.rebuild(builder.set_ref(branch, reference).unwrap(), refs);
    }

    pub fn builder(&self) -> TableMetadataBuilder {
        self.table.metadata.as_ref().clone().into_builder(Some(self.table.metadata_location.clone()))
    }

    pub fn rebuild(&mut self, builder: TableMetadataBuilder, refs: BTreeMap<RefName, RefFact>) {
        self.table = loaded(builder.build().unwrap().metadata, refs);
    }

    pub fn head(&self, branch: &str) -> SnapshotFact {
        let id = self.table.facts.head(&RefName::new(branch)).unwrap();
        self.table.facts.snapshots.get(id).unwrap().clone()
    }

    /// Parquet files with these rows, one a carrier.
    pub async fn files(&self, rows: &[(i64, &str)]) -> Vec<NewDataFile> {
        let schema_id = self.table.facts.current_schema_id;
        DataFileWriter::write_batches(&self.table, schema_id, vec![batch(rows)]).await.unwrap()
    }

    /// A data file that is described but does not exist.
    pub fn pretended_file(&self, path: &str, carrier: &str) -> AddedFile {
        self.pretended_rows(path, carrier, 10)
    }

    /// The same with this many rows.
    pub fn pretended_rows(&self, path: &str, carrier: &str, rows: u64) -> AddedFile {
        let file = DataFileBuilder::default()
            .content(DataContentType::Data)
            .file_path(path.to_owned())
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::from_iter([Some(Literal::string(carrier))]))
            .record_count(rows)
            .file_size_in_bytes(1000)
            .build()
            .unwrap();
        let fact = file_fact(&file, carrier_partition(carrier)).unwrap();
        AddedFile { fact, file: Arc::new(file), spec_id: SpecId(0), age: FileAge::Inherited }
    }

    /// Ids that the crate's scan finds in a snapshot of the table, sorted.
    pub async fn ids(&self, snapshot: SnapshotId) -> Vec<i64> {
        let table = Table::builder()
            .file_io(self.table.file_io.clone())
            .identifier(TableIdent::from_strs(["nyc", "flights"]).unwrap())
            .metadata_location(&self.table.metadata_location)
            .metadata(self.table.metadata.clone())
            .runtime(Runtime::try_current().unwrap())
            .build()
            .unwrap();
        let scan = table.scan().snapshot_id(snapshot.0).select(["id"]).build().unwrap();
        let batches: Vec<RecordBatch> = scan.to_arrow().await.unwrap().try_collect().await.unwrap();
        let mut ids = Vec::new();
        for batch in &batches {
            let column: &Int64Array = batch.column(0).as_any().downcast_ref().unwrap();
            ids.extend(column.values().iter().copied());
        }
        ids.sort_unstable();
        ids
    }

    /// The snapshot's manifests as they stand on disk.
    pub fn manifests_on_disk(&self, manifest_list: &str) -> Vec<ManifestFile> {
        let bytes = std::fs::read(manifest_list).unwrap();
        let version = self.table.metadata.format_version();
        let list = ManifestList::parse_with_version(&bytes, version).unwrap();
        list.consume_entries().into_iter().collect()
    }

    /// Entries of a manifest as they stand on disk, nothing inherited.
    pub fn entries_on_disk(&self, manifest: &ManifestFile) -> Vec<ManifestEntryRef> {
        Manifest::parse_avro(&std::fs::read(&manifest.manifest_path).unwrap()).unwrap().into_parts().0
    }

    pub fn metadata_files(&self) -> BTreeSet<PathBuf> {
        let folder = self.dir.path().join("flights/metadata");
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// A snapshot on `parent` that adds one position-delete file, as an engine would write it.
    pub async fn delete_snapshot(&self, id: i64, parent: &SnapshotFact, path: &str) -> NewSnapshot {
        let metadata = &self.table.metadata;
        let folder = format!("{}/metadata", metadata.location());
        let sequence = metadata.last_sequence_number() + 1;
        let output = self.table.file_io.new_output(format!("{folder}/deletes-{id}.avro")).unwrap();
        let spec = metadata.default_partition_spec().as_ref().clone();
        let mut writer =
            ManifestWriterBuilder::new(output, Some(id), metadata.current_schema().clone(), spec)
                .build_v2_deletes();
        let file = DataFileBuilder::default()
            .content(DataContentType::PositionDeletes)
            .file_path(path.to_owned())
            .file_format(DataFileFormat::Parquet)
            .partition(Struct::from_iter([Some(Literal::string("UA"))]))
            .record_count(1)
            .file_size_in_bytes(100)
            .build()
            .unwrap();
        writer.add_file(file, -1).unwrap();
        let deletes = writer.write_manifest_file().await.unwrap();
        let manifest_list = format!("{folder}/snap-{id}-by-engine.avro");
        let output = self.table.file_io.new_output(&manifest_list).unwrap().writer().await.unwrap();
        let mut list = ManifestListWriter::v2(output, id, Some(parent.id.0), sequence);
        let before = self.manifests_on_disk(&parent.manifest_list);
        list.add_manifests(std::iter::once(deletes).chain(before)).unwrap();
        list.close().await.unwrap();
        NewSnapshot {
            id: SnapshotId(id),
            parent: Some(parent.id),
            sequence_number: sequence,
            timestamp_ms: self.table.facts.last_updated_ms + 1,
            manifest_list,
            schema_id: self.table.facts.current_schema_id,
            label: "delete".to_owned(),
            summary: BTreeMap::new(),
            row_range: None,
        }
    }
}

pub(super) fn carrier_partition(carrier: &str) -> Arc<Partition> {
    Arc::new(Partition {
        spec_id: SpecId(0),
        fields: vec![PartitionField {
            source_id: 2,
            name: "carrier".to_owned(),
            transform: "identity".to_owned(),
            value: Some(carrier.to_owned()),
        }],
    })
}

pub(super) fn batch(rows: &[(i64, &str)]) -> RecordBatch {
    let schema = ArrowSchema::new(vec![
        Field::new("carrier", DataType::Utf8, true),
        Field::new("id", DataType::Int64, true),
    ]);
    let carriers: ArrayRef = Arc::new(StringArray::from_iter_values(rows.iter().map(|(_, carrier)| carrier)));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|(id, _)| *id)));
    RecordBatch::try_new(Arc::new(schema), vec![carriers, ids]).unwrap()
}

/// A change that only adds.
pub(super) fn append(id: i64, add: impl IntoIterator<Item = impl Into<AddedFile>>) -> SnapshotChange {
    SnapshotChange {
        id: SnapshotId(id),
        label: "append".to_owned(),
        add: add.into_iter().map(Into::into).collect(),
        remove: BTreeSet::new(),
        add_deletes: Vec::new(),
        remove_deletes: BTreeSet::new(),
        summary: BTreeMap::new(),
        // A clock that stands still: timestamps then follow the table's (rule N3).
        now_ms: 0,
        schema_id: SchemaId(0),
    }
}

/// A change that only removes.
pub(super) fn delete<'a>(id: i64, paths: impl IntoIterator<Item = &'a Arc<str>>) -> SnapshotChange {
    let none: [AddedFile; 0] = [];
    SnapshotChange {
        label: "delete".to_owned(),
        remove: paths.into_iter().cloned().collect(),
        ..append(id, none)
    }
}

fn crate_snapshot(snapshot: &NewSnapshot) -> Snapshot {
    let operation = match snapshot.label.as_str() {
        "append" => Operation::Append,
        "delete" => Operation::Delete,
        "replace" => Operation::Replace,
        _ => Operation::Overwrite,
    };
    let additional_properties: HashMap<String, String> = snapshot.summary.clone().into_iter().collect();
    let builder = Snapshot::builder()
        .with_snapshot_id(snapshot.id.0)
        .with_parent_snapshot_id(snapshot.parent.map(|p| p.0))
        .with_sequence_number(snapshot.sequence_number)
        .with_timestamp_ms(snapshot.timestamp_ms)
        .with_manifest_list(snapshot.manifest_list.clone())
        .with_schema_id(snapshot.schema_id.0)
        .with_summary(Summary { operation, additional_properties });
    match snapshot.row_range {
        Some(range) => builder.with_row_range(range.first_row_id as u64, range.added_rows as u64).build(),
        None => builder.build(),
    }
}

pub(super) fn fact_of(snapshot: &Snapshot) -> SnapshotFact {
    SnapshotFact {
        id: SnapshotId(snapshot.snapshot_id()),
        parent: snapshot.parent_snapshot_id().map(SnapshotId),
        sequence_number: snapshot.sequence_number(),
        timestamp_ms: snapshot.timestamp_ms(),
        schema_id: snapshot.schema_id().map(SchemaId),
        manifest_list: snapshot.manifest_list().to_owned(),
        label: snapshot.summary().operation.as_str().to_owned(),
        summary: snapshot.summary().additional_properties.clone().into_iter().collect(),
    }
}

pub(super) fn fact_of_new(snapshot: &NewSnapshot) -> SnapshotFact {
    fact_of(&crate_snapshot(snapshot))
}

/// An empty table of any structure.
pub(super) fn table_of(
    schema: Schema,
    spec: UnboundPartitionSpec,
    order: iceberg::spec::SortOrder,
) -> (TempDir, LoadedTable) {
    let dir = tempfile::tempdir().unwrap();
    let creation = TableCreation::builder()
        .name("any".to_owned())
        .location(dir.path().join("any").to_str().unwrap().to_owned())
        .schema(schema)
        .partition_spec(spec)
        .sort_order(order)
        .format_version(FormatVersion::V2)
        .build();
    let metadata = TableMetadataBuilder::from_table_creation(creation).unwrap().build().unwrap().metadata;
    (dir, loaded(metadata, BTreeMap::new()))
}

fn loaded(metadata: TableMetadata, refs: BTreeMap<RefName, RefFact>) -> LoadedTable {
    let facts = TableFacts {
        name: "nyc.flights".parse::<TableName>().unwrap(),
        uuid: TableUuid::new(metadata.uuid().to_string()),
        format_version: metadata.format_version() as u8,
        location: metadata.location().to_owned(),
        last_sequence_number: metadata.last_sequence_number(),
        last_updated_ms: metadata.last_updated_ms(),
        next_row_id: (metadata.format_version() == FormatVersion::V3)
            .then(|| i64::try_from(metadata.next_row_id()).unwrap()),
        current_schema_id: SchemaId(metadata.current_schema_id()),
        default_spec_id: SpecId(metadata.default_partition_spec_id()),
        default_sort_order_id: SortOrderId(metadata.default_sort_order_id()),
        schemas: BTreeMap::new(),
        specs: BTreeMap::new(),
        sort_orders: BTreeMap::new(),
        refs,
        snapshots: SnapshotGraph::new(metadata.snapshots().map(|snapshot| fact_of(snapshot))),
        snapshot_log: Vec::new(),
        properties: metadata.properties().clone().into_iter().collect(),
    };
    LoadedTable {
        metadata_location: format!("{}/metadata/00000-{}.metadata.json", facts.location, facts.uuid),
        facts,
        document: document(&metadata),
        metadata: Arc::new(metadata),
        file_io: FileIOBuilder::new(Arc::new(LocalFsStorageFactory)).build(),
    }
}
