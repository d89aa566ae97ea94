//! Landing intents and receipts.
//!
//! An intent is written before the catalog is called and settled from what the catalog then holds
//! (promise 4). Between the two, its requests change through this file only. Written in one transaction
//! each: the intent with its requests; the receipt with requests, train, target head and events.

use std::collections::{BTreeMap, BTreeSet};

use mergeberg_kernel::evidence::Evidence;
use mergeberg_kernel::ids::{Epoch, IntentId, RefName, RequestId, SnapshotId, TableName, TableUuid, TrainId};
use mergeberg_kernel::state::{RequestEvent, RequestState};
use serde::{Deserialize, Serialize};

use super::Ledger;
use super::apply::{Change, Step, steps_of, take};
use super::decode::{Fields, to_json};
use super::error::LedgerError;
use super::evidence::{append_evidence, first_missing, not_among};
use super::heads;
use super::leader::fence;
use super::rows::RequestRow;
use super::trains::{TrainStatus, train_row, write_status};
use crate::database::{Row, Transaction, query};

/// What is about to be landed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Intent {
    pub id: IntentId,
    pub train: TrainId,
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub target: RefName,
    /// `None`: the target is created by this landing.
    pub planned_head: Option<SnapshotId>,
    /// c_n, the snapshot that the target becomes.
    pub tail: SnapshotId,
    /// All candidates in order, the tail last.
    pub candidates: Vec<SnapshotId>,
    pub temp_ref: RefName,
    pub cars: Vec<IntentCar>,
    /// Checks that must have passed, each under exactly this candidate. The tail has at least one.
    pub required: Vec<(SnapshotId, String)>,
    /// It is one table's part of the landing of this set: written and settled with the others.
    pub set: Option<RequestId>,
}

/// One request's part of a landing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IntentCar {
    pub request: RequestId,
    pub candidates: Vec<SnapshotId>,
    /// The source branch, when this landing is to drop it.
    pub drop_source: Option<RefName>,
}

/// Two columns that are one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum LandingState {
    /// The catalog may be called at any moment.
    Open,
    /// It was called and nobody knows what it did. Open as well.
    Unknown,
    Landed {
        at_ms: i64,
    },
    NotLanded {
        at_ms: i64,
    },
}

impl LandingState {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Unknown => "unknown",
            Self::Landed { .. } => "landed",
            Self::NotLanded { .. } => "not-landed",
        }
    }

    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open | Self::Unknown)
    }
}

/// Intent, and receipt once it is settled.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LandingRow {
    pub intent: Intent,
    /// The leader that wrote it.
    pub epoch: Epoch,
    pub opened_at_ms: i64,
    pub state: LandingState,
}

impl LandingRow {
    pub(super) fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("landing", "intent", row);
        let outcome: Option<String> = f.get("outcome")?;
        let settled_at_ms: Option<i64> = f.get("settled_at_ms")?;
        let state = match (outcome.as_deref(), settled_at_ms) {
            (None, None) => LandingState::Open,
            (Some("unknown"), None) => LandingState::Unknown,
            (Some("landed"), Some(at_ms)) => LandingState::Landed { at_ms },
            (Some("not-landed"), Some(at_ms)) => LandingState::NotLanded { at_ms },
            (outcome, at) => {
                return Err(f.wrong(format!("outcome {outcome:?} does not go with settled_at_ms {at:?}")));
            }
        };
        let intent = Intent {
            id: IntentId(f.text("intent")?),
            train: TrainId(f.text("train")?),
            table: f.table_name()?,
            table_uuid: f.table_uuid()?,
            target: f.target()?,
            planned_head: f.opt_snapshot("planned_head")?,
            tail: f.snapshot("tail")?,
            candidates: f.json("candidates")?,
            temp_ref: RefName(f.text("temp_ref")?),
            cars: f.json("cars")?,
            required: f.json("required")?,
            set: f.get::<Option<i64>>("set_id")?.map(RequestId),
        };
        Ok(Self { intent, epoch: Epoch(f.int("epoch")?), opened_at_ms: f.int("opened_at_ms")?, state })
    }

    /// What this landing published of a request.
    pub fn car(&self, request: RequestId) -> Option<&IntentCar> {
        self.intent.cars.iter().find(|car| car.request == request)
    }
}

/// What a worker knows of a train that is staged in the catalog and has passed its checks.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// That its requests were staged and checked.
    pub changes: &'a [Change],
    /// Each with the requests that it speaks for.
    pub evidence: &'a [(Vec<RequestId>, Evidence)],
}

impl Ledger {
    /// Writes the intent and moves its requests to `landing`.
    ///
    /// Refused unless the epoch leads, the train is staged as the intent says, no other intent of this
    /// target is open, and every required check has passed under exactly its candidate, the tail among them
    /// (promises 2 and 4).
    pub async fn write_intent(
        &self,
        epoch: Epoch,
        intent: &Intent,
        now_ms: i64,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        self.write_alone(epoch, None, intent, now_ms).await
    }

    /// As [`Self::write_intent`], with what was found of the train right before and is not in the ledger yet: all of
    /// it, or nothing.
    pub async fn write_found_intent(
        &self,
        epoch: Epoch,
        found: &Found<'_>,
        intent: &Intent,
        now_ms: i64,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        self.write_alone(epoch, Some(found), intent, now_ms).await
    }

    async fn write_alone(
        &self,
        epoch: Epoch,
        found: Option<&Found<'_>>,
        intent: &Intent,
        now_ms: i64,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        alone(intent)?;
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        let rows = write(&mut tx, epoch, intent, found, now_ms).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// Intents that must be settled before anything else of their target, oldest first.
    pub async fn open_intents(&self) -> Result<Vec<LandingRow>, LedgerError> {
        let sql = "SELECT * FROM landing WHERE settled_at_ms IS NULL ORDER BY id";
        let rows = query(sql).fetch_all(&self.readers).await?;
        rows.iter().map(LandingRow::decode).collect()
    }

    pub async fn landing(&self, intent: &IntentId) -> Result<LandingRow, LedgerError> {
        let mut tx = self.reading().await?;
        landing_row(&mut tx, intent).await
    }

    /// The catalog was called and nobody knows what it did. Twice is no error.
    pub async fn mark_unknown(
        &self,
        epoch: Epoch,
        intent: &IntentId,
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        let landing = landing_row(&mut tx, intent).await?;
        alone(&landing.intent)?;
        lose_answer(&mut tx, &landing, now_ms).await?;
        tx.commit().await?;
        Ok(())
    }

    /// The receipt. `landed` names, for every request of the intent, the candidate that published it. What
    /// it says stands in the catalog: when the power cut takes it, the intent is open and is settled again.
    pub async fn settle_landed(
        &self,
        epoch: Epoch,
        intent: &IntentId,
        now_ms: i64,
        landed: &[(RequestId, SnapshotId)],
    ) -> Result<Vec<RequestRow>, LedgerError> {
        let mut tx = self.begin_progress().await?;
        fence(&mut tx, epoch).await?;
        let LandingRow { intent, .. } = open_landing(&mut tx, intent).await?;
        alone(&intent)?;
        let rows = receive(&mut tx, &intent, now_ms, landed).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// It is proven that the landing was not applied and never will be (rule L3): its requests go back to
    /// the queue. `why` is kept with their attempts.
    pub async fn settle_not_landed(
        &self,
        epoch: Epoch,
        intent: &IntentId,
        now_ms: i64,
        why: &str,
    ) -> Result<Vec<RequestRow>, LedgerError> {
        let mut tx = self.begin().await?;
        fence(&mut tx, epoch).await?;
        let LandingRow { intent, .. } = open_landing(&mut tx, intent).await?;
        alone(&intent)?;
        let rows = give_up(&mut tx, &intent, now_ms, why).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// All snapshots that receipts published on a target, in landing order.
    pub async fn landed_candidates(
        &self,
        table_uuid: &TableUuid,
        target: &RefName,
    ) -> Result<Vec<SnapshotId>, LedgerError> {
        let rows = query(
            "SELECT intent, candidates FROM landing
             WHERE table_uuid = $1 AND target = $2 AND outcome = 'landed' ORDER BY id",
        )
        .bind(table_uuid.as_str())
        .bind(target.as_str())
        .fetch_all(&self.readers)
        .await?;
        let mut all = Vec::new();
        for row in &rows {
            all.extend(Fields::new("landing", "intent", row).json::<Vec<SnapshotId>>("candidates")?);
        }
        Ok(all)
    }

    /// The landing that published a request; `None` when it did not land.
    pub async fn receipt_of_request(&self, request: RequestId) -> Result<Option<LandingRow>, LedgerError> {
        let row = query(
            "SELECT landing.* FROM landing JOIN merge_request ON merge_request.train = landing.train
             WHERE merge_request.id = $1 AND merge_request.state = $2 AND landing.outcome = 'landed'",
        )
        .bind(request.0)
        .bind(RequestState::Landed.word())
        .fetch_optional(&self.readers)
        .await?;
        row.as_ref().map(LandingRow::decode).transpose()
    }

    /// Receipts settled at or after the first and before the second time, in landing order.
    pub async fn receipts(&self, from_ms: i64, before_ms: i64) -> Result<Vec<LandingRow>, LedgerError> {
        let rows = query(
            "SELECT * FROM landing
             WHERE outcome = 'landed' AND settled_at_ms >= $1 AND settled_at_ms < $2 ORDER BY id",
        )
        .bind(from_ms)
        .bind(before_ms)
        .fetch_all(&self.readers)
        .await?;
        rows.iter().map(LandingRow::decode).collect()
    }
}

/// An intent that is part of a set is written and settled with the others.
fn alone(intent: &Intent) -> Result<(), LedgerError> {
    match intent.set {
        None => Ok(()),
        Some(set) => Err(LedgerError::MalformedIntent {
            intent: intent.id.clone(),
            what: format!("it is a part of set {set}, whose intents are written and settled together"),
        }),
    }
}

/// Writes one intent and moves its requests, inside the caller's transaction.
pub(super) async fn write(
    conn: &mut Transaction,
    epoch: Epoch,
    intent: &Intent,
    found: Option<&Found<'_>>,
    now_ms: i64,
) -> Result<Vec<RequestRow>, LedgerError> {
    let malformed =
        |what: &str| LedgerError::MalformedIntent { intent: intent.id.clone(), what: what.to_owned() };
    check_shape(intent).map_err(malformed)?;
    let train = train_row(&mut *conn, &intent.train).await?;
    let as_planned = train.table_uuid == intent.table_uuid
        && train.target == intent.target
        && train.planned_head == intent.planned_head
        && train.tail == intent.tail
        && train.temp_ref == intent.temp_ref;
    if !as_planned {
        return Err(malformed("it does not agree with its train"));
    }
    match (train.status, found) {
        (TrainStatus::Staged, _) => {}
        (TrainStatus::Staging, Some(_)) => {
            write_status(&mut *conn, &intent.train, TrainStatus::Staged).await?;
        }
        (TrainStatus::Staging | TrainStatus::Landed | TrainStatus::Dropped, _) => {
            return Err(malformed("its train is not known to be staged (rule L2)"));
        }
    }
    let open =
        query("SELECT id FROM landing WHERE table_uuid = $1 AND target = $2 AND settled_at_ms IS NULL")
            .bind(intent.table_uuid.as_str())
            .bind(intent.target.as_str())
            .fetch_optional(&mut *conn)
            .await?;
    if open.is_some() {
        return Err(LedgerError::IntentOpen {
            table_uuid: intent.table_uuid.clone(),
            target: intent.target.clone(),
        });
    }
    let unproven: Vec<(SnapshotId, String)> = match found {
        Some(found) => {
            append_evidence(&mut *conn, &intent.train, found.evidence, now_ms).await?;
            not_among(&intent.required, found.evidence)
        }
        None => intent.required.clone(),
    };
    if let Some((candidate, check)) = first_missing(&mut *conn, &unproven).await? {
        return Err(LedgerError::EvidenceMissing { candidate, check });
    }
    let mut steps = steps_of(found.map_or(&[], |found| found.changes))?;
    steps.extend(
        intent
            .cars
            .iter()
            .map(|car| Step { by_intent: true, ..Step::new(car.request, RequestEvent::WriteIntent) }),
    );
    let rows = take(&mut *conn, &steps, now_ms).await?;
    for row in &rows {
        if row.train.as_ref() != Some(&intent.train)
            || row.table_uuid != intent.table_uuid
            || row.target != intent.target
        {
            return Err(malformed(&format!("{} does not ride its train", row.describe())));
        }
        if row.set.map(|set| set.id) != intent.set {
            return Err(malformed(&format!("{} lands with its set or not at all", row.describe())));
        }
    }
    insert(&mut *conn, epoch, intent, now_ms).await?;
    Ok(rows)
}

/// The catalog was called and nobody knows what it did. Twice is no error.
pub(super) async fn lose_answer(
    conn: &mut Transaction,
    landing: &LandingRow,
    now_ms: i64,
) -> Result<(), LedgerError> {
    match landing.state {
        LandingState::Open => {}
        LandingState::Unknown => return Ok(()),
        state => return Err(LedgerError::IntentSettled { intent: landing.intent.id.clone(), state }),
    }
    query("UPDATE landing SET outcome = 'unknown' WHERE intent = $1")
        .bind(landing.intent.id.as_str())
        .execute(&mut *conn)
        .await?;
    let steps: Vec<Step<'_>> = landing
        .intent
        .cars
        .iter()
        .map(|car| Step { by_intent: true, ..Step::new(car.request, RequestEvent::LoseAnswer) })
        .collect();
    take(&mut *conn, &steps, now_ms).await?;
    Ok(())
}

/// The receipt of one open intent, inside the caller's transaction.
pub(super) async fn receive(
    conn: &mut Transaction,
    intent: &Intent,
    now_ms: i64,
    landed: &[(RequestId, SnapshotId)],
) -> Result<Vec<RequestRow>, LedgerError> {
    let landed: BTreeMap<RequestId, SnapshotId> = landed.iter().copied().collect();
    let mut steps = Vec::with_capacity(intent.cars.len());
    for car in &intent.cars {
        let snapshot = landed.get(&car.request).copied().filter(|id| intent.candidates.contains(id));
        if snapshot.is_none() {
            return Err(LedgerError::MalformedIntent {
                intent: intent.id.clone(),
                what: format!("its receipt names no candidate for request {}", car.request),
            });
        }
        let step = Step::new(car.request, RequestEvent::Land);
        steps.push(Step { landed: snapshot, by_intent: true, ..step });
    }
    if landed.len() != intent.cars.len() {
        return Err(LedgerError::MalformedIntent {
            intent: intent.id.clone(),
            what: "its receipt names requests that are not in it".to_owned(),
        });
    }
    settle(&mut *conn, &intent.id, "landed", now_ms).await?;
    let rows = take(&mut *conn, &steps, now_ms).await?;
    write_status(&mut *conn, &intent.train, TrainStatus::Landed).await?;
    heads::landed(&mut *conn, intent).await?;
    Ok(rows)
}

/// Settles one open intent that was not applied, inside the caller's transaction.
pub(super) async fn give_up(
    conn: &mut Transaction,
    intent: &Intent,
    now_ms: i64,
    why: &str,
) -> Result<Vec<RequestRow>, LedgerError> {
    let detail = serde_json::json!({ "not-landed": why });
    let steps: Vec<Step<'_>> = intent
        .cars
        .iter()
        .map(|car| {
            let step = Step::new(car.request, RequestEvent::Requeue);
            Step { detail: Some(&detail), by_intent: true, ..step }
        })
        .collect();
    settle(&mut *conn, &intent.id, "not-landed", now_ms).await?;
    let rows = take(&mut *conn, &steps, now_ms).await?;
    Ok(rows)
}

fn check_shape(intent: &Intent) -> Result<(), &'static str> {
    if intent.candidates.last() != Some(&intent.tail) {
        return Err("the tail is not the last candidate");
    }
    if intent.cars.is_empty() {
        return Err("it has no cars");
    }
    let candidates: BTreeSet<SnapshotId> = intent.candidates.iter().copied().collect();
    let mut requests = BTreeSet::new();
    for car in &intent.cars {
        if !requests.insert(car.request) {
            return Err("a request is in two cars");
        }
        if !car.candidates.iter().all(|id| candidates.contains(id)) {
            return Err("a car has a candidate that the train does not have");
        }
    }
    if !intent.required.iter().all(|(candidate, _)| candidates.contains(candidate)) {
        return Err("evidence is required of a snapshot that is no candidate");
    }
    if !intent.required.iter().any(|(candidate, _)| *candidate == intent.tail) {
        return Err("no evidence is required of the snapshot that the target becomes");
    }
    Ok(())
}

async fn insert(
    conn: &mut Transaction,
    epoch: Epoch,
    intent: &Intent,
    now_ms: i64,
) -> Result<(), LedgerError> {
    let Intent {
        id,
        train,
        table,
        table_uuid,
        target,
        planned_head,
        tail,
        candidates,
        temp_ref,
        cars,
        required,
        set,
    } = intent;
    query(
        "INSERT INTO landing (intent, train, table_name, table_uuid, target, planned_head, tail, candidates,
             temp_ref, cars, required, epoch, opened_at_ms, set_id)
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
    )
    .bind(id.as_str())
    .bind(train.as_str())
    .bind(table.to_string())
    .bind(table_uuid.as_str())
    .bind(target.as_str())
    .bind(planned_head.map(|id| id.0))
    .bind(tail.0)
    .bind(to_json(candidates)?)
    .bind(temp_ref.as_str())
    .bind(to_json(cars)?)
    .bind(to_json(required)?)
    .bind(epoch.0)
    .bind(now_ms)
    .bind(set.map(|set| set.0))
    .execute(conn)
    .await?;
    Ok(())
}

async fn landing_row(conn: &mut Transaction, intent: &IntentId) -> Result<LandingRow, LedgerError> {
    let sql = "SELECT * FROM landing WHERE intent = $1";
    match query(sql).bind(intent.as_str()).fetch_optional(conn).await? {
        Some(row) => LandingRow::decode(&row),
        None => Err(LedgerError::NoSuchIntent(intent.clone())),
    }
}

async fn open_landing(conn: &mut Transaction, intent: &IntentId) -> Result<LandingRow, LedgerError> {
    let row = landing_row(conn, intent).await?;
    if row.state.is_open() {
        Ok(row)
    } else {
        Err(LedgerError::IntentSettled { intent: intent.clone(), state: row.state })
    }
}

async fn settle(
    conn: &mut Transaction,
    intent: &IntentId,
    outcome: &str,
    now_ms: i64,
) -> Result<(), LedgerError> {
    query("UPDATE landing SET outcome = $1, settled_at_ms = $2 WHERE intent = $3")
        .bind(outcome)
        .bind(now_ms)
        .bind(intent.as_str())
        .execute(conn)
        .await?;
    Ok(())
}

#[cfg(test)]
#[path = "landing_tests.rs"]
mod tests;
