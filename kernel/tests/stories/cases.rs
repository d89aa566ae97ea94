//! Cases after public bug reports, as far as the kernel decides them.

use mergeberg_kernel::admission::{SourceNow, Verdict};
use mergeberg_kernel::classify::Origin;
use mergeberg_kernel::lineage::{BaseFinding, Side};
use mergeberg_kernel::policy::{OnSourceMoved, Overlap};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::Operation;
use mergeberg_kernel::unit::UnitKind;

use crate::story::{NOW_MS, Story, class, record, sid};

#[test]
fn case_o03_a_moved_main_is_never_replaced_by_the_branch() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+C1@08-22");
    h.append("S3", "S1", "+B1@08-23");
    assert_eq!(h.merge("S3").onto("S1").word(), "fast-forward");
    // Forwarding would lose C1.
    assert_eq!(h.merge("S3").onto("S2").word(), "cherry-pick");
}

#[test]
fn case_o04_a_request_stays_with_its_pin() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    let mut request = h.merge("S2").request(1);
    request.source_now = SourceNow::MovedTo(sid("S3"));
    let plan = h.plan("S1", &[request]);
    let car = &plan.cars[0];
    assert_eq!(car.pinned, sid("S2"));
    let snapshots: Vec<_> = car.classification.units.iter().flat_map(|u| u.snapshots()).collect();
    assert_eq!(snapshots, [sid("S2")], "nothing past the pin is published");
}

#[test]
fn case_o05_all_snapshots_of_a_branch_go_oldest_first_and_the_sibling_is_picked() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    h.append("S4", "S3", "+B3@08-23");
    h.append("S5", "S1", "+D1@08-24");
    let plan = h.plan("S1", &[h.merge("S4").request(1), h.merge("S5").request(2)]);
    assert_eq!(crate::story::words(&plan), "1 fast-forward, 2 pick");
    let order: Vec<_> = plan.cars[0].classification.units.iter().flat_map(|u| u.snapshots()).collect();
    assert_eq!(order, [sid("S2"), sid("S3"), sid("S4")]);
    // After b1 was forwarded, b2 is classified against the new head.
    assert_eq!(h.merge("S5").onto("S4").word(), "cherry-pick");
}

#[test]
fn case_o06_the_same_change_twice_is_published_once() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+W1@08-22");
    assert_eq!(
        h.train("S1", &[h.merge("S2").request(1), h.merge("S2").request(2)]),
        "1 fast-forward, 2 held same-source-ahead"
    );
    // By the time that the second is looked at, the first has landed as a pick.
    h.append("S3", "S1", "+C1@08-23");
    h.append("S4", "S3", "+W1@08-22").publishes("S2");
    assert_eq!(h.merge("S2").onto("S4").word(), "already-published");
}

#[test]
fn case_o07_a_partition_overwrite_meets_rows_that_main_added_to_it() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").replacing();
    h.append("S3", "S1", "+C1@08-21");
    h.append("S4", "S1", "+C1@08-22");
    let merge = h.merge("S2").onto("S3").classify();
    assert_eq!(merge.class.word(), "rebase");
    assert_eq!(merge.witnesses[0].other, Origin::Target(sid("S3")));
    assert_eq!(merge.witnesses[0].place, "order_date=2013-08-21");
    // Control: main appended elsewhere.
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
}

#[test]
fn case_o07_without_a_whole_partition_or_record_it_is_refused() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-21");
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21");
    h.append("S3", "S1", "+C1@08-21");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
}

#[test]
fn case_o08_half_of_a_row_level_change_is_never_applied() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+B1@08-20 +d:D1>A1@08-20");
    // Untouched, it lands whole; what it deleted from is gone, it does not land at all.
    assert_eq!(h.merge("S2").onto("S1").word(), "fast-forward");
    h.overwrite("S3", "S1", "-A1@08-20 +C1@08-20");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
}

#[test]
fn case_o09_degenerate_sources() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+C1@08-22");
    h.append("S3", "S2", "+C2@08-23");
    // (a) at the head, (b) behind it.
    assert_eq!(h.merge("S2").onto("S2").word(), "already-published");
    assert_eq!(h.merge("S1").onto("S3").word(), "already-published");
    // (c) merged before, as a pick.
    h.append("S4", "S1", "+B1@08-24");
    h.append("S5", "S3", "+B1@08-24").publishes("S4");
    assert_eq!(h.merge("S4").onto("S5").word(), "already-published");
    // (e) a branch from an older snapshot of main.
    h.append("S6", "S1", "+B2@08-25");
    assert_eq!(h.merge("S6").onto("S5").word(), "cherry-pick");
}

#[test]
fn case_o09_a_branch_that_changes_nothing_is_refused_as_empty() {
    let mut h = Story::ord();
    h.append("S2", "S1", "");
    assert_eq!(h.merge("S2").word(), "refused empty-source");
}

#[test]
fn case_o10_disjoint_overwrites_do_not_conflict() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20").replacing();
    h.overwrite("S3", "S1", "-A2@08-21 +B2@08-21").replacing();
    assert_eq!(
        h.train("S1", &[h.merge("S2").request(1), h.merge("S3").request(2)]),
        "1 fast-forward, 2 pick"
    );
    assert_eq!(h.merge("S3").onto("S2").word(), "cherry-pick");
}

#[test]
fn case_o10_compaction_of_main_does_not_block_an_append_whatever_its_label() {
    for label in ["replace", "overwrite"] {
        let mut h = Story::ord();
        h.compact("S2", "S1", "-A1@08-20 +A1c@08-20").labelled(label);
        h.append("S3", "S1", "+B1@08-20");
        assert_eq!(h.merge("S3").onto("S2").word(), "cherry-pick", "labelled {label}");
    }
}

#[test]
fn case_o10_a_label_alone_proves_no_compaction() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +A1c@08-20").labelled("replace");
    h.append("S3", "S1", "+B1@08-20");
    assert_eq!(h.merge("S3").onto("S2").word(), "refused overlapping-append");
}

#[test]
fn case_o11_a_compaction_must_not_bring_deleted_rows_back() {
    // The other direction of O11: the branch compacted A1 while main deleted a row of it. A1 is still
    // live, but its compacted form holds the deleted row.
    let mut h = Story::ord();
    h.compact("S2", "S1", "-A1@08-20 +A1c@08-20");
    h.overwrite("S3", "S1", "+d:D1@08-20");
    h.overwrite("S4", "S1", "+d:D1@08-21");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused stale-compaction");
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
}

#[test]
fn case_o12_a_delete_on_main_conflicts_with_a_copy_on_write_of_the_same_file() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20");
    h.overwrite("S3", "S1", "+d:D1@08-20");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
    h.overwrite("S4", "S1", "-A1@08-20 +B1@08-20").replacing();
    assert_eq!(h.merge("S4").onto("S3").word(), "rebase");
}

#[test]
fn case_o13_two_upserts_of_one_key_are_appends_that_meet() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B2@08-22");
    // Shipped: overlapping appends are refused, and in one train the second waits.
    assert_eq!(
        h.train("S1", &[h.merge("S2").request(1), h.merge("S3").request(2)]),
        "1 fast-forward, 2 held overlaps-ahead"
    );
    assert_eq!(h.merge("S3").onto("S2").word(), "refused overlapping-append");
    // With the duplicate check they ride together, and the check is asked for.
    let checked = class(|c| c.overlap = Overlap::AllowWithDuplicateCheck);
    let waiting = [h.merge("S2").under(&checked).request(1), h.merge("S3").under(&checked).request(2)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 2 pick");
    let merge = h.merge("S3").under(&checked).onto("S2").classify();
    assert!(merge.overlap_allowed);
    assert_eq!(merge.class.word(), "cherry-pick");
    assert_eq!(merge.witnesses.len(), 1);
}

#[test]
fn case_o17_half_of_an_overwrite_went_to_main() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21").labelled("delete");
    h.append("S3", "S1", "+B1@08-21");
    // Nothing recorded says what was deleted: on the moved main it is not published by luck.
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
}

#[test]
fn case_o21_what_the_queue_needs_was_expired() {
    let mut h = Story::ord();
    for n in 2..=9 {
        h.append(&format!("S{n}"), &format!("S{}", n - 1), &format!("+C{n}@09-{n:02}"));
    }
    h.append("S10", "S3", "+B1@08-22");
    assert_eq!(h.base("S10", Some("S9")), BaseFinding::Common(sid("S3")));
    assert_eq!(h.merge("S10").onto("S9").word(), "cherry-pick");

    h.expire("S1 S2 S3 S4 S5 S6");
    assert_eq!(
        h.base("S10", Some("S9")),
        BaseFinding::Expired { of: Side::Source, missing: sid("S3") },
        "an unknown base is no empty base"
    );
    let merge = h.merge("S10").onto("S9");
    assert_eq!(merge.word(), "refused base-expired");
    assert!(merge.classify().text.contains("snapshot 3"), "{}", merge.classify().text);
}

#[test]
fn case_o21_a_branch_that_is_gone_or_reset_is_withdrawn_with_its_last_head() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B2@08-23");
    let mut gone = h.merge("S2").request(1);
    gone.source_now = SourceNow::Gone;
    let mut reset = h.merge("S2").request(2);
    reset.source_now = SourceNow::ResetTo(sid("S3"));
    let plan = h.plan("S1", &[gone, reset]);
    assert_eq!(crate::story::words(&plan), "1 withdrawn branch-gone, 2 withdrawn source-reset");
    let Verdict::Withdraw { text, .. } = &plan.verdicts[0].1 else { panic!("withdrawn") };
    assert!(text.contains("snapshot 2"), "{text}");
}

#[test]
fn case_o28_the_first_commits_of_an_empty_table() {
    let mut h = Story::empty();
    h.append("S1", "", "+B1@08-20");
    h.append("S2", "", "+B2@08-21");
    assert_eq!(h.merge("S1").onto("").word(), "fast-forward");
    // S1 was forwarded at 5,000 ms, after S2 was written at 2,000 ms: S2 saw an empty table.
    h.logged(&[("S1", 5000)]);
    assert_eq!(h.base("S2", Some("S1")), BaseFinding::Empty);
    assert_eq!(h.merge("S2").onto("S1").word(), "cherry-pick");
    // An append to the same partition is target side, not forgotten.
    h.append("S3", "", "+B3@08-20");
    assert_eq!(h.merge("S3").onto("S1").word(), "refused overlapping-append");
}

#[test]
fn case_o31_the_kernel_passes_on_what_the_shell_found_broken() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    let mut request = h.merge("S2").request(1);
    request.broken = Some((ReasonCode::TableReplaced, "uuid U2".to_owned()));
    assert_eq!(h.train("S1", &[request]), "1 refused table-replaced");
}

#[test]
fn case_o35_a_moved_head_follows_the_class() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    let words = |rule: OnSourceMoved| {
        let class = class(|c| c.on_source_moved = rule);
        let mut request = h.merge("S2").under(&class).request(1);
        request.source_now = SourceNow::MovedTo(sid("S3"));
        h.train("S1", &[request])
    };
    assert_eq!(words(OnSourceMoved::LandPin), "1 fast-forward");
    assert_eq!(words(OnSourceMoved::Repin), "1 repin S3");
    assert_eq!(words(OnSourceMoved::Refuse), "1 refused source-moved");
}

#[test]
fn case_o36_a_broken_member_fails_alone() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B2@08-22");
    h.append("S3", "S1", "+B3@08-23").badly_recorded();
    h.append("S4", "S1", "+B4@08-24");
    let mut gone = h.merge("S4").request(3);
    gone.source_now = SourceNow::Gone;
    h.append("S5", "S1", "+B5@08-25");
    let waiting = [h.merge("S2").request(1), h.merge("S3").request(2), gone, h.merge("S5").request(4)];
    assert_eq!(
        h.train("S1", &waiting),
        "1 fast-forward, 4 pick, 2 refused record-invalid, 3 withdrawn branch-gone"
    );
}

#[test]
fn case_o38_a_later_request_does_not_overtake_one_that_it_would_hurt() {
    // 2 waits for 1. Would 3 ride with 1, then 2 would be refused for what came after it.
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B2@08-22 +B3@08-23");
    h.append("S4", "S1", "+B4@08-23");
    h.append("S5", "S1", "+B5@08-24");
    let waiting = [
        h.merge("S2").request(1),
        h.merge("S3").request(2),
        h.merge("S4").request(3),
        h.merge("S5").request(4),
    ];
    let plan = h.plan("S1", &waiting);
    assert_eq!(
        crate::story::words(&plan),
        "1 fast-forward, 4 pick, 2 held overlaps-ahead, 3 held overlaps-ahead"
    );
    let Verdict::Hold { text, .. } = &plan.verdicts[1].1 else { panic!("held") };
    assert!(text.contains("request 2"), "{text}");
}

#[test]
fn case_o39_a_backfill_of_the_whole_table_gets_its_turn_by_age() {
    let mut h = Story::ord();
    // A query that reads the target: its scope is the table.
    h.overwrite("S2", "S1", "-A1@08-20 +F1@08-20")
        .recorded(crate::story::overwrite_where("f"))
        .reads_target();
    h.append("S3", "S1", "+B1@08-22");
    h.append("S4", "S1", "+B2@08-23");
    let young = h.merge("S2").request(1);
    let appends = [h.merge("S3").request(2), h.merge("S4").request(3)];
    assert_eq!(
        h.train("S1", &[young.clone(), appends[0].clone(), appends[1].clone()]),
        "2 fast-forward, 3 pick, 1 held overlaps-ahead",
        "until its age bound it yields"
    );
    let mut old = h.merge("S2").onto("S3").request(1);
    old.enqueued_at_ms = NOW_MS - old.class.age_bound.ms;
    assert_eq!(
        h.train("S3", &[h.merge("S4").onto("S3").request(3), old.clone()]),
        "1 replay, 3 held alone-by-age",
        "at its age bound it goes ahead, alone"
    );
    old.enqueued_at_ms += 1;
    assert_eq!(h.train("S3", &[old, h.merge("S4").onto("S3").request(3)]), "3 pick, 1 held overlaps-ahead");
}

#[test]
fn case_o39_the_head_of_the_line_is_not_restarted_by_arrivals() {
    let mut h = Story::ord();
    let days: Vec<String> = (1..=30).map(|d| format!("+F{d}@09-{d:02}")).collect();
    h.append("S2", "S1", &days.join(" "));
    h.append("S3", "S1", "+B1@09-30");
    assert_eq!(
        h.train("S1", &[h.merge("S2").request(1), h.merge("S3").request(2)]),
        "1 fast-forward, 2 held overlaps-ahead"
    );
}

#[test]
fn case_o07_recorded_replacement_is_replayed_whole() {
    let mut h = Story::ord();
    let replace = record("r", Operation::ReplacePartitions);
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").recorded(replace);
    h.append("S3", "S1", "+C1@08-21");
    let merge = h.merge("S2").onto("S3").classify();
    assert_eq!(merge.class.word(), "rebase");
    assert_eq!(merge.units[0].kind, UnitKind::ReplacePartitions { derived: false });
}
