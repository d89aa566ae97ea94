//! A small real table for tests: orders, partitioned by day, with snapshots that are not committed.
//!
//! Here because it needs the crate's schema types, which nothing outside `table` may import.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use datafusion::arrow::array::{
    ArrayRef, Decimal128Array, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray,
};
use iceberg::spec::{
    DataFile, FormatVersion, ManifestContentType, ManifestFile, ManifestList, ManifestListWriter,
    ManifestWriterBuilder, NestedField, PrimitiveType, Schema, StructType, Transform, Type,
    UnboundPartitionSpec,
};
use mergeberg_kernel::change::DeleteKey;
use mergeberg_kernel::commit::NewSnapshot;
use mergeberg_kernel::ids::{SchemaId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::structure::{FieldFact, SchemaFact};

use super::data_files::DataFileWriter;
use super::loaded::LoadedTable;
use super::manifests::{FileScope, LiveFile, LiveFiles, ManifestStore};
use super::snapshot_writer::{AddedFile, SnapshotChange, SnapshotWriter};
use super::sql_catalog::SqlCatalog;

/// Memory of the manifest cache, bytes.
const CACHE_BYTES: usize = 16 * 1024 * 1024;

/// One order. `..order(7)` fills what a test does not care about.
#[derive(Clone, Debug)]
pub struct Order {
    pub id: Option<i64>,
    pub region: Option<&'static str>,
    pub day: i32,
    pub amount: Option<f64>,
    /// Unscaled, two decimal places.
    pub price: Option<i128>,
    pub status: Option<&'static str>,
}

pub fn order(id: i64) -> Order {
    Order {
        id: Some(id),
        region: Some("eu"),
        day: 1,
        amount: Some(1.0),
        price: Some(100),
        status: Some("paid"),
    }
}

/// Orders with these ids, all of one day.
pub fn orders(day: i32, ids: &[i64]) -> Vec<Order> {
    ids.iter().map(|id| Order { day, ..order(*id) }).collect()
}

pub struct OrdersLab {
    _folder: tempfile::TempDir,
    catalog: SqlCatalog,
    pub table: LoadedTable,
    pub store: ManifestStore,
    next_id: i64,
}

fn optional(id: i32, name: &str, primitive: PrimitiveType) -> Arc<NestedField> {
    NestedField::optional(id, name, Type::Primitive(primitive)).into()
}

fn fields() -> Vec<Arc<NestedField>> {
    vec![
        optional(1, "order_id", PrimitiveType::Long),
        optional(2, "region", PrimitiveType::String),
        optional(3, "day", PrimitiveType::Int),
        optional(4, "amount", PrimitiveType::Double),
        optional(5, "price", PrimitiveType::Decimal { precision: 38, scale: 2 }),
        optional(6, "status", PrimitiveType::String),
    ]
}

impl OrdersLab {
    pub async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::create_dir(at("warehouse")).unwrap();
        let catalog = SqlCatalog::create("lake", &at("catalog.db"), &at("warehouse"), Arc::new(|| 1_000))
            .await
            .unwrap();
        catalog.create_namespace("shop").await.unwrap();
        let table = create(&catalog, "shop.orders", fields()).await;
        Self { _folder: folder, catalog, table, store: ManifestStore::new(CACHE_BYTES), next_id: 0 }
    }

    /// Another table of the same shape, in the same warehouse.
    pub async fn another(&self, name: &str) -> LoadedTable {
        create(&self.catalog, name, fields()).await
    }

    /// A snapshot on `parent` that adds one file a day and removes files; it is only known to
    /// `self.table` and to storage.
    pub async fn snapshot(
        &mut self,
        parent: Option<SnapshotId>,
        rows: &[Order],
        remove: &[Arc<str>],
    ) -> SnapshotId {
        let mut table = self.table.clone();
        let id = self.snapshot_of(&mut table, parent, rows, remove).await;
        self.table = table;
        id
    }

    pub async fn snapshot_of(
        &mut self,
        table: &mut LoadedTable,
        parent: Option<SnapshotId>,
        rows: &[Order],
        remove: &[Arc<str>],
    ) -> SnapshotId {
        let batches = if rows.is_empty() { Vec::new() } else { vec![batch(rows)] };
        // Written under the schema as it was at first: the lab's rows have no other columns.
        self.snapshot_of_batches(table, parent, SchemaId(0), batches, remove).await
    }

    /// The same with rows of any schema of the table.
    pub async fn snapshot_of_batches(
        &mut self,
        table: &mut LoadedTable,
        parent: Option<SnapshotId>,
        schema: SchemaId,
        batches: Vec<RecordBatch>,
        remove: &[Arc<str>],
    ) -> SnapshotId {
        self.next_id += 1;
        let id = SnapshotId(self.next_id);
        let mut add: Vec<AddedFile> = Vec::new();
        if !batches.is_empty() {
            let files = DataFileWriter::write_batches(table, schema, batches).await.unwrap();
            add.extend(files.into_iter().map(AddedFile::from));
        }
        let parent = parent.and_then(|id| table.facts.snapshots.get(id)).cloned();
        let label = if remove.is_empty() { "append" } else { "overwrite" };
        let change = SnapshotChange {
            id,
            label: label.to_owned(),
            add,
            remove: remove.iter().cloned().collect::<BTreeSet<_>>(),
            add_deletes: Vec::new(),
            remove_deletes: BTreeSet::new(),
            summary: BTreeMap::new(),
            now_ms: 1_000,
            schema_id: table.facts.current_schema_id,
        };
        let mut writer = SnapshotWriter::on(&self.store, table, parent.as_ref()).await.unwrap();
        let written = writer.add(change).await.unwrap();
        table.facts.last_sequence_number = written.sequence_number;
        table.facts.snapshots.insert(fact(written));
        id
    }

    /// A snapshot on `parent` that adds delete files, as an engine would write it, and removes others.
    pub async fn row_delta(
        &mut self,
        parent: SnapshotId,
        add: &[Arc<DataFile>],
        remove: &[DeleteKey],
    ) -> SnapshotId {
        self.next_id += 1;
        let id = SnapshotId(self.next_id);
        let metadata = self.table.metadata.clone();
        let io = self.table.file_io.clone();
        let before = self.live_deletes(parent).await;
        let parent = self.table.facts.snapshots.get(parent).unwrap().clone();
        let folder = format!("{}/metadata", metadata.location());
        let sequence_number = self.table.facts.last_sequence_number + 1;
        let output = io.new_output(&parent.manifest_list).unwrap().to_input_file();
        let list =
            ManifestList::parse_with_version(&output.read().await.unwrap(), FormatVersion::V2).unwrap();
        let mut manifests: Vec<ManifestFile> = list.consume_entries().into_iter().collect();
        manifests.retain(|manifest| manifest.content == ManifestContentType::Data);

        for spec in metadata.partition_specs_iter() {
            let of_spec = |file: &DataFile| file.partition().fields().len() == spec.fields().len();
            let output = io.new_output(format!("{folder}/deletes-{id}-{}.avro", spec.spec_id())).unwrap();
            // Partition values are of the types that the first schema gave them.
            let schema = metadata.schema_by_id(0).unwrap().clone();
            let mut writer = ManifestWriterBuilder::new(output, Some(id.0), schema, spec.as_ref().clone())
                .build_v2_deletes();
            for file in add.iter().filter(|file| of_spec(file)) {
                writer.add_file(file.as_ref().clone(), -1).unwrap();
            }
            for old in before.iter().filter(|old| of_spec(&old.file)) {
                let (file, sequence) = (old.file.as_ref().clone(), old.sequence_number);
                let file_sequence = Some(old.file_sequence_number);
                if remove.contains(&old.fact.key()) {
                    writer.add_delete_file(file, sequence, file_sequence).unwrap();
                } else {
                    writer.add_existing_file(file, old.added_by.0, sequence, file_sequence).unwrap();
                }
            }
            manifests.push(writer.write_manifest_file().await.unwrap());
        }
        let manifest_list = format!("{folder}/snap-{id}-by-engine.avro");
        let output = io.new_output(&manifest_list).unwrap().writer().await.unwrap();
        let mut list = ManifestListWriter::v2(output, id.0, Some(parent.id.0), sequence_number);
        list.add_manifests(manifests.into_iter()).unwrap();
        list.close().await.unwrap();
        self.table.facts.last_sequence_number = sequence_number;
        self.table.facts.snapshots.insert(SnapshotFact {
            id,
            parent: Some(parent.id),
            sequence_number,
            timestamp_ms: parent.timestamp_ms + 1,
            schema_id: parent.schema_id,
            manifest_list,
            label: "delete".to_owned(),
            summary: BTreeMap::new(),
        });
        id
    }

    /// Makes unpartitioned the table's second spec, for deletes that reach everything.
    pub fn add_unpartitioned_spec(&mut self) {
        let builder = (*self.table.metadata).clone().into_builder(None);
        let builder = builder.add_partition_spec(UnboundPartitionSpec::builder().build()).unwrap();
        self.table.metadata = Arc::new(builder.build().unwrap().metadata);
    }

    pub async fn live_deletes(&self, snapshot: SnapshotId) -> Vec<LiveFile> {
        self.live_files(snapshot).await.deletes
    }

    pub async fn live_files(&self, snapshot: SnapshotId) -> LiveFiles {
        let fact = self.table.facts.snapshots.get(snapshot).unwrap();
        self.store.live_files(&self.table, fact, &FileScope::Table).await.unwrap()
    }

    pub async fn live(&self, snapshot: SnapshotId) -> Vec<LiveFile> {
        self.live_files(snapshot).await.data
    }

    /// Paths of the files that are live in `snapshot` and hold rows of `day`.
    pub async fn files_of_day(&self, snapshot: SnapshotId, day: i32) -> Vec<Arc<str>> {
        let value = Some(day.to_string());
        let live = self.live(snapshot).await;
        live.iter()
            .filter(|file| file.fact.partition.fields[0].value == value)
            .map(|file| Arc::clone(&file.fact.path))
            .collect()
    }

    /// The table after DDL: the fields of schema 0 as changed by `edit`, as the current schema.
    pub fn evolve(&mut self, edit: impl FnOnce(&mut Vec<Arc<NestedField>>)) {
        let mut changed = fields();
        edit(&mut changed);
        let schema = Schema::builder().with_fields(changed.clone()).build().unwrap();
        let metadata = (*self.table.metadata).clone();
        let builder = metadata.into_builder(None).add_schema(schema).unwrap();
        let metadata = builder.set_current_schema(-1).unwrap().build().unwrap().metadata;
        let id = SchemaId(metadata.current_schema_id());
        let fact = SchemaFact {
            id,
            fields: changed
                .iter()
                .map(|field| FieldFact {
                    id: field.id,
                    name: field.name.clone(),
                    required: field.required,
                    type_name: field.field_type.to_string(),
                    has_initial_default: false,
                })
                .collect(),
            identifier_field_ids: Vec::new(),
        };
        self.table.facts.schemas.insert(id, fact);
        self.table.facts.current_schema_id = id;
        self.table.metadata = Arc::new(metadata);
    }

    pub fn drop_column(&mut self, name: &str) {
        self.evolve(|fields| fields.retain(|field| field.name != name));
    }

    /// A column that holds two values, `code` (field 8) and `grade` (field 9).
    pub fn add_nested_column(&mut self) {
        self.evolve(|fields| {
            let inner = StructType::new(vec![
                optional(8, "code", PrimitiveType::Int),
                optional(9, "grade", PrimitiveType::String),
            ]);
            fields.push(NestedField::optional(7, "audit", Type::Struct(inner)).into());
        });
    }

    /// `status` and `region`, which have the same type, change places; a column is new, one is wider.
    pub fn reorder_and_add(&mut self) {
        self.evolve(|fields| {
            fields.swap(1, 5);
            fields[2] = optional(3, "day", PrimitiveType::Long);
            fields.push(optional(7, "note", PrimitiveType::String));
        });
    }
}

async fn create(catalog: &SqlCatalog, name: &str, fields: Vec<Arc<NestedField>>) -> LoadedTable {
    let name: TableName = name.parse().unwrap();
    let schema = Schema::builder().with_fields(fields).build().unwrap();
    let spec =
        UnboundPartitionSpec::builder().add_partition_field(3, "day", Transform::Identity).unwrap().build();
    let table = catalog.create_table(&name, schema, spec, HashMap::new()).await.unwrap();
    (*table).clone()
}

fn batch(rows: &[Order]) -> RecordBatch {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("order_id", Arc::new(rows.iter().map(|r| r.id).collect::<Int64Array>())),
        ("region", Arc::new(rows.iter().map(|r| r.region).collect::<StringArray>())),
        ("day", Arc::new(rows.iter().map(|r| Some(r.day)).collect::<Int32Array>())),
        ("amount", Arc::new(rows.iter().map(|r| r.amount).collect::<Float64Array>())),
        (
            "price",
            Arc::new(
                rows.iter()
                    .map(|r| r.price)
                    .collect::<Decimal128Array>()
                    .with_precision_and_scale(38, 2)
                    .unwrap(),
            ),
        ),
        ("status", Arc::new(rows.iter().map(|r| r.status).collect::<StringArray>())),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

fn fact(snapshot: NewSnapshot) -> SnapshotFact {
    SnapshotFact {
        id: snapshot.id,
        parent: snapshot.parent,
        sequence_number: snapshot.sequence_number,
        timestamp_ms: snapshot.timestamp_ms,
        schema_id: Some(snapshot.schema_id),
        manifest_list: snapshot.manifest_list,
        label: snapshot.label,
        summary: snapshot.summary,
    }
}
