"""The operations of spark_engine.py through Iceberg's Java API: what Spark's SQL cannot say or write."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from pyspark.java_gateway import ensure_callback_server_started
from spark_engine import BadJob, Catalog, operation, quoted

MAIN = "main"


# ---- tables ------------------------------------------------------------------------------------------------


@operation("catalog")
def versions(catalog: Catalog) -> dict[str, Any]:
    return {"spark": catalog.spark.version, "iceberg-java": catalog.jvm.org.apache.iceberg.IcebergBuild.version()}


@operation("catalog")
def create_namespace(catalog: Catalog, namespace: list[str]) -> dict[str, Any]:
    catalog.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {quoted([catalog.name, *namespace])}")
    return {}


@operation("table")
def create_table(
    catalog: Catalog,
    table: list[str],
    schema: dict[str, Any],
    spec: dict[str, Any] | None = None,
    location: str | None = None,
    properties: dict[str, str] = {},
) -> dict[str, Any]:
    """A table of schema and partition spec as JSON, in the form of metadata files: types that Spark's SQL has
    no word for (uuid, fixed, nanoseconds) and default values."""
    iceberg = catalog.jvm.org.apache.iceberg
    java_schema = iceberg.SchemaParser.fromJson(json.dumps(schema))
    java_spec = iceberg.PartitionSpec.unpartitioned()
    if spec is not None:
        java_spec = iceberg.PartitionSpecParser.fromJson(java_schema, json.dumps(spec))
    created = catalog.java.createTable(catalog.java_identifier(table), java_schema, java_spec, location, properties)
    return load_table(created)


@operation("table")
def register_table(catalog: Catalog, table: list[str], metadata_location: str) -> dict[str, Any]:
    """A table of this name on an existing metadata file."""
    return load_table(catalog.java.registerTable(catalog.java_identifier(table), metadata_location))


@operation("table")
def unregister_table(catalog: Catalog, table: list[str]) -> dict[str, Any]:
    """The name goes, the files stay."""
    return {"dropped": catalog.java.dropTable(catalog.java_identifier(table), False)}


@operation("table")
def load(catalog: Catalog, table: list[str]) -> dict[str, Any]:
    return load_table(catalog.java_table(table))


def load_table(table: Any) -> dict[str, Any]:
    refs = {
        name: {"snapshot_id": ref.snapshotId(), "type": "branch" if ref.isBranch() else "tag"}
        for name, ref in dict(table.refs()).items()
    }
    return {
        "location": table.location(),
        "metadata_location": table.operations().current().metadataFileLocation(),
        "format_version": table.operations().current().formatVersion(),
        "schema_id": table.schema().schemaId(),
        "spec_id": table.spec().specId(),
        "refs": refs,
    }


@operation("table")
def files(catalog: Catalog, table: list[str], ref: str = MAIN) -> dict[str, Any]:
    """Paths of the live data and delete files, each with what it is, in order."""
    source = quoted([catalog.name, *table, "files"])
    data = catalog.spark.sql(f"SELECT file_path, content, spec_id, record_count FROM {source} VERSION AS OF '{ref}'")
    kinds = ["data", "position_deletes", "equality_deletes"]
    found = [{"path": row[0], "content": kinds[row[1]], "spec_id": row[2], "records": row[3]} for row in data.collect()]
    return {"files": sorted(found, key=lambda file: (file["path"], file["content"]))}


@operation("table")
def planned_files(catalog: Catalog, table: list[str], ref: str = MAIN) -> dict[str, Any]:
    """Paths of the data files that a scan of a ref would read, each with its partition, by Iceberg alone: Spark need
    not know the table's types."""
    tasks = catalog.java_table(table).newScan().useRef(ref).planFiles().iterator()
    found = []
    while tasks.hasNext():
        file = tasks.next().file()
        found.append({"path": file.location(), "partition": file.partition().toString()})
    return {"files": sorted(found, key=lambda file: file["path"])}


# ---- row deltas --------------------------------------------------------------------------------------------


@operation("writes")
def row_delta(
    catalog: Catalog,
    table: list[str],
    deletes: str | None = None,
    on: list[str] = [],
    inserts: str | None = None,
    like: str | None = None,
    spec_id: int | None = None,
    branch: str = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """One snapshot that adds rows (query `inserts`) and an equality-delete file (query `deletes` of the columns
    `on`), as Flink's upserts do. Both files go into the partition of the live data file `like`, or of the spec
    `spec_id`, which has no fields then: the delete is a global one."""
    java = catalog.java_table(table)
    if like is not None:
        spec, partition = place_of(java, like, branch)
    else:
        spec, partition = java.spec() if spec_id is None else java.specs().get(spec_id), None
        if spec.isPartitioned():
            raise BadJob("the spec is partitioned: name a data file of the partition with `like`")
    delta = java.newRowDelta().toBranch(branch)
    paths = {}
    if inserts is not None:
        file = write(catalog, java, spec, partition, inserts, None)
        paths["inserts"] = file.location()
        delta = delta.addRows(file)
    if deletes is not None:
        file = write(catalog, java, spec, partition, deletes, on)
        paths["deletes"] = file.location()
        delta = delta.addDeletes(file)
    for key, value in snapshot_properties.items():
        delta = delta.set(key, value)
    delta.commit()
    return paths


def place_of(java: Any, path: str, branch: str) -> tuple[Any, Any]:
    tasks = java.newScan().useRef(branch).planFiles().iterator()
    while tasks.hasNext():
        file = tasks.next().file()
        if file.location() == path:
            return java.specs().get(file.specId()), file.partition()
    raise ValueError(f"{path} is not live on {branch!r}")


def write(catalog: Catalog, java: Any, spec: Any, partition: Any, query: str, on: list[str] | None) -> Any:
    """The rows of a query as one data file, or one equality-delete file of the columns `on`."""
    jvm = catalog.jvm
    data = catalog.spark.sql(query)
    schema = java.schema() if on is None else java.schema().select(on)
    names = [field.name() for field in schema.columns()]
    data = data.select(*names)
    name = java.properties().getOrDefault("write.format.default", "parquet")
    if on is not None:
        name = java.properties().getOrDefault("write.delete.format.default", name)
    file_format = jvm.org.apache.iceberg.FileFormat.fromString(name)
    factory = jvm.org.apache.iceberg.io.OutputFileFactory.builderFor(java, 0, 0).format(file_format)
    factory = factory.suffix("data" if on is None else "eq-deletes")
    output = factory.build().newOutputFile(spec, partition)
    registry = jvm.org.apache.iceberg.formats.FormatModelRegistry
    row_class = jvm.java.lang.Class.forName("org.apache.spark.sql.catalyst.InternalRow")
    if on is None:
        builder = registry.dataWriteBuilder(file_format, row_class, output)
    else:
        builder = registry.equalityDeleteWriteBuilder(file_format, row_class, output)
        ids = jvm.java.util.ArrayList()
        for name in names:
            ids.add(schema.findField(name).fieldId())
        builder = builder.equalityFieldIds(ids)
    metrics = jvm.org.apache.iceberg.MetricsConfig.forTable(java)
    kind = jvm.org.apache.iceberg.spark.SparkSchemaUtil.convert(schema)
    builder = builder.schema(schema).engineSchema(kind).spec(spec).metricsConfig(metrics)
    if partition is not None:
        builder = builder.partition(partition)
    writer = builder.build()
    for row in data._jdf.queryExecution().executedPlan().executeCollect():
        writer.write(row)
    writer.close()
    return writer.toDataFile() if on is None else writer.toDeleteFile()


# ---- commits -----------------------------------------------------------------------------------------------


@operation("writes")
def java_commit(
    catalog: Catalog,
    table: list[str],
    how: str,
    select: str | None,
    column: str,
    value: Any,
    branch: str = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> None:
    """One commit of Iceberg's core on the identity partition `column` = `value`: its rows from a query, appended or in
    place of the partition, or none: the partition is deleted."""
    java = catalog.java_table(table)
    match how:
        case "append":
            update = java.newAppend()
        case "replace-partitions":
            update = java.newReplacePartitions()
        case "delete":
            expressions = catalog.jvm.org.apache.iceberg.expressions.Expressions
            update = java.newDelete().deleteFromRowFilter(expressions.equal(column, value))
        case _:
            raise BadJob(f"no commit {how!r}")
    if select is not None:
        partition = catalog.jvm.org.apache.iceberg.DataFiles.data(java.spec(), f"{column}={value}")
        file = write(catalog, java, java.spec(), partition, select, None)
        update = update.appendFile(file) if how == "append" else update.addFile(file)
    for key, text in snapshot_properties.items():
        update = update.set(key, text)
    update.toBranch(branch).commit()


class Statement:
    """A `Callable` that runs one statement."""

    class Java:
        implements = ["java.util.concurrent.Callable"]

    def __init__(self, catalog: Catalog, statement: str) -> None:
        self.catalog = catalog
        self.statement = statement

    def call(self) -> None:
        self.catalog.spark.sql(self.statement).collect()


@operation("writes")
def commit_metadata(
    catalog: Catalog,
    table: list[str],
    statement: str,
    branch: str = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> None:
    """A statement under `CommitMetadata.withCommitProperties`, as Java programs run it; `{table}` is the branch."""
    ensure_callback_server_started(catalog.spark.sparkContext._gateway)
    name = quoted([catalog.name, *table, f"branch_{branch}"])
    run = Statement(catalog, statement.replace("{table}", name))
    exception = catalog.jvm.java.lang.Class.forName("java.lang.RuntimeException")
    catalog.jvm.org.apache.iceberg.spark.CommitMetadata.withCommitProperties(snapshot_properties, run, exception)


# ---- structure ---------------------------------------------------------------------------------------------


@operation("table")
def add_column_default(catalog: Catalog, table: list[str], name: str, type: str, default: str) -> dict[str, Any]:
    """A column of a primitive type whose default, JSON as in metadata files, is the value of older rows too (format
    v3); Spark's SQL refuses it."""
    iceberg = catalog.jvm.org.apache.iceberg
    java = catalog.java_table(table)
    kind = iceberg.types.Types.fromPrimitiveString(type)
    # Through a schema: a value that comes back to Python alone would lose its Java type.
    field = {"id": 1, "name": name, "required": False, "type": type, "initial-default": json.loads(default)}
    schema = iceberg.SchemaParser.fromJson(json.dumps({"type": "struct", "fields": [field]}))
    literal = schema.findField(name).initialDefaultLiteral()
    java.updateSchema().addColumn(name, kind, literal).commit()
    return load_table(java)


# ---- expiry ------------------------------------------------------------------------------------------------


class Deleted:
    """A `Consumer` of paths to delete. Files outside the table's location are others' as well: they stay."""

    class Java:
        implements = ["java.util.function.Consumer"]

    def __init__(self, location: str) -> None:
        self.inside = plain_path(location) + "/"
        self.deleted: list[str] = []
        self.spared: list[str] = []

    def accept(self, path: str) -> None:
        file = pathlib.Path(plain_path(path))
        if str(file).startswith(self.inside):
            file.unlink(missing_ok=True)
            self.deleted.append(path)
        else:
            self.spared.append(path)


def plain_path(path: str) -> str:
    """`file:/w`, `file:///w` and `/w` are one place."""
    return "/" + path.removeprefix("file:").lstrip("/")


@operation("table")
def expire_snapshots(
    catalog: Catalog,
    table: list[str],
    older_than_ms: int,
    retain_last: int = 1,
    action: bool = False,
    incremental: bool = False,
) -> dict[str, Any]:
    """Expires snapshots and deletes the files that Iceberg finds unreachable, those below the table's location:
    by comparing what is reachable before and after, in Iceberg's core or in the procedure's `action`; or, where
    `main` is the only ref, by what each snapshot says that it did (`incremental`). Older releases always do the
    latter then; this one only where no other branch lost snapshots, so that it is asked for by its name."""
    ensure_callback_server_started(catalog.spark.sparkContext._gateway)
    java = catalog.java_table(table)
    chosen = Deleted(java.location())
    if action:
        actions = catalog.jvm.org.apache.iceberg.spark.actions.SparkActions.get(catalog.spark._jsparkSession)
        expiry = actions.expireSnapshots(java)
    else:
        expiry = java.expireSnapshots()
    expiry = expiry.expireOlderThan(older_than_ms).retainLast(retain_last).deleteWith(chosen)
    if action:
        expiry.execute()
    elif incremental:
        before = java.operations().current()
        expiry.cleanExpiredFiles(False).commit()
        clean_incrementally(catalog, java.io(), before, java.operations().refresh(), chosen)
    else:
        expiry.commit()
    return {"deleted": sorted(chosen.deleted), "spared": sorted(chosen.spared)}


def clean_incrementally(catalog: Catalog, io: Any, before: Any, after: Any, chosen: Deleted) -> None:
    """`IncrementalFileCleanup` is not public: found by name."""
    jvm = catalog.jvm
    loader = before.getClass().getClassLoader()
    constructor = loader.loadClass("org.apache.iceberg.IncrementalFileCleanup").getDeclaredConstructors()[0]
    constructor.setAccessible(True)
    executor = jvm.java.util.concurrent.Executors.newSingleThreadExecutor()
    try:
        arguments = jvm.java.util.ArrayList()
        for argument in (io, executor, executor, chosen):
            arguments.add(argument)
        level = getattr(jvm.org.apache.iceberg, "ExpireSnapshots$CleanupLevel").ALL
        constructor.newInstance(arguments.toArray()).cleanFiles(before, after, level)
    finally:
        executor.shutdown()
