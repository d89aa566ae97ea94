//! Stores that are no S3, as processes of their own: fake-gcs-server for GCS, Azurite for Azure Blob Storage.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use mergeberg::table::storage::StorageProperties;
use reqsign_azure_storage::{Credential, RequestSigner};
use reqsign_core::{Context, SignRequest};
use serde_json::{Value, json};

use super::rest::{UNTIL_END_OF_INPUT, line_of};
use super::s3_server::{BUCKET, storage};

/// Set by `scripts/object-stores`.
const GCS_SERVER: &str = "MERGEBERG_GCS_SERVER";
const AZURE_SERVER: &str = "MERGEBERG_AZURE_SERVER";
/// The account that Azurite has, with the key that its documentation publishes.
const ACCOUNT: &str = "devstoreaccount1";
const ACCOUNT_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

pub struct ObjectServer {
    shell: Child,
    pub warehouse: String,
    /// Iceberg's properties for it.
    pub properties: BTreeMap<String, String>,
}

impl ObjectServer {
    /// With an empty bucket; `None`, said so, without the program: `scripts/test --quick` brings none.
    pub async fn gcs() -> Option<Self> {
        // It does not tell which port it took: one that is free now.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let endpoint = format!("http://127.0.0.1:{port}");
        let arguments =
            ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", &port, "-public-host"];
        let host = format!("127.0.0.1:{port}");
        let arguments: Vec<&str> = arguments.into_iter().chain([host.as_str()]).collect();
        let (shell, _) =
            start(GCS_SERVER, &arguments, |line| line.contains("server started").then(String::new))?;
        let made = reqwest::Client::new()
            .post(format!("{endpoint}/storage/v1/b?project=tests"))
            .body(json!({ "name": BUCKET }).to_string())
            .send()
            .await
            .unwrap();
        assert!(made.status().is_success(), "{made:?}");
        let properties = [("gcs.service.host", endpoint.as_str()), ("gcs.no-auth", "true")];
        Some(Self { shell, warehouse: format!("gs://{BUCKET}/warehouse"), properties: owned(&properties) })
    }

    pub async fn azure(folder: &Path) -> Option<Self> {
        let place = folder.display().to_string();
        let arguments =
            ["--blobHost", "127.0.0.1", "--blobPort", "0", "--location", &place, "--disableTelemetry"];
        let (shell, endpoint) = start(AZURE_SERVER, &arguments, |line| {
            Some(line.split_once("listens on ")?.1.trim().to_owned())
        })?;
        let endpoint = format!("{endpoint}/{ACCOUNT}");
        make_container(&endpoint).await;
        let properties = [("adls.endpoint", endpoint.as_str()), ("adls.account-key", ACCOUNT_KEY)];
        let warehouse = format!("wasb://{BUCKET}@{ACCOUNT}.blob.core.windows.net/warehouse");
        Some(Self { shell, warehouse, properties: owned(&properties) })
    }

    pub fn storage(&self) -> StorageProperties {
        storage(&self.properties)
    }

    /// The catalog of a House over GCS, as a job of the engines names it.
    pub fn catalog_of(&self, folder: &Path) -> Value {
        let mut catalog = json!(self.properties);
        catalog["uri"] = json!(format!("sqlite:///{}", folder.join("catalog.db").display()));
        catalog["warehouse"] = json!(self.warehouse);
        catalog["name"] = json!("test");
        // Without one PyIceberg looks for the machine's own.
        catalog["gcs.oauth2.token"] = json!("anybody");
        catalog["gcs.oauth2.token-expires-at"] = json!("4102444800000");
        catalog
    }

    /// The lines of `mergeberg.toml` for a SQL catalog on it.
    pub fn catalog_lines(&self) -> String {
        let lines = self.properties.iter().map(|(key, value)| format!("{key} = {}\n", json!(value)));
        let lines: String = lines.collect();
        format!("type = \"sql\"\nuri = \"catalog.db\"\nwarehouse = \"{}\"\n{lines}", self.warehouse)
    }
}

impl Drop for ObjectServer {
    fn drop(&mut self) {
        // Its input ends, and so does it.
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

fn owned(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// The process, with what `ready` found in one of its lines.
fn start(
    program: &str,
    arguments: &[&str],
    ready: impl Fn(&str) -> Option<String>,
) -> Option<(Child, String)> {
    let Some(path) = std::env::var_os(program) else {
        eprintln!("skipped: {program} is unset, so there is no such server (scripts/test sets it)");
        return None;
    };
    let mut shell = Command::new("sh")
        // Both of its voices are one, since the two programs use different ones.
        .args(["-c", &format!("{{ {UNTIL_END_OF_INPUT}; }} 2>&1"), "sh"])
        .arg(path)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let found = line_of(shell.stdout.take().unwrap(), program, ready);
    Some((shell, found))
}

async fn make_container(endpoint: &str) {
    let request = http::Request::put(format!("{endpoint}/{BUCKET}?restype=container"))
        .header("x-ms-version", "2023-11-03")
        .header("content-length", "0");
    let (mut parts, ()) = request.body(()).unwrap().into_parts();
    let credential =
        Credential::SharedKey { account_name: ACCOUNT.to_owned(), account_key: ACCOUNT_KEY.to_owned() };
    RequestSigner::new().sign_request(&Context::new(), &mut parts, Some(&credential), None).await.unwrap();
    let made = reqwest::Client::new().put(parts.uri.to_string()).headers(parts.headers).send().await.unwrap();
    let status = made.status();
    assert!(status.is_success(), "{status}: {}", made.text().await.unwrap());
}
