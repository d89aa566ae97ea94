//! Engines as processes of their own, a job a line: PyIceberg and DuckDB (`tests/python/engine.py serve`), and
//! Spark (`tests/python/spark_engine.py serve`).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;

use mergeberg::ledger::Ledger;
use mergeberg_kernel::ids::TableName;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::child::real_now;
use super::object_server::ObjectServer;
use super::s3_server::S3Server;
use super::served::Served;
use super::{House, ORDERS, Order};

/// Set by `scripts/test`: the interpreter that has PyIceberg and DuckDB.
const INTERPRETER: &str = "MERGEBERG_PYTHON";
/// Set by `scripts/test`: the interpreter that has Spark.
const SPARK_INTERPRETER: &str = "MERGEBERG_SPARK";

/// One `serve` process over the catalog of a folder.
pub struct Python {
    process: Served,
    catalog: Value,
}

impl Python {
    /// `None`, said so, without the engines: `scripts/test --quick` has none.
    pub fn start(folder: &Path) -> Option<Self> {
        Self::serve(INTERPRETER, "engine.py", folder)
    }

    /// Over a REST catalog.
    pub fn over_rest(folder: &Path, uri: &str) -> Option<Self> {
        Self::over_rest_with(folder, uri, json!({}))
    }

    /// And with more of PyIceberg's properties.
    pub fn over_rest_with(folder: &Path, uri: &str, properties: Value) -> Option<Self> {
        let mut python = Self::start(folder)?;
        python.catalog["uri"] = json!(uri);
        for (key, value) in properties.as_object().expect("properties are an object") {
            python.catalog[key] = value.clone();
        }
        Some(python)
    }

    /// Over the SQL catalog in a PostgreSQL database, named by its address.
    pub fn over_postgres(folder: &Path, url: &str) -> Option<Self> {
        let mut python = Self::start(folder)?;
        python.catalog["uri"] = json!(url.replace("postgresql://", "postgresql+psycopg2://"));
        Some(python)
    }

    /// Over a SQL catalog with its warehouse on S3.
    pub fn on_s3(folder: &Path, server: &S3Server) -> Option<Self> {
        let mut python = Self::start(folder)?;
        python.catalog = server.catalog_of(folder);
        Some(python)
    }

    /// Over a SQL catalog with its warehouse on GCS.
    pub fn on_gcs(folder: &Path, server: &ObjectServer) -> Option<Self> {
        let mut python = Self::start(folder)?;
        python.catalog = server.catalog_of(folder);
        Some(python)
    }

    /// Spark in the same way.
    pub fn spark(folder: &Path) -> Option<Self> {
        Self::serve(SPARK_INTERPRETER, "spark_engine.py", folder)
    }

    fn serve(variable: &str, script: &str, folder: &Path) -> Option<Self> {
        let process = Served::start(variable, script)?;
        Some(Self { process, catalog: Self::catalog_of(folder) })
    }

    /// The catalog of a House, as a job names it.
    pub fn catalog_of(folder: &Path) -> Value {
        json!({
            "uri": format!("sqlite:///{}", folder.join("catalog.db").display()),
            "warehouse": format!("file://{}", folder.join("warehouse").display()),
            "name": "test",
        })
    }

    pub fn ask(&mut self, op: &str, arguments: Value) -> Value {
        let mut job = json!({ "op": op, "catalog": self.catalog });
        if op != "list_tables" {
            job["table"] = json!(ORDERS);
        }
        for (key, value) in arguments.as_object().expect("arguments are an object") {
            job[key] = value.clone();
        }
        self.process.ask(&job)
    }

    pub fn ok(&mut self, op: &str, arguments: Value) -> Value {
        let answer = self.ask(op, arguments);
        assert!(answer.get("error").is_none(), "{op}: {answer}");
        answer
    }

    /// ORD, as PyIceberg makes it.
    pub fn create_orders(&mut self) {
        let column = |name, kind, required| json!({ "name": name, "type": kind, "required": required });
        self.ok(
            "create_table",
            json!({
                "schema": [
                    column("order_id", "long", true),
                    column("order_date", "date", true),
                    column("status", "string", false),
                    column("amount", "decimal(12, 2)", false),
                ],
                "partition": ["order_date"],
            }),
        );
    }

    pub fn append(&mut self, branch: &str, rows: &[Order]) -> i64 {
        let answer = self.ok("append", json!({ "branch": branch, "rows": json_rows(rows) }));
        answer["snapshots"][0].as_i64().unwrap()
    }

    pub fn branch(&mut self, name: &str) {
        self.ok("create_branch", json!({ "branch": name }));
    }

    /// Rows of a ref by both engines, which must agree.
    pub fn rows(&mut self, name: &str) -> Vec<Order> {
        let by_pyiceberg = self.rows_by_pyiceberg(name);
        assert_eq!(by_pyiceberg, self.read("read_duckdb", name), "PyIceberg and DuckDB read different rows");
        by_pyiceberg
    }

    /// Where DuckDB does not come: its client for GCS wants keys of S3's kind.
    pub fn rows_by_pyiceberg(&mut self, name: &str) -> Vec<Order> {
        self.read("read", name)
    }

    fn read(&mut self, op: &str, name: &str) -> Vec<Order> {
        let answer = self.ok(op, json!({ "ref": name }));
        let mut rows: Vec<Order> = answer["rows"].as_array().unwrap().iter().map(order_of).collect();
        rows.sort();
        rows
    }
}

pub fn json_rows(rows: &[Order]) -> Value {
    rows.iter()
        .map(|row| {
            json!({
                "order_id": row.id,
                "order_date": format!("2026-08-{:02}", row.day),
                "status": row.status,
                "amount": format!("{}.{:02}", row.cents / 100, row.cents % 100),
            })
        })
        .collect()
}

fn order_of(row: &Value) -> Order {
    let text = |name: &str| row[name].as_str().unwrap_or_else(|| panic!("{name} of {row}")).to_owned();
    Order {
        id: row["order_id"].as_i64().unwrap(),
        day: text("order_date").strip_prefix("2026-08-").unwrap().parse().unwrap(),
        status: text("status"),
        cents: text("amount").replace('.', "").parse().unwrap(),
    }
}

impl House {
    /// ORD in a catalog that PyIceberg made, with S1 and S2 written by it; `None` without the engines.
    pub async fn of_pyiceberg(policy: &str) -> Option<(Self, Python)> {
        let dir = TempDir::new().unwrap();
        let mut python = Python::start(dir.path())?;
        python.create_orders();
        python.append("main", &[super::order(1, 20), super::order(2, 20)]);
        python.append("main", &[super::order(3, 21)]);
        std::fs::create_dir(dir.path().join("policies")).unwrap();
        std::fs::write(dir.path().join("policies/orders.toml"), policy).unwrap();
        let clock = Arc::new(AtomicI64::new(real_now()));
        let catalog = Arc::new(Self::catalog_in(dir.path(), &clock, false).await);
        let ledger = Ledger::open_or_create(dir.path().join("ledger.db")).await.unwrap();
        let table: TableName = ORDERS.parse().unwrap();
        Some((Self::assemble(dir, catalog, ledger, clock, table), python))
    }
}
