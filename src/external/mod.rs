//! A pipeline's own command or URL, run for one request within its time.
//!
//! Both are named in policy and nowhere else (rule S1). What they are told is the [`Ask`]; what they answer says only
//! whether they are content. What they left on their branch is read from the catalog by whoever asked, and nothing
//! that they say of it is believed.

mod command;
mod tail;
mod url;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use mergeberg_kernel::ids::{RefName, RequestId, SnapshotId, TableName, TableUuid};
use mergeberg_kernel::policy::ExternalReplay;
use serde::Serialize;

/// Most bytes that are kept of what a command printed, or a URL answered: the last ones.
pub const MAX_OUTPUT_BYTES: usize = 4096;

/// Prefix of every variable that a command is given. The worker's own of this prefix, which may be secrets, are
/// withheld from it.
pub const VARIABLE_PREFIX: &str = "MERGEBERG_";

/// What a run is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Ask {
    pub table: TableName,
    pub table_uuid: TableUuid,
    /// Its own branch, to be written on top of.
    pub branch: RefName,
    /// Where that branch was made: the target's head.
    pub base_snapshot_id: SnapshotId,
    pub request_id: RequestId,
    /// From 1: the how-manieth run for this request.
    pub run: u32,
    pub target: RefName,
    /// The branch that is made again, and its pinned head.
    pub source: RefName,
    pub source_snapshot_id: SnapshotId,
    /// Another one for each run.
    pub idempotency_key: String,
}

impl Ask {
    /// As a command's environment.
    fn variables(&self) -> BTreeMap<String, String> {
        let Self {
            table,
            table_uuid,
            branch,
            base_snapshot_id,
            request_id,
            run,
            target,
            source,
            source_snapshot_id,
            idempotency_key,
        } = self;
        [
            ("TABLE", table.to_string()),
            ("TABLE_UUID", table_uuid.to_string()),
            ("BRANCH", branch.to_string()),
            ("BASE_SNAPSHOT_ID", base_snapshot_id.to_string()),
            ("REQUEST_ID", request_id.to_string()),
            ("RUN", run.to_string()),
            ("TARGET", target.to_string()),
            ("SOURCE", source.to_string()),
            ("SOURCE_SNAPSHOT_ID", source_snapshot_id.to_string()),
            ("IDEMPOTENCY_KEY", idempotency_key.clone()),
        ]
        .into_iter()
        .map(|(name, value)| (format!("{VARIABLE_PREFIX}{name}"), value))
        .collect()
    }
}

/// Where commands run, and what all of them are told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Their working folder.
    pub folder: PathBuf,
    /// The catalog's settings without its secrets, by variable.
    pub variables: BTreeMap<String, String>,
}

/// How a run ended, as far as it can say itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Content,
    /// Another run may do better.
    Failed,
    /// Another run would fail as well.
    Refused,
    TimedOut,
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    pub end: End,
    /// Exit code, or HTTP status.
    pub status: Option<i64>,
    /// One sentence.
    pub text: String,
    /// The end of what was printed or answered, [`MAX_OUTPUT_BYTES`] at most.
    pub output: Option<String>,
}

impl Ran {
    fn of(end: End, status: Option<i64>, text: impl Into<String>, output: Option<String>) -> Self {
        Self { end, status, text: text.into(), output }
    }
}

/// Runs it to its end, to the end of its time, or until `cancelled` comes to pass; nothing of it goes on afterwards.
pub async fn run(
    what: &ExternalReplay,
    ask: &Ask,
    surroundings: &Surroundings,
    cancelled: impl Future<Output = ()>,
) -> Ran {
    let time = Duration::from_millis(u64::try_from(what.timeout.ms).unwrap_or(1));
    match &what.url {
        Some(url) => url::run(url, what.token_env.as_deref(), ask, time, cancelled).await,
        None => command::run(&what.command, ask, surroundings, time, cancelled).await,
    }
}
