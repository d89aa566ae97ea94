//! `review list|show|approve|reject`: one item for each change of a table's structure.

use clap::{Args, Subcommand};
use mergeberg_kernel::ids::{ReviewId, TableName};
use mergeberg_kernel::reason::ReasonCode;

use super::answer::Answer;
use super::context::{Context, principal};
use crate::error::UserError;
use crate::ledger::{
    Decided, Decision, Ledger, RequestFilter, ReviewFilter, ReviewRow, ReviewState, ReviewWord,
};
use crate::report::text::{Columns, count, duration, key_values, moment, one_line};

#[derive(Debug, Subcommand)]
pub enum ReviewCommand {
    /// List review items; the open ones unless --all is given.
    List(ListArgs),
    /// Show one item: every change, and the requests behind it.
    Show(IdArgs),
    /// Accept the structure: requests written under it go on.
    Approve(ApproveArgs),
    /// Refuse the structure: requests written under it are refused.
    Reject(RejectArgs),
}

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Decided and lapsed items as well.
    #[arg(long)]
    pub all: bool,
    /// Only items of this table.
    #[arg(long)]
    pub table: Option<TableName>,
}

#[derive(Debug, Args)]
pub struct IdArgs {
    /// Id of the review item.
    pub id: i64,
}

#[derive(Debug, Args)]
pub struct ApproveArgs {
    /// Id of the review item.
    pub id: i64,
    /// Why it is right; kept with the decision.
    #[arg(long, default_value = "approved")]
    pub reason: String,
    /// Who decides [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

#[derive(Debug, Args)]
pub struct RejectArgs {
    /// Id of the review item.
    pub id: i64,
    /// What is wrong; owners of refused requests read it.
    #[arg(long)]
    pub reason: String,
    /// Who decides [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
}

pub async fn run(context: &Context, command: ReviewCommand) -> Result<Answer, UserError> {
    let ledger = context.ledger().await?;
    match command {
        ReviewCommand::List(ListArgs { all, table }) => {
            let state = (!all).then_some(ReviewWord::Open);
            let rows = ledger.reviews(&ReviewFilter { state, table, table_uuid: None }).await?;
            Ok(Answer::new(render_list(&rows, all, context.now_ms()), rows))
        }
        ReviewCommand::Show(IdArgs { id }) => show(ledger, ReviewId(id)).await,
        ReviewCommand::Approve(ApproveArgs { id, reason, principal: named }) => {
            decide(context, ReviewId(id), Decision::Approve, &reason, named).await
        }
        ReviewCommand::Reject(RejectArgs { id, reason, principal: named }) => {
            decide(context, ReviewId(id), Decision::Reject, &reason, named).await
        }
    }
}

async fn decide(
    context: &Context,
    id: ReviewId,
    decision: Decision,
    reason: &str,
    named: Option<String>,
) -> Result<Answer, UserError> {
    if reason.trim().is_empty() {
        return Err(UserError::new(ReasonCode::InvalidArgument, "the reason is empty")
            .with_next("say in a sentence why, with --reason"));
    }
    let by = principal(named, |name| std::env::var(name).ok());
    let row = context.ledger().await?.decide(id, decision, &by, reason, context.now_ms()).await?;
    let (word, then) = match decision {
        Decision::Approve => ("approved", "requests written under it go on"),
        Decision::Reject => ("rejected", "requests written under it are refused"),
    };
    Ok(Answer::new(format!("review {id} of {} is {word} by {by}; {then}\n", row.table), row))
}

async fn show(ledger: &Ledger, id: ReviewId) -> Result<Answer, UserError> {
    let row = ledger.review(id).await?;
    let filter = RequestFilter {
        states: vec!["in-review".to_owned()],
        table: Some(row.table.clone()),
        ..RequestFilter::default()
    };
    let mut waiting = ledger.requests(&filter).await?;
    waiting.retain(|request| request.table_uuid == row.table_uuid);
    let ids: Vec<String> = waiting.iter().map(|request| request.id.to_string()).collect();
    let text = render_row(&row, &ids);
    Ok(Answer::new(text, serde_json::json!({ "review": row, "requests_in_review": waiting })))
}

fn render_list(rows: &[ReviewRow], all: bool, now_ms: i64) -> String {
    if rows.is_empty() {
        return if all { "no review items\n" } else { "nothing to review\n" }.to_owned();
    }
    let mut columns = Columns::new(&["id>", "state", "table", "schema>", "spec>", "changes", "open for>"]);
    for row in rows {
        let changes: Vec<&str> = row.changes.iter().map(|change| change.text.as_str()).collect();
        let until_ms = match &row.state {
            ReviewState::Open => now_ms,
            ReviewState::Approved(decided) | ReviewState::Rejected(decided) => decided.at_ms,
            ReviewState::Lapsed(decided) => decided.as_ref().map_or(now_ms, |decided| decided.at_ms),
        };
        columns.push(vec![
            row.id.to_string(),
            row.state.word().to_string(),
            row.table.to_string(),
            row.structure.schema_id.to_string(),
            row.structure.spec_id.to_string(),
            changes.join("; "),
            duration(until_ms - row.opened_at_ms),
        ]);
    }
    columns.render()
}

fn render_row(row: &ReviewRow, waiting: &[String]) -> String {
    let ReviewRow { id, table, table_uuid, structure, changes, policy, binding, opened_at_ms, state } = row;
    let decision = match state {
        ReviewState::Open => "open".to_owned(),
        ReviewState::Lapsed(None) => "lapsed: what it was about changed".to_owned(),
        ReviewState::Approved(decided)
        | ReviewState::Rejected(decided)
        | ReviewState::Lapsed(Some(decided)) => {
            let Decided { by, at_ms, reason } = decided;
            format!("{} by {by} at {}: {reason}", state.word(), moment(*at_ms))
        }
    };
    let requests = match waiting.len() as u64 {
        0 => "none".to_owned(),
        n => format!("{}: {}", count(n, "request"), waiting.join(", ")),
    };
    let mut text = key_values(&[
        ("review", id.to_string()),
        ("state", decision),
        ("table", format!("{table}  ({table_uuid})")),
        (
            "structure",
            format!(
                "schema {}, spec {}, sort order {}",
                structure.schema_id, structure.spec_id, structure.sort_order_id
            ),
        ),
        ("opened", moment(*opened_at_ms)),
        ("in review", requests),
        ("policy", short(policy.as_str())),
        ("binds to", short(binding.as_str())),
    ]);
    text.push_str("\nchanges\n");
    for change in changes {
        let unsafe_note = if change.kind.is_unsafe() { "  (cannot be made safe)" } else { "" };
        text.push_str(&format!("  {}{unsafe_note}\n", one_line(&change.text)));
    }
    text
}

/// Enough of a digest to compare by eye.
fn short(digest: &str) -> String {
    digest.chars().take(12).collect()
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::ids::{Digest, Principal, SchemaId, SortOrderId, SpecId, TableUuid};
    use mergeberg_kernel::structure::{StructureChange, StructureChangeKind, StructureId};

    use super::super::testing::START_MS;
    use super::*;

    fn row(state: ReviewState, kind: StructureChangeKind) -> ReviewRow {
        ReviewRow {
            id: ReviewId(3),
            table: "nyc.flights".parse().unwrap(),
            table_uuid: TableUuid::new("9c12d441"),
            structure: StructureId {
                schema_id: SchemaId(1),
                spec_id: SpecId(0),
                sort_order_id: SortOrderId(0),
            },
            changes: vec![StructureChange {
                kind,
                field_ids: vec![5],
                text: "column 5 'air_time': int -> long".to_owned(),
            }],
            policy: Digest("0123456789abcdef".to_owned()),
            binding: Digest("fedcba9876543210".to_owned()),
            opened_at_ms: START_MS,
            state,
        }
    }

    #[test]
    fn open_items_are_listed_with_their_changes() {
        let rows = [row(ReviewState::Open, StructureChangeKind::TypePromoted)];
        assert_eq!(
            render_list(&rows, false, START_MS + 90_000),
            "\
id  state  table        schema  spec  changes                             open for
 3  open   nyc.flights       1     0  column 5 'air_time': int -> long  1 min 30 s
"
        );
        assert_eq!(render_list(&[], false, 0), "nothing to review\n");
    }

    #[test]
    fn an_item_is_shown_with_its_decision_and_what_cannot_be_approved() {
        let decided =
            Decided { by: Principal::new("ann"), at_ms: START_MS, reason: "narrows a column".to_owned() };
        let row = row(ReviewState::Rejected(decided), StructureChangeKind::TypeNarrowed);
        assert_eq!(
            render_row(&row, &["7".to_owned(), "9".to_owned()]),
            "\
review     3
state      rejected by ann at 2013-08-20T04:00:00Z: narrows a column
table      nyc.flights  (9c12d441)
structure  schema 1, spec 0, sort order 0
opened     2013-08-20T04:00:00Z
in review  2 requests: 7, 9
policy     0123456789ab
binds to   fedcba987654

changes
  column 5 'air_time': int -> long  (cannot be made safe)
"
        );
    }
}
