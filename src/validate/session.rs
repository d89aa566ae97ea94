//! The query engine: threads, memory and disk of every check, bounded once for the whole process.
//!
//! Checks burn CPU for seconds, so they run on threads of their own and never hold up the queue's runtime.
//! All sessions draw on one memory pool; what does not fit spills to disk, up to a bound, and a check that
//! needs more is `could-not-run`.

use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use datafusion::execution::memory_pool::FairSpillPool;
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::prelude::{SessionConfig, SessionContext};

use super::CheckError;

/// Name and version that go into evidence (rule E6). The version is that of `Cargo.toml`.
pub const ENGINE: &str = "datafusion 53.1.0";
/// Memory of all checks together, bytes.
pub const MEMORY_BYTES: usize = 256 * 1024 * 1024;
/// Disk that spilling may use, bytes.
pub const SPILL_BYTES: u64 = 16 * 1024 * 1024 * 1024;
/// One check on one candidate; a longer one is `could-not-run`.
pub const CHECK_TIME_BOUND: Duration = Duration::from_secs(10 * 60);

/// One for the process; shared by checks and rewrite proofs.
#[derive(Debug)]
pub struct Engine {
    /// `None` only while dropping.
    threads: Option<tokio::runtime::Runtime>,
    environment: Arc<RuntimeEnv>,
    parallelism: usize,
}

impl Engine {
    pub fn start() -> Result<Self, CheckError> {
        let parallelism = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self::with_bounds(parallelism, MEMORY_BYTES)
    }

    pub fn with_bounds(parallelism: usize, memory_bytes: usize) -> Result<Self, CheckError> {
        let threads = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(parallelism)
            .thread_name("mergeberg-check")
            .enable_all()
            .build()
            .map_err(CheckError::Threads)?;
        let environment = RuntimeEnvBuilder::new()
            .with_memory_pool(Arc::new(FairSpillPool::new(memory_bytes)))
            .with_max_temp_directory_size(SPILL_BYTES)
            .build_arc()?;
        Ok(Self { threads: Some(threads), environment, parallelism })
    }

    /// Streams that a scan is split into at most.
    pub fn parallelism(&self) -> usize {
        self.parallelism
    }

    /// A fresh session: nothing that one check registers is seen by another. Identifiers mean exactly the
    /// column of that spelling, quoted or not.
    pub fn session(&self) -> SessionContext {
        self.session_with(|_| ())
    }

    /// The same with other settings.
    pub fn session_with(&self, change: impl FnOnce(&mut SessionConfig)) -> SessionContext {
        let mut config =
            SessionConfig::new().with_target_partitions(self.parallelism).with_information_schema(false);
        config.options_mut().sql_parser.enable_ident_normalization = false;
        change(&mut config);
        SessionContext::new_with_config_rt(config, Arc::clone(&self.environment))
    }

    /// Runs `work` on the engine's threads, within `bound`. Giving up on the returned future stops it.
    pub async fn run<T, F>(&self, bound: Duration, work: F) -> Result<T, CheckError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, CheckError>> + Send + 'static,
    {
        let Some(threads) = &self.threads else { return Err(CheckError::Stopped) };
        let mut task = StopOnDrop(threads.spawn(work));
        match tokio::time::timeout(bound, &mut task.0).await {
            Ok(Ok(result)) => result,
            Ok(Err(joined)) if joined.is_panic() => Err(CheckError::Crashed),
            Ok(Err(_)) => Err(CheckError::Stopped),
            Err(_) => Err(CheckError::TooSlow(bound)),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Waiting for the threads is not allowed where an engine may be dropped, within async code.
        if let Some(threads) = self.threads.take() {
            threads.shutdown_background();
        }
    }
}

struct StopOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for StopOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
