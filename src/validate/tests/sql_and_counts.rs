use super::*;
use crate::table::test_orders::orders;

fn sql(query: &str) -> String {
    format!("type = \"sql\"\nquery = '''{query}'''")
}

#[tokio::test]
async fn a_query_reads_candidate_touched_and_base() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1]), orders(2, &[2])].concat(), &[]).await;
    let a = lab.snapshot(Some(base), &orders(2, &[3]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    for (query, rows) in [
        ("SELECT order_id FROM candidate WHERE order_id < 0", 0),
        ("SELECT order_id FROM candidate", 3),
        ("SELECT order_id FROM touched", 2),
        ("SELECT order_id FROM base", 2),
        ("SELECT c.order_id FROM candidate c LEFT ANTI JOIN base b ON c.order_id = b.order_id", 1),
        ("SELECT 1 FROM (SELECT COUNT(*) AS n FROM candidate) t WHERE n <> 3", 0),
    ] {
        let evidence = run(&lab, &cars, &sql(query)).await;
        assert_eq!(measured(&evidence, "rows"), rows.to_string(), "{query}: {evidence:?}");
        assert_eq!(evidence.result == CheckResult::Passed, rows == 0, "{query}");
    }
    let evidence = run(&lab, &cars, &sql("SELECT order_id, day FROM touched WHERE order_id = 3")).await;
    assert_eq!(evidence.result, failed(ReasonCode::SqlCheck));
    assert_eq!(evidence.sample, ["order_id=3 day=2"]);
    assert_eq!((evidence.scope.as_str(), blamed(&evidence)), ("touched", vec![(vec![11], false, 1)]));
}

/// The engine alone takes unknown for false beside an `OR` and under a `NOT`.
#[tokio::test]
async fn a_row_of_which_nobody_knows_whether_it_is_in_a_set_is_not_outside_of_it() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let known = "(SELECT CASE WHEN order_id = 1 THEN order_id END FROM candidate)";
    for (filter, rows) in [
        ("order_id NOT IN known", 0),
        ("order_id NOT IN known OR order_id > 9", 0),
        ("NOT (order_id IN known AND order_id > 0)", 0),
        ("(order_id IN known) IS NULL", 1),
        ("order_id IN known OR order_id > 9", 1),
    ] {
        let query = format!("SELECT order_id FROM candidate WHERE {}", filter.replace("known", known));
        let evidence = run(&lab, &cars, &sql(&query)).await;
        assert_eq!(measured(&evidence, "rows"), rows.to_string(), "{query}: {evidence:?}");
    }
    could_not_run(
        &run(&lab, &cars, &sql("SELECT 1 FROM candidate WHERE order_id IS DISTINCT FROM 1 AND order_id > 0"))
            .await,
    );
}

#[tokio::test]
async fn a_query_that_is_not_one_select_is_not_run() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    for query in [
        "DELETE FROM candidate",
        "SELECT * INTO other FROM candidate",
        "SELECT no_such_column FROM candidate",
        "SELECT Order_Id FROM candidate",
        "SELECT * FROM secrets",
        "SELECT 1/0 FROM candidate",
    ] {
        could_not_run(&run(&lab, &cars, &sql(query)).await);
    }
    // An empty base is empty, not missing.
    assert_eq!(run(&lab, &cars, &sql("SELECT * FROM base")).await.result, CheckResult::Passed);
}

#[tokio::test]
async fn o16_row_counts_come_from_files_and_never_from_summaries() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[3]), &[]).await;
    let mut lying = lab.table.facts.snapshots.get(a).unwrap().clone();
    for summary in [&["-1"][..], &[]] {
        lying.summary = summary.iter().map(|v| ("total-records".to_owned(), (*v).to_owned())).collect();
        lab.table.facts.snapshots.insert(lying.clone());
        let cars = [car(&lab, 11, Some(base), &[a]).await];
        let toml = "type = \"row-count\"\nmin = 3\nmax = 3\nmin-added = 1\nmax-added = 1\nmax-growth = 1.5";
        let evidence = run(&lab, &cars, toml).await;
        assert_eq!(evidence.result, CheckResult::Passed, "{evidence:?}");
        assert_eq!((measured(&evidence, "rows"), measured(&evidence, "growth")), ("3", "1.5000"));
        assert_eq!(evidence.rows_scanned, 0);
    }
}

#[tokio::test]
async fn row_counts_are_those_of_each_car_against_its_parent() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[2]), &[]).await;
    let b = lab.snapshot(Some(a), &orders(1, &[3, 4]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await, car(&lab, 12, Some(a), &[b]).await];
    let toml = "type = \"row-count\"\nmax-added = 1";
    let found = run_for(&lab, &cars, toml, &[0, 1], Path::new("/"), &Tables::default()).await;
    assert_eq!(found.iter().map(|e| e.candidate).collect::<Vec<_>>(), [a, b]);
    assert_eq!(found[0].result, CheckResult::Passed);
    assert_eq!(found[1].result, failed(ReasonCode::RowCount));
    assert_eq!(found[1].sample, ["added=2 max-added=1"]);
    assert_eq!(blamed(&found[1]), [(vec![12], false, 1)]);
}

#[tokio::test]
async fn e5_a_minimum_guards_an_empty_publish() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1]), orders(2, &[2])].concat(), &[]).await;
    let files = lab.files_of_day(base, 1).await;
    let emptied = lab.snapshot(Some(base), &[], &files).await;
    let cars = [car(&lab, 11, Some(base), &[emptied]).await];
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmin = 1").await;
    assert_eq!((evidence.result, evidence.scope.as_str()), (failed(ReasonCode::RowCount), "no rows"));
    let evidence = run(&lab, &cars, "type = \"row-count\"\nmax = 10").await;
    assert_eq!((evidence.result, evidence.scope.as_str()), (CheckResult::Passed, "no rows"));
}

#[tokio::test]
async fn a_check_that_does_not_fit_into_memory_spills_or_could_not_run() {
    let mut lab = OrdersLab::new().await;
    let ids: Vec<i64> = (0..120_000).collect();
    let base = lab.snapshot(None, &orders(1, &ids), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[77, 119_999, 500_000]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = "type = \"duplicate-key\"\ncolumns = [\"order_id\", \"region\", \"status\"]";
    let tables = Tables::default();
    let view = TrainView {
        table: &lab.table,
        store: &lab.store,
        base: Some(base),
        cars: &cars,
        files: Path::new("/"),
        tables: &tables,
    };
    for memory_bytes in [1, 4, 8, 64].map(|mebibytes| mebibytes * 1024 * 1024) {
        let validator = Validator::new(Arc::new(Engine::with_bounds(2, memory_bytes).unwrap()));
        let evidence = validator.check_train(view, &check(toml), &Digest::new("p"), &[0]).await.remove(0);
        match &evidence.result {
            CheckResult::CouldNotRun { error } => assert!(error.contains("memory"), "{error}"),
            _ => assert_eq!(blamed(&evidence), [(vec![11], true, 2)], "{memory_bytes}"),
        }
    }
}

#[tokio::test]
async fn work_that_takes_too_long_or_crashes_is_an_error() {
    use crate::validate::CheckError;
    use std::time::Duration;
    let engine = Engine::with_bounds(1, TEST_MEMORY_BYTES).unwrap();
    let slow = engine.run(Duration::from_millis(1), std::future::pending::<Result<(), CheckError>>()).await;
    assert!(matches!(slow, Err(CheckError::TooSlow(_))));
    let crash = engine.run(Duration::from_secs(60), async { panic!("a test crash") });
    assert!(matches!(crash.await as Result<(), _>, Err(CheckError::Crashed)));
}
