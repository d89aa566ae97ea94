//! One exchange over HTTP, within bounds, and the repetition of those that change nothing.
//!
//! What matters of a failure is whether the server can have acted: a request that was never sent is told
//! apart from one whose reply is missing. Redirects are not followed: a credential goes to the address that
//! was configured and to no other.

use std::time::Duration;

use reqwest::header::{ETAG, HeaderMap, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, Request, StatusCode};

use super::wire::{ErrorModel, ErrorReply, OAuthError};

/// Largest reply that is read, in bytes: a table's metadata is the largest.
const MAX_REPLY_BYTES: usize = 1 << 30;
/// Times that a request which changes nothing is sent.
const SAFE_ATTEMPTS: u32 = 4;
/// First pause before such a request is sent again, in milliseconds; it doubles, and half of it is chance.
const FIRST_PAUSE_MS: u64 = 100;
/// Longest wait that a server may ask for with `Retry-After` before its answer is taken for final.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(10);
/// Characters of an answer that is no error of the protocol, as they are told.
const TOLD_CHARACTERS: usize = 300;

/// How long one exchange may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Until there is a connection, TLS included.
    pub connect: Duration,
    /// Without a byte from the server.
    pub silence: Duration,
    /// The whole exchange, the reply's body included.
    pub request: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            request: Duration::from_secs(120),
        }
    }
}

/// A reply, read to its end.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub status: StatusCode,
    pub etag: Option<String>,
    pub retry_after: Option<Duration>,
    pub body: Vec<u8>,
}

/// There is no reply.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The server has not seen the request.
    NotSent(String),
    /// Nor has it here: whoever gives tokens gives us none.
    NoToken(String),
    /// The server may have acted on it.
    Lost(String),
}

impl Failure {
    pub fn text(&self) -> &str {
        match self {
            Self::NotSent(text) | Self::NoToken(text) | Self::Lost(text) => text,
        }
    }

    /// What to do about it.
    pub fn next(&self) -> &'static str {
        match self {
            Self::NotSent(_) | Self::Lost(_) => "see that the catalog runs and that 'uri' is its address",
            Self::NoToken(_) => "check 'credential', 'scope' and 'oauth2-server-uri' of the catalog",
        }
    }
}

#[derive(Clone)]
pub(super) struct Transport {
    client: Client,
}

impl Transport {
    pub fn new(patience: Patience) -> Result<Self, String> {
        let client = Client::builder()
            .connect_timeout(patience.connect)
            .read_timeout(patience.silence)
            .timeout(patience.request)
            .redirect(Policy::none())
            .user_agent(concat!("mergeberg/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| in_full(&error))?;
        Ok(Self { client })
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Sends once.
    pub async fn send(&self, request: Request) -> Result<Reply, Failure> {
        let failed = |error: reqwest::Error| {
            let text = in_full(&error);
            if error.is_connect() || error.is_builder() {
                Failure::NotSent(text)
            } else {
                Failure::Lost(text)
            }
        };
        let mut response = self.client.execute(request).await.map_err(failed)?;
        let status = response.status();
        let etag = text_of(response.headers(), &ETAG);
        let retry_after = text_of(response.headers(), &RETRY_AFTER)
            .and_then(|text| text.trim().parse().ok())
            .map(Duration::from_secs);
        let mut body = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) if body.len() + chunk.len() <= MAX_REPLY_BYTES => {
                    body.extend_from_slice(&chunk)
                }
                Ok(Some(_)) => {
                    return Err(Failure::Lost(format!("the reply is longer than {MAX_REPLY_BYTES} bytes")));
                }
                Ok(None) => break,
                // The status says enough when it is a refusal.
                Err(_) if status.is_client_error() => break,
                Err(error) => {
                    return Err(Failure::Lost(format!("the reply broke off: {}", in_full(&error))));
                }
            }
        }
        Ok(Reply { status, etag, retry_after, body })
    }

    /// Sends a request that changes nothing, again where that may help.
    pub async fn send_safely(&self, request: &Request) -> Result<Reply, Failure> {
        let mut attempt = 1;
        loop {
            let copy = request.try_clone().ok_or_else(|| {
                Failure::NotSent("the request cannot be sent again, since its body is a stream".to_owned())
            })?;
            let result = self.send(copy).await;
            let wait = match &result {
                Ok(reply) if reply.is_passing_trouble() => reply.wait(attempt),
                Ok(_) => return result,
                Err(_) => Some(pause(attempt)),
            };
            match wait {
                Some(wait) if attempt < SAFE_ATTEMPTS => tokio::time::sleep(wait).await,
                Some(_) | None => return result,
            }
            attempt += 1;
        }
    }
}

impl Reply {
    /// The server cannot answer now and may soon.
    pub fn is_passing_trouble(&self) -> bool {
        self.status.is_server_error() || self.status == StatusCode::TOO_MANY_REQUESTS
    }

    /// How long to wait before the next attempt; `None`: longer than anybody should.
    pub fn wait(&self, attempt: u32) -> Option<Duration> {
        match self.retry_after {
            Some(asked) if asked > MAX_RETRY_AFTER => None,
            Some(asked) => Some(asked.max(pause(attempt))),
            None => Some(pause(attempt)),
        }
    }

    /// The protocol's own error, where the body is one.
    pub fn error(&self) -> Option<ErrorModel> {
        serde_json::from_slice::<ErrorReply>(&self.body).ok().map(|reply| reply.error)
    }

    /// Status and error, for people.
    pub fn told(&self) -> String {
        let status = self.status;
        if let Some(ErrorModel { message, kind }) = self.error() {
            let message = message.filter(|m| !m.is_empty()).unwrap_or(kind);
            return format!("{status}: {}", shortened(&message));
        }
        if let Ok(OAuthError { error, error_description }) = serde_json::from_slice(&self.body) {
            return format!("{status}: {}", shortened(&error_description.unwrap_or(error)));
        }
        let text = String::from_utf8_lossy(&self.body);
        match text.trim() {
            "" => status.to_string(),
            text => format!("{status}: {}", shortened(text)),
        }
    }
}

/// Before attempt number `attempt + 1`.
pub(super) fn pause(attempt: u32) -> Duration {
    let most = FIRST_PAUSE_MS << attempt.saturating_sub(1).min(6);
    Duration::from_millis(most / 2 + rand::random::<u64>() % (most / 2 + 1))
}

fn text_of(headers: &HeaderMap, name: &reqwest::header::HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// Messages of servers hold line breaks and stack traces.
fn shortened(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    match line.char_indices().nth(TOLD_CHARACTERS) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line.to_owned(),
    }
}

/// An error with its causes: the outermost says only that something failed.
fn in_full(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let told = inner.to_string();
        if !text.contains(&told) {
            text.push_str(": ");
            text.push_str(&told);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, body: &str) -> Reply {
        let status = StatusCode::from_u16(status).unwrap();
        Reply { status, etag: None, retry_after: None, body: body.as_bytes().to_vec() }
    }

    #[test]
    fn errors_are_told_in_the_servers_words() {
        let iceberg = r#"{"error": {"message": "no\nat x", "type": "T", "code": 409}}"#;
        assert_eq!(reply(409, iceberg).told(), "409 Conflict: no");
        let oauth = r#"{"error": "invalid_client", "error_description": "unknown"}"#;
        assert_eq!(reply(401, oauth).told(), "401 Unauthorized: unknown");
        assert_eq!(reply(502, "<html>\nno").told(), "502 Bad Gateway: <html>");
        assert_eq!(reply(503, "").told(), "503 Service Unavailable");
        let long = "é".repeat(400);
        assert_eq!(reply(500, &long).told().chars().count(), "500 Internal Server Error: ...".len() + 300);
    }

    #[test]
    fn waits_grow_and_have_a_bound() {
        let mut asked = reply(503, "");
        asked.retry_after = Some(Duration::from_secs(2));
        assert_eq!(asked.wait(1), Some(Duration::from_secs(2)));
        asked.retry_after = Some(MAX_RETRY_AFTER + Duration::from_secs(1));
        assert_eq!(asked.wait(1), None);
        for attempt in 1..40 {
            assert!(pause(attempt) <= Duration::from_millis(FIRST_PAUSE_MS << 6));
        }
        assert!(pause(3) >= Duration::from_millis(200));
    }
}
