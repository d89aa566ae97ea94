"""Snapshots that PyIceberg reads but does not write, as Spark or Flink would commit them: a compaction in one
snapshot, and the row-level deletes of format v2."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.conversions import to_bytes
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import (
    PYARROW_PARQUET_FIELD_ID_KEY,
    ArrowScan,
    _dataframe_to_data_files,
    schema_to_pyarrow,
)
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles, _SnapshotProducer
from pyiceberg.typedef import Record
from pyiceberg.types import StringType

from engine import BadJob, operation
from values import rows_to_arrow

MAIN = "main"
# The Iceberg spec's reserved field ids of position delete files.
FILE_PATH_ID, POS_ID = 2147483546, 2147483545


# ---- compaction --------------------------------------------------------------------------------------------


@operation("writes")
def compact(
    table: Table,
    filter: str,
    branch: str = MAIN,
    mode: str = "one-snapshot",
    label: str = "replace",
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Writes the files that may match `filter` as one file a partition: the same rows in other files.

    `one-snapshot` removes and adds in one snapshot, labelled `replace` (as Spark writes it) or `overwrite` (as a
    copy-on-write update would be); `two-snapshots` is PyIceberg's own overwrite with the rows just read.
    """
    if mode == "two-snapshots":
        data = table.scan(row_filter=filter).use_ref(branch).to_arrow()
        table.overwrite(data, overwrite_filter=filter, snapshot_properties=snapshot_properties, branch=branch)
        return {"rows": data.num_rows}
    if mode != "one-snapshot":
        raise BadJob("mode is 'one-snapshot' or 'two-snapshots'")

    # Whole files, whatever the filter says about their rows.
    tasks = list(table.scan(row_filter=filter).use_ref(branch).plan_files())
    data = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue()).to_table(tasks)
    new_files = list(_dataframe_to_data_files(table.metadata, data, table.io, write_uuid=uuid.uuid4()))
    with table.transaction() as transaction:
        with _RewriteFiles(
            Operation.OVERWRITE, transaction, table.io, snapshot_properties=snapshot_properties, branch=branch
        ) as rewrite:
            rewrite.label = Operation(label)
            for task in tasks:
                rewrite.delete_data_file(task.file)
            for file in new_files:
                rewrite.append_data_file(file)
    return {"rows": data.num_rows, "removed_files": len(tasks), "added_files": len(new_files)}


class _RewriteFiles(_OverwriteFiles):
    """PyIceberg's overwrite under a label of choice; its summary code refuses `replace`."""

    label = Operation.REPLACE

    def _summary(self, snapshot_properties: dict[str, str] = {}) -> Summary:
        summary = super()._summary(snapshot_properties)
        return Summary(self.label, **summary.additional_properties)


# ---- row-level deletes -------------------------------------------------------------------------------------


@operation("writes")
def add_position_deletes(
    table: Table,
    path: str,
    positions: list[int],
    branch: str = MAIN,
    bounds: bool = True,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Deletes rows of one live data file by position. Without `bounds` the manifest does not tell which file."""
    spec_id, partition = _place_of(table, path, branch)
    ids = {"file_path": FILE_PATH_ID, "pos": POS_ID}
    schema = pa.schema(
        [
            pa.field(name, kind, False, {PYARROW_PARQUET_FIELD_ID_KEY: str(ids[name])})
            for name, kind in (("file_path", pa.string()), ("pos", pa.int64()))
        ]
    )
    rows = pa.table([pa.array([path] * len(positions)), pa.array(sorted(positions), pa.int64())], schema=schema)
    bound = {FILE_PATH_ID: to_bytes(StringType(), path)} if bounds else None
    file = _write(table, rows, DataFileContent.POSITION_DELETES, partition, spec_id, bound=bound)
    _commit(table, file, branch, snapshot_properties)
    return {"path": file.file_path}


@operation("writes")
def add_equality_deletes(
    table: Table,
    rows: list[dict[str, Any]],
    on: list[str],
    like: str | None = None,
    branch: str = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Deletes every older row equal to one of `rows` in the columns `on`: in the partition of the live data file
    `like`, or in the whole table when the table is not partitioned."""
    if like is not None:
        spec_id, partition = _place_of(table, like, branch)
    elif table.spec().is_unpartitioned():
        spec_id, partition = table.spec().spec_id, Record()
    else:
        raise ValueError("the table is partitioned: name a data file of the partition with `like`")
    fields = [table.schema().find_field(name) for name in on]
    key = Schema(*fields)
    data = rows_to_arrow(rows, key).cast(schema_to_pyarrow(key, include_field_ids=True))
    ids = [field.field_id for field in fields]
    file = _write(table, data, DataFileContent.EQUALITY_DELETES, partition, spec_id, equality_ids=ids)
    _commit(table, file, branch, snapshot_properties)
    return {"path": file.file_path}


@operation("writes")
def add_delete_file(
    table: Table,
    path: str,
    data_file: str,
    records: int,
    offset: int | None = None,
    length: int | None = None,
    branch: str = MAIN,
    snapshot_properties: dict[str, str] = {},
) -> dict[str, Any]:
    """Commits a file that another writer made, with positions of one live data file: Parquet, or with `offset` and
    `length` a deletion vector, whose entry has the fields of format v3."""
    spec_id, partition = _place_of(table, data_file, branch)
    size = len(table.io.new_input(path))
    common = {"content": DataFileContent.POSITION_DELETES, "file_path": path, "partition": partition}
    common |= {"record_count": records, "file_size_in_bytes": size}
    if offset is None:
        bound = {FILE_PATH_ID: to_bytes(StringType(), data_file)}
        file = DataFile.from_args(
            file_format=FileFormat.PARQUET, lower_bounds=bound, upper_bounds=bound, **common
        )
    else:
        file = DataFile.from_args(
            _table_format_version=3,
            file_format=FileFormat.PUFFIN,
            referenced_data_file=data_file,
            content_offset=offset,
            content_size_in_bytes=length,
            **common,
        )
    file.spec_id = spec_id
    _commit(table, file, branch, snapshot_properties)
    return {"path": path}


def _place_of(table: Table, path: str, branch: str) -> tuple[int, Record]:
    snapshot = table.snapshot_by_name(branch)
    for manifest in snapshot.manifests(table.io) if snapshot else []:
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            if entry.data_file.file_path == path:
                return manifest.partition_spec_id, entry.data_file.partition
    raise ValueError(f"{path} is not live on {branch!r}")


def _write(
    table: Table,
    rows: pa.Table,
    content: DataFileContent,
    partition: Record,
    spec_id: int,
    bound: dict[int, bytes] | None = None,
    equality_ids: list[int] | None = None,
) -> DataFile:
    path = f"{table.metadata.location}/data/{uuid.uuid4()}-deletes.parquet"
    output = table.io.new_output(path)
    with output.create() as stream:
        pq.write_table(rows, stream, compression="zstd")
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=partition,
        record_count=rows.num_rows,
        file_size_in_bytes=len(output),
        lower_bounds=bound,
        upper_bounds=bound,
        equality_ids=equality_ids,
    )
    file.spec_id = spec_id
    return file


def _commit(table: Table, file: DataFile, branch: str, snapshot_properties: dict[str, str]) -> None:
    with table.transaction() as transaction:
        with _RowDelta(
            Operation.OVERWRITE, transaction, table.io, snapshot_properties=snapshot_properties, branch=branch
        ) as delta:
            delta.append_data_file(file)


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _VectorManifestWriter(_DeleteManifestWriter):
    """PyIceberg reads deletion vectors and has no writer for the manifests that name them."""

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        return AvroOutputFile[ManifestEntry](
            output_file=self._output_file,
            file_schema=self._with_partition(3),
            record_schema=self._with_partition(3),
            schema_name="manifest_entry",
            metadata=self._meta,
        )


class _RowDelta(_SnapshotProducer["_RowDelta"]):
    """A snapshot that adds delete files and carries everything else unchanged."""

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []

    def _existing_manifests(self) -> list[ManifestFile]:
        parent = self._transaction.table_metadata.snapshot_by_name(self._target_branch)
        return parent.manifests(io=self._io) if parent else []

    def _manifests(self) -> list[ManifestFile]:
        added = []
        for file in self._added_data_files:
            output = self.new_manifest_output()
            spec = self.spec(file.spec_id)
            vector = file.file_format == FileFormat.PUFFIN
            kind, version = (_VectorManifestWriter, 3) if vector else (_DeleteManifestWriter, DEFAULT_READ_VERSION)
            with kind(spec, self.schema(), output, self._snapshot_id, self._compression) as writer:
                writer.add_entry(
                    ManifestEntry.from_args(
                        _table_format_version=version,
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        data_file=file,
                    )
                )
            added.append(writer.to_manifest_file())
        return added + self._existing_manifests()
