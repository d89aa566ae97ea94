//! Exit codes: one closed list, documented by generation in `docs/cli.md`. Numbers never change.

use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;

macro_rules! exits {
    ($($variant:ident = $number:literal, $meaning:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Exit {
            $(#[doc = $meaning] $variant = $number,)*
        }

        impl Exit {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }
        }
    };
}

exits! {
    Ok = 0, "It was done; for `request wait` and `--wait`: the request landed, or was published before.";
    Internal = 1, "A fault of mergeberg itself.";
    Usage = 2, "The command line, `mergeberg.toml` or a policy is wrong.";
    BadInput = 3, "What was named does not exist or cannot be used: table, branch, request, class.";
    NotLanded = 4, "The request ended without landing: refused, withdrawn or cancelled.";
    TimedOut = 5, "The request had not ended when the time to wait was over.";
    Unbalanced = 6, "The report does not add up.";
    Unavailable = 7, "Catalog, storage or ledger cannot be used now; trying again later may help.";
}

impl Exit {
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The code of a command that failed for this reason.
    pub fn of_error(code: ReasonCode) -> Self {
        match code {
            ReasonCode::Internal => Self::Internal,
            ReasonCode::ConfigInvalid | ReasonCode::InvalidArgument => Self::Usage,
            ReasonCode::WaitTimedOut => Self::TimedOut,
            ReasonCode::ReportUnbalanced => Self::Unbalanced,
            ReasonCode::CatalogUnavailable
            | ReasonCode::CatalogRefused
            | ReasonCode::LedgerUnusable
            | ReasonCode::WarehouseReadOnly => Self::Unavailable,
            // All others speak of what was named: a table, branch, snapshot, request, class.
            _ => Self::BadInput,
        }
    }

    /// The code of a wait that saw this end.
    pub fn of_end(state: RequestState) -> Self {
        match state {
            RequestState::Landed | RequestState::AlreadyPublished => Self::Ok,
            RequestState::Refused(_) | RequestState::Withdrawn(_) | RequestState::Cancelled => {
                Self::NotLanded
            }
            RequestState::Queued
            | RequestState::Held(_)
            | RequestState::Planning
            | RequestState::Staged
            | RequestState::Checking
            | RequestState::Landing
            | RequestState::Unknown
            | RequestState::InReview => Self::TimedOut,
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.number())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_documented_ones() {
        let numbers: Vec<u8> = Exit::ALL.iter().map(|exit| exit.number()).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_wait_tells_landed_refused_and_unfinished_apart() {
        assert_eq!(Exit::of_end(RequestState::Landed), Exit::Ok);
        assert_eq!(Exit::of_end(RequestState::AlreadyPublished), Exit::Ok);
        assert_eq!(Exit::of_end(RequestState::Refused(ReasonCode::DuplicateKey)), Exit::NotLanded);
        assert_eq!(Exit::of_end(RequestState::InReview), Exit::TimedOut);
    }
}
