//! The checks of a train: which check looks at which cars, and what their evidence speaks for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::ids::{RequestId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::policy::CheckDefinition;
use mergeberg_kernel::verdict::TrainEvidence;

use super::context::Worker;
use super::gather::Gathered;
use super::stage::{Candidates, changes_of};
use crate::table::catalog::{Catalog, CatalogError};
use crate::table::loaded::LoadedTable;
use crate::validate::{CarView, TableResolver, TrainView, builtin};

/// Tables of the same catalog, at the head of their `main`.
pub(super) struct Heads<'a>(pub &'a dyn Catalog);

#[async_trait]
impl TableResolver for Heads<'_> {
    async fn resolve(&self, table: &TableName) -> Result<(Arc<LoadedTable>, SnapshotFact), CatalogError> {
        let loaded = self.0.load(table).await?;
        let head = loaded
            .facts
            .head(&mergeberg_kernel::ids::RefName::main())
            .and_then(|id| loaded.facts.snapshots.get(id).cloned());
        match head {
            Some(head) => Ok((loaded, head)),
            None => Err(CatalogError::Unsupported {
                table: table.clone(),
                message: "it has no snapshot on main yet".to_owned(),
            }),
        }
    }
}

/// As [`Heads`], but for the tables of a set, which are read as the set would leave them.
pub(super) struct WithSet<'a> {
    pub heads: Heads<'a>,
    pub candidates: BTreeMap<TableName, (Arc<LoadedTable>, SnapshotFact)>,
}

#[async_trait]
impl TableResolver for WithSet<'_> {
    async fn resolve(&self, table: &TableName) -> Result<(Arc<LoadedTable>, SnapshotFact), CatalogError> {
        match self.candidates.get(table) {
            Some((table, candidate)) => Ok((Arc::clone(table), candidate.clone())),
            None => self.heads.resolve(table).await,
        }
    }
}

/// What is asked of the checks: every car of a train, and the checks that its class declares.
pub(super) struct Asked {
    cars: Vec<CarView>,
    checks: Vec<BTreeSet<String>>,
}

impl Asked {
    pub fn of(candidates: &Candidates) -> Self {
        let cars = candidates.cars.iter().map(|car| CarView {
            request: car.car.request,
            candidates: car.candidates.clone(),
            parent: car.parent,
            only_adds: car.only_adds,
            touched: car.touched.iter().cloned().collect(),
            written: changes_of(&car.car.classification.units).filter_map(|c| c.schema_id).collect(),
        });
        let checks = candidates.cars.iter().map(|car| car.car.class.checks.iter().cloned().collect());
        Self { cars: cars.collect(), checks: checks.collect() }
    }
}

impl Worker {
    /// Runs lineage, schema and every declared check; one entry for each evidence, with its requests. The
    /// candidates have to be in `table`; `tables` are the others that checks read. Reads only, so it may be dropped
    /// at any point.
    pub(super) async fn gather_evidence(
        &self,
        gathered: &Gathered,
        table: &LoadedTable,
        asked: &Asked,
        tables: &dyn TableResolver,
    ) -> Vec<TrainEvidence> {
        let cars = &asked.cars;
        let policy = &gathered.policy_digest;
        let mut all = Vec::new();

        for (at, car) in cars.iter().enumerate() {
            if let Some(evidence) = builtin::lineage(&table.facts, gathered.head, cars, at, policy) {
                all.push(TrainEvidence { requests: vec![car.request], evidence });
            }
            if let Some(evidence) = builtin::schema(&table.facts, car, policy) {
                all.push(TrainEvidence { requests: vec![car.request], evidence });
            }
        }

        let view = TrainView {
            table,
            store: &self.store,
            base: gathered.head,
            cars,
            files: self.policies.path(),
            tables,
        };
        for check in &gathered.policy.checks {
            let asks = |checks: &BTreeSet<String>| checks.contains(&check.id);
            let selected: Vec<usize> =
                (0..).zip(&asked.checks).filter(|(_, c)| asks(c)).map(|(at, _)| at).collect();
            if !selected.is_empty() {
                all.extend(self.run_check(gathered, view, check, &selected).await);
            }
        }
        all
    }

    /// A scan that serves several cars and could not run is repeated for each alone, so that one car's
    /// partition does not hold up the others.
    async fn run_check(
        &self,
        gathered: &Gathered,
        view: TrainView<'_>,
        check: &CheckDefinition,
        selected: &[usize],
    ) -> Vec<TrainEvidence> {
        let policy = &gathered.policy_digest;
        let evidence = self.validator.check_train(view, check, policy, selected).await;
        let shared = selected.len() > 1 && evidence.len() == 1;
        let could_not_run = evidence.iter().any(|e| matches!(e.result, CheckResult::CouldNotRun { .. }));
        if !(shared && could_not_run) {
            let requests: Vec<RequestId> =
                selected.iter().filter_map(|at| view.cars.get(*at)).map(|c| c.request).collect();
            return evidence
                .into_iter()
                .map(|e| {
                    if shared {
                        TrainEvidence { requests: requests.clone(), evidence: e }
                    } else {
                        speaks_for(view.cars, &requests, e)
                    }
                })
                .collect();
        }
        let mut all = Vec::new();
        for at in selected {
            let Some(car) = view.cars.get(*at) else { continue };
            for evidence in self.validator.check_train(view, check, policy, &[*at]).await {
                all.push(TrainEvidence { requests: vec![car.request], evidence });
            }
        }
        all
    }
}

/// Evidence on a car's own tail speaks for that car; on any other snapshot for all `asked`.
fn speaks_for(cars: &[CarView], asked: &[RequestId], evidence: Evidence) -> TrainEvidence {
    let own = cars.iter().find(|car| car.head() == Some(evidence.candidate) && asked.contains(&car.request));
    let requests = match own {
        Some(car) => vec![car.request],
        None => asked.to_vec(),
    };
    TrainEvidence { requests, evidence }
}
