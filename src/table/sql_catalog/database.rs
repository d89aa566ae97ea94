//! The catalog's two tables in SQLite, on the layout that Java's JdbcCatalog and PyIceberg's SqlCatalog
//! share. All of the catalog's SQL is here.
//!
//! The file may belong to another engine, so nothing of it is changed beyond the rows: no journal mode,
//! no migration. Both layouts are served: with the column `iceberg_type` (v1) and without (v0).

use std::path::{Path, PathBuf};
use std::time::Duration;

use mergeberg_kernel::ids::TableName;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};

use super::super::catalog::CatalogError;

/// How long SQLite itself waits for another writer, a time.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a write that found the file locked is tried in all.
const BUSY_ATTEMPTS: u32 = 3;
/// Connections to the file: writes are serial anyway, reads are single look-ups.
const MAX_CONNECTIONS: u32 = 4;

/// Primary result codes of SQLite (sqlite.org/rescode.html).
const SQLITE_BUSY: i64 = 5;
const SQLITE_LOCKED: i64 = 6;
const SQLITE_READONLY: i64 = 8;
const SQLITE_CORRUPT: i64 = 11;
const SQLITE_NOTADB: i64 = 26;
/// Extended code: the file was moved or replaced under an open connection.
const SQLITE_READONLY_DBMOVED: i64 = 1032;

/// Which of the two layouts the file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    V0,
    V1,
}

/// One statement in both layouts.
struct Statement {
    v0: &'static str,
    v1: &'static str,
}

impl Statement {
    fn on(&self, layout: Layout) -> &'static str {
        match layout {
            Layout::V0 => self.v0,
            Layout::V1 => self.v1,
        }
    }
}

/// Adds the filter that leaves out views where the layout knows them.
macro_rules! tables_only {
    ($sql:literal) => {
        Statement { v0: $sql, v1: concat!($sql, " AND (iceberg_type = 'TABLE' OR iceberg_type IS NULL)") }
    };
}

const POINTER: Statement = tables_only!(
    "SELECT metadata_location FROM iceberg_tables \
     WHERE catalog_name = ? AND table_namespace = ? AND table_name = ?"
);
const LIST: Statement =
    tables_only!("SELECT table_namespace, table_name FROM iceberg_tables WHERE catalog_name = ?");
const SWAP: Statement = tables_only!(
    "UPDATE iceberg_tables SET metadata_location = ?, previous_metadata_location = ? \
     WHERE catalog_name = ? AND table_namespace = ? AND table_name = ? AND metadata_location = ?"
);
const DELETE: Statement = tables_only!(
    "DELETE FROM iceberg_tables WHERE catalog_name = ? AND table_namespace = ? AND table_name = ?"
);
const RENAME: Statement = tables_only!(
    "UPDATE iceberg_tables SET table_namespace = ?, table_name = ? \
     WHERE catalog_name = ? AND table_namespace = ? AND table_name = ?"
);
const INSERT: Statement = Statement {
    v0: "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name, metadata_location) \
         VALUES (?, ?, ?, ?)",
    v1: "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name, metadata_location, iceberg_type) \
         VALUES (?, ?, ?, ?, 'TABLE')",
};
const INSERT_NAMESPACE: &str = "INSERT OR IGNORE INTO iceberg_namespace_properties \
     (catalog_name, namespace, property_key, property_value) VALUES (?, ?, 'exists', 'true')";
const NAMESPACE_EXISTS: &str = "SELECT \
     EXISTS (SELECT 1 FROM iceberg_namespace_properties WHERE catalog_name = ?1 AND namespace = ?2) \
     OR EXISTS (SELECT 1 FROM iceberg_tables WHERE catalog_name = ?1 AND table_namespace = ?2)";

/// As PyIceberg creates them.
const CREATE_TABLES: [&str; 2] = [
    "CREATE TABLE IF NOT EXISTS iceberg_tables (
        catalog_name VARCHAR(255) NOT NULL,
        table_namespace VARCHAR(255) NOT NULL,
        table_name VARCHAR(255) NOT NULL,
        metadata_location VARCHAR(1000),
        previous_metadata_location VARCHAR(1000),
        iceberg_type VARCHAR(5),
        PRIMARY KEY (catalog_name, table_namespace, table_name)
    )",
    "CREATE TABLE IF NOT EXISTS iceberg_namespace_properties (
        catalog_name VARCHAR(255) NOT NULL,
        namespace VARCHAR(255) NOT NULL,
        property_key VARCHAR(255) NOT NULL,
        property_value VARCHAR(1000) NOT NULL,
        PRIMARY KEY (catalog_name, namespace, property_key)
    )",
];

/// What became of a conditional swap of a table's pointer.
#[derive(Debug)]
pub enum Swap {
    Done,
    /// The pointer is not where it was expected.
    Stale,
    /// Nothing was applied.
    NotApplied(CatalogError),
    /// The commit was sent and its answer was lost.
    Unknown(String),
}

/// An open catalog file.
#[derive(Debug)]
pub struct CatalogDatabase {
    catalog: String,
    path: PathBuf,
    pool: SqlitePool,
    layout: Layout,
}

impl CatalogDatabase {
    /// Opens an existing file that has the catalog's tables.
    pub async fn open(catalog: &str, url: &str) -> Result<Self, CatalogError> {
        let Address { path, read_only } = Address::parse(url);
        if !path.is_file() {
            // What a relative path of PyIceberg's becomes here.
            let at_root = path.parent() == Some(Path::new("/"));
            let hint = if at_root {
                " (sqlite:///x is an absolute path here: write the file as a path)"
            } else {
                ""
            };
            return Err(CatalogError::Unavailable(format!(
                "the catalog file {} does not exist; correct the catalog's uri in mergeberg.toml{hint}, or \
                 create the catalog with the engine that owns it",
                path.display()
            )));
        }
        let options = SqliteConnectOptions::new().filename(&path).read_only(read_only);
        Self::connect(catalog, path, options).await
    }

    /// Opens the file, creating it and the catalog's tables where they are missing.
    pub async fn create(catalog: &str, url: &str) -> Result<Self, CatalogError> {
        let Address { path, read_only: _ } = Address::parse(url);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| {
                CatalogError::ReadOnly(format!("the folder {} cannot be created: {e}", parent.display()))
            })?;
        }
        let options = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
        let pool = pool(options.clone());
        for statement in CREATE_TABLES {
            sqlx::query(statement).execute(&pool).await.map_err(|e| describe(&path, e))?;
        }
        pool.close().await;
        Self::connect(catalog, path, options).await
    }

    async fn connect(
        catalog: &str,
        path: PathBuf,
        options: SqliteConnectOptions,
    ) -> Result<Self, CatalogError> {
        let pool = pool(options);
        let columns: Vec<(String,)> = sqlx::query_as("SELECT name FROM pragma_table_info('iceberg_tables')")
            .fetch_all(&pool)
            .await
            .map_err(|e| describe(&path, e))?;
        if columns.is_empty() {
            return Err(CatalogError::Unavailable(format!(
                "the file {} has no table iceberg_tables, so it is not an Iceberg catalog; correct the \
                 catalog's uri",
                path.display()
            )));
        }
        let has_type = columns.iter().any(|(name,)| name == "iceberg_type");
        let layout = if has_type { Layout::V1 } else { Layout::V0 };
        Ok(Self { catalog: catalog.to_owned(), path, pool, layout })
    }

    pub fn catalog(&self) -> &str {
        &self.catalog
    }

    /// The metadata location of a table; `None` when there is no such table.
    pub async fn pointer(&self, table: &TableName) -> Result<Option<String>, CatalogError> {
        let row: Option<(Option<String>,)> = sqlx::query_as(POINTER.on(self.layout))
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .fetch_optional(&self.pool)
            .await
            .map_err(|e| describe(&self.path, e))?;
        match row {
            Some((Some(location),)) => Ok(Some(location)),
            Some((None,)) => Err(CatalogError::Unreadable {
                table: table.clone(),
                location: self.path.display().to_string(),
                message: "its catalog row has no metadata location".to_owned(),
            }),
            None => Ok(None),
        }
    }

    /// All tables, by name.
    pub async fn tables(&self) -> Result<Vec<TableName>, CatalogError> {
        let rows: Vec<(String, String)> = sqlx::query_as(LIST.on(self.layout))
            .bind(&self.catalog)
            .fetch_all(&self.pool)
            .await
            .map_err(|e| describe(&self.path, e))?;
        let mut tables: Vec<TableName> = rows
            .into_iter()
            .map(|(namespace, name)| TableName {
                namespace: namespace.split('.').map(str::to_owned).collect(),
                name,
            })
            .collect();
        tables.sort();
        Ok(tables)
    }

    /// Moves the pointer of `table` from `from` to `to`, if it is at `from`.
    pub async fn swap(&self, table: &TableName, from: &str, to: &str) -> Swap {
        let mut attempt = 1;
        loop {
            match self.try_swap(table, from, to).await {
                Err(error) if is_busy(&error) && attempt < BUSY_ATTEMPTS => attempt += 1,
                Err(error) => return Swap::NotApplied(describe(&self.path, error)),
                Ok(swap) => return swap,
            }
        }
    }

    /// One attempt. An error means that nothing was applied: dropping the transaction rolls it back.
    async fn try_swap(&self, table: &TableName, from: &str, to: &str) -> Result<Swap, sqlx::Error> {
        // IMMEDIATE takes the write lock first, so that a lock held by others shows before the update.
        let mut transaction = self.pool.begin_with("BEGIN IMMEDIATE").await?;
        let updated = sqlx::query(SWAP.on(self.layout))
            .bind(to)
            .bind(from)
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .bind(from)
            .execute(&mut *transaction)
            .await?;
        if updated.rows_affected() != 1 {
            transaction.rollback().await?;
            return Ok(Swap::Stale);
        }
        match transaction.commit().await {
            Ok(()) => Ok(Swap::Done),
            // Readers kept the file locked: the commit did not begin.
            Err(error) if is_busy(&error) => Err(error),
            Err(error) => {
                Ok(Swap::Unknown(format!("the commit in {} failed half-way: {error}", self.path.display())))
            }
        }
    }

    /// Adds a table's row; `false` when the name is taken.
    pub async fn insert(&self, table: &TableName, location: &str) -> Result<bool, CatalogError> {
        let inserted = sqlx::query(INSERT.on(self.layout))
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .bind(location)
            .execute(&self.pool)
            .await;
        self.unless_taken(inserted)
    }

    /// Renames a table's row; `false` when the new name is taken.
    pub async fn rename(&self, from: &TableName, to: &TableName) -> Result<bool, CatalogError> {
        let renamed = sqlx::query(RENAME.on(self.layout))
            .bind(to.namespace_text())
            .bind(&to.name)
            .bind(&self.catalog)
            .bind(from.namespace_text())
            .bind(&from.name)
            .execute(&self.pool)
            .await;
        if matches!(&renamed, Ok(done) if done.rows_affected() == 0) {
            return Err(CatalogError::NotFound(from.clone()));
        }
        self.unless_taken(renamed)
    }

    /// Removes a table's row. Its files stay.
    pub async fn delete(&self, table: &TableName) -> Result<(), CatalogError> {
        let deleted = sqlx::query(DELETE.on(self.layout))
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .execute(&self.pool)
            .await
            .map_err(|e| describe(&self.path, e))?;
        if deleted.rows_affected() == 0 {
            return Err(CatalogError::NotFound(table.clone()));
        }
        Ok(())
    }

    pub async fn insert_namespace(&self, namespace: &str) -> Result<(), CatalogError> {
        sqlx::query(INSERT_NAMESPACE)
            .bind(&self.catalog)
            .bind(namespace)
            .execute(&self.pool)
            .await
            .map_err(|e| describe(&self.path, e))?;
        Ok(())
    }

    pub async fn namespace_exists(&self, namespace: &str) -> Result<bool, CatalogError> {
        let (exists,): (bool,) = sqlx::query_as(NAMESPACE_EXISTS)
            .bind(&self.catalog)
            .bind(namespace)
            .fetch_one(&self.pool)
            .await
            .map_err(|e| describe(&self.path, e))?;
        Ok(exists)
    }

    fn unless_taken(
        &self,
        result: Result<sqlx::sqlite::SqliteQueryResult, sqlx::Error>,
    ) -> Result<bool, CatalogError> {
        match result {
            Ok(_) => Ok(true),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
            Err(error) => Err(describe(&self.path, error)),
        }
    }
}

fn pool(options: SqliteConnectOptions) -> SqlitePool {
    SqlitePoolOptions::new()
        .max_connections(MAX_CONNECTIONS)
        // A local file has no connection to lose.
        .test_before_acquire(false)
        .connect_lazy_with(options.busy_timeout(BUSY_TIMEOUT))
}

/// The file behind a catalog's uri.
#[derive(Debug, PartialEq, Eq)]
struct Address {
    path: PathBuf,
    read_only: bool,
}

impl Address {
    /// A plain path, `sqlite:path`, `sqlite:///absolute`, or SQLAlchemy's `sqlite:////absolute` and
    /// `sqlite+pysqlite://` as PyIceberg takes them. `?mode=ro` opens read-only.
    fn parse(url: &str) -> Self {
        let (address, query) = match url.split_once('?') {
            Some((address, query)) => (address, query),
            None => (url, ""),
        };
        let rest = match address.split_once(':') {
            Some((scheme, rest)) if scheme == "sqlite" || scheme.starts_with("sqlite+") => {
                rest.strip_prefix("//").unwrap_or(rest)
            }
            Some(("file", rest)) => rest.strip_prefix("//").unwrap_or(rest),
            Some(_) | None => address,
        };
        let path = match rest.strip_prefix("//") {
            Some(absolute) => format!("/{absolute}"),
            None => rest.to_owned(),
        };
        Self { path: PathBuf::from(path), read_only: query.split('&').any(|pair| pair == "mode=ro") }
    }
}

fn extended_code(error: &sqlx::Error) -> Option<i64> {
    match error {
        sqlx::Error::Database(error) => error.code()?.parse().ok(),
        _ => None,
    }
}

fn is_busy(error: &sqlx::Error) -> bool {
    matches!(extended_code(error).map(|code| code & 0xff), Some(SQLITE_BUSY | SQLITE_LOCKED))
}

/// A database error in the catalog's words; the file is always named.
fn describe(path: &Path, error: sqlx::Error) -> CatalogError {
    let file = path.display();
    let Some(code) = extended_code(&error) else {
        return CatalogError::Unavailable(format!("{file}: {error}"));
    };
    if code == SQLITE_READONLY_DBMOVED {
        return CatalogError::Unavailable(format!(
            "the catalog file {file} was moved or replaced while it was open; restart to open the new one"
        ));
    }
    match code & 0xff {
        SQLITE_READONLY => CatalogError::ReadOnly(format!("the catalog file {file}: {error}")),
        SQLITE_CORRUPT | SQLITE_NOTADB => CatalogError::Unavailable(format!(
            "the catalog file {file} is damaged or no SQLite database ({error}); restore it from a backup"
        )),
        SQLITE_BUSY | SQLITE_LOCKED => CatalogError::Unavailable(format!(
            "another process keeps the catalog file {file} locked; find the one with an open transaction"
        )),
        _ => CatalogError::Unavailable(format!("the catalog file {file}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_the_address_gives_the_file() {
        for (url, path) in [
            ("/w/catalog.db", "/w/catalog.db"),
            ("w/catalog.db", "w/catalog.db"),
            ("sqlite:/w/catalog.db", "/w/catalog.db"),
            ("sqlite:w/catalog.db", "w/catalog.db"),
            ("sqlite://w/catalog.db", "w/catalog.db"),
            ("sqlite:///w/catalog.db", "/w/catalog.db"),
            ("sqlite:////w/catalog.db", "/w/catalog.db"),
            ("sqlite+pysqlite:////w/catalog.db", "/w/catalog.db"),
            ("file:///w/catalog.db", "/w/catalog.db"),
        ] {
            assert_eq!(Address::parse(url), Address { path: PathBuf::from(path), read_only: false }, "{url}");
        }
        assert!(Address::parse("sqlite:/w/catalog.db?mode=ro").read_only);
    }
}
