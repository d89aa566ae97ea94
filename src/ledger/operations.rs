//! Records of operations that snapshots name by their id. A record is written once and never changes.

use mergeberg_kernel::ids::{Digest, Principal, TableName, TableUuid};
use serde::Serialize;

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use crate::database::{Row, Target, query};

/// A record with where it came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OperationRow {
    pub table_uuid: TableUuid,
    pub id: String,
    pub table: TableName,
    /// The record's JSON, as it was given.
    pub record: String,
    /// Of the record's text; a summary may name it as well.
    pub digest: Digest,
    pub principal: Principal,
    pub recorded_at_ms: i64,
}

/// What became of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    New(OperationRow),
    /// It was there already.
    Existing(OperationRow),
    /// Another record has this id.
    Conflict(OperationRow),
}

impl Ledger {
    /// Writes a record under its id, once.
    pub async fn record_operation(
        &self,
        table: &TableName,
        table_uuid: &TableUuid,
        (id, record): (&str, &str),
        principal: &Principal,
        now_ms: i64,
    ) -> Result<Recorded, LedgerError> {
        let mut tx = self.begin().await?;
        if let Some(there) = find(&mut tx, table_uuid, id).await? {
            let same = there.record == record;
            return Ok(if same { Recorded::Existing(there) } else { Recorded::Conflict(there) });
        }
        let row = OperationRow {
            table_uuid: table_uuid.clone(),
            id: id.to_owned(),
            table: table.clone(),
            record: record.to_owned(),
            digest: Digest::of([record]),
            principal: principal.clone(),
            recorded_at_ms: now_ms,
        };
        query(
            "INSERT INTO operation (table_uuid, id, table_name, record, digest, principal, recorded_at_ms)
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(row.table_uuid.as_str())
        .bind(&row.id)
        .bind(row.table.to_string())
        .bind(&row.record)
        .bind(row.digest.as_str())
        .bind(row.principal.as_str())
        .bind(row.recorded_at_ms)
        .execute(&mut tx)
        .await?;
        tx.commit().await?;
        Ok(Recorded::New(row))
    }

    /// The record of this id of a table.
    pub async fn operation(
        &self,
        table_uuid: &TableUuid,
        id: &str,
    ) -> Result<Option<OperationRow>, LedgerError> {
        find(&self.readers, table_uuid, id).await
    }
}

async fn find<'c>(
    on: impl Into<Target<'c>>,
    table_uuid: &TableUuid,
    id: &str,
) -> Result<Option<OperationRow>, LedgerError> {
    let row = query("SELECT * FROM operation WHERE table_uuid = $1 AND id = $2")
        .bind(table_uuid.as_str())
        .bind(id)
        .fetch_optional(on)
        .await?;
    row.as_ref().map(decode).transpose()
}

fn decode(row: &Row) -> Result<OperationRow, LedgerError> {
    let f = Fields::new("operation", "id", row);
    let record = f.text("record")?;
    let digest = f.text("digest")?;
    if Digest::of([record.as_str()]).as_str() != digest {
        return Err(f.wrong("the record is not the one that its digest was made of"));
    }
    Ok(OperationRow {
        table_uuid: TableUuid::new(f.text("table_uuid")?),
        id: f.text("id")?,
        table: f.text("table_name")?.parse().map_err(|e| f.wrong(format!("table_name: {e}")))?,
        digest: Digest::of([record.as_str()]),
        record,
        principal: Principal::new(f.text("principal")?),
        recorded_at_ms: f.get("recorded_at_ms")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, on_each_database};
    use super::*;

    on_each_database! {
        a_record_is_written_once_and_never_changes,
        a_changed_record_is_told,
    }

    async fn a_record_is_written_once_and_never_changes(home: &Home) {
        let ledger = home.ledger().await;
        let (table, uuid, who) =
            ("shop.orders".parse().unwrap(), TableUuid::new("u"), Principal::new("loader"));
        let record = async |text: &str, at| {
            ledger.record_operation(&table, &uuid, ("load-7", text), &who, at).await.unwrap()
        };
        let Recorded::New(row) = record("{\"a\":1}", 5).await else { panic!("new") };
        assert_eq!(ledger.operation(&uuid, "load-7").await.unwrap(), Some(row.clone()));
        assert_eq!(record("{\"a\":1}", 6).await, Recorded::Existing(row.clone()));
        assert_eq!(record("{\"a\":2}", 7).await, Recorded::Conflict(row));
        assert_eq!(ledger.operation(&TableUuid::new("other"), "load-7").await.unwrap(), None);
    }

    async fn a_changed_record_is_told(home: &Home) {
        let ledger = home.ledger().await;
        let (table, uuid, who) =
            ("shop.orders".parse().unwrap(), TableUuid::new("u"), Principal::new("loader"));
        ledger.record_operation(&table, &uuid, ("load-7", "{}"), &who, 5).await.unwrap();
        let mut tx = ledger.begin().await.unwrap();
        query("UPDATE operation SET record = '{\"v\":1}'").execute(&mut tx).await.unwrap();
        tx.commit().await.unwrap();
        let error = ledger.operation(&uuid, "load-7").await.unwrap_err();
        assert!(error.to_string().contains("digest"), "{error}");
    }
}
