//! How many of those who wait are looked at: as many as it takes to fill the next train.
//!
//! Looking at a request costs the reading of its manifests, and thousands may wait. Most trains are filled by
//! those who came first. Where these cannot ride (in review, held, behind one another) it is looked further back, so
//! that nobody waits for requests that wait for a person.

use std::sync::Arc;

use mergeberg_kernel::policy::{DEFAULT_BATCH_SIZE, TablePolicy};

use super::context::{Lane, Worker};
use super::error::WorkerError;
use super::gather::Gathered;
use super::structure::Structures;
use super::tick::Looking;
use crate::ledger::RequestRow;
use crate::table::loaded::LoadedTable;

/// Batches of waiting requests that are read from the ledger at first: those of this train, of the next, whose
/// files are written ahead, and of the one after it, whose sources are read ahead.
const FIRST_BATCHES: usize = 3;
/// How much further it is looked each time.
const GROWTH: usize = 4;
/// Requests that are looked at for one train, at most. Behind so many who cannot ride, others wait for them.
const MAX_LOOKED_AT: usize = 2_000;

/// Requests of the largest train that a table's classes allow.
pub(super) fn largest_batch(policy: &TablePolicy) -> usize {
    policy.classes.iter().map(|class| class.batch_size).max().unwrap_or(1).max(DEFAULT_BATCH_SIZE)
}

/// Requests that are read from the ledger: so many of each class.
pub(super) fn first_depth(policy: &TablePolicy, looking: Looking) -> usize {
    match looking {
        Looking::ForTrains => (largest_batch(policy) * FIRST_BATCHES).min(MAX_LOOKED_AT),
        Looking::ForSet => MAX_LOOKED_AT,
    }
}

/// The next depth, if it may be looked further back than this one.
pub(super) fn deeper(depth: usize) -> Option<usize> {
    (depth < MAX_LOOKED_AT).then(|| (depth * GROWTH).min(MAX_LOOKED_AT))
}

impl Worker {
    /// Looks at the first of these requests until the train is full or nobody is left. A set is looked for among
    /// all of them.
    pub(super) async fn fill_train(
        &self,
        lane: &Lane,
        table: Arc<LoadedTable>,
        policy: Arc<TablePolicy>,
        mut rows: Vec<RequestRow>,
        structures: &Structures,
        looking: Looking,
    ) -> Result<Gathered, WorkerError> {
        let mut most = match looking {
            Looking::ForTrains => largest_batch(&policy),
            Looking::ForSet => MAX_LOOKED_AT,
        };
        loop {
            let (table, policy) = (Arc::clone(&table), Arc::clone(&policy));
            let gathered = self.gather(lane, table, policy, rows, most, structures).await?;
            match deeper(most) {
                Some(next) if !gathered.plan.full && !gathered.behind.is_empty() => most = next,
                _ => return Ok(gathered),
            }
            rows = gathered.into_rows();
        }
    }
}
