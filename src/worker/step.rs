//! The named steps of the protocol, so that a test can kill the process at each of them.
//!
//! Most are between two writes. Those of the three commits lie inside the catalog's own commit, between its
//! metadata file and the swap of the pointer, and right after the swap, before anybody knows of it.

/// After this step nothing more happens in a process that is told to die there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Admitted,
    /// An operation is about to be run again; nothing is written.
    ReplayBegun,
    /// A file of a replay is noted in the ledger and not begun.
    FileNoted,
    /// The files of a checkpoint are written, and not committed.
    CheckpointWritten,
    Checkpointed,
    /// Every file of a replay is written.
    Replayed,
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

    /// Those of an operation that is run again, between being admitted and the candidates.
    pub const REPLAY: [Self; 5] =
        [Self::ReplayBegun, Self::FileNoted, Self::CheckpointWritten, Self::Checkpointed, Self::Replayed];

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
            Self::ReplayBegun => "replay-begun",
            Self::FileNoted => "file-noted",
            Self::CheckpointWritten => "checkpoint-written",
            Self::Checkpointed => "checkpointed",
            Self::Replayed => "replayed",
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

/// Environment variable that names the step at which a debug build kills itself with SIGKILL: `file-noted`, or
/// `file-noted#2` for the second time that it is reached.
#[cfg(debug_assertions)]
pub const DIE_AT: &str = "MERGEBERG_TEST_DIE_AT";

/// Environment variable by which a debug build runs a command at a step and waits for it: `file-noted=COMMAND`.
#[cfg(debug_assertions)]
pub const RUN_AT: &str = "MERGEBERG_TEST_RUN_AT";

/// Marks a step. In a debug build the process kills itself here, or runs a command, when a test asked for it; a
/// release build does nothing.
pub fn reached(step: Step) {
    tracing::debug!(step = step.name(), "step");
    #[cfg(debug_assertions)]
    in_tests::reached(step);
}

#[cfg(debug_assertions)]
pub use in_tests::{InCommits, die};

/// What only debug builds have.
#[cfg(debug_assertions)]
mod in_tests {
    use std::collections::HashMap;
    use std::process::Command;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::{DIE_AT, RUN_AT, Step};
    use crate::table::sql_catalog::CommitHook;

    /// The step reached last: the catalog does not know what its commits are for.
    static LAST: Mutex<Option<Step>> = Mutex::new(None);
    /// How often each was reached.
    static TIMES: Mutex<Option<HashMap<&'static str, u32>>> = Mutex::new(None);

    pub(super) fn reached(step: Step) {
        *lock(&LAST) = Some(step);
        act_at(step);
    }

    fn act_at(step: Step) {
        let times = {
            let mut all = lock(&TIMES);
            let times = all.get_or_insert_default().entry(step.name()).or_default();
            *times += 1;
            *times
        };
        let is_meant = |wanted: &str| match wanted.split_once('#') {
            None => wanted == step.name() && times == 1,
            Some((name, time)) => name == step.name() && time.parse() == Ok(times),
        };
        if std::env::var(DIE_AT).is_ok_and(|wanted| is_meant(&wanted)) {
            die();
        }
        if let Ok(wanted) = std::env::var(RUN_AT)
            && let Some((wanted, command)) = wanted.split_once('=')
            && is_meant(wanted)
        {
            let status = Command::new("sh").args(["-c", command]).status();
            if !status.is_ok_and(|status| status.success()) {
                // A test must not go on as if it had been run.
                die();
            }
        }
    }

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the steps inside a commit of the SQL catalog.
    pub struct InCommits;

    impl CommitHook for InCommits {
        fn before_swap(&self) {
            let last = *lock(&LAST);
            match last {
                Some(Step::TrainRecorded) => act_at(Step::StagingFileWritten),
                Some(Step::Evicted) => act_at(Step::DroppingFileWritten),
                Some(Step::IntentWritten) => act_at(Step::LandingFileWritten),
                _ => {}
            }
        }

        fn after_swap(&self) {
            let last = *lock(&LAST);
            match last {
                Some(Step::TrainRecorded) => act_at(Step::StagingSwapped),
                Some(Step::Evicted) => act_at(Step::DroppingSwapped),
                Some(Step::IntentWritten) => act_at(Step::LandingSwapped),
                _ => {}
            }
        }
    }

    /// SIGKILL, as a crash: no destructor, no flush.
    pub fn die() -> ! {
        let id = std::process::id().to_string();
        // Through `kill`, since the standard library has no way to send a signal.
        let _ = Command::new("kill").args(["-KILL", &id]).status();
        std::process::abort()
    }
}
