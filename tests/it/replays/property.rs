//! Random tables, operations and interleavings against the model.
//!
//! `MERGEBERG_REPLAY_SEED=17 cargo test --test it replays::property` plays the one of seed 17;
//! `MERGEBERG_REPLAY_RUNS=500` plays that many.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mergeberg::validate::Engine;
use serde_json::json;

use super::choices;
use super::model::{Ambiguous, Operation, Row};
use super::world::{World, definition, texts};
use crate::oracle::random::Random;

/// Plays of a normal test run.
const RUNS: u64 = 40;
/// Time after which no further play begins, so that a slow machine only tests less.
const TIME_BOUND: Duration = Duration::from_secs(40);
/// Plays without which the tally says nothing.
const ENOUGH_RUNS: usize = 4;

#[derive(Debug, Default)]
struct Tally {
    runs: usize,
    rebased: usize,
    ambiguous: usize,
    picked: usize,
}

#[tokio::test(flavor = "multi_thread")]
async fn random_operations_run_again_do_what_sql_says() {
    play_all(Joins::Hashed).await;
}

/// As operations are run that ran out of memory.
#[tokio::test(flavor = "multi_thread")]
async fn random_operations_do_the_same_by_joins_that_sort() {
    play_all(Joins::Sorted).await;
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Joins {
    Hashed,
    Sorted,
}

async fn play_all(joins: Joins) {
    let from_env = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let asked = from_env("MERGEBERG_REPLAY_RUNS");
    let seeds = match from_env("MERGEBERG_REPLAY_SEED") {
        Some(seed) => seed..seed + asked.unwrap_or(1),
        None => 0..asked.unwrap_or(RUNS),
    };
    let all = seeds.end - seeds.start >= RUNS;
    let begin = Instant::now();
    let mut tally = Tally::default();
    for seed in seeds {
        if asked.is_none() && begin.elapsed() > TIME_BOUND {
            break;
        }
        play(seed, joins, &mut tally).await;
    }
    eprintln!("{tally:?}");
    if all {
        assert!(tally.runs >= ENOUGH_RUNS, "{tally:?}");
        assert!(tally.rebased * 2 > tally.runs, "{tally:?}");
    }
}

/// What happens on the target while the branch is worked on.
async fn meanwhile(world: &World, random: &mut Random, rows: &mut Vec<Row>, more: &mut &'static str) {
    match random.below(5) {
        0 => {
            let again = rows.clone();
            world.write("main", "replace", &again, true, BTreeMap::new()).await;
        }
        1 => {
            rows.retain(|_| random.chance(70));
            let kept = rows.clone();
            world.write("main", "overwrite", &kept, true, BTreeMap::new()).await;
        }
        2 if more.is_empty() => {
            *more = "|-";
            world
                .house
                .change_schema(0, |fields| {
                    fields.push(json!({"id": 9, "name": "note", "required": false, "type": "string"}));
                })
                .await;
        }
        _ => {
            let new = choices::rows(random, 4);
            world.write("main", "append", &new, false, BTreeMap::new()).await;
            rows.extend(new);
        }
    }
}

async fn play(seed: u64, joins: Joins, tally: &mut Tally) {
    let mut random = Random::new(seed);
    let mut table = definition();
    table = match random.below(5) {
        0 => table,
        1 => table.partitioned_by("id", "bucket[3]"),
        2 => table.partitioned_by("status", "truncate[1]"),
        _ => table.partitioned_by("day", "identity"),
    };
    if random.chance(50) {
        table = table.format_version(3);
    }
    for mode in ["write.delete.mode", "write.update.mode", "write.merge.mode"] {
        if random.chance(50) {
            table = table.property(mode, "merge-on-read");
        }
    }
    let mut rows = choices::rows(&mut random, 14);
    rows.push(choices::row(&mut random));
    let feed = choices::rows(&mut random, 8);
    let mut world = World::new(table, &rows, &feed).await;
    if joins == Joins::Sorted {
        world.house = world.house.with_engine(Engine::start().unwrap().sparing());
    }
    let first = choices::row(&mut random);
    world.first_landing(&first).await;
    rows.push(first);
    world.house.branch("work").await;

    // The branch: up to three operations, each of which its own engine could run.
    let mut branch_rows = rows.clone();
    let mut operations: Vec<(Operation, String)> = Vec::new();
    let wanted = 1 + random.below(3);
    while operations.len() < wanted {
        let operation = choices::operation(&mut random);
        let Ok(after) = operation.apply(&branch_rows, &feed) else { continue };
        let record = world.record(&operation, &format!("op-{}", operations.len()), random.chance(50));
        world.recorded("work", &record, &after).await;
        branch_rows = after;
        operations.push((operation, record.to_string()));
    }
    let mut more = "";
    for _ in 0..1 + random.below(3) {
        meanwhile(&world, &mut random, &mut rows, &mut more).await;
    }
    let mut expected: Result<Vec<Row>, Ambiguous> = Ok(rows.clone());
    for (operation, _) in &operations {
        expected = expected.and_then(|rows| operation.apply(&rows, &feed));
    }
    let (state, classified, detail) = world.merge("work").await;
    let records: Vec<&str> = operations.iter().map(|(_, record)| record.as_str()).collect();
    let told = format!(
        "seed {seed}: {state} {classified} {detail}\n{}\ntarget {:#?}\nfeed {:#?}",
        records.join("\n"),
        texts(&rows, more),
        texts(&feed, ""),
    );
    tally.runs += 1;
    match expected {
        Err(Ambiguous) => {
            tally.ambiguous += 1;
            assert_eq!(state, "refused(replay-failed)", "{told}");
        }
        Ok(expected) => {
            assert_eq!(state, "landed", "{told}");
            if classified == "rebase" {
                tally.rebased += 1
            } else {
                tally.picked += 1
            }
            assert_eq!(world.house.texts("main").await, texts(&expected, more), "{told}");
        }
    }
}
