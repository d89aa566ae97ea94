//! Asks the catalog to sign requests to S3 (`RemoteSignRequest` of the specification).

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use reqwest::{StatusCode, Url};
use serde_json::json;

use super::super::storage::{RequestSigner, Sign, SignedHead, StorageProperties};
use super::server::{Server, refused};
use super::wire::SignReply;
use crate::secret::Secret;

const ENABLED: &str = "s3.remote-signing-enabled";
/// The first that is set wins; the others are names of older servers.
const ENDPOINTS: [&str; 2] = ["signer.endpoint", "s3.signer.endpoint"];
const URIS: [&str; 2] = ["signer.uri", "s3.signer.uri"];
/// Where old servers sign that name no endpoint (Java: `S3V4RestSignerClient`).
const DEFAULT_ENDPOINT: &str = "v1/aws/s3/sign";
/// For stores without regions, as for our own signatures.
const NO_REGION: &str = "us-east-1";

struct RemoteSigner {
    server: Arc<Server>,
    endpoint: Result<Url, String>,
    token: Option<Secret>,
}

/// The signer that a table's settings ask for.
pub(super) fn signer_of(
    server: &Arc<Server>,
    settings: &StorageProperties,
    token: Option<Secret>,
) -> Option<RequestSigner> {
    if !settings.is_true(ENABLED) {
        return None;
    }
    let first = |keys: &[&str]| keys.iter().find_map(|key| settings.get(key));
    let endpoint = first(&ENDPOINTS).unwrap_or(DEFAULT_ENDPOINT);
    let base = first(&URIS).unwrap_or(&server.uri);
    let region = first(&["s3.region", "client.region"]).unwrap_or(NO_REGION).to_owned();
    let endpoint = resolved(base, endpoint);
    Some(RequestSigner {
        catalog: Arc::new(RemoteSigner { server: Arc::clone(server), endpoint, token }),
        region,
    })
}

fn resolved(base: &str, endpoint: &str) -> Result<Url, String> {
    let text = if endpoint.starts_with("http://") || endpoint.starts_with("https://") {
        endpoint.to_owned()
    } else {
        format!("{}/{}", base.trim_end_matches('/'), endpoint.trim_start_matches('/'))
    };
    Url::parse(&text).map_err(|error| format!("'{text}' is no address to sign at: {error}"))
}

#[async_trait]
impl Sign for RemoteSigner {
    async fn sign(&self, head: SignedHead, region: &str) -> Result<SignedHead, String> {
        let Self { server, endpoint, token } = self;
        let SignedHead { method, uri, headers, body } = head;
        let mut request = json!({
            "provider": "s3", "region": region, "method": method, "uri": uri, "headers": headers,
        });
        if let Some(body) = body {
            request["body"] = body.into();
        }
        // It changes nothing at the catalog.
        let asked = server.http.ask(endpoint.clone()?, request.to_string().into_bytes(), token.as_ref());
        let reply = asked.await.map_err(|failure| failure.text().to_owned())?;
        if reply.status != StatusCode::OK {
            return Err(refused(&server.uri, &reply).to_string());
        }
        let SignReply { uri, headers } = serde_json::from_slice(&reply.body)
            .map_err(|error| format!("{} answers no signature: {error}", server.uri))?;
        let headers = headers.into_iter().map(|(name, values)| (name.to_ascii_lowercase(), values)).collect();
        Ok(SignedHead { method, uri, headers, body: None })
    }
}

impl fmt::Debug for RemoteSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteSigner").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_below_its_base_or_an_address() {
        let at = |base: &str, endpoint: &str| resolved(base, endpoint).unwrap().to_string();
        assert_eq!(at("https://h/catalog/", "v1/sign"), "https://h/catalog/v1/sign");
        assert_eq!(at("https://h/catalog", "/v1/sign"), "https://h/catalog/v1/sign");
        assert_eq!(at("https://h", "https://signer/x"), "https://signer/x");
        assert!(resolved("not", "an address").is_err());
    }
}
