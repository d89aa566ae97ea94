//! `demo`: wiring only; `crate::demo` is the demonstration. `demo-writer` is one of its pipelines.

use std::path::{Path, PathBuf};

use mergeberg_kernel::reason::ReasonCode;

use super::answer::Answer;
use super::exit::Exit;
use crate::config::Config;
use crate::error::UserError;

/// Show a day of a merge queue on real flights, and verify what came of it.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {
    /// Folder to work in; the one of a former demo is made anew.
    #[arg(long, value_name = "FOLDER", default_value = "mergeberg-demo")]
    pub dir: PathBuf,
}

/// A pipeline of the demo, as a process; it takes orders on stdin.
#[derive(Debug, clap::Args)]
pub struct DemoWriterArgs {
    pub pipeline: String,
}

pub async fn run(args: &DemoArgs, config: Option<&Path>, json: bool) -> Result<Answer, UserError> {
    if config.is_some() {
        return Err(UserError::new(ReasonCode::InvalidArgument, "the demo makes a configuration of its own")
            .with_next("leave out --config; name the demo's folder with --dir"));
    }
    let done = crate::demo::demonstrate(&args.dir, json).await?;
    let exit = if done.as_expected { Exit::Ok } else { Exit::Internal };
    Ok(Answer::new(done.text, done.json).with_exit(exit))
}

pub async fn write(args: &DemoWriterArgs, config: Option<&Path>) -> Result<Answer, UserError> {
    let Some(file) = config else {
        return Err(UserError::new(ReasonCode::InvalidArgument, "a pipeline of the demo needs --config"));
    };
    // As the demo reads it: variables of the environment speak of another queue.
    let config = Config::read(file, |_| None)?;
    crate::demo::serve(&config, &args.pipeline).await?;
    Ok(Answer::new("", serde_json::Value::Null))
}
