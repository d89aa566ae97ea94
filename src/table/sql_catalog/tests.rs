use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};

use iceberg::spec::{NestedField, PrimitiveType, Schema, Type, UnboundPartitionSpec};
use mergeberg_kernel::commit::{NewSnapshot, RefRole, RowRange};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, TableUuid};

use super::super::create::TableDefinition;
use super::*;

/// A catalog in a folder of its own, with the table `nyc.flights`, and a clock that is set by hand.
pub(super) struct World {
    folder: tempfile::TempDir,
    pub(super) catalog: SqlCatalog,
    clock: Arc<AtomicI64>,
}

pub(super) fn flights() -> TableName {
    "nyc.flights".parse().unwrap()
}

fn schema() -> Schema {
    let id = NestedField::required(1, "id", Type::Primitive(PrimitiveType::Long));
    Schema::builder().with_fields([Arc::new(id)]).build().unwrap()
}

impl World {
    async fn new() -> Self {
        Self::with_properties(&[]).await
    }

    pub(super) async fn with_properties(properties: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(AtomicI64::new(1_700_000_000_000));
        let catalog = SqlCatalog::create(
            "lake",
            &database(&folder),
            &format!("file://{}", folder.path().join("warehouse").display()),
            clock_of(&clock),
        )
        .await
        .unwrap();
        catalog.create_namespace("nyc").await.unwrap();
        let properties: HashMap<String, String> =
            properties.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        catalog
            .create_table(&flights(), schema(), UnboundPartitionSpec::builder().build(), properties)
            .await
            .unwrap();
        Self { folder, catalog, clock }
    }

    /// Another process's catalog on the same file.
    pub(super) async fn other(&self) -> SqlCatalog {
        let warehouse = self.catalog.warehouse.clone();
        SqlCatalog::open("lake", &database(&self.folder), &warehouse, clock_of(&self.clock)).await.unwrap()
    }

    async fn table(&self) -> Arc<LoadedTable> {
        self.catalog.load(&flights()).await.unwrap()
    }

    pub(super) fn metadata_files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(self.folder.path().join("warehouse/nyc/flights/metadata"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
                .collect();
        files.sort();
        files
    }

    async fn sql(&self, statement: &'static str) {
        let uri = format!("sqlite:{}", database(&self.folder));
        let pool = sqlx::SqlitePool::connect(&uri).await.unwrap();
        sqlx::query(statement).execute(&pool).await.unwrap();
        pool.close().await;
    }
}

fn database(folder: &tempfile::TempDir) -> String {
    folder.path().join("catalog.db").display().to_string()
}

fn clock_of(clock: &Arc<AtomicI64>) -> Clock {
    let clock = clock.clone();
    Arc::new(move || clock.load(Ordering::SeqCst))
}

fn snapshot(id: i64, parent: Option<i64>, sequence_number: i64) -> Update {
    Update::AddSnapshot(NewSnapshot {
        id: SnapshotId(id),
        parent: parent.map(SnapshotId),
        sequence_number,
        timestamp_ms: 1_700_000_000_000 + id,
        manifest_list: format!("file:///nowhere/s{id}.avro"),
        schema_id: SchemaId(0),
        label: "append".to_owned(),
        summary: Default::default(),
        row_range: None,
    })
}

fn set(name: &str, at: i64) -> Update {
    Update::SetRef(RefFact {
        name: RefName::new(name),
        snapshot_id: SnapshotId(at),
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    })
}

fn at(name: &str, at: Option<i64>, role: RefRole) -> Requirement {
    Requirement::RefAt { name: RefName::new(name), at: at.map(SnapshotId), role }
}

fn landed(outcome: CommitOutcome) -> Arc<LoadedTable> {
    match outcome {
        CommitOutcome::Landed(table) => table,
        other => panic!("not landed: {other:?}"),
    }
}

/// Commits snapshot 1 as the head of main.
pub(super) async fn first_landing(catalog: &SqlCatalog) -> Arc<LoadedTable> {
    let base = catalog.load(&flights()).await.unwrap();
    landed(catalog.commit(&base, &[], vec![snapshot(1, None, 1), set("main", 1)]).await)
}

fn file_name(location: &str) -> &str {
    location.rsplit('/').next().unwrap()
}

#[tokio::test]
async fn a_new_table_is_empty_version_2_and_dated_by_our_clock() {
    let world = World::new().await;

    let table = world.table().await;

    assert_eq!(table.facts.format_version, 2);
    assert_eq!(table.facts.last_updated_ms, 1_700_000_000_000);
    assert_eq!(table.facts.head(&RefName::main()), None);
    assert!(file_name(&table.metadata_location).starts_with("00000-"));
    assert_eq!(world.catalog.list_tables().await.unwrap(), [flights()]);
}

#[tokio::test]
async fn a_commit_moves_the_pointer_to_the_next_file() {
    let world = World::new().await;
    let before = world.table().await;
    world.clock.store(1_800_000_000_000, Ordering::SeqCst);

    let after = first_landing(&world.catalog).await;

    assert!(file_name(&after.metadata_location).starts_with("00001-"));
    assert_eq!(after.facts.head(&RefName::main()), Some(SnapshotId(1)));
    assert_eq!(after.facts.last_updated_ms, 1_800_000_000_000);
    assert_eq!(after.metadata.current_snapshot_id(), Some(1));
    let seen_by_others = world.other().await.load(&flights()).await.unwrap();
    assert_eq!(seen_by_others.facts, after.facts);
    let (previous,): (String,) = sqlx::query_as("SELECT previous_metadata_location FROM iceberg_tables")
        .fetch_one(&sqlx::SqlitePool::connect(&database(&world.folder)).await.unwrap())
        .await
        .unwrap();
    assert_eq!(previous, before.metadata_location);
}

#[tokio::test]
async fn an_unchanged_table_is_loaded_once() {
    let world = World::new().await;
    let landed = first_landing(&world.catalog).await;

    let again = world.table().await;

    assert!(Arc::ptr_eq(&landed, &again));
}

#[tokio::test]
async fn o28_an_empty_main_can_be_required() {
    let world = World::new().await;
    let base = world.table().await;
    let empty_main = [at("main", None, RefRole::Target)];

    let first = world.catalog.commit(&base, &empty_main, vec![snapshot(1, None, 1), set("main", 1)]).await;
    let base = landed(first);
    let second = world.catalog.commit(&base, &empty_main, vec![snapshot(2, None, 2), set("main", 2)]).await;

    assert!(matches!(second, CommitOutcome::HeadMoved), "{second:?}");
}

#[tokio::test]
async fn every_failed_requirement_has_its_outcome() {
    let world = World::new().await;
    let base = first_landing(&world.catalog).await;
    let commit =
        async |requirement: Requirement| world.catalog.commit(&base, &[requirement], vec![set("b", 1)]).await;

    assert!(matches!(commit(at("main", Some(9), RefRole::Target)).await, CommitOutcome::HeadMoved));
    assert!(matches!(commit(at("tmp", Some(1), RefRole::Fence)).await, CommitOutcome::Fenced));
    assert!(
        matches!(commit(at("a", Some(1), RefRole::Source)).await, CommitOutcome::SourceMoved(name) if name.0 == "a")
    );
    assert!(matches!(commit(at("main", None, RefRole::NewName)).await, CommitOutcome::NameTaken(_)));
    for requirement in [
        Requirement::TableUuid(TableUuid::new("other")),
        Requirement::CurrentSchema(SchemaId(9)),
        Requirement::DefaultSpec(mergeberg_kernel::ids::SpecId(9)),
        Requirement::DefaultSortOrder(mergeberg_kernel::ids::SortOrderId(9)),
    ] {
        assert!(matches!(commit(requirement).await, CommitOutcome::TableChanged(_)));
    }
    assert_eq!(world.metadata_files().len(), 2, "nothing was written for them");
    assert!(commit_holds(&world, &base).await, "and when all hold, it lands");
}

async fn commit_holds(world: &World, base: &LoadedTable) -> bool {
    let requirements = [
        Requirement::TableUuid(base.facts.uuid.clone()),
        Requirement::CurrentSchema(base.facts.current_schema_id),
        Requirement::DefaultSpec(base.facts.default_spec_id),
        Requirement::DefaultSortOrder(base.facts.default_sort_order_id),
        at("main", Some(1), RefRole::Target),
        at("b", None, RefRole::NewName),
    ];
    let outcome = world.catalog.commit(base, &requirements, vec![set("b", 1)]).await;
    matches!(outcome, CommitOutcome::Landed(_))
}

#[tokio::test]
async fn a_stale_base_is_told_by_requirement_or_as_a_moved_pointer() {
    let world = World::new().await;
    let base = first_landing(&world.catalog).await;
    let other = world.other().await;
    let foreign = other.load(&flights()).await.unwrap();
    landed(other.commit(&foreign, &[], vec![snapshot(2, Some(1), 2), set("main", 2), set("a", 1)]).await);

    let head = [at("main", Some(1), RefRole::Target)];
    let moved = world.catalog.commit(&base, &head, vec![set("b", 1)]).await;
    let no_requirement_broke = world.catalog.commit(&base, &[], vec![set("b", 1)]).await;

    assert!(matches!(moved, CommitOutcome::HeadMoved), "{moved:?}");
    assert!(matches!(no_requirement_broke, CommitOutcome::PointerMoved), "{no_requirement_broke:?}");
}

/// Lets another process commit between the metadata file and the swap.
struct Rival(SqlCatalog);

impl CommitHook for Rival {
    fn before_swap(&self) {
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                let base = self.0.load(&flights()).await.unwrap();
                landed(self.0.commit(&base, &[], vec![set("rival", 1)]).await);
            });
        });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o27_no_row_changed_is_a_moved_pointer_and_leaves_no_file() {
    let mut world = World::new().await;
    let base = first_landing(&world.catalog).await;
    let rival = Arc::new(Rival(world.other().await));
    world.catalog = world.other().await.with_hook(rival);

    let outcome = world.catalog.commit(&base, &[], vec![set("mine", 1)]).await;

    assert!(matches!(outcome, CommitOutcome::PointerMoved), "{outcome:?}");
    let table = world.table().await;
    assert!(table.facts.refs.contains_key(&RefName::new("rival")));
    assert!(!table.facts.refs.contains_key(&RefName::new("mine")));
    assert_eq!(world.metadata_files().len(), 3, "created, first landing, rival");
}

struct LostAnswer;

impl CommitHook for LostAnswer {
    fn loses_answer(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn an_unknown_outcome_keeps_the_file_that_the_catalog_may_point_to() {
    let mut world = World::new().await;
    let base = first_landing(&world.catalog).await;
    world.catalog = world.other().await.with_hook(Arc::new(LostAnswer));

    let outcome = world.catalog.commit(&base, &[], vec![set("b", 1)]).await;

    assert!(matches!(outcome, CommitOutcome::Unknown(_)), "{outcome:?}");
    assert!(world.table().await.facts.refs.contains_key(&RefName::new("b")));
}

#[tokio::test]
async fn a_sequence_number_taken_by_another_branch_asks_for_new_candidates() {
    let world = World::new().await;
    let base = first_landing(&world.catalog).await;

    let outcome = world.catalog.commit(&base, &[], vec![snapshot(2, Some(1), 1)]).await;

    assert!(matches!(&outcome, CommitOutcome::TableChanged(text) if text.contains("sequence number 1")));
}

#[tokio::test]
async fn row_ids_taken_by_another_branch_ask_for_new_candidates() {
    let world = World::new().await;
    let name: TableName = "nyc.v3".parse().unwrap();
    let definition = TableDefinition::default().column("id", "long", true).format_version(3);
    let base = world.catalog.define_table(&name, &definition).await.unwrap();
    assert_eq!((base.facts.format_version, base.facts.next_row_id), (3, Some(0)));
    let numbered = |id, first_row_id| match snapshot(id, None, id) {
        Update::AddSnapshot(new) => {
            let row_range = Some(RowRange { first_row_id, added_rows: 5 });
            Update::AddSnapshot(NewSnapshot { row_range, ..new })
        }
        other => other,
    };

    let table = landed(world.catalog.commit(&base, &[], vec![numbered(1, 0)]).await);
    assert_eq!(table.facts.next_row_id, Some(5));
    for late in [numbered(2, 0), snapshot(2, None, 2)] {
        let outcome = world.catalog.commit(&table, &[], vec![late]).await;
        assert!(matches!(outcome, CommitOutcome::TableChanged(_)), "{outcome:?}");
    }
    let table = landed(world.catalog.commit(&table, &[], vec![numbered(2, 5)]).await);
    assert_eq!(world.other().await.load(&name).await.unwrap().facts, table.facts);
    let definition = TableDefinition::default().column("id", "long", true).format_version(1);
    let refused = world.catalog.define_table(&"nyc.v1".parse().unwrap(), &definition).await.unwrap_err();
    assert!(refused.to_string().contains("format version 1"), "{refused}");
}

#[tokio::test]
async fn a_catalog_without_the_type_column_works_alike() {
    let world = World::new().await;
    world.sql("ALTER TABLE iceberg_tables DROP COLUMN iceberg_type").await;
    let old = world.other().await;

    let table = first_landing(&old).await;
    let name: TableName = "nyc.weather".parse().unwrap();
    old.create_table(&name, schema(), UnboundPartitionSpec::builder().build(), HashMap::new()).await.unwrap();

    assert_eq!(table.facts.head(&RefName::main()), Some(SnapshotId(1)));
    assert_eq!(old.list_tables().await.unwrap(), [flights(), name]);
}

#[tokio::test]
async fn views_are_no_tables() {
    let world = World::new().await;
    world.sql("UPDATE iceberg_tables SET iceberg_type = 'VIEW'").await;

    assert!(world.catalog.list_tables().await.unwrap().is_empty());
    assert!(matches!(world.catalog.load(&flights()).await, Err(CatalogError::NotFound(_))));
}

#[tokio::test]
async fn a_read_only_catalog_is_told_and_leaves_no_file() {
    let world = World::new().await;
    let base = first_landing(&world.catalog).await;
    let uri = format!("sqlite:{}?mode=ro", database(&world.folder));
    let read_only =
        SqlCatalog::open("lake", &uri, &world.catalog.warehouse, clock_of(&world.clock)).await.unwrap();

    let outcome = read_only.commit(&base, &[], vec![set("b", 1)]).await;

    assert!(matches!(outcome, CommitOutcome::Refused(CatalogError::ReadOnly(_))), "{outcome:?}");
    assert_eq!(world.metadata_files().len(), 2);
}

#[tokio::test]
async fn a_file_that_was_replaced_under_us_takes_no_commit() {
    let world = World::new().await;
    let base = first_landing(&world.catalog).await;
    let path = database(&world.folder);
    std::fs::copy(&path, format!("{path}.backup")).unwrap();
    std::fs::rename(format!("{path}.backup"), &path).unwrap();

    let outcome = world.catalog.commit(&base, &[], vec![set("b", 1)]).await;

    let CommitOutcome::Refused(error) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("moved or replaced"), "{error}");
}

#[tokio::test]
async fn a_missing_foreign_or_damaged_catalog_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicI64::new(0));
    let open = async |file: &Path| {
        let uri = file.display().to_string();
        match SqlCatalog::open("lake", &uri, "/w", clock_of(&clock)).await {
            Ok(_) => panic!("{uri} opened"),
            Err(error) => error.to_string(),
        }
    };

    let missing = folder.path().join("missing.db");
    assert!(open(&missing).await.contains("missing.db does not exist"));
    let damaged = folder.path().join("damaged.db");
    std::fs::write(&damaged, "no database, but long enough to be looked at. ".repeat(40)).unwrap();
    let message = open(&damaged).await;
    assert!(message.contains("damaged.db") && message.contains("backup"), "{message}");
    let empty = folder.path().join("empty.db");
    std::fs::write(&empty, "").unwrap();
    assert!(open(&empty).await.contains("not an Iceberg catalog"));
}

#[tokio::test]
async fn a_missing_metadata_file_is_named() {
    let world = World::new().await;
    let location = world.table().await.metadata_location.clone();
    std::fs::remove_file(location.strip_prefix("file://").unwrap()).unwrap();

    let error = world.other().await.load(&flights()).await.unwrap_err();

    assert!(matches!(&error, CatalogError::Unreadable { .. }), "{error}");
    assert!(error.to_string().contains(&location));
}

#[tokio::test]
async fn tables_are_created_once_in_namespaces_that_exist() {
    let world = World::new().await;
    let create = async |name: &str| {
        let spec = UnboundPartitionSpec::builder().build();
        world.catalog.create_table(&name.parse().unwrap(), schema(), spec, HashMap::new()).await
    };

    assert!(create("nyc.flights").await.unwrap_err().to_string().contains("already"));
    assert!(create("nowhere.t").await.unwrap_err().to_string().contains("no namespace 'nowhere'"));
    assert_eq!(world.metadata_files().len(), 1);
}

#[tokio::test]
async fn a_table_is_renamed_dropped_and_registered_again() {
    let world = World::new().await;
    let table = first_landing(&world.catalog).await;
    let renamed: TableName = "nyc.arrivals".parse().unwrap();

    world.catalog.rename_table(&flights(), &renamed).await.unwrap();
    assert!(matches!(world.catalog.load(&flights()).await, Err(CatalogError::NotFound(_))));
    let gone = world.catalog.commit(&table, &[], vec![set("b", 1)]).await;
    assert!(matches!(gone, CommitOutcome::Refused(CatalogError::NotFound(_))), "{gone:?}");
    assert_eq!(world.catalog.load(&renamed).await.unwrap().facts.uuid, table.facts.uuid);

    world.catalog.drop_table(&renamed).await.unwrap();
    assert!(world.catalog.list_tables().await.unwrap().is_empty());
    let back = world.catalog.register_table(&flights(), &table.metadata_location).await.unwrap();
    assert_eq!(back.facts, table.facts);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_committers_lose_no_update() {
    const WRITERS: i64 = 4;
    const COMMITS: i64 = 5;
    let world = World::new().await;
    first_landing(&world.catalog).await;

    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let catalog = world.other().await;
        writers.push(tokio::spawn(async move {
            for commit in 0..COMMITS {
                let name = format!("w{writer}/{commit}");
                loop {
                    let base = catalog.load(&flights()).await.unwrap();
                    match catalog.commit(&base, &[], vec![set(&name, 1)]).await {
                        CommitOutcome::Landed(_) => break,
                        CommitOutcome::PointerMoved => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
        }));
    }
    for writer in writers {
        writer.await.unwrap();
    }

    let table = world.table().await;
    assert_eq!(table.facts.refs.len() as i64, 1 + WRITERS * COMMITS);
    assert_eq!(world.metadata_files().len() as i64, 2 + WRITERS * COMMITS, "losers left no file");
}
