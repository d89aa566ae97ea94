//! One suite for every catalog: what the queue relies on, told once and run over each of them. A catalog that
//! passes it may be landed on.

mod several_tables;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use mergeberg::table::catalog::{Catalog, CatalogError, CommitOutcome};
use mergeberg::table::create::TableDefinition;
use mergeberg::table::loaded::LoadedTable;
use mergeberg::table::sql_catalog::{DatabasePlace, SqlCatalog};
use mergeberg_kernel::commit::{NewSnapshot, RefRole, Requirement, RowRange, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, SortOrderId, SpecId, TableName, TableUuid};
use tempfile::TempDir;

use crate::support::child::real_now;
use crate::support::fault_server::{FaultServer, Manners};
use crate::support::polaris::Polaris;
use crate::support::postgres::TestServer;
use crate::support::rest::RestServer;
use crate::support::s3_server::S3Server;
use crate::support::{branch, main_branch};
use several_tables::{
    e7_a_table_can_be_required_without_a_change, o30_a_table_that_moved_meanwhile_moves_none,
    o30_one_requirement_that_fails_moves_none, several_tables_move_together,
    what_cannot_be_applied_to_one_is_applied_to_none,
};

/// One catalog, seen by two clients that share nothing but it.
struct Place {
    catalog: Arc<dyn Catalog>,
    other: Arc<dyn Catalog>,
    making: Making,
    folder: TempDir,
}

/// What makes tables here: the queue itself makes none.
enum Making {
    Sql(Arc<SqlCatalog>),
    SqlOnS3(Arc<SqlCatalog>, S3Server),
    Rest(RestServer),
    Polaris(Polaris),
    Fault(FaultServer),
}

impl Place {
    async fn sqlite() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let uri = folder.path().join("catalog.db").display().to_string();
        let warehouse = format!("file://{}", folder.path().join("warehouse").display());
        let clock = Arc::new(real_now);
        let catalog = Arc::new(SqlCatalog::create("test", &uri, &warehouse, clock.clone()).await.unwrap());
        let other = Arc::new(SqlCatalog::open("test", &uri, &warehouse, clock).await.unwrap());
        Some(Self { catalog: catalog.clone(), other, making: Making::Sql(catalog), folder })
    }

    async fn postgres(server: &TestServer) -> Self {
        let folder = TempDir::new().unwrap();
        let database = DatabasePlace::from(server.database().await);
        let warehouse = format!("file://{}", folder.path().join("warehouse").display());
        let clock = Arc::new(real_now);
        let catalog =
            Arc::new(SqlCatalog::create("test", &database, &warehouse, clock.clone()).await.unwrap());
        let other = Arc::new(SqlCatalog::open("test", &database, &warehouse, clock).await.unwrap());
        Self { catalog: catalog.clone(), other, making: Making::Sql(catalog), folder }
    }

    /// The SQL catalog with its warehouse on S3.
    async fn sqlite_on_s3() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let server = S3Server::start(folder.path());
        let uri = folder.path().join("catalog.db").display().to_string();
        let warehouse = server.warehouse();
        let clock = Arc::new(real_now);
        let catalog = SqlCatalog::create("test", &uri, &warehouse, clock.clone()).await.unwrap();
        let other = SqlCatalog::open("test", &uri, &warehouse, clock).await.unwrap();
        let catalog = Arc::new(catalog.with_storage(server.storage()));
        let other = Arc::new(other.with_storage(server.storage()));
        Some(Self { catalog: catalog.clone(), other, making: Making::SqlOnS3(catalog, server), folder })
    }

    async fn rest_server() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let server = RestServer::start(folder.path())?;
        let (catalog, other) = (Arc::new(server.client().await), Arc::new(server.client().await));
        Some(Self { catalog, other, making: Making::Rest(server), folder })
    }

    async fn polaris() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let polaris = Polaris::over(folder.path()).await?;
        let (catalog, other) = (Arc::new(polaris.client().await), Arc::new(polaris.client().await));
        Some(Self { catalog, other, making: Making::Polaris(polaris), folder })
    }

    async fn fault_server() -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let server = FaultServer::start(folder.path(), Manners::default()).await;
        let (catalog, other) = (Arc::new(server.client().await), Arc::new(server.client().await));
        Some(Self { catalog, other, making: Making::Fault(server), folder })
    }

    /// Where tables are, without a scheme that some write in two ways.
    fn warehouse(&self) -> String {
        match &self.making {
            Making::SqlOnS3(_, server) => server.warehouse(),
            Making::Sql(_) | Making::Rest(_) | Making::Fault(_) | Making::Polaris(_) => {
                self.folder.path().join("warehouse").display().to_string()
            }
        }
    }

    async fn make(&self, name: &TableName, definition: &TableDefinition) -> Arc<LoadedTable> {
        for levels in 1..=name.namespace.len() {
            let namespace = &name.namespace[..levels];
            match &self.making {
                Making::Sql(catalog) | Making::SqlOnS3(catalog, _) => {
                    catalog.create_namespace(&namespace.join(".")).await.unwrap()
                }
                Making::Rest(server) => server.create_namespace(namespace).await,
                Making::Polaris(polaris) => polaris.create_namespace(namespace).await,
                Making::Fault(server) => server.create_namespace(namespace),
            }
        }
        match &self.making {
            Making::Sql(catalog) | Making::SqlOnS3(catalog, _) => {
                drop(catalog.define_table(name, definition).await.unwrap())
            }
            Making::Rest(server) => server.create_table(name, definition).await,
            Making::Polaris(polaris) => polaris.create_table(name, definition).await,
            Making::Fault(server) => server.create_table(name, definition),
        }
        self.catalog.load(name).await.unwrap()
    }

    /// As odd as a table's name may be here.
    fn odd_name(&self) -> TableName {
        let (first, name) = match self.making {
            // It makes locations of names, which have to be URIs: no blanks.
            Making::Polaris(_) => ("a+c", "t'q'&ü?#"),
            _ => ("a b+c", "t 'q' & ü?#"),
        };
        TableName { namespace: vec![first.into(), "été".into()], name: name.into() }
    }

    /// An empty table of version 2.
    async fn table(&self) -> Arc<LoadedTable> {
        self.make(&flights(), &one_column()).await
    }

    /// As the other client reads it.
    async fn seen(&self, table: &LoadedTable) -> Arc<LoadedTable> {
        self.other.load(&table.facts.name).await.unwrap()
    }

    /// A commit of the other client.
    async fn foreign(&self, table: &TableName, updates: Vec<Update>) -> Arc<LoadedTable> {
        let base = self.other.load(table).await.unwrap();
        landed(self.other.commit(&base, &[], updates).await)
    }

    /// Snapshot 1 as the head of main.
    async fn first_landing(&self, base: &LoadedTable) -> Arc<LoadedTable> {
        landed(self.catalog.commit(base, &[], vec![snapshot(base, 1, None), set("main", 1)]).await)
    }
}

fn flights() -> TableName {
    "nyc.flights".parse().unwrap()
}

fn one_column() -> TableDefinition {
    TableDefinition::default().column("id", "long", true)
}

/// A snapshot with the next numbers of the table as it was loaded; nobody reads its files here.
fn snapshot(base: &LoadedTable, id: i64, parent: Option<i64>) -> Update {
    Update::AddSnapshot(numbered(base, id, parent, base.facts.last_sequence_number + 1))
}

fn numbered(base: &LoadedTable, id: i64, parent: Option<i64>, sequence_number: i64) -> NewSnapshot {
    NewSnapshot {
        id: SnapshotId(id),
        parent: parent.map(SnapshotId),
        sequence_number,
        timestamp_ms: real_now().max(base.facts.last_updated_ms + 1),
        manifest_list: format!("{}/metadata/snap-{id}.avro", base.facts.location),
        schema_id: SchemaId(0),
        label: "append".to_owned(),
        summary: [("mergeberg.request".to_owned(), "ünï \"q\" / 7".to_owned())].into(),
        row_range: base.facts.next_row_id.map(|first_row_id| RowRange { first_row_id, added_rows: 5 }),
    }
}

fn reference(name: &str, at: i64) -> RefFact {
    RefFact {
        name: branch(name),
        snapshot_id: SnapshotId(at),
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    }
}

fn set(name: &str, at: i64) -> Update {
    Update::SetRef(reference(name, at))
}

fn at(name: &str, at: Option<i64>, role: RefRole) -> Requirement {
    Requirement::RefAt { name: branch(name), at: at.map(SnapshotId), role }
}

fn landed(outcome: CommitOutcome) -> Arc<LoadedTable> {
    match outcome {
        CommitOutcome::Landed(table) => table,
        other => panic!("not landed: {other:?}"),
    }
}

fn heads(table: &LoadedTable) -> Vec<(String, i64)> {
    table.facts.refs.values().map(|r| (r.name.to_string(), r.snapshot_id.0)).collect()
}

/// Each story over each catalog.
macro_rules! over_every_catalog {
    ($($story:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                super::$story(&super::Place::sqlite().await.unwrap()).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                if let Some(server) = super::TestServer::find() {
                    super::$story(&super::Place::postgres(&server).await).await;
                    server.end().await;
                }
            })*
        }

        mod sqlite_on_s3 {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                super::$story(&super::Place::sqlite_on_s3().await.unwrap()).await;
            })*
        }

        /// What the fault tests rest on.
        mod fault_server {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                super::$story(&super::Place::fault_server().await.unwrap()).await;
            })*
        }

        mod rest_server {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                if let Some(place) = super::Place::rest_server().await {
                    super::$story(&place).await;
                }
            })*
        }

        mod polaris {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $story() {
                if let Some(place) = super::Place::polaris().await {
                    super::$story(&place).await;
                }
            })*
        }
    };
}

over_every_catalog! {
    a_table_is_loaded_as_it_is,
    heads_can_be_loaded_without_the_history,
    an_unchanged_table_is_kept_in_memory,
    every_update_is_applied,
    every_failed_requirement_has_its_outcome,
    o28_an_empty_main_can_be_required,
    a_moved_head_is_told_and_another_branch_is_no_obstacle,
    n5_stale_numbers_ask_for_new_candidates,
    n2_stale_row_ids_ask_for_new_candidates,
    r1_a_ref_and_its_snapshots_go_in_one_commit,
    r4_retention_is_as_it_is_sent,
    refs_are_set_only_to_what_is_there,
    every_letter_of_a_name_counts,
    a_table_that_is_not_there_is_told,
    a_commit_that_was_applied_is_not_applied_again,
    racing_committers_lose_no_update,
    several_tables_move_together,
    o30_one_requirement_that_fails_moves_none,
    o30_a_table_that_moved_meanwhile_moves_none,
    e7_a_table_can_be_required_without_a_change,
    what_cannot_be_applied_to_one_is_applied_to_none,
}

async fn a_table_is_loaded_as_it_is(place: &Place) {
    let table = place.table().await;

    let facts = &table.facts;
    assert_eq!((facts.format_version, facts.refs.len(), facts.last_sequence_number), (2, 0, 0));
    assert_eq!(facts.head(&main_branch()), None);
    assert_eq!(facts.name, flights());
    assert!(facts.location.contains(&place.warehouse()), "{}", facts.location);
    assert_eq!(place.catalog.list_tables().await.unwrap(), [flights()]);
    assert_eq!(place.catalog.name(), "test");
    let able = place.catalog.capabilities();
    assert!(able.table_refs && able.ref_requirements && able.snapshot_removal);
    assert_eq!(place.seen(&table).await.facts, table.facts);
}

async fn heads_can_be_loaded_without_the_history(place: &Place) {
    let base = place.table().await;
    let after = place.first_landing(&base).await;
    let after = landed(
        place
            .catalog
            .commit(&after, &[], vec![snapshot(&after, 2, Some(1)), set("main", 2), set("b", 2)])
            .await,
    );

    let heads = place.other.load_refs(&flights()).await.unwrap();

    assert_eq!(heads.facts.refs, after.facts.refs);
    assert_eq!((&heads.facts.uuid, &heads.facts.properties), (&after.facts.uuid, &after.facts.properties));
    assert_eq!(heads.facts.snapshots.get(SnapshotId(2)), after.facts.snapshots.get(SnapshotId(2)));
    assert_eq!(place.seen(&after).await.facts, after.facts, "the whole is there when it is asked for");
}

async fn an_unchanged_table_is_kept_in_memory(place: &Place) {
    let base = place.table().await;
    let after = place.first_landing(&base).await;

    assert!(Arc::ptr_eq(&after, &place.catalog.load(&flights()).await.unwrap()));
    let foreign = place.foreign(&flights(), vec![set("a", 1)]).await;
    let now = place.catalog.load(&flights()).await.unwrap();
    assert_eq!(now.facts, foreign.facts);
    assert_ne!(now.metadata_location, after.metadata_location);
}

async fn every_update_is_applied(place: &Place) {
    let base = place.table().await;
    let kept = RefFact {
        kind: RefKind::Branch { min_snapshots_to_keep: Some(3), max_snapshot_age_ms: Some(86_400_000) },
        max_ref_age_ms: Some(172_800_000),
        ..reference("feature/x", 12)
    };
    let tag = RefFact { kind: RefKind::Tag, max_ref_age_ms: Some(5_000_000_000), ..reference("v1", 11) };
    let properties = [("mergeberg.queue".to_owned(), "q-1".to_owned()), ("owner".to_owned(), "é".to_owned())];
    let train = [(11, None), (12, Some(11)), (13, Some(12))];
    let mut updates: Vec<Update> = train
        .into_iter()
        .zip(1..)
        .map(|((id, parent), number)| Update::AddSnapshot(numbered(&base, id, parent, number)))
        .collect();
    updates.extend([
        Update::SetRef(kept.clone()),
        Update::SetRef(tag.clone()),
        set("main", 13),
        set("gone", 13),
        Update::SetProperties(properties.into()),
    ]);

    let after = landed(place.catalog.commit(&base, &[], updates.clone()).await);

    let facts = &after.facts;
    assert_eq!(facts.head(&main_branch()), Some(SnapshotId(13)));
    assert_eq!(facts.refs[&branch("feature/x")], kept);
    assert_eq!(facts.refs[&branch("v1")], tag);
    assert_eq!(facts.last_sequence_number, 3);
    assert_eq!(facts.properties["mergeberg.queue"], "q-1");
    assert_eq!(facts.properties["owner"], "é");
    for update in &updates {
        let Update::AddSnapshot(sent) = update else { continue };
        let found = facts.snapshots.get(sent.id).unwrap();
        assert_eq!((found.parent, found.sequence_number), (sent.parent, sent.sequence_number));
        assert_eq!((found.timestamp_ms, found.schema_id), (sent.timestamp_ms, Some(sent.schema_id)));
        assert_eq!((&found.manifest_list, &found.label), (&sent.manifest_list, &sent.label));
        assert_eq!(found.summary, sent.summary);
    }
    // Rule N6: what main passed through within a commit is no history of it.
    let log: Vec<i64> = facts.snapshot_log.iter().map(|entry| entry.snapshot_id.0).collect();
    assert_eq!(log, [13]);

    let more = vec![Update::RemoveRef(branch("gone")), Update::RemoveProperties(vec!["owner".to_owned()])];
    let after = landed(place.catalog.commit(&after, &[], more).await);
    assert_eq!(heads(&after), [("feature/x".into(), 12), ("main".into(), 13), ("v1".into(), 11)]);
    assert!(!after.facts.properties.contains_key("owner"));
    assert_eq!(place.seen(&after).await.facts, after.facts, "another client reads the same");
}

async fn every_failed_requirement_has_its_outcome(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    let commit = async |requirement: Requirement| {
        // Two ref requirements, as the queue sends them.
        let requirements = [at("main", Some(1), RefRole::Target), requirement];
        place.catalog.commit(&base, &requirements, vec![set("b", 1)]).await
    };

    let moved = place.catalog.commit(&base, &[at("main", Some(9), RefRole::Target)], vec![set("b", 1)]).await;
    assert!(matches!(moved, CommitOutcome::HeadMoved), "{moved:?}");
    assert!(matches!(commit(at("tmp", Some(1), RefRole::Fence)).await, CommitOutcome::Fenced));
    assert!(matches!(commit(at("main", Some(2), RefRole::Fence)).await, CommitOutcome::Fenced));
    assert!(
        matches!(commit(at("a/b", Some(1), RefRole::Source)).await, CommitOutcome::SourceMoved(name) if name.0 == "a/b")
    );
    assert!(
        matches!(commit(at("main", None, RefRole::NewName)).await, CommitOutcome::NameTaken(name) if name.0 == "main")
    );
    for requirement in [
        Requirement::TableUuid(TableUuid::new("9c12d441-03fe-4693-9a96-a0705ddf69c1")),
        Requirement::CurrentSchema(SchemaId(9)),
        Requirement::DefaultSpec(SpecId(9)),
        Requirement::DefaultSortOrder(SortOrderId(9)),
    ] {
        let outcome = commit(requirement).await;
        assert!(matches!(outcome, CommitOutcome::TableChanged(_)), "{outcome:?}");
    }
    assert_eq!(heads(&*place.seen(&base).await), [("main".to_owned(), 1)], "nothing was applied");

    let all = [
        Requirement::TableUuid(base.facts.uuid.clone()),
        Requirement::CurrentSchema(base.facts.current_schema_id),
        Requirement::DefaultSpec(base.facts.default_spec_id),
        Requirement::DefaultSortOrder(base.facts.default_sort_order_id),
        at("main", Some(1), RefRole::Target),
        at("b", None, RefRole::NewName),
    ];
    landed(place.catalog.commit(&base, &all, vec![set("b", 1)]).await);
}

async fn o28_an_empty_main_can_be_required(place: &Place) {
    let base = place.table().await;
    let empty_main = [at("main", None, RefRole::Target), at("tmp/x", None, RefRole::NewName)];

    let first =
        place.catalog.commit(&base, &empty_main, vec![snapshot(&base, 1, None), set("main", 1)]).await;
    let base = landed(first);
    let second =
        place.catalog.commit(&base, &empty_main, vec![snapshot(&base, 2, None), set("main", 2)]).await;

    assert!(matches!(second, CommitOutcome::HeadMoved), "{second:?}");
    assert_eq!(heads(&*place.seen(&base).await), [("main".to_owned(), 1)]);
}

async fn a_moved_head_is_told_and_another_branch_is_no_obstacle(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    let foreign = place.foreign(&flights(), vec![set("theirs", 1)]).await;

    // Some catalogs refuse whatever came first; then the table as it is now takes it.
    let head = [at("main", Some(1), RefRole::Target)];
    let outcome = place.catalog.commit(&base, &head, vec![set("ours", 1)]).await;
    let after = match outcome {
        CommitOutcome::PointerMoved => {
            let now = place.catalog.load(&flights()).await.unwrap();
            landed(place.catalog.commit(&now, &head, vec![set("ours", 1)]).await)
        }
        outcome => landed(outcome),
    };
    let all: Vec<(String, i64)> = ["main", "ours", "theirs"].map(|name| (name.to_owned(), 1)).into();
    assert_eq!(heads(&after), all);

    place.foreign(&flights(), vec![snapshot(&foreign, 2, Some(1)), set("main", 2)]).await;
    let moved = place.catalog.commit(&after, &head, vec![set("late", 1)]).await;
    assert!(matches!(moved, CommitOutcome::HeadMoved), "{moved:?}");
}

async fn n5_stale_numbers_ask_for_new_candidates(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    place.foreign(&flights(), vec![snapshot(&base, 2, Some(1)), set("theirs", 2)]).await;
    let head = [at("main", Some(1), RefRole::Target)];
    let prepared = vec![snapshot(&base, 3, Some(1)), set("ours", 3)];

    let outcome = place.catalog.commit(&base, &head, prepared).await;

    // Whether by the number or by the pointer that it took: it is made again on the table as it is.
    assert!(matches!(outcome, CommitOutcome::TableChanged(_) | CommitOutcome::PointerMoved), "{outcome:?}");
    let now = place.catalog.load(&flights()).await.unwrap();
    let outcome = place.catalog.commit(&now, &head, vec![snapshot(&base, 3, Some(1)), set("ours", 3)]).await;
    assert!(
        matches!(&outcome, CommitOutcome::TableChanged(text) if text.contains("sequence number 2")),
        "{outcome:?}"
    );
    landed(place.catalog.commit(&now, &head, vec![snapshot(&now, 3, Some(1)), set("ours", 3)]).await);
}

async fn n2_stale_row_ids_ask_for_new_candidates(place: &Place) {
    let name: TableName = "nyc.v3".parse().unwrap();
    let base = place.make(&name, &one_column().format_version(3)).await;
    assert_eq!((base.facts.format_version, base.facts.next_row_id), (3, Some(0)));
    let first =
        landed(place.catalog.commit(&base, &[], vec![snapshot(&base, 1, None), set("main", 1)]).await);
    assert_eq!(first.facts.next_row_id, Some(5));

    let late = NewSnapshot {
        row_range: Some(RowRange { first_row_id: 0, added_rows: 5 }),
        ..numbered(&first, 2, Some(1), 2)
    };
    let outcome =
        place.catalog.commit(&first, &[], vec![Update::AddSnapshot(late.clone()), set("main", 2)]).await;
    assert!(matches!(outcome, CommitOutcome::TableChanged(_)), "{outcome:?}");

    let second =
        landed(place.catalog.commit(&first, &[], vec![snapshot(&first, 2, Some(1)), set("main", 2)]).await);
    assert_eq!(second.facts.next_row_id, Some(10));
    assert_eq!(place.seen(&second).await.facts, second.facts);
}

async fn r1_a_ref_and_its_snapshots_go_in_one_commit(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    let staged = vec![
        Update::AddSnapshot(numbered(&base, 2, Some(1), 2)),
        Update::AddSnapshot(numbered(&base, 3, Some(2), 3)),
        set("mergeberg/tmp/q/1", 3),
        set("pinned", 2),
    ];
    let staged = landed(place.catalog.commit(&base, &[], staged).await);
    let requirements =
        [at("main", Some(1), RefRole::Target), at("mergeberg/tmp/q/1", Some(3), RefRole::Fence)];
    let dropped =
        vec![Update::RemoveRef(branch("mergeberg/tmp/q/1")), Update::RemoveSnapshots(vec![SnapshotId(3)])];

    let after = landed(place.catalog.commit(&staged, &requirements, dropped.clone()).await);
    assert_eq!(heads(&after), [("main".to_owned(), 1), ("pinned".to_owned(), 2)]);
    assert!(!after.facts.snapshots.contains(SnapshotId(3)));
    let again = place.catalog.commit(&after, &requirements, dropped).await;
    assert!(matches!(again, CommitOutcome::Fenced), "{again:?}");

    // Why a bare removal is never sent: the refs to a removed snapshot go with it, without a word.
    let cascade = vec![Update::RemoveSnapshots(vec![SnapshotId(2)])];
    let after = landed(place.catalog.commit(&after, &[], cascade).await);
    assert_eq!(heads(&after), [("main".to_owned(), 1)]);
    assert_eq!(place.seen(&after).await.facts, after.facts);
}

async fn r4_retention_is_as_it_is_sent(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    let kept = RefFact {
        kind: RefKind::Branch { min_snapshots_to_keep: Some(7), max_snapshot_age_ms: Some(1_000) },
        max_ref_age_ms: None,
        ..reference("main", 1)
    };
    let with = landed(place.catalog.commit(&base, &[], vec![Update::SetRef(kept.clone())]).await);
    assert_eq!(with.facts.refs[&main_branch()], kept);

    let moved = RefFact { snapshot_id: SnapshotId(2), ..kept };
    let updates = vec![snapshot(&with, 2, Some(1)), Update::SetRef(moved.clone())];
    let with = landed(place.catalog.commit(&with, &[], updates).await);
    assert_eq!(with.facts.refs[&main_branch()], moved);

    let without = landed(place.catalog.commit(&with, &[], vec![set("main", 2)]).await);
    assert_eq!(
        without.facts.refs[&main_branch()],
        reference("main", 2),
        "and it is wiped when it is not sent"
    );
}

async fn refs_are_set_only_to_what_is_there(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;

    let nowhere = place.catalog.commit(&base, &[], vec![set("b", 404)]).await;

    let CommitOutcome::Refused(error) = nowhere else { panic!("{nowhere:?}") };
    assert!(error.to_string().contains("404"), "{error}");
    assert_eq!(heads(&*place.seen(&base).await), [("main".to_owned(), 1)]);
}

async fn every_letter_of_a_name_counts(place: &Place) {
    let name = place.odd_name();
    let base = place.make(&name, &one_column()).await;
    let base = place.first_landing(&base).await;
    let names = ["feature/a b", "feature%2Fa b", "été/\"q\"", "a+b", "%", "emoji/🧊"];

    let updates = names.iter().map(|name| set(name, 1)).collect();
    let requirements: Vec<Requirement> = names.iter().map(|name| at(name, None, RefRole::NewName)).collect();
    let after = landed(place.catalog.commit(&base, &requirements, updates).await);

    let mut expected: Vec<(String, i64)> = names.iter().map(|name| ((*name).to_owned(), 1)).collect();
    expected.push(("main".to_owned(), 1));
    expected.sort();
    assert_eq!(heads(&after), expected);
    assert_eq!(place.seen(&after).await.facts, after.facts);
    let other = place.make(&"plain.t".parse().unwrap(), &one_column()).await;
    let mut listed = place.catalog.list_tables().await.unwrap();
    listed.sort();
    assert_eq!(listed, [name, other.facts.name.clone()]);
}

async fn a_table_that_is_not_there_is_told(place: &Place) {
    let base = place.table().await;
    for name in ["nyc.weather", "nowhere.flights", "nyc.deep.flights"] {
        let name: TableName = name.parse().unwrap();
        let error = place.catalog.load(&name).await.unwrap_err();
        assert!(matches!(&error, CatalogError::NotFound(missing) if *missing == name), "{error}");
        let mut gone = LoadedTable::clone(&base);
        gone.facts.name = name;
        let outcome = place.catalog.commit(&gone, &[], vec![snapshot(&base, 1, None), set("main", 1)]).await;
        assert!(matches!(outcome, CommitOutcome::Refused(CatalogError::NotFound(_))), "{outcome:?}");
    }
}

/// Case O24: a commit that is sent twice is applied once, and nobody is told that it was not applied.
async fn a_commit_that_was_applied_is_not_applied_again(place: &Place) {
    let base = place.table().await;
    let base = place.first_landing(&base).await;
    let requirements = [at("main", Some(1), RefRole::Target), at("tmp", None, RefRole::NewName)];
    let updates = vec![snapshot(&base, 2, Some(1)), set("tmp", 2)];
    let first = landed(place.catalog.commit(&base, &requirements, updates.clone()).await);

    let again = place.catalog.commit(&base, &requirements, updates).await;

    // The name is taken by ourselves, or it is known as the same commit.
    match again {
        CommitOutcome::Landed(same) => assert_eq!(same.facts, first.facts),
        CommitOutcome::NameTaken(name) => assert_eq!(name, RefName::new("tmp")),
        other => panic!("{other:?}"),
    }
    assert_eq!(place.seen(&base).await.facts, first.facts);
}

async fn racing_committers_lose_no_update(place: &Place) {
    const WRITERS: i64 = 4;
    const COMMITS: i64 = 4;
    let base = place.table().await;
    place.first_landing(&base).await;
    let ids = Arc::new(AtomicI64::new(100));

    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let catalog = Arc::clone(if writer % 2 == 0 { &place.catalog } else { &place.other });
        let ids = Arc::clone(&ids);
        writers.push(tokio::spawn(async move {
            for commit in 0..COMMITS {
                let name = format!("w{writer}/{commit}");
                loop {
                    let base = catalog.load(&flights()).await.unwrap();
                    let id = ids.fetch_add(1, Ordering::SeqCst);
                    let requirements =
                        [at(&name, None, RefRole::NewName), at("main", Some(1), RefRole::Target)];
                    let updates = vec![snapshot(&base, id, Some(1)), set(&name, id)];
                    match catalog.commit(&base, &requirements, updates).await {
                        CommitOutcome::Landed(_) => break,
                        CommitOutcome::PointerMoved | CommitOutcome::TableChanged(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
            }
        }));
    }
    for writer in writers {
        writer.await.unwrap();
    }

    let table = place.seen(&base).await;
    assert_eq!(table.facts.refs.len() as i64, 1 + WRITERS * COMMITS);
    assert_eq!(table.facts.last_sequence_number, 1 + WRITERS * COMMITS, "no number was taken twice");
}
