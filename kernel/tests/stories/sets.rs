//! Sets of several tables: their place in each table's order, and that they land whole or not at all.

use std::collections::BTreeSet;

use mergeberg_kernel::admission::set::{PartFacts, PartTurn, SetDecision, SetPart, decide};
use mergeberg_kernel::admission::{RequestFacts, StructureStanding, Verdict};
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use mergeberg_kernel::policy::{ClassKind, ClassPolicy, Duration, OnSourceMoved};
use mergeberg_kernel::reason::ReasonCode;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use std::sync::Arc;

use crate::properties::config;
use crate::story::{Story, class, overwrite_where};

/// The request as a part of this set.
fn part(mut request: RequestFacts, set: i64) -> RequestFacts {
    request.part = Some(PartFacts { set: RequestId(set), held_elsewhere: false });
    request
}

fn held_elsewhere(mut request: RequestFacts) -> RequestFacts {
    request.part.as_mut().unwrap().held_elsewhere = true;
    request
}

fn aged(mut request: RequestFacts) -> RequestFacts {
    request.enqueued_at_ms -= request.class.age_bound.ms;
    request
}

/// The turn of each part, in words.
fn turns(h: &Story, waiting: &[RequestFacts]) -> String {
    let word = |turn: &PartTurn| match turn {
        PartTurn::Next(car) => format!("next {}", car.word()),
        PartTurn::Behind(text) => format!("behind ({text})"),
        PartTurn::Not(Verdict::Refuse { code, .. }) => format!("refused {code}"),
        PartTurn::Not(verdict) => format!("{verdict:?}"),
    };
    let parts = h.plan("S1", waiting).parts;
    parts.iter().map(|(id, turn)| format!("{id} {}", word(turn))).collect::<Vec<_>>().join(", ")
}

/// Branches S2.. of one append each, to days of their own.
fn appends(count: i64) -> Story {
    let mut h = Story::ord();
    for n in 0..count {
        h.append(&format!("S{}", n + 2), "S1", &format!("+B{n}@09-{n:02}"));
    }
    h
}

#[test]
fn a_part_that_is_next_closes_its_table() {
    let h = appends(3);
    let waiting = [part(h.merge("S2").request(1), 1), h.merge("S3").request(2), h.merge("S4").request(3)];
    assert_eq!(h.train("S1", &waiting), "2 held behind-set, 3 held behind-set");
    assert_eq!(turns(&h, &waiting), "1 next fast-forward");
}

#[test]
fn what_came_first_goes_first_and_what_comes_later_may_ride_with_it_if_it_does_no_harm() {
    let mut h = appends(2);
    h.append("S5", "S1", "+X@09-01");
    h.append("S6", "S1", "+Y@09-20");
    let waiting = [
        h.merge("S2").request(1),
        part(h.merge("S3").request(2), 2),
        h.merge("S5").request(3),
        h.merge("S6").request(4),
    ];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 4 pick, 3 held overlaps-ahead");
    assert_eq!(turns(&h, &waiting), "2 behind (request 1 came first)");
}

#[test]
fn a_set_that_cannot_go_keeps_nobody_waiting() {
    let h = appends(2);
    let set = part(h.merge("S2").request(1), 1);
    let waiting = [held_elsewhere(set.clone()), h.merge("S3").request(2)];
    assert_eq!(h.train("S1", &waiting), "2 fast-forward");
    assert_eq!(turns(&h, &waiting), "");
    let mut in_review = set;
    in_review.structure = StructureStanding::InReview;
    assert_eq!(h.train("S1", &[in_review, h.merge("S3").request(2)]), "2 fast-forward");
}

#[test]
fn of_two_sets_the_first_goes_first() {
    let h = appends(2);
    let waiting = [part(h.merge("S2").request(1), 1), part(h.merge("S3").request(3), 3)];
    assert_eq!(turns(&h, &waiting), "1 next fast-forward, 3 behind (request 1 came first)");
}

#[test]
fn an_aged_set_goes_ahead_with_every_set_that_came_before_it() {
    let h = appends(3);
    let soon = class(|c| c.age_bound = Duration { ms: 1 });
    let waiting = [
        h.merge("S2").request(1),
        part(h.merge("S3").request(2), 2),
        part(aged(h.merge("S4").under(&soon).request(3)), 3),
    ];
    assert_eq!(h.train("S1", &waiting), "1 held behind-set");
    assert_eq!(turns(&h, &waiting), "2 next fast-forward, 3 behind (request 2 came first)");
}

#[test]
fn a_set_that_runs_over_the_whole_table_keeps_its_place() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20").recorded(overwrite_where("r"));
    h.append("S3", "S1", "+B2@08-22");
    let wide = h.merge("S2").request(1);
    let small = h.merge("S3").request(2);
    assert_eq!(h.train("S1", &[part(wide, 1), small]), "2 held behind-set");
}

#[test]
fn a_compaction_waits_for_a_set_until_its_age_bound() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.compact("S2", "S1", "-A1@08-20 -A2@08-20 +Z@08-20");
    h.append("S3", "S1", "+B@08-22");
    let compaction = class(|c| c.kind = ClassKind::Compaction);
    let young = h.merge("S2").under(&compaction).request(2);
    let set = part(h.merge("S3").request(1), 1);
    assert_eq!(h.train("S1", &[set.clone(), young.clone()]), "2 held behind-changes");
    let waiting = [set, aged(young)];
    assert_eq!(h.train("S1", &waiting), "2 fast-forward");
    assert_eq!(turns(&h, &waiting), "1 behind (compactions past their age bound go first)");
}

fn table(n: usize) -> TableName {
    format!("shop.t{n}").parse().unwrap()
}

/// A set of the turns that parts have on tables of their own.
fn decided(waiting: &[&[RequestFacts]], h: &Story) -> SetDecision {
    let parts = waiting.iter().enumerate().map(|(n, waiting)| {
        let turn = h.plan("S1", waiting).parts.pop();
        let request = waiting.last().unwrap().request;
        SetPart { request, table: table(n), turn: turn.map(|(_, turn)| turn) }
    });
    decide(parts.collect(), false)
}

fn decision(decision: SetDecision) -> String {
    match decision {
        SetDecision::Go(cars) => {
            format!("go {}", cars.iter().map(|c| c.request.to_string()).collect::<Vec<_>>().join(" "))
        }
        SetDecision::Not(verdicts) => {
            let word = |verdict: &Verdict| match verdict {
                Verdict::Hold { code, .. } => format!("held {code}"),
                Verdict::Refuse { code, .. } => format!("refused {code}"),
                Verdict::AlreadyPublished { .. } => "published".to_owned(),
                Verdict::Withdraw { code, .. } => format!("withdrawn {code}"),
                Verdict::InReview { .. } => "in review".to_owned(),
                Verdict::Repin { to } => format!("repin {to}"),
                Verdict::RunExternal { .. } => "run external".to_owned(),
            };
            verdicts.iter().map(|(id, v)| format!("{id} {}", word(v))).collect::<Vec<_>>().join(", ")
        }
    }
}

#[test]
fn a_set_goes_when_every_part_is_next_and_else_says_what_it_waits_for() {
    let h = appends(3);
    let one = part(h.merge("S2").request(1), 1);
    let two = part(h.merge("S3").request(2), 1);
    let ahead = h.merge("S4").request(7);
    assert_eq!(decision(decided(&[std::slice::from_ref(&one), std::slice::from_ref(&two)], &h)), "go 1 2");
    assert_eq!(
        decision(decided(&[std::slice::from_ref(&one), &[ahead, two.clone()]], &h)),
        "1 held waits-for-tables, 2 held waits-for-tables"
    );
    let mut in_review = two.clone();
    in_review.structure = StructureStanding::InReview;
    assert_eq!(
        decision(decided(&[std::slice::from_ref(&one), &[in_review]], &h)),
        "1 held set-part-held, 2 in review"
    );
    // A table that cannot be looked at has told its part why.
    let parts = vec![
        SetPart {
            request: RequestId(1),
            table: table(0),
            turn: h.plan("S1", &[one]).parts.pop().map(|p| p.1),
        },
        SetPart { request: RequestId(2), table: table(1), turn: None },
    ];
    assert_eq!(decision(decide(parts, false)), "1 held set-part-held");
    let whole = || {
        vec![SetPart { request: RequestId(1), table: table(0), turn: Some(PartTurn::Behind(String::new())) }]
    };
    assert_eq!(decision(decide(whole(), true)), "1 held set-part-held");
}

#[test]
fn an_end_of_one_part_is_the_end_of_the_set() {
    let mut h = appends(2);
    h.append("S4", "S1", "+C@08-21");
    let one = part(h.merge("S2").request(1), 1);
    let mut gone = part(h.merge("S3").request(2), 1);
    gone.source_now = mergeberg_kernel::admission::SourceNow::Gone;
    assert_eq!(decision(decided(&[std::slice::from_ref(&one), &[gone]], &h)), "2 withdrawn branch-gone");
    let mut broken = part(h.merge("S3").request(2), 1);
    broken.broken = Some((ReasonCode::DataFileMissing, "f".to_owned()));
    assert_eq!(
        decision(decided(&[std::slice::from_ref(&one), &[broken]], &h)),
        "2 refused data-file-missing"
    );
    // Two parts are on their targets: nothing is left. One is: it can not be made whole any more.
    let mut published = one.clone();
    published.pinned_on_target = true;
    let mut other = part(h.merge("S3").request(2), 1);
    assert_eq!(
        decision(decided(&[&[published.clone()], &[other.clone()]], &h)),
        "1 refused partially-published"
    );
    other.pinned_on_target = true;
    assert_eq!(decision(decided(&[&[published], &[other]], &h)), "1 published, 2 published");
}

#[test]
fn a_branch_that_grew_is_pinned_anew_before_anything_else() {
    let h = appends(2);
    let repin = class(|c| c.on_source_moved = OnSourceMoved::Repin);
    let one = part(h.merge("S2").request(1), 1);
    let mut grew = part(h.merge("S3").under(&repin).request(2), 1);
    grew.source_now = mergeberg_kernel::admission::SourceNow::MovedTo(SnapshotId(99));
    assert_eq!(decision(decided(&[&[one], &[grew]], &h)), "2 repin 99");
}

/// Somebody in a queue of three tables: a request of one of them, or a set of several.
#[derive(Clone, Debug)]
struct Item {
    lanes: BTreeSet<usize>,
    /// Its class's age bound on each table, in ms; everybody is a minute old or more.
    bounds: [i64; 3],
}

fn item() -> impl Strategy<Value = Item> {
    (
        btree_set(0..3_usize, 1..=3),
        prop::array::uniform3(prop::sample::select(vec![1_i64, 61_500, 10_000_000])),
    )
        .prop_map(|(lanes, bounds)| Item { lanes, bounds })
}

fn bounded(ms: i64) -> Arc<ClassPolicy> {
    class(|c| c.age_bound = Duration { ms })
}

proptest! {
    #![proptest_config(config(200))]

    /// Whatever the order and the age bounds of each table, no two sets wait for each other, and nobody waits for ever.
    #[test]
    fn sets_and_single_requests_all_come_to_their_turn(items in vec(item(), 1..9)) {
        let h = appends(9);
        let mut open: Vec<usize> = (0..items.len()).collect();
        let lane = |open: &[usize], lane: usize| -> Vec<RequestFacts> {
            let here = open.iter().filter(|at| items[**at].lanes.contains(&lane));
            here.map(|at| {
                let item = &items[*at];
                let number = i64::try_from(*at).unwrap();
                let merge = h.merge(&format!("S{}", at + 2));
                let mut request = merge.under(&bounded(item.bounds[lane])).request(number);
                request.enqueued_at_ms -= 10_000 - 1_000 * number;
                if item.lanes.len() > 1 { part(request, number) } else { request }
            })
            .collect()
        };
        while !open.is_empty() {
            let mut gone: BTreeSet<usize> = BTreeSet::new();
            for at in &open {
                if items[*at].lanes.len() == 1 {
                    continue;
                }
                let parts = items[*at].lanes.iter().map(|n| {
                    let plan = h.plan("S1", &lane(&open, *n));
                    let turn = plan.parts.into_iter().find(|(id, _)| id.0 == i64::try_from(*at).unwrap());
                    SetPart { request: RequestId(0), table: table(*n), turn: turn.map(|(_, turn)| turn) }
                });
                if matches!(decide(parts.collect(), false), SetDecision::Go(_)) {
                    gone.insert(*at);
                    break;
                }
            }
            if gone.is_empty() {
                for n in 0..3 {
                    let plan = h.plan("S1", &lane(&open, n));
                    gone.extend(plan.cars.iter().map(|car| usize::try_from(car.request.0).unwrap()));
                }
            }
            prop_assert!(!gone.is_empty(), "nobody goes: {:?}", open.iter().map(|at| &items[*at]).collect::<Vec<_>>());
            open.retain(|at| !gone.contains(at));
        }
    }
}
