"""Rows as ClickHouse reads them: its engine as a library (chdb), on a table's metadata file."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pyarrow as pa
from engine import BadJob, Catalog, identifier, operation
from reads import snapshot_of
from values import arrow_to_rows


@operation("any")
def read_clickhouse(
    catalog: Catalog | None,
    table: str | list[str] | None = None,
    metadata_location: str | None = None,
    ref: str | None = None,
    snapshot_id: int | None = None,
    columns: list[str] | None = None,
    where: str | None = None,
    count_only: bool = False,
) -> dict[str, Any]:
    """The same as `read_duckdb`. A named snapshot, and so a ref, is read with the schema that it was written under."""
    if (table is None) == (metadata_location is None):
        raise BadJob("give either table or metadata_location")
    if table is not None:
        if catalog is None:
            raise BadJob("table needs catalog")
        loaded = catalog.load_table(identifier(table))
        metadata_location = loaded.metadata_location
        if ref is not None:
            snapshot_id = snapshot_of(loaded, ref).snapshot_id
    elif ref is not None:
        raise BadJob("ref needs table; give snapshot_id")
    path = pathlib.Path(metadata_location.removeprefix("file://").removeprefix("file:"))
    folder, file = str(path.parent.parent), f"{path.parent.name}/{path.name}"
    source = f"icebergLocal({_text(folder)}, SETTINGS iceberg_metadata_file_path = {_text(file)})"
    pin = f" SETTINGS iceberg_snapshot_id = {int(snapshot_id)}" if snapshot_id is not None else ""
    condition = f" WHERE {where}" if where else ""
    if count_only:
        return {"count": _query(f"SELECT count() AS n FROM {source}{condition}{pin}").to_pylist()[0]["n"]}
    chosen = ", ".join('"' + name.replace('"', '""') + '"' for name in columns) if columns else "*"
    data = _query(f"SELECT {chosen} FROM {source}{condition}{pin}")
    return {"count": data.num_rows, "rows": arrow_to_rows(data)}


def _text(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _query(sql: str) -> pa.Table:
    import chdb

    # It reads files below the working directory only.
    here = os.getcwd()
    os.chdir("/")
    try:
        answer = chdb.query(sql, "ArrowStream").bytes()
    finally:
        os.chdir(here)
    return pa.ipc.open_stream(answer).read_all()
