"""Rows between JSON and Arrow. Both engines' rows come out in one form, so that tests compare them as text."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import expression_to_pyarrow, schema_to_pyarrow
from pyiceberg.schema import Schema

from json_values import in_order, to_json


def rows_to_arrow(rows: list[dict[str, Any]], schema: Schema) -> pa.Table:
    """JSON rows as an Arrow table of the Iceberg schema; columns a row lacks are null."""
    target = schema_to_pyarrow(schema, include_field_ids=False)
    unknown = {name for row in rows for name in row} - set(target.names)
    if unknown:
        raise ValueError(f"no such columns: {sorted(unknown)}; the table has {target.names}")
    columns = [pa.array([from_json(row.get(f.name), f.type) for row in rows], f.type) for f in target]
    return pa.Table.from_arrays(columns, schema=target)


def parquet_to_arrow(
    paths: str | list[str], schema: Schema, where: str | None = None, part: list[int] | None = None
) -> pa.Table:
    """Rows of Parquet files under the Iceberg schema; `part` [i, n] keeps rows i, i + n, i + 2n and so on."""
    target = schema_to_pyarrow(schema, include_field_ids=False)
    tables = [pq.read_table(path) for path in ([paths] if isinstance(paths, str) else paths)]
    table = pa.concat_tables(tables)
    for field in target:
        if field.name not in table.column_names:
            table = table.append_column(field.name, pa.nulls(table.num_rows, field.type))
    table = table.select(target.names).cast(target)
    condition = bind(schema, parse(where), case_sensitive=True) if where else AlwaysTrue()
    if not isinstance(condition, AlwaysTrue):
        table = table.filter(expression_to_pyarrow(condition))
    if part is not None:
        index, parts = part
        table = table.take(list(range(index, table.num_rows, parts)))
    return table


def from_json(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat(value)
    if pa.types.is_timestamp(kind):
        time = datetime.datetime.fromisoformat(value)
        return time.replace(tzinfo=datetime.timezone.utc) if kind.tz and time.tzinfo is None else time
    if pa.types.is_decimal(kind):
        return decimal.Decimal(value)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return bytes.fromhex(value)
    if pa.types.is_floating(kind) and isinstance(value, str):
        return float(value)
    return value


def arrow_to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """JSON rows in a fixed order (by their text)."""
    return in_order([to_json(row) for row in table.to_pylist()])
