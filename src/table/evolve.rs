//! Changes of a table's structure, as an engine's DDL makes them: for demonstrations and tests of what the
//! queue does about them. The queue itself never changes a table's structure.
//!
//! Absent on purpose: everything but the promotion of a column's type.

use std::sync::Arc;

use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{SchemaId, TableName};
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::catalog::{Catalog as _, CatalogError, off_runtime};
use super::document::{Document, DocumentError};
use super::loaded::LoadedTable;
use super::metadata_file::{self, Codec};
use super::sql_catalog::{SqlCatalog, Swap, file_error};

/// Times that the change is made again because somebody else committed meanwhile.
const MAX_TRIES: u32 = 200;

/// Promotions of format v2 that are plain words (table spec, "Schema Evolution").
const PROMOTIONS: &[(&str, &str)] = &[("int", "long"), ("float", "double")];

impl SqlCatalog {
    /// Gives a top-level column a wider type: `int` to `long` or `float` to `double`. The table gets a new
    /// current schema with the same field ids; no file is touched.
    pub async fn promote_column(
        &self,
        table: &TableName,
        column: &str,
        new_type: &str,
    ) -> Result<SchemaId, CatalogError> {
        for _ in 0..MAX_TRIES {
            let loaded = self.load(table).await?;
            let (column, new_type, now_ms) = (column.to_owned(), new_type.to_owned(), (self.clock)());
            let base = Arc::clone(&loaded);
            let (changed, bytes) =
                off_runtime(move || written_with(&base, &column, &new_type, now_ms, Uuid::new_v4()))
                    .await??;
            let to = &changed.metadata_location;
            metadata_file::put(&self.file_io, to, bytes).await.map_err(|e| file_error(table, to, e))?;
            match self.database.swap(table, &loaded.metadata_location, to).await {
                Swap::Done => return Ok(changed.facts.current_schema_id),
                Swap::Stale => self.discard(changed.metadata_location).await,
                Swap::NotApplied(error) => {
                    self.discard(changed.metadata_location).await;
                    return Err(error);
                }
                Swap::Unknown(message) => {
                    return Err(CatalogError::Unavailable(format!(
                        "nobody knows whether the change was applied ({message}); load the table and see"
                    )));
                }
            }
        }
        Err(CatalogError::Unavailable(format!("{table} is written without a pause; the change was given up")))
    }
}

/// The changed table, under a name that nobody has; with the bytes of its metadata file.
fn written_with(
    base: &LoadedTable,
    column: &str,
    new_type: &str,
    now_ms: i64,
    unique: Uuid,
) -> Result<(LoadedTable, Vec<u8>), CatalogError> {
    let table = &base.facts.name;
    let refused = |e: DocumentError| CatalogError::Refused(e.to_string());
    // A commit without updates: the times and the log of metadata files are kept as for any other.
    let applied = base.document.apply(&base.facts, &base.metadata_location, &[], now_ms).map_err(refused)?;
    let document = promoted(applied.document, &base.facts, column, new_type)
        .map_err(|message| CatalogError::Refused(format!("{table}: {message}")))?;
    let failed = |error| file_error(table, &base.facts.location, error);
    let location =
        metadata_file::next_location(&base.metadata_location, &applied.facts, unique).map_err(failed)?;
    let json = document.to_bytes();
    // Read back before it is written: what nobody can read helps nobody.
    let changed = LoadedTable::parse(table, &location, &json, base.file_io.clone())?;
    let bytes = Codec::of(&changed.facts.properties).and_then(|codec| codec.encode(json)).map_err(failed)?;
    Ok((changed, bytes))
}

/// The document with one more schema, which is the current one.
fn promoted(
    mut document: Document,
    facts: &TableFacts,
    column: &str,
    new_type: &str,
) -> Result<Document, String> {
    // Other schemas stay as they are written, whatever they hold.
    let mut schemas: Vec<Box<RawValue>> = document.required("schemas").map_err(|e| e.to_string())?;
    let mut newest = -1;
    let mut current = None;
    for raw in &schemas {
        let schema: Value = serde_json::from_str(raw.get()).map_err(|e| e.to_string())?;
        let id = schema.get("schema-id").and_then(Value::as_i64).ok_or("a schema has no id")?;
        newest = newest.max(id);
        if id == i64::from(facts.current_schema_id.0) {
            current = Some(schema);
        }
    }
    let mut schema = current.ok_or("the current schema is missing")?;
    let id = newest + 1;
    let field = schema
        .get_mut("fields")
        .and_then(Value::as_array_mut)
        .and_then(|fields| fields.iter_mut().find(|f| f.get("name").is_some_and(|name| name == column)))
        .ok_or_else(|| format!("there is no column '{column}'"))?;
    let old_type = field.get("type").and_then(Value::as_str).unwrap_or("a nested type").to_owned();
    if !PROMOTIONS.contains(&(old_type.as_str(), new_type)) {
        return Err(format!("column '{column}' is {old_type}, which cannot become {new_type}"));
    }
    field["type"] = Value::from(new_type);
    schema["schema-id"] = Value::from(id);
    schemas.push(RawValue::from_string(schema.to_string()).map_err(|e| e.to_string())?);
    document.set("schemas", serde_json::to_string(&schemas).map_err(|e| e.to_string())?);
    document.set("current-schema-id", id.to_string());
    Ok(document)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::super::create::TableDefinition;
    use super::*;

    async fn table(folder: &std::path::Path) -> (SqlCatalog, TableName) {
        let clock = Arc::new(AtomicI64::new(1_000));
        let catalog = SqlCatalog::create(
            "test",
            &folder.join("catalog.db").display().to_string(),
            &folder.join("warehouse").display().to_string(),
            Arc::new(move || clock.fetch_add(1, Ordering::SeqCst)),
        )
        .await
        .unwrap();
        catalog.create_namespace("shop").await.unwrap();
        let name: TableName = "shop.orders".parse().unwrap();
        let definition = TableDefinition::default()
            .column("id", "int", true)
            .column("price", "float", false)
            .column("day", "date", true)
            .partitioned_by("day", "identity");
        catalog.define_table(&name, &definition).await.unwrap();
        (catalog, name)
    }

    #[tokio::test]
    async fn a_promotion_adds_a_schema_and_keeps_field_ids() {
        let folder = tempfile::tempdir().unwrap();
        let (catalog, name) = table(folder.path()).await;
        let before = catalog.load(&name).await.unwrap();
        let id = catalog.promote_column(&name, "id", "long").await.unwrap();
        let after = catalog.load(&name).await.unwrap();
        assert_eq!(after.facts.current_schema_id, id);
        assert_ne!(before.facts.current_schema_id, id);
        assert_eq!(after.facts.schemas.len(), 2);
        let field = after.facts.schemas[&id].field_by_name("id").unwrap();
        let old = before.facts.schemas[&before.facts.current_schema_id].field_by_name("id").unwrap();
        assert_eq!((field.id, field.type_name.as_str()), (old.id, "long"));
        assert_eq!(after.facts.uuid, before.facts.uuid);
        assert!(after.facts.last_updated_ms > before.facts.last_updated_ms);
        let log: Value = after.document.required("metadata-log").unwrap();
        assert_eq!(log[0]["metadata-file"], before.metadata_location.as_str());
    }

    #[tokio::test]
    async fn what_would_lose_values_is_refused_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (catalog, name) = table(folder.path()).await;
        let before = catalog.load(&name).await.unwrap();
        for (column, to) in [("id", "string"), ("id", "double"), ("day", "long"), ("gone", "long")] {
            let error = catalog.promote_column(&name, column, to).await.unwrap_err();
            assert!(error.to_string().contains(&format!("'{column}'")), "{error}");
        }
        assert_eq!(catalog.load(&name).await.unwrap().metadata_location, before.metadata_location);
    }
}
