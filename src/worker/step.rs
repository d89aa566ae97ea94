//! The named steps of the protocol, so that a test can kill the process at each of them.
//!
//! Most are between two writes. Those of the three commits lie inside the catalog's own commit, between its
//! metadata file and the swap of the pointer, and right after the swap, before anybody knows of it.

/// After this step nothing more happens in a process that is told to die there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Admitted,
    CandidatesWritten,
    TrainRecorded,
    StagingFileWritten,
    StagingSwapped,
    Staged,
    EvidenceRecorded,
    /// The guilty have left, the others are queued again; the train is still in the catalog.
    Evicted,
    DroppingFileWritten,
    DroppingSwapped,
    TrainDropped,
    IntentWritten,
    LandingFileWritten,
    LandingSwapped,
    Landed,
    ReceiptWritten,
    /// A run of a pipeline's own command is in the ledger; its branch is not there yet.
    ExternalOrdered,
    ExternalBranched,
    ExternalStarted,
    /// The command has ended, and the ledger does not know it.
    ExternalEnded,
    ExternalRecorded,
    ExternalSwept,
}

impl Step {
    /// Those of a train.
    pub const ALL: [Self; 16] = [
        Self::Admitted,
        Self::CandidatesWritten,
        Self::TrainRecorded,
        Self::StagingFileWritten,
        Self::StagingSwapped,
        Self::Staged,
        Self::EvidenceRecorded,
        Self::Evicted,
        Self::DroppingFileWritten,
        Self::DroppingSwapped,
        Self::TrainDropped,
        Self::IntentWritten,
        Self::LandingFileWritten,
        Self::LandingSwapped,
        Self::Landed,
        Self::ReceiptWritten,
    ];

    /// Those of a run of a pipeline's own command, beside the trains.
    pub const EXTERNAL: [Self; 6] = [
        Self::ExternalOrdered,
        Self::ExternalBranched,
        Self::ExternalStarted,
        Self::ExternalEnded,
        Self::ExternalRecorded,
        Self::ExternalSwept,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::CandidatesWritten => "candidates-written",
            Self::TrainRecorded => "train-recorded",
            Self::StagingFileWritten => "staging-file-written",
            Self::StagingSwapped => "staging-swapped",
            Self::Staged => "staged",
            Self::EvidenceRecorded => "evidence-recorded",
            Self::Evicted => "evicted",
            Self::DroppingFileWritten => "dropping-file-written",
            Self::DroppingSwapped => "dropping-swapped",
            Self::TrainDropped => "train-dropped",
            Self::IntentWritten => "intent-written",
            Self::LandingFileWritten => "landing-file-written",
            Self::LandingSwapped => "landing-swapped",
            Self::Landed => "landed",
            Self::ReceiptWritten => "receipt-written",
            Self::ExternalOrdered => "external-ordered",
            Self::ExternalBranched => "external-branched",
            Self::ExternalStarted => "external-started",
            Self::ExternalEnded => "external-ended",
            Self::ExternalRecorded => "external-recorded",
            Self::ExternalSwept => "external-swept",
        }
    }
}

/// Environment variable that names the step at which a debug build kills itself with SIGKILL.
#[cfg(debug_assertions)]
pub const DIE_AT: &str = "MERGEBERG_TEST_DIE_AT";

/// Marks a step. In a debug build the process kills itself here when a test asked for it; a release build
/// does nothing.
pub fn reached(step: Step) {
    tracing::debug!(step = step.name(), "step");
    #[cfg(debug_assertions)]
    crash::reached(step);
}

#[cfg(debug_assertions)]
pub use crash::{InCommits, die};

/// What only debug builds have.
#[cfg(debug_assertions)]
mod crash {
    use std::sync::Mutex;

    use super::{DIE_AT, Step};
    use crate::table::sql_catalog::CommitHook;

    /// The step reached last: the catalog does not know what its commits are for.
    static LAST: Mutex<Option<Step>> = Mutex::new(None);

    pub(super) fn reached(step: Step) {
        *last() = Some(step);
        if std::env::var(DIE_AT).as_deref() == Ok(step.name()) {
            die();
        }
    }

    fn last() -> std::sync::MutexGuard<'static, Option<Step>> {
        LAST.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Marks the steps inside a commit of the SQL catalog.
    pub struct InCommits;

    impl InCommits {
        fn die_at(step: Step) {
            if std::env::var(DIE_AT).as_deref() == Ok(step.name()) {
                die();
            }
        }
    }

    impl CommitHook for InCommits {
        fn before_swap(&self) {
            match *last() {
                Some(Step::TrainRecorded) => Self::die_at(Step::StagingFileWritten),
                Some(Step::Evicted) => Self::die_at(Step::DroppingFileWritten),
                Some(Step::IntentWritten) => Self::die_at(Step::LandingFileWritten),
                _ => {}
            }
        }

        fn after_swap(&self) {
            match *last() {
                Some(Step::TrainRecorded) => Self::die_at(Step::StagingSwapped),
                Some(Step::Evicted) => Self::die_at(Step::DroppingSwapped),
                Some(Step::IntentWritten) => Self::die_at(Step::LandingSwapped),
                _ => {}
            }
        }
    }

    /// SIGKILL, as a crash: no destructor, no flush.
    pub fn die() -> ! {
        let id = std::process::id().to_string();
        // Through `kill`, since the standard library has no way to send a signal.
        let _ = std::process::Command::new("kill").args(["-KILL", &id]).status();
        std::process::abort()
    }
}
