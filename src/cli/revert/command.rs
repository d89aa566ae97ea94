//! `request revert` on the command line.

use clap::Args;
use mergeberg_kernel::ids::RequestId;
use mergeberg_kernel::policy::Duration;

use super::super::answer::Answer;
use super::super::context::{Context, principal};
use super::super::enqueue::EnqueueContext;
use super::super::request::{answer_enqueued, parse_duration};
use super::super::sets;
use super::set::revert_set;
use super::{RevertArgs, RevertContext, revert};
use crate::error::UserError;
use crate::table::manifests::ManifestStore;
use crate::worker::context::MANIFEST_CACHE_BYTES;

#[derive(Debug, Args)]
pub struct RevertCommand {
    /// Id of the landed request; that of a set, or of any of its parts, takes back the set.
    pub id: i64,
    /// Of a set: take back this part by itself, and leave its other tables as they are.
    #[arg(long)]
    pub alone: bool,
    /// Why; kept with the request.
    #[arg(long)]
    pub reason: Option<String>,
    /// Class of the policy; that of the request when left out, so that the same checks hold.
    #[arg(long)]
    pub class: Option<String>,
    /// Idempotency key: reverting again with the same key gives the same request.
    #[arg(long = "key", visible_alias = "idempotency-key", value_name = "KEY")]
    pub key: Option<String>,
    /// Who reverts [default: $MERGEBERG_PRINCIPAL or the user].
    #[arg(long)]
    pub principal: Option<String>,
    /// Wait until it has ended.
    #[arg(long)]
    pub wait: bool,
    /// With --wait: give up after this long, such as 30s or 10m [default: never].
    #[arg(long, value_name = "TIME", value_parser = parse_duration, requires = "wait")]
    pub timeout: Option<Duration>,
}

pub async fn run(context: &Context, args: RevertCommand) -> Result<Answer, UserError> {
    let RevertCommand { id, alone, reason, class, key, principal: named, wait: waits, timeout } = args;
    let args = RevertArgs {
        request: RequestId(id),
        reason,
        class,
        idempotency_key: key,
        principal: principal(named, |name| std::env::var(name).ok()),
    };
    let policies = context.policies.read()?;
    let ledger = context.ledger().await?;
    let enqueue = EnqueueContext {
        catalog: context.catalog().await?.as_ref(),
        ledger,
        policies: &policies,
        now_ms: context.now_ms(),
    };
    let store = ManifestStore::new(MANIFEST_CACHE_BYTES);
    let revert_context = RevertContext { enqueue, store: &store, random: &rand::random::<u64> };
    if let Some(set) = ledger.request(args.request).await?.set.filter(|_| !alone) {
        let enqueued = revert_set(revert_context, &args, set).await?;
        return sets::answer_enqueued(ledger, enqueued, waits, timeout).await;
    }
    let enqueued = revert(revert_context, &args).await?;
    answer_enqueued(ledger, enqueued, waits, timeout).await
}
