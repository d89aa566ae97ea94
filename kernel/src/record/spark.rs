//! Spark's form of SQL, as far as the parser does not take it: a step over the tokens before it.
//!
//! `UPDATE SET *` and `INSERT *` become an assignment of a name that no column can have; `BY NAME` is taken out
//! and told; names in backticks and strings in double quotes become what the engine understands.

use std::any::TypeId;

use sqlparser::ast::Statement;
use sqlparser::dialect::{DatabricksDialect, Dialect};
use sqlparser::keywords::Keyword;
use sqlparser::tokenizer::{Token, TokenWithSpan, Word};

use super::RecordError;
use super::sql::{parser, tokens, unreadable};

/// Stands for `*` in `UPDATE SET *` and `INSERT *`.
pub(super) const ALL: &str = "\u{1}*";

/// Spark SQL: as Databricks', with escapes in strings.
#[derive(Debug)]
struct SparkDialect(DatabricksDialect);

impl Dialect for SparkDialect {
    fn dialect(&self) -> TypeId {
        self.0.dialect()
    }

    fn is_delimited_identifier_start(&self, ch: char) -> bool {
        self.0.is_delimited_identifier_start(ch)
    }

    fn is_identifier_start(&self, ch: char) -> bool {
        self.0.is_identifier_start(ch)
    }

    fn is_identifier_part(&self, ch: char) -> bool {
        self.0.is_identifier_part(ch)
    }

    fn supports_string_literal_backslash_escape(&self) -> bool {
        true
    }

    fn supports_filter_during_aggregation(&self) -> bool {
        self.0.supports_filter_during_aggregation()
    }

    fn supports_group_by_expr(&self) -> bool {
        self.0.supports_group_by_expr()
    }

    fn supports_table_versioning(&self) -> bool {
        self.0.supports_table_versioning()
    }

    fn supports_select_wildcard_except(&self) -> bool {
        self.0.supports_select_wildcard_except()
    }

    fn require_interval_qualifier(&self) -> bool {
        self.0.require_interval_qualifier()
    }

    fn supports_struct_literal(&self) -> bool {
        self.0.supports_struct_literal()
    }

    fn supports_nested_comments(&self) -> bool {
        self.0.supports_nested_comments()
    }

    fn supports_group_by_with_modifier(&self) -> bool {
        self.0.supports_group_by_with_modifier()
    }

    fn supports_values_as_table_factor(&self) -> bool {
        self.0.supports_values_as_table_factor()
    }
}

/// One statement, with whether its columns are matched `BY NAME`.
pub(super) fn parse(text: &str) -> Result<(Statement, bool), RecordError> {
    let dialect = SparkDialect(DatabricksDialect {});
    let tokens = tokens(&dialect, text)?;
    plain_numbers(&tokens)?;
    let (tokens, by_name) = prepare(tokens);
    let mut parser = parser(&dialect, tokens);
    let mut statements = parser.parse_statements().map_err(|e| unreadable(text, &e))?;
    match (statements.pop(), statements.is_empty()) {
        (Some(one), true) => Ok((one, by_name)),
        (None, _) => Err(RecordError::Sql("the record holds no statement".to_owned())),
        (Some(_), false) => Err(RecordError::Sql("the record holds more than one statement".to_owned())),
    }
}

/// `1.5BD`, `3S`: Spark's kinds of numbers, which the parser would take for a number and a name.
fn plain_numbers(tokens: &[TokenWithSpan]) -> Result<(), RecordError> {
    for pair in tokens.windows(2) {
        if let [
            TokenWithSpan { token: Token::Number(digits, _), .. },
            TokenWithSpan { token: Token::Word(kind), .. },
        ] = pair
        {
            return Err(RecordError::Sql(format!(
                "the number {digits}{kind} is not supported in a recorded statement; write it with CAST"
            )));
        }
    }
    Ok(())
}

/// `PARTITION (day = 20) (id, status)`: Spark names columns after the partition, the parser reads them before it.
fn columns_before_partition(tokens: &mut [TokenWithSpan]) {
    let is_word = |token: &TokenWithSpan, keyword: Keyword| matches!(&token.token, Token::Word(word) if word.keyword == keyword);
    let closing = |from: usize| {
        let mut depth = 0_usize;
        for (at, token) in tokens.iter().enumerate().skip(from) {
            match token.token {
                Token::LParen => depth += 1,
                Token::RParen if depth <= 1 => return Some(at),
                Token::RParen => depth -= 1,
                _ => {}
            }
        }
        None
    };
    if !tokens.first().is_some_and(|token| is_word(token, Keyword::INSERT)) {
        return;
    }
    let opens = |at: usize| tokens.get(at).is_some_and(|token| token.token == Token::LParen);
    let Some(partition) = tokens.iter().position(|token| is_word(token, Keyword::PARTITION)) else { return };
    let Some(end) = opens(partition + 1).then(|| closing(partition + 1)).flatten() else { return };
    let Some(last) = opens(end + 1).then(|| closing(end + 1)).flatten() else { return };
    let names = tokens.get(end + 2..last).unwrap_or_default();
    let only_names = names.iter().enumerate().all(|(at, token)| match &token.token {
        Token::Word(word) => at % 2 == 0 && word.keyword != Keyword::SELECT,
        Token::Comma => at % 2 == 1,
        _ => false,
    });
    if only_names && let Some(both) = tokens.get_mut(partition..=last) {
        both.rotate_left(end + 1 - partition);
    }
}

fn prepare(given: Vec<TokenWithSpan>) -> (Vec<TokenWithSpan>, bool) {
    let mut meant: Vec<TokenWithSpan> =
        given.into_iter().filter(|t| !matches!(t.token, Token::Whitespace(_))).collect();
    columns_before_partition(&mut meant);
    let word = |at: usize, keyword: Keyword| matches!(meant.get(at).map(|t| &t.token), Some(Token::Word(word)) if word.keyword == keyword);
    let star = |at: usize| matches!(meant.get(at).map(|t| &t.token), Some(Token::Mul));
    let mut made = Vec::with_capacity(meant.len());
    let mut by_name = false;
    let mut depth = 0_usize;
    let mut at = 0;
    while let Some(token) = meant.get(at) {
        let span = token.span;
        let mut push = |token: Token| made.push(TokenWithSpan::new(token, span));
        match &token.token {
            Token::Mul if at > 0 && word(at - 1, Keyword::SET) => {
                [all(), Token::Eq, all()].into_iter().for_each(push);
            }
            Token::Word(insert) if insert.keyword == Keyword::INSERT && star(at + 1) => {
                push(token.token.clone());
                [Token::LParen, all(), Token::RParen, Token::make_keyword("VALUES")]
                    .into_iter()
                    .chain([Token::LParen, all(), Token::RParen])
                    .for_each(push);
                at += 1;
            }
            // `INSERT INTO t BY NAME SELECT`: outside of any parenthesis, and before the query.
            Token::Word(by)
                if depth == 0 && !by_name && by.keyword == Keyword::BY && word(at + 1, Keyword::NAME) =>
            {
                by_name = word(0, Keyword::INSERT);
                if by_name {
                    at += 1;
                } else {
                    push(token.token.clone());
                }
            }
            Token::Word(word) if word.quote_style == Some('`') => {
                // Spark compares these without regard to case too; the engine takes quoted names as they are.
                push(Token::make_word(&word.value.to_lowercase(), Some('"')));
            }
            Token::DoubleQuotedString(text) => push(Token::SingleQuotedString(text.clone())),
            other => {
                match other {
                    Token::LParen => depth += 1,
                    Token::RParen => depth = depth.saturating_sub(1),
                    _ => {}
                }
                push(other.clone());
            }
        }
        at += 1;
    }
    (made, by_name)
}

fn all() -> Token {
    Token::Word(Word { value: ALL.to_owned(), quote_style: Some('"'), keyword: Keyword::NoKeyword })
}
