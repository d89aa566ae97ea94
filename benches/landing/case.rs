//! Where a case is, and the states that it can be put back into.

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::support::events::Case;

/// Where a case's table, ledger and policy are.
#[derive(Clone, Debug)]
pub struct Place {
    pub folder: PathBuf,
}

/// What is put back before each run. Files of the warehouse are never changed once written, so the two
/// databases are all of a state.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// Before the first branch: where a team without a queue starts.
    Plain,
    /// Every branch is written and every request is in the queue.
    Queued,
}

impl State {
    fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Queued => "queued",
        }
    }
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

    /// Paths of the files that requests append, one a line, in the order of the queue.
    pub fn shards(&self) -> PathBuf {
        self.folder.join("shards.txt")
    }

    pub fn case(&self) -> anyhow::Result<Case> {
        let path = self.folder.join("case.json");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Ok(serde_json::from_str(&text)?)
    }

    pub fn write_case(&self, case: &Case) -> anyhow::Result<()> {
        Ok(std::fs::write(self.folder.join("case.json"), serde_json::to_string(case)?)?)
    }

    /// Keeps the present state. The databases must be closed.
    pub fn keep(&self, state: State) -> anyhow::Result<()> {
        for database in [self.catalog(), self.ledger()] {
            if database.exists() {
                std::fs::copy(&database, kept(&database, state))?;
            }
        }
        Ok(())
    }

    /// Puts a state back. The databases must be closed.
    pub fn restore(&self, state: State) -> anyhow::Result<()> {
        for database in [self.catalog(), self.ledger()] {
            for tail in ["", "-wal", "-shm", "-journal"] {
                let path = PathBuf::from(format!("{}{tail}", database.display()));
                if path.exists() {
                    std::fs::remove_file(path)?;
                }
            }
            let kept = kept(&database, state);
            if kept.exists() {
                std::fs::copy(kept, &database)?;
            }
        }
        Ok(())
    }
}

fn kept(database: &Path, state: State) -> PathBuf {
    PathBuf::from(format!("{}.{}", database.display(), state.suffix()))
}
