//! The named steps of the protocol, so that a test can kill the process at each of them.

/// After this step nothing more happens in a process that is told to die there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Admitted,
    CandidatesWritten,
    TrainRecorded,
    Staged,
    EvidenceRecorded,
    IntentWritten,
    Landed,
    ReceiptWritten,
}

impl Step {
    pub const ALL: [Self; 8] = [
        Self::Admitted,
        Self::CandidatesWritten,
        Self::TrainRecorded,
        Self::Staged,
        Self::EvidenceRecorded,
        Self::IntentWritten,
        Self::Landed,
        Self::ReceiptWritten,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::CandidatesWritten => "candidates-written",
            Self::TrainRecorded => "train-recorded",
            Self::Staged => "staged",
            Self::EvidenceRecorded => "evidence-recorded",
            Self::IntentWritten => "intent-written",
            Self::Landed => "landed",
            Self::ReceiptWritten => "receipt-written",
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
    if std::env::var(DIE_AT).as_deref() == Ok(step.name()) {
        die();
    }
}

/// SIGKILL, as a crash: no destructor, no flush.
#[cfg(debug_assertions)]
pub fn die() -> ! {
    let id = std::process::id().to_string();
    // Through `kill`, since the standard library has no way to send a signal.
    let _ = std::process::Command::new("kill").args(["-KILL", &id]).status();
    std::process::abort()
}
