//! Accepted structures of a table, and the review items of those that are not.
//!
//! A review binds to what the reviewer saw: the changes, the digest handed in as `binding`, and the policy.
//! When one of them is another, the old item lapses and a new one is opened (design, section 8).

use mergeberg_kernel::ids::{Digest, Principal, ReviewId, TableName, TableUuid};
use mergeberg_kernel::structure::{StructureChange, StructureId};
use serde::Serialize;

use super::decode::{Fields, to_json, words};
use super::error::LedgerError;
use super::events::{EventKind, NewEvent, append};
use super::rows::structure;
use super::{Ledger, wake};
use crate::database::{QueryBuilder, Row, Transaction, query};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AcceptedStructure {
    pub structure: StructureId,
    pub by: Principal,
    pub at_ms: i64,
}

/// A review item to be.
#[derive(Clone, Debug, PartialEq)]
pub struct NewReview {
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub structure: StructureId,
    pub changes: Vec<StructureChange>,
    pub policy: Digest,
    /// Change-set digest of what is reviewed with it.
    pub binding: Digest,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ReviewRow {
    pub id: ReviewId,
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub structure: StructureId,
    pub changes: Vec<StructureChange>,
    pub policy: Digest,
    pub binding: Digest,
    pub opened_at_ms: i64,
    pub state: ReviewState,
}

/// Four columns that are one state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "decided")]
pub enum ReviewState {
    Open,
    Approved(Decided),
    Rejected(Decided),
    /// What it was about changed; with the decision that it had, if any.
    Lapsed(Option<Decided>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decided {
    pub by: Principal,
    pub at_ms: i64,
    pub reason: String,
}

words! {
    ReviewWord {
        Open = "open",
        Approved = "approved",
        Rejected = "rejected",
        Lapsed = "lapsed",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    Approve,
    Reject,
}

/// All conditions hold at once; an empty filter matches every item.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReviewFilter {
    pub state: Option<ReviewWord>,
    pub table: Option<TableName>,
    pub table_uuid: Option<TableUuid>,
}

impl ReviewState {
    pub fn word(&self) -> ReviewWord {
        match self {
            Self::Open => ReviewWord::Open,
            Self::Approved(_) => ReviewWord::Approved,
            Self::Rejected(_) => ReviewWord::Rejected,
            Self::Lapsed(_) => ReviewWord::Lapsed,
        }
    }
}

impl ReviewRow {
    fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("structure_review", "id", row);
        let by: Option<String> = f.get("decided_by")?;
        let at_ms: Option<i64> = f.get("decided_at_ms")?;
        let reason: Option<String> = f.get("reason")?;
        let decided = match (by, at_ms, reason) {
            (None, None, None) => None,
            (Some(by), Some(at_ms), Some(reason)) => Some(Decided { by: Principal(by), at_ms, reason }),
            _ => return Err(f.wrong("decided_by, decided_at_ms and reason do not go together")),
        };
        let state = match (f.word("state", ReviewWord::from_word)?, decided) {
            (ReviewWord::Open, None) => ReviewState::Open,
            (ReviewWord::Approved, Some(decided)) => ReviewState::Approved(decided),
            (ReviewWord::Rejected, Some(decided)) => ReviewState::Rejected(decided),
            (ReviewWord::Lapsed, decided) => ReviewState::Lapsed(decided),
            (word, decided) => {
                return Err(f.wrong(format!("state '{word}' does not go with decision {decided:?}")));
            }
        };
        Ok(Self {
            id: ReviewId(f.int("id")?),
            table: f.table_name()?,
            table_uuid: f.table_uuid()?,
            structure: structure(&f)?,
            changes: f.json("changes")?,
            policy: Digest(f.text("policy")?),
            binding: Digest(f.text("binding")?),
            opened_at_ms: f.int("opened_at_ms")?,
            state,
        })
    }
}

impl Ledger {
    /// Accepted structures of a table, oldest first.
    pub async fn accepted(&self, table_uuid: &TableUuid) -> Result<Vec<AcceptedStructure>, LedgerError> {
        let rows = query(
            "SELECT * FROM structure_accepted WHERE table_uuid = $1
             ORDER BY at_ms, schema_id, spec_id, sort_order_id",
        )
        .bind(table_uuid.as_str())
        .fetch_all(&self.readers)
        .await?;
        let mut accepted = Vec::with_capacity(rows.len());
        for row in &rows {
            let f = Fields::new("structure_accepted", "table_uuid", row);
            accepted.push(AcceptedStructure {
                structure: structure(&f)?,
                by: Principal(f.text("accepted_by")?),
                at_ms: f.int("at_ms")?,
            });
        }
        Ok(accepted)
    }

    /// Accepts a structure without a review: the table's own at first sight. Says whether that is new.
    pub async fn accept(
        &self,
        table_uuid: &TableUuid,
        structure: StructureId,
        by: &Principal,
        now_ms: i64,
    ) -> Result<bool, LedgerError> {
        let mut tx = self.begin().await?;
        let is_new = accept(&mut tx, table_uuid, structure, by, now_ms).await?;
        tx.commit().await?;
        Ok(is_new)
    }

    /// The item of a table's structure; the one that is there, when it is about the same.
    pub async fn open_review(&self, new: &NewReview, now_ms: i64) -> Result<ReviewRow, LedgerError> {
        let mut tx = self.begin().await?;
        let NewReview { table, table_uuid, structure, changes, policy, binding } = new;
        let existing = query(
            "SELECT * FROM structure_review
             WHERE table_uuid = $1 AND schema_id = $2 AND spec_id = $3 AND sort_order_id = $4
               AND state <> 'lapsed'",
        )
        .bind(table_uuid.as_str())
        .bind(structure.schema_id.0)
        .bind(structure.spec_id.0)
        .bind(structure.sort_order_id.0)
        .fetch_optional(&mut tx)
        .await?;
        let mut events = Vec::new();
        if let Some(row) = existing {
            let row = ReviewRow::decode(&row)?;
            if row.changes == *changes && row.policy == *policy && row.binding == *binding {
                return Ok(row);
            }
            query("UPDATE structure_review SET state = 'lapsed' WHERE id = $1")
                .bind(row.id.0)
                .execute(&mut tx)
                .await?;
            let text = format!("review {} of {table} lapsed: what it was about changed", row.id);
            events.push(NewEvent::of_table(EventKind::ReviewLapsed, table, text));
        }
        let row = query(
            "INSERT INTO structure_review (table_uuid, table_name, schema_id, spec_id, sort_order_id, changes,
                 policy, binding, opened_at_ms, state)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 'open')
             RETURNING *",
        )
        .bind(table_uuid.as_str())
        .bind(table.to_string())
        .bind(structure.schema_id.0)
        .bind(structure.spec_id.0)
        .bind(structure.sort_order_id.0)
        .bind(to_json(changes)?)
        .bind(policy.as_str())
        .bind(binding.as_str())
        .bind(now_ms)
        .fetch_one(&mut tx)
        .await?;
        let row = ReviewRow::decode(&row)?;
        let texts: Vec<&str> = changes.iter().map(|change| change.text.as_str()).collect();
        let text = format!("review {} of {table} is open: {}", row.id, texts.join("; "));
        events.push(NewEvent::of_table(EventKind::ReviewOpened, table, text));
        append(&mut tx, &events, now_ms).await?;
        tx.commit().await?;
        Ok(row)
    }

    pub async fn review(&self, id: ReviewId) -> Result<ReviewRow, LedgerError> {
        let mut tx = self.reading().await?;
        review_row(&mut tx, id).await
    }

    /// In the order in which they were opened.
    pub async fn reviews(&self, filter: &ReviewFilter) -> Result<Vec<ReviewRow>, LedgerError> {
        let ReviewFilter { state, table, table_uuid } = filter;
        let mut query = QueryBuilder::new("SELECT * FROM structure_review WHERE 1 = 1");
        if let Some(state) = state {
            query.push(" AND state = ").push_bind(state.word());
        }
        if let Some(table) = table {
            query.push(" AND table_name = ").push_bind(table.to_string());
        }
        if let Some(uuid) = table_uuid {
            query.push(" AND table_uuid = ").push_bind(uuid.as_str());
        }
        query.push(" ORDER BY id");
        let rows = query.build().fetch_all(&self.readers).await?;
        rows.iter().map(ReviewRow::decode).collect()
    }

    /// Decides an open item. An approval accepts the structure in the same transaction; a change that
    /// cannot be made safe is not approved.
    pub async fn decide(
        &self,
        id: ReviewId,
        decision: Decision,
        principal: &Principal,
        reason: &str,
        now_ms: i64,
    ) -> Result<ReviewRow, LedgerError> {
        let mut tx = self.begin().await?;
        let mut row = review_row(&mut tx, id).await?;
        if row.state != ReviewState::Open {
            return Err(LedgerError::ReviewDecided { review: id, state: row.state.word() });
        }
        let decided = Decided { by: principal.clone(), at_ms: now_ms, reason: reason.to_owned() };
        let kind = match decision {
            Decision::Approve => {
                if let Some(change) = row.changes.iter().find(|change| change.kind.is_unsafe()) {
                    return Err(LedgerError::UnsafeStructure { review: id, what: change.text.clone() });
                }
                accept(&mut tx, &row.table_uuid, row.structure, principal, now_ms).await?;
                row.state = ReviewState::Approved(decided);
                EventKind::ReviewApproved
            }
            Decision::Reject => {
                row.state = ReviewState::Rejected(decided);
                EventKind::ReviewRejected
            }
        };
        query(
            "UPDATE structure_review SET state = $1, decided_by = $2, decided_at_ms = $3, reason = $4
             WHERE id = $5",
        )
        .bind(row.state.word().word())
        .bind(principal.as_str())
        .bind(now_ms)
        .bind(reason)
        .bind(id.0)
        .execute(&mut tx)
        .await?;
        let text = format!("review {id} of {} {} by {principal}: {reason}", row.table, row.state.word());
        append(&mut tx, &[NewEvent::of_table(kind, &row.table, text)], now_ms).await?;
        wake(&mut tx).await?;
        tx.commit().await?;
        Ok(row)
    }
}

async fn review_row(conn: &mut Transaction, id: ReviewId) -> Result<ReviewRow, LedgerError> {
    let sql = "SELECT * FROM structure_review WHERE id = $1";
    match query(sql).bind(id.0).fetch_optional(conn).await? {
        Some(row) => ReviewRow::decode(&row),
        None => Err(LedgerError::NoSuchReview(id)),
    }
}

async fn accept(
    conn: &mut Transaction,
    table_uuid: &TableUuid,
    structure: StructureId,
    by: &Principal,
    now_ms: i64,
) -> Result<bool, LedgerError> {
    let StructureId { schema_id, spec_id, sort_order_id } = structure;
    let inserted = query(
        "INSERT INTO structure_accepted (table_uuid, schema_id, spec_id, sort_order_id, accepted_by, at_ms)
         VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (table_uuid, schema_id, spec_id, sort_order_id) DO NOTHING",
    )
    .bind(table_uuid.as_str())
    .bind(schema_id.0)
    .bind(spec_id.0)
    .bind(sort_order_id.0)
    .bind(by.as_str())
    .bind(now_ms)
    .execute(&mut *conn)
    .await?;
    if inserted == 0 {
        return Ok(false);
    }
    let event = NewEvent {
        kind: EventKind::StructureAccepted,
        request: None,
        table: None,
        text: format!(
            "schema {schema_id}, spec {spec_id}, sort order {sort_order_id} of table {table_uuid} accepted by {by}"
        ),
        data: Some(serde_json::json!({ "table-uuid": table_uuid, "structure": structure })),
    };
    append(conn, &[event], now_ms).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::SchemaId;
    use mergeberg_kernel::structure::StructureChangeKind;

    use super::super::testing::{Home, new_request, on_each_database};
    use super::*;

    on_each_database! {
        a_structure_is_accepted_once,
        an_item_is_opened_once_and_an_approval_accepts,
        a_rejection_stays_until_what_was_rejected_changes,
        an_unsafe_change_cannot_be_approved,
    }

    fn change(kind: StructureChangeKind) -> StructureChange {
        StructureChange { kind, field_ids: vec![7], text: "column 7 'dep_delay'".to_owned() }
    }

    fn item() -> NewReview {
        let new = new_request("ingest/a", 1);
        NewReview {
            table: new.table,
            table_uuid: new.table_uuid,
            structure: StructureId { schema_id: SchemaId(1), ..new.structure },
            changes: vec![change(StructureChangeKind::ColumnAdded)],
            policy: Digest::of(["policy"]),
            binding: Digest::of(["binding"]),
        }
    }

    async fn a_structure_is_accepted_once(home: &Home) {
        let ledger = home.ledger().await;
        let item = item();
        let by = Principal::new("first sight");
        assert!(ledger.accept(&item.table_uuid, item.structure, &by, 1).await.unwrap());
        assert!(!ledger.accept(&item.table_uuid, item.structure, &Principal::new("x"), 2).await.unwrap());
        let accepted = ledger.accepted(&item.table_uuid).await.unwrap();
        assert_eq!(accepted, [AcceptedStructure { structure: item.structure, by, at_ms: 1 }]);
        assert_eq!(ledger.accepted(&TableUuid::new("other")).await.unwrap(), []);
    }

    async fn an_item_is_opened_once_and_an_approval_accepts(home: &Home) {
        let ledger = home.ledger().await;
        let row = ledger.open_review(&item(), 1).await.unwrap();
        assert_eq!(ledger.open_review(&item(), 2).await.unwrap(), row);
        assert_eq!(ledger.reviews(&ReviewFilter::default()).await.unwrap(), vec![row.clone()]);

        let rita = Principal::new("rita");
        let decided = ledger.decide(row.id, Decision::Approve, &rita, "looks right", 3).await.unwrap();
        assert_eq!(decided, ledger.review(row.id).await.unwrap());
        assert_eq!(decided.state.word(), ReviewWord::Approved);
        assert_eq!(ledger.accepted(&row.table_uuid).await.unwrap()[0].structure, row.structure);
        // Approved, it stays the item of this structure.
        assert_eq!(ledger.open_review(&item(), 4).await.unwrap(), decided);

        for decision in [Decision::Approve, Decision::Reject] {
            let error = ledger.decide(row.id, decision, &rita, "again", 5).await.unwrap_err();
            assert!(matches!(error, LedgerError::ReviewDecided { state: ReviewWord::Approved, .. }));
        }
        let missing = ledger.decide(ReviewId(99), Decision::Reject, &rita, "x", 6).await.unwrap_err();
        assert!(matches!(missing, LedgerError::NoSuchReview(ReviewId(99))));
    }

    async fn a_rejection_stays_until_what_was_rejected_changes(home: &Home) {
        let ledger = home.ledger().await;
        let row = ledger.open_review(&item(), 1).await.unwrap();
        let rita = Principal::new("rita");
        let rejected = ledger.decide(row.id, Decision::Reject, &rita, "no", 2).await.unwrap();
        assert_eq!(ledger.accepted(&row.table_uuid).await.unwrap(), []);
        assert_eq!(ledger.open_review(&item(), 3).await.unwrap(), rejected);

        let other = NewReview { binding: Digest::of(["another"]), ..item() };
        let next = ledger.open_review(&other, 4).await.unwrap();
        assert_ne!(next.id, row.id);
        let old = ledger.review(row.id).await.unwrap();
        assert!(matches!(old.state, ReviewState::Lapsed(Some(decided)) if decided.reason == "no"));
        let open = ReviewFilter { state: Some(ReviewWord::Open), ..Default::default() };
        assert_eq!(ledger.reviews(&open).await.unwrap(), [next]);
    }

    async fn an_unsafe_change_cannot_be_approved(home: &Home) {
        let ledger = home.ledger().await;
        let changes =
            vec![change(StructureChangeKind::ColumnAdded), change(StructureChangeKind::TypeNarrowed)];
        let row = ledger.open_review(&NewReview { changes, ..item() }, 1).await.unwrap();
        let rita = Principal::new("rita");
        let error = ledger.decide(row.id, Decision::Approve, &rita, "please", 2).await.unwrap_err();
        assert!(matches!(error, LedgerError::UnsafeStructure { .. }), "{error}");
        assert_eq!(ledger.accepted(&row.table_uuid).await.unwrap(), []);
        ledger.decide(row.id, Decision::Reject, &rita, "never", 3).await.unwrap();
    }
}
