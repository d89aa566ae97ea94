//! What a pipeline's process does: it takes orders as JSON lines on stdin, works, and answers each with one
//! line on stdout. It ends when stdin ends, so that nothing is left when the demo is killed.
//!
//! A pipeline only knows what any other knows: the catalog, and the queue's enqueue. Its rows come from the
//! fixtures as if from its own engine; the recorded queries say the same in SQL.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use futures::TryStreamExt as _;
use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::RECORD_KEY;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::flights::{self, CARRIER_NAME, date};
use super::folder::{branch_writer, first_load, open_catalog};
use super::scenario::{
    AIRLINES, AIRPORTS, ARRIVALS_DAY, BY_HAND_ORIGIN, FAR_DAY, FLIGHTS, LOST_AIRPORTS, Pipeline, RAW_FLIGHTS,
    RECOMPUTED_DAYS, Step, TAIL_NUMBER_DAY, TWO_AIRPORTS_DAY, WIDENED, WRONG_DAY, Work, is_two_airports,
    loaded_days, shard_rows, steps,
};
use super::{failed, table_name};
use crate::cli::enqueue::{EnqueueArgs, EnqueueContext, enqueue};
use crate::config::{Config, PolicyFolder};
use crate::error::UserError;
use crate::ledger::{Enqueued, Ledger};
use crate::table::branch_writer::{BranchWrite, BranchWriteError, BranchWriter, Removal};
use crate::table::catalog::Catalog as _;
use crate::table::manifests::{FileScope, LiveFile};
use crate::table::scan::{RowReader, ScanCounters, live_rows};
use crate::table::sql_catalog::SqlCatalog;

/// Times that a direct commit to `main` is made again because the queue landed something meanwhile.
const MAX_DIRECT_TRIES: u32 = 50;

/// An order to a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Order {
    /// Create the branch at the snapshot and write the step's rows to it.
    Write { branch: String, at: SnapshotId },
    /// Enqueue the branch under its own name as idempotency key.
    Enqueue { branch: String },
    /// Put the recomputed days' files together, on `main`.
    Compact,
    /// Append flights to `main`, past the queue.
    CommitByHand,
    /// Remove the oldest days from the raw flights.
    TrimRaw,
    /// Give a column a wider type.
    Widen,
}

/// The answer to one order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "did")]
pub enum Reply {
    Written {
        snapshot: SnapshotId,
    },
    Enqueued {
        request: i64,
        new: bool,
    },
    /// The structure has another id now.
    Widened,
    Failed {
        error: UserErrorText,
    },
}

/// An error as it crosses the pipe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserErrorText {
    pub code: String,
    pub message: String,
}

/// The process: serves orders until stdin ends.
pub async fn serve(config: &Config, pipeline: &str) -> Result<(), UserError> {
    let pipeline = Pipeline::named(pipeline).ok_or_else(|| {
        UserError::new(ReasonCode::InvalidArgument, format!("the demo has no pipeline '{pipeline}'"))
    })?;
    let worker = PipelineProcess::open(config, pipeline).await?;
    while let Some(line) = next_line().await? {
        let order: Order = serde_json::from_str(&line).map_err(failed)?;
        let reply = match worker.obey(&order).await {
            Ok(reply) => reply,
            Err(error) => Reply::Failed {
                error: UserErrorText { code: error.code.to_string(), message: error.message },
            },
        };
        let text = serde_json::to_string(&reply).map_err(failed)?;
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(failed)?;
    }
    Ok(())
}

/// The next line of stdin; none when it has ended. Reading blocks, so it is no work for the runtime.
async fn next_line() -> Result<Option<String>, UserError> {
    let line = tokio::task::spawn_blocking(|| std::io::stdin().lines().next().transpose());
    line.await.map_err(failed)?.map_err(failed)
}

struct PipelineProcess {
    principal: Principal,
    catalog: Arc<SqlCatalog>,
    writer: BranchWriter,
    ledger: Ledger,
    policies: PolicyFolder,
    flights: TableName,
}

impl PipelineProcess {
    async fn open(config: &Config, pipeline: Pipeline) -> Result<Self, UserError> {
        let catalog = Arc::new(open_catalog(config).await?);
        Ok(Self {
            principal: Principal::new(pipeline.name()),
            writer: branch_writer(Arc::clone(&catalog) as Arc<_>),
            catalog,
            ledger: Ledger::open(&config.ledger).await?,
            policies: PolicyFolder::new(&config.policies),
            flights: table_name(FLIGHTS),
        })
    }

    async fn obey(&self, order: &Order) -> Result<Reply, UserError> {
        match order {
            Order::Write { branch, at } => {
                let step = steps().into_iter().find(|step| &step.branch == branch);
                let step = step.ok_or_else(|| failed(format!("there is no step {branch}")))?;
                Ok(Reply::Written { snapshot: self.write(&step, *at).await? })
            }
            Order::Enqueue { branch } => self.enqueue(branch).await,
            Order::Compact => Ok(Reply::Written { snapshot: self.compact().await? }),
            Order::CommitByHand => Ok(Reply::Written { snapshot: self.commit_by_hand().await? }),
            Order::TrimRaw => Ok(Reply::Written { snapshot: self.trim_raw().await? }),
            Order::Widen => {
                let (column, to) = WIDENED;
                self.catalog.promote_column(&self.flights, column, to).await?;
                Ok(Reply::Widened)
            }
        }
    }

    async fn write(&self, step: &Step, at: SnapshotId) -> Result<SnapshotId, UserError> {
        let branch = RefName::new(&step.branch);
        self.writer.create_branch(&self.flights, &branch, at).await?;
        let write = self.content(step, branch, at).await?;
        Ok(self.writer.write(&self.flights, write).await?)
    }

    async fn content(&self, step: &Step, branch: RefName, at: SnapshotId) -> Result<BranchWrite, UserError> {
        let append = |rows: RecordBatch| -> Result<BranchWrite, UserError> {
            Ok(BranchWrite {
                branch: branch.clone(),
                label: "append".to_owned(),
                rows: vec![flights::with_names(&rows)?],
                remove: Removal::Nothing,
                summary: BTreeMap::new(),
            })
        };
        let overwrite = |days: Vec<u32>, rows: Vec<RecordBatch>, record: serde_json::Value| {
            let rows = rows.iter().map(flights::with_names).collect::<Result<Vec<_>, UserError>>()?;
            Ok(BranchWrite {
                branch: branch.clone(),
                label: "overwrite".to_owned(),
                rows,
                remove: files_of(days),
                summary: BTreeMap::from([(RECORD_KEY.to_owned(), record.to_string())]),
            })
        };
        match step.work {
            Work::Shard { day, part } => {
                let all = flights::day(day)?;
                let (first, length) = shard_rows(all.num_rows(), part);
                append(all.slice(first, length))
            }
            Work::OtherAirport => append(flights::choose(&flights::day(TWO_AIRPORTS_DAY)?, |flight| {
                is_two_airports(flight) && flight.origin != BY_HAND_ORIGIN
            })?),
            Work::FarFlights => {
                append(flights::choose(&flights::day(FAR_DAY)?, |flight| flight.dest == "HNL")?)
            }
            Work::Recompute { day } => {
                let wrong = day == WRONG_DAY;
                let rows = flights::choose(&flights::day(day)?, |flight| {
                    !wrong || !LOST_AIRPORTS.contains(&flight.dest)
                })?;
                let lost = if wrong { "JOIN airports p ON f.dest = p.faa " } else { "" };
                let filter = format!("flight_date = DATE '{}'", date(day));
                let mut inputs = vec![("raw", RAW_FLIGHTS), ("airlines", AIRLINES)];
                if wrong {
                    inputs.push(("airports", AIRPORTS));
                }
                let record = json!({
                    "v": 1, "id": step.branch, "op": "overwrite-where", "where": filter,
                    "query": format!(
                        "SELECT f.*, a.name AS {CARRIER_NAME} FROM raw f \
                         LEFT JOIN airlines a ON f.carrier = a.carrier {lost}WHERE f.{filter}"
                    ),
                    "inputs": self.pinned(&inputs).await?,
                    "expect": { "rows": rows.num_rows() },
                });
                overwrite(vec![day], vec![rows], record)
            }
            Work::TailNumber => {
                let filter = format!("flight_date = DATE '{}' AND carrier = 'HA'", date(TAIL_NUMBER_DAY));
                let record = json!({
                    "v": 1, "id": step.branch, "op": "overwrite-where", "where": filter,
                    "query": format!(
                        "SELECT f.*, a.name AS {CARRIER_NAME} FROM raw f \
                         JOIN airlines a ON f.carrier = a.carrier \
                         WHERE f.flight_date = DATE '{}' AND f.carrier = 'HA'", date(TAIL_NUMBER_DAY)
                    ),
                    "inputs": self.pinned(&[("raw", RAW_FLIGHTS), ("airlines", AIRLINES)]).await?,
                });
                overwrite(vec![TAIL_NUMBER_DAY], vec![flights::day(TAIL_NUMBER_DAY)?], record)
            }
            Work::Arrivals => {
                let record = json!({ "v": 1, "id": step.branch, "op": "replace-partitions" });
                overwrite(vec![ARRIVALS_DAY], vec![flights::day(ARRIVALS_DAY)?], record)
            }
            Work::AirlineNames => {
                let columns: Vec<String> = flights::day(TWO_AIRPORTS_DAY)?
                    .schema()
                    .fields()
                    .iter()
                    .map(|field| format!("t.{}", field.name()))
                    .collect();
                let record = json!({
                    "v": 1, "id": step.branch, "op": "overwrite-where",
                    "where": format!("flight_date >= DATE '{}'", date(flights::FIRST_DAY)),
                    "query": format!(
                        "SELECT {}, a.name AS {CARRIER_NAME} FROM target t \
                         LEFT JOIN airlines a ON t.carrier = a.carrier",
                        columns.join(", ")
                    ),
                    "inputs": self.pinned(&[("airlines", AIRLINES)]).await?,
                });
                let rows = loaded_days().map(first_load).collect::<Result<Vec<_>, _>>()?;
                overwrite(loaded_days().collect(), rows, record)
            }
            Work::Compaction { day } => self.compaction(branch, at, vec![day]).await,
        }
    }

    /// Inputs by alias, each pinned at its head of now.
    async fn pinned(&self, inputs: &[(&str, &str)]) -> Result<serde_json::Value, UserError> {
        let mut pinned = serde_json::Map::new();
        for (alias, name) in inputs {
            let table = table_name(name);
            let head = self.catalog.load(&table).await?.facts.head(&RefName::main());
            let head = head.ok_or_else(|| failed(format!("{table} is empty")))?;
            pinned.insert((*alias).to_owned(), json!({ "table": table, "snapshot-id": head }));
        }
        Ok(pinned.into())
    }

    async fn enqueue(&self, branch: &str) -> Result<Reply, UserError> {
        let policies = self.policies.read()?;
        let context = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: (self.writer.clock)(),
        };
        let args = EnqueueArgs {
            table: self.flights.clone(),
            source: RefName::new(branch),
            target: RefName::main(),
            snapshot: None,
            class: None,
            idempotency_key: Some(branch.to_owned()),
            principal: self.principal.clone(),
        };
        match enqueue(context, &args).await? {
            Enqueued::New(row) => Ok(Reply::Enqueued { request: row.id.0, new: true }),
            Enqueued::Existing(row) => Ok(Reply::Enqueued { request: row.id.0, new: false }),
            Enqueued::KeyConflict(row) => Err(failed(format!("the key is taken by request {}", row.id))),
        }
    }

    /// Rows of a snapshot as they are, files fewer: each day's files become one.
    async fn compaction(
        &self,
        branch: RefName,
        at: SnapshotId,
        days: Vec<u32>,
    ) -> Result<BranchWrite, UserError> {
        let names: BTreeSet<String> = days.iter().copied().map(date).collect();
        let table = self.catalog.load(&self.flights).await?;
        let snapshot = table.facts.snapshots.get(at).ok_or_else(|| failed("the snapshot is gone"))?;
        let live = self.writer.store.live_files(&table, snapshot, &FileScope::Table).await?;
        let reader = RowReader::new(&table, table.facts.current_schema_id)?;
        let all: Vec<usize> = (0..reader.arrow_schema().fields().len()).collect();
        let counters = Arc::new(ScanCounters::default());
        let mut rows = Vec::new();
        for file in live_rows(live)?.iter().filter(|file| lies_in(&file.file, &names)) {
            let batches = reader.read(file, &all, &counters)?;
            rows.extend(batches.try_collect::<Vec<_>>().await?);
        }
        Ok(BranchWrite {
            branch,
            label: "replace".to_owned(),
            rows,
            remove: files_of(days),
            summary: BTreeMap::new(),
        })
    }

    /// The recomputed days on `main`, past the queue.
    async fn compact(&self) -> Result<SnapshotId, UserError> {
        for _ in 0..MAX_DIRECT_TRIES {
            let table = self.catalog.load(&self.flights).await?;
            let head = table.facts.head(&RefName::main()).ok_or_else(|| failed("main is gone"))?;
            let write = self.compaction(RefName::main(), head, RECOMPUTED_DAYS.to_vec()).await?;
            // What was read must still be what is replaced.
            match self.writer.write_from(&self.flights, head, write).await {
                Err(BranchWriteError::Moved(_)) => {}
                done => return Ok(done?),
            }
        }
        Err(failed("main moves without a pause; the compaction was given up"))
    }

    async fn commit_by_hand(&self) -> Result<SnapshotId, UserError> {
        let rows = flights::choose(&flights::day(TWO_AIRPORTS_DAY)?, |flight| {
            is_two_airports(flight) && flight.origin == BY_HAND_ORIGIN
        })?;
        let rows = flights::with_names(&rows)?;
        for _ in 0..MAX_DIRECT_TRIES {
            let write = BranchWrite {
                branch: RefName::main(),
                label: "append".to_owned(),
                rows: vec![rows.clone()],
                remove: Removal::Nothing,
                summary: BTreeMap::new(),
            };
            match self.writer.write(&self.flights, write).await {
                Err(BranchWriteError::Moved(_)) => {}
                done => return Ok(done?),
            }
        }
        Err(failed("main moves without a pause; the commit was given up"))
    }

    async fn trim_raw(&self) -> Result<SnapshotId, UserError> {
        let write = BranchWrite {
            branch: RefName::main(),
            label: "delete".to_owned(),
            rows: Vec::new(),
            remove: files_of(RECOMPUTED_DAYS.to_vec()),
            summary: BTreeMap::new(),
        };
        Ok(self.writer.write(&table_name(RAW_FLIGHTS), write).await?)
    }
}

/// Every file of these days.
fn files_of(days: Vec<u32>) -> Removal {
    let days: BTreeSet<String> = days.into_iter().map(date).collect();
    Removal::Files(Box::new(move |file| lies_in(file, &days)))
}

fn lies_in(file: &LiveFile, days: &BTreeSet<String>) -> bool {
    file.fact.partition.fields.iter().any(|field| field.value.as_ref().is_some_and(|v| days.contains(v)))
}
