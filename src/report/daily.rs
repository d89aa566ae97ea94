//! `report daily` in its three forms.

use std::collections::BTreeSet;

use mergeberg_kernel::ids::{RefName, TableName};
use mergeberg_kernel::summary::{Balance, DayFigures, Failures, GroupFigures, Spread};
use serde::Serialize;

use super::day::Day;
use super::text::{Columns, count, duration, key_values, opt_duration};

/// Snapshots that are named for people; JSON has all.
const LISTED_IDS: usize = 10;
/// In the place of the tables of an empty day.
const NOTHING_ENDED: &str = "\nno request ended on this day\n";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Markdown,
    Json,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DailyReport {
    pub day: Day,
    pub figures: DayFigures,
    /// One for each target that the queue knows and the catalog has.
    pub balances: Vec<Balance>,
    pub not_counted: Vec<NotCounted>,
}

/// A target whose snapshots cannot be counted any more.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotCounted {
    pub table: TableName,
    pub target: RefName,
    pub why: String,
}

impl DailyReport {
    /// Is every snapshot of every target explained?
    pub fn adds_up(&self) -> bool {
        self.balances.iter().all(Balance::holds)
    }

    pub fn render(&self, format: Format) -> String {
        match format {
            Format::Table => self.table(),
            Format::Markdown => self.markdown(),
            Format::Json => {
                let mut text = self.to_json().to_string();
                text.push('\n');
                text
            }
        }
    }

    pub fn to_json(&self) -> serde_json::Value {
        let balances: Vec<serde_json::Value> = self
            .balances
            .iter()
            .map(|balance| {
                let mut value = serde_json::json!(balance);
                if let Some(map) = value.as_object_mut() {
                    map.insert("adds_up".to_owned(), balance.holds().into());
                }
                value
            })
            .collect();
        serde_json::json!({
            "day": self.day,
            "figures": self.figures,
            "balances": balances,
            "not_counted": self.not_counted,
            "adds_up": self.adds_up(),
        })
    }

    fn title(&self) -> String {
        let hours = self.day.hours();
        format!("Queue summary of {} ({}, {hours} h)", self.day.date, self.day.timezone)
    }

    fn table(&self) -> String {
        let mut text = format!("{}\n", self.title());
        let parts = self.parts();
        if parts.is_empty() {
            text.push_str(NOTHING_ENDED);
        }
        for (title, columns) in parts {
            text.push_str(&format!("\n{title}\n"));
            text.push_str(&indent(&columns.render()));
        }
        text.push_str("\ntarget\n");
        text.push_str(&indent(&key_values(&self.other_pairs())));
        for balance in &self.balances {
            text.push_str(&format!("\n{}\n", balance_lines(balance).join("\n  ")));
        }
        for NotCounted { table, target, why } in &self.not_counted {
            text.push_str(&format!("\n{table} {target}: not counted, {why}\n"));
        }
        text
    }

    fn markdown(&self) -> String {
        let mut text = format!("## {}\n", self.title());
        let parts = self.parts();
        if parts.is_empty() {
            text.push_str(NOTHING_ENDED);
        }
        for (title, columns) in parts {
            text.push_str(&format!("\n### {title}\n\n{}", columns.markdown()));
        }
        text.push_str("\n### target\n\n");
        for (key, value) in self.other_pairs() {
            text.push_str(&format!("- {key}: {value}\n"));
        }
        for balance in &self.balances {
            text.push_str(&format!("- {}\n", balance_lines(balance).join("\n  - ")));
        }
        for NotCounted { table, target, why } in &self.not_counted {
            text.push_str(&format!("- {table} {target}: not counted, {why}\n"));
        }
        text
    }

    fn parts(&self) -> Vec<(&'static str, Columns)> {
        if self.figures.classes.is_empty() {
            // An empty day: a table of zeros says less than one line.
            return Vec::new();
        }
        let mut parts = vec![
            ("requests that ended", self.state_columns()),
            ("times", self.time_columns()),
            ("classification", self.classification_columns()),
        ];
        if !self.figures.failures.is_empty() {
            parts.push(("ended without landing", self.failure_columns()));
        }
        parts
    }

    /// Class figures, and those of all when there is more than one class.
    fn groups(&self) -> Vec<(&str, &GroupFigures)> {
        let mut groups: Vec<(&str, &GroupFigures)> =
            self.figures.classes.iter().map(|(class, figures)| (class.as_str(), figures)).collect();
        if groups.len() != 1 {
            groups.push(("all", &self.figures.all));
        }
        groups
    }

    fn state_columns(&self) -> Columns {
        let mut columns = Columns::new(&[
            "class",
            "ended>",
            "landed>",
            "already-published>",
            "refused>",
            "withdrawn>",
            "cancelled>",
        ]);
        for (class, figures) in self.groups() {
            let GroupFigures {
                ended,
                landed,
                already_published,
                refused,
                withdrawn,
                cancelled,
                classifications: _,
                wait: _,
                merge: _,
            } = figures;
            let mut row = vec![class.to_owned()];
            row.extend(
                [ended, landed, already_published, refused, withdrawn, cancelled].map(|n| n.to_string()),
            );
            columns.push(row);
        }
        columns
    }

    /// Wait is enqueue to admission, merge is admission to landed.
    fn time_columns(&self) -> Columns {
        let mut columns =
            Columns::new(&["class", "wait median>", "wait p95>", "merge median>", "merge p95>"]);
        for (class, figures) in self.groups() {
            let mut row = vec![class.to_owned()];
            row.extend(spread(figures.wait));
            row.extend(spread(figures.merge));
            columns.push(row);
        }
        columns
    }

    fn classification_columns(&self) -> Columns {
        let words: BTreeSet<&str> = self.figures.all.classifications.keys().map(String::as_str).collect();
        let mut headers = vec!["class".to_owned()];
        headers.extend(words.iter().map(|word| format!("{word}>")));
        let mut columns = Columns::new(&headers);
        for (class, figures) in self.groups() {
            let mut row = vec![class.to_owned()];
            for word in &words {
                row.push(figures.classifications.get(*word).copied().unwrap_or(0).to_string());
            }
            columns.push(row);
        }
        columns
    }

    fn failure_columns(&self) -> Columns {
        let mut columns = Columns::new(&["reason", "requests>", "meaning"]);
        for Failures { reason, requests } in &self.figures.failures {
            columns.push(vec![reason.to_string(), requests.to_string(), reason.meaning().to_owned()]);
        }
        columns
    }

    fn other_pairs(&self) -> Vec<(&'static str, String)> {
        let figures = &self.figures;
        let oldest = match &figures.oldest_waiting {
            None => "none".to_owned(),
            Some(waiting) => format!(
                "request {} ({}), {}{}, for {}",
                waiting.request,
                waiting.class,
                waiting.state,
                waiting.reason.map(|code| format!("({code})")).unwrap_or_default(),
                duration(waiting.waited_ms)
            ),
        };
        vec![
            ("maintenance", count(figures.maintenance, "snapshot")),
            ("bypasses", count(figures.bypasses, "snapshot")),
            ("still open", count(figures.open, "request")),
            ("oldest waiting", oldest),
        ]
    }
}

fn spread(spread: Option<Spread>) -> [String; 2] {
    [opt_duration(spread.map(|s| s.median_ms)), opt_duration(spread.map(|s| s.p95_ms))]
}

/// The line that must add up, then what is wrong with it.
fn balance_lines(balance: &Balance) -> Vec<String> {
    let Balance { table, target, on_target, landed, maintenance, bypass, unexplained, lost, ambiguous, cut } =
        balance;
    let sign = if balance.holds() { "=" } else { "<>" };
    let verdict = if balance.holds() { "adds up" } else { "DOES NOT ADD UP" };
    let mut lines = vec![format!(
        "{table} {target}: {} on the target {sign} {landed} landed + {maintenance} maintenance + {bypass} \
         bypass  ({verdict})",
        count(*on_target, "snapshot")
    )];
    for (ids, meaning) in [
        (unexplained, "nobody knows how they came there"),
        (lost, "recorded, but not on the target any more"),
        (ambiguous, "recorded in more than one way"),
    ] {
        if !ids.is_empty() {
            let mut list: Vec<String> = ids.iter().take(LISTED_IDS).map(ToString::to_string).collect();
            if ids.len() > LISTED_IDS {
                list.push(format!("and {} more", ids.len() - LISTED_IDS));
            }
            lines.push(format!("{meaning}: {}", list.join(", ")));
        }
    }
    if *cut {
        lines.push("older snapshots were expired and are not counted".to_owned());
    }
    lines
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{RequestId, SnapshotId};
    use mergeberg_kernel::reason::ReasonCode;
    use mergeberg_kernel::state::RequestState;
    use mergeberg_kernel::summary::{DayRows, EndedRequest, OpenRequest, TargetHistory, day_figures};

    use super::*;

    fn ended(id: i64, class: &str, word: Option<&str>, state: RequestState, wait: i64) -> EndedRequest {
        EndedRequest {
            request: RequestId(id),
            class: class.to_owned(),
            classification: word.map(str::to_owned),
            state,
            enqueued_ms: 0,
            admitted_ms: Some(wait),
            ended_ms: wait + 1_500,
            set: None,
        }
    }

    fn report(on_target: &[i64]) -> DailyReport {
        let rows = DayRows {
            ended: vec![
                ended(1, "ingest", Some("fast-forward"), RequestState::Landed, 120),
                ended(2, "ingest", Some("cherry-pick"), RequestState::Landed, 400),
                ended(3, "ingest", Some("cherry-pick"), RequestState::Refused(ReasonCode::DuplicateKey), 300),
                ended(4, "transform", Some("rebase"), RequestState::Landed, 65_000),
            ],
            open: vec![OpenRequest {
                request: RequestId(5),
                class: "backfill".to_owned(),
                state: RequestState::Held(ReasonCode::OverlapsAhead),
                enqueued_ms: 1_000,
                set: None,
            }],
            maintenance: 1,
            bypasses: 0,
        };
        let ids = |ids: &[i64]| ids.iter().map(|id| SnapshotId(*id)).collect();
        DailyReport {
            day: Day::parse("2013-08-20", "America/New_York").unwrap(),
            figures: day_figures(&rows, 91_000),
            balances: vec![Balance::of(&TargetHistory {
                table: "nyc.flights".parse().unwrap(),
                target: RefName::main(),
                on_target: ids(on_target),
                cut: false,
                landed: ids(&[11, 12, 14]),
                maintenance: ids(&[13]),
                bypass: Vec::new(),
            })],
            not_counted: Vec::new(),
        }
    }

    #[test]
    fn the_table_is_aligned_and_ends_with_the_line_that_adds_up() {
        let report = report(&[11, 12, 13, 14]);
        assert!(report.adds_up());
        let expected = "\
Queue summary of 2013-08-20 (America/New_York, 24 h)

requests that ended
  class      ended  landed  already-published  refused  withdrawn  cancelled
  ingest         3       2                  0        1          0          0
  transform      1       1                  0        0          0          0
  all            4       3                  0        1          0          0

times
  class      wait median    wait p95  merge median  merge p95
  ingest          300 ms      400 ms         1.5 s      1.5 s
  transform   1 min 05 s  1 min 05 s         1.5 s      1.5 s
  all             300 ms  1 min 05 s         1.5 s      1.5 s

classification
  class      cherry-pick  fast-forward  rebase
  ingest               2             1       0
  transform            0             0       1
  all                  2             1       1

ended without landing
  reason         requests  meaning
  duplicate-key         1  The key would be there more than once.

target
  maintenance     1 snapshot
  bypasses        0 snapshots
  still open      1 request
  oldest waiting  request 5 (backfill), held(overlaps-ahead), for 1 min 30 s

nyc.flights main: 4 snapshots on the target = 3 landed + 1 maintenance + 0 bypass  (adds up)
";
        assert_eq!(report.render(Format::Table), expected);
    }

    #[test]
    fn markdown_has_the_same_figures() {
        let text = report(&[11, 12, 13, 14]).render(Format::Markdown);
        let expected_start = "\
## Queue summary of 2013-08-20 (America/New_York, 24 h)

### requests that ended

| class | ended | landed | already-published | refused | withdrawn | cancelled |
|---|---:|---:|---:|---:|---:|---:|
| ingest | 3 | 2 | 0 | 1 | 0 | 0 |
| transform | 1 | 1 | 0 | 0 | 0 | 0 |
| all | 4 | 3 | 0 | 1 | 0 | 0 |

### times

| class | wait median | wait p95 | merge median | merge p95 |
|---|---:|---:|---:|---:|
| ingest | 300 ms | 400 ms | 1.5 s | 1.5 s |
";
        assert!(text.starts_with(expected_start), "{text}");
        let expected_end = "\
### target

- maintenance: 1 snapshot
- bypasses: 0 snapshots
- still open: 1 request
- oldest waiting: request 5 (backfill), held(overlaps-ahead), for 1 min 30 s
- nyc.flights main: 4 snapshots on the target = 3 landed + 1 maintenance + 0 bypass  (adds up)
";
        assert!(text.ends_with(expected_end), "{text}");
    }

    #[test]
    fn json_carries_figures_in_milliseconds() {
        let text = report(&[11, 12, 13, 14]).render(Format::Json);
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["figures"]["classes"]["ingest"]["wait"]["p95_ms"], 400);
        assert_eq!(value["figures"]["failures"][0]["reason"], "duplicate-key");
        assert_eq!(value["balances"][0]["on_target"], 4);
        assert_eq!(value["adds_up"], true);
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn what_does_not_add_up_is_named() {
        let report = report(&[11, 12, 13, 99]);
        assert!(!report.adds_up());
        let expected_end = "\
nyc.flights main: 4 snapshots on the target <> 2 landed + 1 maintenance + 0 bypass  (DOES NOT ADD UP)
  nobody knows how they came there: 99
  recorded, but not on the target any more: 14
";
        let text = report.render(Format::Table);
        assert!(text.ends_with(expected_end), "{text}");
        assert_eq!(report.to_json()["adds_up"], false);
    }

    #[test]
    fn an_empty_day_is_a_report_too() {
        let report = DailyReport {
            day: Day::parse("2013-11-03", "America/New_York").unwrap(),
            figures: day_figures(&DayRows::default(), 0),
            balances: Vec::new(),
            not_counted: Vec::new(),
        };
        let expected = "\
Queue summary of 2013-11-03 (America/New_York, 25 h)

no request ended on this day

target
  maintenance     0 snapshots
  bypasses        0 snapshots
  still open      0 requests
  oldest waiting  none
";
        assert_eq!(report.render(Format::Table), expected);
    }
}
