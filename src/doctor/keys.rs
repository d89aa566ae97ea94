//! Trying out idempotency keys: what a server says of them decides whether a commit without an answer is sent again.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind};
use mergeberg_kernel::ids::{RefName, TableName};
use uuid::Uuid;

use super::probe::{Seen, Tools};
use crate::table::catalog::{CatalogError, KeyedAnswer};
use crate::table::loaded::LoadedTable;

/// The branch that a tried commit makes.
const BRANCH: &str = "mergeberg-doctor/keyed";
/// The property that a tried commit sets.
const MARK: &str = "mergeberg.doctor.key";

/// The same commit twice under one key is one commit with one answer; another one under that key is none.
pub(super) async fn keys(tools: &Tools, name: &TableName) -> Result<Seen, CatalogError> {
    let seen = guarded(tools, name).await?;
    if !matches!(seen, Seen::AsItShould) {
        return Ok(seen);
    }
    unguarded(tools, name).await
}

/// A commit that cannot be applied twice: a server that looks at it again refuses it.
async fn guarded(tools: &Tools, name: &TableName) -> Result<Seen, CatalogError> {
    let base = tools.catalog.load(name).await?;
    let Some(head) = base.facts.head(&RefName::main()) else {
        return Ok(Seen::Unclear("the scratch table has no snapshot".to_owned()));
    };
    let branch = RefName::new(BRANCH);
    let requirements = [
        Requirement::TableUuid(base.facts.uuid.clone()),
        Requirement::RefAt { name: branch.clone(), at: None, role: RefRole::NewName },
    ];
    let updates = vec![Update::SetRef(RefFact {
        name: branch.clone(),
        snapshot_id: head,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms: None,
    })];
    let key = Uuid::now_v7();
    match tools.catalog.commit_under_key(key, &base, &requirements, &updates).await {
        KeyedAnswer::Yes => {}
        KeyedAnswer::No(told) => return Ok(Seen::Wrong(format!("a commit under a key was refused: {told}"))),
        KeyedAnswer::Unclear(told) => return Ok(Seen::Unclear(told)),
    }
    let once = tools.catalog.load(name).await?;
    if once.facts.head(&branch) != Some(head) {
        return Ok(Seen::Wrong("the catalog says that it applied a commit, and has not".to_owned()));
    }
    let again = tools.catalog.commit_under_key(key, &base, &requirements, &updates).await;
    let now = tools.catalog.load(name).await?;
    Ok(match again {
        KeyedAnswer::Yes if is_same(&once, &now) => Seen::AsItShould,
        KeyedAnswer::Yes => {
            Seen::Wrong("a commit that was sent twice under one key was applied twice".to_owned())
        }
        KeyedAnswer::No(told) => {
            Seen::Wrong(format!("a commit that was sent twice under one key was looked at twice: {told}"))
        }
        KeyedAnswer::Unclear(told) => Seen::Unclear(told),
    })
}

/// A commit that nothing stands in the way of, twice; then another one under its key.
async fn unguarded(tools: &Tools, name: &TableName) -> Result<Seen, CatalogError> {
    let base = tools.catalog.load(name).await?;
    let requirements = [Requirement::TableUuid(base.facts.uuid.clone())];
    let mark = |word: &str| vec![Update::SetProperties(BTreeMap::from([(MARK.to_owned(), word.to_owned())]))];
    let key = Uuid::now_v7();
    let mut once: Option<Arc<LoadedTable>> = None;
    for word in ["one", "one", "other"] {
        let answer = tools.catalog.commit_under_key(key, &base, &requirements, &mark(word)).await;
        let now = tools.catalog.load(name).await?;
        let seen = match (&once, answer) {
            (None, KeyedAnswer::Yes) if now.facts.properties.get(MARK).is_some_and(|set| set == word) => {
                once = Some(now);
                continue;
            }
            (None, KeyedAnswer::Yes) => {
                Seen::Wrong("the catalog says that it applied a commit, and has not".to_owned())
            }
            (Some(once), _) if !is_same(once, &now) => Seen::Wrong(match word {
                "one" => "a commit that was sent twice under one key was applied twice".to_owned(),
                _ => "another commit under a key that was used was applied".to_owned(),
            }),
            // Refused, or answered as the first one: the specification leaves that open.
            (Some(_), KeyedAnswer::Yes) => continue,
            (Some(_), KeyedAnswer::No(_)) if word == "other" => continue,
            (_, KeyedAnswer::No(told)) => Seen::Wrong(format!("a commit under a key was refused: {told}")),
            (_, KeyedAnswer::Unclear(told)) => Seen::Unclear(told),
        };
        return Ok(seen);
    }
    Ok(Seen::AsItShould)
}

/// Was nothing committed in between?
fn is_same(one: &LoadedTable, other: &LoadedTable) -> bool {
    one.metadata_location == other.metadata_location && one.facts == other.facts
}
