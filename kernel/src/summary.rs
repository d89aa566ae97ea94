//! Figures of the daily report, and whether the target's history adds up.
//!
//! Pure: rows in, figures out. Which rows belong to a day is decided by whoever reads the ledger (a day
//! holds the requests that ended in it); how figures look is decided by `report`.
//!
//! Percentiles are nearest-rank: of n values in ascending order, the p-th percentile is the value at
//! position ceil(p / 100 * n). Each one is a value that really occurred; nothing is interpolated. The
//! median is the 50th.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::ids::{RefName, RequestId, SnapshotId, TableName};
use crate::reason::ReasonCode;
use crate::state::RequestState;

/// Shown for a request that ended before it was classified.
pub const NOT_CLASSIFIED: &str = "not-classified";

/// A request that ended on the day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedRequest {
    pub request: RequestId,
    pub class: String,
    /// The word of its last classification; `None`: it ended before one was made.
    pub classification: Option<String>,
    pub state: RequestState,
    pub enqueued_ms: i64,
    /// When admission last took it into a train; `None`: never.
    pub admitted_ms: Option<i64>,
    pub ended_ms: i64,
    /// The set that it is a part of: a set is counted once.
    pub set: Option<RequestId>,
}

/// A request that has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenRequest {
    pub request: RequestId,
    pub class: String,
    pub state: RequestState,
    pub enqueued_ms: i64,
    /// The set that it is a part of: a set is counted once.
    pub set: Option<RequestId>,
}

/// What the day's figures are made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DayRows {
    pub ended: Vec<EndedRequest>,
    pub open: Vec<OpenRequest>,
    /// Foreign snapshots seen on the day that were proved to change no data.
    pub maintenance: u64,
    /// Foreign snapshots seen on the day that changed data.
    pub bypasses: u64,
}

/// Median and 95th percentile of some durations, nearest-rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Spread {
    pub median_ms: i64,
    pub p95_ms: i64,
}

impl Spread {
    /// `None` for no values at all.
    pub fn of(values: &[i64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        Some(Self { median_ms: nearest_rank(&sorted, 50)?, p95_ms: nearest_rank(&sorted, 95)? })
    }
}

/// The value at position ceil(percent / 100 * n) of ascending values; `None` when there are none.
fn nearest_rank(sorted: &[i64], percent: usize) -> Option<i64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// Figures of one class, or of all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GroupFigures {
    pub ended: u64,
    pub landed: u64,
    pub already_published: u64,
    pub refused: u64,
    pub withdrawn: u64,
    pub cancelled: u64,
    /// Ended requests by classification.
    pub classifications: BTreeMap<String, u64>,
    /// Enqueue to admission, over ended requests that were admitted.
    pub wait: Option<Spread>,
    /// Admission to landed, over requests that landed.
    pub merge: Option<Spread>,
}

/// The request that waits longest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Waiting {
    pub request: RequestId,
    pub class: String,
    pub state: &'static str,
    pub reason: Option<ReasonCode>,
    pub waited_ms: i64,
}

/// Requests that ended without publishing for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Failures {
    pub reason: ReasonCode,
    pub requests: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DayFigures {
    pub all: GroupFigures,
    /// By class name.
    pub classes: BTreeMap<String, GroupFigures>,
    /// The most frequent first.
    pub failures: Vec<Failures>,
    pub maintenance: u64,
    pub bypasses: u64,
    pub open: u64,
    pub oldest_waiting: Option<Waiting>,
}

/// The day's figures. `now_ms` is the moment up to which waiting is counted.
pub fn day_figures(rows: &DayRows, now_ms: i64) -> DayFigures {
    let mut by_class: BTreeMap<String, Vec<&EndedRequest>> = BTreeMap::new();
    let mut failures: BTreeMap<ReasonCode, u64> = BTreeMap::new();
    let ended = once(&rows.ended, |row| (row.set, row.state, row.request));
    let open = once(&rows.open, |row| (row.set, row.state, row.request));
    for row in ended.iter().copied() {
        by_class.entry(row.class.clone()).or_default().push(row);
        if let Some(reason) = row.state.reason() {
            *failures.entry(reason).or_default() += 1;
        }
    }
    let mut failures: Vec<Failures> =
        failures.into_iter().map(|(reason, requests)| Failures { reason, requests }).collect();
    failures.sort_by_key(|f| (std::cmp::Reverse(f.requests), f.reason.code()));

    let oldest = open.iter().min_by_key(|row| (row.enqueued_ms, row.request));
    DayFigures {
        all: group(&ended),
        classes: by_class.into_iter().map(|(class, rows)| (class, group(&rows))).collect(),
        failures,
        maintenance: rows.maintenance,
        bypasses: rows.bypasses,
        open: open.len() as u64,
        oldest_waiting: oldest.map(|row| Waiting {
            request: row.request,
            class: row.class.clone(),
            state: row.state.word(),
            reason: row.state.reason(),
            waited_ms: (now_ms - row.enqueued_ms).max(0),
        }),
    }
}

/// The rows, each set by one of its parts: the one that the others wait for or failed with, else the first.
fn once<T>(rows: &[T], of: impl Fn(&T) -> (Option<RequestId>, RequestState, RequestId)) -> Vec<&T> {
    let follows = |state: RequestState| {
        use ReasonCode as R;
        matches!(state.reason(), Some(R::SetPartFailed | R::SetPartHeld | R::WaitsForTables))
    };
    let mut chosen: BTreeMap<RequestId, (bool, RequestId)> = BTreeMap::new();
    for row in rows {
        if let (Some(set), state, request) = of(row) {
            let mine = (follows(state), request);
            chosen.entry(set).and_modify(|best| *best = (*best).min(mine)).or_insert(mine);
        }
    }
    let stays = |row: &&T| match of(row) {
        (Some(set), _, request) => chosen.get(&set).is_some_and(|(_, chosen)| *chosen == request),
        (None, _, _) => true,
    };
    rows.iter().filter(stays).collect()
}

fn group(rows: &[&EndedRequest]) -> GroupFigures {
    let mut figures = GroupFigures::default();
    let mut waits = Vec::new();
    let mut merges = Vec::new();
    for row in rows {
        figures.ended += 1;
        match row.state {
            RequestState::Landed => figures.landed += 1,
            RequestState::AlreadyPublished => figures.already_published += 1,
            RequestState::Refused(_) => figures.refused += 1,
            RequestState::Withdrawn(_) => figures.withdrawn += 1,
            RequestState::Cancelled => figures.cancelled += 1,
            // No end states: such a row is not among the ended ones.
            RequestState::Queued
            | RequestState::Held(_)
            | RequestState::Planning
            | RequestState::Staged
            | RequestState::Checking
            | RequestState::Landing
            | RequestState::Unknown
            | RequestState::InReview => {}
        }
        let word = row.classification.as_deref().unwrap_or(NOT_CLASSIFIED);
        *figures.classifications.entry(word.to_owned()).or_default() += 1;
        if let Some(admitted_ms) = row.admitted_ms {
            // Clocks of two machines may disagree by a little; a negative wait is none.
            waits.push((admitted_ms - row.enqueued_ms).max(0));
            if row.state == RequestState::Landed {
                merges.push((row.ended_ms - admitted_ms).max(0));
            }
        }
    }
    figures.wait = Spread::of(&waits);
    figures.merge = Spread::of(&merges);
    figures
}

/// Every snapshot of a target since the queue first saw it, and what the ledger knows of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHistory {
    pub table: TableName,
    pub target: RefName,
    /// The target's ancestry after the baseline, as the catalog has it.
    pub on_target: Vec<SnapshotId>,
    /// Older snapshots were expired before the baseline was reached: what the ledger has beyond
    /// `on_target` cannot be missed then.
    pub cut: bool,
    pub landed: Vec<SnapshotId>,
    pub maintenance: Vec<SnapshotId>,
    pub bypass: Vec<SnapshotId>,
}

/// Does `snapshots on the target = landed + maintenance + bypass` hold? Compared as sets, since one
/// unknown and one lost snapshot would cancel each other out in a sum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Balance {
    pub table: TableName,
    pub target: RefName,
    pub on_target: u64,
    pub landed: u64,
    pub maintenance: u64,
    pub bypass: u64,
    /// On the target, but the ledger does not know how it came there.
    pub unexplained: Vec<SnapshotId>,
    /// Landed or seen according to the ledger, but no longer on the target.
    pub lost: Vec<SnapshotId>,
    /// Explained in more than one way.
    pub ambiguous: Vec<SnapshotId>,
    /// Counted only as far back as the catalog remembers.
    pub cut: bool,
}

impl Balance {
    pub fn of(history: &TargetHistory) -> Self {
        let on_target: BTreeSet<SnapshotId> = history.on_target.iter().copied().collect();
        let landed: BTreeSet<SnapshotId> = history.landed.iter().copied().collect();
        let maintenance: BTreeSet<SnapshotId> = history.maintenance.iter().copied().collect();
        let bypass: BTreeSet<SnapshotId> = history.bypass.iter().copied().collect();

        let mut unexplained = Vec::new();
        let mut ambiguous = Vec::new();
        let (mut in_landed, mut in_maintenance, mut in_bypass) = (0, 0, 0);
        for id in &on_target {
            let ways = [landed.contains(id), maintenance.contains(id), bypass.contains(id)];
            in_landed += u64::from(ways[0]);
            in_maintenance += u64::from(ways[1]);
            in_bypass += u64::from(ways[2]);
            match ways.iter().filter(|way| **way).count() {
                0 => unexplained.push(*id),
                1 => {}
                _ => ambiguous.push(*id),
            }
        }
        let mut lost = BTreeSet::new();
        for id in landed.iter().chain(&maintenance).chain(&bypass) {
            if !on_target.contains(id) && !history.cut {
                lost.insert(*id);
            }
        }
        Self {
            table: history.table.clone(),
            target: history.target.clone(),
            on_target: on_target.len() as u64,
            landed: in_landed,
            maintenance: in_maintenance,
            bypass: in_bypass,
            unexplained,
            lost: lost.into_iter().collect(),
            ambiguous,
            cut: history.cut,
        }
    }

    pub fn holds(&self) -> bool {
        self.unexplained.is_empty() && self.lost.is_empty() && self.ambiguous.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(id: i64, class: &str, state: RequestState, times: (i64, Option<i64>, i64)) -> EndedRequest {
        EndedRequest {
            request: RequestId(id),
            class: class.to_owned(),
            classification: (state == RequestState::Landed).then(|| "cherry-pick".to_owned()),
            state,
            enqueued_ms: times.0,
            admitted_ms: times.1,
            ended_ms: times.2,
            set: None,
        }
    }

    fn history(on_target: &[i64], landed: &[i64], maintenance: &[i64], bypass: &[i64]) -> TargetHistory {
        let ids = |list: &[i64]| list.iter().map(|id| SnapshotId(*id)).collect();
        TargetHistory {
            table: "nyc.flights".parse().unwrap(),
            target: RefName::main(),
            on_target: ids(on_target),
            cut: false,
            landed: ids(landed),
            maintenance: ids(maintenance),
            bypass: ids(bypass),
        }
    }

    #[test]
    fn a_set_is_counted_once_by_the_part_that_says_why() {
        let part = |id, set, class: &str, state| EndedRequest {
            set: Some(RequestId(set)),
            ..ended(id, class, state, (0, Some(100), 1_000))
        };
        let follower = RequestState::Refused(ReasonCode::SetPartFailed);
        let rows = DayRows {
            ended: vec![
                part(1, 1, "a", RequestState::Landed),
                part(2, 1, "b", RequestState::Landed),
                part(3, 3, "a", follower),
                part(4, 3, "b", RequestState::Refused(ReasonCode::DuplicateKey)),
                ended(5, "a", RequestState::Landed, (0, Some(100), 1_000)),
            ],
            open: vec![
                OpenRequest {
                    request: RequestId(6),
                    class: "a".to_owned(),
                    state: RequestState::Held(ReasonCode::SetPartHeld),
                    enqueued_ms: 0,
                    set: Some(RequestId(6)),
                },
                OpenRequest {
                    request: RequestId(7),
                    class: "b".to_owned(),
                    state: RequestState::Held(ReasonCode::TableHeld),
                    enqueued_ms: 0,
                    set: Some(RequestId(6)),
                },
            ],
            ..DayRows::default()
        };
        let figures = day_figures(&rows, 9_000);
        assert_eq!((figures.all.ended, figures.all.landed, figures.all.refused), (3, 2, 1));
        assert_eq!(figures.failures, [Failures { reason: ReasonCode::DuplicateKey, requests: 1 }]);
        assert_eq!((figures.classes["a"].ended, figures.classes["b"].ended), (2, 1));
        assert_eq!(figures.open, 1);
        assert_eq!(figures.oldest_waiting.map(|waiting| waiting.request), Some(RequestId(7)));
    }

    #[test]
    fn an_empty_day_has_zeros_and_no_percentiles() {
        let figures = day_figures(&DayRows::default(), 1_000);
        assert_eq!(figures.all, GroupFigures::default());
        assert!(figures.classes.is_empty() && figures.failures.is_empty());
        assert_eq!(figures.oldest_waiting, None);
    }

    #[test]
    fn one_request_is_its_own_median_and_95th_percentile() {
        let rows = DayRows {
            ended: vec![ended(1, "ingest", RequestState::Landed, (100, Some(350), 1_000))],
            ..DayRows::default()
        };
        let figures = day_figures(&rows, 2_000);
        assert_eq!(figures.all.wait, Some(Spread { median_ms: 250, p95_ms: 250 }));
        assert_eq!(figures.all.merge, Some(Spread { median_ms: 650, p95_ms: 650 }));
        assert_eq!(figures.classes["ingest"], figures.all);
        assert_eq!(figures.all.classifications["cherry-pick"], 1);
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        assert_eq!(Spread::of(&[]), None);
        // ceil(0.5 * 4) = 2 and ceil(0.95 * 4) = 4, in any order of arrival.
        assert_eq!(Spread::of(&[40, 10, 30, 20]), Some(Spread { median_ms: 20, p95_ms: 40 }));
        // ceil(0.5 * 5) = 3 and ceil(0.95 * 5) = 5.
        assert_eq!(Spread::of(&[5, 4, 3, 2, 1]), Some(Spread { median_ms: 3, p95_ms: 5 }));
        // ceil(0.95 * 100) = 95, ceil(0.95 * 20) = 19: no value above the rank is taken.
        let hundred: Vec<i64> = (1..=100).collect();
        assert_eq!(Spread::of(&hundred), Some(Spread { median_ms: 50, p95_ms: 95 }));
        let twenty: Vec<i64> = (1..=20).collect();
        assert_eq!(Spread::of(&twenty), Some(Spread { median_ms: 10, p95_ms: 19 }));
    }

    #[test]
    fn refused_requests_wait_but_do_not_merge_and_are_counted_by_reason() {
        use ReasonCode as R;
        let rows = DayRows {
            ended: vec![
                ended(1, "ingest", RequestState::Refused(R::DuplicateKey), (0, Some(10), 90)),
                ended(2, "transform", RequestState::Refused(R::Reconciliation), (0, Some(30), 90)),
                ended(3, "ingest", RequestState::Refused(R::DuplicateKey), (0, None, 90)),
                ended(4, "ingest", RequestState::Withdrawn(R::BranchGone), (0, None, 90)),
                ended(5, "ingest", RequestState::Cancelled, (0, None, 90)),
                ended(6, "ingest", RequestState::AlreadyPublished, (0, Some(20), 90)),
            ],
            ..DayRows::default()
        };
        let figures = day_figures(&rows, 100);
        let failures: Vec<_> = figures.failures.iter().map(|f| (f.reason, f.requests)).collect();
        assert_eq!(failures, vec![(R::DuplicateKey, 2), (R::BranchGone, 1), (R::Reconciliation, 1)]);
        let all = &figures.all;
        assert_eq!((all.ended, all.landed, all.refused), (6, 0, 3));
        assert_eq!((all.withdrawn, all.cancelled, all.already_published), (1, 1, 1));
        assert_eq!(all.wait, Some(Spread { median_ms: 20, p95_ms: 30 }));
        assert_eq!(all.merge, None);
        assert_eq!(all.classifications[NOT_CLASSIFIED], 6);
    }

    #[test]
    fn the_oldest_open_request_is_named_with_its_reason() {
        let open = |id, enqueued_ms, state| OpenRequest {
            request: RequestId(id),
            class: "ingest".to_owned(),
            state,
            enqueued_ms,
            set: None,
        };
        let rows = DayRows {
            open: vec![
                open(7, 500, RequestState::Queued),
                open(5, 200, RequestState::Held(ReasonCode::OverlapsAhead)),
            ],
            ..DayRows::default()
        };
        let oldest = day_figures(&rows, 1_200).oldest_waiting.unwrap();
        assert_eq!((oldest.request, oldest.waited_ms), (RequestId(5), 1_000));
        assert_eq!(oldest.reason, Some(ReasonCode::OverlapsAhead));
    }

    #[test]
    fn a_target_balances_when_every_snapshot_is_explained_once() {
        let balance = Balance::of(&history(&[1, 2, 3, 4], &[1, 2], &[3], &[4]));
        assert!(balance.holds());
        assert_eq!((balance.on_target, balance.landed, balance.maintenance, balance.bypass), (4, 2, 1, 1));
        assert!(Balance::of(&history(&[], &[], &[], &[])).holds());
    }

    #[test]
    fn one_unknown_and_one_lost_snapshot_do_not_cancel_out() {
        let balance = Balance::of(&history(&[1, 9], &[1, 2], &[], &[]));
        assert!(!balance.holds());
        assert_eq!(balance.unexplained, vec![SnapshotId(9)]);
        assert_eq!(balance.lost, vec![SnapshotId(2)]);
    }

    #[test]
    fn a_snapshot_explained_twice_does_not_balance() {
        let balance = Balance::of(&history(&[1], &[1], &[], &[1]));
        assert_eq!(balance.ambiguous, vec![SnapshotId(1)]);
        assert!(!balance.holds());
    }

    #[test]
    fn expired_history_is_not_missed_but_what_is_left_must_be_explained() {
        let cut = |on_target: &[i64]| TargetHistory { cut: true, ..history(on_target, &[1, 2, 3], &[], &[]) };
        assert!(Balance::of(&cut(&[3])).holds());
        assert!(!Balance::of(&cut(&[3, 4])).holds());
    }
}
