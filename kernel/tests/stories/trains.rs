//! Which requests make a train, and what the others are told.

use std::collections::{BTreeSet, HashMap};

use mergeberg_kernel::admission::{
    RequestFacts, SourceKind, SourceNow, StructureStanding, TargetPlan, Verdict, WapIds, plan_train,
};
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::policy::{AfterLanding, Isolation, OnConflict, Overlap};
use mergeberg_kernel::record::Operation;

use crate::story::{NOW_MS, Story, class, day_is, overwrite_where, record, words};

/// ORD with branches S2.. that each append to a day of their own.
fn appends(count: i64) -> Story {
    let mut h = Story::ord();
    for n in 0..count {
        h.append(&format!("S{}", n + 2), "S1", &format!("+B{n}@09-{n:02}"));
    }
    h
}

fn with(mut request: RequestFacts, structure: StructureStanding) -> RequestFacts {
    request.structure = structure;
    request
}

#[test]
fn everyone_who_is_disjoint_rides_and_only_the_first_is_forwarded() {
    let h = appends(3);
    let waiting = [h.merge("S2").request(1), h.merge("S3").request(2), h.merge("S4").request(3)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick, 3 pick");
    assert_eq!(h.train("S1", &[]), "");
}

#[test]
fn rule_r9_a_head_near_its_expiry_is_picked_not_forwarded() {
    let h = appends(1);
    let (published, protected) = (HashMap::new(), BTreeSet::new());
    let target = TargetPlan {
        head: Some(crate::story::sid("S1")),
        published: &published,
        protected: &protected,
        now_ms: NOW_MS,
        fast_forward_allowed: false,
    };
    assert_eq!(words(&plan_train(&[h.merge("S2").request(1)], &target)), "1 pick");
}

#[test]
fn a_full_train_leaves_the_rest_for_the_next() {
    let h = appends(4);
    let two = class(|c| c.batch_size = 2);
    let waiting: Vec<_> = (2..6).map(|n| h.merge(&format!("S{n}")).under(&two).request(n - 1)).collect();
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick, 3 held batch-full, 4 held batch-full");
}

#[test]
fn a_train_is_full_when_it_has_its_batch_or_rides_alone() {
    let h = appends(4);
    let two = class(|c| c.batch_size = 2);
    let waiting: Vec<_> = (2..5).map(|n| h.merge(&format!("S{n}")).under(&two).request(n - 1)).collect();
    let full = |waiting: &[RequestFacts]| h.plan("S1", waiting).full;
    assert!(!full(&[]) && !full(&waiting[..1]));
    assert!(full(&waiting[..2]) && full(&waiting));
    assert!(full(&[with(waiting[0].clone(), StructureStanding::Barrier)]));
    assert!(!full(&[with(waiting[0].clone(), StructureStanding::InReview)]));
}

#[test]
fn a_class_of_small_trains_is_not_carried_in_a_long_one() {
    // The bound holds for the train, whoever else rides in it.
    let h = appends(4);
    let (two, many) = (class(|c| c.batch_size = 2), class(|c| c.batch_size = 50));
    let waiting = [
        h.merge("S2").under(&two).request(1),
        h.merge("S3").under(&many).request(2),
        h.merge("S4").under(&many).request(3),
    ];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick, 3 held batch-full");
}

#[test]
fn a_held_request_names_the_one_that_it_waits_for() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B2@08-22");
    let plan = h.plan("S1", &[h.merge("S2").request(7), h.merge("S3").request(8)]);
    let Verdict::Hold { text, witnesses, .. } = &plan.verdicts[0].1 else { panic!("held") };
    assert_eq!(text, "waits for request 7");
    assert_eq!(witnesses[0].place, "order_date=2013-08-22");
}

#[test]
fn two_requests_for_one_branch_go_one_after_the_other() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-23");
    let waiting = [h.merge("S2").request(1), h.merge("S3").request(2)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 held same-source-ahead");
}

#[test]
fn the_same_file_under_two_requests_does_not_ride_twice() {
    let allow = class(|c| c.overlap = Overlap::Allow);
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B1@08-22");
    let waiting = [h.merge("S2").under(&allow).request(1), h.merge("S3").under(&allow).request(2)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 held overlaps-ahead");
}

#[test]
fn an_overwrite_waits_for_an_append_into_its_partition_and_the_other_way_round() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-21");
    h.overwrite("S3", "S1", "-A2@08-21 +B2@08-21");
    let (append, overwrite) = (h.merge("S2").request(1), h.merge("S3").request(2));
    assert_eq!(h.train("S1", &[append.clone(), overwrite.clone()]), "1 fast-forward, 2 held overlaps-ahead");
    assert_eq!(h.train("S1", &[overwrite, append]), "2 fast-forward, 1 held overlaps-ahead");
}

#[test]
fn rule_c4_snapshot_isolation_holds_inside_a_train_too() {
    let snapshot = class(|c| c.isolation = Isolation::Snapshot);
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-21");
    h.overwrite("S3", "S1", "-A2@08-21 +B2@08-21");
    let waiting = [h.merge("S2").request(1), h.merge("S3").under(&snapshot).request(2)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick");
}

#[test]
fn a_compaction_in_the_train_does_not_hold_an_append_back() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.compact("S2", "S1", "-A1@08-20 -A2@08-20 +Z@08-20");
    h.append("S3", "S1", "+B1@08-20");
    assert_eq!(
        h.train("S1", &[h.merge("S2").request(1), h.merge("S3").request(2)]),
        "1 fast-forward, 2 pick"
    );
}

#[test]
fn what_a_replay_ahead_will_remove_is_gone_for_those_behind_it() {
    // Main appended C1 after the branches of request 1 were made. Request 1 runs its overwrite of the day
    // again, C1 included; request 2 compacted C1 on a younger branch.
    for recorded in [overwrite_where("f"), record("r", Operation::ReplacePartitions)] {
        let mut h = Story::ord();
        h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").recorded(recorded).filtered(day_is("08-21"));
        h.append("S3", "S1", "+C1@08-21");
        h.compact("S4", "S3", "-C1@08-21 +C1c@08-21");
        let waiting = [h.merge("S2").onto("S3").request(1), h.merge("S4").onto("S3").request(2)];
        assert_eq!(h.train("S3", &waiting), "1 replay, 2 held overlaps-ahead");
    }
}

#[test]
fn a_replay_ahead_reaches_where_its_filter_does() {
    // The filter spans two days. On its branch it found rows of one; main has some of the other by now.
    let both = mergeberg_kernel::filter::Filter::Or(vec![day_is("08-21"), day_is("08-22")]);
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").recorded(overwrite_where("f")).filtered(both);
    h.append("S3", "S1", "+C1@08-22");
    h.overwrite("S4", "S3", "-C1@08-22 +D1@08-22");
    h.append("S5", "S3", "+D2@08-23");
    let waiting = [
        h.merge("S2").onto("S3").request(1),
        h.merge("S4").onto("S3").request(2),
        h.merge("S5").onto("S3").request(3),
    ];
    assert_eq!(h.train("S3", &waiting), "1 replay, 3 pick, 2 held overlaps-ahead");
}

#[test]
fn structure_decides_before_data_does() {
    let h = appends(5);
    let unreadable = StructureStanding::Unreadable("column 3 is narrower".to_owned());
    let waiting = [
        with(h.merge("S2").request(1), StructureStanding::InReview),
        with(h.merge("S3").request(2), StructureStanding::Rejected),
        with(h.merge("S4").request(3), unreadable),
        h.merge("S5").request(4),
    ];
    assert_eq!(
        h.train("S1", &waiting),
        "4 fast-forward, 1 in-review, 2 refused review-rejected, 3 held structure-changed"
    );
}

#[test]
fn an_approved_structure_lands_as_a_barrier_of_its_own() {
    let h = appends(3);
    let barrier = with(h.merge("S2").request(1), StructureStanding::Barrier);
    let (two, three) = (h.merge("S3").request(2), h.merge("S4").request(3));
    assert_eq!(
        h.train("S1", &[barrier.clone(), two.clone(), three.clone()]),
        "1 fast-forward, 2 held behind-barrier, 3 held behind-barrier"
    );
    assert_eq!(h.train("S1", &[two, barrier, three]), "2 fast-forward, 3 pick, 1 held behind-barrier");
}

#[test]
fn an_answer_that_needs_no_commit_does_not_wait_for_a_barrier() {
    let mut h = appends(2);
    h.append("S9", "S3", "+X@09-20");
    let waiting = [
        with(h.merge("S2").onto("S3").request(1), StructureStanding::Barrier),
        h.merge("S3").onto("S3").request(2),
        h.merge("S9").onto("S3").request(3),
    ];
    assert_eq!(h.train("S3", &waiting), "1 pick, 2 already-published, 3 held behind-barrier");
}

#[test]
fn requests_past_their_age_bound_go_first_in_arrival_order() {
    let h = appends(4);
    let mut waiting: Vec<_> = (2..6).map(|n| h.merge(&format!("S{n}")).request(n - 1)).collect();
    for at in [1, 3] {
        waiting[at].enqueued_at_ms = NOW_MS - waiting[at].class.age_bound.ms;
    }
    assert_eq!(h.train("S1", &waiting), "2 fast-forward, 4 pick, 1 pick, 3 pick");
}

#[test]
fn a_clock_far_off_does_not_overflow() {
    let h = appends(2);
    let mut waiting = [h.merge("S2").request(1), h.merge("S3").request(2)];
    waiting[0].enqueued_at_ms = i64::MIN;
    waiting[1].enqueued_at_ms = i64::MAX;
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick");
}

#[test]
fn rule_r6_a_branch_is_dropped_only_when_nobody_else_needs_it() {
    let drop = class(|c| c.after_landing = AfterLanding::Drop);
    let h = appends(2);
    let dropped = |waiting: &[RequestFacts]| h.plan("S1", waiting).cars[0].drop_source;
    let one = h.merge("S2").under(&drop).request(1);
    assert!(dropped(std::slice::from_ref(&one)));
    assert!(!dropped(&[h.merge("S2").request(1)]), "the class keeps it");

    let mut moved = one.clone();
    moved.source_now = SourceNow::MovedTo(crate::story::sid("S3"));
    assert!(!dropped(&[moved]), "it is not at its pin any more");

    let mut protected = one.clone();
    protected.source = RefName::new("ingest/protected");
    assert!(!dropped(&[protected]), "protected by policy");

    let mut other = h.merge("S3").under(&drop).request(2);
    other.source = one.source.clone();
    assert!(!dropped(&[one, other]), "another open request names it");
}

#[test]
fn a_branch_of_the_queues_own_goes_with_its_landing_whatever_the_class_says() {
    let h = appends(2);
    for (kind, dropped) in
        [(SourceKind::Branch, false), (SourceKind::Staged, true), (SourceKind::Revert, true)]
    {
        let request = RequestFacts { kind, ..h.merge("S2").request(1) };
        let (published, mut protected) = (HashMap::new(), BTreeSet::new());
        let plan = |protected: &BTreeSet<RefName>| {
            let target = TargetPlan {
                head: Some(crate::story::sid("S1")),
                published: &published,
                protected,
                now_ms: NOW_MS,
                fast_forward_allowed: true,
            };
            plan_train(std::slice::from_ref(&request), &target).cars[0].drop_source
        };
        assert_eq!(plan(&protected), dropped, "{kind:?}");
        // Another open request names it (rule R6).
        protected.insert(request.source.clone());
        assert!(!plan(&protected), "{kind:?}");
    }
}

#[test]
fn rule_c9_a_wap_id_is_published_once() {
    let h = appends(2);
    let with_id = |n: i64, taken: Option<(String, SnapshotId)>| {
        let wap = WapIds { own: BTreeSet::from(["audit".to_owned()]), taken };
        RequestFacts { wap, ..h.merge(&format!("S{}", n + 1)).request(n) }
    };
    let waiting = [with_id(1, None), with_id(2, None)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 held same-source-ahead");
    let taken = [with_id(1, Some(("audit".to_owned(), crate::story::sid("S1"))))];
    assert_eq!(h.train("S1", &taken), "1 refused already-published");
}

#[test]
fn rows_are_merged_where_nothing_recorded_says_how_and_alone() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20");
    h.overwrite("S3", "S1", "-A1@08-20 +C1@08-20");
    h.append("S4", "S1", "+D1@08-22");
    h.append("S5", "S1", "+E1@08-20");
    h.compact("S6", "S1", "-A1@08-20 +F1@08-20");
    let merging = class(|c| c.on_conflict = OnConflict::RowMerge);
    let word = |source: &str, target: &str| h.merge(source).under(&merging).onto(target).word();

    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict", "without the rule");
    assert_eq!(word("S2", "S3"), "rebase");
    assert!(h.merge("S2").under(&merging).onto("S3").classify().row_merge);
    assert_eq!(word("S5", "S3"), "rebase", "appends that meet a change");
    assert_eq!(word("S2", "S4"), "rebase", "an overwrite may have missed what came");
    assert_eq!(word("S6", "S3"), "refused stale-compaction", "a compaction is made again");

    let waiting = [
        h.merge("S2").under(&merging).onto("S3").request(1),
        h.merge("S4").under(&merging).onto("S3").request(2),
    ];
    assert_eq!(h.train("S3", &waiting), "1 replay, 2 held alone-by-age");
    assert_eq!(h.train("S3", &[waiting[1].clone(), waiting[0].clone()]), "2 pick, 1 held overlaps-ahead");
}
