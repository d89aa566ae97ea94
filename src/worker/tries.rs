//! How often a commit is sent again, and how often is looked what became of one: as the table's properties say, where
//! it sets them, else as here (`mergeberg_kernel::retry`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mergeberg_kernel::retry::{
    COMMIT, How, Keys, LONGEST_TOTAL_MS, NotAsSet, Retries, STATUS_CHECK, not_as_set,
};

use super::context::Worker;
use crate::table::loaded::LoadedTable;

/// A landing is sent again because another branch of the table was written meanwhile.
const LANDING: Retries =
    Retries { retries: 30, min_wait_ms: 2, max_wait_ms: 200, total_ms: LONGEST_TOTAL_MS };
/// So is a staging, whose candidates are written again in between: that is pause enough.
const STAGING: Retries = Retries { retries: 30, min_wait_ms: 0, max_wait_ms: 0, total_ms: LONGEST_TOTAL_MS };
/// It is looked what became of a landing; at each look the fence is removed, where it still is.
const STATUS: Retries = Retries { retries: 10, min_wait_ms: 2, max_wait_ms: 200, total_ms: LONGEST_TOTAL_MS };
/// Fewest looks again, whatever a table says: the removal of a fence is believed when it was read.
const FEWEST_LOOKS: u32 = 2;

type Properties = BTreeMap<String, String>;

/// Tries of one thing.
pub(super) struct Tries {
    retries: Retries,
    began: Instant,
    failed: u32,
}

impl Tries {
    fn new(retries: Retries) -> Self {
        Self { retries, began: Instant::now(), failed: 0 }
    }

    pub fn of_landing(table: &LoadedTable) -> Self {
        Self::new(set_by(&table.facts.properties, COMMIT, LANDING))
    }

    /// Of a landing on several tables: as the strictest of them allows.
    pub fn of_landings<'a>(tables: impl Iterator<Item = &'a LoadedTable>) -> Self {
        let each = tables.map(|table| set_by(&table.facts.properties, COMMIT, LANDING));
        Self::new(each.reduce(Retries::and).unwrap_or(LANDING))
    }

    pub fn of_staging(table: &LoadedTable) -> Self {
        Self::new(set_by(&table.facts.properties, COMMIT, STAGING))
    }

    /// Of finding out what became of a landing.
    pub fn of_status(table: &LoadedTable) -> Self {
        let set = set_by(&table.facts.properties, STATUS_CHECK, STATUS);
        Self::new(Retries { retries: set.retries.max(FEWEST_LOOKS), ..set })
    }
}

fn set_by(properties: &Properties, keys: Keys, own: Retries) -> Retries {
    for NotAsSet { key, value, how } in not_as_set(properties) {
        if how == How::NoNumber {
            tracing::warn!("table property {key} is '{value}', which is no number; it is not followed");
        }
    }
    Retries::of(properties, keys, own)
}

impl Worker {
    /// Pauses before another try. `false`: enough was tried.
    pub(super) async fn again(&self, tries: &mut Tries) -> bool {
        tries.failed = tries.failed.saturating_add(1);
        let since_ms = u64::try_from(tries.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let Some(pause_ms) = tries.retries.pause_ms(tries.failed, since_ms, (self.random)()) else {
            return false;
        };
        if pause_ms > 0 {
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
        true
    }
}
