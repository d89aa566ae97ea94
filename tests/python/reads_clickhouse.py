"""Rows as ClickHouse reads them: its engine as a library (chdb), on a table's metadata file."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
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
    below: str | None = None,
) -> dict[str, Any]:
    """The same as `read_duckdb`. A named snapshot, and so a ref, is read with the schema that it was written under.

    It reads no file that does not lie below the table's location. `below` is a folder that all of them lie below, if
    the location is another: it is told that this is the location.
    """
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
    with _moved(path, below) as path:
        return _read(path, below or str(path.parent.parent), snapshot_id, columns, where, count_only)


@contextlib.contextmanager
def _moved(path: pathlib.Path, below: str | None) -> Iterator[pathlib.Path]:
    """A copy of the metadata file that names another location, or the file itself."""
    if below is None:
        yield path
        return
    metadata = json.loads(path.read_text())
    copy = path.with_name(path.name.removesuffix(".metadata.json") + "-moved.metadata.json")
    copy.write_text(json.dumps(metadata | {"location": f"file://{below}"}))
    try:
        yield copy
    finally:
        copy.unlink()


def _read(
    path: pathlib.Path,
    folder: str,
    snapshot_id: int | None,
    columns: list[str] | None,
    where: str | None,
    count_only: bool,
) -> dict[str, Any]:
    file = str(path.relative_to(folder))
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
