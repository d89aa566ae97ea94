//! Where a PostgreSQL server is, who we are to it, and what its errors mean.
//!
//! Passwords never leave this module but towards the server: what is shown is made without them.

use std::fmt;
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions as _, Connection as _};

use crate::secret::Secret;

/// Oldest release that knows `idle_session_timeout`, which ends the session of a leader that hangs.
const OLDEST_SERVER: u32 = 140_000;
/// For connecting and logging in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a caller waits for one of this process's own connections.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(15);
/// A connection that was used so lately is not asked whether it still is one. When it is none, the statement fails as
/// it would have a moment later.
const SURELY_THERE: Duration = Duration::from_secs(5);
/// What a session asks of the server. A lock is waited for this long, a time; whoever holds one and says nothing
/// is ended; a client whose machine is gone is noticed; and a commit that was answered is on disk, whatever the
/// server's default.
const SESSION: [(&str, &str); 6] = [
    ("lock_timeout", "5s"),
    ("idle_in_transaction_session_timeout", "60s"),
    ("tcp_keepalives_idle", "30"),
    ("tcp_keepalives_interval", "10"),
    ("tcp_keepalives_count", "3"),
    ("synchronous_commit", "on"),
];

/// Parameters of an address that are followed; any other would be ignored without a word.
const PARAMETERS: [&str; 12] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "user",
];

/// A database on a server.
#[derive(Clone)]
pub struct PostgresPlace {
    options: Box<PgConnectOptions>,
    /// What makes two places the same.
    address: Secret,
    password: Option<Secret>,
}

/// An address that cannot be used, without what it says of a password.
#[derive(Debug, PartialEq, Eq)]
pub struct WrongAddress {
    pub message: String,
    pub next: String,
}

impl PostgresPlace {
    /// Is this the address of a PostgreSQL server, right or wrong? As `postgresql://` or `postgres://`, with a
    /// driver's name as PyIceberg writes it (`postgresql+psycopg2://`), or as Java does (`jdbc:postgresql://`).
    pub fn is_address(text: &str) -> bool {
        split(text).is_some()
    }

    /// Without a password here, that of the address counts; without that `PGPASSWORD` and `~/.pgpass`.
    pub fn parse(text: &str, password: Option<Secret>) -> Result<Self, WrongAddress> {
        let wrong = |message: String, next: &str| WrongAddress { message, next: next.to_owned() };
        let Some(rest) = split(text) else {
            let message = "it is no address of a PostgreSQL server".to_owned();
            return Err(wrong(message, "write postgresql://USER@HOST:5432/DATABASE"));
        };
        let query = rest.split_once('?').map_or("", |(_, query)| query);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let name = pair.split('=').next().unwrap_or_default();
            if !PARAMETERS.contains(&name) {
                let known = PARAMETERS.join(", ");
                let next = format!("remove it; known: {known}. TLS is asked for by sslmode=verify-full");
                return Err(wrong(format!("its parameter '{name}' is not known"), &next));
            }
        }
        let address = format!("postgresql://{rest}");
        let options = PgConnectOptions::from_str(&address).map_err(|e| {
            wrong(
                format!("it cannot be read: {}", plain(&e)),
                "write postgresql://USER@HOST:5432/DATABASE, with %XX for signs such as @ / # in user or \
                 password; the password is better kept out of it",
            )
        })?;
        let options = options.options(SESSION);
        let options = match options.get_application_name() {
            Some(_) => options,
            None => options.application_name("mergeberg"),
        };
        let options = match &password {
            Some(password) => options.password(password.reveal()),
            None => options,
        };
        Ok(Self { options: Box::new(options), address: Secret::new(address), password })
    }

    /// One connection of its own.
    pub async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let answer = tokio::time::timeout(CONNECT_TIMEOUT, self.options.connect()).await;
        let conn = answer.unwrap_or_else(|_| {
            let silent = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs());
            Err(sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, silent)))
        })?;
        match conn.server_version_num() {
            Some(version) if version < OLDEST_SERVER => Err(sqlx::Error::Protocol(format!(
                "the server is PostgreSQL {}, and {} or later is needed",
                version / 10_000,
                OLDEST_SERVER / 10_000
            ))),
            Some(_) | None => Ok(conn),
        }
    }

    /// At most `size` connections, made when they are needed.
    pub fn pool(&self, size: u32) -> PgPool {
        pool(size, (*self.options).clone())
    }

    /// As [`Self::pool`], of connections on which a write by mistake fails.
    pub fn reading_pool(&self, size: u32) -> PgPool {
        pool(size, (*self.options).clone().options([("default_transaction_read_only", "on")]))
    }
}

fn pool(size: u32, options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new()
        .max_connections(size)
        .acquire_timeout(ACQUIRE_TIMEOUT)
        // Asking before each use whether the server is still there would double the round trips.
        .test_before_acquire(false)
        .before_acquire(|connection, about| {
            Box::pin(async move { Ok(about.idle_for < SURELY_THERE || connection.ping().await.is_ok()) })
        })
        .connect_lazy_with(options)
}

/// A pool tries to connect until its time is over, and then says only that.
pub(super) fn unreachable(error: sqlx::Error) -> sqlx::Error {
    match error {
        sqlx::Error::PoolTimedOut => {
            let silent = format!("no connection within {} s", ACQUIRE_TIMEOUT.as_secs());
            sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, silent))
        }
        error => error,
    }
}

/// What follows `://`, when it is an address of a PostgreSQL server.
fn split(text: &str) -> Option<&str> {
    let (scheme, rest) = text.strip_prefix("jdbc:").unwrap_or(text).split_once("://")?;
    let scheme = scheme.split_once('+').map_or(scheme, |(scheme, _)| scheme);
    matches!(scheme, "postgresql" | "postgres").then_some(rest)
}

/// For people: without password and parameters.
impl fmt::Display for PostgresPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = &self.options;
        let database = options.get_database().unwrap_or(options.get_username());
        write!(f, "postgresql://{}@", options.get_username())?;
        match options.get_socket() {
            Some(socket) => write!(f, "{}", socket.display())?,
            None => write!(f, "{}", options.get_host())?,
        }
        write!(f, ":{}/{database}", options.get_port())
    }
}

impl fmt::Debug for PostgresPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl PartialEq for PostgresPlace {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address && self.password == other.password
    }
}

impl Eq for PostgresPlace {}

/// What an error of a server, or of the way to it, means for whoever called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// No server there, or it goes down, starts, or is full; it may be there in a moment.
    Unreachable,
    /// The certificate, or whether there is TLS at all.
    Tls,
    /// User or password.
    LogIn,
    NoDatabase,
    NotAllowed,
    /// A standby, or a database that is set read-only.
    ReadOnly,
    /// A connection pooler that gives each transaction another session answers in the server's place.
    Pooler,
    OldServer,
    /// Somebody else holds what is needed.
    Busy,
    Constraint,
    Other,
}

impl Trouble {
    pub fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Tls(_) => Self::Tls,
            sqlx::Error::Io(error) if is_of_tls(error) => Self::Tls,
            sqlx::Error::Io(_) => Self::Unreachable,
            sqlx::Error::Protocol(text) if text.starts_with("the server is PostgreSQL") => Self::OldServer,
            sqlx::Error::Database(error) => {
                let code = error.code().unwrap_or_default();
                Self::of_code(&code, error.message())
            }
            _ => Self::Other,
        }
    }

    /// By SQLSTATE (postgresql.org/docs/current/errcodes-appendix.html).
    fn of_code(code: &str, message: &str) -> Self {
        match code {
            "08P01" if message.contains("startup parameter") => Self::Pooler,
            // A prepared statement that this session never saw, or saw before.
            "26000" | "42P05" => Self::Pooler,
            "28000" | "28P01" => Self::LogIn,
            "3D000" => Self::NoDatabase,
            "42501" => Self::NotAllowed,
            "25006" => Self::ReadOnly,
            // Serialization, deadlock, lock time-out, cancelled.
            "40001" | "40P01" | "55P03" | "57014" => Self::Busy,
            // 53: too many connections, no memory, disk full. 57P: shutting down or starting.
            code if code.starts_with("08") || code.starts_with("53") || code.starts_with("57P") => {
                Self::Unreachable
            }
            // The server ended a session that said nothing for too long.
            "25P03" => Self::Unreachable,
            code if code.starts_with("23") => Self::Constraint,
            _ => Self::Other,
        }
    }

    /// What to do about it.
    pub fn next(self) -> &'static str {
        match self {
            Self::Unreachable => "see that the server runs and takes connections there, then try again",
            Self::Tls => {
                "see that the server offers TLS and that its certificate is of the root in sslrootcert and of this \
                 host, or choose another sslmode"
            }
            Self::LogIn => "correct user and password in mergeberg.toml or its environment variable",
            Self::NoDatabase => "correct the database's name in mergeberg.toml, or create it with createdb",
            Self::NotAllowed => "let the owner of the tables GRANT this user what is missing",
            Self::ReadOnly => "name the primary server, not a standby, and a database that takes writes",
            Self::Pooler => {
                "give the address of the server itself: locks, notifications and time-outs of a session are lost \
                 behind a pooler in transaction mode"
            }
            Self::OldServer => "use a newer server",
            Self::Busy => {
                "try again, and if it stays look in pg_stat_activity for a transaction that stays open"
            }
            Self::Constraint | Self::Other => "read the message, and the server's log",
        }
    }
}

/// A certificate that is not accepted comes as the data of a stream that is not right.
fn is_of_tls(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidData
}

/// The error in the server's own words.
pub fn plain(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(error) => error.message().to_owned(),
        sqlx::Error::Io(error) if is_of_tls(error) => format!("TLS: {error}"),
        sqlx::Error::Io(error) => error.to_string(),
        sqlx::Error::Tls(error) => format!("TLS: {error}"),
        sqlx::Error::Configuration(error) => error.to_string(),
        sqlx::Error::Protocol(text) => text.clone(),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_an_address_is_read() {
        for text in [
            "postgresql://ann@db.example:5433/lake",
            "postgres://ann@db.example:5433/lake",
            "postgresql+psycopg2://ann@db.example:5433/lake",
            "postgresql+psycopg://ann:hunter2@db.example:5433/lake?sslmode=require",
            "jdbc:postgresql://db.example:5433/lake?user=ann&password=hunter2",
        ] {
            let place = PostgresPlace::parse(text, None).unwrap();
            assert_eq!(place.to_string(), "postgresql://ann@db.example:5433/lake", "{text}");
            assert_eq!(format!("{place:?}"), place.to_string());
        }
        let socket = PostgresPlace::parse("postgresql:///lake?host=/run/postgresql&user=ann", None).unwrap();
        assert_eq!(socket.to_string(), "postgresql://ann@/run/postgresql:5432/lake");
        for text in ["sqlite:///x", "/srv/postgresql.db", "postgresql.db", "jdbc:sqlite:/x", "mysql://h/d"] {
            assert!(!PostgresPlace::is_address(text), "{text}");
        }
    }

    #[test]
    fn a_wrong_address_is_told_without_its_password() {
        for (text, message) in [
            ("postgresql://ann:hunter2#@h/d", "it cannot be read"),
            ("postgresql://ann:hunter2@h:port/d", "it cannot be read"),
            ("postgresql://ann:hunter2@h/d?sslmode=maybe", "it cannot be read"),
            ("jdbc:postgresql://h/d?password=hunter2&ssl=true", "its parameter 'ssl' is not known"),
        ] {
            let wrong = PostgresPlace::parse(text, None).unwrap_err();
            assert!(wrong.message.starts_with(message), "{text}: {wrong:?}");
            assert!(!format!("{wrong:?}").contains("hunter2"), "{wrong:?}");
        }
    }

    #[test]
    fn two_places_differ_by_password_too() {
        let at = |password: Option<&str>| {
            PostgresPlace::parse("postgresql://ann@h/d", password.map(Secret::new)).unwrap()
        };
        assert_eq!(at(Some("a")), at(Some("a")));
        assert_ne!(at(Some("a")), at(Some("b")));
        assert_ne!(at(Some("a")), at(None));
    }

    #[test]
    fn codes_of_the_server_have_a_meaning() {
        for (code, trouble) in [
            ("28P01", Trouble::LogIn),
            ("3D000", Trouble::NoDatabase),
            ("42501", Trouble::NotAllowed),
            ("25006", Trouble::ReadOnly),
            ("55P03", Trouble::Busy),
            ("57P01", Trouble::Unreachable),
            ("53300", Trouble::Unreachable),
            ("23505", Trouble::Constraint),
            ("42703", Trouble::Other),
        ] {
            assert_eq!(Trouble::of_code(code, ""), trouble, "{code}");
            assert!(!trouble.next().is_empty());
        }
        let refused = "unsupported startup parameter: options";
        assert_eq!(Trouble::of_code("08P01", refused), Trouble::Pooler);
        assert_eq!(Trouble::of(&unreachable(sqlx::Error::PoolTimedOut)), Trouble::Unreachable);
    }
}
