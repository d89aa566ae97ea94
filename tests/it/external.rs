//! `on-conflict = "external"`: the pipeline's own URL makes a branch again on the target's head, on a branch of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg::table::catalog::{Catalog as _, CommitOutcome};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::SnapshotId;

use crate::support::fault_server::http::Reply;
use crate::support::mall::{ITEMS, RELEASES, policy};
use crate::support::pipeline::{Pipeline, content};
use crate::support::{House, Order, branch, order};

#[tokio::test(flavor = "multi_thread")]
async fn a_conflicting_branch_is_made_again_on_the_targets_head() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            assert_eq!(house.head(asked.branch()).await, Some(asked.base()), "its own branch is at the base");
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    let base = house.head("main").await.unwrap();
    let pinned = house.request(request).await.pinned;
    house.drain().await;

    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "rebase");
    assert_eq!(house.done("main").await, [3, 8], "8 came to main after the branch was made");
    assert_eq!(house.refs().await, ["main", "transform/a"]);
    let [asked] = pipeline.asked().try_into().unwrap();
    assert_eq!(asked.base(), base);
    assert_eq!(asked.text("table"), "shop.orders");
    assert_eq!(asked.text("source"), "transform/a");
    assert_eq!(asked.text("target"), "main");
    assert_eq!(asked.body["source-snapshot-id"], pinned.0);
    assert_eq!(asked.body["request-id"], request.0);
    assert!(asked.branch().starts_with(&format!("mergeberg/tmp/{}/external/", house.ledger.queue_id())));
    assert!(asked.key.ends_with("-1"), "{}", asked.key);
    assert_eq!(asked.authorization, None);
    assert_eq!(house.outcomes(request).await, ["done"]);
    // Landed as a pick of what was left, which says what it publishes: no foreign commit, and no second time.
    let table = house.loaded().await;
    let landed = table.facts.snapshots.get(house.request(request).await.landed_snapshot.unwrap()).unwrap();
    assert_eq!(landed.summary["source-snapshot-id"], pinned.to_string());
    assert_eq!(landed.parent, Some(base));
    let again = house.enqueue("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(again).await, "already-published");
    assert_eq!(pipeline.asked().len(), 1);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_not_asked_where_nothing_conflicts_or_a_record_can_be_run_again() {
    let pipeline = Pipeline::open(|_, _, _| Box::pin(async { panic!("nobody needs it") })).await;
    let house = &pipeline.house;
    house.branch("transform/a").await;
    house.finish_21("transform/a").await;
    house.append("main", &[order(8, 22)]).await;
    let elsewhere = house.enqueue("transform/a").await;
    house.drain().await;
    assert_eq!(
        (house.state(elsewhere).await.as_str(), house.classified(elsewhere).await.as_str()),
        ("landed", "cherry-pick")
    );
    house.branch("transform/b").await;
    let record = r#"{"v":1,"id":"recalc-21","op":"overwrite-where","where":"order_date = DATE '2026-08-21'",
        "query":"SELECT order_id, order_date, 'again' AS status, amount FROM target WHERE order_date = DATE '2026-08-21'"}"#;
    let summary = BTreeMap::from([("mergeberg.operation".to_owned(), record.to_owned())]);
    house
        .put_on_21_with("transform/b", &[Order { status: "again".to_owned(), ..order(3, 21) }], summary)
        .await;
    house.append("main", &[order(10, 21)]).await;
    let recorded = house.enqueue("transform/b").await;
    house.drain().await;
    assert_eq!(house.done("main").await, Vec::<i64>::new(), "the record was run again, on 10 as well");
    assert_eq!(
        (house.state(recorded).await.as_str(), house.classified(recorded).await.as_str()),
        ("landed", "rebase")
    );
    assert!(pipeline.asked().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lane_goes_on_while_it_runs_and_what_it_left_is_picked() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            house.append_on_new("ingest/x", &[order(20, 28)]).await;
            let other = house.enqueue("ingest/x").await;
            house.until_state(other, "landed").await;
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.done("main").await, [3, 8]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 20]);
    assert_eq!(pipeline.asked().len(), 1, "nothing that it read has changed");
    house.assert_sound().await;
}

/// A foreign commit changes what it read, while it runs and after it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_went_stale_is_made_again() {
    let pipeline = Pipeline::open(|house, asked, times| {
        Box::pin(async move {
            if times == 1 {
                house.append("main", &[order(30, 21)]).await;
            }
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.done("main").await, [3, 8, 30]);
    assert_eq!(house.outcomes(request).await, ["done", "done"]);
    let [first, second] = pipeline.asked().try_into().unwrap();
    assert_ne!(first.branch(), second.branch());
    assert_ne!(first.key, second.key);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new(), "the stale result's files are gone");
    house.assert_sound().await;
}

/// What came later through the queue does not make it stale a second time.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_stale_result_later_requests_in_its_way_wait() {
    let pipeline = Pipeline::open(|house, asked, times| {
        Box::pin(async move {
            let name = format!("ingest/{times}");
            house.append_on_new(&name, &[order(30 + i64::try_from(times).unwrap(), 21)]).await;
            let other = house.enqueue(&name).await;
            let expected = if times == 1 { "landed" } else { "held(overlaps-ahead)" };
            house.until_state(other, expected).await;
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(pipeline.asked().len(), 2);
    assert_eq!(house.done("main").await, [3, 8, 31], "32 came behind it");
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 31, 32]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_tried_again_each_on_a_branch_of_its_own() {
    let pipeline = Pipeline::open(|house, asked, times| {
        Box::pin(async move {
            house.finish_21(asked.branch()).await;
            if times == 1 {
                Reply::json(503, "{\"message\":\"come back later\"}".to_owned())
            } else {
                content()
            }
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.outcomes(request).await, ["failed", "done"]);
    let runs = house.ledger.external_runs(request).await.unwrap();
    assert_eq!(runs[0].status, Some(503));
    assert!(runs[0].output.as_deref().unwrap().contains("come back later"), "{:?}", runs[0]);
    assert_eq!(house.done("main").await, [3, 8]);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new(), "the failed run's files are gone");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_for_good_is_refused_with_its_reason() {
    let cases: [(crate::support::pipeline::Act, &str, &[&str]); 4] = [
        (
            |_, _, _| Box::pin(async { Reply::json(500, "{}".to_owned()) }),
            "refused(external-failed)",
            &["failed", "failed"],
        ),
        (
            |_, _, _| Box::pin(async { Reply::json(422, "{}".to_owned()) }),
            "refused(external-failed)",
            &["refused"],
        ),
        (|_, _, _| Box::pin(async { content() }), "refused(external-empty)", &["left-nothing"]),
        (
            |house, asked, _| {
                Box::pin(async move {
                    reset(&house, asked.branch()).await;
                    content()
                })
            },
            "refused(external-off-base)",
            &["off-base"],
        ),
    ];
    for (act, state, outcomes) in cases {
        let pipeline = Pipeline::with(act, None, "attempts = 2").await;
        let house = &pipeline.house;
        let request = house.enqueue_outdated("transform/a").await;
        let before = house.head("main").await;
        house.drain().await;
        assert_eq!(house.state(request).await, state);
        assert_eq!(house.outcomes(request).await, outcomes, "{state}");
        assert_eq!(house.head("main").await, before, "{state}");
        assert_eq!(house.refs().await, ["main", "transform/a"], "{state}");
        house.assert_sound().await;
    }
}

/// To where main began, which the base descends from.
async fn reset(house: &Arc<House>, name: &str) {
    let table = house.loaded().await;
    let head = table.facts.head(&branch(name)).unwrap();
    let root = *table.facts.snapshots.chain(head).ids.last().unwrap();
    let kind = RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None };
    let moved = RefFact { name: branch(name), snapshot_id: root, kind, max_ref_age_ms: None };
    let at = Requirement::RefAt { name: branch(name), at: Some(head), role: RefRole::Source };
    let outcome = house.catalog.commit(&table, &[at], vec![Update::SetRef(moved)]).await;
    assert!(matches!(outcome, CommitOutcome::Landed(_)), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_answers_202_is_asked_again_with_the_same_key() {
    let pipeline = Pipeline::open(|house, asked, times| {
        Box::pin(async move {
            if times < 3 {
                return Reply::json(202, "{}".to_owned()).with_header("Retry-After", "0");
            }
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    let asked = pipeline.asked();
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|one| one.key == asked[0].key && one.body == asked[0].body));
    assert_eq!(house.outcomes(request).await, ["done"]);
}

/// What it wrote on main is a bypass like any other; its result is planned against it.
#[tokio::test(flavor = "multi_thread")]
async fn what_it_writes_elsewhere_is_a_bypass() {
    let pipeline = Pipeline::open(|house, asked, times| {
        Box::pin(async move {
            if times == 1 {
                house.finish_21("main").await;
            }
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    let uuid = house.loaded().await.facts.uuid.clone();
    let bypasses = house.ledger.foreign(&uuid, &branch("main")).await.unwrap();
    assert!(!bypasses.is_empty());
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.outcomes(request).await, ["done", "done"], "its own write made the first one stale");
    assert_eq!(house.done("main").await, [3, 8]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_it_left_is_checked_as_everything_is() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            let twice = Order { status: "done".to_owned(), ..order(3, 21) };
            house.put_on_21(asked.branch(), &[twice.clone(), twice]).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    let before = house.head("main").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    assert_eq!(house.head("main").await, before);
    assert_eq!(house.orphans().await, Vec::<std::path::PathBuf>::new());
    house.assert_sound().await;
}

/// The head that was there when it answered counts, whatever is written there later.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_after_the_answer_is_not_landed() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            house.finish_21(asked.branch()).await;
            let name = asked.branch().to_owned();
            let request = mergeberg_kernel::ids::RequestId(asked.body["request-id"].as_i64().unwrap());
            tokio::spawn(async move {
                house.until_outcomes(request, &["done"]).await;
                // Too late, perhaps for its branch as well.
                if house.head(&name).await.is_some() {
                    house.append(&name, &[order(99, 21)]).await;
                }
            });
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let request = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert!(!house.keys("main").await.contains(&99));
    assert!(house.is_on_main(house.request(request).await.landed_snapshot.unwrap_or(SnapshotId(0))).await);
}

/// Another commit of the branch, on top of what was made again.
#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_goes_on_is_made_again_from_its_new_head() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    let first = house.enqueue_outdated("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(first).await, "landed");
    house.append("transform/a", &[order(40, 22)]).await;
    let second = house.enqueue("transform/a").await;
    house.drain().await;
    assert_eq!(house.state(second).await, "landed");
    assert_eq!(pipeline.asked().len(), 1, "an append of another day conflicts with nothing");
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 40]);
    assert_eq!(house.done("main").await, [3, 8]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_compaction_that_went_stale_is_made_again() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            house.compact_20(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = &pipeline.house;
    house.append("main", &[order(4, 20)]).await;
    house.branch("compaction/a").await;
    house.compact_20("compaction/a").await;
    let request = house.enqueue("compaction/a").await;
    // Somebody compacts it first, and one more row comes.
    house.compact_20("main").await;
    house.append("main", &[order(5, 20)]).await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed", "{:?}", house.request(request).await);
    assert_eq!(house.outcomes(request).await, ["done"]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 5]);
    let table = house.loaded().await;
    let files = house.files_at(&table, house.head("main").await.unwrap()).await;
    assert_eq!(files.values().filter(|rows| rows[0].day == 20).count(), 1);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_a_set_is_made_again_and_the_set_lands_whole() {
    let pipeline = Pipeline::open(|house, asked, _| {
        Box::pin(async move {
            house.finish_21(asked.branch()).await;
            content()
        })
    })
    .await;
    let house = pipeline.house.as_ref();
    let items = house.beside(ITEMS, &policy(ITEMS, RELEASES)).await;
    house.branch("transform/a").await;
    house.finish_21("transform/a").await;
    house.append("main", &[order(8, 21)]).await;
    items.append_on_new("transform/a", &[order(5, 22)]).await;
    let set = house.enqueue_set(&[house, &items], "transform/a").await;
    house.drain().await;
    for part in set {
        assert_eq!(house.state(part).await, "landed", "{:?}", house.request(part).await);
    }
    assert_eq!(house.done("main").await, [3, 8]);
    assert_eq!(items.keys("main").await, [1, 2, 5]);
    assert_eq!(pipeline.asked().len(), 1);
    house.assert_sound().await;
    items.assert_sound().await;
}
