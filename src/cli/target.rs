//! What only an operator may say of a target, with a reason that is kept. Until then its queue is held.
//!
//! `adopt` vouches for a head that was rewound (rule S3), `claim` takes a table over from a queue that is gone
//! (rule R7).

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::facts::{CLAIM_PROPERTY, TableFacts};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use mergeberg_kernel::reason::ReasonCode;
use serde_json::json;

use super::answer::Answer;
use super::context::{Context, principal};
use super::enqueue::{Needed, branch_head, load};
use super::parse_ref;
use crate::error::UserError;
use crate::ledger::{Ledger, TargetHead};
use crate::table::catalog::CommitOutcome;

/// Times that a claim is sent again because the table was written meanwhile.
const MAX_COMMIT_TRIES: u32 = 10;

#[derive(Debug, Subcommand)]
pub enum TargetCommand {
    /// Accept the head of a rewound target, so that its queue goes on from there.
    Adopt(AdoptArgs),
    /// Take a table over from another queue, which must not work on it any more.
    Claim(ClaimArgs),
}

#[derive(Debug, Args)]
pub struct ClaimArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long)]
    pub table: TableName,
    /// Why the other queue is gone; kept with the claim.
    #[arg(long)]
    pub reason: String,
    /// Who says so [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

#[derive(Debug, Args)]
pub struct AdoptArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long)]
    pub table: TableName,
    /// The branch that was rewound.
    #[arg(long, default_value = "main", value_parser = parse_ref)]
    pub target: RefName,
    /// Why its present head is right; kept with the adoption.
    #[arg(long)]
    pub reason: String,
    /// Who vouches [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

pub async fn run(context: &Context, command: TargetCommand) -> Result<Answer, UserError> {
    match command {
        TargetCommand::Adopt(args) => adopt(context, args).await,
        TargetCommand::Claim(args) => claim(context, args).await,
    }
}

fn check_reason(reason: &str, example: &str) -> Result<(), UserError> {
    if !reason.trim().is_empty() {
        return Ok(());
    }
    Err(UserError::new(ReasonCode::InvalidArgument, "the reason is empty")
        .with_next(format!("say in a sentence {example}, with --reason")))
}

async fn claim(context: &Context, args: ClaimArgs) -> Result<Answer, UserError> {
    let ClaimArgs { table: name, reason, principal: named } = args;
    check_reason(&reason, "why the other queue is gone")?;
    let by = principal(named, |variable| std::env::var(variable).ok());
    let ledger = context.ledger().await?;
    let catalog = context.catalog().await?;
    let queue = ledger.queue_id().to_string();
    for _ in 0..MAX_COMMIT_TRIES {
        let table = load(catalog.as_ref(), &name, Needed::Heads).await?;
        let before = table.facts.properties.get(CLAIM_PROPERTY).cloned();
        let json = json!({ "table": name, "queue": queue, "before": before, "by": by, "reason": reason });
        if before.as_deref() == Some(queue.as_str()) {
            return Ok(Answer::new(format!("{name} is claimed by this queue, {queue}, already\n"), json));
        }
        let requirements = [Requirement::TableUuid(table.facts.uuid.clone())];
        let claim = BTreeMap::from([(CLAIM_PROPERTY.to_owned(), queue.clone())]);
        match catalog.commit(&table, &requirements, vec![Update::SetProperties(claim)]).await {
            CommitOutcome::Landed(_) => {
                ledger.tell_claim(&name, before.as_deref(), &by, &reason, context.now_ms()).await?;
                let from = before.map_or("nobody".to_owned(), |other| format!("queue {other}"));
                let text = format!("{by} claimed {name} for this queue, {queue} (before: {from})\n");
                return Ok(Answer::new(text, json));
            }
            // Written meanwhile, or nobody knows: the next look tells.
            CommitOutcome::PointerMoved | CommitOutcome::Unknown(_) => {}
            CommitOutcome::Refused(error) => return Err(error.into()),
            outcome => {
                let text = format!("{name} was not claimed: {outcome:?}");
                return Err(UserError::new(ReasonCode::CatalogRefused, text));
            }
        }
    }
    let text = format!("{name} was written {MAX_COMMIT_TRIES} times while it was to be claimed");
    Err(UserError::new(ReasonCode::CatalogUnavailable, text)
        .with_next("try again when fewer writers are at work"))
}

async fn adopt(context: &Context, args: AdoptArgs) -> Result<Answer, UserError> {
    let AdoptArgs { table: name, target, reason, principal: named } = args;
    check_reason(&reason, "who moved the target and why that is right")?;
    let by = principal(named, |variable| std::env::var(variable).ok());
    let ledger = context.ledger().await?;
    let table = load(context.catalog().await?.as_ref(), &name, Needed::History).await?;
    let head = branch_head(&table.facts, &target, ReasonCode::TargetNotFound)?;
    refuse_open_landing(ledger, &table.facts, &target).await?;
    let known = ledger.target_head(&table.facts.uuid, &target).await?;
    let before = rewound_from(&table.facts, &target, head, known)?;
    ledger.adopt_head(&name, &table.facts.uuid, &target, head, &by, &reason, context.now_ms()).await?;
    let text = format!(
        "{by} adopted snapshot {head} as head of '{target}' of {name} (before: {before}); its queue goes on\n"
    );
    let json = json!({ "table": name, "target": target, "head": head, "before": before, "by": by, "reason": reason });
    Ok(Answer::new(text, json))
}

/// A landing without a known outcome is settled against the head that it was planned on; adopting another
/// one meanwhile would answer that question by accident (rule L4).
async fn refuse_open_landing(ledger: &Ledger, facts: &TableFacts, target: &RefName) -> Result<(), UserError> {
    let open = ledger.open_intents().await?;
    let found = open.iter().find(|l| l.intent.table_uuid == facts.uuid && l.intent.target == *target);
    match found {
        None => Ok(()),
        Some(landing) => Err(UserError::new(
            ReasonCode::WrongState,
            format!(
                "{} of '{target}' of {} has no known outcome yet, so its head cannot be adopted",
                landing.intent.id, facts.name
            ),
        )
        .with_next("let the worker settle it (`mergeberg worker --drain`), then adopt")),
    }
}

/// The head that the queue knew, if the target does not descend from it. Everything else needs no adoption.
fn rewound_from(
    facts: &TableFacts,
    target: &RefName,
    head: SnapshotId,
    known: Option<TargetHead>,
) -> Result<SnapshotId, UserError> {
    match known.and_then(|row| row.last_known_head) {
        Some(known) if !facts.snapshots.is_ancestor(known, head) => Ok(known),
        Some(known) => Err(UserError::new(
            ReasonCode::WrongState,
            format!(
                "'{target}' of {} was not rewound: its head {head} descends from {known}, which the queue knows",
                facts.name
            ),
        )
        .with_next("nothing is to adopt: the worker takes up such a head by itself")),
        None => Err(UserError::new(
            ReasonCode::WrongState,
            format!("the queue has not worked on '{target}' of {} yet", facts.name),
        )
        .with_next("nothing is to adopt: the worker starts from the head that it finds")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::facts;
    use super::*;

    fn known(head: i64) -> Option<TargetHead> {
        Some(TargetHead {
            table: facts().name,
            table_uuid: facts().uuid,
            target: RefName::main(),
            baseline: Some(SnapshotId(10)),
            last_known_head: Some(SnapshotId(head)),
            last_landed_head: None,
            adopted: None,
        })
    }

    #[test]
    fn only_a_rewound_target_is_adopted() {
        // main is 10 <- 20; the queue knew 30, on another line.
        let main = RefName::main();
        let finding = |known| rewound_from(&facts(), &main, SnapshotId(20), known);
        assert_eq!(finding(known(30)).unwrap(), SnapshotId(30));
        for ordinary in [known(20), known(10), None] {
            let error = finding(ordinary).unwrap_err();
            assert_eq!(error.code, ReasonCode::WrongState);
            assert!(error.next.starts_with("nothing is to adopt"), "{}", error.next);
        }
    }
}
