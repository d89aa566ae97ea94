//! The steps of the day, and the end that each must come to. `docs/demo.md` has the same table; a test
//! compares them.

use super::flights::{FIRST_DAY, Flight, LAST_DAY, date};

pub const NAMESPACE: &str = "nyc";
pub const FLIGHTS: &str = "flights";
/// What the transforms compute from.
pub const RAW_FLIGHTS: &str = "raw_flights";
/// What the backfill joins with.
pub const AIRLINES: &str = "airlines";
/// What the wrong transform joins with, and loses Puerto Rico by.
pub const AIRPORTS: &str = "airports";
/// The upstream to reconcile with.
pub const DAILY_TOTALS: &str = "daily_totals";

/// Days that arrive in shards; all days before are on `main` when the day begins.
pub const SHARDED_DAYS: [u32; 2] = [25, 26];
pub const SHARDS_A_DAY: u32 = 14;
/// Days that are computed again, and compacted meanwhile. Their first load lacks the cancelled flights.
pub const RECOMPUTED_DAYS: [u32; 8] = [13, 14, 15, 16, 17, 18, 19, 21];
/// The recomputed day whose query loses flights.
pub const WRONG_DAY: u32 = 16;
/// The day with two flight numbers that left two airports.
pub const TWO_AIRPORTS_DAY: u32 = 20;
/// The day that gets its flights to Honolulu when `distance` has become wide enough.
pub const FAR_DAY: u32 = 22;
/// The day on which a tail number is corrected.
pub const TAIL_NUMBER_DAY: u32 = 23;
/// The day whose arrival delays are replaced.
pub const ARRIVALS_DAY: u32 = 24;

/// The column that is promoted, and its new type.
pub const WIDENED: (&str, &str) = ("distance", "long");

/// Who writes. Each is a process, and they run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pipeline {
    /// One of [`Pipeline::INGESTS`], counted from 1.
    Ingest(u32),
    Transform,
    Backfill,
    Analyst,
    /// Compacts `main` past the queue and a day through it, and trims the raw table.
    Maintenance,
    /// Commits to `main` past the queue.
    Operator,
}

impl Pipeline {
    pub const INGESTS: u32 = 4;

    pub fn name(self) -> String {
        match self {
            Self::Ingest(number) => format!("ingest-{number}"),
            Self::Transform => "transform".to_owned(),
            Self::Backfill => "backfill".to_owned(),
            Self::Analyst => "analyst".to_owned(),
            Self::Maintenance => "maintenance".to_owned(),
            Self::Operator => "operator".to_owned(),
        }
    }

    pub fn all() -> Vec<Self> {
        let mut all: Vec<Self> = (1..=Self::INGESTS).map(Self::Ingest).collect();
        all.extend([Self::Transform, Self::Backfill, Self::Analyst, Self::Maintenance, Self::Operator]);
        all
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|pipeline| pipeline.name() == name)
    }
}

/// What a branch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// A part of a day, appended.
    Shard { day: u32, part: u32 },
    /// Flights whose numbers left another airport as well, appended.
    OtherAirport,
    /// A day computed again from the raw flights: recorded `overwrite-where` with a pinned query.
    Recompute { day: u32 },
    /// Hawaiian's flight of a day again: recorded `overwrite-where` of one row.
    TailNumber,
    /// A day's files in place of the target's: recorded `replace-partitions`.
    Arrivals,
    /// Flights to Honolulu, appended after the change of the column's type.
    FarFlights,
    /// The carrier's name in every row of the target: recorded `overwrite-where` that reads the target.
    AirlineNames,
    /// A day's files as one, with the same rows.
    Compaction { day: u32 },
}

/// The end that a request must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// State, with the reason in brackets: `refused(duplicate-key)`.
    pub state: &'static str,
    /// Classification, where the order of the day fixes it.
    pub classified: Option<&'static str>,
}

const LANDED: End = End { state: "landed", classified: None };
const PICKED: End = End { state: "landed", classified: Some("cherry-pick") };
const REBASED: End = End { state: "landed", classified: Some("rebase") };
const DUPLICATE: End = End { state: "refused(duplicate-key)", classified: None };
const WRONG_TOTAL: End = End { state: "refused(reconciliation)", classified: Some("rebase") };

/// One branch: who writes it, what it holds, how its request ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    pub branch: String,
    pub pipeline: Pipeline,
    pub work: Work,
    pub end: End,
}

/// Steps of the same kind: one row of the table of end states.
#[derive(Clone, Debug)]
pub struct Group {
    pub what: &'static str,
    pub steps: Vec<Step>,
    pub end: End,
    pub why: &'static str,
}

/// The shard that is sent twice under one key.
pub fn resent_shard() -> String {
    shard_branch(SHARDED_DAYS[0], 1)
}

fn shard_branch(day: u32, part: u32) -> String {
    format!("ingest/{}-{part:02}", date(day))
}

/// The shard whose rows come on a second branch too.
const COPIED: (u32, u32) = (SHARDED_DAYS[0], 3);

/// Every request of the day, in the order of the table.
pub fn groups() -> Vec<Group> {
    let step = |branch: &str, pipeline, work, end| Step { branch: branch.to_owned(), pipeline, work, end };
    let shards = SHARDED_DAYS.iter().flat_map(|day| (1..=SHARDS_A_DAY).map(move |part| (*day, part)));
    let shards = shards.map(|(day, part)| {
        let pipeline = Pipeline::Ingest((part - 1) % Pipeline::INGESTS + 1);
        step(&shard_branch(day, part), pipeline, Work::Shard { day, part }, LANDED)
    });
    let recomputed = |end: End, wrong: bool| {
        let days = RECOMPUTED_DAYS.iter().filter(move |day| (**day == WRONG_DAY) == wrong);
        let branch = |day: u32| format!("transform/{}", date(day));
        days.map(|day| step(&branch(*day), Pipeline::Transform, Work::Recompute { day: *day }, end)).collect()
    };
    let (day, part) = COPIED;
    let copy = format!("{}-again", shard_branch(day, part));
    let other_airport = format!("ingest/{}-other-airport", date(TWO_AIRPORTS_DAY));
    let analyst = Pipeline::Analyst;
    let group = |what, steps: Vec<Step>, why| {
        let end = steps.first().map_or(LANDED, |step| step.end);
        Group { what, steps, end, why }
    };
    vec![
        group(
            "shards of the last two days",
            shards.collect(),
            "appends to the same days; duplicates are looked for",
        ),
        group(
            "a shard's rows on a second branch",
            vec![step(&copy, Pipeline::Ingest(part), Work::Shard { day, part }, DUPLICATE)],
            "every row of it is on the target already",
        ),
        group(
            "flight numbers of a second airport",
            vec![step(&other_airport, Pipeline::Ingest(1), Work::OtherAirport, PICKED)],
            "a duplicate only for a key without origin",
        ),
        group("days computed again", recomputed(REBASED, false), "run again on the compacted files"),
        group(
            "a day computed wrong",
            recomputed(WRONG_TOTAL, true),
            "an inner join lost Puerto Rico: the totals differ",
        ),
        group(
            "an analyst's corrections",
            vec![
                step("feature/tail-number", analyst, Work::TailNumber, LANDED),
                step("feature/arrival-delays", analyst, Work::Arrivals, LANDED),
            ],
            "one row, and one whole day",
        ),
        group(
            "written after int -> long",
            vec![step("feature/far-flights", analyst, Work::FarFlights, LANDED)],
            "in review first; others went on; then approved",
        ),
        group(
            "a column of all days",
            vec![step("backfill/airline-names", Pipeline::Backfill, Work::AirlineNames, REBASED)],
            "overlaps everything: alone, when old enough",
        ),
        group(
            "a day compacted on a branch",
            vec![step(
                &format!("compaction/{}", date(SHARDED_DAYS[1])),
                Pipeline::Maintenance,
                Work::Compaction { day: SHARDED_DAYS[1] },
                LANDED,
            )],
            "in a class that takes nothing but the same rows",
        ),
    ]
}

/// Every step, in the order of the table.
pub fn steps() -> Vec<Step> {
    groups().into_iter().flat_map(|group| group.steps).collect()
}

/// Commits on `main` that no request makes, as the report counts them.
pub struct Foreign {
    pub what: &'static str,
    pub kind: &'static str,
    pub snapshots: usize,
    pub why: &'static str,
}

pub const FOREIGN: [Foreign; 2] = [
    Foreign {
        what: "a compaction of the recomputed days",
        kind: "maintenance",
        snapshots: 1,
        why: "the same rows in fewer files, proved by reading them",
    },
    Foreign { what: "a commit by hand", kind: "bypass", snapshots: 1, why: "told, and planned around" },
];

/// The shard of a day's `rows` that has number `part`, as first row and length. Shards cover the day.
pub fn shard_rows(rows: usize, part: u32) -> (usize, usize) {
    let (part, shards) = (part as usize, SHARDS_A_DAY as usize);
    let first = rows * (part - 1) / shards;
    (first, rows * part / shards - first)
}

/// A flight number of the day with two airports, and the airport at which the operator adds it by hand.
/// The ingest adds the other airports.
pub fn is_two_airports(flight: Flight<'_>) -> bool {
    flight.carrier == "UA" && (flight.flight == 236 || flight.flight == 635)
}
pub const BY_HAND_ORIGIN: &str = "EWR";

/// Airports that the wrong query's inner join does not find.
pub const LOST_AIRPORTS: [&str; 4] = ["BQN", "PSE", "SJU", "STT"];

/// Days that are on `main` when the day begins.
pub fn loaded_days() -> impl Iterator<Item = u32> {
    (FIRST_DAY..=LAST_DAY).filter(|day| !SHARDED_DAYS.contains(day))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::report::text::Columns;

    /// The end states as `docs/demo.md` shows them.
    fn table_of_ends() -> Columns {
        let mut columns = Columns::new(&["what", "requests>", "ends", "classified", "why"]);
        for Group { what, steps, end, why } in groups() {
            columns.push(vec![
                what.to_owned(),
                steps.len().to_string(),
                end.state.to_owned(),
                end.classified.unwrap_or("").to_owned(),
                why.to_owned(),
            ]);
        }
        columns.push(vec![
            "a shard sent again under its key".to_owned(),
            "0".to_owned(),
            "the same request".to_owned(),
            String::new(),
            "its branch is gone, the answer is the same".to_owned(),
        ]);
        for Foreign { what, kind, snapshots: _, why } in FOREIGN {
            columns.push(vec![
                what.to_owned(),
                "0".to_owned(),
                kind.to_owned(),
                String::new(),
                why.to_owned(),
            ]);
        }
        columns
    }

    #[test]
    fn the_table_of_docs_demo_is_this_one() {
        const BEGIN: &str = "<!-- end states: generated -->\n";
        const END: &str = "<!-- end -->\n";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/demo.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(BEGIN).unwrap();
        let (_, after) = rest.split_once(END).unwrap();
        let expected = format!("{before}{BEGIN}{}{END}{after}", table_of_ends().markdown());
        if std::env::var_os("MERGEBERG_BLESS").is_some() {
            std::fs::write(&path, &expected).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap();
        assert!(found == expected, "docs/demo.md is stale: run MERGEBERG_BLESS=1 cargo test --lib docs");
    }

    #[test]
    fn branches_are_named_once_and_counted_as_promised() {
        let steps = steps();
        let names: BTreeSet<&str> = steps.iter().map(|step| step.branch.as_str()).collect();
        assert_eq!(names.len(), steps.len());
        let count = |prefix: &str| names.iter().filter(|name| name.starts_with(prefix)).count();
        assert_eq!(
            ["ingest/", "transform/", "feature/", "backfill/", "compaction/"].map(count),
            [28 + 1 + 1, 8, 3, 1, 1]
        );
        assert!(names.contains(resent_shard().as_str()));
        assert!(groups().iter().all(|group| group.steps.iter().all(|step| step.end == group.end)));
    }

    #[test]
    fn shards_cover_a_day_once() {
        let mut next = 0;
        for part in 1..=SHARDS_A_DAY {
            let (first, length) = shard_rows(903, part);
            assert_eq!(first, next);
            assert!(length > 0);
            next += length;
        }
        assert_eq!(next, 903);
    }

    #[test]
    fn every_pipeline_is_found_by_its_name() {
        for pipeline in Pipeline::all() {
            assert_eq!(Pipeline::named(&pipeline.name()), Some(pipeline));
        }
        assert_eq!(Pipeline::named("ingest-9"), None);
    }
}
