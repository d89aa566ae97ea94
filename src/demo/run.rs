//! The order of the day. Each `await` below is on a condition that the next step depends on; whatever is
//! not ordered here runs at the same time.

use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::folder::{AGE_BOUND_MS, Folder, open_catalog};
use super::pipelines::{Pipelines, WorkerProcess, command_output};
use super::progress::Progress;
use super::scenario::{
    FLIGHTS, FOREIGN, Pipeline, RECOMPUTED_DAYS, SHARDED_DAYS, SHARDS_A_DAY, Step, Work, resent_shard, steps,
};
use super::verify::{self, Finding};
use super::writers::Order;
use super::{failed, table_name};
use crate::cli::{report, system_clock};
use crate::config::Config;
use crate::error::UserError;
use crate::ledger::{Ledger, RequestFilter, RequestRow, ReviewFilter, ReviewWord};
use crate::report::text::count;
use crate::report::{DailyReport, Day, Format};
use crate::table::catalog::Catalog as _;
use crate::table::sql_catalog::SqlCatalog;

/// How long one condition is waited for. The whole day takes a fraction of it.
const WAIT_BOUND: Duration = Duration::from_secs(180);
/// Between two looks at the ledger's change counter.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// Between two changes of the line that changes.
const SHOW_EVERY: Duration = Duration::from_millis(100);
/// Time zone in which the report's day is a day.
const TIMEZONE: &str = "UTC";

/// What a demo came to.
#[derive(Debug)]
pub struct Demonstrated {
    pub text: String,
    pub json: Value,
    /// Every end state, count and row is as expected.
    pub as_expected: bool,
}

/// The whole demo, in a folder that is made anew.
pub async fn demonstrate(named: &Path, json: bool) -> Result<Demonstrated, UserError> {
    let progress = Progress::new(json);
    let folder = Folder::make(named)?;
    progress.line(&format!("A day of a merge queue on real flights, in {}\n", named.display()));
    progress.status("making tables ...");
    let config = folder.furnish().await?;
    progress.status("writing branches ...");
    progress.say("tables", "nyc.flights holds 13 to 24 August 2013, three files a day, with some flaws");

    let day = Today {
        ledger: Ledger::open(&config.ledger).await?,
        catalog: open_catalog(&config).await?,
        worker: Mutex::new(None),
        folder,
        config,
        progress,
    };
    let seen = tokio::select! {
        seen = day.live() => seen?,
        error = day.show() => return Err(error),
    };
    day.conclude(named, seen).await
}

/// What was seen on the way and cannot be read from the ledger afterwards.
struct Seen {
    /// The first and the second answer to the same key.
    resent: [i64; 2],
}

struct Today {
    folder: Folder,
    config: Config,
    ledger: Ledger,
    catalog: SqlCatalog,
    progress: Progress,
    worker: Mutex<Option<WorkerProcess>>,
}

impl Today {
    async fn live(&self) -> Result<Seen, UserError> {
        let start = self.head().await?;
        self.start_worker("worker-1").await?;
        let pipelines = Pipelines::start(&self.folder)?;
        let processes = pipelines.len();
        self.say("pipelines", &format!("{processes} processes write branches, all from the same snapshot"));

        let resent = self.morning(&pipelines, start).await?;
        self.noon(&pipelines).await?;
        self.evening(&pipelines).await?;
        self.review().await?;
        self.compact_through_the_queue(&pipelines).await?;
        self.stop_worker().await?;
        Ok(Seen { resent })
    }

    /// Shards of the first day land while other branches are written; then what overlaps them.
    async fn morning(&self, pipelines: &Pipelines, start: SnapshotId) -> Result<[i64; 2], UserError> {
        // Each pipeline writes its branches one after the other, and all pipelines at the same time.
        let write = async |pipeline: Pipeline| -> Result<(), UserError> {
            for step in steps().iter().filter(|step| step.pipeline == pipeline) {
                if matches!(step.work, Work::FarFlights | Work::Compaction { .. }) {
                    continue;
                }
                pipelines.write(pipeline, &step.branch, start).await?;
                if is_early(step) {
                    pipelines.enqueue(pipeline, &step.branch).await?;
                }
            }
            Ok(())
        };
        try_join_all(Pipeline::all().into_iter().map(write)).await?;
        self.say("ingest", "14 shards of 25 August enqueued; those of the 26th and all others written");

        let resend = async {
            let branch = resent_shard();
            let step = steps().into_iter().find(|step| step.branch == branch);
            let step = step.ok_or_else(|| failed("the shard to send again is no step"))?;
            self.until("the first shard to land", |rows| ended(rows, |row| row.source.as_str() == branch))
                .await?;
            let first = self.request(&branch).await?.id.0;
            let (again, new) = pipelines.enqueue(step.pipeline, &branch).await?;
            let what = if new { "a NEW request" } else { "the same request" };
            self.say("ingest", &format!("{branch} sent again under its key: {what}, {again}"));
            Ok::<_, UserError>([first, again])
        };
        let copies = async {
            for step in steps().iter().filter(|step| is_copy(step)) {
                pipelines.enqueue(step.pipeline, &step.branch).await?;
            }
            for step in steps().iter().filter(|s| matches!(s.work, Work::TailNumber | Work::Arrivals)) {
                pipelines.enqueue(step.pipeline, &step.branch).await?;
            }
            Ok(())
        };
        let by_hand = async {
            pipelines.order(Pipeline::Operator, &Order::CommitByHand).await?;
            self.say("operator", "commits UA 236 and UA 635 from EWR to main by hand, past the queue");
            for step in steps().iter().filter(|step| step.work == Work::OtherAirport) {
                pipelines.enqueue(step.pipeline, &step.branch).await?;
            }
            Ok(())
        };
        let (resent, (), ()) = futures::try_join!(resend, copies, by_hand)?;
        let rows = self.until("the morning's requests to end", |rows| ended(rows, |_| true)).await?;
        self.say("queue", &tally(&rows));
        for row in rows.iter().filter(|row| matches!(row.state, RequestState::Refused(_))) {
            self.say("queue", &refusal(row));
        }
        Ok(resent)
    }

    /// The recomputed days are compacted before their transforms are enqueued; a column changes its type.
    async fn noon(&self, pipelines: &Pipelines) -> Result<(), UserError> {
        pipelines.order(Pipeline::Maintenance, &Order::Compact).await?;
        pipelines.order(Pipeline::Maintenance, &Order::TrimRaw).await?;
        let days = RECOMPUTED_DAYS.len();
        self.say("maintenance", &format!("compacts {days} days on main, and trims the raw flights"));

        pipelines.order(Pipeline::Analyst, &Order::Widen).await?;
        let head = self.head().await?;
        for step in steps().iter().filter(|step| step.work == Work::FarFlights) {
            pipelines.write(Pipeline::Analyst, &step.branch, head).await?;
            pipelines.enqueue(Pipeline::Analyst, &step.branch).await?;
            self.say("analyst", "changes distance from int to long and enqueues flights to Honolulu");
        }
        self.until("a review to open", |rows| rows.iter().any(|row| row.state == RequestState::InReview))
            .await?;
        self.say("queue", "feature/far-flights waits in review; the others go on");

        let transforms = steps();
        let transforms = transforms.iter().filter(|step| step.pipeline == Pipeline::Transform);
        for step in transforms {
            pipelines.enqueue(step.pipeline, &step.branch).await?;
        }
        self.say("transform", "8 days computed again before the compaction are enqueued after it");
        let is_transform = |row: &RequestRow| row.class == "transform";
        let rows = self.until("the transforms to end", |rows| ended(rows, is_transform)).await?;
        let transforms: Vec<RequestRow> = rows.into_iter().filter(is_transform).collect();
        self.say("queue", &tally(&transforms));
        for row in transforms.iter().filter(|row| matches!(row.state, RequestState::Refused(_))) {
            self.say("queue", &refusal(row));
        }
        Ok(())
    }

    /// A worker is replaced. Requests arrive all the same, and the backfill grows old among them: it goes
    /// first and alone, whatever the machine's speed.
    async fn evening(&self, pipelines: &Pipelines) -> Result<(), UserError> {
        self.stop_worker().await?;
        self.say("worker", "stopped, for a new version say; requests are taken all the same");
        let backfill = steps().into_iter().find(|step| step.work == Work::AirlineNames);
        let backfill = backfill.ok_or_else(|| failed("there is no backfill"))?;
        pipelines.enqueue(backfill.pipeline, &backfill.branch).await?;
        let enqueue = async |pipeline: Pipeline| -> Result<(), UserError> {
            for step in steps().iter().filter(|step| step.pipeline == pipeline && is_late(step)) {
                pipelines.enqueue(pipeline, &step.branch).await?;
            }
            Ok(())
        };
        try_join_all(Pipeline::all().into_iter().map(enqueue)).await?;
        self.say("ingest", "14 shards of 26 August enqueued, and the backfill of all days before them");

        let enqueued_ms = self.request(&backfill.branch).await?.enqueued_at_ms;
        let clock = system_clock();
        while clock() - enqueued_ms < AGE_BOUND_MS {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.start_worker("worker-2").await?;
        self.until("the backfill to land", |rows| ended(rows, |row| row.source.as_str() == backfill.branch))
            .await?;
        self.say("queue", "the backfill was 2 s old: it went first and alone, the shards wait behind it");
        let rows = self.until("the shards to land", |rows| ended(rows, |row| row.class == "ingest")).await?;
        self.say("queue", &tally(&rows));
        Ok(())
    }

    /// What the shards of the second day left behind in files becomes one, on a branch, checked like all others.
    async fn compact_through_the_queue(&self, pipelines: &Pipelines) -> Result<(), UserError> {
        for step in steps().iter().filter(|step| matches!(step.work, Work::Compaction { .. })) {
            let head = self.head().await?;
            pipelines.write(step.pipeline, &step.branch, head).await?;
            pipelines.enqueue(step.pipeline, &step.branch).await?;
            self.say("maintenance", &format!("compacts that day on {} and enqueues it", step.branch));
            let branch = step.branch.as_str();
            self.until("the compaction to end", |rows| ended(rows, |row| row.source.as_str() == branch))
                .await?;
            self.say("queue", "its rows are proved to be the same, and it lands");
        }
        Ok(())
    }

    /// As a reviewer does it: with the command.
    async fn review(&self) -> Result<(), UserError> {
        let filter = ReviewFilter { state: Some(ReviewWord::Open), ..ReviewFilter::default() };
        let open = self.ledger.reviews(&filter).await?;
        let [item] = open.as_slice() else {
            return Err(failed(format!("{} are open, one was expected", count(open.len() as u64, "review"))));
        };
        let id = item.id.to_string();
        let change: Vec<&str> = item.changes.iter().map(|change| change.text.as_str()).collect();
        self.say("reviewer", &format!("review show {id}: {}", change.join("; ")));
        let arguments = ["review", "approve", &id, "--principal", "reviewer", "--reason", "wide enough"];
        let answer = command_output(&self.folder, &arguments).await?;
        self.say("reviewer", answer.trim_end());
        let rows = self.until("the queue to be empty", |rows| ended(rows, |_| true)).await?;
        self.say("queue", &tally(&rows));
        Ok(())
    }

    /// Report, comparison, and what to try next.
    async fn conclude(self, named: &Path, seen: Seen) -> Result<Demonstrated, UserError> {
        self.progress.status("reading the target again ...");
        let requests = self.requests().await?;
        let now_ms = system_clock()();
        let day = Day::parse(&Day::today(TIMEZONE, now_ms)?, TIMEZONE)?;
        let report = report::daily(&self.ledger, Some(&self.catalog), day, now_ms).await?;
        let compared = verify::rows(&self.config).await?;
        let mut findings = verify::ends(&requests);
        findings.extend(self.other_findings(&requests, &seen, &report).await?);
        findings.push(compared.finding());
        let as_expected = findings.iter().all(Finding::holds);

        let mut text = format!("\n{}\n", report.render(Format::Table));
        text.push_str("Expected and actual\n\n");
        for line in verify::render(&findings).lines() {
            text.push_str(format!("  {line}").trim_end());
            text.push('\n');
        }
        text.push('\n');
        text.push_str(&compared.differences());
        text.push_str(if as_expected {
            "Everything is as expected.\n"
        } else {
            "This is NOT what was expected. Logs of all processes are in the folder's logs.\n"
        });
        let refused = requests.iter().find(|row| matches!(row.state, RequestState::Refused(_)));
        text.push_str(&what_next(named, refused));
        let json = json!({
            "folder": self.folder.path,
            "as_expected": as_expected,
            "findings": findings,
            "rows": compared,
            "requests": requests,
            "report": report.to_json(),
        });
        Ok(Demonstrated { text, json, as_expected })
    }

    async fn other_findings(
        &self,
        requests: &[RequestRow],
        seen: &Seen,
        report: &DailyReport,
    ) -> Result<Vec<Finding>, UserError> {
        let mut findings = Vec::new();
        let same = if seen.resent[0] == seen.resent[1] { "the same request" } else { "another request" };
        findings.push(Finding::new("a shard sent again under its key", "the same request", same));

        for step in steps() {
            let Some(row) = requests.iter().find(|row| row.source.as_str() == step.branch) else { continue };
            if is_copy(&step) {
                let named = text_of(row).contains("flight=");
                let actual = if named { "names rows" } else { "names no row" };
                findings.push(Finding::new("the refused copy's reason", "names rows", actual));
            }
            let attempts = self.ledger.attempts(row.id).await?;
            let was = |state: RequestState| attempts.iter().any(|attempt| attempt.state == state);
            if step.work == Work::FarFlights {
                let actual = if was(RequestState::InReview) { "in review first" } else { "not in review" };
                findings.push(Finding::new("the request after int -> long", "in review first", actual));
            }
            if step.work == Work::AirlineNames {
                let receipt = self.ledger.receipt_of_request(row.id).await?;
                let cars = receipt.map_or(0, |receipt| receipt.intent.cars.len());
                let aged = row.admitted_at_ms.is_some_and(|at| at - row.enqueued_at_ms >= AGE_BOUND_MS);
                let actual = match (cars, aged) {
                    (1, true) => "alone, by age".to_owned(),
                    (cars, true) => format!("with {cars} in its train"),
                    (_, false) => "before its age bound".to_owned(),
                };
                findings.push(Finding::new("how the backfill landed", "alone, by age", actual));
            }
        }
        let late = steps().into_iter().filter(is_late);
        let mut waited = 0;
        for step in late {
            let Some(row) = requests.iter().find(|row| row.source.as_str() == step.branch) else { continue };
            let attempts = self.ledger.attempts(row.id).await?;
            let held = RequestState::Held(ReasonCode::AloneByAge);
            waited += u32::from(attempts.iter().any(|attempt| attempt.state == held));
        }
        findings.push(Finding::new(
            "shards that waited behind it",
            SHARDS_A_DAY.to_string(),
            waited.to_string(),
        ));

        let table = self.catalog.load(&table_name(FLIGHTS)).await?;
        let foreign = self.ledger.foreign(&table.facts.uuid, &RefName::main()).await?;
        for expected in FOREIGN {
            let seen = foreign.iter().filter(|row| row.kind.word() == expected.kind).count();
            let text = |snapshots: usize| count(snapshots as u64, expected.kind);
            let finding = Finding::new(expected.what, text(expected.snapshots), text(seen));
            findings.push(finding.because(expected.why));
        }
        let adds_up = if report.adds_up() { "adds up" } else { "does not add up" };
        findings.push(Finding::new("the report", "adds up", adds_up));
        Ok(findings)
    }

    async fn start_worker(&self, name: &str) -> Result<(), UserError> {
        let worker = WorkerProcess::start(&self.folder, name)?;
        self.say("worker", &format!("mergeberg worker runs as process {}", worker.id()));
        *self.worker.lock().await = Some(worker);
        Ok(())
    }

    async fn stop_worker(&self) -> Result<(), UserError> {
        match self.worker.lock().await.take() {
            Some(worker) => worker.stop().await,
            None => Ok(()),
        }
    }

    fn say(&self, who: &str, what: &str) {
        self.progress.say(who, what);
    }

    /// Keeps the changing line current. Ends only with an error.
    async fn show(&self) -> UserError {
        loop {
            match self.requests().await {
                Ok(rows) if !rows.is_empty() => self.progress.status(&format!("queue: {}", tally(&rows))),
                Ok(_) => {}
                Err(error) => return error,
            }
            tokio::time::sleep(SHOW_EVERY).await;
        }
    }

    async fn head(&self) -> Result<SnapshotId, UserError> {
        let table = self.catalog.load(&table_name(FLIGHTS)).await?;
        table.facts.head(&RefName::main()).ok_or_else(|| failed("main has no head"))
    }

    async fn requests(&self) -> Result<Vec<RequestRow>, UserError> {
        Ok(self.ledger.requests(&RequestFilter::default()).await?)
    }

    async fn request(&self, branch: &str) -> Result<RequestRow, UserError> {
        let found = self.requests().await?.into_iter().find(|row| row.source.as_str() == branch);
        found.ok_or_else(|| failed(format!("{branch} was never enqueued")))
    }

    /// Waits until the requests are as `wanted`, and gives them.
    async fn until(
        &self,
        what: &str,
        wanted: impl Fn(&[RequestRow]) -> bool,
    ) -> Result<Vec<RequestRow>, UserError> {
        let deadline = Instant::now() + WAIT_BOUND;
        let mut changes = self.ledger.change_counter().await?;
        loop {
            // Counter first: what is written after it is seen by the next look.
            let seen = changes.value().await?;
            let rows = self.requests().await?;
            if wanted(&rows) {
                return Ok(rows);
            }
            while changes.value().await? == seen {
                if let Some(worker) = self.worker.lock().await.as_mut() {
                    worker.check()?;
                }
                if Instant::now() >= deadline {
                    let seconds = WAIT_BOUND.as_secs();
                    return Err(failed(format!("waited {seconds} s for {what} in vain: {}", tally(&rows))));
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
    }
}

/// Enqueued as soon as it is written: the first day's shards.
fn is_early(step: &Step) -> bool {
    matches!(step.work, Work::Shard { day, .. } if day == SHARDED_DAYS[0]) && !is_copy(step)
}

/// Enqueued in the evening: the second day's shards.
fn is_late(step: &Step) -> bool {
    matches!(step.work, Work::Shard { day, .. } if day == SHARDED_DAYS[1])
}

/// The shard on a second branch.
fn is_copy(step: &Step) -> bool {
    step.end.state == "refused(duplicate-key)"
}

/// Are there such requests, and has each ended?
fn ended(rows: &[RequestRow], which: impl Fn(&RequestRow) -> bool) -> bool {
    let mut chosen = rows.iter().filter(|row| which(row)).peekable();
    chosen.peek().is_some() && chosen.all(|row| row.state.is_final())
}

/// `22 landed, 1 refused, 3 waiting`, without what there is none of.
fn tally(rows: &[RequestRow]) -> String {
    let mut counts = [("landed", 0), ("refused", 0), ("in work", 0), ("waiting", 0), ("in review", 0)];
    for row in rows {
        let word = match row.state {
            RequestState::Landed | RequestState::AlreadyPublished => "landed",
            RequestState::Refused(_) | RequestState::Withdrawn(_) | RequestState::Cancelled => "refused",
            RequestState::Queued | RequestState::Held(_) => "waiting",
            RequestState::InReview => "in review",
            RequestState::Planning
            | RequestState::Staged
            | RequestState::Checking
            | RequestState::Landing
            | RequestState::Unknown => "in work",
        };
        for (name, number) in &mut counts {
            *number += u32::from(*name == word);
        }
    }
    let words: Vec<String> =
        counts.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{n} {name}")).collect();
    words.join(", ")
}

/// How a refused request is told: its state, and the first row or total that is wrong.
fn refusal(row: &RequestRow) -> String {
    let (first, more) = match text_of(row).split_once("; ") {
        Some((first, _)) => (first, "; ..."),
        None => (text_of(row), ""),
    };
    format!("{} is {}\n{first}{more}", row.source, row.state)
}

fn text_of(row: &RequestRow) -> &str {
    row.detail.as_ref().and_then(|detail| detail.get("text")).and_then(Value::as_str).unwrap_or_default()
}

fn what_next(named: &Path, refused: Option<&RequestRow>) -> String {
    let config = named.join(super::CONFIG_FILE);
    let config = config.display().to_string();
    let config = if config.contains(char::is_whitespace) { format!("'{config}'") } else { config };
    let program = std::env::args().next().unwrap_or_else(|| "mergeberg".to_owned());
    let mut lines = Vec::new();
    if let Some(row) = refused {
        lines.push((format!("request explain {}", row.id), "why it was refused, with rows and evidence"));
    }
    lines.push(("report daily --format markdown".to_owned(), "the same summary, to paste"));
    lines.push(("branch list --table nyc.flights".to_owned(), "which branches are left"));
    lines.push(("policy check".to_owned(), "which rules held for which branch"));
    let width = lines.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
    let mut text = String::from("\nTry next:\n\n");
    for (command, why) in lines {
        text.push_str(&format!("  {program} --config {config} {command:<width$}  # {why}\n"));
    }
    text
}
