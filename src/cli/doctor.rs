//! `doctor`: configuration, policies, ledger, catalog and tables looked at in turn. Whatever is broken, the
//! rest is looked at too.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::ids::TableName;
use mergeberg_kernel::reason::ReasonCode;
use serde::Serialize;

use super::answer::Answer;
use super::context::Context;
use super::exit::Exit;
use crate::config::{CatalogPlace, PolicySet};
use crate::doctor::probe::{Probed, Tools, probe};
use crate::doctor::{Found, How, Remark, Standing, tables};
use crate::error::UserError;
use crate::ledger::Ledger;
use crate::report::text::{Columns, count, duration};
use crate::table::catalog::{Capability, Catalog, CatalogError, SCRATCH_PREFIX};

/// Look whether everything is as the queue needs it.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// Try the catalog out on a table that is made in this namespace and removed again.
    #[arg(long, value_name = "NAMESPACE")]
    pub scratch: Option<String>,
}

/// One line of the first part.
#[derive(Debug, Serialize)]
struct Part {
    what: &'static str,
    standing: Standing,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<ReasonCode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

impl Part {
    fn ok(what: &'static str, text: impl Into<String>) -> Self {
        Self { what, standing: Standing::Ok, text: text.into(), code: None, next: None }
    }

    fn warning(what: &'static str, text: impl Into<String>, next: impl Into<String>) -> Self {
        Self { what, standing: Standing::Warning, text: text.into(), code: None, next: Some(next.into()) }
    }

    fn broken(what: &'static str, error: UserError) -> Self {
        let UserError { code, message, next, witnesses: _ } = error;
        Self { what, standing: Standing::Broken, text: message, code: Some(code), next: Some(next) }
    }
}

#[derive(Debug, Serialize)]
struct TablePart {
    table: TableName,
    remarks: Vec<Remark>,
}

#[derive(Debug, Serialize)]
struct Examined {
    parts: Vec<Part>,
    capabilities: Vec<Found>,
    tables: Vec<TablePart>,
    standing: Standing,
}

pub async fn run(context: &Context, args: &DoctorArgs) -> Result<Answer, UserError> {
    let mut parts = vec![Part::ok("configuration", context.config.file.display().to_string())];
    let policies = match context.policies.read() {
        Ok(policies) => {
            let files = policies.iter().count() as u64;
            parts.push(Part::ok(
                "policies",
                format!("{} ({})", context.policies.path().display(), count(files, "file")),
            ));
            Some(policies)
        }
        Err(error) => {
            parts.push(Part::broken("policies", error.into()));
            None
        }
    };
    let ledger = match context.ledger().await {
        Ok(ledger) => {
            parts.push(ledger_part(ledger, context.now_ms()).await);
            Some(ledger)
        }
        Err(error) => {
            parts.push(Part::broken("ledger", error));
            None
        }
    };
    let mut capabilities = Vec::new();
    let mut looked_at = Vec::new();
    match context.catalog().await {
        Ok(catalog) => {
            parts.push(catalog_part(context, catalog.as_ref()).await);
            let (found, tried) = examine(context, catalog, ledger, args).await?;
            capabilities = found;
            parts.extend(tried);
            if let Some(policies) = &policies {
                looked_at = table_parts(catalog.as_ref(), policies, ledger).await;
            }
        }
        Err(error) => parts.push(Part::broken("catalog", error)),
    }
    Ok(answer(parts, capabilities, looked_at))
}

/// Who leads is of interest: without a worker nothing lands.
async fn ledger_part(ledger: &Ledger, now_ms: i64) -> Part {
    let text = format!("{}, queue {}", ledger.place(), ledger.queue_id());
    match ledger.leader().await {
        Ok(Some(leader)) if leader.expires_at_ms() > now_ms => {
            Part::ok("ledger", format!("{text}; worker {} leads", leader.holder))
        }
        Ok(_) => {
            Part::warning("ledger", format!("{text}; no worker leads"), "start one with `mergeberg worker`")
        }
        Err(error) => Part::broken("ledger", error.into()),
    }
}

async fn catalog_part(context: &Context, catalog: &dyn Catalog) -> Part {
    let place = match context.config.catalog(None).map(|config| &config.place) {
        Ok(CatalogPlace::Sql(_)) => "a SQL catalog",
        Ok(CatalogPlace::Rest(_)) => "a REST catalog",
        Err(_) => "a catalog",
    };
    match catalog.list_tables().await {
        Ok(names) => {
            let left: Vec<String> = names
                .iter()
                .filter(|t| t.name.starts_with(SCRATCH_PREFIX))
                .map(ToString::to_string)
                .collect();
            let text = format!("'{}', {place} with {}", catalog.name(), count(names.len() as u64, "table"));
            if left.is_empty() {
                return Part::ok("catalog", text);
            }
            let text = format!("{text}; left by a `doctor` that was cut short: {}", left.join(", "));
            Part::warning("catalog", text, "drop them; nothing needs them")
        }
        Err(error) => Part::broken("catalog", error.into()),
    }
}

/// The catalog's capabilities: tried when a namespace is given, else as it declares them.
async fn examine(
    context: &Context,
    catalog: &Arc<dyn Catalog>,
    ledger: Option<&Ledger>,
    args: &DoctorArgs,
) -> Result<(Vec<Found>, Vec<Part>), UserError> {
    let Some(namespace) = &args.scratch else {
        return Ok((declared(catalog.as_ref(), ledger).await?, Vec::new()));
    };
    let levels: Vec<String> = namespace.split('.').map(str::to_owned).collect();
    if levels.iter().any(String::is_empty) {
        let text = format!("'{namespace}' is no namespace: levels are joined by dots, and none is empty");
        return Err(UserError::new(ReasonCode::InvalidArgument, text));
    }
    let tools = Tools {
        catalog: Arc::clone(catalog),
        clock: context.clock.clone(),
        random: Arc::new(rand::random::<u64>),
    };
    let Probed { capabilities, broken, load_ms, commit_ms, left } = match probe(&tools, &levels).await {
        Ok(probed) => probed,
        Err(error) => {
            let part = Part::broken("scratch table", UserError::from(error));
            return Ok((declared(catalog.as_ref(), ledger).await?, vec![part]));
        }
    };
    if let Some(ledger) = ledger {
        let found: BTreeMap<&str, bool> = capabilities
            .iter()
            .filter(|one| one.how == How::Tried)
            .filter_map(|one| Some((one.capability.word(), one.able?)))
            .collect();
        ledger.record_capabilities(catalog.name(), &found, context.now_ms()).await?;
    }
    let speed = |ms: u64| duration(i64::try_from(ms).unwrap_or(i64::MAX));
    let mut parts: Vec<Part> = broken
        .into_iter()
        .map(|text| {
            let error = UserError::new(ReasonCode::CatalogRefused, text);
            Part::broken(
                "scratch table",
                error.with_next("do not land on this catalog before that is mended"),
            )
        })
        .collect();
    match left {
        None if parts.is_empty() => {
            let text = format!(
                "made, written, removed; a load took {}, a commit {}",
                speed(load_ms),
                speed(commit_ms)
            );
            parts.push(Part::ok("scratch table", text));
        }
        None => {}
        Some(why) => parts.push(Part::warning("scratch table", why, "remove it by hand; nothing needs it")),
    }
    Ok((capabilities, parts))
}

/// What the catalog says of itself, less what an earlier run found missing.
async fn declared(catalog: &dyn Catalog, ledger: Option<&Ledger>) -> Result<Vec<Found>, UserError> {
    let known = match ledger {
        Some(ledger) => ledger.capabilities(catalog.name()).await?,
        None => BTreeMap::new(),
    };
    let own = catalog.capabilities();
    let found = Capability::ALL.iter().map(|&capability| {
        let tried = known.get(capability.word()).copied();
        Found {
            capability,
            able: Some(own.has(capability) && tried.unwrap_or(true)),
            how: if tried.is_some() { How::Tried } else { How::Declared },
            seen: None,
        }
    });
    Ok(found.collect())
}

/// The tables that policies name.
async fn table_parts(catalog: &dyn Catalog, policies: &PolicySet, ledger: Option<&Ledger>) -> Vec<TablePart> {
    let mut parts = Vec::new();
    for (_, policy) in policies.iter() {
        let remarks = match catalog.load(&policy.table).await {
            Ok(table) => tables::remarks(&table.facts, policy, ledger.map(Ledger::queue_id)),
            Err(error) => vec![unusable(error)],
        };
        parts.push(TablePart { table: policy.table.clone(), remarks });
    }
    parts
}

fn unusable(error: CatalogError) -> Remark {
    let error = UserError::from(error);
    Remark::new(Standing::Broken, format!("{} [{}]", error.message, error.code), error.next)
}

fn answer(parts: Vec<Part>, capabilities: Vec<Found>, tables: Vec<TablePart>) -> Answer {
    let lacking = |found: &Found| match found.able {
        Some(true) => Standing::Ok,
        _ if found.capability.is_needed() => Standing::Broken,
        _ => Standing::Ok,
    };
    let standing = (parts.iter().map(|part| part.standing))
        .chain(capabilities.iter().map(lacking))
        .chain(tables.iter().flat_map(|table| &table.remarks).map(|remark| remark.standing))
        .max()
        .unwrap_or(Standing::Ok);
    let exit = match parts.iter().find_map(|part| part.code) {
        Some(code) => Exit::of_error(code),
        None if standing == Standing::Broken => Exit::Unavailable,
        None => Exit::Ok,
    };
    let examined = Examined { parts, capabilities, tables, standing };
    Answer::new(render(&examined), examined).with_exit(exit)
}

fn render(examined: &Examined) -> String {
    let Examined { parts, capabilities, tables, standing } = examined;
    let mut text = String::new();
    let mut columns = Columns::new(&["part", "", "what was found"]);
    for part in parts {
        let code = part.code.map(|code| format!("  [{code}]")).unwrap_or_default();
        columns.push(vec![
            part.what.to_owned(),
            word(part.standing).to_owned(),
            format!("{}{code}", part.text),
        ]);
        if let Some(next) = &part.next {
            columns.push(vec![String::new(), String::new(), format!("next: {next}")]);
        }
    }
    text.push_str(&columns.render());
    if !capabilities.is_empty() {
        text.push('\n');
        text.push_str(&capability_columns(capabilities).render());
        if capabilities.iter().all(|found| found.how == How::Declared) {
            text.push_str("As the catalog says of itself; `--scratch NAMESPACE` tries it out.\n");
        }
    }
    for TablePart { table, remarks } in tables {
        text.push_str(&format!("\n{table}\n"));
        if remarks.is_empty() {
            text.push_str("  ok\n");
        }
        for Remark { standing, text: what, next } in remarks {
            text.push_str(&format!("  {}: {what}\n    next: {next}\n", word(*standing)));
        }
    }
    text.push_str(match standing {
        Standing::Ok => "\nEverything is as it should be.\n",
        Standing::Warning => "\nThe queue can work; see the warnings.\n",
        Standing::Broken => "\nThe queue cannot work as it is; see what is broken.\n",
    });
    text
}

fn capability_columns(capabilities: &[Found]) -> Columns {
    let mut columns = Columns::new(&["the catalog", "", "known", "what that means"]);
    for Found { capability, able, how, seen } in capabilities {
        let mut means = match able {
            Some(true) => String::new(),
            Some(false) => capability.without().to_owned(),
            None => "it could not be found out".to_owned(),
        };
        if let Some(seen) = seen {
            means.push_str(&format!(" ({seen})"));
        }
        let able = match able {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "?",
        };
        let how = match how {
            How::Tried => "tried",
            How::Declared => "declared",
        };
        columns.push(vec![capability.can().to_owned(), able.to_owned(), how.to_owned(), means]);
    }
    columns
}

fn word(standing: Standing) -> &'static str {
    match standing {
        Standing::Ok => "ok",
        Standing::Warning => "warning",
        Standing::Broken => "BROKEN",
    }
}
