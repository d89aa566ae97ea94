//! Branches that Spark, PyIceberg and Flink wrote, merged: `fixtures/tables`, the short form of the matrix.
//!
//! Every table's branch `b` is enqueued against its `main`. It lands with the rows that the engine itself gives
//! when the same statements run on `main` one after another, or it is refused for a reason that is true, and
//! `main` is as it was. Which of the two, for each table, stands in `docs/compatibility.md`.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use futures::FutureExt;
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg_kernel::ids::SnapshotId;

use crate::support::engine_table::{Expected, NAME, names};
use crate::support::{House, branch};

/// Deltas are compared row by row, appends may meet: the class of a team that knows its keys.
const BY_ROWS: &str = r#"
table = "engine.written"

[[check]]
id = "one-id-once"
type = "duplicate-key"
columns = ["id"]
scope = "table"

[[class]]
name = "default"
prefix = ""
overlap = "allow-with-duplicate-check"
isolation = "snapshot"
equality-deletes = "serial-upsert"
checks = ["one-id-once"]
"#;

/// What became of one table's branch.
struct Outcome {
    /// `landed` or `refused(code)`.
    state: String,
    classification: String,
}

async fn merge(table: &str, policy: &str) -> Outcome {
    let expected = Expected::of(table);
    let house = House::engine_table(table, policy).await;
    let before = house.loaded().await;
    let head = before.facts.head(&branch("main"));
    let request = house.enqueue("b").await;
    house.drain().await;
    let row = house.request(request).await;
    let state = row.state.to_string();
    let after = house.loaded().await;
    match state.as_str() {
        "landed" => {
            let landed = after.facts.head(&branch("main")).unwrap();
            let rows = house.lines_at(landed).await;
            if let Some(serial) = expected.serial() {
                assert_eq!(rows, serial, "{table}: rows of main");
            }
            if let Some(files) = expected.files_after_its_own_merge() {
                assert_eq!(house.live_files(landed).await, files, "{table}: live files of main");
            }
            let other: Vec<_> = before.facts.refs.values().filter(|r| r.name.as_str() != "main").collect();
            for reference in other {
                assert_eq!(
                    after.facts.refs.get(&reference.name),
                    Some(reference),
                    "{table}: {}",
                    reference.name
                );
            }
        }
        refused => {
            assert!(refused.starts_with("refused("), "{table} is {refused}: {:?}", row.detail);
            assert_eq!(after.facts.head(&branch("main")), head, "{table}: main was not touched");
        }
    }
    if let Some(rows) = head.zip(expected.rows("main")) {
        assert_eq!(house.lines_at(rows.0).await, rows.1, "{table}: rows of main before");
    }
    house.assert_sound().await;
    Outcome { state, classification: row.classification.unwrap_or_default() }
}

impl House {
    /// Live files of a snapshot by their last path segment, data and delete files.
    async fn live_files(&self, id: SnapshotId) -> Vec<String> {
        let table = self.loaded().await;
        let snapshot = table.facts.snapshots.get(id).unwrap();
        let live =
            ManifestStore::new(64 << 20).live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let files = live.data.iter().chain(&live.deletes);
        let mut names: Vec<String> = files.map(|file| last(&file.fact.path).to_owned()).collect();
        names.sort();
        names.dedup();
        names
    }
}

fn last(path: &str) -> &str {
    Path::new(path).file_name().and_then(|name| name.to_str()).unwrap()
}

/// Tables whose branch this release cannot publish, with the state that says so.
fn merged_by_others() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from([])
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_that_engines_wrote_land_as_the_engine_says_or_are_refused() {
    let only = std::env::var("MERGEBERG_TABLES").unwrap_or_default();
    let mut wrong = Vec::new();
    for table in names().iter().filter(|name| name.contains(&only) && Expected::of(name).has_branch()) {
        let Ok(outcome) = AssertUnwindSafe(merge(table, BY_ROWS)).catch_unwind().await else {
            wrong.push(format!("{table}: see above"));
            continue;
        };
        println!("{table:60} {:30} {}", outcome.state, outcome.classification);
        let wanted = merged_by_others().get(table.as_str()).copied().unwrap_or("landed");
        if outcome.state != wanted {
            wrong.push(format!("{table}: {} ({}), wanted {wanted}", outcome.state, outcome.classification));
        }
    }
    assert!(wrong.is_empty(), "{NAME}: {wrong:#?}");
}
