//! Request states: a closed list with a total transition function (design, section 3).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::reason::ReasonCode;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "reason")]
pub enum RequestState {
    /// Waits for admission.
    Queued,
    /// Waits for something named; looked at again every tick.
    Held(ReasonCode),
    /// Admitted to a train.
    Planning,
    /// Its candidates are in the catalog under the train's temporary branch.
    Staged,
    Checking,
    /// The intent is written; the catalog may be called at any moment.
    Landing,
    /// The catalog was called and nobody knows what it did; the table is held.
    Unknown,
    /// Waits for a reviewer's decision on a structure item.
    InReview,
    Landed,
    AlreadyPublished,
    Refused(ReasonCode),
    /// The source went away or was reset.
    Withdrawn(ReasonCode),
    /// A person took it back.
    Cancelled,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEvent {
    Admit,
    Hold(ReasonCode),
    /// Back to the queue: the head moved, the train failed for another's fault, the worker died.
    Requeue,
    Stage,
    Check,
    WriteIntent,
    LoseAnswer,
    Land,
    FindPublished,
    Refuse(ReasonCode),
    Withdraw(ReasonCode),
    AskReview,
    Cancel,
}

/// An event that a state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request that is {from} cannot take {event:?}")]
pub struct TransitionError {
    pub from: RequestState,
    pub event: RequestEvent,
}

impl RequestState {
    /// No event changes it any more.
    pub fn is_final(self) -> bool {
        match self {
            Self::Landed
            | Self::AlreadyPublished
            | Self::Refused(_)
            | Self::Withdrawn(_)
            | Self::Cancelled => true,
            Self::Queued
            | Self::Held(_)
            | Self::Planning
            | Self::Staged
            | Self::Checking
            | Self::Landing
            | Self::Unknown
            | Self::InReview => false,
        }
    }

    /// Is it waiting to be taken by admission?
    pub fn is_waiting(self) -> bool {
        matches!(self, Self::Queued | Self::Held(_) | Self::InReview)
    }

    pub fn reason(self) -> Option<ReasonCode> {
        match self {
            Self::Held(code) | Self::Refused(code) | Self::Withdrawn(code) => Some(code),
            _ => None,
        }
    }

    /// The word of the closed list, as stored and shown.
    pub fn word(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Held(_) => "held",
            Self::Planning => "planning",
            Self::Staged => "staged",
            Self::Checking => "checking",
            Self::Landing => "landing",
            Self::Unknown => "unknown",
            Self::InReview => "in-review",
            Self::Landed => "landed",
            Self::AlreadyPublished => "already-published",
            Self::Refused(_) => "refused",
            Self::Withdrawn(_) => "withdrawn",
            Self::Cancelled => "cancelled",
        }
    }

    /// The state of a stored word and reason; `None` for a pair that no release wrote.
    pub fn from_parts(word: &str, reason: Option<ReasonCode>) -> Option<Self> {
        match (word, reason) {
            ("queued", None) => Some(Self::Queued),
            ("held", Some(code)) => Some(Self::Held(code)),
            ("planning", None) => Some(Self::Planning),
            ("staged", None) => Some(Self::Staged),
            ("checking", None) => Some(Self::Checking),
            ("landing", None) => Some(Self::Landing),
            ("unknown", None) => Some(Self::Unknown),
            ("in-review", None) => Some(Self::InReview),
            ("landed", None) => Some(Self::Landed),
            ("already-published", None) => Some(Self::AlreadyPublished),
            ("refused", Some(code)) => Some(Self::Refused(code)),
            ("withdrawn", Some(code)) => Some(Self::Withdrawn(code)),
            ("cancelled", None) => Some(Self::Cancelled),
            _ => None,
        }
    }

    /// The state after `event`.
    pub fn after(self, event: RequestEvent) -> Result<Self, TransitionError> {
        use RequestEvent as E;
        let refused = Err(TransitionError { from: self, event });
        match (self, event) {
            (state, _) if state.is_final() => refused,

            (Self::Queued | Self::Held(_) | Self::InReview, E::Admit) => Ok(Self::Planning),
            (_, E::Admit) => refused,

            // From `planning` on a request is only given back by its own train.
            (Self::Queued | Self::Held(_) | Self::InReview | Self::Planning, E::Hold(code)) => {
                Ok(Self::Held(code))
            }
            (Self::Staged | Self::Checking, E::Hold(code)) => Ok(Self::Held(code)),
            (_, E::Hold(_)) => refused,

            (_, E::Requeue) => Ok(Self::Queued),

            (Self::Planning, E::Stage) => Ok(Self::Staged),
            (_, E::Stage) => refused,

            (Self::Staged, E::Check) => Ok(Self::Checking),
            (_, E::Check) => refused,

            (Self::Checking, E::WriteIntent) => Ok(Self::Landing),
            (_, E::WriteIntent) => refused,

            (Self::Landing, E::LoseAnswer) => Ok(Self::Unknown),
            (_, E::LoseAnswer) => refused,

            (Self::Landing | Self::Unknown, E::Land) => Ok(Self::Landed),
            (_, E::Land) => refused,

            (Self::Landing | Self::Unknown, E::FindPublished) => refused,
            (_, E::FindPublished) => Ok(Self::AlreadyPublished),

            // Once the intent is written only the catalog's answer decides.
            (Self::Landing | Self::Unknown, E::Refuse(_) | E::Withdraw(_) | E::AskReview) => refused,
            (_, E::Refuse(code)) => Ok(Self::Refused(code)),
            (_, E::Withdraw(code)) => Ok(Self::Withdrawn(code)),
            (_, E::AskReview) => Ok(Self::InReview),

            // Also while its operation is run again; the ledger refuses it once the train is recorded.
            (Self::Queued | Self::Held(_) | Self::InReview | Self::Planning, E::Cancel) => {
                Ok(Self::Cancelled)
            }
            (_, E::Cancel) => refused,
        }
    }
}

impl fmt::Display for RequestState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            Some(code) => f.pad(&format!("{}({code})", self.word())),
            None => f.pad(self.word()),
        }
    }
}
