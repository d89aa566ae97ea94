//! SQL of a record, parsed once. What does not parse has no value here.

use std::fmt;
use std::ops::ControlFlow;

use sqlparser::ast::{BinaryOperator, Expr, Ident, Query, Visit, Visitor};
use sqlparser::dialect::{Dialect, GenericDialect};
use sqlparser::parser::Parser;
use sqlparser::tokenizer::{Token, TokenWithSpan, Tokenizer};

use super::RecordError;

/// Nesting of an expression or query that is read.
const MAX_DEPTH: usize = 64;

/// No column has this name.
const DEFAULT: &str = "\u{1}default";

/// An expression: a condition, or a value.
#[derive(Clone, PartialEq, Eq)]
pub struct Condition(pub(super) Box<Expr>);

/// One query.
#[derive(Clone, PartialEq, Eq)]
pub struct Select(pub(super) Box<Query>);

impl Condition {
    /// Reads one expression and nothing behind it.
    pub fn parse(text: &str) -> Result<Self, RecordError> {
        let dialect = GenericDialect {};
        let tokens = tokens(&dialect, text)?;
        let mut parser = parser(&dialect, tokens);
        let expr = parser.parse_expr().map_err(|e| unreadable(text, &e))?;
        at_end(&mut parser, text)?;
        Ok(Self(Box::new(expr)))
    }

    /// Stands for `DEFAULT` in the place of a value: the name of no column.
    pub fn default_value() -> Self {
        Self(Box::new(Expr::Identifier(Ident::with_quote('"', DEFAULT))))
    }

    pub fn expr(&self) -> &Expr {
        &self.0
    }
}

impl Select {
    /// Reads one query and nothing behind it.
    pub fn parse(text: &str) -> Result<Self, RecordError> {
        let dialect = GenericDialect {};
        let tokens = tokens(&dialect, text)?;
        let mut parser = parser(&dialect, tokens);
        let query = parser.parse_query().map_err(|e| unreadable(text, &e))?;
        at_end(&mut parser, text)?;
        Ok(Self(query))
    }

    pub fn query(&self) -> &Query {
        &self.0
    }
}

pub(super) fn tokens(dialect: &dyn Dialect, text: &str) -> Result<Vec<TokenWithSpan>, RecordError> {
    Tokenizer::new(dialect, text)
        .tokenize_with_location()
        .map_err(|e| RecordError::Sql(format!("'{}': {e}", short(text))))
}

pub(super) fn parser<'a>(dialect: &'a dyn Dialect, tokens: Vec<TokenWithSpan>) -> Parser<'a> {
    Parser::new(dialect).with_recursion_limit(MAX_DEPTH).with_tokens_with_locations(tokens)
}

pub(super) fn unreadable(text: &str, error: &dyn fmt::Display) -> RecordError {
    RecordError::Sql(format!("'{}': {error}", short(text)))
}

fn at_end(parser: &mut Parser<'_>, text: &str) -> Result<(), RecordError> {
    let rest = parser.peek_token();
    if rest.token == Token::EOF {
        Ok(())
    } else {
        Err(RecordError::Sql(format!("'{}': unexpected '{rest}'", short(text))))
    }
}

/// Refuses an expression or query that the parser reads in another way than it is written.
pub fn require_one_reading(sql: &impl Visit) -> Result<(), RecordError> {
    struct Readings;
    impl Visitor for Readings {
        type Break = RecordError;
        fn pre_visit_expr(&mut self, expr: &Expr) -> ControlFlow<RecordError> {
            one_reading(expr)
        }
    }
    match sql.visit(&mut Readings) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(error) => Err(error),
    }
}

/// The parser takes everything behind `IS [NOT] DISTINCT FROM` as its right side, `AND` and `OR` included.
pub(super) fn one_reading(expr: &Expr) -> ControlFlow<RecordError> {
    if let Expr::IsDistinctFrom(_, right) | Expr::IsNotDistinctFrom(_, right) = expr
        && let Expr::BinaryOp { op: BinaryOperator::And | BinaryOperator::Or, .. } = right.as_ref()
    {
        return ControlFlow::Break(RecordError::Sql(format!(
            "'{expr}' can be read in two ways; put parentheses around the comparison with DISTINCT FROM"
        )));
    }
    ControlFlow::Continue(())
}

/// Text for a message: at most 200 characters.
fn short(text: &str) -> String {
    const MOST: usize = 200;
    if text.chars().count() <= MOST {
        return text.to_owned();
    }
    text.chars().take(MOST).chain("...".chars()).collect()
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

impl fmt::Display for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Select {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}
