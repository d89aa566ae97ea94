//! `worker`: the process that lands. Logs go to stderr, one line an event; stdout says how it ended.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;
use tokio::sync::watch;

use super::answer::Answer;
use super::context::Context;
use super::request::OPEN_WORDS;
use crate::config::PolicyFolder;
use crate::error::UserError;
use crate::external::{Surroundings, VARIABLE_PREFIX};
use crate::ledger::RequestFilter;
use crate::report::text::count;
use crate::table::catalog::Capability;
use crate::validate::Engine;
use crate::worker::context::{Random, Worker};
use crate::worker::error::WorkerError;
use crate::worker::run::{Ended, RunOptions};

/// Land what is in the queue; Ctrl-C lets a landing under way finish.
#[derive(Debug, clap::Args)]
pub struct WorkerArgs {
    /// End when nothing more can be done now.
    #[arg(long)]
    pub drain: bool,
    /// Stop, as for Ctrl-C, when stdin ends: for a parent process, whose death is noticed as well.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

pub async fn run(context: &Context, args: &WorkerArgs) -> Result<Answer, UserError> {
    log_to_stderr();
    let worker = open(context).await?;
    let (stop, stopped) = watch::channel(false);
    let until_stdin_ends = args.until_stdin_ends;
    let signals = tokio::spawn(async move {
        let asked = tokio::select! {
            asked = stop_asked() => asked,
            () = stdin_ended(until_stdin_ends) => true,
        };
        if asked {
            tracing::info!("stopping; a landing under way is finished first");
            // Nobody listens any more when the worker has ended by itself.
            let _ = stop.send(true);
        }
    });
    let ended = worker.run(options(context, args.drain), stopped).await;
    signals.abort();
    let open = RequestFilter {
        states: OPEN_WORDS.iter().map(|word| (*word).to_owned()).collect(),
        ..RequestFilter::default()
    };
    let (word, text) = match ended.map_err(of_worker)? {
        Ended::Drained => match context.ledger().await?.requests(&open).await?.len() as u64 {
            0 => ("drained", "Nothing is left to do.".to_owned()),
            n => {
                let what = count(n, "request");
                (
                    "drained",
                    format!("Nothing more can be done now; still open (`request list --open`): {what}."),
                )
            }
        },
        Ended::Stopped => ("stopped", "Stopped.".to_owned()),
        Ended::Deposed => ("deposed", "Another worker leads now; this one stopped.".to_owned()),
    };
    Ok(Answer::new(text, json!({ "ended": word })))
}

/// A worker over the configured catalog, ledger and policies.
pub async fn open(context: &Context) -> Result<Worker, UserError> {
    let catalog = Arc::clone(context.catalog().await?);
    let ledger = context.ledger().await?.clone();
    for (word, able) in ledger.capabilities(catalog.name()).await? {
        // Rule S4: what `doctor` found missing is not relied upon.
        if let Some(missing) = Capability::from_word(&word).filter(|_| !able) {
            catalog.distrust(missing);
        }
    }
    let engine = Engine::start().map_err(|e| UserError::new(ReasonCode::Internal, e.to_string()))?;
    let random: Random = Arc::new(rand::random::<u64>);
    let holder = format!("{}-{:016x}", std::process::id(), random());
    let mut worker = Worker::new(
        catalog,
        ledger,
        Arc::new(engine),
        PolicyFolder::new(context.policies.path()),
        context.clock.clone(),
        random,
        holder,
    );
    worker.checkpoint_every =
        Duration::from_millis(u64::try_from(context.config.worker.checkpoint.ms).unwrap_or(1));
    Ok(worker.with_surroundings(surroundings(context)?))
}

/// Pipelines' own commands run in the folder of `mergeberg.toml` and are told which catalog this queue serves.
fn surroundings(context: &Context) -> Result<Surroundings, UserError> {
    let told = context.config.catalog(None)?.told();
    let folder = context.config.file.parent().unwrap_or(Path::new(".")).to_owned();
    let name = |key: &str| format!("{VARIABLE_PREFIX}CATALOG_{key}");
    Ok(Surroundings { folder, variables: told.into_iter().map(|(key, value)| (name(key), value)).collect() })
}

pub fn of_worker(error: WorkerError) -> UserError {
    match error {
        WorkerError::Ledger(error) => error.into(),
        WorkerError::Catalog(error) => error.into(),
        WorkerError::Config(error) => error.into(),
        WorkerError::Table(error) => UserError::new(error.reason(), error.to_string()),
        // Never the end of a worker: it ends as stopped.
        error @ WorkerError::Stopping => UserError::new(ReasonCode::Internal, error.to_string()),
        WorkerError::Bug(text) => UserError::new(ReasonCode::Internal, text),
    }
}

fn options(context: &Context, drain: bool) -> RunOptions {
    let poll = u64::try_from(context.config.worker.poll.ms).unwrap_or(1);
    RunOptions { drain, poll: Duration::from_millis(poll), lease_ms: context.config.worker.lease.ms }
}

/// Ctrl-C, or the signal by which service managers stop a process.
async fn stop_asked() -> bool {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => tokio::select! {
                pressed = tokio::signal::ctrl_c() => pressed.is_ok(),
                received = terminate.recv() => received.is_some(),
            },
            Err(_) => tokio::signal::ctrl_c().await.is_ok(),
        }
    }
    #[cfg(not(unix))]
    {
        tokio::signal::ctrl_c().await.is_ok()
    }
}

/// Never, when nobody wants to know.
async fn stdin_ended(wanted: bool) {
    let (ended, end) = tokio::sync::oneshot::channel();
    if wanted {
        // A thread of its own, not the runtime's: a read that never returns must not hold up the exit.
        std::thread::spawn(move || {
            // Whatever is written there is of no interest; an error is an end.
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            let _ = ended.send(());
        });
        let _ = end.await;
        return;
    }
    std::future::pending::<()>().await;
}

/// `MERGEBERG_LOG` chooses what is logged, in the form of `RUST_LOG` (`info`, `mergeberg=debug`).
fn log_to_stderr() {
    use tracing_subscriber::EnvFilter;
    let filter =
        EnvFilter::try_from_env("MERGEBERG_LOG").unwrap_or_else(|_| EnvFilter::new("mergeberg=info"));
    // Set already only when a test runs two commands in one process.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(super::answer::wants_colour())
        .with_target(false)
        .try_init();
}
