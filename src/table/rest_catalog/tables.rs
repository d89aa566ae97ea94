//! Tables as the server tells them: one by name, and the list of all.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use mergeberg_kernel::ids::TableName;
use reqwest::{StatusCode, Url};
use serde::de::DeserializeOwned;

use super::super::catalog::CatalogError;
use super::super::loaded::LoadedTable;
use super::super::storage;
use super::grants::Told;
use super::server::refused;
use super::transport::Reply;
use super::wire::{NamespacePage, TablePage, TableReply};
use super::{Access, RestCatalog};

/// Who plans scans, in a table's `config`.
const SCAN_PLANNING: &str = "scan-planning-mode";
const PLANNED_BY_SERVER: &str = "server";
/// Names asked for at a time; a server may give fewer or more.
const PAGE_SIZE: &str = "1000";
/// Pages of one list.
const MAX_PAGES: usize = 10_000;
/// Namespaces of one catalog, at all levels.
const MAX_NAMESPACES: usize = 100_000;

/// A table as last read.
#[derive(Clone)]
pub(super) struct Held {
    pub table: Arc<LoadedTable>,
    pub etag: Option<String>,
    digest: u64,
}

/// A table that was read, beside what was known of it.
pub(super) enum Newer {
    Read(Arc<LoadedTable>),
    /// What was read is older than this.
    Behind(Arc<LoadedTable>),
}

impl Held {
    /// Is `other` a state that this one came after? Each metadata file names those before it.
    pub fn is_newer_than(&self, other: &LoadedTable) -> bool {
        self.table.facts.uuid == other.facts.uuid
            && self.table.metadata_location != other.metadata_location
            && self.table.document.names_older_file(&other.metadata_location)
    }
}

/// The table in a reply. What is byte for byte as it is known is not parsed again. CPU work.
pub(super) fn read_reply(
    name: &TableName,
    reply: &Reply,
    known: Option<Held>,
    access: &Access,
) -> Result<Held, CatalogError> {
    let TableReply { metadata_location, metadata, config, storage_credentials } =
        serde_json::from_slice(&reply.body).map_err(|error| {
            CatalogError::Unavailable(format!("the answer for {name} is no table: {error}"))
        })?;
    let planning = config.as_ref().and_then(|config| config.get(SCAN_PLANNING)?.as_deref());
    if planning == Some(PLANNED_BY_SERVER) {
        let message = format!(
            "its catalog wants to plan every scan itself ({SCAN_PLANNING}), which this release does not do"
        );
        return Err(CatalogError::Unsupported { table: name.clone(), message });
    }
    access.grants.take(Told { config, credentials: storage_credentials });
    let json = metadata.get();
    let mut hasher = DefaultHasher::new();
    (json, &metadata_location).hash(&mut hasher);
    let digest = hasher.finish();
    let etag = reply.etag.clone();
    if let Some(known) = known
        && known.digest == digest
    {
        return Ok(Held { etag: etag.or(known.etag), ..known });
    }
    // Servers that name no file: the content stands for it.
    let location = metadata_location.unwrap_or_else(|| format!("metadata of {name}, {digest:016x}"));
    let table = LoadedTable::parse(name, &location, json.as_bytes(), access.file_io.clone())?;
    storage::require_known(&table.facts.location)
        .map_err(|error| CatalogError::Unsupported { table: name.clone(), message: error.to_string() })?;
    Ok(Held { table: Arc::new(table), etag, digest })
}

impl RestCatalog {
    /// All tables, by name. Names with a dot cannot be written in ours and are left out.
    pub(super) async fn all_tables(&self) -> Result<Vec<TableName>, CatalogError> {
        let mut found = BTreeSet::new();
        let mut seen: BTreeSet<Vec<String>> = BTreeSet::new();
        let mut open = VecDeque::from([Vec::new()]);
        while let Some(parent) = open.pop_front() {
            for namespace in self.namespaces_below(&parent).await? {
                if seen.len() >= MAX_NAMESPACES {
                    return Err(CatalogError::Unavailable(format!(
                        "the catalog has more than {MAX_NAMESPACES} namespaces; name the table"
                    )));
                }
                if seen.insert(namespace.clone()) {
                    open.push_back(namespace);
                }
            }
            if !parent.is_empty() {
                found.extend(self.tables_in(&parent).await?);
            }
        }
        Ok(found.into_iter().collect())
    }

    async fn namespaces_below(&self, parent: &[String]) -> Result<Vec<Vec<String>>, CatalogError> {
        let url = self.server.address(self.server.paths.namespaces(parent))?;
        let mut all = Vec::new();
        self.pages(url, |page: NamespacePage| {
            // Below: some servers answer with the parent itself.
            all.extend(page.namespaces.into_iter().filter(|n| n.len() > parent.len()));
            page.next_page_token
        })
        .await?;
        Ok(all)
    }

    async fn tables_in(&self, namespace: &[String]) -> Result<Vec<TableName>, CatalogError> {
        let url = self.server.address(self.server.paths.tables(namespace))?;
        let mut all = Vec::new();
        self.pages(url, |page: TablePage| {
            for identifier in page.identifiers {
                let name = TableName { namespace: identifier.namespace, name: identifier.name };
                if name.to_string().parse() == Ok(name.clone()) {
                    all.push(name);
                } else {
                    tracing::debug!(namespace = ?name.namespace, name = name.name, "a name that cannot be written");
                }
            }
            page.next_page_token
        })
        .await?;
        Ok(all)
    }

    /// Every page of a list; none when what it lists is gone.
    async fn pages<T: DeserializeOwned>(
        &self,
        url: Url,
        mut take: impl FnMut(T) -> Option<String>,
    ) -> Result<(), CatalogError> {
        // An empty token says that pages are understood (specification, `PageToken`).
        let mut token = String::new();
        for _ in 0..MAX_PAGES {
            let mut page = url.clone();
            page.query_pairs_mut().append_pair("pageToken", &token).append_pair("pageSize", PAGE_SIZE);
            let reply =
                self.server.http.get(page, &[], None).await.map_err(|f| self.server.unanswered(&f))?;
            match reply.status {
                StatusCode::OK => {}
                StatusCode::NOT_FOUND if reply.error().is_some_and(|e| e.kind.starts_with("NoSuch")) => {
                    return Ok(());
                }
                _ => return Err(refused(&self.server.uri, &reply)),
            }
            let read = serde_json::from_slice(&reply.body).map_err(|error| {
                CatalogError::Unavailable(format!("{} answers no list: {error}", self.server.uri))
            })?;
            match take(read).filter(|next| !next.is_empty()) {
                None => return Ok(()),
                Some(next) if next == token => break,
                Some(next) => token = next,
            }
        }
        Err(CatalogError::Unavailable(format!("{} gives a list that does not end", self.server.uri)))
    }
}
