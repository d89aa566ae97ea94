//! The demo's folder: recognised by a marker file, made anew on every run, with configuration, policy,
//! ledger, catalog and tables in it.
//!
//! Nothing is deleted that a demo did not make: a folder without the marker is refused, and in one with the
//! marker only the names that a demo uses go.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::RecordBatch;
use datafusion::arrow::datatypes::{DataType, TimeUnit};
use mergeberg_kernel::ids::{RefName, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;

use super::flights::{self, CARRIER_NAME};
use super::scenario::{
    AIRLINES, AIRPORTS, ARRIVALS_DAY, DAILY_TOTALS, FAR_DAY, FLIGHTS, NAMESPACE, RAW_FLIGHTS,
    RECOMPUTED_DAYS, TAIL_NUMBER_DAY, TWO_AIRPORTS_DAY, is_two_airports, loaded_days,
};
use super::{failed, table_name};
use crate::cli::{init, system_clock};
use crate::config::{Config, FILE_NAME, SqlPlace};
use crate::error::UserError;
use crate::table::branch_writer::{BranchWrite, BranchWriter, Removal};
use crate::table::catalog::Catalog;
use crate::table::create::TableDefinition;
use crate::table::manifests::ManifestStore;
use crate::table::sql_catalog::SqlCatalog;

pub const CONFIG_FILE: &str = FILE_NAME;
/// A folder with this file was made by a demo.
const MARKER: &str = ".mergeberg-demo";
const MARKER_TEXT: &str = "`mergeberg demo` made this folder and makes it anew on every run.\n";
/// Everything else that a demo makes in its folder; the databases with SQLite's own files beside them.
const FOLDERS: [&str; 3] = ["policies", "warehouse", "logs"];
const FILES: [&str; 7] = [
    CONFIG_FILE,
    "catalog.db",
    "catalog.db-wal",
    "catalog.db-shm",
    "mergeberg.db",
    "mergeberg.db-wal",
    "mergeberg.db-shm",
];
const LOGS: &str = "logs";
const CATALOG: &str = "demo";
const LEDGER: &str = "mergeberg.db";
/// Memory for decoded manifests of one writer, in bytes.
const MANIFEST_CACHE_BYTES: usize = 16 << 20;

/// The shipped example, whose age bounds are made short enough for a demonstration.
const SHIPPED_POLICY: &str = include_str!("../../policies/flights.toml");
/// Age bound of every class.
pub const AGE_BOUND_MS: i64 = 2_000;

/// Columns that are never null: the key of a flight.
const KEY: [&str; 4] = ["flight_date", "carrier", "flight", "origin"];

/// A folder that this process holds: no other demo makes it anew meanwhile.
#[derive(Debug)]
pub struct Folder {
    pub path: PathBuf,
    /// Locked as long as it is open.
    _marker: File,
}

impl Folder {
    /// Makes the folder, or empties the one of a former demo.
    pub fn make(named: &Path) -> Result<Self, UserError> {
        let path = std::path::absolute(named).map_err(|e| unusable(named, &e))?;
        let marker_path = path.join(MARKER);
        match std::fs::read_dir(&path) {
            Ok(mut entries) => {
                if !marker_path.is_file() && entries.next().is_some() {
                    return Err(foreign(named));
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::create_dir_all(&path).map_err(|e| unusable(named, &e))?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => return Err(foreign(named)),
            Err(error) => return Err(unusable(named, &error)),
        }
        let mut marker = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&marker_path)
            .map_err(|e| unusable(named, &e))?;
        match marker.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(UserError::new(
                    ReasonCode::InvalidArgument,
                    format!("another demo is running in {}", named.display()),
                )
                .with_next("wait for it, or name another folder with --dir"));
            }
            Err(std::fs::TryLockError::Error(error)) => return Err(unusable(named, &error)),
        }
        marker
            .set_len(0)
            .and_then(|()| marker.write_all(MARKER_TEXT.as_bytes()))
            .map_err(|e| unusable(named, &e))?;
        for (folders, names) in [(true, &FOLDERS[..]), (false, &FILES[..])] {
            for name in names {
                let at = path.join(name);
                let removed = if folders { std::fs::remove_dir_all(&at) } else { std::fs::remove_file(&at) };
                match removed {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(unusable(&at, &error));
                    }
                    Ok(()) | Err(_) => {}
                }
            }
        }
        std::fs::create_dir(path.join(LOGS)).map_err(|e| unusable(named, &e))?;
        Ok(Self { path, _marker: marker })
    }

    pub fn config_file(&self) -> PathBuf {
        self.path.join(CONFIG_FILE)
    }

    /// The log of one of the demo's processes.
    pub fn log(&self, process: &str) -> PathBuf {
        self.path.join(LOGS).join(format!("{process}.log"))
    }

    /// Configuration, policy and ledger, as `init` makes them, and the tables with their first rows.
    pub async fn furnish(&self) -> Result<Config, UserError> {
        let args = init::InitArgs {
            catalog_uri: "catalog.db".to_owned(),
            warehouse: "warehouse".to_owned(),
            name: CATALOG.to_owned(),
            ledger: LEDGER.to_owned(),
        };
        init::init(&self.path, None, &args).await?;
        let config = read_config(&self.config_file())?;
        let policy = config.policies.join("flights.toml");
        std::fs::write(&policy, policy_text()).map_err(|e| unusable(&policy, &e))?;
        let (name, place) = place_of(&config)?;
        let catalog = SqlCatalog::create(name, &place.database, &place.warehouse, system_clock()).await?;
        make_tables(Arc::new(catalog)).await?;
        Ok(config)
    }
}

/// The demo's own configuration: variables of the environment speak of another queue.
pub fn read_config(file: &Path) -> Result<Config, UserError> {
    Ok(Config::read(file, |_| None)?)
}

/// Opens the demo's catalog, in whatever process of it.
pub async fn open_catalog(config: &Config) -> Result<SqlCatalog, UserError> {
    let (name, place) = place_of(config)?;
    Ok(SqlCatalog::open(name, &place.database, &place.warehouse, system_clock()).await?)
}

/// Name and place of the demo's catalog, which `init` wrote.
fn place_of(config: &Config) -> Result<(&str, &SqlPlace), UserError> {
    let catalog = config.catalog(None)?;
    match catalog.sql() {
        Some(place) => Ok((&catalog.name, place)),
        None => Err(UserError::new(ReasonCode::ConfigInvalid, "the demo's catalog is no SQL catalog")
            .with_next("remove the demo's folder and run it again")),
    }
}

pub fn branch_writer(catalog: Arc<dyn Catalog>) -> BranchWriter {
    BranchWriter {
        catalog,
        store: ManifestStore::new(MANIFEST_CACHE_BYTES),
        clock: system_clock(),
        random: Arc::new(rand::random::<u64>),
    }
}

fn policy_text() -> String {
    let mut text = String::from("# policies/flights.toml with age bounds for a demonstration.\n");
    for line in SHIPPED_POLICY.lines() {
        if line.starts_with("age-bound") {
            text.push_str(&format!("age-bound = \"{}s\"\n", AGE_BOUND_MS / 1_000));
        } else {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

fn foreign(path: &Path) -> UserError {
    UserError::new(
        ReasonCode::InvalidArgument,
        format!("{} holds something that no demo made; nothing was changed", path.display()),
    )
    .with_next("name a new or empty folder with --dir")
}

fn unusable(path: &Path, error: &std::io::Error) -> UserError {
    UserError::new(ReasonCode::InvalidArgument, format!("{} cannot be used: {error}", path.display()))
        .with_next("name a folder that this user can write with --dir")
}

async fn make_tables(catalog: Arc<SqlCatalog>) -> Result<(), UserError> {
    catalog.create_namespace(NAMESPACE).await?;
    let writer = branch_writer(Arc::clone(&catalog) as Arc<dyn Catalog>);
    let (airlines, airports, totals) = (flights::airlines()?, flights::airports()?, flights::daily_totals()?);
    for (name, rows) in [(AIRLINES, airlines), (AIRPORTS, airports), (DAILY_TOTALS, totals)] {
        catalog.define_table(&table_name(name), &definition(&rows, &[])?).await?;
        append(&writer, name, vec![rows]).await?;
    }

    let days = loaded_days().map(flights::day).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = days.first() else { return Err(failed("there are no flights to load")) };
    let raw = definition(first, &KEY)?.partitioned_by("flight_date", "identity");
    catalog.define_table(&table_name(RAW_FLIGHTS), &raw).await?;
    let target = raw.clone().column(CARRIER_NAME, "string", false);
    catalog.define_table(&table_name(FLIGHTS), &target).await?;
    append(&writer, RAW_FLIGHTS, days).await?;

    // One append an airport: every day has three files, so that a compaction has work to do.
    let loaded = loaded_days().map(first_load).collect::<Result<Vec<_>, _>>()?;
    for airport in ["EWR", "JFK", "LGA"] {
        let part = |rows: &RecordBatch| flights::choose(rows, |flight| flight.origin == airport);
        append(&writer, FLIGHTS, loaded.iter().map(part).collect::<Result<_, _>>()?).await?;
    }
    Ok(())
}

/// A day as it stands on `main` when the demo's day begins. Each flaw is put right by one request, so that
/// the final rows show whether that one landed.
pub fn first_load(day: u32) -> Result<RecordBatch, UserError> {
    let all = flights::day(day)?;
    match day {
        day if RECOMPUTED_DAYS.contains(&day) => flights::choose(&all, |flight| !flight.cancelled),
        TWO_AIRPORTS_DAY => flights::choose(&all, |flight| !is_two_airports(flight)),
        FAR_DAY => flights::choose(&all, |flight| flight.dest != "HNL"),
        TAIL_NUMBER_DAY => flights::forget(&all, "tailnum", |flight| flight.carrier == "HA"),
        ARRIVALS_DAY => flights::forget(&all, "arr_delay", |_| true),
        _ => Ok(all),
    }
}

/// A table with the columns of `rows`; those of `required` are never null.
fn definition(rows: &RecordBatch, required: &[&str]) -> Result<TableDefinition, UserError> {
    let mut definition = TableDefinition::default();
    for field in rows.schema().fields() {
        let type_name = match field.data_type() {
            DataType::Int32 => "int",
            DataType::Int64 => "long",
            DataType::Float64 => "double",
            DataType::Utf8 => "string",
            DataType::Date32 => "date",
            DataType::Timestamp(TimeUnit::Microsecond, None) => "timestamp",
            other => return Err(failed(format!("column {} has type {other}", field.name()))),
        };
        definition = definition.column(field.name(), type_name, required.contains(&field.name().as_str()));
    }
    Ok(definition)
}

async fn append(writer: &BranchWriter, table: &str, rows: Vec<RecordBatch>) -> Result<SnapshotId, UserError> {
    let write = BranchWrite {
        branch: RefName::main(),
        label: "append".to_owned(),
        rows,
        remove: Removal::Nothing,
        summary: Default::default(),
    };
    Ok(writer.write(&table_name(table), write).await?)
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::policy::TablePolicy;

    use super::*;

    #[test]
    fn the_policy_is_the_shipped_one_with_short_age_bounds() {
        let shipped = TablePolicy::parse("shipped", SHIPPED_POLICY).unwrap();
        let mut demo = TablePolicy::parse("demo", &policy_text()).unwrap();
        assert_eq!(demo.classes.len(), 5);
        for (class, like) in demo.classes.iter_mut().zip(&shipped.classes) {
            assert_eq!(class.age_bound.ms, AGE_BOUND_MS, "{}", class.name);
            class.age_bound = like.age_bound;
        }
        assert_eq!(demo.classes, shipped.classes);
        assert_eq!(demo.checks, shipped.checks);
    }

    #[test]
    fn a_folder_of_somebody_else_is_refused_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join("mergeberg.toml");
        std::fs::write(&theirs, "mine").unwrap();
        let error = Folder::make(folder.path()).unwrap_err();
        assert_eq!(error.code, ReasonCode::InvalidArgument);
        assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "mine");
        let file = Folder::make(&theirs).unwrap_err();
        assert!(file.message.contains("no demo made"), "{file}");
    }

    #[test]
    fn a_former_demo_is_emptied_but_for_what_others_put_there() {
        let folder = tempfile::tempdir().unwrap();
        drop(Folder::make(folder.path()).unwrap());
        std::fs::create_dir_all(folder.path().join("warehouse/nyc")).unwrap();
        std::fs::write(folder.path().join("catalog.db"), "old").unwrap();
        std::fs::write(folder.path().join("notes.txt"), "mine").unwrap();
        let held = Folder::make(folder.path()).unwrap();
        assert!(!folder.path().join("warehouse").exists() && !folder.path().join("catalog.db").exists());
        assert_eq!(std::fs::read_to_string(folder.path().join("notes.txt")).unwrap(), "mine");
        let second = Folder::make(folder.path()).unwrap_err();
        assert!(second.message.contains("another demo"), "{second}");
        drop(held);
        Folder::make(folder.path()).unwrap();
    }
}
