use std::collections::{BTreeMap, BTreeSet};

use iceberg::io::FileIO;
use mergeberg_kernel::commit::{NewSnapshot, RowRange, Update};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SchemaId, SnapshotId, TableName};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Applied, Document, DocumentError};
use crate::table::facts_of::facts_of;
use crate::table::loaded::LoadedTable;

const LOCATION: &str = "file:///w/ns/t/metadata/00003-a.metadata.json";

fn name() -> TableName {
    "ns.t".parse().unwrap()
}

/// main: 1 <- 2 <- 3; branch `ingest/a` at 4, whose parent is 2; tag `v1` at 1. Sequence numbers are ids,
/// times are ids times 1000. Something unknown stands at every level.
fn metadata() -> Value {
    let snapshot = |id: i64, parent: Option<i64>| {
        let mut value = json!({
            "x-before": {"deep": [1, 2.50, null]},
            "sequence-number": id, "snapshot-id": id, "timestamp-ms": id * 1000,
            "summary": {"operation": "append", "x-summary": "kept"},
            "manifest-list": format!("file:///w/ns/t/metadata/s{id}.avro"), "schema-id": 0,
            "key-of-tomorrow": 12345678901234567890u64
        });
        if let Some(parent) = parent {
            value["parent-snapshot-id"] = json!(parent);
        }
        value
    };
    json!({
        "x-first": "unknown",
        "format-version": 2,
        "table-uuid": "9c12d441-03fe-4693-9a96-a0705ddf69c1",
        "location": "file:///w/ns/t",
        "last-sequence-number": 4,
        "last-updated-ms": 4000,
        "last-column-id": 1,
        "schemas": [{"type": "struct", "schema-id": 0, "x-schema": true, "fields": [
            {"id": 1, "name": "id", "required": true, "type": "long"}]}],
        "current-schema-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        "default-spec-id": 0,
        "last-partition-id": 999,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
        "properties": {"owner": "nyc"},
        "current-snapshot-id": 3,
        "refs": {
            "main": {"snapshot-id": 3, "type": "branch", "x-ref": 1},
            "ingest/a": {"snapshot-id": 4, "type": "branch", "min-snapshots-to-keep": 5,
                         "max-snapshot-age-ms": 60000, "max-ref-age-ms": 90000, "x-ref": 1},
            "v1": {"snapshot-id": 1, "type": "tag", "x-ref": 1}
        },
        "snapshots": [
            snapshot(1, None), snapshot(2, Some(1)), snapshot(3, Some(2)), snapshot(4, Some(2))],
        "statistics": [statistics(2), statistics(3)],
        "partition-statistics": [],
        "snapshot-log": [
            {"snapshot-id": 1, "timestamp-ms": 1000, "x-log": 1},
            {"snapshot-id": 2, "timestamp-ms": 2000},
            {"snapshot-id": 3, "timestamp-ms": 3000}],
        "metadata-log": [{"timestamp-ms": 3000, "metadata-file": "file:///w/ns/t/metadata/00002-a.metadata.json"}],
        "x-last": [{"b": 1, "a": 2}]
    })
}

fn statistics(snapshot: i64) -> Value {
    json!({"snapshot-id": snapshot, "statistics-path": "file:///w/s.puffin", "file-size-in-bytes": 1,
           "file-footer-size-in-bytes": 1, "blob-metadata": []})
}

fn parse(value: &Value) -> (Document, TableFacts) {
    let document = Document::parse(value.to_string().as_bytes()).unwrap();
    let facts = facts_of(&name(), &document).unwrap();
    (document, facts)
}

fn base() -> (Document, TableFacts) {
    parse(&metadata())
}

fn written(applied: &Applied) -> Value {
    serde_json::from_slice(&applied.document.to_bytes()).unwrap()
}

fn apply(updates: &[Update], now_ms: i64) -> Result<Applied, DocumentError> {
    let (document, facts) = base();
    let applied = document.apply(&facts, LOCATION, updates, now_ms)?;
    assert_true_to_bytes(&applied);
    Ok(applied)
}

/// The facts derived from the updates are those of the written bytes, and the crate reads them too.
fn assert_true_to_bytes(applied: &Applied) {
    let bytes = applied.document.to_bytes();
    let loaded = LoadedTable::parse(&name(), "file:///w/next.json", &bytes, FileIO::new_with_fs()).unwrap();
    assert_eq!(loaded.facts, applied.facts);
}

fn snapshot(id: i64, parent: Option<i64>) -> NewSnapshot {
    NewSnapshot {
        id: SnapshotId(id),
        parent: parent.map(SnapshotId),
        sequence_number: id,
        timestamp_ms: id * 1000,
        manifest_list: format!("file:///w/ns/t/metadata/s{id}.avro"),
        schema_id: SchemaId(0),
        label: "append".to_owned(),
        summary: BTreeMap::from([("source-snapshot-id".to_owned(), "4".to_owned())]),
        row_range: None,
    }
}

fn branch(name: &str, at: i64) -> RefFact {
    RefFact {
        name: RefName::new(name),
        snapshot_id: SnapshotId(at),
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    }
}

fn add(id: i64, parent: i64) -> Update {
    Update::AddSnapshot(snapshot(id, Some(parent)))
}

fn log_of(facts: &TableFacts) -> Vec<(i64, i64)> {
    facts.snapshot_log.iter().map(|entry| (entry.snapshot_id.0, entry.timestamp_ms)).collect()
}

#[test]
fn an_untouched_document_is_written_as_it_was_read() {
    let (document, _) = base();

    assert_eq!(document.to_bytes(), metadata().to_string().into_bytes());
}

#[test]
fn n6_a_train_logs_its_last_head_once_with_the_landing_time() {
    let updates = [add(5, 3), add(6, 5), add(7, 6), Update::SetRef(branch("main", 7))];

    let applied = apply(&updates, 50_000).unwrap();

    assert_eq!(log_of(&applied.facts), [(1, 1000), (2, 2000), (3, 3000), (7, 50_000)]);
    assert_eq!(applied.facts.last_updated_ms, 50_000);
    assert_eq!(applied.facts.last_sequence_number, 7);
    assert_eq!(written(&applied)["current-snapshot-id"], 7);
}

#[test]
fn n6_staging_logs_nothing() {
    let applied = apply(&[add(5, 3), Update::SetRef(branch("mergeberg/tmp/q/t", 5))], 50_000).unwrap();

    assert_eq!(log_of(&applied.facts).last(), Some(&(3, 3000)));
    assert_eq!(written(&applied)["current-snapshot-id"], 3);
}

#[test]
fn n3_a_clock_that_is_behind_still_moves_time_on() {
    let landed = apply(&[Update::SetRef(branch("main", 4))], 10).unwrap();

    assert_eq!(landed.facts.last_updated_ms, 4001);
    assert_eq!(log_of(&landed.facts).last(), Some(&(4, 4001)));

    let staged = apply(&[add(5, 3)], 10).unwrap();
    assert_eq!(staged.facts.last_updated_ms, 5000, "never before a snapshot that it adds");
}

#[test]
fn n1_a_stale_sequence_number_is_refused_even_without_parent() {
    let mut orphan = snapshot(5, None);
    orphan.sequence_number = 4;

    let error = apply(&[Update::AddSnapshot(orphan)], 0).unwrap_err();

    assert!(matches!(error, DocumentError::StaleSequenceNumber { sequence_number: 4, last: 4, .. }));
}

/// The table in format v3, with 40 row ids given out.
fn metadata_v3() -> Value {
    let mut value = metadata();
    value["format-version"] = json!(3);
    value["next-row-id"] = json!(40);
    value
}

fn add_rows(id: i64, parent: i64, first_row_id: i64, added_rows: i64) -> Update {
    let row_range = Some(RowRange { first_row_id, added_rows });
    Update::AddSnapshot(NewSnapshot { row_range, ..snapshot(id, Some(parent)) })
}

#[test]
fn n2_row_ids_of_a_train_follow_one_another() {
    let (document, facts) = parse(&metadata_v3());
    let updates = [add_rows(5, 3, 40, 10), add_rows(6, 5, 50, 0), add_rows(7, 6, 50, 3)];

    let applied = document.apply(&facts, LOCATION, &updates, 50_000).unwrap();

    assert_true_to_bytes(&applied);
    assert_eq!(applied.facts.next_row_id, Some(53));
    let value = written(&applied);
    assert_eq!(value["next-row-id"], 53);
    let last = &value["snapshots"][6];
    assert_eq!((&last["first-row-id"], &last["added-rows"]), (&json!(50), &json!(3)));
    // In its place, and nothing else but what a commit changes.
    assert_eq!(value.as_object().unwrap().len(), metadata_v3().as_object().unwrap().len());
    assert_eq!(value["statistics"], metadata()["statistics"]);
    // Ids are never given twice, whatever becomes of the snapshots that took them.
    let removed = Update::RemoveSnapshots(vec![SnapshotId(7)]);
    let after = applied.document.apply(&applied.facts, LOCATION, &[removed], 60_000).unwrap();
    assert_true_to_bytes(&after);
    assert_eq!(after.facts.next_row_id, Some(53));
}

#[test]
fn n2_row_ids_that_do_not_begin_at_the_tables_next_are_refused() {
    let (document, facts) = parse(&metadata_v3());
    let refusal = |updates: &[Update]| document.apply(&facts, LOCATION, updates, 50_000).unwrap_err();

    for (first, added) in [(39, 5), (41, 5), (0, 5), (40, -1), (40, i64::MAX)] {
        let error = refusal(&[add_rows(5, 3, first, added)]);
        assert!(
            matches!(error, DocumentError::WrongRowIds { first_row_id, next: 40, .. } if first_row_id == first),
            "{error}"
        );
    }
    let gap = refusal(&[add_rows(5, 3, 40, 10), add_rows(6, 5, 51, 1)]);
    assert!(matches!(gap, DocumentError::WrongRowIds { first_row_id: 51, next: 50, .. }), "{gap}");
}

#[test]
fn l7_a_snapshot_made_for_another_format_version_is_refused() {
    let (document, facts) = parse(&metadata_v3());
    let error = document.apply(&facts, LOCATION, &[add(5, 3)], 50_000).unwrap_err();
    assert!(matches!(error, DocumentError::OtherFormat { version: 3, .. }), "{error}");

    let error = apply(&[add_rows(5, 3, 0, 1)], 50_000).unwrap_err();
    assert!(matches!(error, DocumentError::OtherFormat { version: 2, .. }), "{error}");
}

#[test]
fn snapshots_are_added_once_and_only_to_known_parents() {
    assert!(matches!(apply(&[add(4, 3)], 0), Err(DocumentError::SnapshotExists(SnapshotId(4)))));
    assert!(matches!(apply(&[add(5, 99)], 0), Err(DocumentError::UnknownParent { .. })));
    assert!(matches!(
        apply(&[Update::SetRef(branch("new", 99))], 0),
        Err(DocumentError::UnknownSnapshot { .. })
    ));
    assert!(apply(&[Update::AddSnapshot(snapshot(5, None))], 0).is_ok());
}

#[test]
fn r1_removing_snapshots_takes_refs_statistics_and_the_log_before_them() {
    let applied = apply(&[Update::RemoveSnapshots(vec![SnapshotId(2), SnapshotId(4)])], 50_000).unwrap();

    let refs: Vec<&str> = applied.facts.refs.keys().map(RefName::as_str).collect();
    assert_eq!(refs, ["main", "v1"]);
    assert_eq!(log_of(&applied.facts), [(3, 3000)], "a gap in the log would lie about the past");
    let value = written(&applied);
    assert_eq!(value["statistics"], json!([statistics(3)]));
    let ids: Vec<i64> =
        value["snapshots"].as_array().unwrap().iter().map(|s| s["snapshot-id"].as_i64().unwrap()).collect();
    assert_eq!(ids, [1, 3]);
    assert_eq!(applied.facts.last_sequence_number, 4, "numbers are never used again");
}

#[test]
fn r1_removing_the_head_of_main_takes_main() {
    let applied = apply(&[Update::RemoveSnapshots(vec![SnapshotId(3)])], 50_000).unwrap();

    assert_eq!(applied.facts.head(&RefName::main()), None);
    assert_eq!(written(&applied)["current-snapshot-id"], -1);
    assert!(applied.facts.snapshot_log.is_empty());
}

#[test]
fn main_removed_and_set_again_starts_a_new_log() {
    let updates = [Update::RemoveRef(RefName::main()), Update::SetRef(branch("main", 3))];

    let applied = apply(&updates, 50_000).unwrap();

    assert_eq!(log_of(&applied.facts), [(3, 50_000)]);
}

#[test]
fn removing_what_is_not_there_changes_nothing() {
    let updates = [Update::RemoveRef(RefName::new("ghost")), Update::RemoveSnapshots(vec![SnapshotId(99)])];

    let applied = apply(&updates, 50_000).unwrap();

    let (_, before) = base();
    assert_eq!(applied.facts, TableFacts { last_updated_ms: 50_000, ..before });
}

#[test]
fn r4_a_ref_set_without_retention_loses_it_and_keeps_what_is_unknown() {
    let applied = apply(&[Update::SetRef(branch("ingest/a", 3))], 50_000).unwrap();

    let value = written(&applied);
    assert_eq!(value["refs"]["ingest/a"], json!({"snapshot-id": 3, "type": "branch", "x-ref": 1}));
    assert_eq!(value["refs"]["v1"], metadata()["refs"]["v1"]);
}

#[test]
fn r4_retention_is_written_as_given() {
    let pin = RefFact {
        kind: RefKind::Branch { min_snapshots_to_keep: Some(50), max_snapshot_age_ms: Some(7) },
        max_ref_age_ms: Some(9),
        ..branch("pin", 3)
    };
    let tag = RefFact { kind: RefKind::Tag, max_ref_age_ms: Some(9), ..branch("v2", 3) };

    let value = written(&apply(&[Update::SetRef(pin), Update::SetRef(tag)], 50_000).unwrap());

    assert_eq!(
        value["refs"]["pin"],
        json!({"snapshot-id": 3, "type": "branch", "min-snapshots-to-keep": 50,
               "max-snapshot-age-ms": 7, "max-ref-age-ms": 9})
    );
    assert_eq!(value["refs"]["v2"], json!({"snapshot-id": 3, "type": "tag", "max-ref-age-ms": 9}));
}

#[test]
fn refs_that_other_engines_cannot_read_are_refused() {
    let zero = RefFact { max_ref_age_ms: Some(0), ..branch("pin", 3) };
    assert!(matches!(apply(&[Update::SetRef(zero)], 0), Err(DocumentError::Retention(_))));

    let main_as_tag = RefFact { kind: RefKind::Tag, ..branch("main", 3) };
    assert!(matches!(apply(&[Update::SetRef(main_as_tag)], 0), Err(DocumentError::RefKind(_))));
    assert!(matches!(apply(&[Update::SetRef(branch("v1", 3))], 0), Err(DocumentError::RefKind(_))));
}

#[test]
fn a_main_that_was_only_implied_is_written_out_beside_other_refs() {
    let mut value = metadata();
    value.as_object_mut().unwrap().shift_remove("refs");
    let (document, facts) = parse(&value);

    let applied = document.apply(&facts, LOCATION, &[Update::SetRef(branch("b", 4))], 50_000).unwrap();

    assert_true_to_bytes(&applied);
    let refs = &written(&applied)["refs"];
    assert_eq!(refs["main"], json!({"snapshot-id": 3, "type": "branch"}));
    assert_eq!(refs["b"], json!({"snapshot-id": 4, "type": "branch"}));
}

#[test]
fn a_table_without_snapshots_takes_its_first() {
    let mut value = metadata();
    for key in ["refs", "snapshots", "snapshot-log", "metadata-log", "statistics", "properties"] {
        value.as_object_mut().unwrap().shift_remove(key);
    }
    value["current-snapshot-id"] = Value::Null;
    let (document, facts) = parse(&value);
    let updates = [
        Update::AddSnapshot(snapshot(5, None)),
        Update::SetRef(branch("main", 5)),
        Update::SetProperties(BTreeMap::from([("mergeberg.queue".to_owned(), "q\"1".to_owned())])),
    ];

    let applied = document.apply(&facts, LOCATION, &updates, 50_000).unwrap();

    assert_true_to_bytes(&applied);
    assert_eq!(log_of(&applied.facts), [(5, 50_000)]);
    assert_eq!(written(&applied)["properties"]["mergeberg.queue"], "q\"1");
}

#[test]
fn the_metadata_log_names_the_previous_file_and_is_bounded_by_the_new_properties() {
    let two = BTreeMap::from([("write.metadata.previous-versions-max".to_owned(), "2".to_owned())]);
    let first = apply(&[Update::SetProperties(two)], 50_000).unwrap();
    let second = first.document.apply(&first.facts, "file:///w/next.json", &[], 60_000).unwrap();

    assert_eq!(
        written(&second)["metadata-log"],
        json!([
            {"timestamp-ms": 4000, "metadata-file": LOCATION},
            {"timestamp-ms": 50_000, "metadata-file": "file:///w/next.json"}
        ])
    );
}

#[test]
fn a_key_that_stands_there_twice_is_refused() {
    let twice = metadata().to_string().replacen("\"x-first\"", "\"location\"", 1);

    let error = Document::parse(twice.as_bytes()).unwrap_err();

    assert!(error.to_string().contains("'location' stands there twice"), "{error}");
}

/// One step of a random history; the numbers choose among what is there.
#[derive(Clone, Debug)]
enum Step {
    Add { parent: usize, root: bool },
    Set { name: usize, at: usize },
    RemoveRef { name: usize },
    RemoveSnapshots { start: usize, step: usize },
    SetProperty { value: u8 },
    RemoveProperty,
}

const NAMES: [&str; 5] = ["main", "ingest/a", "b\"ränch", "mergeberg/tmp/q/1", "c"];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (any::<usize>(), prop::bool::weighted(0.1)).prop_map(|(parent, root)| Step::Add { parent, root }),
        4 => (any::<usize>(), any::<usize>()).prop_map(|(name, at)| Step::Set { name, at }),
        1 => any::<usize>().prop_map(|name| Step::RemoveRef { name }),
        1 => (0usize..8, 1usize..4).prop_map(|(start, step)| Step::RemoveSnapshots { start, step }),
        1 => any::<u8>().prop_map(|value| Step::SetProperty { value }),
        1 => Just(Step::RemoveProperty),
    ]
}

fn update_of(
    step: &Step,
    ids: &mut Vec<i64>,
    next: &mut i64,
    next_row_id: &mut Option<i64>,
) -> Option<Update> {
    Some(match step {
        Step::Add { parent, root } => {
            let parent = if *root || ids.is_empty() { None } else { Some(ids[parent % ids.len()]) };
            *next += 1;
            ids.push(*next);
            let row_range = next_row_id.map(|first_row_id| RowRange { first_row_id, added_rows: *next % 7 });
            *next_row_id = row_range.and_then(|range| range.end());
            Update::AddSnapshot(NewSnapshot { row_range, ..snapshot(*next, parent) })
        }
        Step::Set { name, at } => {
            if ids.is_empty() {
                return None;
            }
            Update::SetRef(branch(NAMES[name % NAMES.len()], ids[at % ids.len()]))
        }
        Step::RemoveRef { name } => Update::RemoveRef(RefName::new(NAMES[name % NAMES.len()])),
        Step::RemoveSnapshots { start, step } => {
            let gone: Vec<i64> = ids.iter().copied().skip(*start).step_by(*step + 1).collect();
            ids.retain(|id| !gone.contains(id));
            Update::RemoveSnapshots(gone.into_iter().map(SnapshotId).collect())
        }
        Step::SetProperty { value } => Update::SetProperties(BTreeMap::from([(
            "write.metadata.previous-versions-max".to_owned(),
            (value % 4).to_string(),
        )])),
        Step::RemoveProperty => {
            Update::RemoveProperties(vec!["write.metadata.previous-versions-max".to_owned()])
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever is committed: facts follow the bytes, the crate reads them, nothing unknown is lost.
    #[test]
    fn nothing_unknown_is_lost_and_facts_follow_the_bytes(
        commits in prop::collection::vec(prop::collection::vec(step(), 0..6), 1..5),
        clock in prop::collection::vec(0i64..100_000, 5),
        v3 in any::<bool>(),
    ) {
        let original = if v3 { metadata_v3() } else { metadata() };
        let (mut document, mut facts) = parse(&original);
        let mut next_row_id = facts.next_row_id;
        let mut ids: Vec<i64> = vec![1, 2, 3, 4];
        let mut next = 4;
        let mut touched = BTreeSet::new();
        for (commit, now_ms) in commits.iter().zip(&clock) {
            let updates: Vec<Update> =
                commit.iter().filter_map(|step| update_of(step, &mut ids, &mut next, &mut next_row_id)).collect();
            for update in &updates {
                if let Update::SetRef(reference) = update {
                    touched.insert(reference.name.0.clone());
                }
            }
            let applied = document.apply(&facts, LOCATION, &updates, *now_ms).unwrap();
            assert_true_to_bytes(&applied);
            prop_assert!(applied.facts.last_updated_ms > facts.last_updated_ms);
            prop_assert_eq!(applied.facts.next_row_id, next_row_id);
            prop_assert!(applied.facts.snapshot_log.is_sorted_by_key(|entry| entry.timestamp_ms));
            let main = applied.facts.head(&RefName::main());
            prop_assert_eq!(applied.facts.snapshot_log.last().map(|entry| entry.snapshot_id), main);
            document = applied.document;
            facts = applied.facts;
        }

        let now: Value = serde_json::from_slice(&document.to_bytes()).unwrap();
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        prop_assert_eq!(keys(&now), keys(&original));
        for key in ["x-first", "x-last", "schemas", "partition-specs", "sort-orders", "table-uuid"] {
            prop_assert_eq!(now[key].to_string(), original[key].to_string());
        }
        for before in original["snapshots"].as_array().unwrap() {
            let id = &before["snapshot-id"];
            if let Some(after) =
                now["snapshots"].as_array().unwrap().iter().find(|s| s["snapshot-id"] == *id)
            {
                prop_assert_eq!(after.to_string(), before.to_string());
            }
        }
        for (name, before) in original["refs"].as_object().unwrap() {
            if let Some(after) = now["refs"].get(name)
                && !touched.contains(name)
            {
                prop_assert_eq!(after.to_string(), before.to_string());
            }
        }
    }
}
