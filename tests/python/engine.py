"""PyIceberg, DuckDB and ClickHouse as processes of their own, driven by JSON jobs: the other engines of the tests.

    engine.py OP '{...}'     one job from the argument (or from standard input without it)
    engine.py batch          a JSON list of jobs from standard input, stopping at the first that fails
    engine.py serve          a job a line on standard input, an answer a line on standard output, until it ends
    engine.py ops            the operations with their arguments

A job is an object: {"op": "append", "catalog": {"uri", "warehouse", "name"}, "table": "ns.t", ...arguments}.
A uri that starts with http is that of a REST catalog, any other that of a SQL catalog. What else a catalog has goes to
PyIceberg as it is (`s3.endpoint` and the like).
`table` is a dotted string or a list of names. `catalog` may be left out once an earlier job of the process
named it. `id` is given back in the answer. An answer is one line: the result, or {"error", "message"}. One-shot
and batch exit with 1 when a job failed. Start-up costs over a second, so tests keep one `serve` process.

Writes work while other processes write the same table: a lost race reloads the table and runs the whole
operation again, at most `attempts` times (1 shows the conflict instead). `hold` scripts a race without
sleeping: {"reached": file, "until": file} creates the first file when everything is written and only the
catalog commit is missing, and goes on once the second exists.
"""

from __future__ import annotations

import inspect
import json
import logging
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.table import Table
from pyiceberg.table.update import AddSnapshotUpdate, TableRequirement, TableUpdate
from sqlalchemy.exc import OperationalError

DEFAULT_ATTEMPTS = 20
MAX_BACKOFF_SECONDS = 0.05
HOLD_LIMIT_SECONDS = 120.0
HOLD_POLL_SECONDS = 0.002
SQLITE_BUSY_SECONDS = 30
# Open catalogs kept by one process; a test run opens one a test.
MAX_OPEN_CATALOGS = 16


class Watched:
    """A catalog of PyIceberg that also tells what its last commit did and can be held before it."""

    hold: dict[str, str] | None = None
    added_snapshots: list[int] = []
    conflicts = 0

    def begin(self, hold: dict[str, str] | None) -> None:
        self.hold, self.added_snapshots, self.conflicts = hold, [], 0

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> Any:
        if self.hold is not None:
            hold, self.hold = self.hold, None
            pathlib.Path(hold["reached"]).touch()
            wait_for(pathlib.Path(hold["until"]))
        try:
            response = super().commit_table(table, requirements, updates)
        except Exception as error:
            self.conflicts += lost_race(error)
            raise
        self.added_snapshots = [u.snapshot.snapshot_id for u in updates if isinstance(u, AddSnapshotUpdate)]
        return response


class Catalog(Watched, SqlCatalog):
    def close(self) -> None:
        self.engine.dispose()


class OverRest(Watched, RestCatalog):
    def close(self) -> None:
        self._session.close()


def lost_race(error: Exception) -> bool:
    """Whether another writer was faster and the operation may be run again on the reloaded table."""
    match error:
        case CommitFailedException() | ValidationException():
            return True
        # A commit to another branch took this sequence number: PyIceberg finds out before its catalog does.
        case ValueError():
            return "older than last sequence number" in str(error)
        case OperationalError():
            return "database is locked" in str(error)
        case _:
            return False


def wait_for(path: pathlib.Path) -> None:
    deadline = time.monotonic() + HOLD_LIMIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear within {HOLD_LIMIT_SECONDS:.0f} s")
        time.sleep(HOLD_POLL_SECONDS)


# ---- operations register themselves ------------------------------------------------------------------------

# An operation takes nothing (`engine`), the catalog (`catalog`; None is allowed with `any`), or the table as
# loaded for this attempt (`table`, `writes`); `writes` are run again after a lost race. Arguments are the
# function's keywords ("from" is `from_`), so a misspelt one is an error and not ignored.
OPERATIONS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {}


def operation(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert kind in ("engine", "catalog", "any", "table", "writes")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[function.__name__.rstrip("_")] = (kind, function)
        return function

    return register


def identifier(name: str | list[str]) -> tuple[str, ...]:
    return tuple(name.split(".")) if isinstance(name, str) else tuple(name)


# ---- running a job -----------------------------------------------------------------------------------------


class BadJob(Exception):
    """The job itself is wrong: a mistake in the test."""


# Address, warehouse, name, and further properties.
CatalogKey = tuple[str, str, str, tuple[tuple[str, str], ...]]


def key_of(config: dict[str, Any]) -> CatalogKey:
    own = ("uri", "warehouse", "name")
    further = tuple(sorted((key, value) for key, value in config.items() if key not in own))
    return *(config[key] for key in own), further


class Engine:
    def __init__(self) -> None:
        self.catalogs: dict[CatalogKey, Catalog] = {}
        self.last: CatalogKey | None = None

    def answer(self, job: Any) -> dict[str, Any]:
        """Runs one job; every failure becomes an answer."""
        echo = {"id": job["id"]} if isinstance(job, dict) and "id" in job else {}
        try:
            return echo | self.run(job)
        except Exception as error:  # noqa: BLE001  whatever an engine raises is the answer
            return echo | {"error": type(error).__name__, "message": str(error)}

    def run(self, job: Any) -> dict[str, Any]:
        if not isinstance(job, dict):
            raise BadJob("a job is a JSON object")
        arguments = {
            "from_" if name == "from" else name: value for name, value in job.items() if name not in ("op", "id")
        }
        op = job.get("op")
        if op not in OPERATIONS:
            raise BadJob(f"unknown op {op!r}; known: {', '.join(sorted(OPERATIONS))}")
        kind, function = OPERATIONS[op]
        config = arguments.pop("catalog", None)
        if kind == "engine":
            arguments.pop("table", None)
            return self.call(function, arguments)
        if kind == "any" and config is None and self.last is None:
            return self.call(function, arguments, None)
        catalog = self.catalog(config)
        if kind in ("catalog", "any"):
            catalog.begin(None)
            return self.call(function, arguments, catalog)
        name = identifier(arguments.pop("table", None) or self.missing("table"))
        if kind == "table":
            return self.call(function, arguments, catalog.load_table(name))
        return self.write(function, arguments, catalog, name)

    def write(
        self, function: Callable[..., Any], arguments: dict[str, Any], catalog: Catalog, name: tuple[str, ...]
    ) -> dict[str, Any]:
        attempts = arguments.pop("attempts", DEFAULT_ATTEMPTS)
        catalog.begin(arguments.pop("hold", None))
        for attempt in range(1, attempts + 1):
            table = catalog.load_table(name)
            # PyIceberg repeats a lost commit by itself. Here it waits less between; with a single attempt,
            # where the conflict itself is wanted, it does not repeat. Only this loaded copy is changed.
            own = {"commit.retry.num-retries": "0"} if attempts == 1 else {"commit.retry.min-wait-ms": "5"}
            table.metadata.properties.update(own)
            try:
                result = self.call(function, arguments, table) or {}
                break
            except Exception as error:
                if attempt == attempts or not lost_race(error):
                    raise
            time.sleep(random.uniform(0, MAX_BACKOFF_SECONDS))
        return result | {
            "snapshots": catalog.added_snapshots,
            "metadata_location": table.metadata_location,
            "conflicts": catalog.conflicts,
        }

    def call(self, function: Callable[..., Any], arguments: dict[str, Any], *first: Any) -> Any:
        try:
            inspect.signature(function).bind(*first, **arguments)
        except TypeError as error:
            raise BadJob(f"{function.__name__}{inspect.signature(function)}: {error}") from None
        return function(*first, **arguments)

    def catalog(self, config: dict[str, Any] | None) -> Catalog:
        key = key_of(config) if config else self.last
        if key is None:
            self.missing("catalog")
        if key not in self.catalogs:
            if len(self.catalogs) == MAX_OPEN_CATALOGS:
                oldest = next(iter(self.catalogs))
                self.catalogs.pop(oldest).close()
            uri, warehouse, name, properties = key
            if uri.startswith("sqlite:") and "?" not in uri:
                uri += f"?timeout={SQLITE_BUSY_SECONDS}"
            kind = OverRest if uri.startswith("http") else Catalog
            self.catalogs[key] = kind(name, uri=uri, warehouse=warehouse, **dict(properties))
        self.last = key
        return self.catalogs[key]

    @staticmethod
    def missing(argument: str) -> Any:
        raise BadJob(f"the job lacks {argument!r}")


# ---- command line ------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    # Answers own standard output; whatever a library prints goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr

    def say(answer: dict[str, Any]) -> bool:
        answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
        answers.flush()
        return "error" not in answer

    # PyIceberg warns of every lost race; the answer counts them.
    logging.getLogger("pyiceberg").setLevel(logging.ERROR)
    import openapi  # noqa: F401
    import operations  # noqa: F401  registers its operations
    import reads  # noqa: F401
    import reads_clickhouse  # noqa: F401
    import spark_like  # noqa: F401

    engine = Engine()
    match arguments:
        case ["serve"]:
            for line in sys.stdin:
                if line.strip():
                    try:
                        job = json.loads(line)
                    except ValueError as error:
                        say({"error": "BadJob", "message": f"not JSON: {error}"})
                        continue
                    say(engine.answer(job))
            return 0
        case ["batch"]:
            return 0 if all(say(engine.answer(job)) for job in json.load(sys.stdin)) else 1
        case ["ops"]:
            for name, (kind, function) in sorted(OPERATIONS.items()):
                answers.write(f"{name:28} {kind:8} {inspect.signature(function)}\n")
            return 0
        case [op, *rest] if len(rest) < 2:
            job = json.loads(rest[0] if rest else sys.stdin.read())
            return 0 if say(engine.answer(job | {"op": op})) else 1
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    # The operations import this module by name: they must register in this very instance.
    sys.modules["engine"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
