use super::super::events::EventKind;
use super::super::testing::{Home, enqueue, evidence, on_each_database, pass, staged_train, succeed};
use super::super::{Change, TrainRow};
use super::*;
use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::reason::ReasonCode;

on_each_database! {
    a_train_lands_with_a_receipt,
    promise_2_no_intent_without_a_pass_under_exactly_that_id,
    one_open_intent_a_target,
    behind_an_open_intent_only_its_settlement_moves_a_request,
    a_receipt_speaks_for_exactly_the_cars,
    a_malformed_intent_is_not_written,
    rule_l2_an_intent_follows_known_staging,
    what_was_found_is_written_with_the_intent_or_not_at_all,
}

struct Story {
    ledger: Ledger,
    epoch: Epoch,
    a: RequestId,
    b: RequestId,
    intent: Intent,
}

/// Two requests on a staged train, checked, not yet passed.
async fn story(home: &Home) -> Story {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let a = enqueue(&ledger, "ingest/a", 1).await;
    let b = enqueue(&ledger, "ingest/b", 2).await;
    let intent = staged_train(&ledger, epoch, "t1", &[(a, 11), (b, 12)]).await;
    Story { ledger, epoch, a, b, intent }
}

async fn states(ledger: &Ledger, ids: &[RequestId]) -> Vec<RequestState> {
    let mut states = Vec::new();
    for id in ids {
        states.push(ledger.request(*id).await.unwrap().state);
    }
    states
}

async fn a_train_lands_with_a_receipt(home: &Home) {
    let Story { ledger, epoch, a, b, intent } = story(home).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    assert_eq!(states(&ledger, &[a, b]).await, [RequestState::Landing; 2]);
    let open = ledger.open_intents().await.unwrap();
    assert_eq!(open, [ledger.landing(&intent.id).await.unwrap()]);
    assert_eq!((&open[0].intent, open[0].epoch, open[0].state), (&intent, epoch, LandingState::Open));
    assert_eq!(ledger.landed_candidates(&intent.table_uuid, &intent.target).await.unwrap(), []);
    assert_eq!(ledger.receipt_of_request(a).await.unwrap(), None);

    let seen = ledger.events_since(0, 100).await.unwrap().last().unwrap().id;
    let landed = [(a, SnapshotId(11)), (b, SnapshotId(12))];
    let rows = ledger.settle_landed(epoch, &intent.id, 21, &landed).await.unwrap();
    assert_eq!(
        rows.iter().map(|row| row.landed_snapshot).collect::<Vec<_>>(),
        [Some(SnapshotId(11)), Some(SnapshotId(12))]
    );
    assert_eq!(states(&ledger, &[a, b]).await, [RequestState::Landed; 2]);
    assert_eq!(ledger.open_intents().await.unwrap(), []);
    let published = ledger.landed_candidates(&intent.table_uuid, &intent.target).await.unwrap();
    assert_eq!(published, intent.candidates);
    let receipt = ledger.receipt_of_request(b).await.unwrap().unwrap();
    assert_eq!(receipt.state, LandingState::Landed { at_ms: 21 });
    assert_eq!(receipt.car(b).unwrap().candidates, [SnapshotId(12)]);
    assert_eq!(ledger.receipts(21, 22).await.unwrap(), [receipt]);
    let head = ledger.target_head(&intent.table_uuid, &intent.target).await.unwrap().unwrap();
    assert_eq!((head.baseline, head.last_landed_head), (intent.planned_head, Some(intent.tail)));
    assert_eq!(ledger.train(&intent.train).await.unwrap().status, TrainStatus::Landed);
    let told = ledger.events_since(seen, 100).await.unwrap();
    assert_eq!(
        told.iter().map(|event| (event.kind, event.request)).collect::<Vec<_>>(),
        [(EventKind::Landed, Some(a)), (EventKind::Landed, Some(b))]
    );

    // Promise 4: it is settled once.
    for again in [
        ledger.settle_landed(epoch, &intent.id, 22, &landed).await.unwrap_err(),
        ledger.settle_not_landed(epoch, &intent.id, 22, "x").await.unwrap_err(),
        ledger.mark_unknown(epoch, &intent.id, 22).await.unwrap_err(),
    ] {
        assert!(matches!(again, LedgerError::IntentSettled { .. }), "{again}");
    }
}

async fn promise_2_no_intent_without_a_pass_under_exactly_that_id(home: &Home) {
    let Story { ledger, epoch, a, b, mut intent } = story(home).await;
    intent.required = vec![(SnapshotId(12), "lineage".to_owned()), (SnapshotId(11), "rows".to_owned())];
    let missing = async || match ledger.write_intent(epoch, &intent, 20).await.unwrap_err() {
        LedgerError::EvidenceMissing { candidate, check } => (candidate.0, check),
        other => panic!("{other}"),
    };
    let record = async |row: Evidence| {
        ledger.record_evidence(&intent.train, &[(vec![a], row)], 5).await.unwrap();
    };
    assert_eq!(missing().await, (12, "lineage".to_owned()));
    record(evidence(11, "lineage")).await;
    assert_eq!(missing().await, (12, "lineage".to_owned()), "another candidate's pass is no pass");
    record(evidence(12, "lineage")).await;
    assert_eq!(missing().await, (11, "rows".to_owned()));
    for result in [
        CheckResult::CouldNotRun { error: "time-out".to_owned() },
        CheckResult::Failed { code: ReasonCode::RowCount },
    ] {
        record(Evidence { result, ..evidence(11, "rows") }).await;
        assert_eq!(missing().await, (11, "rows".to_owned()), "an error is not a pass");
    }
    assert_eq!(states(&ledger, &[a, b]).await, [RequestState::Checking; 2]);
    assert_eq!(ledger.open_intents().await.unwrap(), []);
    record(evidence(11, "rows")).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
}

async fn one_open_intent_a_target(home: &Home) {
    let Story { ledger, epoch, a, b, intent } = story(home).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    let c = enqueue(&ledger, "ingest/c", 3).await;
    let second = staged_train(&ledger, epoch, "t2", &[(c, 21)]).await;
    pass(&ledger, &second).await;
    let error = ledger.write_intent(epoch, &second, 21).await.unwrap_err();
    assert!(matches!(error, LedgerError::IntentOpen { .. }), "{error}");
    assert_eq!(states(&ledger, &[c]).await, [RequestState::Checking]);

    // An unknown outcome still blocks; a proven one does not.
    ledger.mark_unknown(epoch, &intent.id, 22).await.unwrap();
    ledger.mark_unknown(epoch, &intent.id, 23).await.unwrap();
    assert_eq!(states(&ledger, &[a, b]).await, [RequestState::Unknown; 2]);
    assert_eq!(ledger.open_intents().await.unwrap()[0].state, LandingState::Unknown);
    assert!(ledger.write_intent(epoch, &second, 24).await.is_err());

    let rows = ledger.settle_not_landed(epoch, &intent.id, 25, "head moved").await.unwrap();
    for row in rows {
        assert_eq!((row.state, row.train), (RequestState::Queued, None));
        assert_eq!(row.detail, Some(serde_json::json!({ "not-landed": "head moved" })));
    }
    let settled = ledger.landing(&intent.id).await.unwrap();
    assert_eq!(settled.state, LandingState::NotLanded { at_ms: 25 });
    assert_eq!(ledger.train(&intent.train).await.unwrap().status, TrainStatus::Staged, "to be cleaned up");
    ledger.write_intent(epoch, &second, 26).await.unwrap();
    assert_eq!(ledger.receipt_of_request(a).await.unwrap(), None);
}

async fn behind_an_open_intent_only_its_settlement_moves_a_request(home: &Home) {
    let Story { ledger, epoch, a, b, intent } = story(home).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    for event in [RequestEvent::Requeue, RequestEvent::Refuse(ReasonCode::Conflict), RequestEvent::Cancel] {
        let error = ledger.apply(Some(epoch), &[Change::new(a, event)], 21).await.unwrap_err();
        assert!(matches!(error, LedgerError::BoundToIntent { .. }), "{event:?}: {error}");
    }
    ledger.mark_unknown(epoch, &intent.id, 22).await.unwrap();
    let requeue = [Change::new(a, RequestEvent::Requeue)];
    assert!(matches!(ledger.apply(None, &requeue, 23).await, Err(LedgerError::BoundToIntent { .. })));
    // A successor settles what its predecessor left (rule L5).
    let next = succeed(&ledger, "two", 1_000, 5_000).await;
    let landed = [(a, SnapshotId(11)), (b, SnapshotId(12))];
    let deposed = ledger.settle_landed(epoch, &intent.id, 5_001, &landed).await.unwrap_err();
    assert!(matches!(deposed, LedgerError::Deposed { .. }));
    ledger.settle_landed(next, &intent.id, 5_002, &landed).await.unwrap();
}

async fn a_receipt_speaks_for_exactly_the_cars(home: &Home) {
    let Story { ledger, epoch, a, b, intent } = story(home).await;
    pass(&ledger, &intent).await;
    ledger.write_intent(epoch, &intent, 20).await.unwrap();
    let wrong: [&[(RequestId, SnapshotId)]; 3] = [
        &[(a, SnapshotId(11))],
        &[(a, SnapshotId(11)), (b, SnapshotId(99))],
        &[(a, SnapshotId(11)), (b, SnapshotId(12)), (RequestId(99), SnapshotId(12))],
    ];
    for landed in wrong {
        let error = ledger.settle_landed(epoch, &intent.id, 21, landed).await.unwrap_err();
        assert!(matches!(error, LedgerError::MalformedIntent { .. }), "{error}");
    }
    assert_eq!(states(&ledger, &[a, b]).await, [RequestState::Landing; 2]);
}

async fn a_malformed_intent_is_not_written(home: &Home) {
    let Story { ledger, epoch, a, b: _, intent } = story(home).await;
    pass(&ledger, &intent).await;
    let stranger = enqueue(&ledger, "ingest/stranger", 9).await;
    let other = staged_train(&ledger, epoch, "t2", &[(stranger, 21)]).await;
    let car = |request, candidate| IntentCar {
        request,
        candidates: vec![SnapshotId(candidate)],
        drop_source: None,
    };
    let wrong = [
        Intent { tail: SnapshotId(11), ..intent.clone() },
        Intent { cars: vec![], ..intent.clone() },
        Intent { cars: vec![car(a, 11), car(a, 12)], ..intent.clone() },
        Intent { cars: vec![car(a, 99)], ..intent.clone() },
        Intent { cars: vec![car(a, 11), car(stranger, 12)], ..intent.clone() },
        Intent { required: vec![], ..intent.clone() },
        Intent { required: vec![(SnapshotId(11), "lineage".to_owned())], ..intent.clone() },
        Intent { required: vec![(SnapshotId(99), "lineage".to_owned())], ..intent.clone() },
        Intent { planned_head: None, ..intent.clone() },
        Intent { temp_ref: other.temp_ref, ..intent.clone() },
        Intent { target: RefName::new("dev"), ..intent.clone() },
    ];
    for intent in wrong {
        let error = ledger.write_intent(epoch, &intent, 20).await.unwrap_err();
        assert!(matches!(error, LedgerError::MalformedIntent { .. }), "{error}: {intent:?}");
    }
    assert_eq!(states(&ledger, &[a]).await, [RequestState::Checking]);
    assert_eq!(ledger.open_intents().await.unwrap(), []);
}

async fn rule_l2_an_intent_follows_known_staging(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let a = enqueue(&ledger, "ingest/a", 1).await;
    let intent = staged_train(&ledger, epoch, "t1", &[(a, 11)]).await;
    pass(&ledger, &intent).await;
    let unsure = TrainRow { train: TrainId::new("t2"), ..super::super::testing::train("t2", &[11]) };
    ledger.record_train(epoch, &unsure, &[]).await.unwrap();
    let early = Intent { train: unsure.train, temp_ref: unsure.temp_ref, ..intent.clone() };
    let error = ledger.write_intent(epoch, &early, 20).await.unwrap_err();
    assert!(error.to_string().contains("rule L2"), "{error}");
    let unknown = Intent { train: TrainId::new("t3"), ..intent };
    let error = ledger.write_intent(epoch, &unknown, 20).await.unwrap_err();
    assert!(matches!(error, LedgerError::NoSuchTrain(_)), "{error}");
}

async fn what_was_found_is_written_with_the_intent_or_not_at_all(home: &Home) {
    let ledger = home.ledger().await;
    let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
    let a = enqueue(&ledger, "ingest/a", 1).await;
    let train = super::super::testing::train("t1", &[11]);
    let ride = |event| Change { train: Some(train.train.clone()), ..Change::new(a, event) };
    ledger.record_admitted(epoch, &train, &[ride(RequestEvent::Admit)]).await.unwrap();
    let intent = Intent {
        id: IntentId("intent-t1".to_owned()),
        train: train.train.clone(),
        table: "nyc.flights".parse().unwrap(),
        table_uuid: train.table_uuid.clone(),
        target: train.target.clone(),
        planned_head: train.planned_head,
        tail: train.tail,
        candidates: train.candidates.clone(),
        temp_ref: train.temp_ref.clone(),
        cars: vec![IntentCar { request: a, candidates: vec![SnapshotId(11)], drop_source: None }],
        required: vec![(SnapshotId(11), "lineage".to_owned()), (SnapshotId(11), "rows".to_owned())],
        set: None,
    };
    let changes = [ride(RequestEvent::Stage), ride(RequestEvent::Check)];
    let write = async |evidence: &[(Vec<RequestId>, Evidence)]| {
        ledger.write_found_intent(epoch, &Found { changes: &changes, evidence }, &intent, 20).await
    };
    let passed = |check: &str| (vec![a], evidence(11, check));
    let failed =
        Evidence { result: CheckResult::Failed { code: ReasonCode::RowCount }, ..evidence(11, "rows") };

    for found in [
        vec![passed("lineage")],
        vec![passed("lineage"), (vec![a], evidence(12, "rows"))],
        vec![passed("lineage"), passed("rows"), (vec![a], failed)],
    ] {
        let error = write(&found).await.unwrap_err();
        assert!(matches!(&error, LedgerError::EvidenceMissing { check, .. } if check == "rows"), "{error}");
        assert_eq!(states(&ledger, &[a]).await, [RequestState::Planning]);
        assert_eq!(ledger.evidence_of_request(a).await.unwrap(), []);
        assert_eq!(ledger.train(&train.train).await.unwrap().status, TrainStatus::Staging);
    }

    // What is in the ledger already counts as well.
    ledger.record_evidence(&train.train, &[passed("rows")], 5).await.unwrap();
    write(&[passed("lineage")]).await.unwrap();
    assert_eq!(states(&ledger, &[a]).await, [RequestState::Landing]);
    assert_eq!(ledger.train(&train.train).await.unwrap().status, TrainStatus::Staged);
    let checks: Vec<String> =
        ledger.evidence_of_request(a).await.unwrap().into_iter().map(|row| row.evidence.check).collect();
    assert_eq!(checks, ["rows", "lineage"]);
    let steps: Vec<&str> =
        ledger.attempts(a).await.unwrap().iter().map(|attempt| attempt.state.word()).collect();
    assert_eq!(steps, ["queued", "planning", "staged", "checking", "landing"]);
}
