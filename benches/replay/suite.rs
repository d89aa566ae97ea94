//! Which cases are run, and the child processes that run them.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Kind, Place};
use crate::measure::Run;
use crate::page;

/// Where the page goes, from the repository's root.
const PAGE: &str = "docs/benchmarks-replay.md";
/// Names the interpreter that has DuckDB.
const PYTHON: &str = "MERGEBERG_PYTHON";
const DUCKDB: &str = "benches/python/duckdb_merge.py";
/// Times that a case is run, the queue and DuckDB in turn; the median run of each is told.
const ROUNDS: usize = 3;

pub struct Options {
    pub quick: bool,
    /// Only cases whose name holds this.
    only: Option<String>,
    folder: Option<PathBuf>,
    pub rounds: usize,
}

impl Options {
    pub fn parse(words: &[&str]) -> anyhow::Result<Self> {
        let mut options = Self { quick: false, only: None, folder: None, rounds: ROUNDS };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match *word {
                // Cargo gives this to every bench.
                "--bench" => {}
                "--quick" => options.quick = true,
                "--only" => options.only = Some((*value()?).to_owned()),
                "--folder" => options.folder = Some(PathBuf::from(value()?)),
                "--rounds" => options.rounds = value()?.parse()?,
                other => bail!(
                    "unknown argument '{other}' (known: --quick, --only NAME, --folder PATH, --rounds N)"
                ),
            }
        }
        if options.quick {
            options.rounds = 1;
        }
        Ok(options)
    }
}

/// One case with the runs that were made of it.
pub struct Measured {
    pub case: Case,
    pub runs: Vec<Run>,
    pub duckdb: Vec<ByDuckDb>,
}

/// What `duckdb_merge.py` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ByDuckDb {
    pub version: String,
    pub seconds: f64,
    pub cpu_seconds: f64,
    pub peak_kib: u64,
    pub records: u64,
}

fn cases(quick: bool) -> Vec<Case> {
    let case = |name: String, kind| Case { name, kind };
    let counts: &[usize] = if quick { &[10, 100] } else { &[10, 1_000, 10_000] };
    let replaced = counts
        .iter()
        .map(|&files| case(format!("replace partitions, {files} files"), Kind::ReplacePartitions { files }));
    let appended = counts.iter().map(|&files| case(format!("append, {files} files"), Kind::Append { files }));
    let (target, source) = if quick { (100_000, 1_000) } else { (10_000_000, 100_000) };
    let merge = Kind::Merge { target, source, days: 20 };
    let merge = case(format!("MERGE of {source} rows into {target}"), merge);
    replaced.chain(appended).chain([merge]).collect()
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let temporary;
    let root = match &options.folder {
        Some(folder) => folder.clone(),
        None => {
            temporary = tempfile::tempdir()?;
            temporary.path().to_owned()
        }
    };
    let wanted = |case: &Case| options.only.as_ref().is_none_or(|only| case.name.contains(only));
    let mut measured = Vec::new();
    for (at, case) in cases(options.quick).into_iter().enumerate() {
        if wanted(&case) {
            measured.push(measure(options, &root.join(format!("case-{at}")), case)?);
        }
    }
    let text = page::render(&measured, options)?;
    if options.quick || options.only.is_some() {
        println!("{text}");
    } else {
        std::fs::write(PAGE, &text).with_context(|| PAGE.to_owned())?;
        eprintln!("wrote {PAGE}");
    }
    Ok(())
}

fn measure(options: &Options, folder: &Path, case: Case) -> anyhow::Result<Measured> {
    let place = Place::new(folder);
    eprintln!("{}: preparing", case.name);
    std::fs::create_dir_all(folder)?;
    place.write_case(&case)?;
    child("prepare", &place)?;
    let python = match case.kind {
        Kind::Merge { .. } => std::env::var_os(PYTHON),
        Kind::ReplacePartitions { .. } | Kind::Append { .. } => None,
    };
    let (mut runs, mut duckdb) = (Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        place.restore()?;
        let run: Run = serde_json::from_str(&child("land", &place)?)?;
        eprintln!("{}: round {round}: {:.2} s, peak {} MiB", case.name, run.seconds, run.peak_kib / 1024);
        if let Some(python) = &python {
            let by: ByDuckDb = merge_by_duckdb(Path::new(python), &place)?;
            eprintln!("DuckDB: {:.2} s, peak {} MiB", by.seconds, by.peak_kib / 1024);
            ensure!(by.records == run.records, "DuckDB gives {} rows, the queue {}", by.records, run.records);
            duckdb.push(by);
        }
        runs.push(run);
    }
    std::fs::remove_dir_all(folder)?;
    Ok(Measured { case, runs, duckdb })
}

fn child(verb: &str, place: &Place) -> anyhow::Result<String> {
    let output = Command::new(std::env::current_exe()?)
        .args(["child", verb])
        // An environment that asks for backtraces would be measured with them.
        .env_remove("RUST_BACKTRACE")
        .arg(&place.folder)
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "step '{verb}' failed");
    Ok(String::from_utf8(output.stdout)?)
}

fn merge_by_duckdb(python: &Path, place: &Place) -> anyhow::Result<ByDuckDb> {
    let written = place.folder.join("duckdb");
    let threads = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let output = Command::new(python)
        .arg(DUCKDB)
        .arg("--inputs")
        .arg(place.inputs())
        .arg("--output")
        .arg(&written)
        .args(["--threads", &threads.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "{DUCKDB} failed");
    std::fs::remove_dir_all(&written)?;
    Ok(serde_json::from_slice(&output.stdout)?)
}
