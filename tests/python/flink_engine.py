"""Flink with Iceberg as a process of its own, driven by JSON jobs, over Flink's Java API.

    flink_engine.py serve    a job a line on standard input, an answer a line on standard output, until it ends

Jobs and answers are those of spark_engine.py. Operations, with their arguments:

    sql   statements, branch?    runs statements (batch mode, each write one commit); the rows of the last
    rows  ref?, snapshot_id?     rows in a fixed order
    versions, ping

`{table}` in a statement is the table, written at `branch` if one is named; `{base}` is the table itself. A write with
/*+ OPTIONS */ of its own names them instead of `{table}`. scripts/flink brings what this needs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from json_values import in_order, to_json
from py4j.java_gateway import GatewayParameters, JavaGateway, java_import, launch_gateway
from py4j.protocol import Py4JJavaError

SQLITE_BUSY_MS = 30_000
# An exception's causes that are looked through.
MAX_CAUSES = 20
# What a local cluster needs on Java 17.
OPENED = ["java.lang", "java.net", "java.io", "java.nio", "java.text", "java.time", "java.util", "java.util.concurrent"]


class BadJob(Exception):
    """The job itself is wrong: a mistake in the test."""


def identifier(name: str | list[str]) -> list[str]:
    return name.split(".") if isinstance(name, str) else list(name)


def quoted(parts: list[str]) -> str:
    return ".".join("`" + part.replace("`", "``") + "`" for part in parts)


def text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def start() -> JavaGateway:
    classpath = os.environ.get("MERGEBERG_FLINK_JARS")
    if not classpath:
        raise BadJob("MERGEBERG_FLINK_JARS is unset: scripts/flink sets it")
    options = ["-Xmx1g", "-Duser.timezone=UTC", "-Dlog4j2.level=ERROR", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    options += [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
    port = launch_gateway(
        classpath=classpath, javaopts=options, die_on_exit=True, redirect_stderr=sys.stderr, redirect_stdout=sys.stderr
    )
    return JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))


class Engine:
    def __init__(self) -> None:
        self.gateway: JavaGateway | None = None
        self.sessions: dict[tuple[str, str, str], Any] = {}
        self.last_catalog: tuple[str, str, str] | None = None
        self.last_table: list[str] | None = None

    def answer(self, job: Any) -> dict[str, Any]:
        """Runs one job; every failure becomes an answer."""
        echo = {"id": job["id"]} if isinstance(job, dict) and "id" in job else {}
        try:
            return echo | self.run(dict(job))
        except Exception as error:  # noqa: BLE001  whatever Flink raises is the answer
            return echo | told(error)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        op, config, table = job.pop("op", None), job.pop("catalog", None), job.pop("table", None)
        job.pop("id", None)
        known = {"sql": self.sql, "rows": self.rows}
        if op == "ping":
            return {"pong": True}
        if self.gateway is None:
            self.gateway = start()
            java_import(self.gateway.jvm, "org.apache.flink.table.api.*")
        if op == "versions":
            jvm = self.gateway.jvm
            return {
                "flink": jvm.org.apache.flink.runtime.util.EnvironmentInformation.getVersion(),
                "iceberg-java-of-flink": jvm.org.apache.iceberg.IcebergBuild.version(),
            }
        if op not in known:
            raise BadJob(f"unknown op {op!r}; known: ping, rows, sql, versions")
        session, name = self.session(config)
        if table is not None:
            self.last_table = identifier(table)
        if self.last_table is None:
            raise BadJob("the job lacks 'table'")
        return known[op](session, [name, *self.last_table], **job)

    def session(self, config: dict[str, str] | None) -> tuple[Any, str]:
        key = (config["uri"], config["warehouse"], config["name"]) if config else self.last_catalog
        if key is None:
            raise BadJob("the job lacks 'catalog'")
        uri, warehouse, name = key
        if key not in self.sessions:
            jvm = self.gateway.jvm
            settings = jvm.EnvironmentSettings.newInstance().inBatchMode().build()
            session = jvm.TableEnvironment.create(settings)
            for option, value in {
                "table.dml-sync": "true",
                "table.local-time-zone": "UTC",
                "parallelism.default": "1",
                "taskmanager.memory.managed.size": "64m",
                "taskmanager.memory.network.max": "64m",
                "io.tmp.dirs": tempfile.gettempdir(),
            }.items():
                session.getConfig().set(option, value)
            options = {
                "type": "iceberg",
                "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
                "uri": "jdbc:sqlite:" + uri.removeprefix("sqlite:///").split("?")[0],
                "jdbc.schema-version": "V1",
                "jdbc.busy_timeout": str(SQLITE_BUSY_MS),
                "warehouse": warehouse,
                "cache-enabled": "false",
            }
            given = ", ".join(f"{text(key)} = {text(value)}" for key, value in options.items())
            session.executeSql(f"CREATE CATALOG {quoted([name])} WITH ({given})")
            self.sessions[key] = session
        self.last_catalog = key
        return self.sessions[key], name

    def sql(
        self, session: Any, table: list[str], statements: str | list[str], branch: str | None = None
    ) -> dict[str, Any]:
        hint = f" /*+ OPTIONS('branch' = {text(branch)}) */" if branch else ""
        names = {"{table}": quoted(table) + hint, "{base}": quoted(table)}
        result = None
        for statement in [statements] if isinstance(statements, str) else statements:
            for placeholder, name in names.items():
                statement = statement.replace(placeholder, name)
            result = session.executeSql(statement)
            # A write's result is its number of rows: nothing that is known here.
            if statement.lstrip()[:6].upper() not in ("SELECT", "SHOW T", "SHOW C"):
                result = None
        found = rows_of(result) if result is not None else []
        return {"count": len(found), "rows": found}

    def rows(
        self, session: Any, table: list[str], ref: str | None = None, snapshot_id: int | None = None
    ) -> dict[str, Any]:
        hint = ""
        if ref is not None:
            # Flink has one option for branches and one for tags; main is no option at all.
            hint = f" /*+ OPTIONS('branch' = {text(ref)}) */" if ref != "main" else ""
        elif snapshot_id is not None:
            hint = f" /*+ OPTIONS('snapshot-id' = '{int(snapshot_id)}') */"
        found = rows_of(session.executeSql(f"SELECT * FROM {quoted(table)}{hint}"))
        return {"count": len(found), "rows": in_order(found)}


def rows_of(result: Any) -> list[dict[str, Any]]:
    schema = result.getResolvedSchema()
    names = list(schema.getColumnNames())
    kinds = [kind.getLogicalType() for kind in schema.getColumnDataTypes()]
    found, rows = [], result.collect()
    while rows.hasNext():
        row = rows.next()
        values = [plain(row.getField(index), kind) for index, kind in enumerate(kinds)]
        found.append({name: to_json(value) for name, value in zip(names, values, strict=True)})
    rows.close()
    return found


def plain(value: Any, kind: Any) -> Any:
    """Java's values in the form of json_values.py; maps as pairs."""
    if value is None or not hasattr(value, "getClass"):
        return value
    inner = list(kind.getChildren())
    match kind.getTypeRoot().toString():
        case "ROW":
            names = list(kind.getFieldNames())
            return {name: plain(value.getField(at), inner[at]) for at, name in enumerate(names)}
        case "ARRAY":
            return [plain(item, inner[0]) for item in value]
        case "MAP":
            return [[plain(key, inner[0]), plain(value.get(key), inner[1])] for key in value]
        case "TIMESTAMP_WITH_LOCAL_TIME_ZONE":
            return with_seconds(value.toString().removesuffix("Z")) + "+00:00"
        case "TIMESTAMP_WITHOUT_TIME_ZONE" | "TIME_WITHOUT_TIME_ZONE":
            return with_seconds(value.toString())
        case _:
            return value.toString()


def with_seconds(written: str) -> str:
    """Java leaves them out when there are none."""
    return written if written.count(":") == 2 else written + ":00"


def told(error: Exception) -> dict[str, str]:
    """The last cause: Flink wraps a job's failure many times."""
    if not isinstance(error, Py4JJavaError):
        return {"error": type(error).__name__, "message": str(error)}
    java = error.java_exception
    for _ in range(MAX_CAUSES):
        if java.getCause() is None:
            break
        java = java.getCause()
    return {"error": java.getClass().getSimpleName(), "message": str(java.getMessage()).split("\n")[0]}


def serve() -> None:
    # Answers own standard output; what Flink and its JVM print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
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
    if engine.gateway is not None:
        engine.gateway.shutdown()


if __name__ == "__main__":
    if sys.argv[1:] != ["serve"]:
        print(__doc__)
        sys.exit(2)
    serve()
