//! Errors that people read: what is wrong, a stable code, and what to do next.

use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use crate::config::ConfigError;
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
}

impl UserError {
    /// With the code's own next action.
    pub fn new(code: ReasonCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), next: code.next_action().to_owned() }
    }

    #[must_use]
    pub fn with_next(mut self, next: impl Into<String>) -> Self {
        self.next = next.into();
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

impl From<ConfigError> for UserError {
    fn from(error: ConfigError) -> Self {
        let next = error.next();
        Self { code: ReasonCode::ConfigInvalid, message: error.to_string(), next }
    }
}

impl From<CatalogError> for UserError {
    fn from(error: CatalogError) -> Self {
        let code = match &error {
            CatalogError::NotFound(_) => ReasonCode::TableNotFound,
            CatalogError::Unreadable { .. } => ReasonCode::TableUnreadable,
            CatalogError::Unsupported { .. } => ReasonCode::FormatUnsupported,
            CatalogError::ReadOnly(_) => ReasonCode::WarehouseReadOnly,
            CatalogError::Unavailable(_) => ReasonCode::CatalogUnavailable,
            CatalogError::Refused(_) => ReasonCode::CatalogRefused,
        };
        Self::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn without_words_of_its_own_it_says_the_next_action_of_the_code() {
        let error = UserError::from(CatalogError::NotFound("nyc.flihgts".parse().unwrap()));
        assert_eq!(error.code, ReasonCode::TableNotFound);
        assert_eq!(error.next, ReasonCode::TableNotFound.next_action());
    }
}
