//! The tables that recorded SQL names: the target, pinned inputs, and nothing else (rule S1).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, Ident, ObjectName, ObjectNamePart, Query, TableAlias, TableFactor, TableVersion, Value, VisitMut,
    VisitorMut,
};

use super::{Names, PinnedInput, RecordError, TARGET_ALIAS, sql};
use crate::ids::{SnapshotId, TableName};

/// Prefix of the name by which Spark reaches a branch of a table: `shop.orders.branch_audit`.
const BRANCH: &str = "branch_";
/// Prefix of the name by which Spark reads a table at a snapshot: `shop.orders.snapshot_id_17`.
const SNAPSHOT: &str = "snapshot_id_";

/// Reads names of tables, and remembers which were read.
pub(super) struct Tables<'a> {
    pub target: &'a TableName,
    pub names: Names,
    pub parameters: &'a BTreeMap<String, Value>,
    /// Those of the record, and those that the statement pins itself.
    pub inputs: BTreeMap<String, PinnedInput>,
    pub reads_target: bool,
    /// Names of the statement's own WITH queries.
    with: BTreeSet<String>,
}

/// What a name means.
enum Meaning {
    Target,
    Input(String),
}

impl<'a> Tables<'a> {
    pub fn new(
        target: &'a TableName,
        names: Names,
        inputs: BTreeMap<String, PinnedInput>,
        parameters: &'a BTreeMap<String, Value>,
    ) -> Self {
        Self { target, names, parameters, inputs, reads_target: false, with: BTreeSet::new() }
    }

    /// Gives every table in the SQL its alias, and every parameter its value.
    pub fn resolve(&mut self, sql: &mut impl VisitMut) -> Result<(), RecordError> {
        let mut with = WithNames(BTreeSet::new());
        let _ = sql.visit(&mut with);
        self.with = with.0;
        match sql.visit(self) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(error) => Err(error),
        }
    }

    /// Is this the table that is written, or a branch of it?
    pub fn check_written(&self, name: &ObjectName) -> Result<(), RecordError> {
        let parts = parts(name)?;
        match self.meaning(&parts) {
            Some((Meaning::Target, None)) => Ok(()),
            _ => Err(RecordError::OtherTarget { written: name.to_string(), target: self.target.to_string() }),
        }
    }

    fn same(&self, one: &str, other: &str) -> bool {
        match self.names {
            Names::Exact => one == other,
            Names::AnyCase => one.to_lowercase() == other.to_lowercase(),
        }
    }

    /// `[catalog.]namespace.table`, in any number of levels.
    fn is_table(&self, parts: &[&str], table: &TableName) -> bool {
        let full: Vec<&str> =
            table.namespace.iter().map(String::as_str).chain([table.name.as_str()]).collect();
        let Some(extra) = parts.len().checked_sub(full.len()) else { return false };
        extra <= 1 && parts.iter().skip(extra).zip(&full).all(|(a, b)| self.same(a, b))
    }

    /// The table, with the snapshot that its name pins.
    fn meaning(&self, parts: &[&str]) -> Option<(Meaning, Option<i64>)> {
        if let [one] = parts {
            if let Some(alias) = self.inputs.keys().find(|alias| self.same(alias, one)) {
                return Some((Meaning::Input(alias.clone()), None));
            }
            if self.same(one, TARGET_ALIAS)
                || (self.names == Names::AnyCase && self.same(one, &self.target.name))
            {
                return Some((Meaning::Target, None));
            }
            return None;
        }
        if self.names == Names::Exact {
            return None;
        }
        if self.is_table(parts, self.target) {
            return Some((Meaning::Target, None));
        }
        let mut inputs = self.inputs.iter();
        if let Some((alias, _)) = inputs.find(|(_, input)| self.is_table(parts, &input.table)) {
            return Some((Meaning::Input(alias.clone()), None));
        }
        let (last, table) = parts.split_last()?;
        let last = last.to_lowercase();
        if last.starts_with(BRANCH) && self.is_table(table, self.target) {
            return Some((Meaning::Target, None));
        }
        let snapshot: i64 = last.strip_prefix(SNAPSHOT)?.parse().ok()?;
        let (meaning, _) = self.meaning(table).or_else(|| Some((self.new_input(table, snapshot)?, None)))?;
        Some((meaning, Some(snapshot)))
    }

    /// A table that only the statement itself names, with a pin. Without a namespace there is no telling.
    fn new_input(&self, parts: &[&str], snapshot: i64) -> Option<Meaning> {
        let table: TableName = parts.join(".").parse().ok()?;
        Some(Meaning::Input(format!("{table}@{snapshot}")))
    }

    fn read(&mut self, name: &ObjectName, version: Option<&TableVersion>) -> Result<String, RecordError> {
        let parts = parts(name)?;
        let by_clause = match version {
            None => None,
            Some(TableVersion::VersionAsOf(Expr::Value(value))) => match &value.value {
                Value::Number(digits, _) => digits.parse::<i64>().ok(),
                Value::SingleQuotedString(text) => text.parse::<i64>().ok(),
                _ => None,
            },
            Some(_) => None,
        };
        if let Some(version) = version
            && by_clause.is_none()
        {
            return Err(RecordError::Sql(format!(
                "'{name}{version}' is no pin; give the snapshot id, as in VERSION AS OF 5937117119577207079"
            )));
        }
        let found = match (self.meaning(&parts), by_clause) {
            (None, Some(snapshot)) => self.new_input(&parts, snapshot).map(|new| (new, Some(snapshot))),
            (Some((meaning, None)), Some(snapshot)) => Some((meaning, Some(snapshot))),
            (found, _) => found,
        };
        match found {
            None => Err(RecordError::Unpinned(name.to_string())),
            Some((Meaning::Target, Some(_))) => Err(RecordError::PinsTarget { alias: name.to_string() }),
            Some((Meaning::Target, None)) => {
                self.reads_target = true;
                Ok(TARGET_ALIAS.to_owned())
            }
            Some((Meaning::Input(alias), None)) => Ok(alias),
            Some((Meaning::Input(alias), Some(snapshot))) => self.pin(alias, snapshot),
        }
    }

    /// The alias of a table at this snapshot. The statement may read one table at several.
    fn pin(&mut self, alias: String, snapshot: i64) -> Result<String, RecordError> {
        let snapshot_id = SnapshotId(snapshot);
        let (table, uuid) = match self.inputs.get(&alias) {
            Some(input) if input.snapshot_id == snapshot_id => return Ok(alias),
            Some(input) => (input.table.clone(), input.uuid.clone()),
            None => {
                let name = alias.split('@').next().unwrap_or_default();
                (name.parse().map_err(|_| RecordError::Unpinned(name.to_owned()))?, None)
            }
        };
        let alias = format!("{table}@{snapshot}");
        self.inputs.insert(alias.clone(), PinnedInput { table, snapshot_id, uuid });
        Ok(alias)
    }
}

fn parts(name: &ObjectName) -> Result<Vec<&str>, RecordError> {
    let all: Option<Vec<&str>> =
        name.0.iter().map(|part| part.as_ident().map(|ident| ident.value.as_str())).collect();
    all.ok_or_else(|| RecordError::Sql(format!("'{name}' is no name of a table")))
}

impl VisitorMut for Tables<'_> {
    type Break = RecordError;

    fn pre_visit_table_factor(&mut self, factor: &mut TableFactor) -> ControlFlow<RecordError> {
        let TableFactor::Table { name, alias, args: None, version, .. } = factor else {
            return match factor {
                TableFactor::Derived { .. } | TableFactor::NestedJoin { .. } => ControlFlow::Continue(()),
                other => {
                    ControlFlow::Break(RecordError::Sql(format!("'{other}' is not read from; name a table")))
                }
            };
        };
        if let [ObjectNamePart::Identifier(one)] = name.0.as_slice()
            && self.with.iter().any(|own| self.same(own, &one.value))
        {
            return ControlFlow::Continue(());
        }
        let found = match self.read(name, version.as_ref()) {
            Ok(found) => found,
            Err(error) => return ControlFlow::Break(error),
        };
        // Columns may be qualified by the name that the statement gave the table.
        let spoken = name.0.iter().rev().filter_map(ObjectNamePart::as_ident).find(|part| {
            let part = part.value.to_lowercase();
            !part.starts_with(BRANCH) && !part.starts_with(SNAPSHOT)
        });
        if alias.is_none()
            && let Some(spoken) = spoken.cloned()
        {
            *alias = Some(TableAlias { explicit: true, name: spoken, columns: Vec::new() });
        }
        *name = ObjectName(vec![ObjectNamePart::Identifier(Ident::with_quote('"', found))]);
        *version = None;
        ControlFlow::Continue(())
    }

    fn pre_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<RecordError> {
        sql::one_reading(expr)
    }

    fn pre_visit_value(&mut self, value: &mut Value) -> ControlFlow<RecordError> {
        let Value::Placeholder(placeholder) = value else { return ControlFlow::Continue(()) };
        let name = placeholder.trim_start_matches([':', '$', '@']);
        match self.parameters.get(name) {
            Some(given) => {
                *value = given.clone();
                ControlFlow::Continue(())
            }
            None => ControlFlow::Break(RecordError::Sql(format!(
                "parameter '{placeholder}' has no value in 'parameters'"
            ))),
        }
    }
}

struct WithNames(BTreeSet<String>);

impl VisitorMut for WithNames {
    type Break = ();

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<()> {
        if let Some(with) = &query.with {
            self.0.extend(with.cte_tables.iter().map(|cte| cte.alias.name.value.clone()));
        }
        ControlFlow::Continue(())
    }
}
