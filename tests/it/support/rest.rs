//! The Iceberg project's own REST server (`RESTCatalogServer` of its test fixtures) as a process of its own, over
//! its `JdbcCatalog` on SQLite or PostgreSQL and a local warehouse.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use mergeberg::ledger::Ledger;
use mergeberg::table::create::TableDefinition;
use mergeberg::table::rest_catalog::{RestCatalog, RestSettings};
use mergeberg_kernel::ids::TableName;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::child::real_now;
use super::fault_server::clock_of_now;
use super::{House, ORDERS, order};

/// Set by `scripts/rest-server`: the folder of jars.
const JARS: &str = "MERGEBERG_REST_SERVER";
const MAIN: &str = "org.apache.iceberg.rest.RESTCatalogServer";
/// The server says on which port it listens in a line with these words.
const LISTENS: &str = "ServerConnector";
/// Between the levels of a namespace, as its configuration says.
const SEPARATOR: &str = "%2E";
/// Ends the server with its input, so with this process too, however that ends.
pub const UNTIL_END_OF_INPUT: &str = "\"$@\" & server=$!; cat >/dev/null; kill $server; wait $server";

/// What `found` makes of a line of a server's log. The log is read on, or the server would wait for a reader.
pub fn line_of<T>(log: impl Read + Send + 'static, server: &str, found: impl Fn(&str) -> Option<T>) -> T {
    let mut log = BufReader::new(log).lines();
    let mut told = Vec::new();
    let made = loop {
        let Some(line) = log.next() else { panic!("{server} ended: {}", told.join("\n")) };
        let line = line.unwrap();
        if let Some(made) = found(&line) {
            break made;
        }
        told.push(line);
    };
    std::thread::spawn(move || log.for_each(drop));
    made
}

pub struct RestServer {
    shell: Child,
    uri: String,
    http: reqwest::Client,
}

impl RestServer {
    /// The name of its catalog in the catalog's own tables.
    pub const CATALOG: &str = "rest_backend";

    /// A server over a folder; `None`, said so, without its jars: `scripts/test --quick` brings none.
    pub fn start(folder: &Path) -> Option<Self> {
        let database = format!("jdbc:sqlite:{}", folder.join("server.db").display());
        // SQLite has one writer: with more, some would be answered that the file is locked.
        Self::start_with(folder, &[("CATALOG_URI", &database), ("CATALOG_CLIENTS", "1")])
    }

    /// Over a PostgreSQL database, named by its address; `version` is that of the catalog's tables (V0, V1).
    pub fn on_postgres(folder: &Path, url: &str, version: &str) -> Option<Self> {
        let (server, database) = url.strip_prefix("postgresql://")?.rsplit_once('/')?;
        let (user, host) = server.split_once('@')?;
        let database = format!("jdbc:postgresql://{host}/{database}");
        let settings = [
            ("CATALOG_URI", database.as_str()),
            ("CATALOG_JDBC_USER", user),
            ("CATALOG_JDBC_SCHEMA__VERSION", version),
        ];
        Self::start_with(folder, &settings)
    }

    fn start_with(folder: &Path, settings: &[(&str, &str)]) -> Option<Self> {
        let Some(jars) = std::env::var_os(JARS) else {
            eprintln!("skipped: {JARS} is unset, so there is no REST server (scripts/test sets it)");
            return None;
        };
        let every_jar = PathBuf::from(jars).join("*");
        let mut shell = Command::new("sh")
            .args(["-c", UNTIL_END_OF_INPUT, "sh", "java", "-XX:TieredStopAtLevel=1", "-Xmx256m", "-cp"])
            .arg(every_jar)
            .arg(MAIN)
            // Java writes names of files in the letters of its locale.
            .env("LC_ALL", "C.UTF-8")
            .env("CATALOG_REST_PORT", "0")
            .envs(settings.iter().copied())
            .env("CATALOG_WAREHOUSE", format!("file://{}", folder.join("warehouse").display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let port = line_of(shell.stderr.take().unwrap(), "the REST server", port_in);
        Some(Self { shell, uri: format!("http://127.0.0.1:{port}"), http: reqwest::Client::new() })
    }

    pub fn uri(&self) -> &str {
        &self.uri
    }

    pub fn settings(&self) -> RestSettings {
        RestSettings::at("test", &self.uri)
    }

    /// Another client of it, with nothing in memory.
    pub async fn client(&self) -> RestCatalog {
        RestCatalog::open(&self.settings(), clock_of_now()).await.unwrap()
    }

    pub async fn create_namespace(&self, levels: &[String]) {
        let body = json!({ "namespace": levels });
        self.post("namespaces", &body).await;
    }

    /// The namespace has to exist.
    pub async fn create_table(&self, name: &TableName, definition: &TableDefinition) {
        let namespace = name.namespace.iter().map(|level| encoded(level)).collect::<Vec<_>>().join(SEPARATOR);
        self.post(&format!("namespaces/{namespace}/tables"), &create_request(name, definition)).await;
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let url = format!("{}/v1/{path}", self.uri);
        let request = self.http.post(&url).header("content-type", "application/json").body(body.to_string());
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "{url} {body}: {status} {text}");
        serde_json::from_str(&text).unwrap()
    }
}

impl Drop for RestServer {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// `Started ServerConnector@...{HTTP/1.1, (http/1.1)}{0.0.0.0:35809}`.
fn port_in(line: &str) -> Option<u16> {
    line.contains(LISTENS).then_some(())?;
    line.trim_end().strip_suffix('}')?.rsplit_once(':')?.1.parse().ok()
}

/// Letters and digits as they are, every other byte as `%XX`.
pub fn encoded(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// `CreateTableRequest`.
pub fn create_request(name: &TableName, definition: &TableDefinition) -> Value {
    let id_of = |column: &str| definition.columns.iter().position(|c| c.name == column).unwrap() + 1;
    let fields: Vec<Value> = definition
        .columns
        .iter()
        .zip(1..)
        .map(|(c, id)| json!({ "id": id, "name": c.name, "type": c.type_name, "required": c.required }))
        .collect();
    let partition: Vec<Value> = definition
        .partition
        .iter()
        .zip(1000..)
        .map(|((column, transform), id)| {
            json!({ "source-id": id_of(column), "field-id": id, "name": column, "transform": transform })
        })
        .collect();
    let mut properties = definition.properties.clone();
    properties.insert("format-version".to_owned(), definition.format_version.unwrap_or(2).to_string());
    json!({
        "name": name.name,
        "schema": { "type": "struct", "schema-id": 0, "fields": fields },
        "partition-spec": { "spec-id": 0, "fields": partition },
        "properties": properties,
    })
}

impl House<RestCatalog> {
    /// ORD as [`House::orders`], behind the server, on the real clock: the server has one of its own.
    pub async fn over_rest(policy: &str) -> Option<(Self, RestServer)> {
        let (house, server) = Self::empty_over_rest(policy).await?;
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        Some((house, server))
    }

    pub async fn empty_over_rest(policy: &str) -> Option<(Self, RestServer)> {
        let dir = TempDir::new().unwrap();
        let server = RestServer::start(dir.path())?;
        let table: TableName = ORDERS.parse().unwrap();
        server.create_namespace(&table.namespace).await;
        server.create_table(&table, &House::orders_definition()).await;
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), policy).unwrap();
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let catalog = Arc::new(server.client().await);
        let clock = Arc::new(AtomicI64::new(real_now()));
        Some((Self::assemble(dir, catalog, ledger, clock, table), server))
    }
}
