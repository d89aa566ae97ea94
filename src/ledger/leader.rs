//! One leader a ledger, with an epoch that only grows.
//!
//! Safety does not hang on clocks: every write of a leader is fenced by its epoch inside the writing
//! transaction. Who may try is decided on SQLite by a lease: it is taken over by compare-and-swap, and only once it
//! has expired or was released; a running leader's work is never reset (case O37). On PostgreSQL it is decided by
//! the session that holds a lock (`session`): a leader whose session is gone leads no longer.

use mergeberg_kernel::ids::Epoch;
use serde::Serialize;

use super::decode::Fields;
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::{Ledger, LedgerPlace, wake};
use crate::database::{Sql, Transaction, query};

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeaderRow {
    pub holder: String,
    pub epoch: Epoch,
    pub heartbeat_ms: i64,
    pub lease_ms: i64,
}

impl LeaderRow {
    /// The first moment at which another may take over.
    pub fn expires_at_ms(&self) -> i64 {
        self.heartbeat_ms.saturating_add(self.lease_ms)
    }
}

impl Ledger {
    /// Tries to become leader. `None`: somebody else leads, perhaps an earlier one of this holder.
    pub async fn lead(&self, holder: &str, lease_ms: i64, now_ms: i64) -> Result<Option<Epoch>, LedgerError> {
        if let LedgerPlace::Postgres(place) = &*self.place {
            return Box::pin(self.lead_by_session(place, holder, lease_ms, now_ms)).await;
        }
        let mut tx = self.begin().await?;
        let taken = query(
            "UPDATE committer SET holder = $1, epoch = epoch + 1, heartbeat_ms = $2, lease_ms = $3
             WHERE id = 1 AND (holder IS NULL OR heartbeat_ms + lease_ms <= $2)",
        )
        .bind(holder)
        .bind(now_ms)
        .bind(lease_ms)
        .execute(&mut tx)
        .await?;
        if taken == 0 {
            return Ok(None);
        }
        let epoch = announce(&mut tx, holder, now_ms).await?;
        tx.commit().await?;
        Ok(Some(epoch))
    }

    /// Heartbeat. A lease that has run out is renewed as long as nobody took it; a session that is gone is not.
    pub async fn renew(&self, epoch: Epoch, now_ms: i64) -> Result<(), LedgerError> {
        if let LedgerPlace::Postgres(_) = &*self.place {
            return Box::pin(self.renew_session(epoch, now_ms)).await;
        }
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        query("UPDATE committer SET heartbeat_ms = $1 WHERE id = 1 AND heartbeat_ms < $1")
            .bind(now_ms)
            .execute(&mut tx)
            .await?;
        tx.commit().await?;
        Ok(())
    }

    /// Steps down in order, so that the next worker need not wait. Nothing happens when the epoch is over
    /// already.
    pub async fn release(&self, epoch: Epoch) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        let released = query("UPDATE committer SET holder = NULL WHERE id = 1 AND epoch = $1")
            .bind(epoch.0)
            .execute(&mut tx)
            .await?;
        wake(&mut tx).await?;
        tx.commit().await?;
        if released > 0 {
            self.session.close().await;
        }
        Ok(())
    }

    /// Who leads, or on SQLite led until the lease ran out; `None` after an orderly step down.
    pub async fn leader(&self) -> Result<Option<LeaderRow>, LedgerError> {
        let mut tx = self.reading().await?;
        Ok(read(&mut tx).await?.1)
    }
}

/// Tells of a new leader in its own transaction; its epoch.
pub(super) async fn announce(tx: &mut Transaction, holder: &str, now_ms: i64) -> Result<Epoch, LedgerError> {
    let (epoch, _) = read(tx).await?;
    let event = NewEvent {
        kind: EventKind::LeaderChanged,
        request: None,
        table: None,
        text: format!("{holder} leads under epoch {epoch}"),
        data: Some(serde_json::json!({ "holder": holder, "epoch": epoch })),
    };
    append(tx, &[event], now_ms).await?;
    Ok(epoch)
}

/// Fails unless `epoch` leads. Inside a writing transaction nobody can take over until it commits.
pub(super) async fn fence(tx: &mut Transaction, epoch: Epoch) -> Result<(), LedgerError> {
    let (_, leader) = read(tx).await?;
    match leader {
        Some(leader) if leader.epoch == epoch => Ok(()),
        leader => Err(LedgerError::Deposed { epoch, leader }),
    }
}

/// On PostgreSQL the holder is nobody once its session has lost the lock.
const LEADER: Sql =
    Sql::of_each("SELECT * FROM committer WHERE id = 1", "SELECT * FROM present_committer WHERE id = 1");

/// The last epoch, and who holds it.
async fn read(tx: &mut Transaction) -> Result<(Epoch, Option<LeaderRow>), LedgerError> {
    let Some(row) = query(LEADER).fetch_optional(tx).await? else {
        return Err(LedgerError::Row {
            table: "committer",
            id: "1".to_owned(),
            what: "it is missing, so that nobody can lead".to_owned(),
        });
    };
    let f = Fields::new("committer", "id", &row);
    let epoch = Epoch(f.int("epoch")?);
    let leader = match f.get::<Option<String>>("holder")? {
        None => None,
        Some(holder) => Some(LeaderRow {
            holder,
            epoch,
            heartbeat_ms: f.int("heartbeat_ms")?,
            lease_ms: f.int("lease_ms")?,
        }),
    };
    Ok((epoch, leader))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, on_each_database, succeed};
    use super::*;

    on_each_database! {
        case_o37_a_running_leader_is_left_alone,
        a_release_lets_the_next_in_at_once_and_old_ones_change_nothing,
    }

    /// Of somebody else, and of the same holder after a restart.
    async fn case_o37_a_running_leader_is_left_alone(home: &Home) {
        let ledger = home.ledger().await;
        assert_eq!(ledger.leader().await.unwrap(), None);
        let first = ledger.lead("one", 1_000, 0).await.unwrap();
        assert_eq!(first, Some(Epoch(1)));
        let other = Ledger::open(ledger.place()).await.unwrap();
        for holder in ["two", "one"] {
            assert_eq!(ledger.lead(holder, 1_000, 999).await.unwrap(), None);
            assert_eq!(other.lead(holder, 1_000, 999).await.unwrap(), None);
        }
        ledger.renew(Epoch(1), 900).await.unwrap();
        assert_eq!(other.lead("two", 1_000, 1_000).await.unwrap(), None);
        assert_eq!(ledger.leader().await.unwrap().unwrap().expires_at_ms(), 1_900);

        // Late, but nobody came: it goes on.
        ledger.renew(Epoch(1), 5_000).await.unwrap();
        // A heartbeat that arrives late does not shorten the lease.
        ledger.renew(Epoch(1), 4_000).await.unwrap();
        assert_eq!(ledger.leader().await.unwrap().unwrap().heartbeat_ms, 5_000);
        assert_eq!(succeed(&ledger, "two", 500, 6_000).await, Epoch(2));
        let deposed = ledger.renew(Epoch(1), 6_001).await.unwrap_err();
        assert!(
            matches!(deposed, LedgerError::Deposed { epoch: Epoch(1), leader: Some(l) } if l.holder == "two")
        );
    }

    #[tokio::test]
    async fn case_o37_on_a_file_only_an_expired_lease_is_taken() {
        let home = Home::sqlite();
        let ledger = home.ledger().await;
        ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        assert_eq!(ledger.lead("two", 1_000, 999).await.unwrap(), None);
        assert_eq!(ledger.lead("two", 1_000, 1_000).await.unwrap(), Some(Epoch(2)));
    }

    async fn a_release_lets_the_next_in_at_once_and_old_ones_change_nothing(home: &Home) {
        let ledger = home.ledger().await;
        let one = ledger.lead("one", 1_000_000, 0).await.unwrap().unwrap();
        ledger.release(one).await.unwrap();
        assert_eq!(ledger.leader().await.unwrap(), None);
        assert!(matches!(ledger.renew(one, 1).await, Err(LedgerError::Deposed { leader: None, .. })));
        let two = succeed(&ledger, "two", 1_000_000, 1).await;
        assert_eq!(two, Epoch(2));
        ledger.release(one).await.unwrap();
        assert_eq!(ledger.leader().await.unwrap().unwrap().holder, "two");
        ledger.renew(two, 2).await.unwrap();
    }
}
