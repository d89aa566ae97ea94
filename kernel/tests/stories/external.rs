//! Requests whose class has a command of the pipeline's own (`on-conflict = "external"`).

use std::sync::Arc;

use mergeberg_kernel::admission::RequestFacts;
use mergeberg_kernel::admission::external::ExternalStanding;
use mergeberg_kernel::ids::SnapshotId;
use mergeberg_kernel::policy::{
    AfterLanding, ClassPolicy, Duration, ExternalReplay, OnConflict, Overlap, Scope,
};
use mergeberg_kernel::reason::ReasonCode;

use crate::story::{Story, class, overwrite_where, sid};

fn remade(scope: Scope) -> Arc<ClassPolicy> {
    class(|c| {
        c.on_conflict = OnConflict::External;
        c.external = Some(ExternalReplay {
            command: vec!["rebuild".to_owned()],
            url: None,
            token_env: None,
            scope,
            timeout: Duration { ms: 1_000 },
            attempts: 3,
        });
        c.after_landing = AfterLanding::Drop;
    })
}

fn with(mut request: RequestFacts, standing: ExternalStanding) -> RequestFacts {
    request.external = Some(standing);
    request
}

fn aged(mut request: RequestFacts) -> RequestFacts {
    request.enqueued_at_ms -= request.class.age_bound.ms;
    request
}

const MAY_RUN: ExternalStanding = ExternalStanding::MayRun { protected: false };
const RUNNING: ExternalStanding = ExternalStanding::Running { protected: false };
const PROTECTED: ExternalStanding = ExternalStanding::Running { protected: true };

fn result(id: SnapshotId) -> ExternalStanding {
    ExternalStanding::Result { head: id, rests: false }
}

fn story() -> Story {
    let mut h = Story::ord();
    h.overwrite("S2", "S1", "-A1@08-20 +B1@08-20");
    h.overwrite("S3", "S1", "-A1@08-20 +C1@08-20");
    h.append("S4", "S1", "+D1@08-22");
    h.append("S5", "S1", "+E1@08-20");
    h.compact("S6", "S1", "-A1@08-20 +F1@08-20");
    h.overwrite("S7", "S1", "-A1@08-20 +G1@08-20").replacing();
    h.overwrite("S8", "S1", "-A1@08-20 +H1@08-20").recorded(overwrite_where("h"));
    h
}

#[test]
fn what_conflicts_without_a_record_is_made_again_outside() {
    let h = story();
    let class = remade(Scope::TouchedPartitions);
    let of = |source: &str, target: &str| {
        let merge = h.merge(source).under(&class).onto(target);
        (merge.word(), merge.classify().external)
    };
    assert_eq!(of("S2", "S3"), ("rebase".to_owned(), true), "an overwrite that nobody recorded");
    assert_eq!(of("S5", "S3"), ("rebase".to_owned(), true), "an append that meets a change");
    assert_eq!(of("S6", "S3"), ("rebase".to_owned(), true), "a compaction that went stale");
    assert_eq!(of("S7", "S5"), ("rebase".to_owned(), true), "as files it would lose the row that came");
    assert_eq!(of("S8", "S5"), ("rebase".to_owned(), false), "a record knows what it read");
    assert_eq!(
        of("S2", "S4"),
        ("cherry-pick".to_owned(), false),
        "policy says that it depends on its partitions"
    );
    let careful = remade(Scope::Table);
    assert!(h.merge("S2").under(&careful).onto("S4").classify().external, "it may have read what came");
}

#[test]
fn a_request_waits_for_its_command_and_lands_what_that_left() {
    let mut h = story();
    h.overwrite("S9", "S3", "-C1@08-20 +R1@08-20");
    h.overwrite("S10", "S3", "-C1@08-20 +X1@08-20");
    let class = remade(Scope::TouchedPartitions);
    let request = || h.merge("S2").under(&class).onto("S3").request(1);
    assert_eq!(h.train("S3", &[with(request(), MAY_RUN)]), "1 run external");
    assert_eq!(h.train("S3", &[with(request(), RUNNING)]), "1 held external-running");
    let failed = ExternalStanding::Failed { code: ReasonCode::ExternalTimeout, text: "slow".to_owned() };
    assert_eq!(h.train("S3", &[with(request(), failed)]), "1 refused external-timeout");
    assert_eq!(h.train("S3", &[with(request(), ExternalStanding::Rests)]), "1 held external-rests");

    // Its result stands in for the pinned head: picked, never published as it is.
    let landed = |target: &str, standing| {
        let mut request = with(h.merge("S9").under(&class).onto(target).request(1), standing);
        request.pinned = sid("S2");
        request
    };
    let plan = h.plan("S3", &[landed("S3", result(sid("S9")))]);
    let [car] = plan.cars.as_slice() else { panic!("{plan:?}") };
    assert_eq!((car.pinned, car.rebuilt, car.word()), (sid("S2"), Some(sid("S9")), "rebase"));
    assert_eq!(h.train("S3", &[landed("S3", result(sid("S9")))]), "1 pick");
    // The target went on in its way: it is made again, and after too many times not at once.
    assert_eq!(h.train("S10", &[landed("S10", result(sid("S9")))]), "1 run external");
    let rests = ExternalStanding::Result { head: sid("S9"), rests: true };
    assert_eq!(h.train("S10", &[landed("S10", rests.clone())]), "1 held external-rests");
    assert_eq!(h.train("S3", &[landed("S3", rests)]), "1 pick", "it fits");
}

#[test]
fn others_go_on_until_a_result_was_lost_to_them() {
    let h = story();
    let class = remade(Scope::TouchedPartitions);
    let running = |standing| with(h.merge("S2").under(&class).onto("S3").request(1), standing);
    let allowing = self::class(|c| c.overlap = Overlap::Allow);
    let near = h.merge("S5").under(&allowing).onto("S3").request(2);
    let far = h.merge("S4").onto("S3").request(3);
    let train = |standing| h.train("S3", &[running(standing), near.clone(), far.clone()]);
    assert_eq!(train(RUNNING), "2 pick, 3 pick, 1 held external-running");
    assert_eq!(train(PROTECTED), "3 pick, 1 held external-running, 2 held overlaps-ahead");

    // One that depends on the whole table keeps nobody waiting before its age bound.
    let careful = remade(Scope::Table);
    let wide = |standing| with(h.merge("S2").under(&careful).onto("S3").request(1), standing);
    let train = |first: RequestFacts| h.train("S3", &[first, far.clone()]);
    assert_eq!(train(wide(PROTECTED)), "3 pick, 1 held external-running");
    assert_eq!(train(aged(wide(RUNNING))), "1 held external-running, 3 held overlaps-ahead");
}

#[test]
fn a_later_request_of_the_same_source_stays_behind() {
    let mut h = story();
    h.append("S9", "S2", "+R1@08-23");
    let class = remade(Scope::TouchedPartitions);
    let of = |source: &str, number| with(h.merge(source).under(&class).onto("S3").request(number), MAY_RUN);
    assert_eq!(h.train("S3", &[of("S2", 1), of("S9", 2)]), "1 run external, 2 held same-source-ahead");
}
