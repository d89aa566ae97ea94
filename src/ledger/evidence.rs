//! Evidence, keyed by the candidate's snapshot id, and the guard that the landing intent asks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mergeberg_kernel::evidence::{CheckResult, Evidence};
use mergeberg_kernel::ids::{Digest, RequestId, SnapshotId, TrainId};
use serde::Serialize;

use super::Ledger;
use super::apply::BATCH_ROWS;
use super::decode::{Fields, count, to_json};
use super::error::LedgerError;
use crate::database::{QueryBuilder, Row, Transaction, query};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvidenceRow {
    pub id: i64,
    pub train: TrainId,
    /// The requests that it speaks for, in train order.
    pub requests: Vec<RequestId>,
    pub evidence: Evidence,
    pub at_ms: i64,
}

impl EvidenceRow {
    fn decode(row: &Row, requests: Vec<RequestId>) -> Result<Self, LedgerError> {
        let f = Fields::new("evidence", "id", row);
        let evidence = Evidence {
            candidate: f.snapshot("candidate")?,
            check: f.text("check_id")?,
            definition: Digest(f.text("definition")?),
            policy: Digest(f.text("policy")?),
            result: result(&f)?,
            scope: f.text("scope")?,
            measured: f.json("measured")?,
            sample: f.json("sample")?,
            inputs: f.opt_json("inputs")?.unwrap_or_default(),
            violations: f.json("violations")?,
            rows_scanned: f.narrow("rows_scanned")?,
            bytes_scanned: f.narrow("bytes_scanned")?,
            duration_ms: f.narrow("duration_ms")?,
            engine: f.text("engine")?,
        };
        Ok(Self {
            id: f.int("id")?,
            train: TrainId(f.text("train")?),
            requests,
            evidence,
            at_ms: f.int("at_ms")?,
        })
    }
}

/// Word, code and error are one result.
fn result(f: &Fields<'_>) -> Result<CheckResult, LedgerError> {
    let word = f.text("result")?;
    let code = f.opt_reason("code")?;
    let error: Option<String> = f.get("error")?;
    match (word.as_str(), code, error) {
        ("passed", None, None) => Ok(CheckResult::Passed),
        ("failed", Some(code), None) => Ok(CheckResult::Failed { code }),
        ("could-not-run", None, Some(error)) => Ok(CheckResult::CouldNotRun { error }),
        (word, code, error) => {
            Err(f.wrong(format!("result '{word}' does not go with code {code:?} and error {error:?}")))
        }
    }
}

impl Ledger {
    /// Appends evidence of a train; each row with the requests that it speaks for. It is on disk with the
    /// intent or the refusal that rests on it.
    pub async fn record_evidence(
        &self,
        train: &TrainId,
        evidence: &[(Vec<RequestId>, Evidence)],
        now_ms: i64,
    ) -> Result<(), LedgerError> {
        let mut tx = self.begin_progress().await?;
        append_evidence(&mut tx, train, evidence, now_ms).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Evidence of one candidate snapshot, oldest first.
    pub async fn evidence_of_candidate(
        &self,
        candidate: SnapshotId,
    ) -> Result<Vec<EvidenceRow>, LedgerError> {
        let mut tx = self.reading().await?;
        let rows = query("SELECT * FROM evidence WHERE candidate = $1 ORDER BY id")
            .bind(candidate.0)
            .fetch_all(&mut tx)
            .await?;
        let links = query(
            "SELECT evidence, request FROM evidence_request
             WHERE evidence IN (SELECT id FROM evidence WHERE candidate = $1)
             ORDER BY evidence, position",
        )
        .bind(candidate.0)
        .fetch_all(&mut tx)
        .await?;
        with_requests(&rows, &links)
    }

    /// Evidence that speaks for a request, of all its attempts, oldest first.
    pub async fn evidence_of_request(&self, request: RequestId) -> Result<Vec<EvidenceRow>, LedgerError> {
        let mut tx = self.reading().await?;
        let rows = query(
            "SELECT * FROM evidence
             WHERE id IN (SELECT evidence FROM evidence_request WHERE request = $1) ORDER BY id",
        )
        .bind(request.0)
        .fetch_all(&mut tx)
        .await?;
        let links = query(
            "SELECT evidence, request FROM evidence_request
             WHERE evidence IN (SELECT evidence FROM evidence_request WHERE request = $1)
             ORDER BY evidence, position",
        )
        .bind(request.0)
        .fetch_all(&mut tx)
        .await?;
        with_requests(&rows, &links)
    }
}

fn with_requests(rows: &[Row], links: &[Row]) -> Result<Vec<EvidenceRow>, LedgerError> {
    let mut requests: BTreeMap<i64, Vec<RequestId>> = BTreeMap::new();
    for link in links {
        let f = Fields::new("evidence_request", "evidence", link);
        requests.entry(f.int("evidence")?).or_default().push(RequestId(f.int("request")?));
    }
    let mut evidence = Vec::with_capacity(rows.len());
    for row in rows {
        let id = Fields::new("evidence", "id", row).int("id")?;
        evidence.push(EvidenceRow::decode(row, requests.remove(&id).unwrap_or_default())?);
    }
    Ok(evidence)
}

/// Appends evidence inside the caller's transaction.
pub(super) async fn append_evidence(
    conn: &mut Transaction,
    train: &TrainId,
    evidence: &[(Vec<RequestId>, Evidence)],
    now_ms: i64,
) -> Result<(), LedgerError> {
    // This transaction holds the write lock, so nobody else takes the ids after the last one.
    let last: i64 = query("SELECT COALESCE(MAX(id), 0) FROM evidence").scalar(&mut *conn).await?;
    let first = last + 1;
    let numbered: Vec<(i64, &Evidence)> = (first..).zip(evidence.iter().map(|(_, e)| e)).collect();
    for batch in numbered.chunks(BATCH_ROWS) {
        insert(&mut *conn, train, batch, now_ms).await?;
    }
    let mut links: Vec<(i64, i64, RequestId)> = Vec::new();
    for (id, (requests, _)) in (first..).zip(evidence) {
        links.extend((0..).zip(requests).map(|(position, request)| (id, position, *request)));
    }
    for batch in links.chunks(BATCH_ROWS) {
        let mut query = QueryBuilder::new("INSERT INTO evidence_request (evidence, position, request) ");
        query.push_values(batch, |mut values, (id, position, request)| {
            values.push_bind(*id).push_bind(*position).push_bind(request.0);
        });
        query.build().execute(&mut *conn).await?;
    }
    Ok(())
}

async fn insert(
    conn: &mut Transaction,
    train: &TrainId,
    batch: &[(i64, &Evidence)],
    now_ms: i64,
) -> Result<(), LedgerError> {
    let mut texts = Vec::with_capacity(batch.len());
    for (_, evidence) in batch {
        let Evidence { measured, sample, inputs, violations, .. } = evidence;
        texts.push([to_json(measured)?, to_json(sample)?, to_json(inputs)?, to_json(violations)?]);
    }
    let mut query = QueryBuilder::new(
        "INSERT INTO evidence (id, train, candidate, check_id, definition, policy, result, code, error, scope,
             measured, sample, inputs, violations, rows_scanned, bytes_scanned, duration_ms, engine, at_ms) ",
    );
    query.push_values(
        batch.iter().zip(&texts),
        |mut values, ((id, evidence), [measured, sample, inputs, violations])| {
            let Evidence {
                candidate,
                check,
                definition,
                policy,
                result,
                scope,
                measured: _,
                sample: _,
                inputs: _,
                violations: _,
                rows_scanned,
                bytes_scanned,
                duration_ms,
                engine,
            } = *evidence;
            let (code, error) = match result {
                CheckResult::Passed => (None, None),
                CheckResult::Failed { code } => (Some(code.code()), None),
                CheckResult::CouldNotRun { error } => (None, Some(error.as_str())),
            };
            values
                .push_bind(*id)
                .push_bind(train.as_str())
                .push_bind(candidate.0)
                .push_bind(check)
                .push_bind(definition.as_str())
                .push_bind(policy.as_str())
                .push_bind(result.word())
                .push_bind(code)
                .push_bind(error)
                .push_bind(scope)
                .push_bind(measured)
                .push_bind(sample)
                .push_bind(inputs)
                .push_bind(violations)
                .push_bind(count(*rows_scanned))
                .push_bind(count(*bytes_scanned))
                .push_bind(count(*duration_ms))
                .push_bind(engine)
                .push_bind(now_ms);
        },
    );
    query.build().execute(conn).await?;
    Ok(())
}

/// Those of `required` that do not pass by evidence which is the latest, because it was just appended.
pub(super) fn not_among(
    required: &[(SnapshotId, String)],
    appended: &[(Vec<RequestId>, Evidence)],
) -> Vec<(SnapshotId, String)> {
    let latest: HashMap<(SnapshotId, &str), &CheckResult> =
        appended.iter().map(|(_, e)| ((e.candidate, e.check.as_str()), &e.result)).collect();
    let passes = |(candidate, check): &&(SnapshotId, String)| {
        latest.get(&(*candidate, check.as_str())).is_some_and(|result| **result == CheckResult::Passed)
    };
    required.iter().filter(|key| !passes(key)).cloned().collect()
}

/// The first required (candidate, check) whose latest evidence is not a pass (promise 2). The latest counts:
/// a check that could not run may pass when it is tried again, and a pass is void once the same check fails.
pub(super) async fn first_missing(
    conn: &mut Transaction,
    required: &[(SnapshotId, String)],
) -> Result<Option<(SnapshotId, String)>, LedgerError> {
    let candidates: BTreeSet<i64> = required.iter().map(|(candidate, _)| candidate.0).collect();
    let candidates: Vec<i64> = candidates.into_iter().collect();
    let mut passed: BTreeMap<(SnapshotId, String), bool> = BTreeMap::new();
    for batch in candidates.chunks(BATCH_ROWS) {
        let mut query = QueryBuilder::new(
            "SELECT id, candidate, check_id, result, code, error FROM evidence WHERE candidate IN (",
        );
        let mut list = query.separated(", ");
        for candidate in batch {
            list.push_bind(*candidate);
        }
        query.push(") ORDER BY id");
        for row in &query.build().fetch_all(&mut *conn).await? {
            let f = Fields::new("evidence", "id", row);
            let key = (f.snapshot("candidate")?, f.text("check_id")?);
            passed.insert(key, result(&f)? == CheckResult::Passed);
        }
    }
    Ok(required.iter().find(|key| passed.get(*key) != Some(&true)).cloned())
}

#[cfg(test)]
mod tests {
    use mergeberg_kernel::evidence::Violation;
    use mergeberg_kernel::reason::ReasonCode;

    use super::super::LedgerFault;
    use super::super::testing::{Home, enqueue, evidence, on_each_database};
    use super::*;

    on_each_database! {
        evidence_is_read_back_by_candidate_and_by_request,
        evidence_for_a_request_that_is_not_there_is_refused,
        the_latest_result_of_a_check_counts,
    }

    async fn evidence_is_read_back_by_candidate_and_by_request(home: &Home) {
        let ledger = home.ledger().await;
        let a = enqueue(&ledger, "ingest/a", 1).await;
        let b = enqueue(&ledger, "ingest/b", 2).await;
        let train = TrainId::new("t1");
        let failed = Evidence {
            result: CheckResult::Failed { code: ReasonCode::DuplicateKey },
            measured: vec![("duplicates".to_owned(), "2".to_owned())],
            sample: vec!["order_id=4 day='ü'".to_owned()],
            violations: vec![Violation {
                requests: vec![b, a],
                with_base: true,
                count: 2,
                sample: vec!["order_id=4".to_owned()],
            }],
            rows_scanned: 7,
            ..evidence(12, "keys")
        };
        let unknown = Evidence {
            result: CheckResult::CouldNotRun { error: "out of memory".to_owned() },
            ..evidence(13, "keys")
        };
        let rows = vec![(vec![b, a], failed.clone()), (vec![a], evidence(12, "lineage")), (vec![b], unknown)];
        ledger.record_evidence(&train, &rows, 5).await.unwrap();

        let read = |rows: Vec<EvidenceRow>| -> Vec<(Vec<RequestId>, Evidence)> {
            assert!(rows.iter().all(|row| row.train == train && row.at_ms == 5));
            rows.into_iter().map(|row| (row.requests, row.evidence)).collect()
        };
        assert_eq!(read(ledger.evidence_of_candidate(SnapshotId(12)).await.unwrap()), rows[..2]);
        assert_eq!(read(ledger.evidence_of_request(a).await.unwrap()), rows[..2]);
        let of_b = read(ledger.evidence_of_request(b).await.unwrap());
        assert_eq!(of_b, [rows[0].clone(), rows[2].clone()]);
    }

    async fn evidence_for_a_request_that_is_not_there_is_refused(home: &Home) {
        let ledger = home.ledger().await;
        let rows = [(vec![RequestId(99)], evidence(12, "keys"))];
        let error = ledger.record_evidence(&TrainId::new("t1"), &rows, 5).await.unwrap_err();
        assert_eq!(error.fault(), LedgerFault::Refused, "{error}");
        assert_eq!(ledger.evidence_of_candidate(SnapshotId(12)).await.unwrap(), []);
    }

    async fn the_latest_result_of_a_check_counts(home: &Home) {
        let ledger = home.ledger().await;
        let train = TrainId::new("t1");
        let required = [(SnapshotId(12), "keys".to_owned())];
        let missing = async || {
            let mut tx = ledger.begin().await.unwrap();
            first_missing(&mut tx, &required).await.unwrap()
        };
        assert_eq!(missing().await, Some(required[0].clone()));
        let story = [
            (CheckResult::CouldNotRun { error: "disk".to_owned() }, false),
            (CheckResult::Passed, true),
            (CheckResult::Failed { code: ReasonCode::DuplicateKey }, false),
        ];
        for (result, is_enough) in story {
            let row = Evidence { result, ..evidence(12, "keys") };
            // The same check on another candidate, and another check on this one, say nothing.
            let others = [(vec![], evidence(13, "keys")), (vec![], evidence(12, "lineage"))];
            ledger.record_evidence(&train, &others, 1).await.unwrap();
            ledger.record_evidence(&train, &[(vec![], row.clone())], 1).await.unwrap();
            assert_eq!(missing().await.is_none(), is_enough, "{:?}", row.result);
        }
    }
}
