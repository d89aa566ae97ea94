//! Sets in the ledger: enqueued together, ended together, landed together or not at all.

use mergeberg_kernel::evidence::{Evidence, PinnedInput};
use mergeberg_kernel::ids::{Epoch, Principal, RefName, RequestId, SnapshotId, TableUuid, TrainId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestEvent;

use super::testing::{Home, enqueue, evidence, new_request, on_each_database, train};
use super::*;

on_each_database! {
    a_set_is_its_parts_in_the_order_in_which_they_were_named,
    the_same_set_is_there_once_and_a_key_is_one_set,
    a_part_that_ends_without_landing_ends_the_others,
    intents_of_a_set_are_written_and_settled_together,
    a_set_that_did_not_land_goes_back_as_a_whole,
    promise_2_a_set_lands_only_what_its_checks_have_read_together,
    no_part_of_a_set_lands_without_the_others,
    the_revert_of_a_set_is_one_set_while_it_is_open,
}

fn part(table: &str, pinned: i64) -> NewRequest {
    NewRequest {
        table: format!("nyc.{table}").parse().unwrap(),
        table_uuid: TableUuid::new(format!("uuid-of-{table}")),
        ..new_request("release/1", pinned)
    }
}

async fn enqueued(ledger: &Ledger) -> Vec<RequestRow> {
    match ledger.enqueue_set(&[part("flights", 7), part("hours", 8)], None, 1).await.unwrap() {
        EnqueuedSet::New(rows) => rows,
        other => panic!("{other:?}"),
    }
}

async fn states(ledger: &Ledger, rows: &[RequestRow]) -> Vec<String> {
    let mut states = Vec::new();
    for row in rows {
        states.push(ledger.request(row.id).await.unwrap().state.to_string());
    }
    states
}

async fn a_set_is_its_parts_in_the_order_in_which_they_were_named(home: &Home) {
    let ledger = home.ledger().await;
    enqueue(&ledger, "ingest/a", 1).await;
    let rows = enqueued(&ledger).await;
    let set = Some(InSet { id: rows[0].id, parts: 2 });
    assert_eq!(rows.iter().map(|row| row.set).collect::<Vec<_>>(), [set, set]);
    assert_eq!(ledger.parts(rows[0].id).await.unwrap(), rows);
    let open = ledger.open_sets().await.unwrap();
    assert_eq!(open.len(), 1);
    assert_eq!(
        open[0].lanes.iter().map(|lane| lane.1.as_str()).collect::<Vec<_>>(),
        ["uuid-of-flights", "uuid-of-hours"]
    );
    let waiting = ledger.waiting(&rows[0].table_uuid, &rows[0].target, Depth::ALL).await.unwrap().rows;
    assert_eq!(waiting.iter().map(|row| row.id).collect::<Vec<_>>(), [RequestId(1), rows[0].id]);
    for parts in [vec![], vec![part("flights", 9)]] {
        let error = ledger.enqueue_set(&parts, None, 2).await.unwrap_err();
        assert!(matches!(error, LedgerError::NotASet(_)), "{error}");
    }
}

async fn the_same_set_is_there_once_and_a_key_is_one_set(home: &Home) {
    let ledger = home.ledger().await;
    let parts = [part("flights", 7), part("hours", 8)];
    let rows = enqueued(&ledger).await;
    let other_order = [parts[1].clone(), parts[0].clone()];
    for again in [&parts, &other_order] {
        assert_eq!(ledger.enqueue_set(again, None, 2).await.unwrap(), EnqueuedSet::Existing(rows.clone()));
    }
    // A part of it by itself is the part that waits already; under a key it is a request of its own.
    assert_eq!(ledger.enqueue(&parts[0], 3).await.unwrap(), Enqueued::Existing(rows[0].clone()));

    let EnqueuedSet::New(keyed) = ledger.enqueue_set(&parts, Some("k"), 4).await.unwrap() else { panic!() };
    assert_eq!(ledger.enqueue_set(&parts, Some("k"), 5).await.unwrap(), EnqueuedSet::Existing(keyed.clone()));
    for other in [vec![part("flights", 7), part("hours", 9)], vec![parts[0].clone(), part("geo", 1)]] {
        let conflict = ledger.enqueue_set(&other, Some("k"), 6).await.unwrap();
        assert_eq!(conflict, EnqueuedSet::KeyConflict(Box::new(keyed[0].clone())));
    }
    let single = NewRequest { idempotency_key: Some("k".to_owned()), ..parts[0].clone() };
    assert_eq!(ledger.enqueue(&single, 7).await.unwrap(), Enqueued::KeyConflict(keyed[0].clone()));
}

async fn a_part_that_ends_without_landing_ends_the_others(home: &Home) {
    let ledger = home.ledger().await;
    let rows = enqueued(&ledger).await;
    let refuse = Change::new(rows[1].id, RequestEvent::Refuse(ReasonCode::DuplicateKey));
    ledger.apply(None, &[refuse], 2).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["refused(set-part-failed)", "refused(duplicate-key)"]);
    let told = ledger.request(rows[0].id).await.unwrap().detail.unwrap().to_string();
    assert!(told.contains("nyc.hours") && told.contains("refused(duplicate-key)"), "{told}");
    assert_eq!(ledger.open_sets().await.unwrap(), []);

    let rows = enqueued(&ledger).await;
    ledger.cancel(rows[0].id, &Principal::new("ann"), 3).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["cancelled", "cancelled"]);

    let rows = enqueued(&ledger).await;
    let gone = Change::new(rows[0].id, RequestEvent::Withdraw(ReasonCode::BranchGone));
    ledger.apply(None, &[gone], 4).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["withdrawn(branch-gone)", "refused(set-part-failed)"]);

    // Found published together, they end together.
    let rows = enqueued(&ledger).await;
    let found: Vec<Change> =
        rows.iter().map(|row| Change::new(row.id, RequestEvent::FindPublished)).collect();
    ledger.apply(None, &found, 5).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["already-published", "already-published"]);
}

/// A set whose parts are staged and checked under candidates 71 and 81, and its intents.
async fn staged(ledger: &Ledger, epoch: Epoch) -> (Vec<RequestRow>, Vec<Intent>) {
    let rows = enqueued(ledger).await;
    let mut intents = Vec::new();
    for (row, candidate) in rows.iter().zip([71, 81]) {
        let id = format!("t{candidate}");
        let train = TrainRow { table_uuid: row.table_uuid.clone(), ..train(&id, &[candidate]) };
        ledger.record_train(epoch, &train, &[]).await.unwrap();
        ledger.set_train_status(epoch, &train.train, TrainStatus::Staged).await.unwrap();
        let admit =
            Change { train: Some(TrainId::new(id.clone())), ..Change::new(row.id, RequestEvent::Admit) };
        let changes =
            [admit, Change::new(row.id, RequestEvent::Stage), Change::new(row.id, RequestEvent::Check)];
        ledger.apply(Some(epoch), &changes, 3).await.unwrap();
        intents.push(Intent {
            id: mergeberg_kernel::ids::IntentId(format!("intent-{id}")),
            train: train.train,
            table: row.table.clone(),
            table_uuid: row.table_uuid.clone(),
            target: row.target.clone(),
            planned_head: train.planned_head,
            tail: train.tail,
            candidates: train.candidates,
            temp_ref: train.temp_ref,
            cars: vec![IntentCar {
                request: row.id,
                candidates: vec![SnapshotId(candidate)],
                drop_source: None,
            }],
            required: vec![(SnapshotId(candidate), "keys".to_owned())],
            set: Some(rows[0].id),
        });
    }
    (rows, intents)
}

/// Evidence of the first part that has read the other table at this snapshot, and of the second.
async fn pass(ledger: &Ledger, intents: &[Intent], read: i64) {
    let input = PinnedInput { table: intents[1].table.clone(), snapshot: SnapshotId(read) };
    let first = Evidence { inputs: vec![input], ..evidence(71, "keys") };
    for (intent, evidence) in intents.iter().zip([first, evidence(81, "keys")]) {
        let rows = [(vec![intent.cars[0].request], evidence)];
        ledger.record_evidence(&intent.train, &rows, 4).await.unwrap();
    }
}

async fn intents_of_a_set_are_written_and_settled_together(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let (rows, intents) = staged(&ledger, epoch).await;
    let set = rows[0].id;
    let missing = ledger.write_set_intents(epoch, set, &intents, 5).await.unwrap_err();
    assert!(matches!(missing, LedgerError::EvidenceMissing { .. }), "{missing}");
    pass(&ledger, &intents, 81).await;
    ledger.write_set_intents(epoch, set, &intents, 5).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["landing", "landing"]);
    assert_eq!(ledger.open_set_intents(set).await.unwrap(), intents);

    // No part of it is settled alone.
    let landed = [(rows[0].id, SnapshotId(71))];
    let intent = &intents[0].id;
    for error in [
        ledger.settle_landed(epoch, intent, 6, &landed).await.map(drop),
        ledger.settle_not_landed(epoch, intent, 6, "no").await.map(drop),
        ledger.mark_unknown(epoch, intent, 6).await,
    ] {
        assert!(matches!(error, Err(LedgerError::MalformedIntent { .. })), "{error:?}");
    }

    ledger.mark_set_unknown(epoch, set, 6).await.unwrap();
    ledger.mark_set_unknown(epoch, set, 6).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["unknown", "unknown"]);
    ledger.settle_set_landed(epoch, set, 7).await.unwrap();
    ledger.settle_set_landed(epoch, set, 7).await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["landed", "landed"]);
    for (row, tail) in rows.iter().zip([71, 81]) {
        assert_eq!(ledger.request(row.id).await.unwrap().landed_snapshot, Some(SnapshotId(tail)));
        let receipt = ledger.receipt_of_request(row.id).await.unwrap().unwrap();
        assert_eq!(receipt.intent.set, Some(set));
    }
    assert_eq!(ledger.open_intents().await.unwrap(), []);
}

async fn a_set_that_did_not_land_goes_back_as_a_whole(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let (rows, intents) = staged(&ledger, epoch).await;
    pass(&ledger, &intents, 81).await;
    ledger.write_set_intents(epoch, rows[0].id, &intents, 5).await.unwrap();
    ledger.settle_set_not_landed(epoch, rows[0].id, 6, "a target moved").await.unwrap();
    assert_eq!(states(&ledger, &rows).await, ["queued", "queued"]);
    assert_eq!(ledger.open_set_intents(rows[0].id).await.unwrap(), []);
}

async fn promise_2_a_set_lands_only_what_its_checks_have_read_together(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let (rows, intents) = staged(&ledger, epoch).await;
    // An earlier candidate of the other table, or its head.
    pass(&ledger, &intents, 80).await;
    let error = ledger.write_set_intents(epoch, rows[0].id, &intents, 5).await.unwrap_err();
    assert!(
        matches!(&error, LedgerError::EvidenceMissing { candidate: SnapshotId(71), check } if check == "keys"),
        "{error}"
    );
    assert_eq!(ledger.open_intents().await.unwrap(), []);
    assert_eq!(states(&ledger, &rows).await, ["checking", "checking"], "nothing was written");
}

async fn no_part_of_a_set_lands_without_the_others(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let (rows, intents) = staged(&ledger, epoch).await;
    pass(&ledger, &intents, 81).await;
    let alone = Intent { set: None, ..intents[0].clone() };
    let half = vec![intents[0].clone()];
    let twice = vec![intents[0].clone(), intents[0].clone()];
    let foreign = vec![intents[0].clone(), Intent { set: Some(RequestId(99)), ..intents[1].clone() }];
    let error = ledger.write_intent(epoch, &alone, 5).await.unwrap_err();
    assert!(error.to_string().contains("lands with its set or not at all"), "{error}");
    assert!(ledger.write_intent(epoch, &intents[0], 5).await.is_err());
    for intents in [half, twice, foreign] {
        let error = ledger.write_set_intents(epoch, rows[0].id, &intents, 5).await.unwrap_err();
        assert!(matches!(error, LedgerError::MalformedIntent { .. }), "{error}");
    }
    assert_eq!(ledger.open_intents().await.unwrap(), []);
    assert_eq!(states(&ledger, &rows).await, ["checking", "checking"]);
}

async fn the_revert_of_a_set_is_one_set_while_it_is_open(home: &Home) {
    let ledger = home.ledger().await;
    let landed = enqueued(&ledger).await;
    let inverse = |at: i64| -> Vec<(NewRequest, Reverts)> {
        let tables = landed.iter().zip(["flights", "hours"]);
        tables
            .map(|(row, table)| {
                let reverts = Reverts { request: row.id, reason: Some("bad load".to_owned()) };
                (NewRequest { source: RefName(format!("r/{at}")), ..part(table, at) }, reverts)
            })
            .collect()
    };
    let ids = landed.iter().map(|row| row.id).collect();
    let EnqueuedSet::New(rows) = ledger.enqueue_set_revert(&inverse(20), None, 2).await.unwrap() else {
        panic!()
    };
    let reverted: Vec<i64> = rows.iter().map(|row| row.reverts.as_ref().unwrap().request.0).collect();
    assert_eq!(reverted, [landed[0].id.0, landed[1].id.0]);
    assert_eq!(
        rows.iter().map(|row| row.set).collect::<Vec<_>>(),
        [Some(InSet { id: rows[0].id, parts: 2 }); 2]
    );
    // Whatever branches it was written to.
    let again = ledger.enqueue_set_revert(&inverse(21), None, 3).await.unwrap();
    assert_eq!(again, EnqueuedSet::Existing(rows.clone()));
    assert_eq!(ledger.set_revert_of(&ids, None).await.unwrap(), Some(EnqueuedSet::Existing(rows.clone())));
    assert_eq!(ledger.set_revert_of(&ids, Some("k")).await.unwrap(), None);
    let EnqueuedSet::New(keyed) = ledger.enqueue_set_revert(&inverse(22), Some("k"), 4).await.unwrap() else {
        panic!()
    };
    let again = ledger.enqueue_set_revert(&inverse(23), Some("k"), 5).await.unwrap();
    assert_eq!(again, EnqueuedSet::Existing(keyed.clone()));

    // A part of it by itself is not all of it.
    let one = [landed[0].id].into();
    let conflict = EnqueuedSet::RevertedElsewhere(Box::new(rows[0].clone()));
    assert_eq!(ledger.set_revert_of(&one, None).await.unwrap(), Some(conflict));
    let conflict = EnqueuedSet::KeyConflict(Box::new(keyed[0].clone()));
    assert_eq!(ledger.set_revert_of(&one, Some("k")).await.unwrap(), Some(conflict));
    let (part, reverts) = &inverse(24)[1];
    let alone = ledger.enqueue_revert(part, reverts, 6).await.unwrap();
    assert_eq!(alone, Enqueued::Existing(rows[1].clone()), "its part of the set is on its way");
}
