//! Fresh databases on the tests' PostgreSQL server (`scripts/postgres`).

use std::sync::Mutex;

use sqlx::AssertSqlSafe;
use sqlx::{Connection as _, Executor as _};

use super::PostgresPlace;

/// Set by `scripts/postgres`: the address of an administrator.
const SERVER: &str = "MERGEBERG_POSTGRES";

/// The server, with the databases that one test made on it.
pub struct TestServer {
    admin: String,
    made: Mutex<Vec<String>>,
}

impl TestServer {
    /// `None`, said so, without a server: `scripts/test --quick` starts none.
    pub fn find() -> Option<Self> {
        match std::env::var(SERVER) {
            Ok(admin) => Some(Self { admin, made: Mutex::default() }),
            Err(_) => {
                eprintln!(
                    "skipped: {SERVER} is unset, so there is no PostgreSQL (scripts/postgres starts one)"
                );
                None
            }
        }
    }

    /// An empty database.
    pub async fn database(&self) -> PostgresPlace {
        PostgresPlace::parse(&self.database_url().await, None).unwrap()
    }

    /// The address of an empty database.
    pub async fn database_url(&self) -> String {
        let name = format!("t_{}", uuid::Uuid::new_v4().simple());
        self.admin(format!("CREATE DATABASE {name}")).await;
        self.made.lock().unwrap().push(name.clone());
        let (server, _) = self.admin.rsplit_once('/').unwrap();
        format!("{server}/{name}")
    }

    /// Runs a statement as the administrator.
    pub async fn admin(&self, sql: String) {
        let admin = PostgresPlace::parse(&self.admin, None).unwrap();
        let mut conn = admin.connect().await.unwrap();
        conn.execute(AssertSqlSafe(sql)).await.unwrap();
        conn.close().await.unwrap();
    }

    /// Removes what was made, so that a run of all tests does not fill the disk.
    pub async fn end(&self) {
        let made = std::mem::take(&mut *self.made.lock().unwrap());
        for name in made {
            self.admin(format!("DROP DATABASE {name} WITH (FORCE)")).await;
        }
    }
}
