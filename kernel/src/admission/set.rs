//! Sets: several tables as one request, landed in one commit or not at all.
//!
//! On each of its tables a set has a part with a place in the order there. It lands alone, when it is next on every
//! one of them: what came first goes first, and what came later waits meanwhile. A set that cannot go for a reason
//! of its own (a review, a check that could not run) keeps nobody waiting.

use super::{Car, RequestFacts, Riding, TargetPlan, TrainPlan, Verdict, car_of, goes_ahead, judge, wait};
use crate::ids::{RequestId, TableName};
use crate::reason::ReasonCode;

/// What a table's lane knows of the set that a request is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartFacts {
    /// The set: the id of its first part.
    pub set: RequestId,
    /// Another table's part cannot go yet, so nobody here waits for this one.
    pub held_elsewhere: bool,
}

/// Where a part stands in its table's lane.
#[derive(Clone, Debug)]
pub enum PartTurn {
    /// It is next, as this car.
    Next(Box<Car>),
    /// What came first goes first.
    Behind(String),
    /// The part itself cannot go.
    Not(Verdict),
}

/// Gives a part its turn. The one that is next closes the lane.
pub(super) fn take(
    facts: &RequestFacts,
    part: PartFacts,
    target: &TargetPlan<'_>,
    plan: &mut TrainPlan,
    state: &mut Riding,
) {
    if part.held_elsewhere {
        return;
    }
    let is_next = plan.cars.is_empty() && state.closed.is_none();
    let turn = match judge(facts, target, is_next) {
        Err(verdict) => PartTurn::Not(verdict),
        Ok((action, classification)) if is_next => {
            state.closed = Some((ReasonCode::BehindSet, facts.request));
            PartTurn::Next(Box::new(car_of(facts, action, classification, true)))
        }
        Ok((action, classification)) => {
            // Whoever came later passes it only where their order makes no difference.
            let car = car_of(facts, action, classification, true);
            goes_ahead(facts, &car, state);
            let ahead = state.closed.map(|(_, request)| request).or(plan.cars.first().map(|car| car.request));
            wait(facts, car.classification.units, state);
            PartTurn::Behind(ahead.map_or_else(
                || "others came first".to_owned(),
                |ahead| format!("request {ahead} came first"),
            ))
        }
    };
    plan.parts.push((facts.request, turn));
}

/// Compactions past their age bound go ahead of the part that would have been next.
pub(super) fn put_off(plan: &mut TrainPlan) {
    for (_, turn) in &mut plan.parts {
        if matches!(turn, PartTurn::Next(_)) {
            *turn = PartTurn::Behind("compactions past their age bound go first".to_owned());
        }
    }
}

/// One part of a set, with its turn on its table.
#[derive(Clone, Debug)]
pub struct SetPart {
    pub request: RequestId,
    pub table: TableName,
    /// `None`: its table cannot be looked at, or the part has not been looked at yet; it waits under a reason of
    /// its own.
    pub turn: Option<PartTurn>,
}

#[derive(Clone, Debug)]
#[must_use]
pub enum SetDecision {
    /// Every part is next: the cars, in the order of the parts.
    Go(Vec<Car>),
    /// What becomes of parts now. A part that ends takes the others with it; those are not named here.
    Not(Vec<(RequestId, Verdict)>),
}

/// Does the set go? Only whole: `missing` says that parts of it cannot be read.
pub fn decide(parts: Vec<SetPart>, missing: bool) -> SetDecision {
    if let Some(ends) = ends(&parts) {
        return SetDecision::Not(ends);
    }
    let repins: Vec<(RequestId, Verdict)> = parts
        .iter()
        .filter_map(|part| match &part.turn {
            Some(PartTurn::Not(verdict @ Verdict::Repin { .. })) => Some((part.request, verdict.clone())),
            _ => None,
        })
        .collect();
    if !repins.is_empty() {
        return SetDecision::Not(repins);
    }
    if missing {
        let text = "a part of the set cannot be read";
        return SetDecision::Not(waiting(&parts, ReasonCode::SetPartHeld, text));
    }
    let stuck = parts.iter().find(|part| matches!(part.turn, None | Some(PartTurn::Not(_))));
    if let Some(stuck) = stuck {
        let text = format!("waits for request {}, its part on {}", stuck.request, stuck.table);
        return SetDecision::Not(waiting(&parts, ReasonCode::SetPartHeld, &text));
    }
    let behind = parts.iter().find_map(|part| match &part.turn {
        Some(PartTurn::Behind(text)) => Some(format!("on {} {text}", part.table)),
        _ => None,
    });
    if let Some(text) = behind {
        return SetDecision::Not(waiting(&parts, ReasonCode::WaitsForTables, &text));
    }
    SetDecision::Go(
        parts
            .into_iter()
            .filter_map(|part| match part.turn {
                Some(PartTurn::Next(car)) => Some(*car),
                _ => None,
            })
            .collect(),
    )
}

/// Verdicts that end the set. A set of which a part is on its target already can not land together any more.
fn ends(parts: &[SetPart]) -> Option<Vec<(RequestId, Verdict)>> {
    let verdicts = || {
        parts.iter().filter_map(|part| match &part.turn {
            Some(PartTurn::Not(verdict)) => Some((part, verdict)),
            _ => None,
        })
    };
    let own: Vec<(RequestId, Verdict)> = verdicts()
        .filter(|(_, verdict)| matches!(verdict, Verdict::Refuse { .. } | Verdict::Withdraw { .. }))
        .map(|(part, verdict)| (part.request, verdict.clone()))
        .collect();
    if !own.is_empty() {
        return Some(own);
    }
    let published: Vec<(&SetPart, &Verdict)> =
        verdicts().filter(|(_, verdict)| matches!(verdict, Verdict::AlreadyPublished { .. })).collect();
    if published.is_empty() {
        return None;
    }
    if published.len() == parts.len() {
        return Some(published.into_iter().map(|(part, verdict)| (part.request, verdict.clone())).collect());
    }
    let refused = published.into_iter().map(|(part, _)| {
        let text = format!("its part on {} is on the target already, other parts are not", part.table);
        let code = ReasonCode::PartiallyPublished;
        (part.request, Verdict::Refuse { code, text, class: None, witnesses: Vec::new() })
    });
    Some(refused.collect())
}

/// Parts with a verdict of their own keep it; those that could go wait under `code`.
fn waiting(parts: &[SetPart], code: ReasonCode, text: &str) -> Vec<(RequestId, Verdict)> {
    let hold = || Verdict::Hold { code, text: text.to_owned(), witnesses: Vec::new() };
    parts
        .iter()
        .filter_map(|part| match &part.turn {
            None => None,
            Some(PartTurn::Not(verdict)) => Some((part.request, verdict.clone())),
            Some(PartTurn::Next(_) | PartTurn::Behind(_)) => Some((part.request, hold())),
        })
        .collect()
}
