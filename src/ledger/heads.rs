//! What the queue knows of a target's head, and the commits on it that the queue did not make.

use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName, TableUuid};
use serde::Serialize;

use super::decode::{Fields, opt_to_json, words};
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::landing::Intent;
use super::{Ledger, wake};
use crate::database::{Row, Transaction, query};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TargetHead {
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub target: RefName,
    /// Where the queue took over: the head at first sight, or the one that was adopted last.
    pub baseline: Option<SnapshotId>,
    pub last_known_head: Option<SnapshotId>,
    /// Since the baseline.
    pub last_landed_head: Option<SnapshotId>,
    pub adopted: Option<Adoption>,
}

/// An operator's word for a head that the queue did not make (rule S3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Adoption {
    pub by: Principal,
    pub at_ms: i64,
    pub reason: String,
}

words! {
    ForeignKind {
        /// Proven to change no data, and allowed by policy.
        Maintenance = "maintenance",
        Bypass = "bypass",
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ForeignRow {
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub target: RefName,
    pub snapshot: SnapshotId,
    pub kind: ForeignKind,
    /// What proves the kind, for maintenance (rule C5).
    pub proof: Option<serde_json::Value>,
    /// One sentence.
    pub text: String,
    pub seen_at_ms: i64,
}

impl TargetHead {
    /// The snapshot that the target's head must be, or descend from; else it was rewound.
    pub fn anchor(&self) -> Option<SnapshotId> {
        self.last_landed_head.or(self.baseline)
    }

    fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("target_head", "table_uuid", row);
        let by: Option<String> = f.get("adopted_by")?;
        let at_ms: Option<i64> = f.get("adopted_at_ms")?;
        let reason: Option<String> = f.get("adopted_reason")?;
        let adopted = match (by, at_ms, reason) {
            (None, None, None) => None,
            (Some(by), Some(at_ms), Some(reason)) => Some(Adoption { by: Principal(by), at_ms, reason }),
            _ => return Err(f.wrong("adopted_by, adopted_at_ms and adopted_reason do not go together")),
        };
        Ok(Self {
            table: f.table_name()?,
            table_uuid: f.table_uuid()?,
            target: f.target()?,
            baseline: f.opt_snapshot("baseline")?,
            last_known_head: f.opt_snapshot("last_known_head")?,
            last_landed_head: f.opt_snapshot("last_landed_head")?,
            adopted,
        })
    }
}

impl ForeignRow {
    fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("foreign_snapshot", "snapshot_id", row);
        Ok(Self {
            table: f.table_name()?,
            table_uuid: f.table_uuid()?,
            target: f.target()?,
            snapshot: f.snapshot("snapshot_id")?,
            kind: f.word("kind", ForeignKind::from_word)?,
            proof: f.opt_json("proof")?,
            text: f.text("text")?,
            seen_at_ms: f.int("seen_at_ms")?,
        })
    }
}

impl Ledger {
    pub async fn target_head(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
    ) -> Result<Option<TargetHead>, LedgerError> {
        let row = query("SELECT * FROM target_head WHERE table_uuid = $1 AND target = $2")
            .bind(table_uuid.as_str())
            .bind(target.as_str())
            .fetch_optional(&self.readers)
            .await?;
        row.as_ref().map(TargetHead::decode).transpose()
    }

    /// Every target that the queue knows, for the report.
    pub async fn target_heads(&self) -> Result<Vec<TargetHead>, LedgerError> {
        let sql = "SELECT * FROM target_head ORDER BY table_name, target, table_uuid";
        let rows = query(sql).fetch_all(&self.readers).await?;
        rows.iter().map(TargetHead::decode).collect()
    }

    /// Remembers the head as read from the catalog. At first sight it is the baseline.
    pub async fn set_target_head(
        &self,
        table: &TableName,
        table_uuid: &TableUuid,
        target: &RefName,
        head: Option<SnapshotId>,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        query(
            "INSERT INTO target_head (table_uuid, target, table_name, baseline, last_known_head)
             VALUES ($1, $2, $3, $4, $4)
             ON CONFLICT (table_uuid, target) DO UPDATE
             SET table_name = excluded.table_name, last_known_head = excluded.last_known_head",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .bind(table.to_string())
        .bind(head.map(|id| id.0))
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(())
    }

    /// An operator vouches for a head that does not descend from what the queue landed (rule S3): it is the
    /// new baseline.
    #[allow(clippy::too_many_arguments)] // Each is a newtype of its own; a struct would only rename them.
    pub async fn adopt_head(
        &self,
        table: &TableName,
        table_uuid: &TableUuid,
        target: &RefName,
        head: SnapshotId,
        by: &Principal,
        reason: &str,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        query(
            "INSERT INTO target_head (table_uuid, target, table_name, baseline, last_known_head, adopted_by,
                 adopted_at_ms, adopted_reason)
             VALUES ($1, $2, $3, $4, $4, $5, $6, $7)
             ON CONFLICT (table_uuid, target) DO UPDATE
             SET table_name = excluded.table_name, baseline = excluded.baseline,
                 last_known_head = excluded.last_known_head, last_landed_head = NULL,
                 adopted_by = excluded.adopted_by, adopted_at_ms = excluded.adopted_at_ms,
                 adopted_reason = excluded.adopted_reason",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .bind(table.to_string())
        .bind(head.0)
        .bind(by.as_str())
        .bind(now_ms)
        .bind(reason)
        .execute(&mut tx)
        .await?;
        let text = format!("{by} adopted {head} as head of {target} of {table}: {reason}");
        append(&mut tx, &[NewEvent::of_table(EventKind::HeadAdopted, table, text)], now_ms).await?;
        wake(&mut tx).await?;
        tx.commit().await?;
        Ok(())
    }

    /// An operator took a table over (rule R7): told, and the worker is woken.
    pub async fn tell_claim(
        &self,
        table: &TableName,
        from: Option<&str>,
        by: &Principal,
        reason: &str,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        let from = from.map(|queue| format!(" from queue {queue}")).unwrap_or_default();
        let text = format!("{by} claimed {table}{from}: {reason}");
        append(&mut tx, &[NewEvent::of_table(EventKind::TableClaimed, table, text)], now_ms).await?;
        wake(&mut tx).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Records foreign commits; one that is known already is left as it is. Says how many are new.
    pub async fn record_foreign(&self, rows: &[ForeignRow]) -> Result<usize, LedgerError> {
        let mut tx = self.begin().await?;
        let mut new = 0;
        for row in rows {
            let ForeignRow { table, table_uuid, target, snapshot, kind, proof, text, seen_at_ms } = row;
            let inserted = query(
                "INSERT INTO foreign_snapshot (table_uuid, target, snapshot_id, table_name, kind, proof, text,
                     seen_at_ms)
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
                 ON CONFLICT (table_uuid, target, snapshot_id) DO NOTHING",
            )
            .bind(table_uuid.as_str())
            .bind(target.as_str())
            .bind(snapshot.0)
            .bind(table.to_string())
            .bind(kind.word())
            .bind(opt_to_json(proof.as_ref())?)
            .bind(text)
            .bind(*seen_at_ms)
            .execute(&mut tx)
            .await?;
            if inserted == 0 {
                continue;
            }
            new += 1;
            let kind = match kind {
                ForeignKind::Maintenance => EventKind::Maintenance,
                ForeignKind::Bypass => EventKind::Bypass,
            };
            let data = serde_json::json!({ "target": target, "snapshot-id": snapshot });
            let event = NewEvent { data: Some(data), ..NewEvent::of_table(kind, table, text.clone()) };
            append(&mut tx, &[event], *seen_at_ms).await?;
        }
        tx.commit().await?;
        Ok(new)
    }

    /// Foreign commits on a target, in the order in which they were seen.
    pub async fn foreign(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
    ) -> Result<Vec<ForeignRow>, LedgerError> {
        let rows = query(
            "SELECT * FROM foreign_snapshot WHERE table_uuid = $1 AND target = $2
             ORDER BY seen_at_ms, snapshot_id",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(ForeignRow::decode).collect()
    }
}

/// Part of a receipt: the target's head is the tail.
pub(super) async fn landed(conn: &mut Transaction, intent: &Intent) -> Result<(), LedgerError> {
    query(
        "INSERT INTO target_head (table_uuid, target, table_name, baseline, last_known_head, last_landed_head)
         VALUES ($1, $2, $3, $4, $5, $5)
         ON CONFLICT (table_uuid, target) DO UPDATE
         SET last_known_head = excluded.last_known_head, last_landed_head = excluded.last_landed_head",
    )
    .bind(intent.table_uuid.as_str())
    .bind(intent.target.as_str())
    .bind(intent.table.to_string())
    .bind(intent.planned_head.map(|id| id.0))
    .bind(intent.tail.0)
    .execute(conn)
    .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, new_request, on_each_database};
    use super::*;

    on_each_database! {
        the_first_head_is_the_baseline_until_one_is_adopted,
        a_foreign_commit_is_recorded_and_told_once,
    }

    async fn the_first_head_is_the_baseline_until_one_is_adopted(home: &Home) {
        let ledger = home.ledger().await;
        let new = new_request("ingest/a", 1);
        let (table, uuid, main) = (&new.table, &new.table_uuid, RefName::main());
        assert_eq!(ledger.target_head(uuid, &main).await.unwrap(), None);
        for head in [Some(SnapshotId(1)), Some(SnapshotId(2))] {
            ledger.set_target_head(table, uuid, &main, head).await.unwrap();
        }
        let row = ledger.target_head(uuid, &main).await.unwrap().unwrap();
        assert_eq!((row.baseline, row.last_known_head), (Some(SnapshotId(1)), Some(SnapshotId(2))));
        assert_eq!((row.anchor(), row.adopted), (Some(SnapshotId(1)), None));

        let ann = Principal::new("ann");
        ledger.adopt_head(table, uuid, &main, SnapshotId(9), &ann, "rolled back", 7).await.unwrap();
        let row = ledger.target_head(uuid, &main).await.unwrap().unwrap();
        assert_eq!((row.anchor(), row.last_landed_head), (Some(SnapshotId(9)), None));
        assert_eq!(row.adopted, Some(Adoption { by: ann, at_ms: 7, reason: "rolled back".to_owned() }));
        let told = ledger.events_since(0, 10).await.unwrap();
        assert_eq!(told[0].kind, EventKind::HeadAdopted);
        assert_eq!(ledger.target_heads().await.unwrap(), [row]);
    }

    async fn a_foreign_commit_is_recorded_and_told_once(home: &Home) {
        let ledger = home.ledger().await;
        let new = new_request("ingest/a", 1);
        let bypass = ForeignRow {
            table: new.table.clone(),
            table_uuid: new.table_uuid.clone(),
            target: RefName::main(),
            snapshot: SnapshotId(5),
            kind: ForeignKind::Bypass,
            proof: None,
            text: "append by spark".to_owned(),
            seen_at_ms: 3,
        };
        let rewrite = ForeignRow {
            snapshot: SnapshotId(6),
            kind: ForeignKind::Maintenance,
            proof: Some(serde_json::json!({ "hash": "ab" })),
            ..bypass.clone()
        };
        assert_eq!(ledger.record_foreign(&[bypass.clone(), rewrite.clone()]).await.unwrap(), 2);
        let later = ForeignRow { seen_at_ms: 9, ..bypass.clone() };
        assert_eq!(ledger.record_foreign(&[later]).await.unwrap(), 0);
        let rows = ledger.foreign(&new.table_uuid, &RefName::main()).await.unwrap();
        assert_eq!(rows, [bypass, rewrite]);
        let kinds: Vec<_> = ledger.events_since(0, 10).await.unwrap().iter().map(|e| e.kind).collect();
        assert_eq!(kinds, [EventKind::Bypass, EventKind::Maintenance]);
        assert_eq!(ledger.foreign(&new.table_uuid, &RefName::new("dev")).await.unwrap(), []);
    }
}
