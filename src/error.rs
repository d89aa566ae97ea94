//! Errors that people read: what is wrong, a stable code, and what to do next.

use mergeberg_kernel::ids::TableName;
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use crate::config::ConfigError;
use crate::ledger::{LedgerError, LedgerFault};
use crate::table::catalog::CatalogError;

/// A refusal or failure at the edge: the command line today, HTTP later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct UserError {
    pub code: ReasonCode,
    /// One sentence without a full stop, in lower case: it stands after `error: `.
    pub message: String,
    /// What to do next.
    pub next: String,
    /// What the refusal rests on, where there is more to say than one sentence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub witnesses: Vec<serde_json::Value>,
}

impl UserError {
    /// With the code's own next action.
    pub fn new(code: ReasonCode, message: impl Into<String>) -> Self {
        let next = code.next_action().to_owned();
        Self { code, message: message.into(), next, witnesses: Vec::new() }
    }

    #[must_use]
    pub fn with_next(mut self, next: impl Into<String>) -> Self {
        self.next = next.into();
        self
    }

    #[must_use]
    pub fn with_witnesses(mut self, witnesses: Vec<serde_json::Value>) -> Self {
        self.witnesses = witnesses;
        self
    }

    /// Where several tables are spoken of: says which one it is about, unless it says so itself.
    #[must_use]
    pub fn about(mut self, table: &TableName) -> Self {
        let name = table.to_string();
        if !names(&self.message, &name) {
            self.message = format!("{name}: {}", self.message);
        }
        self
    }

    /// As the terminal shows it, without colours.
    pub fn render(&self) -> String {
        let mut text = format!("error: {}  [{}]", self.message, self.code);
        for (at, line) in self.next.lines().enumerate() {
            text.push_str(if at == 0 { "\n  next: " } else { "\n        " });
            text.push_str(line);
        }
        text
    }

    /// As `--json` shows it: one object, one line.
    pub fn to_json(&self) -> String {
        serde_json::json!({ "error": self }).to_string()
    }
}

/// Does the text hold this name, and not merely as a part of a longer one?
fn names(text: &str, name: &str) -> bool {
    let goes_on = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-');
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (text.get(..at), text.get(at + name.len()..));
        let ends = |next: Option<char>| next.is_none_or(|c| !goes_on(c));
        // A full stop or dot behind it may end the sentence.
        let after = after
            .map(|after| after.strip_prefix('.').filter(|rest| !rest.starts_with(goes_on)).unwrap_or(after));
        ends(before.and_then(|before| before.chars().next_back()))
            && ends(after.and_then(|after| after.chars().next()))
    })
}

impl From<ConfigError> for UserError {
    fn from(error: ConfigError) -> Self {
        let next = error.next();
        Self::new(ReasonCode::ConfigInvalid, error.to_string()).with_next(next)
    }
}

impl From<CatalogError> for UserError {
    fn from(error: CatalogError) -> Self {
        let code = error.reason();
        let split = matches!(
            error,
            CatalogError::Unsupported { .. } | CatalogError::ReadOnly(_) | CatalogError::Unavailable(_)
        );
        let message = error.to_string();
        // These say behind the first semicolon what to do about them.
        match message.split_once("; ") {
            Some((what, next)) if split => Self::new(code, what).with_next(next),
            _ => Self::new(code, message),
        }
    }
}

impl From<LedgerError> for UserError {
    fn from(error: LedgerError) -> Self {
        let message = error.to_string();
        let code = match &error {
            LedgerError::NoSuchRequest(_) => ReasonCode::RequestNotFound,
            LedgerError::NoSuchReview(_) => ReasonCode::ReviewNotFound,
            LedgerError::NoSuchState(_) => ReasonCode::InvalidArgument,
            LedgerError::Server { .. } => ReasonCode::LedgerUnusable,
            LedgerError::UnsafeStructure { .. } => ReasonCode::UnsafeStructure,
            LedgerError::Transition { .. }
            | LedgerError::BoundToIntent { .. }
            | LedgerError::PastCancelling { .. }
            | LedgerError::ReviewDecided { .. } => ReasonCode::WrongState,
            other => match other.fault() {
                LedgerFault::Unusable => ReasonCode::LedgerUnusable,
                LedgerFault::Retry => {
                    return Self::new(ReasonCode::LedgerUnusable, message)
                        .with_next("try again; if it stays, see which process holds its lock");
                }
                LedgerFault::StepDown | LedgerFault::Refused => ReasonCode::Internal,
            },
        };
        let split = matches!(
            code,
            ReasonCode::LedgerUnusable | ReasonCode::RequestNotFound | ReasonCode::ReviewNotFound
        );
        // These say behind the last semicolon what to do about them.
        match message.rsplit_once("; ") {
            Some((what, next)) if split => Self::new(code, what).with_next(next),
            _ => Self::new(code, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_its_table_once() {
        let flights: TableName = "nyc.flights".parse().unwrap();
        let about = |text: &str| UserError::new(ReasonCode::BranchNotFound, text).about(&flights).message;
        for text in [
            "branch 'x' not found in nyc.flights",
            "nyc.flights: gone",
            "the policy of nyc.flights has no class 'a'",
            "'nyc.flights' is no table.",
            "there is no nyc.flights. It was dropped",
        ] {
            assert_eq!(about(text), text);
        }
        for text in ["snapshot 7 is gone", "nyc.flights_old is near", "x.nyc.flights is", "nyc.flights.a"] {
            assert_eq!(about(text), format!("nyc.flights: {text}"));
        }
        assert_eq!(about(&about("snapshot 7 is gone")), "nyc.flights: snapshot 7 is gone");
    }

    #[test]
    fn an_error_is_shown_with_its_code_and_the_next_step() {
        let error = UserError::new(ReasonCode::BranchNotFound, "branch 'ingst/x' not found in nyc.flights")
            .with_next("did you mean 'ingest/x'?\nnames match exactly");
        assert_eq!(
            error.render(),
            "error: branch 'ingst/x' not found in nyc.flights  [branch-not-found]\n  \
             next: did you mean 'ingest/x'?\n        names match exactly"
        );
        assert_eq!(
            error.to_json(),
            r#"{"error":{"code":"branch-not-found","message":"branch 'ingst/x' not found in nyc.flights","next":"did you mean 'ingest/x'?\nnames match exactly"}}"#
        );
    }

    #[test]
    fn what_adapters_say_to_do_becomes_the_next_step() {
        let error = UserError::from(CatalogError::Unavailable("no file; correct the uri".to_owned()));
        assert_eq!(
            error.render(),
            "error: the catalog did not answer: no file  [catalog-unavailable]\n  next: correct the uri"
        );
        let error = UserError::from(LedgerError::NoSuchRequest(mergeberg_kernel::ids::RequestId(4)));
        assert_eq!(
            error.render(),
            "error: there is no request 4 in this queue  [request-not-found]\n  \
             next: `request list` shows all"
        );
    }

    #[test]
    fn without_words_of_its_own_it_says_the_next_action_of_the_code() {
        let error = UserError::from(CatalogError::NotFound("nyc.flihgts".parse().unwrap()));
        assert_eq!(error.code, ReasonCode::TableNotFound);
        assert_eq!(error.next, ReasonCode::TableNotFound.next_action());
    }
}
