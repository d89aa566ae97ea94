//! The demo's processes from outside: the worker, and the pipelines that take orders.
//!
//! Each gets a pipe as stdin and ends when it is closed, so that killing the demo in any way leaves no
//! process behind. What they say on stderr is in the folder's `logs`.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use mergeberg_kernel::ids::SnapshotId;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::Mutex;

use super::failed;
use super::folder::Folder;
use super::scenario::Pipeline;
use super::writers::{Order, Reply};
use crate::error::UserError;

/// How long a process may take to end once its stdin is closed; a landing under way is finished first.
const STOP_BOUND: Duration = Duration::from_secs(30);
/// How long one order may take.
const ORDER_BOUND: Duration = Duration::from_secs(120);
/// Chooses what processes log; every other variable of ours speaks of another queue.
const LOG_VARIABLE: &str = "MERGEBERG_LOG";

/// This program again, in the folder's configuration.
fn program(folder: &Folder, log: &Path, arguments: &[&str]) -> Result<Command, UserError> {
    let log = File::create(log).map_err(failed)?;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("MERGEBERG_") && name != LOG_VARIABLE) {
            command.env_remove(name);
        }
    }
    command
        .arg("--config")
        .arg(folder.config_file())
        .args(arguments)
        .stdin(Stdio::piped())
        .stderr(log)
        .kill_on_drop(true);
    Ok(command)
}

/// Runs a command to its end and gives what it said.
pub async fn command_output(folder: &Folder, arguments: &[&str]) -> Result<String, UserError> {
    let log = folder.log(arguments.first().unwrap_or(&"command"));
    let mut command = program(folder, &log, arguments)?;
    let output = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let output = output.wait_with_output().await.map_err(failed)?;
    if !output.status.success() {
        let words = arguments.join(" ");
        return Err(failed(format!("`{words}` failed ({}); see {}", output.status, log.display())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The shipped worker.
pub struct WorkerProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    log: PathBuf,
}

impl WorkerProcess {
    pub fn start(folder: &Folder, name: &str) -> Result<Self, UserError> {
        let log = folder.log(name);
        let mut command = program(folder, &log, &["worker", "--until-stdin-ends"])?;
        let mut child = command.stdout(Stdio::null()).spawn().map_err(failed)?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, log })
    }

    pub fn id(&self) -> String {
        self.child.id().map_or_else(|| "gone".to_owned(), |id| id.to_string())
    }

    /// A worker that ended by itself is told with its log.
    pub fn check(&mut self) -> Result<(), UserError> {
        match self.child.try_wait().map_err(failed)? {
            None => Ok(()),
            Some(status) => {
                Err(failed(format!("the worker ended by itself ({status}); see {}", self.log.display())))
            }
        }
    }

    /// As Ctrl-C: the landing under way is finished first.
    pub async fn stop(mut self) -> Result<(), UserError> {
        drop(self.stdin.take());
        match tokio::time::timeout(STOP_BOUND, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(failed(format!("the worker {status}; see {}", self.log.display()))),
            Ok(Err(error)) => Err(failed(error)),
            Err(_) => Err(failed(format!("the worker does not stop; see {}", self.log.display()))),
        }
    }
}

/// One pipeline's process. It obeys one order at a time.
struct PipelineHandle {
    _child: Child,
    stdin: ChildStdin,
    replies: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
}

/// All pipelines.
pub struct Pipelines {
    by_name: BTreeMap<Pipeline, Mutex<PipelineHandle>>,
}

impl Pipelines {
    pub fn start(folder: &Folder) -> Result<Self, UserError> {
        let mut by_name = BTreeMap::new();
        for pipeline in Pipeline::all() {
            let name = pipeline.name();
            let log = folder.log(&name);
            let mut command = program(folder, &log, &["demo-writer", &name])?;
            let mut child = command.stdout(Stdio::piped()).spawn().map_err(failed)?;
            let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
                return Err(failed("a pipeline has no pipes"));
            };
            let replies = BufReader::new(stdout).lines();
            by_name.insert(pipeline, Mutex::new(PipelineHandle { _child: child, stdin, replies, log }));
        }
        Ok(Self { by_name })
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub async fn order(&self, pipeline: Pipeline, order: &Order) -> Result<Reply, UserError> {
        let Some(handle) = self.by_name.get(&pipeline) else {
            return Err(failed(format!("there is no pipeline {}", pipeline.name())));
        };
        let mut handle = handle.lock().await;
        match tokio::time::timeout(ORDER_BOUND, handle.obey(order)).await {
            Ok(Ok(Reply::Failed { error })) => {
                Err(failed(format!("{}: {} [{}]", pipeline.name(), error.message, error.code)))
            }
            Ok(reply) => reply,
            Err(_) => {
                let log = handle.log.display();
                Err(failed(format!("{} does not answer to {order:?}; see {log}", pipeline.name())))
            }
        }
    }

    /// Writes a branch at a snapshot.
    pub async fn write(&self, pipeline: Pipeline, branch: &str, at: SnapshotId) -> Result<(), UserError> {
        self.order(pipeline, &Order::Write { branch: branch.to_owned(), at }).await.map(|_| ())
    }

    /// The request, and whether it is a new one.
    pub async fn enqueue(&self, pipeline: Pipeline, branch: &str) -> Result<(i64, bool), UserError> {
        match self.order(pipeline, &Order::Enqueue { branch: branch.to_owned() }).await? {
            Reply::Enqueued { request, new } => Ok((request, new)),
            other => Err(failed(format!("{branch} was enqueued and the answer was {other:?}"))),
        }
    }
}

impl PipelineHandle {
    async fn obey(&mut self, order: &Order) -> Result<Reply, UserError> {
        let mut line = serde_json::to_string(order).map_err(failed)?;
        line.push('\n');
        let sent = async {
            self.stdin.write_all(line.as_bytes()).await?;
            self.stdin.flush().await?;
            self.replies.next_line().await
        };
        match sent.await {
            Ok(Some(line)) => serde_json::from_str(&line).map_err(failed),
            Ok(None) => Err(failed(format!("a pipeline ended by itself; see {}", self.log.display()))),
            Err(error) => {
                Err(failed(format!("a pipeline cannot be reached ({error}); see {}", self.log.display())))
            }
        }
    }
}
