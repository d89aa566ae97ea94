//! One statement with its values, for either database.

use futures::future::BoxFuture;
use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{Arguments as _, AssertSqlSafe, Database, Row as _, SqlSafeStr as _, SqlStr};

use super::Target;
use super::postgres::unreachable;

/// A statement with `$1`, `$2` and so on for its values.
#[derive(Clone, Copy, Debug)]
pub struct Sql {
    sqlite: &'static str,
    postgres: &'static str,
}

impl Sql {
    /// The same thing, where the two say it differently.
    pub const fn of_each(sqlite: &'static str, postgres: &'static str) -> Self {
        Self { sqlite, postgres }
    }
}

impl From<&'static str> for Sql {
    fn from(both: &'static str) -> Self {
        Self { sqlite: both, postgres: both }
    }
}

/// What is stored: whole numbers and text, or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Int(Option<i64>),
    Text(Option<String>),
}

macro_rules! values {
    ($($from:ty => |$it:ident| $value:expr;)*) => {
        $(impl From<$from> for Value {
            fn from($it: $from) -> Self { $value }
        })*
    };
}

values! {
    i64 => |it| Self::Int(Some(it));
    i32 => |it| Self::Int(Some(it.into()));
    u32 => |it| Self::Int(Some(it.into()));
    u8 => |it| Self::Int(Some(it.into()));
    Option<i64> => |it| Self::Int(it);
    String => |it| Self::Text(Some(it));
    &String => |it| Self::Text(Some(it.clone()));
    &str => |it| Self::Text(Some(it.to_owned()));
    Option<String> => |it| Self::Text(it);
    &Option<String> => |it| Self::Text(it.clone());
    Option<&str> => |it| Self::Text(it.map(str::to_owned));
}

/// Begins a statement; its values are bound in order.
pub fn query(sql: impl Into<Sql>) -> Query {
    let sql = sql.into();
    Query { text: Text::Fixed(sql), values: Vec::new() }
}

pub struct Query {
    text: Text,
    values: Vec<Value>,
}

enum Text {
    Fixed(Sql),
    /// Pieces around the values.
    Built(Vec<String>),
}

/// A statement as one database takes it.
trait Dialect: Database {
    fn text(text: Text) -> SqlStr;
    fn arguments(values: Vec<Value>) -> Result<Self::Arguments, sqlx::Error>;
}

impl Dialect for Sqlite {
    fn text(text: Text) -> SqlStr {
        match text {
            Text::Fixed(sql) => sql.sqlite.into_sql_str(),
            // Without numbers: SQLite looks a numbered one up among all others, which takes long for thousands.
            Text::Built(pieces) => AssertSqlSafe(pieces.join("?")).into_sql_str(),
        }
    }

    fn arguments(values: Vec<Value>) -> Result<SqliteArguments, sqlx::Error> {
        let mut arguments = SqliteArguments::default();
        for value in values {
            match value {
                Value::Int(int) => arguments.add(int),
                Value::Text(text) => arguments.add(text),
            }
            .map_err(sqlx::Error::Encode)?;
        }
        Ok(arguments)
    }
}

impl Dialect for Postgres {
    fn text(text: Text) -> SqlStr {
        match text {
            Text::Fixed(sql) => sql.postgres.into_sql_str(),
            Text::Built(pieces) => {
                let mut sql = String::new();
                for (at, piece) in pieces.iter().enumerate() {
                    if at > 0 {
                        sql.push_str(&format!("${at}"));
                    }
                    sql.push_str(piece);
                }
                AssertSqlSafe(sql).into_sql_str()
            }
        }
    }

    fn arguments(values: Vec<Value>) -> Result<PgArguments, sqlx::Error> {
        let mut arguments = PgArguments::default();
        for value in values {
            match value {
                Value::Int(int) => arguments.add(int),
                Value::Text(text) => arguments.add(text.map(storable)),
            }
            .map_err(sqlx::Error::Encode)?;
        }
        Ok(arguments)
    }
}

/// PostgreSQL's text holds every character but NUL. Where one comes in (the values of a failed row, an error's
/// words), losing it is better than losing the row; a name with one is not found again, which refuses it.
fn storable(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// Runs the statement by the first expression on SQLite, by the second one on PostgreSQL.
macro_rules! on {
    ($query:expr, $target:expr, |$statement:ident, $executor:ident| $sqlite:expr, $postgres:expr) => {{
        let Query { text, values } = $query;
        let target: Target<'_> = $target.into();
        // Boxed: callers hold many of these one after the other, and would grow by each.
        Box::pin(async move {
            match target {
                Target::SqlitePool($executor) => {
                    let $statement = sqlx::query_with(Sqlite::text(text), Sqlite::arguments(values)?);
                    $sqlite
                }
                Target::Sqlite($executor) => {
                    let $statement = sqlx::query_with(Sqlite::text(text), Sqlite::arguments(values)?);
                    $sqlite
                }
                Target::PostgresPool(pool) => {
                    let mut connection = pool.acquire().await.map_err(unreachable)?;
                    let $executor = &mut *connection;
                    let $statement = sqlx::query_with(Postgres::text(text), Postgres::arguments(values)?);
                    $postgres
                }
                Target::Postgres($executor) => {
                    let $statement = sqlx::query_with(Postgres::text(text), Postgres::arguments(values)?);
                    $postgres
                }
            }
        })
    }};
}

impl Query {
    #[must_use]
    pub fn bind(mut self, value: impl Into<Value>) -> Self {
        self.values.push(value.into());
        self
    }

    /// Rows that were changed.
    pub fn execute<'c>(self, on: impl Into<Target<'c>>) -> BoxFuture<'c, Result<u64, sqlx::Error>> {
        on!(
            self,
            on,
            |statement, executor| Ok(statement.execute(executor).await?.rows_affected()),
            Ok(statement.execute(executor).await?.rows_affected())
        )
    }

    pub fn fetch_all<'c>(self, on: impl Into<Target<'c>>) -> BoxFuture<'c, Result<Vec<Row>, sqlx::Error>> {
        on!(
            self,
            on,
            |statement, executor| Ok(statement
                .fetch_all(executor)
                .await?
                .into_iter()
                .map(Row::Sqlite)
                .collect()),
            Ok(statement.fetch_all(executor).await?.into_iter().map(Row::Postgres).collect())
        )
    }

    pub fn fetch_optional<'c>(
        self,
        on: impl Into<Target<'c>>,
    ) -> BoxFuture<'c, Result<Option<Row>, sqlx::Error>> {
        on!(
            self,
            on,
            |statement, executor| Ok(statement.fetch_optional(executor).await?.map(Row::Sqlite)),
            Ok(statement.fetch_optional(executor).await?.map(Row::Postgres))
        )
    }

    pub async fn fetch_one<'c>(self, on: impl Into<Target<'c>>) -> Result<Row, sqlx::Error> {
        self.fetch_optional(on).await?.ok_or(sqlx::Error::RowNotFound)
    }

    /// The first column of every row.
    pub async fn scalars<'c, T: Column>(self, on: impl Into<Target<'c>>) -> Result<Vec<T>, sqlx::Error> {
        self.fetch_all(on).await?.iter().map(Row::first).collect()
    }

    /// The first column of the row that there is.
    pub async fn scalar<'c, T: Column>(self, on: impl Into<Target<'c>>) -> Result<T, sqlx::Error> {
        self.fetch_one(on).await?.first()
    }

    /// The first column of the row, if there is one.
    pub async fn optional_scalar<'c, T: Column>(
        self,
        on: impl Into<Target<'c>>,
    ) -> Result<Option<T>, sqlx::Error> {
        self.fetch_optional(on).await?.as_ref().map(Row::first).transpose()
    }
}

/// A type that both databases read: `i64`, `bool`, `String`, and options of them.
pub trait Column:
    for<'r> sqlx::Decode<'r, Sqlite>
    + sqlx::Type<Sqlite>
    + for<'r> sqlx::Decode<'r, Postgres>
    + sqlx::Type<Postgres>
{
}

impl<T> Column for T where
    T: for<'r> sqlx::Decode<'r, Sqlite>
        + sqlx::Type<Sqlite>
        + for<'r> sqlx::Decode<'r, Postgres>
        + sqlx::Type<Postgres>
{
}

pub enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

impl Row {
    pub fn try_get<T: Column>(&self, column: &str) -> Result<T, sqlx::Error> {
        match self {
            Self::Sqlite(row) => row.try_get(column),
            Self::Postgres(row) => row.try_get(column),
        }
    }

    pub fn first<T: Column>(&self) -> Result<T, sqlx::Error> {
        match self {
            Self::Sqlite(row) => row.try_get(0),
            Self::Postgres(row) => row.try_get(0),
        }
    }
}

impl Query {
    /// `pieces` stand around the values: there is one more of them.
    pub(super) fn built(pieces: Vec<String>, values: Vec<Value>) -> Self {
        Self { text: Text::Built(pieces), values }
    }
}

#[cfg(test)]
mod tests {
    use super::super::QueryBuilder;
    use super::*;

    fn in_list() -> QueryBuilder {
        let mut query = QueryBuilder::new("SELECT * FROM t WHERE a = ");
        query.push_bind("x").push(" AND b IN (");
        query.separated(", ").push_bind(1_i64).push_bind(2_i64);
        query.push(")");
        query
    }

    #[test]
    fn each_database_gets_its_own_marks_for_values() {
        let text = |query: QueryBuilder| query.build().text;
        assert_eq!(Sqlite::text(text(in_list())).as_str(), "SELECT * FROM t WHERE a = ? AND b IN (?, ?)");
        assert_eq!(
            Postgres::text(text(in_list())).as_str(),
            "SELECT * FROM t WHERE a = $1 AND b IN ($2, $3)"
        );
        let mut query = QueryBuilder::new("INSERT INTO t (a, b) ");
        query.push_values([(1_i64, "x"), (2, "y")], |mut row, (a, b)| {
            row.push_bind(a).push_bind(b);
        });
        let query = query.build();
        assert_eq!(query.values.len(), 4);
        assert_eq!(Postgres::text(query.text).as_str(), "INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4)");
    }

    #[test]
    fn a_letter_that_postgresql_does_not_take_does_not_stop_a_row() {
        assert_eq!(storable("a\0b".to_owned()), "a\u{fffd}b");
        assert_eq!(storable("ü".to_owned()), "ü");
    }
}
