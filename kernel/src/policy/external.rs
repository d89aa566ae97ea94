//! `[class.external]`: the pipeline's own command or URL, which makes a branch again on another head.

use serde::{Deserialize, Serialize};

use super::{Duration, Scope};

/// Longest time that one run may be given, in milliseconds.
pub const MAX_TIMEOUT_MS: i64 = 24 * 3600 * 1000;
/// Time that one run is given unless the class says otherwise, in milliseconds.
pub const DEFAULT_TIMEOUT_MS: i64 = 3600 * 1000;
/// Runs that may fail in a row, unless the class says otherwise.
pub const DEFAULT_ATTEMPTS: u32 = 3;
/// Upper bound of `attempts`.
pub const MAX_ATTEMPTS: u32 = 10;

/// What makes a source of the class again: exactly one of `command` and `url` (rule S1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ExternalReplay {
    /// A program and its arguments; no shell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Asked with POST.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Variable of the worker's environment that holds the bearer token for `url`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_env: Option<String>,
    /// What of the target its work depends on, where no record says it (rule C3).
    #[serde(default = "whole_table")]
    pub scope: Scope,
    /// Of one run.
    #[serde(default = "default_timeout")]
    pub timeout: Duration,
    /// Runs that may fail in a row before the request is refused.
    #[serde(default = "default_attempts")]
    pub attempts: u32,
}

fn whole_table() -> Scope {
    Scope::Table
}

fn default_timeout() -> Duration {
    Duration { ms: DEFAULT_TIMEOUT_MS }
}

fn default_attempts() -> u32 {
    DEFAULT_ATTEMPTS
}

impl ExternalReplay {
    /// What is run, as one line for people.
    pub fn shown(&self) -> String {
        self.url.clone().unwrap_or_else(|| self.command.join(" "))
    }

    /// A sentence on the first thing that is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        match (&self.url, self.command.first()) {
            (None, None) => return Err("needs 'command' or 'url'".to_owned()),
            (Some(_), Some(_)) => return Err("has both 'command' and 'url', keep one of them".to_owned()),
            (Some(url), None) => check_url(url)?,
            (None, Some(program)) if program.trim().is_empty() => {
                return Err("'command' begins with an empty text, name the program".to_owned());
            }
            (None, Some(_)) => {}
        }
        if self.command.iter().any(|argument| argument.contains('\0')) {
            return Err("'command' has an argument with a zero byte".to_owned());
        }
        match &self.token_env {
            Some(_) if self.url.is_none() => {
                return Err(
                    "'token-env' is sent to a 'url'; a command reads its environment itself".to_owned()
                );
            }
            Some(name) if !is_variable(name) => {
                return Err(format!("'token-env' is '{name}', write the name of an environment variable"));
            }
            _ => {}
        }
        if self.timeout.ms > MAX_TIMEOUT_MS {
            return Err(format!(
                "'timeout' is {}, it must be {} at most",
                String::from(self.timeout),
                String::from(Duration { ms: MAX_TIMEOUT_MS })
            ));
        }
        if self.attempts == 0 || self.attempts > MAX_ATTEMPTS {
            return Err(format!("'attempts' is {}, it must be between 1 and {MAX_ATTEMPTS}", self.attempts));
        }
        Ok(())
    }
}

/// A secret in an address would be shown by everything that shows the policy.
fn check_url(url: &str) -> Result<(), String> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest.filter(|rest| !rest.is_empty() && !url.contains(char::is_whitespace)) else {
        return Err(format!("'url' is '{url}', write an address that begins with https:// or http://"));
    };
    if rest.split(['/', '?', '#']).next().unwrap_or_default().contains('@') {
        return Err(
            "'url' holds a user or password; put a token in the environment and name it in 'token-env'"
                .to_owned(),
        );
    }
    Ok(())
}

fn is_variable(name: &str) -> bool {
    name.bytes().next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}
