//! The live row of a request and its log, as read.

use mergeberg_kernel::ids::{
    Principal, RefName, RequestId, SchemaId, SnapshotId, SortOrderId, SpecId, TableName, TableUuid, TrainId,
};
use mergeberg_kernel::state::RequestState;
use mergeberg_kernel::structure::StructureId;
use serde::Serialize;

use super::decode::Fields;
use super::error::LedgerError;
use super::reverts::Reverts;
use super::sets::InSet;
use crate::database::Row;

/// A merge request as it is now.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestRow {
    pub id: RequestId,
    pub table: TableName,
    pub table_uuid: TableUuid,
    pub source: RefName,
    /// The head that is published, or nothing is (promise 3).
    pub pinned: SnapshotId,
    pub target: RefName,
    pub class: String,
    pub principal: Principal,
    pub idempotency_key: Option<String>,
    /// The table's structure when it was enqueued (rule C1).
    pub structure: StructureId,
    pub format_version: u8,
    /// The landed request that this one takes back.
    pub reverts: Option<Reverts>,
    /// The set that this is one table's part of.
    pub set: Option<InSet>,
    pub state: RequestState,
    pub classification: Option<String>,
    pub enqueued_at_ms: i64,
    /// The last admission: when it ended, the one that ended it.
    pub admitted_at_ms: Option<i64>,
    /// Set exactly when the state is final.
    pub ended_at_ms: Option<i64>,
    /// How often it was admitted.
    pub attempts: u32,
    /// The train that it rides or ended in; none while it waits.
    pub train: Option<TrainId>,
    /// Set exactly when it landed.
    pub landed_snapshot: Option<SnapshotId>,
    /// What belongs to the present state: witnesses, who is ahead, an error.
    pub detail: Option<serde_json::Value>,
}

/// One state that a request entered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AttemptRow {
    pub id: i64,
    pub request: RequestId,
    pub train: Option<TrainId>,
    pub at_ms: i64,
    pub state: RequestState,
    pub detail: Option<serde_json::Value>,
}

impl RequestRow {
    pub(super) fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("merge_request", "id", row);
        let row = Self {
            id: RequestId(f.int("id")?),
            table: f.table_name()?,
            table_uuid: f.table_uuid()?,
            source: RefName(f.text("source")?),
            pinned: f.snapshot("pinned")?,
            target: f.target()?,
            class: f.text("class")?,
            principal: Principal(f.text("principal")?),
            idempotency_key: f.get("idempotency_key")?,
            structure: structure(&f)?,
            format_version: f.narrow("format_version")?,
            reverts: reverts(&f)?,
            set: InSet::decode(&f)?,
            state: state(&f)?,
            classification: f.get("classification")?,
            enqueued_at_ms: f.int("enqueued_at_ms")?,
            admitted_at_ms: f.get("admitted_at_ms")?,
            ended_at_ms: f.get("ended_at_ms")?,
            attempts: f.narrow("attempts")?,
            train: f.get::<Option<String>>("train")?.map(TrainId),
            landed_snapshot: f.opt_snapshot("landed_snapshot")?,
            detail: f.opt_json("detail")?,
        };
        if row.state.is_final() != row.ended_at_ms.is_some() {
            return Err(
                f.wrong(format!("state {} does not go with ended_at_ms {:?}", row.state, row.ended_at_ms))
            );
        }
        if (row.state == RequestState::Landed) != row.landed_snapshot.is_some() {
            let landed = row.landed_snapshot;
            return Err(f.wrong(format!("state {} does not go with landed_snapshot {landed:?}", row.state)));
        }
        Ok(row)
    }

    /// `ingest/a -> main of nyc.flights`, for messages.
    pub(super) fn describe(&self) -> String {
        format!("request {} ({} -> {} of {})", self.id, self.source, self.target, self.table)
    }
}

impl AttemptRow {
    pub(super) fn decode(row: &Row) -> Result<Self, LedgerError> {
        let f = Fields::new("merge_attempt", "id", row);
        Ok(Self {
            id: f.int("id")?,
            request: RequestId(f.int("request")?),
            train: f.get::<Option<String>>("train")?.map(TrainId),
            at_ms: f.int("at_ms")?,
            state: state(&f)?,
            detail: f.opt_json("detail")?,
        })
    }
}

pub(super) fn structure(f: &Fields<'_>) -> Result<StructureId, LedgerError> {
    Ok(StructureId {
        schema_id: SchemaId(f.narrow("schema_id")?),
        spec_id: SpecId(f.narrow("spec_id")?),
        sort_order_id: SortOrderId(f.int("sort_order_id")?),
    })
}

/// Two columns that are one fact.
fn reverts(f: &Fields<'_>) -> Result<Option<Reverts>, LedgerError> {
    let request = f.get::<Option<i64>>("reverts")?.map(RequestId);
    let reason: Option<String> = f.get("reverts_reason")?;
    match (request, reason) {
        (Some(request), reason) => Ok(Some(Reverts { request, reason })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(f.wrong("reverts_reason without a request that is reverted")),
    }
}

/// Word and reason are one state.
fn state(f: &Fields<'_>) -> Result<RequestState, LedgerError> {
    let word = f.text("state")?;
    let reason = f.opt_reason("reason")?;
    RequestState::from_parts(&word, reason)
        .ok_or_else(|| f.wrong(format!("state '{word}' does not go with reason {reason:?}")))
}
