//! Enqueue: names become ids, the head is pinned, the request is written. A library function, so that
//! every face (command line, HTTP) asks the same questions and gives the same refusals.
//!
//! Only what is wrong for good is refused here: a name that does not exist, a tag, an unknown class. What
//! depends on the target's state (already published, conflicts, checks) is decided when the request is
//! taken up, since it may change until then.

use std::sync::Arc;

use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{Principal, RefName, SnapshotId, TableName};
use mergeberg_kernel::policy::{ClassPolicy, TablePolicy};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::structure::StructureId;

use crate::config::PolicySet;
use crate::error::UserError;
use crate::ledger::{Enqueued, Ledger, NewRequest, RequestRow};
use crate::near::nearest;
use crate::table::catalog::{Capabilities, Capability, Catalog, CatalogError};
use crate::table::loaded::LoadedTable;
use crate::worker::own_sources::OWN_REFS;

/// Longest idempotency key, in bytes.
pub const MAX_KEY_BYTES: usize = 512;
/// Longest principal, in bytes.
pub const MAX_PRINCIPAL_BYTES: usize = 256;
/// Names that are listed when none is near.
const LISTED_NAMES: usize = 8;

/// What an enqueue works with.
#[derive(Clone, Copy)]
pub struct EnqueueContext<'a> {
    pub catalog: &'a dyn Catalog,
    pub ledger: &'a Ledger,
    pub policies: &'a PolicySet,
    pub now_ms: i64,
}

/// What is to be merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnqueueArgs {
    pub table: TableName,
    pub source: RefName,
    pub target: RefName,
    /// Publish the branch up to this snapshot instead of its head.
    pub snapshot: Option<SnapshotId>,
    /// `None`: by the branch's prefix.
    pub class: Option<String>,
    pub idempotency_key: Option<String>,
    pub principal: Principal,
}

/// Resolves and writes. The same key, or the same source, pin and target while open, is the same request.
pub async fn enqueue(context: EnqueueContext<'_>, args: &EnqueueArgs) -> Result<Enqueued, UserError> {
    if args.source.as_str().starts_with(OWN_REFS) {
        return Err(UserError::new(
            ReasonCode::InvalidArgument,
            format!("'{}' is a branch of a queue's own, which enqueues it itself", args.source),
        )
        .with_next("see `request enqueue --staged-snapshot` and `request revert`"));
    }
    // A head is enough, unless a snapshot is looked for in its history.
    let needed = if args.snapshot.is_some() { Needed::History } else { Needed::Heads };
    let table = usable_table(&context, &args.table, needed).await?;
    let policy = context.policies.for_table(&args.table);
    let request = match resolve(&table.facts, &policy, args) {
        Ok(request) => request,
        Err(error) => {
            return match published_before(&context, &table.facts, args, &error).await? {
                Some(row) => Ok(Enqueued::Existing(row)),
                None => Err(error),
            };
        }
    };
    check_fences(&context, &policy, &request.class).await?;
    match context.ledger.enqueue(&request, context.now_ms).await? {
        Enqueued::KeyConflict(other) => Err(key_conflict(args.idempotency_key.as_deref(), &other)),
        done => Ok(done),
    }
}

/// What the catalog can do, by its own word and by what `doctor` found (rule S4).
pub(super) async fn able(context: &EnqueueContext<'_>) -> Result<Capabilities, UserError> {
    let found = context.ledger.capabilities(context.catalog.name()).await?;
    let missing =
        found.iter().filter(|(_, able)| !**able).filter_map(|(word, _)| Capability::from_word(word));
    Ok(missing.fold(context.catalog.capabilities(), Capabilities::without))
}

/// The refusal of what a catalog cannot do.
pub(super) fn cannot(catalog: &dyn Catalog, missing: Capability) -> UserError {
    UserError::new(
        ReasonCode::CatalogRefused,
        format!("catalog '{}' has no {}: {}", catalog.name(), missing.can(), missing.without()),
    )
    .with_next("see what it can do with `mergeberg doctor --scratch NAMESPACE`; use a catalog that can")
}

/// Rules E7 and S4: a check that holds other tables at their heads needs a commit over several tables.
pub(super) async fn check_fences(
    context: &EnqueueContext<'_>,
    policy: &TablePolicy,
    class: &str,
) -> Result<(), UserError> {
    let class = policy.class_named(class);
    let fenced = class.and_then(|class| policy.checks_of(class).find(|check| check.kind.is_fenced()));
    match fenced {
        Some(check) if !able(context).await?.multi_table_commits => Err(UserError::new(
            ReasonCode::NoMultiTableCommits,
            format!(
                "check '{}' has a fence, and catalog '{}' cannot commit to several tables at once",
                check.id,
                context.catalog.name()
            ),
        )),
        _ => Ok(()),
    }
}

/// The table, if this queue can land on it.
pub(super) async fn usable_table(
    context: &EnqueueContext<'_>,
    name: &TableName,
    needed: Needed,
) -> Result<Arc<LoadedTable>, UserError> {
    let able = able(context).await?;
    if let Some(missing) = Capability::ALL.iter().find(|one| one.is_needed() && !able.has(**one)) {
        return Err(cannot(context.catalog, *missing));
    }
    let table = load(context.catalog, name, needed).await?;
    if let Some(other) = table.facts.foreign_claim(context.ledger.queue_id()) {
        let text = format!("{name} is claimed by queue {other}; this one is {}", context.ledger.queue_id());
        return Err(UserError::new(ReasonCode::ClaimedElsewhere, text));
    }
    Ok(table)
}

pub(super) fn key_conflict(key: Option<&str>, other: &RequestRow) -> UserError {
    UserError::new(
        ReasonCode::KeyConflict,
        format!(
            "the key '{}' belongs to request {}: '{}' at {} -> '{}' of {}",
            key.unwrap_or_default(),
            other.id,
            other.source,
            other.pinned,
            other.target,
            other.table
        ),
    )
}

/// A sender whose first answer was lost asks again, and by then its branch may have landed and be gone with
/// that. The key still names the request.
async fn published_before(
    context: &EnqueueContext<'_>,
    facts: &TableFacts,
    args: &EnqueueArgs,
    error: &UserError,
) -> Result<Option<RequestRow>, UserError> {
    let EnqueueArgs { table: _, source, target, snapshot, class: _, idempotency_key, principal: _ } = args;
    let Some(key) = idempotency_key else { return Ok(None) };
    if error.code != ReasonCode::BranchNotFound {
        return Ok(None);
    }
    let found = context.ledger.request_by_key(key).await?;
    Ok(found.filter(|row| {
        row.table_uuid == facts.uuid
            && row.source == *source
            && row.target == *target
            && snapshot.is_none_or(|snapshot| snapshot == row.pinned)
    }))
}

/// What of a table is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    Heads,
    /// Ancestors and snapshots that no ref names as well.
    History,
}

/// Loads a table; the error for an unknown one offers the nearest name.
pub async fn load(
    catalog: &dyn Catalog,
    table: &TableName,
    needed: Needed,
) -> Result<Arc<LoadedTable>, UserError> {
    let mut loaded = match needed {
        Needed::Heads => catalog.load_refs(table).await,
        Needed::History => catalog.load(table).await,
    };
    // Whether there has ever been a target is asked of the log, which goes with the snapshots that it names.
    if needed == Needed::Heads && loaded.as_ref().is_ok_and(|t| !t.facts.refs.contains_key(&RefName::main()))
    {
        loaded = catalog.load(table).await;
    }
    match loaded {
        Ok(loaded) => Ok(loaded),
        Err(error @ CatalogError::NotFound(_)) => {
            let names: Vec<String> =
                catalog.list_tables().await.unwrap_or_default().iter().map(ToString::to_string).collect();
            let wanted = table.to_string();
            let next = offer(&wanted, names.iter().map(String::as_str), "the catalog holds no tables");
            Err(UserError::from(error).with_next(next))
        }
        Err(error) => Err(error.into()),
    }
}

/// The pure part: what the request will be, or why it cannot be one.
pub fn resolve(
    facts: &TableFacts,
    policy: &TablePolicy,
    args: &EnqueueArgs,
) -> Result<NewRequest, UserError> {
    let EnqueueArgs { table, source, target, snapshot, class, idempotency_key, principal } = args;
    if source == target {
        return Err(UserError::new(
            ReasonCode::SourceIsTarget,
            format!("'{source}' is both source and target"),
        ));
    }
    if let Some(key) = idempotency_key {
        check_length("the idempotency key", key, MAX_KEY_BYTES)?;
    }
    check_length("the principal", principal.as_str(), MAX_PRINCIPAL_BYTES)?;
    check_target(facts, target)?;

    let head = branch_head(facts, source, ReasonCode::BranchNotFound)?;
    let pinned = match snapshot {
        None => head,
        Some(id) if facts.snapshots.is_ancestor(*id, head) && facts.snapshots.contains(*id) => *id,
        Some(id) => {
            return Err(UserError::new(
                ReasonCode::SnapshotNotFound,
                format!("snapshot {id} is not in the history of branch '{source}', whose head is {head}"),
            ));
        }
    };
    let class = class_of(policy, source, class.as_deref())?;
    Ok(NewRequest {
        table: table.clone(),
        table_uuid: facts.uuid.clone(),
        source: source.clone(),
        pinned,
        target: target.clone(),
        class: class.name,
        principal: principal.clone(),
        idempotency_key: idempotency_key.clone(),
        structure: StructureId {
            schema_id: facts.current_schema_id,
            spec_id: facts.default_spec_id,
            sort_order_id: facts.default_sort_order_id,
        },
        format_version: facts.format_version,
    })
}

/// The class that was named, else the one of the prefix, else the shipped default.
pub fn class_of(
    policy: &TablePolicy,
    source: &RefName,
    named: Option<&str>,
) -> Result<ClassPolicy, UserError> {
    let default = ClassPolicy::shipped_default();
    let Some(name) = named else {
        return Ok(policy.class_of(source).cloned().unwrap_or(default));
    };
    if let Some(class) = policy.class_named(name) {
        return Ok(class.clone());
    }
    if name == default.name {
        return Ok(default);
    }
    let known = policy.classes.iter().map(|class| class.name.as_str()).chain([default.name.as_str()]);
    let next = offer(name, known, "no class is defined");
    Err(UserError::new(
        ReasonCode::UnknownClass,
        format!("the policy of {} has no class '{name}'", policy.table),
    )
    .with_next(next))
}

/// A target exists, but for the first publish: `main` of a table that has never had a head.
pub fn check_target(facts: &TableFacts, target: &RefName) -> Result<(), UserError> {
    let first_publish =
        *target == RefName::main() && !facts.refs.contains_key(target) && facts.snapshot_log.is_empty();
    if first_publish {
        return Ok(());
    }
    branch_head(facts, target, ReasonCode::TargetNotFound).map(|_| ())
}

/// The head of a branch by its exact name. `missing` is the code when there is none.
pub fn branch_head(facts: &TableFacts, name: &RefName, missing: ReasonCode) -> Result<SnapshotId, UserError> {
    match facts.refs.get(name) {
        Some(found) if found.is_branch() => Ok(found.snapshot_id),
        Some(_) => Err(UserError::new(
            ReasonCode::NotABranch,
            format!("'{name}' is a tag of {}, not a branch", facts.name),
        )),
        None => {
            let what = if missing == ReasonCode::TargetNotFound { "target branch" } else { "branch" };
            let branches = facts.refs.values().filter(|r| r.is_branch()).map(|r| r.name.as_str());
            let next = offer(name.as_str(), branches, "the table has no branches yet: write one first");
            Err(UserError::new(missing, format!("{what} '{name}' not found in {}", facts.name))
                .with_next(next))
        }
    }
}

/// The near name, or some of those that there are.
pub(super) fn offer<'a>(wanted: &str, known: impl Iterator<Item = &'a str>, none: &str) -> String {
    let known: Vec<&str> = known.collect();
    if let Some(near) = nearest(wanted, known.iter().copied()) {
        return format!("did you mean '{near}'? names match exactly, quotes, case and blanks included");
    }
    if known.is_empty() {
        return none.to_owned();
    }
    let mut list: Vec<String> = known.iter().take(LISTED_NAMES).map(|name| format!("'{name}'")).collect();
    if known.len() > LISTED_NAMES {
        list.push(format!("and {} more", known.len() - LISTED_NAMES));
    }
    format!("there are: {}", list.join(", "))
}

pub(super) fn check_length(what: &str, text: &str, max: usize) -> Result<(), UserError> {
    if text.trim().is_empty() {
        return Err(UserError::new(ReasonCode::InvalidArgument, format!("{what} is empty"))
            .with_next("give it a value, or leave the option out"));
    }
    if text.len() > max {
        return Err(UserError::new(
            ReasonCode::InvalidArgument,
            format!("{what} is {} bytes long; at most {max} are taken", text.len()),
        )
        .with_next("shorten it"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::facts::{RefFact, RefKind};

    use super::super::testing::facts;
    use super::*;

    fn args(source: &str, target: &str) -> EnqueueArgs {
        EnqueueArgs {
            table: "nyc.flights".parse().unwrap(),
            source: RefName::new(source),
            target: RefName::new(target),
            snapshot: None,
            class: None,
            idempotency_key: None,
            principal: Principal::new("ann"),
        }
    }

    fn policy() -> TablePolicy {
        let text = "table = \"nyc.flights\"\n[[class]]\nname = \"ingest\"\nprefix = \"ingest/\"\n";
        TablePolicy::parse("p.toml", text).unwrap()
    }

    fn error(facts: &TableFacts, args: &EnqueueArgs) -> UserError {
        resolve(facts, &policy(), args).unwrap_err()
    }

    #[test]
    fn the_head_is_pinned_and_the_class_is_that_of_the_prefix() {
        let request = resolve(&facts(), &policy(), &args("ingest/a", "main")).unwrap();
        assert_eq!(request.pinned, SnapshotId(30));
        assert_eq!(request.class, "ingest");
        assert_eq!(request.table_uuid, facts().uuid);
    }

    #[test]
    fn an_earlier_snapshot_of_the_branch_can_be_pinned_but_no_other() {
        let at = |id| EnqueueArgs { snapshot: Some(SnapshotId(id)), ..args("ingest/a", "main") };
        assert_eq!(resolve(&facts(), &policy(), &at(20)).unwrap().pinned, SnapshotId(20));
        let error = error(&facts(), &at(77));
        assert_eq!(error.code, ReasonCode::SnapshotNotFound);
        assert!(error.message.contains("whose head is 30"), "{}", error.message);
    }

    #[test]
    fn case_o33_names_match_exactly_and_a_near_miss_names_the_close_one() {
        for near in ["'ingest/a'", "`ingest/a`", "\"ingest/a\"", "INGEST/A", "ingest/a ", "ingst/a"] {
            let error = error(&facts(), &args(near, "main"));
            assert_eq!(error.code, ReasonCode::BranchNotFound, "{near}");
            assert!(error.next.starts_with("did you mean 'ingest/a'?"), "{near}: {}", error.next);
        }
        let mut facts = facts();
        for name in ["feature/a b/ü", "x%2Fy", "a.b", "branch_main", "'audit-branch'", "x'; drop table t; --"]
        {
            let name = RefName::new(name);
            let kind = RefKind::Branch { min_snapshots_to_keep: None, max_snapshot_age_ms: None };
            let branch =
                RefFact { name: name.clone(), snapshot_id: SnapshotId(30), kind, max_ref_age_ms: None };
            facts.refs.insert(name.clone(), branch);
            let request = resolve(&facts, &policy(), &args(name.as_str(), "main")).unwrap();
            assert_eq!((request.source, request.class.as_str()), (name, "default"));
        }
        let error = error(&facts, &args("audit-branch", "main"));
        assert!(error.next.starts_with("did you mean ''audit-branch''?"), "{}", error.next);
    }

    #[test]
    fn a_tag_is_no_source_and_no_target() {
        assert_eq!(error(&facts(), &args("v1.0", "main")).code, ReasonCode::NotABranch);
        assert_eq!(error(&facts(), &args("ingest/a", "v1.0")).code, ReasonCode::NotABranch);
    }

    #[test]
    fn a_branch_is_not_merged_into_itself() {
        assert_eq!(error(&facts(), &args("main", "main")).code, ReasonCode::SourceIsTarget);
    }

    #[test]
    fn a_missing_target_is_refused_unless_it_is_the_first_main() {
        let missing = error(&facts(), &args("ingest/a", "staging"));
        assert_eq!(missing.code, ReasonCode::TargetNotFound);
        assert_eq!(missing.message, "target branch 'staging' not found in nyc.flights");
        assert_eq!(missing.next, "there are: 'ingest/a', 'main'");

        let mut empty = facts();
        empty.refs.remove(&RefName::main());
        // A main that was there and is gone is not a first publish.
        assert_eq!(error(&empty, &args("ingest/a", "main")).code, ReasonCode::TargetNotFound);
        empty.snapshot_log.clear();
        assert!(resolve(&empty, &policy(), &args("ingest/a", "main")).is_ok());
        assert_eq!(error(&empty, &args("ingest/a", "staging")).code, ReasonCode::TargetNotFound);
    }

    #[test]
    fn an_unknown_class_names_the_near_one_and_default_is_always_there() {
        let named = |class: &str| EnqueueArgs { class: Some(class.to_owned()), ..args("ingest/a", "main") };
        let unknown = error(&facts(), &named("ingets"));
        assert_eq!(unknown.code, ReasonCode::UnknownClass);
        assert!(unknown.next.starts_with("did you mean 'ingest'?"), "{}", unknown.next);
        assert_eq!(resolve(&facts(), &policy(), &named("default")).unwrap().class, "default");
    }

    #[test]
    fn keys_and_principals_are_bounded() {
        let empty = EnqueueArgs { idempotency_key: Some("  ".to_owned()), ..args("ingest/a", "main") };
        assert_eq!(error(&facts(), &empty).code, ReasonCode::InvalidArgument);
        let long = "k".repeat(MAX_KEY_BYTES + 1);
        let long = EnqueueArgs { idempotency_key: Some(long), ..args("ingest/a", "main") };
        assert_eq!(
            error(&facts(), &long).message,
            "the idempotency key is 513 bytes long; at most 512 are taken"
        );
    }
}
