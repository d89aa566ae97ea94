"""One form of values in JSON, whichever engine they come from."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from typing import Any


def to_json(value: Any) -> Any:
    """Dates and times as ISO text (zoned ones in UTC), decimals as text, bytes as hex, NaN and the like as text."""
    match value:
        case datetime.datetime():
            return (value.astimezone(datetime.timezone.utc) if value.tzinfo else value).isoformat()
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal() | uuid.UUID():
            return str(value)
        case bytes() | bytearray():
            return value.hex()
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case _:
            return value


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """JSON rows in a fixed order (by their text)."""
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
