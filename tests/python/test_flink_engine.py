"""Flink itself, before Rust tests rest on it: scripts/flink python3 tests/python/test_flink_engine.py."""

from __future__ import annotations

import os
import tempfile
import unittest
from typing import Any

from test_spark_engine import BRANCH, TABLE, Process

D20, D21 = "DATE '2026-08-20'", "DATE '2026-08-21'"


class FlinkTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory()
        python = os.environ["MERGEBERG_SPARK"]
        cls.flink, cls.spark = (Process(cls.folder.name, python, f"{name}_engine.py") for name in ("flink", "spark"))

    @classmethod
    def tearDownClass(cls) -> None:
        cls.flink.close()
        cls.spark.close()
        cls.folder.cleanup()

    def ok(self, engine: Process, op: str, **arguments: Any) -> dict[str, Any]:
        answer = engine.ask(op, **arguments)
        self.assertNotIn("error", answer, f"{op} {arguments}: {answer}")
        return answer

    def test_appends_overwrites_and_upserts_on_a_branch_of_spark(self) -> None:
        self.ok(self.spark, "create_namespace", namespace=TABLE[:1])
        self.ok(
            self.flink, "sql", statements=[
                "CREATE TABLE {base} (id BIGINT NOT NULL, `day` DATE NOT NULL, note STRING, `at` TIMESTAMP_LTZ(6),"
                " PRIMARY KEY (id, `day`) NOT ENFORCED) PARTITIONED BY (`day`) WITH ('format-version' = '2')",
                f"INSERT INTO {{table}} VALUES (1, {D20}, 'a', CAST('2026-08-20 10:00:00' AS TIMESTAMP_LTZ(6))),"
                f" (2, {D20}, 'b', CAST(NULL AS TIMESTAMP_LTZ(6))), (3, {D21}, 'ü', CAST(NULL AS TIMESTAMP_LTZ(6)))",
            ],
        )  # fmt: skip
        self.ok(self.spark, "sql", statements=f"ALTER TABLE {{base}} CREATE BRANCH `{BRANCH}`")
        null = "CAST(NULL AS TIMESTAMP_LTZ(6))"
        self.ok(self.flink, "sql", statements=f"INSERT INTO {{table}} VALUES (4, {D20}, 'd', {null})", branch=BRANCH)
        hint = f"/*+ OPTIONS('branch' = '{BRANCH}', 'upsert-enabled' = 'true') */"
        upsert = f"INSERT INTO {{base}} {hint} VALUES (1, {D20}, 'one', {null}), (1, {D20}, 'again', {null})"
        self.ok(self.flink, "sql", statements=upsert)
        contents = [file["content"] for file in self.ok(self.spark, "files", ref=BRANCH)["files"]]
        self.assertEqual(set(contents), {"data", "equality_deletes", "position_deletes"})
        overwrite = f"INSERT OVERWRITE {{table}} VALUES (9, {D21}, 'o', {null})"
        self.ok(self.flink, "sql", statements=overwrite, branch=BRANCH)

        for ref, ids in (("main", [1, 2, 3]), (BRANCH, [1, 2, 4, 9])):
            ours, theirs = (self.ok(engine, "rows", ref=ref) for engine in (self.flink, self.spark))
            self.assertEqual(ours, theirs)
            self.assertEqual(sorted(row["id"] for row in ours["rows"]), ids)
        notes = {row["id"]: row["note"] for row in ours["rows"]}
        self.assertEqual(notes[1], "again")

    def test_mistakes_are_answers(self) -> None:
        self.assertEqual(self.flink.ask("sqll")["error"], "BadJob")
        self.assertIn("error", self.flink.ask("sql", statements="SELECT * FROM nowhere"))
        self.assertEqual(self.flink.ask("ping"), {"pong": True})


if __name__ == "__main__":
    unittest.main()
