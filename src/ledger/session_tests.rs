//! Who leads on PostgreSQL when sessions end (case O40). Without a server (`scripts/postgres`) these tests say so and
//! do nothing.

use std::time::Instant;

use mergeberg_kernel::state::RequestEvent;
use sqlx::{AssertSqlSafe, Executor as _};

use super::super::testing::{enqueue, succeed};
use super::super::{Change, LedgerPlace};
use super::*;
use crate::database::testing::TestServer;

/// Longer than any test: what is waited for has to come by itself.
const LONG: Duration = Duration::from_secs(60);

/// A session's end is the leader's end, whatever it still believes (case O40).
#[tokio::test]
async fn case_o40_a_lost_connection_loses_the_lead() {
    let Some(server) = TestServer::find() else { return };
    let ledger = Ledger::open_or_create(server.database().await).await.unwrap();
    let other = Ledger::open(ledger.place()).await.unwrap();
    let id = enqueue(&ledger, "ingest/a", 1).await;
    let admit = [Change::new(id, RequestEvent::Admit)];
    let epoch = ledger.lead("one", 60_000, 0).await.unwrap().unwrap();
    assert_eq!(other.lead("two", 60_000, 0).await.unwrap(), None);
    ledger.apply(Some(epoch), &admit, 1).await.unwrap();

    let pid: i64 = query("SELECT session_pid FROM committer").scalar(&ledger.readers).await.unwrap();
    let LedgerPlace::Postgres(place) = ledger.place() else { panic!("{ledger:?}") };
    let mut admin = place.connect().await.unwrap();
    admin.execute(AssertSqlSafe(format!("SELECT pg_terminate_backend({pid})"))).await.unwrap();

    // Nobody has taken over, and yet it writes nothing more: others may begin at any moment.
    let requeue = [Change::new(id, RequestEvent::Requeue)];
    let error = loop {
        match ledger.apply(Some(epoch), &requeue, 2).await {
            // The server ends it a moment later.
            Ok(_) => ledger.apply(Some(epoch), &admit, 2).await.map(drop).unwrap_or_default(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, LedgerError::Deposed { leader: None, .. }), "{error}");
    assert_eq!(ledger.leader().await.unwrap(), None);
    let error = ledger.renew(epoch, 3).await.unwrap_err();
    assert!(matches!(error, LedgerError::Deposed { .. }), "{error}");
    assert_eq!(other.lead("two", 60_000, 4).await.unwrap(), Some(Epoch(2)));
    assert!(matches!(ledger.renew(epoch, 5).await, Err(LedgerError::Deposed { .. })));
    ledger.release(epoch).await.unwrap();
    assert_eq!(other.leader().await.unwrap().unwrap().holder, "two");
    server.end().await;
}

#[tokio::test]
async fn case_o40_a_leader_that_is_gone_is_followed_at_once() {
    let Some(server) = TestServer::find() else { return };
    let place = server.database().await;
    let ledger = Ledger::open_or_create(place.clone()).await.unwrap();
    assert_eq!(ledger.lead("one", 3_600_000, 0).await.unwrap(), Some(Epoch(1)));
    drop(ledger);
    let other = Ledger::open(place).await.unwrap();
    // Within the hour that its lease would have lasted.
    assert_eq!(succeed(&other, "two", 3_600_000, 1).await, Epoch(2));
    server.end().await;
}

/// A worker that hangs says nothing more, and its connection stays open: the server ends the session.
#[tokio::test]
async fn case_o40_a_leader_that_hangs_is_followed_after_its_lease() {
    const LEASE_MS: i64 = 1;
    let Some(server) = TestServer::find() else { return };
    let hanging = Ledger::open_or_create(server.database().await).await.unwrap();
    let other = Ledger::open(hanging.place()).await.unwrap();
    hanging.lead("one", LEASE_MS, 0).await.unwrap().unwrap();
    let began = Instant::now();
    let mut look = tokio::time::interval(Duration::from_millis(100));
    while other.lead("two", LEASE_MS, 1).await.unwrap().is_none() {
        assert!(began.elapsed() < LONG, "nobody leads any more");
        look.tick().await;
    }
    assert!(matches!(hanging.renew(Epoch(1), 2).await, Err(LedgerError::Deposed { .. })));
    server.end().await;
}

/// Whoever asks may give up when the lock is taken already: the connection goes, and the lock with it.
#[tokio::test]
async fn case_o40_a_lead_that_is_given_up_leaves_no_lock() {
    let Some(server) = TestServer::find() else { return };
    let ledger = Ledger::open_or_create(server.database().await).await.unwrap();
    let other = Ledger::open(ledger.place()).await.unwrap();
    // Nobody can write: the new leader does not get to its epoch.
    let held = other.begin().await.unwrap();
    let asking = {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.lead("one", 60_000, 0).await })
    };
    let locks = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let began = Instant::now();
    while query(locks).scalar::<i64>(&other.readers).await.unwrap() == 0 {
        assert!(began.elapsed() < LONG, "it does not take the lock");
    }
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    held.rollback().await.unwrap();
    assert_eq!(succeed(&other, "two", 60_000, 1).await, Epoch(1));
    assert_eq!(ledger.lead("one", 60_000, 2).await.unwrap(), None);
    server.end().await;
}
