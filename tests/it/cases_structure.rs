//! Cases O18, O19, O20, O28, O29 and O31: the table changes under a request.

use std::sync::Arc;

use mergeberg::ledger::{Decision, LedgerError, ReviewFilter, ReviewRow};
use mergeberg_kernel::ids::{Principal, TableName};
use mergeberg_kernel::structure::{StructureChange, StructureChangeKind};
use serde_json::{Value, json};

use crate::support::{
    House, Moment, ORDERS_POLICY, batch, branch, columns, days, decimal, drain, long, order, text,
};

fn optional(id: i64, name: &str) -> Value {
    json!({"id": id, "name": name, "required": false, "type": "string"})
}

async fn reviews(house: &House) -> Vec<ReviewRow> {
    house.ledger.reviews(&ReviewFilter::default()).await.unwrap()
}

fn field_ids(review: &ReviewRow, kind: StructureChangeKind) -> Option<Vec<i32>> {
    review.changes.iter().find(|change| change.kind == kind).map(|change| change.field_ids.clone())
}

async fn add_note_drop_status(house: &House) -> i64 {
    house
        .change_schema(0, |fields| {
            fields.retain(|field| field["name"] != "status");
            fields.push(optional(5, "note"));
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o18_validation_reads_with_the_schema_that_main_will_have() {
    for main_moved in [true, false] {
        let house = House::orders(ORDERS_POLICY).await;
        house.first_landing().await;
        house.append_on_new("ingest/b", &[order(4, 22)]).await;
        if main_moved {
            house.append("main", &[order(9, 25)]).await;
        }
        let schema = add_note_drop_status(&house).await;
        let request = house.enqueue("ingest/b").await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
        let evidence = house.evidence(request, "one-order-once").await;
        let read_with = evidence[0].evidence.measured.iter().find(|(name, _)| name == "schema").unwrap();
        assert_eq!(read_with.1, schema.to_string(), "the result says which schema was read");
        let rows = house.texts("main").await;
        assert!(rows.contains(&"4|2026-08-22|40.00|-".to_owned()), "no status, and a null note: {rows:?}");
        if main_moved {
            assert_eq!(house.classified(request).await, "cherry-pick");
            let table = house.loaded().await;
            let head = table.facts.head(&branch("main")).unwrap();
            let written = table.facts.snapshots.get(head).unwrap().schema_id.unwrap();
            assert_eq!(
                i64::from(written.0),
                schema,
                "a dropped column does not come back by an old schema id"
            );
        }
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o18_a_check_on_a_dropped_column_is_invalid_and_never_a_pass() {
    let policy = "table = \"shop.orders\"\n\
        [[check]]\nid = \"status-known\"\ntype = \"not-null\"\ncolumns = [\"status\"]\n\
        [[class]]\nname = \"checked\"\nprefix = \"checked/\"\nchecks = [\"status-known\"]\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\n";
    let house = House::orders(policy).await;
    house.append_on_new("seen", &[order(100, 30)]).await;
    house.enqueue("seen").await;
    house.drain().await;
    house.append_on_new("checked/b", &[order(4, 22)]).await;
    add_note_drop_status(&house).await;
    let request = house.enqueue("checked/b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "held(check-could-not-run)");
    let detail = house.detail(request).await;
    assert!(detail.contains("status") && detail.contains("schema 1"), "{detail}");
    assert_eq!(house.texts("main").await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o19_a_column_that_differs_in_letter_case_is_reviewed() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.branch("ingest/b").await;
    house.change_schema(0, |fields| fields.push(optional(5, "STATUS"))).await;
    house.append("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "in-review");
    let open = reviews(&house).await;
    assert_eq!(open.len(), 1, "one item for the table, not one a request");
    assert_eq!(field_ids(&open[0], StructureChangeKind::CaseTwin), Some(vec![3, 5]));
    assert_eq!(house.texts("main").await.len(), 4, "nothing was published");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o19_a_name_that_means_two_columns_is_reviewed() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.branch("ingest/b").await;
    // The branch's writer renames column 3.
    house.change_schema(0, |fields| fields[2]["name"] = json!("state")).await;
    let renamed = columns(vec![
        ("order_id", long(&[4])),
        ("order_date", days(&[22])),
        ("state", text(&[Some("new")])),
        ("amount", decimal(&[4000], 12, 2)),
    ]);
    house.write_batch("ingest/b", renamed).await;
    // Main's owner, from the old schema, adds a column of that name.
    house.change_schema(0, |fields| fields.push(optional(5, "state"))).await;
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "in-review");
    let items = reviews(&house).await;
    let item = items.iter().find(|item| item.structure.schema_id.0 == 1).expect("an item for the branch");
    assert_eq!(field_ids(item, StructureChangeKind::NameClash), Some(vec![3, 5]), "{:?}", item.changes);

    // Both approved, and still no row is read under the wrong name.
    let reviewer = Principal::new("rita");
    for item in &items {
        house.ledger.decide(item.id, Decision::Approve, &reviewer, "looks right", house.now()).await.unwrap();
    }
    house.drain().await;
    assert_eq!(house.state(request).await, "held(structure-changed)");
    assert_eq!(house.texts("main").await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o20_a_dropped_column_that_an_old_spec_uses_is_never_approved() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    let head = house.head("main").await;
    house.branch("ingest/b").await;
    house.change_spec(Some((1, "bucket[4]"))).await;
    house.change_schema(0, |fields| drop(fields.remove(1))).await;
    let rows = columns(vec![
        ("order_id", long(&[4])),
        ("status", text(&[Some("new")])),
        ("amount", decimal(&[4000], 12, 2)),
    ]);
    house.write_batch("ingest/b", rows).await;
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "in-review");
    let open = reviews(&house).await;
    let (item, change) = open
        .iter()
        .find_map(|item| {
            let is_it = |change: &&StructureChange| change.kind == StructureChangeKind::DroppedColumnOfSpec;
            item.changes.iter().find(is_it).map(|change| (item, change))
        })
        .expect("an item tells of it");
    assert_eq!(
        change.text,
        "column 2 'order_date' dropped, which partition spec 0 uses; files are live under it on ingest/b, main"
    );
    let approved =
        house.ledger.decide(item.id, Decision::Approve, &Principal::new("rita"), "fine", house.now()).await;
    assert!(matches!(approved, Err(LedgerError::UnsafeStructure { .. })), "{approved:?}");
    house.drain().await;
    assert_eq!((house.state(request).await.as_str(), house.head("main").await), ("in-review", head));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o19_control_a_pure_add_is_reviewed_and_lands_once_approved() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.branch("ingest/b").await;
    house.append_on_new("ingest/before", &[order(5, 23)]).await;
    let schema = house.change_schema(0, |fields| fields.push(optional(5, "note"))).await;
    house.append("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let before = house.enqueue("ingest/before").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "in-review");
    assert_eq!(house.state(before).await, "landed", "who wrote under the old structure goes on");
    let open = reviews(&house).await;
    assert_eq!(open.len(), 1);
    assert_eq!(field_ids(&open[0], StructureChangeKind::ColumnAdded), Some(vec![5]));

    let reviewer = Principal::new("rita");
    house.ledger.decide(open[0].id, Decision::Approve, &reviewer, "agreed", house.now()).await.unwrap();
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(i64::from(open[0].structure.schema_id.0), schema);
    assert!(house.texts("main").await.contains(&"4|2026-08-22|new|40.00|-".to_owned()));
    house.assert_sound().await;
}

/// Design section 8: what went on meanwhile is stamped with the new schema, and is not written under it.
#[tokio::test(flavor = "multi_thread")]
async fn an_approved_structure_is_a_barrier_although_others_landed_in_the_meantime() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    for name in ["ingest/b", "ingest/c"] {
        house.branch(name).await;
    }
    house.append_on_new("ingest/before", &[order(5, 23)]).await;
    house.change_schema(0, |fields| fields.push(optional(5, "note"))).await;
    house.append("ingest/b", &[order(4, 22)]).await;
    house.append("ingest/c", &[order(6, 22)]).await;
    let before = house.enqueue("ingest/before").await;
    let (first, second) = (house.enqueue("ingest/b").await, house.enqueue("ingest/c").await);
    house.drain().await;
    assert_eq!(house.state(before).await, "landed");
    let open = reviews(&house).await;
    house
        .ledger
        .decide(open[0].id, Decision::Approve, &Principal::new("rita"), "agreed", house.now())
        .await
        .unwrap();
    house.drain().await;
    for request in [first, second] {
        assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    }
    let receipt = house.ledger.receipt_of_request(first).await.unwrap().unwrap();
    assert_eq!(receipt.intent.cars.len(), 1, "the first one under the new structure rides alone");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o19_a_rejected_change_refuses_those_who_wrote_under_it() {
    let house = House::orders(ORDERS_POLICY).await;
    house.first_landing().await;
    house.branch("ingest/b").await;
    house.change_schema(0, |fields| fields.push(optional(5, "note"))).await;
    house.append("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    house.drain().await;
    let open = reviews(&house).await;
    let reviewer = Principal::new("rita");
    house.ledger.decide(open[0].id, Decision::Reject, &reviewer, "not agreed", house.now()).await.unwrap();
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(review-rejected)");
    assert_eq!(house.texts("main").await.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_a_stranger_makes_main_between_validation_and_commit() {
    let house = Arc::new(House::empty(ORDERS_POLICY).await);
    let first = house.append("ingest/b1", &[order(1, 20)]).await;
    let request = house.enqueue("ingest/b1").await;
    let (worker, script) = house.scripted().await;
    let stranger = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        stranger.append("main", &[order(2, 20)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "landed", "{}", house.detail(request).await);
    assert_eq!(house.keys("main").await, [1, 2], "neither replaced the other");
    assert_ne!(house.head("main").await, Some(first), "validated again, under a new id");
    assert_eq!(house.request(request).await.attempts, 2);
    assert_eq!(house.foreign().await.len(), 1);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o29_a_commit_is_bound_to_the_head_it_was_validated_on() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let stranger = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        stranger.append("main", &[order(4, 22)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    let history = house.history(request).await;
    assert!(history.contains("queued"), "it went back to the queue first: {history}");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    let candidates: Vec<_> =
        house.evidence(request, "one-order-once").await.iter().map(|e| e.evidence.candidate).collect();
    assert_eq!(candidates.len(), 2);
    assert_ne!(candidates[0], candidates[1], "evidence is never carried over to another id");
    house.assert_sound().await;
}

/// `orders` is dropped and `orders_ext`, which has a branch of the same name, takes its name.
#[tokio::test(flavor = "multi_thread")]
async fn case_o31_another_table_under_the_same_name() {
    let house = House::orders(ORDERS_POLICY).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;

    let other: TableName = "shop.orders_ext".parse().unwrap();
    let definition = mergeberg::table::create::TableDefinition::default()
        .column("order_id", "long", true)
        .column("order_date", "date", true)
        .column("status", "string", false)
        .column("amount", "decimal(12, 2)", false)
        .partitioned_by("order_date", "identity");
    house.catalog.define_table(&other, &definition).await.unwrap();
    house.write_batch_to(&other, "main", batch(&[order(50, 20)])).await;
    house.write_batch_to(&other, "ingest/b", batch(&[order(51, 20)])).await;
    house.catalog.drop_table(&house.table).await.unwrap();
    house.catalog.rename_table(&other, &house.table).await.unwrap();
    let before = house.loaded().await.metadata_location.clone();

    house.drain().await;
    assert_eq!(house.state(request).await, "refused(table-replaced)");
    assert_eq!(house.loaded().await.metadata_location, before, "the other table is untouched");
    assert_eq!(house.keys("main").await, [50]);
    assert_eq!(house.keys("ingest/b").await, [51]);

    // The queue serves the new table as any other.
    let own = house.ask("ingest/b").await.unwrap();
    house.drain().await;
    assert!(house.state(own).await.starts_with("refused(unrelated-history)"), "{}", house.state(own).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o31_the_name_changes_hands_while_a_candidate_is_checked() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let stranger = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        let away: TableName = "shop.away".parse().unwrap();
        stranger.catalog.rename_table(&stranger.table, &away).await.unwrap();
        let definition = mergeberg::table::create::TableDefinition::default().column("x", "long", false);
        stranger.catalog.define_table(&stranger.table, &definition).await.unwrap();
    });
    drain(&worker).await;
    script.assert_played();
    let state = house.state(request).await;
    assert!(!state.starts_with("landed"), "{state}");
    assert!(house.loaded().await.facts.snapshots.is_empty(), "nothing was written to the new table");
    let away = mergeberg::table::catalog::Catalog::load(
        house.catalog.as_ref(),
        &"shop.away".parse::<TableName>().unwrap(),
    )
    .await
    .unwrap();
    let head = away.facts.head(&branch("main")).unwrap();
    let keys: Vec<i64> = house.rows_at(&away, head).await.iter().map(|row| row.id).collect();
    assert_eq!(keys, [1, 2, 3], "and nothing was published under the other name");
}
