//! Where a SQL catalog's database is.

use std::fmt;
use std::path::PathBuf;

use crate::database::PostgresPlace;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabasePlace {
    File {
        path: PathBuf,
        /// Opened for reading; every commit is refused.
        read_only: bool,
    },
    Postgres(PostgresPlace),
}

/// For people, without a password.
impl fmt::Display for DatabasePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, .. } => write!(f, "{}", path.display()),
            Self::Postgres(place) => write!(f, "{place}"),
        }
    }
}

impl From<PostgresPlace> for DatabasePlace {
    fn from(place: PostgresPlace) -> Self {
        Self::Postgres(place)
    }
}

impl From<&DatabasePlace> for DatabasePlace {
    fn from(place: &DatabasePlace) -> Self {
        place.clone()
    }
}

/// A file: a plain path, `sqlite:path`, `sqlite:///absolute`, or SQLAlchemy's `sqlite:////absolute` and
/// `sqlite+pysqlite://` as PyIceberg takes them. `?mode=ro` opens read-only.
impl From<&str> for DatabasePlace {
    fn from(url: &str) -> Self {
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
        let read_only = query.split('&').any(|pair| pair == "mode=ro");
        Self::File { path: PathBuf::from(path), read_only }
    }
}

impl From<&String> for DatabasePlace {
    fn from(url: &String) -> Self {
        Self::from(url.as_str())
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
            let file = DatabasePlace::File { path: PathBuf::from(path), read_only: false };
            assert_eq!(DatabasePlace::from(url), file, "{url}");
        }
        let reading = DatabasePlace::from("sqlite:/w/catalog.db?mode=ro");
        assert!(matches!(reading, DatabasePlace::File { read_only: true, .. }));
    }
}
