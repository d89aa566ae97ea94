//! Commits to several tables: all of them, or none.

use std::sync::Arc;

use mergeberg::table::catalog::{CommitOutcome, SetOutcome, TableChange};
use mergeberg::table::loaded::LoadedTable;
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::ids::{SnapshotId, TableName};

use super::{Place, at, heads, landed, one_column, set, snapshot};

const NAMES: [&str; 3] = ["nyc.flights", "weather.hours", "geo.airports"];

/// Three tables, each with snapshot 1 on main.
async fn tables(place: &Place) -> Vec<Arc<LoadedTable>> {
    let mut tables = Vec::new();
    for name in NAMES {
        let base = place.make(&name.parse().unwrap(), &one_column()).await;
        let updates = vec![snapshot(&base, 1, None), set("main", 1)];
        tables.push(landed(place.catalog.commit(&base, &[], updates).await));
    }
    tables
}

/// Snapshot 2 becomes the head of main, if that is still at 1.
fn next(base: &Arc<LoadedTable>) -> TableChange {
    TableChange {
        base: Arc::clone(base),
        requirements: vec![
            Requirement::TableUuid(base.facts.uuid.clone()),
            at("main", Some(1), RefRole::Target),
            at("tmp", None, RefRole::Fence),
        ],
        updates: vec![snapshot(base, 2, Some(1)), set("main", 2)],
    }
}

async fn mains(place: &Place) -> Vec<Option<i64>> {
    let mut mains = Vec::new();
    for name in NAMES {
        let name: TableName = name.parse().unwrap();
        let table = place.other.load(&name).await.unwrap();
        mains.push(table.facts.head(&super::main_branch()).map(|id| id.0));
    }
    mains
}

fn not_applied(outcome: SetOutcome) -> (usize, CommitOutcome) {
    match outcome {
        SetOutcome::NotApplied { at, outcome } => (at, outcome),
        other => panic!("{other:?}"),
    }
}

pub(super) async fn several_tables_move_together(place: &Place) {
    assert!(place.catalog.capabilities().multi_table_commits);
    let tables = tables(place).await;
    let changes: Vec<TableChange> = tables.iter().map(next).collect();

    let SetOutcome::Landed(now) = place.catalog.commit_set(&changes).await else { panic!("not landed") };

    assert_eq!(now.len(), 3);
    for (table, base) in now.iter().zip(&tables) {
        assert_eq!(table.facts.name, base.facts.name);
        assert_eq!(heads(table), [("main".to_owned(), 2)]);
        assert_eq!(place.seen(table).await.facts, table.facts);
    }
}

pub(super) async fn o30_one_requirement_that_fails_moves_none(place: &Place) {
    let tables = tables(place).await;
    for wrong in 0..tables.len() {
        let mut changes: Vec<TableChange> = tables.iter().map(next).collect();
        changes[wrong].requirements[1] = at("main", Some(7), RefRole::Target);
        let (at, outcome) = not_applied(place.catalog.commit_set(&changes).await);
        assert!(matches!(outcome, CommitOutcome::HeadMoved), "{outcome:?}");
        assert_eq!(at, wrong);
        assert_eq!(mains(place).await, [Some(1); 3]);
    }
}

pub(super) async fn o30_a_table_that_moved_meanwhile_moves_none(place: &Place) {
    let tables = tables(place).await;
    let name = tables[1].facts.name.clone();
    let base = place.other.load(&name).await.unwrap();
    place.foreign(&name, vec![snapshot(&base, 3, Some(1)), set("main", 3)]).await;
    let changes: Vec<TableChange> = tables.iter().map(next).collect();

    let (at, outcome) = not_applied(place.catalog.commit_set(&changes).await);

    assert!(matches!(outcome, CommitOutcome::HeadMoved), "{outcome:?}");
    assert_eq!((at, mains(place).await), (1, vec![Some(1), Some(3), Some(1)]));
}

/// A table that only has to be as it is takes part, and stays as it is.
pub(super) async fn e7_a_table_can_be_required_without_a_change(place: &Place) {
    let tables = tables(place).await;
    let only_required = |base: &Arc<LoadedTable>| TableChange { updates: Vec::new(), ..next(base) };
    let changes = [next(&tables[0]), only_required(&tables[1])];
    let SetOutcome::Landed(now) = place.catalog.commit_set(&changes).await else { panic!("not landed") };
    assert_eq!(heads(&now[1]), [("main".to_owned(), 1)]);
    assert_eq!(mains(place).await, [Some(2), Some(1), Some(1)]);

    let name = tables[1].facts.name.clone();
    place.foreign(&name, vec![Update::RemoveRef(super::branch("main"))]).await;
    let changes = [next(&tables[2]), only_required(&tables[1])];
    let (at, outcome) = not_applied(place.catalog.commit_set(&changes).await);
    assert!(matches!(outcome, CommitOutcome::HeadMoved), "{outcome:?}");
    assert_eq!((at, mains(place).await), (1, vec![Some(2), None, Some(1)]));
}

pub(super) async fn what_cannot_be_applied_to_one_is_applied_to_none(place: &Place) {
    let tables = tables(place).await;
    let mut changes: Vec<TableChange> = tables.iter().map(next).collect();
    changes[2].updates.push(set("b", 404));
    let (_, outcome) = not_applied(place.catalog.commit_set(&changes).await);
    assert!(matches!(outcome, CommitOutcome::Refused(_)), "{outcome:?}");
    assert_eq!(mains(place).await, [Some(1); 3]);

    let mut gone = LoadedTable::clone(&tables[1]);
    gone.facts.name = "nowhere.hours".parse().unwrap();
    let changes = [next(&tables[0]), next(&Arc::new(gone))];
    let (_, outcome) = not_applied(place.catalog.commit_set(&changes).await);
    assert!(matches!(outcome, CommitOutcome::Refused(_)), "{outcome:?}");
    assert_eq!(mains(place).await, [Some(1); 3]);
    assert!(!place.seen(&tables[0]).await.facts.snapshots.contains(SnapshotId(2)));
}
