//! Row-level deletes: the cells of design section 4, rules C6, D1 and D2.

use std::collections::BTreeSet;

use mergeberg_kernel::policy::{EqualityDeletes, Isolation, Overlap};
use mergeberg_kernel::unit::UnitKind;

use crate::story::{Story, class};

fn united(story: &Story, source: &str, target: &str, isolation: Isolation) -> (String, Vec<String>, bool) {
    let merge = story.merge(source).under(&class(|c| c.isolation = isolation)).onto(target);
    let classification = merge.classify();
    let files: BTreeSet<_> = classification.unite.files.iter().map(ToString::to_string).collect();
    (merge.word(), files.into_iter().collect(), classification.unite.disjoint)
}

#[test]
fn rule_d2_two_sides_that_only_delete_rows_are_united() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1>A1@08-20");
    h.overwrite("S3", "S1", "+d:D2>A1@08-20");
    h.overwrite("S4", "S1", "+d:D3>A2@08-21");
    for isolation in [Isolation::Serializable, Isolation::Snapshot] {
        let (word, files, disjoint) = united(&h, "S2", "S3", isolation);
        assert_eq!((word.as_str(), files, disjoint), ("cherry-pick", vec!["A1".to_owned()], false));
        let (word, files, _) = united(&h, "S2", "S4", isolation);
        assert_eq!((word.as_str(), files), ("cherry-pick", vec![]), "deletes of different files");
    }
}

#[test]
fn rule_d2_an_update_and_a_delete_may_not_share_a_row() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+B1@08-20 +d:D1>A1@08-20");
    h.overwrite("S3", "S1", "+d:D2>A1@08-20");
    let (word, files, disjoint) = united(&h, "S2", "S3", Isolation::Serializable);
    assert_eq!((word.as_str(), files, disjoint), ("cherry-pick", vec!["A1".to_owned()], true));
    // Two updates: what the other one added is an append inside a scope that nobody recorded.
    h.overwrite("S4", "S1", "+C1@08-20 +d:D3>A1@08-20");
    assert_eq!(united(&h, "S2", "S4", Isolation::Serializable).0, "refused conflict");
    let (word, _, disjoint) = united(&h, "S2", "S4", Isolation::Snapshot);
    assert_eq!((word.as_str(), disjoint), ("cherry-pick", true));
}

#[test]
fn rule_d2_deletes_are_never_united_within_a_train() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1>A1@08-20");
    h.overwrite("S3", "S1", "+d:D2>A1@08-20");
    h.overwrite("S4", "S1", "+d:D3>A2@08-21");
    let waiting = [h.merge("S2").request(1), h.merge("S3").request(2), h.merge("S4").request(3)];
    assert_eq!(h.train("S1", &waiting), "1 fast-forward, 3 pick, 2 held overlaps-ahead");
}

#[test]
fn a_row_delta_conflicts_with_what_removed_its_files_whatever_it_was() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1>A1@08-20");
    h.overwrite("S3", "S1", "-A1@08-20 +C1@08-20");
    h.compact("S4", "S1", "-A1@08-20 -A2@08-21 +C2@08-20 +C3@08-21");
    h.compact("S5", "S1", "-A2@08-21 +C4@08-21");
    for isolation in [Isolation::Serializable, Isolation::Snapshot] {
        assert_eq!(united(&h, "S2", "S3", isolation).0, "refused conflict");
        assert_eq!(united(&h, "S2", "S4", isolation).0, "refused conflict", "a compaction of its file");
        assert_eq!(united(&h, "S2", "S5", isolation).0, "cherry-pick", "a compaction of another file");
    }
}

#[test]
fn rule_c6_deletes_that_name_no_file_reference_their_whole_partition() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1@08-20");
    h.compact("S3", "S1", "-A1@08-20 +C1@08-20");
    h.compact("S4", "S1", "-A2@08-21 +C2@08-21");
    assert_eq!(h.merge("S2").onto("S3").word(), "refused conflict");
    assert_eq!(h.merge("S2").onto("S4").word(), "cherry-pick");
}

#[test]
fn rule_c6_deletes_of_its_own_files_are_picked_as_they_are() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.overwrite("S3", "S2", "+d:D1>B1@08-22");
    h.compact("S4", "S1", "-A1@08-20 +C1@08-20");
    assert_eq!(h.merge("S3").onto("S4").word(), "cherry-pick");
}

#[test]
fn an_append_meets_a_row_delta_whose_read_set_nobody_recorded() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+B1@08-20 +d:D1>A1@08-20");
    h.append("S3", "S1", "+C1@08-25");
    assert_eq!(united(&h, "S2", "S3", Isolation::Serializable).0, "refused conflict");
    assert_eq!(united(&h, "S2", "S3", Isolation::Snapshot).0, "cherry-pick");
    // The other way round the class's rule for overlapping appends holds.
    h.overwrite("S4", "S1", "+d:D2>A1@08-20");
    h.append("S5", "S1", "+E1@08-20");
    assert_eq!(h.merge("S5").onto("S4").word(), "refused overlapping-append");
    let allowed = class(|c| c.overlap = Overlap::Allow);
    assert_eq!(h.merge("S5").under(&allowed).onto("S4").word(), "cherry-pick");
}

#[test]
fn deletes_by_value_follow_the_rule_of_their_class() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+B1@08-20 +e:E1@08-20");
    assert_eq!(h.merge("S2").units().unwrap()[0].kind, UnitKind::EqualityDelta);
    h.append("S3", "S1", "+C1@08-20");
    h.compact("S4", "S1", "-A1@08-20 +C2@08-20");
    let word = |rule, target| {
        let class = class(|c| (c.equality_deletes, c.isolation) = (rule, Isolation::Snapshot));
        h.merge("S2").under(&class).onto(target).word()
    };
    assert_eq!(word(EqualityDeletes::Refuse, "S1"), "fast-forward");
    assert_eq!(word(EqualityDeletes::Refuse, "S3"), "refused equality-deletes");
    assert_eq!(word(EqualityDeletes::Rebase, "S3"), "refused conflict", "nothing says how to run it again");
    assert_eq!(word(EqualityDeletes::SerialUpsert, "S3"), "cherry-pick");
    for rule in [EqualityDeletes::Refuse, EqualityDeletes::Rebase, EqualityDeletes::SerialUpsert] {
        assert_eq!(word(rule, "S4"), "cherry-pick", "a proven rewrite holds the same rows");
    }
}

#[test]
fn a_compaction_is_stale_when_its_inputs_got_deletes_or_its_deletes_went() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1>A1@08-20");
    h.compact("S3", "S2", "-A1@08-20 -d:D1>A1@08-20 +B1@08-20");
    h.overwrite("S4", "S2", "+d:D2>A1@08-20 -d:D1>A1@08-20");
    h.overwrite("S5", "S2", "+d:D3>A2@08-21");
    assert_eq!(h.merge("S3").onto("S4").word(), "refused stale-compaction");
    assert_eq!(h.merge("S3").onto("S5").word(), "cherry-pick", "deletes of another file");
}

#[test]
fn a_whole_partition_is_replaced_together_with_its_deletes() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+d:D1>A1@08-20");
    h.overwrite("S3", "S2", "-A1@08-20 -d:D1>A1@08-20 +B1@08-20").replacing();
    assert_eq!(h.merge("S3").units().unwrap()[1].kind, UnitKind::ReplacePartitions { derived: true });
    h.append("S4", "S2", "+C1@08-20");
    assert_eq!(h.merge("S3").onto("S4").word(), "rebase");
}

#[test]
fn rule_c9_deletes_that_are_on_the_target_are_published() {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "+B1@08-20 +d:D1>A1@08-20");
    h.overwrite("S3", "S1", "+B1@08-20 +d:D1>A1@08-20");
    assert_eq!(h.merge("S2").onto("S3").word(), "already-published");
    // The rows came, the deletes did not: half of it.
    h.append("S4", "S1", "+B1@08-20");
    assert_eq!(h.merge("S2").onto("S4").word(), "refused partially-published");
    // United with the target's own: known by the stamp, which the deletes of the same file back.
    h.overwrite("S5", "S1", "+d:D2>A1@08-20");
    h.overwrite("S6", "S5", "+B1@08-20 -d:D2>A1@08-20 +d:D3>A1@08-20").publishes("S2");
    assert_eq!(h.merge("S2").onto("S6").word(), "already-published");
}
