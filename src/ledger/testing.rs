//! Shared by the ledger's tests: a fresh ledger each, on both databases, and rows to fill in.

use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::ids::{
    Digest, Principal, RefName, RequestId, SchemaId, SnapshotId, SortOrderId, SpecId, TableUuid, TrainId,
};
use mergeberg_kernel::state::RequestEvent;
use mergeberg_kernel::structure::StructureId;
use tempfile::TempDir;

use super::{Change, Enqueued, Intent, IntentCar, Ledger, LedgerPlace, NewRequest, TrainRow, TrainStatus};
use crate::database::testing::TestServer;
use mergeberg_kernel::ids::{Epoch, IntentId};

/// Where the ledgers of one test are made.
pub enum Home {
    Files(TempDir),
    Server(TestServer),
}

impl Home {
    pub fn sqlite() -> Self {
        Self::Files(tempfile::tempdir().unwrap())
    }

    pub fn postgres() -> Option<Self> {
        TestServer::find().map(Self::Server)
    }

    /// Nothing is there yet.
    pub async fn place(&self) -> LedgerPlace {
        match self {
            Self::Files(folder) => {
                LedgerPlace::File(folder.path().join(format!("{}.db", uuid::Uuid::new_v4().simple())))
            }
            Self::Server(server) => server.database().await.into(),
        }
    }

    /// A new ledger.
    pub async fn ledger(&self) -> Ledger {
        Ledger::open_or_create(self.place().await).await.unwrap()
    }

    pub async fn end(self) {
        if let Self::Server(server) = self {
            server.end().await;
        }
    }
}

/// Each story on each database.
macro_rules! on_each_database {
    ($($story:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                super::$story(&crate::ledger::testing::Home::sqlite()).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $story() {
                if let Some(home) = crate::ledger::testing::Home::postgres() {
                    super::$story(&home).await;
                    home.end().await;
                }
            })*
        }
    };
}
pub(super) use on_each_database;

/// Somebody leads after whoever led has lost it: its lease is over at `now_ms`, or its session is gone.
pub async fn succeed(ledger: &Ledger, holder: &str, lease_ms: i64, now_ms: i64) -> Epoch {
    ledger.session.close().await;
    loop {
        if let Some(epoch) = ledger.lead(holder, lease_ms, now_ms).await.unwrap() {
            return epoch;
        }
        // The server takes a moment to notice that a session has ended.
        assert!(matches!(ledger.place(), LedgerPlace::Postgres(_)), "the lease is not over");
        tokio::task::yield_now().await;
    }
}

pub fn new_request(source: &str, pinned: i64) -> NewRequest {
    NewRequest {
        table: "nyc.flights".parse().unwrap(),
        table_uuid: TableUuid::new("uuid-of-flights"),
        source: RefName::new(source),
        pinned: SnapshotId(pinned),
        target: RefName::main(),
        class: "ingest".to_owned(),
        principal: Principal::new("loader"),
        idempotency_key: None,
        structure: StructureId { schema_id: SchemaId(0), spec_id: SpecId(0), sort_order_id: SortOrderId(0) },
        format_version: 2,
    }
}

pub async fn enqueue(ledger: &Ledger, source: &str, pinned: i64) -> RequestId {
    match ledger.enqueue(&new_request(source, pinned), 1).await.unwrap() {
        Enqueued::New(row) => row.id,
        other => panic!("{other:?}"),
    }
}

pub fn train(id: &str, candidates: &[i64]) -> TrainRow {
    TrainRow {
        train: TrainId::new(id),
        table_uuid: TableUuid::new("uuid-of-flights"),
        target: RefName::main(),
        temp_ref: RefName(format!("mergeberg/tmp/q/{id}")),
        planned_head: Some(SnapshotId(10)),
        tail: SnapshotId(*candidates.last().unwrap()),
        candidates: candidates.iter().copied().map(SnapshotId).collect(),
        written: None,
        status: TrainStatus::Staging,
        at_ms: 2,
    }
}

pub fn evidence(candidate: i64, check: &str) -> Evidence {
    Evidence {
        candidate: SnapshotId(candidate),
        check: check.to_owned(),
        definition: Digest::of([check]),
        policy: Digest::of(["policy"]),
        result: CheckResult::Passed,
        scope: "2 partitions".to_owned(),
        measured: Vec::new(),
        sample: Vec::new(),
        inputs: Vec::new(),
        violations: Vec::new(),
        rows_scanned: 0,
        bytes_scanned: 0,
        duration_ms: 0,
        engine: "datafusion 53.1.0".to_owned(),
    }
}

/// A staged train, one candidate a request, checked but without evidence, and the intent to land it.
pub async fn staged_train(ledger: &Ledger, epoch: Epoch, id: &str, requests: &[(RequestId, i64)]) -> Intent {
    let candidates: Vec<i64> = requests.iter().map(|(_, candidate)| *candidate).collect();
    let row = train(id, &candidates);
    ledger.record_train(epoch, &row, &[]).await.unwrap();
    let mut changes = Vec::new();
    for (request, _) in requests {
        let admit = Change::new(*request, RequestEvent::Admit);
        changes.push(Change { train: Some(row.train.clone()), ..admit });
        changes.push(Change::new(*request, RequestEvent::Stage));
        changes.push(Change::new(*request, RequestEvent::Check));
    }
    ledger.apply(Some(epoch), &changes, 3).await.unwrap();
    ledger.set_train_status(epoch, &row.train, TrainStatus::Staged).await.unwrap();
    let cars = requests.iter().map(|(request, candidate)| IntentCar {
        request: *request,
        candidates: vec![SnapshotId(*candidate)],
        drop_source: None,
    });
    Intent {
        id: IntentId(format!("intent-{id}")),
        train: row.train,
        table: "nyc.flights".parse().unwrap(),
        table_uuid: row.table_uuid,
        target: row.target,
        planned_head: row.planned_head,
        tail: row.tail,
        candidates: row.candidates,
        temp_ref: row.temp_ref,
        cars: cars.collect(),
        required: vec![(row.tail, "lineage".to_owned())],
        set: None,
    }
}

pub async fn pass(ledger: &Ledger, intent: &Intent) {
    let requests: Vec<RequestId> = intent.cars.iter().map(|car| car.request).collect();
    let rows: Vec<(Vec<RequestId>, Evidence)> = intent
        .required
        .iter()
        .map(|(candidate, check)| (requests.clone(), evidence(candidate.0, check)))
        .collect();
    ledger.record_evidence(&intent.train, &rows, 4).await.unwrap();
}
