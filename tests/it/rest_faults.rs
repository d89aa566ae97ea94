//! The queue over a REST server that misbehaves on order: rules L and N5, cases O24 to O26 and O28. Nothing is lost,
//! nothing lands twice, and what cannot be known holds the target until it is.

use std::sync::Arc;
use std::time::Duration;

use mergeberg::worker::context::Worker;
use mergeberg::worker::error::WorkerError;
use mergeberg::worker::run::{Ended, RunOptions};
use mergeberg_kernel::commit::Update;
use tokio::sync::Notify;

use crate::support::fault_server::{Ask, Do, Manners};
use crate::support::shop::{CLIENT, Shop, by_hand, set};
use crate::support::{drain, order};

const LEASE_MS: i64 = 60_000;

/// Works until nothing more can be done, or the catalog is too bad for that.
async fn work(worker: &Worker) -> Result<Ended, WorkerError> {
    let (_stop, stopped) = tokio::sync::watch::channel(false);
    let options = RunOptions { drain: true, poll: Duration::from_millis(20), lease_ms: LEASE_MS };
    worker.run(options, stopped).await
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_a_lost_answer_neither_loses_nor_doubles() {
    for ask in [Ask::Staging, Ask::Landing, Ask::Removal] {
        for act in [
            Do::ActThenSay(503),
            Do::ActThenSay(500),
            Do::ActThenClose,
            Do::ActThenCut,
            Do::ActTwice,
            Do::Say(503),
            Do::Say(504),
            Do::Close,
            Do::SayYes,
        ] {
            let (shop, request) = Shop::with_one().await;
            if ask == Ask::Removal {
                // Something to remove: a landing that did not come through.
                shop.server.next(Ask::Landing, Do::Say(503));
            }
            shop.server.next(ask, act);
            drain(&shop.house.worker).await;
            assert!(shop.server.is_played(), "{ask:?} {act:?}");
            shop.landed_once(request).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_a_503_and_then_a_409_is_no_refusal() {
    let (shop, request) = Shop::with_one().await;
    // The landing is applied; the fence that would prove it is asked for in vain.
    shop.server.next(Ask::Landing, Do::ActThenSay(503));
    shop.server.next(Ask::Removal, Do::Say(409));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o24_with_idempotency_keys_a_lost_landing_is_one_landing() {
    let manners = Manners { idempotency_keys: true, ..Manners::default() };
    for act in [Do::ActThenSay(503), Do::ActThenClose, Do::Say(503), Do::Close] {
        let (shop, request) = Shop::with_one_over(manners.clone()).await;
        shop.server.next(Ask::Landing, act);
        drain(&shop.house.worker).await;
        shop.landed_once(request).await;
        let landings = shop.server.requests(Ask::Landing);
        assert_eq!(landings.len(), 2, "{act:?}: sent again under its key, and no second train");
        assert_eq!(landings[0].headers["idempotency-key"], landings[1].headers["idempotency-key"]);
        assert_eq!(shop.house.request(request).await.attempts, 1);
    }
}

/// Rule L3: the fence is removed first, so a landing that comes late comes too late.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_landing_that_comes_late_is_refused_by_its_fence() {
    let (shop, request) = Shop::with_one().await;
    shop.server.next(Ask::Landing, Do::SayThenActLate(504));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;

    assert_eq!(shop.server.act_late(), [409]);

    shop.landed_once(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l3_a_landing_that_comes_before_its_fence_is_removed_is_found() {
    let (shop, request) = Shop::with_one().await;
    shop.server.next(Ask::Landing, Do::SayThenActLate(504));
    let server = Arc::clone(&shop.server);
    shop.server.first(Ask::Removal, async move {
        assert_eq!(server.act_late(), [200]);
    });
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l2_a_train_that_is_staged_late_is_swept() {
    let (shop, request) = Shop::with_one().await;
    shop.server.next(Ask::Staging, Do::SayThenActLate(504));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;

    // Its sequence numbers are taken by now, or its target has moved.
    for status in shop.server.act_late() {
        assert!([400, 409].contains(&status), "{status}");
    }
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_a_landing_that_nobody_can_read_is_held_until_somebody_can() {
    let (shop, request) = Shop::with_one().await;
    shop.server.next(Ask::Landing, Do::ActThenSay(503));
    let server = Arc::clone(&shop.server);
    shop.server.first(Ask::Landing, async move { server.always(Ask::Load, Do::Say(503)) });
    let _ = work(&shop.house.worker).await;
    let state = shop.house.state(request).await;
    assert!(["landing", "unknown"].contains(&state.as_str()), "{state}");
    assert_eq!(shop.house.ledger.open_intents().await.unwrap().len(), 1);

    shop.server.be_honest();
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 1);
}

/// Rule L4: what a replica says that lags behind is no proof that nothing landed.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l4_a_successor_does_not_believe_a_server_that_lags_behind() {
    for behind in [1, 2, 3] {
        let (shop, request) = Shop::with_one().await;
        shop.server.next(Ask::Landing, Do::ActThenSay(503));
        let server = Arc::clone(&shop.server);
        shop.server.first(Ask::Landing, async move { server.always(Ask::Load, Do::Say(503)) });
        let _ = work(&shop.house.worker).await;
        shop.house.advance(2 * LEASE_MS);
        let successor = shop.another_worker("successor").await;
        shop.server.be_honest();
        for _ in 0..3 {
            shop.server.next(Ask::Load, Do::SayOld(behind));
        }

        drain(&successor).await;

        shop.landed_once(request).await;
        assert_eq!(shop.house.request(request).await.attempts, 1, "behind by {behind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stale_reads_meanwhile_cost_nothing_but_time() {
    let (shop, request) = Shop::with_one().await;
    for _ in 0..4 {
        shop.server.next(Ask::Load, Do::SayOld(1));
    }
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o25_n5_numbers_that_another_branch_took_are_made_again() {
    let (shop, request) = Shop::with_one().await;
    shop.house.branch("elsewhere").await;
    shop.stranger_appends(Ask::Staging, "elsewhere", order(50, 28));
    drain(&shop.house.worker).await;
    assert!(shop.server.is_played());
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 1, "no second planning");
    assert_eq!(shop.house.keys("elsewhere").await, [1, 2, 3, 9, 50]);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o25_another_branch_that_is_written_before_the_landing_is_no_obstacle() {
    let (shop, request) = Shop::with_one().await;
    shop.house.branch("elsewhere").await;
    shop.stranger_appends(Ask::Landing, "elsewhere", order(50, 28));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.server.requests(Ask::Landing).len(), 1, "it is not even sent again");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o26_a_conflict_for_ever_is_given_up_within_a_bound_and_named() {
    for ask in [Ask::Staging, Ask::Landing] {
        let (shop, request) = Shop::with_one().await;
        let before = shop.server.requests(ask).len();
        shop.server.always(ask, Do::Say(409));
        drain(&shop.house.worker).await;
        assert_eq!(shop.house.state(request).await, "held(catalog-unavailable)", "{ask:?}");
        let text = shop.text_of(request).await;
        assert!(text.contains("409") && text.contains("'main' at"), "{ask:?}: {text}");
        assert!(shop.server.requests(ask).len() - before <= 4, "{ask:?}");

        shop.server.be_honest();
        drain(&shop.house.worker).await;
        shop.landed_once(request).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o26_a_conflict_that_comes_as_400_is_a_conflict() {
    let shop = Shop::orders(Manners::default()).await;
    shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = shop.house.enqueue("ingest/a").await;
    shop.stranger_appends(Ask::Landing, "main", order(9, 25));
    shop.server.next(Ask::Landing, Do::Say(400));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 2, "planned again on the new head");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_two_first_publications_both_count() {
    let shop = Shop::empty(Manners::default()).await;
    shop.house.append("ingest/a", &[order(1, 20)]).await;
    let request = shop.house.enqueue("ingest/a").await;
    shop.stranger_appends(Ask::Landing, "main", order(2, 20));
    drain(&shop.house.worker).await;
    assert_eq!(shop.house.state(request).await, "landed");
    assert_eq!(shop.house.keys("main").await, [1, 2]);
    shop.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_o28_a_server_that_ignores_the_condition_is_found_out() {
    let shop = Shop::empty(Manners::default()).await;
    shop.house.append("ingest/a", &[order(1, 20)]).await;
    let request = shop.house.enqueue("ingest/a").await;
    shop.stranger_appends(Ask::Landing, "main", order(2, 20));
    shop.server.next(Ask::Landing, Do::Ignore("main"));
    drain(&shop.house.worker).await;
    assert_eq!(
        shop.house.state(request).await,
        "unknown",
        "the stranger's rows are lost: that is no success"
    );
    assert_eq!(shop.house.ledger.open_intents().await.unwrap().len(), 1, "the target is held");
}

/// Rules L1 and L7: what is required of the server, and that it is never a single absent ref.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l1_l7_every_commit_carries_its_conditions() {
    let (shop, request) = Shop::with_one().await;
    let (head, pin) = (shop.house.head("main").await.unwrap(), shop.house.head("ingest/a").await.unwrap());
    let before = shop.server.requests(Ask::Staging).len();
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;

    let required = |body: &str| -> Vec<String> {
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        let all = body["requirements"].as_array().unwrap().iter();
        let mut words: Vec<String> = all
            .map(|r| match r["type"].as_str().unwrap() {
                "assert-ref-snapshot-id" => {
                    let name = r["ref"].as_str().unwrap();
                    let name = if name.starts_with("mergeberg/tmp/") { "fence" } else { name };
                    format!("{name} at {}", r["snapshot-id"])
                }
                other => other.to_owned(),
            })
            .collect();
        words.sort();
        words
    };
    let staging = &shop.server.requests(Ask::Staging)[before..];
    assert_eq!(staging.len(), 1);
    let structure = ["assert-current-schema-id", "assert-default-sort-order-id", "assert-default-spec-id"];
    let staged = required(&staging[0].body);
    let mut expected: Vec<String> = structure.map(str::to_owned).into();
    expected.extend([
        "assert-table-uuid".to_owned(),
        "fence at null".to_owned(),
        format!("ingest/a at {pin}"),
        format!("main at {head}"),
    ]);
    assert_eq!(staged, expected);
    let landing = shop.server.requests(Ask::Landing).pop().unwrap();
    let landed = shop.house.head("main").await.unwrap();
    expected[4] = format!("fence at {landed}");
    assert_eq!(required(&landing.body), expected);
}

/// Rule L6: the pin lands, the branch that grew is kept.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l6_a_source_that_grew_before_the_landing_is_kept() {
    let (shop, request) = Shop::with_one().await;
    shop.stranger_appends(Ask::Landing, "ingest/a", order(5, 23));
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 1);
    assert_eq!(shop.house.keys("ingest/a").await, [1, 2, 3, 4, 5]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_l6_a_source_that_was_reset_before_the_landing_is_withdrawn() {
    let (shop, request) = Shop::with_one().await;
    let start = shop
        .house
        .loaded()
        .await
        .facts
        .snapshots
        .get(shop.house.head("ingest/a").await.unwrap())
        .unwrap()
        .parent;
    let house = Arc::clone(&shop.house);
    shop.server.first(Ask::Landing, async move { by_hand(&house, set("ingest/a", start.unwrap())).await });
    drain(&shop.house.worker).await;
    assert_eq!(shop.house.state(request).await, "withdrawn(source-reset)");
    assert_eq!(shop.house.keys("main").await, [1, 2, 3, 9]);
    shop.assert_nothing_left().await;
}

/// Rule L7: no requirement can say this, so it is compared right before the landing.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l7_another_queues_claim_stops_the_landing() {
    let (shop, request) = Shop::with_one().await;
    let house = Arc::clone(&shop.house);
    let claim = [("mergeberg.queue".to_owned(), "another".to_owned())];
    // The claim comes between staging and landing.
    let server = Arc::clone(&shop.server);
    shop.server.first(Ask::Staging, async move {
        server.first(Ask::Load, async move {
            by_hand(&house, Update::SetProperties(claim.into())).await;
        });
    });
    drain(&shop.house.worker).await;
    assert_eq!(shop.house.state(request).await, "held(claimed-elsewhere)");
    assert_eq!(shop.house.keys("main").await, [1, 2, 3, 9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_ends_in_the_middle_of_a_train_is_replaced() {
    let manners = Manners { client: Some(CLIENT), token_life_s: Some(3_600), ..Manners::default() };
    for ask in [Ask::Staging, Ask::Landing] {
        let (shop, request) = Shop::with_one_over(manners.clone()).await;
        let server = Arc::clone(&shop.server);
        shop.server.first(ask, async move { server.end_tokens() });
        drain(&shop.house.worker).await;
        shop.landed_once(request).await;
        assert_eq!(shop.house.request(request).await.attempts, 1, "{ask:?}");
        assert_eq!(shop.server.tokens_handed_out(), 2, "{ask:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_throttles_is_waited_for() {
    let (shop, request) = Shop::with_one().await;
    for ask in [Ask::Load, Ask::Staging, Ask::Landing] {
        shop.server.next(ask, Do::SayLater(429, 0));
    }
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 1);
}

/// The server acts on the landing, but long after anybody waits for its answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_slower_than_our_patience_lands_once() {
    let (shop, request) = Shop::with_one().await;
    let go_on = Arc::new(Notify::new());
    let wait = Arc::clone(&go_on);
    shop.server.first(Ask::Landing, async move { wait.notified().await });
    drain(&shop.house.worker).await;
    shop.landed_once(request).await;
    assert_eq!(shop.house.request(request).await.attempts, 2);

    go_on.notify_one();
    // The next request is looked at after it: the server's own work has gone on by then.
    tokio::task::yield_now().await;
    shop.landed_once(request).await;
}

/// Two leaders, each with a client of its own: the first stands still in its commit while its lease ends.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l5_a_leader_that_wakes_up_late_lands_nothing() {
    for ask in [Ask::Staging, Ask::Landing] {
        let (shop, request) = Shop::with_one().await;
        let first = shop.another_worker("first").await;
        let (reached, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (tell, wait) = (Arc::clone(&reached), Arc::clone(&go_on));
        shop.server.first(ask, async move {
            tell.notify_one();
            wait.notified().await;
        });
        let second = async {
            reached.notified().await;
            shop.house.advance(2 * LEASE_MS);
            drain(&shop.house.worker).await;
            shop.landed_once(request).await;
            go_on.notify_one();
        };
        let (ended, ()) = tokio::join!(work(&first), second);
        assert_eq!(ended.unwrap(), Ended::Deposed, "{ask:?}");
        drain(&shop.house.worker).await;
        shop.landed_once(request).await;
    }
}

/// The first leader's landing is applied, and it dies before it knows.
#[tokio::test(flavor = "multi_thread")]
async fn rule_l5_a_successor_finds_what_its_predecessor_landed() {
    for act in [Do::ActThenSay(503), Do::ActThenClose, Do::ActThenCut, Do::SayThenActLate(504)] {
        let (shop, request) = Shop::with_one().await;
        let first = shop.another_worker("first").await;
        shop.server.next(Ask::Landing, act);
        let server = Arc::clone(&shop.server);
        shop.server.first(Ask::Landing, async move { server.always(Ask::Load, Do::Close) });
        let _ = work(&first).await;
        assert_eq!(shop.house.ledger.open_intents().await.unwrap().len(), 1, "{act:?}");
        shop.server.be_honest();
        shop.house.advance(2 * LEASE_MS);

        drain(&shop.house.worker).await;

        shop.landed_once(request).await;
        let late = shop.server.act_late();
        assert!(late.iter().all(|status| *status == 409), "{late:?}");
        shop.landed_once(request).await;
    }
}
