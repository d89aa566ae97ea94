//! `init`: writes `mergeberg.toml` and an example policy, creates the ledger. It never overwrites.
//! `migrate`: brings the ledger to this release's form.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use super::answer::Answer;
use crate::config::{Config, ENV_LEDGER_PASSWORD, FILE_NAME, catalog_variable};
use crate::database::PostgresPlace;
use crate::error::UserError;
use crate::ledger::{Ledger, LedgerPlace, MigrationReport};
use crate::report::text::count;

const TEMPLATE: &str = include_str!("template.toml");
const EXAMPLE_POLICY: &str = include_str!("../../policies/example.toml");
/// Not read as a policy until it is renamed: it speaks of a table that is not there.
const EXAMPLE_NAME: &str = "orders.toml.example";

#[derive(Debug, Args)]
pub struct InitArgs {
    /// Database of the SQL catalog: a path, sqlite:////absolute/path.db, or postgresql://user@host/database.
    #[arg(long, default_value = "catalog.db", value_name = "URI")]
    pub catalog_uri: String,
    /// Folder of the tables: a path or file:// location.
    #[arg(long, default_value = "warehouse", value_name = "PATH")]
    pub warehouse: String,
    /// The catalog's name, as your writers call it.
    #[arg(long, default_value = "local")]
    pub name: String,
    /// The queue's own database: a path, or postgresql://user@host/database, which has to exist.
    #[arg(long, default_value = "mergeberg.db", value_name = "PLACE")]
    pub ledger: String,
}

#[derive(Debug, Serialize)]
struct Initialised {
    config: PathBuf,
    example_policy: PathBuf,
    ledger: String,
    queue: String,
}

/// Writes into `folder`, or where `named` says.
pub async fn init(folder: &Path, named: Option<&Path>, args: &InitArgs) -> Result<Answer, UserError> {
    let file = named.map_or_else(|| folder.join(FILE_NAME), |path| folder.join(path));
    let text = config_text(args);
    // What is written must be readable: a wrong URI is told before there is a file.
    let config = Config::parse(&file, &text, |name| password(args, name))?;
    write_new(&file, &text)?;
    std::fs::create_dir_all(&config.policies).map_err(|e| cannot_write(&config.policies, &e))?;
    let example = config.policies.join(EXAMPLE_NAME);
    if !example.exists() {
        write_new(&example, EXAMPLE_POLICY)?;
    }
    let report = Ledger::migrate(&config.ledger).await?;
    let ledger = if report.created { "created" } else { "kept" };
    let text = format!(
        "\
wrote    {}
example  {}
ledger   {} ({ledger}, queue {})

next:
  mergeberg policy check                                    what holds for which table
  mergeberg plan --table ns.t                               what would become of its branches
  mergeberg request enqueue --table ns.t --source BRANCH    put a branch into the queue
  mergeberg worker                                          merge what is in the queue
",
        file.display(),
        example.display(),
        config.ledger,
        report.queue
    );
    let queue = report.queue.to_string();
    Ok(Answer::new(
        text,
        Initialised { config: file, example_policy: example, ledger: config.ledger.to_string(), queue },
    ))
}

/// Of what the file names, the passwords are looked for where every command will: nothing else of the environment
/// counts, which may speak of another queue.
fn password(args: &InitArgs, variable: &str) -> Option<String> {
    let of_ledger = variable == ENV_LEDGER_PASSWORD && PostgresPlace::is_address(&args.ledger);
    let of_catalog =
        variable == catalog_variable(&args.name, "PASSWORD") && PostgresPlace::is_address(&args.catalog_uri);
    if of_ledger || of_catalog { std::env::var(variable).ok() } else { None }
}

fn config_text(args: &InitArgs) -> String {
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let bare = args.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
    let key = if bare && !args.name.is_empty() { args.name.clone() } else { quoted(&args.name) };
    let ledger = if PostgresPlace::is_address(&args.ledger) { "url" } else { "path" };
    TEMPLATE
        .replace("@NAME@", &quoted(&args.name))
        .replace("@KEY@", &key)
        .replace("@URI@", &quoted(&args.catalog_uri))
        .replace("@WAREHOUSE@", &quoted(&args.warehouse))
        .replace("@LEDGER@", &format!("{ledger} = {}", quoted(&args.ledger)))
}

fn write_new(path: &Path, text: &str) -> Result<(), UserError> {
    let result = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()));
    match result {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(UserError::new(
            ReasonCode::InvalidArgument,
            format!("{} exists already; nothing was changed", path.display()),
        )
        .with_next("edit it, or run `mergeberg init` in another folder")),
        Err(error) => Err(cannot_write(path, &error)),
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> UserError {
    UserError::new(ReasonCode::ConfigInvalid, format!("{} cannot be written: {error}", path.display()))
        .with_next("make the folder writable for this user")
}

/// `migrate`.
pub async fn migrate(ledger: &LedgerPlace) -> Result<Answer, UserError> {
    let report = Ledger::migrate(ledger).await?;
    Ok(Answer::new(render_migration(ledger, &report), report))
}

fn render_migration(ledger: &LedgerPlace, report: &MigrationReport) -> String {
    let MigrationReport { queue, created, applied } = report;
    let mut text = match (created, applied.len() as u64) {
        (true, n) => format!("created {ledger} (queue {queue}) with {}\n", count(n, "migration")),
        (false, 0) => format!("{ledger} is up to date (queue {queue})\n"),
        (false, n) => format!("applied {} to {ledger} (queue {queue})\n", count(n, "migration")),
    };
    for (version, description) in applied {
        text.push_str(&format!("  {version:>4}  {description}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> InitArgs {
        InitArgs {
            catalog_uri: "sqlite:////srv/a \"quoted\" \\ name.db".to_owned(),
            warehouse: "file:///srv/w".to_owned(),
            name: "my catalog".to_owned(),
            ledger: "mergeberg.db".to_owned(),
        }
    }

    #[test]
    fn what_is_written_is_read_back_whatever_the_names() {
        let config = Config::parse(Path::new("/q/mergeberg.toml"), &config_text(&args()), |_| None).unwrap();
        let catalog = config.catalog(None).unwrap();
        assert_eq!(catalog.name, "my catalog");
        let place = catalog.sql().unwrap();
        assert_eq!(place.database.to_string(), "/srv/a \"quoted\" \\ name.db");
        assert_eq!(place.warehouse, "file:///srv/w");
        for mark in ["@NAME@", "@KEY@", "@URI@", "@WAREHOUSE@", "@LEDGER@"] {
            assert!(!config_text(&args()).contains(mark), "{mark}");
        }
    }

    #[test]
    fn a_queue_on_postgresql_is_written_as_such() {
        let on_server = InitArgs {
            catalog_uri: "postgresql://ann@h/lake".to_owned(),
            ledger: "postgresql://ann@h/queue".to_owned(),
            ..args()
        };
        let text = config_text(&on_server);
        let config = Config::parse(Path::new("/q/mergeberg.toml"), &text, |_| None).unwrap();
        assert_eq!(config.ledger.to_string(), "postgresql://ann@h:5432/queue");
        let catalog = config.catalog(None).unwrap().sql().unwrap();
        assert_eq!(catalog.database.to_string(), "postgresql://ann@h:5432/lake");
    }

    #[tokio::test]
    async fn a_folder_is_set_up_once_and_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let answer = init(folder.path(), None, &args()).await.unwrap();
        assert!(answer.text.starts_with("wrote    "), "{}", answer.text);
        let file = folder.path().join(FILE_NAME);
        let before = std::fs::read_to_string(&file).unwrap();
        let config = Config::read(&file, |_| None).unwrap();
        assert!(folder.path().join("mergeberg.db").is_file());
        assert!(crate::config::PolicyFolder::new(&config.policies).read().unwrap().iter().next().is_none());

        let other = InitArgs { name: "other".to_owned(), ..args() };
        let error = init(folder.path(), None, &other).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::InvalidArgument);
        assert!(error.message.ends_with("exists already; nothing was changed"), "{}", error.message);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), before);
    }

    #[tokio::test]
    async fn a_wrong_uri_leaves_no_file_behind() {
        let folder = tempfile::tempdir().unwrap();
        let wrong = InitArgs { catalog_uri: "mysql://h/db".to_owned(), ..args() };
        let error = init(folder.path(), None, &wrong).await.unwrap_err();
        assert_eq!(error.code, ReasonCode::ConfigInvalid);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn migrate_says_what_it_did() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("queue.db");
        let place = LedgerPlace::from(&path);
        let first = migrate(&place).await.unwrap();
        assert!(first.text.starts_with(&format!("created {} (queue ", path.display())), "{}", first.text);
        let second = migrate(&place).await.unwrap();
        assert!(second.text.contains("is up to date"), "{}", second.text);
        assert_eq!(second.json["created"], false);
    }
}
