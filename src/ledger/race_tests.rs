//! Two processes on one ledger. Each task opens the ledger for itself, as a process would.

use std::collections::BTreeSet;

use mergeberg_kernel::ids::{Epoch, RequestId};
use mergeberg_kernel::state::{RequestEvent, RequestState};

use super::testing::{Home, new_request, on_each_database};
use super::{Change, Enqueued, Ledger, LedgerError, LedgerPlace, NewRequest, RequestFilter};
use crate::database::{Transaction, query};

on_each_database! {
    case_o27_two_writers_and_an_open_reader_lose_and_double_nothing,
    case_o27_a_writer_waits_for_the_lock_of_another_process,
    calls_can_be_made_from_tasks,
}

const REQUESTS: i64 = 200;
const LEASE_MS: i64 = 10;

struct Outcome {
    enqueued: Vec<RequestId>,
    existing: Vec<RequestId>,
    claimed: Vec<RequestId>,
    led: Vec<(i64, Epoch)>,
}

/// Enqueues every request under its key, tries to lead once a round, and claims every request.
async fn run(place: LedgerPlace, name: &'static str) -> Outcome {
    let ledger = Ledger::open(place).await.unwrap();
    let mut outcome = Outcome { enqueued: vec![], existing: vec![], claimed: vec![], led: vec![] };
    for round in 0..REQUESTS {
        let new =
            NewRequest { idempotency_key: Some(format!("run-{round}")), ..new_request("ingest/a", round) };
        match ledger.enqueue(&new, round).await.unwrap() {
            Enqueued::New(row) => outcome.enqueued.push(row.id),
            Enqueued::Existing(row) => outcome.existing.push(row.id),
            Enqueued::KeyConflict(row) => panic!("{row:?}"),
        }
        // Both see the lease of the round before as expired; one may take it.
        let now_ms = round * LEASE_MS;
        if let Some(epoch) = ledger.lead(name, LEASE_MS, now_ms).await.unwrap() {
            outcome.led.push((now_ms, epoch));
        }
    }
    for id in 1..=REQUESTS {
        match ledger.apply(None, &[Change::new(RequestId(id), RequestEvent::Admit)], 1).await {
            Ok(_) => outcome.claimed.push(RequestId(id)),
            Err(LedgerError::Transition { .. }) => {}
            // A busy file is no request's fault, and within the bound it is not seen at all.
            Err(other) => panic!("{name}: {other}"),
        }
    }
    outcome
}

async fn rows_seen(tx: &mut Transaction) -> i64 {
    query("SELECT count(*) FROM merge_request").scalar(tx).await.unwrap()
}

async fn case_o27_two_writers_and_an_open_reader_lose_and_double_nothing(home: &Home) {
    let ledger = home.ledger().await;
    let mut reading = ledger.reading().await.unwrap();
    assert_eq!(rows_seen(&mut reading).await, 0);

    let one = tokio::spawn(run(ledger.place().clone(), "one"));
    let two = tokio::spawn(run(ledger.place().clone(), "two"));
    let (one, two) = (one.await.unwrap(), two.await.unwrap());

    assert_eq!(rows_seen(&mut reading).await, 0, "the reader keeps its snapshot");
    reading.commit().await.unwrap();
    let mut reading = ledger.reading().await.unwrap();
    assert_eq!(rows_seen(&mut reading).await, REQUESTS);
    reading.commit().await.unwrap();

    let all: BTreeSet<RequestId> = (1..=REQUESTS).map(RequestId).collect();
    let count = all.len();
    let union =
        |a: &[RequestId], b: &[RequestId]| -> BTreeSet<RequestId> { a.iter().chain(b).copied().collect() };
    assert_eq!(one.enqueued.len() + two.enqueued.len(), count, "each key made one request");
    assert_eq!(union(&one.enqueued, &two.enqueued), all);
    assert_eq!(one.existing.len() + two.existing.len(), count, "the other was told of it");
    assert_eq!(one.claimed.len() + two.claimed.len(), count, "each request was claimed once");
    assert_eq!(union(&one.claimed, &two.claimed), all);

    let led: BTreeSet<(i64, Epoch)> = one.led.iter().chain(&two.led).copied().collect();
    let epochs: BTreeSet<Epoch> = led.iter().map(|(_, epoch)| *epoch).collect();
    assert_eq!(led.len(), one.led.len() + two.led.len(), "no epoch was given twice");
    assert_eq!(epochs, (1..=i64::try_from(led.len()).unwrap()).map(Epoch).collect(), "epochs grow by one");
    // On a file leases never overlap: each epoch began when the one before had run out.
    let begun: Vec<i64> = led.iter().map(|(at_ms, _)| *at_ms).collect();
    let apart = begun.windows(2).all(|pair| pair[1] >= pair[0] + LEASE_MS);
    assert!(apart || matches!(ledger.place(), LedgerPlace::Postgres(_)), "{begun:?}");

    for row in ledger.requests(&RequestFilter::default()).await.unwrap() {
        assert_eq!((row.state, row.attempts), (RequestState::Planning, 1));
        assert_eq!(ledger.attempts(row.id).await.unwrap().len(), 2);
    }
}

/// Another process that holds the write lock delays a writer; it fails nothing.
async fn case_o27_a_writer_waits_for_the_lock_of_another_process(home: &Home) {
    let ledger = home.ledger().await;
    let other = Ledger::open(ledger.place()).await.unwrap();
    let held = other.begin().await.unwrap();
    let waiting = {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.enqueue(&new_request("ingest/a", 1), 1).await })
    };
    // Reads go on meanwhile.
    assert_eq!(ledger.requests(&RequestFilter::default()).await.unwrap(), []);
    assert!(!waiting.is_finished());
    held.commit().await.unwrap();
    assert!(matches!(waiting.await.unwrap().unwrap(), Enqueued::New(_)));
}

/// The worker runs lanes as tasks: every future of the API can be sent to another thread.
async fn calls_can_be_made_from_tasks(home: &Home) {
    fn sendable<F: Future + Send>(call: F) -> F {
        call
    }
    let ledger = home.ledger().await;
    let epoch = sendable(ledger.lead("one", LEASE_MS, 0)).await.unwrap().unwrap();
    let id = super::testing::enqueue(&ledger, "ingest/a", 1).await;
    let intent = super::testing::staged_train(&ledger, epoch, "t1", &[(id, 11)]).await;
    let rows = [(vec![id], super::testing::evidence(11, "lineage"))];
    sendable(ledger.record_evidence(&intent.train, &rows, 1)).await.unwrap();
    sendable(ledger.write_intent(epoch, &intent, 2)).await.unwrap();
    sendable(ledger.mark_unknown(epoch, &intent.id, 3)).await.unwrap();
    sendable(ledger.settle_landed(epoch, &intent.id, 4, &[(id, intent.tail)])).await.unwrap();
    sendable(ledger.requests(&RequestFilter::default())).await.unwrap();
    sendable(ledger.reviews(&Default::default())).await.unwrap();
    sendable(ledger.evidence_of_request(id)).await.unwrap();
    let mut watcher = sendable(ledger.watcher()).await.unwrap();
    let none = std::time::Duration::ZERO;
    sendable(watcher.wait_for_change(none, none)).await.unwrap();
    sendable(ledger.renew(epoch, 5)).await.unwrap();
    sendable(ledger.release(epoch)).await.unwrap();
    sendable(Ledger::open_or_create(ledger.place())).await.unwrap();
}
