"""The operations of engine.py that read: rows (by PyIceberg and by DuckDB), refs, snapshots, files, manifests."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import urllib.parse
from typing import Any

import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFileContent, ManifestContent
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot, ancestors_of
from pyiceberg.typedef import Record

from engine import BadJob, Catalog, identifier, operation
from values import arrow_to_rows, to_json

MAIN = "main"


# ---- rows ------------------------------------------------------------------------------------------------


@operation("table")
def read(
    table: Table,
    ref: str | None = None,
    snapshot_id: int | None = None,
    columns: list[str] | None = None,
    filter: str | None = None,
    count_only: bool = False,
) -> dict[str, Any]:
    """Rows in a fixed order, of `main` unless a ref or a snapshot is named."""
    scan = table.scan(
        row_filter=AlwaysTrue() if filter is None else filter,
        selected_fields=tuple(columns or ["*"]),
        snapshot_id=snapshot_id,
    )
    if ref is not None:
        scan = scan.use_ref(ref)
    if count_only:
        return {"count": scan.count()}
    data = scan.to_arrow()
    return {"count": data.num_rows, "rows": arrow_to_rows(data)}


@operation("any")
def read_duckdb(
    catalog: Catalog | None,
    table: str | list[str] | None = None,
    metadata_location: str | None = None,
    ref: str | None = None,
    snapshot_id: int | None = None,
    columns: list[str] | None = None,
    where: str | None = None,
    count_only: bool = False,
) -> dict[str, Any]:
    """The same as `read`, read by DuckDB from a metadata file (the table's current one when a table is named)."""
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
    # Java writes file:/path.
    location = metadata_location.removeprefix("file:").removeprefix("//").replace("'", "''")
    pin = f", snapshot_from_id => {int(snapshot_id)}" if snapshot_id is not None else ""
    chosen = ", ".join('"' + name.replace('"', '""') + '"' for name in columns) if columns else "*"
    source = f"iceberg_scan('{location}'{pin}){f' WHERE {where}' if where else ''}"
    if location.startswith("s3://"):
        _duckdb_on_s3(catalog.properties)
    if count_only:
        return {"count": _duckdb().execute(f"SELECT count(*) FROM {source}").fetchone()[0]}
    data = _duckdb().execute(f"SELECT {chosen} FROM {source}").to_arrow_table()
    return {"count": data.num_rows, "rows": arrow_to_rows(data)}


@functools.cache
def _duckdb() -> Any:
    """DuckDB with its Iceberg extension (and the Avro one that it needs) from the installed packages: no network."""
    import duckdb

    connection = duckdb.connect(
        config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    )
    for name in ("avro", "iceberg"):
        _load_extension(connection, name)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _load_extension(connection: Any, name: str) -> None:
    import duckdb

    package = importlib.util.find_spec(f"duckdb_extension_{name}")
    folder = pathlib.Path(package.origin).parent / "extensions" / f"v{duckdb.__version__}"
    path = str(folder / f"{name}.duckdb_extension").replace("'", "''")
    connection.execute(f"LOAD '{path}'")


def _duckdb_on_s3(properties: dict[str, str]) -> None:
    """DuckDB with the address and keys that the catalog's files are read with."""
    address = urllib.parse.urlsplit(properties["s3.endpoint"])
    values = {
        "TYPE": "s3",
        "ENDPOINT": address.netloc,
        "USE_SSL": str(address.scheme == "https").lower(),
        "URL_STYLE": "path",
        "REGION": properties["s3.region"],
        "KEY_ID": properties["s3.access-key-id"],
        "SECRET": properties["s3.secret-access-key"],
    }
    _load_extension(_duckdb(), "httpfs")
    pairs = ", ".join(f"{key} '{value}'" for key, value in values.items())
    _duckdb().execute(f"CREATE OR REPLACE SECRET store ({pairs})")


@operation("engine")
def parquet_rows(path: str, columns: list[str] | None = None) -> dict[str, Any]:
    data = pq.read_table(path, columns=columns)
    return {"count": data.num_rows, "rows": arrow_to_rows(data)}


# ---- metadata --------------------------------------------------------------------------------------------


@operation("table")
def load(table: Table) -> dict[str, Any]:
    metadata = table.metadata
    return {
        "uuid": str(metadata.table_uuid),
        "location": metadata.location,
        "metadata_location": table.metadata_location,
        "format_version": metadata.format_version,
        "last_sequence_number": metadata.last_sequence_number,
        "schema_id": metadata.current_schema_id,
        "spec_id": metadata.default_spec_id,
        "sort_order_id": metadata.default_sort_order_id,
        "columns": {field.name: str(field.field_type) for field in table.schema().fields},
        "properties": metadata.properties,
        "snapshot_count": len(metadata.snapshots),
        "current_snapshot_id": metadata.current_snapshot_id,
    }


@operation("table")
def refs(table: Table) -> dict[str, Any]:
    return {
        "refs": {
            name: {
                "snapshot_id": ref.snapshot_id,
                "type": ref.snapshot_ref_type.value,
                "max_ref_age_ms": ref.max_ref_age_ms,
                "max_snapshot_age_ms": ref.max_snapshot_age_ms,
                "min_snapshots_to_keep": ref.min_snapshots_to_keep,
            }
            for name, ref in sorted(table.metadata.refs.items())
        }
    }


@operation("table")
def snapshots(table: Table, ref: str | int | None = None) -> dict[str, Any]:
    """All snapshots as stored, or the ancestors of `ref`, newest first. Ids stay exact: JSON integers."""
    chosen = table.metadata.snapshots if ref is None else ancestors_of(snapshot_of(table, ref), table.metadata)
    return {
        "snapshots": [
            {
                "snapshot_id": snapshot.snapshot_id,
                "parent_id": snapshot.parent_snapshot_id,
                "sequence_number": snapshot.sequence_number,
                "timestamp_ms": snapshot.timestamp_ms,
                "schema_id": snapshot.schema_id,
                "manifest_list": snapshot.manifest_list,
                "operation": snapshot.summary.operation.value if snapshot.summary else None,
                "summary": snapshot.summary.additional_properties if snapshot.summary else {},
            }
            for snapshot in chosen
        ]
    }


@operation("table")
def log(table: Table) -> dict[str, Any]:
    """The snapshot log: which snapshots `main` was set to, oldest first."""
    return {"log": [entry.snapshot_id for entry in table.metadata.snapshot_log]}


@operation("table")
def files(table: Table, ref: str | int = MAIN) -> dict[str, Any]:
    """Live data and delete files, ordered by path."""
    found = []
    for manifest in snapshot_of(table, ref).manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            found.append(_entry(table, manifest, entry))
    return {"files": sorted(found, key=lambda file: file["path"])}


@operation("table")
def changes(table: Table, ref: str | int = MAIN) -> dict[str, Any]:
    """What one snapshot (by id, or a ref's head) itself added and removed."""
    snapshot = snapshot_of(table, ref)
    found: dict[str, list[Any]] = {"added": [], "deleted": []}
    for manifest in snapshot.manifests(table.io):
        if manifest.added_snapshot_id != snapshot.snapshot_id:
            continue
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=False):
            status = entry.status.name.lower()
            if status in found and entry.snapshot_id == snapshot.snapshot_id:
                found[status].append(_entry(table, manifest, entry))
    return {status: sorted(entries, key=lambda file: file["path"]) for status, entries in found.items()}


@operation("table")
def manifests(table: Table, ref: str | int = MAIN) -> dict[str, Any]:
    return {
        "manifests": [
            {
                "path": manifest.manifest_path,
                "content": ManifestContent(manifest.content).name.lower(),
                "spec_id": manifest.partition_spec_id,
                "added_snapshot_id": manifest.added_snapshot_id,
                "sequence_number": manifest.sequence_number,
                "min_sequence_number": manifest.min_sequence_number,
                "added_files": manifest.added_files_count,
                "existing_files": manifest.existing_files_count,
                "deleted_files": manifest.deleted_files_count,
            }
            for manifest in snapshot_of(table, ref).manifests(table.io)
        ]
    }


def _entry(table: Table, manifest: Any, entry: Any) -> dict[str, Any]:
    file, spec = entry.data_file, table.specs()[manifest.partition_spec_id]
    return {
        "path": file.file_path,
        "content": DataFileContent(file.content).name.lower(),
        "spec_id": manifest.partition_spec_id,
        "partition": _partition(spec, file.partition),
        "records": file.record_count,
        "bytes": file.file_size_in_bytes,
        "sort_order_id": file.sort_order_id,
        "snapshot_id": entry.snapshot_id,
        "sequence_number": entry.sequence_number,
        "file_sequence_number": entry.file_sequence_number,
    }


def _partition(spec: PartitionSpec, values: Record) -> dict[str, Any]:
    """Values as stored: a day is the number of days since 1970-01-01."""
    return {field.name: to_json(values[index]) for index, field in enumerate(spec.fields)}


def snapshot_of(table: Table, ref: str | int) -> Snapshot:
    found = table.snapshot_by_name(ref) if isinstance(ref, str) else table.snapshot_by_id(ref)
    if found is None:
        raise ValueError(f"no ref or snapshot {ref!r}; the table's refs are {sorted(table.metadata.refs)}")
    return found
