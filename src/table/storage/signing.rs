//! Requests to S3 that the catalog signs: we know no key, and ask for each request (the specification's
//! remote signing).
//!
//! Only the head of a request goes to the catalog; content is not signed. The one exception is the
//! specification's: a request that deletes many objects names them in its content.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use http::header::{HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, Uri};
use opendal::{Buffer, Error, ErrorKind, HttpBody, HttpTransport, HttpTransporter};

const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
const UNSIGNED_PAYLOAD: HeaderValue = HeaderValue::from_static("UNSIGNED-PAYLOAD");

/// The head of a request, before it is signed or after. Header names are in small letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::table) struct SignedHead {
    pub method: String,
    pub uri: String,
    pub headers: BTreeMap<String, Vec<String>>,
    /// Of a request that deletes many objects.
    pub body: Option<String>,
}

/// A catalog that signs.
#[async_trait]
pub(in crate::table) trait Sign: Debug + Send + Sync {
    /// The head with its signature. An error is told in words.
    async fn sign(&self, head: SignedHead, region: &str) -> Result<SignedHead, String>;
}

/// Signs the requests to one store.
#[derive(Clone, Debug)]
pub(in crate::table) struct RequestSigner {
    pub catalog: Arc<dyn Sign>,
    pub region: String,
}

impl RequestSigner {
    /// What sends the requests of an unsigned client.
    pub(super) fn client(self: Arc<Self>) -> HttpTransporter {
        HttpTransporter::new(SigningClient { signer: self, inner: HttpTransporter::default() })
    }
}

struct SigningClient {
    signer: Arc<RequestSigner>,
    inner: HttpTransporter,
}

impl HttpTransport for SigningClient {
    async fn fetch(&self, request: Request<Buffer>) -> opendal::Result<Response<HttpBody>> {
        let (mut parts, body) = request.into_parts();
        parts.headers.entry(CONTENT_SHA256).or_insert(UNSIGNED_PAYLOAD);
        let head = SignedHead {
            method: parts.method.to_string(),
            uri: parts.uri.to_string(),
            headers: as_map(&parts.headers, &parts.uri),
            body: deletes_many(&parts).then(|| String::from_utf8_lossy(&body.to_vec()).into_owned()),
        };
        let signed = self.signer.catalog.sign(head, &self.signer.region).await.map_err(|why| {
            Error::new(ErrorKind::Unexpected, format!("the catalog did not sign the request: {why}"))
        })?;
        let unusable = |what: String| {
            Error::new(ErrorKind::Unexpected, format!("what the catalog signed cannot be sent: {what}"))
        };
        parts.uri = signed.uri.parse::<Uri>().map_err(|error| unusable(format!("its address: {error}")))?;
        for (name, values) in &signed.headers {
            let name =
                HeaderName::from_bytes(name.as_bytes()).map_err(|error| unusable(error.to_string()))?;
            // Ours tell of the content and the address, which the connection itself writes.
            if name == HOST || (parts.headers.contains_key(&name) && name != CONTENT_SHA256) {
                continue;
            }
            parts.headers.remove(&name);
            for value in values {
                let mut value = HeaderValue::from_str(value)
                    .map_err(|error| unusable(format!("header {name}: {error}")))?;
                value.set_sensitive(true);
                parts.headers.append(name.clone(), value);
            }
        }
        self.inner.fetch(Request::from_parts(parts, body)).await
    }
}

/// `POST /bucket?delete`.
fn deletes_many(parts: &Parts) -> bool {
    let names_delete = |query: &str| query.split('&').any(|p| p == "delete" || p.starts_with("delete="));
    parts.method == Method::POST && parts.uri.query().is_some_and(names_delete)
}

fn as_map(headers: &HeaderMap, uri: &Uri) -> BTreeMap<String, Vec<String>> {
    let mut map: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in headers {
        if let Ok(value) = value.to_str() {
            map.entry(name.as_str().to_owned()).or_default().push(value.to_owned());
        }
    }
    // The connection writes it later, and it is a part of every signature.
    if let Some(authority) = uri.authority() {
        map.entry(HOST.as_str().to_owned()).or_insert_with(|| vec![authority.to_string()]);
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_that_is_signed_has_the_host() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_static("1"));
        headers.append("x-a", HeaderValue::from_static("2"));
        let map = as_map(&headers, &"http://b.s3.example:9000/k?x=1".parse().unwrap());
        assert_eq!(map["x-a"], ["1", "2"]);
        assert_eq!(map["host"], ["b.s3.example:9000"]);
    }
}
