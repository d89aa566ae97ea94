//! Compactions through the queue: what counts as one, when it is stale, and that it puts nobody off.

use std::sync::Arc;

use mergeberg_kernel::admission::{RequestFacts, StructureStanding};
use mergeberg_kernel::policy::{ClassKind, ClassPolicy, EqualityDeletes, Overlap};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::unit::UnitKind;

use crate::story::{Story, class, record};

fn compaction() -> Arc<ClassPolicy> {
    class(|c| c.kind = ClassKind::Compaction)
}

fn allow() -> Arc<ClassPolicy> {
    class(|c| c.overlap = Overlap::Allow)
}

fn aged(mut request: RequestFacts) -> RequestFacts {
    request.enqueued_at_ms -= request.class.age_bound.ms;
    request
}

/// S1 holds A1 and A2 of one day and A3 of the next; S2 is a compaction of A1 and A2.
fn compacted() -> Story {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20 +A3@08-21");
    h.compact("S2", "S1", "-A1@08-20 -A2@08-20 +Z@08-20");
    h
}

#[test]
fn rule_c5_a_class_of_compactions_takes_proven_rewrites_and_nothing_else() {
    let mut h = compacted();
    assert_eq!(h.merge("S2").under(&compaction()).word(), "fast-forward");
    h.compact("S3", "S1", "-A3@08-21 +C@08-21").labelled("overwrite");
    assert_eq!(
        h.merge("S3").under(&compaction()).units().unwrap()[0].kind,
        UnitKind::Rewrite,
        "whatever label"
    );
    h.append("S4", "S2", "+B@08-22");
    h.overwrite("S5", "S1", "-A3@08-21 +C2@08-21").labelled("replace");
    h.overwrite("S6", "S1", "-A3@08-21").labelled("delete");
    for (head, at) in [("S4", 4), ("S5", 5), ("S6", 6)] {
        let refusal = h.merge(head).under(&compaction()).units().unwrap_err();
        assert_eq!((refusal.code, refusal.snapshot.0), (ReasonCode::NotACompaction, at));
    }
    // Snapshots that change nothing are left out, as everywhere.
    h.overwrite("S7", "S2", "").labelled("replace");
    assert_eq!(h.merge("S7").under(&compaction()).word(), "fast-forward");
}

#[test]
fn rule_c5_a_rewrite_in_two_snapshots_is_one_operation() {
    let mut h = compacted();
    h.overwrite("S3", "S1", "-A1@08-20 -A2@08-20").labelled("delete").proved_with_next();
    h.append("S4", "S3", "+Z@08-20");
    h.append("S5", "S1", "+B@08-20");
    let both = h.merge("S4").onto("S5").under(&compaction());
    let units = both.units().unwrap();
    assert_eq!((units.len(), &units[0].kind, units[0].changes.len()), (1, &UnitKind::Rewrite, 2));
    assert_eq!(both.word(), "cherry-pick");
    // Half of it is a delete.
    assert_eq!(h.merge("S3").under(&compaction()).units().unwrap_err().code, ReasonCode::NotACompaction);
    // A record of the pipeline does not make it anything else.
    h.compact("S6", "S1", "-A3@08-21 +C@08-21")
        .recorded(record("r", mergeberg_kernel::record::Operation::Append));
    assert_eq!(h.merge("S6").under(&compaction()).units().unwrap()[0].kind, UnitKind::Rewrite);
}

#[test]
fn rule_d4_deletes_by_value_pass_a_compaction_that_left_its_rows_their_age() {
    let mut h = compacted();
    h.compact("S3", "S1", "-A1@08-20 -A2@08-20 +Y@08-20").keeping_sequence_numbers();
    h.overwrite("S4", "S1", "+e:E@08-20 +B@08-20");
    h.overwrite("S5", "S1", "+d:D@08-20");
    h.overwrite("S6", "S4", "-e:E@08-20");
    assert_eq!(
        h.merge("S2").onto("S4").word(),
        "refused stale-compaction",
        "its rows are younger than the delete"
    );
    assert_eq!(h.merge("S3").onto("S4").word(), "cherry-pick");
    assert_eq!(h.merge("S3").onto("S5").word(), "refused stale-compaction", "positions name files");
    assert_eq!(h.merge("S3").onto("S6").word(), "refused stale-compaction", "rows came back");
}

#[test]
fn a_compaction_rides_behind_those_who_change_rows_and_holds_none_of_them() {
    let mut h = compacted();
    h.append("S3", "S1", "+B1@08-20");
    h.append("S4", "S1", "+B2@08-22");
    let requests =
        [h.merge("S2").under(&compaction()).request(1), h.merge("S3").request(2), h.merge("S4").request(3)];
    assert_eq!(h.train("S1", &requests), "2 fast-forward, 3 pick, 1 held behind-changes");
    assert_eq!(h.train("S1", &requests[..1]), "1 fast-forward");
}

#[test]
fn compactions_ride_together_where_they_do_not_meet() {
    let mut h = compacted();
    h.compact("S3", "S1", "-A3@08-21 +Y@08-21");
    h.compact("S4", "S1", "-A1@08-20 +X@08-20");
    let requests =
        ["S2", "S3", "S4"].map(|head| h.merge(head).under(&compaction()).request(head[1..].parse().unwrap()));
    assert_eq!(h.train("S1", &requests), "2 fast-forward, 3 pick, 4 held overlaps-ahead");
}

#[test]
fn past_its_age_bound_a_compaction_goes_first_and_the_others_stay_as_they_are() {
    let mut h = compacted();
    h.append("S3", "S1", "+B1@08-20");
    let requests = [h.merge("S3").request(1), aged(h.merge("S2").under(&compaction()).request(2))];
    assert_eq!(h.train("S1", &requests), "2 fast-forward, 1 next");
}

/// Also when it is old, and whatever the other one waits for.
#[test]
fn a_compaction_never_goes_ahead_of_one_whose_files_it_would_replace() {
    let mut h = compacted();
    h.overwrite("S3", "S1", "-A1@08-20 +A1b@08-20");
    h.overwrite("S4", "S1", "+d:D>A2@08-20");
    let old = aged(h.merge("S2").under(&compaction()).request(1));
    for head in ["S3", "S4"] {
        let mut other = h.merge(head).request(2);
        assert_eq!(h.train("S1", &[old.clone(), other.clone()]), "2 fast-forward, 1 held overlaps-ahead");
        other.structure = StructureStanding::InReview;
        assert_eq!(h.train("S1", &[old.clone(), other.clone()]), "2 in-review, 1 held overlaps-ahead");
        other.structure = StructureStanding::Rejected;
        assert_eq!(h.train("S1", &[old.clone(), other]), "1 fast-forward, 2 refused review-rejected");
    }
    // When the other one has landed, it is stale, and that is its own affair.
    assert_eq!(h.merge("S2").onto("S3").under(&compaction()).word(), "refused stale-compaction");
    // Upserts reach rows wherever they are.
    let upserts = class(|c| c.equality_deletes = EqualityDeletes::SerialUpsert);
    h.overwrite("S5", "S1", "+e:E@08-20 +B@08-20");
    let upsert = h.merge("S5").under(&upserts).request(2);
    assert_eq!(h.train("S1", &[old, upsert]), "1 fast-forward, 2 next");
}

#[test]
fn a_compaction_that_cannot_land_says_so_whoever_else_is_there() {
    let mut h = compacted();
    h.append("S3", "S1", "+B1@08-20");
    h.append("S4", "S1", "+B2@08-22");
    let mut unread = h.merge("S2").under(&compaction()).request(2);
    unread.unread = Some((ReasonCode::BehindChanges, "not compared yet".to_owned()));
    let requests =
        [h.merge("S3").under(&allow()).request(1), unread, h.merge("S4").under(&compaction()).request(3)];
    assert_eq!(h.train("S1", &requests), "1 fast-forward, 2 held behind-changes, 3 refused not-a-compaction");
}
