//! What went wrong with an object, in words for people, and which of it matters to a decision.

use std::error::Error as StdError;

use iceberg::{Error, ErrorKind};
use opendal::ErrorKind as OpKind;

/// What a failure means for whoever asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::table) enum FaultKind {
    /// There is no such object.
    Missing,
    /// The storage knows us too little, or lets us do too little.
    Denied,
    /// Anything else: nobody's fault, tried again.
    Trouble,
}

/// The source of every error of an object store.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct StorageFault {
    kind: FaultKind,
    text: String,
}

impl StorageFault {
    pub fn trouble(text: impl Into<String>) -> Self {
        Self { kind: FaultKind::Trouble, text: text.into() }
    }

    pub fn denied(text: impl Into<String>) -> Self {
        Self { kind: FaultKind::Denied, text: text.into() }
    }

    pub fn into_error(self) -> Error {
        Error::new(ErrorKind::Unexpected, "").with_source(self)
    }
}

/// An error of the storage layer, as the crate carries it.
pub(super) fn error_of(error: &opendal::Error, authority: &str) -> Error {
    let told = told(error);
    let fault = match error.kind() {
        OpKind::NotFound => {
            StorageFault { kind: FaultKind::Missing, text: format!("it is not there ({told})") }
        }
        _ if is_over(&told) => {
            StorageFault::denied(format!("the storage's credentials do not hold any more ({told})"))
        }
        OpKind::PermissionDenied => StorageFault::denied(format!(
            "the storage refuses access ({told}); check the credentials of the catalog's storage and their rights"
        )),
        OpKind::ConfigInvalid if told.contains("NoSuchBucket") => StorageFault::trouble(format!(
            "there is no bucket '{authority}' ({told}); check the table's location and the storage's endpoint"
        )),
        OpKind::ConfigInvalid => StorageFault::trouble(format!(
            "the storage cannot be used: {told}; correct the catalog's settings"
        )),
        // The bucket may stand in the host's name, which is Java's default and not PyIceberg's.
        _ if told.contains("dns error") => StorageFault::trouble(format!(
            "{told}; check the storage's endpoint, and where it wants buckets in the path set \
             s3.path-style-access = true"
        )),
        OpKind::RateLimited => StorageFault::trouble(format!("the storage is asked too often ({told})")),
        _ => StorageFault::trouble(told),
    };
    fault.into_error()
}

/// S3 answers 400 to credentials that have ended.
fn is_over(told: &str) -> bool {
    ["ExpiredToken", "InvalidToken", "TokenRefreshRequired"].iter().any(|code| told.starts_with(code))
}

/// What the failure means, wherever in the chain of causes the storage's own error stands. `None`: it is of
/// no object store.
pub(in crate::table) fn kind_of(error: &Error) -> Option<FaultKind> {
    let mut cause = StdError::source(error);
    while let Some(inner) = cause {
        if let Some(StorageFault { kind, .. }) = inner.downcast_ref() {
            return Some(*kind);
        }
        cause = inner.source();
    }
    None
}

/// Message and causes, without the request's context: that holds headers, and more than one line.
fn told(error: &opendal::Error) -> String {
    let mut text = shortened(error.message());
    // The answer to a question for the head of an object has no words.
    if text.is_empty() {
        text = error.kind().to_string();
    }
    let mut cause = StdError::source(error);
    while let Some(inner) = cause {
        // An error of the layer tells its own message only: its text has all that is below it.
        let told = match inner.downcast_ref::<opendal::Error>() {
            Some(layer) => shortened(layer.message()),
            None => inner.to_string(),
        };
        if !text.contains(&told) {
            text.push_str(": ");
            text.push_str(&told);
        }
        cause = inner.source();
    }
    text
}

/// `S3Error { code: "NoSuchKey", message: "...", ... }` as `NoSuchKey: ...`; one line of anything else.
fn shortened(message: &str) -> String {
    let field = |name: &str| {
        let rest = message.split_once(&format!("{name}: \""))?.1;
        Some(rest.split_once('"')?.0).filter(|value| !value.is_empty())
    };
    match (field("code"), field("message")) {
        (Some(code), Some(text)) => format!("{code}: {text}"),
        (Some(code), None) => code.to_owned(),
        _ => message.lines().next().unwrap_or_default().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::error::plain;

    fn told_of(kind: OpKind, message: &str) -> (Option<FaultKind>, String) {
        let error = error_of(&opendal::Error::new(kind, message), "lake");
        (kind_of(&error), plain(&error))
    }

    #[test]
    fn what_matters_to_a_decision_is_told_apart() {
        let s3 = r#"S3Error { code: "NoSuchKey", message: "gone", resource: "/a", request_id: "7" }"#;
        assert_eq!(
            told_of(OpKind::NotFound, s3),
            (Some(FaultKind::Missing), "it is not there (NoSuchKey: gone)".to_owned())
        );
        let (kind, text) =
            told_of(OpKind::PermissionDenied, r#"S3Error { code: "AccessDenied", message: "" }"#);
        assert_eq!(kind, Some(FaultKind::Denied));
        assert!(text.contains("(AccessDenied); check the credentials"), "{text}");
        let over = r#"S3Error { code: "ExpiredToken", message: "over" }"#;
        assert_eq!(told_of(OpKind::Unexpected, over).0, Some(FaultKind::Denied));
        let (kind, text) =
            told_of(OpKind::ConfigInvalid, r#"S3Error { code: "NoSuchBucket", message: "x" }"#);
        assert_eq!(kind, Some(FaultKind::Trouble));
        assert!(text.starts_with("there is no bucket 'lake'"), "{text}");
    }

    #[test]
    fn a_host_that_is_not_known_may_be_a_bucket() {
        let lookup = std::io::Error::other("dns error: lake.minio is not known");
        let error = opendal::Error::new(OpKind::Unexpected, "send http request").set_source(lookup);
        let text = plain(&error_of(&error, "lake"));
        assert!(text.contains("lake.minio") && text.contains("s3.path-style-access"), "{text}");
    }

    #[test]
    fn a_fault_is_found_below_other_errors() {
        let inner = error_of(&opendal::Error::new(OpKind::PermissionDenied, "no"), "b");
        let outer = Error::new(ErrorKind::Unexpected, "reading").with_source(inner);
        assert_eq!(kind_of(&outer), Some(FaultKind::Denied));
        assert_eq!(kind_of(&Error::new(ErrorKind::Unexpected, "disk")), None);
    }

    #[test]
    fn causes_are_told_once() {
        let error = opendal::Error::new(OpKind::Unexpected, "send http request")
            .set_source(std::io::Error::other("connection refused"));
        assert_eq!(told(&error), "send http request: connection refused");
    }
}
