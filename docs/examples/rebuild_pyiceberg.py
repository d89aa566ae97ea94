"""A pipeline's own command for `on-conflict = "external"`, with PyIceberg.

The pipeline marks all orders of one day as done. Its branch was written from an older state of the target; here it does
the same work again, on the branch that the queue gives it. `rebuild_pyiceberg.py DAY`, from the policy:

    [class.external]
    command = ["python", "rebuild_pyiceberg.py", "2026-08-21"]
    scope = "touched-partitions"

Credentials are the pipeline's own, in the environment that PyIceberg reads (PYICEBERG_CATALOG__...).
"""

import os
import sys
from datetime import date

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import EqualTo

# Other branches of the table may be written at the same time: then the work is done again on the table as it is.
TRIES = 10


def given(name: str) -> str:
    return os.environ["MERGEBERG_" + name]


def rebuild(day: date) -> int:
    properties = {
        "type": given("CATALOG_TYPE"),
        "uri": given("CATALOG_URI"),
        "warehouse": given("CATALOG_WAREHOUSE"),
    }
    table = load_catalog(given("CATALOG_NAME"), **properties).load_table(given("TABLE"))
    # The target as the queue has it: everything that came to it since the first time is there.
    condition = EqualTo("order_date", day.isoformat())
    rows = table.scan(condition, snapshot_id=int(given("BASE_SNAPSHOT_ID"))).to_arrow()
    done = pa.array(["done"] * len(rows), rows.schema.field("status").type)
    rows = rows.set_column(rows.schema.get_field_index("status"), rows.schema.field("status"), done)
    table.overwrite(rows, overwrite_filter=condition, branch=given("BRANCH"))
    return len(rows)


def main() -> None:
    day = date.fromisoformat(sys.argv[1])
    for attempt in range(1, TRIES + 1):
        try:
            print(f"{rebuild(day)} order(s) of {day} are done on {given('BRANCH')}")
            return
        except CommitFailedException:
            if attempt == TRIES:
                raise


if __name__ == "__main__":
    main()
