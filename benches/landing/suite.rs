//! Which cases are run, in which order, and the child processes that run them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::case::{Place, State};
use crate::measure::Run;
use crate::page;
use crate::support::events::{CATALOG, Case, TABLE};

/// Where the page goes, from the repository's root.
const PAGE: &str = "docs/benchmarks.md";
/// Names the interpreter that has PyIceberg.
const PYTHON: &str = "MERGEBERG_PYTHON";
const PUBLISHER: &str = "benches/python/pyiceberg_publish.py";
/// Times that the queue and the floor are run in turn; the median run of each is told.
const ROUNDS: usize = 3;
/// How long PyIceberg's writers begin files.
const PYICEBERG_SECONDS: u32 = 20;
const PYICEBERG_QUICK_SECONDS: u32 = 4;
const PYICEBERG_WRITERS: [u32; 2] = [1, 20];

pub struct Options {
    pub quick: bool,
    /// Only cases whose name holds this.
    only: Option<String>,
    folder: Option<PathBuf>,
    pub rounds: usize,
}

impl Options {
    pub fn pyiceberg_seconds(&self) -> u32 {
        if self.quick { PYICEBERG_QUICK_SECONDS } else { PYICEBERG_SECONDS }
    }

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

/// One case with the runs that were made of it: the queue and both floors in turn.
pub struct Measured {
    pub case: Case,
    pub lands: Vec<Run>,
    /// Bare commits whose manifests and lists the product's own encoder writes.
    pub floors: Vec<Run>,
    /// The same by the writers of the iceberg crate.
    pub crate_floors: Vec<Run>,
    pub pyiceberg: Vec<Published>,
    land: Run,
    floor: Run,
    crate_floor: Run,
}

impl Measured {
    pub fn land(&self) -> &Run {
        &self.land
    }

    pub fn floor(&self) -> &Run {
        &self.floor
    }

    pub fn crate_floor(&self) -> &Run {
        &self.crate_floor
    }

    /// How many times as fast as `floor` requests land.
    pub fn ratio_to(&self, floor: &Run) -> f64 {
        self.land().per_second() / floor.per_second()
    }
}

/// What `pyiceberg_publish.py` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Published {
    pub writers: u32,
    pub published: usize,
    pub seconds: f64,
    pub per_second: f64,
    pub p50_seconds: f64,
    pub p95_seconds: f64,
    pub conflicts: u64,
}

fn cases(quick: bool) -> Vec<Case> {
    let case = |name: &str, rows_per_day, history| Case {
        name: name.to_owned(),
        days: if quick { 4 } else { 20 },
        rows_per_day,
        requests: if quick { 200 } else { 1_000 },
        rows_per_request: 100,
        history,
    };
    if quick {
        return vec![case("days of 3,000 rows", 3_000, 10)];
    }
    vec![
        case("days of 3,000 rows", 3_000, 10),
        case("days of 1,000,000 rows", 1_000_000, 10),
        case("1,000 snapshots before", 3_000, 1_000),
        case("5,000 snapshots before", 3_000, 5_000),
    ]
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
            measured.push(measure(options, at, case, &root)?);
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

fn measure(options: &Options, at: usize, case: Case, root: &Path) -> anyhow::Result<Measured> {
    let folder = root.join(format!("case-{at}"));
    let place = Place::new(&folder);
    // A folder that was kept from an earlier run, when one was named.
    if !place.shards().exists() {
        eprintln!("{}: preparing", case.name);
        std::fs::create_dir_all(&folder)?;
        place.write_case(&case)?;
        child("prepare", &place)?;
    }
    let (mut lands, mut floors, mut crate_floors) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=options.rounds {
        place.restore(State::Queued)?;
        let land: Run = serde_json::from_str(&child("land", &place)?)?;
        place.restore(State::Queued)?;
        let floor: Run = serde_json::from_str(&child("floor", &place)?)?;
        place.restore(State::Queued)?;
        let crate_floor: Run = serde_json::from_str(&child("crate-floor", &place)?)?;
        ensure!(
            land.landed == floor.landed && land.landed == crate_floor.landed,
            "the floor is of another size"
        );
        eprintln!(
            "{}: round {round}: {:.0}/s, floor {:.0}/s, by the crate {:.0}/s, checks {} ms, peak {} MiB",
            case.name,
            land.per_second(),
            floor.per_second(),
            crate_floor.per_second(),
            land.check_ms,
            land.peak_kib / 1024
        );
        lands.push(land);
        floors.push(floor);
        crate_floors.push(crate_floor);
    }
    let mut pyiceberg = Vec::new();
    if at == 0
        && let Some(python) = std::env::var_os(PYTHON)
    {
        for writers in PYICEBERG_WRITERS {
            place.restore(State::Plain)?;
            let published = publish(Path::new(&python), &place, writers, options.pyiceberg_seconds())?;
            eprintln!("PyIceberg, {writers} writer(s): {:.1}/s", published.per_second);
            pyiceberg.push(published);
        }
    }
    if options.folder.is_none() {
        std::fs::remove_dir_all(&folder)?;
    }
    let (land, floor, crate_floor) = (median(&lands)?, median(&floors)?, median(&crate_floors)?);
    Ok(Measured { case, lands, floors, crate_floors, pyiceberg, land, floor, crate_floor })
}

fn median(runs: &[Run]) -> anyhow::Result<Run> {
    let mut sorted: Vec<&Run> = runs.iter().collect();
    sorted.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    sorted.get(sorted.len() / 2).map(|run| (*run).clone()).context("there was no round")
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

fn publish(python: &Path, place: &Place, writers: u32, seconds: u32) -> anyhow::Result<Published> {
    let files = std::fs::read_to_string(place.shards())?;
    let mut child = Command::new(python)
        .arg(PUBLISHER)
        .args(["--uri", &format!("sqlite:///{}", place.catalog().display())])
        .args(["--warehouse", &place.warehouse()])
        .args(["--name", CATALOG, "--table", TABLE])
        .args(["--writers", &writers.to_string(), "--seconds", &seconds.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    child.stdin.take().context("no standard input")?.write_all(files.as_bytes())?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{PUBLISHER} failed");
    Ok(serde_json::from_slice(&output.stdout)?)
}
