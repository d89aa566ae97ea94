//! `request enqueue|list|show|explain|cancel|wait`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use mergeberg_kernel::ids::{Principal, RefName, RequestId, SnapshotId, TableName};
use mergeberg_kernel::policy::Duration;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;
use serde::Serialize;

use super::answer::Answer;
use super::context::{Context, principal};
use super::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use super::enqueue_set::{PartArgs, SetArgs, enqueue_set};
use super::revert::command::RevertCommand;
use super::set_file::SetFile;
use super::sets::{self, PartShown};
use super::staged::{Staged, StagedArgs, enqueue_staged};
use super::{explain, parse_ref, revert, wait};
use crate::error::UserError;
use crate::ledger::{Enqueued, InSet, Ledger, ReplayRow, RequestFilter, RequestRow, Reverts};
use crate::report::text::{Columns, NONE, duration, key_values, moment, one_line};
use crate::worker::own_sources::kind_of;

/// Rows of `request list` without `--limit`.
const LIST_ROWS: u32 = 100;

#[derive(Debug, Subcommand)]
pub enum RequestCommand {
    /// Put a branch or a bare staged snapshot into the queue.
    Enqueue(EnqueueCommand),
    /// List requests, in arrival order.
    List(ListArgs),
    /// Show one request.
    Show(IdArgs),
    /// Why a request is where it is: reason, witnesses, evidence, position, history.
    Explain(IdArgs),
    /// Take back what a landed request published, as a request of its own.
    Revert(RevertCommand),
    /// Take a waiting request back.
    Cancel(CancelArgs),
    /// Wait until a request has ended; the exit code says how.
    Wait(WaitArgs),
}

#[derive(Debug, Args)]
pub struct EnqueueCommand {
    /// Namespace and name, such as nyc.flights. Several tables are one set, each with its branch of that name: all
    /// of them land, or none.
    #[arg(long, required_unless_present = "set")]
    pub table: Vec<TableName>,
    #[command(flatten)]
    pub what: What,
    /// The branch to merge into.
    #[arg(long, default_value = "main", value_parser = parse_ref)]
    pub target: RefName,
    /// Publish the branch up to this snapshot instead of its head.
    #[arg(long, value_name = "ID", conflicts_with_all = ["staged_snapshot", "wap_id"])]
    pub snapshot: Option<i64>,
    /// Class of the policy; by the branch's prefix when left out (mergeberg/staged/ for a staged snapshot).
    #[arg(long)]
    pub class: Option<String>,
    /// Idempotency key: enqueuing again with the same key gives the same request.
    #[arg(long)]
    pub key: Option<String>,
    /// Who enqueues [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
    /// Wait until it has ended.
    #[arg(long)]
    pub wait: bool,
    /// With --wait: give up after this long, such as 30s or 10m [default: never].
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "wait")]
    pub timeout: Option<Duration>,
}

/// What is to be merged: one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct What {
    /// The branch to merge, by its exact name.
    #[arg(long, value_parser = parse_ref)]
    pub source: Option<RefName>,
    /// A snapshot that was committed without a branch (write-audit-publish).
    #[arg(long, value_name = "ID")]
    pub staged_snapshot: Option<i64>,
    /// The snapshot that was staged under this WAP id.
    #[arg(long, value_name = "ID")]
    pub wap_id: Option<String>,
    /// A file that names several tables, each with its branch: all of them land, or none.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["table", "target", "snapshot", "class"])]
    pub set: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only requests that have not ended.
    #[arg(long)]
    pub open: bool,
    /// Only these states (queued, held, landed, refused, ...).
    #[arg(long, value_name = "STATE", conflicts_with = "open")]
    pub state: Vec<String>,
    /// Only requests of this table.
    #[arg(long)]
    pub table: Option<TableName>,
    /// Only requests into this branch.
    #[arg(long, value_parser = parse_ref)]
    pub target: Option<RefName>,
    /// Only requests of this class.
    #[arg(long)]
    pub class: Option<String>,
    /// The newest so many.
    #[arg(long, default_value_t = LIST_ROWS, value_name = "ROWS", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: u32,
}

#[derive(Debug, Args)]
pub struct IdArgs {
    /// Id of the request.
    pub id: i64,
}

#[derive(Debug, Args)]
pub struct CancelArgs {
    /// Id of the request.
    pub id: i64,
    /// Who cancels [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Id of the request.
    pub id: i64,
    /// Give up after this long, such as 30s or 10m [default: never].
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
}

pub async fn run(context: &Context, command: RequestCommand) -> Result<Answer, UserError> {
    match command {
        RequestCommand::Enqueue(args) => run_enqueue(context, args).await,
        RequestCommand::List(args) => list(context, args).await,
        RequestCommand::Show(IdArgs { id }) => {
            let ledger = context.ledger().await?;
            let shown = Shown::of(ledger, ledger.request(RequestId(id)).await?).await?;
            Ok(Answer::new(shown.render(), shown))
        }
        RequestCommand::Explain(IdArgs { id }) => {
            explain::explain(context.ledger().await?, RequestId(id), context.now_ms()).await
        }
        RequestCommand::Revert(args) => revert::command::run(context, args).await,
        RequestCommand::Cancel(CancelArgs { id, principal: named }) => {
            let principal = principal(named, |name| std::env::var(name).ok());
            let ledger = context.ledger().await?;
            let row = ledger.cancel(RequestId(id), &principal, context.now_ms()).await?;
            if let Some(set) = row.set {
                let text =
                    format!("set {} is cancelled, all {} parts; the branches are kept\n", set.id, set.parts);
                return Ok(Answer::new(text, row));
            }
            let branch = if kind_of(ledger.queue_id(), &row.source).is_own() {
                "is the queue's own, which lets go of it"
            } else {
                "is kept"
            };
            Ok(Answer::new(format!("request {id} is cancelled; branch '{}' {branch}\n", row.source), row))
        }
        RequestCommand::Wait(WaitArgs { id, timeout }) => {
            wait::wait(context.ledger().await?, RequestId(id), timeout).await
        }
    }
}

async fn run_enqueue(context: &Context, args: EnqueueCommand) -> Result<Answer, UserError> {
    let EnqueueCommand {
        table,
        what,
        target,
        snapshot,
        class,
        key: idempotency_key,
        principal: named,
        wait: waits,
        timeout,
    } = args;
    let principal = principal(named, |name| std::env::var(name).ok());
    let policies = context.policies.read()?;
    let ledger = context.ledger().await?;
    let enqueue_context = EnqueueContext {
        catalog: context.catalog().await?.as_ref(),
        ledger,
        policies: &policies,
        now_ms: context.now_ms(),
    };
    if what.set.is_some() || table.len() > 1 {
        let args = set_of(table, what, target, snapshot, class, idempotency_key, principal)?;
        let enqueued = enqueue_set(enqueue_context, &args).await?;
        return sets::answer_enqueued(ledger, enqueued, waits, timeout).await;
    }
    let Some(table) = table.into_iter().next() else {
        // Told by the command line itself.
        return Err(UserError::new(ReasonCode::InvalidArgument, "no table was named"));
    };
    let staged = match &what {
        What { staged_snapshot: Some(id), .. } => Some(Staged::Snapshot(SnapshotId(*id))),
        What { wap_id: Some(wap), .. } => Some(Staged::Wap(wap.clone())),
        What { .. } => None,
    };
    let enqueued = match (staged, what.source) {
        (Some(staged), _) => {
            let args = StagedArgs { table, staged, target, class, idempotency_key, principal };
            enqueue_staged(enqueue_context, &args).await?
        }
        (None, Some(source)) => {
            let snapshot = snapshot.map(SnapshotId);
            let args = EnqueueArgs { table, source, target, snapshot, class, idempotency_key, principal };
            enqueue(enqueue_context, &args).await?
        }
        (None, None) => {
            // Told by the command line itself.
            return Err(UserError::new(
                ReasonCode::InvalidArgument,
                "nothing was named that is to be merged",
            ));
        }
    };
    answer_enqueued(ledger, enqueued, waits, timeout).await
}

/// The set that a file, or several tables with one branch name, make.
fn set_of(
    tables: Vec<TableName>,
    what: What,
    target: RefName,
    snapshot: Option<i64>,
    class: Option<String>,
    key: Option<String>,
    principal: Principal,
) -> Result<SetArgs, UserError> {
    if let Some(path) = &what.set {
        let file = SetFile::read(path)?;
        let idempotency_key = key.or_else(|| file.key.clone());
        return Ok(SetArgs { parts: file.parts(), idempotency_key, principal });
    }
    let Some(source) = what.source.filter(|_| snapshot.is_none()) else {
        return Err(UserError::new(ReasonCode::SetInvalid, "several tables go together by a branch of each")
            .with_next("give the branch that all of them have (`--source`), or a file (`--set`)"));
    };
    let parts = tables.into_iter().map(|table| PartArgs {
        table,
        source: source.clone(),
        target: target.clone(),
        snapshot: None,
        class: class.clone(),
    });
    Ok(SetArgs { parts: parts.collect(), idempotency_key: key, principal })
}

/// What was enqueued, or how it ended.
pub(super) async fn answer_enqueued(
    ledger: &Ledger,
    enqueued: Enqueued,
    waits: bool,
    timeout: Option<Duration>,
) -> Result<Answer, UserError> {
    let (new, row) = match enqueued {
        Enqueued::New(row) => (true, row),
        Enqueued::Existing(row) => (false, row),
        Enqueued::KeyConflict(row) => {
            // Told as an error by whoever enqueued.
            return Err(UserError::new(
                ReasonCode::KeyConflict,
                format!("the key belongs to request {}", row.id),
            ));
        }
    };
    if waits {
        return wait::wait(ledger, row.id, timeout).await;
    }
    let word = if new { "enqueued" } else { "there already" };
    let of_set = row.set.map_or(String::new(), |set| format!(", a part of set {}", set.id));
    let text = format!(
        "request {} {word}: '{}' at {} -> '{}' of {} (class {}){of_set}, {}\n",
        row.id, row.source, row.pinned, row.target, row.table, row.class, row.state
    );
    Ok(Answer::new(text, serde_json::json!({ "new": new, "request": row })))
}

async fn list(context: &Context, args: ListArgs) -> Result<Answer, UserError> {
    let ListArgs { open, state, table, target, class, limit } = args;
    let states = if open { OPEN_WORDS.iter().map(|word| (*word).to_owned()).collect() } else { state };
    let filter = RequestFilter { states, table, target, class, ended_between: None, limit: Some(limit) };
    let rows = context.ledger().await?.requests(&filter).await?;
    let mut text = render_list(&rows, context.now_ms());
    if rows.len() as u64 == u64::from(limit) {
        text.push_str(&format!("\nthe newest {limit}; --limit shows more\n"));
    }
    Ok(Answer::new(text, rows))
}

/// Words of the states that are not final.
pub const OPEN_WORDS: [&str; 8] =
    ["queued", "held", "planning", "staged", "checking", "landing", "unknown", "in-review"];

fn render_list(rows: &[RequestRow], now_ms: i64) -> String {
    if rows.is_empty() {
        return "no requests\n".to_owned();
    }
    // Most queues have none.
    let with_sets = rows.iter().any(|row| row.set.is_some());
    let mut names = vec!["id>", "state", "class", "table", "source", "target", "classification", "age>"];
    if with_sets {
        names.insert(1, "set>");
    }
    let mut columns = Columns::new(&names);
    for row in rows {
        // How long it took, or has been taking.
        let age_ms = row.ended_at_ms.unwrap_or(now_ms) - row.enqueued_at_ms;
        let mut cells = vec![
            row.id.to_string(),
            row.state.to_string(),
            row.class.clone(),
            row.table.to_string(),
            row.source.to_string(),
            row.target.to_string(),
            row.classification.clone().unwrap_or_else(|| NONE.to_owned()),
            duration(age_ms),
        ];
        if with_sets {
            cells.insert(1, row.set.map_or_else(|| NONE.to_owned(), |set| set.id.to_string()));
        }
        columns.push(cells);
    }
    columns.render()
}

/// A request with what took it back.
#[derive(Debug, Serialize)]
pub struct Shown {
    #[serde(flatten)]
    pub request: RequestRow,
    pub reverted_by: Vec<RevertedBy>,
    /// All parts of its set, its own among them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartShown>,
    /// How far its operation has got that is run again, or had got the last time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replay: Option<ReplayRow>,
}

/// A request that takes this one back.
#[derive(Debug, Serialize)]
pub struct RevertedBy {
    pub request: RequestId,
    pub state: RequestState,
}

impl Shown {
    pub async fn of(ledger: &Ledger, request: RequestRow) -> Result<Self, UserError> {
        let reverts = ledger.reverts_of(request.id).await?;
        let reverted_by =
            reverts.iter().map(|row| RevertedBy { request: row.id, state: row.state }).collect();
        let parts = sets::parts(ledger, &request).await?;
        let replay = ledger.replay_of(request.id).await?;
        Ok(Self { request, reverted_by, parts, replay })
    }

    pub fn render(&self) -> String {
        let mut text = render_row(&self.request);
        let names: Vec<String> =
            self.reverted_by.iter().map(|by| format!("request {} ({})", by.request, by.state)).collect();
        if !names.is_empty() {
            // As wide as the keys above it.
            text.push_str(&format!("{:<14}  {}\n", "reverted by", names.join(", ")));
        }
        if let Some(replay) = &self.replay {
            text.push_str(&format!("{:<14}  {}\n", "run again", replay_line(&self.request, replay)));
        }
        text.push_str(&sets::render(&self.request, &self.parts));
        text
    }
}

/// How far an operation has got that is run again.
pub fn replay_line(request: &RequestRow, replay: &ReplayRow) -> String {
    let ReplayRow {
        request: _,
        train,
        started_at_ms,
        at_ms,
        rows_to_read,
        rows_read,
        rows_written,
        files_written,
        checkpoints,
        last_checkpoint_ms,
    } = replay;
    let runs = request.state == RequestState::Planning && request.train.as_ref() == Some(train);
    let word = if runs { "now" } else { "the last time" };
    let took = duration((at_ms - started_at_ms).max(0));
    let mut text = format!(
        "{word}, since {} for {took}: {rows_read} rows read of about {rows_to_read}, {rows_written} written to \
         {files_written} file(s)",
        moment(*started_at_ms)
    );
    if let Some(at_ms) = last_checkpoint_ms {
        text.push_str(&format!(", {checkpoints} checkpoint(s), the last one {}", moment(*at_ms)));
    }
    text
}

/// Every column of the live row.
pub fn render_row(row: &RequestRow) -> String {
    let RequestRow {
        id,
        table,
        table_uuid,
        source,
        pinned,
        target,
        class,
        principal,
        idempotency_key,
        structure,
        format_version: _,
        reverts,
        set,
        state,
        classification,
        enqueued_at_ms,
        admitted_at_ms,
        ended_at_ms,
        attempts,
        train,
        landed_snapshot,
        detail: _,
    } = row;
    let or_none = |value: Option<String>| value.unwrap_or_else(|| NONE.to_owned());
    let mut lines = vec![
        ("request", id.to_string()),
        ("state", state.to_string()),
        ("table", format!("{table}  ({table_uuid})")),
        ("source", format!("{source} at {pinned}")),
        ("target", target.to_string()),
        ("class", class.clone()),
        ("classification", or_none(classification.clone())),
        ("principal", principal.to_string()),
        ("key", or_none(idempotency_key.clone())),
        (
            "structure",
            format!(
                "schema {}, spec {}, sort order {}",
                structure.schema_id, structure.spec_id, structure.sort_order_id
            ),
        ),
        ("enqueued", moment(*enqueued_at_ms)),
        ("admitted", or_none(admitted_at_ms.map(moment))),
        ("ended", or_none(ended_at_ms.map(moment))),
        ("attempts", attempts.to_string()),
        ("train", or_none(train.as_ref().map(ToString::to_string))),
        ("landed as", or_none(landed_snapshot.map(|id| id.to_string()))),
    ];
    if let Some(Reverts { request, reason }) = reverts {
        let reason = reason.as_ref().map_or(String::new(), |reason| format!(": {}", one_line(reason)));
        lines.push(("reverts", format!("request {request}{reason}")));
    }
    if let Some(InSet { id, parts }) = set {
        lines.push(("set", format!("{id}, {parts} tables")));
    }
    key_values(&lines)
}

/// One line on how a request ended, or where it is.
pub fn end_line(row: &RequestRow) -> String {
    let what = format!("request {} ('{}' -> '{}' of {})", row.id, row.source, row.target, row.table);
    match row.state {
        RequestState::Landed => match row.landed_snapshot {
            Some(id) => format!("{what} landed as snapshot {id}"),
            None => format!("{what} landed"),
        },
        RequestState::AlreadyPublished => format!("{what} was published before; nothing was to do"),
        RequestState::Refused(code) => format!("{what} was refused: {code}. {}", code.meaning()),
        RequestState::Withdrawn(code) => format!("{what} was withdrawn: {code}. {}", code.meaning()),
        RequestState::Cancelled => format!("{what} was cancelled"),
        RequestState::Queued
        | RequestState::Held(_)
        | RequestState::Planning
        | RequestState::Staged
        | RequestState::Checking
        | RequestState::Landing
        | RequestState::Unknown
        | RequestState::InReview => format!("{what} is {}", row.state),
    }
}

pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    Duration::try_from(text.to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use mergeberg_kernel::ids::{Principal, SchemaId, SortOrderId, SpecId, TableUuid};
    use mergeberg_kernel::structure::StructureId;

    use super::super::testing::START_MS;
    use super::*;
    use crate::ledger::NewRequest;

    pub fn new_request(source: &str) -> NewRequest {
        let RequestRow { table, table_uuid, source, pinned, target, class, principal, structure, .. } =
            row(0, source, RequestState::Queued);
        NewRequest {
            table,
            table_uuid,
            source,
            pinned,
            target,
            class,
            principal,
            idempotency_key: None,
            structure,
            format_version: 2,
        }
    }

    pub fn row(id: i64, source: &str, state: RequestState) -> RequestRow {
        RequestRow {
            id: RequestId(id),
            table: "nyc.flights".parse().unwrap(),
            table_uuid: TableUuid::new("9c12d441"),
            source: RefName::new(source),
            pinned: SnapshotId(30),
            target: RefName::main(),
            class: "ingest".to_owned(),
            principal: Principal::new("ann"),
            idempotency_key: None,
            structure: StructureId {
                schema_id: SchemaId(0),
                spec_id: SpecId(0),
                sort_order_id: SortOrderId(0),
            },
            format_version: 2,
            reverts: None,
            set: None,
            state,
            classification: None,
            enqueued_at_ms: START_MS,
            admitted_at_ms: None,
            ended_at_ms: state.is_final().then_some(START_MS + 1_500),
            attempts: 0,
            train: None,
            landed_snapshot: (state == RequestState::Landed).then_some(SnapshotId(41)),
            detail: None,
        }
    }

    #[test]
    fn the_list_is_aligned() {
        let rows = [
            RequestRow {
                classification: Some("cherry-pick".to_owned()),
                ..row(9, "ingest/a", RequestState::Landed)
            },
            row(10, "ingest/shard-07", RequestState::Held(ReasonCode::OverlapsAhead)),
        ];
        assert_eq!(
            render_list(&rows, START_MS + 65_000),
            "\
id  state                 class   table        source           target  classification         age
 9  landed                ingest  nyc.flights  ingest/a         main    cherry-pick          1.5 s
10  held(overlaps-ahead)  ingest  nyc.flights  ingest/shard-07  main    -               1 min 05 s
"
        );
        assert_eq!(render_list(&[], 0), "no requests\n");
    }

    #[test]
    fn one_request_is_shown_with_its_keys_in_a_column() {
        assert_eq!(
            render_row(&row(9, "ingest/a", RequestState::Landed)),
            "\
request         9
state           landed
table           nyc.flights  (9c12d441)
source          ingest/a at 30
target          main
class           ingest
classification  -
principal       ann
key             -
structure       schema 0, spec 0, sort order 0
enqueued        2013-08-20T04:00:00Z
admitted        -
ended           2013-08-20T04:00:01Z
attempts        0
train           -
landed as       41
"
        );
    }

    #[test]
    fn ends_are_told_in_one_line() {
        let line = |state| end_line(&row(9, "ingest/a", state));
        assert_eq!(
            line(RequestState::Landed),
            "request 9 ('ingest/a' -> 'main' of nyc.flights) landed as snapshot 41"
        );
        assert_eq!(
            line(RequestState::Refused(ReasonCode::DuplicateKey)),
            "request 9 ('ingest/a' -> 'main' of nyc.flights) was refused: duplicate-key. The key would be \
             there more than once."
        );
    }

    #[test]
    fn the_open_states_are_exactly_those_that_are_not_final() {
        let reason = ReasonCode::Paused;
        for word in ["landed", "already-published", "refused", "withdrawn", "cancelled"] {
            assert!(!OPEN_WORDS.contains(&word));
        }
        for word in OPEN_WORDS {
            let state = RequestState::from_parts(word, None).or(RequestState::from_parts(word, Some(reason)));
            assert!(!state.unwrap().is_final(), "{word}");
        }
    }
}
