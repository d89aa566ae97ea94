//! A REST catalog that misbehaves on order, and is honest otherwise: the suite of all catalogs runs over it as
//! over the Iceberg project's own server (`tests/it/catalogs.rs`).

pub mod http;
mod keys;
mod tables;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::future::BoxFuture;
use mergeberg::table::catalog::Clock;
use mergeberg::table::create::TableDefinition;
use mergeberg::table::rest_catalog::{Patience, RestCatalog, RestSettings};
use mergeberg_kernel::ids::TableName;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::child::real_now;
use super::rest::create_request;
use super::s3_server::Keys;
use http::{Cut, Reply, Request};
pub use keys::KeysAre;
use keys::KnownKey;
use tables::Tables;

/// What the server is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Config,
    Token,
    List,
    Load,
    /// The credentials of a table alone.
    Credentials,
    /// A signature for a request to a store.
    Sign,
    /// A commit that sets or adds something under a name that must not exist yet.
    Staging,
    /// Any other commit that sets a ref.
    Landing,
    /// A commit that only removes.
    Removal,
    /// A commit to several tables.
    Transaction,
    /// Making namespaces and tables: the tests' own.
    Making,
}

/// What the server does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Do {
    /// Acts on it and answers this status instead.
    ActThenSay(u16),
    /// Acts on it and closes the connection.
    ActThenClose,
    /// Acts on it and breaks off in the middle of the reply.
    ActThenCut,
    /// As a proxy that sends twice what it got once, and passes on the second answer.
    ActTwice,
    /// Does nothing and answers this.
    Say(u16),
    /// As `Say`, with `Retry-After` in seconds.
    SayLater(u16, u32),
    /// Says yes with the table as it is, and does nothing.
    SayYes,
    /// Closes the connection without a look.
    Close,
    /// Answers this, and acts on it when the test says so ([`FaultServer::act_late`]).
    SayThenActLate(u16),
    /// Answers with the state of so many commits ago.
    SayOld(usize),
    /// Of a commit to several tables acts on the first, and answers this: a server for which it is a loop.
    ActOnOneThenSay(u16),
    /// Acts on it without a look at the requirements about this ref.
    Ignore(&'static str),
}

/// How the server wants to be spoken to.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    pub prefix: Option<&'static str>,
    /// `namespace-separator`, as the configuration gives it.
    pub separator: Option<&'static str>,
    pub idempotency_keys: bool,
    /// What it makes of them, having announced them.
    pub keys: KeysAre,
    /// Clients by id and secret; without one anybody is served.
    pub client: Option<(&'static str, &'static str)>,
    /// Of a token, in seconds.
    pub token_life_s: Option<i64>,
    /// No ETag.
    pub no_etags: bool,
    /// Names in one page of a list.
    pub page: Option<usize>,
    /// Where tables go; `None`: the folder.
    pub warehouse: Option<String>,
    /// Further `overrides` of its configuration.
    pub overrides: BTreeMap<String, String>,
    /// It gives credentials of a table alone.
    pub offers_credentials: bool,
    /// Signs requests to S3 with these keys.
    pub signs_with: Option<Keys>,
    /// Lists what it offers, and commits to several tables are not on the list.
    pub one_table_at_a_time: bool,
}

/// What a load says about access to a table's files.
#[derive(Clone, Default)]
pub struct Access {
    /// The table's `config`.
    pub config: BTreeMap<String, String>,
    /// `storage-credentials`: prefix and config.
    pub credentials: Vec<(String, BTreeMap<String, String>)>,
}

impl Access {
    fn credentials(&self) -> Vec<Value> {
        self.credentials
            .iter()
            .map(|(prefix, config)| json!({ "prefix": prefix, "config": config }))
            .collect()
    }
}

struct State {
    tables: Tables,
    script: VecDeque<(Ask, Do)>,
    /// What happens before a request is looked at.
    firsts: VecDeque<(Ask, BoxFuture<'static, ()>)>,
    always: Option<(Ask, Do)>,
    /// Commits that were put off; without a table, one to several.
    late: Vec<(Option<TableName>, Value)>,
    requests: Vec<(Ask, Request)>,
    /// Those handed out that still hold.
    tokens: Vec<String>,
    handed_out: usize,
    /// Replies by idempotency key, for keys that were finalized.
    known_keys: Vec<KnownKey>,
    access: Access,
}

pub struct FaultServer {
    uri: String,
    serving: JoinHandle<()>,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    manners: Manners,
    warehouse: String,
}

impl FaultServer {
    pub async fn start(folder: &std::path::Path, manners: Manners) -> Self {
        Self::start_over(folder, manners, None).await
    }

    /// Over TLS.
    pub async fn start_over(folder: &std::path::Path, manners: Manners, tls: Option<TlsAcceptor>) -> Self {
        let state = State {
            tables: Tables::default(),
            script: VecDeque::new(),
            firsts: VecDeque::new(),
            always: None,
            late: Vec::new(),
            requests: Vec::new(),
            tokens: Vec::new(),
            handed_out: 0,
            known_keys: Vec::new(),
            access: Access::default(),
        };
        let folder = format!("file://{}", folder.join("warehouse").display());
        let warehouse = manners.warehouse.clone().unwrap_or(folder);
        let shared = Arc::new(Shared { state: Mutex::new(state), manners, warehouse });
        let handler = Arc::clone(&shared);
        let handler = Arc::new(move |request| {
            let shared = Arc::clone(&handler);
            Box::pin(async move { shared.handle(request).await }) as BoxFuture<'static, Reply>
        });
        let (uri, serving) = http::serve_over(handler, tls).await;
        Self { uri, serving, shared }
    }

    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// What loads say about access from now on.
    pub fn grant(&self, access: Access) {
        self.state().access = access;
    }

    /// Does it serve clients that it knows only?
    pub fn knows_clients(&self) -> bool {
        self.shared.manners.client.is_some()
    }

    /// Impatient: what waits on purpose is given up soon.
    pub fn settings(&self) -> RestSettings {
        let mut settings = RestSettings::at("test", &self.uri);
        let soon = Duration::from_secs(2);
        settings.patience = Patience { connect: soon, silence: soon, request: soon };
        settings
    }

    pub async fn client(&self) -> RestCatalog {
        RestCatalog::open(&self.settings(), clock_of_now()).await.unwrap()
    }

    /// The next request of this kind, after those that were ordered before.
    pub fn next(&self, ask: Ask, act: Do) {
        self.state().script.push_back((ask, act));
    }

    /// This happens before the next request of this kind is looked at, whatever is done with it then.
    pub fn first(&self, ask: Ask, act: impl Future<Output = ()> + Send + 'static) {
        self.state().firsts.push_back((ask, Box::pin(act)));
    }

    /// Every request of this kind that the script does not speak of.
    pub fn always(&self, ask: Ask, act: Do) {
        self.state().always = Some((ask, act));
    }

    pub fn be_honest(&self) {
        self.state().always = None;
    }

    pub fn is_played(&self) -> bool {
        let state = self.state();
        state.script.is_empty() && state.firsts.is_empty()
    }

    /// Acts on the commits that were put off, in their order; gives the statuses.
    pub fn act_late(&self) -> Vec<u16> {
        let mut state = self.state();
        let late = std::mem::take(&mut state.late);
        let act = |(table, body): (Option<TableName>, Value)| match table {
            Some(table) => state.tables.commit(&table, &body, |_| false).status,
            None => state.tables.commit_all(&body, usize::MAX).status,
        };
        late.into_iter().map(act).collect()
    }

    /// Nobody listens from now on; kept connections go on.
    pub async fn stop_listening(&mut self) {
        self.serving.abort();
        assert!((&mut self.serving).await.unwrap_err().is_cancelled());
    }

    /// No token that was handed out holds any more.
    pub fn end_tokens(&self) {
        self.state().tokens.clear();
    }

    pub fn tokens_handed_out(&self) -> usize {
        self.state().handed_out
    }

    pub fn requests(&self, ask: Ask) -> Vec<Request> {
        self.state().requests.iter().filter(|(a, _)| *a == ask).map(|(_, r)| r.clone()).collect()
    }

    /// Everything that was asked, in order.
    pub fn all_requests(&self) -> Vec<(Ask, Request)> {
        self.state().requests.clone()
    }

    pub fn create_namespace(&self, levels: &[String]) {
        self.state().tables.create_namespace(&json!({ "namespace": levels }));
    }

    pub fn create_table(&self, name: &TableName, definition: &TableDefinition) {
        let body = create_request(name, definition);
        let reply = self.state().tables.create(name.namespace.clone(), &body, &self.shared.warehouse);
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    /// The raw metadata of the table as it is.
    pub fn metadata(&self, name: &TableName) -> Value {
        serde_json::from_str(&self.state().tables.current(name).unwrap().metadata).unwrap()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }
}

impl Drop for FaultServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

pub fn clock_of_now() -> Clock {
    Arc::new(real_now)
}

/// What a server offers that commits to one table at a time.
const ENDPOINTS_OF_ONE_TABLE: [&str; 4] = [
    "GET /v1/{prefix}/namespaces",
    "GET /v1/{prefix}/namespaces/{namespace}/tables",
    "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}",
    "POST /v1/{prefix}/namespaces/{namespace}/tables/{table}",
];

/// Where a request goes, below the prefix.
enum Place {
    Config,
    Token,
    Namespaces,
    Tables(Vec<String>),
    Table(TableName),
    /// Of any table: all have the same.
    Credentials,
    Sign,
    Transaction,
    Nowhere,
}

impl Shared {
    async fn handle(&self, request: Request) -> Reply {
        let place = self.place(&request);
        let ask = ask_of(&place, &request);
        let first = {
            let mut state = self.state.lock().unwrap();
            state.requests.push((ask, request.clone()));
            let at = state.firsts.iter().position(|(a, _)| *a == ask);
            at.and_then(|at| state.firsts.remove(at)).map(|(_, act)| act)
        };
        if let Some(act) = first {
            act.await;
        }
        let act = {
            let mut state = self.state.lock().unwrap();
            let scripted = state.script.iter().position(|(a, _)| *a == ask);
            let scripted = scripted.and_then(|at| state.script.remove(at));
            scripted.or(state.always.filter(|(a, _)| *a == ask)).map(|(_, act)| act)
        };
        if !matches!(place, Place::Token) && !self.is_known(&request) {
            return Reply::error(401, "NotAuthorizedException", "the token is not known");
        }
        let honest = |ignored: Option<&str>| self.honest(&place, &request, ignored);
        match act {
            None => honest(None),
            Some(Do::ActThenSay(status)) => {
                honest(None);
                Reply::error(status, "ServiceFailureException", "an upstream server failed")
            }
            Some(Do::ActThenClose) => honest(None).cut(Cut::Silent),
            Some(Do::ActThenCut) => honest(None).cut(Cut::Half),
            Some(Do::ActTwice) => {
                honest(None);
                honest(None)
            }
            Some(Do::Say(status)) => Reply::error(status, "ServiceFailureException", "not now"),
            Some(Do::SayLater(status, seconds)) => Reply::error(status, "SlowDownException", "not so fast")
                .with_header("retry-after", seconds.to_string()),
            Some(Do::SayYes) => match &place {
                Place::Table(name) => self.state.lock().unwrap().tables.current(name).unwrap().reply(),
                Place::Transaction => Reply::json(204, String::new()),
                _ => panic!("only commits are answered so"),
            },
            Some(Do::Close) => Reply::json(200, String::new()).cut(Cut::Silent),
            Some(Do::SayThenActLate(status)) => {
                let table = match &place {
                    Place::Table(name) => Some(name.clone()),
                    Place::Transaction => None,
                    _ => panic!("only commits are put off"),
                };
                let body = serde_json::from_str(&request.body).unwrap();
                self.state.lock().unwrap().late.push((table, body));
                Reply::error(status, "ServiceFailureException", "an upstream server is slow")
            }
            Some(Do::SayOld(ago)) => {
                let Place::Table(name) = &place else { panic!("only tables are answered so") };
                let state = self.state.lock().unwrap();
                let versions = &state.tables.versions[name];
                versions[versions.len().saturating_sub(ago + 1)].reply()
            }
            Some(Do::ActOnOneThenSay(status)) => {
                let body = serde_json::from_str(&request.body).unwrap();
                let _ = self.state.lock().unwrap().tables.commit_all(&body, 1);
                match status {
                    204 => Reply::json(204, String::new()),
                    status => Reply::error(status, "CommitFailedException", "the second table was moved"),
                }
            }
            Some(Do::Ignore(name)) => honest(Some(name)),
        }
    }

    /// Does it carry a token that was handed out and still holds?
    fn is_known(&self, request: &Request) -> bool {
        if self.manners.client.is_none() {
            return true;
        }
        let sent = request.headers.get("authorization").and_then(|value| value.strip_prefix("Bearer "));
        sent.is_some_and(|token| self.state.lock().unwrap().tokens.iter().any(|known| known == token))
    }

    fn place(&self, request: &Request) -> Place {
        let segments = request.segments();
        let mut words = segments.iter().map(String::as_str).collect::<VecDeque<_>>();
        if words.pop_front() != Some("v1") {
            return Place::Nowhere;
        }
        match words.make_contiguous() {
            ["config"] => return Place::Config,
            ["oauth", "tokens"] => return Place::Token,
            _ => {}
        }
        for expected in self.manners.prefix.into_iter().flat_map(|prefix| prefix.split('/')) {
            if words.pop_front() != Some(expected) {
                return Place::Nowhere;
            }
        }
        match words.make_contiguous() {
            ["namespaces"] => Place::Namespaces,
            ["transactions", "commit"] => Place::Transaction,
            ["namespaces", namespace, "tables"] => Place::Tables(self.levels(namespace)),
            ["namespaces", namespace, "tables", table] => {
                Place::Table(TableName { namespace: self.levels(namespace), name: (*table).to_owned() })
            }
            ["namespaces", _, "tables", _, "credentials"] => Place::Credentials,
            ["namespaces", _, "tables", _, "sign"] => Place::Sign,
            _ => Place::Nowhere,
        }
    }

    fn levels(&self, namespace: &str) -> Vec<String> {
        let separator = self.manners.separator.map_or("\u{1f}".to_owned(), |encoded| {
            percent_encoding::percent_decode_str(encoded).decode_utf8().unwrap().into_owned()
        });
        namespace.split(&separator).map(str::to_owned).collect()
    }

    fn honest(&self, place: &Place, request: &Request, ignored: Option<&str>) -> Reply {
        let manners = &self.manners;
        let mut state = self.state.lock().unwrap();
        let body = || serde_json::from_str::<Value>(&request.body).unwrap();
        match (place, request.method.as_str()) {
            (Place::Config, "GET") => Reply::json(200, self.config().to_string()),
            (Place::Token, "POST") => {
                let form = http::form(&request.body);
                let field = |key: &str| form.get(key).map(String::as_str);
                let sent = field("client_id").zip(field("client_secret"));
                if sent != manners.client || field("grant_type") != Some("client_credentials") {
                    let error = json!({ "error": "invalid_client", "error_description": "no such client" });
                    return Reply::json(401, error.to_string());
                }
                state.handed_out += 1;
                let token = format!("token-{}", state.handed_out);
                state.tokens.push(token.clone());
                let reply = json!({
                    "access_token": token, "token_type": "bearer", "expires_in": manners.token_life_s,
                });
                Reply::json(200, reply.to_string())
            }
            (Place::Namespaces, "GET") => {
                let parent = request.query.get("parent").map(|text| self.levels(text)).unwrap_or_default();
                let all = state.tables.namespaces.iter();
                let below = all.filter(|n| n.len() == parent.len() + 1 && n.starts_with(&parent));
                self.page("namespaces", below.map(|n| json!(n)).collect(), request)
            }
            (Place::Namespaces, "POST") => state.tables.create_namespace(&body()),
            (Place::Tables(namespace), "GET") => {
                let all = state.tables.versions.keys().filter(|name| name.namespace == *namespace);
                let listed = all.map(|n| json!({ "namespace": n.namespace, "name": n.name })).collect();
                self.page("identifiers", listed, request)
            }
            (Place::Tables(namespace), "POST") => {
                state.tables.create(namespace.clone(), &body(), &self.warehouse)
            }
            (Place::Table(name), "GET") => {
                let Some(current) = state.tables.current(name) else {
                    return Reply::error(404, "NoSuchTableException", "Table does not exist");
                };
                let refs_only = request.query.get("snapshots").is_some_and(|asked| asked == "refs");
                let current = if refs_only { current.of_refs() } else { current.clone() };
                let mut reply = current.reply();
                let mut told: Value = serde_json::from_str("{}").unwrap();
                if !state.access.config.is_empty() {
                    told["config"] = json!(state.access.config);
                }
                if !state.access.credentials.is_empty() {
                    told["storage-credentials"] = json!(state.access.credentials());
                }
                reply.body = current.body_with(&told);
                let etag = reply.headers.iter().find(|(key, _)| *key == "etag").unwrap().1.clone();
                if manners.no_etags {
                    reply.headers.clear();
                } else if request.headers.get("if-none-match") == Some(&etag) {
                    return Reply::json(304, String::new()).with_header("etag", etag);
                }
                reply
            }
            (Place::Table(name), "DELETE") => match state.tables.versions.remove(name) {
                Some(_) => Reply::json(204, String::new()),
                None => Reply::error(404, "NoSuchTableException", "Table does not exist"),
            },
            (Place::Credentials, "GET") if manners.offers_credentials => {
                let credentials = json!({ "storage-credentials": state.access.credentials() });
                Reply::json(200, credentials.to_string())
            }
            (Place::Sign, "POST") if manners.signs_with.is_some() => {
                let keys = manners.signs_with.as_ref().unwrap();
                Reply::json(200, keys.sign(&body()).to_string())
            }
            (Place::Table(name), "POST") => {
                if let Some(reply) = state.known(manners, request) {
                    return reply;
                }
                let about = |requirement: &Value| ignored.is_some_and(|name| requirement["ref"] == name);
                let mut reply = state.tables.commit(name, &body(), about);
                if manners.no_etags {
                    reply.headers.clear();
                }
                state.remember(manners, request, &reply);
                reply
            }
            (Place::Transaction, "POST") if !manners.one_table_at_a_time => {
                if let Some(reply) = state.known(manners, request) {
                    return reply;
                }
                let reply = state.tables.commit_all(&body(), usize::MAX);
                state.remember(manners, request, &reply);
                reply
            }
            _ => Reply::json(404, "<html>there is nothing here</html>".to_owned()),
        }
    }

    fn config(&self) -> Value {
        let Manners { prefix, separator, idempotency_keys, .. } = &self.manners;
        let mut config = json!({ "defaults": {}, "overrides": { "header.X-Given": "by the server" } });
        if let Some(prefix) = prefix {
            config["overrides"]["prefix"] = json!(prefix);
        }
        if let Some(separator) = separator {
            config["overrides"]["namespace-separator"] = json!(separator);
        }
        if self.manners.one_table_at_a_time {
            config["endpoints"] = json!(ENDPOINTS_OF_ONE_TABLE);
        }
        if *idempotency_keys {
            config["idempotency-key-lifetime"] = json!("PT30M");
        }
        for (key, value) in &self.manners.overrides {
            config["overrides"][key] = json!(value);
        }
        if self.manners.offers_credentials {
            let below = "/v1/{prefix}/namespaces/{namespace}/tables/{table}";
            config["endpoints"] =
                json!([format!("GET {below}"), format!("POST {below}"), format!("GET {below}/credentials")]);
        }
        config
    }

    fn page(&self, key: &str, all: Vec<Value>, request: &Request) -> Reply {
        let paged = request.query.contains_key("pageToken");
        let start: usize = request.query.get("pageToken").map_or(0, |t| t.parse().unwrap_or(0));
        let size = self.manners.page.filter(|_| paged).unwrap_or(usize::MAX);
        let end = start.saturating_add(size).min(all.len());
        let next = (end < all.len()).then(|| end.to_string());
        Reply::json(200, json!({ key: all[start..end], "next-page-token": next }).to_string())
    }
}

fn ask_of(place: &Place, request: &Request) -> Ask {
    match (place, request.method.as_str()) {
        (Place::Config, _) => Ask::Config,
        (Place::Token, _) => Ask::Token,
        (Place::Credentials, _) => Ask::Credentials,
        (Place::Sign, _) => Ask::Sign,
        (Place::Transaction, _) => Ask::Transaction,
        (Place::Table(_), "POST") => kind_of_commit(&serde_json::from_str(&request.body).unwrap()),
        (_, "POST") => Ask::Making,
        (Place::Table(_), _) => Ask::Load,
        _ => Ask::List,
    }
}

fn kind_of_commit(body: &Value) -> Ask {
    let any = |list: &str, holds: &dyn Fn(&Value) -> bool| body[list].as_array().unwrap().iter().any(holds);
    let adds = any("updates", &|u| u["action"] == "add-snapshot");
    let new_name = any("requirements", &|r| {
        r["ref"].as_str().is_some_and(|name| name != "main") && r["snapshot-id"].is_null()
    });
    if adds || new_name {
        Ask::Staging
    } else if any("updates", &|u| u["action"] == "set-snapshot-ref") {
        Ask::Landing
    } else {
        Ask::Removal
    }
}
