//! A policy compared with the tables that it speaks of: what cannot work is told before a request meets it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::TableName;
use mergeberg_kernel::policy::{CheckDefinition, CheckKind, ClassPolicy, Scope, TablePolicy, Upstream};
use mergeberg_kernel::structure::SchemaFact;
use serde::Serialize;

use crate::near::nearest;

/// Tables by name; `None`: the catalog has no such table.
pub type KnownTables = BTreeMap<TableName, Option<TableFacts>>;

/// One thing that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PolicyProblem {
    /// Id of the check, when it is about one.
    pub check: Option<String>,
    pub message: String,
    pub next: String,
}

/// Every table that a policy names: its own and those that checks read.
pub fn tables_of(policy: &TablePolicy) -> BTreeSet<TableName> {
    let mut tables = BTreeSet::from([policy.table.clone()]);
    for check in &policy.checks {
        match &check.kind {
            CheckKind::Referential { references, .. } => {
                tables.insert(references.table.clone());
            }
            CheckKind::Reconciliation { upstream: Upstream::Table { table }, .. } => {
                tables.insert(table.clone());
            }
            CheckKind::DuplicateKey { .. }
            | CheckKind::NotNull { .. }
            | CheckKind::RowCount { .. }
            | CheckKind::AcceptedValues { .. }
            | CheckKind::Reconciliation { upstream: Upstream::File { .. }, .. } => {}
            CheckKind::Sql { query: _, tables: others, fence: _ } => tables.extend(others.values().cloned()),
        }
    }
    tables
}

/// What is wrong with `policy`. `folder` is the one that file upstreams are relative to.
pub fn compare(policy: &TablePolicy, folder: &Path, tables: &KnownTables) -> Vec<PolicyProblem> {
    let mut problems = Vec::new();
    let Some(facts) = known(&policy.table, None, tables, &mut problems) else {
        return problems;
    };
    for class in policy.classes.iter().filter(|class| class.merges_rows()) {
        row_merge_key(class, facts, &mut problems);
    }
    for check in &policy.checks {
        check_one(check, facts, folder, tables, &mut problems);
    }
    problems
}

/// Rows are merged by a key that is there; tables of format v3 have row ids (table spec, "Row Lineage").
fn row_merge_key(class: &ClassPolicy, facts: &TableFacts, problems: &mut Vec<PolicyProblem>) {
    require_columns(None, &class.key, facts, problems);
    let identified = current_schema(facts).is_some_and(|schema| !schema.identifier_field_ids.is_empty());
    if class.key.is_empty() && !identified && facts.format_version < 3 {
        problems.push(PolicyProblem {
            check: None,
            message: format!(
                "class '{}' merges rows by key, names none, and {} has neither identifier fields nor row ids",
                class.name, facts.name
            ),
            next: "write key = [...] in the class".to_owned(),
        });
    }
}

fn check_one(
    check: &CheckDefinition,
    facts: &TableFacts,
    folder: &Path,
    tables: &KnownTables,
    problems: &mut Vec<PolicyProblem>,
) {
    let id = Some(check.id.as_str());
    match &check.kind {
        CheckKind::DuplicateKey { columns, nulls: _, scope } => {
            require_columns(id, columns, facts, problems);
            if *scope == Scope::TouchedPartitions {
                rule_e4(check, columns, facts, problems);
            }
        }
        CheckKind::NotNull { columns, scope: _ } => require_columns(id, columns, facts, problems),
        CheckKind::AcceptedValues { column, values: _, scope: _ } => {
            require_columns(id, [column], facts, problems);
        }
        CheckKind::Referential { columns, references, scope: _ } => {
            require_columns(id, columns, facts, problems);
            if let Some(other) = known(&references.table, id, tables, problems) {
                require_columns(id, &references.columns, other, problems);
            }
        }
        CheckKind::Reconciliation { upstream, by, count, sums, mode: _, absolute: _, relative: _ } => {
            require_columns(id, by.iter().chain(sums.keys()), facts, problems);
            match upstream {
                Upstream::Table { table } => {
                    if let Some(other) = known(table, id, tables, problems) {
                        require_columns(id, by.iter().chain(count).chain(sums.values()), other, problems);
                    }
                }
                Upstream::File { file } => {
                    let path = folder.join(file);
                    if !path.is_file() {
                        problems.push(PolicyProblem {
                            check: Some(check.id.clone()),
                            message: format!("the upstream file {} does not exist", path.display()),
                            next: "paths are relative to the policies folder".to_owned(),
                        });
                    }
                }
            }
        }
        // A query names its columns in its own way; it is planned when it first runs.
        CheckKind::Sql { query: _, tables: others, fence: _ } => {
            for other in others.values() {
                known(other, id, tables, problems);
            }
        }
        CheckKind::RowCount { .. } => {}
    }
}

/// Two rows with one key in two partitions are seen only if the key decides the partition (rule E4).
fn rule_e4(
    check: &CheckDefinition,
    columns: &[String],
    facts: &TableFacts,
    problems: &mut Vec<PolicyProblem>,
) {
    let (Some(spec), Some(schema)) = (facts.specs.get(&facts.default_spec_id), current_schema(facts)) else {
        return;
    };
    for field in &spec.fields {
        if field.transform == "void" {
            continue;
        }
        let source = schema.field(field.source_id).map_or(field.name.as_str(), |f| f.name.as_str());
        if columns.iter().any(|column| column == source) {
            continue;
        }
        problems.push(PolicyProblem {
            check: Some(check.id.clone()),
            message: format!(
                "a duplicate can hide: the table is partitioned by {}({source}), and '{source}' is not in \
                 the key ({}), so rows with one key may lie in partitions that the check does not read",
                field.transform,
                columns.join(", ")
            ),
            next: format!("write scope = \"table\", or add '{source}' to columns"),
        });
    }
}

fn known<'a>(
    table: &TableName,
    check: Option<&str>,
    tables: &'a KnownTables,
    problems: &mut Vec<PolicyProblem>,
) -> Option<&'a TableFacts> {
    match tables.get(table) {
        Some(Some(facts)) => Some(facts),
        // Not looked up: the catalog cannot be reached.
        None => None,
        Some(None) => {
            let names: Vec<String> = tables
                .iter()
                .filter(|(_, facts)| facts.is_some())
                .map(|(name, _)| name.to_string())
                .collect();
            let next = match nearest(&table.to_string(), names.iter().map(String::as_str)) {
                Some(near) => format!("did you mean '{near}'?"),
                None => "create the table, or correct the name".to_owned(),
            };
            problems.push(PolicyProblem {
                check: check.map(str::to_owned),
                message: format!("the catalog has no table {table}"),
                next,
            });
            None
        }
    }
}

fn current_schema(facts: &TableFacts) -> Option<&SchemaFact> {
    facts.schemas.get(&facts.current_schema_id)
}

fn require_columns<'a>(
    check: Option<&str>,
    columns: impl IntoIterator<Item = &'a String>,
    facts: &TableFacts,
    problems: &mut Vec<PolicyProblem>,
) {
    let Some(schema) = current_schema(facts) else { return };
    for column in columns {
        if schema.field_by_name(column).is_some() {
            continue;
        }
        let names = schema.fields.iter().map(|field| field.name.as_str());
        let next = match nearest(column, names) {
            Some(near) => format!("did you mean '{near}'?"),
            None => "name a column of the table's current schema".to_owned(),
        };
        problems.push(PolicyProblem {
            check: check.map(str::to_owned),
            message: format!("{} has no column '{column}'", facts.name),
            next,
        });
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::SpecId;

    use super::*;
    use crate::cli::testing::facts;

    fn problems_of(check: &str) -> Vec<PolicyProblem> {
        problems_on(facts(), check)
    }

    fn problems_on(facts: TableFacts, check: &str) -> Vec<PolicyProblem> {
        let text = format!("table = \"nyc.flights\"\n[[check]]\nid = \"c\"\n{check}");
        let policy = TablePolicy::parse("p.toml", &text).unwrap();
        let mut tables = KnownTables::from([(facts.name.clone(), Some(facts))]);
        for name in tables_of(&policy) {
            tables.entry(name).or_insert(None);
        }
        compare(&policy, Path::new("/policies"), &tables)
    }

    #[test]
    fn rule_e4_a_key_that_does_not_decide_the_partition_needs_table_scope() {
        let key = "type = \"duplicate-key\"\ncolumns = [\"carrier\", \"flight\"]\n";
        let problems = problems_of(key);
        assert_eq!(problems.len(), 1);
        assert!(
            problems[0].message.contains("partitioned by identity(flight_date)"),
            "{}",
            problems[0].message
        );
        assert_eq!(problems[0].next, "write scope = \"table\", or add 'flight_date' to columns");

        assert_eq!(problems_of(&format!("{key}scope = \"table\"\n")), []);
        let whole = "type = \"duplicate-key\"\ncolumns = [\"carrier\", \"flight\", \"flight_date\"]\n";
        assert_eq!(problems_of(whole), []);
    }

    #[test]
    fn rule_e4_unpartitioned_and_void_fields_hide_nothing() {
        let key = "type = \"duplicate-key\"\ncolumns = [\"carrier\"]\n";
        let mut unpartitioned = facts();
        unpartitioned.specs.get_mut(&SpecId(0)).unwrap().fields.clear();
        assert_eq!(problems_on(unpartitioned, key), []);
        let mut void = facts();
        void.specs.get_mut(&SpecId(0)).unwrap().fields[0].transform = "void".to_owned();
        assert_eq!(problems_on(void, key), []);
    }

    #[test]
    fn unknown_columns_and_tables_are_named_with_the_near_one() {
        let problems = problems_of("type = \"not-null\"\ncolumns = [\"carier\", \"origin\"]\n");
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].message, "nyc.flights has no column 'carier'");
        assert_eq!(problems[0].next, "did you mean 'carrier'?");

        let problems = problems_of(
            "type = \"referential\"\ncolumns = [\"carrier\"]\nreferences = { table = \"nyc.airlines\", columns = [\"carrier\"] }\n",
        );
        assert_eq!(problems[0].message, "the catalog has no table nyc.airlines");
    }

    #[test]
    fn a_missing_upstream_file_is_told_with_its_full_path() {
        let problems = problems_of(
            "type = \"reconciliation\"\nmode = \"at-most\"\nupstream = { file = \"totals.csv\" }\nby = [\"origin\"]\ncount = \"flights\"\n",
        );
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].message, "the upstream file /policies/totals.csv does not exist");
    }

    #[test]
    fn an_upstream_table_needs_the_columns_that_are_compared() {
        let problems = problems_of(
            "type = \"reconciliation\"\nmode = \"at-most\"\nupstream = { table = \"nyc.flights\" }\nby = [\"origin\"]\ncount = \"flights\"\nsums = { air_time = \"minutes\" }\n",
        );
        let messages: Vec<&str> = problems.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages, ["nyc.flights has no column 'flights'", "nyc.flights has no column 'minutes'"]);
    }

    #[test]
    fn a_policy_for_a_table_that_is_not_there_has_one_problem() {
        let policy = TablePolicy::parse("p.toml", "table = \"nyc.flihgts\"").unwrap();
        let tables = KnownTables::from([(policy.table.clone(), None), (facts().name, Some(facts()))]);
        let problems = compare(&policy, Path::new(""), &tables);
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].next, "did you mean 'nyc.flights'?");
    }
}
