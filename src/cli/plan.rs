//! `plan`: what the queue would do with branches as they are, without enqueuing anything (rule S2).

use mergeberg_kernel::ids::{RefName, TableName};
use mergeberg_kernel::reason::ReasonCode;

use super::answer::Answer;
use super::context::Context;
use super::worker::{of_worker, open};
use super::{enqueue, parse_ref};
use crate::error::UserError;
use crate::report::text::Columns;

/// Say what would become of branches as they are; writes nothing.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long)]
    pub table: TableName,
    /// The branch to merge into.
    #[arg(long, default_value = "main", value_parser = parse_ref)]
    pub target: RefName,
    /// A branch to look at; all but the target when none is named.
    #[arg(long, value_parser = parse_ref)]
    pub source: Vec<RefName>,
}

pub async fn run(context: &Context, args: &PlanArgs) -> Result<Answer, UserError> {
    let catalog = context.catalog().await?;
    let table = enqueue::load(catalog.as_ref(), &args.table, enqueue::Needed::History).await?;
    enqueue::check_target(&table.facts, &args.target)?;
    for source in &args.source {
        enqueue::branch_head(&table.facts, source, ReasonCode::BranchNotFound)?;
    }
    let worker = open(context).await?;
    let planned = worker.plan(&args.table, &args.target, &args.source).await.map_err(of_worker)?;
    let mut lines = Columns::new(&["branch", "class", "would be", "why"]);
    for branch in &planned {
        let result = match &branch.reason {
            Some(reason) => format!("{} [{reason}]", branch.result),
            None => branch.result.clone(),
        };
        lines.push(vec![branch.source.to_string(), branch.class.clone(), result, branch.text.clone()]);
    }
    let text = if planned.is_empty() {
        format!("{} has no branch besides {}.", args.table, args.target)
    } else {
        format!(
            "{}\nEach branch alone against {} as it is now; no check was run, nothing was written.",
            lines.render(),
            args.target
        )
    };
    Ok(Answer::new(text, &planned))
}
