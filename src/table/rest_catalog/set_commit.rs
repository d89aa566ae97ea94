//! A commit to several tables (`POST /v1/{prefix}/transactions/commit`). The answer holds no tables, so what became of
//! each is read; and a server that checks all requirements first and then writes table by table is found out that way.

use std::sync::Arc;

use reqwest::StatusCode;

use super::super::catalog::{CatalogError, CommitOutcome, SetOutcome, TableChange};
use super::super::loaded::LoadedTable;
use super::answers::{Refusal, Sent, difference, of_refusal};
use super::server::refused;
use super::transport::{Failure, Reply, pause};
use super::wire::transaction_request;
use super::{Catalog, RestCatalog, is_refusal};

impl RestCatalog {
    pub(super) async fn commit_to_all(&self, changes: &[TableChange]) -> SetOutcome {
        let not_applied = |error| SetOutcome::NotApplied { at: 0, outcome: CommitOutcome::Refused(error) };
        if !self.capabilities.multi_table_commits {
            let text = format!("{} does not commit to several tables at once", self.server.uri);
            return not_applied(CatalogError::Refused(text));
        }
        let url = match self.server.address(self.server.paths.transaction()) {
            Ok(url) => url,
            Err(error) => return not_applied(error),
        };
        let body = transaction_request(changes).to_string().into_bytes();
        let sendings = self.keys.for_one_commit();
        let mut lost = None;
        for sent_times in 1.. {
            match self.server.http.post(url.clone(), sendings.headers(), body.clone(), None).await {
                Ok(reply) if [StatusCode::NO_CONTENT, StatusCode::OK].contains(&reply.status) => {
                    return self.applied_to_all(changes).await;
                }
                Ok(reply) if reply.status == StatusCode::CONFLICT => {
                    return self.judge_all(changes, Refusal::Conflict, &reply.told()).await;
                }
                Ok(reply) if is_refusal(&reply, lost.is_some()) => {
                    return match reply.status {
                        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => {
                            self.judge_all(changes, Refusal::Invalid, &reply.told()).await
                        }
                        StatusCode::NOT_FOUND => self.missing_of(changes, &reply).await,
                        StatusCode::TOO_MANY_REQUESTS => not_applied(refused(&self.server.uri, &reply)),
                        _ => not_applied(CatalogError::Refused(reply.told())),
                    };
                }
                // Another 2xx, 5xx: it may be applied, or still be under way.
                Ok(reply) => lost = Some(reply.told()),
                Err(failure @ (Failure::NotSent(_) | Failure::NoToken(_))) if lost.is_none() => {
                    return not_applied(self.server.unanswered(&failure));
                }
                Err(failure) => lost = Some(failure.text().to_owned()),
            }
            let pause = pause(sent_times);
            if !sendings.again(sent_times, pause) {
                break;
            }
            tokio::time::sleep(pause).await;
        }
        SetOutcome::Unknown(lost.unwrap_or_else(|| "the catalog gave no answer".to_owned()))
    }

    async fn load_all(&self, changes: &[TableChange]) -> Result<Vec<Arc<LoadedTable>>, CatalogError> {
        let mut tables = Vec::with_capacity(changes.len());
        for change in changes {
            tables.push(self.load(change.table()).await?);
        }
        Ok(tables)
    }

    /// The catalog says that it is applied: every table has to show it.
    async fn applied_to_all(&self, changes: &[TableChange]) -> SetOutcome {
        let tables = match self.load_all(changes).await {
            Ok(tables) => tables,
            Err(error) => {
                return SetOutcome::Unknown(format!("the catalog says that it is applied, and then {error}"));
            }
        };
        let different = changes.iter().zip(&tables).find_map(|(change, now)| {
            let what = difference(&now.facts, &change.updates)?;
            Some(format!("the catalog says that it is applied, but of {} {what}", change.table()))
        });
        match different {
            None => SetOutcome::Landed(tables),
            Some(what) => SetOutcome::Unknown(what),
        }
    }

    /// Refused: at which table, as far as reading them tells.
    async fn judge_all(&self, changes: &[TableChange], refusal: Refusal, told: &str) -> SetOutcome {
        let tables = match self.load_all(changes).await {
            Ok(tables) => tables,
            // Refused, but nobody can say why, nor whether it was the answer to a second sending.
            Err(error) => return SetOutcome::Unknown(format!("{told}, and then {error}")),
        };
        let mut found: Option<(usize, CommitOutcome)> = None;
        for (at, (change, now)) in changes.iter().zip(&tables).enumerate() {
            let sent =
                Sent { base: &change.base, requirements: &change.requirements, updates: &change.updates };
            let outcome = of_refusal(sent, refusal, now, told, (self.server.clock)());
            if matches!(outcome, CommitOutcome::Landed(_) | CommitOutcome::Unknown(_)) {
                return SetOutcome::Unknown(format!(
                    "{told}, but {} has snapshots of this commit",
                    change.table()
                ));
            }
            if found.as_ref().is_none_or(|(_, best)| rank(&outcome) < rank(best)) {
                found = Some((at, outcome));
            }
        }
        match found {
            Some((at, outcome)) => SetOutcome::NotApplied { at, outcome },
            None => SetOutcome::Unknown(told.to_owned()),
        }
    }

    async fn missing_of(&self, changes: &[TableChange], reply: &Reply) -> SetOutcome {
        for (at, change) in changes.iter().enumerate() {
            if let Err(error @ CatalogError::NotFound(_)) = self.load(change.table()).await {
                return SetOutcome::NotApplied { at, outcome: CommitOutcome::Refused(error) };
            }
        }
        // All tables are there: it is the endpoint that is not.
        let outcome = CommitOutcome::Refused(CatalogError::Refused(reply.told()));
        SetOutcome::NotApplied { at: 0, outcome }
    }
}

/// The table that explains the refusal comes first; the others show nothing.
fn rank(outcome: &CommitOutcome) -> u8 {
    match outcome {
        CommitOutcome::HeadMoved
        | CommitOutcome::SourceMoved(_)
        | CommitOutcome::NameTaken(_)
        | CommitOutcome::Fenced => 0,
        CommitOutcome::TableChanged(_) => 1,
        CommitOutcome::PointerMoved => 2,
        CommitOutcome::Refused(_) => 3,
        CommitOutcome::Unexplained(_) => 4,
        CommitOutcome::Landed(_) | CommitOutcome::Unknown(_) => 5,
    }
}
