//! Branches that Spark, PyIceberg and Flink wrote, merged: `fixtures/tables`, the short form of the matrix.
//!
//! Every table's branch `b` is enqueued against its `main`, under two policies. It lands with the rows that the
//! engine itself gives when the same statements run on `main` one after another, and with the live files of the
//! engine's own cherry-pick where it has one; or it is refused for a reason that is true, and `main` is as it
//! was. Which of the two, for each table, stands in `docs/compatibility.md`, which this test keeps true.

use std::fmt::Write as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use futures::FutureExt;
use mergeberg::ledger::{Decision, ReviewFilter};
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::{FileScope, ManifestStore};
use mergeberg_kernel::ids::{Principal, SnapshotId};
use serde_json::{Value, json};

use crate::support::engine_table::{Expected, NAME, Oracle, PLACE, names};
use crate::support::python::Python;
use crate::support::{House, branch, json_rows};

/// As strict as shipped, but for appends, which may meet.
pub(crate) const SERIAL: &str = r#"
table = "engine.written"

[[class]]
name = "default"
prefix = ""
overlap = "allow"
"#;

/// A team that knows its keys: what two sides changed is compared file by file and row by row (rule C4).
pub(crate) const BY_ROWS: &str = r#"
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

/// Nobody knows a key: rows of format v3 are told apart by their ids.
const BY_ROW_ID: &str = r#"
table = "engine.written"

[[class]]
name = "default"
prefix = ""
overlap = "allow"
on-conflict = "row-merge"
"#;

/// A table after its branch was merged.
pub(crate) struct Merged {
    pub house: House,
    /// A classification, or why it was not published, as it stands in the page.
    pub outcome: String,
    /// Rows of main, when it landed.
    pub rows: Option<Vec<String>>,
}

/// Merges the branch of a table and checks what came of it.
pub(crate) async fn merge(table: &str, policy: &str, oracle: Oracle) -> Merged {
    let expected = Expected::of(table);
    let house = House::engine_table(table, policy).await;
    let before = match house.catalog.load(&house.table).await {
        Ok(table) => table,
        Err(error) => {
            let outcome = format!("not opened: {}", error.reason().code());
            return Merged { house, outcome, rows: None };
        }
    };
    let head = before.facts.head(&branch("main"));
    let request = house.enqueue("b").await;
    house.drain().await;
    let mut reviewed = "";
    if house.state(request).await == "in-review" {
        house.approve_all().await;
        house.drain().await;
        reviewed = ", after review";
    }
    let row = house.request(request).await;
    let after = house.loaded().await;
    let mut rows = None;
    let outcome = match row.state.to_string().as_str() {
        "landed" => {
            let landed = after.facts.head(&branch("main")).unwrap();
            let read = house.lines_at(landed).await;
            expected.assert_explains(table, &read, oracle);
            rows = Some(read);
            // What is run again or merged row by row is in files of ours.
            let is_picked = row.classification.as_deref() != Some("rebase");
            if let Some(files) = expected.files_after_its_own_merge().filter(|_| is_picked) {
                assert_eq!(house.live_files(landed).await, files, "{table}: live files of main");
            }
            for reference in before.facts.refs.values().filter(|r| r.name.as_str() != "main") {
                let kept = after.facts.refs.get(&reference.name);
                assert_eq!(kept, Some(reference), "{table}: {}", reference.name);
            }
            format!("{}{reviewed}", row.classification.unwrap_or_default())
        }
        other => {
            assert_eq!(after.facts.head(&branch("main")), head, "{table}: main was not touched");
            format!("{other}{reviewed}")
        }
    };
    if !outcome.contains("unreadable") {
        house.assert_sound().await;
        if let Some((head, rows)) = head.zip(expected.rows("main")) {
            assert_eq!(house.lines_at(head).await, rows, "{table}: rows of main before");
        }
    }
    Merged { house, outcome, rows }
}

impl House {
    /// As a reviewer who looked at them would.
    async fn approve_all(&self) {
        let reviewer = Principal::new("rita");
        for review in self.ledger.reviews(&ReviewFilter::default()).await.unwrap() {
            self.ledger
                .decide(review.id, Decision::Approve, &reviewer, "looked at", self.now())
                .await
                .unwrap();
        }
    }

    /// Live files of a snapshot by their last path segment, data and delete files.
    pub(crate) async fn live_files(&self, id: SnapshotId) -> Vec<String> {
        let table = self.loaded().await;
        let snapshot = table.facts.snapshots.get(id).unwrap();
        let live =
            ManifestStore::new(64 << 20).live_files(&table, snapshot, &FileScope::Table).await.unwrap();
        let name = |path: &str| Path::new(path).file_name().unwrap().to_str().unwrap().to_owned();
        let mut names: Vec<String> =
            live.data.iter().chain(&live.deletes).map(|file| name(&file.fact.path)).collect();
        names.sort();
        names.dedup();
        names
    }
}

const PAGE: &str = "docs/compatibility.md";

/// Keeps the part of the page between two marks.
pub(crate) fn assert_page(part: &str, text: &str) {
    let [begin, end] = ["begin", "end"].map(|word| format!("<!-- {part}: {word} -->"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    let (head, rest) = page.split_once(&begin).expect("the page has the marks");
    let (_, tail) = rest.split_once(&end).expect("the page has the marks");
    let current = format!("{head}{begin}\n{text}{end}{tail}");
    if std::env::var_os("MERGEBERG_BLESS").is_some() {
        return std::fs::write(&path, &current).unwrap();
    }
    assert!(page == current, "{PAGE} is not what merging gives; MERGEBERG_BLESS=1 writes it again");
}

/// Tables with a branch to merge.
pub(crate) fn with_branch() -> impl Iterator<Item = String> {
    names().into_iter().filter(|name| Expected::of(name).has_branch())
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_that_engines_wrote_land_as_the_engine_says_or_are_refused() {
    let mut lines = String::from(
        "| table | written by | branch | format | main meanwhile | the engine's own merge | serializable | by rows |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    let mut failed = Vec::new();
    for table in with_branch() {
        let expected = Expected::of(&table);
        let mut outcomes = Vec::new();
        for (policy, oracle) in [(SERIAL, Oracle::LandingOrder), (BY_ROWS, Oracle::SomeOrder)] {
            match AssertUnwindSafe(merge(&table, policy, oracle)).catch_unwind().await {
                Ok(merged) => outcomes.push(merged.outcome),
                Err(_) => failed.push(table.clone()),
            }
        }
        let [engine, operation, meanwhile, own] = expected.words();
        let (version, outcomes) = (expected.format_version(), outcomes.join(" | "));
        writeln!(
            lines,
            "| `{table}` | {engine} | {operation} | v{version} | {meanwhile} | {own} | {outcomes} |"
        )
        .unwrap();
    }
    assert!(failed.is_empty(), "{failed:?}");
    assert_page("merges", &lines);
}

/// Statements of Spark that nobody recorded, on both sides: its updates keep the ids of rows.
#[tokio::test(flavor = "multi_thread")]
async fn what_engines_changed_in_format_v3_is_merged_by_row_id() {
    let (mut merged, mut refused) = (Vec::new(), Vec::new());
    for table in with_branch().filter(|table| Expected::of(table).format_version() == 3) {
        if merge(&table, SERIAL, Oracle::LandingOrder).await.outcome != "refused(conflict)" {
            continue;
        }
        let by_row_id = merge(&table, BY_ROW_ID, Oracle::SomeOrder).await;
        if by_row_id.rows.is_some() {
            assert_eq!(by_row_id.outcome, "rebase", "{table}");
            merged.push(table);
        } else {
            refused.push((table, by_row_id.outcome));
        }
    }
    // Its branch was made before the upgrade to format 3, from rows that have no ids.
    assert_eq!(refused, [("upgrade-v3-pos-deletes".to_owned(), "refused(row-conflict)".to_owned())]);
    assert_eq!(merged.len(), 20, "{merged:?}");
}

/// Structs, lists and maps whose fields were added, dropped, renamed and reordered after rows were written.
#[tokio::test(flavor = "multi_thread")]
async fn nested_columns_that_changed_are_read_as_spark_reads_them() {
    let expected = Expected::of("evolution-nested-v2");
    let house = House::engine_table("evolution-nested-v2", SERIAL).await;
    let table = house.loaded().await;
    for name in ["main", "b"] {
        let head = table.facts.head(&branch(name)).unwrap();
        assert_eq!(house.lines_at(head).await, expected.rows(name).unwrap(), "{name}");
    }
}

fn common_folder(one: &Path, other: &Path) -> PathBuf {
    one.components().zip(other.components()).take_while(|(a, b)| a == b).map(|(part, _)| part).collect()
}

/// After a landing, the target is read by engines that share no code with us.
#[tokio::test(flavor = "multi_thread")]
async fn what_landed_is_read_by_other_engines() {
    const READERS: [(&str, &str); 3] =
        [("PyIceberg", "read"), ("DuckDB", "read_duckdb"), ("ClickHouse", "read_clickhouse")];
    // One process for all of them: it takes longer to start than to read.
    let folder = tempfile::tempdir().unwrap();
    let Some(mut python) = Python::start(folder.path()) else { return };
    let mut alike = [0_u32; READERS.len()];
    let mut landed = 0;
    let mut others = String::new();
    for table in with_branch() {
        let merged = merge(&table, BY_ROWS, Oracle::SomeOrder).await;
        let Some(rows) = merged.rows else { continue };
        landed += 1;
        let catalog = Python::catalog_of(merged.house.dir.path());
        let mut findings = Vec::new();
        for ((_, job), alike) in READERS.iter().zip(&mut alike) {
            let mut arguments = json!({ "catalog": catalog, "table": NAME, "ref": "main" });
            if *job == "read_clickhouse" {
                // It reads files below the location only, and here the engine's files lie elsewhere.
                arguments["below"] = json!(common_folder(merged.house.dir.path(), Path::new(PLACE)));
            }
            let answer = python.ask(job, arguments);
            let finding = match answer.get("rows").and_then(Value::as_array) {
                Some(read) if json_rows::lines(read) == rows => {
                    *alike += 1;
                    "alike"
                }
                Some(_) => "other rows",
                None => "not read",
            };
            findings.push(finding);
        }
        if findings.iter().any(|finding| *finding != "alike") {
            writeln!(others, "| `{table}` | {} |", findings.join(" | ")).unwrap();
        }
    }
    let names = READERS.map(|(name, _)| name).join(" | ");
    let counts = alike.map(|count| format!("{count} of {landed} alike")).join(" | ");
    let text = format!("| table | {names} |\n|---|---|---|---|\n| all that landed | {counts} |\n{others}");
    assert_page("readers", &text);
}
