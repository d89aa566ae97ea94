//! Replays what landed, in landing order, on rows in a map, and compares.
//!
//! Landing order is read from the target's ancestry and from the ledger's receipts; what each request did
//! comes from the history itself. Compared after every car and every commit of a stranger.

use std::collections::{BTreeMap, BTreeSet};

use mergeberg::ledger::ForeignKind;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;

use super::history::{Asked, History};
use super::rows::{Op, Rows};
use crate::support::{House, main_branch};

/// What the histories of a run came to, so that a generator gone dull is noticed.
pub type Tally = BTreeMap<String, usize>;

struct CarTail {
    request: RequestId,
    first: bool,
    last: bool,
}

pub async fn judge(history: &mut History, tally: &mut Tally) {
    let applied = rows_follow_the_landing_order(history).await;
    every_request_has_one_end(history, &applied, tally).await;
    strangers_are_told(history).await;
    history.house.assert_sound().await;
}

/// The snapshots of the history whose operations the target has.
async fn rows_follow_the_landing_order(history: &mut History) -> BTreeSet<SnapshotId> {
    let table = history.house.loaded().await;
    let head = table.facts.head(&main_branch()).unwrap();
    let line = table.facts.snapshots.after(None, head).unwrap();
    let cars = cars(&history.house).await;
    let mut rows = Rows::default();
    let mut applied: BTreeSet<SnapshotId> = BTreeSet::new();
    let mut landed: BTreeSet<RequestId> = BTreeSet::new();
    for id in line {
        let name = history.name_of(id);
        let compared = if let Some(car) = cars.get(&id) {
            if car.first {
                assert!(landed.insert(car.request), "request {} landed twice", car.request);
                let asked = history.asked.iter().find(|a| a.id == car.request).unwrap().clone();
                apply_request(history, &asked, &mut rows, &mut applied);
            }
            history.say(&format!("main: {name} of request {}", car.request));
            car.last
        } else {
            let whose = match (history.baseline.contains(&id), history.foreign.contains(&id)) {
                (true, false) => "before the queue",
                (false, true) => "stranger",
                _ => panic!("nobody made {name}, which is on main"),
            };
            applied.insert(id);
            let op = history.op_at(id).cloned();
            if let Some(op) = &op {
                op.apply(&mut rows, &history.feed);
            }
            history.say(&format!("main: {name}, {whose}"));
            op.is_some()
        };
        if compared {
            let found = history.house.rows_at(&table, id).await;
            let expected = rows.sorted();
            assert!(
                found == expected,
                "rows after {name} differ\nexpected {}\nfound    {}",
                told(&expected),
                told(&found)
            );
        }
    }
    for car in cars.values() {
        assert!(landed.contains(&car.request), "request {} has a receipt and is not on main", car.request);
    }
    applied
}

/// What of the request's line is not on the target yet, in order.
fn apply_request(history: &History, asked: &Asked, rows: &mut Rows, applied: &mut BTreeSet<SnapshotId>) {
    let line = history.line_of(asked.pinned);
    let pending: Vec<SnapshotId> = line.into_iter().filter(|id| applied.insert(*id)).collect();
    let ops: Vec<&Op> = pending.iter().filter_map(|id| history.op_at(*id)).collect();
    let days: BTreeSet<u32> = ops.iter().flat_map(|op| op.adds_in(&history.feed)).collect();
    let before = rows.duplicates(&days);
    for op in ops {
        op.apply(rows, &history.feed);
    }
    if asked.source.starts_with("ingest/") {
        for (key, count) in rows.duplicates(&days) {
            let had = before.get(&key).copied().unwrap_or_default();
            assert!(
                count <= had.max(1),
                "request {} landed although it brings order {key:?} again",
                asked.id
            );
        }
    }
}

async fn cars(house: &House) -> BTreeMap<SnapshotId, CarTail> {
    let mut cars = BTreeMap::new();
    for landing in house.ledger.receipts(0, i64::MAX).await.unwrap() {
        for car in &landing.intent.cars {
            assert!(!car.candidates.is_empty(), "request {} landed as nothing", car.request);
            for (at, id) in car.candidates.iter().enumerate() {
                let tail =
                    CarTail { request: car.request, first: at == 0, last: at + 1 == car.candidates.len() };
                assert!(cars.insert(*id, tail).is_none(), "snapshot {id} has two receipts");
            }
        }
    }
    cars
}

async fn every_request_has_one_end(history: &History, applied: &BTreeSet<SnapshotId>, tally: &mut Tally) {
    for asked in &history.asked {
        let row = history.house.request(asked.id).await;
        let attempts = history.house.ledger.attempts(asked.id).await.unwrap();
        let ends = attempts.iter().filter(|attempt| attempt.state.is_final()).count();
        assert_eq!(ends, 1, "request {} is {} and ended {ends} times", asked.id, row.state);
        assert!(row.state.is_final(), "request {} is {} when nothing is left to do", asked.id, row.state);
        let word = match row.state {
            RequestState::Landed => format!("landed as {}", row.classification.clone().unwrap_or_default()),
            other => other.to_string(),
        };
        *tally.entry(word).or_default() += 1;
        let on_target = history.line_of(asked.pinned).iter().all(|id| applied.contains(id));
        match row.state {
            RequestState::Landed => {}
            RequestState::AlreadyPublished => {
                assert!(on_target, "request {} is called published and is not on main", asked.id);
            }
            RequestState::Cancelled => {}
            RequestState::Withdrawn(_) => {
                assert!(
                    history.harmed.contains(&asked.source),
                    "request {} was {} and nobody touched its branch",
                    asked.id,
                    row.state
                );
            }
            RequestState::Refused(code) => {
                assert!(
                    has_grounds(history, asked, code, applied),
                    "request {} was {} without grounds: {:?}",
                    asked.id,
                    row.state,
                    row.detail
                );
            }
            _ => unreachable!("{} is not final", row.state),
        }
    }
}

/// Could this refusal be right, as far as the history's own operations tell?
fn has_grounds(history: &History, asked: &Asked, code: ReasonCode, applied: &BTreeSet<SnapshotId>) -> bool {
    let ops = history.numbered_ops(asked.pinned);
    let class = asked.source.split('/').next().unwrap();
    let pending = history.line_of(asked.pinned).iter().any(|id| !applied.contains(id));
    let published_part = history.line_of(asked.pinned).iter().any(|id| applied.contains(id));
    match code {
        // An unrecorded replacement of days that were empty may look like an append.
        ReasonCode::OverlappingAppend => {
            class == "transform"
                && ops.iter().any(|(number, op)| match op {
                    Op::Append(_) => true,
                    Op::ReplaceDays { .. } => !history.recorded.contains(number),
                    _ => false,
                })
        }
        ReasonCode::Conflict => ops.iter().any(|(number, op)| match op {
            Op::DeleteDays(_) | Op::Update { .. } | Op::InsertIfAbsent(_) => true,
            Op::ReplaceDays { .. } => !history.recorded.contains(number),
            Op::Append(_) => class == "derived",
            Op::Compact(_) => true,
            Op::OverwriteWhere { .. } => false,
        }),
        ReasonCode::StaleCompaction => ops.iter().any(|(_, op)| matches!(op, Op::Compact(_))),
        ReasonCode::DuplicateKey => brings_what_another_brought(history, &ops),
        ReasonCode::PartiallyPublished => pending && published_part,
        ReasonCode::UnrelatedHistory => history.from_nothing,
        _ => false,
    }
}

/// Some key of these operations was written by another operation too, so that it can be there twice.
fn brings_what_another_brought(history: &History, ops: &[(usize, &Op)]) -> bool {
    let mut counts: BTreeMap<(i64, u32), usize> = BTreeMap::new();
    for key in history.ops.iter().flat_map(|op| op.brings(&history.feed)) {
        *counts.entry(key).or_default() += 1;
    }
    ops.iter().flat_map(|(_, op)| op.brings(&history.feed)).any(|key| counts[&key] > 1)
}

/// Every commit of a stranger is recorded once, and told apart.
async fn strangers_are_told(history: &History) {
    let house = &history.house;
    let table = house.loaded().await;
    let rows = house.ledger.foreign(&table.facts.uuid, &main_branch()).await.unwrap();
    let told: BTreeMap<SnapshotId, ForeignKind> = rows.iter().map(|row| (row.snapshot, row.kind)).collect();
    assert_eq!(told.len(), rows.len(), "a commit of a stranger is told twice");
    let ids: BTreeSet<SnapshotId> = told.keys().copied().collect();
    assert_eq!(ids, history.foreign, "the strangers' commits are not those that are told");
    for (id, kind) in told {
        let compacted = matches!(history.op_at(id), Some(Op::Compact(_)));
        let expected = if compacted { ForeignKind::Maintenance } else { ForeignKind::Bypass };
        assert_eq!(kind, expected, "{}", history.name_of(id));
    }
}

fn told(rows: &[crate::support::Order]) -> String {
    let rows: Vec<String> =
        rows.iter().map(|row| format!("{}:{} {} {}", row.day, row.id, row.status, row.cents)).collect();
    rows.join(", ")
}
