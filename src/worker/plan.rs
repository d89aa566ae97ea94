//! What would become of branches as they are: the same gathering and the same decisions as a tick, one
//! branch at a time, and nothing written.

use std::sync::Arc;

use mergeberg_kernel::admission::Verdict;
use mergeberg_kernel::ids::{Principal, RefName, RequestId, TableName};
use mergeberg_kernel::policy::ClassPolicy;
use mergeberg_kernel::state::RequestState;

use serde::Serialize;

use super::context::{Lane, Worker};
use super::error::WorkerError;
use super::own_sources::OWN_REFS;
use crate::ledger::RequestRow;

/// One line of the plan.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedBranch {
    pub source: RefName,
    pub class: String,
    pub result: String,
    pub reason: Option<String>,
    pub text: String,
}

impl Worker {
    /// Plans every named branch, or every branch but the target.
    pub async fn plan(
        &self,
        name: &TableName,
        target: &RefName,
        sources: &[RefName],
    ) -> Result<Vec<PlannedBranch>, WorkerError> {
        let table = self.catalog.load(name).await?;
        let policy = self.policies.read()?.for_table(name);
        let lane = Lane { table: name.clone(), uuid: table.facts.uuid.clone(), target: target.clone() };
        let structures = self.known_structures(&lane, &table, &policy.digest()).await?;
        let mut planned = Vec::new();
        for reference in table.facts.refs.values() {
            let wanted = if sources.is_empty() {
                reference.is_branch()
                    && &reference.name != target
                    && !reference.name.as_str().starts_with(OWN_REFS)
            } else {
                sources.contains(&reference.name)
            };
            if !wanted {
                continue;
            }
            let class =
                policy.class_of(&reference.name).cloned().unwrap_or_else(ClassPolicy::shipped_default);
            let row = RequestRow {
                id: RequestId(0),
                table: name.clone(),
                table_uuid: table.facts.uuid.clone(),
                source: reference.name.clone(),
                pinned: reference.snapshot_id,
                target: target.clone(),
                class: class.name.clone(),
                principal: Principal::new("plan"),
                idempotency_key: None,
                structure: table.facts.structure(),
                format_version: table.facts.format_version,
                reverts: None,
                set: None,
                state: RequestState::Queued,
                classification: None,
                enqueued_at_ms: self.now_ms(),
                admitted_at_ms: None,
                ended_at_ms: None,
                attempts: 0,
                train: None,
                landed_snapshot: None,
                detail: None,
            };
            let (rows, one) = (vec![row], 1);
            let gathered =
                self.gather(&lane, Arc::clone(&table), Arc::clone(&policy), rows, one, &structures).await?;
            let plan = gathered.plan;
            let (result, reason, text) = match (plan.cars.first(), plan.verdicts.first()) {
                (Some(car), _) => (car.word().to_owned(), None, car.classification.text.clone()),
                (None, Some((_, verdict))) => describe(verdict),
                (None, None) => continue,
            };
            planned.push(PlannedBranch {
                source: reference.name.clone(),
                class: class.name,
                result,
                reason,
                text,
            });
        }
        Ok(planned)
    }
}

fn describe(verdict: &Verdict) -> (String, Option<String>, String) {
    match verdict {
        Verdict::Hold { code, text, .. } => ("held".to_owned(), Some(code.to_string()), text.clone()),
        Verdict::Refuse { code, text, .. } => ("refused".to_owned(), Some(code.to_string()), text.clone()),
        Verdict::AlreadyPublished { text } => ("already-published".to_owned(), None, text.clone()),
        Verdict::Withdraw { code, text } => ("withdrawn".to_owned(), Some(code.to_string()), text.clone()),
        Verdict::InReview { text } => ("in-review".to_owned(), None, text.clone()),
        Verdict::RunExternal { text, .. } => ("rebase".to_owned(), None, text.clone()),
        Verdict::Repin { to } => ("queued".to_owned(), None, format!("pinned anew at snapshot {to}")),
    }
}
