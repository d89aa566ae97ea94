//! Trying out commits to several tables: all of them, or none (case O30).

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg_kernel::commit::{Requirement, Update};
use mergeberg_kernel::ids::{TableName, TableUuid};

use super::probe::{Seen, Tools, scratch_name};
use crate::table::catalog::{CatalogError, SetOutcome, TableChange};
use crate::table::create::TableDefinition;
use crate::table::loaded::LoadedTable;

/// The property that the tried commits set.
const MARK: &str = "mergeberg.doctor";

/// Makes two scratch tables, tries them together, and takes them away. What could not be taken away is told.
pub(super) async fn several(
    tools: &Tools,
    namespace: &[String],
    definition: &TableDefinition,
) -> Result<(Seen, Option<String>), CatalogError> {
    let mut made: Vec<Arc<LoadedTable>> = Vec::new();
    let mut seen = Ok(());
    for _ in 0..2 {
        match tools.catalog.create_scratch(&scratch_name(tools, namespace), definition).await {
            Ok(table) => made.push(table),
            Err(error) => seen = Err(error),
        }
    }
    let seen = match seen {
        Ok(()) => together(tools, &made).await,
        Err(error) => Err(error),
    };
    let mut left = None;
    for table in &made {
        if let Err(error) = tools.catalog.drop_scratch(table).await {
            left = Some(error.to_string());
        }
    }
    Ok((seen?, left))
}

async fn together(tools: &Tools, tables: &[Arc<LoadedTable>]) -> Result<Seen, CatalogError> {
    // The last one is in the way: a server that goes from table to table has changed the first by then.
    let other = TableUuid::new("00000000-0000-4000-8000-000000000000");
    let mut changes: Vec<TableChange> = tables.iter().map(|table| change(table, "refused")).collect();
    if let Some(last) = changes.last_mut() {
        last.requirements = vec![Requirement::TableUuid(other)];
    }
    let outcome = tools.catalog.commit_set(&changes).await;
    for table in tables {
        if marked(tools, &table.facts.name, "refused").await? {
            let text = "a condition on one table did not hold, and another one was changed".to_owned();
            return Ok(Seen::Wrong(text));
        }
    }
    match outcome {
        SetOutcome::NotApplied { .. } => {}
        SetOutcome::Landed(_) => {
            return Ok(Seen::Wrong(
                "the catalog says that it applied a commit which it must refuse".to_owned(),
            ));
        }
        SetOutcome::Unknown(text) => return Ok(Seen::Unclear(text)),
    }
    let mut changes = Vec::new();
    for table in tables {
        changes.push(change(&tools.catalog.load(&table.facts.name).await?, "applied"));
    }
    match tools.catalog.commit_set(&changes).await {
        SetOutcome::Landed(_) => {}
        SetOutcome::NotApplied { outcome, .. } => {
            return Ok(Seen::Wrong(super::probe::in_words(&outcome)));
        }
        SetOutcome::Unknown(text) => return Ok(Seen::Unclear(text)),
    }
    for table in tables {
        if !marked(tools, &table.facts.name, "applied").await? {
            return Ok(Seen::Wrong(
                "the catalog says that it applied the commit, and a table shows another state".to_owned(),
            ));
        }
    }
    Ok(Seen::AsItShould)
}

fn change(base: &Arc<LoadedTable>, mark: &str) -> TableChange {
    TableChange {
        base: Arc::clone(base),
        requirements: vec![Requirement::TableUuid(base.facts.uuid.clone())],
        updates: vec![Update::SetProperties(BTreeMap::from([(MARK.to_owned(), mark.to_owned())]))],
    }
}

async fn marked(tools: &Tools, table: &TableName, mark: &str) -> Result<bool, CatalogError> {
    let now = tools.catalog.load(table).await?;
    Ok(now.facts.properties.get(MARK).is_some_and(|value| value == mark))
}
