//! Intents and receipts of a set: one intent a table, so that all that is known of a table's landings stands in one place;
//! tied by the set, written in one transaction and settled in one. No part of a set is ever believed landed alone.

use std::collections::BTreeMap;

use mergeberg_kernel::evidence::PinnedInput;
use mergeberg_kernel::ids::{Epoch, RequestId, SnapshotId, TableName};

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use super::landing::{Intent, LandingRow, give_up, lose_answer, receive, write};
use super::leader::fence;
use super::sets::parts_of;
use crate::database::{Transaction, query};

impl Ledger {
    /// Writes the intents of all parts and moves these to `landing`, or none.
    ///
    /// Refused as [`Ledger::write_intent`] refuses each of them, and unless they are the whole set, and every check that
    /// read another table of the set has read exactly the candidate which that one lands.
    pub async fn write_set_intents(
        &self,
        epoch: Epoch,
        set: RequestId,
        intents: &[Intent],
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        let parts = parts_of(&mut tx, set).await?;
        let planned = parts.first().and_then(|part| part.set).map_or(0, |set| set.parts as usize);
        let whole = parts.len() == planned
            && intents.len() == planned
            && parts.iter().all(|part| {
                let mine = |intent: &&Intent| {
                    intent.set == Some(set) && intent.cars.iter().map(|c| c.request).eq([part.id])
                };
                intents.iter().filter(mine).count() == 1
            });
        if let Some(intent) = intents.first().filter(|_| !whole) {
            let what = format!("set {set} has {planned} parts, and they land together");
            return Err(LedgerError::MalformedIntent { intent: intent.id.clone(), what });
        }
        let tails: BTreeMap<&TableName, SnapshotId> =
            intents.iter().map(|intent| (&intent.table, intent.tail)).collect();
        for intent in intents {
            write(&mut tx, epoch, intent, None, now_ms).await?;
            for (candidate, check) in &intent.required {
                let inputs = inputs_of(&mut tx, *candidate, check).await?;
                if inputs.iter().any(|i| tails.get(&i.table).is_some_and(|tail| *tail != i.snapshot)) {
                    return Err(LedgerError::EvidenceMissing { candidate: *candidate, check: check.clone() });
                }
            }
        }
        tx.commit().await?;
        Ok(())
    }

    /// Intents of a set that are not settled.
    pub async fn open_set_intents(&self, set: RequestId) -> Result<Vec<Intent>, LedgerError> {
        let mut tx = self.reading().await?;
        Ok(open_rows(&mut tx, set).await?.into_iter().map(|row| row.intent).collect())
    }

    /// The catalog was called and nobody knows what it did. Twice is no error.
    pub async fn mark_set_unknown(
        &self,
        epoch: Epoch,
        set: RequestId,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        for landing in open_rows(&mut tx, set).await? {
            lose_answer(&mut tx, &landing, now_ms).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// The receipts of all parts. Settled before is no error: of several lanes each may look.
    pub async fn settle_set_landed(
        &self,
        epoch: Epoch,
        set: RequestId,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        for LandingRow { intent, .. } in open_rows(&mut tx, set).await? {
            let tails = intent.cars.iter().filter_map(|car| Some((car.request, *car.candidates.last()?)));
            let landed: Vec<(RequestId, SnapshotId)> = tails.collect();
            receive(&mut tx, &intent, now_ms, &landed).await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// It is proven that no part was applied and none ever will be: all go back to the queue.
    pub async fn settle_set_not_landed(
        &self,
        epoch: Epoch,
        set: RequestId,
        now_ms: i64,
        why: &str,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        for LandingRow { intent, .. } in open_rows(&mut tx, set).await? {
            give_up(&mut tx, &intent, now_ms, why).await?;
        }
        tx.commit().await?;
        Ok(())
    }
}

async fn open_rows(conn: &mut Transaction, set: RequestId) -> Result<Vec<LandingRow>, LedgerError> {
    let sql = "SELECT * FROM landing WHERE set_id = $1 AND settled_at_ms IS NULL ORDER BY id";
    let rows = query(sql).bind(set.0).fetch_all(&mut *conn).await?;
    rows.iter().map(LandingRow::decode).collect()
}

/// What the latest run of a check on this candidate read of other tables.
async fn inputs_of(
    conn: &mut Transaction,
    candidate: SnapshotId,
    check: &str,
) -> Result<Vec<PinnedInput>, LedgerError> {
    let sql =
        "SELECT id, inputs FROM evidence WHERE candidate = $1 AND check_id = $2 ORDER BY id DESC LIMIT 1";
    let row = query(sql).bind(candidate.0).bind(check).fetch_optional(&mut *conn).await?;
    match row {
        Some(row) => Ok(Fields::new("evidence", "id", &row).opt_json("inputs")?.unwrap_or_default()),
        None => Ok(Vec::new()),
    }
}
