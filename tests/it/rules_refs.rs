//! Rules R1 to R9: refs, retention and clean-up.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use mergeberg::ledger::{Enqueued, NewRequest};
use mergeberg::worker::stage::REQUEST_KEY;
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{Principal, RequestId, SnapshotId};

use crate::support::{House, Moment, ORDERS_POLICY, branch, drain, order};

const DAY_MS: i64 = 24 * 3600 * 1000;

fn class(more: &str) -> String {
    format!("table = \"shop.orders\"\n[[class]]\nname = \"default\"\nprefix = \"\"\n{more}\n")
}

/// Snapshots of the queue's making that no ref reaches.
async fn left_over(house: &House) -> Vec<SnapshotId> {
    let table = house.loaded().await;
    let facts = &table.facts;
    let reached: BTreeSet<SnapshotId> =
        facts.refs.values().flat_map(|r| facts.snapshots.chain(r.snapshot_id).ids).collect();
    let ours = facts.snapshots.iter().filter(|s| s.summary.contains_key(REQUEST_KEY));
    ours.map(|s| s.id).filter(|id| !reached.contains(id)).collect()
}

/// Every file below the warehouse but metadata files.
fn files(house: &House) -> BTreeSet<PathBuf> {
    let mut folders = vec![house.dir.path().join("warehouse")];
    let mut found = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_none_or(|extension| extension != "json") {
                found.insert(path);
            }
        }
    }
    found
}

/// A request that a check refuses, behind main, so that a candidate is made for it.
async fn evicted(house: &House) -> RequestId {
    house.branch("ingest/bad").await;
    house.append("main", &[order(9, 25)]).await;
    house.append("ingest/bad", &[order(3, 21)]).await;
    house.enqueue("ingest/bad").await
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r1_dropped_candidates_go_with_their_branch_in_one_commit() {
    let house = House::orders(ORDERS_POLICY).await;
    let request = evicted(&house).await;
    let (before, files_before) = (house.refs().await, files(&house));
    let (worker, script) = house.scripted().await;
    drain(&worker).await;
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    assert_eq!(script.commits(), 2, "one stages, one removes branch and snapshots");
    assert_eq!(house.refs().await, before, "main and every other ref stay");
    assert_eq!(left_over(&house).await, []);
    assert_eq!(files(&house), files_before, "rule R8: what the queue wrote is deleted, and nothing else");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r1_a_target_that_moves_during_the_clean_up_loses_nothing() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let request = evicted(&house).await;
    let (worker, script) = house.scripted().await;
    let stranger = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        stranger.append("main", &[order(8, 26)]).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 9]);
    assert_eq!(left_over(&house).await, []);
    house.assert_sound().await;
}

/// The temporary branch as it is after staging, and its head's timestamp.
async fn staged(house: &Arc<House>) -> (RefFact, i64, usize) {
    let seen = Arc::new(Mutex::new(None));
    let (worker, script) = house.scripted().await;
    let (looker, shared) = (Arc::clone(house), Arc::clone(&seen));
    script.at(Moment::After(1), move || async move {
        let table = looker.loaded().await;
        let own = format!("mergeberg/tmp/{}/", looker.ledger.queue_id());
        let found = table.facts.refs.values().find(|r| r.name.as_str().starts_with(&own)).unwrap().clone();
        let written = table.facts.snapshots.get(found.snapshot_id).unwrap().timestamp_ms;
        let main = table.facts.head(&branch("main"));
        let length = table.facts.snapshots.after(main, found.snapshot_id).unwrap().len();
        *shared.lock().unwrap() = Some((found, written, length));
    });
    drain(&worker).await;
    script.assert_played();
    let seen = seen.lock().unwrap().take();
    seen.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r3_a_temporary_branch_has_a_life_of_its_own() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    for number in 0..5_u32 {
        house.append_on_new(&format!("ingest/{number}"), &[order(i64::from(10 + number), 22)]).await;
        house.enqueue(&format!("ingest/{number}")).await;
    }
    let (fence, _, length) = staged(&house).await;
    assert_eq!(length, 5, "one fast-forward and four picks");
    let RefKind::Branch { min_snapshots_to_keep, max_snapshot_age_ms } = fence.kind else {
        panic!("{fence:?}")
    };
    assert!(min_snapshots_to_keep.unwrap() >= 5, "the whole train is kept: {min_snapshots_to_keep:?}");
    assert!(max_snapshot_age_ms.is_some() && fence.max_ref_age_ms.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r3_the_age_of_a_fast_forwarded_head_is_added() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    house.set_property("history.expire.max-snapshot-age-ms", &(200 * DAY_MS).to_string()).await;
    let head = house.append_on_new("ingest/old", &[order(4, 22)]).await;
    house.advance(40 * DAY_MS);
    house.enqueue("ingest/old").await;
    let (fence, written_ms, _) = staged(&house).await;
    assert_eq!(fence.snapshot_id, head, "still young enough for this table to go as it is");
    let ends_ms = written_ms + fence.max_ref_age_ms.unwrap();
    assert!(ends_ms > house.now(), "an expiry of today would take it");
    assert_eq!(house.head("main").await, Some(head));
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r4_retention_of_the_target_is_kept() {
    let house = House::orders(ORDERS_POLICY).await;
    let kind = RefKind::Branch { min_snapshots_to_keep: Some(17), max_snapshot_age_ms: Some(90 * DAY_MS) };
    let head = house.head("main").await.unwrap();
    let main = RefFact { name: branch("main"), snapshot_id: head, kind: kind.clone(), max_ref_age_ms: None };
    house.set_ref(main).await;
    for main_moves in [false, true] {
        let name = format!("ingest/{main_moves}");
        house.append_on_new(&name, &[order(if main_moves { 5 } else { 4 }, 22)]).await;
        if main_moves {
            house.append("main", &[order(9, 25)]).await;
        }
        let request = house.enqueue(&name).await;
        house.drain().await;
        assert_eq!(house.state(request).await, "landed");
        let table = house.loaded().await;
        assert_eq!(table.facts.refs[&branch("main")].kind, kind);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r5_a_tag_is_set_on_the_candidate_of_its_request() {
    let house = House::orders(&class("tag = \"landed/{request}\"")).await;
    house.append_on_new("a", &[order(4, 22)]).await;
    house.append_on_new("b", &[order(5, 23)]).await;
    let a = house.enqueue("a").await;
    let b = house.enqueue("b").await;
    house.drain().await;
    for request in [a, b] {
        let landed = house.request(request).await.landed_snapshot;
        assert_eq!(house.head(&format!("landed/{request}")).await, landed);
    }
    assert_eq!(
        house.keys(&format!("landed/{a}")).await,
        [1, 2, 3, 4],
        "an intermediate head is told by its tag"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r5_a_taken_name_evicts_only_its_request() {
    let house = House::orders(&class("tag = \"landed/{request}\"")).await;
    house.append_on_new("a", &[order(4, 22)]).await;
    house.append_on_new("b", &[order(5, 23)]).await;
    let a = house.enqueue("a").await;
    let b = house.enqueue("b").await;
    let head = house.head("main").await.unwrap();
    house.tag(&format!("landed/{a}"), head).await;
    house.drain().await;
    assert_eq!(house.state(a).await, "refused(name-taken)");
    assert_eq!(house.state(b).await, "landed");
    assert_eq!(house.head(&format!("landed/{a}")).await, Some(head), "somebody's tag stays");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r5_a_name_that_is_taken_while_the_train_is_checked() {
    let house = Arc::new(House::orders(&class("tag = \"landed/{request}\"")).await);
    house.append_on_new("a", &[order(4, 22)]).await;
    house.append_on_new("b", &[order(5, 23)]).await;
    let a = house.enqueue("a").await;
    let b = house.enqueue("b").await;
    let (worker, script) = house.scripted().await;
    let other = Arc::clone(&house);
    script.at(Moment::After(1), move || async move {
        let head = other.head("main").await.unwrap();
        other.tag(&format!("landed/{a}"), head).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.state(a).await, "refused(name-taken)");
    assert_eq!(house.state(b).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 5]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r5_two_requests_with_one_tag_name_do_not_share_it() {
    let house = House::orders(&class("tag = \"release\"")).await;
    house.append_on_new("a", &[order(4, 22)]).await;
    house.append_on_new("b", &[order(5, 23)]).await;
    let a = house.enqueue("a").await;
    let b = house.enqueue("b").await;
    house.drain().await;
    assert_eq!(house.state(a).await, "landed");
    assert_eq!(house.state(b).await, "refused(name-taken)");
    assert_eq!(house.head("release").await, house.request(a).await.landed_snapshot);
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
}

/// A second request for the same branch, to another target.
async fn enqueue_to(house: &House, source: &str, target: &str) -> RequestId {
    let table = house.loaded().await;
    let policy = house.worker.policies.read().unwrap().for_table(&house.table);
    let new = NewRequest {
        table: house.table.clone(),
        table_uuid: table.facts.uuid.clone(),
        source: branch(source),
        pinned: table.facts.head(&branch(source)).unwrap(),
        target: branch(target),
        class: policy.class_of(&branch(source)).unwrap().name.clone(),
        principal: Principal::new("test"),
        idempotency_key: None,
        structure: table.facts.structure(),
        format_version: 2,
    };
    match house.ledger.enqueue(&new, house.now()).await.unwrap() {
        Enqueued::New(row) => row.id,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r6_a_branch_that_another_open_request_names_is_not_dropped() {
    let house = House::orders(ORDERS_POLICY).await;
    house.branch("staging").await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    let to_main = enqueue_to(&house, "ingest/b", "main").await;
    let to_staging = enqueue_to(&house, "ingest/b", "staging").await;
    house.drain().await;
    assert_eq!(house.state(to_main).await, "landed");
    assert_eq!(house.state(to_staging).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    assert_eq!(house.keys("staging").await, [1, 2, 3, 4]);
    assert_eq!(house.refs().await, ["main", "staging"], "the last of them handed it over");
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r6_targets_and_protected_names_are_not_dropped() {
    let policy = "table = \"shop.orders\"\nprotected = [\"precious\"]\n\
        [[class]]\nname = \"default\"\nprefix = \"\"\nafter-landing = \"drop\"\noverlap = \"allow\"\n";
    let house = House::orders(policy).await;
    house.branch("staging").await;
    house.append_on_new("to-staging", &[order(6, 24)]).await;
    house.append_on_new("precious", &[order(4, 22)]).await;
    let precious = house.enqueue("precious").await;
    enqueue_to(&house, "to-staging", "staging").await;
    house.drain().await;
    // Nothing open names it as a target now; it is one all the same.
    let staging = house.enqueue("staging").await;
    house.drain().await;
    assert_eq!(house.state(precious).await, "landed");
    assert_eq!(house.state(staging).await, "landed");
    assert_eq!(house.keys("main").await, [1, 2, 3, 4, 6]);
    assert_eq!(house.keys("staging").await, [1, 2, 3, 6]);
    assert_eq!(house.refs().await, ["main", "precious", "staging"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r6_a_class_that_keeps_its_branches_keeps_them() {
    let house = House::orders(&class("")).await;
    let head = house.append_on_new("stream", &[order(4, 22)]).await;
    let request = house.enqueue("stream").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.head("stream").await, Some(head));
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r6_a_tag_that_takes_the_name_while_the_train_is_checked_is_not_dropped() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let written = house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.enqueue("ingest/b").await;
    let (worker, script) = house.scripted().await;
    let owner = Arc::clone(&house);
    script.at(Moment::Before(2), move || async move {
        owner.commit(vec![Update::RemoveRef(branch("ingest/b"))]).await;
        owner.tag("ingest/b", written).await;
    });
    drain(&worker).await;
    script.assert_played();
    assert_eq!(house.refs().await, ["ingest/b", "main"]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r7_temporary_names_carry_the_queue_and_other_queues_are_left_alone() {
    let house = Arc::new(House::orders(ORDERS_POLICY).await);
    let head = house.head("main").await.unwrap();
    house.force_branch("mergeberg/tmp/another-queue/1", head).await;
    house.force_branch("mergeberg/pin/another-queue/1", head).await;
    house.append_on_new("ingest/b", &[order(4, 22)]).await;
    house.enqueue("ingest/b").await;
    let (fence, ..) = staged(&house).await;
    assert!(fence.name.as_str().contains(house.ledger.queue_id().as_str()));
    let refs = house.refs().await;
    assert_eq!(refs, ["main", "mergeberg/pin/another-queue/1", "mergeberg/tmp/another-queue/1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r8_with_gc_disabled_nothing_is_deleted() {
    let house = House::orders(ORDERS_POLICY).await;
    house.set_property("gc.enabled", "false").await;
    let request = evicted(&house).await;
    let before = files(&house);
    house.drain().await;
    assert_eq!(house.state(request).await, "refused(duplicate-key)");
    let after = files(&house);
    assert!(after.is_superset(&before));
    assert!(after.len() > before.len(), "not even the queue's own left-overs");
    assert_eq!(left_over(&house).await, [], "refs and snapshots are no files");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_r9_a_head_that_ages_out_soon_is_published_under_a_new_id() {
    let house = House::orders(ORDERS_POLICY).await;
    let old = house.append_on_new("ingest/old", &[order(4, 22)]).await;
    house.advance(4 * DAY_MS);
    let request = house.enqueue("ingest/old").await;
    house.drain().await;
    assert_eq!(house.state(request).await, "landed");
    assert_eq!(house.classified(request).await, "cherry-pick");
    let head = house.head("main").await.unwrap();
    assert_ne!(head, old);
    let table = house.loaded().await;
    assert!(house.now() - table.facts.snapshots.get(head).unwrap().timestamp_ms < DAY_MS);
    assert_eq!(house.published_from().await, Some(old));
    assert_eq!(house.keys("main").await, [1, 2, 3, 4]);
    house.assert_sound().await;
}
