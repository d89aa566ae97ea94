//! A URL that is asked with POST. `202` says that the work is under way: the same is then asked again with the same
//! idempotency key, until the answer is another one or the time is over.

use std::future::Future;
use std::time::Duration;

use reqwest::header::RETRY_AFTER;
use reqwest::redirect::Policy;
use reqwest::{Client, Response, StatusCode};

use super::tail::Tail;
use super::{Ask, End, MAX_OUTPUT_BYTES, Ran};

/// Until there is a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Pause after a `202` that names none.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Shortest and longest pause that a `202` may ask for.
const MIN_ASK_AGAIN: Duration = Duration::from_millis(50);
const MAX_ASK_AGAIN: Duration = Duration::from_secs(60);

pub(super) async fn run(
    url: &str,
    token_variable: Option<&str>,
    ask: &Ask,
    time: Duration,
    cancelled: impl Future<Output = ()>,
) -> Ran {
    let token = match token_variable.map(|name| (name, std::env::var(name))) {
        None => None,
        Some((_, Ok(token))) if !token.is_empty() => Some(token),
        Some((name, _)) => {
            let text = format!("the worker's environment has no '{name}', which [class.external] names");
            return Ran::of(End::Refused, None, text, None);
        }
    };
    tokio::select! {
        ran = ask_until_answered(url, token.as_deref(), ask) => ran,
        () = tokio::time::sleep(time) => {
            Ran::of(End::TimedOut, None, format!("it had not answered after {} s", time.as_secs_f64()), None)
        }
        () = cancelled => Ran::of(End::Cancelled, None, "nobody waits any more: its request has ended", None),
    }
}

/// Bounded by the caller's time.
async fn ask_until_answered(url: &str, token: Option<&str>, ask: &Ask) -> Ran {
    let failed = |text: String| Ran::of(End::Failed, None, text, None);
    // A credential goes to the address that policy names and to no other.
    let client = match Client::builder().redirect(Policy::none()).connect_timeout(CONNECT).build() {
        Ok(client) => client,
        Err(error) => return failed(format!("no request can be made: {}", plain(error))),
    };
    let Ok(body) = serde_json::to_vec(ask) else {
        return failed("what it is to be told is no JSON".to_owned());
    };
    loop {
        let mut request = client
            .post(url)
            .header("Content-Type", "application/json")
            .header("Idempotency-Key", &ask.idempotency_key)
            .body(body.clone());
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) => return failed(format!("it did not answer: {}", plain(error))),
        };
        let (status, pause) = (response.status(), pause_of(&response));
        if status == StatusCode::ACCEPTED {
            drop(response);
            tokio::time::sleep(pause).await;
            continue;
        }
        let tail = Tail::default();
        let mut read = 0;
        while let Ok(Some(chunk)) = response.chunk().await
            && read < MAX_OUTPUT_BYTES
        {
            let kept = &chunk[..chunk.len().min(MAX_OUTPUT_BYTES - read)];
            tail.push(kept);
            read += kept.len();
        }
        let end = match status {
            _ if status.is_success() => End::Content,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
                End::Failed
            }
            _ if status.is_server_error() => End::Failed,
            _ => End::Refused,
        };
        return Ran::of(end, Some(status.as_u16().into()), format!("it answered {status}"), tail.text());
    }
}

/// Without the address, which stands in the policy.
fn plain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn pause_of(response: &Response) -> Duration {
    let asked = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    asked.map_or(ASK_AGAIN, Duration::from_secs).clamp(MIN_ASK_AGAIN, MAX_ASK_AGAIN)
}
