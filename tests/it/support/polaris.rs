//! An Apache Polaris server as a process of its own. One serves all tests of a run, in memory; each test has a
//! catalog of its own in it, over a local warehouse, and principals with the privileges that it grants.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use mergeberg::ledger::Ledger;
use mergeberg::secret::Secret;
use mergeberg::table::create::TableDefinition;
use mergeberg::table::rest_catalog::{RestCatalog, RestSettings};
use mergeberg_kernel::ids::TableName;
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::child::real_now;
use super::fault_server::clock_of_now;
use super::rest::{UNTIL_END_OF_INPUT, create_request, encoded, line_of};
use super::{House, ORDERS, order};

/// The folder of a Polaris server's `quarkus-run.jar`: `server` of a binary distribution.
const SERVER: &str = "MERGEBERG_POLARIS";
/// Polaris wants Java 21 or later; without this the `java` of the path runs it.
const JAVA_HOME: &str = "JAVA_HOME";
/// Whom the server knows when it starts.
const ROOT: &str = "root:not-so-secret";
/// Every role of the principal. Polaris knows no scope `catalog`, which clients ask for by themselves.
pub const SCOPE: &str = "PRINCIPAL_ROLE:ALL";
/// Between the levels of a namespace.
const SEPARATOR: &str = "%1F";
const LISTENS: &str = "Listening on: ";

/// What a principal may do in a catalog, or with one of its tables.
pub enum Grant<'a> {
    Catalog(&'a str),
    Table(&'a TableName, &'a str),
}

/// One catalog of the server, and its root.
pub struct Polaris {
    name: String,
    uri: String,
    http: reqwest::Client,
    token: String,
}

impl Polaris {
    /// A new catalog over a folder; `None`, said so, without a server.
    pub async fn over(folder: &Path) -> Option<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let uri = server()?;
        let name = format!("lake-{}", MADE.fetch_add(1, Ordering::SeqCst));
        let mut polaris = Self { name, uri, http: reqwest::Client::new(), token: String::new() };
        polaris.token = polaris.token_of(ROOT).await;
        let warehouse = format!("file://{}", folder.join("warehouse").display());
        let catalog = json!({ "catalog": {
            "type": "INTERNAL",
            "name": polaris.name,
            "properties": { "default-base-location": warehouse },
            "storageConfigInfo": { "storageType": "FILE", "allowedLocations": [warehouse] },
        } });
        polaris.manage(Method::POST, "catalogs", &catalog).await;
        Some(polaris)
    }

    /// Of the catalog API.
    pub fn uri(&self) -> String {
        format!("{}/api/catalog", self.uri)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// For a principal, `ID:SECRET`.
    pub fn settings(&self, credential: &str) -> RestSettings {
        RestSettings {
            warehouse: Some(self.name.clone()),
            credential: Some(Secret::new(credential)),
            scope: Some(SCOPE.to_owned()),
            ..RestSettings::at("test", &self.uri())
        }
    }

    pub async fn client_of(&self, credential: &str) -> RestCatalog {
        RestCatalog::open(&self.settings(credential), clock_of_now()).await.unwrap()
    }

    /// A client that may do anything, with nothing in memory.
    pub async fn client(&self) -> RestCatalog {
        self.client_of(ROOT).await
    }

    pub async fn create_namespace(&self, levels: &[String]) {
        let path = format!("catalog/v1/{}/namespaces", self.name);
        self.send(Method::POST, &path, &json!({ "namespace": levels })).await;
    }

    /// The namespace has to exist.
    pub async fn create_table(&self, name: &TableName, definition: &TableDefinition) {
        let namespace = name.namespace.iter().map(|level| encoded(level)).collect::<Vec<_>>().join(SEPARATOR);
        let path = format!("catalog/v1/{}/namespaces/{namespace}/tables", self.name);
        self.send(Method::POST, &path, &create_request(name, definition)).await;
    }

    /// A new principal that may do this and nothing else; its credential, `ID:SECRET`.
    pub async fn principal(&self, name: &str, grants: &[Grant<'_>]) -> String {
        // Principals are the server's, not the catalog's.
        let name = format!("{}-{name}", self.name);
        let made = self.manage(Method::POST, "principals", &json!({ "principal": { "name": name } })).await;
        let role = json!({ "principalRole": { "name": name } });
        self.manage(Method::POST, "principal-roles", &role).await;
        self.manage(Method::PUT, &format!("principals/{name}/principal-roles"), &role).await;
        let role = json!({ "catalogRole": { "name": name } });
        let in_catalog = format!("catalogs/{}/catalog-roles", self.name);
        self.manage(Method::POST, &in_catalog, &role).await;
        self.manage(Method::PUT, &format!("principal-roles/{name}/catalog-roles/{}", self.name), &role).await;
        for grant in grants {
            let grant = match grant {
                Grant::Catalog(privilege) => json!({ "type": "catalog", "privilege": privilege }),
                Grant::Table(table, privilege) => json!({
                    "type": "table",
                    "namespace": table.namespace,
                    "tableName": table.name,
                    "privilege": privilege,
                }),
            };
            let path = format!("{in_catalog}/{name}/grants");
            self.manage(Method::PUT, &path, &json!({ "grant": grant })).await;
        }
        let part = |key: &str| made["credentials"][key].as_str().unwrap().to_owned();
        format!("{}:{}", part("clientId"), part("clientSecret"))
    }

    async fn token_of(&self, credential: &str) -> String {
        let (id, secret) = credential.split_once(':').unwrap();
        let form = [
            ("grant_type", "client_credentials"),
            ("client_id", id),
            ("client_secret", secret),
            ("scope", SCOPE),
        ];
        let url = format!("{}/v1/oauth/tokens", self.uri());
        let text = self.http.post(&url).form(&form).send().await.unwrap().text().await.unwrap();
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["access_token"].as_str().unwrap_or_else(|| panic!("{url}: {text}")).to_owned()
    }

    async fn manage(&self, method: Method, path: &str, body: &Value) -> Value {
        self.send(method, &format!("management/v1/{path}"), body).await
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> Value {
        let url = format!("{}/api/{path}", self.uri);
        let request = self.http.request(method, &url).bearer_auth(&self.token);
        let request = request.header("content-type", "application/json").body(body.to_string());
        let answer = request.send().await.unwrap();
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert!(status.is_success(), "{url} {body}: {status} {text}");
        if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() }
    }
}

/// The address of the one server, which is started by the first who asks and ends with this process.
fn server() -> Option<String> {
    static RUNNING: OnceLock<Option<(Child, String)>> = OnceLock::new();
    let running = RUNNING.get_or_init(|| {
        let Some(folder) = std::env::var_os(SERVER) else {
            eprintln!("skipped: {SERVER} is unset, so there is no Polaris server (CONTRIBUTING.md says how to have one)");
            return None;
        };
        Some(start(&PathBuf::from(folder).join("quarkus-run.jar")))
    });
    running.as_ref().map(|(_, uri)| uri.clone())
}

fn start(jar: &Path) -> (Child, String) {
    let java =
        std::env::var_os(JAVA_HOME).map_or_else(|| "java".into(), |h| PathBuf::from(h).join("bin/java"));
    let mut shell = Command::new("sh")
        .args(["-c", UNTIL_END_OF_INPUT, "sh"])
        .arg(java)
        .args(["-XX:TieredStopAtLevel=1", "-Xmx512m"])
        .args(["-Dquarkus.http.host=127.0.0.1", "-Dquarkus.http.port=0"])
        .args(["-Dquarkus.management.host=127.0.0.1", "-Dquarkus.management.port=0"])
        .args(["-Dquarkus.log.file.enabled=false", "-Dquarkus.http.access-log.enabled=false"])
        // Local files, which Polaris takes only from those who say that they know what they do.
        .arg("-Dpolaris.features.\"SUPPORTED_CATALOG_STORAGE_TYPES\"=[\"FILE\"]")
        .arg("-Dpolaris.features.\"ALLOW_INSECURE_STORAGE_TYPES\"=true")
        .args(["-Dpolaris.readiness.ignore-severe-issues=true", "-Dpolaris.persistence.type=in-memory"])
        .arg("-jar")
        .arg(jar)
        .env("POLARIS_BOOTSTRAP_CREDENTIALS", format!("POLARIS,{}", ROOT.replace(':', ",")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let uri = line_of(shell.stdout.take().unwrap(), "the Polaris server", address_in);
    (shell, uri)
}

/// `... started in 3.054s. Listening on: http://127.0.0.1:18181. Management interface listening on ...`.
fn address_in(line: &str) -> Option<String> {
    let rest = line.split_once(LISTENS)?.1;
    rest.split(". ").next().map(str::to_owned)
}

impl House<RestCatalog> {
    /// ORD as [`House::orders`] in a catalog of Polaris, on the real clock. Everything is done by a principal that
    /// has what a queue needs, and no more.
    pub async fn over_polaris(policy: &str) -> Option<(Self, Polaris, String)> {
        let dir = TempDir::new().unwrap();
        let polaris = Polaris::over(dir.path()).await?;
        let table: TableName = ORDERS.parse().unwrap();
        polaris.create_namespace(&table.namespace).await;
        polaris.create_table(&table, &House::orders_definition()).await;
        let grants = [
            Grant::Catalog("NAMESPACE_LIST"),
            Grant::Catalog("TABLE_LIST"),
            Grant::Table(&table, "TABLE_WRITE_DATA"),
        ];
        let queue = polaris.principal("queue", &grants).await;
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), policy).unwrap();
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let catalog = Arc::new(polaris.client_of(&queue).await);
        let clock = Arc::new(AtomicI64::new(real_now()));
        let house = Self::assemble(dir, catalog, ledger, clock, table);
        house.append("main", &[order(1, 20), order(2, 20)]).await;
        house.append("main", &[order(3, 21)]).await;
        Some((house, polaris, queue))
    }
}
