//! What became of a set's landing, when the catalog did not say so: read from every table, settled for all at once.

use mergeberg_kernel::ids::{Epoch, RequestId, TableName};

use super::context::Worker;
use super::error::WorkerError;
use super::protocol::Progress;
use super::settle::{Finding, MAX_SET_LOOKS, read_outcome};
use crate::ledger::Intent;
use crate::table::catalog::CatalogError;

impl Worker {
    /// Settles the open intents of a set, all of them or none. `why` is what its parts are told, should it not have
    /// landed.
    pub(super) async fn settle_set(
        &self,
        epoch: Epoch,
        set: RequestId,
        why: &str,
    ) -> Result<Progress, WorkerError> {
        let _alone = self.settling.lock().await;
        let mut intents = self.ledger.open_set_intents(set).await?;
        intents.sort_by(|one, other| one.table_uuid.cmp(&other.table_uuid));
        if intents.is_empty() {
            // Another of its lanes was first.
            return Ok(Progress { landed: 0, changed: true });
        }
        match self.find_out_set(set, &intents).await? {
            Finding::Landed | Finding::RolledBack => {
                self.ledger.settle_set_landed(epoch, set, self.now_ms()).await?;
                Ok(Progress { landed: intents.len(), changed: true })
            }
            Finding::NotLanded => {
                self.ledger.settle_set_not_landed(epoch, set, self.now_ms(), why).await?;
                Ok(Progress { landed: 0, changed: true })
            }
            Finding::Replaced | Finding::Unknown => {
                tracing::error!(%set, "the outcome of a set's landing is unknown; its targets are held");
                self.ledger.mark_set_unknown(epoch, set, self.now_ms()).await?;
                Ok(Progress::default())
            }
        }
    }

    /// The landing requires every fence, so the removal of one proves that it has not happened and never will, on any
    /// table. None is removed while a table shows that it has.
    async fn find_out_set(&self, set: RequestId, intents: &[Intent]) -> Result<Finding, WorkerError> {
        for tries in 1..=MAX_SET_LOOKS {
            let seen = self.look_at_all(intents).await?;
            if seen.replaced {
                return Ok(Finding::Replaced);
            }
            match seen.without {
                None if seen.landed.is_empty() && seen.rolled_back == 0 => return Ok(Finding::Unknown),
                None if seen.landed.is_empty() => return Ok(Finding::RolledBack),
                None => return Ok(Finding::Landed),
                Some(intent) if seen.landed.is_empty() => match self.find_out(intent).await? {
                    // It was under way: the others show it too, or will.
                    Finding::Landed | Finding::RolledBack => {}
                    Finding::NotLanded => {
                        // Of a catalog that moves all tables or none this is the end of it.
                        let after = self.look_at_all(intents).await?;
                        if after.landed.is_empty() {
                            return Ok(Finding::NotLanded);
                        }
                        return Ok(by_halves(set, &after.landed));
                    }
                    finding => return Ok(finding),
                },
                // The nodes of a catalog may show one commit one after the other.
                Some(_) if tries == MAX_SET_LOOKS => return Ok(by_halves(set, &seen.landed)),
                Some(_) => {}
            }
            self.pause(tries).await;
        }
        Ok(Finding::Unknown)
    }

    async fn look_at_all<'a>(&self, intents: &'a [Intent]) -> Result<Seen<'a>, WorkerError> {
        let mut seen = Seen::default();
        let mut is_fenced = false;
        for intent in intents {
            let table = match self.catalog.load(&intent.table).await {
                Ok(table) if table.facts.uuid == intent.table_uuid => table,
                // It was dropped, or the name is another table's: nothing of it can be read, nor be seen by halves.
                Ok(_) | Err(CatalogError::NotFound(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            // The landing takes the fence away, so where it stands nothing has landed, whoever moved the target.
            let fenced = table.facts.head(&intent.temp_ref).is_some();
            match if fenced { Finding::NotLanded } else { read_outcome(&table, intent) } {
                Finding::Landed => seen.landed.push(&intent.table),
                Finding::RolledBack => seen.rolled_back += 1,
                Finding::Replaced => seen.replaced = true,
                Finding::NotLanded | Finding::Unknown if seen.without.is_none() || (fenced && !is_fenced) => {
                    seen.without = Some(intent);
                    is_fenced = fenced;
                }
                Finding::NotLanded | Finding::Unknown => {}
            }
        }
        Ok(seen)
    }
}

/// What the tables of a set show of its landing.
#[derive(Default)]
struct Seen<'a> {
    landed: Vec<&'a TableName>,
    rolled_back: usize,
    /// A table on which the landing took the place of somebody's commit.
    replaced: bool,
    /// The part to ask for sure: one that shows no landing, with its fence still there if any has.
    without: Option<&'a Intent>,
}

/// Nobody knows what is to become of it: every table is held.
fn by_halves(set: RequestId, landed: &[&TableName]) -> Finding {
    let moved: Vec<String> = landed.iter().map(ToString::to_string).collect();
    tracing::error!(
        %set,
        "the catalog moved {} and not the other tables of the set: its commit to several tables is none",
        moved.join(", ")
    );
    Finding::Unknown
}
