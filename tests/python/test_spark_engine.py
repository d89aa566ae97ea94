"""Spark itself, before Rust tests rest on it: scripts/spark python3 tests/python/test_spark_engine.py.

With MERGEBERG_PYTHON (scripts/test sets it) PyIceberg and DuckDB must read what Spark wrote."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
import unittest
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
# Names as users make them.
TABLE = ["sales ü", "fl'ights"]
BRANCH = "ingest/a b"
COLUMNS = "(id BIGINT, day DATE, note STRING, at TIMESTAMP)"


class Process:
    """One `serve` process."""

    def __init__(self, folder: str, interpreter: str, script: str) -> None:
        self.catalog = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/w", "name": "test"}
        self.process = subprocess.Popen(
            [interpreter, HERE / script, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        job = {"op": op, "catalog": self.catalog, "table": TABLE} | arguments
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class SparkTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.spark = Process(cls.folder.name, os.environ["MERGEBERG_SPARK"], "spark_engine.py")
        python = os.environ.get("MERGEBERG_PYTHON")
        cls.others = Process(cls.folder.name, python, "engine.py") if python else None

    @classmethod
    def tearDownClass(cls) -> None:
        cls.spark.close()
        if cls.others:
            cls.others.close()
        cls.folder.cleanup()

    def setUp(self) -> None:
        self.ok("create_namespace", namespace=TABLE[:1])

    def tearDown(self) -> None:
        self.ok("sql", statements="DROP TABLE IF EXISTS {base} PURGE")

    def create(self, version: int, **properties: str) -> None:
        given = "".join(", '{}' = '{}'".format(key.replace("_", "."), value) for key, value in properties.items())
        self.sql(
            f"CREATE TABLE {{base}} {COLUMNS} USING iceberg PARTITIONED BY (day)"
            f" TBLPROPERTIES ('format-version' = '{version}'{given})"
        )
        self.sql(
            "INSERT INTO {table} VALUES (1, DATE '2026-08-20', 'ä', TIMESTAMP '2026-08-20 01:00:00'),"
            " (2, DATE '2026-08-20', NULL, NULL), (3, DATE '2026-08-21', 'c', NULL),"
            " (NULL, DATE '2026-08-21', 'd', NULL)"
        )
        self.sql(f"ALTER TABLE {{base}} CREATE BRANCH `{BRANCH}`")

    def ok(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = self.spark.ask(op, **arguments)
        self.assertNotIn("error", answer, f"{op} {arguments}: {answer}")
        return answer

    def sql(self, *statements: str, **arguments: Any) -> dict[str, Any]:
        return self.ok("sql", statements=list(statements), **arguments)

    def ids(self, ref: str = "main") -> list[int | None]:
        """Sorted, NULL first. Everybody who reads must say the same."""
        ours = self.ok("rows", ref=ref)
        if self.others:
            theirs = self.others.ask("read", ref=ref)
            if "positional" not in str(theirs.get("message")):
                self.assertEqual(theirs.get("rows"), ours["rows"], theirs)
            self.assertEqual(self.others.ask("read_duckdb", ref=ref), ours)
        return sorted((row["id"] for row in ours["rows"]), key=lambda found: (found is not None, found))

    def test_statements_write_to_a_branch_and_leave_main_alone(self) -> None:
        self.create(2)
        added = self.sql("INSERT INTO {table} VALUES (5, DATE '2026-08-22', 'e', NULL)", branch=BRANCH)
        self.assertEqual(len(added["snapshots"]), 1)
        self.sql("DELETE FROM {table} WHERE id = 1", branch=BRANCH)
        self.sql("UPDATE {table} SET note = 'u' WHERE id = 2", branch=BRANCH)
        self.assertEqual(self.ids(BRANCH), [None, 2, 3, 5])
        self.assertEqual(self.ids(), [None, 1, 2, 3])
        first = self.ok("rows", where="id = 1")["rows"][0]
        self.assertEqual(first["at"], "2026-08-20T01:00:00+00:00")

    def test_overwrites_static_dynamic_filtered_and_of_a_data_frame(self) -> None:
        self.create(2)
        values = "SELECT 9L AS id, DATE '2026-08-20' AS day, 'n' AS note, CAST(NULL AS TIMESTAMP) AS at"
        for branch, act in (
            (
                "static",
                {
                    "statements": "INSERT OVERWRITE {table} PARTITION (day = DATE '2026-08-20') "
                    "SELECT 9L, 'n', CAST(NULL AS TIMESTAMP)"
                },
            ),
            ("dynamic", {"statements": f"INSERT OVERWRITE {{table}} {values}", "overwrite_mode": "dynamic"}),
            ("filtered", {"statements": f"INSERT INTO {{table}} REPLACE WHERE day = DATE '2026-08-20' {values}"}),
        ):
            self.sql(f"ALTER TABLE {{base}} CREATE BRANCH {branch}")
            self.ok("sql", branch=branch, **act)
            self.assertEqual(self.ids(branch), [None, 3, 9], branch)
        self.ok("overwrite", select=values, condition="day = DATE '2026-08-20'", branch=BRANCH)
        self.assertEqual(self.ids(BRANCH), [None, 3, 9])

    def test_row_level_deletes_of_both_versions(self) -> None:
        for version, kind in ((2, "position_deletes"), (3, "position_deletes")):
            self.create(version, write_delete_mode="merge-on-read")
            self.sql("DELETE FROM {table} WHERE id = 1", branch=BRANCH)
            found = {file["content"] for file in self.ok("files", ref=BRANCH)["files"]}
            self.assertEqual(found, {"data", kind})
            self.assertEqual(self.ids(BRANCH), [None, 2, 3])
            self.tearDown()

    def test_equality_deletes_remove_null_keys(self) -> None:
        self.create(2)
        like = next(f["path"] for f in self.ok("files")["files"] if "2026-08-21" in f["path"])
        keys = "SELECT CAST(NULL AS BIGINT) AS id UNION ALL SELECT 7L"
        row = "SELECT 8L AS id, DATE '2026-08-21' AS day, 'n' AS note, CAST(NULL AS TIMESTAMP) AS at"
        self.ok("row_delta", deletes=keys, on=["id"], inserts=row, like=like, branch=BRANCH)
        # PyIceberg refuses them, DuckDB keeps NULL keys: Spark alone.
        found = self.ok("rows", ref=BRANCH, columns=["id"])["rows"]
        self.assertEqual(found, [{"id": 1}, {"id": 2}, {"id": 3}, {"id": 8}])

    def test_procedures_and_their_refusals(self) -> None:
        self.create(2)
        added = self.sql(
            "INSERT INTO {table} VALUES (5, DATE '2026-08-22', 'e', NULL)",
            branch=BRANCH,
            snapshot_properties={"ticket": "T-1"},
        )["snapshots"][0]
        self.sql("INSERT INTO {table} VALUES (6, DATE '2026-08-22', 'f', NULL)")
        picked = self.ok("procedure", name="cherrypick_snapshot", arguments={"snapshot_id": added})
        self.assertEqual(picked["rows"][0]["source_snapshot_id"], added)
        self.assertEqual(self.ids(), [None, 1, 2, 3, 5, 6])
        tickets = self.sql("SELECT summary['ticket'] AS ticket FROM {base}.snapshots")["rows"]
        # A pick of Iceberg's does not carry what the writer noted.
        self.assertEqual([row["ticket"] for row in tickets].count("T-1"), 1)
        again = self.spark.ask("procedure", name="cherrypick_snapshot", arguments={"snapshot_id": added})
        self.assertIn("error", again)
        forward = self.spark.ask("procedure", name="fast_forward", arguments={"branch": "main", "to": BRANCH})
        self.assertIn("error", forward)
        self.ok("procedure", name="rewrite_data_files", arguments={"options": {"rewrite-all": "true"}})
        self.ok("procedure", name="rewrite_manifests")
        self.ok(
            "procedure",
            name="expire_snapshots",
            arguments={"older_than": {"timestamp": "2099-01-01 00:00:00"}, "retain_last": 1},
        )
        self.assertEqual(self.ids(), [None, 1, 2, 3, 5, 6])

    def test_orphans_go_and_live_files_stay(self) -> None:
        self.create(2)
        folder = pathlib.Path(self.ok("load")["location"].removeprefix("file://"))
        orphan = folder / "data" / "orphan.parquet"
        orphan.touch()
        later = int(orphan.stat().st_mtime * 1000) + 60_000
        # Tables of other tests lay in this folder, and an expiry may leave what it does not know of.
        self.ok("remove_orphan_files", older_than_ms=later)
        orphan.touch()
        removed = self.ok("remove_orphan_files", older_than_ms=later)["paths"]
        self.assertEqual([pathlib.Path(path).name for path in removed], ["orphan.parquet"])
        self.assertEqual(self.ids(), [None, 1, 2, 3])

    def test_expiry_deletes_what_is_unreachable_below_the_location(self) -> None:
        for how in ({}, {"action": True}, {"incremental": True}):
            with self.subTest(how=how):
                self.create(2)
                self.sql(f"ALTER TABLE {{base}} DROP BRANCH `{BRANCH}`", "DELETE FROM {table} WHERE id = 1")
                expired = self.ok("expire_snapshots", older_than_ms=4_070_908_800_000, **how)
                self.assertEqual(expired["spared"], [])
                self.assertTrue(any(path.endswith(".avro") for path in expired["deleted"]))
                for path in expired["deleted"]:
                    self.assertFalse(pathlib.Path("/" + path.removeprefix("file:").lstrip("/")).exists())
                self.assertEqual(self.ids(), [None, 2, 3])
                self.assertEqual(self.sql("SELECT count(*) AS left FROM {base}.snapshots")["rows"], [{"left": 1}])
                self.tearDown()

    def test_a_table_of_the_other_engine_is_spark_s_too(self) -> None:
        if not self.others:
            self.skipTest("MERGEBERG_PYTHON is unset")
        schema = [{"name": "id", "type": "long"}, {"name": "day", "type": "date"}, {"name": "key", "type": "uuid"}]
        key = "00112233-4455-6677-8899-aabbccddeeff"
        rows = [{"id": 1, "day": "1969-12-31", "key": None}]
        for op, arguments in (("create_table", {"schema": schema, "partition": ["day"]}), ("append", {"rows": rows})):
            self.assertNotIn("error", self.others.ask(op, **arguments))
        self.sql(f"INSERT INTO {{table}} VALUES (2, DATE '2026-08-20', '{key}')", "DELETE FROM {table} WHERE id = 1")
        self.assertEqual(self.ids(), [2])
        self.assertEqual(self.ok("rows")["rows"][0]["key"], key)

    def test_two_catalogs_of_one_name_do_not_meet(self) -> None:
        self.create(2)
        with tempfile.TemporaryDirectory() as folder:
            other = self.spark.catalog | {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/w"}
            answer = self.spark.ask("rows", catalog=other)
            self.assertIn("cannot be found", answer["message"])
        self.assertEqual(self.ids(), [None, 1, 2, 3])

    def test_mistakes_in_a_job_are_answers(self) -> None:
        for op, arguments in (("sqll", {}), ("sql", {"statement": "SELECT 1"}), ("procedure", {"name": "a; b"})):
            self.assertEqual(self.spark.ask(op, **arguments)["error"], "BadJob")
        self.assertEqual(self.spark.ask("ping"), {"pong": True})


if __name__ == "__main__":
    unittest.main()
