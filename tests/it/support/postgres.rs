//! Houses whose catalog and ledger are databases on the tests' PostgreSQL server (`scripts/postgres`).

use std::path::Path;

use mergeberg::database::PostgresPlace;
use mergeberg::table::sql_catalog::DatabasePlace;
use tempfile::TempDir;

use super::child::{Settings, real_now};
use super::{House, order};

#[path = "../../../src/database/testing.rs"]
mod server;

pub use server::TestServer;

/// A folder with this file has its catalog where the file says, and not in a file of its own.
const CATALOG_ADDRESS: &str = "catalog.address";

/// Where the catalog of a House's folder is.
pub fn database_in(folder: &Path) -> DatabasePlace {
    match std::fs::read_to_string(folder.join(CATALOG_ADDRESS)) {
        Ok(address) => PostgresPlace::parse(&address, None).unwrap().into(),
        Err(_) => DatabasePlace::File { path: folder.join("catalog.db"), read_only: false },
    }
}

/// A House on a server. Its databases go with [`OnPostgres::end`].
pub struct OnPostgres {
    pub house: House,
    pub server: TestServer,
    pub catalog_url: String,
    pub ledger_url: String,
}

impl OnPostgres {
    /// ORD as [`House::orders`], on the real clock, with `mergeberg.toml`; `None`, said so, without a server.
    pub async fn orders(policy: &str, settings: Settings) -> Option<Self> {
        let server = TestServer::find()?;
        let (catalog_url, ledger_url) = (server.database_url().await, server.database_url().await);
        Some(Self::at(server, catalog_url, ledger_url, policy, settings).await)
    }

    /// As [`Self::orders`], with databases of the server by these addresses.
    pub async fn at(
        server: TestServer,
        catalog_url: String,
        ledger_url: String,
        policy: &str,
        settings: Settings,
    ) -> Self {
        let dir = TempDir::new().unwrap();
        std::fs::write(dir.path().join(CATALOG_ADDRESS), &catalog_url).unwrap();
        let ledger = PostgresPlace::parse(&ledger_url, None).unwrap().into();
        let house = House::with_table_in(dir, ledger, House::orders_definition(), policy).await;
        house.clock.store(real_now(), std::sync::atomic::Ordering::SeqCst);
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        house.configure(settings);
        Self { house, server, catalog_url, ledger_url }
    }

    pub async fn end(self) {
        self.server.end().await;
    }
}
