"""What a team does without a queue: N PyIceberg writers publish Parquet files straight to `main`.

    pyiceberg_publish.py --uri URI --warehouse PATH --name CATALOG --table NS.T --writers 20 [--seconds 60] < files

Reads the files' paths from standard input, one a line. Each writer is a process of its own; it takes every
N-th file, loads the table as a pipeline run would, adds the file in one commit (no checks of any kind) and
begins again when it lost the race. The clock starts when every writer is up. Prints one line of JSON:

    {"writers", "published", "seconds", "per_second", "p50_seconds", "p95_seconds", "conflicts"}

`p95_seconds` is the time from the first attempt for a file to its landing; `conflicts` counts lost commits.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from sqlalchemy.exc import OperationalError

# A writer that loses this often in a row gives up, so that the run ends.
MAX_ATTEMPTS = 1_000
START_LIMIT_SECONDS = 120
SQLITE_BUSY_SECONDS = 60


class CountingCatalog(SqlCatalog):
    """PyIceberg repeats a lost commit by itself: counted where the commit is made."""

    conflicts = 0

    def commit_table(self, *arguments: Any) -> Any:
        try:
            return super().commit_table(*arguments)
        except Exception as error:
            self.conflicts += lost_race(error)
            raise


def lost_race(error: Exception) -> bool:
    match error:
        case CommitFailedException() | ValidationException():
            return True
        case ValueError():
            return "older than last sequence number" in str(error)
        case OperationalError():
            return "database is locked" in str(error)
        case _:
            return False


def open_catalog(options: argparse.Namespace) -> CountingCatalog:
    uri = options.uri
    if uri.startswith("sqlite:") and "?" not in uri:
        uri += f"?timeout={SQLITE_BUSY_SECONDS}"
    return CountingCatalog(options.name, uri=uri, warehouse=options.warehouse)


def write(options: argparse.Namespace, files: list[str], start: Any, results: Any) -> None:
    logging.getLogger("pyiceberg").setLevel(logging.ERROR)
    catalog = open_catalog(options)
    catalog.load_table(options.table)
    start.wait(START_LIMIT_SECONDS)
    end = time.monotonic() + options.seconds if options.seconds else None
    latencies = []
    for file in files:
        began = time.monotonic()
        if end is not None and began >= end:
            break
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                table = catalog.load_table(options.table)
                table.add_files([file], check_duplicate_files=options.check_duplicate_files)
                break
            except Exception as error:
                if attempt == MAX_ATTEMPTS or not lost_race(error):
                    raise
        latencies.append(time.monotonic() - began)
    results.put((latencies, catalog.conflicts, time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--uri", required=True)
    parser.add_argument("--warehouse", required=True)
    parser.add_argument("--name", required=True, help="the catalog's name")
    parser.add_argument("--table", required=True)
    parser.add_argument("--writers", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=0, help="begin no file after this time (0: publish all)")
    parser.add_argument(
        "--check-duplicate-files",
        action="store_true",
        help="let PyIceberg look for the path in the whole table first (its default; slower with every commit)",
    )
    options = parser.parse_args()
    files = [line.strip() for line in sys.stdin if line.strip()]

    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(options.writers + 1), context.Queue()
    writers = [
        context.Process(target=write, args=(options, files[index :: options.writers], start, results))
        for index in range(options.writers)
    ]
    for writer in writers:
        writer.start()
    start.wait(START_LIMIT_SECONDS)
    began = time.monotonic()

    latencies, conflicts, ended, failed = [], 0, began, False
    for _ in writers:
        # A writer that raised puts nothing: notice it instead of waiting for ever.
        while results.empty() and not (failed := any(writer.exitcode for writer in writers)):
            time.sleep(0.05)
        if failed:
            break
        of_writer, lost, end = results.get()
        latencies += of_writer
        conflicts += lost
        ended = max(ended, end)
    for writer in writers:
        if failed:
            writer.terminate()
        writer.join()
    if failed:
        print("a writer failed; its error is above", file=sys.stderr)
        return 1

    latencies.sort()
    seconds = ended - began
    result = {
        "writers": options.writers,
        "published": len(latencies),
        "seconds": round(seconds, 3),
        "per_second": round(len(latencies) / seconds, 2) if seconds else 0.0,
        "p50_seconds": round(percentile(latencies, 50), 4),
        "p95_seconds": round(percentile(latencies, 95), 4),
        "conflicts": conflicts,
    }
    print(json.dumps(result))
    return 0


def percentile(ordered: list[float], percent: int) -> float:
    """The smallest value that at least `percent` of a hundred do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0


if __name__ == "__main__":
    sys.exit(main())
