//! `sql`: a query of the policy that must return no rows.
//!
//! It reads `candidate` (the whole table at the candidate), `touched` (the candidate's rows in the touched
//! partitions), `base` (the car's parent) and the other tables that the check names, each only if the query names
//! it. It is one query: everything else that SQL can say is refused, and so is any further table.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::execution::context::SQLOptions;
use datafusion::sql::TableReference;
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use futures::TryStreamExt;
use mergeberg_kernel::evidence::Violation;
use mergeberg_kernel::ids::{RequestId, SnapshotId, TableName};
use mergeberg_kernel::policy::OWN_RELATIONS;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::require_one_reading;

use super::CheckError;
use super::finding::{Finding, SAMPLE_KEYS, key_text};
use super::membership::{self, Memberships};
use super::provider::FilesTable;
use super::session::Engine;
use super::subject::{PinnedTable, Relation, rows_at};
use super::train::TrainView;
use crate::table::manifests::FileScope;
use crate::table::scan::{RowReader, ScanCounters, ScanFile};

/// Rows that are counted at most; whether there is one decides.
pub const COUNTED_ROWS: u64 = 10_000;

/// A query and the other tables that it may read, by the name that it calls them.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    pub query: &'a str,
    pub tables: &'a BTreeMap<String, TableName>,
}

/// The relations that a query names.
pub struct Relations {
    reader: Arc<RowReader>,
    request: RequestId,
    own: Vec<(&'static str, Vec<ScanFile>)>,
    others: Vec<(String, PinnedTable)>,
    counters: Arc<ScanCounters>,
}

impl Relations {
    pub async fn gather(
        view: TrainView<'_>,
        candidate: SnapshotId,
        relation: Relation<'_>,
        named: Named<'_>,
        counters: &Arc<ScanCounters>,
    ) -> Result<Self, CheckError> {
        let Relation::Change { car } = relation else {
            return Err(CheckError::Shape("a train where one car belongs".to_owned()));
        };
        let names = named_tables(named)?;
        let (mut own, mut others) = (Vec::new(), Vec::new());
        for name in names {
            let name = match name {
                Name::Own(name) => name,
                Name::Other(name, table) => {
                    others.push((name, view.pin(&table, counters).await?));
                    continue;
                }
            };
            let (snapshot, scope) = match name {
                "candidate" => (Some(candidate), FileScope::Table),
                "touched" => (Some(candidate), FileScope::Partitions(car.touched.clone())),
                _ => (car.parent, FileScope::Table),
            };
            let files = match snapshot {
                Some(id) => rows_at(view.store, view.table, view.snapshot(id)?, &scope).await?,
                None => Vec::new(),
            };
            own.push((name, files));
        }
        let reader = Arc::new(RowReader::new(view.table, view.facts().current_schema_id)?);
        Ok(Self { reader, request: car.request, own, others, counters: Arc::clone(counters) })
    }
}

pub async fn run(engine: Arc<Engine>, relations: Relations, query: String) -> Result<Finding, CheckError> {
    let Relations { reader, request, own, others, counters } = relations;
    let session = engine.session();
    let names = own.iter().map(|(name, _)| *name).chain(others.iter().map(|(name, _)| name.as_str()));
    let scope = names.collect::<Vec<_>>().join(", ");
    for (name, files) in own {
        let table = FilesTable::new(Arc::clone(&reader), files, engine.parallelism(), Arc::clone(&counters));
        session.register_table(name, Arc::new(table))?;
    }
    let mut measured = Vec::with_capacity(others.len() + 1);
    let mut inputs = Vec::with_capacity(others.len());
    for (name, pinned) in others {
        session.register_table(name, Arc::new(pinned.table(&engine)))?;
        measured.push(pinned.measured());
        inputs.push(pinned.input());
    }
    let plan = session.state().statement_to_plan(only_query(&query)?).await?;
    SQLOptions::new()
        .with_allow_ddl(false)
        .with_allow_dml(false)
        .with_allow_statements(false)
        .verify_plan(&plan)?;
    let result = session.execute_logical_plan(plan).await?;
    let names: Vec<String> = result.schema().fields().iter().map(|f| f.name().clone()).collect();
    let mut stream = result.execute_stream().await?;
    let mut rows = 0u64;
    let mut sample = Vec::new();
    while rows < COUNTED_ROWS {
        let Some(batch) = stream.try_next().await? else { break };
        for row in 0..batch.num_rows() {
            rows += 1;
            if sample.len() < SAMPLE_KEYS {
                sample.push(key_text(&names, &batch, row)?);
            }
        }
    }
    let text = if rows < COUNTED_ROWS { rows.to_string() } else { format!("{rows} or more") };
    let violations = if rows == 0 {
        Vec::new()
    } else {
        vec![Violation { requests: vec![request], with_base: false, count: rows, sample }]
    };
    measured.insert(0, ("rows".to_owned(), text));
    Ok(Finding::of(ReasonCode::SqlCheck, scope, measured, violations).with_inputs(inputs))
}

/// The single query of a text, as the engine is to take it.
fn only_query(text: &str) -> Result<Statement, CheckError> {
    let wrong = |message: &str| Err(CheckError::Query(message.to_owned()));
    let mut statements = DFParser::parse_sql_with_dialect(text, &GenericDialect {})
        .map_err(|e| CheckError::Query(e.to_string()))?;
    let Some(statement) = statements.pop_front() else { return wrong("it is empty") };
    if !statements.is_empty() {
        return wrong("it has more than one statement");
    }
    let Statement::Statement(inner) = statement else { return wrong("it is not a SELECT") };
    let ast::Statement::Query(mut query) = *inner else { return wrong("it is not a SELECT") };
    require_one_reading(query.as_ref()).map_err(|e| CheckError::Query(e.to_string()))?;
    membership::write_out(&mut query, Memberships::LeftToTheEngine)
        .map_err(|e| CheckError::Query(e.to_string()))?;
    Ok(Statement::Statement(Box::new(ast::Statement::Query(query))))
}

/// A relation that a query reads.
#[derive(Debug, PartialEq, Eq)]
enum Name {
    Own(&'static str),
    Other(String, TableName),
}

/// The relations that a query reads; any further table is refused.
fn named_tables(named: Named<'_>) -> Result<Vec<Name>, CheckError> {
    let (references, _) = resolve_table_references(&only_query(named.query)?, false)?;
    let mut names = Vec::with_capacity(references.len());
    for reference in references {
        let known = match &reference {
            TableReference::Bare { table } => {
                OWN_RELATIONS.into_iter().find(|name| *name == table.as_ref()).map(Name::Own).or_else(|| {
                    let (name, other) = named.tables.get_key_value(table.as_ref())?;
                    Some(Name::Other(name.clone(), other.clone()))
                })
            }
            TableReference::Partial { .. } | TableReference::Full { .. } => None,
        };
        match known {
            Some(name) => names.push(name),
            None => {
                return Err(CheckError::Query(format!(
                    "it reads '{reference}'; a check reads candidate, touched, base and the tables that it names \
                     under 'tables'"
                )));
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(query: &str) -> Result<Vec<Name>, CheckError> {
        let tables = BTreeMap::from([("customers".to_owned(), "shop.customers".parse().unwrap())]);
        named_tables(Named { query, tables: &tables })
    }

    #[test]
    fn a_query_names_only_what_a_check_may_read() {
        let own = names("SELECT 1 FROM candidate WHERE id IN (SELECT id FROM base)").unwrap();
        assert_eq!(own.len(), 2);
        let with = names("WITH t AS (SELECT 1 FROM touched) SELECT * FROM t").unwrap();
        assert_eq!(with, [Name::Own("touched")]);
        let other = names("SELECT 1 FROM customers").unwrap();
        assert_eq!(other, [Name::Other("customers".to_owned(), "shop.customers".parse().unwrap())]);
        for refused in [
            "SELECT * FROM other",
            "SELECT * FROM ns.candidate",
            "SELECT * FROM shop.customers",
            "SELECT * FROM '/etc/x.csv'",
        ] {
            let error = names(refused).unwrap_err();
            assert!(matches!(error, CheckError::Query(_)), "{refused}: {error}");
        }
    }

    #[test]
    fn only_one_select_is_a_check() {
        for refused in [
            "",
            "SELECT 1; SELECT 2",
            "DELETE FROM candidate",
            "CREATE TABLE t AS SELECT 1",
            "COPY candidate TO 'x.csv'",
            "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc'",
            "EXPLAIN SELECT 1",
            "SET datafusion.execution.batch_size = 1",
            "SELEC 1",
        ] {
            assert!(matches!(only_query(refused), Err(CheckError::Query(_))), "{refused}");
        }
        assert!(only_query("SELECT 1;").is_ok());
    }
}
