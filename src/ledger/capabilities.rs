//! What catalogs were found able to do (rule S4), by the catalog's name in the configuration.

use std::collections::BTreeMap;

use super::Ledger;
use super::decode::Fields;
use super::error::LedgerError;
use crate::database::query;

impl Ledger {
    /// Keeps what was found out; what could not be found out this time stays as it was known.
    pub async fn record_capabilities(
        &self,
        catalog: &str,
        found: &BTreeMap<&str, bool>,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        for (capability, able) in found {
            query(
                "INSERT INTO catalog_capability (catalog, capability, able, found_at_ms) VALUES ($1, $2, $3, $4)
                 ON CONFLICT (catalog, capability)
                 DO UPDATE SET able = excluded.able, found_at_ms = excluded.found_at_ms",
            )
            .bind(catalog)
            .bind(*capability)
            .bind(i64::from(*able))
            .bind(now_ms)
            .execute(&mut tx)
            .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    /// What was found last, by the capability's word; empty when nobody has tried.
    pub async fn capabilities(&self, catalog: &str) -> Result<BTreeMap<String, bool>, LedgerError> {
        let rows = query("SELECT capability, able FROM catalog_capability WHERE catalog = $1")
            .bind(catalog)
            .fetch_all(&self.readers)
            .await?;
        rows.iter()
            .map(|row| {
                let f = Fields::new("catalog_capability", "capability", row);
                Ok((f.text("capability")?, f.int("able")? != 0))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Home, on_each_database};

    on_each_database! {
        the_last_finding_counts_and_each_catalog_has_its_own,
    }

    async fn the_last_finding_counts_and_each_catalog_has_its_own(home: &Home) {
        let ledger = home.ledger().await;
        assert!(ledger.capabilities("lake").await.unwrap().is_empty());

        ledger.record_capabilities("lake", &[("a", true), ("b", false)].into(), 1).await.unwrap();
        ledger.record_capabilities("lake", &[("b", true)].into(), 2).await.unwrap();
        ledger.record_capabilities("pond", &[("b", false)].into(), 3).await.unwrap();

        let lake = ledger.capabilities("lake").await.unwrap();
        assert_eq!(lake, [("a".to_owned(), true), ("b".to_owned(), true)].into());
        assert_eq!(ledger.capabilities("pond").await.unwrap(), [("b".to_owned(), false)].into());
    }
}
