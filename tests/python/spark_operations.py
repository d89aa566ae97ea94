"""The operations of spark_engine.py in Spark's own words: SQL, rows, data frames, procedures."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

from json_values import in_order, to_json
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType, TimestampType
from spark_engine import BadJob, Catalog, operation, quoted

SNAPSHOT_PROPERTY = "spark.sql.iceberg.snapshot-property."
OVERWRITE_MODE = "spark.sql.sources.partitionOverwriteMode"


# ---- writing -----------------------------------------------------------------------------------------------


@operation("writes")
def sql(
    catalog: Catalog,
    table: list[str],
    statements: str | list[str],
    branch: str | None = None,
    wap_branch: str | None = None,
    wap_id: str | None = None,
    overwrite_mode: str = "static",
    snapshot_properties: dict[str, str] = {},
    settings: dict[str, str] = {},
) -> dict[str, Any]:
    """Runs statements and gives the rows of the last. `{table}` in them is the table, at `branch` if one is
    named; `{base}` is the table itself, for ALTER. `wap_branch` and `wap_id` need write.wap.enabled=true."""
    names = {"{table}": named(catalog, table, branch), "{base}": named(catalog, table)}
    own = {OVERWRITE_MODE: overwrite_mode, "spark.wap.branch": wap_branch, "spark.wap.id": wap_id}
    own |= {SNAPSHOT_PROPERTY + key: value for key, value in snapshot_properties.items()}
    with configured(catalog, own | settings):
        for statement in [statements] if isinstance(statements, str) else statements:
            for placeholder, name in names.items():
                statement = statement.replace(placeholder, name)
            data = catalog.spark.sql(statement)
        return rows_of(data)


@operation("writes")
def overwrite(
    catalog: Catalog,
    table: list[str],
    select: str,
    condition: str | None = None,
    branch: str | None = None,
    snapshot_properties: dict[str, str] = {},
) -> None:
    """A data frame's overwrite: of the rows that meet `condition`, or of the partitions that it has rows for."""
    with configured(catalog, {SNAPSHOT_PROPERTY + key: value for key, value in snapshot_properties.items()}):
        writer = catalog.spark.sql(select).writeTo(named(catalog, table, branch))
        if condition is None:
            writer.overwritePartitions()
        else:
            writer.overwrite(F.expr(condition))


@operation("writes")
def data_frame(
    catalog: Catalog,
    table: list[str],
    how: str,
    select: str,
    condition: str | None = None,
    branch: str | None = None,
    snapshot_properties: dict[str, str] = {},
) -> None:
    """A data frame's write, `how` it is called, with its own option for each snapshot property."""
    writer = catalog.spark.sql(select).writeTo(named(catalog, table, branch))
    for key, value in snapshot_properties.items():
        writer = writer.option("snapshot-property." + key, value)
    match how:
        case "append":
            writer.append()
        case "overwritePartitions":
            writer.overwritePartitions()
        case "overwrite" if condition is not None:
            writer.overwrite(F.expr(condition))
        case _:
            raise BadJob(f"a data frame is not written by {how!r} under {condition!r}")


def named(catalog: Catalog, table: list[str], branch: str | None = None) -> str:
    """In full: a namespace may have the name of a catalog."""
    return quoted([catalog.name, *table] + ([] if branch is None else [f"branch_{branch}"]))


@contextlib.contextmanager
def configured(catalog: Catalog, settings: dict[str, str | None]) -> Iterator[None]:
    """Session settings for one job; None leaves one alone."""
    chosen = {key: value for key, value in settings.items() if value is not None}
    for key, value in chosen.items():
        catalog.spark.conf.set(key, value)
    try:
        yield
    finally:
        for key in chosen:
            catalog.spark.conf.unset(key)


# ---- reading -----------------------------------------------------------------------------------------------


@operation("table")
def rows(
    catalog: Catalog,
    table: list[str],
    ref: str | None = None,
    snapshot_id: int | None = None,
    columns: list[str] | None = None,
    where: str | None = None,
    count_only: bool = False,
) -> dict[str, Any]:
    """Rows in a fixed order, of `main` unless a ref or a snapshot is named. `_row_id` and other metadata columns
    may be named in `columns`."""
    version = ""
    if ref is not None:
        version = " VERSION AS OF '{}'".format(ref.replace("\\", "\\\\").replace("'", "\\'"))
    elif snapshot_id is not None:
        version = f" VERSION AS OF {int(snapshot_id)}"
    chosen = ", ".join(quoted([name]) for name in columns) if columns else "*"
    source = f"{named(catalog, table)}{version}{f' WHERE {where}' if where else ''}"
    if count_only:
        return {"count": catalog.spark.sql(f"SELECT count(*) FROM {source}").first()[0]}
    found = rows_of(catalog.spark.sql(f"SELECT {chosen} FROM {source}"))
    return {"count": found["count"], "rows": in_order(found["rows"])}


def rows_of(data: DataFrame) -> dict[str, Any]:
    found = [to_json(plain(row, data.schema)) for row in data.collect()]
    return {"count": len(found), "rows": found}


def plain(value: Any, kind: DataType) -> Any:
    """Spark's values as PyIceberg gives them: structs by name, maps as lists of pairs, zoned timestamps zoned."""
    if value is None:
        return None
    match kind:
        case StructType():
            return {field.name: plain(value[index], field.dataType) for index, field in enumerate(kind.fields)}
        case ArrayType():
            return [plain(item, kind.elementType) for item in value]
        case MapType():
            return [(plain(key, kind.keyType), plain(item, kind.valueType)) for key, item in value.items()]
        case TimestampType():
            return value.replace(tzinfo=datetime.timezone.utc)
        case _ if kind.typeName() == "variant":
            return value.toJson()
        case _:
            return value


# ---- procedures --------------------------------------------------------------------------------------------


@operation("writes")
def procedure(catalog: Catalog, table: list[str], name: str, arguments: dict[str, Any] = {}) -> dict[str, Any]:
    """CALL system.<name>(table => ..., ...): cherrypick_snapshot, fast_forward, expire_snapshots, ... A value
    {"timestamp": "2026-08-20 00:00:00"} is a timestamp; other objects are maps."""
    if not name.isidentifier() or not all(key.isidentifier() for key in arguments):
        raise BadJob("names of procedures and arguments are identifiers")
    given = {"table": named(catalog, table)} | arguments
    text = ", ".join(f"{key} => {literal(value)}" for key, value in given.items())
    return rows_of(catalog.spark.sql(f"CALL {quoted([catalog.name])}.system.{name}({text})"))


@operation("table")
def remove_orphan_files(catalog: Catalog, table: list[str], older_than_ms: int) -> dict[str, Any]:
    """Deletes files below the table's location that no metadata names. The procedure refuses ages under a day;
    this is the action behind it, which does not."""
    actions = catalog.jvm.org.apache.iceberg.spark.actions.SparkActions.get(catalog.spark._jsparkSession)
    result = actions.deleteOrphanFiles(catalog.java_table(table)).olderThan(older_than_ms).execute()
    return {"paths": sorted(result.orphanFileLocations())}


def literal(value: Any) -> str:
    match value:
        case bool() | int() | float():
            return str(value).lower()
        case str():
            return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        case list():
            return f"array({', '.join(literal(item) for item in value)})"
        case {"timestamp": str(text)}:
            return f"TIMESTAMP {literal(text)}"
        case dict():
            return f"map({', '.join(literal(item) for pair in value.items() for item in pair)})"
        case _:
            raise BadJob(f"no SQL literal for {value!r}")
