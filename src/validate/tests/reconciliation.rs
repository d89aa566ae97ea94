use super::*;
use crate::table::test_orders::{Order, order, orders};

/// A check against `upstream.csv`, which is written here, and the evidence for the last car.
async fn reconcile(lab: &OrdersLab, cars: &[CarView], csv: &str, toml: &str) -> Evidence {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("upstream.csv"), csv).unwrap();
    let toml = format!("type = \"reconciliation\"\nupstream = {{ file = \"upstream.csv\" }}\n{toml}");
    let last = cars.len() - 1;
    run_for(lab, cars, &toml, &[last], folder.path(), &Tables::default()).await.remove(0)
}

const COUNT_BY_DAY: &str = "by = [\"day\"]\ncount = \"n\"";
const PRICE_BY_DAY: &str = "by = [\"day\"]\nsums = { price = \"total\" }";

fn mode(mode: &str, rest: &str) -> String {
    format!("mode = \"{mode}\"\n{rest}")
}

#[tokio::test]
async fn per_request_compares_what_the_request_adds() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3]), &[]).await;
    let a = lab.snapshot(Some(base), &[orders(1, &[4]), orders(2, &[5, 6])].concat(), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = mode("per-request", COUNT_BY_DAY);

    let good = reconcile(&lab, &cars, "day,n\n1,1\n2,2\n3,99\n", &toml).await;
    assert_eq!(good.result, CheckResult::Passed);
    assert_eq!((measured(&good, "groups"), good.rows_scanned), ("2", 3));

    let bad = reconcile(&lab, &cars, "day,n\n1,1\n2,3\n", &toml).await;
    assert_eq!(bad.result, failed(ReasonCode::Reconciliation));
    assert_eq!(bad.sample, ["day=2 count=2 expected=3"]);
    assert_eq!(blamed(&bad), [(vec![11], false, 1)]);

    let unknown_day = reconcile(&lab, &cars, "day,n\n1,1\n", &toml).await;
    assert_eq!(unknown_day.sample, ["day=2 count=2 expected=null"]);
}

#[tokio::test]
async fn at_most_lets_shards_arrive_and_stops_the_excess() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let a = lab.snapshot(Some(base), &orders(1, &[3]), &[]).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = mode("at-most", COUNT_BY_DAY);
    assert_eq!(reconcile(&lab, &cars, "day,n\n1,5\n", &toml).await.result, CheckResult::Passed);
    assert_eq!(reconcile(&lab, &cars, "day,n\n1,3\n", &toml).await.result, CheckResult::Passed);
    let over = reconcile(&lab, &cars, "day,n\n1,2\n", &toml).await;
    assert_eq!(over.sample, ["day=1 count=3 expected=2"]);
    assert_eq!(blamed(&over), [(vec![11], true, 1)]);
}

#[tokio::test]
async fn at_most_thanks_a_request_that_removes_from_an_excess() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &orders(1, &[1, 2, 3, 4]), &[]).await;
    let files = lab.files_of_day(base, 1).await;
    let a = lab.snapshot(Some(base), &orders(1, &[1, 2, 3]), &files).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = mode("at-most", COUNT_BY_DAY);
    assert_eq!(reconcile(&lab, &cars, "day,n\n1,2\n", &toml).await.result, CheckResult::Passed);
    let strict = reconcile(&lab, &cars, "day,n\n1,2\n", &format!("compare = \"strict\"\n{toml}")).await;
    assert_eq!(strict.result, failed(ReasonCode::Reconciliation));
}

#[tokio::test]
async fn when_complete_looks_at_touched_groups_only() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1]), orders(2, &[2, 3])].concat(), &[]).await;
    let day_2 = lab.files_of_day(base, 2).await;
    let a = lab.snapshot(Some(base), &orders(2, &[2, 3, 4]), &day_2).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = mode("when-complete", COUNT_BY_DAY);
    // Day 1 is wrong, but it was not touched.
    assert_eq!(reconcile(&lab, &cars, "day,n\n1,100\n2,3\n", &toml).await.result, CheckResult::Passed);
    let short = reconcile(&lab, &cars, "day,n\n1,1\n2,4\n", &toml).await;
    assert_eq!(short.sample, ["day=2 count=3 expected=4"]);
}

#[tokio::test]
async fn when_complete_misses_a_day_that_was_removed() {
    let mut lab = OrdersLab::new().await;
    let base = lab.snapshot(None, &[orders(1, &[1]), orders(2, &[2])].concat(), &[]).await;
    let day_2 = lab.files_of_day(base, 2).await;
    let a = lab.snapshot(Some(base), &[], &day_2).await;
    let cars = [car(&lab, 11, Some(base), &[a]).await];
    let toml = mode("when-complete", &format!("{COUNT_BY_DAY}\nsums = {{ price = \"total\" }}"));
    let gone = reconcile(&lab, &cars, "day,n,total\n1,1,1.00\n2,1,1.00\n", &toml).await;
    assert_eq!(gone.sample, ["day=2 count=0 expected=1 sum(price)=0 expected=1"]);
}

#[tokio::test]
async fn o15_a_doubles_that_cancel_pass_within_an_absolute_bound() {
    for (values, passes) in
        [([1e8, -1e8, 0.1, -0.1], true), ([0.1, 1e8, -0.1, -1e8], true), ([1e8, -1e8, 0.1, -0.12], false)]
    {
        let mut lab = OrdersLab::new().await;
        let rows: Vec<Order> = values.iter().map(|v| Order { amount: Some(*v), ..order(1) }).collect();
        let a = lab.snapshot(None, &rows, &[]).await;
        let cars = [car(&lab, 11, None, &[a]).await];
        let toml = mode("per-request", "by = [\"day\"]\nsums = { amount = \"total\" }\nabsolute = 0.01");
        let evidence = reconcile(&lab, &cars, "day,total\n1,0\n", &toml).await;
        assert_eq!(evidence.result == CheckResult::Passed, passes, "{values:?}: {evidence:?}");
    }
}

#[tokio::test]
async fn a_relative_tolerance_refers_to_absolute_values() {
    let mut lab = OrdersLab::new().await;
    let rows: Vec<Order> = [1000.0, -999.0].iter().map(|v| Order { amount: Some(*v), ..order(1) }).collect();
    let a = lab.snapshot(None, &rows, &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = mode("per-request", "by = [\"day\"]\nsums = { amount = \"total\" }\nrelative = 0.001");
    // The sum is 1, the sum of absolute values 1999: a difference of 1.9 is within 0.001 of that.
    assert_eq!(reconcile(&lab, &cars, "day,total\n1,2.9\n", &toml).await.result, CheckResult::Passed);
    assert!(matches!(
        reconcile(&lab, &cars, "day,total\n1,3.1\n", &toml).await.result,
        CheckResult::Failed { .. }
    ));
}

#[tokio::test]
async fn without_a_tolerance_doubles_may_differ_by_their_rounding_only() {
    let mut lab = OrdersLab::new().await;
    // 0.1 added ten times is not 1 in binary.
    let rows: Vec<Order> = (0..10).map(|id| Order { amount: Some(0.1), ..order(id) }).collect();
    let a = lab.snapshot(None, &rows, &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = mode("per-request", "by = [\"day\"]\nsums = { amount = \"total\" }");
    assert_eq!(reconcile(&lab, &cars, "day,total\n1,1\n", &toml).await.result, CheckResult::Passed);
    assert!(matches!(
        reconcile(&lab, &cars, "day,total\n1,1.00000001\n", &toml).await.result,
        CheckResult::Failed { .. }
    ));
}

#[tokio::test]
async fn o15_b_a_decimal_sum_past_its_precision_blocks() {
    let mut lab = OrdersLab::new().await;
    let nines = 10i128.pow(38) - 1;
    let rows = [Order { price: Some(nines), ..order(1) }, Order { price: Some(nines), ..order(2) }];
    let a = lab.snapshot(None, &rows, &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let evidence = reconcile(&lab, &cars, "day,total\n1,1\n", &mode("per-request", PRICE_BY_DAY)).await;
    assert!(could_not_run(&evidence).contains("'price'"), "{evidence:?}");
}

#[tokio::test]
async fn decimals_are_compared_exactly() {
    let mut lab = OrdersLab::new().await;
    let rows =
        [Order { price: Some(900_719_925_474_099_300), ..order(1) }, Order { price: Some(1), ..order(2) }];
    let a = lab.snapshot(None, &rows, &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = mode("per-request", PRICE_BY_DAY);
    let exact = reconcile(&lab, &cars, "day,total\n1,9007199254740993.01\n", &toml).await;
    assert_eq!(exact.result, CheckResult::Passed);
    // Doubles do not see this cent.
    let off = reconcile(&lab, &cars, "day,total\n1,9007199254740993.02\n", &toml).await;
    assert_eq!(off.sample, ["day=1 sum(price)=9007199254740993.01 expected=9007199254740993.02"]);
}

#[tokio::test]
async fn null_totals_agree_with_nothing() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &[Order { price: None, ..order(1) }], &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = mode("per-request", PRICE_BY_DAY);
    let evidence = reconcile(&lab, &cars, "day,total\n1,\n", &toml).await;
    assert_eq!(evidence.sample, ["day=1 sum(price)=null expected=null"]);
}

#[tokio::test]
async fn an_iceberg_table_is_an_upstream_at_its_pinned_head() {
    let mut lab = OrdersLab::new().await;
    let mut totals = lab.another("shop.totals").await;
    // One row a day: the expected count in order_id, the expected sum in price.
    let pin = lab.snapshot_of(&mut totals, None, &[Order { price: Some(200), ..order(2) }], &[]).await;
    let a = lab.snapshot(None, &orders(1, &[1, 2]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = "type = \"reconciliation\"\nmode = \"when-complete\"\nupstream = { table = \"shop.totals\" }\n\
        by = [\"day\"]\ncount = \"order_id\"\nsums = { price = \"price\", order_id = \"amount\" }\nabsolute = 2";
    let tables = Tables(Some((totals, pin)));
    let evidence = run_for(&lab, &cars, toml, &[0], Path::new("/"), &tables).await.remove(0);
    assert_eq!(evidence.result, CheckResult::Passed, "{evidence:?}");
    assert_eq!(measured(&evidence, "shop.totals"), format!("snapshot {pin}"));
}

#[tokio::test]
async fn an_upstream_that_cannot_be_used_is_not_a_pass() {
    let mut lab = OrdersLab::new().await;
    let a = lab.snapshot(None, &orders(1, &[1]), &[]).await;
    let cars = [car(&lab, 11, None, &[a]).await];
    let toml = mode("per-request", COUNT_BY_DAY);
    let column = reconcile(&lab, &cars, "day,rows\n1,1\n", &toml).await;
    assert!(could_not_run(&column).contains("no column 'n'"));
    let text = reconcile(&lab, &cars, "day,n\n1,many\n", &toml).await;
    could_not_run(&text);
    let name = mode("per-request", "by = [\"day\"]\nsums = { region = \"n\" }");
    assert!(could_not_run(&reconcile(&lab, &cars, "day,n\n1,1\n", &name).await).contains("'region'"));
    let absent = format!("type = \"reconciliation\"\nupstream = {{ file = \"absent.csv\" }}\n{toml}");
    let absent = run_for(&lab, &cars, &absent, &[0], Path::new("/nowhere"), &Tables::default()).await;
    assert!(could_not_run(&absent[0]).contains("/nowhere/absent.csv"));
}
