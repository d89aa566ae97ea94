//! Recorded operations run again: an operation becomes files for a car.
//!
//! Owns the reading of recorded SQL and the replay of `overwrite-where`. Appends and replaced partitions
//! need no engine: they are metadata only, and the worker stages them itself.

pub mod filter;
pub mod overwrite;

use datafusion::sql::sqlparser::dialect::GenericDialect;
use datafusion::sql::sqlparser::tokenizer::{Token, Tokenizer};
use mergeberg_kernel::reason::ReasonCode;

pub use overwrite::{ReplayInput, Replayed, overwrite_where};

use crate::table::catalog::CatalogError;
use crate::table::error::TableError;

/// Name under which a recorded query reads the target, at the car's parent.
pub const TARGET_ALIAS: &str = "target";

/// Why an operation could not be run again.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The request's own trouble: it is refused.
    #[error("{text}")]
    Request { code: ReasonCode, text: String },
    /// Infrastructure: tried again.
    #[error(transparent)]
    Table(TableError),
    #[error(transparent)]
    Catalog(#[from] CatalogError),
}

impl ReplayError {
    pub fn request(code: ReasonCode, text: impl Into<String>) -> Self {
        Self::Request { code, text: text.into() }
    }
}

impl From<TableError> for ReplayError {
    fn from(error: TableError) -> Self {
        if error.is_own_fault() {
            Self::Request { code: error.reason(), text: error.to_string() }
        } else {
            Self::Table(error)
        }
    }
}

/// Does the query name this table anywhere? Whatever cannot be read counts as yes, which is the stricter
/// answer.
pub fn reads_table(query: &str, alias: &str) -> bool {
    let dialect = GenericDialect {};
    match Tokenizer::new(&dialect, query).tokenize() {
        Ok(tokens) => tokens.iter().any(|token| matches!(token, Token::Word(word) if word.value == alias)),
        Err(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_reads_the_target_only_when_it_names_it() {
        assert!(reads_table("SELECT * FROM target JOIN a USING (x)", TARGET_ALIAS));
        assert!(reads_table("SELECT * FROM \"target\"", TARGET_ALIAS));
        assert!(!reads_table("SELECT 'target' AS word FROM raw", TARGET_ALIAS));
        assert!(reads_table("SELECT 'unclosed FROM raw", TARGET_ALIAS), "unreadable text counts as yes");
    }
}
