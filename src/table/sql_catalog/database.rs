//! The catalog's two tables in SQLite or PostgreSQL, on the layout that Java's JdbcCatalog and PyIceberg's
//! SqlCatalog share. All of the catalog's SQL is here.
//!
//! The database may belong to another engine, so nothing of it is changed beyond the rows: no journal mode,
//! no migration. Both layouts are served: with the column `iceberg_type` (v1) and without (v0).

use std::path::Path;
use std::time::Duration;

use mergeberg_kernel::ids::TableName;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool, SqlitePoolOptions};

use super::super::catalog::CatalogError;
use super::place::DatabasePlace;
use crate::database::{Pool, Sql, Target, Transaction, query};

/// How long SQLite itself waits for another writer, a time. PostgreSQL waits as long for a lock.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a write that found the database locked is tried in all.
const BUSY_ATTEMPTS: u32 = 3;
/// Connections to the database: writes are short, reads are single look-ups.
const MAX_CONNECTIONS: u32 = 4;

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

pub mod set_swap;

const POINTER: Statement = tables_only!(
    "SELECT metadata_location FROM iceberg_tables \
     WHERE catalog_name = $1 AND table_namespace = $2 AND table_name = $3"
);
const LIST: Statement =
    tables_only!("SELECT table_namespace, table_name FROM iceberg_tables WHERE catalog_name = $1");
const SWAP: Statement = tables_only!(
    "UPDATE iceberg_tables SET metadata_location = $1, previous_metadata_location = $2 \
     WHERE catalog_name = $3 AND table_namespace = $4 AND table_name = $5 AND metadata_location = $2"
);
const DELETE: Statement = tables_only!(
    "DELETE FROM iceberg_tables WHERE catalog_name = $1 AND table_namespace = $2 AND table_name = $3"
);
const RENAME: Statement = tables_only!(
    "UPDATE iceberg_tables SET table_namespace = $1, table_name = $2 \
     WHERE catalog_name = $3 AND table_namespace = $4 AND table_name = $5"
);
const INSERT: Statement = Statement {
    v0: "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name, metadata_location) \
         VALUES ($1, $2, $3, $4)",
    v1: "INSERT INTO iceberg_tables (catalog_name, table_namespace, table_name, metadata_location, iceberg_type) \
         VALUES ($1, $2, $3, $4, 'TABLE')",
};
const INSERT_NAMESPACE: &str = "INSERT INTO iceberg_namespace_properties \
     (catalog_name, namespace, property_key, property_value) VALUES ($1, $2, 'exists', 'true') \
     ON CONFLICT DO NOTHING";
const NAMESPACE_EXISTS: &str = "SELECT \
     EXISTS (SELECT 1 FROM iceberg_namespace_properties WHERE catalog_name = $1 AND namespace = $2) \
     OR EXISTS (SELECT 1 FROM iceberg_tables WHERE catalog_name = $1 AND table_namespace = $2)";

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

/// Columns of the catalog's table; none: there is no such table.
const COLUMNS: Sql = Sql::of_each(
    "SELECT name FROM pragma_table_info('iceberg_tables')",
    "SELECT attname::TEXT FROM pg_attribute \
     WHERE attrelid = to_regclass('iceberg_tables') AND attnum > 0 AND NOT attisdropped",
);

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

/// An open catalog.
#[derive(Debug)]
pub struct CatalogDatabase {
    catalog: String,
    place: DatabasePlace,
    pool: Pool,
    layout: Layout,
}

impl CatalogDatabase {
    /// Opens an existing database that has the catalog's tables.
    pub async fn open(catalog: &str, place: DatabasePlace) -> Result<Self, CatalogError> {
        match &place {
            DatabasePlace::File { path, read_only } => {
                require_file(path)?;
                let options = SqliteConnectOptions::new().filename(path).read_only(*read_only);
                let pool = Pool::Sqlite(file_pool(options));
                Self::of_pool(catalog, place, pool).await
            }
            DatabasePlace::Postgres(server) => {
                // Not by a pool, which would try again and again before it told what is wrong.
                let mut conn = server.connect().await.map_err(|e| place.unread(e))?;
                let layout = layout(&mut conn, &place).await?;
                let pool = Pool::Postgres(server.pool(MAX_CONNECTIONS));
                Ok(Self { catalog: catalog.to_owned(), place, pool, layout })
            }
        }
    }

    /// Opens the catalog, creating file and tables where they are missing. A database on a server has to exist.
    pub async fn create(catalog: &str, place: DatabasePlace) -> Result<Self, CatalogError> {
        let pool = match &place {
            DatabasePlace::File { path, read_only: _ } => {
                if let Some(parent) = path.parent() {
                    std::fs::create_dir_all(parent).map_err(|e| {
                        let folder = parent.display();
                        CatalogError::ReadOnly(format!("the folder {folder} cannot be created: {e}"))
                    })?;
                }
                let options = SqliteConnectOptions::new().filename(path).create_if_missing(true);
                Pool::Sqlite(file_pool(options))
            }
            DatabasePlace::Postgres(server) => Pool::Postgres(server.pool(MAX_CONNECTIONS)),
        };
        for statement in CREATE_TABLES {
            query(statement).execute(&pool).await.map_err(|e| place.unwritten(e))?;
        }
        Self::of_pool(catalog, place, pool).await
    }

    async fn of_pool(catalog: &str, place: DatabasePlace, pool: Pool) -> Result<Self, CatalogError> {
        let layout = layout(&pool, &place).await?;
        Ok(Self { catalog: catalog.to_owned(), place, pool, layout })
    }

    pub fn catalog(&self) -> &str {
        &self.catalog
    }

    /// The metadata location of a table; `None` when there is no such table.
    pub async fn pointer(&self, table: &TableName) -> Result<Option<String>, CatalogError> {
        let row: Option<Option<String>> = query(POINTER.on(self.layout))
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .optional_scalar(&self.pool)
            .await
            .map_err(|e| self.place.unread(e))?;
        match row {
            Some(Some(location)) => Ok(Some(location)),
            Some(None) => Err(CatalogError::Unreadable {
                table: table.clone(),
                location: self.place.to_string(),
                message: "its catalog row has no metadata location".to_owned(),
            }),
            None => Ok(None),
        }
    }

    /// All tables, by name.
    pub async fn tables(&self) -> Result<Vec<TableName>, CatalogError> {
        let unread = |e| self.place.unread(e);
        let rows =
            query(LIST.on(self.layout)).bind(&self.catalog).fetch_all(&self.pool).await.map_err(unread)?;
        let mut tables = Vec::with_capacity(rows.len());
        for row in &rows {
            let namespace: String = row.try_get("table_namespace").map_err(unread)?;
            tables.push(TableName {
                namespace: namespace.split('.').map(str::to_owned).collect(),
                name: row.try_get("table_name").map_err(unread)?,
            });
        }
        tables.sort();
        Ok(tables)
    }

    /// Moves the pointer of `table` from `from` to `to`, if it is at `from`.
    pub async fn swap(&self, table: &TableName, from: &str, to: &str) -> Swap {
        let mut attempt = 1;
        loop {
            match self.try_swap(table, from, to).await {
                Err(error) if self.place.is_busy(&error) && attempt < BUSY_ATTEMPTS => attempt += 1,
                Err(error) => return Swap::NotApplied(self.place.unwritten(error)),
                Ok(swap) => return swap,
            }
        }
    }

    /// One attempt. An error means that nothing was applied: dropping the transaction rolls it back, and so does
    /// a server that loses the connection before it was asked to commit.
    async fn try_swap(&self, table: &TableName, from: &str, to: &str) -> Result<Swap, sqlx::Error> {
        let mut transaction = self.begin().await?;
        let updated = query(SWAP.on(self.layout))
            .bind(to)
            .bind(from)
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .execute(&mut transaction)
            .await?;
        if updated != 1 {
            transaction.rollback().await?;
            return Ok(Swap::Stale);
        }
        match transaction.commit().await {
            Ok(()) => Ok(Swap::Done),
            Err(error) if self.place.is_undone(&error) => Err(error),
            Err(error) => Ok(Swap::Unknown(format!("the commit in {} failed half-way: {error}", self.place))),
        }
    }

    /// On SQLite IMMEDIATE takes the write lock first, so that a lock held by others shows before the update. On
    /// PostgreSQL an update waits for another one of its row, and then looks at the row as that one left it.
    async fn begin(&self) -> Result<Transaction, sqlx::Error> {
        self.pool.begin_with("BEGIN IMMEDIATE", "BEGIN ISOLATION LEVEL READ COMMITTED").await
    }

    /// Adds a table's row; `false` when the name is taken.
    pub async fn insert(&self, table: &TableName, location: &str) -> Result<bool, CatalogError> {
        let inserted = query(INSERT.on(self.layout))
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
        let renamed = query(RENAME.on(self.layout))
            .bind(to.namespace_text())
            .bind(&to.name)
            .bind(&self.catalog)
            .bind(from.namespace_text())
            .bind(&from.name)
            .execute(&self.pool)
            .await;
        if matches!(renamed, Ok(0)) {
            return Err(CatalogError::NotFound(from.clone()));
        }
        self.unless_taken(renamed)
    }

    /// Removes a table's row. Its files stay.
    pub async fn delete(&self, table: &TableName) -> Result<(), CatalogError> {
        let deleted = query(DELETE.on(self.layout))
            .bind(&self.catalog)
            .bind(table.namespace_text())
            .bind(&table.name)
            .execute(&self.pool)
            .await
            .map_err(|e| self.place.unwritten(e))?;
        if deleted == 0 {
            return Err(CatalogError::NotFound(table.clone()));
        }
        Ok(())
    }

    pub async fn insert_namespace(&self, namespace: &str) -> Result<(), CatalogError> {
        query(INSERT_NAMESPACE)
            .bind(&self.catalog)
            .bind(namespace)
            .execute(&self.pool)
            .await
            .map_err(|e| self.place.unwritten(e))?;
        Ok(())
    }

    pub async fn namespace_exists(&self, namespace: &str) -> Result<bool, CatalogError> {
        query(NAMESPACE_EXISTS)
            .bind(&self.catalog)
            .bind(namespace)
            .scalar(&self.pool)
            .await
            .map_err(|e| self.place.unread(e))
    }

    fn unless_taken(&self, result: Result<u64, sqlx::Error>) -> Result<bool, CatalogError> {
        match result {
            Ok(_) => Ok(true),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(false),
            Err(error) => Err(self.place.unwritten(error)),
        }
    }
}

fn require_file(path: &Path) -> Result<(), CatalogError> {
    if path.is_file() {
        return Ok(());
    }
    // What a relative path of PyIceberg's becomes here.
    let at_root = path.parent() == Some(Path::new("/"));
    let hint = if at_root { " (sqlite:///x is an absolute path here: write the file as a path)" } else { "" };
    Err(CatalogError::Unavailable(format!(
        "the catalog file {} does not exist; correct the catalog's uri in mergeberg.toml{hint}, or create the \
         catalog with the engine that owns it",
        path.display()
    )))
}

async fn layout<'c>(on: impl Into<Target<'c>>, place: &DatabasePlace) -> Result<Layout, CatalogError> {
    let columns: Vec<String> = query(COLUMNS).scalars(on).await.map_err(|e| place.unread(e))?;
    if columns.is_empty() {
        let kind = match place {
            DatabasePlace::File { .. } => "file",
            DatabasePlace::Postgres(_) => "database",
        };
        return Err(CatalogError::Unavailable(format!(
            "the {kind} {place} has no table iceberg_tables, so it is not an Iceberg catalog; correct the \
             catalog's uri"
        )));
    }
    let has_type = columns.iter().any(|name| name == "iceberg_type");
    Ok(if has_type { Layout::V1 } else { Layout::V0 })
}

fn file_pool(options: SqliteConnectOptions) -> SqlitePool {
    SqlitePoolOptions::new()
        .max_connections(MAX_CONNECTIONS)
        // A local file has no connection to lose.
        .test_before_acquire(false)
        .connect_lazy_with(options.busy_timeout(BUSY_TIMEOUT))
}
