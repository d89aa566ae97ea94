//! `plan`: what the queue would do with branches as they are, without enqueuing anything (rule S2).

use std::path::{Path, PathBuf};

use mergeberg_kernel::ids::{RefName, TableName};
use mergeberg_kernel::reason::ReasonCode;

use super::answer::Answer;
use super::context::Context;
use super::enqueue_set::{PartArgs, check_names};
use super::set_file::SetFile;
use super::worker::{of_worker, open};
use super::{enqueue, parse_ref};
use crate::error::UserError;
use crate::report::text::Columns;

/// Say what would become of branches as they are; writes nothing.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// Namespace and name, such as nyc.flights.
    #[arg(long, required_unless_present = "set")]
    pub table: Option<TableName>,
    /// The branch to merge into.
    #[arg(long, default_value = "main", value_parser = parse_ref)]
    pub target: RefName,
    /// A branch to look at; all but the target when none is named.
    #[arg(long, value_parser = parse_ref)]
    pub source: Vec<RefName>,
    /// A file of a set, as for `request enqueue`: would it land?
    #[arg(long, value_name = "FILE", conflicts_with_all = ["table", "target", "source"])]
    pub set: Option<PathBuf>,
}

pub async fn run(context: &Context, args: &PlanArgs) -> Result<Answer, UserError> {
    if let Some(file) = &args.set {
        return plan_set(context, file).await;
    }
    let Some(name) = &args.table else {
        // Told by the command line itself.
        return Err(UserError::new(ReasonCode::InvalidArgument, "no table was named"));
    };
    let catalog = context.catalog().await?;
    let table = enqueue::load(catalog.as_ref(), name, enqueue::Needed::History).await?;
    enqueue::check_target(&table.facts, &args.target)?;
    for source in &args.source {
        enqueue::branch_head(&table.facts, source, ReasonCode::BranchNotFound)?;
    }
    let worker = open(context).await?;
    let planned = worker.plan(name, &args.target, &args.source).await.map_err(of_worker)?;
    let mut lines = Columns::new(&["branch", "class", "would be", "why"]);
    for branch in &planned {
        let result = match &branch.reason {
            Some(reason) => format!("{} [{reason}]", branch.result),
            None => branch.result.clone(),
        };
        lines.push(vec![branch.source.to_string(), branch.class.clone(), result, branch.text.clone()]);
    }
    let text = if planned.is_empty() {
        format!("{} has no branch besides {}.", name, args.target)
    } else {
        format!(
            "{}\nEach branch alone against {} as it is now; no check was run, nothing was written.",
            lines.render(),
            args.target
        )
    };
    Ok(Answer::new(text, &planned))
}

/// Every part against its target. Its class and an earlier snapshot are left to the enqueue.
async fn plan_set(context: &Context, file: &Path) -> Result<Answer, UserError> {
    let parts = SetFile::read(file)?.parts();
    check_names(&parts)?;
    let catalog = context.catalog().await?;
    let worker = open(context).await?;
    let mut planned = Vec::with_capacity(parts.len());
    let mut lines = Columns::new(&["table", "branch", "class", "would be", "why"]);
    for PartArgs { table, source, target, .. } in &parts {
        let loaded = enqueue::load(catalog.as_ref(), table, enqueue::Needed::History).await;
        let loaded = loaded.map_err(|error| error.about(table))?;
        enqueue::check_target(&loaded.facts, target)?;
        enqueue::branch_head(&loaded.facts, source, ReasonCode::BranchNotFound)?;
        let branches = worker.plan(table, target, std::slice::from_ref(source)).await;
        for branch in branches.map_err(|error| of_worker(error).about(table))? {
            let result = match &branch.reason {
                Some(reason) => format!("{} [{reason}]", branch.result),
                None => branch.result.clone(),
            };
            let (class, text) = (branch.class.clone(), branch.text.clone());
            lines.push(vec![table.to_string(), source.to_string(), class, result, text]);
            planned.push(serde_json::json!({ "table": table, "target": target, "branch": branch }));
        }
    }
    let text = format!(
        "{}\nThe set lands when every part can; each is told alone against its target as it is now. No check was run, \
         nothing was written.",
        lines.render()
    );
    Ok(Answer::new(text, planned))
}
