"""A pipeline's own command for `on-conflict = "external"`, with Spark.

The pipeline marks all orders of one day as done. Its branch was written from an older state of the target; here it does
the same work again, on the branch that the queue gives it. `rebuild_spark.py DAY`, from the policy:

    [class.external]
    command = ["spark-submit", "rebuild_spark.py", "2026-08-21"]
    scope = "touched-partitions"

`rebuild_spark.py DAY KEY=VALUE...` takes Spark's settings where it is run by a plain interpreter. The catalog is a SQL
catalog in a SQLite file here; for a REST catalog `type` is `rest`, with credentials in Spark's own settings.
"""

import os
import sys
from datetime import date

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, lit


def given(name: str) -> str:
    return os.environ["MERGEBERG_" + name]


def session(settings: list[str]) -> SparkSession:
    catalog = f"spark.sql.catalog.{given('CATALOG_NAME')}"
    builder = (
        SparkSession.builder.appName("rebuild")
        .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        .config(catalog, "org.apache.iceberg.spark.SparkCatalog")
        .config(f"{catalog}.type", "jdbc")
        .config(f"{catalog}.uri", "jdbc:sqlite:" + given("CATALOG_URI").removeprefix("sqlite:///"))
        .config(f"{catalog}.jdbc.schema-version", "V1")
        .config(f"{catalog}.jdbc.busy_timeout", "30000")
        .config(f"{catalog}.warehouse", given("CATALOG_WAREHOUSE"))
        .config(f"{catalog}.cache-enabled", "false")
    )
    for setting in settings:
        key, value = setting.split("=", 1)
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    day = date.fromisoformat(sys.argv[1])
    spark = session(sys.argv[2:])
    table = f"{given('CATALOG_NAME')}.{given('TABLE')}"
    # The branch stands at the target's head: everything that came to the target since the first time is there.
    branch = f"{table}.`branch_{given('BRANCH')}`"
    rows = spark.table(branch).where(col("order_date") == lit(day)).withColumn("status", lit("done"))
    rows.writeTo(branch).overwritePartitions()
    print(f"the orders of {day} are done on {given('BRANCH')}")
    spark.stop()


if __name__ == "__main__":
    main()
