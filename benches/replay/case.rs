//! What is measured, and where it is.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// One request that has to be rebased.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    pub name: String,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Every partition is replaced: so many files go, and as many come.
    ReplacePartitions { files: usize },
    /// So many files are appended.
    Append { files: usize },
    /// A MERGE of `source` rows, half of which are there, into `target` rows in `days` partitions.
    Merge { target: usize, source: usize, days: usize },
}

/// Where a case's table, ledger and policy are.
#[derive(Clone, Debug)]
pub struct Place {
    pub folder: PathBuf,
}

impl Place {
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    pub fn catalog(&self) -> PathBuf {
        self.folder.join("catalog.db")
    }

    pub fn ledger(&self) -> PathBuf {
        self.folder.join("ledger.db")
    }

    pub fn policies(&self) -> PathBuf {
        self.folder.join("policies")
    }

    pub fn warehouse(&self) -> String {
        format!("file://{}", self.folder.join("warehouse").display())
    }

    /// Files that the target has before the request lands, and those of the source: what DuckDB is given.
    pub fn inputs(&self) -> PathBuf {
        self.folder.join("inputs.json")
    }

    pub fn case(&self) -> anyhow::Result<Case> {
        let path = self.folder.join("case.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(serde_json::from_str(&text)?)
    }

    pub fn write_case(&self, case: &Case) -> anyhow::Result<()> {
        Ok(std::fs::write(self.folder.join("case.json"), serde_json::to_string(case)?)?)
    }

    fn databases(&self) -> [PathBuf; 2] {
        [self.catalog(), self.ledger()]
    }

    /// Keeps the present state. The databases must be closed. Files of the warehouse are never changed once written.
    pub fn keep(&self) -> anyhow::Result<()> {
        for database in self.databases() {
            std::fs::copy(&database, kept(&database))?;
        }
        Ok(())
    }

    /// Puts it back. The databases must be closed.
    pub fn restore(&self) -> anyhow::Result<()> {
        for database in self.databases() {
            for tail in ["", "-wal", "-shm", "-journal"] {
                let path = PathBuf::from(format!("{}{tail}", database.display()));
                if path.exists() {
                    std::fs::remove_file(path)?;
                }
            }
            std::fs::copy(kept(&database), &database)?;
        }
        Ok(())
    }
}

fn kept(database: &Path) -> PathBuf {
    PathBuf::from(format!("{}.kept", database.display()))
}
