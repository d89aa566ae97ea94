//! The Iceberg project's own REST server (`scripts/rest-server`) as a process of its own, over its catalog on SQLite.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::support::events::table_name;

/// Set by `scripts/rest-server`: the folder of jars.
const JARS: &str = "MERGEBERG_REST_SERVER";
const MAIN: &str = "org.apache.iceberg.rest.RESTCatalogServer";
/// The server says on which port it listens in a line with these words.
const LISTENS: &str = "ServerConnector";
/// Ends the server with its input, so with this process too, however that ends.
const UNTIL_END_OF_INPUT: &str = "\"$@\" & server=$!; cat >/dev/null; kill $server; wait $server";

pub struct RestServer {
    shell: Child,
    uri: String,
}

impl RestServer {
    pub fn is_there() -> bool {
        let found = jars().is_some();
        if !found {
            eprintln!(
                "left out: {JARS} is unset, so there is no REST server (scripts/rest-server brings it)"
            );
        }
        found
    }

    pub fn start(folder: &Path) -> anyhow::Result<Self> {
        let jars = PathBuf::from(jars().context(JARS)?);
        let mut shell = Command::new("sh")
            .args(["-c", UNTIL_END_OF_INPUT, "sh", "java", "-Xmx512m", "-cp"])
            .arg(jars.join("*"))
            .arg(MAIN)
            .env("CATALOG_REST_PORT", "0")
            .env("CATALOG_URI", format!("jdbc:sqlite:{}", folder.join("server.db").display()))
            // SQLite has one writer: with more, some would be answered that the file is locked.
            .env("CATALOG_CLIENTS", "1")
            .env("CATALOG_WAREHOUSE", format!("file://{}", folder.join("warehouse").display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("sh")?;
        let mut log = BufReader::new(shell.stderr.take().context("no log")?).lines();
        let mut told = Vec::new();
        let port = loop {
            let Some(line) = log.next() else { bail!("the REST server ended: {}", told.join("\n")) };
            let line = line?;
            if let Some(port) = port_in(&line) {
                break port;
            }
            told.push(line);
        };
        // Its log is read on, or it would wait for a reader.
        std::thread::spawn(move || log.for_each(drop));
        Ok(Self { shell, uri: format!("http://127.0.0.1:{port}") })
    }

    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The table of events, as [`crate::support::events::definition`] has it.
    pub async fn create_table(&self) -> anyhow::Result<()> {
        let name = table_name()?;
        let column = |id: i32, name: &str, kind: &str, required: bool| json!({ "id": id, "name": name, "type": kind, "required": required });
        let table = json!({
            "name": name.name,
            "schema": { "type": "struct", "schema-id": 0, "fields": [
                column(1, "event_id", "long", true),
                column(2, "event_date", "date", true),
                column(3, "status", "string", false),
                column(4, "amount", "decimal(12, 2)", false),
            ] },
            "partition-spec": { "spec-id": 0, "fields": [
                { "source-id": 2, "field-id": 1000, "name": "event_date", "transform": "identity" },
            ] },
            "properties": { "format-version": "2" },
        });
        self.post("namespaces", &json!({ "namespace": name.namespace })).await?;
        self.post(&format!("namespaces/{}/tables", name.namespace.join("")), &table).await
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<()> {
        let url = format!("{}/v1/{path}", self.uri);
        let request = reqwest::Client::new().post(&url).header("content-type", "application/json");
        let answer = request.body(body.to_string()).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        ensure!(status.is_success(), "{url}: {status} {text}");
        Ok(())
    }
}

impl Drop for RestServer {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

fn jars() -> Option<OsString> {
    std::env::var_os(JARS)
}

/// `Started ServerConnector@...{HTTP/1.1, (http/1.1)}{0.0.0.0:35809}`.
fn port_in(line: &str) -> Option<u16> {
    line.contains(LISTENS).then_some(())?;
    line.trim_end().strip_suffix('}')?.rsplit_once(':')?.1.parse().ok()
}
