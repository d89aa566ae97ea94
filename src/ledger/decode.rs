//! From columns to types and back. A row that no release wrote is an error that names table and id.

use mergeberg_kernel::ids::{RefName, SnapshotId, TableName, TableUuid};
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::LedgerError;
use crate::database::{Column, Row};

/// A closed list of words, as stored and shown.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
        pub enum $name {
            $($(#[$variant_doc])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            pub fn from_word(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|it| it.word() == word)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}
pub(super) use words;

/// One row with the name that errors about it carry.
pub(super) struct Fields<'r> {
    table: &'static str,
    id: String,
    row: &'r Row,
}

impl<'r> Fields<'r> {
    /// `key` is the column (a number or a text) that tells people which row it is.
    pub fn new(table: &'static str, key: &str, row: &'r Row) -> Self {
        let id = row
            .try_get::<i64>(key)
            .map(|id| id.to_string())
            .or_else(|_| row.try_get::<String>(key))
            .unwrap_or_else(|_| format!("without a readable {key}"));
        Self { table, id, row }
    }

    pub fn wrong(&self, what: impl Into<String>) -> LedgerError {
        LedgerError::Row { table: self.table, id: self.id.clone(), what: what.into() }
    }

    pub fn get<T: Column>(&self, column: &str) -> Result<T, LedgerError> {
        self.row.try_get(column).map_err(|e| self.wrong(format!("{column}: {e}")))
    }

    pub fn text(&self, column: &str) -> Result<String, LedgerError> {
        self.get(column)
    }

    pub fn int(&self, column: &str) -> Result<i64, LedgerError> {
        self.get(column)
    }

    /// A number that is stored wider than its type.
    pub fn narrow<T: TryFrom<i64>>(&self, column: &str) -> Result<T, LedgerError> {
        let value = self.int(column)?;
        T::try_from(value).map_err(|_| self.wrong(format!("{column} is {value}, which is out of range")))
    }

    pub fn snapshot(&self, column: &str) -> Result<SnapshotId, LedgerError> {
        Ok(SnapshotId(self.int(column)?))
    }

    pub fn opt_snapshot(&self, column: &str) -> Result<Option<SnapshotId>, LedgerError> {
        Ok(self.get::<Option<i64>>(column)?.map(SnapshotId))
    }

    pub fn table_name(&self) -> Result<TableName, LedgerError> {
        self.text("table_name")?.parse().map_err(|e| self.wrong(format!("table_name: {e}")))
    }

    pub fn table_uuid(&self) -> Result<TableUuid, LedgerError> {
        self.text("table_uuid").map(TableUuid)
    }

    pub fn target(&self) -> Result<RefName, LedgerError> {
        self.text("target").map(RefName)
    }

    pub fn opt_reason(&self, column: &str) -> Result<Option<ReasonCode>, LedgerError> {
        match self.get::<Option<String>>(column)? {
            None => Ok(None),
            Some(code) => match ReasonCode::from_code(&code) {
                Some(reason) => Ok(Some(reason)),
                None => Err(self.wrong(format!("{column} '{code}' is no reason code"))),
            },
        }
    }

    pub fn json<T: DeserializeOwned>(&self, column: &str) -> Result<T, LedgerError> {
        let text = self.text(column)?;
        serde_json::from_str(&text).map_err(|e| self.wrong(format!("{column}: {e}")))
    }

    pub fn opt_json<T: DeserializeOwned>(&self, column: &str) -> Result<Option<T>, LedgerError> {
        match self.get::<Option<String>>(column)? {
            None => Ok(None),
            Some(text) => {
                serde_json::from_str(&text).map(Some).map_err(|e| self.wrong(format!("{column}: {e}")))
            }
        }
    }

    /// A word of one of the closed lists above.
    pub fn word<T>(&self, column: &str, from_word: impl Fn(&str) -> Option<T>) -> Result<T, LedgerError> {
        let word = self.text(column)?;
        from_word(&word).ok_or_else(|| self.wrong(format!("{column} is '{word}', which no release wrote")))
    }
}

/// JSON text of a value of ours.
pub(super) fn to_json<T: Serialize + ?Sized>(value: &T) -> Result<String, LedgerError> {
    serde_json::to_string(value).map_err(LedgerError::Encode)
}

pub(super) fn opt_to_json(value: Option<&serde_json::Value>) -> Result<Option<String>, LedgerError> {
    value.map(to_json).transpose()
}

/// A count as it is stored. Counts beyond 2^63 are clamped: they are for people.
pub(super) fn count(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
