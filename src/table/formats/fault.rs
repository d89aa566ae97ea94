//! What is wrong with a file, before its path is known to who found out.

use super::super::error::TableError;

/// Why the content of a file cannot be read.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::table) enum Fault {
    /// It is not what its format says.
    Corrupt(String),
    /// Nothing is wrong with it, but it is not read here; what to do is said.
    Unsupported(String),
}

pub(in crate::table) type Decoded<T> = Result<T, Fault>;

impl Fault {
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::Corrupt(message.into())
    }

    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::Unsupported(message.into())
    }

    /// The same about the file at `path`.
    pub fn of(self, path: &str) -> TableError {
        match self {
            Self::Corrupt(message) => TableError::corrupt(path, message),
            Self::Unsupported(message) => {
                TableError::Unsupported(format!("{path} cannot be read: {message}"))
            }
        }
    }
}
