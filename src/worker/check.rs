//! The checks of a train: which check looks at which cars, and what their evidence speaks for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::ids::{Digest, RequestId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::policy::CheckDefinition;
use mergeberg_kernel::verdict::TrainEvidence;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

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

    /// Positions of the cars whose class has this check.
    fn who_ask_for(&self, check: &CheckDefinition) -> Vec<usize> {
        let asks = |checks: &BTreeSet<String>| checks.contains(&check.id);
        (0..).zip(&self.checks).filter(|(_, checks)| asks(checks)).map(|(at, _)| at).collect()
    }

    /// The evidence for this check among `passed`; `None` unless it speaks for everybody who asks, of a candidate of
    /// this train.
    fn answered(
        &self,
        check: &CheckDefinition,
        selected: &[usize],
        passed: &[TrainEvidence],
    ) -> Option<Vec<TrainEvidence>> {
        let of_check =
            |e: &&TrainEvidence| e.evidence.check == check.id && e.evidence.definition == check.digest();
        let known: Vec<TrainEvidence> = passed.iter().filter(of_check).cloned().collect();
        let heads: BTreeSet<SnapshotId> = self.cars.iter().filter_map(CarView::head).collect();
        let spoken_for: BTreeSet<RequestId> = known.iter().flat_map(|e| e.requests.iter().copied()).collect();
        let asking = selected.iter().filter_map(|at| self.cars.get(*at)).map(|car| car.request);
        let of_train = known.iter().all(|e| heads.contains(&e.evidence.candidate));
        (of_train && asking.collect::<BTreeSet<_>>() == spoken_for).then_some(known)
    }
}

/// Checks of candidates whose train is not due yet.
pub(super) struct CheckingAhead(JoinHandle<Vec<TrainEvidence>>);

impl CheckingAhead {
    /// The passes, if all passed under this policy. A failure is looked for again when the train is due, and told
    /// then.
    pub async fn passes(self, policy: &Digest) -> Vec<TrainEvidence> {
        let found = self.0.await.unwrap_or_default();
        let is_pass = |e: &TrainEvidence| {
            e.evidence.result == CheckResult::Passed
                && &e.evidence.policy == policy
                && e.evidence.inputs.is_empty()
        };
        if found.iter().all(is_pass) { found } else { Vec::new() }
    }
}

impl Worker {
    /// Begins the checks that read nothing but the candidates and what they stand on: both are fixed by now, whenever
    /// their train will be due.
    pub(super) fn check_ahead(&self, gathered: &Arc<Gathered>, candidates: &Candidates) -> CheckingAhead {
        let (worker, gathered, runtime) = (self.clone(), Arc::clone(gathered), Handle::current());
        let asked = Asked::of(candidates);
        let table = gathered.table.with_candidates(&candidates.snapshots);
        CheckingAhead(tokio::task::spawn_blocking(move || {
            let heads = Heads(&*worker.catalog);
            let view = worker.view_of(&gathered, &table, &asked, &heads);
            let mut found = Vec::new();
            for check in gathered.policy.checks.iter().filter(|check| check.kind.reads_own_table_only()) {
                let selected = asked.who_ask_for(check);
                if !selected.is_empty() {
                    found.extend(runtime.block_on(worker.run_check(&gathered, view, check, &selected)));
                }
            }
            found
        }))
    }

    fn view_of<'a>(
        &'a self,
        gathered: &Gathered,
        table: &'a LoadedTable,
        asked: &'a Asked,
        tables: &'a dyn TableResolver,
    ) -> TrainView<'a> {
        let (base, files) = (gathered.head, self.policies.path());
        TrainView { table, store: &self.store, base, cars: &asked.cars, files, tables }
    }

    /// Runs lineage, schema and every declared check; one entry for each evidence, with its requests. The
    /// candidates have to be in `table`; `tables` are the others that checks read. What `passed` already is not run
    /// again. Reads only, so it may be dropped at any point.
    pub(super) async fn gather_evidence(
        &self,
        gathered: &Gathered,
        table: &LoadedTable,
        asked: &Asked,
        tables: &dyn TableResolver,
        passed: &[TrainEvidence],
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

        let view = self.view_of(gathered, table, asked, tables);
        for check in &gathered.policy.checks {
            let selected = asked.who_ask_for(check);
            if selected.is_empty() {
                continue;
            }
            match asked.answered(check, &selected, passed) {
                Some(known) => all.extend(known),
                None => all.extend(self.run_check(gathered, view, check, &selected).await),
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
