//! Runs of a pipeline's own command: when the next one is started, and what the last one is worth.
//!
//! A run is given a temporary branch at the target's head. What it leaves there stands in for the pinned head from
//! then on: it is classified, staged and checked as any source is. Where it conflicts with what the target took while
//! it ran, it is run again.

use crate::ids::SnapshotId;
use crate::policy::ExternalReplay;
use crate::reason::ReasonCode;

/// Runs in a row that came to nothing through no fault of the command (the target moved on, the worker ended)
/// before the next one is put off.
pub const MAX_UNLUCKY_RUNS: u32 = 5;
/// Rest before the next run once that many were unlucky, in milliseconds.
pub const UNLUCKY_REST_MS: i64 = 10 * 60 * 1000;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    UnderWay,
    /// It left this head on its branch.
    Done(SnapshotId),
    /// It failed in a way that another run may not.
    Failed,
    /// It said that another run would fail as well.
    Refused,
    TimedOut,
    LeftNothing,
    OffBase,
    /// Its worker ended, or its branch was removed: nobody can tell what became of it.
    Lost,
    /// Its request ended.
    Cancelled,
}

/// One run for the request's present pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalRun {
    pub outcome: RunOutcome,
    /// When it was ordered; when it ended, if it has.
    pub at_ms: i64,
    /// One sentence for people on how it ended.
    pub text: String,
}

/// Where a request stands with its runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExternalStanding {
    /// Another run may be started.
    MayRun {
        /// Runs so far came to nothing for what others did: nobody who came later gets in its way now.
        protected: bool,
    },
    Running {
        protected: bool,
    },
    /// This head stands in for the pinned one.
    Result {
        head: SnapshotId,
        /// Should it be of no use: may another run be started at once?
        rests: bool,
    },
    /// Runs came to nothing again and again; the next one is put off.
    Rests,
    /// For good.
    Failed {
        code: ReasonCode,
        text: String,
    },
}

impl ExternalStanding {
    /// Where a request stands with these runs, oldest first.
    pub fn of(runs: &[ExternalRun], policy: &ExternalReplay, now_ms: i64) -> Self {
        let unlucky = runs
            .iter()
            .rev()
            .filter(|run| run.outcome != RunOutcome::UnderWay)
            .take_while(|run| matches!(run.outcome, RunOutcome::Done(_) | RunOutcome::Lost))
            .count();
        let unlucky = u32::try_from(unlucky).unwrap_or(u32::MAX);
        let Some(last) = runs.last() else { return Self::MayRun { protected: false } };
        let rested = now_ms.saturating_sub(last.at_ms) >= UNLUCKY_REST_MS;
        let rests = unlucky >= MAX_UNLUCKY_RUNS && !rested;
        let protected = runs.iter().any(|run| matches!(run.outcome, RunOutcome::Done(_)));
        let failed = |code| Self::Failed { code, text: last.text.clone() };
        match last.outcome {
            RunOutcome::UnderWay => Self::Running { protected },
            RunOutcome::Done(head) => Self::Result { head, rests },
            RunOutcome::Refused => failed(ReasonCode::ExternalFailed),
            RunOutcome::LeftNothing => failed(ReasonCode::ExternalEmpty),
            RunOutcome::OffBase => failed(ReasonCode::ExternalOffBase),
            RunOutcome::Failed if failures(runs) >= policy.attempts => failed(ReasonCode::ExternalFailed),
            RunOutcome::TimedOut if failures(runs) >= policy.attempts => failed(ReasonCode::ExternalTimeout),
            RunOutcome::Lost if rests => Self::Rests,
            // A request that waits was not cancelled: somebody put it back.
            RunOutcome::Failed | RunOutcome::TimedOut | RunOutcome::Lost | RunOutcome::Cancelled => {
                Self::MayRun { protected }
            }
        }
    }

    /// The head that stands in for the pinned one.
    pub fn result(&self) -> Option<SnapshotId> {
        match self {
            Self::Result { head, rests: _ } => Some(*head),
            Self::MayRun { .. } | Self::Running { .. } | Self::Rests | Self::Failed { .. } => None,
        }
    }
}

/// Runs that failed since one left something. A lost one says nothing of the command.
pub fn failures(runs: &[ExternalRun]) -> u32 {
    let since = runs.iter().rev().take_while(|run| !matches!(run.outcome, RunOutcome::Done(_)));
    let failed = since.filter(|run| matches!(run.outcome, RunOutcome::Failed | RunOutcome::TimedOut)).count();
    u32::try_from(failed).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Duration, Scope};

    fn policy(attempts: u32) -> ExternalReplay {
        ExternalReplay {
            command: vec!["rebuild".to_owned()],
            url: None,
            token_env: None,
            scope: Scope::Table,
            timeout: Duration { ms: 1_000 },
            attempts,
        }
    }

    fn standing(outcomes: &[RunOutcome], now_ms: i64) -> ExternalStanding {
        let run = |(at, outcome): (usize, &RunOutcome)| ExternalRun {
            outcome: *outcome,
            at_ms: i64::try_from(at).unwrap(),
            text: format!("run {at}"),
        };
        let runs: Vec<ExternalRun> = outcomes.iter().enumerate().map(run).collect();
        ExternalStanding::of(&runs, &policy(2), now_ms)
    }

    const DONE: RunOutcome = RunOutcome::Done(SnapshotId(7));

    #[test]
    fn a_run_that_left_something_is_used_whatever_came_before() {
        use RunOutcome::{Failed, Lost, TimedOut, UnderWay};
        assert_eq!(standing(&[], 0), ExternalStanding::MayRun { protected: false });
        assert_eq!(standing(&[UnderWay], 0), ExternalStanding::Running { protected: false });
        for before in [vec![], vec![Failed], vec![TimedOut, Lost], vec![DONE, Failed]] {
            let runs: Vec<RunOutcome> = before.into_iter().chain([DONE]).collect();
            assert_eq!(standing(&runs, 9).result(), Some(SnapshotId(7)), "{runs:?}");
        }
        assert_eq!(standing(&[DONE, UnderWay], 9), ExternalStanding::Running { protected: true });
    }

    #[test]
    fn failures_are_tried_again_within_the_bound_of_the_class() {
        use RunOutcome::{Failed, LeftNothing, Lost, OffBase, Refused, TimedOut};
        let failed = |code, text: &str| ExternalStanding::Failed { code, text: text.to_owned() };
        let may = |protected| ExternalStanding::MayRun { protected };
        assert_eq!(standing(&[Failed], 9), may(false));
        assert_eq!(standing(&[Failed, Failed], 9), failed(ReasonCode::ExternalFailed, "run 1"));
        assert_eq!(standing(&[Failed, TimedOut], 9), failed(ReasonCode::ExternalTimeout, "run 1"));
        // A lost run is no failure of the command, and one that left something starts the count again.
        assert_eq!(standing(&[Failed, Lost], 9), may(false));
        assert_eq!(standing(&[Failed, DONE, Failed], 9), may(true));
        assert_eq!(standing(&[Refused], 9), failed(ReasonCode::ExternalFailed, "run 0"));
        assert_eq!(standing(&[LeftNothing], 9), failed(ReasonCode::ExternalEmpty, "run 0"));
        assert_eq!(standing(&[OffBase], 9), failed(ReasonCode::ExternalOffBase, "run 0"));
    }

    #[test]
    fn unlucky_runs_rest_after_the_bound_and_are_never_failed_for_it() {
        let lost = vec![RunOutcome::Lost; MAX_UNLUCKY_RUNS as usize];
        assert_eq!(standing(&lost[1..], 9), ExternalStanding::MayRun { protected: false });
        assert_eq!(standing(&lost, 9), ExternalStanding::Rests);
        assert_eq!(
            standing(&lost, UNLUCKY_REST_MS + 9),
            ExternalStanding::MayRun { protected: false },
            "rested"
        );
        let stale = vec![DONE; MAX_UNLUCKY_RUNS as usize];
        let rests = |rests| ExternalStanding::Result { head: SnapshotId(7), rests };
        assert_eq!(standing(&stale[1..], 9), rests(false));
        assert_eq!(standing(&stale, 9), rests(true), "the result itself serves as long as it fits");
    }
}
