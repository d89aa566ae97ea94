//! `branch create|list`: branches with the retention of their class, and what the queue knows of each.

use std::collections::BTreeMap;
use std::sync::Arc;

use clap::{Args, Subcommand};
use mergeberg_kernel::commit::{RefRole, Requirement, Update};
use mergeberg_kernel::facts::{RefFact, RefKind, TableFacts};
use mergeberg_kernel::ids::{RefName, SnapshotId, TableName};
use mergeberg_kernel::policy::ClassPolicy;
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use super::answer::Answer;
use super::context::Context;
use super::enqueue::{Needed, branch_head, class_of, load};
use super::parse_ref;
use crate::config::PolicySet;
use crate::error::UserError;
use crate::ledger::RequestFilter;
use crate::report::text::{Columns, NONE, duration};
use crate::table::catalog::{Catalog, CommitOutcome};
use crate::worker::own_sources::OWN_REFS;

/// How often a commit is sent again because something else was committed first.
const MAX_COMMIT_TRIES: u32 = 5;

#[derive(Debug, Subcommand)]
pub enum BranchCommand {
    /// Create a branch with the retention of its class.
    Create(CreateArgs),
    /// List the branches of a table and their requests.
    List(ListArgs),
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long)]
    pub table: TableName,
    /// Name of the new branch.
    #[arg(long, value_parser = parse_ref)]
    pub name: RefName,
    /// The branch whose head it begins at.
    #[arg(long, default_value = "main", value_parser = parse_ref)]
    pub from: RefName,
    /// Class whose lifetime it gets; by prefix when left out.
    #[arg(long)]
    pub class: Option<String>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long)]
    pub table: TableName,
}

pub async fn run(context: &Context, command: BranchCommand) -> Result<Answer, UserError> {
    match command {
        BranchCommand::Create(args) => {
            let catalog = context.catalog().await?;
            let policies = context.policies.read()?;
            create(catalog, &policies, &args, context.now_ms()).await
        }
        BranchCommand::List(args) => list(context, &args.table).await,
    }
}

#[derive(Debug, PartialEq, Serialize)]
struct Created {
    table: TableName,
    branch: RefName,
    head: SnapshotId,
    class: String,
    /// From now on.
    lifetime_ms: Option<i64>,
    max_ref_age_ms: Option<i64>,
}

async fn create(
    catalog: &Arc<dyn Catalog>,
    policies: &PolicySet,
    args: &CreateArgs,
    now_ms: i64,
) -> Result<Answer, UserError> {
    let mut tries = 0;
    loop {
        tries += 1;
        let table = load(catalog.as_ref(), &args.table, Needed::Heads).await?;
        let class = class_of(&policies.for_table(&args.table), &args.name, args.class.as_deref())?;
        let (requirements, updates, created) = plan_create(&table.facts, &class, args, now_ms)?;
        match catalog.commit(&table, &requirements, updates).await {
            CommitOutcome::Landed(_) => {
                let lifetime = match created.lifetime_ms {
                    Some(ms) => format!("expires in {}", duration(ms)),
                    None => "the table's default retention".to_owned(),
                };
                let text = format!(
                    "created branch '{}' of {} at snapshot {} (class {}, {lifetime})\n",
                    created.branch, created.table, created.head, created.class
                );
                return Ok(Answer::new(text, created));
            }
            CommitOutcome::NameTaken(_) => return Err(name_taken(&args.name, &args.table)),
            CommitOutcome::PointerMoved | CommitOutcome::HeadMoved | CommitOutcome::SourceMoved(_)
                if tries < MAX_COMMIT_TRIES => {}
            CommitOutcome::PointerMoved | CommitOutcome::HeadMoved | CommitOutcome::SourceMoved(_) => {
                return Err(UserError::new(
                    ReasonCode::CatalogUnavailable,
                    format!("{} changed {tries} times while the branch was created", args.table),
                )
                .with_next("try again when fewer writers are at work"));
            }
            CommitOutcome::Unknown(message) => {
                return Err(UserError::new(
                    ReasonCode::CatalogUnavailable,
                    format!("nobody knows whether the branch was created: {message}"),
                )
                .with_next(format!("look with `mergeberg branch list --table {}`", args.table)));
            }
            CommitOutcome::Refused(error) => return Err(error.into()),
            CommitOutcome::Unexplained(message) => {
                return Err(UserError::new(ReasonCode::CatalogRefused, message));
            }
            CommitOutcome::TableChanged(message) => {
                return Err(UserError::new(ReasonCode::TableReplaced, message));
            }
            CommitOutcome::Fenced => {
                return Err(UserError::new(ReasonCode::Internal, "a fence was met that was never asked for"));
            }
        }
    }
}

fn name_taken(name: &RefName, table: &TableName) -> UserError {
    UserError::new(ReasonCode::NameTaken, format!("{table} has a branch or tag '{name}' already"))
}

/// The commit that creates the branch. Ref age counts from the head's timestamp, so the head's present age
/// is added to the class's lifetime (rule R3).
fn plan_create(
    facts: &TableFacts,
    class: &ClassPolicy,
    args: &CreateArgs,
    now_ms: i64,
) -> Result<(Vec<Requirement>, Vec<Update>, Created), UserError> {
    let CreateArgs { table, name, from, class: _ } = args;
    if name.as_str().starts_with(OWN_REFS) {
        return Err(UserError::new(
            ReasonCode::InvalidArgument,
            format!("names that begin with '{OWN_REFS}' are the queue's own"),
        )
        .with_next("choose another name"));
    }
    if *from == RefName::main() && !facts.refs.contains_key(from) {
        return Err(UserError::new(
            ReasonCode::BranchNotFound,
            format!("{table} has no snapshot on main that a branch could begin at"),
        )
        .with_next(format!(
            "write the first data to '{name}' directly: writers create the branch, and the queue publishes it"
        )));
    }
    let head = branch_head(facts, from, ReasonCode::BranchNotFound)?;
    if facts.refs.contains_key(name) {
        return Err(name_taken(name, table));
    }
    let lifetime_ms = class.branch_lifetime.map(|lifetime| lifetime.ms);
    let head_age_ms = facts.snapshots.get(head).map_or(0, |snapshot| (now_ms - snapshot.timestamp_ms).max(0));
    let max_ref_age_ms = lifetime_ms.map(|lifetime| head_age_ms.saturating_add(lifetime));
    let requirements = vec![
        Requirement::TableUuid(facts.uuid.clone()),
        Requirement::RefAt { name: name.clone(), at: None, role: RefRole::NewName },
        // A second ref requirement: one server mishandles a single null one (rule L7).
        Requirement::RefAt { name: from.clone(), at: Some(head), role: RefRole::Source },
    ];
    let branch = RefFact {
        name: name.clone(),
        snapshot_id: head,
        kind: RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None },
        max_ref_age_ms,
    };
    let created = Created {
        table: table.clone(),
        branch: name.clone(),
        head,
        class: class.name.clone(),
        lifetime_ms,
        max_ref_age_ms,
    };
    Ok((requirements, vec![Update::SetRef(branch)], created))
}

/// One branch as listed.
#[derive(Debug, PartialEq, Serialize)]
struct BranchRow {
    branch: RefName,
    head: SnapshotId,
    /// Since the head's commit.
    age_ms: Option<i64>,
    class: String,
    /// Until the branch may be expired; negative: it is overdue. `None`: no own retention.
    expires_in_ms: Option<i64>,
    /// State of its newest request.
    request: Option<String>,
}

async fn list(context: &Context, table: &TableName) -> Result<Answer, UserError> {
    let loaded = load(context.catalog().await?.as_ref(), table, Needed::Heads).await?;
    let policy = context.policies.read()?.for_table(table);
    let filter = RequestFilter { table: Some(table.clone()), ..RequestFilter::default() };
    let mut newest: BTreeMap<RefName, String> = BTreeMap::new();
    for row in context.ledger().await?.requests(&filter).await? {
        if row.table_uuid == loaded.facts.uuid {
            newest.insert(row.source.clone(), format!("{} {}", row.id, row.state));
        }
    }
    let class_name = |name: &RefName| {
        policy.class_of(name).map_or_else(|| ClassPolicy::shipped_default().name, |class| class.name.clone())
    };
    let rows = branch_rows(&loaded.facts, class_name, &newest, context.now_ms());
    Ok(Answer::new(render_list(&rows), rows))
}

fn branch_rows(
    facts: &TableFacts,
    class_name: impl Fn(&RefName) -> String,
    newest: &BTreeMap<RefName, String>,
    now_ms: i64,
) -> Vec<BranchRow> {
    let mut rows = Vec::new();
    for branch in facts.refs.values().filter(|r| r.is_branch()) {
        let age_ms = facts.snapshots.get(branch.snapshot_id).map(|s| (now_ms - s.timestamp_ms).max(0));
        rows.push(BranchRow {
            branch: branch.name.clone(),
            head: branch.snapshot_id,
            age_ms,
            class: if branch.name == RefName::main() { NONE.to_owned() } else { class_name(&branch.name) },
            expires_in_ms: branch.max_ref_age_ms.zip(age_ms).map(|(max, age)| max - age),
            request: newest.get(&branch.name).cloned(),
        });
    }
    rows
}

fn render_list(rows: &[BranchRow]) -> String {
    if rows.is_empty() {
        return "no branches yet\n".to_owned();
    }
    let mut columns = Columns::new(&["branch", "head", "age>", "class", "expires in>", "request"]);
    for row in rows {
        let expires = match row.expires_in_ms {
            None => NONE.to_owned(),
            Some(ms) if ms < 0 => "overdue".to_owned(),
            Some(ms) => duration(ms),
        };
        columns.push(vec![
            row.branch.to_string(),
            row.head.to_string(),
            row.age_ms.map_or_else(|| NONE.to_owned(), duration),
            row.class.clone(),
            expires,
            row.request.clone().unwrap_or_else(|| NONE.to_owned()),
        ]);
    }
    columns.render()
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::policy::Duration;

    use super::super::testing::{HOUR_MS, facts};
    use super::*;

    fn args(name: &str, from: &str) -> CreateArgs {
        CreateArgs {
            table: "nyc.flights".parse().unwrap(),
            name: RefName::new(name),
            from: RefName::new(from),
            class: None,
        }
    }

    fn two_days() -> ClassPolicy {
        ClassPolicy { branch_lifetime: Some(Duration { ms: 48 * HOUR_MS }), ..ClassPolicy::shipped_default() }
    }

    #[test]
    fn rule_r3_retention_counts_from_the_heads_timestamp() {
        // The head of main is 3 hours old.
        let facts = facts();
        let now_ms = facts.snapshots.get(SnapshotId(20)).unwrap().timestamp_ms + 3 * HOUR_MS;
        let (requirements, updates, created) =
            plan_create(&facts, &two_days(), &args("ingest/new", "main"), now_ms).unwrap();
        assert_eq!((created.head, created.max_ref_age_ms), (SnapshotId(20), Some(51 * HOUR_MS)));
        assert!(requirements.contains(&Requirement::RefAt {
            name: RefName::new("ingest/new"),
            at: None,
            role: RefRole::NewName
        }));
        let Update::SetRef(branch) = &updates[0] else { panic!("{updates:?}") };
        assert_eq!(branch.max_ref_age_ms, Some(51 * HOUR_MS));
        assert!(branch.is_branch());
    }

    #[test]
    fn names_that_are_taken_or_the_queues_own_are_refused() {
        let facts = facts();
        let code =
            |name: &str, from: &str| plan_create(&facts, &two_days(), &args(name, from), 0).unwrap_err().code;
        assert_eq!(code("ingest/a", "main"), ReasonCode::NameTaken);
        assert_eq!(code("v1.0", "main"), ReasonCode::NameTaken);
        assert_eq!(code("mergeberg/tmp/x", "main"), ReasonCode::InvalidArgument);
        assert_eq!(code("ingest/new", "v1.0"), ReasonCode::NotABranch);
        assert_eq!(code("ingest/new", "mian"), ReasonCode::BranchNotFound);
    }

    #[test]
    fn branches_are_listed_with_age_class_retention_and_request() {
        let facts = facts();
        let now_ms = facts.snapshots.get(SnapshotId(20)).unwrap().timestamp_ms + 3 * HOUR_MS;
        let newest = BTreeMap::from([(RefName::new("ingest/a"), "7 held(overlaps-ahead)".to_owned())]);
        let rows = branch_rows(&facts, |_| "ingest".to_owned(), &newest, now_ms);
        assert_eq!(
            render_list(&rows),
            "\
branch    head         age  class   expires in  request
ingest/a  30    2 h 00 min  ingest  8 h 00 min  7 held(overlaps-ahead)
main      20    3 h 00 min  -                -  -
"
        );
    }
}
