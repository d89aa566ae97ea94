//! Who we are to the server: nobody, the holder of a token, or a client that fetches tokens.
//!
//! A fetched token is renewed ahead of its end, so that no train meets the end of one; should the server
//! refuse a token all the same, the next one is fetched at once. Tasks that need a token at the same time
//! wait for one fetch.

use reqwest::Url;
use tokio::sync::Mutex;

use super::super::sql_catalog::Clock;
use super::transport::Transport;
use super::wire::TokenReply;
use crate::secret::Secret;

/// A token is renewed this long before its end, or a quarter of its life before when that is shorter.
const RENEW_AHEAD_MS: i64 = 60_000;
/// After a renewal that failed while the old token still holds, in milliseconds.
const RENEW_AGAIN_MS: i64 = 5_000;

/// What OAuth2 client credentials are exchanged with.
#[derive(Clone, Debug)]
pub(super) struct ClientCredentials {
    pub server: Url,
    /// `None`: the server knows the client by its secret alone.
    pub id: Option<String>,
    pub secret: Secret,
    pub scope: String,
}

struct Token {
    value: Secret,
    renew_at_ms: Option<i64>,
    ends_at_ms: Option<i64>,
}

enum Kind {
    Anonymous,
    Given(Secret),
    Client(Box<TokenClient>),
}

struct TokenClient {
    credentials: ClientCredentials,
    token: Mutex<Option<Token>>,
}

pub(super) struct Auth {
    kind: Kind,
    clock: Clock,
}

/// There is no token; nothing was sent.
#[derive(Debug)]
pub(super) enum NoToken {
    /// The server that gives tokens did not answer, or with something else than one.
    Unanswered(String),
    /// It gives none for these credentials and this scope.
    Refused(String),
}

impl NoToken {
    fn why(&self) -> &str {
        match self {
            Self::Unanswered(why) | Self::Refused(why) => why,
        }
    }
}

impl Auth {
    pub fn anonymous(clock: Clock) -> Self {
        Self { kind: Kind::Anonymous, clock }
    }

    pub fn given(token: Secret, clock: Clock) -> Self {
        Self { kind: Kind::Given(token), clock }
    }

    pub fn client(credentials: ClientCredentials, clock: Clock) -> Self {
        Self { kind: Kind::Client(Box::new(TokenClient { credentials, token: Mutex::default() })), clock }
    }

    /// The token to send now. `refused` is one that the server has just refused.
    pub async fn token(
        &self,
        transport: &Transport,
        refused: Option<&Secret>,
    ) -> Result<Option<Secret>, NoToken> {
        let TokenClient { credentials, token } = match &self.kind {
            Kind::Anonymous => return Ok(None),
            Kind::Given(token) => return Ok(Some(token.clone())),
            Kind::Client(client) => client.as_ref(),
        };
        let mut held = token.lock().await;
        let now = (self.clock)();
        let usable = held.as_ref().filter(|t| Some(&t.value) != refused);
        if let Some(token) = usable
            && token.renew_at_ms.is_none_or(|at| now < at)
        {
            return Ok(Some(token.value.clone()));
        }
        let still_good = usable.filter(|t| t.ends_at_ms.is_none_or(|at| now < at)).map(|t| t.value.clone());
        match (fetch(transport, credentials).await, still_good) {
            (Ok(reply), _) => {
                let value = Secret::new(reply.access_token);
                *held = Some(Token::new(value.clone(), reply.expires_in, now));
                Ok(Some(value))
            }
            (Err(error), Some(old)) => {
                tracing::warn!("the token could not be renewed yet, the old one is used: {}", error.why());
                if let Some(token) = held.as_mut() {
                    token.renew_at_ms = Some(now.saturating_add(RENEW_AGAIN_MS));
                }
                Ok(Some(old))
            }
            (Err(error), None) => Err(error),
        }
    }

    /// May another token be had than the one that was refused?
    pub fn can_renew(&self) -> bool {
        matches!(self.kind, Kind::Client(_))
    }
}

impl Token {
    fn new(value: Secret, expires_in_s: Option<i64>, now_ms: i64) -> Self {
        let life_ms = expires_in_s.filter(|s| *s > 0).map(|s| s.saturating_mul(1_000));
        Self {
            value,
            renew_at_ms: life_ms.map(|life| now_ms.saturating_add(life - RENEW_AHEAD_MS.min(life / 4))),
            ends_at_ms: life_ms.map(|life| now_ms.saturating_add(life)),
        }
    }
}

/// The client credentials flow (RFC 6749, section 4.4).
async fn fetch(transport: &Transport, credentials: &ClientCredentials) -> Result<TokenReply, NoToken> {
    let ClientCredentials { server, id, secret, scope } = credentials;
    let mut form = vec![("grant_type", "client_credentials")];
    form.extend(id.as_deref().map(|id| ("client_id", id)));
    form.extend([("client_secret", secret.reveal()), ("scope", scope.as_str())]);
    let unanswered = |why: String| NoToken::Unanswered(format!("{server}: {why}"));
    let request = transport.client().post(server.clone()).form(&form).build();
    let request = request.map_err(|error| unanswered(error.to_string()))?;
    let reply = transport.send_safely(&request).await.map_err(|f| unanswered(f.text().to_owned()))?;
    if reply.status.is_client_error() {
        return Err(NoToken::Refused(format!("{server} answered {}", reply.told())));
    }
    if !reply.status.is_success() {
        return Err(unanswered(reply.told()));
    }
    serde_json::from_slice(&reply.body)
        .map_err(|error| unanswered(format!("its answer is no token: {error}")))
}
