//! The examples of `docs/examples` as a class's own command: PyIceberg and Spark make a branch again.

use std::path::{Path, PathBuf};

use crate::support::child::SHORT_LEASE;
use crate::support::pipeline::policy;
use crate::support::{House, order};

const PYTHON: &str = "MERGEBERG_PYTHON";
const SPARK: &str = "MERGEBERG_SPARK";
const JARS: &str = "MERGEBERG_SPARK_JARS";

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/examples").join(name)
}

/// `None`, said so, without the engine.
fn engine(variable: &str) -> Option<String> {
    let found = std::env::var(variable).ok();
    if found.is_none() {
        eprintln!("skipped: {variable} is not set");
    }
    found
}

async fn remade_by(command: &[&str]) {
    let command = serde_json::to_string(command).unwrap();
    let house =
        House::in_real_time(&policy(&format!("command = {command}\nattempts = 1")), SHORT_LEASE).await;
    let request = house.enqueue_outdated("transform/a").await;
    // Its place is in nobody's way.
    house.append("main", &[order(30, 28)]).await;
    assert!(!house.drain_in_child(None));
    let runs = house.ledger.external_runs(request).await.unwrap();
    assert_eq!(house.state(request).await, "landed", "{runs:?}");
    assert_eq!(house.classified(request).await, "rebase");
    assert_eq!(house.outcomes(request).await, ["done"]);
    assert!(runs[0].output.as_deref().unwrap().contains(runs[0].branch.as_str()), "{runs:?}");
    assert_eq!(house.done("main").await, [3, 8]);
    assert_eq!(house.keys("main").await, [1, 2, 3, 8, 30]);
    assert_eq!(house.refs().await, ["main", "transform/a"]);
    house.assert_sound().await;
    house.balanced_report();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_script_makes_a_branch_again() {
    let Some(python) = engine(PYTHON) else { return };
    let script = example("rebuild_pyiceberg.py");
    remade_by(&[&python, script.to_str().unwrap(), "2026-08-21"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn spark_makes_a_branch_again() {
    let (Some(python), Some(jars)) = (engine(SPARK), engine(JARS)) else { return };
    let script = example("rebuild_spark.py");
    let jars = format!("spark.driver.extraClassPath={jars}/*");
    let settings = [
        "spark.master=local[1]",
        "spark.ui.enabled=false",
        "spark.driver.host=127.0.0.1",
        "spark.driver.bindAddress=127.0.0.1",
        "spark.sql.shuffle.partitions=1",
        "spark.driver.memory=1g",
    ];
    let command = [&[python.as_str(), script.to_str().unwrap(), "2026-08-21", &jars], &settings[..]].concat();
    remade_by(&command).await;
}
