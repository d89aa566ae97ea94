//! An S3 server over a folder (s3s-fs), plain or over TLS, with keys, rules and a record of what was asked.
//!
//! It lives on a thread of its own: tests wait for processes that talk to it.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use mergeberg::secret::Secret;
use mergeberg::table::storage::StorageProperties;
use reqsign_aws_v4::{Credential, RequestSigner};
use reqsign_core::{Context, SignRequest};
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{S3Result, s3_error};
use s3s_fs::FileSystem;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

use super::certificates::Certificates;

pub const BUCKET: &str = "lake";
const REGION: &str = "eu-test-1";

/// Keys as S3 gives them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    pub id: String,
    pub secret: String,
    /// Of keys that end.
    pub session: Option<String>,
}

impl Keys {
    pub fn named(name: &str, session: bool) -> Self {
        Self {
            id: format!("AK{name}"),
            secret: format!("secret-of-{name}"),
            session: session.then(|| format!("session-of-{name}")),
        }
    }

    /// `RemoteSignResult` for a `RemoteSignRequest`.
    pub fn sign(&self, request: &Value) -> Value {
        let text = |key: &str| request[key].as_str().unwrap().to_owned();
        let mut parts = http::Request::builder().method(text("method").as_str()).uri(text("uri"));
        for (name, values) in request["headers"].as_object().unwrap() {
            for value in values.as_array().unwrap() {
                parts = parts.header(name, value.as_str().unwrap());
            }
        }
        let (mut parts, ()) = parts.body(()).unwrap().into_parts();
        let credential = Credential {
            access_key_id: self.id.clone(),
            secret_access_key: self.secret.clone(),
            session_token: self.session.clone(),
            expires_in: None,
        };
        let signer = RequestSigner::new("s3", &text("region"));
        let context = Context::new();
        let signing = signer.sign_request(&context, &mut parts, Some(&credential), None);
        futures::executor::block_on(signing).unwrap();
        let mut headers: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in &parts.headers {
            headers.entry(name.to_string()).or_default().push(value.to_str().unwrap().to_owned());
        }
        json!({ "uri": parts.uri.to_string(), "headers": headers })
    }

    /// As Iceberg's properties.
    pub fn properties(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::from([
            ("s3.access-key-id".to_owned(), self.id.clone()),
            ("s3.secret-access-key".to_owned(), self.secret.clone()),
        ]);
        all.extend(self.session.clone().map(|token| ("s3.session-token".to_owned(), token)));
        all
    }
}

/// One request, as far as tests look at it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    /// Bucket and key as the server reads them.
    pub object: String,
    /// Id of the key that it was signed with.
    pub key_id: String,
}

type Rule = Box<dyn Fn(&Asked) -> bool + Send>;

#[derive(Default)]
struct Book {
    keys: Vec<Keys>,
    asked: Vec<Asked>,
    refused: Option<Rule>,
}

/// What the server knows; shared with the service.
#[derive(Clone, Default)]
struct Desk(Arc<Mutex<Book>>);

#[async_trait::async_trait]
impl S3Auth for Desk {
    async fn get_secret_key(&self, id: &str) -> S3Result<SecretKey> {
        let book = self.0.lock().unwrap();
        match book.keys.iter().find(|keys| keys.id == id) {
            Some(keys) => Ok(SecretKey::from(keys.secret.as_str())),
            None => Err(s3_error!(InvalidAccessKeyId, "nobody has this key")),
        }
    }
}

#[async_trait::async_trait]
impl S3Access for Desk {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let Some(credentials) = context.credentials() else {
            return Err(s3_error!(AccessDenied, "it is not signed"));
        };
        let object = match context.s3_path().as_object() {
            Some((bucket, key)) => format!("{bucket}/{key}"),
            None => String::new(),
        };
        let asked =
            Asked { method: context.method().to_string(), object, key_id: credentials.access_key.clone() };
        let told = context.headers().get("x-amz-security-token").map(|v| v.to_str().unwrap().to_owned());
        let mut book = self.0.lock().unwrap();
        let wanted =
            book.keys.iter().find(|keys| keys.id == asked.key_id).and_then(|keys| keys.session.clone());
        if wanted != told {
            return Err(s3_error!(InvalidToken, "the session token is another"));
        }
        let refused = book.refused.as_ref().is_some_and(|rule| rule(&asked));
        book.asked.push(asked);
        if refused { Err(s3_error!(AccessDenied, "the rules of this test")) } else { Ok(()) }
    }
}

pub struct S3Server {
    root: PathBuf,
    address: SocketAddr,
    desk: Desk,
    tls: Option<TlsAcceptor>,
    keys: Keys,
    running: Option<Runtime>,
}

impl S3Server {
    /// Over `folder`/s3, with the one bucket.
    pub fn start(folder: &Path) -> Self {
        Self::start_with(folder, None)
    }

    /// As [`Self::start`], behind a certificate of `certificates`.
    pub fn start_over_tls(folder: &Path, certificates: &Certificates) -> Self {
        Self::start_with(folder, Some(certificates.acceptor()))
    }

    fn start_with(folder: &Path, tls: Option<TlsAcceptor>) -> Self {
        let root = folder.join("s3");
        std::fs::create_dir_all(root.join(BUCKET)).unwrap();
        let keys = Keys::named("TESTS", false);
        let desk = Desk::default();
        desk.0.lock().unwrap().keys.push(keys.clone());
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self { root, address, desk, tls, keys, running: None };
        server.listen();
        server
    }

    /// Listens, again after [`Self::stop`] at the same address.
    pub fn listen(&mut self) {
        let listener = TcpListener::bind(self.address).unwrap();
        listener.set_nonblocking(true).unwrap();
        self.address = listener.local_addr().unwrap();
        let mut builder = S3ServiceBuilder::new(FileSystem::new(&self.root).unwrap());
        builder.set_auth(self.desk.clone());
        builder.set_access(self.desk.clone());
        let (service, tls) = (builder.build(), self.tls.clone());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (service, tls) = (service.clone(), tls.clone());
                // A connection that ends in the middle is the client's business.
                tokio::spawn(async move {
                    let Some(tls) = tls else { return converse(stream, service).await };
                    if let Ok(stream) = tls.accept(stream).await {
                        converse(stream, service).await;
                    }
                });
            }
        });
        self.running = Some(runtime);
    }

    /// Nobody listens any more, and open connections are closed.
    pub fn stop(&mut self) {
        if let Some(runtime) = self.running.take() {
            runtime.shutdown_background();
        }
    }

    pub fn endpoint(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        // The certificate is of the name.
        let host = if self.tls.is_some() { "localhost" } else { "127.0.0.1" };
        format!("{scheme}://{host}:{}", self.address.port())
    }

    /// Iceberg's properties for it, with its own keys.
    pub fn properties(&self) -> BTreeMap<String, String> {
        self.properties_with(&self.keys)
    }

    pub fn properties_with(&self, keys: &Keys) -> BTreeMap<String, String> {
        let mut all = self.place();
        all.extend(keys.properties());
        all
    }

    /// Without keys.
    pub fn place(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("s3.endpoint".to_owned(), self.endpoint()),
            ("s3.region".to_owned(), REGION.to_owned()),
            ("s3.path-style-access".to_owned(), "true".to_owned()),
        ])
    }

    pub fn storage(&self) -> StorageProperties {
        storage(&self.properties())
    }

    /// The lines of `mergeberg.toml` for a SQL catalog on it.
    pub fn catalog_lines(&self) -> String {
        self.catalog_lines_with(&self.keys)
    }

    pub fn catalog_lines_with(&self, keys: &Keys) -> String {
        let lines =
            self.properties_with(keys).into_iter().map(|(key, value)| format!("{key} = {}\n", json!(value)));
        format!(
            "type = \"sql\"\nuri = \"catalog.db\"\nwarehouse = \"{}\"\n{}",
            self.warehouse(),
            lines.collect::<String>()
        )
    }

    pub fn warehouse(&self) -> String {
        format!("s3://{BUCKET}/warehouse")
    }

    /// The catalog of a House over this server, as a job of the engines names it.
    pub fn catalog_of(&self, folder: &Path) -> Value {
        let mut catalog = json!(self.properties());
        catalog["uri"] = json!(format!("sqlite:///{}", folder.join("catalog.db").display()));
        catalog["warehouse"] = json!(self.warehouse());
        catalog["name"] = json!("test");
        catalog
    }

    /// Lets the holder of these keys in.
    pub fn admit(&self, keys: &Keys) {
        self.desk.0.lock().unwrap().keys.push(keys.clone());
    }

    /// These keys hold no longer.
    pub fn dismiss(&self, keys: &Keys) {
        self.desk.0.lock().unwrap().keys.retain(|known| known != keys);
    }

    /// Refuses access where the rule says so.
    pub fn refuse(&self, rule: impl Fn(&Asked) -> bool + Send + 'static) {
        self.desk.0.lock().unwrap().refused = Some(Box::new(rule));
    }

    pub fn refuse_nothing(&self) {
        self.desk.0.lock().unwrap().refused = None;
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.desk.0.lock().unwrap().asked.clone()
    }

    /// Keys of all objects in the bucket, sorted.
    pub fn objects(&self) -> Vec<String> {
        let bucket = self.root.join(BUCKET);
        let mut open = vec![bucket.clone()];
        let mut found = Vec::new();
        while let Some(folder) = open.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    open.push(path);
                } else {
                    found.push(path.strip_prefix(&bucket).unwrap().display().to_string());
                }
            }
        }
        found.sort();
        found
    }

    /// An object that somebody else left there.
    pub fn leave(&self, key: &str) {
        let path = self.root.join(BUCKET).join(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "another's").unwrap();
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.stop();
    }
}

pub fn storage(properties: &BTreeMap<String, String>) -> StorageProperties {
    StorageProperties::new(properties.iter().map(|(key, value)| (key.clone(), Secret::new(value))))
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, service: S3Service) {
    let server = Builder::new(TokioExecutor::new());
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}
