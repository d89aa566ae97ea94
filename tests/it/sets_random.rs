//! Queues of three tables that nobody would write by hand: sets and single requests, rows that are there already, strangers
//! who move the targets. Whatever happens, a set is there whole or not at all.

use std::collections::BTreeMap;
use std::sync::Arc;

use mergeberg::ledger::RequestRow;
use mergeberg::table::branch_writer::{BranchWrite, Removal};
use mergeberg_kernel::reason::ReasonCode;
use mergeberg_kernel::state::RequestState;

use crate::support::mall::Mall;
use crate::support::{House, batch, main_branch, order};

/// A key is there once. The day is a part of it, so that partitions meet and rows do not always.
const ONCE: &str = r#"
[[check]]
id = "once"
type = "duplicate-key"
columns = ["order_id", "order_date"]

[[class]]
name = "default"
prefix = ""
overlap = "allow-with-duplicate-check"
checks = ["once"]
"#;

/// The same numbers in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_is_there_whole_or_not_at_all() {
    let (mut landed, mut refused) = (0, 0);
    for seed in 0..8 {
        let sets = queue_of(&mut Dice(seed)).await;
        landed += sets.iter().filter(|landed| **landed).count();
        refused += sets.iter().filter(|landed| !**landed).count();
    }
    assert!(
        landed >= 4 && refused >= 4,
        "the histories say little: {landed} sets landed, {refused} were refused"
    );
}

/// Whether each of its sets landed.
async fn queue_of(dice: &mut Dice) -> Vec<bool> {
    let mall = Arc::new(Mall::with(ONCE, ONCE, ONCE).await);
    let mut rows: BTreeMap<(usize, String), (i64, u32)> = BTreeMap::new();
    for number in 0..6 {
        let name = format!("work/{number}");
        let mut tables: Vec<usize> = (0..3).filter(|_| dice.below(2) == 0).collect();
        if tables.is_empty() {
            tables.push(dice.below(3) as usize);
        }
        for table in &tables {
            let (id, day) = (3 + dice.below(4) as i64, 22 + dice.below(2) as u32);
            mall.all()[*table].append_on_new(&name, &[order(id, day)]).await;
            rows.insert((*table, name.clone()), (id, day));
        }
        let houses: Vec<&House> = tables.iter().map(|table| mall.all()[*table]).collect();
        match houses.as_slice() {
            [single] => drop(single.enqueue(&name).await),
            several => drop(mall.orders.enqueue_set(several, &name).await),
        }
    }
    // Strangers' rows that nobody else has, while the queue works.
    let rows_of_strangers: Vec<usize> = (0..9).map(|_| dice.below(3) as usize).collect();
    let strangers = Arc::clone(&mall);
    let writing = tokio::spawn(async move {
        for (id, table) in (100..).zip(rows_of_strangers) {
            append_by_a_stranger(strangers.all()[table], id).await;
        }
    });
    mall.orders.drain().await;
    writing.await.unwrap();
    // Trains that were lost to strangers are planned again.
    mall.orders.drain().await;

    let requests = mall.orders.ledger.requests(&Default::default()).await.unwrap();
    for request in &requests {
        assert!(request.state.is_final(), "{request:?}");
    }
    for (table, house) in mall.all().into_iter().enumerate() {
        let mut expected: Vec<(i64, u32)> = vec![(1, 20), (2, if table == 0 { 20 } else { 21 })];
        expected.extend((table == 0).then_some((3, 21)));
        let mine = requests.iter().filter(|request| request.table == house.table);
        for request in mine.filter(|request| request.state == RequestState::Landed) {
            expected.push(rows[&(table, request.source.to_string())]);
        }
        let found = house.rows("main").await;
        let mut found: Vec<(i64, u32)> =
            found.into_iter().map(|row| (row.id, row.day)).filter(|row| row.0 < 100).collect();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected, "{}: what landed is there, each row once", house.table);
    }
    let mut sets: BTreeMap<_, Vec<&RequestRow>> = BTreeMap::new();
    for request in &requests {
        if let Some(set) = request.set {
            sets.entry(set.id).or_default().push(request);
        }
    }
    let mut ends = Vec::new();
    for (set, parts) in sets {
        let landed = parts.iter().filter(|part| part.state == RequestState::Landed).count();
        assert!(landed == 0 || landed == parts.len(), "set {set} is there by halves: {parts:?}");
        let follows = |part: &&&RequestRow| part.state.reason() == Some(ReasonCode::SetPartFailed);
        let own =
            parts.iter().filter(|part| part.state.reason().is_some()).filter(|part| !follows(part)).count();
        assert!(landed > 0 || own > 0, "set {set} was refused for nobody's fault: {parts:?}");
        ends.push(landed > 0);
    }
    mall.assert_sound().await;
    ends
}

/// Tried again as long as the queue moves the target under it.
async fn append_by_a_stranger(house: &House, id: i64) {
    for _ in 0..1_000 {
        let write = BranchWrite {
            branch: main_branch(),
            label: "append".to_owned(),
            rows: vec![batch(&[order(id, 23)])],
            remove: Removal::Nothing,
            summary: BTreeMap::new(),
        };
        if house.writer.write(&house.table, write).await.is_ok() {
            return;
        }
    }
    panic!("the target is never at rest");
}
