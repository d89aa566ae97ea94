//! What would give another result when it is run again.

use std::ops::ControlFlow;

use sqlparser::ast::{Expr, Query, TableFactor, Visit, Visitor};

use super::RecordError;

/// Functions of Spark and DataFusion whose value depends on when, where or how they run.
const VARYING: [&str; 40] = [
    "any_value",
    "curdate",
    "current_catalog",
    "current_database",
    "current_date",
    "current_recipient",
    "current_schema",
    "current_time",
    "current_timestamp",
    "current_timezone",
    "current_user",
    "first",
    "get_current_time",
    "getdate",
    "input_file_block_length",
    "input_file_block_start",
    "input_file_name",
    "java_method",
    "last",
    "localtime",
    "localtimestamp",
    "monotonically_increasing_id",
    "now",
    "rand",
    "randn",
    "random",
    "randstr",
    "reflect",
    "session_user",
    "session_window",
    "shuffle",
    "spark_partition_id",
    "sysdate",
    "systimestamp",
    "today",
    "uniform",
    "user",
    "uuid",
    "uuid_string",
    "version",
];
/// These do so only without arguments.
const VARYING_WITHOUT_ARGUMENTS: [&str; 2] = ["to_unix_timestamp", "unix_timestamp"];

/// Refuses what varies in an expression or query.
pub(super) fn check(sql: &impl Visit) -> Result<(), RecordError> {
    match sql.visit(&mut Varying) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(what) => Err(RecordError::NotDeterministic(what)),
    }
}

struct Varying;

impl Visitor for Varying {
    type Break = String;

    fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<String> {
        if let Expr::Function(function) = expr {
            let Some(name) = function.name.0.last().and_then(|part| part.as_ident()) else {
                return ControlFlow::Break(function.to_string());
            };
            let name = name.value.to_lowercase();
            let bare = match &function.args {
                sqlparser::ast::FunctionArguments::None => true,
                sqlparser::ast::FunctionArguments::List(list) => list.args.is_empty(),
                sqlparser::ast::FunctionArguments::Subquery(_) => false,
            };
            let varies = VARYING.contains(&name.as_str())
                || (bare && VARYING_WITHOUT_ARGUMENTS.contains(&name.as_str()));
            if varies {
                return ControlFlow::Break(format!("function {name}()"));
            }
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<String> {
        let cut = query.limit_clause.is_some() || query.fetch.is_some();
        if cut && query.order_by.is_none() {
            return ControlFlow::Break("LIMIT without ORDER BY".to_owned());
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> ControlFlow<String> {
        match factor {
            TableFactor::Table { sample: Some(_), .. } | TableFactor::Derived { sample: Some(_), .. } => {
                ControlFlow::Break("TABLESAMPLE".to_owned())
            }
            _ => ControlFlow::Continue(()),
        }
    }
}
