//! A serial oracle: whatever happened, the target's rows are those of the landing order.
//!
//! Random histories of pipelines, strangers and ticks are played on a real table. Then each landed request's
//! logical operation is applied to rows in a map, in landing order, and compared with what the target holds.
//! The oracle shares no code with classification or staging.
//!
//! A failure prints the seed and the history. One seed is one history:
//!
//! - `MERGEBERG_ORACLE_RUNS=500 cargo test --test it oracle` plays 500 histories, longer ones than by default.
//! - `MERGEBERG_ORACLE_TELL=1` tells every history, also those that pass.
//! - `MERGEBERG_ORACLE_SEED=17 cargo test --test it oracle` plays the one of seed 17 (with the length that
//!   `MERGEBERG_ORACLE_STEPS` names).

mod choices;
mod found;
mod history;
mod judge;
mod pipeline;
pub(crate) mod random;
mod rows;

use std::time::{Duration, Instant};

use history::History;
use judge::{Tally, judge};
use tokio::task::JoinSet;

/// Histories of a normal test run, and their steps.
const RUNS: u64 = 40;
const STEPS: usize = 25;
/// Steps of a history of the long form.
const LONG_STEPS: usize = 60;
/// Time after which a normal run begins no further history, so that a slow machine only tests less.
const TIME_BOUND: Duration = Duration::from_secs(40);
/// Histories played at the same time: they mostly wait for the disk.
const AT_ONCE: usize = 4;
/// Histories without which the tally says nothing.
const ENOUGH_RUNS: u64 = 20;

async fn play(seed: u64, steps: usize) -> Tally {
    let mut tally = Tally::new();
    let mut history = History::start(seed).await;
    history.play(steps).await;
    judge(&mut history, &mut tally).await;
    if std::env::var("MERGEBERG_ORACLE_TELL").is_ok() {
        eprintln!("{}", history.told());
    }
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn random_histories_end_with_the_rows_of_the_landing_order() {
    let from_env = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let asked = from_env("MERGEBERG_ORACLE_RUNS");
    let default_steps = if asked.is_some() { LONG_STEPS } else { STEPS };
    let steps = from_env("MERGEBERG_ORACLE_STEPS").map_or(default_steps, |n| usize::try_from(n).unwrap());
    let seeds = match from_env("MERGEBERG_ORACLE_SEED") {
        Some(seed) => seed..seed + asked.unwrap_or(1),
        None => 0..asked.unwrap_or(RUNS),
    };
    let begin = Instant::now();
    let mut tally = Tally::new();
    let mut played = 0;
    let mut seeds = seeds;
    let mut failed = None;
    let mut playing = JoinSet::new();
    loop {
        let is_over = failed.is_some() || (asked.is_none() && begin.elapsed() > TIME_BOUND);
        while playing.len() < AT_ONCE
            && !is_over
            && let Some(seed) = seeds.next()
        {
            playing.spawn_blocking(move || tokio::runtime::Handle::current().block_on(play(seed, steps)));
        }
        match playing.join_next().await {
            Some(Ok(of_one)) => {
                played += 1;
                for (word, count) in of_one {
                    *tally.entry(word).or_default() += count;
                }
            }
            // It has told its history. The others under way are played to their end.
            Some(Err(error)) => failed = failed.or(Some(error)),
            None => break,
        }
    }
    if let Some(error) = failed {
        std::panic::resume_unwind(error.into_panic());
    }
    eprintln!("{played} histories in {:.1?}: {tally:#?}", begin.elapsed());
    if played >= ENOUGH_RUNS {
        for word in
            ["landed as fast-forward", "landed as cherry-pick", "landed as rebase", "already-published"]
        {
            assert!(tally.contains_key(word), "no request of {played} histories {word}");
        }
    }
}
