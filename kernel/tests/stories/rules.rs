//! Rules of the fine print, sections C and D, on units and classification.

use mergeberg_kernel::change::{ChangeSet, digest};
use mergeberg_kernel::classify::{MAX_WITNESSES, touched};
use mergeberg_kernel::filter::Filter;
use mergeberg_kernel::policy::{Appends, Isolation, Overlap};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::Operation;
use mergeberg_kernel::unit::{UnitKind, UnitScope};

use crate::story::{Story, class, day_is, overwrite_where, partition, record, sid};

fn kinds(h: &Story, pinned: &str) -> Vec<UnitKind> {
    h.merge(pinned).units().unwrap().into_iter().map(|unit| unit.kind).collect()
}

#[test]
fn rule_c2_adding_under_another_label_is_no_blind_append() {
    for label in ["overwrite", "replace", "delete", ""] {
        let mut h = Story::ord();
        h.append("S2", "S1", "+B1@08-22").labelled(label);
        assert_eq!(kinds(&h, "S2"), [UnitKind::DerivedAppend], "labelled '{label}'");
        h.append("S3", "S1", "+C1@08-23");
        assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict", "labelled '{label}'");
    }
}

#[test]
fn rule_c2_the_class_may_say_that_appends_are_derived() {
    let derived = class(|c| c.appends = Appends::Derived);
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+C1@08-23");
    assert_eq!(h.merge("S2").onto("S3").word(), "cherry-pick");
    assert_eq!(h.merge("S2").onto("S3").under(&derived).word(), "refused conflict");
    assert_eq!(h.merge("S2").onto("S1").under(&derived).word(), "fast-forward");
}

#[test]
fn rule_c2_an_append_record_does_not_loosen_a_derived_append() {
    // It has no predicate and no read set, so it cannot narrow what the insert depended on (promise 5).
    let derived = class(|c| c.appends = Appends::Derived);
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22").recorded(record("r", Operation::Append));
    h.append("S3", "S1", "+C1@08-23");
    assert_eq!(h.merge("S2").onto("S3").under(&derived).word(), "refused conflict");
    h.append("S4", "S1", "+B1@08-22").labelled("overwrite").recorded(record("r", Operation::Append));
    assert_eq!(h.merge("S4").onto("S3").word(), "refused conflict");
}

#[test]
fn rule_c2_a_recorded_target_side_is_not_blind_because_it_only_added() {
    let snapshot = class(|c| c.isolation = Isolation::Snapshot);
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").replacing();
    h.append("S3", "S1", "+C1@08-21");
    h.append("S4", "S1", "+C1@08-21").recorded(record("r", Operation::ReplacePartitions));
    h.append("S5", "S1", "+C1@08-21").recorded(record("r", Operation::Append));
    assert_eq!(h.merge("S2").onto("S3").under(&snapshot).word(), "cherry-pick");
    assert_eq!(h.merge("S2").onto("S4").under(&snapshot).word(), "rebase");
    assert_eq!(h.merge("S2").onto("S5").under(&snapshot).word(), "cherry-pick");
}

#[test]
fn rule_c3_serializable_without_a_record_reads_the_whole_table() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20");
    h.append("S3", "S1", "+C1@09-30");
    assert_eq!(kinds(&h, "S2"), [UnitKind::Opaque]);
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
    // Proved maintenance elsewhere is no data that it could have read.
    h.compact("S4", "S1", "-A2@08-20 +A2c@08-20");
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
}

#[test]
fn rule_c3_a_filter_that_found_nothing_still_conflicts_with_what_it_would_have_hit() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "").recorded(overwrite_where("f")).filtered(day_is("08-25"));
    h.append("S3", "S1", "+C1@08-25");
    h.append("S4", "S1", "+C1@08-26");
    let units = h.merge("S2").units().unwrap();
    assert_eq!(units.len(), 1, "a recorded operation with an empty snapshot is not empty");
    assert_eq!(h.merge("S2").onto("S3").word(), "rebase");
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
}

#[test]
fn rule_c3_a_query_that_reads_the_target_or_has_no_readable_filter_spans_the_table() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21")
        .recorded(overwrite_where("f"))
        .filtered(day_is("08-21"))
        .reads_target();
    h.overwrite("S3", "S1", "-A2@08-21 +B1@08-21").recorded(overwrite_where("f"));
    h.overwrite("S4", "S1", "-A2@08-21 +B1@08-21").recorded(overwrite_where("f")).filtered(Filter::Unknown);
    h.append("S5", "S1", "+C1@09-30");
    for pinned in ["S2", "S3", "S4"] {
        assert_eq!(h.merge(pinned).onto("S5").word(), "rebase", "{pinned}");
    }
}

#[test]
fn rule_c3_files_that_were_written_count_beside_the_filter() {
    // The record says 21 August, the branch wrote to 23 August as well.
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21 +B2@08-23")
        .recorded(overwrite_where("f"))
        .filtered(day_is("08-21"));
    h.append("S3", "S1", "+C1@08-23");
    assert_eq!(h.merge("S2").onto("S3").word(), "rebase");
}

#[test]
fn rule_c4_snapshot_isolation_lets_appends_pass_but_no_change_of_rows() {
    let snapshot = class(|c| c.isolation = Isolation::Snapshot);
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20");
    h.append("S3", "S1", "+C1@08-20");
    h.overwrite("S4", "S1", "-A2@08-20 +C2@08-20");
    h.overwrite("S5", "S1", "-A1@08-20 +C3@08-20");
    h.overwrite("S6", "S1", "+d:D1@08-20");
    h.overwrite("S7", "S1", "-A1@08-20 -A2@08-20 +C4@09-01");
    let word = |target: &str| h.merge("S2").onto(target).under(&snapshot).word();
    assert_eq!(word("S3"), "cherry-pick", "every removed file is live");
    assert_eq!(word("S4"), "refused conflict");
    assert_eq!(word("S5"), "refused conflict", "a removed file is gone");
    assert_eq!(word("S6"), "refused conflict", "a removed file may carry new deletes");
    assert_eq!(word("S7"), "refused conflict");
    // Under `serializable` even the append conflicts.
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
}

#[test]
fn rule_c5_a_proved_rewrite_conflicts_only_where_a_file_is_gone() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20 +A3@08-21");
    h.compact("S2", "S1", "-A1@08-20 +A1c@08-20");
    let replace = record("r", Operation::ReplacePartitions);
    h.overwrite("S3", "S1", "-A1@08-20 -A2@08-20 +B1@08-20").recorded(replace);
    h.overwrite("S4", "S1", "-A3@08-21 +B2@08-21");
    assert_eq!(h.merge("S3").onto("S2").word(), "rebase", "A1 is gone");
    assert_eq!(h.merge("S4").onto("S2").word(), "cherry-pick");
    // The file was put back: a roll-back of the compaction by its own means.
    h.compact("S5", "S2", "-A1c@08-20 +A1@08-20");
    assert_eq!(h.merge("S3").onto("S5").word(), "cherry-pick");
}

#[test]
fn rule_c5_a_compaction_is_published_while_its_inputs_are_live() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.compact("S2", "S1", "-A1@08-20 -A2@08-20 +Z@08-20");
    assert_eq!(kinds(&h, "S2"), [UnitKind::Rewrite]);
    h.append("S3", "S1", "+C1@08-20");
    h.overwrite("S4", "S1", "-A1@08-20 +C2@08-20");
    h.compact("S5", "S1", "-A1@08-20 +C3@08-20");
    assert_eq!(h.merge("S2").onto("S3").word(), "cherry-pick");
    assert_eq!(h.merge("S2").onto("S4").word(), "refused stale-compaction");
    assert_eq!(h.merge("S2").onto("S5").word(), "refused stale-compaction");
}

#[test]
fn rule_c5_a_compaction_without_proof_is_a_change_of_data() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-20");
    h.overwrite("S2", "S1", "-A1@08-20 +Z@08-20").labelled("replace");
    assert_eq!(kinds(&h, "S2"), [UnitKind::Opaque]);
}

#[test]
fn rule_c7_delete_and_append_that_refill_whole_partitions_are_one_replacement() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-21");
    h.overwrite("S2", "S1", "-A2@08-21 -A3@08-21").labelled("delete");
    h.append("S3", "S2", "+B1@08-21");
    let units = h.merge("S3").units().unwrap();
    assert_eq!(units.len(), 1);
    assert_eq!(units[0].kind, UnitKind::ReplacePartitions { derived: true });
    assert_eq!(units[0].last_snapshot(), Some(sid("S3")));
    assert!(units[0].is_replayable());
    assert_eq!(units[0].partitions(), [partition("08-21")].into());
}

#[test]
fn rule_c7_an_update_of_every_file_is_no_replacement() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21");
    assert_eq!(kinds(&h, "S2"), [UnitKind::Opaque], "an update of the only file there looks like this");
    h.append("S3", "S1", "+C1@08-21");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
    h.overwrite("S4", "S1", "-A2@08-21 +B1@08-21").replacing();
    assert_eq!(kinds(&h, "S4"), [UnitKind::ReplacePartitions { derived: true }]);
    // The engine's word is not enough where the content says otherwise.
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-21");
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").replacing();
    assert_eq!(kinds(&h, "S2"), [UnitKind::Opaque]);
    // A day that was empty, or did not exist: the same operation, of which nothing had to be removed.
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21 +B2@08-25").replacing();
    h.overwrite("S3", "S1", "+B1@08-25").replacing();
    for id in ["S2", "S3"] {
        assert_eq!(kinds(&h, id), [UnitKind::ReplacePartitions { derived: true }]);
    }
    h.append("S4", "S1", "+C1@08-26");
    h.append("S5", "S1", "+C1@08-25");
    assert_eq!(h.merge("S3").onto("S4").word(), "cherry-pick");
    assert_eq!(h.merge("S3").onto("S5").word(), "rebase");
    // Without partitions, a delete that hit all files and an append are two operations.
    let mut h = Story::empty();
    h.append("S1", "", "+A1@*");
    h.overwrite("S2", "S1", "-A1@*").labelled("delete");
    h.append("S3", "S2", "+B1@*");
    assert_eq!(kinds(&h, "S3"), [UnitKind::Opaque, UnitKind::BlindAppend]);
}

#[test]
fn rule_c7_what_is_no_whole_replacement_is_not_taken_for_one() {
    let kinds = |deleted: &str, added: &str| {
        let mut h = Story::empty();
        h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-21");
        h.overwrite("S2", "S1", deleted).labelled("delete");
        h.append("S3", "S2", added);
        kinds(&h, "S3")
    };
    let two = [UnitKind::Opaque, UnitKind::BlindAppend];
    assert_eq!(kinds("-A2@08-21", "+B1@08-21"), two, "A3 of the partition stays");
    assert_eq!(kinds("-A2@08-21 -A3@08-21", "+B1@08-22"), two, "another partition is filled");
    assert_eq!(kinds("-A2@08-21 -A3@08-21", "+B1@08-21 +B2@08-22"), two, "one more is filled");
    assert_eq!(kinds("-A1@08-20 -A2@08-21 -A3@08-21", "+B1@08-21"), two, "one less is filled");
    assert_eq!(
        kinds("-A1@08-20 -A2@08-21 -A3@08-21", "+B1@08-21 +B2@08-20"),
        [UnitKind::ReplacePartitions { derived: true }]
    );
    // The append has a record of its own: it is an operation of its own.
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21").labelled("delete");
    h.append("S3", "S2", "+B1@08-21").recorded(record("r", Operation::Append));
    assert_eq!(h.merge("S3").units().unwrap().len(), 2);
}

#[test]
fn rule_c7_the_same_record_id_makes_adjacent_snapshots_one_operation() {
    let replace = || record("r", Operation::ReplacePartitions);
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21").recorded(replace());
    h.append("S3", "S2", "+B1@08-21").recorded(replace());
    h.append("S4", "S3", "+B2@08-22").recorded(record("s", Operation::Append));
    assert_eq!(kinds(&h, "S4"), [UnitKind::ReplacePartitions { derived: false }, UnitKind::BlindAppend]);

    // Not adjacent: two operations.
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22").recorded(record("r", Operation::Append));
    h.append("S3", "S2", "+B2@08-23");
    h.append("S4", "S3", "+B3@08-24").recorded(record("r", Operation::Append));
    assert_eq!(kinds(&h, "S4").len(), 3);

    // One id, two contents: nobody knows which.
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22").recorded(record("r", Operation::Append));
    h.append("S3", "S2", "+B2@08-22").recorded(replace());
    assert_eq!(h.merge("S3").units().unwrap_err().code, ReasonCode::RecordInvalid);
}

#[test]
fn a_record_that_does_not_say_what_the_branch_did_is_refused() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-21");
    let replace = || record("r", Operation::ReplacePartitions);
    let mismatch = |h: &Story, pinned: &str| h.merge(pinned).units().unwrap_err().code;

    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20").recorded(record("r", Operation::Append));
    assert_eq!(mismatch(&h, "S2"), ReasonCode::RecordMismatch);
    h.overwrite("S3", "S1", "-A1@08-20 +B1@08-22").recorded(replace());
    assert_eq!(mismatch(&h, "S3"), ReasonCode::RecordMismatch, "a partition was emptied, not replaced");
    // A3 stayed on the branch; a replay would drop it from the target.
    h.overwrite("S4", "S1", "-A2@08-21 +B1@08-21").recorded(replace());
    assert_eq!(mismatch(&h, "S4"), ReasonCode::RecordMismatch);
    // In two steps, or once more after a retry, it is the whole partition.
    h.overwrite("S5", "S1", "-A2@08-21").recorded(replace());
    h.overwrite("S6", "S5", "-A3@08-21 +B1@08-21").recorded(replace());
    h.overwrite("S7", "S6", "-B1@08-21 +B2@08-21").recorded(replace());
    assert_eq!(kinds(&h, "S7"), [UnitKind::ReplacePartitions { derived: false }]);
}

#[test]
fn rule_c9_a_published_prefix_is_left_out_and_is_not_target_side() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    h.append("S4", "S1", "+C1@08-23");
    h.append("S5", "S4", "+B1@08-22").publishes("S2");
    let merge = h.merge("S3").onto("S5").classify();
    assert_eq!(merge.class.word(), "cherry-pick", "its own append is no overlap: {}", merge.text);
    let left: Vec<_> = merge.units.iter().flat_map(|u| u.snapshots()).collect();
    assert_eq!(left, [sid("S3")]);
    // Published and at the head: still no fast-forward, S2 would be there twice.
    h.append("S6", "S1", "+B1@08-22").publishes("S2");
    assert_eq!(h.merge("S3").onto("S6").word(), "cherry-pick");
    // A foreign append to the same partition still counts.
    h.append("S7", "S5", "+C2@08-22");
    assert_eq!(h.merge("S3").onto("S7").word(), "refused overlapping-append");
}

#[test]
fn rule_c9_published_by_content_without_any_stamp() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21");
    h.overwrite("S3", "S1", "-A2@08-21 +B1@08-21");
    assert_eq!(h.merge("S2").onto("S3").word(), "already-published");
    // The added file is there, the removed one too: half.
    h.append("S4", "S1", "+B1@08-21");
    assert_eq!(h.merge("S2").onto("S4").word(), "refused partially-published");
}

#[test]
fn rule_c9_a_published_part_that_is_no_prefix_is_refused() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-23");
    h.append("S4", "S1", "+B2@08-23").publishes("S3");
    assert_eq!(h.merge("S3").onto("S4").word(), "refused partially-published");
}

#[test]
fn rule_c9_half_of_an_operation_of_two_snapshots_is_partly_published() {
    // The delete was published alone; its files are gone, and its append is still to come.
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21").labelled("delete");
    h.append("S3", "S2", "+B1@08-21");
    h.overwrite("S4", "S1", "-A2@08-21").labelled("delete").publishes("S2");
    assert_eq!(h.merge("S3").onto("S4").word(), "refused partially-published");
}

#[test]
fn rule_c9_compacted_after_it_was_published_is_published() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+C1@08-23");
    h.append("S4", "S3", "+B1@08-22").publishes("S2");
    h.compact("S5", "S4", "-B1@08-22 +B1c@08-22");
    assert_eq!(h.merge("S2").onto("S5").word(), "already-published");
}

#[test]
fn rule_c9_a_replayed_operation_is_published_under_its_stamp() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").recorded(overwrite_where("f")).filtered(day_is("08-21"));
    h.append("S3", "S1", "+C1@08-21");
    h.overwrite("S4", "S3", "-A2@08-21 -C1@08-21 +R1@08-21").publishes("S2");
    assert_eq!(h.merge("S2").onto("S4").word(), "already-published");
}

#[test]
fn rule_c9_a_stamp_without_the_files_proves_nothing() {
    // The target's summary says so, its manifests do not (promise 5).
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+C1@08-23").publishes("S2");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused partially-published");
    let replace = record("r", Operation::ReplacePartitions);
    h.overwrite("S4", "S1", "-A2@08-21 +B2@08-21").recorded(replace);
    h.overwrite("S5", "S1", "-A2@08-21 +X@08-21").publishes("S4");
    assert_eq!(h.merge("S4").onto("S5").word(), "refused partially-published");
}

#[test]
fn rule_c9_what_follows_a_replayed_prefix_is_not_picked_onto_files_that_are_not_there() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").recorded(overwrite_where("f")).filtered(day_is("08-21"));
    h.overwrite("S3", "S2", "-B1@08-21 +B2@08-21").replacing();
    // S2 was run again: its rows are in R1, and B1 never came to the target.
    h.append("S4", "S1", "+C1@08-21");
    h.overwrite("S5", "S4", "-A2@08-21 -C1@08-21 +R1@08-21").publishes("S2");
    let merge = h.merge("S3").onto("S5").classify();
    assert_eq!(merge.class.word(), "rebase", "{}", merge.text);
    assert!(merge.witnesses.iter().any(|w| w.place == "B1"), "{:?}", merge.witnesses);
}

#[test]
fn rule_c9_rolled_back_is_not_published_again_by_itself() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    assert_eq!(h.merge("S2").rolled_back().word(), "refused rolled-back");
    assert_eq!(h.merge("S2").onto("S2").rolled_back().word(), "already-published", "it is there after all");
}

#[test]
fn rule_c11_nothing_that_is_unreadable_is_guessed() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22").badly_recorded();
    assert_eq!(h.merge("S2").units().unwrap_err().code, ReasonCode::RecordInvalid);
    h.append("S3", "S2", "+B2@08-22");
    assert_eq!(h.merge("S3").units().unwrap_err().snapshot, sid("S2"), "also further back");
}

#[test]
fn partitions_of_two_specs_overlap_unless_a_shared_field_differs() {
    let overlap = |one: &str, two: &str| {
        let (one, two): (_, _) = (partition(one), partition(two));
        assert_eq!(one.overlaps(&two), two.overlaps(&one), "symmetric");
        one.overlaps(&two)
    };
    assert!(overlap("08-20", "08-20") && !overlap("08-20", "08-21"));
    assert!(overlap("08-20", "08-20/status=new") && !overlap("08-20", "08-21/status=new"));
    assert!(overlap("status=new", "08-20/status=new") && !overlap("status=old", "08-20/status=new"));
    assert!(overlap("status=new", "08-20"), "nothing shared tells them apart");
    assert!(overlap("*", "08-20") && overlap("*", "*"));
    assert!(overlap("null", "null") && !overlap("null", "08-20") && !overlap("null", "08-20/status=new"));
}

#[test]
fn an_append_under_an_evolved_spec_meets_what_it_cannot_be_told_apart_from() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22/status=new");
    h.append("S3", "S1", "+C1@status=new");
    h.append("S4", "S1", "+C1@08-23");
    h.append("S5", "S1", "+C1@*");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused overlapping-append");
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
    assert_eq!(h.merge("S2").onto("S5").word(), "refused overlapping-append");
}

#[test]
fn the_overlap_rule_of_the_class_decides_what_an_append_may_meet() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-21");
    h.append("S3", "S1", "+C1@08-21");
    h.overwrite("S4", "S1", "-A2@08-21 +C1@08-21");
    h.overwrite("S5", "S1", "+d:D1@08-21");
    for target in ["S3", "S4", "S5"] {
        for (rule, word) in [
            (Overlap::Refuse, "refused overlapping-append"),
            (Overlap::Allow, "cherry-pick"),
            (Overlap::AllowWithDuplicateCheck, "cherry-pick"),
        ] {
            let class = class(|c| c.overlap = rule);
            let merge = h.merge("S2").onto(target).under(&class);
            assert_eq!(merge.word(), word, "onto {target} under {rule:?}");
            assert_eq!(merge.classify().overlap_allowed, rule != Overlap::Refuse);
        }
    }
}

#[test]
fn witnesses_are_bounded_and_name_both_sides() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21");
    let mut parent = "S1".to_owned();
    for n in 3..60 {
        let id = format!("S{n}");
        h.append(&id, &parent, &format!("+C{n}@08-21"));
        parent = id;
    }
    let merge = h.merge("S2").onto(&parent).classify();
    assert_eq!(merge.witnesses.len(), MAX_WITNESSES);
    assert!(merge.witnesses.iter().all(|w| w.source == sid("S2")));
}

#[test]
fn one_operation_that_cannot_be_run_again_refuses_a_rebase() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20 +A2@08-21 +A3@08-22 +A4@08-22");
    h.overwrite("S2", "S1", "-A2@08-21 +B1@08-21").replacing();
    h.overwrite("S3", "S2", "-A3@08-22 +B2@08-22");
    h.append("S4", "S1", "+C1@08-21");
    assert_eq!(h.merge("S2").onto("S4").word(), "rebase");
    let merge = h.merge("S3").onto("S4").classify();
    assert_eq!(crate::story::class_word(&merge), "refused conflict");
    assert!(merge.text.contains("snapshot 3"), "{}", merge.text);
}

#[test]
fn touched_partitions_are_those_added_to_and_removed_from() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-22");
    h.append("S3", "S2", "+B2@08-23");
    let units = h.merge("S3").units().unwrap();
    let days: Vec<String> = touched(&units).iter().map(|p| p.to_string()).collect();
    assert_eq!(days, ["order_date=2013-08-20", "order_date=2013-08-22", "order_date=2013-08-23"]);
    assert!(UnitScope::Table.covers(&partition("*")));
}

#[test]
fn a_change_set_digest_knows_every_file_and_no_order() {
    let change = |files: &str| -> ChangeSet {
        let mut h = Story::ord();
        h.overwrite("S2", "S1", files);
        (*h.merge("S2").onto("S1").units().unwrap()[0].changes[0]).clone()
    };
    let one = digest(&[change("-A1@08-20 +B1@08-22 +B2@08-22")]);
    assert_eq!(one, digest(&[change("+B2@08-22 +B1@08-22 -A1@08-20")]));
    for other in ["-A1@08-20 +B1@08-22", "+A1@08-20 +B1@08-22 +B2@08-22", "-A2@08-20 +B1@08-22 +B2@08-22"] {
        assert_ne!(one, digest(&[change(other)]), "{other}");
    }
}
