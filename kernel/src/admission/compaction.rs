//! Compactions among the waiting requests: they yield to everybody who changes rows.
//!
//! A compaction can be made again from whatever is there; a change of rows whose files it took away often cannot.
//! So it rides only where it puts nobody off: in trains of compactions alone, so that no other request waits for
//! its checks, when no other can ride or it is past its class's age bound, and never ahead of one that it would
//! cause to be run again or refused. The price is its own: while it waits, it may become stale.

use std::collections::BTreeSet;

use super::set::{self, PartTurn};
use super::{RequestFacts, Riding, TargetPlan, TrainPlan, Verdict, as_ahead, in_order, is_aged, take};
use crate::classify::{TargetSide, Witness, blocked_by_ahead};
use crate::ids::RequestId;
use crate::reason::ReasonCode;

/// Gives each compaction its place behind the train of changes: in it nowhere, after it when that is empty, before
/// it when it is old enough.
pub(super) fn join(waiting: &[RequestFacts], target: &TargetPlan<'_>, plan: &mut TrainPlan) {
    let compactions: Vec<&RequestFacts> =
        in_order(waiting, target.now_ms).into_iter().filter(|facts| facts.class.is_compaction()).collect();
    if compactions.is_empty() {
        return;
    }
    let changes: Vec<&RequestFacts> = waiting
        .iter()
        .filter(|facts| !facts.class.is_compaction() && !has_ended(facts.request, plan))
        .collect();
    let set_is_next = plan.parts.iter().any(|(_, turn)| matches!(turn, PartTurn::Next(_)));
    let idle = plan.cars.is_empty() && !set_is_next;
    let mut train = TrainPlan::default();
    let mut state = Riding::default();
    for facts in compactions {
        let mut alone = TrainPlan::default();
        take(facts, target, &mut alone, &mut Riding::default());
        if alone.cars.is_empty() {
            // Refused, published or held by itself: that does not depend on who else is there.
            train.verdicts.extend(alone.verdicts);
            continue;
        }
        let hold = |code, text, witnesses| (facts.request, Verdict::Hold { code, text, witnesses });
        if let Some((first, witnesses)) = puts_off(facts, &changes) {
            let text = format!("waits for request {first}, whose files it would replace");
            train.verdicts.push(hold(ReasonCode::OverlapsAhead, text, witnesses));
        } else if !idle && !is_aged(facts, target.now_ms) {
            let text = "requests that change rows can land now, and go first".to_owned();
            train.verdicts.push(hold(ReasonCode::BehindChanges, text, Vec::new()));
        } else {
            take(facts, target, &mut train, &mut state);
        }
    }
    plan.verdicts.append(&mut train.verdicts);
    if !train.cars.is_empty() {
        plan.next = plan.cars.iter().map(|car| car.request).collect();
        plan.cars = train.cars;
        set::put_off(plan);
    }
}

fn has_ended(request: RequestId, plan: &TrainPlan) -> bool {
    plan.verdicts.iter().any(|(other, verdict)| {
        *other == request
            && match verdict {
                Verdict::Refuse { .. } | Verdict::AlreadyPublished { .. } | Verdict::Withdraw { .. } => true,
                Verdict::Hold { .. }
                | Verdict::InReview { .. }
                | Verdict::Repin { .. }
                | Verdict::RunExternal { .. } => false,
            }
    })
}

/// The first of `changes` that would be run again or refused for this compaction, if that landed first.
fn puts_off(facts: &RequestFacts, changes: &[&RequestFacts]) -> Option<(RequestId, Vec<Witness>)> {
    let Ok(units) = &facts.units else { return None };
    let mine = TargetSide::new(units.iter().flat_map(|unit| as_ahead(facts.request, unit)).collect());
    changes.iter().find_map(|other| {
        let theirs = other.units.as_ref().ok()?;
        let (_, witnesses) = blocked_by_ahead(theirs, &mine, &BTreeSet::new(), &other.class)?;
        Some((other.request, witnesses))
    })
}
