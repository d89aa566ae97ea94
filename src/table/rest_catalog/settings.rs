//! How a REST catalog is reached, checked when the configuration is read.

use std::collections::BTreeMap;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::auth::{Auth, ClientCredentials};
use super::aws_signature::{AwsSettings, AwsSigner};
use super::transport::Patience;
use crate::secret::Secret;
use crate::table::sql_catalog::Clock;
use crate::table::storage::StorageProperties;

/// The scope that is asked for when none is configured (Java: `OAuth2Properties.CATALOG_SCOPE`).
const DEFAULT_SCOPE: &str = "catalog";
/// Where tokens are fetched when no server is configured, below the catalog's address.
const TOKENS_PATH: &str = "v1/oauth/tokens";

/// Settings of one catalog, as [`RestSettings::check`] wants them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestSettings {
    /// The catalog's name in `mergeberg.toml`.
    pub name: String,
    /// Without `/v1`.
    pub uri: String,
    /// What the server calls a warehouse; it may need none.
    pub warehouse: Option<String>,
    /// A bearer token.
    pub token: Option<Secret>,
    /// `ID:SECRET` of OAuth2 client credentials, or the secret alone.
    pub credential: Option<Secret>,
    pub oauth2_server_uri: Option<String>,
    pub scope: Option<String>,
    /// Sent with each request.
    pub headers: BTreeMap<String, Secret>,
    pub patience: Patience,
    /// For object stores, beside what the server says.
    pub storage: StorageProperties,
    /// Requests are signed as AWS wants it.
    pub aws: Option<AwsSettings>,
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongSetting {
    /// Its key in the file.
    pub key: String,
    pub message: String,
    pub next: &'static str,
}

impl RestSettings {
    /// With nothing but an address.
    pub fn at(name: &str, uri: &str) -> Self {
        Self {
            name: name.to_owned(),
            uri: uri.to_owned(),
            warehouse: None,
            token: None,
            credential: None,
            oauth2_server_uri: None,
            scope: None,
            headers: BTreeMap::new(),
            patience: Patience::default(),
            storage: StorageProperties::default(),
            aws: None,
        }
    }

    pub fn check(&self) -> Result<(), WrongSetting> {
        self.address()?;
        self.credentials()?;
        self.header_map().map(drop)
    }

    pub(super) fn address(&self) -> Result<Url, WrongSetting> {
        let url = address("uri", &self.uri)?;
        if url.path().trim_end_matches('/').ends_with("/v1") {
            return Err(wrong("uri", format!("'{}' ends with /v1, which is added by itself", self.uri))
                .with_next("write the address without /v1"));
        }
        Ok(url)
    }

    /// The client credentials, where they are configured.
    pub(super) fn credentials(&self) -> Result<Option<ClientCredentials>, WrongSetting> {
        let Some(credential) = &self.credential else { return Ok(None) };
        if self.token.is_some() {
            return Err(wrong("token", "it stands beside 'credential', which fetches its own".to_owned())
                .with_next("keep one of the two"));
        }
        let (id, secret) = match credential.reveal().split_once(':') {
            Some((id, secret)) => (Some(id.to_owned()), secret),
            None => (None, credential.reveal()),
        };
        if secret.is_empty() {
            return Err(
                wrong("credential", "it holds no secret".to_owned()).with_next("write it as ID:SECRET")
            );
        }
        let server = match &self.oauth2_server_uri {
            Some(uri) => address("oauth2-server-uri", uri)?,
            None => {
                let text = format!("{}/{TOKENS_PATH}", self.uri.trim_end_matches('/'));
                address("uri", &text)?
            }
        };
        let scope = self.scope.clone().unwrap_or_else(|| DEFAULT_SCOPE.to_owned());
        Ok(Some(ClientCredentials { server, id, secret: Secret::new(secret), scope }))
    }

    pub(super) fn auth(&self, clock: Clock) -> Result<Auth, WrongSetting> {
        Ok(match (self.credentials()?, &self.token) {
            (Some(credentials), _) => Auth::client(credentials, clock),
            (None, Some(token)) => {
                bearer(token)
                    .ok_or_else(|| wrong("token", "it holds letters that no header can".to_owned()))?;
                Auth::given(token.clone(), clock)
            }
            (None, None) => {
                self.miss_credential()?;
                Auth::anonymous(clock)
            }
        })
    }

    /// Settings for the fetching of tokens, and nothing to fetch them with. No fault of the file: its secrets
    /// come from the environment, which commands that need no catalog may lack.
    fn miss_credential(&self) -> Result<(), WrongSetting> {
        for (key, set) in
            [("oauth2-server-uri", self.oauth2_server_uri.is_some()), ("scope", self.scope.is_some())]
        {
            if set {
                return Err(wrong("credential", format!("it is missing, and there is '{key}'"))
                    .with_next("set MERGEBERG_CATALOG_<NAME>_CREDENTIAL to ID:SECRET"));
            }
        }
        Ok(())
    }

    pub(super) fn aws_signer(&self) -> Result<Option<AwsSigner>, WrongSetting> {
        let Some(settings) = &self.aws else { return Ok(None) };
        let signer = AwsSigner::new(settings, |name| std::env::var(name).ok());
        signer.map(Some).map_err(|message| {
            wrong("rest.signing-region", message).with_next("set rest.signing-region or AWS_REGION")
        })
    }

    pub(super) fn header_map(&self) -> Result<HeaderMap, WrongSetting> {
        let mut map = HeaderMap::new();
        for (name, value) in &self.headers {
            add_header(&mut map, name, value.reveal())
                .map_err(|message| wrong(&format!("header.{name}"), message))?;
        }
        Ok(map)
    }
}

/// The value is not shown with errors, nor in logs.
pub(super) fn add_header(map: &mut HeaderMap, name: &str, value: &str) -> Result<(), String> {
    let key = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "it is no name of a header".to_owned())?;
    let mut value =
        HeaderValue::from_str(value).map_err(|_| "its value holds letters that no header can".to_owned())?;
    value.set_sensitive(true);
    map.insert(key, value);
    Ok(())
}

/// The value of `Authorization`.
pub(super) fn bearer(token: &Secret) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", token.reveal())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

fn address(key: &str, text: &str) -> Result<Url, WrongSetting> {
    let form = "write http:// or https://, the host, and a path where it has one";
    let url = Url::parse(text)
        .map_err(|error| wrong(key, format!("'{text}' is no address: {error}")).with_next(form))?;
    if !["http", "https"].contains(&url.scheme()) || url.host_str().is_none_or(str::is_empty) {
        return Err(wrong(key, format!("'{text}' is no address of a server")).with_next(form));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(wrong(key, "it holds a name or password".to_owned())
            .with_next("give them as 'credential' or 'token'"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong(key, format!("'{text}' has something behind ? or #")).with_next(form));
    }
    Ok(url)
}

fn wrong(key: &str, message: String) -> WrongSetting {
    WrongSetting { key: key.to_owned(), message, next: "correct it" }
}

impl WrongSetting {
    fn with_next(mut self, next: &'static str) -> Self {
        self.next = next;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(edit: impl FnOnce(&mut RestSettings)) -> RestSettings {
        let mut settings = RestSettings::at("lake", "https://h:8181/api/catalog/");
        edit(&mut settings);
        settings
    }

    fn refused(edit: impl FnOnce(&mut RestSettings)) -> (String, String) {
        let WrongSetting { key, message, next: _ } = settings(edit).check().unwrap_err();
        (key, message)
    }

    #[test]
    fn addresses_are_checked() {
        settings(|_| ()).check().unwrap();
        for uri in ["", "h:8181", "ftp://h", "file:///w", "/w", "http://", "https://u:p@h", "http://h?x=1"] {
            let (key, message) = refused(|s| s.uri = uri.to_owned());
            assert_eq!(key, "uri", "{uri}");
            assert!(!message.contains("u:p"), "{message}");
        }
        let (_, message) = refused(|s| s.uri = "http://h/v1/".to_owned());
        assert!(message.contains("ends with /v1"), "{message}");
        let (key, _) = refused(|s| {
            s.credential = Some(Secret::new("i:s"));
            s.oauth2_server_uri = Some("idp/token".to_owned());
        });
        assert_eq!(key, "oauth2-server-uri");
    }

    #[test]
    fn credentials_are_taken_apart_at_the_first_colon() {
        let of = |text: &str| {
            let settings = settings(|s| s.credential = Some(Secret::new(text)));
            settings.credentials().unwrap().unwrap()
        };
        let both = of("id:se:cret");
        assert_eq!((both.id.as_deref(), both.secret.reveal()), (Some("id"), "se:cret"));
        assert_eq!(both.server.as_str(), "https://h:8181/api/catalog/v1/oauth/tokens");
        assert_eq!(both.scope, "catalog");
        let one = of("cret");
        assert_eq!((one.id, one.secret.reveal()), (None, "cret"));
        assert_eq!(refused(|s| s.credential = Some(Secret::new("id:"))).0, "credential");
    }

    #[test]
    fn settings_that_do_not_go_together_are_refused() {
        let both = refused(|s| {
            s.credential = Some(Secret::new("i:s"));
            s.token = Some(Secret::new("t"));
        });
        assert_eq!(both.0, "token");
        let bare = settings(|s| s.oauth2_server_uri = Some("https://i".to_owned()));
        bare.check().unwrap();
        let Err(missing) = bare.auth(std::sync::Arc::new(|| 0)) else {
            panic!("nothing to fetch a token with")
        };
        assert_eq!(missing.key, "credential");
        let header = |name: &str, value: &str| {
            let (name, value) = (name.to_owned(), Secret::new(value));
            refused(|s| drop(s.headers.insert(name, value)))
        };
        assert_eq!(header("no name", "v").0, "header.no name");
        let (key, message) = header("x-a", "hunter2\n");
        assert_eq!(key, "header.x-a");
        assert!(!message.contains("hunter2"));
    }
}
