//! Requests as this catalog's client sends them: its headers, its token, a new one when that is refused.

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Request, StatusCode, Url};

use super::auth::{Auth, NoToken};
use super::aws_signature::AwsSigner;
use super::settings::bearer;
use super::transport::{Failure, Reply, Transport};
use crate::secret::Secret;

/// Times that a commit is sent that the server has certainly not looked at: it refused the token, or said
/// that it is asked too often.
const UNSEEN_ATTEMPTS: u32 = 5;

/// `Authentication Timeout`, of the Iceberg specification: the token is over.
const TOKEN_OVER: u16 = 419;

pub(super) struct Http {
    transport: Transport,
    auth: Auth,
    headers: HeaderMap,
    /// Signs each request as AWS wants it.
    aws: Option<AwsSigner>,
}

impl Http {
    pub fn new(transport: Transport, auth: Auth, headers: HeaderMap, aws: Option<AwsSigner>) -> Self {
        Self { transport, auth, headers, aws }
    }

    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        &mut self.headers
    }

    pub fn set_auth(&mut self, auth: Auth) {
        self.auth = auth;
    }

    /// Asks for something, again where that may help. `given` is the token to be tried first.
    pub async fn get(
        &self,
        url: Url,
        extra: &[(HeaderName, HeaderValue)],
        given: Option<&Secret>,
    ) -> Result<Reply, Failure> {
        let mut request = Request::new(Method::GET, url);
        request.headers_mut().extend(extra.iter().cloned());
        self.safely(request, given).await
    }

    /// As [`Self::get`], with a question in JSON that changes nothing.
    pub async fn ask(&self, url: Url, body: Vec<u8>, given: Option<&Secret>) -> Result<Reply, Failure> {
        self.safely(json_request(url, body), given).await
    }

    async fn safely(&self, request: Request, given: Option<&Secret>) -> Result<Reply, Failure> {
        let mut tokens = Tokens { given: given.cloned(), refused: None };
        loop {
            let token = self.token(&tokens).await?;
            let ready = self.ready(&request, token.as_ref()).await?;
            let reply = self.transport.send_safely(&ready).await?;
            if !self.another_token_helps(&reply, token, &mut tokens) {
                return Ok(reply);
            }
        }
    }

    /// Sends JSON that may change something: once, unless the server has certainly not looked at it.
    pub async fn post(
        &self,
        url: Url,
        extra: &[(HeaderName, HeaderValue)],
        body: Vec<u8>,
        given: Option<&Secret>,
    ) -> Result<Reply, Failure> {
        let mut request = json_request(url, body);
        request.headers_mut().extend(extra.iter().cloned());
        let mut tokens = Tokens { given: given.cloned(), refused: None };
        let mut attempt = 1;
        loop {
            let token = self.token(&tokens).await?;
            let reply = self.transport.send(self.ready(&request, token.as_ref()).await?).await?;
            if reply.status == StatusCode::TOO_MANY_REQUESTS && attempt < UNSEEN_ATTEMPTS {
                let Some(wait) = reply.wait(attempt) else { return Ok(reply) };
                tokio::time::sleep(wait).await;
                attempt += 1;
                continue;
            }
            if !self.another_token_helps(&reply, token, &mut tokens) {
                return Ok(reply);
            }
        }
    }

    /// Removes something, once.
    pub async fn delete(&self, url: Url) -> Result<Reply, Failure> {
        let token = self.token(&Tokens::default()).await?;
        self.transport.send(self.ready(&Request::new(Method::DELETE, url), token.as_ref()).await?).await
    }

    async fn token(&self, tokens: &Tokens) -> Result<Option<Secret>, Failure> {
        if let Some(given) = &tokens.given {
            return Ok(Some(given.clone()));
        }
        let token = self.auth.token(&self.transport, tokens.refused.as_ref()).await;
        token.map_err(|none| match none {
            NoToken::Unanswered(why) => Failure::NotSent(format!("no token could be fetched: {why}")),
            NoToken::Refused(why) => Failure::NoToken(format!("no token could be fetched: {why}")),
        })
    }

    async fn ready(&self, request: &Request, token: Option<&Secret>) -> Result<Request, Failure> {
        let not_sent = |text: &str| Failure::NotSent(text.to_owned());
        let mut copy = request.try_clone().ok_or_else(|| not_sent("its body cannot be sent again"))?;
        for (name, value) in &self.headers {
            copy.headers_mut().insert(name.clone(), value.clone());
        }
        if let Some(token) = token {
            let value =
                bearer(token).ok_or_else(|| not_sent("the token holds letters that no header can"))?;
            copy.headers_mut().insert(AUTHORIZATION, value);
        }
        if let Some(signer) = &self.aws {
            signer.sign(&mut copy).await.map_err(|why| not_sent(&why))?;
        }
        Ok(copy)
    }

    /// Was the token refused, and may another one help? The one that was given is tried first, then ours, and
    /// ours is fetched anew once.
    fn another_token_helps(&self, reply: &Reply, token: Option<Secret>, tokens: &mut Tokens) -> bool {
        if reply.status != StatusCode::UNAUTHORIZED && reply.status.as_u16() != TOKEN_OVER {
            return false;
        }
        if tokens.given.take().is_some() {
            return true;
        }
        if tokens.refused.is_some() || token.is_none() || !self.auth.can_renew() {
            return false;
        }
        tokens.refused = token;
        true
    }
}

/// The tokens of one request, as they are tried.
#[derive(Default)]
struct Tokens {
    given: Option<Secret>,
    refused: Option<Secret>,
}

fn json_request(url: Url, body: Vec<u8>) -> Request {
    let mut request = Request::new(Method::POST, url);
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(reqwest::header::CONTENT_TYPE, json);
    *request.body_mut() = Some(body.into());
    request
}
