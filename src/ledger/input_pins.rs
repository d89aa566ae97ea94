//! Refs that were set on other tables for waiting requests, so that whoever leads then can take them away.

use mergeberg_kernel::ids::{RefName, RequestId, TableName};

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use crate::database::query;

/// A ref on a table that a request's recorded operations read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InputPin {
    pub request: RequestId,
    /// The table that is read.
    pub table: TableName,
    pub name: RefName,
}

impl Ledger {
    /// Those of requests that have ended, of whatever table.
    pub async fn input_pins_of_ended(&self) -> Result<Vec<InputPin>, LedgerError> {
        let rows = query(
            "SELECT p.request, p.table_name, p.ref_name FROM input_pin p
             JOIN merge_request r ON r.id = p.request
             WHERE r.ended_at_ms IS NOT NULL
             ORDER BY p.table_name, p.request, p.ref_name",
        )
        .fetch_all(&self.readers)
        .await?;
        rows.iter()
            .map(|row| {
                let f = Fields::new("input_pin", "request", row);
                Ok(InputPin {
                    request: RequestId(f.int("request")?),
                    table: f.table_name()?,
                    name: RefName(f.text("ref_name")?),
                })
            })
            .collect()
    }

    /// Before the refs are set. One that is noted already stays.
    pub async fn note_input_pins(&self, pins: &[InputPin]) -> Result<(), LedgerError> {
        let note = "INSERT INTO input_pin (request, table_name, ref_name) VALUES ($1, $2, $3)
             ON CONFLICT (request, table_name, ref_name) DO NOTHING";
        self.for_each_pin(note, pins).await
    }

    /// After the refs are gone.
    pub async fn forget_input_pins(&self, pins: &[InputPin]) -> Result<(), LedgerError> {
        let forget = "DELETE FROM input_pin WHERE request = $1 AND table_name = $2 AND ref_name = $3";
        self.for_each_pin(forget, pins).await
    }

    async fn for_each_pin(&self, sql: &'static str, pins: &[InputPin]) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        for pin in pins {
            query(sql)
                .bind(pin.request.0)
                .bind(pin.table.to_string())
                .bind(pin.name.as_str())
                .execute(&mut tx)
                .await?;
        }
        tx.commit().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::Principal;

    use super::super::testing::{Home, enqueue, on_each_database};
    use super::*;

    on_each_database! { refs_on_other_tables_are_known_until_they_are_gone }

    async fn refs_on_other_tables_are_known_until_they_are_gone(home: &Home) {
        let ledger = home.ledger().await;
        let request = enqueue(&ledger, "ingest/a", 1).await;
        let waiting = enqueue(&ledger, "ingest/b", 2).await;
        let pin = |request, table: &str, name: &str| InputPin {
            request,
            table: table.parse().unwrap(),
            name: RefName::new(name),
        };
        let own = [pin(request, "raw.feed", "a"), pin(request, "raw.feed", "b")];
        for _ in 0..2 {
            ledger.note_input_pins(&own).await.unwrap();
        }
        ledger.note_input_pins(&[pin(waiting, "raw.feed", "c")]).await.unwrap();
        assert_eq!(ledger.input_pins_of_ended().await.unwrap(), []);
        ledger.cancel(request, &Principal::new("ann"), 3).await.unwrap();
        assert_eq!(ledger.input_pins_of_ended().await.unwrap(), own);
        ledger.forget_input_pins(&own[..1]).await.unwrap();
        assert_eq!(ledger.input_pins_of_ended().await.unwrap(), own[1..]);
    }
}
