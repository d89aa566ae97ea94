//! The snapshot graph: chains, bases, and when an empty base is proved (rule C8).

use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::lineage::{BaseFinding, ChainEnd, Side};

use crate::story::{Story, sid};

#[test]
fn rule_c8_an_empty_base_needs_every_part_of_its_proof() {
    let story = |heads: &[(&str, i64)]| {
        let mut h = Story::empty();
        h.append("S1", "", "+A1@08-20");
        h.append("S2", "S1", "+A2@08-20");
        h.append("S3", "", "+B1@08-21");
        h.append("S4", "", "+C1@08-22");
        h.logged(heads);
        h
    };
    let proved = story(&[("S1", 5000), ("S2", 6000)]);
    assert_eq!(proved.base("S3", Some("S2")), BaseFinding::Empty);
    let same_ms = story(&[("S1", 3000)]);
    assert_eq!(same_ms.base("S3", Some("S1")), BaseFinding::Empty);

    let target_was_first = story(&[("S1", 2999), ("S2", 6000)]);
    assert_eq!(target_was_first.base("S3", Some("S2")), BaseFinding::Unrelated);
    let replaced = story(&[("S4", 4000), ("S1", 5000)]);
    assert_eq!(replaced.base("S3", Some("S1")), BaseFinding::Unrelated, "the log holds a replaced head");
    let no_log = story(&[]);
    assert_eq!(no_log.base("S3", Some("S2")), BaseFinding::Unrelated);
    let target_gone = story(&[("S1", 5000)]);
    assert_eq!(target_gone.base("S3", None), BaseFinding::Unrelated, "there was a head once");
    assert_eq!(no_log.base("S3", None), BaseFinding::Empty);
}

#[test]
fn rule_c8_a_cut_line_proves_nothing() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20");
    h.append("S2", "S1", "+A2@08-20");
    h.append("S3", "", "+B1@08-21");
    h.append("S4", "S3", "+B2@08-21");
    h.logged(&[("S2", 9000)]);
    assert_eq!(h.base("S4", Some("S2")), BaseFinding::Empty);
    let mut target_cut = h.clone();
    target_cut.expire("S1");
    assert_eq!(
        target_cut.base("S4", Some("S2")),
        BaseFinding::Expired { of: Side::Target, missing: sid("S1") }
    );
    let mut source_cut = h.clone();
    source_cut.expire("S3");
    for target in [Some("S2"), None] {
        assert_eq!(
            source_cut.base("S4", target),
            BaseFinding::Expired { of: Side::Source, missing: sid("S3") }
        );
    }
    let graph = target_cut.graph();
    let line = graph.line(Some(sid("S2")));
    assert_eq!(line.after(None), None, "what came before the cut is unknown, so it is not the whole line");
    assert_eq!(graph.after(None, sid("S2")), None);
    assert_eq!(line.after(Some(sid("S2"))), Some(Vec::new()));
}

#[test]
fn rule_c8_only_appends_pick_onto_a_proved_empty_base() {
    let mut h = Story::empty();
    h.append("S1", "", "+A1@08-20");
    h.append("S2", "", "+B1@08-21");
    h.overwrite("S3", "S2", "-B1@08-21 +B2@08-21");
    h.append("S4", "", "+B3@08-22").labelled("overwrite");
    h.logged(&[("S1", 9000)]);
    assert_eq!(h.merge("S2").onto("S1").word(), "cherry-pick");
    assert_eq!(h.merge("S3").onto("S1").word(), "refused unrelated-history");
    assert_eq!(h.merge("S4").onto("S1").word(), "refused unrelated-history");
    // Onto a target that does not exist yet everything is forwarded.
    h.logged(&[]);
    assert_eq!(h.merge("S3").onto("").word(), "fast-forward");
}

#[test]
fn unrelated_lines_are_refused_not_compared() {
    let mut h = Story::ord();
    h.append("S2", "", "+B1@08-22");
    h.logged(&[("S1", 1000)]);
    assert_eq!(h.merge("S2").onto("S1").word(), "refused unrelated-history");
}

#[test]
fn a_damaged_graph_ends() {
    let mut h = Story::empty();
    h.append("S1", "S2", "+A1@08-20");
    h.append("S2", "S1", "+A2@08-20");
    h.append("S3", "", "+B1@08-20");
    let graph = h.graph();
    assert!(matches!(graph.chain(sid("S1")).end, ChainEnd::Cut(_)));
    assert!(!graph.is_ancestor(sid("S3"), sid("S1")));
    assert!(matches!(h.base("S1", Some("S3")), BaseFinding::Expired { of: Side::Source, .. }));
    assert!(matches!(h.base("S3", Some("S1")), BaseFinding::Expired { of: Side::Target, .. }));
    assert_eq!(graph.chain(SnapshotId(77)).end, ChainEnd::Cut(SnapshotId(77)));
}

#[test]
fn after_lists_oldest_first_and_wants_a_real_base() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    h.append("S4", "S1", "+C1@08-22");
    let graph = h.graph();
    assert_eq!(graph.after(Some(sid("S1")), sid("S3")), Some(vec![sid("S2"), sid("S3")]));
    assert_eq!(graph.after(None, sid("S2")), Some(vec![sid("S1"), sid("S2")]));
    assert_eq!(graph.after(Some(sid("S4")), sid("S3")), None);
    let line = graph.line(Some(sid("S3")));
    assert_eq!(line.after(Some(sid("S1"))), Some(vec![sid("S2"), sid("S3")]));
    assert_eq!(line.after(Some(sid("S4"))), None);
    assert_eq!(line.after(None), graph.after(None, sid("S3")));
    assert_eq!(graph.line(None).after(None), Some(Vec::new()));
}

#[test]
fn a_damaged_chain_that_runs_in_a_circle_ends_where_it_comes_back() {
    let mut h = Story::ord();
    h.append("S2", "S4", "+B1@08-22");
    h.append("S3", "S2", "+B2@08-22");
    h.append("S4", "S3", "+B3@08-22");
    h.append("S5", "S4", "+B4@08-22");
    let graph = h.graph();
    for (head, ids) in [("S4", vec!["S4", "S3", "S2"]), ("S5", vec!["S5", "S4", "S3", "S2"])] {
        let chain = graph.chain(sid(head));
        assert_eq!(chain.ids, ids.into_iter().map(sid).collect::<Vec<_>>());
        assert_eq!(chain.end, ChainEnd::Cut(sid("S4")));
        assert!(!graph.is_ancestor(sid("S1"), sid(head)));
        assert_eq!(graph.after(Some(sid("S1")), sid(head)), None);
    }
}

#[test]
fn rule_c9_published_is_the_transitive_closure_and_ends_on_a_cycle() {
    let mut h = Story::ord();
    h.append("S2", "S1", "+B1@08-22");
    h.append("S3", "S1", "+B1@08-22").publishes("S2");
    h.append("S4", "S1", "+B1@08-22").publishes("S3");
    let published = h.graph().published_by(sid("S4"));
    assert_eq!(published.get(&sid("S3")), Some(&sid("S4")));
    assert_eq!(published.get(&sid("S2")), Some(&sid("S4")), "through the staging branch");
    h.append("S5", "S4", "").publishes("S5");
    assert_eq!(h.graph().published_by(sid("S5")).len(), 3);
}
