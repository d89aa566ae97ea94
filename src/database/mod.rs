//! SQLite and PostgreSQL behind one set of words, for the ledger and for the SQL catalog.
//!
//! A statement is written once: `$1` for a value, integers of 64 bits and text for data, and only what both
//! databases know the same way (upserts, partial indices, `RETURNING`, common table expressions). What they
//! cannot say the same way stands side by side as [`Sql::of_each`]. Absent on purpose: any SQL, and any
//! database type outside this module.

mod builder;
mod postgres;
mod query;
#[cfg(test)]
pub mod testing;

pub use builder::QueryBuilder;
pub use postgres::{PostgresPlace, Trouble, WrongAddress, plain};
pub use query::{Column, Row, Sql, Value, query};

use futures::future::BoxFuture;
use sqlx::postgres::{PgConnection, PgPool, Postgres};
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};

/// Connections of one process to one database.
#[derive(Clone, Debug)]
pub enum Pool {
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

impl Pool {
    pub async fn close(&self) {
        match self {
            Self::Sqlite(pool) => pool.close().await,
            Self::Postgres(pool) => pool.close().await,
        }
    }

    /// Begins with the statement of its database.
    pub fn begin_with(
        &self,
        on_sqlite: &'static str,
        on_postgres: &'static str,
    ) -> BoxFuture<'_, Result<Transaction, sqlx::Error>> {
        Box::pin(async move {
            Ok(match self {
                Self::Sqlite(pool) => Transaction::Sqlite(pool.begin_with(on_sqlite).await?),
                Self::Postgres(pool) => {
                    Transaction::Postgres(pool.begin_with(on_postgres).await.map_err(postgres::unreachable)?)
                }
            })
        })
    }
}

/// Rolled back unless it is committed.
#[derive(Debug)]
pub enum Transaction {
    Sqlite(sqlx::Transaction<'static, Sqlite>),
    Postgres(sqlx::Transaction<'static, Postgres>),
}

impl Transaction {
    /// Statements of PostgreSQL alone that go in one message and give nothing. Not behind the BEGIN: when one of
    /// them failed there, nobody would roll back.
    pub async fn first_on_postgres(&mut self, statements: &'static str) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(_) => {}
            Self::Postgres(tx) => {
                sqlx::raw_sql(statements).execute(&mut **tx).await?;
            }
        }
        Ok(())
    }

    pub async fn commit(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(tx) => tx.commit().await,
            Self::Postgres(tx) => tx.commit().await,
        }
    }

    pub async fn rollback(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Sqlite(tx) => tx.rollback().await,
            Self::Postgres(tx) => tx.rollback().await,
        }
    }
}

/// Where a statement runs.
pub enum Target<'c> {
    SqlitePool(&'c SqlitePool),
    PostgresPool(&'c PgPool),
    Sqlite(&'c mut SqliteConnection),
    Postgres(&'c mut PgConnection),
}

impl<'c> From<&'c Pool> for Target<'c> {
    fn from(pool: &'c Pool) -> Self {
        match pool {
            Pool::Sqlite(pool) => Self::SqlitePool(pool),
            Pool::Postgres(pool) => Self::PostgresPool(pool),
        }
    }
}

impl<'c> From<&'c mut Transaction> for Target<'c> {
    fn from(tx: &'c mut Transaction) -> Self {
        match tx {
            Transaction::Sqlite(tx) => Self::Sqlite(tx),
            Transaction::Postgres(tx) => Self::Postgres(tx),
        }
    }
}

impl<'c> From<&'c mut SqliteConnection> for Target<'c> {
    fn from(conn: &'c mut SqliteConnection) -> Self {
        Self::Sqlite(conn)
    }
}

impl<'c> From<&'c mut PgConnection> for Target<'c> {
    fn from(conn: &'c mut PgConnection) -> Self {
        Self::Postgres(conn)
    }
}
