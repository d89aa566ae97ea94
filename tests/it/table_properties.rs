//! Properties of a table that steer how often a commit is tried, as engines know them (`commit.retry.*`,
//! `commit.status-check.*`).

use crate::outcomes::house_with_one;
use crate::support::scripted::{Do, Kind};
use crate::support::{House, drain};

/// Commits of others that come between, each before a landing of ours.
const STRANGERS: usize = 5;

impl House {
    /// Sets them before anything is planned, so that no train is planned anew for it.
    async fn set_properties(&self, properties: &[(&str, &str)]) {
        for (key, value) in properties {
            self.set_property(key, value).await;
        }
    }
}

/// Stagings and landings that it takes while another branch is written before each of the first landings.
async fn tries_of(properties: &[(&str, &str)]) -> (usize, usize) {
    let (house, request) = house_with_one().await;
    house.branch("feature/x").await;
    house.set_properties(properties).await;
    let (catalog, worker) = house.misled_worker();
    for id in 0..STRANGERS {
        let stranger = house.stranger_appends("feature/x", 50 + i64::try_from(id).unwrap(), 25);
        catalog.next(Kind::Landing, Do::First(stranger));
    }
    drain(&worker).await;
    assert!(catalog.is_played());
    house.landed_once(request).await;
    (catalog.commits(Kind::Staging), catalog.commits(Kind::Landing))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_landing_is_sent_as_often_as_the_table_says_and_then_planned_anew() {
    let retries = tries_of_retries;
    assert_eq!(tries_of(&[]).await, (1, STRANGERS + 1), "our own bound is beyond this");
    assert_eq!(retries("0").await, (STRANGERS + 1, STRANGERS + 1));
    // Two trains of three tries each.
    assert_eq!(retries("2").await, (2, STRANGERS + 1));
    // What is no number is not followed, nor is it in anybody's way.
    assert_eq!(retries("many").await, (1, STRANGERS + 1));
}

async fn tries_of_retries(count: &str) -> (usize, usize) {
    tries_of(&[("commit.retry.num-retries", count), ("commit.retry.max-wait-ms", "1")]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_staging_is_sent_as_often_as_the_table_says() {
    for (retries, attempts) in [("5", 1), ("0", 6)] {
        let (house, request) = house_with_one().await;
        house.branch("feature/x").await;
        house.set_properties(&[("commit.retry.num-retries", retries)]).await;
        let (catalog, worker) = house.misled_worker();
        for id in 50..55 {
            catalog.next(Kind::Staging, Do::First(house.stranger_appends("feature/x", id, 25)));
        }
        drain(&worker).await;
        house.landed_once(request).await;
        assert_eq!(catalog.commits(Kind::Staging), 6, "{retries}");
        assert_eq!(house.request(request).await.attempts, attempts, "{retries}");
    }
}

/// Rule L3: nobody knows whether the landing was applied, and the removal of its fence gets no answer either.
#[tokio::test(flavor = "multi_thread")]
async fn what_became_of_a_landing_is_looked_at_as_often_as_the_table_says() {
    // Below two the removal of a fence could not be read after it: two looks again there are always.
    for (retries, looks) in [("0", 3), ("2", 3), ("6", 7)] {
        let (house, request) = house_with_one().await;
        house.set_properties(&[("commit.status-check.num-retries", retries)]).await;
        let (catalog, worker) = house.misled_worker();
        catalog.next(Kind::Landing, Do::LoseBeforeApplying);
        catalog.always(Kind::Removal, || Do::LoseBeforeApplying);
        let epoch = house.ledger.lead("test", 600_000, house.now()).await.unwrap().unwrap();

        worker.tick(epoch).await.unwrap();

        assert_eq!(house.state(request).await, "unknown", "{retries}");
        assert_eq!(catalog.commits(Kind::Removal), looks, "{retries}");
        catalog.be_honest();
        worker.tick(epoch).await.unwrap();
        house.ledger.release(epoch).await.unwrap();
        drain(&worker).await;
        house.landed_once(request).await;
    }
}
