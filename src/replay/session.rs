//! What a recorded operation can see: the target at the car's parent, its pinned inputs, and nothing else
//! (rules S1, C3).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use datafusion::arrow::array::timezone::Tz;
use datafusion::arrow::datatypes::{DataType, Fields};
use datafusion::common::DFSchema;
use datafusion::execution::FunctionRegistry;
use datafusion::execution::context::SQLOptions;
use datafusion::functions::core::expr_fn::{get_field, named_struct};
use datafusion::logical_expr::{AggregateUDF, Expr, ExprSchemable as _, cast, ident, lit, when};
use datafusion::prelude::{DataFrame, SessionContext};
use datafusion::scalar::ScalarValue;
use datafusion::sql::TableReference;
use datafusion::sql::parser::Statement as EngineStatement;
use datafusion::sql::sqlparser::ast::{Expr as SqlExpr, ExprWithAlias, Query, Statement};
use mergeberg_kernel::ids::SchemaId;
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::record::{Names, PinnedInput, Record, TARGET_ALIAS};

use super::columns::{TargetColumns, column, folded, hidden};
use super::error::ReplayError;
use super::in_zone::{ZonesByOurselves, is_utc};
use super::semantics::SparkOperators;
use super::sum::CheckedSum;
use crate::table::catalog::{Catalog, CatalogError};
use crate::table::course::Counts;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::{FileScope, ManifestStore};
use crate::table::scan::{RowReader, ScanFile, live_rows};
use crate::validate::membership::{self, Memberships};
use crate::validate::{Engine, FilesTable};

/// The rows that an operation may change, with where they are.
pub(super) const ROWS: &str = "\u{1}rows";
/// Column: number of the data file, in the order that the rows were given in.
pub(super) const ORIGIN: &str = "\u{1}origin";
/// Column: position in that file.
pub(super) const POSITION: &str = "\u{1}position";

/// Column: the row's id, in tables of format v3; it stays with a row whose values change.
pub(super) const ROW_ID: &str = "\u{1}row_id";

/// The session of one operation.
pub(super) struct Session {
    pub context: SessionContext,
    /// Name of the row ids in the files, in tables that have them.
    pub row_ids: Option<String>,
    pub columns: TargetColumns,
    pub names: Names,
    /// How memberships are planned.
    memberships: Memberships,
    /// The zone in which a statement reads and shows times.
    zone: Option<Arc<str>>,
}

/// Who reads.
pub(super) struct Sources<'a> {
    pub engine: &'a Arc<Engine>,
    pub store: &'a ManifestStore,
    pub catalog: &'a dyn Catalog,
}

/// The target as an operation is given it.
#[derive(Default)]
pub(super) struct Given<'a> {
    /// The files that it may change.
    pub rows: &'a [ScanFile],
    /// Every live file.
    pub all: &'a [ScanFile],
    pub counts: Arc<Counts>,
}

impl Session {
    pub async fn open(
        sources: &Sources<'_>,
        table: &Arc<LoadedTable>,
        written_under: SchemaId,
        record: &Record,
        given: Given<'_>,
    ) -> Result<Self, ReplayError> {
        let Given { rows, all, counts } = given;
        let expect = |files: &[ScanFile]| {
            let rows: i64 = files.iter().map(|file| file.file.fact.records).sum();
            counts.rows_to_read.fetch_add(rows.max(0).cast_unsigned(), Ordering::Relaxed);
        };
        let names = record.names;
        let context = sources.engine.session_with(|config| {
            let options = config.options_mut();
            options.sql_parser.enable_ident_normalization = names == Names::AnyCase;
            if names == Names::AnyCase {
                // Spark: nulls are the smallest.
                options.sql_parser.default_null_ordering = "nulls_min".to_owned();
                options.sql_parser.parse_float_as_decimal = true;
                options.execution.time_zone = Some(record.time_zone.clone());
            }
        });
        if names == Names::AnyCase {
            let state = context.state_ref();
            let mut state = state.write();
            state.register_expr_planner(Arc::new(SparkOperators))?;
            state.register_udaf(Arc::new(AggregateUDF::from(CheckedSum::new())))?;
            state.add_analyzer_rule(Arc::new(ZonesByOurselves));
        }
        let reader = Arc::new(RowReader::new(table, table.facts.current_schema_id)?);
        let then = RowReader::new(table, written_under)?;
        let columns =
            TargetColumns::new(reader.arrow_schema(), reader.new_values()?, then.arrow_schema(), names)?;
        let keeping = Arc::new(RowReader::new(table, table.facts.current_schema_id)?.with_lineage()?);
        // The first of what lineage adds.
        let first = keeping.arrow_schema().fields().get(columns.all.len());
        let row_ids = first.map(|field| field.name().clone());
        let memberships =
            if sources.engine.is_sparing() { Memberships::WrittenOut } else { Memberships::LeftToTheEngine };
        let zone = (names == Names::AnyCase).then(|| zone_of(record)).transpose()?;
        let session = Self { context, row_ids, columns, names, zone, memberships };
        let counters = Arc::clone(&counts.read);
        expect(rows);
        let parallel = sources.engine.parallelism();
        let files = rows.iter().zip(0_i32..).map(|(file, at)| file.clone().with_origin(at)).collect();
        let located = FilesTable::new(keeping, files, parallel, Arc::clone(&counters))
            .with_origin_as(ORIGIN)
            .with_position_as(POSITION);
        session.register_target(ROWS, located, true)?;
        if record.reads_target {
            expect(all);
            let files = FilesTable::new(reader, all.to_vec(), parallel, Arc::clone(&counters));
            session.register_target(TARGET_ALIAS, files, false)?;
        }
        for (alias, pin) in &record.inputs {
            let (pinned, files) = pinned_input(sources, alias, pin).await?;
            expect(&files);
            let reader = Arc::new(RowReader::new(&pinned, schema_of(&pinned, pin))?);
            let files = FilesTable::new(reader, files, parallel, Arc::clone(&counters));
            session.register_input(alias, files)?;
        }
        Ok(session)
    }

    /// The target's columns under the operation's names; with `located`, all of today's under hidden names and
    /// where each row is.
    fn register_target(&self, name: &str, files: FilesTable, located: bool) -> Result<(), ReplayError> {
        let mut columns: Vec<Expr> = Vec::new();
        for at in &self.columns.known {
            let Some(known) = self.columns.all.get(*at) else { continue };
            if let Some(spoken) = &known.spoken {
                columns.push(self.zoned(ident(known.name.as_str()), &known.data_type)?.alias(spoken));
            }
        }
        if located {
            let all = self.columns.all.iter().enumerate();
            columns.extend(all.map(|(at, c)| column(&c.name).alias(hidden(at))));
            columns.extend([column(ORIGIN), column(POSITION)]);
            columns.extend(self.row_ids.as_ref().map(|name| column(name).alias(ROW_ID)));
        }
        self.register(name, files, columns)
    }

    fn register_input(&self, alias: &str, files: FilesTable) -> Result<(), ReplayError> {
        use datafusion::catalog::TableProvider as _;
        let schema = files.schema();
        let columns = schema.fields().iter().map(|field| {
            let name = folded(field.name(), self.names);
            Ok(self.zoned(column(field.name()), field.data_type())?.alias(name))
        });
        let columns = columns.collect::<Result<Vec<Expr>, ReplayError>>()?;
        self.register(alias, files, columns)
    }

    /// A time with a zone in that of the statement: its hour, its day and its text are those there.
    fn zoned(&self, value: Expr, data_type: &DataType) -> Result<Expr, ReplayError> {
        let Some(zone) = &self.zone else { return Ok(value) };
        Ok(match data_type {
            DataType::Timestamp(unit, Some(own)) if own != zone => {
                cast(value, DataType::Timestamp(*unit, Some(Arc::clone(zone))))
            }
            _ if is_utc(zone) || !holds_zoned(data_type) => value,
            _ => {
                return Err(ReplayError::failed(format!(
                    "{value} holds times with a zone inside, which are read in UTC only; record the operation in its \
                     typed form"
                )));
            }
        })
    }

    /// The value, over columns of `schema`, as one of the target's column. A local time, a day or a text that becomes a
    /// time with a zone is one of the statement's zone.
    pub fn assigned(
        &self,
        value: Expr,
        schema: &DFSchema,
        data_type: &DataType,
    ) -> Result<Expr, ReplayError> {
        require_fields(&value.get_type(schema)?, data_type)?;
        let value = match (&self.zone, data_type) {
            (Some(zone), DataType::Timestamp(unit, Some(_))) if !is_utc(zone) => {
                cast(value, DataType::Timestamp(*unit, Some(Arc::clone(zone))))
            }
            _ => value,
        };
        Ok(cast(value, data_type.clone()))
    }

    /// The struct with other values in some of its fields, or in fields of fields; no two of them inside of each other.
    /// Around a field that is set there is a struct, also where there was null (Spark: `AssignmentUtils`).
    pub fn with_fields(
        &self,
        whole: &Expr,
        schema: &DFSchema,
        data_type: &DataType,
        set: &[(&[String], Expr)],
    ) -> Result<Expr, ReplayError> {
        if let [(path, value)] = set
            && path.is_empty()
        {
            return self.assigned(value.clone(), schema, data_type);
        }
        let names: Vec<String> =
            set.iter().filter_map(|(path, _)| path.first()).map(|name| self.folded(name)).collect();
        let DataType::Struct(fields) = data_type else {
            let name = names.first().map_or("", String::as_str);
            return Err(ReplayError::failed(format!(
                "'{name}' is set inside of a column that has no fields"
            )));
        };
        for name in &names {
            match fields.iter().filter(|field| self.folded(field.name()) == *name).count() {
                1 => {}
                0 => {
                    return Err(ReplayError::failed(format!(
                        "there is no field '{name}' to be set, or not any more"
                    )));
                }
                _ => {
                    return Err(ReplayError::failed(format!(
                        "fields named '{name}' differ in upper and lower case only, so which one is set is open"
                    )));
                }
            }
        }
        let mut parts = Vec::with_capacity(fields.len() * 2);
        for field in fields {
            // A null struct has no fields, whatever lies below its nulls.
            let own = when(whole.clone().is_null(), lit(ScalarValue::try_from(field.data_type())?))
                .otherwise(get_field(whole.clone(), field.name().as_str()))?;
            let wanted = self.folded(field.name());
            let inside: Vec<(&[String], Expr)> = set
                .iter()
                .filter_map(|(path, value)| {
                    let (name, rest) = path.split_first()?;
                    (self.folded(name) == wanted).then(|| (rest, value.clone()))
                })
                .collect();
            parts.push(lit(field.name().as_str()));
            parts.push(match inside.is_empty() {
                true => own,
                false => self.with_fields(&own, schema, field.data_type(), &inside)?,
            });
        }
        Ok(cast(named_struct(parts), data_type.clone()))
    }

    fn register(&self, name: &str, files: FilesTable, columns: Vec<Expr>) -> Result<(), ReplayError> {
        let view = self.context.read_table(Arc::new(files))?.select(columns)?.into_view();
        self.context.register_table(TableReference::bare(name.to_owned()), view)?;
        Ok(())
    }

    /// Plans a query. Nothing but queries is planned.
    pub async fn plan(&self, query: &Query) -> Result<DataFrame, ReplayError> {
        let mut query = query.clone();
        membership::write_out(&mut query, self.memberships)
            .map_err(|e| ReplayError::request(ReasonCode::RecordInvalid, e.to_string()))?;
        let statement = Statement::Query(Box::new(query));
        let plan =
            self.context.state().statement_to_plan(EngineStatement::Statement(Box::new(statement))).await?;
        SQLOptions::new()
            .with_allow_ddl(false)
            .with_allow_dml(false)
            .with_allow_statements(false)
            .verify_plan(&plan)?;
        Ok(self.context.execute_logical_plan(plan).await?)
    }

    /// An expression over the columns of `schema`, without subqueries.
    pub fn expression(&self, expr: &SqlExpr, schema: &DFSchema) -> Result<Expr, ReplayError> {
        let expr = ExprWithAlias { expr: expr.clone(), alias: None };
        Ok(self.context.state().create_logical_expr_from_sql_expr(expr, schema)?)
    }

    /// A name of the operation as the engine is to take it.
    pub fn folded(&self, name: &str) -> String {
        folded(name, self.names)
    }
}

/// A struct is read as the target's by its fields' names, letter for letter, and Spark reads it by their places, or by names
/// in any case: only where all of that is the same is there no doubt. A field that is new since has no value.
fn require_fields(value: &DataType, target: &DataType) -> Result<(), ReplayError> {
    match (value, target) {
        (DataType::Struct(given), DataType::Struct(wanted)) => {
            let mut rest = wanted.iter();
            for field in given {
                let Some(to) = rest.find(|to| to.name() == field.name()) else {
                    let names = |fields: &Fields| {
                        fields.iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", ")
                    };
                    return Err(ReplayError::failed(format!(
                        "a struct of ({}) is stored in one of ({}): name its fields as the column does, in its order",
                        names(given),
                        names(wanted)
                    )));
                };
                require_fields(field.data_type(), to.data_type())?;
            }
            Ok(())
        }
        (
            DataType::List(given) | DataType::LargeList(given),
            DataType::List(wanted) | DataType::LargeList(wanted),
        )
        | (DataType::Map(given, _), DataType::Map(wanted, _)) => {
            // The entries of a map have one form, whatever a library calls their two sides.
            match (given.data_type(), wanted.data_type(), matches!(value, DataType::Map(..))) {
                (DataType::Struct(given), DataType::Struct(wanted), true) => {
                    let mut sides = given.iter().zip(wanted);
                    sides.try_for_each(|(one, other)| require_fields(one.data_type(), other.data_type()))
                }
                (given, wanted, _) => require_fields(given, wanted),
            }
        }
        _ => Ok(()),
    }
}

fn zone_of(record: &Record) -> Result<Arc<str>, ReplayError> {
    let zone = record.time_zone.as_str();
    match zone.parse::<Tz>() {
        Ok(_) => Ok(Arc::from(zone)),
        Err(_) => Err(ReplayError::request(
            ReasonCode::RecordInvalid,
            format!(
                "'session-timezone' is '{zone}'; name a zone as in Europe/Berlin, or an offset as in +02:00"
            ),
        )),
    }
}

/// Nested, or by itself.
fn holds_zoned(data_type: &DataType) -> bool {
    match data_type {
        DataType::Timestamp(_, zone) => zone.is_some(),
        DataType::Struct(fields) => fields.iter().any(|field| holds_zoned(field.data_type())),
        DataType::List(field) | DataType::LargeList(field) | DataType::Map(field, _) => {
            holds_zoned(field.data_type())
        }
        _ => false,
    }
}

async fn pinned_input(
    sources: &Sources<'_>,
    alias: &str,
    pin: &PinnedInput,
) -> Result<(Arc<LoadedTable>, Vec<ScanFile>), ReplayError> {
    let missing = |text: String| ReplayError::request(ReasonCode::InputMissing, text);
    let table = match sources.catalog.load(&pin.table).await {
        Ok(table) => table,
        Err(CatalogError::NotFound(name)) => {
            return Err(missing(format!("input '{alias}': there is no table {name}")));
        }
        Err(error) => return Err(error.into()),
    };
    if let Some(uuid) = &pin.uuid
        && uuid != table.facts.uuid.as_str()
    {
        return Err(missing(format!("input '{alias}': {} is another table by now", pin.table)));
    }
    let Some(snapshot) = table.facts.snapshots.get(pin.snapshot_id) else {
        return Err(missing(format!(
            "input '{alias}': snapshot {} of {} was expired",
            pin.snapshot_id, pin.table
        )));
    };
    let live = sources.store.live_files(&table, snapshot, &FileScope::Table).await?;
    Ok((Arc::clone(&table), live_rows(live)?))
}

/// A pinned snapshot is read with its own schema.
fn schema_of(table: &LoadedTable, pin: &PinnedInput) -> SchemaId {
    table
        .facts
        .snapshots
        .get(pin.snapshot_id)
        .and_then(|snapshot| snapshot.schema_id)
        .unwrap_or(table.facts.current_schema_id)
}
