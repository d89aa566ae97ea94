//! Checks on a small real table: build snapshots, run one check, compare the evidence.

mod builtin;
mod deletes;
mod duplicate_key;
mod reconciliation;
mod rewrite_proof;
mod rows;
mod sql_and_counts;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::ids::{Digest, RequestId, SchemaId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::policy::CheckDefinition;
use mergeberg_kernel::reason::ReasonCode;

use super::{CarView, Engine, TableResolver, TrainView, Validator};
use crate::table::catalog::CatalogError;
use crate::table::loaded::LoadedTable;
use crate::table::test_orders::OrdersLab;

/// Memory of a test's engine, bytes.
const TEST_MEMORY_BYTES: usize = 64 * 1024 * 1024;

/// At most one other table.
#[derive(Default)]
struct Tables(Option<(LoadedTable, SnapshotId)>);

#[async_trait]
impl TableResolver for Tables {
    async fn resolve(&self, table: &TableName) -> Result<(Arc<LoadedTable>, SnapshotFact), CatalogError> {
        match &self.0 {
            Some((found, snapshot)) if found.facts.name == *table => {
                Ok((Arc::new(found.clone()), found.facts.snapshots.get(*snapshot).unwrap().clone()))
            }
            _ => Err(CatalogError::NotFound(table.clone())),
        }
    }
}

fn check(toml: &str) -> CheckDefinition {
    toml::from_str(&format!("id = \"it\"\n{toml}")).unwrap()
}

/// The car of a request whose candidates are these, the first of them on `parent`.
async fn car(
    lab: &OrdersLab,
    request: i64,
    parent: Option<SnapshotId>,
    candidates: &[SnapshotId],
) -> CarView {
    let mut touched = BTreeSet::new();
    let mut only_adds = true;
    for id in candidates {
        let fact = lab.table.facts.snapshots.get(*id).unwrap();
        let change = lab.store.changes(&lab.table, fact).await.unwrap();
        touched.extend(change.partitions().cloned());
        only_adds &= change.only_adds();
    }
    CarView {
        request: RequestId(request),
        candidates: candidates.to_vec(),
        parent,
        only_adds,
        touched: touched.into_iter().collect(),
        written: vec![SchemaId(0)],
    }
}

fn validator() -> Validator {
    Validator::new(Arc::new(Engine::with_bounds(2, TEST_MEMORY_BYTES).unwrap()))
}

async fn run_for(
    lab: &OrdersLab,
    cars: &[CarView],
    toml: &str,
    selected: &[usize],
    files: &Path,
    tables: &Tables,
) -> Vec<Evidence> {
    let base = cars.first().and_then(|car| car.parent);
    let view = TrainView { table: &lab.table, store: &lab.store, base, cars, files, tables };
    validator().check_train(view, &check(toml), &Digest::new("policy"), selected).await
}

/// Runs a check for every car; for a train that is looked at once.
async fn run(lab: &OrdersLab, cars: &[CarView], toml: &str) -> Evidence {
    let all: Vec<usize> = (0..cars.len()).collect();
    let mut evidence = run_for(lab, cars, toml, &all, Path::new("/"), &Tables::default()).await;
    assert_eq!(evidence.len(), 1, "one evidence was expected");
    evidence.remove(0)
}

fn failed(code: ReasonCode) -> CheckResult {
    CheckResult::Failed { code }
}

fn could_not_run(evidence: &Evidence) -> &str {
    match &evidence.result {
        CheckResult::CouldNotRun { error } => error,
        other => panic!("it could run: {other:?}"),
    }
}

fn measured<'a>(evidence: &'a Evidence, name: &str) -> &'a str {
    &evidence.measured.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name} is not measured")).1
}

/// Requests, with base, count of every violation.
fn blamed(evidence: &Evidence) -> Vec<(Vec<i64>, bool, u64)> {
    let requests = |v: &mergeberg_kernel::evidence::Violation| v.requests.iter().map(|r| r.0).collect();
    evidence.violations.iter().map(|v| (requests(v), v.with_base, v.count)).collect()
}
