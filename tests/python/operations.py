"""The operations of engine.py that PyIceberg writes: tables, their structure, refs, rows."""

from __future__ import annotations

import datetime
from typing import Any

import pyiceberg
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.transforms import parse_transform
from pyiceberg.types import NestedField

from engine import BadJob, Catalog, identifier, operation
from reads import load, snapshot_of
from values import parquet_to_arrow, rows_to_arrow

MAIN = "main"


@operation("engine")
def ping() -> dict[str, Any]:
    return {"pong": True}


@operation("engine")
def versions() -> dict[str, Any]:
    return {"pyiceberg": pyiceberg.__version__}


# ---- tables ------------------------------------------------------------------------------------------------


@operation("catalog")
def create_table(
    catalog: Catalog,
    table: str | list[str],
    schema: list[dict[str, Any]],
    partition: list[Any] = [],
    identifier_fields: list[str] = [],
    properties: dict[str, str] = {},
    location: str | None = None,
) -> dict[str, Any]:
    """`schema`: [{"name", "type", "required"?}] with Iceberg's type names.
    `partition`: a column name, or {"column", "transform", "name"?} with Iceberg's transform names."""
    fields = [NestedField.model_validate({"id": i, "required": False} | field) for i, field in enumerate(schema, 1)]
    ids = {field.name: field.field_id for field in fields}
    spec = []
    for index, item in enumerate(partition):
        item = {"column": item, "transform": "identity"} if isinstance(item, str) else item
        transform = parse_transform(item["transform"])
        suffix = "" if item["transform"] == "identity" else "_" + item["transform"].split("[")[0]
        name = item.get("name", item["column"] + suffix)
        spec.append(PartitionField(ids[item["column"]], 1000 + index, transform, name))
    name = identifier(table)
    catalog.create_namespace_if_not_exists(name[:-1])
    created = catalog.create_table(
        name,
        schema=Schema(*fields, identifier_field_ids=[ids[field] for field in identifier_fields]),
        partition_spec=PartitionSpec(*spec),
        properties=properties,
        location=location,
    )
    return load(created)


@operation("catalog")
def rename_table(catalog: Catalog, table: str | list[str], to: str | list[str]) -> dict[str, Any]:
    catalog.create_namespace_if_not_exists(identifier(to)[:-1])
    return load(catalog.rename_table(identifier(table), identifier(to)))


@operation("catalog")
def drop_table(catalog: Catalog, table: str | list[str]) -> dict[str, Any]:
    catalog.drop_table(identifier(table))
    return {"dropped": True}


@operation("catalog")
def list_tables(catalog: Catalog, namespace: str | list[str]) -> dict[str, Any]:
    return {"tables": sorted(list(name) for name in catalog.list_tables(identifier(namespace)))}


@operation("writes")
def set_properties(table: Table, set: dict[str, str] = {}, remove: list[str] = []) -> None:
    with table.transaction() as transaction:
        if set:
            transaction.set_properties(set)
        if remove:
            transaction.remove_properties(*remove)


# ---- structure ---------------------------------------------------------------------------------------------


@operation("writes")
def add_column(table: Table, name: str, type: str) -> None:
    with table.update_schema() as update:
        update.add_column(name, _type_of(type))


@operation("writes")
def update_column_type(table: Table, name: str, type: str) -> None:
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.update_column(name, _type_of(type))


@operation("writes")
def rename_column(table: Table, name: str, to: str) -> None:
    with table.update_schema() as update:
        update.rename_column(name, to)


@operation("writes")
def drop_column(table: Table, name: str) -> None:
    with table.update_schema() as update:
        update.delete_column(name)


@operation("writes")
def add_partition_field(table: Table, column: str, transform: str = "identity", name: str | None = None) -> None:
    with table.update_spec() as update:
        update.add_field(column, parse_transform(transform), name)


@operation("writes")
def remove_partition_field(table: Table, name: str) -> None:
    with table.update_spec() as update:
        update.remove_field(name)


def _type_of(name: str) -> Any:
    return NestedField.model_validate({"id": 1, "name": "x", "type": name, "required": False}).field_type


# ---- refs and snapshots ------------------------------------------------------------------------------------


@operation("writes")
def create_branch(
    table: Table,
    branch: str,
    from_: str | int = MAIN,
    max_ref_age_ms: int | None = None,
    max_snapshot_age_ms: int | None = None,
    min_snapshots_to_keep: int | None = None,
) -> dict[str, Any]:
    """`from_`: a ref's name or a snapshot id."""
    head = snapshot_of(table, from_).snapshot_id
    manage = table.manage_snapshots().create_branch(
        head, branch, max_ref_age_ms, max_snapshot_age_ms, min_snapshots_to_keep
    )
    manage.commit()
    return {"snapshot_id": head}


@operation("writes")
def create_tag(table: Table, tag: str, from_: str | int = MAIN, max_ref_age_ms: int | None = None) -> dict[str, Any]:
    head = snapshot_of(table, from_).snapshot_id
    table.manage_snapshots().create_tag(head, tag, max_ref_age_ms).commit()
    return {"snapshot_id": head}


@operation("writes")
def remove_ref(table: Table, ref: str) -> None:
    found = table.metadata.refs.get(ref)
    if found is None:
        raise ValueError(f"no ref {ref!r}; the table has {sorted(table.metadata.refs)}")
    manage = table.manage_snapshots()
    branch = found.snapshot_ref_type == SnapshotRefType.BRANCH
    (manage.remove_branch(ref) if branch else manage.remove_tag(ref)).commit()


@operation("writes")
def set_main(table: Table, to: str | int) -> None:
    """Moves `main` to any snapshot, backwards too."""
    table.manage_snapshots().set_current_snapshot(snapshot_of(table, to).snapshot_id).commit()


@operation("writes")
def expire_snapshots(
    table: Table, ids: list[int] | None = None, older_than_ms: int | None = None, all: bool = False
) -> dict[str, Any]:
    """Removes the named snapshots, those older than a time, or `all` but the heads of refs (PyIceberg keeps these)."""
    before = {snapshot.snapshot_id for snapshot in table.metadata.snapshots}
    heads = {ref.snapshot_id for ref in table.metadata.refs.values()}
    expire = table.maintenance.expire_snapshots()
    if older_than_ms is not None:
        expire.older_than(datetime.datetime.fromtimestamp(older_than_ms / 1000, datetime.timezone.utc))
    expire.by_ids(list(before - heads) if all else ids or []).commit()
    return {"expired": sorted(before - {snapshot.snapshot_id for snapshot in table.refresh().metadata.snapshots})}


# ---- writes ------------------------------------------------------------------------------------------------
#
# `branch`: a branch that does not exist is made, without parent; null stages the snapshot without any ref.
# Rows come as JSON `rows`, or from `parquet` files with a `where` filter and a `part` (see values.py).


def _rows(
    table: Table, rows: list[dict[str, Any]] | None, parquet: str | list[str] | None, where: str | None, part: list[int] | None
) -> Any:
    if (rows is None) == (parquet is None):
        raise BadJob("give either rows or parquet")
    if rows is not None:
        return rows_to_arrow(rows, table.schema())
    return parquet_to_arrow(parquet, table.schema(), where, part)


@operation("writes")
def append(
    table: Table,
    rows: list[dict[str, Any]] | None = None,
    parquet: str | list[str] | None = None,
    where: str | None = None,
    part: list[int] | None = None,
    branch: str | None = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    data = _rows(table, rows, parquet, where, part)
    table.append(data, snapshot_properties=snapshot_properties, branch=branch)
    return {"rows": data.num_rows}


@operation("writes")
def overwrite(
    table: Table,
    filter: str | None = None,
    rows: list[dict[str, Any]] | None = None,
    parquet: str | list[str] | None = None,
    where: str | None = None,
    part: list[int] | None = None,
    branch: str | None = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Deletes what matches `filter` (everything without it), then appends: two snapshots."""
    data = _rows(table, rows, parquet, where, part)
    condition = AlwaysTrue() if filter is None else filter
    table.overwrite(data, overwrite_filter=condition, snapshot_properties=snapshot_properties, branch=branch)
    return {"rows": data.num_rows}


@operation("writes")
def dynamic_partition_overwrite(
    table: Table,
    rows: list[dict[str, Any]] | None = None,
    parquet: str | list[str] | None = None,
    where: str | None = None,
    part: list[int] | None = None,
    branch: str | None = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Replaces the partitions that the rows touch: two snapshots."""
    data = _rows(table, rows, parquet, where, part)
    table.dynamic_partition_overwrite(data, snapshot_properties=snapshot_properties, branch=branch)
    return {"rows": data.num_rows}


@operation("writes")
def upsert(
    table: Table,
    rows: list[dict[str, Any]],
    on: list[str],
    branch: str | None = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    data = rows_to_arrow(rows, table.schema())
    result = table.upsert(data, join_cols=on, branch=branch, snapshot_properties=snapshot_properties)
    return {"updated": result.rows_updated, "inserted": result.rows_inserted}


@operation("writes")
def delete(table: Table, filter: str, branch: str | None = MAIN, snapshot_properties: dict[str, str] = {}) -> None:
    """Copy on write: files that hold other rows too are written again."""
    table.delete(filter, snapshot_properties=snapshot_properties, branch=branch)


@operation("writes")
def add_files(
    table: Table, paths: list[str], branch: str | None = MAIN, snapshot_properties: dict[str, str] = {}
) -> None:
    """Adds Parquet files as they are; each must lie in one partition."""
    table.add_files(paths, snapshot_properties=snapshot_properties, branch=branch)
