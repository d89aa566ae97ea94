//! `x IN (SELECT ...)` where it matters whether it is false or unknown.
//!
//! The engine plans it as a join that knows rows found and rows not found, and takes nulls into account only for
//! a `NOT IN` that is a condition of its own. Elsewhere under a `NOT`, or beside an `OR`, unknown would become
//! false. There it is written out: found, or unknown when the value or one of the others is null. So is every
//! `NOT IN` for an engine that is to sort what it joins: its join for them holds one side in memory.

use std::ops::ControlFlow;

use datafusion::sql::sqlparser::ast::{
    BinaryOperator, Expr, Ident, Query, SetExpr, UnaryOperator, VisitMut, VisitorMut,
};
use mergeberg_kernel::record::{Condition, RecordError};

/// Name of the subquery that was written out.
const AMONG: &str = "\u{1}among";
/// Name of its one column.
const ONE: &str = "\u{1}one";

/// What becomes of a `NOT IN` that is a condition of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memberships {
    LeftToTheEngine,
    WrittenOut,
}

/// Writes them out wherever it matters in a query.
pub fn write_out(query: &mut Query, memberships: Memberships) -> Result<(), RecordError> {
    match query.visit(&mut Queries { alone: memberships == Memberships::LeftToTheEngine }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

/// Looks at every query, inner ones after those around them.
struct Queries {
    /// A `NOT IN` that is a condition of its own stays.
    alone: bool,
}

impl VisitorMut for Queries {
    type Break = RecordError;

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<RecordError> {
        match in_body(&mut query.body, self.alone) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(error),
        }
    }
}

fn in_body(body: &mut SetExpr, alone: bool) -> Result<(), RecordError> {
    match body {
        SetExpr::Select(select) => match &mut select.selection {
            Some(filter) => in_filter(filter, alone),
            None => Ok(()),
        },
        SetExpr::SetOperation { left, right, .. } => {
            in_body(left, alone)?;
            in_body(right, alone)
        }
        // Looked at as a query of its own.
        _ => Ok(()),
    }
}

/// `alone`: the expression is a condition of its own, not one side of an `OR`.
fn in_filter(expr: &mut Expr, alone: bool) -> Result<(), RecordError> {
    match expr {
        Expr::Nested(inner) => in_filter(inner, alone),
        Expr::BinaryOp { left, op: BinaryOperator::And, right } => {
            in_filter(left, alone)?;
            in_filter(right, alone)
        }
        Expr::BinaryOp { left, op: BinaryOperator::Or, right } => {
            in_filter(left, false)?;
            in_filter(right, false)
        }
        // Found or not: unknown and false are the same to a filter.
        Expr::InSubquery { negated: false, .. } => Ok(()),
        Expr::InSubquery { negated: true, .. } if alone => Ok(()),
        Expr::UnaryOp { op: UnaryOperator::Not, expr: inner } if alone && is_membership(inner) => Ok(()),
        other => everywhere(other),
    }
}

fn is_membership(expr: &Expr) -> bool {
    match expr {
        Expr::Nested(inner) => is_membership(inner),
        Expr::InSubquery { negated: false, .. } => true,
        _ => false,
    }
}

fn everywhere(expr: &mut Expr) -> Result<(), RecordError> {
    match expr.visit(&mut InExpression { depth: 0 }) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

/// Every membership of one expression; queries inside it are looked at by themselves.
struct InExpression {
    depth: usize,
}

impl VisitorMut for InExpression {
    type Break = RecordError;

    fn pre_visit_query(&mut self, _query: &mut Query) -> ControlFlow<RecordError> {
        self.depth += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _query: &mut Query) -> ControlFlow<RecordError> {
        self.depth -= 1;
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<RecordError> {
        if self.depth > 0 {
            return ControlFlow::Continue(());
        }
        let Expr::InSubquery { expr: value, subquery, negated } = expr else {
            return ControlFlow::Continue(());
        };
        match written_out(value, subquery) {
            Ok(membership) if *negated => {
                *expr = Expr::UnaryOp { op: UnaryOperator::Not, expr: Box::new(membership) };
                ControlFlow::Continue(())
            }
            Ok(membership) => {
                *expr = membership;
                ControlFlow::Continue(())
            }
            Err(error) => ControlFlow::Break(error),
        }
    }
}

/// Found, or unknown and (the value is null and there are others, or one of the others is null).
fn written_out(value: &Expr, among: &Query) -> Result<Expr, RecordError> {
    let form = format!(
        "(EXISTS (SELECT 1 FROM (SELECT 1) AS \"{AMONG}\" (\"{ONE}\") WHERE \"{ONE}\" = \"{ONE}value\") OR \
         (CAST(NULL AS BOOLEAN) AND \
         ((\"{ONE}value\" IS NULL AND EXISTS (SELECT 1 FROM (SELECT 1) AS \"{AMONG}\" (\"{ONE}\"))) OR \
         EXISTS (SELECT 1 FROM (SELECT 1) AS \"{AMONG}\" (\"{ONE}\") WHERE \"{ONE}\" IS NULL))))"
    );
    let mut expr = Condition::parse(&form)?.expr().clone();
    let _ = expr.visit(&mut FillIn { value, among });
    Ok(expr)
}

/// Puts value and query where the form has places for them.
struct FillIn<'a> {
    value: &'a Expr,
    among: &'a Query,
}

impl VisitorMut for FillIn<'_> {
    type Break = ();

    fn pre_visit_table_factor(
        &mut self,
        factor: &mut datafusion::sql::sqlparser::ast::TableFactor,
    ) -> ControlFlow<()> {
        if let datafusion::sql::sqlparser::ast::TableFactor::Derived { subquery, alias: Some(alias), .. } =
            factor
            && alias.name.value == AMONG
        {
            **subquery = self.among.clone();
        }
        ControlFlow::Continue(())
    }

    fn post_visit_expr(&mut self, expr: &mut Expr) -> ControlFlow<()> {
        if matches!(&*expr, Expr::Identifier(Ident { value, .. }) if *value == format!("{ONE}value")) {
            *expr = Expr::Nested(Box::new(self.value.clone()));
        }
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::record::Select;

    use super::*;

    fn written(filter: &str) -> String {
        let mut query = Select::parse(&format!("SELECT 1 FROM t WHERE {filter}")).unwrap().query().clone();
        write_out(&mut query, Memberships::LeftToTheEngine).unwrap();
        query.to_string()
    }

    #[test]
    fn it_is_left_to_the_engine_where_unknown_and_false_are_the_same() {
        for filter in [
            "a IN (SELECT b FROM u)",
            "x = 1 AND (a IN (SELECT b FROM u) OR y = 2)",
            "x = 1 AND a NOT IN (SELECT b FROM u)",
            "NOT (a IN (SELECT b FROM u))",
            "a IN (1, NULL)",
        ] {
            assert_eq!(written(filter), format!("SELECT 1 FROM t WHERE {filter}"));
        }
    }

    #[test]
    fn it_is_written_out_where_unknown_counts() {
        for filter in [
            "x = 1 OR a NOT IN (SELECT b FROM u)",
            "NOT (a IN (SELECT b FROM u) AND x = 1)",
            "(a IN (SELECT b FROM u)) IS NULL",
            "a IN (SELECT b FROM u WHERE NOT (b IN (SELECT c FROM v) OR b = 1))",
        ] {
            let text = written(filter);
            assert!(text.contains("EXISTS") && text.contains("CAST(NULL AS BOOLEAN)"), "{text}");
        }
    }
}
