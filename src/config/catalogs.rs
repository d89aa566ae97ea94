//! The sections `[catalog.NAME]`: where a catalog is, and who we are to it.
//!
//! Secrets may stand in the file, and rather come from the environment: each key has its variable.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{ConfigError, dotted};
use crate::database::{PostgresPlace, WrongAddress};
use crate::secret::Secret;
use crate::table::rest_catalog::{AwsSettings, Patience, RestSettings, SIGNING_KEYS, WrongSetting};
use crate::table::sql_catalog::DatabasePlace;
use crate::table::storage::{STORAGE_KEYS, StorageProperties};

/// One catalog of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogConfig {
    /// Its key in the file.
    pub name: String,
    pub place: CatalogPlace,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CatalogPlace {
    Sql(SqlPlace),
    Rest(Box<RestSettings>),
}

/// A SQL catalog on SQLite or PostgreSQL, in the table layout of the JDBC catalogs of Java and PyIceberg. The
/// section's name is stored as `catalog_name` in the catalog's own tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqlPlace {
    /// `?mode=ro` in the uri of a file opens it for reading, and every commit is refused.
    pub database: DatabasePlace,
    /// Where new tables go: a folder, or a URI as given.
    pub warehouse: String,
    /// Of object stores.
    pub storage: StorageProperties,
}

impl CatalogConfig {
    pub fn sql(&self) -> Option<&SqlPlace> {
        match &self.place {
            CatalogPlace::Sql(place) => Some(place),
            CatalogPlace::Rest(_) => None,
        }
    }

    /// Name, type, address and warehouse, without secrets: for those who are to open the same catalog with
    /// credentials of their own. A SQLite file is named as PyIceberg and SQLAlchemy name it.
    pub fn told(&self) -> BTreeMap<&'static str, String> {
        let mut told = BTreeMap::from([("NAME", self.name.clone())]);
        match &self.place {
            CatalogPlace::Sql(SqlPlace { database, warehouse, storage: _ }) => {
                let uri = match database {
                    DatabasePlace::File { path, read_only: _ } => format!("sqlite:///{}", path.display()),
                    DatabasePlace::Postgres(place) => place.to_string(),
                };
                told.extend([("TYPE", "sql".to_owned()), ("URI", uri), ("WAREHOUSE", warehouse.clone())]);
            }
            CatalogPlace::Rest(settings) => {
                told.extend([("TYPE", "rest".to_owned()), ("URI", settings.uri.clone())]);
                told.extend(settings.warehouse.clone().map(|warehouse| ("WAREHOUSE", warehouse)));
            }
        }
        told
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawCatalog {
    #[serde(rename = "type")]
    kind: CatalogKind,
    uri: Option<String>,
    warehouse: Option<String>,
    password: Option<String>,
    token: Option<String>,
    credential: Option<String>,
    oauth2_server_uri: Option<String>,
    scope: Option<String>,
    #[serde(default)]
    header: BTreeMap<String, String>,
    // Storage, under Iceberg's own names (`s3.endpoint`).
    s3: Option<toml::Table>,
    gcs: Option<toml::Table>,
    adls: Option<toml::Table>,
    client: Option<toml::Table>,
    // The signing of requests to a REST catalog (`rest.sigv4-enabled`).
    rest: Option<toml::Table>,
}

#[derive(Clone, Copy)]
enum CatalogKind {
    Sql,
    Rest,
    /// Known by name, to say why not; not proposed to anybody.
    Hadoop,
}

impl<'de> Deserialize<'de> for CatalogKind {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.as_str() {
            "sql" => Ok(Self::Sql),
            "rest" => Ok(Self::Rest),
            "hadoop" => Ok(Self::Hadoop),
            other => Err(serde::de::Error::unknown_variant(other, &["sql", "rest"])),
        }
    }
}

/// What a section is read with.
pub(super) struct Reader<'a> {
    /// Relative paths are relative to it.
    pub folder: &'a Path,
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    /// An error of a section, by its name: message and next step.
    pub wrong: &'a dyn Fn(&str, String, String) -> ConfigError,
}

impl Reader<'_> {
    pub fn read(&self, name: &str, raw: RawCatalog) -> Result<CatalogConfig, ConfigError> {
        let RawCatalog {
            kind,
            uri,
            warehouse,
            password,
            token,
            credential,
            oauth2_server_uri,
            scope,
            header,
            s3,
            gcs,
            adls,
            client,
            rest,
        } = raw;
        let given =
            |key: &str, in_file: Option<String>| (self.environment)(&catalog_variable(name, key)).or(in_file);
        let uri = given("URI", uri).ok_or_else(|| {
            (self.wrong)(name, format!("[catalog.{name}] lacks the key 'uri'"), "add uri = ...".to_owned())
        });
        let warehouse = given("WAREHOUSE", warehouse);
        let password = given("PASSWORD", password);
        let token = given("TOKEN", token);
        let credential = given("CREDENTIAL", credential);
        let oauth2_server_uri = given("OAUTH2_SERVER_URI", oauth2_server_uri);
        let scope = given("SCOPE", scope);
        let tables = [("s3", s3), ("gcs", gcs), ("adls", adls), ("client", client)];
        let variable = |key: &str| (self.environment)(&catalog_variable(name, key));
        let wrong =
            |(message, next): dotted::Wrong| (self.wrong)(name, format!("[catalog.{name}] {message}"), next);
        let storage = dotted::settings(tables, STORAGE_KEYS, variable).map_err(wrong)?;
        let storage = StorageProperties::new(storage);
        let signing = dotted::settings([("rest", rest)], SIGNING_KEYS, variable).map_err(wrong)?;
        let aws = AwsSettings::read(&signing)
            .map_err(|(key, message)| wrong((format!("'{key}': {message}"), "correct it".to_owned())))?;
        let place = match kind {
            CatalogKind::Hadoop => return Err(self.refused_hadoop(name)),
            CatalogKind::Sql => {
                let others = [
                    ("token", token.is_some()),
                    ("credential", credential.is_some()),
                    ("oauth2-server-uri", oauth2_server_uri.is_some()),
                    ("scope", scope.is_some()),
                    ("header", !header.is_empty()),
                    ("rest.sigv4-enabled", aws.is_some()),
                ];
                if let Some((key, _)) = others.into_iter().find(|(_, set)| *set) {
                    let message = format!("[catalog.{name}] has '{key}', which only a REST catalog has");
                    return Err((self.wrong)(
                        name,
                        message,
                        "remove it, or write type = \"rest\"".to_owned(),
                    ));
                }
                CatalogPlace::Sql(self.sql(name, &uri?, warehouse, password, storage)?)
            }
            CatalogKind::Rest => {
                if password.is_some() {
                    let message =
                        format!("[catalog.{name}] has 'password', which only a SQL catalog on a server has");
                    let next = "remove it; a REST catalog takes 'token' or 'credential'".to_owned();
                    return Err((self.wrong)(name, message, next));
                }
                let settings = RestSettings {
                    name: name.to_owned(),
                    uri: uri?,
                    warehouse,
                    token: token.map(Secret::new),
                    credential: credential.map(Secret::new),
                    oauth2_server_uri,
                    scope,
                    headers: header.into_iter().map(|(key, value)| (key, Secret::new(value))).collect(),
                    patience: Patience::default(),
                    storage,
                    aws,
                };
                settings.check().map_err(|WrongSetting { key, message, next }| {
                    let message = format!("[catalog.{name}] '{key}': {message}");
                    (self.wrong)(name, message, next.to_owned())
                })?;
                CatalogPlace::Rest(Box::new(settings))
            }
        };
        Ok(CatalogConfig { name: name.to_owned(), place })
    }

    fn refused_hadoop(&self, name: &str) -> ConfigError {
        let message = format!(
            "[catalog.{name}] is a Hadoop catalog, whose commit is a rename of a file in the table's folder: it cannot \
             require that a branch is where it was, and object stores have no such rename"
        );
        let next = "register its tables in a REST catalog or a SQL catalog, and write that one here";
        (self.wrong)(name, message, next.to_owned())
    }

    fn sql(
        &self,
        name: &str,
        uri: &str,
        warehouse: Option<String>,
        password: Option<String>,
        storage: StorageProperties,
    ) -> Result<SqlPlace, ConfigError> {
        let Some(warehouse) = warehouse else {
            let message = format!("[catalog.{name}] lacks the key 'warehouse'");
            return Err((self.wrong)(name, message, "add warehouse = ...".to_owned()));
        };
        let warehouse = if warehouse.contains("://") || warehouse.starts_with("file:") {
            warehouse
        } else {
            self.folder.join(&warehouse).display().to_string()
        };
        if PostgresPlace::is_address(uri) {
            let place = PostgresPlace::parse(uri, password.map(Secret::new)).map_err(|wrong| {
                let WrongAddress { message, next } = wrong;
                (self.wrong)(name, format!("[catalog.{name}] 'uri': {message}"), next)
            })?;
            return Ok(SqlPlace { database: place.into(), warehouse, storage });
        }
        if password.is_some() {
            let message = format!("[catalog.{name}] has 'password', which a SQLite file does not take");
            return Err((self.wrong)(name, message, "remove it".to_owned()));
        }
        let path = sqlite_path(uri).ok_or_else(|| {
            let next = "write a path, sqlite:////absolute/path.db, or postgresql://USER@HOST:5432/DATABASE; for a \
                        REST catalog write type = \"rest\"; other databases are not supported yet";
            let message = format!("[catalog.{name}] 'uri' is neither a SQLite nor a PostgreSQL database");
            (self.wrong)(name, message, next.to_owned())
        })?;
        let read_only =
            uri.split_once('?').is_some_and(|(_, query)| query.split('&').any(|p| p == "mode=ro"));
        let database = DatabasePlace::File { path: self.folder.join(path), read_only };
        Ok(SqlPlace { database, warehouse, storage })
    }
}

/// `MERGEBERG_CATALOG_<NAME>_<KEY>`: the name in capitals, everything but letters and digits as `_`.
pub fn catalog_variable(name: &str, key: &str) -> String {
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect();
    format!("MERGEBERG_CATALOG_{name}_{key}")
}

/// The database file of a catalog URI: a plain path, `sqlite:path`, or `sqlite://` and an absolute path
/// (`sqlite:////x` as PyIceberg and SQLAlchemy write it, and `sqlite:///x`, both mean `/x`). `None` for
/// another database.
fn sqlite_path(uri: &str) -> Option<PathBuf> {
    let path = match uri.strip_prefix("jdbc:").unwrap_or(uri).strip_prefix("sqlite:") {
        Some(rest) => path_of(rest)?,
        None if uri.contains("://") || uri.starts_with("jdbc:") || uri.trim().is_empty() => return None,
        None => uri.to_owned(),
    };
    let path = path.split('?').next().unwrap_or_default();
    if path.is_empty() || path == "/" { None } else { Some(PathBuf::from(path)) }
}

/// What stands behind `sqlite:`.
fn path_of(rest: &str) -> Option<String> {
    match rest.strip_prefix("//") {
        Some(absolute) if absolute.starts_with('/') => Some(format!("/{}", absolute.trim_start_matches('/'))),
        Some(_) => None,
        None => Some(rest.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const REST: &str = r#"
[catalog.lake]
type = "rest"
uri = "https://catalog.example/api"
warehouse = "prod"
credential = "queue:hunter2"
oauth2-server-uri = "https://idp.example/token"
scope = "PRINCIPAL_ROLE:ALL"
header.X-Tenant = "a"
"#;

    fn parse(text: &str, set: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let set: BTreeMap<&str, &str> = set.iter().copied().collect();
        Config::parse(Path::new("/q/mergeberg.toml"), text, |name| set.get(name).map(|v| (*v).to_owned()))
    }

    fn rest(text: &str, set: &[(&str, &str)]) -> RestSettings {
        match &parse(text, set).unwrap().catalog(None).unwrap().place {
            CatalogPlace::Rest(settings) => settings.as_ref().clone(),
            CatalogPlace::Sql(place) => panic!("{place:?}"),
        }
    }

    #[test]
    fn a_rest_catalog_has_an_address_and_credentials() {
        let settings = rest(REST, &[]);
        assert_eq!(settings.uri, "https://catalog.example/api");
        assert_eq!(settings.warehouse.as_deref(), Some("prod"));
        assert_eq!(settings.credential, Some(Secret::new("queue:hunter2")));
        assert_eq!(settings.oauth2_server_uri.as_deref(), Some("https://idp.example/token"));
        assert_eq!(settings.scope.as_deref(), Some("PRINCIPAL_ROLE:ALL"));
        assert_eq!(settings.headers, BTreeMap::from([("X-Tenant".to_owned(), Secret::new("a"))]));
        assert!(!format!("{settings:?}").contains("hunter2"));
    }

    #[test]
    fn secrets_come_from_the_environment() {
        let bare = "[catalog.lake]\ntype = \"rest\"\nuri = \"http://h\"\n";
        let settings = rest(bare, &[("MERGEBERG_CATALOG_LAKE_TOKEN", "t")]);
        assert_eq!((settings.token, settings.warehouse), (Some(Secret::new("t")), None));
        let settings = rest(
            bare,
            &[("MERGEBERG_CATALOG_LAKE_CREDENTIAL", "i:s"), ("MERGEBERG_CATALOG_LAKE_URI", "http://other")],
        );
        assert_eq!((settings.credential, settings.uri.as_str()), (Some(Secret::new("i:s")), "http://other"));
    }

    #[test]
    fn what_others_are_told_of_a_catalog_holds_no_secret() {
        let config = parse(REST, &[("MERGEBERG_CATALOG_LAKE_CREDENTIAL", "id:t0ken")]).unwrap();
        let told = config.catalog(None).unwrap().told();
        let expected = [
            ("NAME", "lake"),
            ("TYPE", "rest"),
            ("URI", "https://catalog.example/api"),
            ("WAREHOUSE", "prod"),
        ];
        assert_eq!(told, expected.map(|(key, value)| (key, value.to_owned())).into());
        let file = "[catalog.l]\ntype = \"sql\"\nuri = \"c.db\"\nwarehouse = \"/w\"\n";
        let told = parse(file, &[]).unwrap().catalog(None).unwrap().told();
        assert_eq!(told["URI"], "sqlite:////q/c.db");
        let server = "[catalog.l]\ntype = \"sql\"\nuri = \"postgresql://u@h:5432/d\"\nwarehouse = \"/w\"\n";
        let told = parse(server, &[("MERGEBERG_CATALOG_L_PASSWORD", "hunter2")]).unwrap();
        assert_eq!(told.catalog(None).unwrap().told()["URI"], "postgresql://u@h:5432/d");
    }

    #[test]
    fn storage_has_icebergs_own_names() {
        let text = "[catalog.lake]\ntype = \"sql\"\nuri = \"c.db\"\nwarehouse = \"s3://lake/w\"\n\
                    s3.endpoint = \"http://h:9\"\ns3.path-style-access = true\n";
        let config = parse(text, &[("MERGEBERG_CATALOG_LAKE_S3_SECRET_ACCESS_KEY", "hunter2")]).unwrap();
        let place = config.catalog(None).unwrap().sql().unwrap();
        assert_eq!(place.warehouse, "s3://lake/w");
        let expected = [
            ("s3.endpoint", "http://h:9"),
            ("s3.path-style-access", "true"),
            ("s3.secret-access-key", "hunter2"),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), Secret::new(value)));
        assert_eq!(place.storage, StorageProperties::new(expected));
        assert!(!format!("{place:?}").contains("hunter2"));
        let error = parse(&text.replace("s3.endpoint", "s3.endpiont"), &[]).unwrap_err();
        assert_eq!(error.to_string(), "/q/mergeberg.toml:1: [catalog.lake] unknown key 's3.endpiont'");
    }

    #[test]
    fn a_hadoop_catalog_is_refused_with_the_reason() {
        let error = parse("[catalog.old]\ntype = \"hadoop\"\nwarehouse = \"s3://b/w\"\n", &[]).unwrap_err();
        assert!(error.to_string().contains("whose commit is a rename"), "{error}");
        assert!(error.next().contains("REST catalog"), "{}", error.next());
    }

    #[test]
    fn wrong_settings_name_line_section_and_key() {
        let refused = |text: &str| {
            let error = parse(text, &[]).unwrap_err();
            (error.to_string(), error.next())
        };
        let (text, next) = refused("\n[catalog.a]\ntype = \"rest\"\nuri = \"h:1\"\n");
        assert_eq!(text, "/q/mergeberg.toml:2: [catalog.a] 'uri': 'h:1' is no address of a server");
        assert_eq!(next, "write http:// or https://, the host, and a path where it has one");
        let (text, next) =
            refused("[catalog.a]\ntype=\"rest\"\nuri=\"http://h\"\ntoken=\"t\"\ncredential=\"c\"");
        assert!(text.starts_with("/q/mergeberg.toml:1: [catalog.a] 'token':"), "{text}");
        assert_eq!(next, "keep one of the two");
        let (text, _) = refused("[catalog.a]\ntype=\"sql\"\nuri=\"x\"\nwarehouse=\"w\"\ntoken=\"hunter2\"");
        assert_eq!(text, "/q/mergeberg.toml:1: [catalog.a] has 'token', which only a REST catalog has");
        let (text, next) = refused("[catalog.a]\ntype=\"sql\"\nuri=\"http://h\"\nwarehouse=\"w\"");
        assert!(text.ends_with("'uri' is neither a SQLite nor a PostgreSQL database"), "{text}");
        assert!(next.contains("type = \"rest\""), "{next}");
    }

    #[test]
    fn a_postgresql_catalog_has_an_address_and_a_password() {
        let text = "[catalog.lake]\ntype = \"sql\"\nwarehouse = \"/w\"\nuri = ";
        let place = |uri: &str, set: &[(&str, &str)]| {
            let config = parse(&format!("{text}{uri:?}\n"), set).unwrap();
            config.catalog(None).unwrap().sql().unwrap().database.clone()
        };
        let plain = place("postgresql://ann@h/lake", &[]);
        assert_eq!(plain.to_string(), "postgresql://ann@h:5432/lake");
        assert_eq!(place("jdbc:postgresql://h/lake?user=ann", &[]).to_string(), plain.to_string());
        let secret = place("postgresql://ann@h/lake", &[("MERGEBERG_CATALOG_LAKE_PASSWORD", "hunter2")]);
        assert_ne!(secret, plain);
        assert!(!format!("{secret:?}").contains("hunter2"));

        let refused = |rest: &str| parse(&format!("{text}{rest}"), &[]).unwrap_err();
        let error = refused("\"postgresql://ann:hunter2@h/lake?ssl=true\"");
        assert!(
            error.to_string().ends_with("[catalog.lake] 'uri': its parameter 'ssl' is not known"),
            "{error}"
        );
        assert!(error.next().contains("sslmode=verify-full"), "{}", error.next());
        let error = refused("\"catalog.db\"\npassword = \"hunter2\"");
        assert!(error.to_string().ends_with("'password', which a SQLite file does not take"), "{error}");
        assert!(!format!("{error:?}").contains("hunter2"));
        let rest = "[catalog.a]\ntype = \"rest\"\nuri = \"http://h\"\npassword = \"hunter2\"";
        let error = parse(rest, &[]).unwrap_err();
        assert!(error.to_string().contains("only a SQL catalog on a server has"), "{error}");
    }

    #[test]
    fn catalog_uris_of_other_tools_are_read() {
        for (uri, path) in [
            ("catalog.db", "catalog.db"),
            ("/srv/c.db", "/srv/c.db"),
            ("sqlite:c.db", "c.db"),
            ("sqlite:/srv/c.db", "/srv/c.db"),
            ("sqlite:///srv/c.db", "/srv/c.db"),
            ("sqlite:////srv/c.db", "/srv/c.db"),
            ("jdbc:sqlite:/srv/c.db", "/srv/c.db"),
            ("sqlite:////srv/c.db?mode=rw", "/srv/c.db"),
        ] {
            assert_eq!(sqlite_path(uri), Some(PathBuf::from(path)), "{uri}");
        }
        for uri in ["postgresql://h/db", "jdbc:postgresql://h/db", "sqlite://host/c.db", "", "sqlite:///"] {
            assert_eq!(sqlite_path(uri), None, "{uri}");
        }
    }
}
