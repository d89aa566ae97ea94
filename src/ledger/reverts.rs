//! Requests that take back landed ones.
//!
//! That request M reverts N is known here and nowhere else: decisions never read it from a snapshot (promise 5).

use std::collections::{BTreeMap, BTreeSet};

use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableUuid};
use serde::Serialize;

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::landing::IntentCar;
use super::rows::RequestRow;
use crate::database::{Sql, query};

/// Which request is taken back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reverts {
    pub request: RequestId,
    /// The owner's words.
    pub reason: Option<String>,
}

impl Reverts {
    /// As a clause behind what says who enqueued it.
    pub(super) fn in_words(&self) -> String {
        let reason = self.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
        format!(", takes back request {}{reason}", self.request)
    }
}

/// A landed request whose revert has landed, and stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenBack {
    pub request: RequestId,
    pub pinned: SnapshotId,
    pub by: RequestId,
}

/// A landed revert.
struct LandedRevert {
    id: RequestId,
    reverts: RequestId,
    pinned: SnapshotId,
    landed: SnapshotId,
}

impl Ledger {
    /// The requests that revert this one, in arrival order, whatever became of them.
    pub async fn reverts_of(&self, id: RequestId) -> Result<Vec<RequestRow>, LedgerError> {
        let sql = "SELECT * FROM merge_request WHERE reverts = $1 ORDER BY id";
        let rows = query(sql).bind(id.0).fetch_all(&self.readers).await?;
        rows.iter().map(RequestRow::decode).collect()
    }

    /// Requests of a target that are taken back: by a revert that has landed, is on the target still (`stands`),
    /// and is not taken back itself.
    pub async fn taken_back(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
        stands: impl Fn(SnapshotId) -> bool,
    ) -> Result<Vec<TakenBack>, LedgerError> {
        // Reverts are few, and everything that ever landed is much: SQLite must not go by the index of the latter.
        let rows = query(Sql::of_each(
            "SELECT m.id, m.reverts, m.landed_snapshot, n.pinned
             FROM merge_request m INDEXED BY merge_request_reverts JOIN merge_request n ON n.id = m.reverts
             WHERE m.reverts IS NOT NULL AND m.state = 'landed' AND m.table_uuid = $1 AND m.target = $2
             ORDER BY m.id",
            "SELECT m.id, m.reverts, m.landed_snapshot, n.pinned
             FROM merge_request m JOIN merge_request n ON n.id = m.reverts
             WHERE m.reverts IS NOT NULL AND m.state = 'landed' AND m.table_uuid = $1 AND m.target = $2
             ORDER BY m.id",
        ))
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .fetch_all(&self.readers)
        .await?;
        let mut reverts = Vec::with_capacity(rows.len());
        for row in &rows {
            let f = Fields::new("merge_request", "id", row);
            reverts.push(LandedRevert {
                id: RequestId(f.int("id")?),
                reverts: RequestId(f.int("reverts")?),
                pinned: f.snapshot("pinned")?,
                landed: f.snapshot("landed_snapshot")?,
            });
        }
        // A revert is younger than what it reverts: from the youngest on, each is known to stand or not.
        let mut undone: BTreeMap<RequestId, TakenBack> = BTreeMap::new();
        for LandedRevert { id, reverts: request, pinned, landed } in reverts.into_iter().rev() {
            if !undone.contains_key(&id) && stands(landed) {
                undone.insert(request, TakenBack { request, pinned, by: id });
            }
        }
        Ok(undone.into_values().collect())
    }

    /// Which requests the queue published these snapshots of a target for.
    pub async fn publishers(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
        snapshots: &BTreeSet<SnapshotId>,
    ) -> Result<BTreeMap<SnapshotId, RequestId>, LedgerError> {
        let rows = query(
            "SELECT intent, cars FROM landing
             WHERE table_uuid = $1 AND target = $2 AND outcome = 'landed' ORDER BY id",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .fetch_all(&self.readers)
        .await?;
        let mut found = BTreeMap::new();
        for row in &rows {
            for car in Fields::new("landing", "intent", row).json::<Vec<IntentCar>>("cars")? {
                for candidate in car.candidates.iter().filter(|id| snapshots.contains(id)) {
                    found.insert(*candidate, car.request);
                }
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, enqueue, new_request, on_each_database, pass, staged_train};
    use super::super::{Enqueued, NewRequest};
    use super::*;
    use mergeberg_kernel::ids::Epoch;

    on_each_database! {
        what_is_taken_back_follows_the_reverts_that_stand,
        an_open_revert_of_a_request_is_the_one_whatever_its_branch,
    }

    async fn revert_of(ledger: &Ledger, request: RequestId, source: &str, pinned: i64) -> RequestId {
        let reverts = Reverts { request, reason: Some("bad load".to_owned()) };
        match ledger.enqueue_revert(&new_request(source, pinned), &reverts, 1).await.unwrap() {
            Enqueued::New(row) => {
                assert_eq!(row.reverts, Some(reverts));
                row.id
            }
            other => panic!("{other:?}"),
        }
    }

    async fn land(ledger: &Ledger, epoch: Epoch, request: RequestId, candidate: i64) {
        let intent = staged_train(ledger, epoch, &format!("t{candidate}"), &[(request, candidate)]).await;
        pass(ledger, &intent).await;
        ledger.write_intent(epoch, &intent, 5).await.unwrap();
        ledger.settle_landed(epoch, &intent.id, 6, &[(request, SnapshotId(candidate))]).await.unwrap();
    }

    async fn taken(ledger: &Ledger, stands: impl Fn(SnapshotId) -> bool) -> Vec<(i64, i64)> {
        let row = new_request("a", 1);
        let known = ledger.taken_back(&row.table_uuid, &row.target, stands).await.unwrap();
        known.into_iter().map(|known| (known.request.0, known.by.0)).collect()
    }

    async fn what_is_taken_back_follows_the_reverts_that_stand(home: &Home) {
        let ledger = home.ledger().await;
        let epoch = ledger.lead("one", 1_000, 0).await.unwrap().unwrap();
        let first = enqueue(&ledger, "ingest/a", 1).await;
        land(&ledger, epoch, first, 11).await;
        let second = revert_of(&ledger, first, "r/1", 2).await;
        assert_eq!(taken(&ledger, |_| true).await, [], "it waits");
        land(&ledger, epoch, second, 12).await;
        assert_eq!(taken(&ledger, |_| true).await, [(1, 2)]);
        assert_eq!(taken(&ledger, |id| id != SnapshotId(12)).await, [], "rolled back on the target");
        let third = revert_of(&ledger, second, "r/2", 3).await;
        land(&ledger, epoch, third, 13).await;
        assert_eq!(taken(&ledger, |_| true).await, [(2, 3)]);
        let fourth = revert_of(&ledger, first, "r/3", 4).await;
        land(&ledger, epoch, fourth, 14).await;
        assert_eq!(taken(&ledger, |_| true).await, [(1, 4), (2, 3)]);

        let row = new_request("a", 1);
        let wanted = BTreeSet::from([SnapshotId(12), SnapshotId(14), SnapshotId(99)]);
        let made = ledger.publishers(&row.table_uuid, &row.target, &wanted).await.unwrap();
        assert_eq!(made, BTreeMap::from([(SnapshotId(12), second), (SnapshotId(14), fourth)]));
    }

    async fn an_open_revert_of_a_request_is_the_one_whatever_its_branch(home: &Home) {
        let ledger = home.ledger().await;
        let first = enqueue(&ledger, "ingest/a", 1).await;
        let revert = revert_of(&ledger, first, "r/1", 2).await;
        let reverts = Reverts { request: first, reason: None };
        let again = ledger.enqueue_revert(&new_request("r/2", 3), &reverts, 2).await.unwrap();
        assert!(matches!(again, Enqueued::Existing(row) if row.id == revert));
        // The key of another request is no key of this one.
        let keyed = NewRequest { idempotency_key: Some("k".to_owned()), ..new_request("ingest/b", 5) };
        let Enqueued::New(_) = ledger.enqueue(&keyed, 3).await.unwrap() else { panic!("there already") };
        let taken = ledger.enqueue_revert(&keyed, &reverts, 4).await.unwrap();
        assert!(matches!(taken, Enqueued::KeyConflict(_)), "{taken:?}");
    }
}
