//! What a catalog grants for the files of a table: credentials that end, or its signature under each request.
//!
//! They come with the table. Ahead of their end they are asked for again, from the endpoint for them where the
//! server has one, else with the table; whoever needs them meanwhile waits for one question.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use mergeberg_kernel::ids::TableName;
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{StatusCode, Url};

use super::super::storage::{Grant, Grants, StorageProperties};
use super::server::{ACCESS_DELEGATION, Server, refused};
use super::signer::signer_of;
use super::transport::{Failure, Reply};
use super::wire::{CredentialsReply, StorageCredential, TableReply};
use crate::secret::Secret;

/// Credentials are renewed this long before their end, or a quarter of their life before when that is shorter.
const RENEW_AHEAD_MS: i64 = 300_000;
/// After a renewal that failed while the old ones still hold, in milliseconds.
const RENEW_AGAIN_MS: i64 = 5_000;
/// After credentials were renewed because a store refused them, in milliseconds.
const DOUBT_AGAIN_MS: i64 = 60_000;
/// How long credentials are used that do not say when they end, in milliseconds: none are given for less.
const UNTOLD_LIFE_MS: i64 = 600_000;

/// When credentials end, in milliseconds since the epoch; Azure's have the account's name behind.
const ENDS: [&str; 3] =
    ["s3.session-token-expires-at-ms", "gcs.oauth2.token-expires-at", "adls.sas-token-expires-at-ms"];
/// Credentials that end.
const ENDING: [&str; 3] = ["s3.session-token", "gcs.oauth2.token", "adls.sas-token"];
/// The bearer token for requests about this table.
const TOKEN: &str = "token";

/// Ids of settings, counted through the process; 0 is the configuration's.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What a reply says about access to a table's files.
#[derive(Default)]
pub(super) struct Told {
    /// `None`: the reply does not speak of it.
    pub config: Option<BTreeMap<String, Option<String>>>,
    pub credentials: Option<Vec<StorageCredential>>,
}

/// The grants of one table.
pub(super) struct TableGrants {
    table: TableName,
    server: Arc<Server>,
    held: Mutex<Held>,
    /// One renewal at a time.
    renewal: tokio::sync::Mutex<()>,
    /// We may see the table, and are given no access to its files.
    refused: AtomicBool,
}

#[derive(Default)]
struct Held {
    /// The `config` of the table.
    config: BTreeMap<String, Secret>,
    /// Longest prefix first; the last has none and is for all other locations.
    sets: Vec<Set>,
    /// The table's own token.
    token: Option<Secret>,
    doubt_again_at_ms: i64,
}

/// Settings for locations below a prefix.
struct Set {
    prefix: String,
    grant: Grant,
    renew_at_ms: Option<i64>,
    ends_at_ms: Option<i64>,
}

impl TableGrants {
    pub fn new(table: TableName, server: Arc<Server>) -> Self {
        let grants = Self {
            table,
            server,
            held: Mutex::default(),
            renewal: tokio::sync::Mutex::default(),
            refused: AtomicBool::new(false),
        };
        grants.take(Told { config: Some(BTreeMap::new()), credentials: None });
        grants
    }

    /// The token for requests about the table, where it has one of its own.
    pub fn token(&self) -> Option<Secret> {
        self.held().token.clone()
    }

    /// Asks for the table, and for access to its files with it. Who may see a table need not be given access to its
    /// files: refused, it is asked for without.
    pub async fn load(&self, url: Url, unless: Option<(HeaderName, HeaderValue)>) -> Result<Reply, Failure> {
        let http = &self.server.http;
        let token = self.token();
        let asked = self.server.delegation.clone().filter(|_| !self.refused.load(Ordering::Relaxed));
        let Some(asked) = asked else {
            return http.get(url, &Vec::from_iter(unless), token.as_ref()).await;
        };
        let headers: Vec<_> = unless.iter().cloned().chain([(ACCESS_DELEGATION, asked)]).collect();
        let reply = http.get(url.clone(), &headers, token.as_ref()).await?;
        if reply.status != StatusCode::FORBIDDEN {
            return Ok(reply);
        }
        let without = http.get(url, &Vec::from_iter(unless), token.as_ref()).await?;
        if without.status != StatusCode::FORBIDDEN {
            tracing::warn!(table = %self.table, "the catalog gives no access to files: {}", reply.told());
            self.refused.store(true, Ordering::Relaxed);
        }
        Ok(without)
    }

    /// Takes in what a reply says. What it does not speak of stays.
    pub fn take(&self, told: Told) {
        let now_ms = (self.server.clock)();
        let Told { config, credentials } = told;
        if config.is_none() && credentials.is_none() {
            return;
        }
        let mut held = self.held();
        if let Some(config) = config {
            held.config = secrets(config);
            held.token = held.config.get(TOKEN).cloned();
        }
        let mut sets: Vec<Set> = Vec::new();
        for StorageCredential { prefix, config } in credentials.unwrap_or_default() {
            let mut own = held.config.clone();
            own.extend(secrets(config));
            sets.push(self.set(prefix, own, &held, now_ms));
        }
        sets.push(self.set(String::new(), held.config.clone(), &held, now_ms));
        sets.sort_by_key(|set| std::cmp::Reverse(set.prefix.len()));
        held.sets = sets;
    }

    fn set(&self, prefix: String, told: BTreeMap<String, Secret>, held: &Held, now_ms: i64) -> Set {
        let life = Life::of(&told, now_ms);
        let settings = self.server.storage.overlaid(told);
        let known = held.sets.iter().find(|set| set.prefix == prefix && *set.grant.settings == settings);
        if let Some(Set { grant, renew_at_ms, ends_at_ms, .. }) = known {
            // Given again: what tells no end is good for another while.
            let renew_at_ms = if ends_at_ms.is_some() { *renew_at_ms } else { life.renew_at_ms };
            return Set { prefix, grant: grant.clone(), renew_at_ms, ends_at_ms: *ends_at_ms };
        }
        let signing = signer_of(&self.server, &settings, held.token.clone()).map(Arc::new);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let grant = Grant { id, settings: Arc::new(settings), signing };
        Set { prefix, grant, renew_at_ms: life.renew_at_ms, ends_at_ms: life.ends_at_ms }
    }

    /// What holds for a location, and whether it is time to renew it, or it is over.
    fn now(&self, location: &str) -> Option<(Grant, Time)> {
        let now_ms = (self.server.clock)();
        let held = self.held();
        let set = held.sets.iter().find(|set| location.starts_with(&set.prefix))?;
        let time = match (set.renew_at_ms, set.ends_at_ms) {
            (_, Some(end)) if now_ms >= end => Time::Over,
            (Some(renew), _) if now_ms >= renew => Time::Due,
            _ => Time::Fine,
        };
        Some((set.grant.clone(), time))
    }

    /// Not again for a while.
    fn put_off(&self) {
        let again = (self.server.clock)().saturating_add(RENEW_AGAIN_MS);
        for set in &mut self.held().sets {
            if let Some(at) = &mut set.renew_at_ms {
                *at = again.max(*at);
            }
        }
    }

    async fn renew(&self) -> Result<(), String> {
        let told = match self.server.offers_credentials {
            true => self.credentials_alone().await?,
            false => None,
        };
        let told = match told {
            Some(told) => told,
            None => self.with_the_table().await?,
        };
        self.take(told);
        Ok(())
    }

    /// From the endpoint for them; `None`: it gives none for this table.
    async fn credentials_alone(&self) -> Result<Option<Told>, String> {
        let server = &self.server;
        let url = server.paths.credentials(&self.table)?;
        let reply =
            server.http.get(url, &[], self.token().as_ref()).await.map_err(|f| f.text().to_owned())?;
        match reply.status {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
                return Ok(None);
            }
            _ => return Err(refused(&server.uri, &reply).to_string()),
        }
        let CredentialsReply { storage_credentials } = serde_json::from_slice(&reply.body)
            .map_err(|error| format!("{} answers no credentials: {error}", server.uri))?;
        let some = !storage_credentials.is_empty();
        Ok(some.then_some(Told { config: None, credentials: Some(storage_credentials) }))
    }

    async fn with_the_table(&self) -> Result<Told, String> {
        let server = &self.server;
        let url = server.paths.table(&self.table)?;
        let reply = self.load(url, None).await.map_err(|f| f.text().to_owned())?;
        if reply.status != StatusCode::OK {
            return Err(refused(&server.uri, &reply).to_string());
        }
        let TableReply { config, storage_credentials, .. } = serde_json::from_slice(&reply.body)
            .map_err(|error| format!("{} answers no table: {error}", server.uri))?;
        Ok(Told { config: Some(config.unwrap_or_default()), credentials: storage_credentials })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Replaced as a whole: a panic elsewhere cannot have left it half-changed.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    Fine,
    Due,
    Over,
}

#[async_trait]
impl Grants for TableGrants {
    async fn grant(&self, location: &str) -> Result<Grant, String> {
        let none = || format!("the catalog grants nothing for {location}");
        if let (grant, Time::Fine) = self.now(location).ok_or_else(none)? {
            return Ok(grant);
        }
        let _one = self.renewal.lock().await;
        // Perhaps another has just done it.
        let (old, time) = self.now(location).ok_or_else(none)?;
        if time == Time::Fine {
            return Ok(old);
        }
        match self.renew().await {
            Ok(()) => {
                let (grant, time) = self.now(location).ok_or_else(none)?;
                match time {
                    Time::Fine => {}
                    Time::Due => self.put_off(),
                    Time::Over => {
                        return Err(format!("the catalog grants credentials for {location} that are over"));
                    }
                }
                Ok(grant)
            }
            Err(error) if time == Time::Due => {
                tracing::warn!(table = %self.table, "the storage's credentials could not be renewed yet: {error}");
                self.put_off();
                Ok(old)
            }
            Err(error) => Err(format!("the storage's credentials could not be renewed: {error}")),
        }
    }

    fn doubt(&self, id: u64) {
        let now_ms = (self.server.clock)();
        let mut held = self.held();
        // A refusal for want of rights stays one: the catalog is not asked at each.
        if now_ms < held.doubt_again_at_ms {
            return;
        }
        if let Some(set) = held.sets.iter_mut().find(|set| set.grant.id == id && set.renew_at_ms.is_some()) {
            set.renew_at_ms = Some(now_ms);
            held.doubt_again_at_ms = now_ms.saturating_add(DOUBT_AGAIN_MS);
        }
    }
}

impl fmt::Debug for TableGrants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableGrants").field("table", &self.table).finish_non_exhaustive()
    }
}

/// When settings of a server are to be renewed, and when they are over.
#[derive(Debug, PartialEq, Eq)]
struct Life {
    renew_at_ms: Option<i64>,
    ends_at_ms: Option<i64>,
}

impl Life {
    fn of(told: &BTreeMap<String, Secret>, now_ms: i64) -> Self {
        let has = |key: &str, names: &[&str]| {
            names.iter().any(|name| {
                key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            })
        };
        let ends = told.iter().filter(|(key, _)| has(key, &ENDS));
        let ends_at_ms = ends.filter_map(|(_, value)| value.reveal().trim().parse::<i64>().ok()).min();
        let renew_at_ms = match ends_at_ms {
            Some(end) => {
                let life = end.saturating_sub(now_ms).max(0);
                Some(end.saturating_sub(RENEW_AHEAD_MS.min(life / 4)))
            }
            None if told.keys().any(|key| has(key, &ENDING)) => Some(now_ms.saturating_add(UNTOLD_LIFE_MS)),
            None => None,
        };
        Self { renew_at_ms, ends_at_ms }
    }
}

fn secrets(told: BTreeMap<String, Option<String>>) -> BTreeMap<String, Secret> {
    told.into_iter().filter_map(|(key, value)| Some((key, Secret::new(value?)))).collect()
}

/// Settings of a server's configuration that may concern storage: all that have our names' form.
pub(super) fn storage_settings(config: &BTreeMap<String, Option<String>>) -> BTreeMap<String, Secret> {
    let known = |key: &str| ["s3.", "gcs.", "adls.", "client.", "signer."].iter().any(|p| key.starts_with(p));
    secrets(config.clone()).into_iter().filter(|(key, _)| known(key)).collect()
}

/// Are there keys of our own, so that the catalog need not grant any?
pub(super) fn has_own_keys(storage: &StorageProperties) -> bool {
    storage.has_any(&[
        "s3.access-key-id",
        "gcs.oauth2.token",
        "gcs.credentials-json",
        "adls.account-key",
        "adls.sas-token",
        "adls.client-secret",
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(pairs: &[(&str, &str)], now_ms: i64) -> (Option<i64>, Option<i64>) {
        let told = pairs.iter().map(|(key, value)| ((*key).to_owned(), Secret::new(*value))).collect();
        let Life { renew_at_ms, ends_at_ms } = Life::of(&told, now_ms);
        (renew_at_ms, ends_at_ms)
    }

    #[test]
    fn credentials_are_renewed_ahead_of_their_end() {
        assert_eq!(life(&[], 0), (None, None));
        assert_eq!(life(&[("s3.access-key-id", "k")], 0), (None, None));
        let hour = life(&[("s3.session-token", "t"), ("s3.session-token-expires-at-ms", "3600000")], 0);
        assert_eq!(hour, (Some(3_600_000 - RENEW_AHEAD_MS), Some(3_600_000)));
        // Short lives: a quarter ahead.
        assert_eq!(life(&[("gcs.oauth2.token-expires-at", "1800")], 1_000), (Some(1_600), Some(1_800)));
        let azure =
            [("adls.sas-token-expires-at-ms.acc.dfs.x", "9"), ("adls.sas-token-expires-at-ms.b", "5")];
        assert_eq!(life(&azure, 9).1, Some(5));
        assert_eq!(life(&[("adls.sas-token.acc", "t")], 1), (Some(1 + UNTOLD_LIFE_MS), None));
    }
}
