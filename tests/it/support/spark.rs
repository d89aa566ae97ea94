//! Spark with Iceberg as a process of its own: `tests/python/spark_engine.py serve`.

use serde_json::{Value, json};

use super::House;
use super::python::Python;
use super::served::Served;

/// Set by `scripts/spark`: the interpreter that has PySpark.
const INTERPRETER: &str = "MERGEBERG_SPARK";

/// One process for many Houses: it takes longer to start than to answer.
pub struct Spark(Served);

impl Spark {
    /// `None`, said so, without Spark: `scripts/test --quick` has none.
    pub fn start() -> Option<Self> {
        Served::start(INTERPRETER, "spark_engine.py").map(Self)
    }

    /// A job on the table of a House; the answer, or why not: the Java exception and its first line.
    pub fn ask(&mut self, house: &House, op: &str, arguments: Value) -> Result<Value, String> {
        let catalog = Python::catalog_of(house.dir.path());
        let mut job = json!({ "op": op, "catalog": catalog, "table": house.table.to_string() });
        for (key, value) in arguments.as_object().expect("arguments are an object") {
            job[key] = value.clone();
        }
        let answer = self.0.ask(&job);
        match answer.get("error") {
            None => Ok(answer),
            Some(error) => Err(format!("{}: {}", error.as_str().unwrap(), answer["message"])),
        }
    }

    pub fn ok(&mut self, house: &House, op: &str, arguments: Value) -> Value {
        let told = arguments.to_string();
        self.ask(house, op, arguments).unwrap_or_else(|error| panic!("{op} {told}: {error}"))
    }
}
