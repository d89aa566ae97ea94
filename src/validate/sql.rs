//! `sql`: a query of the policy that must return no rows.
//!
//! It reads `candidate` (the whole table at the candidate), `touched` (the candidate's rows in the touched
//! partitions) and `base` (the car's parent), each only if it names it. It is one query: everything else
//! that SQL can say is refused, and so is any other table.

use std::sync::Arc;

use datafusion::execution::context::SQLOptions;
use datafusion::sql::TableReference;
use datafusion::sql::parser::{DFParser, Statement};
use datafusion::sql::resolve::resolve_table_references;
use datafusion::sql::sqlparser::ast;
use datafusion::sql::sqlparser::dialect::GenericDialect;
use futures::TryStreamExt;
use mergeberg_kernel::evidence::Violation;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use mergeberg_kernel::reason::ReasonCode;

use super::CheckError;
use super::finding::{Finding, SAMPLE_KEYS, key_text};
use super::provider::FilesTable;
use super::session::Engine;
use super::subject::{Relation, rows_at};
use super::train::TrainView;
use crate::table::manifests::FileScope;
use crate::table::scan::{RowReader, ScanCounters, ScanFile};

/// Rows that are counted at most; whether there is one decides.
pub const COUNTED_ROWS: u64 = 10_000;

const CANDIDATE: &str = "candidate";
const TOUCHED: &str = "touched";
const BASE: &str = "base";

/// The relations that a query names.
pub struct Relations {
    reader: Arc<RowReader>,
    request: RequestId,
    tables: Vec<(&'static str, Vec<ScanFile>)>,
    counters: Arc<ScanCounters>,
}

impl Relations {
    pub async fn gather(
        view: TrainView<'_>,
        candidate: SnapshotId,
        relation: Relation<'_>,
        query: &str,
        counters: &Arc<ScanCounters>,
    ) -> Result<Self, CheckError> {
        let Relation::Change { car } = relation else {
            return Err(CheckError::Shape("a train where one car belongs".to_owned()));
        };
        let names = named_tables(query)?;
        let mut tables = Vec::with_capacity(names.len());
        for name in names {
            let (snapshot, scope) = match name {
                CANDIDATE => (Some(candidate), FileScope::Table),
                TOUCHED => (Some(candidate), FileScope::Partitions(car.touched.clone())),
                _ => (car.parent, FileScope::Table),
            };
            let files = match snapshot {
                Some(id) => rows_at(view.store, view.table, view.snapshot(id)?, &scope).await?,
                None => Vec::new(),
            };
            tables.push((name, files));
        }
        let reader = Arc::new(RowReader::new(view.table, view.facts().current_schema_id)?);
        Ok(Self { reader, request: car.request, tables, counters: Arc::clone(counters) })
    }
}

pub async fn run(engine: Arc<Engine>, relations: Relations, query: String) -> Result<Finding, CheckError> {
    let Relations { reader, request, tables, counters } = relations;
    let session = engine.session();
    let scope = tables.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    for (name, files) in tables {
        let table = FilesTable::new(Arc::clone(&reader), files, engine.parallelism(), Arc::clone(&counters));
        session.register_table(name, Arc::new(table))?;
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
    Ok(Finding::of(ReasonCode::SqlCheck, scope, vec![("rows".to_owned(), text)], violations))
}

/// The single query of a text.
fn only_query(text: &str) -> Result<Statement, CheckError> {
    let wrong = |message: &str| Err(CheckError::Query(message.to_owned()));
    let mut statements = DFParser::parse_sql_with_dialect(text, &GenericDialect {})
        .map_err(|e| CheckError::Query(e.to_string()))?;
    let Some(statement) = statements.pop_front() else { return wrong("it is empty") };
    if !statements.is_empty() {
        return wrong("it has more than one statement");
    }
    match &statement {
        Statement::Statement(inner) if matches!(inner.as_ref(), ast::Statement::Query(_)) => Ok(statement),
        _ => wrong("it is not a SELECT"),
    }
}

/// The relations that a query reads; any other table is refused.
fn named_tables(query: &str) -> Result<Vec<&'static str>, CheckError> {
    let (references, _) = resolve_table_references(&only_query(query)?, false)?;
    let mut names = Vec::with_capacity(references.len());
    for reference in references {
        let known = match &reference {
            TableReference::Bare { table } => {
                [CANDIDATE, TOUCHED, BASE].into_iter().find(|name| *name == table.as_ref())
            }
            TableReference::Partial { .. } | TableReference::Full { .. } => None,
        };
        match known {
            Some(name) => names.push(name),
            None => {
                return Err(CheckError::Query(format!(
                    "it reads '{reference}'; a check reads candidate, touched and base only"
                )));
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_names_only_what_a_check_may_read() {
        assert_eq!(
            named_tables("SELECT 1 FROM candidate WHERE id IN (SELECT id FROM base)").unwrap().len(),
            2
        );
        assert_eq!(named_tables("WITH t AS (SELECT 1 FROM touched) SELECT * FROM t").unwrap(), ["touched"]);
        for refused in ["SELECT * FROM other", "SELECT * FROM ns.candidate", "SELECT * FROM '/etc/x.csv'"] {
            let error = named_tables(refused).unwrap_err();
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
