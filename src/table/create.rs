//! Making tables: in the SQL catalog for `init`, demonstrations and tests, and anywhere the scratch tables of `doctor`.
//! No other table is ever created, renamed or dropped by a queue.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use iceberg::TableCreation;
use iceberg::spec::{
    FormatVersion, NestedField, NullOrder, PrimitiveType, Schema, SortDirection, SortField, SortOrder,
    TableMetadataBuilder, Transform, Type, UnboundPartitionSpec,
};
use mergeberg_kernel::ids::TableName;
use uuid::Uuid;

use super::catalog::{Catalog, CatalogError, off_runtime};
use super::document::Document;
use super::error::plain;
use super::loaded::LoadedTable;
use super::metadata_file::{self, Codec, MetadataFileError};
use super::sql_catalog::{SqlCatalog, file_error};

/// Table spec, "Partition Specs": field ids of partitions start at 1000.
const FIRST_PARTITION_FIELD_ID: i32 = 1000;

/// A column of a table to be: name, type as the table spec writes it (`long`, `decimal(12, 2)`), required.
#[derive(Clone, Debug)]
pub struct ColumnDefinition {
    pub name: String,
    pub type_name: String,
    pub required: bool,
}

/// One field of a sort order: column, transform, and whether large values come first; nulls are smaller than all.
#[derive(Clone, Debug)]
pub struct SortDefinition {
    pub column: String,
    pub transform: String,
    pub descending: bool,
}

/// A table to be, without any type of the crate. Field ids count from 1 in the order of the columns.
#[derive(Clone, Debug, Default)]
pub struct TableDefinition {
    pub columns: Vec<ColumnDefinition>,
    /// Column and transform (`identity`, `day`, `bucket[16]`), in order.
    pub partition: Vec<(String, String)>,
    /// How files are sorted, in order; not at all when it is empty.
    pub sort: Vec<SortDefinition>,
    pub properties: HashMap<String, String>,
    /// 2 or 3; 2 when it is not said.
    pub format_version: Option<u8>,
}

impl TableDefinition {
    pub fn format_version(mut self, version: u8) -> Self {
        self.format_version = Some(version);
        self
    }

    fn version(&self) -> Result<FormatVersion, iceberg::Error> {
        match self.format_version {
            None | Some(2) => Ok(FormatVersion::V2),
            Some(3) => Ok(FormatVersion::V3),
            Some(other) => Err(iceberg::Error::new(
                iceberg::ErrorKind::FeatureUnsupported,
                format!("tables of format version {other} are not made here"),
            )),
        }
    }

    pub fn column(mut self, name: &str, type_name: &str, required: bool) -> Self {
        self.columns.push(ColumnDefinition {
            name: name.to_owned(),
            type_name: type_name.to_owned(),
            required,
        });
        self
    }

    pub fn partitioned_by(mut self, column: &str, transform: &str) -> Self {
        self.partition.push((column.to_owned(), transform.to_owned()));
        self
    }

    pub fn sorted_by(mut self, column: &str, transform: &str, descending: bool) -> Self {
        let (column, transform) = (column.to_owned(), transform.to_owned());
        self.sort.push(SortDefinition { column, transform, descending });
        self
    }

    pub fn property(mut self, key: &str, value: &str) -> Self {
        self.properties.insert(key.to_owned(), value.to_owned());
        self
    }

    /// `CreateTableRequest` of the REST specification.
    pub(super) fn create_request(&self, name: &TableName) -> Result<serde_json::Value, iceberg::Error> {
        let schema = self.schema()?;
        let spec = self.spec(&schema)?;
        let order = self.order(&schema)?;
        let mut properties: BTreeMap<&str, &str> =
            self.properties.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let version = if self.version()? == FormatVersion::V3 { "3" } else { "2" };
        properties.insert("format-version", version);
        let mut request = serde_json::json!({
            "name": name.name,
            "schema": serde_json::to_value(&schema)?,
            "partition-spec": { "spec-id": 0, "fields": numbered(&spec)? },
            "properties": properties,
        });
        if !order.is_unsorted() {
            request["write-order"] = serde_json::to_value(&order)?;
        }
        Ok(request)
    }

    fn schema(&self) -> Result<Schema, iceberg::Error> {
        let mut fields = Vec::with_capacity(self.columns.len());
        for (column, id) in self.columns.iter().zip(1_i32..) {
            let text = serde_json::Value::from(column.type_name.clone());
            let field_type: PrimitiveType = serde_json::from_value(text)?;
            let name = column.name.clone();
            fields.push(Arc::new(NestedField::new(id, name, Type::Primitive(field_type), column.required)));
        }
        Schema::builder().with_fields(fields).build()
    }

    fn order(&self, schema: &Schema) -> Result<SortOrder, iceberg::Error> {
        let mut builder = SortOrder::builder();
        for SortDefinition { column, transform, descending } in &self.sort {
            let (direction, null_order) = match descending {
                true => (SortDirection::Descending, NullOrder::Last),
                false => (SortDirection::Ascending, NullOrder::First),
            };
            builder.with_sort_field(SortField {
                source_id: column_id(schema, column)?,
                transform: transform.parse()?,
                direction,
                null_order,
            });
        }
        builder.build(schema)
    }

    fn spec(&self, schema: &Schema) -> Result<UnboundPartitionSpec, iceberg::Error> {
        let mut builder = UnboundPartitionSpec::builder();
        for (column, transform) in &self.partition {
            let source = column_id(schema, column)?;
            let transform: Transform = transform.parse()?;
            let name = match transform {
                Transform::Identity => column.clone(),
                other => format!("{column}_{}", other.to_string().replace(['[', ']'], "")),
            };
            builder = builder.add_partition_field(source, name, transform)?;
        }
        Ok(builder.build())
    }
}

fn column_id(schema: &Schema, column: &str) -> Result<i32, iceberg::Error> {
    schema.field_id_by_name(column).ok_or_else(|| {
        iceberg::Error::new(iceberg::ErrorKind::DataInvalid, format!("there is no column {column}"))
    })
}

/// The fields of a spec with ids: some servers read no spec without them.
fn numbered(spec: &UnboundPartitionSpec) -> Result<Vec<serde_json::Value>, iceberg::Error> {
    let mut fields = Vec::new();
    for (field, id) in spec.fields().iter().zip(FIRST_PARTITION_FIELD_ID..) {
        let mut value = serde_json::to_value(field)?;
        value["field-id"] = id.into();
        fields.push(value);
    }
    Ok(fields)
}

impl SqlCatalog {
    /// As [`Self::create_table`], from a definition without any type of the crate.
    pub async fn define_table(
        &self,
        name: &TableName,
        definition: &TableDefinition,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        let invalid =
            |e: iceberg::Error| CatalogError::Refused(format!("{name} cannot be created: {}", plain(&e)));
        let schema = definition.schema().map_err(invalid)?;
        let spec = definition.spec(&schema).map_err(invalid)?;
        let order = definition.order(&schema).map_err(invalid)?;
        let version = definition.version().map_err(invalid)?;
        self.create_sorted(version, name, (schema, spec, order), definition.properties.clone()).await
    }

    /// Creates a namespace; one that exists stays as it is. Levels are joined by dots.
    pub async fn create_namespace(&self, namespace: &str) -> Result<(), CatalogError> {
        self.database.insert_namespace(namespace).await
    }

    /// Creates an empty table of format version 2 at `warehouse/namespace/name`. The namespace has to
    /// exist.
    pub async fn create_table(
        &self,
        name: &TableName,
        schema: Schema,
        spec: impl Into<UnboundPartitionSpec>,
        properties: HashMap<String, String>,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        self.create_table_of(FormatVersion::V2, name, schema, spec, properties).await
    }

    /// As [`Self::create_table`], of a format version that commits are applied to.
    pub async fn create_table_of(
        &self,
        version: FormatVersion,
        name: &TableName,
        schema: Schema,
        spec: impl Into<UnboundPartitionSpec>,
        properties: HashMap<String, String>,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        let structure = (schema, spec.into(), SortOrder::unsorted_order());
        self.create_sorted(version, name, structure, properties).await
    }

    async fn create_sorted(
        &self,
        version: FormatVersion,
        name: &TableName,
        (schema, spec, order): (Schema, UnboundPartitionSpec, SortOrder),
        properties: HashMap<String, String>,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        self.require_namespace(name).await?;
        let location = format!("{}/{}/{}", self.warehouse, name.namespace.join("/"), name.name);
        let creation = TableCreation::builder()
            .name(name.name.clone())
            .location(location.clone())
            .schema(schema)
            .partition_spec(spec)
            .sort_order(order)
            .properties(properties)
            .format_version(version)
            .build();
        let json = metadata_json(creation, (self.clock)())
            .map_err(|message| CatalogError::Refused(format!("{name} cannot be created: {message}")))?;

        let (table, file_io) = (name.clone(), self.file_io.clone());
        let made = off_runtime(move || -> Result<(LoadedTable, Vec<u8>), CatalogError> {
            let failed = |error: MetadataFileError| file_error(&table, &location, error);
            let unnamed = LoadedTable::parse(&table, &location, &json, file_io)?;
            let properties = &unnamed.facts.properties;
            let at = metadata_file::location(&unnamed.facts, 0, Uuid::new_v4()).map_err(failed)?;
            let bytes = Codec::of(properties).and_then(|codec| codec.encode(json)).map_err(failed)?;
            Ok((LoadedTable { metadata_location: at, ..unnamed }, bytes))
        });
        let (created, bytes) = made.await??;
        let at = &created.metadata_location;
        metadata_file::put(&self.file_io, at, bytes).await.map_err(|e| file_error(name, at, e))?;

        match self.database.insert(name, &created.metadata_location).await {
            Ok(true) => self.load(name).await,
            Ok(false) => {
                self.discard(created.metadata_location).await;
                Err(taken(name))
            }
            // The row may be there: the file stays.
            Err(error) => Err(error),
        }
    }

    /// Adds a table whose metadata file exists. The namespace has to exist.
    pub async fn register_table(
        &self,
        name: &TableName,
        metadata_location: &str,
    ) -> Result<Arc<LoadedTable>, CatalogError> {
        self.require_namespace(name).await?;
        // Read first: a row that points to nothing helps nobody.
        let loaded = self.load_at(name, metadata_location.to_owned()).await?;
        if self.database.insert(name, metadata_location).await? { Ok(loaded) } else { Err(taken(name)) }
    }

    /// Removes a table from the catalog. Its files stay.
    pub async fn drop_table(&self, name: &TableName) -> Result<(), CatalogError> {
        self.database.delete(name).await
    }

    /// Gives a table another name. Its files stay where they are.
    pub async fn rename_table(&self, from: &TableName, to: &TableName) -> Result<(), CatalogError> {
        self.require_namespace(to).await?;
        if self.database.rename(from, to).await? { Ok(()) } else { Err(taken(to)) }
    }

    async fn require_namespace(&self, name: &TableName) -> Result<(), CatalogError> {
        let namespace = name.namespace_text();
        if self.database.namespace_exists(&namespace).await? {
            return Ok(());
        }
        Err(CatalogError::Refused(format!("there is no namespace '{namespace}'; create it first")))
    }
}

fn taken(name: &TableName) -> CatalogError {
    CatalogError::Refused(format!("there is a table {name} already"))
}

/// The first metadata of a table, dated by our clock instead of the crate's.
fn metadata_json(creation: TableCreation, now_ms: i64) -> Result<Vec<u8>, String> {
    let built = TableMetadataBuilder::from_table_creation(creation)
        .and_then(TableMetadataBuilder::build)
        .map_err(|e| plain(&e))?;
    let json = serde_json::to_vec(&built.metadata).map_err(|e| e.to_string())?;
    let mut document = Document::parse(&json).map_err(|e| e.to_string())?;
    document.set("last-updated-ms", now_ms.to_string());
    Ok(document.to_bytes())
}
