//! `mergeberg.toml`: catalogs by name, the ledger, the policies folder, the worker's clockwork.
//!
//! Looked for in the current folder and then in each folder above it, like Cargo.toml; relative paths in
//! it are relative to it. Environment variables win over the file, so that one file serves several
//! deployments (docs/cli.md lists them). An unknown key is an error, never ignored: a mistyped key would
//! otherwise switch something off without a word.
//!
//! Absent on purpose: anything about single tables, which is policy.

mod against_table;
mod catalogs;
mod dotted;
mod policies;
pub(crate) mod toml_text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mergeberg_kernel::policy::Duration;
use serde::Deserialize;

pub use against_table::{KnownTables, PolicyProblem, compare, tables_of};
pub use catalogs::{CatalogConfig, CatalogPlace, SqlPlace, catalog_variable};
pub use policies::{PolicyFolder, PolicySet};

use crate::database::{PostgresPlace, WrongAddress};
use crate::ledger::LedgerPlace;
use crate::near::nearest;
use crate::secret::Secret;
use catalogs::{RawCatalog, Reader};

pub const FILE_NAME: &str = "mergeberg.toml";

/// Overrides `[ledger] path` or `url`: a path, or an address of PostgreSQL.
pub const ENV_LEDGER: &str = "MERGEBERG_LEDGER";
/// Overrides `[ledger] password`.
pub const ENV_LEDGER_PASSWORD: &str = "MERGEBERG_LEDGER_PASSWORD";
/// Overrides `[policies] path`.
pub const ENV_POLICIES: &str = "MERGEBERG_POLICIES";

const DEFAULT_LEDGER: &str = "mergeberg.db";
const DEFAULT_POLICIES: &str = "policies";
/// How long the worker sleeps when nothing wakes it.
const DEFAULT_POLL_MS: i64 = 1_000;
/// How long a leader that says nothing is still believed to live.
const DEFAULT_LEASE_MS: i64 = 10_000;

/// How old files of a replay become before the catalog names them.
const DEFAULT_CHECKPOINT_MS: i64 = 60 * 60 * 1000;
/// Half of the least age that Spark's `remove_orphan_files` takes (rule R10).
const MAX_CHECKPOINT_MS: i64 = 12 * 60 * 60 * 1000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The file itself.
    pub file: PathBuf,
    pub ledger: LedgerPlace,
    pub policies: PathBuf,
    pub worker: WorkerConfig,
    default_catalog: Option<String>,
    catalogs: BTreeMap<String, CatalogConfig>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    pub poll: Duration,
    pub lease: Duration,
    /// Longest time that a file of an operation that is run again is named by nothing in the catalog.
    pub checkpoint: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("there is no {FILE_NAME} in {} or any folder above it", .0.display())]
    NotFound(PathBuf),
    #[error("{} cannot be read: {source}", .path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// `location` is `file:line`, or the file alone.
    #[error("{location}: {message}")]
    Wrong { location: String, message: String, next: String },
    #[error("{FILE_NAME} has no catalog '{wanted}'")]
    NoSuchCatalog { wanted: String, known: Vec<String> },
    #[error("{FILE_NAME} has several catalogs and none is the default: {}", .known.join(", "))]
    NoDefaultCatalog { known: Vec<String> },
    #[error("the policies folder {} does not exist", .0.display())]
    NoPoliciesFolder(PathBuf),
}

impl ConfigError {
    /// What to do about it.
    pub fn next(&self) -> String {
        match self {
            Self::NotFound(_) => "run `mergeberg init` here, or name the file with --config PATH".to_owned(),
            Self::Unreadable { path, .. } => format!("make {} readable for this user", path.display()),
            Self::Wrong { next, .. } => next.clone(),
            Self::NoSuchCatalog { wanted, known } => {
                match nearest(wanted, known.iter().map(String::as_str)) {
                    Some(name) => format!("did you mean '{name}'?"),
                    None if known.is_empty() => format!("add a section [catalog.{wanted}]"),
                    None => format!("name one of: {}", known.join(", ")),
                }
            }
            Self::NoDefaultCatalog { known } => format!(
                "write default-catalog = \"{}\" at the top of the file",
                known.first().map_or("NAME", String::as_str)
            ),
            Self::NoPoliciesFolder(path) => format!(
                "create {}, or set [policies] path; without policies every table has the strict default",
                path.display()
            ),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawConfig {
    default_catalog: Option<String>,
    #[serde(default)]
    ledger: RawLedger,
    #[serde(default)]
    policies: RawPolicies,
    #[serde(default)]
    worker: RawWorker,
    #[serde(default)]
    catalog: BTreeMap<String, RawCatalog>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawLedger {
    path: Option<String>,
    url: Option<String>,
    password: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawPolicies {
    path: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawWorker {
    poll: Option<Duration>,
    lease: Option<Duration>,
    checkpoint: Option<Duration>,
}

impl Config {
    /// Finds the file: `named`, or the nearest [`FILE_NAME`] at or above `start`.
    pub fn find(named: Option<&Path>, start: &Path) -> Result<PathBuf, ConfigError> {
        if let Some(path) = named {
            return Ok(start.join(path));
        }
        for folder in start.ancestors() {
            let candidate = folder.join(FILE_NAME);
            if candidate.is_file() {
                return Ok(candidate);
            }
        }
        Err(ConfigError::NotFound(start.to_owned()))
    }

    /// Reads the file. `environment` looks a variable up.
    pub fn read(file: &Path, environment: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(file)
            .map_err(|source| ConfigError::Unreadable { path: file.to_owned(), source })?;
        Self::parse(file, &text, environment)
    }

    /// [`Config::read`] without the reading.
    pub fn parse(
        file: &Path,
        text: &str,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let shown = file.display().to_string();
        let raw: RawConfig = toml::from_str(text).map_err(|e| toml_text::describe(&shown, text, &e))?;
        let RawConfig { default_catalog, ledger, policies, worker, catalog } = raw;
        let folder = file.parent().unwrap_or(Path::new(""));
        let wrong = |message: String, next: &str| ConfigError::Wrong {
            location: shown.clone(),
            message,
            next: next.to_owned(),
        };

        let wrong_catalog = |name: &str, message: String, next: String| {
            let section = format!("[catalog.{name}]");
            let location = match toml_text::line_of_section(text, &section) {
                Some(line) => format!("{shown}:{line}"),
                None => shown.clone(),
            };
            ConfigError::Wrong { location, message, next }
        };
        let reader = Reader { folder, environment: &environment, wrong: &wrong_catalog };
        let mut catalogs = BTreeMap::new();
        for (name, raw) in catalog {
            let read = reader.read(&name, raw)?;
            catalogs.insert(name, read);
        }
        if let Some(name) = &default_catalog
            && !catalogs.contains_key(name)
        {
            let known: Vec<&str> = catalogs.keys().map(String::as_str).collect();
            let next = match nearest(name, known.iter().copied()) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("add a section [catalog.{name}], or name one of: {}", known.join(", ")),
            };
            return Err(wrong(format!("'default-catalog' names '{name}', which is no catalog"), &next));
        }
        let worker = WorkerConfig {
            poll: worker.poll.unwrap_or(Duration { ms: DEFAULT_POLL_MS }),
            lease: worker.lease.unwrap_or(Duration { ms: DEFAULT_LEASE_MS }),
            checkpoint: worker.checkpoint.unwrap_or(Duration { ms: DEFAULT_CHECKPOINT_MS }),
        };
        if worker.checkpoint.ms > MAX_CHECKPOINT_MS {
            return Err(wrong(
                format!(
                    "[worker] 'checkpoint' is {}: a removal of orphan files may take what is older than a day",
                    String::from(worker.checkpoint)
                ),
                "make 'checkpoint' at most 12h",
            ));
        }
        if worker.lease.ms < 3 * worker.poll.ms {
            return Err(wrong(
                format!(
                    "[worker] 'lease' is {} and 'poll' is {}: a leader could lose its lease while it sleeps",
                    String::from(worker.lease),
                    String::from(worker.poll)
                ),
                "make 'lease' at least three times 'poll'",
            ));
        }
        let wrong_ledger = |message: String, next: &str| {
            let location = match toml_text::line_of_section(text, "[ledger]") {
                Some(line) => format!("{shown}:{line}"),
                None => shown.clone(),
            };
            ConfigError::Wrong { location, message, next: next.to_owned() }
        };
        let ledger = ledger_place(ledger, folder, &environment, wrong_ledger)?;
        let policies =
            environment(ENV_POLICIES).or(policies.path).unwrap_or_else(|| DEFAULT_POLICIES.to_owned());
        Ok(Self {
            file: file.to_owned(),
            ledger,
            policies: folder.join(policies),
            worker,
            default_catalog,
            catalogs,
        })
    }

    pub fn catalogs(&self) -> impl Iterator<Item = &CatalogConfig> {
        self.catalogs.values()
    }

    /// The catalog of this name; without a name the default, or the only one.
    pub fn catalog(&self, name: Option<&str>) -> Result<&CatalogConfig, ConfigError> {
        let known = || self.catalogs.keys().cloned().collect::<Vec<_>>();
        match name.or(self.default_catalog.as_deref()) {
            Some(name) => self
                .catalogs
                .get(name)
                .ok_or_else(|| ConfigError::NoSuchCatalog { wanted: name.to_owned(), known: known() }),
            None => {
                let mut all = self.catalogs.values();
                match (all.next(), all.next()) {
                    (Some(only), None) => Ok(only),
                    (None, _) => {
                        Err(ConfigError::NoSuchCatalog { wanted: "local".to_owned(), known: Vec::new() })
                    }
                    (Some(_), Some(_)) => Err(ConfigError::NoDefaultCatalog { known: known() }),
                }
            }
        }
    }
}

fn ledger_place(
    raw: RawLedger,
    folder: &Path,
    environment: &impl Fn(&str) -> Option<String>,
    wrong: impl Fn(String, &str) -> ConfigError,
) -> Result<LedgerPlace, ConfigError> {
    let RawLedger { path, url, password } = raw;
    let misplaced = password.is_some();
    let password = environment(ENV_LEDGER_PASSWORD).or(password).map(Secret::new);
    let (key, named) = match (environment(ENV_LEDGER), path, url) {
        (Some(named), _, _) => (ENV_LEDGER, named),
        (None, Some(_), Some(_)) => {
            let message = "[ledger] has 'path' and 'url'".to_owned();
            return Err(wrong(message, "keep 'path' for a SQLite file, or 'url' for PostgreSQL"));
        }
        (None, None, Some(url)) => ("url", url),
        (None, path, None) => ("path", path.unwrap_or_else(|| DEFAULT_LEDGER.to_owned())),
    };
    let is_address = PostgresPlace::is_address(&named);
    match (key, is_address) {
        ("url", _) | (ENV_LEDGER, true) => match PostgresPlace::parse(&named, password) {
            Ok(place) => Ok(LedgerPlace::Postgres(place)),
            Err(WrongAddress { message, next }) => Err(wrong(format!("[ledger] '{key}': {message}"), &next)),
        },
        (_, true) => Err(wrong("[ledger] 'path' is an address of a server".to_owned(), "write it as 'url'")),
        (_, false) if misplaced => Err(wrong(
            "[ledger] has 'password', which a SQLite file does not take".to_owned(),
            "remove it, or name a PostgreSQL database by 'url'",
        )),
        (_, false) => Ok(LedgerPlace::File(folder.join(named))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = r#"
default-catalog = "prod"

[ledger]
path = "state/queue.db"

[policies]
path = "/etc/mergeberg/policies"

[worker]
poll = "250ms"
lease = "5s"

[catalog.prod]
type = "sql"
uri = "sqlite:////srv/catalog.db"
warehouse = "file:///srv/warehouse"

[catalog.dev-1]
type = "sql"
uri = "dev.db"
warehouse = "warehouse"
"#;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse(Path::new("/q/mergeberg.toml"), text, |_| None)
    }

    fn sql<'a>(config: &'a Config, name: Option<&str>) -> &'a SqlPlace {
        config.catalog(name).unwrap().sql().unwrap()
    }

    fn message(text: &str) -> (String, String) {
        let error = parse(text).unwrap_err();
        (error.to_string(), error.next())
    }

    #[test]
    fn relative_paths_are_relative_to_the_file() {
        let config = parse(FULL).unwrap();
        assert_eq!(config.ledger, LedgerPlace::from(Path::new("/q/state/queue.db")));
        assert_eq!(config.policies, Path::new("/etc/mergeberg/policies"));
        let prod = sql(&config, None);
        assert_eq!(prod.database.to_string(), "/srv/catalog.db");
        assert_eq!(prod.warehouse, "file:///srv/warehouse");
        let dev = sql(&config, Some("dev-1"));
        assert_eq!(dev.database.to_string(), "/q/dev.db");
        assert_eq!(dev.warehouse, "/q/warehouse");
        assert_eq!(config.worker.poll.ms, 250);
    }

    #[test]
    fn an_empty_file_has_defaults() {
        let config = parse("").unwrap();
        assert_eq!(config.ledger, LedgerPlace::from(Path::new("/q/mergeberg.db")));
        assert_eq!(config.policies, Path::new("/q/policies"));
        assert_eq!((config.worker.poll.ms, config.worker.lease.ms), (1_000, 10_000));
        assert_eq!(config.worker.checkpoint.ms, 3_600_000);
        assert!(matches!(config.catalog(None), Err(ConfigError::NoSuchCatalog { .. })));
    }

    #[test]
    fn the_environment_wins() {
        let set = BTreeMap::from([
            ("MERGEBERG_LEDGER", "/tmp/other.db"),
            ("MERGEBERG_POLICIES", "there"),
            ("MERGEBERG_CATALOG_DEV_1_URI", "sqlite:///tmp/c.db"),
            ("MERGEBERG_CATALOG_DEV_1_WAREHOUSE", "/tmp/w"),
        ]);
        let config = Config::parse(Path::new("/q/mergeberg.toml"), FULL, |name| {
            set.get(name).map(|value| (*value).to_owned())
        })
        .unwrap();
        assert_eq!(config.ledger, LedgerPlace::from(Path::new("/tmp/other.db")));
        assert_eq!(config.policies, Path::new("/q/there"));
        let dev = sql(&config, Some("dev-1"));
        assert_eq!((dev.database.to_string().as_str(), dev.warehouse.as_str()), ("/tmp/c.db", "/tmp/w"));
        assert_eq!(sql(&config, Some("prod")).database.to_string(), "/srv/catalog.db");
    }

    #[test]
    fn a_ledger_is_a_file_or_a_database_on_a_server() {
        let read = |text: &str, set: &[(&str, &str)]| {
            let set: BTreeMap<&str, &str> = set.iter().copied().collect();
            Config::parse(Path::new("/q/mergeberg.toml"), text, |name| set.get(name).map(|v| (*v).to_owned()))
                .map(|config| config.ledger)
        };
        let url = "[ledger]\nurl = \"postgresql://ann@h/queue\"\n";
        let plain = read(url, &[]).unwrap();
        assert_eq!(plain.to_string(), "postgresql://ann@h:5432/queue");
        assert_eq!(read("", &[("MERGEBERG_LEDGER", "postgresql://ann@h/queue")]).unwrap(), plain);
        let secret = read(&format!("{url}password = \"hunter2\"\n"), &[]).unwrap();
        assert_eq!(read(url, &[("MERGEBERG_LEDGER_PASSWORD", "hunter2")]).unwrap(), secret);
        assert_ne!(secret, plain);
        assert!(!format!("{secret:?}").contains("hunter2"));
        let file = [("MERGEBERG_LEDGER", "q.db"), ("MERGEBERG_LEDGER_PASSWORD", "hunter2")];
        assert_eq!(read(url, &file).unwrap(), LedgerPlace::from(Path::new("/q/q.db")));

        for (text, wrong, next) in [
            ("path = \"q.db\"\nurl = \"postgresql://h/d\"", "has 'path' and 'url'", "keep 'path'"),
            ("path = \"postgresql://h/d\"", "'path' is an address", "write it as 'url'"),
            ("url = \"queue.db\"", "it is no address", "write postgresql://"),
            ("path = \"q.db\"\npassword = \"hunter2\"", "has 'password'", "remove it"),
            ("url = \"postgresql://ann:hunter2@h:x/d\"", "it cannot be read", "write postgresql://"),
        ] {
            let error = read(&format!("\n[ledger]\n{text}\n"), &[]).unwrap_err();
            assert!(error.to_string().starts_with("/q/mergeberg.toml:2: [ledger] "), "{error}");
            assert!(error.to_string().contains(wrong), "{error}");
            assert!(error.next().starts_with(next), "{}", error.next());
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn an_unknown_key_names_line_section_and_the_nearest_known_one() {
        let (text, next) = message("[worker]\npol = \"1s\"\n");
        assert_eq!(text, "/q/mergeberg.toml:2: unknown key 'pol' in [worker]");
        assert_eq!(next, "did you mean 'poll'? known here: checkpoint, lease, poll");
        let (text, next) = message("[catalog.a]\ntype = \"sql\"\nurl = \"x\"\nwarehouse = \"w\"\n");
        assert_eq!(text, "/q/mergeberg.toml:3: unknown key 'url' in [catalog.a]");
        assert_eq!(
            next,
            "did you mean 'uri'? known here: adls, client, credential, gcs, header, oauth2-server-uri, password, rest, s3, scope, token, type, uri, warehouse"
        );
        let (text, next) = message("[ledgr]\n");
        assert_eq!(text, "/q/mergeberg.toml:1: unknown key 'ledgr'");
        assert!(next.starts_with("did you mean 'ledger'?"), "{next}");
    }

    #[test]
    fn a_missing_key_and_a_wrong_value_name_line_and_key() {
        let (text, next) = message("[catalog.a]\ntype = \"sql\"\nuri = \"x\"\n");
        assert_eq!(text, "/q/mergeberg.toml:1: [catalog.a] lacks the key 'warehouse'");
        assert_eq!(next, "add warehouse = ...");
        let (text, _) = message("[worker]\npoll = 5\n");
        assert!(
            text.starts_with("/q/mergeberg.toml:2: 'poll' in [worker]: invalid type: integer `5`"),
            "{text}"
        );
        let (text, next) = message("[worker]\npoll = \"5x\"\n");
        assert_eq!(
            text,
            "/q/mergeberg.toml:2: 'poll' in [worker]: '5x' is no length of time: write 250ms, 2s, 10m, 1h or 7d"
        );
        assert_eq!(next, "correct the value of 'poll' on line 2");
        let (text, next) = message("[catalog.a]\ntype = \"hive\"\nuri = \"x\"\nwarehouse = \"w\"\n");
        assert_eq!(text, "/q/mergeberg.toml:2: 'type' in [catalog.a]: unknown value 'hive'");
        assert_eq!(next, "write one of: sql, rest");
        let (text, _) = message("[worker\n");
        assert!(text.starts_with("/q/mergeberg.toml:1: "), "{text}");
    }

    #[test]
    fn wrong_references_and_bounds_are_refused() {
        let (text, next) =
            message("default-catalog = \"prd\"\n[catalog.prod]\ntype=\"sql\"\nuri=\"x\"\nwarehouse=\"w\"");
        assert_eq!(text, "/q/mergeberg.toml: 'default-catalog' names 'prd', which is no catalog");
        assert_eq!(next, "did you mean 'prod'?");
        let (text, next) = message("[worker]\ncheckpoint = \"13h\"\n");
        assert!(text.contains("'checkpoint' is 13h"), "{text}");
        assert_eq!(next, "make 'checkpoint' at most 12h");
        let (text, next) = message("[worker]\npoll = \"5s\"\n");
        assert!(text.contains("'lease' is 10s and 'poll' is 5s"), "{text}");
        assert_eq!(next, "make 'lease' at least three times 'poll'");
    }

    #[test]
    fn catalogs_are_chosen_by_name_default_or_being_the_only_one() {
        let error = parse(FULL).unwrap().catalog(Some("prood")).unwrap_err();
        assert_eq!(error.next(), "did you mean 'prod'?");
        let two = FULL.replace("default-catalog = \"prod\"", "");
        let error = parse(&two).unwrap().catalog(None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mergeberg.toml has several catalogs and none is the default: dev-1, prod"
        );
    }

    #[test]
    fn the_file_is_found_in_a_folder_above() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("a/b");
        std::fs::create_dir_all(&deep).unwrap();
        assert!(matches!(Config::find(None, &deep), Err(ConfigError::NotFound(_))));
        std::fs::write(root.path().join("a").join(FILE_NAME), "").unwrap();
        assert_eq!(Config::find(None, &deep).unwrap(), root.path().join("a").join(FILE_NAME));
        let named = Config::find(Some(Path::new("x.toml")), &deep).unwrap();
        assert_eq!(named, deep.join("x.toml"));
    }
}
