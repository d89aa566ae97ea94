//! What a worker works with. Time, ids and randomness come in here and nowhere else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mergeberg_kernel::ids::{QueueId, RefName, RequestId, TableName, TableUuid, TrainId};
use tokio::sync::watch;

use super::ahead::Ahead;
use super::external::Externals;
use super::input_pins::Seen;
use super::losses::Losses;
use super::rewrites::Proofs;
use crate::config::PolicyFolder;
use crate::external::Surroundings;
use crate::ledger::Ledger;
use crate::table::catalog::Catalog;
use crate::table::manifests::ManifestStore;
use crate::validate::{Engine, RewriteProver, Validator};

/// Milliseconds since 1970.
pub type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;
/// Random 64 bits.
pub type Random = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Memory for decoded manifests, in bytes.
pub const MANIFEST_CACHE_BYTES: usize = 128 * 1024 * 1024;

/// One queue's shell. Cheap to clone; clones share what they know.
#[derive(Clone)]
pub struct Worker {
    pub catalog: Arc<dyn Catalog>,
    pub ledger: Ledger,
    pub store: ManifestStore,
    pub engine: Arc<Engine>,
    pub validator: Validator,
    pub prover: Arc<RewriteProver>,
    pub policies: Arc<PolicyFolder>,
    pub clock: Clock,
    pub random: Random,
    /// Who this process is, for the leader row.
    pub holder: String,
    pub(super) proofs: Arc<Mutex<Proofs>>,
    pub(super) losses: Arc<Mutex<Losses>>,
    pub(super) input_pins: Arc<Mutex<Seen>>,
    pub(super) ahead: Arc<Mutex<Ahead>>,
    /// Held while a set is settled, which lanes of all its tables may ask for at once.
    pub(super) settling: Arc<tokio::sync::Mutex<()>>,
    pub(super) from_ahead: Arc<AtomicU64>,
    pub(super) checked_ahead: Arc<AtomicU64>,
    /// Where pipelines' own commands run.
    pub surroundings: Surroundings,
    pub(super) externals: Arc<Externals>,
    /// Longest time that a file of a replay is named by nothing in the catalog (rule R10).
    pub checkpoint_every: Duration,
    /// Says that the worker is to stop: replays end, landings do not.
    pub(super) stop: Arc<Mutex<watch::Receiver<bool>>>,
}

/// Unless the configuration says otherwise. Removals of orphan files leave three days by default, and Spark's refuses
/// less than one.
pub const CHECKPOINT_EVERY: Duration = Duration::from_secs(60 * 60);

/// The requests of one target of one table, in one lane.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane {
    pub table: TableName,
    pub uuid: TableUuid,
    pub target: RefName,
}

impl Worker {
    pub fn new(
        catalog: Arc<dyn Catalog>,
        ledger: Ledger,
        engine: Arc<Engine>,
        policies: PolicyFolder,
        clock: Clock,
        random: Random,
        holder: String,
    ) -> Self {
        let surroundings = Surroundings { folder: policies.path().to_owned(), ..Surroundings::default() };
        Self {
            catalog,
            ledger,
            store: ManifestStore::new(MANIFEST_CACHE_BYTES),
            validator: Validator::new(Arc::clone(&engine)),
            prover: Arc::new(RewriteProver::new(Arc::clone(&engine))),
            engine,
            policies: Arc::new(policies),
            clock,
            random,
            holder,
            proofs: Arc::default(),
            losses: Arc::default(),
            input_pins: Arc::default(),
            ahead: Arc::default(),
            settling: Arc::default(),
            from_ahead: Arc::default(),
            checked_ahead: Arc::default(),
            surroundings,
            externals: Arc::default(),
            checkpoint_every: CHECKPOINT_EVERY,
            stop: Arc::new(Mutex::new(watch::channel(false).1)),
        }
    }

    /// Commands of pipelines run there, and are told this of the catalog.
    #[must_use]
    pub fn with_surroundings(self, surroundings: Surroundings) -> Self {
        Self { surroundings, ..self }
    }

    pub fn now_ms(&self) -> i64 {
        (self.clock)()
    }

    /// Trains whose files were written while the train before was under way.
    pub fn trains_from_ahead(&self) -> u64 {
        self.from_ahead.load(Ordering::Relaxed)
    }

    /// Those of them whose own checks had passed by then.
    pub fn trains_checked_ahead(&self) -> u64 {
        self.checked_ahead.load(Ordering::Relaxed)
    }

    /// A train id that is never used twice: time in milliseconds and 64 random bits.
    pub fn new_train_id(&self) -> TrainId {
        TrainId(format!("{:011x}-{:016x}", self.now_ms(), (self.random)()))
    }
}

/// A poisoned lock only says that another thread panicked; the maps behind these are caches and counts.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Prefix of every temporary branch of a queue: a sweep touches only its own (rule R7).
pub fn temporary_prefix(queue: &QueueId) -> String {
    format!("mergeberg/tmp/{queue}/")
}

/// Prefix of the temporary branches that pipelines' own commands are given.
pub fn external_prefix(queue: &QueueId) -> String {
    format!("{}external/", temporary_prefix(queue))
}

/// The temporary branch of one run of a request's command. It is never used twice.
pub fn external_ref(queue: &QueueId, request: RequestId, run: u32) -> RefName {
    RefName(format!("{}{request}-{run}", external_prefix(queue)))
}

/// What the branch of a train's checkpoints has behind the name of its fence.
pub(super) const CHECKPOINT_SUFFIX: &str = "-files";

/// The branch that names the files of a train before it is staged.
pub(super) fn checkpoint_ref(queue: &QueueId, train: &TrainId) -> RefName {
    RefName(format!("{}{train}{CHECKPOINT_SUFFIX}", temporary_prefix(queue)))
}

/// The temporary branch of a train: its fence. It is never used twice.
pub fn temporary_ref(queue: &QueueId, train: &TrainId) -> RefName {
    RefName(format!("{}{train}", temporary_prefix(queue)))
}
