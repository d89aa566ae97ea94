//! `policy check`: parses every policy and compares it with the tables where the catalog can be reached.

use std::path::Path;

use clap::Subcommand;
use mergeberg_kernel::ids::TableName;
use mergeberg_kernel::policy::{ClassPolicy, TablePolicy};
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use super::answer::Answer;
use super::context::Context;
use super::exit::Exit;
use crate::config::{KnownTables, PolicyProblem, compare, tables_of};
use crate::error::UserError;
use crate::report::text::{Columns, count};
use crate::table::catalog::{Catalog, CatalogError};

#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Parse all policies and compare them with the tables.
    Check,
}

#[derive(Debug, PartialEq, Serialize)]
struct Checked {
    policies: Vec<CheckedPolicy>,
    /// Tables of the catalog that no file names.
    with_shipped_default: Vec<TableName>,
    shipped_default: ClassPolicy,
    /// Why the tables could not be looked at.
    not_compared: Option<String>,
    ok: bool,
}

#[derive(Debug, PartialEq, Serialize)]
struct CheckedPolicy {
    file: String,
    table: TableName,
    digest: String,
    classes: Vec<ClassPolicy>,
    checks: Vec<String>,
    problems: Vec<PolicyProblem>,
}

pub async fn run(context: &Context, command: PolicyCommand) -> Result<Answer, UserError> {
    let PolicyCommand::Check = command;
    let policies = context.policies.read()?;
    let mut not_compared = None;
    let mut tables = KnownTables::new();
    let mut listed = Vec::new();
    match context.catalog().await {
        Ok(catalog) => match catalog.list_tables().await {
            Ok(names) => {
                let mut wanted: Vec<TableName> = names.clone();
                wanted.extend(policies.iter().flat_map(|(_, policy)| tables_of(policy)));
                listed = names;
                tables = load_all(catalog.as_ref(), wanted).await?;
            }
            Err(error) => not_compared = Some(error.to_string()),
        },
        Err(error) => not_compared = Some(error.message),
    }
    let folder = context.policies.path();
    let checked = CheckedAll {
        policies: policies.iter().map(|(file, policy)| (file, policy.as_ref())).collect(),
        folder,
        tables: &tables,
        listed,
        not_compared,
    };
    Ok(checked.answer())
}

/// Every table once. One that cannot be read is as unknown as one that is not there, for a policy.
async fn load_all(catalog: &dyn Catalog, names: Vec<TableName>) -> Result<KnownTables, UserError> {
    let mut tables = KnownTables::new();
    for name in names {
        if tables.contains_key(&name) {
            continue;
        }
        match catalog.load(&name).await {
            Ok(table) => {
                tables.insert(name, Some(table.facts.clone()));
            }
            Err(CatalogError::NotFound(_)) => {
                tables.insert(name, None);
            }
            // Told by whatever works with that table; the others are checked.
            Err(CatalogError::Unreadable { .. } | CatalogError::Unsupported { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(tables)
}

struct CheckedAll<'a> {
    policies: Vec<(&'a Path, &'a TablePolicy)>,
    folder: &'a Path,
    tables: &'a KnownTables,
    listed: Vec<TableName>,
    not_compared: Option<String>,
}

impl CheckedAll<'_> {
    fn answer(self) -> Answer {
        let mut policies = Vec::new();
        for (file, policy) in &self.policies {
            policies.push(CheckedPolicy {
                file: file.display().to_string(),
                table: policy.table.clone(),
                digest: policy.digest().to_string(),
                classes: policy.classes.clone(),
                checks: policy.checks.iter().map(|c| format!("{} ({})", c.id, c.kind.name())).collect(),
                problems: compare(policy, self.folder, self.tables),
            });
        }
        let with_shipped_default = self
            .listed
            .into_iter()
            .filter(|table| !policies.iter().any(|policy| policy.table == *table))
            .collect();
        let ok = policies.iter().all(|policy| policy.problems.is_empty());
        let checked = Checked {
            policies,
            with_shipped_default,
            shipped_default: ClassPolicy::shipped_default(),
            not_compared: self.not_compared,
            ok,
        };
        let exit = if ok { Exit::Ok } else { Exit::of_error(ReasonCode::ConfigInvalid) };
        Answer::new(render(&checked), checked).with_exit(exit)
    }
}

fn render(checked: &Checked) -> String {
    let Checked { policies, with_shipped_default, shipped_default, not_compared, ok: _ } = checked;
    let mut text = String::new();
    for policy in policies {
        let verdict = match policy.problems.len() as u64 {
            0 => "ok".to_owned(),
            n => count(n, "problem"),
        };
        text.push_str(&format!("{}  {}  {verdict}\n", policy.file, policy.table));
        for PolicyProblem { check, message, next } in &policy.problems {
            let check = check.as_ref().map(|id| format!("check '{id}': ")).unwrap_or_default();
            text.push_str(&format!("  error: {check}{message}\n    next: {next}\n"));
        }
        if !policy.classes.is_empty() {
            text.push_str(&indent(&class_columns(&policy.classes).render()));
        }
        if !policy.checks.is_empty() {
            text.push_str(&format!("  defined: {}\n", policy.checks.join(", ")));
        }
        text.push('\n');
    }
    let tables: Vec<String> = with_shipped_default.iter().map(ToString::to_string).collect();
    let tables = match (tables.is_empty(), not_compared) {
        (false, _) => tables.join(", "),
        (true, None) => "(every table of the catalog has a file)".to_owned(),
        (true, Some(_)) => "tables without a file".to_owned(),
    };
    text.push_str(&format!("shipped default  {tables}\n"));
    text.push_str(&indent(&class_columns(std::slice::from_ref(shipped_default)).render()));
    if let Some(why) = not_compared {
        text.push_str(&format!("\nnot compared with the tables: {why}\n"));
    }
    text
}

fn class_columns(classes: &[ClassPolicy]) -> Columns {
    let mut columns = Columns::new(&[
        "class",
        "prefix",
        "kind",
        "overlap",
        "isolation",
        "batch>",
        "age bound>",
        "after landing",
        "checks",
    ]);
    for class in classes {
        let prefix = if class.prefix.is_empty() { "(any)" } else { &class.prefix };
        let mut checks = vec!["lineage".to_owned(), "schema".to_owned()];
        checks.extend(class.checks.iter().cloned());
        columns.push(vec![
            class.name.clone(),
            prefix.to_owned(),
            word(&class.kind),
            word(&class.overlap),
            word(&class.isolation),
            class.batch_size.to_string(),
            String::from(class.age_bound),
            word(&class.after_landing),
            checks.join(", "),
        ]);
    }
    columns
}

/// The word that a policy file has for a value.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::facts;
    use super::*;

    fn answer(policy: &str, compared: bool) -> Answer {
        let policy = TablePolicy::parse("policies/flights.toml", policy).unwrap();
        let facts = facts();
        let mut tables = KnownTables::new();
        if compared {
            tables.insert(facts.name.clone(), Some(facts.clone()));
        }
        CheckedAll {
            policies: vec![(Path::new("policies/flights.toml"), &policy)],
            folder: Path::new("policies"),
            tables: &tables,
            listed: if compared { vec![facts.name, "nyc.planes".parse().unwrap()] } else { Vec::new() },
            not_compared: (!compared).then(|| "the catalog did not answer: no file".to_owned()),
        }
        .answer()
    }

    #[test]
    fn problems_stand_under_their_file_and_set_the_exit_code() {
        let policy = "\
table = \"nyc.flights\"
[[class]]
name = \"ingest\"
prefix = \"ingest/\"
overlap = \"allow-with-duplicate-check\"
checks = [\"key\"]
[[check]]
id = \"key\"
type = \"duplicate-key\"
columns = [\"carier\", \"flight_date\"]
";
        let answer = answer(policy, true);
        assert_eq!(answer.exit, Exit::Usage);
        assert_eq!(
            answer.text,
            "\
policies/flights.toml  nyc.flights  1 problem
  error: check 'key': nyc.flights has no column 'carier'
    next: did you mean 'carrier'?
  class   prefix   kind     overlap                     isolation     batch  age bound  after landing  checks
  ingest  ingest/  changes  allow-with-duplicate-check  serializable     50        10m  keep           lineage, schema, key
  defined: key (duplicate-key)

shipped default  nyc.planes
  class    prefix  kind     overlap  isolation     batch  age bound  after landing  checks
  default  (any)   changes  refuse   serializable     50        10m  keep           lineage, schema
"
        );
        assert_eq!(answer.json["ok"], false);
        assert_eq!(answer.json["policies"][0]["problems"][0]["check"], "key");
    }

    #[test]
    fn without_a_catalog_policies_are_parsed_and_it_is_said_that_no_more_was_done() {
        let answer = answer("table = \"nyc.flights\"", false);
        assert_eq!(answer.exit, Exit::Ok);
        assert!(answer.text.ends_with("not compared with the tables: the catalog did not answer: no file\n"));
    }
}
