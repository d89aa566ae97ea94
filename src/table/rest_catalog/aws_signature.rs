//! AWS Signature Version 4 under each request to the catalog, as AWS's own catalogs want it (Glue, S3 Tables, or
//! one behind API Gateway).
//!
//! Computed here: the library that signs requests to S3 encodes paths as S3 alone does, and every other service
//! wants them encoded once more. Keys are found by the library, as the AWS programs find them.

use std::collections::BTreeMap;
use std::fmt;

use chrono::{DateTime, Utc};
use http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue};
use opendal::HttpTransporter;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use reqsign_aws_v4::{Credential, DefaultCredentialProvider};
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use reqsign_core::{Context, FileRead, OsEnv, ProvideCredential, SigningCredential};
use reqwest::{Request, Url};
use tokio::sync::Mutex;

use crate::secret::Secret;

/// Names of the settings, as Java has them.
pub const SIGNING_KEYS: &[&str] = &[ENABLED, NAME, REGION, ACCESS_KEY, SECRET_KEY, SESSION_TOKEN];

const ENABLED: &str = "rest.sigv4-enabled";
const NAME: &str = "rest.signing-name";
const REGION: &str = "rest.signing-region";
const ACCESS_KEY: &str = "rest.access-key-id";
const SECRET_KEY: &str = "rest.secret-access-key";
const SESSION_TOKEN: &str = "rest.session-token";
/// API Gateway (Java: `AwsProperties.REST_SIGNING_NAME_DEFAULT`).
const DEFAULT_NAME: &str = "execute-api";
const REGION_VARIABLES: [&str; 2] = ["AWS_REGION", "AWS_DEFAULT_REGION"];

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const DATE: HeaderName = HeaderName::from_static("x-amz-date");
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const SECURITY_TOKEN: HeaderName = HeaderName::from_static("x-amz-security-token");
/// A bearer token beside the signature goes here (Java: `RESTSigV4AuthSession`).
const ORIGINAL_AUTHORIZATION: HeaderName = HeaderName::from_static("original-authorization");

/// Everything but RFC 3986's unreserved characters.
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// As `STRICT`, between the slashes of a path.
const PATH: &AsciiSet = &STRICT.remove(b'/');

/// How requests are signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsSettings {
    /// The service's name in signatures: `glue`, `s3tables`, `execute-api`.
    pub name: String,
    /// `None`: as the environment says.
    pub region: Option<String>,
    /// `None`: as the AWS programs find them.
    pub keys: Option<AwsKeys>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsKeys {
    pub id: String,
    pub secret: Secret,
    pub session: Option<Secret>,
}

impl AwsSettings {
    /// From settings by name; `None`: requests are not signed. An error is told as key and message.
    pub fn read(settings: &BTreeMap<String, Secret>) -> Result<Option<Self>, (&'static str, String)> {
        let get = |key: &str| settings.get(key).map(Secret::reveal).filter(|value| !value.is_empty());
        let owned = |key: &str| get(key).map(str::to_owned);
        match get(ENABLED) {
            Some("true") => {}
            None | Some("false") => {
                return match SIGNING_KEYS.iter().skip(1).find(|key| get(key).is_some()) {
                    Some(key) => Err((key, format!("it is set, and '{ENABLED}' is not true"))),
                    None => Ok(None),
                };
            }
            Some(_) => return Err((ENABLED, "it is neither true nor false".to_owned())),
        }
        let session = get(SESSION_TOKEN).map(Secret::new);
        let keys = match (owned(ACCESS_KEY), get(SECRET_KEY)) {
            (Some(id), Some(secret)) => Some(AwsKeys { id, secret: Secret::new(secret), session }),
            (None, None) => None,
            (Some(_), None) => return Err((SECRET_KEY, format!("it is missing beside '{ACCESS_KEY}'"))),
            (None, Some(_)) => return Err((ACCESS_KEY, format!("it is missing beside '{SECRET_KEY}'"))),
        };
        let name = owned(NAME).unwrap_or_else(|| DEFAULT_NAME.to_owned());
        Ok(Some(Self { name, region: owned(REGION), keys }))
    }
}

/// Signs the requests of one catalog.
pub(super) struct AwsSigner {
    name: String,
    region: String,
    keys: Keys,
}

enum Keys {
    Given(Credential),
    /// Found, and kept until shortly before they end.
    Found {
        context: Box<Context>,
        provider: Box<DefaultCredentialProvider>,
        held: Mutex<Option<Credential>>,
    },
}

impl AwsSigner {
    /// An error says which setting is missing.
    pub fn new(settings: &AwsSettings, environment: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let AwsSettings { name, region, keys } = settings;
        let region = region
            .clone()
            .or_else(|| REGION_VARIABLES.into_iter().find_map(environment))
            .ok_or_else(|| "no region is known for signatures".to_owned())?;
        let keys = match keys {
            Some(AwsKeys { id, secret, session }) => Keys::Given(Credential {
                access_key_id: id.clone(),
                secret_access_key: secret.reveal().to_owned(),
                session_token: session.as_ref().map(|token| token.reveal().to_owned()),
                expires_in: None,
            }),
            None => Keys::Found {
                context: Box::new(
                    Context::new()
                        .with_file_read(Disk)
                        .with_http_send(HttpTransporter::default())
                        .with_env(OsEnv),
                ),
                provider: Box::new(DefaultCredentialProvider::new()),
                held: Mutex::default(),
            },
        };
        Ok(Self { name: name.clone(), region, keys })
    }

    /// Adds what a signature needs, and the signature.
    pub async fn sign(&self, request: &mut Request) -> Result<(), String> {
        let credential = self.keys.credential().await?;
        self.sign_at(request, &credential, Utc::now())
    }

    fn sign_at(&self, request: &mut Request, by: &Credential, now: DateTime<Utc>) -> Result<(), String> {
        let unusable = |what: &str| format!("the request cannot be signed: {what}");
        let value = |text: &str| {
            HeaderValue::from_str(text).map_err(|_| unusable("a key holds letters that no header can"))
        };
        // A blank is `%20` in a signature, and some services read `+` as it stands.
        if let Some(query) = request.url().query().map(|query| query.replace('+', "%20")) {
            request.url_mut().set_query(Some(&query));
        }
        let body = request.body().and_then(|body| body.as_bytes()).unwrap_or_default();
        let digest = hex_sha256(body);
        let url = request.url().clone();
        let host = host_of(&url).ok_or_else(|| unusable("its address has no host"))?;
        let (day, time) = (now.format("%Y%m%d").to_string(), now.format("%Y%m%dT%H%M%SZ").to_string());
        let headers = request.headers_mut();
        if let Some(bearer) = headers.remove(AUTHORIZATION) {
            headers.insert(ORIGINAL_AUTHORIZATION, bearer);
        }
        headers.insert(HOST, value(&host)?);
        headers.insert(DATE, value(&time)?);
        headers.insert(CONTENT_SHA256, value(&digest)?);
        if let Some(token) = &by.session_token {
            let mut token = value(token)?;
            token.set_sensitive(true);
            headers.insert(SECURITY_TOKEN, token);
        }
        let mut signed: Vec<(&str, String)> = Vec::new();
        for (name, value) in headers.iter() {
            let text = value.to_str().map_err(|_| unusable("a header holds other letters than ASCII"))?;
            signed.push((name.as_str(), text.split_whitespace().collect::<Vec<_>>().join(" ")));
        }
        signed.sort();
        let names = signed.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
        let lines: String = signed.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
        let canonical = format!(
            "{}\n{}\n{}\n{lines}\n{names}\n{digest}",
            request.method(),
            utf8_percent_encode(url.path(), PATH),
            canonical_query(&url),
        );
        let scope = format!("{day}/{}/{}/aws4_request", self.region, self.name);
        let to_sign = format!("{ALGORITHM}\n{time}\n{scope}\n{}", hex_sha256(canonical.as_bytes()));
        let mut key = format!("AWS4{}", by.secret_access_key).into_bytes();
        for part in [day.as_str(), &self.region, &self.name, "aws4_request"] {
            key = hmac_sha256(&key, part.as_bytes());
        }
        let signature = hex_hmac_sha256(&key, to_sign.as_bytes());
        let id = &by.access_key_id;
        let mut value = value(&format!(
            "{ALGORITHM} Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}"
        ))?;
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
        Ok(())
    }
}

impl Keys {
    async fn credential(&self) -> Result<Credential, String> {
        let (context, provider, held) = match self {
            Self::Given(credential) => return Ok(credential.clone()),
            Self::Found { context, provider, held } => (context, provider, held),
        };
        let mut held = held.lock().await;
        if let Some(known) = held.as_ref().filter(|known| known.is_valid()) {
            return Ok(known.clone());
        }
        let found =
            provider.provide_credential(context).await.map_err(|error| format!("no AWS keys: {error}"))?;
        let found = found.ok_or_else(|| {
            format!("there are no AWS keys; set {ACCESS_KEY} and {SECRET_KEY}, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        })?;
        *held = Some(found.clone());
        Ok(found)
    }
}

/// As the connection writes it: the port only where it is not the scheme's own.
fn host_of(url: &Url) -> Option<String> {
    let host = url.host_str()?;
    Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
}

/// Pairs strictly encoded, in their order.
fn canonical_query(url: &Url) -> String {
    let query = url.query().unwrap_or_default();
    let strictly = |text: &str| {
        let bytes: Vec<u8> = percent_decode_str(text).collect();
        percent_encoding::percent_encode(&bytes, STRICT).to_string()
    };
    let mut pairs: Vec<(String, String)> = query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(key, value)| (strictly(key), strictly(value)))
        .collect();
    pairs.sort();
    pairs.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join("&")
}

/// Files with keys, for the library that looks for them.
#[derive(Debug)]
struct Disk;

impl FileRead for Disk {
    async fn file_read(&self, path: &str) -> reqsign_core::Result<Vec<u8>> {
        tokio::fs::read(path).await.map_err(|error| {
            reqsign_core::Error::unexpected(format!("{path} cannot be read")).with_source(error)
        })
    }
}

impl fmt::Debug for AwsSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, region, .. } = self;
        f.debug_struct("AwsSigner").field("name", name).field("region", region).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "aws_signature_tests.rs"]
mod tests;
