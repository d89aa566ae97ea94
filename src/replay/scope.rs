//! Which rows of the target an operation looks at, as far as partitions can tell.

use mergeberg_kernel::filter::Filter;
use mergeberg_kernel::ids::SchemaId;
use mergeberg_kernel::record::{Names, Operation, Record, UTC, When};
use mergeberg_kernel::structure::{FieldFact, SchemaFact};

use super::columns::folded;
use super::filter::{FilterColumns, read_filter};
use crate::table::loaded::LoadedTable;

/// The operation's own filter; `None`: any row. Names are those of the schema that it was written under, types
/// are today's. The error is for people.
pub fn filter_of(
    record: &Record,
    table: &LoadedTable,
    written_under: Option<SchemaId>,
) -> Result<Option<Filter>, String> {
    let facts = &table.facts;
    let today = facts
        .schemas
        .get(&facts.current_schema_id)
        .ok_or_else(|| format!("the table has no schema {}", facts.current_schema_id))?;
    let then = written_under.and_then(|id| facts.schemas.get(&id)).unwrap_or(today);
    let columns = |alias: &str, bare: bool| Known {
        names: record.names,
        alias: folded(alias, record.names),
        bare,
        is_utc: record.time_zone == UTC,
        then,
        today,
    };
    Ok(match &record.operation {
        Operation::Append | Operation::ReplacePartitions => None,
        // Its rows tell which partitions go.
        Operation::OverwritePartitions { .. } | Operation::InsertInto { .. } => None,
        Operation::OverwriteWhere { filter, .. } => {
            Some(read_filter(filter.expr(), &columns(mergeberg_kernel::record::TARGET_ALIAS, true)))
        }
        Operation::DeleteWhere { target, filter } => Some(read_filter(filter.expr(), &columns(target, true))),
        Operation::UpdateWhere { target, filter, .. } => {
            filter.as_ref().map(|filter| read_filter(filter.expr(), &columns(target, true)))
        }
        Operation::MergeInto(merge) => {
            // A clause for target rows that nothing matches looks at all of them.
            let looks_at_all = merge.clauses.iter().any(|clause| clause.when == When::NotMatchedBySource);
            (!looks_at_all).then(|| read_filter(merge.on.expr(), &columns(&merge.target, false)))
        }
    })
}

/// The target's columns in a condition.
struct Known<'a> {
    names: Names,
    alias: String,
    /// A name without alias is the target's.
    bare: bool,
    /// Beside a time with a zone, which a statement's literals are, local times have an order of their own in a zone
    /// whose clocks are changed.
    is_utc: bool,
    then: &'a SchemaFact,
    today: &'a SchemaFact,
}

impl FilterColumns for Known<'_> {
    fn column(&self, relation: Option<&str>, name: &str) -> Option<&FieldFact> {
        let ours = match relation {
            None => self.bare,
            Some(relation) => folded(relation, self.names) == self.alias,
        };
        if !ours {
            return None;
        }
        let name = folded(name, self.names);
        let mut found = self.then.fields.iter().filter(|field| folded(&field.name, self.names) == name);
        let (field, other) = (found.next()?, found.next());
        if other.is_some() {
            return None;
        }
        self.today.field(field.id).filter(|field| self.is_utc || field.type_name != "timestamp")
    }
}
