//! A pipeline that makes its branch again when it is asked to: a URL that a class names (`on-conflict = "external"`).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use mergeberg::table::branch_writer::Removal;
use mergeberg_kernel::ids::{RequestId, SnapshotId};
use serde_json::Value;
use tokio::task::JoinHandle;

use super::child::{PATIENCE, Settings};
use super::fault_server::http::{Reply, Request, serve};
use super::{House, Order, branch, order};

const LOOK: Duration = Duration::from_millis(20);

/// One request to the pipeline, as it was sent.
#[derive(Clone, Debug)]
pub struct Asked {
    pub body: Value,
    pub key: String,
    pub authorization: Option<String>,
}

impl Asked {
    pub fn text(&self, key: &str) -> &str {
        self.body[key].as_str().unwrap_or_else(|| panic!("{key} of {}", self.body))
    }

    pub fn branch(&self) -> &str {
        self.text("branch")
    }

    pub fn base(&self) -> SnapshotId {
        SnapshotId(self.body["base-snapshot-id"].as_i64().unwrap())
    }
}

/// What the pipeline does when it is asked for the how-manieth time, from 1.
pub type Act = fn(Arc<House>, Asked, usize) -> BoxFuture<'static, Reply>;

/// A queue whose class `transform` has a pipeline behind a URL.
pub struct Pipeline {
    pub house: Arc<House>,
    asked: Arc<Mutex<Vec<Asked>>>,
    serving: JoinHandle<()>,
}

impl Pipeline {
    pub async fn open(act: Act) -> Self {
        Self::with(act, None, "").await
    }

    /// With settings for processes of their own, on the real clock, or without; `lines` are for `[class.external]`.
    pub async fn with(act: Act, settings: Option<Settings>, lines: &str) -> Self {
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let place: Arc<OnceLock<Arc<House>>> = Arc::default();
        let (log, inside) = (Arc::clone(&asked), Arc::clone(&place));
        let handler = move |request: Request| -> BoxFuture<'static, Reply> {
            assert_eq!(request.method, "POST");
            let asked = Asked {
                body: serde_json::from_str(&request.body).unwrap(),
                key: request.headers["idempotency-key"].clone(),
                authorization: request.headers.get("authorization").cloned(),
            };
            let times = {
                let mut log = log.lock().unwrap();
                log.push(asked.clone());
                log.len()
            };
            act(Arc::clone(inside.get().unwrap()), asked, times)
        };
        let (address, serving) = serve(Arc::new(handler)).await;
        let policy = policy(&format!("url = \"{address}/rebuild\"\n{lines}"));
        let house = match settings {
            Some(settings) => House::in_real_time(&policy, settings).await,
            None => House::orders(&policy).await,
        };
        let house = Arc::new(house);
        assert!(place.set(Arc::clone(&house)).is_ok());
        Self { house, asked, serving }
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// ORD with classes `transform` and `compaction` that are made again by what `lines` name.
pub fn policy(lines: &str) -> String {
    format!(
        r#"
table = "shop.orders"

[[check]]
id = "one-order-once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "ingest"
prefix = "ingest/"
overlap = "allow-with-duplicate-check"
checks = ["one-order-once"]
after-landing = "drop"

[[class]]
name = "default"
prefix = ""

[[class]]
name = "transform"
prefix = "transform/"
on-conflict = "external"
checks = ["one-order-once"]

[class.external]
scope = "touched-partitions"
{lines}

[[class]]
name = "compaction"
prefix = "compaction/"
kind = "compaction"
on-conflict = "external"

[class.external]
{lines}
"#
    )
}

fn files_of(day: &'static str) -> Removal {
    Removal::Files(Box::new(move |file| {
        file.fact.partition.fields.iter().any(|field| field.value.as_deref() == Some(day))
    }))
}

pub fn content() -> Reply {
    Reply::json(200, r#"{"done":true}"#.to_owned())
}

impl House {
    /// What the pipeline does, about which it records nothing: all orders of the 21st are done.
    pub async fn finish_21(&self, name: &str) -> SnapshotId {
        let rows = self.rows(name).await.into_iter().filter(|row| row.day == 21);
        let rows: Vec<Order> = rows.map(|row| Order { status: "done".to_owned(), ..row }).collect();
        self.put_on_21(name, &rows).await
    }

    /// These rows in place of all of the 21st, as an overwrite of which nothing is known.
    pub async fn put_on_21(&self, name: &str, rows: &[Order]) -> SnapshotId {
        self.put_on_21_with(name, rows, BTreeMap::new()).await
    }

    pub async fn put_on_21_with(
        &self,
        name: &str,
        rows: &[Order],
        summary: BTreeMap<String, String>,
    ) -> SnapshotId {
        self.write(name, "overwrite", rows, files_of("2026-08-21"), summary).await
    }

    /// The rows of the 20th in one file.
    pub async fn compact_20(&self, name: &str) -> SnapshotId {
        let rows = self.rows(name).await.into_iter();
        let rows: Vec<Order> = rows.filter(|row| row.day == 20).collect();
        self.write(name, "replace", &rows, files_of("2026-08-20"), BTreeMap::new()).await
    }

    /// A branch of the pipeline that meets a row which came to main meanwhile.
    pub async fn enqueue_outdated(&self, name: &str) -> RequestId {
        self.branch(name).await;
        self.finish_21(name).await;
        self.append("main", &[order(8, 21)]).await;
        self.enqueue(name).await
    }

    /// Ids of the orders that are done on a branch.
    pub async fn done(&self, name: &str) -> Vec<i64> {
        let rows = self.rows(name).await.into_iter();
        let mut done: Vec<i64> = rows.filter(|row| row.status == "done").map(|row| row.id).collect();
        done.sort_unstable();
        done
    }

    /// Outcomes of a request's runs, oldest first.
    pub async fn outcomes(&self, request: RequestId) -> Vec<String> {
        let runs = self.ledger.external_runs(request).await.unwrap();
        runs.iter().map(|run| run.outcome.map_or("under way", |outcome| outcome.word()).to_owned()).collect()
    }

    /// Waits until the request is in this state, with a bound.
    pub async fn until_state(&self, request: RequestId, state: &str) {
        let mut look = tokio::time::interval(LOOK);
        let begin = Instant::now();
        while self.state(request).await != state {
            let now = self.request(request).await;
            assert!(begin.elapsed() < PATIENCE, "request {request} is never {state}: {now:?}");
            look.tick().await;
        }
    }

    /// Waits until the request's runs have ended in this way, with a bound.
    pub async fn until_outcomes(&self, request: RequestId, outcomes: &[&str]) {
        let mut look = tokio::time::interval(LOOK);
        let begin = Instant::now();
        while self.outcomes(request).await != outcomes {
            assert!(begin.elapsed() < PATIENCE, "the runs of request {request} never are {outcomes:?}");
            look.tick().await;
        }
    }

    /// Is this snapshot an ancestor of main, or main's head?
    pub async fn is_on_main(&self, id: SnapshotId) -> bool {
        let table = self.loaded().await;
        table.facts.snapshots.is_ancestor(id, table.facts.head(&branch("main")).unwrap())
    }
}
