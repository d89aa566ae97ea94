//! Where catalogs and ledgers are: in a folder, or on servers that the environment names.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use mergeberg::database::PostgresPlace;
use mergeberg::ledger::Ledger;
use mergeberg::table::catalog::Catalog;
use mergeberg::table::rest_catalog::{RestCatalog, RestSettings};
use mergeberg::table::sql_catalog::SqlCatalog;

use crate::rest_server::RestServer;
use crate::support::delayed::Delayed;
use crate::support::events::{CATALOG, definition, now_ms, table_name};

#[path = "../../src/database/testing.rs"]
#[allow(clippy::unwrap_used, dead_code)]
mod postgres;

use postgres::TestServer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Catalogs {
    Sqlite,
    Postgres,
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ledgers {
    Sqlite,
    Postgres,
}

/// The servers that there are.
pub struct Servers {
    postgres: Option<TestServer>,
    rest: bool,
}

impl Servers {
    pub fn find() -> Self {
        Self { postgres: TestServer::find(), rest: RestServer::is_there() }
    }

    pub fn have(&self, catalog: Catalogs, ledger: Ledgers) -> bool {
        let catalog = match catalog {
            Catalogs::Sqlite => true,
            Catalogs::Postgres => self.postgres.is_some(),
            Catalogs::Rest => self.rest,
        };
        catalog && (ledger == Ledgers::Sqlite || self.postgres.is_some())
    }

    pub async fn end(&self) {
        if let Some(postgres) = &self.postgres {
            postgres.end().await;
        }
    }

    async fn database(&self) -> anyhow::Result<String> {
        Ok(self.postgres.as_ref().context("there is no PostgreSQL")?.database_url().await)
    }
}

/// One catalog with the empty table in it.
pub enum CatalogAt {
    File(String),
    Postgres(String),
    Rest(RestServer),
}

impl CatalogAt {
    pub async fn create(servers: &Servers, kind: Catalogs, folder: &Path) -> anyhow::Result<Self> {
        let at = match kind {
            Catalogs::Sqlite => Self::File(folder.join("catalog.db").display().to_string()),
            Catalogs::Postgres => Self::Postgres(servers.database().await?),
            Catalogs::Rest => {
                let server = RestServer::start(folder)?;
                server.create_table().await?;
                Self::Rest(server)
            }
        };
        if let Self::File(uri) | Self::Postgres(uri) = &at {
            let catalog = match &at {
                Self::Postgres(_) => {
                    SqlCatalog::create(CATALOG, of_address(uri)?, &warehouse(folder), Arc::new(now_ms))
                        .await?
                }
                _ => SqlCatalog::create(CATALOG, uri, &warehouse(folder), Arc::new(now_ms)).await?,
            };
            catalog.create_namespace("bench").await?;
            catalog.define_table(&table_name()?, &definition()).await?;
        }
        Ok(at)
    }

    /// Another client of it, through a proxy where it is a server and `latency` is given.
    pub async fn client(
        &self,
        folder: &Path,
        clock: Arc<dyn Fn() -> i64 + Send + Sync>,
        latency: Option<Duration>,
    ) -> anyhow::Result<(Arc<dyn Catalog>, Option<Delayed>)> {
        match self {
            Self::File(path) => {
                let catalog = SqlCatalog::open(CATALOG, path, &warehouse(folder), clock).await?;
                Ok((Arc::new(catalog), None))
            }
            Self::Postgres(url) => {
                let (url, proxy) = farther(url, latency).await?;
                let catalog = SqlCatalog::open(CATALOG, of_address(&url)?, &warehouse(folder), clock).await?;
                Ok((Arc::new(catalog), proxy))
            }
            Self::Rest(server) => {
                let (url, proxy) = farther(server.uri(), latency).await?;
                let catalog = RestCatalog::open(&RestSettings::at(CATALOG, &url), clock).await?;
                Ok((Arc::new(catalog), proxy))
            }
        }
    }
}

/// One ledger.
pub enum LedgerAt {
    File(std::path::PathBuf),
    Postgres(String),
}

impl LedgerAt {
    pub async fn create(servers: &Servers, kind: Ledgers, folder: &Path) -> anyhow::Result<Self> {
        let at = match kind {
            Ledgers::Sqlite => Self::File(folder.join("ledger.db")),
            Ledgers::Postgres => Self::Postgres(servers.database().await?),
        };
        let ledger = match &at {
            Self::File(path) => Ledger::open_or_create(path.clone()).await?,
            Self::Postgres(url) => Ledger::open_or_create(of_address(url)?).await?,
        };
        ledger.close().await;
        Ok(at)
    }

    /// As [`CatalogAt::client`].
    pub async fn client(&self, latency: Option<Duration>) -> anyhow::Result<(Ledger, Option<Delayed>)> {
        match self {
            Self::File(path) => Ok((Ledger::open(path.clone()).await?, None)),
            Self::Postgres(url) => {
                let (url, proxy) = farther(url, latency).await?;
                Ok((Ledger::open(of_address(&url)?).await?, proxy))
            }
        }
    }
}

fn warehouse(folder: &Path) -> String {
    format!("file://{}", folder.join("warehouse").display())
}

fn of_address(url: &str) -> anyhow::Result<PostgresPlace> {
    PostgresPlace::parse(url, None).map_err(|error| anyhow!("{url}: {error:?}"))
}

/// The address with a proxy's place instead of the server's.
async fn farther(url: &str, latency: Option<Duration>) -> anyhow::Result<(String, Option<Delayed>)> {
    let Some(latency) = latency else { return Ok((url.to_owned(), None)) };
    let host = host_of(url)?;
    let server: SocketAddr = host.parse().with_context(|| format!("'{host}' of {url}"))?;
    let proxy = Delayed::before(server, latency).await?;
    let url = url.replacen(host, &proxy.address().to_string(), 1);
    Ok((url, Some(proxy)))
}

/// Host and port, as they stand in an address.
fn host_of(url: &str) -> anyhow::Result<&str> {
    let (_, rest) = url.split_once("://").with_context(|| format!("{url} is no address"))?;
    let authority = rest.split('/').next().unwrap_or(rest);
    Ok(authority.rsplit('@').next().unwrap_or(authority))
}
