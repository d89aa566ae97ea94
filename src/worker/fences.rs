//! Tables that a check has read and that have to stay as they were read until the landing (rule E7): their heads are
//! required by the landing commit, which then is one over several tables.

use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::evidence::PinnedInput;
use mergeberg_kernel::ids::RefName;

use super::context::Worker;
use super::error::WorkerError;
use super::tries::Tries;
use crate::table::catalog::{CommitOutcome, SetOutcome, TableChange};
use crate::table::loaded::LoadedTable;

impl Worker {
    /// The requirements on tables that checks have read; they are not changed. `Err`: one of them has moved.
    pub(super) async fn fences(
        &self,
        fenced: &[PinnedInput],
    ) -> Result<Result<Vec<TableChange>, String>, WorkerError> {
        let mut changes = Vec::with_capacity(fenced.len());
        for PinnedInput { table, snapshot } in fenced {
            let base = self.catalog.load(table).await?;
            if base.facts.head(&RefName::main()) != Some(*snapshot) {
                return Ok(Err(format!("{table} moved since a check has read it at snapshot {snapshot}")));
            }
            let requirements = vec![
                Requirement::TableUuid(base.facts.uuid.clone()),
                Requirement::RefAt { name: RefName::main(), at: Some(*snapshot), role: RefRole::Target },
            ];
            changes.push(TableChange { base, requirements, updates: Vec::new() });
        }
        Ok(Ok(changes))
    }

    /// The landing commit of a train. `Err`: a table that a check has read has moved.
    pub(super) async fn send_landing(
        &self,
        table: &Arc<LoadedTable>,
        requirements: Vec<Requirement>,
        updates: Vec<Update>,
        fenced: &[PinnedInput],
    ) -> Result<Result<CommitOutcome, String>, WorkerError> {
        if fenced.is_empty() {
            return Ok(Ok(self.catalog.commit(table, &requirements, updates).await));
        }
        let own = TableChange { base: Arc::clone(table), requirements, updates };
        let mut tries = Tries::of_landing(table);
        loop {
            let mut changes = vec![own.clone()];
            match self.fences(fenced).await? {
                Ok(fences) => changes.extend(fences),
                Err(why) => return Ok(Err(why)),
            }
            match self.catalog.commit_set(&changes).await {
                SetOutcome::Landed(tables) => {
                    let now = tables.into_iter().next().unwrap_or_else(|| Arc::clone(table));
                    return Ok(Ok(CommitOutcome::Landed(now)));
                }
                SetOutcome::Unknown(what) => return Ok(Ok(CommitOutcome::Unknown(what))),
                SetOutcome::NotApplied { at: 0, outcome } => return Ok(Ok(outcome)),
                SetOutcome::NotApplied { outcome: CommitOutcome::Refused(error), .. } => {
                    return Ok(Ok(CommitOutcome::Refused(error)));
                }
                // Whether its head stands is seen when it is sent again.
                SetOutcome::NotApplied { .. } if self.again(&mut tries).await => {}
                SetOutcome::NotApplied { .. } => {
                    return Ok(Err("tables that checks have read are written without a pause".to_owned()));
                }
            }
        }
    }
}
