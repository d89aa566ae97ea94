//! The REST catalog: tables behind a server that speaks the Iceberg REST specification.
//!
//! The server checks a commit's requirements and answers with the table; what its answer means is judged by
//! reading (`answers`). A commit whose reply is lost is `Unknown`, and sent again only under an idempotency
//! key that the server promised to know. Metadata arrives as JSON and is kept as the document that it is.
//!
//! What one server says can be older than what it said before: a load that falls behind what this process
//! has seen is asked for again, and is an error when it stays behind.
//!
//! Absent on purpose: creating and dropping tables other than scratch ones, views, and scan planning by the server.

mod answers;
mod auth;
mod aws_signature;
mod grants;
mod http;
mod keys;
mod paths;
mod server;
mod set_commit;
mod settings;
mod signer;
mod tables;
mod transport;
mod wire;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use iceberg::io::FileIO;
use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::ids::TableName;
use reqwest::StatusCode;
use reqwest::header::{HeaderValue, IF_NONE_MATCH};
use uuid::Uuid;

pub use self::aws_signature::{AwsKeys, AwsSettings, SIGNING_KEYS};
pub use self::settings::{RestSettings, WrongSetting};
pub use self::transport::Patience;

use self::answers::{Refusal, Sent, difference, of_refusal};
use self::grants::TableGrants;
use self::keys::Keys;
use self::server::{Server, refused};
use self::tables::{Held, Newer, read_reply};
use self::transport::{Failure, Reply, pause};
use self::wire::{CatalogConfig, ErrorModel, commit_request};
use super::catalog::{
    Capabilities, Capability, Catalog, CatalogError, Clock, CommitOutcome, KeyedAnswer, SetOutcome,
    TableChange, off_runtime, remove_scratch_files, require_scratch,
};
use super::create::TableDefinition;
use super::error::plain;
use super::loaded::LoadedTable;
use super::storage::{Grants, Source, file_io_of};
use super::table_cache::TableCache;

/// Times that a table is asked for whose answer is older than one before, or no answer at all.
const LOAD_ATTEMPTS: u32 = 6;

/// An endpoint by which a server says that it commits to several tables at once.
const COMMIT_TRANSACTION: &str = "POST /v1/{prefix}/transactions/commit";

/// See the module.
pub struct RestCatalog {
    name: String,
    server: Arc<Server>,
    capabilities: Capabilities,
    keys: Keys,
    accesses: Mutex<TableCache<Access>>,
    cache: Mutex<TableCache<Held>>,
}

/// How one table's files are reached.
#[derive(Clone)]
struct Access {
    grants: Arc<TableGrants>,
    file_io: FileIO,
}

impl RestCatalog {
    /// Asks the server for its configuration (`GET /v1/config`) and follows it.
    pub async fn open(settings: &RestSettings, clock: Clock) -> Result<Self, CatalogError> {
        let (server, config) = Server::open(settings, clock).await?;
        Ok(Self {
            name: settings.name.clone(),
            server: Arc::new(server),
            capabilities: capabilities(&config),
            keys: Keys::of(&config),
            accesses: Mutex::default(),
            cache: Mutex::default(),
        })
    }

    fn cache(&self) -> MutexGuard<'_, TableCache<Held>> {
        // The cache is a map of immutable values: a panic elsewhere cannot have left it half-changed.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accesses(&self) -> MutexGuard<'_, TableCache<Access>> {
        self.accesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the table's files are reached.
    fn access(&self, table: &TableName) -> Access {
        let mut accesses = self.accesses();
        if let Some(access) = accesses.get(table) {
            return access;
        }
        let grants = Arc::new(TableGrants::new(table.clone(), Arc::clone(&self.server)));
        let file_io = file_io_of(Source::Granted(Arc::clone(&grants) as Arc<dyn Grants>));
        let access = Access { grants, file_io };
        accesses.put(table.clone(), access.clone());
        access
    }

    /// A reply that is neither the table nor "not modified".
    fn refused_load(&self, table: &TableName, reply: &Reply) -> CatalogError {
        let missing = |error: ErrorModel| error.kind.starts_with("NoSuch") || error.kind.is_empty();
        match reply.status {
            // A proxy's or a wrong address's 404 says nothing of the table.
            StatusCode::NOT_FOUND if reply.error().is_some_and(missing) => {
                CatalogError::NotFound(table.clone())
            }
            _ => refused(&self.server.uri, reply),
        }
    }

    /// What the reply holds, put into memory unless something newer is there.
    async fn take_in(&self, table: &TableName, reply: Reply) -> Result<Newer, CatalogError> {
        let (name, access, known) = (table.clone(), self.access(table), self.cache().get(table));
        let held = off_runtime(move || read_reply(&name, &reply, known, &access)).await??;
        let mut cache = self.cache();
        if let Some(known) = cache.get(table)
            && known.is_newer_than(&held.table)
        {
            return Ok(Newer::Behind(known.table));
        }
        cache.put(table.clone(), held.clone());
        Ok(Newer::Read(held.table))
    }

    /// The table as it is after a refusal, for a judgement.
    async fn judge(&self, sent: Sent<'_>, refusal: Refusal, told: &str) -> CommitOutcome {
        match self.load(&sent.base.facts.name).await {
            Ok(current) => of_refusal(sent, refusal, &current, told, (self.server.clock)()),
            // Refused, but nobody can say why, nor whether it was the answer to a second sending.
            Err(error) => CommitOutcome::Unknown(format!("{told}, and then {error}")),
        }
    }

    /// The reply to a commit that the catalog says to have applied.
    async fn applied(&self, table: &TableName, reply: Reply, updates: &[Update]) -> CommitOutcome {
        match self.take_in(table, reply).await {
            Ok(Newer::Read(now) | Newer::Behind(now)) => match difference(&now.facts, updates) {
                None => CommitOutcome::Landed(now),
                Some(what) => {
                    CommitOutcome::Unknown(format!("the catalog says that it is applied, but {what}"))
                }
            },
            Err(error) => {
                CommitOutcome::Unknown(format!("the catalog says that it is applied, and then {error}"))
            }
        }
    }
}

#[async_trait]
impl Catalog for RestCatalog {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { idempotency_keys: self.keys.are_known(), ..self.capabilities }
    }

    async fn list_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        self.all_tables().await
    }

    async fn load(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        let url = self.server.address(self.server.paths.table(table))?;
        let mut trouble = None;
        for attempt in 1..=LOAD_ATTEMPTS {
            let known = self.cache().get(table);
            let etag = known.as_ref().and_then(|held| held.etag.as_deref());
            let unless =
                etag.and_then(|etag| HeaderValue::from_str(etag).ok()).map(|etag| (IF_NONE_MATCH, etag));
            let reply = self.access(table).grants.load(url.clone(), unless).await;
            let reply = reply.map_err(|f| self.server.unanswered(&f))?;
            match (reply.status, known) {
                (StatusCode::NOT_MODIFIED, Some(known)) => return Ok(known.table),
                (StatusCode::OK, _) => match self.take_in(table, reply).await {
                    Ok(Newer::Read(now)) => return Ok(now),
                    Ok(Newer::Behind(known)) => {
                        trouble = Some(CatalogError::Unavailable(format!(
                            "{} answers with an older state of {table} than before ({}); if the catalog was \
                             restored from a backup, start again",
                            self.server.uri, known.metadata_location
                        )));
                    }
                    // Cut short on its way.
                    Err(error @ CatalogError::Unavailable(_)) => trouble = Some(error),
                    Err(error) => return Err(error),
                },
                _ => return Err(self.refused_load(table, &reply)),
            }
            if attempt < LOAD_ATTEMPTS {
                tokio::time::sleep(pause(attempt)).await;
            }
        }
        Err(trouble
            .unwrap_or_else(|| CatalogError::Unavailable(format!("{} gave no answer", self.server.uri))))
    }

    async fn load_refs(&self, table: &TableName) -> Result<Arc<LoadedTable>, CatalogError> {
        // What is in memory is asked for by its ETag, and costs nothing when it is unchanged.
        if self.cache().get(table).is_some() {
            return self.load(table).await;
        }
        let url = self.server.address(self.server.paths.table(table).map(|mut url| {
            url.query_pairs_mut().append_pair("snapshots", "refs");
            url
        }))?;
        let access = self.access(table);
        let reply = access.grants.load(url, None).await;
        let reply = reply.map_err(|f| self.server.unanswered(&f))?;
        if reply.status != StatusCode::OK {
            return Err(self.refused_load(table, &reply));
        }
        // Not kept: what is in memory is whole.
        let name = table.clone();
        match off_runtime(move || read_reply(&name, &reply, None, &access)).await? {
            Ok(held) => Ok(held.table),
            // Cut short on its way, or a server that makes nothing of the parameter: the whole table is asked for.
            Err(CatalogError::Unavailable(_) | CatalogError::Unreadable { .. }) => self.load(table).await,
            Err(error) => Err(error),
        }
    }

    async fn commit(
        &self,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: Vec<Update>,
    ) -> CommitOutcome {
        let table = &base.facts.name;
        let url = match self.server.address(self.server.paths.table(table)) {
            Ok(url) => url,
            Err(error) => return CommitOutcome::Refused(error),
        };
        let body = commit_request(table, requirements, &updates).to_string().into_bytes();
        let sendings = self.keys.for_one_commit();
        let sent = Sent { base, requirements, updates: &updates };
        let token = self.access(table).grants.token();
        let mut lost = None;
        for sent_times in 1.. {
            match self.server.http.post(url.clone(), sendings.headers(), body.clone(), token.as_ref()).await {
                Ok(reply) if reply.status == StatusCode::OK => {
                    return self.applied(table, reply, &updates).await;
                }
                Ok(reply) if reply.status == StatusCode::CONFLICT => {
                    return self.judge(sent, Refusal::Conflict, &reply.told()).await;
                }
                Ok(reply) if is_refusal(&reply, lost.is_some()) => {
                    return match reply.status {
                        StatusCode::NOT_FOUND => CommitOutcome::Refused(self.refused_load(table, &reply)),
                        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => {
                            self.judge(sent, Refusal::Invalid, &reply.told()).await
                        }
                        StatusCode::TOO_MANY_REQUESTS => {
                            CommitOutcome::Refused(refused(&self.server.uri, &reply))
                        }
                        _ => CommitOutcome::Refused(CatalogError::Refused(reply.told())),
                    };
                }
                // 2xx without a table, 5xx: the commit may be applied, or still be under way.
                Ok(reply) => lost = Some(reply.told()),
                Err(failure @ (Failure::NotSent(_) | Failure::NoToken(_))) if lost.is_none() => {
                    return CommitOutcome::Refused(self.server.unanswered(&failure));
                }
                Err(failure) => lost = Some(failure.text().to_owned()),
            }
            let pause = pause(sent_times);
            if !sendings.again(sent_times, pause) {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        CommitOutcome::Unknown(lost.unwrap_or_else(|| "the catalog gave no answer".to_owned()))
    }

    async fn create_scratch(
        &self,
        table: &TableName,
        definition: &TableDefinition,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        require_scratch(table)?;
        let body = definition.create_request(table).map_err(|error| {
            CatalogError::Refused(format!("{table} cannot be created: {}", plain(&error)))
        })?;
        let url = self.server.address(self.server.paths.tables(&table.namespace))?;
        let reply = self.server.http.post(url, &[], body.to_string().into_bytes(), None).await;
        let reply = reply.map_err(|failure| self.server.unanswered(&failure))?;
        if reply.status != StatusCode::OK {
            return Err(CatalogError::Refused(format!("{table} cannot be created: {}", reply.told())));
        }
        self.load(table).await
    }

    async fn drop_scratch(&self, table: &LoadedTable) -> Result<(), CatalogError> {
        let name = &table.facts.name;
        require_scratch(name)?;
        let url = self.server.address(self.server.paths.table(name))?;
        let reply = self.server.http.delete(url).await.map_err(|failure| self.server.unanswered(&failure))?;
        if !reply.status.is_success() {
            return Err(CatalogError::Refused(format!("{name} cannot be dropped: {}", reply.told())));
        }
        remove_scratch_files(table).await
    }

    async fn commit_set(&self, changes: &[TableChange]) -> SetOutcome {
        self.commit_to_all(changes).await
    }

    async fn commit_under_key(
        &self,
        key: Uuid,
        base: &LoadedTable,
        requirements: &[Requirement],
        updates: &[Update],
    ) -> KeyedAnswer {
        let table = &base.facts.name;
        let url = match self.server.address(self.server.paths.table(table)) {
            Ok(url) => url,
            Err(error) => return KeyedAnswer::Unclear(error.to_string()),
        };
        let body = commit_request(table, requirements, updates).to_string().into_bytes();
        let headers = keys::header(key);
        let token = self.access(table).grants.token();
        match self.server.http.post(url, headers.as_slice(), body, token.as_ref()).await {
            Ok(reply) if reply.status == StatusCode::OK => KeyedAnswer::Yes,
            Ok(reply) if reply.status.is_client_error() => KeyedAnswer::No(reply.told()),
            Ok(reply) => KeyedAnswer::Unclear(reply.told()),
            Err(failure) => KeyedAnswer::Unclear(failure.text().to_owned()),
        }
    }

    fn distrust(&self, capability: Capability) {
        if capability == Capability::IdempotencyKeys {
            self.keys.distrust();
        }
    }
}

/// The server looked at the commit and did not apply it. After a lost reply only a refusal that the key's
/// own record explains says so, which the statuses of [`CommitOutcome`]'s judgement are.
fn is_refusal(reply: &Reply, after_lost: bool) -> bool {
    let judged = [StatusCode::BAD_REQUEST, StatusCode::UNPROCESSABLE_ENTITY].contains(&reply.status);
    judged || ((reply.status.is_client_error() || reply.status.is_redirection()) && !after_lost)
}

fn capabilities(config: &CatalogConfig) -> Capabilities {
    Capabilities {
        table_refs: true,
        ref_requirements: true,
        snapshot_removal: true,
        // A server that lists no endpoints has those of the specification's first version, this one included.
        multi_table_commits: config.endpoints.is_none() || config.offers(COMMIT_TRANSACTION),
        // As long as they are trusted.
        idempotency_keys: true,
        current_reads: false,
    }
}
