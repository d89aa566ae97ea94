"""The engines themselves, before Rust tests rest on them: python tests/python/test_engine.py."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
FLIGHTS = HERE.parent.parent / "fixtures" / "flights"
COLUMNS = [("carrier", "string"), ("flight", "int"), ("origin", "string"), ("time_hour", "timestamp")]
DAY = [{"name": name, "type": kind} for name, kind in COLUMNS + [("flight_date", "date")]]
# Names as users make them: each engine must quote them.
TABLE = ["sales ü", "fl'ights"]


def day(number: int) -> str:
    return str(FLIGHTS / f"flights-2013-08-{number}.parquet")


class Process:
    """One `serve` process."""

    def __init__(self, folder: str) -> None:
        self.catalog = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": folder, "name": "test"}
        self.process = subprocess.Popen(
            [sys.executable, HERE / "engine.py", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


class EngineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        cls.first, cls.second = Process(cls.folder.name), Process(cls.folder.name)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.first.close()
        cls.second.close()
        cls.folder.cleanup()

    def setUp(self) -> None:
        self.ok("create_table", schema=DAY, partition=["flight_date"])

    def tearDown(self) -> None:
        self.ok("drop_table")

    def ok(self, op: str, **arguments: Any) -> dict[str, Any]:
        answer = self.first.ask(op, **arguments)
        self.assertNotIn("error", answer)
        return answer

    def test_all_engines_read_the_same_rows_of_a_branch(self) -> None:
        self.ok("append", parquet=[day(13), day(14)])
        self.ok("create_branch", branch="ingest/a b")
        self.ok("append", branch="ingest/a b", parquet=day(15), where="carrier = 'UA'", part=[0, 2])
        overwritten = self.ok("overwrite", branch="ingest/a b", filter="flight_date = '2013-08-13'", parquet=day(13))
        self.assertEqual(len(overwritten["snapshots"]), 2)
        replaced = self.ok("dynamic_partition_overwrite", branch="ingest/a b", parquet=day(14))
        self.assertEqual(len(replaced["snapshots"]), 2)
        ours, theirs = (self.ok(op, ref="ingest/a b") for op in ("read", "read_duckdb"))
        self.assertGreater(ours["count"], 995 + 997)
        self.assertEqual(ours, theirs)
        self.assertEqual(self.ok("read", count_only=True)["count"], 995 + 997)

        # ClickHouse gives timestamps without zone a zone.
        columns = ["carrier", "flight", "origin", "flight_date"]
        ours, theirs = (self.ok(op, ref="ingest/a b", columns=columns) for op in ("read", "read_clickhouse"))
        self.assertEqual(ours, theirs)
        self.assertEqual(self.ok("read_clickhouse", count_only=True)["count"], 995 + 997)

    def test_a_staged_snapshot_has_no_ref(self) -> None:
        self.ok("append", rows=[{"carrier": "UA", "flight_date": "2013-08-13"}])
        staged = self.ok("append", branch=None, rows=[{"carrier": "AA"}])["snapshots"][0]
        self.assertEqual(list(self.ok("refs")["refs"]), ["main"])
        self.assertEqual(self.ok("read", snapshot_id=staged, count_only=True)["count"], 2)

    def test_compaction_keeps_the_rows(self) -> None:
        for part in range(3):
            self.ok("append", parquet=day(20), part=[part, 3])
        before = self.ok("read")["rows"]
        for arguments in ({"label": "replace"}, {"label": "overwrite"}, {"mode": "two-snapshots"}):
            self.ok("compact", filter="flight_date = '2013-08-20'", **arguments)
            self.assertEqual(len(self.ok("files")["files"]), 1)
            self.assertEqual(self.ok("read")["rows"], before)
        operations = [snapshot["operation"] for snapshot in self.ok("snapshots", ref="main")["snapshots"]]
        self.assertEqual(operations[:4], ["append", "delete", "overwrite", "replace"])

    def test_row_level_deletes_are_applied(self) -> None:
        self.ok("append", parquet=day(20))
        file = self.ok("files")["files"][0]["path"]
        self.ok("add_position_deletes", path=file, positions=[0, 5])
        self.ok("add_position_deletes", path=file, positions=[7], bounds=False)
        self.assertEqual(self.ok("read"), self.ok("read_duckdb"))
        self.assertEqual(self.ok("read_duckdb", count_only=True)["count"], 986 - 3)
        self.ok("add_equality_deletes", rows=[{"carrier": "UA"}], on=["carrier"], like=file)
        self.assertEqual(self.ok("read_duckdb", where="carrier = 'UA'", count_only=True)["count"], 0)
        contents = sorted(found["content"] for found in self.ok("files")["files"])
        self.assertEqual(contents, ["data", "equality_deletes", "position_deletes", "position_deletes"])

    def test_a_lost_race_is_run_again_or_shown(self) -> None:
        self.ok("append", rows=[{"carrier": "UA"}])
        self.ok("create_branch", branch="other")
        for branch in ("main", "other"):
            again = self.race(branch, {})
            self.assertGreater(again["conflicts"], 0)
        shown = self.race("main", {"attempts": 1})
        self.assertEqual(shown["error"], "CommitFailedException")
        self.assertEqual(self.ok("read", count_only=True)["count"], 5)
        self.assertEqual(self.ok("read", ref="other", count_only=True)["count"], 2)

    def race(self, branch: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The second process writes to `branch`, and just before its commit the first one commits to `main`."""
        reached, until = (pathlib.Path(self.folder.name) / name for name in ("reached", "until"))
        answers = []
        job = {"rows": [{"carrier": "AA"}], "branch": branch, "hold": {"reached": str(reached), "until": str(until)}}
        writer = threading.Thread(target=lambda: answers.append(self.second.ask("append", **job, **arguments)))
        writer.start()
        while not reached.exists():
            writer.join(0.002)
        self.ok("append", rows=[{"carrier": "UA"}])
        until.touch()
        writer.join()
        reached.unlink()
        until.unlink()
        return answers[0]

    def test_mistakes_in_a_job_are_answers(self) -> None:
        for op, arguments in (("appendd", {}), ("append", {"rowz": []}), ("append", {}), ("load", {"table": None})):
            self.assertEqual(self.first.ask(op, **arguments)["error"], "BadJob")
        self.assertEqual(self.first.ask("load", table="no.table")["error"], "NoSuchTableError")
        self.assertEqual(self.first.ask("ping"), {"pong": True})


if __name__ == "__main__":
    unittest.main()
