//! What commands work with: configuration, policies, catalog, ledger. Each is opened when it is first
//! needed, so that `policy check` works without a ledger and `request list` without a catalog.

use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use mergeberg_kernel::ids::Principal;
use tokio::sync::OnceCell;

use crate::config::{CatalogPlace, Config, PolicyFolder, SqlPlace};
use crate::error::UserError;
use crate::ledger::Ledger;
use crate::table::catalog::{Catalog, Clock};
use crate::table::rest_catalog::RestCatalog;
use crate::table::sql_catalog::SqlCatalog;

/// Who acts, when no argument says so.
pub const ENV_PRINCIPAL: &str = "MERGEBERG_PRINCIPAL";

pub struct Context {
    pub config: Config,
    pub policies: PolicyFolder,
    pub clock: Clock,
    catalog: OnceCell<Arc<dyn Catalog>>,
    ledger: OnceCell<Ledger>,
}

impl Context {
    /// From the file that `--config` names, or the nearest one.
    pub fn find(named: Option<&Path>) -> Result<Self, UserError> {
        let here = std::env::current_dir().map_err(|e| {
            UserError::new(
                mergeberg_kernel::reason::ReasonCode::ConfigInvalid,
                format!("the current folder cannot be read: {e}"),
            )
        })?;
        let file = Config::find(named, &here)?;
        let config = Config::read(&file, |name| std::env::var(name).ok())?;
        Ok(Self::of(config, system_clock()))
    }

    pub fn of(config: Config, clock: Clock) -> Self {
        let policies = PolicyFolder::new(&config.policies);
        Self { config, policies, clock, catalog: OnceCell::new(), ledger: OnceCell::new() }
    }

    pub fn now_ms(&self) -> i64 {
        (self.clock)()
    }

    /// The catalog that this queue serves.
    pub async fn catalog(&self) -> Result<&Arc<dyn Catalog>, UserError> {
        let open = async || -> Result<Arc<dyn Catalog>, UserError> {
            let config = self.config.catalog(None)?;
            let catalog: Arc<dyn Catalog> = match &config.place {
                CatalogPlace::Sql(SqlPlace { database, warehouse, storage }) => {
                    let catalog =
                        SqlCatalog::open(&config.name, database, warehouse, self.clock.clone()).await?;
                    let catalog = catalog.with_storage(storage.clone());
                    // Lets the crash tests end the process in the middle of a commit.
                    #[cfg(debug_assertions)]
                    let catalog = catalog.with_hook(Arc::new(crate::worker::step::InCommits));
                    Arc::new(catalog)
                }
                CatalogPlace::Rest(settings) => {
                    Arc::new(RestCatalog::open(settings, self.clock.clone()).await?)
                }
            };
            Ok(catalog)
        };
        self.catalog.get_or_try_init(open).await
    }

    pub async fn ledger(&self) -> Result<&Ledger, UserError> {
        self.ledger.get_or_try_init(async || Ok(Ledger::open(&self.config.ledger).await?)).await
    }
}

/// Milliseconds since the epoch by this machine's clock.
pub fn system_clock() -> Clock {
    Arc::new(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
    })
}

/// The principal that was named, or the one of the environment, or the operating system's user.
pub fn principal(named: Option<String>, environment: impl Fn(&str) -> Option<String>) -> Principal {
    named
        .or_else(|| [ENV_PRINCIPAL, "USER", "LOGNAME", "USERNAME"].into_iter().find_map(environment))
        .filter(|name| !name.trim().is_empty())
        .map_or_else(|| Principal::new("unknown"), Principal::new)
}
