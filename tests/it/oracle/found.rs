//! Small histories that the random ones found, each named after what was wrong.

use super::history::History;
use super::judge::{Tally, judge};
use super::rows::{Filter, Op, Query};
use crate::support::order;

fn overwrite(day: u32, rows: &[(i64, u32)]) -> Op {
    let rows = rows.iter().map(|(id, day)| order(*id, *day)).collect();
    Op::OverwriteWhere { filter: Filter::Days(day, day), query: Query::Values(rows) }
}

fn append(id: i64, day: u32) -> Op {
    Op::Append(vec![order(id, day)])
}

async fn ends_as(mut history: History, expected: &[&str]) {
    history.settle().await;
    let mut states = Vec::new();
    for asked in history.asked.clone() {
        let row = history.house.request(asked.id).await;
        states.push(format!("{} {}", row.state, row.classification.unwrap_or_default()));
    }
    assert_eq!(states, expected);
    judge(&mut history, &mut Tally::new()).await;
}

/// Two overwrites of one day on one branch, run again: the second removes what the first had just written.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_operation_stands_on_the_one_before_it_in_its_request() {
    let mut history = History::quiet().await;
    history.branch("transform/a", "main").await;
    history.write("transform/a", overwrite(20, &[(10, 20)]), false, true).await;
    history.write("transform/a", overwrite(20, &[(11, 20)]), false, true).await;
    history.enqueue("transform/a").await;
    history.write("main", append(12, 20), false, false).await;
    ends_as(history, &["landed rebase"]).await;
}

/// The same with an append before, and a replacement of the day after.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_replacement_removes_what_its_own_request_put_there() {
    let mut history = History::quiet().await;
    history.branch("load/a", "main").await;
    history.write("load/a", append(10, 20), false, false).await;
    history.write("load/a", overwrite(20, &[(11, 20)]), false, true).await;
    let days = [20].into();
    let replaced = Op::ReplaceDays { days, rows: vec![order(12, 20)] };
    history.write("load/a", replaced, false, true).await;
    history.enqueue("load/a").await;
    history.write("main", append(13, 20), false, false).await;
    ends_as(history, &["landed rebase"]).await;
}

/// An operation that reads the target reads what its own request did before.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_query_reads_its_own_requests_rows() {
    let mut history = History::quiet().await;
    history.branch("transform/a", "main").await;
    history.write("transform/a", overwrite(20, &[(10, 20)]), false, true).await;
    let dearer = Op::OverwriteWhere { filter: Filter::Days(20, 20), query: Query::Dearer };
    history.write("transform/a", dearer, false, true).await;
    history.enqueue("transform/a").await;
    history.write("main", append(11, 20), false, false).await;
    ends_as(history, &["landed rebase"]).await;
}

/// A recorded delete that finds nothing, neither on its branch nor on the target: it lands as an empty
/// snapshot, whose stamp says that it was published.
#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_comes_to_nothing_lands() {
    let mut history = History::quiet().await;
    history.branch("transform/a", "main").await;
    history.write("transform/a", overwrite(23, &[]), false, true).await;
    history.enqueue("transform/a").await;
    history.write("main", append(10, 20), false, false).await;
    ends_as(history, &["landed cherry-pick"]).await;
}

/// The same when only the replay comes to nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_comes_to_nothing_lands() {
    let mut history = History::quiet().await;
    history.branch("transform/a", "main").await;
    history.write("transform/a", overwrite(20, &[]), false, true).await;
    history.enqueue("transform/a").await;
    history.write("main", Op::DeleteDays([20].into()), false, false).await;
    ends_as(history, &["landed rebase"]).await;
}

/// A branch that landed by replay is sent again: its operations of two snapshots were stamped once, and only
/// the receipt says that both are published. What comes after them is a prefix's rest.
#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_branch_is_known_again_by_its_receipt() {
    let mut history = History::quiet().await;
    history.branch("load/a", "main").await;
    history.write("load/a", overwrite(20, &[(10, 20)]), true, true).await;
    let replaced = Op::ReplaceDays { days: [20].into(), rows: vec![order(11, 20)] };
    history.write("load/a", replaced, true, false).await;
    history.enqueue("load/a").await;
    history.write("main", append(12, 20), false, false).await;
    history.settle().await;
    history.enqueue("load/a").await;
    history.settle().await;
    history.write("load/a", append(13, 21), false, false).await;
    history.enqueue("load/a").await;
    ends_as(history, &["landed rebase", "already-published already-published", "landed cherry-pick"]).await;
}
