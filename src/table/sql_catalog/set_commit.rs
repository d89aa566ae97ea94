//! A commit to several tables: every metadata file is written first, then one transaction moves all pointers.

use std::sync::Arc;

use uuid::Uuid;

use super::super::catalog::{
    CatalogError, CommitOutcome, SetOutcome, TableChange, first_failed, off_runtime,
};
use super::super::loaded::LoadedTable;
use super::super::metadata_file;
use super::database::set_swap::{Move, SetSwap};
use super::{SqlCatalog, file_error, prepare};

impl SqlCatalog {
    pub(super) async fn commit_to_all(&self, changes: &[TableChange]) -> SetOutcome {
        for (at, change) in changes.iter().enumerate() {
            if let Some(outcome) = self.stands_in_the_way(change).await {
                return SetOutcome::NotApplied { at, outcome };
            }
        }
        // Where nothing is updated the table stays as it is, and only has to.
        let mut landed: Vec<Arc<LoadedTable>> = Vec::with_capacity(changes.len());
        for (at, change) in changes.iter().enumerate() {
            match self.written(change).await {
                Ok(table) => landed.push(table),
                Err(outcome) => {
                    self.discard_all(changes, &landed).await;
                    return SetOutcome::NotApplied { at, outcome };
                }
            }
        }
        let moves: Vec<Move<'_>> = changes
            .iter()
            .zip(&landed)
            .map(|(change, table)| Move {
                table: change.table(),
                from: &change.base.metadata_location,
                to: (!change.updates.is_empty()).then_some(table.metadata_location.as_str()),
            })
            .collect();
        if let Some(hook) = &self.hook {
            hook.before_swap();
        }
        let swap = self.database.swap_all(&moves).await;
        if let Some(hook) = &self.hook {
            hook.after_swap();
            if hook.loses_answer() {
                return SetOutcome::Unknown("the answer was lost on purpose".to_owned());
            }
        }
        match swap {
            SetSwap::Done => {
                for table in &landed {
                    self.cache().put(table.facts.name.clone(), Arc::clone(table));
                }
                SetOutcome::Landed(landed)
            }
            SetSwap::Stale(at) => {
                self.discard_all(changes, &landed).await;
                SetOutcome::NotApplied { at, outcome: CommitOutcome::PointerMoved }
            }
            SetSwap::NotApplied(error) => {
                self.discard_all(changes, &landed).await;
                SetOutcome::NotApplied { at: 0, outcome: CommitOutcome::Refused(error) }
            }
            // The catalog may point to the new files: they stay.
            SetSwap::Unknown(message) => SetOutcome::Unknown(message),
        }
    }

    async fn stands_in_the_way(&self, change: &TableChange) -> Option<CommitOutcome> {
        let table = change.table();
        match self.database.pointer(table).await {
            Ok(Some(location)) if location == change.base.metadata_location => {
                first_failed(&change.base.facts, &change.requirements).map(CommitOutcome::of_failed)
            }
            Ok(Some(location)) => Some(self.explain_moved(table, location, &change.requirements).await),
            Ok(None) => Some(CommitOutcome::Refused(CatalogError::NotFound(table.clone()))),
            Err(error) => Some(CommitOutcome::Refused(error)),
        }
    }

    async fn written(&self, change: &TableChange) -> Result<Arc<LoadedTable>, CommitOutcome> {
        if change.updates.is_empty() {
            return Ok(Arc::clone(&change.base));
        }
        let (base, updates) = (Arc::clone(&change.base), change.updates.clone());
        let (now_ms, unique) = ((self.clock)(), Uuid::new_v4());
        let prepared = off_runtime(move || prepare(&base, &updates, now_ms, unique)).await;
        let (landed, bytes) = prepared.map_err(CommitOutcome::Refused)??;
        match metadata_file::put(&self.file_io, &landed.metadata_location, bytes).await {
            Ok(()) => Ok(Arc::new(landed)),
            Err(error) => {
                let error = file_error(change.table(), &landed.metadata_location, error);
                Err(CommitOutcome::Refused(error))
            }
        }
    }

    /// Metadata files that no pointer was moved to.
    async fn discard_all(&self, changes: &[TableChange], written: &[Arc<LoadedTable>]) {
        for (change, table) in changes.iter().zip(written) {
            if !change.updates.is_empty() {
                self.discard(table.metadata_location.clone()).await;
            }
        }
    }
}
