//! One server, as everything here asks it: address, client, what it said about itself.

use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{StatusCode, Url};

use super::super::catalog::{CatalogError, Clock};
use super::super::storage::StorageProperties;
use super::auth::Auth;
use super::grants::{has_own_keys, storage_settings};
use super::http::Http;
use super::paths::Paths;
use super::settings::{RestSettings, WrongSetting, add_header};
use super::transport::{Failure, Reply, Transport};
use super::wire::CatalogConfig;
use crate::secret::Secret;

/// Asks for access to a table's files (specification, `data-access`).
pub(super) const ACCESS_DELEGATION: HeaderName = HeaderName::from_static("x-iceberg-access-delegation");
const VENDED_CREDENTIALS: HeaderValue = HeaderValue::from_static("vended-credentials");
/// As the header's value in the configuration: nothing is asked for.
const NO_DELEGATION: &str = "none";
/// An endpoint by which a server says that it gives credentials of a table alone.
const LOAD_CREDENTIALS: &str = "GET /v1/{prefix}/namespaces/{namespace}/tables/{table}/credentials";

pub(super) struct Server {
    /// For messages.
    pub uri: String,
    pub http: Http,
    pub paths: Paths,
    pub clock: Clock,
    /// Of object stores, the server's included.
    pub storage: StorageProperties,
    /// What is asked for with a table; `None`: nothing, as when we have keys of our own.
    pub delegation: Option<HeaderValue>,
    /// It gives credentials of a table alone, without the table.
    pub offers_credentials: bool,
}

impl Server {
    /// Asks the server for its configuration and follows it.
    pub async fn open(settings: &RestSettings, clock: Clock) -> Result<(Self, CatalogConfig), CatalogError> {
        let wrong = |WrongSetting { key, message, next }: WrongSetting| {
            CatalogError::Unavailable(format!("'{key}' of catalog {}: {message}; {next}", settings.name))
        };
        settings.address().map_err(wrong)?;
        let auth = settings.auth(clock.clone()).map_err(wrong)?;
        let mut headers = settings.header_map().map_err(wrong)?;
        // Sent where the specification has it: with tables.
        let asked = headers.remove(ACCESS_DELEGATION);
        let transport = Transport::new(settings.patience)
            .map_err(|e| CatalogError::Unavailable(format!("no HTTP client could be made: {e}")))?;
        let aws = settings.aws_signer().map_err(wrong)?;
        let mut http = Http::new(transport, auth, headers, aws);
        let config = handshake(settings, &http).await?;

        for (name, value) in config.settings("header.") {
            if let Err(message) = add_header(http.headers_mut(), name, value) {
                tracing::warn!("header '{name}' of the catalog's configuration is not sent: {message}");
            }
        }
        if settings.credential.is_none()
            && let Some(token) = config.setting("token", None)
        {
            http.set_auth(Auth::given(Secret::new(token), clock.clone()));
        }
        let uri = config.setting("uri", Some(&settings.uri)).unwrap_or(&settings.uri).to_owned();
        let paths =
            Paths::new(&uri, config.setting("prefix", None), config.setting("namespace-separator", None));
        // As with all settings: ours win over the server's defaults, and its overrides over ours.
        let storage = StorageProperties::new(storage_settings(&config.defaults))
            .overlaid(settings.storage.pairs())
            .overlaid(storage_settings(&config.overrides));
        let delegation = match http.headers_mut().remove(ACCESS_DELEGATION).or(asked) {
            Some(value) => Some(value).filter(|value| value != NO_DELEGATION),
            None => (!has_own_keys(&storage)).then_some(VENDED_CREDENTIALS),
        };
        let offers_credentials = config.offers(LOAD_CREDENTIALS);
        Ok((Self { uri, http, paths, clock, storage, delegation, offers_credentials }, config))
    }

    pub fn address(&self, url: Result<Url, String>) -> Result<Url, CatalogError> {
        url.map_err(CatalogError::Unavailable)
    }

    pub fn unanswered(&self, failure: &Failure) -> CatalogError {
        CatalogError::Unavailable(format!("{}: {}", self.uri, failure.text()))
    }
}

/// `GET /v1/config`.
async fn handshake(settings: &RestSettings, http: &Http) -> Result<CatalogConfig, CatalogError> {
    let uri = settings.uri.trim_end_matches('/');
    let mut url = Url::parse(&format!("{uri}/v1/config"))
        .map_err(|error| CatalogError::Unavailable(format!("'{uri}' is no address: {error}")))?;
    if let Some(warehouse) = &settings.warehouse {
        url.query_pairs_mut().append_pair("warehouse", warehouse);
    }
    let reply = match http.get(url, &[], None).await {
        Ok(reply) => reply,
        Err(failure) => {
            return Err(CatalogError::Unavailable(format!("{uri}: {}; {}", failure.text(), failure.next())));
        }
    };
    if reply.status != StatusCode::OK {
        return Err(refused(uri, &reply));
    }
    serde_json::from_slice(&reply.body).map_err(|error| {
        CatalogError::Unavailable(format!(
            "{uri} is no Iceberg REST catalog, its configuration cannot be read ({error}); correct 'uri'"
        ))
    })
}

/// A refusal in words, with what to do behind the semicolon.
pub(super) fn refused(uri: &str, reply: &Reply) -> CatalogError {
    let next = match reply.status {
        StatusCode::UNAUTHORIZED => "check 'token' or 'credential' of the catalog",
        StatusCode::FORBIDDEN => "give this principal the right to read and commit",
        StatusCode::NOT_FOUND | StatusCode::BAD_REQUEST => "check 'uri' and 'warehouse' of the catalog",
        status if status.is_redirection() => "write the address that it redirects to as 'uri'",
        _ => "it is tried again",
    };
    CatalogError::Unavailable(format!("{uri} answered {}; {next}", reply.told()))
}
