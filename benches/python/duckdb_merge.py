"""The MERGE of the replay benchmark by DuckDB, on the same Parquet files.

    duckdb_merge.py --inputs inputs.json --output FOLDER --threads N

Reads the target's files and the source's, joins them, and writes the whole table again as Parquet, a folder for each
day, compressed as the table's files are. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import time

import duckdb

MERGE = """
COPY (
    SELECT t.account_id, t.opened, coalesce(s.name, t.name) AS name, t.cents + coalesce(s.cents, 0) AS cents
    FROM read_parquet($target, hive_partitioning = false) t
    LEFT JOIN read_parquet($feed, hive_partitioning = false) s ON t.account_id = s.account_id
    UNION ALL
    SELECT s.account_id, s.opened, s.name, s.cents
    FROM read_parquet($feed, hive_partitioning = false) s
    WHERE NOT EXISTS (
        SELECT 1 FROM read_parquet($target, hive_partitioning = false) t WHERE t.account_id = s.account_id
    )
) TO '{output}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (opened), WRITE_PARTITION_COLUMNS true)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    inputs = json.loads(arguments.inputs.read_text())
    connection = duckdb.connect()
    connection.execute(f"SET threads = {arguments.threads}")
    output = str(arguments.output).replace("'", "''")
    begin = time.monotonic()
    connection.execute(MERGE.format(output=output), {"target": inputs["target"], "feed": inputs["feed"]})
    seconds = time.monotonic() - begin
    written = f"{arguments.output}/**/*.parquet"
    records = connection.execute("SELECT count(*) FROM read_parquet($1)", [written]).fetchone()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                "version": duckdb.__version__,
                "seconds": seconds,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_kib": usage.ru_maxrss,
                "records": records[0] if records else 0,
            }
        )
    )


if __name__ == "__main__":
    main()
