//! The command line: noun, then verb. Wiring only: a command resolves names, asks ledger and catalog, and
//! gives back an [`Answer`]. `docs/cli.md` describes every command.

mod answer;
mod branch;
mod context;
pub mod demo;
#[cfg(test)]
mod docs;
pub mod doctor;
pub mod enqueue;
pub mod enqueue_set;
mod exit;
mod explain;
mod external;
#[cfg(test)]
mod flow_tests;
pub(crate) mod init;
pub mod operation;
mod plan;
mod policy;
pub mod report;
mod request;
pub mod revert;
mod review;
mod set_file;
mod sets;
pub mod staged;
mod target;
#[cfg(test)]
pub(crate) mod testing;
pub mod wait;
pub mod worker;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mergeberg_kernel::ids::RefName;
use mergeberg_kernel::reason::ReasonCode;

pub use answer::Answer;
pub use context::{Context, principal, system_clock};
pub use exit::Exit;

use crate::error::UserError;

/// A merge queue for Apache Iceberg tables.
#[derive(Debug, Parser)]
#[command(name = "mergeberg", version, arg_required_else_help = true, disable_help_subcommand = true)]
pub struct Cli {
    /// Configuration file [default: mergeberg.toml in this folder or one above].
    #[arg(long, global = true, value_name = "FILE", help_heading = "Global options")]
    pub config: Option<PathBuf>,
    /// Print JSON: one object on stdout, errors on stderr.
    #[arg(long, global = true, help_heading = "Global options")]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Set up a folder: mergeberg.toml, an example policy, the ledger.
    Init(init::InitArgs),
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoWriter(demo::DemoWriterArgs),
    Worker(worker::WorkerArgs),
    Plan(plan::PlanArgs),
    /// Put branches into the queue and follow them.
    #[command(subcommand)]
    Request(request::RequestCommand),
    /// Create and list branches.
    #[command(subcommand)]
    Branch(branch::BranchCommand),
    /// Keep records of what pipelines ran.
    #[command(subcommand)]
    Operation(operation::OperationCommand),
    /// Decide on changes of structure.
    #[command(subcommand)]
    Review(review::ReviewCommand),
    /// Act on a branch that merges land on.
    #[command(subcommand)]
    Target(target::TargetCommand),
    /// See what happened.
    #[command(subcommand)]
    Report(report::ReportCommand),
    /// Check the policies.
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    Doctor(doctor::DoctorArgs),
    /// Bring the ledger to this release's form.
    Migrate,
}

/// The whole program: parses, runs, prints.
pub fn main() -> ExitCode {
    run_from(std::env::args_os()).into()
}

/// [`main`] with arguments of the caller's choice.
pub fn run_from(args: impl IntoIterator<Item = OsString>) -> Exit {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, args.iter().any(|arg| arg == "--json")),
    };
    let json = cli.json;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = UserError::new(ReasonCode::Internal, format!("no runtime could be started: {error}"));
            return answer::print(&Err(error), json);
        }
    };
    let outcome = runtime.block_on(run(cli));
    answer::print(&outcome, json)
}

async fn run(cli: Cli) -> Result<Answer, UserError> {
    let Cli { config, json, command } = cli;
    let context = || Context::find(config.as_deref());
    match command {
        Command::Init(args) => {
            let here = std::env::current_dir().map_err(|e| {
                UserError::new(ReasonCode::ConfigInvalid, format!("the current folder cannot be read: {e}"))
            })?;
            init::init(&here, config.as_deref(), &args).await
        }
        Command::Demo(args) => demo::run(&args, config.as_deref(), json).await,
        Command::DemoWriter(args) => demo::write(&args, config.as_deref()).await,
        Command::Worker(args) => worker::run(&context()?, &args).await,
        Command::Plan(args) => plan::run(&context()?, &args).await,
        Command::Request(command) => request::run(&context()?, command).await,
        Command::Branch(command) => branch::run(&context()?, command).await,
        Command::Operation(command) => operation::run(&context()?, command).await,
        Command::Review(command) => review::run(&context()?, command).await,
        Command::Target(command) => target::run(&context()?, command).await,
        Command::Report(command) => report::run(&context()?, command).await,
        Command::Policy(command) => policy::run(&context()?, command).await,
        Command::Doctor(args) => doctor::run(&context()?, &args).await,
        Command::Migrate => init::migrate(&context()?.config.ledger).await,
    }
}

/// What clap has to say: help and version on stdout, mistakes on stderr.
fn usage(error: &clap::Error, json: bool) -> Exit {
    use clap::error::ErrorKind as K;
    let asked_for = matches!(error.kind(), K::DisplayHelp | K::DisplayVersion);
    if json && !asked_for {
        let text = error.render().to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
        answer::print_error(&UserError::new(ReasonCode::InvalidArgument, first), true);
    } else {
        // Nothing is left to tell when the terminal is gone.
        let _ = error.print();
    }
    if asked_for { Exit::Ok } else { Exit::Usage }
}

/// Names of refs are data: any text but an empty one.
fn parse_ref(text: &str) -> Result<RefName, String> {
    if text.trim().is_empty() {
        return Err("a name is needed".to_owned());
    }
    Ok(RefName::new(text))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_options_stand_before_and_after_the_verb() {
        for args in [
            ["mergeberg", "--json", "policy", "check"],
            ["mergeberg", "policy", "--json", "check"],
            ["mergeberg", "policy", "check", "--json"],
        ] {
            assert!(Cli::try_parse_from(args).unwrap().json, "{args:?}");
        }
    }

    #[test]
    fn names_of_branches_are_taken_as_they_are() {
        let name = "'a b'/ü; drop table x";
        let args = ["mergeberg", "request", "enqueue", "--table", "nyc.flights", "--source", name];
        let Command::Request(request::RequestCommand::Enqueue(args)) =
            Cli::try_parse_from(args).unwrap().command
        else {
            panic!()
        };
        assert_eq!(args.what.source.unwrap().as_str(), name);
    }
}
