//! `request revert`: what a landed request published is taken back by a request of its own, and what came beside
//! it stays.

use std::collections::{BTreeMap, BTreeSet};

use futures::stream::{self, StreamExt};
use mergeberg::cli::enqueue::EnqueueContext;
use mergeberg::cli::revert::{RevertArgs, RevertContext, revert};
use mergeberg::error::UserError;
use mergeberg::ledger::Enqueued;
use mergeberg::table::branch_writer::Removal;
use mergeberg::table::catalog::Catalog;
use mergeberg::table::manifests::ManifestStore;
use mergeberg::table::snapshot_writer::{SnapshotChange, SnapshotWriter, new_snapshot_id};
use mergeberg_kernel::commit::Update;
use mergeberg_kernel::facts::RefFact;
use mergeberg_kernel::ids::{Principal, RequestId};
use serde_json::Value;

use crate::binary::Shop;
use crate::support::engine_table::{Expected, names};
use crate::support::{House, Order, branch, order};

/// Branches are kept, so that they can be enqueued again.
const POLICY: &str = r#"
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

[[class]]
name = "default"
prefix = ""
"#;

fn done(id: i64, day: u32) -> Order {
    Order { status: "done".to_owned(), ..order(id, day) }
}

fn sorted(mut rows: Vec<Order>) -> Vec<Order> {
    rows.sort();
    rows
}

impl House {
    async fn ask_revert(&self, request: RequestId, key: Option<&str>) -> Result<Enqueued, UserError> {
        self.ask_revert_as(request, key, None).await
    }

    async fn ask_revert_as(
        &self,
        request: RequestId,
        key: Option<&str>,
        class: Option<&str>,
    ) -> Result<Enqueued, UserError> {
        let args = RevertArgs {
            request,
            reason: Some("bad load".to_owned()),
            class: class.map(str::to_owned),
            idempotency_key: key.map(str::to_owned),
            principal: Principal::new("test"),
        };
        let policies = self.worker.policies.read().unwrap();
        let enqueue = EnqueueContext {
            catalog: self.catalog.as_ref(),
            ledger: &self.ledger,
            policies: &policies,
            now_ms: self.now(),
        };
        let store = ManifestStore::new(64 << 20);
        let random = || (self.writer.random)();
        revert(RevertContext { enqueue, store: &store, random: &random }, &args).await
    }

    pub async fn revert(&self, request: RequestId) -> RequestId {
        match self.ask_revert(request, None).await.unwrap() {
            Enqueued::New(row) | Enqueued::Existing(row) => row.id,
            Enqueued::KeyConflict(row) => panic!("no key was given, but request {} has it", row.id),
        }
    }

    async fn reverted(&self, request: RequestId) -> RequestId {
        let revert = self.revert(request).await;
        self.drain().await;
        assert_eq!(self.state(revert).await, "landed", "{}", self.history(revert).await);
        revert
    }

    /// A request from a branch, landed.
    async fn landed(&self, name: &str) -> RequestId {
        let request = self.enqueue(name).await;
        self.drain().await;
        assert_eq!(self.state(request).await, "landed", "{}", self.history(request).await);
        request
    }

    async fn refusal_of_revert(&self, request: RequestId) -> UserError {
        self.ask_revert(request, None).await.unwrap_err()
    }

    /// A commit on main that changes nothing: what waits is not forwarded any more.
    async fn bump_main(&self) {
        let table = self.loaded().await;
        let facts = &table.facts;
        let id = new_snapshot_id(facts, || (self.writer.random)());
        let change = SnapshotChange {
            id,
            label: "append".to_owned(),
            add: Vec::new(),
            remove: BTreeSet::new(),
            add_deletes: Vec::new(),
            remove_deletes: BTreeSet::new(),
            summary: BTreeMap::new(),
            now_ms: self.now(),
            schema_id: facts.current_schema_id,
        };
        let main = facts.refs[&branch("main")].clone();
        let parent = facts.snapshots.get(main.snapshot_id);
        let mut writer = SnapshotWriter::on(&ManifestStore::new(64 << 20), &table, parent).await.unwrap();
        let snapshot = writer.add(change).await.unwrap();
        let moved = RefFact { snapshot_id: id, ..main };
        self.commit(vec![Update::AddSnapshot(snapshot), Update::SetRef(moved)]).await;
    }

    async fn own_refs(&self) -> Vec<String> {
        self.refs().await.into_iter().filter(|name| name.starts_with("mergeberg/")).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_append_is_taken_back_and_what_came_after_stays() {
    let house = House::orders(POLICY).await;
    let before = house.rows("main").await;
    house.append_on_new("ingest/a", &[order(4, 22), order(5, 20)]).await;
    let request = house.landed("ingest/a").await;
    house.append("main", &[order(6, 22)]).await;
    house.append_on_new("ingest/b", &[order(7, 20)]).await;
    house.landed("ingest/b").await;

    let revert = house.revert(request).await;
    assert_eq!(house.request(revert).await.class, "ingest", "the same checks hold");
    // Beside the files in question, and while the inverse waits.
    house.append("main", &[order(8, 22)]).await;
    house.drain().await;
    assert_eq!(house.state(revert).await, "landed", "{}", house.history(revert).await);
    assert_eq!(house.classified(revert).await, "cherry-pick");
    let after = [order(6, 22), order(7, 20), order(8, 22)];
    assert_eq!(house.rows("main").await, sorted([before, after.to_vec()].concat()));
    assert_eq!(house.own_refs().await, [""; 0], "dropped with the landing");
    // Promise 5: the ledger knows, the snapshot does not.
    let table = house.loaded().await;
    let head = table.facts.snapshots.get(table.facts.head(&branch("main")).unwrap()).unwrap();
    assert!(head.summary.keys().all(|key| !key.contains("revert")), "{:?}", head.summary);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_overwrite_is_taken_back_with_new_files() {
    let house = House::orders(POLICY).await;
    house.append("main", &[order(9, 20)]).await;
    let before = house.rows("main").await;
    let table = house.loaded().await;
    let files = house.files_at(&table, house.head("main").await.unwrap()).await;
    house.branch("fix").await;
    // One of the two files of the 20th.
    let remove = Removal::Files(Box::new(|file| file.fact.records == 2));
    house.write("fix", "overwrite", &[done(1, 20), done(2, 20)], remove, BTreeMap::new()).await;
    let request = house.landed("fix").await;
    assert_ne!(house.rows("main").await, before);
    house.reverted(request).await;
    assert_eq!(house.rows("main").await, before);
    // Rule D6: what was removed is not added again under its path.
    let table = house.loaded().await;
    let now = house.files_at(&table, house.head("main").await.unwrap()).await;
    let gone: Vec<_> = files.keys().filter(|path| !now.contains_key(*path)).collect();
    assert_eq!(gone.len(), 1);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_day_comes_back_and_an_append_to_it_meanwhile_stays() {
    let house = House::orders(POLICY).await;
    let before = house.rows("main").await;
    house.branch("transform/day").await;
    house.overwrite_days("transform/day", &[20], &[done(1, 20), done(2, 20), done(10, 20)]).await;
    let request = house.landed("transform/day").await;
    // The inverse looks like a replaced day itself; run again it would take this row along.
    let revert = house.revert(request).await;
    house.append("main", &[order(11, 20)]).await;
    house.drain().await;
    assert_eq!(house.state(revert).await, "landed", "{}", house.history(revert).await);
    assert_eq!(house.rows("main").await, sorted([before, vec![order(11, 20)]].concat()));
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revert_is_taken_back_like_any_other_request() {
    let house = House::orders(POLICY).await;
    let before = house.rows("main").await;
    house.branch("transform/day").await;
    house.overwrite_days("transform/day", &[20], &[done(1, 20), done(12, 20)]).await;
    let request = house.landed("transform/day").await;
    let landed = house.rows("main").await;
    let first = house.reverted(request).await;
    assert_eq!(house.rows("main").await, before);
    let second = house.reverted(first).await;
    assert_eq!(house.rows("main").await, landed);
    let third = house.reverted(second).await;
    assert_eq!(house.rows("main").await, before);
    let reverts: Vec<RequestId> =
        house.ledger.reverts_of(request).await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(reverts, [first]);
    assert_eq!(house.request(third).await.reverts.unwrap().request, second);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_is_taken_back_once() {
    let house = House::orders(POLICY).await;
    let before = house.rows("main").await;
    house.branch("drop-20").await;
    house.delete_days("drop-20", &[20]).await;
    let request = house.landed("drop-20").await;
    assert_eq!(house.keys("main").await, [3]);
    let revert = house.reverted(request).await;
    assert_eq!(house.rows("main").await, before);
    // No file of it is gone, and yet a second time would double the rows.
    let error = house.refusal_of_revert(request).await;
    assert_eq!(error.code.code(), "revert-impossible");
    assert!(error.message.contains(&format!("by request {revert}")), "{}", error.message);
    // Taken back in its turn, the delete stands again and can be taken back again.
    house.reverted(revert).await;
    assert_eq!(house.keys("main").await, [3]);
    house.reverted(request).await;
    assert_eq!(house.rows("main").await, before);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_not_landed_or_was_rolled_back_cannot_be_taken_back() {
    let house = House::orders(POLICY).await;
    let main = house.head("main").await.unwrap();
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.enqueue("ingest/a").await;
    assert_eq!(house.refusal_of_revert(request).await.code.code(), "wrong-state");
    assert_eq!(house.refusal_of_revert(RequestId(77)).await.code.code(), "request-not-found");
    house.drain().await;
    house.force_branch("main", main).await;
    let error = house.refusal_of_revert(request).await;
    assert_eq!(error.code.code(), "wrong-state");
    assert!(error.message.contains("rolled back"), "{}", error.message);
    assert_eq!(house.own_refs().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_were_changed_again_are_witnesses_with_their_requests() {
    let house = House::orders(POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.landed("ingest/a").await;
    house.branch("transform/day").await;
    house.overwrite_days("transform/day", &[22], &[done(4, 22)]).await;
    let later = house.landed("transform/day").await;
    let snapshot = house.request(later).await.landed_snapshot.unwrap();
    let error = house.refusal_of_revert(request).await;
    assert_eq!(error.code.code(), "revert-impossible");
    assert!(error.message.contains(&format!("request {later} (snapshot {snapshot})")), "{}", error.message);
    let [witness] = error.witnesses.as_slice() else { panic!("{:?}", error.witnesses) };
    assert_eq!(
        (&witness["request"], &witness["snapshot"]),
        (&Value::from(later.0), &Value::from(snapshot.0))
    );

    // A commit that no request made is named by its snapshot.
    house.append_on_new("ingest/b", &[order(5, 23)]).await;
    let other = house.landed("ingest/b").await;
    let foreign = house.delete_days("main", &[23]).await;
    let error = house.refusal_of_revert(other).await;
    assert!(error.message.contains(&format!("no request made (snapshot {foreign})")), "{}", error.message);
    assert_eq!(error.witnesses[0]["request"], Value::Null);
    assert_eq!(house.own_refs().await, [""; 0]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_same_files_while_the_inverse_waits_stops_it() {
    let house = House::orders(POLICY).await;
    house.branch("transform/day").await;
    house.overwrite_days("transform/day", &[20], &[done(1, 20), done(2, 20)]).await;
    let request = house.landed("transform/day").await;
    let revert = house.revert(request).await;
    house.overwrite_days("main", &[20], &[order(1, 20)]).await;
    house.drain().await;
    assert_eq!(house.state(revert).await, "refused(revert-impossible)");
    assert_eq!(house.keys("main").await, [1, 3]);
    assert!(house.detail(revert).await.contains("removed file is gone"), "{}", house.detail(revert).await);
    house.drain().await;
    assert_eq!(house.own_refs().await, [""; 0], "let go of");
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_files_of_the_same_day_stop_nothing() {
    let house = House::orders(POLICY).await;
    let before = house.rows("main").await;
    let mut requests = Vec::new();
    for id in [4, 5] {
        let name = format!("ingest/{id}");
        house.append_on_new(&name, &[order(id, 20)]).await;
        requests.push(house.landed(&name).await);
    }
    // Both wait at once, and a third hand updates a row of that day.
    let reverts = [house.revert(requests[0]).await, house.revert(requests[1]).await];
    let first_file = Removal::Files(Box::new(|file| file.fact.records == 2));
    house.write("main", "overwrite", &[done(1, 20), done(2, 20)], first_file, BTreeMap::new()).await;
    house.drain().await;
    for revert in reverts {
        assert_eq!(house.state(revert).await, "landed", "{}", house.history(revert).await);
    }
    let after: Vec<Order> =
        before.into_iter().map(|row| if row.day == 20 { done(row.id, 20) } else { row }).collect();
    assert_eq!(house.rows("main").await, sorted(after));
    assert_eq!(house.own_refs().await, [""; 0]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_command_twice_is_the_same_request() {
    let house = House::orders(POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.landed("ingest/a").await;
    house.append_on_new("ingest/b", &[order(5, 23)]).await;
    let other = house.landed("ingest/b").await;

    let first = house.revert(request).await;
    assert_eq!(house.revert(request).await, first);
    assert_eq!(house.own_refs().await.len(), 1, "one branch");
    let key = Some("undo-b");
    let Enqueued::New(keyed) = house.ask_revert(other, key).await.unwrap() else { panic!("there already") };
    house.drain().await;
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    let Enqueued::Existing(again) = house.ask_revert(other, key).await.unwrap() else { panic!("twice") };
    assert_eq!(again.id, keyed.id);
    assert_eq!(house.ask_revert(request, key).await.unwrap_err().code.code(), "idempotency-key-conflict");
    assert_eq!(house.refusal_of_revert(request).await.code.code(), "revert-impossible");

    // One that ended otherwise is asked for anew, on a branch with another name.
    house.append_on_new("ingest/c", &[order(6, 24)]).await;
    let third = house.landed("ingest/c").await;
    let cancelled = house.revert(third).await;
    house.ledger.cancel(cancelled, &Principal::new("ann"), house.now()).await.unwrap();
    let anew = house.revert(third).await;
    let source = |row: mergeberg::ledger::RequestRow| row.source.to_string();
    assert!(source(house.request(cancelled).await).ends_with(&format!("/{third}-1")));
    assert!(source(house.request(anew).await).ends_with(&format!("/{third}-2")));
    house.drain().await;
    assert_eq!(house.keys("main").await, [1, 2, 3]);
    assert_eq!(house.own_refs().await, [""; 0]);
    house.assert_sound().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_of_a_command_that_died_is_tidied_up() {
    let house = House::orders(POLICY).await;
    house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = house.landed("ingest/a").await;
    let left = format!("mergeberg/revert/{}/{request}-1", house.ledger.queue_id());
    house.force_branch(&left, house.head("main").await.unwrap()).await;
    let revert = house.revert(request).await;
    assert_eq!(
        house.request(revert).await.source.to_string(),
        format!("mergeberg/revert/{}/{request}-2", house.ledger.queue_id()),
        "no name is used twice"
    );
    house.drain().await;
    assert_eq!(house.state(revert).await, "landed");
    assert_eq!(house.own_refs().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_c9_what_was_taken_back_is_not_called_published() {
    // Forwarded: the very snapshot is in the target's history. Picked: only its copy is.
    for picked in [false, true] {
        let house = House::orders(POLICY).await;
        house.append_on_new("ingest/a", &[order(4, 22)]).await;
        if picked {
            house.append("main", &[order(9, 25)]).await;
        }
        let request = house.landed("ingest/a").await;
        let revert = house.reverted(request).await;
        let again = house.enqueue("ingest/a").await;
        assert_ne!(again, request);
        house.drain().await;
        assert_eq!(house.state(again).await, "refused(rolled-back)", "picked: {picked}");
        assert!(house.detail(again).await.contains(&format!("request {revert} took it back")));
        // Once that is taken back itself, it is published again.
        house.reverted(revert).await;
        let published = house.enqueue("ingest/a").await;
        house.drain().await;
        assert_eq!(house.state(published).await, "already-published", "picked: {picked}");
        // What the branch gets beside it lands as ever.
        house.append("ingest/a", &[order(5, 23)]).await;
        house.landed("ingest/a").await;
        assert!(house.keys("main").await.contains(&5));
        house.assert_sound().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_request_or_file_is_told() {
    let house = House::orders(POLICY).await;
    house.branch("drop-20").await;
    house.delete_days("drop-20", &[20]).await;
    let request = house.landed("drop-20").await;
    let table = house.loaded().await;
    let live = house.files_at(&table, house.head("main").await.unwrap()).await;
    // Another engine's expiry deleted the file that would have to come back.
    for file in house.files_at(&table, table.facts.snapshot_log[1].snapshot_id).await.into_keys() {
        if !live.contains_key(&file) {
            std::fs::remove_file(file.strip_prefix("file://").unwrap_or(&file)).unwrap();
        }
    }
    let error = house.refusal_of_revert(request).await;
    assert_eq!(error.code.code(), "revert-impossible", "{}", error.message);
    assert!(error.message.contains("was deleted since"), "{}", error.message);
    let head = house.head("main").await.unwrap();
    let old: Vec<_> = table.facts.snapshots.iter().map(|s| s.id).filter(|id| *id != head).collect();
    house.commit(vec![Update::RemoveRef(branch("drop-20")), Update::RemoveSnapshots(old)]).await;
    let error = house.refusal_of_revert(request).await;
    assert_eq!(error.code.code(), "revert-impossible", "{}", error.message);
    assert!(error.message.contains("expired"), "{}", error.message);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_shows_what_took_back_what() {
    let shop = Shop::open().await;
    shop.house.append_on_new("ingest/a", &[order(4, 22)]).await;
    let request = shop.enqueue("ingest/a");
    let id = request.to_string();
    shop.refused(&["request", "revert", &id], 3, "wrong-state");
    shop.drain();
    shop.refused(&["request", "revert", &id, "--reason", " "], 2, "invalid-argument");
    let ran =
        shop.run(&["request", "revert", &id, "--reason", "bad load", "--idempotency-key", "k", "--json"]);
    let row = ran.json()["request"].clone();
    assert_eq!(
        (&row["reverts"]["request"], &row["reverts"]["reason"]),
        (&Value::from(request.0), &Value::from("bad load"))
    );
    let revert = RequestId(row["id"].as_i64().unwrap());
    shop.drain();
    assert_eq!(shop.state(revert).await, "landed", "{}", shop.explain(revert));
    assert_eq!(shop.house.keys("main").await, [1, 2, 3]);
    assert!(shop.explain(request).contains(&format!("by request {revert}, which is landed")));
    let shown = shop.ok(&["request", "show", &id]);
    assert!(shown.contains(&format!("reverted by     request {revert} (landed)")), "{shown}");
    assert!(shop.explain(revert).contains(&format!("request {request}: bad load")));
    let json = shop.run(&["request", "show", &id, "--json"]).json();
    assert_eq!(
        (&json["id"], &json["reverted_by"][0]["request"]),
        (&Value::from(request.0), &Value::from(revert.0))
    );
    let refused = shop.refused(&["request", "revert", &id], 3, "revert-impossible");
    assert!(refused.contains(&format!("by request {revert}")), "{refused}");
    shop.lands_another().await;
}

/// Whatever the branches did is landed, also where main went on.
const OF_ENGINES: &str = r#"
table = "engine.written"

[[check]]
id = "one-id-once"
type = "duplicate-key"
columns = ["id"]
scope = "table"

[[class]]
name = "any"
prefix = ""
overlap = "allow"
isolation = "snapshot"
equality-deletes = "serial-upsert"
checks = ["one-id-once"]

# What was double before may come back.
[[class]]
name = "undo"
prefix = "mergeberg/revert/"
"#;

/// Lands the branch of an engine's table and takes it back. Was it one with row-level deletes? `None`: there was
/// nothing to take back.
async fn land_and_take_back(table: String) -> Option<bool> {
    let expected = Expected::of(&table);
    if !expected.has_branch() {
        return None;
    }
    let house = House::engine_table(&table, OF_ENGINES).await;
    let main = house.catalog.load(&house.table).await.ok()?.facts.head(&branch("main"))?;
    let request = house.enqueue("b").await;
    house.drain().await;
    if house.state(request).await != "landed" {
        return None;
    }
    let before = house.lines_at(main).await;
    let landed = house.head("main").await.unwrap();
    let after = house.lines_at(landed).await;
    let undo = Some("undo");
    let revert = match house.ask_revert_as(request, None, undo).await {
        Ok(Enqueued::New(row)) => row.id,
        // An append and the delete of its files.
        Err(error) if error.code.code() == "empty-source" => return None,
        other => panic!("{table}: {other:?}"),
    };
    house.drain().await;
    assert_eq!(house.state(revert).await, "landed", "{table}: {}", house.history(revert).await);
    assert_eq!(house.lines_at(house.head("main").await.unwrap()).await, before, "{table}");
    let with_deletes = ["mor", "delete", "eq-", "flink"].iter().any(|word| table.contains(word));
    if with_deletes {
        let Ok(Enqueued::New(again)) = house.ask_revert_as(revert, None, undo).await else {
            panic!("{table}: its revert cannot be taken back")
        };
        house.bump_main().await;
        house.drain().await;
        let how = (house.state(again.id).await, house.classified(again.id).await);
        let history = house.history(again.id).await;
        assert_eq!(how, ("landed".into(), "cherry-pick".into()), "{table}: {history}");
        let head = house.head("main").await.unwrap();
        assert_eq!(house.lines_at(head).await, after, "{table}, taken back twice");
    }
    assert_eq!(house.own_refs().await, [""; 0], "{table}");
    Some(with_deletes)
}

/// Whatever the branch of an engine's table did lands, is taken back, and the rows are as before, in both format
/// versions, row-level deletes among them.
#[tokio::test(flavor = "multi_thread")]
async fn what_engines_wrote_is_taken_back_row_for_row() {
    let outcomes: Vec<Option<bool>> =
        stream::iter(names()).map(land_and_take_back).buffer_unordered(4).collect().await;
    let taken_back: Vec<bool> = outcomes.into_iter().flatten().collect();
    let with_deletes = taken_back.iter().filter(|deletes| **deletes).count();
    assert!(taken_back.len() > 60 && with_deletes > 25, "{} and {with_deletes}", taken_back.len());
}
