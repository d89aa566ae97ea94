//! Requests as this catalog's client sends them: its headers, its token, a new one when that is refused.

use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Request, StatusCode, Url};

use super::auth::{Auth, NoToken};
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
}

impl Http {
    pub fn new(transport: Transport, auth: Auth, headers: HeaderMap) -> Self {
        Self { transport, auth, headers }
    }

    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        &mut self.headers
    }

    pub fn set_auth(&mut self, auth: Auth) {
        self.auth = auth;
    }

    /// Asks for something, again where that may help.
    pub async fn get(&self, url: Url, extra: &[(HeaderName, HeaderValue)]) -> Result<Reply, Failure> {
        let mut request = Request::new(Method::GET, url);
        request.headers_mut().extend(extra.iter().cloned());
        let mut refused: Option<Secret> = None;
        loop {
            let token = self.token(refused.as_ref()).await?;
            let reply = self.transport.send_safely(&self.signed(&request, token.as_ref())?).await?;
            match self.renewable(&reply, token, refused.is_some()) {
                Some(token) => refused = Some(token),
                None => return Ok(reply),
            }
        }
    }

    /// Sends JSON that may change something: once, unless the server has certainly not looked at it.
    pub async fn post(
        &self,
        url: Url,
        extra: &[(HeaderName, HeaderValue)],
        body: Vec<u8>,
    ) -> Result<Reply, Failure> {
        let mut request = Request::new(Method::POST, url);
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(reqwest::header::CONTENT_TYPE, json);
        request.headers_mut().extend(extra.iter().cloned());
        *request.body_mut() = Some(body.into());
        let mut refused: Option<Secret> = None;
        let mut attempt = 1;
        loop {
            let token = self.token(refused.as_ref()).await?;
            let reply = self.transport.send(self.signed(&request, token.as_ref())?).await?;
            if reply.status == StatusCode::TOO_MANY_REQUESTS && attempt < UNSEEN_ATTEMPTS {
                let Some(wait) = reply.wait(attempt) else { return Ok(reply) };
                tokio::time::sleep(wait).await;
                attempt += 1;
                continue;
            }
            match self.renewable(&reply, token, refused.is_some()) {
                Some(token) => refused = Some(token),
                None => return Ok(reply),
            }
        }
    }

    /// Removes something, once.
    pub async fn delete(&self, url: Url) -> Result<Reply, Failure> {
        let token = self.token(None).await?;
        self.transport.send(self.signed(&Request::new(Method::DELETE, url), token.as_ref())?).await
    }

    async fn token(&self, refused: Option<&Secret>) -> Result<Option<Secret>, Failure> {
        let token = self.auth.token(&self.transport, refused).await;
        token.map_err(|none| match none {
            NoToken::Unanswered(why) => Failure::NotSent(format!("no token could be fetched: {why}")),
            NoToken::Refused(why) => Failure::NoToken(format!("no token could be fetched: {why}")),
        })
    }

    fn signed(&self, request: &Request, token: Option<&Secret>) -> Result<Request, Failure> {
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
        Ok(copy)
    }

    /// The refused token, if another one may help: once a request.
    fn renewable(&self, reply: &Reply, token: Option<Secret>, tried: bool) -> Option<Secret> {
        let refused = reply.status == StatusCode::UNAUTHORIZED || reply.status.as_u16() == TOKEN_OVER;
        if refused && !tried && self.auth.can_renew() { token } else { None }
    }
}
