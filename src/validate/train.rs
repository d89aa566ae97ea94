//! One check on the cars of a train: which snapshot it looks at, for whom, and the evidence.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::facts::TableFacts;
use mergeberg_kernel::ids::{Digest, RequestId, SchemaId, SnapshotId, TableName};
use mergeberg_kernel::lineage::SnapshotFact;
use mergeberg_kernel::partition::Partition;
use mergeberg_kernel::policy::{CheckDefinition, CheckKind, Scope};

use super::finding::Finding;
use super::reconciliation::UpstreamSource;
use super::reuse::Reuse;
use super::session::{CHECK_TIME_BOUND, ENGINE, Engine};
use super::subject::{Relation, Subject};
use super::{CheckError, duplicate_key, not_null, reconciliation, row_count, rows, sql};
use crate::table::catalog::CatalogError;
use crate::table::loaded::LoadedTable;
use crate::table::manifests::ManifestStore;
use crate::table::scan::ScanCounters;

/// A train whose candidates are staged.
#[derive(Clone, Copy)]
pub struct TrainView<'a> {
    /// Loaded after staging: its snapshots include every candidate.
    pub table: &'a LoadedTable,
    pub store: &'a ManifestStore,
    /// The head that was planned on; `None`: the target has no snapshot yet.
    pub base: Option<SnapshotId>,
    /// Every car of the train, in train order.
    pub cars: &'a [CarView],
    /// Folder that upstream files of checks are relative to.
    pub files: &'a Path,
    /// Finds the tables that checks refer to.
    pub tables: &'a dyn TableResolver,
}

/// One request's part of the train.
#[derive(Clone, Debug)]
pub struct CarView {
    pub request: RequestId,
    /// Its candidates, oldest first. Never empty.
    pub candidates: Vec<SnapshotId>,
    /// Parent of its first candidate: the head of the car ahead, or the base.
    pub parent: Option<SnapshotId>,
    /// Every one of its snapshots only adds data files.
    pub only_adds: bool,
    /// Partitions in which it added or removed a data or delete file.
    pub touched: Vec<Arc<Partition>>,
    /// Schemas that its files were written under.
    pub written: Vec<SchemaId>,
}

/// Tables that a check refers to, at the head that it is pinned to from then on (rule E7).
#[async_trait]
pub trait TableResolver: Send + Sync {
    async fn resolve(&self, table: &TableName) -> Result<(Arc<LoadedTable>, SnapshotFact), CatalogError>;
}

/// Runs checks. One for the process.
#[derive(Clone, Debug)]
pub struct Validator {
    engine: Arc<Engine>,
    reuse: Arc<Reuse>,
}

impl Validator {
    pub fn new(engine: Arc<Engine>) -> Self {
        Self { engine, reuse: Arc::default() }
    }

    /// Runs `check` for the cars at the positions `cars` of the view.
    ///
    /// One evidence a candidate that was looked at: a monotone check of a train that only adds gives one,
    /// under the id that the target becomes, whichever cars ask for it; any other check gives one a car,
    /// under the car's own head.
    pub async fn check_train(
        &self,
        view: TrainView<'_>,
        check: &CheckDefinition,
        policy: &Digest,
        cars: &[usize],
    ) -> Vec<Evidence> {
        let Some(last) = view.cars.iter().rev().find_map(CarView::head) else { return Vec::new() };
        let mut evidence = Vec::new();
        if check.kind.is_monotone() && view.cars.iter().all(|car| car.only_adds) {
            if cars.iter().any(|at| *at < view.cars.len()) {
                let relation = Relation::Appends { cars };
                evidence.push(self.check_one(view, check, policy, last, relation).await);
            }
            return evidence;
        }
        for car in cars.iter().filter_map(|at| view.cars.get(*at)) {
            if let Some(head) = car.head() {
                evidence.push(self.check_one(view, check, policy, head, Relation::Change { car }).await);
            }
        }
        evidence
    }

    async fn check_one(
        &self,
        view: TrainView<'_>,
        check: &CheckDefinition,
        policy: &Digest,
        candidate: SnapshotId,
        relation: Relation<'_>,
    ) -> Evidence {
        // A measurement that is shown; nothing is decided by it.
        let begin = Instant::now();
        let counters = Arc::new(ScanCounters::default());
        let work = async {
            match self.find(&self.engine, view, check, candidate, relation, &counters).await {
                // A join's smaller side does not fit: once more, by joins that can go to disk.
                Err(error) if error.is_exhausted() => {
                    self.find(&self.engine.sparing(), view, check, candidate, relation, &counters).await
                }
                found => found,
            }
        };
        // Covers manifests and other tables; the scan itself has the same bound on the engine's side.
        let found = match tokio::time::timeout(CHECK_TIME_BOUND, work).await {
            Ok(found) => found,
            Err(_) => Err(CheckError::TooSlow(CHECK_TIME_BOUND)),
        };
        let finding = found.unwrap_or_else(|error| Finding {
            result: CheckResult::CouldNotRun { error: error.to_string() },
            scope: scope_text(&check.kind, relation.touched(view.cars).len()),
            measured: Vec::new(),
            sample: Vec::new(),
            inputs: Vec::new(),
            violations: Vec::new(),
        });
        let Finding { result, scope, mut measured, sample, inputs, violations } = finding;
        let base = match relation {
            Relation::Appends { .. } => view.base,
            Relation::Change { car } => car.parent,
        };
        measured.push(("base".to_owned(), base.map_or("none".to_owned(), |id| format!("snapshot {id}"))));
        if counters.delete_files() > 0 {
            measured.push(("delete files".to_owned(), counters.delete_files().to_string()));
        }
        // Which schema the rows were read with is part of what was found (case O18).
        measured.push(("schema".to_owned(), view.table.facts.current_schema_id.to_string()));
        Evidence {
            candidate,
            check: check.id.clone(),
            definition: check.digest(),
            policy: policy.clone(),
            result,
            scope,
            measured,
            sample,
            inputs,
            violations,
            rows_scanned: counters.rows(),
            bytes_scanned: counters.bytes(),
            duration_ms: u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX),
            engine: ENGINE.to_owned(),
        }
    }

    /// The finding that is known by its key, or the one of `work`, which is then not begun (rule E6).
    async fn once(
        &self,
        key: Option<Digest>,
        candidate: SnapshotId,
        work: impl Future<Output = Result<Finding, CheckError>>,
    ) -> Result<Finding, CheckError> {
        let Some(key) = key else { return work.await };
        if let Some(known) = self.reuse.get(&key) {
            return Ok(known);
        }
        let finding = work.await?;
        self.reuse.keep(key, candidate, &finding);
        Ok(finding)
    }

    async fn find(
        &self,
        engine: &Arc<Engine>,
        view: TrainView<'_>,
        check: &CheckDefinition,
        candidate: SnapshotId,
        relation: Relation<'_>,
        counters: &Arc<ScanCounters>,
    ) -> Result<Finding, CheckError> {
        let compare = check.compare;
        match check.kind.clone() {
            CheckKind::DuplicateKey { columns, nulls, scope } => {
                let subject =
                    Subject::gather_bounded(view, candidate, relation, scope, &columns, counters).await?;
                let key = Reuse::key(view, check, &subject);
                let work = duplicate_key::run(Arc::clone(engine), subject, columns, nulls, compare);
                self.once(key, candidate, engine.run(CHECK_TIME_BOUND, work)).await
            }
            CheckKind::NotNull { columns, scope } => {
                let subject = Subject::gather(view, candidate, relation, scope, counters).await?;
                let key = Reuse::key(view, check, &subject);
                let work = not_null::run(Arc::clone(engine), subject, columns, compare);
                self.once(key, candidate, engine.run(CHECK_TIME_BOUND, work)).await
            }
            CheckKind::AcceptedValues { column, values, scope } => {
                let subject = Subject::gather(view, candidate, relation, scope, counters).await?;
                let key = Reuse::key(view, check, &subject);
                let work = rows::accepted_values(Arc::clone(engine), subject, column, values, compare);
                self.once(key, candidate, engine.run(CHECK_TIME_BOUND, work)).await
            }
            CheckKind::Referential { columns, references, scope } => {
                let subject = Subject::gather(view, candidate, relation, scope, counters).await?;
                let pinned = view.pin(&references.table, counters).await?;
                let inputs = vec![pinned.input()];
                let work = rows::referential(
                    Arc::clone(engine),
                    subject,
                    columns,
                    pinned,
                    references.columns,
                    compare,
                );
                Ok(engine.run(CHECK_TIME_BOUND, work).await?.with_inputs(inputs))
            }
            CheckKind::RowCount { min, max, min_growth, max_growth, min_added, max_added } => {
                let bounds = row_count::Bounds { min, max, min_growth, max_growth, min_added, max_added };
                let subject =
                    Subject::gather(view, candidate, relation, Scope::TouchedPartitions, counters).await?;
                let work = row_count::run(subject, bounds, engine.parallelism());
                engine.run(CHECK_TIME_BOUND, work).await
            }
            CheckKind::Reconciliation { mode, upstream, by, count, sums, absolute, relative } => {
                let subject =
                    Subject::gather(view, candidate, relation, Scope::TouchedPartitions, counters).await?;
                let source = UpstreamSource::find(view, &upstream, counters).await?;
                let inputs = source.input().into_iter().collect();
                let terms = reconciliation::Terms { mode, by, count, sums, absolute, relative, compare };
                let work = reconciliation::run(Arc::clone(engine), subject, source, terms);
                Ok(engine.run(CHECK_TIME_BOUND, work).await?.with_inputs(inputs))
            }
            CheckKind::Sql { query, tables, fence: _ } => {
                let named = sql::Named { query: &query, tables: &tables };
                let relations = sql::Relations::gather(view, candidate, relation, named, counters).await?;
                let work = sql::run(Arc::clone(engine), relations, query);
                engine.run(CHECK_TIME_BOUND, work).await
            }
        }
    }
}

impl CarView {
    /// The snapshot that the target would become if the train ended here.
    pub fn head(&self) -> Option<SnapshotId> {
        self.candidates.last().copied()
    }
}

impl TrainView<'_> {
    pub(super) fn facts(&self) -> &TableFacts {
        &self.table.facts
    }
}

/// What a check of this kind looks at, for people.
pub(super) fn scope_text(kind: &CheckKind, touched: usize) -> String {
    let table = match kind {
        CheckKind::DuplicateKey { scope, .. }
        | CheckKind::NotNull { scope, .. }
        | CheckKind::Referential { scope, .. }
        | CheckKind::AcceptedValues { scope, .. } => *scope == Scope::Table,
        CheckKind::Sql { .. } => true,
        CheckKind::RowCount { .. } | CheckKind::Reconciliation { .. } => false,
    };
    if table { "table".to_owned() } else { partitions_text(touched) }
}

/// `1 partition`, `2 partitions`.
pub(super) fn partitions_text(count: usize) -> String {
    if count == 1 { "1 partition".to_owned() } else { format!("{count} partitions") }
}
