"""Spark with Iceberg as a process of its own, driven by JSON jobs: the reference engine of the tests.

    spark_engine.py serve    a job a line on standard input, an answer a line on standard output, until it ends
    spark_engine.py ops      the operations with their arguments

Jobs, answers and rows are those of engine.py: {"op": "sql", "catalog": {"uri", "warehouse", "name"}, "table":
"ns.t", ...arguments}, and the result or {"error", "message"} with the name of the Java exception. `catalog` and
`table` may be left out once an earlier job of the process named them. scripts/spark brings what this needs.

Each catalog (uri, warehouse and name) has a Spark session of its own, so that catalogs of one name in several
files do not meet. It is Iceberg's JdbcCatalog on the SQLite file that PyIceberg and mergeberg use; nothing is
cached between jobs. The session's current catalog is the job's. Time is UTC.

Spark writes through Hadoop's file system, which spells `file:///w` as `file:/w` in every path below the table's
location, the metadata file's included. With a warehouse that is a plain path it writes plain paths.
"""

from __future__ import annotations

import collections
import inspect
import json
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

# Before Spark is loaded: it turns zoned timestamps into the process's local time.
os.environ["TZ"] = "UTC"
time.tzset()

from py4j.protocol import Py4JJavaError  # noqa: E402
from pyspark.errors.exceptions.captured import CapturedException  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

# Catalogs kept open by one process; a test run opens one a test.
MAX_OPEN_CATALOGS = 16
SQLITE_BUSY_MS = 30_000
# An exception's causes that are looked through for Iceberg's own.
MAX_CAUSES = 20
EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"


class BadJob(Exception):
    """The job itself is wrong: a mistake in the test."""


def identifier(name: str | list[str]) -> list[str]:
    return name.split(".") if isinstance(name, str) else list(name)


def quoted(parts: list[str]) -> str:
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


class Catalog:
    """One catalog in its own Spark session."""

    def __init__(self, root: SparkSession, uri: str, warehouse: str, name: str) -> None:
        self.name = name
        self.spark = root.newSession()
        for key, value in {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": "jdbc:sqlite:" + sqlite_path(uri),
            ".jdbc.schema-version": "V1",
            ".jdbc.busy_timeout": str(SQLITE_BUSY_MS),
            ".warehouse": warehouse,
            # Others commit between two jobs.
            ".cache-enabled": "false",
        }.items():
            self.spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
        self.activate()
        self.spark.sql(f"USE {quoted([name])}")
        self.java = self.spark._jsparkSession.sessionState().catalogManager().catalog(name).icebergCatalog()

    @property
    def jvm(self) -> Any:
        return self.spark._jvm

    def activate(self) -> None:
        """Iceberg's actions and procedures ask for the thread's session."""
        self.jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(self.spark._jsparkSession)

    def java_identifier(self, table: list[str]) -> Any:
        parts = self.spark.sparkContext._gateway.new_array(self.jvm.java.lang.String, len(table))
        for index, part in enumerate(table):
            parts[index] = part
        return self.jvm.org.apache.iceberg.catalog.TableIdentifier.of(parts)

    def java_table(self, table: list[str]) -> Any:
        """Iceberg's `Table`, loaded anew."""
        return self.java.loadTable(self.java_identifier(table))

    def close(self) -> None:
        self.java.close()


def sqlite_path(uri: str) -> str:
    """The file behind SQLAlchemy's `sqlite:////abs` or mergeberg's plain path."""
    path = uri.removeprefix("sqlite:///").split("?")[0]
    if not path.startswith("/"):
        raise BadJob(f"{uri!r} is no absolute path: sqlite:////path")
    return path


# ---- operations register themselves ------------------------------------------------------------------------

# An operation takes the catalog (`catalog`), or catalog and table name (`table`; `writes` also tells which
# snapshots are new). `engine` takes neither. Arguments are the function's keywords.
OPERATIONS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {}


def operation(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert kind in ("engine", "catalog", "table", "writes")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS[function.__name__] = (kind, function)
        return function

    return register


@operation("engine")
def ping() -> dict[str, Any]:
    return {"pong": True}


# ---- running a job -----------------------------------------------------------------------------------------


class Engine:
    def __init__(self) -> None:
        self.root: SparkSession | None = None
        self.catalogs: collections.OrderedDict[tuple[str, str, str], Catalog] = collections.OrderedDict()
        self.last_catalog: tuple[str, str, str] | None = None
        self.last_table: list[str] | None = None

    def answer(self, job: Any) -> dict[str, Any]:
        """Runs one job; every failure becomes an answer."""
        echo = {"id": job["id"]} if isinstance(job, dict) and "id" in job else {}
        try:
            return echo | self.run(job)
        except Exception as error:  # noqa: BLE001  whatever Spark raises is the answer
            return echo | told(error)

    def run(self, job: Any) -> dict[str, Any]:
        if not isinstance(job, dict):
            raise BadJob("a job is a JSON object")
        arguments = {name: value for name, value in job.items() if name not in ("op", "id")}
        op = job.get("op")
        if op not in OPERATIONS:
            raise BadJob(f"unknown op {op!r}; known: {', '.join(sorted(OPERATIONS))}")
        kind, function = OPERATIONS[op]
        config, table = arguments.pop("catalog", None), arguments.pop("table", None)
        if kind == "engine":
            return call(function, arguments)
        catalog = self.catalog(config)
        if kind == "catalog":
            return call(function, arguments, catalog)
        if table is not None:
            self.last_table = identifier(table)
        if self.last_table is None:
            raise BadJob("the job lacks 'table'")
        if kind == "table":
            return call(function, arguments, catalog, self.last_table)
        before = snapshot_ids(catalog, self.last_table)
        result = call(function, arguments, catalog, self.last_table) or {}
        after = snapshot_ids(catalog, self.last_table)
        return result | {"snapshots": [found for found in after if found not in before]}

    def catalog(self, config: dict[str, str] | None) -> Catalog:
        key = (config["uri"], config["warehouse"], config["name"]) if config else self.last_catalog
        if key is None:
            raise BadJob("the job lacks 'catalog'")
        if key not in self.catalogs:
            if self.root is None:
                self.root = start()
            if len(self.catalogs) == MAX_OPEN_CATALOGS:
                self.catalogs.popitem(last=False)[1].close()
            self.catalogs[key] = Catalog(self.root, *key)
        self.catalogs.move_to_end(key)
        self.last_catalog = key
        self.catalogs[key].activate()
        return self.catalogs[key]


def start() -> SparkSession:
    jars = os.environ.get("MERGEBERG_SPARK_JARS")
    if not jars:
        raise BadJob("MERGEBERG_SPARK_JARS is unset: scripts/spark sets it")
    folder = tempfile.gettempdir()
    settings = {
        "spark.driver.extraClassPath": f"{pathlib.Path(jars)}/*",
        "spark.sql.extensions": EXTENSIONS,
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": f"{folder}/spark-unused",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-Duser.timezone=UTC -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        # Small tables: every job is one task.
        "spark.sql.adaptive.enabled": "false",
        "spark.default.parallelism": "1",
    }
    builder = SparkSession.builder.appName("mergeberg-tests").master("local[1]")
    session = builder.config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def call(function: Callable[..., Any], arguments: dict[str, Any], *first: Any) -> Any:
    try:
        inspect.signature(function).bind(*first, **arguments)
    except TypeError as error:
        raise BadJob(f"{function.__name__}{inspect.signature(function)}: {error}") from None
    return function(*first, **arguments)


def snapshot_ids(catalog: Catalog, table: list[str]) -> list[int]:
    """Ids of all snapshots, oldest first; none for a table that does not exist."""
    if not catalog.java.tableExists(catalog.java_identifier(table)):
        return []
    snapshots = sorted(catalog.java_table(table).snapshots(), key=lambda found: found.sequenceNumber())
    return [found.snapshotId() for found in snapshots]


def told(error: Exception) -> dict[str, str]:
    """The Java exception that says most: Iceberg's own if there is one among the causes, else the last cause."""
    java = None
    if isinstance(error, Py4JJavaError):
        java = error.java_exception
    elif isinstance(error, CapturedException):
        java = error._origin
    if java is None:
        return {"error": type(error).__name__, "message": str(error)}
    chosen = java
    for _ in range(MAX_CAUSES):
        chosen = java
        if java.getClass().getName().startswith("org.apache.iceberg.") or java.getCause() is None:
            break
        java = java.getCause()
    # Spark adds its plan in further lines.
    return {"error": chosen.getClass().getSimpleName(), "message": str(chosen.getMessage()).split("\n")[0]}


# ---- command line ------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    import spark_java  # noqa: F401
    import spark_operations  # noqa: F401  registers its operations

    match arguments:
        case ["serve"]:
            serve()
            return 0
        case ["ops"]:
            for name, (kind, function) in sorted(OPERATIONS.items()):
                print(f"{name:28} {kind:8} {inspect.signature(function)}")
            return 0
        case _:
            print(__doc__)
            return 2


def serve() -> None:
    # Answers own standard output; what Spark and its JVM print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # PySpark logs each failure with its stack; the answer says it.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    engine = Engine()
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            answer = engine.answer(json.loads(line))
        except ValueError as error:
            answer = {"error": "BadJob", "message": f"not JSON: {error}"}
        answers.write(json.dumps(answer, ensure_ascii=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    # The operations import this module by name: they must register in this very instance.
    sys.modules["spark_engine"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
